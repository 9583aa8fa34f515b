"""Plan: from (seed, epoch) to the rows of a fetch, and from those to what must be read.

The ceiling of the order is NumPy's own permutation of as many row numbers: the least that any shuffle must do.
"""

from __future__ import annotations

import time
import tracemalloc

import numpy as np

from benchmarks.stages import Rate, Setting, best_s
from gpuload.plan import Plan
from gpuload.sampling import Shuffled

N_PLANNED = 50
"""Fetches, evenly spread over the epoch, that stand for all."""


def measure(setting: Setting, n_obs: int = 100_000_000) -> list[Rate]:
    """Measure an epoch of a huge data set in both block sizes, and the recipes of the file at hand."""
    return [_order(setting, n_obs, block_size) for block_size in (16, 1)] + [_recipes(setting)]


def _order(setting: Setting, n_obs: int, block_size: int) -> Rate:
    """Time the order of rows; memory is what an epoch allocates at its peak."""
    rows = setting.batch_size * setting.fetch_factor
    tracemalloc.start()
    start = time.perf_counter()
    plan = Plan(Shuffled((n_obs,), block_size), setting.batch_size, setting.fetch_factor)
    plan.fetch(0)
    first_s = time.perf_counter() - start
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    chosen = np.linspace(0, max(0, plan.n_fetches - 2), min(N_PLANNED, plan.n_fetches)).astype(int).tolist()
    seconds = best_s(lambda: [plan.fetch(index) for index in chosen], 2) / len(chosen)
    rng = np.random.default_rng(0)
    ceiling_s = best_s(lambda: rng.permutation(rows), setting.repeats)
    notes = {"first_fetch_s": first_s, "epoch_s": seconds * plan.n_fetches, "peak_mib": peak / 2**20}
    n_rows = min(rows, n_obs)
    what = f"order of {n_obs:,} cells, block_size {block_size}"
    return Rate("plan", what, "cells", n_rows / seconds, rows / ceiling_s, "numpy permutation", n_rows / seconds, notes)


def _recipes(setting: Setting) -> Rate:
    """Time the way from row ranges to extents, chunks and pieces."""
    rows = sum(fetch.n_rows for fetch in setting.fetches)
    seconds = best_s(lambda: [setting.store.recipe(fetch.ranges) for fetch in setting.fetches], 2)
    indptr = setting.store.matrices[0].indptr if setting.store.kind == "csr" else np.zeros(setting.store.n_obs + 1)
    wanted = [fetch.rows() for fetch in setting.fetches]
    ceiling_s = best_s(lambda: [np.cumsum(indptr[w + 1] - indptr[w]) for w in wanted], setting.repeats)
    ceiling_is = "indptr of the fetch"
    return Rate("plan", "recipes of the file", "cells", rows / seconds, rows / ceiling_s, ceiling_is, rows / seconds)
