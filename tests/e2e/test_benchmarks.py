"""The benchmarks at tiny size, so that they cannot rot: same code, same checks, a few hundred cells."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from dataclasses import asdict, replace

import h5py
import numpy as np
import pandas as pd
import pytest

import gpuload
from benchmarks import (
    frame,
    gpu_ceilings,
    machine,
    report,
    report_gpu,
    rivals,
    run_codecs,
    run_gpu,
    run_open,
    run_rivals,
    run_stages,
)
from benchmarks.arms import arms
from benchmarks.job import LABEL, Job
from benchmarks.measure import Batches, WrongRowsError, check_rows, entropy_bits, is_drawn, measure, read_rows
from benchmarks.run_rivals import NEEDED
from gpuload.synthetic import tahoe_shaped
from tests.other_forms import write_scdl
from tests.soma_writers import write_experiment

pytestmark = pytest.mark.filterwarnings("ignore")  # the rivals issue warnings of their own

ARMS = {arm.name: arm for arm in arms(batch_size=16, fetch_factor=4)}
ROOT = frame.ROOT
RESULTS = ROOT / "benchmarks" / "results"


@pytest.fixture(scope="module")
def cells(tmp_path_factory):
    """A file of 400 cells, its path and its values."""
    anndata = pytest.importorskip("anndata")
    path = tmp_path_factory.mktemp("benchmarks") / "cells.h5ad"
    X, obs, var = tahoe_shaped(400, n_vars=300, n_plates=3, n_cell_lines=4, n_drugs=5)
    anndata.AnnData(X, obs, var).write_h5ad(path, compression="gzip")
    return path, X.toarray(), obs[LABEL].cat.codes.to_numpy()


@pytest.fixture
def job(cells, tmp_path):
    """A job on that file; its arm is to be replaced."""
    return Job(ARMS["gpuload/dense/chunk"], cells[0], tmp_path, seconds=0.01, n_epochs=2)


def can_collect():
    """Whether anndata can do what scDataset's AnnCollection recipe asks of it; 0.13.4 cannot, X being a layer there."""
    anndata = pytest.importorskip("anndata")
    from anndata.experimental import AnnCollection

    adata = anndata.AnnData(np.eye(2, dtype=np.float32), obs=pd.DataFrame({"rows": [0, 1]}, index=["a", "b"]))
    try:
        AnnCollection([adata])[[0]].to_adata()
    except ValueError as error:
        if "must be identical" not in str(error):
            raise
        return False
    return True


def needed_arms():
    """Return the names of arms as parameters; those whose library, output and order occur in earlier ones are slow."""
    known, found = set(), []
    for name in ARMS:
        words = set(enumerate(name.split("/")))
        found.append(pytest.param(name, marks=pytest.mark.slow if words <= known else ()))
        known |= words
    return found


@pytest.mark.parametrize("name", needed_arms())
def test_every_arm_runs(name, job):
    arm = ARMS[name]
    for package in NEEDED[arm.rival]:
        if not frame.is_installed(package):
            pytest.skip(f"{package} is not installed")
    if arm.rival == "scdataset_anncollection" and not can_collect():
        pytest.skip("this version of anndata makes no AnnData of an AnnCollection")
    store = arm.settings.get("store", "packed.zarr")
    if store != "packed.zarr":  # which it makes itself
        with pytest.raises(FileNotFoundError, match=rf"cells-{store}: run an arm of .* first, which makes this store"):
            measure(replace(job, arm=arm))
        write_store(job, store)
    if arm.group in ("pairs", "depth"):  # so few cells have no larger sets
        arm = replace(arm, settings={**arm.settings, "set_size": 4})
    record = measure(replace(job, arm=arm))
    assert record["cells_per_s"] > 0
    assert record["first_batch_s"] > 0
    assert record["peak_mib"] > 0
    assert record["io_mode"]
    json.dumps(record)
    if arm.kind == "throughput":
        assert record["fetches"] >= 1
        assert 0 <= record["label_entropy_bits"] <= np.log2(3)
    if arm.kind == "overlap":
        assert record["overlap_ratio"] > 0.9
    if arm.kind == "memory":
        assert len(record["epoch_peaks_mib"]) == 2


def write_store(job, name):
    """Write what another library would make of the job's file, and its record that it is whole."""
    anndata = pytest.importorskip("anndata")
    adata, store = anndata.read_h5ad(job.path), rivals.store_path(job, name)
    if name == "annbatch.zarr":
        write_collection(adata, store)
    elif name == "scdl":
        pytest.importorskip("pyarrow")
        store.mkdir()
        write_scdl(store, adata.X, genes=list(adata.var_names), obs=adata.obs[[LABEL]])
    else:
        tiles = {"tiles": (16, 8)} if name == "census" else {}
        write_experiment(store, {"data": adata.X}, obs=adata.obs[[LABEL]], var=adata.var, **tiles)
    store.with_name(f"{store.name}.json").write_text("{}")


