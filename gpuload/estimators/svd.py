"""Truncated SVD of a matrix that is never held: some passes over minibatches."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from gpuload.errors import PlanError
from gpuload.estimators.arrays import multiplies_bfloat16, open_engine
from gpuload.estimators.base import Estimator

if TYPE_CHECKING:
    from typing import Self

    from numpy.typing import NDArray

    from gpuload.estimators.arrays import Engine


class TruncatedSVD(Estimator):
    """The leading singular vectors and values of a matrix of cells, found in a few passes over its rows.

    As `sklearn.decomposition.TruncatedSVD` (the matrix is not centred), but no more of the matrix than a minibatch is
    ever in memory: each pass adds up ``X.T @ (X @ Q)`` over minibatches, for a basis Q of `n_components` +
    `n_oversamples` columns; the last pass ends with a Nystrom approximation of ``X.T @ X``, which needs no further one.

    Parameters
    ----------
    n_components
        Singular vectors wanted.
    n_passes
        Passes over the matrix; each brings the result nearer to the exact one. Three suffice for cells.
    n_oversamples
        Further columns of the basis.
    precision
        ``"float32"``; ``"mixed"``: bfloat16 in all passes but the last, which only turn the basis (the engine must be
        torch); ``"auto"``: mixed where the device multiplies bfloat16 natively, which is several times as fast.
    engine
        ``"auto"``, ``"numpy"``, ``"torch"`` or ``"cupy"``: what does the arithmetic.
    device
        ``"cpu"`` or ``"cuda:0"``.
    random_state
        Seed of the first basis; the result is a pure function of it.

    Attributes
    ----------
    components_ : (n_components, n_features) float32
        Right singular vectors; in each, the entry of the greatest magnitude is positive.
    singular_values_ : (n_components,) float32
        Descending.
    n_features_in_
        Columns of the matrix fitted.

    References
    ----------
    .. [1] Halko, Martinsson, Tropp, "Finding structure with randomness", SIAM Review 2011, doi:10.1137/090771806.
    .. [2] Tropp, Yurtsever, Udell, Cevher, "Fixed-rank approximation of a positive-semidefinite matrix from streaming
       data", NIPS 2017 (algorithm 3).
    """

    def __init__(
        self,
        n_components: int = 2,
        *,
        n_passes: int = 3,
        n_oversamples: int = 20,
        precision: str = "auto",
        engine: str = "auto",
        device: str = "cpu",
        random_state: int = 0,
    ) -> None:
        self.n_components = n_components
        self.n_passes = n_passes
        self.n_oversamples = n_oversamples
        self.precision = precision
        self.engine = engine
        self.device = device
        self.random_state = random_state

    def fit(self, X: Any, y: Any = None) -> Self:
        """Find the singular vectors.

        Parameters
        ----------
        X : (n, p) array, SciPy sparse matrix, or `gpuload.Loader`
            Cells x features.
        y
            Not used.

        Raises
        ------
        PlanError
            A parameter cannot be carried out, or the matrix is too small for it, or holds what is no number.
        """
        del y
        engine = open_engine(self.engine, self.device)
        passes = self._checked(X)
        early = self._early_dtype(engine)
        for name in ("n_components", "n_passes"):
            if getattr(self, name) < 1:
                raise PlanError(f"{name}={getattr(self, name)!r}: expected a whole number of at least 1.")
        p = passes.n_columns
        if self.n_components > min(p, passes.n_rows):
            raise PlanError(
                f"n_components={self.n_components}: the matrix is {passes.n_rows} x {p}, so it has at most "
                f"{min(p, passes.n_rows)}."
            )
        width = min(p, self.n_components + self.n_oversamples)
        start = np.random.default_rng(self.random_state).standard_normal((p, width)).astype(np.float32)
        basis = engine.orthonormal(engine.put(start, "float32"))
        for k in range(self.n_passes):
            image = engine.zeros((p, width), "float32")
            dtype = early if k < self.n_passes - 1 else "float32"
            turned = engine.put(basis, dtype)
            for _, rows in passes:
                part = engine.put(rows, dtype)
                image += part.T @ (part @ turned)
            if k < self.n_passes - 1:
                basis = engine.orthonormal(image)
        basis, image = engine.put(basis, "float64"), engine.put(image, "float64")
        components, values = _nystrom(engine, basis, image)
        components, values = engine.host(components)[:, : self.n_components].T, engine.host(values)
        if not np.all(np.isfinite(values)):
            raise PlanError("X holds NaN or infinite values; remove or fill them first.")
        at = np.argmax(np.abs(components), axis=1)
        components = components * np.sign(components[np.arange(len(components)), at])[:, None]
        self.components_: NDArray[np.float32] = np.ascontiguousarray(components, dtype=np.float32)
        self.singular_values_: NDArray[np.float32] = np.sqrt(values[: self.n_components]).astype(np.float32)
        self.n_features_in_ = p
        return self

    def _early_dtype(self, engine: Engine) -> str:
        """Return in which precision all passes but the last are made."""
        if self.precision not in ("auto", "float32", "mixed"):
            raise PlanError(f"precision={self.precision!r}: expected 'auto', 'float32' or 'mixed'.")
        if self.precision == "mixed" and engine.name != "torch":
            raise PlanError(f"precision='mixed' with engine={engine.name!r}: only torch has bfloat16; use 'float32'.")
        is_mixed = self.precision == "mixed" or (
            self.precision == "auto" and engine.name == "torch" and multiplies_bfloat16(self.device)
        )
        return "bfloat16" if is_mixed else "float32"

    def transform(self, X: Any) -> NDArray[np.float32]:
        """Return X in the space of the components: ``X @ components_.T``, (n, n_components) float32."""
        engine = open_engine(self.engine, self.device)
        passes = self._checked(X, is_fitted=True)
        to = engine.put(np.ascontiguousarray(self.components_.T), "float32")
        out = np.empty((passes.n_rows, len(self.components_)), dtype=np.float32)
        for rows, part in passes:
            out[rows] = engine.host(engine.put(part, "float32") @ to)
        return out

    def fit_transform(self, X: Any, y: Any = None) -> NDArray[np.float32]:
        """Fit, then transform: one pass more."""
        return self.fit(X, y).transform(X)

    def inverse_transform(self, X: Any) -> NDArray[np.float32]:
        """Return what the components make of (n, n_components) scores: ``X @ components_``."""
        scores = np.asarray(X, dtype=np.float32)
        if scores.ndim != 2 or scores.shape[1] != len(self.components_):
            raise PlanError(f"X has shape {scores.shape}; expected (n, {len(self.components_)}) scores.")
        return np.asarray(scores @ self.components_)


def _nystrom(engine: Any, basis: Any, image: Any) -> tuple[Any, Any]:
    """Return eigenvectors and eigenvalues, descending, of the positive matrix that takes `basis` to `image`.

    A small shift keeps the factorisation safe, and is taken off again.
    """
    shift = 1e-7 * float(engine.xp.linalg.norm(image))
    image = image + shift * basis
    core = basis.T @ image
    values, vectors = engine.eigh((core + core.T) / 2)
    floor = float(values[-1]) * 1e-14
    scale = engine.xp.where(values > floor, values, values * 0 + 1) ** -0.5 * (values > floor)
    half = image @ (vectors * scale)
    small, turn = engine.eigh(half.T @ half)
    order = slice(None, None, -1)
    small, turn = (
        engine.put(engine.host(small)[order].copy(), "float64"),
        engine.put(np.ascontiguousarray(engine.host(turn)[:, order]), "float64"),
    )
    floor = float(small[0]) * 1e-14 if small.shape[0] else 0.0
    safe = engine.xp.where(small > floor, small, small * 0 + 1)
    return half @ (turn * safe**-0.5), engine.xp.where(small - shift > 0, small - shift, small * 0)
