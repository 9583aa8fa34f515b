"""Access to memory by address and operations on bits, each by itself, against NumPy and Python's integers."""

from __future__ import annotations

import struct
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numba.core.codegen import JITCPUCodegen

from gpuload.backends.native import parts, words

MASK = (1 << 64) - 1
WORDS = st.one_of(st.integers(0, MASK), st.sampled_from([0, 1, MASK, 1 << 63, (1 << 63) - 1]))
BIT_COUNTS = st.integers(0, 200)  # of which the low six bits matter
SLACK = 0xA5


@words.native
def shifted_right(value: int, n: int) -> int:
    return words.shift_right(value, n)


@words.native
def shifted_left(value: int, n: int) -> int:
    return words.shift_left(value, n)


@words.native
def lowest(value: int, n: int) -> int:
    return words.low_bits(value, n)


@words.native
def reversed_and_counted(value: int) -> tuple[int, int]:
    return words.reverse(value), words.count_ones(value)


@words.native
def copied_16(to: int, at: int) -> None:
    words.copy16(to, at)


@words.native
def stored_pair(to: int, low: int, high: int) -> None:
    words.store_pair(to, low, high)


@words.native
def copied_lines(to: int, at: int, n: int) -> None:
    words.store_lines(to, at, n)
    words.drain_stores()


@words.native
def counted_up(address: int, times: int) -> int:
    total = 0
    for _ in range(times):
        total += words.count_up(words.opaque(address))
    return total


@words.native
def halves(values: Any, out: Any) -> None:
    for k in range(values.size):
        out[k] = words.half_bits(values[k])


@words.native
def bits_of(single: Any, double: float) -> tuple[Any, int, float]:
    bits = words.double_bits(double)
    return words.float_bits(single), bits, words.double_of(bits)


@words.native
def sum_at(address: int, n: int) -> int:
    total = 0
    elements = words.array_at(address, n, np.int16)
    for k in range(elements.size):
        total += elements[k]
    return total


def signed(word: int) -> int:
    return word - (1 << 64) if word >> 63 else word


def unsigned(word: int) -> int:
    return int(word) & MASK


@pytest.mark.parametrize("size", [1, 2, 4, 8])
@given(WORDS, st.integers(0, 7))
def test_items_of_every_size_at_any_address(size: int, value: int, shift: int) -> None:
    memory = np.full(32, SLACK, dtype=np.uint8)
    at = memory.ctypes.data + 8 + shift
    words.put_item(at, size, signed(value))
    wanted = struct.pack("<Q", value)[:size]
    assert memory.tobytes() == bytes([SLACK]) * (8 + shift) + wanted + bytes([SLACK]) * (24 - shift - size)
    assert unsigned(words.get_item(at, size)) == int.from_bytes(wanted, "little")


@given(WORDS, BIT_COUNTS)
def test_bits_are_shifted_as_if_unsigned(value: int, n: int) -> None:
    assert unsigned(shifted_right(signed(value), n)) == value >> n % 64
    assert unsigned(shifted_left(signed(value), n)) == value << n % 64 & MASK
    assert unsigned(lowest(signed(value), n)) == value % 2 ** (n % 64)


@given(WORDS)
def test_bits_are_reversed_and_counted(value: int) -> None:
    backwards, n_ones = reversed_and_counted(signed(value))
    assert unsigned(backwards) == int(f"{value:064b}"[::-1], 2)
    assert n_ones == value.bit_count()


@pytest.mark.parametrize("distance", [-15, -1, 0, 1, 7, 15, 16])
def test_16_bytes_are_read_before_any_is_written(distance: int) -> None:
    memory = np.random.default_rng(0).integers(0, 256, 64, dtype=np.uint8)
    wanted = memory.copy()
    wanted[24 : 24 + 16] = memory[24 - distance : 24 - distance + 16]
    at = memory.ctypes.data + 24
    copied_16(at, at - distance)
    np.testing.assert_array_equal(memory, wanted)


