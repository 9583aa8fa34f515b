"""Make the README's table and plot from the results.

``python -m benchmarks.report benchmarks/results/NAME.jsonl [OTHER.jsonl ...] --plot rivals.png --readme README.md
--details benchmarks/README.md``

The first file is plotted and makes the README's tables; each further one, which is of another machine or other files,
makes one line in the README, of a few tasks. Nothing is measured here, and no number in the README is written by hand:
the tables are between two marker lines and are replaced.
"""

from __future__ import annotations

import argparse
import json
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

BEGIN, END = "<!-- benchmarks: begin -->", "<!-- benchmarks: end -->"

GROUPS = {
    "dense": "dense float32, shuffled",
    "log1p": "dense float32, normalised and log1p, shuffled",
    "csr": "CSR, shuffled",
    "collection-dense": "annbatch's own collection, dense float32",
    "collection-csr": "annbatch's own collection, CSR",
    "streaming": "dense, in file order",
    "random": "dense, true random order",
    "scdl-dense": "BioNeMo-SCDL's own folder, dense, true random order",
    "scdl-csr": "BioNeMo-SCDL's own folder, CSR, true random order",
    "census": "a SOMA experiment laid out as the CELLxGENE Census, dense, shuffled",
    "files": "dense, shuffled, the same cells in 20 files",
    "pairs": "sets of 64 cells of one perturbation and their controls, dense",
    "depth": "the same sets, each count kept with probability 1/2",
    "front": "dense, shuffled, DALI's front",
    "overlap": "with a consumer that sleeps as long as the loader needs",
    "memory": "three whole epochs",
}
"""The groups in report order, and what their arms have in common."""

REFERENCE = {"dense": "gpuload/dense/chunk", "log1p": "gpuload/log1p/chunk", "csr": "gpuload/csr/chunk"}
"""For groups with more than one arm of ours, the one that the others are compared with.

Otherwise it is the one with a rival's own settings if there is one, or else the first.
"""

RATIOS = (
    ("gpuload/dense/chunk", "scdataset/dense/16", 7.0),
    ("gpuload/dense/chunk", "annbatch/dense", 2.0),
    ("gpuload/dense/chunk", "annbatch-collection/dense/512", 1.0),
    ("gpuload/csr/2-chunks", "annbatch-collection/csr/512", 1.0),
    ("gpuload/dense/3-chunks-later", "scipy-in-ram/dense", 1.0),
    ("gpuload-kept/csr/chunk", "gpuload/csr/chunk-later", 2.5),
    ("gpuload-kept/csr/chunk", "annbatch-collection/csr/512", 1.5),
    ("gpuload-kept/dense/chunk", "scipy-in-ram/dense", 1.0),
    ("gpuload-kept/dense/1", "gpuload/dense/1", 3.0),
    ("gpuload/csr/chunk", "scdataset/csr/16", 6.0),
    ("gpuload/csr/2-chunks", "annbatch/csr", 1.5),
    ("gpuload-collection/dense/512", "annbatch-collection/dense/512", 2.0),
    ("gpuload-collection/dense/32", "annbatch-collection/dense/32", 2.0),
    ("gpuload-collection/csr/512", "annbatch-collection/csr/512", 2.0),
    ("gpuload-collection/csr/32", "annbatch-collection/csr/32", 2.0),
    ("gpuload-packed/dense/512", "gpuload-collection/dense/512", 1.0),
    ("gpuload-packed/dense/32", "gpuload-collection/dense/32", 1.0),
    ("gpuload-packed/csr/512", "gpuload-collection/csr/512", 1.0),
    ("gpuload-packed/csr/32", "gpuload-collection/csr/32", 1.0),
    ("gpuload/dense/streaming", "scdataset/dense/streaming", 3.0),
    ("gpuload/dense/1", "scdataset/dense/1", 2.5),
    ("gpuload/dense/1", "mapped-collection-workers/dense/1", 2.5),
    ("gpuload/dense/1", "annloader/dense/1", 2.5),
    ("gpuload-indexed/dense/1", "mapped-collection-workers/dense/1", 2.5),
    ("gpuload-indexed/dense/1", "annloader/dense/1", 2.5),
    ("gpuload-scdl/dense/1", "bionemo-scdl/dense/1", 2.0),
    ("gpuload-scdl/csr/1", "bionemo-scdl/csr/1", 1.5),
    ("gpuload/dense/chunk", "tiledbsoma-ml/dense", 5.0),
    ("gpuload/dense/chunk", "tiledbsoma-ml/dense-default", 5.0),
    ("gpuload/csr/chunk", "tiledbsoma-ml/csr", 6.0),
    ("gpuload-soma/dense/64", "tiledbsoma-ml/dense", 4.0),
    ("gpuload-soma/csr/64", "tiledbsoma-ml/csr", 4.0),
    ("gpuload-census/dense/64", "tiledbsoma-ml-census/dense", 4.0),
    ("gpuload/pairs/chunk", "cell-load/pairs-consecutive", 7.0),
    ("gpuload/depth/chunk", "cell-load/depth-consecutive", 7.0),
    ("gpuload/dense/16", "scdataset/dense/16", 3.0),
    ("gpuload-dali/dense/chunk", "gpuload/dense/chunk", 0.4),
)
"""Goals: an arm, another one, and the required speed-up of the first."""

