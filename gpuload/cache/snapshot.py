"""An epoch: the samples present when it began, in its own order, protected from eviction until used."""

from __future__ import annotations

import threading
from collections import deque
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any, Self

from gpuload.cache.order import MODES
from gpuload.cache.reading import Sample, SampleReader, assemble, check_reading
from gpuload.checks import check_bool, check_choice, check_int64, check_seed, check_share, check_whole, is_whole
from gpuload.errors import BusyError, CorruptDataError, PlanError, ReadError, StoreError
from gpuload.threads import PATIENCE_S, DaemonThreads, OneAtATime

if TYPE_CHECKING:
    from collections.abc import Generator, Iterator

    import numpy as np
    from numpy.typing import NDArray

    from gpuload.cache.catalogue import Catalogue
    from gpuload.cache.reading import Decode, SampleBatch
    from gpuload.cache.store import SampleStore

_NOTE_S = 0.05
"""Interval at which uses are written to the catalogue."""

_CLOSED = "the snapshot was closed; take another with store.snapshot()."


class Snapshot:
    """The samples of one epoch. Made by `SampleStore.snapshot`; iterate once, over `batches`.

    Samples still to be read are protected from eviction; those returned may go. Use it in a with-statement, or call
    `close`; otherwise they are protected until the store is closed.

    Parameters
    ----------
    store, catalogue
        The store, and its catalogue.
    generation, pin
        Its number, and the pin that protects its files.
    ids : (n,) int64
        The files that this rank visits, in order.
    settings
        What determines the order, for the state.
    position
        Samples returned before.
    """

    def __init__(
        self,
        store: SampleStore,
        catalogue: Catalogue,
        generation: int,
        pin: int,
        ids: NDArray[np.int64],
        settings: dict[str, Any],
        position: int,
    ) -> None:
        self._store, self._catalogue, self._pin, self._ids, self._settings = store, catalogue, pin, ids, settings
        self.generation = generation
        self.position = position
        """Samples returned."""
        self.n_skipped = 0
        """Samples skipped because they could not be read."""
        self._n_begun = 0  # iterations: a later one ends those before it
        self._used: list[int] = []
        self._lock = threading.RLock()  # a signal's handler may close the store
        self._noting = threading.Lock()  # held while uses are written, so that `close` waits for them
        self._closing = threading.RLock()
        self._is_closed = False

    def __len__(self) -> int:
        """Samples of this epoch on this rank."""
        return int(self._ids.size)

    def state_dict(self) -> dict[str, Any]:
        """Return what `SampleStore.snapshot(state=...)` needs to resume after the last batch: numbers and strings."""
        return {"generation": self.generation, "position": self.position, **self._settings}

    def batches(
        self,
        batch_size: int,
        *,
        decode: Decode = "npy",
        drop_last: bool = False,
        prefetch: int = 2,
        num_threads: int = 4,
        verify: str = "once",
        on_error: str = "raise",
        max_skipped: float = 0.01,
    ) -> Iterator[SampleBatch]:
        """Yield the remaining samples as batches, in order; after an early ``break``, those after the last returned.

        Parameters
        ----------
        batch_size
            Samples per batch.
        decode
            ``"npy"``: all samples have one shape and dtype, and a batch is one array; ``"bytes"``: a list of uint8
            arrays; or a function from a uint8 array to anything, called in a reader thread, for a list of its results.
        drop_last
            Drop the last batch if it is incomplete. If it is the only one, a warning is logged, once.
        prefetch
            Batches read ahead: they and the consumer's bound the memory held.
        num_threads
            Reader threads.
        verify
            When a file's crc is checked: ``"once"`` after the store was opened, ``"always"`` or ``"never"``.
        on_error
            How to treat a sample that neither its copy nor the remote can provide, or whose bytes `decode` refuses:
            ``"raise"``, or ``"skip"``, which quarantines it and makes its batch smaller; a batch of which nothing is
            left is left out. Because the remote is busy, it quarantines none before the store's `max_failures`.
            A function refuses bytes by any error but those of a program or of the system, which are raised:
            MemoryError, ImportError, NameError, AttributeError, TypeError, KeyError, IndexError, NotImplementedError,
            RecursionError, an OSError with a number, and PlanError.
        max_skipped
            Share of the samples that may be skipped before an error is raised anyway.

        Yields
        ------
        SampleBatch

        Raises
        ------
        PlanError
            An option is invalid; or the iteration was ended by a later one, or by `close`.
        ReadError, CorruptDataError
            A sample cannot be read or decoded; raised after the batches before it.
        """
        check_reading(decode, verify, on_error)
        check_bool("drop_last", drop_last)
        batch_size, prefetch = check_whole("batch_size", batch_size, 1), check_whole("prefetch", prefetch, 1)
        num_threads, max_skipped = check_whole("num_threads", num_threads, 1), check_share("max_skipped", max_skipped)
        if self._is_closed:
            raise PlanError(_CLOSED)
        reader = SampleReader(
            decode, verify, self._store.fetch_whole, self._store.copies.drop, prefetch + 1, self._store.verified
        )
        if drop_last and self.position < len(self) < batch_size:
            least = batch_size * self._settings["world_size"]
            self._store.warn_once(
                f"drop_last=True: the epoch's {len(self)} samples are too few for a batch of {batch_size}, so there is "
                f"none; use min_samples={least}, a smaller batch_size, or drop_last=False."
            )
        last = len(self) - batch_size if drop_last else len(self) - 1
        limit = max(1, int(max_skipped * len(self))) if on_error == "skip" else 0
        batches = self._run(reader, last, batch_size, prefetch, num_threads, limit)
        return OneAtATime(batches, "snapshot", "take another snapshot, with generation= for the same samples")

    def _run(
        self, reader: SampleReader, last: int, batch_size: int, prefetch: int, num_threads: int, limit: int
    ) -> Generator[SampleBatch, None, None]:
        """Yield the batches that begin between the position and `last`."""
        with self._lock:
            self._n_begun += 1
            number_of_this, position = self._n_begun, self.position
        stats = self._store.reads
        pending: deque[_PendingBatch] = deque()
        left = iter(range(position, last + 1, batch_size))
        # One thread looks up and allocates, which spares the consumer's thread both; the others read.
        planner, readers = DaemonThreads(1, "gpuload-plan"), DaemonThreads(num_threads, "gpuload-read")
        is_over = threading.Event()
        clerk = threading.Thread(target=self._note_uses, args=(is_over,), name="gpuload-uses", daemon=True)
        try:
            clerk.start()
            while True:
                self._catalogue.check_process()
                while len(pending) < prefetch + 1 and (start := next(left, None)) is not None:
                    ids = self._ids[start : start + batch_size]
                    pending.append(_PendingBatch(planner.submit(self._begin, reader, readers, ids)))
                if not pending:
                    return
                if self._is_closed:  # what is left is no longer protected
                    raise PlanError(_CLOSED)
                self._check_latest(number_of_this)
                with stats.waiting():
                    batch, samples, outcomes = pending[0].result()
                pending.popleft()
                ready = self._checked(batch, samples, outcomes, limit)
                self._hand_over(samples, number_of_this)
                del batch, outcomes
                if len(ready):
                    yield ready
                del ready
        finally:
            if self._catalogue.is_of_this_process:  # a fork has none of the threads, and may find their locks locked
                for one in pending:
                    one.cancel()
                is_over.set()
                planner.close(PATIENCE_S / 2)
                readers.close(PATIENCE_S / 2)
                # It is this thread, if the garbage collector ends this in that one.
                if clerk.is_alive() and clerk is not threading.current_thread():
                    clerk.join(PATIENCE_S)
                stats.peak_nbytes = max(stats.peak_nbytes, reader.peak_nbytes)

    def _begin(
        self, reader: SampleReader, readers: DaemonThreads, ids: NDArray[np.int64]
    ) -> tuple[NDArray[Any] | None, list[Sample], list[Future[Any]]]:
        samples = self._store.copies.samples(ids)
        faults = reader.find_form(samples)
        if faults:
            return None, samples, [_failed(fault) for fault in faults]
        batch = reader.new_batch(len(samples))
        return batch, samples, [readers.submit(reader.read, sample, batch, i) for i, sample in enumerate(samples)]

    def _checked(
        self, batch: NDArray[Any] | None, samples: list[Sample], outcomes: list[Any], limit: int
    ) -> SampleBatch:
        """Return a batch without the unreadable samples; raise if there are too many."""
        kept, decoded = [], []
        for i, outcome in enumerate(outcomes):
            decoded.append(None if isinstance(outcome, Exception) else outcome[0])
            if not isinstance(outcome, Exception):
                kept.append(i)
                self._store.reads.add(outcome[1], samples[i].nbytes)
                continue
            if self.n_skipped >= limit or not isinstance(outcome, (ReadError, CorruptDataError)):
                raise outcome
            self.n_skipped += 1
            self._store.quarantine_sample(samples[i], str(outcome), may_pass=isinstance(outcome, BusyError))
        return assemble(batch, decoded, [sample.key for sample in samples], kept)

    def _check_latest(self, number: int) -> None:
        """Raise PlanError if an iteration is no longer the latest."""
        if self._n_begun != number:
            raise PlanError(
                "this iteration was ended by a later batches() of its snapshot; only one can run at a time: take "
                "another snapshot, with generation= for the same samples."
            )

    def _hand_over(self, samples: list[Sample], number: int) -> None:
        used = [sample.key_id for sample in samples]
        with self._lock:
            self._check_latest(number)  # again: another thread may have begun one while this one waited
            self.position += len(used)
            self._used.extend(used)

    def _note_uses(self, is_over: threading.Event) -> None:
        """Write uses to the catalogue until an iteration is over, or the store is closed."""
        is_last = False
        while not is_last:
            is_last = is_over.wait(_NOTE_S)
            try:
                self.flush()
            except (PlanError, StoreError):  # the store is closed, or the catalogue is broken, which `close` tells
                return
            except OSError:  # a busy catalogue or a full disk: a later call will succeed
                pass

    def flush(self) -> None:
        """Write the uses so far to the catalogue, which makes the samples evictable."""
        self._catalogue.check_process()
        with self._noting:
            with self._lock:
                used, self._used = self._used, []
            if not used:
                return
            try:
                self._catalogue.visited(self._pin, used)
            except BaseException:
                with self._lock:
                    self._used = used + self._used
                raise

    def close(self) -> None:
        """Release the unread samples; may be called twice. In a forked process it does nothing."""
        if not self._catalogue.is_of_this_process:
            return
        with self._closing:  # who closes the store meanwhile waits, else the last uses could not be written
            if not self._is_closed:
                self._is_closed = True
                try:
                    self.flush()
                finally:
                    self._catalogue.unpin(self._pin)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()


