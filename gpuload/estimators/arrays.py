"""A common interface to the estimators' three array libraries, for the few operations that differ between them.

Like the PyTorch front and the CUDA backend, this module uses torch and CuPy directly: its linear algebra works on whole
arrays and needs none of the loader's streams and buffers.
"""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from gpuload.backends import device_name, device_number, first_gpu
from gpuload.errors import DeviceError, MissingDependencyError, PlanError

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import AbstractContextManager

    from numpy.typing import NDArray

    from gpuload.loader import Loader

ENGINES = ("numpy", "torch", "cupy")


@dataclass(frozen=True)
class Engine:
    """An array library on a device.

    Attributes
    ----------
    name
        ``"numpy"``, ``"torch"`` or ``"cupy"``.
    xp
        The library's module, for functions with the same name in all three.
    put
        Copy an array of any of the three to the device, with a dtype (``"float32"`` or ``"float64"``).
    of_bits
        Convert bfloat16 bits (uint16) to numbers: bfloat16 if the library supports it, else float32.
    device
        Its device: ``"cpu"`` or ``"cuda:<number>"``.
    """

    name: str
    xp: Any
    put: Callable[[Any, str], Any]
    of_bits: Callable[[Any], Any]
    device: str

    def cholesky(self, positive: Any) -> Any:
        """Return the lower factor of a positive matrix; raise ``xp.linalg.LinAlgError`` if it is not positive."""
        if self.name != "cupy":
            return self.xp.linalg.cholesky(positive)
        from cupyx import errstate

        with errstate(linalg="raise"):  # by default CuPy does not check, and returns garbage
            return self.xp.linalg.cholesky(positive)

    def solve_lower(self, lower: Any, right: Any, *, transposed: bool = False) -> Any:
        """Return ``inv(lower) @ right``, or ``inv(lower.T) @ right``, for a lower triangular matrix."""
        if self.name == "torch":
            return self.xp.linalg.solve_triangular(lower.T if transposed else lower, right, upper=transposed)
        if self.name == "cupy":
            from cupyx.scipy.linalg import solve_triangular
        else:
            from scipy.linalg import solve_triangular
        return solve_triangular(lower, right, lower=True, trans=int(transposed), check_finite=False)

    def zeros(self, shape: tuple[int, ...], dtype: str) -> Any:
        """Return an array of zeros, allocated on the device."""
        if self.name == "torch":
            return self.xp.zeros(shape, dtype=getattr(self.xp, dtype), device=self.device)
        return self.xp.zeros(shape, dtype=dtype)

    def on_stream(self, loader: Loader) -> AbstractContextManager[Any]:
        """Return a context manager that makes a loader, and CuPy, produce minibatches on the library's current stream.

        On any other stream their memory could be overwritten while the library is still reading it.
        """
        if "cpu" in (self.device, loader.device):
            return nullcontext()
        from gpuload.backends.cuda.device import current, stream_named

        if self.name != "torch":  # CuPy; a front may have left the loader on another stream
            loader.use_stream(self.xp.cuda.get_current_stream().ptr)
            return nullcontext()
        number = self.xp.cuda.current_stream(loader.device).cuda_stream
        loader.use_stream(number)
        return current(stream_named(number))


def open_engine(name: str, device: str, *, has_choice: bool = False) -> Engine:
    """Open an array library on a device.

    Parameters
    ----------
    name
        ``"numpy"``, ``"torch"``, ``"cupy"``, or ``"auto"``: torch if installed (its BLAS is faster on CPUs, and handles
        large factorisations), else NumPy.
    device
        As in `gpuload.open_loader`; ``"auto"``: the GPU that a loader takes, if the library can use it too.
    has_choice
        Whether torch, or NumPy in its place, may fall back to the CPU if torch cannot use that GPU.

    Returns
    -------
    Engine
        Its ``device`` is resolved to ``"cpu"`` or ``"cuda:<number>"``.

    Raises
    ------
    PlanError
        There is no such library or device, or the library does not support the device.
    DeviceError
        The library cannot use that GPU.
    MissingDependencyError
        The library is not installed.
    """
    if name not in (*ENGINES, "auto"):
        raise PlanError(f"engine={name!r}: expected 'auto', 'numpy', 'torch' or 'cupy'.")
    device = device_name(device)
    number = device_number(device)
    if name == "numpy" and number is not None:
        raise PlanError(f"engine='numpy' with device={device!r}: NumPy works on the CPU; use 'torch' or 'cupy'.")
    if device == "auto" and name != "numpy":
        number = first_gpu()[0]
    if name == "cupy" and number is None:
        raise PlanError(f"engine='cupy' with device={device!r}: CuPy works on a GPU; use 'numpy' or 'torch'.")
    if name in ("torch", "auto"):
        try:
            return _torch(number, has_choice=has_choice or device == "auto")
        except ImportError as error:
            if name == "torch" or not (has_choice or device in ("auto", "cpu")):
                raise MissingDependencyError("torch", f"engine={name!r} on {device!r}", "torch") from error
    return _numpy() if name != "cupy" or number is None else _cupy(number)


