"""Turn arrays of a zarr store into layouts: the byte range of each chunk, and its encoding.

Accepts only what can be read from byte ranges and decoded chunk by chunk: chunks in C order, little-endian, plain or
in shards. Anything else is refused by name when the array is opened.

Requirements this module answers
--------------------------------
- Zarr formats 2 and 3, regular grids, any separator; shards with a checksummed index at the end or the start.
- A chunk without a file, or marked absent in its shard, is the fill value.
- Nothing is trusted: every byte range must lie inside its file.

References
----------
.. [1] Zarr core specification version 3, doi:10.5281/zenodo.7319826; ZEP 2, "Sharding codec".
.. [2] Zarr specification version 2 ("Metadata", "Chunks").
.. [3] numcodecs documentation ("VLenUTF8": framing of strings).
"""

from __future__ import annotations

import math
import re
import zlib
from base64 import b64decode
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np

from gpuload.backends import codecs
from gpuload.backends.reading import read_each, short_read
from gpuload.errors import CorruptDataError, StoreError
from gpuload.formats.arrays import RESTORE, check_dtype
from gpuload.formats.zarr_shards import Shards, check_sizes
from gpuload.layout import ArrayLayout, Filter

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from numpy.typing import NDArray

    from gpuload.formats.zarr_nodes import Tree
    from gpuload.types import Source

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
_TEXT = {"vlen-utf8": "utf8", "vlen-bytes": "bytes", "string": "utf8", "variable_length_bytes": "bytes"}
_NUMBER = re.compile(r"0|[1-9][0-9]*")


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
    fill_value
        Value of chunks that were never written.
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
    try:
        if meta["zarr_format"] != 2:
            _refuse(where, f"is of zarr format {meta['zarr_format']!r}", "only 2 and 3 can be read")
        shape, chunks = _sizes(meta["shape"]), _sizes(meta["chunks"])
        steps = [*(meta.get("filters") or ()), *([meta["compressor"]] if meta.get("compressor") else [])]
        text = _TEXT.get(steps[0]["id"], "") if steps and meta["dtype"] == "|O" else ""
        dtype = np.dtype(meta["dtype"] if isinstance(meta["dtype"], str) else "V")
        if dtype.kind == "O" and not text:
            _refuse(where, "holds Python objects", "rewrite it with anndata's write_zarr")
        if dtype.kind not in "biufOSU":
            _refuse(where, f"has dtype {meta['dtype']!r}", "only numbers, booleans and strings can be read")
        _check_order(where, dtype.byteorder != ">", meta["order"] == "C" or sum(n > 1 for n in chunks) < 2)
        filters = tuple(_filter(step["id"], step, where) for step in (steps[1:] if text else steps))
        fill_value = _fill_value(meta.get("fill_value"), dtype)
        separator = meta.get("dimension_separator", ".")
        return _checked(Spec(shape, chunks, None, dtype, text, filters, fill_value, "", separator), where)
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
        raise _senseless(where, error) from error


def parse_v3(meta: dict[str, Any], where: str) -> Spec:
    """Parse the ``zarr.json`` of an array; errors as for `parse_v2`."""
    try:
        if meta["zarr_format"] != 3:
            _refuse(where, f"is of zarr format {meta['zarr_format']!r}", "only 2 and 3 can be read")
        if meta.get("storage_transformers"):
            _refuse(where, "has storage transformers", "rewrite it without them")
        for name in meta.keys() - _KEYS_V3:
            if not (isinstance(meta[name], dict) and meta[name].get("must_understand") is False):
                _refuse(where, f"has an extension {name!r}", "rewrite it without that")
        grid, ((encoding, options),) = meta["chunk_grid"], _steps([meta["chunk_key_encoding"]])
        if grid["name"] != "regular":
            _refuse(where, f"has a chunk grid {grid['name']!r}", "rewrite it with chunks of one shape")
        dtype, text = _v3_dtype(meta["data_type"], where)
        chunks, shards, index = _sizes(grid["configuration"]["chunk_shape"]), None, {}
        steps = _without_transpose(_steps(meta["codecs"]), where)
        if steps and steps[0][0] == "sharding_indexed":
            if len(steps) > 1:
                _refuse(where, f"encodes whole shards with {steps[1][0]!r}", "rewrite it with that inside the shards")
            configuration = steps[0][1]
            shards, chunks = chunks, _sizes(configuration["chunk_shape"])
            steps = _without_transpose(_steps(configuration["codecs"]), where)
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
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
        raise _senseless(where, error) from error


