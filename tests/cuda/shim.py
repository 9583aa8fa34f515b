"""The kernels of the CUDA backend, compiled for the host and launched by name: the same source that a GPU runs.

`compiled()` compiles them with g++ behind shim.h, once, into the temporary folder. The environment variable
GPULOAD_SHIM chooses another build: ``"address"`` for AddressSanitizer and UndefinedBehaviorSanitizer, ``"thread"`` for
ThreadSanitizer, with a thread per CUDA thread. Their runtime must be loaded before Python: see `sanitized`.
"""

from __future__ import annotations

import ctypes
import fcntl
import functools
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from gpuload.backends.cuda.device import kernel_options, source_of_kernels

if TYPE_CHECKING:
    from collections.abc import Sequence

HEADER = Path(__file__).with_name("shim.h")

MAX_THREADS = 1024

_FLAGS = (
    *("-O2", "-g1", "-shared", "-fPIC", "-pthread", "-x", "c++"),
    *(
        "-ftls-model=initial-exec",
        "-Wall",
        "-Wextra",
        "-Werror",
        "-Wno-unknown-pragmas",
        "-Wno-unused-parameter",
        "-ffp-contract=off",
        "-fno-gnu-unique",  # two builds may be loaded, each with variables of its own
    ),
)
_BUILDS = {
    "": (),
    "address": ("-O0", "-fsanitize=address,undefined", "-fno-sanitize-recover=undefined"),
    "thread": ("-O1", "-fsanitize=thread", "-DSHIM_THREADS"),
}
_FAULTS = {
    1: "there is no such kernel",
    2: "an access that must be aligned is not",
    3: "it takes more than 48 kB of shared memory",
    4: "it writes beyond an array in shared memory",
}
_RUNTIMES = {"address": "libasan.so", "thread": "libtsan.so"}


class Library:
    """The compiled kernels.

    Attributes
    ----------
    signatures
        The parameters of every kernel: names of NumPy types, after ``"r:"`` for a pointer to const, ``"w:"`` for any
        other pointer.
    """

    def __init__(self, path: Path) -> None:
        library = ctypes.CDLL(str(path))
        library.shim_signatures.restype = ctypes.c_char_p
        lines = library.shim_signatures().decode().splitlines()
        self.signatures = {line.split()[0]: line.split()[1:] for line in lines}
        self._launch = library.shim_launch

    def launch(
        self, name: str, n_blocks: int, n_threads: int, args: Sequence[Any], *, is_reversed: bool = False
    ) -> None:
        """Run a kernel to completion.

        Parameters
        ----------
        name, n_blocks, n_threads
            Kernel and launch.
        args
            For a pointer, a C-contiguous array of exactly its type, or None for a null pointer; uint16 and float16 are
            the same. For a number, a NumPy scalar of exactly its type.
        is_reversed
            Run the last block and the last thread first: a different result then means a race.

        Raises
        ------
        TypeError, ValueError
            CUDA would refuse the arguments or the launch, or misread them.
        RuntimeError
            The kernel broke a rule of CUDA; see shim.h.
        """
        signature = self.signatures.get(name)
        if signature is None:
            raise ValueError(f"{name}: there is no such kernel")
        if not 1 <= n_blocks < 1 << 31 or not 1 <= n_threads <= MAX_THREADS:
            raise ValueError(f"{name}: {n_blocks} blocks of {n_threads} threads cannot be launched")
        if len(args) != len(signature):
            raise TypeError(f"{name}: {len(args)} arguments instead of {len(signature)}")
        values = [_as_c(f"{name}, argument {k}", *pair) for k, pair in enumerate(zip(signature, args, strict=True))]
        pointers = (ctypes.c_void_p * len(values))(*(ctypes.addressof(value) for value in values))
        fault = self._launch(
            name.encode(),
            ctypes.c_int64(int(n_blocks)),
            ctypes.c_int(int(n_threads)),
            ctypes.c_int(is_reversed),
            pointers,
        )
        if fault:
            raise RuntimeError(f"{name}: {_FAULTS[fault]}")


def _as_c(where: str, wanted: str, value: Any) -> Any:
    """Return an argument as what a kernel takes, or raise TypeError."""
    if ":" not in wanted:
        dtype = np.dtype(wanted)
        if not isinstance(value, dtype.type):
            raise TypeError(f"{where}: {type(value).__name__} instead of a NumPy scalar of {dtype}")
        return np.ctypeslib.as_ctypes_type(dtype)(value.item())
    if value is None:
        return ctypes.c_void_p(None)
    access, name = wanted.split(":")
    if not isinstance(value, np.ndarray) or (value.dtype != name and (name, value.dtype) != ("u2", np.float16)):
        raise TypeError(f"{where}: {getattr(value, 'dtype', type(value).__name__)} instead of an array of {name}")
    if not value.flags.c_contiguous or not value.flags.aligned:
        raise TypeError(f"{where}: an array that is not contiguous, or not aligned")
    if access == "w" and not value.flags.writeable:
        raise TypeError(f"{where}: a read-only array that the kernel writes to")
    return ctypes.c_void_p(value.ctypes.data)


@functools.cache
def compiled(values: str = "float32") -> Library:
    """Return the kernels as compiled for this machine, for residents of a dtype; skip the test if there is no g++."""
    return Library(_compiled(os.environ.get("GPULOAD_SHIM", ""), values))


def _compiled(build: str, values: str = "float32") -> Path:
    compiler = shutil.which("g++")
    if compiler is None:
        pytest.skip("no g++ here to compile the kernels with", allow_module_level=True)
    flags = (*kernel_options(values), *_FLAGS, *_BUILDS[build])
    key = hashlib.sha256(repr(flags).encode() + source_of_kernels().encode() + HEADER.read_bytes()).hexdigest()[:16]
    folder = Path(tempfile.gettempdir()) / f"gpuload-kernels-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    path = folder / f"{key}.so"
    with path.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # another worker may be compiling it
        if not path.exists():
            made = folder / f"{key}.made"
            command = [compiler, *flags, "-include", str(HEADER), "-", "-o", str(made)]
            done = subprocess.run(command, input=source_of_kernels(), capture_output=True, text=True, check=False)
            assert done.returncode == 0, done.stderr
            os.replace(made, path)
    return path


def sanitized(build: str) -> dict[str, str]:
    """Return environment variables for a Python that runs a sanitized build."""
    for values in ("float32", "float64"):
        _compiled(build, values)
    return _environment(build)


@functools.cache
def refusal(build: str) -> str | None:
    """Return why a sanitized build cannot run here; None if it can."""
    if shutil.which("g++") is None:
        return "no g++ here to compile the kernels with"
    environment = os.environ | _environment(build)
    done = subprocess.run([sys.executable, "-c", ""], env=environment, capture_output=True, text=True, check=False)
    is_loaded = done.returncode == 0 and not done.stderr
    return None if is_loaded else f"{_RUNTIMES[build]} does not run here: {done.stderr[-200:]}"


def _environment(build: str) -> dict[str, str]:
    command = ["g++", f"-print-file-name={_RUNTIMES[build]}"]
    runtime = subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    options = "halt_on_error=1:exitcode=66:detect_leaks=0"
    return {"GPULOAD_SHIM": build, "LD_PRELOAD": runtime, "ASAN_OPTIONS": options, "TSAN_OPTIONS": options}
