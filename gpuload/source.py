"""Byte sources: a file on disk, or a buffer in memory; and how files of our own are read and replaced.

No format of cells, no decoding.
"""

from __future__ import annotations

import errno
import os
import shutil
import threading
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, BinaryIO, NamedTuple

import numpy as np
from numpy.lib import format as npy

from gpuload.errors import GpuloadError, ReadError, first_line, unopened

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from numpy.typing import NDArray


class FileSource:
    """A local file, held open through one descriptor for positional reads from any thread.

    The descriptor stays with the file that was opened: if the file is replaced by a rename, this source keeps reading
    the old bytes. A change in place is detected by size and modification time before each fetch. Raise ReadError
    if it cannot be opened.

    Attributes
    ----------
    nbytes, stamp
        Its size and modification time (ns) when it was opened.
    """

    memory = None
    ranges = None

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.name = os.fspath(path)
        try:
            self._fd = os.open(self.name, os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            raise unopened(self.name, error) from error
        status = os.fstat(self._fd)
        self.nbytes = status.st_size
        self.stamp = status.st_mtime_ns
        self.identity = (status.st_dev, status.st_ino)

    def fileno(self) -> int:
        """Return the descriptor."""
        if self._fd < 0:
            raise ReadError(f"{self.name}: the loader was closed; open it again with open_loader().")
        return self._fd

    def read_into(self, buffer: NDArray[np.uint8], offset: int) -> int:
        """Fill `buffer` starting at byte `offset`; return the bytes read, fewer only at the end of the file."""
        return read_at(self.fileno(), buffer, offset, self.name)

    def locate(self, offset: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
        """Return file number 0, the position in the file and its size, for each offset."""
        return np.zeros_like(offset), offset, np.full_like(offset, self.nbytes)

    def files(self) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return the base address and the size of the file, as `gpuload.folder_source.FolderSource` does."""
        return np.zeros(1, dtype=np.int64), np.array([self.nbytes], dtype=np.int64)

    def where_is(self, offset: int) -> tuple[str, int]:
        """Return the path and the offset."""
        return self.name, offset

    @contextmanager
    def hold(self, numbers: Sequence[int]) -> Iterator[list[int]]:
        """Yield the descriptor."""
        yield [self.fileno()] * len(numbers)

    def check_unchanged(self) -> None:
        """Raise ReadError if the file was changed in place since it was opened."""
        now = os.fstat(self.fileno())
        if (now.st_size, now.st_mtime_ns) != (self.nbytes, self.stamp):
            raise ReadError(
                f"{self.name}: the file was changed while it was open ({change(self.nbytes, now.st_size)}); open the "
                "loader again when nothing is writing to it."
            )

    def opened(self) -> BinaryIO:
        """Return the file, whatever its path leads to by now, as a file object; all of them share one position."""
        file = os.fdopen(os.dup(self.fileno()), "rb")
        file.seek(0)
        return file

    def check_in_place(self) -> None:
        """Raise ReadError if the path leads to another file by now, which a library that is given it would read."""
        if identity_of(self.name) != self.identity:
            raise replaced(self.name)

    def close(self) -> None:
        """Close the descriptor; may be called twice."""
        descriptor, self._fd = self._fd, -1  # at once, as the number may be that of another file as soon as it is free
        if descriptor >= 0:
            os.close(descriptor)


def identity_of(path: str) -> tuple[int, int] | None:
    """Return the device and inode of what a path leads to; None if there is nothing, or it is an address."""
    try:
        status = os.stat(path)
    except OSError:
        return None
    return status.st_dev, status.st_ino


def check_same(folder: str, identity: tuple[int, int] | None) -> None:
    """Raise ReadError if a path leads to another folder by now: it may be a link to the latest version of the data.

    Of a folder each file is opened by its path, so files of two versions may have been read.
    """
    if identity_of(folder) != identity:
        raise replaced(folder, "folder")


def replaced(name: str, what: str = "file") -> ReadError:
    """Return the error for a file or a folder that was replaced by another while it was being opened."""
    return ReadError(f"{name}: the {what} was replaced while it was being opened; open it again.")


def change(nbytes: int, now: int) -> str:
    """Return how a file was changed, in size or only in modification time, as part of a sentence."""
    return f"size {nbytes} -> {now} bytes" if now != nbytes else f"modified since; its size is still {nbytes} bytes"


def read_at(descriptor: int, buffer: NDArray[np.uint8], offset: int, name: str) -> int:
    """Fill `buffer` from an open file, starting at byte `offset`; return the bytes read, fewer only at its end.

    Raise ReadError if the system call failed.
    """
    try:
        return fill(descriptor, buffer.data, offset)
    except OSError as error:
        raise ReadError(
            f"{name}: reading {buffer.size} bytes at byte {offset} failed: {error.strerror}. Check the disk."
        ) from error


def fill(descriptor: int, buffer: memoryview, offset: int) -> int:
    """Do what `read_at` does, but raise OSError; one call of the system reads less than 2 GiB."""
    done = 0
    while done < len(buffer) and (got := os.preadv(descriptor, [buffer[done:]], offset + done)):
        done += got
    return done


def find_files(
    base: NDArray[np.int64], nbytes: NDArray[np.int64], offset: NDArray[np.int64]
) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
    """Implement `Source.locate` for files with these base addresses (increasing) and sizes."""
    if not base.size:
        return np.zeros_like(offset), offset, np.zeros_like(offset)
    number = np.searchsorted(base, offset, side="right") - 1
    return number, offset - base[number], nbytes[number]


def locate_byte(base: NDArray[np.int64], nbytes: NDArray[np.int64], offset: int) -> tuple[int, int, int]:
    """Return the file number at one offset, the position in that file, and the file's size; see `find_files`."""
    number, at, size = find_files(base, nbytes, np.array([offset], dtype=np.int64))
    return int(number[0]), int(at[0]), int(size[0])


class BufferSource:
    """Bytes in memory: a given array, or part of a file.

    Parameters
    ----------
    data : (nbytes,) uint8
        The bytes; referenced, not copied, until the source is closed.
    """

    ranges = None

    def __init__(self, name: str, data: NDArray[np.uint8]) -> None:
        self.name = name
        self.nbytes = data.size
        self.memory: NDArray[np.uint8] | None = data if data.flags.writeable else np.asarray(_MarkedWritable(data))

    def where_is(self, offset: int) -> tuple[str, int]:
        """Return the name and the offset."""
        return self.name, offset

    def read_into(self, buffer: NDArray[np.uint8], offset: int) -> int:
        """Fill `buffer` starting at byte `offset`; return the bytes read."""
        if self.memory is None:
            raise ReadError(f"{self.name}: the loader was closed; open it again with open_loader().")
        part = self.memory[offset : offset + buffer.size]
        buffer[: part.size] = part
        return int(part.size)

    def check_unchanged(self) -> None:
        """Do nothing: changes in memory cannot be detected."""

    def close(self) -> None:
        """Release the bytes; may be called twice."""
        self.memory = None


class _MarkedWritable:
    """Exposes read-only bytes as writable: kernels, which only read them, are compiled for such arrays."""

    def __init__(self, data: NDArray[np.uint8]) -> None:
        self._data = data
        self.__array_interface__ = {**data.__array_interface__, "data": (data.ctypes.data, False)}


@contextmanager
def closed_on_error(*opened: Any) -> Iterator[None]:
    """Close what was opened if the with-block fails."""
    try:
        yield
    except BaseException:
        for one in opened:
            one.close()
        raise


@contextmanager
def replacing(path: str | os.PathLike[str]) -> Iterator[Path]:
    """Give a path to write to; what is written there replaces `path`, or is removed if the with-block fails."""
    beside = Path(f"{os.fspath(path)}.{os.getpid()}-{threading.get_ident()}.new")
    try:
        yield beside
        beside.replace(path)
    finally:
        beside.unlink(missing_ok=True)


@contextmanager
def saving(path: str | os.PathLike[str]) -> Iterator[BinaryIO]:
    """Give a file to write to, which then replaces `path`, or what that links to; raise ReadError if that fails."""
    check_regular(path)
    try:
        with replacing(os.path.realpath(path)) as beside, beside.open("wb") as file:
            if os.path.exists(path):
                with suppress(OSError):  # file systems without modes
                    shutil.copymode(path, beside)
            yield file
    except GpuloadError:
        raise
    except OSError as error:
        raise ReadError(f"{os.fspath(path)}: cannot be written: {error.strerror}. Choose another place.") from error


def check_regular(path: str | os.PathLike[str]) -> None:
    """Raise ReadError if what is there is no regular file of its own, or protected: `saving` would replace it."""
    name = os.path.abspath(path)
    if (os.path.exists(name) and not os.path.isfile(name)) or name.startswith(("/dev/std", "/dev/fd/", "/proc/")):
        raise ReadError(f"{os.fspath(path)}: cannot be written: it is no regular file. Choose another place.")
    if os.path.exists(name) and not os.access(name, os.W_OK):
        raise ReadError(f"{os.fspath(path)}: cannot be written: this user may not write there. Choose another place.")


@contextmanager
def loading_npz(
    path: str | os.PathLike[str], refusal: Callable[[Exception], Exception]
) -> Iterator[Mapping[str, NDArray[Any]]]:
    """Give the arrays of an .npz file, without pickles; raise ReadError if it cannot be opened or read.

    Raise what `refusal` makes of any other error, also of those of the with-block: a damaged file can make NumPy,
    zipfile and zlib raise almost anything.
    """
    path = os.fspath(path)
    try:
        with open(path, "rb") as file, np.load(file, allow_pickle=False) as arrays:
            yield arrays
    except OSError as error:
        if error.errno in (None, errno.EINVAL):  # for a damaged file, zipfile seeks to before its start
            raise refusal(error) from error
        raise ReadError(f"{os.fspath(path)}: cannot be read: {error.strerror}. Check the path.") from error
    except Exception as error:
        raise refusal(error) from error


class NpyHeader(NamedTuple):
    """The content of a .npy header, and the place in its file where the elements begin."""

    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    is_fortran: bool
    offset: int


def npy_header(file: IO[bytes]) -> NpyHeader:
    """Read the .npy header at the current position of a file; raise ValueError, whose message is a part of a sentence.

    Nothing in it is executed or trusted. Whether the elements are there is not checked.
    """
    try:
        version = npy.read_magic(file)
        # Version 3.0 differs from 2.0 only in the encoding of field names.
        read = npy.read_array_header_1_0 if version == (1, 0) else npy.read_array_header_2_0
        shape, is_fortran, dtype = read(file)
    except Exception as error:  # NumPy parses it as Python source, which can fail in any way
        words = first_line(error).partition(": <ast.")[0]  # what ast writes of a node is where it is in memory
        raise ValueError(f"{words:.200}") from error
    if any(n < 0 for n in shape):
        raise ValueError(f"its shape is {shape!r}")
    return NpyHeader(shape, dtype, is_fortran, file.tell())
