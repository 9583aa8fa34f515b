"""What is on disk: matrices that turn row ranges into recipes, and obs columns.

Holds metadata in host memory, never bulk data.

A `Store` presents one or more files as one table of cells; the layers above know nothing of files. It is immutable and
safe to share between threads.
"""

from __future__ import annotations

import math
import os
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np

from gpuload.errors import StoreError
from gpuload.joined import Joined
from gpuload.layout import split_at
from gpuload.types import ITEMSIZES, Recipe, consecutive, expand_ranges

if TYPE_CHECKING:
    from collections.abc import Mapping

    from numpy.typing import NDArray

    from gpuload.alignment import Alignment
    from gpuload.layout import ArrayLayout
    from gpuload.types import Source

CONTIGUOUS_BLOCK = 64 << 10
"""Bytes of contiguous storage that ``block_size="chunk"`` treats as one chunk."""

MAX_WHOLE = 1 << 53
"""float64 represents every integer up to this exactly."""


@dataclass(frozen=True, slots=True, eq=False)
class ObsColumn:
    """One column of obs, or of var, in host memory.

    Attributes
    ----------
    values : (n_obs,)
        int32 codes if `categories` is given (-1 = missing), else numbers or booleans.
    is_ordered
        Whether the categories are ordered, from the least to the greatest.
    stored
        The column as it is stored, if this one is recoded to other categories.
    """

    values: NDArray[np.generic]
    categories: NDArray[np.object_] | None = None
    is_ordered: bool = False
    stored: ObsColumn | None = None

    def delivered(self, rows: Any) -> NDArray[Any]:
        """Return the values at `rows`, as they appear in minibatches: codes are int64, as loss functions expect."""
        values: NDArray[Any] = self.values[rows]
        return values if self.categories is None else values.astype(np.int64)

    @property
    def has_value(self) -> bool:
        """Whether any value is there, neither missing nor NaN."""
        if self.categories is not None:
            return bool((self.values.astype(np.int32, copy=False) >= 0).any())
        return bool(self.values.size) and not (self.values.dtype.kind == "f" and bool(np.isnan(self.values).all()))

    def of_booleans(self) -> ObsColumn:
        """Return booleans as codes of them, as nullable ones are."""
        return ObsColumn(self.values.astype(np.int32), np.array([False, True], dtype=object))

    def coded_as(self, categories: NDArray[np.object_]) -> ObsColumn:
        """Return this categorical column recoded to `categories`; -1 for cells in none of them."""
        assert self.categories is not None  # noqa: S101 - narrows the type; never called on numbers
        place = {category: code for code, category in enumerate(categories)}
        codes = np.array([place.get(category, -1) for category in self.categories] + [-1], dtype=np.int32)
        is_ordered = self.is_ordered and bool(np.all(np.diff(codes[codes >= 0]) > 0))
        return ObsColumn(codes[self.values], categories, is_ordered, stored=self)

    @classmethod
    def missing(cls, n_obs: int) -> ObsColumn:
        """Return a column whose values are all missing."""
        return cls(np.full(n_obs, -1, dtype=np.int32), np.empty(0, dtype=object))


def check_exact(values: NDArray[Any], where: str) -> None:
    """Raise StoreError if whole numbers to be converted to float64 are too large to be exact."""
    largest = max(int(values.max(initial=0)), int(values.min(initial=0)), key=abs)
    if abs(largest) > MAX_WHOLE:
        raise StoreError(
            f"{where} holds the whole number {largest} and would become float64, as whole numbers with missing values "
            f"or of several types do, which is exact to {MAX_WHOLE} only; make them text or categories."
        )


