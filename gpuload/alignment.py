"""Genes of files that do not agree: which are handed over, and where each file's columns go. Pure Python and NumPy.

Nothing is rewritten: a file keeps its columns, and the kernels that gather rows look a column's place up in the map of
the row's file, as they do for chosen genes.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from gpuload.errors import PlanError, StoreError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

JOINS = ("inner", "outer")


@dataclass(frozen=True, slots=True, eq=False)
class Alignment:
    """What several tables of genes are as one.

    Attributes
    ----------
    var_names : (n_vars,) object
        Genes of the whole.
    maps : (n_mapped,) int32, optional
        Place in `var_names` of every gene of a table, or -1, the tables one after the other and equal ones once. None:
        the genes of each are `var_names`.
    starts : (n_tables,) int64
        Where the map of each table begins in `maps`.
    """

    var_names: NDArray[np.object_]
    maps: NDArray[np.int32] | None
    starts: NDArray[np.int64]


def check_join(join: object) -> str | tuple[str, ...] | None:
    """Return what `align` takes for what a user gave, or raise PlanError."""
    if join is None or (isinstance(join, str) and join in JOINS):
        return join
    if isinstance(join, (str, bytes)) or not hasattr(join, "__iter__"):
        raise PlanError(f"join={join!r}: expected 'inner', 'outer', a list of gene names, or None.")
    names = tuple(str(name) for name in join)
    if not names:
        raise PlanError("join=[]: expected at least one gene name, 'inner', 'outer' or None.")
    name, n_given = Counter(names).most_common(1)[0]
    if n_given > 1:
        raise PlanError(f"join: {name!r} is given {n_given} times; give every gene once.")
    return names


def align(names: Sequence[NDArray[np.object_]], paths: Sequence[str], join: str | tuple[str, ...]) -> Alignment:
    """Join tables of genes by name.

    Parameters
    ----------
    names
        The genes of each table.
    paths
        What errors call each.
    join
        ``"inner"``: genes of all tables, in the order of the first; ``"outer"``: genes of any, in the order in which
        they first appear; or the genes themselves, each of which some table has.

    Raises
    ------
    StoreError
        A table has a gene twice; no gene is in all tables; or no table has a gene that is given.
    """
    numbers: dict[tuple[str, ...], int] = {}  # most files have the genes of another
    which = [numbers.setdefault(tuple(own), len(numbers)) for own in names]
    tables = [_places(own, paths[which.index(number)]) for own, number in numbers.items()]
    var_names = _joined(tables, paths, join)
    wanted = {name: place for place, name in enumerate(var_names)}
    maps = [np.array([wanted.get(name, -1) for name in table], dtype=np.int32) for table in tables]
    in_order = np.arange(var_names.size, dtype=np.int32)
    if all(np.array_equal(one, in_order) for one in maps):
        return Alignment(var_names, None, np.zeros(len(names), dtype=np.int64))
    sizes = np.array([one.size for one in maps], dtype=np.int64)
    return Alignment(var_names, np.concatenate(maps), (np.cumsum(sizes) - sizes)[which])


def _places(names: tuple[str, ...], path: str) -> dict[str, int]:
    """Return the column of each gene, in the order of columns."""
    places = {name: column for column, name in enumerate(names)}
    if len(places) < len(names):
        twice = next(name for column, name in enumerate(names) if places[name] != column)
        raise StoreError(
            f"{path}: gene {twice!r} stands more than once, so join= cannot tell which is meant; make the names unique "
            "once with adata.var_names_make_unique()."
        )
    return places


def _joined(tables: Sequence[dict[str, int]], paths: Sequence[str], join: str | tuple[str, ...]) -> NDArray[np.object_]:
    """Return the genes of the whole."""
    known = dict.fromkeys(name for places in tables for name in places)
    if isinstance(join, tuple):
        unknown = [name for name in join if name not in known]
        if unknown:
            raise StoreError(
                f"join: no file has the gene {unknown[0]!r} ({len(unknown)} of {len(join)} are in none); leave it out, "
                f"or look for another spelling in {paths[0]}."
            )
        chosen = list(join)
    elif join == "outer":
        chosen = list(known)
    else:
        chosen = [name for name in tables[0] if all(name in places for places in tables[1:])]
        if not chosen:
            raise StoreError(
                f"join='inner': no gene is in all of the {len(paths)} files, {paths[0]} among them; use join='outer', "
                "or look whether some name genes by ids and others by symbols."
            )
    var_names = np.empty(len(chosen), dtype=object)
    var_names[:] = chosen
    return var_names
