"""AnnData in zarr version 3, file by file: metadata, shards, and the small arrays of its tables.

The result is read by anndata and zarr like any other store; neither is needed to write it. Chunks within a shard begin
at multiples of 4 KiB, so that reads that bypass the page cache need no more than what they want.

References
----------
.. [1] Zarr core specification version 3, doi:10.5281/zenodo.7319826; ZEP 2, "Sharding codec" (the index at a shard's
   end: offset and length of every chunk, then their CRC-32C; chunks may lie anywhere before it).
.. [2] AnnData documentation, "On-disk format".
.. [3] numcodecs documentation ("VLenUTF8": framing of strings).
"""

from __future__ import annotations

import json
import os
import struct
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import pandas as pd

from gpuload.backends.codecs import encode_blosc, encode_zstd
from gpuload.backends.native.checksums import crc32c
from gpuload.errors import StoreError
from gpuload.formats.zarr_shards import ABSENT
from gpuload.packing.files import write_whole

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from numpy.typing import NDArray

ALIGNMENT = 4096
"""Alignment in bytes of chunks in shards."""

ZSTD_LEVEL, LZ4_LEVEL = 3, 5

ZSTD_LEVELS = (2, 3)
"""Blosc's levels with zstd, for whole numbers and for floats: zstd's own 3 and 5."""

_LONGEST_NAME = 255
"""Longest folder name in bytes on all common Linux file systems."""

TABLE_CHUNK = 1 << 17
"""Elements per chunk of a table's column."""

_LITTLE_ENDIAN = {"name": "bytes", "configuration": {"endian": "little"}}
_ZSTD = {"name": "zstd", "configuration": {"level": ZSTD_LEVEL, "checksum": False}}

_LEAVE_OUT = "Leave it out by naming the other columns."
_ARRAY = {"encoding-type": "array", "encoding-version": "0.2.0"}
_STRINGS = {"encoding-type": "string-array", "encoding-version": "0.2.0"}
_NULLABLE = {"i": "nullable-integer", "u": "nullable-integer", "b": "nullable-boolean"}


class Strings(Protocol):
    """An array of str or UTF-8, or what can make any slice of one."""

    def __len__(self) -> int: ...

    def __getitem__(self, wanted: slice, /) -> Any: ...


@dataclass(frozen=True, slots=True)
class Codec:
    """How chunks are encoded: in blosc's containers, since zarr's standard defines those, but not bare LZ4.

    Whole numbers of two bytes and more are byte-shuffled: the high bytes of sorted gene numbers, and of counts,
    compress to almost nothing. Floats are not: normalised counts are the same few values over and over, which shuffled
    bytes would hide (benchmarks/results/pack.jsonl has the sizes and rates of both).

    Attributes
    ----------
    name
        ``"zstd"``, ``"lz4"`` or ``"none"``.
    """

    name: str

    def steps(self, dtype: np.dtype[Any]) -> list[dict[str, Any]]:
        """Return the codecs that serialise and compress elements, as zarr metadata."""
        order: dict[str, Any] = _LITTLE_ENDIAN if dtype.itemsize > 1 else {"name": "bytes"}
        if self.name == "none":
            return [order]
        configuration = {
            "cname": self.name,
            "clevel": self._level(dtype),
            "shuffle": "shuffle" if _is_shuffled(dtype) else "noshuffle",
            "typesize": dtype.itemsize,
            "blocksize": 0,
        }
        return [order, {"name": "blosc", "configuration": configuration}]

    def encode(self, chunk: NDArray[Any]) -> Any:
        """Return the stored bytes of a chunk."""
        values = chunk.reshape(-1)
        if self.name == "none":
            return values.view(np.uint8).data
        return encode_blosc(values, self.name, self._level(chunk.dtype), is_shuffled=_is_shuffled(chunk.dtype))

    def _level(self, dtype: np.dtype[Any]) -> int:
        return LZ4_LEVEL if self.name == "lz4" else ZSTD_LEVELS[dtype.kind == "f"]


