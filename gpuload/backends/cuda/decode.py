"""From stored chunks in device memory to rows of a resident: what is launched, in which order, and what it found.

A part of a read is decoded by some launches for all its chunks together: compressed payloads are moved to aligned
slots, inflated by nvCOMP, verified, unshuffled, and the wanted pieces copied into the resident with conversion. Nothing
here waits for the device: an `Outcome` tells, once the stream is past it, which chunks need another look.

What the device has no decoder for is decoded on the host, chunk by chunk, and uploaded; so is a chunk for which a
filter was skipped in writing.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from gpuload.backends import codecs
from gpuload.backends.damage import corrupt, reason
from gpuload.backends.reading import short_read

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from gpuload.backends.cuda.device import Device
    from gpuload.backends.cuda.memory import DevicePool
    from gpuload.backends.cuda.nvcomp import Nvcomp
    from gpuload.layout import ArrayLayout
    from gpuload.types import ArrayRead

SLOT = 16
"""Bytes to which payloads and decoded chunks are aligned: what every decoder of nvCOMP asks for."""

N_THREADS = 256
N_LZF_THREADS = 32

_ALGORITHMS = {"deflate": "deflate", "zstd": "zstd", "lzf": "lzf"}
"""HDF5's filters that the device undoes, and by what: nvCOMP's algorithms, and a kernel for LZF."""

_ZLIB_HEAD, _ZLIB_TAIL, _FLETCHER_TAIL = 2, 4, 4

_log = logging.getLogger("gpuload")


@dataclass(frozen=True, slots=True)
class Steps:
    """How a layout's chunks are decoded on the device.

    Attributes
    ----------
    codec
        A value of `_ALGORITHMS`, or None where bytes are stored as they are.
    is_shuffled, has_fletcher
        Whether bytes are shuffled; whether a fletcher32 follows the chunk.
    """

    codec: str | None
    is_shuffled: bool
    has_fletcher: bool


def steps_of(layout: ArrayLayout) -> Steps | None:
    """Return how the device decodes a layout's chunks, or None where the host must."""
    names = [f.name for f in layout.filters]
    shuffles = [f for f in layout.filters if f.name == "shuffle"]
    if any(f.values not in ((), (layout.dtype.itemsize,)) for f in shuffles):
        return None
    found = [name for name in names if name in _ALGORITHMS]
    if len(found) > 1 or names != [n for n in ("shuffle", *found, "fletcher32") if n in names]:
        return None
    return Steps(_ALGORITHMS[found[0]] if found else None, "shuffle" in names, "fletcher32" in names)


@dataclass(slots=True, eq=False)
class Outcome:
    """What the launches for a part of a read found; valid once the stream is past them.

    Attributes
    ----------
    read
        Of which the part is.
    reports
        Pairs: numbers of chunks of the read, and a code of the kernels for each (int32, 0 = good).
    inflated
        Where nvCOMP was used: numbers of chunks, its status and what it produced for each, and the bytes wanted.
    is_rounded
        One int32 per launch that converts values: whether float32 rounds an integer.
    verified
        Layout's numbers of the chunks whose checksums are verified, if nothing bad is reported.
    kept
        Chunks of the read that are copied into the cache, and their places there.
    held
        Page-locked and device memory that must live so long.
    """

    read: ArrayRead
    reports: list[tuple[NDArray[np.int64], NDArray[np.int32]]] = field(default_factory=list)
    inflated: tuple[NDArray[np.int64], NDArray[np.int32], NDArray[np.int64], int] | None = None
    is_rounded: list[NDArray[np.int32]] = field(default_factory=list)
    verified: NDArray[np.int64] | None = None
    kept: tuple[NDArray[np.int64], NDArray[np.int64]] | None = None
    held: list[Any] = field(default_factory=list)

    def suspects(self) -> list[int]:
        """Return the chunks of the read that the device could not decode, or found wrong."""
        found: set[int] = set()
        for numbers, codes in self.reports:
            found.update(numbers[codes != 0].tolist())
        if self.inflated is not None:
            numbers, statuses, nbytes, wanted = self.inflated
            found.update(numbers[(statuses != 0) | (nbytes != wanted)].tolist())
        return sorted(found)


class _Packed:
    """Small host arrays on their way to the device in one copy."""

    def __init__(self) -> None:
        self._parts: list[tuple[str, NDArray[Any], int]] = []
        self._nbytes = 0

    def add(self, name: str, array: NDArray[Any]) -> None:
        self._parts.append((name, np.ascontiguousarray(array), self._nbytes))
        self._nbytes += _slots(array.nbytes)

    def upload(self, device: Device, pool: DevicePool, stream: Any, held: list[Any]) -> dict[str, Any]:
        """Return the arrays on the device, by name."""
        host = device.pinned(self._nbytes)
        memory, lease = pool.lease(self._nbytes, stream)
        for _, array, at in self._parts:
            host[at : at + array.nbytes] = array.reshape(-1).view(np.uint8)
        device.upload(host, memory, stream)
        held += [host, lease]
        return {name: device.typed(memory[at:], a.dtype, a.shape) for name, a, at in self._parts}


