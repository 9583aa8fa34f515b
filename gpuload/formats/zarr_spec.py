"""The metadata of an array of a zarr store: what it says of shape, chunks and encoding.

Accepts only what can be read from byte ranges and decoded chunk by chunk, of zarr formats 2 and 3: chunks of a regular
grid in C order, little-endian, plain or in shards. Anything else is refused by name when the array is opened.

References
----------
.. [1] Zarr core specification version 3, doi:10.5281/zenodo.7319826; ZEP 2, "Sharding codec".
.. [2] Zarr specification version 2 ("Metadata", "Chunks").
"""

from __future__ import annotations

import math
import re
from base64 import b64decode
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np

from gpuload.errors import CorruptDataError, StoreError, first_line, shown
from gpuload.layout import Filter

if TYPE_CHECKING:
    from collections.abc import Iterator

MAX_NBYTES = (1 << 31) - 1
"""Largest decoded chunk: the codecs' limit."""

_FILTERS = {
    "blosc": "blosc",
    "crc32c": "crc32c",
    "fletcher32": "fletcher32",
    "gzip": "gzip",
    "lz4": "lz4-sized",
    "shuffle": "shuffle",
    "zlib": "deflate",
    "zstd": "zstd",
}
"""Our filters by the names of zarr's and numcodecs' codecs."""

_NUMBERS = {
    "bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64", "float16", "float32", "float64",
}  # fmt: skip
_KEYS_V3 = {
    "attributes", "chunk_grid", "chunk_key_encoding", "codecs", "data_type", "dimension_names", "fill_value",
    "node_type", "shape", "storage_transformers", "zarr_format",
}  # fmt: skip
"""Keys of an array's metadata. Any other is an extension, and must be understood unless it says otherwise."""

_FLOATS = {"NaN": float("nan"), "Infinity": float("inf"), "-Infinity": float("-inf")}
_KINDS: dict[type[Any], str] = {str: "text", list: "list", dict: "object"}
_TEXT = {"vlen-utf8": "utf8", "vlen-bytes": "bytes", "string": "utf8", "variable_length_bytes": "bytes"}


@dataclass(frozen=True, slots=True)
class Spec:
    """The content of an array's metadata.

    Attributes
    ----------
    shape, chunk_shape
        In elements; the chunk is the smallest piece that is encoded by itself.
    shard_shape
        Shape of the pieces stored as files, if each holds many chunks; else None.
    dtype
        Dtype of the elements; object for strings.
    text
        ``"utf8"`` or ``"bytes"`` for variable-length strings, else ``""``.
    filters
        In the order in which they were applied.
    prefix, separator
        A chunk's key is the prefix and its grid indices, joined by the separator.
    index_is_first, index_has_crc
        Where a shard's index is, and whether a CRC-32C follows it.
    """

    shape: tuple[int, ...]
    chunk_shape: tuple[int, ...]
    shard_shape: tuple[int, ...] | None
    dtype: np.dtype[Any]
    text: str
    filters: tuple[Filter, ...]
    fill_value: Any
    prefix: str
    separator: str
    index_is_first: bool = False
    index_has_crc: bool = True


def parse_v2(meta: dict[str, Any], where: str) -> Spec:
    """Parse a ``.zarray``.

    Raises
    ------
    StoreError
        The array cannot be read from byte ranges.
    CorruptDataError
        The metadata is invalid.
    """
    with _parsing(where):
        if meta["zarr_format"] != 2:
            _refuse(where, f"is of zarr format {meta['zarr_format']!r}", "only 2 and 3 can be read")
        shape, chunks = _sizes(meta["shape"]), _sizes(meta["chunks"])
        entries = [] if meta.get("filters") is None else _get(meta, "filters", list)
        entries = entries if meta.get("compressor") is None else [*entries, meta["compressor"]]
        steps = [(_get(entry, "id", str), entry) for entry in entries]
        text = _TEXT.get(steps[0][0], "") if steps and meta["dtype"] == "|O" else ""
        dtype = _v2_dtype(meta["dtype"])
        if dtype.kind == "O" and not text:
            _refuse(where, "holds Python objects", "rewrite it with anndata's write_zarr")
        if dtype.kind not in "biufOSU":
            _refuse(where, f"has dtype {meta['dtype']!r}", "only numbers, booleans and strings can be read")
        _check_order(where, dtype.byteorder != ">", meta["order"] == "C" or sum(n > 1 for n in chunks) < 2)
        filters = tuple(_filter(name, entry, where) for name, entry in (steps[1:] if text else steps))
        fill_value = _fill_value(meta.get("fill_value"), dtype)
        separator = meta.get("dimension_separator", ".")
        return _checked(Spec(shape, chunks, None, dtype, text, filters, fill_value, "", separator), where)


