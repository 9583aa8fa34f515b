"""Recognise what a path leads to by its contents, and choose the function that opens it.

A format is recognised by its first bytes and its members; a file's suffix only decides which files of a folder count,
and spares a request at an address. No slow import is made for a format that is not there.
"""

from __future__ import annotations

import os
from contextlib import contextmanager
from fnmatch import fnmatchcase
from glob import glob, has_magic
from importlib import import_module
from typing import TYPE_CHECKING, Any

from gpuload.errors import BusyError, ReadError, StoreError, unopened
from gpuload.formats.addresses import as_address, child_of, first_bytes
from gpuload.formats.arrays import names_in, no_var
from gpuload.formats.zarr_trees import METADATA

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from gpuload.formats.addresses import Address
    from gpuload.store import Store

HDF5, NPY, ZIP, PARQUET = b"\x89HDF\r\n\x1a\n", b"\x93NUMPY", b"PK\x03\x04", b"PAR1"
"""First bytes of files. HDF5's may come after a user block, so anything else is tried as HDF5 too."""

USER_BLOCKS = (0, 512, 1024, 2048)
"""Where HDF5's first bytes may be, up to what is common; mudata writes a user block of 512."""

ENDINGS = (".h5ad", ".h5mu", ".h5", ".zarr", ".npz", ".npy", ".parquet")
"""File suffixes looked for in a folder."""

_OF_HDF5 = (".h5ad", ".h5mu", ".h5")
"""Suffixes by which an object counts as HDF5, as there may be thousands: each is asked for once less."""

GENES_FILE = "gene_metadata.parquet"
"""The table beside Parquet files of cells that says which gene a number stands for; see `parquet_genes`."""

MODALITIES, MEASUREMENTS = "mod", "ms"
"""The groups of a MuData, and of a SOMA experiment, that hold their modalities."""

_TILEDB_GROUP = ("__tiledb_group.tdb", "__group")
"""Members of the folder of a TileDB group."""

_WITH_MODALITIES = {"hdf5": MODALITIES, "zarr": MODALITIES, "soma": MEASUREMENTS}
"""Forms of which a modality may be chosen by the path, and the group that holds them."""

_OPENERS = {
    "hdf5": ("h5ad", "open_hdf5"),
    "npy": ("numpy", "open_npy"),
    "npz": ("numpy", "open_npz"),
    "parquet": ("parquet_cells", "open_cells"),
    "scdl": ("scdl", "open_scdl"),
    "soma": ("soma", "open_soma"),
    "zarr": ("zarr", "open_zarr"),
}
"""Module and function that opens paths of a form, imported only for a path of it."""

_OF_ANNDATA = ("hdf5", "zarr")
"""Forms that may hold AnnData: their modules also open a CSC matrix, and give the groups."""

_WITH_VAR = ("hdf5", "zarr", "soma")
"""Forms from which columns of var are read."""

_WITHOUT_OBS = ("npy", "npz")
"""Forms without columns of obs, which the modules of all others name."""


def expand(path: str) -> list[str]:
    """Return the paths that a path stands for: the files of a folder or of a pattern, else the path itself.

    Raises
    ------
    ReadError
        Nothing is there, or nothing matches the pattern.
    StoreError
        A folder holds nothing that can be opened, or files of several formats.
    """
    address = as_address(path)
    path = path if address is None else address
    is_pattern = has_magic(path) if address is None else address.is_pattern
    if is_pattern and not (os.path.exists(path) if address is None else address.is_file):
        fitting = glob(path) if address is None else _fitting(address)
        found = sorted(name for name in fitting if os.path.basename(name) != GENES_FILE)
        if not found and address is None:
            _check_spelling(path)
        if not found:
            folder = os.path.dirname(path)
            while has_magic(folder):
                folder = os.path.dirname(folder)
            _check_place(folder or os.curdir, path)
            if os.path.isdir(folder or os.curdir):  # not an address
                names_in(folder or os.curdir)
            raise ReadError(f"{path}: no file matches this pattern. Check the path.")
        return found
    if not _is_folder(path) or folder_form(path):
        return [path]
    within = names_in(path) if address is None else {key.partition("/")[0] for key in address.listed or ()}
    is_meant = (name for name in within if not name.startswith(".") and name != GENES_FILE)
    names = sorted(name for name in is_meant if name.endswith(ENDINGS))
    endings = sorted({os.path.splitext(name)[1] for name in names})
    if not names:
        if any(name.removesuffix(".gz").endswith(".mtx") for name in within):
            raise StoreError(
                f"{path}: this folder holds a matrix as text (.mtx); write it as .h5ad once, for example with "
                "scanpy.read_10x_mtx(folder).write_h5ad(DST)."
            )
        raise StoreError(
            f"{path}: this folder has no cells: neither files that end in {', '.join(ENDINGS)} nor the parts of a "
            "zarr, an SCDL or a SOMA store. Check the path."
        )
    if len(endings) > 1:
        raise StoreError(
            f"{path}: this folder holds files of several formats ({', '.join(endings)}); pass those you mean as a list."
        )
    return [child_of(path, name) for name in names]


