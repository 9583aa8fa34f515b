"""The plain loop over a CSR matrix that is wholly in RAM: no loader at all, and only for data that fits."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import anndata
import numpy as np
import torch

from benchmarks.job import LABEL, Job
from benchmarks.rivals.matrices import normalised, torch_csr

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

PACKAGES = ("scipy", "numpy", "torch", "anndata")


def start(job: Job) -> RamLoading:
    """Read the whole file; this is its time to the first batch."""
    settings = job.arm.settings
    return RamLoading(anndata.read_h5ad(job.path), settings, job.seed)


class RamLoading:
    """Random rows of a matrix in RAM."""

    io_mode = "none"

    def __init__(self, adata: anndata.AnnData, settings: Mapping[str, Any], seed: int) -> None:
        self._X = adata.X
        self._label = adata.obs[LABEL].cat.codes.to_numpy().astype(np.int64)
        self._batch_size = settings["batch_size"]
        self._output = settings["output"]
        self._is_log1p = settings.get("log1p", False)
        self._rng = np.random.default_rng(seed)

    def epoch(self) -> Iterator[Mapping[str, Any]]:
        """Iterate over the minibatches of the next epoch, in true random order."""
        order = self._rng.permutation(self._X.shape[0])
        for start in range(0, order.size, self._batch_size):
            rows = order[start : start + self._batch_size]
            X = normalised(self._X[rows]) if self._is_log1p else self._X[rows]
            yield {
                "X": torch.from_numpy(X.toarray()) if self._output == "dense" else torch_csr(X),
                "label": torch.from_numpy(self._label[rows]),
                "rows": torch.from_numpy(rows),
            }

    def close(self) -> None:
        """Nothing is open."""
