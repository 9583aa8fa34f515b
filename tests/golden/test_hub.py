"""Hugging Face Hub repositories, read through the Hub's own client from a server that imitates the Hub."""

from __future__ import annotations

import hashlib
import json
import pickle
import shutil
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qs, quote, unquote, urlsplit

import numpy as np
import pytest

pytest.importorskip("huggingface_hub")
pytest.importorskip("obstore")

import gpuload
from benchmarks.s3server import start
from gpuload.cache import BlockRemote, SampleStore
from gpuload.cli import main
from gpuload.errors import BusyError, PlanError, ReadError
from gpuload.remote import hub, open_remote
from tests.forks import status_of_fork
from tests.golden.test_addresses import assert_same, batches
from tests.other_forms import FORMS

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from tests.conftest import StoreVariant

COMMITS = {"main": "1" * 40, "v2": "2" * 40, "refs/convert/parquet": "3" * 40}
PAGE = 2
"""Folder entries per answer."""


class Hub(BaseHTTPRequestHandler):
    """One repository, ``some/cells``, a folder for each commit; another server has the bytes.

    Requests without the token and requests for another repository get the same answer, as from the Hub.
    """

    protocol_version = "HTTP/1.1"
    root: Path
    bytes_at: str
    asked: list[str]
    busy = 0
    """How many of the next answers are 503."""
    signatures = count()

    def do_GET(self) -> None:
        url = urlsplit(self.path)
        asked = unquote(url.path)
        self.asked.append(asked)
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0)).decode()
        if self.busy:
            type(self).busy -= 1
            return self.answer(503, {})
        if self.headers.get("Authorization") != "Bearer hf_token" or "/datasets/some/cells" not in asked:
            return self.answer(401, {"error": "Invalid username or password."}, {"X-Error-Code": "RepoNotFound"})
        what, _, rest = asked.partition("some/cells")[2].lstrip("/").partition("/")
        if what in ("", "revision"):
            commit = COMMITS.get(rest or "main")
            if commit is None:
                return self.answer(404, {"error": f"Invalid rev id: {rest}"}, {"X-Error-Code": "RevisionNotFound"})
            return self.answer(200, {"id": "some/cells", "sha": commit})
        commit, _, path = rest.partition("/")
        folder = self.root / commit
        if what == "paths-info":
            wanted = parse_qs(body)["paths"]
            return self.answer(200, [self.entry(folder, folder / name) for name in wanted if (folder / name).exists()])
        if what == "tree":
            if not (folder / path).is_dir():
                return self.answer(404, {"error": f"{path} does not exist"}, {"X-Error-Code": "EntryNotFound"})
            query = parse_qs(url.query)
            assert query["recursive"][0].lower() == "true"
            every, first = sorted((folder / path).rglob("*")), int(query.get("cursor", ["0"])[0])
            entries = [self.entry(folder, file) for file in every[first : first + PAGE]]
            more = f'<http://{self.headers["Host"]}{url.path}?recursive=True&cursor={first + PAGE}>; rel="next"'
            return self.answer(200, entries, {"Link": more} if first + PAGE < len(every) else {})
        assert what == "resolve"
        if not (folder / path).is_file():
            return self.answer(404, {}, {"X-Error-Code": "EntryNotFound"})
        place = f"{self.bytes_at}/{commit}/{quote(path)}?signature={next(self.signatures)}"
        return self.answer(302, {}, {"Location": place, "X-Linked-ETag": '"of the file"'})

    do_HEAD = do_POST = do_GET  # noqa: N815 - the names that http.server asks for

    def entry(self, folder: Path, path: Path) -> dict[str, Any]:
        name = str(path.relative_to(folder))
        if path.is_dir():
            return {"type": "directory", "oid": "tree", "size": 0, "path": name}
        content = path.read_bytes()
        about = {"type": "file", "oid": hashlib.sha1(content).hexdigest(), "size": len(content), "path": name}
        lfs = {"oid": hashlib.sha256(content).hexdigest(), "size": len(content), "pointerSize": 134}
        return about if len(content) < 1000 else {**about, "lfs": lfs}

    def answer(self, status: int, content: Any, headers: dict[str, str] | None = None) -> None:
        body = json.dumps(content).encode()
        self.send_response(status)
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        """Say nothing."""


