"""Predict surface proteins from gene expression: the winning recipe of the NeurIPS 2021 competition.

    python pipelines/modality.py FOLDER                      the competition's and Open Problems' files
    python pipelines/modality.py cite.h5mu --test s4d1       a MuData; batch s4d1 is held out
    python pipelines/modality.py genes.h5ad proteins.h5ad    two AnnData; cells without proteins get them predicted
    python pipelines/modality.py cite.h5ad --test s4d1       one, whose var["feature_types"] are GEX and ADT

FOLDER holds train_mod1.h5ad and test_mod1.h5ad (gene expression), train_mod2.h5ad (proteins) and, to be scored,
test_mod2.h5ad. `--make` writes synthetic ones of the same shape first, `--real` some hundred real cells.

The recipe (Deng, Guan's group; Lance et al., PMLR 2022): truncated SVD of the genes of all cells (300) and of the
proteins (70); each cell's 300 scores are standardised; kernel ridge regression (Gaussian, gamma 0.005, alpha 0.2) on
one half of the batches and on the other, for five shufflings of the batches; the mean of the ten models, back through
the SVD of the proteins, and nothing below 0.

One word chooses what does it: `ours` (gpuload's estimators, fed minibatch by minibatch from disk: the matrix is never
in memory), `sklearn` (on the whole matrix in memory) or `cuml` (the same on a GPU). `ProteinModel` is the recipe for
use from Python: fit, predict, score, save, load.
"""

from __future__ import annotations

import argparse
import json
import resource
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

try:
    import anndata
    import numpy as np
    import pandas as pd
    from modality_data import GENES, PROTEINS, Cells, Table, read_cells, write_prediction, write_real, write_synthetic
    from modality_report import Row, baselines, draw_methods, draw_proteins, measures_of
    from scipy.sparse import vstack

    import gpuload
    from gpuload import estimators
except ImportError as missing:
    sys.exit(f"modality.py: {missing}. From the checkout, pip install '.[modality]' installs what this program needs.")

if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import Self

    from numpy.typing import ArrayLike, NDArray

EPILOG = """\
exit codes: 0 done, 1 a problem with the data or the machine, 2 wrong use

examples:
  python pipelines/modality.py demo --make 4000            (a small synthetic set, written to demo/)
  python pipelines/modality.py real --real                 (400 real blood cells, downloaded to real/)
  python pipelines/modality.py competition --make 66175    (the competition's exact shape: some minutes to make)
  python pipelines/modality.py FOLDER --engine sklearn
  python pipelines/modality.py cite.h5mu --counts --batch donor --test donor8 --save model.npz
  python pipelines/modality.py new_cells.h5ad --model model.npz
"""


# --- the recipe


