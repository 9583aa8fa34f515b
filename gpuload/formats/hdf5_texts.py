"""Read texts of any length from the heaps of an HDF5 file all at once: HDF5 itself takes a call for each of them.

The stored array holds references: a text's number of bytes, the address of a collection of texts, and a number in it.
The collections of an array lie close together, so one read brings them all.

A reference must agree with what stands before the text it leads to; whatever is unusual or damaged is left to h5py,
which reads it, or says what is wrong. The files of a data set have the same genes: equal texts are one array.

References
----------
.. [1] The HDF Group, "HDF5 File Format Specification Version 3.0", III.E (global heap), IV.A.2.d (variable length).
"""

from __future__ import annotations

import os
from hashlib import blake2b
from typing import TYPE_CHECKING, Any
from weakref import WeakValueDictionary

import numpy as np

from gpuload.backends import codecs
from gpuload.formats.arrays import as_strings
from gpuload.formats.hdf5 import content_of, filters_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray

    Read = Callable[[int, int], bytes]
    """Return bytes of a file, given the first and how many; fewer at its end."""

_FEW, _MANY = 1 << 10, 1 << 17
"""h5py reads fewer texts in less than a millisecond; more are no genes, and would be in memory several times."""

_LONGEST = 1 << 10
"""Bytes of a text that are too many for a name; the memory taken is bounded by them."""

_REFERENCE = np.dtype([("nbytes", "<u4"), ("heap", "<u8"), ("number", "<u4")])
_BEGIN = b"GCOL\1\0\0\0"
_HEADER = 16
"""Bytes before the first text of a collection, and before each text."""

_SIZE = 4096
"""Bytes of a collection that is no larger than HDF5 makes them at least."""

_MOST_READ = 8
"""Bytes read at most for each byte that is wanted: a collection may hold other texts too."""

_TOGETHER = 1 << 11
"""Texts that are taken at once, whose index stays in the processor's cache."""

_known: WeakValueDictionary[bytes, NDArray[np.object_]] = WeakValueDictionary()
"""Arrays in use, by a digest of their texts."""


class _UnusualError(Exception):
    """The texts are not where HDF5 usually puts them, or are damaged."""


def read_texts(stored: Any) -> NDArray[np.object_]:
    """Return an HDF5 data set of one dimension as strings, shape (n,) object: one array for all that are alike."""
    kind = stored.id.get_type()
    is_usual = hasattr(kind, "is_variable_str") and kind.is_variable_str()
    if is_usual and _FEW <= len(stored) <= _MANY and (read := _reader(stored.file)) is not None:
        try:
            return _shared(_joined(stored, read), len(stored))
        except (_UnusualError, codecs.DecodeError, OSError, RuntimeError, ValueError):
            pass
    return as_strings(stored[()])


def _reader(file: Any) -> Read | None:
    """Return what reads bytes of a file that h5py has open; None if only h5py can read it."""
    content = content_of(file)
    if content is not None:
        return content.read_at
    if file.driver != "sec2":
        return None
    descriptor = file.id.get_vfd_handle()
    return lambda offset, nbytes: os.pread(descriptor, nbytes, offset)


def _shared(joined: bytes, n: int) -> NDArray[np.object_]:
    """Return n texts, each followed by a zero, as an array; the same one for the same texts."""
    digest = blake2b(joined, digest_size=32).digest()
    found = _known.get(digest)
    if found is None:
        texts = joined.decode().split("\0")
        if len(texts) != n + 1:  # one has a zero in it
            raise _UnusualError
        found = np.empty(n, dtype=object)
        found[:] = texts[:-1]
        _known[digest] = found
    return found


