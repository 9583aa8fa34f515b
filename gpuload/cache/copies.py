"""Copies of samples on the local disk: find them, keep one that was read anyway, drop one that is damaged."""

from __future__ import annotations

import logging
from itertools import takewhile
from typing import TYPE_CHECKING

from gpuload.cache.catalogue import content_name, cost_of
from gpuload.cache.files import DISK_FULL, Download, usable
from gpuload.cache.reading import Sample
from gpuload.remote.objects import RemoteObject

if TYPE_CHECKING:
    from collections.abc import Iterable

    import numpy as np
    from numpy.typing import NDArray

    from gpuload.cache.files import Local

_log = logging.getLogger("gpuload.cache")


class Copies:
    """The local copies of a store."""

    def __init__(self, local: Local) -> None:
        self._folders, self._catalogue, self._settings = local.folders, local.catalogue, local.settings
        self._lease = local.lease

    def samples(self, ids: NDArray[np.int64]) -> list[Sample]:
        """Return the samples to read, by file numbers of a snapshot."""
        return [
            Sample(key_id, key, etag, nbytes, self._path(name, RemoteObject(key, nbytes, etag)), crc, file_id)
            for key_id, key, etag, nbytes, name, crc, file_id in self._catalogue.copies(ids)
        ]

    def find(self, wanted: RemoteObject) -> Sample | None:
        """Return the local copy of an object, if there is one with this content."""
        found = self._catalogue.find_key(wanted.key, wanted.etag)
        if found is None:
            return None
        key_id, name, crc, file_id = found
        path = self._path(name, wanted)
        return None if path is None else Sample(key_id, wanted.key, wanted.etag, wanted.nbytes, path, crc, file_id)

    def _path(self, name: str | None, wanted: RemoteObject) -> str | None:
        """Return the path of a copy; None if there is none, or it is of another object, as in a damaged catalogue."""
        return self._folders.path(name) if name is not None and name.startswith(content_name(wanted)) else None

    def has_room(self, nbytes: int) -> bool:
        """Return whether the budget and the disk have room for so many more bytes."""
        has_disk = self._settings.min_free + nbytes <= self._folders.free_nbytes()
        return has_disk and self._catalogue.held_nbytes + cost_of(nbytes) <= self._settings.budget

    def keep(self, wanted: RemoteObject, whole: NDArray[np.uint8]) -> str | None:
        """Keep an object that was read from the remote anyway; return its path, or None if there is no room for it."""
        if not self.has_room(wanted.nbytes):
            return None
        file = self._catalogue.reserve_known(wanted, self._lease, self._settings.budget)
        if file is None:
            found = self.find(wanted)
            return None if found is None else found.path
        try:
            download = Download(self._folders.tmp_path(file.name), wanted)
            try:
                download.add(whole)
                download.finish()
            finally:
                download.close()
            self._folders.publish(file.name)
            self._catalogue.publish(file, self._lease, download.crc)
        except BaseException as error:
            self._folders.remove(file.name)
            self._catalogue.give_up(file, self._lease)
            if isinstance(error, OSError) and error.errno in DISK_FULL:
                return None
            raise
        return self._folders.path(file.name)

    def drop(self, sample: Sample, fault: str) -> None:
        """Remove a damaged local copy; it will be downloaded again."""
        _log.warning("%s: its local copy is unusable: %s; reading from the remote", sample.key, fault)
        file = self._catalogue.take_leaving(sample.file_id, self._lease, is_damaged=True)
        if file is None:
            return
        try:
            self._folders.remove(file.name)
        except OSError as error:
            _log.warning("%s: it cannot be removed, and takes up room: %s", self._folders.path(file.name), error)
        else:
            self._catalogue.let_go(file, is_evicted=False)

    def others(self, first: str, stop: str, etag: str) -> list[tuple[int, str]]:
        """Return the numbers and keys of the copies with another ETag, of the keys from `first` to before `stop`."""
        return self._catalogue.other_copies(first, stop, etag)

    def evict(self, file_ids: Iterable[int]) -> None:
        """Remove copies, except those that an epoch needs or that the remote has no more."""
        for file_id in file_ids:
            file = self._catalogue.take_leaving(file_id, self._lease)
            if file is not None:
                self._folders.remove(file.name)
                self._catalogue.let_go(file)

    def shrink(self) -> None:
        """Remove the oldest copies if there are more than the budget allows: it may have been larger before."""
        if self._is_above_budget():
            oldest = takewhile(lambda _: self._is_above_budget(), [file.id for file in self._catalogue.published()])
            with usable(self._folders.root):
                self.evict(oldest)

    def _is_above_budget(self) -> bool:
        return self._catalogue.held_nbytes > self._settings.budget