class ProteinModel:
    """The recipe as one model: genes in, proteins out.

    What it has learnt are arrays of NumPy, the same whichever engine found them: what was fitted on a GPU is saved,
    loaded and used to predict on a machine without one.

    Parameters
    ----------
    engine
        ``"ours"``, ``"sklearn"`` or ``"cuml"``.
    n_gene_components, n_protein_components
        Of the two SVDs; at most as many as there are cells, genes or proteins.
    gamma
        That of a length scale of 10. The widely copied GPU version leaves it out, and gets 1 / 300 instead.
    alpha
        Strength of the penalty.
    n_rounds
        Shufflings of the batches, two models each. Of one batch there is one model.
    solver, n_landmarks
        ``"exact"``, ``"nystrom"`` (by so many landmarks), or ``"auto"``: exact up to so many cells.
    device
        Of ours: ``"cpu"`` or ``"cuda:0"``.
    random_state
        Seed.

    Attributes
    ----------
    gene_names_, protein_names_
        Of the cells fitted.
    gene_components_ : (n_gene_components, n_genes) float32
        Of the genes' SVD.
    protein_components_ : (n_protein_components, n_proteins) float32
        Of the proteins' SVD.
    X_fit_, dual_coef_
        Of the mean of the ten models: `gpuload.estimators.KernelRidge`'s.
    scores_ : (n, n_gene_components) float32
        Standardised, of all cells fitted, those without proteins too; not saved.
    seconds_
        That the steps of fitting took; not saved.
    """

    LEARNT: ClassVar = (
        "gene_names_",
        "protein_names_",
        "gene_components_",
        "protein_components_",
        "X_fit_",
        "dual_coef_",
    )

    def __init__(
        self,
        engine: str = "ours",
        *,
        n_gene_components: int = 300,
        n_protein_components: int = 70,
        gamma: float = 0.005,
        alpha: float = 0.2,
        n_rounds: int = 5,
        solver: str = "auto",
        n_landmarks: int = 4000,
        device: str = "cpu",
        random_state: int = 0,
    ) -> None:
        if engine not in ENGINES:
            raise gpuload.PlanError(f"engine={engine!r}: expected one of {', '.join(map(repr, ENGINES))}.")
        self.params = {name: value for name, value in locals().items() if name != "self"}
        self.engine: Engine = ENGINES[engine](**self.params)

    def get_params(self, deep: bool = True) -> dict[str, Any]:
        """Return the parameters, as scikit-learn's tools ask for them."""
        del deep
        return dict(self.params)

    def fit(
        self, genes: Any, proteins: Any = None, batch: ArrayLike | None = None, rows: ArrayLike | None = None
    ) -> Self:
        """Learn from cells with genes and proteins.

        Parameters
        ----------
        genes
            Log-normalised expression: a MuData, an AnnData, or what else `gpuload.open_loader` opens, also as a mapping
            of its settings: ``{"paths": "cite.h5ad", "layer": "normalized"}``.
        proteins : (n, n_proteins)
            Array, or an AnnData whose cells are found by name; None of a MuData, whose modality "prot" it is.
        batch : (n,), optional
            Batches of the cells with proteins; else the AnnData's obs["batch"], else all are one batch.
        rows : (n,), optional
            Which of the cells have the proteins given; the others help to find the components. None: all, or those
            that the AnnData of the proteins names.
        """
        settings, known = _opened(genes), _known(genes, proteins, batch, rows)
        self.protein_names_ = known.names
        start = time.perf_counter()
        scores, self.gene_components_, self.gene_names_ = self.engine.gene_scores(settings)
        self.scores_ = standardised(scores)
        del scores
        middle = time.perf_counter()
        chosen = np.arange(len(self.scores_)) if known.rows is None else known.rows
        if len(chosen) != len(known.proteins):
            raise gpuload.PlanError(
                f"proteins: {len(known.proteins)} rows for {len(chosen)} cells; give a row for each, or say with rows "
                "which cells they are of."
            )
        svd = self.engine.svd(min(self.params["n_protein_components"], *known.proteins.shape)).fit(known.proteins)
        self.protein_components_ = np.asarray(svd.components_, dtype=np.float32)
        y = np.asarray(svd.transform(known.proteins), dtype=np.float32)
        first = chosen[0] if len(chosen) else 0
        is_run = np.array_equal(chosen, np.arange(first, first + len(chosen)))  # of which a copy would be a waste
        X = self.scores_[first : first + len(chosen)] if is_run else self.scores_[chosen]
        self.X_fit_, self.dual_coef_ = self.engine.regress(X, y, known.batch)
        self.seconds_ = {"SVD of the genes, read from disk": middle - start, "regression": time.perf_counter() - middle}
        return self

    def predict(self, genes: Any) -> Any:
        """Predict the proteins of cells, given as to `fit`; their genes are found by name.

        Returns
        -------
        (n, n_proteins) float32; of an AnnData or a MuData, an AnnData with the names of its cells and of the proteins.
        """
        settings = _opened(genes)
        svd = estimators.TruncatedSVD(len(self.gene_components_), device=self.params["device"])
        svd.components_, svd.n_features_in_ = self.gene_components_, self.gene_components_.shape[1]
        with self.engine.open(settings) as cells:
            has_same = list(cells.var_names) == list(self.gene_names_)
        with self.engine.open(settings if has_same else {**settings, "genes": list(self.gene_names_)}) as cells:
            predicted = self.predict_scores(standardised(svd.transform(cells)))
        if (table := _table_of(genes)) is None:
            return predicted
        return anndata.AnnData(
            predicted, pd.DataFrame(index=table.obs_names), pd.DataFrame(index=pd.Index(self.protein_names_))
        )

    def predict_scores(self, scores: NDArray[np.float32]) -> NDArray[np.float32]:
        """Predict from standardised scores, such as rows of `scores_`: (n, n_proteins)."""
        model = estimators.KernelRidge(gamma=self.params["gamma"], device=self.params["device"])
        model.X_fit_, model.dual_coef_, model.n_features_in_ = self.X_fit_, self.dual_coef_, self.X_fit_.shape[1]
        return np.asarray(np.maximum(model.predict(scores) @ self.protein_components_, 0))

    def score(self, genes: Any, proteins: Any = None) -> float:
        """Return the coefficient of determination, the mean over proteins, of cells given as to `fit`."""
        known, found = _known(genes, proteins, None, None), self.predict(genes)
        found = np.asarray(found.X if hasattr(found, "obs_names") else found)
        found = found if known.rows is None else found[known.rows]
        left = ((known.proteins - found) ** 2).sum(axis=0, dtype=np.float64)
        spread = ((known.proteins - known.proteins.mean(axis=0)) ** 2).sum(axis=0, dtype=np.float64)
        return float(np.mean(1 - left[spread > 0] / spread[spread > 0]))

    def save(self, path: str | Path) -> None:
        """Write parameters and what was learnt to an .npz file, without pickles."""
        learnt = {name: np.asarray(getattr(self, name)) for name in self.LEARNT}
        learnt = {name: found.astype(str) if found.dtype == object else found for name, found in learnt.items()}
        with Path(path).open("wb") as file:
            np.savez(file, about=np.array(json.dumps({"model": "ProteinModel", "params": self.params})), **learnt)

    @classmethod
    def load(cls, path: str | Path, **params: Any) -> Self:
        """Return what `save` wrote; `params` are set anew, such as ``engine="ours"`` where there is no GPU."""
        try:
            with np.load(path, allow_pickle=False) as stored:
                about = json.loads(str(stored["about"]))
                model = cls(**{**about["params"], **params})
                for name in cls.LEARNT:
                    setattr(model, name, stored[name])
        except FileNotFoundError:
            raise
        except (OSError, ValueError, KeyError, TypeError) as error:
            if isinstance(error, gpuload.GpuloadError):
                raise
            raise gpuload.CorruptDataError(f"{path}: not a saved ProteinModel ({error}).") from error
        return model


