"""The port between the engine and the memory it fills: the `Backend` protocol.

A backend is the only thing that touches bulk memory. Each of its verbs is a whole stage, so there is no question of
where data lies anywhere above it, and a fake for tests is a few lines. `load` and `take_rows` start work and return at
once: the loader keeps several of them in flight, as many takes as `takes_ahead` says (none for a device that works
asynchronously by itself).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    import numpy as np
    from numpy.typing import NDArray

    from gpuload.stats import Stats
    from gpuload.types import Form, Recipe

T_co = TypeVar("T_co", covariant=True)


class Pending(Protocol[T_co]):
    """Work that was started."""

    def result(self) -> T_co:
        """Wait for the work and return what it made, or raise what it raised."""

    def done(self) -> bool:
        """Return whether `result` would return at once."""

    def cancel(self) -> object:
        """Give the work up; what has not begun never will."""


class Resident(Protocol):
    """One fetch's decoded rows in backend memory, which goes back to the backend when the last reference dies."""

    @property
    def n_rows(self) -> int:
        """Rows held."""


class Backend(Protocol):
    """Where bytes land and how.

    Attributes
    ----------
    device
        ``"cpu"`` or ``"cuda:<n>"``.
    io_mode
        The path that bytes take: ``"posix"``; ``"gds"``, ``"compat"``, ``"pinned"`` or ``"remote"`` for a GPU.
    takes_ahead
        How many `take_rows` the loader should keep started before the consumer asks for them.
    stats
        What was read and how long it took; shared with the loader.
    """

    device: str
    takes_ahead: int
    stats: Stats

    @property
    def io_mode(self) -> str:
        """The path that bytes take."""

    def load(self, recipe: Recipe) -> Pending[Resident]:
        """Start to read and decode what a recipe says.

        Raises (from ``result()``)
        --------------------------
        ReadError
            Bytes could not be read.
        CorruptDataError
            Bytes were read and are wrong.
        """

    def take_rows(self, resident: Any, positions: NDArray[np.int32], form: Form) -> Pending[Any]:
        """Start to gather rows of a resident into a new array or CSR matrix of the given form.

        Parameters
        ----------
        resident
            What `load` made.
        positions : (n,) int32
            Rows of the resident, in the order wanted; host memory. May repeat.
        form
            Columns, arithmetic, dtype and container.

        Returns
        -------
        Pending
            Of an (n, form.n_cols) array, C order, or a CSR matrix of that shape, owned by the caller: it is not
            touched again before the last reference to it, or to any view of it, is gone.
        """

    def busy(self) -> Callable[[], bool]:
        """Return what tells later whether the consumer is still at work that it was given before this call.

        Its thread may wait while its GPU has work: nobody is held up then.
        """

    def use_stream(self, number: int) -> None:
        """Let what follows work on the consumer's stream, a cudaStream_t, until another is named."""

    def memory(self) -> Mapping[str, int]:
        """Return the most bytes held at one time, by what they were for: ``"residents"``, ``"minibatches"``, ..."""

    def asarray(self, host: NDArray[Any]) -> Any:
        """Return a host array (obs values, row numbers) as an array on this backend's device."""

    def close(self) -> None:
        """Stop the threads and give back the memory; may be called twice."""