@dataclass(frozen=True, slots=True, eq=False)
class _Part:
    """Chunks of a read that are decoded together, and where everything is."""

    read: ArrayRead
    numbers: NDArray[np.int64]
    out: Any
    stream: Any
    outcome: Outcome


class Decoder:
    """Launches the decoding of parts of reads.

    Parameters
    ----------
    device, nvcomp
        Where, and by which library.
    pool
        Scratch memory.
    """

    def __init__(self, device: Device, nvcomp: Nvcomp, pool: DevicePool) -> None:
        self._device = device
        self._nvcomp = nvcomp
        self._pool = pool
        self._said: set[str] = set()

    def enqueue(
        self,
        read: ArrayRead,
        numbers: NDArray[np.int64],
        place: NDArray[np.int64],
        arena: Any,
        out: Any,
        stream: Any,
        *,
        verify: str,
    ) -> Outcome:
        """Give the decoding of some chunks to a stream.

        Parameters
        ----------
        read, numbers : (n,) int64
            Which chunks of which read.
        place : (n,) int64
            Where the bytes of each lie in the arena.
        arena : uint8
            Stored bytes, in device memory; they must be there for the stream.
        out
            The resident's array that the read fills, flat.
        stream
            On which all is launched.
        verify
            ``"once"``: where they were not before; ``"always"`` or ``"never"``.
        """
        steps = steps_of(read.layout)
        if steps is None:
            self._say_host_decodes(read.layout)
        outcome = Outcome(read)
        nbytes = read.chunk_nbytes[numbers]
        is_absent = nbytes == 0
        payload = nbytes - (_FLETCHER_TAIL if steps is not None and steps.has_fletcher else 0)
        if steps is not None and steps.codec == "deflate":
            payload = payload - _ZLIB_HEAD - _ZLIB_TAIL
        can_device = ~is_absent & (read.chunk_mask[numbers] == 0) & (payload > 0)
        if steps is None:
            can_device[:] = False
        elif steps.codec is None and not read.layout.is_raw:
            can_device &= payload == _full(read.layout)
        if steps is not None and can_device.any():
            part = _Part(read, numbers[can_device], out, stream, outcome)
            self._on_device(part, steps, place[can_device], payload[can_device], arena, verify=verify)
        if is_absent.any():
            part = _Part(read, numbers[is_absent], out, stream, outcome)
            self._copy_pieces(part, arena, np.full(part.numbers.size, -1))
        on_host = ~is_absent & ~can_device
        if on_host.any():
            self._from_host(_Part(read, numbers[on_host], out, stream, outcome))
        return outcome

    def move(
        self,
        outcome: Outcome,
        source: NDArray[np.int64],
        nbytes: NDArray[np.int64],
        place: NDArray[np.int64],
        arena: Any,
        to: Any,
        stream: Any,
    ) -> None:
        """Launch the copy of byte ranges of an arena to places, multiples of `SLOT`, of other device memory."""
        packed = _Packed()
        packed.add("source", source)
        packed.add("nbytes", nbytes)
        packed.add("place", place)
        on = packed.upload(self._device, self._pool, stream, outcome.held)
        args = (arena, on["source"], on["nbytes"], on["place"], np.int64(source.size), to)
        self._device.launch("gather_payloads", source.size, N_THREADS, args, stream)

    def retry(self, read: ArrayRead, chunk: int, out: Any, stream: Any) -> None:
        """Decode a chunk on the host, upload it and wait for it; CorruptDataError where it is bad there too."""
        outcome = Outcome(read)
        self._from_host(_Part(read, np.array([chunk]), out, stream, outcome))
        self._device.wait(self._device.record(stream))
        for _, codes in outcome.reports:
            if codes[0] != 0:
                raise corrupt(read, chunk, reason(int(codes[0])))

    def _on_device(
        self,
        part: _Part,
        steps: Steps,
        place: NDArray[np.int64],
        payload: NDArray[np.int64],
        arena: Any,
        *,
        verify: str,
    ) -> None:
        """Decode chunks whose stored bytes lie in the arena, and copy their pieces."""
        layout, stream, held, n = part.read.layout, part.stream, part.outcome.held, part.numbers.size
        if steps.codec is None and not (steps.is_shuffled or steps.has_fletcher):
            self._copy_pieces(part, arena, place)
            return
        device, full = self._device, _full(layout)
        ids = part.read.chunk_id[part.numbers]
        is_due = (layout.verified[ids] == 0) & (verify != "never") | (verify == "always")
        head = _ZLIB_HEAD if steps.codec == "deflate" else 0
        start = np.arange(n, dtype=np.int64) * _slots(full)
        slots = _slots(payload)
        slot = np.cumsum(slots) - slots if steps.codec else start
        decoded = self._scratch(n * _slots(full), part)
        compressed = self._scratch(int(slot[-1] + slots[-1]), part) if steps.codec else decoded
        packed = _Packed()
        packed.add("source", place + head)
        packed.add("payload", payload)
        packed.add("slot", slot)
        packed.add("start", start)
        packed.add("full", np.full(n, full, dtype=np.int64))
        packed.add("trailer", np.where(is_due, place + head + payload, -1))
        packed.add("due_place", place[is_due])
        packed.add("due_nbytes", part.read.chunk_nbytes[part.numbers[is_due]] - _FLETCHER_TAIL)
        packed.add("slot_address", slot + device.address(compressed))
        packed.add("start_address", start + device.address(decoded))
        on = packed.upload(device, self._pool, stream, held)
        codes = self._codes(n, part)

        def launch(kernel: str, n_threads: int, *args: Any) -> None:
            device.launch(kernel, n, n_threads, args, stream)

        if steps.has_fletcher and is_due.any():
            self._check_fletcher(part, part.numbers[is_due], arena, on)
        launch("gather_payloads", N_THREADS, arena, on["source"], on["payload"], on["slot"], np.int64(n), compressed)
        if steps.codec == "lzf":
            sizes = (on["slot"], on["payload"], decoded, on["start"], on["full"])
            launch("decode_lzf", N_LZF_THREADS, compressed, *sizes, np.int64(n), codes)
        elif steps.codec is not None:
            self._inflate(part, steps.codec, on, full)
        if steps.codec == "deflate" and is_due.any():
            ranges = (on["start"], on["full"], arena, on["trailer"])
            launch("check_adler32", N_THREADS, decoded, *ranges, np.int64(n), codes)
        if steps.is_shuffled:
            plain = self._scratch(n * _slots(full), part)
            itemsize = np.int32(layout.dtype.itemsize)
            launch("unshuffle", N_THREADS, decoded, plain, on["start"], on["full"], itemsize, np.int64(n))
            decoded = plain
        self._report(part, codes)
        if steps.codec == "deflate" or steps.has_fletcher:
            part.outcome.verified = ids[is_due]
        self._copy_pieces(part, decoded, start)

    def _check_fletcher(self, part: _Part, numbers: NDArray[np.int64], arena: Any, on: dict[str, Any]) -> None:
        """Launch the verification of some chunks as they are stored."""
        due = _Part(part.read, numbers, part.out, part.stream, part.outcome)
        codes = self._codes(numbers.size, due)
        args = (arena, on["due_place"], on["due_nbytes"], np.int64(numbers.size), codes)
        self._device.launch("check_fletcher32", numbers.size, N_THREADS, args, part.stream)
        self._report(due, codes)

    def _inflate(self, part: _Part, codec: str, on: dict[str, Any], full: int) -> None:
        """Let nvCOMP decode all payloads."""
        device, n = self._device, part.numbers.size
        temp_nbytes = self._nvcomp.temp_nbytes(codec, n, full, n * full)
        temp = self._scratch(temp_nbytes, part)
        produced = device.typed(self._scratch(8 * n, part), np.int64, (n,))
        statuses = self._codes(n, part)
        self._nvcomp.decode(
            codec,
            in_ptrs=device.address(on["slot_address"]),
            in_nbytes=device.address(on["payload"]),
            out_capacity=device.address(on["full"]),
            out_nbytes=device.address(produced),
            out_ptrs=device.address(on["start_address"]),
            status=device.address(statuses),
            temp_ptr=device.address(temp),
            temp_nbytes=temp_nbytes,
            n=n,
            stream=device.stream_number(part.stream),
        )
        host = device.pinned(12 * n)
        nbytes, found = host[: 8 * n].view(np.int64), host[8 * n :].view(np.int32)
        device.download(produced, nbytes, part.stream)
        device.download(statuses, found, part.stream)
        part.outcome.inflated = part.numbers, found, nbytes, full

    def _from_host(self, part: _Part) -> None:
        """Read and decode chunks on the host, upload them and copy their pieces."""
        device, layout = self._device, part.read.layout
        stride = _slots(_full(layout))
        host = device.pinned(part.numbers.size * stride)
        for i, chunk in enumerate(part.numbers.tolist()):
            plain = decode_on_host(part.read, chunk)
            host[i * stride : i * stride + plain.size] = plain
        decoded = self._scratch(host.nbytes, part)
        device.upload(host, decoded, part.stream)
        part.outcome.held.append(host)
        self._copy_pieces(part, decoded, np.arange(part.numbers.size, dtype=np.int64) * stride)

    def _copy_pieces(self, part: _Part, decoded: Any, base: NDArray[np.int64]) -> None:
        """Launch the copy of the pieces of chunks that lie decoded at `base`; -1: never written."""
        read, layout, numbers = part.read, part.read.layout, part.numbers
        lo, hi = read.chunk_pieces[numbers], read.chunk_pieces[numbers + 1]
        count = hi - lo
        pieces = np.repeat(lo - (np.cumsum(count) - count), count) + np.arange(int(count.sum()))
        packed = _Packed()
        packed.add("base", np.repeat(base, count))
        packed.add("src", read.piece_src[pieces])
        packed.add("dest", read.piece_dest[pieces])
        packed.add("width", read.piece_width[pieces])
        packed.add("rows", read.piece_rows[pieces])
        packed.add("chunk", np.repeat(np.arange(numbers.size, dtype=np.int32), count))
        on = packed.upload(self._device, self._pool, part.stream, part.outcome.held)
        codes = self._codes(numbers.size, part)
        rounded = self._codes(1, part)
        self._device.launch(
            f"copy_pieces_{kernel_type(layout.dtype)}_{'i4' if read.limit >= 0 else 'f4'}",
            pieces.size,
            N_THREADS,
            (
                decoded,
                *(on[name] for name in ("base", "src", "dest", "width", "rows", "chunk")),
                np.int64(layout.src_stride),
                np.int64(layout.dest_stride),
                np.int64(read.limit),
                np.float64(layout.fill_value),
                np.int64(pieces.size),
                part.out,
                codes,
                rounded,
            ),
            part.stream,
        )
        self._report(part, codes)
        is_rounded = self._device.pinned(4).view(np.int32)
        self._device.download(rounded, is_rounded, part.stream)
        part.outcome.is_rounded.append(is_rounded)

    def _codes(self, n: int, part: _Part) -> Any:
        """Return n zeros, int32."""
        codes = self._device.typed(self._scratch(4 * n, part), np.int32, (n,))
        self._device.fill(codes, 0, part.stream)
        return codes

    def _scratch(self, nbytes: int, part: _Part) -> Any:
        memory, lease = self._pool.lease(nbytes, part.stream)
        part.outcome.held.append(lease)
        return memory

    def _report(self, part: _Part, codes: Any) -> None:
        """Have codes brought to the host."""
        host = self._device.pinned(4 * part.numbers.size).view(np.int32)
        self._device.download(codes, host, part.stream)
        part.outcome.reports.append((part.numbers, host))

    def _say_host_decodes(self, layout: ArrayLayout) -> None:
        how = "+".join(f.name for f in layout.filters)
        if how not in self._said:
            self._said.add(how)
            _log.warning(
                "%s: %s is stored as %s, which the GPU has no decoder for; the host decodes it, which is slower",
                layout.source.name,
                layout.name,
                how,
            )


