"""Immutable values passed between stages. Pure data: no I/O, no device, no policy.

`Fetch` goes from the plan to the store, `Recipe` from the store to the backend, `Form` from the settings to the
backend, `Batch` from the loader to the consumer. A recipe is a struct of arrays, not a list of objects, so that one
native call can carry out thousands of reads and decodes without touching Python.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NoReturn, Protocol, TypeGuard

import numpy as np

from gpuload.errors import PlanError, listing, shown

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from contextlib import AbstractContextManager

    from numpy.typing import NDArray

    from gpuload.layout import ArrayLayout


@dataclass(frozen=True, slots=True)
class Transform:
    """What is done to a cell's values on their way into a minibatch: downsampling, then normalization.

    Normalization equals scanpy's ``normalize_total(target_sum=...)`` followed by ``log1p``: a cell's values are scaled
    so that their total over *all* stored genes (before any gene selection) is `target_sum`, then ``log(1 + x)`` is
    taken. A cell whose total is 0 is not scaled. Values are float32 in memory, unless the loader's dtype is float64:
    counts up to 2**24 are exact, values stored as float64 and larger integers are rounded, and what is below 1e-45 is
    0. From these, totals and results are computed in float64 and rounded once: float32 results are accurate to a unit
    in the last place.

    Parameters
    ----------
    target_sum
        Total per cell after scaling; None means no scaling.
    log1p
        Whether to take ``log(1 + x)`` of the values, scaled unless ``target_sum=None`` is given too.
    downsample
        Replaces each count, anew in every epoch, by how many of its molecules are left if the cell is sequenced less
        deeply (binomial thinning [2]_). Up to 1: the probability with which each is kept. Above 1: the mean of what a
        cell then has in total, over all stored genes; cells with less are left as they are. None keeps all.

        The draws follow from seed, epoch, matrix, and the numbers of cell and gene. So they are the same in any order,
        minibatch and process, on the CPU and on a GPU, and for a cell that occurs more than once in an epoch. In CSR,
        what becomes 0 remains stored. Values must be counts: whole numbers from 0 to 2**24.

    Raises
    ------
    PlanError
        `target_sum` or `downsample` is not a finite number above 0, or `log1p` not a boolean. Later, when a cell is
        read: `downsample` is given, and it holds values that are not counts.

    References
    ----------
    .. [1] Wolf, Angerer, Theis, "SCANPY: large-scale single-cell gene expression data analysis", Genome Biology 2018,
       doi:10.1186/s13059-017-1382-0 (``pp.normalize_total``, ``pp.log1p``).
    .. [2] Gerard, "Data-based RNA-seq simulations by binomial thinning", BMC Bioinformatics 2020,
       doi:10.1186/s12859-020-3450-9.
    """

    target_sum: float | None = 1e4
    log1p: bool = True
    downsample: float | None = None

    def __post_init__(self) -> None:
        for name, to_do_without in (("target_sum", "no scaling"), ("downsample", "all counts")):
            given = getattr(self, name)
            is_number = isinstance(given, (int, float, np.integer, np.floating)) and not isinstance(given, bool)
            if given is not None and not (is_number and 0 < given < float("inf")):
                raise PlanError(
                    f"Transform({name}={given!r}): expected a finite number above 0, or None for {to_do_without}."
                )
        if not isinstance(self.log1p, (bool, np.bool_)):
            raise PlanError(f"Transform(log1p={self.log1p!r}): expected True or False.")


ITEMSIZES = {"float32": 4, "float16": 2, "bfloat16": 2, "float64": 8}
"""The dtypes of minibatches, and the bytes of an element."""


def resident_dtype(dtype: str) -> str:
    """Return the dtype of the residents' values, from which minibatches of a dtype are made."""
    return "float64" if dtype == "float64" else "float32"


@dataclass(frozen=True, slots=True)
class Form:
    """The form in which rows are delivered: columns, arithmetic and container.

    Attributes
    ----------
    output
        ``"dense"`` or ``"csr"``.
    dtype
        ``"float32"`` or ``"float64"``; or, dense only, ``"float16"`` or ``"bfloat16"`` (as uint16 bit patterns).
    columns : (n_vars,) int32, optional
        Output position of each stored column, or -1 to drop it; if files differ in their columns, the concatenated
        maps of all files (see `Recipe.map_start`). None keeps all.
    """

    output: str
    dtype: str
    n_cols: int
    columns: NDArray[np.int32] | None = None
    transform: Transform | None = None

    @property
    def itemsize(self) -> int:
        """Bytes of a value."""
        return ITEMSIZES[self.dtype]

    @property
    def arithmetic(self) -> tuple[float, bool]:
        """The arguments of kernels for the transform: its target sum (0 = none), and log1p."""
        if self.transform is None:
            return 0.0, False
        return float(self.transform.target_sum or 0.0), bool(self.transform.log1p)


