"""Cell names during packing: compact, exact, and numbered where files share some."""

from __future__ import annotations

import tracemalloc
from typing import TYPE_CHECKING

import anndata as ad
import h5py
import numpy as np
import pandas as pd
import pytest
import zarr
from hypothesis import example, given, settings
from hypothesis import strategies as st
from scipy.sparse import csr_matrix

import gpuload
from gpuload.backends.native.runs import have_common
from gpuload.formats import frames, obs, open_store
from gpuload.formats.zarr_nodes import open_node
from gpuload.formats.zarr_trees import FolderTree
from gpuload.packing import tables, zarr_files
from gpuload.packing.names import CellNames
from tests.test_pack import cells, written

if TYPE_CHECKING:
    from pathlib import Path

MAX_NBYTES = 70
"""Bytes per cell whose name has 20 letters; as strings, two copies of it alone would take twice as many."""

NAMES = st.lists(st.lists(st.text("aé\0", max_size=3), max_size=12), min_size=1, max_size=4)


def cell_names(files: list[list[str]], order: np.ndarray, *, has_numbers: bool = False) -> CellNames:
    encoded = [name.encode() for names in files for name in names]
    starts = np.concatenate([[0], np.cumsum([len(name) for name in encoded])]).astype(np.int64)
    file_start = np.concatenate([[0], np.cumsum([len(names) for names in files])]).astype(np.int64)
    return CellNames(np.frombuffer(b"".join(encoded), dtype=np.uint8), starts, file_start, order, has_numbers)


@settings(deadline=None, derandomize=True)
@given(NAMES, st.sampled_from([np.uint32, np.int64]), st.integers(1, 9))
@example([[], [], ["a"], ["a"]], np.uint32, 1)  # files without cells
def test_shared_names_are_detected_exactly(files: list[list[str]], dtype: type, room: int) -> None:
    names = cell_names(files, np.arange(sum(map(len, files))))
    table = np.zeros(len(names) + room, dtype=dtype)
    distinct = [set(one) for one in files]
    wanted = len(set().union(*distinct)) < sum(map(len, distinct))
    assert have_common(names.utf8, names.starts, names.file_start, table) == wanted


@pytest.mark.parametrize("name", ["{number}{i:05}", "{i:05}{number}"])  # files differ in the first byte, or the last
def test_colliding_names_are_compared(name: str) -> None:
    files = [[name.format(number=number, i=i) for i in range(2_000)] for number in range(2)]
    for number, wanted in ((1, False), (0, True)):
        files[1][-1] = name.format(number=number, i=0)
        names = cell_names(files, np.arange(4_000))
        table = np.zeros(4_001, dtype=np.uint32)
        assert have_common(names.utf8, names.starts, names.file_start, table) == wanted


def test_names_repeated_within_a_file_hide_no_others() -> None:
    """In a table without room to spare, where the names are beside each other."""
    own = [f"{i:03}" for i in range(200)]
    for shared in own:
        names = cell_names([own * 2, [shared]], np.arange(401))
        assert have_common(names.utf8, names.starts, names.file_start, np.zeros(402, dtype=np.uint32))


@settings(deadline=None, derandomize=True)
@given(NAMES, st.randoms(use_true_random=False), st.booleans())
def test_names_follow_the_packed_order(files: list[list[str]], random: object, has_numbers: bool) -> None:
    each = [name + f"-{i}" * has_numbers for i, one in enumerate(files) for name in one]
    order = np.arange(len(each))
    random.shuffle(order)  # type: ignore[attr-defined]
    names = cell_names(files, order, has_numbers=has_numbers)
    wanted = [each[row] for row in order]
    assert [name.decode() for name in names[:]] == wanted
    assert [name.decode() for name in names[1:5]] == wanted[1:5]
    pieces = [np.array(wanted[at : at + 3], dtype=object) for at in range(0, len(each), 3)]
    assert names.are(pieces)
    if pieces:
        assert not names.are(pieces[:-1])
        assert not names.are([*pieces, pieces[-1]])
        assert not names.are([*pieces[:-1], pieces[-1] + "x"])


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["object", "string"])
def test_names_take_few_bytes_per_cell(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dtype: str) -> None:
    n, paths = 30_000, []
    for number in range(2):
        index = pd.Index([f"cell_{number}_{i:013}" for i in range(n)], dtype=dtype)
        adata = ad.AnnData(csr_matrix((n, 2), dtype=np.float32), pd.DataFrame(index=index))
        with ad.settings.override(allow_write_nullable_strings=True):
            paths.append(str(written(adata, tmp_path / f"{number}.h5ad")))
    monkeypatch.setattr(obs, "_PIECE", 1 << 10)
    monkeypatch.setattr(zarr_files, "TABLE_CHUNK", 1 << 10)
    store, order = open_store(paths, layer="X", obs=(), join=None), np.random.default_rng(0).permutation(2 * n)
    targets = [str(tmp_path / name) for name in ("first.zarr", "second.zarr")]
    for target in targets:
        tables.start_target(target, ["X"])
    tables.write_obs(targets[0], paths, "X", [], store, order)  # imports what it needs
    tracemalloc.start()
    try:
        tables.write_obs(targets[1], paths, "X", [], store, order)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
        store.close()
    assert peak < MAX_NBYTES * 2 * n + (1 << 20)