LOADERS = (
    ("annbatch", "annbatch-collection/dense/512", "its own store, shuffled when it was converted", "chunks of 512"),
    ("BioNeMo-SCDL", "bionemo-scdl/dense/1", "its own memory maps", "true random"),
    ("TileDB-SOMA-ML", "tiledbsoma-ml/dense", "its own store", "chunks of 64"),
    ("scDataset", "scdataset/dense/16", "the .h5ad file", "blocks of 16"),
    ("cell-load", "cell-load/pairs-consecutive", "the .h5ad file", "sets of a perturbation"),
    ("AnnLoader", "annloader/dense/1", "the .h5ad file", "true random"),
    ("MappedCollection", "mapped-collection-workers/dense/1", "the .h5ad file", "true random"),
    ("no loader: SciPy", "scipy-in-ram/dense", "nothing: all cells are in memory", "true random"),
)
"""The README's first table: each other loader, its arm, what it reads, and in which order."""

BESIDE = {
    "annbatch-collection/dense/512": ("gpuload-collection/dense/512", "the same store, blocks of 512"),
    "bionemo-scdl/dense/1": ("gpuload-scdl/dense/1", "the same memory maps, true random"),
    "tiledbsoma-ml/dense": ("gpuload-soma/dense/64", "the same store, blocks of 64"),
    "mapped-collection-workers/dense/1": ("gpuload/dense/1", "the .h5ad file, true random"),
    "annloader/dense/1": ("gpuload/dense/1", "the .h5ad file, true random"),
    "cell-load/pairs-consecutive": ("gpuload/pairs/chunk", "the .h5ad file, such sets"),
}
"""Our arm beside a loader's, and what it reads; for the others, `REFERENCE` over the .h5ad file."""

HEADLINE_RIVALS = ("scDataset", "scDataset by mask", "annbatch (converted store)", "SciPy in RAM")

_DENSE = ("scdataset/dense/16", "scdataset-mask/dense/16", "annbatch-collection/dense/512", "scipy-in-ram/dense")
_LOG1P = ("", "scdataset-mask/log1p/16", "annbatch/log1p/512", "scipy-in-ram/log1p")
_CSR = ("scdataset/csr/16", "scdataset-mask/csr/16", "annbatch-collection/csr/512", "")
_COLLECTION_DENSE = ("", "", "annbatch-collection/dense/512", "")
_COLLECTION_CSR = ("", "", "annbatch-collection/csr/512", "")

