"""Storage layout of an array, and planning of its reads: element ranges -> coalesced extents and decodes.

Pure NumPy: nothing is read here. Every stored chunk that a fetch needs is read once and decoded once, however many
wanted ranges it holds; of unencoded storage, exactly the wanted elements are read.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from gpuload.types import ArrayRead, consecutive

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from gpuload.types import Source

MAX_GAP = 32 << 10
"""Largest gap of unwanted bytes between two chunks that is read rather than skipped with a second call."""
MAX_EXTENT = 1 << 20
"""Largest read in bytes, unless a single chunk is larger; bounds a thread's read buffer."""


@dataclass(frozen=True, slots=True)
class Filter:
    """One step of a chunk's encoding, named as in the HDF5 filter registry.

    Attributes
    ----------
    name
        ``"deflate"``, ``"shuffle"``, ``"fletcher32"``, ``"lzf"``, ``"zstd"``, ``"blosc"``, ``"lz4"``, ``"bitshuffle"``
        ...
    """

    name: str
    values: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, eq=False)
class ArrayLayout:
    """A stored array: byte ranges of its chunks and their codecs. Metadata only.

    Attributes
    ----------
    name
        Path of the dataset within the file, for error messages: ``"/X/data"``.
    shape
        (n,), (n_rows, n_cols) or (n_rows, ...), in elements.
    chunk_shape
        Elements per chunk along each axis; `shape` itself for contiguous storage; the maximum if `edges` is given.
    chunk_offset, chunk_nbytes : (n_chunks,) int64
        First byte and stored size of every chunk in C order of the chunk grid; size 0 means never written.
    chunk_mask : (n_chunks,) uint32
        Filters skipped per chunk.
    filters
        In encoding order; decoding applies them in reverse.
    fill_value
        Value of chunks never written.
    is_chunked
        Whether the file itself is chunked; contiguous storage is split for reading only.
    edges : (n_chunks + 1,) int64, optional
        For a 1-D array with chunks of different lengths: the first element of each, and the end.
    first_chunks : (n_files,) int64, optional
        For an array joined from several files: the first chunk of each file.
    """

    source: Source
    name: str
    shape: tuple[int, ...]
    dtype: np.dtype[np.generic]
    chunk_shape: tuple[int, ...]
    chunk_offset: NDArray[np.int64]
    chunk_nbytes: NDArray[np.int64]
    chunk_mask: NDArray[np.uint32]
    filters: tuple[Filter, ...] = ()
    fill_value: float = 0
    is_chunked: bool = True
    edges: NDArray[np.int64] | None = None
    first_chunks: NDArray[np.int64] | None = None
    verified: NDArray[np.uint8] = field(init=False)
    """One byte per chunk: 1 once its checksum has been verified since the file was opened. The only mutable field."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "verified", np.zeros(self.chunk_offset.size, dtype=np.uint8))

    def of_chunks(self, first: int, stop: int, like: ArrayLayout) -> ArrayLayout:
        """Return a layout of chunks ``first:stop`` that shares these tables and is otherwise like `like`."""
        of_these = slice(first, stop)
        part = replace(
            self,
            shape=like.shape,
            chunk_shape=like.chunk_shape,
            filters=like.filters,
            is_chunked=like.is_chunked,
            edges=None,
            chunk_offset=self.chunk_offset[of_these],
            chunk_nbytes=self.chunk_nbytes[of_these],
            chunk_mask=self.chunk_mask[of_these],
            first_chunks=None,
        )
        object.__setattr__(part, "verified", self.verified[of_these])
        return part

    def with_dest_stride(self, n: int) -> ArrayLayout:
        """Return the layout of the same chunks, for an array whose rows are n elements apart."""
        other = replace(self, shape=(self.shape[0], n))
        object.__setattr__(other, "verified", self.verified)
        return other

    def number_in_file(self, chunk: int) -> int:
        """Return a chunk's number within its own file."""
        if self.first_chunks is None:
            return chunk
        return chunk - int(self.first_chunks[np.searchsorted(self.first_chunks, chunk, side="right") - 1])

    def flattened(self) -> ArrayLayout:
        """Return the layout with the elements of a row along as few axes as possible, which makes fewer pieces.

        Axes are joined from the last on, as long as chunks are whole along them.
        """
        shape, chunk_shape = self.shape, self.chunk_shape
        while len(shape) > 2 and chunk_shape[-1] == shape[-1]:
            shape, chunk_shape = ((*n[:-2], n[-2] * n[-1]) for n in (shape, chunk_shape))
        return replace(self, shape=shape, chunk_shape=chunk_shape)

    @property
    def chunk_size(self) -> int:
        """Elements per chunk."""
        return int(np.prod(self.chunk_shape))

    @property
    def n_across(self) -> int:
        """Chunks that share each row: 1 unless chunks are narrower than rows."""
        return math.prod(-(-n // c) for n, c in zip(self.shape[1:], self.chunk_shape[1:], strict=True))

    @property
    def index_nbytes(self) -> int:
        """Size of the per-chunk tables, in bytes."""
        known = (self.chunk_offset, self.chunk_nbytes, self.chunk_mask, self.verified, self.edges)
        return sum(a.nbytes for a in known if a is not None)

    @property
    def src_stride(self) -> int:
        """Elements from one row of a decoded chunk to the next."""
        return math.prod(self.chunk_shape[1:])

    @property
    def dest_stride(self) -> int:
        """Elements from one row of the resident's array to the next."""
        return math.prod(self.shape[1:])

    def decoded_nbytes(self, chunks: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the decoded size in bytes of each of `chunks`, given by number."""
        if self.edges is None:
            return np.full(chunks.size, self.chunk_size * self.dtype.itemsize)
        return np.asarray((self.edges[chunks + 1] - self.edges[chunks]) * self.dtype.itemsize)

    @property
    def is_raw(self) -> bool:
        """Whether chunks are stored unencoded, so that any part of one can be read alone."""
        return not self.filters


def plan_read(
    layout: ArrayLayout,
    ranges: NDArray[np.int64],
    dest: NDArray[np.int64],
    target: str,
    limits: tuple[int, int] | None = None,
) -> ArrayRead:
    """Plan the reads and decodes that load ranges of an array's first axis into a resident's array.

    Parameters
    ----------
    ranges : (n, 2) int64
        Half-open ranges along the first axis (elements, or rows); disjoint, ascending, none empty.
    dest : (n,) int64
        Where each range starts in the resident's flat array, in elements.
    limits
        Coalescing limits, in bytes: the largest gap, and the largest extent; None takes those that suit the source.

    Returns
    -------
    ArrayRead
        Every needed chunk once, extents in ascending order of offset; without a limit on column numbers.
    """
    pieces = _pieces_1d(layout, ranges, dest) if len(layout.shape) == 1 else _pieces_of_rows(layout, ranges, dest)
    return _coalesce(layout, target, pieces, *(limits_of(layout.source) if limits is None else limits))


def limits_of(source: Source) -> tuple[int, int]:
    """Return the coalescing limits that suit a source, in bytes: the largest gap, and the largest extent."""
    return (MAX_GAP, MAX_EXTENT) if source.ranges is None else (source.ranges.max_gap, source.ranges.max_extent)


def select_chunks(read: ArrayRead, is_chosen: NDArray[np.bool_]) -> ArrayRead:
    """Return a read of only the chosen chunks, coalesced again."""
    chosen = np.flatnonzero(is_chosen)
    n_pieces = np.diff(read.chunk_pieces)
    is_piece = np.repeat(is_chosen, n_pieces)
    offset, nbytes = read.chunk_offset[chosen], read.chunk_nbytes[chosen]
    return replace(
        read,
        **_extents(offset, nbytes, *limits_of(read.layout.source)),
        chunk_id=read.chunk_id[chosen],
        chunk_offset=offset,
        chunk_nbytes=nbytes,
        chunk_mask=read.chunk_mask[chosen],
        chunk_limit=read.chunk_limit[chosen],
        chunk_pieces=np.concatenate([[0], np.cumsum(n_pieces[chosen])]),
        piece_src=read.piece_src[is_piece],
        piece_dest=read.piece_dest[is_piece],
        piece_width=read.piece_width[is_piece],
        piece_rows=read.piece_rows[is_piece],
    )


@dataclass(frozen=True, slots=True)
class _Pieces:
    chunk: NDArray[np.int64]
    src: NDArray[np.int64]
    dest: NDArray[np.int64]
    width: NDArray[np.int64]
    rows: NDArray[np.int64]

    def take(self, index: NDArray[np.int64]) -> _Pieces:
        return _Pieces(self.chunk[index], self.src[index], self.dest[index], self.width[index], self.rows[index])


def split_at_multiples(ranges: NDArray[np.int64], length: int) -> tuple[NDArray[np.int64], ...]:
    """Split ranges at multiples of `length`: (range number, multiple, start, stop) of every part; none is empty."""
    first = ranges[:, 0] // length
    n_parts = np.where(ranges[:, 0] < ranges[:, 1], (ranges[:, 1] - 1) // length + 1 - first, 0)
    number = np.repeat(np.arange(len(ranges)), n_parts)
    cell = consecutive(first, n_parts)
    start = np.maximum(ranges[number, 0], cell * length)
    stop = np.minimum(ranges[number, 1], (cell + 1) * length)
    return number, cell, start, stop


def split_at(ranges: NDArray[np.int64], edges: NDArray[np.int64]) -> tuple[NDArray[np.int64], ...]:
    """Split ranges at edges, some possibly equal; as `split_at_multiples`, with the edge before each part."""
    first = np.searchsorted(edges, ranges[:, 0], side="right") - 1
    n_parts = np.searchsorted(edges, ranges[:, 1] - 1, side="right") - first
    number = np.repeat(np.arange(len(ranges)), n_parts)
    cell = consecutive(first, n_parts)
    start = np.maximum(ranges[number, 0], edges[cell])
    stop = np.minimum(ranges[number, 1], edges[cell + 1])
    is_filled = start < stop
    return number[is_filled], cell[is_filled], start[is_filled], stop[is_filled]


def _pieces_1d(layout: ArrayLayout, ranges: NDArray[np.int64], dest: NDArray[np.int64]) -> _Pieces:
    edges, length = layout.edges, layout.chunk_shape[0]
    number, chunk, start, stop = split_at_multiples(ranges, length) if edges is None else split_at(ranges, edges)
    src = start - (chunk * length if edges is None else edges[chunk])
    return _Pieces(chunk, src, dest[number] + start - ranges[number, 0], stop - start, np.ones_like(chunk))


def _pieces_of_rows(layout: ArrayLayout, ranges: NDArray[np.int64], dest: NDArray[np.int64]) -> _Pieces:
    """Split row ranges into runs of elements contiguous in a row and a chunk; consecutive whole rows make one run."""
    number, tile_row, start, stop = split_at_multiples(ranges, layout.chunk_shape[0])
    first_src = (start - tile_row * layout.chunk_shape[0]) * layout.src_stride
    first_to = dest[number] + (start - ranges[number, 0]) * layout.dest_stride
    rows = stop - start
    if layout.chunk_shape[1:] == layout.shape[1:]:
        return _Pieces(tile_row, first_src, first_to, rows * layout.dest_stride, np.ones_like(rows))
    tile, src, to, width = _runs(layout.shape[1:], layout.chunk_shape[1:])
    pieces = _Pieces(
        np.repeat(tile_row * layout.n_across, tile.size) + np.tile(tile, number.size),
        np.repeat(first_src, tile.size) + np.tile(src, number.size),
        np.repeat(first_to, tile.size) + np.tile(to, number.size),
        np.tile(width, number.size),
        np.repeat(rows, tile.size),
    )
    return pieces.take(np.argsort(pieces.chunk, kind="stable"))


def _runs(shape: tuple[int, ...], chunk_shape: tuple[int, ...]) -> tuple[NDArray[np.int64], ...]:
    """Return the runs of a row's elements that are contiguous in the row and in a chunk.

    Parameters
    ----------
    shape, chunk_shape
        Shapes of a row, and of a chunk's part of a row.

    Returns
    -------
    tuple of (n_runs,) int64
        Each run's chunk among those that share the row, its first element in the chunk's part and in the row, and its
        length.
    """
    grid = tuple(-(-n // c) for n, c in zip(shape, chunk_shape, strict=True))
    starts = np.meshgrid(*(np.arange(n) for n in shape[:-1]), np.arange(grid[-1]) * chunk_shape[-1], indexing="ij")
    at = np.stack([axis.reshape(-1) for axis in starts])
    tile, within = np.divmod(at, np.array(chunk_shape)[:, None])
    return (
        np.ravel_multi_index(tuple(tile), grid),
        np.ravel_multi_index(tuple(within), chunk_shape),
        np.ravel_multi_index(tuple(at), shape),
        np.minimum(chunk_shape[-1], shape[-1] - at[-1]),
    )


def _coalesce(layout: ArrayLayout, target: str, pieces: _Pieces, max_gap: int, max_extent: int) -> ArrayRead:
    if layout.is_raw:
        pieces, offset, nbytes = _raw_chunks(layout, pieces)
        chunk_id, first_piece = pieces.chunk, np.arange(pieces.chunk.size)
    else:
        first_piece = np.flatnonzero(np.diff(pieces.chunk, prepend=-1))
        chunk_id = pieces.chunk[first_piece]
        offset, nbytes = layout.chunk_offset[chunk_id], layout.chunk_nbytes[chunk_id]
    n_pieces = np.diff(np.append(first_piece, pieces.chunk.size))
    if np.any(offset[1:] < offset[:-1]):
        order = np.argsort(offset, kind="stable")
        chunk_id, offset, nbytes, n_pieces = chunk_id[order], offset[order], nbytes[order], n_pieces[order]
        pieces = pieces.take(consecutive(first_piece[order], n_pieces))
    return ArrayRead(
        layout=layout,
        target=target,
        **_extents(offset, nbytes, max_gap, max_extent),
        chunk_id=chunk_id,
        chunk_offset=offset,
        chunk_nbytes=nbytes,
        chunk_mask=layout.chunk_mask[chunk_id],
        chunk_limit=np.full(chunk_id.size, -1, dtype=np.int64),
        chunk_pieces=np.concatenate([[0], np.cumsum(n_pieces)]),
        piece_src=pieces.src,
        piece_dest=pieces.dest,
        piece_width=pieces.width,
        piece_rows=pieces.rows,
    )


def _extents(offset: NDArray[np.int64], nbytes: NDArray[np.int64], max_gap: int, max_extent: int) -> dict[str, Any]:
    """Return the extents of chunks sorted by offset, keyed by their `ArrayRead` field names."""
    extent_chunks = extent_edges(offset, nbytes, max_gap, max_extent)
    first = extent_chunks[:-1]
    start, end = offset[first], np.maximum.reduceat(offset + nbytes, first)
    return {"extent_offset": start, "extent_nbytes": end - start, "extent_chunks": extent_chunks}


def _raw_chunks(layout: ArrayLayout, pieces: _Pieces) -> tuple[_Pieces, NDArray[np.int64], NDArray[np.int64]]:
    """Turn every piece of unencoded storage into a chunk of its own that holds only the wanted bytes."""
    itemsize = layout.dtype.itemsize
    span = (pieces.rows - 1) * layout.src_stride + pieces.width
    is_absent = layout.chunk_nbytes[pieces.chunk] == 0
    offset = np.where(is_absent, 0, layout.chunk_offset[pieces.chunk] + pieces.src * itemsize)
    nbytes = np.where(is_absent, 0, span * itemsize)
    return replace(pieces, src=np.zeros_like(pieces.src)), offset, nbytes


def extent_edges(
    offset: NDArray[np.int64], nbytes: NDArray[np.int64], max_gap: int, max_extent: int
) -> NDArray[np.int64]:
    """Return the edges that split chunks, sorted by offset, into extents: (n_extents + 1,) int64.

    An extent ends where the gap to the next chunk is too wide, or where it would exceed `max_extent`. The second rule
    splits runs of chunks evenly, so that no step depends on the previous one and everything is vectorised.
    """
    end = np.maximum.accumulate(offset + nbytes)
    starts_run = np.ones(offset.size, dtype=bool)
    starts_run[1:] = offset[1:] - end[:-1] > max_gap
    part = (end - offset[starts_run][np.cumsum(starts_run) - 1] - 1).clip(0) // max_extent
    starts_run[1:] |= part[1:] != part[:-1]
    return np.append(np.flatnonzero(starts_run), offset.size)
