"""Samples by ID: one file or object per sample, labels in a dictionary. For PyTorch's DataLoader, and for our own.

    training_set = SampleSet(partition["train"], labels, "data/")            # data/<ID>.pt
    torch.utils.data.DataLoader(training_set, batch_size=64, shuffle=True, num_workers=6)
    SampleLoader(training_set, batch_size=64, shuffle=True, num_workers=6)   # threads; the next batches are under way

Files of one tensor (.pt, .npy, .safetensors) are not deserialised: where a file's description of its tensor is byte for
byte one that was seen before, its values are copied to their place by a thread that holds no GIL. What is described
otherwise is read by the format's own library.
"""

from __future__ import annotations

import io
import os
import random
import struct
import threading
import time
import zipfile
import zlib
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from gpuload.backends.buffers import BufferPool
from gpuload.errors import CorruptDataError, MissingDependencyError, PlanError, ReadError
from gpuload.permute import Permutation
from gpuload.remote import BusyError, open_remote

try:
    import torch
    from torch.utils.data import default_collate
except ImportError as error:
    raise MissingDependencyError("torch", "gpuload.samples", "torch") from error

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from concurrent.futures import Future

    from numpy.typing import NDArray

    from gpuload.remote import Remote

FORMATS = ("pt", "npy", "safetensors", "bytes")

_TRIES = 6
"""Requests for a sample before its store is given up."""

_PURPOSE = 41
"""Tells this order from others of the same seed."""


@dataclass(frozen=True, slots=True)
class Span:
    """Where the values of a file's tensor lie."""

    start: int
    nbytes: int
    dtype: torch.dtype
    shape: tuple[int, ...]


class SampleSet:
    """Samples by ID, as a map-style dataset: ``set[i]`` is ``(X, y)``.

    Parameters
    ----------
    ids
        IDs, in the order of the numbers that stand for them; some may be given more than once.
    labels
        Label of each ID; None hands over ``(X, ID)``.
    source
        A folder, an address (``s3://bucket/prefix``), or a `gpuload.remote.Remote`; the sample of an ID is under
        ``ID + suffix``.
    decode
        ``"pt"`` (one tensor, as torch.save writes it), ``"npy"``, ``"safetensors"`` (one tensor), ``"bytes"`` (a uint8
        tensor); or a function from a uint8 array to a sample.
    suffix
        What follows the ID; None takes ``"." + decode``, and nothing for bytes and functions.
    in_flight
        Samples fetched at a time for a batch that a DataLoader's worker asks for.

    Raises
    ------
    PlanError
        An option that cannot be carried out, or an ID without a label.
    ReadError
        There is no such source.

    Notes
    -----
    It needs no base class: PyTorch's DataLoader takes it as it is, with any number of workers, and asks it for whole
    batches (``__getitems__``), whose samples are then fetched concurrently.
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
        if in_flight < 1:
            raise PlanError(f"in_flight={in_flight}: expected at least 1.")
        missing = [i for i in ids if i not in labels] if labels is not None else []
        if missing:
            raise PlanError(f"labels: {missing[0]!r} has none ({len(missing)} of {len(ids)} IDs have none).")
        self.ids = list(ids)
        self.labels = labels
        self._decode = decode
        self._suffix = suffix if suffix is not None else f".{decode}" if decode in FORMATS[:3] else ""
        self._in_flight = in_flight
        self._source = _open_source(source)
        self._forms = _Forms(decode) if isinstance(decode, str) else None
        self._pool: tuple[int, ThreadPoolExecutor] | None = None

    @property
    def is_remote(self) -> bool:
        """Whether samples come over a network, so that many have to be under way at a time."""
        return isinstance(self._source, _RemoteSource)

    def __len__(self) -> int:
        """Samples."""
        return len(self.ids)

    def __getitem__(self, index: int) -> tuple[Any, Any]:
        """Return (X, y) of a sample, by its number; X is the caller's own."""
        id_ = self.ids[index]
        return self.decode(id_, self.fetch(id_)), self.label(id_)

    def __getitems__(self, indices: list[int]) -> list[tuple[Any, Any]]:
        """Return (X, y) of several samples, in the order asked for; they are fetched concurrently."""
        if self._pool is None or self._pool[0] != os.getpid():  # threads do not come along into a worker
            self._pool = os.getpid(), ThreadPoolExecutor(self._in_flight, thread_name_prefix="gpuload-samples")
        return list(self._pool[1].map(self.__getitem__, indices))

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_pool": None}

    def label(self, id_: Any) -> Any:
        """Return the label of an ID, or the ID where there are no labels."""
        return id_ if self.labels is None else self.labels[id_]

    def fetch(self, id_: Any) -> NDArray[np.uint8]:
        """Return the bytes of a sample."""
        return self._source.read(f"{id_}{self._suffix}")

    def span(self, data: NDArray[np.uint8]) -> Span | None:
        """Return where the values of a sample lie in its bytes; None where it has to be deserialised."""
        return None if self._forms is None else self._forms.find(data)

    def decode(self, id_: Any, data: NDArray[np.uint8]) -> Any:
        """Return the sample that its bytes are; what cannot be decoded is a CorruptDataError that names the ID."""
        try:
            if callable(self._decode):
                return self._decode(data)
            span = self.span(data)
            if span is None:
                return _load(str(self._decode), data)
            values = torch.empty(span.shape, dtype=span.dtype)
            np.copyto(_bytes_of(values), data[span.start : span.start + span.nbytes])
        except MissingDependencyError:
            raise
        except Exception as error:
            raise CorruptDataError(f"sample {id_!r}: its {data.size} bytes cannot be decoded: {error}") from error
        return values


