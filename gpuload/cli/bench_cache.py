"""``--cache`` of ``gpuload bench``: a store in front of addresses, and its hit ratio in each epoch."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from gpuload.checks import parse_nbytes
from gpuload.cli import text
from gpuload.errors import PlanError
from gpuload.remote.hub import split_address

if TYPE_CHECKING:
    import argparse
    from collections.abc import Iterator, Sequence

    from gpuload.cache import SampleStore

_MOST_TOLD = 6
"""Epochs listed in text: the first ones, and the last."""


def epoch_of(number: int, local_nbytes: int, missed_nbytes: int, *, is_whole: bool) -> dict[str, Any]:
    """Return the record of an epoch: how much of it came from the cache, and whether it was read to its end."""
    nbytes = local_nbytes + missed_nbytes
    ratio = local_nbytes / nbytes if nbytes else 1.0
    return {"epoch": number, "hit_ratio": ratio, "nbytes": nbytes, "is_whole": is_whole}


def add_arguments(group: argparse._ArgumentGroup) -> None:
    """Add the options."""
    group.add_argument(
        "--cache",
        metavar="DIR",
        help="read remote files through a cache in this folder, and report its hits per epoch",
    )
    group.add_argument("--cache-budget", metavar="SIZE", help="size limit of that cache (default: 200GiB)")


@contextmanager
def opened(args: argparse.Namespace) -> Iterator[SampleStore | None]:
    """Open the store that the options ask for, over the bucket, server or repository of all paths; None without one.

    Raises
    ------
    PlanError
        A path is not an address, the paths are not all in one bucket, server or repository, the budget is not a size,
        or there is no folder for the cache.
    """
    if args.cache is None:
        if args.cache_budget is not None:
            raise PlanError(f"--cache-budget {args.cache_budget}: there is no cache; name its folder with --cache.")
        yield None
        return
    from gpuload.cache import BlockRemote, SampleStore
    from gpuload.remote import open_remote

    budget = parse_nbytes("--cache-budget", args.cache_budget or "200GiB", least=0)
    blocks = BlockRemote(open_remote(_root(args.paths)))
    with SampleStore(args.cache, blocks, budget, n_processes=0, fetch=False) as store:
        yield store


def _root(paths: Sequence[str]) -> str:
    near = [path for path in paths if "://" not in path or path.startswith("file://")]
    if near:
        raise PlanError(
            f"--cache: it is for addresses such as s3://bucket/atlas.h5ad, but {near[0]} is not one; leave it out."
        )
    roots = list(dict.fromkeys(_root_of_one(path) for path in paths))
    if len(roots) > 1:
        raise PlanError(f"--cache: {roots[0]} and {roots[1]} cannot share one; measure the paths of each separately.")
    return roots[0]


def _root_of_one(path: str) -> str:
    """Return the bucket, server or repository that an address leads to."""
    return split_address(path)[0] if path.startswith("hf://") else "/".join(path.split("/")[:3])


def told(cache: dict[str, Any]) -> str:
    """Return a text on the hits of the epochs."""
    epochs = cache["epochs"]
    skipped = len(epochs) - _MOST_TOLD
    kept = epochs if skipped <= 0 else [*epochs[: _MOST_TOLD - 1], epochs[-1]]
    words = [f"epoch {e['epoch']}{'' if e['is_whole'] else ' (part)'} {text.share(e['hit_ratio'])}" for e in kept]
    if skipped > 0:
        words.insert(_MOST_TOLD - 1, "...")
    return f"{text.share(cache['hit_ratio'])} of the bytes from {cache['folder']}: {', '.join(words)}"
