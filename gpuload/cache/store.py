"""The store: one folder, one remote, a budget; shared by fetchers, epochs and jobs."""

from __future__ import annotations

import logging
import os
import threading
import time
import weakref
from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Self

from gpuload.cache.asking import Settings, Window, get_patiently
from gpuload.cache.catalogue import POLICIES, Catalogue
from gpuload.cache.copies import Copies
from gpuload.cache.fetchers import Fetchers
from gpuload.cache.files import Folders, Local, check_digest, digest_of, repair, stray_names, usable
from gpuload.cache.leases import Lease
from gpuload.cache.order import visiting_order
from gpuload.cache.reading import no_copy
from gpuload.cache.reads import Reads
from gpuload.cache.room import Room
from gpuload.cache.snapshot import Snapshot, settled
from gpuload.checks import check_bool, check_choice, check_int64, check_seconds, check_share, check_whole, parse_nbytes
from gpuload.distributed import rank_and_world_size
from gpuload.errors import BusyError, GpuloadError, PlanError, ReadError, StoreError, first_line, shown
from gpuload.remote import FolderRemote, as_remote
from gpuload.remote.errors import BUSY
from gpuload.threads import MOST_IN_FLIGHT, Closer

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from gpuload.cache.reading import Sample
    from gpuload.remote import Remote

_log = logging.getLogger("gpuload.cache")

_TOLD_S = 10.0
"""Time after which who waits for samples is told why, if anything seems to be in the way."""

_MOST_PROCESSES = 256
"""More than any machine has use for."""


@dataclass(frozen=True, slots=True)
class Coverage:
    """How much of the remote was used for training, and how evenly.

    Attributes
    ----------
    n_known, n_held, n_visited
        Objects that the remote has or that are stored locally; those of them that are stored locally; and those that
        were used at least once.
    n_visits
        Total uses of these objects.
    effective
        Kish's effective sample size of the uses: ``(sum of v)**2 / sum of v**2``; equal to `n_visited` if all were
        used equally often.
    """

    n_known: int
    n_held: int
    n_visited: int
    n_visits: int
    effective: float

    @property
    def unique(self) -> float:
        """Share of the objects that were used at least once."""
        return self.n_visited / self.n_known if self.n_known else 0.0


