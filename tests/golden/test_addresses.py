"""Files at addresses: batches equal those of the same file on disk, and take few requests."""

from __future__ import annotations

import gzip
import json
import pickle
import shutil
import threading
import traceback
import zlib
from collections import Counter
from contextlib import nullcontext
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar
from urllib.parse import unquote, urlsplit

import anndata
import h5py
import numpy as np
import pytest
import scipy.sparse

pytest.importorskip("obstore")
pytest.importorskip("zarr", minversion="3.0")

import gpuload
from benchmarks.s3server import start
from gpuload.cache import BlockRemote, SampleStore
from gpuload.errors import CorruptDataError, PlanError, ReadError, StoreError
from gpuload.formats import zarr_remote
from gpuload.formats.addresses import Address
from gpuload.remote import ObjectRemote, open_remote
from tests import several, zarr_writers
from tests.other_forms import FORMS, write_parquet
from tests.writers import counts

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from benchmarks.s3server import Running
    from tests.other_forms import Form
    from tests.variants import Stored

    Parquet = Callable[[str], tuple[Form, Path]]

HDF5 = (
    "anndata-csr-gzip",
    "anndata-dense-gzip",
    "csr-contiguous",
    "csr-compact",
    "csr-zstd-shuffle",
    "csr-blosc-lz4-shuffle",
    "dense-one-column-tiles",
    "csr-absent-chunks-3",
    "csr-userblock-512",
    "csr-libver-latest",
    "csr-old-compound",
    "csr-1x53",  # of which HDF5 reads 8 bytes at once, as it does of the begin of a file that it opens
    "layer-csr",
    "raw",
)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    root = tmp_path_factory.mktemp("s3")
    (root / "data").mkdir()
    with start(root) as running:
        remote = open_remote("s3://data", **options(running))
        assert remote.head("none") is None  # obstore's own threads start once per process
        yield running


