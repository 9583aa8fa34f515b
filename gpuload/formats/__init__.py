"""Formats: a file, or cells in memory -> a `Store`. Nothing above this package learns about files."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from gpuload.errors import StoreError
from gpuload.formats.memory import is_anndata, is_matrix, open_memory
from gpuload.formats.recognise import expand, open_path
from gpuload.store import concat

if TYPE_CHECKING:
    from collections.abc import Sequence

    from gpuload.store import Store


def open_store(paths: Any, *, layer: str, obs: Sequence[str]) -> Store:
    """Open files, or cells in memory, as one table of cells.

    Parameters
    ----------
    paths
        One path (see `recognise`), AnnData or matrix (see `memory.open_memory`), or several whose rows are numbered
        through in the order given. A folder of files stands for them in the order of their names.
    layer
        ``"X"``, ``"raw.X"`` or the name of a layer.
    obs
        Columns of obs to hold.

    Raises
    ------
    StoreError
        A file is of no known format, lacks what is asked for, or does not agree with the others.
    ReadError
        A file cannot be opened or read.
    CorruptDataError
        What is given does not fit together.
    """
    is_one = isinstance(paths, (str, os.PathLike)) or is_anndata(paths) or is_matrix(paths)
    is_list = hasattr(paths, "__iter__") and len(getattr(paths, "shape", ())) < 2
    each = [part for one in ([paths] if is_one or not is_list else list(paths)) for part in _expand(one)]
    if not each:
        raise StoreError("paths=[]: expected at least one .h5ad file.")
    stores: list[Store] = []
    try:
        for place, one in enumerate(each):
            stores.append(_open(one, place if len(each) > 1 else None, layer, obs))
        return concat(stores)
    except BaseException:
        for store in stores:
            store.close()
        raise


def _open(cells: Any, place: int | None, layer: str, obs: Sequence[str]) -> Store:
    if not isinstance(cells, (str, os.PathLike)):
        return open_memory(cells, place, layer=layer, obs=obs)
    return open_path(os.fspath(cells), layer=layer, obs=obs)


def _expand(cells: Any) -> list[Any]:
    return list(expand(os.fspath(cells))) if isinstance(cells, (str, os.PathLike)) else [cells]