@pytest.mark.parametrize("is_plain", [False, True], ids=["this processor", "any processor"])
def test_16_bytes_are_permuted(is_plain: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where the processor has no instruction for it."""
    if is_plain:
        monkeypatch.setattr(JITCPUCodegen, "magic_tuple", lambda _: ("riscv64-unknown-linux-gnu", "generic", ""))
    monkeypatch.setattr(parts, "in_folder", lambda _: None)  # what is made for another processor is not kept

    @words.native
    def permuted(to: int, at: int, order: int) -> None:
        words.shuffle16(to, at, order)

    for seed, distance in enumerate([1, 5, 16]):
        rng = np.random.default_rng(seed)
        memory, order = rng.integers(0, 256, 64, dtype=np.uint8), rng.integers(0, 16, 16, dtype=np.uint8)
        wanted = memory.copy()
        wanted[24 : 24 + 16] = memory[24 - distance : 24 - distance + 16][order]
        at = memory.ctypes.data + 24
        permuted(at, at - distance, order.ctypes.data)
        np.testing.assert_array_equal(memory, wanted)


@given(WORDS, WORDS)
def test_a_pair_is_stored_low_word_first(low: int, high: int) -> None:
    memory = np.full(32, SLACK, dtype=np.uint8)
    stored_pair(memory.ctypes.data + 3, signed(low), signed(high))
    assert memory.tobytes() == bytes([SLACK]) * 3 + struct.pack("<QQ", low, high) + bytes([SLACK]) * 13


@pytest.mark.parametrize("n_lines", [0, 1, 3])
def test_whole_lines_are_copied(n_lines: int) -> None:
    memory = np.random.default_rng(n_lines).integers(0, 256, 1024, dtype=np.uint8)
    first = -memory.ctypes.data % words.LINE + 8 * words.LINE
    wanted, nbytes = memory.copy(), n_lines * words.LINE
    wanted[first : first + nbytes] = memory[5 : 5 + nbytes]
    copied_lines(memory.ctypes.data + first, memory.ctypes.data + 5, nbytes)
    np.testing.assert_array_equal(memory, wanted)


def test_threads_count_up_together() -> None:
    """Each number is given once: windows that threads share are read by one of them."""
    counter, n, barrier = np.zeros(1, dtype=np.int64), 10_000_000, threading.Barrier(2)
    counted_up(counter.ctypes.data, 0)  # compiled before they start

    def count(_: int) -> int:
        barrier.wait(60)
        return counted_up(counter.ctypes.data, n)

    with ThreadPoolExecutor(2) as threads:
        totals = list(threads.map(count, range(2)))
    assert counter[0] == 2 * n
    assert sum(totals) == n * (2 * n - 1)


def test_halves_are_rounded_to_the_nearest_even() -> None:
    exact = np.arange(0x7C00, dtype=np.uint16).view(np.float16).astype(np.float32)
    between = (exact[1:] + exact[:-1]) / 2
    near = [np.nextafter(between, np.float32(side)) for side in (0, np.inf)]
    values = np.concatenate([exact, between, *near, np.array([65_519.996, 65_520, 1e30, np.inf], dtype=np.float32)])
    values = np.concatenate([values, -values])
    out = np.empty(values.size, dtype=np.uint16)
    halves(values, out)
    with np.errstate(over="ignore"):
        np.testing.assert_array_equal(out, values.astype(np.float16).view(np.uint16))


@pytest.mark.parametrize("value", [0.0, -0.0, 1.5, -(2.0**-1074), np.inf, np.nan])
def test_the_bits_of_a_number_are_its_own(value: float) -> None:
    single, double, again = bits_of(np.float32(value), value)
    assert struct.pack("<I", single) == struct.pack("<f", np.float32(value))
    assert struct.pack("<q", double) == struct.pack("<d", again) == struct.pack("<d", value)


def test_an_array_is_of_the_elements_at_its_address() -> None:
    elements = np.array([7, -3, 1_000, 5, 9], dtype=np.int16)
    assert sum_at(elements.ctypes.data + 2, 3) == -3 + 1_000 + 5
    assert sum_at(elements.ctypes.data, 0) == 0
