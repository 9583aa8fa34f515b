"""Write .h5ad files in every form that AnnData and HDF5 allow. Uses h5py and anndata, but not gpuload."""

from __future__ import annotations

import warnings
from functools import cache
from typing import TYPE_CHECKING, Any

import h5py
import numpy as np
import pandas as pd
from scipy.sparse import csr_matrix

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

    from numpy.typing import NDArray

    Options = Mapping[str, Any]

N_OBS, N_VARS = 131, 53
DATA_CHUNK, INDICES_CHUNK = 100, 64
"""Elements per chunk: a row of about 12 values often crosses an edge, and the two grids differ."""

TEXT = h5py.string_dtype()


def counts(n_obs: int = N_OBS, n_vars: int = N_VARS, seed: int = 0) -> csr_matrix:
    """Return counts from 1 to 9 with empty rows at both ends and in a run, and one full row; int32 indices."""
    rng = np.random.default_rng(seed)
    mask = rng.random((n_obs, n_vars)) < min(1.0, 12 / max(1, n_vars))
    empty = [*range(min(2, n_obs)), *range(n_obs // 2, n_obs // 2 + n_obs // 10), *range(max(0, n_obs - 1), n_obs)]
    mask[empty] = False
    if n_obs > 8:
        mask[n_obs // 3] = True
    X = csr_matrix(np.where(mask, rng.integers(1, 10, mask.shape), 0).astype(np.float32))
    X.data.flags.writeable = X.indices.flags.writeable = X.indptr.flags.writeable = False
    return X


def cells_frame(n_obs: int = N_OBS, seed: int = 0) -> pd.DataFrame:
    """Return an obs with a column of every kind that a minibatch can carry."""
    rng = np.random.default_rng((seed, 1))
    lines = np.array(["HeLa", "K562", "A549", "Jurkat"], dtype=object)
    line = pd.Categorical(lines[rng.integers(0, 4, n_obs)], categories=lines)
    line = line.set_categories(["K562", "unused", "A549", "HeLa"])  # Jurkat becomes missing
    stage = pd.Categorical.from_codes(rng.integers(0, 3, n_obs), categories=["late", "early", "mid"], ordered=True)
    number = pd.array(rng.integers(0, 99, n_obs), dtype="Int64")
    flag = pd.array(rng.random(n_obs) < 0.5, dtype="boolean")
    number[::7], flag[::5] = pd.NA, pd.NA
    index = pd.Index([f"cell_{i}" for i in range(n_obs)], dtype=object)
    columns: dict[str, Any] = {
        "cell_line": line,
        "stage": stage,
        "year": pd.Categorical.from_codes(rng.integers(0, 2, n_obs), categories=np.array([2024, 2025])),
        "depth": rng.normal(size=n_obs),
        "depth32": rng.normal(size=n_obs).astype(np.float32),
        "n_counts": rng.integers(-5, 1000, n_obs).astype(np.int32),
        "n_big": rng.integers(0, 200, n_obs).astype(np.uint8),
        "passed": rng.random(n_obs) < 0.5,
        "number": number,
        "flag": flag,
        "donor": np.array(["ann", "bob", "zoë"], dtype=object)[rng.integers(0, 3, n_obs)],
    }
    return pd.DataFrame(columns, index=index)


def genes_frame(n_vars: int = N_VARS) -> pd.DataFrame:
    """Return a var without columns."""
    return pd.DataFrame(index=pd.Index([f"gene_{i:03d}" for i in range(n_vars)], dtype=object))


def write_root(file: h5py.File, obs: pd.DataFrame, var: pd.DataFrame) -> None:
    """Write obs and var as anndata writes them today, and mark the file."""
    file.attrs.update({"encoding-type": "anndata", "encoding-version": "0.1.0"})
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        write_elem(file, "obs", obs)
        write_elem(file, "var", var)


def write_elem(parent: h5py.Group, key: str, value: Any) -> None:
    """Write an element as anndata does, which is imported here: it takes longer than all else of a small test run."""
    from anndata.io import write_elem

    write_elem(parent, key, value)


def write_csr(
    parent: h5py.Group,
    key: str,
    X: csr_matrix,
    *,
    data: Options | None = None,
    indices: Options | None = None,
    indptr: Options | None = None,
    dtype: Any = None,
    indices_dtype: Any = None,
    indptr_dtype: Any = None,
) -> h5py.Group:
    """Write a CSR group; options are those of ``create_dataset``, per array; no options means contiguous storage."""
    group = parent.create_group(key)
    group.attrs.update({"encoding-type": "csr_matrix", "encoding-version": "0.1.0", "shape": np.array(X.shape)})
    group.create_dataset("data", data=X.data.astype(dtype or X.data.dtype), **(data or {}))
    group.create_dataset("indices", data=X.indices.astype(indices_dtype or np.int32), **(indices or {}))
    group.create_dataset("indptr", data=X.indptr.astype(indptr_dtype or np.int32), **(indptr or {}))
    return group


def write_dense(parent: h5py.Group, key: str, X: NDArray[Any], **options: Any) -> h5py.Dataset:
    """Write a dense 2-D matrix."""
    stored = parent.create_dataset(key, data=X, **options)
    stored.attrs.update({"encoding-type": "array", "encoding-version": "0.2.0"})
    return stored


def write_h5ad(
    path: Path,
    write_matrix: Callable[[h5py.File], object],
    n_obs: int = N_OBS,
    n_vars: int = N_VARS,
    *,
    seed: int = 0,
    **file_options: Any,
) -> None:
    """Write a file whose matrix is written by `write_matrix`, with the obs and var of this module."""
    with h5py.File(path, "w", **file_options) as file:
        if "libver" in file_options:
            write_root(file, cells_frame(n_obs, seed), genes_frame(n_vars))
        else:
            root = _root(n_obs, n_vars, seed)
            file.attrs.update(root.attrs)
            for key in root:
                file.copy(root[key], key)
        write_matrix(file)


@cache
def _root(n_obs: int, n_vars: int, seed: int) -> h5py.File:
    """Return a file in memory with what `write_root` writes: a copy of it is made in a tenth of the time."""
    file = h5py.File(f"{n_obs}-{n_vars}-{seed}", "w", driver="core", backing_store=False)
    write_root(file, cells_frame(n_obs, seed), genes_frame(n_vars))
    return file


def write_plain(path: Path, X: csr_matrix | None = None, *, seed: int = 0, **options: Any) -> csr_matrix:
    """Write a small gzip CSR file in the form users have, and return its matrix."""
    X = counts(seed=seed) if X is None else X
    gzip = {"compression": "gzip", "chunks": (DATA_CHUNK,)} if X.nnz else {}
    write_h5ad(path, lambda f: write_csr(f, "X", X, data=gzip, indices=gzip, **options), *X.shape, seed=seed)
    return X


def write_raw(path: Path, X: csr_matrix) -> None:
    """Write a file with a small X and a wider raw/X."""

    def write(file: h5py.File) -> None:
        gzip = {"compression": "gzip", "chunks": (DATA_CHUNK,)}
        write_csr(file, "X", X[:, :7])
        raw = file.create_group("raw")
        raw.attrs.update({"encoding-type": "raw", "encoding-version": "0.1.0"})
        write_csr(raw, "X", X, data=gzip, indices=gzip)
        write_elem(raw, "var", genes_frame(X.shape[1]))
        raw.create_group("varm")

    write_h5ad(path, write, X.shape[0], 7)


def write_old_compound(path: Path, X: csr_matrix | NDArray[Any]) -> None:
    """Write as anndata 0.6 did: compound obs and var, categories under uns, h5sparse attributes.

    References
    ----------
    .. [1] anndata 0.6.22, ``anndata/readwrite/h5ad.py`` and ``anndata/h5py/h5sparse.py``.
    """
    obs = cells_frame(X.shape[0])
    with h5py.File(path, "w") as file:
        if isinstance(X, csr_matrix):
            group = file.create_group("X")
            group.attrs.update({"h5sparse_format": "csr", "h5sparse_shape": np.array(X.shape)})
            for name in ("data", "indices", "indptr"):
                group.create_dataset(name, data=getattr(X, name), maxshape=(None,), compression="gzip")
        else:
            file.create_dataset("X", data=X)
        fields: dict[str, NDArray[Any]] = {
            "index": obs.index.to_numpy().astype("S20"),
            "cell_line": obs["cell_line"].cat.codes.to_numpy(),
            "depth": obs["depth"].to_numpy(),
            "n_counts": obs["n_counts"].to_numpy(),
            "donor": obs["donor"].to_numpy().astype(TEXT),
        }
        file.create_dataset("obs", data=compound(fields))
        file.create_dataset("var", data=compound({"index": genes_frame(X.shape[1]).index.to_numpy().astype("S20")}))
        file.create_dataset("uns/cell_line_categories", data=list(obs["cell_line"].cat.categories), dtype=TEXT)


def compound(fields: Mapping[str, NDArray[Any]]) -> NDArray[Any]:
    """Return columns as one table, a compound data set of HDF5."""
    first = next(iter(fields.values()))
    table = np.empty(first.size, dtype=[(name, values.dtype) for name, values in fields.items()])
    for name, values in fields.items():
        table[name] = values
    return table


def write_old_categories(path: Path, X: csr_matrix) -> None:
    """Write as anndata 0.7 did: obs as a group whose categories are stored next to the columns, in ``__categories``.

    References
    ----------
    .. [1] AnnData documentation, "On-disk format", section on files written before 0.8.
    """
    obs = cells_frame(X.shape[0])[["cell_line", "stage", "depth", "n_counts", "donor"]]
    with h5py.File(path, "w") as file:
        write_csr(file, "X", X, data={"compression": "lzf"}, indices={"compression": "lzf"})
        for key, frame in (("obs", obs), ("var", genes_frame(X.shape[1]))):
            group = file.create_group(key)
            group.attrs.update({"encoding-type": "dataframe", "encoding-version": "0.1.0", "_index": "index"})
            group.attrs["column-order"] = np.array(list(frame.columns), dtype=object if len(frame.columns) else float)
            group.create_dataset("index", data=list(frame.index), dtype=TEXT)
            for name, column in frame.items():
                if not isinstance(column.dtype, pd.CategoricalDtype):
                    is_text = pd.api.types.is_string_dtype(column)  # pandas 2 says object, pandas 3 says str
                    group.create_dataset(
                        name, data=list(column) if is_text else column, dtype=TEXT if is_text else None
                    )
                    continue
                stored = group.create_dataset(name, data=column.cat.codes.to_numpy())
                beside = group.require_group("__categories")
                categories = beside.create_dataset(name, data=list(column.cat.categories), dtype=TEXT)
                categories.attrs["ordered"] = column.cat.ordered
                stored.attrs["categories"] = categories.ref


def fletcher32(raw: bytes) -> bytes:
    """Return the four checksum bytes that HDF5 appends to a chunk.

    References
    ----------
    .. [1] The HDF Group, HDF5 library, ``H5checksum.c`` (Fletcher's sum over big-endian 16-bit words).
    """
    words = np.frombuffer(raw + b"\0" * (len(raw) % 2), dtype=">u2").astype(object)
    low, high = 0, 0
    for word in words:
        low = (low + int(word)) % 65535
        high = (high + low) % 65535
    return ((high << 16) | low).to_bytes(4, "little")


def shuffled(raw: bytes, itemsize: int) -> bytes:
    """Return bytes as HDF5's shuffle filter stores them: all first bytes of the items, then all second bytes ..."""
    return np.frombuffer(raw, dtype=np.uint8).reshape(-1, itemsize).T.tobytes()
