"""A byte source that brings together what the rows of a band need from several files of a TileDB array.

Where tiles of a matrix's space are narrower than its rows, the values of a row are in many places. A band is as many
rows as a tile is high: its values are in few runs of consecutive data tiles. They are presented as one stored chunk:
first a table (which rows, how many values each has, how many cells each data tile has), then the data tiles of rows,
then those of columns or of values; see `backends.native.tiledb.gather_rows`, which decodes it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from gpuload.backends.tiledb import HEADER
from gpuload.types import consecutive

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import NDArray

    from gpuload.folder_source import FolderSource
    from gpuload.remote.source import RemoteSource

_MAX_GAP, _MAX_EXTENT = 0, 4 << 20
"""Coalescing limits over a network: a band is a request of its own for each run of its tiles."""


@dataclass(frozen=True, slots=True, eq=False)
class Tiles:
    """Data tiles of a matrix, of all fragments.

    Attributes
    ----------
    first_row, last_row
        Of the cells of each tile.
    cells
        Number of cells of each tile.
    offset, nbytes : (3, n)
        First byte in the source and stored size of each tile, of rows, columns and values.
    """

    first_row: NDArray[np.int64]
    last_row: NDArray[np.int64]
    cells: NDArray[np.int64]
    offset: NDArray[np.int64]
    nbytes: NDArray[np.int64]


@dataclass(frozen=True, slots=True, eq=False)
class Bands:
    """Bands of rows, and the tiles that each needs.

    Attributes
    ----------
    indptr : (n_rows + 1,) int64
        Row offsets of the matrix.
    edges : (n_bands + 1,) int64
        First row of each band, and the end.
    tile : (n,) int64
        Numbers of the tiles, band by band.
    first : (n_bands + 1,) int64
        Tiles of band b are ``tile[first[b]:first[b + 1]]``.
    """

    indptr: NDArray[np.int64]
    edges: NDArray[np.int64]
    tile: NDArray[np.int64]
    first: NDArray[np.int64]

    @classmethod
    def over(cls, tiles: Tiles, indptr: NDArray[np.int64], n_rows: int) -> Bands:
        """Return bands of `n_rows` rows each."""
        total = indptr.size - 1
        edges = np.append(np.arange(0, total, n_rows, dtype=np.int64), total)
        low = tiles.first_row // n_rows
        n_each = tiles.last_row // n_rows - low + 1
        tile, band = np.repeat(np.arange(low.size), n_each), consecutive(low, n_each)
        order = np.argsort(band, kind="stable")
        first = np.searchsorted(band[order], np.arange(edges.size))
        return cls(indptr, edges, tile[order], first)

    @property
    def table_nbytes(self) -> NDArray[np.int64]:
        """Size of the table of each band, in bytes."""
        return np.asarray(8 * (HEADER + np.diff(self.edges) + np.diff(self.first)))

    def table(self, band: int, tiles: Tiles) -> NDArray[np.uint8]:
        """Return the table of a band."""
        row, stop = int(self.edges[band]), int(self.edges[band + 1])
        mine = self.tile[self.first[band] : self.first[band + 1]]
        words = [row, stop - row, mine.size, int(tiles.nbytes[0, mine].sum())]
        return np.concatenate([words, np.diff(self.indptr[row : stop + 1]), tiles.cells[mine]]).view(np.uint8)


class BandSource:
    """The bands of one array of a matrix, its columns or its values, one after the other.

    Parameters
    ----------
    tiles, bands
        The tiles, and which of them each band needs.
    which
        1 for the columns, 2 for the values.

    Attributes
    ----------
    start : (n_bands + 1,) int64
        Address of each band, and the end.
    """

    memory = None
    max_gap, max_extent = _MAX_GAP, _MAX_EXTENT

    def __init__(self, inner: FolderSource | RemoteSource, tiles: Tiles, bands: Bands, which: int) -> None:
        self.name = inner.name
        self._inner, self._tiles, self._bands = inner, tiles, bands
        band, address, nbytes = self._runs(which)
        of_bands = np.bincount(band, nbytes, bands.edges.size - 1).astype(np.int64)
        self.start: NDArray[np.int64] = np.append(0, np.cumsum(bands.table_nbytes + of_bands))
        self.nbytes = int(self.start[-1])
        self._address = address
        before = np.cumsum(nbytes) - nbytes
        first = np.searchsorted(band, np.arange(bands.edges.size))
        skipped = np.append(before, nbytes.sum())[first[:-1]]
        self._run = before + (self.start[:-1] + bands.table_nbytes - skipped)[band]
        self._run_stop = self._run + nbytes

    def _runs(self, which: int) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
        """Return the band, the address and the size of each run of consecutive tiles, in the order of a band."""
        tile, first = self._bands.tile, self._bands.first
        band = np.repeat(np.arange(first.size - 1), np.diff(first))
        both = np.lexsort(
            (np.arange(2 * tile.size), np.append(np.zeros_like(tile), np.ones_like(tile)), np.tile(band, 2))
        )
        of = np.append(np.zeros_like(tile), np.full_like(tile, which))[both]
        tile, band = np.tile(tile, 2)[both], np.tile(band, 2)[both]
        address, nbytes = self._tiles.offset[of, tile], self._tiles.nbytes[of, tile]
        is_new = np.ones(tile.size, dtype=bool)
        is_new[1:] = (address[1:] != address[:-1] + nbytes[:-1]) | (band[1:] != band[:-1]) | (of[1:] != of[:-1])
        at = np.flatnonzero(is_new)
        return band[at], address[at], np.add.reduceat(nbytes, at) if at.size else nbytes[:0]

    @property
    def ranges(self) -> BandSource | None:
        """The source itself, if it reads over a network."""
        return None if self._inner.ranges is None else self

    def read_into(self, buffer: NDArray[np.uint8], offset: int) -> int:
        """Fill `buffer` from an address on; return the bytes read, fewer only at the end or if a file is too short."""
        n = max(0, min(buffer.size, self.nbytes - offset))
        if self._inner.ranges is not None:
            one = np.array([offset, n, 0], dtype=np.int64)
            self.read_many(one[:1], one[1:2], one[2:], buffer)
            return n
        for place, nbytes, to in self._pieces(offset, n, 0, buffer):
            got = self._inner.read_into(buffer[to : to + nbytes], place)
            if got < nbytes:
                return to + got
        return n

    def read_many(
        self, offset: NDArray[np.int64], nbytes: NDArray[np.int64], place: NDArray[np.int64], buffer: NDArray[np.uint8]
    ) -> None:
        """Read byte ranges completely; see `RangeReader.read_many`."""
        wanted = zip(offset.tolist(), nbytes.tolist(), place.tolist(), strict=True)
        pieces = [
            (at + done, min(_MAX_EXTENT, n - done), to + done)
            for one in wanted
            for at, n, to in self._pieces(*one, buffer)
            for done in range(0, n, _MAX_EXTENT)
        ]
        if pieces:
            at, n, to = np.array(pieces, dtype=np.int64).T.copy()
            self._far.read_many(at, n, to, buffer)

    def _pieces(self, offset: int, n: int, to: int, buffer: NDArray[np.uint8]) -> Iterator[tuple[int, int, int]]:
        """Write the tables of a range, and yield the address, size and place of each piece to be read."""
        stop = offset + n
        low = int(np.searchsorted(self.start, offset, side="right")) - 1
        high = int(np.searchsorted(self.start, stop, side="left"))
        for band in range(low, high):
            table, at = self._bands.table(band, self._tiles), int(self.start[band])
            a, b = max(offset, at), min(stop, at + table.size)
            if a < b:
                buffer[to + a - offset : to + b - offset] = table[a - at : b - at]
        first = int(np.searchsorted(self._run_stop, offset, side="right"))
        last = int(np.searchsorted(self._run, stop, side="left"))
        for k in range(first, last):
            at = int(self._run[k])
            a, b = max(offset, at), min(stop, int(self._run_stop[k]))
            if a < b:
                yield int(self._address[k]) + a - at, b - a, to + a - offset

    def where_is(self, offset: int) -> tuple[str, int]:
        """Return the path of the file of the first tile of the band at an address, and the position in it."""
        k = min(int(np.searchsorted(self._run_stop, offset, side="right")), self._run.size - 1)
        return self._inner.where_is(int(self._address[k])) if k >= 0 else (self.name, offset)

    def forget(self, offset: int, nbytes: int) -> None:
        """Drop copies of bytes that turned out to be damaged; see `RangeReader.forget`."""
        scratch = np.empty(nbytes, dtype=np.uint8)
        for place, n, _ in list(self._pieces(offset, nbytes, 0, scratch)):
            self._far.forget(place, n)

    def check_unchanged(self) -> None:
        """Raise ReadError if a file was changed in place since it was opened."""
        self._inner.check_unchanged()

    def end(self) -> None:
        """Fail reads that wait for responses; see `RangeReader.end`."""
        self._far.end()

    def close(self) -> None:
        """Close the files; may be called twice."""
        self._inner.close()

    @property
    def _far(self) -> Any:
        return self._inner.ranges
