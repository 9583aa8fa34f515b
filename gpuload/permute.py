"""Random permutations and keys from integer arithmetic: the same in any process, on any machine, with any NumPy.

No global generator is used, and no ``Generator`` method, whose stream NumPy does not guarantee: keys come from
``SeedSequence`` (a specified, stable algorithm), and everything after that is implemented here. Seeds are mixed, never
added: seed 1000 epoch 0 is unrelated to seed 0 epoch 1.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray

    Keys = NDArray[np.uint64]
    StepEach = Callable[[Keys, Keys, Keys, Keys], Keys]
    """Arguments: elements, the two factors of their lengths, and keys."""

MAX_TABLE = 1 << 20
"""Up to this length a permutation is a table made by sorting random keys (exactly uniform); above, it is computed by
index."""


def random_keys(n: int, *words: int) -> NDArray[np.uint64]:
    """Return n 64-bit keys that depend on all of `words` (non-negative, below 2**64) and on nothing else.

    References
    ----------
    .. [1] O'Neill, "Developing a seed_seq alternative", 2015 (NumPy's SeedSequence).
    """
    halves = [part for word in words for part in (word & 0xFFFFFFFF, word >> 32)]
    state = np.random.SeedSequence(halves).generate_state(n, np.uint64)
    return np.asarray(state, dtype=np.uint64)


def hash64(x: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Return a well-mixed 64-bit hash of every element (a bijection).

    References
    ----------
    .. [1] Steele, Lea, Flood, "Fast splittable pseudorandom number generators", OOPSLA 2014,
       doi:10.1145/2660193.2660195 (the finalizer of SplitMix64).
    """
    x = x + np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def permuted_table(n: int, key: int) -> NDArray[np.int64]:
    """Return a random permutation of range(n) as a table, shape (n,): the argsort of n hashed keys."""
    return np.argsort(hash64(np.arange(n, dtype=np.uint64) ^ np.uint64(key)))  # no ties: the hash is a bijection