def test_name_shared_at_the_end_is_detected(tmp_path: Path) -> None:
    one, two = cells(300, 20), cells(200, 20)
    two.obs_names = [f"other_{i}" for i in range(199)] + ["cell_299"]
    paths = [written(one, tmp_path / "one.h5ad"), written(two, tmp_path / "two.h5ad")]
    gpuload.pack(paths, tmp_path / "out.zarr", keep_order=True)
    wanted = [f"{name}-{number}" for number, a in enumerate((one, two)) for name in a.obs_names]
    assert ad.read_zarr(tmp_path / "out.zarr").obs_names.tolist() == wanted


def test_duplicate_names_within_one_file_are_kept(tmp_path: Path) -> None:
    one, two = cells(30, 20), cells(20, 20)
    two.obs_names = [f"other_{i}" for i in range(20)]
    paths = [written(one, tmp_path / "one.h5ad"), written(two, tmp_path / "two.h5ad")]
    with h5py.File(paths[0], "r+") as file:
        file["obs/_index"][1] = "cell_0"
    gpuload.pack(paths, tmp_path / "out.zarr", keep_order=True)
    names = zarr.open_array(tmp_path / "out.zarr/obs/_index", mode="r")[:].tolist()
    assert names == ["cell_0", "cell_0", *(f"cell_{i}" for i in range(2, 30)), *two.obs_names]


def test_names_kept_in_another_file_are_refused(tmp_path: Path) -> None:
    """HDF5 reads them as empty where that file is away."""
    path = written(cells(30, 20), tmp_path / "cells.h5ad")
    with h5py.File(path, "r+") as file:
        stored, attrs = file["obs/_index"], dict(file["obs/_index"].attrs)
        layout = h5py.VirtualLayout(stored.shape, stored.dtype)
        layout[...] = h5py.VirtualSource(str(tmp_path / "away.h5"), "names", shape=stored.shape)
        del file["obs/_index"]
        file.create_virtual_dataset("obs/_index", layout).attrs.update(attrs)
    with pytest.raises(gpuload.StoreError, match="/obs/_index keeps its bytes in other files; copy it into one file"):
        gpuload.pack(path, tmp_path / "out.zarr")
    with pytest.raises(gpuload.StoreError, match="/obs/_index keeps its bytes in other files; copy it into one file"):
        list(frames.cell_name_pieces(str(path), "X"))


def test_row_numbers_go_on_from_piece_to_piece(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a format without names."""
    monkeypatch.setattr(frames, "_PIECE", 100)
    np.save(tmp_path / "cells.npy", np.zeros((250, 2), dtype=np.float32))
    pieces = list(frames.cell_name_pieces(str(tmp_path / "cells.npy"), "X"))
    assert [piece.size for piece in pieces] == [100, 100, 50]
    assert np.concatenate(pieces).tolist() == [str(row) for row in range(250)]


@pytest.mark.parametrize("shards", [None, (6,)])
@pytest.mark.parametrize("missing", [(), (0,), (3, 4), (11,)])
def test_pieces_are_in_order(shards: tuple[int] | None, missing: tuple[int, ...], tmp_path: Path) -> None:
    values = np.array([f"name {i}" for i in range(35)], dtype=object)  # 12 chunks: "c/10" sorts before "c/2"
    array = zarr.create_array(tmp_path / "x.zarr", shape=(35,), chunks=(3,), shards=shards, dtype=str, fill_value="")
    array[:] = values
    for chunk in missing:
        array[3 * chunk : 3 * chunk + 3] = ""  # of which zarr writes nothing
    node = open_node(FolderTree(str(tmp_path / "x.zarr")), "")
    pieces = list(node.pieces())  # type: ignore[union-attr]
    assert missing or max(piece.size for piece in pieces) == 3
    found = np.concatenate(pieces).tolist()
    assert found == node.read().tolist()  # type: ignore[union-attr]
    assert found == [("" if i // 3 in missing else name) for i, name in enumerate(values)]
