"""Outlooks, tuning and what ``gpuload inspect`` and ``gpuload tune`` make of them, on a small file."""

from __future__ import annotations

import inspect
import json
import os
import subprocess
import sys
from contextlib import closing
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
from scipy.sparse import csr_matrix

import gpuload
from benchmarks import run_tune
from gpuload.cli import advice, main, text
from gpuload.diversity import entropy_of_runs, measure_entropy
from gpuload.errors import PlanError, ReadError
from gpuload.formats import open_store
from gpuload.formats.addresses import at_addresses
from gpuload.formats.obs import write_h5ad
from gpuload.outlook import MAX_FETCH_FACTOR, Outlook, Outlooks, Pace, open_part
from gpuload.plan import DEFAULT_BLOCK_SIZE
from gpuload.synthetic import tahoe_shaped
from gpuload.tune import PREFETCHES, Bench, Trial, Wish, choose, tune
from gpuload.types import Form
from tests import writers

MIB = 1 << 20

FEW_FETCHES = 0.1
"""Bits: 128 fetches are planned, and the entropy of one of 32 cells spreads by 0.4: three standard errors."""


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    """Return a gzip file of 1,500 cells, sorted by plate."""
    path = tmp_path_factory.mktemp("tune") / "cells.h5ad"
    X, obs, var = tahoe_shaped(1_500, n_vars=400, n_plates=4, n_cell_lines=3, n_drugs=5)
    write_h5ad(path, X, obs, var, "gzip")
    return path


@pytest.fixture
def run(in_process):
    """Return a function that runs the command line; see `in_process`."""
    return partial(in_process, main)


@pytest.fixture
def store(path):
    """Return the file, open with two columns."""
    with closing(open_store(path, layer="X", obs=("plate", "gene_count", "pass_filter"))) as store:
        yield store


# --- outlooks ---


@pytest.mark.parametrize("block_size", [1, 8, 64, "chunk", "2 chunks"])
def test_outlook_matches_what_the_engine_does(path, store, block_size):
    """Bytes per cell and the label's entropy, against a loader that verifies nothing."""
    outlook = Outlooks(store, 8, "plate").of(block_size, 6)
    sizes = {"batch_size": 8, "block_size": block_size, "fetch_factor": 6}
    with gpuload.open_loader(path, obs=["plate"], verify="never", **sizes) as loader:
        for _ in range(4):
            list(loader)
        stats = loader.stats
        read, decoded = stats.read_nbytes / stats.n_rows, stats.decoded_nbytes / stats.n_rows
        found = measure_entropy(loader, "plate", 1_000)
    assert outlook.read_nbytes == pytest.approx(read, rel=0.1)
    assert outlook.decoded_nbytes == pytest.approx(decoded, rel=0.1)
    assert outlook.entropy_bits == pytest.approx(found.mean, abs=4 * found.sd / np.sqrt(1_000) + 0.03)


def test_long_blocks_cost_less_and_mix_less(store):
    outlooks = Outlooks(store, 16, "plate")
    pace = Pace(1e-9, 1e-8, 1e-6, 2)
    few, many = outlooks.of(64, 2, pace), outlooks.of(4, 2, pace)
    assert few.cells_per_s > many.cells_per_s
    assert few.decoded_nbytes < many.decoded_nbytes
    assert few.entropy_bits < many.entropy_bits
    assert few.cells_per_s == pytest.approx(2 / (few.read_nbytes * 1e-9 + few.decoded_nbytes * 1e-8 + 1e-6))
    codes = store.obs["plate"].values
    expected = entropy_of_runs(codes, batch_size=16, block_size=64, fetch_factor=2).bits
    assert few.entropy_bits == expected
    assert outlooks.why_not_model(64, 2).startswith("the model of one label per block fails: ") or expected == 0


def test_large_files_are_judged_by_planned_fetches(store, monkeypatch):
    outlooks = Outlooks(store, 8, "plate")
    exact = [outlooks.entropy(b, 4) for b in (1, 16, 64)]
    monkeypatch.setattr("gpuload.outlook.EXACT_CELLS", 100)
    assert [outlooks.entropy(b, 4) for b in (1, 16, 64)] == pytest.approx(exact, abs=FEW_FETCHES)