class SampleLoader:
    """Batches ``(X, y)`` of a `SampleSet`; iterate over it once per epoch. Takes the options of PyTorch's DataLoader.

    Parameters
    ----------
    samples
        The set.
    batch_size, shuffle, drop_last
        As in PyTorch.
    num_workers
        Threads that fetch and decode.
    prefetch
        Batches under way besides the consumer's; None takes enough for `in_flight` samples.
    in_flight
        Samples under way at a time at least; more hide the latency of an object store.
    seed
        The order depends on (seed, epoch) and nothing else.

    Raises
    ------
    PlanError
        An option that cannot be carried out.
    """

    def __init__(
        self,
        samples: SampleSet,
        batch_size: int = 1,
        shuffle: bool = False,
        *,
        num_workers: int = 4,
        drop_last: bool = False,
        prefetch: int | None = None,
        in_flight: int = 64,
        seed: int = 0,
    ) -> None:
        least = {
            "batch_size": batch_size,
            "num_workers": num_workers,
            "prefetch": prefetch or 1,
            "in_flight": in_flight,
        }
        wrong = [f"{name}={value}" for name, value in least.items() if value < 1]
        if wrong or seed < 0:
            raise PlanError(f"{', '.join(wrong) or f'seed={seed}'}: expected at least {int(bool(wrong))}.")
        self.samples = samples
        self.batch_size, self.drop_last, self.shuffle, self.seed = batch_size, drop_last, shuffle, seed
        self._n_threads = max(num_workers, in_flight if samples.is_remote else num_workers)
        self._prefetch = prefetch or max(2, -(-in_flight // batch_size))
        self._epoch, self._step = 0, 0
        self._buffers = BufferPool(self._prefetch + 1)

    def __len__(self) -> int:
        """Batches of an epoch."""
        n = len(self.samples)
        return n // self.batch_size if self.drop_last else -(-n // self.batch_size)

    def set_epoch(self, epoch: int) -> None:
        """Let the next iteration be the beginning of `epoch`."""
        self._epoch, self._step = epoch, 0

    def state_dict(self) -> dict[str, int]:
        """Return the place after the last batch handed over."""
        return {"epoch": self._epoch, "step": self._step, "seed": self.seed, "n": len(self.samples)}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Let the next iteration go on after the batches of a state."""
        mine = {"seed": self.seed, "n": len(self.samples)}
        differing = [name for name, value in mine.items() if state[name] != value]
        if differing:
            name = differing[0]
            raise PlanError(
                f"state: {name}={state[name]}, and this loader has {mine[name]}; open it as the one before."
            )
        self._epoch, self._step = state["epoch"], state["step"]

    def order(self, epoch: int) -> NDArray[np.int64]:
        """Return the numbers of the samples of an epoch, in order."""
        numbers = np.arange(len(self.samples), dtype=np.int64)
        return (
            Permutation(numbers.size, self.seed, epoch, _PURPOSE)[numbers] if self.shuffle and numbers.size else numbers
        )

    def __iter__(self) -> Iterator[tuple[Any, Any]]:
        """Hand over the batches that are left of an epoch, in order; then the next iteration is the next epoch."""
        order = self.order(self._epoch)
        batches = iter(range(self._step, len(self)))
        under_way: deque[_Batch] = deque()
        pool = ThreadPoolExecutor(self._n_threads, thread_name_prefix="gpuload-samples")
        try:
            while True:
                while len(under_way) <= self._prefetch and (number := next(batches, None)) is not None:
                    part = order[number * self.batch_size : (number + 1) * self.batch_size]
                    under_way.append(_Batch(self.samples, part.tolist(), pool, self._buffers))
                if not under_way:
                    break
                ready = under_way[0].result()
                under_way.popleft()
                self._step += 1
                yield ready
                del ready
            self._epoch, self._step = self._epoch + 1, 0
        finally:
            for batch in under_way:
                batch.cancel()
            pool.shutdown(cancel_futures=True)


class _Batch:
    """A batch on its way; the first of its samples to arrive says what memory it needs."""

    def __init__(self, samples: SampleSet, indices: list[int], pool: ThreadPoolExecutor, buffers: BufferPool) -> None:
        self._samples, self._buffers = samples, buffers
        self._ids = [samples.ids[i] for i in indices]
        self._lock = threading.Lock()
        self._form: Span | None = None
        self._memory: torch.Tensor | None = None
        self._futures: list[Future[Any]] = [pool.submit(self._read, row, id_) for row, id_ in enumerate(self._ids)]

    def result(self) -> tuple[Any, Any]:
        """Wait for all samples; return (X, y)."""
        whole = [future.result() for future in self._futures]
        labels = default_collate([self._samples.label(id_) for id_ in self._ids])
        memory = self._memory
        if memory is not None and all(sample is None for sample in whole):
            return memory, labels
        if memory is not None:  # some were described otherwise
            whole = [memory[row] if sample is None else sample for row, sample in enumerate(whole)]
        return default_collate(whole), labels

    def cancel(self) -> None:
        """Let be what has not begun."""
        for future in self._futures:
            future.cancel()

    def _read(self, row: int, id_: Any) -> Any:
        """Read a sample into its row and return None; or return it, where it has another form than the batch."""
        data = self._samples.fetch(id_)
        try:
            span = self._samples.span(data)
        except CorruptDataError:
            span = None  # it is told below, with its ID
        if span is None:
            return self._samples.decode(id_, data)
        with self._lock:
            if self._memory is None:
                self._form, n = span, len(self._ids)
                raw = torch.from_numpy(self._buffers.take(max(1, n * span.nbytes)))[: n * span.nbytes]
                self._memory = raw.view(span.dtype).reshape(n, *span.shape)
            memory, form = self._memory, self._form
        if form is None or (span.dtype, span.shape) != (form.dtype, form.shape):
            return self._samples.decode(id_, data)
        np.copyto(_bytes_of(memory[row]), data[span.start : span.start + span.nbytes])
        return None


class _Forms:
    """Descriptions of tensors that were seen, and what they say; only the same bytes are taken for the same."""

    def __init__(self, decode: str) -> None:
        self._decode = decode
        self._known: dict[bytes, tuple[torch.dtype, tuple[int, ...], int, bool]] = {}

    def find(self, data: NDArray[np.uint8]) -> Span | None:
        """Return where the values of a file's tensor lie, or None where its own library has to read it."""
        if self._decode == "bytes":
            return Span(0, data.size, torch.uint8, (data.size,))
        described = getattr(self, f"_describe_{self._decode}")(data)
        if described is None:
            return None
        header, start = described
        if header not in self._known and not self._learn(header, start, data):
            return None
        dtype, shape, nbytes, has_sum = self._known[header]
        if start + nbytes > data.size:
            return None
        if has_sum and not _pt_sum_is_right(data, start, nbytes):
            raise CorruptDataError("the sum of its values is not the one beside them")
        return Span(start, nbytes, dtype, shape)

    def _learn(self, header: bytes, start: int, data: NDArray[np.uint8]) -> bool:
        """Let the format's library read a file; return whether its values are the bytes from `start` on."""
        try:
            values = _load(self._decode, data)
        except Exception:  # noqa: BLE001  (it will be said where the sample is read)
            return False
        if not isinstance(values, torch.Tensor) or not values.is_contiguous() or values.is_sparse:
            return False
        raw = _bytes_of(values)
        if not np.array_equal(raw, data[start : start + raw.size]):
            return False
        has_sum = self._decode == "pt" and _pt_sum_is_right(data, start, raw.size)  # torch can be told to write none
        self._known[header] = (values.dtype, tuple(values.shape), raw.size, has_sum)
        return True

    @staticmethod
    def _describe_npy(data: NDArray[np.uint8]) -> tuple[bytes, int] | None:
        if data.size < 12:
            return None
        is_long = data[6] > 1
        length = int(data[8:12].view("<u4")[0]) + 12 if is_long else int(data[8:10].view("<u2")[0]) + 10
        return data[:length].tobytes(), length

    @staticmethod
    def _describe_safetensors(data: NDArray[np.uint8]) -> tuple[bytes, int] | None:
        length = int(data[:8].view("<u8")[0]) + 8 if data.size > 8 else data.size + 1
        return (data[:length].tobytes(), length) if length <= data.size else None

    def _describe_pt(self, data: NDArray[np.uint8]) -> tuple[bytes, int] | None:
        """Return a tensor's pickle and the place of its storage: the first and the fifth entry of a zip file."""
        for header in list(self._known):  # seldom more than one
            (n_pickle,) = struct.unpack("<I", header[:4])
            found = _pt_entry(data, 0, b"/data.pkl")
            storage = _pt_entry(data, int.from_bytes(header[4:12], "little"), b"/data/0")
            if found is not None and storage is not None and data[found : found + n_pickle].tobytes() == header[12:]:
                return header, storage
        try:
            with zipfile.ZipFile(io.BytesIO(data.tobytes())) as file:
                entries = {info.filename.partition("/")[2]: info for info in file.infolist()}
                storages = [name for name in entries if name.startswith("data/")]
                if storages != ["data/0"] or entries["data/0"].compress_type or "data.pkl" not in entries:
                    return None
                pickled, place = file.read(entries["data.pkl"]), entries["data/0"].header_offset
        except (zipfile.BadZipFile, KeyError):
            return None
        start = _pt_entry(data, place, b"/data/0")
        if start is None:
            return None
        return struct.pack("<I", len(pickled)) + place.to_bytes(8, "little") + pickled, start


def _pt_entry(data: NDArray[np.uint8], place: int, name: bytes) -> int | None:
    """Return where the contents of a zip file's entry begin, if an entry of that name begins at `place`."""
    head = data[place : place + 30].tobytes()
    if len(head) < 30 or head[:4] != b"PK\x03\x04":
        return None
    n_name, n_extra = struct.unpack("<HH", head[26:30])
    if not data[place + 30 : place + 30 + n_name].tobytes().endswith(name):
        return None
    return int(place + 30 + n_name + n_extra)


def _pt_sum_is_right(data: NDArray[np.uint8], start: int, nbytes: int) -> bool:
    """Return whether the crc that follows an entry is that of its contents."""
    after = data[start + nbytes : start + nbytes + 8].tobytes()
    return after[:4] == b"PK\x07\x08" and int.from_bytes(after[4:], "little") == zlib.crc32(
        data[start : start + nbytes].data
    )


def _load(decode: str, data: NDArray[np.uint8]) -> Any:
    """Return what a file holds, by its format's own library."""
    if decode == "pt":
        return torch.load(io.BytesIO(data.tobytes()), weights_only=True)
    if decode == "npy":
        return torch.from_numpy(np.load(io.BytesIO(data.tobytes()), allow_pickle=False))
    if decode == "safetensors":
        try:
            from safetensors.torch import load
        except ImportError as error:
            raise MissingDependencyError("safetensors", "decode='safetensors'", "samples") from error
        tensors = list(load(data.tobytes()).values())
        if len(tensors) != 1:
            raise CorruptDataError(f"it holds {len(tensors)} tensors, and one is expected; give decode a function.")
        return tensors[0]
    return torch.from_numpy(data)


def _bytes_of(values: torch.Tensor) -> NDArray[np.uint8]:
    """Return the bytes of a contiguous tensor, as an array over its memory."""
    raw: NDArray[np.uint8] = values.reshape(-1).view(torch.uint8).numpy()
    return raw


class _FolderSource:
    """Files of a folder, read whole."""

    def __init__(self, folder: str) -> None:
        self._folder = folder

    def read(self, key: str) -> NDArray[np.uint8]:
        path = os.path.join(self._folder, key)
        try:
            fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            raise ReadError(f"{path}: cannot be opened: {error.strerror}. Check the ID and the suffix.") from error
        try:
            data = np.empty(os.fstat(fd).st_size, dtype=np.uint8)
            done = 0
            while done < data.size:
                got = os.preadv(fd, [data[done:].data], done)
                if not got:
                    raise ReadError(f"{path}: short read: wanted {data.size} bytes, got {done}.")
                done += got
        finally:
            os.close(fd)
        return data


class _RemoteSource:
    """Objects of a remote, read whole, with patience."""

    def __init__(self, remote: Remote) -> None:
        self._remote = remote

    def read(self, key: str) -> NDArray[np.uint8]:
        for attempt in range(_TRIES):
            try:
                return np.frombuffer(self._get(key), dtype=np.uint8)
            except (BusyError, ConnectionError, TimeoutError):
                if attempt + 1 == _TRIES:
                    raise
                time.sleep(random.uniform(0, 0.1 * 2**attempt))  # noqa: S311
        raise AssertionError

    def _get(self, key: str) -> Any:
        whole = getattr(self._remote, "get_whole", None)
        if whole is not None:
            return whole(key)  # one request instead of two
        found = self._remote.head(key)
        if found is None:
            raise ReadError(f"{self._remote.name}/{key}: no such object. Check the ID and the suffix.")
        return self._remote.get(found, 0, found.nbytes)


def _open_source(source: Remote | str | os.PathLike[str]) -> _FolderSource | _RemoteSource:
    if not isinstance(source, (str, os.PathLike)):
        return _RemoteSource(source)
    if "://" in os.fspath(source):
        return _RemoteSource(open_remote(source))
    if not os.path.isdir(source):
        raise ReadError(f"{os.fspath(source)}: no such folder. Check the path.")
    return _FolderSource(os.fspath(source))
