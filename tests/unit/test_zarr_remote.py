"""Zarr stores on a remote: what opening them requests, and how much of it concurrently."""

from __future__ import annotations

import re
import shutil
from contextlib import closing, contextmanager
from dataclasses import replace
from itertools import count
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

zarr = pytest.importorskip("zarr", minversion="3.0")

from gpuload.errors import BusyError, CorruptDataError, ReadError  # noqa: E402
from gpuload.formats.addresses import Address  # noqa: E402
from gpuload.formats.zarr_nodes import open_node  # noqa: E402
from gpuload.formats.zarr_remote import RemoteTree  # noqa: E402
from gpuload.formats.zarr_trees import FolderTree  # noqa: E402
from tests.remotes import CountingRemote  # noqa: E402

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from gpuload.remote import RemoteObject

N_FILES, CHUNK = 40, 30
ABSENT = (3, 17)
"""Missing files of an array."""


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a store of an array in 40 chunks and one in 40 shards of 5 chunks; two files of each are missing."""
    path = tmp_path_factory.mktemp("zarr") / "store.zarr"
    group = zarr.open_group(str(path), mode="w", zarr_format=3)
    values = np.arange(1, N_FILES * CHUNK - 3)  # the last chunk is cut off
    for name, shards in (("chunks", None), ("shards", (CHUNK,))):
        chunks = (CHUNK if shards is None else CHUNK // 5,)
        array = group.create_array(name, shape=values.shape, dtype="i4", chunks=chunks, shards=shards, fill_value=-1)
        array[:] = values
        for number in ABSENT:
            (path / name / "c" / str(number)).unlink()
    return path


@pytest.fixture(autouse=True)
def kept(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Return the folder of what is cached for the next opening."""
    folder = tmp_path / "kept"
    monkeypatch.setenv("GPULOAD_INDEX", str(folder))
    return folder


def expected() -> np.ndarray:
    values = np.arange(1, N_FILES * CHUNK - 3)
    for number in ABSENT:
        values[number * CHUNK : (number + 1) * CHUNK] = -1
    return values


def tree_of(remote: CountingRemote) -> RemoteTree:
    address = Address.of("fake://bucket/store.zarr")
    vars(address)["_reached"] = remote, ""
    return RemoteTree(address)


@contextmanager
def node(remote: CountingRemote, key: str) -> Iterator[Any]:
    """Yield an array of the store that a remote holds."""
    with closing(tree_of(remote)) as tree:
        yield open_node(tree, key)


def test_a_remote_is_listed_as_a_folder_is(tmp_path: Path) -> None:
    """Also where an array's name begins as another's, and what follows looks like its chunks."""
    group = zarr.open_group(str(tmp_path), mode="w", zarr_format=3)
    for value, name in enumerate(("a", "a_c", "b/a", "b/a_c")):
        group.create_array(name, shape=(4,), dtype="i4", chunks=(2,))[...] = value + 1
    near, remote = FolderTree(str(tmp_path)), CountingRemote(tmp_path)
    with closing(tree_of(remote)) as far:
        for key in ("", "a", "b", "b/a"):
            assert far.children(key) == near.children(key) != []
        for key in ("a", "a_c", "b/a", "b/a_c"):
            found = []
            for tree in (near, far):
                source, places = tree.chunks(key, ())
                found.append({name: nbytes for name, (_, nbytes) in places.items()})
                source.close()
            assert found[0] == found[1]
            assert found[0].keys() == {"c/0", "c/1"}
        assert {far.read("b/a/zarr.json") for _ in range(3)} == {(tmp_path / "b/a/zarr.json").read_bytes()}
        assert remote.gets["b/a/zarr.json"] == 1


