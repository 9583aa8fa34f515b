"""The layouts of each file's arrays, once they share the tables of joined ones, say the same as before."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from gpuload.joined import join_files
from gpuload.layout import ArrayLayout, Filter
from gpuload.remote import RemoteObject
from gpuload.remote.source import RemoteSource
from gpuload.source import FileSource

if TYPE_CHECKING:
    from pathlib import Path

TABLES = ("chunk_offset", "chunk_nbytes", "chunk_mask", "verified")


def layout_of(path: Path, name: str, n: int, length: int, level: int, *, is_chunked: bool = True) -> ArrayLayout:
    n_chunks = -(-n // length)
    path.write_bytes(bytes(100 * n_chunks))
    nbytes = np.arange(1, n_chunks + 1)
    return ArrayLayout(
        FileSource(str(path)),
        name,
        (n,),
        np.dtype("<f4"),
        (length,),
        100 * np.arange(n_chunks),
        nbytes,
        np.arange(n_chunks, dtype=np.uint32) % 2,
        (Filter("deflate", (level,)),),
        is_chunked=is_chunked,
    )


@pytest.mark.parametrize("lengths", [(10, 10, 10), (10, 7, 30)])
def test_joined_layouts_are_like_those_of_their_files(tmp_path: Path, lengths: tuple[int, ...]) -> None:
    names = ("/a/X/data", "/b/X/data", "/raw/X/data")
    sizes = (35, 42, 60)
    layouts = [layout_of(tmp_path / str(k), names[k], sizes[k], lengths[k], 4 + k, is_chunked=k < 2) for k in range(3)]
    joined, parts = join_files([(layout,) for layout in layouts])
    ((array,),) = joined.groups
    base = array.layout.source.base.tolist()
    first = 0
    for k, (layout, (part,)) in enumerate(zip(layouts, parts, strict=True)):
        assert (part.shape, part.chunk_shape, part.filters) == (
            (sizes[k],),
            (lengths[k],),
            (Filter("deflate", (4 + k,)),),
        )
        assert part.is_chunked == (k < 2)
        assert part.edges is None
        n_chunks = -(-sizes[k] // lengths[k])
        assert part.chunk_offset.tolist() == [base[k] + 100 * chunk for chunk in range(n_chunks)]
        assert part.chunk_nbytes.tolist() == list(range(1, n_chunks + 1))
        assert part.chunk_mask.tolist() == [chunk % 2 for chunk in range(n_chunks)]
        assert [part.number_in_file(chunk) for chunk in range(n_chunks)] == list(range(n_chunks))
        assert [array.layout.number_in_file(first + chunk) for chunk in range(n_chunks)] == list(range(n_chunks))
        assert all(np.shares_memory(getattr(part, table), getattr(array.layout, table)) for table in TABLES)
        wide = layout.with_dest_stride(3)
        wide.verified[0] = 1
        assert layout.verified[0] == 1
        first += n_chunks
    assert array.layout.name == "X/data"
    starts = np.cumsum([0] + [-(-size // length) * length for size, length in zip(sizes, lengths, strict=True)])
    chunks = np.cumsum([0] + [-(-size // length) for size, length in zip(sizes, lengths, strict=True)])
    assert array.layout.shape == (starts[-1],)
    assert array.layout.chunk_shape == (max(lengths),)
    assert (array.start.tolist(), array.first_chunk.tolist()) == (starts[:-1].tolist(), chunks[:-1].tolist())
    edges = np.concatenate([np.arange(a, b, n) for a, b, n in zip(starts, starts[1:], lengths, strict=False)])
    if len(set(lengths)) > 1:
        assert array.layout.edges is not None
        assert array.layout.edges.tolist() == [*edges.tolist(), starts[-1]]
    assert joined.index_nbytes == (8 * (chunks[-1] + 1) if len(set(lengths)) > 1 else 0)  # no file has these edges
    files, at, size = array.layout.source.locate(np.array(base) + 7)
    assert (files.tolist(), at.tolist()) == ([0, 1, 2], [7, 7, 7])
    assert size.tolist() == [layout.source.nbytes for layout in layouts]
    for k, at in enumerate(base):  # of each file the first byte, and one within
        assert [array.layout.source.where_is(at + n) for n in (0, 7)] == [(str(tmp_path / str(k)), n) for n in (0, 7)]
        nbytes = 100 * -(-sizes[k] // lengths[k])
        assert [array.layout.source.read_into(np.empty(9999, np.uint8), at + n) for n in (0, 7)] == [nbytes, nbytes - 7]
    one_of_each = np.array([[1, 2], [3, 4], [5, 6]])
    read = array.plan_read(np.arange(3), one_of_each, np.arange(3), "indices", np.array([11, 22, 33]))
    assert read.chunk_id.tolist() == chunks[:-1].tolist()
    assert read.chunk_offset.tolist() == base
    assert read.chunk_limit.tolist() == [11, 22, 33]
    for layout in layouts:
        layout.source.close()


LEVELS = {"filters": (Filter("deflate", (9,)),)}
SHUFFLED = {"filters": (Filter("shuffle", (4,)), Filter("deflate", (4,)))}
BLOSC = {"filters": (Filter("blosc", (2, 2, 4)),)}
BITSHUFFLE = {"filters": (Filter("bitshuffle", (0, 4, 4, 0, 0)),)}
WIDE = {"shape": (40, 5), "chunk_shape": (10, 5)}


def of(name: str, *values: int) -> dict[str, Any]:
    return {"filters": (Filter(name, values),)}


OF_ANY_LENGTH = ("shuffle", "deflate", "gzip", "lzf", "zstd", "fletcher32", "crc32c")
WITH_A_LEVEL = ("deflate", "gzip", "lzf", "zstd")


@pytest.mark.parametrize(
    ("one", "other", "n_groups"),
    [
        ({}, {}, 1),
        ({}, LEVELS, 1),
        ({}, {"chunk_shape": (11,)}, 1),
        *((of(name), {**of(name), "chunk_shape": (11,)}, 1) for name in OF_ANY_LENGTH),
        *((of(name, 1), of(name, 9), 1) for name in WITH_A_LEVEL),
        ({"fill_value": np.nan}, {"fill_value": np.nan}, 1),
        (WIDE, WIDE, 1),
        ({}, {"dtype": np.dtype("<i4")}, 2),
        ({}, {"dtype": np.dtype(">f4")}, 2),
        ({}, {"fill_value": 1}, 2),
        ({}, {"filters": ()}, 2),
        ({}, {"filters": (Filter("zstd", (4,)),)}, 2),
        ({}, SHUFFLED, 2),
        (SHUFFLED, {"filters": (Filter("shuffle", (8,)), Filter("deflate", (4,)))}, 2),
        (BLOSC, BLOSC, 1),
        (BLOSC, {"filters": (Filter("blosc", (2, 2, 8)),)}, 2),
        (BLOSC, {**BLOSC, "chunk_shape": (11,)}, 2),  # a decoder is made for one length
        (BITSHUFFLE, BITSHUFFLE, 1),
        (BITSHUFFLE, {"filters": (Filter("bitshuffle", (0, 4, 4, 64, 0)),)}, 2),
        (BITSHUFFLE, {**BITSHUFFLE, "chunk_shape": (11,)}, 2),
        (WIDE, {"shape": (40, 6), "chunk_shape": (10, 6)}, 2),
        ({"shape": (40, 5), "chunk_shape": (10, 3)}, {"shape": (40, 6), "chunk_shape": (10, 3)}, 2),
        (WIDE, {"shape": (40, 5), "chunk_shape": (11, 5)}, 2),
        (WIDE, {"shape": (40, 5), "chunk_shape": (10, 3)}, 2),
        (WIDE, {"shape": (40, 5, 1), "chunk_shape": (10, 5, 1)}, 2),
        ({"shape": (40, 0), "chunk_shape": (10, 0)}, {"shape": (40, 0), "chunk_shape": (10, 0)}, 2),
        ({"edges": np.array([0, 10, 20, 30, 40])}, {"edges": np.array([0, 10, 20, 30, 40])}, 2),
    ],
)
def test_only_arrays_that_decode_alike_are_joined(
    tmp_path: Path, one: dict[str, Any], other: dict[str, Any], n_groups: int
) -> None:
    layouts = [replace(layout_of(tmp_path / str(k), "/X", 40, 10, 4), **of) for k, of in enumerate((one, other))]
    joined, parts = join_files([(layout,) for layout in layouts])
    assert len(joined.groups) == n_groups
    assert joined.group.tolist() == [0, n_groups - 1]
    assert joined.place.tolist() == [0, 2 - n_groups]
    assert joined.is_of(parts)
    assert not joined.is_of(parts[:1])
    assert not joined.is_of(parts[::-1])
    assert len(joined.sources) == 2 - n_groups
    if n_groups == 2:
        assert joined.index_nbytes == 0  # edges are among the tables of their file
    for layout in layouts:
        layout.source.close()


@pytest.mark.parametrize("odd", [0, 1], ids=["data", "indices"])
def test_files_are_joined_only_if_all_their_arrays_can_be(tmp_path: Path, odd: int) -> None:
    files = [layout_of(tmp_path / str(k), "/X", 40, 10, 4) for k in range(2)]
    pairs = [[layout, layout] for layout in files]
    joined, parts = join_files([tuple(pair) for pair in pairs])
    (arrays,) = joined.groups
    assert arrays[0].layout.source is arrays[1].layout.source  # both arrays of a file are in it
    assert [len(part) for part in parts] == [2, 2]
    for pair in pairs:
        pair[odd] = replace(pair[odd], edges=np.array([0, 10, 20, 30, 40]))
    joined, parts = join_files([tuple(pair) for pair in pairs])
    assert [numbers.tolist() for numbers in joined.files] == [[0], [1]]
    assert not joined.sources
    assert parts == [tuple(pair) for pair in pairs]
    for layout in files:
        layout.source.close()


def test_arrays_of_some_files_may_be_in_files_of_their_own(tmp_path: Path) -> None:
    """As those of a zarr folder are, beside an HDF5 file."""
    one, data, indices = (layout_of(tmp_path / name, "/X", 40, 10, 4) for name in ("one", "data", "indices"))
    joined, _ = join_files([(one, one), (data, indices)])
    (arrays,) = joined.groups
    bases = [(array.layout.source, array.layout.source.base) for array in arrays]
    found = [[source.where_is(int(at)) for at in base] for source, base in bases]
    assert found == [[(str(tmp_path / name), 0) for name in ("one", last)] for last in ("data", "indices")]
    for layout in (one, data, indices):
        layout.source.close()


def far_layout(remote: Any, *keys: str) -> ArrayLayout:
    """Return the layout of an array with a chunk in each of some objects; with none, it has a chunk never written."""
    source, n = RemoteSource("some", remote, [RemoteObject(key, 100, "1") for key in keys]), max(1, len(keys))
    offset, nbytes = (source.base, np.full(n, 100)) if keys else (np.zeros(1, np.int64), np.zeros(1, np.int64))
    return ArrayLayout(source, "/X", (10 * n,), np.dtype("<f4"), (10,), offset, nbytes, np.zeros(n, np.uint32))


def test_arrays_in_objects_are_joined_by_remote() -> None:
    one, other = (SimpleNamespace(name=f"s3://{name}") for name in ("one", "other"))
    layouts = [far_layout(one, "a", "b"), far_layout(one, "c"), far_layout(other, "d"), far_layout(one)]
    joined, parts = join_files([(layout,) for layout in layouts])
    assert [numbers.tolist() for numbers in joined.files] == [[0, 1], [2], [3]]
    (source,) = joined.sources
    assert source.name == "some and 1 more"
    found = [[part.source.where_is(int(at)) for at in part.chunk_offset] for (part,) in parts[:3]]
    assert found == [[("s3://one/a", 0), ("s3://one/b", 0)], [("s3://one/c", 0)], [("s3://other/d", 0)]]
    for each in {source, *(layout.source for layout in layouts)}:
        each.close()


def test_rows_in_several_chunks_of_joined_files(tmp_path: Path) -> None:
    """Files of 40 and 25 rows of 5 values, in chunks of 10 rows and 3 values."""
    layouts = [layout_of(tmp_path / str(k), "/X", n, 5, 4) for k, n in enumerate((40, 30))]
    layouts = [replace(layout, shape=(n, 5), chunk_shape=(10, 3)) for layout, n in zip(layouts, (40, 25), strict=True)]
    joined, _ = join_files([(layout,) for layout in layouts])
    ((array,),) = joined.groups
    assert array.start.tolist() == [0, 40]
    assert array.layout.shape == (70, 5)
    read = array.plan_read(np.array([0, 1]), np.array([[39, 40], [24, 25]]), np.array([0, 5]), "X", None)
    assert read.chunk_id.tolist() == [6, 7, 12, 13]
    for layout in layouts:
        layout.source.close()


def test_only_column_numbers_are_bounded_each_by_its_file(tmp_path: Path) -> None:
    """The second of three files is of another type, and so not joined."""
    types = [np.dtype(name) for name in ("<i4", "<i8", "<i4")]
    layouts = [
        tuple(
            replace(layout_of(tmp_path / f"{k}-{name}", f"/X/{name}", 40, 10, 4), dtype=dtype)
            for name in ("data", "indices")
        )
        for k, dtype in enumerate(types)
    ]
    joined, _ = join_files(layouts)
    ranges, limits = np.array([[5, 6], [15, 16], [25, 26]]), np.array([11, 22, 33])
    reads = joined.plan_reads(np.arange(3), ranges, np.arange(3), ("data", "indices"), limits)
    assert [read.target for read in reads] == ["data", "indices"] * 2
    assert [read.chunk_id.tolist() for read in reads] == [[0, 6], [0, 6], [1], [1]]
    assert [read.chunk_limit.tolist() for read in reads] == [[-1, -1], [11, 33], [-1], [22]]
    for of_file in layouts:
        for layout in of_file:
            layout.source.close()
