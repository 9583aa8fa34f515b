"""Frozen values that cross a stage boundary. Pure data: no I/O, no device, no policy.

`Fetch` goes from the plan to the store, `Recipe` from the store to the backend, `Form` from the settings to the
backend, `Batch` from the loader to the consumer. A recipe is struct-of-arrays, not a list of objects, so that one
native call can carry out thousands of reads and decodes without touching Python.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from gpuload.errors import PlanError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from contextlib import AbstractContextManager

    from numpy.typing import NDArray

    from gpuload.layout import ArrayLayout


@dataclass(frozen=True, slots=True)
class Transform:
    """What is done to a cell's values on their way into a minibatch; fused into the gather.

    Equals scanpy's ``normalize_total(target_sum=...)`` followed by ``log1p``: the values of a cell are scaled so that
    their total over *all* stored genes is `target_sum` (before any selection of genes), then ``log(1 + x)`` is taken.
    A cell whose total is 0 is left as it is. Totals and values are computed in float64 and rounded once: what is handed
    over as float32 is right to a unit in the last place.

    Parameters
    ----------
    target_sum
        Total per cell after scaling; None means no scaling.
    log1p
        Whether to take ``log(1 + x)`` of the (scaled) values.

    Raises
    ------
    PlanError
        `target_sum` is not a finite number above 0.

    References
    ----------
    .. [1] Wolf, Angerer, Theis, "SCANPY: large-scale single-cell gene expression data analysis", Genome Biology 2018,
       doi:10.1186/s13059-017-1382-0 (``pp.normalize_total``, ``pp.log1p``).
    """

    target_sum: float | None = 1e4
    log1p: bool = True

    def __post_init__(self) -> None:
        is_number = isinstance(self.target_sum, (int, float, np.integer, np.floating))
        if self.target_sum is not None and not (is_number and 0 < self.target_sum < float("inf")):
            raise PlanError(
                f"Transform(target_sum={self.target_sum!r}): expected a finite number above 0, or None for no scaling."
            )


@dataclass(frozen=True, slots=True)
class Form:
    """The form in which rows are handed over: which columns, what arithmetic, which container.

    Attributes
    ----------
    output
        ``"dense"`` or ``"csr"``.
    dtype
        ``"float32"``; or, dense only, ``"float16"`` or ``"bfloat16"`` (bits, as uint16).
    n_cols
        Width of what is handed over.
    columns : (n_vars,) int32, optional
        For every stored column its place in the output, or -1 where it is not wanted; where files have other columns,
        the maps of all files one after the other (`Recipe.map_start`). None keeps all.
    transform
        Arithmetic on the values, or None.
    """

    output: str
    dtype: str
    n_cols: int
    columns: NDArray[np.int32] | None = None
    transform: Transform | None = None


@dataclass(frozen=True, slots=True, eq=False)
class Fetch:
    """Rows that are resident at one time, and the order in which they are handed over.

    Attributes
    ----------
    ranges : (n_ranges, 2) int64
        Half-open global row ranges in ascending order; disjoint and not adjacent. The resident holds their rows in
        this order.
    positions : (n_rows,) int32
        Row numbers within the resident, in the order of hand-over; each at least once.
    """

    ranges: NDArray[np.int64]
    positions: NDArray[np.int32]

    @property
    def n_rows(self) -> int:
        """Number of rows handed over; above the number of resident rows where some are drawn more than once."""
        return int(self.positions.size)

    def rows(self) -> NDArray[np.int64]:
        """Return the global row number of every resident row, ascending."""
        return expand_ranges(self.ranges)


@dataclass(frozen=True, slots=True, eq=False)
class ArrayRead:
    """What must be read and decoded of one stored array, in struct-of-arrays form.

    An extent is one contiguous byte range of the source, read by one call; it holds one or more stored chunks, in the
    order of their offsets; a chunk holds one or more pieces that are wanted, in the order of their place in the chunk.
    Every chunk occurs once. Elements are counted in items of the array's dtype.

    Attributes
    ----------
    layout
        Where the array lies and how its chunks are encoded.
    target
        Which array of the resident is filled: ``"data"``, ``"indices"`` or ``"X"``.
    limit
        Column numbers must be below it; -1 where the elements are values.
    extent_offset, extent_nbytes : (n_extents,) int64
        Byte ranges of the source.
    extent_chunks : (n_extents + 1,) int64
        Chunks of extent e are ``extent_chunks[e]:extent_chunks[e + 1]``.
    chunk_id, chunk_offset, chunk_nbytes : (n_chunks,) int64
        Number of the chunk in the layout, its first byte in the source, its stored size; size 0 is an absent chunk,
        which decodes to the fill value.
    chunk_mask : (n_chunks,) uint32
        HDF5's filter mask: bit k set means that filter k was skipped for this chunk.
    chunk_pieces : (n_chunks + 1,) int64
        Pieces of chunk c are ``chunk_pieces[c]:chunk_pieces[c + 1]``.
    piece_src, piece_dest, piece_width, piece_rows : (n_pieces,) int64
        A piece is `piece_rows` runs of `piece_width` elements: the first at `piece_src` in the decoded chunk and
        `piece_dest` in the resident's array, the following `layout.src_stride` and `layout.dest_stride` elements
        further on.
    """

    layout: ArrayLayout
    target: str
    limit: int
    extent_offset: NDArray[np.int64]
    extent_nbytes: NDArray[np.int64]
    extent_chunks: NDArray[np.int64]
    chunk_id: NDArray[np.int64]
    chunk_offset: NDArray[np.int64]
    chunk_nbytes: NDArray[np.int64]
    chunk_mask: NDArray[np.uint32]
    chunk_pieces: NDArray[np.int64]
    piece_src: NDArray[np.int64]
    piece_dest: NDArray[np.int64]
    piece_width: NDArray[np.int64]
    piece_rows: NDArray[np.int64]

    @property
    def nbytes(self) -> int:
        """Bytes to read from the source."""
        return int(self.extent_nbytes.sum())

    def parts(self, nbytes: int) -> list[tuple[int, int]]:
        """Return the extents of each part of about `nbytes` decoded bytes, to be worked on together: (first, last)."""
        work = self.extent_nbytes
        if not self.layout.is_raw:
            decoded = np.append(0, np.cumsum(self.layout.decoded_nbytes(self.chunk_id)))
            work = np.diff(decoded[self.extent_chunks])
        number = (np.cumsum(work) - 1).clip(0) // nbytes
        edges = (np.flatnonzero(np.diff(number)) + 1).tolist()
        return [(lo, hi) for lo, hi in zip([0, *edges], [*edges, work.size], strict=True) if lo < hi]


@dataclass(frozen=True, slots=True, eq=False)
class Recipe:
    """All that must be done to make one fetch resident. Pure data.

    Attributes
    ----------
    kind
        ``"csr"`` or ``"dense"``.
    n_rows, n_vars
        Shape of the resident; of files with other columns, the most that one has.
    indptr : (n_rows + 1,) int64, optional
        Row offsets of the resident, for CSR, and for dense rows of unequal widths.
    reads
        The arrays to read; for several files, several per target.
    map_start : (n_rows,) int64, optional
        Where the map of each resident row begins in `Form.columns`; None: at its start.
    """

    kind: str
    n_rows: int
    n_vars: int
    indptr: NDArray[np.int64] | None
    reads: tuple[ArrayRead, ...]
    map_start: NDArray[np.int64] | None = None

    @property
    def nnz(self) -> int:
        """Stored values of the resident; for dense data all its elements."""
        return self.n_rows * self.n_vars if self.indptr is None else int(self.indptr[-1])

    def row_offsets(self) -> NDArray[np.int64]:
        """Return `indptr`, also of dense rows of one width."""
        return np.arange(self.n_rows + 1, dtype=np.int64) * self.n_vars if self.indptr is None else self.indptr


@dataclass(frozen=True, slots=True, eq=False)
class Batch:
    """One minibatch.

    Attributes
    ----------
    X : (n, n_vars) array or CSR matrix
        Values, on the loader's device; owned by the consumer, who may keep it or write into it.
    obs
        The chosen columns of obs, each of shape (n,): int32 codes for categorical and string columns (-1 = missing),
        values otherwise.
    rows : (n,) int64
        Global row numbers, in the order of the paths given.
    layers
        The further layers asked for, by name, as X.
    obsm
        The matrices of obsm asked for, by name: (n, k) float32 arrays.
    modalities
        The further modalities asked for, by name, as X.
    """

    X: Any
    obs: Mapping[str, Any]
    rows: NDArray[np.int64]
    layers: Mapping[str, Any] = field(default_factory=dict)
    obsm: Mapping[str, Any] = field(default_factory=dict)
    modalities: Mapping[str, Any] = field(default_factory=dict)

    def __len__(self) -> int:
        return int(self.rows.size)

    def matrices(self) -> dict[str, Any]:
        """Return ``"X"`` and all further matrices, named as in `Loader.tables`: ``"layers/<name>"`` and so on."""
        found = {"X": self.X}
        for group in ("layers", "obsm", "modalities"):
            found |= {f"{group}/{name}": matrix for name, matrix in getattr(self, group).items()}
        return found


class Column(Protocol):
    """One column of obs: int32 codes where `categories` is given (-1 = missing), else numbers or booleans."""

    @property
    def values(self) -> NDArray[Any]:
        """Shape (n_obs,)."""

    @property
    def categories(self) -> NDArray[np.object_] | None:
        """What the codes stand for."""


class Source(Protocol):
    """Where bytes lie: a file, an object, a buffer in memory."""

    @property
    def name(self) -> str:
        """What errors call it: a path or an address."""

    @property
    def nbytes(self) -> int:
        """Its size."""

    @property
    def memory(self) -> NDArray[np.uint8] | None:
        """The bytes themselves, to be read only, where they lie in host memory; else None."""

    @property
    def has_files(self) -> bool:
        """Whether the bytes lie in files that have descriptors; else `read_into` must be used."""

    @property
    def ranges(self) -> RangeReader | None:
        """Who reads many ranges at a time, where each takes long (over a network); else None."""

    def locate(self, offset: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
        """Return, for each offset, the number of the file it is in, the byte in that file, and the file's size.

        A source of one file has number 0 for all. No range of bytes that is read lies in two files.
        """

    def where_is(self, offset: int) -> tuple[str, int]:
        """Return what errors call the file at an offset, and the byte in it."""

    def hold(self, numbers: Sequence[int]) -> AbstractContextManager[list[int]]:
        """Keep files open for positional reads, and give their descriptors; a few dozen at a time."""

    def read_into(self, buffer: NDArray[np.uint8], offset: int) -> int:
        """Fill `buffer` from byte `offset` on; return the bytes got, fewer only at the end or on a fault."""

    def check_unchanged(self) -> None:
        """Raise ReadError where the bytes are no longer those that were opened."""

    def close(self) -> None:
        """Give back what is held open; later reads are errors."""


class RangeReader(Protocol):
    """Reads many ranges of a source at a time, each of which takes long.

    Attributes
    ----------
    max_gap, max_extent
        Limits of coalescing that suit it, in bytes; see `layout.plan_read`.
    """

    max_gap: int
    max_extent: int

    def forget(self, offset: int, nbytes: int) -> None:
        """Keep no copy of bytes that have turned out to be damaged, so that they are read anew."""

    def end(self) -> None:
        """Let reads that are under way fail soon, and later ones at once; from any thread."""

    def read_many(
        self,
        offset: NDArray[np.int64],
        nbytes: NDArray[np.int64],
        place: NDArray[np.int64],
        buffer: NDArray[np.uint8],
    ) -> None:
        """Read byte ranges whole.

        Parameters
        ----------
        offset, nbytes, place : (n,) int64
            First byte in the source, length, and place in the buffer, of each range; none lies in two files.
        buffer : (m,) uint8
            Where the bytes go.

        Raises
        ------
        ReadError
            One of them cannot be had.
        """


def expand_ranges(ranges: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the integers of half-open ranges, shape (n, 2), one range after the other."""
    lengths = ranges[:, 1] - ranges[:, 0]
    ends = np.cumsum(lengths)
    shift = ranges[:, 0] - (ends - lengths)
    return np.repeat(shift, lengths) + np.arange(ends[-1] if ends.size else 0, dtype=np.int64)
