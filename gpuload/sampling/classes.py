"""The class of each cell, by one obs column or several: numbers and booleans are classes too.

Computed in slices, as there may be 100 million cells; classes are named only on demand, as there may be millions.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from gpuload.sampling.rows import SLICE

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray


class Names:
    """Class names, each built on access: there may be millions, and only errors show any.

    Parameters
    ----------
    label
        Returns the labels of a class, one for each column.
    columns
        Names of the columns; empty for labels given as an array.
    """

    def __init__(self, n: int, label: Callable[[int], tuple[Any, ...]], columns: tuple[str, ...]) -> None:
        self._n = n
        self.label = label
        self.columns = columns

    def text(self, label: tuple[Any, ...]) -> str:
        """Return labels as they appear in errors."""
        if not self.columns:
            return repr(label[0])
        return ", ".join(f"{name}={value!r}" for name, value in zip(self.columns, label, strict=True))

    def __len__(self) -> int:
        return self._n

    def __getitem__(self, index: int) -> str:
        return self.text(self.label(range(self._n)[index]))

    def with_missing(self) -> Names:
        """Return these names followed by that of the class without a value, whose labels are None."""
        missing = (None,) * max(1, len(self.columns))
        return Names(self._n + 1, lambda place: self.label(place) if place < self._n else missing, self.columns)


def coded(values: NDArray[Any], categories: NDArray[Any] | None, *column: str) -> tuple[NDArray[np.integer], Names]:
    """Return the class of each cell by a column, (n,) integers, -1 = no value; and the names of the classes.

    Parameters
    ----------
    values : (n,)
        Codes if there are `categories`, which are the classes; else numbers or booleans.
    """
    if categories is not None:
        return values, names_of(categories, *column)
    found = _distinct(values)
    if found.dtype.kind == "f":
        found = found[~np.isnan(found)]
    codes = np.empty(values.size, dtype=np.int32)
    for start in range(0, values.size, SLICE):
        part = values[start : start + SLICE]
        codes[start : start + SLICE] = np.where(part == part, np.searchsorted(found, part), -1)  # noqa: PLR0124 - NaN
    return codes, names_of(found, *column)


def factorize(values: Any, *, sort: bool = False) -> tuple[NDArray[np.integer], Any]:
    """Return codes, -1 = missing, and what they stand for, as pandas.factorize does, but correctly for NUL characters.

    pandas ends a string at its first NUL.

    Parameters
    ----------
    values : (n,)
        A NumPy or pandas array, a Series or an Index.
    sort
        Whether codes follow the order of their values; else they follow that of appearance, unless there are NULs.
    """
    import pandas as pd

    is_python = isinstance(values.dtype, pd.StringDtype) and values.dtype.storage == "python"
    is_text = is_python or values.dtype == object or getattr(values.dtype, "kind", "") == "U"
    if not (is_text and has_nul(np.asarray(values))):
        codes, found = pd.factorize(values, sort=sort)
        return codes, found
    places = np.flatnonzero(~np.asarray(pd.isna(values)))
    texts = np.asarray(values, dtype=object)[places]
    names = sorted(set(texts), key=str)
    numbers = {name: number for number, name in enumerate(names)}
    codes = np.full(len(values), -1, dtype=np.intp)
    codes[places] = [numbers[text] for text in texts]
    return codes, np.array(names, dtype=object)


def has_nul(values: NDArray[Any]) -> bool:
    """Return whether any string has a NUL character; many are searched at once, as a Python loop would be slow."""
    for start in range(0, values.size, SLICE):
        part = values[start : start + SLICE]
        try:
            text = "".join(part)
        except TypeError:  # not all are strings
            text = "".join(value for value in part if isinstance(value, str))
        if "\0" in text:
            return True
    return False


def names_of(values: NDArray[Any], *column: str) -> Names:
    """Return the names of classes with one label each."""
    return Names(values.size, lambda place: tuple(values[place : place + 1].tolist()), column)


def joint(
    codes: NDArray[np.integer], names: Names, more: NDArray[np.integer], more_names: Names
) -> tuple[NDArray[np.integer], Names]:
    """Return the joint classes of two columns; only those that occur."""
    n_more = len(more_names)
    n = len(names) * n_more

    def numbers(start: int) -> NDArray[np.int64]:
        first, second = codes[start : start + SLICE].astype(np.int64), more[start : start + SLICE]
        return np.where((first < 0) | (second < 0), -1, first * n_more + second)

    starts = range(0, max(1, codes.size), SLICE)
    out = np.empty(codes.size, dtype=np.int32)
    if n <= max(1 << 20, codes.size):  # a table of all combinations is no larger than the codes
        is_there = np.zeros(n + 1, dtype=bool)
        for start in starts:
            is_there[numbers(start)] = True
        found = np.flatnonzero(is_there[:n])
        place = np.full(n + 1, -1, dtype=np.int32)
        place[found] = np.arange(found.size, dtype=np.int32)
        for start in starts:
            out[start : start + SLICE] = place[numbers(start)]
    else:
        found = np.unique(np.concatenate([np.unique(numbers(start)) for start in starts]))
        found = found[found >= 0]
        for start in starts:
            part = numbers(start)
            out[start : start + SLICE] = np.where(part < 0, -1, np.searchsorted(found, part))

    def label(place: int) -> tuple[Any, ...]:
        first, second = divmod(int(found[place]), n_more)
        return names.label(first) + more_names.label(second)

    return out, Names(found.size, label, names.columns + more_names.columns)


def _distinct(values: NDArray[Any]) -> NDArray[Any]:
    """Return the distinct values of a long array, ascending; computed in slices, as few are expected."""
    return np.unique(
        np.concatenate([np.unique(values[start : start + SLICE]) for start in range(0, max(1, values.size), SLICE)])
    )