def test_many_labels_are_judged_by_planned_fetches(store, monkeypatch):
    outlooks = Outlooks(store, 8, "plate")
    exact = [outlooks.entropy(b, 4) for b in (1, 16, 64)]
    monkeypatch.setattr("gpuload.outlook.EXACT_LABELS", 1)
    monkeypatch.setattr("gpuload.outlook.entropy_of_runs", None)  # must not be called: it takes time for every label
    assert [outlooks.entropy(b, 4) for b in (1, 16, 64)] == pytest.approx(exact, abs=FEW_FETCHES)
    assert "labels are too many" in outlooks.why_not_model(16, 4)


def test_whole_numbers_are_labels_and_fractions_are_not(store, tmp_path):
    assert Outlooks(store, 8, "pass_filter").random_bits > 0
    other = tmp_path / "cells.h5ad"
    writers.write_plain(other)
    with (
        closing(open_store(other, layer="X", obs=("depth",))) as fractions,
        pytest.raises(PlanError, match=r"^label='depth': this column holds fractions; choose one that names groups of"),
    ):
        Outlooks(fractions, 8, "depth")


def test_without_a_label_blocks_are_counted():
    assert Outlook(16, 16, 16.0, 1.0, 1.0, 1.0, float("nan"), n_blocks=64.0).mixes(float("nan"))
    assert not Outlook(16, 16, 16.0, 1.0, 1.0, 1.0, float("nan"), n_blocks=63.9).mixes(float("nan"))


def test_a_fetch_of_the_whole_file_is_true_random_order(store):
    """1,500 cells: 188 minibatches of 8 hold them all, 187 do not."""
    outlooks = Outlooks(store, 8, "plate")
    assert outlooks.largest() == 188
    assert outlooks.sizes(188) == (DEFAULT_BLOCK_SIZE,)
    assert len(outlooks.sizes(187)) == 9
    found = {size: outlooks.of(size, 188) for size in (1, 64, "chunk")}
    assert {o.entropy_bits for o in found.values()} == {found[64].entropy_bits}
    assert found[64].entropy_bits == pytest.approx(outlooks.random_bits, abs=0.005)
    unlabelled = Outlooks(store, 30, None)
    assert unlabelled.of("chunk", 50).mixes(float("nan"))  # of few blocks, but of all cells
    assert not unlabelled.of("4 chunks", 49).mixes(float("nan"))
    assert Outlooks(store, 1, None).largest() == 256


def test_assumed_defaults_match_open_loader(path):
    parameters = inspect.signature(gpuload.open_loader).parameters
    assert (parameters["fetch_factor"].default, parameters["prefetch"].default) == (MAX_FETCH_FACTOR, PREFETCHES[1])
    with gpuload.open_loader(path) as plain, gpuload.open_loader(path, block_size=DEFAULT_BLOCK_SIZE) as said:
        assert all(np.array_equal(a.rows, b.rows) for a, b in zip(plain, said, strict=True))


# --- tuning ---


def test_tuned_settings_meet_the_request(path, tmp_path, monkeypatch):
    monkeypatch.setattr("gpuload.tune._Turns._fits", lambda self, trial: True)  # however busy the machine is
    parts = []
    wish = Wish(200 * MIB, "plate", 0.97, batch_size=8, device="cpu", seconds=0.2)
    tuned = tune(path, wish, parts.append)
    assert parts == sorted(parts)
    assert 0 < parts[0] <= parts[-1] == 1
    assert tuned.best in tuned.trials
    assert tuned.settings["batch_size"] == 8
    assert tuned.best.cells_per_s >= 0.97 * max(t.cells_per_s for t in tuned.trials)
    assert all(t.memory_nbytes <= 200 * MIB for t in tuned.trials)
    random = tuned.measured["random_entropy_bits"]
    assert all(t.entropy_bits >= 0.97 * random for t in tuned.trials)
    assert {t.num_threads for t in tuned.trials} >= {1, 2}
    assert len({t.prefetch for t in tuned.trials}) == 3
    with gpuload.open_loader(path, obs=["plate"], settings=tuned.settings) as loader:
        found = measure_entropy(loader, "plate", 600)
        assert sum(loader.memory().values()) <= tuned.best.memory_nbytes
    assert found.mean >= 0.97 * random - 4 * found.sd / np.sqrt(600)
    json.dumps(tuned.measured)
    assert tuned.measured["n_obs"] == 1_500
    assert tuned.measured["asked"]["label"] == "plate"


