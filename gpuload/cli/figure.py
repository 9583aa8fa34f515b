"""Figures: the demo's results; a timeline; how labels and chunks lie in a file, and the settings to choose from.

The only user of matplotlib.
"""

from __future__ import annotations

from io import BytesIO
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np

from gpuload.errors import MissingDependencyError
from gpuload.stats import Span

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from numpy.typing import NDArray

    from gpuload.cli.advice import Advice
    from gpuload.cli.utilisation import Busy
    from gpuload.store import ObsColumn

COLORS = {"streaming": "#c44e52", "block shuffling": "#4c72b0", "true random": "#8c8c8c"}
"""Streaming warns, block shuffling stands out, true random order is the reference."""

STRIP = 2000
"""Positions along a file whose label is drawn."""

_INK, _FAINT = "#333333", "#d9d9d9"


def draw(data_sets: Sequence[Mapping[str, Any]]) -> bytes:
    """Draw the results of all data sets, one row each, and return them as PNG.

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
    return _drawn(figure)


def draw_inspection(
    advised: Advice, label: str, column: ObsColumn, cells_per_chunk: NDArray[Any], form: str = "png"
) -> bytes:
    """Draw how a label lies along the file, how many cells a stored chunk has, and what can be chosen.

    Parameters
    ----------
    cells_per_chunk : (n_chunks,) int64
        Cells between two edges of the chunk grid.
    form
        One of `text.PICTURES`.

    Raises
    ------
    MissingDependencyError
        matplotlib is not installed.
    """
    figure = _figure(11.5, 7.2, "the plot")
    runs, rest = figure.subfigures(2, 1, height_ratios=(1, 2.9))
    _draw_runs(runs.subplots(), label, column)
    choices, chunks = rest.subplots(1, 2, width_ratios=(2.4, 1))
    _draw_choices(choices, advised, label)
    _draw_chunks(chunks, cells_per_chunk)
    return _drawn(figure, form)


def _draw_runs(axis: Any, label: str, column: ObsColumn) -> None:
    """Draw the label at each position of the file as a strip of colours; most columns of the strip cover many rows."""
    codes: NDArray[np.int32] = np.asarray(column.values, dtype=np.int32)
    edges = np.linspace(0, codes.size, min(codes.size, STRIP) + 1).astype(np.int64)
    n_categories = len(column.categories) if column.categories is not None else np.unique(codes).size
    runs = 1 + int(np.count_nonzero(codes[1:] != codes[:-1]))
    shown = np.where(codes[edges[:-1]] < 0, np.nan, codes[edges[:-1]] * 0.381966 % 1)  # neighbours get distant colours
    strip = (edges[0], codes.size, 0, 1)
    axis.imshow(shown[None, :], aspect="auto", cmap="turbo", vmin=0, vmax=1, extent=strip, interpolation="nearest")
    axis.set_yticks([])
    axis.set_xlabel("row of the file", fontsize=9, color=_INK)
    _dress(
        axis,
        f"{label} along the file",
        f"{n_categories:,} labels in {runs:,} runs of {codes.size / runs:,.1f} cells on average; one colour per label",
    )


def _draw_chunks(axis: Any, cells_per_chunk: NDArray[Any]) -> None:
    axis.hist(cells_per_chunk, bins=min(30, max(1, np.unique(cells_per_chunk).size)), color="#4c72b0", zorder=2)
    axis.set_xlabel("cells", fontsize=9, color=_INK)
    axis.set_ylabel("chunks", fontsize=9, color=_INK)
    axis.set_xlim(0)
    _dress(axis, "Cells per stored chunk", f"{cells_per_chunk.size:,} chunks, {cells_per_chunk.mean():,.1f} on average")


def _draw_choices(axis: Any, advised: Advice, label: str) -> None:
    """Draw the expected entropy of minibatches against cells/s for every candidate, one line per fetch factor."""
    factors = sorted({c.fetch_factor for c in advised.candidates}, reverse=True)
    for factor, color in zip(factors, ("#4c72b0", "#55a868", "#c44e52"), strict=False):
        line = [c for c in advised.candidates if c.fetch_factor == factor]
        name = f"fetch_factor {factor}: {advised.batch_size * factor:,} cells"
        for marker, kind in (("o-", int), ("s", str)):
            some = [c for c in line if isinstance(c.block_size, kind)]
            x, y = [c.cells_per_s for c in some], [c.entropy_bits for c in some]
            label_of = name if kind is int else None
            axis.plot(x, y, marker, color=color, markersize=5, linewidth=1.2, label=label_of, zorder=3)
        for choice in line:
            point = (choice.cells_per_s, choice.entropy_bits)
            axis.annotate(str(choice.block_size), point, (4, 4), textcoords="offset points", fontsize=7.5, color=color)
            if (choice.block_size, choice.fetch_factor) == (advised.block_size, advised.fetch_factor):
                axis.plot(*point, marker="o", markersize=14, fillstyle="none", color=_INK, zorder=4)
    random = advised.random_entropy_bits
    axis.axhline(random, color=_INK, linewidth=1, linestyle=(0, (4, 3)), zorder=2, label="true random order")
    least = advised.min_entropy * random
    axis.axhline(least, color=_FAINT, linewidth=1, zorder=1, label=f"{100 * advised.min_entropy:g} % of it")
    axis.set_xlim(0)
    axis.legend(frameon=False, fontsize=8.5, loc="best")
    axis.set_xlabel("cells/s by the cost model, once every checksum was verified", fontsize=9, color=_INK)
    _dress(
        axis, f"{label} in minibatches of {advised.batch_size}", "expected entropy, bits; beside each point block_size"
    )


def check_matplotlib(feature: str) -> None:
    """Raise MissingDependencyError if what a feature needs for drawing is not installed; for before the work."""
    try:
        import matplotlib.figure  # noqa: F401
    except ImportError as error:
        raise MissingDependencyError("matplotlib", feature, "plot") from error


def _figure(width: float, height: float, feature: str) -> Any:
    check_matplotlib(feature)
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), layout="constrained", facecolor="white")


def _drawn(figure: Any, form: str = "png") -> bytes:
    picture = BytesIO()
    figure.savefig(picture, format=form, dpi=130)
    return picture.getvalue()


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


CELL_LANES = (
    ("read_s", "read", "#4c72b0"),
    ("decode_s", "decode", "#55a868"),
    ("take_s", "take", "#c08b30"),
    ("plan_s", "plan", "#8172b3"),
    ("wait_s", "consumer waits", "#c44e52"),
    ("to_device_s", "to device", "#4aa3b5"),
    ("step_s", "consumer's step", "#8c8c8c"),
)
"""Rows of the timeline, from the bottom: timer, name and colour; native threads get one line each."""
SAMPLE_LANES = (
    ("read_s", "get item", "#4c72b0"),
    ("decode_s", "decode", "#55a868"),
    ("take_s", "copy into the batch", "#c08b30"),
    ("wait_s", "waits", "#c44e52"),
    ("to_device_s", "to device", "#4aa3b5"),
    ("step_s", "train step", "#8c8c8c"),
)
"""The same for samples fetched one by one."""
_GPU = "#76b041"
_MOST_THREADS, _DENSE = 12, 4
"""With more threads, a lane is a curve of the number active, this many lines high."""
_LINE_APART, _NUMBER_APART = 0.008, 0.03
"""Minimum distance, as a fraction of the width, from a batch's line to the next one, and from its number."""
_NARROWEST = 0.0008
"""Minimum width of a task, as a fraction of the whole: about a pixel."""


