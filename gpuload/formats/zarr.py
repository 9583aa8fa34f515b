"""Open AnnData and MuData in zarr, and annbatch's collections of AnnData, as a `Store`.

Of zarr format 2 or 3, in a folder or a zip file. zarr-python is not needed: the metadata required is small, and the
engine itself reads the chunks.

References
----------
.. [1] AnnData documentation, "On-disk format".
.. [2] annbatch documentation, "Pre-shuffling" (``encoding-type: annbatch-preshuffled``; groups ``dataset_<number>``).
"""

from __future__ import annotations

import os
import re
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import numpy as np

from gpuload.concat import concat, stored_columns, with_columns
from gpuload.errors import CorruptDataError, StoreError
from gpuload.formats import arrays
from gpuload.formats.addresses import as_address
from gpuload.formats.members import is_logged, read_by_columns, read_members
from gpuload.formats.mudata import is_mudata, modality_groups, read_modality
from gpuload.formats.mudata import obs_columns as columns_of
from gpuload.formats.obs import column_names
from gpuload.formats.zarr_nodes import Array, Group, open_node
from gpuload.formats.zarr_remote import RemoteTree
from gpuload.formats.zarr_trees import FolderTree, ZipTree
from gpuload.source import check_same, closed_on_error, identity_of
from gpuload.store import Store

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from numpy.typing import NDArray

    from gpuload.formats.zarr_trees import Tree
    from gpuload.layout import ArrayLayout
    from gpuload.store import Matrix, ObsColumn
    from gpuload.types import Source

_COLLECTION = "annbatch-preshuffled"
_DATASET = re.compile(r"dataset_(0|[1-9][0-9]*)")


def open_zarr(
    path: str, *, layer: str, obs: Sequence[str], modality: str = "", fill: bool = False, var: Sequence[str] = ()
) -> Store:
    """Open an AnnData in zarr, an annbatch collection of them, or a modality of a MuData.

    Parameters
    ----------
    obs
        Columns of obs to keep in memory; for a modality, also those shared by all cells.
    modality
        The modality of a MuData; may be ``""`` if there is only one.
    fill
        Fill columns of obs that only some data sets of a collection have with missing values in the others.
    var
        Columns of var to keep in memory.

    Raises
    ------
    ReadError
        A file cannot be opened or read, or is too short.
    StoreError
        It is not an AnnData, lacks what was requested, is CSC, or has an unsupported encoding.
    CorruptDataError
        Metadata, a shard index or indptr is damaged.
    """
    with _opened(path) as (root, access):

        def read(group: Any, own: Sequence[str], name: str) -> Store:
            store = _store(name, *read_members(group, name, layer, own, var, access))
            return replace(store, logged=(name,) if is_logged(group, layer, access) else ())

        if is_mudata(root):
            return read_modality(root, path, modality, obs, read)
        groups = _groups(root, path, modality)
        if isinstance(root, Array):  # by itself, of cells x values
            arrays.check_plain_matrix(path, layer, obs, "store an AnnData")
            if var:
                raise arrays.no_var(path, var)
            arrays.check_n_dims(f"{path}: it", root.ndim)
            matrix = arrays.dense_matrix(access.layout(root), f"{path}: it")
            return _store(path, matrix, arrays.numbered(matrix.n_vars), {})
        known = [column_names(arrays.member(group, "obs", path)) if obs and fill else obs for _, group in groups]
        each = zip(groups, stored_columns(obs, known), strict=True)
        stores = [with_columns(read(group, own, name), obs) for (name, group), own in each]
        return concat(stores, cure="the data sets of a collection have the same genes in the same order: recreate it.")


def open_by_columns(path: str, *, layer: str, modality: str = "") -> Store | None:
    """Open a CSC matrix as a store of genes x cells, without names; None if it is not CSC, or is one of several."""
    with _opened(path) as (root, access):
        groups = _groups(root, path, modality)
        for name, group in groups if len(groups) == 1 else ():
            matrix = read_by_columns(group, name, layer, access)
            if matrix is not None:
                return _store(name, matrix, np.empty(matrix.n_vars, dtype=object), {})
        access.close()
        return None


