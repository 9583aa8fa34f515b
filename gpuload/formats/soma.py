"""Open SOMA experiments, as tiledbsoma writes them and the CELLxGENE Census is published, as a `Store`.

An experiment is a TileDB group: ``obs``, and ``ms`` with one measurement per modality. A measurement has ``var``, and
groups ``X`` of layers and ``obsm`` of embeddings. Neither TileDB nor tiledbsoma is needed.

Row r of a matrix is the cell whose ``soma_joinid`` is r; cells and genes must be numbered from 0 without gaps. They are
named by the column that tiledbsoma has made of the AnnData's index: of the index's own name, which it notes in the
table's metadata, or ``obs_id`` and ``var_id``; in the Census, genes by ``feature_name``, and by ``feature_id`` too.
``"X"`` is the layer of that name, else ``"data"``, else ``"raw"``, else the only one; ``"raw.X"`` is that of the
measurement ``"raw"``.

References
----------
.. [1] TileDB, Inc. and Chan Zuckerberg Initiative, SOMA abstract specification ("Experiment", "Measurement").
.. [2] Chan Zuckerberg Initiative, CZ CELLxGENE Discover Census Schema ("census_data").
"""

from __future__ import annotations

import json
import os
from contextlib import closing, contextmanager
from typing import TYPE_CHECKING, Any

from gpuload.errors import StoreError, listing
from gpuload.formats.arrays import OBSM, as_strings, damage_to_metadata, no_column, no_obsm, no_var, numbered
from gpuload.formats.soma_matrices import open_matrix
from gpuload.formats.tiledb_arrays import META, open_arrays, read_tables
from gpuload.formats.tiledb_files import files_of
from gpuload.formats.tiledb_fragments import date_of, time_of, until_now
from gpuload.formats.tiledb_schema import parse_group
from gpuload.formats.tiledb_tiles import damaged
from gpuload.store import Store

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    import numpy as np
    from numpy.typing import NDArray

    from gpuload.formats.tiledb_arrays import Array
    from gpuload.formats.tiledb_files import Files

_ID, _RAW, _MEASUREMENTS, _GROUP = "soma_joinid", "raw", "ms", "__group"

_LAYERS = ("data", _RAW)
_CELL_NAMES = ("obs_id",)
_GENE_NAMES = ("var_id", "feature_name", "feature_id")
_INDEX = "soma_dataframe_original_index_name"


def open_soma(path: str, *, layer: str, obs: Sequence[str], modality: str = "", var: Sequence[str] = ()) -> Store:
    """Open an experiment.

    Parameters
    ----------
    layer
        ``"X"``, ``"raw.X"``, the name of a layer, or ``"obsm/<name>"``.
    modality
        The measurement; empty if there is only one, besides ``"raw"``.
    var
        Columns of the measurement's var to keep in memory.

    Raises
    ------
    StoreError
        It is not an experiment, lacks what was requested, or is not stored in a supported way.
    ReadError, CorruptDataError
        Files are missing or damaged.
    """
    from gpuload.formats.obs import encode

    with _opened(path) as experiment:
        cells, array, genes = experiment.arrays(modality, layer)
        _check_columns(cells, obs, path)
        tables = {cells: obs}
        if genes is not None:
            _check_columns(genes, var, path, "var")
            gene_columns = _named_by(genes, _GENE_NAMES)
            tables[genes] = list(dict.fromkeys([*gene_columns, *var]))
        elif var:
            raise no_var(path, var)
        read = read_tables(tables, _ID, array)
        ids, columns = read[cells]
        n_obs = _checked(ids, cells)
        encoded = {name: encode(values, name, path) for name, values in columns.items()}
        if genes is None:
            matrix, source = open_matrix(array, n_obs, None)
            names, gene_ids, of_genes = numbered(matrix.n_vars), None, {}
        else:
            gene_numbers, named = read[genes]
            n_vars = _checked(gene_numbers, genes)
            names, gene_ids = _gene_names([named[name] for name in gene_columns], n_vars)
            of_genes = {name: encode(named[name], name, path, "var") for name in var}
            matrix, source = open_matrix(array, n_obs, n_vars)
    return Store((matrix,), (path,), names, encoded, (source,), gene_ids, var=(of_genes,))


