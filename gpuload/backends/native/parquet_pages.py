"""Parquet pages: their headers, their compression, and the levels that tell where rows begin.

Input is untrusted: whatever the bytes, a call terminates, and nothing outside input and output is accessed.

References
----------
.. [1] Apache Parquet format specification: parquet.thrift (page headers), "Encodings" (RLE / bit-packing hybrid),
   "Compression", "Data Pages".
.. [2] Apache Thrift, "Thrift Compact protocol encoding".
.. [3] Google, "Snappy compressed format description", 2011.
.. [4] Melnik et al., "Dremel: interactive analysis of web-scale datasets", PVLDB 2010, doi:10.14778/1920841.1920886
   (repetition and definition levels).
"""

from __future__ import annotations

from typing import Any

import numpy as np

from gpuload.backends.native.calls import caller
from gpuload.backends.native.decoders import call_one
from gpuload.backends.native.frames import N_ADDRESSES, lz4_at, zstd_at
from gpuload.backends.native.words import I32, I64, copy_bytes, inline, load8, load32, native, shift_right, store8

BAD_HEADER = -301
BAD_PAGE_SIZE = -302
BAD_CRC = -303
BAD_CODEC = -304
BAD_LEVELS = -305
NULL_VALUE = -306
NULL_LIST = -307
BAD_ENCODING = -308
BAD_INDEX = -309
BAD_COUNT = -310
BAD_LEADER = -311
SHORT_READ = -312
TRUNCATED = -399

CODECS = {"UNCOMPRESSED": 0, "SNAPPY": 1, "GZIP": 2, "ZSTD": 6, "LZ4": 7}
"""Supported codecs, by pyarrow's names (LZ4 is what parquet.thrift calls LZ4_RAW), and their numbers."""

NO_CODEC, SNAPPY, GZIP, _ZSTD = 0, 1, 2, 6

UNCOMPRESS, GUNZIP, TABLES, _SIZE = range(N_ADDRESSES, N_ADDRESSES + 4)
"""Positions in the table of addresses after those of `frames`: ``snappy_uncompress``, or 0; gzip's decoder and the
inflater's workspace, used only for that codec; a place to which snappy writes its output size."""

N_TABLE = N_ADDRESSES + 4
"""Elements of that table."""

DATA, DICTIONARY, DATA_V2 = 0, 2, 3
PLAIN, PLAIN_DICTIONARY, _RLE, DELTA_BINARY_PACKED, RLE_DICTIONARY, BYTE_STREAM_SPLIT = 0, 2, 3, 5, 8, 9

CODEC, WIDTH, MAX_DEF, DEF_EMPTY, IS_GENES, FIRST, HAS_LEADER, MAX_ROWS, IS_INTEGER = range(9)
"""Positions in the description of a column: codec; bytes of a stored value; definition level of a value, and of an
empty list; whether it holds column numbers; the number of column 0; whether the first value of each row is dropped;
maximum rows of a chunk; whether its values are integers."""

# Fields of a page's header.
(
    TYPE,
    FULL,
    STORED,
    CRC,
    N,
    ENCODING,
    _DEF_ENCODING,
    _REP_ENCODING,
    DEF_NBYTES,
    REP_NBYTES,
    IS_PACKED,
    _OTHER,
) = range(12)
N_PAGE = 12

_FIELDS = np.full((9, 10), _OTHER, dtype=np.int64)
_FIELDS[0, 1:5] = TYPE, FULL, STORED, CRC
_FIELDS[5, 1:5] = N, ENCODING, _DEF_ENCODING, _REP_ENCODING
_FIELDS[7, 1:3] = N, ENCODING
_FIELDS[8, 1], _FIELDS[8, 4:8] = N, (ENCODING, DEF_NBYTES, REP_NBYTES, IS_PACKED)

MAX_PAGE = 1 << 30
"""Maximum bytes of a page, and levels in one."""

_call_snappy = caller(I32, I64, I64, I64, I64)


REASONS = {
    BAD_HEADER: "the header of a page is malformed",
    BAD_PAGE_SIZE: "its pages do not fit its size",
    BAD_CRC: "the CRC-32 of a page does not match",
    BAD_CODEC: "a page cannot be decompressed",
    BAD_LEVELS: "the levels of a page are malformed",
    NULL_VALUE: "a list holds a missing value",
    NULL_LIST: "a list is missing",
    BAD_ENCODING: "a page has an unsupported encoding",
    BAD_INDEX: "a page names an entry that its dictionary does not have",
    BAD_COUNT: "it does not hold as many values as its rows should have",
    BAD_LEADER: "a row does not begin with the [CLS] pair (1 and a value below 0) that the others begin with",
    SHORT_READ: "it could not be read whole",
}
"""What a code of this module means, as part of a sentence."""


