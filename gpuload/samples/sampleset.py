"""Samples by ID, as a map-style dataset, and where they are: in a folder, or with a remote; each is read whole."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from gpuload.checks import check_order, check_whole
from gpuload.errors import CorruptDataError, MissingDependencyError, PlanError, ReadError, shown
from gpuload.remote import Patience, as_remote
from gpuload.remote.errors import check_length
from gpuload.remote.patience import OUTAGE_S
from gpuload.samples.tensor_files import FORMATS, Descriptions, StoredTensor, bytes_of, load
from gpuload.source import read_at
from gpuload.threads import MOST_IN_FLIGHT, DaemonThreads

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from numpy.typing import NDArray

    from gpuload.remote import Remote


class SampleSet:
    """Samples by ID, as a map-style dataset: ``set[i]`` is ``(X, y)``.

    Parameters
    ----------
    ids
        IDs, in the order of their indices; repetitions are allowed.
    labels
        Label of each ID; None returns ``(X, ID)``.
    source
        A folder, an address (``s3://bucket/prefix``), or a `gpuload.remote.Remote`; the sample of an ID is at
        ``ID + suffix``.
    decode
        ``"pt"`` (one tensor, as torch.save writes it), ``"npy"``, ``"safetensors"`` (one tensor), ``"bytes"`` (a uint8
        tensor); or a function from a uint8 array to a sample.
    suffix
        Suffix after the ID; None takes ``"." + decode``, and nothing for bytes and functions.
    in_flight
        Concurrent fetches, at most 1,024, for a batch that a DataLoader's worker requests.

    Raises
    ------
    PlanError
        An option is invalid, or an ID has no label.
    ReadError
        The source does not exist.

    Notes
    -----
    It needs no base class: PyTorch's DataLoader accepts it as it is, with any number of workers, and requests whole
    batches (``__getitems__``), whose samples are then fetched concurrently. If samples are at an address and this
    process has already read anything from one, the workers need ``multiprocessing_context="spawn"``: a forked worker
    raises an error.
    """

    def __init__(
        self,
        ids: Sequence[Any],
        labels: Mapping[Any, Any] | None,
        source: Remote | str | os.PathLike[str],
        decode: str | Callable[[NDArray[np.uint8]], Any] = "pt",
        *,
        suffix: str | None = None,
        in_flight: int = 16,
    ) -> None:
        if not callable(decode) and decode not in FORMATS:
            raise PlanError(f"decode={decode!r}: expected one of {', '.join(map(repr, FORMATS))} or a function.")
        in_flight = check_whole("in_flight", in_flight, 1, most=MOST_IN_FLIGHT)
        if labels is not None and not hasattr(labels, "keys"):
            raise PlanError(
                f"labels={shown(labels)}: expected a dict from ID to label, or None; dict(zip(ids, labels)) makes one "
                "of labels in the order of the IDs."
            )
        check_order(f"ids={shown(ids)}", ids, "a list of IDs")
        self.ids = list(ids)
        missing = [i for i in self.ids if i not in labels] if labels is not None else []
        if missing:
            raise PlanError(
                f"labels: {missing[0]!r} has none ({len(missing)} of {len(self.ids)} IDs have none); give every ID a "
                "label."
            )
        self.labels = labels
        self._decode = decode
        self._suffix = suffix if suffix is not None else f".{decode}" if decode in FORMATS[:3] else ""
        self._in_flight = in_flight
        self._source = _open_source(source)
        self._descriptions = Descriptions(decode) if isinstance(decode, str) else None
        self._pool: tuple[int, DaemonThreads] | None = None

    @property
    def is_remote(self) -> bool:
        """Whether samples come over a network, so that many must be in flight at a time."""
        return isinstance(self._source, _Remote)

    def __len__(self) -> int:
        """Number of samples."""
        return len(self.ids)

    def __getitem__(self, index: int) -> tuple[Any, Any]:
        """Return (X, y) of a sample, by index; the caller owns X."""
        id_ = self.ids[index]
        return self.decode(id_, self.fetch(id_)), self.label(id_)

    def __getitems__(self, indices: list[int]) -> list[tuple[Any, Any]]:
        """Return (X, y) of several samples, in the order requested; they are fetched concurrently."""
        if self._pool is None or self._pool[0] != os.getpid():  # threads do not survive a fork into a worker
            self._pool = os.getpid(), DaemonThreads(self._in_flight, "gpuload-samples")
        return self._pool[1].map(self.__getitem__, indices)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_pool": None}

    def label(self, id_: Any) -> Any:
        """Return the label of an ID, or the ID if there are no labels."""
        return id_ if self.labels is None else self.labels[id_]

    def fetch(self, id_: Any) -> NDArray[np.uint8]:
        """Return the bytes of a sample."""
        return self._source.read(f"{id_}{self._suffix}")

    def span(self, data: NDArray[np.uint8]) -> StoredTensor | None:
        """Return where the values of a sample lie in its bytes; None where it has to be deserialised."""
        return None if self._descriptions is None else self._descriptions.find(data)

    def decode(self, id_: Any, data: NDArray[np.uint8]) -> Any:
        """Decode a sample from its bytes; raise CorruptDataError, naming the ID, if that fails."""
        try:
            if callable(self._decode):
                return self._decode(data)
            span = self.span(data)
            if span is None:
                return load(str(self._decode), data)
            values = torch.empty(span.shape, dtype=span.dtype)
            np.copyto(bytes_of(values), data[span.start : span.start + span.nbytes])
        except (MissingDependencyError, MemoryError):
            raise
        except Exception as error:
            reason = f"{str(error).rstrip('.')} ({type(error).__name__})"
            raise CorruptDataError(
                f"sample {id_!r}: its {data.size} bytes cannot be decoded: {reason}. Rewrite it, or check decode=."
            ) from error
        return values


class _Folder:
    """Files of a folder, read whole."""

    def __init__(self, folder: str) -> None:
        self._folder = folder

    def read(self, key: str) -> NDArray[np.uint8]:
        """Return all bytes of a file."""
        path = os.path.join(self._folder, key)
        try:
            fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            raise ReadError(f"{path}: cannot be opened: {error.strerror}. Check the ID and the suffix.") from error
        try:
            data = np.empty(os.fstat(fd).st_size, dtype=np.uint8)
            got = read_at(fd, data, 0, path)
            if got < data.size:
                raise ReadError(f"{path}: short read: wanted {data.size} bytes, got {got}. Was it truncated?")
        finally:
            os.close(fd)
        return data


class _Remote:
    """Objects of a remote, read whole, with retries."""

    def __init__(self, remote: Remote) -> None:
        self._remote = remote
        self._patience = Patience(at_least_s=OUTAGE_S)

    def read(self, key: str) -> NDArray[np.uint8]:
        """Return all bytes of an object; retry while the remote is busy."""
        return np.frombuffer(self._patience.ask(lambda: self._get(key)), dtype=np.uint8)

    def _get(self, key: str) -> Any:
        whole = getattr(self._remote, "get_whole", None)
        if whole is not None:
            return whole(key)  # one request instead of two
        found = self._remote.head(key)
        if found is None:
            raise ReadError(f"{self._remote.name}/{key}: no such object. Check the ID and the suffix.")
        whole = self._remote.get(found, 0, found.nbytes)
        check_length(whole, found.nbytes, f"{self._remote.name}/{key}")
        return whole


def _open_source(source: Remote | str | os.PathLike[str]) -> _Folder | _Remote:
    """Return the source at an address, in a folder, or over a remote."""
    if not isinstance(source, (str, os.PathLike)) or "://" in os.fspath(source):
        return _Remote(as_remote("source", source))
    if not os.path.isdir(source):
        raise ReadError(f"{os.fspath(source)}: no such folder. Check the path.")
    return _Folder(os.fspath(source))
