"""Bodies of the readers' tests that run on a fake CUDA driver, in a process of their own (see `test_readers`).

They test the package's readers over the real KvikIO, on its device path: its threads, tasks, bounce buffers and
errors. The driver is `fake_libcuda.c`; for direct transfers, cuFile is `fake_libcufile.c`.

    python -m tests.cuda.on_fake_driver NAME ...    prints one line of JSON for each: [name, "" or what went wrong]
"""

from __future__ import annotations

import ctypes
import faulthandler
import json
import os
import resource
import sys
import tempfile
import threading
import time
import traceback
import weakref
from concurrent.futures import CancelledError, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, overload

import kvikio.defaults
import numpy as np

import gpuload.backends.cuda.kvikio as kvikio_module
from gpuload.backends.cuda.kvikio import KvikioReader
from gpuload.backends.cuda.pinned import BUFFER_NBYTES, PinnedReader
from gpuload.backends.cuda.readers import PAGE, file_ends, place_extents
from gpuload.errors import DeviceError, ReadError
from gpuload.folder_source import FolderSource
from gpuload.remote import Patience
from gpuload.source import BufferSource, FileSource

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from numpy.typing import NDArray


THRESHOLD = 16 << 10
"""Below this, KvikIO reads at once, on the calling thread."""

TASK_NBYTES = 64 << 10
UNTOUCHED = 0xEE

driver = ctypes.CDLL("libcuda.so.1")
driver.fake_alloc.restype = ctypes.c_uint64
driver.fake_alloc.argtypes = [ctypes.c_size_t]
driver.fake_free.argtypes = [ctypes.c_uint64]
driver.fake_download.argtypes = [ctypes.c_uint64, ctypes.c_void_p, ctypes.c_size_t]
driver.fake_n_copies.restype = ctypes.c_int64
driver.cuMemcpyHtoDAsync_v2.argtypes = [ctypes.c_uint64, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p]
driver.cuStreamSynchronize.argtypes = [ctypes.c_void_p]


class Arena:
    """Device memory, or a part of it, as any library exports it."""

    def __init__(self, nbytes: int, address: int = 0) -> None:
        self.is_whole = not address
        self.address = address or driver.fake_alloc(nbytes)
        self.nbytes = nbytes
        self.shape = (nbytes,)

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        return {"shape": self.shape, "typestr": "|u1", "data": (self.address, False), "version": 3}

    def __getitem__(self, part: slice) -> Arena:
        lo, hi, _ = part.indices(self.nbytes)
        return Arena(hi - lo, self.address + lo)

    def download(self) -> NDArray[np.uint8]:
        host = np.empty(self.nbytes, dtype=np.uint8)
        driver.fake_download(self.address, host.ctypes.data, self.nbytes)
        return host

    def __del__(self) -> None:
        if self.is_whole:
            driver.fake_free(self.address)


class Device:
    """The parts of a device that readers use, from the fake driver; an event that is new for a record is its stream."""

    staging_calls = tuple(
        ctypes.cast(function, ctypes.c_void_p).value
        for function in (driver.cuMemcpyHtoDAsync_v2, driver.cuEventRecord, driver.cuEventSynchronize)
    )

    def __init__(self) -> None:
        handle = ctypes.c_void_p()
        driver.cuStreamCreate(ctypes.byref(handle), 1)
        self.stream = handle.value
        self.before_wait: Callable[[], object] = lambda: None
        self.buffers: list[weakref.ref[NDArray[np.uint8]]] = []

    def use(self) -> None:
        pass

    def address(self, array: Arena) -> int:
        return array.address

    def pinned(self, nbytes: int) -> NDArray[np.uint8]:
        buffer = np.empty(nbytes, dtype=np.uint8)
        self.buffers.append(weakref.ref(buffer))
        return buffer

    def upload(self, host: NDArray[np.uint8], out: Arena, stream: int) -> None:
        assert host.nbytes == out.nbytes
        assert driver.cuMemcpyHtoDAsync_v2(out.address, host.ctypes.data, host.nbytes, stream) == 0

    def event(self) -> ctypes.c_void_p:
        handle = ctypes.c_void_p()
        assert driver.cuEventCreate(ctypes.byref(handle), 0) == 0
        return handle

    def event_number(self, event: ctypes.c_void_p) -> int:
        return event.value or 0

    def stream_number(self, stream: int) -> int:
        return stream

    def check_call(self, code: int) -> None:
        assert code == 0

    @overload
    def record(self, stream: int) -> int: ...
    @overload
    def record(self, stream: int, event: ctypes.c_void_p) -> ctypes.c_void_p: ...
    def record(self, stream: int, event: ctypes.c_void_p | None = None) -> int | ctypes.c_void_p:
        if event is None:
            return stream
        assert driver.cuEventRecord(event, ctypes.c_void_p(stream)) == 0
        return event

    def wait(self, event: int | ctypes.c_void_p) -> None:
        self.before_wait()
        if isinstance(event, int):
            driver.cuStreamSynchronize(event)
        else:
            driver.cuEventSynchronize(event)