def obs_columns(path: str) -> list[str]:
    """Return the names of the columns of obs, without the names of cells."""
    with _opened(path) as experiment:
        cells = experiment.obs()
        return [name for name in cells.schema.fields if name not in (_ID, *_named_by(cells, _CELL_NAMES))]


def cell_names(path: str) -> NDArray[np.object_] | int:
    """Return the names of the cells as strings, shape (n_obs,) object; their number if they have none."""
    with _opened(path) as experiment:
        cells = experiment.obs()
        names = _named_by(cells, _CELL_NAMES)[:1]
        ids, found = read_tables({cells: names}, _ID)[cells]
        n_obs = _checked(ids, cells)
        return as_strings(found[names[0]]) if names else n_obs


def cell_column(path: str, name: str) -> Any:
    """Return a column of obs as stored: a NumPy or pandas array of length n_obs."""
    with _opened(path) as experiment:
        cells = experiment.obs()
        _check_columns(cells, [name], path)
        ids, found = read_tables({cells: [name]}, _ID)[cells]
        _checked(ids, cells)
        return found[name]


class _Experiment:
    """The arrays of an experiment."""

    def __init__(self, files: Files) -> None:
        self._files = files
        members = self._members("")
        if "obs" not in members or _MEASUREMENTS not in members:
            inside = [name for name in members if "obs" in self._members(members[name])]
            raise StoreError(
                f"{files.name}: this TileDB group is not a SOMA experiment, which has obs and ms; it has "
                f"{listing(sorted(members)) if members else 'nothing'}."
                + (f" Pass one of its experiments, such as {os.path.join(files.name, inside[0])}." if inside else "")
            )
        self._obs, self._measurements = members["obs"], members[_MEASUREMENTS]

    def obs(self) -> Array:
        return open_arrays(self._files, [self._obs])[0]

    def arrays(self, modality: str, layer: str) -> tuple[Array, Array, Array | None]:
        """Return obs, the array of a layer or an embedding, and the genes that are its columns."""
        below = self._files.below(self._measurements)
        self._files.read_once([key for key in below if os.path.dirname(key).endswith((f"/{_GROUP}", f"/var/{META}"))])
        keys = self._keys(self._measurement(modality, layer), layer)
        cells, array, *genes = open_arrays(self._files, [self._obs, *keys])
        return cells, array, genes[0] if genes else None

    def _measurement(self, name: str, layer: str) -> str:
        """Return the key of a measurement."""
        known = self._members(self._measurements)
        others = [other for other in known if other != _RAW]
        if layer == "raw.X" and (not name or name in known):
            name = _RAW
        if not name:
            if len(others) == 1 or len(known) == 1:
                return known[(others or list(known))[0]]
            raise StoreError(
                f"{self._files.name}: it has {len(known)} measurements; name one of them with modality=: "
                f"{listing(list(known))}."
            )
        if name not in known:
            raise StoreError(
                f"{self._files.name}: there is no measurement {name!r}; its measurements are {listing(list(known))}."
            )
        return known[name]

    def _keys(self, measurement: str, layer: str) -> list[str]:
        """Return the keys of a layer and of the genes that are its columns; or of an embedding."""
        members = self._members(measurement)
        if layer.startswith(OBSM):
            known = self._members(members["obsm"]) if "obsm" in members else {}
            key = known.get(layer.removeprefix(OBSM))
            if key is None:
                raise no_obsm(self._files.name, layer, known)
            return [key]
        known = self._members(members["X"]) if "X" in members else {}
        name = layer
        if layer in ("X", "raw.X"):
            usual = next(iter(known), "") if len(known) == 1 else ""
            name = next((one for one in (layer, *_LAYERS) if one in known), usual)
        if name not in known:
            raise StoreError(
                f"{self._files.name}: there is no layer {layer!r} in {measurement}; "
                + (f"its layers are {listing(list(known))}. Name one with layer=." if known else "it has no layers.")
            )
        if "var" not in members:
            raise StoreError(
                f"{self._files.name}: {measurement} has no var, so its genes are not known; write the experiment again."
            )
        return [known[name], members["var"]]

    def _members(self, key: str) -> dict[str, str]:
        """Return the members of a group, name to key; none if it is not a group."""
        folder = f"{key}/{_GROUP}" if key else _GROUP
        where = os.path.join(self._files.name, folder)
        known = [n for n in self._files.names(folder) if n.startswith("__") and not n.endswith(".vac")]
        names = until_now(known)
        if known and not names:
            raise StoreError(
                f"{where}: its files are dated later than now, from {date_of(min(map(time_of, known))[0])} on; set "
                "this machine's clock right, or write the experiment again on one whose clock is."
            )
        raw = self._files.read_once([f"{folder}/{name}" for name in names])
        found = {}
        for name, path in parse_group([(one, f"{where}/{file}") for one, file in zip(raw, names, strict=True)]).items():
            own = self._relative(path, key)
            if own is None:
                raise StoreError(
                    f"{where}: member {name!r} is elsewhere, at {path}; copy it into the experiment, under a relative "
                    "path."
                )
            found[name] = own
        return dict(sorted(found.items()))

    def _relative(self, path: str, key: str) -> str | None:
        """Return the key of a member of a group, given its path as stored; None if it is not in the experiment."""
        if "://" not in path and not path.startswith("/"):
            own = os.path.normpath(os.path.join(key, path))
            return None if own.startswith("..") else own
        root, path = self._files.name, path.removeprefix("file://").rstrip("/")
        roots = (root,) if "://" in root else (os.path.abspath(root), os.path.realpath(root))
        within = (f"{one.rstrip('/')}/" for one in roots)
        inside = next((path.removeprefix(one) for one in within if path.startswith(one)), None)
        return inside if ".." not in path.split("/") else None


