"""Generate pages: benchmarks from records, the command line from its help, errors from the source."""

from __future__ import annotations

import contextlib
import io
import math
import re
from collections import defaultdict
from dataclasses import fields
from pathlib import Path
from statistics import mean, median, stdev
from typing import Any

from benchmarks import report, report_gpu, run_codecs, run_plans, run_stages
from benchmarks.stages import Rate
from docs import error_messages
from gpuload import cli
from gpuload.cli.text import count

RESULTS = Path(__file__).resolve().parent.parent / "benchmarks" / "results"

TITLES = {
    "rivals_epyc": "Beside other loaders",
    "rivals_epyc_before": "Beside other loaders, an earlier run",
    "rivals": "Beside other loaders, on another machine",
    "rivals_depth": "Counts drawn to a lower depth",
    "rivals_indexed": "Map-style datasets",
    "rivals_kept": "Later epochs from memory",
    "rivals_packed": "A packed store beside annbatch's collection",
    "gpu": "On a GPU",
    "stages": "Each stage beside what the machine allows",
    "ranks": "One rank on all cores, two on half of them each",
    "plans": "What it costs to plan an epoch",
    "modality": "Proteins predicted from genes",
    "migration": "The scripts of the migration page",
    "gil": "Who holds the interpreter lock while it reads",
    "readers": "Epochs over samples on this machine",
    "remote": "Cells from an object store",
    "concurrent": "Images from an object store",
    "concurrent_apart": "The same, the server on a core of its own",
    "growing": "Training from a store that grows",
    "classify": "What models learn in each order",
    "codecs": "The same cells in each compression",
    "knockdown": "A screen filtered by knock-down",
    "pack": "Packing",
    "pack_memory": "Memory for packing",
    "open": "Opening 100 million cells",
    "parquet": "Parquet of cells",
    "tune": "The tuner's advice beside a full sweep",
}
"""Records with a heading of their own, in the order of the page; others follow under their file's name."""

TIMED = {
    "codecs": "reads the same cells in each compression",
    "migration": "times these scripts beside each other on a file that it makes",
    "readers": "times epochs of both ways, and of PyTorch's worker processes, beside each other",
}
"""Records whose table also appears in another page, and the text used if there are none."""

GPU_ARMS = {
    "gpuload/dense/pinned": "from the `.h5ad` file (gzip) in the page cache",
    "gpuload/dense/cached": "the same with `device_cache`, in later epochs",
    "gpuload/dense/kept": "the same with `memory_cache`, in later epochs",
    "gpuload-packed/dense": "from a store of `gpuload pack` (lz4)",
    "gpuload-packed/dense/cached": "the same with `device_cache`, in later epochs",
    "gpuload/dense/pinned, cold": "from the `.h5ad` file, not in the page cache, through page-locked memory",
    "gpuload/dense/kvikio, cold": "the same through KvikIO",
}
"""Arms of a GPU from which users can choose, in the words of the guide."""

NOT_FIGURES = ("round", "load", "load_before", "load_after")
"""Numbers in a record that describe how it was made, not results."""

ORIGIN = ("commit", "time", "cache", "memory", "io_mode")
"""Strings in a record that describe its origin."""

MAX_PARTS = 30
"""Longer lists within a record are not shown."""


def write(folder: Path) -> None:
    """Write the pages and include files into a folder, leaving unchanged files untouched."""
    folder.mkdir(exist_ok=True)
    contents = {
        "benchmarks.md": benchmarks_page(RESULTS),
        "commands.md": commands_page(),
        "messages.md": messages_page(),
        **{f"{name}_times.txt": times(RESULTS, name, what) for name, what in TIMED.items()},
        "classify_scores.txt": scores_of_orders(RESULTS),
        "classify_speeds.txt": speeds_of_orders(RESULTS),
        "gpu_speeds.txt": speeds_on_a_gpu(RESULTS),
    }
    for name, content in contents.items():
        path = folder / name
        if not path.exists() or path.read_text() != content:
            path.write_text(content)


