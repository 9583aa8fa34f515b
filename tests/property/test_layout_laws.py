"""Laws of the layout: each needed chunk once, extents inside the source, coalescing changes no byte."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from gpuload.layout import ArrayLayout, plan_read
from gpuload.types import ArrayRead, expand_ranges
from tests.strategies import Placed, layouts, row_ranges


def carry_out(read: ArrayRead, out: np.ndarray) -> None:
    """Carry a read out slowly, checking that every byte used was brought by its extent."""
    layout = read.layout
    flat, itemsize = out.reshape(-1), layout.dtype.itemsize
    for extent in range(read.extent_offset.size):
        start, nbytes = int(read.extent_offset[extent]), int(read.extent_nbytes[extent])
        buffer = np.empty(nbytes, np.uint8)
        assert layout.source.read_into(buffer, start) == nbytes
        for c in range(read.extent_chunks[extent], read.extent_chunks[extent + 1]):
            at, size = int(read.chunk_offset[c]) - start, int(read.chunk_nbytes[c])
            if size == 0:
                plain = np.full(layout.chunk_size, layout.fill_value, layout.dtype)
            else:
                assert at >= 0
                assert at + size <= nbytes
                plain = np.frombuffer(buffer[at : at + size].tobytes(), layout.dtype)
                assert layout.is_raw or plain.size == layout.chunk_size, itemsize
            for p in range(read.chunk_pieces[c], read.chunk_pieces[c + 1]):
                for r in range(read.piece_rows[p]):
                    src = int(read.piece_src[p]) + r * layout.src_stride
                    to = int(read.piece_dest[p]) + r * layout.dest_stride
                    flat[to : to + read.piece_width[p]] = plain[src : src + read.piece_width[p]]


LIMITS = st.tuples(st.sampled_from([0, 16, 1 << 15]), st.sampled_from([1, 64, 1 << 20]))


@given(st.data())
@settings(max_examples=400, deadline=None, derandomize=True)
def test_reads_return_the_stored_values(data: st.DataObject) -> None:
    placed: Placed = data.draw(layouts())
    ranges = data.draw(row_ranges(placed.array.shape[0]))
    max_gap, max_extent = data.draw(LIMITS)
    lengths = ranges[:, 1] - ranges[:, 0]
    if not len(ranges):
        return
    dest = (np.cumsum(lengths) - lengths) * int(np.prod(placed.array.shape[1:], dtype=int))
    read = plan_read(placed.layout, ranges, dest, "X", (max_gap, max_extent))
    out = np.zeros((int(lengths.sum()), *placed.array.shape[1:]), placed.layout.dtype)
    carry_out(read, out)
    np.testing.assert_array_equal(out, placed.array[expand_ranges(ranges)])


@given(st.data())
@settings(max_examples=200, deadline=None, derandomize=True)
def test_gap_and_extent_limits_are_kept(data: st.DataObject) -> None:
    placed: Placed = data.draw(layouts())
    ranges = data.draw(row_ranges(placed.array.shape[0]))
    max_gap, max_extent = data.draw(LIMITS)
    if not len(ranges):
        return
    read = plan_read(placed.layout, ranges, ranges[:, 0], "X", (max_gap, max_extent))
    layout: ArrayLayout = placed.layout
    if not layout.is_raw:
        assert len(np.unique(read.chunk_id)) == read.chunk_id.size, "a chunk is read twice"
    edges = read.extent_chunks
    assert edges[0] == 0
    assert edges[-1] == read.chunk_id.size
    assert np.all(np.diff(edges) > 0)
    assert np.all(np.diff(read.extent_offset) >= 0)
    assert np.all(read.extent_offset + read.extent_nbytes <= layout.source.nbytes)
    for lo, hi, nbytes in zip(edges, edges[1:], read.extent_nbytes, strict=False):
        starts, ends = read.chunk_offset[lo:hi], read.chunk_offset[lo:hi] + read.chunk_nbytes[lo:hi]
        present = read.chunk_nbytes[lo:hi] > 0
        assert np.all(starts[1:][present[1:]] - np.maximum.accumulate(ends)[:-1][present[1:]] <= max_gap)
        assert nbytes <= max_extent + int(read.chunk_nbytes[lo:hi].max()), "a read grows beyond its limit"


@given(st.data())
@settings(max_examples=100, deadline=None, derandomize=True)
def test_raw_storage_reads_no_extra_bytes(data: st.DataObject) -> None:
    placed: Placed = data.draw(layouts().filter(lambda p: p.layout.is_raw and p.array.ndim == 1))
    ranges = data.draw(row_ranges(placed.array.shape[0]))
    if not len(ranges):
        return
    read = plan_read(placed.layout, ranges, ranges[:, 0], "X", (0, 1 << 20))
    wanted = expand_ranges(ranges) // placed.layout.chunk_shape[0]
    is_there = placed.layout.chunk_nbytes[wanted] > 0
    assert int(read.chunk_nbytes.sum()) == int(is_there.sum()) * placed.layout.dtype.itemsize
