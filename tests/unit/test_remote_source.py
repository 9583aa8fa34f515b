"""Ranges of objects by concurrent requests: what is requested, how often, and which error is raised in the end."""

from __future__ import annotations

import gc
import io
import threading
import time
import weakref
from contextlib import closing, suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import h5py
import numpy as np
import pytest

from gpuload.backends import reading
from gpuload.backends.reading import read_each
from gpuload.errors import BusyError, PlanError, ReadError
from gpuload.remote import Patience, RemoteObject
from gpuload.remote import file as remote_file
from gpuload.remote import source as remote_source
from gpuload.remote.file import MissingError, RemoteFile
from gpuload.remote.object_store import aws_profile
from gpuload.remote.source import RemoteSource, Requests, _Piece
from tests.forks import status_of_fork

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

DATA = np.random.default_rng(0).bytes(1_000_000)


class FakeRemote:
    """Objects in memory; `meet` may raise, wait or change what is returned."""

    name = "fake://bucket"

    def __init__(self, objects: dict[str, bytes], meet: Callable[[int, bytes], bytes] | None = None) -> None:
        self.objects = objects
        self.meet = meet
        self.asked: list[tuple[str, int, int]] = []
        self.n_now = self.most_at_once = 0
        self.lock = threading.Lock()

    def list(self) -> Iterator[RemoteObject]:
        return (RemoteObject(key, len(data), "1") for key, data in self.objects.items())

    def head(self, key: str) -> RemoteObject | None:
        return RemoteObject(key, len(self.objects[key]), "1") if key in self.objects else None

    def get(self, wanted: RemoteObject, start: int, stop: int) -> Any:
        with self.lock:
            self.asked.append((wanted.key, start, stop))
            number = len(self.asked)
            self.n_now += 1
            self.most_at_once = max(self.most_at_once, self.n_now)
        try:
            data = self.objects[wanted.key][start:stop]
            return data if self.meet is None else self.meet(number, data)
        finally:
            with self.lock:
                self.n_now -= 1


def source_of(remote: FakeRemote) -> RemoteSource:
    return RemoteSource("fake://bucket", remote, list(remote.list()))


def read(source: RemoteSource, offset: list[int], nbytes: list[int]) -> list[bytes]:
    starts, sizes = np.array(offset, dtype=np.int64), np.array(nbytes, dtype=np.int64)
    place = np.cumsum(sizes) - sizes
    buffer = np.zeros(int(sizes.sum()), dtype=np.uint8)
    source.read_many(starts, sizes, place, buffer)
    return [buffer[p : p + n].tobytes() for p, n in zip(place, sizes, strict=True)]


@pytest.mark.parametrize("n_threads", [0, 1])
def test_reading_needs_one_thread(n_threads: int, allow_threads: Callable[[int], None], no_leaks: None) -> None:
    source = source_of(FakeRemote({"a": DATA[:1000]}))
    allow_threads(n_threads)
    if n_threads:
        assert read(source, [0, 500], [10, 20]) == [DATA[:10], DATA[500:520]]
    else:
        with pytest.raises(RuntimeError, match="can't start new thread"):
            read(source, [0, 500], [10, 20])
    source.close()


def test_ranges_of_several_objects_are_read(no_leaks: None) -> None:
    remote = FakeRemote({"a": DATA[:1000], "b": DATA[1000:5000], "c": b""})
    source = source_of(remote)
    a, b, _ = source.base.tolist()
    assert read(source, [a, a + 999, b + 5, b], [10, 1, 3000, 0]) == [DATA[:10], DATA[999:1000], DATA[1005:4005], b""]
    assert sorted(remote.asked) == [("a", 0, 10), ("a", 999, 1000), ("b", 5, 3005)]
    assert source.where_is(b + 7) == ("fake://bucket/b", 7)
    buffer = np.zeros(5000, dtype=np.uint8)
    assert source.read_into(buffer, a + 900) == 100
    with pytest.raises(ReadError, match=r"fake://bucket/a: bytes 990 to 1010 are wanted, but it has 1000"):
        read(source, [a + 990], [20])
    source.close()
    source.close()
    with pytest.raises(ReadError, match="the loader was closed"):
        read(source, [a], [1])


