"""The working folder beside the target in which it is made, and the rename that publishes it.

What is done there for a plan is in a folder of its own: a task that an interrupted run has left under way, on a cluster
or in a thread, finds it gone, and does not write into the work of another plan.
"""

from __future__ import annotations

import os
import shutil
from contextlib import contextmanager, suppress
from hashlib import blake2b
from typing import TYPE_CHECKING

from gpuload.errors import GpuloadError, PlanError, ReadError, StoreError, shown
from gpuload.formats.arrays import OBSM
from gpuload.formats.recognise import file_of
from gpuload.formats.zarr_trees import GROUP_FILES
from gpuload.packing.files import locked, remove_partial, sync_folder, sync_folders, sync_upwards, write_whole

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

PARTS, DONE, STORE = "parts", "done", "store"
"""Contents of a plan's folder: parts of the first pass, marks of finished buckets, the target."""

LOCK, REPLACED = "lock", "replaced"
"""Further contents of the working folder: the lock, and for a moment what was the target before."""

_PLAN = "plan.json"


def member_at(layer: str) -> str:
    """Return the place in an AnnData of a matrix, given its name in `formats.open_store`."""
    if layer == "raw.X":
        return "raw/X"
    return layer if layer == "X" or layer.startswith(OBSM) else f"layers/{layer}"


def layer_at(member: str) -> str:
    """Return the name in `formats.open_store` of the matrix at a place."""
    return "raw.X" if member == "raw/X" else member.removeprefix("layers/")


def target_path(target: str | os.PathLike[str]) -> str:
    """Return the path of a target; refuse an address, and what is no path."""
    given = os.fspath(target) if isinstance(target, (str, os.PathLike)) else None
    if not isinstance(given, str) or not given or "\0" in given:
        raise PlanError(f"target={shown(target)}: expected the path of a folder to create.")
    if "://" in os.fspath(target):
        raise PlanError(
            f"target={os.fspath(target)!r}: it is an address, but a target is a folder on this machine; pass a path, "
            "and copy the folder there afterwards."
        )
    path = os.path.abspath(given)
    root, ending = os.path.splitext(path)
    if ending.lower() in (".h5ad", ".h5mu", ".h5", ".zip"):
        raise PlanError(f"target={given!r}: packing writes a zarr store, a folder; name it {root + '.zarr'!r}, say.")
    return path


def check_target(target: str, files: Sequence[str], *, overwrite: bool) -> None:
    """Refuse a target that cannot be created, or would replace what it must not."""
    parent = os.path.dirname(target)
    if not os.path.isdir(parent):
        raise ReadError(f"{parent}: there is no such folder to put the target into; create it first.")
    place = os.path.realpath(target)
    for file in files:
        source = os.path.realpath(file_of(file))
        if source == place:
            raise PlanError(f"target={target!r}: it is one of the sources; choose another.")
        outer = os.path.commonpath((source, place))
        if outer in (source, place):
            found = f"it is inside the source {file}" if outer == source else f"the source {file} is inside it"
            raise PlanError(f"target={target!r}: {found}; choose another.")
    if not os.path.lexists(target):
        return
    if not any(os.path.exists(os.path.join(target, name)) for name in GROUP_FILES):
        raise StoreError(
            f"{target}: it exists already and is not a zarr store, so it is not overwritten; choose another target (of "
            "the command, it is the last path)."
        )
    if not overwrite:
        raise StoreError(
            f"{target}: it exists already; choose another target, or overwrite it (overwrite=True, or --overwrite)."
        )


def check_disk(folder: str, needed: int) -> None:
    """Raise ReadError if the disk lacks room for so many bytes, counting what the folder already holds."""
    parent = os.path.dirname(folder)
    free = shutil.disk_usage(parent).free + size_of(folder)
    if needed > free:
        raise ReadError(
            f"{parent}: packing needs up to {needed / 1e9:.1f} GB there, half of it for parts that are removed at the "
            f"end, but {free / 1e9:.1f} GB are free; free some, or choose a target on another disk."
        )


@contextmanager
def at_work(folder: str, target: str, plan: bytes) -> Iterator[str]:
    """Create the folder, or resume in it if it holds work of the same plan; nobody else works there meanwhile.

    Yield the plan's folder in it. If an error comes before there is anything to resume, both are removed.

    Parameters
    ----------
    target
        What is made there is for it. It is put back if work was cut short while it was being replaced.
    plan
        Everything that determines the target.

    Raises
    ------
    ReadError
        Another process works there.
    StoreError
        The folder is of something else, or the target cannot be put back.
    """
    there = os.listdir(folder) if os.path.isdir(folder) else []
    if there and LOCK not in there:
        raise StoreError(
            f"{folder}: packing would work there, but it holds {sorted(there)[0]!r}, which is not of packing; move it, "
            "or choose another target."
        )
    os.makedirs(folder, exist_ok=True)
    with locked(os.path.join(folder, LOCK)):
        _put_back(folder, target)
        own = os.path.join(folder, blake2b(plan, digest_size=8).hexdigest())
        if _is_of(own, plan) and os.path.isdir(os.path.join(own, STORE)):
            remove_partial(own)
        else:
            clear(folder)
            begin(own)
            write_whole(os.path.join(own, _PLAN), [plan])
            sync_upwards([own], folder)
        try:
            yield own
        except BaseException:
            if all(name in (LOCK, _PLAN) for _, _, names in os.walk(folder) for name in names):
                _remove(folder)
            raise


