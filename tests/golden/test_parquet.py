"""Parquet files whose rows are cells, against pyarrow: pages, leaders, genes, columns, the index, packing."""

from __future__ import annotations

import os
from contextlib import closing
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.sparse import csr_matrix, vstack

import gpuload
from gpuload.backends import codecs
from gpuload.backends import parquet as backend
from gpuload.cli import main
from gpuload.formats import open_store, parquet_cells, parquet_file
from gpuload.formats.parquet import ParquetTable
from gpuload.formats.parquet_rows import about, spec_of
from gpuload.formats.recognise import GENES_FILE
from gpuload.source import FileSource
from tests.other_forms import FORMS, NAMES, encoded, lists_of, write_genes, write_parquet
from tests.writers import N_OBS, N_VARS, counts

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

pa = pytest.importorskip("pyarrow")
pq = pytest.importorskip("pyarrow.parquet")


@pytest.fixture(autouse=True, scope="module")
def _no_index_of_these(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("GPULOAD_INDEX", str(tmp_path_factory.mktemp("index")))
        yield


def read(path: Any, **given: Any) -> np.ndarray:
    with gpuload.open_loader(path, shuffle=False, batch_size=32, fetch_factor=2, **given) as loader:
        return np.concatenate([np.empty((0, loader.n_vars), np.float32), *(batch.X for batch in loader)])


def random_rows(seed: int, n_rows: int, n_vars: int, most: int, share_empty: float) -> csr_matrix:
    rng = np.random.default_rng(seed)
    lengths = rng.integers(0, most + 1, n_rows) * (rng.random(n_rows) >= share_empty)
    rows = [np.sort(rng.choice(n_vars, min(n, n_vars), replace=False)) for n in lengths]
    indices = np.concatenate([np.empty(0, np.int64), *rows])
    indptr = np.concatenate([[0], np.cumsum([row.size for row in rows])])
    data = rng.integers(1, 1 + rng.choice([1, 3, 300, 1 << 20]), indices.size).astype(np.float32)
    return csr_matrix((data, indices, indptr), shape=(n_rows, n_vars))


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 1 << 32),
    n_rows=st.integers(1, 300),
    n_vars=st.sampled_from([1, 2, 60, 300, 70_000]),
    most=st.sampled_from([0, 1, 3, 40, 2_000]),
    share_empty=st.sampled_from([0.0, 0.1, 1.0]),
    group=st.sampled_from([1, 7, 1_000]),
    leader=st.sampled_from([None, -2.0]),
    first=st.sampled_from([0, 3]),
    page=st.sampled_from([64, 1_000, 1 << 20]),
    version=st.sampled_from(["1.0", "2.0"]),
    codec=st.sampled_from(["NONE", "SNAPPY", "ZSTD", "GZIP", "LZ4"]),
    dictionary=st.sampled_from([False, 64, 1 << 20]),
    encodings=st.sampled_from(
        [None, ("PLAIN", "BYTE_STREAM_SPLIT"), ("BYTE_STREAM_SPLIT", "PLAIN"), ("DELTA_BINARY_PACKED", "PLAIN")]
    ),
)
def test_random_files_are_read_as_written(
    tmp_path_factory: pytest.TempPathFactory,
    seed: int,
    n_rows: int,
    n_vars: int,
    most: int,
    share_empty: float,
    group: int,
    leader: float | None,
    first: int,
    page: int,
    version: str,
    codec: str,
    dictionary: Any,
    encodings: Any,
) -> None:
    path = tmp_path_factory.mktemp("random") / "cells.parquet"
    X = random_rows(seed, n_rows, n_vars, most, share_empty)
    options: dict[str, Any] = {"row_group_size": group, "data_page_size": page, "data_page_version": version}
    options |= {"compression": codec, "use_dictionary": bool(dictionary)}
    if dictionary:
        options["dictionary_pagesize_limit"] = dictionary
    elif encodings:
        options |= encoded(*encodings)
    write_parquet(path, X, {}, first=first, leader=leader, **options)
    with gpuload.open_loader(path, output="csr", seed=seed % 7, batch_size=8, block_size=3, fetch_factor=3) as loader:
        seen = 0
        for batch in loader:
            expected = X[batch.rows]
            np.testing.assert_array_equal(batch.X.indptr, expected.indptr)
            np.testing.assert_array_equal(batch.X.indices, expected.indices + first)
            np.testing.assert_array_equal(batch.X.data, expected.data)
            seen += len(batch)
        assert seen == n_rows
    assert_windows_find_the_same_rows(path, [256, 4_000, 1 << 16][seed % 3])


