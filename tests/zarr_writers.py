"""Write AnnData in every form that zarr has. Uses zarr-python and anndata, but not gpuload."""

from __future__ import annotations

import shutil
import warnings
import zipfile
from dataclasses import dataclass, field
from functools import cache, partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

import numcodecs
import numpy as np
import zarr
import zarr.codecs as zc
from anndata.io import write_elem
from scipy.sparse import csr_matrix

from tests.writers import DATA_CHUNK, INDICES_CHUNK, N_OBS, N_VARS, cells_frame, counts, genes_frame

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from numpy.typing import NDArray


@dataclass(frozen=True)
class ZarrForm:
    """One form: its name, the layer to open, the function that writes the store, and where X is in it."""

    name: str
    write: Callable[[Path], object] = field(repr=False)
    layer: str = "X"


def open_group(path: Path, zarr_format: int = 3) -> zarr.Group:
    """Make a store with obs and var, and nothing else."""
    root = zarr.open_group(str(path), mode="w", zarr_format=zarr_format)
    return fill_group(root, N_OBS, N_VARS)


def fill_group(root: zarr.Group, n_obs: int, n_vars: int, seed: int = 0) -> zarr.Group:
    """Give a group of a folder obs and var; copied, as anndata takes half a second to write them."""
    root.attrs.update({"encoding-type": "anndata", "encoding-version": "0.1.0"})
    written = Path(_frames(root.metadata.zarr_format, n_obs, n_vars, seed).name)
    for name in ("obs", "var"):
        shutil.copytree(written / name, Path(root.store.root) / root.path / name)
    return root


@cache
def _frames(zarr_format: int, n_obs: int, n_vars: int, seed: int) -> TemporaryDirectory[str]:
    folder = TemporaryDirectory(prefix="gpuload-frames-")
    root = zarr.open_group(folder.name, mode="w", zarr_format=zarr_format)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        write_elem(root, "obs", cells_frame(n_obs, seed))
        write_elem(root, "var", genes_frame(n_vars))
    return folder


def add_array(parent: zarr.Group, name: str, values: NDArray[Any], **options: Any) -> zarr.Array:
    """Write an array; options are those of zarr's ``create_array``; unencoded by default."""
    settings = {"chunks": values.shape, "compressors": None, "filters": None, "fill_value": 0, **options}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        array = parent.create_array(name, shape=values.shape, dtype=values.dtype, **settings)
        array[...] = values
        array.attrs.update({"encoding-type": "array", "encoding-version": "0.2.0"})
    return array


def add_csr(
    parent: zarr.Group, key: str, X: csr_matrix, dtype: Any = None, indices_dtype: Any = None, **options: Any
) -> zarr.Group:
    """Write a CSR group; if no chunks are given, those of data and indices differ."""
    group = parent.create_group(key)
    group.attrs.update({"encoding-type": "csr_matrix", "encoding-version": "0.1.0", "shape": list(X.shape)})
    sharded = "shards" in options
    for name, values, chunk in (
        ("data", X.data.astype(dtype or X.data.dtype), DATA_CHUNK),
        ("indices", X.indices.astype(indices_dtype or np.int32), INDICES_CHUNK),
    ):
        more = {"chunks": (chunk,), **({"shards": (chunk * 5,)} if sharded else {})}
        add_array(group, name, values, **{**options, **more})
    add_array(group, "indptr", X.indptr.astype(np.int64), chunks=(50,))
    return group


def csr(path: Path, zarr_format: int = 3, **options: Any) -> None:
    add_csr(open_group(path, zarr_format), "X", counts(), **options)


def dense(path: Path, zarr_format: int = 3, chunks: Any = (10, N_VARS), dtype: Any = "f4", **options: Any) -> None:
    add_array(open_group(path, zarr_format), "X", counts().toarray().astype(dtype), chunks=chunks, **options)


def by_anndata(path: Path, zarr_format: int, is_csr: bool) -> None:
    """Write as users do, with consolidated metadata."""
    import anndata

    X = counts()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        anndata.settings.zarr_write_format = zarr_format
        try:
            adata = anndata.AnnData(X if is_csr else X.toarray(), cells_frame(), genes_frame())
            adata.raw = anndata.AnnData(counts(seed=3), cells_frame(), genes_frame())
            adata.layers["spliced"] = counts(seed=4)
            adata.write_zarr(path)
        finally:
            anndata.settings.reset("zarr_write_format")


