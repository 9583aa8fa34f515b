"""``gpuload demo``: from .h5ad files through the loader and DALI into PyTorch, in three orders."""

from __future__ import annotations

import importlib
import json
import tempfile
from contextlib import closing
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

import gpuload
from gpuload.cli import text
from gpuload.diversity import iid_entropy, label_shares
from gpuload.errors import MissingDependencyError, PlanError, ReadError
from gpuload.formats import open_store
from gpuload.machine import usable_cores
from gpuload.program import positive, table, whole_number
from gpuload.source import replacing, saving

if TYPE_CHECKING:
    import argparse
    from collections.abc import Mapping

    import pandas as pd
    from numpy.typing import NDArray
    from scipy.sparse import csr_matrix

    from gpuload.cli.training import Task, Training

EPILOG = """\
Two data sets, each sorted on disk, as real files are:
  real       700 human blood cells with cell types, from scanpy's wheel, which pip downloads (2 MB); skipped without a
             network
  synthetic  cells shaped like the Tahoe-100M atlas: 62,710 genes, about 1,500 stored values per cell, sorted by plate,
             cell line and drug; written by anndata with gzip, and read as they are

Three orders, each feeding a linear PyTorch classifier through gpuload and DALI:
  streaming        file order: the fastest, but a minibatch holds one plate and one or two cell lines
  block shuffling  random blocks of neighbouring cells, mixed within a fetch of at most 5 % of the file
  true random      every cell on its own: the reference, and slow

Every order trains the same model on the same number of minibatches: one epoch of the synthetic cells and four of the
few real ones, or fewer if the slowest order cannot finish within --seconds. What differs is the time taken, how well
the minibatches are mixed, and the accuracy on held-out cells, which are in separate files. Results are written to
demo.png and demo.json. The demo runs on the CPU even if there is a GPU; to use one, see pipelines/train_dali.py.

examples:
  gpuload demo
  gpuload demo --cells 200000 --seconds 60
  gpuload demo --no-real --json
"""

ORDERS: dict[str, dict[str, Any]] = {
    "streaming": {"shuffle": False},
    "block shuffling": {},
    "true random": {"block_size": 1},
}

ON_THE_CPU: dict[str, Any] = {"device": "cpu"}
"""The demo compares orders; so small a model, trained for seconds, gains nothing from a GPU."""

RUN_ORDER = ("true random", "block shuffling", "streaming")
"""The slowest first: the others train on as many minibatches as it manages."""

MAX_FETCH_SHARE = 0.05
"""Largest fraction of the file in a fetch; larger ones would make all orders mix alike."""

N_GENES = 6_000
"""Genes the synthetic classifier sees: with all 62,710 the model's arithmetic would dominate, not the loading."""

MIN_CELLS = 2_000

LOADER_SHARE = 0.4
"""Time limit for measuring an order's loader alone, as a fraction of that for training."""

PACKAGES = {"torch": "torch", "nvidia-dali-cuda130": "nvidia.dali", "matplotlib": "matplotlib"}
"""Packages that the demo needs besides gpuload, and the module that tells whether each is installed."""