HEADLINE = (
    ("shuffled, dense float32", "gpuload/dense/chunk", _DENSE),
    ("the same in blocks of three chunks", "gpuload/dense/3-chunks", _DENSE),
    ("the same cells in 20 files", "gpuload/files/chunk", ("scdataset-anncollection/files/16", "", "", "")),
    ("shuffled, dense, kept in memory by an earlier epoch", "gpuload-kept/dense/chunk", _DENSE),
    ("shuffled, dense, normalised, log1p", "gpuload/log1p/chunk", _LOG1P),
    ("shuffled, CSR", "gpuload/csr/chunk", _CSR),
    ("the same in blocks of two chunks", "gpuload/csr/2-chunks", _CSR),
    ("shuffled, CSR, kept in memory by an earlier epoch", "gpuload-kept/csr/chunk", _CSR),
    ("annbatch's collection, dense", "gpuload-collection/dense/512", _COLLECTION_DENSE),
    ("annbatch's collection, CSR", "gpuload-collection/csr/512", _COLLECTION_CSR),
    ("a store of `gpuload pack`, dense", "gpuload-packed/dense/512", _COLLECTION_DENSE),
    ("a store of `gpuload pack`, CSR", "gpuload-packed/csr/512", _COLLECTION_CSR),
    ("in file order, dense", "gpuload/dense/streaming", ("scdataset/dense/streaming", "", "", "")),
    ("true random order, dense", "gpuload/dense/1", ("scdataset/dense/1", "", "", "")),
    (
        "true random order, kept in memory",
        "gpuload-kept/dense/1",
        ("scdataset/dense/1", "", "annbatch-collection/dense/512", "scipy-in-ram/dense"),
    ),
)
"""The README's table: a task, our arm, and each rival's, in the order above."""

ALSO = (
    "shuffled, dense float32",
    "shuffled, dense, kept in memory by an earlier epoch",
    "shuffled, CSR",
    "shuffled, CSR, kept in memory by an earlier epoch",
    "true random order, kept in memory",
)
"""The tasks of which the README tells the results of the other runs."""

BESIDE_OTHERS = (
    (
        "sets of one perturbation and their controls, each count kept with probability 1/2",
        "gpuload/depth/chunk",
        {"cell-load": "cell-load/depth-consecutive"},
    ),
    (
        "true random order by a DataLoader, over a map-style dataset",
        "gpuload-indexed/dense/1",
        {"MappedCollection": "mapped-collection-workers/dense/1", "AnnLoader": "annloader/dense/1"},
    ),
)
"""Tasks of which the README tells the results too: our arm, and those of other loaders."""

WITHOUT = {
    "gpuload/depth/chunk": "gpuload/pairs/chunk",
    "gpuload-kept/dense/chunk": "gpuload/dense/chunk-later",
    "gpuload-kept/csr/chunk": "gpuload/csr/chunk-later",
    "gpuload-kept/dense/1": "gpuload/dense/1",
}
"""Our arms with counts that are drawn, or chunks kept in memory, and the same without."""

OTHER_RUNS = "Other runs, on the same kind of files ([all arms](benchmarks/README.md#the-latest-figures)):"

LIMITS = (
    ("gpuload/overlap/chunk", "overlap_ratio", 1.15),
    ("gpuload/memory/chunk", "peak_mib", 1.3e9 / 2**20),
    ("gpuload/memory/1", "peak_mib", 2e9 / 2**20),
    ("gpuload/dense/3-chunks", "peak_mib", 1.3e9 / 2**20),
    ("gpuload/dense/chunk", "first_batch_s", 1.5),
)
"""Goals: an arm, one of its figures, and the upper limit."""

ENTROPY_GOALS = (
    ("gpuload/dense/chunk", "scipy-in-ram/dense", 0.99),
    ("gpuload/dense/3-chunks", "scipy-in-ram/dense", 0.99),
    ("gpuload/csr/2-chunks", "annbatch/csr", 0.99),
)
"""Goals: an arm, one in random order, and the required fraction of its minibatch entropy."""

