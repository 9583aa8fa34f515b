"""Splits cells into parts for training, validation and so on: cell by cell, by whole groups, or by named groups.

    split = gpuload.split("atlas.h5ad", {"train": 0.8, "val": 0.2}, by="sample")
    loader = gpuload.open_loader("atlas.h5ad", sampler=gpuload.Subset(split["train"]))

The same data and settings give the same split in any process, on any machine, with any NumPy (see `gpuload.permute`);
when groups are dealt, also with the files, or the cells in them, in another order.

`subsample` draws at most so many cells of each group.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from gpuload.checks import check_names, check_obs_names, check_seed, check_whole, is_number
from gpuload.concat import UNCOMPARED
from gpuload.dealing import deal_cells, deal_groups, draw_of_each, group_by, hash_of, label_of, targets
from gpuload.errors import PlanError, StoreError, shown
from gpuload.loader import Loader
from gpuload.source import loading_npz, saving
from gpuload.store import Store
from gpuload.tables import check_modalities
from gpuload.threads import import_whole
from gpuload.where import parse as parse_where

if TYPE_CHECKING:
    from collections.abc import Sequence
    from types import EllipsisType

    from numpy.typing import NDArray

    from gpuload.dealing import Label
    from gpuload.store import ObsColumn
    from gpuload.where import Where

VERSION = 1
"""Version of the files that `Split.save` writes."""

MAX_PARTS = (1 << 15) - 1

_OWN_LABELS = "; labels of your own are a column of a loader opened with obs_table=, which may replace the paths"


@dataclass(frozen=True, eq=False, repr=False)
class Split(Mapping[str, "NDArray[np.int64]"]):
    """The rows of each part, by name: ``split["train"]`` is an (n,) int64 array of global row numbers, ascending.

    Made by `gpuload.split`. ``str(split)`` says how close the parts are to the requested shares.

    Attributes
    ----------
    part : (n_obs,) int8 or int16
        Index of each cell's part in the order of the names; -1 if it is in none.
    groups
        The groups in each part, by name; empty where cells were dealt one by one.
    files
        Name, without folders, and cells of each file.
    settings
        The settings it was made with, as JSON values: ``"shares"``, ``"by"``, ``"stratify"``, ``"seed"``,
        ``"where"`` if it was given; and ``"aims"``, the cells that a share asks for.
    """

    names: tuple[str, ...]
    part: NDArray[np.signedinteger[Any]]
    groups: Mapping[str, tuple[Label, ...]]
    files: tuple[tuple[str, int], ...]
    settings: Mapping[str, Any]

    def __post_init__(self) -> None:
        self.part.flags.writeable = False

    def __getitem__(self, name: str) -> NDArray[np.int64]:
        if name not in self.names:
            raise KeyError(f"there is no part {name!r}; the parts are {', '.join(map(repr, self.names))}.")
        return np.flatnonzero(self.part == self.names.index(name))

    def __iter__(self) -> Iterator[str]:
        return iter(self.names)

    def __len__(self) -> int:
        return len(self.names)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Split):
            return NotImplemented
        return (self.names, self.files) == (other.names, other.files) and np.array_equal(self.part, other.part)

    __hash__ = None  # type: ignore[assignment]

    @property
    def counts(self) -> dict[str, int]:
        """Cells in each part."""
        found = np.bincount(self.part.astype(np.int16) + 1, minlength=len(self.names) + 1)
        return dict(zip(self.names, found[1:].tolist(), strict=True))

    def __repr__(self) -> str:
        return f"Split({', '.join(f'{name}: {n:,} cells' for name, n in self.counts.items())})"

    def __str__(self) -> str:
        counts, n_obs, lines = self.counts, max(1, self.part.size), []
        for name, n in counts.items():
            aim = self.settings["aims"].get(name)
            off = "" if aim is None else f", {n - aim:+,} from its share"
            of = f"; groups by {', '.join(self.settings['by'])}: {len(self.groups[name]):,}" if self.groups else ""
            lines.append(f"{name}: {n:,} cells of {n_obs:,} ({n / n_obs:.2%}){off}{of}")
        n_out = self.part.size - sum(counts.values())
        return "\n".join([*lines, *([f"in no part: {n_out:,} cells"] if n_out else [])])

    def save(self, path: str | os.PathLike[str]) -> None:
        """Save the split to a compressed .npz file (no pickles), atomically replacing an existing file.

        Raises
        ------
        ReadError
            It cannot be written.
        """
        about = {
            "gpuload_split": VERSION,
            "names": self.names,
            "groups": dict(self.groups),
            "files": self.files,
            "settings": dict(self.settings),
        }
        with saving(path) as file:
            np.savez_compressed(file, part=self.part, about=np.array(json.dumps(about)))

    @classmethod
    def load(
        cls,
        path: str | os.PathLike[str],
        cells: Any = None,
        *,
        layer: str | Sequence[str] = "X",
        modality: str | None = "",
        storage_options: Mapping[str, Any] | None = None,
    ) -> Split:
        """Load a split written by `save`, and check that it belongs to `cells`, if given, as `check` does.

        Raises
        ------
        ReadError
            The file cannot be opened.
        StoreError
            It is not a split, or its version is not supported by this gpuload.
        PlanError
            It belongs to other cells; see `check`.
        """
        path = os.fspath(path)
        with loading_npz(path, lambda _: _not_a_split(path)) as file:
            part, about = file["part"], json.loads(str(file["about"]))
            version = about["gpuload_split"]
            split = cls(
                tuple(about["names"]),
                part,
                {name: tuple(label_of(g) for g in groups) for name, groups in about["groups"].items()},
                tuple((str(name), int(n)) for name, n in about["files"]),
                about["settings"],
            )
        if version != VERSION:
            raise StoreError(
                f"{path}: a split of version {version!r}; this gpuload reads version {VERSION}: update it."
            )
        is_whole = part.ndim == 1 and part.dtype.kind == "i" and part.size == sum(n for _, n in split.files)
        if not is_whole or (part.size and not -1 <= part.min() <= part.max() < len(split.names)):
            raise _not_a_split(path)
        if cells is not None:
            split.check(cells, layer=layer, modality=modality, storage_options=storage_options)
        return split

    def check(
        self,
        cells: Any,
        *,
        layer: str | Sequence[str] = "X",
        modality: str | None = "",
        storage_options: Mapping[str, Any] | None = None,
    ) -> None:
        """Raise PlanError if the files differ from those that were split, in name, order or number of cells.

        Parameters
        ----------
        cells, layer, modality, storage_options
            As for `gpuload.split`.
        """
        with _opened(cells, layer, modality, storage_options, ()) as store:
            found = _files(store)
        if found == self.files:
            return
        if len(found) != len(self.files):
            raise PlanError(f"split: it is of {len(self.files)} files, but {len(found)} were given; split these again.")
        i = next(i for i, (a, b) in enumerate(zip(self.files, found, strict=True)) if a != b)
        (name, n), (other, m) = self.files[i], found[i]
        cure = "pass them in the same order" if sorted(found) == sorted(self.files) else "split these again"
        raise PlanError(
            f"split: its file {i} is {name!r} with {n} cells, but {other!r} with {m} cells was given; {cure}."
        )


def split(
    cells: Any,
    shares: Mapping[str, Any],
    *,
    by: str | Iterable[str] | None = None,
    stratify: str | Iterable[str] | None = None,
    where: str | None = None,
    seed: int = 0,
    layer: str | Sequence[str] = "X",
    modality: str | None = "",
    storage_options: Mapping[str, Any] | None = None,
) -> Split:
    """Split cells, or whole groups of cells, into named parts.

    Parameters
    ----------
    cells
        Anything `open_loader` accepts, or a loader or store that holds the columns named below. All cells of a loader
        are split, including those excluded by its ``where=`` or sampler. If only some files have a column, pass a
        loader opened with ``join="outer"``.
    shares
        For each part, its share of the cells, above 0 and at most 1; or a list of groups assigned to it exclusively; or
        ``...`` for the remainder, in at most one part. Shares are fractions of the cells not in listed groups. If they
        sum to less than 1 and there is no ``...``, the remaining cells are in no part. For example ``{"train": 0.8,
        "val": 0.2}``, ``{"train": ..., "test": ["plate14"]}``, ``{"train": ..., "val": 0.1, "test": ["plate14"]}``.
    by
        Obs columns whose values (for several columns, tuples of values) define groups that are kept whole. Cells with a
        missing value are in no part, since their group is unknown. None: cells are assigned one by one.
    stratify
        Obs columns to stratify by: each part gets its share of every class, to within one cell when splitting by cells,
        and as closely as a greedy assignment allows when splitting by groups. Missing values count as one more class.
    where
        Only these cells are split, as if there were no others; the others are in no part. A condition on columns of
        obs, as for `open_loader`. The percentages in ``str(split)`` are of all cells.
    seed
        Random seed, at least 0.
    layer
        A matrix present in the files, or several, as given to `open_loader`; only the number of rows is used. This
        setting, and the next two, are for paths: a loader is open already.
    modality
        The modality whose obs has the columns, if there are several; by default the first of a mapping.
    storage_options
        As in `open_loader`.

    Returns
    -------
    Split
        Rows by name.

    Raises
    ------
    PlanError
        The shares are invalid, a column or group does not exist, or `where` holds for no cell.
    StoreError, ReadError, CorruptDataError
        As `open_loader`.

    Notes
    -----
    By cells, each part gets its share rounded to whole cells. By groups, groups are assigned from the largest to the
    smallest; each goes to one of the parts with room for it, with probability proportional to that room, or, if none
    has room for it, to the one with the most room. So no part is further from its share than the size of the largest
    group, and with many groups the last, smallest ones fill up the parts. The closest of up to 16 such assignments is
    taken. A part left empty gets the smallest group of the part with the most groups. When stratified, each group goes
    where it least increases the sum over classes and parts of (cells - share)^2 / share.
    """
    wanted = _checked_shares(shares)
    names = list(wanted)
    keys, strata = (
        () if given is None else check_obs_names(name, given, least=1, also=_OWN_LABELS)
        for name, given in (("by", by), ("stratify", stratify))
    )
    seed = check_seed(seed)
    listed = [name for name, value in wanted.items() if isinstance(value, list)]
    if listed and not keys:
        raise PlanError(f"shares[{listed[0]!r}] names groups; name their column with by=, for example by='plate'.")
    condition = None if where is None else parse_where(where)
    columns = (*keys, *strata, *(() if condition is None else condition.columns))
    with _opened(cells, layer, modality, storage_options, columns) as store:
        rows = _rows(store, condition)
        classes = group_by(_at(store, strata, rows), has_missing_group=True) if strata else None
        if keys:
            groups = group_by(_at(store, keys, rows))
            dealt, kept = deal_groups(wanted, groups, classes, ", ".join(keys), seed)
            n_dealt = int(groups.counts.sum()) - sum(np.count_nonzero(dealt == names.index(name)) for name in listed)
        else:
            dealt, kept, n_dealt = deal_cells(wanted, rows.size, classes, seed), {}, rows.size
        part: NDArray[np.signedinteger[Any]] = np.full(store.n_obs, -1, np.int8 if len(wanted) < 128 else np.int16)
        part[rows] = dealt
        files = _files(store)
    settings = {
        "shares": {name: "..." if value is ... else value for name, value in wanted.items()},
        "by": list(keys),
        "stratify": list(strata),
        **({} if where is None else {"where": where}),
        "seed": seed,
        "aims": {names[p]: round(share * n_dealt) for p, share in zip(*targets(wanted), strict=True) if p >= 0},
    }
    return Split(tuple(wanted), part, kept, files, settings)


def subsample(
    cells: Any,
    n: int,
    *,
    by: str | Iterable[str] | None = None,
    where: str | None = None,
    keep: str | None = None,
    seed: int = 0,
    layer: str | Sequence[str] = "X",
    modality: str | None = "",
    storage_options: Mapping[str, Any] | None = None,
) -> NDArray[np.int64]:
    """Draw at most `n` cells of each group at random, for `gpuload.Subset`: smaller data, or less of what abounds.

    Parameters
    ----------
    cells
        As for `split`. Of a loader, all cells are drawn from.
    n
        Cells of each group, at least 1; of a group with fewer, all are drawn.
    by
        Obs columns whose values (for several columns, combinations of values) define the groups. Cells with a missing
        value are not drawn. None: `n` of all cells are drawn.
    where
        Only these cells are drawn from: a condition on columns of obs, as for `open_loader`.
    keep
        All of these cells are returned, beside those drawn of the others: ``"gene == 'non-targeting'"``, for example,
        since controls would be a group like any other. Also a condition, which `where` limits too.
    seed
        Random seed, at least 0. With the same seed, the cells for a smaller `n` are among those for a larger one, and
        those of all cells that satisfy `where` are among those drawn with `where`. The draw depends on row numbers, so
        on the order of the files.
    layer, modality, storage_options
        As for `split`.

    Returns
    -------
    (m,) int64
        Row numbers over all paths, ascending.

    Raises
    ------
    PlanError
        A setting is invalid, a column does not exist, a condition holds for no cell, or no cell has a group.
    StoreError, ReadError, CorruptDataError
        As `open_loader`.
    """
    n, seed = check_whole("n", n, 1), check_seed(seed)
    keys = () if by is None else check_obs_names("by", by, least=1, also=_OWN_LABELS)
    condition = None if where is None else parse_where(where)
    kept = None if keep is None else parse_where(keep, "keep")
    columns = [*keys, *(name for one in (condition, kept) if one is not None for name in one.columns)]
    with _opened(cells, layer, modality, storage_options, columns) as store:
        if not store.n_obs:
            raise PlanError(f"{store.paths[0]}: there are no cells to draw; pass a file that has some.")
        rows, all_of = _rows(store, condition), np.zeros(0, dtype=np.int64)
        if kept is not None:
            is_kept = kept.mask(store.obs)[rows]
            rows, all_of = rows[~is_kept], rows[is_kept]
        codes = group_by(_at(store, keys, rows)).codes if keys else np.zeros(rows.size, dtype=np.int32)
    drawn = rows[draw_of_each(codes, rows, n, seed)]
    if not drawn.size and rows.size:
        raise PlanError(f"by={shown(by)}: every cell has a missing value in these columns; draw by other columns.")
    return np.sort(np.concatenate([drawn, all_of]), kind="stable")  # two ascending runs, with no row in common


# --- checking arguments


def _checked_shares(shares: Any) -> dict[str, float | list[Label] | EllipsisType]:
    if not isinstance(shares, Mapping) or not shares:
        raise PlanError(f"shares={shown(shares)}: expected a dict, for example {{'train': 0.8, 'val': 0.2}}.")
    if len(shares) > MAX_PARTS:
        raise PlanError(f"shares: {len(shares)} parts; at most {MAX_PARTS} are supported.")
    wanted: dict[str, float | list[Label] | EllipsisType] = {}
    for name, value in shares.items():
        if not isinstance(name, str) or not name:
            raise PlanError(f"shares: {name!r} is not a name for a part; expected text, for example 'train'.")
        if value is ...:
            wanted[name] = value
        elif is_number(value) and 0 < value <= 1:
            wanted[name] = float(value)
        elif _is_list(value) and len(value):
            wanted[name] = sorted({label_of(group) for group in value}, key=hash_of)
        else:
            raise PlanError(
                f"shares[{name!r}]={shown(value)}: expected a share above 0 and at most 1, a list of groups, or ... "
                "for what is left."
            )
    left = [name for name, value in wanted.items() if value is ...]
    total = sum(value for value in wanted.values() if isinstance(value, float))
    if len(left) > 1:
        raise PlanError(f"shares: {left[0]!r} and {left[1]!r} both ask for what is left (...); only one of them may.")
    if total > 1 + 1e-9 or (left and total > 1 - 1e-9):
        also = f", which leaves nothing for {left[0]!r}" if left else ""
        raise PlanError(f"shares: they add up to {total:g}{also}; expected {'less than' if left else 'at most'} 1.")
    return wanted


def _is_list(value: Any) -> bool:
    return value.ndim == 1 if isinstance(value, np.ndarray) else isinstance(value, (list, tuple, set, frozenset))


@contextmanager
def _opened(
    cells: Any,
    layer: str | Sequence[str],
    modality: str | None,
    storage_options: Mapping[str, Any] | None,
    columns: Sequence[str],
) -> Iterator[Store]:
    """Yield the store of the given cells with these obs columns; close it afterwards if it was opened here."""
    if not isinstance(cells, (Loader, Store)):
        import_whole("gpuload.formats")
        from gpuload.formats import open_matrices
        from gpuload.formats.addresses import at_addresses

        stores = open_matrices(
            at_addresses(cells, None, storage_options),
            layers=check_names("layer", layer, least=1)[:1],
            obsm=(),
            modalities=check_modalities(modality or (), cells)[:1],
            obs=tuple(dict.fromkeys(columns)),
            join=UNCOMPARED,
        )
        with closing(stores["X"]) as store:
            yield store
        return
    store = cells if isinstance(cells, Store) else cells.store
    for setting, is_given in (
        ("layer", check_names("layer", layer, least=1) != ("X",)),
        ("modality", bool(modality)),
        ("storage_options", storage_options is not None),
    ):
        if is_given:
            raise PlanError(f"{setting}: the cells are those of a loader, which is open already; leave it out.")
    for name in columns:
        if name not in store.obs:
            raise PlanError(
                f"{name!r} is not a column that the loader holds; open it with obs=[{name!r}], or pass the paths."
            )
    yield replace(store, obs={name: column.stored or column for name, column in store.obs.items()})


def _rows(store: Store, where: Where | None) -> NDArray[np.int64]:
    """Return the rows for which a condition holds; None: all."""
    return np.arange(store.n_obs) if where is None else np.flatnonzero(where.mask(store.obs))


def _at(store: Store, columns: Iterable[str], rows: NDArray[np.int64]) -> list[ObsColumn]:
    """Return columns of obs at some rows, which may be all."""
    if rows.size == store.n_obs:
        return [store.obs[name] for name in columns]
    return [replace(store.obs[name], values=store.obs[name].values[rows]) for name in columns]


def _files(store: Store) -> tuple[tuple[str, int], ...]:
    return tuple((os.path.basename(path), n) for path, n in zip(store.paths, store.file_rows, strict=True))


def _not_a_split(path: str) -> StoreError:
    return StoreError(f"{path}: not a split that gpuload saved, or a damaged one; recreate it with gpuload.split.")