def write_collection(adata, store):
    """Write a collection of annbatch's: two shuffled data sets, the rows' numbers as a column."""
    zarr = pytest.importorskip("zarr", minversion="3.0")
    anndata = pytest.importorskip("anndata")
    order = np.random.default_rng(0).permutation(adata.n_obs)
    adata.obs = adata.obs[[LABEL]].assign(rows=np.arange(adata.n_obs))
    root = zarr.open_group(str(store), mode="w", zarr_format=3)
    root.attrs["encoding-type"] = "annbatch-preshuffled"
    for i, rows in enumerate(np.array_split(order, 2)):
        anndata.io.write_elem(root, f"dataset_{i}", adata[rows].copy())


def test_store_is_made_once_and_again_if_interrupted(tmp_path):
    soma, census = tmp_path / "tahoe.200k-soma", tmp_path / "tahoe.200k-census"

    def broken():
        soma.mkdir()
        (soma / "half").write_bytes(b"1")
        raise OSError

    with pytest.raises(OSError, match=r"^$"):
        rivals.make_once(soma, broken)
    taken = rivals.make_once(soma, lambda: (soma.mkdir(), (soma / "all").write_bytes(b"123")))
    assert [part.name for part in soma.iterdir()] == ["all"]
    assert taken["store_nbytes"] == 3
    assert rivals.make_once(soma, lambda: pytest.fail("it is made again")) == taken
    assert not rivals.is_made(census)


def test_job_survives_json(job):
    assert Job.from_json(job.to_json()) == job


class FakeLoading:
    """Hands over the file's rows in order, or wrong ones."""

    io_mode = "fake"

    def __init__(self, X, label, *, shift=0):
        self.X, self.label, self.shift = X, label, shift

    def epoch(self):
        for start in range(0, 400, 16):
            rows = np.arange(start, start + 16)
            at = (rows + self.shift) % 400
            yield {"X": self.X[at], "label": self.label[rows], "rows": rows}

    def close(self):
        pass


def test_a_loader_that_hands_over_wrong_rows_is_not_timed(cells):
    path, X, label = cells
    assert check_rows(Batches(FakeLoading(X, label), 4), path, opened=0.0) > 0
    with pytest.raises(WrongRowsError, match="the values are not those of the file"):
        check_rows(Batches(FakeLoading(X, label, shift=1), 4), path, opened=0.0)
    with pytest.raises(WrongRowsError, match="the plate is not that of the file"):
        check_rows(Batches(FakeLoading(X, label + 1), 4), path, opened=0.0)


def test_a_loader_that_draws_wrong_counts_is_not_timed(cells):
    path, X, label = cells
    counts = np.full_like(X, 40)
    with h5py.File(path) as file:
        stored = read_rows(file["X"], np.arange(400))
    drawn = np.random.default_rng(0).binomial(stored.astype(int), 0.5).astype(np.float32)
    assert check_rows(Batches(FakeLoading(drawn, label), 4), path, opened=0.0, downsample=0.5) > 0
    for wrong in (drawn + 1, stored * 0.5, stored, np.roll(drawn, 1, axis=0), drawn * 0):
        with pytest.raises(WrongRowsError, match="the values are not those of the file"):
            check_rows(Batches(FakeLoading(wrong, label), 4), path, opened=0.0, downsample=0.5)
    assert is_drawn(np.random.default_rng(1).binomial(40, 0.5, X.shape).astype(np.float32), counts, 0.5)
    assert not is_drawn(np.random.default_rng(1).binomial(40, 0.6, X.shape).astype(np.float32), counts, 0.5)


def test_whole_fetches_are_timed_across_epochs(cells):
    batches = Batches(FakeLoading(*cells[1:]), 4)  # 25 batches an epoch: fetches of 4, 4, 4, 4, 4, 4 and 1
    batches.skip_fetches(1)
    timed = batches.time_fetches(0.0)
    assert (timed["fetches"], timed["batches"], timed["cells"]) == (1, 4, 64)
    for _ in range(4):
        batches.time_fetches(0.0)
    assert batches.time_fetches(0.0)["batches"] == 1
    assert batches.time_fetches(0.0)["batches"] == 4


def test_entropy():
    assert entropy_bits(np.array([3, 3, 3])) == 0
    assert entropy_bits(np.array([0, 1, 2, 3])) == pytest.approx(2)


