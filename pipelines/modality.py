"""Predict surface proteins from gene expression: the winning recipe of the NeurIPS 2021 competition, in one file.

    python pipelines/modality.py FOLDER --engine ours

FOLDER holds the competition's (and Open Problems') files: train_mod1.h5ad and test_mod1.h5ad (gene expression),
train_mod2.h5ad (proteins) and, to be scored, test_mod2.h5ad. `--make` writes synthetic ones of the same shape first.

The recipe (Deng, Guan's group; Lance et al., PMLR 2022): truncated SVD of the genes of all cells (300) and of the
proteins (70); each cell's 300 scores are standardised; kernel ridge regression (Gaussian, gamma 0.005, alpha 0.2) on
one half of the batches and on the other, for five shufflings of the batches; the mean of the ten models, back through
the SVD of the proteins, and nothing below 0.

One word chooses what does it: `ours` (gpuload's estimators, fed minibatch by minibatch from disk: the matrix is never
in memory), `sklearn` (on the whole matrix in memory) or `cuml` (the same on a GPU).
"""

from __future__ import annotations

import argparse
import json
import resource
import sys
import time
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

try:
    import anndata
    import numpy as np
    from scipy.sparse import csc_matrix, issparse, vstack

    import gpuload
    from gpuload import estimators
    from gpuload.synthetic_cite import paired_cells
except ImportError as missing:
    sys.exit(f"modality.py: {missing}. From the checkout, pip install '.[modality]' installs what this program needs.")

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import NDArray

N_GENE_COMPONENTS, N_PROTEIN_COMPONENTS = 300, 70
GAMMA, ALPHA, N_ROUNDS = 0.005, 0.2, 5
"""gamma is that of a length scale of 10. The widely copied GPU version leaves it out, and gets 1 / 300 instead."""

EPILOG = """\
exit codes: 0 done, 1 a problem with the data or the machine, 2 wrong use

examples:
  python pipelines/modality.py demo --make 4000            (a small synthetic set, written to demo/)
  python pipelines/modality.py competition --make 66175    (the competition's exact shape: some minutes to make)
  python pipelines/modality.py FOLDER --engine sklearn
"""


# --- the recipe


def scores_of_genes(engine: Engine, train: Path, test: Path) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """Return the standardised SVD scores of the training and the test cells."""
    scores = engine.gene_scores(train, test)
    scores = (scores - scores.mean(axis=1, keepdims=True)) / np.maximum(scores.std(axis=1, keepdims=True), 1e-9)
    n_train = len(scores) - n_cells(test)
    return scores[:n_train], scores[n_train:]


def predict_proteins(
    engine: Engine, train: NDArray[np.float32], proteins: NDArray[np.float32], batch: NDArray[Any], test: NDArray[Any]
) -> NDArray[np.float32]:
    """Return the proteins of the test cells, (n, n_proteins)."""
    n_components = min(N_PROTEIN_COMPONENTS, *proteins.shape)
    svd = engine.svd(n_components).fit(proteins)
    found = engine.ridge(train, svd.transform(proteins), batch, test)
    return np.maximum(found @ np.asarray(svd.components_, dtype=np.float32), 0)


# --- the engines


class Engine:
    """Ours: nothing is held that is as long as the matrix, but the scores."""

    name = "ours"

    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args

    def svd(self, n_components: int) -> Any:
        """Return an SVD with scikit-learn's interface."""
        return estimators.TruncatedSVD(n_components, device=self.args.device, random_state=self.args.seed)

    def gene_scores(self, train: Path, test: Path) -> NDArray[np.float32]:
        """Return the SVD scores of all cells, those of `train` first."""
        with gpuload.open_loader(
            [train, test], shuffle=False, batch_size=2048, fetch_factor=2, dtype="bfloat16", device=self.args.device
        ) as cells:
            return np.asarray(self.svd(min(N_GENE_COMPONENTS, cells.n_vars, cells.n_obs)).fit_transform(cells))

    def ridge(
        self, train: NDArray[np.float32], y: NDArray[np.float32], batch: NDArray[Any], test: NDArray[np.float32]
    ) -> NDArray[np.float32]:
        """Return the mean prediction of the ten models."""
        model = estimators.KernelRidge(
            ALPHA,
            gamma=GAMMA,
            solver=self.args.solver,
            n_landmarks=self.args.landmarks,
            n_rounds=N_ROUNDS,
            device=self.args.device,
            random_state=self.args.seed,
        )
        return np.asarray(model.fit(train, y, batch).predict(test))


