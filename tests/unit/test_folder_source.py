"""Files of a folder as one source: addresses, which files are open, and that they are unchanged."""

from __future__ import annotations

import os
import threading
from typing import TYPE_CHECKING

import numpy as np
import pytest

from gpuload import ReadError, folder_source
from gpuload.backends import reading
from gpuload.backends.reading import MAX_HELD, read_each, read_ranges
from gpuload.folder_source import APART, FolderSource
from gpuload.layout import MAX_EXTENT, MAX_GAP
from gpuload.source import FileSource
from tests.forks import status_of_fork

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

SIZES = [5000, 1, 4096, 70_000, *range(100, 130)]


def make(folder: Path, sizes: list[int]) -> tuple[FolderSource, list[np.ndarray]]:
    data = [np.random.default_rng(i).integers(0, 256, n, dtype=np.uint8) for i, n in enumerate(sizes)]
    for i, values in enumerate(data):
        (folder / f"f{i}").write_bytes(values.tobytes())
    stamps = np.array([(folder / f"f{i}").stat().st_mtime_ns for i in range(len(sizes))], dtype=np.int64)
    names = [f"f{i}" for i in range(len(sizes))]
    return FolderSource(str(folder), names, np.array(sizes, dtype=np.int64), stamps), data


@pytest.fixture
def made(tmp_path: Path) -> Iterator[tuple[FolderSource, list[np.ndarray]]]:
    source, data = make(tmp_path, SIZES)
    yield source, data
    source.close()
    assert not descriptors(tmp_path)


def descriptors(folder: Path) -> list[str]:
    """Return the files of a folder that this process has open."""
    links = []
    for number in os.listdir("/proc/self/fd"):
        path = f"/proc/self/fd/{number}"
        if os.path.islink(path) and os.readlink(path).startswith(f"{folder}/"):
            links.append(os.readlink(path))
    return links


