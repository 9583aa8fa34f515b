"""A documented generator of data shaped like Tahoe-100M, for demos, tests and benchmarks.

Benchmarks need a file of the right shape on any machine, without downloading hundreds of gigabytes. The generator
reproduces what matters for an input pipeline: stored values per cell, compressibility of `data` and `indices`, the
order of the cells on disk, and labels that a model can learn. It is not biology: only the figures cited below come from
the real data.

This module is independent of files, loaders and AnnData: it returns SciPy and pandas objects.

References
----------
.. [1] Zhang et al., "Tahoe-100M: A Giga-Scale Single-Cell Perturbation Atlas for Context-Dependent Gene Function and
   Cellular Modeling", bioRxiv 2025, doi:10.1101/2025.02.20.639398. Its files: 14 plates, 50 cell lines, about 380
   drugs, 62,710 genes; 1,450 stored values (standard deviation 735) and 2,200 UMIs a cell; 2.15 bytes a stored value.
.. [2] Townes, Hicks, Aryee, Irizarry, "Feature selection and dimension reduction for single-cell RNA-Seq based on a
   multinomial model", Genome Biology 2019, doi:10.1186/s13059-019-1861-6: UMI counts of a cell as a multinomial draw.
"""

from __future__ import annotations

from collections import deque
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from gpuload.errors import PlanError
from gpuload.machine import usable_cores

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    import pandas as pd
    from numpy.typing import NDArray
    from scipy.sparse import csr_matrix

MEAN_COUNTS = 1_500
"""Default number of stored values per cell (Tahoe-100M: about 1,450)."""

COUNTS_SD = 735 / MEAN_COUNTS
"""Standard deviation of the stored values per cell, relative to their mean."""

GENE_SKEW = 2.35
"""Standard deviation of the logarithm of gene popularity.

With `BURST` it determines how well the counts compress: gzip at level 4 shrinks `data` 7.7 times and `indices` 2.1
times, to 2.5 bytes per stored value.
"""

BURST = 0.25
"""A stored value has k extra UMIs with probability ``(1 - BURST) * BURST**k``: more spread than a multinomial."""

PLATE_SHARE, LINE_SHARE, DRUG_SHARE = 0.02, 0.025, 0.02
"""Share of a cell's UMIs that falls on the genes raised by its plate, cell line and drug."""

PLATE_GENES, LINE_GENES, DRUG_GENES = 1 / 30, 1 / 150, 1 / 1_000
"""Genes that one plate, cell line or drug raises, as a fraction of all genes."""

SILENCED_GENES = 1 / 300
"""Fraction of the genes that a cell line does not express at all."""

_BLOCK_ROWS = 512
"""Cells per block, drawn from one random stream: part of the model, so that the result depends only on the seed."""

_BASE_SLOTS = 1 << 21
_OWN_SLOTS = 1 << 12
_BURST_SLOTS = 1 << 16


@dataclass(frozen=True, slots=True)
class Kind:
    """A label whose categories each raise genes of their own.

    Attributes
    ----------
    share
        Share of a cell's UMIs on the genes that its category raises.
    genes
        Genes that one category raises, as a fraction of all genes.
    """

    n: int
    share: float
    genes: float


@dataclass(frozen=True, slots=True)
class CountModel:
    """The parameters that cells are drawn from; created by `count_model`.

    A UMI is drawn by choosing uniformly among the slots of a table, each of which holds a gene number: one gather, no
    search. All tables are concatenated in `slots`: that of gene popularity, then one per category of each label.

    Attributes
    ----------
    slots : (_BASE_SLOTS + n_labels * _OWN_SLOTS,) uint16 or int32
        Gene numbers.
    own_start : (n_kinds,) int64
        First slot of the first table of each label.
    own_shares
        Share of a cell's UMIs that falls on the genes raised by each label.
    silenced : (n_cell_lines, n_vars) bool
        Genes that a cell line does not express.
    burst : (_BURST_SLOTS,) float32
        Extra UMIs of a stored value.
    depth, distinct : (n_grid,) float64
        UMIs of a cell, and the expected number of distinct genes among them; both ascending.
    """

    n_vars: int
    slots: NDArray[np.integer]
    own_start: NDArray[np.int64]
    own_shares: tuple[float, ...]
    silenced: NDArray[np.bool_]
    burst: NDArray[np.float32]
    depth: NDArray[np.float64]
    distinct: NDArray[np.float64]


