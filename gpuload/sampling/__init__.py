"""Sampling strategies: frozen values that define which rows an epoch has, and in which order.

A user passes a `Sampler`; bound to the cells of a store it becomes a `Strategy`, which knows the number of rows per
epoch and the order of each epoch. Work per cell (sorting by class) is done once, when it is bound.

Requirements this package answers
---------------------------------
- Draws by class, weight or share give every minibatch the counts of independent draws, and yet are read in blocks; see
  `gpuload.sampling.queues`.
- Order is arithmetic: a pure function of its key, with random access by position.
- Start-up is negligible for 100 million cells: below 0.3 us and 20 bytes per cell, for binding and an epoch's plan
  together.
- A sampler rejects invalid arguments before anything is read, and never draws a cell it was not given.
"""

from gpuload.sampling.base import Cells, Sampler, Strategy, as_sampler, digest
from gpuload.sampling.blocks import BlockShuffle, InOrder, Sequential, Shuffled, plain
from gpuload.sampling.controls import PairedControl
from gpuload.sampling.custom import Custom
from gpuload.sampling.draws import ClassBalanced, Mixture, Weighted
from gpuload.sampling.neighbors import PairedNeighbor
from gpuload.sampling.pairs import split_pairs
from gpuload.sampling.sets import Grouped
from gpuload.sampling.subset import Subset, block_size_of, selected

__all__ = [
    "BlockShuffle",
    "Cells",
    "ClassBalanced",
    "Custom",
    "Grouped",
    "InOrder",
    "Mixture",
    "PairedControl",
    "PairedNeighbor",
    "Sampler",
    "Sequential",
    "Shuffled",
    "Strategy",
    "Subset",
    "Weighted",
    "as_sampler",
    "block_size_of",
    "digest",
    "plain",
    "selected",
    "split_pairs",
]