@dataclass(frozen=True, slots=True, eq=False)
class CsrMatrix:
    """A CSR matrix on disk.

    Attributes
    ----------
    indptr : (n_rows + 1,) int64
        Row offsets, in host memory.
    data, indices
        Layouts of the values and the column numbers; their chunk grids may differ.
    """

    indptr: NDArray[np.int64]
    data: ArrayLayout
    indices: ArrayLayout
    n_vars: int

    kind = "csr"
    targets = ("data", "indices")
    """The resident's arrays that `layouts` fill."""

    @property
    def n_rows(self) -> int:
        """Rows."""
        return self.indptr.size - 1

    @property
    def layouts(self) -> tuple[ArrayLayout, ...]:
        """The stored arrays."""
        return (self.data, self.indices)

    def over(self, data: ArrayLayout, indices: ArrayLayout) -> CsrMatrix:
        """Return the same rows over other layouts of its arrays."""
        return replace(self, data=data, indices=indices)

    def chunk_edges(self) -> NDArray[np.int64]:
        """Return row edges snapped to the chunk grid of `data`: increasing, from 0 to n_rows.

        A row that crosses a chunk boundary belongs to the block before it, which then needs only the head of the next
        chunk.
        """
        if self.data.edges is not None:
            return np.unique(np.append(np.searchsorted(self.indptr, self.data.edges[:-1], side="left"), self.n_rows))
        itemsize = self.data.dtype.itemsize
        step = CONTIGUOUS_BLOCK // itemsize if not self.data.is_chunked else self.data.chunk_shape[0]
        starts = np.arange(0, int(self.indptr[-1]), max(1, step), dtype=np.int64)
        edges = np.searchsorted(self.indptr, starts, side="left")
        return np.unique(np.concatenate([[0], edges, [self.n_rows]]))


