"""Whatever cannot be read or planned is refused in one sentence that names the cause and the fix."""

from __future__ import annotations

import errno
import os
import shlex
import socket
import struct
import subprocess
import sys
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import anndata
import h5py
import hdf5plugin
import numpy as np
import pandas as pd
import pytest
from scipy.sparse import csr_matrix

import gpuload
from gpuload.formats import hdf5, members
from tests import writers
from tests.writers import counts, write_csr, write_dense, write_h5ad, write_plain

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.variants import Stored

pytestmark = pytest.mark.usefixtures("no_leaks")

BUILTIN = {
    "PlanError": ValueError,
    "StoreError": ValueError,
    "ReadError": OSError,
    "CorruptDataError": ValueError,
    "DeviceError": RuntimeError,
}


def assert_says(error: BaseException, *parts: str) -> None:
    """Check that a message is one line that ends like a sentence and holds every part."""
    message = str(error)
    assert "\n" not in message
    assert " object at 0x" not in message
    assert message.endswith((".", "?")), message
    assert len(message) < 600
    for part in parts:
        assert part in message, f"{part!r} is not in {message!r}"


def assert_refused(kind: str, path: Any, *parts: str, **settings: Any) -> None:
    """Open and read a file; expect an error of a kind, on opening or at the first minibatch."""
    error_type = getattr(gpuload, kind)
    assert issubclass(error_type, BUILTIN[kind])
    assert issubclass(error_type, gpuload.GpuloadError)
    with pytest.raises(error_type) as caught, gpuload.open_loader(path, **settings) as loader:
        list(loader)
    assert type(caught.value) is error_type
    assert_says(caught.value, *parts)


# --- settings


@pytest.mark.parametrize(
    ("name", "value"),
    [(n, v) for n in ("batch_size", "block_size", "fetch_factor", "prefetch") for v in (0, -1, 1.5, "many", True)]
    + [(n, None) for n in ("batch_size", "fetch_factor", "prefetch")]
    + [("block_size", v) for v in ("0 chunks", "chunks", "2chunks", "2 chunks ", "-1 chunks")]
    + [("seed", -1), ("seed", 1.5), ("seed", None), ("seed", 1 << 64)]
    + [("dtype", v) for v in ("int8", "int64", "complex128", "bfloat", 3, None)]
    + [("output", v) for v in ("coo", "", None, 1)]
    + [("transform", v) for v in ("log1p", 1e4, True)]
    + [("device", v) for v in ("gpu", "", 3, "cuda:x")]
    + [(n, v) for n in ("memory_cache", "device_memory", "device_cache") for v in (0, -1, "", "12 parsecs", 1.5, True)]
    + [("io", v) for v in ("gds", "", None)],
)
def test_bad_settings_are_refused_before_a_file_is_opened(name: str, value: object) -> None:
    with pytest.raises(gpuload.PlanError) as caught:
        gpuload.open_loader("/no/such/file.h5ad", **{name: value})
    assert_says(caught.value, f"{name}={value!r}", "expected")


@pytest.mark.parametrize("name", ["device", "verify", "io", "output", "uneven", "dtype"])
@pytest.mark.parametrize("value", [np.zeros(2), pd.DataFrame({"a": ["text"] * 99}), {"a": "text " * 99}], ids=type)
def test_object_as_a_setting_is_summarised_in_the_error(plain: Stored, name: str, value: Any) -> None:
    with pytest.raises(gpuload.PlanError, match=f"^{name}=.*: expected ") as caught:
        gpuload.open_loader(plain.path, **{name: value})
    assert len(str(caught.value)) < 300


@pytest.mark.parametrize("target_sum", [0, -1.0, float("nan"), float("inf"), "1e4", [1e4], True])
def test_bad_target_sum(target_sum: Any) -> None:
    with pytest.raises(gpuload.PlanError) as caught:
        gpuload.Transform(target_sum=target_sum)
    assert_says(caught.value, "target_sum", "None for no scaling")


@pytest.mark.parametrize("downsample", [0, -0.5, float("nan"), float("inf"), "0.5", True])
def test_bad_downsample(downsample: Any) -> None:
    with pytest.raises(gpuload.PlanError) as caught:
        gpuload.Transform(downsample=downsample)
    assert_says(caught.value, f"downsample={downsample!r}", "above 0", "None for all counts")


@pytest.mark.parametrize("log1p", ["False", None, 1])
def test_bad_log1p(log1p: Any) -> None:
    """Text would count as true, whatever it says."""
    with pytest.raises(gpuload.PlanError) as caught:
        gpuload.Transform(log1p=log1p)
    assert_says(caught.value, f"log1p={log1p!r}", "expected True or False")


def test_cuda_without_a_gpu_is_refused(plain: Stored) -> None:
    assert_refused("DeviceError", plain.path, "cuda:0", "'cpu'", device="cuda:0")