class File:
    """A file of random bytes, open as a source."""

    def __init__(self, nbytes: int, seed: int = 0) -> None:
        self.folder = tempfile.TemporaryDirectory()
        self.path = Path(self.folder.name, "cells.h5ad")
        self.data = np.random.default_rng(seed).integers(0, 256, nbytes, dtype=np.uint8)
        self.data.tofile(self.path)
        self.source = FileSource(self.path)


def drawn_extents(rng: np.random.Generator, file_nbytes: int, n: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return overlapping, unaligned extents of all sizes that KvikIO treats differently."""
    most = np.array([1, 100, PAGE, THRESHOLD, THRESHOLD + PAGE, TASK_NBYTES, TASK_NBYTES + 1, 5 * TASK_NBYTES])
    nbytes = rng.integers(1, rng.choice(most, n) + 1)
    nbytes[rng.random(n) < 0.1] = 0
    offset = rng.integers(0, file_nbytes - nbytes + 1)
    to_end = rng.random(n) < 0.2
    offset[to_end] = file_nbytes - nbytes[to_end]
    on_page = rng.random(n) < 0.2
    offset[on_page] -= offset[on_page] % PAGE
    return offset, nbytes


def check_bytes(file: File, offset: Any, nbytes: Any, place: Any, out: Arena) -> None:
    """Compare every extent, and the memory outside the pages that they touch."""
    got = out.download()
    is_free = np.ones(got.size, dtype=bool)
    for at, n, to in zip(offset, nbytes, place, strict=True):
        np.testing.assert_array_equal(got[to : to + n], file.data[at : at + n], err_msg=f"{n} bytes at {at} -> {to}")
        first = to - at % PAGE
        is_free[first : first - (-(at % PAGE + n) // PAGE) * PAGE] = False
    assert (got[is_free] == UNTOUCHED).all(), "memory outside the extents' pages was written"


def read_at_random(reader: Any, device: Device, file: File, seed: int, n_threads: int = 3) -> int:
    """Read drawn extents by several starts at a time, check them and their number of bytes, and return that."""
    rng = np.random.default_rng(seed)
    driver.fake_set_delay_us(int(rng.choice([0, 0, 50])))

    def one(number: int) -> int:
        mine = np.random.default_rng([seed, number])
        offset, nbytes = drawn_extents(mine, file.data.size, int(mine.integers(0, 60)))
        _, _, place, total = place_extents(offset, nbytes, file.data.size)
        shift = int(mine.choice([0, PAGE, 3 * PAGE + 7]))
        order = mine.permutation(offset.size)
        out = Arena(total + shift + 5000)
        read = reader.start(
            file.source, offset[order], nbytes[order], place[order] + shift, out, device.stream, name="/X/data"
        )
        read.result()
        assert read.done()
        driver.cuStreamSynchronize(device.stream)
        check_bytes(file, offset, nbytes, place + shift, out)
        return int((nbytes if reader.io_mode == "pinned" else place_extents(offset, nbytes, file.data.size)[1]).sum())

    before = reader.read_nbytes
    try:
        with ThreadPoolExecutor(n_threads) as threads:
            wanted = sum(threads.map(one, range(n_threads)))
        assert reader.read_nbytes - before == wanted, (reader.read_nbytes - before, wanted)
        return wanted
    finally:
        driver.fake_set_delay_us(0)


def n_threads() -> int:
    return len(os.listdir("/proc/self/task"))


def n_descriptors() -> int:
    return len(os.listdir("/proc/self/fd")) - 1


def eventually(is_true: Callable[[], bool]) -> bool:
    """Return whether something becomes true within some seconds: native threads end a little later than they report."""
    end = time.monotonic() + 5
    while not is_true() and time.monotonic() < end:
        time.sleep(0.005)
    return is_true()


def read_error_of(read: Callable[[], object]) -> str:
    try:
        read()
    except ReadError as error:
        return str(error)
    raise AssertionError("no ReadError")


# --- what is tested


def random_extents_are_byte_exact() -> None:
    device, file = Device(), File(3_000_017)
    reader = KvikioReader(device, num_threads=3, task_nbytes=TASK_NBYTES)
    total = sum(read_at_random(reader, device, file, seed) for seed in range(12))
    assert total > 5_000_000
    assert eventually(lambda: reader.facts()["compat_nbytes"] == total), (reader.facts(), total)
    assert reader.facts()["gds_nbytes"] == 0
    assert reader.io_mode == "compat"
    reader.close()
    assert reader.io_mode == "compat"


def files_of_a_folder_are_byte_exact_and_few_are_open() -> None:
    """Chunk files of a store: every read ends at its own file's end, and those used longest ago are closed."""
    device, rng = Device(), np.random.default_rng(5)
    folder = Path(tempfile.mkdtemp())
    sizes = rng.integers(1, 60_000, 40)
    sizes[:4] = PAGE, 3 * PAGE, 1, 2 * PAGE - 1
    data = [rng.integers(0, 256, n, dtype=np.uint8) for n in sizes]
    for number, values in enumerate(data):
        values.tofile(folder / str(number))
    stamps = np.array([(folder / str(n)).stat().st_mtime_ns for n in range(40)])
    kvikio_module.MAX_FILES = 5
    for reader in (
        KvikioReader(device, num_threads=3, task_nbytes=TASK_NBYTES),
        PinnedReader(device, num_threads=2, buffer_nbytes=10_000),
        PinnedReader(device, num_threads=1, buffer_nbytes=10_000),  # more files than it may hold open: not natively
    ):
        source = FolderSource(str(folder), [str(n) for n in range(40)], sizes, stamps)
        for _ in range(6):
            number = np.sort(rng.integers(0, 40, 60))
            nbytes = np.array([rng.integers(1, sizes[n] + 1) for n in number])
            at = np.array([rng.integers(0, sizes[n] - k + 1) for n, k in zip(number, nbytes, strict=True)])
            offset = source.base[number] + at
            _, read_nbytes, place, total = place_extents(offset, nbytes, file_ends(source, offset))
            assert (at - at % PAGE + read_nbytes <= sizes[number]).all()
            out = Arena(total)
            reader.start(source, offset, nbytes, place, out, device.stream, name="/X/data").result()
            driver.cuStreamSynchronize(device.stream)
            got = out.download()
            for n, start, k, to in zip(number, at, nbytes, place, strict=True):
                np.testing.assert_array_equal(got[to : to + k], data[n][start : start + k])
        if isinstance(reader, KvikioReader):
            assert len(reader._files._open) <= 5 + 2 * 3 + 2, len(reader._files._open)
            os.truncate(folder / "7", sizes[7] // 2)
            offset, nbytes = np.array([source.base[7]]), np.array([sizes[7]])
            _, _, place, total = place_extents(offset, nbytes, file_ends(source, offset))
            source.check_file = lambda *_: None
            read = reader.start(source, offset, nbytes, place, Arena(total), device.stream, name="/X/data")
            message = read_error_of(read.result)
            assert message.startswith(f"{folder / '7'}: short read of /X/data at byte 0: wanted {sizes[7]}"), message
            data[7].tofile(folder / "7")
            stamps[7] = (folder / "7").stat().st_mtime_ns
        reader.close()
        source.close()


def pinned_reads_are_byte_exact_too() -> None:
    device, file = Device(), File(3_000_017)
    reader = PinnedReader(device, num_threads=2, buffer_nbytes=100_000)
    for seed in range(8):
        read_at_random(reader, device, file, seed)
    assert len(device.buffers) <= 4
    reader.close()
    assert not any(buffer() is not None for buffer in device.buffers)


def the_mode_is_compat_before_anything_is_read() -> None:
    reader = KvikioReader(Device(), num_threads=np.int64(8))  # type: ignore[arg-type]
    assert reader.io_mode == "compat"
    facts = reader.facts()
    assert facts["num_threads"] == 8
    assert facts["prefers_compat"] or os.access("/run/udev", os.R_OK), facts
    assert facts["compat_mode"] == "AUTO", facts
    assert facts["compat_nbytes"] == facts["gds_nbytes"] == 0
    reader.close()


def a_truncated_file_is_a_read_error_and_nothing_is_written_after_it() -> None:
    device, file = Device(), File(1_500_000)
    reader = KvikioReader(device, num_threads=4, task_nbytes=TASK_NBYTES)
    offset = np.array([0, 1_000_001, 400_000, 1_200_000], dtype=np.int64)
    nbytes = np.array([500_000, 123_456, 500_000, 5], dtype=np.int64)
    _, _, place, total = place_extents(offset, nbytes, file.data.size)
    os.truncate(file.path, 1_050_000)
    driver.fake_set_delay_us(20_000)
    out = Arena(total)
    read = reader.start(file.source, offset, nbytes, place, out, device.stream, name="/X/data")
    message = read_error_of(read.result)
    assert read.done()
    n_copies = driver.fake_n_copies()
    assert message == (
        f"{file.path}: short read of /X/data at byte 1000001: wanted 123456 bytes, got 49999. Was the file truncated?"
    ), message
    time.sleep(0.1)
    assert driver.fake_n_copies() == n_copies, "copies went on after the read had ended"
    driver.fake_set_delay_us(0)
    good = slice(0, 1)  # what is left can be read
    reader.start(file.source, offset[good], nbytes[good], place[good], out, device.stream).result()
    np.testing.assert_array_equal(out.download()[:500_000], file.data[:500_000])
    small = (
        np.array([1_049_990], dtype=np.int64),
        np.array([11], dtype=np.int64),
        np.array([place[0] + 1_049_990 % PAGE]),
    )
    message = read_error_of(reader.start(file.source, *small, out, device.stream).result)
    assert message.endswith("at byte 1049990: wanted 11 bytes, got 10. Was the file truncated?"), message
    there = np.array([1_049_000], dtype=np.int64), np.array([500], dtype=np.int64), np.array([1_049_000 % PAGE])
    message = read_error_of(reader.start(file.source, *there, out, device.stream).result)  # but not their whole page
    assert message.endswith("at byte 1048576: wanted 4096 bytes, got 1424. Was the file truncated?"), message
    reader.close()


def kvikio_read_errors_are_reported_in_its_words() -> None:
    device, file = Device(), File(200_000)
    reader = KvikioReader(device)
    extent = np.array([4096], dtype=np.int64), np.array([100_000], dtype=np.int64), np.array([0], dtype=np.int64)
    out = Arena(60_000)
    short = Arena(200_000, out.address)  # claims more than it has
    message = read_error_of(reader.start(file.source, *extent, short, device.stream, name="/X/data").result)
    begin = f"{file.path}: reading 100000 bytes of /X/data at byte 4096 through KvikIO failed: "
    assert message.startswith(begin), message
    assert "hpp" not in message, message
    reader.close()


def a_file_that_kvikio_cannot_open_is_reported() -> None:
    device, file = Device(), File(200_000)
    reader = KvikioReader(device)
    extent = np.array([0]), np.array([100_000]), np.array([0])
    out = Arena(102_400)
    limits, real = resource.getrlimit(resource.RLIMIT_NOFILE), reader._files._open_file

    def with_no_descriptor_left(path: str) -> Any:
        resource.setrlimit(resource.RLIMIT_NOFILE, (n_descriptors(), limits[1]))
        try:
            return real(path)
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, limits)

    reader._files._open_file = with_no_descriptor_left
    message = read_error_of(reader.start(file.source, *extent, out, device.stream).result)
    reader._files._open_file = real
    assert message.startswith(f"{file.path}: KvikIO cannot open it: "), message
    assert message.endswith(". Use io='pinned'."), message
    assert "open files" in message, message
    reader.start(file.source, *extent, out, device.stream).result()
    reader.close()


def a_read_waits_for_earlier_work_on_its_stream() -> None:
    device, file = Device(), File(300_000)
    reader = KvikioReader(device)
    is_past = threading.Event()
    device.before_wait = is_past.wait
    n_copies = driver.fake_n_copies()
    extents = np.array([0, 100_000]), np.array([5_000, 100_000]), np.array([0, 100_000 % PAGE + 2 * PAGE])
    read = reader.start(file.source, *extents, Arena(300_000), device.stream)
    time.sleep(0.2)
    assert driver.fake_n_copies() == n_copies
    assert not read.done()
    is_past.set()
    read.result()
    assert driver.fake_n_copies() > n_copies
    reader.close()


def a_cancelled_read_ends_soon_and_writes_no_more() -> None:
    device, file = Device(), File(8_000_000)
    reader = KvikioReader(device, num_threads=2, task_nbytes=PAGE * 4)
    driver.fake_set_delay_us(5_000)
    n_copies = driver.fake_n_copies()
    whole = np.array([0]), np.array([8_000_000]), np.array([0])
    outs = [Arena(8_001_536) for _ in range(3)]
    reads = [reader.start(file.source, *whole, out, device.stream, name="/X/data") for out in outs]
    assert eventually(lambda: driver.fake_n_copies() >= n_copies + 4)
    for read in reversed(reads):
        read.cancel()
    for read in reads:
        try:
            read.result()
        except CancelledError:
            assert read.done()
        else:
            raise AssertionError("a cancelled read completed")
    n_copies = driver.fake_n_copies()
    is_written = [bool((out.download() != UNTOUCHED).any()) for out in outs]
    assert is_written[0]
    assert not is_written[2]
    assert 0 < reader.read_nbytes < 4_000_000, reader.read_nbytes
    time.sleep(0.05)
    assert driver.fake_n_copies() == n_copies
    driver.fake_set_delay_us(0)
    reader.start(file.source, *whole, Arena(8_001_536), device.stream).result()
    reader.close()


def closing_releases_threads_and_descriptors() -> None:
    device, file, other = Device(), File(1_000_000), File(500_000, seed=1)
    KvikioReader(device).close()
    before = kvikio.defaults.get("num_threads"), n_threads(), n_descriptors()
    for number in range(3):
        reader = KvikioReader(device, num_threads=5, task_nbytes=TASK_NBYTES)
        for each in (file, other, file):
            read_at_random(reader, device, each, number)
        assert n_descriptors() <= before[2] + 4, "a file is opened more than once"
        assert n_threads() >= before[1] + 4
        reader.close()
        reader.close()
        assert eventually(lambda: n_threads() <= before[1]), (before, n_threads())
        assert n_descriptors() == before[2], (before, n_descriptors())
        assert kvikio.defaults.get("num_threads") == before[0]
    extent = np.array([0]), np.array([10]), np.array([0])
    message = read_error_of(lambda: reader.start(file.source, *extent, Arena(PAGE), device.stream))
    assert message == f"{file.path}: the loader was closed; open it again with open_loader().", message


def closing_waits_for_reads_in_progress() -> None:
    device, file = Device(), File(2_000_000)
    reader = KvikioReader(device, num_threads=2, task_nbytes=TASK_NBYTES)
    driver.fake_set_delay_us(3_000)
    out = Arena(2_000_896)
    read = reader.start(file.source, np.array([0]), np.array([2_000_000]), np.array([0]), out, device.stream)
    while not driver.fake_n_copies():
        time.sleep(0.001)
    reader.close()
    assert read.done()
    read.result()
    driver.fake_set_delay_us(0)
    np.testing.assert_array_equal(out.download()[:2_000_000], file.data)


def a_reader_closed_by_its_own_thread_closes_itself_later() -> None:
    device, file = Device(), File(1_000_000)
    KvikioReader(device).close()
    before = n_threads(), n_descriptors()
    reader = KvikioReader(device, num_threads=2)
    device.before_wait = reader.close  # the garbage collector may run in any thread
    read = reader.start(file.source, np.array([0]), np.array([900_000]), np.array([0]), Arena(901_120), device.stream)
    read.result()
    assert eventually(lambda: n_threads() <= before[0] and n_descriptors() == before[1]), (n_threads(), before)


def readers_share_the_pool_of_the_process() -> None:
    device, file = Device(), File(3_000_017)
    before = kvikio.defaults.get("num_threads")
    first = KvikioReader(device, num_threads=3, task_nbytes=TASK_NBYTES)
    errors = []

    def read() -> None:
        try:
            for seed in range(6):
                read_at_random(first, device, file, 100 + seed)
        except BaseException:
            errors.append(traceback.format_exc())

    thread = threading.Thread(target=read)
    thread.start()
    while thread.is_alive():  # the pool grows and shrinks below the first one's reads
        second = KvikioReader(device, num_threads=6)
        assert kvikio.defaults.get("num_threads") == 6
        second.close()
        assert kvikio.defaults.get("num_threads") == 3
    thread.join()
    assert not errors, errors[0]
    first.close()
    assert kvikio.defaults.get("num_threads") == before


def the_bytes_are_those_of_the_file_that_was_opened() -> None:
    device, file = Device(), File(300_000)
    reader = KvikioReader(device)
    new = file.path.with_suffix(".new")
    new.write_bytes(bytes(300_000))
    new.rename(file.path)
    out = Arena(300_000 // PAGE * PAGE + PAGE)
    reader.start(file.source, np.array([0]), np.array([300_000]), np.array([0]), out, device.stream).result()
    np.testing.assert_array_equal(out.download()[:300_000], file.data)
    reader.close()


def memory_sources_go_through_pinned_memory() -> None:
    device = Device()
    data = np.random.default_rng(3).integers(0, 256, 3_000_000, dtype=np.uint8)
    source = BufferSource("memory", data)
    reader = KvikioReader(device)
    offset, nbytes = np.array([7, 0, 2_999_990]), np.array([5_000, 2_500_000, 10])
    _, _, place, total = place_extents(offset, nbytes, data.size)
    out = Arena(total)
    reader.start(source, offset, nbytes, place, out, device.stream).result()
    driver.cuStreamSynchronize(device.stream)
    got = out.download()
    for at, n, to in zip(offset, nbytes, place, strict=True):
        np.testing.assert_array_equal(got[to : to + n], data[at : at + n])
    assert reader.io_mode == "pinned", reader.io_mode
    message = read_error_of(reader.start(source, offset, nbytes + 1, place, out, device.stream, name="/obsm").result)
    assert message == (
        "memory: short read of /obsm at byte 2999990: wanted 11 bytes, got 10. Was the file truncated?"
    ), message
    reader.close()


def places_without_room_are_refused() -> None:
    device, file = Device(), File(100_000)
    reader = KvikioReader(device)
    extent = np.array([5_000]), np.array([100])
    for place, room in ((0, 20_000), (904, 4_096 - 1), (5_000, 5_000 + 3_191)):
        try:
            reader.start(file.source, *extent, np.array([place]), Arena(room), device.stream)
        except ValueError:
            pass
        else:
            raise AssertionError(f"place {place} of {room}")
    twice = np.array([0, PAGE]), np.array([10, 10])
    try:
        reader.start(file.source, *twice, np.array([0, PAGE - 1]), Arena(20_000), device.stream)
    except ValueError:
        pass
    else:
        raise AssertionError("overlap")
    reader.start(file.source, *extent, np.array([904]), Arena(4_096), device.stream).result()
    reader.close()


def a_fork_is_refused_and_its_parent_continues() -> None:
    device, file = Device(), File(100_000)
    reader = KvikioReader(device)
    extent = np.array([0]), np.array([50_000]), np.array([0])
    out = Arena(53_248)
    reader.start(file.source, *extent, out, device.stream).result()
    child = os.fork()
    if not child:
        code = 1
        try:
            reader.start(file.source, *extent, out, device.stream)
        except DeviceError as error:
            code = 0 if "spawn" in str(error) and str(os.getpid()) in str(error) else 2
        reader.close()
        os._exit(code)
    assert os.waitpid(child, 0)[1] == 0
    reader.start(file.source, *extent, out, device.stream).result()
    reader.close()


# --- with cuFile


def direct_transfers_are_of_whole_pages() -> None:
    cufile = ctypes.CDLL("libcufile.so.0")
    device, file = Device(), File(3_000_017)
    reader = KvikioReader(device, num_threads=3, task_nbytes=TASK_NBYTES)
    assert reader.io_mode == "compat"
    for seed in range(8):
        rng = np.random.default_rng(seed)
        offset, nbytes = drawn_extents(rng, file.data.size, 40)
        nbytes[:5] = np.minimum(5 * TASK_NBYTES, file.data.size - offset[:5])
        _, _, place, total = place_extents(offset, nbytes, file.data.size)
        out = Arena(total)
        reader.start(file.source, offset, nbytes, place, out, device.stream).result()
        check_bytes(file, offset, nbytes, place, out)
    reads = np.empty((4096, 3), dtype=np.int64)
    reads = reads[: cufile.fake_cufile_reads(reads.ctypes.data_as(ctypes.c_void_p), 4096)]
    assert len(reads) > 100
    at, n, to = reads.T
    assert not (at % PAGE).any()
    assert not (to % PAGE).any()
    assert not (n[at + n != file.data.size] % PAGE).any()
    assert (at + n).max() == file.data.size
    assert n.max() <= TASK_NBYTES
    assert cufile.fake_cufile_n_handles() == 1
    assert eventually(lambda: reader.facts()["gds_nbytes"] == n.sum())
    assert reader.io_mode == "gds"
    assert reader.facts()["has_nvidia_fs"]
    reader.close()
    assert cufile.fake_cufile_n_handles() == 0


def a_short_direct_transfer_is_a_read_error() -> None:
    device, file = Device(), File(1_500_000)
    reader = KvikioReader(device, task_nbytes=TASK_NBYTES)
    extent = np.array([100, 1_000_000]), np.array([300_000, 40_000])
    _, _, place, total = place_extents(*extent, 1_500_000)
    os.truncate(file.path, 1_020_000)  # in the middle of one transfer, which then tells fewer bytes and no error
    message = read_error_of(reader.start(file.source, *extent, place, Arena(total), device.stream, name="/X").result)
    assert message == (
        f"{file.path}: short read of /X at byte 1000000: wanted 40000 bytes, got 20000. Was the file truncated?"
    ), message
    reader.close()


def gds_is_reported_only_if_bytes_went_through_it() -> None:
    reader = KvikioReader(Device())
    facts: dict[str, bool] = {}
    counted = (0, 0)
    reader._counted = lambda: counted  # type: ignore[method-assign]
    reader._driver_says = facts.__getitem__  # type: ignore[method-assign]
    for counted, has_driver, may_bounce, wanted in (
        ((0, 0), True, False, "compat"),
        ((0, 100), True, False, "compat"),
        ((10, 100), True, False, "compat"),
        ((100, 10), True, True, "gds"),
        ((100, 10), True, False, "gds"),
        ((100, 10), False, False, "gds"),
        ((100, 10), False, True, "compat"),
    ):
        facts.update(is_gds_available=has_driver, allow_compat_mode=may_bounce)
        assert reader.io_mode == wanted, (counted, facts)
    reader.close()


@contextmanager
def object_store(nbytes: int = 600_000, n: int = 2, key: str = "", **options: Any) -> Iterator[Any]:
    """Give a source over objects of the store that fails on demand, their bytes, the server, and a reader."""
    from benchmarks.s3server import start
    from gpuload.remote import ObjectRemote
    from gpuload.remote.source import RemoteSource

    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        (root / "data" / "some").mkdir(parents=True)
        data = [np.random.default_rng(k).integers(0, 256, nbytes + k, dtype=np.uint8) for k in range(n)]
        for k, values in enumerate(data):
            values.tofile(root / "data" / "some" / f"{key}{k}")
        with start(root) as server:
            keys = {"access_key_id": "a", "secret_access_key": "b"} if "anonymous" not in options else {}
            settings = {"endpoint": server.url, "region": "us-east-1", **keys, **options}
            remote = ObjectRemote("s3://data/some", **settings)
            found = [remote.head(f"{key}{k}") for k in range(n)]
            source = RemoteSource("s3://data/some", remote, [o for o in found if o is not None])
            device = Device()
            reader = KvikioReader(device, num_threads=2, task_nbytes=TASK_NBYTES, remote=True)
            patience = Patience(tries=6, first_wait_s=0.001, longest_wait_s=0.01)
            reader._far._patience = source.requests._patience = patience  # type: ignore[union-attr]
            try:
                yield source, data, server, reader, device
            finally:
                reader.close()
                source.close()


def read_objects(
    source: Any, data: Any, reader: Any, device: Device, seed: int = 0, n: int = 30, *, room: int = 7
) -> None:
    """Read extents of all sizes of all objects, and compare them and, where there is room, what lies between."""
    rng = np.random.default_rng(seed)
    number = np.sort(rng.integers(0, len(data), n))
    at, nbytes = drawn_extents(rng, data[0].size, n)
    offset = source.base[number] + at
    place = np.cumsum(nbytes + room) - nbytes - room
    out = Arena(int((nbytes + room).sum()))
    untouched = np.full(out.nbytes, UNTOUCHED, dtype=np.uint8)
    assert driver.cuMemcpyHtoDAsync_v2(out.address, untouched.ctypes.data, out.nbytes, device.stream) == 0
    reader.start(source, offset, nbytes, place, out, device.stream, name="/X/data").result()
    assert driver.cuStreamSynchronize(device.stream) == 0
    got, wanted = out.download(), untouched
    for k, start, size, to in zip(number, at, nbytes, place, strict=True):
        wanted[to : to + size] = data[k][start : start + size]
    np.testing.assert_array_equal(got, wanted)


def objects_are_byte_exact() -> None:
    for options in ({}, {"anonymous": True}):
        with object_store(**options) as (source, data, server, reader, device):
            assert reader.io_mode == "compat"
            for seed in range(4):
                read_objects(source, data, reader, device, seed)
            assert reader.io_mode == "remote"
            assert reader._pinned.read_nbytes == 0
            assert kvikio.defaults.get("num_threads") >= 64
            server.set(latency_ms=30)
            read_objects(source, data, reader, device, n=100)
            assert server.counts()["most_in_flight"] > 20


def refused_object_reads_are_retried() -> None:
    with object_store() as (source, data, server, reader, device):
        kvikio.defaults.set("http_max_attempts", 1)
        try:
            server.set(p_503=0.1, p_reset=0.1, p_truncate=0.2, most_in_a_row=2, seed=1)
            read_objects(source, data, reader, device, seed=5)
        finally:
            kvikio.defaults.set("http_max_attempts", 3)
        faults = {kind: n for kind, n in server.counts().items() if kind.startswith("fault")}
        assert len(faults) == 3, faults


def lasting_store_failures_are_read_errors() -> None:
    with object_store(n=1) as (source, data, server, reader, device):
        kvikio.defaults.set("http_max_attempts", 1)
        try:
            for knobs, words in (({"p_truncate": 1}, "bytes missing"), ({"p_truncate": 0, "p_reset": 0.9}, "reset")):
                server.set(**knobs, seed=3)
                told = read_error_of(lambda: read_objects(source, data, reader, device))
                assert told.startswith("s3://data/some/0: "), told
                assert words in told, told
                assert " bytes of /X/data at byte " in told, told
                assert told.endswith(". Use io='pinned'."), told
        finally:
            kvikio.defaults.set("http_max_attempts", 3)
        server.set(p_truncate=0, p_reset=0)
        read_objects(source, data, reader, device)
        one = np.array([source.nbytes - 5], dtype=np.int64), np.array([10], dtype=np.int64), np.zeros(1, dtype=np.int64)
        told = read_error_of(lambda: reader.start(source, *one, Arena(10), device.stream).result())
        assert "are wanted, but it has 600000" in told, told


def changed_or_deleted_objects_are_read_errors() -> None:
    with object_store() as (source, data, server, reader, device):
        path = server.root / "data" / "some" / "1"
        whole = path.read_bytes()
        for change, words in (
            (lambda: path.write_bytes(whole[::-1]), "s3://data/some/1: the object was changed since it was listed"),
            (lambda: path.write_bytes(whole[:1000]), "s3://data/some/1: the object was changed since it was listed"),
            (path.unlink, "s3://data/some/1: no such object"),
        ):
            change()
            told = read_error_of(lambda: read_objects(source, data, reader, device))
            assert words in told, told
        path.write_bytes(whole)
        read_objects(source, data, reader, device)


def memory_sources_are_read_by_several_threads() -> None:
    """Otherwise a remote source would be read one piece after the other."""
    device, data = Device(), np.zeros(2 * BUFFER_NBYTES, dtype=np.uint8)
    both = threading.Barrier(2, timeout=20)

    class Slow(BufferSource):
        def read_into(self, buffer: NDArray[np.uint8], offset: int) -> int:
            both.wait()
            return super().read_into(buffer, offset)

    reader, where = KvikioReader(device), np.array([0])
    out = Arena(data.size)
    reader.start(Slow("slow", data), where, np.array([data.size]), where, out, device.stream).result()
    driver.cuStreamSynchronize(device.stream)
    reader.close()


def objects_kvikio_cannot_reach_go_through_pinned_memory() -> None:
    with object_store(key="with space ") as (source, data, _, reader, device):
        assert source.reach(0) is None
        read_objects(source, data, reader, device, room=0)
        assert reader.io_mode == "pinned"


def partly_unreachable_objects_are_reported() -> None:
    from gpuload.remote.source import RemoteSource

    with object_store() as (source, _, server, reader, device):
        np.zeros(1000, dtype=np.uint8).tofile(server.root / "data" / "some" / "with space")
        whole = [source.objects[0], source.remote.head("with space")]
        mixed = RemoteSource("s3://data/some", source.remote, whole)
        one = mixed.base[1:], np.array([1000]), np.array([0])
        told = read_error_of(lambda: reader.start(mixed, *one, Arena(1000), device.stream).result())
        assert told == "s3://data/some: KvikIO cannot reach all of its objects; use io='pinned'.", told
        mixed.close()


def a_read_of_objects_that_is_cancelled_writes_no_more() -> None:
    with object_store(nbytes=4_000_000, n=1) as (source, _, server, reader, device):
        server.set(latency_ms=50)
        n = 3_900_000
        out = Arena(n)
        where = np.zeros(1, dtype=np.int64), np.array([n], dtype=np.int64), np.zeros(1, dtype=np.int64)
        pending = reader.start(source, *where, out, device.stream)
        pending.cancel()
        assert eventually(pending.done)
        before = out.download()
        time.sleep(0.2)
        np.testing.assert_array_equal(out.download(), before)


COMPAT = (
    random_extents_are_byte_exact,
    files_of_a_folder_are_byte_exact_and_few_are_open,
    pinned_reads_are_byte_exact_too,
    the_mode_is_compat_before_anything_is_read,
    a_truncated_file_is_a_read_error_and_nothing_is_written_after_it,
    kvikio_read_errors_are_reported_in_its_words,
    a_file_that_kvikio_cannot_open_is_reported,
    a_read_waits_for_earlier_work_on_its_stream,
    a_cancelled_read_ends_soon_and_writes_no_more,
    closing_releases_threads_and_descriptors,
    closing_waits_for_reads_in_progress,
    a_reader_closed_by_its_own_thread_closes_itself_later,
    readers_share_the_pool_of_the_process,
    the_bytes_are_those_of_the_file_that_was_opened,
    memory_sources_go_through_pinned_memory,
    memory_sources_are_read_by_several_threads,
    places_without_room_are_refused,
    gds_is_reported_only_if_bytes_went_through_it,
    objects_are_byte_exact,
    refused_object_reads_are_retried,
    lasting_store_failures_are_read_errors,
    changed_or_deleted_objects_are_read_errors,
    objects_kvikio_cannot_reach_go_through_pinned_memory,
    partly_unreachable_objects_are_reported,
    a_read_of_objects_that_is_cancelled_writes_no_more,
    a_fork_is_refused_and_its_parent_continues,
)
DIRECT = (direct_transfers_are_of_whole_pages, a_short_direct_transfer_is_a_read_error)


def run(names: list[str]) -> Iterator[tuple[str, str]]:
    bodies = {body.__name__: body for body in (*COMPAT, *DIRECT)}
    for name in names:
        try:
            bodies[name]()
        except BaseException:
            yield name, traceback.format_exc()
        else:
            yield name, ""


if __name__ == "__main__":
    faulthandler.enable()
    for outcome in run(sys.argv[1:]):
        print(json.dumps(outcome), flush=True)
