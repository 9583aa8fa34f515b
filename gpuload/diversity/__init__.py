"""Diversity of minibatches: the entropy of a label in them, measured, expected and bounded. NumPy and SciPy only.

Why it exists: reading whole blocks of neighbouring cells is fast, and files are sorted by plate, donor or sample, so
the question whether a minibatch is as mixed as a true random one decides which `block_size` and `fetch_factor` may be
chosen. It knows labels and sizes, and nothing of files and plans; of a loader only that it hands over minibatches.

The model. Every block carries one label (runs on disk at least as long as a block; impure blocks are only more
diverse), drawn independently from the shares p. A fetch is ``batch_size * fetch_factor`` cells, a minibatch
`batch_size` of them without replacement. With H the plug-in entropy of a minibatch's counts and EH_n its mean over n
independent draws::

    EH_(batch_size / block_size)  <=  E[H]  <=  min(EH_batch_size, EH_(blocks per fetch))  <=  entropy of p

The lower bound is reached at ``fetch_factor=1``; the upper one is approached as `fetch_factor` grows. What counts is
the number of blocks in a fetch: four to eight times the number of classes costs no more than 0.1 to 0.2 bits.

Which function to use: `expected_entropy` knows the shares only and is exact under the model; `entropy_of_runs` knows
the labels as they lie in a file, needs no model, and says where the model fails; `entropy_bounds` and `closed_form`
are rigorous; `first_order_entropy` is what papers print, and no bound; `measure_entropy` looks at a running loader.

References
----------
.. [1] Shannon, "A mathematical theory of communication", Bell System Technical Journal 1948.
.. [2] Paninski, "Estimation of entropy and mutual information", Neural Computation 2003, doi:10.1162/089976603321780272
   (mean of the plug-in estimate, and its bound by the chi-square distance).
.. [3] D'Ascenzo, Cultrera di Montesano, "scDataset: scalable data loading for deep learning on large-scale single-cell
   omics",
   arXiv:2506.01883, 2025 (block sampling with batched fetching, and minibatch entropy as its measure).
.. [4] Hoeffding, "Probability inequalities for sums of bounded random variables", Journal of the American Statistical
   Association 1963, doi:10.1080/01621459.1963.10500830 (draws with replacement spread more than those without; tails).
.. [5] Miller, "Note on the bias of information estimates", in: Information Theory in Psychology, 1955.
"""

from __future__ import annotations

from gpuload.diversity.measured import MinibatchEntropy, entropy_bits, measure_entropy
from gpuload.diversity.model import (
    closed_form,
    entropy_bounds,
    expected_entropy,
    first_order_entropy,
    iid_entropy,
    label_entropy,
    label_shares,
)
from gpuload.diversity.runs import TOLERANCE_BITS, RunsEntropy, entropy_of_runs, fetch_entropy

__all__ = [
    "TOLERANCE_BITS",
    "MinibatchEntropy",
    "RunsEntropy",
    "closed_form",
    "entropy_bits",
    "entropy_bounds",
    "entropy_of_runs",
    "expected_entropy",
    "fetch_entropy",
    "first_order_entropy",
    "iid_entropy",
    "label_entropy",
    "label_shares",
    "measure_entropy",
]
