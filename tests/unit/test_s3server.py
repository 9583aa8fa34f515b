"""The fault-injecting server: its responses match moto's, and its faults follow its knobs."""

from __future__ import annotations

import hashlib
import http.client
import os
import statistics
import time
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING
from urllib.parse import urlparse

import pytest

from benchmarks.s3server import start
from benchmarks.s3server.faults import Faults, fate_of

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from benchmarks.s3server import Running

DATA = os.urandom(300_000)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    root = tmp_path_factory.mktemp("s3")
    (root / "data" / "deep").mkdir(parents=True)
    (root / "data" / "deep" / "one").write_bytes(DATA)
    for i in range(40):
        (root / "data" / f"{i:03d}").write_bytes(DATA[i:][:5_000])
    with start(root) as running:
        yield running


NEUTRAL = {
    **{f"p_{kind}": 0 for kind in ("503", "reset", "truncate", "corrupt", "stall")},
    "latency_ms": 0,
    "latency_sigma": 0,
    "bandwidth": 0,
    "total_bandwidth": 0,
    "most_in_a_row": 0,
    "seed": 0,
}


@pytest.fixture
def quiet(server: Running) -> Running:
    server.set(**NEUTRAL)
    return server


def ask(server: Running, path: str, method: str = "GET", body: bytes | None = None, **headers: str):
    """Return (status, headers, body) of one request on a connection of its own."""
    address = urlparse(server.url)
    connection = http.client.HTTPConnection(address.hostname, address.port, timeout=10)
    try:
        connection.request(method, path, body, {k.replace("_", "-"): v for k, v in headers.items()})
        answer = connection.getresponse()
        return answer.status, dict(answer.getheaders()), answer.read()
    finally:
        connection.close()


def kind_of(server: Running, path: str, wanted: bytes) -> str:
    """Return the fault of a GET, as its client sees it."""
    try:
        status, _, body = ask(server, path)
    except http.client.IncompleteRead:
        return "truncate"
    except ConnectionError:
        return "reset"
    return "503" if status == 503 else "none" if body == wanted else "corrupt"


# --- the answers ---


def test_a_key_is_the_path_of_a_file_in_one_way_only(quiet: Running) -> None:
    (quiet.root / "aside").write_bytes(b"in no bucket")
    (quiet.root / "data" / "100% & ü").write_bytes(b"value")
    assert ask(quiet, "/data/100%25%20%26%20%C3%BC")[2] == b"value"
    assert b"<Key>100% &amp; \xc3\xbc</Key>" in ask(quiet, "/data?list-type=2&prefix=100")[2]
    for path in ("/data/../aside", "/data/./deep/one", "/data//deep/one", "/data/deep/", "/../data/001", "/data/%00"):
        assert ask(quiet, path)[0] == 404


def test_nothing_can_be_written(quiet: Running) -> None:
    address = urlparse(quiet.url)
    connection = http.client.HTTPConnection(address.hostname, address.port, timeout=10)
    for method in ("PUT", "POST", "DELETE"):
        connection.request(method, "/data/001", b"a body, which is passed over")
        answer = connection.getresponse()
        assert (answer.status, b"MethodNotAllowed" in answer.read()) == (405, True)
    connection.close()
    assert ask(quiet, "/data/001")[2] == DATA[1:5_001]


def test_a_file_replaced_by_hand_has_another_etag(quiet: Running) -> None:
    for body in (b"first", b"second"):
        (quiet.root / "data" / "hand").write_bytes(body)
        assert ask(quiet, "/data/hand")[1]["ETag"] == f'"{hashlib.md5(body).hexdigest()}"'


def test_a_file_truncated_while_being_sent_ends_the_connection(quiet: Running) -> None:
    path = quiet.root / "data" / "huge"
    path.touch()
    os.truncate(path, 64 << 20)
    address = urlparse(quiet.url)
    connection = http.client.HTTPConnection(address.hostname, address.port, timeout=10)
    connection.request("GET", "/data/huge")
    answer = connection.getresponse()
    os.truncate(path, 1000)
    with pytest.raises(http.client.IncompleteRead):
        answer.read()
    connection.close()


# --- the faults ---


