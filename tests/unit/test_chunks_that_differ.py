"""Layouts whose chunks differ in length: every element wanted comes from its chunk, every chunk once."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuload.layout import ArrayLayout, Filter, plan_read
from gpuload.source import BufferSource
from gpuload.store import CsrMatrix, DenseMatrix


def layout_of(lengths: list[int]) -> ArrayLayout:
    edges = np.concatenate([[0], np.cumsum(lengths)])
    nbytes = np.full(len(lengths), 10)
    return ArrayLayout(
        BufferSource("made up", np.zeros(10 * len(lengths), np.uint8)),
        "data",
        (int(edges[-1]),),
        np.dtype(np.int32),
        (max(1, *lengths),),
        np.cumsum(nbytes) - nbytes,
        nbytes,
        np.zeros(len(lengths), np.uint32),
        (Filter("parquet"),),
        edges=edges,
    )


def test_chunks_of_joined_files_are_numbered_as_in_their_own() -> None:
    """The numbers that errors name; the third file has no chunk."""
    layout = replace(layout_of([1] * 7), first_chunks=np.array([0, 3, 5, 5]))
    assert [layout.number_in_file(chunk) for chunk in range(7)] == [0, 1, 2, 0, 1, 0, 1]
    assert layout_of([1, 1]).number_in_file(1) == 1


def test_tables_of_chunks_are_counted_as_memory() -> None:
    """Each chunk has an offset and a size of 8 bytes, a mask of 4, and a byte for what was verified."""
    layout = layout_of([5, 2, 3])
    assert replace(layout, edges=None).index_nbytes == 3 * (8 + 8 + 4 + 1)
    assert layout.index_nbytes == 3 * (8 + 8 + 4 + 1) + 4 * 8  # with the edges


@given(
    lengths=st.lists(st.sampled_from([0, 0, 1, 2, 7]), min_size=1, max_size=12),
    marks=st.lists(st.integers(0, 90), min_size=2, max_size=10, unique=True),
)
def test_elements_come_from_their_chunks(lengths: list[int], marks: list[int]) -> None:
    layout = layout_of(lengths)
    n = layout.shape[0]
    edges = np.unique(np.clip(sorted(marks), 0, n))
    ranges = np.stack([edges[:-1], edges[1:]], axis=1)[::2]
    if not len(ranges):
        return
    sizes = ranges[:, 1] - ranges[:, 0]
    read = plan_read(layout, ranges, np.cumsum(sizes) - sizes, "data")
    stored = np.split(np.arange(n), np.cumsum(lengths)[:-1])  # what each chunk decodes to
    out = np.full(int(sizes.sum()), -1)
    for c, chunk in enumerate(read.chunk_id.tolist()):
        for p in range(read.chunk_pieces[c], read.chunk_pieces[c + 1]):
            src, dest, width = read.piece_src[p], read.piece_dest[p], read.piece_width[p]
            assert src + width <= lengths[chunk]
            out[dest : dest + width] = stored[chunk][src : src + width]
    np.testing.assert_array_equal(out, np.concatenate([np.arange(lo, hi) for lo, hi in ranges]))
    assert read.chunk_id.tolist() == sorted(set(read.chunk_id.tolist()))
    assert all(lengths[chunk] for chunk in read.chunk_id)
    np.testing.assert_array_equal(layout.decoded_nbytes(read.chunk_id), [4 * lengths[c] for c in read.chunk_id])
    for nbytes in (1, 20, 1_000):
        parts = read.parts(nbytes)
        assert [lo for lo, _ in parts] + [read.extent_offset.size] == [0, *(hi for _, hi in parts)]


@given(lengths=st.lists(st.lists(st.sampled_from([0, 0, 1, 3]), min_size=1, max_size=4), min_size=1, max_size=6))
def test_block_edges_follow_chunks(lengths: list[list[int]]) -> None:
    rows = np.concatenate(lengths)
    indptr = np.concatenate([[0], np.cumsum(rows)])
    layout = layout_of([sum(part) for part in lengths])
    edges = CsrMatrix(indptr, layout, layout, 5).chunk_edges()
    assert (edges[0], edges[-1]) == (0, rows.size)
    assert np.all(np.diff(edges) > 0)
    assert layout.edges is not None
    for first in layout.edges[:-1]:  # a block begins where a chunk does, but for empty rows before it
        assert int(first) in indptr[edges] or first == indptr[-1]


@pytest.mark.parametrize(
    ("chunk_rows", "is_chunked", "expected"),
    [(7, True, [0, 7, 14, 20]), (20, False, [0, 8, 16, 20])],  # of 8,000 bytes a row, 8 are just below 64 KiB
)
def test_row_edges_of_a_dense_matrix(chunk_rows: int, is_chunked: bool, expected: list[int]) -> None:
    n_chunks = -(-20 // chunk_rows)
    nothing = np.zeros(n_chunks, dtype=np.int64)
    source, mask = BufferSource("made up", np.zeros(1, np.uint8)), np.zeros(n_chunks, np.uint32)
    layout = ArrayLayout(
        source, "X", (20, 1000), np.dtype("<f8"), (chunk_rows, 1000), nothing, nothing, mask, is_chunked=is_chunked
    )
    assert DenseMatrix(layout, layout.shape[1:]).chunk_edges().tolist() == expected
