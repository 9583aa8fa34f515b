"""Parameters of which `make test` runs a part in which each pair of values occurs, and `make test-all` all."""

from __future__ import annotations

from itertools import combinations_with_replacement, product
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from collections.abc import Iterable


def in_pairs(*factors: Iterable[Any]) -> list[Any]:
    """Return the product of factors as parameters; the pairs are those of values of two factors."""
    return _marked([(row, frozenset(enumerate(map(repr, row)))) for row in product(*factors)])


def words_in_pairs(names: Iterable[str], between: str = "-") -> list[Any]:
    """Return names as parameters; the pairs are those of a name's words, wherever they stand."""
    return _marked([((name,), frozenset(name.split(between))) for name in names])


def _marked(rows: list[tuple[tuple[Any, ...], frozenset[Any]]]) -> list[Any]:
    pairs = [set(combinations_with_replacement(sorted(values), 2)) for _, values in rows]
    left, chosen = set().union(*pairs), set()
    while left:
        best = max(range(len(rows)), key=lambda k: len(pairs[k] & left))  # the first of those with most
        chosen.add(best)
        left -= pairs[best]
    return [pytest.param(*row, marks=() if k in chosen else pytest.mark.slow) for k, (row, _) in enumerate(rows)]
