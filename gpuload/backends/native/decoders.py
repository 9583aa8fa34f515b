"""The filters of stored chunks, called by address, so that `decode_chunks` compiles without any of them.

Programs that read only gzip never compile blosc, and each codec is compiled once, not for every combination of dtypes.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from gpuload.backends.native.bits import decode_bit_shuffle
from gpuload.backends.native.calls import Callback, caller
from gpuload.backends.native.checksums import is_crc32c, is_fletcher32
from gpuload.backends.native.frames import (
    N_ADDRESSES,
    decode_blosc,
    decode_lz4,
    decode_lz4_blocks,
    decode_zstd,
    gunzip,
    unshuffle_items,
)
from gpuload.backends.native.inflate import inflate_two, inflate_zlib
from gpuload.backends.native.lzf import decode_lzf
from gpuload.backends.native.words import I64, array_at, inline

call_one = caller(I64, *[I64] * 10)
"""Decode a chunk. Arguments: address and number of its stored bytes; address and number of its decoded bytes; first
byte wanted and the one after the last; whether to verify checksums; addresses of scratch as large as the decoded bytes,
of the inflater's workspace (for bitshuffle, of the numbers in `codecs.BitShuffle`) and of the table of addresses.
Returns the number of bytes decoded, or an error code."""

call_two = caller(I64, *[I64] * 12)
"""Decode two chunks, interleaved. Arguments: for each chunk, address and number of its stored bytes, address of its
decoded bytes, number wanted, whether to verify checksums; then the decoded size of each, below 2 GiB, and the address
of the inflater's workspace. Returns the result of `call_one` for each, the first in the high 32 bits."""

call_check = caller(I64, *[I64] * 2)
"""Return 1 if the checksum after n bytes at an address is theirs, else 0."""

call_unshuffle = caller(I64, *[I64] * 6)
"""Call `frames.unshuffle_items`, and return 0."""


@inline
def _table(addresses: int) -> Any:
    return array_at(addresses, N_ADDRESSES, np.int64)


def _zlib(
    src: int, n: int, to: int, size: int, lo: int, hi: int, verify: int, work: int, tables: int, addresses: int
) -> int:
    return inflate_zlib(src, n, to, size, hi, tables, verify != 0)


def _zlib_two(
    src: int,
    n: int,
    to: int,
    need: int,
    verify: int,
    src_2: int,
    n_2: int,
    to_2: int,
    need_2: int,
    verify_2: int,
    size: int,
    tables: int,
) -> int:
    got, got_2 = inflate_two(src, n, to, need, verify != 0, src_2, n_2, to_2, need_2, verify_2 != 0, size, tables)
    return got << 32 | got_2 & 0xFFFFFFFF


def _gzip(
    src: int, n: int, to: int, size: int, lo: int, hi: int, verify: int, work: int, tables: int, addresses: int
) -> int:
    return gunzip(src, n, to, size, hi, tables, verify != 0)


def _zstd(
    src: int, n: int, to: int, size: int, lo: int, hi: int, verify: int, work: int, tables: int, addresses: int
) -> int:
    return decode_zstd(src, n, to, size, _table(addresses))


def _lz4(
    src: int, n: int, to: int, size: int, lo: int, hi: int, verify: int, work: int, tables: int, addresses: int
) -> int:
    return decode_lz4(src, n, to, size, size if verify else hi, _table(addresses))


def _lz4_blocks(
    src: int, n: int, to: int, size: int, lo: int, hi: int, verify: int, work: int, tables: int, addresses: int
) -> int:
    return decode_lz4_blocks(src, n, to, size, size if verify else hi, _table(addresses))


def _lzf(
    src: int, n: int, to: int, size: int, lo: int, hi: int, verify: int, work: int, tables: int, addresses: int
) -> int:
    return decode_lzf(src, n, to, size, size if verify else hi)


def _blosc(
    src: int, n: int, to: int, size: int, lo: int, hi: int, verify: int, work: int, tables: int, addresses: int
) -> int:
    return decode_blosc(src, n, to, size, lo, hi, work, tables, _table(addresses))


def _bitshuffle(
    src: int, n: int, to: int, size: int, lo: int, hi: int, verify: int, work: int, tables: int, addresses: int
) -> int:
    about = array_at(tables, 3, np.int64)
    if verify:
        lo, hi = 0, size
    return decode_bit_shuffle(src, n, to, size, lo, hi, work, about[0], about[1], about[2], _table(addresses))


def _fletcher32(at: int, n: int) -> int:
    return np.int64(is_fletcher32(at, n))


def _crc32c(at: int, n: int) -> int:
    return np.int64(is_crc32c(at, n))


def _unshuffle(at: int, to: int, n: int, itemsize: int, lo: int, hi: int) -> int:
    unshuffle_items(at, to, n, itemsize, lo, hi)
    return 0


_ONE = {
    "deflate": Callback(_zlib),
    "gzip": Callback(_gzip),
    "zstd": Callback(_zstd),
    "lz4": Callback(_lz4_blocks),
    "lz4-sized": Callback(_lz4),
    "lzf": Callback(_lzf),
    "blosc": Callback(_blosc),
    "bitshuffle": Callback(_bitshuffle),
}
_TWO = {"deflate": Callback(_zlib_two)}
_OTHERS = {"shuffle": Callback(_unshuffle), "fletcher32": Callback(_fletcher32), "crc32c": Callback(_crc32c)}

CODECS = tuple(_ONE)
"""Filters decoded natively, as `ArrayLayout` names them; a pipeline has at most one of them."""

INFLATING = ("deflate", "gzip", "blosc")
"""Those that use the inflater's workspace."""


def addresses_of(codec: str, may_pair: bool) -> tuple[int, int]:
    """Return the addresses for a codec's `call_one` and `call_two`, 0 if missing or not requested."""
    one, two = _ONE.get(codec), _TWO.get(codec) if may_pair else None
    return one.address if one else 0, two.address if two else 0


def address_of(step: str) -> int:
    """Return the address for `call_unshuffle` or `call_check` of a filter that is no codec."""
    return _OTHERS[step].address
