"""The CUDA backend over CuPy itself, which runs over a CUDA runtime of host memory in a process of its own."""

from __future__ import annotations

import os
import platform
import re
import shutil
import subprocess
import sys
from importlib.util import find_spec
from typing import TYPE_CHECKING

import pytest

from gpuload.backends.cuda.device import n_gpus
from tests.cuda.test_readers import ROOT, compile_fake

if TYPE_CHECKING:
    from pathlib import Path

SOME = (
    "csr-gzip4 or blosc-lz4-shuffle or filter-masks or zarr or 131x0 or 1x1 or one-chunk or big-f4 or absent-chunks-3"
)
"""The forms on disk that differ in their use of CuPy."""


@pytest.mark.timeout(600)
@pytest.mark.skipif(n_gpus() > 0, reason="there is a GPU, which test_gpu.py tests")
def test_gpu_tests_pass_over_a_fake_runtime(tmp_path: Path) -> None:
    if platform.machine() != "x86_64" or not all(map(shutil.which, ("gcc", "g++", "nm"))):
        pytest.skip("needs gcc, g++ and nm, on x86-64")
    if find_spec("cupy") is None:
        pytest.skip("no CuPy here")
    compile_fake(tmp_path, "fake_runtime.c", "libfake_runtime.so")
    environment = {
        **os.environ,
        "GPULOAD_FAKE_RUNTIME": str(tmp_path / "libfake_runtime.so"),
        "CUPY_CACHE_DIR": str(tmp_path / "cupy"),
        "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
    }
    chosen = f"(test_csr or test_every_form) and ({SOME}) or cpu_backend or bound or damaged or rank or device or cases"
    chosen += " or (caches and always and 1000000) or share"
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "pytest_timeout",
        "-p",
        "no:cacheprovider",
        "-m",
        "gpu",
        "-k",
        chosen,
    ]
    files = ["tests/cuda/test_gpu.py", "tests/cuda/fake_runtime_cases.py"]
    command += ["-p", "tests.cuda.on_fake_runtime", *files]
    done = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-3000:]
    passed = re.search(r"(\d+) passed", done.stdout)
    assert passed is not None
    assert int(passed[1]) > 80
    assert "skipped" not in done.stdout
