"""Samplers that draw by class, weight or mixture: each cell in proportion to its share, and read in blocks."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from gpuload.checks import check_bool
from gpuload.errors import PlanError, listing, shown
from gpuload.sampling.base import (
    Strategy,
    about_column,
    check_mask,
    check_number,
    check_rows,
    check_shares,
    check_weight,
    digest,
    names_in,
)
from gpuload.sampling.queues import DrawnOrder, Queues, Shares
from gpuload.sampling.rows import group_rows, join, list_of_mask, list_of_runs
from gpuload.sampling.weights import Chosen, check_weights, count_above_0, weight_queues

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from gpuload.order import RowOrder
    from gpuload.sampling.base import Cells
    from gpuload.sampling.rows import RowList


@dataclass(frozen=True, eq=False)
class ClassBalanced:
    """Draw all classes of a column equally often, or in given proportions, whatever their sizes.

    The class of each cell of an epoch is drawn independently, so the class counts of minibatches are multinomial. The
    cells of a class come in shuffled blocks, pass after pass: no cell is repeated before every cell of its class has
    been drawn. Cells with a missing label are not drawn.

    Parameters
    ----------
    column
        A column of obs, or several: then a class is a combination that occurs. Or an array, a label per cell of the
        files, where NaN and None are missing.
    num_samples
        Cells per epoch, over all ranks; None: as many as there are cells.
    shares
        ``"equal"``, or the proportions of the classes, ``{label: share}``, with tuples of labels if there are several
        columns. Shares are above 0 and need not sum to 1; classes that are not named are not drawn.

    Raises
    ------
    PlanError
        A name, number or share is invalid; or, when bound, all labels are missing, or no cell has a label in `shares`.

    Notes
    -----
    A block is ``block_size`` cells that are consecutive *among the cells of their class*; if classes are interleaved in
    the file, it spans a longer stretch of the file.

    References
    ----------
    .. [1] `gpuload.sampling.queues` states the method.
    """

    column: str | Sequence[str] | NDArray[Any]
    num_samples: int | None = None
    shares: Mapping[Any, float] | str = "equal"

    def __post_init__(self) -> None:
        names_in("ClassBalanced", self.column)
        check_num_samples("ClassBalanced", self.num_samples)
        check_shares("ClassBalanced", self.shares)

    @property
    def columns(self) -> tuple[str, ...]:
        """The obs columns that it needs."""
        return names_in("ClassBalanced", self.column)

    def over(self, cells: Cells) -> Strategy:
        """Sort the cells by class; takes about 4 bytes per cell, less if the file is sorted by class."""
        check_rows("ClassBalanced", cells)
        classes = cells.classes_by("ClassBalanced", self.column)
        rows, edges = group_rows(classes.codes, len(classes.names))
        if not rows.n_rows:
            raise PlanError(
                f"ClassBalanced({shown(self.column)}): the label is missing in all {classes.codes.size} cells; "
                "name another column."
            )
        counts = np.diff(edges)
        shares = classes.shares("ClassBalanced", self.shares, counts)[counts > 0]
        edges = edges[np.append(True, counts > 0)]  # drops classes without cells
        queues = Queues(rows, edges, cells.block_size)
        n_samples = cells.n_rows if self.num_samples is None else int(self.num_samples)
        about = {"name": "ClassBalanced", "columns": about_column(self.column)}
        return Drawn(queues, Shares(shares), n_samples, about)


@dataclass(frozen=True, eq=False)
class Weighted:
    """Draw each cell with probability proportional to its weight.

    With replacement, cells of equal weight form a stratum, and each cell's stratum is drawn independently with
    probability proportional to the stratum's total weight. With more than 1,024 distinct weights, a stratum holds cells
    whose weights differ by less than 1/16, drawn within it by systematic sampling. So the counts of the strata in
    minibatches are multinomial, and a cell is drawn in proportion to its weight, to within 2**-32 of the total. The
    cells of a stratum come in shuffled blocks, pass after pass; no cell is repeated within a pass. Classes that share a
    weight are not distinguished; for multinomial class counts use `ClassBalanced`.

    Without replacement, an epoch has `num_samples` distinct cells, chosen with the exponential keys of Efraimidis and
    Spirakis [1]_ (each successive cell with probability proportional to its weight among those not yet chosen), then
    shuffled in blocks; class counts vary as with `BlockShuffle`.

    Parameters
    ----------
    weights : (n_obs,) array of numbers
        Finite and non-negative, one for each cell of the loader, in the order of the paths, even inside a `Subset`.
        They need not sum to 1. Cells of weight 0 (or below 2.3e-308) are never drawn.
    num_samples
        Cells per epoch, over all ranks; None: the number of cells (without replacement, of cells with a weight above
        0).
    replace
        Whether a cell may be drawn more than once in an epoch.

    Raises
    ------
    PlanError
        Weights are negative, not finite, all 0, or not one per cell; or, without replacement, `num_samples` exceeds the
        number of cells with a weight above 0.

    References
    ----------
    .. [1] Efraimidis, Spirakis, "Weighted random sampling with a reservoir", Information Processing Letters 2006,
       doi:10.1016/j.ipl.2005.11.003.
    .. [2] `gpuload.sampling.queues` states the method of draws with replacement.
    """

    weights: Any
    num_samples: int | None = None
    replace: bool = True

    columns: ClassVar[tuple[str, ...]] = ()

    def __post_init__(self) -> None:
        check_num_samples("Weighted", self.num_samples)
        check_bool("replace", self.replace, "Weighted")

    def over(self, cells: Cells) -> Strategy:
        """Sort the cells by weight; takes 4 bytes per cell, 16 with more than 1,024 distinct weights."""
        check_rows("Weighted", cells)
        weights = check_weights(self.weights, cells)
        about = {"name": "Weighted", "replace": bool(self.replace)}
        if self.replace:
            n_samples = cells.n_rows if self.num_samples is None else int(self.num_samples)
            queues, shares = weight_queues(weights, cells.block_size)
            return Drawn(queues, Shares(shares), n_samples, about)
        n_there = count_above_0(weights)
        n_samples = n_there if self.num_samples is None else int(self.num_samples)
        if n_samples > n_there:
            raise PlanError(
                f"Weighted(num_samples={n_samples}, replace=False): only {n_there} cells have a weight above 0; take "
                "fewer, or replace=True."
            )
        return Chosen(cells.file_rows, weights, n_samples, cells.block_size, {**about, "weights": digest(weights)})


@dataclass(frozen=True, eq=False)
class Mixture:
    """Draw from several parts of the data in fixed proportions, whatever their sizes.

    The part of each cell of an epoch is drawn independently according to the shares; the cells of a part come in
    shuffled blocks, pass after pass. A cell may be in several parts; a cell in none is never drawn.

    Parameters
    ----------
    shares
        ``{path: share}``, with paths as given to ``open_loader``, or file names if these are unique; or a list of (path
        or mask, share) pairs, where a mask is a boolean array with one entry per cell. Shares are above 0 and need not
        sum to 1.
    num_samples
        Cells per epoch, over all ranks; None: as many as there are cells.

    Raises
    ------
    PlanError
        A share is not a finite number above 0; a path is not one of the loader's; a mask has the wrong length; a part
        has no cells.

    References
    ----------
    .. [1] `gpuload.sampling.queues` states the method.
    """

    shares: Mapping[str | os.PathLike[str], float] | Sequence[tuple[Any, float]]
    num_samples: int | None = None

    columns: ClassVar[tuple[str, ...]] = ()

    def __post_init__(self) -> None:
        check_num_samples("Mixture", self.num_samples)
        for part, share in self._pairs():
            check_weight("Mixture", os.fspath(part) if isinstance(part, (str, os.PathLike)) else "a mask", share)

    def over(self, cells: Cells) -> Strategy:
        """Find the cells of each part; whole files take no memory, masks up to 4 bytes per cell."""
        pairs, files = self._pairs(), _FilesByName(cells)
        parts = [self._rows(part, cells, files) for part, _ in pairs]
        edges = np.concatenate([[0], np.cumsum([part.n_rows for part in parts])])
        shares = np.array([float(share) for _, share in pairs])
        n_samples = cells.n_rows if self.num_samples is None else int(self.num_samples)
        return Drawn(Queues(join(parts), edges, cells.block_size), Shares(shares), n_samples, {"name": "Mixture"})

    def _pairs(self) -> list[tuple[Any, float]]:
        shares = self.shares.items() if isinstance(self.shares, Mapping) else self.shares
        given = list(shares) if isinstance(shares, Iterable) else []
        if not given or not all(isinstance(pair, (tuple, list)) and len(pair) == 2 for pair in given):
            raise PlanError("Mixture: expected {path: share}, or a list of pairs (path or mask, share), at least one.")
        return [(part, share) for part, share in given]

    @staticmethod
    def _rows(part: Any, cells: Cells, files: _FilesByName) -> RowList:
        if isinstance(part, (str, os.PathLike)):
            name = os.fspath(part)
            rows = list_of_runs(files.rows_of(name))
        else:
            name = "a mask"
            rows = list_of_mask(cells.take(check_mask("Mixture", part, cells)))
        if not rows.n_rows:
            raise PlanError(f"Mixture: {name} has no cells; leave it out.")
        return rows


class _FilesByName:
    """The files of a loader by name: there may be thousands, each of which a mixture names."""

    def __init__(self, cells: Cells) -> None:
        self._cells = cells
        self._edges = np.concatenate([[0], np.cumsum(cells.file_rows)])
        self._named: dict[str, list[int]] = {}
        self._based: dict[str, list[int]] = {}
        for number, path in enumerate(cells.names):
            self._named.setdefault(path, []).append(number)
            self._based.setdefault(os.path.basename(path), []).append(number)

    def rows_of(self, name: str) -> NDArray[np.int64]:
        """Return the row range of a file, (1, 2), given its path or file name; raise PlanError if it is not one."""
        found = self._named.get(name) or self._based.get(name, [])
        if len(found) != 1:
            names = [self._cells.names[number] for number in found] or self._cells.names
            wrong = "matches several of the loader's" if found else "is not one of the loader's"
            raise PlanError(f"Mixture: {name!r} {wrong} paths; they are {listing(names)}.")
        rows: NDArray[np.int64] = self._edges[found[0] : found[0] + 2].reshape(1, 2)
        return rows


@dataclass(frozen=True, eq=False)
class Drawn(Strategy):
    """The strategy of a sampler that draws strata."""

    queues: Queues
    shares: Shares
    n_samples: int
    about: dict[str, Any]

    @property
    def n_rows(self) -> int:
        """Number of cells in one epoch, over all ranks."""
        return self.n_samples

    def order(self, key_words: tuple[int, ...]) -> RowOrder:
        """Return the order of one epoch."""
        return DrawnOrder(self.queues, self.shares, key_words)

    def describe(self) -> dict[str, Any]:
        """Return the sampler's name and parameters, with digests of its rows and shares."""
        sizes = {"num_samples": self.n_samples, "block_size": self.queues.block_size}
        return {**self.about, **sizes, "rows": self.queues.digest(), "shares": self.shares.digest()}


def check_num_samples(sampler: str, num_samples: int | None) -> None:
    """Raise PlanError unless the number of cells per epoch is valid, or None."""
    if num_samples is not None:
        check_number(sampler, "num_samples", num_samples)
