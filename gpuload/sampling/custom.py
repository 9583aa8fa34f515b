"""A user-defined order, given as one function."""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from gpuload.checks import check_bool
from gpuload.errors import PlanError
from gpuload.permute import random_keys
from gpuload.sampling.base import Strategy

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray

    from gpuload.sampling.base import Cells
    from gpuload.sampling.rows import RowList


@dataclass(frozen=True)
class Custom:
    """Order an epoch by your own function, which returns the blocks of rows for each rank.

    The blocks of a rank are read in the order given, ``batch_size * fetch_factor`` cells to a fetch, and the cells
    of a fetch are shuffled, unless `shuffle_fetch` is False: then each minibatch has the next cells of the blocks.
    Every rank asks for the blocks of all ranks, so that all yield equally many cells (``uneven="drop"``: as many as
    the shortest rank has; ``"pad"``: as many as the longest, the others starting over). A plain function passed as
    ``sampler=`` is wrapped in `Custom`.

    Parameters
    ----------
    function
        ``function(epoch_seed, rank, world_size) -> blocks``. `epoch_seed` is an integer from 0 to 2**64 - 1 derived
        from the loader's seed and the epoch, different in every epoch; if the function has a parameter named
        ``epoch``, that is given the number of the epoch, from 0. `blocks` is an integer array of shape (n, 2):
        half-open ranges of rows over all paths, which may overlap; or of shape (n,): single rows, which may repeat.
        Rows that a `Subset` or ``where=`` does not select are passed over. The function must depend only on its
        arguments: it is called in every process, and again when an epoch is resumed.
    shuffle_fetch
        Whether the cells of each fetch are shuffled. False: cells come exactly in the order of the blocks, so the
        function determines every minibatch.

    Raises
    ------
    PlanError
        It is not a function, does not return such an array, or returns only rows that are not selected;
        `shuffle_fetch` is neither True nor False; or an epoch begun with another number of ranks is resumed.

    Examples
    --------
    Windows of 1,000 cells, read in file order from a starting point that changes with the epoch:

    >>> import numpy as np
    >>> def windows(epoch_seed, rank, world_size, n_cells=100_000, width=1000):
    ...     starts = np.arange(0, n_cells, width)
    ...     starts = np.roll(starts, epoch_seed % len(starts))[rank::world_size]
    ...     return np.stack([starts, np.minimum(starts + width, n_cells)], axis=1)
    >>> windows(epoch_seed=2, rank=0, world_size=50).tolist()
    [[98000, 99000], [48000, 49000]]

    Use it as ``gpuload.open_loader("cells.h5ad", sampler=windows)``.

    A curriculum: cells of the first kinds at first, and more kinds in each epoch:

    >>> kind = np.array([0, 1, 2, 0, 1, 2])  # of each cell
    >>> def curriculum(epoch_seed, rank, world_size, epoch):
    ...     return np.flatnonzero(kind <= epoch)[rank::world_size]
    >>> [curriculum(1, 0, 1, epoch).tolist() for epoch in range(3)]
    [[0, 3], [0, 1, 3, 4], [0, 1, 2, 3, 4, 5]]

    The minibatches of a sampler written for PyTorch, which yields one row number at a time:

    >>> def as_drawn(epoch_seed, rank, world_size):
    ...     rows = np.array([4, 0, 4, 2])  # np.fromiter(torch_sampler, int), seeded with epoch_seed
    ...     return rows[rank::world_size]
    >>> as_drawn(epoch_seed=2, rank=0, world_size=2).tolist()
    [4, 4]

    Use it as ``sampler=gpuload.Custom(as_drawn, shuffle_fetch=False)``.
    """

    function: Callable[..., Any]
    shuffle_fetch: bool = True

    columns: ClassVar[tuple[str, ...]] = ()

    def __post_init__(self) -> None:
        check_bool("shuffle_fetch", self.shuffle_fetch, "Custom")
        if not callable(self.function):
            raise PlanError(
                f"Custom({self.function!r}): expected a function (epoch_seed, rank, world_size) -> blocks of rows."
            )

    def over(self, cells: Cells) -> Strategy:
        """Return the function as a strategy, without calling it yet."""
        try:
            takes_epoch = "epoch" in inspect.signature(self.function).parameters
        except (TypeError, ValueError):  # of a function that is not written in Python
            takes_epoch = False
        return Given(self.function, cells.n_store_rows, cells.chosen, bool(self.shuffle_fetch), takes_epoch)


