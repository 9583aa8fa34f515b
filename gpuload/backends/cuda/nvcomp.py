"""nvCOMP's batched decoders through its C interface: the only module that knows the library.

The C interface suits a loader that knows the size of every chunk from the file's index: one call for thousands of
chunks, a status for each, and no waiting. The library's Python codec first reads sizes back from the device.

Requirements this module answers
--------------------------------
- It touches no memory: it takes device addresses, and returns small numbers.
- No call waits for the device. Temporary sizes come from the host alone, so they can be queried, and tested, without a
  GPU.
- Importing it loads nothing; `Nvcomp()` loads the library, version 5 or 6, which differ in one function.

Notes
-----
Of gzip's two algorithms the default, "naive", is used. "Lookahead" is for few, large streams: for thousands of chunks
it takes gigabytes of scratch memory.

The decoders trust their input: damaged bytes may give a wrong result with status 0, or no result [1]_. So sizes must be
checked beforehand (the kernels that walk `containers` do), and checksums and decoded sizes afterwards.

References
----------
.. [1] NVIDIA, nvCOMP 5.3.0 and 6.0.0, C headers ``nvcomp.h``, ``nvcomp/shared_types.h`` and
   ``nvcomp/{deflate,gzip,zstd,lz4,snappy}.h``.
"""

from __future__ import annotations

import ctypes
import importlib.util
from pathlib import Path
from typing import Any

from gpuload.checks import check_choice
from gpuload.errors import DeviceError, MissingDependencyError

C_NAMES = {"deflate": "Deflate", "gzip": "Gzip", "zstd": "Zstd", "lz4": "LZ4", "snappy": "Snappy"}
"""Formats, as named in the C functions of each: raw deflate (no zlib frame), gzip members, zstd frames, LZ4 blocks (no
frame), raw snappy."""

BACKENDS = {"default": 0, "cuda": 2}
"""What decodes: the library's choice, which may be the decompression engine of Blackwell GPUs; or CUDA kernels. For lz4
these, as the engine reports success for damaged chunks (nvcomp/lz4.h, ``nvcompBatchedLZ4DecompressAsync``)."""

STATUSES = {
    0: "nvcompSuccess",
    10: "nvcompErrorInvalidValue",
    11: "nvcompErrorNotSupported",
    12: "nvcompErrorCannotDecompress",
    13: "nvcompErrorBadChecksum",
    14: "nvcompErrorCannotVerifyChecksums",
    15: "nvcompErrorOutputBufferTooSmall",
    16: "nvcompErrorWrongHeaderLength",
    17: "nvcompErrorAlignment",
    18: "nvcompErrorChunkSizeTooLarge",
    19: "nvcompErrorCannotCompress",
    20: "nvcompErrorWrongInputLength",
    21: "nvcompErrorBatchSizeTooLarge",
    22: "nvcompErrorSubChunkCountTooLarge",
    23: "nvcompErrorSubChunkCountTooSmall",
    24: "nvcompErrorOutputBufferAlignmentTooSmall",
    1000: "nvcompErrorCudaError",
    10000: "nvcompErrorInternal",
}
"""Names of the values of ``nvcompStatus_t`` in the header."""

LIBRARIES = ("libnvcomp.so.5", "libnvcomp.so.6")

_FEATURE = "decoding on a GPU"
_SIZE, _ADDRESS = ctypes.c_size_t, ctypes.c_void_p


class Options(ctypes.Structure):
    """``nvcompBatched<Name>DecompressOpts_t``, passed by value: all begin like this, and zeros are the defaults."""

    _fields_ = (("backend", ctypes.c_int), ("rest", ctypes.c_char * 60))


class Properties(ctypes.Structure):
    """``nvcompProperties_t``: versions as ``major * 1000 + minor * 100 + patch``, that of CUDA too."""

    _fields_ = (("version", ctypes.c_uint32), ("cudart_version", ctypes.c_uint32))


_TEMP_SIZE = (_SIZE, _SIZE, Options, ctypes.POINTER(_SIZE), _SIZE)

