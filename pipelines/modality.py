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

One word selects the engine: `ours` (gpuload's estimators, fed minibatch by minibatch from disk: the matrix is never
in memory), `sklearn` (on the whole matrix in memory) or `cuml` (the same on a GPU). The recipe itself is `ProteinModel`
in modality_model.py, for use from Python too: fit, predict, score, save, load.
"""

from __future__ import annotations

import argparse
import json
import resource
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

try:
    import numpy as np
    import pandas as pd
    from modality_data import GENES, PROTEINS, Cells, Table, read_cells, settings_of_new, write_prediction
    from modality_engines import ENGINES
    from modality_examples import write_real, write_synthetic
    from modality_model import ProteinModel
    from modality_report import Row, baselines, draw_methods, draw_proteins, measures_of

    import gpuload
    from gpuload.program import check_one_process, exit_code
except ImportError as missing:
    sys.exit(f"modality.py: {missing}. From the checkout, pip install '.[modality]' installs what this program needs.")

if TYPE_CHECKING:
    from numpy.typing import NDArray

EPILOG = """\
exit codes: 0 done, 1 a problem with the data or the machine, 2 wrong use, 130 interrupted

On a GPU, kernels are compiled and libraries loaded before the clock starts; that time is reported separately.

examples:
  python pipelines/modality.py demo --make 4000            (a small synthetic set, written to demo/)
  python pipelines/modality.py real --real                 (400 real blood cells, downloaded to real/)
  python pipelines/modality.py competition --make 66175    (the competition's exact shape; takes minutes to make)
  python pipelines/modality.py FOLDER --engine sklearn
  python pipelines/modality.py cite.h5mu --counts --batch donor --test donor8 --save model.npz
  python pipelines/modality.py new_cells.h5ad --model model.npz   (counts, if the model was fitted with --counts)
"""


def run(args: argparse.Namespace) -> None:
    """Make example files if requested, predict, compare, write and draw."""
    check_one_process("start one, since several would write the same files")
    first = args.paths[0]
    out = args.out or (first.parent if first.suffix in (".h5ad", ".h5mu", ".zarr") else first)
    for path in args.paths:
        if path.resolve() in ((out / name).resolve() for name in ("prediction.h5ad", "prediction.h5mu")):
            raise gpuload.PlanError(f"--out {out}: the prediction would replace {path}; name another folder.")
    if args.model:
        return predict_new(args, out)
    model = ProteinModel(
        args.engine, solver=args.solver, n_landmarks=args.landmarks, device=args.device, random_state=args.seed
    )
    if args.save and not args.save.absolute().parent.is_dir():
        raise gpuload.PlanError(f"--save {args.save}: there is no folder {args.save.parent}; make it first.")
    if args.make:
        write_synthetic(first, args.make, args.seed)
    if args.real:
        write_real(first)
    cells = read_cells(
        args.paths, batch=args.batch, test=args.test, modalities=args.modalities, layer=args.layer,
        is_counts=args.counts,
    )  # fmt: skip
    out.mkdir(parents=True, exist_ok=True)  # what is not possible is said before what takes long
    if np.unique(cells.batch).size < 2:
        print("the cells to learn from are of one batch: one model, not two for each shuffling", file=sys.stderr)
    if model.engine.device != "cpu":
        start = time.perf_counter()
        model.engine.warm_up()
        print(f"compiled and loaded, in no other figure: {time.perf_counter() - start:.1f} s", file=sys.stderr)
    start = time.perf_counter()
    model.fit(dict(cells.genes), cells.proteins, cells.batch, cells.rows)
    model.is_counts_, model.protein_names_ = args.counts, cells.protein_names
    predicted = model.predict_scores(model.scores_[cells.test])
    seconds = time.perf_counter() - start
    for step, taken in model.seconds_.items():
        print(f"{step}: {taken:.1f} s", file=sys.stderr)
    host_peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    device_peak = device_peak_mib(model.engine.params["device"]) if args.engine == "ours" else None
    if args.save:
        model.save(args.save)
    for path in write_prediction(out, predicted, cells):
        print(f"written: {path}", file=sys.stderr)
    peaks = f"{host_peak:,.0f} MiB of host memory"
    if device_peak is not None:
        peaks += f" and, by PyTorch, {device_peak:,.0f} MiB of device memory"
    print(f"{args.engine}, {model.engine.device}: {seconds:.1f} s in all, {peaks} at most, "
          f"{len(cells.rows):,} + {len(cells.test):,} cells")  # fmt: skip
    result: dict[str, Any] = {
        "engine": args.engine,
        "device": model.engine.device,
        "card": card(model.engine.device),
        "gpuload": gpuload.__version__,
        "cells": [len(cells.rows), len(cells.test)],
        "seconds": {**model.seconds_, "whole": seconds},
        "host_peak_mib": host_peak,
        "device_peak_mib": device_peak,
        "settings": vars(args),
    }
    measured = np.isfinite(cells.wanted).all(axis=1)
    if measured.any():
        rows = compare(model, cells, predicted, measured, seconds, has_baselines=not args.no_baselines)
        result["methods"] = {row.name: {"seconds": row.seconds, "device": row.device, **row.measures} for row in rows}
        title = f"measured here: {len(cells.rows):,} + {measured.sum():,} cells, scores on {model.engine.device}"
        draw_methods(out / "modality.png", rows, title)
        names = [str(name) for name in cells.protein_names]
        draw_proteins(out / "proteins.png", predicted[measured], cells.wanted[measured], names)
    (out / "modality.json").write_text(json.dumps(result, indent=1, default=str) + "\n")
    return None


def device_peak_mib(device: str) -> float | None:
    """Return the peak device memory of PyTorch, which runs our arithmetic; None on the CPU."""
    if device == "cpu":
        return None
    import torch

    return torch.cuda.max_memory_allocated(device) / 2**20


def card(device: str) -> str | None:
    """Return the name of a GPU; None on the CPU, and if PyTorch, which cuML does not need, sees none."""
    if device == "cpu":
        return None
    import torch

    try:
        return torch.cuda.get_device_name(device)
    except (AssertionError, RuntimeError):
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
    """Return each method's results on the cells with known proteins, and print them with the device used."""
    wanted = cells.wanted[measured]
    engine = model.engine
    rows = [Row(f"KRR, {engine.name}", seconds, measures_of(predicted[measured], wanted), engine.device)]
    if has_baselines:
        train, test = model.scores_[cells.rows], model.scores_[cells.test[measured]]
        to_scores = next(iter(model.seconds_.values()))
        for name, device, taken, found in baselines(train, cells.proteins, test, engine.params["device"]):
            rows.append(Row(name, to_scores + taken if taken else None, measures_of(np.asarray(found), wanted), device))
    if cells.noise_free is not None:
        rows.append(Row("the noise-free map", None, measures_of(cells.noise_free[measured], wanted)))
    for row in rows:
        print(
            f"{row.name:32s}{row.device:8s}" + "  ".join(f"{what} {value:.4f}" for what, value in row.measures.items())
        )
    return rows


def predict_new(args: argparse.Namespace, out: Path) -> None:
    """Predict the proteins of cells with a saved model."""
    if len(args.paths) != 1:
        raise gpuload.PlanError(f"--model: expected one file of cells, not {len(args.paths)}.")
    model = ProteinModel.load(args.model, engine="ours", device=args.device)
    if args.counts and model.is_counts_ is False:
        raise gpuload.PlanError(
            f"--counts: {args.model} was fitted without it, to values that were normalised already; give such values "
            "and leave --counts out, or fit and save the model again with --counts."
        )
    is_counts = args.counts if model.is_counts_ is None else model.is_counts_
    path = args.paths[0]
    genes = Table(path, f"mod/{args.modalities[0]}" if path.suffix == ".h5mu" else "", args.layer)
    out.mkdir(parents=True, exist_ok=True)
    predicted = model.predict(settings_of_new(genes, is_counts=is_counts))
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
    add(
        "paths",
        nargs="+",
        type=Path,
        metavar="PATH",
        help="a folder, an .h5mu file, or one or two AnnData files or stores",
    )
    add(
        "--out",
        type=Path,
        metavar="DIR",
        help="folder for prediction.h5ad, modality.json and plots (default: the input's)",
    )
    add("--engine", choices=ENGINES, default="ours", help="implementation to compute with (default: %(default)s)")
    add("--make", type=int, metavar="CELLS", help="first write synthetic files with this many training cells")
    add("--real", action="store_true", help="first download and write 400 real cells")
    add("--batch", metavar="COLUMN", help="obs column of batches (default: batch, if there is one)")
    add(
        "--test",
        nargs="+",
        default=[],
        metavar="BATCH",
        help="batches to hold out (default: predict the cells without proteins)",
    )
    add("--modalities", nargs=2, default=[GENES, PROTEINS], metavar=("GENES", "PROTEINS"),
        help="modalities of a MuData (default: rna prot)")  # fmt: skip
    add("--layer", help="layer of genes and proteins (default: X, or normalized if there is no X)")
    add("--counts", action="store_true",
        help="treat values as counts: normalise genes, take log ratios of proteins; saved with the model")  # fmt: skip
    add("--solver", choices=("auto", "exact", "nystrom"), default="auto",
        help="nystrom uses landmarks; auto does above --landmarks cells (default: auto)")  # fmt: skip
    add("--landmarks", type=int, default=4000, help="landmarks for the regression (default: %(default)s)")
    add("--device", default="cpu",
        help="device of ours and the baseline network: cpu, cuda:0 or auto (default: %(default)s)")  # fmt: skip
    add("--seed", type=int, default=0, help="random seed (default: %(default)s)")
    add("--no-baselines", action="store_true", help="run only the recipe itself")
    add("--save", type=Path, metavar="FILE", help="save the model to this file")
    add("--model", type=Path, metavar="FILE", help="predict with a saved model, without fitting")
    return found


def main(arguments: list[str] | None = None) -> int:
    """Run the program; return the exit code."""
    args = parser().parse_args(arguments)
    return exit_code("modality.py", lambda: run(args), sentence_of=said_of_memory)


def said_of_memory(error: Exception) -> str | None:
    """Return a sentence if host or GPU memory ran out; PyTorch has its own error for the latter."""
    torch = sys.modules.get("torch")
    if not (isinstance(error, MemoryError) or (torch is not None and isinstance(error, torch.OutOfMemoryError))):
        return None
    said = str(error).partition("\n")[0] or type(error).__name__
    cure = "use --engine ours, --solver nystrom with fewer --landmarks, or --device cpu"
    return f"memory is full; {cure} ({said})"


if __name__ == "__main__":
    sys.exit(main())