@native
def read_varint(at: int, end: int) -> Any:
    """Return a varint and the address after it, or an address below 0 if there is none."""
    value, shift = 0, 0
    while at < end and shift < 64:
        byte = load8(at)
        at += 1
        value |= (byte & 127) << shift
        if byte < 128:
            return value, at
        shift += 7
    return 0, TRUNCATED if at >= end else BAD_HEADER


@native
def signed(value: int) -> int:
    """Return the integer that a zigzag-encoded varint stands for."""
    return shift_right(value, 1) ^ -(value & 1)


@inline
def lacks_group(n_groups: int, bits: int, nbytes: int) -> bool:
    """Return whether a bit-packed run of groups of 8 lacks a whole one; some writers leave out its last padding."""
    return n_groups * bits >= nbytes + max(bits, 1)


@inline
def read_number(at: int, nbytes: int) -> int:
    """Return a little-endian number of that many bytes, at most 8."""
    number = 0
    for k in range(nbytes):
        number |= load8(at + k) << (8 * k)
    return number


@native
def _skip(at: int, end: int, kind: int) -> int:  # noqa: PLR0911 - one return per outcome
    """Return the address after a Thrift value; for a struct, after all its fields."""
    depth = 0
    while True:
        if kind == 3:
            at += 1
        elif 4 <= kind <= 6:
            _, at = read_varint(at, end)
            if at < 0:
                return at
        elif kind == 7:
            at += 8
        elif kind == 8:
            n, at = read_varint(at, end)
            if at < 0:
                return at
            if n < 0 or n > MAX_PAGE:
                return BAD_HEADER
            at += n
        elif kind == 12:
            depth += 1
        elif kind != 1 and kind != 2:  # noqa: PLR1714 - compiled
            return BAD_HEADER
        is_next = False
        while depth and not is_next:
            if at >= end:
                return TRUNCATED
            byte = load8(at)
            at += 1
            if byte == 0:
                depth -= 1
                continue
            if byte >> 4 == 0:
                _, at = read_varint(at, end)
                if at < 0:
                    return at
            kind, is_next = byte & 15, True
        if not is_next:
            return at if at <= end else TRUNCATED


@native
def page_header(at: int, end: int, page: Any) -> int:
    """Read the header of a page into `page` (`N_PAGE`,) int64; return the address after it, or a code below 0."""
    page[:] = 0
    page[CRC] = page[TYPE] = page[FULL] = page[STORED] = -1
    page[N] = page[ENCODING] = page[_DEF_ENCODING] = page[_REP_ENCODING] = -1
    page[IS_PACKED] = 1
    struct, field, outer = 0, 0, 0
    while True:
        if at >= end:
            return TRUNCATED
        byte = load8(at)
        at += 1
        if byte == 0:
            if struct == 0:
                break
            struct, field = 0, outer
            continue
        kind = byte & 15
        field += byte >> 4
        if byte >> 4 == 0:
            value, at = read_varint(at, end)
            if at < 0:
                return at
            field = signed(value)
        if struct == 0 and kind == 12 and (field == 5 or field == 7 or field == 8):  # noqa: PLR1714 - compiled
            struct, field, outer = field, 0, field
            continue
        place = _FIELDS[struct, field] if 0 < field < 10 else _OTHER
        if place != _OTHER and kind == 5:
            value, at = read_varint(at, end)
            if at < 0:
                return at
            page[place] = signed(value)
        elif place != _OTHER and (kind == 1 or kind == 2):  # noqa: PLR1714 - compiled
            page[place] = kind == 1
        else:
            at = _skip(at, end, kind)
            if at < 0:
                return at
    is_sane = 0 <= page[FULL] <= MAX_PAGE and 0 <= page[STORED] <= MAX_PAGE and page[N] <= MAX_PAGE
    if page[TYPE] == DATA or page[TYPE] == DATA_V2 or page[TYPE] == DICTIONARY:
        is_sane &= page[N] >= 0 and page[ENCODING] >= 0
    if page[TYPE] == DATA:
        is_sane &= page[_DEF_ENCODING] >= 0 and page[_REP_ENCODING] >= 0
    is_sane &= 0 <= page[DEF_NBYTES] <= MAX_PAGE and 0 <= page[REP_NBYTES] <= MAX_PAGE
    is_sane &= page[DEF_NBYTES] + page[REP_NBYTES] <= min(page[FULL], page[STORED])
    return at if is_sane and page[TYPE] >= 0 else BAD_HEADER