def test_no_request_spans_two_objects(no_leaks: None) -> None:
    remote = FakeRemote({"a": DATA[:1000], "b": DATA[1000:1500], "c": DATA[1500:1501]})
    source = source_of(remote)
    sizes = np.array([1000, 500, 1])
    given = {number: part.tobytes() for number, part in read_each(source, source.base, sizes)}
    assert given == {0: DATA[:1000], 1: DATA[1000:1500], 2: DATA[1500:1501]}
    assert sorted(remote.asked) == [("a", 0, 1000), ("b", 0, 500), ("c", 0, 1)]
    source.close()


def test_a_source_reads_on_after_another_was_closed(no_leaks: None) -> None:
    one, other = (source_of(FakeRemote({"a": DATA})) for _ in range(2))
    assert read(one, [5], [10]) == [DATA[5:15]]
    one.close()
    one.close()
    assert read(other, [7], [10]) == [DATA[7:17]]
    other.close()


def test_a_fork_has_requests_of_its_own(no_leaks: None) -> None:
    source = source_of(FakeRemote({"a": DATA}))
    assert read(source, [5], [10]) == [DATA[5:15]]

    def work() -> bool:
        own = source_of(FakeRemote({"a": DATA}))
        for refused in (lambda: read(source, [5], [10]), lambda: source.check_same([0])):
            with pytest.raises(PlanError, match=r"^the loader was opened before this process was forked, and the thr"):
                refused()
        source.close()
        is_right = read(own, [7], [10]) == [DATA[7:17]]
        own.close()
        return is_right and remote_source._shared._requests is None

    assert status_of_fork(work, [remote_source._shared._lock]) == 0
    assert read(source, [9], [10]) == [DATA[9:19]]
    source.close()


def test_what_cannot_be_read_is_let_go_at_once(no_leaks: None) -> None:
    """Not by the garbage collector, which does not see how much memory an error's traceback holds."""

    class Buffer(np.ndarray[Any, Any]):
        pass

    def fail(number: int, data: bytes) -> bytes:
        raise ReadError(f"fake://bucket/a: request {number} is refused.")

    source = source_of(FakeRemote({"a": DATA}, fail))
    gc.collect()
    gc.disable()
    try:
        buffer = np.zeros(100, dtype=np.uint8).view(Buffer)
        left = weakref.ref(buffer)
        offset = np.arange(0, 500_000, 100_000)
        with suppress(ReadError):
            source.read_many(offset, np.full(5, 20), np.arange(0, 100, 20), buffer)
        del buffer
        source.close()  # waits for the other requests
        assert left() is None
    finally:
        gc.enable()


def test_copies_are_forgotten_of_the_object_that_was_damaged(no_leaks: None) -> None:
    class Near(FakeRemote):
        max_gap = max_extent = 1000

        def fill(self, wanted: RemoteObject, start: int, out: Any) -> bool:
            return False

        def forget(self, wanted: RemoteObject, start: int, stop: int) -> None:
            self.asked.append((wanted.key, start, stop))

    remote = Near({"a": DATA[:1000], "b": DATA})
    source = source_of(remote)
    source.forget(int(source.base[1]) + 70, 30)
    assert remote.asked == [("b", 70, 100)]
    source.close()


def test_a_remote_that_is_slow_with_everything_is_not_asked_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    requests, again = Requests(), []
    monkeypatch.setattr(requests, "_send", lambda _, piece: again.append(piece))
    requests._usual_s, requests._n_answers = 0.001, 100
    long_ago = time.monotonic() - 60
    pieces = [_Piece(RemoteObject("a", 9, "1"), i, np.zeros(1, dtype=np.uint8), long_ago, n_asked=1) for i in range(50)]
    errand = remote_source._Errand(FakeRemote({}))
    for _ in range(3):
        requests._ask_again(errand, pieces)
    assert len(again) == 5  # of 100 that were answered
    requests.close()


def test_many_requests_are_in_flight_at_once(no_leaks: None) -> None:
    def wait(_: int, data: bytes) -> bytes:
        time.sleep(0.05)
        return data

    remote = FakeRemote({"a": DATA}, wait)
    source = source_of(remote)
    offset = list(range(0, 1_000_000, 10_000))
    assert b"".join(read(source, offset, [10_000] * 100)) == DATA
    assert 8 < remote.most_at_once <= remote_source.IN_FLIGHT
    source.close()


