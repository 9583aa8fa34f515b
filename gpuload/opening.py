"""Helpers of `gpuload.open_loader`: they check its settings, and bind them to the cells once the files are open."""

from __future__ import annotations

import logging
import os
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from gpuload import machine
from gpuload.checks import as_array, check_bool, check_order
from gpuload.concat import concat_column
from gpuload.errors import PlanError, StoreError, listing, shown
from gpuload.plan import DEFAULT_BLOCK_SIZE, chunks_per_block
from gpuload.sampling import Cells, Subset, block_size_of, plain, selected
from gpuload.store import ObsColumn
from gpuload.types import ITEMSIZES, kind_of

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Sequence

    from numpy.typing import NDArray

    from gpuload.backends.base import Backend
    from gpuload.plan import Plan
    from gpuload.sampling import Sampler, Strategy
    from gpuload.store import Matrix, Store
    from gpuload.tables import Table
    from gpuload.where import Where

_log = logging.getLogger("gpuload")

_MOST_DECODED = 8
"""Cells decoded per cell delivered above which a warning says that the settings do not suit the file."""


def _memory_of(backend: Backend) -> tuple[int, str]:
    """Return the bytes of memory that fetches and minibatches can take, and what has them."""
    if backend.device_nbytes is None:
        return _host_memory(backend)
    return _beside(backend.device_nbytes, backend.device, backend.device_cache_nbytes, "device_cache")


def _host_memory(backend: Backend) -> tuple[int, str]:
    """Return the bytes of the host's memory that are not its cache's, and what has them."""
    return _beside(machine.memory_nbytes(), "this machine", backend.host_cache_nbytes, "memory_cache")


def _beside(nbytes: int, where: str, cache_nbytes: int, cache: str) -> tuple[int, str]:
    """Return the bytes of memory that are not a cache's, and what has them."""
    if not cache_nbytes:
        return nbytes, where
    return nbytes - cache_nbytes, f"{where}, beside the {cache_nbytes / 1e9:.1f} GB of {cache},"


def check_memory(
    stores: Sequence[Store], values: str, backend: Backend, batch_size: int, fetch_factor: int, prefetch: int
) -> None:
    """Raise PlanError if no memory holds the fetches; being killed mid-epoch would explain nothing."""
    n_rows, n_held = min(batch_size * fetch_factor, stores[0].n_obs), prefetch + 1
    wanted = int(n_rows * n_held * sum(store.nbytes_per_row(values) for store in stores))
    there, where = _memory_of(backend)
    if wanted > there:
        n_most = n_rows * there // wanted  # n_rows may be far fewer than batch_size * fetch_factor
        less = f"fetch_factor={max(1, n_most // 2 // batch_size)}"
        if n_most < batch_size:
            less = f"fetch_factor=1, batch_size={max(1, n_most // 2)}"
        raise PlanError(
            f"fetch_factor={fetch_factor}: {n_held} fetches of {n_rows} cells take {wanted / 1e9:.1f} GB but "
            f"{where} has {there / 1e9:.1f} GB; use {less} or less."
        )


