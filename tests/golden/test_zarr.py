"""AnnData in every form of zarr: delivered values equal what zarr-python and anndata read."""

from __future__ import annotations

import json
import subprocess
import sys
import warnings
import zipfile
from contextlib import closing
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd
import pytest

zarr = pytest.importorskip("zarr", minversion="3.0")

import gpuload  # noqa: E402
from gpuload.formats.zarr_trees import ZipTree  # noqa: E402
from tests import zarr_writers as writers  # noqa: E402
from tests.golden.test_forms import assert_same_csr  # noqa: E402
from tests.in_pairs import words_in_pairs  # noqa: E402
from tests.writers import N_OBS, N_VARS, cells_frame, counts, genes_frame  # noqa: E402
from tests.zarr_writers import FORMS, written  # noqa: E402

if TYPE_CHECKING:
    from pathlib import Path


def read(path: Path, layer: str, **settings: Any) -> tuple[Any, np.ndarray]:
    """Return one epoch's rows, as one matrix, and their numbers."""
    with gpuload.open_loader(path, layer=layer, **settings) as loader:
        batches = list(loader)
    rows = np.concatenate([batch.rows for batch in batches])
    if settings.get("output") == "csr":
        from scipy.sparse import vstack

        return vstack([batch.X for batch in batches], format="csr"), rows
    return np.concatenate([batch.X for batch in batches]), rows


@pytest.mark.parametrize("name", words_in_pairs(FORMS))
def test_rows_match_zarr_python(name: str) -> None:
    path, layer = written(name), FORMS[name].layer
    expected = writers.read_matrix(path, layer)
    dense = expected.toarray() if hasattr(expected, "toarray") else expected
    X, rows = read(path, layer, batch_size=7, fetch_factor=3, block_size=5)
    assert sorted(rows) == list(range(N_OBS))
    np.testing.assert_array_equal(X, dense[rows])
    X, rows = read(path, layer, batch_size=50, shuffle=False, output="csr")
    if hasattr(expected, "toarray"):
        assert_same_csr(X, expected)
    else:
        np.testing.assert_array_equal(X.toarray(), dense)


@pytest.mark.parametrize(
    ("name", "verify"),
    [
        *((name, "once") for name in ("v3-csr-sharded-blosc-lz4-shuffle", "v2-csr-zstd", "v3-csr-zstd-crc32c")),
        ("v3-csr-zstd-crc32c", "always"),
        ("v3-csr-sharded-blosc-lz4-shuffle", "never"),
        pytest.param("v3-csr-sharded-blosc-lz4-shuffle", "always", marks=pytest.mark.slow),
        pytest.param("v3-csr-zstd-crc32c", "never", marks=pytest.mark.slow),
        *(pytest.param("v2-csr-zstd", verify, marks=pytest.mark.slow) for verify in ("never", "always")),
    ],
)
def test_single_rows_from_partly_decoded_chunks(name: str, verify: str) -> None:
    expected = counts().toarray()
    with gpuload.open_loader(written(name), batch_size=1, fetch_factor=1, block_size=1, verify=verify) as loader:
        for _ in range(2):
            for batch in loader:
                np.testing.assert_array_equal(batch.X, expected[batch.rows])


@pytest.mark.parametrize("name", ["anndata-v2-csr-X", "anndata-v3-csr-X", "zip-v2", "v3-csr-zstd"])
def test_obs_and_var_match_anndata(name: str) -> None:
    frame = cells_frame()
    columns = list(frame.columns)
    with gpuload.open_loader(written(name), batch_size=1000, shuffle=False, obs=columns) as loader:
        (batch,) = loader
        assert list(loader.var_names) == list(genes_frame().index)
        for column in columns:
            found = batch.obs[column]
            if column in loader.categories:
                names = [None if code < 0 else loader.categories[column][code] for code in found]
                wanted = [None if pd.isna(value) else value for value in frame[column]]
                assert names == wanted, column
            else:
                wanted = frame[column].to_numpy(dtype=np.float64, na_value=np.nan)
                np.testing.assert_array_equal(found.astype(np.float64), wanted, err_msg=column)


def test_column_types_match_h5ad(tmp_path: Path) -> None:
    import anndata

    path = tmp_path / "same.h5ad"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        anndata.AnnData(counts(), cells_frame(), genes_frame()).write_h5ad(path)
    columns = list(cells_frame().columns)
    found = []
    for source in (path, written("anndata-v3-csr-X")):
        with gpuload.open_loader(source, obs=columns) as loader:
            found.append((dict(loader.obs_dtypes), {k: list(v) for k, v in loader.categories.items()}))
    assert found[0] == found[1]


