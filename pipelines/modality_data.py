"""Input and output of pipelines/modality.py: cells with genes, some of which also have measured proteins."""

from __future__ import annotations

import shutil
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import anndata
import h5py
import numpy as np
import pandas as pd
from anndata.io import read_elem, write_elem
from modality_cells import log_ratios
from scipy.sparse import csc_matrix, issparse, vstack

import gpuload

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from pathlib import Path

    from numpy.typing import NDArray

GENES, PROTEINS = "rna", "prot"
"""MuData's usual names of the modalities."""

METHOD = "gpuload_krr"

COUNTS_PER_10_000 = gpuload.Transform(target_sum=1e4, log1p=True)


@dataclass(frozen=True)
class Cells:
    """Cells that all have genes, and some proteins.

    Attributes
    ----------
    genes
        The argument and settings of `gpuload.open_loader` that read the genes of all cells.
    names : (n,)
        Names of the cells, in file order.
    rows : (n_train,) int64
        The cells to train on.
    proteins : (n_train, n_proteins) float32
        Their measured proteins.
    batch : (n_train,) str
        Their batches.
    test : (n_test,) int64
        The cells to predict for.
    wanted : (n_test, n_proteins) float32
        Their measured proteins; NaN if not measured.
    protein_names
        Names of the proteins.
    noise_free
        For synthetic cells to predict for, the proteins without noise.
    about
        The `uns` to include in a prediction.
    mudata
        The .h5mu file of the cells, and the names of its modalities.
    """

    genes: Mapping[str, Any]
    names: pd.Index
    rows: NDArray[np.int64]
    proteins: NDArray[np.float32]
    batch: NDArray[np.str_]
    test: NDArray[np.int64]
    wanted: NDArray[np.float32]
    protein_names: pd.Index
    noise_free: NDArray[np.float32] | None = None
    about: Mapping[str, str] = field(default_factory=dict)
    mudata: tuple[Path, str, str] | None = None


def read_cells(
    paths: Sequence[Path],
    *,
    batch: str | None = None,
    test: Sequence[str] = (),
    modalities: Sequence[str] = (GENES, PROTEINS),
    layer: str | None = None,
    is_counts: bool = False,
) -> Cells:
    """Read everything about the cells except their genes.

    Parameters
    ----------
    paths
        A folder of train_mod1, train_mod2, test_mod1 and, to be scored, test_mod2; a MuData (.h5mu); one AnnData whose
        var["feature_types"] tells GEX and ADT apart; or two: genes, and proteins of the same cells or of some of them,
        found by name.
    batch
        Column of obs, also of a MuData's own; None: "batch", or if there is none, all cells are one batch.
    test
        Batches to hold out. Without them, predict what was not measured.
    modalities
        Of a MuData: genes, proteins.
    layer
        Of the genes and of the proteins; None: X, or "normalized" where there is no X.
    is_counts
        Their values are counts: take log1p of counts per 10,000 of the genes, log ratios of the proteins. Genes that
        stand beside proteins in one matrix are then read into memory.

    Raises
    ------
    GpuloadError
        Something is missing, or does not fit together.
    """
    if len(paths) == 1 and paths[0].is_dir() and paths[0].suffix != ".zarr":
        if test:
            raise gpuload.PlanError("--test: a folder's test_mod1 says which cells are held out; leave it out.")
        return _of_folder(paths[0], batch, layer, is_counts)
    if len(paths) == 1 and paths[0].suffix == ".h5mu":
        genes, proteins = (Table(paths[0], f"mod/{name}", layer) for name in modalities)
        _check_proteins(proteins)
        is_elsewhere = batch is not None and batch not in genes.obs and batch not in proteins.obs
        whole = Table(paths[0]).obs if is_elsewhere else None
        return _of_pair(genes, proteins, batch, test, is_counts, mudata=(paths[0], *modalities), whole=whole)
    if len(paths) == 1:
        return _of_stacked(Table(paths[0], "", layer), batch, test, is_counts)
    if len(paths) == 2:
        return _of_pair(*(Table(path, "", layer) for path in paths), batch, test, is_counts)
    raise gpuload.PlanError(
        f"{' '.join(map(str, paths))}: expected a folder with train_mod1, train_mod2 and test_mod1, one .h5mu file, or "
        "one AnnData or two: genes and proteins."
    )