def assert_windows_find_the_same_rows(path: Path, window: int) -> None:
    """Compare row starts found in windows of a column chunk, as read remotely, with those found in a file."""
    with closing(FileSource(path)) as source:
        table, raw = ParquetTable(source), np.fromfile(path, dtype=np.uint8)
        for column in map(table.list_column, ("genes", "expressions")):
            for offset, nbytes, n in zip(column.offset, column.nbytes, table.group_rows().tolist(), strict=True):
                spec = spec_of(about(column), column.dtype, max_rows=n)
                starts, n_values = backend.row_starts(source.fileno(), offset, nbytes, spec, n)
                found, n_found = by_windows(raw[offset : offset + nbytes], spec, n, window)
                np.testing.assert_array_equal(found, starts)
                assert n_found == n_values


def by_windows(chunk: np.ndarray, spec: Any, n_rows: int, window: int) -> tuple[np.ndarray, int]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(backend, "WINDOW", window)
        patch.setattr(backend.native, "FRONT", min(window, backend.native.FRONT))  # none of what is compiled
        finder = backend.RowFinder(chunk.size, spec, n_rows)
        while finder.wanted:
            first, size = finder.wanted
            assert first + size <= chunk.size
            finder.take(np.append(chunk[first : first + size], np.zeros(backend.SLACK, np.uint8)))
        return finder.result()


INTEGERS = st.one_of(
    st.lists(st.integers(-(2**63), 2**63 - 1), min_size=1, max_size=400),
    st.builds(lambda n, step: [k * step for k in range(n)], st.integers(1, 700), st.integers(-9, 2**50)),
    st.builds(lambda n, bits: [(k * k) % (1 << bits) for k in range(n)], st.integers(1, 700), st.integers(1, 62)),
)
"""Runs of any bit width; no bits are needed where all differences are equal."""


@settings(max_examples=80, deadline=None)
@given(values=INTEGERS, dtype=st.sampled_from(["int32", "int64"]), version=st.sampled_from(["1.0", "2.0"]))
def test_delta_encoded_integers_are_decoded(
    tmp_path_factory: pytest.TempPathFactory, values: list[int], dtype: str, version: str
) -> None:
    path = tmp_path_factory.mktemp("differences") / "cells.parquet"
    wanted = np.array(values, dtype=np.int64).astype(dtype)
    columns = {"genes": [np.arange(wanted.size)], "expressions": pa.array([wanted])}
    options = {"data_page_version": version, **encoded("DELTA_BINARY_PACKED", "DELTA_BINARY_PACKED")}
    pq.write_table(pa.table(columns), path, **options)
    with closing(open_store(path, layer="X", obs=())) as store:
        layout = store.matrices[0].data
        stored = np.empty(int(layout.chunk_nbytes[0]), dtype=np.uint8)
        layout.source.read_into(stored, int(layout.chunk_offset[0]))
        found = codecs.decode(layout.filters, 0, stored, wanted.nbytes, wanted.itemsize)
    np.testing.assert_array_equal(found.view(dtype), wanted)


@pytest.mark.parametrize("nullable", ["neither", "list", "value", "both"])
@pytest.mark.parametrize("version", ["1.0", "2.0"])
def test_nullable_and_required_columns(nullable: str, version: str, tmp_path: Path) -> None:
    value_nullable, list_nullable = nullable in ("value", "both"), nullable in ("list", "both")
    X, fields, arrays = counts(), [], []
    for name, rows, kind in zip(
        ("genes", "expressions"), lists_of(X, 0, None), (pa.int64(), pa.float32()), strict=True
    ):
        type_ = pa.list_(pa.field("item", kind, nullable=value_nullable))
        fields.append(pa.field(name, type_, nullable=list_nullable))
        arrays.append(pa.array(rows, type_))
    table = pa.table(arrays, pa.schema(fields))
    pq.write_table(table, tmp_path / "a.parquet", row_group_size=50, data_page_version=version)
    np.testing.assert_array_equal(read(tmp_path / "a.parquet"), X.toarray())