def _is_shuffled(dtype: np.dtype[Any]) -> bool:
    return dtype.itemsize > 1 and dtype.kind != "f"


def shard_pieces(chunks: Sequence[Any], n_places: int) -> Iterator[Any]:
    """Yield the bytes of a shard: encoded chunks and padding, then the index of `n_places` chunks and its checksum."""
    index = np.full((n_places, 2), ABSENT, dtype="<u8")
    at = 0
    for place, chunk in enumerate(chunks):
        index[place] = at, len(chunk)
        padding = -len(chunk) % ALIGNMENT
        at += len(chunk) + padding
        yield chunk
        yield bytes(padding)
    raw = index.view(np.uint8).reshape(-1)
    yield raw.data
    yield struct.pack("<I", crc32c(raw.ctypes.data, raw.size))


def write_group(folder: str, attributes: Mapping[str, Any]) -> None:
    """Create a group."""
    os.makedirs(folder, exist_ok=True)
    _write_json(folder, {"zarr_format": 3, "node_type": "group", "attributes": dict(attributes)})


def write_sharded_metadata(
    folder: str,
    shape: Sequence[int],
    dtype: np.dtype[Any],
    chunk_shape: Sequence[int],
    shard_shape: Sequence[int],
    codec: Codec,
) -> None:
    """Write the metadata of an array whose shards are there."""
    configuration = {
        "chunk_shape": list(chunk_shape),
        "codecs": codec.steps(dtype),
        "index_codecs": [_LITTLE_ENDIAN, {"name": "crc32c"}],
        "index_location": "end",
    }
    sharding = [{"name": "sharding_indexed", "configuration": configuration}]
    _describe(folder, shape, dtype.name, 0, shard_shape, sharding, _ARRAY)


def write_array(folder: str, values: NDArray[Any]) -> None:
    """Write a 1-D array of numbers or booleans in plain chunks."""
    values = np.ascontiguousarray(values, dtype=values.dtype.newbyteorder("<"))
    codec, n = Codec("zstd"), min(TABLE_CHUNK, max(1, values.size))
    os.makedirs(os.path.join(folder, "c"), exist_ok=True)
    for number, start in enumerate(range(0, values.size, n)):
        part = values[start : start + n]
        chunk = codec.encode(np.pad(part, (0, n - part.size)))
        write_whole(os.path.join(folder, "c", str(number)), [chunk])
    fill_value: Any = False if values.dtype.kind == "b" else 0
    _describe(folder, values.shape, values.dtype.name, fill_value, (n,), codec.steps(values.dtype), _ARRAY)


def write_strings(folder: str, values: Strings) -> None:
    """Write a 1-D array of strings, given as str or as UTF-8."""
    n = min(TABLE_CHUNK, max(1, len(values)))
    os.makedirs(os.path.join(folder, "c"), exist_ok=True)
    for number, start in enumerate(range(0, len(values), n)):
        part = [v if isinstance(v, bytes) else str(v).encode() for v in values[start : start + n]]
        part += [b""] * (n - len(part))
        plain = struct.pack("<I", n) + b"".join(piece for v in part for piece in (struct.pack("<I", len(v)), v))
        write_whole(os.path.join(folder, "c", str(number)), [encode_zstd(plain, ZSTD_LEVEL)])
    _describe(folder, (len(values),), "string", "", (n,), [{"name": "vlen-utf8"}, _ZSTD], _STRINGS)