@dataclass(frozen=True, eq=False)
class Given(Strategy):
    """Blocks from a function, per rank.

    Attributes
    ----------
    function
        Returns blocks of rows of the store.
    within
        The rows of the store that may be used, ascending; None for all.
    is_mixed
        Whether the cells of a fetch are shuffled.
    takes_epoch
        Whether the function has a parameter named ``epoch``.
    """

    function: Callable[..., Any]
    n_store_rows: int
    within: RowList | None = None
    is_mixed: bool = True
    takes_epoch: bool = False

    @property
    def is_per_rank(self) -> bool:
        """True: the function is asked for the rows of each rank."""
        return True

    def per_rank(self, key_words: tuple[int, ...], rank: int, world_size: int) -> NDArray[np.int64]:
        """Return a rank's blocks, shape (n, 2), with rows numbered consecutively within `within`."""
        (epoch_seed,) = random_keys(1, *key_words)
        named = {"epoch": key_words[1]} if self.takes_epoch else {}
        blocks = as_blocks(self.function(int(epoch_seed), rank, world_size, **named), rank, self.n_store_rows)
        if self.within is None:
            return blocks
        there = self.within.rank(blocks)
        there = there[there[:, 0] < there[:, 1]]
        if len(blocks) and not len(there):
            raise PlanError(
                f"sampler: where= or a Subset leaves out all rows that it returned for rank {rank}, such as row "
                f"{blocks[0, 0]}; return some that it selects."
            )
        return there

    def describe(self) -> dict[str, Any]:
        """Return the function's name: its behaviour is unknown."""
        function = getattr(self.function, "__qualname__", type(self.function).__qualname__)
        return {"name": "Custom", "function": function, **({} if self.is_mixed else {"shuffle_fetch": False})}


def as_blocks(given: Any, rank: int, n_rows: int) -> NDArray[np.int64]:
    """Return a function's result for a rank as non-empty blocks, shape (n, 2).

    Raises
    ------
    PlanError
        It is neither blocks nor single rows, or some are outside the `n_rows` rows.
    """
    try:
        blocks: NDArray[Any] = np.asarray(given)
    except ValueError:  # lists of different lengths
        blocks = np.empty(len(given), dtype=object)
    if blocks.size == 0:
        return np.empty((0, 2), dtype=np.int64)
    if blocks.dtype.kind not in "iu" or blocks.shape not in ((blocks.size,), (blocks.size // 2, 2)):
        raise PlanError(
            f"sampler: for rank {rank} it returned an array of shape {blocks.shape} and dtype {blocks.dtype}; expected "
            "blocks of rows, shape (n, 2), or rows, shape (n,), of whole numbers."
        )
    if blocks.ndim == 1:
        blocks = blocks.astype(np.int64)
        blocks = np.stack([blocks, blocks + 1], axis=1)
    bad = np.flatnonzero((blocks[:, 0] < 0) | (blocks[:, 0] > blocks[:, 1]) | (blocks[:, 1] > n_rows))
    if bad.size:
        raise PlanError(
            f"sampler: for rank {rank} it returned the block {blocks[bad[0]].tolist()}; expected 0 <= start <= stop <= "
            f"{n_rows}."
        )
    blocks = blocks.astype(np.int64)
    return blocks[blocks[:, 0] < blocks[:, 1]]