@pytest.mark.parametrize("kind", ["large_list", "fixed_size_list"])
def test_other_list_types(kind: str, tmp_path: Path) -> None:
    numbers, values = np.arange(12).reshape(4, 3) % 5, np.arange(1, 13, dtype=np.float32).reshape(4, 3)
    make = pa.large_list if kind == "large_list" else lambda type_: pa.list_(type_, 3)
    columns = {
        "genes": pa.array(numbers.tolist(), make(pa.int64())),
        "expressions": pa.array(values.tolist(), make(pa.float32())),
    }
    pq.write_table(pa.table(columns), tmp_path / "a.parquet")
    expected = np.zeros((4, 5), np.float32)
    np.put_along_axis(expected, numbers, values, 1)
    np.testing.assert_array_equal(read(tmp_path / "a.parquet"), expected)


def test_row_longer_than_a_page(tmp_path: Path) -> None:
    X = csr_matrix(np.arange(1, 9_001, dtype=np.float32).reshape(3, 3_000))
    write_parquet(tmp_path / "a.parquet", X, {}, first=3, leader=-2.0, data_page_size=512, write_batch_size=64)
    np.testing.assert_array_equal(read(tmp_path / "a.parquet")[:, 3:], X.toarray())


def test_rows_with_only_a_leader(tmp_path: Path) -> None:
    X = csr_matrix((5, 4), dtype=np.float32)
    write_parquet(tmp_path / "a.parquet", X, {}, first=3, leader=-2.0)
    np.testing.assert_array_equal(read(tmp_path / "a.parquet"), np.zeros((5, 2)))


def test_empty_rows_among_leaders(tmp_path: Path) -> None:
    genes, values = [[], [1, 5], [], [1, 3, 4], []], [[], [-2.0, 1.0], [], [-2.0, 2.0, 3.0], []]
    pq.write_table(pa.table({"genes": genes, "expressions": values}), tmp_path / "a.parquet")
    expected = [[0] * 6, [0, 0, 0, 0, 0, 1], [0] * 6, [0, 0, 0, 2, 3, 0], [0] * 6]
    np.testing.assert_array_equal(read(tmp_path / "a.parquet"), expected)


def test_leaders_before_negative_values(tmp_path: Path) -> None:
    X = csr_matrix(np.array([[0, -1.5, 2], [0, 3, -4], [-5, -2, 1]], dtype=np.float32))
    write_parquet(tmp_path / "a.parquet", X, {}, first=3, leader=-2.0)
    np.testing.assert_array_equal(read(tmp_path / "a.parquet")[:, 3:], X.toarray())
    np.testing.assert_array_equal(read(tmp_path / "a.parquet")[:, :3], np.zeros((3, 3)))


