"""Every on-disk form that must be read: a table of (name, layer, how to write it), and what must be read from it."""

from __future__ import annotations

import ctypes
import re
import warnings
import zlib
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

import h5py
import hdf5plugin
import numpy as np
import pytest
from scipy.sparse import csr_matrix

from tests import writers
from tests.writers import DATA_CHUNK, INDICES_CHUNK, N_OBS, N_VARS, counts, write_csr, write_dense, write_h5ad

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator
    from pathlib import Path

    import pandas as pd
    from numpy.typing import NDArray

    from tests.writers import Options


@dataclass(frozen=True)
class Variant:
    """One form: its name, the layer to open, and the function that writes the file."""

    name: str
    write: Callable[[Path], object] = field(repr=False)
    layer: str = "X"


@dataclass(frozen=True)
class Stored:
    """A file in one form, and what anndata and h5py read from it in memory.

    Attributes
    ----------
    expected
        float32; a CSR matrix whose rows keep their stored order and repeats, or an array.
    obs
        Of the file, if it has today's layout; else of the columns that were written in an old layout.
    """

    name: str
    path: Path
    layer: str
    expected: csr_matrix | NDArray[np.float32]
    obs: pd.DataFrame

    @property
    def dense(self) -> NDArray[np.float32]:
        """Return the matrix as an array; repeated columns are added up."""
        return self.expected.toarray() if isinstance(self.expected, csr_matrix) else self.expected

    @property
    def is_csr(self) -> bool:
        """Return whether the stored matrix is sparse."""
        return isinstance(self.expected, csr_matrix)


def store(variant: Variant, folder: Path) -> Stored:
    """Write a form into a folder and read it back through h5py."""
    path = folder / f"{variant.name}.h5ad"
    variant.write(path)
    path.chmod(0o444)
    expected = read_matrix(path, variant.layer)
    return read_only(Stored(variant.name, path, variant.layer, expected, writers.cells_frame(expected.shape[0])))


def read_only(stored: Stored) -> Stored:
    """Return the same, after making its arrays read-only."""
    expected = stored.expected
    arrays = [expected.data, expected.indices, expected.indptr] if isinstance(expected, csr_matrix) else [expected]
    for array in arrays:
        array.flags.writeable = False
    return stored


def read_matrix(path: Path, layer: str) -> csr_matrix | NDArray[np.float32]:
    """Return a stored matrix as h5py reads it, in float32."""
    key = {"X": "X", "raw.X": "raw/X"}.get(layer, f"layers/{layer}")
    with h5py.File(path) as file:
        node = file[key]
        if isinstance(node, h5py.Dataset):
            return node[()].astype(np.float32)
        shape = node.attrs.get("shape", node.attrs.get("h5sparse_shape"))
        X = csr_matrix(tuple(shape), dtype=np.float32)
        X.data = node["data"][()].astype(np.float32)
        X.indices, X.indptr = node["indices"][()].astype(np.int64), node["indptr"][()].astype(np.int64)
        return X


def read_anndata(path: Path, layer: str) -> Any:
    """Return a matrix as anndata reads the whole file."""
    import anndata

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        adata = anndata.read_h5ad(path)
    return adata.X if layer == "X" else adata.raw.X if layer == "raw.X" else adata.layers[layer]


CODECS: dict[str, Options] = {
    "contiguous": {},
    "chunked": {"chunks": True},
    "gzip1": {"compression": "gzip", "compression_opts": 1},
    "gzip4": {"compression": "gzip", "compression_opts": 4},
    "gzip9": {"compression": "gzip", "compression_opts": 9},
    "lzf": {"compression": "lzf"},
    "zstd": dict(hdf5plugin.Zstd(clevel=3)),
    "lz4": dict(hdf5plugin.LZ4()),
    "fletcher32": {"fletcher32": True},
    "gzip-fletcher32": {"compression": "gzip", "fletcher32": True},
    "zstd-fletcher32": {**hdf5plugin.Zstd(), "fletcher32": True},
}
"""Filters that are combined with and without HDF5's byte shuffle."""

