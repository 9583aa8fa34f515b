"""`gpuload.pack` interrupted, refused, damaged: the target appears whole or not at all."""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import anndata as ad
import h5py
import numpy as np
import pandas as pd
import pytest
from scipy.sparse import csc_matrix, csr_matrix

import gpuload
from gpuload import packing
from gpuload.packing import columns, files, parts, passes, rows, shards, tables, work, workplace, zarr_files
from tests.test_pack import MEMORY, assert_same_rows, cells, written

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT = Path(__file__).parents[1]

KILLED_IN_THE_MIDDLE = """
import json, os, signal, sys
import anndata, gpuload.backends.cpu, gpuload.formats.h5ad
from gpuload.packing import columns, files, job, parts, shards, zarr_files

def run(source, target, left, what, settings):
    def write_half(path, pieces):
        nonlocal left
        if not path.endswith(what) and f"/{what}/" not in path:
            return files.write_whole(path, pieces)
        left -= 1
        if left >= 0:
            return files.write_whole(path, pieces)
        with open(path + ".1.partial", "wb") as file:
            file.write(b"".join(bytes(piece) for piece in pieces)[:100])
        os.kill(os.getpid(), signal.SIGKILL)

    parts.write_whole = shards.write_whole = zarr_files.write_whole = write_half
    gpuload.pack(source, target, memory=1 << 20, block_size=16, **settings)

for line in sys.stdin:
    pid = os.fork()
    if not pid:
        run(*json.loads(line))
        os._exit(0)
    print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)
"""
"""A process that packs in others, each of which is killed; it starts them by forking, for its imports take longest."""


@pytest.fixture(scope="module")
def pack_until_killed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., None]]:
    """Return a function that packs in a process that is killed in the middle of a file, and waits for its end."""
    log = tmp_path_factory.mktemp("killed") / "stderr"
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with (
        log.open("w") as stderr,
        subprocess.Popen([sys.executable, "-c", KILLED_IN_THE_MIDDLE], stderr=stderr, **pipes) as process,
    ):

        def pack(source: Path, target: Path, n_before: int, what: str, **settings: Any) -> None:
            assert process.stdin is not None
            assert process.stdout is not None
            print(json.dumps([str(source), str(target), n_before, what, settings]), file=process.stdin, flush=True)
            assert process.stdout.readline() == f"{-signal.SIGKILL}\n", log.read_text()

        yield pack


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Cells that take several parts and buckets in the least memory."""
    return written(cells(3_000, 200), tmp_path_factory.mktemp("faults") / "cells.h5ad")


def work_on(target: Path) -> Path:
    """Return the folder in which an unfinished target is made."""
    (plan,) = Path(f"{target}.packing").glob("*/plan.json")
    return plan.parent


def contents(store: Path) -> dict[str, bytes]:
    return {str(path.relative_to(store)): path.read_bytes() for path in store.rglob("*") if path.is_file()}


def test_pack_resumes_after_a_kill(source: Path, tmp_path: Path, pack_until_killed: Callable[..., None]) -> None:
    target = tmp_path / "out.zarr"
    gpuload.pack(source, tmp_path / "whole.zarr", memory=MEMORY, block_size=16)
    seen = []
    for n_before, what in ((0, "obs/plate/codes"), (2, "parts"), (1, "data/c"), (0, "X/zarr.json")):
        pack_until_killed(source, target, n_before, what)
        assert not target.exists()
        folder = work_on(target)
        names = os.listdir(folder / "parts")
        seen.append((len([n for n in names if n.isdecimal()]), len(os.listdir(folder / "done"))))
    n_parts, n_buckets = seen[-1]
    assert seen[0] == (0, 0)
    assert 0 < seen[1][0] < n_parts
    assert seen[2][0] == n_parts
    assert seen[2][1] < n_buckets
    before = {path: path.stat().st_mtime_ns for path in (folder / "store/X").rglob("c/*") if "indptr" not in str(path)}
    packed = gpuload.pack(source, target, memory=MEMORY, block_size=16)
    assert packed.n_resumed == n_parts + n_buckets
    after = {folder / "store" / path.relative_to(target): path.stat().st_mtime_ns for path in target.rglob("c/*")}
    assert not before.items() - after.items(), "a finished shard was written again"
    assert contents(target) == contents(tmp_path / "whole.zarr")
    assert sorted(os.listdir(tmp_path)) == ["out.zarr", "whole.zarr"]


@pytest.fixture(scope="module")
def source_with_several_matrices(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Cells with matrices besides X: a layer by rows and one by columns that take several parts, and a small obsm."""
    adata = cells(3_000, 200)
    adata.layers["double"] = adata.X * 2
    adata.layers["by_columns"] = (adata.X * 3).tocsc()
    adata.obsm["X_pca"] = np.random.default_rng(0).normal(size=(3_000, 4))
    return written(adata, tmp_path_factory.mktemp("faults") / "several.h5ad")


SEVERAL: dict[str, Any] = {"layer": ["X", "double", "by_columns"], "obsm": ["X_pca"]}


def test_pack_resumes_after_a_kill_in_any_matrix(
    source_with_several_matrices: Path, tmp_path: Path, pack_until_killed: Callable[..., None]
) -> None:
    target, folder = tmp_path / "out.zarr", tmp_path / "out.zarr.packing"
    settings: dict[str, Any] = {"memory": MEMORY, "block_size": 16, **SEVERAL}
    whole = gpuload.pack(source_with_several_matrices, tmp_path / "whole.zarr", **settings)
    finished: dict[Path, int] = {}
    for n_before, what in (
        (1, "matrix-000002/rows-000000/parts"),
        (1, "by_columns/data/c"),  # of the passing store
        (1, "matrix-000001/parts"),
        (1, "layers/double/data/c"),
        (2, "matrix-000002/parts"),
        (0, "obsm/X_pca/c/0"),
        (0, "obs/plate/codes"),
    ):
        pack_until_killed(source_with_several_matrices, target, n_before, what, **SEVERAL)
        assert not target.exists()
        now = {path: path.stat().st_mtime_ns for path in folder.rglob("*") if path.parent.name in ("parts", "done")}
        gone = {path for path in finished if path not in now and "rows-000000/parts" not in str(path)}
        assert not gone, "finished work was thrown away"
        assert all(now[path] == finished[path] for path in finished if path in now), "finished work was done again"
        finished = {path: stamp for path, stamp in now.items() if not path.name.endswith(".partial")}
    assert len([path for path in finished if "matrix-000001" in str(path)]) > 3
    packed = gpuload.pack(source_with_several_matrices, target, **settings)
    assert packed.n_resumed == len([path for path in finished if "rows-000000" not in str(path)])
    assert packed.digest == whole.digest
    assert contents(target) == contents(tmp_path / "whole.zarr")
    assert sorted(os.listdir(tmp_path)) == ["out.zarr", "whole.zarr"]


