"""The hierarchy of a zarr store: its groups, and its arrays as layouts: the byte range of each chunk, and its encoding.

The nodes offer the part of h5py's interface that AnnData's layout needs, so that one reader serves both. Consolidated
metadata is ignored: it may be stale, and each node has its own. A chunk without a file, or marked absent in its shard,
is the fill value. Every byte range must lie inside its file.

References
----------
.. [1] Zarr core specification version 3, doi:10.5281/zenodo.7319826 ("Metadata", "Chunk key encoding"); version 2
   ("Hierarchies").
.. [2] numcodecs documentation ("VLenUTF8": framing of strings).
"""

from __future__ import annotations

import json
import math
import re
import zlib
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np

from gpuload.backends import codecs
from gpuload.backends.reading import read_each, short_read
from gpuload.errors import CorruptDataError, StoreError, first_line
from gpuload.formats.arrays import RESTORE, check_dtype, check_stored
from gpuload.formats.zarr_shards import Shards, check_sizes
from gpuload.formats.zarr_spec import parse_v2, parse_v3
from gpuload.formats.zarr_trees import GROUP_FILES, NODE_FILES
from gpuload.layout import ArrayLayout

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from numpy.typing import NDArray

    from gpuload.formats.zarr_spec import Spec
    from gpuload.formats.zarr_trees import Tree
    from gpuload.types import Source

_ENCODINGS = {
    "categorical": ("codes", "categories"),
    "nullable-integer": ("values", "mask"),
    "nullable-boolean": ("values", "mask"),
    "nullable-string-array": ("values", "mask"),
}
"""The arrays of groups that form one column, by anndata's encoding type."""

_NUMBER = "(0|[1-9][0-9]{0,17})"
"""Pattern of an index in a grid: a number below 2**63, without leading zeros."""


class Array:
    """An array: attributes, shape, dtype, chunk locations; with the subset of h5py's interface that is used here."""

    def __init__(self, tree: Tree, key: str, attrs: dict[str, Any], spec: Spec) -> None:
        self._tree, self._key = tree, key
        self.attrs, self.spec = attrs, spec
        self.shape, self.dtype = spec.shape, spec.dtype

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
        """Read the whole array; raise ReadError or CorruptDataError if a chunk cannot be read or decoded."""
        with self._located() as layout:
            out = np.full(self.shape, self.spec.fill_value, dtype=self.dtype)
            for spans, chunk in self._decoded(layout, np.flatnonzero(layout.chunk_nbytes)):
                part = out[spans]
                part[...] = chunk[tuple(slice(n) for n in part.shape)]
        return out

    element = read
    """Return the whole array, as a column."""

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
            raise CorruptDataError(
                f"{path}: chunk {chunk} of {self.name} at byte {at} is damaged: {first_line(error)}. {RESTORE}"
            ) from error
        return values.reshape(layout.chunk_shape)

    def _layout(self) -> ArrayLayout:
        spec = self.spec
        where = f"{self._tree.name}: {self.name}"
        check_stored(self, where)
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
        prefix, separator = self.spec.prefix, re.escape(self.spec.separator)
        key_of = re.compile(separator.join([*([prefix] if prefix else []), *[_NUMBER] * len(grid)]))
        rows = [(*map(int, m.groups()), *at) for key, at in files.items() if (m := key_of.fullmatch(key))]
        table = np.array(rows, dtype=np.int64).reshape(-1, len(grid) + 2)
        table = table[(table[:, :-2] < np.array(grid)).all(axis=1)]
        return table[:, :-2], table[:, -2], table[:, -1]


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