@pytest.mark.slow
def test_runner_and_report_end_to_end(cells, tmp_path, capsys):
    pytest.importorskip("torch")
    pytest.importorskip("matplotlib")
    out, readme, picture = tmp_path / "results.jsonl", tmp_path / "README.md", tmp_path / "rivals.png"
    options = ["--file", str(cells[0]), "--out", str(out), "--work-dir", str(tmp_path), "--rounds", "1"]
    options += ["--seconds", "0.01", "--batch-size", "16", "--fetch-factor", "4"]
    options += ["--only", "scipy-in-ram/dense", "gpuload/dense/chunk"]
    assert run_rivals.main(options) == 0
    records = [json.loads(line) for line in out.read_text().splitlines()]
    assert [record["round"] for record in records] == [0, 0]
    assert [record["arm"]["name"] for record in records] == ["gpuload/dense/chunk", "scipy-in-ram/dense"]
    assert records[0]["file"]["n_obs"] == 400
    assert str(tmp_path) not in out.read_text()
    readme.write_text(f"before\n{report.BEGIN}\nold\n{report.END}\nafter\n")
    assert report.main([str(out), "--plot", str(picture), "--details", str(readme)]) == 0
    assert picture.stat().st_size > 0
    text = readme.read_text()
    assert text.startswith("before\n")
    assert text.endswith("after\n")
    assert "old" not in text
    assert "scipy-in-ram/dense" in text
    assert "scipy-in-ram/dense" in capsys.readouterr().out
    readme.write_text(f"{report.BEGIN}\n{report.END}\n")
    assert report.main([str(out), "--readme", str(readme)]) == 0
    assert readme.read_text().count("400 cells") == 1
    assert report.main([str(out), str(out), "--readme", str(readme)]) == 0  # as if from two machines
    assert readme.read_text().count("400 cells") == 1
    assert readme.read_text().count(" Shuffled, dense float32: ") == 1


def test_runner_records_every_arm_in_every_round(cells, tmp_path, monkeypatch):
    asked = []

    def measured(arm, *more):
        asked.append(arm.name)
        return {"arm": asdict(arm), "cells_per_s": 1.0, "peak_mib": 1.0}

    monkeypatch.setattr(run_rivals, "_run", measured)
    out = tmp_path / "results.jsonl"
    wanted = ["gpuload/dense/chunk", "scipy-in-ram/dense"]
    options = ["--file", str(cells[0]), "--out", str(out), "--rounds", "2", "--only", *wanted]
    assert run_rivals.main(options) == 0
    records = [json.loads(line) for line in out.read_text().splitlines()]
    assert [record["round"] for record in records] == [0, 0, 1, 1]
    assert [record["arm"]["name"] for record in records] == asked == [*wanted, *reversed(wanted)]


def test_runner_records_a_failed_arm(cells, tmp_path):
    pytest.importorskip("torch")
    broken = tmp_path / "broken.h5ad"
    broken.write_bytes(cells[0].read_bytes())
    import h5py

    with h5py.File(broken, "r+") as file:
        del file["obs"][LABEL]
    out = tmp_path / "results.jsonl"
    options = ["--file", str(broken), "--out", str(out), "--rounds", "1", "--seconds", "0.01"]
    assert run_rivals.main([*options, "--only", "scipy-in-ram/dense"]) == 1
    (record,) = [json.loads(line) for line in out.read_text().splitlines()]
    assert record["error"]
    assert record["arm"]["name"] == "scipy-in-ram/dense"


def test_runner_lists_arms_and_refuses_unknown_ones(cells, capsys):
    assert run_rivals.main(["--list", "--only", "csr"]) == 0
    assert "gpuload/csr/chunk" in capsys.readouterr().out
    assert run_rivals.main(["--file", str(cells[0]), "--only", "nothing"]) == 2
    assert "--only nothing: no such arm" in capsys.readouterr().err


def test_arms_have_unique_names_and_known_rivals():
    everything = arms()
    assert len({arm.name for arm in everything}) == len(everything)
    assert {arm.rival for arm in everything} == set(NEEDED)
    assert {arm.group for arm in everything} == set(report.GROUPS)
    named = {name for goals in (report.RATIOS, report.ENTROPY_GOALS) for goal in goals for name in goal[:2]}
    assert named | {goal[0] for goal in report.LIMITS} <= {arm.name for arm in everything}


def test_readme_tables_match_the_records(tmp_path):
    names = (
        "rivals_epyc",
        "rivals_epyc_before",
        "rivals",
        "rivals_depth",
        "rivals_indexed",
        "rivals_kept",
        "rivals_packed",
    )
    results = [RESULTS / f"{name}.jsonl" for name in names]
    readme, details = tmp_path / "README.md", tmp_path / "details.md"
    for copy, page in ((readme, ROOT / "README.md"), (details, ROOT / "benchmarks" / "README.md")):
        copy.write_text(page.read_text())
    assert report.main([*map(str, results), "--readme", str(readme), "--details", str(details)]) == 0
    assert readme.read_text() == (ROOT / "README.md").read_text()
    assert details.read_text() == (ROOT / "benchmarks" / "README.md").read_text()
    measured = {record["arm"]["name"] for path in results for record in report.read_records(path)}
    assert measured <= {arm.name for arm in arms()}