def tahoe_shaped(
    n_obs: int,
    *,
    n_vars: int = 62_710,
    mean_counts_per_cell: float | None = None,
    n_plates: int = 14,
    n_cell_lines: int = 50,
    n_drugs: int = 380,
    seed: int = 0,
    progress: Callable[[int], None] | None = None,
) -> tuple[csr_matrix, pd.DataFrame, pd.DataFrame]:
    """Make a data set shaped like Tahoe-100M, sorted by plate, cell line and drug.

    The model. Gene popularity is log-normal (`GENE_SKEW`). The number of stored values wanted in a cell is log-normal
    with standard deviation `COUNTS_SD` times the mean, and the cell draws as many UMIs as hit that number of distinct
    genes on average. Each UMI falls on a gene raised by the cell line (2.5 %), the drug (2 %) or the plate (2 %, a
    batch effect), or else on a gene by its popularity; a cell line also silences 1 gene in 300. A count is the number
    of hits plus a geometric number (`BURST`), so counts are small integers, mostly 1. Plates differ in size by up to a
    factor of 1.94 (14 plates: 5 % to 10 %, entropy 3.78 bits), cell lines are unequally frequent, and a drug is on
    about a quarter of the plates.

    Parameters
    ----------
    n_obs, n_vars
        Cells and genes.
    mean_counts_per_cell
        Mean number of stored values per cell; None: `MEAN_COUNTS`, or an eighth of `n_vars` if that is less.
    n_plates, n_cell_lines, n_drugs
        Number of categories of each label.
    seed
        The result is a pure function of the seed and the sizes.
    progress
        Called with the number of cells done, after every 512 cells.

    Returns
    -------
    X : (n_obs, n_vars) CSR matrix
        float32 counts; int32 `indices`, sorted and distinct within a row; `indptr` int32, from 2**31 values on int64.
    obs
        `plate`, `cell_line`, `drug` (categorical), `gene_count` (stored values), `tscp_count` (UMIs), `pass_filter`
        (whether the cell has at least half the mean number of stored values).
    var
        One row per gene, indexed by its name.

    Raises
    ------
    PlanError
        A size is below 1 (`n_obs`: below 0), or `mean_counts_per_cell` is not within 0 and a quarter of `n_vars`.

    Notes
    -----
    Cells are drawn on all cores. Memory use is that of the result, 8 bytes per stored value, plus about 60 MB and some
    70 MB per core.
    """
    if n_obs < 0:
        raise PlanError(f"n_obs={n_obs!r}: expected at least 0 cells.")
    check_sizes({"n_vars": n_vars, "n_plates": n_plates, "n_cell_lines": n_cell_lines, "n_drugs": n_drugs})
    mean_counts = mean_counts_of(mean_counts_per_cell, n_vars)
    setup = np.random.default_rng(np.random.SeedSequence([seed, 0]))
    labels = _labels(setup, n_obs, n_plates, n_cell_lines, n_drugs)
    kinds = (
        Kind(n_plates, PLATE_SHARE, PLATE_GENES),
        Kind(n_cell_lines, LINE_SHARE, LINE_GENES),
        Kind(n_drugs, DRUG_SHARE, DRUG_GENES),
    )
    model = count_model(setup, n_vars, kinds)
    X = draw_counts(model, labels, draw_depths(setup, model, n_obs, mean_counts), (seed, 1), progress)
    columns = {"plate": ("plate", n_plates), "cell_line": ("line", n_cell_lines), "drug": ("drug", n_drugs)}
    return X, _with_counts(label_columns(labels, columns), X, mean_counts), gene_table(n_vars)


def check_sizes(sizes: Mapping[str, int]) -> None:
    """Raise PlanError if one of the arguments, given by their names, is below 1."""
    for name, size in sizes.items():
        if size < 1:
            raise PlanError(f"{name}={size!r}: expected at least 1.")


def mean_counts_of(per_cell: float | None, n_vars: int) -> float:
    """Return the mean number of stored values per cell, or the default; PlanError if there are too few genes."""
    mean_counts = min(MEAN_COUNTS, n_vars / 8) if per_cell is None else per_cell
    if not 0 < mean_counts <= n_vars / 4:
        raise PlanError(
            f"mean_counts_per_cell={mean_counts!r}: expected more than 0 and at most a quarter of the {n_vars} genes."
        )
    return mean_counts


