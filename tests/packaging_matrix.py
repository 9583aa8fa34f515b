"""Install the wheel with each extra, one by one, into an empty environment, and try what the extra is for.

    python tests/packaging_matrix.py                             every extra, with the interpreter that runs this
    python tests/packaging_matrix.py --extra none --extra remote --python python3.13
    python tests/packaging_matrix.py --mypy                      a typed user's program too, by this interpreter's mypy

Not a test, as it installs gigabytes; `docs/versions.md` has the results. In each environment: `pip check`, every
command's help, and what the extra is for; in the first, and where an extra changes what the engine depends on, also
`gpuload doctor` and a user's program on a file. Extras that pull in all of CUDA are only resolved, unless --all is
given. Prints a JSON line per extra: versions and what failed; the exit code is 1 if anything did.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import shutil
import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
TORCH = "torch==2.13.0"

TRIES = {
    "torch": "from gpuload.torch import CellDataset; import gpuload; "
    "n = sum(len(b['rows']) for b in CellDataset(gpuload.open_loader('cells.h5ad', device='cpu'))); assert n == 200",
    "dali": "import gpuload; from gpuload import dali; it = dali.CellIterator(gpuload.open_loader('cells.h5ad', "
    "device='cpu', batch_size=50)); assert len(list(it)) == 4",
    "lightning": "from gpuload.lightning import CellDataModule",
    "parquet": "import pyarrow.parquet",
    "dask": "from distributed import Client; Client(processes=False, dashboard_address=None).close()",
    "remote": "from gpuload.remote import open_remote; import os; open_remote(os.getcwd())",
    "aws": "import boto3, obstore",
    "hub": "import huggingface_hub, obstore; from gpuload.remote import open_remote; open_remote('hf://datasets/a/b')",
    "samples": "import torch; from gpuload.samples import SampleLoader, SampleSet; torch.save(torch.ones(3), 'a.pt'); "
    "assert len(list(SampleLoader(SampleSet(['a'], {'a': 1}, '.')))) == 1",
    "demo": "import sys; from gpuload.cli import main; "
    "sys.exit(main(['demo', '--no-real', '--cells', '2000', '--seconds', '1', '--quiet']))",
    "modality": "import matplotlib, sklearn, torch",
    "classify": "import matplotlib, tensorboard, torch",
    "bench": "import matplotlib, scdataset, torch",
    "docs": "import sphinx, myst_nb, numpydoc, pydata_sphinx_theme, sphinx_design, nvidia.dali",
    "check": "import mypy, importlinter",
}
"""What each extra is for, in a line or two."""

TRIES["dali-cuda12"] = TRIES["dali"]

HEAVY = ("cuda13", "cuda12", "cuml", "test")
"""Extras that pull in all of CUDA: resolved, not installed."""

BASE = ("numpy", "scipy", "pandas", "numba", "llvmlite", "h5py", "anndata", "imagecodecs")
"""What the engine depends on: it is tried again where an extra changes a version of these."""

CELLS = """
import anndata
from gpuload.synthetic import tahoe_shaped
X, obs, var = tahoe_shaped(200, n_vars=100, n_plates=4, n_cell_lines=3, n_drugs=4)
anndata.AnnData(X, obs, var).write_h5ad("cells.h5ad")
"""


class Environment:
    """A separate virtual environment, and a folder to work in; no setting of this process reaches it."""

    def __init__(self, folder: Path, python: str, base: Environment | None = None) -> None:
        self.folder = folder
        self.failures: list[str] = []
        self._environment = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "MYPYPATH")}
        self._environment["HOME"] = str(folder)
        if base is None:
            subprocess.run([python, "-m", "venv", str(folder / "venv")], check=True)
        else:  # linked, because PyTorch's files are many and large; pip replaces files, but never writes into them
            subprocess.run(["cp", "--archive", "--link", str(base.folder / "venv"), str(folder / "venv")], check=True)
            self.failures += base.failures
        self.python = str(folder / "venv" / "bin" / "python")

    def run(self, what: str, *command: str) -> str:
        """Run a command; record what failed."""
        done = subprocess.run(
            command, cwd=self.folder, env=self._environment, capture_output=True, text=True, check=False
        )
        if done.returncode:
            self.failures.append(f"{what}: {(done.stdout + done.stderr).strip()[-600:]}")
        return done.stdout

    def pip(self, *arguments: str) -> str:
        """Run pip."""
        cache = os.environ.get("PIP_CACHE_DIR") or str(Path.home() / ".cache" / "pip")
        return self.run(
            f"pip {arguments[0]}", self.python, "-m", "pip", "--disable-pip-version-check", "--cache-dir", cache,
            *arguments, "--quiet"
        )  # fmt: skip


@functools.cache
def with_torch(folder: Path, python: str) -> Environment:
    """Return an environment that has only PyTorch, made once per interpreter."""
    place = Environment(Path(tempfile.mkdtemp(dir=folder)), python)
    place.pip("install", TORCH)
    return place


def try_extra(
    extra: str, wheel: Path, python: str, options: argparse.Namespace, seen: dict[str, str] | None
) -> dict[str, Any]:
    """Install an extra ("none": without one) and try it; return what was found.

    `seen` are the versions with which the engine was already tried.
    """
    with tempfile.TemporaryDirectory(prefix=f"gpuload-{extra}-") as name:
        extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
        is_light = extra in HEAVY and not options.all
        base = with_torch(wheel.parent, python) if _needs_torch(extra, extras) and not is_light else None
        place = Environment(Path(name), python, base)
        wanted = str(wheel) if extra == "none" else f"{wheel}[{extra}]"
        if is_light:
            place.pip("install", "--dry-run", wanted)
            return {"extra": extra, "done": "resolved", "failures": place.failures}
        place.pip("install", wanted)
        place.pip("check")
        listed = place.run("pip list", place.python, "-m", "pip", "list", "--format=json")
        versions = {package["name"]: package["version"] for package in json.loads(listed or "[]")}
        place.run("cells", place.python, "-c", CELLS)
        for command in ("", "demo", "inspect", "tune", "bench", "pack", "doctor"):
            place.run(f"{command} --help", place.python, "-m", "gpuload", *filter(None, [command]), "--help")
        if seen is None or any(versions.get(name) != seen.get(name) for name in BASE):
            place.run("doctor", str(Path(place.python).with_name("gpuload")), "doctor")
            shutil.copy(ROOT / "tests" / "typed_user.py", place.folder / "user.py")
            place.run("a user's program", place.python, "user.py", "cells.h5ad")
            if options.mypy:
                mypy = (sys.executable, "-m", "mypy", "--strict", "--config-file=", "--python-executable", place.python)
                place.run("mypy --strict", *mypy, "user.py")
        if extra in TRIES:
            place.run("what it is for", place.python, "-c", TRIES[extra])
        return {"extra": extra, "done": "tried", "failures": place.failures, "versions": versions}


def _needs_torch(extra: str, extras: dict[str, list[str]]) -> bool:
    """Return whether an extra installs PyTorch, by itself or through another extra of ours."""
    wanted = extras.get(extra, [])
    inner = [name for r in wanted if r.startswith("gpuload[") for name in r[8:].rstrip("]").split(",")]
    return any(r.startswith("torch") for r in wanted) or any(_needs_torch(name, extras) for name in inner)


def main() -> int:
    """Try what is requested."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--extra", action="append", help="only this one, or these; none: no extra (default: every one)")
    parser.add_argument("--python", action="append", help="interpreter of the environments (default: this one)")
    parser.add_argument("--mypy", action="store_true", help="check a user's program with mypy --strict")
    parser.add_argument("--all", action="store_true", help="install those extras too that pull in the whole of CUDA")
    options = parser.parse_args()
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    is_well = True
    with tempfile.TemporaryDirectory(prefix="gpuload-wheel-") as folder:
        subprocess.run(
            [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", folder, str(ROOT)], check=True
        )
        (wheel,) = Path(folder).glob("*.whl")
        for python in options.python or [sys.executable]:
            seen = None
            for extra in options.extra or ["none", *extras]:
                found = try_extra(extra, wheel, python, options, seen)
                seen = seen or found.get("versions")
                is_well &= not found["failures"]
                print(json.dumps({"python": python, **found}), flush=True)
    return 0 if is_well else 1


if __name__ == "__main__":
    sys.exit(main())
