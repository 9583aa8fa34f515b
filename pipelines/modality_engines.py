"""Arithmetic of pipelines/modality.py: gpuload's estimators, scikit-learn or cuML.

All take the same parameters and return the same NumPy arrays: scores and components of the genes' SVD, and the mean of
the ten regressions as one.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from scipy.sparse import csr_matrix, vstack

import gpuload
from gpuload import estimators
from gpuload.checks import check_choice, check_whole

if TYPE_CHECKING:
    from collections.abc import Mapping

    from numpy.typing import NDArray


MOST_AT_ONCE = 12_000
"""Largest kernel matrix, in rows, that LAPACK may factorise in one call: some OpenBLAS builds crash on 16,000."""

LEAST = {"n_gene_components": 1, "n_protein_components": 1, "n_rounds": 0, "n_landmarks": 1}
"""Parameters that are whole numbers, and the least that each may be."""

SOLVERS = ("auto", "exact", "nystrom")


def _some_only(n_read: int, n_obs: int) -> gpuload.PlanError:
    """Return the error for settings that do not read each cell once."""
    return gpuload.PlanError(
        f"genes: their settings read {n_read:,} of {n_obs:,} cells; leave out where=, drop_last=, ranks, and a sampler "
        "that leaves out or repeats cells."
    )


class Engine:
    """Ours: apart from the scores, nothing as long as the matrix is held in memory."""

    name = "ours"

    def __init__(self, **params: Any) -> None:
        for name, least in LEAST.items():
            check_whole(name, params[name], least)
        check_choice("solver", params["solver"], SOLVERS)
        self.device = estimators.open_engine("auto", params["device"]).device
        self.params = {**params, "device": self.device}
        self.seed: int = params["random_state"]

    def warm_up(self) -> None:
        """Compile kernels and load libraries on a GPU, which would otherwise delay the first fit."""
        X = np.eye(2, dtype=np.float32)
        with self.open({"paths": X}) as cells:
            estimators.TruncatedSVD(1).fit(cells)
        estimators.KernelRidge(device=self.device).fit(X, X)

    def open(self, settings: Mapping[str, Any], **more: Any) -> gpuload.Loader:
        """Open cells in file order."""
        common = {"shuffle": False, "batch_size": 2048, "fetch_factor": 2, "rank": 0, "world_size": 1}
        return gpuload.open_loader(**{**common, "device": self.params["device"], **more, **settings})

    def svd(self, n_components: int) -> Any:
        """Return an SVD with scikit-learn's interface."""
        return estimators.TruncatedSVD(n_components, device=self.params["device"], random_state=self.seed)

    def gene_scores(self, settings: Mapping[str, Any]) -> tuple[NDArray[np.float32], NDArray[np.float32], Any]:
        """Return the SVD's scores of all cells, its components, and the names of the genes."""
        # in random order, since the SVD begins with some of the cells, and neighbours in a file are often of one kind
        with self.open(settings, dtype="bfloat16", shuffle=True, block_size="chunk") as cells:
            if cells.epoch_n_obs != cells.n_obs:  # estimators take some cells, but here they are found by row number
                raise _some_only(cells.epoch_n_obs, cells.n_obs)
            svd = self.svd(min(self.params["n_gene_components"], cells.n_vars, cells.n_obs))
            scores = svd.fit_transform(cells)
            return np.asarray(scores, dtype=np.float32), np.asarray(svd.components_, dtype=np.float32), cells.var_names

    def regress(
        self, X: NDArray[np.float32], y: NDArray[np.float32], batch: NDArray[Any]
    ) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
        """Return the mean of the ten models as one: rows for the kernel, and their coefficients."""
        model = estimators.KernelRidge(
            self.params["alpha"],
            gamma=self.params["gamma"],
            solver=self.params["solver"],
            n_landmarks=self.params["n_landmarks"],
            n_rounds=self.n_rounds(batch),
            device=self.params["device"],
            random_state=self.seed,
        ).fit(X, y, batch)
        return model.X_fit_, model.dual_coef_

    def n_rounds(self, batch: NDArray[Any]) -> int:
        """Return the rounds possible with these batches: one batch has no halves."""
        return int(self.params["n_rounds"]) if np.unique(batch).size > 1 else 0

    def is_exact(self, n: int) -> bool:
        """Return whether to solve exactly for this many cells."""
        solver = self.params["solver"]
        return bool(solver == "exact" or (solver == "auto" and n <= self.params["n_landmarks"]))


