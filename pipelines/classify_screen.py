"""A documented generator of a drug screen shaped like Tahoe-100M: five labels to learn, files sorted by drug.

It reproduces these known properties of the real screen: plates of one file each; all cell lines pooled in every well; a
plate holds a quarter of the drugs, one after the other, so that on disk a drug is a run of cells of all lines; drugs
belong to mechanisms, with a fine and a broad list; plates differ (batch effects). The counts are those of
`gpuload.synthetic`, with its constants for plates and cell lines. It is not biology.

The model. Each UMI of a cell falls on a gene raised by its plate (2 %), cell line (2.5 %), broad mechanism (1 %), fine
mechanism (1 %) or drug (1 %), or else on a gene by its popularity. A broad mechanism raises 1 gene in 50, a fine one 1
in 100, a drug 1 in 200. So cell lines are easiest to distinguish and drugs hardest, drugs of one mechanism are similar,
and a plate shifts all of its cells. These numbers were fixed before any model was trained on the cells, and have not
changed since.

References
----------
.. [1] Zhang et al., "Tahoe-100M: A Giga-Scale Single-Cell Perturbation Atlas for Context-Dependent Gene Function and
   Cellular Modeling", bioRxiv 2025, doi:10.1101/2025.02.20.639398 (14 plates of 96 wells, 50 cell lines in each well,
   about 380 drugs; 4 broad and 27 fine mechanisms).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from gpuload.errors import PlanError
from gpuload.synthetic import (
    LINE_GENES,
    LINE_SHARE,
    PLATE_GENES,
    PLATE_SHARE,
    Kind,
    check_sizes,
    count_model,
    draw_counts,
    draw_depths,
    gene_table,
    label_columns,
    mean_counts_of,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    import pandas as pd
    from numpy.typing import NDArray
    from scipy.sparse import csr_matrix

    from gpuload.synthetic import CountModel

MECHANISM_SHARE, DRUG_SHARE = 0.01, 0.01
"""Share of a cell's UMIs on the genes raised by its mechanism, for the broad and for the fine one, and by its drug."""

BROAD_GENES, FINE_GENES, DRUG_GENES = 1 / 50, 1 / 100, 1 / 200
"""Genes that one broad mechanism, fine mechanism or drug raises, as a fraction of all genes."""

WELL_SPREAD, CLASS_SPREAD = 0.3, 0.5
"""Standard deviation of the logarithm of the cells of a well, and of the frequency of cell lines and mechanisms."""


@dataclass(frozen=True, slots=True)
class Plate:
    """One plate of a screen, as one file would hold it.

    Attributes
    ----------
    name
        Name of the plate: ``"plate_01"`` and so on, as in `obs`.
    X : (n, n_vars) CSR matrix of float32
        Counts.
    obs
        `plate`, `drug`, `moa_broad`, `moa_fine`, `cell_line`, all categorical, with the categories of the whole screen;
        sorted by well, which is by drug.
    var
        One row per gene, indexed by its name.
    """

    name: str
    X: csr_matrix
    obs: pd.DataFrame
    var: pd.DataFrame


def screen_plates(
    n_obs: int,
    *,
    n_vars: int = 2_000,
    mean_counts_per_cell: float | None = None,
    n_plates: int = 14,
    n_cell_lines: int = 50,
    n_drugs: int = 380,
    n_broad: int = 4,
    n_fine: int = 27,
    seed: int = 0,
    progress: Callable[[int], None] | None = None,
) -> Iterator[Plate]:
    """Generate a screen plate by plate, holding one at a time; a pure function of the sizes and the seed.

    With two or more plates, every drug is on at least two: a held-out plate has no drug that the others lack.

    Parameters
    ----------
    n_obs, n_vars
        Total cells of all plates, which are of equal size, and genes.
    mean_counts_per_cell
        Mean number of stored values per cell; None: `gpuload.synthetic.MEAN_COUNTS`, or an eighth of `n_vars` if that
        is less.
    n_plates, n_cell_lines, n_drugs, n_broad, n_fine
        Number of categories of each label.
    seed
        At least 0.
    progress
        Called with the number of cells made since the last call.

    Yields
    ------
    Plate
        The plates, in order.

    Raises
    ------
    PlanError
        A size is below 1; there are fewer drugs than fine mechanisms or fewer of these than broad ones; fewer cells
        than plates; or `mean_counts_per_cell` is not within 0 and a quarter of `n_vars`.

    Notes
    -----
    Memory use is that of one plate, 8 bytes per stored value, plus about 60 MB.
    """
    sizes = {"plate": n_plates, "cell_line": n_cell_lines, "moa_broad": n_broad, "moa_fine": n_fine, "drug": n_drugs}
    _check(n_obs, n_vars, sizes)
    mean_counts = mean_counts_of(mean_counts_per_cell, n_vars)
    screen = _Screen(np.random.default_rng(np.random.SeedSequence([seed, 0])), n_vars, sizes)
    for number, cells in enumerate(np.array_split(np.arange(n_obs), n_plates)):
        yield screen.plate(number, cells.size, mean_counts, seed, progress)


