"""Random permutations and keys as integer arithmetic: the same in any process, on any machine, with any NumPy.

No global generator, and no ``Generator`` method whose stream NumPy does not promise to keep: keys come from
``SeedSequence`` (a stated, stable algorithm), and everything after that is written out here. Seeds are mixed, never
added: seed 1000 epoch 0 has nothing to do with seed 0 epoch 1.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

MAX_TABLE = 1 << 20
"""Up to this length a permutation is a table made by sorting random keys (exactly uniform); above it is computed by
index."""


def random_keys(n: int, *words: int) -> NDArray[np.uint64]:
    """Return n 64-bit keys that depend on every one of `words` (non-negative, below 2**64) and on nothing else.

    References
    ----------
    .. [1] O'Neill, "Developing a seed_seq alternative", 2015 (NumPy's SeedSequence).
    """
    halves = [part for word in words for part in (word & 0xFFFFFFFF, word >> 32)]
    state = np.random.SeedSequence(halves).generate_state(n, np.uint64)
    return np.asarray(state, dtype=np.uint64)


def hash64(x: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Return a well mixed 64-bit hash of every element (a bijection).

    References
    ----------
    .. [1] Steele, Lea, Flood, "Fast splittable pseudorandom number generators", OOPSLA 2014,
    doi:10.1145/2660193.2660195
       (the finalizer of SplitMix64).
    """
    x = x + np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def permuted_table(n: int, key: int) -> NDArray[np.int64]:
    """Return a random permutation of range(n) as a table, shape (n,): the order of n hashed keys."""
    return np.argsort(hash64(np.arange(n, dtype=np.uint64) ^ np.uint64(key)))  # no ties: the hash is a bijection


class Permutation:
    """A random permutation of range(n) whose every element can be computed alone.

    Up to `MAX_TABLE` elements it is a table; above, an unbalanced Feistel network of 8 rounds on the smallest power of
    two that holds n, walked along its cycle until the value falls below n (fewer than two steps on average).

    Parameters
    ----------
    n
        Length, at least 1.
    *words
        What it depends on (seed, epoch, purpose ...).

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
        """Return the elements at `index`, each in [0, n); shape of `index`."""
        if self._table is not None:
            return self._table[index]
        return self._walk(index, self._encipher)

    def find(self, value: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the places at which the values stand: ``p.find(p[i]) == i``."""
        if self._table is not None:
            inverse = np.empty_like(self._table)
            inverse[self._table] = np.arange(self.n)
            return inverse[value]
        return self._walk(value, self._decipher)

    def _walk(self, start: NDArray[np.int64], step: _Step) -> NDArray[np.int64]:
        x = step(np.asarray(start).astype(np.uint64))
        outside = np.flatnonzero(x >= self.n)
        while outside.size:
            x[outside] = step(x[outside])
            outside = outside[x[outside] >= self.n]
        return x.astype(np.int64)

    def _encipher(self, x: NDArray[np.uint64]) -> NDArray[np.uint64]:
        low_bits, high_bits = np.uint64(self._low_bits), np.uint64(self._high_bits)
        low, high = x & _mask(low_bits), x >> low_bits
        for r in range(0, self.ROUNDS, 2):
            low ^= hash64(high ^ self._keys[r]) & _mask(low_bits)
            high ^= hash64(low ^ self._keys[r + 1]) & _mask(high_bits)
        return (high << low_bits) | low

    def _decipher(self, x: NDArray[np.uint64]) -> NDArray[np.uint64]:
        low_bits, high_bits = np.uint64(self._low_bits), np.uint64(self._high_bits)
        low, high = x & _mask(low_bits), x >> low_bits
        for r in range(self.ROUNDS - 2, -1, -2):
            high ^= hash64(low ^ self._keys[r + 1]) & _mask(high_bits)
            low ^= hash64(high ^ self._keys[r]) & _mask(low_bits)
        return (high << low_bits) | low


class _Step(Protocol):
    def __call__(self, x: NDArray[np.uint64]) -> NDArray[np.uint64]: ...


def _mask(bits: np.uint64) -> np.uint64:
    return (np.uint64(1) << bits) - np.uint64(1)
