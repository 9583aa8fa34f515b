"""The table and the figure of pipelines/classify.py: each order's results beside the paper's."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np
from matplotlib.figure import Figure

from gpuload.program import table

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

ORDERS = {
    "streaming": "streaming",
    "buffer": "streaming + buffer",
    "block": "block shuffling",
    "balanced": "class-balanced",
    "random": "true random",
}
"""Display names, by option."""

COLORS = dict(zip(ORDERS, ("#c44e52", "#dd8452", "#4c72b0", "#55a868", "#8c8c8c"), strict=True))

PAPER = {
    "streaming": ((0.93498, 0.00232, 0.20371, 0.05484), 2_871),
    "buffer": ((0.93499, 0.00207, 0.19422, 0.05421), 2_852),
    "block": ((0.93730, 0.03038, 0.26981, 0.10287), 3_237),
    "random": ((0.93747, 0.02991, 0.26799, 0.10297), 1_367),
}
"""Macro-F1 of cell line, drug, broad and fine mechanism on Tahoe-100M's plate 14, means of two runs; and cells/s.

From the CSV files of scDataset's repository (training_experiments/): linear heads on raw counts of 62,710 genes, 94
million cells once, Adam at 1e-5, minibatches of 64, blocks of 16, 256 minibatches per fetch. The speeds are of a run
at 1e-3, training and loading included. For class-balanced order none are published.
"""

PAPER_TITLE = "paper: linear, Tahoe-100M"


def summary(results: Sequence[Mapping[str, Any]], loaders: Mapping[str, float], n_train: int) -> list[dict[str, Any]]:
    """Return a row for each model and order: means over the seeds, and the standard deviations of the scores.

    `loaders` has cells per second of an order's loader alone, and may lack some.
    """
    rows = []
    for model, order in dict.fromkeys((r["model"], r["order"]) for r in results):
        found = [r for r in results if (r["model"], r["order"]) == (model, order)]
        scores = {label: [r["macro_f1"][label] for r in found] for label in found[0]["macro_f1"]}
        bits = {name: [r["entropy_bits"][name] for r in found] for name in found[0]["entropy_bits"]}
        rate = float(np.mean([r["cells_per_s"] for r in found]))
        row = {"model": model, "order": order, "n_seeds": len(found)}
        row["macro_f1"] = {label: float(np.mean(values)) for label, values in scores.items()}
        row["macro_f1_sd"] = {label: float(np.std(v, ddof=1)) for label, v in scores.items() if len(v) > 1}
        row["entropy_bits"] = {name: float(np.mean(values)) for name, values in bits.items()}
        row |= {"cells_per_s": rate, "epoch_s": n_train / rate}
        if order in loaders:
            row |= {"loader_cells_per_s": loaders[order], "loader_epoch_s": n_train / loaders[order]}
        rows.append(row)
    return rows


def table_of(rows: Sequence[Mapping[str, Any]], labels: Sequence[str], mixes: Sequence[str]) -> str:
    """Return what `summary` did as text, with the entropy of some columns, followed by the paper's findings."""
    header = ["model, order", *labels, *(f"{name}, bits" for name in mixes), "training, cells/s", "loader, cells/s"]
    lines = []
    for row in rows:
        scores = [_with_spread(row["macro_f1"][label], row["macro_f1_sd"].get(label)) for label in labels]
        entropy = [f"{row['entropy_bits'].get(name, math.nan):.2f}" for name in mixes]
        speeds = [f"{row[name]:,.0f}" if name in row else "" for name in ("cells_per_s", "loader_cells_per_s")]
        lines.append([f"{row['model']}, {ORDERS[row['order']]}", *scores, *entropy, *speeds])
    for row in _of_paper(labels):
        scores = [f"{row['macro_f1'][label]:.3f}" for label in labels]
        lines.append(
            [f"paper: linear, {ORDERS[row['order']]}", *scores, *[""] * len(mixes), f"{row['cells_per_s']:,}", ""]
        )
    return table(header, lines)


def draw(
    path: Path, rows: Sequence[Mapping[str, Any]], results: Sequence[Mapping[str, Any]], labels: Sequence[str]
) -> None:
    """Draw the scores and the loss curves of each model, and above them the paper's scores, as PNG."""
    shown = [*_of_paper(labels), *rows]
    models = list(dict.fromkeys(row["model"] for row in shown))
    figure = Figure(figsize=(3.0 * len(labels) + 5, 3.2 * len(models)), layout="constrained")
    grid = figure.subplots(len(models), len(labels) + 1, squeeze=False, width_ratios=[1] * len(labels) + [1.8])
    for model, axes in zip(models, grid, strict=True):
        for label, axis in zip(labels, axes, strict=False):
            _draw_scores(axis, [row for row in shown if row["model"] == model], label)
            axis.set_title(f"{model}: {label}", loc="left", fontsize=9)
        if model == PAPER_TITLE:
            axes[-1].axis("off")
        else:
            _draw_losses(axes[-1], [r for r in results if r["model"] == model])
            axes[-1].set_title(f"{model}: loss of the minibatches, summed over labels", loc="left", fontsize=9)
    axes[0].set_ylabel("macro-F1")
    figure.savefig(path, dpi=130)


def _draw_scores(axis: Any, rows: Sequence[Mapping[str, Any]], label: str) -> None:
    values = [row["macro_f1"][label] for row in rows]
    spread = [row["macro_f1_sd"].get(label, 0) for row in rows]
    axis.bar(
        [ORDERS[r["order"]] for r in rows], values, yerr=spread, color=[COLORS[r["order"]] for r in rows], capsize=3
    )
    axis.tick_params(axis="x", labelrotation=35, labelsize=7)


def _draw_losses(axis: Any, results: Sequence[Mapping[str, Any]]) -> None:
    for result in results:
        steps, losses = zip(*result["loss"], strict=True)
        name = ORDERS[result["order"]] if result["seed"] == 0 else None
        axis.plot(steps, losses, color=COLORS[result["order"]], linewidth=0.8, label=name)
    axis.set(xlabel="minibatches", yscale="log")
    axis.legend(frameon=False, fontsize=7)


def _of_paper(labels: Sequence[str]) -> list[dict[str, Any]]:
    """Return the paper's figures as rows of a summary, if the same number of labels is learned."""
    return [
        {
            "model": PAPER_TITLE,
            "order": order,
            "macro_f1": dict(zip(labels, scores, strict=True)),
            "macro_f1_sd": {},
            "cells_per_s": rate,
        }
        for order, (scores, rate) in PAPER.items()
        if len(labels) == len(scores)
    ]


def _with_spread(mean: float, sd: float | None) -> str:
    return f"{mean:.3f}" if sd is None else f"{mean:.3f} ± {sd:.3f}"