class SklearnEngine(Engine):
    """scikit-learn, tuned: kernel="rbf" rather than an RBF object, which is slower.

    For many cells the kernel uses landmarks (Nystroem, then Ridge): the exact one does not fit into memory.
    """

    name = "sklearn"

    def __init__(self, **params: Any) -> None:
        if params["device"] not in ("cpu", "auto"):
            raise gpuload.PlanError(f"engine='sklearn', device={params['device']!r}: scikit-learn works on the CPU.")
        super().__init__(**{**params, "device": "cpu"})

    def svd(self, n_components: int) -> Any:
        """Return an SVD with as many power iterations as the recipe."""
        from sklearn.decomposition import TruncatedSVD

        return TruncatedSVD(n_components, n_iter=5, random_state=self.seed)

    def exact(self) -> Any:
        """Return one model of the ten."""
        from sklearn.kernel_ridge import KernelRidge

        return KernelRidge(alpha=self.params["alpha"], kernel="rbf", gamma=self.params["gamma"])

    def gene_scores(self, settings: Mapping[str, Any]) -> tuple[NDArray[np.float32], NDArray[np.float32], Any]:
        """Return the SVD's scores of all cells, its components, and the names of the genes."""
        with self.open({**settings, "output": "csr", "dtype": "float32", "device": "cpu"}) as cells:
            names, n_obs = cells.var_names, cells.n_obs
            batches = [(batch.X, batch.rows) for batch in cells]
        X = vstack([part for part, _ in batches], format="csr")
        rows = np.concatenate([numbers for _, numbers in batches])
        del batches
        order = np.argsort(rows, kind="stable")
        if not np.array_equal(rows[order], np.arange(n_obs)):
            raise _some_only(np.unique(rows).size, n_obs)
        if (order != np.arange(n_obs)).any():  # else a copy for nothing
            X = X[order]
        if not np.isfinite(X.data).all():
            raise gpuload.CorruptDataError("genes hold NaN or infinite values; remove or fill them first.")
        svd = self.svd(min(self.params["n_gene_components"], *X.shape))
        X = self.matrix(X)
        scores = svd.fit_transform(X)
        return np.asarray(scores, dtype=np.float32), np.asarray(svd.components_, dtype=np.float32), names

    def matrix(self, X: Any) -> Any:
        """Return the matrix in the form that the SVD requires."""
        return X

    def regress(
        self, X: NDArray[np.float32], y: NDArray[np.float32], batch: NDArray[Any]
    ) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
        """Return the mean of the ten models as one: rows for the kernel, and their coefficients."""
        halves = self.halves(batch)
        if not self.is_exact(len(X)):
            return self.by_landmarks(X, y, halves)
        self.check_size(max(int(half.sum()) for half in halves))
        total = np.zeros(y.shape)
        for half in halves:
            total[half] += np.asarray(self.exact().fit(X[half], y[half]).dual_coef_)
        return X, (total / len(halves)).astype(np.float32)

    def check_size(self, n: int) -> None:
        """Refuse a kernel matrix too large for scikit-learn, which factorises it in one LAPACK call."""
        if n > MOST_AT_ONCE:
            raise gpuload.PlanError(
                f"engine='sklearn', solver='exact': a model of {n:,} cells, and OpenBLAS may crash on more than "
                f"{MOST_AT_ONCE:,}; use solver='nystrom', or engine='ours', which factorises panel by panel."
            )

    def by_landmarks(
        self, X: NDArray[np.float32], y: NDArray[np.float32], halves: list[NDArray[np.bool_]]
    ) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
        """Return the mean of models on the same landmarks."""
        from sklearn.kernel_approximation import Nystroem
        from sklearn.linear_model import Ridge

        features = Nystroem(
            gamma=self.params["gamma"],
            n_components=min(self.params["n_landmarks"], len(X)),
            random_state=self.seed,
        )
        features.fit(X)
        mapped = np.concatenate([features.transform(part) for part in np.array_split(X, max(1, len(X) // 4096))])
        total = np.zeros((mapped.shape[1], y.shape[1]))
        for half in halves:
            model = Ridge(self.params["alpha"], fit_intercept=False, solver="cholesky")
            total += model.fit(mapped[half], y[half]).coef_.reshape(y.shape[1], -1).T
        coefficients = features.normalization_.T @ (total / len(halves))
        return features.components_.astype(np.float32), coefficients.astype(np.float32)

    def halves(self, batch: NDArray[Any]) -> list[NDArray[np.bool_]]:
        """Return which cells each of the ten models is fitted to."""
        labels, random = np.unique(batch), np.random.default_rng(self.seed)
        halves = []
        for _ in range(self.n_rounds(batch)):
            is_first = np.isin(batch, random.permutation(labels)[: len(labels) // 2])
            halves += [is_first, ~is_first]
        return halves or [np.ones(len(batch), dtype=bool)]


class CumlEngine(SklearnEngine):
    """cuML: other imports, dense input, exact solutions only, and an explicit gamma."""

    name = "cuml"

    def __init__(self, **params: Any) -> None:
        Engine.__init__(self, **params)
        self.device = "cuda:0"
        if params["solver"] == "nystrom":
            raise gpuload.PlanError("engine='cuml', solver='nystrom': cuML has no landmarks; use solver='exact'.")
        try:
            import cupy

            if not cupy.cuda.runtime.getDeviceCount():  # cuml imports without a GPU, and fails only at the first fit
                raise RuntimeError("CuPy sees no GPU")
            import cuml  # noqa: F401
        except Exception as error:
            reason = next(iter(str(error).splitlines()), type(error).__name__)
            raise gpuload.DeviceError(
                f"engine='cuml': no GPU with cuML can be used here ({reason}); on a machine with a GPU, "
                "pip install '.[cuml]' from the checkout, or use --engine ours."
            ) from error

    def warm_up(self) -> None:
        """Let cuML load its libraries."""
        X = np.eye(4, dtype=np.float32)
        self.svd(1).fit_transform(self.matrix(csr_matrix(X)))
        self.exact().fit(X, X)

    def svd(self, n_components: int) -> Any:
        """Return an SVD by eigendecomposition; cuML has no randomised one."""
        from cuml import TruncatedSVD

        return TruncatedSVD(n_components=n_components, output_type="numpy")

    def exact(self) -> Any:
        """Return one model of the ten."""
        from cuml.kernel_ridge import KernelRidge

        return KernelRidge(alpha=self.params["alpha"], kernel="rbf", gamma=self.params["gamma"], output_type="numpy")

    def matrix(self, X: Any) -> Any:
        """Return a dense matrix on the GPU in Fortran order: cuML's SVD would convert any other, on the host."""
        from cupyx.scipy.sparse import csr_matrix as csr_on_gpu

        return csr_on_gpu(X).toarray(order="F")

    def check_size(self, n: int) -> None:
        """Accept everything: cuSOLVER factorises whatever fits into memory."""

    def is_exact(self, n: int) -> bool:
        """Return True: cuML has no landmarks."""
        del n
        return True


ENGINES = {engine.name: engine for engine in (Engine, SklearnEngine, CumlEngine)}