def standardised(scores: NDArray[np.float32]) -> NDArray[np.float32]:
    """Return each row with mean 0 and standard deviation 1."""
    found = scores - scores.mean(axis=1, keepdims=True)
    found /= np.maximum(found.std(axis=1, keepdims=True), 1e-9)
    return found


@dataclass(frozen=True)
class Known:
    """Proteins that were measured: of which cells (None: of all, in order), in which batches, and their names."""

    proteins: NDArray[np.float32]
    names: Any
    batch: NDArray[np.str_]
    rows: NDArray[np.int64] | None


def _table_of(genes: Any) -> Any:
    """Return the AnnData of the genes, or None where they are given in another way."""
    genes = genes.mod[GENES] if hasattr(genes, "mod") else genes
    return genes if hasattr(genes, "obs_names") else None


def _opened(genes: Any) -> dict[str, Any]:
    """Return the settings that open the genes."""
    if isinstance(genes, dict) and "paths" in genes:
        return genes
    table = _table_of(genes)
    if table is None:
        return {"paths": genes}
    return {"paths": table, "layer": "normalized" if table.X is None else "X"}


def _known(genes: Any, proteins: Any, batch: ArrayLike | None, rows: ArrayLike | None) -> Known:
    """Return the proteins as they go with the genes."""
    table = _table_of(genes)
    if proteins is None:
        if not hasattr(genes, "mod"):
            raise gpuload.PlanError("proteins=None: only a MuData has them with it.")
        proteins = genes.mod[PROTEINS]
    if len(np.shape(proteins)) != 2:
        raise gpuload.PlanError(f"proteins has shape {np.shape(proteins)}; expected (n_cells, n_proteins).")
    names: Any = [str(i) for i in range(np.shape(proteins)[1])]
    if hasattr(proteins, "obs_names"):
        names = proteins.var_names
        X = proteins.layers["normalized"] if proteins.X is None else proteins.X
        values = np.asarray(X.toarray() if hasattr(X, "toarray") else X, dtype=np.float32)
        if table is not None and rows is None:
            places = proteins.obs_names.get_indexer(table.obs_names)
            rows = np.flatnonzero(places >= 0)
            values = values[places[rows]]
            if not len(rows):
                raise gpuload.PlanError("proteins: none of their cells has a name that is among those of the genes.")
    else:
        values = np.asarray(proteins, dtype=np.float32)
    chosen = None if rows is None else np.asarray(rows)
    if batch is None and table is not None and "batch" in table.obs:
        batch = table.obs["batch"].to_numpy()[slice(None) if chosen is None else chosen]
    batches = np.full(len(values), "all") if batch is None else np.asarray(batch).astype(str)
    if len(batches) != len(values):
        raise gpuload.PlanError(f"batch: {len(batches)} labels for {len(values)} cells with proteins.")
    return Known(values, names, batches, chosen)