def test_cuda_without_cupy_is_refused(plain: Stored, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cupy", None)
    told = (
        r"^device='cuda' needs cupy-cuda13x, which is not installed; .* pip install 'gpuload\[cuda13\]', "
        r"or with CUDA 12 'gpuload\[cuda12\]'$"
    )
    with pytest.raises(gpuload.MissingDependencyError, match=told):
        gpuload.open_loader(plain.path, device="cuda:0")


def test_csr_output_must_not_be_float16(plain: Stored) -> None:
    assert_refused("PlanError", plain.path, "float16", "csr", "float32", output="csr", dtype="float16")


@pytest.mark.parametrize("value", [0, -1, 1.5, "4"])
def test_num_threads_must_be_a_positive_integer(plain: Stored, value: Any) -> None:
    parts = (f"num_threads={value!r}: expected a whole number of at least 1", "None for one per core")
    assert_refused("PlanError", plain.path, *parts, num_threads=value)


def test_csr_minibatch_with_too_many_values_is_refused(plain: Stored, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gpuload.backends.damage.MAX_CSR", 100)
    parts = ("output='csr': a minibatch has more than 2**31 - 1 values", "use a smaller batch_size")
    assert_refused("PlanError", plain.path, *parts, output="csr", batch_size=64)


def test_minibatches_beyond_memory_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    cells, settings = counts(400, 10_000), {"fetch_factor": 1, "device": "cpu"}
    monkeypatch.setattr("gpuload.machine.memory_nbytes", lambda: 400 * 10_000 * 4)
    fitting = [{"batch_size": size} for size in (133, 1000)]
    fitting += [{"batch_size": 134, "output": "csr"}, {"batch_size": 134, "dtype": "float16"}]
    fitting += [{"batch_size": 66, "dtype": "float64"}]
    for form in fitting:
        with gpuload.open_loader(cells, **form, **settings) as loader:
            assert sum(map(len, loader)) == 400
    parts = ("3 minibatches of 134 cells take 0.0 GB but this machine has 0.0 GB; use batch_size=50 or less.",)
    assert_refused("PlanError", cells, "batch_size=134", *parts, batch_size=134, **settings)
    assert_refused("PlanError", cells, "batch_size=67", batch_size=67, dtype="float64", **settings)
    parts = ("3 minibatches of 1 cells", "use fewer genes (genes=).")
    with monkeypatch.context() as patch:
        patch.setattr("gpuload.machine.memory_nbytes", lambda: 3 * 10_000 * 4 - 1)
        assert_refused("PlanError", cells, "batch_size=1:", *parts, batch_size=1, output="dense", **settings)
    parts = ("2 minibatches of 201 cells", "use batch_size=50 or less.")
    assert_refused("PlanError", cells, "batch_size=201", *parts, batch_size=201, **settings)
    monkeypatch.setattr("gpuload.machine.memory_nbytes", lambda: 399 * 10_000 * 4)
    parts = ("1 minibatches of 400 cells", "use batch_size=49 or less.")
    assert_refused("PlanError", cells, "batch_size=1000", *parts, batch_size=1000, **settings)
    layers = anndata.AnnData(cells, layers={"other": cells})  # as many bytes again
    monkeypatch.setattr("gpuload.machine.memory_nbytes", lambda: 2 * 400 * 10_000 * 4)
    parts = ("3 minibatches of 134 cells", "use batch_size=50 or less.")
    assert_refused("PlanError", layers, "batch_size=134", *parts, batch_size=134, layer=["X", "other"], **settings)
    monkeypatch.setattr("gpuload.machine.memory_nbytes", lambda: 5 * 10_000 * 4)  # of 5 cells
    parts = ("3 minibatches of 2 cells", "use batch_size=1 or less.")
    assert_refused("PlanError", cells, "batch_size=2", *parts, batch_size=2, **settings)


@pytest.mark.parametrize(
    ("matrices", "dtype", "needed", "sizes", "n_cells", "cure"),
    [
        ("X", "float32", 3 * 40 * 4000, (1000, 2), 40, {"fetch_factor": 1, "batch_size": 19}),
        (["X", "other"], "float32", 2 * 3 * 40 * 4000, (4, 9000), 40, {"fetch_factor": 4}),
        (["X", "other"], "float64", 2 * 3 * 40 * 8000, (4, 9000), 40, {"fetch_factor": 4}),
        ("X", "float16", 3 * 30 * 4000, (5, 6), 30, {"fetch_factor": 2}),
        ("X", "float32", 3 * 40 * 4000, (20, 2), 40, {"fetch_factor": 1}),  # a little less than the whole memory
        ("X", "float32", 3 * 40 * 4000, (39, 2), 40, {"fetch_factor": 1}),
        ("X", "float32", 3 * 40 * 4000, (41, 2), 40, {"fetch_factor": 1, "batch_size": 19}),
    ],
)
def test_fetches_beyond_memory_are_refused(
    monkeypatch: pytest.MonkeyPatch,
    matrices: Any,
    dtype: str,
    needed: int,
    sizes: tuple[int, int],
    n_cells: int,
    cure: dict[str, int],
) -> None:
    """Two are read ahead while one is handed over, of all matrices, and none has more cells than there are.

    Those proposed take at most half of the memory, or are the fewest of this batch_size.
    """
    X = np.ones((40, 1000), np.float32)
    cells = anndata.AnnData(X, layers={"other": X})
    settings: dict[str, Any] = {"layer": matrices, "dtype": dtype, "prefetch": 2, "device": "cpu"}
    settings["batch_size"], settings["fetch_factor"] = sizes
    monkeypatch.setattr("gpuload.machine.memory_nbytes", lambda: needed)
    with gpuload.open_loader(cells, **settings) as loader:
        assert sum(map(len, loader)) == 40
    monkeypatch.setattr("gpuload.machine.memory_nbytes", lambda: needed - 1)
    with pytest.raises(gpuload.PlanError) as caught:
        gpuload.open_loader(cells, **settings)
    said = ", ".join(f"{name}={value}" for name, value in cure.items())
    assert str(caught.value) == (
        f"fetch_factor={sizes[1]}: 3 fetches of {n_cells} cells take 0.0 GB but this machine has 0.0 GB; use {said} or "
        "less."
    )
    with gpuload.open_loader(cells, **settings | cure) as loader:
        assert sum(map(len, loader)) == 40


def test_fetches_of_a_single_cell_are_proposed_if_no_more_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gpuload.machine.memory_nbytes", lambda: 3 * 4000)
    settings: dict[str, Any] = {"batch_size": 4, "prefetch": 2, "device": "cpu"}
    assert_refused("PlanError", np.ones((40, 1000), np.float32), "fetch_factor=1, batch_size=1 or less.", **settings)


def test_no_more_large_minibatches_are_in_memory_than_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gpuload.backends.base.AHEAD_NBYTES", 0)
    cells, nbytes = counts(480, 10_000), 40 * 10_000 * 4
    with gpuload.open_loader(cells, batch_size=40, fetch_factor=3, device="cpu") as loader:
        for batch in loader:
            assert batch.X.nbytes == nbytes
        assert loader.memory()["minibatches"] < 3.5 * nbytes


@pytest.mark.parametrize(("name", "value"), [("device_cache", "1GiB"), ("device_memory", 1 << 30), ("io", "pinned")])
def test_gpu_settings_without_a_gpu_are_refused(plain: Stored, name: str, value: Any) -> None:
    parts = (f"{name}={value!r}: needs a GPU", "device='cuda'")
    assert_refused("PlanError", plain.path, *parts, device="cpu", **{name: value})


def test_unknown_setting(plain: Stored) -> None:
    with pytest.raises(TypeError, match="batchsize"):
        gpuload.open_loader(plain.path, batchsize=3)  # type: ignore[call-arg]


def test_obs_may_be_a_single_name(plain: Stored) -> None:
    with gpuload.open_loader(plain.path, obs="depth") as loader:
        assert list(next(iter(loader)).obs) == ["depth"]


def test_none_is_the_default_of_what_is_named(plain: Stored) -> None:
    with gpuload.open_loader(plain.path, obs=None, obsm=None, modality=None) as loader:
        batch = next(iter(loader))
    assert (batch.obs, batch.obsm, batch.modalities) == ({}, {}, {})
    with gpuload.open_loader({"a": plain.path, "b": plain.path}, modality=None) as loader:
        assert list(loader.tables) == ["X", "modalities/b"]
    for modality in ("", None):
        split = gpuload.split({"a": plain.path, "b": "nothing.h5ad"}, {"train": 1}, modality=modality)
        assert split.counts == {"train": loader.n_obs}


@pytest.mark.parametrize(
    ("obs", "told"),
    [
        (5, "obs=5: expected the name of an obs column, or a list of names."),
        ({"depth"}, "obs={'depth'}: a set has no order; pass the name of an obs column, or a list of names."),
        (iter([]), "expected the name of an obs column, or a list of names."),
        (["depth", 5], "obs=['depth', 5]: expected the name of an obs column, or a list of names."),
        (["depth", "depth"], "obs=['depth', 'depth']: 'depth' is given twice; pass every name once."),
    ],
)
def test_obs_must_be_column_names(plain: Stored, obs: Any, told: str) -> None:
    assert_refused("PlanError", plain.path, told, obs=obs)


MANY = [f"label {n % 7}" for n in range(1000)]
BY_HAND = "labels of your own are a column of a loader opened with obs_table="


@pytest.mark.parametrize(
    ("given", "parts"),
    [
        (lambda: gpuload.ClassBalanced(MANY), ("column=['label 0', ", "labels, one per cell, as an array")),
        (lambda: gpuload.ClassBalanced([0, 1] * 500), ("column=[0, 1, ", "labels, one per cell, as an array")),
        (lambda: gpuload.ClassBalanced("a", shares=MANY), ("shares=['label 0', ", "'equal'")),  # type: ignore[arg-type]
        (lambda: gpuload.Grouped(MANY, 4), ("column=['label 0', ", "labels, one per cell, as an array")),
        (lambda: gpuload.Grouped("a", MANY), ("size=['label 0', ", "whole number")),  # type: ignore[arg-type]
        (lambda: gpuload.PairedControl(MANY, "x"), ("column=['label 0', ", "the name of an obs column")),  # type: ignore[arg-type]
        (lambda: gpuload.split("x", {"a": 0.5}, by=MANY), ("by=['label 0', ", BY_HAND)),
        (lambda: gpuload.split("x", {"a": 0.5}, by=pd.Series(MANY)), ("by=<Series of ", "'label 0'", BY_HAND)),
        (lambda: gpuload.split("x", {"a": 0.5}, by=np.array(MANY)), ("by=<ndarray of ", ": 'label 0' is", BY_HAND)),
        (lambda: gpuload.split("x", MANY), ("shares=['label 0', ", "dict")),  # type: ignore[arg-type]
        (lambda: gpuload.open_loader("x", obs=MANY), ("obs=['label 0', ", "'label 0' is given twice")),
        (lambda: gpuload.open_loader("x", obs=np.arange(1000)), ("obs=<ndarray of ", "a list of names")),  # type: ignore[arg-type]
        (lambda: gpuload.open_loader("x", layer=[*range(1000)]), ("layer=[0, 1, ", "a list of names")),  # type: ignore[list-item]
        (lambda: gpuload.open_loader("x", sampler=[*range(1000)]), ("sampler=[0, 1, ", "gpuload.Subset(rows)")),  # type: ignore[arg-type]
        (lambda: gpuload.open_loader("x", seed=np.arange(1000)), ("seed=<ndarray of ", "whole number")),  # type: ignore[arg-type]
        (lambda: gpuload.open_loader("x", categories=MANY), ("categories=['label 0', ", "a mapping")),  # type: ignore[arg-type]
        (lambda: gpuload.open_loader("x", transform=MANY), ("transform=['label 0', ", "gpuload.Transform")),  # type: ignore[arg-type]
        (lambda: gpuload.open_loader("x", drop_last=np.ones(1000)), ("drop_last=<ndarray of ", "True or False")),  # type: ignore[arg-type]
        (lambda: gpuload.pack([*range(1000)], "y"), ("paths=[0, 1, ", "the path of a file")),  # type: ignore[list-item]
    ],
)
def test_long_lists_are_shortened_in_errors(given: Any, parts: tuple[str, ...]) -> None:
    with pytest.raises(gpuload.PlanError) as caught:
        given()
    assert_says(caught.value, *parts)
    assert len(str(caught.value)) < 300


def test_split_by_labels_from_obs_table(plain: Stored) -> None:
    """As the message about a long `by` says."""
    labels = pd.DataFrame({"own": np.arange(131) % 4})
    with gpuload.open_loader(plain.path, obs_table=labels, obs=["own"]) as loader:
        parts = gpuload.split(loader, {"a": 0.5, "b": 0.5}, by="own")
    assert not set(parts["a"] % 4) & set(parts["b"] % 4)


@pytest.mark.parametrize(
    ("sampler", "told"),
    [
        (gpuload.ClassBalanced(np.full(131, None)), "ClassBalanced(<ndarray of dtype object and shape (131,)>): the"),
        (gpuload.Grouped(np.arange(131), 4), "Grouped(<ndarray of dtype int64 and shape (131,)>, size=4): no class"),
    ],
)
def test_label_arrays_are_summarised_in_errors(plain: Stored, sampler: Any, told: str) -> None:
    assert_refused("PlanError", plain.path, told, sampler=sampler)


# --- files that are not there, or are something else


def test_missing_file(tmp_path: Path) -> None:
    path = tmp_path / "nowhere.h5ad"
    assert_refused("ReadError", path, str(path), "no such file")
    assert_refused("ReadError", [write_and_path(tmp_path), path], str(path))
    assert_refused("ReadError", "~/nowhere.h5ad", "~/nowhere.h5ad: no such file. ", "os.path.expanduser(path)")


def test_link_that_leads_nowhere(tmp_path: Path) -> None:
    write_and_path(tmp_path)
    link = tmp_path / "z.h5ad"
    for target in ("gone.h5ad", link.name):
        link.unlink(missing_ok=True)
        link.symlink_to(target)
        told = f"{link}: it is a link to '{target}', where there is no file; put the file there, or leave the link out."
        for given in (link, tmp_path):
            assert_refused("ReadError", given, told)


@pytest.mark.parametrize("key", ["X", "X/indptr", "layers", "layers/twice", "var"])
@pytest.mark.parametrize("link", [h5py.SoftLink("/none"), h5py.ExternalLink("none.h5", "/X")])
def test_link_in_a_file_that_leads_nowhere(link: Any, key: str, tmp_path: Path) -> None:
    """The file is not damaged: restoring it does not help."""
    path = tmp_path / "cells.h5ad"
    X = counts(10, 4)
    anndata.AnnData(X, layers={"twice": X * 2}).write_h5ad(path)
    with h5py.File(path, "r+") as file:
        del file[key]
        file[key] = link
    with pytest.raises(gpuload.StoreError) as caught:
        gpuload.open_loader(path, layer="twice" if key.startswith("layers") else "X", device="cpu")
    words = f"/{key} is a link, and what it leads to is not there; put that back, or copy it into this file."
    assert str(caught.value) == f"{path}: {words}"


def test_a_minibatch_is_not_a_dict(plain: Stored) -> None:
    with gpuload.open_loader(plain.path, batch_size=4, device="cpu") as loader:
        batch = loader.take([0])
    with pytest.raises(gpuload.PlanError, match=r"^batch\['X'\]: .*batch\.X, .*CellDataset"):
        batch["X"]


def write_and_path(folder: Path) -> Path:
    path = folder / "good.h5ad"
    write_plain(path)
    return path


def test_empty_folder_is_refused(tmp_path: Path) -> None:
    assert_refused("StoreError", tmp_path, str(tmp_path), "folder", ".h5ad")


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_file_without_permission(tmp_path: Path) -> None:
    path = write_and_path(tmp_path)
    path.chmod(0)
    assert_refused("ReadError", path, str(path), "permission")


@pytest.mark.parametrize(
    ("name", "hidden", "told"),
    [("cells.h5ad", "cells.h5ad", "opened"), ("*.h5ad", "", "listed"), ("inner/*.h5ad", "inner", "opened")],
)
def test_what_may_not_be_seen_is_not_said_to_be_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, hidden: str, told: str
) -> None:
    """Calls are refused as the system does it, except to root: of names in a folder without permission, or its list."""
    place = tmp_path / hidden

    def refusing(call: Any) -> Any:
        def refused(path: Any, *args: Any, **settings: Any) -> Any:
            if isinstance(path, str | os.PathLike) and Path(path) == place:
                raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), path)
            return call(path, *args, **settings)

        return refused

    for call in (os.listdir, os.scandir) if told == "listed" else (os.stat, os.lstat):
        monkeypatch.setattr(os, call.__name__, refusing(call))
    with pytest.raises(gpuload.ReadError, match=f"^{tmp_path}.*: cannot be {told}: Permission denied. Check "):
        gpuload.open_loader(tmp_path / name)


