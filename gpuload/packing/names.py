"""The names of all cells as UTF-8, and where each begins: as strings, those of a hundred million would take 10 GB."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from gpuload.backends.native.runs import copy_runs, have_common
from gpuload.formats import frames
from gpuload.packing.choice import of_part

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from numpy.typing import NDArray

_NARROW = (1 << 32) - 1
"""Names that uint32 can number from 1."""


@dataclass(frozen=True, slots=True, eq=False)
class CellNames:
    """The names of cells; a slice of them is a list of UTF-8.

    Attributes
    ----------
    starts : (n + 1,) int64
        The first byte of each, and the end.
    file_start : (n_files + 1,) int64
        The first name of each source, and the end.
    order : (n,) int64
        For each name, its number among the cells that are packed, in the order of the sources.
    has_numbers
        Whether the number of its source is appended to each name: ``"AAACCTG-1-0"``.
    """

    utf8: NDArray[np.uint8]
    starts: NDArray[np.int64]
    file_start: NDArray[np.int64]
    order: NDArray[np.int64]
    has_numbers: bool

    def __len__(self) -> int:
        return int(self.order.size)

    def __getitem__(self, wanted: slice) -> list[bytes]:
        rows = self.order[wanted]
        first = self.starts[rows]
        length = self.starts[rows + 1] - first
        ends = np.cumsum(length)
        together = np.empty(int(length.sum()), dtype=np.uint8)
        copy_runs(first, length, ends - length, self.utf8, together)
        plain = together.tobytes()
        names = [plain[start:end] for start, end in zip((ends - length).tolist(), ends.tolist(), strict=True)]
        if not self.has_numbers:
            return names
        numbers = (np.searchsorted(self.file_start, rows, side="right") - 1).tolist()
        return [b"%s-%d" % pair for pair in zip(names, numbers, strict=True)]

    def are(self, pieces: Iterable[NDArray[np.object_]]) -> bool:
        """Return whether these are the names; they are given as strings, in pieces."""
        at = 0
        for piece in pieces:
            if self[at : at + piece.size] != [name.encode() for name in piece]:
                return False
            at += piece.size
        return at == len(self)


def read_names(
    files: Sequence[str], layer: str, order: NDArray[np.int64], chosen: NDArray[np.int64] | None = None
) -> CellNames:
    """Return the names of the cells of a matrix, of all files; or only of the rows that are chosen.

    If files have names in common, the file's number is appended to all names.
    """
    utf8, lengths, n_rows, first = bytearray(), [], [0], 0
    for path in files:
        n_rows.append(n_rows[-1])
        for piece in frames.cell_name_pieces(path, layer):
            names = [name.encode() for name in of_part(piece, first, chosen)]
            first += piece.size
            utf8 += b"".join(names)
            lengths.append(np.fromiter(map(len, names), np.int32, len(names)))
            n_rows[-1] += len(names)
    starts = np.zeros(n_rows[-1] + 1, dtype=np.int64)
    np.cumsum(np.concatenate(lengths), out=starts[1:])
    found = CellNames(np.frombuffer(utf8, dtype=np.uint8), starts, np.array(n_rows), order, has_numbers=False)
    return replace(found, has_numbers=len(files) > 1 and _have_common(found))


def _have_common(names: CellNames) -> bool:
    n = names.starts.size - 1
    table = np.zeros(n + n // 2 + 1, dtype=np.uint32 if n <= _NARROW else np.int64)
    return bool(have_common(names.utf8, names.starts, names.file_start, table))