@pytest.mark.parametrize("arm", ["gpuload/dense/cached", "gpuload/csr", "gpuload-packed-zstd/dense"])
def test_gpu_arms_time_whole_fetches(cells, tmp_path, monkeypatch, arm):
    torch = pytest.importorskip("torch")
    asked, opened, open_loader = [], [], gpuload.open_loader

    def on_the_cpu(source, **settings):
        asked.append(settings)
        of_a_gpu = ("device", "device_cache", "io")
        opened.append(open_loader(source, **{name: value for name, value in settings.items() if name not in of_a_gpu}))
        return opened[-1]

    path = tmp_path / "cells.h5ad"
    path.write_bytes(cells[0].read_bytes())
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(gpuload, "open_loader", on_the_cpu)
    monkeypatch.setattr(run_gpu, "BLOCK_SIZE", 4)
    packed = set()
    for _ in range(2):
        found = run_gpu.ARMS[arm](run_gpu.Options(path, 8, 4, "warm"))
        # 50 minibatches are 12 fetches, which load in groups: one group less is timed, so not the first fetch.
        n_timed = 12 - run_gpu.PREFETCH
        assert found["cells_per_s"] * found["seconds"] == pytest.approx(8 * 4 * n_timed)
        assert found["io_mode"] == "posix"
        assert 0 <= found["waited_share"] <= 1
        if arm.startswith("gpuload-packed"):
            packed.add((found["pack_s"], found["store_nbytes"]))
            assert len(packed) == 1  # once, for both
    assert asked[0]["device"] == "cuda"
    # Whole epochs, as chunks are counted when they are decoded, and those of a cache when they are asked for.
    n_epochs = run_gpu.N_EPOCHS + ("cached" in arm)
    assert [loader.stats.n_batches for loader in opened] == [50 * n_epochs] * 2


def test_every_record_file_has_a_documented_command():
    page = (ROOT / "benchmarks" / "README.md").read_text()
    for path in RESULTS.glob("*.jsonl"):
        run = path.stem
        for suffix in ("_epyc", "_kept", "_depth", "_indexed", "_packed", "_apart"):  # a machine, arms, other options
            run = run.partition(suffix)[0]
        command = f"python -m benchmarks.run_{run}"
        assert command in page, path.name


def record(name, rate, **more):
    return {"arm": {"name": name, "group": "dense"}, "cells_per_s": rate, **more}


def test_report_takes_medians_and_compares():
    records = [record("gpuload/dense/chunk", rate, label_entropy_bits=3.6) for rate in (700.0, 900.0, 800.0)]
    records += [
        record("scdataset/dense/16", 100.0),
        {"arm": {"name": "annbatch/dense", "group": "dense"}, "error": "?"},
    ]
    text = report.table(records)
    assert "| gpuload/dense/chunk | 800 | 700-900 |  | 3.600 |" in text
    assert "| scdataset/dense/16 | 100 | 100-100 | 8.0x |" in text
    assert "| annbatch/dense | failed |" in text
    assert "| shuffled, dense float32 | 800 | 8.0x (100) |" in report.headline(records)
    records.append(record("gpuload/dense/3-chunks", 900.0))
    assert "| the same in blocks of three chunks | 900 | 9.0x (100) |" in report.headline(records)
    for each in records:
        each |= {"commit": "abcdef012345", "machine": {"cores": 2, "cpu": "a processor"}}
    assert report.other_run(records) == (
        "- 2 cores of a processor; commit abcdef0. Shuffled, dense float32: 800 cells/s (8.0x scDataset)."
    )
    assert "| gpuload/dense/chunk: speed over scdataset/dense/16 | at least 7x | 8.00x | yes |" in report.goals(records)


def test_loader_table_compares_every_loader_with_ours():
    arms_of_table = {arm for _, arm, *_ in report.LOADERS} | {arm for arm, _ in report.BESIDE.values()}
    assert arms_of_table <= {arm.name for arm in arms()}
    assert report.BESIDE.keys() <= {arm for _, arm, *_ in report.LOADERS}
    records = [record("gpuload/dense/chunk", 800.0), record("scdataset/dense/16", 100.0), record("scdataset/csr", 1.0)]
    records += [
        record("scipy-in-ram/dense", 400.0),
        record("bionemo-scdl/dense/1", 300.0),
    ]  # the last has no counterpart of ours
    ours = "800 | the .h5ad file, blocks of a chunk"
    assert report.loaders(records).splitlines()[2:] == [
        f"| scDataset | the .h5ad file | blocks of 16 | 100 | {ours} | 8.0x |",
        f"| no loader: SciPy | nothing: all cells are in memory | true random | 400 | {ours} | 2.0x |",
    ]
    assert report.loaders(records[:1]) == ""


