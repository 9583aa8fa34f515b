"""Objects over the network: faults reported in plain sentences, and a store that fills despite all of them."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import pickle
import re
import signal
import sys
import threading
import time
import traceback
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TYPE_CHECKING, Any

import pytest

import gpuload
from benchmarks.s3server import start
from gpuload.cache import BlockRemote, SampleStore
from gpuload.errors import BusyError, MissingDependencyError, PlanError, ReadError
from gpuload.remote import FolderRemote, ObjectRemote, RemoteObject, open_remote
from tests.remotes import fill
from tests.sample_stores import COST, N, full, train

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from benchmarks.s3server import Running


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Running]:
    (tmp_path / "s3" / "data").mkdir(parents=True)
    fill(tmp_path / "s3" / "data" / "train", N)
    with start(tmp_path / "s3") as running:
        yield running


def of(server: Running, **settings: object) -> ObjectRemote:
    pytest.importorskip("obstore")
    remote = open_remote("s3://data/train", endpoint=server.url, region="us-east-1", anonymous=True, **settings)
    assert isinstance(remote, ObjectRemote)
    return remote


def test_a_folder_lists_and_reads_its_files(tmp_path: Path) -> None:
    fill(tmp_path / "remote", 3)
    (tmp_path / "remote" / ".hidden").touch()
    remote = FolderRemote(tmp_path / "remote")
    listed = sorted(remote.list(), key=lambda o: o.key)
    assert [o.key for o in listed] == ["0000.npy", "0001.npy", "0002.npy"]
    data = (tmp_path / "remote" / "0001.npy").read_bytes()
    assert bytes(remote.get(listed[1], 5, 50)) == data[5:50]
    with pytest.raises(ReadError, match="changed since it was listed"):
        remote.get(dataclasses.replace(listed[1], etag="0-0"), 0, 5)
    with pytest.raises(ReadError, match="removed since it was listed"):
        remote.get(RemoteObject("none", 1, ""), 0, 1)
    with pytest.raises(BusyError, match="short read at byte 0: wanted 99999 bytes"):
        remote.get(listed[1], 0, 99_999)
    assert remote.head("none") is None


def test_a_file_rewritten_during_a_read_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, preadv = fill(tmp_path, 1) / "0000.npy", os.preadv
    remote = FolderRemote(tmp_path)
    wanted = remote.head("0000.npy")
    assert wanted is not None

    def rewritten(fd: int, buffers: list[bytearray], start: int) -> int:
        got = preadv(fd, buffers, start)
        path.write_bytes(bytes(wanted.nbytes))
        return got

    monkeypatch.setattr(os, "preadv", rewritten)
    with pytest.raises(ReadError, match=rf"^{path}: the file was changed since it was listed; open it again\.$"):
        remote.get(wanted, 0, wanted.nbytes)


def test_a_file_is_read_in_parts_where_the_system_reads_no_more_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Linux reads at most 2 GiB in one call, and a network file system may read less."""
    path, preadv = fill(tmp_path, 1) / "0000.npy", os.preadv
    remote = FolderRemote(tmp_path)
    monkeypatch.setattr(os, "preadv", lambda fd, buffers, start: preadv(fd, [buffers[0][:1000]], start))
    (wanted,) = remote.list()
    assert remote.get(wanted, 0, wanted.nbytes) == path.read_bytes()
    assert remote.get(wanted, 7, 2500) == path.read_bytes()[7:2500]
    with pytest.raises(BusyError, match=f"short read at byte 7: wanted 9999 bytes, got {wanted.nbytes - 7}"):
        remote.get(wanted, 7, 10_006)


def test_unreachable_files_raise_busy_error(tmp_path: Path) -> None:
    path = tmp_path / "around"
    path.symlink_to("around")
    remote = FolderRemote(tmp_path)
    with pytest.raises(BusyError, match=rf"^{path}: Too many levels of symbolic links\.$"):
        list(remote.list())
    with pytest.raises(BusyError, match=rf"^{path}: reading 4 bytes at byte 3 failed: Too many .*\. Check the disk\.$"):
        remote.get(RemoteObject("around", 9, ""), 3, 7)


def test_an_unlistable_folder_is_not_taken_for_empty(tmp_path: Path) -> None:
    folder = tmp_path / "remote"
    (folder / "below").mkdir(parents=True)
    (folder / "here").touch()
    remote = FolderRemote(folder)
    listed = remote.list()
    assert next(listed).key == "here"
    (folder / "below").rmdir()
    assert list(listed) == []  # what was removed meanwhile has nothing
    (folder / "below").mkdir()
    listed = remote.list()
    assert next(listed).key == "here"
    (folder / "below").rmdir()
    (folder / "below").touch()
    with pytest.raises(BusyError, match=rf"^{folder}/below: it cannot be listed: Not a directory\. Check the path\.$"):
        list(listed)
    folder.rename(tmp_path / "away")
    with pytest.raises(BusyError, match=rf"^{folder}: it cannot be listed: No such file or directory\. Check the path"):
        list(remote.list())


