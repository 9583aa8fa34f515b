"""``--join`` on the command line: files whose genes differ are inspected, timed and tuned as they would be read."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import gpuload
from gpuload.cli import main
from tests import several

if TYPE_CHECKING:
    from pathlib import Path

pytest.importorskip("tqdm")


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    parts = [several.part(seed, n_obs=200 + seed) for seed in range(3)]
    for part in parts:
        part.obs["plate"] = [f"plate {i // 50}" for i in range(part.n_obs)]
    return [str(path) for path in several.write(tmp_path_factory.mktemp("joined"), parts)]


@pytest.fixture
def genes(tmp_path: Path) -> str:
    file = tmp_path / "genes.txt"
    file.write_text("gene_9\ngene_1\n\n gene_4 \n")
    return str(file)


def run(capsys: pytest.CaptureFixture[str], *arguments: Any) -> dict[str, Any]:
    code = main([*map(str, arguments), "--json", "--quiet"])
    out, err = capsys.readouterr()
    assert code == 0, err
    found: dict[str, Any] = json.loads(out)
    return found


def n_vars(paths: list[str], join: Any) -> int:
    with gpuload.open_loader(paths, join=join, device="cpu") as loader:
        return loader.n_vars


def test_inspect(paths: list[str], genes: str, capsys: pytest.CaptureFixture[str]) -> None:
    for join in ("inner", "outer"):
        found = run(capsys, "inspect", *paths, "--join", join, "--label", "plate", "--batch-size", 8)
        assert (found["n_obs"], found["n_vars"], found["join"]) == (603, n_vars(paths, join), join)
        assert found["advice"]["candidates"]
    assert run(capsys, "inspect", *paths, "--join", genes)["n_vars"] == 3
    assert main(["inspect", *paths, "--join", "inner", "--quiet"]) == 0
    assert f"gpuload.open_loader({paths!r}, " in (said := capsys.readouterr().out)
    assert said.rstrip().endswith(", join='inner')")


def test_bench(paths: list[str], genes: str, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("torch")
    options = ["--seconds", 0.05, "--repeats", 1, "--batch-size", 8, "--fetch-factor", 4, "--device", "cpu"]
    found = run(capsys, "bench", *paths, *options, "--join", "outer", "--label", "plate")
    assert (found["n_vars"], found["join"]) == (n_vars(paths, "outer"), "outer")
    assert found["cells_per_s"]["median"] > 0
    assert run(capsys, "bench", *paths, *options, "--join", genes)["n_vars"] == 3


def test_gene_file_in_another_encoding_is_refused(
    paths: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    names = tmp_path / "names.txt"
    names.write_bytes("gène".encode("latin-1"))
    assert main(["inspect", *paths, "--join", str(names)]) != 0
    assert f"{names}: not a text file in UTF-8; expected one gene name per line." in capsys.readouterr().err


@pytest.mark.slow
def test_tune_saves_how_genes_are_joined(
    paths: list[str], genes: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "settings.json"
    options = ["--memory", "0.2GiB", "--batch-size", 8, "--seconds", 0.1, "--device", "cpu"]
    options += ["--label", "plate"]
    for join, wanted in (("inner", "inner"), (genes, ["gene_9", "gene_1", "gene_4"])):
        found = run(capsys, "tune", *paths, *options, "--join", join, "--out", out)
        assert found["settings"]["join"] == wanted
        with (
            gpuload.open_loader(paths, settings=out) as loader,
            gpuload.open_loader(paths, join=wanted, device="cpu", batch_size=700, shuffle=False) as other,
        ):
            assert list(loader.var_names) == list(other.var_names)
            (whole,) = other
            for batch in loader:
                np.testing.assert_array_equal(batch.X, whole.X[batch.rows])


@pytest.mark.parametrize("command", ["inspect", "bench", "tune"])
def test_error_without_join_suggests_it(command: str, paths: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main([command, *paths, "--quiet"]) == 1
    assert "join='inner' keeps the genes that all have" in capsys.readouterr().err
    assert main([command, *paths, "--quiet", "--join", "left"]) == 1
    assert "--join left: expected inner, outer or a text file of genes; left: cannot be opened: No such" in (
        capsys.readouterr().err
    )