def benchmarks_page(results: Path) -> str:
    """Return the page of all records in a folder of JSON lines, one section a file."""
    found = sorted(path.stem for path in results.glob("*.jsonl"))
    order = [name for name in TITLES if name in found] + [name for name in found if name not in TITLES]
    intro = (
        "Every figure on this page is computed from the records in `benchmarks/results` when the page is built; none "
        "is typed by hand. How they are measured, and what each arm is, is described in `benchmarks/README.md` of the "
        "checkout."
    )
    parts = ["# Benchmarks", intro]
    for name in order:
        records = _records(results, name)
        parts += [f"## {TITLES.get(name, name.capitalize())}", _section(name, records), _origin(name, records)]
        drawn = sorted(results.glob(f"{name}*.png"))
        parts += [f"![{path.stem}](../../benchmarks/results/{path.name})" for path in drawn]
    return "\n\n".join(parts) + "\n"


def times(results: Path, name: str, what: str) -> str:
    """Return the table of a file of records for a page; how to measure it, where there is none."""
    records = _records(results, name)
    if not records:
        return f"`python -m benchmarks.run_{name}` {what}.\n"
    return "\n\n".join([_section(name, records), _origin(name, records)]) + "\n"


def scores_of_orders(results: Path) -> str:
    """Return the table of what models learn in each order, and how far block shuffling is from true random order."""
    records = _records(results, "classify")
    if not records:
        return "`python -m benchmarks.run_classify FOLDER` measures it.\n"
    groups: dict[tuple[Any, ...], list[dict[str, Any]]] = defaultdict(list)
    for record in records:
        key = (record[name] for name in ("model", "values", "lr", "n_train", "block_size", "fetch_factor", "order"))
        groups[tuple(key)].append(record)
    labels = list(records[0]["macro_f1"])
    columns = ["model", "values", "rate", "cells", "blocks of", "minibatches to a fetch", "order", "seeds", *labels]
    columns += ["epoch, s", "of these waiting, s", "loader alone, s"]
    lines = [f"| {' | '.join(columns)} |", "| --- | --- |" + " ---: |" * 4 + " --- |" + " ---: |" * (len(columns) - 7)]
    for key, members in groups.items():
        scores = [_with_spread([m["macro_f1"][label] for m in members]) for label in labels]
        alone = members[0]["n_train"] / members[0]["loader_cells_per_s"]
        seconds = [mean(m["seconds"] for m in members), mean(m["waited_s"] for m in members), alone]
        about = [part if isinstance(part, str) else f"{part:,}" for part in key]
        cells = [*about, str(len(members)), *scores, *(f"{s:.2g}" for s in seconds)]
        lines.append(f"| {' | '.join(cells)} |")
    gaps = []
    for (*setting, order), members in groups.items():
        random = groups.get((*setting, "random"))
        if order == "block" and random:
            model, values, lr, n_train, block_size, fetch_factor = setting
            means = {
                label: [mean(m["macro_f1"][label] for m in found) for found in (members, random)] for label in labels
            }
            listed = ", ".join(f"{label} {block - other:+.3f}" for label, (block, other) in means.items())
            how = f"{values} at {lr}, {n_train:,} cells, blocks of {block_size}, {fetch_factor} minibatches to a fetch"
            gaps.append(f"- {model}, {how}: {listed}")
    about = "Block shuffling less true random order, differences of these means:"
    return "\n\n".join(["\n".join(lines), _origin("classify", records), about, "\n".join(gaps)]) + "\n"


