"""Decode stored chunks in device memory into rows of a resident: the launches, their order and their outcome.

Each part of a read is decoded by a few launches for all its chunks together: compressed payloads are moved to aligned
slots, decompressed by nvCOMP, verified, unshuffled, and the wanted pieces copied into the resident with conversion.
Nothing here waits for the device: once the stream has passed, an `Outcome` tells which chunks need another look.

What the device cannot decode is left to the host (`on_host`): arrays that it has no decoder for, chunks for which the
writer skipped a filter, and chunks that it found bad.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from gpuload.backends.cuda.containers import ROWS
from gpuload.backends.cuda.steps import CHECKSUM_NBYTES, chunk_nbytes, steps_of
from gpuload.backends.cuda.work import N_THREADS, Work, kernel_type, slots
from gpuload.backends.native.chunks import BAD_CRC32C
from gpuload.backends.native.inflate import BAD_CHECKSUM
from gpuload.types import consecutive

if TYPE_CHECKING:
    from collections.abc import Sequence
    from concurrent.futures import Future

    from numpy.typing import NDArray

    from gpuload.backends.cuda.cache import Kept, Places
    from gpuload.backends.cuda.containers import Cut
    from gpuload.backends.cuda.device import Device
    from gpuload.backends.cuda.nvcomp import Nvcomp
    from gpuload.backends.cuda.steps import Steps
    from gpuload.backends.cuda.work import Lane
    from gpuload.layout import ArrayLayout
    from gpuload.types import ArrayRead

N_LZF_THREADS = N_ZSTD_THREADS = 32

_GZIP_CRC = np.int64(0xEDB88320), np.int32(BAD_CHECKSUM)
_CRC32C = np.int64(0x82F63B78), np.int32(BAD_CRC32C)
"""Reflected polynomial, and the status code of a mismatch."""


@dataclass(slots=True, eq=False)
class Outcome:
    """What the launches for a part of a read found; valid once the stream has passed them.

    Attributes
    ----------
    reports
        Pairs: chunk numbers within the read, and the kernels' status code for each (int32, 0 = good).
    is_rounded
        Pairs: chunk numbers within the read, and whether an integer of each was rounded (int32); meaningless for
        suspects.
    verified
        Layout's chunk numbers whose checksums are verified, provided that nothing bad is reported.
    kept
        Chunks of the read that are copied into caches too.
    on_host
        Parts that the host decodes; each is in the resident once its future is done.
    held
        Page-locked memory that must outlive the launches.
    """

    read: ArrayRead
    reports: list[tuple[NDArray[np.int64], NDArray[np.int32]]] = field(default_factory=list)
    is_rounded: list[tuple[NDArray[np.int64], NDArray[np.int32]]] = field(default_factory=list)
    verified: NDArray[np.int64] | None = None
    kept: Sequence[Kept] = ()
    on_host: list[Future[None]] = field(default_factory=list)
    held: list[Any] = field(default_factory=list)

    def suspects(self) -> NDArray[np.int64]:
        """Return the chunks of the read that the device could not decode, or found bad; ascending."""
        found = [numbers[codes != 0] for numbers, codes in self.reports]
        return np.unique(np.concatenate(found)) if found else np.empty(0, dtype=np.int64)

    def good(self, suspects: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the chunks of the read that the device decoded: all whose pieces it copied, but the suspects."""
        copied = [numbers for numbers, _ in self.is_rounded]
        return np.setdiff1d(np.concatenate(copied), suspects) if copied else np.empty(0, dtype=np.int64)

    def rounds(self, suspects: NDArray[np.int64]) -> bool:
        """Return whether an integer was rounded in a chunk other than the suspects."""
        return any((codes[~np.isin(numbers, suspects)] != 0).any() for numbers, codes in self.is_rounded)


@dataclass(frozen=True, slots=True, eq=False)
class _Part:
    """Chunks of a read that are decoded together, and where their data are."""

    read: ArrayRead
    numbers: NDArray[np.int64]
    out: Any
    work: Work
    outcome: Outcome

    def of(self, which: NDArray[np.bool_]) -> _Part:
        """Return the part restricted to some of its chunks."""
        return _Part(self.read, self.numbers[which], self.out, self.work, self.outcome)


