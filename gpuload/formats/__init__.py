"""Formats: a file or folder -> a `Store`. Nothing above this package learns about files."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from gpuload.errors import ReadError, StoreError
from gpuload.store import concat

if TYPE_CHECKING:
    from collections.abc import Sequence

    from gpuload.store import Store


def open_store(
    paths: str | os.PathLike[str] | Sequence[str | os.PathLike[str]], *, layer: str, obs: Sequence[str]
) -> Store:
    """Open one or more files as one table of cells.

    Parameters
    ----------
    paths
        One path, or several whose rows are numbered through in the order given.
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
    """
    from gpuload.formats.h5ad import open_h5ad

    names = [os.fspath(paths)] if isinstance(paths, (str, os.PathLike)) else [os.fspath(p) for p in paths]
    if not names:
        raise StoreError("paths=[]: expected at least one .h5ad file.")
    stores: list[Store] = []
    try:
        for name in names:
            _check_kind(name)
            stores.append(open_h5ad(name, layer=layer, obs=obs))
        return concat(stores)
    except BaseException:
        for store in stores:
            store.close()
        raise


def _check_kind(path: str) -> None:
    if not os.path.exists(path):
        raise ReadError(f"{path}: no such file. Check the path.")
    if os.path.isdir(path):
        raise StoreError(f"{path}: this is a folder; give the .h5ad files themselves, for example a list of them.")