def test_rival_runs_in_its_own_environment(tmp_path):
    own = tmp_path / "annbatch" / "bin" / "python"
    own.parent.mkdir(parents=True)
    assert run_rivals._python(ARMS["annbatch/dense"], tmp_path) == sys.executable
    own.symlink_to(sys.executable)
    assert run_rivals._python(ARMS["annbatch/dense"], tmp_path) == str(own)
    assert run_rivals._python(ARMS["gpuload/dense/chunk"], tmp_path) == sys.executable
    assert run_rivals.ENVIRONMENTS.keys() <= NEEDED.keys()


def gpu_record(arm, commit="b" * 12, *, card="GPU X", cache="warm", **figures):
    """A record of an arm over 1,000 cells of 10 kB each; one of a loader has its figures."""
    if "cells_per_s" in figures and not arm.startswith("ceiling"):
        stage_s = {"plan_s": 0.1, "read_s": 1.0, "decode_s": 2.0, "take_s": 0.05, "wait_s": 0.5}
        memory = {"residents": 3e9, "cache": figures.pop("cache_nbytes", 0), "host": 9e9, "metadata": 9e9}
        figures = {"seconds": 2.0, "io_mode": "pinned", "stage_s": stage_s, "memory_nbytes": memory} | figures
        figures = {"read_bytes_per_s": 1e9} | figures
    file = {"name": "cells.h5ad", "nbytes": 10_000_000, "n_obs": 1000, "n_vars": 50, "compression": "gzip"}
    machine = {"cores": 8, "cpu": "CPU Y"}
    sizes = {"batch_size": 1024, "fetch_factor": 64}
    about = {"commit": commit, "machine": machine, "gpu": {"card": card}, "cache": cache, "time": "2026", "round": 0}
    return {**about, **sizes, "file": file, "arm": arm, **figures}


CEILINGS = [
    gpu_record("ceiling/h2d", bytes_per_s=50e9),  # 5 million of these cells
    gpu_record("ceiling/fill", bytes_per_s=800e9, cells_per_s=4e6),
    gpu_record("ceiling/nvcomp-deflate", bytes_per_s=20e9, cells_per_s=2e6),
]


def rows_of(text):
    lines = [line for line in text.splitlines() if line.startswith("| ")]
    return {cells[0]: cells[1:] for cells in ([cell.strip() for cell in line.split("|")[1:-1]] for line in lines)}


def test_gpu_report_takes_the_newest_commit_of_each_arm():
    records = [*CEILINGS, gpu_record("gpuload/dense/pinned", "a" * 12, cells_per_s=1.0)]
    for rate, first in ((1.2e6, 7), (1.6e6, 9), (1.5e6, 6)):
        records.append(gpu_record("gpuload/dense/pinned", cells_per_s=rate, epochs_cells_per_s=[first, rate, 1e9]))
    records += [gpu_record("gpuload/csr", "a" * 12, cells_per_s=1.7e6), gpu_record("gpuload/csr", error="?")]
    records += [gpu_record("gpuload/dense/kvikio", "a" * 12, cells_per_s=1e6, io_mode="gds")]
    records += [gpu_record("gpuload/dense/kvikio", "a" * 12, error="?")]
    records += [gpu_record("gpuload/dense/kvikio", cache="cold", cells_per_s=1e5)]
    (arms,) = report_gpu.runs(records)
    rows = rows_of(report_gpu.table(arms))
    ceiling, blank = "nvCOMP alone 2,000,000", [""] * 3
    of_file = ["1,500,000", "6-1,000,000,000", "9", "7", ceiling, "75%", *blank, "pinned", "bbbbbbb"]
    assert rows["gpuload/dense/pinned"] == of_file
    assert rows["gpuload/csr"] == ["failed", *[""] * 10]
    one_failed = ["1,000,000", "1,000,000-1,000,000", "1", "", ceiling, "50%", *blank, "gds", "aaaaaaa"]
    assert rows["gpuload/dense/kvikio (1 failed)"] == one_failed
    assert rows["gpuload/dense/kvikio, cold"][4:6] == ["", ""]  # the disk may be the lowest ceiling
    assert rows_of(report_gpu.limits(arms))["copies of page-locked memory to the device"][-1] == "5,000,000"
    assert "commits bbbbbbb, aaaaaaa; 1 to 3 rounds an arm, medians of up to 9 epochs." in report_gpu.conditions(arms)
    one_round = "; commit bbbbbbb; 1 round an arm, so how much the figures vary is not known."
    assert one_round in report_gpu.conditions(report_gpu.runs(CEILINGS)[0])


