"""The matrices delivered for the same cells, each with its store and form: settings -> `Table`.

The first matrix defines the order of the cells; every other has them at the same positions. Transforms are for counts:
a single one applies to X and its layers; other modalities need one explicitly.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from gpuload.alignment import nearest_gene
from gpuload.checks import as_array, check_booleans, check_choice, check_index, check_names, check_order
from gpuload.errors import PlanError, listing, shown
from gpuload.threads import cached_property
from gpuload.types import Form, Transform, resident_dtype

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from gpuload.store import Store

_log = logging.getLogger("gpuload")

Transforms = Transform | Mapping[str, Transform | None] | None


@dataclass(frozen=True, eq=False)
class Table:
    """One matrix of the cells.

    Attributes
    ----------
    var_names : (form.n_cols,) object
        Names of the delivered columns; ``"0"``, ``"1"``, ... if they have none.
    """

    store: Store
    form: Form
    var_names: NDArray[np.object_]

    @cached_property
    def row_shape(self) -> tuple[int, ...]:
        """Shape of a cell's values in a minibatch: (form.n_cols,), unless each cell has an array of more dimensions."""
        shape = self.store.row_shape
        return shape if len(shape) > 1 else (self.form.n_cols,)

    @property
    def nbytes_per_row(self) -> float:
        """Mean bytes per delivered row: those of a value for each column; for CSR, 4 more for each stored value."""
        if self.form.output == "csr":
            return (4.0 + self.form.itemsize) * self.store.values_per_row
        return float(self.form.itemsize * self.form.n_cols)

    @property
    def resident_nbytes_per_row(self) -> float:
        """Mean bytes of a resident row; see `Store.nbytes_per_row`."""
        return self.store.nbytes_per_row(resident_dtype(self.form.dtype))


def check_layers(given: Any) -> tuple[str, ...]:
    """Return the names of the requested layers; or raise PlanError."""
    in_two_forms = "; for one with and without a transform, open {'norm': paths, 'raw': paths}, transform={'X': ...}"
    return check_names("layer", given, least=1, twice=in_two_forms)


def check_modalities(given: Any, paths: Any) -> tuple[str, ...]:
    """Return the names of the requested modalities, or of all in a mapping if none are given; or raise PlanError."""
    names = check_names("modality", given)
    return names or (check_names("paths", list(paths), least=1) if isinstance(paths, Mapping) else ())


def check_transform(transform: Any, layers: tuple[str, ...], modalities: tuple[str, ...]) -> Transforms:
    """Validate the transform or transforms given by the user, and return them; or raise PlanError.

    Parameters
    ----------
    layers, modalities
        Valid keys of a mapping are all layers, which are the first modality's, and all modalities but the first.
    """
    is_mapping = isinstance(transform, Mapping)
    for name, value in transform.items() if is_mapping else {"": transform}.items():
        if value is not None and not isinstance(value, Transform):
            where = f"transform[{name!r}]" if is_mapping else "transform"
            own = "; a function of yours is run by gpuload.Mapped(loader, function)" if callable(value) else ""
            raise PlanError(
                f"{where}={shown(value)}: expected a gpuload.Transform, such as gpuload.Transform(log1p=True), or "
                f"None{own}."
            )
        if is_mapping and name not in (*layers, *modalities[1:]):
            known = ", ".join(map(repr, (*layers, *modalities[1:])))
            if name in modalities:
                raise PlanError(
                    f"transform[{name!r}]: {name!r} is the first modality, whose matrices are called by their layers; "
                    f"use {layers[0]!r}: the matrices are {known}."
                )
            raise PlanError(f"transform[{name!r}]: there is no matrix of this name; the matrices are {known}.")
    return dict(transform) if is_mapping else transform


def check_missing_genes(missing_genes: Any, genes: Any, join: Any) -> bool:
    """Return whether genes that are in no file are 0; raise PlanError for other settings than ``"error"``, ``"zero"``.

    Parameters
    ----------
    genes, join
        The settings one of which must be a list of names, to be ``"zero"``.
    """
    check_choice("missing_genes", missing_genes, ("error", "zero"))
    if missing_genes == "error":
        return False
    if not any(_is_names(name, given) for name, given in (("genes", genes), ("join", join))):
        raise PlanError("missing_genes='zero': it is for genes given by name; pass a list as genes= or join=.")
    return True


def _is_names(name: str, given: Any) -> bool:
    """Return whether a setting may be a list of names; no condition, no way to join, and no mask."""
    return given is not None and not isinstance(given, str) and as_array(name, given).dtype != bool