def test_negative_values_are_not_leaders(tmp_path: Path) -> None:
    X = csr_matrix(np.array([[0, -1, 2], [0, -3, 4], [5, -2, 0], [0, -2, 1]], dtype=np.float32))
    write_parquet(tmp_path / "a.parquet", X, {})
    np.testing.assert_array_equal(read(tmp_path / "a.parquet"), X.toarray())
    write_parquet(tmp_path / "b.parquet", X[[0, 1, 3]], {})  # all begin with a negative value, but not the same one
    np.testing.assert_array_equal(read(tmp_path / "b.parquet"), X[[0, 1, 3]].toarray())
    write_parquet(tmp_path / "c.parquet", csr_matrix(np.array([[0, 2, 1], [0, 2, 3]], dtype=np.float32)), {})
    np.testing.assert_array_equal(read(tmp_path / "c.parquet"), [[0, 2, 1], [0, 2, 3]])
    one = np.array([[2, 0, 4], [0, -2, 1], [3, 0, -4], [0, 5, 0]], dtype=np.float32)  # one row as if with a leader
    write_parquet(tmp_path / "d.parquet", csr_matrix(one), {})
    np.testing.assert_array_equal(read(tmp_path / "d.parquet"), one)
    for rows in ([1, 0, 2, 3], [0, 2, 3, 1], [0, 1, 3, 2]):  # in a row group of its own
        write_parquet(tmp_path / "e.parquet", csr_matrix(one[rows]), {}, row_group_size=1)
        np.testing.assert_array_equal(read(tmp_path / "e.parquet"), one[rows])
    single = np.array([[0, -2, 1, -1]], dtype=np.float32)
    write_parquet(tmp_path / "f.parquet", csr_matrix(single), {})
    np.testing.assert_array_equal(read(tmp_path / "f.parquet"), single)
    many = np.vstack([np.tile([[3, 0, -4]], (40, 1)), [[0, -2, 1]]]).astype(np.float32)
    write_parquet(tmp_path / "g.parquet", csr_matrix(many), {}, row_group_size=10)
    np.testing.assert_array_equal(read(tmp_path / "g.parquet"), many)
    most = np.vstack([np.tile([[0, -2, 1]], (30, 1)), [[0, 3, -4]]]).astype(np.float32)
    write_parquet(tmp_path / "h.parquet", csr_matrix(most), {})
    np.testing.assert_array_equal(read(tmp_path / "h.parquet"), most)


def test_leaders_in_row_groups_of_one_row(tmp_path: Path) -> None:
    for X in (np.ones((1, 4), np.float32), np.tile(np.float32([0, 2, 0, 4]), (30, 1))):
        for leader in (-2.0, -0.5):
            write_parquet(tmp_path / "a.parquet", csr_matrix(X), {}, first=3, leader=leader, row_group_size=1)
            np.testing.assert_array_equal(read(tmp_path / "a.parquet"), np.pad(X, ((0, 0), (3, 0))))


def test_empty_files_and_empty_row_groups(tmp_path: Path) -> None:
    write_parquet(tmp_path / "a.parquet", counts()[:0], {})
    assert read(tmp_path / "a.parquet").shape == (0, 0)
    X = vstack(
        [csr_matrix((30, N_VARS), dtype=np.float32), counts(), csr_matrix((25, N_VARS), dtype=np.float32)]
    ).tocsr()
    write_parquet(tmp_path / "b.parquet", X, {}, row_group_size=10)
    np.testing.assert_array_equal(read([tmp_path / "a.parquet", tmp_path / "b.parquet"]), X.toarray())
    with gpuload.open_loader(tmp_path / "b.parquet", block_size="chunk", batch_size=10, fetch_factor=9) as loader:
        assert sorted(np.concatenate([batch.rows for batch in loader])) == list(range(X.shape[0]))


def test_row_groups_that_grow(tmp_path: Path) -> None:
    genes, values = lists_of(counts(), 0, None)
    table, edges = pa.table({"genes": genes, "expressions": values}), [0, 2, 12, N_OBS]
    with pq.ParquetWriter(tmp_path / "a.parquet", table.schema) as writer:
        for start, stop in pairwise(edges):
            writer.write_table(table.slice(start, stop - start))
    assert parquet_file.look_at(str(tmp_path / "a.parquet"), "X").groups["rows"].tolist() == [2, 10, N_OBS - 12]
    np.testing.assert_array_equal(read(tmp_path / "a.parquet"), counts().toarray())


def test_n_vars_follows_the_highest_gene_number(tmp_path: Path) -> None:
    for name, n_vars in (("a", 5), ("b", 9), ("c", 2)):
        write_parquet(tmp_path / f"{name}.parquet", csr_matrix(np.ones((3, n_vars), np.float32)), {})
    with gpuload.open_loader(tmp_path) as loader:
        assert list(loader.var_names) == [str(i) for i in range(9)]
        assert loader.n_obs == 9
    assert read(tmp_path).sum(axis=1).tolist() == [5] * 3 + [9] * 3 + [2] * 3