@dataclass(frozen=True, slots=True, eq=False)
class Fetch:
    """Rows resident at one time, and the order in which they are delivered.

    Attributes
    ----------
    ranges : (n_ranges, 2) int64
        Half-open global row ranges in ascending order; disjoint and not adjacent. The resident holds their rows in
        this order.
    positions : (n_rows,) int32
        Row numbers within the resident, in delivery order; each at least once.
    """

    ranges: NDArray[np.int64]
    positions: NDArray[np.int32]

    @property
    def n_rows(self) -> int:
        """Number of rows delivered; exceeds the number of resident rows if some are drawn more than once."""
        return int(self.positions.size)

    def rows(self) -> NDArray[np.int64]:
        """Return the global row numbers of the resident rows, ascending."""
        return expand_ranges(self.ranges)


@dataclass(frozen=True, slots=True, eq=False)
class ArrayRead:
    """The reads and decodes of one stored array, as a struct of arrays.

    An extent is one contiguous byte range of the source, read in one call. It holds one or more stored chunks in
    offset order; a chunk holds one or more wanted pieces in order of position. Every chunk occurs once. Elements are
    items of the array's dtype.

    Attributes
    ----------
    target
        The resident's array to fill: ``"data"``, ``"indices"`` or ``"X"``.
    extent_offset, extent_nbytes : (n_extents,) int64
        Byte ranges of the source.
    extent_chunks : (n_extents + 1,) int64
        Chunks of extent e are ``extent_chunks[e]:extent_chunks[e + 1]``.
    chunk_id, chunk_offset, chunk_nbytes : (n_chunks,) int64
        The chunk's number in the layout, its first byte in the source, and its stored size; size 0 means an absent
        chunk, which decodes to the fill value.
    chunk_mask : (n_chunks,) uint32
        HDF5 filter mask: a set bit k means that filter k was skipped for this chunk.
    chunk_limit : (n_chunks,) int64
        Exclusive upper bound on the column numbers in this chunk; -1 if its elements are values.
    chunk_pieces : (n_chunks + 1,) int64
        Pieces of chunk c are ``chunk_pieces[c]:chunk_pieces[c + 1]``.
    piece_src, piece_dest, piece_width, piece_rows : (n_pieces,) int64
        A piece is `piece_rows` runs of `piece_width` elements: the first at `piece_src` in the decoded chunk and
        `piece_dest` in the resident's array, each next one `layout.src_stride` and `layout.dest_stride` elements
        further on.
    """

    layout: ArrayLayout
    target: str
    extent_offset: NDArray[np.int64]
    extent_nbytes: NDArray[np.int64]
    extent_chunks: NDArray[np.int64]
    chunk_id: NDArray[np.int64]
    chunk_offset: NDArray[np.int64]
    chunk_nbytes: NDArray[np.int64]
    chunk_mask: NDArray[np.uint32]
    chunk_limit: NDArray[np.int64]
    chunk_pieces: NDArray[np.int64]
    piece_src: NDArray[np.int64]
    piece_dest: NDArray[np.int64]
    piece_width: NDArray[np.int64]
    piece_rows: NDArray[np.int64]

    @property
    def nbytes(self) -> int:
        """Number of bytes to read from the source."""
        return int(self.extent_nbytes.sum())

    def parts(self, nbytes: int) -> list[tuple[int, int]]:
        """Split the extents into parts of about `nbytes` decoded bytes; return each as half-open ``(start, stop)``."""
        work = self.extent_nbytes
        if not self.layout.is_raw:
            decoded = np.append(0, np.cumsum(self.layout.decoded_nbytes(self.chunk_id)))
            work = np.diff(decoded[self.extent_chunks])
        number = (np.cumsum(work) - 1).clip(0) // nbytes
        edges = (np.flatnonzero(np.diff(number)) + 1).tolist()
        return [(lo, hi) for lo, hi in zip([0, *edges], [*edges, work.size], strict=True) if lo < hi]