def test_memory_limit_is_respected(store):
    bench = Bench(store, Wish(MIB, "plate", batch_size=8))
    bench.cores = 2
    enough = bench.memory_nbytes(4, 2, 2)
    for more, most in ((1, 4), (1_000, 4), (-100, 3)):
        limited = Bench(store, Wish(enough + more, "plate", batch_size=8))
        limited.cores = 2
        assert limited.fetch_factors()[0] == most
        assert all(limited.memory_nbytes(n, 2, 2) <= enough + more for n in limited.fetch_factors())
        near = limited.neighbours(Trial(16, most, 2, 2, 0, 1.0))
        assert {(t.num_threads, t.prefetch) for t in near} == {(1, 2), (2, 1)}  # more threads, or more ahead, take more
        assert all(t.memory_nbytes <= enough + more for t in near)
    ample = Bench(store, Wish(1 << 30, "plate", batch_size=8))
    ample.cores = 2
    assert ample.fetch_factors() == [188, 94, 47, 11]  # all cells at most
    assert len(ample.neighbours(Trial(16, 188, 2, 2, 0, 1.0))) == 4
    small = "^memory: {} MB do not hold the smallest fetches, which take {} MB with batch_size={}; allow more, or {}.$"
    for megabytes, batch_size, cure in (
        (3, 64, r"run it on fewer cores \(taskset\): 2 threads take 34 MB of it"),
        (40, 10_000, "use fewer cells per minibatch"),
    ):
        limited = Bench(store, Wish(megabytes * 1_000_000, batch_size=batch_size))
        limited.cores = 2
        with pytest.raises(PlanError, match=small.format(megabytes, r"\d+", batch_size, cure)):
            limited.fetch_factors()


def test_memory_estimate_includes_large_chunks(tmp_path):
    """The chunk is decoded whole, 8 MB, and unshuffled from one copy into another."""
    path, X = tmp_path / "cells.h5ad", np.ones((1000, 2000), dtype=np.float32)
    stored = {"chunks": X.shape, "compression": "gzip", "shuffle": True}
    writers.write_h5ad(path, lambda file: writers.write_dense(file, "X", X, **stored), *X.shape)
    with closing(open_store(path, layer="X", obs=())) as store:
        estimated = Bench(store, Wish(1 << 30, batch_size=1)).memory_nbytes(8, 1, 1)
    with gpuload.open_loader(path, batch_size=1, fetch_factor=8, num_threads=1, prefetch=1) as loader:
        next(iter(loader))
        parts = loader.memory()
    assert 16 * MIB < parts["scratch"] <= sum(parts.values()) <= estimated


@pytest.mark.parametrize("output", ["dense", "csr"])
def test_memory_estimate_is_of_the_values_of_the_dtype(store, output):
    """Cells wait as float32, or float64, and CSR minibatches also have 4 bytes of column number for each value."""
    single, double = (
        Bench(store, Wish(1 << 30, batch_size=8, output=output, dtype=dtype)) for dtype in ("float32", "float64")
    )
    of_batch = store.n_vars if output == "dense" else store.values_per_row
    for fetch_factor, prefetch in ((1, 1), (4, 3)):
        n_cells, sizes = 8 * fetch_factor * (prefetch + 1), (fetch_factor, 2, prefetch)
        more = double.memory_nbytes(*sizes) - single.memory_nbytes(*sizes)
        assert more == pytest.approx(4 * (n_cells * store.values_per_row + 12 * 8 * of_batch), abs=1)


GROWTH_OF_MEMORY = """
import json, re, sys
from itertools import islice
import gpuload

def status(name):
    with open("/proc/self/status") as file:
        return int(re.search(name + r":\\s+(\\d+) kB", file.read())[1]) << 10

address, reached, few, many = sys.argv[1], *map(json.loads, sys.argv[2:])
for settings in (few, many):
    before = status("VmRSS")
    with gpuload.open_loader(address, device="cpu", storage_options=reached, **settings) as loader:
        for batch in islice(loader, 8 * settings["fetch_factor"]):
            pass
print(status("VmHWM") - before)
"""