class Table:
    """An AnnData on disk: .h5ad, zarr, or a modality inside an .h5mu file; only what is requested is read."""

    def __init__(self, path: Path, member: str = "", layer: str | None = None) -> None:
        if not path.exists():
            raise gpuload.ReadError(f"{path}: no such file. Check the path.")
        self.path, self._member = path, member
        with self._open() as group:
            if group is None:
                raise gpuload.StoreError(
                    f"{path}: there is no /{member}; name its modalities with --modalities GENES PROTEINS."
                )
            if missing := [name for name in ("obs", "var") if name not in group]:
                raise gpuload.StoreError(
                    f"{self.address}: there is no /{missing[0]}, so it is no AnnData; give an .h5ad file, a zarr "
                    "store of AnnData, or an .h5mu file."
                )
            has_X = "X" in group and group["X"].attrs.get("encoding-type") != "null"
            self.obs = self._frame(group, "obs")
            self.var = self._frame(group, "var")
            uns = group.get("uns", {})
            self.uns = {key: read_elem(uns[key]) for key in ("dataset_id", "modality") if key in uns}
        self.layer = layer or ("X" if has_X else "normalized")

    @contextmanager
    def _open(self) -> Iterator[Any]:
        if self.path.is_dir():
            import zarr

            try:
                group = zarr.open_group(self.path, mode="r")
            except (OSError, ValueError) as error:
                raise gpuload.StoreError(
                    f"{self.path}: a folder that is no zarr store; give one, or a file of AnnData."
                ) from error
            yield group.get(self._member) if self._member else group
        else:
            try:
                file = h5py.File(self.path)
            except OSError as error:
                raise gpuload.StoreError(f"{self.path}: not an HDF5 file ({error}).") from error
            with file:
                yield file.get(self._member) if self._member else file

    def _frame(self, group: Any, name: str) -> pd.DataFrame:
        """Return obs or var; for AnnData before 0.7, where they are not groups, with anndata."""
        if hasattr(group[name], "keys"):
            return read_elem(group[name])
        return getattr(anndata.read_h5ad(self.path, backed="r"), name)

    @property
    def address(self) -> str:
        """Return its name for `open_loader`."""
        return f"{self.path}/{self._member}" if self._member else str(self.path)

    def has_layer(self, name: str) -> bool:
        """Return whether it has a layer of that name."""
        with self._open() as group:
            return f"layers/{name}" in group

    def matrix(self, layer: str | None = None, *, is_counts: bool = False) -> NDArray[np.float32]:
        """Return a matrix of it, dense: proteins take some megabytes."""
        key = self.layer if layer is None else layer
        with self._open() as group:
            member = "X" if key == "X" else f"layers/{key}"
            if member not in group:
                raise gpuload.StoreError(f"{self.address}: there is no /{member}; name an existing one with --layer.")
            X = read_elem(group[member])
        dense = np.asarray(X.toarray() if issparse(X) else X, dtype=np.float32)
        return _log_ratios(dense, f"{self.address}: /{member}") if is_counts else dense


def _log_ratios(counts: NDArray[np.float32], what: str) -> NDArray[np.float32]:
    if (counts < 0).any():
        raise gpuload.StoreError(
            f"{what} holds {counts.min()}, which is no count; leave --counts out, or name the counts with --layer."
        )
    return log_ratios(counts)


def _check_proteins(proteins: Table) -> None:
    """Raise StoreError if a MuData could not hold predictions of these as a data frame."""
    names = proteins.var.index
    if not names.is_unique:
        raise gpuload.StoreError(
            f"{proteins.address}: {str(names[names.duplicated()][0])!r} is the name of two proteins; make names unique "
            "with adata.var_names_make_unique()."
        )


