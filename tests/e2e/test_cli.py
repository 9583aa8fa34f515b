"""The command line as its users meet it: what each command prints, writes, refuses and exits with."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import tracemalloc
from functools import partial
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from types import SimpleNamespace

import anndata
import h5py
import numpy as np
import pandas as pd
import pytest
from scipy.sparse import csr_matrix

from gpuload import BusyError, DeviceError, PlanError, ReadError, StoreError, open_loader, program
from gpuload.cli import COMMANDS, advice, demo, doctor, inspect, main, real_data, text
from gpuload.errors import CorruptDataError, MissingDependencyError
from gpuload.formats.obs import write_h5ad
from gpuload.synthetic import tahoe_shaped
from tests import writers


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    """Return a gzip file of 1,500 cells, sorted by plate."""
    path = tmp_path_factory.mktemp("cli") / "cells.h5ad"
    X, obs, var = tahoe_shaped(1_500, n_vars=400, n_plates=4, n_cell_lines=3, n_drugs=5)
    write_h5ad(path, X, obs, var, "gzip")
    return path


@pytest.fixture
def run(in_process):
    """Return a function that runs the command line; see `in_process`."""
    return partial(in_process, main)


# --- help and wrong use ---


@pytest.mark.parametrize(("place", "is_said"), [("a.h5ad", True), ("s3://b/a.h5ad", False)])
def test_page_cache_is_mentioned_for_local_files_only(place, is_said):
    from gpuload.cli import bench

    assert ("page cache" in bench._note([place], "cpu")) is is_said


def test_help_names_every_command_and_the_exit_codes(run):
    code, out, _ = run("--help")
    assert code == 0
    assert all(f"\n    {name} " in out for name in COMMANDS)
    assert "exit codes: 0 done, 1 " in out


@pytest.mark.parametrize("command", COMMANDS)
def test_help_of_every_command_has_examples(run, command):
    code, out, _ = run(command, "--help")
    assert code == 0
    assert f"examples:\n  gpuload {command}" in out
    assert "--json" in out


def test_version(run):
    code, out, _ = run("--version")
    assert (code, out) == (0, "gpuload 0.1.0\n")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "examples:\n  gpuload demo"),
        (["explain"], "invalid choice: 'explain'"),
        (["inspect"], "the following arguments are required: PATH"),
        (["inspect", ""], "argument PATH: '' is not a file name; give a path"),
        (["inspect", "s3://"], "inspect: s3://: it has no bucket or host; expected, for example, s3://bucket/"),
        (["inspect", "x", "--batch-size", "0"], "'0' is not a whole number of at least 1"),
        (["bench", "x", "--block-size", "row"], "'row' is not a whole number of at least 1, 'chunk' or 'N chunks'"),
        (["bench", "x", "--seconds", "-1"], "'-1' is not a number above 0"),
        (["bench", "x", "--seconds", "soon"], "'soon' is not a number above 0"),
        (
            ["inspect", "x", "--labl", "drug"],
            "inspect: error: unrecognized arguments: --labl drug; did you mean --label?",
        ),
        (["inspect", "x", "--labl=drug"], "inspect: error: unrecognized arguments: --labl=drug; did you mean --label?"),
        (["doctor", "x"], "doctor: error: unrecognized arguments: x\n"),
        (["tune", "x", "--zzz"], "tune: error: unrecognized arguments: --zzz\n"),
        (
            ["inspect", "x", "--label", "drug", "y"],
            "unrecognized arguments: y; give all paths together, before the opt",
        ),
        (["demo", "--cells", "10"], "--cells 10: expected at least 2000"),
    ],
)
def test_usage_errors_exit_with_2_and_a_message(run, arguments, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    code, out, err = run(*arguments)
    assert code == 2
    assert out == ""
    assert message in err


@pytest.mark.parametrize(("command", "option"), [("bench", "--timeline"), ("bench", "--report"), ("tune", "--out")])
def test_missing_output_folder_is_reported_before_the_work(run, path, tmp_path, command, option):
    file = tmp_path / "typo" / "out.png"
    code, out, err = run(command, path, "--seconds", 0.05, option, file)
    assert (code, out) == (1, "")
    assert err == (
        f"gpuload {command}: {file}: there is no folder {file.parent}; create it first, or choose another place.\n"
    )


@pytest.mark.parametrize(("command", "option"), [("bench", "--timeline"), ("bench", "--report"), ("tune", "--out")])
@pytest.mark.parametrize("is_there", [False, True])
def test_outputs_that_may_not_be_written_are_reported_before_the_work(
    run, path, tmp_path, command, option, is_there, monkeypatch
):
    """Root may write everywhere."""
    file = tmp_path / "out.png"
    if is_there:
        file.write_bytes(b"")
    access, place = os.access, file if is_there else tmp_path
    monkeypatch.setattr(os, "access", lambda of, mode: Path(of) != place and access(of, mode))
    code, out, err = run(command, path, "--seconds", 0.05, option, file)
    assert (code, out) == (1, "")
    told = f"{file}: cannot be written: this user may not write there. Choose another place."
    assert err == f"gpuload {command}: {told}\n"


@pytest.mark.parametrize(("command", "option"), [("bench", "--report"), ("tune", "--out")])
def test_data_files_are_not_overwritten(run, path, tmp_path, command, option):
    link, other = tmp_path / "link", tmp_path / "other.zarr.npz"
    link.symlink_to(path)
    other.write_text("data")
    before = path.read_bytes()
    for source, file in ((path, path), (path, link), (link, link), (path, other)):
        code, out, err = run(command, source, "--seconds", 0.05, option, file)
        assert (code, out) == (2, "")
        assert (
            err == f"gpuload {command}: {file}: this file holds data and would be lost; name another file to write.\n"
        )
    assert (path.read_bytes(), other.read_text()) == (before, "data")
    other = tmp_path / "genes.txt"
    other.write_text("g0")
    code, out, err = run(command, path, "--join", other, "--seconds", 0.05, option, other)
    assert (code, out, other.read_text()) == (2, "", "g0")
    code, out, err = run(command, path, "--seconds", 0.05, option, tmp_path)
    assert (code, out, err) == (1, "", f"gpuload {command}: {tmp_path}: this is a folder; name a file to write.\n")
    code, out, err = run(command, path, "--seconds", 0.05, option, "/dev/null")
    told = "/dev/null: cannot be written: it is no regular file. Choose another place."
    assert (code, out, err) == (1, "", f"gpuload {command}: {told}\n")


@pytest.mark.parametrize("command", ["inspect", "tune"])
def test_min_entropy_without_a_label_is_a_usage_error(run, path, command):
    code, out, err = run(command, path, "--min-entropy", 0.5)
    assert (code, out) == (2, "")
    assert err == f"gpuload {command}: --min-entropy 0.5 is of a label: give --label too.\n"


def test_contradictory_settings_are_a_usage_error(run, path):
    code, _, err = run("bench", path, "--output", "csr", "--dtype", "float16")
    assert code == 2
    assert err.startswith("gpuload bench: dtype='float16' with output='csr'")


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (PlanError("x"), 2),
        (StoreError("x"), 1),
        (BusyError("x"), 1),
        (DeviceError("x"), 1),
        (OSError(28, "x"), 1),
        (KeyboardInterrupt(), 130),
    ],
)
def test_commands_and_example_programs_end_with_the_same_codes(run, error, code, monkeypatch, capsys):
    def fail(*_):
        raise error

    monkeypatch.setattr(doctor, "run", fail)
    assert run("doctor")[0] == program.exit_code("example", fail) == code
    monkeypatch.setattr(program, "WRONG_USE", 3)
    assert run("doctor")[0] == program.exit_code("example", fail) == (3 if code == 2 else code)


# --- faults of the data ---


@pytest.mark.parametrize("command", ["inspect", "bench"])
@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "no such file. Check the path."),
        (b"text", "not a readable HDF5 file"),
        (b"\x1f\x8b\x08", "not a readable HDF5 file"),
        (b"\x89HDF\r\n\x1a\n", "not a readable HDF5 file"),
    ],
)
def test_unreadable_files_exit_with_1_and_one_sentence(run, tmp_path, command, content, message):
    path = tmp_path / "cells.h5ad"
    if content is not None:
        path.write_bytes(content)
    code, out, err = run(command, path)
    assert code == 1
    assert out == ""
    assert err.startswith(f"gpuload {command}: {path}: {message}")
    assert err.count("\n") == 1
    assert err.endswith("; gunzip it first.\n") == (content is not None and content[:2] == b"\x1f\x8b")
    damage = "it was truncated or damaged, or is being written: copy it again, or wait.\n"
    assert err.endswith(damage) == (content is not None and b"HDF" in content)


@pytest.mark.parametrize("name", ["matrix.mtx", "matrix.mtx.gz", "cells.csv", "cells.TSV"])
def test_text_files_are_recognised_in_the_error(tmp_path, name):
    (tmp_path / name).write_bytes(b"\x1f\x8b\x08" if name.endswith(".gz") else b"gene,cell")
    reader = r"anndata\.io\.read_csv\(path" if "csv" in name else r"scanpy\.read_10x_mtx\(folder"
    with pytest.raises(
        StoreError, match=rf"; this is text; write it as \.h5ad once, .*{reader}\)\.write_h5ad\(DST\)\.$"
    ):
        open_loader(tmp_path / name)


@pytest.mark.parametrize(
    ("content", "cure"),
    [
        (b"", "it is empty: copy it again."),
        (
            b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 12345\n",
            "this is Git LFS's pointer to the file; get that with `git lfs pull`.",
        ),
        (
            b"<?xml version='1.0'?><Error><Code>AccessDenied</Code></Error>",
            "this is a web page, or a server's refusal; look into it, and download the file again.",
        ),
    ],
)
def test_what_a_download_left_instead_of_the_file_is_recognised_in_the_error(tmp_path, content, cure):
    path = tmp_path / "cells.h5ad"
    path.write_bytes(content)
    with pytest.raises(StoreError) as caught:
        open_loader(path)
    message = str(caught.value)
    assert message.startswith(f"{path}: not a readable HDF5 file (")
    assert message.endswith(f"); {cure}")


def test_folder_of_files_of_several_formats_is_refused(tmp_path):
    for name in ("a.h5ad", "b.npy", "c.h5ad"):
        (tmp_path / name).touch()
    with pytest.raises(
        StoreError, match=r"holds files of several formats \(\.h5ad, \.npy\); pass those you mean as a list"
    ):
        open_loader(tmp_path)


def test_cell_ranger_folder_is_recognised_in_the_error(tmp_path):
    for name in ("barcodes.tsv.gz", "features.tsv.gz", "matrix.mtx.gz"):
        (tmp_path / name).write_bytes(b"\x1f\x8b\x08")
    with pytest.raises(StoreError, match=r"a matrix as text \(\.mtx\); write it as \.h5ad .*read_10x_mtx\(folder\)"):
        open_loader(tmp_path)


@pytest.mark.parametrize(
    ("name", "cure"),
    [
        ("~/cells.h5ad", "'~' is not expanded; pass os.path.expanduser(path)."),
        ("~/*.h5ad", "'~' is not expanded; pass os.path.expanduser(path)."),
        ("$DATA/cells.h5ad", "'$' is not expanded; pass os.path.expandvars(path)."),
        ("${DATA}/*.h5ad", "'$' is not expanded; pass os.path.expandvars(path)."),
    ],
)
def test_what_only_a_shell_expands_is_named_in_the_error(name, cure):
    with pytest.raises(ReadError) as caught:
        open_loader(name)
    assert str(caught.value) == f"{name}: no such file. {cure}"


def test_a_path_that_is_a_line_of_a_file_is_recognised_in_the_error(path, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    shutil.copy(path, "cells.h5ad")
    for name in ("cells.h5ad\n", " cells.h5ad", "*.h5ad "):
        with pytest.raises(ReadError) as caught:
            open_loader([name])
        expected = f"{name!r}: no such file. It begins or ends with white space; pass path.strip()."
        assert str(caught.value) == expected
    (tmp_path / "cells.h5ad").rename("$cells.h5ad ")  # a name of a file that is there is taken as it is
    with open_loader("$cells.h5ad ", device="cpu") as loader:
        assert loader.n_obs > 0


def test_files_of_r_and_loom_are_recognised_in_the_error(tmp_path):
    (tmp_path / "cells.rds").write_bytes(b"\x1f\x8b\x08")
    with pytest.raises(StoreError, match=r"; this is R's own format; write it from R as \.h5ad, .*anndataR\.$"):
        open_loader(tmp_path / "cells.rds")
    with h5py.File(tmp_path / "cells.loom", "w") as file:
        file["matrix"] = [[1.0, 2.0]]
        file.create_group("row_attrs")
    with pytest.raises(StoreError, match=r"there is no /X; .*; this is a loom file; write it as \.h5ad with anndata"):
        open_loader(tmp_path / "cells.loom")
    with h5py.File(tmp_path / "cells.h5seurat", "w") as file:
        file.create_group("assays/RNA")
    with pytest.raises(StoreError, match=r"there is no /X; .*; this is Seurat's own format; write it as \.h5ad, in R"):
        open_loader(tmp_path / "cells.h5seurat")


def test_a_damaged_chunk_exits_with_1(run, path, tmp_path):
    damaged = tmp_path / "damaged.h5ad"
    damaged.write_bytes(path.read_bytes())
    with h5py.File(damaged) as file:
        chunk = file["X/data"].id.get_chunk_info(0)
    with damaged.open("r+b") as file:
        file.seek(chunk.byte_offset + chunk.size // 2)
        file.write(b"\xff" * 32)
    code, _, err = run("bench", damaged, "--fetch-factor", 2, "--seconds", 0.1)
    assert code == 1
    assert "chunk 0 of /X/data" in err
    assert "Traceback" not in err


def test_unknown_label_or_layer_is_reported(run, path):
    code, _, err = run("inspect", path, "--label", "plates")
    assert code == 1
    assert "obs has no column 'plates'; did you mean 'plate'? It has 'plate', 'cell_line'" in err
    code, _, err = run("inspect", path, "--layer", "counts")
    assert code == 1
    assert "there is no layer 'counts'" in err


# --- inspect ---


def test_inspect_describes_the_file(run, path):
    code, out, err = run("inspect", path, "--label", "plate")
    assert (code, err) == (0, "")
    for part in (
        "cells                 1,500",
        "/X/data",
        "gzip 4",
        "plate entropy, bits",
        "pass_filter  bool",
        "4 categories",
    ):
        assert part in out
    assert f"gpuload.open_loader('{path}', batch_size=64, block_size=" in out


@pytest.mark.parametrize("is_dense", [False, True])
@pytest.mark.parametrize(
    ("place", "told"),
    [
        ("X", "X holds values that are not counts, from -2 to 0.5 in the cells read; if they are normalised already, "),
        ("halves", "halves holds values that are not counts, from 0 to 7.5 in the cells read; if they are normalised "),
        ("negative", "negative holds values that are not counts, from -3 to 4 in the cells read"),
        ("unknown", "unknown holds values that are not counts, from 1 to 2 in the cells read"),
        ("nothing", ""),
        ("raw.X", ""),
        ("obsm/X_pca", ""),
    ],
)
def test_inspect_says_if_values_are_not_counts(run, tmp_path, place, told, is_dense):
    counts = np.tile(np.array([0, 3, 15, 2], np.float32), (40, 1))
    cells = anndata.AnnData(counts.copy())
    cells.raw = cells.copy()
    cells.layers["halves"], cells.layers["nothing"] = counts / 2, np.zeros_like(counts)
    cells.layers["negative"] = np.tile(np.array([0, -3, 4, 1], np.float32), (40, 1))
    cells.layers["unknown"] = np.tile(np.array([1, np.nan, np.inf, 2], np.float32), (40, 1))
    cells.X = np.tile(np.array([0, -2, 0.5, 0], np.float32), (40, 1))
    cells.obsm["X_pca"] = -counts
    if not is_dense:
        cells.X = csr_matrix(cells.X)
        for name in cells.layers:
            cells.layers[name] = csr_matrix(cells.layers[name])
    cells.write_h5ad(tmp_path / "cells.h5ad")
    code, out, _ = run("inspect", tmp_path / "cells.h5ad", "--layer", place, "--json")
    said = [one for one in json.loads(out)["advice"]["reasons"] if one.startswith("transform: ")]
    assert code == 0
    assert len(said) == bool(told)
    assert all(told in one and one.endswith("leave transform out.") for one in said)


@pytest.mark.parametrize(
    ("scale", "told"),
    [
        (1, "transform: X is marked as log-transformed, in uns['log1p'], but the values of the cells read are counts."),
        (0.5, " in the cells read, and X is marked as log-transformed, in uns['log1p']; if they are normalised "),
    ],
)
def test_inspect_says_if_x_is_marked_as_logarithms(run, tmp_path, scale, told):
    cells = anndata.AnnData(np.full((9, 3), scale, np.float32), uns={"log1p": {}})
    cells.write_h5ad(tmp_path / "cells.h5ad")
    code, out, _ = run("inspect", tmp_path / "cells.h5ad")
    assert code == 0
    assert told in out


def test_only_some_values_are_looked_at(monkeypatch):
    monkeypatch.setattr(advice, "_LOOKED_AT", 10)
    seen = advice._Seen()
    for low in (1, 4, 7):
        seen.look(np.array([[low, low + 1], [low + 2, low + 0.5 * (low == 7)]], np.float32))
    assert (seen.low, seen.high, seen.are_counts) == (1, 8, True)
    monkeypatch.setattr(advice, "_LOOKED_AT", 12)
    seen = advice._Seen()
    for low in (1, 4, 7):
        seen.look(np.array([[low, low + 1], [low + 2, low + 0.5 * (low == 7)]], np.float32))
    assert (seen.low, seen.high, seen.are_counts) == (1, 9, False)


def test_inspect_as_json_agrees_with_the_file(run, path):
    code, out, _ = run("inspect", path, "--json")
    found = json.loads(out)
    with h5py.File(path) as file:
        nnz = np.diff(file["X/indptr"][:])
        stored = sum(file[f"X/{name}"].id.get_storage_size() for name in ("data", "indices"))
        chunk = file["X/data"].chunks[0]
    assert code == 0
    assert (found["n_obs"], found["n_vars"], found["kind"]) == (1_500, 400, "csr")
    assert found["nnz_per_cell"]["mean"] == pytest.approx(nnz.mean())
    assert found["nnz_per_cell"]["quantiles"]["0.5"] == pytest.approx(np.median(nnz))
    assert found["stored_nbytes"] == stored
    assert found["decoded_nbytes"] == 8 * nnz.sum()
    assert found["arrays"][0]["cells_per_chunk"] == pytest.approx(chunk / nnz.mean())
    assert list(found["obs"]) == ["plate", "cell_line", "drug", "gene_count", "tscp_count", "pass_filter"]


def test_values_per_cell_are_counted_in_slices(monkeypatch):
    rng = np.random.default_rng(0)
    lengths = [rng.poisson(90, 100_001), rng.poisson(2, 130_000), np.empty(0, dtype=np.int64)]
    matrices = [SimpleNamespace(indptr=np.append(0, np.cumsum(one)), n_rows=one.size) for one in lengths]
    monkeypatch.setattr(inspect, "SLICE", 1000)
    tracemalloc.start()
    found = inspect._nnz_per_cell(SimpleNamespace(kind="csr", n_obs=230_001, matrices=matrices))
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    nnz = np.concatenate(lengths)
    assert peak < 2 * nnz.size
    assert (found["mean"], found["sd"]) == (pytest.approx(nnz.mean()), pytest.approx(nnz.std()))
    assert list(found["quantiles"].values()) == pytest.approx(np.quantile(nnz, [0, 0.25, 0.5, 0.75, 1]))
    assert found["empty_cells"] == np.count_nonzero(nnz == 0) > 0


def test_advice_keeps_the_fetch_small_and_the_minibatch_mixed(run, path):
    code, out, _ = run("inspect", path, "--label", "plate", "--batch-size", 8, "--json")
    advice = json.loads(out)["advice"]
    assert code == 0
    assert advice["fetch_cells"] <= 1_500
    sizes = ("block_size", "fetch_factor")
    chosen = next(c for c in advice["candidates"] if all(c[size] == advice[size] for size in sizes))
    random = next(c for c in advice["candidates"] if c["block_size"] == 1)
    assert random["entropy_bits"] == pytest.approx(advice["random_entropy_bits"], rel=0.01)
    assert chosen["entropy_bits"] >= 0.99 * advice["random_entropy_bits"]
    assert chosen["amplification"] <= random["amplification"]
    for candidate in advice["candidates"]:
        assert candidate["is_whole_file"] == (candidate["n_blocks"] is None) == (8 * candidate["fetch_factor"] >= 1_500)
    assert any(c["entropy_bits"] < 0.5 * advice["random_entropy_bits"] for c in advice["candidates"])


def test_advice_names_a_label_of_any_name(run, tmp_path):
    obs = pd.DataFrame({"age group": ["young"] * 600 + ["old"] * 600}, index=[f"c{i}" for i in range(1_200)])
    cells = anndata.AnnData(np.ones((1_200, 2), np.float32), obs)
    cells.write_h5ad(tmp_path / "cells.h5ad")
    code, out, _ = run("inspect", tmp_path / "cells.h5ad", "--label", "age group", "--min-entropy", "0.5")
    assert code == 0
    assert "the cheapest with minibatches whose age group entropy is at least 50 % of true random order's " in out


def test_inspect_counts_cells_without_a_value(run, tmp_path):
    obs = pd.DataFrame({"type": ["B", None, "T", None], "depth": [1.5, np.nan, 2.0, 3.0], "plate": [1, 2, 3, 4]})
    cells = anndata.AnnData(np.ones((4, 2), np.float32), obs=obs.set_axis(list("abcd")))
    cells.write_h5ad(tmp_path / "cells.h5ad")
    code, out, _ = run("inspect", tmp_path / "cells.h5ad", "--json")
    assert code == 0
    assert json.loads(out)["obs"] == {
        "type": "2 categories, delivered as int64 codes; 2 missing",
        "depth": "float64; 1 missing",
        "plate": "int64",
    }


def test_inspect_describes_several_dense_files(run, tmp_path):
    X = writers.counts()
    paths = [tmp_path / "a.h5ad", tmp_path / "b.h5ad"]
    for path in paths:
        writers.write_h5ad(path, lambda file: writers.write_dense(file, "X", X.toarray()))
    code, out, _ = run("inspect", *paths)
    assert code == 0
    assert "X, dense" in out
    assert f"{paths[1]}:/X" in out
    assert "262" in out  # twice 131 cells
    assert f"\n\nobs columns of {paths[0]}\n" in out
    rows = {" ".join(line.split()[:4]) for line in out.splitlines()}  # 5 minibatches are all cells; one is 64
    assert "16 <- 16 all" in rows
    assert {row.rpartition(" ")[0] for row in rows} >= {"16 16 4", "64 64 1", "chunk 131 0.489"}
    code, out, _ = run("inspect", *paths, "--json")
    assert (code, json.loads(out)["obs_of"]) == (0, str(paths[0]))


@pytest.mark.parametrize("place", ["", "within/"])
def test_inspect_counts_the_bytes_of_the_files_that_match_a_pattern(run, tmp_path, monkeypatch, place):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "within").mkdir()
    for name in "abc":
        writers.write_plain(tmp_path / place / f"{name}.h5ad")
    code, out, _ = run("inspect", f"{place}[ab].h5ad", "--json")
    found = json.loads(out)
    assert (code, found["n_obs"]) == (0, 2 * writers.N_OBS)
    assert found["file_nbytes"] == sum((tmp_path / place / f"{name}.h5ad").stat().st_size for name in "ab")


def test_inspect_reports_that_a_file_has_no_cells(run, tmp_path):
    path = tmp_path / "empty.h5ad"
    writers.write_plain(path, writers.counts(0, 5))
    code, out, _ = run("inspect", path)
    assert code == 0
    assert "the file has no cells" in out
    picture = tmp_path / "plot.png"
    code, out, err = run("inspect", path, "--label", "cell_line", "--plot", picture)
    assert (code, out) == (2, "")
    assert err == f"gpuload inspect: --plot {picture}: {path} has no cells to plot; leave it out.\n"


def test_inspect_marks_unsupported_obs_columns(run, tmp_path):
    path = tmp_path / "cells.h5ad"
    writers.write_plain(path)
    with h5py.File(path, "r+") as file:
        del file["obs/depth"]
        names = "depth", "obs has no column"  # which is what the error of a missing one says
        for name in names:
            file["obs"][name] = np.zeros((writers.N_OBS, 2), dtype=[("a", "f4")])
            file["obs"][name].attrs.update({"encoding-type": "array", "encoding-version": "0.2.0"})
        file["obs"].attrs["column-order"] = [*file["obs"].attrs["column-order"], names[1]]
    code, out, _ = run("inspect", path, "--json")
    kinds = json.loads(out)["obs"]
    assert code == 0
    assert all(kinds[name].startswith("cannot be delivered") for name in names)
    assert kinds["n_counts"] == "int32"


def test_inspect_marks_obs_columns_of_some_data_sets_only(run, tmp_path):
    pytest.importorskip("zarr", minversion="3.0")
    from tests import zarr_writers

    path = tmp_path / "collection.zarr"
    zarr_writers.collection(path, 2)
    frame = path / "dataset_1/obs/zarr.json"
    meta = json.loads(frame.read_text())
    meta["attributes"]["column-order"].remove("depth")
    frame.write_text(json.dumps(meta))
    obs = zarr_writers.zarr.open_group(str(path), mode="r+")["dataset_0/obs"]
    zarr_writers.add_array(obs, "n_counts", np.zeros((20, 2)), overwrite=True)
    code, out, _ = run("inspect", path, "--json")
    kinds = json.loads(out)["obs"]
    assert code == 0
    assert kinds["depth"] == "in some of its data sets only"
    assert kinds["n_counts"].startswith("cannot be delivered: not one category")
    assert kinds["depth32"] == "float32"


@pytest.mark.parametrize("join", ["inner", "outer"])
def test_inspect_describes_the_obs_of_files_whose_genes_differ(run, tmp_path, join):
    for name, genes in ("a", range(5)), ("b", range(2, 7)):
        adata = anndata.AnnData(writers.counts(20, 5))
        adata.var_names = [f"g{number}" for number in genes]
        adata.obs["depth"] = np.arange(20)
        adata.obs["cluster"] = adata.obs["depth"] if name == "a" else adata.obs["depth"].astype(str)
        if name == "a":
            adata.obs["plate"] = np.arange(20.0)
        adata.write_h5ad(tmp_path / f"{name}.h5ad")
    code, out, _ = run("inspect", tmp_path, "--join", join, "--json")
    assert code == 0
    assert json.loads(out)["obs"] == {
        "depth": "int64",
        "cluster": "cannot be delivered: its type differs between files",
        "plate": "float64; 20 missing" if join == "outer" else "in some of its data sets only",
    }


# --- bench ---


def test_bench_reports_every_stage(run, path):
    code, out, err = run("bench", path, "--fetch-factor", 2, "--seconds", 0.1, "--repeats", 2, "--label", "plate")
    assert (code, err) == (0, "")
    for part in ("end to end", "plate entropy", "peak memory", "read ", "decode", "take_rows", "cpu, posix"):
        assert part in out


@pytest.mark.parametrize(("size", "kept"), [("64MiB", 1.0), ("20kB", None)])
def test_bench_measures_later_epochs_if_chunks_are_kept(run, path, size, kept):
    few = ("--fetch-factor", 2, "--seconds", 0.1, "--repeats", 1)
    code, out, err = run("bench", path, *few, "--memory-cache", size, "--json")
    assert (code, err) == (0, "")
    found = json.loads(out)["stages"]
    assert 0 < found["chunks_kept"] < 1 if kept is None else found["chunks_kept"] == kept
    assert (found["decoded_nbytes_per_cell"] == 0) == (kept is not None)
    out = run("bench", path, *few, "--memory-cache", size)[1]
    assert "kept by an earlier epoch" in out
    assert "The seconds of decode include those of copying chunks that were kept." in out
    if kept is not None:
        assert re.search(r"\n  decode +\S+ +- ", out)


def test_bench_measures_a_minibatch_however_short_a_repeat_is(run, path):
    code, out, err = run("bench", path, "--fetch-factor", 2, "--seconds", 1e-9, "--repeats", 1, "--json")
    assert (code, err) == (0, "")
    assert json.loads(out)["cells_per_s"]["min"] > 0


@pytest.mark.parametrize(("rate", "is_above"), [(1.0, True), (1e15, False)])
def test_bench_explains_a_rate_above_its_ceiling(run, path, monkeypatch, rate, is_above):
    from gpuload.cli import ceilings

    monkeypatch.setattr(ceilings, "measure", lambda *_: ceilings.Ceilings(rate, rate, rate))
    code, out, _ = run("bench", path, "--fetch-factor", 2, "--seconds", 0.1, "--repeats", 1)
    assert code == 0
    for stage, why in (
        ("read", "different moments"),
        ("decode", "a library's rate"),
        ("take_rows", "writing all values"),
    ):
        assert (f"\n  Above its ceiling: {stage}; " in out) == is_above
        assert (why in out) == is_above
    assert ("of it reached, as stages are above their ceilings (see below)" in out) == is_above


@pytest.mark.parametrize(
    ("n_threads", "n_at_once", "dtype", "itemsize"),
    [(1, 1, "float32", 4), (3, 2, "float32", 4), (1, 1, "float64", 8), (1, 1, "bfloat16", 2)],
)
def test_bench_ceiling_counts_only_threads_that_run_at_once(
    run, path, monkeypatch, n_threads, n_at_once, dtype, itemsize
):
    from gpuload.cli import ceilings

    monkeypatch.setattr("gpuload.cli.bench.usable_cores", lambda: 2)
    monkeypatch.setattr(ceilings, "measure", lambda *_: ceilings.Ceilings(np.inf, 1e6, 1e6))
    options = ["--num-threads", n_threads, "--fetch-factor", 2, "--seconds", 0.05, "--repeats", 1, "--json"]
    options += ["--dtype", dtype]
    stages = json.loads(run("bench", path, *options)[1])["stages"]
    per_cell_s = (stages["decoded_nbytes_per_cell"] + itemsize * 400) / 1e6
    assert stages["at_ceilings_cells_per_s"] == pytest.approx(n_at_once / per_cell_s)


@pytest.mark.parametrize(
    "options",
    [
        ["--stream", "--output", "csr"],
        ["--block-size", "chunk", "--target-sum", "1e4", "--log1p", "--dtype", "float16"],
        ["--block-size", "1", "--num-threads", "1", "--verify", "never", "--drop-last", "--prefetch", "1"],
        ["--dtype", "bfloat16"],
        ["--dtype", "float64", "--output", "csr"],
        ["--downsample", "0.5", "--output", "csr"],
    ],
)
def test_bench_as_json_takes_all_settings(run, path, options):
    code, out, _ = run("bench", path, "--json", "--fetch-factor", 2, "--seconds", 0.05, "--repeats", 2, *options)
    result = json.loads(out)
    assert code == 0
    assert result["cells_per_s"]["median"] > 0
    assert len(result["cells_per_s"]["repeats"]) == 2
    assert result["stages"]["decode"]["ceiling_bytes_per_s"] > 0
    assert result["peak_memory_nbytes"] > 1e7
    assert result["entropy_bits"] is None


def test_bench_measures_the_entropy_of_the_orders(run, path):
    options = ["--json", "--batch-size", 32, "--fetch-factor", 8, "--seconds", 0.2, "--repeats", 1, "--label", "plate"]
    entropy = {
        name: json.loads(run("bench", path, *options, *extra)[1])["entropy_bits"]
        for name, extra in {"stream": ["--stream"], "random": ["--block-size", 1]}.items()
    }
    assert entropy["random"]["mean"] == pytest.approx(entropy["random"]["true_random"], abs=0.05)
    assert entropy["stream"]["mean"] < 0.5


def test_bench_takes_genes_from_a_file(run, path, tmp_path):
    names = tmp_path / "genes.txt"
    names.write_text("gene_003\n\ngene_001\n")
    code, out, _ = run(
        "bench", path, "--genes", names, "--json", "--seconds", 0.05, "--repeats", 1, "--fetch-factor", 2
    )
    assert code == 0
    assert json.loads(out)["n_vars"] == 2
    code, _, err = run("bench", path, "--genes", tmp_path / "none.txt")
    assert code == 1
    assert "expected a text file of genes, or a condition on columns of var; " in err
    assert "none.txt: cannot be opened" in err


def test_bench_takes_genes_by_a_condition(run, tmp_path):
    X, obs, var = tahoe_shaped(300, n_vars=400, n_plates=4, n_cell_lines=3, n_drugs=5)
    write_h5ad(tmp_path / "cells.h5ad", X, obs, var.assign(rank=range(400)), "gzip")
    options = ("--json", "--seconds", 0.05, "--repeats", 1, "--fetch-factor", 2)
    code, out, _ = run("bench", tmp_path / "cells.h5ad", "--genes", "rank < 3", *options)
    assert code == 0
    assert json.loads(out)["n_vars"] == 3


def test_bench_refuses_an_epoch_without_minibatches(run, path, tmp_path):
    code, _, err = run("bench", path, "--drop-last", "--batch-size", 2_000)
    assert code == 2
    assert "gpuload bench: drop_last=True: the 1500 cells of an epoch are too few for a minibatch of 2000, so" in err
    np.save(tmp_path / "none.npy", np.zeros((0, 3), np.float32))
    code, _, err = run("bench", tmp_path / "none.npy")
    assert code == 2
    assert f"gpuload bench: {tmp_path}/none.npy: there is no minibatch to measure; it has 0 cells." in err


def test_bench_reports_a_file_truncated_during_the_run(run, tmp_path, monkeypatch):
    from gpuload.cli import ceilings

    path, real = tmp_path / "cells.h5ad", ceilings.measure
    writers.write_plain(path)

    def cut_first(recipes, batch_nbytes):
        os.truncate(path, 1_000)
        return real(recipes, batch_nbytes)

    monkeypatch.setattr(ceilings, "measure", cut_first)
    code, _, err = run("bench", path, "--seconds", 0.05, "--repeats", 1, "--fetch-factor", 2)
    assert code == 1
    assert err.startswith(f"gpuload bench: {path}: short read of /X/data at byte ")
    assert err.endswith(". Was the file truncated?\n")


@pytest.mark.parametrize(
    ("command", "option", "feature"),
    [("bench", "--timeline", "timeline"), ("bench", "--report", "timeline"), ("inspect", "--plot", "plot")],
)
def test_missing_matplotlib_is_reported_before_the_work(run, path, tmp_path, monkeypatch, command, option, feature):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    picture = tmp_path / ("page.html" if option == "--report" else "picture.png")
    code, out, err = run(command, path, "--label", "plate", option, picture)
    assert (code, out) == (1, "")
    told = f"the {feature} needs matplotlib, which is not installed; install it with: pip install 'gpuload[plot]'"
    assert err == f"gpuload {command}: {told}\n"


@pytest.mark.parametrize("batch_size", [1_500, 2_000])  # of all cells; of more than there are
def test_bench_accepts_whole_numbers_as_a_label(run, path, batch_size):
    options = ["--batch-size", batch_size, "--fetch-factor", 1, "--stream", "--seconds", 0.05, "--repeats", 1, "--json"]
    code, out, _ = run("bench", path, "--label", "gene_count", *options)
    with h5py.File(path) as file:
        shares = np.unique(file["obs/gene_count"][:], return_counts=True)[1] / 1_500
    assert code == 0
    assert json.loads(out)["entropy_bits"]["mean"] == pytest.approx(-(shares * np.log2(shares)).sum())


def test_bench_refuses_fractions_as_a_label_before_the_work(run, tmp_path, monkeypatch):
    monkeypatch.setattr("gpuload.cli.bench._endless", None)
    writers.write_plain(tmp_path / "cells.h5ad")
    code, _, err = run("bench", tmp_path / "cells.h5ad", "--label", "depth")
    assert (code, err) == (
        2,
        "gpuload bench: --label depth: this column holds fractions; choose one that names groups of cells.\n",
    )


# --- pack ---


def test_pack_accepts_columns_before_the_paths(run, path, tmp_path):
    code, _, err = run("pack", "--obs", "plate", "--obs", "drug", path, tmp_path / "out.zarr", "--quiet")
    assert (code, err) == (0, "")
    code, out, _ = run("inspect", tmp_path / "out.zarr", "--json")
    assert list(json.loads(out)["obs"]) == ["plate", "drug", "source_file", "source_row"]


# --- doctor ---


def test_doctor_finds_this_machine_healthy(run):
    code, out, err = run("doctor")
    assert (code, err) == (0, "")
    for part in ("self-test", "device='auto'", "I/O path", "kernel cache", "open files"):
        assert part in out


def test_doctor_as_json(run):
    code, out, _ = run("doctor", "--json")
    report = json.loads(out)
    assert code == 0
    assert report["is_broken"] is False
    assert {f["name"] for f in report["required"]} >= {"python", *doctor.REQUIRED}


def test_doctor_exits_with_1_if_a_required_package_is_missing(run, monkeypatch):
    real = doctor.version

    def version(package):
        if package in ("h5py", "torch"):
            raise PackageNotFoundError(package)
        return real(package)

    monkeypatch.setattr(doctor, "version", version)
    code, out, _ = run("doctor")
    assert code == 1
    assert "h5py         not installed (BROKEN)" in out
    assert "  h5py: pip install h5py" in out
    assert "  torch: for the PyTorch front: pip install 'gpuload[torch]'" in out


def test_doctor_reports_where_kernels_are_cached(run, monkeypatch, tmp_path):
    """A folder in the temporary folder, as containers have, is named; one that cannot be made is reported."""
    from numba import config

    def found() -> str:
        (line,) = (line for line in run("doctor")[1].splitlines() if line.lstrip().startswith("kernel cache  "))
        return line

    monkeypatch.setattr(config, "CACHE_DIR", str(tmp_path / "numba"))
    assert str(tmp_path / "numba") in found()
    (tmp_path / "file").touch()
    monkeypatch.setattr(config, "CACHE_DIR", str(tmp_path / "file"))
    assert "no writable folder" in found()


FACTS = {"kvikio": "26.10.0", "cufile": "1.15", "compat_mode": "AUTO", "prefers_compat": False}
FACTS |= {"has_nvidia_fs": False, "may_bounce": True}


@pytest.mark.parametrize(
    ("facts", "path"),
    [
        ({}, "compat: without GPUDirect Storage"),
        ({"has_nvidia_fs": True}, "gds where the file system supports it"),
        ({"may_bounce": False}, "gds where the file system supports it"),
        ({"has_nvidia_fs": True, "prefers_compat": True}, "compat: KvikIO's own choice here (can /run/udev be read"),
        ({"has_nvidia_fs": True, "prefers_compat": True, "compat_mode": "ON"}, "compat: KvikIO is told not to use"),
    ],
)
def test_doctor_predicts_the_gpu_io_path(monkeypatch, facts, path):
    monkeypatch.setattr("gpuload.backends.cuda.kvikio_facts", lambda _: {**FACTS, **facts})
    told = doctor._gpu_path(0)
    assert told.startswith(path)
    assert "KvikIO 26.10.0, cuFile 1.15." in told


def test_doctor_reports_why_kvikio_is_not_used(monkeypatch):
    def missing(_: int) -> None:
        raise MissingDependencyError("nvidia-cufile", "reading to a GPU through KvikIO", "cuda13")

    monkeypatch.setattr("gpuload.backends.cuda.kvikio_facts", missing)
    assert doctor._gpu_path(0).startswith("pinned: through page-locked memory alone. reading to a GPU through KvikIO")


def test_doctor_says_why_a_gpu_is_not_used(run, monkeypatch):
    monkeypatch.setattr("gpuload.cli.doctor._gpus", lambda: ["an H100"])
    monkeypatch.setattr("gpuload.backends.ctypes.CDLL", lambda name: None)
    monkeypatch.setattr("gpuload.backends._is_installed", lambda package: package != "kvikio")
    code, out, _ = run("doctor")
    assert code == 0
    assert (
        "  device='auto': A GPU is present but is not used: device='cuda' needs kvikio, which is not installed; "
        "install it with: pip install 'gpuload[cuda13]', or with CUDA 12 'gpuload[cuda12]'\n" in out
    )


@pytest.mark.parametrize(("options", "is_watched"), [((), True), ((), False), (("--quiet",), True)])
def test_doctor_says_that_trying_a_gpu_takes_time(run, monkeypatch, options, is_watched):
    monkeypatch.setattr("gpuload.cli.doctor._gpus", lambda: ["an H100"])
    monkeypatch.setattr("gpuload.cli.doctor.is_watched", lambda: is_watched)
    _, out, err = run("doctor", *options)
    said = "trying the GPU; kernels are compiled for it once, in up to half a minute\n"
    assert err == (said if is_watched and not options else "")
    assert "trying" not in out


def test_doctor_survives_a_failing_engine(run, monkeypatch):
    monkeypatch.setattr("gpuload.open_loader", lambda *a, **k: (_ for _ in ()).throw(CorruptDataError("bad.")))
    code, out, _ = run("doctor")
    assert code == 1
    assert "CorruptDataError: bad. (BROKEN)" in out


# --- demo ---


@pytest.fixture(scope="module")
def demo_folder(tmp_path_factory):
    pytest.importorskip("nvidia.dali")
    return tmp_path_factory.mktemp("demo")


@pytest.fixture(autouse=True)
def pretend_gpu(request, monkeypatch):
    """Make the demo see a GPU that it must not use: its models stay on the CPU."""
    if "demo" in request.node.name:
        monkeypatch.setattr("gpuload.backends.first_gpu", lambda: (0, "a GPU is there"))


def _demo(run, folder, *options):
    return run("demo", "--cells", 2_000, "--seconds", 1, "--data", folder, "--no-real", *options)


def test_demo_compares_the_orders_and_saves_table_and_picture(run, demo_folder):
    code, out, err = _demo(run, demo_folder, "--out", demo_folder / "out")
    assert code == 0
    assert "Traceback" not in err
    assert all(f"\n  {order} " in out for order in demo.ORDERS)
    assert "a fetch's 4 blocks cannot hold all 50 classes" in out
    assert (demo_folder / "out" / "demo.png").read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    (data_set,) = json.loads((demo_folder / "out" / "demo.json").read_text())["data_sets"]
    assert data_set["fetch_share"] <= 0.05
    assert data_set["n_train"] + data_set["n_held_out"] == 2_000
    streaming, block, random = data_set["orders"]
    assert streaming["entropy_bits"] < 0.5
    assert random["entropy_bits"] == pytest.approx(data_set["true_random_entropy_bits"], abs=0.1)
    assert streaming["entropy_bits"] < block["entropy_bits"]
    lengths = {len(order["loss"]) for order in data_set["orders"]}
    assert lengths == {data_set["n_batches"]}
    for order in (block, random):
        assert order["held_out_loss"][-1][2] < order["held_out_loss"][0][2]


@pytest.mark.slow
def test_demo_does_not_make_its_files_twice(run, demo_folder):
    demo._synthetic(SimpleNamespace(data=demo_folder, cells=2_000, fresh=False, quiet=True))  # unless another test did
    before = (demo_folder / demo.SYNTHETIC).stat().st_mtime_ns
    code, out, err = _demo(run, demo_folder, "--json")
    assert code == 0
    assert "writing" not in err
    assert (demo_folder / demo.SYNTHETIC).stat().st_mtime_ns == before
    assert [o["order"] for o in json.loads(out)["data_sets"][0]["orders"]] == list(demo.ORDERS)


@pytest.mark.slow
def test_demo_continues_without_a_network(run, demo_folder, monkeypatch, tmp_path):
    monkeypatch.setattr(real_data, "PACKAGE", "gpuload-no-such-package==0")
    monkeypatch.setattr(real_data, "_PIP", (*real_data._PIP, "--no-index"))
    code, _, err = run("demo", "--cells", 2_000, "--seconds", 0.2, "--data", demo_folder, "--out", tmp_path)
    assert code == 0
    assert "pip could not download gpuload-no-such-package==0 (" in err
    assert err.rstrip().endswith("the demo's real cells are left out.")


@pytest.mark.parametrize(
    ("module", "package"),
    [("torch", "torch"), ("nvidia.dali", "nvidia-dali-cuda130"), ("matplotlib", "matplotlib")],
)
def test_demo_reports_a_missing_package_before_the_work(run, tmp_path, monkeypatch, module, package):
    monkeypatch.delitem(sys.modules, "gpuload.cli.training", raising=False)
    monkeypatch.delattr("gpuload.cli.training", raising=False)
    monkeypatch.setattr(demo, "PACKAGES", {p: m if p == package else "json" for p, m in demo.PACKAGES.items()})
    monkeypatch.setitem(sys.modules, module, None)
    code, out, err = _demo(run, tmp_path / "data")
    assert (code, out) == (1, "")
    assert err == (
        f"gpuload demo: the demo needs {package}, which is not installed; "
        "install it with: pip install 'gpuload[demo]'\n"
    )
    assert not (tmp_path / "data").exists()


def test_demo_refuses_a_folder_that_cannot_be_made(run, tmp_path):
    pytest.importorskip("nvidia.dali")
    (tmp_path / "file").write_text("")
    code, _, err = run("demo", "--no-real", "--data", tmp_path / "file" / "data")
    assert code == 1
    assert "this folder cannot be created" in err


@pytest.mark.parametrize("option", ["--data", "--out"])
def test_demo_refuses_a_folder_that_cannot_be_written_to(run, demo_folder, option):
    code, out, err = _demo(run, demo_folder, option, "/proc/self")
    assert (code, out) == (1, "")
    assert err.startswith("gpuload demo: /proc/self: this folder cannot be created or written to: ")
    assert err.count("\n") == 1


@pytest.mark.slow
def test_demo_prints_results_that_it_cannot_save(run, demo_folder, tmp_path):
    (tmp_path / "demo.json").mkdir()
    code, out, err = _demo(run, demo_folder, "--out", tmp_path)
    assert code == 1
    assert "\n  block shuffling " in out
    assert err.endswith(
        f"gpuload demo: {tmp_path / 'demo.json'}: cannot be written: Is a directory. Choose another place.\n"
    )


def test_unexpected_real_cells_are_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(real_data, "_unpack", lambda: b"something else")
    with pytest.raises(real_data.DownloadError, match="is not the expected file; the demo's real cells are left out"):
        real_data.fetch(tmp_path)


def test_interrupted_download_of_real_cells_is_redone(tmp_path, monkeypatch):
    downloads = [b"the whole file"]
    monkeypatch.setattr(real_data, "SHA256", hashlib.sha256(downloads[0]).hexdigest())
    monkeypatch.setattr(real_data, "_unpack", downloads.pop)
    path = tmp_path / os.path.basename(real_data.MEMBER)
    path.write_bytes(b"the wh")
    for _ in range(2):
        assert real_data.fetch(tmp_path) == path
        assert path.read_bytes() == b"the whole file"


def test_real_cells_that_another_demo_reads_are_not_written_over(tmp_path, monkeypatch):
    """Of two that begin at once, one may have downloaded them while the other still looked for them."""
    path, content = tmp_path / os.path.basename(real_data.MEMBER), b"the whole file"
    read = []

    def downloaded():
        path.write_bytes(content)
        read.append(path.open("rb"))
        return content

    monkeypatch.setattr(real_data, "SHA256", hashlib.sha256(content).hexdigest())
    monkeypatch.setattr(real_data, "_unpack", downloaded)
    real_data.fetch(tmp_path)
    with read.pop() as file:
        assert os.fstat(file.fileno()).st_ino != path.stat().st_ino
        assert file.read() == path.read_bytes() == content
    assert os.listdir(tmp_path) == [path.name]


def test_real_cells_are_sorted_by_type_and_keep_their_values(run, tmp_path):
    """Read from a file like the one that ships: dense X, raw.X with all genes, cells in no order."""
    path = tmp_path / "cells.h5ad"
    X = writers.counts()
    writers.write_raw(path, X)
    with h5py.File(path, "r+") as file:
        file.move("obs/stage", f"obs/{real_data.LABEL}")
        file["obs"].attrs["column-order"] = [real_data.LABEL]
    stage = writers.cells_frame()["stage"]
    found, obs, var = real_data.read(path)
    order = stage.cat.codes.to_numpy().argsort(kind="stable")
    assert found.shape == X.shape
    assert len(var) == X.shape[1]
    assert list(obs[real_data.LABEL]) == list(stage.iloc[order])
    np.testing.assert_array_equal(found.toarray(), X.toarray()[order])


# --- the process ---


def test_module_runs_and_survives_a_closed_pipe(path):
    """``python -m gpuload`` works, and survives a reader that closes the pipe early."""
    command = [sys.executable, "-m", "gpuload", "inspect", str(path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=_environment())
    assert (done.returncode, done.stderr) == (0, "")
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=_environment()) as process:
        process.stdout.close()
        assert b"Traceback" not in process.stderr.read()


def test_full_disk_is_reported_in_one_sentence(path):
    command = [sys.executable, "-m", "gpuload", "inspect", str(path)]
    with open("/dev/full", "w") as full:
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, check=False, env=_environment())
    assert (done.returncode, done.stderr) == (1, "gpuload: [Errno 28] No space left on device\n")


def _environment():
    return {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}


# --- words ---


@pytest.mark.parametrize(
    ("nbytes", "words"),
    [(0, "0 B"), (999, "999 B"), (1_000, "1.0 kB"), (99_960, "100 kB"), (1.5e9, "1.5 GB"), (5e15, "5000 TB")],
)
def test_sizes_are_human_readable(nbytes, words):
    assert text.size(nbytes) == words


def test_json_has_no_nan():
    assert text.plain({"a": (np.float32("nan"), np.int64(3)), 1: np.array([1.0, np.inf])}) == {
        "a": [None, 3],
        "1": [1.0, None],
    }