def zipped(path: Path, write: Callable[[Path], object]) -> None:
    """Write a store and pack it, without compression, as zarr's ZipStore is."""
    folder = path.with_suffix(".unpacked")
    write(folder)
    pack(folder, path)
    shutil.rmtree(folder)


def pack(folder: Path, path: Path, how: int = zipfile.ZIP_STORED) -> None:
    with zipfile.ZipFile(path, "w", how) as archive:
        for file in sorted(folder.rglob("*")):
            if file.is_file():
                archive.write(file, file.relative_to(folder).as_posix())


def collection(path: Path, n_datasets: int = 11, **options: Any) -> None:
    """Write a collection as annbatch does: sharded, blosc with lz4 and byte shuffle, 16-bit column numbers."""
    root = zarr.open_group(str(path), mode="w", zarr_format=3)
    root.attrs.update({"encoding-type": "annbatch-preshuffled", "encoding-version": "0.1.0"})
    for i in range(n_datasets):
        group = fill_group(root.create_group(f"dataset_{i}"), 20 + i, N_VARS, seed=i)
        add_csr(group, "X", counts(20 + i, seed=i), indices_dtype=np.uint16, shards=True, compressors=LZ4_SHUFFLED)


def resized(path: Path, **options: Any) -> None:
    """Shrink an array that was written larger, so that shards hold chunks beyond its edge; and add strange files."""
    dense = counts().toarray()
    array = add_array(open_group(path), "X", np.full((2 * N_OBS, 2 * N_VARS), 9, np.float32), **options)
    array[:N_OBS, :N_VARS] = dense
    array.resize((N_OBS, N_VARS))
    for stray in ("c/99/0", "c/0/x", "c/0/00", "c/notes.txt", "0"):
        (path / "X" / stray).parent.mkdir(exist_ok=True)
        (path / "X" / stray).write_bytes(b"nothing")


def absent(path: Path, zarr_format: int, is_csr: bool, fill: float, **options: Any) -> None:
    """Write only every other chunk, or parts of shards; the others read as the fill value."""
    root, X = open_group(path, zarr_format), counts()
    if not is_csr:
        array = add_array(root, "X", np.full(X.shape, fill, np.float32), chunks=(10, 20), fill_value=fill, **options)
        for row in range(0, N_OBS, 20):
            array[row : row + 10, :40] = X.toarray()[row : row + 10, :40]
        return
    group = add_csr(root, "X", X, **options)
    for name, values, value in (("data", X.data, fill), ("indices", X.indices, 2)):
        del group[name]
        shards = {"shards": (150,)} if "shards" in options else {}
        plain = {k: v for k, v in options.items() if k != "shards"}
        array = add_array(
            group, name, np.full(values.shape, value, values.dtype), chunks=(50,), fill_value=value, **plain, **shards
        )
        for start in range(0, values.size, 100):
            array[start : start + 50] = values[start : start + 50]


LZ4_SHUFFLED = zc.BloscCodec(cname="lz4", clevel=3, shuffle="shuffle")

CODECS_V3: dict[str, Any] = {
    "none": None,
    "gzip": zc.GzipCodec(level=5),
    "zstd": zc.ZstdCodec(level=3),
    "zstd-checksum": zc.ZstdCodec(level=3, checksum=True),
    "crc32c": (zc.Crc32cCodec(),),
    "zstd-crc32c": (zc.ZstdCodec(level=3), zc.Crc32cCodec()),
    "gzip-crc32c": (zc.GzipCodec(level=5), zc.Crc32cCodec()),
    "crc32c-zstd": (zc.Crc32cCodec(), zc.ZstdCodec(level=3)),
    "blosc-lz4-crc32c": (LZ4_SHUFFLED, zc.Crc32cCodec()),
    **{
        f"blosc-{c}-{s}": zc.BloscCodec(cname=c, clevel=5, shuffle=s)
        for c in ("blosclz", "lz4", "lz4hc", "zlib", "zstd")
        for s in ("noshuffle", "shuffle", "bitshuffle")
    },
}

