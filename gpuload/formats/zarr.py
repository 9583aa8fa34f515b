"""AnnData in zarr, and annbatch's collections of such -> Store.

The library of that name is not needed: what is to be known of its files is little, and what reads them here is the
engine's own.

Requirements this module answers
--------------------------------
- AnnData as anndata writes it in version 2 or 3, in a folder or a zip file; X, layers and raw, CSR or dense.
- annbatch's collections: the cells of all their data sets, in the order of their numbers.
- What a store says is checked as that of an .h5ad file is.

References
----------
.. [1] AnnData documentation, "On-disk format".
.. [2] annbatch documentation, "Pre-shuffling" (``encoding-type: annbatch-preshuffled``; groups ``dataset_<number>``).
"""

from __future__ import annotations

import os
import re
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

from gpuload.errors import CorruptDataError, GpuloadError, StoreError
from gpuload.formats.addresses import as_address
from gpuload.formats.arrays import check_integers, check_n_vars, checked_indptr
from gpuload.formats.members import read_members
from gpuload.formats.obs import column_names
from gpuload.formats.zarr_arrays import Array
from gpuload.formats.zarr_nodes import FolderTree, Group, ZipTree, open_node
from gpuload.formats.zarr_remote import RemoteTree
from gpuload.store import CsrMatrix, Store, concat

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from gpuload.formats.zarr_nodes import Tree
    from gpuload.layout import ArrayLayout
    from gpuload.types import Source

_COLLECTION = "annbatch-preshuffled"
_DATASET = re.compile(r"dataset_(0|[1-9][0-9]*)")


def open_zarr(path: str, *, layer: str, obs: Sequence[str]) -> Store:
    """Open an AnnData in zarr, or annbatch's collection of such.

    Parameters
    ----------
    path
        A folder or a zip file.
    layer
        ``"X"``, ``"raw.X"`` or the name of a layer.
    obs
        Columns of obs to hold in memory.

    Raises
    ------
    ReadError
        A file cannot be opened or read, or is shorter than it should be.
    StoreError
        It is no AnnData, lacks what is asked for, is CSC, or is encoded in a way that cannot be decoded.
    CorruptDataError
        Metadata, the index of a shard or indptr is damaged.
    """
    with _opened(path) as (root, tree, held):
        groups = _datasets(root, path)
        stores = [_read(group, tree, held, layer, obs) for group in groups]
        return concat(stores, cure="a collection's data sets have the same genes in the same order: make it anew.")


def obs_columns(path: str) -> list[str]:
    """Return the names of the columns of obs; of a collection, those of its first data set."""
    with _opened(path) as (root, _, held):
        names = column_names(_datasets(root, path)[0].get("obs"))
        for source in held:
            source.close()
        return names


@contextmanager
def anndata_groups(path: str) -> Iterator[list[Group]]:
    """Yield the groups of a store that are each an AnnData: the store, or a collection's data sets."""
    with _opened(path) as (root, _, held):
        try:
            yield _datasets(root, path)
        finally:
            for source in held:
                source.close()


def is_zarr_zip(path: str) -> bool:
    """Return whether a zip file holds a zarr store."""
    tree = ZipTree(path)
    try:
        return open_node(tree, "") is not None
    finally:
        tree.source.close()


@contextmanager
def _opened(path: str) -> Iterator[tuple[Group, Tree, list[Source]]]:
    """Open a store's root; sources that are noted in the list are closed where an error leaves the block."""
    held: list[Source] = []
    address = as_address(path)
    try:
        tree: Tree
        with ExitStack() as asking, _translated(path):
            if address is not None:
                tree = RemoteTree(address)
                asking.callback(tree.close)
            elif os.path.isdir(path):
                tree = FolderTree(path)
            else:
                tree = ZipTree(path)
                held.append(tree.source)
            root = open_node(tree, "")
            if not isinstance(root, Group):
                found = "an array" if isinstance(root, Array) else "no zarr group"
                raise StoreError(f"{path}: this is {found}; expected AnnData as its write_zarr writes it.")
            yield root, tree, held
    except BaseException:
        for source in held:
            source.close()
        raise


@contextmanager
def _translated(path: str) -> Iterator[None]:
    """Translate what NumPy and pandas raise on damaged metadata, once, at the edge."""
    try:
        yield
    except GpuloadError:
        raise
    except Exception as error:
        words = (str(error).strip() or type(error).__name__).splitlines()[0].rstrip(".")
        raise CorruptDataError(f"{path}: its metadata cannot be read ({words}); restore it from its source.") from error


def _datasets(root: Group, path: str) -> list[Group]:
    """Return the groups that are each an AnnData."""
    if root.attrs.get("encoding-type") != _COLLECTION:
        return [root]
    found = sorted((int(m[1]), name) for name in root if (m := _DATASET.fullmatch(name)))
    if not found:
        raise StoreError(f"{path}: this collection holds no data sets; add some with annbatch's add_adatas.")
    numbers = [number for number, _ in found]
    if numbers != list(range(len(found))):
        missing = next(i for i, number in enumerate(numbers) if i != number)
        raise CorruptDataError(f"{path}: this collection lacks dataset_{missing}; copy it again, whole.")
    return [root[name] for _, name in found]


def _read(group: Group, tree: Tree, held: list[Source], layer: str, obs: Sequence[str]) -> Store:
    """Return the store of one AnnData."""
    name = os.path.join(tree.name, group.name.strip("/")) if group.name != "/" else tree.name
    access = _Access(tree.name)
    try:
        matrix, var_names, columns = read_members(group, name, layer, obs, access)
    finally:
        held += access.sources
    return Store((matrix,), (name,), var_names, columns, tuple(dict.fromkeys(access.sources)))


class _Access:
    """What `members` needs of zarr; notes the sources of the layouts."""

    owner = "AnnData"
    writer = "write_zarr"

    def __init__(self, path: str) -> None:
        self._path = path
        self.sources: list[Source] = []

    def is_array(self, node: Any) -> bool:
        return isinstance(node, Array)

    def layout(self, node: Array) -> ArrayLayout:
        layout = node.layout()
        self.sources.append(layout.source)
        return layout

    def csr(self, node: Group, n_rows: int, n_vars: int) -> CsrMatrix:
        where, arrays = f"{self._path}: {node.name}", {}
        for name in ("data", "indices", "indptr"):
            array = node.get(name)
            if not isinstance(array, Array):
                raise StoreError(f"{where} lacks {name!r}; a CSR matrix has data, indices and indptr.")
            if array.ndim != 1:
                raise StoreError(f"{where}/{name} has {array.ndim} dimensions; expected one.")
            if name != "data":
                check_integers(f"{where}/{name}", array.dtype)
            arrays[name] = array
        check_n_vars(where, n_vars)
        nnz = arrays["data"].shape[0], arrays["indices"].shape[0]
        if arrays["indptr"].shape[0] != n_rows + 1:
            raise CorruptDataError(
                f"{where}/indptr has {arrays['indptr'].shape[0]} entries for {n_rows} rows; expected {n_rows + 1}. "
                "Write the store anew."
            )
        indptr = checked_indptr(arrays["indptr"].read(), f"{where}/indptr", n_rows, nnz)
        return CsrMatrix(indptr, self.layout(arrays["data"]), self.layout(arrays["indices"]), n_vars)
