"""One SQLite database for several threads and processes: every change is one transaction. The only user of sqlite3."""

from __future__ import annotations

import errno
import os
import random
import sqlite3
import threading
import time
from contextlib import contextmanager
from importlib.resources import files as package_files
from typing import TYPE_CHECKING, Any

from gpuload.errors import PlanError, ReadError, StoreError

if TYPE_CHECKING:
    from collections.abc import Iterator

VERSION = 2
"""Version of the schema."""

_BUSY_S = 60.0
"""Longest wait for another process's transaction, which takes milliseconds."""

_PAUSE_S = 0.01
"""Time between attempts where SQLite does not wait itself."""

_OF_SYSTEM = (sqlite3.SQLITE_CANTOPEN, sqlite3.SQLITE_READONLY, sqlite3.SQLITE_PERM, sqlite3.SQLITE_IOERR)
"""Refusals and faults of the disk, which leave the catalogue itself possibly sound."""


class Database:
    """A database with the schema of a store, created if it does not exist. Thread-safe; a forked process is refused.

    Raises
    ------
    StoreError
        It has another version, or is not a database.
    ReadError
        It cannot be opened or written to.
    """

    def __init__(self, path: str) -> None:
        self.path = path
        self._pid = os.getpid()
        self._lock = threading.RLock()
        try:
            self._db = sqlite3.connect(path, timeout=_BUSY_S, isolation_level=None, check_same_thread=False)
        except sqlite3.OperationalError as error:
            raise _refused(error, path) from error
        try:
            self._begin()
        except BaseException:
            self._db.close()
            raise

    def _begin(self) -> None:
        """Configure the database, and create its tables if it has none."""
        try:
            self._write_ahead()
            for pragma in ("synchronous = NORMAL", "cache_size = -16000"):
                self._db.execute(f"PRAGMA {pragma}")
            with self.transaction() as db:
                if not db.execute("SELECT 1 FROM sqlite_master WHERE name = 'meta'").fetchone():
                    for statement in _statements():
                        db.execute(statement)
            found = self.meta("version")
        except (sqlite3.DatabaseError, UnicodeDecodeError) as error:
            raise _told(error, self.path) from error
        if found != VERSION:
            raise StoreError(
                f"{self.path}: it has version {found}, but this gpuload reads version {VERSION}; use another folder, "
                "or remove it, and the store makes a new one from the files that are there."
            )

    def _write_ahead(self) -> None:
        """Switch to write-ahead logging. SQLite does not wait where several do so at once, so that is done here."""
        until = time.monotonic() + _BUSY_S
        while True:
            try:
                self._db.execute("PRAGMA journal_mode = WAL")
            except sqlite3.OperationalError as error:
                if error.sqlite_errorcode & 0xFF != sqlite3.SQLITE_BUSY or time.monotonic() > until:
                    raise
                time.sleep(random.uniform(0.5, 1.5) * _PAUSE_S)  # noqa: S311 - no secret
            else:
                return

    @property
    def is_of_this_process(self) -> bool:
        """Whether this process opened the database, and not one that it is a fork of."""
        return os.getpid() == self._pid

    def check_process(self) -> None:
        """Raise PlanError in a forked process: a thread of its parent may have held a lock, and never returns it."""
        if not self.is_of_this_process:
            raise PlanError("the sample store was opened in another process; open it in this one.")

    def close(self) -> None:
        """Close the database; may be called twice. In a forked process it does nothing."""
        if self.is_of_this_process:
            with self._lock:
                self._db.close()

    @contextmanager
    def transaction(self) -> Iterator[sqlite3.Connection]:
        """Run a with-block as one transaction: all of it or nothing."""
        with self._held() as db:
            try:
                db.execute("BEGIN IMMEDIATE")  # inside the try: an interrupt may arrive as it returns
                yield db
                db.execute("COMMIT")
            except BaseException:
                if db.in_transaction:
                    db.execute("ROLLBACK")
                raise

    @contextmanager
    def _held(self) -> Iterator[sqlite3.Connection]:
        """Keep other threads out for a with-block, and translate SQLite's errors in it."""
        self.check_process()
        with self._lock:
            try:
                yield self._db
            except sqlite3.ProgrammingError as error:
                raise PlanError("the sample store was closed; open it again.") from error
            except (sqlite3.DatabaseError, UnicodeDecodeError) as error:
                raise _told(error, self.path) from error

    def rows(self, query: str, *values: Any) -> list[tuple[Any, ...]]:
        """Return the rows of a query, outside any transaction."""
        with self._held() as db:
            return db.execute(query, values).fetchall()

    def meta(self, name: str) -> Any:
        """Return one of the store's metadata values."""
        found = self.rows("SELECT value FROM meta WHERE name = ?", name)
        if not found:
            raise _damaged(f"no {name!r} is in it", self.path)
        return found[0][0]

    def set_meta(self, **values: Any) -> None:
        """Set metadata values of the store."""
        with self.transaction() as db:
            db.executemany(
                "INSERT INTO meta VALUES (?, ?) ON CONFLICT DO UPDATE SET value = excluded.value", values.items()
            )

    @staticmethod
    def _count(db: sqlite3.Connection, **amounts: int) -> None:
        """Add to metadata values of the store."""
        db.executemany("UPDATE meta SET value = value + ? WHERE name = ?", [(n, name) for name, n in amounts.items()])


def _told(error: Exception, path: str) -> OSError | StoreError:
    """Return our message for an error of the database, or of the system under it."""
    code = getattr(error, "sqlite_errorcode", 0) & 0xFF
    if code == sqlite3.SQLITE_FULL:
        return OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), path)
    if code == sqlite3.SQLITE_BUSY:
        return ReadError(f"{path}: another process has held it for {_BUSY_S:.0f} s; end it, or use another folder.")
    if code in _OF_SYSTEM:
        return _refused(error, path)
    return _damaged(str(error), path)


def _damaged(what: str, path: str) -> StoreError:
    return StoreError(
        f"{path}: it cannot be read as the catalogue of a sample store: {what}. Remove it, and the store makes a new "
        "one from the files that are there."
    )


def _refused(error: Exception, path: str) -> ReadError:
    return ReadError(f"{path}: {error}; check its permissions and the disk.")


def _statements() -> Iterator[str]:
    """Yield the statements of the schema; triggers contain semicolons."""
    statement = ""
    for line in (package_files("gpuload.cache") / "schema.sql").read_text().splitlines(keepends=True):
        statement += line
        if sqlite3.complete_statement(statement):
            yield statement
            statement = ""
