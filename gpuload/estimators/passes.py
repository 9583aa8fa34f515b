"""Passes over cells: a matrix of any form, as dense minibatches."""

from __future__ import annotations

import math
import os
import sys
from itertools import count
from typing import TYPE_CHECKING, Any

import numpy as np

from gpuload.checks import check_unmasked
from gpuload.errors import PlanError, first_line
from gpuload.loader import Loader
from gpuload.sampling import selected

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import NDArray

    from gpuload.estimators.arrays import Engine

BATCH_SIZE = 2048
"""Rows made dense at a time: larger matrix products are no more efficient."""

RUN = 128
"""Length of a sample's runs of rows: longer runs cover fewer places, shorter ones slow down matrix products."""

_SECTIONS = 8
"""Parts of a matrix; a sample must have rows from each."""


class Passes:
    """A matrix of cells that can be iterated over repeatedly, some rows at a time.

    Parameters
    ----------
    X : (n, p) array, SciPy sparse matrix, or Loader
        A `Loader` yields its own minibatches (dense or CSR), one epoch per pass, which must have each of its cells
        once: all, or those that ``where=`` and `gpuload.Subset` leave, numbered in the order of the files.
    engine
        Array library for the minibatches.

    Attributes
    ----------
    n_rows, n_columns
        Shape of the matrix.
    is_bfloat16
        Whether its values have only bfloat16 precision.
    names : (n_columns,) str, or None
        Names of the columns of a loader or a data frame, unless they are just ``"0"``, ``"1"``, ...
    """

    def __init__(self, X: Any, engine: Engine) -> None:
        self._X: Any
        self._engine = engine
        self.is_bfloat16 = isinstance(X, Loader) and X.dtype == "bfloat16"
        self.names = _names_of(X)
        if isinstance(X, Loader):
            self.n_columns = X.n_vars
            row_shape = X.tables["X"].row_shape
            if len(row_shape) > 1:
                raise PlanError(f"X: its loader's cells have arrays of shape {row_shape}; expected rows of a matrix.")
            if X.world_size > 1:
                raise PlanError(
                    f"X: its loader has cells of rank {X.rank} of {X.world_size}; open it with rank=0, world_size=1."
                )
            self._chosen = selected(X.strategy, X.n_obs)[0]
            self.n_rows = self._chosen.n_rows
            if X.epoch_n_obs != self.n_rows:
                raise _incomplete(X.epoch_n_obs, self.n_rows)
            self._X = X
            return
        if hasattr(X, "obs_names") or isinstance(X, (str, os.PathLike)):
            given = repr(X) if isinstance(X, (str, os.PathLike)) else f"an {type(X).__name__}"
            raise PlanError(
                f"X: found {given}; open it with gpuload.open_loader and pass the loader, or pass a matrix."
            )
        if not hasattr(X, "shape") or not hasattr(X, "dtype"):
            X = as_array("X", X)
        shape = X.shape
        if getattr(X.dtype, "kind", "f") == "c" or getattr(X.dtype, "is_complex", False):
            raise PlanError("X: Complex data not supported; pass real numbers.")
        if len(shape) != 2:
            raise PlanError(
                f"X has {len(shape)} dimensions; expected a matrix of cells x features, or a Loader. Reshape your "
                "data: X.reshape(1, -1) makes one row, X.reshape(-1, 1) one column."
            )
        self.n_rows, self.n_columns = shape
        check_unmasked("X", X)
        if hasattr(X, "tocsr"):
            self._X = X.tocsr()
        elif hasattr(X, "get") or hasattr(X, "detach"):
            self._X = X
        else:
            self._X = np.asarray(X)
        if self._X.shape != shape or str(getattr(X, "layout", "torch.strided")) != "torch.strided":
            raise PlanError(
                f"X: found a {type(X).__name__} that is no dense array; pass one, a SciPy sparse matrix, or a loader "
                "from gpuload.open_loader, which reads a file's cells."
            )

    def __iter__(self) -> Iterator[tuple[NDArray[np.int64] | slice, Any]]:
        """Iterate over all rows once: (row numbers, (m, n_columns) dense array).

        Raises
        ------
        PlanError
            X has NaN or infinity; or it is a loader whose epoch did not have every row once, known at its end.
        """
        return self.some(1.0)

    def some(self, share: float) -> Iterator[tuple[NDArray[np.int64] | slice, Any]]:
        """Iterate over at least a fraction of the rows; yields as `__iter__`.

        A loader yields its first minibatches if they are of rows all over the matrix, else all of them; any other
        matrix yields runs of rows spread over it.
        """
        for rows, part in self._parts(share):
            if not _is_finite(part):
                raise PlanError(_NOT_FINITE)
            yield rows, part

    def _parts(self, share: float) -> Iterator[tuple[NDArray[np.int64] | slice, Any]]:
        if isinstance(self._X, Loader):
            yield from self._batches(self._X, share)
            return
        n_batches = -(-self.n_rows // BATCH_SIZE)
        n_sampled = math.ceil(share * n_batches)  # sets the number of rows, which are taken from more places
        size = BATCH_SIZE if n_sampled == n_batches else RUN
        n_parts = -(-self.n_rows // size)
        n_chosen = min(n_parts, n_sampled * BATCH_SIZE // size)
        for k in range(n_chosen):
            start = k * n_parts // n_chosen * size
            rows = slice(start, min(start + size, self.n_rows))
            part = self._X[rows]
            yield rows, part.toarray() if hasattr(part, "toarray") else part

    def _batches(self, loader: Loader, share: float) -> Iterator[tuple[NDArray[np.int64], Any]]:
        batches, n_first = iter(loader), math.ceil(share * len(loader))
        is_seen = np.zeros(self.n_rows, dtype=np.bool_)
        for n_seen in count():
            if n_seen == n_first < len(loader) and all(part.any() for part in np.array_split(is_seen, _SECTIONS)):
                return
            with self._engine.on_stream(loader):
                if (batch := next(batches, None)) is None:
                    break
                part = self._dense(batch.X)
            rows = self._chosen.rank(batch.rows)
            is_seen[rows] = True
            yield rows, part
        if not is_seen.all():  # the epoch has the right size, so some rows are missing if others occurred twice
            raise _incomplete(int(is_seen.sum()), self.n_rows)

    def _dense(self, X: Any) -> Any:
        """Return a loader's minibatch as a dense array of numbers."""
        if hasattr(X, "toarray"):
            return X.toarray()
        return self._engine.of_bits(X) if self.is_bfloat16 else X


def _names_of(X: Any) -> NDArray[np.str_] | None:
    """Return the names of the columns, if they have any."""
    pandas = sys.modules.get("pandas")
    if isinstance(X, Loader):
        names = X.var_names
    elif pandas is not None and isinstance(X, pandas.DataFrame) and all(isinstance(name, str) for name in X.columns):
        names = X.columns
    else:
        return None
    found = np.asarray(names, dtype=str)
    return None if np.array_equal(found, np.arange(len(found)).astype(str)) else found


def _incomplete(n: int, n_rows: int) -> PlanError:
    return PlanError(
        f"X: its loader's epoch has {n:,} of {n_rows:,} cells; open it with drop_last=False, and without a state to "
        "resume from, or a sampler that leaves out or repeats cells (where= and Subset may leave some out)."
    )


_MAX_FLOAT32 = float(np.finfo(np.float32).max)

_NOT_FINITE = "X holds NaN or infinity, or values too large for float32; remove, fill or scale them first."


def as_array(name: str, given: Any) -> NDArray[Any]:
    """Return an argument as an array; raise PlanError if it is a list of lists of different lengths."""
    try:
        return np.asarray(given)
    except ValueError as error:
        raise PlanError(f"{name} is no array: {first_line(error).rstrip('.')}; give rows of equal length.") from error


def checked_finite(found: NDArray[Any]) -> NDArray[Any]:
    """Return a result; raise PlanError if it is not finite: GPU input is not checked, and sums may overflow."""
    if not np.isfinite(found).all():
        raise PlanError(_NOT_FINITE)
    return found


def _is_finite(part: Any) -> bool:
    """Return whether all values are finite as float32; usually their sum shows it, without extra memory.

    Values on a GPU are not checked, since that would synchronize with it; results are checked instead.
    """
    if hasattr(part, "detach"):  # a torch tensor
        if part.device.type != "cpu" or not part.is_floating_point():
            return True
        least, most = part.detach().aminmax()
        return bool(least >= -_MAX_FLOAT32 and most <= _MAX_FLOAT32)
    if not isinstance(part, np.ndarray) or part.dtype.kind in "biu":
        return True
    if part.dtype.kind != "f":
        try:
            part = part.astype(np.float64)
        except ValueError as error:
            raise PlanError(f"X has dtype {part.dtype} ({first_line(error)}); expected numbers.") from error
    with np.errstate(over="ignore", invalid="ignore"):
        if part.dtype.itemsize > np.float32().itemsize:
            return bool(part.min() >= -_MAX_FLOAT32 and part.max() <= _MAX_FLOAT32)
        return bool(np.isfinite(part.sum()) or np.isfinite(part).all())