@dataclass(frozen=True, slots=True, eq=False)
class Downsampling:
    """How the counts of a resident are drawn; see `Transform`.

    Attributes
    ----------
    amount
        Up to 1, the probability with which each count is kept; above, the mean total of a cell that has more.
    key
        Random, below 2**64; the same for all draws of a matrix in an epoch.
    rows : (n_rows,) int64
        Global row numbers of the resident's rows.
    """

    amount: float
    key: int
    rows: NDArray[np.int64]


@dataclass(frozen=True, slots=True, eq=False)
class Recipe:
    """Everything needed to make one fetch resident. Pure data.

    Attributes
    ----------
    kind
        ``"csr"`` or ``"dense"``.
    n_rows, n_vars
        Shape of the resident; if files differ in their columns, `n_vars` is the largest number.
    indptr : (n_rows + 1,) int64, optional
        Row offsets of the resident, for CSR and for dense rows of unequal widths.
    reads
        The arrays to read; with several files, several per target.
    map_start : (n_rows,) int64, optional
        Where each resident row's column map begins in `Form.columns`; None: at its start.
    downsampling
        How its counts are drawn once they have been decoded; None: they are kept as they are.
    """

    kind: str
    n_rows: int
    n_vars: int
    indptr: NDArray[np.int64] | None
    reads: tuple[ArrayRead, ...]
    map_start: NDArray[np.int64] | None = None
    downsampling: Downsampling | None = None

    @property
    def nnz(self) -> int:
        """Number of stored values of the resident; for dense data, all its elements."""
        return self.n_rows * self.n_vars if self.indptr is None else int(self.indptr[-1])

    def row_offsets(self) -> NDArray[np.int64]:
        """Return `indptr`, computed for dense rows of equal width."""
        return np.arange(self.n_rows + 1, dtype=np.int64) * self.n_vars if self.indptr is None else self.indptr


@dataclass(frozen=True, slots=True, eq=False)
class Batch:
    """One minibatch.

    Attributes
    ----------
    X : (n, n_vars) array or CSR matrix
        Values, on the loader's device; owned by the consumer, who may keep or modify it. If each cell has an array of
        more dimensions: (n, ...).
    obs
        The chosen columns of obs, each of shape (n,): int64 codes for categorical and string columns (-1 = missing),
        values otherwise.
    rows : (n,) int64
        Global row numbers, counted over the given paths in order.
    layers
        The additional layers requested, by name, as X.
    obsm
        The obsm matrices requested, by name: (n, k) or (n, ...) arrays; float32, or float64 if X is.
    modalities
        The additional modalities requested, by name, as X.
    n_partners
        Partners of each cell, for `gpuload.split_pairs`; 0 unless the sampler makes pairs.
    """

    X: Any
    obs: Mapping[str, Any]
    rows: NDArray[np.int64]
    layers: Mapping[str, Any] = field(default_factory=dict)
    obsm: Mapping[str, Any] = field(default_factory=dict)
    modalities: Mapping[str, Any] = field(default_factory=dict)
    n_partners: int = 0

    def __repr__(self) -> str:
        matrices = ", ".join(f"{name} {_shape_and_type(matrix)}" for name, matrix in self.matrices().items())
        obs = f"; obs {listing(list(self.obs), 10)}" if self.obs else ""
        partners = f"; n_partners={self.n_partners}" if self.n_partners else ""
        n = len(self)
        return f"<Batch of {n:,} cell{'s' * (n != 1)}: {matrices}; {_device_of(self.X)}{obs}{partners}>"

    def __len__(self) -> int:
        return int(self.rows.size)

    def __getitem__(self, name: object) -> NoReturn:
        """Raise PlanError: the parts of a minibatch are attributes."""
        raise PlanError(
            f"batch[{shown(name)}]: a minibatch has attributes: batch.X, batch.obs['column'], batch.rows; to get dicts "
            "of tensors, iterate over gpuload.torch.CellDataset(loader)."
        )

    def matrices(self) -> dict[str, Any]:
        """Return ``"X"`` and all other matrices, named as in `Loader.tables`: ``"layers/<name>"`` and so on."""
        found = {"X": self.X}
        for group, matrices in (("layers", self.layers), ("obsm", self.obsm), ("modalities", self.modalities)):
            if matrices:
                found |= {f"{group}/{name}": matrix for name, matrix in matrices.items()}
        return found


def _shape_and_type(matrix: Any) -> str:
    """Return the shape, dtype and container of an array or CSR matrix, for a person to read."""
    csr = " csr" if hasattr(matrix, "indptr") else ""
    return f"{tuple(matrix.shape)} {matrix.dtype}{csr}" if hasattr(matrix, "shape") else type(matrix).__name__