def write_column(folder: str, values: Any, where: str, cure: str = _LEAVE_OUT) -> None:
    """Write a column of a table.

    Parameters
    ----------
    values
        A NumPy or pandas array: numbers, booleans, strings, or categories; some may be missing.

    Raises
    ------
    StoreError
        Its type is not supported.
    """
    if isinstance(values, pd.Categorical):
        attributes = {"encoding-type": "categorical", "encoding-version": "0.2.0", "ordered": bool(values.ordered)}
        write_group(folder, attributes)
        write_array(os.path.join(folder, "codes"), values.codes)
        write_column(os.path.join(folder, "categories"), np.asarray(values.categories), where, cure)
    elif isinstance(values, (pd.arrays.IntegerArray, pd.arrays.BooleanArray)):
        kind = _NULLABLE[values.dtype.kind]
        write_group(folder, {"encoding-type": kind, "encoding-version": "0.1.0"})
        plain = values.to_numpy(dtype=values.dtype.numpy_dtype, na_value=0)
        write_array(os.path.join(folder, "values"), plain)
        write_array(os.path.join(folder, "mask"), np.asarray(values.isna()))
    elif pd.api.types.is_extension_array_dtype(values) or values.dtype.kind in "OSU":
        _write_text(folder, np.asarray(values, dtype=object), where, cure)
    elif values.dtype.kind in "biuf" and values.dtype.itemsize <= 8 and values.ndim == 1:
        write_array(folder, values)
    else:
        raise StoreError(
            f"{where} has dtype {values.dtype} and shape {values.shape}; only one number of up to 8 bytes, boolean, "
            f"string or category per row can be packed. {cure}"
        )


def _write_text(folder: str, values: NDArray[np.object_], where: str, cure: str) -> None:
    is_missing = pd.isna(values)
    kinds = {type(v) for v in values[~is_missing]}
    if not kinds <= {str, bytes, np.str_, np.bytes_}:
        found = ", ".join(sorted(kind.__name__ for kind in kinds))
        raise StoreError(
            f"{where} holds values of type {found}; only one number, boolean, string or category per row can be "
            f"packed. {cure}"
        )
    if not is_missing.any():
        write_strings(folder, values)
        return
    write_group(folder, {"encoding-type": "nullable-string-array", "encoding-version": "0.1.0"})
    write_strings(os.path.join(folder, "values"), np.where(is_missing, "", values))
    write_array(os.path.join(folder, "mask"), is_missing)


def start_table(folder: str, columns: Sequence[str], index: Strings, name: str, where: str) -> None:
    """Write the index of a table, and the metadata of it and the columns to come.

    The index is stored under its own name, unless a column has that.

    Raises
    ------
    StoreError
        A name is not possible as a folder; `where` is the table's name in the error.
    """
    name = "_index" if name in columns else name
    for taken in (name, *columns):
        if taken in ("", ".", "..", "zarr.json") or "/" in taken or len(os.fsencode(taken)) > _LONGEST_NAME:
            raise StoreError(
                f"{where} has a column {taken!r}, which no folder can be called; rename it, or name the columns to "
                "pack with obs=."
            )
    attributes = {
        "encoding-type": "dataframe",
        "encoding-version": "0.2.0",
        "_index": name,
        "column-order": list(columns),
    }
    write_group(folder, attributes)
    write_strings(os.path.join(folder, name), index)


def _describe(
    folder: str,
    shape: Sequence[int],
    data_type: str,
    fill_value: Any,
    grid: Sequence[int],
    codecs: list[dict[str, Any]],
    attributes: Mapping[str, Any],
) -> None:
    os.makedirs(folder, exist_ok=True)
    meta = {
        "zarr_format": 3,
        "node_type": "array",
        "shape": list(shape),
        "data_type": data_type,
        "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": list(grid)}},
        "chunk_key_encoding": {"name": "default", "configuration": {"separator": "/"}},
        "fill_value": fill_value,
        "codecs": codecs,
        "attributes": dict(attributes),
        "storage_transformers": [],
    }
    _write_json(folder, meta)


def _write_json(folder: str, meta: dict[str, Any]) -> None:
    write_whole(os.path.join(folder, "zarr.json"), [json.dumps(meta, indent=1).encode()])
