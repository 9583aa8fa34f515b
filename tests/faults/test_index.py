"""The index that speeds up opening changes nothing but the time, whatever happens to it or to the file."""

from __future__ import annotations

import os
import shutil
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import gpuload
from gpuload.formats import hdf5, index, open_store
from gpuload.source import FileSource
from tests.writers import counts, write_csr, write_dense, write_h5ad, write_plain

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    import h5py

    from tests.conftest import StoreVariant

pytestmark = pytest.mark.usefixtures("no_leaks")

YEAR_2020_NS = 1_577_836_800 * 10**9


@pytest.fixture(autouse=True)
def _index_small_files_too(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(index, "MIN_CHUNKS", 1)
    monkeypatch.setattr(index, "MIN_ROWS", 1)
    monkeypatch.delenv("GPULOAD_INDEX", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.fixture
def searched(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return the names of the arrays whose chunks were looked for in a file itself."""
    found: list[str] = []
    find = hdf5._find_chunks

    def record(stored: Any, *rest: Any) -> Any:
        found.append(stored.name)
        return find(stored, *rest)

    monkeypatch.setattr(hdf5, "_find_chunks", record)
    return found


def settle(path: Path) -> Path:
    """Make a file as old as data usually are."""
    os.utime(path, ns=(YEAR_2020_NS, YEAR_2020_NS))
    return path


def beside(path: Path) -> Path:
    return path.with_name(f".{path.name}.gpuload-index")


def made(folder: Path, seed: int = 0, name: str = "cells.h5ad") -> Path:
    write_plain(folder / name, seed=seed)
    return settle(folder / name)


def values(path: Path, layer: str = "X") -> np.ndarray:
    with gpuload.open_loader(path, layer=layer, shuffle=False, batch_size=1000) as loader:
        return np.concatenate([np.empty((0, loader.n_vars), np.float32), *(batch.X for batch in loader)])


VARIANTS = [
    "csr-gzip4-shuffle",
    "csr-filter-masks",
    "csr-absent-chunks-3",
    "csr-indptr-gzip-i8",
    "csr-all-empty",
    "csr-userblock-512",
    "csr-0x53",
    "csr-1x1",
    "csr-libver-latest",
    "csr-contiguous",
    "csr-old-compound",
    "dense-gzip4-shuffle-tiles",
    "dense-absent-chunks-3",
    "dense-resized",
    "layer-csr",
    "raw",
]


@pytest.mark.parametrize("name", VARIANTS)
def test_every_form_reads_the_same(name: str, store_variant: StoreVariant, tmp_path: Path, searched: list[str]) -> None:
    stored = store_variant(name)
    path = tmp_path / "cells.h5ad"
    shutil.copyfile(stored.path, path)
    settle(path)
    for _ in range(3):
        np.testing.assert_array_equal(values(path, stored.layer), stored.dense)
    if name in ("csr-all-empty", "csr-0x53", "csr-1x1"):
        return  # nothing to keep, or hardly anything
    assert beside(path).exists()
    assert len(searched) == len(set(searched)), "the second opening searched again"


def test_layers_share_an_index(store_variant: StoreVariant, tmp_path: Path, searched: list[str]) -> None:
    stored, path = store_variant("layer-csr"), tmp_path / "cells.h5ad"
    shutil.copyfile(stored.path, path)
    settle(path)
    expected = {layer: values(path, layer) for layer in ("X", "spliced", "scaled")}
    searched.clear()
    for layer, X in expected.items():
        np.testing.assert_array_equal(values(path, layer), X)
    assert not searched


@pytest.mark.parametrize("setting", ["folder", "off", "read-only"])
def test_index_location(setting: str, tmp_path: Path, searched: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    path = made(tmp_path)
    monkeypatch.chdir(tmp_path)
    if setting != "read-only":
        monkeypatch.setenv("GPULOAD_INDEX", "off" if setting == "off" else str(tmp_path / "kept"))
    else:
        publish = index._publish
        monkeypatch.setattr(index, "_publish", lambda place, content: "cache" in place and publish(place, content))
    for _ in range(2):
        np.testing.assert_array_equal(values(path), counts().toarray())
    assert not beside(path).exists()
    place = {"folder": tmp_path / "kept", "off": None, "read-only": tmp_path / "cache" / "gpuload"}[setting]
    assert len(searched) == (4 if place is None else 2)
    if place is None:
        assert not list(tmp_path.rglob("*.gpuload-index"))
    else:
        assert [p.suffix for p in place.iterdir()] == [".gpuload-index"]


def test_index_is_written_once_beside_what_a_link_leads_to(tmp_path: Path) -> None:
    (tmp_path / "links").mkdir()
    path, link = made(tmp_path), tmp_path / "links" / "other.h5ad"
    link.symlink_to(path)
    np.testing.assert_array_equal(values(link), counts().toarray())
    assert os.listdir(tmp_path / "links") == ["other.h5ad"]
    written = beside(path).stat()
    np.testing.assert_array_equal(values(path), counts().toarray())
    assert beside(path).stat() == written


def test_unwritable_index_is_skipped(tmp_path: Path, searched: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    path = made(tmp_path)

    def refuse(*args: Any) -> None:
        raise PermissionError(13, "no")

    monkeypatch.setattr(index.os, "replace", refuse)
    for _ in range(2):
        np.testing.assert_array_equal(values(path), counts().toarray())
    assert len(searched) == 4
    assert [p for p in tmp_path.rglob("*") if p.is_file()] == [path], "a part was left behind"


def test_arrays_of_another_size_are_not_believed(
    tmp_path: Path, searched: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = made(tmp_path)
    values(path)
    searched.clear()
    get = index.Index.get

    def longer(self: Any, name: str) -> Any:
        found = get(self, name)
        return None if found is None else np.append(found, found[:1] * 0)

    monkeypatch.setattr(index.Index, "get", longer)
    np.testing.assert_array_equal(values(path), counts().toarray())
    assert len(searched) == 2


def test_small_and_recent_files_get_no_index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = made(tmp_path)
    os.utime(path)
    values(path)
    assert not beside(path).exists()
    settle(path)
    monkeypatch.undo()
    values(path)
    assert not beside(path).exists()


def another(path: Path) -> None:
    """Put another matrix in place, in a file of another size."""
    write_plain(path, seed=1)


def test_replaced_file_gets_a_new_index(tmp_path: Path, searched: list[str]) -> None:
    path = made(tmp_path)
    values(path)
    another(path)
    np.testing.assert_array_equal(values(path), counts(seed=1).toarray())  # just written: read without an index
    settle(path)
    np.testing.assert_array_equal(values(path), counts(seed=1).toarray())
    before = len(searched)
    np.testing.assert_array_equal(values(path), counts(seed=1).toarray())
    assert len(searched) == before == 6


@pytest.mark.parametrize("what", ["mtime", "size", "head", "tail"])
def test_each_part_of_the_key_makes_an_index_stale(what: str, tmp_path: Path, searched: list[str]) -> None:
    """Each part of it alone makes an index stale."""
    path = made(tmp_path)
    with open(path, "ab") as file:
        file.write(bytes(200_000))
    settle(path)
    values(path)
    searched.clear()
    raw = bytearray(path.read_bytes())
    if what == "size":
        raw += b"\0"
    if what == "tail":
        raw[-1] = 1
    if what == "head":
        at = raw.find(b"cell_0")
        raw[at : at + 6] = b"cell_X"
    path.write_bytes(raw)
    settle(path)
    if what == "mtime":
        os.utime(path, ns=(YEAR_2020_NS, YEAR_2020_NS + 1))
    np.testing.assert_array_equal(values(path), counts().toarray())
    assert len(searched) == 2


def test_a_file_changed_while_it_is_opened_gets_no_index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tables read before the change would pass for those of what the file holds after it."""
    path, save = made(tmp_path), index.Index.save

    def save_late(self: index.Index) -> None:
        another(path)
        os.utime(path, ns=(YEAR_2020_NS, YEAR_2020_NS + 1))
        save(self)

    with monkeypatch.context() as patched:
        patched.setattr(index.Index, "save", save_late)
        open_store(path, layer="X", obs=()).close()
    assert not beside(path).exists()
    np.testing.assert_array_equal(values(path), counts(seed=1).toarray())
    assert beside(path).exists()


def test_a_file_changed_after_its_index_was_read_keeps_that(tmp_path: Path) -> None:
    """The file may be put back as it was, with its modification time, and the index must then still be its own."""
    path = made(tmp_path)
    values(path)
    content, time_ns = path.read_bytes(), path.stat().st_mtime_ns
    with closing(FileSource(str(path))) as source:
        late = index.Index(source)
        before = late.get("/X/indptr")
        another(path)
        late.keep("/X/indptr", np.arange(before.size))
        late.save()
    path.write_bytes(content)
    os.utime(path, ns=(time_ns, time_ns))
    with closing(FileSource(str(path))) as source:
        np.testing.assert_array_equal(index.Index(source).get("/X/indptr"), before)
    np.testing.assert_array_equal(values(path), counts().toarray())


def test_wrong_index_with_a_matching_key_is_detected(tmp_path: Path, searched: list[str]) -> None:
    """An index with a matching key, but of a file with other chunks and rows, is detected by comparison."""
    path, other = made(tmp_path), made(tmp_path, seed=1, name="other.h5ad")
    for p in (path, other):
        values(p)
    source = FileSource(path)
    key = index.Index(source)._key_of_file()
    source.close()
    raw = np.fromfile(beside(other), np.uint8)
    source = FileSource(other)
    arrays = index._unpack(raw, index.Index(source)._key_of_file())
    source.close()
    beside(path).write_bytes(index._pack(key, arrays))
    searched.clear()
    np.testing.assert_array_equal(values(path), counts().toarray())
    assert searched == ["/X/data", "/X/indices"]
    np.testing.assert_array_equal(values(path), counts().toarray())
    assert len(searched) == 2, "the index was not made again"


def tampered(path: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Change arrays of an index, and update its checksum."""
    source = FileSource(path)
    key = index.Index(source)._key_of_file()
    source.close()
    arrays = {k: a.copy() for k, a in index._unpack(np.fromfile(beside(path), np.uint8), key).items()}
    change(arrays)
    beside(path).write_bytes(index._pack(key, arrays))


@pytest.mark.parametrize(
    "change",
    [
        lambda a: a.clear(),
        lambda a: a.pop("/X/data mask"),
        lambda a: a.update({"/X/data offset": a["/X/data offset"][:-1]}),
        lambda a: a.update({"/X/data nbytes": a["/X/data nbytes"] + 1}),
        lambda a: a.update({"/X/data mask": a["/X/data mask"] + 1}),
        lambda a: a.update({"/X/indptr": a["/X/indptr"][:-1]}),
        lambda a: a.update({"/X/indptr": a["/X/indptr"][::-1]}),
        lambda a: a.update({"/X/indptr": a["/X/indptr"].astype(float)}),
    ],
    ids=["none", "no-masks", "offsets-short", "sizes", "masks", "rows-short", "rows-turned", "rows-floats"],
)
def test_inconsistent_index_arrays_are_ignored(tmp_path: Path, change: Any) -> None:
    path = made(tmp_path)
    values(path)
    tampered(path, change)
    np.testing.assert_array_equal(values(path), counts().toarray())


@pytest.mark.parametrize("part", ["offset", "nbytes", "mask"])
@pytest.mark.parametrize("chunk", [0, 2, 8])
def test_several_chunks_of_an_index_are_compared(tmp_path: Path, searched: list[str], chunk: int, part: str) -> None:
    """The first, and those after a 64th and a 16th of them."""
    path, X = tmp_path / "cells.h5ad", counts().toarray()
    write_h5ad(path, lambda f: write_dense(f, "X", X, chunks=(1, X.shape[1]), compression="gzip"))
    settle(path)
    values(path)
    searched.clear()

    def change(arrays: dict[str, Any]) -> None:
        wrong = arrays[f"/X {part}"].astype(np.int64)
        assert wrong.size == 131
        wrong[chunk] += 1
        arrays[f"/X {part}"] = wrong

    tampered(path, change)
    np.testing.assert_array_equal(values(path), X)
    assert searched == ["/X"]


@pytest.mark.parametrize("name", ["offset", "nbytes"])
def test_chunks_of_an_index_lie_in_the_file(tmp_path: Path, name: str) -> None:
    """Also those that are not compared with it: bytes in front of a file cannot be read."""
    path = made(tmp_path)
    values(path)

    def change(arrays: dict[str, Any]) -> None:
        wrong = arrays[f"/X/data {name}"].astype(np.int64)
        wrong[-1] = -1
        arrays[f"/X/data {name}"] = wrong

    tampered(path, change)
    with pytest.raises(gpuload.ReadError, match="/X/data should reach byte"):
        gpuload.open_loader(path)


def test_index_of_another_format_is_made_again(
    tmp_path: Path, searched: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its checksum is right, but not what its bytes are taken for."""
    path = made(tmp_path)
    with monkeypatch.context() as patched:
        patched.setattr(index, "_MAGIC", b"gpuload index 0\n")
        values(path)
    before = beside(path).read_bytes()
    searched.clear()
    np.testing.assert_array_equal(values(path), counts().toarray())
    assert searched
    assert beside(path).read_bytes() != before


def test_damaged_index_is_made_again(tmp_path: Path, searched: list[str]) -> None:
    path = made(tmp_path)
    values(path)
    base, rng = beside(path).read_bytes(), np.random.default_rng(0)
    for number in range(60):
        raw = bytearray(base)
        if number % 3 == 0:
            del raw[int(rng.integers(0, len(raw))) :]
        else:
            raw[int(rng.integers(0, [len(raw), 40][number % 2]))] ^= int(rng.integers(1, 256))
        beside(path).write_bytes(raw)
        searched.clear()
        store = open_store(path, layer="X", obs=())
        store.close()
        (matrix,) = store.matrices
        assert len(searched) == 2
        np.testing.assert_array_equal(matrix.indptr, counts().indptr)
        assert beside(path).read_bytes() == base, "the index was not made again"


def test_folder_in_place_of_the_index(tmp_path: Path) -> None:
    path = made(tmp_path)
    beside(path).mkdir()
    for _ in range(2):
        np.testing.assert_array_equal(values(path), counts().toarray())
    assert list((tmp_path / "cache" / "gpuload").iterdir())


def test_concurrent_openings_share_one_index(tmp_path: Path) -> None:
    path = made(tmp_path)

    def opened(_: int) -> np.ndarray:
        store = open_store(path, layer="X", obs=())
        store.close()
        return store.matrices[0].indptr

    with ThreadPoolExecutor(4) as pool:
        for indptr in pool.map(opened, range(24)):
            np.testing.assert_array_equal(indptr, counts().indptr)
    assert sorted(p.name for p in tmp_path.iterdir() if p.is_file()) == [".cells.h5ad.gpuload-index", "cells.h5ad"]


def test_a_folder_of_files_with_indices(tmp_path: Path) -> None:
    for seed in range(2):
        made(tmp_path, seed, f"{seed}.h5ad")
    expected = np.concatenate([counts(seed=seed).toarray() for seed in range(2)])
    for _ in range(2):
        np.testing.assert_array_equal(values(tmp_path), expected)


@pytest.mark.parametrize(("largest", "itemsize"), [(200, 1), (60_000, 2), (70_000, 4), (1 << 33, 8)])
def test_row_offsets_are_kept_as_counts(largest: int, itemsize: int) -> None:
    lengths = np.random.default_rng(0).integers(0, largest, 1000)
    lengths[3] = largest
    indptr = np.concatenate([[0], np.cumsum(lengths)])
    kept = index._narrow(np.diff(indptr))
    assert kept.itemsize == itemsize
    np.testing.assert_array_equal(index.indptr_of(kept), indptr)
    assert index.indptr_of(kept).dtype == np.int64


@pytest.mark.parametrize("n", [0, 1, 32_768, 32_769, 100_000])
def test_row_offsets_of_many_rows_are_summed_in_steps(n: int) -> None:
    rows = np.random.default_rng(n).integers(0, 256, n).astype(np.uint8)
    np.testing.assert_array_equal(index.indptr_of(rows), np.concatenate([[0], np.cumsum(rows, dtype=np.int64)]))


def test_arrays_are_kept_as_they_are_but_narrower(tmp_path: Path) -> None:
    """Numbers below 0, fractions and no numbers have no narrower type; each array is aligned, whatever is beside it."""
    kept = {
        "bytes": (np.array([255, 3, 0], dtype=np.int64), "u1"),
        "two bytes": (np.array([5, 256, 7], dtype=np.uint64), "u2"),
        "large": (np.array([2**32, 2**63], dtype=np.uint64), "u8"),
        "below 0": (np.array([-1, 0, 300], dtype=np.int32), "i4"),
        "fractions": (np.array([0.5, 2.25]), "f8"),
        "none": (np.array([], dtype=np.int64), "i8"),
        "last": (np.array([70_000]), "u4"),
    }
    with closing(FileSource(made(tmp_path))) as source:
        one, other = index.Index(source), index.Index(source)
        for name, (wanted, _) in kept.items():
            one.keep(name, wanted)
        one.save()
        for name, (wanted, dtype) in kept.items():
            found = other.get(name)
            assert found is not None
            assert found.dtype == np.dtype(dtype), name
            assert found.flags.aligned
            assert found.tolist() == wanted.tolist()


def test_memory_is_nine_bytes_per_cell(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory that stays in use, with 40 cells per chunk, as in the smallest realistic files."""
    path = tmp_path / "cells.h5ad"
    n_obs, per_chunk = 20_000, 40

    def write(file: h5py.File) -> None:
        X = counts(50, 40)
        group = write_csr(file, "X", X)
        lengths = np.full(n_obs, 3)
        for name in ("data", "indices"):
            del group[name]
            group.create_dataset(name, (3 * n_obs,), "i4", chunks=(3 * per_chunk,), compression="gzip")
        del group["indptr"]
        group["indptr"] = np.concatenate([[0], np.cumsum(lengths)])
        group.attrs["shape"] = (n_obs, 40)

    write_h5ad(path, write, 50, 40)
    settle(path)
    for _ in range(2):
        store = open_store(path, layer="X", obs=())
        store.close()
        (matrix,) = store.matrices
        held = matrix.indptr.nbytes + sum(layout.index_nbytes for layout in matrix.layouts)
        assert held <= 9.1 * n_obs
        assert not store.sources[0].index._arrays
