"""A pytest plugin: CuPy over `fake_runtime.c`, the kernels of the CPU's build, and nvCOMP's fake.

    python -m pytest -p tests.cuda.on_fake_runtime -m gpu tests/cuda/test_gpu.py

So tests for a GPU exercise what the package uses of CuPy: memory, streams, events, and launches of kernels that NVRTC
has compiled with CuPy's options. What is executed is not that build but the one for the CPU; torch, DALI and KvikIO do
not run on it.
"""

from __future__ import annotations

import ctypes
import os
import subprocess
from importlib.util import find_spec
from pathlib import Path
from typing import Any

LIBRARY = os.environ["GPULOAD_FAKE_RUNTIME"]


class _Library(ctypes.CDLL):
    """Finds the fake in the driver's place."""

    def __init__(self, name: str | None = None, *args: Any, **kwargs: Any) -> None:
        super().__init__(LIBRARY if name == "libcuda.so.1" else name, *args, **kwargs)


def runtime_of_cupy() -> Path:
    """Return the file that CuPy's runtime is linked into, as /proc/self/maps names it: without symbolic links."""
    spec = find_spec("cupy_backends.cuda.api")
    assert spec is not None
    folder = next(iter(spec.submodule_search_locations or ()))
    return next(Path(folder).glob("runtime.*.so")).resolve()


def functions_of(path: Path) -> dict[str, int]:
    """Return the addresses of the runtime's functions in a file."""
    lines = subprocess.run(["nm", str(path)], capture_output=True, text=True, check=True).stdout.splitlines()
    found = [line.split() for line in lines]
    return {f[2]: int(f[0], 16) for f in found if len(f) == 3 and f[1] in "tT" and f[2].startswith("cuda")}


def _address(function: Any) -> int:
    return ctypes.cast(function, ctypes.c_void_p).value or 0


def _replace_runtime() -> ctypes.CDLL:
    ctypes.CDLL = _Library  # type: ignore[misc]
    fake, path = ctypes.CDLL(LIBRARY), runtime_of_cupy()
    fake.fake_patch.argtypes = [ctypes.c_uint64, ctypes.c_uint64]
    fake.fake_device_of.argtypes = [ctypes.c_uint64]
    ctypes.CDLL(str(path))
    maps = Path("/proc/self/maps").read_text(encoding="utf-8").splitlines()
    base = min(int(line.split("-")[0], 16) for line in maps if line.endswith(str(path)))
    for name, place in functions_of(path).items():
        fake.fake_patch(base + place, _address(getattr(fake, name, fake.fake_unsupported)))
    return fake


fake = _replace_runtime()


def _open_cuda(
    number: int, *, num_threads: int | None, memory_nbytes: int | None, io: str, values: str, **settings: Any
) -> Any:
    from gpuload.backends.cuda.backend import CudaBackend
    from gpuload.backends.cuda.device import Device as CupyDevice
    from gpuload.backends.cuda.pinned import PinnedReader
    from tests.cuda import shim
    from tests.cuda.fake_device import FakeNvcomp

    class Device(CupyDevice):
        def give(self, stream: int, call: Any) -> None:
            call()

    fake.fake_set_launch(ctypes.c_void_p(_address(shim.compiled(values)._launch)))
    device = Device(number, memory_nbytes, values)
    reader = PinnedReader(device, num_threads=num_threads or 2)
    return CudaBackend(
        device,
        reader,
        FakeNvcomp(device),  # type: ignore[arg-type]
        num_threads=num_threads,
        **settings,
    )


def pytest_configure() -> None:
    """Open loaders of a GPU over the fake."""
    import gpuload.backends.cuda

    gpuload.backends.cuda.open_cuda = _open_cuda