def _joined(stored: Any, read: Read) -> bytes:
    """Return the texts, each followed by a zero."""
    created = stored.file.id.get_create_plist()
    references = _references(stored, read)
    nbytes, heap, number = (references[name].astype(np.int64) for name in ("nbytes", "heap", "number"))
    limits = ((nbytes, _LONGEST), (heap, 1 << 47), (number, 1 << 16))  # an empty text is in no collection
    if any(not 0 < of.min() <= of.max() < limit for of, limit in limits) or created.get_sizes() != (8, 8):
        raise _UnusualError
    places = np.argsort(heap << 16 | number, kind="stable")
    heap, number = heap[places], number[places]
    is_first = np.append(True, heap[1:] != heap[:-1])
    most = _MOST_READ * int(nbytes.sum() + _HEADER * nbytes.size)
    found, end = _read_collections(read, heap[is_first] + created.get_userblock(), most)
    start = np.empty_like(places)
    start[places] = _starts(found, end // 8, is_first, number, nbytes[places])
    found[start + nbytes] = 0
    parts = []
    for k in range(0, start.size, _TOGETHER):
        sizes = nbytes[k : k + _TOGETHER] + 1
        ends = np.cumsum(sizes)
        index = np.repeat(start[k : k + _TOGETHER] - ends + sizes, sizes)
        index += np.arange(index.size)
        parts.append(found[index].tobytes())
    return b"".join(parts)


def _references(stored: Any, read: Read) -> NDArray[Any]:
    """Return the references as they are stored."""
    n, size = len(stored), _REFERENCE.itemsize
    if stored.chunks is None:
        offset = stored.id.get_offset()
        if offset is None or stored.id.get_storage_size() != n * size:
            raise _UnusualError
        return np.frombuffer(_all(read, offset, n * size), dtype=_REFERENCE)
    (length,) = stored.chunks
    if length > 2 * _MANY:
        raise _UnusualError
    filters, parts = filters_of(stored, stored.name), []
    for start in range(0, n, length):
        mask, raw = stored.id.read_direct_chunk((start,))
        parts.append(codecs.decode(filters, mask, np.frombuffer(raw, np.uint8), length * size, size))
    return np.concatenate(parts).view(_REFERENCE)[:n]


def _all(read: Read, offset: int, nbytes: int) -> bytes:
    """Return bytes of the file, as many as are wanted."""
    found = read(offset, nbytes)
    if len(found) < nbytes:
        raise _UnusualError
    return found


def _read_collections(read: Read, offsets: NDArray[np.int64], most: int) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
    """Return the collections at ascending offsets, one after the other, and one more byte; and where each ends."""
    first, span = int(offsets[0]), int(offsets[-1] - offsets[0]) + _SIZE
    whole = read(first, span) if span <= most else b""
    parts, size = [], _SIZE
    for offset in offsets.tolist():
        part = whole[offset - first : offset - first + size] or read(offset, size)  # as large as the one before it
        size = int.from_bytes(part[8:16], "little")
        most -= size
        if not part.startswith(_BEGIN) or size % 8 or most < 0:
            raise _UnusualError
        parts.append((part + _all(read, offset + len(part), max(0, size - len(part))))[:size])
    ends = np.cumsum([len(part) for part in parts])
    return np.frombuffer(bytearray().join([*parts, b"\0"]), dtype=np.uint8), ends


def _starts(
    read: NDArray[np.uint8],
    end: NDArray[np.int64],
    is_first: NDArray[np.bool_],
    number: NDArray[np.int64],
    nbytes: NDArray[np.int64],
) -> NDArray[np.int64]:
    """Return the first byte of each text in collections that were read; raise _UnusualError if it is not there.

    Parameters
    ----------
    read, end
        The collections, and the word after each.
    is_first, number, nbytes
        Of each text: whether it is the first of a collection, its number there, and its size; sorted.
    """
    words = read[:-1].view(np.int64)
    # Texts are written one after the other: each is where the one before it ends, unless others lie between.
    steps = (_HEADER + nbytes + 7) // 8
    at = np.cumsum(steps) - steps
    runs = np.flatnonzero(is_first | np.append(True, number[1:] != number[:-1] + 1))
    shift, own = np.zeros(runs.size, dtype=np.int64), np.cumsum(is_first) - 1
    for k, (run, which) in enumerate(zip(runs.tolist(), own[runs].tolist(), strict=True)):
        known = at[run] + shift[k - 1] if not is_first[run] else (end[which - 1] if which else 0) + _HEADER // 8
        shift[k] = _find(words[: end[which]], int(known), int(number[run])) - at[run]
    at += np.repeat(shift, np.diff(runs, append=at.size))
    if np.any(at + steps > end[own]) or np.any(words[at] & 0xFFFF != number) or np.any(words[at + 1] != nbytes):
        raise _UnusualError
    return 8 * at + _HEADER


def _find(words: NDArray[np.int64], at: int, number: int) -> int:
    """Return where a text is, given its number, looking from a place in its collection on."""
    while at + 1 < words.size:
        found, nbytes = int(words[at]) & 0xFFFF, int(words[at + 1])
        if found == number:
            return at
        if not found or nbytes < 0:  # the rest is free
            break
        at += (_HEADER + nbytes + 7) // 8
    raise _UnusualError