def test_memory_estimate_includes_bytes_in_transfer(tmp_path, monkeypatch):
    """These bytes exist twice, as responses and assembled; the process has done the same on a small scale before."""
    pytest.importorskip("obstore")
    from benchmarks.s3server import start

    monkeypatch.setenv("GPULOAD_INDEX", "off")
    (tmp_path / "data").mkdir()
    n_obs, n_vars, n_values = 16_000, 2_000, 1_000
    rng = np.random.default_rng(0)
    indices = np.tile(np.arange(0, n_vars, 2, dtype=np.int32), n_obs)
    X = csr_matrix((rng.random(indices.size, np.float32), indices, np.arange(n_obs + 1) * n_values), (n_obs, n_vars))
    path, stored = tmp_path / "data/cells.h5ad", {"chunks": (65_536,)}
    writers.write_h5ad(path, lambda file: writers.write_csr(file, "X", X, data=stored, indices=stored), *X.shape)
    few = {"batch_size": 64, "fetch_factor": 1, "num_threads": 2, "prefetch": 1}
    many = {"batch_size": 64, "fetch_factor": 32, "num_threads": 2, "prefetch": 2}
    with start(tmp_path, latency_ms=20) as server:
        reached = {"endpoint": server.url, "region": "us-east-1", "anonymous": True}
        command = [sys.executable, "-W", "ignore", "-c", GROWTH_OF_MEMORY, "s3://data/cells.h5ad"]
        command += [json.dumps(each) for each in (reached, few, many)]
        done = subprocess.run(command, check=False, timeout=120, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        far = open_store(at_addresses("s3://data/cells.h5ad", None, reached), layer="X", obs=())
        with closing(far), closing(open_store(path, layer="X", obs=())) as near:
            bench = Bench(far, Wish(1 << 30))
            read_nbytes = bench.outlooks.of(DEFAULT_BLOCK_SIZE, 32).read_nbytes
            estimated = bench.memory_nbytes(32, 2, 2, read_nbytes)
            of_a_file = Bench(near, Wish(1 << 30)).memory_nbytes(32, 2, 2, read_nbytes)
            assert all(t.memory_nbytes <= 200e6 for t in Bench(far, Wish(200_000_000)).first_trials())
    assert of_a_file < int(done.stdout) <= estimated


def test_smallest_of_equally_fast_settings_is_chosen():
    trials = [
        Trial(16, 64, 2, 2, 900, 1.0, (100.0, 90.0)),
        Trial(16, 16, 4, 2, 300, 1.0, (98.0,)),
        Trial(16, 16, 2, 2, 300, 1.0, (97.5,)),
        Trial(16, 4, 2, 2, 100, 1.0, (96.0, 10.0)),
    ]
    assert choose(trials) is trials[2]
    assert trials[0].cells_per_s == 100


def test_choice_is_never_worse_than_the_defaults():
    default = Trial(16, 256, 2, 2, 900, 1.5, (100.0,))
    small = Trial(16, 16, 2, 2, 300, 1.4, (98.0,))
    mixed = replace(small, entropy_bits=1.5)
    faster = replace(small, repeats=(100.5,))
    assert choose([default, small]) is small
    assert choose([default, small], default) is default
    assert choose([default, mixed], default) is mixed
    assert choose([default, faster], default) is faster
    best = replace(faster, block_size="chunk", memory_nbytes=1_000, repeats=(101.0,))
    assert choose([best, default, small], default) is default  # the least memory but for `small`
    unlabelled = [replace(t, entropy_bits=float("nan"), n_blocks=n) for t, n in ((default, 1024.0), (small, 64.0))]
    assert choose(unlabelled) is unlabelled[1]
    assert choose(unlabelled, unlabelled[0]) is unlabelled[0]
    whole = replace(unlabelled[1], n_blocks=float("inf"))
    assert choose([unlabelled[0], whole], unlabelled[0]) is whole


@pytest.mark.parametrize("label", ["plate", None])
def test_the_defaults_are_timed_as_often_as_the_finalists(path, label, monkeypatch):
    """The model rates them as far too slow, and their first turns are the slowest of all."""
    speed = {16: 1.0, 64: 100.0}
    monkeypatch.setattr(Pace, "cells_per_s", lambda self, o: speed.get(o.block_size, 90.0))

    def rate(self, trial, turn, seconds):
        if (trial.block_size, trial.fetch_factor) != (16, 94):
            return 1_000.0
        return 1_100.0 if turn == 3 else 500.0

    monkeypatch.setattr(Bench, "time", rate)
    tuned = tune(path, Wish(200 * MIB, label, 0.5, batch_size=16, device="cpu"))
    assert (tuned.settings["block_size"], tuned.settings["fetch_factor"]) == (16, 94)  # 94 * 16 cells are all
    assert tuned.best.repeats == (500.0, 500.0, 500.0, 1_100.0)


@pytest.mark.parametrize(("seconds", "cells_per_s"), [(8, 1_000.0), (20, 1_000.0), (60, 1_000.0), (8, 100.0)])
def test_turns_that_would_not_end_in_time_are_left_out(path, monkeypatch, seconds, cells_per_s):
    """A turn reads two fetches after those loaded ahead; two of the turns are not optional."""
    now, planning_s, default = 0.0, 100.0, (16, 94, 2, 2)  # 94 * 16 cells are all

    def rate(self, trial, turn, least_s):
        nonlocal now
        fetch_s = min(16 * trial.fetch_factor, 1_500) / cells_per_s
        now += trial.prefetch * fetch_s + max(least_s, 2 * fetch_s)
        return cells_per_s

    def planned(*_):
        nonlocal now
        now += planning_s
        return Pace(1e-9, 1e-8, 1e-6, 2)

    monkeypatch.setattr("gpuload.tune.time", SimpleNamespace(perf_counter=lambda: now))
    monkeypatch.setattr("gpuload.tune.usable_cores", lambda: 2)
    monkeypatch.setattr("gpuload.tune.measure_pace", planned)
    monkeypatch.setattr(Bench, "time", rate)
    tuned = tune(path, Wish(200 * MIB, "plate", 0.5, batch_size=16, device="cpu", seconds=seconds))
    n_turns = [len(trial.repeats) for trial in tuned.trials]
    assert min(n_turns) >= 1
    assert default in [trial.key for trial in tuned.trials]
    assert now - planning_s <= seconds or sum(n_turns) <= 2
    assert tuned.measured["timed"].startswith(f"{now - planning_s:.0f} s of real reads")
    assert sum(n_turns) > 2 or seconds < 20


@pytest.mark.parametrize("label", ["plate", None])
def test_tune_never_advises_worse_than_the_defaults(path, label, monkeypatch):
    """All but the defaults are 2 % slower, which counts as equally fast, and some take less memory."""
    # Measured on a busy machine, it may rule all others out; blocks of 1 mix as well as the defaults.
    monkeypatch.setattr(Pace, "cells_per_s", lambda self, o: 1.0 if o.block_size == 1 else 100.0)
    monkeypatch.setattr(Bench, "time", lambda self, t, *_: 1_000.0 if t.key == self.default else 980.0)
    monkeypatch.setattr(Bench, "neighbours", lambda self, trial: [])
    tuned = tune(path, Wish(200 * MIB, label, 0.5, batch_size=16, device="cpu"))
    assert any(t.memory_nbytes < tuned.best.memory_nbytes for t in tuned.trials)
    assert tuned.settings["fetch_factor"] == 94  # 94 * 16 cells are all


def test_inspect_never_advises_worse_than_the_defaults(store, monkeypatch):
    """Two settings promise nearly what the defaults do; only the one that mixes better may be advised."""
    speed = {(16, 40): 100.0, (8, 10): 97.0, (16, 10): 96.0, (8, 40): 90.0}
    monkeypatch.setattr(Outlooks, "entropy", lambda self, b, f: self.random_bits * (1.0 if f == 40 else 0.995))
    monkeypatch.setattr(Pace, "cells_per_s", lambda self, o: speed.get((o.block_size, o.fetch_factor), 10.0))
    monkeypatch.setattr("gpuload.outlook.MAX_FETCH_FACTOR", 40)
    found = advice.advise(store, 8, "plate", 1 << 40)
    assert (found.block_size, found.fetch_factor, found.fetch_cells) == (16, 40, 320)
    speed[8, 10] = 100.0
    found = advice.advise(store, 8, "plate", 1 << 40)
    assert (found.block_size, found.fetch_factor) == (8, 10)


def test_inspect_advises_the_whole_file_if_it_is_small(store):
    found = advice.advise(store, 64, "plate", 1 << 40)
    assert (found.fetch_factor, found.fetch_cells) == (24, 1_500)
    assert found.reasons[0].startswith("fetch_factor=24: 1,500 cells resident, the whole file, which is true random")


def test_inspect_says_what_a_cache_of_all_cells_takes(path, tmp_path):
    with closing(open_store(path, layer="X", obs=())) as store:
        n_values = int(store.matrices[0].indptr[-1])
        least = 3 * n_values  # two bytes of a gene number below 400, and one of a count
        said = advice.advise(store, 64, None, 2 * least).reasons[-1]
        assert said.startswith(f"memory_cache: decoded, all cells take {text.size(least)} if their values are counts")
        assert f"{text.size(6 * n_values)} at most" in said
        assert "memory_cache" not in " ".join(advice.advise(store, 64, None, 2 * least - 1).reasons)
    plain = tmp_path / "plain.h5ad"
    write_h5ad(plain, *tahoe_shaped(50, n_vars=40), None)
    with closing(open_store(plain, layer="X", obs=())) as store:
        assert "memory_cache" not in " ".join(advice.advise(store, 64, None, 1 << 40).reasons)


def test_tune_says_what_a_cache_of_all_cells_takes(path, capsys, monkeypatch):
    with closing(open_store(path, layer="X", obs=())) as store:
        n_values = int(store.matrices[0].indptr[-1])
    command = ["tune", str(path), "--seconds", "0.1"]
    assert main(command) == 0
    said = f"memory_cache: decoded, all cells take {text.size(3 * n_values)} if their values are counts below 256, and"
    assert said in capsys.readouterr().out
    assert main([*command, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["measured"]["memory_cache_nbytes"] == [3 * n_values, 6 * n_values]
    monkeypatch.setattr("gpuload.cli.tune.available_memory", lambda: 6 * n_values - 1)
    assert main([*command, "--memory", "1GiB"]) == 0
    assert "memory_cache" not in capsys.readouterr().out


@pytest.mark.slow
def test_slow_candidates_are_skipped_and_the_best_timed_first(store, monkeypatch):
    speed = {1: 10.0, 4: 59.0, 8: 61.0, 16: 80.0, 32: 90.0, 64: 100.0}
    monkeypatch.setattr(Pace, "cells_per_s", lambda self, o: speed.get(o.block_size, 20.0))
    bench = Bench(store, Wish(200 * MIB, "plate", 0.0, batch_size=32))
    assert bench.fetch_factors() == [47, 23, 11, 2]
    assert [t.block_size for t in bench.first_trials()] == [64, 64, 64, 32, 32, 32, 16]
    monkeypatch.setattr("gpuload.tune._MOST_TIMED", 100)
    assert [t.block_size for t in bench.first_trials()] == [64] * 3 + [32] * 3 + [16] * 4 + [8] * 3
    assert {(t.num_threads, t.prefetch) for t in bench.first_trials()} == {(bench.cores, 2)}
    monkeypatch.setitem(speed, 16, 1.0)
    assert [t.key for t in bench.first_trials() if t.block_size == 16] == [(16, 47, bench.cores, 2)]  # the default


@pytest.mark.parametrize(
    ("wish", "message"),
    [
        (
            Wish(200 * MIB, "plate", 1.0, batch_size=64),
            r"^min_entropy=1\.0: no candidate mixes 'plate' that well; the best reaches 0\.999 of .* \(block_size=1, ",
        ),
        (
            Wish(200 * MIB, None, batch_size=1_000),
            None,
        ),
    ],
)
def test_error_on_impossible_wishes_suggests_possible_ones(path, wish, message, monkeypatch):
    if message is None:
        monkeypatch.setattr("gpuload.outlook.BLOCKS_PER_FETCH", 5_000)
        monkeypatch.setattr("gpuload.outlook.MAX_FETCH_FACTOR", 1)
        message = (
            r"^no fetch of at most 1000 cells has enough blocks; allow more memory, or name a label to judge by\.$"
        )
    else:
        monkeypatch.setattr("gpuload.outlook.BLOCK_SIZES", (64, 1))
        monkeypatch.setattr("gpuload.outlook.MAX_FETCH_FACTOR", 4)
        monkeypatch.setattr(Outlooks, "entropy", lambda self, b, f: self.random_bits * (0.999 if b == 1 else 0.5))
    with pytest.raises(PlanError, match=message):
        tune(path, wish)


@pytest.mark.parametrize("output", ["dense", "csr"])
def test_trials_of_float64_read_what_is_stored(tmp_path, output):
    X = writers.counts().astype(np.float64) * (1 + 2.0**-30)
    writers.write_plain(tmp_path / "cells.h5ad", X)
    with closing(open_store(tmp_path / "cells.h5ad", layer="X", obs=())) as store:
        form = Form(output, "float64", store.n_vars, store.columns())
        with open_part(store, Outlooks(store, 8, None).plan(16, 4), form, 1, device="cpu", num_threads=1) as loader:
            for batch in loader:
                found = batch.X.toarray() if output == "csr" else batch.X
                np.testing.assert_array_equal(found, X[batch.rows].toarray())


def test_a_trial_leaves_the_files_open_and_sees_that_one_changed(tmp_path):
    paths = [tmp_path / "a.h5ad", tmp_path / "b.h5ad"]
    for path in paths:
        writers.write_plain(path, writers.counts())
    with closing(open_store(paths, layer="X", obs=())) as store:
        form, plan = Form("dense", "float32", store.n_vars, store.columns()), Outlooks(store, 8, None).plan(16, 4)
        opened = partial(open_part, store, plan, form, 1, device="cpu", num_threads=1)
        for _ in range(2):
            with opened() as loader:
                assert sum(len(batch) for batch in loader) == store.n_obs
        os.utime(paths[1], (0, 0))
        with opened() as loader, pytest.raises(ReadError, match=r"b\.h5ad: the file was changed while it was open"):
            list(loader)


def test_tuning_without_cells_is_refused(tmp_path):
    empty = tmp_path / "empty.h5ad"
    writers.write_plain(empty, writers.counts(0, 5))
    with pytest.raises(PlanError, match=r"empty\.h5ad: there are no cells to time; pass"):
        tune(empty, Wish(200 * MIB))


# --- the commands ---


def test_tune_writes_settings_that_a_loader_accepts(run, path, tmp_path):
    out = tmp_path / "settings.json"
    arguments = ("--label", "plate", "--memory", "0.2GiB", "--min-entropy", "0.95", "--batch-size", 8, "--seconds", 0.1)
    code, said, err = run("tune", path, *arguments, "--out", out)
    assert (code, err) == (0, "")
    assert f"gpuload.open_loader('{path}', settings='{out}')" in said
    assert " <-" in said
    assert "% of true random order's" in said
    content = json.loads(out.read_text())
    assert set(content) == {"settings", "measured"}
    assert set(content["settings"]) == {"batch_size", "block_size", "fetch_factor", "num_threads", "prefetch"}
    assert content["measured"]["paths"] == [str(path)]
    assert content["measured"]["asked"]["memory_nbytes"] == int(0.2 * (1 << 30))
    with gpuload.open_loader(path, settings=out) as loader:
        assert loader.batch_size == 8


def test_bench_reads_the_settings_file_and_options_override_it(run, path, tmp_path):
    saved = {"batch_size": 8, "block_size": "chunk", "fetch_factor": 3, "shuffle": False, "output": "csr"}
    with gpuload.open_loader(path) as loader:
        genes = list(loader.var_names[:5])
    (tmp_path / "settings.json").write_text(json.dumps({"settings": {**saved, "genes": genes}}))
    given = ("--settings", tmp_path / "settings.json", "--seconds", 0.05, "--repeats", 1, "--json")
    code, said, err = run("bench", path, "--fetch-factor", 2, *given)
    found = json.loads(said)
    assert (code, err) == (0, "")
    assert {name: found[name] for name in saved} == {**saved, "fetch_factor": 2}
    assert (found["genes"], found["n_vars"]) == (genes, 5)
    assert (found["prefetch"], found["seed"], found["drop_last"]) == (2, 0, False), "defaults"
    (tmp_path / "settings.json").write_text(json.dumps({**saved, "where": "plate == 'p1'"}))
    assert run("bench", path, *given)[2] == (
        f"gpuload bench: --settings {tmp_path / 'settings.json'}: gpuload bench has no option for 'where'; leave it "
        "out.\n"
    )


@pytest.mark.parametrize("options", [{"output": "csr"}, {"output": "csr", "dtype": "float64"}, {"dtype": "float64"}])
def test_tune_as_json_without_a_label(run, path, options):
    given = [part for name, value in options.items() for part in (f"--{name}", value)]
    code, said, _ = run("tune", path, "--json", "--batch-size", 8, *given, "--seconds", 0.1)
    found = json.loads(said)
    assert code == 0
    assert {name: found["settings"].get(name) for name in options} == options
    assert found["measured"]["entropy_bits"] is None
    assert found["measured"]["trials"]


def test_tune_prints_results_that_it_cannot_save(run, path, tmp_path):
    out = tmp_path / ("settings" * 40)
    code, said, err = run("tune", path, "--batch-size", 8, "--seconds", 0.1, "--out", out)
    assert code == 1
    assert "settings: batch_size=8, block_size=" in said
    assert err == f"gpuload tune: {out}: cannot be written: File name too long. Choose another place.\n"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["--memory", "much"],
            "memory='much': expected a number of bytes of at least 1000000, or text such as '20GiB'.",
        ),
        (["--memory", "1kB"], "memory='1kB': expected a number of bytes of at least 1000000, or text such as '20GiB'."),
        (["--min-entropy", "1.5"], "'1.5' is not a number from 0 to 1"),
        (["--min-entropy", "all"], "'all' is not a number from 0 to 1"),
        (
            ["--output", "csr", "--dtype", "float16"],
            "--dtype float16 with --output csr: CSR minibatches are float32 or float64",
        ),
    ],
)
def test_wrong_usage_of_tune_is_refused(run, path, arguments, message):
    code, said, err = run("tune", path, *arguments)
    assert (code, said) == (2, "")
    assert message in err


