"""A path -> what lies there, by its contents, and the function that opens it.

Requirements this module answers
--------------------------------
- A form is told by its first bytes and its members; a name's ending decides only which files of a folder are meant.
- A folder of files is one store, its files in the order of their names.
- Nothing slow is imported for a form that is not there.
"""

from __future__ import annotations

import os
from contextlib import closing, contextmanager
from typing import TYPE_CHECKING, Any

from gpuload.errors import ReadError, StoreError
from gpuload.formats.addresses import as_address

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from gpuload.formats.addresses import Address
    from gpuload.store import Store

HDF5, NPY, ZIP, PARQUET = b"\x89HDF\r\n\x1a\n", b"\x93NUMPY", b"PK\x03\x04", b"PAR1"
"""First bytes of files. HDF5's may come after a user's block, so what begins otherwise is tried as HDF5, too."""

ENDINGS = (".h5ad", ".h5mu", ".h5", ".zarr", ".npz", ".npy", ".parquet")
"""Endings of the names that are looked for in a folder."""

_ZARR = ("zarr.json", ".zgroup", ".zattrs", ".zmetadata")


def expand(path: str) -> list[str]:
    """Return the paths that a path stands for: those of a folder's files, else the path itself.

    Raises
    ------
    ReadError
        There is nothing.
    StoreError
        A folder that holds nothing that can be opened, or files of several forms.
    """
    address = as_address(path)
    path = path if address is None else address
    if not _is_folder(path) or folder_form(path):
        return [path]
    within = os.listdir(path) if address is None else {key.partition("/")[0] for key in address.listed or ()}
    names = sorted(name for name in within if name.endswith(ENDINGS) and not name.startswith("."))
    endings = sorted({os.path.splitext(name)[1] for name in names})
    if not names:
        raise StoreError(
            f"{path}: this folder holds no cells: neither files that end in {', '.join(ENDINGS)} nor the parts of a "
            "zarr or an SCDL store. Check the path."
        )
    if len(endings) > 1:
        raise StoreError(
            f"{path}: this folder holds files of several forms ({', '.join(endings)}); give those you mean as a list."
        )
    return [os.path.join(path, name) if address is None else address.child(name) for name in names]


def folder_form(path: str) -> str:
    """Return ``"zarr"`` or ``"scdl"`` where a folder is a store of that form, else ``""``."""
    from gpuload.formats.scdl import is_scdl

    address = as_address(path)
    if address is not None:
        return "zarr" if address.is_zarr else ""
    if any(os.path.exists(os.path.join(path, name)) for name in _ZARR):
        return "zarr"
    return "scdl" if is_scdl(path) else ""


def open_path(path: str, *, layer: str, obs: Sequence[str]) -> Store:
    """Open one file, or a folder that is one store.

    Parameters
    ----------
    path
        The path; of a MuData with several modalities, with one's name after it: ``"cells.h5mu/rna"``.
    layer, obs
        As for `formats.open_store`.

    Raises
    ------
    ReadError
        There is nothing, or it cannot be opened or read.
    StoreError
        It is of no known form, or lacks what is asked for.
    CorruptDataError
        It is damaged.
    """
    path, modality = _modality(path)
    if _is_folder(path):
        return _open_folder(path, layer, obs)
    first = _first_bytes(path)
    if as_address(path) is not None and first.startswith((NPY, ZIP, PARQUET)):
        raise StoreError(f"{path}: at an address only HDF5 files and folders of zarr can be read; copy it first.")
    if not modality and first.startswith(NPY):
        from gpuload.formats.numpy import open_npy

        return open_npy(path, layer=layer, obs=obs)
    if not modality and first.startswith(ZIP):
        from gpuload.formats.zarr import is_zarr_zip, open_zarr

        if is_zarr_zip(path):
            return open_zarr(path, layer=layer, obs=obs)
        from gpuload.formats.numpy import open_npz

        return open_npz(path, layer=layer, obs=obs)
    if not modality and first.startswith(PARQUET):
        from gpuload.formats.parquet import refuse_cells

        raise refuse_cells(path)
    return _open_hdf5(path, modality, layer, obs)


def obs_columns(path: str) -> list[str]:
    """Return the names of the columns of obs of what a path stands for; of several files, those of the first."""
    path, modality = _modality(expand(path)[0])
    from gpuload.formats import scdl, zarr

    if _is_folder(path):
        return scdl.obs_columns(path) if folder_form(path) == "scdl" else zarr.obs_columns(path)
    first = _first_bytes(path)
    if first.startswith((NPY, ZIP)):
        return zarr.obs_columns(path) if first.startswith(ZIP) and zarr.is_zarr_zip(path) else []
    from gpuload.formats import h5ad, hdf5, tenx

    with hdf5.opened(path) as (file, source), closing(source):
        if h5ad.is_mudata(file):
            return h5ad.mudata_columns(file, modality)
        return tenx.obs_columns(file) if tenx.is_tenx(file) else h5ad.anndata_columns(file)


