"""Write what comes from elsewhere: benchmarks from their records, the command line from its own help."""

from __future__ import annotations

import contextlib
import importlib.util
import io
import json
import math
from collections import defaultdict
from dataclasses import fields
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks import report, run_plans, run_stages
from benchmarks.stages import Rate
from gpuload import cli
from gpuload.cli.text import count

RESULTS = Path(__file__).resolve().parent.parent / "benchmarks" / "results"

TITLES = {
    "rivals": "Beside other loaders",
    "stages": "Each stage beside what the machine allows",
    "ranks": "One rank on all cores, two on half of them each",
    "plans": "What it costs to plan an epoch",
    "modality": "Proteins predicted from genes",
    "migration": "The scripts of the migration page",
    "gil": "Who holds the interpreter while it reads",
    "remote": "Cells from an object store",
    "concurrent": "Pictures from an object store",
    "growing": "Training from a store that grows",
    "classify": "What models learn in each order",
    "pack": "Packing",
    "open": "Opening 100 million cells",
    "tune": "The tuner's advice beside a full sweep",
}
"""The records that have a heading of their own, in the order of the page; others follow under their file's name."""

NOT_FIGURES = ("round", "load", "load_before", "load_after")
"""Numbers in a record that say how it was made, and are no result."""

ORIGIN = ("commit", "time", "cache", "memory", "io_mode")
"""Words in a record that say where it is from."""

MAX_PARTS = 30
"""Longer lists within a record are left to the record."""


def is_installed(package: str) -> bool:
    """Return whether a package, given by its top-level name, can be imported."""
    return importlib.util.find_spec(package) is not None


def write(folder: Path) -> None:
    """Write the pages, and what others include, into a folder; a file that would not change is left as it is."""
    folder.mkdir(exist_ok=True)
    contents = {
        "benchmarks.md": benchmarks_page(RESULTS),
        "commands.md": commands_page(),
        "migration_times.txt": migration_times(RESULTS),
    }
    for name, content in contents.items():
        path = folder / name
        if not path.exists() or path.read_text() != content:
            path.write_text(content)


def benchmarks_page(results: Path) -> str:
    """Return the page of all records in a folder of JSON lines, one section a file."""
    found = {path.stem: path for path in sorted(results.glob("*.jsonl"))}
    order = [name for name in TITLES if name in found] + [name for name in found if name not in TITLES]
    intro = (
        "Every figure on this page is computed from the records in `benchmarks/results` when the page is built; none "
        "is typed by hand. How they are measured, and what each arm is, stands in `benchmarks/README.md` of the "
        "checkout."
    )
    parts = ["# Benchmarks", intro]
    for name in order:
        records = [json.loads(line) for line in found[name].read_text().splitlines() if line]
        parts += [f"## {TITLES.get(name, name.capitalize())}", _section(name, records), _origin(name, records)]
        drawn = sorted(results.glob(f"{name}*.png"))
        parts += [f"![{path.stem}](../../benchmarks/results/{path.name})" for path in drawn]
    return "\n\n".join(parts) + "\n"


def migration_times(results: Path) -> str:
    """Return what the migration page says of its scripts' speed; how to measure it, where there is no record."""
    path = results / "migration.jsonl"
    if not path.exists():
        return "`python -m benchmarks.run_migration` times these scripts beside each other on a file that it makes.\n"
    records = [json.loads(line) for line in path.read_text().splitlines() if line]
    return "\n\n".join([_section("migration", records), _origin("migration", records)]) + "\n"


def _section(name: str, records: list[dict[str, Any]]) -> str:
    if name == "rivals":
        short = [report.headline(records), report.conditions(records)]
        return "\n\n".join([*short, "### All arms", report.table(records), "### Goals", report.goals(records)])
    if name == "stages":
        known = {field.name for field in fields(Rate)}
        return run_stages.table([Rate(**{k: v for k, v in r.items() if k in known}) for r in records])
    if name == "plans":
        return run_plans.table(records)
    lists = dict.fromkeys(key for record in records for key, value in record.items() if _is_table(value))
    by_arm: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for record in records:
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
    """Return what a record is of: its arm and case; of a row without, all its words."""
    if "arm" not in record:
        return ", ".join(v for k, v in record.items() if isinstance(v, str) and k not in ORIGIN) or "all"
    name = record["arm"]["name"] if isinstance(record["arm"], dict) else str(record["arm"])
    return " ".join(filter(None, [name, str(record.get("case", ""))]))


def _is_figure(name: str, value: Any) -> bool:
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    return name not in NOT_FIGURES and is_number and math.isfinite(value)


def _origin(name: str, records: list[dict[str, Any]]) -> str:
    """Return where and when records were made."""
    commits = ", ".join(dict.fromkeys(r["commit"].removesuffix("+changes")[:7] for r in records if "commit" in r))
    found = [r["machine"] for r in records if "machine" in r]
    machines = ", ".join(dict.fromkeys(f"{count(m['cores'], 'core')} of {m['cpu']}" for m in found))
    days = sorted({r["time"][:10] for r in records if "time" in r})
    facts = [
        f"{count(len(records), 'record')} in `benchmarks/results/{name}.jsonl`",
        f"commits {commits}" if commits else "",
        machines,
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
