"""Decode LZF, the compression that h5py and anndata offer beside gzip.

Input is untrusted: whatever the bytes, a call terminates, reads nothing outside its input, and writes nothing outside
its output.

References
----------
.. [1] Lehmann, "LibLZF", lzf_d.c (format), as used by HDF5's filter 32000.
"""

from __future__ import annotations

from gpuload.backends.native.words import (
    copy16,
    inline,
    load8,
    load64,
    low_bits,
    native,
    opaque,
    shift_left,
    store8,
    store64,
)

BAD_LZF = -209

REASONS = {BAD_LZF: "lzf cannot decode it"}
"""What a code of this module means, as part of a sentence."""

_MARGIN = 32
"""Bytes of input and output that must be left for a step of the fast loop."""


@inline
def _copy_match(out: int, distance: int, length: int) -> None:
    """Copy from `distance` bytes before, which may overlap; up to 16 more bytes may be written."""
    done = 0
    if length <= 4:  # a load of more bytes would wait for several stores
        store8(out, load8(out - distance))
        store8(out + 1, load8(out + 1 - distance))
        store8(out + 2, load8(out + 2 - distance))
        store8(out + 3, load8(out + 3 - distance))
    elif distance >= 16 or length <= distance:  # bytes that are not there yet are then not part of the match
        while done < length:
            copy16(out + done, out + done - distance)
            done = opaque(done + 16)
    elif distance >= 8:
        while done < length:
            store64(out + done, load64(out + done - distance))
            done = opaque(done + 8)
    else:  # as many repeats as 8 bytes hold, again and again
        value, period = low_bits(load64(out - distance), 8 * distance), distance
        while period <= 4:
            value |= shift_left(value, 8 * period)
            period *= 2
        while done < length:
            store64(out + done, value)
            done = opaque(done + period)


@native
def decode_lzf(at: int, n: int, to: int, size: int, need: int) -> int:
    """Decode an LZF stream of `size` bytes, or at least the first `need` of them.

    A control byte c below 32 is followed by c + 1 literal bytes. Otherwise it starts a match of (c >> 5) + 2 bytes, or,
    if c >> 5 is 7, of that plus the next byte, at a distance of 1 + 13 bits: the low 5 of c and the next byte.

    Parameters
    ----------
    at, n
        Address and number of its bytes.
    to, size
        Address and number of the decoded bytes.
    need
        Bytes wanted; if it is `size`, the stream must end there.

    Returns
    -------
    int
        The number of bytes decoded, or `BAD_LZF`.
    """
    end, out, out_end = at + n, to, to + size
    enough = to + need if need < size else out_end + 1
    while at < end and out < enough:
        code = load8(at)
        at += 1
        if code < 32:
            length = code + 1
            if length > end - at or length > out_end - out:
                return BAD_LZF
            if end - at >= _MARGIN and out_end - out >= _MARGIN:
                copy16(out, at)
                copy16(out + 16, at + 16)
            else:
                for k in range(length):
                    store8(out + k, load8(at + k))
            at += length
        else:
            length = (code >> 5) + 2
            if length == 9:
                if at == end:
                    return BAD_LZF
                length += load8(at)
                at += 1
            if at == end:
                return BAD_LZF
            distance = ((code & 31) << 8 | load8(at)) + 1
            at += 1
            if distance > out - to or length > out_end - out:
                return BAD_LZF
            if out_end - out >= length + _MARGIN:
                _copy_match(out, distance, length)
            else:
                for k in range(length):
                    store8(out + k, load8(out + k - distance))
        out += length
    return out - to if out - to >= need else BAD_LZF
