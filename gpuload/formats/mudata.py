"""MuData, in any library's groups and arrays: modalities, and the columns of obs shared by all of them.

Each modality is an AnnData in its own group, and is read as such.

References
----------
.. [1] MuData documentation, "Serialization format" (/mod, /obsmap; ``file.h5mu/modality`` as a path).
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from gpuload.errors import CorruptDataError, StoreError
from gpuload.formats.arrays import check_length, member, no_column
from gpuload.formats.obs import column_names, read_column

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from gpuload.store import ObsColumn, Store


def is_mudata(root: Any) -> bool:
    """Return whether a root is a group that holds modalities, and no matrix of its own."""
    return hasattr(root, "keys") and hasattr(root.get("mod"), "keys") and "X" not in root


def no_modalities(path: str, modality: str) -> StoreError:
    """Return the error of a modality that is asked for where there is none."""
    return StoreError(
        f"{path}: it holds no modalities, so {path + '/' + modality!r} does not exist; pass its path alone."
    )


def modality_groups(root: Any, path: str, modality: str) -> list[tuple[str, Any]]:
    """Return the group of a modality, after its name in errors; none for a root that is no MuData, if none is named."""
    if is_mudata(root):
        name, group = find_modality(root, path, modality)
        return [(f"{path}/{name}", group)]
    if modality:
        raise no_modalities(path, modality)
    return []


def find_modality(root: Any, path: str, modality: str) -> tuple[str, Any]:
    """Return the name and the group of a modality; `modality` may be ``""`` if there is only one.

    Raise StoreError if there is none, or several and none is named.
    """
    is_name = modality != "" and "/" not in modality
    group = root["mod"].get(modality) if is_name else None  # also finds it on a web server that cannot list
    if hasattr(group, "keys"):
        return modality, group
    names = _names(root, path)
    if modality or len(names) != 1:
        have = ", ".join(repr(n) for n in names) or "none"
        found = f"there is no modality {modality!r}" if modality else "it holds several modalities"
        cure = f" Choose one by the path, for example {path + '/' + names[0]!r}." if names else " Is it a MuData file?"
        raise StoreError(f"{path}: {found}; its modalities are {have}.{cure}")
    return names[0], root["mod"][names[0]]


def read_modality(
    root: Any, path: str, modality: str, obs: Sequence[str], read: Callable[[Any, Sequence[str], str], Store]
) -> Store:
    """Return the store of one modality.

    Raise StoreError or CorruptDataError as `find_modality` and `read` do; or if a column is in neither obs, or cannot
    be mapped to the modality's cells.

    Parameters
    ----------
    obs
        Columns of the modality's obs or, if it has none of that name, of the shared obs.
    read
        Returns the store of a group that is an AnnData, with some columns of its obs, given its name in errors.
    """
    modality, group = find_modality(root, path, modality)
    own, shared = (column_names(member(one, "obs", path)) for one in (group, root))
    for name in obs:
        if name not in own and name not in shared:
            here = [*own, *(n for n in shared if n not in own)]
            error, each = no_column(f"{path}/{modality}", name, here), {modality: here}
            with suppress(KeyError, OSError, ValueError):  # the error is about this column, not about damage elsewhere
                others = [other for other in _names(root, path) if other != modality]
                each |= {other: column_names(member(root["mod"][other], "obs", path)) for other in others}
            explain_elsewhere(error, modality, each)
            raise error
    store = read(group, [name for name in obs if name in own], f"{path}/{modality}")
    columns = {name: store.obs[name] if name in own else _shared(root, modality, name, store, path) for name in obs}
    return replace(store, obs=columns)


def explain_elsewhere(error: StoreError, modality: str, columns: Mapping[str, Sequence[str]]) -> None:
    """Add to the error for a column of obs that a modality lacks where it may be, if there is a guess.

    Parameters
    ----------
    columns
        The columns available to the cells of each modality.
    """
    name = error.missing_column or ""
    prefix, _, rest = name.partition(":")
    cure = ""
    if prefix == modality and rest in columns[modality]:
        cure = f"its own columns go without {prefix + ':'!r}: use {rest!r}"
    for other, names in columns.items():
        found = rest if prefix == other else name
        if not cure and other != modality and found in names:
            cure = f"modality {other!r} has {found!r}: pass obs_table= with that column of its obs"
    if cure:
        error.args = (f"{str(error).rstrip('.')}; {cure}.",)


def obs_columns(root: Any, path: str, modality: str) -> list[str]:
    """Return the columns available to a modality's cells, shared ones included."""
    names = [modality] if modality else _names(root, path)
    group: Any = root["mod"].get(names[0]) if len(names) == 1 else None
    own = column_names(member(group, "obs", path)) if hasattr(group, "keys") else []
    return [*own, *(n for n in column_names(member(root, "obs", path)) if n not in own)]


def _names(root: Any, path: str) -> list[str]:
    modalities = root["mod"]
    return [name for name in modalities if hasattr(member(modalities, name, path), "keys")]


def _shared(root: Any, modality: str, name: str, store: Store, path: str) -> ObsColumn:
    """Return a column of the shared obs for a modality's cells: obsmap counts them from 1, 0 is none."""
    column, where = read_column(root["obs"], name, path), f"{path}: /obsmap/{modality}"
    if modality not in root.get("obsmap", ()):
        raise StoreError(
            f"{where}: it is missing, so column {name!r} of /obs cannot be assigned to the cells of "
            f"{modality!r}; rewrite the file with MuData."
        )
    place = np.asarray(root["obsmap"][modality][()]).astype(np.int64).reshape(-1)
    check_length(where, place.size, column.values.size, "cells in /obs")
    rows = np.full(store.n_obs, -1, dtype=np.int64)
    outside = place[(place < 0) | (place > store.n_obs)]
    if outside.size:
        raise CorruptDataError(f"{where} names cell {outside[0]} of {store.n_obs}; rewrite the file with MuData.")
    rows[place[place > 0] - 1] = np.flatnonzero(place)
    if np.any(rows < 0):
        raise CorruptDataError(f"{where} leaves out cells of the modality; rewrite the file with MuData.")
    if np.count_nonzero(place) > store.n_obs:
        raise CorruptDataError(f"{where} names a cell of the modality more than once; rewrite the file with MuData.")
    return replace(column, values=column.values[rows])
