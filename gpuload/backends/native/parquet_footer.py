"""Parquet footers: where the columns of the row groups are. A footer may list hundreds of thousands of them.

Input is untrusted: whatever the bytes, a call terminates, and nothing outside input and output is accessed.

References
----------
.. [1] Apache Parquet format specification: parquet.thrift (FileMetaData, RowGroup, ColumnChunk, ColumnMetaData,
   Statistics).
.. [2] Apache Thrift, "Thrift Compact protocol encoding".
"""

from __future__ import annotations

from typing import Any

import numpy as np

from gpuload.backends.native.parquet_pages import read_varint, signed
from gpuload.backends.native.words import load8, native

TYPE, ENCODINGS, CODEC, NBYTES, DATA, DICTIONARY, LEAST, N_LEAST, GREATEST, N_GREATEST, PATH, N_PATH = range(12)
"""What is found of a column of a row group: numbers of its type and codec; a bit for each encoding, the highest for all
from 63 on; stored size; first byte of its data and of its dictionary; place in the footer, and length, of its bounds
and of its file's path. -1 where the footer does not say it."""

N_CHUNK = 12

_PLACES = np.array(
    [0x401031, 0x4010320, 0x401034, 0x401037, 0x401039, 0x40103B, 0x40103C6, 0, 0x40103C5, 0, 0x40101, 0]
)
"""Where each of them stands: the numbers of the fields on the way, 4 bits each, 0 for the values of a list."""

_GROUPS, _GROUP, _CHUNK, _N_ROWS = 0x4, 0x40, 0x4010, 0x403
_LONGEST = 7
"""Fields on the way to any of them."""

MAX_DEPTH, N_STACK = 32, 5
_KIND, _FIELD, _LEFT, _OF, _WHERE = range(N_STACK)
"""Of a value that holds others: its kind; a struct's field; how many values of a list or map are left, and their kinds;
where it stands."""

_TRUE, _FALSE, _BYTE, _DOUBLE, _BINARY, _LIST, _SET, _MAP, _STRUCT, _UNKNOWN = 1, 2, 3, 7, 8, 9, 10, 11, 12, 13


@native
def scan_footer(raw: Any, chunks: Any, groups: Any, stack: Any) -> Any:
    """Find the row groups of a footer, and their columns.

    Parameters
    ----------
    raw : (n,) uint8
        The footer.
    chunks : (n_chunks, N_CHUNK) int64
        Receives what is found of each column, row group by row group, as far as there is room.
    groups : (n_groups, 2) int64
        Receives the number of rows of each row group, or -1, and that of its columns, as far as there is room.
    stack : (MAX_DEPTH, N_STACK) int64
        Scratch.

    Returns
    -------
    tuple
        The number of row groups, -1 if the footer is malformed; that of columns in all of them.
    """
    start, at, end = raw.ctypes.data, raw.ctypes.data, raw.ctypes.data + raw.size
    n_groups, n_chunks, depth, is_there = 0, 0, 0, False
    stack[0] = 0
    stack[0, _KIND] = _STRUCT
    while depth >= 0:
        own = stack[depth]
        kind, at = _next_kind(own, at, end)
        if kind == 0:
            depth -= 1
            continue
        where = own[_WHERE] << 4 | (min(max(own[_FIELD], 0), 15) if own[_KIND] == _STRUCT else 0)
        value, n = 0, 0
        if at >= 0 and kind in (4, 5, 6, _BINARY):
            value, at = read_varint(at, end)
            n = value if kind == _BINARY else 0
        elif kind in (_BYTE, _DOUBLE):
            n = 1 if kind == _BYTE else 8
        elif kind in (_LIST, _SET, _MAP, _STRUCT):
            depth += 1
            if depth == MAX_DEPTH:
                return -1, 0
            is_there |= where == _GROUPS and kind == _LIST
            at = _enter(stack[depth], kind, where if depth < _LONGEST else 0, at, end)
        elif kind not in (_TRUE, _FALSE):
            return -1, 0
        if at < 0 or n < 0 or n > end - at:
            return -1, 0
        if kind == _STRUCT and where == _GROUP:
            n_groups += 1
            if n_groups <= groups.shape[0]:
                groups[n_groups - 1, 0], groups[n_groups - 1, 1] = -1, 0
        elif kind == _STRUCT and where == _CHUNK:
            n_chunks += 1
            if n_groups <= groups.shape[0]:
                groups[n_groups - 1, 1] += 1
            if n_chunks <= chunks.shape[0]:
                chunks[n_chunks - 1] = -1
                chunks[n_chunks - 1, ENCODINGS] = 0
        elif where == _N_ROWS and kind in (4, 5, 6) and 0 < n_groups <= groups.shape[0]:
            groups[n_groups - 1, 0] = signed(value)
        elif kind in (4, 5, 6, _BINARY) and 0 < n_chunks <= chunks.shape[0]:
            _note(chunks[n_chunks - 1], where, kind == _BINARY, value, at - start)
        at += n
    return n_groups if is_there else -1, n_chunks


@native
def _next_kind(own: Any, at: int, end: int) -> Any:
    """Return the kind of the next value, 0 after the last one, and where it is, below 0 if that is not there."""
    if own[_KIND] != _STRUCT:
        if own[_LEFT] == 0:
            return 0, at
        own[_LEFT] -= 1
        kind = own[_OF] >> 4 if own[_KIND] == _MAP and own[_LEFT] & 1 else own[_OF] & 15
        return _BYTE if kind in (_TRUE, _FALSE) else kind if kind else _UNKNOWN, at
    if at < 0 or at >= end:
        return _UNKNOWN, at
    head = load8(at)
    at += 1
    if head == 0:
        return 0, at
    if head >> 4:
        own[_FIELD] += head >> 4
    else:
        value, at = read_varint(at, end)
        own[_FIELD] = signed(value)
    return head & 15 if head & 15 else _UNKNOWN, at


@native
def _enter(own: Any, kind: int, where: int, at: int, end: int) -> int:
    """Begin a value that holds others; return where these are, below 0 if they cannot all be there."""
    own[_KIND], own[_FIELD], own[_WHERE] = kind, 0, where
    n, kinds = 0, 0
    if kind == _STRUCT or at < 0 or at >= end:
        return at if kind == _STRUCT else -1
    if kind == _MAP:
        n, at = read_varint(at, end)
        if n and at >= 0:
            if at >= end:
                return -1
            kinds = load8(at)
            at += 1
        n *= 2
    else:
        kinds = load8(at) & 15
        n = load8(at) >> 4
        at += 1
        if n == 15:
            n, at = read_varint(at, end)
    own[_LEFT], own[_OF] = n, kinds
    return at if 0 <= n <= end - at else -1  # each takes a byte at least


@native
def _note(chunk: Any, where: int, is_bytes: bool, value: int, at: int) -> None:
    """Write down a number, or bytes of a length, that may be one of what is found of a column."""
    for k in range(N_CHUNK):
        if where == _PLACES[k] and where and is_bytes == (k >= LEAST):
            if is_bytes:
                chunk[k], chunk[k + 1] = at, value
            elif k == ENCODINGS:
                number = signed(value)
                chunk[k] |= 1 << (number if 0 <= number < 63 else 63)
            else:
                chunk[k] = signed(value)