@pytest.mark.slow
def test_inspect_draws_its_choices(run, path, tmp_path):
    pytest.importorskip("matplotlib")
    png = tmp_path / "choices.png"
    code, said, _ = run("inspect", path, "--label", "plate", "--batch-size", 8, "--plot", png)
    assert code == 0
    assert png.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    assert "cells/s, modelled" in said
    assert "plate, as it lies in the file: " in said
    assert "the same with fetch_factor=" in said
    code, _, err = run("inspect", path, "--plot", png)
    assert (code, err) == (2, "gpuload inspect: --plot draws a label's entropy: give --label too.\n")
    code, _, err = run("inspect", path, "--label", "plate", "--plot", tmp_path / "none" / "choices.png")
    assert code == 1
    assert f"there is no folder {tmp_path / 'none'}; create it first" in err
    svg = tmp_path / "choices.svg"
    assert run("inspect", path, "--label", "plate", "--quiet", "--plot", svg)[0] == 0
    assert svg.read_bytes().startswith(b"<?xml")


@pytest.mark.parametrize("arguments", [("inspect", "--label", "plate", "--plot"), ("bench", "--timeline")])
@pytest.mark.parametrize("name", ["choices", "choices.gif"])
def test_unsupported_picture_formats_are_refused_before_the_work(arguments, name, path, capsys):
    assert main([arguments[0], str(path), *arguments[1:], name]) == 2
    assert f"{name!r}: expected a name that ends in .png, .svg, .pdf" in capsys.readouterr().err