def test_nearby_ranges_share_requests_within_one_buffer(monkeypatch: pytest.MonkeyPatch, no_leaks: None) -> None:
    monkeypatch.setattr(reading, "TOGETHER", 1000)
    remote = FakeRemote({"a": DATA[:4000], "b": DATA[:600], "c": DATA[:600]})
    source = source_of(remote)
    source.max_gap, source.max_extent = 10, 300
    a, b, c = source.base.tolist()
    offset, nbytes = np.array([a + 220, c, a, b + 50, a + 100]), np.array([700, 500, 100, 3, 110])
    each = read_each(source, offset, nbytes)
    assert next(each)[0] == 2
    cut = [("a", 0, 210), ("a", 220, 520), ("a", 520, 820), ("a", 820, 920), ("b", 50, 53)]
    assert sorted(remote.asked) == cut, "what lies within 10 bytes is one request, and none is of more than 300"
    given = {number: part.tobytes() for number, part in each}
    assert sorted(remote.asked) == [*cut, ("c", 0, 300), ("c", 300, 500)]
    assert given == {0: DATA[220:920], 1: DATA[:500], 3: DATA[50:53], 4: DATA[100:210]}
    source.close()


def test_busy_requests_are_retried(no_leaks: None) -> None:
    def busy(number: int, data: bytes) -> bytes:
        if number % 3:
            raise (BusyError("503"), ConnectionResetError(), TimeoutError())[number % 2]
        return data

    remote = FakeRemote({"a": DATA}, busy)
    source = source_of(remote)
    source.requests._patience = Patience(tries=50, first_wait_s=0.0001, longest_wait_s=0.001)
    assert read(source, [0, 500], [100, 100]) == [DATA[:100], DATA[500:600]]
    source.requests._patience = Patience(tries=3, first_wait_s=0.0001)
    remote.meet = lambda number, data: (_ for _ in ()).throw(BusyError("fake://bucket/a: 503 SlowDown"))
    remote.asked.clear()
    with pytest.raises(BusyError, match="503 SlowDown"):
        read(source, [0], [100])
    assert len(remote.asked) == 3
    source.close()


@pytest.mark.parametrize("n", [1, 99, 101])
def test_a_response_of_the_wrong_length_is_retried(no_leaks: None, n: int) -> None:
    remote = FakeRemote({"a": DATA}, lambda number, data: DATA[:n] if number == 1 else data)
    source = source_of(remote)
    source.requests._patience = Patience(tries=2, first_wait_s=0.0001)
    assert read(source, [500], [100]) == [DATA[500:600]]
    remote.meet = lambda number, data: DATA[:n]
    with pytest.raises(BusyError, match=f"^fake://bucket/a: short read at byte 500: wanted 100 bytes, got {n}[.]$"):
        read(source, [500], [100])
    source.close()


def test_waits_are_random_and_double(monkeypatch: pytest.MonkeyPatch) -> None:
    bounds: list[float] = []
    monkeypatch.setattr("random.uniform", lambda _, high: bounds.append(high) or 0.0)

    def fail() -> None:
        raise BusyError("503")

    with pytest.raises(BusyError):
        Patience(tries=6, first_wait_s=0.1, longest_wait_s=0.5).ask(fail)
    assert bounds[:5] == [0.1, 0.2, 0.4, 0.5, 0.5]


def test_retries_last_at_least_the_given_time() -> None:
    patience = Patience(tries=2, first_wait_s=0.001, longest_wait_s=0.002, at_least_s=0.2)

    def answer_after(seconds: float) -> float:
        if time.monotonic() - began_at < seconds:
            raise BusyError("503")
        return seconds

    began_at = time.monotonic()
    assert patience.ask(lambda: answer_after(0.1)) == 0.1
    began_at = time.monotonic()
    with pytest.raises(BusyError):
        patience.ask(lambda: answer_after(9))
    assert 0.2 <= time.monotonic() - began_at < 5


