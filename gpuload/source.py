"""Where bytes lie: a file on disk, or a buffer in memory. No format, no decoding."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from gpuload.errors import ReadError

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


class FileSource:
    """A local file, held open by one descriptor for positional reads from any thread.

    The descriptor stays with the file that was opened: replacing it by a rename leaves this source on the old bytes,
    and a change in place is found by size and modification time before each fetch.

    Parameters
    ----------
    path
        The file.

    Raises
    ------
    ReadError
        It cannot be opened.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.name = os.fspath(path)
        try:
            self._fd = os.open(self.name, os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            raise ReadError(
                f"{self.name}: cannot be opened: {error.strerror}. Check the path and its permissions."
            ) from error
        status = os.fstat(self._fd)
        self.nbytes = status.st_size
        self._stamp = self._stamp_of(status)
        self.identity = (status.st_dev, status.st_ino)

    @staticmethod
    def _stamp_of(status: os.stat_result) -> tuple[int, int]:
        return status.st_size, status.st_mtime_ns

    def fileno(self) -> int:
        """Return the descriptor."""
        if self._fd < 0:
            raise ReadError(f"{self.name}: the loader was closed; open it again with open_loader().")
        return self._fd

    def read_into(self, buffer: NDArray[np.uint8], offset: int) -> int:
        """Fill `buffer` from byte `offset` on; return the bytes got, fewer only at the end of the file."""
        done = 0
        while done < buffer.size:
            try:
                got = os.preadv(self.fileno(), [buffer[done:].data], offset + done)
            except OSError as error:
                raise ReadError(
                    f"{self.name}: reading {buffer.size} bytes at byte {offset} failed: {error.strerror}."
                ) from error
            if got == 0:
                break
            done += got
        return done

    def check_unchanged(self) -> None:
        """Raise ReadError where the file was changed in place since it was opened."""
        stamp = self._stamp_of(os.fstat(self.fileno()))
        if stamp != self._stamp:
            raise ReadError(
                f"{self.name}: the file was changed while it was open (size {self._stamp[0]} -> {stamp[0]} bytes); "
                "open the loader again when nobody writes to it."
            )

    def close(self) -> None:
        """Close the descriptor; may be called twice."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


class BufferSource:
    """Bytes in memory that stand for a part of a file.

    Parameters
    ----------
    name
        What errors call it.
    data : (nbytes,) uint8
        The bytes; kept, not copied.
    """

    def __init__(self, name: str, data: NDArray[np.uint8]) -> None:
        self.name = name
        self.nbytes = data.size
        self._data = data

    def fileno(self) -> int:
        """Return -1: no descriptor."""
        return -1

    def read_into(self, buffer: NDArray[np.uint8], offset: int) -> int:
        """Fill `buffer` from byte `offset` on; return the bytes got."""
        part = self._data[offset : offset + buffer.size]
        buffer[: part.size] = part
        return int(part.size)

    def check_unchanged(self) -> None:
        """Do nothing: nobody else holds the bytes."""

    def close(self) -> None:
        """Do nothing."""
