"""Diversity of minibatches: the entropy of a label in them, measured, expected and bounded. NumPy and SciPy only.

Motivation: reading whole blocks of neighbouring cells is fast, but files are sorted by plate, donor or sample, so the
choice of `block_size` and `fetch_factor` depends on whether minibatches are as mixed as truly random ones. The package
deals in labels and sizes, not in files or plans; a loader is only a source of minibatches.

The model. Every block carries one label (runs on disk are at least as long as a block; impure blocks are only more
diverse), drawn independently from the shares p. A fetch is ``batch_size * fetch_factor`` cells, a minibatch
`batch_size` of them drawn without replacement. With H the plug-in entropy of a minibatch's counts and EH_n its mean
over n independent draws::

    EH_(batch_size / block_size)  <=  E[H]  <=  min(EH_batch_size, EH_(blocks per fetch))  <=  entropy of p

The lower bound is attained at ``fetch_factor=1``; the upper one is approached as `fetch_factor` grows. What matters is
the number of blocks per fetch: at four to eight times the number of classes, the loss is at most 0.1 to 0.2 bits.

Which function to use: `expected_entropy` takes only the shares and is exact under the model; `entropy_of_runs` takes
the labels in file order, needs no model, and reports where the model fails; the bounds of `entropy_bounds` are
rigorous; `measure_entropy` measures a running loader.

References
----------
.. [1] Shannon, "A mathematical theory of communication", Bell System Technical Journal 1948.
.. [2] Paninski, "Estimation of entropy and mutual information", Neural Computation 2003, doi:10.1162/089976603321780272
   (mean of the plug-in estimate, and its bound by the chi-square distance).
.. [3] D'Ascenzo, Cultrera di Montesano, "scDataset: scalable data loading for deep learning on large-scale single-cell
   omics", arXiv:2506.01883, 2025 (block sampling with batched fetching, and minibatch entropy as its measure).
.. [4] Hoeffding, "Probability inequalities for sums of bounded random variables", Journal of the American Statistical
   Association 1963, doi:10.1080/01621459.1963.10500830 (draws with replacement vary more than those without; tails).
"""

from __future__ import annotations

from gpuload.diversity.measured import MinibatchEntropy, entropy_bits, measure_entropy
from gpuload.diversity.model import (
    entropy_bounds,
    expected_entropy,
    iid_entropy,
    label_entropy,
    label_shares,
)
from gpuload.diversity.runs import TOLERANCE_BITS, RunsEntropy, entropy_of_runs, fetch_entropy

__all__ = [
    "TOLERANCE_BITS",
    "MinibatchEntropy",
    "RunsEntropy",
    "entropy_bits",
    "entropy_bounds",
    "entropy_of_runs",
    "expected_entropy",
    "fetch_entropy",
    "iid_entropy",
    "label_entropy",
    "label_shares",
    "measure_entropy",
]