class Permutation:
    """A random permutation of range(n) with random access: each element is computed independently.

    Up to `MAX_TABLE` elements it is a table; above, an unbalanced Feistel network of 8 rounds on the smallest power of
    two that holds n, with cycle walking until the value falls below n (fewer than two steps on average).

    Parameters
    ----------
    n
        Length, at least 1.
    *words
        Seed words (seed, epoch, purpose ...).

    References
    ----------
    .. [1] Black, Rogaway, "Ciphers with arbitrary finite domains", CT-RSA 2002, doi:10.1007/3-540-45760-7_9 (cycle
       walking).
    .. [2] Luby, Rackoff, "How to construct pseudorandom permutations from pseudorandom functions", SIAM J. Comput.
       1988.
    """

    ROUNDS = 8

    def __init__(self, n: int, *words: int) -> None:
        self.n = n
        self._keys = random_keys(self.ROUNDS, *words)
        self._table = permuted_table(n, int(self._keys[0])) if n <= MAX_TABLE else None
        bits = max(2, (n - 1).bit_length())
        self._low_bits = bits // 2
        self._high_bits = bits - self._low_bits

    def __getitem__(self, index: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the elements at `index`, each in [0, n), in the shape of `index`."""
        if self._table is not None:
            return self._table[index]
        return self._walk(index, range(self.ROUNDS))

    def find(self, value: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the positions of values (the inverse): ``p.find(p[i]) == i``."""
        if self._table is not None:
            inverse = np.empty_like(self._table)
            inverse[self._table] = np.arange(self.n)
            return inverse[value]
        return self._walk(value, range(self.ROUNDS)[::-1])

    def _walk(self, start: NDArray[np.int64], rounds: range) -> NDArray[np.int64]:
        x = self._encipher(np.asarray(start).astype(np.uint64), rounds)
        outside = np.flatnonzero(x >= self.n)
        while outside.size:
            x[outside] = self._encipher(x[outside], rounds)
            outside = outside[x[outside] >= self.n]
        return x.astype(np.int64)

    def _encipher(self, x: NDArray[np.uint64], rounds: range) -> NDArray[np.uint64]:
        low_bits, high_bits = np.uint64(self._low_bits), np.uint64(self._high_bits)
        low, high = x & _mask(low_bits), x >> low_bits
        for r in rounds:  # each undoes itself
            if r % 2:
                high ^= hash64(low ^ self._keys[r]) & _mask(high_bits)
            else:
                low ^= hash64(high ^ self._keys[r]) & _mask(low_bits)
        return (high << low_bits) | low


def permute_each(index: NDArray[np.int64], n: NDArray[np.int64], key: NDArray[np.uint64]) -> NDArray[np.int64]:
    """Return the image of `index` under random permutations of range(n), a separate one for each element.

    For many short permutations at once: nothing is stored, and no Python runs per permutation.

    Parameters
    ----------
    index, n : (k,) int64
        Elements, and the lengths of their permutations; ``0 <= index < n < 2**32``.
    key : (k,) uint64
        Seed of each permutation, well mixed; equal keys and lengths give the same permutation.

    Notes
    -----
    Up to 16 elements exactly uniform (Knuth's shuffle, one hash per swap); above, a Feistel network of 8 rounds of
    additions modulo two factors whose product is just above n, with cycle walking: pairs of elements then occur at
    any pair of positions as often as expected by chance, to within 3 %.

    References
    ----------
    .. [1] Knuth, "The Art of Computer Programming", volume 2, algorithm 3.4.2P.
    .. [2] Black, Rogaway, "Ciphers with arbitrary finite domains", CT-RSA 2002, doi:10.1007/3-540-45760-7_9
       (generalised Feistel network, cycle walking).
    """
    return _split_by_length(index, n, key, -1, _encipher_each)


def find_each(value: NDArray[np.int64], n: NDArray[np.int64], key: NDArray[np.uint64]) -> NDArray[np.int64]:
    """Return the preimage of `value`: the inverse of `permute_each`, with the same parameters."""
    return _split_by_length(value, n, key, 1, _decipher_each)


def deal_quotas(shares: NDArray[np.float64]) -> tuple[NDArray[np.uint64], NDArray[np.int64]]:
    """Return the tables of the alias method: thresholds (k,) uint64 up to 2**32, and aliases (k,).

    Parameters
    ----------
    shares : (k,) float64
        Probabilities up to a factor, none below 0, at least one above. They are preserved to within 2**-32 of their
        sum; the tables are computed in integers, so they are the same on any machine.

    References
    ----------
    .. [1] Walker, "An efficient method for generating discrete random variables with general distributions", ACM
       TOMS 1977, doi:10.1145/355744.355749; Vose, IEEE Trans. Softw. Eng. 1991, doi:10.1109/32.92917 (the tables).
    """
    full = 1 << 32
    shares = np.ldexp(shares, -math.frexp(float(shares.max()))[1])  # exact; keeps the sum of large shares finite
    k, total = shares.size, math.fsum(shares.tolist())
    dealt = np.floor(shares / total * k * full).astype(np.int64)
    dealt[np.argmax(shares)] += k * full - int(dealt.sum())
    small, large = np.flatnonzero(dealt < full).tolist(), np.flatnonzero(dealt >= full).tolist()
    quotas, alias = dealt.tolist(), list(range(k))
    thresholds = quotas.copy()
    while small:
        i, j = small.pop(), large[-1]
        thresholds[i], alias[i] = quotas[i], j
        quotas[j] -= full - quotas[i]
        if quotas[j] < full:
            small.append(large.pop())
    for i in large:
        thresholds[i] = full
    return np.array(thresholds, dtype=np.uint64), np.array(alias, dtype=np.int64)


def draw_each(
    hashes: NDArray[np.uint64], thresholds: NDArray[np.uint64], alias: NDArray[np.int64]
) -> NDArray[np.int64]:
    """Return one draw per 64-bit hash from the tables of `deal_quotas`; its upper half picks a slot."""
    slot = ((hashes >> _32) * np.uint64(alias.size) >> _32).astype(np.int64)
    return np.where((hashes & _mask(_32)) < thresholds[slot], slot, alias[slot])


def tosses_of(hashes: NDArray[np.uint64]) -> NDArray[np.float64]:
    """Return hashes as numbers in [0, 1)."""
    return (hashes >> np.uint64(11)).astype(np.float64) * 2.0**-53


def unit_hash(hashes: NDArray[np.uint64]) -> NDArray[np.float64]:
    """Return hashes as numbers in (0, 1), exclusive."""
    return np.asarray(((hashes >> np.uint64(12)).astype(np.float64) + 0.5) * 2.0**-52)


def log_hash(hashes: NDArray[np.uint64]) -> NDArray[np.float64]:
    """Return the natural logarithms of hashes taken as numbers by `unit_hash`; relative error below 1e-12.

    Uses only additions, multiplications and divisions, whose results, unlike np.log's, are the same everywhere. The
    series is that of atanh: ln m = 2 atanh((m - 1) / (m + 1)).
    """
    mantissa, exponent = np.frexp(unit_hash(hashes))
    is_low = mantissa < 0.7071067811865476
    mantissa, exponent = np.where(is_low, mantissa * 2, mantissa), np.where(is_low, exponent - 1, exponent)
    s = (mantissa - 1) / (mantissa + 1)
    square = s * s
    series = np.full_like(s, 1 / 17)
    for odd in range(15, 0, -2):
        series = series * square + 1 / odd
    return np.asarray(2 * s * series + exponent * 0.6931471805599453)


_32 = np.uint64(32)
_SHORT = 16
"""Up to this length `permute_each` shuffles by swaps."""
_STEP_KEYS = [np.uint64(key) for key in random_keys(_SHORT, 6)]
"""A distinct constant for each round and swap of `permute_each`."""
_ROUNDS = 8


def _split_by_length(
    start: NDArray[np.int64], n: NDArray[np.int64], key: NDArray[np.uint64], direction: int, step: StepEach
) -> NDArray[np.int64]:
    """Shuffle short permutations by swaps, last to first, or (`direction` 1) undo first to last; encipher the rest."""
    x, length = start.astype(np.uint64), n.astype(np.uint64)
    short = np.flatnonzero(n <= _SHORT)
    if short.size:
        swapped, lengths, keys = x[short], length[short], key[short]
        for j in range(1, int(lengths.max()))[::direction]:
            swapped = _swapped(swapped, lengths, keys, j)
        x[short] = swapped
    if short.size < x.size:
        long = np.flatnonzero(n > _SHORT) if short.size else slice(None)
        x[long] = _walk_each(x[long], length[long], key[long], step)
    return x.astype(np.int64)


def _swapped(x: NDArray[np.uint64], n: NDArray[np.uint64], key: NDArray[np.uint64], j: int) -> NDArray[np.uint64]:
    """Swap j with a random element of 0..j (inclusive), in permutations that have an element j."""
    upper = np.uint64(j)
    other = _below(upper + np.uint64(1), key ^ _STEP_KEYS[j])
    return np.where(n <= upper, x, np.where(x == upper, other, np.where(x == other, upper, x)))


def _walk_each(
    x: NDArray[np.uint64], n: NDArray[np.uint64], key: NDArray[np.uint64], step: StepEach
) -> NDArray[np.uint64]:
    low_n = np.ceil(np.sqrt(n)).astype(np.uint64)
    high_n = (n + low_n - np.uint64(1)) // low_n
    x = step(x, low_n, high_n, key)
    outside = np.flatnonzero(x >= n)
    while outside.size:
        x[outside] = step(x[outside], low_n[outside], high_n[outside], key[outside])
        outside = outside[x[outside] >= n[outside]]
    return x


def _encipher_each(
    x: NDArray[np.uint64], low_n: NDArray[np.uint64], high_n: NDArray[np.uint64], key: NDArray[np.uint64]
) -> NDArray[np.uint64]:
    high = x // low_n
    low = x - high * low_n
    for r in range(0, _ROUNDS, 2):
        low += _below(low_n, high ^ key ^ _STEP_KEYS[r])
        low -= low_n * (low >= low_n)
        high += _below(high_n, low ^ key ^ _STEP_KEYS[r + 1])
        high -= high_n * (high >= high_n)
    return high * low_n + low


def _decipher_each(
    x: NDArray[np.uint64], low_n: NDArray[np.uint64], high_n: NDArray[np.uint64], key: NDArray[np.uint64]
) -> NDArray[np.uint64]:
    high = x // low_n
    low = x - high * low_n
    for r in range(_ROUNDS - 2, -1, -2):
        high += high_n - _below(high_n, low ^ key ^ _STEP_KEYS[r + 1])
        high -= high_n * (high >= high_n)
        low += low_n - _below(low_n, high ^ key ^ _STEP_KEYS[r])
        low -= low_n * (low >= low_n)
    return high * low_n + low


def _below(n: NDArray[np.uint64] | np.uint64, x: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Return a hash of x in [0, n), n below 2**32."""
    return (hash64(x) >> _32) * n >> _32


def _mask(bits: np.uint64) -> np.uint64:
    return (np.uint64(1) << bits) - np.uint64(1)
