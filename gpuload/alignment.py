"""Aligns files with different genes: which genes to deliver, and where columns go. Pure Python and NumPy.

Nothing is rewritten: files keep their columns, and the gather kernels look up each column's position in the map of the
row's file, as they do for selected genes.
"""

from __future__ import annotations

import logging
import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from gpuload.checks import check_order
from gpuload.errors import PlanError, StoreError, nearest, shown

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from numpy.typing import NDArray

JOINS = ("inner", "outer")

_VERSION = re.compile(r"\.\d+\Z")
"""The version of an Ensembl id."""

_NUMBERED = re.compile(r"(ENS[A-Z]*\d{6,}|\d+)(\.\d+)?")
"""An id of a gene that is a number, as those of Ensembl and Entrez are: one that differs a little is another gene."""

_log = logging.getLogger("gpuload")


class Filled(tuple[str, ...]):
    """A list of genes to join, of which those in no file are 0."""

    __slots__ = ()


@dataclass(frozen=True, slots=True, eq=False)
class Alignment:
    """The joined genes of several gene tables.

    Attributes
    ----------
    maps : (n_mapped,) int32, optional
        Index into `var_names` of every gene of a table, or -1; tables concatenated, equal ones stored once. None if
        all tables equal `var_names`.
    starts : (n_tables,) int64
        Where each table's map begins in `maps`.
    ids
        Other names that the tables' genes have, by which they are not joined.
    """

    var_names: NDArray[np.object_]
    maps: NDArray[np.int32] | None
    starts: NDArray[np.int64]
    join: str | tuple[str, ...]
    ids: frozenset[str] = frozenset()


def check_join(join: object, *, fills: bool = False) -> str | tuple[str, ...] | None:
    """Convert a user's `join` to the form that `align` takes, or raise PlanError; `fills` makes a list `Filled`."""
    if join is None or (isinstance(join, str) and join in JOINS):
        return join
    check_order(f"join={shown(join)}", join, "a list of gene names")
    if isinstance(join, (str, bytes, Mapping)) or not hasattr(join, "__iter__"):
        raise PlanError(f"join={shown(join)}: expected 'inner', 'outer', a list of gene names, or None.")
    names = tuple(str(name) for name in join)
    if not names:
        raise PlanError("join=[]: expected at least one gene name, 'inner', 'outer' or None.")
    name, n_given = Counter(names).most_common(1)[0]
    if n_given > 1:
        raise PlanError(f"join: {name!r} is given {n_given} times; pass every gene once.")
    return Filled(names) if fills else names


def nearest_gene(name: str, names: Sequence[str]) -> str | None:
    """Return the gene that a name of no gene probably stands for, if any; fast enough for hundreds of thousands.

    That is one of the same name in capitals or not, as in mice and humans, or with another version of its Ensembl id;
    else, unless the name is a number, one that is spelled alike.
    """
    is_number, bare = _NUMBERED.fullmatch(name) is not None, _VERSION.sub("", name)
    if is_number:
        return next((one for one in names if _VERSION.sub("", one) == bare), None) if name.startswith("ENS") else None
    folded = name.casefold()
    return next((one for one in names if one.casefold() == folded), None) or nearest(name, names)