@pytest.mark.parametrize(("first", "stride"), [(3, 41), pytest.param(0, 1, marks=pytest.mark.slow)])
def test_pack_resumes_after_a_kill_at_any_step(first: int, stride: int, tmp_path: Path) -> None:
    command = [sys.executable, "-W", "ignore", "-m", "tests.pack_steps", str(tmp_path), str(first), str(stride)]
    done = subprocess.run(command, check=False, timeout=3_000, capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) > 100


GROWTH_OF_MEMORY = """
import re, sys
import gpuload

def peak():  # what getrusage tells begins with that of the process that started this one
    with open("/proc/self/status") as status:
        return int(re.search(r"VmHWM:\\s+(\\d+) kB", status.read())[1]) << 10

small, large, target, memory = sys.argv[1:]
gpuload.pack(small, target + ".small", memory=memory, num_threads=2)
before = peak()
gpuload.pack(large, target, memory=memory, num_threads=2)
print(peak() - before)
"""


def test_memory_is_bounded_whatever_the_size(tmp_path: Path) -> None:
    n_obs, n_values = 20_000, 500
    rng = np.random.default_rng(0)
    indices = rng.integers(0, 2_000, n_obs * n_values)
    X = csr_matrix((np.ones(indices.size, np.float32), indices, np.arange(n_obs + 1) * n_values), (n_obs, 2_000))
    sources = [str(written(ad.AnnData(X[:n]), tmp_path / f"{n}.h5ad")) for n in (200, n_obs)]
    growth = {}
    for memory in ("16MiB", "1GiB"):
        command = [sys.executable, "-W", "ignore", "-c", GROWTH_OF_MEMORY, *sources, str(tmp_path / memory), memory]
        done = subprocess.run(command, check=False, timeout=300, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        growth[memory] = int(done.stdout)
    assert growth["16MiB"] < (16 << 20) + 100 * n_obs + (16 << 20)  # offsets, order, obs; what libraries keep
    assert growth["1GiB"] > 1.5 * growth["16MiB"], "more is not taken where it is allowed: the test shows nothing"


def test_joined_genes_are_counted_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one, two = cells(1_500, 150, 1), cells(1_500, 200, 2)
    paths = [written(one, tmp_path / "one.h5ad"), written(two, tmp_path / "two.h5ad")]
    settings: dict[str, Any] = {"memory": MEMORY, "join": "inner"}
    gpuload.pack(paths, tmp_path / "whole.zarr", **settings)
    target = tmp_path / "out.zarr"
    with monkeypatch.context() as patch:
        patch.setattr(passes, "write_bucket", fail)
        with pytest.raises(RuntimeError):
            gpuload.pack(paths, target, **settings)
    monkeypatch.setattr(rows.RowReader, "count_kept", fail)
    assert gpuload.pack(paths, target, **settings).n_resumed > 0
    assert contents(target) == contents(tmp_path / "whole.zarr")


@pytest.mark.parametrize("matrix", ["layers/double", "layers/by_columns", "obsm/X_pca"])
def test_wrong_value_in_any_matrix_is_detected(
    matrix: str, source_with_several_matrices: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = shards._shard

    def damage(job: Any, name: str, number: int, elements: Any, pool: Any) -> Any:
        if job.origin.member == matrix and name in ("", "data") and "rows-" not in job.origin.folder:
            elements = elements.copy()
            damage_values(elements)
        return plain(job, name, number, elements, pool)

    monkeypatch.setattr(shards, "_shard", damage)
    with pytest.raises(gpuload.CorruptDataError, match="do not read back as those of the sources"):
        gpuload.pack(source_with_several_matrices, tmp_path / "out.zarr", **SEVERAL)
    assert not (tmp_path / "out.zarr").exists()


def test_too_little_disk_for_a_transposition_leaves_nothing(
    source_with_several_matrices: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(workplace.shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(1, 1, 10_000))  # type: ignore[attr-defined]
    with pytest.raises(gpuload.ReadError, match="packing needs up to"):
        gpuload.pack(source_with_several_matrices, tmp_path / "out.zarr", **SEVERAL)
    assert not os.listdir(tmp_path)


@pytest.fixture
def stopped(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a target whose packing failed after the first pass."""
    with monkeypatch.context() as patch:
        patch.setattr(passes, "write_bucket", fail)
        with pytest.raises(RuntimeError):
            gpuload.pack(source, tmp_path / "out.zarr", memory=MEMORY)
    return tmp_path / "out.zarr"


def fail(*args: Any, **settings: Any) -> None:
    raise RuntimeError("planted")


def test_interrupted_transposition_resumes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    adata = cells(3_000, 200)
    adata.X = adata.X.tocsc()
    path, target = written(adata, tmp_path / "in.h5ad"), tmp_path / "out.zarr"
    with monkeypatch.context() as patch:
        patch.setattr(columns, "write_shards", fail)
        with pytest.raises(RuntimeError):
            gpuload.pack(path, target, memory=MEMORY)
    folder = work_on(target) / "rows-000000" / "parts"
    parts = {part.name: part.stat().st_mtime_ns for part in folder.iterdir()}
    assert len(parts) > 1
    with monkeypatch.context() as patch:
        patch.setattr(columns, "_verify", fail)
        with pytest.raises(RuntimeError):
            gpuload.pack(path, target, memory=MEMORY)
    assert {part.name: part.stat().st_mtime_ns for part in folder.iterdir()} == parts
    gpuload.pack(path, target, memory=MEMORY)
    assert_same_rows(target, path)


def test_wrong_transposition_is_detected(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    adata = cells(300, 20)
    adata.X = adata.X.tocsc()
    plain = columns.place_elements

    def misplace(rows: Any, genes: Any, *others: Any) -> None:
        plain(rows, genes[::-1].copy(), *others)

    monkeypatch.setattr(columns, "place_elements", misplace)
    with pytest.raises(gpuload.CorruptDataError, match="do not read back by rows as they lie by columns"):
        gpuload.pack(written(adata, tmp_path / "in.h5ad"), tmp_path / "out.zarr")
    assert not (tmp_path / "out.zarr").exists()


@pytest.mark.parametrize(
    "settings",
    [
        {"seed": 1},
        {"codec": "zstd"},
        {"group_by": "plate"},
        {"block_size": 32},
        {"memory": 2 * MEMORY},
        {"join": "outer"},
        {"layer": ["X"]},
    ],
)
def test_work_with_other_settings_is_restarted(settings: dict[str, Any], source: Path, stopped: Path) -> None:
    is_same = settings == {"layer": ["X"]}
    assert (gpuload.pack(source, stopped, **{"memory": MEMORY, **settings}).n_resumed == 0) != is_same
    assert_same_rows(stopped, source)


def test_columns_of_restarted_work_do_not_stay(source: Path, stopped: Path, tmp_path: Path) -> None:
    gpuload.pack(source, stopped, memory=MEMORY, obs=["plate"])
    gpuload.pack(source, tmp_path / "whole.zarr", memory=MEMORY, obs=["plate"])
    assert contents(stopped) == contents(tmp_path / "whole.zarr")


def test_work_on_a_changed_source_is_restarted(source: Path, stopped: Path, tmp_path: Path) -> None:
    os.utime(source, ns=(0, source.stat().st_mtime_ns + 1))
    assert gpuload.pack(source, stopped, memory=MEMORY).n_resumed == 0


def test_a_task_that_outlasts_its_run_does_not_write_into_another(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a cluster, which ends no task that is under way, or after the second of two interrupts."""
    target, left, n_ended = tmp_path / "out.zarr", list[Callable[[], Any]](), [0]
    save_part, write_shards = parts.save_part, shards.write_shards

    def leave_part(*args: Any) -> None:
        left.append(lambda: save_part(*args))
        raise KeyboardInterrupt

    def leave_shards(*args: Any) -> None:
        left.append(lambda: write_shards(*args[:-1], pool))
        raise KeyboardInterrupt

    def end() -> None:
        for task in left:
            with pytest.raises(FileNotFoundError):
                task()
            n_ended[0] += 1

    def save_later(*args: Any) -> None:
        end()
        save_part(*args)

    with ThreadPoolExecutor(2) as pool:
        for module, name, leave in ((parts, "save_part", leave_part), (shards, "write_shards", leave_shards)):
            with monkeypatch.context() as patch:
                patch.setattr(module, name, leave)
                with pytest.raises(KeyboardInterrupt):
                    gpuload.pack(source, target, memory=MEMORY, seed=1)
        monkeypatch.setattr(parts, "save_part", save_later)
        gpuload.pack(source, target, memory=MEMORY)
        end()
    assert n_ended[0] > 2 * len(left) > 2
    assert os.listdir(tmp_path) == ["out.zarr"]
    assert_same_rows(target, source)


def test_work_without_its_store_is_restarted(source: Path, stopped: Path) -> None:
    shutil.rmtree(work_on(stopped) / "store")  # as after a kill between the last rename and the end
    assert gpuload.pack(source, stopped, memory=MEMORY).n_resumed == 0
    assert_same_rows(stopped, source)


def test_a_target_at_an_address_is_refused(source: Path) -> None:
    with pytest.raises(
        gpuload.PlanError, match=r"target='s3://b/x\.zarr': it is an address, but a target is a folder on"
    ):
        gpuload.pack(source, "s3://b/x.zarr")


@pytest.mark.parametrize("name", ["cells.h5ad", "cells.H5MU", "cells.zip"])
def test_a_target_named_like_a_file_is_refused(source: Path, tmp_path: Path, name: str) -> None:
    cure = f"packing writes a zarr store, a folder; name it '{tmp_path / 'cells.zarr'}', say."
    with pytest.raises(gpuload.PlanError) as caught:
        gpuload.pack(source, tmp_path / name)
    assert str(caught.value) == f"target='{tmp_path / name}': {cure}"
    assert not list(tmp_path.iterdir())


def test_target_that_is_a_source_by_another_name_is_refused(tmp_path: Path) -> None:
    store, link, inner = tmp_path / "cells.zarr", tmp_path / "link.zarr", tmp_path / "cells.zarr" / "inner.zarr"
    for path in (store, inner):
        gpuload.pack(written(cells(5, 5), tmp_path / "in.h5ad"), path)
    link.symlink_to(store)
    for source, target, found in (
        (link, store, "it is one of the sources"),
        (store, link, "it is one of the sources"),
        (inner, store, r"the source .*inner\.zarr is inside it"),
        (store, store / "out.zarr", r"it is inside the source .*cells\.zarr"),
    ):
        with pytest.raises(gpuload.PlanError, match=rf"^target=.*: {found}; choose another\.$"):
            gpuload.pack(source, target, overwrite=True)
    assert sorted(os.listdir(tmp_path)) == ["cells.zarr", "in.h5ad", "link.zarr"]
    assert ad.read_zarr(inner).n_obs == 5


def test_foreign_work_folder_is_refused(source: Path, tmp_path: Path) -> None:
    notes = tmp_path / "out.zarr.packing" / "notes.txt"
    notes.parent.mkdir()
    notes.write_text("mine")
    with pytest.raises(
        gpuload.StoreError, match=r"out\.zarr\.packing: .* it holds 'notes\.txt', which is not of packing"
    ):
        gpuload.pack(source, tmp_path / "out.zarr")
    assert notes.read_text() == "mine"


def test_target_created_during_packing_is_not_replaced(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = tmp_path / "out.zarr"
    monkeypatch.setattr(work.Work, "_verify", lambda *_: target.mkdir())
    with pytest.raises(gpuload.StoreError, match="it exists already"):
        gpuload.pack(source, target)
    assert not list(target.iterdir())


@pytest.mark.parametrize("moment", ["sync_folders", "check_target"])
def test_target_created_during_publication_is_not_replaced(
    moment: str, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target, plain, publish = tmp_path / "out.zarr", getattr(workplace, moment), workplace.publish
    gpuload.pack(source, tmp_path / "other.zarr", keep_order=True)

    def appear(*args: Any, **settings: Any) -> None:
        plain(*args, **settings)
        shutil.copytree(tmp_path / "other.zarr", target)

    def publish_late(*args: Any, **settings: Any) -> None:
        with monkeypatch.context() as patch:
            patch.setattr(workplace, moment, appear)
            publish(*args, **settings)

    monkeypatch.setattr(workplace, "publish", publish_late)
    found = {"sync_folders": "it exists already", "check_target": "Directory not empty"}[moment]
    with pytest.raises(gpuload.GpuloadError, match=found):
        gpuload.pack(source, target)
    assert contents(target) == contents(tmp_path / "other.zarr")


def test_source_changed_during_packing_is_an_error(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    copy = tmp_path / "in.h5ad"
    shutil.copy(source, copy)
    plain = work.Local.write_parts

    def change_first(self: Any, numbers: Any) -> Any:
        os.utime(copy, ns=(0, 1))
        return plain(self, numbers)

    monkeypatch.setattr(work.Local, "write_parts", change_first)
    with pytest.raises(gpuload.ReadError, match="changed"):
        gpuload.pack(copy, tmp_path / "out.zarr")
    assert not (tmp_path / "out.zarr").exists()


def relabel(path: Path) -> None:
    with h5py.File(path, "r+") as file:
        file["obs/n_counts"][...] = 7
    os.utime(path, ns=(0, 1))


def test_restored_file_changes_the_source_stamp(tmp_path: Path) -> None:
    """With the same size as before, and an older time than other files."""
    for name in "abc":
        (tmp_path / name).write_text(name)
        os.utime(tmp_path / name, ns=(0, ord(name)))
    before = packing._stamp(str(tmp_path))
    assert before == packing._stamp(os.path.relpath(tmp_path))
    os.utime(tmp_path / "a", ns=(0, 1))
    assert packing._stamp(str(tmp_path)) != before


def test_change_behind_a_folder_link_changes_the_stamp(tmp_path: Path) -> None:
    """Stores are read through such links; those that lead back are followed once."""
    store, elsewhere = tmp_path / "store", tmp_path / "elsewhere"
    for folder in (store, elsewhere):
        folder.mkdir()
    (elsewhere / "0").write_text("0")
    (store / "X").symlink_to(elsewhere)
    for name in ("again", "and again"):
        (elsewhere / name).symlink_to(store)
    before = packing._stamp(str(store))
    assert before[1] == 1
    os.utime(elsewhere / "0", ns=(0, 1))
    assert packing._stamp(str(store)) != before


def test_a_broken_link_in_a_source_is_named(tmp_path: Path) -> None:
    gpuload.pack(written(cells(9, 5), tmp_path / "in.h5ad"), tmp_path / "in.zarr")
    (tmp_path / "in.zarr/obs/gone").symlink_to(tmp_path / "nowhere")
    with pytest.raises(gpuload.ReadError, match=r"in\.zarr/obs/gone: No such file"):
        gpuload.pack(tmp_path / "in.zarr", tmp_path / "out.zarr")


def replace_by_another(path: Path) -> None:
    other = written(cells(3_000, 200, seed=9), path.with_name("other.h5ad"))
    other.replace(path)


@pytest.mark.parametrize(
    ("step", "change"),
    [("_write_tables", replace_by_another), ("_verify", replace_by_another), ("_verify", relabel)],
)
def test_source_changed_late_in_packing_is_an_error(
    step: str, change: Any, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    copy = Path(shutil.copy(source, tmp_path / "in.h5ad"))
    plain = getattr(work.Work, step)

    def change_first(self: Any, *given: Any) -> Any:
        change(copy)
        return plain(self, *given)

    monkeypatch.setattr(work.Work, step, change_first)
    words = f"^{copy}: it was changed while it was packed; pack again when nothing is writing to it[.]$"
    with pytest.raises(gpuload.ReadError, match=words):
        gpuload.pack(copy, tmp_path / "out.zarr")
    assert not (tmp_path / "out.zarr").exists()


def damage_values(array: Any) -> None:
    array[len(array) // 2] += 1


def test_wrong_value_is_detected(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = zarr_files.Codec.encode
    calls = []

    def encode(self: Any, chunk: Any) -> Any:
        if chunk.dtype == np.uint16:  # of the matrix; no column of obs is
            calls.append(1)
        if chunk.dtype == np.uint16 and len(calls) == 3:
            chunk = chunk.copy()
            damage_values(chunk)
        return plain(self, chunk)

    monkeypatch.setattr(zarr_files.Codec, "encode", encode)
    with pytest.raises(gpuload.GpuloadError, match=r"do not read back as those of the sources|is damaged"):
        gpuload.pack(source, tmp_path / "out.zarr")
    assert not (tmp_path / "out.zarr").exists()


def test_a_chunk_that_cannot_be_decoded_is_detected_and_not_resumed(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = zarr_files.Codec.encode
    with monkeypatch.context() as patch:
        harm = lambda self, chunk: b"not blosc" if chunk.dtype == np.uint16 else plain(self, chunk)  # noqa: E731
        patch.setattr(zarr_files.Codec, "encode", harm)
        with pytest.raises(gpuload.CorruptDataError, match="do not read back as those of the sources, so nothing was"):
            gpuload.pack(source, tmp_path / "out.zarr")
    assert not (tmp_path / "out.zarr").exists()
    packed = gpuload.pack(source, tmp_path / "out.zarr")
    assert not packed.n_resumed
    assert contents(tmp_path / "out.zarr")


@pytest.mark.parametrize("where", [None, "passed"])
def test_swapped_rows_are_detected(
    where: str | None, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = tables._provenance

    def swapped(name: str, store: Any, order: Any, chosen: Any) -> Any:
        order = order.copy()
        order[[0, 1]] = order[[1, 0]]
        return plain(name, store, order, chosen)

    monkeypatch.setattr(tables, "_provenance", swapped)
    with pytest.raises(gpuload.CorruptDataError, match="do not read back as those of the sources, so nothing was"):
        gpuload.pack(source, tmp_path / "out.zarr", where=where)
    assert not os.listdir(tmp_path)


@pytest.mark.parametrize("column", cells(3, 3).obs.columns)
def test_column_that_does_not_read_back_is_detected(
    column: str, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = tables.write_column

    def write(folder: str, values: Any, where: str) -> None:
        plain(folder, values[::-1] if folder.endswith(f"obs/{column}") else values, where)

    monkeypatch.setattr(tables, "write_column", write)
    with pytest.raises(gpuload.CorruptDataError, match=f"obs column '{column}' does not read back"):
        gpuload.pack(source, tmp_path / "out.zarr", obs=[column])


def test_names_that_do_not_read_back_are_detected(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = tables.start_table

    def start(folder: str, columns: list[str], index: Any, name: str, where: str) -> None:
        plain(folder, columns, index[::-1], name, where)

    monkeypatch.setattr(tables, "start_table", start)
    with pytest.raises(gpuload.CorruptDataError, match="obs index does not read back"):
        gpuload.pack(source, tmp_path / "out.zarr")


def test_a_file_appears_whole_or_not_at_all(tmp_path: Path) -> None:
    def stopped() -> Iterator[bytes]:
        yield b"half"
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        files.write_whole(str(tmp_path / "file"), stopped())
    assert not (tmp_path / "file").exists()
    files.remove_partial(str(tmp_path))
    assert not list(tmp_path.iterdir())
    assert files.write_whole(str(tmp_path / "file"), [b"one", memoryview(b"two")]) == 6
    assert (tmp_path / "file").read_bytes() == b"onetwo"


def test_a_file_is_on_the_disk_before_it_has_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: list[int] = []
    plain = os.fsync

    def sync(descriptor: int) -> None:
        assert not (tmp_path / "file").exists()
        synced.append(os.fstat(descriptor).st_size)
        plain(descriptor)

    monkeypatch.setattr(files.os, "fsync", sync)
    files.write_whole(str(tmp_path / "file"), [b"one", b"two"])
    assert synced == [6], "what is still in Python's buffer is not synced"


def test_concurrent_writers_of_one_file_do_not_interfere(tmp_path: Path) -> None:
    """As a worker of a cluster does if the task of a run that was killed still goes on: in one process, or in two
    of the same number on two machines."""

    def first() -> Iterator[bytes]:
        yield b"a" * (2 << 20)
        files.write_whole(str(tmp_path / "file"), [b"second"])
        assert (tmp_path / "file").read_bytes() == b"second"
        yield b"a"

    assert files.write_whole(str(tmp_path / "file"), first()) == (2 << 20) + 1
    assert (tmp_path / "file").read_bytes() == b"a" * ((2 << 20) + 1)


def test_a_bucket_syncs_the_folders_of_its_own_shards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    adata = cells(6_000, 200)
    adata.X = adata.X.toarray()
    synced: list[str] = []
    plain = files.sync_folder
    monkeypatch.setattr(files, "sync_folder", lambda folder: synced.append(folder) or plain(folder))
    monkeypatch.setattr(workplace, "sync_folders", lambda folder: None)  # once, at the end
    gpuload.pack(written(adata, tmp_path / "in.h5ad"), tmp_path / "out.zarr", memory=MEMORY)
    counts = Counter(re.sub(r"^.*/out\.zarr\.packing/\w+/store/?", "", folder) or "." for folder in synced)
    n_buckets = len(list((tmp_path / "out.zarr/X/c").iterdir()))
    assert n_buckets > 20
    assert [counts[f"X/c/{number}"] for number in range(n_buckets)] == [1] * n_buckets
    assert [counts[name] for name in (".", "X", "X/c")] == [n_buckets] * 3


class Disk:
    """What a process does to the disk, in order: ("fsync", path), ("name", path) of what gets it, ("remove", path)."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.steps: list[tuple[str, str]] = []
        self._lock = threading.Lock()
        fsync = os.fsync

        def sync(descriptor: int) -> None:
            fsync(descriptor)
            self._note("fsync", os.readlink(f"/proc/self/fd/{descriptor}"))

        def removing(call: Callable[..., None]) -> Callable[..., None]:
            def remove(path: str, **settings: Any) -> None:
                self._note("remove", str(path))
                call(path, **settings)

            return remove

        patch.setattr(os, "fsync", sync)
        patch.setattr(shutil, "rmtree", removing(shutil.rmtree))
        patch.setattr(os, "rmdir", removing(os.rmdir))
        for name in ("replace", "rename"):
            patch.setattr(os, name, self._naming(getattr(os, name)))

    def _naming(self, call: Callable[[str, str], None]) -> Callable[[str, str], None]:
        def name(old: str, new: str) -> None:
            with self._lock:  # the step is noted in the order in which it happens
                if os.path.isfile(old) and ".nb" not in os.path.basename(old):  # a kernel that numba keeps
                    assert ("fsync", str(old)) in self.steps, f"{new} has its name before its content is on the disk"
                call(old, new)
                self.steps.append(("name", str(new)))

        return name

    def _note(self, what: str, path: str) -> None:
        with self._lock:
            self.steps.append((what, path))

    def at(self, what: str, path: object, start: int = 0) -> int:
        """Return the number of the first such step, from one on."""
        return self.steps.index((what, str(path)), start)

    def folders_are_synced(self, path: Path, top: Path, before: int) -> bool:
        """Return whether the folders of a file, up to the top one, were synced between its naming and a step."""
        there = self.steps[self.at("name", path) : before]
        return all(("fsync", str(at)) in there for at in path.parents if at == top or top in at.parents)


def test_a_target_is_on_the_disk_before_it_has_its_name(
    source_with_several_matrices: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else a machine that fails leaves a target without some of its files, and nothing to make them from."""
    target, folder = tmp_path / "out.zarr", tmp_path / "out.zarr.packing"
    gpuload.pack(source_with_several_matrices, target, keep_order=True)
    disk = Disk(monkeypatch)
    gpuload.pack(source_with_several_matrices, target, memory=MEMORY, overwrite=True, **SEVERAL)
    named, removed = disk.at("name", target), disk.at("remove", folder)
    (own,) = (Path(path).parent for what, path in disk.steps if what == "name" and path.endswith("/plan.json"))
    for path in target.rglob("*"):
        place = own / "store" / path.relative_to(target)
        since = disk.at("name", place) if path.is_file() else 0
        assert disk.at("fsync", place.parent, since) < named, f"{place} may be lost"
    assert disk.at("name", folder / "replaced") < named < disk.at("fsync", tmp_path, named) < removed
    first_removed = next(i for i, (what, _) in enumerate(disk.steps) if what == "remove" and i > named)
    assert disk.at("fsync", tmp_path, named) < first_removed, "what was replaced goes before the new one is there"


@pytest.mark.parametrize("is_by_columns", [False, True])
def test_a_bucket_is_done_when_its_shards_are_on_the_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_by_columns: bool
) -> None:
    adata = cells(1_500, 200)
    if is_by_columns:
        adata.X = adata.X.tocsc()
    source = written(adata, tmp_path / "in.h5ad")
    monkeypatch.setattr(passes, "AT_ONE_TIME", 1)
    disk, begun = Disk(monkeypatch), 0
    gpuload.pack(source, tmp_path / "out.zarr", memory=MEMORY, block_size=16)
    named = [(i, Path(path)) for i, (what, path) in enumerate(disk.steps) if what == "name"]
    done = [(i, mark.parents[1] / "store") for i, mark in named if mark.parent.name == "done"]
    assert len(done) > 2
    for number, top in done:
        shards = [path for i, path in named if begun <= i < number and top / "X" in path.parents and "c" in path.parts]
        assert shards
        assert all(disk.folders_are_synced(path, top, number) for path in shards), "one may be lost, but is done"
        begun = number
    if is_by_columns:
        (own,) = (path.parent for _, path in named if path.name == "plan.json")
        whole, top = disk.at("name", own / "rows-000000/whole"), own / "rows-000000/store"
        assert all(disk.folders_are_synced(path, top, whole) for _, path in named if top in path.parents)


def test_a_shard_that_cannot_be_written_is_not_done(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    n_written = [0]

    def fill_up(path: str, pieces: Any) -> int:
        n_written[0] += "/c/" in path
        if n_written[0] == 3:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), path)
        return files.write_whole(path, pieces)

    with monkeypatch.context() as patch:
        patch.setattr(shards, "write_whole", fill_up)
        with pytest.raises(gpuload.ReadError, match=r"/c/\d+: No space left on device\. Fix it and run the same"):
            gpuload.pack(source, tmp_path / "out.zarr", memory=MEMORY)
    assert gpuload.pack(source, tmp_path / "out.zarr", memory=MEMORY).n_resumed > 0
    assert_same_rows(tmp_path / "out.zarr", source)


def test_a_reader_closes_all_that_it_has_opened(source: Path) -> None:
    reader = rows.RowReader.of([str(source)], "X", num_threads=1)
    reader.read(0, 3)
    reader.close()
    with pytest.raises(RuntimeError):
        reader.pool.submit(print)
    with pytest.raises((gpuload.GpuloadError, RuntimeError)):
        reader._backend.load(reader.store.recipe(np.array([[0, 3]])))
    with pytest.raises(gpuload.ReadError, match="closed"):
        reader.store.sources[0].check_unchanged()


def test_full_disk_is_reported_in_one_sentence(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(path: str, pieces: Any) -> int:
        raise OSError(28, "No space left on device", path)

    with monkeypatch.context() as patch:
        patch.setattr(shards, "write_whole", full)
        with pytest.raises(gpuload.ReadError, match=r"No space left on device\. Fix it and run the same command again"):
            gpuload.pack(source, tmp_path / "out.zarr", memory=MEMORY)
    assert gpuload.pack(source, tmp_path / "out.zarr", memory=MEMORY).n_resumed > 0


def test_too_little_disk_is_refused_before_packing(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(workplace.shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(1, 1, 10_000))  # type: ignore[attr-defined]
    with pytest.raises(gpuload.ReadError, match=r"packing needs up to 0\.0 GB there, half of it for parts"):
        gpuload.pack(source, tmp_path / "out.zarr")
    assert not os.listdir(tmp_path)


def test_target_is_replaced_only_with_overwrite(source: Path, tmp_path: Path) -> None:
    target = tmp_path / "out.zarr"
    gpuload.pack(source, target, keep_order=True)
    with pytest.raises(gpuload.StoreError, match=r"overwrite it \(overwrite=True, or --overwrite\)"):
        gpuload.pack(source, target)
    gpuload.pack(source, target, overwrite=True)
    assert ad.read_zarr(target).obs["source_row"].iloc[:3].tolist() != [0, 1, 2]
    assert os.listdir(tmp_path) == ["out.zarr"]
    (tmp_path / "home").mkdir()
    for overwrite in (True, False):  # advising to overwrite would not help
        with pytest.raises(gpuload.StoreError, match="not a zarr store, so it is not overwritten; choose another"):
            gpuload.pack(source, tmp_path / "home", overwrite=overwrite)


def test_old_target_stays_until_the_new_one_is_complete(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = tmp_path / "out.zarr"
    gpuload.pack(source, target)
    before = contents(target)
    monkeypatch.setattr(passes, "digest_span", fail)
    with pytest.raises(RuntimeError):
        gpuload.pack(source, target, overwrite=True, seed=5)
    assert contents(target) == before


def test_old_target_survives_an_interrupted_replacement(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target, rename = tmp_path / "out.zarr", os.rename
    gpuload.pack(source, target, keep_order=True)
    before = contents(target)

    def stop_at_target(old: str, new: str) -> None:
        if new == str(target):
            raise KeyboardInterrupt
        rename(old, new)

    def cut_short() -> None:
        with monkeypatch.context() as patch:
            patch.setattr(workplace.os, "rename", stop_at_target)
            with pytest.raises(KeyboardInterrupt):
                gpuload.pack(source, target, overwrite=True)
        assert not target.exists()

    for seed, overwrite, found in ((1, False, "it exists already"), (2, True, "planted")):
        cut_short()
        with monkeypatch.context() as patch:
            patch.setattr(passes, "digest_span", fail)
            with pytest.raises((RuntimeError, gpuload.StoreError), match=found):
                gpuload.pack(source, target, overwrite=overwrite, seed=seed)
        assert contents(target) == before
    cut_short()
    replaced = tmp_path / "out.zarr.packing" / "replaced"
    shutil.copytree(replaced, target)
    with pytest.raises(gpuload.StoreError, match=f"^{replaced}: this was {target} until .* move one of them away\\.$"):
        gpuload.pack(source, target, overwrite=True)
    assert contents(target) == contents(replaced) == before
    shutil.rmtree(target)
    gpuload.pack(source, target, overwrite=True)
    assert ad.read_zarr(target).obs["source_row"].iloc[:3].tolist() != [0, 1, 2]
    assert os.listdir(tmp_path) == ["out.zarr"]


def test_remains_of_a_run_that_has_published_are_removed_by_the_same_call(source: Path, tmp_path: Path) -> None:
    """They hold all parts, and what was replaced; whoever sees the target has no reason to overwrite it."""
    target, folder = tmp_path / "out.zarr", tmp_path / "out.zarr.packing"
    gpuload.pack(source, target, memory=MEMORY, keep_order=True)

    def stop(_: str) -> None:
        raise KeyboardInterrupt

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(workplace, "shutil", SimpleNamespace(rmtree=stop, disk_usage=shutil.disk_usage))
        with pytest.raises(KeyboardInterrupt):
            gpuload.pack(source, target, memory=MEMORY, overwrite=True)
    assert {"lock", "replaced"} < set(os.listdir(folder))
    (there,) = folder.glob("*/parts")
    now = contents(target)
    with files.locked(str(folder / "lock")), pytest.raises(gpuload.ReadError, match="another gpuload pack is writing"):
        gpuload.pack(source, target)
    assert there.exists()
    with pytest.raises(gpuload.StoreError, match="it exists already"):
        gpuload.pack(source, target)
    assert os.listdir(tmp_path) == ["out.zarr"]
    assert contents(target) == now


def test_a_target_that_is_a_link_is_replaced_and_what_it_led_to_stays(source: Path, tmp_path: Path) -> None:
    target, elsewhere = tmp_path / "out.zarr", tmp_path / "elsewhere.zarr"
    gpuload.pack(source, elsewhere, keep_order=True)
    before = contents(elsewhere)
    target.symlink_to(elsewhere)
    gpuload.pack(source, target, overwrite=True)
    assert not target.is_symlink()
    assert_same_rows(target, source)
    assert contents(elsewhere) == before
    assert sorted(os.listdir(tmp_path)) == ["elsewhere.zarr", "out.zarr"]


def test_second_pack_to_the_same_target_is_refused(source: Path, tmp_path: Path) -> None:
    folder = tmp_path / "out.zarr.packing"
    folder.mkdir()
    with (
        files.locked(str(folder / "lock")),
        pytest.raises(gpuload.ReadError, match="another gpuload pack is writing there"),
    ):
        gpuload.pack(source, tmp_path / "out.zarr")


@pytest.mark.parametrize("is_another_there", [False, True])
def test_a_lock_that_is_removed_while_it_is_taken_is_not_held(
    is_another_there: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By a run that ends; the next one would lock the file that is there by then."""
    lock, flock = tmp_path / "lock", files.fcntl.flock

    def late(file: Any, operation: int) -> None:
        lock.unlink()
        if is_another_there:
            lock.touch()
        flock(file, operation)

    with monkeypatch.context() as patch:
        patch.setattr(files.fcntl, "flock", late)
        with pytest.raises(gpuload.ReadError, match="another gpuload pack is writing there"), files.locked(str(lock)):
            pytest.fail("it is held")
    with files.locked(str(lock)):
        pass


def test_a_folder_removed_while_it_is_locked_is_reported(tmp_path: Path) -> None:
    with (
        pytest.raises(gpuload.ReadError, match=r"out\.zarr\.packing: another gpuload pack is writing there"),
        files.locked(str(tmp_path / "out.zarr.packing" / "lock")),
    ):
        pytest.fail("it is held")


@pytest.mark.filterwarnings("ignore:.*multi-threaded:DeprecationWarning")  # Python's, of the fork
def test_a_lock_ends_though_a_process_was_forked_meanwhile(tmp_path: Path) -> None:
    lock = str(tmp_path / "lock")
    read, write = os.pipe()
    with files.locked(lock):
        pid = os.fork()
        if not pid:
            os.close(write)
            os.read(read, 1)
            os._exit(0)
    try:
        with files.locked(lock):
            pass
    finally:
        os.close(read)
        os.close(write)
        os.waitpid(pid, 0)


def test_a_run_that_begins_while_another_removes_the_folder_disturbs_neither(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, rmdir = tmp_path / "out.zarr.packing", os.rmdir

    def late(path: Any, **settings: Any) -> None:
        if str(path) == str(folder):
            (folder / "lock").touch()
        rmdir(path, **settings)

    monkeypatch.setattr(os, "rmdir", late)
    gpuload.pack(source, tmp_path / "out.zarr")
    assert os.listdir(folder) == ["lock"]
    assert_same_rows(tmp_path / "out.zarr", source)


@pytest.mark.parametrize(
    ("settings", "match"),
    [
        ({"codec": "gzip"}, r"codec='gzip': expected one of 'lz4', 'zstd', 'none'"),
        ({"group_by": "plate", "keep_order": True}, "two orders; drop one"),
        ({"keep_order": "no"}, "keep_order='no': expected True or False"),
        ({"overwrite": "no"}, "overwrite='no': expected True or False"),
        ({"seed": -1}, r"seed=-1: expected a whole number from 0 to 2\*\*64 - 1"),
        ({"seed": 1 << 64}, r"seed=18446744073709551616: expected a whole number from 0 to 2\*\*64 - 1"),
        ({"block_size": 0}, "block_size=0: expected a whole number of at least 1"),
        ({"num_threads": 1.5}, "num_threads=1.5: expected a whole number of at least 1"),
        ({"memory": "1kB"}, "memory='1kB': expected at least 1MiB"),
        ({"memory": "much"}, "memory='much': expected a number of bytes"),
        ({"obs": ["plat"]}, "did you mean 'plate'"),
        ({"obs": "plat"}, "did you mean 'plate'"),
        ({"obs": ["plate", 3]}, r"obs=\['plate', 3\]: expected the name of an obs column, or a list of names"),
        ({"group_by": "plat"}, "did you mean 'plate'"),
        ({"layer": "none"}, "there is no layer 'none'"),
        ({"group_by": ["plate"]}, r"group_by=\['plate'\]: expected the name of an obs column, or None"),
    ],
)
def test_invalid_settings_are_refused_in_one_sentence(
    settings: dict[str, Any], match: str, source: Path, tmp_path: Path
) -> None:
    with pytest.raises(gpuload.GpuloadError, match=match):
        gpuload.pack(source, tmp_path / "out.zarr", **settings)
    assert not (tmp_path / "out.zarr").exists()


def test_invalid_sources_and_targets_are_refused(source: Path, tmp_path: Path) -> None:
    with pytest.raises(gpuload.PlanError, match="is given twice"):
        gpuload.pack([source, source], tmp_path / "out.zarr")
    (tmp_path / "link.h5ad").symlink_to(source)
    with pytest.raises(gpuload.PlanError, match=r"link\.h5ad is given twice"):
        gpuload.pack([source, tmp_path / "link.h5ad"], tmp_path / "out.zarr")
    with pytest.raises(gpuload.PlanError, match=r"paths=None: expected the path of a file or folder"):
        gpuload.pack(None, tmp_path / "out.zarr")
    for odd in (None, 3, b"x", "", "x\0y"):
        with pytest.raises(gpuload.PlanError, match=r"^target=.*: expected the path of a folder to create\.$"):
            gpuload.pack(source, odd)
    with pytest.raises(gpuload.ReadError, match=r"no such file\. Check the path"):
        gpuload.pack(tmp_path / "none.h5ad", tmp_path / "out.zarr")
    with pytest.raises(gpuload.PlanError, match="is an address, and packing reads files on disk; copy it first"):
        gpuload.pack("s3://bucket/atlas.h5ad", tmp_path / "out.zarr")
    with pytest.raises(gpuload.PlanError, match=r"paths=\[\]: expected the path of a file or folder"):
        gpuload.pack([], tmp_path / "out.zarr")
    with pytest.raises(gpuload.PlanError, match="expected the path of a file or folder"):
        gpuload.pack([cells(5, 5)], tmp_path / "out.zarr")
    with pytest.raises(gpuload.ReadError, match="there is no such folder to put the target into"):
        gpuload.pack(source, tmp_path / "not" / "there.zarr")
    gpuload.pack(source, tmp_path / "out.zarr")
    with pytest.raises(gpuload.PlanError, match="it is one of the sources"):
        gpuload.pack(tmp_path / "out.zarr", tmp_path / "out.zarr", overwrite=True)
    with pytest.raises(gpuload.StoreError, match="it has 0 cells and 5 genes; expected at least one"):
        gpuload.pack(written(cells(9, 5)[:0], tmp_path / "none.h5ad"), tmp_path / "none.zarr")
    other = cells(9, 200)
    del other.obs["plate"]
    with pytest.raises(gpuload.StoreError, match=r"other\.h5ad: obs has no column 'plate', but that of"):
        gpuload.pack([source, written(other, tmp_path / "other.h5ad")], tmp_path / "two.zarr")


class Counted(str):
    """A path that counts how often it is compared with another."""

    __slots__ = ()
    n_compared = 0
    __hash__ = str.__hash__

    def __eq__(self, other: object) -> bool:
        Counted.n_compared += 1
        return str.__eq__(self, other)


def test_source_files_are_not_compared_pairwise() -> None:
    paths = [Counted(f"plates/{i}.h5ad") for i in range(2_000)]
    assert packing._source_files(paths) == paths
    assert Counted.n_compared < 10 * len(paths)


@pytest.mark.parametrize(("shape", "dtype"), [((9, 2), np.float64), ((9,), np.longdouble)])
def test_column_without_one_number_per_row_is_refused(
    tmp_path: Path, shape: tuple[int, ...], dtype: type[np.floating[Any]]
) -> None:
    path = written(cells(9, 5), tmp_path / "in.h5ad")
    with h5py.File(path, "r+") as file:
        del file["obs/plate"]
        file["obs/plate"] = np.zeros(shape, dtype)
        file["obs/plate"].attrs.update({"encoding-type": "array", "encoding-version": "0.2.0"})
    found = re.escape(f"has dtype {np.dtype(dtype)} and shape {shape}; only one number of up to 8 bytes")
    words = f"^{path}: obs column 'plate' {found}.*Leave it out by naming"
    with pytest.raises(gpuload.StoreError, match=words):
        gpuload.pack(path, tmp_path / "out.zarr", obs=["plate"])
    assert not (tmp_path / "out.zarr").exists()


def resize(path: Path, key: str, n: int) -> None:
    """Give an array of a file n elements; if it has a mask, as text has since pandas 3, both."""
    with h5py.File(path, "r+") as file:
        for name in [f"{key}/{part}" for part in file[key]] if isinstance(file[key], h5py.Group) else [key]:
            values, attributes = file[name][()], dict(file[name].attrs)
            del file[name]
            dtype = h5py.string_dtype() if values.dtype == "O" else None
            file.create_dataset(name, data=np.resize(values, n), dtype=dtype)
            file[name].attrs.update(attributes)


@pytest.mark.parametrize(("is_by_columns", "n_more"), [(False, -1), (True, 1)])
@pytest.mark.parametrize(
    ("key", "where", "axis"),
    [
        ("obs/_index", "the index of obs", 0),
        ("obs/depth", "/obs/depth", 0),
        ("obs/plate/codes", "/obs/plate", 0),
        ("var/_index", "/var", 1),
        ("var/chromosome/codes", "/var/chromosome", 1),
    ],
)
def test_tables_that_mismatch_the_matrix_length_are_refused(
    key: str, where: str, axis: int, is_by_columns: bool, n_more: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(work.Local, "write_parts", fail)
    adata = cells(30, 20)
    if is_by_columns:
        adata.X = adata.X.tocsc()
    path, other = written(adata, tmp_path / "in.h5ad"), cells(9, 20)
    other.obs_names = [f"other_{i}" for i in range(9)]
    there, what = ((30, "cells"), (20, "genes"))[axis]
    resize(path, key, there + n_more)
    words = f"{path}: {where} has {there + n_more} entries but the matrix has {there} {what}; rewrite the file."
    for sources in (path, [path, written(other, tmp_path / "other.h5ad")]):
        with pytest.raises(gpuload.CorruptDataError, match=f"^{re.escape(words)}$"):
            gpuload.pack(sources, tmp_path / "out.zarr")
    if key == "obs/plate/codes":
        with pytest.raises(gpuload.CorruptDataError, match=f"^{re.escape(words)}$"):
            gpuload.pack(path, tmp_path / "out.zarr", obs=[], group_by="plate")
    assert not (tmp_path / "out.zarr").exists()


def test_index_lengths_are_checked_file_by_file(tmp_path: Path) -> None:
    paths = [written(cells(n, 20), tmp_path / f"{n}.h5ad") for n in (30, 20)]
    for path, n in zip(paths, (29, 21), strict=True):
        resize(path, "obs/_index", n)
    with pytest.raises(gpuload.CorruptDataError, match="the index of obs has 29 entries but the matrix has 30 cells"):
        gpuload.pack(paths, tmp_path / "out.zarr")


def with_numbers(path: Path) -> Path:
    """Write cells with one more gene, and with numeric categories for plates and chromosomes."""
    adata = cells(9, 6)
    adata.obs["plate"] = pd.Categorical([1, 2, 3] * 3)
    adata.var["chromosome"] = pd.Categorical([1] * 6)
    adata.obs_names = [f"other_{i}" for i in range(9)]
    return written(adata, path)


@pytest.mark.parametrize(
    ("settings", "what"),
    [
        ({"obs": ["plate"]}, "obs column 'plate'"),
        ({"obs": [], "group_by": "plate"}, "obs column 'plate'"),
        ({"obs": [], "join": "inner"}, "var column 'chromosome'"),
    ],
)
def test_categories_of_mixed_types_are_refused_before_packing(
    settings: dict[str, Any], what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(work.Local, "write_parts", fail)
    n_vars = 5 if "join" in settings else 6
    paths = [written(cells(9, n_vars), tmp_path / "in.h5ad"), with_numbers(tmp_path / "other.h5ad")]
    words = (
        f"^{paths[0]}: {what} has categories of (object|str|string) in one file and of int64 in another; "
        r"make them one type, or leave the column out\.$"
    )
    with pytest.raises(gpuload.StoreError, match=words):
        gpuload.pack(paths, tmp_path / "out.zarr", **settings)
    assert sorted(os.listdir(tmp_path)) == ["in.h5ad", "other.h5ad"]


def test_values_refused_after_transposing_leave_nothing(tmp_path: Path) -> None:
    """Neither the sources nor the settings can be put right without the work being of another plan."""
    adata = cells(300, 20)
    adata.X = csc_matrix(adata.X, dtype=np.int64)
    adata.X.data[7] = 1 << 53
    path = written(adata, tmp_path / "in.h5ad")
    with pytest.raises(gpuload.StoreError, match="which cannot be kept exactly"):
        gpuload.pack(path, tmp_path / "out.zarr")
    assert os.listdir(tmp_path) == ["in.h5ad"]


def test_a_target_that_appears_meanwhile_leaves_the_work(source: Path, tmp_path: Path) -> None:
    target, write_obs = tmp_path / "out.zarr", tables.write_obs
    gpuload.pack(source, tmp_path / "other.zarr")

    def appear(*args: Any) -> None:
        shutil.copytree(tmp_path / "other.zarr", target)
        write_obs(*args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tables, "write_obs", appear)
        with pytest.raises(gpuload.StoreError, match="it exists already"):
            gpuload.pack(source, target)
    shutil.rmtree(target)
    assert gpuload.pack(source, target).n_resumed


def test_row_larger_than_memory_is_refused(tmp_path: Path) -> None:
    wide = ad.AnnData(np.ones((2, 100_000), dtype=np.float32))
    path = written(wide, tmp_path / "in.h5ad")
    with pytest.raises(gpuload.PlanError, match=r"memory=1048576 bytes: a row of 100000 values alone needs"):
        gpuload.pack(path, tmp_path / "out.zarr", memory=MEMORY)