def _senseless(where: str, error: Exception) -> Exception:
    if isinstance(error, (StoreError, CorruptDataError)):  # both are ValueErrors
        return error
    words = f"there is no {error}" if isinstance(error, KeyError) else str(error).splitlines()[0].rstrip(".")
    return CorruptDataError(f"{where}: its metadata is invalid ({words}). Restore the store from its source.")


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


def _steps(entries: Any) -> list[tuple[str, dict[str, Any]]]:
    """Return name and configuration of codecs, or of encodings of keys; format 3 allows the name alone."""
    each: list[dict[str, Any]] = [{"name": entry} if isinstance(entry, str) else entry for entry in entries]
    return [(entry["name"], entry.get("configuration") or {}) for entry in each]


def _without_transpose(steps: list[tuple[str, Any]], where: str) -> list[tuple[str, Any]]:
    while steps and steps[0][0] == "transpose":
        order = steps[0][1].get("order")
        _check_order(where, is_little=True, is_c=order == "C" or order == list(range(len(order))))
        steps = steps[1:]
    return steps


def _shard_index(configuration: dict[str, Any], where: str) -> dict[str, bool]:
    steps = _steps(configuration["index_codecs"])
    kinds = [name for name, _ in steps]
    if kinds not in (["bytes"], ["bytes", "crc32c"]):
        _refuse(where, f"encodes the index of its shards by {' + '.join(kinds)}", "rewrite it with the default")
    _check_order(where, is_little=steps[0][1].get("endian", "little") == "little", is_c=True)
    location = configuration.get("index_location", "end")
    if location not in ("start", "end"):
        raise ValueError(f"index_location is {location!r}")
    return {"index_is_first": location == "start", "index_has_crc": "crc32c" in kinds}


def _v3_dtype(name: Any, where: str) -> tuple[np.dtype[Any], str]:
    """Return the dtype and, for variable-length strings, their kind."""
    configuration = name.get("configuration") or {} if isinstance(name, dict) else {}
    name = name["name"] if isinstance(name, dict) else name
    if name in _NUMBERS:
        return np.dtype(name), ""
    if name in ("string", "variable_length_bytes"):
        return np.dtype(object), _TEXT[name]
    if name == "fixed_length_utf32":
        return np.dtype(f"<U{int(configuration['length_bytes']) // 4}"), ""
    if name == "null_terminated_bytes":
        return np.dtype(f"S{int(configuration['length_bytes'])}"), ""
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
    return Filter(_FILTERS[name], (int(configuration.get("elementsize", 4)),) if name == "shuffle" else ())


def _fill_value(value: Any, dtype: np.dtype[Any]) -> Any:
    if dtype.kind in "OSU":
        text = value if isinstance(value, str) else ""
        return b64decode(text) if dtype.kind == "S" else text
    if value is None:
        return 0
    if isinstance(value, str) and dtype.kind == "f":
        if re.fullmatch(f"0x[0-9a-fA-F]{{{2 * dtype.itemsize}}}", value):
            return np.array(int(value, 16), dtype=f"<u{dtype.itemsize}").view(dtype)[()]
        value = _FLOATS.get(value, value)
    with np.errstate(over="ignore", invalid="ignore"):
        found = np.array(value).astype(dtype) if isinstance(value, (bool, int, float)) else None
    if found is None or (dtype.kind != "f" and found != value):
        raise ValueError(f"its fill_value {value!r} is no {dtype}")
    return found[()]


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


