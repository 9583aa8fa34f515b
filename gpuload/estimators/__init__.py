"""Estimators with scikit-learn's interface for matrices too large for memory, fed by minibatches, also from a loader.

svd = TruncatedSVD(300).fit(gpuload.open_loader("gex.h5ad", batch_size=2048, block_size="chunk"))
"""

from __future__ import annotations

from gpuload.estimators.arrays import open_engine
from gpuload.estimators.kernel_ridge import KernelRidge
from gpuload.estimators.svd import TruncatedSVD

__all__ = ["KernelRidge", "TruncatedSVD", "open_engine"]
