"""Zarr stores that are damaged, truncated, changed while open, or of an unsupported kind."""

from __future__ import annotations

import errno
import json
import os
import shutil
import traceback
import warnings
import zipfile
from contextlib import closing
from typing import TYPE_CHECKING, Any

import anndata
import numpy as np
import pytest
import scipy.sparse

zarr = pytest.importorskip("zarr", minversion="3.0")

import zarr.codecs as zc  # noqa: E402

import gpuload  # noqa: E402
from gpuload.formats import open_store  # noqa: E402
from gpuload.formats.zarr_spec import parse_v2, parse_v3  # noqa: E402
from tests import zarr_writers as writers  # noqa: E402
from tests.faults.test_refusals import assert_refused, assert_says  # noqa: E402
from tests.writers import N_OBS, N_VARS, counts  # noqa: E402
from tests.zarr_writers import CODECS_V3, LZ4_SHUFFLED  # noqa: E402

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

pytestmark = pytest.mark.usefixtures("zarr_is_awake", "no_leaks")


@pytest.fixture(scope="module")
def zarr_is_awake(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Write and read a store once, because zarr starts a thread and keeps three descriptors."""
    path = tmp_path_factory.mktemp("awake") / "store.zarr"
    writers.csr(path)
    by_zarr(path)


def read(path: Path, **settings: Any) -> np.ndarray:
    """Return the matrix, in the order of the rows, read in small blocks twice over."""
    settings = {"batch_size": 8, "fetch_factor": 2, "block_size": 3, "num_threads": 1, "obs": ["depth"], **settings}
    with gpuload.open_loader(path, **settings) as loader:
        X = np.full((loader.n_obs, loader.n_vars), -1, np.float32)
        for _ in range(2):
            for batch in loader:
                X[batch.rows] = batch.X
    return X


def files(path: Path) -> list[Path]:
    return sorted(file for file in path.rglob("*") if file.is_file())


N_MUTANTS = 28

BASES: dict[str, Callable[[Path], object]] = {
    "v2-blosc": lambda path: writers.csr(path, 2, compressors=writers.CODECS_V2["blosc-lz4-shuffle"]),
    "v2-none": lambda path: writers.dense(path, 2, chunks=(30, 30)),
    "v3-zstd": lambda path: writers.csr(path, compressors=CODECS_V3["zstd-checksum"]),
    "v3-gzip-crc32c": lambda path: writers.csr(path, compressors=CODECS_V3["gzip-crc32c"]),
    "v3-sharded-blosc": lambda path: writers.csr(path, shards=True, compressors=LZ4_SHUFFLED),
    "v3-sharded-bitshuffle": lambda path: writers.csr(
        path, shards=True, compressors=CODECS_V3["blosc-zstd-bitshuffle"]
    ),
    "v3-sharded-blosc-zlib": lambda path: writers.dense(
        path, chunks=(10, 53), shards=(50, 53), compressors=CODECS_V3["blosc-zlib-shuffle"]
    ),
    "v2-lz4": lambda path: writers.csr(path, 2, compressors=writers.CODECS_V2["lz4"]),
}


def by_zarr(path: Path) -> np.ndarray | None:
    """Return the matrix as zarr reads it, or None where it fails or breaks a rule."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            X = writers.read_matrix(path, "X")
            if hasattr(X, "toarray"):
                X.check_format()
                X = X.toarray()
            return X
        except Exception:
            return None


@pytest.mark.parametrize("name", BASES)
def test_flipped_bytes_give_an_error_or_what_zarr_reads(tmp_path: Path, name: str) -> None:
    """Bytes of every file of the matrix in turn: never a crash, a foreign error or a number that zarr does not read."""
    path = tmp_path / "store.zarr"
    BASES[name](path)
    rng = np.random.default_rng(len(name))
    chosen = [file for file in files(path) if "/X" in file.as_posix()]
    n_refused, original = 0, counts().toarray()
    for number in range(N_MUTANTS):
        file = chosen[number % len(chosen)]
        whole = file.read_bytes()
        damaged = bytearray(whole)
        for at in rng.integers(0, len(whole), rng.integers(1, 4)):
            damaged[at] ^= int(rng.integers(1, 256))
        file.write_bytes(damaged)
        try:
            found = read(path)
        except gpuload.GpuloadError as error:
            n_refused += 1
            assert_says(error, str(path))
        else:
            # damage to what is not asked for (an attribute, the rest of a chunk) need not be noticed
            expected = by_zarr(path) if not np.array_equal(found, original) else original
            assert expected is not None, f"zarr refuses {file}"
            np.testing.assert_array_equal(found, expected)
        file.write_bytes(whole)
    assert n_refused > 3
    np.testing.assert_array_equal(read(path), original)


@pytest.mark.parametrize("name", BASES)
def test_every_truncated_file_is_an_error(tmp_path: Path, name: str) -> None:
    path = tmp_path / "store.zarr"
    BASES[name](path)
    for file in files(path):
        key = file.relative_to(path).as_posix()
        if not key.startswith("X") and not key.startswith(("obs/depth/", "var/_index/")):
            continue
        whole = file.read_bytes()
        for length in sorted({0, len(whole) // 2, len(whole) - 1}):
            if file.name == ".zattrs" and key != "X/.zattrs":
                continue
            file.write_bytes(whole[:length])
            try:
                read(path)
            except gpuload.GpuloadError as error:
                assert_says(error, str(path))
            else:
                raise AssertionError(f"{key} of {length} bytes instead of {len(whole)} is not noticed")
        file.write_bytes(whole)


@pytest.mark.parametrize(
    ("name", "verify"),
    [
        ("v3-csr-zstd-crc32c", "once"),
        ("v3-csr-sharded-crc32c", "once"),
        ("v3-csr-gzip-crc32c", "always"),
        ("v3-csr-gzip", "once"),
    ],
)
def test_each_flipped_byte_under_a_checksum_is_found(tmp_path: Path, name: str, verify: str) -> None:
    path = tmp_path / "store.zarr"
    options = {"shards": True} if "sharded" in name else {}
    writers.csr(path, compressors=CODECS_V3[name.replace("sharded-", "").removeprefix("v3-csr-")], **options)
    file = path / "X/data/c" / ("1" if options else "3")
    whole = file.read_bytes()
    stop = len(whole) - (84 if options else 0)  # the index has a test of its own
    for at in range(0, stop, 23):
        if name == "v3-csr-gzip" and at in range(3, 10):
            continue  # flags, time and system do not matter
        damaged = bytearray(whole)
        damaged[at] ^= 0x10
        file.write_bytes(damaged)
        with pytest.raises(gpuload.CorruptDataError) as caught:
            read(path, batch_size=2, fetch_factor=1, block_size=1, verify=verify)
        assert_says(caught.value, str(file), "/X/data", "chunk", "damaged")


@pytest.mark.parametrize("is_zip", [False, True])
def test_each_flipped_byte_of_a_shard_index_is_found(tmp_path: Path, is_zip: bool) -> None:
    path = tmp_path / "store.zarr"
    writers.csr(path, shards=True, compressors=LZ4_SHUFFLED)
    file = path / "X/indices/c/1"
    whole = file.read_bytes()
    for k in range(1, 85, 3):
        damaged = bytearray(whole)
        damaged[-k] ^= 0x01
        file.write_bytes(damaged)
        target = path
        if is_zip:
            target = tmp_path / "store.zip"
            writers.pack(path, target)
        with pytest.raises(gpuload.CorruptDataError) as caught:
            read(target)
        assert_says(caught.value, str(target if is_zip else file), "/X/indices", "index", "crc32c")


@pytest.mark.parametrize("is_zip", [False, True])
def test_shard_index_beyond_the_file_is_reported(tmp_path: Path, is_zip: bool) -> None:
    """In a zip, what is behind a shard is of other members."""
    path, target = tmp_path / "store.zarr", tmp_path / "store.zip"
    writers.by_serializer(path, zc.ZstdCodec(), "end", has_crc=False)
    file = path / "X/data/c/0"
    whole = bytearray(file.read_bytes())
    for value in (len(whole), 1 << 40, (1 << 64) - 2):
        whole[-64:-56] = value.to_bytes(8, "little")
        file.write_bytes(whole)
        writers.pack(path, target)
        with pytest.raises(gpuload.ReadError) as caught:
            read(target if is_zip else path)
        assert_says(caught.value, str(target if is_zip else file), "/X/data", "but the shard has", "truncated")


def test_truncated_zip(tmp_path: Path) -> None:
    path = tmp_path / "store.zip"
    writers.zipped(path, lambda folder: writers.csr(folder, compressors=LZ4_SHUFFLED))
    whole = path.read_bytes()
    for length in (30, len(whole) // 2, len(whole) - 100, len(whole) - 1):
        path.write_bytes(whole[:length])
        with pytest.raises(gpuload.GpuloadError) as caught:
            read(path)
        assert_says(caught.value, str(path))


def test_zip_of_a_later_version_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "store.zip"
    writers.zipped(path, writers.csr)
    raw = bytearray(path.read_bytes())
    raw[raw.index(b"PK\x01\x02") + 6] = 99  # the version that is needed, in tenths
    path.write_bytes(raw)
    words = f"{path}: its zip directory cannot be read (zip file version 9.9). Was the file truncated?"
    assert_refused("CorruptDataError", path, words)


def test_zip_with_compressed_members_is_refused(tmp_path: Path) -> None:
    folder, path = tmp_path / "store.zarr", tmp_path / "store.zip"
    writers.csr(folder)
    writers.pack(folder, path, zipfile.ZIP_DEFLATED)
    assert_refused("StoreError", path, str(path), "compressed by zip", "zip -0")


def test_zip_with_the_store_in_a_subfolder_is_refused(tmp_path: Path) -> None:
    writers.csr(tmp_path / "store.zarr")
    path = shutil.make_archive(str(tmp_path / "store"), "zip", tmp_path, "store.zarr")
    words = (path, "its zarr store is not at the top level of the zip but in the folder 'store.zarr'; zip what is in ")
    assert_refused("StoreError", path, *words)
    with pytest.raises(gpuload.StoreError, match="not at the top level of the zip"):
        gpuload.open_loader(path, layer="counts", obs="plate")


@pytest.fixture
def packed(tmp_path: Path) -> Path:
    path = tmp_path / "store.zip"
    writers.zipped(path, writers.csr)
    return path


def test_damaged_zip_member_is_reported(packed: Path) -> None:
    raw = packed.read_bytes()
    assert raw.count(b'"csr_matrix"') == 1
    packed.write_bytes(raw.replace(b'"csr_matrix"', b'"csr_matrex"'))
    assert_refused("CorruptDataError", packed, f"{packed}: X/zarr.json is damaged: its zip checksum", "Restore")


def test_misplaced_zip_member_is_reported(packed: Path) -> None:
    raw = bytearray(packed.read_bytes())
    with zipfile.ZipFile(packed) as archive:
        at = archive.getinfo("X/data/c/3").header_offset
    raw[at] ^= 1
    packed.write_bytes(raw)
    words = f"{packed}: X/data/c/3 does not begin where the zip directory says"
    assert_refused("CorruptDataError", packed, words, "Restore")


def test_zip_member_with_two_names_is_reported(packed: Path) -> None:
    raw = bytearray(packed.read_bytes())
    raw[raw.rindex(b"X/data/c/3") + 7] ^= 1  # b in the zip directory: it would read as a chunk never written
    packed.write_bytes(raw)
    assert_refused("CorruptDataError", packed, f"{packed}: X/data/b/3 does not begin where the zip directory says")


def test_zip_member_beyond_the_end_is_reported(packed: Path) -> None:
    raw = bytearray(packed.read_bytes())
    at = raw.rindex(b"X/data/c/3") - 46  # its entry in the zip directory, where both sizes are at byte 20
    with zipfile.ZipFile(packed) as archive:
        info = archive.getinfo("X/data/c/3")
    raw[at + 20 : at + 28] = (1 << 24).to_bytes(4, "little") * 2
    size = len(raw)
    packed.write_bytes(raw)
    stop = info.header_offset + 30 + len(info.filename) + (1 << 24)
    words = f"{packed}: X/data/c/3 should reach byte {stop} but the file ends at byte {size}"
    assert_refused("ReadError", packed, words, "truncated")
    raw[at + 20 : at + 28] = info.file_size.to_bytes(4, "little") + (info.file_size + 4).to_bytes(4, "little")
    packed.write_bytes(raw)
    words = f"{packed}: X/data/c/3 is stored as it is, but the zip directory gives it {info.file_size} and "
    assert_refused("CorruptDataError", packed, words, f"{info.file_size + 4} bytes. Restore the file")


def test_disk_error_is_reported(packed: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> int:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(os, "preadv", fail)
    assert_refused("ReadError", packed, f"{packed}: reading ", "at byte ", "failed: Input/output error", "the disk")


def test_unreadable_metadata_is_reported(tmp_path: Path) -> None:
    path = tmp_path / "store.zarr"
    writers.csr(path)
    file = path / "X/data/zarr.json"
    file.unlink()
    file.mkdir()
    assert_refused("ReadError", path, f"{file}: cannot be read: Is a directory", "permissions")


@pytest.mark.parametrize("member", ["obs", "obs/depth", "obs/zarr.json"])
def test_broken_link_is_not_taken_for_a_missing_member(tmp_path: Path, member: str) -> None:
    """Otherwise row numbers would stand in for its cell names, and missing values for its columns."""
    paths = [tmp_path / f"{number}.zarr" for number in range(2)]
    for path in paths:
        writers.csr(path)
    (paths[1] / member).rename(tmp_path / "moved")
    (paths[1] / member).symlink_to("nothing")
    told = f"{paths[1] / member}: this is a link", "put that back"
    assert_refused("ReadError", paths, *told, obs="depth", join="outer")
    if member != "obs/depth":
        with pytest.raises(gpuload.ReadError, match="this is a link"):
            gpuload.obs_names(paths)


def test_a_file_in_place_of_a_group_is_none(tmp_path: Path) -> None:
    path = tmp_path / "store.zarr"
    writers.csr(path)
    (path / "raw").write_text("nothing")
    assert_refused(
        "StoreError", path, f"{path}: there is no raw; it has /X, /obs, /var; choose layer='X'", layer="raw.X"
    )


@pytest.mark.parametrize(("version", "chunk"), [(2, "X/data/3"), (3, "X/data/c/3")])
def test_unlistable_chunks_are_reported(tmp_path: Path, version: int, chunk: str) -> None:
    path = tmp_path / "store.zarr"
    writers.csr(path, version)
    (path / chunk).unlink()
    (path / chunk).symlink_to("nothing")
    assert_refused("ReadError", path, f"{path}/{chunk}: cannot be listed: No such file or directory", "links")


def test_unlistable_members_are_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "collection.zarr"
    writers.collection(path, 2)
    listed = os.scandir

    def scandir(folder: str) -> Any:
        if os.fspath(folder).rstrip("/") == str(path):
            raise PermissionError(errno.EACCES, "Permission denied")
        return listed(folder)

    monkeypatch.setattr(os, "scandir", scandir)
    assert_refused("ReadError", path, f"{path}/: cannot be listed: Permission denied", "Check its permissions")


# --- stores that change while they are open


def test_a_file_removed_while_the_store_is_open(tmp_path: Path) -> None:
    path = tmp_path / "store.zarr"
    writers.csr(path, compressors=LZ4_SHUFFLED)
    with gpuload.open_loader(path, batch_size=4, fetch_factor=1, prefetch=1) as loader:
        shutil.rmtree(path / "X/data/c")
        with pytest.raises(gpuload.ReadError) as caught:
            list(loader)
    assert_says(caught.value, str(path / "X/data/c"), "cannot be opened", "removed")


@pytest.mark.parametrize("when", ["before it is opened", "after it was opened"])
@pytest.mark.parametrize("is_replaced", [True, False])
def test_a_file_changed_while_the_store_is_open(tmp_path: Path, when: str, is_replaced: bool) -> None:
    path = tmp_path / "store.zarr"
    writers.csr(path, compressors=LZ4_SHUFFLED)
    expected = counts().toarray()
    with gpuload.open_loader(path, batch_size=4, fetch_factor=1, block_size=1, prefetch=1) as loader:
        if when == "after it was opened":
            list(loader)
        for file in files(path / "X/data/c"):
            content = file.read_bytes()
            if is_replaced:
                other = file.with_suffix(".new")
                other.write_bytes(content[::-1])
                other.replace(file)
            else:
                with file.open("r+b") as out:
                    out.write(content[::-1])
                os.utime(file, (1, 1))
        if when == "after it was opened" and is_replaced:
            for batch in loader:  # the descriptors are on the old bytes
                np.testing.assert_array_equal(batch.X, expected[batch.rows])
            return
        with pytest.raises(gpuload.ReadError) as caught:
            list(loader)
    assert_says(caught.value, str(path / "X/data/c"), "changed")


def test_a_link_that_changes_while_the_store_is_open(tmp_path: Path) -> None:
    """Of files unpacked with fixed times and of equal sizes, only the folder tells which store they are of."""
    one, two, link = (tmp_path / name for name in ("one.zarr", "two.zarr", "current.zarr"))
    writers.csr(one)
    shutil.copytree(one, two)
    for file in files(two / "X/data/c"):
        file.write_bytes((2 * np.frombuffer(file.read_bytes(), np.float32)).tobytes())
    for file in [*files(one), *files(two)]:
        os.utime(file, (1, 1))
    link.symlink_to(one)
    expected = counts().toarray()
    with gpuload.open_loader(link, batch_size=4, fetch_factor=1, block_size=1, prefetch=1) as loader:
        batches = iter(loader)
        next(batches)
        link.unlink()
        link.symlink_to(two)
        for batch in batches:
            np.testing.assert_array_equal(batch.X, expected[batch.rows])


def test_iterating_a_closed_loader_raises(tmp_path: Path) -> None:
    path = tmp_path / "store.zarr"
    writers.csr(path, compressors=LZ4_SHUFFLED)
    loader = gpuload.open_loader(path)
    loader.close()
    with pytest.raises(gpuload.GpuloadError, match="closed"):
        list(loader)


def test_truncation_during_a_read_raises_a_short_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from gpuload.folder_source import FolderSource

    path = tmp_path / "store.zarr"
    writers.csr(path, compressors=LZ4_SHUFFLED)
    monkeypatch.setattr(FolderSource, "check_file", lambda *_: None)
    with gpuload.open_loader(path, batch_size=4, fetch_factor=2) as loader:
        for file in files(path / "X/data/c"):
            os.truncate(file, 3)
        with pytest.raises(gpuload.ReadError) as caught:
            list(loader)
    assert_says(caught.value, str(path / "X/data/c"), "short read", "/X/data", "at byte 0", "got 3", "truncated")


def test_shard_index_truncated_during_a_read_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from gpuload.folder_source import FolderSource

    path = tmp_path / "store.zarr"
    writers.csr(path, shards=True, compressors=LZ4_SHUFFLED)
    file = path / "X/data/c/1"

    def cut(_: FolderSource, number: int, descriptor: int) -> None:
        if os.path.samestat(os.fstat(descriptor), file.stat()):
            os.truncate(file, 3)

    monkeypatch.setattr(FolderSource, "check_file", cut)
    assert_refused("ReadError", path, f"{file}: the index of this shard of /X/data cannot be read whole", "truncated")


@pytest.mark.parametrize(
    ("at", "value", "words"),
    [
        (0, 49, "it does not begin with the number of its strings"),
        (-5, 2, "its string 49 is cut off"),
        (-1, None, "its string 49 is cut off"),
        (-5, None, "its string 49 is cut off"),
        (3, None, "it does not begin with the number of its strings"),
    ],
    ids=["number", "length", "end", "string", "nothing"],
)
def test_malformed_string_chunks_are_reported(tmp_path: Path, at: int, value: int | None, words: str) -> None:
    """Chunks of 50 strings of one letter; a byte is changed, or they end before it."""
    path = tmp_path / "strings.zarr"
    writers.csr(path)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        obs = zarr.open_group(str(path), mode="r+")["obs"]
        array = obs.create_array("batch", shape=(N_OBS,), dtype=str, chunks=(50,), compressors=None)
        array[...] = np.array(["b"] * N_OBS, dtype=object)
        array.attrs.update({"encoding-type": "string-array", "encoding-version": "0.2.0"})
        obs.attrs["column-order"] = [*obs.attrs["column-order"], "batch"]
    file = path / "obs/batch/c/0"
    raw = bytearray(file.read_bytes())
    assert len(raw) == 4 + 50 * 5
    if value is None:
        raw = raw[:at]
    else:
        raw[at] = value
    with gpuload.open_loader(path, obs=["batch"]) as loader:
        assert list(loader.categories["batch"]) == ["b"]
    file.write_bytes(raw)
    assert_refused("CorruptDataError", path, str(file), "chunk 0 of /obs/batch", words, obs=["batch"])


# --- what cannot be read


def test_transposed_and_big_endian_are_refused(tmp_path: Path) -> None:
    for name, options, words in (
        ("v2-F", {"zarr_format": 2, "order": "F"}, ("transposed", "order='C'")),
        ("v3-F", {"filters": [zc.TransposeCodec(order=(1, 0))]}, ("transposed", "order='C'")),
        ("v2-big", {"zarr_format": 2, "dtype": ">f4"}, ("big-endian", "<f4")),
        ("v3-big", {"serializer": zc.BytesCodec(endian="big")}, ("big-endian", "<f4")),
    ):
        path = tmp_path / f"{name}.zarr"
        writers.dense(path, chunks=(10, 20), **options)
        assert_refused("StoreError", path, str(path), "/X", *words)


def test_identity_transpose_is_accepted(tmp_path: Path) -> None:
    path = tmp_path / "same.zarr"
    writers.dense(path, chunks=(10, 20), filters=[zc.TransposeCodec(order=(0, 1))])
    np.testing.assert_array_equal(read(path), counts().toarray())


def edit(path: Path, key: str, change: Callable[[dict[str, Any]], object]) -> None:
    """Change a metadata file."""
    file = path / key
    meta = json.loads(file.read_text())
    change(meta)
    file.write_text(json.dumps(meta))


def set_at(*places: Any, value: Any) -> Callable[[dict[str, Any]], None]:
    def change(meta: Any) -> None:
        for place in places[:-1]:
            meta = meta[place]
        meta[places[-1]] = value

    return change


REFUSALS: dict[str, tuple[str, Callable[[dict[str, Any]], Any], str, tuple[str, ...]]] = {
    "codec": ("X/data/zarr.json", set_at("codecs", 1, value={"name": "magic"}), "StoreError", ("'magic'", "zstd")),
    "grid": ("X/data/zarr.json", set_at("chunk_grid", "name", value="rectilinear"), "StoreError", ("rectilinear",)),
    "keys": ("X/data/zarr.json", set_at("chunk_key_encoding", "name", value="odd"), "StoreError", ("'odd'",)),
    "transformers": ("X/data/zarr.json", set_at("storage_transformers", value=[{}]), "StoreError", ("transformers",)),
    "dtype": ("X/data/zarr.json", set_at("data_type", value="complex64"), "StoreError", ("'complex64'", "numbers")),
    "float indices": ("X/indices/zarr.json", set_at("data_type", value="float32"), "StoreError", ("integers",)),
    "format": ("X/data/zarr.json", set_at("zarr_format", value=4), "StoreError", ("format 4",)),
    "no shape": ("X/data/zarr.json", lambda meta: meta.pop("shape"), "CorruptDataError", ("'shape'",)),
    "negative": ("X/data/zarr.json", set_at("shape", value=[-1]), "CorruptDataError", ("[-1]",)),
    "huge": ("X/indptr/zarr.json", set_at("shape", value=[1 << 60]), "CorruptDataError", ("entries for 131 rows",)),
    "huge column": ("obs/depth/zarr.json", set_at("shape", value=[1 << 60]), "CorruptDataError", ("cannot hold",)),
    "huge chunk": (
        "X/data/zarr.json",
        set_at("chunk_grid", "configuration", "chunk_shape", value=[1 << 29]),
        "StoreError",
        ("2 GB",),
    ),
    "zero chunk": (
        "X/data/zarr.json",
        set_at("chunk_grid", "configuration", "chunk_shape", value=[0]),
        "CorruptDataError",
        ("do not fit",),
    ),
    "longer": ("X/data/zarr.json", set_at("shape", value=[5000]), "CorruptDataError", ("indptr", "5000 data")),
    "csc": ("X/zarr.json", set_at("attributes", "encoding-type", value="csc_matrix"), "StoreError", ("CSC", "tocsr")),
    "kind": ("X/zarr.json", set_at("attributes", "encoding-type", value="odd"), "StoreError", ("write_zarr",)),
    "node": ("X/zarr.json", set_at("node_type", value="tree"), "CorruptDataError", ("neither a group nor",)),
    "genes": ("X/zarr.json", set_at("attributes", "shape", 1, value=7), "CorruptDataError", ("53 entries",)),
    "cells": ("X/zarr.json", set_at("attributes", "shape", 0, value=7), "CorruptDataError", ("indptr", "for 7 rows")),
    "fill": ("X/indices/zarr.json", set_at("fill_value", value=1.5), "CorruptDataError", ("fill_value 1.5",)),
    "short fill": ("X/data/zarr.json", set_at("fill_value", value="0x7f"), "CorruptDataError", ("fill_value '0x7f'",)),
    "extension": ("X/data/zarr.json", set_at("odd", value={"name": "odd"}), "StoreError", ("extension 'odd'",)),
    "array": ("zarr.json", set_at("node_type", value="nothing"), "CorruptDataError", ("neither",)),
}


@pytest.mark.parametrize("name", REFUSALS)
def test_unsupported_metadata_is_refused_in_one_sentence(tmp_path: Path, name: str) -> None:
    key, change, kind, words = REFUSALS[name]
    path = tmp_path / "store.zarr"
    writers.csr(path, compressors=CODECS_V3["zstd"])
    edit(path, key, change)
    assert_refused(kind, path, str(path), *words, obs=["depth"])


VALUES = (None, True, 0, -1, 1 << 70, float("inf"), "", "x", [], [[]], {}, {"name": []})
"""Values of every JSON type."""


def replaced(node: Any) -> Iterator[Any]:
    """Yield metadata with every value in it, and in that, and so on, replaced by each of `VALUES`."""
    yield from VALUES
    inner = node.items() if isinstance(node, dict) else enumerate(node) if isinstance(node, list) else ()
    for key, value in inner:
        for other in replaced(value):
            changed = node.copy()
            changed[key] = other
            yield changed


def assert_own_words(error: gpuload.GpuloadError) -> None:
    """Check that a message was written by gpuload, and not by Python about whatever it stumbled upon."""
    cause = error.__cause__
    if cause is not None:
        last = traceback.extract_tb(cause.__traceback__)[-1]
        assert isinstance(cause, KeyError) or (last.line or "").startswith("raise ValueError"), (
            f"{error} in {last.line}"
        )
    assert_says(error)


OF_ARRAYS: dict[str, tuple[str, dict[str, Any]]] = {
    "v2": ("v2-lz4", {"filters": [{"id": "shuffle", "elementsize": 4}]}),
    "v2-bytes": ("v2-none", {"dtype": "|S2", "fill_value": "YWI="}),
    "v3": ("v3-gzip-crc32c", {}),
    "v3-sharded": ("v3-sharded-blosc", {}),
    "v3-bytes": (
        "v3-zstd",
        {
            "data_type": {"name": "null_terminated_bytes", "configuration": {"length_bytes": 2}},
            "fill_value": "YWI=",
            "codecs": [{"name": "transpose", "configuration": {"order": [0]}}, "bytes"],
        },
    ),
}
"""Metadata: a form of `BASES`, and what is changed in that of its first array."""


@pytest.mark.parametrize("name", OF_ARRAYS)
def test_values_of_any_json_type_in_the_metadata_of_an_array(tmp_path: Path, name: str) -> None:
    base, changes = OF_ARRAYS[name]
    BASES[base](tmp_path)
    parse, file = (parse_v2, ".zarray") if name.startswith("v2") else (parse_v3, "zarr.json")
    meta = json.loads((tmp_path / ("X" if base == "v2-none" else "X/data") / file).read_text()) | changes
    filters = parse(meta, "store.zarr").filters
    n_refused = 0
    for changed in replaced(meta):
        if isinstance(changed, dict):
            try:
                found = parse(changed, "store.zarr").filters
                assert found == filters or any(changed.get(key) in (None, []) for key in ("filters", "compressor"))
            except (gpuload.StoreError, gpuload.CorruptDataError) as error:
                n_refused += 1
                assert_own_words(error)
    assert n_refused > 100


@pytest.mark.parametrize("key", ["zarr.json", "X/zarr.json", "obs/zarr.json", "obs/depth/zarr.json"])
def test_values_of_any_json_type_in_attributes(tmp_path: Path, key: str) -> None:
    writers.csr(tmp_path)
    expected = gpuload.obs_names(tmp_path).tolist()
    meta = json.loads((tmp_path / key).read_text())
    if key == "obs/zarr.json":
        meta["attributes"]["column-order"] = ["depth"]
    for changed in replaced({name: meta[name] for name in ("attributes", "node_type")}):
        (tmp_path / key).write_text(json.dumps(meta | changed if isinstance(changed, dict) else changed))
        try:
            with closing(open_store(tmp_path, layer="X", obs=["depth"])) as store:
                assert (store.n_obs, store.n_vars) == (N_OBS, N_VARS)
            assert gpuload.obs_names(tmp_path).tolist() == expected
        except gpuload.GpuloadError as error:
            assert_own_words(error)


def test_compressed_or_nested_shards_are_refused(tmp_path: Path) -> None:
    inner = zc.ShardingCodec(chunk_shape=(10, N_VARS))
    nested = zc.ShardingCodec(chunk_shape=(20, N_VARS), codecs=[inner])
    for name, options, words in (
        ("whole", {"serializer": inner, "compressors": [zc.ZstdCodec()]}, ("encodes whole shards", "zstd")),
        ("nested", {"serializer": nested}, ("shards within shards",)),
    ):
        path = tmp_path / f"{name}.zarr"
        try:
            writers.dense(path, chunks=(40, N_VARS), **options)
        except NotImplementedError:  # zarr 3.1.3 writes no shards within shards
            assert name == "nested"
            continue
        assert_refused("StoreError", path, str(path), "/X", *words)


def test_shards_must_consist_of_whole_chunks(tmp_path: Path) -> None:
    path = tmp_path / "odd.zarr"
    writers.dense(path, chunks=(10, 53), shards=(40, 53))
    edit(path, "X/zarr.json", set_at("codecs", 0, "configuration", "chunk_shape", value=[7, 53]))
    with pytest.raises(gpuload.CorruptDataError, match=r"shards of shape \(40, 53\) are not made of chunks"):
        gpuload.open_loader(path)


def test_missing_members_are_reported(tmp_path: Path) -> None:
    path = tmp_path / "store.zarr"
    writers.by_anndata(path, 3, is_csr=True)
    assert_refused("StoreError", path, str(path), "'unspliced'", "'spliced'", layer="unspliced")
    assert_refused("StoreError", path, str(path), "'batch'", "'cell_line'", obs=["batch"])
    shutil.rmtree(path / "raw")
    assert_refused("StoreError", path, str(path), "no raw", layer="raw.X")
    shutil.rmtree(path / "X/indices")
    assert_refused("StoreError", path, str(path), "lacks 'indices'")
    shutil.rmtree(path / "X")
    assert_refused("StoreError", path, str(path), "no /X", "/obs", "/var")
    shutil.rmtree(path / "var")
    assert_refused("StoreError", path, str(path), "no /var", layer="spliced")


def test_an_array_has_no_modalities(tmp_path: Path) -> None:
    path = tmp_path / "array.zarr"
    zarr.create_array(str(path), shape=(N_OBS, N_VARS), chunks=(10, 10), dtype="f4")
    assert_refused("StoreError", path / "rna", str(path), "rna")


def test_a_package_that_cannot_be_imported_is_not_damage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> None:
        raise ImportError("libcublas cannot be loaded")

    path = tmp_path / "store.zarr"
    writers.csr(path)
    monkeypatch.setattr("gpuload.formats.members.read_index", refuse)
    with pytest.raises(ImportError, match="libcublas"):
        gpuload.open_loader(path)


def test_incomplete_collections_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "collection.zarr"
    writers.collection(path, 3)
    (path / "dataset_2" / "zarr.json").write_bytes(b"")  # the last one: none after it shows that it is there
    assert_refused("CorruptDataError", path, f"{path}: dataset_2/zarr.json is not valid JSON", "Restore the store")
    shutil.rmtree(path / "dataset_1")
    assert_refused("CorruptDataError", path, str(path), "dataset_1")
    for i in (0, 2):
        shutil.rmtree(path / f"dataset_{i}")
    assert_refused("StoreError", path, str(path), "no data sets")


@pytest.mark.parametrize("is_link", [True, False])
def test_the_last_part_of_a_collection_is_not_overlooked(tmp_path: Path, is_link: bool) -> None:
    """Where it is a link that leads nowhere, or was copied in part: it would seem that there are fewer cells."""
    path = tmp_path / "collection.zarr"
    writers.collection(path, 3)
    part = path / "dataset_2"
    if is_link:
        part.rename(tmp_path / "elsewhere")
        part.symlink_to(tmp_path / "elsewhere")
        with gpuload.open_loader(path) as loader:
            assert loader.n_obs == 20 + 21 + 22
        (tmp_path / "elsewhere").rename(tmp_path / "moved")
        assert_refused("ReadError", path, f"{part}: this is a link", "what it leads to is not there; put that back")
    else:
        (part / "zarr.json").unlink()
        words = f"{path}: this collection lacks the metadata of dataset_2; copy all of it again."
        assert_refused("CorruptDataError", path, words)


def test_metadata_that_is_not_json_is_reported(tmp_path: Path) -> None:
    path = tmp_path / "store.zarr"
    writers.csr(path)
    for content in ("{", "[1]", "", "\xff"):
        (path / "X/zarr.json").write_text(content, encoding="latin-1")
        assert_refused("CorruptDataError", path, str(path), "X/zarr.json", "JSON")


def replace_array(path: Path, key: str, values: Any) -> None:
    root = zarr.open_group(str(path), mode="r+")
    del root[key]
    root.create_array(key, data=np.asarray(values))


def test_arrays_of_wrong_dimensions_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "store.zarr"
    writers.csr(path)
    replace_array(path, "obs/depth", np.float32(1))
    assert_refused("StoreError", path, f"{path}: /obs/depth has no dimensions; expected an array", obs=["depth"])
    replace_array(path, "X/data", counts().data[None])
    assert_refused("StoreError", path, f"{path}: /X/data has 2 dimensions; expected one")


def test_invalid_columns_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "store.zarr"
    writers.csr(path)
    column = zarr.open_group(str(path), mode="r+")["obs/cell_line"]
    column["codes"][0] = 99
    words = f"{path}: obs column 'cell_line' cannot be read (codes need to be between"
    assert_refused("CorruptDataError", path, words, "restore the file", obs=["cell_line"])
    column.attrs["encoding-type"] = "awkward-array"
    words = f"{path}: /obs/cell_line is encoded as 'awkward-array'; expected categories, numbers"
    assert_refused("StoreError", path, words, obs=["cell_line"])


@pytest.mark.parametrize("place", [0, 8], ids=["offset", "nbytes"])
def test_half_absent_shard_entry_is_not_an_empty_chunk(tmp_path: Path, place: int) -> None:
    path = tmp_path / "store.zarr"
    writers.by_serializer(path, zc.ZstdCodec(), "end", has_crc=False)
    file = path / "X/data/c/0"
    raw = bytearray(file.read_bytes())
    raw[-64 + place : -56 + place] = b"\xff" * 8
    file.write_bytes(raw)
    with pytest.raises(gpuload.ReadError) as caught:
        read(path)
    assert_says(caught.value, str(file), "/X/data", "truncated")


def test_transpose_order_given_as_a_letter(tmp_path: Path) -> None:
    path = tmp_path / "word.zarr"
    writers.dense(path, chunks=(10, 20))
    for order, is_read in (("C", True), ("F", False)):
        step = {"name": "transpose", "configuration": {"order": order}}
        edit(path, "X/zarr.json", lambda meta, step=step: meta["codecs"].insert(0, step))
        if is_read:
            np.testing.assert_array_equal(read(path), counts().toarray())
        else:
            assert_refused("StoreError", path, "/X", "transposed")


def test_chunk_of_the_wrong_size_is_named(tmp_path: Path) -> None:
    """In a shard of four unencoded chunks, the index gives the third an impossibly small size."""
    path = tmp_path / "store.zarr"
    writers.by_serializer(path, None, "end", has_crc=False)
    file = path / "X/data/c/0"
    raw = bytearray(file.read_bytes())
    raw[-24:-16] = (7).to_bytes(8, "little")
    file.write_bytes(raw)
    offset = int.from_bytes(raw[-32:-24], "little")
    assert_refused("CorruptDataError", path, str(file), "/X/data", f"at byte {offset} has 7 bytes")


@pytest.mark.filterwarnings("ignore:Writing zarr v2")
def test_damaged_column_fails_the_zip_checksum(tmp_path: Path) -> None:
    anndata.AnnData(np.eye(4, dtype=np.float32), {"depth": [1, 2, 3, 4]}).write_zarr(tmp_path / "cells.zarr")
    shutil.make_archive(str(tmp_path / "plain"), "zip", tmp_path / "cells.zarr")
    path = tmp_path / "cells.zip"
    with zipfile.ZipFile(tmp_path / "plain.zip") as given, zipfile.ZipFile(path, "w") as stored:
        for name in given.namelist():
            stored.writestr(name, given.read(name))
    with zipfile.ZipFile(path) as stored:
        chunk = next(info for info in stored.infolist() if info.filename in ("obs/depth/0", "obs/depth/c/0"))
        end = path.read_bytes().index(chunk.filename.encode()) + len(chunk.filename) + chunk.file_size
    raw = bytearray(path.read_bytes())
    raw[end - 1] ^= 1
    path.write_bytes(raw)
    place = r"(chunk 0 of /obs/depth at byte \d+|the index of this shard of /obs/depth)"  # anndata 0.13 writes shards
    with pytest.raises(gpuload.CorruptDataError, match=rf"cells.zip: {place} is damaged"):
        gpuload.open_loader(path, obs=["depth"])


def test_zip_member_may_have_an_empty_name(tmp_path: Path) -> None:
    path = tmp_path / "cells.npz"
    scipy.sparse.save_npz(path, scipy.sparse.eye(4, format="csr", dtype=np.float32), compressed=False)
    with zipfile.ZipFile(path, "a") as archive:
        archive.writestr(zipfile.ZipInfo(""), b"")
    with gpuload.open_loader(path, device="cpu") as loader:
        assert loader.n_obs == 4