COLUMNS = (
    "arm",
    "cells/s (median)",
    "range",
    "gpuload is faster by",
    "plate entropy, bits",
    "peak memory, MiB",
    "first batch, s",
)


@dataclass(frozen=True, slots=True)
class Summary:
    """The results of all rounds of one arm.

    Attributes
    ----------
    cells_per_s, lowest, highest
        Median and range over the rounds.
    entropy_bits
        Mean entropy of the label in a minibatch; None if it was not measured.
    peak_mib, first_batch_s
        Medians; None where not measured.
    parts
        The components of the peak memory, as text; empty if not measured.
    n_rounds, n_failed
        Number of successful and of failed measurements.
    """

    name: str
    group: str
    cells_per_s: float
    lowest: float
    highest: float
    entropy_bits: float | None
    peak_mib: float | None
    first_batch_s: float | None
    overlap_ratio: float | None
    parts: str
    n_rounds: int
    n_failed: int


def read_records(path: Path) -> list[dict[str, Any]]:
    """Return the records of a file of JSON lines."""
    return [json.loads(line) for line in path.read_text().splitlines() if line]


def summarise(records: Iterable[dict[str, Any]]) -> list[Summary]:
    """Return one summary per arm, in the order of the groups and of first appearance."""
    by_arm: dict[tuple[str, str], list[dict[str, Any]]] = defaultdict(list)
    for record in records:
        by_arm[record["arm"]["group"], record["arm"]["name"]].append(record)
    order = list(GROUPS)
    found = [_summary(name, group, measured) for (group, name), measured in by_arm.items()]
    return sorted(found, key=lambda summary: order.index(summary.group))


def _summary(name: str, group: str, records: list[dict[str, Any]]) -> Summary:
    good = [record for record in records if "error" not in record]
    rates = [record["cells_per_s"] for record in good] or [0.0]

    def middle(key: str) -> float | None:
        values = [record[key] for record in good if record.get(key) is not None]
        return median(values) if values else None

    return Summary(
        name=name,
        group=group,
        cells_per_s=median(rates),
        lowest=min(rates),
        highest=max(rates),
        entropy_bits=middle("label_entropy_bits"),
        peak_mib=middle("peak_mib"),
        first_batch_s=middle("first_batch_s"),
        overlap_ratio=middle("overlap_ratio"),
        parts=_parts(good),
        n_rounds=len(good),
        n_failed=len(records) - len(good),
    )


def table(records: Iterable[dict[str, Any]]) -> str:
    """Return a Markdown table: per arm the median, the range, and the speed-up of our arm of the group."""
    lines = ["| " + " | ".join(COLUMNS) + " |", "| --- |" + " ---: |" * (len(COLUMNS) - 1)]
    summaries = summarise(records)
    for group, title in GROUPS.items():
        members = [summary for summary in summaries if summary.group == group]
        if not members:
            continue
        lines.append(f"| **{title}** | | | | | | |")
        lines += [_row(member, _ours(member, members)) for member in members]
    return "\n".join(lines)


def _ours(rival: Summary, members: Sequence[Summary]) -> Summary | None:
    """Return our arm that a rival is compared with."""
    by_name = {member.name: member for member in members}
    if rival.group in REFERENCE:
        return by_name.get(REFERENCE[rival.group])
    own = next((member for member in members if member.name.startswith("gpuload")), None)
    return by_name.get("gpuload" + rival.name.removeprefix("annbatch"), own)


