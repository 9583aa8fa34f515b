"""Quality control of perturbation screens: the cells in which the gene that was knocked down is expressed less.

    found = gpuload.knockdown("screen.h5ad", "gene", control="non-targeting", match="cell_line")
    pairs = gpuload.PairedControl("gene", control="non-targeting", match="cell_line")
    loader = gpuload.open_loader("screen.h5ad", sampler=gpuload.Subset(found.mask, pairs))

One pass over the cells, of which only the targeted genes are assembled: a screen may be larger than memory.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from gpuload.checks import check_obs_names, check_whole, is_number
from gpuload.dealing import group_by
from gpuload.errors import PlanError, shown
from gpuload.sampling import Sequential, Subset
from gpuload.sampling.controls import find_controls, has_others, uncontrolled
from gpuload.sampling.rows import SLICE
from gpuload.tables import check_modalities
from gpuload.where import parse as parse_where

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import pandas as pd
    from numpy.typing import NDArray

    from gpuload.cache import SampleStore
    from gpuload.dealing import Label
    from gpuload.loader import Loader
    from gpuload.store import Store
    from gpuload.types import Transform

BATCH_SIZE = 4096
"""Cells per minibatch: the arithmetic on each is of whole arrays."""

FETCH_FACTOR = 2
"""Minibatches per fetch: few, as it holds all genes, and a longer one would mix nothing in the order of the file."""

_log = logging.getLogger("gpuload")


@dataclass(frozen=True, eq=False, repr=False)
class Knockdown:
    """Which cells of a screen express the gene that was knocked down in them less than control cells do.

    Made by `gpuload.knockdown`.

    Attributes
    ----------
    mask : (n_obs,) bool
        The cells to keep, for `gpuload.Subset`: the controls that have a value in the columns of `match`, and the
        perturbed cells that pass.
    residual : (n_obs,) float32
        Expression of its own target in each perturbed cell, as a fraction of the mean of its controls; NaN for all
        other cells, for those whose target was not measured, and where the controls' mean is 0.
    perturbations : DataFrame
        A row for each perturbation (and, with `match`, for each combination with these columns) that has cells, which
        are its index. Columns: ``target_gene``, missing if it is not among the genes; ``n_cells``; ``control_mean``,
        the mean of the target in the controls; ``residual``, that in the perturbed cells, as a fraction of it;
        ``n_passing``, the cells whose own expression is low enough; ``is_kept``.
    """

    mask: NDArray[np.bool_]
    residual: NDArray[np.float32]
    perturbations: pd.DataFrame

    def __repr__(self) -> str:
        of, kept = len(self.perturbations), int(self.perturbations["is_kept"].sum())
        return (
            f"<Knockdown: {kept:,} of {of:,} perturbations and {np.count_nonzero(self.mask):,} of {self.mask.size:,} "
            "cells are kept, with the controls>"
        )


@dataclass(frozen=True, slots=True, eq=False)
class _Screen:
    """What was done to each cell, and where it is measured.

    A case is a perturbation in a group of cells, those with the same values in the columns of `match`.

    Attributes
    ----------
    case : (n_obs,) int
        Index of each perturbed cell's case; -1 for all other cells, and for those that are not looked at.
    group : (n_obs,) int
        Index of each control's group; -1 for all other cells, and for those that are not looked at.
    keys
        For each case, its perturbation and the values of `match`.
    group_of : (n_cases,) int64
    gene_of : (n_cases,) int32
        Index of each case's target in `genes`; -1 if it is none of the genes.
    genes
        The targets among the genes, in the order of the file.
    file_start : (n_files + 1,) int64
        Row at which each file begins.
    tables : (n_files,) int64
        Index of each file's table of genes; files with the same genes share one.
    is_measured : (n_tables, n_genes) bool
        Whether a table has a gene.
    """

    case: NDArray[np.integer[Any]]
    group: NDArray[np.integer[Any]]
    keys: list[tuple[Label, ...]]
    group_of: NDArray[np.int64]
    gene_of: NDArray[np.int32]
    genes: list[str]
    file_start: NDArray[np.int64]
    tables: NDArray[np.int64]
    is_measured: NDArray[np.bool_]

    @property
    def n_groups(self) -> int:
        """Number of groups."""
        return int(self.group_of.max()) + 1

    def slices(self) -> Iterator[NDArray[np.int64]]:
        """Yield all rows, some at a time, to keep temporaries small."""
        for start in range(0, self.case.size, SLICE):
            yield np.arange(start, min(start + SLICE, self.case.size))

    def targets_of(self, rows: NDArray[np.int64]) -> NDArray[np.int32]:
        """Return the gene that is compared in each of some cells; -1 for controls, and where it was not measured."""
        case = self.case[rows]
        gene = np.where(case >= 0, self.gene_of[case], np.int32(-1))
        if self.is_measured.all():
            return gene
        return np.where(self.is_measured[self._tables_of(rows), gene], gene, np.int32(-1))

    def is_compared(self) -> NDArray[np.bool_]:
        """Return a mask of the cells to read: those that are compared, and the controls."""
        return np.concatenate([(self.group[rows] >= 0) | (self.targets_of(rows) >= 0) for rows in self.slices()])

    def n_cells(self) -> NDArray[np.int64]:
        """Return the perturbed cells of each case, and those of them that are compared, shape (2, n_cases)."""
        counts = np.zeros((2, len(self.keys)), dtype=np.int64)
        for rows in self.slices():
            case = self.case[rows]
            counts[0] += np.bincount(case[case >= 0], minlength=len(self.keys))
            counts[1] += np.bincount(case[self.targets_of(rows) >= 0], minlength=len(self.keys))
        return counts

    def n_controls(self) -> NDArray[np.float64]:
        """Return the number of controls of each group in which each gene was measured, shape (n_groups, n_genes)."""
        of_tables = np.zeros((self.n_groups, len(self.is_measured)))
        for rows in self.slices():
            cells = rows[self.group[rows] >= 0]
            np.add.at(of_tables, (self.group[cells], self._tables_of(cells)), 1)
        return of_tables @ self.is_measured

    def _tables_of(self, rows: NDArray[np.int64]) -> NDArray[np.int64]:
        return self.tables[np.searchsorted(self.file_start, rows, side="right") - 1]


def knockdown(
    paths: Any,
    column: str,
    *,
    control: Any,
    match: str | Sequence[str] | None = (),
    targets: Mapping[Any, str] | None = None,
    residual_expression: float = 0.3,
    cell_residual_expression: float = 0.5,
    min_cells: int = 30,
    layer: str = "X",
    modality: str | None = "",
    join: str | Sequence[str] | None = None,
    obs_table: pd.DataFrame | None = None,
    where: str | None = None,
    transform: Transform | None = None,
    device: Any = "auto",
    num_threads: int | None = None,
    cache: SampleStore | None = None,
    storage_options: Mapping[str, Any] | None = None,
    progress: Callable[[float], None] | None = None,
) -> Knockdown:
    """Find the cells of a CRISPR screen in which the targeted gene is expressed less than in control cells.

    Three filters, in this order: a perturbation is kept if the mean expression of its target in its cells is below a
    fraction of that in the controls; then, of its cells, those whose own expression is below another; then, if enough
    of these are left. Control cells are kept, as far as they have a value in the columns of `match`.

    Parameters
    ----------
    paths
        As given to `gpuload.open_loader`.
    column
        The column of obs that names the perturbation.
    control
        The value of that column that marks controls, or a list of such values.
    match
        Columns of obs: cells are compared with the controls that have the same values, for example those of the same
        cell line, and perturbations are kept or not in each such group. Cells with a missing value are not kept. By
        default, or if None, cells are compared with all controls.
    targets
        The name of the gene for each value of `column`, where this is not the name itself: ``{"TP53_guide2": "TP53"}``.
        Values that it lacks are themselves names of genes, or of none.
    residual_expression
        Fraction of the controls' mean below which a perturbation's mean must be.
    cell_residual_expression
        Fraction of the controls' mean below which a cell's expression must be.
    min_cells
        Cells that a perturbation must have left, at least 0.
    layer
        The matrix whose values are compared.
    modality
        The modality that has it, if there are several; by default the first of a mapping.
    join, obs_table
        As in `gpuload.open_loader`. With genes that only some files have (``join="outer"``), cells of the others are
        neither compared nor compared with, nor kept.
    where
        Only these cells are looked at, as in `gpuload.open_loader`; the others are not kept.
    transform
        Arithmetic on the values before they are compared: ``gpuload.Transform()`` scales counts to 10,000 per cell and
        takes logarithms, ``gpuload.Transform(log1p=False)`` only scales. None: values as stored.
    device, num_threads, cache, storage_options
        As in `gpuload.open_loader`.
    progress
        Called now and then with the fraction of work done, from 0 to 1.

    Returns
    -------
    Knockdown

    Raises
    ------
    PlanError
        A setting is invalid; there are no perturbed cells or no controls, or none for some of the cells; no value of
        the column is the name of a gene, or one is the name of several; values are negative.
    StoreError, ReadError, CorruptDataError, DeviceError
        As `gpuload.open_loader`.

    Notes
    -----
    The filters are those of ``filter_on_target_knockdown`` in Arc Institute's cell-load 0.10 (Adduri et al., 2025,
    doi:10.1101/2025.06.26.661135), which takes one AnnData in memory, and whose defaults these are; its authors
    apply it to log-normalised counts. Perturbations whose target is not among the genes are not kept, and a warning
    names some. Sums are float64.
    """
    match = check_obs_names("match", match)
    if not isinstance(column, str) or not column:
        raise PlanError(f"column={shown(column)}: expected the name of an obs column.")
    if not isinstance(layer, str):
        raise PlanError(f"layer={shown(layer)}: expected the name of one layer, whose values are compared.")
    for name, value in (
        ("residual_expression", residual_expression),
        ("cell_residual_expression", cell_residual_expression),
    ):
        if not (is_number(value) and value > 0):
            raise PlanError(f"{name}={shown(value)}: expected a fraction of the controls' mean, above 0, such as 0.3.")
    min_cells = check_whole("min_cells", min_cells, 0)
    if targets is not None and not (isinstance(targets, Mapping) and all(isinstance(g, str) for g in targets.values())):
        raise PlanError(f"targets={shown(targets)}: expected a dict, for example {{'TP53_guide2': 'TP53'}}.")
    from gpuload import open_loader

    paths = list(paths) if isinstance(paths, Iterator) else paths  # it is opened twice
    condition = None if where is None else parse_where(where)
    given: dict[str, Any] = {
        "layer": layer,
        "modality": check_modalities(modality or (), paths)[:1],
        "join": join,
        "obs_table": obs_table,
        "num_threads": num_threads,
        "cache": cache,
        "storage_options": storage_options,
        "rank": 0,
        "world_size": 1,
    }
    columns = [column, *match, *(() if condition is None else condition.columns)]
    with open_loader(paths, obs=list(dict.fromkeys(columns)), shuffle=False, device="cpu", **given) as loader:
        is_in = np.ones(loader.n_obs, dtype=bool) if condition is None else condition.mask(loader.store.obs)
        screen = _screen(loader.store, column, match, control, is_in, dict(targets or {}))
    loader = open_loader(
        paths,
        batch_size=BATCH_SIZE,
        fetch_factor=FETCH_FACTOR,
        sampler=Subset(screen.is_compared(), Sequential()),
        genes=screen.genes,
        transform=transform,
        output="csr",
        device=device,
        **given,
    )
    with loader:
        measured = _measure(loader, screen, progress or (lambda _: None))
    return _filtered(screen, measured, (column, *match), residual_expression, cell_residual_expression, min_cells)


# --- what was done to each cell


def _grouped(store: Store, columns: Sequence[str]) -> tuple[NDArray[np.integer[Any]], list[tuple[Label, ...]]]:
    """Return the group of each cell by some columns, -1 = none, and the values of each group."""
    if not columns:
        return np.zeros(store.n_obs, dtype=np.int32), [()]
    found = group_by([store.obs[name] for name in columns])
    return found.codes, found.labels if len(columns) > 1 else [(label,) for label in found.labels]


def _screen(
    store: Store, column: str, match: Sequence[str], control: Any, is_in: NDArray[np.bool_], targets: dict[Any, str]
) -> _Screen:
    """Return what was done to each cell, among those of a mask, and find the genes; raises as `knockdown`."""
    group, groups = _grouped(store, match)
    case, keys = _grouped(store, (column, *match))
    is_control, is_perturbed = np.zeros((2, store.n_obs), dtype=bool)
    found = find_controls("knockdown", column, store.obs[column], control, lambda values: values[is_in])
    is_control[is_in], is_perturbed[is_in] = found[0], found[1] & ~found[0]
    if not is_perturbed.any():
        if has_others("knockdown", column, store.obs[column], control):
            raise PlanError(
                f"knockdown: where= leaves only controls; keep cells with another value in column {column!r}, to "
                "compare with them."
            )
        raise PlanError(f"knockdown: column {column!r} names no perturbed cells beside the controls; pass another.")
    is_perturbed &= group >= 0
    if not is_perturbed.any():
        raise PlanError(
            f"knockdown(match={shown(list(match))}): every perturbed cell has a missing value in a column that it is "
            "matched on; match other columns."
        )
    there = np.flatnonzero(np.bincount(case[is_perturbed]))
    named = {keys[p][0]: targets.get(keys[p][0], keys[p][0]) for p in there.tolist()}
    genes, gene_of = _genes(store, column, named)
    place = {label: i for i, label in enumerate(groups)}
    screen = _Screen(
        np.where(is_perturbed, case, -1),
        np.where(is_control, group, -1),
        keys,
        np.array([place[key[1:]] for key in keys]),
        np.array([gene_of.get(key[0], -1) for key in keys], dtype=np.int32),
        genes,
        store.file_start,
        *_gene_tables(store, genes),
    )
    _check_controls(screen, groups, match)
    return screen


def _genes(store: Store, column: str, named: Mapping[Label, Any]) -> tuple[list[str], dict[Label, int]]:
    """Return the genes that are targets, in their order, which CSR rows keep; and the index of each perturbation's.

    Parameters
    ----------
    named
        The name of each perturbation's target.
    """
    wanted, known = set(named.values()), store.var_names.tolist()
    genes = [gene for gene in known if gene in wanted]
    if not genes:
        label, name = next(iter(named.items()))
        but = f"such as {known[0]!r}; pass targets={{value: gene}}" if known else "as there are none; pass other files"
        raise PlanError(
            f"knockdown: no perturbation in column {column!r}, such as {shown(label)}, is the name of a gene, {but}."
            if label == name
            else f"knockdown: no target of a perturbation, such as {shown(name)}, is the name of a gene, {but}."
        )
    gene, n_alike = Counter(genes).most_common(1)[0]
    if n_alike > 1:
        raise PlanError(
            f"knockdown: {n_alike} genes have the name {gene!r}, which is a target; make the names of the genes unique."
        )
    place = {gene: i for i, gene in enumerate(genes)}
    unknown = [
        shown(label) if label == name else f"{shown(label)} ({shown(name)})"
        for label, name in named.items()
        if name not in place
    ]
    if unknown:
        _log.warning(
            "knockdown: the targets of %d of %d perturbations are not among the genes, and their cells are not kept: "
            "%s. If they have other names there, pass targets={value: gene}.",
            len(unknown),
            len(named),
            ", ".join(unknown[:5]) + (f" and {len(unknown) - 5} more" if len(unknown) > 5 else ""),
        )
    return genes, {label: place[name] for label, name in named.items() if name in place}


def _gene_tables(store: Store, genes: list[str]) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
    """Return the table of genes of each file, and which of the genes each table has: joined files may lack some."""
    n_files = len(store.file_rows)
    if store.alignment is None or store.alignment.maps is None:
        return np.zeros(n_files, dtype=np.int64), np.ones((1, len(genes)), dtype=bool)
    starts, files, tables = np.unique(store.alignment.starts, return_index=True, return_inverse=True)
    place = {gene: i for i, gene in enumerate(genes)}
    of_joined = np.array([place.get(name, -1) for name in store.var_names.tolist()])
    is_measured = np.zeros((starts.size, len(genes)), dtype=bool)
    for table, (start, file) in enumerate(zip(starts.tolist(), files.tolist(), strict=True)):
        joined = store.alignment.maps[start : start + store.matrices[file].n_vars]
        found = of_joined[joined[joined >= 0]]
        is_measured[table, found[found >= 0]] = True
    return tables, is_measured


def _check_controls(screen: _Screen, groups: list[tuple[Label, ...]], match: Sequence[str]) -> None:
    n_compared = np.bincount(screen.group_of, weights=screen.n_cells()[1], minlength=len(groups)).astype(np.int64)
    n_controls = np.bincount(screen.group[screen.group >= 0], minlength=len(groups))
    without = np.flatnonzero((n_compared > 0) & (n_controls == 0))
    if not without.size:
        return
    which = ", ".join(f"{name}={value!r}" for name, value in zip(match, groups[without[0]], strict=True))
    cure = "or leave these cells out with where="
    raise uncontrolled("knockdown", which, int(n_compared[without[0]]), without.size - 1, cure)


# --- what was measured


@dataclass(frozen=True, slots=True, eq=False)
class _Measured:
    """Sums of expression.

    Attributes
    ----------
    own : (n_obs,) float32
        Expression of the cell's target; NaN where none is compared.
    total : (n_cases,) float64
        Its sum over the cells of each case.
    of_controls : (n_groups, n_genes) float64
        Sum of each gene over the controls of each group.
    """

    own: NDArray[np.float32]
    total: NDArray[np.float64]
    of_controls: NDArray[np.float64]


def _measure(loader: Loader, screen: _Screen, progress: Callable[[float], None]) -> _Measured:
    """Read the cells once."""
    from scipy.sparse import csr_matrix

    n_cases, shape = len(screen.keys), (screen.n_groups, len(screen.genes))
    own = np.full(screen.case.size, np.nan, dtype=np.float32)
    found = _Measured(own, np.zeros(n_cases), np.zeros(shape))
    for n_seen, batch in enumerate(loader, start=1):
        X = batch.X.get() if hasattr(batch.X, "get") else batch.X  # of the targeted genes alone, so it is small
        if X.data.size and X.data.min() < 0:
            raise PlanError(
                "knockdown: there are negative values, as in centred or scaled data, of which fractions mean nothing; "
                "pass the layer= of the counts, or of normalised values."
            )
        n, lengths, target = len(batch), np.diff(X.indptr), screen.targets_of(batch.rows)
        is_own = X.indices == np.repeat(target, lengths)
        values = np.bincount(np.repeat(np.arange(n), lengths)[is_own], weights=X.data[is_own], minlength=n)
        at = np.flatnonzero(target >= 0)
        case = screen.case[batch.rows[at]]
        own[batch.rows[at]] = values[at]
        np.add.at(found.total, case, values[at])
        at = np.flatnonzero(target < 0)
        if at.size:
            by_group = csr_matrix((np.ones(at.size), (screen.group[batch.rows[at]], at)), shape=(shape[0], n))
            of_batch = (by_group @ X).tocoo()
            found.of_controls[of_batch.row, of_batch.col] += of_batch.data
        progress(n_seen / len(loader))
    return found


# --- the filters


def _filtered(
    screen: _Screen,
    measured: _Measured,
    columns: tuple[str, ...],
    residual_expression: float,
    cell_residual_expression: float,
    min_cells: int,
) -> Knockdown:
    """Apply the filters to what was measured."""
    import pandas as pd

    n_cells, n_compared = screen.n_cells()
    control_mean = np.full(len(screen.keys), np.nan)
    is_known = screen.gene_of >= 0
    group, gene = screen.group_of[is_known], screen.gene_of[is_known]
    with np.errstate(invalid="ignore"):  # NaN where there is nothing to compare
        control_mean[is_known] = measured.of_controls[group, gene] / screen.n_controls()[group, gene]
        base = np.where(control_mean > 0, control_mean, np.nan)
        residual = measured.total / n_compared / base
    n_passing, of_cell, mask = np.zeros(len(screen.keys), dtype=np.int64), measured.own, screen.group >= 0
    for rows in screen.slices():
        cells = rows[screen.case[rows] >= 0]
        case = screen.case[cells]
        fraction = of_cell[cells] / base[case]
        mask[cells] = fraction < cell_residual_expression
        of_cell[cells] = fraction
        n_passing += np.bincount(case[mask[cells]], minlength=n_passing.size)
    is_kept = (residual < residual_expression) & (n_passing >= max(1, min_cells))
    for rows in screen.slices():
        cells = rows[screen.case[rows] >= 0]
        mask[cells] &= is_kept[screen.case[cells]]
    there = np.flatnonzero(n_cells)
    keys = [screen.keys[p] for p in there.tolist()]
    labels = [list(values) for values in zip(*keys, strict=True)]
    index: pd.Index[Any] = pd.Index(labels[0], name=columns[0])
    if len(columns) > 1:
        index = pd.MultiIndex.from_arrays([index, *labels[1:]], names=columns)
    about = {
        "target_gene": [screen.genes[gene] if gene >= 0 else None for gene in screen.gene_of[there].tolist()],
        "n_cells": n_cells[there],
        "control_mean": control_mean[there],
        "residual": residual[there],
        "n_passing": n_passing[there],
        "is_kept": is_kept[there],
    }
    return Knockdown(mask, of_cell, pd.DataFrame(about, index=index))
