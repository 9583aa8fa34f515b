"""``gpuload inspect``: how a file is stored, and which settings suit it."""

from __future__ import annotations

import os
from contextlib import closing
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import numpy as np

from gpuload.alignment import check_join
from gpuload.cli import advice, figure, settings, text
from gpuload.errors import PlanError, StoreError
from gpuload.machine import available_memory
from gpuload.program import table
from gpuload.source import saving

if TYPE_CHECKING:
    import argparse

    from numpy.typing import NDArray

    from gpuload.formats import Join
    from gpuload.layout import ArrayLayout, Filter
    from gpuload.outlook import Outlook
    from gpuload.store import Matrix, ObsColumn, Store

QUANTILES = (0.0, 0.25, 0.5, 0.75, 1.0)

SLICE = 1 << 20
"""Cells gone through at a time: there may be 100 million."""

EPILOG = """\
Only metadata is read, plus a few fetches to calibrate speed on this machine: a terabyte file takes seconds. If their
values are not counts, for which a transform is meant, the advice says so.

"decoded per wanted" is the number of bytes in the chunks that a fetch touches per byte of the cells it returns: HDF5
stores an array in chunks, and a chunk is inflated from its start even for one cell. The entropy of a label (--label)
is that of the minibatches the loader would return from this very file, as the labels lie in it, compared with true
random order.

"cells/s" comes from a cost model, not from timing: the bytes that planned fetches read and inflate (once every checksum
has been verified) and the cells gathered, each at the engine's speed on this machine's CPU, over all threads. It does
not account for disk speed; gpuload tune times real reads.

examples:
  gpuload inspect atlas.h5ad
  gpuload inspect atlas.h5ad --label donor --batch-size 256
  gpuload inspect atlas.h5ad --label drug --min-entropy 0.98 --plot drug.png
  gpuload inspect plate1.h5ad plate2.h5ad --layer counts --json
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add this command's options."""
    parser.epilog = EPILOG
    text.add_path_arguments(parser)
    settings.add_join_argument(parser)
    settings.add_batch_size_argument(parser)
    text.add_min_entropy_argument(parser)
    parser.add_argument(
        "--plot",
        type=text.picture,
        metavar="FILE.png",
        help="plot the label along the file, cells per chunk, and entropy against cells/s; requires --label",
    )
    text.add_output_arguments(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Run the command."""
    from gpuload.formats.addresses import at_addresses

    if args.plot and not args.label:
        raise PlanError("--plot draws a label's entropy: give --label too.")
    least = text.min_entropy(args)
    text.check_outputs(args.paths, args.plot)
    if args.plot:
        figure.check_matplotlib("the plot")
    labels, join = (args.label,) if args.label else (), check_join(settings.join_of(args))
    paths = at_addresses(args.paths, None, None)  # what they find is kept for the length of the command
    store, kinds = _opened(paths, args.layer, labels, join)
    with closing(store):
        if args.plot and not store.n_obs:
            raise PlanError(f"--plot {args.plot}: {args.paths[0]} has no cells to plot; leave it out.")
        text.say_of_compiling(is_quiet=args.quiet)
        found = describe(store, paths, args.layer, join, kinds)
        advised = advice.advise(store, args.batch_size, args.label, available_memory(), least, args.layer)
        if args.plot:
            per_chunk = np.diff(store.chunk_edges())
            column, form = store.obs[args.label], text.form_of(args.plot)
            with saving(args.plot) as file:
                file.write(figure.draw_inspection(advised, args.label, column, per_chunk, form))
    if args.json:
        candidates = [{**asdict(c), "is_whole_file": np.isposinf(c.n_blocks)} for c in advised.candidates]
        text.print_json({**found, "advice": {**asdict(advised), "candidates": candidates, "label": args.label}})
    else:
        print(_report(found, advised, args.label))
        text.print_saved(args.plot)
    return 0


def _opened(paths: list[str], layer: str, labels: tuple[str, ...], join: Join) -> tuple[Store, dict[str, str] | None]:
    """Open files with labels; return also what `obs_kinds` does, where that takes no second opening."""
    from gpuload.formats import open_store
    from gpuload.formats.recognise import obs_columns

    if len(paths) == 1:
        try:
            names = obs_columns(paths[0])
            store = open_store(paths, layer=layer, obs=tuple(dict.fromkeys((*names, *labels))), join=join)
            return store, {name: _kind(store.obs[name]) for name in names}
        except StoreError:  # perhaps one of the columns has an unsupported type, and the label does not
            pass
    return open_store(paths, layer=layer, obs=labels, join=join), None


def describe(
    store: Store, paths: list[str], layer: str, join: Join = None, kinds: dict[str, str] | None = None
) -> dict[str, Any]:
    """Return the facts about a file's matrix and obs."""
    matrices = zip(store.paths, store.matrices, strict=True)
    arrays = [_describe_array(layout, matrix, path) for path, matrix in matrices for layout in matrix.layouts]
    stored, decoded = (sum(a[k] for a in arrays) for k in ("stored_nbytes", "decoded_nbytes"))
    return {
        "paths": [os.fspath(p) for p in paths],
        "file_nbytes": sum(_nbytes(os.fspath(p)) for p in paths),
        "layer": layer,
        "kind": store.kind,
        "n_obs": store.n_obs,
        "n_vars": store.n_vars,
        "row_shape": list(store.row_shape),
        "nnz_per_cell": _nnz_per_cell(store),
        "stored_nbytes": stored,
        "decoded_nbytes": decoded,
        "ratio": decoded / stored if stored else None,
        "arrays": arrays,
        "obs": obs_kinds(os.fspath(paths[0]), layer, join) if kinds is None else kinds,
        "obs_of": os.fspath(paths[0]),
        "join": join,
    }


def _nbytes(path: str) -> int:
    """Return the bytes of all that a path stands for: a file, a folder, what matches; of a modality, its file."""
    from gpuload.formats.addresses import as_address
    from gpuload.formats.recognise import expand, nbytes_at

    address = as_address(path)
    if address is not None and not address.is_pattern:
        return nbytes_at(address)
    at = [(name, as_address(name)) for name in expand(path)]
    return sum(_nbytes_of_one(name) if address is None else nbytes_at(address) for name, address in at)


def _nbytes_of_one(path: str) -> int:
    """Return the size in bytes of a file, or of all files of a folder, on disk."""
    while path and not os.path.exists(path):  # a modality of a file
        path = os.path.dirname(path)
    if os.path.isdir(path):
        return sum(os.path.getsize(os.path.join(folder, name)) for folder, _, names in os.walk(path) for name in names)
    return os.path.getsize(path)


def _nnz_per_cell(store: Store) -> dict[str, Any] | None:
    """Return mean, spread and quantiles of the stored values per cell; None for a dense matrix or no cells."""
    if store.kind == "dense" or not store.n_obs:
        return None
    nnz, n_cells = _counted_lengths(store)
    mean = float(nnz @ n_cells / store.n_obs)
    at = np.array(QUANTILES) * (store.n_obs - 1)
    low, high = (nnz[np.searchsorted(np.cumsum(n_cells), rank, side="right")] for rank in (np.floor(at), np.ceil(at)))
    quantiles = low + (high - low) * (at - np.floor(at))
    return {
        "mean": mean,
        "sd": float(np.sqrt(np.square(nnz - mean) @ n_cells / store.n_obs)),
        "quantiles": dict(zip(map(str, QUANTILES), quantiles.tolist(), strict=True)),
        "empty_cells": int(n_cells[nnz == 0].sum()),
    }


def _counted_lengths(store: Store) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return the numbers of stored values that cells have, ascending, and how many cells have each; by slices."""
    found = []
    for matrix in store.matrices:
        for start in range(0, matrix.n_rows, SLICE):
            lengths: NDArray[np.int64] = np.diff(matrix.indptr[start : start + SLICE + 1])  # type: ignore[union-attr]
            found.append(np.unique(lengths, return_counts=True))
    nnz: NDArray[np.int64] = np.unique(np.concatenate([values for values, _ in found]))
    n_cells = np.zeros(nnz.size, dtype=np.int64)
    for values, counts in found:
        n_cells[np.searchsorted(nnz, values)] += counts
    return nnz, n_cells


def _describe_array(layout: ArrayLayout, matrix: Matrix, path: str) -> dict[str, Any]:
    decoded = int(np.prod(layout.shape)) * layout.dtype.itemsize
    per_cell = layout.shape[0] / max(1, matrix.n_rows)
    return {
        "file": path,
        "name": layout.name,
        "dtype": str(layout.dtype),
        "shape": list(layout.shape),
        "codec": codec(layout.filters),
        "chunk_shape": list(layout.chunk_shape),
        "n_chunks": int(layout.chunk_offset.size),
        "cells_per_chunk": layout.chunk_shape[0] / per_cell if per_cell else None,
        "stored_nbytes": int(layout.chunk_nbytes.sum()),
        "decoded_nbytes": decoded,
    }


def codec(filters: tuple[Filter, ...]) -> str:
    """Return filters in terms that users know: ``"shuffle + gzip 4"``."""
    return " + ".join(_filter(f) for f in filters) or "none"


def _filter(step: Filter) -> str:
    if step.name == "deflate":
        return f"gzip {step.values[0]}" if step.values else "gzip"
    return f"{step.name} {step.values[0]}" if step.name == "zstd" and step.values else step.name


def obs_kinds(path: str, layer: str, join: Join) -> dict[str, str]:
    """Return the obs columns of a path, and the type that each is returned as."""
    from gpuload.formats.frames import columns_by_part
    from gpuload.formats.recognise import expand, obs_columns

    names = tuple(obs_columns(path))
    if (together := _delivered(path, layer, join, names)) is not None:
        return together
    files = expand(path)
    kinds: dict[str, str] = {}
    parts = [set(known) for file in files for _, known in columns_by_part(file)]
    for name in names:
        if found := _delivered(path, layer, join, (name,)):
            kinds |= found
        elif not all(name in known for known in parts):
            kinds[name] = "in some of its data sets only"
        elif len(files) > 1 and all(_delivered(file, layer, join, (name,)) for file in files):
            kinds[name] = "cannot be delivered: its type differs between files"
        else:
            kinds[name] = "cannot be delivered: not one category, text, number or boolean per cell"
    return kinds


def _delivered(path: str, layer: str, join: Join, names: tuple[str, ...]) -> dict[str, str] | None:
    """Return how obs columns are delivered; None if one of them cannot be."""
    from gpuload.formats import open_store

    try:
        with closing(open_store(path, layer=layer, obs=names, join=join)) as store:
            return {name: _kind(store.obs[name]) for name in names}
    except StoreError:
        return None


def _kind(column: ObsColumn) -> str:
    """Return the type of a column, and how many cells have no value: a loss function refuses the code -1."""
    values: Any = column.values
    if column.categories is None:
        kind = str(values.dtype)
        is_missing = np.isnan(values) if values.dtype.kind == "f" else np.zeros(0, dtype=bool)
    else:
        kind = f"{text.count(column.categories.size, 'category', 'categories')}, delivered as int64 codes"
        is_missing = values < 0
    n_missing = int(is_missing.sum())
    return f"{kind}; {n_missing:,} missing" if n_missing else kind


def _report(found: dict[str, Any], advised: advice.Advice, label: str | None) -> str:
    of_file = f" of {found['obs_of']}" if len(found["paths"]) > 1 else ""  # others may have more categories
    parts = [
        ", ".join(found["paths"]),
        text.facts(_general(found)),
        table(
            ("array", "dtype", "codec", "chunk", "cells a chunk", "stored", "decoded", "ratio"),
            [_array_row(a, len(found["paths"]) > 1) for a in found["arrays"]],
        ),
        f"obs columns{of_file}\n" + text.facts(found["obs"].items()) if found["obs"] else f"obs columns{of_file}: none",
        *_choices(advised, label),
        "advice\n" + "\n".join(f"  {reason}" for reason in advised.reasons),
        _call(found, advised),
    ]
    return "\n\n".join(parts)


def _general(found: dict[str, Any]) -> list[tuple[str, str]]:
    pairs = [
        ("matrix", f"{found['layer']}, {'CSR' if found['kind'] == 'csr' else 'dense'}"),
        ("cells", text.number(found["n_obs"])),
        ("genes", text.number(found["n_vars"]))
        if len(found["row_shape"]) == 1
        else ("array of a cell", " x ".join(map(text.number, found["row_shape"]))),
    ]
    nnz = found["nnz_per_cell"]
    if nnz is not None:
        low, q25, q50, q75, high = (text.number(round(v)) for v in nnz["quantiles"].values())
        mean, sd = text.number(nnz["mean"]), text.number(nnz["sd"])
        pairs.append(("stored values a cell", f"{mean} +- {sd}; quartiles {q25}, {q50}, {q75}; {low} to {high}"))
        if nnz["empty_cells"]:
            pairs.append(("empty cells", text.number(nnz["empty_cells"])))
    ratio = f", {found['ratio']:.1f} times smaller than decoded" if found["ratio"] else ""
    pairs.append(
        ("matrix on disk", f"{text.size(found['stored_nbytes'])}{ratio} (files: {text.size(found['file_nbytes'])})")
    )
    return pairs


def _array_row(array: dict[str, Any], is_many: bool) -> tuple[str, ...]:
    stored, decoded, cells = array["stored_nbytes"], array["decoded_nbytes"], array["cells_per_chunk"]
    return (
        f"{array['file']}:{array['name']}" if is_many else array["name"],
        array["dtype"],
        array["codec"],
        " x ".join(f"{n:,}" for n in array["chunk_shape"]),
        text.number(cells) if cells else "-",
        text.size(stored),
        text.size(decoded),
        f"{decoded / stored:.1f}" if stored else "-",
    )


def _choices(advised: advice.Advice, label: str | None) -> list[str]:
    """Return the table of block sizes for the advised fetch factor, and one of the other fetch factors."""
    header = ["block_size", "cells a block", "blocks a fetch", "decoded per wanted"]
    header += [f"{label} entropy, bits", "of random"] if label else []
    title, tables = f"block sizes, with batch_size={advised.batch_size} and fetch_factor=", []
    others = sorted({c.fetch_factor for c in advised.candidates} - {advised.fetch_factor}, reverse=True)
    for factor in (advised.fetch_factor, *others):
        rows = [_choice_row(c, advised, label) for c in advised.candidates if c.fetch_factor == factor]
        tables.append(f"{title}{factor}\n" + table((*header, "cells/s, modelled"), rows))
        title = "the same with fetch_factor="
    return tables


def _choice_row(choice: Outlook, advised: advice.Advice, label: str | None) -> tuple[str, ...]:
    is_advised = (choice.block_size, choice.fetch_factor) == (advised.block_size, advised.fetch_factor)
    n_blocks = choice.n_blocks
    row = [
        f"{choice.block_size}{' <-' if is_advised else ''}",
        text.number(round(choice.cells_per_block, 1)),
        "all" if np.isinf(n_blocks) else text.number(round(n_blocks) if n_blocks >= 10 else n_blocks),
        f"{choice.amplification:.2f}",
    ]
    if label:
        random = advised.random_entropy_bits
        of_random = f"{100 * choice.entropy_bits / random:.1f} %" if random > 0 else "-"
        row += [text.bits(choice.entropy_bits), of_random]
    return (*row, text.number(round(choice.cells_per_s)) if np.isfinite(choice.cells_per_s) else "-")


def _call(found: dict[str, Any], advised: advice.Advice) -> str:
    paths = repr(found["paths"][0]) if len(found["paths"]) == 1 else repr(found["paths"])
    join = found["join"]
    layer = "" if found["layer"] == "X" else f", layer={found['layer']!r}"
    layer += "" if join is None else f", join={join!r}" if isinstance(join, str) else ", join=[...]"
    sizes = f"batch_size={advised.batch_size}, block_size={advised.block_size!r}, fetch_factor={advised.fetch_factor}"
    return f"  gpuload.open_loader({paths}, {sizes}{layer})"