@pytest.mark.parametrize("name", ["X/indptr", "obs/cell_line/codes"])
def test_a_filter_that_h5py_lacks_is_not_taken_for_damage(plain: Stored, tmp_path: Path, name: str) -> None:
    """As in files of write_h5ad(compression=hdf5plugin.FILTERS["zstd"]), in a process that has not imported it."""
    path = tmp_path / "cells.h5ad"
    path.write_bytes(plain.path.read_bytes())
    with h5py.File(path, "r+") as file:
        values, about = file[name][()], dict(file[name].attrs)
        del file[name]
        file.create_dataset(name, data=values, chunks=(7,), **hdf5plugin.Zstd())
        file[name].attrs.update(about)
    code = f"import gpuload; gpuload.open_loader({str(path)!r}, obs='cell_line', device='cpu')"
    process = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    told = process.stderr.splitlines()[-1]
    assert told.startswith(f"gpuload.errors.StoreError: {path}: a column or the row offsets are compressed "), told
    assert told.endswith("; install hdf5plugin and import it first, or rewrite the file with compression='gzip'."), told


def test_a_file_that_a_plugin_compressed_is_read_without_importing_it(tmp_path: Path) -> None:
    values = counts(n_obs=50)
    data = anndata.AnnData(csr_matrix(values))
    data.obs["plate"] = [f"plate {i % 3}" for i in range(50)]
    path = tmp_path / "cells.h5ad"
    data.write_h5ad(path, **hdf5plugin.Zstd())
    with h5py.File(path) as file:
        assert file["X/indptr"].id.get_create_plist().get_nfilters()
    code = f"import gpuload; loader = gpuload.open_loader({str(path)!r}, obs='plate', device='cpu')"
    code += "; batch = loader.take([7]); print(loader.categories['plate'][batch.obs['plate'][0]], batch.X.sum())"
    process = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    told = process.stdout.rsplit(maxsplit=1)
    assert told[0] == "plate 1"
    assert float(told[1]) == values[7].sum()