def test_a_permanent_error_is_raised_at_once(no_leaks: None) -> None:
    def changed(_: int, data: bytes) -> bytes:
        raise ReadError("fake://bucket/a: the object was changed since it was listed.")

    remote = FakeRemote({"a": DATA}, changed)
    source = source_of(remote)
    with pytest.raises(ReadError, match="was changed"):
        read(source, [0], [100])
    assert len(remote.asked) == 1
    source.close()


def test_changed_or_removed_objects_are_named(no_leaks: None) -> None:
    remote = FakeRemote({"a": DATA, "b": DATA})
    source = source_of(remote)
    source.check_same([0, 1])
    listed = remote.head
    remote.head = lambda key: replace(listed(key), etag="2")  # type: ignore[method-assign,type-var]
    with pytest.raises(ReadError, match=r"^fake://bucket/b: the object was changed since it was listed; open it again"):
        source.check_same([1])
    remote.head = listed  # type: ignore[method-assign]
    remote.objects["b"] = DATA[1:]
    with pytest.raises(ReadError, match=r"^fake://bucket/b: the object was changed since it was listed; open it again"):
        source.check_same([0, 1])
    del remote.objects["a"]
    with pytest.raises(ReadError, match=r"^fake://bucket/a: no such object\. Was it removed since it was listed\?$"):
        source.check_same([0])
    source.close()


def test_a_straggling_request_is_sent_again(no_leaks: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote_source, "_LEAST_SLOW_S", 0.5)  # others may be slow too, on a busy machine
    release = threading.Event()

    def straggle(number: int, data: bytes) -> bytes:
        time.sleep(0.01)
        if number == 150:
            release.wait(60)
            return b"\0" * len(data)  # a late response must be discarded
        return data

    remote = FakeRemote({"a": DATA}, straggle)
    start = time.perf_counter()
    offset = list(range(0, 200_000, 1000))
    with closing(source_of(remote)) as source:
        assert b"".join(read(source, offset, [1000] * 200)) == DATA[:200_000]
        assert time.perf_counter() - start < 30
        assert len(remote.asked) > 200
        assert len(remote.asked) <= 200 + 200 * remote_source._SECOND_SHARE + 1
        release.set()


def test_late_responses_are_discarded() -> None:
    out, wanted = np.zeros(4, dtype=np.uint8), RemoteObject("a", 4, "1")
    piece = _Piece(wanted, 0, out, n_asked=2)
    assert Requests._take(piece, b"\1" * 4) == 1
    assert Requests._take(piece, b"\2" * 4) == 0
    assert out.tolist() == [1] * 4
    piece = _Piece(wanted, 0, out, n_asked=2)
    assert Requests._take(piece, BusyError("503")) == 0  # the other request may do better
    with pytest.raises(BusyError):
        Requests._take(piece, BusyError("503"))


def test_closing_ends_waiting_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote_source, "IN_FLIGHT", 2)
    release = threading.Event()

    def hang(_: int, data: bytes) -> bytes:
        release.wait(20)
        return data

    requests = Requests()
    remote = FakeRemote({"a": DATA}, hang)
    wanted = RemoteObject("a", len(DATA), "1")
    errors: list[BaseException] = []

    def wait() -> None:
        try:
            requests.fill(remote, [(wanted, i, np.zeros(1, dtype=np.uint8)) for i in range(5)])
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=wait, daemon=True)
    thread.start()
    time.sleep(0.2)
    requests.close()
    thread.join(5)
    assert not thread.is_alive()
    assert "the loader was closed" in str(errors[0])
    release.set()
    with pytest.raises(ReadError, match="the loader was closed"):
        requests.fill(remote, [(wanted, 0, np.zeros(1, dtype=np.uint8))])


def test_a_file_is_read_in_few_requests(no_leaks: None) -> None:
    remote = FakeRemote({"a": DATA * 10})
    source = source_of(remote)
    file = RemoteFile(source)
    whole = io.BytesIO(DATA * 10)
    chance = np.random.default_rng(1)
    for at in [0, 5, 9_999_990, 10_000_000, *chance.integers(0, 9_000_000, 30).tolist()]:
        n = int(chance.integers(1, 200_000))
        assert file.seek(at) == whole.seek(at)
        assert file.read(n) == whole.read(n)
        assert file.tell() == whole.tell()
    remote.asked.clear()
    in_turn = RemoteFile(source)
    assert b"".join(iter(lambda: in_turn.read(1000), b"")) == whole.getvalue()
    assert len(remote.asked) < 20
    source.close()


