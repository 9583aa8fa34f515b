"""What goes wrong with a request, and when: a pure function of the knobs, the seed, the request and its attempt.

Nothing here depends on time or on the order in which requests arrive, so a run with the same seed meets the same
faults at the same requests, however many clients there are and however they are scheduled. A request that is repeated
draws anew, because its attempt is counted.
"""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass, fields
from functools import cached_property
from itertools import accumulate
from statistics import NormalDist
from typing import Any

KINDS = ("503", "429", "reset", "truncate", "corrupt", "stall")
"""At most one of them befalls a request."""

_NORMAL = NormalDist()


@dataclass(frozen=True)
class Faults:
    """The knobs. Rates are probabilities per request, from 0 to 1; together at most 1.

    Attributes
    ----------
    latency_ms, latency_sigma
        Time to the first byte: lognormal, by its median in milliseconds and the standard deviation of its logarithm.
    bandwidth, total_bandwidth
        Bytes per second of one connection, and of all together; 0 is no limit.
    p_503
        The answer is ``503 SlowDown``.
    p_429
        The answer is ``429 TooManyRequests``.
    p_reset
        The connection is reset, after a part of the body where there is one.
    p_truncate
        The body ends early, and the connection with it; only of objects that are read.
    p_corrupt
        One byte of the body is another; only of objects that are read.
    p_stall
        The answer stops for `stall_s` seconds, after a part of the body where there is one, and then goes on.
    stall_s
        Seconds; a change holds for the answers that have stopped, too.
    most_in_a_row
        No request meets more faults one after the other than this; 0 is no limit. With it, a client that tries often
        enough gets everything.
    seed
        Of all that is drawn.
    """

    latency_ms: float = 0.0
    latency_sigma: float = 0.0
    bandwidth: float = 0.0
    total_bandwidth: float = 0.0
    p_503: float = 0.0
    p_429: float = 0.0
    p_reset: float = 0.0
    p_truncate: float = 0.0
    p_corrupt: float = 0.0
    p_stall: float = 0.0
    stall_s: float = 30.0
    most_in_a_row: int = 0
    seed: int = 0

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if not isinstance(value, (int, float)) or not value >= 0:
                raise ValueError(f"{field.name}={value!r}: expected a number of at least 0.")
        if sum(self.rates().values()) > 1 + 1e-9:
            raise ValueError(f"the rates {self.rates()} add up to more than 1.")

    def rates(self) -> dict[str, float]:
        """Return the probability of each kind of fault."""
        return {kind: getattr(self, f"p_{kind}") for kind in KINDS}

    @cached_property
    def bounds(self) -> list[tuple[str, float]]:
        """Kinds that may be drawn, and the numbers below which they are."""
        bounds = zip(self.rates(), accumulate(self.rates().values()), strict=True)
        return [(kind, bound) for kind, bound in bounds if self.rates()[kind]]

    @classmethod
    def of(cls, knobs: dict[str, Any]) -> Faults:
        """Return the faults of a dict of knobs; an unknown name is an error."""
        unknown = set(knobs) - {field.name for field in fields(cls)}
        if unknown:
            raise ValueError(f"no such knob: {', '.join(sorted(unknown))}.")
        return cls(**knobs)


@dataclass(frozen=True)
class Fate:
    """What befalls one request: wait before its first byte, kind of fault or None, how far into the body (0 to 1)."""

    latency_s: float = 0.0
    kind: str | None = None
    place: float = 0.0


def fate_of(faults: Faults, request: str, attempt: int) -> Fate:
    """Return what befalls the `attempt`-th (from 0) of equal requests: those of one method, address and range."""
    drawn, most = _draws(faults.seed, request, attempt), faults.most_in_a_row
    kind = _kind(faults, drawn[1])
    if kind and 0 < most <= attempt:
        before = (_draws(faults.seed, request, k)[1] for k in range(attempt - most, attempt))
        kind = None if all(_kind(faults, one) for one in before) else kind
    return Fate(_latency(faults, drawn[0]), kind, drawn[2])


def _latency(faults: Faults, drawn: float) -> float:
    if not faults.latency_ms:
        return 0.0
    deviation = _NORMAL.inv_cdf(min(max(drawn, 1e-12), 1 - 1e-12))
    return faults.latency_ms / 1e3 * math.exp(faults.latency_sigma * deviation)


def _kind(faults: Faults, drawn: float) -> str | None:
    return next((kind for kind, bound in faults.bounds if drawn < bound), None)


def _draws(seed: int, request: str, attempt: int) -> tuple[float, float, float]:
    """Return three independent numbers in [0, 1)."""
    digest = hashlib.blake2b(f"{seed}\0{attempt}\0{request}".encode(), digest_size=24).digest()
    first, second, third = (int.from_bytes(digest[i : i + 8], "little") / 2.0**64 for i in (0, 8, 16))
    return first, second, third