class SklearnEngine(Engine):
    """scikit-learn, tuned: kernel="rbf" rather than an RBF object, which is three to five times slower."""

    name = "sklearn"

    def svd(self, n_components: int) -> Any:
        """Return an SVD with as many power iterations as the recipe."""
        from sklearn.decomposition import TruncatedSVD

        return TruncatedSVD(n_components, n_iter=5, random_state=self.args.seed)

    def model(self) -> Any:
        """Return one model of the ten."""
        from sklearn.kernel_ridge import KernelRidge

        return KernelRidge(alpha=ALPHA, kernel="rbf", gamma=GAMMA)

    def gene_scores(self, train: Path, test: Path) -> NDArray[np.float32]:
        """Return the SVD scores of all cells, those of `train` first."""
        X = vstack([anndata.read_h5ad(path).X for path in (train, test)], format="csr").astype(np.float32)
        return np.asarray(self.svd(min(N_GENE_COMPONENTS, *X.shape)).fit_transform(self.matrix(X)), dtype=np.float32)

    def matrix(self, X: Any) -> Any:
        """Return the matrix as the SVD wants it."""
        return X

    def ridge(
        self, train: NDArray[np.float32], y: NDArray[np.float32], batch: NDArray[Any], test: NDArray[np.float32]
    ) -> NDArray[np.float32]:
        """Return the mean prediction of the ten models."""
        labels = np.unique(batch)
        random = np.random.default_rng(self.args.seed)
        total = np.zeros((len(test), y.shape[1]), dtype=np.float32)
        for _ in range(N_ROUNDS):
            is_first = np.isin(batch, random.permutation(labels)[: len(labels) // 2])
            for half in (is_first, ~is_first):
                total += np.asarray(self.model().fit(train[half], y[half]).predict(test), dtype=np.float32)
        return total / (2 * N_ROUNDS)


class CumlEngine(SklearnEngine):
    """cuML: the imports differ, sparse input is made dense, and gamma is said."""

    name = "cuml"

    def __init__(self, args: argparse.Namespace) -> None:
        super().__init__(args)
        try:
            import cupy

            cupy.cuda.runtime.getDeviceCount()  # cuml itself imports without a GPU, and fails at the first fit
            import cuml  # noqa: F401
        except Exception as error:
            raise gpuload.DeviceError(
                f"engine='cuml': no GPU and cuML can be used here ({str(error).splitlines()[0]}); install cuml-cu13 on "
                "a machine with a GPU, or use --engine ours."
            ) from error

    def svd(self, n_components: int) -> Any:
        """Return an SVD by eigendecomposition; cuML has no randomised one."""
        from cuml import TruncatedSVD

        return TruncatedSVD(n_components, output_type="numpy")

    def model(self) -> Any:
        """Return one model of the ten."""
        from cuml.kernel_ridge import KernelRidge

        return KernelRidge(alpha=ALPHA, kernel="rbf", gamma=GAMMA, output_type="numpy")

    def matrix(self, X: Any) -> Any:
        """Return a dense matrix: cuML's SVD takes no sparse one."""
        return X.toarray()


ENGINES = {engine.name: engine for engine in (Engine, SklearnEngine, CumlEngine)}


# --- what it is compared with


def baselines(
    train: NDArray[np.float32], proteins: NDArray[np.float32], test: NDArray[np.float32]
) -> Iterator[tuple[str, NDArray[np.float32]]]:
    """Predict by simpler methods from the same scores: (name, (n, n_proteins))."""
    shape = len(test), proteins.shape[1]
    yield "zeros", np.zeros(shape, dtype=np.float32)
    yield "mean", np.broadcast_to(proteins.mean(axis=0), shape)
    for n_components, n_neighbours in ((4, 5), (50, 20)):
        found = nearest(train[:, :n_components], test[:, :n_components], n_neighbours)
        yield f"{n_neighbours} neighbours, {n_components} components", proteins[found].mean(axis=1)
    yield "ridge", ridge(train, proteins, test)
    mlp = multilayer(train, proteins, test)
    if mlp is not None:
        yield "MLP 512-256", mlp


def nearest(train: NDArray[np.float32], test: NDArray[np.float32], n: int) -> NDArray[np.int64]:
    """Return the n nearest training cells of each test cell."""
    squares = (train**2).sum(axis=1) - 2 * test @ train.T
    return np.argpartition(squares, min(n, len(train)) - 1, axis=1)[:, :n]


def ridge(train: NDArray[np.float32], y: NDArray[np.float32], test: NDArray[np.float32]) -> NDArray[np.float32]:
    """Fit a ridge regression with intercept; predict."""
    centre, mean = train.mean(axis=0), y.mean(axis=0)
    X = (train - centre).astype(np.float64)
    weights = np.linalg.solve(X.T @ X + np.eye(X.shape[1]), X.T @ (y - mean))
    return ((test - centre) @ weights + mean).astype(np.float32)


def multilayer(
    train: NDArray[np.float32], y: NDArray[np.float32], test: NDArray[np.float32], n_epochs: int = 20
) -> NDArray[np.float32] | None:
    """Train a small network on the scores; None without PyTorch."""
    try:
        import torch
    except ImportError:
        return None
    torch.manual_seed(0)
    layers = [torch.nn.Linear(train.shape[1], 512), torch.nn.Linear(512, 256), torch.nn.Linear(256, y.shape[1])]
    net = torch.nn.Sequential(layers[0], torch.nn.GELU(), layers[1], torch.nn.GELU(), layers[2])
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3, weight_decay=1e-2)
    X, Y = torch.from_numpy(train), torch.from_numpy(y)
    for _ in range(n_epochs):
        for rows in torch.randperm(len(X)).split(256):
            optimizer.zero_grad()
            torch.nn.functional.mse_loss(net(X[rows]), Y[rows]).backward()
            optimizer.step()
    with torch.no_grad():
        return np.asarray(net(torch.from_numpy(test)).numpy())


# --- files, scores, pictures


def n_cells(path: Path) -> int:
    """Return the number of cells of a file."""
    return int(anndata.read_h5ad(path, backed="r").n_obs)


def read_proteins(path: Path) -> tuple[NDArray[np.float32], anndata.AnnData]:
    """Return the proteins, dense, and the whole file: they take some megabytes."""
    data = anndata.read_h5ad(path)
    X = data.layers["normalized"] if data.X is None else data.X
    return np.asarray(X.toarray() if issparse(X) else X, dtype=np.float32), data


def write_synthetic(folder: Path, n_train: int, seed: int) -> None:
    """Write files as the competition's, their numbers from `gpuload.synthetic_cite`."""
    from tqdm import tqdm

    folder.mkdir(parents=True, exist_ok=True)
    n_test = min(1000, max(1, n_train // 4))
    with tqdm(total=n_train + n_test, desc="making cells", unit="cell") as bar:
        parts = paired_cells(n_train, n_test, seed=seed, progress=bar.update)
    for name, cells in zip(("train", "test"), parts, strict=True):
        obs = {"batch": cells.batch, "cell_type": cells.cell_type.astype(str)}
        genes = anndata.AnnData(cells.genes, obs=obs)
        genes.write_h5ad(folder / f"{name}_mod1.h5ad", compression="gzip")
        proteins = anndata.AnnData(cells.proteins, obs=obs, layers={"noise_free": cells.noise_free})
        proteins.write_h5ad(folder / f"{name}_mod2.h5ad", compression="gzip")


def write_prediction(path: Path, predicted: NDArray[np.float32], test: Path, proteins: anndata.AnnData) -> None:
    """Write a prediction as Open Problems wants it."""
    cells = anndata.read_h5ad(test, backed="r")
    uns = {"dataset_id": str(cells.uns.get("dataset_id", test.parent.name)), "method_id": "gpuload_krr"}
    matrix = csc_matrix(predicted)
    anndata.AnnData(matrix, obs=cells.obs[[]].copy(), var=proteins.var[[]].copy(), layers={"normalized": matrix},
                    uns=uns).write_h5ad(path, compression="gzip")  # fmt: skip


def measures(predicted: NDArray[np.float32], wanted: NDArray[np.float32]) -> dict[str, float]:
    """Return the competition's RMSE (one number over cells and proteins), MAE, and mean correlations."""
    return {
        "rmse": float(np.sqrt(np.mean((predicted - wanted) ** 2, dtype=np.float64))),
        "mae": float(np.mean(np.abs(predicted - wanted), dtype=np.float64)),
        "pearson per protein": correlation(predicted, wanted, 0),
        "pearson per cell": correlation(predicted, wanted, 1),
    }


def correlation(a: NDArray[np.float32], b: NDArray[np.float32], axis: int) -> float:
    """Return the mean Pearson correlation along an axis; 0 where either does not vary."""
    a, b = (x - x.mean(axis=axis, keepdims=True) for x in (a.astype(np.float64), b.astype(np.float64)))
    scale = np.sqrt((a**2).sum(axis=axis) * (b**2).sum(axis=axis))
    return float(np.mean(np.where(scale > 1e-9, (a * b).sum(axis=axis) / np.maximum(scale, 1e-9), 0)))


def draw(path: Path, rows: list[tuple[str, dict[str, float]]], predicted: Any, wanted: Any, names: list[str]) -> None:
    """Draw the errors of all methods, and what was predicted of six proteins against what was measured."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    figure = plt.figure(figsize=(12, 6), layout="constrained")
    left, right = figure.subfigures(1, 2, width_ratios=(1, 1.3))
    axes = left.subplots()
    axes.barh([name for name, _ in rows][::-1], [m["rmse"] for _, m in rows][::-1], color="#4878a8")
    axes.set(xlabel="RMSE over cells and proteins", title="Errors on cells of batches never seen")
    shown = np.argsort(-wanted.std(axis=0))[:6]
    for axes, k in zip(right.subplots(2, 3).flat, shown, strict=False):
        axes.scatter(wanted[:, k], predicted[:, k], s=2, alpha=0.4, color="#a85448")
        top = max(wanted[:, k].max(), predicted[:, k].max())
        axes.plot([0, top], [0, top], color="black", linewidth=0.7)
        axes.set_title(names[k], fontsize=9)
    right.supxlabel("measured")
    right.supylabel("predicted")
    figure.savefig(path, dpi=130)


# --- the program


@dataclass
class Clock:
    """Seconds by step."""

    seconds: dict[str, float] = field(default_factory=dict)

    @contextmanager
    def timed(self, step: str) -> Iterator[None]:
        """Say what begins, and how long it took."""
        print(f"{step} ...", file=sys.stderr, flush=True)
        start = time.perf_counter()
        yield
        self.seconds[step] = time.perf_counter() - start
        print(f"{step}: {self.seconds[step]:.1f} s", file=sys.stderr, flush=True)


def run(args: argparse.Namespace) -> int:
    """Make what is to be made, predict, compare, write and draw; return the exit code."""
    if args.make:
        write_synthetic(args.folder, args.make, args.seed)
    paths = {name: args.folder / f"{name}.h5ad" for name in ("train_mod1", "train_mod2", "test_mod1", "test_mod2")}
    for name in ("train_mod1", "train_mod2", "test_mod1"):
        if not paths[name].exists():
            raise gpuload.ReadError(
                f"{paths[name]}: no such file; the folder must hold train_mod1, train_mod2 and test_mod1. --make 4000 "
                "writes synthetic ones."
            )
    engine, clock = ENGINES[args.engine](args), Clock()
    proteins, about = read_proteins(paths["train_mod2"])
    if "batch" not in about.obs:
        raise gpuload.StoreError(f"{paths['train_mod2']}: obs has no column 'batch', of which the recipe makes halves.")
    batch = about.obs["batch"].to_numpy().astype(str)
    with clock.timed("SVD of the genes, read from disk"):
        train, test = scores_of_genes(engine, paths["train_mod1"], paths["test_mod1"])
    with clock.timed("kernel ridge regression, ten models"):
        predicted = predict_proteins(engine, train, proteins, batch, test)
    seconds = sum(clock.seconds.values())
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    write_prediction(args.folder / "prediction.h5ad", predicted, paths["test_mod1"], about)
    result: dict[str, Any] = {
        "engine": engine.name,
        "cells": [len(train), len(test)],
        "seconds": {**clock.seconds, "whole": seconds},
        "peak_mib": peak,
        "settings": {k: v for k, v in vars(args).items() if k != "folder"},
    }
    print(f"{engine.name}: {seconds:.1f} s in all, {peak:,.0f} MiB at most, {len(train):,} + {len(test):,} cells")
    if paths["test_mod2"].exists():
        wanted, truth = read_proteins(paths["test_mod2"])
        rows = [(f"KRR, {engine.name}", measures(predicted, wanted))]
        if not args.no_baselines:
            rows += [(name, measures(np.asarray(p), wanted)) for name, p in baselines(train, proteins, test)]
        if "noise_free" in truth.layers:
            rows.append(("the noise-free map", measures(np.asarray(truth.layers["noise_free"]), wanted)))
        result["methods"] = dict(rows)
        for name, found in rows:
            print(f"{name:32s}" + "  ".join(f"{what} {value:.4f}" for what, value in found.items()))
        draw(args.folder / "modality.png", rows, predicted, wanted, list(map(str, truth.var_names)))
    (args.folder / "modality.json").write_text(json.dumps(result, indent=1, default=str) + "\n")
    return 0


def parser() -> argparse.ArgumentParser:
    """Return the command line."""
    found = argparse.ArgumentParser(
        description=__doc__.splitlines()[0], epilog=EPILOG, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = found.add_argument
    add("folder", type=Path, help="where the files are, and where prediction.h5ad, modality.json and .png go")
    add("--engine", choices=ENGINES, default="ours", help="what does the arithmetic (default: %(default)s)")
    add("--make", type=int, metavar="CELLS", help="first write synthetic files with so many training cells")
    add("--solver", choices=("auto", "exact", "nystrom"), default="auto",
        help="of ours: by landmarks (auto, above --landmarks cells) or exact")  # fmt: skip
    add("--landmarks", type=int, default=4000, help="landmarks of the regression (default: %(default)s)")
    add("--device", default="cpu", help="cpu or cuda:0 (default: %(default)s)")
    add("--seed", type=int, default=0)
    add("--no-baselines", action="store_true", help="only the recipe itself")
    return found


def main(arguments: list[str] | None = None) -> int:
    """Run the program; return the exit code."""
    try:
        return run(parser().parse_args(arguments))
    except (gpuload.GpuloadError, OSError) as error:
        print(f"modality.py: {error}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
