"""Write SOMA experiments with TileDB's own library, laid out as tiledbsoma lays them out. Does not use gpuload."""

from __future__ import annotations

import functools
import itertools
import json
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd
import pytest

from tests.writers import cells_frame, counts, genes_frame

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from scipy.sparse import csr_matrix

MAX = 2**63 - 2 - 4096
"""As tiledbsoma, leave room in the domain for tiles, so that it can grow."""

FRAMES = {"obs_id": cells_frame, "var_id": genes_frame}
"""The tables of the other writers, by the name of their index."""

ZSTD, SHUFFLED = ("zstd",), ("byteshuffle", "zstd")


def library() -> Any:
    """Return tiledb, or skip the test."""
    return pytest.importorskip("tiledb")


def filters(names: Sequence[Any]) -> Any:
    """Return a filter list; a filter is a name, or a name and its options."""
    tiledb = library()
    known = {
        "gzip": tiledb.GzipFilter,
        "zstd": tiledb.ZstdFilter,
        "lz4": tiledb.LZ4Filter,
        "rle": tiledb.RleFilter,
        "double-delta": tiledb.DoubleDeltaFilter,
        "delta": tiledb.DeltaFilter,
        "bit-width": tiledb.BitWidthReductionFilter,
        "positive-delta": tiledb.PositiveDeltaFilter,
        "bitshuffle": tiledb.BitShuffleFilter,
        "byteshuffle": tiledb.ByteShuffleFilter,
        "float-scale": tiledb.FloatScaleFilter,
        "xor": tiledb.XORFilter,
        "dictionary": tiledb.DictionaryFilter,
        "bzip2": tiledb.Bzip2Filter,
        "md5": tiledb.ChecksumMD5Filter,
        "none": tiledb.NoOpFilter,
    }
    made = [known[name]() if isinstance(name, str) else known[name[0]](**name[1]) for name in names]
    return tiledb.FilterList(made)


def write_group(path: Path) -> Path:
    """Write a group without members, and return its path."""
    library().Group.create(str(path))
    return path


def add_members(path: Path, *names: str) -> None:
    """Add to a group what is in its folder."""
    with library().Group(str(path), "w") as group:
        for name in names:
            group.add(uri=name, name=name, relative=True)


def is_text(dtype: Any) -> bool:
    """Return whether a column of this type holds text: pandas 3 has a type of its own for it."""
    return pd.api.types.is_object_dtype(dtype) or isinstance(dtype, pd.StringDtype)


def note_index(path: Path, name: str | None) -> None:
    """Note in a table of cells or genes what the AnnData's index was named, as tiledbsoma does."""
    with library().open(str(path), "w") as array:
        array.meta["soma_dataframe_original_index_name"] = json.dumps(name)


