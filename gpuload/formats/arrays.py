"""What every format needs: arrays stored as raw elements, validation of row offsets, and refusals.

Depends on no file format, and on no library but NumPy.
"""

from __future__ import annotations

import math
import os
import re
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any

import numpy as np

from gpuload import machine
from gpuload.errors import CorruptDataError, GpuloadError, ReadError, StoreError, first_line, listing, nearest, unlisted
from gpuload.layout import ArrayLayout
from gpuload.store import DenseMatrix

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from numpy.typing import NDArray

    from gpuload.types import Source

CHUNK_NBYTES = 1 << 20
"""Bytes per piece into which unchunked storage is split, to bound each read and its buffer."""

NAME_NBYTES, MANY_NAMES = 64, 1 << 24
"""Bytes of memory that a gene's name takes: a str of Python of some characters, and its address. Fewer names fit."""

OBSM = "obsm/"
"""Prefix of the name of a matrix in obsm, as opposed to a layer."""

_NAMES_OF_CELLS = ("index", "_index", "obs_names")

RESTORE = "Restore the file from its source."


def plain_layout(
    source: Source, name: str, shape: tuple[int, ...], dtype: np.dtype[Any], offset: int | None, fill_value: float = 0
) -> ArrayLayout:
    """Return the layout of a contiguous array in C order.

    Parameters
    ----------
    offset
        First byte; None if nothing was ever written, so that everything is the fill value.

    Raises
    ------
    StoreError
        The dtype is not supported in a minibatch.
    ReadError
        The source ends before the array.
    """
    check_dtype(f"{source.name}: {name}", dtype)
    row_nbytes = math.prod(shape[1:]) * dtype.itemsize
    if offset is not None and offset + shape[0] * row_nbytes > source.nbytes:
        raise ends_early(source, name, offset + shape[0] * row_nbytes)
    chunk_rows = max(1, CHUNK_NBYTES // max(1, row_nbytes))
    first = np.arange(0, shape[0], chunk_rows, dtype=np.int64)
    nbytes = np.minimum(chunk_rows, shape[0] - first) * row_nbytes
    return ArrayLayout(
        source,
        name,
        shape,
        dtype,
        (chunk_rows, *shape[1:]),
        first * row_nbytes + (offset or 0),
        np.zeros_like(nbytes) if offset is None else nbytes,
        np.zeros(first.size, dtype=np.uint32),
        (),
        fill_value,
        is_chunked=False,
    )


def dense_matrix(layout: ArrayLayout, where: str) -> DenseMatrix:
    """Return the matrix of an array of cells x values; each cell's values may have several dimensions.

    Raise StoreError if there are too many per cell.
    """
    check_n_vars(where, math.prod(layout.shape[1:]), "genes" if len(layout.shape) == 2 else "values in each cell")
    return DenseMatrix(layout.flattened(), layout.shape[1:])


def check_dtype(where: str, dtype: np.dtype[Any]) -> None:
    """Raise StoreError if minibatches do not support values of a dtype."""
    if dtype.kind not in "biuf" or dtype.itemsize > 8:
        raise StoreError(f"{where} has dtype {dtype}; only integers, booleans and floats of up to 8 bytes can be read.")


def check_n_dims(where: str, n_dims: int) -> None:
    """Raise StoreError if an array has too few dimensions to have cells and their values."""
    if n_dims < 2:
        raise StoreError(
            f"{where} has {n_dims} dimensions; expected a matrix of cells x columns, or more dimensions for arrays of "
            "cells."
        )


def check_integers(where: str, dtype: np.dtype[Any]) -> None:
    """Raise StoreError if a dtype cannot hold row offsets or column numbers."""
    if dtype.kind not in "iu":
        raise StoreError(f"{where} has dtype {dtype}; expected integers.")


def check_n_vars(where: str, n_vars: int, what: str = "genes") -> None:
    """Raise StoreError if there are more genes, or values in a cell, than can be numbered, or named in memory."""
    if not 0 <= n_vars < 1 << 31:
        raise StoreError(f"{where} has {n_vars} {what}; at most 2**31 - 1 can be addressed.")
    if n_vars >= MANY_NAMES and n_vars * NAME_NBYTES > (there := machine.memory_nbytes()) // 2:
        raise StoreError(
            f"{where} has {n_vars} {what}, whose names would take {n_vars * NAME_NBYTES / 1e9:.1f} GB of memory, but "
            f"this machine has {there / 1e9:.1f} GB. Is it damaged?"
        )


def ends_early(source: Source, name: str, wanted: int) -> ReadError:
    """Return the error for an array that extends beyond the end of its file."""
    return ReadError(
        f"{source.name}: {name} should reach byte {wanted} but the file ends at byte {source.nbytes}. Was it truncated?"
    )


def checked_indptr(
    given: NDArray[Any], where: str, n_rows: int, nnz: tuple[int, int], cure: str = RESTORE
) -> NDArray[np.int64]:
    """Return row offsets as int64, after validating them.

    Parameters
    ----------
    given : (n_rows + 1,) integers
        As stored.
    nnz
        Lengths of data and indices.

    Raises
    ------
    CorruptDataError
        Their number is wrong, they are not monotonic from 0, or they do not end at both lengths.
    """
    if given.shape != (n_rows + 1,):
        raise CorruptDataError(f"{where} has {given.size} entries for {n_rows} rows; expected {n_rows + 1}. {cure}")
    if given[0] != 0 or np.any(given[1:] < given[:-1]):
        at = 0 if given[0] else int(np.argmax(given[1:] < given[:-1])) + 1
        raise CorruptDataError(f"{where} does not rise from 0: entry {at} is {given[at]}. {cure}")
    if nnz != (given[-1], given[-1]):
        raise CorruptDataError(f"{where} ends at {given[-1]} but there are {nnz[0]} data and {nnz[1]} indices. {cure}")
    return np.ascontiguousarray(given, dtype=np.int64)  # cast only now: uint64 holds more


def check_filter(path: str, error: Exception) -> None:
    """Raise StoreError if h5py lacks the filter of what could not be read: then the file is not damaged."""
    told = first_line(error)
    if re.search(r"\(can't open directory|filter .*not registered", told):  # where HDF5 looks for plugins
        raise StoreError(
            f"{path}: a column or the row offsets are compressed with an HDF5 filter that h5py lacks ({told}); "
            "install hdf5plugin and import it first, or rewrite the file with compression='gzip'."
        ) from error


@contextmanager
def damage_to_metadata(path: str) -> Iterator[None]:
    """Report what NumPy, pandas, h5py and anndata raise of damaged metadata, whatever it is."""
    try:
        yield
    except (GpuloadError, ImportError):  # a missing package that anndata needs is not the file's fault
        raise
    except MemoryError as error:
        raise CorruptDataError(
            f"{path}: a size in its metadata is impossible ({first_line(error)}), or there is too little memory; "
            "free some, or restore the file."
        ) from error
    except Exception as error:
        check_filter(path, error)
        raise CorruptDataError(
            f"{path}: its metadata cannot be read ({first_line(error)}); restore the file from its source."
        ) from error


def check_length(where: str, found: int, wanted: int, what: str) -> None:
    """Raise CorruptDataError if names or a column do not fit the matrix."""
    if found != wanted:
        raise CorruptDataError(f"{where} has {found} entries but the matrix has {wanted} {what}; rewrite the file.")


def names_in(folder: str) -> list[str]:
    """Return the sorted names of the files and folders in a folder; raise ReadError if it cannot be listed."""
    try:
        return sorted(os.listdir(folder))
    except OSError as error:
        raise unlisted(folder, error) from error


def numbered(n: int, first: int = 0) -> NDArray[np.object_]:
    """Return default names of genes or cells: ``"0"``, ``"1"``, ..., or from `first` on."""
    return np.array(list(map(str, range(first, first + n))), dtype=object)


def as_strings(values: Any) -> NDArray[np.object_]:
    """Return names as an object array of str; bytes are decoded as UTF-8."""
    if isinstance(values, np.ndarray) and values.dtype.kind in "OSU":
        values = values.tolist()  # faster to go through
    types = set(map(type, values))
    is_text = types == {str}
    if types == {bytes}:
        names = b"\0".join(values).decode().split("\0")  # all at once, unless a name contains the separator
        is_text = len(names) == len(values)
        values = names if is_text else values
    out = np.empty(len(values), dtype=object)
    out[:] = values if is_text else [v.decode() if isinstance(v, bytes) else str(v) for v in values]
    return out


def as_text(value: Any) -> str:
    """Return an attribute as str; other languages write fixed-length strings, which arrive as bytes."""
    return value.decode() if isinstance(value, bytes) else str(value)


def member(group: Any, key: str, path: str) -> Any:
    """Return a member of a group in a file, or None if there is none; refuse a link that leads nowhere."""
    found = group.get(key)
    if found is None and key in group:
        raise StoreError(
            f"{path}: {group.name.rstrip('/')}/{key} is a link, and what it leads to is not there; put that back, or "
            "copy it into this file."
        )
    return found


def check_stored(stored: Any, where: str) -> None:
    """Refuse what is no array of text or numbers in this file, or a group with such a member.

    Of h5py, a single value is no array of NumPy; a virtual data set reads as zeros if its files are away; and reading
    what damage has made of a data type may crash the HDF5 library.
    """
    for name in stored if hasattr(stored, "values") else ():
        check_stored(stored[name], f"{where}/{name}")
    if getattr(stored, "is_virtual", False):
        raise StoreError(f"{where} keeps its bytes in other files; copy it into one file first, with h5repack.")
    if getattr(stored, "shape", None) == ():
        raise StoreError(f"{where} has no dimensions; expected an array of cells or genes.")
    if hasattr(stored, "asstr") and stored.dtype.kind == "O":
        try:
            stored.asstr()
        except TypeError:
            raise StoreError(
                f"{where} holds neither text nor numbers; write it again with AnnData, or restore the file from its "
                "source."
            ) from None


def attrs_of(node: Any, *names: str) -> Any:
    """Return the attributes of a node, the named ones checked.

    Reading what damage has made of the data type of a text may crash the HDF5 library.
    """
    attrs = node.attrs
    for name in names if hasattr(attrs, "get_id") else ():
        with suppress(KeyError):  # there is none
            if (attrs.get_id(name).dtype.metadata or {}).get("vlen", str) not in (str, bytes):
                raise ValueError(f"the attribute {name!r} of {node.name} is neither text nor numbers")
    return attrs


def check_plain_matrix(where: str, layer: str, obs: Sequence[str], cure: str) -> None:
    """Raise StoreError if a layer or column is requested of a format that holds a single matrix."""
    if layer.startswith(OBSM):
        raise no_obsm(where, layer, ())
    for setting, value, is_plain in (("layer", layer, layer == "X"), ("obs", list(obs), not obs)):
        if not is_plain:
            also = " (for obs=, where= or a sampler)" if setting == "obs" else ""
            raise StoreError(
                f"{where}: this format has no {setting}, so {setting}={value!r}{also} is not available; {cure}."
            )


def no_obsm(where: str, layer: str, names: Iterable[str]) -> StoreError:
    """Return the error for a missing matrix of obsm, listing those that exist."""
    have = ", ".join(repr(str(name)) for name in names)
    name = layer.removeprefix(OBSM)
    error = StoreError(
        f"{where}: there is no obsm {name!r}; "
        + (f"its obsm has {have}. Choose one of them." if have else "it has no obsm. Leave obsm= out.")
    )
    error.missing_matrix = f"{where}: there is no obsm {name!r}"
    return error


def no_layer(where: str, layer: str, layers: Sequence[str], cure: str) -> StoreError:
    """Return the error for a missing layer of an AnnData."""
    have = "" if layers else ", as it has no layers"
    error = StoreError(f"{where}: there is no layer {layer!r}{have}; {cure}")
    error.missing_matrix = f"{where}: there is no layer {layer!r}"
    return error


def other_matrices(layers: Sequence[str], others: Sequence[str]) -> str:
    """Return which matrices of an AnnData can be read in place of a missing one, as the end of a sentence."""
    each = [f"one of its layers, {listing(layers)}"] if layers else []
    each += [f"layer={name!r}" for name in others]
    return f"choose {', or '.join(each)}." if each else "no other matrix is there: name another file."


def no_var(where: str, names: Sequence[str]) -> StoreError:
    """Return the error for columns of var that are requested where no var is read."""
    return StoreError(
        f"{where}: no columns of var are read from it, so genes= cannot be a condition on {listing(names)}; pass the "
        "names of genes in a list, or a mask over all genes."
    )


def no_column(where: str, name: str, names: Sequence[str], frame: str = "obs") -> StoreError:
    """Return the error for a missing column of obs or var, listing those that exist."""
    near = nearest(name, names)
    guess = f"did you mean {near!r}? It has" if near else "it has"
    if frame != "obs":
        return StoreError(
            f"{where}: {frame} has no column {name!r}; {guess} {listing(names)}. In genes=, put names of genes in a "
            "list, and text in quotes."
        )
    if name in _NAMES_OF_CELLS:
        guess = "the names of cells are gpuload.obs_names(paths)[batch.rows]. It has"
    error = StoreError(f"{where}: obs has no column {name!r}; {guess} {listing(names)}.")
    error.missing_column = name
    return error