def _of_folder(folder: Path, batch: str | None, layer: str | None, is_counts: bool) -> Cells:
    """Read the files of the competition and of Open Problems; the cells to predict for are those of test_mod1."""
    genes = [Table(_found(folder, name), "", layer) for name in ("train_mod1", "test_mod1")]
    proteins = Table(_found(folder, "train_mod2"), "", layer)
    rows, places = _matched(genes[0], proteins)
    if len(rows) < len(genes[0].obs):
        raise gpuload.StoreError(
            f"{proteins.path}: it lacks {len(genes[0].obs) - len(rows)} of the {len(genes[0].obs)} cells of "
            f"{genes[0].path.name}; give the same cells in both."
        )
    n_train, n_test = (len(table.obs) for table in genes)
    wanted = np.full((n_test, len(proteins.var)), np.nan, dtype=np.float32)
    noise_free = None
    known = proteins.matrix(is_counts=is_counts)[places]
    if n_missing := int((~np.isfinite(known)).any(axis=1).sum()):
        raise gpuload.StoreError(
            f"{proteins.path}: {n_missing} of its {len(known)} cells hold NaN or infinite values; leave them out of "
            "train_mod1 and train_mod2."
        )
    if any(folder.glob("*test_mod2.*")):
        truth = Table(_found(folder, "test_mod2"), "", layer)
        if list(truth.var.index) != list(proteins.var.index):
            raise gpuload.StoreError(f"{truth.path}: its proteins are not those of {proteins.path.name}.")
        measured, there = _matched(genes[1], truth)
        wanted[measured] = truth.matrix(is_counts=is_counts)[there]
        if truth.has_layer("noise_free"):
            noise_free = np.zeros_like(wanted)
            noise_free[measured] = truth.matrix("noise_free")[there]
    return Cells(
        genes=_gene_settings(genes, is_counts),
        names=genes[0].obs.index.append(genes[1].obs.index),
        rows=rows,
        proteins=known,
        batch=_batches(batch, genes[0].obs.iloc[rows], proteins.obs.iloc[places]),
        test=np.arange(n_train, n_train + n_test),
        wanted=wanted,
        protein_names=proteins.var.index,
        noise_free=noise_free,
        about=_about([*genes, proteins], folder.resolve().name),
    )


def _of_pair(
    genes: Table,
    proteins: Table,
    batch: str | None,
    test: Sequence[str],
    is_counts: bool,
    mudata: tuple[Path, str, str] | None = None,
    whole: pd.DataFrame | None = None,
) -> Cells:
    """Read genes and proteins of one set of cells; `whole` is a MuData's own obs of those with genes."""
    measured, places = _matched(genes, proteins)
    if not measured.size:
        raise gpuload.StoreError(f"{proteins.address}: none of its cells has a name that is in {genes.address}.")
    n_obs = len(genes.obs)
    values = np.full((n_obs, len(proteins.var)), np.nan, dtype=np.float32)
    values[measured] = proteins.matrix(is_counts=is_counts)[places]
    everyone = proteins.obs.iloc[places].set_axis(genes.obs.index[measured]).reindex(genes.obs.index)
    batches = _batches(batch, genes.obs, everyone, *([] if whole is None else [_of_cells(whole, genes)]))
    is_test = _held_out(batches, test) if test else ~np.isfinite(values).all(axis=1)
    if not is_test.any():
        raise gpuload.PlanError(
            "all cells have proteins, so there is nothing to predict; hold some batches out with --test."
        )
    rows = np.flatnonzero(~is_test & np.isfinite(values).all(axis=1))
    if not rows.size:
        raise gpuload.PlanError("no cell with proteins is left to learn from; hold fewer batches out with --test.")
    return Cells(
        genes=_gene_settings([genes], is_counts),
        names=genes.obs.index,
        rows=rows,
        proteins=values[rows],
        batch=batches[rows],
        test=np.flatnonzero(is_test),
        wanted=values[is_test],
        protein_names=proteins.var.index,
        about=_about([genes, proteins], genes.path.stem),
        mudata=mudata,
    )