REAL, SYNTHETIC = "pbmc.h5ad", "tahoe_shaped.h5ad"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add this command's options."""
    parser.epilog = EPILOG
    parser.add_argument(
        "--cells",
        type=whole_number,
        default=50_000,
        metavar="N",
        help="cells in the synthetic file (default: 50000)",
    )
    parser.add_argument(
        "--seconds",
        type=positive,
        default=15.0,
        metavar="S",
        help="training time limit per order, in seconds (default: 15)",
    )
    parser.add_argument(
        "--data",
        type=Path,
        default=Path("demo-data"),
        metavar="DIR",
        help="folder to keep the data files in for reuse (default: demo-data)",
    )
    parser.add_argument(
        "--out", type=Path, metavar="DIR", help="folder for demo.png and demo.json (default: the data folder)"
    )
    parser.add_argument("--no-real", action="store_true", help="skip the real cells; no network is used")
    parser.add_argument("--fresh", action="store_true", help="regenerate the data files")
    text.add_output_arguments(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Run the command."""
    _check_packages()
    from gpuload.cli import figure, training

    if args.cells < MIN_CELLS:
        raise PlanError(
            f"--cells {args.cells}: expected at least {MIN_CELLS}, or 5 % of the file would not fill a fetch."
        )
    out = args.out or args.data
    for folder in (args.data, out):
        _make_folder(folder)
    tasks = [_synthetic(args)]
    if not args.no_real and (real := _real(args)) is not None:
        tasks.insert(0, real)
    with training.one_thread():
        results = [_compare(task, args) for task in tasks]
    report = {"version": gpuload.__version__, "cores": usable_cores(), "data_sets": results}
    if args.json:
        text.print_json({**report, "data_sets": [_without_curves(r) for r in results]})
    else:
        print("\n\n".join(map(_report, results)))
    with saving(out / "demo.json") as file:
        file.write(f"{json.dumps(text.plain(report), indent=1)}\n".encode())
    with saving(out / "demo.png") as file:
        file.write(figure.draw(results))
    if not args.json:
        text.print_saved(out / "demo.png", out / "demo.json")
    return 0


def _check_packages() -> None:
    """Refuse to begin if a package is missing, even one that only the last step needs."""
    for package, module in PACKAGES.items():
        try:
            importlib.import_module(module)
        except ImportError as error:
            raise MissingDependencyError(package, "the demo", "demo") from error


def _make_folder(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()
    except OSError as error:
        raise ReadError(
            f"{folder}: this folder cannot be created or written to: {error.strerror}. Choose another with --data and "
            "--out."
        ) from error


def _real(args: argparse.Namespace) -> Task | None:
    """Return the real cells, or None, with a message, if they cannot be obtained."""
    from gpuload.cli import real_data
    from gpuload.cli.training import Task

    train, held_out = args.data / REAL, args.data / f"held_out_{REAL}"
    if args.fresh or not (train.exists() and held_out.exists()):
        text.say(f"downloading real cells ({real_data.PACKAGE}, 2 MB) with pip", is_quiet=args.quiet)
        try:
            cells = real_data.read(real_data.fetch(args.data))
        except real_data.DownloadError as error:
            text.say(str(error), is_quiet=False)
            return None
        _write_split(train, held_out, cells, share=0.2)
    settings = {**ON_THE_CPU, "batch_size": 8, "block_size": 2, "fetch_factor": 3}
    title = "Real: human blood cells (10x PBMC), sorted by cell type"
    return Task(title, train, held_out, real_data.LABEL, real_data.LABEL, 4, settings)


def _synthetic(args: argparse.Namespace) -> Task:
    """Return the synthetic cells, made if they do not exist in this size."""
    from gpuload.cli.training import Task, most_expressed
    from gpuload.synthetic import tahoe_shaped

    train, held_out = args.data / SYNTHETIC, args.data / f"held_out_{SYNTHETIC}"
    n_held_out = int(_is_held_out(args.cells, 0.1).sum())
    if args.fresh or _n_cells(held_out) != n_held_out or _n_cells(train) != args.cells - n_held_out:
        with text.Progress(args.cells, f"making {args.cells:,} cells", is_quiet=args.quiet) as progress:
            cells = tahoe_shaped(args.cells, progress=progress.reach)
        text.say(f"writing {args.cells:,} cells to {train}, with gzip through anndata", is_quiet=args.quiet)
        _write_split(train, held_out, cells, share=0.1)
    fetch_factor = max(1, int(MAX_FETCH_SHARE * (args.cells - n_held_out)) // 64)
    settings = {**ON_THE_CPU, "batch_size": 64, "block_size": 16, "fetch_factor": fetch_factor}
    text.say_of_compiling(is_quiet=args.quiet)
    settings["genes"] = most_expressed(train, N_GENES, **settings)
    settings["transform"] = gpuload.Transform(target_sum=1e4, log1p=True)
    title = "Synthetic: shaped like Tahoe-100M, sorted by plate, cell line and drug"
    return Task(title, train, held_out, "cell_line", "plate", 1, settings)


def _is_held_out(n_cells: int, share: float) -> NDArray[np.bool_]:
    """Return which cells are held out from training: the same ones each time."""
    return np.random.default_rng(0).random(n_cells) < share


def _write_split(
    train: Path, held_out: Path, cells: tuple[csr_matrix, pd.DataFrame, pd.DataFrame], share: float
) -> None:
    """Write cells as two files, so that no model can see a held-out cell; each is renamed only when complete."""
    from gpuload.formats.obs import write_h5ad

    X, obs, var = cells
    is_held_out = _is_held_out(X.shape[0], share)
    for path, mask in ((train, ~is_held_out), (held_out, is_held_out)):
        with replacing(path) as beside:
            write_h5ad(beside, X[mask], obs[mask], var, "gzip")


def _n_cells(path: Path) -> int:
    """Return the number of cells in a file; 0 if it does not exist or cannot be read."""
    try:
        with closing(open_store(path, layer="X", obs=())) as store:
            return store.n_obs
    except gpuload.GpuloadError:
        return 0


def _labels(task: Task) -> tuple[int, float]:
    """Return the number of classes to learn, and the expected entropy of `Task.mix` in true random order, in bits."""
    with closing(open_store(task.train, layer="X", obs=task.obs)) as store:
        label, mix = store.obs[task.label], store.obs[task.mix]
    n_classes = 0 if label.categories is None else label.categories.size
    return n_classes, iid_entropy(label_shares(mix.values), task.settings["batch_size"])


def _compare(task: Task, args: argparse.Namespace) -> dict[str, Any]:
    """Train in every order and return the results for a data set."""
    from gpuload.cli.training import evaluate

    rates, trained = _train(task, args)
    scores = evaluate(task, [trained[name].model for name in ORDERS])
    n_classes, random_bits = _labels(task)
    n_train, n_held_out = _n_cells(task.train), _n_cells(task.held_out)
    n_fetched = task.settings["batch_size"] * task.settings["fetch_factor"]
    return {
        "title": f"{task.title} - {n_train + n_held_out:,} cells",
        "files": [str(task.train), str(task.held_out)],
        "n_train": n_train,
        "n_held_out": n_held_out,
        "label": task.label,
        "n_classes": n_classes,
        "mix": task.mix,
        "settings": _plain_settings(task.settings),
        "fetch_share": n_fetched / n_train,
        "blocks_in_fetch": n_fetched // task.settings["block_size"],
        "n_batches": trained[RUN_ORDER[0]].n_batches,
        "true_random_entropy_bits": random_bits,
        "orders": [
            _order_result(name, trained[name], rates[name], f1) for name, f1 in zip(ORDERS, scores, strict=True)
        ],
    }


def _train(task: Task, args: argparse.Namespace) -> tuple[dict[str, float], dict[str, Training]]:
    """Return, by order, cells per second of the loader alone, and the results of training."""
    from gpuload.cli import training

    rates: dict[str, float] = {}
    trained: dict[str, Training] = {}
    n_batches = None
    for name in RUN_ORDER:
        with text.Progress(100, f"{task.train.stem}: {name}", is_quiet=args.quiet) as progress:
            rates[name] = training.loader_rate(task, ORDERS[name], LOADER_SHARE * args.seconds)
            trained[name] = training.train(
                task, ORDERS[name], n_batches=n_batches, max_seconds=args.seconds, on_progress=progress.reach
            )
        n_batches = trained[name].n_batches
    return rates, trained


def _plain_settings(settings: Mapping[str, Any]) -> dict[str, Any]:
    plain = dict(settings)
    if plain.get("genes") is not None:
        plain["genes"] = f"the {int(plain['genes'].sum())} that most cells express"
    if plain.get("transform") is not None:
        plain["transform"] = asdict(plain["transform"])
    return plain


def _order_result(name: str, result: Training, loader_cells_per_s: float, f1: float) -> dict[str, Any]:
    return {
        "order": name,
        "loader_cells_per_s": loader_cells_per_s,
        "training_cells_per_s": result.n_cells / result.seconds,
        "training_seconds": result.seconds,
        "entropy_bits": result.entropy.mean,
        "entropy_sd": result.entropy.sd,
        "macro_f1": f1,
        "loss": result.loss,
        "held_out_loss": result.held_out_loss,
    }


def _without_curves(result: dict[str, Any]) -> dict[str, Any]:
    orders = [{k: v for k, v in order.items() if k not in ("loss", "held_out_loss")} for order in result["orders"]]
    return {**result, "orders": orders}


def _report(result: dict[str, Any]) -> str:
    settings = result["settings"]
    epochs = result["n_batches"] * settings["batch_size"] / result["n_train"]
    batch_size, block_size, fetch_factor = (settings[key] for key in ("batch_size", "block_size", "fetch_factor"))
    sizes = f"batch {batch_size}, blocks of {block_size}, {fetch_factor} batches resident"
    intro = [
        result["title"],
        f"  {result['n_train']:,} to train on, {result['n_held_out']:,} held out",
        f"  to learn: {result['label']}, {result['n_classes']} classes",
        f"  {sizes}: {text.share(result['fetch_share'])} of the file",
        f"  every order: the same {result['n_batches']:,} minibatches of training (epochs: {epochs:.2g})",
    ]
    if result["blocks_in_fetch"] < result["n_classes"]:
        intro.append(
            f"  the scores are unreliable: a fetch's {result['blocks_in_fetch']} blocks cannot hold all "
            f"{result['n_classes']} classes, so the model follows the last fetch; use more --cells"
        )
    if "genes" in settings:
        intro.append(f"  genes delivered: {settings['genes']}")
    header = ("order", "loader, cells/s", "training, cells/s", "training, s", f"{result['mix']} entropy", "macro-F1")
    rows = [
        (
            order["order"],
            text.number(round(order["loader_cells_per_s"])),
            text.number(round(order["training_cells_per_s"])),
            f"{order['training_seconds']:.1f}",
            f"{order['entropy_bits']:.2f} bits",
            f"{order['macro_f1']:.3f}",
        )
        for order in result["orders"]
    ]
    expectation = f"  exact expectation of true random order: {result['true_random_entropy_bits']:.2f} bits"
    return "\n".join([*intro, "", table(header, rows), "", expectation])