def decode_on_host(read: ArrayRead, chunk: int) -> NDArray[np.uint8]:
    """Read a chunk again and decode it on the host; ReadError or CorruptDataError where that fails."""
    layout, nbytes = read.layout, int(read.chunk_nbytes[chunk])
    stored = np.empty(nbytes, dtype=np.uint8)
    got = layout.source.read_into(stored, int(read.chunk_offset[chunk]))
    if got < nbytes:
        raise short_read(layout.source, layout.name, int(read.chunk_offset[chunk]), nbytes, got)
    wanted = nbytes if layout.is_raw else _full(layout)
    try:
        return codecs.decode(layout.filters, int(read.chunk_mask[chunk]), stored, wanted, layout.dtype.itemsize)
    except codecs.DecodeError as error:
        raise corrupt(read, chunk, str(error)) from error


def kernel_type(dtype: np.dtype[Any]) -> str:
    """Return what the kernels' names call a stored type: kind and size, with "be_" before where it is big-endian."""
    name = "bool" if dtype.kind == "b" else f"{dtype.kind}{dtype.itemsize}"
    return name if dtype.isnative else f"be_{name}"


def _full(layout: ArrayLayout) -> int:
    return layout.chunk_size * layout.dtype.itemsize


def _slots(nbytes: Any) -> Any:
    """Return sizes rounded up to whole slots."""
    return -(-nbytes // SLOT) * SLOT
