"""Truncated SVD of a matrix that is never entirely in memory, in a few passes over minibatches."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from gpuload.checks import check_whole, is_number
from gpuload.errors import PlanError
from gpuload.estimators.arrays import multiplies_bfloat16, to_host
from gpuload.estimators.base import Estimator, not_fitted
from gpuload.estimators.passes import checked_finite

if TYPE_CHECKING:
    from typing import Self

    from numpy.typing import NDArray

    from gpuload.estimators.arrays import Engine
    from gpuload.estimators.passes import Passes


SAMPLE_ROWS = 20
"""A pass over a fraction of the rows takes at least this many per column of the basis."""

_RESCALING, _MIN_SUM, _MAX_SCALE = 2.0**40, 2.0**-80, 2.0**120
"""Squares of very large or small values leave float32's range. A pass is then repeated with all values divided or
multiplied by the first factor, in total by at most the third; sums below the second are too small. Scaling by powers of
2 is exact."""


class TruncatedSVD(Estimator):
    """The leading singular vectors and values of a matrix of cells, found in a few passes over its rows.

    Like `sklearn.decomposition.TruncatedSVD` (the matrix is not centred), but with at most a minibatch of the matrix in
    memory. Each pass but the last accumulates ``X.T @ (X @ Q)`` over minibatches, which turns a basis Q of
    `n_components` + `n_oversamples` columns towards the leading singular vectors; the last one computes them from
    ``X @ Q``, which `fit_transform` rotates and returns, without a further pass. If Q has a column for each row, it is
    taken from the rows themselves.

    Parameters
    ----------
    n_components
        Number of singular vectors.
    n_passes
        Passes over the matrix; each improves the accuracy. Four suffice for cells.
    n_oversamples
        Additional columns of the basis.
    sample
        Fraction of the rows, above 0, used by all passes but the last two, which correct the result. For an array these
        are short runs spread over it; for a loader its first minibatches, if they are of rows all over the matrix, as
        with ``shuffle=True``: else all, since the first rows of a file are often of one kind. If they are few rows
        compared with the width of the basis, all rows are used; 1 always uses all.
    precision
        ``"float32"``; ``"mixed"``: bfloat16 in all passes but the last, as they only turn the basis: enough for counts
        and their logarithms, whose noise is far above its rounding; ``"bfloat16"``: in all passes, which leaves about
        three digits (both need torch as the engine). ``"auto"``: if the device
        multiplies bfloat16 natively, which is faster, bfloat16 for a loader of such values
        (``open_loader(dtype="bfloat16")``) and mixed for everything else.
    engine
        ``"auto"``, ``"numpy"``, ``"torch"`` or ``"cupy"``: the array library.
    device
        As in `gpuload.open_loader`. None: where the minibatches of the loader given to `fit` or `transform` are; for
        NumPy, and for input that is not a loader, the CPU.
    random_state
        Seed of the initial basis. With the same minibatches in the same order the result is the same; a shuffled loader
        has another order in each pass, and continues with the next epoch in the next fit, so its results differ within
        the accuracy of the method.

    Attributes
    ----------
    components_ : (n_components, n_features) float32
        Right singular vectors; the entry of largest magnitude in each is positive.
    singular_values_ : (n_components,) float32
        Singular values, descending.
    n_features_in_
        Number of columns of the matrix fitted.
    feature_names_in_ : (n_features,) str
        Their names, if it was a loader or a data frame that has some; what is transformed must have them, or none.

    References
    ----------
    .. [1] Halko, Martinsson, Tropp, "Finding structure with randomness", SIAM Review 2011, doi:10.1137/090771806
       (algorithms 4.4 and 5.1).
    """

    _learnt = ("components_", "n_features_in_")

    def __init__(
        self,
        n_components: int = 2,
        *,
        n_passes: int = 4,
        n_oversamples: int = 20,
        sample: float = 0.125,
        precision: str = "auto",
        engine: str = "auto",
        device: str | None = None,
        random_state: int = 0,
    ) -> None:
        self.n_components = n_components
        self.n_passes = n_passes
        self.n_oversamples = n_oversamples
        self.sample = sample
        self.precision = precision
        self.engine = engine
        self.device = device
        self.random_state = random_state

    def fit(self, X: Any, y: Any = None) -> Self:
        """Find the singular vectors.

        Parameters
        ----------
        X : (n, p) array, SciPy sparse matrix, or `gpuload.Loader`
            Cells x features; of a loader with ``where=`` or `gpuload.Subset`, its cells alone, in the order of the
            files.
        y
            Not used.

        Raises
        ------
        PlanError
            A parameter is invalid, or the matrix is too small for it or holds NaN, infinity or values too large for
            float32.
        DeviceError
            `engine` cannot use `device`.
        """
        del y
        self._fit(X, keeps_scores=False)
        return self

    def fit_transform(self, X: Any, y: Any = None) -> NDArray[np.float32]:
        """Fit, and return X projected onto the components, (n, n_components) float32; see `fit`."""
        del y
        return self._fit(X, keeps_scores=True)

    def _fit(self, X: Any, *, keeps_scores: bool) -> NDArray[np.float32]:
        """Find the singular vectors; return the scores of all rows if `keeps_scores`, else an empty array."""
        engine = self._opened(X)
        passes = self._checked(X, engine)
        early, last = self._dtypes(engine, is_stored=passes.is_bfloat16)
        p, k = passes.n_columns, self.n_components
        self._check(passes.n_rows, p)
        width = min(p, k + self.n_oversamples)
        basis = self._basis(engine, passes, width, early)
        width = basis.shape[1]
        scores = np.empty((passes.n_rows if keeps_scores else 0, width), dtype=np.float32)
        square = engine.zeros((width, width), "float64")
        turned = engine.put(basis, last)
        for rows, part in passes:
            with np.errstate(over="ignore", invalid="ignore"):
                projected = engine.put(part, last) @ turned
                exact = engine.put(projected, "float64")
                square += exact.T @ exact
            if keeps_scores:
                scores[rows] = to_host(engine.put(projected, "float32"))
        checked_finite(to_host(square))
        values, turn = (to_host(found) for found in engine.xp.linalg.eigh(square))
        values, turn = np.maximum(values[::-1][:k], 0), turn[:, ::-1][:, :k]
        components = (to_host(engine.put(basis, "float64")) @ turn).T
        signs = np.sign(components[np.arange(k), np.argmax(np.abs(components), axis=1)])
        with np.errstate(over="ignore"):
            lengths = checked_finite(np.sqrt(values).astype(np.float32))
        self.components_: NDArray[np.float32] = np.ascontiguousarray(components * signs[:, None], dtype=np.float32)
        self.singular_values_: NDArray[np.float32] = lengths
        self._remember(passes)
        return np.asarray(scores @ (turn * signs).astype(np.float32))

    def _basis(self, engine: Engine, passes: Passes, width: int, dtype: str) -> Any:
        """Return an orthonormal basis that nearly spans the leading right singular vectors, (p, <= width) float32."""
        n, p = passes.n_rows, passes.n_columns
        if n <= width < p:  # the rows themselves span everything
            rows = np.empty((n, p), dtype=np.float32)
            for numbers, part in passes:
                rows[numbers] = to_host(part)
            largest = float(np.abs(rows).max())
            return engine.xp.linalg.qr(engine.put((rows / (largest or 1)).T, "float32"))[0]
        start = self._random().standard_normal((p, width)).astype(np.float32)
        basis = engine.xp.linalg.qr(engine.put(start, "float32"))[0]
        few = max(self.sample, min(1.0, SAMPLE_ROWS * width / n))
        scale = 1.0
        for number in range(1, self.n_passes):
            share = few if number < self.n_passes - 1 else 1.0
            image, scale = self._image(engine, passes, share, basis, dtype, scale)
            basis = engine.xp.linalg.qr(image)[0]
        return basis

    def _image(
        self, engine: Engine, passes: Passes, share: float, basis: Any, dtype: str, scale: float
    ) -> tuple[Any, float]:
        """Return ``X.T @ (X @ basis)`` over a share of the rows, (p, width) float32, and the scale X was divided by.

        It is `scale` unless the result would leave float32's range.
        """
        used = scale
        while True:
            image, turned = engine.zeros(basis.shape, "float32"), engine.put(basis / used, dtype)
            for _, rows in passes.some(share):
                part = engine.put(rows, dtype)
                with np.errstate(over="ignore", invalid="ignore"):
                    projected = part @ turned
                    projected /= used
                    image += part.T @ projected
            largest = float(abs(image).max())
            if largest >= _MIN_SUM and np.isfinite(largest):
                return image, used
            used *= 1 / _RESCALING if largest < _MIN_SUM else _RESCALING
            if not 1 / _MAX_SCALE <= used <= _MAX_SCALE:
                checked_finite(np.array(largest))
                return basis, scale  # X is all zeros, and leaves the basis as it is

    def _check(self, n: int, p: int) -> None:
        """Raise PlanError if a parameter is invalid for a matrix of n x p."""
        for name, least in (("n_components", 1), ("n_passes", 1), ("n_oversamples", 0)):
            check_whole(name, getattr(self, name), least)
        if not is_number(self.sample) or not 0 < self.sample <= 1:
            raise PlanError(f"sample={self.sample!r}: expected a share of the rows, above 0 and at most 1.")
        if self.n_components > min(p, n):
            raise PlanError(
                f"n_components={self.n_components}: expected at most {min(p, n)}, as the matrix is {n} x {p}."
            )

    def _dtypes(self, engine: Engine, *, is_stored: bool) -> tuple[str, str]:
        """Return the precision of all passes but the last, and of the last; `is_stored`: X is bfloat16."""
        if self.precision not in ("auto", "float32", "mixed", "bfloat16"):
            raise PlanError(f"precision={self.precision!r}: expected 'auto', 'float32', 'mixed' or 'bfloat16'.")
        if self.precision in ("mixed", "bfloat16") and engine.name != "torch":
            raise PlanError(
                f"precision={self.precision!r} with engine={engine.name!r}: only torch has bfloat16; use 'float32'."
            )
        precision = self.precision
        if precision == "auto":
            is_fast = engine.name == "torch" and multiplies_bfloat16(engine.device)
            precision = ("bfloat16" if is_stored else "mixed") if is_fast else "float32"
        return {
            "float32": ("float32", "float32"),
            "mixed": ("bfloat16", "float32"),
            "bfloat16": ("bfloat16", "bfloat16"),
        }[precision]

    def transform(self, X: Any) -> NDArray[np.float32]:
        """Return X projected onto the components: ``X @ components_.T``, (n, n_components) float32."""
        engine = self._opened(X)
        passes = self._checked(X, engine, is_fitted=True)
        to = engine.put(np.ascontiguousarray(self.components_.T), "float32")
        out = np.empty((passes.n_rows, len(self.components_)), dtype=np.float32)
        for rows, part in passes:
            with np.errstate(over="ignore", invalid="ignore"):
                out[rows] = to_host(engine.put(part, "float32") @ to)
        return checked_finite(out)

    def inverse_transform(self, X: Any) -> NDArray[np.float32]:
        """Reconstruct rows from (n, n_components) scores: ``X @ components_``."""
        if not hasattr(self, "components_"):
            raise not_fitted(type(self).__name__)
        scores = np.asarray(X, dtype=np.float32)
        if scores.ndim != 2 or scores.shape[1] != len(self.components_):
            raise PlanError(f"X has shape {scores.shape}; expected (n, {len(self.components_)}) scores.")
        return np.asarray(scores @ self.components_)