def _of_stacked(table: Table, batch: str | None, test: Sequence[str], is_counts: bool) -> Cells:
    """Read genes and proteins that stand side by side in one matrix, as the competition's data set in GEO does."""
    is_gene, is_protein = _kinds(table)
    if not is_gene.any() or not is_protein.any():
        raise gpuload.StoreError(
            f"{table.path}: var has no column 'feature_types' that says GEX and ADT; give genes and proteins as two "
            "files."
        )
    if not test:
        raise gpuload.PlanError(f"{table.path}: all cells have proteins; hold some batches out with --test.")
    batches = _batches(batch, table.obs)
    is_test = _held_out(batches, test)
    with gpuload.open_loader(
        table.address, layer=table.layer, genes=is_protein, shuffle=False, batch_size=4096, device="cpu"
    ) as loader:
        proteins = np.concatenate([found.X for found in loader])
    proteins = _log_ratios(proteins, table.address) if is_counts else proteins
    return Cells(
        genes=_counts_alone(table, is_gene) if is_counts else {**_gene_settings([table], False), "genes": is_gene},
        names=table.obs.index,
        rows=np.flatnonzero(~is_test),
        proteins=proteins[~is_test],
        batch=batches[~is_test],
        test=np.flatnonzero(is_test),
        wanted=proteins[is_test],
        protein_names=table.var.index[is_protein],
        about=_about([table], table.path.stem),
    )


def settings_of_new(genes: Table, *, is_counts: bool) -> dict[str, Any]:
    """Return the argument and settings of `gpuload.open_loader` that read the genes of cells to predict for."""
    is_gene, is_protein = _kinds(genes)
    return _counts_alone(genes, is_gene) if is_counts and is_protein.any() else _gene_settings([genes], is_counts)


def _kinds(table: Table) -> tuple[NDArray[np.bool_], NDArray[np.bool_]]:
    """Return which columns are genes and which are proteins, as var["feature_types"] says."""
    kinds = table.var.get("feature_types", pd.Series(dtype=str)).astype(str).to_numpy()
    return np.isin(kinds, ["GEX", "Gene Expression"]), np.isin(kinds, ["ADT", "Antibody Capture"])


def _counts_alone(table: Table, is_gene: NDArray[np.bool_]) -> dict[str, Any]:
    """Return settings that normalise counts of genes; read into memory, without the proteins beside them.

    From the file, each cell's counts would be scaled to a total of genes and proteins.
    """
    with gpuload.open_loader(
        table.address, layer=table.layer, genes=is_gene, output="csr", shuffle=False, batch_size=4096, device="cpu"
    ) as loader:
        X = vstack([found.X for found in loader], format="csr")
    var = pd.DataFrame(index=table.var.index[is_gene])
    genes = anndata.AnnData(X, pd.DataFrame(index=table.obs.index), var)
    return {"paths": genes, "layer": "X", "transform": COUNTS_PER_10_000}


def _about(tables: Sequence[Table], otherwise: str) -> dict[str, str]:
    """Return the uns of a prediction, from the first table that has it: a packed store does not."""
    return {"dataset_id": str(next((t.uns["dataset_id"] for t in tables if "dataset_id" in t.uns), otherwise))}


def _held_out(batches: NDArray[np.str_], test: Sequence[str]) -> NDArray[np.bool_]:
    for name in test:
        if name not in batches:
            raise gpuload.PlanError(
                f"--test {name}: no cell is of that batch; there are {', '.join(np.unique(batches)[:20])}."
            )
    return np.isin(batches, test)


def _found(folder: Path, name: str) -> Path:
    """Return the one file or store of a folder with this name, whatever precedes it."""
    found = [*folder.glob(f"*{name}.zarr"), *folder.glob(f"*{name}.h5ad")]
    if not found:
        raise gpuload.ReadError(
            f"{folder / name}.h5ad: no such file; the folder must hold train_mod1, train_mod2 and test_mod1. "
            "--make 4000 writes synthetic ones."
        )
    if len({path.stem for path in found}) > 1:
        raise gpuload.PlanError(
            f"{folder}: {', '.join(path.name for path in found)}: which is {name}? Leave one there."
        )
    return found[0]