def test_faults_depend_on_request_and_attempt_not_on_order(quiet: Running) -> None:
    paths = [f"/data/{i:03d}" for i in range(40)] * 3
    rates = {"p_503": 0.2, "p_reset": 0.1, "p_truncate": 0.2, "p_corrupt": 0.2, "seed": 7}

    def faults_by_path(order: list[str], n_threads: int) -> dict[str, list[str]]:
        quiet.set(**rates)
        with ThreadPoolExecutor(n_threads) as pool:
            kinds = list(pool.map(lambda p: kind_of(quiet, p, DATA[int(p[-3:]) :][:5_000]), order))
        found: dict[str, list[str]] = {}
        for path, kind in zip(order, kinds, strict=True):
            found.setdefault(path, []).append(kind)
        return found

    one_by_one = faults_by_path(paths, 1)
    at_once = faults_by_path(paths[:40][::-1], 8)
    assert {path: kinds[:1] for path, kinds in one_by_one.items()} == at_once
    drawn = [kind for kinds in one_by_one.values() for kind in kinds]
    assert set(drawn) == {"none", "503", "reset", "truncate", "corrupt"}
    assert any(len(set(kinds)) > 1 for kinds in one_by_one.values())  # each attempt draws again
    quiet.set(seed=8)
    assert [kind_of(quiet, p, DATA[int(p[-3:]) :][:5_000]) for p in paths[:40]] != [k[0] for k in one_by_one.values()]


def test_fault_rates_are_met() -> None:
    faults = Faults(p_503=0.1, p_reset=0.2, p_truncate=0.05, p_corrupt=0.05, p_stall=0.1, seed=3)
    kinds = [fate_of(faults, f"GET /b/{i}", 0).kind for i in range(20_000)]
    for kind, rate in faults.rates().items():
        assert kinds.count(kind) / len(kinds) == pytest.approx(rate, abs=0.01)


