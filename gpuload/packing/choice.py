"""Which cells are packed: those for which a condition holds, as if there were no others.

They are given as their rows, counted over all sources, ascending; None stands for all cells.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeVar

import numpy as np

from gpuload.concat import concat_column
from gpuload.formats import SOURCE_FILE, frames
from gpuload.formats.obs import encode
from gpuload.formats.recognise import obs_columns
from gpuload.store import ObsColumn

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from gpuload.where import Where

T = TypeVar("T")


def rows_where(files: Sequence[str], layer: str, where: Where) -> NDArray[np.int64]:
    """Return the rows for which a condition holds, (n_chosen,); the files have its columns.

    Raises
    ------
    PlanError
        There are none; or it compares a column with what that cannot hold.
    """
    return np.flatnonzero(where.mask({name: _column(files, layer, name) for name in where.columns}))


def is_made(files: Sequence[str], name: str) -> bool:
    """Return whether a column of obs is not stored: ``"source_file"``, which every cell has."""
    return name == SOURCE_FILE and name not in obs_columns(files[0])


def of_part(values: T, first: int, chosen: NDArray[np.int64] | None) -> T:
    """Return those of some values, one for each row of the sources from `first` on, whose row is chosen."""
    if chosen is None:
        return values
    low, high = np.searchsorted(chosen, (first, first + len(values)))  # type: ignore[arg-type]
    return values[chosen[low:high] - first]  # type: ignore[index,no-any-return]


def _column(files: Sequence[str], layer: str, name: str) -> ObsColumn:
    """Return a column of obs as `open_loader` has it, whether or not rows can be read from the files' matrices."""
    if is_made(files, name):
        paths, n_rows = zip(*(part for file in files for part in frames.cells_by_part(file, layer)), strict=True)
        return ObsColumn(np.repeat(np.arange(len(paths), dtype=np.int32), n_rows), np.array(paths, dtype=object))
    return concat_column(name, [encode(frames.cell_column(file, name, layer), name, file) for file in files], files)
