"""``gpuload bench``: cells per second through the PyTorch frontend, stage by stage, against what the machine can do."""

from __future__ import annotations

import platform
import resource
import time
from contextlib import closing
from dataclasses import asdict
from itertools import count
from typing import TYPE_CHECKING, Any

import numpy as np

from gpuload.alignment import check_join
from gpuload.cli import bench_cache, settings, text
from gpuload.cli.doctor import version_of
from gpuload.cli.stages import HEADER, MEASURED, Round, rows, stages, together
from gpuload.cli.utilisation import Utilisation
from gpuload.diversity import MinibatchEntropy
from gpuload.errors import PlanError
from gpuload.machine import usable_cores
from gpuload.outlook import Outlooks, label_codes
from gpuload.program import positive, table, whole_number
from gpuload.source import saving
from gpuload.stats import Stats
from gpuload.types import ITEMSIZES

if TYPE_CHECKING:
    import argparse
    from collections.abc import Generator, Iterator

    from numpy.typing import NDArray

    from gpuload.cli.ceilings import Ceilings
    from gpuload.cli.utilisation import Busy
    from gpuload.loader import Loader
    from gpuload.stats import Span
    from gpuload.torch import CellDataset

EPILOG = """\
A warm-up fetch runs first, so that compilation and the first page faults are not counted; then --repeats rounds of
--seconds each. The file soon sits in the page cache; to measure the disk, drop the cache first and use --repeats 1.

Each stage's rate is per thread while the others work. Beside it stands a ceiling, measured on the spot with one thread
and nothing else running: pread of the same byte ranges into a reused buffer; a library decoding chunks of the same
file; writing zeros into a reused buffer. A rate may be above its ceiling: gpuload's own decoders can be faster than the
library, and a buffer that is reused is cleared only where values were written. "all stages at their ceilings" is the
cells per second this would give on all cores. On a GPU, ceilings and the rates of decoding and gathering are not
reported: the host only launches that work.

With --memory-cache or --device-cache, the warm-up is a whole epoch, and what is measured are later ones.

examples:
  gpuload bench atlas.h5ad
  gpuload bench atlas.h5ad --block-size chunk --label donor
  gpuload bench atlas.h5ad --settings settings.json           as gpuload tune has saved them
  gpuload bench atlas.h5ad --output csr --seconds 10 --repeats 5 --json
  gpuload bench atlas.h5ad --stream                           file order, the fastest
  gpuload bench atlas.h5ad --block-size 1                     true random order
  gpuload bench s3://bucket/atlas.h5ad --timeline out.png     a picture of what ran when
  gpuload bench s3://bucket/atlas.h5ad --cache /local/blocks  later epochs from local disk; hits per epoch
  gpuload bench atlas.h5ad --memory-cache 20GiB               later epochs from memory
  gpuload bench atlas.h5ad --label donor --report out.html    a one-page report, to read or share
"""

PACKAGES = ("gpuload", "numpy", "numba", "h5py", "torch")
"""Packages whose versions a page lists."""