class Array:
    """An array: attributes, shape, dtype, chunk locations; with the subset of h5py's interface that is used here.

    Parameters
    ----------
    tree, key
        Its place in a store.
    attrs
        Its attributes.
    spec
        Its metadata.
    """

    def __init__(self, tree: Tree, key: str, attrs: dict[str, Any], spec: Spec) -> None:
        self._tree = tree
        self._key = key
        self.attrs = attrs
        self.spec = spec
        self.shape = spec.shape
        self.dtype = spec.dtype

    @property
    def name(self) -> str:
        """Its path in the store."""
        return f"/{self._key}"

    @property
    def ndim(self) -> int:
        """Number of dimensions."""
        return len(self.shape)

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, _: Any) -> NDArray[Any]:
        return self.read()

    def layout(self) -> ArrayLayout:
        """Return the array's layout, whose source the caller must close.

        Raises
        ------
        StoreError
            The dtype is not supported in a minibatch.
        ReadError, CorruptDataError
            A chunk lies outside its file, or a shard index is damaged.
        """
        check_dtype(f"{self._tree.name}: {self.name}", self.dtype)
        return self._layout()

    def read(self) -> NDArray[Any]:
        """Read the whole array into memory.

        Raises
        ------
        ReadError, CorruptDataError
            A chunk cannot be read or is damaged.
        """
        with self._located() as layout:
            out = np.full(self.shape, self.spec.fill_value, dtype=self.dtype)
            for spans, chunk in self._decoded(layout, np.flatnonzero(layout.chunk_nbytes)):
                part = out[spans]
                part[...] = chunk[tuple(slice(n) for n in part.shape)]
        return out

    def pieces(self) -> Iterator[NDArray[Any]]:
        """Yield an array of one dimension in order, chunk by chunk; errors as for `read`."""
        at, end = 0, self.shape[0]
        with self._located() as layout:
            for number in np.flatnonzero(layout.chunk_nbytes):
                for (span,), chunk in self._decoded(layout, np.array([number])):
                    if span.start > at:
                        yield np.full(span.start - at, self.spec.fill_value, dtype=self.dtype)
                    at = min(span.stop, end)
                    yield chunk[: at - span.start]
        if at < end:
            yield np.full(end - at, self.spec.fill_value, dtype=self.dtype)

    @contextmanager
    def _located(self) -> Iterator[ArrayLayout]:
        """Yield the layout, and close its source."""
        layout = self._layout()
        try:
            yield layout
        finally:
            self._let_go(layout.source)

    def _let_go(self, source: Source) -> None:
        """Close the source of a layout, if it is of this array only."""
        if source is not self._tree.source:
            source.close()

    def _decoded(
        self, layout: ArrayLayout, chunks: NDArray[np.int64]
    ) -> Iterator[tuple[tuple[slice, ...], NDArray[Any]]]:
        """Yield the place of each chunk and its elements, those beyond the end too, in the order in which they lie."""
        grid = _grid(self.shape, layout.chunk_shape)
        for i, stored in read_each(layout.source, layout.chunk_offset[chunks], layout.chunk_nbytes[chunks]):
            place = map(int, np.unravel_index(int(chunks[i]), grid))
            spans = (slice(p * c, (p + 1) * c) for p, c in zip(place, layout.chunk_shape, strict=True))
            yield tuple(spans), self._decode(layout, int(chunks[i]), stored)

    def element(self) -> NDArray[Any]:
        """Return the whole array, as a column."""
        return self.read()

    def _decode(self, layout: ArrayLayout, chunk: int, stored: NDArray[np.uint8]) -> NDArray[Any]:
        """Return one decoded chunk, given the bytes that could be read of it."""
        offset, stored_nbytes = int(layout.chunk_offset[chunk]), int(layout.chunk_nbytes[chunk])
        if stored.size < stored_nbytes:
            raise short_read(layout.source, self.name, offset, stored_nbytes, stored.size)
        path, at = layout.source.where_is(offset)
        n, known = layout.chunk_size, self._tree.crc.get((offset, stored_nbytes))
        try:
            if known is not None and zlib.crc32(stored.data) != known:
                raise codecs.DecodeError("its zip checksum does not match")
            full = -1 if self.spec.text else n * self.dtype.itemsize
            plain = codecs.decode(self.spec.filters, 0, stored, full, self.dtype.itemsize)
            values = _strings(plain, n, self.spec.text) if self.spec.text else plain.view(self.dtype)
        except (codecs.DecodeError, ValueError) as error:
            words = str(error).splitlines()[0].rstrip(".")
            raise CorruptDataError(
                f"{path}: chunk {chunk} of {self.name} at byte {at} is damaged: {words}. {RESTORE}"
            ) from error
        return values.reshape(layout.chunk_shape)

    def _layout(self) -> ArrayLayout:
        spec = self.spec
        where = f"{self._tree.name}: {self.name}"
        if not spec.shape:
            raise StoreError(f"{where} has no dimensions; expected an array of cells or genes.")
        chunk_shape = tuple(max(1, n) for n in spec.chunk_shape)
        grid = _grid(spec.shape, chunk_shape)
        per_file = tuple(s // c for s, c in zip(spec.shard_shape or chunk_shape, chunk_shape, strict=True))
        source, files = self._tree.chunks(self._key, self._file_names(_grid(grid, per_file)))
        try:
            n_chunks = math.prod(grid)
            if n_chunks > sum(n for _, n in files.values()) + (1 << 20):
                raise CorruptDataError(f"{where} has {n_chunks} chunks, which its files cannot hold. {RESTORE}")
            place, first, size = self._found(files, _grid(grid, per_file))
            if spec.shard_shape is None:
                offset, nbytes = np.zeros((2, n_chunks), dtype=np.int64)
                chunks = np.ravel_multi_index(tuple(place.T), grid)
                offset[chunks], nbytes[chunks] = first, size
                check_sizes(source, self.name, spec, first, size)
            else:
                shards = Shards(source, self.name, spec, place, first, size, per_file, grid)
                offset, nbytes = shards.chunks(self._tree.index)
        except BaseException:
            self._let_go(source)
            raise
        fill_value = 0.0 if spec.dtype.kind in "OSU" else float(spec.fill_value)
        mask = np.zeros(n_chunks, dtype=np.uint32)
        return ArrayLayout(
            source, self.name, spec.shape, spec.dtype, chunk_shape, offset, nbytes, mask, spec.filters, fill_value
        )

    def _file_names(self, grid: Sequence[int]) -> Iterator[str]:
        """Yield the keys of all possible chunk or shard files."""
        head = [self.spec.prefix] if self.spec.prefix else []
        for number in range(math.prod(grid)):  # one by one: there may be too many for memory
            place, rest = [], number
            for n in reversed(grid):
                rest, at = divmod(rest, n)
                place.append(str(at))
            yield self.spec.separator.join([*head, *reversed(place)])

    def _found(
        self, files: dict[str, tuple[int, int]], grid: Sequence[int]
    ) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
        """Return the chunk or shard files, skipping unrelated ones.

        Returns
        -------
        tuple of (n, n_dims), (n,) and (n,) int64
            Grid position, first byte and size of each.
        """
        spec = self.spec
        prefix = f"{spec.prefix}{spec.separator}" if spec.prefix else ""
        places, ranges = [], []
        for key, extent in files.items():
            parts = key.removeprefix(prefix).split(spec.separator)
            is_one = key.startswith(prefix) and all(map(_NUMBER.fullmatch, parts)) and len(parts) == len(grid)
            if is_one and all(int(p) < n for p, n in zip(parts, grid, strict=True)):
                places.append(tuple(map(int, parts)))
                ranges.append(extent)
        first, size = np.array(ranges, dtype=np.int64).reshape(-1, 2).T
        return np.array(places, dtype=np.int64).reshape(-1, len(grid)), first, size


def _grid(shape: Sequence[int], chunk_shape: Sequence[int]) -> tuple[int, ...]:
    return tuple(-(-n // c) for n, c in zip(shape, chunk_shape, strict=True))


def _strings(plain: NDArray[np.uint8], n: int, kind: str) -> NDArray[np.object_]:
    """Return the strings of a chunk: their number, then each preceded by its length; all int32, little-endian."""
    raw = plain.tobytes()
    if len(raw) < 4 or int.from_bytes(raw[:4], "little") != n:
        raise ValueError("it does not begin with the number of its strings")
    out, at = np.empty(n, dtype=object), 4
    for i in range(n):
        length = int.from_bytes(raw[at : at + 4], "little")
        part = raw[at + 4 : at + 4 + length]
        if at + 4 > len(raw) or len(part) < length:
            raise ValueError(f"its string {i} is cut off")
        out[i] = part.decode() if kind == "utf8" else part
        at += 4 + length
    return out
