"""Pictures. The demo's: speed, diversity, quality and losses of each order; inspect's: diversity against speed.

Home of matplotlib.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from gpuload.errors import MissingDependencyError, ReadError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from gpuload.cli.advice import Advice

COLORS = {"streaming": "#c44e52", "block shuffling": "#4c72b0", "true random": "#8c8c8c"}
"""Streaming warns, block shuffling stands out, true random order is the yardstick."""

_INK, _FAINT = "#333333", "#d9d9d9"


def draw(path: Path, data_sets: Sequence[Mapping[str, Any]]) -> None:
    """Draw the results of all data sets, a row each, and save them as PNG.

    Parameters
    ----------
    path
        Where to.
    data_sets
        As `gpuload.cli.demo` makes them.

    Raises
    ------
    MissingDependencyError
        matplotlib is not installed.
    """
    figure = _figure(15.5, 0.9 + 3.7 * len(data_sets), "The demo's picture")
    rows = figure.subfigures(len(data_sets), 1, squeeze=False, hspace=0.06)[:, 0]
    for place, data_set in zip(rows, data_sets, strict=True):
        place.suptitle(data_set["title"], x=0.012, ha="left", fontsize=12.5, fontweight="bold", color=_INK)
        axes = place.subplots(1, 4, width_ratios=(1, 1, 1, 2.1))
        _draw_speed(axes[0], data_set)
        _draw_entropy(axes[1], data_set)
        _draw_f1(axes[2], data_set)
        _draw_losses(axes[3], data_set)
    figure.savefig(path, dpi=130)


def draw_choices(path: Path, advised: Advice, label: str) -> None:
    """Draw the expected entropy of minibatches against cells/s of every candidate, a line per fetch factor, as PNG.

    Parameters
    ----------
    path
        Where to.
    advised
        What was found, with a label.
    label
        Its name.

    Raises
    ------
    MissingDependencyError
        matplotlib is not installed.
    ReadError
        The file cannot be written.
    """
    figure = _figure(8.6, 5.6, "The plot")
    axis = figure.subplots()
    factors = sorted({c.fetch_factor for c in advised.candidates}, reverse=True)
    for factor, color in zip(factors, ("#4c72b0", "#55a868", "#c44e52"), strict=False):
        line = [c for c in advised.candidates if c.fetch_factor == factor]
        name = f"fetch_factor {factor}: {advised.batch_size * factor:,} cells"
        for marker, kind in (("o-", int), ("s", str)):
            points = [(c.cells_per_s, c.entropy_bits) for c in line if isinstance(c.block_size, kind)]
            label_of = name if kind is int else None
            axis.plot(
                *zip(*points, strict=True), marker, color=color, markersize=5, linewidth=1.2, label=label_of, zorder=3
            )
        for choice in line:
            point = (choice.cells_per_s, choice.entropy_bits)
            axis.annotate(str(choice.block_size), point, (4, 4), textcoords="offset points", fontsize=7.5, color=color)
            if (choice.block_size, choice.fetch_factor) == (advised.block_size, advised.fetch_factor):
                axis.plot(*point, marker="o", markersize=14, fillstyle="none", color=_INK, zorder=4)
    random = advised.random_entropy_bits
    axis.axhline(random, color=_INK, linewidth=1, linestyle=(0, (4, 3)), zorder=2, label="true random order")
    least = (1 - advised.max_loss) * random
    axis.axhline(least, color=_FAINT, linewidth=1, zorder=1, label=f"{100 * advised.max_loss:g} % less")
    axis.set_xlim(0)
    axis.legend(frameon=False, fontsize=8.5, loc="best")
    axis.set_xlabel("cells/s by the cost model, once every checksum was verified", fontsize=9, color=_INK)
    _dress(
        axis, f"{label} in minibatches of {advised.batch_size}", "expected entropy, bits; beside each point block_size"
    )
    try:
        figure.savefig(path, dpi=130)
    except OSError as error:
        raise ReadError(f"{path}: cannot be written: {error.strerror}. Choose another place.") from error


def _figure(width: float, height: float, feature: str) -> Any:
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise MissingDependencyError("matplotlib", feature, "demo") from error

    figure = Figure(figsize=(width, height), layout="constrained", facecolor="white")
    FigureCanvasAgg(figure)
    return figure


def _draw_speed(axis: Any, data_set: Mapping[str, Any]) -> None:
    orders = data_set["orders"]
    values = [o["loader_cells_per_s"] for o in orders]
    _bars(axis, orders, values, values, "{:,.0f}")
    _dress(axis, "Speed", "cells/s from disk through DALI into PyTorch")


def _draw_entropy(axis: Any, data_set: Mapping[str, Any]) -> None:
    orders, random = data_set["orders"], data_set["true_random_entropy_bits"]
    values, spread = np.array([(o["entropy_bits"], o["entropy_sd"]) for o in orders]).T
    _bars(axis, orders, values, values + np.nan_to_num(spread), "{:.2f}")
    axis.errorbar(
        np.arange(len(orders)), values, yerr=spread, fmt="none", ecolor=_INK, elinewidth=0.8, capsize=3, zorder=4
    )
    axis.axhline(random, color=_INK, linewidth=1, linestyle=(0, (4, 3)), zorder=3)
    axis.annotate(
        "expected,\ntrue random", (-0.45, random), (0, -4), textcoords="offset points", fontsize=8, color=_INK, va="top"
    )
    _dress(axis, "Diversity", f"entropy of {data_set['mix']} in a minibatch, bits")


def _draw_f1(axis: Any, data_set: Mapping[str, Any]) -> None:
    values = [o["macro_f1"] for o in data_set["orders"]]
    _bars(axis, data_set["orders"], values, values, "{:.2f}")
    axis.set_ylim(0, 1)
    _dress(axis, "Quality", f"macro-F1 on {data_set['n_held_out']:,} held-out cells")


def _draw_losses(axis: Any, data_set: Mapping[str, Any]) -> None:
    lowest, highest = np.inf, 0.0
    for result in data_set["orders"]:
        color = COLORS[result["order"]]
        seconds, loss = _columns(result["loss"])
        axis.plot(seconds, loss, color=color, linewidth=0.6, alpha=0.4, zorder=2)
        highest = max(highest, loss.max())
        seconds, loss = _columns(result["held_out_loss"])
        axis.plot(seconds, loss, color=color, linewidth=2.2, label=result["order"], zorder=3)
        axis.plot(seconds[-1:], loss[-1:], color=color, marker="o", markersize=7, markeredgecolor="white", zorder=4)
        lowest = min(lowest, loss.min())
    axis.set_yscale("log")
    axis.set_ylim(lowest / 2, 3 * highest)
    axis.set_xlim(0)
    axis.grid(visible=True, which="major", axis="y", color=_FAINT, linewidth=0.6, zorder=0)
    axis.legend(frameon=False, fontsize=9, loc="upper right", ncols=3)
    axis.set_xlabel(
        f"seconds; each line ends after the same {data_set['n_batches']:,} minibatches", fontsize=9, color=_INK
    )
    _dress(axis, "Loss", "cross-entropy; thick: held-out cells, thin: minibatches trained on")


def _bars(
    axis: Any, orders: Sequence[Mapping[str, Any]], values: Sequence[float], tops: Sequence[float], form: str
) -> None:
    """Draw a bar for each order, and its value above `tops`."""
    place = np.arange(len(orders))
    axis.bar(place, values, 0.72, color=[COLORS[o["order"]] for o in orders], zorder=2)
    for x, value, top in zip(place, values, tops, strict=True):
        axis.annotate(
            form.format(value), (x, top), (0, 3), textcoords="offset points", ha="center", fontsize=9.5, color=_INK
        )
    axis.set_xticks(place, [o["order"].replace(" ", "\n") for o in orders], fontsize=9)
    axis.set_ylim(0, 1.12 * max(*tops, 1e-9))


def _dress(axis: Any, title: str, subtitle: str) -> None:
    axis.set_title(title, loc="left", fontsize=11, color=_INK, pad=20)
    axis.text(0, 1.02, subtitle, transform=axis.transAxes, fontsize=8, color="#666666", va="bottom")
    axis.spines[["top", "right"]].set_visible(False)
    axis.tick_params(axis="both", labelsize=8.5, colors=_INK, length=3)
    axis.tick_params(axis="x", length=0)


def _columns(points: Sequence[Sequence[float]]) -> tuple[Any, Any]:
    """Return seconds and losses."""
    seconds, _, loss = np.array(points, dtype=np.float64).T
    return seconds, loss
