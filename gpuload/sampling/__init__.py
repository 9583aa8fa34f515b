"""Strategies: frozen values that say which rows an epoch has, and in which order.

A user gives a `Sampler`; bound to the cells of a store it becomes a `Strategy`, which knows how many rows an epoch has
and, for each epoch, their order. What costs time per cell (sorting by class) is done once, when it is bound.

Requirements this package answers
---------------------------------
- Draws by class, weight or share have in every minibatch the counts of independent draws, and yet are read in blocks
  (`gpuload.sampling.queues` says how).
- Order is arithmetic: a pure function of what it depends on, by place, without the places before it.
- 100 million cells cost no start-up time worth the name: below 0.3 us and 20 bytes a cell, binding and an epoch's plan
  together.
- A sampler says what is wrong with what it was given before anything is read; it never draws a cell it was not given.
"""

from gpuload.sampling.base import Cells, Sampler, Strategy, as_sampler, digest
from gpuload.sampling.blocks import BlockShuffle, Sequential, plain
from gpuload.sampling.custom import Custom
from gpuload.sampling.draws import ClassBalanced, Mixture, Weighted
from gpuload.sampling.pairs import PairedControl, split_pairs
from gpuload.sampling.sets import Grouped
from gpuload.sampling.subset import Subset, block_size_of

__all__ = [
    "BlockShuffle",
    "Cells",
    "ClassBalanced",
    "Custom",
    "Grouped",
    "Mixture",
    "PairedControl",
    "Sampler",
    "Sequential",
    "Strategy",
    "Subset",
    "Weighted",
    "as_sampler",
    "block_size_of",
    "digest",
    "plain",
    "split_pairs",
]