def _failed(fault: Exception) -> Future[Any]:
    future: Future[Any] = Future()
    future.set_exception(fault)
    return future


class _PendingBatch:
    """A batch in progress: first looked up, then read."""

    def __init__(self, begun: Future[tuple[NDArray[Any] | None, list[Sample], list[Future[Any]]]]) -> None:
        self._begun = begun

    def result(self) -> tuple[NDArray[Any] | None, list[Sample], list[Any]]:
        """Return the batch's memory, its samples, and each one's result or error."""
        batch, samples, futures = self._begun.result()
        outcomes: list[Any] = []
        for future in futures:
            error = future.exception()
            if error is not None and not isinstance(error, Exception):
                raise error
            outcomes.append(error or future.result())
        return batch, samples, outcomes

    def cancel(self) -> None:
        """Cancel whatever has not started."""
        if not self._begun.cancel() and self._begun.done() and self._begun.exception() is None:
            for future in self._begun.result()[2]:
                future.cancel()


def settled(
    given: dict[str, Any], generation: int | None, state: dict[str, Any] | None
) -> tuple[dict[str, Any], int | None, int]:
    """Return what determines an order, the generation and the position: those of a state, if there is one.

    Raises
    ------
    PlanError
        One of them is invalid.
    """
    settings, position = given, 0
    if state is not None:
        _check_state(given, state)
        settings = given | {name: state[name] for name in ("seed", "mode", "n_samples", "echo_max")}
        generation, position = state["generation"], int(state["position"])
    if state is not None or generation is not None:
        generation = check_int64("generation", generation, 0)
    check_choice("mode", settings["mode"], MODES)
    check_seed(settings["seed"])
    for name in ("n_samples", "echo_max"):
        if settings[name] is not None:
            check_whole(name, settings[name], 1)
    n_samples, rank, world_size = (settings[name] for name in ("n_samples", "rank", "world_size"))
    if n_samples is not None and n_samples < world_size:
        raise PlanError(
            f"n_samples={n_samples}: there are world_size={world_size} ranks, and each needs a sample; use at least as "
            "many."
        )
    if rank and generation is None:
        raise PlanError(
            f"rank={rank}, world_size={world_size}: without generation, this rank would take another snapshot than "
            "rank 0; pass generation=, the number of the one that rank 0 took."
        )
    return settings, generation, position


def _check_state(settings: dict[str, Any], given: Any) -> None:
    """Raise PlanError if a state is incomplete, has another number of ranks, or an invalid position."""
    needed = {*settings, "generation", "position"} - {"rank"}
    if not isinstance(given, dict) or not needed <= given.keys():
        found = f"a dict with {sorted(map(str, given))}" if isinstance(given, dict) else type(given).__name__
        raise PlanError(f"state: expected what a snapshot's state_dict() returns, got {found}.")
    if given["world_size"] != settings["world_size"]:
        raise PlanError(
            f"state: it is of world_size={given['world_size']}, but this is {settings['world_size']}; take a new "
            "snapshot to continue with another number of ranks."
        )
    if not is_whole(given["position"], 0):
        raise PlanError(f"state: position={given['position']!r}; expected a number of samples.")
