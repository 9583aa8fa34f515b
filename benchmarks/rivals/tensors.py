"""Zero-copy hand-over to PyTorch for the rivals that end at SciPy."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from scipy.sparse import csr_matrix


def torch_csr(X: csr_matrix) -> torch.Tensor:
    """Return a SciPy CSR matrix as a tensor without a copy."""
    return torch.sparse_csr_tensor(
        torch.from_numpy(X.indptr),
        torch.from_numpy(X.indices),
        torch.from_numpy(X.data),
        size=X.shape,
        check_invariants=False,
    )
