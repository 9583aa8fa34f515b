"""Native checksums of stored chunks: adler32.

References
----------
.. [1] Deutsch, Gailly, "ZLIB Compressed Data Format Specification version 3.3", RFC 1950, 1996.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba.core import cgutils, types
from numba.extending import intrinsic

from gpuload.backends.native.words import I64, load8, native

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
def adler32(buf: Any, pos: int, n: int) -> int:  # pragma: no cover - compiled
    """Return the adler32 checksum of buf[pos : pos + n] (uint8), as `zlib.adler32` does."""
    at = np.int64(buf.ctypes.data) + np.int64(pos)
    left = np.int64(n)
    low, high = 1, 0
    while left >= 32:
        for _ in range(64):  # both sums stay far below 2**63 for this long
            n_vectors = min(left >> 5, _ADLER_VECTORS)
            sums = _adler_sums(at, n_vectors)
            high += 32 * n_vectors * low + (sums >> 32)
            low += sums & 0xFFFFFFFF
            at += 32 * n_vectors
            left -= 32 * n_vectors
        low %= _ADLER_BASE
        high %= _ADLER_BASE
    for k in range(left):
        low += load8(at + k)
        high += low
    return (high % _ADLER_BASE) << 16 | low % _ADLER_BASE
