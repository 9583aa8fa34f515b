"""The hierarchy of a zarr store: its groups and arrays.

The nodes offer the part of h5py's interface that AnnData's layout needs, so that one reader serves both. Consolidated
metadata is ignored: it may be stale, and each node has its own.

References
----------
.. [1] Zarr core specification version 3, doi:10.5281/zenodo.7319826 ("Metadata"); version 2 ("Hierarchies").
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from gpuload.errors import CorruptDataError, StoreError, first_line
from gpuload.formats.zarr_arrays import Array
from gpuload.formats.zarr_spec import parse_v2, parse_v3
from gpuload.formats.zarr_trees import NODE_FILES

if TYPE_CHECKING:
    from collections.abc import Iterator

    from gpuload.formats.zarr_trees import Tree

_ENCODINGS = {
    "categorical": ("codes", "categories"),
    "nullable-integer": ("values", "mask"),
    "nullable-boolean": ("values", "mask"),
    "nullable-string-array": ("values", "mask"),
}
"""The arrays of groups that form one column, by anndata's encoding type."""


class Group:
    """A group: attributes, and members by name or path; with the subset of h5py's interface that is used here.

    Parameters
    ----------
    tree, key
        Its place in a store.
    attrs
        Its attributes.
    """

    def __init__(self, tree: Tree, key: str, attrs: dict[str, Any]) -> None:
        self._tree = tree
        self._key = key
        self.attrs = attrs

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
        return [name for name in self._tree.children(self._key) if name in self]

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

        Raises
        ------
        StoreError
            It is something else.
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