def _device_of(matrix: Any) -> str:
    """Return the name of the device that holds an array or CSR matrix; one without a device is in host memory."""
    device = getattr(getattr(matrix, "indptr", matrix), "device", "cpu")
    return f"cuda:{device.id}" if hasattr(device, "id") else str(device)


class Column(Protocol):
    """One column of obs: int32 codes if `categories` is given (-1 = missing), else numbers or booleans."""

    @property
    def values(self) -> NDArray[Any]:
        """Codes or values, shape (n_obs,)."""

    @property
    def categories(self) -> NDArray[np.object_] | None:
        """The categories that the codes index, or None."""

    @property
    def is_ordered(self) -> bool:
        """Whether the categories are ordered, from the least to the greatest."""


def kind_of(categories: NDArray[Any]) -> str:
    """Return the kind of categories: ``"booleans"``, ``"numbers"``, ``"text"``; ``"categories"`` if mixed or empty."""
    types = set(map(type, categories))
    for kind, of_kind in (("booleans", (bool, np.bool_)), ("numbers", (int, float, np.number)), ("text", str)):
        if types and all(issubclass(one, of_kind) for one in types):
            return kind
    return "categories"


class Source(Protocol):
    """A source of bytes: a file, an object or a buffer in memory."""

    @property
    def name(self) -> str:
        """Name used in error messages: a path or an address."""

    @property
    def nbytes(self) -> int:
        """Size in bytes."""

    @property
    def memory(self) -> NDArray[np.uint8] | None:
        """The bytes themselves, read-only, if they are in host memory; else None."""

    @property
    def ranges(self) -> RangeReader | None:
        """Reader of many ranges at once, if each read takes long (over a network); else None."""

    def where_is(self, offset: int) -> tuple[str, int]:
        """Return the file at an offset, named for error messages, and the position in it."""

    def read_into(self, buffer: NDArray[np.uint8], offset: int) -> int:
        """Fill `buffer` starting at byte `offset`; return the bytes read, fewer only at the end or on a fault."""

    def check_unchanged(self) -> None:
        """Raise ReadError if the source has changed since it was opened."""

    def close(self) -> None:
        """Release open resources; later reads are errors."""


class Files(Source, Protocol):
    """A source whose bytes are in files with descriptors."""

    def locate(self, offset: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
        """Return each offset's file number, its position in that file, and the file's size.

        A source of one file returns number 0 for all. No byte range that is read spans two files.
        """

    def hold(self, numbers: Sequence[int]) -> AbstractContextManager[list[int]]:
        """Keep files open for positional reads and yield their descriptors; a few dozen at a time."""


def in_files(source: Source) -> TypeGuard[Files]:
    """Return whether the bytes of a source are in files with descriptors; if not, use `Source.read_into`."""
    return hasattr(source, "hold")


class RangeReader(Protocol):
    """Reads many ranges of a slow source concurrently.

    Attributes
    ----------
    max_gap, max_extent
        Suitable coalescing limits, in bytes; see `layout.plan_read`.
    """

    max_gap: int
    max_extent: int

    def forget(self, offset: int, nbytes: int) -> None:
        """Drop any copy of bytes found to be damaged, so that they are read again."""

    def end(self) -> None:
        """Make reads in progress fail soon and later ones at once; callable from any thread."""

    def read_many(
        self, offset: NDArray[np.int64], nbytes: NDArray[np.int64], place: NDArray[np.int64], buffer: NDArray[np.uint8]
    ) -> None:
        """Read byte ranges in full; raise ReadError if one cannot be read.

        Parameters
        ----------
        offset, nbytes, place : (n,) int64
            First byte in the source, length, and position in the buffer of each range; none spans two files.
        """


def n_rows_in(ranges: NDArray[np.int64]) -> int:
    """Return the number of rows in ranges of rows, shape (n, 2)."""
    return int((ranges[:, 1] - ranges[:, 0]).sum())


def expand_ranges(ranges: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the integers in half-open ranges, shape (n, 2), concatenated."""
    return consecutive(ranges[:, 0], ranges[:, 1] - ranges[:, 0])


def consecutive(first: NDArray[np.int64], n: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the runs of ``n[i]`` consecutive integers from ``first[i]``, concatenated; both are (n_ranges,)."""
    ends = np.cumsum(n)
    return np.repeat(first - (ends - n), n) + np.arange(ends[-1] if ends.size else 0, dtype=np.int64)