@contextmanager
def discarded_if_refused(folder: str) -> Iterator[None]:
    """Discard the work if sources or settings are refused: with others it is of another plan, and is not resumed."""
    try:
        yield
    except (PlanError, StoreError):
        clear(folder)
        raise


def _put_back(folder: str, target: str) -> None:
    """Put back the target if `publish` was cut short between its renames: nothing else holds what it was."""
    replaced = os.path.join(folder, REPLACED)
    if not os.path.lexists(replaced) or not _has_store(folder):
        return
    if os.path.lexists(target):
        raise StoreError(
            f"{replaced}: this was {target} until packing was cut short while it replaced that, and by now there is "
            "another; move one of them away."
        )
    os.rename(replaced, target)
    sync_folder(os.path.dirname(target))


def _has_store(folder: str) -> bool:
    """Return whether there is a target in the folder that has not been published."""
    return any(os.path.isdir(os.path.join(folder, name, STORE)) for name in os.listdir(folder) if name != REPLACED)


def _is_of(own: str, plan: bytes) -> bool:
    try:
        with open(os.path.join(own, _PLAN), "rb") as file:
            return file.read() == plan
    except FileNotFoundError:
        return False


def begin(folder: str) -> None:
    """Create the folder, or empty it, and create its subfolders."""
    os.makedirs(folder, exist_ok=True)
    clear(folder)
    for name in (PARTS, DONE, STORE):
        os.makedirs(os.path.join(folder, name))


def begin_matrix(own: str) -> None:
    """Create the folders for the work on one matrix, if they do not exist."""
    for name in (PARTS, DONE):
        os.makedirs(os.path.join(own, name), exist_ok=True)


def clear(folder: str) -> None:
    """Remove everything but the lock; a plan first, so that the remains belong to no plan."""
    names = sorted(os.listdir(folder), key=lambda name: name != _PLAN)
    for name in names:
        path = os.path.join(folder, name)
        if os.path.isdir(path) and not os.path.islink(path):
            with suppress(FileNotFoundError):
                os.remove(os.path.join(path, _PLAN))
            shutil.rmtree(path)
        elif name != LOCK:
            os.remove(path)


def publish(folder: str, own: str, target: str, files: Sequence[str], *, overwrite: bool) -> None:
    """Publish the target from the plan's folder, replacing an existing one if that is wanted, and remove the folder."""
    store = os.path.join(own, STORE)
    sync_folders(store)
    check_target(target, files, overwrite=overwrite)  # it may exist by now; after the sync, which may take long
    if overwrite and os.path.lexists(target):
        os.rename(target, os.path.join(folder, REPLACED))
    os.rename(store, target)
    sync_folder(os.path.dirname(target))
    _remove(folder)


def remove_remains(folder: str) -> None:
    """Remove the folder if a run ended while it did so, its target published: whoever has that would not pack again."""
    lock = os.path.join(folder, LOCK)
    if os.path.exists(lock) and not _has_store(folder):
        with locked(lock):
            if not _has_store(folder):
                _remove(folder)


def _remove(folder: str) -> None:
    """Remove the folder, its lock last: whenever that is cut short, the remains are known as such."""
    clear(folder)
    with suppress(FileNotFoundError):
        os.remove(os.path.join(folder, LOCK))
    with suppress(OSError):  # another run may have begun there since
        os.rmdir(folder)


def size_of(folder: str) -> int:
    """Return the bytes of all files below a folder; 0 if it does not exist."""
    nbytes = 0
    for at, _, names in os.walk(folder):
        for name in names:
            with suppress(FileNotFoundError):  # a task that an interrupted run left under way may rename it
                nbytes += os.path.getsize(os.path.join(at, name))
    return nbytes


@contextmanager
def translated(target: str) -> Iterator[None]:
    """Translate the system's errors about files, in one place."""
    try:
        yield
    except GpuloadError:
        raise
    except OSError as error:
        raise ReadError(
            f"{error.filename or target}: {error.strerror or error}. Fix it and run the same command again: it "
            "continues where it stopped."
        ) from error