def make_tables(
    stores: Mapping[str, Store],
    layer: str,
    *,
    genes: Any,
    transform: Transforms,
    output: str,
    dtype: str,
    fills: bool = False,
) -> dict[str, Table]:
    """Return the tables of stores, under the same names.

    A warning is logged if a transform applies to an X that was log-transformed already, as far as its file says so, and
    of genes that no file has.

    Parameters
    ----------
    layer
        The layer used as ``"X"``.
    transform
        For X and its layers, or by name of a layer or modality.
    output, dtype
        For all but obsm, which is dense, and float32 unless `dtype` is ``"float64"``.
    fills
        Whether genes that no file has are 0.

    Raises
    ------
    PlanError
        A store lacks some of `genes`; or its cells have arrays, for which genes cannot be chosen and CSR is not
        supported.
    """
    tables: dict[str, Table] = {}
    for name, store in stores.items():
        group, _, own = name.partition("/")
        if group == "obsm":
            form, var_names = Form("dense", resident_dtype(dtype), store.n_vars, store.columns()), store.var_names
        else:
            check_arrays(store, genes, output, own or layer)
            chosen, var_names = (
                (None, store.var_names) if group == "modalities" else select_genes(genes, store, fills=fills)
            )
            if isinstance(transform, Mapping):
                own_transform = transform.get(own or layer)
            else:
                own_transform = None if group == "modalities" else transform
            form = Form(output, dtype, var_names.size, store.columns(chosen), own_transform)
        tables[name] = Table(store, form, var_names)
    _warn_of_logarithms(tables)
    if fills:
        _warn_of_missing_genes({name: table for name, table in tables.items() if name.startswith(("X", "layers/"))})
    return tables


def _warn_of_missing_genes(tables: Mapping[str, Table]) -> None:
    """Warn of genes that no file has; of a layer, which may be raw.X with genes of its own, if they are others."""
    told: list[list[str]] = [[]]
    for name, table in tables.items():
        columns, n_cols = table.form.columns, table.form.n_cols
        missing = np.zeros(0, np.int64) if columns is None else np.setdiff1d(np.arange(n_cols), columns)
        names = table.var_names[missing].tolist()
        if names not in told:
            told.append(names)
            _log.warning(
                "missing_genes='zero': %d of %d genes are in no file%s, and 0 in all cells: %s.",
                missing.size,
                n_cols,
                "" if name == "X" else f" ({name})",
                listing(names, 5),
            )


def _warn_of_logarithms(tables: Mapping[str, Table]) -> None:
    """Warn, once, of a transform that is applied to an X which, as its file says, was log-transformed."""
    for table in tables.values():
        transform, logged = table.form.transform, table.store.logged
        if logged and transform is not None and (transform.log1p or transform.target_sum is not None):
            _log.warning(
                "transform: X of %s%s is log-transformed already, as its uns['log1p'] says, and a transform is for "
                "counts; name the matrix that holds these, such as layer='raw.X', or leave transform out.",
                logged[0],
                f", and of {len(logged) - 1} more," if len(logged) > 1 else "",
            )
            return


def check_arrays(store: Store, genes: Any, output: str, name: str = "X") -> None:
    """Raise PlanError for settings that do not apply to cells with arrays; `name` is the matrix's."""
    if len(store.row_shape) == 1:
        return
    is_cut = store.n_vars != math.prod(store.row_shape)
    setting = "join" if is_cut else "output='csr'" if output == "csr" else "genes" if genes is not None else ""
    if setting:
        also = "" if name == "X" else f" in {name}, which obsm= returns without"
        raise PlanError(
            f"{setting}: cells of {store.paths[0]} have arrays of shape {store.row_shape}{also}; leave it out."
        )