def open_by_columns(path: str, *, layer: str) -> Store | None:
    """Open an .h5ad file whose matrix is CSC as a store of genes x cells, without names; None where it is no such."""
    if not os.path.isfile(path) or not _first_bytes(path).startswith(HDF5):
        return None
    from gpuload.formats import h5ad, hdf5, tenx

    with hdf5.opened(path) as (file, source):
        is_other = h5ad.is_mudata(file) or tenx.is_tenx(file)
        store = None if is_other else h5ad.by_columns(file, source, layer)
        if store is None:
            source.close()
        return store


@contextmanager
def anndata_groups(path: str) -> Iterator[list[Any]]:
    """Yield the groups of a path that are each an AnnData, open within the block; none where the form is another."""
    path, modality = _modality(path)
    from gpuload.formats import h5ad, hdf5, tenx, zarr

    first = b"" if _is_folder(path) else _first_bytes(path)
    if folder_form(path) == "zarr" or (first.startswith(ZIP) and zarr.is_zarr_zip(path)):
        with zarr.anndata_groups(path) as groups:
            yield groups
    elif not first or first.startswith((NPY, ZIP)):
        yield []
    else:
        with hdf5.opened(path) as (file, source), closing(source):
            if h5ad.is_mudata(file):
                yield [file["mod"][modality or next(iter(file["mod"]))]]
            else:
                yield [] if tenx.is_tenx(file) else [file]


def file_of(path: str) -> str:
    """Return the file or folder that a path names, without what chooses a part of it; ReadError where there is none."""
    return _modality(path)[0]


def _modality(path: str) -> tuple[str, str]:
    """Return a path and what follows the name of its file."""
    address = as_address(path)
    if address is not None:
        return _modality_at(address)
    if os.path.exists(path):
        return path, ""
    head, tail = os.path.split(path)
    for _ in range(2):  # "cells.h5mu/rna" or "cells.h5mu/mod/rna"
        if os.path.isfile(head):
            return head, tail.removeprefix("mod/")
        head, name = os.path.split(head)
        tail = f"{name}/{tail}"
    raise ReadError(f"{path}: no such file. Check the path.")


def _modality_at(address: Address) -> tuple[Address, str]:
    """Return an address and what follows the key of its object."""
    at, tail = address, ""
    for _ in range(3):
        if at.is_file or (not tail and at.is_folder):
            return at, tail.removeprefix("mod/")
        tail = f"{at.rpartition('/')[2]}/{tail}".strip("/")
        at = at.parent()
        if not at.key:
            break
    raise ReadError(f"{address}: no such object. Check the address.")


def nbytes_at(address: Address) -> int:
    """Return the bytes of the object at an address, or of all objects of the folder; a modality's are its object's."""
    at, _ = _modality_at(address)
    return at.object().nbytes if at.is_file else sum(found.nbytes for found in (at.listed or {}).values())


def _is_folder(path: str) -> bool:
    address = as_address(path)
    return os.path.isdir(path) if address is None else address.is_folder


def _first_bytes(path: str) -> bytes:
    address = as_address(path)
    if address is not None:
        return address.first_bytes(8)
    try:
        with open(path, "rb") as file:
            return file.read(8)
    except OSError as error:
        raise ReadError(f"{path}: cannot be opened: {error.strerror}. Check the path and its permissions.") from error


def _open_folder(path: str, layer: str, obs: Sequence[str]) -> Store:
    if folder_form(path) == "scdl":
        from gpuload.formats.scdl import open_scdl

        return open_scdl(path, layer=layer, obs=obs)
    from gpuload.formats.zarr import open_zarr

    return open_zarr(path, layer=layer, obs=obs)


def _open_hdf5(path: str, modality: str, layer: str, obs: Sequence[str]) -> Store:
    from gpuload.formats import h5ad, hdf5, tenx

    with hdf5.opened(path) as (file, source):
        if h5ad.is_mudata(file):
            return h5ad.read_mudata(file, source, modality, layer, obs)
        if modality:
            raise StoreError(
                f"{path}: it holds no modalities, so {path + '/' + modality!r} means nothing; give the "
                "file's path alone."
            )
        if tenx.is_tenx(file):
            return tenx.read_tenx(file, source, layer, obs)
        return h5ad.read_anndata(file, source, layer, obs)