def test_collection_datasets_are_read_in_numeric_order(tmp_path: Path) -> None:
    path = tmp_path / "collection.zarr"
    writers.collection(path)
    expected = np.concatenate([counts(20 + i, seed=i).toarray() for i in range(11)])
    donors = pd.concat([cells_frame(20 + i, i) for i in range(11)])["donor"]
    for block_size in (3, "chunk"):
        with gpuload.open_loader(path, batch_size=9, fetch_factor=4, block_size=block_size, obs=["donor"]) as loader:
            assert loader.n_obs == len(expected)
            seen = []
            for batch in loader:
                np.testing.assert_array_equal(batch.X, expected[batch.rows])
                names = loader.categories["donor"][batch.obs["donor"]]
                assert list(names) == list(donors.iloc[batch.rows])
                seen += batch.rows.tolist()
        assert sorted(seen) == list(range(len(expected)))


def test_rows_are_numbered_across_stores_and_files(tmp_path: Path) -> None:
    from tests.writers import write_plain

    plain = tmp_path / "plain.h5ad"
    write_plain(plain)
    paths = [written("anndata-v2-csr-X"), plain, written("zip-csr-zstd")]
    with gpuload.open_loader(paths, batch_size=20) as loader:
        expected = np.concatenate([counts().toarray()] * 3)
        for batch in loader:
            np.testing.assert_array_equal(batch.X, expected[batch.rows])


def test_stale_consolidated_metadata_is_ignored(tmp_path: Path) -> None:
    for zarr_format in (2, 3):
        path = tmp_path / f"stale-{zarr_format}.zarr"
        writers.by_anndata(path, zarr_format, is_csr=False)
        root = zarr.open_group(str(path), mode="r+", use_consolidated=False)
        del root["X"]
        writers.add_array(root, "X", np.full((N_OBS, N_VARS), 5, np.float32), chunks=(30, 30))
        X, _ = read(path, "X", batch_size=1000)
        assert (X == 5).all()


@pytest.mark.filterwarnings("ignore:Duplicate name")
def test_last_of_duplicate_zip_members_is_used(tmp_path: Path) -> None:
    """As zarr's own zip store writes them: changed members are appended."""
    path = tmp_path / "twice.zip"
    with zipfile.ZipFile(path, "w") as archive:
        for fill in (7, None):
            folder = tmp_path / f"store-{fill}.zarr"
            writers.dense(folder, chunks=(20, 53))
            if fill:
                writers.zarr.open_group(str(folder))["X"][...] = fill
            for file in sorted(file for file in folder.rglob("*") if file.is_file()):
                archive.write(file, file.relative_to(folder).as_posix())
    X, rows = read(path, "X", batch_size=50)
    np.testing.assert_array_equal(X, counts().toarray()[rows])


class Counted(list):  # type: ignore[type-arg]
    """A list that counts how many of its items are looked at."""

    n_seen = 0

    def __getitem__(self, place: Any) -> Any:
        self.n_seen += 1 if isinstance(place, int) else len(range(*place.indices(len(self))))
        return super().__getitem__(place)


def test_zip_folder_lookup_skips_other_folders(tmp_path: Path) -> None:
    folders = ["a", "a-b", "a/b", "a0", "a b", "\u00e9", "\U0001f600", *(f"set{i}/X" for i in range(200))]
    names = ["zarr.json", "a/b/zarr.json", *(f"{folder}/{i}" for folder in folders for i in range(5))]
    with zipfile.ZipFile(tmp_path / "many.zip", "w") as archive:
        for name in names:
            archive.writestr(name, b"1")
    tree = ZipTree(str(tmp_path / "many.zip"))
    tree._names = Counted(tree._names)
    with closing(tree.source):
        for key in ("", *folders, "set7", "a-", "nothing"):
            prefix = f"{key}/" if key else ""
            within = [name.removeprefix(prefix) for name in names if name.startswith(prefix)]
            assert tree.children(key) == sorted({name.split("/")[0] for name in within if "/" in name})
            assert sorted(tree.chunks(key)[1]) == sorted(name for name in within if not name.endswith("zarr.json"))
    assert tree._names.n_seen < 20 * len(names)