CONTAINERS: dict[str, Options] = {
    **{
        f"blosc-{c}-{s}": dict(hdf5plugin.Blosc(cname=c, shuffle=i))
        for c in ("blosclz", "lz4", "lz4hc", "zlib", "zstd")
        for i, s in enumerate(("noshuffle", "shuffle", "bitshuffle"))
    },
    "bitshuffle-none": dict(hdf5plugin.Bitshuffle(cname="none")),
    "bitshuffle-lz4": dict(hdf5plugin.Bitshuffle(cname="lz4")),
    "bitshuffle-zstd": dict(hdf5plugin.Bitshuffle(cname="zstd")),
}
"""Filters that shuffle by themselves."""

DTYPES = [
    "i1",
    "i2",
    "i4",
    "i8",
    "u1",
    "u2",
    "u4",
    "u8",
    "f2",
    "f4",
    "f8",
    "?",
    ">f4",
    ">f8",
    ">i2",
    ">i4",
    ">u8",
    ">f2",
]


def _chunked(options: Options, chunks: Any) -> Options:
    return {**options, "chunks": chunks} if options else {}


def _csr(path: Path, options: Options = (), **more: Any) -> None:  # type: ignore[assignment]
    data, indices = _chunked(dict(options), (DATA_CHUNK,)), _chunked(dict(options), (INDICES_CHUNK,))
    write_h5ad(path, lambda f: write_csr(f, "X", counts(), data=data, indices=indices, **more))


def _dense(path: Path, options: Options = (), dtype: str = "f4", chunks: tuple[int, int] = (10, N_VARS)) -> None:  # type: ignore[assignment]
    X = counts().toarray().astype(dtype)
    write_h5ad(path, lambda f: write_dense(f, "X", X, **_chunked(dict(options), chunks)))


def _layer(path: Path) -> None:
    def write(file: h5py.File) -> None:
        write_csr(file, "X", counts(seed=1))
        write_csr(file, "layers/spliced", counts(), data={"compression": "gzip"}, indices={"compression": "gzip"})
        write_dense(file, "layers/scaled", counts(seed=2).toarray() - 3)

    write_h5ad(path, write)


def _anndata(path: Path, X: Any, compression: str | None) -> None:
    """Write as users do: through anndata, strings become categories."""
    import anndata

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        obs, var = writers.cells_frame(X.shape[0]), writers.genes_frame(X.shape[1])
        anndata.AnnData(X=X, obs=obs, var=var).write_h5ad(path, compression=compression)


def _size(path: Path, n_obs: int, n_vars: int, is_csr: bool) -> None:
    X = counts(n_obs, n_vars)
    gzip = {"compression": "gzip", "maxshape": (None,), "chunks": (DATA_CHUNK,)}
    options = {"compression": "gzip"} if n_obs * n_vars else {}
    write_h5ad(
        path,
        lambda f: (
            write_csr(f, "X", X, data=gzip, indices=gzip) if is_csr else write_dense(f, "X", X.toarray(), **options)
        ),
        n_obs,
        n_vars,
    )


def _all_empty(path: Path) -> None:
    X = csr_matrix((N_OBS, N_VARS), dtype=np.float32)
    gzip = {"compression": "gzip", "maxshape": (None,), "chunks": (DATA_CHUNK,)}
    write_h5ad(path, lambda f: write_csr(f, "X", X, data=gzip, indices=gzip))