@native
def decompress(at: int, n: int, to: int, size: int, codec: int, addresses: Any) -> int:
    """Decompress n bytes to exactly `size` bytes; return 0 or a code. Both are followed by room for 8 more bytes."""
    if codec == NO_CODEC:
        if n != size:
            return BAD_PAGE_SIZE
        copy_bytes(to, at, n)
        return 0
    if size == 0:
        return 0
    got = -1
    if codec == SNAPPY:
        if addresses[UNCOMPRESS] != 0:
            addresses[_SIZE] = size
            place = np.int64(addresses.ctypes.data) + 8 * _SIZE
            value, head = read_varint(at, at + n)
            if head > 0 and value == size and _call_snappy(addresses[UNCOMPRESS], (at, n, to, place)) == 0:
                got = addresses[_SIZE]
        else:
            got = snappy_front(at, at + n, to, size, size)
    elif (
        codec == GZIP
    ):  # by address: compiled in here, it would take longer than all the rest, for every other codec too
        table = np.int64(addresses.ctypes.data)
        got = call_one(addresses[GUNZIP], (at, n, to, size, 0, size, 1, 0, addresses[TABLES], table))
    elif codec == _ZSTD:
        got = zstd_at(at, n, to, size, addresses)
    else:
        got = lz4_at(at, n, to, size, size, addresses)
    return 0 if got == size else BAD_CODEC


@native
def snappy_front(at: int, end: int, to: int, room: int, need: int) -> int:
    """Decompress at least the first `need` bytes of a snappy block, of which only the front may be given.

    Returns
    -------
    int
        Bytes decompressed, at most `room`; fewer than `need` if the front ends too early; or a code below 0.
    """
    size, at = read_varint(at, end)
    if at < 0 or size < 0:
        return BAD_CODEC
    room = min(room, size)
    out = 0
    while out < need and at < end:
        tag = load8(at)
        at += 1
        kind = tag & 3
        if kind == 0:
            n = tag >> 2
            if n >= 60:
                extra = n - 59
                if end - at < extra:
                    return out
                n = read_number(at, extra)
                at += extra
            n += 1
            given = min(n, end - at, room - out)
            copy_bytes(to + out, at, given)
            out += given
            if given < n:
                return out
            at += n
            continue
        width = 1 if kind == 1 else 2 if kind == 2 else 4
        if end - at < width:
            return out
        offset = read_number(at, width)
        at += width
        if kind == 1:
            n = 4 + ((tag >> 2) & 7)
            offset |= (tag >> 5) << 8
        else:
            n = 1 + (tag >> 2)
        if offset == 0 or offset > out:
            return BAD_CODEC
        n = min(n, room - out)
        for k in range(n):
            store8(to + out + k, load8(to + out + k - offset))
        out += n
        if out >= room:
            break
    return out


# A cursor over levels: current address, end address, bits per level, levels left in the run, whether the run is packed,
# the run's level or next bit.
_AT, _END, _BITS, _LEFT, _PACKED, _STATE = range(6)


@native
def start_levels(cursor: Any, at: int, end: int, greatest: int) -> None:
    """Place a cursor at the start of levels of at most `greatest`."""
    bits = 0
    while greatest >> bits:
        bits += 1
    cursor[_AT], cursor[_END], cursor[_BITS], cursor[_LEFT] = at, end, bits, 0