def check_batches(tables: Sequence[Table], batch_size: int, backend: Backend) -> None:
    """Raise PlanError if this machine cannot hold three minibatches, the fewest that a loop over a loader has at once.

    These are the previous one, which the loop's variable holds until it is assigned the next, and one made ahead of
    that. An epoch of fewer holds those. Not for a backend that makes none ahead, in device memory.
    """
    if not backend.takes_ahead:
        return
    n_obs, nbytes = tables[0].store.n_obs, sum(table.nbytes_per_row for table in tables)
    there, where = _host_memory(backend)
    n_rows, n_held = min(batch_size, n_obs), min(3, -(-n_obs // batch_size))
    if n_held * n_rows * nbytes > there:
        less = f"batch_size={max(1, int(there / (8 * nbytes)))} or less" if batch_size > 1 else "fewer genes (genes=)"
        raise PlanError(
            f"batch_size={batch_size}: {n_held} minibatches of {n_rows} cells take "
            f"{n_held * n_rows * nbytes / 1e9:.1f} GB but {where} has {there / 1e9:.1f} GB; use {less}."
        )


def check_row_numbers(given: Any, n_obs: int) -> NDArray[np.int64]:
    """Return row numbers as int64; raise PlanError if they are not of a loader's cells."""
    rows = as_array("take", given)
    if rows.ndim != 1 or not rows.size or rows.dtype.kind not in "iu":
        raise PlanError(
            f"take: rows of dtype {rows.dtype} and shape {rows.shape}; expected a list of row numbers, at least one "
            "(of a mask, np.flatnonzero returns them)."
        )
    outside = np.flatnonzero((rows < 0) | (rows >= n_obs))
    if outside.size:
        raise PlanError(
            f"take: row {rows[outside[0]]} is outside the data, of {n_obs} cells numbered from 0; pass row numbers of "
            "these."
        )
    return rows.astype(np.int64)


def check_take(rows: NDArray[np.int64], tables: Sequence[Table], backend: Backend) -> None:
    """Raise PlanError if no memory holds cells, as read, each once, and as a minibatch."""
    n_distinct = np.unique(rows).size
    wanted = sum(n_distinct * table.resident_nbytes_per_row + rows.size * table.nbytes_per_row for table in tables)
    there, where = _memory_of(backend)
    if wanted > there:
        raise PlanError(
            f"take: {rows.size} cells take {wanted / 1e9:.1f} GB but {where} has {there / 1e9:.1f} GB; take fewer at a "
            "time."
        )


def check_dtype(dtype: Any, output: str) -> str:
    """Return the name of a minibatch dtype, given as a NumPy or PyTorch dtype or a name; or raise PlanError."""
    try:
        name = "" if dtype is None else str(np.dtype(dtype).name)  # NumPy takes None for float64
    except (TypeError, ValueError):
        name = str(dtype).removeprefix("torch.")
    if name not in ITEMSIZES:
        raise PlanError(f"dtype={shown(dtype)}: expected 'float32', 'float64', 'float16' or 'bfloat16'.")
    if output == "csr" and ITEMSIZES[name] < 4:
        raise PlanError(
            f"dtype={dtype!r} with output='csr': CSR minibatches are float32 or float64; use one of these, or "
            "output='dense'."
        )
    return name


def check_categories(categories: Any, obs: tuple[str, ...]) -> dict[str, NDArray[np.object_]]:
    """Return the categories by column, or raise PlanError."""
    if categories is not None and not isinstance(categories, Mapping):
        raise PlanError(
            f"categories={shown(categories)}: expected a mapping from names of columns to lists of categories."
        )
    found = {}
    for name, given in (categories or {}).items():
        if name not in obs:
            raise PlanError(f"categories: {name!r} is not among obs={list(obs)}; name it there too, or leave it out.")
        said = f"categories[{name!r}]={shown(given)}"
        check_order(said, given, "a list, whose first category has code 0")
        if isinstance(given, (str, Mapping, type)) or not hasattr(given, "__iter__"):
            raise PlanError(f"{said}: expected a list, whose first category has code 0.")
        values = list(given)
        try:
            is_repeated = len(set(values)) < len(values)
        except TypeError:
            raise PlanError(f"{said}: a category is text, a number or a boolean; pass such.") from None
        if is_repeated:
            raise PlanError(f"categories[{name!r}]: a category is given twice; pass each once.")
        found[name] = np.empty(len(values), dtype=object)
        found[name][:] = values
    return found


def coded(store: Store, name: str, categories: NDArray[np.object_] | None, strategy: Strategy) -> ObsColumn:
    """Return a column of obs, recoded to `categories` if given.

    A warning is logged if it has values, but none of these; at level INFO, how many of the cells that Subsets leave
    have others, which may be meant. Booleans without a missing value, and a column without any value, are stored as
    numbers in some files, and as categories in others.
    """
    column = store.obs[name]
    if categories is None:
        return column
    if column.categories is None and column.values.dtype == bool:
        column = column.of_booleans()
    elif column.categories is None and not column.has_value:
        column = ObsColumn.missing(store.n_obs)
    if column.categories is None:
        raise PlanError(
            f"categories: obs column {name!r} of {store.paths[0]} holds {column.values.dtype}, which has no "
            "categories; leave it out."
        )
    theirs, given = kind_of(column.categories), kind_of(categories)
    if theirs != given and "categories" not in (theirs, given):  # 1 is not '1': no cell would have any of them
        raise PlanError(
            f"categories[{name!r}]: they are {given} but obs column {name!r} of {store.paths[0]} has {theirs} as "
            "categories; pass those of its type."
        )
    found = column.coded_as(categories)
    if column.has_value and not found.has_value:
        _log.warning(
            "categories[%r]: no cell is in any of the %d given (%s), so all get code -1; obs column %r of %s has %s.",
            name,
            categories.size,
            listing(categories.tolist(), 5, "none"),
            name,
            store.paths[0],
            listing(column.categories.tolist(), 5),
        )
    elif _log.isEnabledFor(logging.INFO):  # else the cells are not gone through
        _say_of_others(name, column, categories, strategy)
    return found


def _say_of_others(name: str, column: ObsColumn, categories: NDArray[np.object_], strategy: Strategy) -> None:
    """Log how many of the cells that Subsets leave have a category that is not among those given, if any has."""
    if column.categories is None:
        return
    given, rows = set(categories.tolist()), selected(strategy, column.values.size)[0]
    counts = np.zeros(column.categories.size + 1, dtype=np.int64)
    for _, part in rows.slices():
        counts += np.bincount(column.values[part] + 1, minlength=counts.size)
    theirs = zip(column.categories.tolist(), counts[1:].tolist(), strict=True)
    others = {category: n for category, n in theirs if n and category not in given}
    if others:
        _log.info(
            "categories[%r]: %d of %d cells have a category that is not among the %d given, so they get code -1: %s.",
            name,
            sum(others.values()),
            rows.n_rows,
            categories.size,
            listing(list(others), 5),
        )


def warn_of_repeats(paths: Any) -> None:
    """Warn of paths that are given more than once; of what a folder or a pattern stands for, nothing is said.

    Paths are compared as to where they lead, and addresses as they are; of modalities, those of the first. Several are
    a list, as `at_addresses` returns.
    """
    given = next(iter(paths.values()), None) if isinstance(paths, Mapping) else paths
    if not isinstance(given, list):
        return
    names = [str(one) for one in given if isinstance(one, (str, os.PathLike))]
    places = [name if "://" in name else os.path.realpath(name) for name in names]
    repeated = [(names[places.index(place)], n) for place, n in Counter(places).items() if n > 1]
    if repeated:
        _log.warning(
            "paths: %s is given %d times%s, so that its cells count as often; pass it once, unless you mean that.",
            *repeated[0],
            f", and {len(repeated) - 1} more are given repeatedly" if len(repeated) > 1 else "",
        )


def check_sampler(sampler: Sampler | None, shuffle: bool) -> None:
    """Raise PlanError for a sampler combined with ``shuffle=False``, which contradicts it; or no such boolean."""
    check_bool("shuffle", shuffle)
    if sampler is not None and not shuffle and not (isinstance(sampler, Subset) and sampler.inner is None):
        raise PlanError(
            f"shuffle=False with sampler={type(sampler).__name__}(...): the sampler sets the order; drop one."
        )


def block_size_for(sampler: Sampler | None, block_size: int | str | None) -> int | str:
    """Return the block size given, else the sampler's own, else the default; raise PlanError if the two differ."""
    own = block_size_of(sampler)
    if own is None:
        return DEFAULT_BLOCK_SIZE if block_size is None else block_size
    if block_size not in (None, own):
        raise PlanError(f"block_size={shown(block_size)} with sampler=BlockShuffle({own}): two block sizes; drop one.")
    return own


def explain_missing_column(
    error: StoreError,
    sampler: Sampler | None,
    named: Sequence[str],
    table: Collection[Any] | None,
    where: Where | None,
) -> None:
    """Raise a StoreError that says more of a missing column, if there is more to say.

    That is: which columns `table`, an obs_table if one was given, has; that only the sampler asks for it, perhaps by
    a default; that `where` may mean text by it.
    """
    missing = error.missing_column
    if missing is None:
        return
    said = str(error).rstrip(".")
    if table is not None:
        said += f"; obs_table has {listing([str(name) for name in table])}"
    if sampler is not None and missing in sampler.columns and missing not in named:
        while missing in getattr(inner := getattr(sampler, "inner", None), "columns", ()):
            sampler = inner
        raise StoreError(
            f"{said}; {type(sampler).__name__} asks for {missing!r}, by an argument or its default: give it a column "
            "that is there."
        ) from None
    if where is not None and missing in where.columns and (cure := where.explain(missing)):
        raise StoreError(f"{said}; {cure}.") from None
    if table is not None:
        raise StoreError(f"{said}.") from None


def genes_where(where: Where, stores: Mapping[str, Store]) -> NDArray[Any]:
    """Return the genes of the first matrix for which a condition on its var is true, in their order.

    Returns
    -------
    (n_vars,) bool; or names, object, if another layer has other genes than X, as raw.X does.

    Raises
    ------
    PlanError
        It holds for no gene, or, of a gene that several files have, in one file and not in another.
    StoreError
        A column holds values of different kinds in different files.
    """
    store = stores["X"]
    maps, starts = None, [0] * len(store.var)
    if store.alignment is not None:
        maps, starts = store.alignment.maps, store.alignment.starts.tolist()
    seen: dict[tuple[int, int], int] = {}  # most files have the same genes, and the same columns, as another
    for file, (columns, start) in enumerate(zip(store.var, starts, strict=True)):
        seen.setdefault((id(columns), start), file)
    files = list(seen.values())
    paths = [store.paths[file] for file in files]
    var = {name: concat_column(name, [store.var[f][name] for f in files], paths, "var") for name in where.columns}
    holds, end = where.holds(var), 0
    is_chosen, file_of = np.zeros(store.n_vars, dtype=bool), np.full(store.n_vars, -1)
    for file in files:
        n = store.matrices[file].n_vars
        own, end = holds[end : end + n], end + n
        place = np.arange(n) if maps is None else maps[starts[file] : starts[file] + n]
        own, place = own[place >= 0], place[place >= 0]
        differs = (file_of[place] >= 0) & (is_chosen[place] != own)
        if differs.any():
            at = place[np.argmax(differs)]
            with_it, without = (file_of[at], file) if is_chosen[at] else (file, file_of[at])
            raise PlanError(
                f"genes={where.text!r:.200}: it holds for gene {store.var_names[at]!r} in {store.paths[with_it]} but "
                f"not in {store.paths[without]}; pass the names of genes in a list."
            )
        is_chosen[place], file_of[place] = own, file
    if not is_chosen.any():
        raise PlanError(f"genes={where.text!r:.200}: it holds for none of the {store.n_vars} genes; relax it.")
    layers = (other for name, other in stores.items() if name.startswith("layers/"))
    is_one = all(np.array_equal(other.var_names, store.var_names) for other in layers)
    return is_chosen if is_one else store.var_names[is_chosen]


def bind(
    sampler: Sampler | None,
    shuffle: bool,
    block_size: int | str,
    batch_size: int,
    fetch_factor: int,
    store: Store,
    cell_names: Callable[[], NDArray[np.object_]],
) -> Strategy:
    """Bind the requested sampler and sizes to the cells of a store, whose names `cell_names` returns."""
    fetch_rows, edges = batch_size * fetch_factor, None
    n_chunks = chunks_per_block(block_size)
    if n_chunks is not None:
        edges = store.chunk_edges(n_chunks)
        if shuffle and edges.size > 1 and store.n_obs / (edges.size - 1) > fetch_rows / 4:
            _log.warning(
                "block_size=%r: a block holds %d cells, more than a quarter of a fetch; minibatches will be "
                "as similar as neighbours in the file. Set block_size to a number.",
                block_size,
                store.n_obs // max(1, edges.size - 1),
            )
    elif sampler is None and shuffle and int(block_size) > 1:
        _warn_of_large_chunks(int(block_size), fetch_rows, store)
    n_in_block = int(block_size) if edges is None else max(1, round(store.n_obs / max(1, edges.size - 1)))
    cells = Cells(
        store.paths,
        store.file_rows,
        n_in_block,
        edges,
        store.obs,
        batch_size,
        fetch_rows,
        shuffle=bool(shuffle),
        cell_names=cell_names,
    )
    return plain(cells) if sampler is None else sampler.over(cells)


def check_epoch(plan: Plan) -> None:
    """Raise PlanError if there are cells, but what is dropped leaves no minibatch; a loop over none says nothing.

    Not for a sampler that deals rows to ranks itself, whose epochs differ.
    """
    if plan.is_per_rank or plan.n_batches:
        return
    n_rows = plan.strategy.n_rows
    if not n_rows:
        return
    if replace(plan, drop_last=False).n_batches:
        ranks = "" if plan.world_size == 1 else f" on each of {plan.world_size} ranks"
        raise PlanError(
            f"drop_last=True: the {n_rows} cells of an epoch are too few for a minibatch of {plan.batch_size}{ranks}, "
            "so there would be none; use a smaller batch_size, or drop_last=False."
        )
    raise PlanError(
        f"uneven='drop': the {n_rows} cells of an epoch are too few for {plan.world_size} ranks, so there would be no "
        "minibatch; use fewer ranks, or uneven='pad'."
    )


def _warn_of_large_chunks(block_size: int, fetch_rows: int, store: Store) -> None:
    """Warn if blocks are so small relative to stored chunks that most decoded cells are wasted."""
    encoded = [matrix for matrix in store.matrices if not matrix.layouts[0].is_raw]
    n_chunks = sum(map(_n_chunks, encoded))
    n_cells = sum(matrix.n_rows for matrix in encoded)
    if not n_chunks or not n_cells:
        return
    wanted = min(fetch_rows, store.n_obs)
    n_blocks = wanted / block_size * n_cells / store.n_obs  # those in encoded files
    touched = n_chunks * (1 - (1 - 1 / n_chunks) ** n_blocks)
    decoded = touched * n_cells / n_chunks
    if decoded > _MOST_DECODED * wanted:
        _log.warning(
            "block_size=%d: a stored chunk holds %d cells and is decoded whole, so about %d cells are decoded for each "
            "one delivered; block_size='chunk' decodes each chunk for all of its cells.",
            block_size,
            round(n_cells / n_chunks),
            round(decoded / wanted),
        )


def _n_chunks(matrix: Matrix) -> int:
    """Return the number of chunks along the rows of a matrix; a dense one may have several beside each other."""
    layout = matrix.layouts[0]
    return layout.chunk_offset.size if matrix.kind == "csr" else -(-matrix.n_rows // layout.chunk_shape[0])
