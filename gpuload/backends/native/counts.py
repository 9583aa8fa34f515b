"""Downsample the counts of a resident in place: each count is replaced by a binomial draw.

A draw depends on a key, on the cell's number and on the gene's column, and on nothing else. So it needs no state, and
is the same in any minibatch, thread and process, and on a GPU (kernels/counts.cu): only integers are drawn and
compared. The random words of a value are outputs of SplitMix64 [1]_: its first is output number `column` of the
generator seeded with a hash of the cell, and the first seeds a generator of its own for the others.

A count n is n trials, each a uniform integer below 2**32 that succeeds if it is below `threshold`. Few trials take half
a word each. Of more, 64 are decided together: bit by bit, from the highest, until each trial's bits differ from those
of the threshold, which takes 8 words on average.

References
----------
.. [1] Steele, Lea, Flood, "Fast splittable pseudorandom number generators", OOPSLA 2014, doi:10.1145/2660193.2660195.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from gpuload.backends.native import parts
from gpuload.backends.native.words import borrowed, count_ones, inline, low_bits, native, shift_left, shift_right

WHOLE = 1 << 32
"""Threshold below which every trial is."""

MAX_COUNT = 1 << 24
"""Largest count: float32 represents every integer up to this."""

_FEW = 8
"""Trials, at most, that take half a word each."""

_TILE = 256
"""Values drawn at a time."""

_GAMMA, _FIRST, _SECOND = (
    np.array([0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB], np.uint64).view(np.int64).tolist()
)
"""SplitMix64's constants, as signed integers."""


@native
def hash64(x: int) -> int:
    """Return the first output of SplitMix64 seeded with x; as `permute.hash64`."""
    x += _GAMMA
    x = (x ^ shift_right(x, 30)) * _FIRST
    x = (x ^ shift_right(x, 27)) * _SECOND
    return x ^ shift_right(x, 31)


@inline
def drawn_few(n: int, threshold: int, word: int) -> int:
    """Return how many of n <= `_FEW` trials succeed; without branches, as n is hard to predict. See `drawn`."""
    total = 0
    for k in range(_FEW // 2):
        here = word if k == 0 else hash64(word + (k - 1) * _GAMMA)
        total += (n > 2 * k) & (here & (WHOLE - 1) < threshold)
        total += (n > 2 * k + 1) & (shift_right(here, 32) < threshold)
    return total


@native
def drawn(n: int, threshold: int, word: int) -> int:
    """Return how many of n trials succeed, each with probability ``threshold / 2**32``.

    Parameters
    ----------
    n
        From 0 to `MAX_COUNT`.
    threshold
        From 0 to below `WHOLE`.
    word
        The value's first random word.
    """
    if n <= _FEW:
        return drawn_few(n, threshold, word)
    total, seed = 0, word
    while n > 0:
        undecided = low_bits(-1, n) if n < 64 else -1  # a bit per trial
        bits = shift_left(threshold, 32)  # those not compared yet, the next one highest
        while undecided and bits:
            if bits < 0:
                total += count_ones(undecided & ~word)
                undecided &= word
            else:
                undecided &= ~word
            bits = shift_left(bits, 1)
            word = hash64(seed)
            seed += _GAMMA
        n -= 64
    return total


@native
def draw_row(seed: int, threshold: int, indices: Any, data: Any, words: Any, larger: Any) -> None:
    """Draw the counts of one row in place, a tile at a time, first those up to 2, without branches.

    `words` and `larger` are scratch, (_TILE,) int64; other parameters as for `drawn` and `downsample`.
    """
    for lo in range(0, data.size, _TILE):
        n_here = min(_TILE, data.size - lo)
        for k in range(n_here):
            column = np.int64(indices[np.uint64(lo + k)]) if indices.size else lo + k
            words[np.uint64(k)] = hash64(seed + column * _GAMMA)
        n_larger = 0
        for k in range(n_here):
            larger[np.uint64(n_larger)] = k
            n_larger += data[np.uint64(lo + k)] > 2
        for k in range(n_here):
            n, word = data[np.uint64(lo + k)], words[np.uint64(k)]
            first = (n > 0) & (word & (WHOLE - 1) < threshold)
            second = (n > 1) & (shift_right(word, 32) < threshold)
            data[np.uint64(lo + k)] = n if n > 2 else np.float32(first) + np.float32(second)
        for m in range(n_larger):
            k = larger[np.uint64(m)]
            n = np.int64(data[np.uint64(lo + k)])
            data[np.uint64(lo + k)] = np.float32(drawn(n, threshold, words[np.uint64(k)]))


@parts.native(fastmath={"reassoc"})  # sums of counts are exact, whatever the order
def total_of(data: Any, start: int, stop: int) -> tuple[bool, float]:
    """Return whether values are counts, and their sum if they are."""
    are_counts, total = True, 0.0
    for k in range(start, stop):
        value = data[np.uint64(k)]
        are_counts &= (value >= 0.0) & (value <= MAX_COUNT) & (value == np.floor(value))
        total += np.float64(value)
    return are_counts, total


@native
def downsample(indptr: Any, indices: Any, data: Any, rows: Any, key: int, amount: float, first: int, last: int) -> int:
    """Draw the counts of resident rows ``first:last``, in place.

    Parameters
    ----------
    indptr, indices, data
        The resident, CSR or (`indices` empty) dense: int64, uint16 or int32, float32 or float64.
    rows : (n_rows,) int64
        Numbers of the rows' cells.
    key
        A random number, the same for all of an epoch.
    amount
        Up to 1, the probability with which each count is kept; above, the mean of a cell's total, unless that is
        already less.

    Returns
    -------
    int
        -1, or the first row that holds anything but counts: whole numbers from 0 to `MAX_COUNT`. It is left as it was.
    """
    indices, data = borrowed(indices), borrowed(data)
    words, larger = np.empty(_TILE, dtype=np.int64), np.empty(_TILE, dtype=np.int64)
    bad = -1
    for r in range(first, last):
        start, stop = indptr[r], indptr[r + 1]
        are_counts, total = total_of(data, start, stop)
        if not are_counts:
            bad = r if bad < 0 else bad
            continue
        share = amount if amount <= 1.0 else amount / max(total, amount)
        threshold = np.int64(share * WHOLE + 0.5)
        if threshold >= WHOLE:
            continue
        row = indices[start:stop] if indices.size else indices
        draw_row(hash64(key ^ rows[r]), threshold, row, data[start:stop], words, larger)
    return bad