def test_ranges_that_are_brought_may_lie_in_each_other(no_leaks: None) -> None:
    remote = FakeRemote({"a": DATA})
    source = source_of(remote)
    file = RemoteFile(source)
    file.bring([(0, 1000), (10, 20), (500_000, 3000), (999_990, 10), (999_990, 11), (-1, 5)])
    assert sorted(remote.asked) == [("a", 0, 1000), ("a", 500_000, 503_000), ("a", 999_990, 1_000_000)]
    for at, n in ((0, 1000), (10, 20), (500_000, 3000), (999_990, 10)):
        file.seek(at)
        assert file.read(n) == DATA[at : at + n]
    assert len(remote.asked) == 3
    file.seek(10)
    assert file.read(100) == DATA[10:110], "more than was brought from there"
    source.max_extent = 100_000
    remote.asked.clear()
    RemoteFile(source).bring([(at, 30_000) for at in range(0, 300_000, 30_000)])
    assert sorted(remote.asked) == [
        *(("a", at, at + 90_000) for at in range(0, 270_000, 90_000)),
        ("a", 270_000, 300_000),
    ]
    source.close()


@pytest.mark.parametrize("ndim", [1, 2])
def test_chunk_trees_are_read_level_by_level(tmp_path: Path, ndim: int, no_leaks: None) -> None:
    values = np.random.default_rng(0).integers(0, 9, 6000)
    with h5py.File(tmp_path / "tree.h5", "w") as file:
        if ndim == 1:
            file.create_dataset("x", data=values, chunks=(2,), compression="gzip")
        else:
            file.create_dataset("x", data=values.reshape(60, 100), chunks=(1, 2), compression="gzip")
    remote = FakeRemote({"a": (tmp_path / "tree.h5").read_bytes()})
    source = source_of(remote)
    content = RemoteFile(source)
    with h5py.File(content, "r") as file:
        n_found = [0]
        file["x"].id.chunk_iter(lambda _: n_found.__setitem__(0, n_found[0] + 1))
        assert n_found == [3000]
        assert len(content._nodes) > 40, "the nodes were not found among the bytes"
        np.testing.assert_array_equal(file["x"][()].reshape(-1), values)
    source.close()


