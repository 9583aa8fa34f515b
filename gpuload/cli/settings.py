"""The settings of `gpuload.open_loader` as options of a command."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import gpuload
from gpuload.alignment import JOINS
from gpuload.cli import text
from gpuload.errors import PlanError, ReadError
from gpuload.plan import DEFAULT_BLOCK_SIZE
from gpuload.program import GENES, positive, read_genes, read_names, whole_number
from gpuload.settings import known_settings, read_settings

if TYPE_CHECKING:
    import argparse

    from gpuload.cache import SampleStore
    from gpuload.loader import Loader

_NAMES = (
    "batch_size",
    "block_size",
    "fetch_factor",
    "seed",
    "drop_last",
    "layer",
    "output",
    "dtype",
    "device",
    "prefetch",
    "num_threads",
    "verify",
    "memory_cache",
    "device_memory",
    "device_cache",
    "host_decode",
    "io",
)

_ALSO = ("stream", "genes", "join", "target_sum", "log1p", "downsample")
"""Options that say a setting in another way."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add an option for every setting of a loader, and one for a settings file; `settle` must follow the parsing."""
    group = parser.add_argument_group("loader")
    group.add_argument(
        "--settings", metavar="FILE", help="settings for what no option here says, as saved by gpuload tune --out FILE"
    )
    add_minibatch_arguments(group)
    group.add_argument(
        "--block-size",
        type=text.block_size,
        default=DEFAULT_BLOCK_SIZE,
        metavar="N",
        help=(
            "consecutive cells to read together: 1 for true random order, 'chunk' for the file's own chunks, "
            f"'2 chunks' for pairs of them (default: {DEFAULT_BLOCK_SIZE})"
        ),
    )
    group.add_argument(
        "--fetch-factor",
        type=whole_number,
        default=256,
        metavar="N",
        help="minibatches per fetch, held in memory together (default: 256)",
    )
    group.add_argument("--stream", action="store_true", help="read in file order, without shuffling")
    group.add_argument("--seed", type=int, default=0, metavar="N", help="random seed of the order (default: 0)")
    group.add_argument("--drop-last", action="store_true", help="drop a short last minibatch")
    group.add_argument("--genes", metavar="GENES", help=f"load only {GENES} (default: all)")
    group.add_argument("--target-sum", type=positive, metavar="X", help="scale the values of each cell to this total")
    group.add_argument(
        "--log1p",
        action="store_true",
        help="apply log(1 + x) to the values, and only that: gpuload.Transform(log1p=True) scales, too",
    )
    group.add_argument(
        "--downsample",
        type=positive,
        metavar="X",
        help="first, draw each count: up to 1, molecules are kept with this probability; above, so many of each cell",
    )
    group.add_argument(
        "--prefetch", type=whole_number, default=2, metavar="N", help="fetches to load ahead (default: 2)"
    )
    group.add_argument(
        "--num-threads", type=whole_number, metavar="N", help="native threads (default: one per usable core)"
    )
    group.add_argument(
        "--memory-cache",
        metavar="SIZE",
        help="host memory to keep decoded chunks in for later epochs, such as 20GiB; with a GPU, those without room in "
        "--device-cache (default: none)",
    )
    group.add_argument("--device-memory", metavar="SIZE", help="GPU memory limit, such as 20GiB (default: no limit)")
    group.add_argument(
        "--io",
        choices=("auto", "kvikio", "pinned"),
        default="auto",
        help="how data reaches the GPU (default: auto, whichever is faster)",
    )
    group.add_argument(
        "--device-cache",
        metavar="SIZE",
        help="GPU memory, within --device-memory, to cache stored chunks in (default: none)",
    )
    group.add_argument(
        "--host-decode",
        type=float,
        default=0.0,
        metavar="X",
        help="share of the chunks, from 0 to 1, that CPU cores decode in place of the GPU (default: 0)",
    )
    group.add_argument(
        "--verify",
        choices=("once", "always", "never"),
        default="once",
        help="when to verify checksums (default: once)",
    )
    defaults = {name: parser.get_default(name) for name in (*_NAMES, *_ALSO)}
    parser.set_defaults(**dict.fromkeys(defaults), defaults=defaults)  # None: not given


def settle(args: argparse.Namespace) -> None:
    """Complete the options that were not given, from the settings file if there is one, else by their defaults.

    Raises
    ------
    ReadError
        The settings file cannot be read.
    PlanError
        It is not one, or has a setting for which there is no option.
    """
    saved = read_settings(args.settings, known_settings(gpuload.open_loader))
    for name in saved:
        if name not in (*_NAMES, "shuffle", "genes", "join"):
            raise PlanError(
                f"--settings {args.settings}: gpuload {args.command} has no option for {name!r}; leave it out."
            )
    if "shuffle" in saved:
        saved["stream"] = not saved.pop("shuffle")
    for name, default in args.defaults.items():
        if getattr(args, name) is None:
            setattr(args, name, saved.get(name, default))


def add_minibatch_arguments(group: argparse._ActionsContainer) -> None:
    """Add the options for a minibatch's form and device."""
    add_batch_size_argument(group)
    group.add_argument("--output", choices=("dense", "csr"), default="dense", help="minibatch format (default: dense)")
    group.add_argument(
        "--dtype",
        choices=("float32", "float64", "float16", "bfloat16"),
        default="float32",
        help="data type of minibatches; of CSR ones, float32 or float64 (default: float32)",
    )
    group.add_argument("--device", default="auto", help="cpu, cuda:0 or auto (default: auto)")


def add_batch_size_argument(group: argparse._ActionsContainer) -> None:
    """Add the option for the number of cells in a minibatch."""
    group.add_argument(
        "--batch-size", type=whole_number, default=64, metavar="N", help="cells per minibatch (default: 64)"
    )


def add_join_argument(parser: argparse.ArgumentParser) -> None:
    """Add the option for files whose genes differ."""
    parser.add_argument(
        "--join",
        metavar="HOW",
        help="for files whose genes differ: inner (genes in all), outer (genes in any) or a text file, one gene a line",
    )


def join_of(args: argparse.Namespace) -> str | list[str] | None:
    """Return ``join`` as `gpuload.open_loader` takes it.

    Raises
    ------
    ReadError
        The file of genes cannot be read.
    """
    join: str | list[str] | None = args.join
    if join is None or isinstance(join, list) or join in JOINS:
        return join
    try:
        return read_names(join)
    except ReadError as error:
        raise ReadError(f"--join {join}: expected inner, outer or a text file of genes; {error}") from error


def open_loader(args: argparse.Namespace, cache: SampleStore | None = None) -> Loader:
    """Open the files with the settings from the command line, through a cache if there is one."""
    arithmetic = {"target_sum": args.target_sum, "log1p": args.log1p, "downsample": args.downsample}
    transform = gpuload.Transform(**arithmetic) if any(arithmetic.values()) else None
    return gpuload.open_loader(
        args.paths,
        shuffle=not args.stream,
        obs=(args.label,) if args.label else (),
        genes=read_genes(args.genes) if isinstance(args.genes, str) else args.genes,
        join=join_of(args),
        transform=transform,
        cache=cache,
        **{name: getattr(args, name) for name in _NAMES},
    )


def as_dict(args: argparse.Namespace) -> dict[str, Any]:
    """Return the settings by name, as a record."""
    names = {name: getattr(args, name) for name in _NAMES if name != "device"}
    return {
        **names,
        "shuffle": not args.stream,
        "genes": args.genes,
        "join": args.join,
        "target_sum": args.target_sum,
        "log1p": args.log1p,
        "downsample": args.downsample,
    }
