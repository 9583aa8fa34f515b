"""What rivals that end at SciPy leave to their users: normalisation, as by `gpuload.Transform`, and tensors."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from scipy.sparse import csr_matrix

from benchmarks.job import TARGET_SUM

if TYPE_CHECKING:
    import torch


def normalised(X: csr_matrix) -> csr_matrix:
    """Return rows scaled to the same total and log1p of them, in float32; X is left as it is.

    Only what is stored is computed with, before the rows are made dense, in few calls on large arrays.
    """
    totals = np.add.reduceat(np.append(X.data, np.float32(0)), X.indptr[:-1])
    totals[np.diff(X.indptr) == 0] = 1
    values = X.data * np.repeat((TARGET_SUM / totals).astype(np.float32), np.diff(X.indptr))
    return csr_matrix((np.log1p(values, out=values), X.indices, X.indptr), shape=X.shape)


def torch_csr(X: csr_matrix) -> torch.Tensor:
    """Return a SciPy CSR matrix as a tensor without a copy."""
    import torch  # not every rival's interpreter has it

    indptr, indices, data = (torch.from_numpy(part) for part in (X.indptr, X.indices, X.data))
    return torch.sparse_csr_tensor(indptr, indices, data, size=X.shape, check_invariants=False)
