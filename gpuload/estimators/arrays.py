"""The three array libraries that the estimators work over, behind the few operations that differ between them.

A second home of torch and CuPy beside their front and their backend: linear algebra here is on whole arrays, with no
stream and no buffer of ours.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from gpuload.errors import MissingDependencyError, PlanError

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray

ENGINES = ("numpy", "torch", "cupy")


@dataclass(frozen=True)
class Engine:
    """An array library on a device.

    Attributes
    ----------
    name
        ``"numpy"``, ``"torch"`` or ``"cupy"``.
    xp
        Its module: what is called alike in all three is called on it.
    put
        Bring an array of any of the three to the device, with a dtype (``"float32"`` or ``"float64"``).
    host
        Bring an array back as NumPy.
    of_bits
        Make numbers of bfloat16 bits (uint16): bfloat16 where the library has it, else float32.
    """

    name: str
    xp: Any
    put: Callable[[Any, str], Any]
    host: Callable[[Any], NDArray[Any]]
    of_bits: Callable[[Any], Any]

    def orthonormal(self, columns: Any) -> Any:
        """Return an orthonormal basis of what the columns span, (n, k) of (n, k)."""
        return self.xp.linalg.qr(columns)[0]

    def eigh(self, symmetric: Any) -> tuple[Any, Any]:
        """Return eigenvalues, ascending, and eigenvectors."""
        values, vectors = self.xp.linalg.eigh(symmetric)
        return values, vectors

    def solve_lower(self, lower: Any, right: Any) -> Any:
        """Return ``inv(lower) @ right`` of a lower triangular matrix."""
        if self.name == "torch":
            return self.xp.linalg.solve_triangular(lower, right, upper=False)
        return _triangular(self.name)(lower, right, lower=True, check_finite=False)

    def solve_lower_transposed(self, lower: Any, right: Any) -> Any:
        """Return ``inv(lower.T) @ right`` of a lower triangular matrix."""
        if self.name == "torch":
            return self.xp.linalg.solve_triangular(lower.T, right, upper=True)
        return _triangular(self.name)(lower, right, lower=True, trans=1, check_finite=False)

    def zeros(self, shape: tuple[int, ...], dtype: str) -> Any:
        """Return an array of zeros."""
        return self.put(np.zeros(shape, dtype=dtype), dtype)


def open_engine(name: str, device: str) -> Engine:
    """Return the array library of that name.

    Parameters
    ----------
    name
        One of `ENGINES`, or ``"auto"``: torch where it is installed (its BLAS is the faster one on CPUs, and has no
        trouble with large factorisations), else NumPy.
    device
        ``"cpu"`` or ``"cuda:0"``.

    Raises
    ------
    PlanError
        There is no such library here, or it cannot work on that device.
    MissingDependencyError
        It is not installed.
    """
    if name not in (*ENGINES, "auto"):
        raise PlanError(f"engine={name!r}: expected 'auto', 'numpy', 'torch' or 'cupy'.")
    is_gpu = device != "cpu"
    if name == "numpy" and is_gpu:
        raise PlanError(f"engine='numpy' with device={device!r}: NumPy works on the CPU; use 'torch' or 'cupy'.")
    if name == "cupy" and not is_gpu:
        raise PlanError("engine='cupy' with device='cpu': CuPy works on a GPU; use 'numpy' or 'torch'.")
    if name in ("torch", "auto"):
        try:
            return _torch(device)
        except ImportError as error:
            if name == "torch" or is_gpu:
                raise MissingDependencyError("torch", f"engine={name!r} on {device!r}", "torch") from error
    return _cupy(device) if name == "cupy" else _numpy()


def multiplies_bfloat16(device: str) -> bool:
    """Return whether a device has instructions that multiply bfloat16: all GPUs that we support, and some CPUs."""
    if device != "cpu":
        return True
    try:
        with open("/proc/cpuinfo") as about:
            return not _BFLOAT16_FLAGS.isdisjoint(next(line for line in about if line.startswith("flags")).split())
    except (OSError, StopIteration):
        return False


_BFLOAT16_FLAGS = {"avx512_bf16", "amx_bf16"}


def _triangular(name: str) -> Callable[..., Any]:
    if name == "cupy":
        from cupyx.scipy.linalg import solve_triangular
    else:
        from scipy.linalg import solve_triangular
    return solve_triangular  # type: ignore[no-any-return]


def float32_of_bits(bits: Any) -> Any:
    """Return the numbers that bfloat16 bits (uint16, NumPy or CuPy) stand for, exactly."""
    return (bits.astype(np.uint32) << np.uint32(16)).view(np.float32)


def _numpy() -> Engine:
    return Engine("numpy", np, lambda a, dtype: np.ascontiguousarray(to_host(a), dtype=dtype), to_host, float32_of_bits)


def _torch(device: str) -> Engine:
    import torch

    def put(array: Any, dtype: str) -> Any:
        tensor = array.detach() if isinstance(array, torch.Tensor) else _torch_from(array)
        return tensor.to(device=device, dtype=getattr(torch, dtype))

    def _torch_from(array: Any) -> Any:
        return torch.utils.dlpack.from_dlpack(array) if hasattr(array, "get") else torch.from_numpy(_native(array))

    return Engine("torch", torch, put, to_host, lambda bits: _torch_from(bits.view(np.int16)).view(torch.bfloat16))


def _cupy(device: str) -> Engine:
    try:
        import cupy
    except ImportError as error:
        raise MissingDependencyError("cupy", "engine='cupy'", "cuda13") from error
    cupy.cuda.Device(int(device.rpartition(":")[2] or 0) if ":" in device else 0).use()
    return Engine("cupy", cupy, lambda a, dtype: cupy.asarray(a, dtype=dtype), to_host, float32_of_bits)


def _native(array: NDArray[Any]) -> NDArray[Any]:
    """Return an array in C order and in a type that torch has too: of this machine's byte order, and no objects."""
    if array.dtype == object:
        return np.ascontiguousarray(array, dtype=np.float64)
    return np.ascontiguousarray(array, dtype=array.dtype.newbyteorder("="))


def to_host(array: Any) -> NDArray[Any]:
    """Return an array of any of the three as NumPy."""
    if isinstance(array, np.ndarray):
        return array
    if hasattr(array, "detach"):
        return np.asarray(array.detach().cpu().numpy())
    return np.asarray(array.get() if hasattr(array, "get") else array)
