"""Native kernels of the CPU backend, compiled by numba; the only package that imports numba.

Every function here runs without the GIL and without allocating, on arrays that its caller owns. `inflate` (with
`deflate` and `huffman`) decodes zlib streams, `frames` the other chunk encodings; `chunks` reads stored chunks,
verifies their `checksums` and decodes them with one of `decoders`; `parquet` decodes lists of Parquet, `tiledb` tiles
of TileDB, `rows` gathers resident rows into minibatches, and `runs` moves and checks data that is rewritten. `parts`
says how functions are compiled, into their callers.

Compiled code is cached in the user's cache folder, under a digest of all sources of this package. numba keys its cache
only on the file that defines a function, but a kernel inlines the functions it calls: it would outlive a change there.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import tempfile
from functools import cache
from importlib import import_module

from numba import config
from numba.core import event

from gpuload.errors import PlanError
from gpuload.logs import is_watched

_KERNELS_NBYTES = 1 << 20
"""Approximate size of the compiled kernels."""

PASSING = "gpuload-kernels-"
"""Name prefix of a temporary cache folder, removed when the process ends."""


@cache
def _passing_folder() -> tempfile.TemporaryDirectory[str]:
    """Return a folder that is removed when the process ends."""
    try:
        return tempfile.TemporaryDirectory(prefix=PASSING)
    except OSError as error:
        raise PlanError(
            f"there is no place to keep the compiled kernels ({error.strerror}); set NUMBA_CACHE_DIR, or TMPDIR, to a "
            "writable folder."
        ) from error


class _Announcement(event.Listener):
    """Logs once that kernels are being compiled: ten seconds of silence looks like a hang.

    numba reports only what it compiles, not what it finds in its cache.
    """

    def __init__(self) -> None:
        self.is_due = True

    def on_start(self, event: event.Event) -> None:
        """Say it when the first kernel of this package is compiled."""
        if self.is_due and event.data["dispatcher"].py_func.__module__.startswith(f"{__name__}."):
            self.is_due = False
            logging.getLogger("gpuload").log(
                logging.WARNING if is_watched() else logging.INFO,
                "compiling kernels, which are kept for later: the first minibatch can take 10 to 30 seconds longer",
            )

    def on_end(self, event: event.Event) -> None:
        """Say nothing."""


announcement = _Announcement()
event.register("numba:compile", announcement)


def cache_folder() -> str:
    """Return the folder of the compiled kernels, created if missing; a temporary one if it is not writable."""
    digest = hashlib.sha256()
    here = os.path.dirname(__file__)
    for name in sorted(os.listdir(here)):
        if name.endswith(".py"):
            with open(os.path.join(here, name), "rb") as source:
                digest.update(source.read())
    user_cache = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    folder = os.path.join(config.CACHE_DIR or os.path.join(user_cache, "gpuload"), f"kernels-{digest.hexdigest()[:16]}")
    try:
        os.makedirs(folder, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder) as trial:
            trial.write(bytes(_KERNELS_NBYTES))
            trial.flush()
        _remove_empty(folder)
    except OSError as error:
        logging.getLogger("gpuload").warning(
            "%s cannot be written (%s): each process compiles the kernels again; set NUMBA_CACHE_DIR to another folder",
            folder,
            error.strerror,
        )
        return _passing_folder().name
    return folder


def _remove_empty(folder: str) -> None:
    """Remove files that a crash of the machine left empty: numba would fail on them forever."""
    for entry in os.scandir(folder):
        with contextlib.suppress(FileNotFoundError):  # removed by another process
            if entry.name.endswith((".nbi", ".nbc")) and not entry.stat().st_size:
                os.remove(entry.path)


_MODULES = (
    *("parts", "words", "checksums", "huffman", "deflate", "inflate", "calls", "frames", "decoders", "chunks"),
    *("parquet_pages", "parquet_footer", "parquet_encodings", "parquet", "tiledb_filters", "tiledb"),
    *("rows", "runs"),
)

_others, config.CACHE_DIR = config.CACHE_DIR, cache_folder()
try:
    for _name in _MODULES:
        import_module(f"{__name__}.{_name}")
finally:
    config.CACHE_DIR = _others
