"""The kernels compile for every architecture that is supported, without a warning; no GPU is needed for that."""

from __future__ import annotations

import re
import shutil
import subprocess
from typing import TYPE_CHECKING

import pytest

from gpuload.backends.cuda.decode import N_LZF_THREADS
from gpuload.backends.cuda.device import kernel_options, source_of_kernels
from gpuload.backends.cuda.work import N_THREADS
from tests.cuda.kernel_runs import SIGNATURES

if TYPE_CHECKING:
    from pathlib import Path

ARCHITECTURES = {"80": "A100", "90": "H100, H200", "100": "B200"}

CUPY_OPTIONS = ("-ftz=true", "--device-as-default-execution-space")
"""What CuPy's RawModule adds to the options that it is given (cupy/cuda/compiler.py)."""


@pytest.mark.parametrize("values", SIGNATURES)
@pytest.mark.parametrize("number", ARCHITECTURES)
def test_nvrtc_compiles_the_kernels(number: str, values: str) -> None:
    nvrtc = pytest.importorskip("cupy").cuda.nvrtc
    program = nvrtc.createProgram(source_of_kernels(), "kernels.cu", [], [])
    try:
        nvrtc.compileProgram(program, [f"--gpu-architecture=sm_{number}", *kernel_options(values), *CUPY_OPTIONS])
    except nvrtc.NVRTCError as error:
        pytest.fail(f"{error}: {nvrtc.getProgramLog(program)}")
    assert not nvrtc.getProgramLog(program).strip("\n\0 ")
    ptx = nvrtc.getPTX(program)
    ptx = ptx.decode() if isinstance(ptx, bytes) else ptx
    assert set(re.findall(r"\.entry (\w+)", ptx)) == set(SIGNATURES[values])
    assert ("cvt.rn.f32.f64" in ptx) == (values == "float32")
    assert not re.findall(r"\b(?:cvt|add|sub|mul|fma)\S*\.ftz\S*", ptx), "values below 2**-126 would become 0"
    for entry in ptx.split(".entry ")[1:]:
        if entry.startswith(("densify_csr_", "gather_dense_", "copy_pieces_f4_")):
            assert "st.global.v4" in entry, f"{entry.split('(')[0]} stores 4 bytes where it could 16"
    nvrtc.destroyProgram(program)


@pytest.mark.slow
@pytest.mark.parametrize("values", SIGNATURES)
def test_nvcc_compiles_the_kernels(values: str, tmp_path: Path) -> None:
    nvcc = shutil.which("nvcc")
    if nvcc is None:
        pytest.skip("no nvcc here")
    source = tmp_path / "kernels.cu"
    source.write_text(source_of_kernels())
    command = [
        nvcc,
        *kernel_options(values),
        "-arch=sm_90",
        "-cubin",
        "-Werror",
        "all-warnings",
        "-o",
        str(tmp_path / "k.cubin"),
    ]
    done = subprocess.run([*command, str(source)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert not done.stderr


def test_kernels_are_compiled_for_the_launched_block_size() -> None:
    assert re.findall(r"__launch_bounds__\((\d+)\)", source_of_kernels()) == [str(N_THREADS)]
    assert N_LZF_THREADS <= N_THREADS


def test_kernels_use_nothing_that_early_cuda_12_lacks() -> None:
    assert "__dp4a(" not in source_of_kernels(), "NVRTC 12.0 to 12.2 declare it without defining it"


def test_device_code_includes_no_file() -> None:
    included = re.findall(r"^#include.*", source_of_kernels(), re.MULTILINE)
    assert included == ["#include <cstdint>"]  # for nvcc and g++; NVRTC has no such file