def draw_timeline(
    spans: Sequence[Span],
    verdict: str,
    gpus: Sequence[Busy] = (),
    lanes: Sequence[tuple[str, str, str]] = CELL_LANES,
    form: str = "png",
) -> bytes:
    """Draw the tasks of each stage over time, a line for each thread.

    If many threads do the same, draw the number active over time. Tasks of odd-numbered batches are lighter, and a thin
    line with its number marks when a batch was returned, where there is room.

    Parameters
    ----------
    spans
        The tasks. If none is a step, the time between two waits of the consumer is drawn as one.
    gpus
        GPU utilisation: a curve for each, from idle at the bottom of its line to busy at the top.
    lanes
        Rows, from the bottom: timer, name and colour. Rows without data are left out.
    form
        One of `text.PICTURES`.

    Raises
    ------
    MissingDependencyError
        matplotlib is not installed.
    """
    began = min((span.start for span in spans), default=0.0)
    lasted = max((span.stop for span in spans), default=1.0) - began
    by_timer: dict[str, dict[int, list[Span]]] = {timer: {} for timer, _, _ in lanes}
    for span in sorted(_with_steps(spans), key=lambda span: span.start):
        if span.timer in by_timer:
            since = span._replace(start=span.start - began, stop=span.stop - began)
            by_timer[span.timer].setdefault(span.thread, []).append(since)
    n_lines = {timer: _DENSE if len(threads) > _MOST_THREADS else len(threads) for timer, threads in by_timer.items()}
    figure = _figure(13, 2.0 + 0.22 * (sum(n_lines.values()) + 2 * len(gpus)), "the timeline")
    axis, line, ticks = figure.subplots(), 0, []
    for timer, name, color in lanes:
        threads, words = by_timer[timer], name
        if len(threads) > _MOST_THREADS:
            most = _draw_how_many(axis, [span for tasks in threads.values() for span in tasks], line, color)
            words = f"{name},\nup to {most} at a time"
        else:
            for offset, tasks in enumerate(threads.values()):
                bars = [(task.start, max(task.stop - task.start, _NARROWEST * lasted)) for task in tasks]
                colors = [_shade(color, task.batch) for task in tasks]
                axis.broken_barh(bars, (line + offset, 0.8), facecolors=colors, zorder=2)
        if threads:
            ticks.append((line + n_lines[timer] / 2 - 0.1, words))
        line += n_lines[timer]
    for gpu in (gpu.since(began) for gpu in gpus):
        at, height = [at - began for at in gpu.at_s], [line + 1.7 * percent / 100 for percent in gpu.percent]
        axis.fill_between(at, line, height, step="pre", color=_GPU, linewidth=0, zorder=2)
        ticks.append((line + 0.9, f"{gpu.name} busy"))
        line += 2
    if _draw_batches(axis, by_timer.get("wait_s", {}), line, lasted):
        ticks.append((line + 0.4, "batch delivered"))
        line += 1
    if ticks:
        axis.set_yticks(*zip(*ticks, strict=True))
    axis.set_ylim(-0.3, max(1, line))
    axis.set_xlim(0, lasted)
    axis.set_xlabel("seconds; tasks of odd batches are lighter, where their batch is known", fontsize=9, color=_INK)
    axis.grid(visible=True, axis="x", color=_FAINT, linewidth=0.6, zorder=0)
    _dress(axis, "Who did what when", verdict)
    return _drawn(figure, form)