class _Screen:
    """The parameters that plates are drawn from."""

    def __init__(self, rng: np.random.Generator, n_vars: int, sizes: dict[str, int]) -> None:
        self._sizes = sizes
        kinds = (
            Kind(sizes["plate"], PLATE_SHARE, PLATE_GENES),
            Kind(sizes["cell_line"], LINE_SHARE, LINE_GENES),
            Kind(sizes["moa_broad"], MECHANISM_SHARE, BROAD_GENES),
            Kind(sizes["moa_fine"], MECHANISM_SHARE, FINE_GENES),
            Kind(sizes["drug"], DRUG_SHARE, DRUG_GENES),
        )
        self._model: CountModel = count_model(rng, n_vars, kinds)
        self._broad_of_fine = _deal(rng, sizes["moa_fine"], sizes["moa_broad"])
        self._fine_of_drug = _deal(rng, sizes["drug"], sizes["moa_fine"])
        self._line_share = _shares(rng, sizes["cell_line"])
        # The drugs of a plate are a run of one shuffled list. The runs' starts are spread evenly, and each run is at
        # least twice as long as the distance to the next start, so every drug is on two plates or more.
        n_drugs, n_plates = sizes["drug"], sizes["plate"]
        per_plate = min(n_drugs, max(-(-n_drugs // 4), -(-2 * n_drugs // n_plates)))
        starts = np.arange(n_plates) * n_drugs // n_plates
        self._drugs = rng.permutation(n_drugs)[(starts[:, None] + np.arange(per_plate)) % n_drugs]

    def plate(
        self, number: int, n_obs: int, mean_counts: float, seed: int, progress: Callable[[int], None] | None
    ) -> Plate:
        """Draw one plate."""
        rng = np.random.default_rng(np.random.SeedSequence([seed, 1, number]))
        wells = rng.permutation(self._drugs[number])
        per_well = rng.multinomial(n_obs, _shares(rng, wells.size, WELL_SPREAD))
        drug = np.repeat(wells, per_well)
        fine = self._fine_of_drug[drug]
        line = rng.choice(self._sizes["cell_line"], size=n_obs, p=self._line_share)
        labels = np.stack([np.full(n_obs, number), line, self._broad_of_fine[fine], fine, drug]).astype(np.int32)
        X = draw_counts(
            self._model,
            labels,
            draw_depths(rng, self._model, n_obs, mean_counts),
            (seed, 2, number),
            None if progress is None else _since(progress),
        )
        obs = label_columns(labels, {name: (_PREFIXES[name], self._sizes[name]) for name in _PREFIXES})
        name = str(obs["plate"].cat.categories[number])
        obs.index = name + "_" + obs.index
        return Plate(name, X, obs, gene_table(X.shape[1]))


_PREFIXES = {"plate": "plate", "cell_line": "line", "moa_broad": "broad", "moa_fine": "fine", "drug": "drug"}
"""Columns of obs, in the order of the model's labels, and the prefixes of their categories' names."""


def _since(progress: Callable[[int], None]) -> Callable[[int], None]:
    """Return a callback that takes the number of cells made so far, and passes its increase to `progress`."""
    reported = 0

    def report(n_done: int) -> None:
        nonlocal reported
        progress(n_done - reported)
        reported = n_done

    return report


def _shares(rng: np.random.Generator, n: int, spread: float = CLASS_SPREAD) -> NDArray[np.float64]:
    """Draw log-normal shares that sum to 1."""
    weights = rng.lognormal(sigma=spread, size=n)
    return np.asarray(weights / weights.sum())


def _deal(rng: np.random.Generator, n: int, n_classes: int) -> NDArray[np.int64]:
    """Draw the class of each of n members: every class has at least one, and the sizes are unequal."""
    more = rng.choice(n_classes, size=n - n_classes, p=_shares(rng, n_classes))
    return rng.permutation(np.concatenate([np.arange(n_classes), more]))


def _check(n_obs: int, n_vars: int, sizes: dict[str, int]) -> None:
    """Raise PlanError if the sizes are invalid."""
    check_sizes({"n_vars": n_vars, **{_ARGUMENTS.get(k, f"n_{k}s"): n for k, n in sizes.items()}})
    if n_obs < sizes["plate"]:
        raise PlanError(f"n_obs={n_obs!r}: expected at least a cell for each of the {sizes['plate']} plates.")
    for part, whole in (("moa_fine", "drug"), ("moa_broad", "moa_fine")):
        if sizes[part] > sizes[whole]:
            few, many = (_ARGUMENTS.get(name, f"n_{name}s") for name in (whole, part))
            raise PlanError(f"{many}={sizes[part]!r}: expected at most {few}={sizes[whole]!r}, so that each has one.")


_ARGUMENTS = {"moa_broad": "n_broad", "moa_fine": "n_fine"}
"""Parameter names of a label's number of categories, if not ``n_<label>s``."""
