"""Passes over cells: one matrix, whichever form it has, as dense minibatches."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from gpuload.errors import PlanError
from gpuload.loader import Loader

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import NDArray

BATCH_SIZE = 2048
"""Rows that are dense at one time: a matrix product of that many is as fast as of more."""


class Passes:
    """A matrix of cells that can be gone through again and again, some rows at a time.

    Parameters
    ----------
    X : (n, p) array, SciPy sparse matrix, or Loader
        A `Loader` gives its own minibatches (dense or CSR), each pass one epoch; it must hand over every row.
    name
        What errors call it.

    Attributes
    ----------
    n_rows, n_columns
        Its shape.
    """

    def __init__(self, X: Any, name: str = "X") -> None:
        self._X: Any
        self._name = name
        if isinstance(X, Loader):
            self.n_rows, self.n_columns = X.n_obs, X.n_vars
            if len(X) * X.batch_size < X.n_obs:
                raise PlanError(f"{name}: its loader leaves the last rows out; open it with drop_last=False.")
            self._X = X
            return
        if not hasattr(X, "shape") or not hasattr(X, "dtype"):
            X = np.asarray(X)
        shape = X.shape
        if getattr(X.dtype, "kind", "f") == "c":
            raise PlanError(f"{name}: Complex data not supported; give real numbers.")
        if len(shape) != 2:
            raise PlanError(
                f"{name} has {len(shape)} dimensions; expected a matrix of cells x features, or a Loader. Reshape your "
                "data: X.reshape(1, -1) makes one row, X.reshape(-1, 1) one column."
            )
        self.n_rows, self.n_columns = shape
        if hasattr(X, "tocsr"):
            self._X = X.tocsr()
        else:
            self._X = np.asarray(X) if not hasattr(X, "detach") and not hasattr(X, "get") else X

    def __iter__(self) -> Iterator[tuple[NDArray[np.int64] | slice, Any]]:
        """Go through all rows once: (row numbers, (m, n_columns) dense array)."""
        for rows, part in self._parts():
            if isinstance(part, np.ndarray) and part.dtype.kind not in "biu" and not _is_finite(part):
                raise PlanError(f"{self._name} holds NaN or infinity; remove or fill them first.")
            yield rows, part

    def _parts(self) -> Iterator[tuple[NDArray[np.int64] | slice, Any]]:
        if isinstance(self._X, Loader):
            for batch in self._X:
                yield batch.rows, batch.X.toarray() if hasattr(batch.X, "toarray") else batch.X
            return
        for start in range(0, self.n_rows, BATCH_SIZE):
            rows = slice(start, min(start + BATCH_SIZE, self.n_rows))
            part = self._X[rows]
            yield rows, part.toarray() if hasattr(part, "toarray") else part


def _is_finite(part: NDArray[np.generic]) -> bool:
    """Return whether all is finite; a sum tells in most cases, and takes no memory."""
    if part.dtype.kind != "f":
        part = part.astype(np.float64)
    with np.errstate(over="ignore", invalid="ignore"):
        return bool(np.isfinite(part.sum()) or np.isfinite(part).all())
