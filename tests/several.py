"""AnnDatas with several matrices, whose files have different genes. Uses anndata, but not gpuload."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Any

import anndata
import numpy as np
import pandas as pd
from scipy.sparse import csr_matrix

from tests.writers import counts

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

N_KNOWN = 70
"""Number of genes in all; each part has some of them."""


def part(seed: int, *, is_dense: bool = False, n_obs: int = 23, genes: Sequence[str] | None = None) -> anndata.AnnData:
    """Return cells with their own genes in their own order, except for gene_0 to gene_9, which all parts have.

    X and the layers "spliced" (the other of CSR and dense) and "scaled" (float64, negative too) are of the same genes;
    obsm has "X_pca" (float64), "marks" (CSR) and "table" (a data frame).
    """
    rng = np.random.default_rng(seed)
    if genes is None:
        own = 10 + rng.permutation(N_KNOWN - 10)[: rng.integers(5, 40)]
        genes = [f"gene_{i}" for i in rng.permutation(np.concatenate([np.arange(10), own]))]
    X = csr_matrix(counts(n_obs, len(genes), seed))
    spliced = csr_matrix(counts(n_obs, len(genes), seed + 1000))
    cells = anndata.AnnData(
        X.toarray() if is_dense else X,
        obs=pd.DataFrame(
            {"donor": pd.Categorical(rng.choice(["ann", f"bob {seed}"], n_obs)), "depth": rng.normal(size=n_obs)},
            index=[f"cell_{seed}_{i}" for i in range(n_obs)],
        ),
        var=pd.DataFrame(index=pd.Index(list(genes), dtype=object)),
    )
    cells.layers["spliced"] = spliced if is_dense else spliced.toarray()
    cells.layers["scaled"] = rng.normal(size=X.shape)
    cells.obsm["X_pca"] = rng.normal(size=(n_obs, 6))
    cells.obsm["marks"] = csr_matrix(counts(n_obs, 4, seed + 2000))
    cells.obsm["table"] = pd.DataFrame({"a": rng.normal(size=n_obs)}, index=cells.obs_names)
    return cells


def write(folder: Path, parts: Sequence[anndata.AnnData], **options: Any) -> list[Path]:
    """Write parts as .h5ad files, and return their paths."""
    folder.mkdir(parents=True, exist_ok=True)
    paths = [folder / f"part{k:02d}.h5ad" for k in range(len(parts))]
    for path, cells in zip(paths, parts, strict=True):
        cells.copy().write_h5ad(path, **options)
    return paths


def write_zarr(path: Path, cells: anndata.AnnData) -> Path:
    """Write cells as anndata writes zarr by default."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        cells.copy().write_zarr(path)
    return path


def dense(matrix: Any) -> np.ndarray:
    """Return a CSR or dense matrix as a float32 array."""
    return np.asarray(matrix.toarray() if hasattr(matrix, "toarray") else matrix, dtype=np.float32)
