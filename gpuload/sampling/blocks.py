"""The plain samplers: all rows, in file order or in shuffled blocks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from gpuload.checks import check_bool
from gpuload.errors import PlanError
from gpuload.order import FileOrder, shuffled_blocks
from gpuload.sampling.base import Strategy, check_number, digest

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from gpuload.order import RowOrder
    from gpuload.sampling.base import Cells


@dataclass(frozen=True)
class Sequential:
    """Take rows in file order, as with ``shuffle=False``.

    Parameters
    ----------
    shuffle_fetch
        Permute the rows of each fetch, like streaming through a shuffle buffer of ``batch_size * fetch_factor`` cells
        that is refilled when empty. A minibatch is no more diverse than its stretch of the file.

    Raises
    ------
    PlanError
        `shuffle_fetch` is neither True nor False.
    """

    shuffle_fetch: bool = False

    columns: ClassVar[tuple[str, ...]] = ()

    def __post_init__(self) -> None:
        check_bool("shuffle_fetch", self.shuffle_fetch, "Sequential")

    def over(self, cells: Cells) -> Strategy:
        """Return the order of the cells."""
        return InOrder(cells.file_rows, self.shuffle_fetch)


@dataclass(frozen=True, eq=False)
class BlockShuffle:
    """Take blocks of consecutive rows in random order, with rows permuted within each fetch (quasi-random order).

    Every row occurs once per epoch. If neighbours in the file are alike, the class counts of a minibatch vary more than
    those of independent draws; `gpuload.diversity` says by how much.

    If one block holds more than half of the rows, or more than a 64th where `drop_last` or ``uneven="drop"`` may drop
    some, the order begins at a random row, also within a block.

    Parameters
    ----------
    block_size
        Rows per block, at least 1; 1 is true random sampling.
    edges : (n_blocks + 1,) int64, optional
        Row edges of blocks of unequal size (such as storage chunks), from 0 to the number of cells of the loader, even
        inside a `Subset`; `block_size` is then ignored.

    Raises
    ------
    PlanError
        `block_size` is not an integer of at least 1. Blocks of whole chunks are ``open_loader(block_size="chunk")``.

    References
    ----------
    .. [1] D'Ascenzo, Cultrera di Montesano, "scDataset: scalable data loading for deep learning on large-scale
       single-cell omics", arXiv:2506.01883, 2025 (block sampling with batched fetching).
    """

    block_size: int = 16
    edges: NDArray[np.int64] | None = None

    columns: ClassVar[tuple[str, ...]] = ()

    def __post_init__(self) -> None:
        check_number("BlockShuffle", "block_size", self.block_size)

    def over(self, cells: Cells) -> Strategy:
        """Return the blocks of the cells; `edges` are reduced to those between them."""
        if self.edges is None:
            return Shuffled(cells.file_rows, self.block_size)
        try:
            edges: NDArray[Any] = np.asarray(self.edges)
        except ValueError:  # lists of different lengths
            edges = np.empty((0, 0))
        if edges.ndim != 1 or edges.dtype.kind not in "iu" or edges.size < 1 or np.any(edges[1:] <= edges[:-1]):
            raise PlanError(f"BlockShuffle(edges={self.edges!r:.100}): expected whole numbers in increasing order.")
        if edges[0] != 0 or edges[-1] != cells.n_store_rows:
            raise PlanError(
                f"BlockShuffle(edges=...): they go from {edges[0]} to {edges[-1]}; expected 0 to {cells.n_store_rows}, "
                "the cells of all files."
            )
        edges = edges.astype(np.int64)
        edges = edges if cells.chosen is None else np.unique(cells.chosen.rank(edges))
        return Shuffled(cells.file_rows, self.block_size, edges)


@dataclass(frozen=True)
class InOrder(Strategy):
    """The strategy for rows in file order; those of a fetch are shuffled if `shuffle_fetch`."""

    file_rows: tuple[int, ...]
    shuffle_fetch: bool = False

    @property
    def n_rows(self) -> int:
        """Number of rows in all files."""
        return sum(self.file_rows)

    def order(self, key_words: tuple[int, ...]) -> RowOrder:
        """Return the order of one epoch."""
        del key_words
        return FileOrder(self.shuffle_fetch)

    def describe(self) -> dict[str, Any]:
        """Return the sampler's name, and whether fetches are permuted."""
        return {"name": "Sequential", **({"shuffle_fetch": True} if self.shuffle_fetch else {})}


@dataclass(frozen=True, eq=False)
class Shuffled(Strategy):
    """The strategy for rows in shuffled blocks: of `block_size` rows in each file, or between `edges` if given."""

    file_rows: tuple[int, ...]
    block_size: int = 16
    edges: NDArray[np.int64] | None = None

    @property
    def n_rows(self) -> int:
        """Number of rows in all files."""
        return sum(self.file_rows)

    @property
    def largest_block(self) -> int:
        """Number of rows in the largest block."""
        if self.edges is not None:
            return int(np.diff(self.edges).max(initial=0))
        return min(self.block_size, max(self.file_rows, default=0))

    def order(self, key_words: tuple[int, ...]) -> RowOrder:
        """Return the order of one epoch."""
        return shuffled_blocks(self.file_rows, self.block_size, key_words, self.edges)

    def describe(self) -> dict[str, Any]:
        """Return the size of the blocks, or a digest of their edges."""
        if self.edges is not None:
            return {"name": "BlockShuffle", "edges": digest(self.edges)}
        return {"name": "BlockShuffle", "block_size": int(self.block_size)}


def plain(cells: Cells) -> Strategy:
    """Return the strategy used without a sampler: the loader's blocks in random order, or file order."""
    if not cells.shuffle:
        return InOrder(cells.file_rows)
    return Shuffled(cells.file_rows, cells.block_size, cells.edges)
