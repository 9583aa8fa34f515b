"""``gpuload tune``: the fastest settings for a file on this machine, by timing real reads."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from gpuload import __version__
from gpuload.alignment import check_join
from gpuload.checks import parse_nbytes
from gpuload.cli import advice, settings, text
from gpuload.errors import PlanError
from gpuload.machine import available_memory
from gpuload.program import positive, table
from gpuload.settings import write_settings
from gpuload.types import ITEMSIZES

if TYPE_CHECKING:
    import argparse

    from gpuload.tune import Tuned

MEMORY_SHARE = 0.5
"""Fraction of the available memory that a loader may take, unless --memory is given."""

LEAST_NBYTES = 1_000_000
"""Less memory than any loader takes."""

EPILOG = """\
Candidates that mix too little (by --label, as its values lie in the file), need too much memory or look too slow are
ruled out by planning alone; the rest are timed in turn. The settings file holds keyword arguments for
gpuload.open_loader, and a record of what they were measured on:

  loader = gpuload.open_loader("atlas.h5ad", settings="settings.json")

Arguments given explicitly override the file.

examples:
  gpuload tune atlas.h5ad --label drug --out settings.json
  gpuload tune atlas.h5ad --label drug --memory 8GiB --min-entropy 0.98 --out settings.json
  gpuload tune plate1.h5ad plate2.h5ad --batch-size 512 --output csr --seconds 60 --json
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add this command's options."""
    parser.epilog = EPILOG
    text.add_path_arguments(parser)
    settings.add_join_argument(parser)
    group = parser.add_argument_group("requirements")
    group.add_argument(
        "--memory", metavar="SIZE", help="memory limit for the loader, such as 8GiB (default: half of available memory)"
    )
    text.add_min_entropy_argument(group)
    settings.add_minibatch_arguments(group)
    group.add_argument(
        "--seconds",
        type=positive,
        default=20.0,
        metavar="S",
        help="time for the timing runs, after planning: those that do not fit are left out, but the most promising "
        "settings and the defaults are timed once in any case (default: 20)",
    )
    group.add_argument("--out", metavar="FILE", help="write the settings to this file, as JSON")
    text.add_output_arguments(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Run the command."""
    from gpuload.tune import Wish, tune

    if args.output == "csr" and ITEMSIZES[args.dtype] < 4:
        raise PlanError(f"--dtype {args.dtype} with --output csr: CSR minibatches are float32 or float64; drop one.")
    wish = Wish(
        memory_nbytes=int(MEMORY_SHARE * available_memory())
        if args.memory is None
        else parse_nbytes("memory", args.memory, least=LEAST_NBYTES),
        label=args.label,
        min_entropy=text.min_entropy(args),
        batch_size=args.batch_size,
        layer=args.layer,
        join=check_join(settings.join_of(args)),
        output=args.output,
        dtype=args.dtype,
        device=args.device,
        seconds=args.seconds,
    )
    text.check_outputs([*args.paths, *([args.join] if args.join else [])], args.out)
    text.say_of_compiling(is_quiet=args.quiet)
    with text.Progress(1.0, "timing", is_quiet=args.quiet, unit="s") as progress:
        tuned = tune(args.paths, wish, progress.reach)
    measured = {"gpuload": __version__, **tuned.measured}
    if args.json:
        text.print_json({"settings": tuned.settings, "measured": measured})
    else:
        print(_report(tuned, args.paths, args.out))
    if args.out:  # after printing, so that nothing is lost if it cannot be written
        write_settings(args.out, tuned.settings, text.plain(measured))
    return 0


def _report(tuned: Tuned, paths: list[str], out: str | None) -> str:
    best = tuned.best
    pairs = [
        ("cells/s", text.number(round(best.cells_per_s))),
        ("memory of the loader", f"{text.size(best.memory_nbytes)} at most"),
    ]
    if np.isfinite(best.entropy_bits):
        random = tuned.measured["random_entropy_bits"]
        part = f"{100 * best.entropy_bits / random:.1f} % of true random order's" if random else "one label only"
        pairs.append(("entropy in a minibatch", f"{text.bits(best.entropy_bits)} bits, {part}"))
    header = ("block_size", "fetch_factor", "threads", "prefetch", "memory", "cells/s", "turns")
    rows = [
        (
            f"{t.block_size}{' <-' if t.key == best.key else ''}",
            str(t.fetch_factor),
            str(t.num_threads),
            str(t.prefetch),
            text.size(t.memory_nbytes),
            text.number(round(t.cells_per_s)),
            str(len(t.repeats)),
        )
        for t in tuned.trials
    ]
    listed = ", ".join(f"{name}={value!r}" for name, value in tuned.settings.items())
    source = repr(paths[0]) if len(paths) == 1 else repr(paths)
    call = f"settings={out!r}" if out else listed
    later = advice.of_later_epochs(tuned.measured["memory_cache_nbytes"], available_memory())
    timed = [f"timed: {tuned.measured['timed']}", f"settings: {listed}", *later]
    parts: list[Any] = [", ".join(paths), table(header, rows), text.facts(pairs), "\n".join(timed)]
    return "\n\n".join([*parts, f"  gpuload.open_loader({source}, {call})"])