def speeds_of_orders(results: Path) -> str:
    """Return how many times as fast as true random order blocks are read, where cells have many genes."""
    rates: dict[str, list[float]] = defaultdict(list)
    n_genes = 0
    for record in _records(results, "rivals"):
        if "cells_per_s" in record:
            rates[record["arm"]["name"]].append(record["cells_per_s"])
            n_genes = record["file"]["n_vars"]
    found = {
        order: median(rates[f"gpuload/dense/{order}"])
        for order in ("chunk", "16", "1")
        if rates[f"gpuload/dense/{order}"]
    }
    if "1" not in found or len(found) == 1:
        return "`python -m benchmarks.run_rivals --file cells.h5ad` measures what the loader alone does.\n"
    names = {"chunk": "blocks of a chunk", "16": "blocks of 16"}
    others = [f"{names[k]} {v / found['1']:.1f} times ({v:,.0f})" for k, v in found.items() if k != "1"]
    return (
        f"Beside true random order ({found['1']:,.0f} cells/s), the loader alone makes dense minibatches of "
        f"{n_genes:,} genes so many times as fast: {', '.join(others)}; cells/s, medians.\n"
    )


def speeds_on_a_gpu(results: Path) -> str:
    """Return the rates of what users can choose on a GPU, and nvCOMP's by the number of chunks it is given."""
    found = report_gpu.runs(_records(results, "gpu"))
    if not found:
        return "`python -m benchmarks.run_gpu --file cells.h5ad` measures it.\n"
    arms = {name: arm for name, arm in found[0].items() if arm.records}
    lines = ["| dense minibatches | cells/s | over epochs |", "| --- | ---: | ---: |"]
    for name, what in GPU_ARMS.items():
        if name in arms:
            low, high = arms[name].extremes
            over = f"{low:,.0f}-{high:,.0f}" if low < high else ""
            lines.append(f"| {what} | {arms[name].cells_per_s:,.0f} | {over} |")
    parts = ["\n".join(lines)]
    if report_gpu.INFLATE in arms:
        rates = arms[report_gpu.INFLATE].records[-1]["by_n_chunks"]
        said = ", ".join(f"{int(n):,} at {rate / 1e9:.1f}" for n, rate in rates.items())
        parts.append(f"nvCOMP alone inflates chunks, so many at a time, at so many GB/s of decoded bytes: {said}.")
    parts += [remark for remark in report_gpu.remarks(arms) if remark.startswith("Beside a training step")]
    return "\n\n".join([*parts, f"*{report_gpu.conditions(found[0])}*"]) + "\n"


def _records(results: Path, name: str) -> list[dict[str, Any]]:
    """Return the records of a file; none if it does not exist."""
    path = results / f"{name}.jsonl"
    return report.read_records(path) if path.exists() else []


def _with_spread(values: list[float]) -> str:
    return f"{mean(values):.3f} ± {stdev(values):.3f}" if len(values) > 1 else f"{mean(values):.3f}"


def _section(name: str, records: list[dict[str, Any]]) -> str:
    if name.startswith("rivals"):
        short = [report.loaders(records), report.headline(records), report.conditions(records)]
        return "\n\n".join(
            [*filter(None, short), "### All arms", report.table(records), "### Goals", report.goals(records)]
        )
    if name == "gpu":
        return report_gpu.details(records, _records(RESULTS, "pack"))
    if name == "stages":
        known = {field.name for field in fields(Rate)}
        return run_stages.table([Rate(**{k: v for k, v in r.items() if k in known}) for r in records])
    if name == "plans":
        return run_plans.table(records)
    if name == "codecs":
        return run_codecs.table(records)
    lists = dict.fromkeys(key for record in records for key, value in record.items() if _is_table(value))
    by_arm: dict[str, list[dict[str, Any]]] = {_arm(record): [] for record in records}
    for record in records:
        if "error" not in record:  # an arm that never succeeded is listed with no runs
            by_arm[_arm(record)].append(record)
    parts = [medians(list(by_arm.items()))]
    for key in lists:
        rows = [row for record in records for row in record.get(key, [])]
        parts += [f"### {key.capitalize()}", medians([(_arm(row), [row]) for row in rows])]
    return "\n\n".join(parts)


def _is_table(value: Any) -> bool:
    return isinstance(value, list) and 0 < len(value) <= MAX_PARTS and all(isinstance(row, dict) for row in value)