def test_objects_are_listed_and_read(server: Running) -> None:
    remote = pickle.loads(pickle.dumps(of(server)))
    listed = {found.key: found for found in remote.list()}
    assert len(listed) == N
    one = listed["0003.npy"]
    data = (server.root / "data" / "train" / "0003.npy").read_bytes()
    assert one.nbytes == len(data)
    assert one.digest == f"md5?:{one.etag}"
    assert bytes(memoryview(remote.get(one, 5, 50))) == data[5:50]
    assert remote.head("0003.npy") == one
    assert remote.head("none") is None
    with pytest.raises(ReadError, match=r"s3://data/train/0003\.npy: the object was changed since it was listed"):
        remote.get(dataclasses.replace(one, etag="0" * 32), 0, 5)
    with pytest.raises(ReadError, match="s3://data/train/none: no such object"):
        remote.get(RemoteObject("none", 1, ""), 0, 1)


@pytest.mark.parametrize("kind", ["503", "429", "reset", "truncate"])
def test_transient_errors_raise_busy_error(server: Running, kind: str) -> None:
    remote = of(server)
    one = next(remote.list())
    server.set(**{f"p_{kind}": 1})
    with pytest.raises(BusyError, match="s3://data/train") as caught:
        remote.get(one, 0, one.nbytes)
    assert "<" not in str(caught.value)
    assert kind not in ("503", "429") or f"({kind} " in str(caught.value)


class Refusing(BaseHTTPRequestHandler):
    """Answers everything with one status and body."""

    status, body = 403, b""

    def do_GET(self) -> None:
        self.send_response(self.status)
        self.send_header("Content-Length", str(len(self.body)))
        self.end_headers()
        self.wfile.write(self.body)

    def log_message(self, *args: object) -> None:
        """Say nothing."""


@pytest.fixture
def refusing_server() -> Iterator[str]:
    pytest.importorskip("obstore")
    with ThreadingHTTPServer(("127.0.0.1", 0), Refusing) as server:
        threading.Thread(target=server.serve_forever, args=(0.01,)).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


@pytest.fixture
def refusing(refusing_server: str) -> ObjectRemote:
    settings = {"region": "us-east-1", "access_key_id": "a", "secret_access_key": "b"}
    return ObjectRemote("s3://data", endpoint=refusing_server, **settings)


@pytest.mark.parametrize(
    ("status", "code", "words"),
    [
        (
            403,
            "InvalidAccessKeyId",
            r"access was denied \(403 Forbidden: InvalidAccessKeyId: No\); check the credentials",
        ),
        (401, "Unauthorized", r"access was denied \(401 Unauthorized: Unauthorized: No\); check the credentials"),
        (404, "NoSuchBucket", "there is no bucket 'data'; check its name"),
        (
            400,
            "ExpiredToken",
            r"the server refuses the request \(400 Bad Request: ExpiredToken: No\); .* credentials, which may have exp",
        ),
        (416, "InvalidRange", r"does not send the bytes .*\(416 Range Not .*\); .* or, if it was changed meanwhile, "),
        (501, "NotImplemented", r"the server refuses the request \(501 Not Implemented: NotImplemented: No\); check"),
        (301, "PermanentRedirect", "it is in another region, or at another address; pass region="),
    ],
)
@pytest.mark.parametrize("is_listing", [True, False])
def test_permanent_errors_raise_no_busy_error(
    refusing: ObjectRemote, monkeypatch: pytest.MonkeyPatch, status: int, code: str, words: str, is_listing: bool
) -> None:
    body = f"<?xml version='1.0'?>\n<Error><Code>{code}</Code><Message>No.</Message></Error>".encode()
    monkeypatch.setattr(Refusing, "status", status)
    monkeypatch.setattr(Refusing, "body", body)
    with pytest.raises(ReadError, match=words) as caught:
        list(refusing.list()) if is_listing else refusing.get(RemoteObject("a", 3, ""), 0, 3)
    assert not isinstance(caught.value, BusyError)
    assert "<" not in str(caught.value)


