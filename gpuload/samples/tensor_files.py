"""Files of one tensor: find a file's values without deserialising it.

The first file is read with the format's own library, and its description of the tensor is kept, if the values turn out
to be a contiguous range of the file's bytes. A file with an identical description, byte for byte, needs no library.
"""

from __future__ import annotations

import io
import struct
import zipfile
import zlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from gpuload.errors import CorruptDataError, MissingDependencyError

if TYPE_CHECKING:
    from numpy.typing import NDArray

FORMATS = ("pt", "npy", "safetensors", "bytes")

_MOST = 64
"""Descriptions kept; samples of ever new shapes are left to the library, which is faster than searching many."""


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """Location of the values of a file's tensor."""

    start: int
    nbytes: int
    dtype: torch.dtype
    shape: tuple[int, ...]


class Descriptions:
    """Descriptions of tensors that were seen, and what they say; only the same bytes are taken for the same."""

    def __init__(self, decode: str) -> None:
        self._decode = decode
        self._known: dict[bytes, tuple[torch.dtype, tuple[int, ...], int, bool]] = {}

    def find(self, data: NDArray[np.uint8]) -> StoredTensor | None:
        """Return the location of the values of a file's tensor, or None if its own library must read it."""
        if self._decode == "bytes":
            return StoredTensor(0, data.size, torch.uint8, (data.size,))
        describe = {"pt": self._describe_pt, "npy": _describe_npy, "safetensors": _describe_safetensors}[self._decode]
        described = describe(data)
        if described is None:
            return None
        header, start = described
        if header not in self._known and not self._learn(header, start, data):
            return None
        dtype, shape, nbytes, has_sum = self._known[header]
        if start + nbytes > data.size:
            return None
        if has_sum and not _pt_sum_is_right(data, start, nbytes):
            raise CorruptDataError("the sum of its values is not the one stored with them; restore the file")
        return StoredTensor(start, nbytes, dtype, shape)

    def _learn(self, header: bytes, start: int, data: NDArray[np.uint8]) -> bool:
        """Read a file with the format's library; return whether its values are the bytes from `start` on."""
        if len(self._known) >= _MOST:
            return False
        try:
            values = load(self._decode, data)
        except Exception:  # noqa: BLE001 - reported where the sample is read
            return False
        if not isinstance(values, torch.Tensor) or not values.is_contiguous() or values.is_sparse:
            return False
        if self._decode == "pt" and values.storage_offset():
            return False  # its values begin later, whatever bytes are equal to them at the start
        raw = bytes_of(values)
        if not np.array_equal(raw, data[start : start + raw.size]):
            return False
        has_sum = self._decode == "pt" and _pt_sum_is_right(data, start, raw.size)  # torch can be told to write no crc
        self._known[header] = (values.dtype, tuple(values.shape), raw.size, has_sum)
        return True

    def _describe_pt(self, data: NDArray[np.uint8]) -> tuple[bytes, int] | None:
        """Return a tensor's pickle and the location of its storage: the first and the fifth entry of a zip file."""
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
                if "byteorder" in entries and file.read(entries["byteorder"]) != b"little":
                    return None  # zeros are the same bytes in either order
                pickled, place = file.read(entries["data.pkl"]), entries["data/0"].header_offset
        except (zipfile.BadZipFile, KeyError):
            return None
        start = _pt_entry(data, place, b"/data/0")
        if start is None:
            return None
        return struct.pack("<I", len(pickled)) + place.to_bytes(8, "little") + pickled, start


def _describe_npy(data: NDArray[np.uint8]) -> tuple[bytes, int] | None:
    if data.size < 12:
        return None
    is_long = data[6] > 1
    length = int(data[8:12].view("<u4")[0]) + 12 if is_long else int(data[8:10].view("<u2")[0]) + 10
    return data[:length].tobytes(), length


def _describe_safetensors(data: NDArray[np.uint8]) -> tuple[bytes, int] | None:
    length = int(data[:8].view("<u8")[0]) + 8 if data.size > 8 else data.size + 1
    return (data[:length].tobytes(), length) if length <= data.size else None


def _pt_entry(data: NDArray[np.uint8], place: int, name: bytes) -> int | None:
    """Return where the contents of a zip entry begin, if an entry of that name begins at `place`."""
    head = data[place : place + 30].tobytes()
    if len(head) < 30 or head[:4] != b"PK\x03\x04":
        return None
    n_name, n_extra = struct.unpack("<HH", head[26:30])
    if not data[place + 30 : place + 30 + n_name].tobytes().endswith(name):
        return None
    return int(place + 30 + n_name + n_extra)


def _pt_sum_is_right(data: NDArray[np.uint8], start: int, nbytes: int) -> bool:
    """Return whether the crc that follows an entry matches its contents."""
    after = data[start + nbytes : start + nbytes + 8].tobytes()
    return after[:4] == b"PK\x07\x08" and int.from_bytes(after[4:], "little") == zlib.crc32(
        data[start : start + nbytes].data
    )


def load(decode: str, data: NDArray[np.uint8]) -> Any:
    """Read a file with its format's own library; the bytes of a tensor are its values."""
    if decode == "pt":
        values = torch.load(io.BytesIO(data.tobytes()), weights_only=True)
        return values.resolve_conj().resolve_neg() if isinstance(values, torch.Tensor) else values
    if decode == "npy":
        return torch.from_numpy(np.load(io.BytesIO(data.tobytes()), allow_pickle=False))
    if decode == "safetensors":
        try:
            from safetensors.torch import load
        except ImportError as error:
            raise MissingDependencyError("safetensors", "decode='safetensors'", "samples") from error
        tensors = list(load(data.tobytes()).values())
        if len(tensors) != 1:
            raise CorruptDataError(f"it holds {len(tensors)} tensors, but one is expected; pass a function as decode.")
        return tensors[0]
    return torch.from_numpy(data)


def bytes_of(values: torch.Tensor) -> NDArray[np.uint8]:
    """Return the bytes of a contiguous tensor, as an array over its memory."""
    raw: NDArray[np.uint8] = values.reshape(-1).view(torch.uint8).numpy()
    return raw
