"""The interface between the engine and the memory that it fills: the `Backend` protocol.

Only a backend touches bulk memory. Each of its methods is a whole stage, so nothing above it needs to know where data
are, and a fake for tests takes a few lines. `load` and `take_rows` start work and return at once: the loader keeps
several of them in flight, as many takes as `takes_ahead` says (none for a device that is itself asynchronous).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    import numpy as np
    from numpy.typing import NDArray

    from gpuload.stats import Stats
    from gpuload.types import Form, Recipe

AHEAD_NBYTES = 256 << 20
"""Approximate memory for minibatches made ahead of the consumer."""

T_co = TypeVar("T_co", covariant=True)


def n_ahead(takes_ahead: int, nbytes: float) -> int:
    """Return how many minibatches of some bytes to make ahead of the consumer; a backend's `takes_ahead` at most."""
    return min(takes_ahead, max(1, int(AHEAD_NBYTES / max(1.0, nbytes))))


class Pending(Protocol[T_co]):
    """Work in progress."""

    def result(self) -> T_co:
        """Wait for the work and return its result, or raise its error."""

    def done(self) -> bool:
        """Return whether `result` would return at once."""

    def cancel(self) -> object:
        """Cancel the work; what has not started never will."""


class Resident(Protocol):
    """One fetch's decoded rows in backend memory, which is returned to the backend with the last reference."""

    @property
    def n_rows(self) -> int:
        """Number of rows held."""


class Backend(Protocol):
    """Where bytes land, and how.

    Attributes
    ----------
    device
        ``"cpu"`` or ``"cuda:<n>"``.
    io_mode
        The I/O path: ``"posix"``; ``"gds"``, ``"compat"``, ``"pinned"`` or ``"remote"`` for a GPU.
    takes_ahead
        Maximum number of `take_rows` that the loader should start ahead of the consumer; see `n_ahead`.
    device_nbytes
        Memory of the device that it may use, in bytes; None if it uses the host's.
    device_cache_nbytes, host_cache_nbytes
        Memory of the device, and of the host, that its caches may take, in bytes.
    stats
        What was read, and how long it took; shared with the loader.
    """

    device: str
    takes_ahead: int
    device_nbytes: int | None
    device_cache_nbytes: int
    host_cache_nbytes: int
    stats: Stats

    @property
    def io_mode(self) -> str:
        """The I/O path."""

    def load(self, recipe: Recipe) -> Pending[Resident]:
        """Start to read and decode a recipe.

        Raises (from ``result()``)
        --------------------------
        ReadError
            Bytes could not be read.
        CorruptDataError
            Bytes were read but are wrong.
        """

    def take_rows(self, resident: Any, positions: NDArray[np.int32], form: Form) -> Pending[Any]:
        """Start to gather rows of a resident into a new array or CSR matrix of the given form.

        Parameters
        ----------
        positions : (n,) int32
            Rows of the resident, in output order; host memory. May repeat. May be a slice of the positions of a whole
            fetch, which must not change.

        Returns
        -------
        Pending
            An (n, form.n_cols) array, C order, or a CSR matrix of that shape, owned by the caller: its memory is not
            reused before the last reference to it, or to any view of it, is gone.
        """

    def busy(self) -> Callable[[], bool]:
        """Return a function that tells whether the consumer is still busy with work it got before this call.

        As long as its GPU is busy, a wait of the consumer's thread delays nothing.
        """

    def use_stream(self, number: int) -> None:
        """Use this consumer stream, a cudaStream_t, until another one is set."""

    def memory(self) -> Mapping[str, int]:
        """Return peak memory in bytes, by purpose: ``"residents"``, ``"minibatches"``, ..."""

    def asarray(self, host: NDArray[Any]) -> Any:
        """Copy a host array (obs values, row numbers) to this backend's device."""

    def close(self) -> None:
        """Stop the threads and free the memory; may be called twice."""