def loaders(records: Iterable[dict[str, Any]]) -> str:
    """Return a Markdown table: one row per other loader, and our figure for the same task; "" if none was measured."""
    pairs = _pairs(records)
    if not pairs:
        return ""
    lines = ["| loader | reads | order | cells/s | gpuload, cells/s | reads | faster by |"]
    lines.append("| --- | --- | --- | ---: | ---: | --- | ---: |")
    for (name, _, reads, order), theirs, ours, we_read in pairs:
        figures = f"{theirs.cells_per_s:,.0f} | {ours.cells_per_s:,.0f} | {we_read} | {_faster(ours, theirs)}"
        lines.append(f"| {name} | {reads} | {order} | {figures} |")
    return "\n".join(lines)


def _pairs(records: Iterable[dict[str, Any]]) -> list[tuple[tuple[str, str, str, str], Summary, Summary, str]]:
    """Return each other loader that was measured, its results, ours for the same task, and what we read."""
    by_name = {summary.name: summary for summary in summarise(records) if summary.n_rounds}
    found = []
    for loader in LOADERS:
        ours, reads = BESIDE.get(loader[1], (REFERENCE["dense"], "the .h5ad file, blocks of a chunk"))
        if loader[1] in by_name and ours in by_name:
            found.append((loader, by_name[loader[1]], by_name[ours], reads))
    return found


def _faster(ours: Summary, theirs: Summary) -> str:
    return f"{ours.cells_per_s / theirs.cells_per_s:.1f}x"