def select_genes(
    genes: Any, store: Store, *, fills: bool = False
) -> tuple[NDArray[np.int32] | None, NDArray[np.object_]]:
    """Return the output column of every stored gene (-1 = not chosen; None = all) and the names of the chosen genes.

    Names that are no gene's have a column too if it `fills` them, and at least one of the names is a gene's.
    """
    if genes is None:
        return None, store.var_names
    check_order(f"genes={shown(genes)}", genes, "a list of gene names, whose order is that of the columns, or a mask")
    if isinstance(genes, (bytes, AbstractSet, Mapping)) or not hasattr(genes, "__len__"):
        raise PlanError(
            f"genes={shown(genes)}: expected a list of gene names, whose order is that of the columns, or a mask with "
            "one entry per gene; make a list of it."
        )
    wanted = as_array("genes", genes)
    if wanted.ndim != 1:
        raise PlanError(
            f"genes has {wanted.ndim} dimensions; expected a list of gene names or a mask with one entry per gene."
        )
    if wanted.dtype == bool:
        if wanted.size != store.n_vars:
            raise PlanError(
                f"genes is a mask of {wanted.size} entries but the matrix has {store.n_vars} genes; pass one for each."
            )
        check_index("genes", genes, lambda: store.var_names, "gene", "loader.var_names")
        chosen = np.flatnonzero(wanted)
    elif wanted.size and wanted.dtype.kind not in "OSU":
        raise PlanError(
            f"genes has dtype {wanted.dtype}; expected gene names or a boolean mask (loader.var_names[numbers] are the "
            "names of genes given by number)."
        )
    else:
        check_booleans("genes", wanted)
        chosen = _find_genes([str(g) for g in wanted], store, fills=fills)
    if not chosen.size:
        raise PlanError("genes selects no gene; expected at least one.")
    is_there = chosen >= 0
    columns = np.full(store.n_vars, -1, dtype=np.int32)
    columns[chosen[is_there]] = np.flatnonzero(is_there)
    names = store.var_names[np.where(is_there, chosen, 0)]
    if not is_there.all():
        names[~is_there] = [str(name) for name in wanted[~is_there]]
    return columns, names


def _find_genes(names: list[str], store: Store, *, fills: bool) -> NDArray[np.int64]:
    """Return the number of each gene; a negative one if there is no such gene, and it `fills` them."""
    place: dict[str, int] = {}
    repeated: set[str] = set()
    for i, name in enumerate(store.var_names):
        if name in place:
            repeated.add(name)
        place[name] = i
    known = frozenset(place)  # names go before ids
    for i, name in enumerate(() if store.var_ids is None else store.var_ids):
        if name not in known and place.setdefault(name, i) != i:
            repeated.add(name)
    unknown = [n for n in names if n not in place]
    joined = store.alignment
    has_all = joined is None or joined.join == "outer"  # else some file may have the gene
    if fills and has_all and len(unknown) < len(names):
        refused = [] if joined is None else [name for name in unknown if name in joined.ids]
    else:
        refused = unknown
    if refused:
        raise _unknown_genes(refused, len(names), store)
    for i, name in enumerate(unknown):
        place.setdefault(name, -1 - i)
    unclear = [n for n in names if n in repeated]
    if unclear:
        other = "their ids or by a mask" if store.var_ids is not None and unclear[0] in known else "a mask"
        raise PlanError(
            f"genes: {unclear[0]!r} occurs more than once in {store.paths[0]}; choose genes by {other} instead."
        )
    chosen = np.array([place[n] for n in names], dtype=np.int64)
    is_first = np.zeros(chosen.size, dtype=bool)
    is_first[np.unique(chosen, return_index=True)[1]] = True
    if not is_first.all():
        raise PlanError(f"genes: {names[int(np.argmin(is_first))]!r} is given twice; pass every gene once.")
    return chosen


def _unknown_genes(unknown: list[str], n_given: int, store: Store) -> PlanError:
    """Return the error for genes that the cells do not have, or no longer have once their files are joined."""
    count = f"{len(unknown)} of {n_given} are not"
    names = store.var_names.tolist()
    known = listing(names, 3)
    near = nearest_gene(unknown[0], names if store.var_ids is None else names + store.var_ids.tolist())
    join = None if store.alignment is None else store.alignment.join
    if join == "inner":
        guess = f": did you mean {near!r}?" if near else "."
        return PlanError(
            f"genes: {unknown[0]!r} is not in all of the {len(store.paths)} files ({count}), as join='inner' demands; "
            f"those that are: {known}. Leave it out, use join='outer', or check its spelling{guess}"
        )
    if isinstance(join, tuple):
        guess = f"did you mean {near!r}? If not, add" if near else "add"
        return PlanError(
            f"genes: {unknown[0]!r} is not in the list join= ({count}); {guess} it there, or leave it out."
        )
    of = store.paths[0] if join is None else f"any of the {len(store.paths)} files"
    genes_are = f"; did you mean {near!r}? The genes are" if near else ", whose genes are"
    return PlanError(
        f"genes: {unknown[0]!r} is not a gene of {of} ({count}){genes_are} {known}; choose by such names, by a "
        "condition on a column of var, or by a mask over all of them."
    )
