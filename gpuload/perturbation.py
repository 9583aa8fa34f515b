"""Quality control of perturbation screens: the cells in which the gene that was knocked down is expressed less.

    found = gpuload.knockdown("screen.h5ad", "gene", control="non-targeting", match="cell_line")
    pairs = gpuload.PairedControl("gene", control="non-targeting", match="cell_line")
    loader = gpuload.open_loader("screen.h5ad", sampler=gpuload.Subset(found.mask, pairs))

One pass over the cells, of which only the targeted genes are assembled: a screen may be larger than memory.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from gpuload.checks import check_obs_names, check_whole, is_number
from gpuload.dealing import group_by
from gpuload.errors import PlanError, listing, shown
from gpuload.sampling import Sequential, Subset
from gpuload.sampling.controls import find_controls
from gpuload.types import Transform
from gpuload.where import parse as parse_where

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import pandas as pd
    from numpy.typing import NDArray

    from gpuload.cache import SampleStore
    from gpuload.dealing import Label
    from gpuload.loader import Loader
    from gpuload.store import Store

BATCH_SIZE = 4096
"""Cells per minibatch: the arithmetic on each is of whole arrays."""

FETCH_FACTOR = 16

logger = logging.getLogger(__name__)


@dataclass(frozen=True, eq=False, repr=False)
class Knockdown:
    """Which cells of a screen express the gene that was knocked down in them less than control cells do.

    Made by `gpuload.knockdown`.

    Attributes
    ----------
    mask : (n_obs,) bool
        The cells to keep, for `gpuload.Subset`: the controls, and the perturbed cells that pass.
    residual : (n_obs,) float32
        Expression of its own target in each perturbed cell, as a fraction of the mean of its controls; NaN for all
        other cells, for those whose target is not among the genes, and where the controls' mean is not above 0.
    perturbations : DataFrame
        A row for each perturbation (and, with `match`, for each combination with these columns) that has cells, which
        are its index. Columns: ``target``, the gene, missing if it is not among the genes; ``n_cells``;
        ``control_mean``, the mean of the target in the controls; ``residual``, that in the perturbed cells, as a
        fraction of it; ``n_passing``, the cells whose own expression is low enough; ``is_kept``.
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
    """What was done to each cell.

    Attributes
    ----------
    perturbation, group : (n_obs,) int
        Index of the cell's perturbation and of the values that it is matched on; -1 if it has none.
    target : (n_obs,) int32
        Index of the gene among `genes`; -1 for controls, and for cells that are not looked at.
    labels, groups
        The labels of the perturbations and of the groups.
    targets
        The gene of each perturbation.
    """

    is_control: NDArray[np.bool_]
    is_perturbed: NDArray[np.bool_]
    perturbation: NDArray[np.integer[Any]]
    group: NDArray[np.integer[Any]]
    target: NDArray[np.int32]
    labels: list[Label]
    groups: list[Label]
    targets: list[str | None]
    genes: list[str]