SIGNATURES: dict[str, tuple[Any, ...]] = {
    "DecompressGetTempSizeAsync": _TEMP_SIZE,  # version 5
    "DecompressGetTempSize": (*_TEMP_SIZE, _ADDRESS),  # version 6
    "DecompressAsync": (
        _ADDRESS,
        _ADDRESS,
        _ADDRESS,
        _ADDRESS,
        _SIZE,
        _ADDRESS,
        _SIZE,
        _ADDRESS,
        Options,
        _ADDRESS,
        _ADDRESS,
    ),
}
"""Parameters of ``nvcompBatched<Name><key>``; each returns an ``nvcompStatus_t``."""


class Nvcomp:
    """The batched decoders of the installed nvCOMP.

    Attributes
    ----------
    version, cuda_version
        Versions of the library (``"5.3.0"``) and of the CUDA runtime that it was built with (``"13.3"``).
    path
        The library's file, as loaded from the installed packages, or else the loader's search path.

    Raises
    ------
    MissingDependencyError
        nvCOMP is not installed.
    DeviceError
        The library cannot be loaded, or its version is not 5 or 6.
    """

    def __init__(self) -> None:
        self._options = {name: Options(BACKENDS["cuda" if name == "lz4" else "default"]) for name in C_NAMES}
        self._library = _load()
        self.path = self._library._name  # noqa: SLF001 - ctypes has no public name for it
        found = self._properties()
        major = found.version // 1000
        self.version = f"{major}.{found.version % 1000 // 100}.{found.version % 100}"
        self.cuda_version = f"{found.cudart_version // 1000}.{found.cudart_version % 1000 // 10}"
        if major not in {5, 6}:
            raise DeviceError(
                f"{self.path} is nvCOMP {self.version}, but versions 5 and 6 are supported; install another with: "
                "pip install 'gpuload[cuda13]', or with CUDA 12 'gpuload[cuda12]'"
            )
        self._takes_stream = major == 6
        temp_size = "DecompressGetTempSize" if self._takes_stream else "DecompressGetTempSizeAsync"
        self._temp_sizes = self._functions(temp_size)
        self._decoders = self._functions("DecompressAsync")

    def temp_nbytes(
        self, algorithm: str, n_chunks: int, max_out_nbytes: int, total_out_nbytes: int, stream: int = 0
    ) -> int:
        """Return the size in bytes of the temporary device memory that `decode` needs.

        It is 0 for every format but zstd, which needs 3.05 to 3.11 times the decoded bytes, and more for chunks of less
        than 64 KiB; so batches of zstd chunks should be limited by size.

        Parameters
        ----------
        algorithm
            One of `C_NAMES`.
        n_chunks
            Chunks in the batch.
        max_out_nbytes, total_out_nbytes
            Decoded bytes of the largest chunk, and in total.
        stream
            The ``cudaStream_t`` that `decode` will be given; only version 6 uses it.

        Raises
        ------
        DeviceError
            The library refuses: a chunk of more than 2 or 4 GiB.
        PlanError
            `algorithm` is not one of `C_NAMES`.
        """
        found = _SIZE()
        function = self._choose(self._temp_sizes, algorithm)
        sizes = (n_chunks, max_out_nbytes, self._options[algorithm], ctypes.byref(found), total_out_nbytes)
        status = function(*sizes, stream) if self._takes_stream else function(*sizes)
        self._check(status, function, f" {n_chunks} chunks of up to {max_out_nbytes} bytes")
        return found.value

    def decode(
        self,
        algorithm: str,
        in_ptrs: int,
        in_nbytes: int,
        out_capacity: int,
        out_nbytes: int,
        out_ptrs: int,
        status: int,
        temp_ptr: int,
        temp_nbytes: int,
        n: int,
        stream: int,
    ) -> None:
        """Enqueue the decoding of n chunks on a stream; return at once.

        Arguments are the addresses of arrays of n elements in device memory, which also holds the chunks and outputs.
        None of it may change until the stream has passed this call. With n = 0 nothing is enqueued.

        Parameters
        ----------
        algorithm
            One of `C_NAMES`.
        in_ptrs, in_nbytes
            Addresses (uint64) and sizes (uint64) of the compressed chunks.
        out_capacity
            Capacity (uint64) for each decoded chunk, in bytes.
        out_nbytes
            Where the decoded sizes (uint64) are written.
        out_ptrs
            Addresses (uint64) of the outputs.
        status
            Where an ``nvcompStatus_t`` (int32) per chunk is written; see `STATUSES`.
        temp_ptr, temp_nbytes
            Temporary memory of at least `temp_nbytes` bytes; 0 and 0 where none is needed.
        n
            Number of chunks.
        stream
            A ``cudaStream_t``.

        Raises
        ------
        DeviceError
            The batch could not be enqueued. Errors of single chunks are in `status` instead.
        PlanError
            `algorithm` is not one of `C_NAMES`.
        """
        function = self._choose(self._decoders, algorithm)
        if n == 0:
            return
        code = function(
            in_ptrs,
            in_nbytes,
            out_capacity,
            out_nbytes,
            n,
            temp_ptr,
            temp_nbytes,
            out_ptrs,
            self._options[algorithm],
            status,
            stream,
        )
        self._check(code, function, f" {n} chunks")

    def _properties(self) -> Properties:
        found = Properties()
        function = self._function("nvcompGetProperties", (ctypes.POINTER(Properties),))
        self._check(function(ctypes.byref(found)), function, "")
        return found

    def _functions(self, key: str) -> dict[str, Any]:
        return {name: self._function(f"nvcompBatched{c}{key}", SIGNATURES[key]) for name, c in C_NAMES.items()}

    def _function(self, name: str, argtypes: tuple[Any, ...]) -> Any:
        try:
            function = getattr(self._library, name)
        except AttributeError:
            raise DeviceError(
                f"{self.path} has no function {name}, so it is not nvCOMP 5 or 6; install it with: "
                "pip install 'gpuload[cuda13]', or with CUDA 12 'gpuload[cuda12]'"
            ) from None
        function.argtypes, function.restype = argtypes, ctypes.c_int
        return function

    def _choose(self, functions: dict[str, Any], algorithm: str) -> Any:
        check_choice("nvCOMP algorithm", algorithm, functions)
        return functions[algorithm]

    def _check(self, status: int, function: Any, batch: str) -> None:
        if status:
            name = STATUSES.get(status, "an unknown status")
            raise DeviceError(
                f"nvCOMP's {function.__name__} refused{batch or ' the call'}: {name} ({status}); {self._cure(status)}."
            )

    def _cure(self, status: int) -> str:
        if status == 1000:
            return (
                "check with nvidia-smi that there is a GPU, that its driver is new enough for CUDA "
                f"{self.cuda_version.split('.')[0]} and that nothing failed on it before, or use device='cpu'"
            )
        if status == 18:
            return "rewrite the file with smaller chunks, or use device='cpu'"
        return "use device='cpu'"


def _load() -> ctypes.CDLL:
    """Load the library, preferably from an installed package, since that is the version that was chosen."""
    for file in _installed():
        try:
            return ctypes.CDLL(file)
        except OSError as error:
            raise DeviceError(
                f"{file} cannot be loaded ({error}); reinstall it with: pip install --force-reinstall "
                "'gpuload[cuda13]', or with CUDA 12 'gpuload[cuda12]'"
            ) from error
    for name in LIBRARIES:
        try:
            return ctypes.CDLL(name)
        except OSError:
            continue
    raise MissingDependencyError("nvidia-nvcomp-cu13", _FEATURE, "cuda13")


def _installed() -> list[str]:
    """Return the library's files in the package ``nvidia.libnvcomp``, without importing it."""
    try:
        found = importlib.util.find_spec("nvidia.libnvcomp")
    except (ImportError, ValueError):
        return []
    folders = (found and found.submodule_search_locations) or []
    places = [Path(folder, sub, name) for folder in folders for sub in ("lib64", "lib") for name in LIBRARIES]
    return [str(place) for place in places if place.is_file()]
