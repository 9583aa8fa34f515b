"""Parquet whose rows are cells: unreadable files are refused in one sentence; damage is found, or read as stored."""

from __future__ import annotations

import io
import os
import sys
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import gpuload
from gpuload.backends import codecs
from gpuload.formats import parquet, parquet_cells, parquet_file, parquet_footer
from tests.faults.test_refusals import assert_refused
from tests.mutants import Program
from tests.other_forms import encoded, lists_of, write_genes, write_parquet
from tests.parquet_mutants import BASES
from tests.writers import N_VARS, counts

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

pa = pytest.importorskip("pyarrow")
pq = pytest.importorskip("pyarrow.parquet")

N_QUICK, N_SLOW = 24, 4_000
TIME_LIMIT_S = 240
ALLOWED = {"equal", "right", "refused"}


@pytest.fixture(scope="module")
def _pyarrow_has_its_threads(warmed_up: None, tmp_path_factory: pytest.TempPathFactory) -> None:
    path = tmp_path_factory.mktemp("warm") / "cells.parquet"
    write_parquet(path, counts(), {"n": list(range(131))})
    with gpuload.open_loader(path, obs=["n"]) as loader:
        list(loader)


@pytest.fixture(autouse=True)
def _leave_nothing(_pyarrow_has_its_threads: None, no_leaks: None) -> None:
    """Check it for every test here."""


@pytest.fixture
def write(tmp_path: Path) -> Callable[..., Path]:
    """Return a function that writes columns as a file."""

    def table(**columns: Any) -> Path:
        options = columns.pop("options", {})
        pq.write_table(pa.table(columns), tmp_path / "cells.parquet", **options)
        return tmp_path / "cells.parquet"

    return table


GENES, VALUES = lists_of(counts(), 0, None)


def test_missing_columns_are_refused(write: Callable[..., Path]) -> None:
    path = write(tokens=GENES, expressions=VALUES)
    assert_refused("StoreError", path, str(path), "'tokens'", "'genes' and 'expressions'", "layer=")
    path = write(genes=GENES, expressions=VALUES, n=list(range(131)))
    assert_refused("StoreError", path, "'spliced'", "'expressions'", layer="spliced")
    assert_refused("StoreError", path, "'n' holds int64", layer="n")
    assert_refused("StoreError", path, "'genes' holds list", "one value per cell", obs=["genes"])
    assert_refused("StoreError", path, "'genes' holds list", "one value per cell", obs=["genes"], join="outer")
    assert_refused("StoreError", path, "no column 'm'", "'n'", obs=["m"])
    assert_refused("StoreError", path, "X_pca", obsm=["X_pca"])


