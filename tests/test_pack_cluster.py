"""`gpuload.pack` on Dask: the same store, byte for byte, as this machine's threads make."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import gpuload
from tests.test_pack import MEMORY, cells, written
from tests.test_pack_faults import contents

pytest.importorskip("distributed", reason="Dask is not installed: pip install 'gpuload[dask]'")

ON_A_CLUSTER = """
import sys
import gpuload
from distributed import LocalCluster

if __name__ == "__main__":
    with LocalCluster(n_workers=2, threads_per_worker=1, processes=True, dashboard_address=None) as cluster:
        address = cluster.scheduler_address
        gpuload.pack(sys.argv[1], sys.argv[2], memory=1 << 20, scheduler=address, num_threads=1)
        settings = {"layer": ["X", "double"], "obsm": "X_pca", "join": "inner"}
        target = sys.argv[2] + ".several"
        gpuload.pack(sys.argv[1:2] + sys.argv[3:], target, memory=1 << 20, scheduler=address, num_threads=1, **settings)
        try:
            gpuload.pack(sys.argv[1], sys.argv[2] + ".other", layer="none", scheduler=address)
        except gpuload.StoreError as error:
            print(error)
"""


def test_a_cluster_makes_the_same_store(tmp_path: Path) -> None:
    sources = []
    for number, n_vars in enumerate((200, 150)):
        adata = cells(3_000 - 1_000 * number, n_vars, number)
        adata.layers["double"] = (adata.X * 2).tocsc()
        adata.obsm["X_pca"] = np.random.default_rng(number).normal(size=(adata.n_obs, 4))
        sources.append(written(adata, tmp_path / f"{number}.h5ad"))
    source, other = sources
    gpuload.pack(source, tmp_path / "here.zarr", memory=MEMORY)
    settings = {"layer": ["X", "double"], "obsm": "X_pca", "join": "inner"}
    gpuload.pack(sources, tmp_path / "here.zarr.several", memory=MEMORY, **settings)  # type: ignore[arg-type]
    program = tmp_path / "program.py"
    program.write_text(ON_A_CLUSTER)
    done = subprocess.run(
        [sys.executable, "-W", "ignore", str(program), str(source), str(tmp_path / "there.zarr"), str(other)],
        check=False,
        capture_output=True,
        text=True,
        timeout=300,
        cwd=Path(gpuload.__file__).parents[1],
        env={**os.environ, "PYTHONPATH": str(Path(gpuload.__file__).parents[1])},
    )
    assert done.returncode == 0, done.stderr
    assert "there is no layer 'none'" in done.stdout
    assert contents(tmp_path / "there.zarr") == contents(tmp_path / "here.zarr")
    assert contents(tmp_path / "there.zarr.several") == contents(tmp_path / "here.zarr.several")


def test_a_scheduler_that_is_not_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from gpuload.packing import cluster

    monkeypatch.setattr(cluster, "CONNECT_S", 0.5)
    source = written(cells(20, 10), tmp_path / "in.h5ad")
    with pytest.raises(gpuload.ReadError, match="no Dask scheduler answers there; check the address"):
        gpuload.pack(source, tmp_path / "out.zarr", scheduler="tcp://127.0.0.1:1")
    assert [path.name for path in tmp_path.iterdir()] == ["in.h5ad"]


def test_without_dask_the_pip_command_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "distributed", None)
    source = written(cells(20, 10), tmp_path / "in.h5ad")
    with pytest.raises(gpuload.MissingDependencyError, match=r"pip install 'gpuload\[dask\]'"):
        gpuload.pack(source, tmp_path / "out.zarr", scheduler="tcp://127.0.0.1:1")
    assert [path.name for path in tmp_path.iterdir()] == ["in.h5ad"]