def write_frame(
    path: Path,
    frame: pd.DataFrame,
    names: str,
    *,
    text: Sequence[Any] = ZSTD,
    numbers: Sequence[Any] = ZSTD,
    offsets: Sequence[Any] = ("double-delta", "bit-width", "zstd"),
    capacity: int = 50,
    allows_duplicates: bool = False,
    parts: Sequence[int] = (),
) -> None:
    """Write a table of cells or genes.

    Parameters
    ----------
    frame
        The table; its index becomes the column `names`.
    text, numbers, offsets
        Filters of text, of numbers, and of the offsets of text.
    parts
        Rows at which another fragment begins.
    """
    tiledb = library()
    attributes, enumerations, values = [], [], {}
    for name, column in {names: frame.index.to_series(), **frame}.items():
        kind: dict[str, Any] = {}
        if isinstance(column.dtype, pd.CategoricalDtype):
            words = column.cat.categories
            known = list(words) if is_text(words.dtype) else np.asarray(words)
            enumerations.append(tiledb.Enumeration(f"{name}_words", bool(column.cat.ordered), known))
            codes = column.cat.codes.to_numpy(dtype=np.int32)
            values[name] = np.array([None if c < 0 else int(c) for c in codes], dtype=object)
            kind = {"dtype": np.int32, "nullable": True, "enum_label": f"{name}_words"}
        elif column.dtype == object and isinstance(column.iloc[0], bytes):
            kind = {"dtype": "blob", "var": True}
            values[name] = np.asarray(column, dtype=object)
        elif is_text(column.dtype):
            kind = {"dtype": "U0", "var": True, "nullable": True}
            values[name] = column.astype(object).where(column.notna(), None).to_numpy()
        elif pd.api.types.is_extension_array_dtype(column.dtype):
            dtype = np.bool_ if column.dtype == "boolean" else column.dtype.numpy_dtype
            values[name] = np.array([None if v is pd.NA else v for v in column], dtype=object)
            kind = {"dtype": dtype, "nullable": True}
        else:
            values[name] = column.to_numpy()
            kind = {"dtype": column.dtype}
        is_var = kind.get("var", False)
        of_floats = [one for one in numbers if one in ("zstd", "gzip", "lz4", "byteshuffle", "bitshuffle")]
        own = text if is_var else numbers if np.dtype(kind["dtype"]).kind in "iu" else of_floats
        attributes.append(tiledb.Attr(name=name, filters=filters(own), **kind))
    dim = tiledb.Dim("soma_joinid", domain=(0, MAX), tile=4096, dtype=np.int64, filters=filters(numbers))
    schema = tiledb.ArraySchema(
        tiledb.Domain(dim),
        attributes,
        sparse=True,
        capacity=capacity,
        allows_duplicates=allows_duplicates,
        offsets_filters=filters(offsets),
        enums=enumerations,
    )
    tiledb.Array.create(str(path), schema)
    edges = [0, *parts, len(frame)]
    for k, (low, high) in enumerate(itertools.pairwise(edges)):
        if low < high:
            write_cells(path, [np.arange(low, high)], {n: v[low:high] for n, v in values.items()}, k + 1)


