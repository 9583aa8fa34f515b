"""Decode stored chunks on the host into a resident: natively if the kernels support their filters, else by libraries.

Each thread decodes into its own scratch chunk, from which only the wanted rows are copied.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from gpuload.backends import codecs
from gpuload.backends.damage import bad_chunk, corrupt
from gpuload.backends.memory_cache import NOTHING
from gpuload.backends.native import chunks, decoders, keeping, pieces

if TYPE_CHECKING:
    from collections.abc import Collection

    from numpy.typing import NDArray

    from gpuload.backends.memory_cache import Keeping
    from gpuload.backends.workspace import Workspace
    from gpuload.layout import ArrayLayout
    from gpuload.types import ArrayRead

TWO_AHEAD_NBYTES = 4 << 20
"""Chunks up to this size are decoded in pairs if that is faster; larger ones would take too much scratch memory."""

_NO_TABLES = np.empty(0, dtype=np.uint8)  # where nothing is inflated: the inflater is compiled to make its tables

_OTHERS = (("shuffle", 0), ("fletcher32", 2), ("crc32c", 3))
"""The filters that are no codecs, with their places in a simple pipeline."""

VERIFY = {"never": chunks.NEVER, "once": chunks.ONCE, "always": chunks.ALWAYS}


@dataclass(frozen=True, slots=True, eq=False)
class Part:
    """Chunks of an array's read, with their stored bytes in memory.

    Attributes
    ----------
    first, last
        Half-open range of its chunks.
    shift : (last - first,) int64
        Each chunk's place in the buffer minus its place in the source.
    """

    read: ArrayRead
    first: int
    last: int
    buffer: NDArray[np.uint8]
    shift: NDArray[np.int64]


def decode(
    part: Part, out: NDArray[Any], scratch: Workspace, verify: str, keep: Keeping = NOTHING
) -> tuple[int, int, bool]:
    """Decode chunks, copy their wanted pieces into a flat array, and keep some chunks; `verify` is a key of `VERIFY`.

    Returns
    -------
    tuple
        Decoded bytes; number of chunks decoded only in part; whether an integer was rounded.

    Raises
    ------
    CorruptDataError, StoreError
        A chunk cannot be decoded, or its checksum does not match.
    """
    steps = _native_steps(part.read.layout)
    if steps is None:
        return _by_library(part, out, keep)
    return _natively(part, out, *steps, scratch, VERIFY[verify], keep)


def _natively(
    part: Part, out: NDArray[Any], steps: list[int], codec: str, scratch: Workspace, verify: int, keep: Keeping
) -> tuple[int, int, bool]:
    read, first, last = part.read, part.first, part.last
    layout, chosen = read.layout, slice(first, last)
    stored_dtype = _of_numbers(layout.dtype)
    full = layout.decoded_nbytes(read.chunk_id[chosen])
    room = round_up(max(int(full.max()), int(read.chunk_nbytes[chosen].max()) if layout.is_raw else 0), 8)
    offset, nbytes = read.chunk_offset[chosen] + part.shift, read.chunk_nbytes[chosen]
    about = (offset, nbytes, read.chunk_id[chosen], read.chunk_mask[chosen], full, read.chunk_limit[chosen])
    decoder = decoders.addresses_of(codec, may_pair=room <= TWO_AHEAD_NBYTES)
    copiers = pieces.addresses_of(stored_dtype, out.dtype, may_fill=not nbytes.all())
    others = (decoders.address_of(name) if steps[k] >= 0 else 0 for name, k in _OTHERS)
    keeper = keeping.address_of(stored_dtype, out.dtype) if keep.slab else 0
    sizes = layout.src_stride, layout.dest_stride, stored_dtype.itemsize
    has_two_steps = steps[0] >= 0 or codec in ("blosc", "bitshuffle")  # a shuffle after the codec, or within it
    status = np.zeros(3, dtype=np.int64)
    n = chunks.decode_chunks(
        part.buffer,
        np.array(about, dtype=np.int64),
        read.chunk_pieces[first : last + 1],
        (read.piece_src, read.piece_dest, read.piece_width, read.piece_rows),
        (*steps, *sizes, layout.is_raw, verify, float(layout.fill_value)),
        (*decoder, *copiers, *others, keeper),
        (
            scratch.memory("first", 2 * room if decoder[1] else room),
            scratch.memory("second", room if has_two_steps else 0),
            _about_codec(layout, steps[1], codec, scratch),
        ),
        scratch.addresses.table,
        layout.verified,
        (keep.is_wanted, keep.kept, keep.room),
        out.ctypes.data,
        status,
    )
    if n < 0:
        raise bad_chunk(read, first - 1 - n, int(status[0]))
    return int(status[0]), int(status[1]), bool(status[2])


def _about_codec(layout: ArrayLayout, step: int, codec: str, scratch: Workspace) -> NDArray[np.uint8]:
    """Return what the codec's decoder takes beside a chunk: the inflater's workspace, or what a bit shuffle was."""
    if codec == "bitshuffle":
        about = codecs.BitShuffle.of(layout.filters[step].values, layout.dtype.itemsize)
        return np.array(about, dtype=np.int64).view(np.uint8)
    return scratch.tables if codec in decoders.INFLATING else _NO_TABLES


def _by_library(part: Part, out: NDArray[Any], keep: Keeping) -> tuple[int, int, bool]:
    read, first, last = part.read, part.first, part.last
    layout = read.layout
    full = layout.decoded_nbytes(read.chunk_id[first:last])
    strides = layout.src_stride, layout.dest_stride
    where = (read.piece_src, read.piece_dest, read.piece_width, read.piece_rows)
    is_rounded, itemsize = False, layout.dtype.itemsize
    ranges, before = None, int(read.chunk_pieces[first])
    if len(layout.shape) == 1 and any(step.name in codecs.IN_PART for step in layout.filters):
        own = slice(before, int(read.chunk_pieces[last]))
        ranges = itemsize * np.stack([read.piece_src[own], read.piece_src[own] + read.piece_width[own]], axis=1)
    for c in range(first, last):
        lo, hi = int(read.chunk_pieces[c]), int(read.chunk_pieces[c + 1])
        is_kept = keep.slab is not None and bool(keep.is_wanted[c - first])
        stored, limit = int(read.chunk_nbytes[c]), int(read.chunk_limit[c])
        if stored == 0:
            about = float(layout.fill_value), pieces.is_long_whole(layout.dtype, out.dtype)
            code = pieces.fill_pieces(lo, hi, *where[1:], layout.dest_stride, *about, limit, out)
        else:
            place = int(read.chunk_offset[c] + part.shift[c - first])
            try:
                plain = codecs.decode(
                    layout.filters,
                    int(read.chunk_mask[c]),
                    part.buffer[place : place + stored],
                    stored if layout.is_raw else int(full[c - first]),
                    itemsize,
                    None if ranges is None or is_kept else ranges[lo - before : hi - before],
                )
            except codecs.DecodeError as error:
                raise corrupt(read, c, str(error)) from error
            typed = _typed(plain, layout.dtype)
            code = pieces.copy_pieces(typed, lo, hi, *where, *strides, limit, out)
            if is_kept and code >= 0:
                are_columns, is_wide = read.target == "indices", out.dtype == np.float64
                keeping.keep_array(typed, are_columns, is_wide, keep.kept, c - first, keep.room)
        if code < 0:
            raise bad_chunk(read, c, code)
        is_rounded |= code > 0
    return int(full.sum()), 0, is_rounded


def codec_of(layout: ArrayLayout, known: Collection[str]) -> str | None:
    """Return the codec of a simple pipeline: byte shuffle, one of the known codecs, fletcher32, crc32c, in this order.

    Return "" if it has no codec, None if it is not simple.
    """
    names = [f.name for f in layout.filters]
    kinds = [name for name in names if name in known]
    order = ("shuffle", *kinds, "fletcher32", "crc32c")
    if len(kinds) > 1 or names != [name for name in order if name in names]:
        return None
    if any(f.name == "shuffle" and f.values not in ((), (layout.dtype.itemsize,)) for f in layout.filters):
        return None
    return kinds[0] if kinds else ""


def _native_steps(layout: ArrayLayout) -> tuple[list[int], str] | None:
    """Return the pipeline positions of shuffle, codec, fletcher32 and crc32c, and the codec's name ("" for none).

    Return None if libraries must decode.
    """
    codec = codec_of(layout, decoders.CODECS)
    if codec is None or not layout.dtype.isnative or _is_half(layout.dtype):
        return None
    if codec in codecs.BY_ADDRESS and not codecs.has_addresses():
        return None
    names = [f.name for f in layout.filters]
    if codec == "bitshuffle":
        values = layout.filters[names.index(codec)].values
        if not codecs.BitShuffle.of(values, layout.dtype.itemsize).is_native:
            return None
    return [names.index(n) if n in names else -1 for n in ("shuffle", codec, "fletcher32", "crc32c")], codec


def _of_numbers(dtype: np.dtype[Any]) -> np.dtype[Any]:
    """Return the dtype that the kernels take for a stored one: that of the bytes for booleans."""
    return np.dtype(np.uint8) if dtype.kind == "b" else dtype


def _is_half(dtype: np.dtype[Any]) -> bool:
    return dtype.kind == "f" and dtype.itemsize == 2


def _typed(plain: NDArray[np.uint8], dtype: np.dtype[Any]) -> NDArray[Any]:
    """Return decoded bytes as a dtype that the kernels support: native order, float16 widened, booleans as bytes."""
    stored = _of_numbers(dtype)
    return np.require(plain.view(stored), np.float32 if _is_half(dtype) else stored.newbyteorder("="), ["A", "W"])


def round_up(n: int, multiple: int) -> int:
    """Return the smallest multiple of `multiple` that is at least n."""
    return -(-n // multiple) * multiple
