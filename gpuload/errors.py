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

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence


class GpuloadError(Exception):
    """Base class of all errors that gpuload raises deliberately."""


class PlanError(GpuloadError, ValueError):
    """Invalid settings: sizes, names or options that cannot be carried out."""


class StoreError(GpuloadError, ValueError):
    """A file that cannot be read as cells x genes: missing key, wrong encoding, unsupported filter."""


class ReadError(GpuloadError, OSError):
    """Bytes could not be read: short read, failed call, or a file that changed while it was open."""


class BusyError(ReadError):
    """Bytes could not be read now (429, 5xx, reset, timeout, short body); retrying may help."""


class CorruptDataError(GpuloadError, ValueError):
    """Bytes were read and are wrong: bad checksum, column number out of range, decreasing indptr."""


class DeviceError(GpuloadError, RuntimeError):
    """The device refused: no such device, out of memory, failed launch."""


class MissingDependencyError(GpuloadError, ImportError):
    """A package required by the requested feature is not installed."""

    def __init__(self, package: str, feature: str, extra: str) -> None:
        super().__init__(
            f"{feature} needs {package}, which is not installed; install it with: pip install 'gpuload[{extra}]'"
        )
        self.package = package


def first_line(error: BaseException) -> str:
    """Return an error's message, or else its kind, as part of a sentence."""
    return (str(error).strip() or type(error).__name__).splitlines()[0].rstrip(".")


def listing(names: Sequence[str], at_most: int = 30, none: str = "no columns") -> str:
    """Return names as part of a sentence."""
    shown = ", ".join(map(repr, names[:at_most])) or none
    return shown if len(names) <= at_most else f"{shown} and {len(names) - at_most} more"