def test_chunks_of_an_array_are_requested_concurrently(
    store: Path, no_leaks: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gpuload.remote.source._SECOND_SHARE", 0.0)  # of those that are slow on a busy machine
    remote = CountingRemote(store, wait_s=0.1)
    with node(remote, "chunks") as array:
        remote.gets.clear()
        np.testing.assert_array_equal(array.read(), expected())
    assert remote.most_at_once > N_FILES / 2
    assert sorted(remote.gets.values()) == [1] * (N_FILES - len(ABSENT))


@pytest.mark.parametrize("n_damaged", [1, 2])
def test_metadata_damaged_in_transfer_is_read_once_more(store: Path, n_damaged: int, no_leaks: None) -> None:
    class Damaging(CountingRemote):
        n_left = n_damaged

        def get(self, wanted: RemoteObject, start: int, stop: int) -> Any:
            body = super().get(wanted, start, stop)
            if wanted.key == "chunks/zarr.json" and self.n_left:
                self.n_left -= 1
                body[0] ^= 0x80
            return body

    if n_damaged == 1:
        with node(Damaging(store), "chunks") as array:
            np.testing.assert_array_equal(array.read(), expected())
        return
    with pytest.raises(CorruptDataError, match=r"chunks/zarr\.json is not valid JSON"), node(Damaging(store), "chunks"):
        pass


def test_shard_indices_are_requested_concurrently(store: Path, no_leaks: None) -> None:
    remote = CountingRemote(store, wait_s=0.1)
    near = open_node(FolderTree(str(store)), "shards").layout()
    with node(remote, "shards") as array, closing(array.layout().source) as source:
        assert remote.most_at_once > N_FILES / 2
        far, there = array.layout(), np.flatnonzero(near.chunk_nbytes)
        np.testing.assert_array_equal(far.chunk_nbytes, near.chunk_nbytes)
        assert there.size == 5 * (N_FILES - len(ABSENT))
        for of_far, of_near in zip(source.locate(far.chunk_offset), near.source.locate(near.chunk_offset), strict=True):
            np.testing.assert_array_equal(of_far[there], of_near[there])
        far.source.close()
        remote.most_at_once = 0
        np.testing.assert_array_equal(array.read(), expected())
        assert remote.most_at_once > N_FILES / 2
    near.source.close()


@pytest.mark.parametrize("key", ["chunks", "shards"])
def test_remote_failures_are_reported_as_usual(
    store: Path, tmp_path: Path, key: str, monkeypatch: pytest.MonkeyPatch, no_leaks: None
) -> None:
    monkeypatch.setenv("GPULOAD_INDEX", "off")
    path = shutil.copytree(store, tmp_path / "store.zarr")
    file, wanted = path / key / "c/20", f"{re.escape(str(path))}/{key}/c/20: "
    whole = file.read_bytes()

    def refused(kind: type[Exception], words: str, remote: CountingRemote | None = None, content: bytes = b"") -> None:
        with node(remote or CountingRemote(path), key) as array:
            if content:
                file.write_bytes(content)
            with pytest.raises(kind, match=words):
                array.read()
        file.write_bytes(whole)

    class Busy(CountingRemote):
        number = count()
        n_refused = 0

        def get(self, wanted: RemoteObject, start: int, stop: int) -> Any:
            if next(self.number) % 3 == 0:
                self.n_refused += 1
                raise BusyError("503")
            return super().get(wanted, start, stop)

    class Denied(CountingRemote):
        def get(self, wanted: RemoteObject, start: int, stop: int) -> Any:
            if wanted.key == f"{key}/c/20":
                raise ReadError(f"{wanted.key}: access was denied")
            return super().get(wanted, start, stop)

    busy = Busy(path)
    with node(busy, key) as array:
        np.testing.assert_array_equal(array.read(), expected())
    assert busy.n_refused > 10
    refused(ReadError, f"^{key}/c/20: access was denied$", Denied(path))
    refused(ReadError, f"^{wanted}the file was changed since it was listed; open it again", content=whole + b"more")
    damaged = bytearray(whole)
    damaged[-1] ^= 1
    file.write_bytes(damaged)
    if key == "shards":
        refused(CorruptDataError, f"^{wanted}the index of this shard of /shards is damaged: its crc32c checksum")
        file.write_bytes(whole[:50])
        refused(ReadError, f"^{wanted}the index of this shard of /shards should have 84 bytes but the shard has 50")
    else:
        file.write_bytes(whole[:5])
        refused(CorruptDataError, f"^{wanted}chunk 20 of /chunks at byte 0 is damaged: ")


class Tagged(CountingRemote):
    """A folder that gives its objects ETags of another form."""

    tag = "{}"

    def list(self) -> Iterator[RemoteObject]:
        return (replace(found, etag=self.tag.format(found.etag)) for found in super().list())

    def get(self, wanted: RemoteObject, start: int, stop: int) -> Any:
        found = self.head(wanted.key)
        assert found is not None
        return super().get(found, start, stop)


def n_indices_read(path: Path, tag: str = "{}") -> int:
    """Open the shards of a store, and return how many of their indices were requested."""
    remote = Tagged(path)
    remote.tag = tag
    with node(remote, "shards") as array, closing(array.layout().source):
        n_asked = sum(key.startswith("shards/c") for key in remote.gets)
        np.testing.assert_array_equal(array.read(), expected())
    return n_asked


def test_chunk_locations_are_cached_until_objects_change(store: Path, kept: Path) -> None:
    n_shards = N_FILES - len(ABSENT)
    assert [n_indices_read(store) for _ in range(3)] == [n_shards, 0, 0]
    assert [n_indices_read(store, "{}-changed") for _ in range(2)] == [n_shards, 0]
    (entry,) = kept.iterdir()
    damaged = bytearray(entry.read_bytes())
    damaged[-1] ^= 1
    entry.write_bytes(damaged)
    assert [n_indices_read(store, "{}-changed") for _ in range(2)] == [n_shards, 0]


def test_chunk_locations_are_not_those_of_another_shape(store: Path, tmp_path: Path) -> None:
    """An array that is cut within its last shard has the same objects, but fewer chunks."""
    path, n = tmp_path / "cut.zarr", N_FILES * CHUNK - 28
    shutil.copytree(store, path)
    n_indices_read(path)
    zarr.open_array(path / "shards", mode="r+").resize((n,))
    with node(Tagged(path), "shards") as array:
        np.testing.assert_array_equal(array.read(), expected()[:n])


@pytest.mark.parametrize("tag", ["", "W/{}", "modified {}"])
def test_nothing_is_cached_without_strong_etags(store: Path, kept: Path, tag: str) -> None:
    assert [n_indices_read(store, tag) for _ in range(2)] == [N_FILES - len(ABSENT)] * 2
    assert not kept.exists()