def test_gpu_arms_are_compared_with_the_ceilings_that_bind_them():
    codec = {"codec": "lz4", "cells_per_chunk": 64, "bytes_per_s": 1e9, "cells_per_s": 3e6}
    codec |= {"data_bytes_per_cell": 1.0, "indices_bytes_per_cell": 2.0}
    later = {"cells_per_s": 1e6, "read_bytes_per_s": 0.0}
    records = [*CEILINGS, gpu_record("codecs", codecs=[codec, {**codec, "cells_per_chunk": 16, "cells_per_s": 1.0}])]
    records += [
        gpu_record("gpuload/dense", cells_per_s=1e6),
        gpu_record("gpuload/csr", cells_per_s=1e6),
        gpu_record("gpuload/dense/cached", cache_nbytes=9_990_000, **later),  # as stored
        gpu_record("gpuload-packed/dense/cached", cache_nbytes=8_000_000, store_nbytes=7_000_000, **later),  # decoded
        gpu_record("gpuload/csr/cached", cache_nbytes=12_000_000, **later),
        gpu_record("gpuload/dense/kept", **later),
        gpu_record("gpuload/csr/kept", **later),
        gpu_record("gpuload-packed/dense", cells_per_s=1e6, store_nbytes=5_000_000),
        gpu_record("gpuload-packed-none/dense", cells_per_s=1e6, store_nbytes=20_000_000),
    ]
    (arms,) = report_gpu.runs(records)
    copies, nvcomp, rows = "copies to the device", "nvCOMP alone", "writing dense rows"
    assert report_gpu.ceilings(arms, "gpuload/dense") == {copies: 5e6, nvcomp: 2e6, rows: 4e6}
    assert report_gpu.ceilings(arms, "gpuload/csr") == {copies: 5e6, nvcomp: 2e6}
    assert report_gpu.ceilings(arms, "gpuload/dense/cached") == {nvcomp: 2e6, rows: 4e6}
    assert report_gpu.ceilings(arms, "gpuload-packed/dense/cached") == {rows: 4e6}
    assert report_gpu.ceilings(arms, "gpuload/csr/cached") == {}
    assert report_gpu.ceilings(arms, "gpuload/dense/kept") == {copies: 50e9 / 9990, nvcomp: 2e6, rows: 4e6}
    assert report_gpu.ceilings(arms, "gpuload/csr/kept") == {copies: 50e9 / 12_000}
    assert report_gpu.ceilings(arms, "gpuload-packed/dense") == {copies: 10e6, nvcomp: 3e6, rows: 4e6}
    assert report_gpu.ceilings(arms, "gpuload-packed-none/dense") == {copies: 2.5e6, rows: 4e6}
    unsized = [{**record, "file": {"name": "cells.h5ad", "nbytes": 10_000_000}} for record in records]
    (arms,) = report_gpu.runs(unsized)
    assert report_gpu.ceilings(arms, "gpuload/dense")[copies] == 50e6  # as 1,000 bytes were read for each cell


def test_gpu_goals_are_met_or_not():
    records = [*CEILINGS, gpu_record("annbatch/dense", cells_per_s=2e5)]
    records += [gpu_record("gpuload/dense/pinned", cells_per_s=rate) for rate in (0.99e6, 1.1e6, 1.21e6)]
    records += [gpu_record("gpuload/dense/cached", cells_per_s=1.9e6, cache_nbytes=11e6)]
    records += [gpu_record("gpuload/step/pinned", cells_per_s=5e5, waited_share=0.01, step_share=0.7)]
    records += [gpu_record("gpuload/step/cached", cells_per_s=5e5, waited_share=0.051, step_share=0.93)]
    records += [gpu_record("gpuload/dense/verified", cells_per_s=rate) for rate in (0.99e6, 1.1e6, 1.21e6)]
    unchecked = gpu_record("gpuload/dense/unverified", cells_per_s=1.25e6)
    (arms,) = report_gpu.runs([*records, unchecked])
    assert [goal[1:] for goal in report_gpu.goals(arms)] == [
        ("at least 1,000,000", "1,100,000", True),
        ("at least 2,000,000", "1,900,000", False),
        ("at least 60%", "55%", False),
        ("at least 5x", "5.5x", True),
        ("at least 10x", "5.5x", False),
        ("less than 5%", "1.0%", True),
        ("less than 5%", "5.1%", False),
        ("less than 3%", "12.0% (rates spread by 22.2%)", False),
    ]
    of_steps, missed = report_gpu.remarks(arms)
    assert "from the file, it waited for 1.0% of the time and trained for 70%; from the device cache" in of_steps
    assert "slows the step" in of_steps
    assert "gpuload/dense/pinned: speed over annbatch/dense: 5.5x (wanted: at least 10x)" in missed
    assert "1.0%" not in missed
    short = report_gpu.short(arms)
    assert "**1,100,000 cells/s**, dense float32, 55% of its lowest ceiling (nvCOMP alone, 2,000,000)" in short
    assert ", 5.5 times annbatch with `preload_to_gpu` (200,000)." in short
    assert len(short.splitlines()) == 2 + 4
    other = [*records, {**unchecked, "commit": "a" * 12}]  # of another commit, the difference is not of checksums only
    assert "checksums" not in str(report_gpu.goals(report_gpu.runs(other)[0]))


