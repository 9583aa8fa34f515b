"""Freely available cells as files for pipelines/modality.py: synthetic ones, and some hundred real ones."""

from __future__ import annotations

from typing import TYPE_CHECKING

import anndata
import numpy as np
import pandas as pd
from modality_cells import log_ratios, paired_cells
from scipy.sparse import csc_matrix

import gpuload

if TYPE_CHECKING:
    from pathlib import Path


def write_synthetic(folder: Path, n_train: int, seed: int) -> None:
    """Write files in the competition's format, with numbers from `modality_cells`."""
    from tqdm import tqdm

    folder.mkdir(parents=True, exist_ok=True)
    n_test = min(1000, max(1, n_train // 4))
    with tqdm(total=n_train + n_test, desc="making cells", unit="cell", disable=None) as bar:
        parts = paired_cells(n_train, n_test, seed=seed, progress=bar.update)
    for name, cells in zip(("train", "test"), parts, strict=True):
        obs = pd.DataFrame({"batch": cells.batch, "cell_type": cells.cell_type.astype(str)})
        obs.index = pd.Index([f"{name}_{i}" for i in range(len(obs))])
        genes = anndata.AnnData(cells.genes, obs)
        genes.write_h5ad(folder / f"{name}_mod1.h5ad", compression="gzip")
        proteins = anndata.AnnData(cells.proteins, obs, layers={"noise_free": cells.noise_free})
        proteins.write_h5ad(folder / f"{name}_mod2.h5ad", compression="gzip")


def write_real(folder: Path) -> None:
    """Write 400 real blood cells in Open Problems' format: two experiments, their shared genes and proteins.

    A quarter of the cells of each is held out. Genes are log1p of counts per 10,000, proteins log ratios.
    """
    from real_cells import fetch

    found = [anndata.read_h5ad(path) for path in fetch("cite", folder / "real-cells")]
    panels = [pd.Index(np.asarray(cells.uns["protein_names"], dtype=str)) for cells in found]
    shared_proteins = panels[0].intersection(panels[1])
    shared_genes = found[0].var_names.unique().intersection(found[1].var_names.unique())
    parts: dict[str, list[anndata.AnnData]] = {}
    for cells, panel, name in zip(found, panels, ("pbmc_5k", "pbmc_10k"), strict=True):
        is_test = np.arange(cells.n_obs) % 4 == 3
        counts = csc_matrix(cells[:, ~cells.var_names.duplicated()][:, shared_genes].X).tocsr()
        with gpuload.open_loader(
            counts, shuffle=False, output="csr", batch_size=len(is_test),
            transform=gpuload.Transform(target_sum=1e4, log1p=True), device="cpu",
        ) as loader:  # fmt: skip
            normalized = next(iter(loader)).X.copy()
        measured = np.asarray(cells.obsm["protein_expression"], dtype=np.float32)[:, panel.get_indexer(shared_proteins)]
        obs = pd.DataFrame({"batch": name}, index=name + "_" + cells.obs_names)
        for modality, raw, values, names in (
            ("mod1", counts, normalized, shared_genes),
            ("mod2", measured, log_ratios(measured), shared_proteins),
        ):
            table = anndata.AnnData(None, obs, pd.DataFrame(index=names), layers={"counts": raw, "normalized": values})
            for part, chosen in (("train", ~is_test), ("test", is_test)):
                parts.setdefault(f"{part}_{modality}", []).append(table[chosen].copy())
    for name, pieces in parts.items():
        whole = anndata.concat(pieces)
        whole.uns = {"dataset_id": "pbmc_cite", "normalization_id": "log_cp10k",
                     "modality": "GEX" if name.endswith("mod1") else "ADT"}  # fmt: skip
        whole.write_h5ad(folder / f"{name}.h5ad", compression="gzip")