def test_sharded_columns_in_a_zip(tmp_path: Path) -> None:
    """As anndata 0.13 writes them: the first chunk starts where the shard does, and zip's checksum is the shard's."""
    folder, values = tmp_path / "store.zarr", np.arange(N_OBS)
    writers.csr(folder)
    obs = writers.zarr.open_group(str(folder))["obs"]
    writers.add_array(obs, "sharded", values, chunks=(50,), shards=(150,))
    obs.attrs["column-order"] = [*obs.attrs["column-order"], "sharded"]
    writers.pack(folder, tmp_path / "store.zip")
    with gpuload.open_loader(tmp_path / "store.zip", obs=["sharded"], batch_size=1000) as loader:
        (batch,) = loader
        np.testing.assert_array_equal(batch.obs["sharded"], batch.rows)


@pytest.mark.parametrize(("text", "value"), [("0x40200000", 2.5), ("Infinity", np.inf), ("NaN", np.nan)])
def test_fill_values_given_as_strings(tmp_path: Path, text: str, value: float) -> None:
    path = tmp_path / "filled.zarr"
    writers.absent(path, 3, is_csr=False, fill=0.0)
    file = path / "X" / "zarr.json"
    meta = json.loads(file.read_text())
    meta["fill_value"] = text
    file.write_text(json.dumps(meta))
    X, rows = read(path, "X", batch_size=50)
    np.testing.assert_array_equal(X, writers.read_matrix(path, "X")[rows])
    assert np.array_equal(X[rows == 10], np.full((1, N_VARS), value), equal_nan=True)  # from an absent chunk


def test_chunk_key_encoding_given_by_name_only(tmp_path: Path) -> None:
    """As version 3.1 of the standard allows where no configuration is needed."""
    path = tmp_path / "short.zarr"
    writers.csr(path)
    file = path / "X/data/zarr.json"
    meta = json.loads(file.read_text())
    assert meta["chunk_key_encoding"] == {"name": "default", "configuration": {"separator": "/"}}
    file.write_text(json.dumps(meta | {"chunk_key_encoding": "default"}))
    X, rows = read(path, "X", batch_size=50)
    np.testing.assert_array_equal(X, counts().toarray()[rows])


def test_chunk_files_beyond_the_edge_are_ignored(tmp_path: Path) -> None:
    path = tmp_path / "strays.zarr"
    writers.dense(path, chunks=(10, 20))
    for stray in (f"c/{-(-N_OBS // 10)}/0", f"c/0/{-(-N_VARS // 20)}"):
        (path / "X" / stray).parent.mkdir(exist_ok=True)
        (path / "X" / stray).write_bytes((path / "X/c/0/0").read_bytes())
    X, rows = read(path, "X", batch_size=50)
    np.testing.assert_array_equal(X, counts().toarray()[rows])


def test_nullable_strings(tmp_path: Path) -> None:
    """As anndata writes columns of pandas' strings since 0.12.3."""
    path = tmp_path / "strings.zarr"
    writers.csr(path)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        root = zarr.open_group(str(path), mode="r+")
        group = root["obs"].create_group("batch")
        group.attrs.update({"encoding-type": "nullable-string-array", "encoding-version": "0.1.0"})
        values = np.array(["a", "b", "zoë", ""] * N_OBS, dtype=object)[:N_OBS]
        group.create_array("values", shape=(N_OBS,), dtype=str, chunks=(50,))[...] = values
        writers.add_array(group, "mask", np.arange(N_OBS) % 3 == 0, chunks=(50,))
        root["obs"].attrs["column-order"] = [*root["obs"].attrs["column-order"], "batch"]
    with gpuload.open_loader(path, obs=["batch"], batch_size=20) as loader:
        assert list(loader.categories["batch"]) == ["", "a", "b", "zoë"]
        for batch in loader:
            names = [None if code < 0 else loader.categories["batch"][code] for code in batch.obs["batch"]]
            assert names == [None if row % 3 == 0 else values[row] for row in batch.rows]