def parse_v3(meta: dict[str, Any], where: str) -> Spec:
    """Parse the ``zarr.json`` of an array; errors as for `parse_v2`."""
    with _parsing(where):
        if meta["zarr_format"] != 3:
            _refuse(where, f"is of zarr format {meta['zarr_format']!r}", "only 2 and 3 can be read")
        if meta.get("storage_transformers"):
            _refuse(where, "has storage transformers", "rewrite it without them")
        for name in meta.keys() - _KEYS_V3:
            if not (isinstance(meta[name], dict) and meta[name].get("must_understand") is False):
                _refuse(where, f"has an extension {name!r}", "rewrite it without that")
        (grid, layout), (encoding, options) = _named(meta["chunk_grid"]), _named(meta["chunk_key_encoding"])
        if grid != "regular":
            _refuse(where, f"has a chunk grid {grid!r}", "rewrite it with chunks of one shape")
        dtype, text = _v3_dtype(meta["data_type"], where)
        chunks, shards, index = _sizes(layout["chunk_shape"]), None, {}
        steps = _without_transpose(_steps(meta, "codecs"), where)
        if steps and steps[0][0] == "sharding_indexed":
            if len(steps) > 1:
                _refuse(where, f"encodes whole shards with {steps[1][0]!r}", "rewrite it with that inside the shards")
            configuration = steps[0][1]
            shards, chunks = chunks, _sizes(configuration["chunk_shape"])
            steps = _without_transpose(_steps(configuration, "codecs"), where)
            index = _shard_index(configuration, where)
        filters = _v3_filters(steps, dtype, text, where)
        if encoding not in ("default", "v2"):
            _refuse(where, f"names its chunks by {encoding!r}", "rewrite it with the default names")
        prefix, separator = ("c", "/") if encoding == "default" else ("", ".")
        separator = options.get("separator", separator)
        fill_value = _fill_value(meta.get("fill_value"), dtype)
        shape = _sizes(meta["shape"])
        spec = Spec(shape, chunks, shards, dtype, text, filters, fill_value, prefix, separator, **index)
        return _checked(spec, where)


@contextmanager
def _parsing(where: str) -> Iterator[None]:
    """Report what is no metadata of an array as damage."""
    try:
        yield
    except (StoreError, CorruptDataError):  # both are ValueErrors
        raise
    except (KeyError, ValueError) as error:
        words = f"there is no {error}" if isinstance(error, KeyError) else first_line(error)
        raise CorruptDataError(
            f"{where}: its metadata is invalid ({words}). Restore the store from its source."
        ) from error


def _refuse(where: str, what: str, cure: str) -> NoReturn:
    raise StoreError(f"{where} {what}, which cannot be read here; {cure}.")


def _check_order(where: str, is_little: bool, is_c: bool) -> None:
    if not is_little:
        _refuse(where, "is big-endian", "rewrite it as little-endian, for example with .astype('<f4')")
    if not is_c:
        _refuse(where, "is stored transposed (Fortran order)", "rewrite it with order='C'")


def _sizes(values: Any) -> tuple[int, ...]:
    if not isinstance(values, list) or any(not isinstance(n, int) or isinstance(n, bool) or n < 0 for n in values):
        raise ValueError(f"{values!r} is not a shape")
    return tuple(values)


def _size(nbytes: Any) -> int:
    (size,) = _sizes([nbytes])
    if not 1 <= size <= MAX_NBYTES:
        raise ValueError(f"{size} bytes are not the size of an element")
    return size


def _get(of: Any, key: str, kind: type[Any]) -> Any:
    """Return a required value of a JSON object, which must be text, a list or an object."""
    if not isinstance(of, dict):
        raise ValueError(f"{shown(of)} is no object with {key!r}")  # noqa: TRY004 - wrong is what the file says
    if not isinstance(of[key], kind):
        raise ValueError(f"its {key!r} is {shown(of[key])}, which is no {_KINDS[kind]}")  # noqa: TRY004 - likewise
    return of[key]


def _named(entry: Any) -> tuple[str, dict[str, Any]]:
    """Return name and configuration of a codec, a data type, a grid or an encoding of keys; the name may be alone."""
    if isinstance(entry, str):
        return entry, {}
    name = _get(entry, "name", str)
    return name, {} if entry.get("configuration") is None else _get(entry, "configuration", dict)


def _steps(of: dict[str, Any], key: str) -> list[tuple[str, dict[str, Any]]]:
    return [_named(entry) for entry in _get(of, key, list)]


def _without_transpose(steps: list[tuple[str, Any]], where: str) -> list[tuple[str, Any]]:
    while steps and steps[0][0] == "transpose":
        order = steps[0][1].get("order")
        is_c = order == "C" or (isinstance(order, list) and order == list(range(len(order))))
        _check_order(where, is_little=True, is_c=is_c)
        steps = steps[1:]
    return steps


