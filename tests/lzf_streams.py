"""LZF streams that reach every branch of a decoder, whole and damaged, and a plain decoder. Does not use gpuload."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np


def lzf_tokens(rng: np.random.Generator, n: int) -> bytes:
    """Return an LZF stream of literals and matches of every length, overlapping ones too, that decodes to n bytes."""
    stream, made = bytearray(), 0
    while made < n:
        left = n - made
        if made and left >= 3 and rng.random() < 0.7:
            length = min(left, int(rng.choice([3, 4, 8, 9, 200, 263, 264])))
            distance = int(min(made, rng.choice([*range(1, 18), length, 300, 8191, 8192])))
            code, far = length - 2, distance - 1
            stream += (
                bytes([min(code, 7) << 5 | far >> 8]) + (bytes([code - 7]) if code >= 7 else b"") + bytes([far & 255])
            )
        else:
            length = min(left, int(rng.integers(1, 33)))
            stream += bytes([length - 1]) + rng.bytes(length)
        made += length
    return bytes(stream)


def lzf_reference(stream: bytes, size: int) -> bytes | None:
    """Return what an LZF stream decodes to, None where it is not exactly `size` bytes."""
    out, at = bytearray(), 0
    try:
        while at < len(stream):
            code = stream[at]
            at += 1
            if code < 32:
                if at + code + 1 > len(stream):
                    return None
                out += stream[at : at + code + 1]
                at += code + 1
            else:
                length = (code >> 5) + 2
                if length == 9:
                    length += stream[at]
                    at += 1
                start = len(out) - ((code & 31) << 8 | stream[at]) - 1
                at += 1
                if start < 0:
                    return None
                for k in range(length):
                    out.append(out[start + k])
            if len(out) > size:
                return None
    except IndexError:
        return None
    return bytes(out) if len(out) == size else None


def broken(stream: bytes, rng: np.random.Generator) -> bytes:
    """Return a stream that was cut off, or with bytes inserted, dropped or changed, once to three times."""
    bad = bytearray(stream)
    for _ in range(rng.integers(1, 4)):
        place = int(rng.integers(0, len(bad) + 1))
        kind = rng.integers(0, 4)
        if kind == 0:
            del bad[place:]
        elif kind == 1:
            bad[place:place] = rng.bytes(rng.integers(1, 8))
        elif kind == 2:
            del bad[place : place + 3]
        elif place < len(bad):
            bad[place] = rng.integers(0, 256)
    return bytes(bad)