def test_descriptor_is_not_used_while_it_is_closed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its number may be that of another file by then, which another thread has opened."""
    path = tmp_path / "cells"
    path.write_bytes(b"old")
    source, close, closed = FileSource(path), os.close, []

    def close_meanwhile(descriptor: int) -> None:
        close(descriptor)
        closed.append(descriptor)
        for use in (source.check_unchanged, source.opened, lambda: source.read_into(np.empty(3, np.uint8), 0)):
            with pytest.raises(ReadError, match="the loader was closed"):
                use()
        source.close()

    monkeypatch.setattr(os, "close", close_meanwhile)
    source.close()
    monkeypatch.undo()
    assert len(closed) == 1


def test_files_are_further_apart_than_reads_bridge(made: tuple[FolderSource, list[np.ndarray]]) -> None:
    source, _ = made
    assert APART >= MAX_GAP + MAX_EXTENT
    assert (source.base[1:] - (source.base + np.array(SIZES))[:-1] >= APART).all()
    assert (source.base % 4096 == 0).all()
    assert source.nbytes == source.base[-1] + SIZES[-1]
    number, at, nbytes = source.locate(source.base[[3, 0, 2]] + np.array([69_999, 0, 7]))
    assert (number.tolist(), at.tolist(), nbytes.tolist()) == ([3, 0, 2], [69_999, 0, 7], [70_000, 5000, 4096])
    assert source.where_is(int(source.base[3]) + 5) == (os.path.join(source.name, "f3"), 5)


def test_an_empty_folder(tmp_path: Path) -> None:
    source, _ = make(tmp_path, [])
    assert source.nbytes == 0
    assert source.read_into(np.zeros(3, np.uint8), 0) == 0
    nothing, zero = np.empty(0, dtype=np.int64), np.zeros(2, dtype=np.int64)
    assert read_ranges(source, nothing, nothing, nothing, np.zeros(1, np.uint8)) == 0
    assert read_ranges(source, zero, zero, zero, np.zeros(1, np.uint8)) == 2
    assert source.where_is(0) == (str(tmp_path), 0)


def test_ranges_span_more_files_than_are_held_open(made: tuple[FolderSource, list[np.ndarray]]) -> None:
    source, data = made
    assert len(SIZES) > MAX_HELD
    rng = np.random.default_rng(1)
    number = np.repeat(np.arange(len(SIZES)), 3)
    at = np.array([rng.integers(0, SIZES[n]) for n in number])
    nbytes = np.array([rng.integers(0, SIZES[n] - a + 1) for n, a in zip(number, at, strict=True)])
    offset = np.where(nbytes > 0, source.base[number] + at, 0)  # an absent chunk is nowhere
    place = np.cumsum(nbytes) - nbytes
    buffer = np.zeros(int(nbytes.sum()), np.uint8)
    assert read_ranges(source, offset, nbytes, place, buffer) == offset.size
    wanted = np.concatenate([data[n][a : a + k] for n, a, k in zip(number, at, nbytes, strict=True)])
    np.testing.assert_array_equal(buffer, wanted)
    beyond = nbytes.copy()
    beyond[100] += SIZES[number[100]]
    assert number[100] >= MAX_HELD
    room = np.zeros(int(beyond.sum()), np.uint8)
    assert read_ranges(source, source.base[number] + at, beyond, np.cumsum(beyond) - beyond, room) == 100


@pytest.mark.parametrize("together", [1, 3000, reading.TOGETHER])
def test_each_range_is_given_with_its_number(
    made: tuple[FolderSource, list[np.ndarray]], monkeypatch: pytest.MonkeyPatch, together: int
) -> None:
    source, data = made
    monkeypatch.setattr(reading, "TOGETHER", together)
    rng = np.random.default_rng(2)
    number = rng.integers(0, len(SIZES), 200)  # in no order, and some overlap
    at = np.array([rng.integers(0, SIZES[n]) for n in number])
    nbytes = np.array([rng.integers(1, SIZES[n] - a + 1) for n, a in zip(number, at, strict=True)])
    given = {k: part.tobytes() for k, part in read_each(source, source.base[number] + at, nbytes)}
    assert given == {k: data[number[k]][at[k] : at[k] + nbytes[k]].tobytes() for k in range(200)}
    nothing = np.empty(0, dtype=np.int64)
    assert not list(read_each(source, nothing, nothing))


def test_ranges_that_cannot_be_read_in_full_are_returned_short(
    made: tuple[FolderSource, list[np.ndarray]], monkeypatch: pytest.MonkeyPatch
) -> None:
    source, data = made
    monkeypatch.setattr(FolderSource, "check_file", lambda *_: None)
    os.truncate(os.path.join(source.name, "f3"), 20)
    number, at = np.array([0, 3, 3, 3, 4]), np.array([9, 5, 12, 30, 0])
    given = [part.tobytes() for _, part in read_each(source, source.base[number] + at, np.full(5, 10))]
    assert given == [
        data[n][a : min(a + 10, 20 if n == 3 else a + 10)].tobytes() for n, a in zip(number, at, strict=True)
    ]


def test_few_files_stay_open_and_none_closes_during_a_read(
    made: tuple[FolderSource, list[np.ndarray]], monkeypatch: pytest.MonkeyPatch
) -> None:
    source, data = made
    monkeypatch.setattr(folder_source, "MAX_IDLE", 4)
    folder, out = source.name, np.zeros(1, np.uint8)
    with source.hold([0, 1, 2, 3, 4, 5]) as held:
        for number in range(len(SIZES)):
            source.read_into(out, int(source.base[number]))
            assert out[0] == data[number][0]
        assert len(descriptors(folder)) == 6
        assert [os.fstat(d).st_size for d in held] == SIZES[:6]
    assert len(descriptors(folder)) <= 4
    source.read_into(out, int(source.base[9]))
    before = descriptors(folder)
    source.read_into(out, int(source.base[9]))
    assert descriptors(folder) == before
    assert any(name.endswith("/f9") for name in before)


def test_threads_can_share_the_same_files(
    made: tuple[FolderSource, list[np.ndarray]], monkeypatch: pytest.MonkeyPatch
) -> None:
    source, data = made
    monkeypatch.setattr(folder_source, "MAX_IDLE", 2)
    errors: list[BaseException] = []

    def work(seed: int) -> None:
        rng = np.random.default_rng(seed)
        try:
            for number in rng.integers(0, len(SIZES), 400).tolist():
                buffer = np.zeros(SIZES[number], np.uint8)
                assert source.read_into(buffer, int(source.base[number])) == SIZES[number]
                assert buffer.tobytes() == data[number].tobytes()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors, errors[0]
    assert len(descriptors(source.name)) <= 2


def test_closing_keeps_held_files_and_refuses_later_reads(made: tuple[FolderSource, list[np.ndarray]]) -> None:
    source, _ = made
    with source.hold([3]) as (descriptor,):
        source.close()
        assert os.fstat(descriptor).st_size == 70_000
    assert not descriptors(source.name)
    with pytest.raises(ReadError, match="the loader was closed"):
        source.read_into(np.zeros(1, np.uint8), 0)


def test_other_sources_files_are_closed_if_the_process_has_too_many(
    made: tuple[FolderSource, list[np.ndarray]], monkeypatch: pytest.MonkeyPatch
) -> None:
    import errno

    source, data = made
    out, opened = np.zeros(1, np.uint8), os.open
    for number in range(8):
        source.read_into(out, int(source.base[number]))

    def limited(path: str, *args: int) -> int:
        if str(path).startswith(source.name) and len(descriptors(source.name)) >= 3:
            raise OSError(errno.EMFILE, "Too many open files")
        return opened(path, *args)

    monkeypatch.setattr(os, "open", limited)
    assert source.read_into(out, int(source.base[20])) == 1
    assert out[0] == data[20][0]
    with source.hold([1, 2, 3]), pytest.raises(ReadError, match=r"Too many open files.*ulimit"):
        source.read_into(out, int(source.base[21]))


def test_changes_during_a_read_are_found(made: tuple[FolderSource, list[np.ndarray]]) -> None:
    source, _ = made
    with pytest.raises(ReadError, match="f3: the file was changed while the store was open"), source.hold([2, 3]):
        os.utime(os.path.join(source.name, "f3"), (1, 1))


def test_the_working_directory_may_change(
    made: tuple[FolderSource, list[np.ndarray]], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    source, data = made
    folder, name = os.path.split(source.name)
    monkeypatch.chdir(folder)
    relative = FolderSource(name, source._names, source._nbytes, source._stamps)
    monkeypatch.chdir(tmp_path)
    out = np.zeros(1, np.uint8)
    assert relative.read_into(out, int(relative.base[4])) == 1
    assert out[0] == data[4][0]
    assert relative.where_is(int(relative.base[4])) == (os.path.join(name, "f4"), 0)
    relative.close()


def test_changes_in_place_are_found(made: tuple[FolderSource, list[np.ndarray]]) -> None:
    source, _ = made
    path = os.path.join(source.name, "f3")
    source.read_into(np.zeros(1, np.uint8), int(source.base[3]))
    source.check_unchanged()
    os.utime(path, (1, 1))
    with pytest.raises(
        ReadError, match=r"f3: .* while the store was open \(modified since; its size is still 70000 bytes"
    ):
        source.check_unchanged()
    os.truncate(os.path.join(source.name, "f5"), 3)
    with pytest.raises(ReadError, match=r"f5: the file was changed .*size 101 -> 3 bytes"):
        source.read_into(np.zeros(1, np.uint8), int(source.base[5]))
    os.unlink(os.path.join(source.name, "f6"))
    with pytest.raises(ReadError, match="f6: cannot be opened: No such file"):
        source.read_into(np.zeros(1, np.uint8), int(source.base[6]))


@pytest.mark.filterwarnings("ignore:.*multi-threaded:DeprecationWarning")  # Python's, of the fork
def test_a_forked_process_reads_even_if_a_parent_thread_held_the_lock(
    made: tuple[FolderSource, list[np.ndarray]],
) -> None:
    source, contents = made

    def read() -> bool:
        buffer = np.zeros(contents[0].size, dtype=np.uint8)
        is_read = source.read_into(buffer, int(source.base[0])) == buffer.size
        source.close()
        return is_read and np.array_equal(buffer, contents[0])

    assert status_of_fork(read, [folder_source._open_files._lock]) == 0