def _shard_index(configuration: dict[str, Any], where: str) -> dict[str, bool]:
    steps = _steps(configuration, "index_codecs")
    kinds = [name for name, _ in steps]
    if kinds not in (["bytes"], ["bytes", "crc32c"]):
        _refuse(where, f"encodes the index of its shards by {' + '.join(kinds)}", "rewrite it with the default")
    _check_order(where, is_little=steps[0][1].get("endian", "little") == "little", is_c=True)
    location = configuration.get("index_location", "end")
    if location not in ("start", "end"):
        raise ValueError(f"index_location is {location!r}")
    return {"index_is_first": location == "start", "index_has_crc": "crc32c" in kinds}


def _v2_dtype(name: Any) -> np.dtype[Any]:
    """Return the dtype; a void one, which has no values, if it is of fields or NumPy does not know it."""
    try:
        return np.dtype(name if isinstance(name, str) else "V")
    except (TypeError, ValueError):
        return np.dtype("V")


def _v3_dtype(data_type: Any, where: str) -> tuple[np.dtype[Any], str]:
    """Return the dtype and, for variable-length strings, their kind."""
    name, configuration = _named(data_type)
    if name in _NUMBERS:
        return np.dtype(name), ""
    if name in ("string", "variable_length_bytes"):
        return np.dtype(object), _TEXT[name]
    if name == "fixed_length_utf32":
        return np.dtype(f"<U{_size(configuration['length_bytes']) // 4}"), ""
    if name == "null_terminated_bytes":
        return np.dtype(f"S{_size(configuration['length_bytes'])}"), ""
    _refuse(where, f"has data type {name!r}", "only numbers, booleans and strings can be read")


def _v3_filters(steps: list[tuple[str, Any]], dtype: np.dtype[Any], text: str, where: str) -> tuple[Filter, ...]:
    if not steps:
        raise ValueError("no codec turns it into bytes")
    name, configuration = steps[0]
    if name == "sharding_indexed":
        _refuse(where, "has shards within shards", "rewrite it with one level of shards")
    if name != ("bytes" if not text else f"vlen-{text}"):
        _refuse(where, f"is encoded with {name!r}", f"codecs that can be read are {', '.join(_FILTERS)}")
    is_little = dtype.itemsize == 1 or dtype.kind == "S" or text != "" or configuration["endian"] == "little"
    _check_order(where, is_little=is_little, is_c=True)
    return tuple(_filter(name.removeprefix("numcodecs."), configuration, where) for name, configuration in steps[1:])


def _filter(name: str, configuration: dict[str, Any], where: str) -> Filter:
    if name not in _FILTERS or configuration.get("location", "end") != "end":
        _refuse(where, f"is encoded with {name!r}", f"codecs that can be read are {', '.join(_FILTERS)}")
    return Filter(_FILTERS[name], (_size(configuration.get("elementsize", 4)),) if name == "shuffle" else ())


def _fill_value(value: Any, dtype: np.dtype[Any]) -> Any:
    if dtype.kind in "OSU":
        text = value if isinstance(value, str) else ""
        return _decoded(text) if dtype.kind == "S" else text
    if value is None:
        return 0
    if isinstance(value, str) and dtype.kind == "f":
        if re.fullmatch(f"0x[0-9a-fA-F]{{{2 * dtype.itemsize}}}", value):
            return np.array(int(value, 16), dtype=f"<u{dtype.itemsize}").view(dtype)[()]
        value = _FLOATS.get(value, value)
    with np.errstate(over="ignore", invalid="ignore"), suppress(OverflowError):
        found = np.array(value).astype(dtype) if isinstance(value, (bool, int, float)) else None
        if found is not None and (dtype.kind == "f" or found == value):
            return found[()]
    raise ValueError(f"its fill_value {shown(value)} is no {dtype}")


def _decoded(text: str) -> bytes:
    try:
        return b64decode(text)
    except ValueError:
        raise ValueError(f"its fill_value {shown(text)} is no base64") from None


def _checked(spec: Spec, where: str) -> Spec:
    shapes = [spec.chunk_shape, *([spec.shard_shape] if spec.shard_shape is not None else [])]
    if any(len(s) != len(spec.shape) for s in shapes) or any(
        c < 1 and n for s in shapes for c, n in zip(s, spec.shape, strict=True)
    ):
        raise ValueError(f"chunks of shape {spec.chunk_shape} do not fit an array of shape {spec.shape}")
    if spec.shard_shape is not None and any(
        c < 1 or s % c for s, c in zip(spec.shard_shape, spec.chunk_shape, strict=True)
    ):
        raise ValueError(f"shards of shape {spec.shard_shape} are not made of chunks of shape {spec.chunk_shape}")
    if spec.separator not in ("/", "."):
        raise ValueError(f"separator {spec.separator!r}")
    if math.prod(spec.chunk_shape) * spec.dtype.itemsize > MAX_NBYTES:
        _refuse(where, f"has chunks of shape {spec.chunk_shape}", "rewrite it with chunks of at most 2 GB")
    return spec