# --- the engines


class Engine:
    """Ours: nothing is held that is as long as the matrix, but the scores."""

    name = "ours"

    def __init__(self, **params: Any) -> None:
        self.params = params
        self.seed: int = params["random_state"]

    def open(self, settings: Mapping[str, Any], **more: Any) -> gpuload.Loader:
        """Open cells in the order in which they lie."""
        common = {"shuffle": False, "batch_size": 2048, "fetch_factor": 2, "rank": 0, "world_size": 1}
        return gpuload.open_loader(**{**common, "device": self.params["device"], **more, **settings})

    def svd(self, n_components: int) -> Any:
        """Return an SVD with scikit-learn's interface."""
        return estimators.TruncatedSVD(n_components, device=self.params["device"], random_state=self.seed)

    def gene_scores(self, settings: Mapping[str, Any]) -> tuple[NDArray[np.float32], NDArray[np.float32], Any]:
        """Return the SVD's scores of all cells, its components, and the names of the genes."""
        with self.open(settings, dtype="bfloat16") as cells:
            svd = self.svd(min(self.params["n_gene_components"], cells.n_vars, cells.n_obs))
            scores = svd.fit_transform(cells)
            return np.asarray(scores, dtype=np.float32), np.asarray(svd.components_, dtype=np.float32), cells.var_names

    def regress(
        self, X: NDArray[np.float32], y: NDArray[np.float32], batch: NDArray[Any]
    ) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
        """Return the mean of the ten models as one: rows to take the kernel with, and their coefficients."""
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
        """Return the rounds that these batches allow: of one batch there are no halves."""
        return int(self.params["n_rounds"]) if np.unique(batch).size > 1 else 0

    def is_exact(self, n: int) -> bool:
        """Return whether so many cells are to be solved exactly."""
        solver = self.params["solver"]
        return bool(solver == "exact" or (solver == "auto" and n <= self.params["n_landmarks"]))


class SklearnEngine(Engine):
    """scikit-learn, tuned: kernel="rbf" rather than an RBF object, which goes a slower way.

    Of many cells the kernel is that of landmarks (Nystroem, then Ridge): the exact one does not fit into memory.
    """

    name = "sklearn"

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
        with self.open(settings, output="csr", device="cpu") as cells:
            names = cells.var_names
            X = vstack([batch.X for batch in cells], format="csr")
        svd = self.svd(min(self.params["n_gene_components"], *X.shape))
        scores = svd.fit_transform(self.matrix(X))
        return np.asarray(scores, dtype=np.float32), np.asarray(svd.components_, dtype=np.float32), names

    def matrix(self, X: Any) -> Any:
        """Return the matrix as the SVD wants it."""
        return X

    def regress(
        self, X: NDArray[np.float32], y: NDArray[np.float32], batch: NDArray[Any]
    ) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
        """Return the mean of the ten models as one: rows to take the kernel with, and their coefficients."""
        halves = self.halves(batch)
        if not self.is_exact(len(X)):
            return self.by_landmarks(X, y, halves)
        total = np.zeros(y.shape)
        for half in halves:
            total[half] += np.asarray(self.exact().fit(X[half], y[half]).dual_coef_)
        return X, (total / len(halves)).astype(np.float32)

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
    """cuML: the imports differ, sparse input is made dense, all is exact, and gamma is said."""

    name = "cuml"

    def __init__(self, **params: Any) -> None:
        super().__init__(**params)
        try:
            import cupy

            cupy.cuda.runtime.getDeviceCount()  # cuml itself imports without a GPU, and fails at the first fit
            import cuml  # noqa: F401
        except Exception as error:
            raise gpuload.DeviceError(
                f"engine='cuml': no GPU and cuML can be used here ({str(error).splitlines()[0]}); on a machine with a "
                "GPU, pip install '.[cuml]' from the checkout, or use --engine ours."
            ) from error

    def svd(self, n_components: int) -> Any:
        """Return an SVD by eigendecomposition; cuML has no randomised one."""
        from cuml import TruncatedSVD

        return TruncatedSVD(n_components, output_type="numpy")

    def exact(self) -> Any:
        """Return one model of the ten."""
        from cuml.kernel_ridge import KernelRidge

        return KernelRidge(alpha=self.params["alpha"], kernel="rbf", gamma=self.params["gamma"], output_type="numpy")

    def matrix(self, X: Any) -> Any:
        """Return a dense matrix: cuML's SVD takes no sparse one."""
        return X.toarray()

    def is_exact(self, n: int) -> bool:
        """Return True: cuML has no landmarks."""
        del n
        return True


