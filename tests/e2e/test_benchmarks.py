"""The benchmarks at tiny size, so that they cannot rot: same code, same checks, a few hundred cells."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from dataclasses import asdict, replace

import numpy as np
import pandas as pd
import pytest

import gpuload
from benchmarks import frame, machine, report, rivals, run_gpu, run_open, run_rivals, run_stages
from benchmarks.arms import arms
from benchmarks.job import LABEL, Job
from benchmarks.measure import Batches, WrongRowsError, check_rows, entropy_bits, measure
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


@pytest.mark.parametrize("name", ARMS)
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
    if arm.group == "pairs":  # so few cells have no larger sets
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
    assert readme.read_text().count("400 cells") == 2


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
    results = [RESULTS / f"{name}.jsonl" for name in ("rivals_epyc", "rivals_epyc_before", "rivals")]
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
    asked, open_loader = [], gpuload.open_loader

    def on_the_cpu(source, **settings):
        asked.append(settings)
        of_a_gpu = ("device", "device_cache", "io")
        return open_loader(source, **{name: value for name, value in settings.items() if name not in of_a_gpu})

    path = tmp_path / "cells.h5ad"
    path.write_bytes(cells[0].read_bytes())
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(gpuload, "open_loader", on_the_cpu)
    monkeypatch.setattr(run_gpu, "BLOCK_SIZE", 4)
    packed = set()
    for _ in range(2):
        found = run_gpu.ARMS[arm](run_gpu.Options(path, 8, 4, "warm"))
        # 50 minibatches are 12 fetches, of which the first and, as they load in pairs, the last one are not timed.
        assert found["cells_per_s"] * found["seconds"] == pytest.approx(8 * 4 * 10)
        assert found["io_mode"] == "posix"
        assert 0 <= found["waited_share"] <= 1
        if arm.startswith("gpuload-packed"):
            packed.add((found["pack_s"], found["store_nbytes"]))
            assert len(packed) == 1  # once, for both
    assert asked[0]["device"] == "cuda"


def test_every_record_file_has_a_documented_command():
    page = (ROOT / "benchmarks" / "README.md").read_text()
    for path in RESULTS.glob("*.jsonl"):
        command = f"python -m benchmarks.run_{path.stem.partition('_epyc')[0].partition('_apart')[0]}"
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
    of_another_machine = report.headline(records, report.ALSO)
    assert "| shuffled, dense float32 | 800 |" in of_another_machine
    assert "three chunks" not in of_another_machine
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
