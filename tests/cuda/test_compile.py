"""kernels.cu compiles for every architecture that is supported, without a warning; no GPU is needed for that."""

from __future__ import annotations

import re
import shutil
import subprocess
from typing import TYPE_CHECKING

import pytest

from tests.cuda.shim import SOURCE
from tests.cuda.test_kernels import SIGNATURES

if TYPE_CHECKING:
    from pathlib import Path

ARCHITECTURES = {"80": "A100", "90": "H100, H200", "100": "B200"}


@pytest.mark.parametrize("number", ARCHITECTURES)
def test_nvrtc_compiles_the_kernels(number: str) -> None:
    nvrtc = pytest.importorskip("cupy").cuda.nvrtc
    program = nvrtc.createProgram(SOURCE.read_text(), SOURCE.name, [], [])
    try:
        nvrtc.compileProgram(program, [f"--gpu-architecture=sm_{number}", "-std=c++17"])
    except nvrtc.NVRTCError as error:
        pytest.fail(f"{error}: {nvrtc.getProgramLog(program)}")
    assert not nvrtc.getProgramLog(program).strip("\n\0 ")
    ptx = nvrtc.getPTX(program)
    ptx = ptx.decode() if isinstance(ptx, bytes) else ptx
    assert set(re.findall(r"\.entry (\w+)", ptx)) == set(SIGNATURES)
    nvrtc.destroyProgram(program)


def test_nvcc_compiles_the_kernels(tmp_path: Path) -> None:
    nvcc = shutil.which("nvcc")
    if nvcc is None:
        pytest.skip("no nvcc here")
    command = [nvcc, "-std=c++17", "-arch=sm_90", "-cubin", "-Werror", "all-warnings", "-o", str(tmp_path / "k.cubin")]
    done = subprocess.run([*command, str(SOURCE)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert not done.stderr


def test_no_file_is_included_for_the_device() -> None:
    included = re.findall(r"^#include.*", SOURCE.read_text(), re.MULTILINE)
    assert included == ["#include <cstdint>"]  # for nvcc and g++; NVRTC has no such file