@pytest.mark.slow
def test_inspect_meets_the_required_entropy(run, path, monkeypatch):
    monkeypatch.setattr("gpuload.outlook.MAX_FETCH_FACTOR", 9)  # a fetch of the whole file loses nothing
    found = {}
    for least in (1, 0.99, 0.5):
        code, said, _ = run("inspect", path, "--label", "plate", "--batch-size", 8, "--min-entropy", least, "--json")
        assert code == 0
        advice = json.loads(said)["advice"]
        chosen = [
            c
            for c in advice["candidates"]
            if (c["block_size"], c["fetch_factor"]) == (advice["block_size"], advice["fetch_factor"])
        ]
        assert len(chosen) == 1
        found[least] = chosen[0]
        if least < 1:
            assert chosen[0]["entropy_bits"] >= least * advice["random_entropy_bits"]
    assert found[0.5]["entropy_bits"] < found[0.99]["entropy_bits"]
    assert found[0.5]["amplification"] < found[0.99]["amplification"]


# --- the benchmark ---


@pytest.mark.slow
def test_the_benchmark_compares_the_advice_with_every_setting(path, tmp_path, capsys):
    out = tmp_path / "tune.jsonl"
    options = (
        "--label",
        "plate",
        "--batch-size",
        "8",
        "--memory",
        "0.2GiB",
        "--seconds",
        "0.05",
        "--min-entropy",
        "0.99",
    )
    code = run_tune.main(["--file", str(path), "--out", str(out), *options, "--sweep-seconds", "0.01", "--turns", "2"])
    record = json.loads(out.read_text())
    rates = [row["cells_per_s"] for row in record["sweep"]]
    advised = [row for row in record["sweep"] if row["setting"] == record["tuned"]["settings"]]
    assert len(advised) == 1
    assert rates == sorted(rates, reverse=True)
    assert record["fraction_of_best"] == advised[0]["cells_per_s"] / rates[0]
    assert code == (record["fraction_of_best"] < 0.9)
    assert len({json.dumps(row["setting"]) for row in record["sweep"]}) == len(rates) > 5
    assert "<- advised" in capsys.readouterr().out
    assert {"commit", "machine", "file", "versions", "cache", "io_mode"} <= set(record)