ENGINES = {engine.name: engine for engine in (Engine, SklearnEngine, CumlEngine)}


# --- the program


def model_of(args: argparse.Namespace) -> ProteinModel:
    """Return the model that the command line asks for."""
    return ProteinModel(
        args.engine, solver=args.solver, n_landmarks=args.landmarks, device=args.device, random_state=args.seed
    )


def run(args: argparse.Namespace) -> None:
    """Make what is to be made, predict, compare, write and draw."""
    out = args.out or (args.paths[0] if args.paths[0].suffix == "" else args.paths[0].parent)
    if args.model:
        return predict_new(args, out)
    if args.make:
        write_synthetic(args.paths[0], args.make, args.seed)
    if args.real:
        write_real(args.paths[0])
    model = model_of(args)
    cells = read_cells(
        args.paths, batch=args.batch, test=args.test, modalities=args.modalities, layer=args.layer,
        is_counts=args.counts,
    )  # fmt: skip
    if np.unique(cells.batch).size < 2:
        print("the cells to learn from are of one batch: one model, not two for each shuffling", file=sys.stderr)
    start = time.perf_counter()
    model.fit(dict(cells.genes), cells.proteins, cells.batch, cells.rows)
    predicted = model.predict_scores(model.scores_[cells.test])
    seconds = time.perf_counter() - start
    for step, taken in model.seconds_.items():
        print(f"{step}: {taken:.1f} s", file=sys.stderr)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    for path in write_prediction(out, predicted, cells):
        print(f"written: {path}", file=sys.stderr)
    if args.save:
        model.save(args.save)
    print(f"{args.engine}: {seconds:.1f} s in all, {peak:,.0f} MiB at most, "
          f"{len(cells.rows):,} + {len(cells.test):,} cells")  # fmt: skip
    result: dict[str, Any] = {
        "engine": args.engine,
        "cells": [len(cells.rows), len(cells.test)],
        "seconds": {**model.seconds_, "whole": seconds},
        "peak_mib": peak,
        "settings": vars(args),
    }
    measured = np.isfinite(cells.wanted).all(axis=1)
    if measured.any():
        rows = compare(model, cells, predicted, measured, seconds, has_baselines=not args.no_baselines)
        result["methods"] = {row.name: {"seconds": row.seconds, **row.measures} for row in rows}
        draw_methods(out / "modality.png", rows, f"measured here: {len(cells.rows):,} + {measured.sum():,} cells")
        names = [str(name) for name in cells.protein_names]
        draw_proteins(out / "proteins.png", predicted[measured], cells.wanted[measured], names)
    (out / "modality.json").write_text(json.dumps(result, indent=1, default=str) + "\n")
    return None


