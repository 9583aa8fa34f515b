"""Minibatches passed through a user's function, in threads ahead of the consumer."""

from __future__ import annotations

import copy
from collections import deque
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from gpuload.checks import check_whole
from gpuload.errors import PlanError, shown
from gpuload.threads import OneAtATime, TaskThreads

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterator
    from concurrent.futures import Future

    from gpuload.loader import Loader
    from gpuload.torch import CellDataset

Made = TypeVar("Made")


class Mapped(Generic[Made]):
    """An iterable over what a function makes of each minibatch, in threads ahead of the consumer.

    For work that would otherwise hold up the training step: tokens, augmentation, features of your own. It runs while
    the model computes, as far as it lets other Python code run, as NumPy and PyTorch do in their loops. The order is
    the loader's. Each ``iter()`` starts the loader's next epoch.

    `state_dict` is the position of what the consumer has received: minibatches still with the function do not count,
    and are passed to it again after a resume. Call its methods rather than the loader's; closing the loader remains
    yours.

    Parameters
    ----------
    loader : Loader or CellDataset
        Yields the minibatches, in host memory.
    function
        Called with each minibatch once, a `Batch` or a CellDataset's dict; what it returns is yielded. With several
        threads, it is called for several minibatches at the same time.
    num_threads
        Threads that call it.
    ahead
        Minibatches taken from the loader ahead of the consumer. None: one more than `num_threads`.

    Raises
    ------
    PlanError
        A number is invalid; `function` cannot be called; `loader` is something else, or its minibatches are in device
        memory, where the kernels of a function that is called in the training loop run ahead by themselves.

    Notes
    -----
    For the same results after a resume, random numbers must depend on the minibatch only:
    ``numpy.random.default_rng(batch.rows)`` is such a generator, and another one in each shuffled epoch.
    """

    def __init__(
        self,
        loader: Loader | CellDataset,
        function: Callable[[Any], Made],
        *,
        num_threads: int = 1,
        ahead: int | None = None,
    ) -> None:
        engine = getattr(loader, "loader", loader)
        if not hasattr(engine, "load_state_dict") or not hasattr(engine, "device"):
            raise PlanError(
                f"Mapped: expected a loader of gpuload.open_loader, or a CellDataset; found {type(loader).__name__}."
            )
        if engine.device != "cpu":
            raise PlanError(
                f"Mapped: the loader's minibatches are on {engine.device}; call the function in the training loop, "
                "where its kernels are queued without waiting, or open the loader with device='cpu'."
            )
        if not callable(function):
            raise PlanError(f"Mapped(function={function!r}): expected a function of a minibatch.")
        self._loader = loader
        self._function = function
        self._num_threads = check_whole("num_threads", num_threads, 1)
        self._ahead = self._num_threads + 1 if ahead is None else check_whole("ahead", ahead, 1)
        # The loader's state at the start of the iteration under way, or of the last if it was left early, and results
        # received since: replaced together, as another thread may ask for the state.
        self._position: tuple[dict[str, Any], int] | None = None
        self._live: object = None

    def __repr__(self) -> str:
        threads = f"num_threads={self._num_threads}, ahead={self._ahead}"
        return f"Mapped({self._loader!r}, {shown(self._function)}, {threads})"

    def __len__(self) -> int:
        """Return the number of minibatches in a full epoch, the same on every rank."""
        return len(self._loader)

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch of the next iteration; see `Loader.set_epoch`."""
        self._loader.set_epoch(epoch)
        if self._live is None:
            self._position = None

    def state_dict(self) -> dict[str, Any]:
        """Return the position up to which the consumer has received results; see `Loader.state_dict`.

        States of this object and of its loader are interchangeable.
        """
        position = self._position
        if position is None:
            state, position = self._loader.state_dict(), self._position  # again, as an iteration may begin meanwhile
            if position is None:
                return state
        start, n_received = position
        return {**copy.deepcopy(start), "step": start["step"] + n_received}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Resume the next iteration from a state; see `Loader.load_state_dict`."""
        self._loader.load_state_dict(state)
        self._position = self._live = None

    def __iter__(self) -> Iterator[Made]:
        """Start the loader's next epoch."""
        batches, start = iter(self._loader), self._loader.state_dict()
        self._position, self._live = None, object()
        return OneAtATime(self._made(batches, start, self._live))

    def __getitem__(self, _: object) -> Made:
        raise PlanError(
            "Mapped: it is iterated, not indexed; import gpuload.torch first, then PyTorch's DataLoader knows."
        )

    def _made(self, batches: Iterator[Any], start: dict[str, Any], live: object) -> Generator[Made, None, None]:
        self._check_live(live)
        self._position, n_received = (start, 0), 0
        waiting: deque[Future[Made]] = deque()
        with TaskThreads(self._num_threads, "mapped-by-gpuload") as threads:
            try:
                fault: Exception | None = None
                is_over = False
                while True:
                    while not is_over and len(waiting) < self._ahead:
                        try:
                            batch = next(batches)
                        except StopIteration:
                            is_over = True
                        except Exception as error:  # noqa: BLE001 - raised below, once what precedes it is delivered
                            fault, is_over = error, True
                        else:
                            waiting.append(threads.submit(self._function, batch))
                            del batch  # its memory is reused once the function has let go of it
                    if not waiting:
                        break
                    made = waiting.popleft().result()
                    n_received += 1
                    if self._live is live:
                        self._position = start, n_received
                    yield made
                    del made
                    self._check_live(live)
                if fault is not None:
                    raise fault
            finally:
                for future in waiting:
                    future.cancel()
                waiting.clear()
                if self._live is live:
                    self._live = None
        self._position = None

    def _check_live(self, live: object) -> None:
        if self._live is not live:
            raise PlanError(
                "this iteration was ended by a later iter() or load_state_dict() of its Mapped; only one can run at a "
                "time: open a second loader."
            )