class SampleStore:
    """Samples of a remote in a local folder, downloaded ahead of training, within a budget.

    Each epoch trains on what is there when it begins, so the set grows from epoch to epoch; once the budget is full,
    used samples make room for unused ones. Any number of processes may open the same folder concurrently. They may
    be killed at any moment, ``kill -9`` included, and restarted. The folder must be on a local disk.

    Parameters
    ----------
    root
        The folder; created if it does not exist.
    remote
        Where samples come from: a `gpuload.remote.Remote`, an address (``s3://bucket/prefix``) or a folder.
    budget
        Limit on bytes on disk, as a number or as ``"200GiB"``. Bytes are reserved before a download starts, so it is
        never exceeded, not even briefly. The catalogue itself is not counted: some 350 bytes per sample, and 16 more
        for each of the last 64 snapshots that had it. All processes that use a folder should give the same, or one
        evicts what another downloads.
    policy
        Which samples go first, among those that were used, that no running epoch has yet to read, and that the remote
        still has: ``"coverage"``, the most used and the oldest; ``"fifo"``; ``"lru"``; ``"random"``.
    min_visits
        Uses of a sample before it may be evicted.
    n_processes
        Fetcher processes, at most 256; 0 fetches in threads of this process.
    in_flight
        Concurrent downloads of each process, at most 1,024; fewer while the remote reports that it is busy. Each has a
        thread and an open file.
    min_free
        Free bytes to leave on the disk, whatever the budget.
    relist_s
        Seconds between listings of the remote, which find new, changed and removed objects; infinity lists it once.
    max_bad
        Share of the remote's objects that may be in quarantine before `snapshot` raises.
    hung_s
        Seconds without any progress after which a fetcher process is killed and replaced.
    fetch
        False opens the store without fetching, for a process that leaves that to another.
    piece_nbytes
        Bytes that are asked for at a time, as a number or as ``"8MiB"``; a download that fails goes on from its last
        piece.
    tries, first_wait_s, longest_wait_s
        How often a busy remote is asked for a piece, and the seconds between: random, up to a bound that doubles from
        the first to the longest.
    max_failures
        Failed downloads after which an object is put in quarantine.

    Raises
    ------
    PlanError
        An option is invalid; or the folder and that of the remote overlap.
    StoreError
        The folder holds samples of another remote, a catalogue of another version, or one that is damaged.
    ReadError
        The folder cannot be created or used: a file has its name, or the system refuses it.
    """

    def __init__(
        self,
        root: str | os.PathLike[str],
        remote: Remote | str | os.PathLike[str],
        budget: int | str = "200GiB",
        policy: str = "coverage",
        *,
        min_visits: int = 1,
        n_processes: int = 1,
        in_flight: int = 16,
        min_free: int | str = "1GiB",
        relist_s: float = 300.0,
        max_bad: float = 0.01,
        hung_s: float = 120.0,
        fetch: bool = True,
        piece_nbytes: int | str = 8 << 20,
        tries: int = 6,
        first_wait_s: float = 0.1,
        longest_wait_s: float = 10.0,
        max_failures: int = 4,
    ) -> None:
        check_choice("policy", policy, POLICIES)
        check_bool("fetch", fetch)
        n_processes = check_whole("n_processes", n_processes, 0, most=_MOST_PROCESSES)
        hung_s = check_seconds("hung_s", hung_s, may_be_0=False)
        self._settings = Settings(
            parse_nbytes("budget", budget, least=0),
            parse_nbytes("min_free", min_free, least=0),
            policy,
            min_visits=check_int64("min_visits", min_visits, 1),
            in_flight=check_whole("in_flight", in_flight, 1, most=MOST_IN_FLIGHT),
            piece_nbytes=parse_nbytes("piece_nbytes", piece_nbytes),
            tries=check_whole("tries", tries, 1),
            first_wait_s=check_seconds("first_wait_s", first_wait_s),
            longest_wait_s=check_seconds("longest_wait_s", longest_wait_s),
            max_failures=check_int64("max_failures", max_failures, 1),
            relist_s=check_seconds("relist_s", relist_s),
        )
        self.remote = as_remote("remote", remote)
        self.root = _checked_root(root)
        self._max_bad = check_share("max_bad", max_bad)
        self._check_apart()
        self._opened_at = time.time()
        self._folders, self._catalogue, self._lease = _opened(self.root)
        self._local = Local(self._folders, self._catalogue, self._lease.name, self._settings)
        self.copies = Copies(self._local)
        """The samples on the local disk."""
        self.reads = Reads()
        """Statistics of reading from the local copies."""
        self.verified: set[int] = set()
        """Files whose crc was verified since the store was opened."""
        self._stop = threading.Event()
        self._window = Window(in_flight)
        self._fetchers = Fetchers(self._local, self.remote)
        self._snapshots: weakref.WeakValueDictionary[int, Snapshot] = weakref.WeakValueDictionary()  # by their pins
        self._waited_s = 0.0
        self._warned: set[str] = set()
        self._may_have_strays = True
        self._closer = Closer(self, _close, self._stop, self._fetchers, self._lease, self._catalogue)
        try:
            self._check_remote()
            with usable(self.root):
                repair(self._local, is_opening=True)
            *_, self._fault_before = self._catalogue.listing_fault() or ("",)
            if fetch:
                self._catalogue.forgive_size(self._settings.budget)
                self._fetchers.start(n_processes, hung_s)
        except BaseException:
            self.close()
            raise

    def _check_apart(self) -> None:
        """Refuse a folder that contains the remote's, or is in it: one would take in the other's files."""
        remote = getattr(self.remote, "remote", self.remote)  # of a `BlockRemote`
        if not isinstance(remote, FolderRemote):
            return
        here, there = os.path.realpath(self.root), os.path.realpath(remote.name)
        if os.path.commonpath((here, there)) in (here, there):
            raise PlanError(
                f"root={self.root!r}: it is the folder of the samples, {remote.name!r}, or one is inside the other; "
                "choose a separate folder."
            )

    def _is_listed(self) -> bool:
        """Return whether the catalogue knows all samples that the remote had at a recent listing."""
        listed_at = float(self._catalogue.meta("listed_at"))
        ago_s = time.time() - listed_at
        if not listed_at or ago_s < 0:  # never, or by a clock that was ahead
            return False
        is_due = self._fetchers.are_started and ago_s >= self._settings.relist_s
        return listed_at >= self._opened_at or not is_due

    def _check_remote(self) -> None:
        name = self.remote.name.encode(errors="backslashreplace").decode()  # of a folder: it need not be UTF-8
        with self._catalogue.transaction() as db:  # of those that open a new store at once, only one names its remote
            known = self._catalogue.meta("remote")
            if known and isinstance(self.remote, FolderRemote):
                known = os.path.abspath(known)
            if known and known != name:
                raise StoreError(
                    f"{self.root}: it holds samples of {known}, not of {name}; use a separate folder for each."
                )
            db.execute("UPDATE meta SET value = ? WHERE name = 'remote'", (name,))

    def close(self) -> None:
        """Close its snapshots, stop fetching and release everything; may be called twice. Downloads are kept.

        In a forked process it does nothing: all of it is its parent's.

        Raises
        ------
        OSError
            The last uses of samples cannot be recorded. Everything is released all the same.
        """
        if not self._catalogue.is_of_this_process:
            return
        with ExitStack() as stack:
            stack.callback(self._closer)
            for found in self._snapshots.valuerefs():  # all at once: another thread may be taking one
                if (snapshot := found()) is not None:
                    stack.callback(snapshot.close)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    # --- epochs ---

    def snapshot(
        self,
        *,
        seed: int = 0,
        mode: str = "uniform",
        n_samples: int | None = None,
        echo_max: int | None = None,
        min_samples: int = 1,
        wait_s: float | None = None,
        rank: int | None = None,
        world_size: int | None = None,
        generation: int | None = None,
        state: dict[str, Any] | None = None,
    ) -> Snapshot:
        """Begin an epoch on the samples that are here now.

        Parameters
        ----------
        seed
            At least 0. The order depends on (seed, generation), the samples of the generation, and how often each had
            been used by then.
        mode
            ``"uniform"``: every sample once, in random order; ``"fresh-first"``: those never used before the others;
            ``"inverse-visits"``: drawn with weights 1 / (1 + uses), without replacement.
        n_samples
            Samples of the epoch, over all ranks, at least one for each; None is all.
        echo_max
            Leave out samples used at least this often before. If none is left, a warning is logged, once.
        min_samples, wait_s
            Wait until this many samples are here, and one for each rank, unless it is 0; at most this many seconds, if
            given. Not with `generation` or `state`.
        rank, world_size
            Each rank gets every world_size-th sample of the order, and the same number of them. Omit both to take them
            from torch.distributed or torchrun, as `open_loader` does.
        generation
            Number of an earlier snapshot, to start it again. Rank 0 takes a snapshot; all other ranks need its number,
            or a state.
        state
            Returned by `Snapshot.state_dict`: resume where it was taken, whatever `seed`, `mode`, `n_samples`,
            `echo_max` and `generation` are given. Samples evicted since are read from the remote.

        Returns
        -------
        Snapshot

        Raises
        ------
        PlanError
            An option is invalid; a generation is no longer kept; or a rank other than 0 has neither `generation` nor
            `state`.
        ReadError
            The wait timed out; the remote has too few samples or cannot be listed; the budget, or the disk without
            `min_free`, will never have room for so many; or too many are in quarantine.
        """
        rank, world_size = rank_and_world_size(rank, world_size)
        given = {"seed": seed, "mode": mode, "n_samples": n_samples, "echo_max": echo_max}
        settings, generation, position = settled(given | {"rank": rank, "world_size": world_size}, generation, state)
        if wait_s is not None:
            check_seconds("wait_s", wait_s)
        if check_int64("min_samples", min_samples, 0):
            min_samples = max(min_samples, world_size)
        pin = -1
        with ExitStack() as undo:  # what fails would leave samples pinned, and the set would never change again
            if generation is None:
                generation, pin, ids, visits = self._take(min_samples, wait_s)
                undo.callback(self._catalogue.unpin, pin)
            else:
                ids, visits = self._catalogue.open_snapshot(generation)
            ids = ids[self._chosen(visits, generation, settings)]
            if position > ids.size:
                raise PlanError(
                    f"state: position={position}: expected at most {ids.size}, the samples of generation {generation}."
                )
            if pin < 0:
                pin = self._catalogue.pin(generation, self._lease.name, ids[position:])
            else:
                self._catalogue.keep_pinned(pin, ids)
            snapshot = Snapshot(self, self._catalogue, generation, pin, ids, settings, position)
            self._snapshots[pin] = snapshot
            undo.pop_all()
        return snapshot

    def _chosen(self, visits: NDArray[np.int64], generation: int, settings: dict[str, Any]) -> NDArray[np.int64]:
        """Return which samples of a generation a rank visits, in order."""
        mode, seed, n_samples, echo_max = (settings[name] for name in ("mode", "seed", "n_samples", "echo_max"))
        rank, world_size = settings["rank"], settings["world_size"]
        chosen = visiting_order(visits, mode, seed, generation, n_samples, echo_max)
        per_rank = chosen.size // world_size
        if not per_rank and visits.size >= world_size:
            self.warn_once(
                f"echo_max={echo_max}: of the {visits.size} samples that are here, {chosen.size} were used less often, "
                f"so an epoch of world_size={world_size} has none; raise it, or wait until others are here."
            )
        return chosen[rank::world_size][:per_rank]

    def _take(self, min_samples: int, wait_s: float | None) -> tuple[int, int, NDArray[np.int64], NDArray[np.int64]]:
        """Wait until so many samples are here; return what `Catalogue.take_snapshot` returns."""
        start = time.monotonic()
        pause_s = 0.01
        room = Room(self._local)
        is_told = False
        while True:
            n_here = self._catalogue.n_ready()
            self._check_quarantine()
            if n_here >= min_samples:
                taken = self._catalogue.take_snapshot(
                    self._lease.name,
                    policy=self._settings.policy,
                    min_visits=self._settings.min_visits,
                    least=min_samples,
                )
                if taken is not None:
                    self._waited_s += time.monotonic() - start
                    return taken
            why = self._hindrance(room, min_samples)
            waited_s = time.monotonic() - start
            if why and waited_s > _TOLD_S and not is_told:
                _log.warning("%s: still waiting for min_samples=%d: %s", self.root, min_samples, why)
                is_told = True
            why = why and f" ({why})"
            if wait_s is not None and waited_s > wait_s:
                raise ReadError(
                    f"wait_s={wait_s}: {n_here} samples are in {self.root} after that time{why}, but "
                    f"min_samples={min_samples}; wait longer, or ask for fewer."
                )
            time.sleep(pause_s)
            pause_s = min(0.2, pause_s * 1.5)

    def _hindrance(self, room: Room, min_samples: int) -> str:
        """Return why samples may be late, or nothing; raise ReadError if so many will never come."""
        is_listed = self._is_listed()  # before counting: a listing may end in between
        n_known = self._catalogue.n_known()
        if is_listed and n_known < min_samples:
            raise ReadError(
                f"min_samples={min_samples}: {self.remote.name} has only {n_known} samples that can be fetched; use "
                "fewer."
            )
        self._fetchers.check()
        fault, may_pass, _ = self._catalogue.listing_fault(self._fault_before) or ("", True, "")
        if not may_pass:
            raise ReadError(
                f"no sample can arrive, because the remote cannot be listed: {fault.rstrip('.')}. Fix that, and open "
                "the store again."
            )
        lacks_room = room.check(min_samples, is_listed=is_listed) if self._fetchers.are_started else ""
        return lacks_room or (f"the remote could not be listed: {fault.rstrip('.')}" if fault else "")

    def _check_quarantine(self) -> None:
        n_bad, n_all = self._catalogue.n_bad()
        if n_bad and n_bad > self._max_bad * n_all:
            some = self._catalogue.rows(
                "SELECT key, fault FROM keys WHERE fault IS NOT NULL AND NOT is_gone ORDER BY key LIMIT 3"
            )
            reasons = "; ".join(f"{key}: {fault.rstrip('.')}" for key, fault in some)
            raise ReadError(
                f"{self.remote.name}: {n_bad} of {n_all} samples cannot be fetched, more than "
                f"max_bad={self._max_bad:g}: {reasons}. Fix these, or allow more."
            )

    # --- what an epoch asks of its store ---

    def drop_strays(self) -> None:
        """Remove copies without a row, as after the loss of the catalogue, if no process lists and would adopt them.

        It looks for them only the first time: each file of a data set may ask.
        """
        if self._may_have_strays and not self._fetchers.are_started and not self._catalogue.meta("listing"):
            self._may_have_strays = False
            with usable(self.root):
                for name in stray_names(self._local):
                    self._folders.remove(name)

    def fetch_whole(self, sample: Sample) -> Any:
        """Return a sample's bytes from the remote, verified.

        Raises
        ------
        ReadError, CorruptDataError
            It cannot provide them.
        PlanError
            The store was closed meanwhile.
        """
        try:
            return self._fetch_whole(sample)
        except (GpuloadError, MemoryError) as error:
            if self._stop.is_set():  # no fault of the sample
                raise PlanError("the sample store was closed; open it again.") from error
            raise
        except BUSY as error:  # a remote may be anybody's
            raise BusyError(
                f"{self.remote.name}/{sample.key}: it cannot be read now: {first_line(error)} "
                f"({type(error).__name__}). Try again later."
            ) from error
        except Exception as error:
            raise ReadError(
                f"{self.remote.name}/{sample.key}: it cannot be read: {first_line(error)} ({type(error).__name__}). "
                "Check the remote."
            ) from error

    def _fetch_whole(self, sample: Sample) -> Any:
        patience = self._settings.patience
        found = patience.ask(lambda: self.remote.head(sample.key), self._stop)
        if found is None or found.etag != sample.etag:
            raise no_copy(sample, self.remote.name)
        whole = get_patiently(self.remote, found, (0, found.nbytes), patience, self._stop, self._window)
        if not found.digest.startswith("md5?"):
            digest = digest_of(found)
            if digest is not None:
                digest.update(whole)
            check_digest(found, digest)
        self.reads.add_remote()
        return whole

    def warn_once(self, message: str) -> None:
        """Log a warning about an argument, the first time that there is one about it; of others, each once."""
        name = message.partition("=")[0]
        if name not in self._warned:
            self._warned.add(name)
            _log.warning("%s: %s", self.root, message)

    def quarantine_sample(self, sample: Sample, reason: str, *, may_pass: bool = False) -> None:
        """Put a sample in quarantine; if its fault may pass, only after as many as a download may have."""
        most = self._settings.max_failures if may_pass else 1
        self._catalogue.fail(sample.key_id, sample.etag, reason, time.time(), most)

    # --- what it says of itself ---

    def quarantine(self) -> dict[str, str]:
        """Return the samples in quarantine, by key, with the reason."""
        return dict(self._catalogue.rows("SELECT key, fault FROM keys WHERE fault IS NOT NULL ORDER BY key"))

    def release_quarantine(self) -> None:
        """Release the samples in quarantine for another try."""
        with self._catalogue.transaction() as db:
            db.execute(
                "UPDATE keys SET fault = NULL, is_too_large = 0, n_failed = 0, retry_at = 0 WHERE fault IS NOT NULL"
            )

    def coverage(self) -> Coverage:
        """Return how much of the remote was used for training."""
        n, held, visited, total, squares = self._catalogue.rows(
            "SELECT count(*), sum(is_held), sum(visits > 0), sum(visits), sum(visits * visits) FROM keys"
            " WHERE is_held OR NOT is_gone"
        )[0]
        return Coverage(n, held or 0, visited or 0, total or 0, total**2 / squares if squares else 0.0)

    @property
    def held_nbytes(self) -> int:
        """Bytes on disk and reserved, in whole disk blocks: never above the budget."""
        return self._catalogue.held_nbytes

    def stats(self) -> dict[str, Any]:
        """Return bytes, counts and waits so far: of the store over all processes, and of this process's reading."""
        meta = dict(self._catalogue.rows("SELECT name, value FROM meta"))
        names = (
            "held_nbytes",
            "fetched_nbytes",
            "evicted_nbytes",
            "n_fetched",
            "n_evicted",
            "n_disk_full",
            "generation",
        )
        processes = self._fetchers.processes
        return {
            **{name: meta[name] for name in names},
            "n_in_flight": self._catalogue.rows("SELECT count(*) FROM files WHERE state = 0")[0][0],
            "n_quarantined": len(self.quarantine()),
            "n_fetchers_killed": sum(process.n_killed for process in processes),
            "n_fetchers_died": sum(process.n_died for process in processes),
            "snapshot_wait_s": self._waited_s,
            **self.reads.as_dict(),
        }

    def verdict(self) -> str:
        """Return one line naming the stage that holds training up."""
        return self.reads.verdict(self._waited_s)


def _checked_root(root: object) -> str:
    """Return the absolute path of a store's folder; raise PlanError if it cannot be one on this machine."""
    path = os.fspath(root) if isinstance(root, (str, os.PathLike)) else None
    if not isinstance(path, str) or not path or path.startswith("~") or "://" in path or "\0" in path:
        raise PlanError(
            f"root={shown(root)}: expected the path of a local folder, as text; pass one such as '/local/samples' "
            "('~' is not expanded)."
        )
    return os.path.abspath(path)


def _opened(root: str) -> tuple[Folders, Catalogue, Lease]:
    with usable(root):
        folders = Folders(root)
        catalogue = Catalogue(folders.catalogue)
        try:
            return folders, catalogue, Lease(folders.leases)
        except BaseException:
            catalogue.close()
            raise


def _close(stop: threading.Event, fetchers: Fetchers, lease: Lease, catalogue: Catalogue) -> None:
    with ExitStack() as each:  # also what follows one that is interrupted, for this is called once
        each.callback(lease.release)
        each.callback(catalogue.close)
        each.callback(fetchers.close)
        stop.set()