def test_a_file_that_is_replaced_while_it_is_opened(
    write: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = write(genes=[[7], [8]], expressions=[[9.0], [1.0]]).rename(tmp_path / "other")
    path, real = write(genes=[[1], [2]], expressions=[[3.0], [4.0]]), parquet._open

    def replaced_first(*args: Any, **options: Any) -> Any:
        if other.exists():
            other.replace(path)
        return real(*args, **options)

    monkeypatch.setattr(parquet, "_open", replaced_first)
    told = rf"^{path}: the file was replaced while it was being opened; open it again\.$"
    with pytest.raises(gpuload.ReadError, match=told):
        gpuload.open_loader(path)


def test_a_file_that_is_changed_while_it_is_opened(write: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """What was found before the change is not taken for what the file holds after it."""
    plain = {"compression": "none", "use_dictionary": False}
    other = write(genes=[[1], [2, 3]], expressions=[[3.0], [4.0, 5.0]], options=plain).read_bytes()
    path, real = write(genes=[[1, 2], [3]], expressions=[[3.0, 4.0], [5.0]], options=plain), parquet_file.row_lengths

    def changed_next(*args: Any) -> Any:
        found = real(*args)
        path.write_bytes(other)
        os.utime(path, ns=(0, 0))  # not that of the write before, which may be the same
        return found

    monkeypatch.setattr(parquet_file, "row_lengths", changed_next)
    told = rf"^{path}: the file was changed while the store was open \(.*\); open the loader again when nothing is"
    with gpuload.open_loader(path, batch_size=1) as loader, pytest.raises(gpuload.ReadError, match=told):
        list(loader)


@pytest.mark.parametrize(
    ("genes", "values", "parts"),
    [
        (pa.array([[1, 2], [3]]), pa.array([["a", "b"], ["c"]]), ["'expressions' holds list<", "string"]),
        (pa.array([[[1, 2]], [[3]]]), pa.array([[1.0], [2.0]]), ["'genes' holds list<", "list<"]),
        (pa.array([[1.0, 2.0], [3.0]]), pa.array([[1.0, 2.0], [3.0]]), ["'genes' holds float64", "integers"]),
        (pa.array([[1], [2]]), pa.array([[True], [False]]), ["'expressions' holds list<", "bool"]),
        (pa.array([1, 2]), pa.array([[1.0], [2.0]]), ["'genes' holds int64", "one list"]),
        (pa.array([[{"a": 1}]]), pa.array([[1.0]]), ["'genes' holds list<", "struct"]),
    ],
)
def test_unsupported_column_types_are_refused(
    write: Callable[..., Path], genes: Any, values: Any, parts: list[str]
) -> None:
    path = write(genes=genes, expressions=values)
    assert_refused("StoreError", path, str(path), *parts)


@pytest.mark.parametrize("version", ["1.0", "2.0"])
@pytest.mark.parametrize("codec", ["snappy", "zstd", "none"])
@pytest.mark.parametrize(
    ("genes", "values", "column", "what"),
    [
        ([[1], None, [2]], [[1.0], [], [2.0]], "'genes'", "a list is missing"),
        ([[1], [], [2]], [[1.0], None, [2.0]], "'expressions'", "a list is missing"),
        ([[1], [2, None]], [[1.0], [2.0, 3.0]], "'genes'", "a list holds a missing value"),
        ([[1], [2, 3]], [[1.0], [2.0, None]], "'expressions'", "a list holds a missing value"),
    ],
)
def test_missing_values(
    write: Callable[..., Path], genes: Any, values: Any, column: str, what: str, codec: str, version: str
) -> None:
    path = write(genes=genes, expressions=values, options={"compression": codec, "data_page_version": version})
    assert_refused("StoreError", path, str(path), column, what, "row group 0", "empty list")


def test_lists_of_unequal_length_are_refused(write: Callable[..., Path]) -> None:
    path = write(genes=[[1], [2, 3], [4]], expressions=[[1.0], [2.0], [3.0, 4.0]], options={"row_group_size": 2})
    assert_refused("CorruptDataError", path, "row 1 has 2 genes but 1 expressions")
    path = write(genes=[[1], [2], [4], [5, 6]], expressions=[[1.0], [2.0], [3.0], [4.0]], options={"row_group_size": 2})
    assert_refused("CorruptDataError", path, "row 3 has 2 genes but 1 expressions")
    path = write(genes=[[1], [2, 3]], expressions=[[1.0, 2.0], [3.0]])  # as many in all
    assert_refused("CorruptDataError", path, "row 0 has 1 genes but 2 expressions")


def test_leaders_in_only_some_rows_are_refused(write: Callable[..., Path]) -> None:
    path = write(genes=[[1, 5], [], [4, 5], [1, 6]], expressions=[[-2.0, 1.0], [], [2.0, 3.0], [-2.0, 1.0]])
    assert_refused("StoreError", path, str(path), "[CLS]", "row 2 for one")
    few = write(genes=[[1, 5], [4, 5]], expressions=[[-2.0, 1.0], [4.0, 5.0]], options={"row_group_size": 1})
    assert_refused("StoreError", few, str(few), "[CLS]", "row 1 for one")
    genes, values = 20 * [[1, 5]] + 20 * [[4, 5]], 20 * [[-2.0, 1.0]] + 20 * [[4.0, 5.0]]
    with_bounds = {"row_group_size": 20}
    path = write(genes=genes, expressions=values, options=with_bounds)
    assert_refused("CorruptDataError", path, "chunk 1 of", "[CLS]", shuffle=False)
    path = write(genes=genes[::-1], expressions=values[::-1], options=with_bounds)
    assert_refused("StoreError", path, str(path), "[CLS]", "row 0 for one")
    plain, signed, led = ([4, 5], [4.0, 5.0]), ([0, 1, 5], [1.0, 2.0, -3.0]), ([1, 5], [-2.0, 1.0])
    for groups in ((plain, signed, led), (plain, led, signed)):  # those that may have leaders, the last or the first
        genes, values = ([group[which] for group in groups for _ in range(20)] for which in (0, 1))
        path = write(genes=genes, expressions=values, options=with_bounds)
        assert_refused("StoreError", path, str(path), "[CLS]", "row 0 for one")


@pytest.mark.parametrize("pair", [(17, -2.0), (1, -2.5), (17, -2.5), (1, 2.0)])
def test_one_row_whose_leader_is_damaged_is_refused(pair: tuple[int, float], write: Callable[..., Path]) -> None:
    """The leaders of the others would else come out as values of gene 1."""
    genes, values = 20 * [[1, 5]], 20 * [[-2.0, 1.0]]
    genes[3], values[3] = [pair[0], 5], [pair[1], 1.0]
    path = write(genes=genes, expressions=values)
    assert_refused("StoreError", path, str(path), "[CLS]", "row 3 for one")


@pytest.mark.parametrize(
    ("options", "parts"),
    [
        ({"compression": "brotli"}, ["'genes'", "BROTLI", "ZSTD, LZ4. Rewrite", "gzip"]),
        (
            {"use_dictionary": False, "column_encoding": {"expressions.list.element": "DELTA_BYTE_ARRAY"}},
            ["'expressions'", "DELTA_BYTE_ARRAY", "dictionary"],
        ),
    ],
)
def test_unknown_encodings_are_refused(write: Callable[..., Path], options: Any, parts: list[str]) -> None:
    halves = pa.array([np.asarray(row, dtype=np.float16) for row in VALUES], pa.list_(pa.float16()))
    path = write(genes=GENES, expressions=halves, options=options)
    assert_refused("StoreError", path, str(path), *parts)


@pytest.mark.parametrize("codec", ["zstd", "lz4"])
def test_codecs_that_cannot_be_called_are_refused(
    write: Callable[..., Path], monkeypatch: pytest.MonkeyPatch, codec: str
) -> None:
    monkeypatch.setattr(codecs, "has_addresses", lambda: False)
    path = write(genes=GENES, expressions=VALUES, options={"compression": codec})
    words = f"compressed with {codec.upper()}, which cannot be decoded here; supported codecs are UNCOMPRESSED, SNAPPY,"
    assert_refused("StoreError", path, words, "GZIP. Rewrite it, for example with compression='gzip'")


def test_metadata_only_file_is_refused(write: Callable[..., Path], tmp_path: Path) -> None:
    """A file called _metadata, as dask and Spark write it beside those that hold the values."""
    footer, path = pq.read_metadata(write(genes=GENES, expressions=VALUES)), tmp_path / "_metadata"
    footer.write_metadata_file(path)
    assert_refused("CorruptDataError", path, f"{path}: column 'genes' lies outside the file", "Restore")
    footer.set_file_path("part-0.parquet")
    footer.write_metadata_file(path)
    assert_refused("StoreError", path, f"{path}: column 'genes' is in another file, 'part-0.parquet'; pass that")


def test_column_whose_end_exceeds_int64_is_refused(write: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> None:
    def far(footer: Any, *given: Any, real: Any = parquet_footer.Footer.column) -> Any:
        column = real(footer, *given)
        column.offset[0] = (1 << 63) - 16
        return column

    monkeypatch.setattr(parquet_footer.Footer, "column", far)
    path = write(genes=GENES, expressions=VALUES)
    assert_refused("CorruptDataError", path, f"{path}: column 'genes' lies outside the file", "Restore")


def test_column_with_two_codecs_is_refused(write: Callable[..., Path]) -> None:
    path = write(genes=GENES, expressions=VALUES, options={"compression": "zstd", "row_group_size": 40})
    raw = bytearray(path.read_bytes())
    zstd, snappy = b"element\x15\x0c", b"element\x15\x02"  # in the footer the codec follows the column's path
    second = [at for at in range(len(raw)) if raw.startswith(zstd, at)][-6]  # pyarrow 17 has them before it too
    raw[second : second + len(zstd)] = snappy
    path.write_bytes(raw)
    assert_refused("StoreError", path, f"{path}: column 'genes' is compressed with several codecs; rewrite it with one")


def test_column_of_two_types_is_refused(write: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> None:
    def mixed(footer: Any, *given: Any, real: Any = parquet_footer.Footer.column) -> Any:
        return replace(real(footer, *given), physical_types={"INT64", "DOUBLE"})

    monkeypatch.setattr(parquet_footer.Footer, "column", mixed)
    path = write(genes=GENES, expressions=VALUES)
    assert_refused("CorruptDataError", path, "column 'genes' is INT64 in one place and DOUBLE in another", "restore")


def test_oversized_row_groups_are_refused(write: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parquet_cells, "MAX_CHUNK", 100)
    path = write(genes=GENES, expressions=VALUES)
    assert_refused("StoreError", path, str(path), f"{counts().nnz} values", "row_group_size=")


def test_too_many_gene_names_for_memory_are_refused(
    write: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write(genes=[[0, 100_000_000]], expressions=[[1.0, 2.0]])
    monkeypatch.setattr("gpuload.machine.memory_nbytes", lambda: 10 << 30)
    words = f"{path} has 100000001 genes, whose names would take 6.4 GB of memory, but this machine has 10.7 GB"
    assert_refused("StoreError", path, words, "damaged?")


def test_mismatched_gene_tables_are_refused(tmp_path: Path, write: Callable[..., Path]) -> None:
    path, table = write(genes=GENES, expressions=VALUES), tmp_path / "gene_metadata.parquet"
    write_genes(table, 0, N_VARS - 1)
    assert_refused("StoreError", path, str(path), f"number {N_VARS - 1}", f"0 to {N_VARS - 2}")
    write_genes(table, 1, N_VARS - 1)  # gene 0 has no name
    assert_refused("CorruptDataError", path, "chunk 0 of genes", "column number outside")
    pq.write_table(pa.table({"gene_symbol": ["a"]}), table)
    assert_refused("StoreError", path, str(table), "'gene_symbol'", "token_id")
    pq.write_table(pa.table({"gene_symbol": ["a", "b"], "token_id": [1, 1]}), table)
    assert_refused("StoreError", path, str(table), "token_id", "once")
    pq.write_table(pa.table({"gene_symbol": ["a", "b"], "token_id": [1.5, 1]}), table)
    assert_refused("StoreError", path, str(table), "token_id", "whole numbers")
    table.write_bytes(b"PAR1")
    assert_refused("CorruptDataError", path, str(table))


def test_negative_gene_numbers_are_refused(write: Callable[..., Path]) -> None:
    genes = [[0, 2], [-1, 3]]
    assert_refused(
        "CorruptDataError", write(genes=genes, expressions=genes), "chunk 0 of genes", "column number outside"
    )
    path = write(genes=genes, expressions=genes, options={"write_statistics": False})
    assert_refused("CorruptDataError", path, str(path), "'genes'", "below 0")


def test_obs_columns_that_differ_between_files_are_refused(tmp_path: Path) -> None:
    write_parquet(tmp_path / "a.parquet", counts(), {"n": list(range(131)), "plate": ["a"] * 131})
    write_parquet(tmp_path / "b.parquet", counts(), {"n": ["x"] * 131})
    assert_refused("StoreError", tmp_path, "b.parquet", "'n'", "int64", obs=["n"])
    assert_refused("StoreError", tmp_path, "b.parquet", "no column 'plate'", obs=["plate"])


def test_column_of_non_utf8_bytes_is_refused(write: Callable[..., Path]) -> None:
    path = write(genes=GENES, expressions=VALUES, image=[b"\xff\xd8"] * 131)
    assert_refused("StoreError", path, f"{path}: obs column 'image' holds bytes that are no UTF-8 text", obs=["image"])


def test_damaged_obs_column_is_refused(write: Callable[..., Path]) -> None:
    """A letter that a checksum tells; the number of a word that does not exist, which would pass for a missing one."""
    words = ["drug 1", "drug 2", *["drug 3"] * (len(GENES) - 2)]
    options = {"compression": "none", "write_page_checksum": True}
    path = write(genes=GENES, expressions=VALUES, drug=words, options=options)
    content = path.read_bytes()
    path.write_bytes(content.replace(b"drug 2", b"drug 7", 1))
    assert_refused("CorruptDataError", path, str(path), "restore", obs=["drug"])
    path = write(genes=GENES, expressions=VALUES, drug=words, options={"compression": "none"})
    run = bytes([0xF6, 0x01, 2])  # 123 times the third word, after a group of 8
    content = path.read_bytes()
    assert content.count(run) == 1
    path.write_bytes(content.replace(run, run[:2] + b"\3"))
    assert_refused("CorruptDataError", path, str(path), "restore", obs=["drug"])


def test_pattern_without_matches_is_refused(tmp_path: Path) -> None:
    assert_refused("ReadError", tmp_path / "train-*.parquet", "train-*.parquet", "pattern")


def test_truncated_file_is_refused(write: Callable[..., Path]) -> None:
    path = write(genes=GENES, expressions=VALUES)
    content = path.read_bytes()
    path.write_bytes(content[: len(content) // 2])
    assert_refused("CorruptDataError", path, str(path), "restore")


@pytest.mark.parametrize(("number", "name"), [(0, "genes"), (1, "expressions")])
def test_undecodable_page_is_named(write: Callable[..., Path], number: int, name: str) -> None:
    path = write(genes=GENES, expressions=VALUES, options={"row_group_size": 40, "use_dictionary": False})
    at = pq.read_metadata(path).row_group(2).column(number).data_page_offset
    raw = bytearray(path.read_bytes())
    raw[at : at + 8] = b"\xff" * 8
    path.write_bytes(raw)
    assert_refused("CorruptDataError", path, f"{path}: chunk 2 of {name} at byte {at} is damaged: ", "Restore it")


def test_lengths_that_wrap_around_are_rejected(write: Callable[..., Path]) -> None:
    """A negative length in snappy, and two lengths in a header whose sum is negative, are both rejected."""
    from gpuload.backends.native import parquet_pages as pages

    path = write(genes=GENES, expressions=VALUES, options={"compression": "snappy", "use_dictionary": False})
    column = pq.ParquetFile(path).metadata.row_group(0).column(0)
    stored = np.fromfile(path, dtype=np.uint8)
    start, page = stored.ctypes.data + column.data_page_offset, np.zeros(pages.N_PAGE, dtype=np.int64)
    at = pages.page_header(start, start + column.total_compressed_size, page) - stored.ctypes.data
    stored[at : at + 12] = np.frombuffer(b"\x80" * 9 + b"\x01\xf0\x28", dtype=np.uint8)
    stored.tofile(path)
    assert_refused("CorruptDataError", path, str(path), "chunk 0 of genes", "is damaged")

    def varint(value: int) -> bytes:
        found = bytearray()
        while value >= 0x80:
            found.append(value & 0x7F | 0x80)
            value >>= 7
        return bytes([*found, value])

    for length, is_header in ((1, True), (2**62, False)):
        both = 2 * (b"\x15" + varint(2 * length))  # doubled, as zigzag has it
        fields = b"\x15\x06\x15\x14\x15\x14\x5c\x15\x02\x15\x00\x15\x02\x15\x00" + both + b"\x00\x00"
        header = np.frombuffer(fields, dtype=np.uint8).copy()
        found = pages.page_header(header.ctypes.data, header.ctypes.data + header.size, page)
        assert (found > 0) == is_header, found


SPARSE_ROWS = [[0, 1], [], [2], [3, 4], [], [5], [6, 7], [], [8]]
"""Both levels and the dictionary's indices are each stored as one bit-packed run of two groups of eight."""


def streams_of_runs(raw: bytearray, at: int) -> list[slice]:
    """Return where the runs of repetition levels, definition levels and indices of the page at an offset are."""
    from gpuload.backends.native import parquet_pages as pages

    page, stored = np.zeros(pages.N_PAGE, dtype=np.int64), np.frombuffer(bytes(raw), dtype=np.uint8)
    base = stored.ctypes.data
    at, found = pages.page_header(base + at, base + stored.size, page) - base, []
    end = at + int(page[pages.STORED])
    for _ in range(2):
        n = int.from_bytes(raw[at : at + 4], "little")
        found.append(slice(at + 4, at + 4 + n))
        at += 4 + n
    found.append(slice(at + 1, end))  # after their bit width
    assert [raw[stream.start] for stream in found] == 3 * [2 << 1 | 1]
    return found


@pytest.mark.parametrize("stream", range(3))
@pytest.mark.parametrize(("number", "name"), [(0, "genes"), (1, "expressions")])
def test_run_longer_than_its_page_is_refused(write: Callable[..., Path], number: int, name: str, stream: int) -> None:
    """Read as far as it goes, it would give values all the same."""
    options = {"compression": "none", "row_group_size": len(SPARSE_ROWS)}
    path = write(genes=2 * SPARSE_ROWS, expressions=2 * SPARSE_ROWS, options=options)
    raw, column = bytearray(path.read_bytes()), pq.read_metadata(path).row_group(1).column(number)
    raw[streams_of_runs(raw, column.data_page_offset)[stream].start] = 3 << 1 | 1
    path.write_bytes(raw)
    assert_refused("CorruptDataError", path, f"{path}: chunk 1 of {name} at byte ", "is damaged", "Restore it")


@pytest.mark.parametrize(("number", "name"), [(0, "genes"), (1, "expressions")])
def test_deltas_longer_than_their_page_are_refused(write: Callable[..., Path], number: int, name: str) -> None:
    """A block of 512 deltas has twice as many bytes as there are; the values could be read from the first half."""
    deltas = encoded("DELTA_BINARY_PACKED", "DELTA_BINARY_PACKED")
    rows = [[k * k for k in row] for row in SPARSE_ROWS]
    path = write(genes=rows, expressions=rows, options={"compression": "none", **deltas})
    raw, column = bytearray(path.read_bytes()), pq.read_metadata(path).row_group(0).column(number)
    at = raw.index(b"\x80\x02\x04\x09", column.data_page_offset)  # blocks of 256 in 4 parts, and 9 values
    raw[at + 1] = 4
    path.write_bytes(raw)
    with pytest.raises(OSError, match="end of stream"):
        pq.read_table(path)
    assert_refused("CorruptDataError", path, f"{path}: chunk 0 of {name} at byte ", "is damaged", "Restore it")


@pytest.mark.parametrize(("stream", "n_spare"), [(0, 0), (1, 1), (2, 3)])
def test_last_run_may_lack_its_padding(write: Callable[..., Path], stream: int, n_spare: int) -> None:
    """Some writers leave it out, although every run should hold whole groups (Encodings, RLE / bit-packing hybrid)."""
    from gpuload.backends import codecs, parquet
    from gpuload.backends.native import parquet_pages as pages

    path = write(genes=SPARSE_ROWS, expressions=SPARSE_ROWS, options={"compression": "none"})
    column, raw = pq.read_metadata(path).row_group(0).column(0), path.read_bytes()
    at, end = column.data_page_offset, column.dictionary_page_offset + column.total_compressed_size
    spec = (pages.CODECS[column.compression], 8, 3, 1, 1, 0, 0, len(SPARSE_ROWS), 1)

    def read(chunk: bytes) -> tuple[list[int], list[int]]:
        stored, finder = np.frombuffer(chunk, dtype=np.uint8), parquet.RowFinder(len(chunk), spec, len(SPARSE_ROWS))
        finder.take(np.append(stored, np.zeros(parquet.SLACK, np.uint8)))
        return finder.result()[0].tolist(), parquet.decode(stored, spec, 4 * 9, 4).view(np.int32).tolist()

    for n in range(n_spare + 2):
        cut = bytearray(raw[:end])
        runs = streams_of_runs(cut, at)[stream]
        del cut[runs.stop - n : runs.stop]
        if stream < 2:
            cut[runs.start - 4] -= n  # its length
        for place in (3, 5):  # both sizes of the page, as zigzag varints
            cut[at + place] -= 2 * n
        chunk = bytes(cut[column.dictionary_page_offset :])
        if n <= n_spare:
            assert read(chunk) == ([0, 2, 2, 3, 5, 5, 6, 8, 8], list(range(9)))
        else:
            with pytest.raises(codecs.DecodeError):
                read(chunk)


def test_file_changed_while_open_is_reported(write: Callable[..., Path]) -> None:
    path = write(genes=GENES, expressions=VALUES)
    with gpuload.open_loader(path, batch_size=8, fetch_factor=1) as loader:
        content = path.read_bytes()
        path.write_bytes(content + b"more")
        with pytest.raises(gpuload.ReadError, match="was changed"):
            list(loader)


def test_file_removed_while_open_is_reported(write: Callable[..., Path]) -> None:
    path = write(genes=GENES, expressions=VALUES)
    with gpuload.open_loader(path) as loader:
        path.unlink()
        with pytest.raises(gpuload.ReadError, match="removed"):
            list(loader)


def test_without_pyarrow(write: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> None:
    path = write(genes=GENES, expressions=VALUES)
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", None)
    with pytest.raises(gpuload.MissingDependencyError, match=r"gpuload\[parquet\]"):
        gpuload.open_loader(path)


# --- damage


@pytest.fixture(scope="module")
def program() -> Iterator[Program]:
    found = Program("tests.parquet_mutants")
    yield found
    found.close()


def check(program: Program, name: str, first: int, n: int, folder: Path) -> None:
    lines, ending = program.do(name, first, n, str(folder), time_limit_s=TIME_LIMIT_S + n)
    assert not ending, f"at {lines[-1:]}: {ending}"
    found = [line for line in lines if "outcome" in line]
    assert [line["number"] for line in found] == list(range(first, first + n))
    bad = [line for line in found if line["outcome"] not in ALLOWED]
    assert not bad, f"{name}: {len(bad)} bad outcomes, first {bad[:3]}"
    for line in found:
        if name == "checksums" and line["region"] in ("genes", "expressions"):
            assert line["outcome"] in ("refused", "right"), line
        if line["outcome"] == "refused":
            assert "\n" not in line["message"], line
            assert ".parquet" in line["message"], line
            assert line["message"].endswith((".", "?")), line
    assert 0 < sum(line["outcome"] == "refused" for line in found) < len(found)


@pytest.mark.parametrize("name", BASES)
def test_damaged_files(program: Program, name: str, tmp_path: Path) -> None:
    check(program, name, 0, N_QUICK, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("name", BASES)
def test_many_damaged_files(program: Program, name: str, tmp_path: Path) -> None:
    check(program, name, N_QUICK, N_SLOW, tmp_path)


# --- the decoder alone


def test_random_bytes_raise_a_decode_error() -> None:
    from gpuload.backends import codecs, parquet
    from gpuload.backends.native import parquet_pages

    rng = np.random.default_rng(0)
    for codec in parquet_pages.CODECS.values():
        for _ in range(200):
            stored = rng.integers(0, 256, int(rng.integers(0, 200)), dtype=np.uint8)
            if stored.size > 8:
                stored[:8] = [0x15, 0, 0x15, int(rng.integers(0, 100)), 0x15, int(rng.integers(0, 100)), 0x2C, 0x15]
            with pytest.raises(codecs.DecodeError):
                parquet.decode(stored, (codec, 4, 3, 1, 0, 0, 1, 10, 1), 4 * 7, 4)


@pytest.mark.parametrize("missing", [None, 1, 2, 3, 4])
def test_page_header_needs_its_required_fields(missing: int | None) -> None:
    """Read as PLAIN or as holding no values, a page would give other values (parquet.thrift, DataPageHeader)."""
    from gpuload.backends import codecs, parquet

    fields = {1: 14, 2: 0, 3: 6, 4: 6}  # num_values, encoding, those of both levels; as zigzag varints
    header, last = [0x15, 0, 0x15, 0, 0x15, 0, 0x2C], 0  # type and both sizes are 0; field 5 is a struct
    for number, value in fields.items():
        if number != missing:
            header += [(number - last) << 4 | 5, value]
            last = number
    stored = np.array([*header, 0, 0], dtype=np.uint8)
    found = "the levels of a page are malformed" if missing is None else "the header of a page is malformed"
    with pytest.raises(codecs.DecodeError, match=found):
        parquet.decode(stored, (0, 4, 3, 1, 0, 0, 1, 10, 1), 4 * 7, 4)


@pytest.mark.parametrize(
    "options",
    [
        {"compression": "zstd"},
        {"compression": "snappy", "use_dictionary": False, "row_group_size": 7},
        {"compression": "none", "write_statistics": False, "row_group_size": 1},
        {"compression": "gzip", "data_page_version": "2.0", "write_page_index": True, "row_group_size": 50},
    ],
)
def test_footer_says_what_pyarrow_finds_in_it(write: Callable[..., Path], options: dict[str, Any]) -> None:
    path = write(genes=GENES, expressions=VALUES, options={**options, "store_schema": True})
    known = pq.read_metadata(path)
    groups = [known.row_group(k) for k in range(known.num_row_groups)]
    with path.open("rb") as file:
        footer = parquet_footer.read_footer(file)
    assert footer.n_rows.tolist() == [group.num_rows for group in groups]
    for place, dtype in enumerate((np.dtype(np.int64), np.dtype(np.float32))):
        column, theirs = footer.column(place, dtype), [group.column(place) for group in groups]
        first = [part.dictionary_page_offset or part.data_page_offset for part in theirs]
        assert column.offset.tolist() == first
        assert column.nbytes.tolist() == [part.total_compressed_size for part in theirs]
        assert column.physical_types == {part.physical_type for part in theirs}
        assert column.codecs == {part.compression for part in theirs}
        assert column.encodings == {name for part in theirs for name in part.encodings}
        for bounds, name in ((column.least, "min"), (column.greatest, "max")):
            stored = [getattr(part.statistics, name) if part.statistics else None for part in theirs]
            assert np.array_equal(bounds, np.array(stored, dtype=np.float64), equal_nan=True)


def test_any_footer_is_read_or_refused(write: Callable[..., Path]) -> None:
    from gpuload.formats.parquet_footer import read_footer

    path = write(genes=GENES, expressions=VALUES)
    content = path.read_bytes()
    whole = read_footer(io.BytesIO(content))
    assert whole.n_rows.tolist() == [131]
    size = int.from_bytes(content[-8:-4], "little")
    rng = np.random.default_rng(0)
    for n in range(0, size, 7):
        for footer in (content[-8 - size : -8][:n], rng.bytes(n)):
            file = io.BytesIO(b"PAR1" + footer + n.to_bytes(4, "little") + b"PAR1")
            with pytest.raises(ValueError, match="footer"):
                read_footer(file)


def test_fewer_rows_than_the_footer_says_are_refused(write: Callable[..., Path]) -> None:
    """Where the others begin would be whatever was in memory."""
    from gpuload.backends import codecs, parquet
    from gpuload.backends.native import parquet_pages as pages

    path = write(genes=SPARSE_ROWS, expressions=SPARSE_ROWS, options={"compression": "none"})
    column, raw, n = pq.read_metadata(path).row_group(0).column(0), path.read_bytes(), len(SPARSE_ROWS)
    at, nbytes = column.dictionary_page_offset, column.total_compressed_size
    spec = (pages.CODECS[column.compression], 8, 3, 1, 1, 0, 0, n + 1, 1)
    for n_rows in (n, n + 1):
        finder = parquet.RowFinder(nbytes, spec, n_rows)
        finder.take(np.frombuffer(raw[at : at + nbytes] + bytes(parquet.SLACK), dtype=np.uint8).copy())
        with open(path, "rb") as file:
            reads = finder.result, partial(parquet.row_starts, file.fileno(), at, nbytes, spec, n_rows)
            for read in reads:
                if n_rows == n:
                    assert read()[0].tolist() == [0, 2, 2, 3, 5, 5, 6, 8, 8]
                else:
                    with pytest.raises(codecs.DecodeError):
                        read()
