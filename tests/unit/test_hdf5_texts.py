"""Texts are read from an HDF5 file's heaps as h5py reads them, and whatever is unusual is left to it."""

from __future__ import annotations

import os
from contextlib import closing
from typing import TYPE_CHECKING, Any

import h5py
import hdf5plugin
import numpy as np
import pytest

import gpuload
from gpuload.formats import hdf5, hdf5_texts
from gpuload.formats.hdf5_texts import read_texts
from gpuload.remote import FolderRemote
from gpuload.remote import file as remote_file
from gpuload.remote.file import MissingError
from gpuload.remote.source import RemoteSource
from tests.writers import counts, write_csr, write_h5ad

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

N = 3_000
TEXT = h5py.string_dtype()


@pytest.fixture
def by_h5py(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return how many texts were left to h5py, each time."""
    left: list[int] = []

    def record(values: Any, real: Callable[[Any], Any] = hdf5_texts.as_strings) -> Any:
        left.append(len(values))
        return real(values)

    monkeypatch.setattr(hdf5_texts, "as_strings", record)
    return left


def texts(n: int = N, seed: int = 0) -> list[str]:
    """Return texts of 1 to 40 characters, some of several bytes each; some of them twice."""
    rng = np.random.default_rng(seed)
    return ["".join(rng.choice(list("ACGTé漢"), size)) for size in rng.integers(1, 40, n)]


def written(path: Path, values: Any, **options: Any) -> Path:
    """Write texts after those of others, so that they share a collection."""
    with h5py.File(path, "w", userblock_size=options.pop("userblock_size", 0), libver=options.pop("libver", None)) as f:
        f.create_dataset("others", data=["a", "bcd"] * 50, dtype=TEXT)
        f.create_dataset("texts", data=values, dtype=options.pop("dtype", TEXT), **options)
        f.create_dataset("more", data=["efg"] * 10, dtype=TEXT)
    return path


def read(path: Path) -> list[str]:
    with h5py.File(path) as file:
        return list(read_texts(file["texts"]))


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"chunks": (N,)},
        {"chunks": (700,), "compression": "gzip", "shuffle": True},
        {"chunks": (4 * N,), "maxshape": (None,), "compression": "lzf"},
        {"userblock_size": 512},
        {"userblock_size": 1024, "chunks": (1_000,)},
        {"libver": "latest", "chunks": (1_000,), "compression": "gzip"},
        {"dtype": h5py.string_dtype("ascii")},
    ],
)
def test_texts_are_read_as_h5py_reads_them(tmp_path: Path, by_h5py: list[int], options: dict[str, Any]) -> None:
    given = [f"gene{i}" * (1 + i % 5) for i in range(N)] if "dtype" in options else texts()
    assert read(written(tmp_path / "t.h5", given, **options)) == given
    assert by_h5py == []


def test_texts_that_were_written_anew_in_another_order(tmp_path: Path, by_h5py: list[int]) -> None:
    path, given = written(tmp_path / "t.h5", texts()), texts(seed=1)
    with h5py.File(path, "r+") as file:
        for start in reversed(range(0, N, 100)):
            file["texts"][start : start + 100] = given[start : start + 100]
    assert read(path) == given
    assert by_h5py in ([], [N])  # what was free between them may or may not be told from them


def test_texts_between_which_others_lie(tmp_path: Path, by_h5py: list[int]) -> None:
    given = texts()
    with h5py.File(tmp_path / "t.h5", "w") as file:
        stored, others = (file.create_dataset(name, (N,), TEXT) for name in ("texts", "others"))
        for start in range(0, N, 10):
            stored[start : start + 10], others[start : start + 3] = given[start : start + 10], ["not", "of", "them"]
    assert read(tmp_path / "t.h5") == given
    assert by_h5py == []


def test_texts_that_lie_far_apart(tmp_path: Path, by_h5py: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """What lies between them is not read."""
    given, between = texts(), np.zeros(1 << 19, dtype=np.uint8)
    with h5py.File(tmp_path / "t.h5", "w") as file:
        stored = file.create_dataset("texts", (N,), TEXT)
        for start in range(0, N, 500):
            stored[start : start + 500] = given[start : start + 500]
            file.create_dataset(f"between{start}", data=between)
    n_read, pread = [], os.pread

    def counted(descriptor: int, nbytes: int, offset: int) -> bytes:
        n_read.append(nbytes)
        return pread(descriptor, nbytes, offset)

    monkeypatch.setattr(os, "pread", counted)
    assert read(tmp_path / "t.h5") == given
    assert by_h5py == []
    assert sum(n_read) < between.size


def compact() -> Any:
    plist = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
    plist.set_layout(h5py.h5d.COMPACT)
    return plist


@pytest.mark.parametrize(
    ("values", "options"),
    [
        (texts(), {"dcpl": compact()}),
        (texts(), {"chunks": (1 << 19,), "maxshape": (None,), "compression": "gzip"}),
        (["", *texts(N - 1)], {}),
        (["long" * 256, *texts(N - 1)], {}),
        (texts(100), {}),
        ([f"gene{i}".encode() for i in range(N)], {"dtype": "S8"}),
        (texts(), {"chunks": (1_000,), **hdf5plugin.BZip2()}),
    ],
)
def test_what_is_unusual_is_left_to_h5py(
    tmp_path: Path, by_h5py: list[int], values: list[Any], options: dict[str, Any]
) -> None:
    found = read(written(tmp_path / "t.h5", values, **options))
    assert found == [value.decode() if isinstance(value, bytes) else value for value in values]
    assert by_h5py == [len(values)]


def test_texts_that_were_never_written_are_left_to_h5py(tmp_path: Path, by_h5py: list[int]) -> None:
    with h5py.File(tmp_path / "t.h5", "w") as file:
        file.create_dataset("texts", (N,), TEXT, chunks=(1_000,))
        file["texts"][:1_000] = texts(1_000)
    assert read(tmp_path / "t.h5") == texts(1_000) + [""] * 2_000
    assert by_h5py == [N]


def test_more_texts_than_there_are_genes_are_left_to_h5py(
    tmp_path: Path, by_h5py: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = written(tmp_path / "t.h5", texts())
    for most, left in ((N, []), (N - 1, [N])):
        monkeypatch.setattr(hdf5_texts, "_MANY", most)
        assert read(path) == texts()
        assert by_h5py == left


def test_a_file_in_memory_is_left_to_h5py(tmp_path: Path, by_h5py: list[int]) -> None:
    with h5py.File(written(tmp_path / "t.h5", texts()), driver="core") as file:
        assert list(read_texts(file["texts"])) == texts()
    assert by_h5py == [N]


def test_bytes_that_cannot_be_read_are_left_to_h5py(
    tmp_path: Path, by_h5py: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(offset: int, nbytes: int) -> bytes:
        raise OSError("not here")

    monkeypatch.setattr(hdf5_texts, "_reader", lambda file: fails)
    assert read(written(tmp_path / "t.h5", texts())) == texts()
    assert by_h5py == [N]


def test_what_is_wrong_with_a_chunk_is_said_by_h5py(tmp_path: Path) -> None:
    path = written(tmp_path / "t.h5", texts(), chunks=(N,), compression="gzip")
    with h5py.File(path) as file:
        at = file["texts"].id.get_chunk_info(0).byte_offset
    damaged(path, at, b"damaged")
    with pytest.raises(OSError, match="filter returned failure"):
        read(path)


def far(path: Path, wait: bool) -> tuple[list[str], int]:
    """Return the texts of a file as an object of a remote, and how many rounds of requests they took."""
    remote = FolderRemote(path.parent)
    found = remote.head(path.name)
    assert found is not None
    with closing(RemoteSource("far", remote, [found])) as source:
        content, n_rounds = hdf5._OneFile(source), 0
        content.can_wait = wait
        while True:
            try:
                with h5py.File(content, "r") as file:
                    return list(read_texts(file["texts"])), n_rounds
            except MissingError:
                n_rounds += 1
                assert content.bring_missing()


@pytest.mark.parametrize("options", [{}, {"chunks": (700,), "compression": "gzip"}, {"userblock_size": 512}])
@pytest.mark.parametrize("wait", [True, False])
def test_texts_of_an_object_are_read_as_those_of_a_file(
    tmp_path: Path,
    by_h5py: list[int],
    wait: bool,
    options: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
    no_leaks: None,
) -> None:
    for name, value in (("_BLOCK", 1024), ("_BEHIND", 0), ("_BEYOND", 2), ("_MAX_BLOCKS_AHEAD", 2)):
        monkeypatch.setattr(remote_file, name, value)
    found, n_rounds = far(written(tmp_path / "t.h5", texts(), **options), wait)
    assert found == texts()
    assert by_h5py == []
    assert n_rounds <= (8 if "chunks" in options else 5), "the heaps were asked for one after another"


def natively(file: h5py.File) -> list[str]:
    """Return the texts, read without h5py's help."""
    return list(hdf5_texts._shared(hdf5_texts._joined(file["texts"], hdf5_texts._reader(file)), N))


def damaged(path: Path, at: int, content: bytes) -> None:
    raw = bytearray(path.read_bytes())
    raw[at : at + len(content)] = content
    path.write_bytes(raw)


@pytest.mark.parametrize(
    "part", ["length", "longer", "address", "number", "magic", "size", "own number", "own length", "zero"]
)
@pytest.mark.parametrize("which", [0, 1_234, N - 1])
def test_damaged_references_and_heaps_are_not_believed(tmp_path: Path, part: str, which: int) -> None:
    path, given = written(tmp_path / "t.h5", texts()), texts()
    with h5py.File(path) as file:
        reference = file["texts"].id.get_offset() + 16 * which
        raw = path.read_bytes()
        heap = int.from_bytes(raw[reference + 4 : reference + 12], "little")
        at = raw.index(given[which].encode(), heap) - 16  # of it, or of an equal one
    with h5py.File(path) as file:
        assert natively(file) == given
    place, content = {
        "length": (reference, b"\x7f\xff\xff\xff"),
        "longer": (reference, (1_000).to_bytes(4, "little")),
        "address": (reference + 4, (heap + 8).to_bytes(8, "little")),
        "number": (reference + 12, b"\xff\xff"),
        "magic": (heap, b"GC0L"),
        "size": (heap + 8, (1 << 40).to_bytes(8, "little")),
        "own number": (at, b"\xfe\xff"),
        "own length": (at + 8, (1 << 62).to_bytes(8, "little")),
        "zero": (at + 16, b"\0"),
    }[part]
    damaged(path, place, content)
    with h5py.File(path) as file, pytest.raises((hdf5_texts._UnusualError, ValueError)):
        natively(file)


def test_lengths_that_lead_beyond_the_heap_are_not_believed(tmp_path: Path) -> None:
    path = written(tmp_path / "t.h5", texts())
    with h5py.File(path) as file:
        offset = file["texts"].id.get_offset()
    references = np.frombuffer(path.read_bytes(), [("nbytes", "<u4"), ("where", "V12")], N, offset).copy()
    references["nbytes"][100:] = 1_000
    damaged(path, offset, references.tobytes())
    with h5py.File(path) as file, pytest.raises(hdf5_texts._UnusualError):
        natively(file)


def test_bytes_anywhere_end_in_texts_or_in_a_refusal(tmp_path: Path) -> None:
    path, given = written(tmp_path / "t.h5", texts(), chunks=(1_000,)), texts()
    whole, rng, n_read = path.read_bytes(), np.random.default_rng(0), 0
    with h5py.File(path) as file:
        for _ in range(300):
            raw = bytearray(whole)
            for at in rng.integers(2_048, len(whole), 3).tolist():
                raw[at] ^= 1 << int(rng.integers(8))
            path.write_bytes(raw)  # in place: what h5py has read of the file stays
            try:
                found = natively(file)
            except (hdf5_texts._UnusualError, ValueError):
                continue
            n_read += 1
            assert sum(one != two for one, two in zip(found, given, strict=True)) <= 3
    assert 0 < n_read < 300


def test_files_with_the_same_genes_hold_one_array_and_a_loader_its_own(tmp_path: Path) -> None:
    X, paths = counts(20, 1_500), [tmp_path / "0.h5ad", tmp_path / "1.h5ad"]
    for path in paths:
        write_h5ad(path, lambda file: write_csr(file, "X", X), 20, 1_500)
    with h5py.File(paths[0]) as one, h5py.File(paths[1]) as two:
        first = read_texts(one["var/_index"])
        assert first is read_texts(two["var/_index"])
    name = first[0]
    with gpuload.open_loader(paths) as loader, gpuload.open_loader(paths[0]) as other:
        loader.var_names[0] = "changed"
        assert other.var_names[0] == name
        with gpuload.open_loader(paths[1]) as later:
            assert later.var_names[0] == name