def medians(groups: list[tuple[str, list[dict[str, Any]]]]) -> str:
    """Return a Markdown table of the medians of every figure, one row per named group of records."""
    names = list(dict.fromkeys(k for _, members in groups for m in members for k, v in m.items() if _is_figure(k, v)))
    lines = ["| arm | runs | " + " | ".join(names) + " |", "| --- | ---: |" + " ---: |" * len(names)]
    for arm, members in groups:
        values = [[m[name] for m in members if _is_figure(name, m.get(name))] for name in names]
        cells = [_number(median(found)) if found else "" for found in values]
        lines.append(f"| {arm} | {len(members)} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _number(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 10_000 else f"{value:,.4g}"


def _arm(record: dict[str, Any]) -> str:
    """Return what a record is of: its arm, its case and a cold cache; of a row without, all its words."""
    if "arm" not in record:
        return ", ".join(v for k, v in record.items() if isinstance(v, str) and k not in ORIGIN) or "all"
    name = record["arm"]["name"] if isinstance(record["arm"], dict) else str(record["arm"])
    return " ".join(filter(None, [name, str(record.get("case", "")), "cold" * (record.get("cache") == "cold")]))


def _is_figure(name: str, value: Any) -> bool:
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    return name not in NOT_FIGURES and is_number and math.isfinite(value)


def _origin(name: str, records: list[dict[str, Any]]) -> str:
    """Return where and when records were made."""
    commits = ", ".join(dict.fromkeys(r["commit"].removesuffix("+changes")[:7] for r in records if "commit" in r))
    found = [r["machine"] for r in records if "machine" in r]
    machines = ", ".join(dict.fromkeys(f"{count(m['cores'], 'core')} of {m['cpu']}" for m in found))
    cards = ", ".join(dict.fromkeys(r["gpu"]["card"] for r in records if r.get("gpu")))
    days = sorted({r["time"][:10] for r in records if "time" in r})
    facts = [
        f"{count(len(records), 'record')} in `benchmarks/results/{name}.jsonl`",
        f"commits {commits}" if commits else "",
        machines,
        cards,
        " to ".join(dict.fromkeys([*days[:1], *days[-1:]])),
    ]
    return f"*{'; '.join(filter(None, facts))}.*"


def commands_page() -> str:
    """Return the page of the command line: what ``gpuload --help`` and ``gpuload COMMAND --help`` print."""
    parts = ["# Command line", _block(["--help"])]
    for name in cli.COMMANDS:
        parts += [f"## gpuload {name}", _block([name, "--help"])]
    return "\n\n".join(parts) + "\n"


def _block(argv: list[str]) -> str:
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        code = cli.main(argv)
    if code:
        raise RuntimeError(f"gpuload {' '.join(argv)} ended with code {code}")
    return f"```text\n{printed.getvalue().rstrip()}\n```"


def messages_page() -> str:
    """Return the page of every message of an error, with what to do."""
    intro = (
        "Read from the source when this page is built; `…` stands for names and numbers. Where the second column has "
        "nothing but that, the message itself says what to do, by what was found; where it is empty, [](../errors.md) "
        "has more. Where a remote or a library gives the reason, the message is its own words."
    )
    parts = ["# Every message", intro]
    found = error_messages.messages()
    for kind in error_messages.KINDS:
        rows = dict.fromkeys(m.parts for m in found if m.kind == kind and error_messages.fixed(m.text))
        lines = [f"## {kind}", "", "| message | what to do |", "| --- | --- |"]
        lines += [f"| `{message}` | {_escaped(cure)} |" for message, cure in rows]
        parts.append("\n".join(lines))
    return "\n\n".join(parts) + "\n"


def _escaped(text: str) -> str:
    """Escape text for Markdown, rendering what is within backticks as code."""
    parts = text.split("`")
    parts[::2] = [re.sub(r"([*_<>\[\]|~])", r"\\\1", part) for part in parts[::2]]
    return "`".join(parts)
