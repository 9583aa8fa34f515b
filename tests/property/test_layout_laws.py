"""Laws of the layout: each needed chunk once, extents inside the source, coalescing changes no byte."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpuload.layout import ArrayLayout, extent_edges, plan_read, select_chunks
from gpuload.source import BufferSource
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
    for lo, hi, start, nbytes in zip(edges, edges[1:], read.extent_offset, read.extent_nbytes, strict=False):
        starts, ends = read.chunk_offset[lo:hi], read.chunk_offset[lo:hi] + read.chunk_nbytes[lo:hi]
        present = read.chunk_nbytes[lo:hi] > 0
        assert start + nbytes == np.max(ends[present], initial=start), "a read ends beyond the last stored chunk"
        assert np.all(starts[1:][present[1:]] - np.maximum.accumulate(ends)[:-1][present[1:]] <= max_gap)
        assert nbytes <= max_extent + int(read.chunk_nbytes[lo:hi].max()), "a read grows beyond its limit"


@pytest.mark.parametrize(
    ("offset", "nbytes", "edges"),
    [
        ([0, 110], [10, 10], [0, 2]),  # 100 bytes between them are read too
        ([0, 111], [10, 10], [0, 1, 2]),
        ([0, 500], [400, 500], [0, 2]),  # 1000 bytes in all are one read
        ([0, 500], [400, 501], [0, 1, 2]),
        ([0, 500, 1200], [400, 500, 900], [0, 2, 3]),
        ([0, 1950, 2000], [10, 10, 10], [0, 1, 3]),
        ([0, 10, 500], [400, 10, 10], [0, 3]),  # the second is within the first
        ([0, 0], [0, 10], [0, 2]),  # the first was never written
        ([7], [5000], [0, 1]),
        ([], [], [0]),
    ],
)
def test_chunks_near_each_other_are_read_together(offset: list[int], nbytes: list[int], edges: list[int]) -> None:
    found = extent_edges(np.array(offset, np.int64), np.array(nbytes, np.int64), max_gap=100, max_extent=1000)
    assert found.tolist() == edges


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


PER_CHUNK = ("chunk_id", "chunk_offset", "chunk_nbytes", "chunk_mask", "chunk_limit")
PER_PIECE = ("piece_src", "piece_dest", "piece_width", "piece_rows")


@given(st.data())
@settings(max_examples=100, deadline=None, derandomize=True)
def test_chosen_chunks_keep_all_that_is_said_of_them(data: st.DataObject) -> None:
    placed: Placed = data.draw(layouts())
    ranges = data.draw(row_ranges(placed.array.shape[0]))
    if not len(ranges):
        return
    n = placed.layout.chunk_offset.size
    layout = replace(placed.layout, chunk_mask=np.arange(n, dtype=np.uint32))
    whole = plan_read(layout, ranges, ranges[:, 0] * layout.dest_stride, "X")
    whole = replace(whole, chunk_limit=np.arange(whole.chunk_id.size) + 100)  # as of files that differ in width
    size = whole.chunk_id.size
    is_chosen = np.array(data.draw(st.lists(st.booleans(), min_size=size, max_size=size)))
    part = select_chunks(whole, is_chosen)
    chosen = np.flatnonzero(is_chosen)
    assert part.chunk_id.size == part.extent_chunks[-1] == chosen.size
    for new, old in enumerate(chosen):
        for name in PER_CHUNK:
            assert getattr(part, name)[new] == getattr(whole, name)[old], name
        pieces, pieces_too = (slice(*read.chunk_pieces[i : i + 2]) for read, i in ((part, new), (whole, old)))
        for name in PER_PIECE:
            np.testing.assert_array_equal(getattr(part, name)[pieces], getattr(whole, name)[pieces_too], err_msg=name)
    edges = part.extent_chunks
    for lo, hi, start, nbytes in zip(edges[:-1], edges[1:], part.extent_offset, part.extent_nbytes, strict=True):
        assert start == part.chunk_offset[lo:hi].min()
        assert start + nbytes == (part.chunk_offset[lo:hi] + part.chunk_nbytes[lo:hi]).max()


class Far(BufferSource):
    """Bytes of which a request costs more than those between two chunks that are not wanted."""

    ranges = SimpleNamespace(max_gap=1 << 17, max_extent=1 << 18)  # type: ignore[assignment]


def test_chosen_chunks_are_coalesced_as_suits_their_source() -> None:
    source, nothing = Far("far", np.zeros(1 << 18, np.uint8)), np.zeros(4, np.uint32)
    far = np.arange(4) << 16
    layout = ArrayLayout(source, "X", (4,), np.dtype("u1"), (1,), far, np.ones(4, np.int64), nothing)
    read = plan_read(layout, np.array([[0, 4]]), np.array([0]), "X")
    assert read.extent_chunks.tolist() == [0, 4]
    part = select_chunks(read, np.array([True, False, True, True]))
    assert (part.extent_chunks.tolist(), part.extent_nbytes.tolist()) == ([0, 3], [(3 << 16) + 1])
