"""Write the pages that come from elsewhere: benchmarks from their records, the command line from its own help."""

from __future__ import annotations

import contextlib
import importlib.util
import io
import json
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
    "gil": "Who holds the interpreter while it reads",
}
"""The records that have a heading of their own, in the order of the page; others follow under their file's name."""

NOT_FIGURES = ("round", "load_before")
"""Numbers in a record that say how it was made, and are no result."""


def is_installed(package: str) -> bool:
    """Return whether a package, given by its top-level name, can be imported."""
    return importlib.util.find_spec(package) is not None


def write(folder: Path) -> None:
    """Write ``benchmarks.md`` and ``commands.md`` into a folder; a page that has not changed is left as it is."""
    folder.mkdir(exist_ok=True)
    for name, content in (("benchmarks", benchmarks_page(RESULTS)), ("commands", commands_page())):
        path = folder / f"{name}.md"
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
    return "\n\n".join(parts) + "\n"


def _section(name: str, records: list[dict[str, Any]]) -> str:
    if name == "rivals":
        short = [report.headline(records), report.conditions(records)]
        return "\n\n".join([*short, "### All arms", report.table(records), "### Goals", report.goals(records)])
    if name == "stages":
        known = {field.name for field in fields(Rate)}
        return run_stages.table([Rate(**{k: v for k, v in r.items() if k in known}) for r in records])
    if name == "plans":
        return run_plans.table(records)
    return medians(records)


def medians(records: list[dict[str, Any]]) -> str:
    """Return a Markdown table of the medians of every figure, one row per arm (and case, where there are several)."""
    by_arm: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for record in records:
        arm = record["arm"]["name"] if isinstance(record.get("arm"), dict) else str(record.get("arm", ""))
        by_arm[" ".join(filter(None, [arm, str(record.get("case", ""))]))].append(record)
    names = list(dict.fromkeys(k for record in records for k, v in record.items() if _is_figure(k, v)))
    lines = ["| arm | runs | " + " | ".join(names) + " |", "| --- | ---: |" + " ---: |" * len(names)]
    for arm, members in by_arm.items():
        values = [[m[name] for m in members if _is_figure(name, m.get(name))] for name in names]
        cells = [f"{median(found):,.5g}" if found else "" for found in values]
        lines.append(f"| {arm} | {len(members)} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _is_figure(name: str, value: Any) -> bool:
    return name not in NOT_FIGURES and isinstance(value, (int, float)) and not isinstance(value, bool)


def _origin(name: str, records: list[dict[str, Any]]) -> str:
    """Return where and when records were made."""
    commits = ", ".join(dict.fromkeys(r["commit"].removesuffix("+changes")[:7] for r in records if "commit" in r))
    found = [r["machine"] for r in records if "machine" in r]
    machines = ", ".join(dict.fromkeys(f"{count(m['cores'], 'core')} of {m['cpu']}" for m in found))
    days = sorted({r["time"][:10] for r in records if "time" in r})
    facts = [
        f"{len(records)} records in `benchmarks/results/{name}.jsonl`",
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