@pytest.fixture
def repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], Path]]:
    """Return a function that returns the folder of a commit, given the name of its branch or tag."""
    monkeypatch.delenv("GPULOAD_INDEX", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("HF_TOKEN", "hf_token")
    root = tmp_path / "served"
    for commit in COMMITS.values():
        (root / "files" / commit).mkdir(parents=True)
    with start(root) as cdn:
        monkeypatch.setattr(Hub, "root", root / "files", raising=False)
        monkeypatch.setattr(Hub, "bytes_at", f"{cdn.url}/files", raising=False)
        monkeypatch.setattr(Hub, "asked", [], raising=False)
        front = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
        monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{front.server_port}/")
        thread = threading.Thread(target=front.serve_forever)
        thread.start()
        try:
            yield lambda revision: root / "files" / COMMITS[revision]
        finally:
            front.shutdown()
            thread.join()
            front.server_close()


@pytest.mark.parametrize("revision", ["main", "v2", "refs/convert/parquet"])
def test_file_is_read_from_a_revision(
    repository: Callable[[str], Path], store_variant: StoreVariant, revision: str
) -> None:
    stored = store_variant("csr-gzip4")
    shutil.copy(stored.path, repository(revision) / "cells.h5ad")
    address = "hf://datasets/some/cells" + ("" if revision == "main" else f"@{revision}")
    near = batches(stored.path, obs=["cell_line"])
    assert_same(batches(f"{address}/cells.h5ad", obs=["cell_line"]), near)
    assert_same(batches(f"{address}", obs=["cell_line"]), near)  # a folder of one file
    with pytest.raises(ReadError, match=r"hf://datasets/some/cells.*/other\.h5ad: no such object"):
        batches(f"{address}/other.h5ad")


def test_files_by_folder_and_pattern(repository: Callable[[str], Path], tmp_path: Path) -> None:
    pytest.importorskip("pyarrow")
    form = FORMS["parquet-tahoe"](tmp_path)
    pattern = Path(form.path).relative_to(tmp_path)
    root = repository("main")
    for file in tmp_path.glob("*/*.parquet"):
        (root / file.parent.name).mkdir(exist_ok=True)
        shutil.copy(file, root / file.parent.name)
    near = batches(form.path, obs=list(form.obs))
    for place in (pattern.parent, pattern):
        assert_same(batches(f"hf://datasets/some/cells/{place}", obs=list(form.obs)), near)
    assert len(list(root.rglob("*"))) > PAGE, "or no listing has two pages"
    assert sum("/revision/" in asked or asked.endswith("some/cells") for asked in Hub.asked) == 1
    with pytest.raises(ReadError, match=r"no file matches this pattern"):
        batches("hf://datasets/some/cells/data/*.h5ad")


def test_zarr_store_and_block_cache(
    repository: Callable[[str], Path], store_variant: StoreVariant, tmp_path: Path
) -> None:
    pytest.importorskip("zarr")
    from tests.several import part, write_zarr

    folder = write_zarr(repository("main") / "cells.zarr", part(0, n_obs=20))
    assert_same(batches("hf://datasets/some/cells/cells.zarr"), batches(folder))
    stored = store_variant("csr-gzip4")
    shutil.copy(stored.path, repository("main") / "cells.h5ad")
    remote = BlockRemote(open_remote("hf://datasets/some/cells"))
    with SampleStore(tmp_path / "blocks", remote, budget="10MiB", fetch=False) as store:
        near = batches(stored.path)
        for _ in range(2):
            with gpuload.open_loader(
                "hf://datasets/some/cells/cells.h5ad", cache=store, batch_size=7, fetch_factor=3, block_size=2, seed=1
            ) as loader:
                found = [(batch.X.copy(), batch.rows, dict(batch.obs)) for batch in loader]
                ratio = loader.hit_ratio
            assert_same(found, near)
        assert ratio == 1.0


def test_gpuload_bench_has_a_cache_of_a_repository(
    repository: Callable[[str], Path],
    store_variant: StoreVariant,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    pytest.importorskip("torch")
    shutil.copy(store_variant("csr-gzip4").path, repository("main") / "cells.h5ad")
    quick = ("--batch-size", "7", "--fetch-factor", "2", "--seconds", "0.5", "--repeats", "1", "--device", "cpu")
    cached = ("--cache", str(tmp_path / "blocks"), "--json", "--quiet")
    assert main(["bench", "hf://datasets/some/cells@main/cells.h5ad", *quick, *cached]) == 0
    first, *later = json.loads(capsys.readouterr().out)["cache"]["epochs"]
    assert first["hit_ratio"] < 1
    assert {epoch["hit_ratio"] for epoch in later} == {1}


def test_reads_stay_on_the_first_resolved_commit(
    repository: Callable[[str], Path], store_variant: StoreVariant, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, other = store_variant("csr-gzip4"), store_variant("csr-zstd")
    for revision, stored in (("main", one), ("v2", other)):
        shutil.copy(stored.path, repository(revision) / "cells.h5ad")
    remote: Any = open_remote("hf://datasets/some/cells")
    found = remote.head("cells.h5ad")
    assert found.etag == found.digest.removeprefix("sha256:") == hashlib.sha256(one.path.read_bytes()).hexdigest()
    monkeypatch.setitem(COMMITS, "main", COMMITS["v2"])  # a push
    again: Any = pickle.loads(pickle.dumps(remote))  # as a fetcher process gets it
    for each in (remote, again, open_remote("hf://datasets/some/cells")):
        assert bytes(memoryview(each.get(found, 3, 50))) == one.path.read_bytes()[3:50]
        assert bytes(memoryview(each.get_whole("cells.h5ad"))) == one.path.read_bytes()
        assert each.head("none.h5ad") is None
        assert [file.key for file in each.list()] == ["cells.h5ad"]
        assert [*each.list("nowhere")] == []
        assert each.reach("cells.h5ad") is None


def test_fork_does_not_wait_for_a_question_of_its_parent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hub, "_commit_of", lambda *_: "1" * 40)
    asked = hub.Repository("hf://datasets/some/cells")
    assert status_of_fork(lambda: asked.commit == "1" * 40, [hub._asking]) == 0


def test_folder_serves_as_a_remote(repository: Callable[[str], Path]) -> None:
    folder = repository("main") / "images of cells" / "a"
    folder.mkdir(parents=True)
    (folder / "1 +.npy").write_bytes(bytes(range(200)))
    (repository("main") / "other.npy").write_bytes(b"other")
    remote: Any = open_remote("hf://datasets/some/cells/images of cells/")
    assert [found.key for found in remote.list()] == [found.key for found in remote.list("a")] == ["a/1 +.npy"]
    found = remote.head("a/1 +.npy")
    assert (found.key, found.nbytes, found.digest) == ("a/1 +.npy", 200, "")
    assert bytes(memoryview(remote.get(found, 7, 9))) == b"\7\10"
    assert bytes(memoryview(remote.get_whole("a/1 +.npy"))) == bytes(range(200))
    assert remote.head("other.npy") is None


def test_samples_and_sample_store(repository: Callable[[str], Path], tmp_path: Path) -> None:
    pytest.importorskip("torch")
    from gpuload.samples import SampleLoader, SampleSet

    (folder := repository("main") / "train").mkdir()
    for k in range(6):
        np.save(folder / f"id-{k}.npy", np.full(400, k, np.float32))
    labels = {f"id-{k}": k for k in range(6)}
    address = "hf://datasets/some/cells/train/"
    samples = SampleSet(list(labels), labels, address, suffix=".npy", decode="npy")
    for X, y in SampleLoader(samples, batch_size=3):
        assert X[:, -1].tolist() == y.tolist()
    with SampleStore(tmp_path / "store", open_remote(address), budget="1MiB") as store:  # by processes of its own
        until = time.monotonic() + 30
        while store.stats()["n_fetched"] < 6 and time.monotonic() < until:
            time.sleep(0.05)
        assert store.stats()["n_fetched"] == 6
        assert store.stats()["n_quarantined"] == 0


def test_access_requires_a_valid_token(
    repository: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch, plain: Any
) -> None:
    shutil.copy(plain.path, repository("main") / "cells.h5ad")
    address = "hf://datasets/some/cells/cells.h5ad"
    closed = r"^hf://datasets/some/cells: there is no such repository, or it is not open to you; check its name, accept"
    with pytest.raises(ReadError, match=closed):
        batches(address, storage_options={"anonymous": True})
    with pytest.raises(ReadError, match=closed):
        batches(address, storage_options={"token": "hf_wrong"})
    with pytest.raises(ReadError, match=r"^hf://datasets/some/cell: there is no such repository"):
        batches("hf://datasets/some/cell/cells.h5ad")
    monkeypatch.delenv("HF_TOKEN")
    monkeypatch.setattr("huggingface_hub.get_token", lambda: None)
    assert_same(batches(address, storage_options={"token": "hf_token"}), batches(plain.path))


@pytest.mark.parametrize(
    ("address", "options", "error", "message"),
    [
        (
            "hf://datasets/cells",
            {},
            PlanError,
            "hf://datasets/cells: it names no repository; expected hf://datasets/OW",
        ),
        ("hf://", {}, PlanError, "hf://: it names no repository; expected hf://datasets/OWNER/NAME/PATH, or with a"),
        ("hf://datasets/some/ce lls/x.h5ad", {}, PlanError, "hf://datasets/some/ce lls: it names no repository ("),
        (
            "hf://datasets/some/cells@v3/x.h5ad",
            {},
            ReadError,
            "hf://datasets/some/cells@v3: the repository has no such branch, tag or commit. Check the address.",
        ),
        (
            "hf://datasets/some/cells/x.h5ad",
            {"endpoint": "x"},
            PlanError,
            "hf://datasets/some/cells: storage_options has 'endpoint', which is not a setting for such an address; ex",
        ),
    ],
)
def test_invalid_addresses_are_refused(
    repository: Callable[[str], Path], address: str, options: Any, error: type[Exception], message: str
) -> None:
    with pytest.raises(error) as caught:
        gpuload.open_loader(address, storage_options=options or None, device="cpu")
    assert str(caught.value).startswith(message)


def test_busy_hub_is_retried_then_reported(
    repository: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch, plain: Any
) -> None:
    shutil.copy(plain.path, repository("main") / "cells.h5ad")
    monkeypatch.setattr(Hub, "busy", 1)
    assert_same(batches("hf://datasets/some/cells/cells.h5ad"), batches(plain.path))
    monkeypatch.setattr(Hub, "busy", 1)
    with pytest.raises(BusyError, match=r"^hf://datasets/some/cells: the Hub does not answer \(.*503"):
        hub.Repository("hf://datasets/some/cells", at="1" * 40).file("cells.h5ad")
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(BusyError, match=r"the Hub does not answer \(.*\); try again later, or check the network\."):
        hub.Repository("hf://datasets/some/cells").file("cells.h5ad")


def test_addresses_are_split_into_repository_and_path() -> None:
    split = hub.split_address
    assert split("hf://datasets/some/cells") == ("hf://datasets/some/cells", "")
    assert split("hf://datasets/some/cells/a/b.h5ad") == ("hf://datasets/some/cells", "a/b.h5ad")
    assert split("hf://some/model@v1/x.npy") == ("hf://some/model@v1", "x.npy")
    assert split("hf://spaces/some/space/x.npy") == ("hf://spaces/some/space", "x.npy")
    at = "hf://datasets/some/cells@refs/pr/7"
    assert split(f"{at}/x.npy") == (at, "x.npy")
    urls = [hub.Repository(split(f"hf://{kind}some/x/y")[0], at="f00").url for kind in ("datasets/", "spaces/", "")]
    assert [url.removeprefix("https://huggingface.co/") for url in urls] == [
        "datasets/some/x/resolve/f00",
        "spaces/some/x/resolve/f00",
        "some/x/resolve/f00",
    ]
    assert np.all([url.startswith("https://") for url in urls])
