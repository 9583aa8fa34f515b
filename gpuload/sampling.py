"""Strategies: frozen values that say which rows an epoch has, and in which order.

A user gives a `Sampler`; bound to the cells of a store it becomes a `Strategy`, which knows how many rows an epoch has
and, for each epoch, their order. What costs time per cell (sorting by class) is done once, when it is bound.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from gpuload.order import EqualBlocks, FileOrder, UnequalBlocks

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    import numpy as np
    from numpy.typing import NDArray

    from gpuload.order import RowOrder


@dataclass(frozen=True, slots=True, eq=False)
class Cells:
    """What a sampler may know of the cells of a store.

    Attributes
    ----------
    names
        The paths given, in their order.
    file_rows
        Rows of each.
    block_size
        Rows per block, the unit of shuffling on disk, for samplers that do not say their own.
    edges : (n_blocks + 1,) int64, optional
        Row edges of blocks that are snapped to storage chunks, in place of `block_size`.
    obs
        Columns of obs by name; codes with categories, or values.
    """

    names: tuple[str, ...]
    file_rows: tuple[int, ...]
    block_size: int = 16
    edges: NDArray[np.int64] | None = None
    obs: Mapping[str, NDArray[np.generic]] | Callable[[str], NDArray[np.generic]] | None = None


class Strategy(Protocol):
    """A sampler bound to cells."""

    def n_rows(self, file_rows: tuple[int, ...]) -> int:
        """Return the rows of one epoch, over all ranks."""

    def order(self, file_rows: tuple[int, ...], key_words: tuple[int, ...]) -> RowOrder:
        """Return the order of one epoch; `key_words` is what it may depend on (seed, epoch and purpose)."""


@dataclass(frozen=True)
class Sequential:
    """Rows in the order of the files."""

    def n_rows(self, file_rows: tuple[int, ...]) -> int:
        """Return the rows of all files."""
        return sum(file_rows)

    def order(self, file_rows: tuple[int, ...], key_words: tuple[int, ...]) -> RowOrder:
        """Return the order of one epoch."""
        del file_rows, key_words
        return FileOrder()


@dataclass(frozen=True, eq=False)
class BlockShuffle:
    """Quasi-random order: blocks of consecutive rows in random order, rows permuted within each fetch.

    Parameters
    ----------
    block_size
        Rows per block; 1 is true random sampling.
    edges : (n_blocks + 1,) int64, optional
        Row edges of the blocks where they are not to be of equal size (snapped to storage chunks); `block_size` is
        then not used.

    References
    ----------
    .. [1] D'Ascenzo, Cultrera di Montesano, "scDataset: scalable data loading for deep learning on large-scale
    single-cell omics",
       arXiv:2506.01883, 2025 (block sampling with batched fetching).
    """

    block_size: int = 16
    edges: NDArray[np.int64] | None = None

    def n_rows(self, file_rows: tuple[int, ...]) -> int:
        """Return the rows of all files."""
        return sum(file_rows)

    def order(self, file_rows: tuple[int, ...], key_words: tuple[int, ...]) -> RowOrder:
        """Return the order of one epoch."""
        if self.edges is not None:
            return UnequalBlocks(self.edges, key_words)
        return EqualBlocks(file_rows, self.block_size, key_words)