def test_latency_is_lognormal() -> None:
    faults = Faults(latency_ms=130, latency_sigma=0.5)
    waits = sorted(fate_of(faults, f"GET /b/{i}", 0).latency_s for i in range(20_000))
    assert statistics.median(waits) == pytest.approx(0.130, rel=0.02)
    assert waits[int(0.8413 * len(waits))] / waits[len(waits) // 2] == pytest.approx(2.718**0.5, rel=0.03)


def test_consecutive_faults_are_limited() -> None:
    faults = Faults(p_503=1.0, most_in_a_row=2)
    kinds = [fate_of(faults, "GET /b/x", attempt).kind for attempt in range(3)]
    assert kinds == ["503", "503", None]
    faults = Faults(p_503=0.5, most_in_a_row=2)
    for i in range(200):
        kinds = [fate_of(faults, f"GET /b/{i}", attempt).kind for attempt in range(20)]
        assert ["503"] * 3 not in [kinds[k : k + 3] for k in range(18)]


def test_stalls_and_latencies_delay_responses(quiet: Running) -> None:
    quiet.set(latency_ms=200)
    start_s = time.perf_counter()
    assert ask(quiet, "/data/001")[0] == 200
    assert time.perf_counter() - start_s >= 0.2
    quiet.set(latency_ms=0, p_stall=1, stall_s=0.5)
    start_s = time.perf_counter()
    assert ask(quiet, "/data/deep/one")[2] == DATA
    assert time.perf_counter() - start_s >= 0.5


def test_bandwidth_is_limited_per_connection_and_in_total(quiet: Running) -> None:
    def seconds_of_three() -> float:
        start_s = time.perf_counter()
        with ThreadPoolExecutor(3) as pool:
            assert all(answer[2] == DATA for answer in pool.map(lambda _: ask(quiet, "/data/deep/one"), range(3)))
        return time.perf_counter() - start_s

    quiet.set(bandwidth=1_000_000)
    of_one = [seconds_of_three()]
    while of_one[-1] >= 0.85 and len(of_one) < 10:  # a busy machine takes longer once in a while
        of_one.append(seconds_of_three())
    assert min(of_one) >= 0.28
    assert of_one[-1] < 0.85
    quiet.set(bandwidth=0, total_bandwidth=1_000_000)
    assert seconds_of_three() >= 0.85


def test_faults_and_responses_are_counted(quiet: Running) -> None:
    before = quiet.counts()
    quiet.set(p_503=1)
    ask(quiet, "/data/001")
    after = quiet.counts()
    assert after["fault 503"] == before.get("fault 503", 0) + 1
    assert after["GET 503"] == before.get("GET 503", 0) + 1


def test_invalid_knobs_are_refused() -> None:
    with pytest.raises(ValueError, match="p_503=-1"):
        Faults(p_503=-1)
    with pytest.raises(ValueError, match="add up to more than 1"):
        Faults(p_503=0.6, p_reset=0.6)
    with pytest.raises(ValueError, match="no such knob: p_404"):
        Faults.of({"p_404": 1})


# --- against moto ---


OBJECTS = {"a/one": DATA, **{key: key.encode() for key in ("a/two", "a/b/three", "bb", "b/c", "é ü+&<", "z")}}


def calls(client, bucket: str) -> list[object]:
    """Return what a client sees of a fixed sequence of calls; times and names that a server draws are left out."""
    seen: list[object] = []

    def call(name: str, **arguments: object) -> dict:
        try:
            answer = getattr(client, name)(**arguments)
        except client.exceptions.ClientError as error:
            answer = error.response
        kept = {k: v for k, v in answer.items() if k in KEPT}
        kept["status"] = answer["ResponseMetadata"]["HTTPStatusCode"]
        if "Error" in answer:
            kept["Error"] = answer["Error"]["Code"]
        if "Body" in kept:
            kept["Body"] = hashlib.md5(kept["Body"].read()).hexdigest()
        kept["Contents"] = [{k: v for k, v in e.items() if k in KEPT} for e in answer.get("Contents", [])]
        seen.append((name, sorted(arguments.keys()), kept))
        return answer

    b = {"Bucket": bucket}
    call("head_bucket", **b)
    for method in ("get_object", "head_object"):
        call(method, **b, Key="a/one")
        call(method, **b, Key="none")
        call(method, **b, Key="a/one", IfMatch='"00"')
        call(method, **b, Key="a/one", IfNoneMatch=f'"{hashlib.md5(DATA).hexdigest()}"')
    for span in ("bytes=0-0", "bytes=5-99", "bytes=-3", "bytes=299990-999999", "bytes=300000-"):
        call("get_object", **b, Key="a/one", Range=span)
    for settings in (
        {},
        {"Prefix": "a/"},
        {"Delimiter": "/"},
        {"Prefix": "a/", "Delimiter": "/"},
        {"StartAfter": "a/one"},
        {"MaxKeys": 0},
        {"EncodingType": "url"},
    ):
        call("list_objects_v2", **b, **settings)
    for delimiter in ("", "/"):
        token: dict[str, str] = {}
        for _ in range(8):
            answer = call("list_objects_v2", **b, MaxKeys=2, Delimiter=delimiter, **token)
            if not answer.get("NextContinuationToken"):
                break
            token = {"ContinuationToken": answer["NextContinuationToken"]}
    call("get_object", Bucket="nobucket", Key="x")
    call("list_objects_v2", Bucket="nobucket")
    call("head_bucket", Bucket="nobucket")
    return seen


KEPT = {
    *(
        "Key",
        "Size",
        "ETag",
        "KeyCount",
        "IsTruncated",
        "CommonPrefixes",
        "Prefix",
        "MaxKeys",
        "Delimiter",
        "StartAfter",
    ),
    *("EncodingType", "ContentLength", "ContentRange", "ContentType", "AcceptRanges", "Body"),
}


def test_responses_equal_those_of_moto(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    boto3 = pytest.importorskip("boto3")
    moto = pytest.importorskip("moto.server")
    from botocore.config import Config

    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")

    def client(url: str):
        return boto3.client(
            "s3",
            endpoint_url=url,
            region_name="us-east-1",
            aws_access_key_id="a",
            aws_secret_access_key="b",
            config=Config(retries={"max_attempts": 1}, s3={"addressing_style": "path"}),
        )

    oracle = moto.ThreadedMotoServer(port=0, verbose=False)
    oracle.start()
    try:
        _, port = oracle.get_host_and_port()
        writer = client(f"http://127.0.0.1:{port}")
        writer.create_bucket(Bucket="bucket")
        for key, body in OBJECTS.items():
            writer.put_object(Bucket="bucket", Key=key, Body=body)
        wanted = calls(writer, "bucket")
    finally:
        oracle.stop()
    for key, body in OBJECTS.items():
        path = tmp_path / "bucket" / key
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(body)
    with start(tmp_path) as server:
        found = calls(client(server.url), "bucket")
    assert len(found) == len(wanted)
    for ours, theirs in zip(found, wanted, strict=True):
        assert ours == theirs