def headline(records: Iterable[dict[str, Any]]) -> str:
    """Return a short Markdown table: one row per task, with our cells/s and our speed-ups."""
    by_name = {summary.name: summary for summary in summarise(records)}
    lines = ["| task | gpuload, cells/s | " + " | ".join(HEADLINE_RIVALS) + " |"]
    lines.append("| --- | ---: |" + " ---: |" * len(HEADLINE_RIVALS))
    for task, ours, others in HEADLINE:
        if ours in by_name and by_name[ours].n_rounds:
            rate = by_name[ours].cells_per_s
            cells = [_times(rate, by_name.get(other)) for other in others]
            lines.append(f"| {task} | {rate:,.0f} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def other_run(records: Sequence[dict[str, Any]]) -> str:
    """Return one line of Markdown: where the numbers were measured, and a few tasks with our cells/s and speed-ups.

    A run that has none of those in `ALSO` and `BESIDE_OTHERS` tells all of its tasks.
    """
    by_name = {summary.name: summary for summary in summarise(records) if summary.n_rounds}
    tasks = [(task, ours, dict(zip(HEADLINE_RIVALS, others, strict=True))) for task, ours, others in HEADLINE]
    few = [*(task for task in tasks if task[0] in ALSO), *BESIDE_OTHERS]
    told = []
    for task, ours, others in few if any(ours in by_name for _, ours, _ in few) else tasks:
        if ours in by_name:
            rate = by_name[ours].cells_per_s
            without = by_name.get(WITHOUT.get(ours, ""))
            ratios = [] if without is None else [f"{rate / without.cells_per_s:.1f}x the same without"]
            ratios += [
                f"{rate / by_name[other].cells_per_s:.1f}x {name}" for name, other in others.items() if other in by_name
            ]
            begin = task if task.startswith("annbatch") else f"{task[0].upper()}{task[1:]}"  # which is a name
            told.append(f"{begin}: {rate:,.0f} cells/s ({', '.join(ratios)}).")
    return f"- {_machine(_last(records))}; {_commits(records)}. {' '.join(told)}"


def _times(rate: float, other: Summary | None) -> str:
    if other is None or not other.n_rounds:
        return ""
    return f"{rate / other.cells_per_s:.1f}x ({other.cells_per_s:,.0f})"


def goals(records: Iterable[dict[str, Any]]) -> str:
    """Return a Markdown table of the goals that these records cover, with the values reached."""
    by_name = {summary.name: summary for summary in summarise(records) if summary.n_rounds}
    lines = ["| goal | wanted | reached | met |", "| --- | ---: | ---: | :---: |"]
    for name, other, wanted in RATIOS:
        if name in by_name and other in by_name:
            ratio = by_name[name].cells_per_s / by_name[other].cells_per_s
            lines.append(
                _goal(f"{name}: speed over {other}", f"at least {wanted:g}x", f"{ratio:.2f}x", ratio >= wanted)
            )
    for name, figure, most in LIMITS:
        value = getattr(by_name[name], figure) if name in by_name else None
        if value is not None:
            lines.append(_goal(f"{name}: {figure}", f"at most {most:,.4g}", f"{value:,.4g}", value <= most))
    for name, other, least in ENTROPY_GOALS:
        found = [by_name[arm].entropy_bits if arm in by_name else None for arm in (name, other)]
        if found[0] is not None and found[1]:
            share = found[0] / found[1]
            lines.append(_goal(f"{name}: entropy over {other}", f"at least {least:g}", f"{share:.4f}", share >= least))
    return "\n".join(lines)


def _parts(records: list[dict[str, Any]]) -> str:
    """Return the components of the last record's peak memory, in MiB, as text."""
    if not records or "parts_nbytes" not in records[-1]:
        return ""
    record = records[-1]
    parts = {"before opening": record["rss_before_mib"]}
    parts |= {name: nbytes / 2**20 for name, nbytes in record["parts_nbytes"].items()}
    return ", ".join(f"{name} {mib:,.0f}" for name, mib in parts.items()) + " MiB"


def _goal(text: str, wanted: str, reached: str, is_met: bool) -> str:
    return f"| {text} | {wanted} | {reached} | {'yes' if is_met else 'no'} |"


def _row(summary: Summary, ours: Summary | None) -> str:
    if not summary.n_rounds:
        return f"| {summary.name} | failed | | | | | |"
    is_compared = ours is not None and ours.cells_per_s > 0 and not summary.name.startswith("gpuload")
    cells = [
        summary.name + (f" ({summary.n_failed} failed)" if summary.n_failed else ""),
        f"{summary.cells_per_s:,.0f}",
        f"{summary.lowest:,.0f}-{summary.highest:,.0f}",
        f"{ours.cells_per_s / summary.cells_per_s:.1f}x" if is_compared and ours is not None else "",
        _number(summary.entropy_bits, ".3f"),
        _number(summary.peak_mib, ",.0f"),
        _number(summary.first_batch_s, ".2f"),
    ]
    cells[3] = cells[3] or summary.parts
    if summary.overlap_ratio is not None:
        cells[3] = f"total / longer = {summary.overlap_ratio:.2f}"
    return "| " + " | ".join(cells) + " |"


def _number(value: float | None, form: str) -> str:
    return "" if value is None else format(value, form)


def conditions(records: list[dict[str, Any]]) -> str:
    """Return one sentence on what the numbers were measured with, where, and in which state."""
    last = _last(records)
    file = last["file"]
    arms = [record for record in records if record["arm"].get("rival", "").startswith("gpuload")]
    modes = ", ".join(sorted({record["io_mode"] for record in arms})) or "none"
    nnz_per_cell = file["nnz"] / max(file["n_obs"], 1)
    timed = [r["arm"]["name"] for r in records if "error" not in r and r["arm"].get("kind") != "memory"]
    n_rounds = sorted({timed.count(name) for name in timed}) or [1]
    return (
        f"{file['n_obs']:,} cells x {file['n_vars']:,} genes, {nnz_per_cell:,.0f} stored values a cell, "
        f"{file['compression']}, {file['nbytes'] / 1e6:,.0f} MB; {_machine(last)}; "
        f"page cache {last['cache']}; io_mode {modes}; {_commits(records)}; "
        f"{' to '.join(map(str, dict.fromkeys((n_rounds[0], n_rounds[-1]))))} rounds an arm, medians."
    )


def _last(records: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the last record that is no failure's."""
    return next(record for record in reversed(records) if "error" not in record)


def _machine(record: dict[str, Any]) -> str:
    machine = record["machine"]
    return f"{machine['cores']} cores of {machine['cpu']}"


def _commits(records: Iterable[dict[str, Any]]) -> str:
    commits = dict.fromkeys(record["commit"].removesuffix("+changes")[:7] for record in records)
    return f"commit{'s' * (len(commits) > 1)} {', '.join(commits)}"


def plot(records: list[dict[str, Any]], path: Path) -> None:
    """Draw the README's first table: the median cells/s of each loader and of gpuload, with the range as a line."""
    import matplotlib as mpl
    from matplotlib.figure import Figure

    pairs = _pairs(records)
    with mpl.rc_context({"svg.hashsalt": "gpuload", "font.size": 9}):
        figure = Figure(figsize=(9, 0.8 + 0.42 * len(pairs)), layout="constrained")
        axes = figure.subplots()
        for place, (_, theirs, ours, _) in enumerate(pairs):
            _draw(axes, place - 0.2, ours, "#2a7f62", f"{ours.cells_per_s:,.0f}  ({_faster(ours, theirs)})")
            _draw(axes, place + 0.2, theirs, "#9aa5b1", f"{theirs.cells_per_s:,.0f}")
        axes.set_yticks(range(len(pairs)), [f"{name}\n{order}" for (name, _, _, order), *_ in pairs])
        axes.invert_yaxis()
        axes.margins(x=0.12)
        axes.xaxis.set_major_formatter("{x:,.0f}")
        axes.set_xlabel("cells/s, dense float32 (median; line: range over the rounds)")
        title = "gpuload (green) beside each loader (grey), minibatches of equal diversity"
        axes.set_title(title, loc="left", fontsize=9)
        axes.spines[["top", "right"]].set_visible(False)
        figure.savefig(path, dpi=150)


def _draw(axes: Any, place: float, summary: Summary, colour: str, text: str) -> None:
    spread = [[summary.cells_per_s - summary.lowest], [summary.highest - summary.cells_per_s]]
    axes.barh(place, summary.cells_per_s, height=0.38, color=colour, xerr=spread, ecolor="#333333")
    axes.text(summary.highest, place, f"  {text}", va="center", fontsize=8)


def replace_between_markers(text: str, content: str, begin: str = BEGIN, end: str = END) -> str:
    """Return the text with everything between the marker lines replaced.

    Raises
    ------
    ValueError
        The markers do not each occur once, in this order.
    """
    before, found, rest = text.partition(begin)
    _, found_end, after = rest.partition(end)
    if not (found and found_end):
        raise ValueError(f"expected the lines {begin!r} and {end!r}, in this order.")
    return f"{before}{begin}\n{content}\n{end}{after}"


def main(arguments: list[str] | None = None) -> int:
    """Print the table; write the figure and the README if requested."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.report", description=__doc__.splitlines()[0])
    parser.add_argument("results", type=Path, nargs="+", help="JSON lines from run_rivals, one file per machine")
    parser.add_argument("--plot", type=Path, help="write the plot to this file (PNG, SVG or PDF)")
    parser.add_argument("--readme", type=Path, help=f"write the short table between {BEGIN} and {END} in this file")
    parser.add_argument("--details", type=Path, help="write all printed output between the same lines in this file")
    options = parser.parse_args(arguments)
    runs = list(map(read_records, options.results))
    content = "\n\n".join(f"{conditions(run)}\n\n{table(run)}\n\n{goals(run)}" for run in runs)
    print(content)
    if options.plot:
        plot(runs[0], options.plot)
    parts = [loaders(runs[0]), f"{headline(runs[0])}\n\n{conditions(runs[0])}"]
    if runs[1:]:
        parts.append("\n".join([OTHER_RUNS, "", *map(other_run, runs[1:])]))
    short = "\n\n".join(filter(None, parts))
    for path, text in ((options.readme, short), (options.details, content)):
        if path:
            path.write_text(replace_between_markers(path.read_text(), text))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