def knockdown(
    paths: Any,
    column: str,
    *,
    control: Any,
    match: str | Sequence[str] = (),
    targets: Mapping[Any, str] | None = None,
    residual_expression: float = 0.3,
    cell_residual_expression: float = 0.5,
    min_cells: int = 30,
    layer: str = "X",
    modality: str = "",
    join: str | Sequence[str] | None = None,
    obs_table: pd.DataFrame | None = None,
    where: str | None = None,
    transform: Transform | None = Transform(),  # noqa: B008 - it is immutable
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
        cell line, and perturbations are kept or not in each such group. Cells with a missing value are not kept. None
        by default: all controls are compared with.
    targets
        The name of the gene for each value of `column`, where this is not the name itself: ``{"TP53_guide2": "TP53"}``.
        Values that it lacks are taken for names of genes.
    residual_expression
        Fraction of the controls' mean below which a perturbation's mean must be.
    cell_residual_expression
        Fraction of the controls' mean below which a cell's expression must be.
    min_cells
        Cells that a perturbation must have left, at least 0.
    layer, modality, join, obs_table, device, num_threads, cache, storage_options
        As in `gpuload.open_loader`.
    where
        Only these cells are looked at, as in `gpuload.open_loader`; the others are not kept.
    transform
        What is compared; by default, counts scaled to 10,000 per cell (by the sum over all genes) and then
        log-transformed. ``Transform(log1p=False)`` compares scaled counts. None: values as stored, for files that hold
        normalised expression.
    progress
        Called now and then with the fraction of work done, from 0 to 1.

    Returns
    -------
    Knockdown

    Raises
    ------
    PlanError
        A setting is invalid; there are no controls, or none for some of the perturbed cells; no value of the column is
        the name of a gene.
    StoreError, ReadError, CorruptDataError, DeviceError
        As `gpuload.open_loader`.

    Notes
    -----
    The filters are those of ``filter_on_target_knockdown`` in Arc Institute's cell-load 0.10 (Adduri et al., 2025,
    doi:10.1101/2025.06.26.661135), which takes one AnnData in memory, and whose defaults these are. Perturbations whose
    target is not among the genes are not kept, and a warning names them. Sums are float64.
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

    condition = None if where is None else parse_where(where)
    cells: dict[str, Any] = {
        "layer": layer,
        "modality": modality or (),
        "join": join,
        "obs_table": obs_table,
        "num_threads": num_threads,
        "cache": cache,
        "storage_options": storage_options,
    }
    columns = [column, *match, *(() if condition is None else condition.columns)]
    with open_loader(paths, obs=list(dict.fromkeys(columns)), shuffle=False, device="cpu", **cells) as loader:
        is_in = np.ones(loader.n_obs, dtype=bool) if condition is None else condition.mask(loader.store.obs)
        screen = _screen(loader.store, column, match, control, is_in, dict(targets or {}))
    loader = open_loader(
        paths,
        batch_size=BATCH_SIZE,
        fetch_factor=FETCH_FACTOR,
        sampler=Subset(screen.is_control | (screen.target >= 0), Sequential()),
        rank=0,
        world_size=1,
        genes=screen.genes,
        transform=transform,
        output="csr",
        device=device,
        **cells,
    )
    with loader:
        own, means = _expression(loader, screen, progress or (lambda _: None))
    return _filtered(screen, own, means, (column, *match), residual_expression, cell_residual_expression, min_cells)


def _screen(
    store: Store, column: str, match: Sequence[str], control: Any, is_in: NDArray[np.bool_], targets: dict[Any, str]
) -> _Screen:
    """Return what was done to each cell, and find the genes; raises as `knockdown`."""
    labelled = group_by([store.obs[column]])
    if match:
        matched = group_by([store.obs[name] for name in match])
        group, groups = matched.codes, matched.labels
    else:
        group, groups = np.zeros(store.n_obs, dtype=np.int32), [()]
    is_control, is_perturbed = np.zeros((2, store.n_obs), dtype=bool)
    found = find_controls("knockdown", column, store.obs[column], control, lambda values: values[is_in])
    is_control[is_in], is_perturbed[is_in] = found[0], found[1] & ~found[0]
    is_control &= group >= 0
    is_perturbed &= group >= 0
    present, named = np.unique(labelled.codes[is_perturbed]), [targets.get(label, label) for label in labelled.labels]
    wanted = {named[p] for p in present.tolist()}
    genes = [gene for gene in store.var_names.tolist() if gene in wanted]  # their order, so that rows stay sorted
    if not present.size:
        raise PlanError(f"knockdown: column {column!r} names no perturbed cells beside the controls; pass another.")
    if not genes:
        raise PlanError(
            f"knockdown: no perturbation in column {column!r}, such as {named[present[0]]!r}, is the name of a gene, "
            f"such as {store.var_names[0]!r}; pass targets={{value: gene}}."
        )
    place = {gene: i for i, gene in enumerate(genes)}
    gene_of = np.array([place.get(gene, -1) for gene in named], dtype=np.int32)
    unknown = [labelled.labels[p] for p in present[gene_of[present] < 0].tolist()]
    if unknown:
        logger.warning(
            "knockdown: the targets of %d of %d perturbations are not among the genes, and their cells are not kept: "
            "%s. If they have other names there, pass targets={value: gene}.",
            len(unknown),
            present.size,
            listing(list(map(str, unknown)), 5),
        )
    target = np.where(is_perturbed, gene_of[labelled.codes], np.int32(-1))
    _check_controls(group, groups, is_control, target >= 0, match)
    return _Screen(
        is_control,
        is_perturbed,
        labelled.codes,
        group,
        target,
        labelled.labels,
        groups,
        [gene if gene in place else None for gene in named],
        genes,
    )


