"""Cells, each paired with its neighbours in a graph."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from gpuload.errors import PlanError, first_line
from gpuload.permute import hash64, permute_each
from gpuload.sampling.base import check_number, check_rows, digest
from gpuload.sampling.blocks import Shuffled
from gpuload.sampling.pairs import Pairs
from gpuload.sampling.rows import SLICE, list_of_mask
from gpuload.types import expand_ranges

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from gpuload.sampling.base import Cells, Strategy


@dataclass(frozen=True, eq=False)
class PairedNeighbor:
    """Pair every cell, once per epoch, with random neighbours of it in a graph, such as those in ``obsp``.

    The first part of a minibatch holds the cells, in shuffled blocks; then come their neighbours, in the same order
    (`gpuload.split_pairs` returns the two parts). The neighbours of a cell are drawn uniformly and without
    replacement, and redrawn each epoch. In a `Subset`, or with ``where=``, only its cells are neighbours.

    Parameters
    ----------
    graph : sparse matrix, shape (n_obs, n_obs)
        The stored values of row i are the neighbours of cell i, whatever their weights; the diagonal does not count.
        Rows and columns are the cells of all files, in the order of the paths: for several files with a graph each,
        pass ``scipy.sparse.block_diag(graphs)``.
    n_neighbors
        Neighbours drawn for each cell: ``neighbours.X.reshape(-1, n_neighbors, n_vars)``. If a cell has fewer, some are
        repeated.
    alone
        Cells without a neighbour are paired with themselves (``"self"``), or left out (``"drop"``).

    Raises
    ------
    PlanError
        `graph` is not a sparse matrix, is damaged, or lacks one row and one column per cell; `batch_size` is not a
        multiple of ``1 + n_neighbors``; with ``alone="drop"``, no cell has a neighbour.

    Notes
    -----
    Neighbours are read where they are in the files, which takes about as long as true random order.
    """

    graph: Any
    n_neighbors: int = 1
    alone: str = "self"

    columns: ClassVar[tuple[str, ...]] = ()

    def __post_init__(self) -> None:
        if not hasattr(self.graph, "tocsr") or getattr(self.graph, "ndim", 2) != 2:
            raise PlanError(
                f"PairedNeighbor: the graph is a {type(self.graph).__name__}; expected a sparse matrix of SciPy, such "
                "as anndata.io.read_elem(file['obsp/distances'])."
            )
        check_number("PairedNeighbor", "n_neighbors", self.n_neighbors)
        if self.alone not in ("self", "drop"):
            raise PlanError(f"PairedNeighbor(alone={self.alone!r}): expected 'self' or 'drop'.")

    def over(self, cells: Cells) -> Strategy:
        """Find the neighbours; takes 4 bytes for each and 12 per cell."""
        check_rows("PairedNeighbor", cells)
        n_together = 1 + self.n_neighbors
        if cells.batch_size % n_together:
            raise PlanError(
                f"PairedNeighbor(n_neighbors={self.n_neighbors}) with batch_size={cells.batch_size}: a minibatch has "
                f"{self.n_neighbors} neighbours for each cell; make batch_size a multiple of {n_together}."
            )
        if tuple(self.graph.shape) != (cells.n_store_rows,) * 2:
            raise PlanError(
                f"PairedNeighbor: the graph has shape {tuple(self.graph.shape)} but there are {cells.n_store_rows} "
                "cells; pass one row and one column for each cell of the files."
            )
        neighbors = _neighbors(self._rows(), cells)
        is_wanted = np.ones(cells.n_rows, dtype=bool) if self.alone == "self" else np.diff(neighbors.indptr) > 0
        if not is_wanted.any():
            raise PlanError(
                "PairedNeighbor(alone='drop'): no cell has a neighbour among these cells; pass another graph, or "
                "alone='self'."
            )
        wanted = list_of_mask(is_wanted)
        part = cells.part(wanted)
        return Pairs(
            wanted,
            Shuffled(part.file_rows, cells.block_size, part.edges),
            np.flatnonzero(is_wanted).astype(neighbors.indices.dtype),
            np.zeros(wanted.n_rows, dtype=np.uint8),
            neighbors,
            cells.batch_size,
            {"name": "PairedNeighbor", "alone": self.alone, "block_size": cells.block_size},
            int(self.n_neighbors),
        )

    def _rows(self) -> Any:
        """Return the graph in CSR form, with neighbours stored twice merged into one."""
        graph = self.graph.tocsr()
        try:
            graph.check_format(full_check=True)
        except ValueError as error:
            raise PlanError(
                f"PairedNeighbor: the graph is damaged: {first_line(error)}; compute it again, or read it again."
            ) from error
        if not graph.has_canonical_format:
            graph = graph.copy()
            graph.sum_duplicates()
        return graph


@dataclass(frozen=True, slots=True, eq=False)
class Neighbors:
    """The neighbours of each cell, as partners that `Pairs` draws.

    Attributes
    ----------
    indptr : (n_rows + 1,) int64
        Where each cell's neighbours begin in `indices`.
    indices : (n,) uint32 or int64
        Rows of the neighbours.
    """

    indptr: NDArray[np.int64]
    indices: NDArray[np.integer]

    def take(self, queue: NDArray[np.int64], place: NDArray[np.int64], key: int) -> NDArray[np.int64]:
        """Return neighbours of the cells `queue`, shape (n,) int64: number `place` in each cell's random order."""
        n_there = (self.indptr[queue + 1] - self.indptr[queue]).astype(np.int64)
        rows = queue.copy()  # a cell without neighbours is its own partner
        has = np.flatnonzero(n_there)
        cell, n_there = queue[has], n_there[has]
        keys = hash64(hash64(cell.astype(np.uint64)) ^ np.uint64(key))
        rows[has] = self.indices[self.indptr[cell] + permute_each(place[has] % n_there, n_there, keys)]
        return rows

    def digest(self) -> str:
        """Return a digest of the graph, for a state's fingerprint."""
        return digest(self.indptr, self.indices)


def _neighbors(graph: Any, cells: Cells) -> Neighbors:
    """Return the neighbours of cells among the given cells; computed in slices, to use little further memory."""
    local = None
    if cells.chosen is not None:
        local = np.full(cells.n_store_rows, -1, dtype=np.int64)
        for start, rows in cells.chosen.slices():
            local[rows] = np.arange(start, start + rows.size)
    indptr, parts = np.zeros(cells.n_rows + 1, dtype=np.int64), []
    for start in range(0, cells.n_rows, SLICE):
        own = np.arange(start, min(start + SLICE, cells.n_rows))
        rows = own if cells.chosen is None else cells.chosen.slice(start, start + own.size)
        ranges = np.stack([graph.indptr[rows], graph.indptr[rows + 1]], axis=1).astype(np.int64)
        there = graph.indices[expand_ranges(ranges)].astype(np.int64)
        there = there if local is None else local[there]
        owner = np.repeat(own, ranges[:, 1] - ranges[:, 0])
        keep = (there >= 0) & (there != owner)
        indptr[own + 1] = np.bincount(owner[keep] - start, minlength=own.size)
        parts.append(there[keep].astype(np.uint32 if cells.n_rows < 1 << 32 else np.int64))
    return Neighbors(np.cumsum(indptr, out=indptr), np.concatenate(parts))