def _unsorted(path: Path, is_repeated: bool) -> None:
    rng = np.random.default_rng(5)
    X = counts().copy()
    for start, stop in zip(X.indptr, X.indptr[1:], strict=False):
        if is_repeated:
            X.indices[start:stop] = rng.integers(0, max(2, N_VARS // 8), stop - start)
        else:
            rng.shuffle(X.indices[start:stop])
    gzip = {"compression": "gzip", "chunks": (DATA_CHUNK,)}
    write_h5ad(path, lambda f: write_csr(f, "X", X, data=gzip, indices=gzip))


def _masked(path: Path, is_csr: bool) -> None:
    """Write chunks that omit some of shuffle (bit 0), gzip (bit 1) and fletcher32 (bit 2), in turn."""
    options: Options = {"shuffle": True, "compression": "gzip", "fletcher32": True}
    if is_csr:
        _csr(path, options)
    else:
        _dense(path, options, chunks=(10, 20))
    masks = [0, 1, 2, 3, 4, 5, 6, 7]
    with h5py.File(path, "r+") as file:
        for name in ("X/data", "X/indices") if is_csr else ("X",):
            stored = file[name]
            infos: list[Any] = []
            stored.id.chunk_iter(infos.append)
            for k, info in enumerate(infos):
                mask = masks[k % len(masks)]
                raw = _chunk_bytes(stored, info.chunk_offset)
                stored.id.write_direct_chunk(
                    info.chunk_offset, _encode(raw, stored.dtype.itemsize, mask), filter_mask=mask
                )


def _plain_edges(path: Path, *, has_gzip: bool, is_csr: bool) -> None:
    """Write arrays whose partial chunks are not filtered, an option of HDF5 that h5py does not have."""

    def options(chunks: tuple[int, ...]) -> Options:
        plist = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
        plist.set_chunk(chunks)
        plist.set_shuffle()
        if has_gzip:
            plist.set_deflate(4)
        with h5py.h5d.phil:
            hdf5, dont_filter_partial_chunks = ctypes.CDLL(h5py.h5p.__file__), ctypes.c_uint(2)
            assert hdf5.H5Pset_chunk_opts(ctypes.c_int64(plist.id), dont_filter_partial_chunks) == 0
        return {"dcpl": plist}

    def write(file: h5py.File) -> None:
        if is_csr:
            write_csr(file, "X", counts(), data=options((DATA_CHUNK,)), indices=options((INDICES_CHUNK,)))
        else:
            write_dense(file, "X", counts().toarray(), **options((16, 20)))

    write_h5ad(path, write)


def _chunk_bytes(stored: h5py.Dataset, start: tuple[int, ...]) -> bytes:
    """Return a chunk's elements, edge chunks filled up with zeros."""
    full = np.zeros(stored.chunks, dtype=stored.dtype)
    part = stored[tuple(slice(s, s + n) for s, n in zip(start, stored.chunks, strict=True))]
    full[tuple(slice(n) for n in part.shape)] = part
    return full.tobytes()


def _encode(raw: bytes, itemsize: int, mask: int) -> bytes:
    if not mask & 1:
        raw = writers.shuffled(raw, itemsize)
    if not mask & 2:
        raw = zlib.compress(raw)
    return raw if mask & 4 else raw + writers.fletcher32(raw)


def _absent(path: Path, is_csr: bool, fill: float) -> None:
    """Write only every other chunk; the others read as the fill value."""

    def write(file: h5py.File) -> None:
        X = counts()
        if not is_csr:
            stored = file.create_dataset("X", X.shape, "f4", chunks=(10, 20), compression="gzip", fillvalue=fill)
            dense = X.toarray()
            for row in range(0, N_OBS, 20):
                stored[row : row + 10, :40] = dense[row : row + 10, :40]
            return
        group = write_csr(file, "X", X, data={"compression": "lzf"}, indices={"compression": "lzf"})
        for name, array, value in (("data", X.data, fill), ("indices", X.indices, 2)):
            del group[name]
            chunk = 50 if name == "data" else 30
            stored = group.create_dataset(
                name, X.data.shape, array.dtype, chunks=(chunk,), compression="gzip", fillvalue=value
            )
            for start in range(0, array.size, 2 * chunk):
                stored[start : start + chunk] = array[start : start + chunk]

    write_h5ad(path, write)


def _never_written(path: Path, is_csr: bool) -> None:
    """Create contiguous arrays without any storage allocated."""

    def write(file: h5py.File) -> None:
        if not is_csr:
            file.create_dataset("X", (N_OBS, N_VARS), "f4", fillvalue=2)
            return
        group = write_csr(file, "X", counts())
        del group["data"]
        group.create_dataset("data", (counts().nnz,), "i2", fillvalue=7)

    write_h5ad(path, write)


def _resized(path: Path) -> None:
    """Shrink and regrow arrays, so that chunks lie beyond the shape or are absent within it."""

    def write(file: h5py.File) -> None:
        dense = counts().toarray()
        stored = file.create_dataset(
            "X", (2 * N_OBS, 2 * N_VARS), "f4", chunks=(16, 16), maxshape=(None, None), compression="gzip"
        )
        stored[...] = 9
        stored.resize((N_OBS - 20, N_VARS))
        stored[...] = dense[: N_OBS - 20]
        stored.resize((N_OBS, N_VARS))

    write_h5ad(path, write)


def _compact(path: Path) -> None:
    """Write data into the object header, as HDF5 allows for small arrays."""

    def write(file: h5py.File) -> None:
        group = write_csr(file, "X", counts())
        data = group["data"][()].astype(np.uint8)
        del group["data"]
        plist = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
        plist.set_layout(h5py.h5d.COMPACT)
        space, dtype = h5py.h5s.create_simple(data.shape), h5py.h5t.py_create(data.dtype)
        h5py.h5d.create(group.id, b"data", dtype, space, plist).write(h5py.h5s.ALL, h5py.h5s.ALL, data)

    write_h5ad(path, write)


GZIP: Options = {"compression": "gzip", "shuffle": True}


def _table() -> Iterator[Variant]:
    for name, options in CODECS.items():
        yield Variant(f"csr-{name}", partial(_csr, options=options))
        if name != "contiguous":
            yield Variant(f"csr-{name}-shuffle", partial(_csr, options={**options, "shuffle": True}))
    for name, options in CONTAINERS.items():
        yield Variant(f"csr-{name}", partial(_csr, options=options))
    for name in ("contiguous", "chunked", "gzip4", "lzf", "zstd", "lz4", "gzip-fletcher32"):
        yield Variant(f"dense-{name}", partial(_dense, options=CODECS[name]))
        if name not in ("contiguous", "chunked"):
            yield Variant(
                f"dense-{name}-shuffle-tiles",
                partial(_dense, options={**CODECS[name], "shuffle": True}, chunks=(16, 20)),
            )
    yield Variant("dense-chunked-tiles", partial(_dense, options={"chunks": True}, chunks=(16, 20)))
    yield Variant("dense-one-column-tiles", partial(_dense, options=GZIP, chunks=(40, 1)))
    yield Variant("dense-one-chunk", partial(_dense, options=GZIP, chunks=(N_OBS, N_VARS)))
    yield Variant("dense-blosc-lz4-tiles", partial(_dense, options=CONTAINERS["blosc-lz4-shuffle"], chunks=(16, 20)))
    for dtype in DTYPES:
        label = dtype.replace(">", "big-").replace("?", "bool")
        yield Variant(f"csr-data-{label}", partial(_csr, options=GZIP, dtype=dtype))
        yield Variant(f"dense-{label}", partial(_dense, options=GZIP if dtype[0] == ">" else {}, dtype=dtype))
    for dtype in ("i8", "u4", "i2", "u1", ">i4", ">i8"):
        label = dtype.replace(">", "big-")
        yield Variant(f"csr-indices-{label}", partial(_csr, options=GZIP, indices_dtype=dtype, indptr_dtype="i8"))
    yield Variant("csr-indices-i8-contiguous", partial(_csr, indices_dtype="i8", indptr_dtype="i8"))
    yield Variant("csr-indptr-gzip-i8", partial(_csr, options=GZIP, indptr_dtype="i8", indptr=GZIP))
    yield from _odd_forms()


def _odd_forms() -> Iterator[Variant]:
    yield Variant("layer-csr", _layer, "spliced")
    yield Variant("layer-dense", _layer, "scaled")
    yield Variant("raw", lambda path: writers.write_raw(path, counts()), "raw.X")
    for compression in (None, "gzip", "lzf"):
        yield Variant(f"anndata-csr-{compression}", partial(_anndata, X=counts(), compression=compression))
        yield Variant(f"anndata-dense-{compression}", partial(_anndata, X=counts().toarray(), compression=compression))
    for n_obs, n_vars in ((0, N_VARS), (1, N_VARS), (N_OBS, 1), (1, 1), (N_OBS, 0)):
        yield Variant(f"csr-{n_obs}x{n_vars}", partial(_size, n_obs=n_obs, n_vars=n_vars, is_csr=True))
        yield Variant(f"dense-{n_obs}x{n_vars}", partial(_size, n_obs=n_obs, n_vars=n_vars, is_csr=False))
    yield Variant("csr-all-empty", _all_empty)
    yield Variant("csr-unsorted", partial(_unsorted, is_repeated=False))
    yield Variant("csr-repeated", partial(_unsorted, is_repeated=True))
    for is_csr in (True, False):
        kind = "csr" if is_csr else "dense"
        yield Variant(f"{kind}-filter-masks", partial(_masked, is_csr=is_csr))
        for has_gzip in (True, False):
            name = f"{kind}-plain-edges-{'gzip' if has_gzip else 'shuffle'}"
            yield Variant(name, partial(_plain_edges, has_gzip=has_gzip, is_csr=is_csr))
        yield Variant(f"{kind}-absent-chunks-0", partial(_absent, is_csr=is_csr, fill=0))
        yield Variant(f"{kind}-absent-chunks-3", partial(_absent, is_csr=is_csr, fill=3))
        yield Variant(f"{kind}-never-written", partial(_never_written, is_csr=is_csr))
    yield Variant("dense-resized", _resized)
    yield Variant("csr-compact", _compact)
    yield Variant("csr-old-compound", lambda path: writers.write_old_compound(path, counts()))
    yield Variant("dense-old-compound", lambda path: writers.write_old_compound(path, counts().toarray()))
    yield Variant("csr-old-categories", lambda path: writers.write_old_categories(path, counts()))
    for size in (512, 4096):
        yield Variant(f"csr-userblock-{size}", partial(_userblock, size=size, options=GZIP))
    yield Variant("csr-userblock-512-contiguous", partial(_userblock, size=512, options={}))
    for libver in ("v110", "latest"):
        yield Variant(f"csr-libver-{libver}", partial(_libver, libver=libver))


def _userblock(path: Path, size: int, options: Options) -> None:
    data, indices = _chunked(options, (DATA_CHUNK,)), _chunked(options, (INDICES_CHUNK,))
    write_h5ad(path, lambda f: write_csr(f, "X", counts(), data=data, indices=indices), userblock_size=size)


def _libver(path: Path, libver: str) -> None:
    """Write with newer chunk indexes: fixed array, extensible array, implicit, single chunk."""

    def write(file: h5py.File) -> None:
        X = counts()
        write_csr(
            file,
            "X",
            X,
            data={**GZIP, "chunks": (DATA_CHUNK,)},
            indices={**GZIP, "chunks": (INDICES_CHUNK,), "maxshape": (None,)},
        )

    write_h5ad(path, write, libver=(libver, libver))


VARIANTS: tuple[Variant, ...] = tuple(_table())

_OF_VALUES = re.compile(r"-(data|indices|big|bool|[iuf]\d)|blosc|bitshuffle")

LAYOUTS = tuple(variant.name for variant in VARIANTS if not _OF_VALUES.search(variant.name))
"""Names of those that differ in where elements and chunks are, and not only in dtype or codec."""


def _is_new(variant: Variant, known: set[str]) -> bool:
    """Return whether a name has a word that no earlier one had; among layouts, beside sparse or dense."""
    kind, *words = variant.name.split("-")
    words = [f"{kind}-{word}" for word in words] or [kind] if variant.name in LAYOUTS else words
    is_new = not known.issuperset(words)
    known.update(words)
    return is_new


def _fewer() -> Iterator[str]:
    known: set[str] = set()
    yield from (variant.name for variant in VARIANTS if _is_new(variant, known))


FEWER = frozenset(_fewer())
"""Names of those that have each codec, dtype and layout at least once."""


def few(names: Iterable[str]) -> list[Any]:
    """Return names as parameters of a test; those that are not among FEWER are left to `make test-all`."""
    return [pytest.param(name, marks=() if name in FEWER else pytest.mark.slow) for name in names]


few_stored = pytest.mark.parametrize("stored", few(variant.name for variant in VARIANTS), indirect=True)
"""For a test of what does not depend on the form alone, beside those that read every form."""