class Group:
    """A group: attributes, and members by name or path; with the subset of h5py's interface that is used here."""

    def __init__(self, tree: Tree, key: str, attrs: dict[str, Any]) -> None:
        self._tree, self._key, self.attrs = tree, key, attrs

    @property
    def name(self) -> str:
        """Its path in the store."""
        return f"/{self._key}"

    @property
    def file(self) -> Group:
        """Itself: in zarr, old columns name their categories relative to the frame."""
        return self

    def keys(self) -> list[str]:
        """Return the names of its members."""
        return [name for name in self.folders() if name in self]

    def folders(self) -> list[str]:
        """Return the names of the folders that may be members, with those that have no metadata."""
        return self._tree.children(self._key)

    def has_group(self, path: str) -> bool:
        """Return whether a group is there; False if only a request would tell."""
        return any(self._tree.has(f"{self._path(path)}/{name}") for name in GROUP_FILES)

    def get(self, path: str, default: Any = None) -> Group | Array | Any:
        """Return a member, or the default if there is none."""
        found = open_node(self._tree, self._path(path.strip("/")))
        return default if found is None else found

    def __getitem__(self, path: str) -> Any:
        found = self.get(path)
        if found is None:
            raise KeyError(path)
        return found

    def __contains__(self, path: str) -> bool:
        return any(self._tree.read(f"{self._path(path)}/{name}") is not None for name in NODE_FILES)

    def __iter__(self) -> Iterator[str]:
        return iter(self.keys())

    def element(self) -> Any:
        """Return the column that anndata encoded in this group: categories, or values with missing ones.

        Raise StoreError if it is something else.
        """
        import pandas as pd

        encoding = str(self.attrs.get("encoding-type"))
        parts: list[Any] = [self.get(name) for name in _ENCODINGS.get(encoding, ())]
        if not parts or any(not hasattr(part, "read") for part in parts):
            raise StoreError(
                f"{self._tree.name}: {self.name} is encoded as {encoding!r}; expected categories, numbers, booleans or "
                "strings."
            )
        first, second = (part.read() for part in parts)
        if encoding == "categorical":
            return pd.Categorical.from_codes(first, second, ordered=bool(self.attrs.get("ordered", False)))
        if encoding == "nullable-integer":
            return pd.arrays.IntegerArray(first, second)
        if encoding == "nullable-boolean":
            return pd.arrays.BooleanArray(first, second)
        first[second] = pd.NA
        return first

    def _path(self, path: str) -> str:
        return f"{self._key}/{path}" if self._key else path


def open_node(tree: Tree, key: str) -> Group | Array | None:
    """Return the group or array at a key, or None.

    Raises
    ------
    StoreError
        The array cannot be read.
    CorruptDataError
        Its metadata is damaged.
    """
    prefix = f"{key}/" if key else ""
    where = f"{tree.name}: /{key}"
    meta = _read_json(tree, f"{prefix}zarr.json")
    if meta is not None:
        attrs = {} if meta.get("attributes") is None else meta["attributes"]
        if meta.get("node_type") not in ("group", "array") or not isinstance(attrs, dict):
            raise CorruptDataError(f"{where}: its zarr.json describes neither a group nor an array. Restore the store.")
        if meta["node_type"] == "array":
            return Array(tree, key, attrs, parse_v3(meta, where))
        return Group(tree, key, attrs)
    attrs = _read_json(tree, f"{prefix}.zattrs") or {}
    meta = _read_json(tree, f"{prefix}.zarray")
    if meta is not None:
        return Array(tree, key, attrs, parse_v2(meta, where))
    return Group(tree, key, attrs) if _read_json(tree, f"{prefix}.zgroup") is not None else None


def _read_json(tree: Tree, key: str) -> dict[str, Any] | None:
    raw = tree.read(key)
    if raw is None:
        return None
    try:
        meta = json.loads(raw)
    except ValueError as error:
        raise CorruptDataError(
            f"{tree.name}: {key} is not valid JSON ({first_line(error)}). Restore the store from its source."
        ) from error
    if not isinstance(meta, dict):
        raise CorruptDataError(f"{tree.name}: {key} does not hold a JSON object. Restore the store from its source.")
    return meta