@contextmanager
def _opened(path: str) -> Iterator[_Experiment]:
    with closing(files_of(path)) as files, damage_to_metadata(path):
        yield _Experiment(files)


def _check_columns(table: Array, names: Sequence[str], path: str, key: str = "obs") -> None:
    """Raise StoreError if obs or var lacks columns, or they cannot be delivered."""
    known = [name for name in table.schema.fields if name != _ID]
    for name in names:
        if name not in known:
            raise no_column(path, name, known, key)
        if table.field(name).is_time:
            raise StoreError(
                f"{path}: {key} column {name!r} holds dates or times; only categorical, string, numeric and boolean "
                "columns can be delivered."
            )


def _checked(ids: NDArray[np.int64], array: Array) -> int:
    """Return the number of cells or genes; raise StoreError if they are not numbered from 0 without gaps."""
    if ids.size and (ids[0] != 0 or ids[-1] != ids.size - 1):
        raise StoreError(
            f"{array.where}: its {ids.size} rows are numbered {ids[0]} to {ids[-1]} (soma_joinid); expected 0 to "
            f"{ids.size - 1}, without gaps: write the experiment again."
        )
    return int(ids.size)


def _named_by(table: Array, usual: Sequence[str]) -> list[str]:
    """Return the columns that name the rows of obs or var, the first of which is the index of the AnnData."""
    noted = table.metadata().get(_INDEX, b"null")
    try:
        index = json.loads(noted)
    except ValueError:
        index = noted
    if not isinstance(index, str | None):
        raise damaged(table.where, f"its metadata hold {noted!r} for {_INDEX}")
    return [name for name in dict.fromkeys((index, *usual)) if name in table.schema.fields and name != _ID]


def _gene_names(named: Sequence[Any], n: int) -> tuple[NDArray[np.object_], NDArray[np.object_] | None]:
    """Return the names of genes, and their ids if they have such too."""
    found = [as_strings(column) for column in named[:2]]
    if not found:
        return numbered(n), None
    return found[0], found[1] if len(found) > 1 else None