CODECS_V2: dict[str, Any] = {
    "none": None,
    "gzip": numcodecs.GZip(5),
    "zlib": numcodecs.Zlib(5),
    "zstd": numcodecs.Zstd(3),
    "lz4": numcodecs.LZ4(),
    "blosc-lz4-shuffle": numcodecs.Blosc("lz4", 5, numcodecs.Blosc.SHUFFLE),
    "blosc-zstd-bitshuffle": numcodecs.Blosc("zstd", 5, numcodecs.Blosc.BITSHUFFLE),
    "blosc-blosclz": numcodecs.Blosc("blosclz", 5, numcodecs.Blosc.SHUFFLE),
}

DTYPES = ("i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8", "f2", "f4", "f8", "?")


def numcodecs_v3() -> dict[str, Any]:
    """Return codecs that zarr 3 takes from numcodecs."""
    import zarr.codecs.numcodecs as nc

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        shuffled = (nc.Shuffle(elementsize=4), nc.Zlib())
        return {"zlib": nc.Zlib(level=5), "lz4": nc.LZ4(acceleration=1), "shuffle-zlib": shuffled}


def sharded(codec: Any, location: str = "end", *, has_crc: bool = True) -> dict[str, Any]:
    """Return the options of a single shard for everything, with its index at the given place and encoded as given."""
    codecs = [zc.BytesCodec(), *((codec,) if codec is not None and not isinstance(codec, tuple) else codec or ())]
    index = [zc.BytesCodec(), *([zc.Crc32cCodec()] if has_crc else [])]
    return {"codecs": codecs, "index_codecs": index, "index_location": location}


def by_serializer(path: Path, codec: Any, location: str, has_crc: bool) -> None:
    """Write a CSR matrix with an explicit sharding codec."""
    root, X = open_group(path), counts()
    group = root.create_group("X")
    group.attrs.update({"encoding-type": "csr_matrix", "encoding-version": "0.1.0", "shape": list(X.shape)})
    for name, values, chunk in (("data", X.data, 60), ("indices", X.indices, 60), ("indptr", X.indptr, 60)):
        serializer = zc.ShardingCodec(chunk_shape=(chunk,), **sharded(codec, location, has_crc=has_crc))
        add_array(group, name, values, chunks=(chunk * 4,), serializer=serializer)


def _keys(name: str, separator: str) -> dict[str, Any]:
    return {"name": name, "separator": separator}


