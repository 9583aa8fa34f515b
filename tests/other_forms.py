"""Write cells in every format other than .h5ad, by hand from the formats' documentation. Does not use gpuload.

10x files, MuData and SCDL folders are written here without the libraries that define them, so that the tests run where
those are not installed; `tests/golden/test_owners.py` compares with the libraries themselves. SOMA experiments are
written with TileDB's own library (`tests/soma_writers.py`); tests of them are skipped where it is not installed.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import h5py
import numpy as np
from anndata.io import write_elem
from scipy.sparse import csr_array, csr_matrix, save_npz, vstack

from tests import soma_writers, writers
from tests.writers import N_OBS, N_VARS, counts, write_csr, write_dense, write_plain

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

    import pandas as pd

GZIP = {"compression": "gzip", "chunks": (writers.DATA_CHUNK,)}


@dataclass(frozen=True)
class Form:
    """Cells in one format, and what must be read.

    Attributes
    ----------
    path
        What is passed to `open_loader`.
    expected
        CSR with its stored order, or dense.
    var_names
        Genes.
    obs
        Columns, as decoded values.
    """

    path: Any
    expected: csr_matrix | np.ndarray
    var_names: list[str]
    obs: Mapping[str, list[Any]] = field(default_factory=dict)
    layer: str = "X"

    @property
    def dense(self) -> np.ndarray:
        return self.expected.toarray() if isinstance(self.expected, csr_matrix) else self.expected


NUMBERS = [str(i) for i in range(N_VARS)]
NAMES = [f"gene_{i:03d}" for i in range(N_VARS)]
SYMBOLS = [f"TP{i // 2}" for i in range(N_VARS)]
"""Names of 10x genes, each of which occurs twice."""


def folder_of_files(folder: Path) -> Form:
    parts = [write_plain(folder / f"plate{k}.h5ad", seed=k) for k in (1, 0, 2)]  # by name: 0, 1, 2
    (folder / ".hidden.h5ad").write_bytes(b"nothing")
    (folder / "notes.txt").write_text("nothing")
    depth = np.concatenate([writers.cells_frame(seed=k)["depth"] for k in (0, 1, 2)])
    expected = vstack([parts[1], parts[0], parts[2]], format="csr")
    return Form(folder, csr_matrix(expected), NAMES, {"depth": depth.tolist()})


def write_tenx(path: Path, genomes: Mapping[str, csr_matrix], options: Any, *, is_old: bool = False) -> None:
    """Write as Cell Ranger does: 10x documentation, "Feature-Barcode Matrices (HDF5 Format)"."""
    with h5py.File(path, "w") as file:
        for name, X in genomes.items():
            group = file.create_group(name)
            group.create_dataset("data", data=X.data.astype(np.int32), **options)
            group.create_dataset("indices", data=X.indices.astype(np.int64), **options)
            group.create_dataset("indptr", data=X.indptr.astype(np.int64))
            group.create_dataset("shape", data=np.array(X.shape[::-1], dtype=np.int32))
            group.create_dataset("barcodes", data=np.array([f"{b}-1" for b in barcodes(X.shape[0])], dtype="S20"))
            ids = np.array([f"ENSG{i:011d}" for i in range(X.shape[1])], dtype="S20")
            names = np.array([f"TP{i // 2}" for i in range(X.shape[1])], dtype="S20")
            if is_old:
                group["genes"], group["gene_names"] = ids, names
                continue
            features = group.create_group("features")
            features["id"], features["name"] = ids, names
            features["feature_type"] = np.array([b"Gene Expression"] * (X.shape[1] - 3) + [b"Antibody Capture"] * 3)
            features["genome"] = np.array([b"GRCh38"] * X.shape[1])
            features["_all_tag_keys"] = np.array([b"genome"])


def barcodes(n: int) -> list[str]:
    return ["".join("ACGT"[(i >> (2 * k)) & 3] for k in range(16)) for i in range(n)]


def tenx(folder: Path, options: Any, *, is_old: bool = False) -> Form:
    path = folder / "filtered_feature_bc_matrix.h5"
    write_tenx(path, {"GRCh38" if is_old else "matrix": counts()}, options, is_old=is_old)
    return Form(path, counts(), SYMBOLS, {"barcode": [f"{b}-1" for b in barcodes(N_OBS)]})


def tenx_two_genomes(folder: Path) -> Form:
    path = folder / "two.h5"
    write_tenx(path, {"hg19": counts(seed=1), "mm10": counts()}, GZIP, is_old=True)
    return Form(path, counts(), SYMBOLS, {}, "mm10")


def write_mudata(path: Path, modalities: Mapping[str, Callable[[h5py.Group], object]], has_map: bool = True) -> None:
    """Write as MuData does: its documentation, "Serialization format"; the last cells are missing from "few"."""
    obs = writers.cells_frame()
    with h5py.File(path, "w", userblock_size=512) as file:
        file.attrs.update({"encoding-type": "MuData", "encoding-version": "0.1.0", "axis": 0})
        write_elem(file, "obs", obs[["donor", "n_counts"]])
        write_elem(file, "var", writers.genes_frame())
        for name, write in modalities.items():
            group = file.create_group(f"mod/{name}")
            n_obs = N_OBS - 20 if name == "few" else N_OBS
            write_elem(group, "obs", obs[["cell_line", "depth"]].iloc[::-1][:n_obs])
            write_elem(group, "var", writers.genes_frame())
            write(group)
            if has_map:
                place = N_OBS - np.arange(N_OBS, dtype=np.uint32)  # the cells of a modality are in reverse order
                file[f"obsmap/{name}"] = np.where(place <= n_obs, place, 0).astype(np.uint32)
    with open(path, "r+b") as raw:
        raw.write(b"MuData (format-version=0.1.0;creator=by hand;creator-version=0)")


def mudata(folder: Path, name: str, suffix: str = "") -> Form:
    path = folder / "cells.h5mu"
    modalities: dict[str, Any] = {"rna": lambda g: write_csr(g, "X", counts(), data=GZIP, indices=GZIP)}
    if name != "alone":
        modalities["prot"] = lambda g: write_dense(g, "X", counts(seed=1).toarray())
        modalities["few"] = lambda g: write_csr(g, "layers/raw", counts(N_OBS - 20))
    write_mudata(path, modalities)
    obs = writers.cells_frame().iloc[::-1]
    X = {"rna": counts(), "alone": counts(), "prot": counts(seed=1).toarray(), "few": counts(N_OBS - 20)}[name]
    columns = {c: obs[c][: X.shape[0]].astype(object).tolist() for c in ("cell_line", "donor", "n_counts")}
    return Form(f"{path}{suffix}", X, NAMES, columns, "raw" if name == "few" else "X")


def npy(folder: Path, X: np.ndarray, version: tuple[int, int] | None = None) -> Form:
    path = folder / "X.npy"
    with open(path, "wb") as file:
        np.lib.format.write_array(file, X, version)
    return Form(path, X.astype(np.float32), [str(i) for i in range(X.shape[1])])


def npz(folder: Path, *, is_deflated: bool, is_array: bool = False, dtype: str = "f4") -> Form:
    path = folder / "odd-name.npz"
    X = counts().astype(dtype)
    save_npz(path, csr_array(X) if is_array else X, compressed=is_deflated)
    return Form(path, counts(), NUMBERS)


def write_scdl(
    folder: Path,
    X: csr_matrix,
    dtypes: str = "f4 u8 u4",
    *,
    has_header: bool = True,
    genes: Sequence[str] = NAMES,
    obs: pd.DataFrame | None = None,
) -> None:
    """Write as SingleCellMemMapDataset does: "SCDL schema" 0.1.0; raw arrays, a big-endian header, Parquet."""
    import pyarrow as pa
    from pyarrow import parquet

    numbers = {"u1": 1, "u2": 2, "u4": 3, "u8": 4, "f2": 5, "f4": 6, "f8": 7}
    header = struct.pack(">4s4B2I", b"SCDL", 0, 1, 0, 1, 1, 3)
    names = {"DATA": "data.npy", "ROWPTR": "row_ptr.npy", "COLPTR": "col_ptr.npy"}
    for (name, file), values, dtype in zip(names.items(), (X.data, X.indptr, X.indices), dtypes.split(), strict=True):
        values.astype(dtype).tofile(folder / file)
        header += struct.pack(">I", len(name)) + name.encode() + struct.pack(">QI", values.size, numbers[dtype])
        shape = struct.pack(">BII", 1, 1, values.size) if name == "ROWPTR" else b"\0"
        header += shape
    if has_header:
        (folder / "header.sch").write_bytes(header + struct.pack(">I", 0))
    obs = writers.cells_frame(X.shape[0])[["cell_line", "depth", "n_counts", "donor"]] if obs is None else obs
    tables = {
        "var_features": {"n": list(range(X.shape[1])), "kind": ["gene"] * X.shape[1], "name": genes[: X.shape[1]]},
        "obs_features": {name: obs[name].astype(object).where(obs[name].notna(), None).tolist() for name in obs},
    }
    for name, columns in tables.items():
        (folder / name).mkdir()
        parquet.write_table(pa.table(columns), folder / name / "dataframe_0.parquet")
    np.save(folder / "var_features" / "cumulative_sum_index.npy", np.array([-1, X.shape[0]]))
    (folder / "metadata.json").write_text('{"num_rows": 0}')  # not kept up to date, and so not to be trusted


def scdl(folder: Path, dtypes: str = "f4 u8 u4", *, scale: int = 1, has_header: bool = True) -> Form:
    X = counts() * scale
    write_scdl(folder, X, dtypes, has_header=has_header)
    obs = writers.cells_frame()
    return Form(folder, X, NAMES, {c: obs[c].astype(object).tolist() for c in ("cell_line", "n_counts")})


def lists_of(X: csr_matrix, first: int, leader: float | None) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """Return the gene numbers and values of each row, gene 0 as `first`, after the pair of 1 and the leader."""
    numbers, values = (
        [part[lo:hi] for lo, hi in pairwise(X.indptr)] for part in (X.indices.astype(np.int64) + first, X.data)
    )
    if leader is not None:
        numbers = [np.append(1, n) for n in numbers]
        values = [np.append(leader, v) for v in values]
    return numbers, values


def write_parquet(
    path: Path,
    X: csr_matrix,
    obs: Mapping[str, list[Any]],
    *,
    first: int = 0,
    leader: float | None = None,
    names: tuple[str, str] = ("genes", "expressions"),
    dtypes: tuple[str, str] = ("int64", "float32"),
    **options: Any,
) -> None:
    """Write cells as rows of lists, as datasets does; 40 rows per row group."""
    import pyarrow as pa
    from pyarrow import parquet

    lists = {
        name: pa.array([np.asarray(row).astype(dtype) for row in rows], pa.list_(pa.from_numpy_dtype(np.dtype(dtype))))
        for name, rows, dtype in zip(names, lists_of(X, first, leader), dtypes, strict=True)
    }
    parquet.write_table(pa.table({**lists, **obs}), path, **{"row_group_size": 40, **options})


def encoded(genes: str, values: str) -> dict[str, Any]:
    """Return options of `write_parquet` that name the encodings of both columns."""
    columns = {"genes.list.element": genes, "expressions.list.element": values}
    return {"use_dictionary": False, "column_encoding": columns}


def write_genes(path: Path, first: int, n_vars: int) -> None:
    """Write the table of genes, in reverse order."""
    import pyarrow as pa
    from pyarrow import parquet

    table = {
        "gene_symbol": NAMES[:n_vars][::-1],
        "ensembl_id": [f"ENSG{i:011d}" for i in range(n_vars)][::-1],
        "token_id": list(range(first, first + n_vars))[::-1],
    }
    path.parent.mkdir(exist_ok=True)
    parquet.write_table(pa.table(table), path)


def parquet(folder: Path, *, as_tahoe: bool = False, obs: bool = True, **options: Any) -> Form:
    """Write one file of numbered genes; or two as Tahoe-100M is: with leaders, and a table of genes next to them."""
    frame = writers.cells_frame()[["cell_line", "depth", "n_counts", "passed"]]
    columns = {c: frame[c].astype(object).where(frame[c].notna(), None).tolist() for c in frame if obs}
    if not as_tahoe:
        write_parquet(folder / "cells.parquet", counts(), columns, **options)
        return Form(folder / "cells.parquet", counts(), NUMBERS, columns)
    write_genes(folder / "metadata" / "gene_metadata.parquet", 3, N_VARS)
    (folder / "data").mkdir()
    for part in range(2):
        rows = slice(part * 70, (part + 1) * 70 if part == 0 else N_OBS)
        of_part = {name: column[rows] for name, column in columns.items()}
        path = folder / "data" / f"train-{part:05d}-of-00002.parquet"
        write_parquet(path, counts()[rows], of_part, first=3, leader=-2.0, **options)
    return Form(str(folder / "data" / "train-*.parquet"), counts(), NAMES, columns)


def list_of_forms(folder: Path) -> Form:
    parts = []
    for k, write in enumerate((npz_stored, npz_deflated)):
        (folder / str(k)).mkdir()
        parts.append(write(folder / str(k)))
    return Form([p.path for p in parts], csr_matrix(vstack([p.expected for p in parts])), NUMBERS)


npz_stored = partial(npz, is_deflated=False)
npz_deflated = partial(npz, is_deflated=True)


def soma(folder: Path, *, is_dense: bool = False, **storage: Any) -> Form:
    X = counts()
    path = soma_writers.write_experiment(
        folder / "cells.soma", {"data": X.toarray() if is_dense else X}, frames={"parts": (40,)}, **storage
    )
    frame = writers.cells_frame()[["depth", "donor", "stage", "passed"]]
    obs = {name: frame[name].astype(object).tolist() for name in frame}
    return Form(path, X.toarray() if is_dense else X, NAMES, obs)


FORMS: dict[str, Callable[[Path], Form]] = {
    "folder-of-h5ad": folder_of_files,
    "tenx-3": partial(tenx, options=GZIP),
    "tenx-3-contiguous": partial(tenx, options={}),
    "tenx-3-shuffle": partial(tenx, options={**GZIP, "shuffle": True}),
    "tenx-2": partial(tenx, options=GZIP, is_old=True),
    "tenx-2-genomes": tenx_two_genomes,
    "mudata-rna": partial(mudata, name="rna", suffix="/rna"),
    "mudata-prot": partial(mudata, name="prot", suffix="/mod/prot"),
    "mudata-few": partial(mudata, name="few", suffix="/few"),
    "mudata-alone": partial(mudata, name="alone"),
    **{
        f"npy-{dtype}": lambda folder, dtype=dtype: npy(folder, counts().toarray().astype(dtype))
        for dtype in ("f4", ">f4", "f2", "u1", "i8", "?")
    },
    "npy-version-2": lambda folder: npy(folder, counts().toarray(), (2, 0)),
    "npy-version-3": lambda folder: npy(folder, counts().toarray(), (3, 0)),
    "npy-no-rows": lambda folder: npy(folder, np.zeros((0, 5), np.float32)),
    "npy-no-genes": lambda folder: npy(folder, np.zeros((7, 0), np.float32)),
    "npy-one-gene": lambda folder: npy(folder, np.asfortranarray(counts().toarray()[:, 20:21])),
    "npz-stored": npz_stored,
    "npz-deflated": npz_deflated,
    "npz-array": partial(npz, is_deflated=False, is_array=True),
    "npz-f8": partial(npz, is_deflated=False, dtype="f8"),
    "list-of-npz": list_of_forms,
    "scdl": scdl,
    "scdl-small": partial(scdl, dtypes="u1 u2 u1"),
    "scdl-u1": partial(scdl, dtypes="u1 u4 u1", scale=28),
    "scdl-u2": partial(scdl, dtypes="u2 u4 u1", scale=7000),
    "scdl-half": partial(scdl, dtypes="f2 u4 u2"),
    "scdl-wide": partial(scdl, dtypes="f8 u8 u8"),
    "scdl-no-header": partial(scdl, has_header=False),
    "soma": partial(soma, parts=(50, 90)),
    "soma-narrow": partial(
        soma, tiles=(16, 8), parts=(90, 50), columns=soma_writers.SHUFFLED, values=soma_writers.SHUFFLED
    ),
    "soma-dense": partial(soma, is_dense=True),
    "parquet": parquet,
    "parquet-tahoe": partial(parquet, as_tahoe=True),
    "parquet-tahoe-small-pages": partial(parquet, as_tahoe=True, data_page_size=256, dictionary_pagesize_limit=64),
    "parquet-tahoe-version-2": partial(parquet, as_tahoe=True, data_page_version="2.0", compression="zstd"),
    "parquet-version-2": partial(parquet, data_page_version="2.0", data_page_size=200, write_page_index=True),
    "parquet-no-dictionary": partial(parquet, use_dictionary=False, dtypes=("int32", "float64")),
    "parquet-checksums": partial(parquet, write_page_checksum=True, dtypes=("uint16", "int64")),
    "parquet-delta": partial(
        parquet, dtypes=("int32", "int64"), **encoded("DELTA_BINARY_PACKED", "DELTA_BINARY_PACKED")
    ),
    "parquet-tahoe-encoded": partial(parquet, as_tahoe=True, **encoded("DELTA_BINARY_PACKED", "BYTE_STREAM_SPLIT")),
    "parquet-streams": partial(
        parquet, dtypes=("int64", "float16"), compression="zstd", **encoded("BYTE_STREAM_SPLIT", "BYTE_STREAM_SPLIT")
    ),
    **{f"parquet-{codec}": partial(parquet, compression=codec) for codec in ("none", "gzip", "zstd", "lz4")},
    **{
        f"parquet-{dtype}": partial(parquet, dtypes=("uint32", dtype), names=("indices", "data"))
        for dtype in ("int8", "uint8", "int16", "uint32", "uint64", "int32", "float16")
    },
}
"""Every format by name, and the function that writes it into an empty folder."""

KINDS_OF_FORM = (
    *("folder-of-h5ad", "tenx-3", "tenx-2", "tenx-2-genomes"),
    *("mudata-rna", "mudata-prot", "mudata-few", "mudata-alone"),
    *("npy-f4", "npy-no-rows", "npy-no-genes", "npy-one-gene", "npz-stored", "npz-deflated", "list-of-npz"),
    *("scdl", "scdl-no-header", "scdl-u1", "scdl-wide", "soma", "soma-narrow", "soma-dense"),
    *("parquet", "parquet-tahoe", "parquet-version-2", "parquet-delta", "parquet-no-dictionary"),
)
"""Those that differ in more than how values are encoded."""