@native
def _next_run(cursor: Any) -> bool:
    """Enter the next run of levels; return False if there is none."""
    at, end, bits = cursor[_AT], cursor[_END], cursor[_BITS]
    header, at = read_varint(at, end)
    if at < 0 or header < 0 or header >> 1 == 0 or header >> 1 > MAX_PAGE:
        return False
    cursor[_PACKED] = header & 1
    if header & 1:
        if lacks_group(header >> 1, bits, end - at):
            return False
        nbytes = min((header >> 1) * bits, end - at)
        cursor[_LEFT], cursor[_STATE] = min((header >> 1) * 8, nbytes * 8 // bits), at * 8
        cursor[_AT] = at + nbytes
        return cursor[_LEFT] > 0
    if at >= end:
        return False
    cursor[_LEFT], cursor[_STATE], cursor[_AT] = header >> 1, load8(at), at + 1
    return True


@native
def _next_level(cursor: Any) -> int:
    """Return the next level, or -1 if there is none."""
    if cursor[_LEFT] == 0 and not _next_run(cursor):
        return -1
    cursor[_LEFT] -= 1
    if cursor[_PACKED] == 0:
        return cursor[_STATE]
    level = 0
    for k in range(cursor[_BITS]):
        bit = cursor[_STATE] + k
        level |= ((load8(bit >> 3) >> (bit & 7)) & 1) << k
    cursor[_STATE] += cursor[_BITS]
    return level


@native
def is_one_run(cursor: Any, n: int, level: int) -> bool:
    """Enter the first run of levels; return whether it repeats `level` at least n times."""
    return _next_run(cursor) and cursor[_PACKED] == 0 and cursor[_STATE] == level and cursor[_LEFT] >= n


@native
def find_rows(  # noqa: PLR0911 - one return per error
    rep: int, rep_end: int, defs: int, def_end: int, n: int, spec: Any, cursors: Any, starts: Any, found: Any
) -> int:
    """Find the rows that begin in a page of n levels; return 0 or a code.

    Parameters
    ----------
    rep, rep_end, defs, def_end
        Addresses of the repetition and definition levels.
    starts : int64
        Out: index in the chunk of the first value of each row; that of the next row if it has none.
    found : (2,) int64
        Rows and values found so far, updated here.
    """
    rows, values = found[0], found[1]
    rep_levels, def_levels = cursors[0], cursors[1]
    start_levels(rep_levels, rep, rep_end, 1)
    start_levels(def_levels, defs, def_end, spec[MAX_DEF])
    if n == 0:
        return 0
    if not is_one_run(def_levels, n, spec[MAX_DEF]):
        start_levels(def_levels, defs, def_end, spec[MAX_DEF])
        for _ in range(n):
            level, repeated = _next_level(def_levels), _next_level(rep_levels)
            if not (0 <= level <= spec[MAX_DEF] and 0 <= repeated <= 1) or (repeated and rows == 0):
                return BAD_LEVELS
            if repeated == 0:
                if rows >= starts.size:
                    return BAD_COUNT
                starts[rows] = values
                rows += 1
            if level == spec[MAX_DEF]:
                values += 1
            elif level > spec[DEF_EMPTY]:
                return NULL_VALUE
            elif level < spec[DEF_EMPTY]:
                return NULL_LIST
            elif repeated:
                return BAD_LEVELS
        found[0], found[1] = rows, values
        return 0
    done = 0
    while done < n:
        if not _next_run(rep_levels):
            return BAD_LEVELS
        m = min(rep_levels[_LEFT], n - done)
        if rep_levels[_PACKED]:
            at, k = rep_levels[_STATE] >> 3, 0
            while k < m:
                byte = load8(at + (k >> 3))
                if byte == 255 and m - k >= 8:
                    k += 8
                    continue
                for bit in range(min(8, m - k)):
                    if (byte >> bit) & 1 == 0:
                        if rows >= starts.size:
                            return BAD_COUNT
                        starts[rows] = values + done + k + bit
                        rows += 1
                    elif rows == 0:
                        return BAD_LEVELS
                k += 8
        elif rep_levels[_STATE] == 0:
            if m > starts.size - rows:
                return BAD_COUNT
            for k in range(m):
                starts[rows + k] = values + done + k
            rows += m
        elif rows == 0 or rep_levels[_STATE] != 1:
            return BAD_LEVELS
        done += m
    found[0], found[1] = rows, values + n
    return 0


@native
def find_levels(at: int, end: int, page: Any, spec: Any, place: Any) -> int:
    """Find the levels of a data page at an address, decompressed if necessary.

    Returns the address of the values, `TRUNCATED` if the levels extend beyond `end`, or another code; `place` receives
    both ends of the repetition and of the definition levels.
    """
    if page[TYPE] == DATA_V2:
        place[0], place[1] = at, at + page[REP_NBYTES]
        place[2], place[3] = place[1], place[1] + page[DEF_NBYTES]
        return place[3] if place[3] <= end else TRUNCATED
    if page[_REP_ENCODING] != _RLE or page[_DEF_ENCODING] != _RLE:
        return BAD_ENCODING
    for k in range(1 + (spec[MAX_DEF] > 0)):
        if end - at < 4:
            return TRUNCATED
        n = load32(at)
        if n > page[FULL]:
            return BAD_LEVELS
        place[2 * k], place[2 * k + 1] = at + 4, at + 4 + n
        at += 4 + n
        if at > end:
            return TRUNCATED
    return at