def test_values_of_unsigned_integers(tmp_path: Path) -> None:
    values = [[1, 2**31, 2**32 - 1], [2**31 + 1, 0, 7]]
    columns = {"genes": [[0, 1, 2]] * 2, "expressions": pa.array(values, pa.list_(pa.uint32()))}
    pq.write_table(pa.table(columns), tmp_path / "a.parquet")
    np.testing.assert_array_equal(read(tmp_path / "a.parquet"), np.float32(values))


@pytest.mark.parametrize("statistics", [True, False])
def test_highest_gene_number_needs_no_statistics(statistics: bool, tmp_path: Path) -> None:
    write_parquet(tmp_path / "a.parquet", counts(), {}, write_statistics=statistics)
    np.testing.assert_array_equal(read(tmp_path / "a.parquet"), counts().toarray())
    write_parquet(tmp_path / "b.parquet", counts(), {}, first=3, leader=-2.0, write_statistics=statistics)
    np.testing.assert_array_equal(read(tmp_path / "b.parquet")[:, 3:], counts().toarray())


@pytest.mark.parametrize(
    "place", ["gene_metadata.parquet", "../gene_metadata.parquet", "metadata/gene_metadata.parquet"]
)
def test_genes_are_selected_by_name_or_id(place: str, tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    write_parquet(tmp_path / "data/a.parquet", counts(), {}, first=7)
    table = (tmp_path / "data" / place).resolve()
    write_genes(table, 7, N_VARS)
    with gpuload.open_loader(tmp_path / "data", genes=["gene_005", "ENSG00000000002"], shuffle=False) as loader:
        np.testing.assert_array_equal(next(iter(loader)).X, counts()[:64, [5, 2]].toarray())
    with gpuload.open_loader(tmp_path / "data") as loader:
        assert list(loader.var_names) == NAMES


def test_files_of_different_tables_of_genes_are_matched_by_name(tmp_path: Path) -> None:
    paths = []
    for name, genes in (("one", ["a", "b", "c"]), ("two", ["c", "a", "b"])):
        (tmp_path / name).mkdir()
        pq.write_table(pa.table({"token_id": [0, 1, 2], "gene_symbol": genes}), tmp_path / name / GENES_FILE)
        paths.append(tmp_path / name / "cells.parquet")
        pq.write_table(pa.table({"genes": [[0, 1, 2]], "expressions": [[1.0, 2.0, 3.0]]}), paths[-1])
    assert read(paths, join="inner").tolist() == [[1, 2, 3], [2, 3, 1]]
    with pytest.raises(gpuload.StoreError, match=r"gene 0 is 'c' but in .* it is 'a'"):
        read(paths)


def test_gene_numbers_may_begin_far_above_zero(tmp_path: Path) -> None:
    write_parquet(tmp_path / "a.parquet", counts(), {}, first=1 << 40)
    write_genes(tmp_path / "metadata" / "gene_metadata.parquet", 1 << 40, N_VARS)
    np.testing.assert_array_equal(read(tmp_path / "a.parquet"), counts().toarray())


def test_unnamed_genes_use_their_id_or_number(tmp_path: Path) -> None:
    write_parquet(tmp_path / "a.parquet", counts(), {})
    table = {"token_id": [0, 2, N_VARS - 1], "gene_symbol": ["TP53", None, ""], "ensembl_id": ["E1", "E2", None]}
    pq.write_table(pa.table(table), tmp_path / "gene_metadata.parquet")
    with gpuload.open_loader(tmp_path) as loader:
        assert list(loader.var_names[:4]) == ["TP53", "1", "E2", "3"]
        assert loader.var_names[-1] == str(N_VARS - 1)
    write_parquet(tmp_path / "a.parquet", counts(), {}, first=40)
    later = {**table, "token_id": [40 + number for number in table["token_id"]]}
    pq.write_table(pa.table(later), tmp_path / "gene_metadata.parquet")
    with gpuload.open_loader(tmp_path) as loader:
        assert list(loader.var_names[:4]) == ["TP53", "41", "E2", "43"]


def test_layer_is_another_column_of_values(tmp_path: Path) -> None:
    numbers, values = lists_of(counts(), 0, None)
    columns = {"indices": numbers, "data": values, "spliced": [2 * v for v in values], "n": list(range(N_OBS))}
    pq.write_table(pa.table(columns), tmp_path / "a.parquet")
    with gpuload.open_loader(tmp_path / "a.parquet", layer=["X", "spliced"], obs=["n"]) as loader:
        for batch in loader:
            np.testing.assert_array_equal(batch.X, counts()[batch.rows].toarray())
            np.testing.assert_array_equal(batch.layers["spliced"], 2 * batch.X)
            np.testing.assert_array_equal(batch.obs["n"], batch.rows)


@pytest.mark.parametrize("names", parquet_file.COLUMNS)
def test_alternative_column_names(names: tuple[str, str], tmp_path: Path) -> None:
    write_parquet(tmp_path / "a.parquet", counts(), {}, names=names)
    np.testing.assert_array_equal(read(tmp_path / "a.parquet"), counts().toarray())


def test_column_names_with_dots(tmp_path: Path) -> None:
    X, path = counts(), tmp_path / "cells.parquet"
    genes, values = lists_of(X, 0, None)
    pair = pa.struct([("f", pa.int8()), ("g", pa.int8())])
    columns = {
        "genes.n": [len(row) for row in genes],
        "plate.id": [f"id {i}" for i in range(N_OBS)],
        "genes": genes,
        "a": [{"b": {"c": 1, "d": [1]}, "e": [("k", {"f": 2, "g": 3})]}] * N_OBS,  # whose leaves come between
        "expressions": values,
        "raw.x": [[3.0 * v for v in row] for row in values],
        "plate": [f"plate {i % 3}" for i in range(N_OBS)],
    }
    if hasattr(pa, "opaque"):
        stored = pa.array([{"f": 4, "g": 5}] * N_OBS, pair)
        columns = {"h": pa.ExtensionArray.from_storage(pa.opaque(pair, "pair", "x"), stored)} | columns
    kinds = {"genes": pa.list_(pa.int64()), "a": pa.struct([
        ("b", pa.struct([("c", pa.int8()), ("d", pa.list_(pa.int8()))])), ("e", pa.map_(pa.string(), pair)),
    ])}  # fmt: skip
    pq.write_table(pa.table({name: pa.array(v, kinds.get(name)) for name, v in columns.items()}), path)
    np.testing.assert_array_equal(read(path), X.toarray())
    np.testing.assert_array_equal(read(path, layer="raw.x"), 3 * X.toarray())
    wanted = ("genes.n", "plate", "plate.id")
    with gpuload.open_loader(path, obs=wanted, shuffle=False, batch_size=N_OBS, fetch_factor=1) as loader:
        (batch,) = loader
        for name in wanted:
            codes, categories = batch.obs[name], loader.categories.get(name)
            found = codes if categories is None else np.asarray(categories)[codes]
            assert list(found) == columns[name]


def test_obs_columns(tmp_path: Path) -> None:
    texts = [None if i % 7 == 0 else f"drug {i % 5}" for i in range(N_OBS)]
    columns = {
        "text": texts,
        "large": pa.array(texts, pa.large_string()),
        "coded": pa.array(texts).dictionary_encode(),
        "flag": [None if i % 5 == 0 else i % 3 == 0 for i in range(N_OBS)],
        "number": [None if i % 6 == 0 else i for i in range(N_OBS)],
        "half": pa.array(np.arange(N_OBS, dtype=np.float16)),
        "unknown": pa.array([None] * N_OBS, pa.bool_()),
    }
    for part, rows in enumerate((slice(60), slice(60, N_OBS))):
        write_parquet(tmp_path / f"{part}.parquet", counts()[rows], {k: v[rows] for k, v in columns.items()})
    with gpuload.open_loader(tmp_path, obs=list(columns), shuffle=False, batch_size=N_OBS) as loader:
        (batch,) = loader
        for name in ("text", "large", "coded", "flag"):
            categories = loader.categories[name]
            assert list(categories) == sorted(categories)
            found = [None if code < 0 else categories[code] for code in batch.obs[name]]
            assert found == (columns["flag"] if name == "flag" else texts)
    wanted = [np.nan if i % 6 == 0 else i for i in range(N_OBS)]
    np.testing.assert_array_equal(batch.obs["number"], wanted)
    np.testing.assert_array_equal(batch.obs["half"], np.arange(N_OBS, dtype=np.float16))
    assert list(loader.categories["unknown"]) == [False, True]
    assert set(batch.obs["unknown"]) == {-1}


def test_blocks_are_row_groups(tmp_path: Path) -> None:
    write_parquet(tmp_path / "a.parquet", counts(), {}, first=3, leader=-2.0)
    store = open_store(tmp_path / "a.parquet", layer="X", obs=())
    store.close()
    lengths = np.diff(counts().indptr)
    found = store.chunk_edges()
    for edge, wanted in zip(found, [0, 40, 80, 120, N_OBS], strict=True):  # but for empty rows where two groups meet
        assert edge <= wanted
        assert not lengths[edge:wanted].any()


def test_fetch_reads_each_row_group_once(tmp_path: Path) -> None:
    write_parquet(tmp_path / "a.parquet", counts(), {})
    store = open_store(tmp_path / "a.parquet", layer="X", obs=())
    store.close()
    recipe = store.recipe(np.array([[3, 5], [39, 42], [60, 61], [100, 131]]))
    for part in recipe.reads:
        assert part.chunk_id.tolist() == [0, 1, 2, 3]
        assert part.layout.decoded_nbytes(part.chunk_id).sum() == 4 * counts().nnz


@pytest.mark.parametrize("name", ["parquet-tahoe", "parquet-checksums"])
def test_reads_without_the_snappy_library(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(codecs, "snappy_address", lambda: 0)
    monkeypatch.setattr(backend, "_work", backend._Work())
    form = FORMS[name](tmp_path)
    np.testing.assert_array_equal(read(form.path), form.dense)


def test_many_files_are_not_all_kept_open(tmp_path: Path) -> None:
    X = counts()[60:63]
    write_parquet(tmp_path / "000.parquet", X, {})
    content = (tmp_path / "000.parquet").read_bytes()
    for i in range(1, 300):
        (tmp_path / f"{i:03d}.parquet").write_bytes(content)
    before = len(os.listdir("/proc/self/fd"))
    with gpuload.open_loader(tmp_path, batch_size=30, fetch_factor=30) as loader:
        for batch in loader:
            np.testing.assert_array_equal(batch.X, X.toarray()[batch.rows % 3, : loader.n_vars])
        assert len(os.listdir("/proc/self/fd")) - before < 200


# --- what is kept


@pytest.fixture
def kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a file with an index beside it."""
    monkeypatch.setenv("GPULOAD_INDEX", "")
    monkeypatch.setattr(parquet_file, "_MIN_ROWS", 1)
    path = FORMS["parquet-tahoe"](tmp_path).path.replace("*", "00000-of-00002")
    os.utime(path, ns=(10**18, 10**18))
    read(path)
    assert (tmp_path / "data/.train-00000-of-00002.parquet.gpuload-index").stat().st_size > 0
    return path


def test_index_is_reused(kept: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> None:
        raise AssertionError("read again")

    monkeypatch.setattr(backend, "row_starts", fail)
    monkeypatch.setattr(parquet_file, "ParquetTable", fail)
    monkeypatch.setattr(parquet_cells, "genes_of", lambda _: (3, np.array(NAMES, dtype=object), None))
    np.testing.assert_array_equal(read(kept), counts()[:70].toarray())


def test_index_has_the_greatest_number_of_a_gene(kept: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """So a table that names too few genes is refused at each opening."""
    n = int(counts()[:70].indices.max()) + 1
    for n_named in (n, n - 1):
        genes = np.array(NAMES, dtype=object)[:n_named]
        monkeypatch.setattr(parquet_cells, "genes_of", lambda _, genes=genes: (3, genes, None))
        for _ in range(2):
            if n_named == n:
                np.testing.assert_array_equal(read(kept), counts()[:70].toarray()[:, :n])
            else:
                with pytest.raises(
                    gpuload.StoreError, match=rf"'genes' holds the number {n + 2}, but .* 3 to {n + 1} "
                ):
                    read(kept)


def test_obs_of_a_file_with_an_index_need_no_slow_reading_of_its_footer(
    kept: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any) -> None:
        raise AssertionError("read again")

    monkeypatch.setattr("gpuload.formats.parquet.read_footer", fail)
    name = next(name for name in pq.read_schema(kept).names if name not in ("genes", "expressions"))
    with gpuload.open_loader(kept, shuffle=False, batch_size=100, obs=[name]) as loader:
        codes = next(iter(loader)).obs[name]
        named = [*loader.categories[name], None]  # -1: missing
        assert [named[code] for code in codes] == pq.read_table(kept)[name].to_pylist()


@pytest.mark.parametrize("change", ["content", "damage"])
def test_stale_or_damaged_index_is_ignored(change: str, kept: Any, tmp_path: Path) -> None:
    if change == "content":
        X = counts(seed=5)[:70]
        write_parquet(kept, X, {}, first=3, leader=-2.0)
    else:
        X, index = counts()[:70], tmp_path / "data/.train-00000-of-00002.parquet.gpuload-index"
        raw = bytearray(index.read_bytes())
        raw[len(raw) // 2] ^= 255
        index.write_bytes(raw)
    np.testing.assert_array_equal(read(kept), X.toarray())


# --- elsewhere


@pytest.mark.parametrize("name", ["parquet", "parquet-tahoe"])
def test_parquet_can_be_packed(name: str, tmp_path: Path) -> None:
    form = FORMS[name](tmp_path)
    packed = gpuload.pack(form.path, tmp_path / "out.zarr")
    assert (packed.n_obs, packed.n_vars) == (N_OBS, N_VARS)
    seen = 0
    with gpuload.open_loader(tmp_path / "out.zarr", obs=["source_row", "source_file", "cell_line"]) as loader:
        assert list(loader.var_names) == form.var_names
        first = {file: 70 * ("00001" in str(file)) for file in loader.categories["source_file"]}
        for batch in loader:
            files = loader.categories["source_file"][batch.obs["source_file"]]
            rows = batch.obs["source_row"] + [first[file] for file in files]
            np.testing.assert_array_equal(batch.X, form.dense[rows])
            lines = [None if c < 0 else loader.categories["cell_line"][c] for c in batch.obs["cell_line"]]
            assert lines == [form.obs["cell_line"][row] for row in rows]
            seen += len(batch)
    assert seen == N_OBS


def test_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    form = FORMS["parquet-tahoe"](tmp_path)
    assert main(["inspect", form.path, "--label", "cell_line"]) == 0
    told = capsys.readouterr().out
    assert "parquet" in told
    assert main(["bench", form.path, "--batch-size", "8", "--seconds", "0.1"]) == 0


@pytest.mark.parametrize("index", ["int8", "int32"])
def test_ordered_dictionaries_are_categories(tmp_path: Path, index: str) -> None:
    """As pandas writes ordered categories; their order is not read."""
    path = tmp_path / "cells.parquet"
    write_parquet(path, counts(5), {"stage": ["b", "a", None, "b", "a"]})
    table = pq.read_table(path)
    kind = pa.dictionary(getattr(pa, index)(), pa.string(), ordered=True)
    codes = pa.array([0, 1, None, 0, 1], getattr(pa, index)())
    stage = pa.DictionaryArray.from_arrays(codes, pa.array(["b", "a"]), ordered=True)
    assert stage.type == kind
    pq.write_table(table.set_column(table.column_names.index("stage"), "stage", stage), path)
    with gpuload.open_loader(path, obs="stage", shuffle=False) as loader:
        assert loader.categories["stage"].tolist() == ["a", "b"]
        assert next(iter(loader)).obs["stage"].tolist() == [1, 0, -1, 1, 0]
    with pytest.raises(gpuload.PlanError, match="'stage' holds text, which has no order"):
        gpuload.open_loader(path, where="stage >= 'a'")
