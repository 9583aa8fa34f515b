"""One module per rival. Each runs in its own process, so that their dependencies may conflict.

A rival is a module with

    PACKAGES
        Names of the packages that it needs, which are also those whose versions are recorded.
    start(job) -> Loading
        Open the loader on ``job.path`` with ``job.arm.settings``; this is where the clock of the first batch starts.
    warm_up(job), optional
        Compile whatever is compiled at first use, on a toy; not timed.
    prepare(job) -> dict, optional
        Build once what the rival needs of the file (a converted store, in ``job.work_dir``) and return its cost.
        Must return quickly if it exists already.
    stored(job) -> list of Path, optional
        The files and folders read instead of ``job.path``, if any; they are brought into the stated cache state.

A module must do no more and no less work than the rival's users would: a minibatch is the values as float32 in the
requested form, the label's codes and the row numbers.
"""

from __future__ import annotations

import json
import shutil
import time
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping
    from pathlib import Path

    from benchmarks.job import Job


class Loading(Protocol):
    """A rival's loader, open on a file."""

    io_mode: str
    """How bytes come from the disk."""

    def epoch(self) -> Iterator[Mapping[str, Any]]:
        """Iterate over the minibatches of the next epoch: ``X``, ``label`` and ``rows`` (row numbers in the file)."""

    def close(self) -> None:
        """Release files, threads and memory."""


def store_path(job: Job, name: str) -> Path:
    """Return where a store of the job's file is, or will be."""
    return job.work_dir / f"{job.path.stem}-{name}"


def is_made(store: Path) -> bool:
    """Return whether there is a record that a store is whole."""
    return _record(store).exists()


def make_once(store: Path, make: Callable[[], object]) -> dict[str, Any]:
    """Make a store, unless it is there and whole; return the seconds that this took, and its bytes."""
    if not is_made(store):
        shutil.rmtree(store, ignore_errors=True)  # the making of it was interrupted
        start = time.perf_counter()
        make()
        seconds = time.perf_counter() - start
        nbytes = sum(part.stat().st_size for part in store.rglob("*") if part.is_file())
        _record(store).write_text(json.dumps({"conversion_s": seconds, "store_nbytes": nbytes}))
    taken: dict[str, Any] = json.loads(_record(store).read_text())
    return taken


def run_epoch(loading: Loading) -> None:
    """Run an epoch of a toy, so that whatever is compiled at first use is, and close it."""
    for _ in loading.epoch():
        pass
    loading.close()


def _record(store: Path) -> Path:
    return store.with_name(f"{store.name}.json")