class Decoder:
    """Launch the decoding of parts of reads."""

    def __init__(self, device: Device, nvcomp: Nvcomp) -> None:
        self._device = device
        self._nvcomp = nvcomp
        self._known: dict[int, tuple[ArrayLayout, Steps | None]] = {}  # keyed by id of the layout, which is kept alive

    def steps(self, layout: ArrayLayout) -> Steps | None:
        """Return how the device decodes a layout's chunks, or None if the host must."""
        known = self._known.get(id(layout))
        if known is None:
            known = self._known[id(layout)] = layout, steps_of(layout)
        return known[1]

    def decodes(self, read: ArrayRead, numbers: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Return which chunks of a read the device decodes: all with bytes, unless their writer skipped a filter."""
        steps = self.steps(read.layout)
        assert steps is not None  # noqa: S101 - narrows the type
        nbytes = read.chunk_nbytes[numbers]
        can: NDArray[np.bool_] = (nbytes > steps.around) & (nbytes > 0) & (read.chunk_mask[numbers] == 0)
        if steps.codec is None and not read.layout.is_raw:
            can &= nbytes - steps.around == read.layout.decoded_nbytes(read.chunk_id[numbers])
        return can

    def enqueue(
        self,
        read: ArrayRead,
        numbers: NDArray[np.int64],
        place: NDArray[np.int64],
        arena: Any,
        out: Any,
        lane: Lane,
        *,
        verify: str,
        kept: Sequence[Kept] = (),
    ) -> tuple[Outcome, NDArray[np.int64]]:
        """Enqueue the decoding of chunks on a lane's stream; return the outcome, and the chunks left to the host.

        Parameters
        ----------
        read, numbers : (n,) int64
            The read, and its chunks to decode.
        place : (n,) int64
            Offset of each chunk's bytes in the arena.
        arena : uint8
            Stored bytes, in device memory; they must be ready on the stream.
        verify
            ``"once"``: verify chunks not verified before; ``"always"`` or ``"never"``.
        kept
            Chunks, which `decodes` says it decodes, that have room in caches: they are copied there, decoded or as
            stored.
        """
        steps = self.steps(read.layout)
        assert steps is not None  # noqa: S101 - narrows the type
        whole = self._part(read, numbers, out, lane, kept)
        is_absent = read.chunk_nbytes[numbers] == 0
        payload = read.chunk_nbytes[numbers] - steps.around
        can_device = self.decodes(read, numbers)
        self._keep_stored(whole, place, arena)
        if can_device.any():
            part = whole.of(can_device)
            self._deliver(
                part, *self._on_device(part, steps, place[can_device], payload[can_device], arena, verify=verify)
            )
        self._fill_pieces(whole.of(is_absent))
        return whole.outcome, numbers[~is_absent & ~can_device]

    def enqueue_narrow(self, read: ArrayRead, cached: Places, cache: Any, out: Any, lane: Lane) -> Outcome:
        """Enqueue the copy of chunks that the cache holds decoded, all in elements of one size; return the outcome."""
        part = self._part(read, cached.numbers, out, lane)
        self._copy_pieces(part, cache, cached.place, np.dtype(f"u{int(cached.itemsize[0])}"))
        return part.outcome

    def _part(
        self, read: ArrayRead, numbers: NDArray[np.int64], out: Any, lane: Lane, kept: Sequence[Kept] = ()
    ) -> _Part:
        outcome = Outcome(read, kept=kept)
        work = Work(self._device, self._nvcomp, lane, outcome.held)
        return _Part(read, numbers, out, work, outcome)

    def _on_device(
        self,
        part: _Part,
        steps: Steps,
        place: NDArray[np.int64],
        payload: NDArray[np.int64],
        arena: Any,
        *,
        verify: str,
    ) -> tuple[Any, NDArray[np.int64]]:
        """Decode chunks whose stored bytes are in the arena; return the memory that they are in, and where."""
        layout, work, n = part.read.layout, part.work, part.numbers.size
        if steps.codec is None and not (steps.is_shuffled or steps.has_checksum):
            return arena, place
        ids = part.read.chunk_id[part.numbers]
        full = layout.decoded_nbytes(ids)
        room = slots(full)
        start = np.cumsum(room) - room
        total = int(start[-1] + room[-1])
        is_due = (layout.verified[ids] == 0) & (verify != "never") | (verify == "always")
        on = work.upload(
            place=place,
            source=place + steps.head,
            payload=payload,
            start=start,
            full=full,
            trailer=np.where(is_due, place + steps.head + payload, -1),
        )
        codes = work.codes(n)
        if (steps.has_fletcher or steps.has_crc32c) and is_due.any():
            self._check_stored(part.of(is_due), steps, place[is_due], arena)
        if steps.cut is not None:
            decoded = self._from_containers(part, steps.cut, arena, on, codes, is_verified=verify != "never")
        else:
            decoded = self._from_payloads(part, steps, payload, arena, on, codes, start, full)
        if steps.codec in ("deflate", "gzip") and is_due.any():
            ranges = (on["start"], on["full"], arena, on["trailer"])
            kernel, crc = ("check_adler32", ()) if steps.codec == "deflate" else ("check_crc", _GZIP_CRC)
            work.launch(kernel, n, decoded, *ranges, *crc, np.int64(n), codes)
        elif steps.codec == "zstd" and is_due.any():
            frames = (arena, on["place"], on["trailer"])
            sizes = (on["start"], on["full"])
            work.launch("check_zstd", n, decoded, *sizes, *frames, np.int64(n), codes, n_threads=N_ZSTD_THREADS)
        if steps.is_shuffled:
            plain, itemsize = work.scratch(total), np.int32(layout.dtype.itemsize)
            work.launch("unshuffle", n, decoded, plain, on["start"], on["full"], itemsize, np.int64(n))
            decoded = plain
        self._report(part, codes)
        if steps.has_checksum:
            part.outcome.verified = ids[is_due]
        return decoded, start

    def _from_payloads(
        self,
        part: _Part,
        steps: Steps,
        payload: NDArray[np.int64],
        arena: Any,
        on: dict[str, Any],
        codes: Any,
        start: NDArray[np.int64],
        full: NDArray[np.int64],
    ) -> Any:
        """Launch the decoding of chunks of one stream each, `full` bytes long; return their offsets, from `start` on.

        For lz4 and gzip, whose streams state their decoded size, all chunks of a layout have the same size.
        """
        work, n, each = part.work, part.numbers.size, np.int64(chunk_nbytes(part.read.layout))
        decoded = work.scratch(int(start[-1] + slots(full[-1])))
        if steps.codec is None:
            work.launch("gather_payloads", n, arena, on["source"], on["payload"], on["start"], np.int64(n), decoded)
            return decoded
        room = slots(payload)
        slot = np.cumsum(room) - room
        compressed = work.scratch(int(slot[-1] + room[-1]))
        address = self._device.address
        of = work.upload(**{"slot": slot, "in": slot + address(compressed), "out": start + address(decoded)})
        work.launch("gather_payloads", n, arena, on["source"], on["payload"], of["slot"], np.int64(n), compressed)
        if steps.codec == "lzf":
            sizes = (of["slot"], on["payload"], decoded, on["start"], on["full"])
            work.launch("decode_lzf", n, compressed, *sizes, np.int64(n), codes, n_threads=N_LZF_THREADS)
            return decoded
        if steps.codec == "lz4":
            work.launch("check_sizes", -(-n // N_THREADS), arena, on["place"], each, np.int64(n), codes)
        if steps.codec == "deflate":
            work.launch("check_zlib", -(-n // N_THREADS), arena, on["place"], np.int64(n), codes)
        if steps.codec == "gzip":
            frames = (on["place"], on["trailer"], each)
            work.launch("check_gzip", -(-n // N_THREADS), arena, *frames, np.int64(n), codes)
        of |= {"in_nbytes": on["payload"], "room": on["full"]}
        codec = "deflate" if steps.codec == "gzip" else steps.codec  # its frame is checked here, not by nvCOMP
        produced, statuses = work.inflate(codec, n, int(full.max()), int(full.sum()), of=of)
        per_stream = (on["full"], np.int64(1), np.int64(n), codes)
        work.launch("check_streams", -(-n // N_THREADS), statuses, produced, *per_stream)
        return decoded

    def _from_containers(
        self, part: _Part, cut: Cut, arena: Any, on: dict[str, Any], codes: Any, *, is_verified: bool
    ) -> Any:
        """Launch the decoding of chunks of several streams; return their offsets, multiples of a slot."""
        work, n = part.work, part.numbers.size
        n_streams = n * cut.n_streams
        compressed, decoded = (work.scratch(n * cut.slots_nbytes) for _ in range(2))
        known = work.upload(
            head=np.frombuffer(cut.head, dtype=np.uint8), filler=np.frombuffer(cut.filler, dtype=np.uint8)
        )
        table, is_copied = work.numbers(len(ROWS) * n_streams), work.codes(n)
        of = {row: table[i * n_streams : (i + 1) * n_streams] for i, row in enumerate(ROWS)}
        sizes = np.int64(cut.nbytes), np.int64(cut.block_nbytes), np.int64(cut.n_splits)
        filler = known["filler"], np.int64(len(cut.filler))
        how = (*sizes, np.int32(cut.codec == "deflate")) if cut.kind == "blosc" else sizes[:2]
        count, out = np.int64(n_streams), (decoded, compressed, table, is_copied, codes)
        work.launch(
            f"walk_{cut.kind}",
            -(-n * cut.n_blocks // N_THREADS),
            *(arena, on["place"], on["payload"], known["head"], *filler, *how, np.int64(n), *out),
        )
        work.launch("gather_payloads", n_streams, arena, of["source"], of["stored"], of["slot"], count, compressed)
        produced, statuses = work.inflate(cut.codec, n_streams, cut.max_stream_nbytes, n * cut.nbytes, of=of)
        if cut.codec == "deflate" and is_verified:
            ranges = (of["slot"], of["room"], arena, of["trailer"])
            work.launch("check_adler32", n_streams, decoded, *ranges, count, statuses)
        work.launch(
            "check_streams",
            -(-n_streams // N_THREADS),
            *(statuses, produced, of["wanted"], np.int64(cut.n_streams), np.int64(n), codes),
        )
        joined = work.scratch(n * slots(cut.nbytes))
        itemsize = np.int32(cut.itemsize)
        work.launch(
            "join_blocks", n * cut.n_blocks, of["from"], is_copied, *sizes, itemsize, np.int64(n), on["start"], joined
        )
        return joined

    def _check_stored(self, due: _Part, steps: Steps, place: NDArray[np.int64], arena: Any) -> None:
        """Launch the verification of chunks as stored; a crc32c covers a preceding fletcher32 too."""
        work, n = due.work, due.numbers.size
        of_crc = due.read.chunk_nbytes[due.numbers] - CHECKSUM_NBYTES
        of_fletcher = of_crc - steps.has_crc32c * CHECKSUM_NBYTES
        on = work.upload(place=place, of_crc=of_crc, of_fletcher=of_fletcher, trailer=place + of_crc)
        codes = work.codes(n)
        if steps.has_crc32c:
            ranges = (on["place"], on["of_crc"], arena, on["trailer"])
            work.launch("check_crc", n, arena, *ranges, *_CRC32C, np.int64(n), codes)
        if steps.has_fletcher:
            work.launch("check_fletcher32", n, arena, on["place"], on["of_fletcher"], np.int64(n), codes)
        self._report(due, codes)

    def _fill_pieces(self, part: _Part) -> None:
        """Launch the writing of the fill value to the pieces of chunks that were never written."""
        if part.numbers.size:
            self._copy_pieces(part, None, np.full(part.numbers.size, -1))

    def _deliver(self, part: _Part, decoded: Any, start: NDArray[np.int64]) -> None:
        """Launch the copy of decoded chunks into caches, if they are to be kept there so, and of their pieces.

        Their stored bytes are there already, if they have room for those.
        """
        for kept in part.outcome.kept:
            for itemsize in np.unique(kept.reserved.itemsize[kept.reserved.itemsize > 0]).tolist():
                those = kept.reserved.of(kept.reserved.itemsize == itemsize)
                self._keep_narrow(part, kept, those, decoded, start)
        self._copy_pieces(part, decoded, start)

    def _keep_narrow(self, part: _Part, kept: Kept, those: Places, decoded: Any, start: NDArray[np.int64]) -> None:
        """Launch the copy of decoded chunks into a cache, in elements of the size that was reserved for all of them."""
        work, layout, n = part.work, part.read.layout, those.numbers.size
        full = layout.decoded_nbytes(part.read.chunk_id[those.numbers])
        on = work.upload(start=start[np.searchsorted(part.numbers, those.numbers)], full=full, place=those.place)
        needed, name, itemsize = work.codes(n), kernel_type(layout.dtype), int(those.itemsize[0])
        chunks = (decoded, on["start"], on["full"])
        work.launch(f"measure_{name}", n, *chunks, np.int64(n), needed)
        work.launch(f"narrow_{name}_u{itemsize}", n, *chunks, on["place"], needed, np.int64(n), kept.cache.memory)
        kept.narrowed.append((those.numbers, work.download(needed, np.int32)))

    def _keep_stored(self, part: _Part, place: NDArray[np.int64], arena: Any) -> None:
        """Launch the copy of chunks' stored bytes from the arena into caches, where they have room for them."""
        for kept in part.outcome.kept:
            those = kept.reserved.of(kept.reserved.has_room_for_stored)
            n = those.numbers.size
            if n:
                nbytes = part.read.chunk_nbytes[those.numbers]
                source = place[np.searchsorted(part.numbers, those.numbers)]
                on = part.work.upload(source=source, nbytes=nbytes, place=those.place)
                ranges = (arena, on["source"], on["nbytes"], on["place"])
                part.work.launch("gather_payloads", n, *ranges, np.int64(n), kept.cache.memory)

    def _copy_pieces(
        self, part: _Part, decoded: Any, base: NDArray[np.int64], dtype: np.dtype[Any] | None = None
    ) -> None:
        """Launch the copy of the pieces of chunks decoded at `base`; -1: never written, so the fill value.

        Elements are of the layout's type unless another is given.
        """
        read, layout, numbers, work = part.read, part.read.layout, part.numbers, part.work
        lo, hi = read.chunk_pieces[numbers], read.chunk_pieces[numbers + 1]
        count = hi - lo
        pieces = consecutive(lo, count)
        on = work.upload(
            base=np.repeat(base, count),
            src=read.piece_src[pieces],
            dest=read.piece_dest[pieces],
            width=read.piece_width[pieces],
            rows=read.piece_rows[pieces],
            chunk=np.repeat(np.arange(numbers.size, dtype=np.int32), count),
            limit=read.chunk_limit[numbers],
        )
        codes, rounded = work.codes(numbers.size), work.codes(numbers.size)
        work.launch(
            f"copy_pieces_{kernel_type(dtype or layout.dtype)}_{kernel_type(np.dtype(part.out.dtype))}",
            pieces.size,
            decoded,
            *on.values(),
            np.int64(layout.src_stride),
            np.int64(layout.dest_stride),
            np.float64(layout.fill_value),
            np.int64(pieces.size),
            part.out,
            codes,
            rounded,
        )
        self._report(part, codes)
        part.outcome.is_rounded.append((numbers, work.download(rounded, np.int32)))

    def _report(self, part: _Part, codes: Any) -> None:
        """Launch the copy of status codes to the host."""
        part.outcome.reports.append((part.numbers, part.work.download(codes, np.int32)))