@pytest.mark.parametrize("zarr_format", [2, 3])
@pytest.mark.parametrize(("dtype", "fill"), [("S3", b"abc"), ("U3", "abc")])
def test_fixed_length_strings_in_absent_chunks(tmp_path: Path, zarr_format: int, dtype: str, fill: str | bytes) -> None:
    path = tmp_path / "strings.zarr"
    writers.csr(path, zarr_format=zarr_format)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        obs = zarr.open_group(str(path), mode="r+")["obs"]
        sizes: dict[str, Any] = {"shape": (N_OBS,), "chunks": (50,)}
        obs.create_array("batch", dtype=dtype, fill_value=fill, **sizes)[:50] = np.full(50, "no", dtype=dtype)
        obs.attrs["column-order"] = [*obs.attrs["column-order"], "batch"]
    with gpuload.open_loader(path, obs=["batch"], batch_size=1000) as loader:
        (batch,) = loader
        names = loader.categories["batch"][batch.obs["batch"]]
    np.testing.assert_array_equal(names, np.where(batch.rows < 50, "no", "abc"))


def test_many_chunk_files_with_few_descriptors(tmp_path: Path) -> None:
    """More files than a process may have open: the least recently used are closed."""
    path = tmp_path / "many.zarr"
    writers.dense(path, chunks=(1, 12), compressors=None)
    assert sum(1 for _ in (path / "X" / "c").rglob("*")) > 500
    code = (
        "import resource; resource.setrlimit(resource.RLIMIT_NOFILE, (180, 180))\n"
        "import sys, gpuload, numpy as np\nsys.path.insert(0, '.')\nfrom tests.writers import counts\n"
        f"with gpuload.open_loader({str(path)!r}, batch_size=32, fetch_factor=2, block_size=2) as loader:\n"
        "    for _ in range(2):\n        for batch in loader:\n"
        "            assert (batch.X == counts().toarray()[batch.rows]).all()\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


def test_neither_zarr_nor_anndata_nor_h5py_is_needed() -> None:
    code = (
        "import sys, gpuload\n"
        "for name in ('zarr', 'numcodecs', 'anndata', 'h5py'):\n    sys.modules[name] = None\n"
        f"with gpuload.open_loader({str(written('anndata-v3-csr-X'))!r}, obs=['cell_line', 'number']) as loader:\n"
        "    assert sum(map(len, loader)) == 131\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


def test_reads_the_same_without_codec_addresses(monkeypatch: pytest.MonkeyPatch) -> None:
    from gpuload.backends import codecs

    monkeypatch.setattr(codecs, "has_addresses", lambda: False)
    for name in ("v3-csr-zstd-crc32c", "v2-csr-lz4", "v3-csr-blosc-lz4-shuffle", "v3-csr-blosc-zstd-bitshuffle"):
        X, rows = read(written(name), "X", batch_size=20)
        np.testing.assert_array_equal(X, counts().toarray()[rows])


@pytest.mark.parametrize("dtype", ["U3", "S3"])
def test_fixed_length_string_column(tmp_path: Path, dtype: str) -> None:
    path = tmp_path / "fixed.zarr"
    writers.csr(path)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # zarr 3 has no stable name for them
        obs = zarr.open_group(str(path), mode="r+")["obs"]
        array = obs.create_array("plate", shape=(N_OBS,), dtype=dtype, chunks=(50,))
        array[...] = np.array(["p1", "p20", ""] * N_OBS, dtype=dtype)[:N_OBS]
        array.attrs.update({"encoding-type": "array", "encoding-version": "0.2.0"})
        obs.attrs["column-order"] = [*obs.attrs["column-order"], "plate"]
    with gpuload.open_loader(path, obs=["plate"], batch_size=20, device="cpu") as loader:
        assert list(loader.categories["plate"]) == ["", "p1", "p20"]
        for batch in loader:
            names = loader.categories["plate"][batch.obs["plate"]]
            assert names.tolist() == [("p1", "p20", "")[row % 3] for row in batch.rows]


@pytest.mark.parametrize("zarr_format", [2, 3])
def test_layers_in_a_folder_without_metadata(zarr_format: int, tmp_path: Path) -> None:
    anndata = pytest.importorskip("anndata")
    path = tmp_path / "cells.zarr"
    X = np.eye(4, dtype=np.float32)
    with warnings.catch_warnings(action="ignore"), anndata.settings.override(zarr_write_format=zarr_format):
        anndata.AnnData(X, layers={"twice": X * 2}).write_zarr(path)
    for name in (".zgroup", ".zattrs", "zarr.json"):
        (path / "layers" / name).unlink(missing_ok=True)
    with gpuload.open_loader(path, layer="twice", shuffle=False, device="cpu") as loader:
        np.testing.assert_array_equal(next(iter(loader)).X, X * 2)
