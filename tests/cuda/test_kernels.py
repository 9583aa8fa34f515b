"""All kernels of the CUDA backend, as compiled for the host: their parameters, and their tests under sanitizers."""

from __future__ import annotations

import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from tests.cuda import shim
from tests.cuda.kernel_runs import BUILD, SANITIZERS, SIGNATURES, int64, placed

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.mark.parametrize("values", SIGNATURES)
def test_names_and_parameters(values: str) -> None:
    assert shim.compiled(values).signatures == SIGNATURES[values]


@pytest.mark.parametrize(
    ("k", "value"),
    [
        (4, 1),
        (4, np.int32(1)),
        (1, np.zeros(1, np.int32)),
        (1, np.zeros((2, 2), np.int64)[:, 0]),
        (5, placed(b"x" * 16)),
        (5, [0]),
    ],
    ids=["a Python int", "another scalar", "another array", "not contiguous", "read-only", "no array"],
)
def test_shim_accepts_only_exact_arguments(k: int, value: Any) -> None:
    args = [placed(b"x" * 16), int64(0), int64(16), int64(0), np.int64(1), np.zeros(16, np.uint8)]
    library = shim.compiled()
    library.launch("gather_payloads", 1, 32, args)
    for wrong in ([*args[:k], value, *args[k + 1 :]], args[:-1]):
        with pytest.raises(TypeError):
            library.launch("gather_payloads", 1, 32, wrong)
    for n_blocks, n_threads in ((0, 32), (1, 0), (1, 1025)):
        with pytest.raises(ValueError, match="cannot be launched"):
            library.launch("gather_payloads", n_blocks, n_threads, args)


def test_shim_detects_accesses_that_a_gpu_would_refuse() -> None:
    args = (placed(b"x" * 16), int64(0), int64(16), int64(4), np.int64(1), np.zeros(32, np.uint8))
    with pytest.raises(RuntimeError, match="must be aligned"):
        shim.compiled().launch("gather_payloads", 1, 32, args)


FEWER_PLUGINS = {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
"""Some import libraries, which takes long under a sanitizer."""


@pytest.fixture(scope="module")
def sanitized_runs() -> Iterator[dict[str, subprocess.Popen[str]]]:
    """Start the tests of kernels under each sanitizer, side by side."""
    files = sorted(map(str, Path(__file__).parent.glob("test_kernels*.py")))
    options = ["-q", "-x", "-s", "--noconftest", "-p", "pytest_timeout", "-p", "no:cacheprovider"]
    command = [sys.executable, "-m", "pytest", *options, *files]
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    builds = [build for build in SANITIZERS if shim.refusal(build) is None]
    with ThreadPoolExecutor() as pool:
        environments = list(pool.map(shim.sanitized, builds))
    runs = {
        build: subprocess.Popen(command, env=os.environ | environment | FEWER_PLUGINS, **pipes)
        for build, environment in zip(builds, environments, strict=True)
    }
    yield runs
    for run_of in runs.values():
        run_of.kill()
        run_of.communicate()


@pytest.mark.skipif(bool(BUILD), reason="this is the sanitized run")
@pytest.mark.parametrize("build", SANITIZERS)
def test_kernels_pass_under_sanitizers(build: str, sanitized_runs: dict[str, subprocess.Popen[str]]) -> None:
    if build not in sanitized_runs:
        pytest.skip(str(shim.refusal(build)))
    said, _ = sanitized_runs[build].communicate(timeout=500)
    assert sanitized_runs[build].returncode == 0, said[-8000:]
