"""The contents of a store, as rows: every change is one transaction, so work can resume from any moment.

The catalogue does not touch the disk: whoever changes files updates it before and after, in the order that `files`
defines. Several processes may have it open; SQLite's lock serialises them.
"""

from __future__ import annotations

import json
import secrets
import time
from dataclasses import dataclass
from hashlib import blake2b
from typing import TYPE_CHECKING, Any

import numpy as np

from gpuload.cache.database import Database
from gpuload.errors import PlanError
from gpuload.remote import RemoteObject

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from sqlite3 import Connection

    from numpy.typing import NDArray

RESERVED, PUBLISHED, LEAVING, GONE = range(4)
"""States of a file. Statements have them as bare numbers: SQLite takes a partial index for no bound parameter."""

KEPT_GENERATIONS = 64
"""Snapshots that can be restarted, besides those in use."""

_BLOCK = 4096
_WANTED_S = 5.0
"""How long a request for room is valid; whoever still waits repeats it."""

_SHARE_TO_GO = 8
"""An epoch leaves out at most one in this many samples, to make room for others."""

POLICIES = {
    "coverage": "k.visits * (:now - f.published_at) DESC",
    "fifo": "f.id",
    "lru": "f.used_at",
    "random": "random()",
}
"""Sort key of evictable files, the first to go first."""


@dataclass(frozen=True, slots=True)
class File:
    """A local copy: its row, its object, its name in the store, its size in whole disk blocks."""

    id: int
    key_id: int
    wanted: RemoteObject
    name: str
    cost: int


@dataclass(frozen=True, slots=True)
class Full:
    """There is no room: so many bytes must be evicted first."""

    nbytes: int