@dataclass(frozen=True, slots=True, eq=False)
class DenseMatrix:
    """A dense matrix on disk.

    Attributes
    ----------
    X
        Layout of the values: rows first, then one or more axes for the values of a row.
    row_shape
        Shape of a row: (n_vars,), unless each cell has an array of more dimensions.
    """

    X: ArrayLayout
    row_shape: tuple[int, ...]

    kind = "dense"
    targets = ("X",)
    """The resident's array that `layouts` fills."""

    @property
    def n_rows(self) -> int:
        """Rows."""
        return self.X.shape[0]

    @property
    def n_vars(self) -> int:
        """Columns, or values per row."""
        return math.prod(self.row_shape)

    @property
    def layouts(self) -> tuple[ArrayLayout, ...]:
        """The stored arrays."""
        return (self.X,)

    def over(self, X: ArrayLayout) -> DenseMatrix:
        """Return the same rows over another layout of its array."""
        return replace(self, X=X)

    def chunk_edges(self) -> NDArray[np.int64]:
        """Return row edges snapped to the chunk grid: increasing, from 0 to n_rows."""
        row_nbytes = max(1, self.n_vars * self.X.dtype.itemsize)
        step = max(1, CONTIGUOUS_BLOCK // row_nbytes) if not self.X.is_chunked else self.X.chunk_shape[0]
        return np.unique(np.append(np.arange(0, self.n_rows, step, dtype=np.int64), self.n_rows))


Matrix = CsrMatrix | DenseMatrix

_NONE_JOINED = Joined.apart([])


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class Store:
    """Cells of one or more files as one table.

    Attributes
    ----------
    matrices
        One per file, all of one kind; without an `alignment`, also of one width.
    sources
        Those that it closes.
    file_sources
        The sources of each file, which are looked at for changes; by default, all sources.
    var_ids : (n_vars,) object, optional
        Alternative gene names, if the file has both names and ids; genes may be chosen by either.
    alignment
        Maps the columns of each matrix to genes; None if all matrices have the genes `var_names`.
    joined
        The arrays of all matrices, joined where matrices are alike; by default, none are joined.
    var
        The requested columns of each matrix's var, (n_vars,) of the matrix each.
    logged
        Those of `paths` whose X this is and, as the file says, the logarithm of something.
    file_start : (n_files + 1,) int64
        First row of each file, and the end.
    """

    matrices: tuple[Matrix, ...]
    paths: tuple[str, ...]
    var_names: NDArray[np.object_]
    obs: dict[str, ObsColumn]
    sources: tuple[Source, ...]
    var_ids: NDArray[np.object_] | None = None
    alignment: Alignment | None = None
    joined: Joined = _NONE_JOINED
    file_sources: tuple[tuple[Source, ...], ...] = ()
    var: tuple[Mapping[str, ObsColumn], ...] = ()
    logged: tuple[str, ...] = ()
    file_start: NDArray[np.int64] = field(init=False)
    _widths: NDArray[np.int64] = field(init=False)

    def __repr__(self) -> str:  # users look at `loader.store` and `loader.tables`
        shape = " x ".join(f"{n:,}" for n in (self.n_obs, *self.row_shape))
        return f"<Store of {shape} values, {self.kind}, in {len(self.paths)} file{'s' * (len(self.paths) != 1)}>"

    def __post_init__(self) -> None:
        rows, widths = np.array([(m.n_rows, m.n_vars) for m in self.matrices], dtype=np.int64).reshape(-1, 2).T
        object.__setattr__(self, "file_start", np.append(0, np.cumsum(rows)))
        object.__setattr__(self, "_widths", widths)
        if not self.file_sources:
            object.__setattr__(self, "file_sources", (self.sources,) * len(self.matrices))
        if len(self.file_sources) != len(self.matrices):
            raise ValueError(f"file_sources: they are of {len(self.file_sources)} files, not {len(self.matrices)}.")
        layouts = [matrix.layouts for matrix in self.matrices]
        if not self.joined.is_of(layouts):  # not given, or `replace` changed the matrices
            object.__setattr__(self, "joined", Joined.apart(layouts))

    @property
    def kind(self) -> str:
        """``"csr"`` or ``"dense"``."""
        return self.matrices[0].kind

    @property
    def row_shape(self) -> tuple[int, ...]:
        """Shape of a cell's values: (n_vars,), unless each cell has an array of more dimensions."""
        first = self.matrices[0]
        if isinstance(first, DenseMatrix) and len(first.row_shape) > 1:
            return first.row_shape
        return (self.n_vars,)

    @property
    def n_obs(self) -> int:
        """Number of cells in all files."""
        return int(self.file_start[-1])

    @property
    def n_vars(self) -> int:
        """Number of genes."""
        return int(self.var_names.size)

    @property
    def file_rows(self) -> tuple[int, ...]:
        """Number of cells per file."""
        return tuple(np.diff(self.file_start).tolist())

    def nbytes_per_row(self, values: str = "float32") -> float:
        """Return the mean bytes of a resident row on the CPU.

        Each value takes those of its dtype, and in CSR 2 (up to 65,536 genes) or 4 more for its column.
        """
        is_narrow = max(m.n_vars for m in self.matrices) <= 1 << 16
        of_column = 0 if self.kind == "dense" else 2 if is_narrow else 4
        return (ITEMSIZES[values] + of_column) * self.values_per_row

    @property
    def values_per_row(self) -> float:
        """Mean number of values per row: those stored, or one per gene if X is dense."""
        n = sum(m.n_rows * m.n_vars if isinstance(m, DenseMatrix) else int(m.indptr[-1]) for m in self.matrices)
        return n / self.n_obs if self.n_obs else 0.0

    @property
    def metadata_nbytes(self) -> int:
        """Size of row offsets, chunk addresses and obs columns in host memory, in bytes."""
        offsets = sum(m.indptr.nbytes for m in self.matrices if isinstance(m, CsrMatrix))
        chunks = sum(layout.index_nbytes for m in self.matrices for layout in m.layouts)
        return offsets + chunks + self.joined.index_nbytes + sum(column.values.nbytes for column in self.obs.values())

    def recipe(self, ranges: NDArray[np.int64]) -> Recipe:
        """Return the recipe that makes rows resident.

        Parameters
        ----------
        ranges : (n, 2) int64
            Global row ranges, disjoint and ascending; the resident holds their rows in this order.
        """
        _, files, start, stop = split_at(ranges, self.file_start)
        rows = np.stack([start, stop], axis=1) - self.file_start[files][:, None]  # within each file
        lengths = rows[:, 1] - rows[:, 0]
        n_rows, map_start = int(lengths.sum()), None
        if self.alignment is not None and self.alignment.starts.any():
            map_start = np.repeat(self.alignment.starts[files], lengths)
        indptr, reads = None, []
        if self.kind == "csr":
            indptr, stored = self._in_values(files, rows)
            is_filled = stored[:, 0] < stored[:, 1]
        else:
            stored, is_filled = rows, self._widths[files] > 0
            if np.ptp(self._widths):
                indptr = np.append(0, np.cumsum(np.repeat(self._widths[files], lengths)))
        if n_rows:
            first_row = np.cumsum(lengths) - lengths
            dest = first_row * self._widths[0] if indptr is None else indptr[first_row]
            reads = self.joined.plan_reads(
                files[is_filled], stored[is_filled], dest[is_filled], self.matrices[0].targets, self._widths
            )
        return Recipe(self.kind, n_rows, int(self._widths.max()), indptr, tuple(reads), map_start)

    def _in_values(
        self, files: NDArray[np.int64], rows: NDArray[np.int64]
    ) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return the row offsets of a resident with row ranges of files, and the range of values of each, (n, 2)."""
        first = np.flatnonzero(np.diff(files, prepend=-1))
        every, row_edges = expand_ranges(rows), np.append(0, np.cumsum(rows[:, 1] - rows[:, 0]))
        indptr, stored = np.zeros(every.size + 1, dtype=np.int64), np.empty_like(rows)
        for lo, hi in pairwise([*first.tolist(), files.size]):
            own: NDArray[np.int64] = self.matrices[files[lo]].indptr
            stored[lo:hi] = own[rows[lo:hi]]
            part = slice(row_edges[lo], row_edges[hi])
            indptr[1:][part] = own[every[part] + 1] - own[every[part]]
        return np.cumsum(indptr, out=indptr), stored

    def columns(self, chosen: NDArray[np.int32] | None = None) -> NDArray[np.int32] | None:
        """Return `Form.columns`: the output position of every stored column, or -1; None keeps all unchanged.

        Parameters
        ----------
        chosen : (n_vars,) int32, optional
            Output position of every gene, or -1; None takes all.
        """
        maps = None if self.alignment is None else self.alignment.maps
        if maps is None or chosen is None:
            return chosen if maps is None else maps
        return np.where(maps < 0, np.int32(-1), chosen[maps])

    def chunk_edges(self, every: int = 1) -> NDArray[np.int64]:
        """Return row edges snapped to storage chunks, over all files: increasing, from 0 to n_obs.

        Parameters
        ----------
        every
            Chunks between consecutive edges; there may be fewer at the end of a file.
        """
        edges, start = [np.zeros(1, dtype=np.int64)], 0
        for matrix in self.matrices:
            start += matrix.n_rows
            edges += [matrix.chunk_edges()[every::every] + start - matrix.n_rows, np.array([start], dtype=np.int64)]
        return np.unique(np.concatenate(edges))

    def describe(self) -> list[dict[str, Any]]:
        """Return the name (without folders) and sizes of each file, as JSON values."""
        return [
            {
                "name": os.path.basename(path),
                "n_obs": int(matrix.n_rows),
                "n_vars": int(matrix.n_vars),
                "nnz": int(matrix.indptr[-1]) if isinstance(matrix, CsrMatrix) else None,
            }
            for path, matrix in zip(self.paths, self.matrices, strict=True)
        ]

    def borrowed(self) -> Store:
        """Return the same cells as a store that closes no source: for a loader after which this one stays open."""
        return replace(self, sources=())

    def end_waits(self) -> None:
        """Make reads that are waiting for a network fail, so that closing the backend need not wait for them."""
        for source in self.sources:
            if source.ranges is not None:
                source.ranges.end()

    def close(self) -> None:
        """Close the files."""
        for source in self.sources:
            source.close()

    def sources_of(self, ranges: NDArray[np.int64]) -> list[Source]:
        """Return the sources of the files that hold given rows; `ranges` as for `recipe`."""
        first = np.searchsorted(self.file_start, ranges[:, 0], side="right") - 1
        stop = np.searchsorted(self.file_start, ranges[:, 1], side="left")
        files = np.unique(consecutive(first, stop - first)).tolist()
        return list(dict.fromkeys(source for number in files for source in self.file_sources[number]))