LOOK_EVERY = 37
"""Minibatches between checks of what is ready; not a divisor of a fetch's usual length."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add this command's options."""
    parser.epilog = EPILOG
    text.add_path_arguments(parser)
    settings.add_join_argument(parser)
    group = parser.add_argument_group("measurement")
    group.add_argument("--seconds", type=positive, default=3.0, metavar="S", help="seconds per repeat (default: 3)")
    group.add_argument(
        "--repeats", type=whole_number, default=3, metavar="N", help="repeats; the median is reported (default: 3)"
    )
    group.add_argument(
        "--step",
        type=positive,
        metavar="S",
        help="simulated training time per minibatch, in seconds; minibatches in host memory are first copied to a GPU, "
        "if there is one",
    )
    group.add_argument(
        "--timeline",
        type=text.picture,
        metavar="FILE.png",
        help="plot what ran when in the last repeat: read, decode, take, wait, step, minibatches, GPUs",
    )
    bench_cache.add_arguments(group)
    group.add_argument(
        "--report",
        metavar="FILE.html",
        help="write a one-page report: stages against ceilings, memory, timeline, verdict, versions",
    )
    settings.add_arguments(parser)
    text.add_output_arguments(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Run the command."""
    settings.settle(args)
    also = [file for file in (args.join, args.genes, args.settings) if isinstance(file, str)]
    text.check_outputs([*args.paths, *also], args.timeline, args.report)
    if args.timeline or args.report:
        from gpuload.cli.figure import check_matplotlib

        check_matplotlib("the timeline")
    result, spans, gpus = bench(args)
    if args.json:
        text.print_json(result)
    else:
        print(_report(result))
    _draw(args, result, spans, gpus)  # after printing, so that nothing is lost if it cannot be written
    if not args.json:
        text.print_saved(args.timeline, args.report)
    return 0


def bench(args: argparse.Namespace) -> tuple[dict[str, Any], list[Span], list[Busy]]:
    """Measure, and return all figures and the data for a timeline."""
    from gpuload.torch import CellDataset

    opened = time.perf_counter()
    with bench_cache.opened(args) as store, settings.open_loader(args, store) as loader:
        if not len(loader):
            raise PlanError(
                f"{args.paths[0]}: there is no minibatch to measure; it has {text.count(loader.n_obs, 'cell')}."
            )
        codes = label_codes(loader.store.obs[args.label], f"--label {args.label}") if args.label else np.empty(0)
        entropy = MinibatchEntropy(int(codes.max()) + 1) if args.label else None
        text.say_of_compiling(is_quiet=args.quiet)
        epochs: list[dict[str, Any]] = []
        batches = _endless(CellDataset(loader), loader, epochs)
        next(batches)
        first_batch_s = time.perf_counter() - opened
        ahead: list[dict[str, int]] = []
        with Utilisation() as busy:
            rounds = _rounds(args, loader, batches, entropy, codes, ahead)
        batches.close()  # so that the epoch in progress is recorded too
        parts, hit_ratio = loader.memory(), loader.hit_ratio
        waits, cores = loader.stats.waits(), usable_cores()
        threads, whole = args.num_threads or cores, together(rounds)
        verdict = Stats.verdict(whole.stats, whole.seconds, threads)
        spans = loader.stats.take_spans()
        batch_nbytes = loader.batch_size * loader.n_vars * ITEMSIZES[loader.dtype]
        taken: dict[str, Any] = {"device": loader.device, "io_mode": loader.io_mode, "n_vars": loader.n_vars}
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024  # before measuring the ceilings takes memory
    ceilings, random_bits = _ceilings_and_random_entropy(args, batch_nbytes, taken["device"])
    rates = [r.cells_per_s for r in rounds]
    row_nbytes = batch_nbytes / loader.batch_size if args.output == "dense" else float("nan")
    mix = None if entropy is None else {"mean": entropy.mean, "sd": entropy.sd, "true_random": random_bits}
    result = {
        "paths": args.paths,
        **taken,
        **settings.as_dict(args),
        "first_batch_s": first_batch_s,
        "cells_per_s": {"median": float(np.median(rates)), "min": min(rates), "max": max(rates), "repeats": rates},
        "stages": stages(  # no more threads run at once than there are cores
            whole, ceilings, row_nbytes, min(threads, cores), is_on_gpu=taken["device"] != "cpu"
        ),
        "ceilings_bytes_per_s": asdict(ceilings),
        "waits_s": waits,
        "ahead": {name: float(np.mean([some[name] for some in ahead])) for name in ahead[0]},
        "verdict": verdict,
        "label": args.label,
        "entropy_bits": mix,
        "peak_memory_nbytes": peak,
        "memory_parts_nbytes": parts,
    }
    if store is not None:
        result["cache"] = {
            "folder": args.cache,
            "budget": args.cache_budget,
            "hit_ratio": hit_ratio,
            "epochs": epochs,
        }
    gpus = [gpu for gpu in busy.gpus if gpu.percent]
    if gpus:
        result["gpus"] = [gpu.as_dict() for gpu in gpus]
    return result, spans, gpus


def _draw(args: argparse.Namespace, result: dict[str, Any], spans: list[Span], gpus: list[Busy]) -> None:
    """Draw the timeline and write the page, if requested."""
    if not args.timeline and not args.report:
        return
    from gpuload.cli import page
    from gpuload.cli.figure import draw_timeline

    forms = ([text.form_of(args.timeline)] if args.timeline else []) + (["png"] if args.report else [])
    pictures = {form: draw_timeline(spans, result["verdict"], gpus, form=form) for form in set(forms)}
    if args.timeline:
        with saving(args.timeline) as file:
            file.write(pictures[forms[0]])
    if args.report:
        found = {name: said for name in PACKAGES if (said := version_of(name))}
        versions = {"python": platform.python_version(), **found}
        with saving(args.report) as file:
            file.write(page.page(result, versions, pictures["png"]).encode())


def _endless(dataset: CellDataset, loader: Loader, epochs: list[dict[str, Any]]) -> Generator[Any, None, None]:
    """Yield the minibatches of all epochs; of each note what a cache had of it, when it ends or is left."""
    for number in count():
        local, missed = loader.cache_nbytes or (0, 0)
        is_whole = False
        try:
            yield from dataset
            is_whole = True
        finally:
            now_local, now_missed = loader.cache_nbytes or (0, 0)
            epochs.append(bench_cache.epoch_of(number, now_local - local, now_missed - missed, is_whole=is_whole))


def _rounds(
    args: argparse.Namespace,
    loader: Loader,
    batches: Iterator[Any],
    entropy: MinibatchEntropy | None,
    codes: NDArray[Any],
    ahead: list[dict[str, int]],
) -> list[Round]:
    """Consume what is not counted, then measure each round; now and then, record what is ready ahead of time.

    That is one fetch; or a whole epoch if chunks are kept, so that the rounds are of later ones.
    """
    from gpuload.torch import gpu_for

    n_before = len(loader) if _keeps(args) else min(args.fetch_factor, len(loader))
    with text.Progress(n_before, "warming up", is_quiet=args.quiet, unit="minibatch") as progress:
        for number in range(n_before):
            next(batches)
            progress.reach(number + 1)
    rounds, n_batches, gpu = [], 0, gpu_for(loader) if args.step else None
    n_whole = min(loader.batch_size, loader.n_obs)
    with text.Progress(args.repeats * args.seconds, "measuring", is_quiet=args.quiet, unit="s") as progress:
        for number in range(args.repeats):
            if number == 0:
                loader.stats.reset()  # the warm-up's waits are not those of the measurement
            if (args.timeline or args.report) and number == args.repeats - 1:
                loader.stats.keep_spans()
            before, start, elapsed = loader.stats.as_dict(), time.perf_counter(), 0.0
            while elapsed < args.seconds:  # once at least
                if n_batches % LOOK_EVERY == 0:  # checking each time would slow down what is measured
                    ahead.append(loader.queues())
                n_batches += 1
                batch = next(batches)
                if entropy is not None and len(batch["rows"]) == n_whole:
                    entropy.add(codes[batch["rows"].numpy()])
                if args.step:
                    _step(args.step, loader.stats, batch["X"], gpu)
                elapsed = time.perf_counter() - start
                progress.reach(number * args.seconds + elapsed)
            after = loader.stats.as_dict()
            rounds.append(Round(elapsed, {k: after[k] - before[k] for k in MEASURED}))
    return rounds


def _keeps(args: argparse.Namespace) -> bool:
    """Return whether chunks are kept in memory, or on a GPU, for later epochs."""
    return args.memory_cache is not None or args.device_cache is not None


def _step(seconds: float, stats: Stats, X: Any, gpu: str | None) -> None:
    """Act as a training step: move the minibatch to the model's device, and take time."""
    number = stats.n_batches - 1
    if gpu is not None:
        with stats.noted("to_device_s", batch=number):
            X.to(gpu)
    with stats.noted("step_s", batch=number):
        time.sleep(seconds)


def _ceilings_and_random_entropy(args: argparse.Namespace, batch_nbytes: int, device: str) -> tuple[Ceilings, float]:
    """Measure the ceilings on the benchmark's own fetches; compute the label's entropy in true random order."""
    from gpuload.cli.ceilings import Ceilings, measure
    from gpuload.formats import open_store
    from gpuload.plan import Plan
    from gpuload.sampling import InOrder

    labels = (args.label,) if args.label else ()
    with closing(
        open_store(args.paths, layer=args.layer, obs=labels, join=check_join(settings.join_of(args)))
    ) as store:
        outlooks = Outlooks(store, args.batch_size, args.label)
        if device != "cpu":  # the host threads' rates are not a GPU's
            return Ceilings(float("nan"), float("nan"), float("nan")), outlooks.random_bits
        strategy = InOrder(store.file_rows) if args.stream else outlooks.shuffle(args.block_size)
        plan = Plan(strategy, args.batch_size, args.fetch_factor, args.seed)
        recipes = [store.recipe(plan.fetch(i).ranges) for i in range(min(2, plan.n_fetches))]
        return measure(recipes, batch_nbytes), outlooks.random_bits


def _report(result: dict[str, Any]) -> str:
    found, entropy, rates, ahead = (result[key] for key in ("stages", "entropy_bits", "cells_per_s", "ahead"))
    median, low, high = (text.number(round(rates[key])) for key in ("median", "min", "max"))
    pairs = [("end to end", f"{median} cells/s (median of {len(rates['repeats'])}, {low} to {high})")]
    if entropy is not None:
        mean, sd, random = (text.bits(entropy[key]) for key in ("mean", "sd", "true_random"))
        pairs.append((f"{result['label']} entropy", f"{mean} +- {sd} bits; true random order {random}"))
    partial, kept = text.share(found["chunks_inflated_in_part"]), found["chunks_kept"]
    ready = (f"{ahead[f'{name}_ready']:.1f} of {ahead[name]:.1f} {name}" for name in ("minibatches", "fetches"))
    pairs += [
        ("all stages at their ceilings", _bound(found)),
        (
            "first minibatch",
            f"{result['first_batch_s']:.2f} s after opening (with compiling, where it was the first time)",
        ),
        (
            "decoded per cell",
            f"{text.size(found['decoded_nbytes_per_cell'])}; {partial} of chunks only as far as needed",
        ),
        ("peak memory", _memory(result["peak_memory_nbytes"], result["memory_parts_nbytes"], result["device"])),
        ("waits for a minibatch", ", ".join(f"{name[:-2]} {1e3 * s:.2f} ms" for name, s in result["waits_s"].items())),
        ("ready when it is asked for", f"{' and '.join(ready)} that are under way (means)"),
        *([("cache", bench_cache.told(result["cache"]))] if "cache" in result else []),
        *([("kept by an earlier epoch", f"{text.share(kept)} of chunks")] if kept else []),
        ("verdict", result["verdict"]),
        *((gpu["name"], _busy(gpu)) for gpu in result.get("gpus", ())),
        ("path", f"{result['device']}, {result['io_mode']}"),
    ]
    note = _note(result["paths"], result["device"], has_kept=kept > 0) + _above(found)
    return "\n\n".join([", ".join(result["paths"]), text.facts(pairs), table(HEADER, rows(found)), note])


_NOTE = """\
  plan and wait are seconds of the training thread (per second); the others are work of native threads."""

_NOTE_OF_FILES = """
  The read ceiling is that of the page cache, where the file lies by now."""

_NOTE_OF_KEPT = """
  The seconds of decode include those of copying chunks that were kept."""


_NOTE_OF_A_GPU = """\
  These are seconds of the host's threads: a GPU's work they launch or wait for. What the GPU could do at most is
  measured by benchmarks/run_gpu.py of the source."""


def _note(paths: list[str], device: str, *, has_kept: bool = False) -> str:
    """Return notes needed to read the table; files on disk are in the page cache, objects of a remote are not."""
    if device != "cpu":
        return _NOTE_OF_A_GPU
    of_files = "" if any("://" in path for path in paths) else _NOTE_OF_FILES
    return _NOTE + of_files + (_NOTE_OF_KEPT if has_kept else "")


_WHY_ABOVE = {
    "read": "Above its ceiling: read; the two were measured at different moments.",
    "decode": "Above its ceiling: decode; that is a library's rate, and gpuload's own decoder is faster on this file.",
    "take_rows": "Above its ceiling: take_rows; that is writing all values, and a reused buffer is cleared only where "
    "values were written.",
}
"""Notes on stages whose rate is above their ceiling."""


def _above(found: dict[str, Any]) -> str:
    return "".join(f"\n  {why}" for name, why in _WHY_ABOVE.items() if found[name]["fraction"] > 1)


def _memory(peak: float, parts: dict[str, int], device: str) -> str:
    named = ", ".join(f"{name} {text.size(nbytes)}" for name, nbytes in parts.items() if nbytes or device == "cpu")
    if device != "cpu":
        return f"{text.size(peak)} of the host; the loader's, on {device} but for metadata: {named}"
    return f"{text.size(peak)}, of it {named}; the rest is Python and its packages"


def _busy(gpu: dict[str, Any]) -> str:
    return (
        f"busy {gpu['mean_percent'] / 100:.0%} of the time; idle at {gpu['idle_share']:.0%} of {gpu['n_samples']} looks"
    )


def _bound(found: dict[str, Any]) -> str:
    bound = found["at_ceilings_cells_per_s"]
    if not np.isfinite(bound):
        return "-"
    reached = f"{text.share(found['fraction_of_ceilings'])} of it reached"
    if found["fraction_of_ceilings"] > 1 and _above(found):
        reached += ", as stages are above their ceilings (see below)"
    return f"{text.number(round(bound))} cells/s on {text.count(found['threads'], 'thread')}; {reached}"