def _fitting(pattern: Address) -> list[Address]:
    """Return the addresses that match a pattern."""
    folder, parts = pattern, []
    while folder.is_pattern:
        parts.append(folder.own_name)
        folder = folder.parent()
    if folder.listed is None:
        raise ReadError(f"{pattern}: a web server cannot list what matches a pattern; pass the addresses as a list.")
    parts.reverse()
    names = {tuple(key.split("/")[: len(parts)]) for key in folder.listed}  # including folders
    return [folder.child("/".join(n)) for n in names if len(n) == len(parts) and all(map(_fits, n, parts))]


def _fits(name: str, pattern: str) -> bool:
    """Return whether a name matches a pattern as on a disk, where only a leading dot in it stands for one."""
    return fnmatchcase(name, pattern) and (pattern.startswith(".") or not name.startswith("."))


def folder_form(path: str) -> str:
    """Return ``"zarr"``, ``"scdl"`` or ``"soma"`` if a folder is a store of that format, else ``""``."""
    from gpuload.formats.scdl import is_scdl

    address = as_address(path)
    if address is not None:
        is_tiledb = any(key.partition("/")[0] in _TILEDB_GROUP for key in address.listed or ())  # a web server: none
        return "zarr" if address.is_zarr else "soma" if is_tiledb else ""
    if any(os.path.exists(os.path.join(path, name)) for name in METADATA):
        return "zarr"
    if any(os.path.exists(os.path.join(path, name)) for name in _TILEDB_GROUP):
        return "soma"
    return "scdl" if is_scdl(path) else ""


def open_path(path: str, *, layer: str, obs: Sequence[str], fill: bool = False, var: Sequence[str] = ()) -> Store:
    """Open one file, or a folder that is one store.

    Parameters
    ----------
    path
        The path; for a MuData or a SOMA experiment with several modalities, followed by one: ``"cells.h5mu/rna"``.
    fill
        Fill columns of obs that only some data sets of a collection have with missing values in the others.
    var
        Columns of var to keep in memory.

    Raises
    ------
    ReadError
        Nothing is there, or it cannot be opened or read.
    StoreError
        Its format is unknown, or it lacks what was requested.
    CorruptDataError
        It is damaged.
    """
    path, modality = _modality(path)
    form = _form(path)
    if modality and form not in _WITH_MODALITIES:
        from gpuload.formats.mudata import no_modalities

        raise no_modalities(path, modality)
    if var and form not in _WITH_VAR:
        raise no_var(path, var)
    named: dict[str, Any] = {"modality": modality} if form in _WITH_MODALITIES else {}
    if var:
        named["var"] = var
    if form == "zarr":
        named["fill"] = fill
    given = [path] if form == "parquet" else path
    opened: Store = getattr(_module(form), _OPENERS[form][1])(given, layer=layer, obs=obs, **named)
    return opened


def is_parquet(path: str) -> bool:
    """Return whether a path is a Parquet file; at an address its name decides, as there may be thousands."""
    address = as_address(path)
    if address is not None:
        return address.base.endswith(".parquet")
    return os.path.isfile(path) and first_bytes(path).startswith(PARQUET)


def is_soma(path: str) -> bool:
    """Return whether a path is a SOMA experiment, or a measurement of one."""
    whole, _ = _modality(path)
    return _is_folder(whole) and folder_form(whole) == "soma"


def obs_columns(path: str) -> list[str]:
    """Return the names of a path's columns of obs; of several files, those of the first."""
    path, modality = _modality(expand(path)[0])
    form = _form(path)
    if form in _WITHOUT_OBS:
        return []
    named = {"modality": modality} if form in _OF_ANNDATA else {}
    names: list[str] = _module(form).obs_columns(path, **named)
    return names


def open_by_columns(path: str, *, layer: str) -> Store | None:
    """Open a file whose matrix is CSC as a store of genes x cells, without names; None if it is not CSC.

    Supports AnnData and MuData, in HDF5 and in zarr, on disk.
    """
    path, modality = _modality(path)
    form = _form(path)
    if form not in _OF_ANNDATA:
        return None
    opened: Store | None = _module(form).open_by_columns(path, layer=layer, modality=modality)
    return opened


@contextmanager
def anndata_groups(path: str) -> Iterator[list[Any]]:
    """Yield the AnnData groups of a path, open within the block; none if the format is another."""
    path, modality = _modality(path)
    form = _form(path)
    if form not in _OF_ANNDATA:
        yield []
        return
    with _module(form).anndata_groups(path, modality) as groups:
        yield groups


def _module(form: str) -> Any:
    return import_module(f"gpuload.formats.{_OPENERS[form][0]}")


def file_of(path: str) -> str:
    """Return the file or folder of a path, without a selected part of it; raise ReadError if it is missing."""
    return _modality(path)[0]


