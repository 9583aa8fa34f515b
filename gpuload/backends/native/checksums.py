"""Native checksums of bytes at an address: adler32, crc32, crc32c and HDF5's fletcher32.

References
----------
.. [1] Deutsch, Gailly, "ZLIB Compressed Data Format Specification version 3.3", RFC 1950, 1996.
.. [2] Castagnoli, Braeuer, Herrmann, "Optimization of cyclic redundancy-check codes with 24 and 32 parity bits", IEEE
   Trans. Commun. 1993, doi:10.1109/26.231911 (CRC-32C). Kounavis, Berry, "A systematic approach to building high
   performance software-based CRC generators", ISCC 2005, doi:10.1109/ISCC.2005.18 (eight tables).
.. [3] Fletcher, "An arithmetic checksum for serial transmissions", IEEE Trans. Commun. 1982,
   doi:10.1109/TCOM.1982.1095369.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from llvmlite import ir
from numba.core import cgutils, types
from numba.extending import intrinsic

from gpuload.backends.native.words import I64, load8, load32, load64, native

if TYPE_CHECKING:
    from numpy.typing import NDArray

_ADLER_BASE = 65_521
_ADLER_VECTORS = 23
"""Number of vectors whose prefix sums fit in 16 bits: 255 * 23 * 22 / 2 < 65,536."""


@intrinsic
def _adler_sums(_typing: Any, address: Any, n_vectors: Any) -> Any:
    """Sum at most `_ADLER_VECTORS` vectors of 32 bytes: plainly (bits 0-31), and weighted by rank from the end."""

    def codegen(_context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        narrow, lanes, wide = (ir.VectorType(ir.IntType(n_bits), 32) for n_bits in (8, 16, 32))
        total = cgutils.alloca_once_value(builder, ir.Constant(lanes, None))
        prefix = cgutils.alloca_once_value(builder, ir.Constant(lanes, None))
        with cgutils.for_range(builder, args[1]) as loop:
            at = builder.add(args[0], builder.shl(loop.index, ir.Constant(I64, 5)))
            value = builder.load(builder.inttoptr(at, narrow.as_pointer()), align=1)
            so_far = builder.load(total)
            builder.store(builder.add(builder.load(prefix), so_far), prefix)
            builder.store(builder.add(so_far, builder.zext(value, lanes)), total)
        plain = builder.zext(builder.load(total), wide)
        weighted = builder.add(
            builder.shl(builder.zext(builder.load(prefix), wide), ir.Constant(wide, [5] * 32)),
            builder.mul(plain, ir.Constant(wide, list(range(32, 0, -1)))),
        )
        signature = ir.FunctionType(ir.IntType(32), [wide])
        add_up = cgutils.get_or_insert_function(builder.module, signature, "llvm.vector.reduce.add.v32i32")
        low, high = (builder.zext(builder.call(add_up, [vector]), I64) for vector in (plain, weighted))
        return builder.or_(low, builder.shl(high, ir.Constant(I64, 32)))

    return types.int64(types.int64, types.int64), codegen


@native
def adler32(at: int, n: int) -> int:
    """Return the adler32 checksum of n bytes, as `zlib.adler32` does."""
    low, high = 1, 0
    while n >= 32:
        for _ in range(64):  # both sums stay far below 2**63 for this long
            n_vectors = min(n >> 5, _ADLER_VECTORS)
            sums = _adler_sums(at, n_vectors)
            high += 32 * n_vectors * low + (sums >> 32)
            low += sums & 0xFFFFFFFF
            at += 32 * n_vectors
            n -= 32 * n_vectors
        low %= _ADLER_BASE
        high %= _ADLER_BASE
    for k in range(n):
        low += load8(at + k)
        high += low
    return (high % _ADLER_BASE) << 16 | low % _ADLER_BASE


def _crc_tables(polynomial: int) -> NDArray[np.uint32]:
    """Return tables of a byte's effect on a reflected CRC, at once and 1 to 7 bytes later: (8, 256)."""
    tables = np.zeros((8, 256), dtype=np.uint32)
    for byte in range(256):
        crc = byte
        for _ in range(8):
            crc = crc >> 1 ^ (polynomial if crc & 1 else 0)
        tables[0, byte] = crc
    for k in range(1, 8):
        tables[k] = tables[k - 1] >> 8 ^ tables[0, tables[k - 1] & 255]
    return tables


_CRC32, _CRC32C = _crc_tables(0xEDB88320), _crc_tables(0x82F63B78)


@native
def _crc(tables: Any, address: int, n: int) -> int:
    crc = 0xFFFFFFFF
    i = 0
    while n - i >= 8:
        word = load64(address + i)
        low, high = (word & 0xFFFFFFFF) ^ crc, (word >> 32) & 0xFFFFFFFF
        crc = (
            np.int64(tables[7, low & 255])
            ^ np.int64(tables[6, (low >> 8) & 255])
            ^ np.int64(tables[5, (low >> 16) & 255])
            ^ np.int64(tables[4, low >> 24])
            ^ np.int64(tables[3, high & 255])
            ^ np.int64(tables[2, (high >> 8) & 255])
            ^ np.int64(tables[1, (high >> 16) & 255])
            ^ np.int64(tables[0, high >> 24])
        )
        i += 8
    while i < n:
        crc = (crc >> 8) ^ np.int64(tables[0, (crc ^ load8(address + i)) & 255])
        i += 1
    return crc ^ 0xFFFFFFFF


@native
def crc32(at: int, n: int) -> int:
    """Return the CRC-32 of n bytes, as gzip uses it."""
    return _crc(_CRC32, at, n)


@native
def crc32c(at: int, n: int) -> int:
    """Return the CRC-32C of n bytes."""
    return _crc(_CRC32C, at, n)


@native
def is_crc32c(at: int, n: int) -> bool:
    """Return whether the 4 bytes after n bytes are their CRC-32C, little-endian."""
    return bool(load32(at + n) == crc32c(at, n))


@native
def fletcher32(at: int, n: int) -> int:
    """Return HDF5's fletcher32 of n bytes: sums of big-endian 16-bit words, the first in the low half."""
    a = b = i = 0
    n_words = n // 2
    while i < n_words:
        stop = min(n_words, i + 360)
        while i < stop:
            a += load8(at + 2 * i) << 8 | load8(at + 2 * i + 1)
            b += a
            i += 1
        a = (a & 0xFFFF) + (a >> 16)
        b = (b & 0xFFFF) + (b >> 16)
    if n & 1:
        a += load8(at + n - 1) << 8
        b += a
    for _ in range(3):
        a = (a & 0xFFFF) + (a >> 16)
        b = (b & 0xFFFF) + (b >> 16)
    return b << 16 | a


@native
def is_fletcher32(at: int, n: int) -> bool:
    """Return whether the 4 bytes after n bytes are their fletcher32, in either byte order that HDF5 accepts."""
    found, wanted = load32(at + n), fletcher32(at, n)
    swapped = ((wanted & 0x00FF00FF) << 8) | ((wanted >> 8) & 0x00FF00FF)
    return bool(found in (wanted, swapped))