def test_file_that_does_not_wait_says_what_it_lacks(
    tmp_path: Path, no_leaks: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As many reads are tried as there are steps to what is wanted, and the last returns what a patient one does."""
    for name, value in (("_BLOCK", 8192), ("_BEHIND", 0), ("_BEYOND", 2)):
        monkeypatch.setattr(remote_file, name, value)
    with h5py.File(tmp_path / "tree.h5", "w") as file:
        file.create_dataset("before", data=np.arange(500_000))
        file.create_dataset("x", data=np.arange(60_000), chunks=(20,), compression="gzip")
        file.create_dataset("after", data=np.arange(500_000))
    content = (tmp_path / "tree.h5").read_bytes()
    source = source_of(FakeRemote({"a": content}))
    impatient = RemoteFile(source)
    impatient.can_wait = False
    assert not impatient.bring_missing(), "nothing was read yet"
    with pytest.raises(MissingError, match="fake://bucket"):
        impatient.read(1)
    assert impatient.bring_missing()
    assert impatient.read(1) == content[:1]
    n_tries, found = 0, None
    while found is None:
        n_tries += 1
        assert n_tries < 40
        try:
            with h5py.File(impatient, "r") as file:
                n_found = [0]
                file["x"].id.chunk_iter(lambda _, n=n_found: n.__setitem__(0, n[0] + 1))
                found = file["x"][()]
        except MissingError:
            assert impatient.bring_missing()
        else:
            assert not impatient.bring_missing()
    assert n_tries > 4
    assert n_found == [3000]
    np.testing.assert_array_equal(found, np.arange(60_000))
    source.close()


@pytest.mark.parametrize("nbytes", [0, 1, 70_000, 64 << 16, 96 << 16, (96 << 16) + 1, 9_000_000])
def test_ends_of_a_file_are_fetched_at_once(nbytes: int, no_leaks: None) -> None:
    content = (DATA * 9)[:nbytes]
    remote = FakeRemote({"a": content})
    source = source_of(remote)
    file = RemoteFile(source)
    file.bring_ends()
    n_asked = len(remote.asked)
    assert n_asked <= 2
    file.can_wait = False
    assert file.read(1000) == content[:1000]
    file.seek(max(0, nbytes - 900_000))
    assert file.read() == content[-900_000:]
    assert len(remote.asked) == n_asked
    source.close()


def test_what_is_there_is_not_fetched_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, no_leaks: None) -> None:
    """Neither blocks around one that is missing, nor what is around the nodes of chunk trees."""
    for name, value in (("_BLOCK", 4096), ("_BEHIND", 4), ("_BEYOND", 8)):
        monkeypatch.setattr(remote_file, name, value)
    content = DATA[: 100 * 4096]
    remote = FakeRemote({"a": content})
    source = source_of(remote)
    file = RemoteFile(source)
    file.can_wait = False
    for at in (50, 60, 55, 57, 45):
        file.seek(at * 4096)
        with suppress(MissingError):
            file.read(10)
        file.bring_missing()
    asked = [n for _, start, stop in remote.asked for n in range(start // 4096, stop // 4096)]
    assert asked == [*range(46, 58), *range(58, 68), *range(41, 46)]
    source.close()
    with h5py.File(tmp_path / "trees.h5", "w") as written:
        for name in "xy":
            written.create_dataset(name, data=np.arange(60_000), chunks=(100,), compression="gzip")
    remote = FakeRemote({"a": (tmp_path / "trees.h5").read_bytes()})
    source = source_of(remote)
    file = RemoteFile(source)
    file.can_wait = False
    n_rounds, is_read = 0, False
    while not is_read:
        with suppress(MissingError), h5py.File(file, "r") as opened:
            for name in "xy":
                opened[name].id.chunk_iter(lambda _: None)
            is_read = True
        n_rounds += file.bring_missing()
    assert n_rounds < 9
    assert sum(stop - start > 4096 for _, start, stop in remote.asked) == 2, "blocks around nodes were fetched"
    source.close()


def test_aws_profiles_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_PROFILE", "AWS_REGION", "AWS_DEFAULT_REGION", "AWS_ENDPOINT_URL"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "config"))
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "credentials"))
    assert aws_profile(None, {}) == {}
    (tmp_path / "config").write_text("[default]\nregion = a\n[profile lab]\nregion = b\nendpoint_url = http://c\n")
    assert aws_profile(None, {}) == {"region": "a"}  # the keys are a machine's role's
    (tmp_path / "credentials").write_text(
        "[default]\naws_access_key_id = d\naws_secret_access_key = e\n"
        "[lab]\naws_access_key_id = f\naws_secret_access_key = g\naws_session_token = h\n"
    )
    assert aws_profile(None, {}) == {"access_key_id": "d", "secret_access_key": "e", "region": "a"}
    lab = {
        "access_key_id": "f", "secret_access_key": "g", "session_token": "h", "region": "b", "endpoint": "http://c"
    }  # fmt: skip
    assert aws_profile("lab", {}) == lab
    monkeypatch.setenv("AWS_REGION", "elsewhere")
    assert "region" not in aws_profile("lab", {})
    monkeypatch.setenv("AWS_PROFILE", "lab")
    assert aws_profile(None, {})["access_key_id"] == "f"
    for prefix in ("", "aws_", "AWS_"):  # explicit settings take precedence over the profile
        assert aws_profile(None, {f"{prefix}access_key_id": "g"}) == {}
        assert "endpoint" in aws_profile("lab", {})
        assert "endpoint" not in aws_profile("lab", {f"{prefix}endpoint": "g"})
        assert "profile" not in aws_profile("lab", {f"{prefix}access_key_id": "g"})
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "mine")
    assert aws_profile(None, {}) == {}
    with pytest.raises(PlanError, match="profile='none': neither the credentials nor the config file"):
        aws_profile("none", {})
