"""Text in TileDB arrays: strings from bytes and offsets, or from filters that work on whole strings.

References
----------
.. [1] TileDB, Inc., TileDB format specification, format version 23: "Dictionary encoding filter", "RLE filter".
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from gpuload.backends import tiledb
from gpuload.backends.codecs import DecodeError
from gpuload.backends.native.tiledb_filters import RLE
from gpuload.errors import CorruptDataError
from gpuload.formats.tiledb_schema import strings
from gpuload.formats.tiledb_tiles import Bytes, damaged

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from gpuload.formats.tiledb_fragments import Fragment
    from gpuload.formats.tiledb_schema import Field
    from gpuload.formats.tiledb_tiles import Filters

_WIDTHS = (1, 2, 4, 8)
"""Bytes of the integers that filters of text write."""


def texts(fragment: Fragment, own: Field, read: Sequence[NDArray[Any]]) -> NDArray[np.object_]:
    """Return the strings of a column of a fragment; raise CorruptDataError if they are damaged.

    Parameters
    ----------
    read
        The stored bytes of its text if its first filter works on strings; else its text and offsets, decoded.
    """
    edges, sizes = fragment.text_tiles(own)
    out, where = [], f"{fragment.where}/{own.file}_var.tdb"
    cell = byte = 0
    for k, (n, size) in enumerate(zip(fragment.cells.tolist(), sizes.tolist(), strict=True)):
        if own.filters.of_text:
            out.append(_words(read[0][edges[k] : edges[k + 1]], own.filters, size, n, where))
        else:
            starts = read[1].view(np.int64)[cell : cell + n]
            out.append(strings(read[0][byte : byte + size].tobytes(), starts, where))
        cell, byte = cell + n, byte + size
    return np.concatenate(out)


def _words(tile: NDArray[np.uint8], filters: Filters, size: int, n: int, where: str) -> NDArray[np.object_]:
    """Return the n strings, `size` bytes in all, of a tile whose first filter works on strings.

    That filter writes integers with their highest byte first.
    """
    out: list[bytes] = []
    try:
        for data, about in tiledb.chunks_of(tile, filters.steps, size):
            cursor = Bytes(about, where)
            cursor.read("IIIII")
            n_first, n_second = cursor.read("BB")
            if n_first not in _WIDTHS or n_second not in _WIDTHS:
                raise DecodeError("integers of text in it have an unknown size")
            if filters.of_text == RLE:
                runs = Bytes(data, where)
                while runs.at < len(data) and len(out) <= n:
                    length, nbytes = (int.from_bytes(runs.take(width), "big") for width in (n_first, n_second))
                    out += [runs.take(nbytes)] * min(length, n + 1)
                continue
            known, words = Bytes(cursor.take(cursor.read("I")), where), []
            while known.at < len(known.raw):
                words.append(known.take(int.from_bytes(known.take(n_second), "big")))
            ids = np.frombuffer(data, dtype=f">u{n_first}")
            out += [words[number] for number in ids.tolist()]
        if len(out) != n:
            raise DecodeError(f"text of {len(out)} cells in it, not of {n}")
        return np.array([word.decode() for word in out], dtype=object)
    except CorruptDataError:
        raise
    except (DecodeError, IndexError, ValueError) as error:
        raise damaged(where, str(error)) from error