def test_socket_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)  # addresses of sockets are short
    with socket.socket(socket.AF_UNIX) as server:
        server.bind("cells.h5ad")
        assert_refused("ReadError", "cells.h5ad", "cells.h5ad: cannot be opened: No such device", "Check the path")


def test_pipe_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "cells.h5ad"
    os.mkfifo(path)
    assert_refused("ReadError", path, f"{path}: this is a pipe", "; write it to a file first.")


@pytest.mark.parametrize(
    "content", [b"", b"cells,genes\n1,2\n", b"\x89HDF\r\n\x1a\n", b"\x89HDF\r\n\x1a\n" + bytes(4096)]
)
def test_not_hdf5(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "text.h5ad"
    path.write_bytes(content)
    assert_refused("StoreError", path, str(path), "HDF5", ".h5ad")


def test_hdf5_that_is_not_anndata(tmp_path: Path) -> None:
    path = tmp_path / "other.h5"
    h5py.File(path, "w").close()
    assert_refused("StoreError", path, f"{path}: there is no /X; it has nothing; ")
    with h5py.File(path, "w") as file:
        file["images"] = np.zeros(3)
    assert_refused("StoreError", path, f"{path}: there is no /X; it has /images; ")
    with h5py.File(path, "a") as file:
        file["X"] = np.zeros((3, 2))
    assert_refused("StoreError", path, str(path), "/var")


@pytest.mark.parametrize(
    ("paths", "told"),
    [
        ("", "paths='': expected the path of a file or folder; it is empty."),
        (["x.h5ad", ""], "paths='': expected the path of a file or folder; it is empty."),
        ({"rna": ""}, "paths='': expected the path of a file or folder; it is empty."),
        (b"x.h5ad", "paths=b'x.h5ad': a path is text; pass os.fsdecode(path)."),
        ([b"x.h5ad"], "paths=b'x.h5ad': a path is text; pass os.fsdecode(path)."),
    ],
)
def test_empty_and_bytes_paths_are_refused(paths: Any, told: str) -> None:
    assert_refused("PlanError", paths, told)
    if not isinstance(paths, dict):
        with pytest.raises(gpuload.PlanError, match="paths="):
            gpuload.pack(paths, "target")


def test_no_paths() -> None:
    assert_refused("PlanError", [], "paths", "at least one")


def test_neither_a_matrix_nor_csr(tmp_path: Path) -> None:
    path = tmp_path / "cube.h5ad"
    write_h5ad(path, lambda f: f.create_dataset("X", data=np.zeros((3, 4, 5))), 3, 4)
    assert_refused("StoreError", path, "/X", "3 dimensions")
    write_h5ad(path, lambda f: f.create_dataset("layers/images", data=np.zeros((3, 4, 5))), 3, 4)
    told = f"{path}: /layers/images has 3 dimensions; expected a matrix of cells x genes."
    assert_refused("StoreError", path, told, layer="images")
    write_h5ad(path, lambda f: f.create_group("X"), 3, 4)
    assert_refused("StoreError", path, "/X", "write_h5ad")


@pytest.mark.parametrize("shape", [(10,), (10, 4, 1), 10, "10 x 4", ("10", "genes"), (np.inf, 4.0)])
def test_the_shape_of_a_sparse_matrix_must_be_two_numbers(tmp_path: Path, shape: Any) -> None:
    path = tmp_path / "shape.h5ad"
    write_plain(path)
    with h5py.File(path, "r+") as file:
        file["X"].attrs["shape"] = shape
    assert_refused("StoreError", path, f"{path}: /X is neither a dense nor a CSR matrix; rewrite the file with")


@pytest.mark.parametrize("encoding", ["coo_matrix", "awkward-array", "csr_matrix2", ""])
def test_group_of_another_encoding_is_not_read_as_csr(tmp_path: Path, encoding: str) -> None:
    """Though it has all that a CSR matrix has."""
    path = tmp_path / "other.h5ad"
    write_plain(path)
    with h5py.File(path, "r+") as file:
        file["X"].attrs["encoding-type"] = encoding
    assert_refused("StoreError", path, f"{path}: /X is neither a dense nor a CSR matrix; rewrite the file with")


# --- matrices that cannot be read


@pytest.mark.parametrize("layer", ["X", "counts", "raw.X"])
def test_csc_is_refused_with_a_fix(tmp_path: Path, layer: str) -> None:
    path = tmp_path / "columns.h5ad"

    def write(file: h5py.File) -> None:
        key = {"X": "X", "raw.X": "raw/X"}.get(layer, f"layers/{layer}")
        if layer != "X":
            write_csr(file, "X", counts())
        group = write_csr(file, key, counts())
        group.attrs["encoding-type"] = "csc_matrix"
        if layer == "raw.X":
            writers.write_elem(file["raw"], "var", writers.genes_frame())

    write_h5ad(path, write)
    assert_refused("StoreError", path, str(path), "CSC", ".tocsr()", layer=layer)


@pytest.mark.parametrize(
    ("layer", "option"), [("X", []), ("two words", ["--layer", "two words"]), ("raw.X", ["--layer", "raw.X"])]
)
def test_what_is_advised_for_csc_works(tmp_path: Path, layer: str, option: list[str]) -> None:
    path, X = tmp_path / "two words.h5ad", counts()
    by_columns = anndata.AnnData(X.tocsc(), layers={"two words": X.tocsc()})
    by_columns.raw = by_columns
    by_columns.write_h5ad(path)
    with pytest.raises(gpuload.StoreError, match="is a CSC matrix") as refused:
        gpuload.open_loader(path, layer=layer)
    cure, _, command = str(refused.value).partition("Rewrite it once with ")[2].partition(", or with: ")
    assert shlex.split(command.removesuffix(".")) == ["gpuload", "pack", str(path), "DST", *option]
    adata = anndata.read_h5ad(path)
    exec(cure, {"adata": adata})
    adata.write_h5ad(tmp_path / "rows.h5ad")
    with gpuload.open_loader(tmp_path / "rows.h5ad", layer=layer, shuffle=False, batch_size=1000) as loader:
        np.testing.assert_array_equal(next(iter(loader)).X, X.toarray())


def test_old_raw_csc_is_refused_with_its_layer(tmp_path: Path) -> None:
    path = tmp_path / "old.h5ad"
    write_plain(path)
    with h5py.File(path, "r+") as file:
        file.copy("X", "raw.X")
        file["raw.X"].attrs["encoding-type"] = "csc_matrix"
    assert_refused("StoreError", path, f"gpuload pack {path} DST --layer raw.X.", layer="raw.X")


def test_csc_at_an_address_is_packed_from_a_copy(tmp_path: Path) -> None:
    """The packer reads columns from a disk alone."""
    anndata.AnnData(counts().tocsc()).write_h5ad(tmp_path / "columns.h5ad")
    told = r"^s3://data/cells\.h5ad: /X is a CSC .*, or copy the file and run: gpuload pack COPY DST\.$"
    access: Any = SimpleNamespace(is_array=hdf5.is_array)
    with h5py.File(tmp_path / "columns.h5ad") as file, pytest.raises(gpuload.StoreError, match=told):
        members.read_members(file, "s3://data/cells.h5ad", "X", (), (), access)


def test_obsm_of_anndata_0_6(tmp_path: Path) -> None:
    path = tmp_path / "old.h5ad"
    writers.write_old_compound(path, counts())
    with h5py.File(path, "a") as file:
        file["obsm"] = np.zeros(writers.N_OBS, [("X_pca", "f4", (5,)), ("X_tsne", "f4", (2,))])
    words = "its obsm is a single table, as AnnData before 0.7 wrote it; rewrite the file."
    assert_refused("StoreError", path, f"{path}: {words}", obsm="X_pca")
    assert_refused("StoreError", path, f"{path}: {words}", layer="obsm/nope")


def test_old_csc_is_refused_too(tmp_path: Path) -> None:
    path = tmp_path / "columns.h5ad"
    writers.write_old_compound(path, counts())
    with h5py.File(path, "a") as file:
        file["X"].attrs["h5sparse_format"] = "csc"
    assert_refused("StoreError", path, "CSC", "tocsr")


def test_missing_layer_error_lists_the_others(tmp_path: Path) -> None:
    path = tmp_path / "layers.h5ad"

    def write(file: h5py.File) -> None:
        write_csr(file, "X", counts())
        write_csr(file, "layers/spliced", counts())
        write_csr(file, "layers/unspliced", counts())

    write_h5ad(path, write)
    assert_refused("StoreError", path, "'counts'", "'spliced'", "'unspliced'", layer="counts")
    assert_refused("StoreError", path, "raw", layer="raw.X")
    assert_refused("StoreError", write_and_path(tmp_path), "'counts'", "no layers", layer="counts")


@pytest.mark.parametrize(
    ("options", "number", "name"),
    [
        (dict(hdf5plugin.BZip2()), "307", "bzip2"),
        (dict(hdf5plugin.Blosc2()), "32026", "blosc2"),
        (dict(hdf5plugin.Zfp()), "32013", "ZFP"),
        ({"scaleoffset": 0}, "6", "scaleoffset"),
    ],
)
def test_unknown_filter_is_named_by_number_and_name(
    tmp_path: Path, options: dict[str, Any], number: str, name: str
) -> None:
    path = tmp_path / "filter.h5ad"
    X = counts()
    if "scaleoffset" in options:
        X = X.astype(np.int32)
    write_h5ad(path, lambda f: write_dense(f, "X", X.toarray(), chunks=(16, 16), **options))
    assert_refused("StoreError", path, str(path), "/X", number, name, "compression='gzip'")


@pytest.mark.parametrize(
    "values", [np.zeros((3, 2), np.complex64), np.full((3, 2), "a", dtype=object), np.zeros((3, 2), np.longdouble)]
)
def test_unsupported_dtypes_are_refused(tmp_path: Path, values: np.ndarray) -> None:
    path = tmp_path / "dtype.h5ad"
    write_h5ad(path, lambda f: f.create_dataset("X", data=values), 3, 2)
    assert_refused("StoreError", path, str(path), "/X", "dtype")


def test_ambiguous_partial_chunks_need_a_newer_h5py(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gpuload.formats.hdf5.ctypes.CDLL", lambda _: object())
    for chunk_rows, is_told in ((2, True), (3, False)):
        path = tmp_path / f"shuffled-{chunk_rows}.h5ad"
        options = {"chunks": (chunk_rows, 2), "shuffle": True}
        write_h5ad(path, lambda f, o=options: f.create_dataset("X", data=np.ones((3, 2), np.float32), **o), 3, 2)
        if is_told:
            assert_refused("StoreError", path, str(path), "filters of /X", "last chunk", "install h5py")
        else:
            gpuload.open_loader(path, device="cpu").close()


def test_virtual_and_external_storage(tmp_path: Path) -> None:
    path = tmp_path / "elsewhere.h5ad"
    write_h5ad(path, lambda f: f.create_dataset("X", (4, 3), "f4", external=[(str(tmp_path / "raw.bin"), 0, 48)]), 4, 3)
    assert_refused("StoreError", path, "/X", "other files", "h5repack")
    source = h5py.VirtualSource(str(path), "X", shape=(4, 3))
    layout = h5py.VirtualLayout((4, 3), "f4")
    layout[...] = source
    write_h5ad(path, lambda f: f.create_virtual_dataset("X", layout), 4, 3)
    assert_refused("StoreError", path, "/X", "other files", "h5repack")


@pytest.mark.parametrize("name", ["X/indptr", "obs/depth", "obs/cell_line/codes", "obs/_index", "var/_index"])
def test_virtual_dataset_with_missing_source_is_refused(tmp_path: Path, name: str) -> None:
    path = tmp_path / "virtual.h5ad"
    write_plain(path)
    with h5py.File(path, "r+") as file:
        stored, attrs = file[name], dict(file[name].attrs)
        layout = h5py.VirtualLayout(stored.shape, stored.dtype)
        layout[...] = h5py.VirtualSource(str(tmp_path / "away.h5"), name, shape=stored.shape)
        del file[name]
        file.create_virtual_dataset(name, layout).attrs.update(attrs)
    told = f"^{path}: /{name} keeps its bytes in other files; copy it into one file first, with h5repack\\.$"
    names, cells = gpuload.obs_names, partial(gpuload.open_loader, obs=["depth", "cell_line"], device="cpu")
    read: Any = names if name == "obs/_index" else cells
    with pytest.raises(gpuload.StoreError, match=told):
        read(path)


def test_link_to_another_file_is_refused(tmp_path: Path) -> None:
    path, other = tmp_path / "small.h5ad", tmp_path / "other.h5"
    with h5py.File(other, "w") as file:
        file["X"] = np.ones((4, 3), np.float32)
    write_h5ad(path, lambda f: f.update({"X": h5py.ExternalLink(other.name, "/X"), "pad": np.arange(999.0)}), 4, 3)
    assert_refused("StoreError", path, "/X", "other files; copy it into one file first, with h5copy -f ext if it is")


# --- matrices that are wrong


def broken(tmp_path: Path, name: str, change: Any) -> Path:
    """Write a CSR file one of whose arrays was changed."""
    path = tmp_path / "broken.h5ad"

    def write(file: h5py.File) -> None:
        group = write_csr(file, "X", counts(), indices_dtype="i8")
        values = change(group[name][()])
        del group[name]
        group.create_dataset(name, data=values, chunks=(64,), compression="gzip")

    write_h5ad(path, write)
    return path


def replaced(at: int, value: int) -> Any:
    def change(values: np.ndarray) -> np.ndarray:
        values[at] = value
        return values

    return change


@pytest.mark.parametrize("value", [-1, writers.N_VARS, 1 << 31, 1 << 32, -(1 << 40)])
@pytest.mark.parametrize("output", ["dense", "csr"])
def test_column_number_out_of_range(tmp_path: Path, value: int, output: str) -> None:
    path = broken(tmp_path, "indices", replaced(100, value))
    assert_refused("CorruptDataError", path, str(path), "/X/indices", "chunk 1", "byte", "column", output=output)


def test_fill_value_beyond_the_columns_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "fill.h5ad"

    def write(file: h5py.File) -> None:
        group = write_csr(file, "X", counts())
        del group["indices"]
        group.create_dataset(
            "indices", (counts().nnz,), "i4", chunks=(64,), compression="gzip", fillvalue=writers.N_VARS
        )

    write_h5ad(path, write)
    assert_refused("CorruptDataError", path, str(path), "/X/indices", "column")


@pytest.mark.parametrize(
    ("change", "found"),
    [
        (replaced(0, 1), "0"),
        (replaced(40, 100_000), "rise"),
        (replaced(40, -5), "rise"),
        (replaced(-1, counts().nnz + 1), str(counts().nnz + 1)),
        (lambda values: np.append(values, values[-1]), "entries"),
        (lambda values: values[:-1], "entries"),
    ],
    ids=["starts above 0", "falls", "negative", "ends beyond nnz", "too long", "too short"],
)
def test_indptr_must_rise_and_end_at_nnz(tmp_path: Path, change: Any, found: str) -> None:
    path = broken(tmp_path, "indptr", change)
    assert_refused("CorruptDataError", path, str(path), "/X/indptr", found)


@pytest.mark.parametrize("name", ["data", "indices", "indptr"])
def test_matrix_arrays_must_be_one_dimensional(tmp_path: Path, name: str) -> None:
    path = tmp_path / "two.h5ad"
    write_plain(path)
    with h5py.File(path, "r+") as file:
        values = file["X"][name][:]
        del file["X"][name]
        file["X"][name] = values[None]
    assert_refused("StoreError", path, f"{path}: ", f"X/{name} has 2 dimensions; expected one")


@pytest.mark.parametrize("name", ["indices", "indptr"])
def test_places_of_values_must_be_integers(tmp_path: Path, name: str) -> None:
    """Floats of as many bytes would be taken for other numbers."""
    path = broken(tmp_path, name, lambda values: values.astype("f4"))
    assert_refused("StoreError", path, f"{path}: /X/{name} has dtype float32; expected integers.")


def test_texts_of_fixed_length_in_attributes(tmp_path: Path) -> None:
    """As libraries of other languages write them."""
    path = tmp_path / "fixed.h5ad"
    X = write_plain(path)
    with h5py.File(path, "r+") as file:
        file["X"].attrs["encoding-type"] = np.bytes_(b"csr_matrix")
    with gpuload.open_loader(path, shuffle=False, batch_size=1000) as loader:
        np.testing.assert_array_equal(next(iter(loader)).X, X.toarray())


def test_raw_without_a_matrix(tmp_path: Path) -> None:
    path = tmp_path / "raw.h5ad"
    writers.write_raw(path, counts())
    with h5py.File(path, "r+") as file:
        del file["raw/X"]
    assert_refused("StoreError", path, f"{path}: its raw holds no matrix; choose layer='X'.", layer="raw.X")


def test_missing_matrix_error_lists_the_others(tmp_path: Path) -> None:
    path = tmp_path / "raw.h5ad"
    writers.write_raw(path, counts())
    with h5py.File(path, "r+") as file:
        write_csr(file, "layers/spliced", counts()[:, :7])
        write_csr(file, "layers/scaled", counts()[:, :7])
        its = "choose one of its layers, 'scaled', 'spliced', or "
    assert_refused("StoreError", path, f"{path}: there is no layer 'a'; {its}layer='X', or layer='raw.X'.", layer="a")
    with h5py.File(path, "r+") as file:
        del file["X"]
    assert_refused("StoreError", path, f"{path}: there is no /X; it has /layers, ", f"; {its}layer='raw.X'.")
    with h5py.File(path, "r+") as file:
        del file["layers"]
    assert_refused("StoreError", path, f"{path}: there is no /X; it has /obs, ", "; choose layer='raw.X'.")
    assert_refused("StoreError", path, "there is no layer 'a', as it has no layers; choose layer='raw.X'.", layer="a")
    with h5py.File(path, "r+") as file:
        file.move("raw/X", "raw.X")  # as AnnData 0.6 named it
        del file["raw"]
    assert_refused("StoreError", path, f"{path}: there is no /X; it has /obs, ", "; choose layer='raw.X'.")
    with h5py.File(path, "r+") as file:
        file.move("raw.X", "matrix")  # which a loom file has too, beside row_attrs
    assert_refused("StoreError", path, f"{path}: there is no /X; ", "; no other matrix is there: name another file.")
    assert_refused("StoreError", path, f"{path}: there is no raw; ", "; no other matrix is there: ", layer="raw.X")


@pytest.mark.parametrize(
    ("change", "found"),
    [
        (lambda column: column["codes"].write_direct(np.full(131, 77, np.int8)), "codes need to be between"),
        (lambda column: column.pop("categories"), "categories"),
        (lambda column: column.attrs.modify("encoding-version", "9.9.9"), "9.9.9"),
    ],
)
def test_damaged_obs_column_is_named(copy_of: Callable[[str], Path], change: Any, found: str) -> None:
    path = copy_of("damaged.h5ad")
    with h5py.File(path, "r+") as file:
        change(file["obs/cell_line"])
    told = (f"{path}: obs column 'cell_line' cannot be read (", found, "; leave it out, or restore the file")
    assert_refused("CorruptDataError", path, *told, obs=["depth", "cell_line"])
    assert_refused("CorruptDataError", path, *told, where="cell_line == 'K562'")
    with pytest.raises(gpuload.CorruptDataError) as caught:
        gpuload.pack(path, path.with_name("packed.zarr"))
    assert all(part in str(caught.value) for part in told), caught.value


def test_columns_with_invalid_utf8_are_named(copy_of: Callable[[str], Path]) -> None:
    path = copy_of("damaged.h5ad")
    with h5py.File(path, "r+") as file:
        file["obs"].create_dataset("latin", data=np.full(131, b"\xe9"))
        file["obs"].attrs["column-order"] = ["latin"]
        text = file["var"].create_dataset("name", data=np.full(writers.N_VARS, b"\xe9", h5py.string_dtype("utf-8", 1)))
        text.attrs.update({"encoding-type": "string-array", "encoding-version": "0.2.0"})
        file["var"].attrs["column-order"] = ["name"]
    told = f"{path}: obs column 'latin' holds bytes that are no UTF-8 text ("
    assert_refused("StoreError", path, told, "0xe9", "; write them as text, or leave the column out.", obs=["latin"])
    of_var = rf"^{path}: var column 'name' cannot be read \(.*utf-8.*; leave it out"
    with pytest.raises(gpuload.CorruptDataError, match=of_var):
        gpuload.pack(path, path.with_name("packed.zarr"), obs=[])


@pytest.mark.parametrize("order", [5, [3, 4]], ids=["number", "numbers"])
def test_an_order_of_columns_that_is_no_names(copy_of: Callable[[str], Path], order: Any) -> None:
    path = copy_of("damaged.h5ad")
    with h5py.File(path, "r+") as file:
        file["obs"].attrs["column-order"] = order
    told = f"{path}: its metadata cannot be read (the column-order of /obs is "
    assert_refused("CorruptDataError", path, told, "; expected names); restore the file", obs=["depth"])


@pytest.mark.parametrize("name", ["data", "indices"])
def test_arrays_of_unequal_length(tmp_path: Path, name: str) -> None:
    path = broken(tmp_path, name, lambda values: values[:-3])
    assert_refused("CorruptDataError", path, str(path), "data", "indices")


def test_genes_without_names(tmp_path: Path) -> None:
    path = write_and_path(tmp_path)
    with h5py.File(path, "r+") as file:
        del file["var/_index"], file["var"].attrs["_index"]
    assert_refused("StoreError", path, f"{path}: /var has no index", "anndata's write_h5ad")
    with h5py.File(path, "r+") as file:
        del file["var"]
        file["var"] = np.arange(writers.N_VARS)  # without fields
    assert_refused("StoreError", path, f"{path}: /var has no index", "anndata's write_h5ad")


def test_impossible_size_is_refused(tmp_path: Path) -> None:
    path = write_and_path(tmp_path)
    with h5py.File(path, "r+") as file:
        del file["var/_index"]
        file["var"].create_dataset("_index", (1 << 55,), "i8", chunks=(1024,))
    assert_refused("CorruptDataError", path, f"{path}: a size in its metadata is impossible", "restore the file")


def test_more_chunks_than_the_file_can_hold(tmp_path: Path) -> None:
    path = tmp_path / "chunks.h5ad"
    write_h5ad(path, lambda f: f.create_dataset("X", (2000, 2000), "f4", chunks=(1, 1)), 2000, 2000)
    assert_refused("CorruptDataError", path, f"{path}: /X has 4000000 chunks", "Restore the file")


def test_more_chunks_than_64_bits_number(tmp_path: Path) -> None:
    path = write_and_path(tmp_path)
    with h5py.File(path, "r+") as file:
        file.create_dataset("obsm/X", (1 << 40, 1 << 24), "u1", chunks=(1, 1))  # none of them is written
    assert_refused("CorruptDataError", path, f"{path}: /obsm/X has {1 << 64} chunks", "Restore the file", obsm=["X"])


IS_TWICE = "the chunk index of /X lists a position twice, or one outside the array"


@pytest.mark.parametrize(
    ("excess", "row", "told"),
    [
        (-4, 16, "/X has an unencoded chunk of the wrong size"),
        (4, 16, "/X has an unencoded chunk of the wrong size"),
        (0, 32, IS_TWICE),
        (0, 16 * 1000, IS_TWICE),
        (0, 17, "its metadata cannot be read"),  # by HDF5: no chunk begins there
    ],
)
def test_chunk_index_that_was_changed_is_refused(tmp_path: Path, excess: int, row: int, told: str) -> None:
    path = tmp_path / "chunk.h5ad"
    write_h5ad(path, lambda f: write_dense(f, "X", counts().toarray(), chunks=(16, writers.N_VARS)))
    nbytes = 16 * writers.N_VARS * 4
    with h5py.File(path) as file:
        chunk = file["X"].id.get_chunk_info(1)
        assert (chunk.size, file["X"].dtype) == (nbytes, np.float32)
    content = path.read_bytes()

    def key(nbytes: int, row: int) -> bytes:  # of the B-tree of chunks: size, filter mask, place, address
        return struct.pack("<2I4Q", nbytes, 0, row, 0, 0, chunk.byte_offset)

    assert content.count(key(nbytes, 16)) == 1
    path.write_bytes(content.replace(key(nbytes, 16), key(nbytes + excess, row)))
    assert_refused("CorruptDataError", path, f"{path}: {told}", "estore the file")


def test_chunk_whose_end_exceeds_int64_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "chunk.h5ad"
    write_h5ad(path, lambda f: write_dense(f, "X", counts().toarray(), chunks=(16, writers.N_VARS), compression="gzip"))
    with h5py.File(path) as file:
        chunk = file["X"].id.get_chunk_info(0)
    content, place = path.read_bytes(), chunk.byte_offset.to_bytes(8, "little")
    assert content.count(place) == 1
    path.write_bytes(content.replace(place, ((1 << 63) - 16).to_bytes(8, "little")))
    assert_refused("ReadError", path, f"/X should reach byte {(1 << 63) - 16 + chunk.size} but the file ends at")


@pytest.mark.parametrize("chunks", [(16, writers.N_VARS), None])
def test_fill_value_of_a_negative_size_is_refused(tmp_path: Path, chunks: tuple[int, int] | None) -> None:
    """HDF5 crashes if it is asked for such a fill value."""
    path, fill_value = tmp_path / "fill.h5ad", np.float32(-123.5)
    options: dict[str, Any] = {"chunks": chunks, "fillvalue": fill_value}
    write_h5ad(path, lambda f: write_dense(f, "X", counts().toarray(), **options))
    content, value = path.read_bytes(), fill_value.tobytes()
    message = b"\2\1\4\0\0\0" + value  # when to write it, whether it is defined, its size
    assert content.count(message) == 1
    path.write_bytes(content.replace(message, b"\2\1\4\0\0\x80" + value))
    assert_refused("CorruptDataError", path, f"{path}: ", "fill", "estore the file")


@pytest.mark.parametrize(
    ("node", "name"),
    [("/", "encoding-type"), ("X", "encoding-type"), ("X", "shape"), ("var", "_index"), ("obs", "column-order")]
    + [("obs/cell_line", name) for name in ("encoding-type", "encoding-version", "ordered")]
    + [(f"obs/cell_line/{part}", "encoding-type") for part in ("codes", "categories")],
)
def test_attributes_that_are_neither_text_nor_numbers(copy_of: Callable[[str], Path], node: str, name: str) -> None:
    path = copy_of("damaged.h5ad")
    values = np.empty(1, dtype=object)
    values[0] = np.arange(3, dtype=np.uint8)
    with h5py.File(path, "r+") as file:
        file[node].attrs.create(name, values, dtype=h5py.vlen_dtype(np.uint8))
    told = f"the attribute {name!r} of /{node.strip('/')} is neither text nor numbers"
    assert_refused("CorruptDataError", path, f"{path}: ", told, "restore the file", obs=["cell_line"])


def test_attribute_of_an_impossible_type_is_refused(copy_of: Callable[[str], Path]) -> None:
    """HDF5 crashes on reading it."""
    path = copy_of("damaged.h5ad")
    content, text = path.read_bytes(), b"encoding-type\0\0\0\x19\1"  # sequences of varying length, of kind 1: text
    assert text in content
    path.write_bytes(content.replace(text, text[:-1] + b"\xd2"))
    assert_refused("CorruptDataError", path, f"{path}: ", "'encoding-type'", "neither text nor numbers", "restore the")


def test_matrix_and_frames_of_different_length(tmp_path: Path) -> None:
    path = tmp_path / "frames.h5ad"
    write_h5ad(path, lambda f: write_csr(f, "X", counts()), n_vars=writers.N_VARS + 1)
    assert_refused("CorruptDataError", path, "/var", "54", "53")
    write_h5ad(path, lambda f: write_csr(f, "X", counts()), n_obs=writers.N_OBS - 1)
    assert_refused("CorruptDataError", path, "/obs/depth", "130", "131", obs=["depth"])


# --- columns and genes


def test_unknown_column_error_lists_the_others(plain: Stored) -> None:
    assert_refused("StoreError", plain.path, str(plain.path), "'plate'", "'cell_line'", "'depth'", obs=["plate"])


def test_files_with_different_genes_are_refused(plain: Stored, tmp_path: Path) -> None:
    path = tmp_path / "narrow.h5ad"
    write_plain(path, csr_matrix(counts()[:, :50]))
    assert_refused("StoreError", [plain.path, path], str(path), str(plain.path), "50 genes", "53")
    with h5py.File(path, "w") as file:
        var = writers.genes_frame()
        var.index = [*var.index[:-1], "other"]
        writers.write_root(file, plain.obs, var)
        write_csr(file, "X", counts())
    assert_refused("StoreError", [plain.path, path], str(path), "'other'", "'gene_052'", "same order")


@pytest.mark.parametrize(
    ("genes", "parts"),
    [
        (["gene_001", "TP53", "BRCA1"], ("'TP53'", "2 of 3 are not", "'gene_000'", "mask")),
        (["gene_001", "gene_002", "gene_001"], ("'gene_001'", "once")),
        (np.ones(50, bool), ("50", "53")),
        (np.ones((53, 1), bool), ("mask",)),
        (np.zeros(53, bool), ("at least one",)),
        ([], ("at least one",)),
        ([1, 2, 3], ("names", "mask")),
        (np.array([0.5]), ("names", "mask")),
        (np.array([b"gene_001"]), ("b'gene_001'", "did you mean 'gene_001'?")),
        ({"gene_001", "gene_002"}, ("genes={'gene_001', 'gene_002'}: a set has no order; pass a list of gene names",)),
        (dict.fromkeys(["gene_001"]).keys(), ("genes=dict_keys(['gene_001']): ", "make a list of it")),
        ({"gene_001": 1}, ("genes={'gene_001': 1}: ", "make a list of it")),
        (iter(["gene_001"]), ("make a list of it",)),
        (b"gene_001", ("genes=b'gene_001': ", "a list of gene names")),
        (5, ("genes=5: ", "a list of gene names")),
    ],
)
def test_invalid_gene_selections_are_refused(plain: Stored, genes: Any, parts: tuple[str, ...]) -> None:
    assert_refused("PlanError", plain.path, "genes", *parts, genes=genes)


def test_a_mask_of_genes_must_be_in_their_order(plain: Stored) -> None:
    mask = pd.Series(np.arange(53) % 2 == 0, index=[f"gene_{i:03}" for i in range(53)])
    with gpuload.open_loader(plain.path, genes=mask) as loader:
        assert loader.var_names.tolist() == mask.index[mask].tolist()
    told = (
        "genes: it was given a Series of pandas whose value 0 is of 'gene_052', but gene 0 is 'gene_000'; put it in "
        "order with .reindex(loader.var_names), or, if only its index is wrong, pass its .to_numpy()."
    )
    assert_refused("PlanError", plain.path, told, genes=mask[::-1])


def test_duplicate_gene_names_cannot_be_selected(tmp_path: Path) -> None:
    path = tmp_path / "twins.h5ad"
    with h5py.File(path, "w") as file:
        var = writers.genes_frame()
        var.index = ["gene_000", *var.index[:-1]]
        writers.write_root(file, writers.cells_frame(), var)
        write_csr(file, "X", counts())
    assert_refused("PlanError", path, "'gene_000'", "choose genes by a mask instead.", genes=["gene_000"])
    with gpuload.open_loader(path, genes=["gene_003"], shuffle=False, batch_size=1000) as loader:
        np.testing.assert_array_equal(next(iter(loader)).X[:, 0], counts().toarray()[:, 4])


def test_sparse_matrix_with_more_columns_than_can_be_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_and_path(tmp_path)
    with h5py.File(path, "r+") as file:
        write_csr(file, "obsm/few", counts())
        file["obsm/few"].attrs["shape"] = [writers.N_OBS, 1 << 24]
    monkeypatch.setattr("gpuload.machine.memory_nbytes", lambda: 1 << 30)
    words = f"{path}: /obsm/few has {1 << 24} genes, whose names would take 1.1 GB of memory"
    assert_refused("StoreError", path, words, layer="obsm/few")
