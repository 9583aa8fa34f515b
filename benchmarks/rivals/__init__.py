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
        The files read instead of ``job.path``, if any; they are brought into the stated cache state.

A module must do no more and no less work than the rival's users would: a minibatch is the values as float32 in the
requested form, the label's codes and the row numbers.
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
        """Release files, threads and memory."""
