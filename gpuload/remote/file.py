"""An object of a remote as a file object, for libraries that read metadata in many small pieces, by few requests."""

from __future__ import annotations

import io
from collections import OrderedDict
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from numpy.typing import NDArray

    from gpuload.remote.source import RemoteSource

_BLOCK, _BLOCKS_AHEAD, _MAX_BLOCKS_AHEAD, _MAX_BLOCKS = 64 << 10, 4, 128, 4096
"""Cache of a file: bytes per block; minimum blocks per read, and maximum in sequential reading; blocks kept."""

_BEGIN, _END, _WHOLE = 32, 40, 96
"""Blocks at the begin and at the end of a file that are fetched before it is read; a file of so few is fetched whole.

HDF5 puts its first groups at the begin, and what anndata writes last, obs and var, at the end: 2 MB of 60,000 genes."""

_BEHIND, _BEYOND = 4, 12
"""Blocks fetched before and after one that was missing, as metadata are scattered around it."""


class MissingError(Exception):
    """A file that does not wait was read where its bytes are not there yet."""


class RemoteFile(io.RawIOBase):
    """An object as a readable file with a block cache, for libraries that read metadata in small pieces.

    Sequential reads grow their requests; ranges known to be needed are prefetched (`bring`). HDF5 would read the trees
    that hold chunk addresses node by node: all nodes of a level are prefetched as soon as one above them is read.

    Attributes
    ----------
    can_wait
        Whether a read waits for bytes that are not there. Otherwise it raises MissingError, and `bring_missing` fetches
        them: for a library that lets no other thread in while it reads.

    References
    ----------
    .. [1] The HDF Group, "HDF5 File Format Specification Version 3.0", III.A.1 "Version 1 B-trees".
    """

    def __init__(self, source: RemoteSource) -> None:
        self.name = source.name
        self._source = source
        self._at = 0
        self._blocks: OrderedDict[int, NDArray[np.uint8]] = OrderedDict()
        self._nodes: dict[int, bytes] = {}
        self._next_block, self._ahead = 0, _BLOCKS_AHEAD
        self.can_wait = True
        self._missing: list[tuple[int, int, int]] = []
        self._trees: list[tuple[int, int]] = []

    def readable(self) -> bool:
        """Return True."""
        return True

    def seekable(self) -> bool:
        """Return True."""
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        """Move to a position and return it."""
        start = {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._source.nbytes}[whence]
        self._at = start + offset
        return self._at

    def readinto(self, buffer: Any) -> int:
        """Fill a buffer from the current position on; return the bytes read, fewer only at the end."""
        out = np.frombuffer(buffer, dtype=np.uint8)
        n = max(0, min(out.size, self._source.nbytes - self._at))
        node = self._nodes.get(self._at, b"")
        if n and len(node) >= n:
            out[:n] = np.frombuffer(node, dtype=np.uint8)[:n]
        elif n:
            self._fill(out[:n], self._at)
            children = _children(out[:n].tobytes()) if n < _BLOCK else []
            if children and self.can_wait:
                self._read_nodes((at, n) for at in children)
            elif not self._nodes.keys() >= set(children):
                self._trees += [(at, n) for at in children]
        self._at += n
        return n

    def read_at(self, offset: int, nbytes: int) -> bytes:
        """Return bytes from an offset on, fewer only at the end, without a move; what is missing, is so all at once."""
        out = np.empty(max(0, min(nbytes, self._source.nbytes - offset)), dtype=np.uint8)
        if out.size:
            self._fill(out, offset)
        return out.tobytes()

    def _fill(self, out: NDArray[np.uint8], at: int) -> None:
        """Fill `out` from cached blocks, reading those that are missing first."""
        wanted = _blocks_of(at, out.size)
        missing = [number for number in wanted if number not in self._blocks]
        if missing and not self.can_wait:
            self._missing.append((at, missing[0], missing[-1] + 1))
            raise MissingError(f"{self.name}: bytes from {at} on are not there yet.")
        if missing:
            self._read_blocks(missing[0], missing[-1] + 1)
        for number in wanted:
            block = self._blocks[number]
            start = number * _BLOCK
            lo, hi = max(at, start), min(at + out.size, start + block.size)
            out[lo - at : hi - at] = block[lo - start : hi - start]
        while self.can_wait and len(self._blocks) > _MAX_BLOCKS:
            self._blocks.popitem(last=False)

    def _read_blocks(self, first: int, last: int, ahead: int = _BLOCKS_AHEAD, behind: int = 0) -> None:
        """Read blocks and some around them: the longer the sequential run, the more that follow."""
        is_next = first == self._next_block
        self._ahead = min(2 * self._ahead, _MAX_BLOCKS_AHEAD) if is_next else ahead
        self._next_block = max(last, first + self._ahead)
        begin, end = first if is_next else max(0, first - behind), self._next_block
        while begin < first and begin in self._blocks:
            begin += 1
        while end > last and end - 1 in self._blocks:
            end -= 1
        self._fetch([(begin, end)])

    def _fetch(self, runs: Sequence[tuple[int, int]]) -> None:
        """Read runs of blocks, each a first block and that after its last, by concurrent requests."""
        step, nbytes = self._source.max_extent, self._source.nbytes
        spans = [(first * _BLOCK, min(last * _BLOCK, nbytes)) for first, last in runs]
        pieces = [(at, min(step, stop - at)) for start, stop in spans for at in range(start, stop, step)]
        offset, length = np.array(pieces, dtype=np.int64).reshape(-1, 2).T
        place = np.cumsum(length) - length
        buffer = np.empty(int(length.sum()), dtype=np.uint8)
        self._source.read_many(offset, length, place, buffer)
        for start, stop in spans:
            span, buffer = buffer[: stop - start], buffer[stop - start :]
            for at in range(0, span.size, _BLOCK):
                self._blocks[(start + at) // _BLOCK] = span[at : at + _BLOCK]

    @property
    def nbytes_held(self) -> int:
        """Bytes of the blocks that are there."""
        return len(self._blocks) * _BLOCK

    def bring_ends(self) -> None:
        """Prefetch the begin and the end of the file, where most metadata are; a small file whole."""
        n = -(-self._source.nbytes // _BLOCK)
        self._fetch([(0, n)] if n <= _WHOLE else [(0, _BEGIN), (n - _END, n)])

    def bring_missing(self) -> bool:
        """Fetch what was missing when it was read, and what will be read with it; return whether anything was.

        Must not be called while a library reads the file.
        """
        missing, trees = self._missing, self._trees
        self._missing, self._trees = [], []
        if not missing:
            return False
        self._read_nodes(trees)
        for at, first, last in missing:
            if at not in self._nodes:
                self._read_blocks(first, last, _BEYOND, _BEHIND)
        return True

    def bring(self, ranges: Iterable[tuple[int, int]]) -> None:
        """Prefetch ranges, each a first byte and a length, many at a time.

        Each then serves reads that start at its first byte. Ranges that extend beyond the file are skipped.
        """
        inside = sorted({(at, n) for at, n in ranges if at >= 0 and 0 < n <= self._source.nbytes - at})
        there = [(at, n) for at, n in inside if self._blocks.keys() >= set(_blocks_of(at, n))]
        self._nodes |= {at: self.read_at(at, n) for at, n in there}
        inside = sorted(set(inside).difference(there))
        runs: list[list[tuple[int, int]]] = []
        end = -_BLOCK
        for at, n in inside:  # nearby ones are read together
            if not runs or at - end >= _BLOCK or at + n - runs[-1][0][0] > self._source.max_extent:
                runs.append([])
            runs[-1].append((at, n))
            end = max(end, at + n)
        first = np.array([run[0][0] for run in runs], dtype=np.int64)
        length = np.array([max(at + n for at, n in run) for run in runs], dtype=np.int64) - first
        place = np.cumsum(length) - length
        buffer = np.empty(int(length.sum()), dtype=np.uint8)
        self._source.read_many(first, length, place, buffer)
        for run, start in zip(runs, (place - first).tolist(), strict=True):
            for at, n in run:
                self._nodes[at] = buffer[start + at : start + at + n].tobytes()

    def _read_nodes(self, nodes: Iterable[tuple[int, int]]) -> None:
        """Read nodes of trees, each a first byte and a length, and the levels below, a whole level of all at a time."""
        while new := {(at, n) for at, n in nodes if at not in self._nodes}:
            self.bring(new)
            nodes = [(child, n) for at, n in new if at in self._nodes for child in _children(self._nodes[at])]


def _blocks_of(at: int, nbytes: int) -> range:
    """Return the numbers of the blocks that hold a range of bytes, which is not empty."""
    return range(at // _BLOCK, (at + nbytes - 1) // _BLOCK + 1)


def _children(node: bytes) -> list[int]:
    """Return the addresses of a chunk-tree node's children; [] if it is a leaf, or not such a node."""
    if node[:5] != b"TREE\x01" or node[5] == 0:
        return []
    n_used = int.from_bytes(node[6:8], "little")
    for key_nbytes in (24, 32):  # for arrays of one and of two dimensions
        n_places, rest = divmod(len(node) - 24 - key_nbytes, key_nbytes + 8)
        if not rest and n_used <= n_places:
            starts = (24 + key_nbytes + i * (key_nbytes + 8) for i in range(n_used))
            return [int.from_bytes(node[at : at + 8], "little") for at in starts]
    return []