def test_gpu_report_keeps_cards_apart(tmp_path, capsys):
    records = [gpu_record("gpuload/dense/pinned", card="Z", cells_per_s=7e6), *CEILINGS]
    records += [gpu_record("gpuload/dense/pinned", cells_per_s=1e6), gpu_record("gpuload/csr", card="V", error="?")]
    assert report_gpu.runs(records[-1:]) == []
    first, second = report_gpu.runs(records)
    assert (len(first), first["gpuload/dense/pinned"].cells_per_s) == (4, 1e6)
    assert (len(second), second["gpuload/dense/pinned"].cells_per_s) == (1, 7e6)
    results, readme, picture = (tmp_path / name for name in ("gpu.jsonl", "README.md", "gpu.png"))
    results.write_text("".join(json.dumps(record) + "\n" for record in records))
    readme.write_text(f"before {report_gpu.BEGIN}{report_gpu.END} after")
    assert report_gpu.main([str(results), "--readme", str(readme), "--plot", str(picture)]) == 0
    assert "7,000,000" in capsys.readouterr().out
    assert "7,000,000" not in readme.read_text()
    assert readme.read_text().startswith(f"before {report_gpu.BEGIN}\nGPU X; 8 cores of CPU Y; cells.h5ad, 1,000 cells")
    assert readme.read_text().endswith(f"{report_gpu.END} after")
    assert picture.read_bytes().startswith(b"\x89PNG")
    report_gpu.plot(report_gpu.runs(CEILINGS)[0], picture)  # no arm of a loader was measured yet
    results.write_text(json.dumps(records[-1]))
    with pytest.raises(SystemExit):
        report_gpu.main([str(results)])
    assert "gpu.jsonl has no figures" in capsys.readouterr().err


def test_gpu_codecs_have_the_rates_of_a_cpu_beside():
    row = {"codec": "zstd-3", "cells_per_chunk": 16, "data_bytes_per_cell": 600.0, "indices_bytes_per_cell": 1400.0}
    measured = [[{**row, "bytes_per_s": rate * 1e9, "cells_per_s": rate * 1e5}] for rate in (10.0, 40.0, 30.0)]
    arms = report_gpu.runs(gpu_record("codecs", codecs=rows) for rows in measured)[0]
    pack = {"codecs": [{**row, "decode_cells_per_s": 4e4}], "machine": {"cpu": "CPU Y"}, "file": {"name": "c.h5ad"}}
    (older,) = pack["codecs"]
    text = report_gpu.codecs(arms, [{**pack, "codecs": [{**older, "decode_cells_per_s": 1.0}]}, pack])
    assert rows_of(text)["zstd-3"] == ["16", "2,000", "30.0", "3,000,000", "40,000"]
    assert rows_of(report_gpu.codecs(arms, ()))["zstd-3"][-1] == ""
    stages = rows_of(report_gpu.stages(report_gpu.runs([gpu_record("gpuload/csr", cells_per_s=1.0)])[0]))
    assert stages["gpuload/csr"] == ["5.0%", "50%", "100%", "2.5%", "25%", "1.0", "3.0", "0.0"]


def test_gpu_report_knows_its_arms_and_matches_the_records(tmp_path):
    known = set(run_gpu.ARMS)
    named = ["FILE", "CACHED", "RIVAL", "VERIFIED", "UNVERIFIED", "STEP", "STEP_CACHED", "H2D", "FILL", "INFLATE"]
    assert {*report_gpu.SHOWN, *(getattr(report_gpu, name) for name in named)} <= known
    assert {f"{kind}/dense" for kind in report_gpu.CODECS} <= known
    assert set(report_gpu.CODECS.values()) <= set(gpu_ceilings.CODECS)
    readme, details = tmp_path / "README.md", tmp_path / "details.md"
    for copy, page in ((readme, ROOT / "README.md"), (details, ROOT / "benchmarks" / "README.md")):
        copy.write_text(page.read_text())
    results = RESULTS / "gpu.jsonl"
    assert report_gpu.main([str(results), "--readme", str(readme), "--details", str(details)]) == 0
    assert readme.read_text() == (ROOT / "README.md").read_text()
    assert details.read_text() == (ROOT / "benchmarks" / "README.md").read_text()


def test_report_refuses_a_readme_without_markers():
    with pytest.raises(ValueError, match="benchmarks: begin"):
        report.replace_between_markers("no markers", "table")


