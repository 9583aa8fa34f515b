"""Formats: open a file, or cells in memory, as a `Store`. Nothing above this package knows about files."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Mapping
from contextlib import ExitStack, suppress
from dataclasses import replace
from itertools import chain
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import numpy as np

from gpuload.concat import concat, join_arrays, stored_columns, with_columns
from gpuload.errors import CorruptDataError, GpuloadError, PlanError, StoreError
from gpuload.folder_source import FolderSource
from gpuload.formats.addresses import Address, check_given, child_of
from gpuload.formats.arrays import OBSM, as_strings, no_var, numbered
from gpuload.formats.memory import is_anndata, is_matrix, is_mudata, not_cells, open_memory
from gpuload.formats.obs_table import check_obs_table, table_columns
from gpuload.formats.progress import Progress, each_of, threads_for_parts
from gpuload.formats.recognise import expand, is_parquet, obs_columns, open_path
from gpuload.source import FileSource, closed_on_error, replaced
from gpuload.store import ObsColumn
from gpuload.types import kind_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence
    from concurrent.futures import Future

    import pandas as pd
    from numpy.typing import NDArray

    from gpuload.store import Store
    from gpuload.types import Source

_N_LOOKED_AT = 8
"""Further paths in which a column is looked for that the first one lacks."""

Join = str | tuple[str, ...] | None

SOURCE_FILE = "source_file"
"""Column of obs that every cell has, stored or not: the path of its file."""


def open_matrices(
    paths: Any,
    *,
    layers: Sequence[str],
    obsm: Sequence[str],
    modalities: Sequence[str],
    obs: Sequence[str],
    join: Join,
    obs_table: tuple[pd.DataFrame, Callable[[], NDArray[np.object_]]] | None = None,
    var: Sequence[str] = (),
) -> dict[str, Store]:
    """Open several matrices of the same cells.

    Parameters
    ----------
    paths
        As for `open_store`; or a mapping of modalities to such.
    layers
        Layers of the first modality; the store of the first is named ``"X"``, whatever its own name.
    obsm
        Names in obsm of the first modality.
    modalities
        Names of the modalities; layers, obsm and obs belong to the first. If empty, `paths` are as for `open_store`.
    join
        As for `concat`; a list of genes applies to the first modality, and the others must agree.
    obs_table
        Further columns of obs, which replace those of the files, and a function that returns the names of all cells;
        see `obs_table`.
    var
        Columns of the first matrix's var to keep in memory.

    Returns
    -------
    dict
        ``"X"``, the only store with obs, ``"layers/<name>"``, ``"obsm/<name>"`` and ``"modalities/<name>"``, in the
        order requested.

    Raises
    ------
    StoreError, ReadError, CorruptDataError
        As for `open_store`; or modalities are missing, or do not have the same cells in the same order.
    PlanError
        As for `open_store`; or `obs_table` does not fit the cells.
    """
    in_table = () if obs_table is None else check_obs_table(obs_table[0])
    first = _of_modality(paths, modalities[0]) if modalities else paths
    with ExitStack() as on_error:
        stores: dict[str, Store] = {}

        def add(name: str, cells: Any, layer: str, obs: Sequence[str], join: Join, var: Sequence[str] = ()) -> None:
            stores[name] = open_store(cells, layer=layer, obs=obs, join=join, var=var)
            on_error.enter_context(closed_on_error(stores[name]))

        try:
            add("X", first, layers[0], [name for name in obs if name not in in_table], join, var)
        except StoreError as error:
            if error.missing_column is not None and isinstance(paths, Mapping):
                _explain_elsewhere(error, modalities[0], paths)
            raise
        if obs_table is not None:
            table, cell_names = obs_table
            names = [name for name in obs if name in in_table]
            further = table_columns(table, names, stores["X"].n_obs, cell_names)
            stores["X"] = replace(stores["X"], obs={**stores["X"].obs, **further})
        for layer in layers[1:]:
            add(f"layers/{layer}", first, layer, (), join)
        for name in obsm:
            add(f"{OBSM}{name}", first, f"{OBSM}{name}", (), None)
        for name in modalities[1:]:
            cells = _of_modality(paths, name)
            add(f"modalities/{name}", cells, "X", (), None if isinstance(join, tuple) else join)
            _check_cell_names(
                (modalities[0], first, layers[0], stores["X"]), (name, cells, "X", stores[f"modalities/{name}"])
            )
        for store in stores.values():
            _check_cells(stores["X"], store)
        _check_files(stores, are_named=obs_table is not None or len(modalities) > 1)
    return stores


def open_store(paths: Any, *, layer: str, obs: Sequence[str], join: Join = None, var: Sequence[str] = ()) -> Store:
    """Open files, or cells in memory, as one table of cells.

    Parameters
    ----------
    paths
        One path (see `recognise`), AnnData or matrix (see `memory.open_memory`), or several, whose rows are numbered
        consecutively in the order given. A folder of files stands for its files, sorted by name.
    layer
        ``"X"``, ``"raw.X"``, the name of a layer, or ``"obsm/<name>"``.
    obs
        Columns of obs to keep in memory; unless stored, ``"source_file"`` is the path of each cell's file.
    join
        How to join genes that differ between files; see `concat`. With ``"outer"``, columns of obs that only
        some files have, or some data sets of a collection, are missing values in the others.
    var
        Columns of var to keep in memory; each file must have them.

    Raises
    ------
    PlanError
        There are no paths, or one is neither a path nor cells.
    StoreError
        A file's format is unknown, it lacks what was requested, or it does not agree with the others.
    ReadError
        A file cannot be opened or read.
    CorruptDataError
        The parts of a file do not fit together.
    """
    each = _together(_parts(paths))
    is_made = SOURCE_FILE in obs and SOURCE_FILE not in _columns_of(each[0])
    stored = [name for name in obs if name != SOURCE_FILE] if is_made else obs
    stores = (
        [_open(each[0], None, layer, stored, var, join == "outer")]
        if len(each) == 1
        else _open_all(each, layer, stored, join, var)
    )
    with closed_on_error(*stores):
        first = stores[0]
        for store in stores[1:] if layer.startswith(OBSM) else ():
            if store.n_vars != first.n_vars:
                raise StoreError(
                    f"{store.paths[0]}: its {layer} has {store.n_vars} columns but that of {first.paths[0]} has "
                    f"{first.n_vars}; make them equal, or leave it out."
                )
        store = join_arrays(concat(stores, join))
        own = {**store.obs, SOURCE_FILE: _source_file(store)} if is_made else store.obs
        return replace(store, obs=own, var_names=store.var_names.copy())  # other loaders' names may be the same array


def read_obs_names(paths: Any, modality: str | None, layer: str, opened: Sequence[Source] = ()) -> NDArray[np.object_]:
    """Return the names of all cells as strings, shape (n_obs,) object; row numbers where a format stores none.

    Parameters
    ----------
    layer
        A matrix of these cells, whose number of rows the names must have.
    opened
        What was opened before; raise ReadError if the names may be those of other cells, as it was replaced since.
    """
    parts = _parts(paths if modality is None else _of_modality(paths, modality))
    found = each_of(parts, lambda part: _cell_names(part, layer), is_far=_is_far(parts))
    names: list[NDArray[np.object_]] = []
    first = 0
    for of_part in found:
        names.append(numbered(of_part, first) if isinstance(of_part, int) else of_part)
        first += names[-1].size
    _check_in_place(opened)
    return np.concatenate(names)


def _columns_of(cells: Any, wanted: Sequence[str] = ()) -> Sequence[str]:
    """Return the columns of obs; of several Parquet files those of the first, and of others until all wanted are."""
    if isinstance(cells, tuple):
        found: dict[str, None] = {}
        for path in cells:
            found |= dict.fromkeys(obs_columns(path))
            if found.keys() >= set(wanted):
                break
        return list(found)
    if isinstance(cells, str):
        return obs_columns(cells)
    return [str(name) for name in getattr(cells, "obs", ())]


def _source_file(store: Store) -> ObsColumn:
    """Return the file that each cell comes from; a file given twice counts once."""
    number = {path: code for code, path in enumerate(dict.fromkeys(store.paths))}
    codes = np.array([number[path] for path in store.paths], dtype=np.int32)
    return ObsColumn(np.repeat(codes, store.file_rows), np.array(list(number), dtype=object))


def _open_all(each: Sequence[Any], layer: str, obs: Sequence[str], join: Join, var: Sequence[str] = ()) -> list[Store]:
    """Open several stores, a few concurrently; if some cannot be opened, raise the error of the first of them.

    With ``"outer"``, a column that only some of them have becomes missing values in the others.
    """
    pool = threads_for_parts(is_far=_is_far(each))
    opening: deque[Future[Store]] = deque()
    stores: list[Store] = []
    names, progress = _Names(), Progress(len(each), "%d of %d files were opened", "")
    try:
        fill = join == "outer"
        known = pool.map(lambda one: _columns_of(one, obs), each) if obs and fill else [obs] * len(each)
        for place, (one, stored) in enumerate(zip(each, stored_columns(obs, known), strict=True)):
            opening.append(pool.submit(_open, one, place, layer, stored, var, fill))
        while opening:
            store = with_columns(opening[0].result(), obs)
            shared = {"var_names": names.shared(store.var_names), "var_ids": names.shared(store.var_ids)}
            stores.append(replace(store, **shared, var=tuple(map(names.shared_columns, store.var))))
            progress.one(store.paths[0])
            del store
            opening.popleft()  # which holds its own names
    except BaseException as error:
        for future in opening:
            if not future.cancel():
                future.add_done_callback(_close_opened)  # at once, or when it is open
        for store in stores:
            store.close()
        if isinstance(error, StoreError) and error.missing_column is not None:
            other = stores[0].paths[0] if stores else _with_column(each[1:], error.missing_column)
            if other is not None:
                said = (
                    f"{str(error).rstrip('.')}; {other} has that column: leave it out, or make its values missing "
                    "elsewhere with join='outer'."
                )
                error.args = (said,)
        if isinstance(error, StoreError) and error.missing_matrix is not None:
            other = stores[0].paths[0] if stores else _with_matrix(each[1:], layer)
            if other is not None:
                said = (
                    f"{error.missing_matrix}, which {other} has, and each file needs it; add it to this one too, or "
                    "leave this one out."
                )
                error.args = (said,)
        raise
    finally:
        pool.close()
    return stores


def _explain_elsewhere(error: StoreError, modality: str, paths: Mapping[str, Any]) -> None:
    """Add to the error for a column of obs that the first modality lacks which of the others has it."""
    from gpuload.formats.mudata import explain_elsewhere

    columns: dict[str, Sequence[str]] = {modality: ()}
    for name in paths:
        with suppress(Exception):  # whatever is wrong there, the error is about another path
            parts = _parts(paths[name])
            columns[name] = () if _is_far(parts) else _columns_of(parts[0])
    explain_elsewhere(error, modality, columns)


def _with_column(each: Sequence[Any], name: str) -> str | None:
    """Return one of the first few local paths that has a column of obs, for an error."""
    for one in () if _is_far(each) else each[:_N_LOOKED_AT]:
        with suppress(GpuloadError):  # the error is about another path
            if isinstance(one, str) and name in obs_columns(one):
                return one
    return None


def _with_matrix(each: Sequence[Any], layer: str) -> str | None:
    """Return one of the first few parts that are not far and have a layer or a matrix of obsm, for an error."""
    for place, one in enumerate(() if _is_far(each) else each[:_N_LOOKED_AT], 1):
        with suppress(GpuloadError):  # the error is about another part
            store = _open(one, place, layer, (), (), fill=False)
            store.close()
            return store.paths[0]
    return None


class _Names:
    """Gene names, each string held once: most of them occur in every file, and each file would hold its own."""

    def __init__(self) -> None:
        self._tables: dict[int, NDArray[np.object_]] = {}
        self._known: dict[Any, Any] = {}
        self._given: set[int] = set()
        self._columns: dict[Any, Any] = {}

    def shared(self, names: Any) -> Any:
        """Return these names: as an array that was given before, or else in this one, each as a known string."""
        if names is None or id(names) in self._given:
            return names
        listed = names.tolist()
        key = hash(tuple(listed))
        found = self._tables.get(key)
        if found is not None and np.array_equal(found, names):
            return found
        names[:] = [self._known.setdefault(name, name) for name in listed]
        self._tables[key] = names
        self._given.add(id(names))
        return names

    def shared_columns(self, columns: Mapping[str, ObsColumn]) -> Mapping[str, ObsColumn]:
        """Return these columns of var: as a table that was given before, if they are the same."""
        content: list[Any] = []
        for column in columns.values():
            values, names = column.values, column.categories  # noqa: PD011 - not a pandas frame
            known = () if names is None else (kind_of(names), column.is_ordered, *names)
            content += [values.dtype.str, values.tobytes(), known]
        return self._columns.setdefault(tuple(content), columns) if columns else columns


def _close_opened(opening: Future[Store]) -> None:
    if opening.exception() is None:
        opening.result().close()


def _together(parts: Sequence[Any]) -> list[Any]:
    """Return the parts, with consecutive Parquet files of the same table of genes merged into one tuple of paths."""
    out: list[Any] = []
    tables: dict[str, str | None] = {}
    for part in parts:
        if not isinstance(part, str) or not is_parquet(part):
            out.append(part)
            continue
        from gpuload.formats.parquet_genes import have_same_table

        if out and isinstance(out[-1], tuple) and have_same_table(out[-1][-1], part, tables):
            out[-1] += (part,)
        else:
            out.append((part,))
    return out


def _open(cells: Any, place: int | None, layer: str, obs: Sequence[str], var: Sequence[str], fill: bool) -> Store:
    if isinstance(cells, tuple):
        from gpuload.formats.parquet_cells import open_cells

        if var:
            raise no_var(cells[0], var)
        store = open_cells(cells, layer=layer, obs=obs, fill=fill)
    elif isinstance(cells, str):
        store = open_path(cells, layer=layer, obs=obs, fill=fill, var=var)
    else:
        store = open_memory(cells, place, layer=layer, obs=obs, var=var)
    paths, logged = (tuple(map(str, names)) for names in (store.paths, store.logged))  # an Address holds its options
    return replace(store, paths=paths, logged=logged)


def _parts(paths: Any) -> list[Any]:
    """Return the given files, as str, and cells in memory as a list; raise PlanError if there are none."""
    check_given(paths)
    is_one = isinstance(paths, (str, os.PathLike)) or is_anndata(paths) or is_matrix(paths)
    is_list = hasattr(paths, "__iter__") and len(getattr(paths, "shape", ())) < 2
    given = [paths] if is_one or not is_list else list(paths)

    def stands_for(one: Any) -> list[Any]:
        return expand(os.fspath(one)) if isinstance(one, (str, os.PathLike)) else [one]

    is_far = _is_far(given)
    parts = list(chain.from_iterable(each_of(given, stands_for, is_far=True) if is_far else map(stands_for, given)))
    if not parts:
        raise PlanError("paths=[]: expected at least one file or folder.")
    return parts


def _is_far(parts: Sequence[Any]) -> bool:
    """Return whether some parts are at addresses."""
    return any(isinstance(one, Address) for part in parts for one in (part if isinstance(part, tuple) else (part,)))


def _of_modality(paths: Any, name: str) -> Any:
    """Return the cells of a modality: a value of a mapping, or a part of each file."""
    if isinstance(paths, Mapping):
        if name not in paths:
            have = ", ".join(repr(str(known)) for known in paths) or "none"
            raise StoreError(f"paths: there is no modality {name!r}; the modalities are {have}. Choose one of them.")
        return paths[name]
    parts = _parts(paths)
    for number, part in enumerate(parts):
        if is_mudata(part):
            raise not_cells(part, number if len(parts) > 1 else None)
        if not isinstance(part, str):
            raise StoreError(
                f"<{type(part).__name__} {number}>: it holds one modality, so modality={name!r} is not available; pass "
                "paths={'rna': adata, 'prot': other}, for example, or the mdata.mod of a MuData."
            )
    return [child_of(part, name) for part in parts]


def _check_cells(first: Store, other: Store) -> None:
    """Refuse matrices of the same cells whose numbers of rows differ, in total or in one of their files."""
    rows, rows_too = first.file_rows, other.file_rows
    if len(rows) != len(rows_too):  # one modality may be in one file, another in a collection of many
        rows, rows_too = (first.n_obs,), (other.n_obs,)
    for path, path_too, n_rows, n_rows_too in zip(first.paths, other.paths, rows, rows_too, strict=False):
        if n_rows != n_rows_too:
            raise CorruptDataError(
                f"{path_too}: it has {n_rows_too} rows where {path} has {n_rows}, though both are of the same cells; "
                "restore the files from their source."
            )


def _check_files(stores: Mapping[str, Store], *, are_named: bool) -> None:
    """Refuse matrices of one path that are in two files or folders, as it was replaced after one of them was opened.

    Or is no longer in the one that was opened, if names of cells were read by it.
    """
    known: dict[str, tuple[int, int] | None] = {}
    for store in stores.values():
        if are_named:
            _check_in_place(store.sources)
        for source in store.sources:
            if not isinstance(source, FileSource | FolderSource):
                continue
            if known.setdefault(source.name, source.identity) != source.identity:
                raise replaced(source.name, "file" if isinstance(source, FileSource) else "folder")


def _check_in_place(sources: Iterable[Source]) -> None:
    """Raise ReadError if a path leads to another file or folder by now, from which names may have been read."""
    for source in sources:
        if isinstance(source, FileSource | FolderSource):
            source.check_in_place()


def _check_cell_names(first: tuple[str, Any, str, Store], other: tuple[str, Any, str, Store]) -> None:
    """Refuse modalities whose cells are not in the same order; each is a name, cells as given, a layer and a store."""
    parts, parts_too = _parts(first[1]), _parts(other[1])
    if len(parts) != len(parts_too):
        raise StoreError(
            f"modality {other[0]!r} is in {len(parts_too)} files and {first[0]!r} in {len(parts)}; pass as many "
            "files of each, with the same cells in each pair."
        )
    n_rows, n_rows_too = (dict(zip(store.paths, store.file_rows, strict=True)) for store in (first[3], other[3]))
    for one, two in zip(parts, parts_too, strict=True):
        names, names_too = _own_names(one, first[0], first[2], n_rows), _own_names(two, other[0], other[2], n_rows_too)
        if names.size != names_too.size:
            found = f"modality {other[0]!r} has {names_too.size} cells but {first[0]!r} has {names.size}"
        elif (differing := np.flatnonzero(names != names_too)).size:
            i = int(differing[0])
            where = _shown(one, first[0])
            found = f"cell {i} is {names_too[i]!r} in modality {other[0]!r} but {names[i]!r} in {first[0]!r} ({where})"
        else:
            continue
        raise StoreError(
            f"{_shown(two, other[0])}: {found}; modalities that are read together need the same cells in the same "
            "order: subset each to the common cells, in the same order, and write them again."
        )


def _shown(part: Any, modality: str) -> str:
    """Return the name in errors of a part of a modality."""
    return f"<AnnData {modality!r}>" if is_anndata(part) else str(part)


def _own_names(part: Any, modality: str, layer: str, n_rows: Mapping[str, int]) -> NDArray[np.object_]:
    """Return the names of the cells of a part of a modality; refuse one that has none."""
    names = _cell_names(part, layer, n_rows)
    if isinstance(names, int):
        raise StoreError(
            f"modality {modality!r}: its cells have no names, so they cannot be compared with those of the other "
            "modalities; pass .h5mu, .h5ad or zarr files, or AnnDatas."
        )
    return names


def _cell_names(part: Any, layer: str, n_rows: Mapping[str, int] = MappingProxyType({})) -> NDArray[np.object_] | int:
    """Return the names of the cells of a part; their number if none are stored. `n_rows`: see `stored_cell_names`."""
    if is_anndata(part):
        return as_strings(part.obs_names)
    if isinstance(part, str):
        from gpuload.formats.frames import stored_cell_names

        return stored_cell_names(part, layer, n_rows)
    return open_memory(part, None, layer="X", obs=()).n_obs
