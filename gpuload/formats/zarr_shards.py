"""Shards of a zarr array: find the chunks in them by their indices, which are read many at a time, or kept.

A chunk marked absent in its shard is the fill value; one beyond the array's edge is ignored; all others must lie in the
shard. What was kept from an earlier opening is of the same objects with the same ETags, or it is not used.

References
----------
.. [1] ZEP 2, "Sharding codec" (zarr-specs, codecs/sharding-indexed, version 1.0).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from hashlib import blake2b
from typing import TYPE_CHECKING

import numpy as np

from gpuload.backends.native.checksums import crc32c
from gpuload.backends.reading import read_each
from gpuload.errors import CorruptDataError, ReadError
from gpuload.formats.arrays import RESTORE
from gpuload.remote.source import RemoteSource

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from gpuload.formats.index import Index
    from gpuload.formats.zarr_spec import Spec
    from gpuload.types import Source

ABSENT = np.uint64(0xFFFF_FFFF_FFFF_FFFF)
"""Both numbers of a chunk that is absent, in the index of a shard."""


@dataclass(frozen=True, slots=True, eq=False)
class Shards:
    """The shards of an array that have a file.

    Attributes
    ----------
    place, first, size : (n, n_dims), (n,) and (n,) int64
        Grid position, first byte and size of each shard.
    per_file, grid
        Chunks along each axis of a shard, and of the array.
    """

    source: Source
    name: str
    spec: Spec
    place: NDArray[np.int64]
    first: NDArray[np.int64]
    size: NDArray[np.int64]
    per_file: tuple[int, ...]
    grid: tuple[int, ...]

    def chunks(self, index: Index | None) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return the first byte and the size of every chunk of the array in C order: int64, 0 if absent.

        Raises
        ------
        ReadError
            A shard's index cannot be read, or leads beyond the end of its shard.
        CorruptDataError
            A shard's index is damaged.
        """
        state = self._state()
        if index is None or state is None:
            return self._read_chunks()
        kept, offset, nbytes = (index.get(f"{self.name} {part}") for part in ("state", "offset", "nbytes"))
        if kept is not None and offset is not None and nbytes is not None and np.array_equal(kept, state):
            return offset.astype(np.int64), nbytes.astype(np.int64)
        offset, nbytes = self._read_chunks()
        for part, array in (("state", state), ("offset", offset), ("nbytes", nbytes)):
            index.keep(f"{self.name} {part}", array)
        return offset, nbytes

    def _state(self) -> NDArray[np.uint8] | None:
        """Return a digest of all that the chunks' places depend on; None if a shard might change unnoticed."""
        if not isinstance(self.source, RemoteSource) or not all(o.is_exact for o in self.source.objects):
            return None
        known = repr((self.spec, self.source.base.tolist(), self.source.objects))
        return np.frombuffer(blake2b(known.encode(), digest_size=16).digest(), dtype=np.uint8)

    def _read_chunks(self) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return what `chunks` does, from the shards' own indices."""
        offset, nbytes = np.zeros((2, math.prod(self.grid)), dtype=np.int64)
        n = math.prod(self.per_file)
        wanted = 16 * n + 4 * self.spec.index_has_crc
        for first, size in zip(self.first.tolist(), self.size.tolist(), strict=True):
            if wanted > size:
                raise ReadError(
                    f"{self._path(first)}: the index of this shard of {self.name} should have {wanted} bytes but the "
                    f"shard has {size}. Was it truncated?"
                )
        if not self.first.size:
            return offset, nbytes
        at = self.first if self.spec.index_is_first else self.first + self.size - wanted
        within = np.stack(np.unravel_index(np.arange(n), self.per_file))
        for number, raw in read_each(self.source, at, np.full_like(at, wanted)):
            entries = self._entries(raw, n, wanted, int(self.first[number]))
            inside = within + (self.place[number] * np.array(self.per_file)).reshape(-1, 1)
            is_there = (entries != ABSENT).any(axis=1) & (inside < np.array(self.grid).reshape(-1, 1)).all(axis=0)
            chunks = np.ravel_multi_index(tuple(inside[:, is_there]), self.grid)
            offset[chunks], nbytes[chunks] = self._places(entries[is_there], number)
        return offset, nbytes

    def _entries(self, raw: NDArray[np.uint8], n: int, wanted: int, first: int) -> NDArray[np.uint64]:
        """Return (offset, nbytes) of each chunk of a shard, (n, 2), given the bytes that could be read of its index."""
        if raw.size < wanted:
            raise ReadError(
                f"{self._path(first)}: the index of this shard of {self.name} cannot be read whole. Was it truncated?"
            )
        if self.spec.index_has_crc and int(raw[-4:].view("<u4")[0]) != crc32c(raw.ctypes.data, 16 * n):
            raise CorruptDataError(
                f"{self._path(first)}: the index of this shard of {self.name} is damaged: its crc32c checksum does not "
                f"match. {RESTORE}"
            )
        return raw[: 16 * n].view("<u8").reshape(n, 2)

    def _places(self, found: NDArray[np.uint64], number: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return the first byte and the size of chunks of a shard, after checking its entries for them."""
        first, size = int(self.first[number]), int(self.size[number])
        if np.any(found > np.uint64(size)) or np.any(found.sum(axis=1) > np.uint64(size)):
            end = max(map(sum, found.tolist()))
            raise ReadError(
                f"{self._path(first)}: a chunk of {self.name} should reach byte {end} but the shard has {size}. Was it "
                "truncated?"
            )
        offset, nbytes = found.astype(np.int64).T
        offset += first
        check_sizes(self.source, self.name, self.spec, offset, nbytes)
        return offset, nbytes

    def _path(self, first: int) -> str:
        """Return the path of the shard that begins at an address."""
        return self.source.where_is(first)[0]


def check_sizes(source: Source, name: str, spec: Spec, offset: NDArray[np.int64], nbytes: NDArray[np.int64]) -> None:
    """Raise CorruptDataError if an existing chunk is empty, or its size is impossible."""
    full = math.prod(spec.chunk_shape) * spec.dtype.itemsize
    is_bad = (nbytes < 1) if spec.filters or spec.text else (nbytes != full)
    if is_bad.any():
        at = int(np.argmax(is_bad))
        path, byte = source.where_is(int(offset[at]))
        wanted = "some" if spec.filters or spec.text else str(full)
        raise CorruptDataError(
            f"{path}: a chunk of {name} at byte {byte} has {nbytes[at]} bytes; expected {wanted}. Was it truncated?"
        )