@pytest.mark.skipif(not importlib.util.find_spec("imagecodecs"), reason="imagecodecs is not installed")
def test_every_stage_runs(cells, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(run_stages.plan, "N_PLANNED", 2)
    out = tmp_path / "stages.jsonl"
    options = ["--file", str(cells[0]), "--out", str(out), "--batch-size", "16", "--fetch-factor", "4"]
    assert run_stages.main(options) == 0
    records = [json.loads(line) for line in out.read_text().splitlines()]
    assert {record["stage"] for record in records} == set(run_stages.STAGES)
    assert all(record["rate"] > 0 and record["ceiling"] > 0 for record in records)
    fronts = [record for record in records if record["what"].startswith("dali")]
    assert all(record["fraction"] < 0.2 for record in fronts), "minibatches were counted that no iterator gave"
    assert "| decode |" in capsys.readouterr().out


def test_machine_describes_hardware_and_versions():
    described = machine.describe()
    assert described["cores"] >= 1
    assert described["memory_mib"] > 100
    assert machine.versions(["numpy", "no-such-package"]) == {
        "python": machine.platform.python_version(),
        "numpy": np.__version__,
        "no-such-package": "none",
    }
    assert machine.peak_mib() >= machine.resident_mib() / 2
    assert machine.cpu_s() > 0
    assert machine.commit()


def test_every_round_starts_at_a_different_arm():
    assert list(frame.in_turns("ab", 3)) == [(0, "a"), (0, "b"), (1, "b"), (1, "a"), (2, "a"), (2, "b")]
    assert [arm for _, arm in frame.in_turns(range(4), 2)] == [0, 1, 2, 3, 2, 3, 0, 1]
    assert list(frame.in_turns((), 2)) == []


@pytest.mark.slow
@pytest.mark.parametrize("arm", run_codecs.ARMS)
def test_cells_are_read_in_every_compression(tmp_path, arm):
    pytest.importorskip("anndata")
    if arm in run_codecs.PLUGINS:
        pytest.importorskip("hdf5plugin")
    n_obs = 700  # more than a chunk of values
    for each in dict.fromkeys(["none" if arm == "packed" else arm, arm]):
        run_codecs.write(tmp_path, each, n_obs)
    path, nnz = run_codecs.path_of(tmp_path, arm), tahoe_shaped(n_obs)[0].nnz
    readers = run_codecs.READERS if arm not in run_codecs.OTHERS else ["gpuload"]
    for reader in readers:
        found = run_codecs.READERS[reader](str(path))
        assert found["values"] == nnz
        assert found["cells_per_s"] > 0
    if arm not in run_codecs.OTHERS:
        with h5py.File(path) as file:
            data = file["X/data"]
            numbers = {"lzf": "lzf", "gzip": "gzip", "zstd": "32015", "lz4": "32004", "bitshuffle": "32008"}
            assert list(data._filters) == ([numbers[arm]] if arm != "none" else [])


@pytest.mark.slow
def test_compressions_are_compared_in_a_table(tmp_path, capsys):
    pytest.importorskip("anndata")
    out = tmp_path / "codecs.jsonl"
    given = [str(tmp_path / "files"), "--cells", "300", "--rounds", "1", "--only", "gzip", "packed", "--out", str(out)]
    assert run_codecs.main(given) == 0
    records = [json.loads(line) for line in out.read_text().splitlines()]
    found = {(record["arm"], record["reader"]) for record in records}
    assert found == {("gzip", "gpuload"), ("gzip", "h5py"), ("packed", "gpuload")}
    rows = {line.split(" | ")[0].lstrip("| ") for line in capsys.readouterr().out.splitlines()}
    assert {"gzip", "packed"} <= rows
    made = [{"arm": "gzip", "reader": reader, "nbytes": 5e6, "cells_per_s": rate} for reader, rate in RATES]
    made.append({"arm": "zarr", "reader": "gpuload", "nbytes": 4e6, "cells_per_s": 900.0})
    lines = run_codecs.table(made).splitlines()[2:]
    assert lines == ["| zarr | 4 | 900 | 900-900 |  |  |", "| gzip | 5 | 200 | 100-600 | 40 | 5.0x |"]


RATES = [("gpuload", 100.0), ("gpuload", 600.0), ("gpuload", 200.0), ("h5py", 40.0)]


def test_work_in_a_subprocess_returns_or_fails(capfd):
    assert frame.apart(machine.versions, ["numpy"])["numpy"] == np.__version__
    with pytest.raises(subprocess.CalledProcessError):
        frame.apart(machine.versions, 7)
    assert "TypeError" in capfd.readouterr().err


@pytest.mark.slow
def test_opening_is_measured_with_and_without_an_index(tmp_path, capsys):
    out = tmp_path / "open.jsonl"
    arguments = [str(tmp_path / "cells"), "--cells", "140000", "--files", "2", "--rounds", "1", "--out", str(out)]
    assert run_open.main(arguments) == 0
    records = [json.loads(line) for line in out.read_text().splitlines()]
    assert [record["arm"] for record in records] == ["without index", "with index"]
    assert all(record["cells"] == 140_000 and 0 < record["open_s"] < record["first_batch_s"] for record in records)
    assert len(list((tmp_path / "cells" / "index").iterdir())) == 2
    assert "without an index: opened in" in capsys.readouterr().out
    with gpuload.open_loader(tmp_path / "cells" / "plate1.h5ad", batch_size=8, obs=["plate"], device="cpu") as loader:
        assert loader.n_obs == 70_000
        assert not next(iter(loader)).X.any()