def forms() -> Iterator[ZarrForm]:
    """Yield every form."""
    for zarr_format in (2, 3):
        for is_csr in (True, False):
            kind = "csr" if is_csr else "dense"
            write = partial(by_anndata, zarr_format=zarr_format, is_csr=is_csr)
            for layer in ("X", "raw.X", "spliced"):
                yield ZarrForm(f"anndata-v{zarr_format}-{kind}-{layer}", write, layer)
            for fill in (0, 3):
                yield ZarrForm(
                    f"absent-v{zarr_format}-{kind}-{fill}",
                    partial(absent, zarr_format=zarr_format, is_csr=is_csr, fill=fill),
                )
    for name, codec in CODECS_V2.items():
        yield ZarrForm(f"v2-csr-{name}", partial(csr, zarr_format=2, compressors=codec))
        yield ZarrForm(f"v2-dense-{name}", partial(dense, zarr_format=2, chunks=(16, 20), compressors=codec))
    yield ZarrForm(
        "v2-csr-shuffle-zlib",
        partial(csr, zarr_format=2, filters=[numcodecs.Shuffle(4)], compressors=numcodecs.Zlib(5)),
    )
    wide = {"dtype": "f8", "indices_dtype": "i8"}
    for n in (2, 8):
        shuffled = {"filters": [numcodecs.Shuffle(n)], "compressors": numcodecs.Zlib(5)}
        yield ZarrForm(f"v2-csr-wide-shuffle-{n}", partial(csr, zarr_format=2, **wide, **shuffled))
    for name, codec in {**CODECS_V3, **numcodecs_v3()}.items():
        yield ZarrForm(f"v3-csr-{name}", partial(csr, compressors=codec))
        if "blosc" not in name or name == "blosc-lz4-shuffle":  # a shard's chunks are decoded as those of files are
            yield ZarrForm(f"v3-csr-sharded-{name}", partial(csr, compressors=codec, shards=True))
    for name in ("none", "zstd", "blosc-lz4-shuffle", "blosc-zstd-bitshuffle", "crc32c"):
        codec = CODECS_V3[name]
        yield ZarrForm(f"v3-dense-{name}", partial(dense, compressors=codec))
        yield ZarrForm(f"v3-dense-tiles-{name}", partial(dense, chunks=(16, 20), compressors=codec))
        yield ZarrForm(f"v3-dense-wide-{name}", partial(dense, chunks=(200, 60), compressors=codec))
        tiles = partial(dense, chunks=(8, 10), shards=(16, 30), compressors=codec)
        yield ZarrForm(f"v3-dense-sharded-{name}", tiles)
        if name in ("zstd", "crc32c"):
            yield ZarrForm(f"zip-dense-sharded-{name}", partial(zipped, write=tiles))
            yield ZarrForm(f"zip-csr-{name}", partial(zipped, write=partial(csr, compressors=codec)))
    for dtype in DTYPES:
        label = dtype.replace("?", "bool")
        yield ZarrForm(f"v3-csr-data-{label}", partial(csr, dtype=dtype, compressors=LZ4_SHUFFLED))
        yield ZarrForm(f"v3-dense-{label}", partial(dense, dtype=dtype, compressors=LZ4_SHUFFLED))
        yield ZarrForm(f"v2-dense-{label}", partial(dense, zarr_format=2, dtype=dtype))
    for dtype in ("i8", "u4", "u2", "u1"):
        yield ZarrForm(f"v3-csr-indices-{dtype}", partial(csr, indices_dtype=dtype, compressors=LZ4_SHUFFLED))
    yield ZarrForm("v2-slash", partial(dense, zarr_format=2, chunks=(16, 20), chunk_key_encoding=_keys("v2", "/")))
    yield ZarrForm("v3-dot", partial(dense, chunks=(16, 20), chunk_key_encoding=_keys("default", ".")))
    yield ZarrForm("v3-v2-keys", partial(dense, chunks=(16, 20), chunk_key_encoding=_keys("v2", "/")))
    yield ZarrForm("v3-resized", partial(resized, chunks=(10, 20)))
    yield ZarrForm("v3-resized-sharded", partial(resized, chunks=(10, 20), shards=(40, 80), compressors=LZ4_SHUFFLED))
    for location in ("start", "end"):
        for has_crc in (True, False):
            label = f"{location}-{'crc' if has_crc else 'bare'}"
            write = partial(by_serializer, codec=zc.ZstdCodec(), location=location, has_crc=has_crc)
            yield ZarrForm(f"v3-index-{label}", write)
    yield ZarrForm("v3-absent-sharded", partial(absent, zarr_format=3, is_csr=True, fill=3, shards=True))
    yield ZarrForm("v3-absent-tiles", partial(absent, zarr_format=3, is_csr=False, fill=3, shards=(20, 40)))
    yield ZarrForm("v3-absent-nan", partial(absent, zarr_format=3, is_csr=False, fill=float("nan")))
    yield ZarrForm("zip-v2", partial(zipped, write=partial(by_anndata, zarr_format=2, is_csr=True)))


FORMS = {form.name: form for form in forms()}


@cache
def written(name: str) -> Path:
    """Write a form once per process; return its place, which tests only read, or copy."""
    form = FORMS[name]
    stem = name.removesuffix(f"-{form.layer}")  # layers are in one store
    path = Path(_folder().name, f"{stem}.zarr{'.zip' if name.startswith('zip') else ''}")
    if not path.exists():
        form.write(path)
    return path


@cache
def _folder() -> TemporaryDirectory[str]:
    return TemporaryDirectory(prefix="gpuload-zarr-")


def read_matrix(path: Path, layer: str) -> csr_matrix | NDArray[np.float32]:
    """Return a stored matrix as zarr reads it, in float32."""
    key = {"X": "X", "raw.X": "raw/X"}.get(layer, f"layers/{layer}")
    store: Any = zarr.storage.ZipStore(path, mode="r") if path.is_file() else str(path)
    root = zarr.open_group(store, mode="r", use_consolidated=False)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return _matrix(root, key, store)


def _matrix(root: zarr.Group, key: str, store: Any) -> csr_matrix | NDArray[np.float32]:
    try:
        node = root[key]
        if isinstance(node, zarr.Array):
            return np.asarray(node[...]).astype(np.float32)
        X = csr_matrix(tuple(node.attrs["shape"]), dtype=np.float32)
        X.data = np.asarray(node["data"][...]).astype(np.float32)
        X.indices, X.indptr = (np.asarray(node[name][...]).astype(np.int64) for name in ("indices", "indptr"))
        return X
    finally:
        if not isinstance(store, str):
            store.close()