def cost_of(nbytes: int) -> int:
    """Return the bytes that a file occupies on disk."""
    return -(-nbytes // _BLOCK) * _BLOCK


class Catalogue(Database):
    """The rows of a store."""

    # --- what the remote has ---

    def begin_listing(self, lease: str, relist_s: float, is_alive: Callable[[str], bool]) -> int:
        """Return the number of a new listing, or 0 if none is due or another process is at it."""
        now = time.time()
        with self.transaction() as db:
            listed_at, holder = self.meta("listed_at"), self.meta("listing_lease")
            if listed_at and 0 <= now - listed_at < relist_s:  # the last one may be by a clock that was ahead
                return 0
            if holder not in ("", lease) and is_alive(holder):
                return 0
            number = int(self.meta("listing")) + 1
            db.executemany("UPDATE meta SET value = ? WHERE name = ?", [(number, "listing"), (lease, "listing_lease")])
            return number

    def add_listed(self, number: int, found: Sequence[RemoteObject]) -> None:
        """Record objects found by a listing. One whose content changed is cleared of its failures.

        A later listing may have found one already; it stays that one's, else the end of that would call it gone.
        """
        with self.transaction() as db:
            db.executemany(
                "INSERT INTO keys (key, etag, nbytes, digest, place, listing) VALUES (?, ?, ?, ?, ?, ?)"
                " ON CONFLICT (key) DO UPDATE SET"
                " fault = CASE WHEN etag = excluded.etag THEN fault END,"
                " is_too_large = etag = excluded.etag AND is_too_large,"
                " n_failed = CASE WHEN etag = excluded.etag THEN n_failed ELSE 0 END,"
                " etag = excluded.etag, nbytes = excluded.nbytes, digest = excluded.digest,"
                " listing = max(listing, excluded.listing), is_gone = 0",
                [(o.key, o.etag, o.nbytes, o.digest, _place(o.key), number) for o in found],
            )

    def end_listing(self, number: int, *, is_whole: bool) -> None:
        """End a listing; if it was complete, objects that it did not find are gone from the remote."""
        with self.transaction() as db:
            if is_whole:
                db.execute("UPDATE keys SET is_gone = 1 WHERE listing < ?", (number,))
                db.execute("UPDATE meta SET value = ? WHERE name = 'listed_at'", (time.time(),))
            db.execute("UPDATE meta SET value = '' WHERE name = 'listing_lease'")

    def note_listing_fault(self, fault: str, *, may_pass: bool) -> None:
        """Record why the remote could not be listed, and whether that may pass."""
        self.set_meta(listing_fault=json.dumps([secrets.token_hex(8), may_pass, fault]))

    def listing_fault(self, before: str = "") -> tuple[str, bool, str] | None:
        """Return why the remote was never listed, whether that may pass, and what tells this failure from others.

        Return None if nothing has failed since the one `before`.
        """
        meta = dict(self.rows("SELECT name, value FROM meta WHERE name IN ('listed_at', 'listing_fault')"))
        if meta["listed_at"] or "listing_fault" not in meta:
            return None
        which, may_pass, fault = json.loads(meta["listing_fault"])
        return None if which == before else (fault, may_pass, which)

    # --- downloads ---

    def reserve(self, lease: str, budget: int) -> File | Full | None:
        """Reserve the next object to download; or return what must be evicted first; or None: nothing to do."""
        with self.transaction() as db:
            row = self._next(db)
            if row is None:
                above = self.held_nbytes - budget  # of a store that had a larger one before
                return Full(above) if above > 0 else None
            key_id, wanted = row[0], RemoteObject(*row[1:])
            cost = cost_of(wanted.nbytes)
            if cost > budget:
                fault = f"it takes {cost} bytes, whole blocks of the disk, but the whole budget is {budget}"
                db.execute("UPDATE keys SET fault = ?, is_too_large = 1 WHERE id = ?", (fault, key_id))
                return Full(0)
            lacking = self.held_nbytes + cost - budget
            return Full(lacking) if lacking > 0 else self._insert(db, key_id, wanted, name_of(wanted), lease)

    def reserve_known(self, wanted: RemoteObject, lease: str, budget: int) -> File | None:
        """Reserve the bytes for an object at hand; None if it is already here, or there is no room."""
        with self.transaction() as db:
            if self.held_nbytes + cost_of(wanted.nbytes) > budget:
                return None
            db.execute(
                "INSERT INTO keys (key, etag, nbytes, digest, place, listing)"
                " VALUES (?, ?, ?, ?, ?, (SELECT value FROM meta WHERE name = 'listing'))"
                " ON CONFLICT (key) DO UPDATE SET etag = excluded.etag, nbytes = excluded.nbytes,"
                " listing = excluded.listing, is_gone = 0",
                (wanted.key, wanted.etag, wanted.nbytes, wanted.digest, _place(wanted.key)),
            )
            (key_id,) = db.execute("SELECT id FROM keys WHERE key = ?", (wanted.key,)).fetchone()
            return self._insert(db, key_id, wanted, name_of(wanted), lease)

    def publish(self, file: File, lease: str, crc: int, *, is_fetched: bool = True) -> bool:
        """Publish a reserved file; return False if the reservation no longer belongs to this lease."""
        with self.transaction() as db:
            changed = db.execute(
                "UPDATE files SET state = 1, lease = NULL, crc = ?, published_at = ?"
                " WHERE id = ? AND state = 0 AND lease = ?",
                (crc, time.time(), file.id, lease),
            ).rowcount
            if changed:
                db.execute("UPDATE keys SET n_fetched = n_fetched + 1, n_failed = 0 WHERE id = ?", (file.key_id,))
                if is_fetched:
                    self._count(db, n_fetched=1, fetched_nbytes=file.wanted.nbytes)
            return bool(changed)

    def give_up(self, file: File, lease: str) -> None:
        """Cancel a reservation; its bytes are free again."""
        with self.transaction() as db:
            db.execute("UPDATE files SET state = 3 WHERE id = ? AND state = 0 AND lease = ?", (file.id, lease))
            db.execute("DELETE FROM files WHERE id = ? AND state = 3", (file.id,))

    def fail(self, key_id: int, etag: str, reason: str, retry_at: float, max_failures: int) -> bool:
        """Record a failed download; return whether the object is now in quarantine: not if its content is other now."""
        of = {"id": key_id, "etag": etag, "reason": reason, "at": retry_at, "most": max_failures}
        with self.transaction() as db:
            db.execute("UPDATE keys SET n_failed = n_failed + 1, retry_at = :at WHERE id = :id AND etag = :etag", of)
            changed = db.execute(
                "UPDATE keys SET fault = :reason, is_too_large = 0"
                " WHERE id = :id AND etag = :etag AND n_failed >= :most",
                of,
            )
            return bool(changed.rowcount)

    def note_gone(self, key_id: int) -> None:
        """Record that the remote no longer has an object."""
        with self.transaction() as db:
            db.execute("UPDATE keys SET is_gone = 1 WHERE id = ?", (key_id,))

    def count(self, **amounts: int) -> None:
        """Add to counters of the store."""
        with self.transaction() as db:
            self._count(db, **amounts)

    # --- eviction ---

    def ask_for_room(self, nbytes: int) -> None:
        """Record that downloads wait for so many bytes, while all files are pinned."""
        self.set_meta(wanted_nbytes=nbytes, wanted_at=time.time())

    def may_go(self, policy: str, min_visits: int, most: int, *, is_soon: bool = False) -> list[int]:
        """Return the numbers of evictable files, the first to go first. Those of outdated content come before all.

        With `is_soon`, include those that become evictable once running epochs have read them.
        """
        with self._held() as db:
            found = db.execute(
                "SELECT f.id FROM files f JOIN keys k ON k.id = f.key_id WHERE f.state = 1 AND NOT k.is_gone"  # noqa: S608
                " AND (f.visits >= :visits OR f.etag != k.etag)"
                " AND (:is_soon OR NOT EXISTS (SELECT 1 FROM pinned p WHERE p.key_id = f.key_id))"
                f" ORDER BY f.etag = k.etag, {POLICIES[policy]} LIMIT :most",
                {"visits": min_visits, "now": time.time(), "most": most, "is_soon": is_soon},
            )
            return [row[0] for row in found]

    def outdated(self) -> list[int]:
        """Return the numbers of files whose object now has other content in the remote."""
        query = "SELECT f.id FROM files f JOIN keys k ON k.id = f.key_id WHERE f.state = 1 AND f.etag != k.etag"
        return [row[0] for row in self.rows(query)]

    def other_copies(self, first: str, stop: str, etag: str) -> list[tuple[int, str]]:
        """Return the numbers and keys of the files with another ETag, of the keys from `first` to before `stop`."""
        return self.rows(_OTHERS, first, stop, etag)

    def take_leaving(self, file_id: int, lease: str, *, is_damaged: bool = False) -> File | None:
        """Hide a file, so that it may be removed; None if it may no longer go. A damaged one may, whoever needs it."""
        with self.transaction() as db:
            changed = db.execute(
                "UPDATE files SET state = 2, lease = ? WHERE id = ? AND state = 1"
                " AND (? OR NOT EXISTS (SELECT 1 FROM pinned p WHERE p.key_id = files.key_id)"
                " AND NOT (SELECT is_gone FROM keys k WHERE k.id = files.key_id))",
                (lease, file_id, is_damaged),
            ).rowcount
            return self._files(db, "f.id = ?", file_id)[0] if changed else None

    def put_back(self, file: File, lease: str, *, is_gone: bool) -> None:
        """Publish a file again that was leaving; for good if its object is gone from the remote."""
        with self.transaction() as db:
            changed = db.execute(
                "UPDATE files SET state = 1, lease = NULL WHERE id = ? AND state = 2 AND lease = ?", (file.id, lease)
            ).rowcount
            if changed and is_gone:
                db.execute("UPDATE keys SET is_gone = 1 WHERE id = ?", (file.key_id,))

    def let_go(self, file: File, *, is_evicted: bool = True) -> None:
        """Record that a file is gone from disk; its bytes are free again."""
        with self.transaction() as db:
            changed = db.execute(
                "UPDATE files SET state = 3, lease = NULL,"
                " died = (SELECT value FROM meta WHERE name = 'generation') WHERE id = ? AND state < 3",
                (file.id,),
            ).rowcount
            if changed and is_evicted:
                self._count(db, n_evicted=1, evicted_nbytes=file.wanted.nbytes)

    # --- epochs ---

    def take_snapshot(
        self, lease: str, *, policy: str = "coverage", min_visits: int = 1, least: int = 1
    ) -> tuple[int, int, NDArray[np.int64], NDArray[np.int64]] | None:
        """Pin the files that are there, as a new generation: return its number, its pin, file numbers and visits.

        Return None if there are fewer than `least`: some may have gone since they were counted.

        While downloads wait for room, the next files to go are left out, but no more than a share of all, and so few
        that at least `least` stay: if every epoch pinned everything before a fetcher could remove any of it, nothing
        new would ever arrive.
        """
        with self.transaction() as db:
            found = db.execute(
                "SELECT f.id, k.visits, f.cost FROM files f JOIN keys k ON k.id = f.key_id"
                " WHERE f.state = 1 AND f.etag = k.etag AND k.fault IS NULL ORDER BY f.id"
            ).fetchall()
            if len(found) < least:
                return None
            leaving = self._to_go(db, policy, min_visits, {row[0]: row[2] for row in found}, least)
            found = [row for row in found if row[0] not in leaving]
            ids, visits = (np.array([row[i] for row in found], dtype=np.int64) for i in (0, 1))
            generation = db.execute(
                "UPDATE meta SET value = value + 1 WHERE name = 'generation' RETURNING value"
            ).fetchone()[0]
            blobs = ids.astype("<i8").tobytes(), visits.astype("<i8").tobytes()
            db.execute("INSERT INTO snapshots VALUES (?, ?, ?, ?)", (generation, time.time(), *blobs))
            pin = self._pin(db, generation, lease, ids)
            oldest = generation - KEPT_GENERATIONS
            db.execute(
                "DELETE FROM snapshots WHERE generation <= ? AND generation NOT IN (SELECT generation FROM pins)",
                (oldest,),
            )
            db.execute(
                "DELETE FROM files WHERE state = 3 AND (died IS NULL OR died < (SELECT min(generation) FROM snapshots))"
            )
            return generation, pin, ids, visits

    def _to_go(self, db: Connection, policy: str, min_visits: int, cost: dict[int, int], least: int) -> set[int]:
        """Return which of some files, given with their cost, are to make room: the same ones until they are gone."""
        if not self.wants_room():
            return set()
        meta = dict(db.execute("SELECT name, value FROM meta WHERE name IN ('wanted_nbytes', 'to_go')"))
        most = min(max(1, len(cost) // _SHARE_TO_GO), len(cost) - least)
        able = [i for i in self.may_go(policy, min_visits, len(cost), is_soon=True) if i in cost]
        before = set(json.loads(meta.get("to_go", "[]")))
        chosen = sorted(able, key=lambda i: i not in before)
        nbytes = np.cumsum([0, *(cost[i] for i in chosen)])
        chosen = chosen[: min(max(0, most), int(np.searchsorted(nbytes, meta["wanted_nbytes"])))]
        db.execute("INSERT OR REPLACE INTO meta VALUES ('to_go', ?)", (json.dumps(chosen),))
        return set(chosen)

    def open_snapshot(self, generation: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return the file numbers and visits of an earlier generation."""
        found = self.rows("SELECT ids, visits FROM snapshots WHERE generation = ?", generation)
        if not found:
            raise self._not_kept(generation)
        ids, visits = (np.frombuffer(blob, dtype="<i8").astype(np.int64) for blob in found[0])
        return ids, visits

    def pin(self, generation: int, lease: str, ids: NDArray[np.int64]) -> int:
        """Protect the objects of some files from eviction; return the number of the pin."""
        with self.transaction() as db:
            if not db.execute("SELECT 1 FROM snapshots WHERE generation = ?", (generation,)).fetchone():
                raise self._not_kept(generation)  # another process took one since this was opened; rows may be gone
            return self._pin(db, generation, lease, ids)

    def _not_kept(self, generation: int) -> PlanError:
        """Return the error for a generation that is too long ago, or of another store."""
        return PlanError(
            f"generation {generation} is no longer kept in {self.path} (the last is {self.meta('generation')}); start "
            "with a new snapshot."
        )

    @staticmethod
    def _pin(db: Connection, generation: int, lease: str, ids: NDArray[np.int64]) -> int:
        cursor = db.execute("INSERT INTO pins (generation, lease) VALUES (?, ?)", (generation, lease))
        pin = int(cursor.lastrowid or 0)
        Catalogue._add_pinned(db, pin, ids)
        return pin

    @staticmethod
    def _add_pinned(db: Connection, pin: int, ids: NDArray[np.int64]) -> None:
        db.executemany(
            "INSERT OR IGNORE INTO pinned SELECT key_id, ? FROM files WHERE id = ?", [(pin, i) for i in ids.tolist()]
        )

    def visited(self, pin: int, key_ids: Sequence[int]) -> None:
        """Record that objects were used; this epoch no longer needs them."""
        now = time.time()
        with self.transaction() as db:
            db.executemany("DELETE FROM pinned WHERE key_id = ? AND pin = ?", [(key, pin) for key in key_ids])
            db.executemany("UPDATE keys SET visits = visits + 1 WHERE id = ?", [(key,) for key in key_ids])
            db.executemany(_VISITED, [(now, key) for key in key_ids])

    def unpin(self, pin: int) -> None:
        """End a pin."""
        with self.transaction() as db:
            db.execute("DELETE FROM pinned WHERE pin = ?", (pin,))
            db.execute("DELETE FROM pins WHERE id = ?", (pin,))

    def keep_pinned(self, pin: int, ids: NDArray[np.int64]) -> None:
        """Release what a pin holds, except some files."""
        with self.transaction() as db:
            n_pinned = db.execute("SELECT count(*) FROM pinned WHERE pin = ?", (pin,)).fetchone()[0]
            if n_pinned > ids.size:
                db.execute("DELETE FROM pinned WHERE pin = ?", (pin,))
                self._add_pinned(db, pin, ids)

    def copies(self, ids: NDArray[np.int64]) -> list[tuple[Any, ...]]:
        """Return (key_id, key, etag, nbytes, name, crc, file_id) of the objects of some files, in the order given.

        Name and crc are those of the current copy, or None if there is none with the same content.
        """
        # `state < 3` lets SQLite use the index `files_held`; likewise in `find_key`.
        rows = self.rows(
            "SELECT f.id, f.key_id, k.key, f.etag, f.nbytes, now.name, now.crc, now.id FROM files f"
            " JOIN keys k ON k.id = f.key_id"
            " LEFT JOIN files now ON now.key_id = f.key_id AND now.state < 3 AND now.state = 1 AND now.etag = f.etag"
            " WHERE f.id IN (SELECT value FROM json_each(?))",
            json.dumps(ids.tolist()),
        )
        found = {row[0]: row[1:] for row in rows}
        return [found[i] for i in ids.tolist()]

    def find_key(self, key: str, etag: str) -> tuple[int, str, int, int] | None:
        """Return (key_id, name, crc, file_id) of the published copy of an object, or None."""
        found = self.rows(
            "SELECT k.id, f.name, f.crc, f.id FROM keys k JOIN files f ON f.key_id = k.id AND f.state < 3"
            " WHERE k.key = ? AND f.state = 1 AND f.etag = ?",
            key,
            etag,
        )
        return found[0] if found else None

    def n_ready(self) -> int:
        """Return how many samples a snapshot would have."""
        return int(
            self.rows(
                "SELECT count(*) FROM files f JOIN keys k ON k.id = f.key_id"
                " WHERE f.state = 1 AND f.etag = k.etag AND k.fault IS NULL"
            )[0][0]
        )

    def n_known(self) -> int:
        """Return how many samples of the remote are not in quarantine, or are here."""
        return int(self.rows("SELECT count(*) FROM keys WHERE fault IS NULL AND (is_held OR NOT is_gone)")[0][0])

    def n_that_fit(self, nbytes: int, most: int) -> int:
        """Return how many of the samples of `n_known` fit into so many bytes together, the smallest first.

        Count up to `most`.
        """
        rows = self.rows(
            "SELECT nbytes FROM keys WHERE fault IS NULL AND (is_held OR NOT is_gone) ORDER BY nbytes LIMIT ?", most
        )
        return int(np.searchsorted(np.cumsum([cost_of(n) for (n,) in rows]), nbytes, side="right"))

    def full_and_unused(self, budget: int, min_visits: int) -> tuple[int, int, int] | None:
        """Return what tells this state from others, if the next download has no room and nothing can make it some.

        Then nothing is being downloaded or removed, may be evicted, or is to be read by a running epoch. The state is
        the number of files, of downloads so far, and of snapshots so far.
        """
        with self.transaction() as db:
            row = self._next(db)
            if row is None or self.held_nbytes + cost_of(row[2]) <= budget:
                return None
            if db.execute(_MAY_CHANGE, {"visits": min_visits}).fetchone()[0]:
                return None
            n_files = db.execute("SELECT count(*) FROM files WHERE state = 1").fetchone()[0]
            return n_files, self.meta("n_fetched"), self.meta("generation")

    def wants_room(self) -> bool:
        """Return whether downloads wait for room, which nothing evictable can make."""
        at = dict(self.rows("SELECT name, value FROM meta WHERE name = 'wanted_at'")).get("wanted_at", 0.0)
        return 0 <= time.time() - float(at) < _WANTED_S  # it may be by a clock that was ahead

    def n_bad(self) -> tuple[int, int]:
        """Return how many of the remote's samples are in quarantine, and how many samples there are."""
        n_bad = self.rows("SELECT count(*) FROM keys WHERE fault IS NOT NULL AND NOT is_gone")[0][0]
        n_all = self.rows("SELECT count(*) FROM keys WHERE is_held OR NOT is_gone")[0][0] if n_bad else 0
        return int(n_bad), int(n_all)

    def forgive_size(self, budget: int) -> None:
        """Release the samples from quarantine that were above the whole budget, but are not above this one."""
        with self.transaction() as db:
            found = db.execute("SELECT id, nbytes FROM keys WHERE fault IS NOT NULL AND is_too_large").fetchall()
            fit = [(id_,) for id_, nbytes in found if cost_of(nbytes) <= budget]
            db.executemany("UPDATE keys SET fault = NULL, is_too_large = 0 WHERE id = ?", fit)

    # --- repair ---

    def leases(self) -> set[str]:
        """Return the leases that rows refer to."""
        query = "SELECT lease FROM files WHERE state IN (0, 2) UNION SELECT lease FROM pins"
        return {row[0] for row in self.rows(query)}

    def drop_pins(self, lease: str) -> None:
        """End all pins of a lease."""
        for (pin,) in self.rows("SELECT id FROM pins WHERE lease = ?", lease):
            self.unpin(pin)

    def take_over(self, dead: str, lease: str) -> tuple[list[File], list[File]]:
        """Take over a dead lease's work; return what it had reserved and what it was removing."""
        with self.transaction() as db:
            reserved, leaving = (
                self._files(db, "f.lease = ? AND f.state = ?", dead, state) for state in (RESERVED, LEAVING)
            )
            db.execute("UPDATE files SET lease = ? WHERE lease = ? AND state IN (0, 2)", (lease, dead))
            return reserved, leaving

    def published(self) -> list[File]:
        """Return all files that should exist."""
        with self._held() as db:
            return self._files(db, "f.state = ?", PUBLISHED)

    def listed(self) -> Iterator[RemoteObject]:
        """Yield the objects of the remote, as far as listed."""
        last = 0
        while some := self.rows(
            "SELECT id, key, nbytes, etag, digest FROM keys WHERE id > ? AND NOT is_gone ORDER BY id LIMIT 10000", last
        ):
            yield from (RemoteObject(*row[1:]) for row in some)
            last = some[-1][0]

    def names(self) -> set[str]:
        """Return the names of all files that hold bytes."""
        return {row[0] for row in self.rows("SELECT name FROM files WHERE state < 3")}

    def adopt(self, name: str, wanted: RemoteObject, lease: str, budget: int) -> File | None:
        """Reserve bytes for a file without a row; None if it cannot be kept."""
        with self.transaction() as db:
            row = db.execute("SELECT id FROM keys WHERE key = ? AND etag = ?", (wanted.key, wanted.etag)).fetchone()
            if row is None or self.held_nbytes + cost_of(wanted.nbytes) > budget:
                return None
            return self._insert(db, row[0], wanted, name, lease)

    @property
    def held_nbytes(self) -> int:
        """Bytes on disk and reserved, in whole disk blocks."""
        return int(self.meta("held_nbytes"))

    @staticmethod
    def _next(db: Connection) -> Any:
        """Return the row of the next object to download, (id, key, nbytes, etag, digest), or None."""
        now = time.time()
        return db.execute(_NEXT, (now, now + _OF_ANOTHER_CLOCK_S)).fetchone()

    @staticmethod
    def _insert(db: Connection, key_id: int, wanted: RemoteObject, name: str, lease: str) -> File | None:
        """Return the row of a reserved file; None if one with this content exists already."""
        cost = cost_of(wanted.nbytes)
        cursor = db.execute(
            "INSERT OR IGNORE INTO files (key_id, etag, nbytes, cost, name, state, lease) VALUES (?, ?, ?, ?, ?, 0, ?)",
            (key_id, wanted.etag, wanted.nbytes, cost, name, lease),
        )
        return File(int(cursor.lastrowid or 0), key_id, wanted, name, cost) if cursor.rowcount else None

    @staticmethod
    def _files(db: Connection, where: str, *values: Any) -> list[File]:
        found = db.execute(
            "SELECT f.id, f.key_id, f.name, f.cost, k.key, f.nbytes, f.etag, "  # noqa: S608  (ours)
            "CASE WHEN f.etag = k.etag THEN k.digest"
            f" ELSE '' END FROM files f JOIN keys k ON k.id = f.key_id WHERE {where}",
            values,
        )
        return [File(id_, key_id, RemoteObject(*of), name, cost) for id_, key_id, name, cost, *of in found]


_OF_ANOTHER_CLOCK_S = 3600
"""A retry time further away than this was set by a clock that was ahead."""

_VISITED = "UPDATE files SET visits = visits + 1, used_at = ? WHERE key_id = ? AND state < 3 AND state = 1"
_OTHERS = (
    "SELECT f.id, k.key FROM files f JOIN keys k ON k.id = f.key_id"
    " WHERE f.state < 3 AND f.state = 1 AND k.key >= ? AND k.key < ? AND f.etag != ?"
)
"""With `state < 3`, which says no more, SQLite finds a file by its key; else it goes through all that are published."""

_NEXT = (
    "SELECT id, key, nbytes, etag, digest FROM keys"
    " WHERE NOT is_held AND NOT is_gone AND fault IS NULL AND (retry_at <= ? OR retry_at > ?)"
    " ORDER BY n_fetched, place LIMIT 1"
)


_MAY_CHANGE = (
    "SELECT EXISTS (SELECT 1 FROM pins) OR EXISTS (SELECT 1 FROM files WHERE state IN (0, 2)) OR EXISTS ("
    "SELECT 1 FROM files f JOIN keys k ON k.id = f.key_id WHERE f.state = 1 AND NOT k.is_gone"
    " AND (f.visits >= :visits OR f.etag != k.etag))"
)
"""Whether a sample may arrive or go, now or after a running epoch has read it."""


def name_of(wanted: RemoteObject) -> str:
    """Return a new name for a copy of an object: its content, and a part that is never used again."""
    return f"{content_name(wanted)}.{secrets.token_hex(8)}"


def content_name(wanted: RemoteObject) -> str:
    """Return the part of a name that identifies a file's key and content."""
    return blake2b(f"{wanted.key}\0{wanted.etag}\0{wanted.nbytes}".encode(), digest_size=16).hexdigest()


def _place(key: str) -> int:
    return int.from_bytes(blake2b(key.encode(), digest_size=8).digest(), "little") >> 1