def compare(
    model: ProteinModel,
    cells: Cells,
    predicted: NDArray[np.float32],
    measured: NDArray[np.bool_],
    seconds: float,
    *,
    has_baselines: bool,
) -> list[Row]:
    """Return what each method gave on the cells whose proteins are known, and print it."""
    wanted = cells.wanted[measured]
    rows = [Row(f"KRR, {model.engine.name}", seconds, measures_of(predicted[measured], wanted))]
    if has_baselines:
        train, test = model.scores_[cells.rows], model.scores_[cells.test[measured]]
        to_scores = next(iter(model.seconds_.values()))
        for name, taken, found in baselines(train, cells.proteins, test):
            rows.append(Row(name, to_scores + taken if taken else None, measures_of(np.asarray(found), wanted)))
    if cells.noise_free is not None:
        rows.append(Row("the noise-free map", None, measures_of(cells.noise_free[measured], wanted)))
    for row in rows:
        print(f"{row.name:32s}" + "  ".join(f"{what} {value:.4f}" for what, value in row.measures.items()))
    return rows


def predict_new(args: argparse.Namespace, out: Path) -> None:
    """Predict the proteins of cells by a model that was saved."""
    if len(args.paths) != 1:
        raise gpuload.PlanError(f"--model: expected one file of cells, not {len(args.paths)}.")
    model = ProteinModel.load(args.model, engine="ours", device=args.device)
    path = args.paths[0]
    genes = Table(path, f"mod/{args.modalities[0]}" if path.suffix == ".h5mu" else "", args.layer)
    transform = gpuload.Transform(target_sum=1e4, log1p=True) if args.counts else None
    predicted = model.predict({"paths": genes.address, "layer": genes.layer, "transform": transform})
    none = np.empty(0, dtype=np.int64)
    everyone = np.arange(len(predicted))
    cells = Cells(
        {}, genes.obs.index, none, predicted[:0], np.empty(0, dtype=str), everyone, np.full_like(predicted, np.nan),
        pd.Index(model.protein_names_), about={"dataset_id": str(genes.uns.get("dataset_id", path.stem))},
        mudata=(path, *args.modalities) if path.suffix == ".h5mu" else None,
    )  # fmt: skip
    for written in write_prediction(out, predicted, cells):
        print(f"written: {written}: {len(predicted):,} cells x {predicted.shape[1]} proteins")


def parser() -> argparse.ArgumentParser:
    """Return the command line."""
    found = argparse.ArgumentParser(
        prog="modality.py",
        description=__doc__.splitlines()[0],
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = found.add_argument
    add("paths", nargs="+", type=Path, metavar="PATH", help="a folder, an .h5mu file, or one or two AnnData")
    add("--out", type=Path, metavar="DIR", help="where prediction.h5ad, modality.json and pictures go (default: there)")
    add("--engine", choices=ENGINES, default="ours", help="what does the arithmetic (default: %(default)s)")
    add("--make", type=int, metavar="CELLS", help="first write synthetic files with so many training cells")
    add("--real", action="store_true", help="first write real ones, 400 cells, which are downloaded")
    add("--batch", default="batch", metavar="COLUMN", help="of obs (default: %(default)s)")
    add(
        "--test", nargs="+", default=[], metavar="BATCH", help="held out; else the cells without proteins are predicted"
    )
    add("--modalities", nargs=2, default=[GENES, PROTEINS], metavar=("GENES", "PROTEINS"),
        help="of a MuData (default: rna prot)")  # fmt: skip
    add("--layer", help="of genes and proteins (default: X, or normalized where there is no X)")
    add("--counts", action="store_true", help="the values are counts: normalise genes, take log ratios of proteins")
    add("--solver", choices=("auto", "exact", "nystrom"), default="auto",
        help="by landmarks (auto, above --landmarks cells) or exact")  # fmt: skip
    add("--landmarks", type=int, default=4000, help="landmarks of the regression (default: %(default)s)")
    add("--device", default="cpu", help="of ours: cpu or cuda:0 (default: %(default)s)")
    add("--seed", type=int, default=0)
    add("--no-baselines", action="store_true", help="only the recipe itself")
    add("--save", type=Path, metavar="FILE", help="keep the model")
    add("--model", type=Path, metavar="FILE", help="predict by a model that was kept; nothing is fitted")
    return found


def main(arguments: list[str] | None = None) -> int:
    """Run the program; return the exit code."""
    args = parser().parse_args(arguments)
    try:
        run(args)
    except (gpuload.GpuloadError, OSError) as error:
        print(f"modality.py: {error}", file=sys.stderr)
        return 2 if isinstance(error, gpuload.PlanError) else 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