def _with_steps(spans: Sequence[Span]) -> list[Span]:
    """Return the tasks; without steps, add what the consumer did after each batch until its next task."""
    if any(span.timer == "step_s" for span in spans):
        return list(spans)
    consumers = {span.thread for span in spans if span.timer == "wait_s"}
    mine = sorted((span for span in spans if span.thread in consumers), key=lambda span: (span.thread, span.start))
    return [
        *spans,
        *(
            Span("step_s", span.thread, span.stop, following.start, span.batch)
            for span, following in pairwise(mine)
            if span.timer in ("wait_s", "to_device_s") and span.thread == following.thread
            if span.batch is not None and span.stop < following.start
        ),
    ]


def _draw_how_many(axis: Any, tasks: Sequence[Span], line: int, color: str) -> int:
    """Draw how many tasks are active at each time, with even batches below; return the maximum."""
    at = np.array([(time, sign, task.batch) for task in tasks for time, sign in ((task.start, 1), (task.stop, -1))])
    at = at[np.lexsort((at[:, 1].astype(int), at[:, 0].astype(float)))]
    times, signs = at[:, 0].astype(float), at[:, 1].astype(int)
    is_even = np.array([_shade(color, batch) == color for batch in at[:, 2]])
    every, even = np.cumsum(signs), np.cumsum(signs * is_even)
    most = int(every.max())
    unit = (_DENSE - 0.2) / max(1, most)
    axis.fill_between(times, line, line + unit * every, step="post", color=_shade(color, 1), linewidth=0, zorder=2)
    axis.fill_between(times, line, line + unit * even, step="post", color=color, linewidth=0, zorder=3)
    return most


def _draw_batches(axis: Any, waits: Mapping[int, Sequence[Span]], line: int, lasted: float) -> bool:
    """Draw when batches were returned, numbered on a line where there is room; return whether any was."""
    drawn = numbered = -np.inf
    for wait in sorted((wait for some in waits.values() for wait in some), key=lambda wait: wait.stop):
        at = wait.stop
        if wait.batch is None or at - drawn < _LINE_APART * lasted:
            continue
        drawn = at
        axis.plot([at, at], [-0.3, line + 0.2], color=_INK, linewidth=0.5, alpha=0.6, zorder=4)
        if at - numbered >= _NUMBER_APART * lasted:
            numbered = at
            axis.text(at, line + 0.25, str(wait.batch), fontsize=7, color=_INK, ha="center", va="bottom")
    return bool(drawn >= 0)


def _shade(color: str, batch: int | None) -> str:
    """Return a colour, halfway to white for batches with odd numbers."""
    if batch is None or batch % 2 == 0:
        return color
    return "#" + "".join(f"{(int(color[i : i + 2], 16) + 255) // 2:02x}" for i in (1, 3, 5))


def _bars(
    axis: Any, orders: Sequence[Mapping[str, Any]], values: Sequence[float], tops: Sequence[float], form: str
) -> None:
    """Draw a bar for each order, with its value above `tops`."""
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
