"""Measure each stage of the engine against its ceiling.

``python -m benchmarks.run_stages --file cells.h5ad [--out benchmarks/results/stages.jsonl]``

Page cache warm, one thread, one process. Each line of the results is one stage.
"""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

from benchmarks import frame, machine
from benchmarks.measure import set_cache
from benchmarks.stages import Rate, Setting, decode, hand_over, plan, read, take_rows

STAGES = {"plan": plan, "read": read, "decode": decode, "take_rows": take_rows, "hand-over": hand_over}
PACKAGES = ("numba", "numpy", "imagecodecs", "torch", "nvidia-dali-cuda130")


def table(rates: list[Rate]) -> str:
    """Return a Markdown table of the rates and their fractions of the ceilings."""
    lines = [
        "| stage | case | rate | ceiling | fraction | cells/s | further |",
        "| --- | --- | ---: | ---: | ---: | ---: | --- |",
    ]
    for rate in rates:
        notes = ", ".join(f"{name} {value:,.3g}" for name, value in (rate.notes or {}).items())
        lines.append(
            f"| {rate.stage} | {rate.what} | {rate.rate:,.0f} {rate.unit}/s | {rate.ceiling:,.0f} ({rate.ceiling_is}) "
            f"| {rate.fraction:.2f} | {rate.cells_per_s:,.0f} | {notes} |"
        )
    return "\n".join(lines)


def main(arguments: list[str] | None = None) -> int:
    """Measure the chosen stages, print the table, and append to the results if requested."""
    parser = frame.parser("run_stages", __doc__, arms=STAGES)
    parser.add_argument("--file", type=Path, required=True, help="the .h5ad file")
    frame.option(parser, "--batch-size", 64, "cells per minibatch")
    frame.option(parser, "--fetch-factor", 256, "minibatches per fetch")
    frame.option(parser, "--block-size", "chunk", 'rows to read together, or "chunk"')
    options = parser.parse_args(arguments)
    set_cache(options.file, "warm")
    block_size = options.block_size if options.block_size == "chunk" else int(options.block_size)
    setting = Setting(options.file, options.batch_size, options.fetch_factor, block_size)
    rates = [rate for stage in options.only for rate in STAGES[stage].measure(setting)]
    print(table(rates))
    origin = {**machine.origin(PACKAGES), "file": frame.describe_file(options.file)}
    machine.add_records(options.out, ({**origin, **asdict(rate), "fraction": rate.fraction} for rate in rates))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