@functools.cache
def _files_of_frame(names: str, n: int) -> dict[Path, bytes | None]:
    """Return what the folder of a table of the other writers contains; None is a folder."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "frame"
        write_frame(path, FRAMES[names](n), names)
        return {p.relative_to(path): p.read_bytes() if p.is_file() else None for p in sorted(path.rglob("*"))}


def copy_frame(path: Path, names: str, n: int) -> None:
    """Write a table of the other writers, of n cells or genes: a copy of one, as TileDB takes longer."""
    path.mkdir()
    for name, content in _files_of_frame(names, n).items():
        if content is None:
            (path / name).mkdir()
        else:
            (path / name).write_bytes(content)


def write_cells(path: Path, coordinates: Sequence[Any], values: Mapping[str, Any], when: int | None = None) -> None:
    """Write cells of a sparse array as a fragment, of a given time or of now."""
    tiledb = library()
    with tiledb.open(str(path), "w", timestamp=when) as array:
        array[tuple(coordinates)] = dict(values)


def write_sparse(
    path: Path,
    X: csr_matrix,
    *,
    tiles: tuple[int, int] = (16, 4096),
    capacity: int = 100,
    rows: Sequence[Any] = ZSTD,
    columns: Sequence[Any] = ZSTD,
    values: Sequence[Any] = ZSTD,
    orders: tuple[str, str] = ("row-major", "row-major"),
    allows_duplicates: bool = False,
    parts: Sequence[int] = (),
    domain: tuple[int, int] = (MAX + 1, MAX + 1),
) -> None:
    """Write a sparse matrix.

    Parameters
    ----------
    tiles, orders
        Tiles of its space; order of cells in a tile, and of tiles.
    rows, columns, values
        Filters.
    parts
        Rows at which another fragment begins; descending ones make fragments that are not in the order of rows.
    domain
        Most rows and columns that it may have.
    """
    tiledb = library()
    dims = [
        tiledb.Dim(f"soma_dim_{k}", domain=(0, n - 1), tile=tile, dtype=np.int64, filters=filters(own))
        for k, (n, tile, own) in enumerate(zip(domain, tiles, (rows, columns), strict=True))
    ]
    schema = tiledb.ArraySchema(
        tiledb.Domain(*dims),
        [tiledb.Attr(name="soma_data", dtype=X.dtype, filters=filters(values))],
        sparse=True,
        capacity=capacity,
        allows_duplicates=allows_duplicates,
        cell_order=orders[0],
        tile_order=orders[1],
    )
    tiledb.Array.create(str(path), schema)
    edges = sorted({0, *parts, X.shape[0]})
    pieces = list(itertools.pairwise(edges))
    if list(parts) != sorted(parts):
        pieces.reverse()
    for k, (low, high) in enumerate(pieces):
        part = X[low:high].tocoo()
        if part.nnz:
            at = [(part.row + low).astype(np.int64), part.col.astype(np.int64)]
            write_cells(path, at, {"soma_data": part.data}, k + 1)


def write_dense(
    path: Path,
    X: np.ndarray,
    *,
    tiles: tuple[int, int] = (16, 20),
    values: Sequence[Any] = ZSTD,
    parts: Sequence[int] = (),
    domain: tuple[int, int] | None = None,
) -> None:
    """Write a dense matrix; parameters as for `write_sparse`."""
    tiledb = library()
    domain = domain or (X.shape[0], X.shape[1])
    dims = [
        tiledb.Dim(f"soma_dim_{k}", domain=(0, n - 1), tile=min(tile, n), dtype=np.int64)
        for k, (n, tile) in enumerate(zip(domain, tiles, strict=True))
    ]
    attribute = tiledb.Attr(name="soma_data", dtype=X.dtype, filters=filters(values))
    tiledb.Array.create(str(path), tiledb.ArraySchema(tiledb.Domain(*dims), [attribute], sparse=False))
    edges = [0, *parts, X.shape[0]]
    for k, (low, high) in enumerate(itertools.pairwise(edges)):
        with tiledb.open(str(path), "w", timestamp=k + 1) as array:
            array[low:high, : X.shape[1]] = np.ascontiguousarray(X[low:high])


def write_experiment(
    path: Path,
    X: Mapping[str, Any] | None = None,
    *,
    obs: pd.DataFrame | None = None,
    var: pd.DataFrame | None = None,
    obsm: Mapping[str, np.ndarray] | None = None,
    raw: csr_matrix | None = None,
    measurement: str = "RNA",
    frames: Mapping[str, Any] | None = None,
    **storage: Any,
) -> Path:
    """Write an experiment, and return its path.

    Parameters
    ----------
    X
        Layers by name; None is one of counts, ``"data"``.
    obs, var
        Tables of cells and genes; None are those of the other writers.
    obsm
        Embeddings.
    raw
        The layer of a measurement ``"raw"``.
    frames
        Passed to `write_frame`.
    storage
        Passed to `write_sparse`, or to `write_dense` for dense layers.
    """
    layers = {"data": counts()} if X is None else X
    n_obs = next(iter(layers.values())).shape[0]
    write_group(path)

    def write_table(place: Path, frame: pd.DataFrame | None, names: str, n: int) -> None:
        if frame is None and not frames:
            copy_frame(place, names, n)
        else:
            write_frame(place, FRAMES[names](n) if frame is None else frame, names, **(frames or {}))

    write_table(path / "obs", obs, "obs_id", n_obs)
    measurements = {measurement: layers, **({} if raw is None else {"raw": {"data": raw}})}
    write_group(path / "ms")
    for name, own in measurements.items():
        folder = write_group(path / "ms" / name)
        n_vars = next(iter(own.values())).shape[1]
        write_table(folder / "var", var if name == measurement else None, "var_id", n_vars)
        write_group(folder / "X")
        for layer, values in own.items():
            write = write_dense if isinstance(values, np.ndarray) else write_sparse
            write(folder / "X" / layer, values, **storage)
        add_members(folder / "X", *own)
        add_members(folder, "var", "X")
    if obsm:
        folder = write_group(path / "ms" / measurement / "obsm")
        for name, values in obsm.items():
            write_dense(folder / name, values)
        add_members(folder, *obsm)
        add_members(folder.parent, "obsm")
    add_members(path / "ms", *measurements)
    add_members(path, "obs", "ms")
    return path
