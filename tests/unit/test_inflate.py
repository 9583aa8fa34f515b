"""The inflater against zlib: what it decodes, what it refuses, and that it stays within its arrays."""

from __future__ import annotations

import ctypes
import mmap
import random
import zlib
from functools import cache
from itertools import accumulate, product
from typing import TYPE_CHECKING

import numpy as np
import pytest

from gpuload.backends.native import inflate
from gpuload.backends.native.checksums import adler32
from gpuload.backends.native.huffman import new_tables
from gpuload.backends.native.inflate import REASONS, inflate_two, inflate_zlib, suit_interleaving

if TYPE_CHECKING:
    from numpy.typing import NDArray

GUARD = 64
"""Bytes around the output that must stay as they were."""

FILLER = 0xA5

LENGTH_CODE_ORDER = (16, 17, 18, 0, 8, 7, 9, 6, 10, 5, 11, 4, 12, 3, 13, 2, 14, 1, 15)

CODES = (
    inflate.BAD_HEADER,
    inflate.BAD_BLOCK,
    inflate.BAD_CODE,
    inflate.BAD_DISTANCE,
    inflate.TRUNCATED,
    inflate.TOO_LONG,
    inflate.TOO_SHORT,
    inflate.BAD_CHECKSUM,
)


@pytest.fixture(scope="module")
def tables() -> NDArray[np.uint8]:
    """Return one workspace for all tests: nothing may carry over from one stream to the next."""
    return new_tables()


def decode(
    stream: bytes, size: int, tables: NDArray[np.uint8], *, need: int | None = None, verify: bool = True, shift: int = 0
) -> tuple[int, bytes]:
    """Decode a stream that lies between other bytes, alone and by turns with another, in either place.

    Check that nothing around the output was written, and that the two streams do not affect each other.
    """
    other, other_plain = partner(size)
    src = np.frombuffer(b"\xff" * shift + stream + b"\xff" * GUARD + other + b"\xff" * GUARD, np.uint8)
    start, need = GUARD + shift, size if need is None else need
    second = start + size + GUARD
    dst = np.full(second + size + GUARD, FILLER, np.uint8)

    def result() -> bytes:
        for lo, hi in ((0, start), (start + size, second), (second + size, dst.size)):
            assert (dst[lo:hi] == FILLER).all()
        return dst[start : start + size].tobytes()

    at, to, work = src.ctypes.data, dst.ctypes.data, tables.ctypes.data
    code = inflate_zlib(at + shift, len(stream), to + start, size, need, work, verify)
    assert (dst[second : second + size] == FILLER).all()
    plain = result()
    one = (at + shift, len(stream), to + start, need, verify)
    two = (at + shift + len(stream) + GUARD, len(other), to + second, size, True)
    for first in (True, False):
        dst[start : start + size] = dst[second : second + size] = FILLER
        codes = inflate_two(*(one if first else two), *(two if first else one), size, work)
        again, others = codes if first else codes[::-1]
        assert (others, dst[second : second + size].tobytes()) == (size, other_plain)
        # Unverified, a loop may decode some symbols more than needed: more bytes, or an error found there.
        assert again == code or (not verify and (min(again, code) >= need or max(again, code) >= need))
        n = max(0, min(code, again))
        assert result()[:n] == plain[:n]
    return code, plain


@cache
def partner(size: int) -> tuple[bytes, bytes]:
    """Return a stream to be decoded by turns with others, and what it holds."""
    plain = mixed(size, size)
    return deflate(plain, 1 + size % 9), plain


def deflate(plain: bytes, level: int = 4, strategy: int = zlib.Z_DEFAULT_STRATEGY, mem: int = 8) -> bytes:
    compressor = zlib.compressobj(level, zlib.DEFLATED, 15, mem, strategy)
    return compressor.compress(plain) + compressor.flush()


def framed(raw: bytes, plain: bytes) -> bytes:
    """Return a raw deflate stream in the frame of zlib."""
    return b"\x78\x5e" + raw + zlib.adler32(plain).to_bytes(4, "big")


def counts(n: int, seed: int = 0) -> bytes:
    """Return n small float32 counts, most of them 1."""
    return np.random.default_rng(seed).geometric(0.7, n).astype(np.float32).tobytes()


def columns(n: int, seed: int = 0) -> bytes:
    """Return n int32 column numbers in rising runs of about 1,500."""
    steps = np.random.default_rng(seed).geometric(1 / 40, n).cumsum()
    return (steps % 62_710).astype(np.int32).tobytes()