def _matched(genes: Table, proteins: Table) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return the cells common to both: their numbers among the genes, ascending, and among the proteins."""
    for table in (genes, proteins):
        if not table.obs.index.is_unique:
            raise gpuload.StoreError(
                f"{table.address}: names of cells occur twice, so they cannot be found by name; make them unique with "
                "adata.obs_names_make_unique()."
            )
    places = proteins.obs.index.get_indexer(genes.obs.index)
    rows = np.flatnonzero(places >= 0)
    return rows, places[rows]


def _of_cells(obs: pd.DataFrame, genes: Table) -> pd.DataFrame:
    """Return the obs of a MuData for the cells with genes; their names are unique."""
    return obs[obs.index.isin(genes.obs.index)].reindex(genes.obs.index)


def _batches(column: str | None, *frames: pd.DataFrame) -> NDArray[np.str_]:
    """Return the batch of each cell, from the first frame that has the column."""
    for frame in frames:
        if (name := column or "batch") in frame:
            return np.where(frame[name].isna(), "", frame[name].to_numpy().astype(str))
    if column is not None:
        there = ", ".join(dict.fromkeys(repr(str(name)) for frame in frames for name in frame)) or "no column"
        raise gpuload.PlanError(f"--batch {column}: obs has no such column; it has {there}.")
    return np.full(len(frames[0]), "all")


def _gene_settings(tables: Sequence[Table], is_counts: bool) -> dict[str, Any]:
    transform = COUNTS_PER_10_000 if is_counts else None
    found = {"paths": [table.address for table in tables], "layer": tables[0].layer, "transform": transform}
    names = tables[0].var.index
    for table in tables[1:]:
        if table.layer != tables[0].layer:
            lacking = table if tables[0].layer == "X" else tables[0]
            raise gpuload.StoreError(f"{lacking.path}: it has no /X, but others have; name the matrix with --layer.")
        if missing := list(names.difference(table.var.index)):
            raise gpuload.StoreError(
                f"{table.path}: it lacks {len(missing)} of the {len(names)} genes of {tables[0].path.name}, such as "
                f"{str(missing[0])!r}; give files of the same genes."
            )
        if not names.equals(table.var.index):  # in another order, or more
            found["join"] = list(names)
    return found


# --- output


def write_prediction(folder: Path, predicted: NDArray[np.float32], cells: Cells) -> list[Path]:
    """Write predictions in Open Problems' format; for a MuData, also a copy of it with the predictions inside.

    The copy has them as a data frame, ``mdata["rna"].obsm["prot_predicted"]``: for all its cells, with NaN for those
    without a prediction.
    """
    written = [folder / "prediction.h5ad"]
    matrix = csc_matrix(predicted)
    obs, var = pd.DataFrame(index=cells.names[cells.test]), pd.DataFrame(index=cells.protein_names)
    found = anndata.AnnData(
        matrix, obs, var, uns={**cells.about, "method_id": METHOD}, layers={"normalized": matrix.copy()}
    )
    found.write_h5ad(written[0], compression="gzip")
    if cells.mudata is not None:
        source, genes, proteins = cells.mudata
        whole = np.full((len(cells.names), predicted.shape[1]), np.nan, dtype=np.float32)
        whole[cells.test] = predicted
        unfinished = folder / ".prediction.h5mu.unfinished"
        try:
            shutil.copyfile(source, unfinished)
            with h5py.File(unfinished, "r+") as file:
                place = f"mod/{genes}/obsm"
                if place not in file:
                    write_elem(file, place, {})
                frame = pd.DataFrame(whole, cells.names, cells.protein_names)
                write_elem(file[place], f"{proteins}_predicted", frame)
            unfinished.replace(folder / "prediction.h5mu")
        except (TypeError, ValueError) as error:  # columns with names that HDF5 cannot hold beside each other
            raise gpuload.StoreError(
                f"{source}: its copy cannot hold a data frame with the names of these proteins ({error}); rename them. "
                f"{written[0]} has the prediction."
            ) from error
        finally:
            unfinished.unlink(missing_ok=True)  # as large as the data, on a disk that may be full
        written.append(folder / "prediction.h5mu")
    return written