def multiplies_bfloat16(device: str) -> bool:
    """Return whether a device multiplies bfloat16 natively: all supported GPUs and some CPUs do."""
    if device != "cpu":
        return True
    try:
        with open("/proc/cpuinfo") as about:
            return not _BFLOAT16_FLAGS.isdisjoint(next(line for line in about if line.startswith("flags")).split())
    except (OSError, StopIteration):
        return False


_BFLOAT16_FLAGS = {"avx512_bf16", "amx_bf16"}


def _float32_of_bits(bits: Any) -> Any:
    """Convert bfloat16 bits (uint16, NumPy or CuPy) to float32, exactly."""
    return (bits.astype(np.uint32) << np.uint32(16)).view(np.float32)


def _numpy() -> Engine:
    return Engine("numpy", np, lambda a, dtype: np.ascontiguousarray(to_host(a), dtype=dtype), _float32_of_bits, "cpu")


def _torch(number: int | None, *, has_choice: bool) -> Engine:
    import torch

    n_there = 0 if number is None else torch.cuda.device_count()
    if number is not None and number >= n_there:
        if not has_choice:
            raise DeviceError(
                f"device='cuda:{number}': PyTorch {torch.__version__} sees {n_there} GPUs, but number {number} is "
                "wanted; use device='cpu', or run `gpuload doctor`."
            )
        number = None
    device = "cpu" if number is None else f"cuda:{number}"

    def put(array: Any, dtype: str) -> Any:
        tensor = array.detach() if isinstance(array, torch.Tensor) else _torch_from(array)
        return tensor.to(device=device, dtype=getattr(torch, dtype))

    def _torch_from(array: Any) -> Any:
        if hasattr(array, "get") and device != "cpu":
            return torch.utils.dlpack.from_dlpack(array)
        return torch.from_numpy(_native(to_host(array)))

    def of_bits(bits: Any) -> Any:
        return _torch_from(bits.view(np.int16)).view(torch.bfloat16)

    return Engine("torch", torch, put, of_bits, device)


def _cupy(number: int) -> Engine:
    from gpuload.backends.cuda.device import load_cupy

    cupy = load_cupy("engine='cupy'")
    device = f"cuda:{number}"
    try:
        cupy.cuda.Device(number).use()
    except cupy.cuda.runtime.CUDARuntimeError as error:
        raise DeviceError(
            f"device={device!r}: CuPy cannot use that GPU ({error}); use another number, or engine='torch' with "
            "device='cpu', or run `gpuload doctor`."
        ) from error
    return Engine("cupy", cupy, lambda a, dtype: cupy.asarray(a, dtype=dtype), _float32_of_bits, device)


def _native(array: NDArray[Any]) -> NDArray[Any]:
    """Return an array in C order that torch takes without a warning: native byte order, no objects, writable."""
    found = np.ascontiguousarray(array, np.float64 if array.dtype == object else array.dtype.newbyteorder("="))
    return found if found.flags.writeable else found.copy()


def to_host(array: Any) -> NDArray[Any]:
    """Copy an array of any of the three libraries to NumPy."""
    if isinstance(array, np.ndarray):
        return array
    if hasattr(array, "detach"):
        found = array.detach().cpu()
        # NumPy has no bfloat16.
        return np.asarray((found.float() if str(found.dtype) == "torch.bfloat16" else found).numpy())
    return np.asarray(array.get() if hasattr(array, "get") else array)