@pytest.mark.parametrize(
    ("status", "words"),
    [
        (403, r"access was denied \(403 Forbidden\); check the address and the credentials, which storage_options="),
        (400, r"the server refuses the request \(400 Bad Request\); check the address\.$"),
        (301, r"it is at another address; pass that\.$"),
    ],
)
def test_errors_of_web_servers_name_no_region(
    refusing_server: str, monkeypatch: pytest.MonkeyPatch, status: int, words: str
) -> None:
    monkeypatch.setattr(Refusing, "status", status)
    monkeypatch.setattr(Refusing, "body", b"")
    with pytest.raises(ReadError, match=words):
        ObjectRemote(f"{refusing_server}/data").get(RemoteObject("a", 3, ""), 0, 3)


class Careless(Refusing):
    """Sends an object of three bytes whatever was requested, and announces too large a size for `whole`."""

    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        is_whole = self.path.endswith("whole")
        headers = {"ETag": '"new"', "Last-Modified": "Thu, 01 Jan 2026 00:00:00 GMT"}
        if is_whole:
            headers |= {"Content-Length": "100", "Transfer-Encoding": "chunked"}
        else:
            headers |= {"Content-Length": "3", "Content-Range": "bytes 0-2/3"}
        self.send_response(200 if is_whole else 206)
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(b"3\r\nabc\r\n0\r\n\r\n" if is_whole else b"abc")


