"""A documented generator of paired cells, RNA and surface proteins, in the shape of the NeurIPS 2021 competition.

It reproduces these known properties of the real data: cells, genes, proteins and batches; the share of stored values
(14 %); log-normalised expression; proteins as centred log ratios; rare cell types over-represented among the test
cells; batch effects, with unseen batches in the test set. Proteins follow from a cell's state by a fixed map, whose
output is returned as well (`Paired.noise_free`). Its parameters were set once, from the sizes above and the spread of
the real proteins; no method was run to choose them. It is not biology.

The model, per cell of type t in batch b, with state z (30 dimensions):

- ``z = centre[t] + 0.6 * noise``; centres lie on a tree of types: those of one branch are alike.
- Genes: ``log mean = base + z @ loadings + shift[b]``, loadings sparse (18 %); negative binomial counts of a log-normal
  depth; expression is ``log1p(counts / size factor)``.
- Proteins: ``log mean = scale * tanh(z @ hidden + bias) @ readout + base + shift[b] + noise``; gamma-Poisson counts,
  then the centred log ratio of each cell.

References
----------
.. [1] Lance et al., "Multimodal single cell data integration challenge: results and lessons learned", PMLR 2022.
.. [2] Luecken et al., "A sandbox for prediction and integration of DNA, RNA, and proteins in single cells", NeurIPS
   Datasets and Benchmarks 2021 (the data: 66,175 + 1,000 cells, 13,953 genes, 134 proteins, 9 + 3 batches).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from scipy.sparse import csr_matrix, vstack

from gpuload.synthetic import check_sizes

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray

N_TRAIN, N_TEST, N_GENES, N_PROTEINS = 66_175, 1_000, 13_953, 134
"""The sizes of the competition's data."""

N_TYPES, N_STATES, N_HIDDEN = 45, 30, 64
TRAIN_BATCHES, TEST_BATCHES = 9, 3

_SLICE = 1024


@dataclass(frozen=True)
class Paired:
    """Cells with both modalities.

    Attributes
    ----------
    genes : (n, n_genes) CSR of float32
        Log-normalised expression.
    proteins : (n, n_proteins) float32
        Centred log ratios.
    batch : (n,) str
        Names of the batches.
    cell_type : (n,) int32
        Types.
    noise_free : (n, n_proteins) float32
        The proteins of a cell in that state, without batch, cell and counting noise: roughly the best that a method
        that knew the model could predict.
    """

    genes: csr_matrix
    proteins: NDArray[np.float32]
    batch: NDArray[np.str_]
    cell_type: NDArray[np.int32]
    noise_free: NDArray[np.float32]


def paired_cells(
    n_train: int = N_TRAIN,
    n_test: int = N_TEST,
    n_genes: int = N_GENES,
    n_proteins: int = N_PROTEINS,
    *,
    seed: int = 0,
    progress: Callable[[int], None] | None = None,
) -> tuple[Paired, Paired]:
    """Draw training and test cells; a pure function of sizes and seed.

    Parameters
    ----------
    n_train, n_test
        Numbers of cells; the training cells are sorted by batch, as in the competition's files.
    n_genes, n_proteins
        Numbers of features.
    seed
        At least 0.
    progress
        Called with the number of cells made since the last call.

    Raises
    ------
    PlanError
        A size is below 1.
    """
    check_sizes({"n_train": n_train, "n_test": n_test, "n_genes": n_genes, "n_proteins": n_proteins})
    model = _Model(np.random.default_rng([seed, 0]), n_genes, n_proteins)
    abundance = np.exp(np.random.default_rng([seed, 1]).normal(0, 1, N_TYPES))
    common = abundance / abundance.sum()
    rare = np.sqrt(common) / np.sqrt(common).sum()
    train = model.draw(n_train, common, 0, TRAIN_BATCHES, [seed, 2], progress)
    test = model.draw(n_test, rare, TRAIN_BATCHES, TRAIN_BATCHES + TEST_BATCHES, [seed, 3], progress)
    return train, test


