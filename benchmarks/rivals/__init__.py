"""One module per rival. Each is run in a process of its own, so one may pull in what another cannot bear.

A rival is a module with

    PACKAGES
        Names of the packages that it needs, which are also those whose versions are recorded.
    start(job) -> Loading
        Open the loader on ``job.path`` with ``job.arm.settings``; this is where the clock of the first batch starts.
    warm_up(job), optional
        Compile whatever is compiled at first use, on a toy; not timed.
    prepare(job) -> dict, optional
        Make what the rival needs of the file once (a converted store, in ``job.work_dir``) and return what that took.
        Must return quickly where it is there already.
    stored(job) -> list of Path, optional
        The files that it reads where that is not ``job.path``; they are brought into the stated state of the cache.

It must not do work for the rival that the rival's users would not do, nor less: a minibatch is the values as float32 in
the wanted form, the label's codes and the row numbers.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping


class Loading(Protocol):
    """A rival's loader, open on a file."""

    io_mode: str
    """How bytes come from the disk."""

    def epoch(self) -> Iterator[Mapping[str, Any]]:
        """Iterate over the minibatches of the next epoch: ``X``, ``label`` and ``rows`` (row numbers in the file)."""

    def close(self) -> None:
        """Give back files, threads and memory."""
