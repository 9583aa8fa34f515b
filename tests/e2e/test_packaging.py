"""The installed package: a wheel with all its data, which works and type-checks without the rest of the checkout."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tarfile
import venv
import zipfile
from pathlib import Path

import anndata
import pytest

import gpuload
from gpuload.synthetic import tahoe_shaped

ROOT = Path(__file__).parents[2]
USER = ROOT / "tests" / "typed_user.py"


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a wheel of this checkout."""
    pytest.importorskip("hatchling", reason="it builds the wheel")
    folder = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(folder)]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True, timeout=120)
    (built,) = folder.glob("*.whl")
    return built


@pytest.fixture(scope="module")
def python(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> str:
    """Return an interpreter with the wheel and all other packages of this one, but without this checkout."""
    folder = tmp_path_factory.mktemp("environment")
    venv.create(folder, with_pip=False)
    (packages,) = folder.glob("lib/python*/site-packages")
    zipfile.ZipFile(wheel).extractall(packages)
    others = [path for path in sys.path if path.endswith("site-packages")]
    (packages / "others.pth").write_text("\n".join(others) + "\n")
    return str(folder / "bin" / "python")


def run(command: list[str], folder: Path) -> str:
    environment = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "MYPYPATH")}
    done = subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=500, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_the_wheel_has_its_data_and_nothing_else(wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    wanted = {path.relative_to(ROOT).as_posix() for path in (ROOT / "gpuload").rglob("*") if path.is_file()}
    wanted = {name for name in wanted if "__pycache__" not in name}
    assert {"gpuload/py.typed", "gpuload/backends/cuda/kernels/common.cu", "gpuload/cache/schema.sql"} <= wanted
    assert {name for name in names if name.startswith("gpuload/")} == wanted
    assert all(name.startswith(("gpuload/", "gpuload-")) for name in names)


def test_the_installed_command_runs(python: str, tmp_path: Path) -> None:
    place = run([python, "-c", "import gpuload; print(gpuload.__file__)"], tmp_path)
    assert not Path(place).is_relative_to(ROOT)
    assert run([python, "-m", "gpuload", "--version"], tmp_path) == f"gpuload {gpuload.__version__}\n"


def test_a_users_program_runs_on_the_installed_package(python: str, tmp_path: Path) -> None:
    X, obs, var = tahoe_shaped(200, n_vars=100, n_plates=4, n_cell_lines=3, n_drugs=4)
    anndata.AnnData(X, obs, var).write_h5ad(tmp_path / "cells.h5ad")
    shutil.copy(USER, tmp_path / "user.py")  # beside tests/cuda CuPy takes that for NVIDIA's package `cuda`
    said = run([python, "user.py", "cells.h5ad"], tmp_path)
    bits, cells = re.fullmatch(r"([\d.]+) bits, (\d+) cells\n", said).groups()  # type: ignore[union-attr]
    assert float(bits) > 1.9
    assert 100 <= int(cells) < 200


@pytest.mark.slow
def test_a_users_program_type_checks(python: str, tmp_path: Path) -> None:
    pytest.importorskip("mypy", reason="it checks the types")
    command = [sys.executable, "-m", "mypy", "--strict", "--config-file=", "--python-executable", python]
    shutil.copy(USER, tmp_path / "user.py")  # beside the checkout's package it would be checked against that
    assert "Success" in run([*command, "user.py"], tmp_path)
    (tmp_path / "wrong.py").write_text("import gpuload\nn: str = gpuload.open_loader('cells.h5ad').n_obs\n")
    with pytest.raises(AssertionError, match="Incompatible types in assignment"):
        run([*command, "wrong.py"], tmp_path)


def test_citation_has_this_version() -> None:
    assert f"\nversion: {gpuload.__version__}\n" in (ROOT / "CITATION.cff").read_text()


def test_changelog_starts_with_this_version() -> None:
    (newest, *_) = re.findall(r"^## (\S+)", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert newest == gpuload.__version__


@pytest.mark.skipif(shutil.which("git") is None, reason="git is not installed")
def test_tag_of_a_commit_matches_its_version() -> None:
    command = ["git", "tag", "--points-at", "HEAD", "v*"]
    tags = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False).stdout.split()
    assert set(tags) <= {f"v{gpuload.__version__}"}


def test_the_sdist_has_what_the_checkout_has(tmp_path: Path) -> None:
    pytest.importorskip("hatchling", reason="it builds the archive")
    command = [sys.executable, "-m", "hatchling", "build", "-t", "sdist", "-d", str(tmp_path)]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True, timeout=120)
    (built,) = tmp_path.glob("*.tar.gz")
    with tarfile.open(built) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    for name in (
        "README.md",
        "LICENSE",
        "CHANGELOG.md",
        "CITATION.cff",
        "CONTRIBUTING.md",
        "Makefile",
        "pyproject.toml",
    ):
        assert name in names
    for folder in ("gpuload", "docs", "tests", "pipelines", "benchmarks", "docker"):
        assert any(name.startswith(f"{folder}/") for name in names), folder