class _Model:
    """The parameters that cells are drawn from."""

    def __init__(self, random: np.random.Generator, n_genes: int, n_proteins: int) -> None:
        n_batches = TRAIN_BATCHES + TEST_BATCHES
        branch = random.integers(0, 8, N_TYPES)
        self.centre = random.normal(0, 0.9, (8, N_STATES))[branch] + random.normal(0, 0.6, (N_TYPES, N_STATES))
        is_loaded = random.random((N_STATES, n_genes)) < 0.18
        self.loadings = (random.normal(0, 0.32, (N_STATES, n_genes)) * is_loaded).astype(np.float32)
        self.base = random.normal(-3.15, 1.55, n_genes).astype(np.float32)
        self.gene_shift = random.normal(0, 0.12, (n_batches, n_genes)).astype(np.float32)
        self.hidden = random.normal(0, 1 / np.sqrt(N_STATES), (N_STATES, N_HIDDEN))
        self.bias = random.normal(0, 0.3, N_HIDDEN)
        readout = random.normal(0, 1, (N_HIDDEN, n_proteins)) * (random.random((N_HIDDEN, n_proteins)) < 0.3)
        self.readout = readout / np.maximum(np.sqrt((readout**2).sum(axis=0)), 1e-9)
        self.protein_scale = np.exp(random.normal(0.5, 0.35, n_proteins))
        self.protein_base = random.normal(1.6, 1.2, n_proteins)
        self.protein_shift = random.normal(0, 0.28, (n_batches, n_proteins))

    def draw(
        self,
        n: int,
        shares: NDArray[np.float64],
        first_batch: int,
        last_batch: int,
        seed: list[int],
        progress: Callable[[int], None] | None,
    ) -> Paired:
        """Draw n cells of batches ``first_batch:last_batch``, sorted by batch."""
        batch = np.sort(np.arange(n) % (last_batch - first_batch)) + first_batch
        genes, proteins, noise_free, types = [], [], [], []
        for start in range(0, n, _SLICE):
            random = np.random.default_rng([*seed, start])
            b = batch[start : start + _SLICE]
            cell_type = random.choice(N_TYPES, b.size, p=shares)
            z = self.centre[cell_type] + 0.6 * random.normal(0, 1, (b.size, N_STATES))
            genes.append(self._genes(random, z, b))
            measured, expected = self._proteins(random, z, b)
            proteins.append(measured)
            noise_free.append(expected)
            types.append(cell_type.astype(np.int32))
            if progress is not None:
                progress(b.size)
        names = np.array([f"s{k // 3 + 1}d{k % 3 + 1}" for k in range(TRAIN_BATCHES + TEST_BATCHES)])[batch]
        return Paired(
            vstack(genes, format="csr"),
            np.concatenate(proteins),
            names,
            np.concatenate(types),
            np.concatenate(noise_free),
        )

    def _genes(self, random: np.random.Generator, z: NDArray[np.float64], batch: NDArray[np.int64]) -> csr_matrix:
        mean = np.exp(self.base + z.astype(np.float32) @ self.loadings + self.gene_shift[batch])
        depth = np.exp(random.normal(0, 0.4, len(z))).astype(np.float32)
        mean *= (depth * 5200 / 13_953 * mean.shape[1] / mean.sum(axis=1))[:, None]
        counts = random.poisson(mean * random.standard_gamma(3.0, mean.shape, dtype=np.float32) / 3)
        factor = np.maximum(counts.sum(axis=1), 1) / (5200 / 13_953 * mean.shape[1])
        found = csr_matrix(counts.astype(np.float32))
        found.data = np.log1p(found.data / np.repeat(factor, np.diff(found.indptr)).astype(np.float32))
        return found

    def _proteins(
        self, random: np.random.Generator, z: NDArray[np.float64], batch: NDArray[np.int64]
    ) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
        state = self.protein_base + self.protein_scale * (np.tanh(z @ self.hidden + self.bias) @ self.readout)
        noisy = state + self.protein_shift[batch] + random.normal(0, 0.3, state.shape)
        counts = random.poisson(np.exp(noisy) * random.standard_gamma(8.0, state.shape) / 8)
        return log_ratios(counts.astype(np.float64)), log_ratios(np.exp(state))


def log_ratios(counts: NDArray[np.floating]) -> NDArray[np.float32]:
    """Return centred log ratios of each cell (row): ``log1p(counts / geometric mean of (1 + counts))``."""
    centre = np.exp(np.log1p(counts).mean(axis=1, keepdims=True))
    return np.asarray(np.log1p(counts / centre), dtype=np.float32)
