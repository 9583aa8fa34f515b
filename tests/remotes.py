"""Remotes that count, and remotes that fail on demand; in a module, so that fetcher processes can import them."""

from __future__ import annotations

import os
import subprocess
import threading
import time
from collections import Counter
from typing import TYPE_CHECKING, Any

import numpy as np

from gpuload.errors import BusyError
from gpuload.remote import FolderRemote, RemoteObject

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    import pytest


def fill(folder: Path, n: int, n_values: int = 1_000) -> Path:
    """Write n .npy files; the first value of each is its number."""
    folder.mkdir(exist_ok=True)
    for i in range(n):
        values = np.random.default_rng(i).random(n_values, dtype=np.float32)
        values[0] = i
        np.save(folder / f"{i:04d}.npy", values)
    return folder


class CountingRemote(FolderRemote):
    """A folder that counts the requests it gets, and may be slow."""

    def __init__(self, folder: Path, *, wait_s: float = 0.0) -> None:
        super().__init__(folder)
        self.wait_s = wait_s
        self.gets: Counter[str] = Counter()
        self.heads: Counter[str] = Counter()
        self.n_at_once = 0
        self.most_at_once = 0
        self._lock = threading.Lock()

    def head(self, key: str) -> RemoteObject | None:
        self.heads[key] += 1
        return super().head(key)

    def get(self, wanted: RemoteObject, start: int, stop: int) -> Any:
        with self._lock:
            self.gets[wanted.key] += start == 0
            self.n_at_once += 1
            self.most_at_once = max(self.most_at_once, self.n_at_once)
        try:
            time.sleep(self.wait_s)
            return super().get(wanted, start, stop)
        finally:
            with self._lock:
                self.n_at_once -= 1


class FlakyRemote(CountingRemote):
    """A folder whose every k-th answer is a fault, of each kind in turn."""

    KINDS = ("busy", "short", "corrupt", "reset")

    def __init__(self, folder: Path, every: int) -> None:
        super().__init__(folder)
        self.every = every
        self.n = 0

    def list(self) -> Iterator[RemoteObject]:
        import hashlib

        for found in super().list():
            with open(os.path.join(self.name, found.key), "rb") as file:
                digest = hashlib.file_digest(file, "sha256").hexdigest()
            yield RemoteObject(found.key, found.nbytes, found.etag, f"sha256:{digest}")

    def get(self, wanted: RemoteObject, start: int, stop: int) -> Any:
        piece = super().get(wanted, start, stop)
        with self._lock:
            self.n += 1
            kind = self.KINDS[self.n // self.every % 4] if self.n % self.every == 0 else ""
        if kind == "busy":
            raise BusyError("503")
        if kind == "reset":
            raise ConnectionResetError
        if kind == "short":
            return piece[:-1]
        if kind == "corrupt":
            piece[0] ^= 1
        return piece


class HangingRemote(FolderRemote):
    """A folder that does not answer as long as a file next to it exists."""

    def get(self, wanted: RemoteObject, start: int, stop: int) -> Any:
        while os.path.exists(f"{self.name}.hang"):
            time.sleep(0.05)
        return super().get(wanted, start, stop)


def ranges_asked_for(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """Return a list to which every range of a remote source is added that is read: its first byte and its length."""
    from gpuload.remote.source import RemoteSource

    ranges: list[tuple[int, int]] = []
    read_many = RemoteSource.read_many

    def note(self: RemoteSource, offset: np.ndarray, nbytes: np.ndarray, *rest: Any) -> None:
        ranges.extend(zip(offset.tolist(), nbytes.tolist(), strict=True))
        read_many(self, offset, nbytes, *rest)

    monkeypatch.setattr(RemoteSource, "read_many", note)
    return ranges


class StartingRemote(FolderRemote):
    """A folder that starts a program, as some get credentials, which outlives the process that it is in."""

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        program = subprocess.Popen(["sleep", "60"])
        with open(f"{self.name}.pid", "w") as file:
            file.write(str(program.pid))
        program.returncode = 0  # nobody waits for it
