"""Tell whether the samples that an epoch waits for have room: in the budget, and on the disk.

Two things are certain, and errors: the budget is too small even for the smallest samples; or it is full, and nobody
uses what is there, so that nothing may be evicted. All else may pass, so it is only told.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from gpuload.errors import ReadError

if TYPE_CHECKING:
    from gpuload.cache.files import Local

_LOOK_S = 1.0
"""Time between looks: one goes through all rows."""

_SURE_S = 5.0
"""How long a full store must stay as it is before it counts as one in which nothing happens any more."""


class Room:
    """The room of a store that downloads, as seen by one who waits for samples."""

    def __init__(self, local: Local) -> None:
        self._folders, self._catalogue, self._settings = local.folders, local.catalogue, local.settings
        self._look_at = 0.0
        self._was_listed = False
        self._why = ""
        self._full: tuple[Any, ...] | None = None
        self._full_since = 0.0

    def check(self, min_samples: int, *, is_listed: bool) -> str:
        """Return why `min_samples` may be late, as far as that is for want of room, or nothing.

        Raises
        ------
        ReadError
            There will never be room for so many.
        """
        now = time.monotonic()
        if now < self._look_at and is_listed == self._was_listed:
            return self._why
        self._was_listed = is_listed
        if is_listed:
            self._check_least(min_samples)
            self._check_full(min_samples, now)
        else:  # one that fits may still be found
            self._full = None
        self._why = self._found()
        self._look_at = time.monotonic() + _LOOK_S
        return self._why

    def _check_least(self, min_samples: int) -> None:
        """Raise if not even the smallest samples have room."""
        budget, min_free = self._settings.budget, self._settings.min_free
        disk_nbytes = self._folders.disk_nbytes()
        n = self._catalogue.n_that_fit(min(budget, disk_nbytes - min_free), min_samples)
        if n < min_samples:
            limit = (
                f"budget={budget} bytes"
                if budget <= disk_nbytes - min_free
                else f"min_free={min_free} bytes, on a disk of {disk_nbytes} bytes,"
            )
            raise ReadError(
                f"min_samples={min_samples}: {limit} leaves room for only {n} samples, even if they are the smallest; "
                "raise the budget or lower min_free, or use fewer."
            )

    def _check_full(self, min_samples: int, now: float) -> None:
        """Raise if the budget has been full for some time, and nothing that is here may be evicted or is in use."""
        full = self._catalogue.full_and_unused(self._settings.budget, self._settings.min_visits)
        if full is None or full != self._full:
            self._full, self._full_since = full, now
        elif now - self._full_since >= _SURE_S:
            raise ReadError(
                f"min_samples={min_samples}: budget={self._settings.budget} bytes is full with {full[0]} samples. None "
                f"may be evicted, as they were used fewer than min_visits={self._settings.min_visits} times or are "
                "gone from the remote, and no epoch is running; raise the budget, or use fewer."
            )

    def _found(self) -> str:
        lacking = self._settings.min_free - self._folders.free_nbytes()
        if lacking > 0:
            return f"the disk has {lacking} bytes less free than min_free={self._settings.min_free}"
        if self._catalogue.wants_room():
            return f"budget={self._settings.budget} bytes is full, and nothing may be evicted now"
        return ""