def align(
    names: Sequence[NDArray[np.object_]],
    paths: Sequence[str],
    join: str | tuple[str, ...],
    ids: frozenset[str] = frozenset(),
) -> Alignment:
    """Join tables of genes by name.

    Parameters
    ----------
    join
        ``"inner"``: genes in all tables, in the order of the first; ``"outer"``: genes in any, in order of first
        appearance; or a list of genes, each in at least one table, or, if `Filled`, one of them. A warning is logged if
        Ensembl ids of different tables differ only in their versions: they are different names.
    ids
        Other names that genes of the tables have: they are not filled.

    Raises
    ------
    StoreError
        A table has a gene twice; no gene is in all tables; or a given gene is in no table.
    """
    known: dict[str, int] = {}  # number of each gene, in order of first appearance
    numbers: dict[bytes, int] = {}  # number of each distinct table: most files have the same genes as another
    number_of: dict[int, int] = {}  # by array identity: files with the same genes may share one array
    for own in names:
        if id(own) not in number_of:  # fast, as there may be thousands of tables
            codes = np.fromiter((known.setdefault(name, len(known)) for name in own.tolist()), np.int32, own.size)
            number_of[id(own)] = numbers.setdefault(codes.tobytes(), len(numbers))
    which = [number_of[id(own)] for own in names]
    tables = [np.frombuffer(numbered, dtype=np.int32) for numbered in numbers]
    if isinstance(join, tuple):
        _check_known(known, paths, join, ids)
        for name in join:  # those in no table are numbered too
            known.setdefault(name, len(known))
    all_names = np.array(list(known), dtype=object)
    for number, table in enumerate(tables):
        _check_once(table, all_names, paths[which.index(number)])
    if len(tables) > 1 and not isinstance(join, tuple):
        _warn_of_versions(known, join)
    chosen = _joined(tables, known, paths, join)
    place = np.full(len(known), -1, dtype=np.int32)
    place[chosen] = np.arange(chosen.size, dtype=np.int32)
    maps = [place[table] for table in tables]
    if all(np.array_equal(table, chosen) for table in tables):
        return Alignment(all_names[chosen], None, np.zeros(len(names), dtype=np.int64), join, ids)
    sizes = np.array([one.size for one in maps], dtype=np.int64)
    return Alignment(all_names[chosen], np.concatenate(maps), (np.cumsum(sizes) - sizes)[which], join, ids)


def _check_once(table: NDArray[np.int32], names: NDArray[np.object_], path: str) -> None:
    """Raise StoreError if a table has a gene twice."""
    is_twice = np.bincount(table)[table] > 1
    if is_twice.any():
        twice = names[table[np.argmax(is_twice)]]
        raise StoreError(
            f"{path}: gene {twice!r} occurs more than once, so join= cannot tell which is meant; name its genes by "
            "their ids, with adata.var_names = adata.var[...], or make the names unique with "
            "adata.var_names_make_unique()."
        )


def _check_known(known: dict[str, int], paths: Sequence[str], join: tuple[str, ...], ids: frozenset[str]) -> None:
    """Raise StoreError if a given gene is in no file; of those that may be filled, if none is, or one is an id."""
    unknown = [name for name in join if name not in known]
    if isinstance(join, Filled) and len(unknown) < len(join):
        unknown = [name for name in unknown if name in ids]
        if unknown:
            raise StoreError(
                f"join: {unknown[0]!r} is the id of a gene, and files are joined by names; give its name, as in "
                f"{paths[0]}."
            )
    if not unknown:
        return
    near = nearest_gene(unknown[0], list(known))
    guess = f"did you mean {near!r}? If not, leave" if near else "leave"
    raise StoreError(
        f"join: no file has the gene {unknown[0]!r} ({len(unknown)} of {len(join)} are in none); {guess} it out, or "
        f"check its spelling in {paths[0]}."
    )


def _warn_of_versions(names: Iterable[str], join: str) -> None:
    """Warn if Ensembl ids differ only in their versions: the same gene is then two of the joined ones, or in none."""
    first: dict[str, str] = {}
    twins = [
        (other, name)
        for name in names
        if name.startswith("ENS") and (other := first.setdefault(_VERSION.sub("", name), name)) is not name
    ]
    if twins:
        _log.warning(
            "join=%r: %d genes have an Ensembl id that is another's but for its version, for example %r and %r, and "
            "count as different genes; to join them, remove the versions from the files' gene names, or from those of "
            "AnnDatas opened in their place with backed='r'.",
            join,
            len(twins),
            *twins[0],
        )


def _joined(
    tables: Sequence[NDArray[np.int32]], known: dict[str, int], paths: Sequence[str], join: str | tuple[str, ...]
) -> NDArray[np.int64]:
    """Return the numbers of the joined genes."""
    if isinstance(join, tuple):
        return np.array([known[name] for name in join], dtype=np.int64)
    if join == "outer":
        return np.arange(len(known), dtype=np.int64)
    counts = np.zeros(len(known), dtype=np.int64)
    for table in tables:
        counts[table] += 1
    chosen: NDArray[np.int64] = tables[0][counts[tables[0]] == len(tables)].astype(np.int64)
    if not chosen.size:
        raise StoreError(
            f"join='inner': no gene is in all of the {len(paths)} files, {paths[0]} among them; use join='outer', "
            "or check whether some name genes by ids and others by symbols."
        )
    return chosen
