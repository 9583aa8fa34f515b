"""The steps that decode a layout's chunks in device memory, worked out once from its filters; `decode` takes them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from gpuload.backends.cuda.containers import HEADER_NBYTES, read_cut
from gpuload.backends.decoding import codec_of

if TYPE_CHECKING:
    from gpuload.backends.cuda.containers import Cut
    from gpuload.layout import ArrayLayout

_ALGORITHMS = {
    "deflate": ("deflate", 2, 4),
    "gzip": ("gzip", 10, 8),
    "zstd": ("zstd", 0, 0),
    "lz4-sized": ("lz4", 4, 0),
    "lzf": ("lzf", 0, 0),
    "blosc": ("blosc", 0, 0),
    "lz4": ("lz4", 0, 0),
}
"""Filters that the device can undo: the decoder (nvCOMP's names; gzip is decoded as raw deflate, LZF and the framing of
containers by our own kernels), and the numbers of bytes that precede and follow the decoder's input."""

_CONTAINERS = ("blosc", "lz4")
"""Filters whose chunks hold several streams; `containers.read_cut` returns their layout."""

CHECKSUM_NBYTES = 4
"""Size of a fletcher32 or crc32c."""


@dataclass(frozen=True, slots=True)
class Steps:
    """The steps that decode a layout's chunks on the device.

    Attributes
    ----------
    codec
        The codec, as named in `_ALGORITHMS`, or None if the bytes are stored uncompressed.
    head, tail
        Bytes before and after the codec's input, not counting a fletcher32 or crc32c.
    is_shuffled, has_fletcher, has_crc32c
        Whether the bytes are shuffled; whether a fletcher32 follows the chunk, and after it a crc32c.
    """

    codec: str | None
    head: int
    tail: int
    is_shuffled: bool
    has_fletcher: bool
    has_crc32c: bool
    cut: Cut | None = None

    @property
    def around(self) -> int:
        """Bytes of a chunk outside the codec's input."""
        return self.head + self.tail + CHECKSUM_NBYTES * (self.has_fletcher + self.has_crc32c)

    @property
    def has_checksum(self) -> bool:
        """Whether there is a checksum to verify here; for zstd, whether there may be."""
        return self.has_fletcher or self.has_crc32c or self.codec in ("deflate", "gzip", "zstd")


def steps_of(layout: ArrayLayout) -> Steps | None:
    """Return how the device decodes a layout's chunks, or None if the host must."""
    found = codec_of(layout, _ALGORITHMS)
    if found is None:
        return None
    cut = _read_cut(layout, found) if found in _CONTAINERS else None
    if found in _CONTAINERS and cut is None:
        return None
    codec, head, tail = _ALGORITHMS[found] if found else (None, 0, 0)
    names = [f.name for f in layout.filters]
    return Steps(codec, head, tail, "shuffle" in names, "fletcher32" in names, "crc32c" in names, cut)


def chunk_nbytes(layout: ArrayLayout) -> int:
    """Return the size of a whole chunk, decoded."""
    return layout.chunk_size * layout.dtype.itemsize


def _read_cut(layout: ArrayLayout, kind: str) -> Cut | None:
    """Return the layout of an array's containers, from the header of one of its chunks.

    Up to three headers are tried, so that one damaged chunk does not send all the others to the host.
    """
    there = np.flatnonzero((layout.chunk_nbytes >= HEADER_NBYTES) & (layout.chunk_mask == 0))
    head = np.empty(HEADER_NBYTES, dtype=np.uint8)
    for chunk in there[[0, there.size // 2, -1]].tolist() if there.size else ():
        layout.source.read_into(head, int(layout.chunk_offset[chunk]))
        cut = read_cut(kind, head, chunk_nbytes(layout))
        if cut is not None:
            return cut
    return None