def test_mismatched_responses_are_refused(refusing: ObjectRemote, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("protocol_version", "do_GET"):
        monkeypatch.setattr(Refusing, name, vars(Careless)[name])
    assert bytes(refusing.get(RemoteObject("a", 3, "new"), 0, 3)) == b"abc"
    with pytest.raises(ReadError, match=r"^s3://data/a: the object was changed since it was listed; open it again\.$"):
        refusing.get(RemoteObject("a", 3, "old"), 0, 3)
    with pytest.raises(BusyError, match=r"^s3://data/a: short read at byte 0: wanted 9 bytes, got 3\.$"):
        refusing.get(RemoteObject("a", 9, "new"), 0, 9)
    with pytest.raises(BusyError, match=r"^s3://data/whole: short read: wanted 100 bytes, got 3\.$"):
        refusing.get_whole("whole")


class Whole(Refusing):
    """Sends the whole object whatever part is requested, or a page without announcing its length."""

    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        is_page = self.path.endswith("folder")
        self.send_response(200)
        self.send_header("Last-Modified", "Thu, 01 Jan 2026 00:00:00 GMT")
        self.send_header(*(("Transfer-Encoding", "chunked") if is_page else ("Content-Length", "3")))
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(b"3\r\nabc\r\n0\r\n\r\n" if is_page else b"abc")


@pytest.mark.parametrize("scheme", ["http", "s3"])
@pytest.mark.parametrize("name", ["file", "folder"])
def test_a_server_without_range_requests_is_reported(
    refusing_server: str, monkeypatch: pytest.MonkeyPatch, name: str, scheme: str
) -> None:
    for method in ("do_GET", "do_HEAD"):
        monkeypatch.setattr(Refusing, method, Whole.do_GET, raising=False)
    monkeypatch.setattr(Refusing, "protocol_version", "HTTP/1.1")
    remote = ObjectRemote(f"{refusing_server}/data")
    if scheme == "s3":
        remote = ObjectRemote("s3://data", endpoint=refusing_server, region="us-east-1", anonymous=True)
    with pytest.raises(ReadError, match=rf"/data/{name}: the server sends it only whole, but parts") as caught:
        remote.get(remote.head(name) or RemoteObject(name, 3, ""), 0, 2)
    assert not isinstance(caught.value, BusyError)


class Weak(Refusing):
    """Has an object of three bytes with a weak ETag, which never satisfies If-Match."""

    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        is_refused, is_part = "If-Match" in self.headers, "Range" in self.headers
        self.send_response(412 if is_refused else 206 if is_part else 200)
        self.send_header("Content-Length", "0" if is_refused else "3")
        self.send_header("ETag", 'W/"abc"')
        self.send_header("Last-Modified", "Thu, 01 Jan 2026 00:00:00 GMT")
        if is_part:
            self.send_header("Content-Range", "bytes 0-2/3")
        self.end_headers()
        if self.command == "GET" and not is_refused:
            self.wfile.write(b"abc")


def test_an_object_with_a_weak_etag_is_read(refusing: ObjectRemote, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("protocol_version", "do_GET"):
        monkeypatch.setattr(Refusing, name, vars(Weak)[name])
    monkeypatch.setattr(Refusing, "do_HEAD", Weak.do_GET, raising=False)
    found = refusing.head("a")
    assert found == RemoteObject("a", 3, "W/abc")
    assert bytes(refusing.get(found, 0, 3)) == b"abc"
    with pytest.raises(ReadError, match=r"^s3://data/a: the object was changed since it was listed; open it again\.$"):
        refusing.get(dataclasses.replace(found, etag="W/old"), 0, 3)


class GetOnly(Refusing):
    """Has an object of three bytes, and answers HEAD as programs do that were written for GET alone."""

    protocol_version = "HTTP/1.1"
    of_head: int | None = 405
    """Its status; None: a success that does not say how long the object is."""

    def do_GET(self) -> None:
        self.send_response(206)
        self.send_header("Content-Length", "1")
        self.send_header("Content-Range", "bytes 0-0/3")
        self.send_header("ETag", '"abc"')
        self.send_header("Last-Modified", "Thu, 01 Jan 2026 00:00:00 GMT")
        self.end_headers()
        self.wfile.write(b"a")

    def do_HEAD(self) -> None:
        self.send_response(self.of_head or 200)
        self.send_header("Last-Modified", "Thu, 01 Jan 2026 00:00:00 GMT")
        if self.of_head is not None:
            self.send_header("Content-Length", "0")
        self.end_headers()


@pytest.mark.parametrize("of_head", [405, 501, None])
def test_a_web_server_that_serves_only_get_is_asked_with_get(
    refusing_server: str, monkeypatch: pytest.MonkeyPatch, of_head: int | None
) -> None:
    for name in ("protocol_version", "do_GET", "do_HEAD"):
        monkeypatch.setattr(Refusing, name, vars(GetOnly)[name], raising=False)
    monkeypatch.setattr(Refusing, "of_head", of_head, raising=False)
    assert ObjectRemote(f"{refusing_server}/data").head("a") == RemoteObject("a", 3, "abc")


class Empty(GetOnly):
    """Has an empty object, of which no range can be sent; or says so of one that is not."""

    nbytes = 0

    def do_GET(self) -> None:
        self.send_response(416 if "Range" in self.headers else 200)
        self.send_header("Content-Length", "0" if "Range" in self.headers else str(self.nbytes))
        self.send_header("ETag", '"abc"')
        self.send_header("Last-Modified", "Thu, 01 Jan 2026 00:00:00 GMT")
        self.end_headers()
        if "Range" not in self.headers:
            self.wfile.write(bytes(self.nbytes))


@pytest.mark.parametrize("query", ["", "?X-Amz-Signature=1"])
def test_an_empty_object_of_a_web_server_is_found_empty(
    refusing_server: str, monkeypatch: pytest.MonkeyPatch, query: str
) -> None:
    for name in ("protocol_version", "do_GET", "do_HEAD", "of_head"):
        monkeypatch.setattr(Refusing, name, getattr(Empty, name), raising=False)
    monkeypatch.setattr(Refusing, "nbytes", 0, raising=False)
    remote = ObjectRemote(f"{refusing_server}/data{query}")
    assert remote.head("a") == RemoteObject("a", 0, "abc")
    with pytest.raises(gpuload.StoreError, match=r"/data/a\.h5ad: .* it is empty: copy it again"):
        gpuload.open_loader(f"{refusing_server}/data/a.h5ad{query}")
    monkeypatch.setattr(Refusing, "nbytes", 3)
    with pytest.raises(ReadError, match="/data/a: the server does not send the bytes that were asked for"):
        remote.head("a")


class OtherRange(Refusing):
    """Sends another part of an object than is asked for, or does not say which."""

    protocol_version = "HTTP/1.1"
    said: str | None = None

    def do_GET(self) -> None:
        self.send_response(206)
        self.send_header("Content-Length", "2")
        self.send_header("Last-Modified", "Thu, 01 Jan 2026 00:00:00 GMT")
        if self.said is not None:
            self.send_header("Content-Range", self.said)
        self.end_headers()
        self.wfile.write(b"ab")


@pytest.mark.parametrize("said", ["bytes 0-1/9", "bytes 1-2/9", "bytes 0-2/*", None])
def test_a_server_that_sends_another_range_is_not_asked_again(
    refusing: ObjectRemote, monkeypatch: pytest.MonkeyPatch, said: str | None
) -> None:
    for name in ("protocol_version", "do_GET"):
        monkeypatch.setattr(Refusing, name, vars(OtherRange)[name])
    monkeypatch.setattr(Refusing, "said", said, raising=False)
    words = r"^s3://data/a: the server does not send the bytes that were asked for \(.+\); copy it first, use a server"
    with pytest.raises(ReadError, match=words) as caught:
        refusing.get(RemoteObject("a", 9, ""), 0, 3)
    assert not isinstance(caught.value, BusyError)


def test_an_object_of_another_size_was_changed_if_no_etag_says_so(
    refusing: ObjectRemote, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("protocol_version", "do_GET"):
        monkeypatch.setattr(Refusing, name, vars(Weak)[name])
    with pytest.raises(ReadError, match=r"^s3://data/a: the object was changed since it was listed; open it again\.$"):
        refusing.get(RemoteObject("a", 9, "W/abc"), 0, 3)


def test_folder_listings_follow_links_and_skip_non_utf8(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder, other = tmp_path / "remote", tmp_path / "other"
    for place in (folder, other / "deep"):
        place.mkdir(parents=True)
    (folder / "a").write_bytes(b"1")
    (folder / "b").symlink_to(folder / "a")
    (other / "deep" / "c").write_bytes(b"2")
    (folder / "linked").symlink_to(other)
    (other / "back").symlink_to(folder)  # a cycle
    (other / "again").symlink_to(other / "deep")
    with open(os.fsencode(folder) + b"/d\xe9", "wb"):
        pass
    assert sorted(found.key for found in FolderRemote(folder).list()) == ["a", "b", "linked/again/c", "linked/deep/c"]
    assert caplog.messages == ["b'd\\xe9': its name is not UTF-8, so it is left out; rename it."]


@pytest.mark.parametrize("variable", ["AWS_ENDPOINT_URL", "AWS_ENDPOINT", "AWS_ENDPOINT_URL_S3"])
def test_an_endpoint_from_the_environment_may_be_plain_http(
    server: Running, variable: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("obstore")
    monkeypatch.setenv(variable, server.url)
    assert len(list(open_remote("s3://data/train", region="us-east-1", anonymous=True).list())) == N


def test_a_fork_of_a_process_that_has_read_is_refused(server: Running) -> None:
    remote = of(server)
    assert remote.head("none") is None
    pid = os.fork()
    if not pid:
        signal.alarm(20)
        try:
            remote.head("none")
        except PlanError as error:
            os._exit(0 if "pass the DataLoader multiprocessing_context='spawn'" in str(error) else 1)
        finally:
            os._exit(2)
    assert os.waitpid(pid, 0)[1] == 0


def test_a_failed_connection_is_reported_in_one_sentence() -> None:
    pytest.importorskip("obstore")
    with pytest.raises(BusyError) as caught:
        open_remote("http://127.0.0.1:1/x").get(RemoteObject("a", 3, ""), 0, 3)
    assert str(caught.value) == (
        "http://127.0.0.1:1/x/a: no connection to http://127.0.0.1:1 could be made (Connection refused); check the "
        "address and the network."
    )


class Redirecting(Refusing):
    """Redirects every request to an address where nothing listens."""

    def do_GET(self) -> None:
        self.send_response(302)
        self.send_header("Location", "http://127.0.0.1:1/there")
        self.send_header("Content-Length", "0")
        self.end_headers()


def test_a_failed_redirect_names_both_servers(refusing_server: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Refusing, "do_GET", Redirecting.do_GET)
    words = rf"^{refusing_server}/x/a: no connection to {refusing_server}, or to 127\.0\.0\.1:1, where it redirects, "
    with pytest.raises(BusyError, match=words):
        open_remote(f"{refusing_server}/x").get(RemoteObject("a", 3, ""), 0, 3)


def test_missing_credentials_are_not_retried() -> None:
    pytest.importorskip("obstore")
    remote = ObjectRemote("s3://data", region="us-east-1", access_key_id="a", secret_access_key="b")
    said = "Generic S3 error: Error performing PUT http://169.254.169.254/latest/api/token in 3s - HTTP error: error"
    kind = remote._obstore.exceptions.GenericError
    with pytest.raises(ReadError, match=r"^s3://data: there are no credentials") as caught, remote._translating(""):
        raise kind(said)
    assert not isinstance(caught.value, BusyError)
    with pytest.raises(BusyError), remote._translating(""):
        raise kind(said + " status code: 503 Service Unavailable: ")


@pytest.mark.parametrize("n_processes", [0, 1])
def test_a_missing_bucket_ends_the_wait(tmp_path: Path, server: Running, n_processes: int) -> None:
    pytest.importorskip("obstore")
    remote = open_remote("s3://no-such-bucket/x", endpoint=server.url, region="us-east-1", anonymous=True)
    with (
        SampleStore(tmp_path / "store", remote, n_processes=n_processes) as store,
        pytest.raises(ReadError, match="there is no bucket 'no-such-bucket'; check its name"),
    ):
        store.snapshot(wait_s=60)


def test_an_unavailable_bucket_is_waited_for(tmp_path: Path, server: Running, caplog: pytest.LogCaptureFixture) -> None:
    server.set(p_503=1)
    settings = {"n_processes": 0, "longest_wait_s": 0.01, "min_free": 0}
    with SampleStore(tmp_path / "store", of(server), **settings) as store:
        with pytest.raises(ReadError, match=r"wait_s=1: .* \(the remote could not be listed: .*503 .*wait longer"):
            store.snapshot(wait_s=1)
        assert len([r for r in caplog.records if "503" in r.getMessage()]) == 1  # and not again each time
        server.set(p_503=0)
        assert len(store.snapshot(wait_s=60, min_samples=N)) == N


def test_a_fault_of_an_earlier_run_is_forgotten(tmp_path: Path, server: Running) -> None:
    fill(tmp_path / "remote", 2)
    with SampleStore(tmp_path / "store", tmp_path / "remote", fetch=False) as store:
        store._catalogue.note_listing_fault("access was denied.", may_pass=False)
        with pytest.raises(ReadError, match=r"cannot be listed: access was denied\. Fix that"):
            store.snapshot(wait_s=60)
    with SampleStore(tmp_path / "store", tmp_path / "remote", n_processes=0, min_free=0) as store:
        assert len(store.snapshot(wait_s=60, min_samples=2)) == 2


def test_a_stalled_read_raises_busy_error_after_the_timeout(server: Running) -> None:
    remote = of(server, timeout_s=0.5)
    one = next(remote.list())
    server.set(p_stall=1, stall_s=10)
    start_s = time.perf_counter()
    with pytest.raises(BusyError):
        remote.get(one, 0, one.nbytes)
    assert time.perf_counter() - start_s < 5


class Slow(Refusing):
    """Sends an object a byte at a time: 9 bytes in 1.35 s, or `endless` in minutes."""

    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        n = 999 if self.path.endswith("endless") else 9
        self.send_response(206)
        self.send_header("Last-Modified", "Thu, 01 Jan 2026 00:00:00 GMT")
        self.send_header("Content-Length", str(n))
        self.send_header("Content-Range", f"bytes 0-{n - 1}/{n}")
        self.end_headers()
        with contextlib.suppress(OSError):
            for _ in range(n):
                time.sleep(0.15)
                self.wfile.write(b"a")


def test_a_slow_response_may_outlast_the_timeout(refusing_server: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Responses over a slow network may all take long, but an endless one must be cut off."""
    for name in ("protocol_version", "do_GET"):
        monkeypatch.setattr(Refusing, name, vars(Slow)[name])
    remote = ObjectRemote(f"{refusing_server}/data", timeout_s=1.0)
    assert bytes(remote.get(RemoteObject("a", 9, ""), 0, 9)) == 9 * b"a"
    start_s = time.perf_counter()
    with pytest.raises(BusyError, match=r"check the network or, if it is slow, pass a larger timeout_s=\.$"):
        remote.get(RemoteObject("endless", 999, ""), 0, 999)
    assert time.perf_counter() - start_s < 60


def test_invalid_addresses_and_options_are_refused() -> None:
    pytest.importorskip("obstore")
    with pytest.raises(PlanError, match=r"foo://x: foo:// is not supported; expected s3://, gs://, az://"):
        open_remote("foo://x")
    with pytest.raises(PlanError, match="it has no bucket or host; expected, for example, s3://bucket"):
        open_remote("s3://")
    with pytest.raises(PlanError, match=r"az://data: it cannot be opened: Account .*; check the address, and pass"):
        open_remote("az://data")
    with pytest.raises(PlanError, match="storage_options has 'nonsense', which is not a setting"):
        open_remote("s3://data", nonsense=1)
    for name, own in ("anon", "anonymous=True"), ("key", "access_key_id="), ("secret", "secret_access_key="):
        with pytest.raises(PlanError, match=rf"has '{name}', which is not a setting .*; it is {own} here\.$"):
            open_remote("s3://data", **{name: "x"})
    with pytest.raises(PlanError, match="storage_options has 'nonsense', which cannot be used here"):
        open_remote("http://data", nonsense=1)
    with pytest.raises(PlanError, match="storage_options has 'client_options', which cannot be used here"):
        open_remote("http://data", client_options=1)
    with pytest.raises(PlanError, match="timeout_s='a': expected a number of seconds"):
        open_remote("s3://data", timeout_s="a")
    for address in ("s3://data", "hf://datasets/a/b"):
        with pytest.raises(PlanError, match="anonymous='no': expected True or False"):
            open_remote(address, anonymous="no")


@pytest.mark.parametrize(
    "endpoint",
    [
        "localhost:9000",
        "127.0.0.1:9000",
        "",
        "http://",
        "ftp://host",
        "http://host:99999",
        "http://ho st",
        "http://[::1",
    ],
)
@pytest.mark.parametrize("name", ["endpoint", "endpoint_url", "AWS_ENDPOINT_URL", "aws_endpoint"])
def test_an_endpoint_that_is_no_address_is_refused(name: str, endpoint: str) -> None:
    """obstore panics on it at the first request: no Exception, so that `except Exception` does not catch it."""
    pytest.importorskip("obstore")
    with pytest.raises(PlanError, match=rf"^s3://data: {name}={re.escape(repr(endpoint))} is not the address of a ser"):
        open_remote("s3://data", **{name: endpoint})


def test_an_endpoint_of_the_environment_counts_unless_one_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("obstore")
    monkeypatch.setenv("AWS_ENDPOINT_URL", "localhost:9000")
    with pytest.raises(PlanError, match=r"^s3://data: AWS_ENDPOINT_URL=.localhost:9000. is not the address of a s"):
        open_remote("s3://data", region="x")
    open_remote("s3://data", endpoint="https://localhost:9000")
    open_remote("s3://data", aws_endpoint_url="http://localhost:9000/below")
    open_remote("gs://data", skip_signature=True)
    monkeypatch.setenv("AWS_ENDPOINT_URL", "")  # not set, for the tools of AWS too
    open_remote("s3://data")


def test_a_key_with_a_line_break_is_refused_and_not_shown() -> None:
    pytest.importorskip("obstore")
    with pytest.raises(PlanError, match=r"^s3://data: access_key_id has a line break or another control c") as caught:
        open_remote("s3://data", access_key_id="SECRET\n", secret_access_key="b")
    assert "SECRET" not in str(caught.value)


def test_a_key_of_many_lines_is_passed_on() -> None:
    pytest.importorskip("obstore")
    key = json.dumps({"type": "service_account", "private_key": "none", "client_email": "a@b"}, indent=2)
    with pytest.raises(PlanError, match="which cannot be used here") as caught:  # obstore reads it, and finds no key
        open_remote("gs://data", service_account_key=key)
    assert "line break" not in str(caught.value)


def test_a_setting_of_connections_in_the_wrong_place_is_refused() -> None:
    pytest.importorskip("obstore")
    with pytest.raises(PlanError, match=r"^s3://data: storage_options has 'allow_http', of which .* client_options"):
        open_remote("s3://data", allow_http=True)


def test_a_request_that_obstore_cannot_make_is_a_read_error(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("obstore")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "a\n")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "b")
    remote = open_remote("s3://data", endpoint="http://127.0.0.1:9", region="x")
    for ask in (lambda: remote.head("a"), lambda: list(remote.list()), lambda: remote.get_whole("a")):
        with pytest.raises(ReadError, match=r"^s3://data/a?: obstore cannot make this request: .*AWS_ENDPOINT_URL\.$"):
            ask()


@pytest.mark.parametrize("options", [5, "region", [("region", "x")], {5: "secret"}])
def test_storage_options_that_are_no_settings_by_name_are_refused(options: Any) -> None:
    with pytest.raises(PlanError, match=r"^storage_options: expected a dict from names to settings") as caught:
        gpuload.open_loader("s3://data/a.h5ad", storage_options=options)
    assert "secret" not in str(caught.value)


def test_a_password_in_an_address_is_refused_and_not_shown() -> None:
    with pytest.raises(PlanError, match=r"^https://...@host/atlas.h5ad: .*leave them out") as caught:
        open_remote("https://me:secret@host/atlas.h5ad")
    assert "secret" not in str(caught.value)


def test_user_headers_are_sent_along_with_our_settings() -> None:
    pytest.importorskip("obstore")
    asked: list[str | None] = []

    class Asking(Refusing):
        status, body = 200, b"1"

        def do_GET(self) -> None:
            asked.append(self.headers.get("Authorization"))
            super().do_GET()

    headers = {"default_headers": {"Authorization": "Basic x"}}
    with ThreadingHTTPServer(("127.0.0.1", 0), Asking) as server:
        threading.Thread(target=server.serve_forever, args=(0.01,)).start()
        remote = ObjectRemote(f"http://127.0.0.1:{server.server_port}", client_options=headers)
        with pytest.raises(ReadError):  # its answer has no time of the last change
            remote.get(RemoteObject("a", 1, ""), 0, 1)
        server.shutdown()
    assert asked == ["Basic x"]
    assert list(headers) == ["default_headers"]
    assert remote.reach("a") is None  # another client would not send them


def test_missing_obstore_is_reported_with_the_pip_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "obstore", None)
    with pytest.raises(PlanError, match=r"^ftp://host/x: ftp:// is not supported; expected s3://"):
        open_remote("ftp://host/x")
    with pytest.raises(MissingDependencyError, match=r"pip install 'gpuload\[remote\]'"):
        open_remote("s3://data")


@pytest.mark.parametrize("n_processes", [0, 1])
def test_a_store_fills_despite_every_fault(tmp_path: Path, server: Running, n_processes: int) -> None:
    server.set(
        p_503=0.1,
        p_reset=0.1,
        p_truncate=0.1,
        p_corrupt=0.1,
        p_stall=0.02,
        stall_s=9,
        most_in_a_row=3,
        latency_ms=3,
        seed=5,
    )
    remote = of(server, timeout_s=1.0)
    settings = {"n_processes": n_processes, "in_flight": 8, "min_free": 0, "first_wait_s": 0.01, "max_failures": 20}
    with SampleStore(tmp_path / "store", remote, budget=N * COST, **settings) as store:
        full(store, N)
        assert sorted(train(store)) == list(range(N))
        assert not store.quarantine()
    counts = server.counts()
    assert all(counts.get(f"fault {kind}", 0) for kind in ("503", "reset", "truncate", "corrupt"))


@pytest.mark.parametrize(("section", "name"), [("profile lab", "lab"), ("default", None)])
def test_a_profile_without_keys_needs_boto3(
    tmp_path: Path, section: str, name: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("obstore")
    (tmp_path / "config").write_text(f"[{section}]\nsso_session = lab\n")
    for variable in ("AWS_ACCESS_KEY_ID", "AWS_PROFILE"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "config"))
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "none"))
    monkeypatch.setitem(sys.modules, "boto3", None)
    words = rf"^profile='{name or 'default'}', .* needs boto3, .*pip install 'gpuload\[aws\]'"
    with pytest.raises(MissingDependencyError, match=words):
        open_remote("s3://data", profile=name)


@pytest.mark.parametrize(
    ("content", "line"),
    [
        (b"secret_of_mine\n[default]\n", ", line 1"),
        (b"[default]\nkey = secret_of_mine\nkey = secret_of_mine\n", ", line 3"),
        (b"[default]\nsecret_of_mine\n", ""),
        (b"[default]\nregion = \xff\n", ""),
    ],
)
def test_a_damaged_file_of_profiles_is_named_but_not_shown(
    tmp_path: Path, content: bytes, line: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("obstore")
    (tmp_path / "config").write_bytes(content)
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "config"))
    monkeypatch.delenv("AWS_ACCESS_KEY_ID", raising=False)
    words = rf"^{tmp_path}/config{line}: it is no config file of the AWS tools \(\w+\); correct it, or pass keys\.$"
    with pytest.raises(PlanError, match=words) as caught:
        open_remote("s3://data")
    assert "secret_of_mine" not in "".join(traceback.format_exception(caught.value))


@pytest.mark.parametrize(
    ("lines", "words"),
    [
        ("sso_session = none\nsso_account_id = 1\nsso_role_name = a", "sso-session"),
        ("region = a", "get_credentials"),
    ],
)
def test_a_profile_without_boto3_credentials_is_reported(
    tmp_path: Path, lines: str, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("obstore")
    pytest.importorskip("boto3")
    (tmp_path / "config").write_text(f"[profile lab]\n{lines}\n")
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "config"))
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "none"))
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.delenv("AWS_ACCESS_KEY_ID", raising=False)
    with pytest.raises(PlanError, match=rf"^profile='lab': boto3 has no credentials for it: .*{words}.*; fix it in"):
        open_remote("s3://data", profile="lab")


def test_a_store_needs_a_folder_of_its_own(tmp_path: Path) -> None:
    fill(tmp_path / "remote", 1)
    (tmp_path / "file").touch()
    with pytest.raises(
        ReadError, match=r"file: it cannot be the folder of a sample store: .*file/tmp: Not a directory\. "
    ):
        SampleStore(tmp_path / "file", tmp_path / "remote")
    for root in (tmp_path / "remote", tmp_path / "remote" / "store", tmp_path):
        for remote in (FolderRemote(tmp_path / "remote"), BlockRemote(FolderRemote(tmp_path / "remote"))):
            with pytest.raises(PlanError, match="choose a separate folder"):
                SampleStore(root, remote)
    assert [path.name for path in (tmp_path / "remote").iterdir()] == ["0000.npy"]  # nothing was made
    assert {path.name for path in tmp_path.iterdir()} == {"remote", "file"}
    with SampleStore(tmp_path / "remote2", tmp_path / "remote", fetch=False):
        """A name that only shares a prefix is another folder."""


def test_joined_fault_reasons_end_with_one_full_stop(tmp_path: Path) -> None:
    fill(tmp_path / "remote", 1)
    with SampleStore(tmp_path / "store", tmp_path / "remote", n_processes=0, min_free=0) as store:
        store.quarantine_sample(store.copies.samples(store.snapshot(wait_s=60)._ids)[0], "it is broken. Mend it.")
        with pytest.raises(ReadError, match=r"0000\.npy: it is broken\. Mend it\. Fix these, or allow more\.$"):
            store.snapshot(wait_s=60)