def obs_columns(path: str, modality: str = "") -> list[str]:
    """Return the names of the columns of obs; for a collection, those of any of its data sets."""
    with _opened(path) as (root, access):
        if is_mudata(root):
            names = columns_of(root, path, modality)
        else:
            frames = [arrays.member(group, "obs", path) for _, group in _groups(root, path, modality)]
            names = list(dict.fromkeys(name for frame in frames for name in column_names(frame)))
        access.close()
        return names


@contextmanager
def anndata_groups(path: str, modality: str = "") -> Iterator[list[Group]]:
    """Yield the AnnData groups of a store: the store itself, a modality, or a collection's data sets."""
    with _opened(path) as (root, access):
        yield [group for _, group in _groups(root, path, modality)]
        access.close()


def is_zarr_zip(path: str) -> bool:
    """Return whether a zip file holds a zarr store."""
    tree = ZipTree(path)
    try:
        return open_node(tree, "") is not None
    finally:
        tree.source.close()


@contextmanager
def _opened(path: str) -> Iterator[tuple[Group | Array, _Access]]:
    """Open a store's root; if an error ends the block, close the sources of the layouts."""
    address, identity = as_address(path), identity_of(path)
    access = _Access(path)
    tree: Tree
    with closed_on_error(access), ExitStack() as asking, arrays.damage_to_metadata(path):
        if address is not None:
            tree = RemoteTree(address)
            asking.callback(tree.close)
        elif os.path.isdir(path):
            tree = FolderTree(path)
        else:
            tree = ZipTree(path)
            access.held.append(tree.source)
        root = open_node(tree, "")
        if root is None:
            raise StoreError(f"{path}: this is no zarr group; expected an AnnData written by its write_zarr.")
        yield root, access
        if isinstance(tree, FolderTree):
            check_same(path, identity)


def _groups(root: Group | Array, path: str, modality: str) -> list[tuple[str, Group]]:
    """Return the AnnData groups of a store, each after its name in errors; none if it is an array."""
    chosen = modality_groups(root, path, modality)
    if chosen or isinstance(root, Array):
        return chosen
    if root.attrs.get("encoding-type") != _COLLECTION:
        return [(path, root)]
    found = sorted((int(m[1]), name) for name in root.folders() if (m := _DATASET.fullmatch(name)))
    if not found:
        raise StoreError(f"{path}: this collection holds no data sets; add some with annbatch's add_adatas.")
    for i, (number, name) in enumerate(found):
        if i != number or name not in root:
            missing = f"dataset_{i}" if i != number else f"the metadata of {name}"
            raise CorruptDataError(f"{path}: this collection lacks {missing}; copy all of it again.")
    return [(os.path.join(path, name), root[name]) for _, name in found]


def _store(
    name: str,
    matrix: Matrix,
    var_names: NDArray[Any],
    obs: dict[str, ObsColumn],
    var: Mapping[str, ObsColumn] = MappingProxyType({}),
) -> Store:
    """Return the store of one matrix and its cells; `name` is its name in errors."""
    sources = tuple(dict.fromkeys(layout.source for layout in matrix.layouts))
    return Store((matrix,), (name,), var_names, obs, sources, var=(var,))


class _Access:
    """Zarr's side of `members`; holds the sources of the layouts."""

    owner = "AnnData"
    writer = "write_zarr"

    def __init__(self, path: str) -> None:
        self.name = path
        self.held: list[Source] = []

    def close(self) -> None:
        """Close the sources."""
        for source in self.held:
            source.close()

    def is_array(self, node: Any) -> bool:
        return isinstance(node, Array)

    def has_group(self, root: Group, key: str) -> bool:
        return root.has_group(key)

    def layout(self, stored: Array) -> ArrayLayout:
        layout = stored.layout()
        self.held.append(layout.source)
        return layout

    def indptr(self, stored: Array, n_rows: int, nnz: tuple[int, int]) -> NDArray[np.int64]:
        return arrays.checked_indptr(stored.read(), f"{self.name}: {stored.name}", n_rows, nnz)