def _check_controls(
    group: NDArray[np.integer[Any]],
    groups: list[Label],
    is_control: NDArray[np.bool_],
    is_compared: NDArray[np.bool_],
    match: Sequence[str],
) -> None:
    n_controls, n_compared = (np.bincount(group[chosen], minlength=len(groups)) for chosen in (is_control, is_compared))
    without = np.flatnonzero((n_compared > 0) & (n_controls == 0))
    if not without.size:
        return
    label = groups[without[0]] if len(match) > 1 else (groups[without[0]],)
    which = ", ".join(f"{name}={value!r}" for name, value in zip(match, label, strict=True))
    n_more = without.size - 1
    more = f", nor for {n_more} more group{'s' if n_more > 1 else ''}" if n_more else ""
    raise PlanError(
        f"knockdown: there is no control for cells with {which} ({n_compared[without[0]]} of them){more}; match fewer "
        "columns, or leave these cells out with where=."
    )


def _expression(
    loader: Loader, screen: _Screen, progress: Callable[[float], None]
) -> tuple[NDArray[np.float32], NDArray[np.float64]]:
    """Return each cell's expression of its target, and the controls' means by group and gene."""
    from scipy.sparse import csr_matrix

    own = np.full(screen.target.size, np.nan, dtype=np.float32)
    sums = np.zeros((len(screen.groups), len(screen.genes)))
    for n_seen, batch in enumerate(loader, start=1):
        X = batch.X.get() if hasattr(batch.X, "get") else batch.X  # of the targeted genes alone, so it is small
        n, lengths, target = len(batch), np.diff(X.indptr), screen.target[batch.rows]
        is_own = X.indices == np.repeat(target, lengths)
        values = np.bincount(np.repeat(np.arange(n), lengths)[is_own], weights=X.data[is_own], minlength=n)
        is_compared = target >= 0
        own[batch.rows[is_compared]] = values[is_compared]
        at = np.flatnonzero(~is_compared)
        if at.size:
            group = screen.group[batch.rows[at]]
            by_group = csr_matrix((np.ones(at.size), (group, at)), shape=(sums.shape[0], n))
            total = (by_group @ X).tocoo()
            sums[total.row, total.col] += total.data
        progress(n_seen / len(loader))
    n_controls = np.bincount(screen.group[screen.is_control], minlength=sums.shape[0])
    return own, sums / np.maximum(n_controls, 1)[:, None]


def _filtered(
    screen: _Screen,
    own: NDArray[np.float32],
    means: NDArray[np.float64],
    columns: tuple[str, ...],
    residual_expression: float,
    cell_residual_expression: float,
    min_cells: int,
) -> Knockdown:
    """Apply the filters to what was measured."""
    import pandas as pd

    cells, n_groups = np.flatnonzero(screen.is_perturbed), len(screen.groups)
    pairs, pair = np.unique(
        screen.perturbation[cells].astype(np.int64) * n_groups + screen.group[cells], return_inverse=True
    )
    perturbation, group = np.divmod(pairs, n_groups)
    place = {gene: i for i, gene in enumerate(screen.genes)}
    names = [screen.targets[p] for p in perturbation.tolist()]
    target = np.array([-1 if name is None else place[name] for name in names])
    mean = np.where(target >= 0, means[group, target], np.nan)
    mean[~(mean > 0)] = np.nan
    n_cells = np.bincount(pair, minlength=pairs.size)
    residual = np.bincount(pair, weights=own[cells], minlength=pairs.size) / n_cells / mean
    of_cell = own[cells] / mean[pair]
    passes = of_cell < cell_residual_expression
    n_passing = np.bincount(pair[passes], minlength=pairs.size)
    is_kept = (residual < residual_expression) & (n_passing >= max(1, min_cells))
    mask, own[cells] = screen.is_control.copy(), of_cell
    mask[cells] = passes & is_kept[pair]
    index: pd.Index[Any] = pd.Index([screen.labels[p] for p in perturbation.tolist()], name=columns[0])
    if len(columns) > 1:
        of = [screen.groups[g] for g in group.tolist()]
        matched = [of] if len(columns) == 2 else [list(values) for values in zip(*of, strict=True)]
        index = pd.MultiIndex.from_arrays([index, *matched], names=columns)
    about = {
        "target": names,
        "n_cells": n_cells,
        "control_mean": mean,
        "residual": residual,
        "n_passing": n_passing,
        "is_kept": is_kept,
    }
    return Knockdown(mask, own, pd.DataFrame(about, index=index))