def noise(n: int, seed: int = 0) -> bytes:
    return random.Random(seed).randbytes(n)


def periodic(period: int, n: int, seed: int = 0) -> bytes:
    return (noise(period, seed) * (n // period + 1))[:n]


def far(distance: int) -> bytes:
    """Return bytes that repeat after exactly `distance`."""
    return noise(300) + noise(distance - 300, 1) + noise(300)


def mixed(n: int, seed: int) -> bytes:
    """Return pieces of every kind, so that every kind of symbol and distance occurs."""
    rng = random.Random(seed)
    pieces: list[bytes] = []
    while sum(map(len, pieces)) < n:
        size = rng.randint(1, 400)
        pieces.append(
            rng.choice((noise, lambda k, s: periodic(s % 40 + 1, k, s), counts, columns))(size, rng.getrandbits(16))
        )
    return b"".join(pieces)[:n]


PLAIN = {
    "empty": b"",
    "one byte": b"x",
    "noise": noise(70_000),
    "zeros": bytes(100_000),
    "counts": counts(36_558),
    "columns": columns(36_558),
    "mixed": mixed(60_000, 0),
    "window": far(32_768) + far(32_767) + far(32_506),
    "bytes in order": bytes(range(256)) * 40,
}


@pytest.mark.parametrize("level", range(10))
@pytest.mark.parametrize("name", PLAIN)
def test_every_level(name: str, level: int, tables: NDArray[np.uint8]) -> None:
    plain = PLAIN[name]
    assert decode(deflate(plain, level), len(plain), tables) == (len(plain), plain)


@pytest.mark.parametrize("strategy", [zlib.Z_FIXED, zlib.Z_HUFFMAN_ONLY, zlib.Z_RLE, zlib.Z_FILTERED])
@pytest.mark.parametrize("name", PLAIN)
def test_every_strategy(name: str, strategy: int, tables: NDArray[np.uint8]) -> None:
    plain = PLAIN[name]
    for mem in (1, 9):  # many small blocks, few large ones
        assert decode(deflate(plain, 6, strategy, mem), len(plain), tables) == (len(plain), plain)


@pytest.mark.parametrize("period", [*range(1, 36), 63, 64, 65])
def test_short_distances(period: int, tables: NDArray[np.uint8]) -> None:
    for n in (period + 3, 3 * period + 20, 2_000):
        plain = noise(5) + periodic(period, n) + noise(7, 2) + periodic(period, 600, 3)
        assert decode(deflate(plain, 9), len(plain), tables) == (len(plain), plain)


def test_sizes_around_the_margins(tables: NDArray[np.uint8]) -> None:
    for n in [*range(700), *range(1_000, 1_010)]:
        for plain in (bytes(n), mixed(n, n)):
            assert decode(deflate(plain, 6), n, tables, shift=n % 9) == (n, plain)


@pytest.mark.parametrize("flush", [zlib.Z_SYNC_FLUSH, zlib.Z_FULL_FLUSH, zlib.Z_PARTIAL_FLUSH, zlib.Z_BLOCK])
def test_blocks(flush: int, tables: NDArray[np.uint8]) -> None:
    pieces = [mixed(n, n) for n in (1, 10, 500, 3, 20_000, 0, 40_000)]
    compressor = zlib.compressobj(5)
    stream = b"".join(compressor.compress(piece) + compressor.flush(flush) for piece in pieces) + compressor.flush()
    plain = b"".join(pieces)
    assert decode(stream, len(plain), tables) == (len(plain), plain)


@pytest.mark.parametrize("name", ["counts", "columns", "mixed", "noise", "window"])
def test_stops_early(name: str, tables: NDArray[np.uint8]) -> None:
    plain = PLAIN[name]
    stream = deflate(plain)
    for need in (0, 1, 2, 3, 319, 320, 321, 5_000, len(plain) // 2, len(plain) - 321, len(plain) - 1, len(plain)):
        code, got = decode(stream, len(plain), tables, need=need, verify=False)
        assert need <= code <= len(plain)
        assert got[:code] == plain[:code]
    small = mixed(900, 5)
    for need in range(901):
        code, got = decode(deflate(small), 900, tables, need=need, verify=False)
        assert code >= need
        assert got[:code] == small[:code]


@pytest.mark.parametrize("needs", [(20_000, 20_000), (100, 20_000), (20_000, 100), (7, 12_345)])
def test_each_of_two_has_its_own_end(needs: tuple[int, int], tables: NDArray[np.uint8]) -> None:
    """How much of one stream is wanted, and whether its checksum matters, does not depend on the other."""
    plain = [mixed(20_000, seed) for seed in (1, 2)]
    good = [deflate(one) for one in plain]
    bad = [stream[:-1] + bytes([stream[-1] ^ 1]) for stream in good]
    headless = [b"\0" + stream[1:] for stream in good]

    def both(streams: list[bytes], verify: tuple[bool, bool]) -> list[int]:
        src = [np.frombuffer(stream, np.uint8) for stream in streams]
        out = np.full((2, 20_000), FILLER, np.uint8)
        one, two = (
            (src[k].ctypes.data, src[k].size, out[k].ctypes.data, 20_000 if verify[k] else needs[k], verify[k])
            for k in range(2)
        )
        codes = inflate_two(*one, *two, 20_000, tables.ctypes.data)
        for k, code in enumerate(codes):
            assert out[k].tobytes()[: max(0, code)] == plain[k][: max(0, code)]
        return list(codes)

    for verify in product((False, True), repeat=2):
        wanted = [20_000 if verify[k] else needs[k] for k in range(2)]
        for is_bad in product((False, True), repeat=2):
            codes = both([(bad if is_bad[k] else good)[k] for k in range(2)], verify)
            for k in range(2):
                assert codes[k] == inflate.BAD_CHECKSUM if verify[k] and is_bad[k] else wanted[k] <= codes[k] <= 20_000
        codes = both([headless[0], good[1]], verify)
        assert codes[0] == inflate.BAD_HEADER
        assert wanted[1] <= codes[1] <= 20_000


def test_reads_no_more_input_than_needed(tables: NDArray[np.uint8]) -> None:
    plain = PLAIN["columns"]
    stream = deflate(plain)
    code, got = decode(stream[: len(stream) // 2], len(plain), tables, need=len(plain) // 3, verify=False)
    assert code >= len(plain) // 3
    assert got[:code] == plain[:code]
    assert decode(stream[: len(stream) // 2], len(plain), tables, verify=False)[0] == inflate.TRUNCATED


def test_size_must_be_exact(tables: NDArray[np.uint8]) -> None:
    for plain in (bytes(3_000), noise(3_000), mixed(3_000, 1)):
        for level in (0, 6):
            stream = deflate(plain, level)
            for less in (1, 2, 257, 3_000):
                assert decode(stream, 3_000 - less, tables)[0] == inflate.TOO_LONG
                assert decode(stream, 3_000 + less, tables)[0] == inflate.TOO_SHORT
            assert decode(stream, 3_001, tables, verify=False)[0] == inflate.TOO_SHORT
            code, got = decode(stream, 2_000, tables, verify=False)
            assert (code, got) == (2_000, plain[:2_000])


def test_ignores_bytes_after_the_stream(tables: NDArray[np.uint8]) -> None:
    plain = mixed(5_000, 2)
    assert decode(deflate(plain) + noise(50), 5_000, tables) == (5_000, plain)


def test_checksum(tables: NDArray[np.uint8]) -> None:
    plain = mixed(5_000, 3)
    stream = deflate(plain)
    for k in range(1, 5):
        wrong = bytearray(stream)
        wrong[-k] ^= 1
        assert decode(bytes(wrong), 5_000, tables)[0] == inflate.BAD_CHECKSUM
        assert decode(bytes(wrong), 5_000, tables, verify=False) == (5_000, plain)
        assert decode(stream[:-k], 5_000, tables)[0] == inflate.TRUNCATED


def test_streams_of_short_matches_are_interleaved() -> None:
    assert suit_interleaving(len(deflate(PLAIN["columns"])), len(deflate(PLAIN["noise"])), 4 * 36_558)
    assert not suit_interleaving(len(deflate(PLAIN["counts"])), len(deflate(PLAIN["counts"])), len(PLAIN["counts"]))


def test_headers(tables: NDArray[np.uint8]) -> None:
    body = deflate(b"abc")[2:]
    for first in range(256):
        for second in range(256):
            try:
                accepted = zlib.decompress(bytes((first, second)) + body) == b"abc"
            except zlib.error:
                accepted = False
            code, _ = decode_header(bytes((first, second)) + body, tables)
            assert code == (3 if accepted else inflate.BAD_HEADER)
    assert decode(b"", 3, tables)[0] == decode(b"\x78", 3, tables)[0] == inflate.TRUNCATED


def decode_header(stream: bytes, tables: NDArray[np.uint8]) -> tuple[int, bytes]:
    dst = np.empty(3, np.uint8)
    src = np.frombuffer(stream, np.uint8)
    code = inflate_zlib(src.ctypes.data, len(stream), dst.ctypes.data, 3, 3, tables.ctypes.data, True)
    return code, dst.tobytes()


def test_block_types(tables: NDArray[np.uint8]) -> None:
    assert decode(framed(b"\x07", b""), 0, tables)[0] == inflate.BAD_BLOCK
    assert decode(framed(b"\x01\x03\x00\xfc\xffabc", b"abc"), 3, tables) == (3, b"abc")
    assert decode(framed(b"\x01\x03\x00\xfd\xffabc", b"abc"), 3, tables)[0] == inflate.BAD_BLOCK


def mutate(stream: bytes, rng: random.Random) -> bytes:
    """Return a stream with one to three of: a bit flipped, a byte set, bytes cut out, put in or cut off."""
    wrong = bytearray(stream)
    for _ in range(rng.randint(1, 3)):
        place = rng.randrange(len(wrong) + 1)
        if rng.random() < 0.5:
            place = min(place, rng.randrange(90))  # the tables are there
        kind = rng.randrange(5)
        if kind == 0 and place < len(wrong):
            wrong[place] ^= 1 << rng.randrange(8)
        elif kind == 1 and place < len(wrong):
            wrong[place] = rng.choice((0, 255, rng.randrange(256)))
        elif kind == 2:
            del wrong[place : place + rng.randint(1, 8)]
        elif kind == 3:
            wrong[place:place] = rng.randbytes(rng.randint(1, 8))
        elif rng.random() < 0.2:
            del wrong[place:]
    return bytes(wrong)


def check_nothing_made_up(raw: bytes, plain: bytes, tables: NDArray[np.uint8]) -> None:
    """Check that of a stream, damaged or cut off, no more is decoded than comes before that; nor its end."""
    n, unchecked = len(plain), b"\x78\x5e" + raw
    assert decode(framed(raw, plain), n, tables)[0] in CODES
    assert decode(unchecked, n + 1, tables, need=n + 1, verify=False)[0] in CODES
    code, got = decode(unchecked, n + 1, tables, need=n, verify=False)
    assert code in CODES or (code, got[:n]) == (n, plain)


def check_raw(raw: bytes, size: int, tables: NDArray[np.uint8]) -> bool:
    """Check that a raw deflate stream is accepted, with equal output, if and only if zlib accepts it."""
    judge = zlib.decompressobj(-15)
    try:
        plain = judge.decompress(raw)
        accepted = judge.eof
    except zlib.error:
        plain, accepted = b"", False
    if not accepted:
        for verify in (True, False):
            assert decode(framed(raw, plain), size, tables, need=size, verify=verify)[0] in (*CODES, size)
        assert decode(framed(raw, plain), max(size, len(plain) + 1), tables)[0] in CODES
        return False
    used = raw[: len(raw) - len(judge.unused_data)]
    assert decode(framed(used, plain), len(plain), tables) == (len(plain), plain)
    return True


@pytest.mark.parametrize("name", ["counts", "columns", "mixed", "small"])
def test_verdicts_on_damaged_streams_match_zlib(name: str, tables: NDArray[np.uint8]) -> None:
    rng = random.Random(name)
    plain = mixed(300, 8) if name == "small" else PLAIN[name][:4_000]
    streams = [deflate(plain, level, strategy)[2:-4] for level in (1, 4, 9) for strategy in (0, zlib.Z_FIXED)]
    verdicts = [check_raw(mutate(rng.choice(streams), rng), len(plain), tables) for _ in range(2_500)]
    assert 0 < sum(verdicts) < len(verdicts)


def test_damaged_frames_are_refused(tables: NDArray[np.uint8]) -> None:
    rng = random.Random(1)
    plain = mixed(2_000, 9)
    stream = deflate(plain)
    for _ in range(4_000):
        wrong = mutate(stream, rng)
        judge = zlib.decompressobj()
        try:
            accepted = judge.decompress(wrong) == plain and judge.eof
        except zlib.error:
            accepted = False
        code, got = decode(wrong, len(plain), tables)
        assert (code == len(plain) and got == plain) if accepted else code in CODES


class Bits:
    """A writer of deflate's bits: numbers least significant bit first, Huffman codes most significant first."""

    def __init__(self) -> None:
        self.value = 0
        self.n = 0

    def put(self, value: int, n: int) -> Bits:
        self.value |= value << self.n
        self.n += n
        return self

    def code(self, code: int, n: int) -> Bits:
        return self.put(int(format(code, f"0{n}b")[::-1], 2), n)

    def to_bytes(self) -> bytes:
        return self.value.to_bytes((self.n + 7) // 8, "little")


def canonical(lengths: list[int]) -> dict[int, tuple[int, int]]:
    """Return code and length by symbol (RFC 1951, 3.2.2)."""
    of_length = [lengths.count(b) if b else 0 for b in range(16)]
    first = list(accumulate(range(1, 16), lambda code, b: (code + of_length[b - 1]) << 1, initial=0))
    codes = {}
    for symbol, b in enumerate(lengths):
        if b:
            codes[symbol] = (first[b], b)
            first[b] += 1
    return codes


def extra_bits(symbol: int) -> int:
    """Return the number of extra bits of a length symbol (RFC 1951, 3.2.5)."""
    return 0 if symbol < 265 or symbol == 285 else (symbol - 261) // 4


def dynamic(literals: list[int], distances: list[int]) -> Bits:
    """Begin a last, dynamic block with these code lengths, written one by one."""
    bits = Bits().put(0b101, 3).put(len(literals) - 257, 5).put(len(distances) - 1, 5).put(15, 4)
    own = [4] * 13 + [5] * 6  # a complete code for the 19 symbols of the header
    for symbol in LENGTH_CODE_ORDER:
        bits.put(own[symbol], 3)
    codes = canonical(own)
    for b in literals + distances:
        bits.code(*codes[b])
    return bits


def lengths(n: int, **used: int) -> list[int]:
    """Return n code lengths, zero but for the symbols given as s<symbol>=<length>."""
    result = [0] * n
    for symbol, b in used.items():
        result[int(symbol[1:])] = b
    return result


A_B_END = lengths(257, s97=2, s98=2, s256=1)
A_MATCH_END = lengths(258, s97=2, s257=2, s256=1)

# literal lengths, distance lengths, symbols as (code, bits), accepted
CODE_SETS = {
    "no distance code": (A_B_END, [0], [(0b10, 2), (0b11, 2), (0, 1)], True),
    "no distance code, but a match": (A_MATCH_END, [0], [(0b10, 2), (0b11, 2), (0, 1), (0, 1)], False),
    "one distance code": (A_MATCH_END, [1], [(0b10, 2), (0b11, 2), (0, 1), (0, 1)], True),
    "one distance code, the other used": (A_MATCH_END, [1], [(0b10, 2), (0b11, 2), (1, 1), (0, 1)], False),
    "one distance code of two bits": (A_MATCH_END, [2], [(0b10, 2), (0b11, 2), (0, 2), (0, 1)], False),
    "two distance codes, incomplete": (A_MATCH_END, [1, 2], [(0b10, 2), (0b11, 2), (0, 1), (0, 1)], False),
    "distance codes over-subscribed": (A_MATCH_END, [1, 1, 1], [(0b10, 2), (0b11, 2), (0, 1), (0, 1)], False),
    "end of block only": (lengths(257, s256=1), [0], [(0, 1)], True),
    "end of block only, the other used": (lengths(257, s256=1), [0], [(1, 1)], False),
    "no end of block": (lengths(257, s97=1, s98=1), [0], [(0, 1)], False),
    "literals incomplete": (lengths(257, s97=2, s256=1), [0], [(0b10, 2), (0, 1)], False),
    "literals over-subscribed": (lengths(257, s97=1, s98=1, s256=1), [0], [(0, 1)], False),
    "too many literal codes": (lengths(287, s97=1, s256=1), [0], [(0, 1), (1, 1)], False),
    "too many distance codes": (A_B_END, [0] * 31, [(0b10, 2), (0, 1)], False),
    "distance before the first byte": (A_MATCH_END, [0, 1], [(0b10, 2), (0b11, 2), (0, 1), (0, 1)], False),
}

REFUSED_AFTER_A = (
    "no distance code, but a match",
    "one distance code, the other used",
    "distance before the first byte",
)


@pytest.mark.parametrize("name", CODE_SETS)
def test_code_sets(name: str, tables: NDArray[np.uint8]) -> None:
    literals, distances, symbols, accepted = CODE_SETS[name]
    bits = dynamic(literals, distances)
    for code, n in symbols:
        bits.code(code, n)
    for padding in (b"", bytes(40)):  # decoded by the careful loop, and by the fast one
        raw = bits.to_bytes() + padding
        assert check_raw(raw, 1_000, tables) is accepted
        if not accepted:
            check_nothing_made_up(raw, b"a" if name in REFUSED_AFTER_A else b"", tables)


@pytest.mark.parametrize(
    "own", [{0: 2, 1: 2, 18: 2, 2: 2}, {0: 2, 1: 2, 18: 2}, {0: 1, 1: 1, 18: 1}, {0: 2, 1: 1, 18: 1}]
)
def test_codes_of_code_lengths_are_complete(own: dict[int, int], tables: NDArray[np.uint8]) -> None:
    codes = canonical([own.get(symbol, 0) for symbol in range(19)])
    bits = Bits().put(0b101, 3).put(0, 5).put(0, 5).put(15, 4)
    for symbol in LENGTH_CODE_ORDER:
        bits.put(own.get(symbol, 0), 3)
    for symbol, extra in [(18, 86), (1, 0), (18, 127), (18, 9), (1, 0), (0, 0)]:  # 97 zeros, a, 138 and 20, the end
        bits.code(*codes[symbol]).put(extra, 7 if symbol == 18 else 0)
    raw = bits.code(0, 1).code(1, 1).to_bytes()
    assert check_raw(raw, 1, tables) is (len(own) == 4)
    if len(own) == 3:
        check_nothing_made_up(raw, b"", tables)


# the two lengths and the two distances that only fixed codes have (RFC 1951, 3.2.6)
@pytest.mark.parametrize("wrong", [[(0b11000110, 8)], [(0b11000111, 8)], [(1, 7), (30, 5)], [(1, 7), (31, 5)]])
def test_fixed_codes_that_mean_nothing(wrong: list[tuple[int, int]], tables: NDArray[np.uint8]) -> None:
    """Near the end of the input, and far from it; found at a literal, and at the match after it."""
    for n_before, padding in product((0, 1, 2, 3, 40), (b"", bytes(3), bytes(40))):
        bits = Bits().put(0b011, 3)
        for code in [(0b00110000 + 97, 8)] * n_before + wrong + [(0, 7)]:
            bits.code(*code)
        raw = bits.to_bytes() + padding
        with pytest.raises(zlib.error):
            zlib.decompress(raw, -15)
        check_nothing_made_up(raw, b"a" * n_before, tables)


@pytest.mark.parametrize("strategy", [zlib.Z_DEFAULT_STRATEGY, zlib.Z_FIXED])
def test_streams_cut_off_anywhere(strategy: int, tables: NDArray[np.uint8]) -> None:
    """What a symbol lacks reads as zeros, with which it may be complete."""
    far_apart = b"".join(noise(40, k % 23) + bytes([k]) for k in range(250))  # of distances with many more bits
    for plain in (far_apart, counts(200), b""):
        raw = deflate(plain, 9, strategy)[2:-4]
        for n in {*range(min(len(raw), 150)), *range(max(0, len(raw) - 150), len(raw))}:
            check_nothing_made_up(raw[:n], zlib.decompressobj(-15).decompress(raw[:n]), tables)


def random_lengths(rng: random.Random, n: int, longest: int) -> list[int]:
    """Return the lengths of a complete code for at most n symbols, in random places; sometimes spoilt."""
    leaves = [1, 1]
    while len(leaves) < n and (shallow := [k for k, b in enumerate(leaves) if b < longest]) and rng.random() < 0.99:
        k = rng.choice(shallow) if rng.random() < 0.5 else shallow[-1]
        leaves[k : k + 1] = [leaves[k] + 1] * 2
    result = leaves + [0] * (n - len(leaves))
    rng.shuffle(result)
    if rng.random() < 0.1:
        result[rng.randrange(n)] = rng.randint(0, 15)
    return result


def test_verdicts_on_random_codes_match_zlib(tables: NDArray[np.uint8]) -> None:
    rng = random.Random(2)
    verdicts = []
    for _ in range(600):
        literals = random_lengths(rng, rng.randint(257, 286), rng.choice((9, 12, 15)))
        distances = random_lengths(rng, rng.randint(1, 30), rng.choice((5, 9, 15)))
        if not literals[256]:
            longest = literals.index(max(literals))
            literals[256], literals[longest] = literals[longest], 0
        bits = dynamic(literals, distances)
        bits.put(rng.getrandbits(4_000), 4_000)
        verdicts.append(check_raw(bits.to_bytes(), 5_000, tables))
    assert any(verdicts)


def test_long_codes(tables: NDArray[np.uint8]) -> None:
    """Codes of up to 15 bits, literals and lengths and distances among them, all of them used."""
    rng = random.Random(3)
    for _ in range(40):
        ladder = [*range(1, 15), 15, 15]
        literals, distances = [0] * 286, [0] * 30
        symbols = [256, *rng.sample(range(256), 8), *rng.sample(range(257, 286), 7)]
        rng.shuffle(symbols)
        places = rng.sample(range(10), 10) + rng.sample(range(10, 30), 6)
        for b, symbol, place in zip(ladder, symbols, places, strict=True):
            literals[symbol], distances[place] = b, b
        bits = dynamic(literals, distances)
        literal_codes, distance_codes = canonical(literals), canonical(distances)
        for symbol in [s for s in symbols if s < 256] * 5 + rng.choices([s for s in symbols if s != 256], k=400):
            bits.code(*literal_codes[symbol])
            if symbol > 256:
                bits.put(rng.getrandbits(5), extra_bits(symbol))
                place = rng.choice(places[:6])
                bits.code(*distance_codes[place]).put(0, max(0, place // 2 - 1))
        bits.code(*literal_codes[256])
        check_raw(bits.to_bytes(), 200_000, tables)


def test_nearly_all_codes_are_long(tables: NDArray[np.uint8]) -> None:
    """Pairs of codes of 13 bits, each pair of one beginning: 136, about as many as fit beside the codes they leave."""
    literals = [13] * 255 + [1, 2, *[13] * 17, 3, 4, 6, 7, 8, 9]
    assert sum(2.0**-b for b in literals) == 1.0
    codes = canonical(literals)
    bits = dynamic(literals, [1, 1])
    for symbol in [*range(256), 274, *range(257, 274), 254, 256]:
        bits.code(*codes[symbol])
        if symbol > 256:
            bits.put(1, extra_bits(symbol)).code(0, 1)
    for padding in (b"", bytes(40)):
        assert check_raw(bits.to_bytes() + padding, 1, tables)


@pytest.mark.parametrize("own", [2, 3, 6, 7, 8, 11, 12, 13, 15])
def test_every_length(own: int, tables: NDArray[np.uint8]) -> None:
    """Each length symbol with each value of its extra bits, after a literal and after a match."""
    for symbol in range(257, 286):
        literals = [0] * 286
        literals[symbol] = own
        for other, b in zip((97, 256, *range(98, 130)), (*range(1, own), own), strict=False):
            literals[other] = b
        codes = canonical(literals)
        bits = dynamic(literals, [1, 1]).code(*codes[97]).code(*codes[97])
        for extra in range(1 << extra_bits(symbol)):
            bits.code(*codes[97])
            for _ in range(2):
                bits.code(*codes[symbol]).put(extra, extra_bits(symbol)).code(extra & 1, 1)
        bits.code(*codes[256])
        assert check_raw(bits.to_bytes() + bytes(40), 1, tables)


def fenced(nbytes: int) -> NDArray[np.uint8]:
    """Return whole pages of memory between two protected ones: touching those ends the process."""
    libc = ctypes.CDLL(None, use_errno=True)
    n_pages = -(-nbytes // mmap.PAGESIZE) + 2
    memory = np.frombuffer(mmap.mmap(-1, n_pages * mmap.PAGESIZE), np.uint8)
    for page in (0, n_pages - 1):
        address = memory.ctypes.data + page * mmap.PAGESIZE
        assert libc.mprotect(ctypes.c_void_p(address), mmap.PAGESIZE, 0) == 0
    return memory[mmap.PAGESIZE : -mmap.PAGESIZE]


def test_stays_within_its_memory(tables: NDArray[np.uint8]) -> None:
    rng = random.Random(4)
    src, dst = fenced(20_000), fenced(20_000)
    for k in range(3_000):
        plain = mixed(rng.randint(0, 3_000), k % 50)
        stream = deflate(plain, rng.randint(0, 9), rng.choice((0, zlib.Z_FIXED, zlib.Z_HUFFMAN_ONLY)))
        if k % 3:
            stream = mutate(stream, rng)
        for at_end in (True, False):
            start = src.size - len(stream) if at_end else 0
            src[start : start + len(stream)] = np.frombuffer(stream, np.uint8)
            out = dst.size - len(plain) if at_end else 0
            need = rng.randint(0, len(plain))
            places = src.ctypes.data + start, len(stream), dst.ctypes.data + out, len(plain)
            code = inflate_zlib(*places, need, tables.ctypes.data, k % 2 == 0)
            assert code in CODES or need <= code <= len(plain)


def at_end(memory: NDArray[np.uint8], what: bytes) -> tuple[int, int]:
    """Put bytes at the end of memory, and return their address and number."""
    memory[memory.size - len(what) :] = np.frombuffer(what, np.uint8)
    return memory.ctypes.data + memory.size - len(what), len(what)


@pytest.mark.parametrize("n_matches", [1, 2])
@pytest.mark.parametrize("n_after", range(48))
def test_long_matches_near_the_end_stay_within_their_memory(
    n_after: int, n_matches: int, tables: NDArray[np.uint8]
) -> None:
    """A match of 258 bytes is written in pieces of 16, which may extend beyond it."""
    src, src_2, dst, dst_2 = (fenced(4_000) for _ in range(4))
    few = bytes(b"01234567"[value & 7] for value in noise(1_000))  # of short codes: four are written in a step
    for n_before in range(397, 401):
        plain = few[:n_before] + bytes(1 + n_matches * 258) + few[n_before : n_before + n_after]
        size = len(plain)
        slow = bytes(value % 200 for value in noise(size, 2))  # the other stream reaches its end while this goes on
        literals = deflate(slow, 9, zlib.Z_HUFFMAN_ONLY)
        out, out_2 = (one.ctypes.data + one.size - size for one in (dst, dst_2))
        after = bytes(40)  # or the fast loops would stop for want of input
        pairs = [(plain, deflate(plain, 9) + after), (slow, literals + after)]
        for (one, stream), (two, stream_2) in product(pairs, pairs):
            streams = (*at_end(src, stream), out), (*at_end(src_2, stream_2), out_2)
            assert inflate_zlib(*streams[0], size, size, tables.ctypes.data, True) == size
            assert dst[-size:].tobytes() == one
            assert inflate_two(*streams[0], size, True, *streams[1], size, True, size, tables.ctypes.data) == (
                size,
                size,
            )
            assert (dst[-size:].tobytes(), dst_2[-size:].tobytes()) == (one, two)


def test_long_codes_of_streams_cut_off_are_read_within_their_memory(tables: NDArray[np.uint8]) -> None:
    rng = random.Random(3)
    literals = lengths(257, **{f"s{64 + n}": n for n in range(1, 15)}, s90=15, s256=15)
    codes = canonical(literals)

    def stream(n: int) -> bytes:
        bits = dynamic(literals, [1, 1])
        for _ in range(n):
            bits.code(*codes[rng.choice((77, 78, 90))])
        return b"\x78\x5e" + bits.to_bytes()

    src, src_2, dst, dst_2 = (fenced(4_000) for _ in range(4))
    size = 4_000
    for k in range(300):
        short, long = stream(200 + k % 50), stream(400)
        short = short[: len(short) - k // 50]
        for one, two in ((short, long), (long, short)):
            places = (*at_end(src, one), dst.ctypes.data), (*at_end(src_2, two), dst_2.ctypes.data)
            assert inflate_zlib(*places[0], size, size, tables.ctypes.data, True) == inflate.TRUNCATED
            both = inflate_two(*places[0], size, True, *places[1], size, True, size, tables.ctypes.data)
            assert both == (inflate.TRUNCATED, inflate.TRUNCATED)


def test_adler32() -> None:
    for n in (0, 1, 2, 15, 16, 31, 32, 33, 63, 5_551, 5_552, 5_553, 11_104, 70_000):
        for plain in (noise(n), b"\xff" * n, bytes(n)):
            for shift in (0, 3):
                buf = np.frombuffer(b"\x01" * shift + plain, np.uint8)
                assert adler32(buf.ctypes.data + shift, n) == zlib.adler32(plain)


def test_each_code_has_a_reason_of_its_own() -> None:
    assert len({REASONS[code] for code in CODES} - {""}) == len(CODES)