def _modality(path: str) -> tuple[str, str]:
    """Return a path, and what follows the name of its file, or of its folder if that has modalities."""
    address = as_address(path)
    if address is not None:
        return _modality_at(address)
    head, tail = os.path.split(path.rstrip("/"))
    if os.path.exists(path):
        whole, middle = os.path.split(head)
        is_part = os.path.isdir(path) and middle in _WITH_MODALITIES.values() and _group_of(whole) == middle
        return (whole or os.curdir, tail) if is_part else (path, "")
    for _ in range(2):  # "cells.h5mu/rna" or "cells.h5mu/mod/rna"
        group = _group_of(head) if os.path.isdir(head) else ""
        if os.path.isfile(head) or (group and os.path.basename(head) != group):
            return head, tail.removeprefix(f"{group or MODALITIES}/")
        head, name = os.path.split(head)
        tail = f"{name}/{tail}"
    _check_spelling(path)
    if os.path.islink(path):
        raise ReadError(
            f"{path}: it is a link to {os.readlink(path)!r}, where there is no file; put the file there, or leave the "
            "link out."
        )
    _check_place(path, path)
    raise ReadError(f"{path}: no such file. Check the path.")


def _check_spelling(path: str) -> None:
    """Raise ReadError for a path of nothing that is written for a shell, or as a line of a file."""
    if path.startswith("~"):
        raise ReadError(f"{path}: no such file. '~' is not expanded; pass os.path.expanduser(path).")
    if "$" in path:
        raise ReadError(f"{path}: no such file. '$' is not expanded; pass os.path.expandvars(path).")
    if path != path.strip():
        raise ReadError(f"{path!r}: no such file. It begins or ends with white space; pass path.strip().")


def _check_place(place: str, path: str) -> None:
    """Raise ReadError for a path if this user may not even see whether its place is there."""
    try:
        os.stat(place)
    except PermissionError as error:
        raise unopened(path, error) from error
    except OSError:
        pass  # it is not there


def _group_of(path: str) -> str:
    """Return the group that holds the modalities of a folder, if it is of a format that has such; else ``""``."""
    return _WITH_MODALITIES.get(folder_form(path), "")


def _modality_at(address: Address) -> tuple[Address, str]:
    """Return an address, and what follows the key of its object, or of its folder if that has modalities."""
    at, tail = address, ""
    for _ in range(3):
        if _is_there(at, has_part=bool(tail)):
            return at, tail.removeprefix(f"{MODALITIES if at.is_file else _group_of(at)}/")
        tail = f"{at.own_name}/{tail}".strip("/")
        at = at.parent()
        if not at.key:
            break
    raise address.missing()


def _is_there(address: Address, *, has_part: bool) -> bool:
    """Return whether an object is there, or a folder that is no part of another; or one that has parts."""
    if address.is_file:
        return not has_part or _may_have_parts(address)
    return address.is_folder and (_is_whole_at(address) if has_part else not _is_part_at(address))


def _may_have_parts(address: Address) -> bool:
    """Return whether an object may have parts; that of a web server may be the page of a folder."""
    if address.can_list:
        return True
    try:
        head = address.first_bytes(USER_BLOCKS[-1] + len(HDF5))
        return any(head.startswith(HDF5, at) for at in USER_BLOCKS)
    except BusyError:
        raise
    except ReadError:  # the server does not send parts of it
        return False


def _is_whole_at(address: Address) -> bool:
    """Return whether a folder may have modalities, as opposed to being the group that holds them."""
    group = _group_of(address)
    return bool(group) and address.own_name != group


def _is_part_at(address: Address) -> bool:
    """Return whether a folder is a modality of another folder."""
    folder = address.parent()
    whole, middle = folder.parent(), folder.own_name
    return middle in _WITH_MODALITIES.values() and bool(whole.key) and _group_of(whole) == middle


def nbytes_at(address: Address) -> int:
    """Return the bytes of the object at an address, or of all objects of a folder; for a modality, of its object."""
    at, _ = _modality_at(address)
    return at.object().nbytes if at.is_file else sum(found.nbytes for found in (at.listed or {}).values())


def _form(path: str) -> str:
    """Return a form of folder, ``"npy"``, ``"npz"``, ``"parquet"`` or, for any other file, ``"hdf5"``."""
    if _is_folder(path):
        return folder_form(path) or "zarr"  # whose error says what it is not
    address = as_address(path)
    if address is not None and address.base.endswith(_OF_HDF5):
        return "hdf5"
    first = first_bytes(path)
    if address is not None and first.startswith((NPY, ZIP)):
        raise StoreError(
            f"{path}: HDF5, Parquet and zarr folders can be read at an address, but .npy, .npz and zip files cannot; "
            "copy it first."
        )
    if first.startswith(ZIP):
        from gpuload.formats.zarr import is_zarr_zip

        return "zarr" if is_zarr_zip(path) else "npz"
    return "npy" if first.startswith(NPY) else "parquet" if first.startswith(PARQUET) else "hdf5"


def _is_folder(path: str) -> bool:
    address = as_address(path)
    return os.path.isdir(path) if address is None else address.is_folder