def _labels(rng: np.random.Generator, n_obs: int, n_plates: int, n_cell_lines: int, n_drugs: int) -> NDArray[np.int32]:
    """Draw the plate, cell line and drug of every cell, shape (3, n_obs), sorted by these in this order."""
    plate_share = rng.permutation(np.linspace(1.0, 1.94, n_plates))
    plate = np.repeat(np.arange(n_plates, dtype=np.int32), _apportion(plate_share, n_obs))
    line_share = rng.lognormal(sigma=0.5, size=n_cell_lines)
    line = rng.choice(n_cell_lines, size=n_obs, p=line_share / line_share.sum()).astype(np.int32)
    # The drugs of a plate are a run of one shuffled list; the runs' starts are spread evenly, so no drug is left out.
    per_plate = min(n_drugs, max(1, -(-n_drugs // 4), -(-n_drugs // n_plates)))
    offset = np.arange(n_plates) * n_drugs // n_plates
    drug = rng.permutation(n_drugs)[(offset[plate] + rng.integers(per_plate, size=n_obs)) % n_drugs].astype(np.int32)
    return np.stack([plate, line, drug])[:, np.lexsort((drug, line, plate))]


def count_model(rng: np.random.Generator, n_vars: int, kinds: tuple[Kind, ...]) -> CountModel:
    """Draw gene popularity, the genes that every category of every label raises, and those that the second silences.

    Parameters
    ----------
    kinds
        The labels, at least two; the second one (the cell line) also silences 1 gene in 300 of each category.
    """
    popularity = rng.lognormal(sigma=GENE_SKEW, size=n_vars)
    popularity /= popularity.sum()
    gene_dtype = np.uint16 if n_vars <= 2**16 else np.int32  # the tables must stay in the CPU's cache
    raised_pool = _spread(np.sqrt(popularity), _BASE_SLOTS)
    tables = [_spread(popularity, _BASE_SLOTS)]
    for kind in kinds:
        n_genes = min(max(2, round(kind.genes * n_vars)), _OWN_SLOTS)
        genes = raised_pool[rng.integers(_BASE_SLOTS, size=(kind.n, n_genes))]
        tables.append(genes[:, np.arange(_OWN_SLOTS) * n_genes // _OWN_SLOTS].reshape(-1))
    depth = np.geomspace(1.0, 16.0 * n_vars, num=64)
    return CountModel(
        n_vars=n_vars,
        slots=np.concatenate(tables).astype(gene_dtype),
        own_start=np.cumsum([table.size for table in tables[:-1]]),
        own_shares=tuple(kind.share for kind in kinds),
        silenced=rng.random((kinds[1].n, n_vars), dtype=np.float32) < SILENCED_GENES,
        burst=_spread(BURST ** np.arange(16.0), _BURST_SLOTS).astype(np.float32),
        depth=depth,
        distinct=np.array([-np.expm1(-n_umis * popularity).sum() for n_umis in depth]),
    )


def draw_depths(rng: np.random.Generator, model: CountModel, n_obs: int, mean_counts: float) -> NDArray[np.int64]:
    """Draw the number of UMIs of every cell before bursts, shape (n_obs,)."""
    sigma = np.sqrt(np.log1p(COUNTS_SD**2))
    wanted = rng.lognormal(mean=np.log(mean_counts) - sigma**2 / 2, sigma=sigma, size=n_obs)
    return np.rint(np.interp(wanted, model.distinct, model.depth)).astype(np.int64)


def draw_counts(
    model: CountModel,
    labels: NDArray[np.int32],
    depth: NDArray[np.int64],
    seed_words: tuple[int, ...],
    progress: Callable[[int], None] | None,
) -> csr_matrix:
    """Draw the counts of all cells, block by block, into arrays that are trimmed at the end.

    Parameters
    ----------
    labels : (n_kinds, n_obs) int32
        Categories of every cell, in the order of the model's labels.
    depth : (n_obs,) int64
        UMIs of every cell before bursts.
    progress
        Called with the number of cells done, after every 512 cells.

    Returns
    -------
    (n_obs, n_vars) CSR matrix of float32
        Columns sorted and distinct within a row.
    """
    from scipy.sparse import csr_matrix

    n_obs = depth.size
    # At most one value per UMI; pages never written are never committed.
    data = np.empty(int(depth.sum()), dtype=np.float32)
    indices = np.empty(data.size, dtype=np.int32)
    indptr = np.zeros(n_obs + 1, dtype=np.int64)

    def drawn(start: int) -> csr_matrix:
        rng = np.random.default_rng(np.random.SeedSequence([*seed_words, start]))
        rows = slice(start, start + _BLOCK_ROWS)
        return _draw_block(rng, model, labels[:, rows], depth[rows])

    starts = range(0, n_obs, _BLOCK_ROWS)
    with ThreadPoolExecutor(usable_cores()) as threads:
        ahead = deque(threads.submit(drawn, start) for start in starts[: 2 * usable_cores()])
        for number, start in enumerate(starts, len(ahead)):
            block, stop = ahead.popleft().result(), min(start + _BLOCK_ROWS, n_obs)
            if number < len(starts):
                ahead.append(threads.submit(drawn, starts[number]))
            filled = slice(int(indptr[start]), int(indptr[start]) + block.nnz)
            data[filled], indices[filled] = block.data, block.indices
            indptr[start + 1 : stop + 1] = filled.start + block.indptr[1:]
            if progress is not None:
                progress(stop)
    nnz = int(indptr[-1])
    data.resize(nnz, refcheck=False)
    indices.resize(nnz, refcheck=False)
    X = csr_matrix((n_obs, model.n_vars), dtype=np.float32)
    X.data, X.indices, X.indptr = data, indices, indptr.astype(np.int32 if nnz < 2**31 else np.int64)
    X.has_canonical_format = True
    return X


def _draw_block(
    rng: np.random.Generator, model: CountModel, labels: NDArray[np.int32], depth: NDArray[np.int64]
) -> csr_matrix:
    """Draw the counts of a block of cells from their labels (n_kinds, n_rows) and depth (n_rows,); sorted columns."""
    from scipy.sparse import csr_matrix

    n_drawn = rng.multinomial(depth, [*model.own_shares, 1.0 - sum(model.own_shares)])
    start = np.zeros(n_drawn.shape, dtype=np.uint32)
    start[:, :-1] = model.own_start + labels.T * np.int64(_OWN_SLOTS)
    last = np.full(n_drawn.shape, _OWN_SLOTS - 1, dtype=np.uint32)
    last[:, -1] = _BASE_SLOTS - 1
    slot = rng.integers(2**32, size=int(depth.sum()), dtype=np.uint32)
    slot &= np.repeat(last.reshape(-1), n_drawn.reshape(-1))  # both table sizes are powers of two
    slot += np.repeat(start.reshape(-1), n_drawn.reshape(-1))
    indptr = np.concatenate([[0], np.cumsum(depth)]).astype(np.int32)
    hits = csr_matrix(
        (np.ones(slot.size, dtype=np.float32), model.slots[slot].astype(np.int32), indptr),
        shape=(depth.size, model.n_vars),
    )
    block = hits.tocsc().tocsr()  # sorts the columns in linear time
    block.sum_duplicates()
    line = np.repeat(labels[1].astype(np.int64), np.diff(block.indptr))
    kept = ~model.silenced.reshape(-1)[line * model.n_vars + block.indices]
    burst = model.burst[rng.integers(_BURST_SLOTS, size=kept.size, dtype=np.uint32)]
    n_kept = np.concatenate([[0], np.cumsum(kept)])[block.indptr]
    return csr_matrix(((block.data + burst)[kept], block.indices[kept], n_kept), shape=block.shape)


def _spread(weights: NDArray[np.float64], n_slots: int) -> NDArray[np.int64]:
    """Return positions 0 .. len(weights) - 1 in order, each repeated in proportion to its weight, shape (n_slots,)."""
    return np.repeat(np.arange(weights.size), _apportion(weights, n_slots))


def _apportion(weights: NDArray[np.float64], total: int) -> NDArray[np.int64]:
    """Return integers proportional to `weights` that sum to `total`."""
    edges = np.rint(np.cumsum(weights) / np.sum(weights) * total).astype(np.int64)
    return np.diff(edges, prepend=0)


def label_columns(labels: NDArray[np.int32], columns: dict[str, tuple[str, int]]) -> pd.DataFrame:
    """Return one row per cell with a categorical column for each label.

    Parameters
    ----------
    columns
        For each column by name, in the order of `labels`: the prefix of its categories' names and their number.
    """
    import pandas as pd

    coded = {
        name: pd.Categorical.from_codes(codes, categories=names(prefix, n))
        for (name, (prefix, n)), codes in zip(columns.items(), labels, strict=True)
    }
    return pd.DataFrame(coded, index=pd.Index(names("cell", labels.shape[1]), dtype=object))


def gene_table(n_vars: int) -> pd.DataFrame:
    """Return one row per gene, without columns."""
    import pandas as pd

    return pd.DataFrame(index=pd.Index(names("gene", n_vars), dtype=object))


def _with_counts(obs: pd.DataFrame, X: csr_matrix, mean_counts: float) -> pd.DataFrame:
    """Return `obs` with the per-cell count columns."""
    gene_count = np.diff(X.indptr)
    return obs.assign(
        gene_count=gene_count.astype(np.int32),
        tscp_count=np.asarray(X.sum(axis=1)).reshape(-1).astype(np.int32),
        pass_filter=gene_count >= mean_counts / 2,
    )


def names(prefix: str, n: int) -> list[str]:
    """Return n names with zero-padded numbers, so that they sort as text in numeric order."""
    width = len(str(n))
    return [f"{prefix}_{number:0{width}d}" for number in range(1, n + 1)]
