"""The exceptions that gpuload raises deliberately.

    GpuloadError
    ├─ PlanError(ValueError)            invalid settings
    ├─ StoreError(ValueError)           not a file we can read: missing key, wrong encoding, unsupported filter
    ├─ ReadError(OSError)               bytes could not be read: path, offset, wanted, got
    │  └─ BusyError                     ... now; retrying may help
    ├─ CorruptDataError(ValueError)     bytes were read and are wrong: checksum, column out of range, decreasing indptr
    ├─ DeviceError(RuntimeError)        the device refused: out of memory, no such device, failed launch
    └─ MissingDependencyError(ImportError)   names the package, the feature and the pip command

Each class also derives from the matching built-in exception, so code that does not know gpuload can catch it. A message
is one sentence: which argument or file, what was found, what is allowed, what to do.
"""

from __future__ import annotations

import re
import reprlib
from difflib import get_close_matches
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

MAX_COMPARED = 5_000
"""Up to this many names, a misspelt one is compared with all, at some 10 us each; beyond, with as many that begin or
end like it."""


WITH_CUDA_12 = {"cuda13": "cuda12", "dali": "dali-cuda12"}
"""Each extra's counterpart for CUDA 12."""


class GpuloadError(Exception):
    """Base class of all errors that gpuload raises deliberately."""


class PlanError(GpuloadError, ValueError):
    """Invalid settings: sizes, names or options that cannot be carried out."""


class StoreError(GpuloadError, ValueError):
    """A file that cannot be read as cells x genes: missing key, wrong encoding, unsupported filter."""

    missing_column: str | None = None
    """The column of obs that is requested and not there, if that is why."""

    missing_matrix: str | None = None
    """The beginning of the sentence, up to the matrix of obsm or the layer that is not there, if that is why."""


class ReadError(GpuloadError, OSError):
    """Bytes could not be read: short read, failed call, or a file that changed while it was open."""

    is_denied = False
    """Whether a server denied access; S3 also does so for missing objects if the caller may not list the bucket."""


class BusyError(ReadError):
    """Bytes could not be read now (429, 5xx, reset, timeout, short body); retrying may help."""


class CorruptDataError(GpuloadError, ValueError):
    """Bytes were read and are wrong: bad checksum, column number out of range, decreasing indptr."""


class DeviceError(GpuloadError, RuntimeError):
    """The device refused: no such device, out of memory, failed launch."""


class MissingDependencyError(GpuloadError, ImportError):
    """A package required by the requested feature is not installed."""

    def __init__(self, package: str, feature: str, extra: str) -> None:
        other = WITH_CUDA_12.get(extra)
        super().__init__(
            f"{feature} needs {package}, which is not installed; install it with: pip install 'gpuload[{extra}]'"
            + (f", or with CUDA 12 'gpuload[{other}]'" if other else "")
        )
        self.package = package
        self._arguments = package, feature, extra

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle the constructor's arguments, not the message: worker processes pass errors to their parent."""
        return type(self), self._arguments


def first_line(error: BaseException) -> str:
    """Return the first line of an error's message, or else its class name, as part of a sentence."""
    return (str(error).strip() or type(error).__name__).splitlines()[0].rstrip(".")


def unopened(path: str, error: OSError) -> ReadError:
    """Return the error for a file that the system does not open."""
    return ReadError(f"{path}: cannot be opened: {error.strerror}. Check the path and its permissions.")


def unlisted(folder: str, error: OSError) -> ReadError:
    """Return the error for a folder that the system does not list."""
    return ReadError(f"{folder}: cannot be listed: {error.strerror}. Check its permissions.")


_SHORT = reprlib.Repr()
_SHORT.maxstring = _SHORT.maxother = _SHORT.maxlong = 200


def shown(value: Any) -> str:
    """Return a user's value as part of a sentence: the beginning of a long list; the dtype and shape of an array."""
    shape = getattr(value, "shape", ())
    if not isinstance(value, type) and isinstance(shape, tuple) and shape:
        dtype = getattr(value, "dtype", None)
        of = "" if dtype is None else f"dtype {dtype} and "
        return f"<{type(value).__name__} of {of}shape {tuple(shape)}>"
    found = re.sub(r"\s*\n\s*", " ", _SHORT.repr(value))[:300]
    return re.sub(r" (object )?at 0x[0-9a-fA-F.]+>", ">", found)  # a memory address helps nobody


def listing(names: Sequence[str], at_most: int = 30, none: str = "no columns") -> str:
    """Return names as part of a sentence."""
    shown = ", ".join(map(repr, names[:at_most])) or none
    return shown if len(names) <= at_most else f"{shown} and {len(names) - at_most} more"


def nearest(name: str, names: Sequence[str]) -> str | None:
    """Return the name that a misspelt one probably stands for, if any; fast even among millions."""
    if len(names) > MAX_COMPARED:
        begin_alike = _alike(names, lambda one, n: one.startswith(name[:n]), len(name))
        names = [*begin_alike, *_alike(names, lambda one, n: one.endswith(name[-n:]), len(name))]
    found = get_close_matches(name, names, 1)
    return found[0] if found else None


def _alike(names: Sequence[str], is_alike: Callable[[str, int], bool], length: int) -> Sequence[str]:
    """Return the names alike in the fewest characters, up to `length`, that leave at most `MAX_COMPARED` of them."""
    least, most, few = 1, length, names[:0]
    while least <= most:
        n = (least + most) // 2
        found = [one for one in names if is_alike(one, n)]
        if len(found) > MAX_COMPARED:
            names, least = found, n + 1
        else:
            few, most = found or few, n - 1
    return few or names[:MAX_COMPARED]