@pytest.fixture(autouse=True)
def _no_index(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("GPULOAD_INDEX", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def options(server: Running) -> dict[str, Any]:
    return {"endpoint": server.url, "region": "us-east-1", "anonymous": True}


def put(server: Running, path: Path) -> str:
    """Put a file or folder into the bucket; return its name there."""
    place = server.root / "data" / path.name
    if not place.exists():
        (shutil.copytree if path.is_dir() else shutil.copy)(path, place)
    return path.name


def batches(paths: Any, **settings: Any) -> list[tuple[np.ndarray, np.ndarray, dict[str, np.ndarray]]]:
    settings = {"batch_size": 7, "fetch_factor": 3, "block_size": 2, "seed": 1, **settings}
    with gpuload.open_loader(paths, **settings) as loader:
        return [(batch.X.copy(), batch.rows, dict(batch.obs)) for batch in loader]


def assert_same(far: list[Any], near: list[Any]) -> None:
    assert len(far) == len(near)
    for (X, rows, obs), (X_near, rows_near, obs_near) in zip(far, near, strict=True):
        np.testing.assert_array_equal(X, X_near)
        np.testing.assert_array_equal(rows, rows_near)
        assert obs.keys() == obs_near.keys()
        for name in obs:
            np.testing.assert_array_equal(obs[name], obs_near[name])


@pytest.mark.parametrize("scheme", ["s3", "http"])
@pytest.mark.parametrize("name", HDF5)
def test_hdf5_file_reads_the_same_as_on_disk(
    server: Running, store_variant: Callable[[str], Stored], name: str, scheme: str
) -> None:
    stored = store_variant(name)
    key = put(server, stored.path)
    columns = ["cell_line", "depth"]
    address = f"s3://data/{key}" if scheme == "s3" else f"{server.url}/data/{key}"
    reached = {"storage_options": options(server)} if scheme == "s3" else {}
    far = batches(address, layer=stored.layer, obs=columns, **reached)
    assert_same(far, batches(stored.path, layer=stored.layer, obs=columns))


@pytest.mark.parametrize("zarr_format", [2, 3])
@pytest.mark.parametrize("scheme", ["s3", "http"])
def test_zarr_image_array_reads_the_same_as_on_disk(
    server: Running, tmp_path: Path, scheme: str, zarr_format: int
) -> None:
    import zarr

    images = np.random.default_rng(0).integers(0, 200, (23, 3, 5, 4)).astype(np.uint8)
    path = tmp_path / f"images{zarr_format}.zarr"
    how: dict[str, Any] = {"shape": images.shape, "dtype": images.dtype, "chunks": (6, 2, 5, 4)}
    zarr.create_array(str(path), zarr_format=zarr_format, **how)[:] = images
    key = put(server, path)
    address = f"s3://data/{key}" if scheme == "s3" else f"{server.url}/data/{key}"
    reached = {"storage_options": options(server)} if scheme == "s3" else {}
    far = batches(address, **reached)
    assert_same(far, batches(path))
    np.testing.assert_array_equal(far[0][0], images[far[0][1]])


@pytest.mark.parametrize("scheme", ["s3", "http"])
@pytest.mark.parametrize("name", [name for name in zarr_writers.FORMS if "zip" not in name][::9])
def test_zarr_folder_reads_the_same_as_on_disk(server: Running, name: str, scheme: str) -> None:
    layer = zarr_writers.FORMS[name].layer
    path = zarr_writers.written(name)
    key = put(server, path)
    address = f"s3://data/{key}" if scheme == "s3" else f"{server.url}/data/{key}"
    reached = {"storage_options": options(server)} if scheme == "s3" else {}
    assert_same(batches(address, layer=layer, **reached), batches(path, layer=layer))


def test_listing_on_a_web_server_is_refused(server: Running, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "collection.zarr"
    zarr_writers.collection(path, 2)
    address = f"{server.url}/data/{put(server, path)}"
    words = rf"^{address}: a web server cannot list what is in it; .* example '{address}/dataset_0', or of several as a"
    with pytest.raises(ReadError, match=words):
        gpuload.open_loader(address)
    assert_same(batches([f"{address}/dataset_{number}" for number in range(2)]), batches(path))
    (server.root / "data/experiment/__group").mkdir(parents=True)
    (server.root / "data/experiment/__group/1").write_text("")
    for name in ("experiment", "experiment/ms/RNA", "none"):
        address = f"{server.url}/data/{name}"
        with pytest.raises(ReadError, match=rf"^{address}: no such object, and a web server lists no folders\. Check"):
            gpuload.open_loader(address)
    path = tmp_path / "chunks.zarr"
    zarr_writers.csr(path)
    address = f"{server.url}/data/{put(server, path)}"
    monkeypatch.setattr(zarr_remote, "MAX_ASKED", 2)
    words = rf"^{address}: /\S+ may have more than 2 objects, and a web server cannot .* with larger chunks or shards"
    with pytest.raises(ReadError, match=words):
        gpuload.open_loader(address)


class ObjectPath:
    """A path of universal_pathlib to an object, as far as it is asked: it is not os.PathLike."""

    storage_options: ClassVar[dict[str, Any]] = {"anon": True}

    def __init__(self, address: str) -> None:
        self.address = address

    def as_uri(self) -> str:
        return self.address


def test_path_of_universal_pathlib_is_read_as_its_address(server: Running, plain: Stored) -> None:
    address, reached = f"s3://data/{put(server, plain.path)}", options(server)
    near = batches(plain.path)
    assert_same(batches(ObjectPath(address), storage_options=reached), near)
    assert_same(batches([ObjectPath(address)], storage_options=reached), near)
    with gpuload.open_loader(ObjectPath(address), obs="source_file", storage_options=reached) as loader:
        assert loader.categories["source_file"].tolist() == [address]
    names = gpuload.obs_names(ObjectPath(address), storage_options=reached)
    assert names.tolist() == gpuload.obs_names(plain.path).tolist()


@pytest.mark.parametrize("name", ["my cells.h5ad", "100%.h5ad", "a%20b.h5ad", "größe #1?.h5ad"])
def test_file_address_is_that_of_a_path_whether_encoded_or_not(name: str, plain: Stored, tmp_path: Path) -> None:
    path = tmp_path / name
    shutil.copy(plain.path, path)
    for address in (path.as_uri(), f"file://{path}", f"{tmp_path.as_uri()}/*.h5ad"):
        assert_same(batches(address), batches(path))
    (tmp_path / "a%20b").mkdir()
    assert open_remote((tmp_path / "a%20b").as_uri()).name == open_remote(f"file://{tmp_path}/a%20b").name
    with pytest.raises(ReadError, match=r"/no cells\.h5ad: no such file"):
        batches((tmp_path / "no cells.h5ad").as_uri())


@pytest.mark.parametrize("scheme", ["gs", "az"])
def test_google_and_azure_addresses_read_the_same_as_on_disk(server: Running, plain: Stored, scheme: str) -> None:
    """Google's interface equals S3's for these requests; so does Azure's, as long as nothing is listed."""
    reached: dict[str, Any] = {"anonymous": True}
    reached |= {"base_url": server.url} if scheme == "gs" else {"endpoint": server.url, "account_name": "any"}
    address = f"{scheme}://data/{put(server, plain.path)}"
    assert_same(batches(address, storage_options=reached), batches(plain.path))
    if scheme == "gs":
        path = zarr_writers.written("v3-csr-sharded-none")
        address = f"{scheme}://data/{put(server, path)}"
        assert_same(batches(address, storage_options=reached), batches(path))
        with pytest.raises(ReadError, match=r"gs://data/none\.h5ad: no such object"):
            batches("gs://data/none.h5ad", storage_options=reached)


@pytest.mark.parametrize("suffix", ["rna", "mod/prot"])
def test_modality_reads_the_same_as_on_disk(server: Running, tmp_path: Path, suffix: str) -> None:
    from tests.other_forms import mudata

    path = str(mudata(tmp_path, suffix.rpartition("/")[2]).path)
    key = put(server, tmp_path / "cells.h5mu")
    reached = {"storage_options": options(server)}
    for at, how in (("s3:/", reached), (server.url, {})):
        assert_same(batches(f"{at}/data/{key}/{suffix}", **how), batches(f"{path}/{suffix}"))
        with pytest.raises(StoreError, match="there is no modality 'none'"):
            batches(f"{at}/data/{key}/none", **how)


def test_metadata_of_modalities_matrices_is_requested_once(
    server: Running, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Comparing the names of the cells requests no more of a matrix, whose rows its open store knows."""
    keys: Counter[str] = Counter()
    get = Address.content
    monkeypatch.setattr(
        Address, "content", lambda self, found, *most: keys.update([found.key]) or get(self, found, *most)
    )
    paths = {}
    for name in ("rna", "prot"):
        zarr_writers.by_anndata(tmp_path / f"{name} of {tmp_path.name}.zarr", 3, is_csr=True)
        paths[name] = f"s3://data/{put(server, tmp_path / f'{name} of {tmp_path.name}.zarr')}"
    with gpuload.open_loader(paths, storage_options=options(server)):
        pass
    of_matrices = {key: n for key, n in keys.items() if "/X/" in key and "/raw/" not in key}
    assert len(of_matrices) == 2 * len(["X", "data", "indices", "indptr"])
    assert set(of_matrices.values()) == {1}


PARQUET = (
    "parquet",
    "parquet-tahoe",
    "parquet-tahoe-small-pages",
    "parquet-version-2",
    "parquet-gzip",
    "parquet-delta",
)


@pytest.fixture
def parquet(server: Running, tmp_path: Path) -> Callable[[str], tuple[Form, Path]]:
    """Return a function that writes a Parquet form into the bucket and returns the form and its path there."""
    pytest.importorskip("pyarrow")

    def write(name: str) -> tuple[Form, Path]:
        folder = server.root / "data" / tmp_path.name
        folder.mkdir(exist_ok=True)
        form = FORMS[name](folder)
        return form, Path(form.path).relative_to(server.root)

    return write


@pytest.mark.parametrize("scheme", ["s3", "http"])
@pytest.mark.parametrize("name", PARQUET)
def test_parquet(server: Running, parquet: Parquet, name: str, scheme: str) -> None:
    form, there = parquet(name)
    near = batches(form.path, obs=list(form.obs))
    if scheme == "s3":
        far = batches(f"s3://{there}", obs=list(form.obs), storage_options=options(server))
    else:
        files = sorted(server.root.glob(str(there)))
        far = batches([f"{server.url}/{file.relative_to(server.root)}" for file in files], obs=list(form.obs))
    assert_same(far, near)


class Redirecting(BaseHTTPRequestHandler):
    """Redirects requests with the token to another server, with a new signature each time, as Hugging Face does."""

    protocol_version = "HTTP/1.1"
    to = ""
    signatures = count()

    def do_GET(self) -> None:
        is_known = self.headers.get("Authorization") == "Bearer hf_token"
        self.send_response(302 if is_known else 401)
        if is_known:
            self.send_header("Location", f"{self.to}{self.path.split('/main')[1]}?signature={next(self.signatures)}")
            self.send_header("X-Linked-ETag", '"of the object itself"')
            self.send_header("ETag", '"of this answer"')
        self.send_header("Content-Length", "0")
        self.end_headers()

    do_HEAD = do_GET  # noqa: N815 - the name that http.server asks for

    def log_message(self, *_: object) -> None:
        """Say nothing."""


def test_redirects_are_followed(
    server: Running, parquet: Parquet, plain: Stored, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Redirecting, "to", server.url)
    form, there = parquet("parquet-tahoe")
    files = sorted(server.root.glob(str(there)))
    assert len(files) > 1
    key = put(server, plain.path)
    token = {"client_options": {"default_headers": {"Authorization": "Bearer hf_token"}}}
    front = ThreadingHTTPServer(("127.0.0.1", 0), Redirecting)
    thread = threading.Thread(target=front.serve_forever)
    thread.start()
    try:
        address = f"http://127.0.0.1:{front.server_port}/datasets/some/cells/resolve/main"
        far = batches(f"{address}/data/{key}", obs=["cell_line"], storage_options=token)
        assert_same(far, batches(plain.path, obs=["cell_line"]))
        addresses = [f"{address}/{file.relative_to(server.root)}" for file in files]
        far = batches(addresses, obs=list(form.obs), storage_options=token)
        assert_same(far, batches(form.path, obs=list(form.obs)))
        with pytest.raises(ReadError, match=r"access was denied \(401 Unauthorized.*; check the address and the cred"):
            batches(f"{address}/data/{key}")
    finally:
        front.shutdown()
        thread.join()
        front.server_close()


class Careless(BaseHTTPRequestHandler):
    """A web server of one file that sends only the validators it is configured with."""

    content = b""
    validators: ClassVar[dict[str, str]] = {}

    def do_GET(self) -> None:
        part, status = slice(0, len(self.content)), 200
        if "Range" in self.headers:
            first, last = self.headers["Range"].removeprefix("bytes=").split("-")
            part, status = slice(int(first), min(int(last) + 1, len(self.content))), 206
        self.send_response(status)
        if status == 206:
            self.send_header("Content-Range", f"bytes {part.start}-{part.stop - 1}/{len(self.content)}")
        for name, value in self.validators.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(part.stop - part.start))
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(self.content[part])

    do_HEAD = do_GET  # noqa: N815 - the name that http.server asks for

    def log_message(self, *_: object) -> None:
        """Say nothing."""


@pytest.mark.parametrize(
    "validators",
    [{}, {"Last-Modified": "Thu, 01 Jan 2026 00:00:00 GMT"}, {"ETag": 'W/"1"'}],
    ids=["no", "date", "weak"],
)
def test_nothing_is_kept_of_a_file_without_a_strong_etag(
    validators: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing of the old file is kept: its row offsets would cut wrong cells from the new file's bytes."""
    monkeypatch.setenv("GPULOAD_INDEX", str(tmp_path / "index"))
    monkeypatch.setattr(Careless, "validators", validators)
    rng, contents = np.random.default_rng(0), []
    for number in range(2):
        X = np.zeros((200, 50), dtype=np.float32)
        X.ravel()[rng.permutation(X.size)[:2000]] = rng.integers(1, 9, 2000)
        anndata.AnnData(scipy.sparse.csr_matrix(X)).write_h5ad(tmp_path / f"{number}.h5ad")
        contents.append(((tmp_path / f"{number}.h5ad").read_bytes(), X))
    assert len(contents[0][0]) == len(contents[1][0])
    front = ThreadingHTTPServer(("127.0.0.1", 0), Careless)
    thread = threading.Thread(target=front.serve_forever)
    thread.start()
    try:
        address = f"http://127.0.0.1:{front.server_port}/cells.h5ad"
        for content, X in contents:
            monkeypatch.setattr(Careless, "content", content)
            with gpuload.open_loader(address, shuffle=False, batch_size=200, device="cpu") as loader:
                np.testing.assert_array_equal(next(iter(loader)).X, X)
        assert not (tmp_path / "index").exists()
        sent = "only a weak ETag" if "ETag" in validators else "no ETag"
        with (
            SampleStore(
                tmp_path / "cache", BlockRemote(open_remote(address.rpartition("/")[0])), n_processes=0
            ) as store,
            pytest.raises(StoreError, match=rf"sends {sent}, so a cached copy might be of an older state; open it"),
        ):
            gpuload.open_loader(address, cache=store)
    finally:
        front.shutdown()
        thread.join()
        front.server_close()


class Bucket(BaseHTTPRequestHandler):
    """Files as object stores serve them over HTTP, to requests whose query is the signature for a GET."""

    protocol_version = "HTTP/1.1"
    root = Path()
    signature = ""
    of_folder: ClassVar[tuple[int, bytes]] = (404, b"")
    of_nothing: ClassVar[tuple[int, bytes]] = (404, b"")

    def do_GET(self) -> None:
        address = urlsplit(self.path)
        path, headers = self.root / unquote(address.path).strip("/"), {}
        if self.signature and (address.query, self.command) != (self.signature, "GET"):
            status, body = 403, f"<Code>SignatureDoesNotMatch</Code>{self.path}".encode()
        elif not path.is_file():
            status, body = self.of_folder if path.is_dir() else self.of_nothing
        else:
            status, body = 200, path.read_bytes()
            headers["ETag"] = f'"{zlib.crc32(body):x}"'
            if "Range" in self.headers:
                first, last = map(int, self.headers["Range"].removeprefix("bytes=").split("-"))
                headers["Content-Range"] = f"bytes {first}-{min(last, len(body) - 1)}/{len(body)}"
                status, body = 206, body[first : last + 1]
        self.send_response(status)
        for name, value in {**headers, "Content-Length": str(len(body))}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)

    do_HEAD = do_GET  # noqa: N815 - the name that http.server asks for

    def log_message(self, *_: object) -> None:
        """Say nothing."""


@pytest.fixture
def bucket(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    monkeypatch.setattr(Bucket, "root", tmp_path)
    front = ThreadingHTTPServer(("127.0.0.1", 0), Bucket)
    thread = threading.Thread(target=front.serve_forever, args=(0.01,))
    thread.start()
    yield f"http://127.0.0.1:{front.server_port}"
    front.shutdown()
    thread.join()
    front.server_close()


def test_signed_url_is_sent_unchanged_and_never_shown(
    bucket: str, plain: Stored, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The query is sent unchanged and never shown; with another signature it is still the same file."""
    monkeypatch.setenv("GPULOAD_INDEX", str(tmp_path / "index"))
    shutil.copy(plain.path, tmp_path / "cells.h5ad")
    near = batches(plain.path, obs=["cell_line"])
    for secret in ("0123456789abcdef%2F+w%3D%3D", "another"):
        query = f"X-Amz-Expires=60&x-id=GetObject&X-Amz-Signature={secret}"
        monkeypatch.setattr(Bucket, "signature", query)
        address = f"{bucket}/cells.h5ad?{query}"
        assert_same(batches(address, obs=["cell_line"]), near)
        with gpuload.open_loader([address] * 2, obs="source_file") as loader:
            assert loader.categories["source_file"].tolist() == [f"{bucket}/cells.h5ad"]
        assert gpuload.obs_names(address).tolist() == gpuload.obs_names(plain.path).tolist()
        assert len(list((tmp_path / "index").iterdir())) == 1
    monkeypatch.setattr(Bucket, "signature", "new")
    said = r"/cells\.h5ad: access was denied \(403 Forbidden: SignatureDoesNotMatch\); get a new address, as this one"
    with pytest.raises(ReadError, match=said) as caught:
        gpuload.open_loader(address)
    assert secret not in "".join(traceback.format_exception(caught.value))
    with (
        SampleStore(tmp_path / "cache", BlockRemote(open_remote(bucket)), n_processes=0) as store,
        pytest.raises(PlanError, match=r"/cells\.h5ad: a cache reads it as its own remote does, without what follows"),
    ):
        gpuload.open_loader(address, cache=store)


@pytest.mark.filterwarnings("ignore:Writing zarr v2 data")
@pytest.mark.parametrize("form", ["h5ad", "zarr", "parquet"])
def test_source_file_keeps_no_credentials(server: Running, plain: Stored, tmp_path: Path, form: str) -> None:
    """Categories are pickled into checkpoints and sent to other processes: names, not the way to the files."""
    paths = [tmp_path / f"credentials{number}.{form}" for number in range(2)]
    for path in paths:
        if form == "h5ad":
            shutil.copy(plain.path, path)
        elif form == "zarr":
            anndata.AnnData(counts(20, 9)).write_zarr(path)
        else:
            write_parquet(path, counts(20, 9), {})
    addresses = [f"s3://data/{put(server, path)}" for path in paths]
    secret = {"endpoint": server.url, "region": "us-east-1", "access_key_id": "AK", "secret_access_key": "TOP-SECRET"}
    with gpuload.open_loader(addresses, obs="source_file", storage_options=secret) as loader:
        found = loader.categories["source_file"]
        assert [type(name) for name in found] == [str, str]
        assert found.tolist() == addresses
        assert b"TOP-SECRET" not in pickle.dumps(found)


def test_query_string_distinguishes_files(bucket: str, plain: Stored, tmp_path: Path) -> None:
    shutil.copy(plain.path, tmp_path / "download")
    addresses = [f"{bucket}/download?id={number}&token={'secret' * 9}" for number in range(2)]
    with gpuload.open_loader(addresses, obs="source_file", shuffle=False) as loader:
        names = loader.categories["source_file"].tolist()
        assert [name.partition("&token=~")[0] for name in names] == [f"{bucket}/download?id={n}" for n in range(2)]
        assert "secret" not in repr(names)
        assert np.unique(loader.obs["source_file"].cat.codes, return_counts=True)[1].tolist() == [len(plain.dense)] * 2
    with pytest.raises(ReadError, match=r"/\*\?id=1: a web server cannot list what matches a pattern; pass"):
        gpuload.open_loader(f"{bucket}/*?id=1")


@pytest.mark.parametrize(
    ("of_folder", "of_nothing"),
    [((403, b""), 404), ((200, b"<html>its page</html>"), 404), ((403, b""), 403)],  # as S3 if one may not list
    ids=["denied", "page", "denied-too"],
)
@pytest.mark.parametrize("name", ["v2-csr-lz4", "v3-csr-sharded-lz4"])
def test_zarr_opens_whatever_the_server_answers_for_folders(
    bucket: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    of_folder: tuple[int, bytes],
    of_nothing: int,
) -> None:
    monkeypatch.setattr(Bucket, "of_folder", of_folder)
    monkeypatch.setattr(Bucket, "of_nothing", (of_nothing, b""))
    path = zarr_writers.written(name)
    shutil.copytree(path, tmp_path / "data" / "cells.zarr")
    far = batches(f"{bucket}/data/cells.zarr", obs=["cell_line", "depth"])
    assert_same(far, batches(path, obs=["cell_line", "depth"]))
    for missing in ("data/none.zarr", "data/none.h5ad"):
        with pytest.raises(ReadError, match=f"^{bucket}/{missing}: (no such object|access was denied)"):
            gpuload.open_loader(f"{bucket}/{missing}")


def test_denied_chunk_is_not_taken_for_a_missing_one(
    bucket: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Bucket, "of_nothing", (403, b""))
    path = tmp_path / "cells.zarr"
    shutil.copytree(zarr_writers.written("v3-csr-lz4"), path)
    (path / "X/data/c/0").unlink()
    with pytest.raises(ReadError, match=r"cells\.zarr: /X/data/c/0: access was denied, which some servers also say of"):
        gpuload.open_loader(f"{bucket}/cells.zarr")


def test_parquet_by_folder_pattern_and_name(server: Running, parquet: Parquet) -> None:
    form, there = parquet("parquet-tahoe")
    near, reached = batches(form.path), {"storage_options": options(server)}
    assert_same(batches(f"s3://{there.parent}", **reached), near)
    (server.root / there.parents[1] / "notes").write_text("of no pattern below")
    assert_same(batches(f"s3://{there.parents[1]}/*/train-0000?-*.parquet", **reached), near)
    first, second = (server.root / there.parent / f"train-0000{k}-of-00002.parquet" for k in range(2))
    assert_same(batches([first, f"s3://{second.relative_to(server.root)}"], **reached), near)  # one table of cells
    first.rename(first.with_name("cells"))  # recognised by its contents
    one = batches(f"s3://{there.parent}/cells", **reached)
    assert_same(one, batches(first.with_name("cells")))
    with pytest.raises(ReadError, match=r"/\*\.parquet: no file matches this pattern"):
        gpuload.open_loader(f"s3://{there.parents[1]}/*.parquet", **reached)
    with pytest.raises(ReadError, match="a web server cannot list what matches a pattern; pass the addresses as"):
        gpuload.open_loader(f"{server.url}/{there}")


@pytest.mark.parametrize("name", ["h5ad", "zarr", "parquet", "mudata"])
def test_conditions_and_joins(server: Running, parquet: Parquet, plain: Stored, tmp_path: Path, name: str) -> None:
    if name == "parquet":
        form, there = parquet("parquet-tahoe")
        near, far = str(form.path), f"s3://{there}"
    elif name == "mudata":
        near = str(FORMS["mudata-rna"](tmp_path).path)
        far = f"s3://data/{put(server, tmp_path / 'cells.h5mu')}/rna"
    else:
        path = plain.path if name == "h5ad" else zarr_writers.written("v3-csr-sharded-none")
        near, far = str(path), f"s3://data/{put(server, path)}"
    other = several.write(tmp_path / "other", [several.part(0, genes=["gene_003", "elsewhere"])])[0]
    for settings in ({"join": "outer"}, {"join": ["elsewhere", "gene_003", "gene_001"], "where": "depth > 0"}):
        same = {**settings, "obs": ["depth"]}
        assert_same(batches([far, other], storage_options=options(server), **same), batches([near, other], **same))


def test_parquet_index_is_not_reused_after_a_change(server: Running, parquet: Parquet) -> None:
    form, there = parquet("parquet-tahoe")

    def n_requests_to_open() -> int:
        before = server.n_gets()
        with gpuload.open_loader(f"s3://{there}", storage_options=options(server)) as loader:
            assert loader.n_obs == len(form.dense)
            return server.n_gets() - before

    n_first = n_requests_to_open()
    assert n_requests_to_open() <= n_first - 4, "the index of the first opening was not used"
    part = server.root / there.parent / "train-00000-of-00002.parquet"
    write_parquet(part.with_name("new"), counts(seed=5)[:70], {}, first=3, leader=-2.0)
    part.with_name("new").replace(part)
    assert_same(batches(f"s3://{there}", storage_options=options(server)), batches(form.path))


def test_inaccessible_gene_table_is_treated_as_missing(
    server: Running, parquet: Parquet, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    form, there = parquet("parquet")
    real = Address.head

    def head(self: Address, key: str) -> Any:
        if "gene_metadata" in key:  # as S3 answers clients that may not list
            raise ReadError(f"{key}: access was denied")
        return real(self, key)

    monkeypatch.setattr(Address, "head", head)
    assert_same(batches(f"s3://{there}", storage_options=options(server)), batches(form.path))
    assert "gene_metadata.parquet: treated as missing" in caplog.text


def test_folder_needs_one_client_and_one_listing(
    server: Running, parquet: Parquet, monkeypatch: pytest.MonkeyPatch
) -> None:
    from gpuload.formats import addresses

    _, there = parquet("parquet-tahoe")
    opened, heads = [], server.counts().get("HEAD 200", 0)
    real = addresses.open_remote
    monkeypatch.setattr(addresses, "open_remote", lambda url, **o: opened.append(url) or real(url, **o))
    batches(f"s3://{there.parent}", storage_options=options(server))
    assert len(opened) == 2, "a client of the folder, and one to look for the table of genes"
    assert server.counts().get("HEAD 200", 0) - heads <= 1, "a question for each file"


def test_folder_and_list_of_files_read_the_same(server: Running, store_variant: Callable[[str], Stored]) -> None:
    stored = [store_variant("anndata-csr-gzip"), store_variant("csr-zstd-shuffle")]
    folder = server.root / "data" / "plates"
    folder.mkdir(exist_ok=True)
    for number, one in enumerate(stored):
        if not (folder / f"{number}.h5ad").exists():
            shutil.copy(one.path, folder / f"{number}.h5ad")
    near = batches([one.path for one in stored])
    assert_same(batches("s3://data/plates", storage_options=options(server)), near)
    each = [f"s3://data/plates/{number}.h5ad" for number in range(2)]
    assert_same(batches(each, storage_options=options(server)), near)


@pytest.mark.parametrize("form", ["h5ad", "zarr"])
def test_pattern_selects_matching_files(server: Running, plain: Stored, tmp_path: Path, form: str) -> None:
    folder = server.root / "data" / tmp_path.name
    for name in (f"plate1.{form}", f"plate2.{form}", f"deeper/plate3.{form}", f"other.{form}"):
        (folder / name).parent.mkdir(exist_ok=True, parents=True)
        if form == "h5ad":
            shutil.copy(plain.path, folder / name)
        else:
            shutil.copytree(zarr_writers.written("v3-csr-sharded-none"), folder / name)
    (folder / f"._plate1.{form}").write_bytes(b"macOS leaves such a file beside each that it copies")
    for pattern in ("plate*", f"*plate*.{form}"):
        far = batches(f"s3://data/{folder.name}/{pattern}", storage_options=options(server))
        assert_same(far, batches([folder / f"plate{k}.{form}" for k in (1, 2)]))


def test_a_large_chunk_tree_is_read_a_level_at_a_time(
    server: Running, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from gpuload.remote import file as remote_file
    from tests import writers

    for name, value in (("_BLOCK", 8192), ("_WHOLE", 0), ("_BEGIN", 1), ("_END", 1)):
        monkeypatch.setattr(remote_file, name, value)
    X = writers.counts(3000, 40)
    path = tmp_path / "many_chunks.h5ad"
    writers.write_h5ad(
        path,
        lambda f: writers.write_csr(
            f, "X", X, data={"chunks": (16,), "compression": "gzip"}, indices={"chunks": (24,)}
        ),
        n_obs=3000,
        n_vars=40,
    )
    with h5py.File(path) as file:
        n_chunks = file["X/data"].id.get_num_chunks()
    assert n_chunks > 1000
    address = f"s3://data/{put(server, path)}"

    def n_requests_to_open() -> int:
        before = server.counts().get("GET 206", 0)
        with gpuload.open_loader(address, storage_options=options(server)) as loader:
            assert loader.n_obs == 3000
            return server.counts()["GET 206"] - before

    n_first = n_requests_to_open()
    assert n_first < n_chunks / 32, "a request for each node"
    assert n_requests_to_open() < n_first, "the index of the first opening was not used"


@pytest.mark.parametrize("blocks", ["one of the whole file", "small ones"])
def test_files_are_waited_for_together(
    server: Running, plain: Stored, blocks: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """h5py lets no other thread in while it waits, and there may be thousands of files."""
    from gpuload.remote import file as remote_file
    from gpuload.remote.source import RemoteSource

    if blocks == "small ones":
        for name, value in (("_BLOCK", 1024), ("_WHOLE", 0), ("_BEGIN", 1), ("_END", 1)):
            monkeypatch.setattr(remote_file, name, value)
    names = [f"{blocks.replace(' ', '-')}-{number}.h5ad" for number in range(4)]
    for name in names:
        shutil.copy(plain.path, server.root / "data" / name)
    meeting, n_met = threading.Barrier(len(names)), threading.local()
    read_many = RemoteSource.read_many

    def read_together(self: RemoteSource, *args: Any) -> None:
        n_met.n = getattr(n_met, "n", 0) + 1
        if n_met.n <= (2 if blocks == "small ones" else 1):
            meeting.wait(60)
        read_many(self, *args)

    monkeypatch.setattr(RemoteSource, "read_many", read_together)
    far = gpuload.open_loader(
        [f"s3://data/{name}" for name in names], obs=["cell_line"], storage_options=options(server)
    )
    monkeypatch.setattr(RemoteSource, "read_many", read_many)
    near = gpuload.open_loader([plain.path] * len(names), obs=["cell_line"])
    with far, near:
        for one, two in zip(far, near, strict=True):
            np.testing.assert_array_equal(one.X, two.X)
            np.testing.assert_array_equal(one.obs["cell_line"], two.obs["cell_line"])


def test_files_of_a_list_are_asked_for_together(
    server: Running, plain: Stored, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = [f"asked-{number}.h5ad" for number in range(4)]
    for name in names:
        shutil.copy(plain.path, server.root / "data" / name)
    meeting, head = threading.Barrier(len(names)), ObjectRemote.head

    def head_together(self: ObjectRemote, key: str) -> Any:
        meeting.wait(60)
        return head(self, key)

    monkeypatch.setattr(ObjectRemote, "head", head_together)
    reached = options(server)
    with gpuload.open_loader([f"s3://data/{name}" for name in names], storage_options=reached) as loader:
        assert loader.n_obs == len(names) * plain.expected.shape[0]


def test_an_address_given_twice_is_warned_of(server: Running, plain: Stored, caplog: pytest.LogCaptureFixture) -> None:
    address = f"s3://data/{put(server, plain.path)}"
    with gpuload.open_loader([address, address], storage_options=options(server)) as loader:
        assert loader.n_obs == 2 * len(plain.dense)
    (said,) = [record for record in caplog.records if record.getMessage().startswith("paths: ")]
    assert f"{address} is given 2 times" in said.getMessage()
    assert type(said.args[0]) is str  # no credentials


def test_list_of_files_needs_one_client(server: Running, plain: Stored, monkeypatch: pytest.MonkeyPatch) -> None:
    from gpuload.formats import addresses

    name, opened, real = put(server, plain.path), [], addresses.open_remote
    monkeypatch.setattr(addresses, "open_remote", lambda url, **o: opened.append(url) or real(url, **o))
    batches([f"s3://data/{name}"] * 3, storage_options=options(server))
    assert opened == ["s3://data"]


@pytest.mark.parametrize(("n_calls", "most_held"), [(1, 1 << 20), (2, 1 << 20), (24, 0), (24, 1 << 20)])
def test_file_of_many_steps_is_waited_for_in_the_end(
    server: Running, plain: Stored, n_calls: int, most_held: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    from gpuload.formats import hdf5
    from gpuload.remote import file as remote_file

    for name, value in (("_BLOCK", 512), ("_WHOLE", 0), ("_BEGIN", 1), ("_END", 0), ("_BEHIND", 0), ("_BEYOND", 1)):
        monkeypatch.setattr(remote_file, name, value)
    monkeypatch.setattr(remote_file, "_MAX_BLOCKS_AHEAD", 1)
    monkeypatch.setattr(hdf5, "_MOST_CALLS", n_calls)
    monkeypatch.setattr(hdf5, "_MOST_HELD", most_held)
    address = f"s3://data/{put(server, plain.path)}"
    far = batches(address, obs=["cell_line"], storage_options=options(server))
    assert_same(far, batches(plain.path, obs=["cell_line"]))


def test_shard_index_is_not_reused_after_a_change(server: Running, tmp_path: Path) -> None:
    path = tmp_path / "kept.zarr"
    zarr_writers.csr(path, shards=True)
    place = server.root / "data" / put(server, path)
    reached = {"storage_options": options(server)}

    def n_requests_to_open() -> int:
        before = server.n_gets()
        with gpuload.open_loader("s3://data/kept.zarr", **reached):
            return server.n_gets() - before

    n_shards = sum(1 for key in ("data", "indices") for _ in (path / "X" / key / "c").iterdir())
    n_first = n_requests_to_open()
    assert n_shards > 4
    n_second = n_requests_to_open()
    assert n_second <= n_first - n_shards, "what the first opening kept was not used"
    zarr_writers.csr(tmp_path / "new.zarr", shards=True, compressors=zarr_writers.LZ4_SHUFFLED)
    shutil.rmtree(place)
    shutil.copytree(tmp_path / "new.zarr", place)
    assert n_requests_to_open() >= n_second + n_shards
    assert_same(batches("s3://data/kept.zarr", **reached), batches(tmp_path / "new.zarr"))
    shard = place / "X/data/c/1"
    shard.write_bytes((place / "X/data/c/0").read_bytes())
    (place / "X/indices/c/1").write_bytes((place / "X/indices/c/0").read_bytes())
    assert_same(batches("s3://data/kept.zarr", **reached), batches(place))


def block_store(tmp_path: Path, server: Running, budget: int = 1 << 30, **settings: Any) -> SampleStore:
    remote = open_remote("s3://data", **options(server))
    blocks = BlockRemote(remote, block_nbytes=settings.pop("block_nbytes", 4096))
    return SampleStore(tmp_path / "store", blocks, budget, n_processes=0, min_free=0, fetch=False, **settings)


@pytest.mark.parametrize("form", ["h5ad", "zarr", "parquet"])
def test_second_epoch_with_a_cache_makes_no_requests(
    server: Running, plain: Stored, parquet: Parquet, tmp_path: Path, form: str
) -> None:
    if form == "parquet":
        written, there = parquet("parquet-tahoe")
        path, address = written.path, f"s3://{there}"
    else:
        path = plain.path if form == "h5ad" else zarr_writers.written("v3-csr-sharded-none")
        address = f"s3://data/{put(server, path)}"
    settings = {"batch_size": 7, "fetch_factor": 3, "block_size": 2}
    with gpuload.open_loader(path, **settings) as loader:
        near = [[(b.X.copy(), b.rows, dict(b.obs)) for b in loader] for _ in range(2)]
    for is_empty in (True, False):
        with block_store(tmp_path, server) as store, gpuload.open_loader(address, cache=store, **settings) as loader:
            for epoch in range(2):
                before = server.n_gets()
                assert_same([(b.X.copy(), b.rows, dict(b.obs)) for b in loader], near[epoch])
                n_asked = server.n_gets() - before
                assert not n_asked or (is_empty and not epoch)
                assert loader.hit_ratio == 1 or is_empty
            assert 0 < (loader.hit_ratio or 0) < 1 or not is_empty


def test_full_cache_is_bypassed(server: Running, plain: Stored, tmp_path: Path) -> None:
    address = f"s3://data/{put(server, plain.path)}"
    with block_store(tmp_path, server, budget=4096) as store:
        assert_same(batches(address, cache=store), batches(plain.path))
        assert store.held_nbytes == 4096


def test_cache_finds_percent_encoded_names(bucket: str, plain: Stored, tmp_path: Path) -> None:
    (tmp_path / "a b").mkdir()
    shutil.copy(plain.path, tmp_path / "a b" / "my cells%20.h5ad")
    for base in (bucket, f"{bucket}/a%20b"):
        blocks = BlockRemote(open_remote(base))
        with SampleStore(tmp_path / f"store-{len(base)}", blocks, fetch=False, min_free=0) as store:
            assert_same(batches(f"{bucket}/a%20b/my%20cells%2520.h5ad", cache=store), batches(plain.path))
            assert store.held_nbytes


def test_cache_is_bound_to_one_query_string(bucket: str, tmp_path: Path) -> None:
    """An ETag holds for one address only; the query is part of the address, but its signature is not."""
    for query, is_other in (("?v=1&sig=a", False), ("?v=1&sig=b", False), ("?v=2", True), ("", True)):
        with pytest.raises(StoreError, match=r"it holds samples of .*\?v=1 in ") if is_other else nullcontext():
            SampleStore(tmp_path / "store", BlockRemote(open_remote(bucket + query)), fetch=False).close()


def test_a_changed_object_gets_new_blocks(server: Running, tmp_path: Path, store_variant: Any) -> None:
    place = server.root / "data" / "changing.h5ad"
    for name in ("anndata-csr-gzip", "csr-zstd-shuffle"):
        shutil.copy(store_variant(name).path, tmp_path / "copy")
        (tmp_path / "copy").rename(place)
        with block_store(tmp_path, server) as store:
            assert_same(batches("s3://data/changing.h5ad", cache=store), batches(store_variant(name).path))


def test_bad_addresses_and_options_are_refused(server: Running, plain: Stored, tmp_path: Path) -> None:
    put(server, plain.path)
    reached = options(server)
    with pytest.raises(PlanError, match=r"storage_options: it is for addresses such as 's3://bucket/atlas\.h5ad'"):
        gpuload.open_loader(plain.path, storage_options=reached)
    with pytest.raises(ReadError, match=r"s3://data/none\.h5ad: no such object\. Check the address\."):
        gpuload.open_loader("s3://data/none.h5ad", storage_options=reached)
    with pytest.raises(ReadError, match=r"^s3://data/none\.parquet: no such object\. Check the address\.$"):
        gpuload.open_loader(["s3://data/none.parquet", "s3://data/other.parquet"], storage_options=reached)
    (server.root / "empty").mkdir()
    with pytest.raises(ReadError, match=r"^s3://empty: no such object\. Check the address\.$"):
        gpuload.open_loader("s3://empty", storage_options=reached)
    with pytest.raises(PlanError, match=r"^s3://: it has no bucket or host; expected, for example, s3://bucket/"):
        gpuload.open_loader("s3://", storage_options=reached)
    np.save(server.root / "data" / "x.npy", np.zeros((3, 2)))
    with pytest.raises(StoreError, match=r"s3://data/x\.npy: HDF5, Parquet and zarr folders"):
        gpuload.open_loader("s3://data/x.npy", storage_options=reached)
    (server.root / "data" / "text.h5ad").write_text("no HDF5" * 1000)
    with pytest.raises(StoreError, match=r"s3://data/text\.h5ad: not a readable HDF5 file"):
        gpuload.open_loader("s3://data/text.h5ad", storage_options=reached)
    (server.root / "data" / "whole.h5ad.gz").write_bytes(gzip.compress(plain.path.read_bytes()))
    with pytest.raises(StoreError, match=r"s3://data/whole\.h5ad\.gz: not a readable HDF5 file .*; gunzip it first\.$"):
        gpuload.open_loader("s3://data/whole.h5ad.gz", storage_options=reached)
    with block_store(tmp_path, server) as store, pytest.raises(PlanError, match="the cache is for s3://data; open it"):
        gpuload.open_loader("s3://other/x.h5ad", cache=store)
    with (
        SampleStore(tmp_path / "whole", open_remote("s3://data", **reached), fetch=False) as store,
        pytest.raises(PlanError, match="cache: it keeps the objects of s3://data whole; expected a SampleStore over"),
    ):
        gpuload.open_loader("s3://data/x.h5ad", cache=store)


def test_inspect_accepts_addresses(
    server: Running,
    plain: Stored,
    parquet: Parquet,
    capsys: pytest.CaptureFixture[str],
) -> None:
    pytest.importorskip("tqdm")
    from gpuload.cli import main

    for path in (plain.path, zarr_writers.written("v3-csr-sharded-none"), parquet("parquet")[0].path):
        assert main(["inspect", str(path), "--json"]) == 0
        near = json.loads(capsys.readouterr().out)
        assert main(["inspect", f"{server.url}/data/{put(server, path)}", "--json"]) == 0
        far = json.loads(capsys.readouterr().out)
        assert [{**a, "file": ""} for a in far["arrays"]] == [{**a, "file": ""} for a in near["arrays"]]
        assert path.is_dir() or far["file_nbytes"] == near["file_nbytes"]


@pytest.mark.parametrize("form", ["h5ad", "cached", "zarr"])
def test_files_in_one_folder_are_read_like_one(server: Running, tmp_path: Path, form: str) -> None:
    """Else each would be planned and read by itself, a few requests at a time."""
    genes, folder = [f"gene_{i}" for i in range(30)], tmp_path / tmp_path.name
    parts = [several.part(seed, genes=genes, n_obs=20 + seed) for seed in range(4)]
    settings: dict[str, Any] = {"batch_size": 7, "fetch_factor": 12, "block_size": 2}
    if form == "zarr":
        import zarr

        paths = [folder / f"{number}.zarr" for number in range(4)]
        for path, part in zip(paths, parts, strict=True):
            whole = np.vstack([part.X.toarray()] * 2)[:30]
            zarr.create_array(str(path), shape=whole.shape, chunks=(7, 30), dtype="f4")[:] = whole
    else:
        settings["obs"] = ["depth"]
        paths = several.write(folder, parts[:3], compression="gzip") + several.write(tmp_path / "odd", parts[3:])
        paths[3] = paths[3].rename(folder / "odd.h5ad")  # without compression, so read by itself
    near, there, reached = batches(paths, **settings), put(server, folder), options(server)
    addresses = [f"s3://data/{there}/{path.name}" for path in paths]
    if form == "cached":
        blocks = BlockRemote(open_remote("s3://data", **reached))
        store = settings["cache"] = SampleStore(tmp_path / "cache", blocks, n_processes=0, fetch=False)
    else:
        store, settings["storage_options"] = nullcontext(), reached
    with store, gpuload.open_loader(addresses, seed=1, **settings) as loader:
        for _ in range(2):
            loader.set_epoch(0)
            assert_same([(batch.X.copy(), batch.rows, dict(batch.obs)) for batch in loader], near)
        n_reads = len(loader.store.recipe(np.array([[0, loader.n_obs]])).reads)
        assert n_reads == (1 if form == "zarr" else 4), "not one each for data and indices, and those of the odd file"
        assert (loader.hit_ratio or 0) >= (0.5 if form == "cached" else 0)
        sources = {layout.source for matrix in loader.store.matrices for layout in matrix.layouts}
    for source in sources:
        with pytest.raises(ReadError, match="the loader was closed"):
            source.read_into(np.empty(1, dtype=np.uint8), 0)


def test_joined_files_are_named_in_errors(server: Running, tmp_path: Path, no_leaks: None) -> None:
    genes = [f"gene_{i}" for i in range(30)]
    parts = [several.part(seed, genes=genes) for seed in range(3)]
    folder = tmp_path / tmp_path.name
    paths = several.write(folder, parts, compression="gzip")
    there = put(server, folder)
    addresses = [f"s3://data/{there}/{path.name}" for path in paths]
    with gpuload.open_loader(addresses, storage_options=options(server)) as loader:
        second = server.root / "data" / there / paths[1].name
        second.with_name("new").write_bytes(paths[2].read_bytes() + b"more")
        second.with_name("new").replace(second)
        with pytest.raises(ReadError, match=rf"^{addresses[1]}: the object was changed since it was listed; open it"):
            list(loader)
    with h5py.File(paths[2]) as file:
        where = file["X/data"].id.get_chunk_info(0)
    raw = bytearray(paths[2].read_bytes())
    raw[where.byte_offset + 10 : where.byte_offset + where.size] = bytes(where.size - 10)
    (server.root / "data" / there / paths[2].name).write_bytes(raw)
    with gpuload.open_loader(addresses[::2], storage_options=options(server)) as loader:
        words = rf"^{addresses[2]}: chunk 0 of /X/data at byte {where.byte_offset} is damaged"
        with pytest.raises(CorruptDataError, match=words):
            list(loader)


def test_small_files_take_few_requests_to_open(server: Running, tmp_path: Path) -> None:
    """Begin and end are fetched at once, and the genes' names then; nothing is asked of the object before that."""
    cells = several.part(0, genes=[f"ENSG{i:011}" for i in range(60_000)])
    path = several.write(tmp_path / tmp_path.name, [cells])[0]
    there = put(server, path.parent)
    before = server.counts()
    with gpuload.open_loader(f"s3://data/{there}/{path.name}", storage_options=options(server)) as loader:
        assert loader.var_names.tolist() == list(cells.var_names)
    asked = {kind: n - before.get(kind, 0) for kind, n in server.counts().items() if kind[:4] in ("GET ", "HEAD")}
    n_parts = -(-path.stat().st_size // (4 << 20))
    assert {kind: n for kind, n in asked.items() if n} == {"HEAD 200": 1, "GET 206": n_parts}


@pytest.mark.parametrize(("form", "n_most"), [("h5ad", 1), ("zarr", 0)])
def test_whether_x_is_a_logarithm_is_known_after_few_requests(
    server: Running,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    form: str,
    n_most: int,
) -> None:
    """In HDF5 one block is read, unless it is in the end that is read anyway; here raw is behind it."""
    from gpuload.remote import file as remote_file

    for name, value in (("_WHOLE", 0), ("_BEGIN", 1), ("_END", 1)):
        monkeypatch.setattr(remote_file, name, value)
    cells = several.part(0, n_obs=3000)
    cells.raw = several.part(1, n_obs=3000)
    cells.uns |= {"log1p": {}, "colors": {f"palette {i}": np.arange(2000) for i in range(20)}}
    write = several.write_zarr if form == "zarr" else (lambda path, cells: several.write(path.parent, [cells])[0])
    path = write(tmp_path / f"logarithms of {tmp_path.name}.zarr", cells)
    path = path.rename(path.with_name(f"logarithms of {tmp_path.name}.{form}"))
    there = put(server, path)
    addresses = [f"s3://data/{there}"] + ([f"{server.url}/data/{there}"] if form == "zarr" else [])

    def n_requests() -> int:
        return sum(n for kind, n in server.counts().items() if kind[:4] in ("GET ", "HEAD"))

    def opened(address: str) -> tuple[int, list[str]]:
        caplog.clear()
        before = n_requests()
        reached = {"storage_options": options(server)} if address.startswith("s3:") else {}
        with gpuload.open_loader(address, transform=gpuload.Transform(), device="cpu", **reached):
            said = [record.getMessage() for record in caplog.records]
            assert all(type(value) is str for record in caplog.records for value in record.args)  # no credentials
            return n_requests() - before, [one for one in said if one.startswith("transform: ")]

    with monkeypatch.context() as without:
        without.setattr(f"gpuload.formats.{form}.is_logged", lambda *_: False)
        n_without = [opened(address) and opened(address)[0] for address in addresses]  # then an index was kept
    for address, n_least in zip(addresses, n_without, strict=True):
        n_with, said = opened(address)
        assert n_with <= n_least + n_most
        assert len(said) == address.startswith("s3:")  # a web server cannot list, and is not asked


@pytest.mark.parametrize(
    ("content", "cure"),
    [
        (b"PK\x03\x04" + bytes(100), "this is a zip file: copy it to a disk, and open the copy"),
        (b"PAR1" + bytes(100), r"this is a Parquet file: end its name in \.parquet"),
        (b"cells", r"expected an \.h5ad file"),
    ],
)
def test_what_is_no_hdf5_in_spite_of_its_name_is_told(server: Running, content: bytes, cure: str) -> None:
    (server.root / "data" / "odd.h5ad").write_bytes(content)
    with pytest.raises(StoreError, match=rf"^s3://data/odd\.h5ad: not a readable HDF5 file \(.*\); {cure}\.$"):
        gpuload.open_loader("s3://data/odd.h5ad", storage_options=options(server))
