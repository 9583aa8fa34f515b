"""Read obs and var columns of an open HDF5 group, or of an AnnData in memory, as host arrays. The only user of anndata.

Columns are read one by one, so a file with a hundred columns costs only those requested. Files that predate anndata's
encoding attributes (compound data sets, `__categories`) are supported too.
"""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd

from gpuload.errors import CorruptDataError, GpuloadError, StoreError, first_line, shown
from gpuload.formats.arrays import as_strings, as_text, attrs_of, check_filter, check_stored, member, no_column
from gpuload.sampling.classes import factorize, has_nul
from gpuload.store import ObsColumn, check_exact

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from os import PathLike

    from numpy.typing import NDArray


_PIECE = 1 << 16
"""Names that are read at once."""

_ENCODING_VERSION = "0.2.0"
"""Of arrays, strings and categories, in anndata's specification of files on disk."""


def column_names(frame: Any) -> list[str]:
    """Return the columns of a stored data frame (an h5py group or compound data set), without its index."""
    if frame is None:
        return []
    order = attrs_of(frame, "column-order").get("column-order") if hasattr(frame, "keys") else None
    if order is not None:
        order = [order] if isinstance(order, (str, bytes)) else order
        if not hasattr(order, "__len__") or not all(isinstance(name, (str, bytes)) for name in order):
            raise ValueError(f"the column-order of {frame.name} is {shown(order)}; expected names")
        return [as_text(name) for name in order]  # the index too, if it is also a column
    names = [k for k in frame if k != "__categories"] if hasattr(frame, "keys") else list(frame.dtype.names or ())
    return [name for name in names if name != index_name(frame)]


def read_index(frame: Any, path: str, key: str) -> NDArray[np.object_]:
    """Return the index of a stored data frame as strings, shape (n,) object."""
    name = index_name(frame)
    if not hasattr(frame, "keys"):
        check_stored(frame, f"{path}: /{key}")
    stored = None if name is None else member(frame, name, path) if hasattr(frame, "keys") else frame[name]
    if stored is None:
        raise StoreError(f"{path}: /{key} has no index; rewrite the file with anndata's write_h5ad.")
    check_stored(stored, f"{path}: /{key}/{name}")
    if getattr(stored, "ndim", 1) != 1:
        raise StoreError(
            f"{path}: /{key}/{name} has {stored.ndim} dimensions; expected one. Rewrite the file with AnnData."
        )
    if hasattr(stored, "asstr"):  # an HDF5 data set, of text or numbers
        from gpuload.formats.hdf5_texts import read_texts

        return read_texts(stored)
    return as_strings(_read_element(stored) if hasattr(stored, "attrs") else stored)


def index_pieces(frame: Any, path: str, key: str) -> Iterator[NDArray[np.object_]]:
    """Yield what `read_index` returns in pieces, in order, so that not all of it is in memory.

    It is all at once where a name is missing, and where the index is neither an array nor text with a mask.
    """
    name = index_name(frame)
    stored: Any = member(frame, name, path) if hasattr(frame, "keys") and name is not None else None
    check_stored(stored, f"{path}: /{key}/{name}")
    if hasattr(stored, "keys") and attrs_of(stored, "encoding-type").get("encoding-type") == "nullable-string-array":
        values, mask = stored.get("values"), stored.get("mask")
        if getattr(values, "shape", ()) == getattr(mask, "shape", None) and not mask[()].any():
            stored = values
    if hasattr(stored, "asstr") and stored.ndim == 1:
        for start in range(0, len(stored), _PIECE):
            yield as_strings(stored[start : start + _PIECE])
    elif hasattr(stored, "pieces") and stored.ndim == 1:
        yield from map(as_strings, stored.pieces())
    else:
        yield read_index(frame, path, key)


def read_column(frame: Any, name: str, path: str, key: str = "obs") -> ObsColumn:
    """Return one column of a stored obs, or of the var that `key` names.

    Returns
    -------
    ObsColumn
        Categorical and string columns as int32 codes with categories, which are Python's numbers; nullable integers as
        float64 with NaN; nullable booleans as codes 0, 1 and -1; other numbers and booleans as they are, in native byte
        order.

    Raises
    ------
    StoreError
        There is no such column, or its type is not supported in a minibatch.
    CorruptDataError
        It cannot be read, for example because a code is of no category.
    """
    names = column_names(frame)
    if name not in names:
        raise no_column(path, name, names, key)
    with damage_of(path, name, key):
        return encode(read_values(frame, name, path), name, path, key)


@contextmanager
def damage_of(path: str, name: str, frame: str = "obs") -> Iterator[None]:
    """Report what h5py, pandas and anndata raise of a damaged column, whatever it is."""
    try:
        yield
    except (GpuloadError, ImportError, MemoryError):
        raise
    except Exception as error:
        check_filter(path, error)
        raise CorruptDataError(
            f"{path}: {frame} column {name!r} cannot be read ({first_line(error)}); leave it out, or restore the file "
            "from its source."
        ) from error


def frame_columns(
    adata: Any, names: Sequence[str], where: str, table: Any = None, key: str = "obs"
) -> dict[str, ObsColumn]:
    """Return columns of an AnnData's obs, which is not changed, as they would be read from a file written by it.

    Those of a var, if it is given as `table`, with its name in errors as `key`.

    Raises
    ------
    StoreError
        There is no such column, two have that name, or its type is not supported in a minibatch.
    """
    table = adata.obs if table is None else table
    known = [str(name) for name in table.columns]
    for name in names:
        if name not in known:
            raise no_column(where, name, known, key)
        if known.count(name) > 1:
            raise StoreError(f"{where}: {key} has {known.count(name)} columns {name!r}; rename all but one.")
    columns = {name: table.iloc[:, known.index(name)] for name in names}
    texts = [name for name, column in columns.items() if pd.api.types.infer_dtype(column) == "string"]
    frame = pd.DataFrame({name: columns[name] for name in texts if not has_nul(columns[name].to_numpy(dtype=object))})
    adata.strings_to_categoricals(frame)  # as anndata does on writing; of 'a\0b' and 'a\0c' it would make one category
    return {name: encode(array_of(frame.get(name, columns[name])), name, where, key) for name in names}


def write_h5ad(
    path: str | PathLike[str], X: Any, obs: pd.DataFrame, var: pd.DataFrame, compression: str | None
) -> None:
    """Write cells as an .h5ad file with anndata, as users' files are written."""
    import anndata

    anndata.AnnData(X=X, obs=obs, var=var).write_h5ad(path, compression=compression)


def index_name(frame: Any) -> str | None:
    """Return the name under which the index of a stored data frame is kept; None if it has none."""
    if not hasattr(frame, "keys"):
        names = frame.dtype.names or ()
        return next((n for n in ("index", "_index") if n in names), names[0] if names else None)
    name = attrs_of(frame, "_index").get("_index")
    if name is not None:
        return as_text(name)
    return next((n for n in ("_index", "index") if n in frame), None)


def read_values(frame: Any, name: str, path: str) -> Any:
    """Return a column of a stored data frame of a file as anndata holds it: a NumPy or pandas array."""
    if not hasattr(frame, "keys"):
        check_stored(frame, f"{path}: {frame.name}")
        values = frame[name]
        key = f"{name}_categories"
        categories = attrs_of(frame, key).get(key)
        legacy = frame.file.get(f"uns/{key}")
        if categories is None and legacy is not None:
            categories = legacy[()]
        if categories is None:
            return values
        categories = np.atleast_1d(categories)  # a single one was written as a scalar
        if values.dtype.kind not in "iu" or (values.size and values.max() >= categories.size):
            return values  # obs and var shared the key: these categories are the other's
        return pd.Categorical.from_codes(values, _texts_or_numbers(categories))
    stored = frame[name]
    where = f"{path}: {frame.name}/{name}"
    check_stored(stored, where)
    if "categories" in stored.attrs and not hasattr(stored, "keys"):
        categories = frame.file[attrs_of(stored, "categories")["categories"]]
        check_stored(categories, f"{path}: {categories.name}")
        is_ordered = bool(attrs_of(categories, "ordered").get("ordered", False))
        return pd.Categorical.from_codes(stored[()], _texts_or_numbers(categories[()]), ordered=is_ordered)
    return _read_element(stored)


def array_of(column: Any) -> Any:
    """Return a pandas Series as a NumPy or pandas array."""
    return column.array if isinstance(column.dtype, pd.api.extensions.ExtensionDtype) else column.to_numpy()


def _texts_or_numbers(categories: NDArray[Any]) -> NDArray[Any]:
    return as_strings(categories) if categories.dtype.kind in "OSU" else categories


def _read_element(stored: Any) -> Any:
    """Read one element as anndata does.

    What most columns are is read here, as importing anndata takes longer than opening a file. The rest is read with it,
    which knows every encoding. Nodes of libraries that anndata does not know read themselves.
    """
    if hasattr(stored, "element"):
        return stored.element()
    is_group, kind = hasattr(stored, "keys"), _attribute(stored, "encoding-type")
    if not is_group and kind is None:
        return stored[()]
    if _attribute(stored, "encoding-version") == _ENCODING_VERSION:
        if kind == "categorical" and is_group:
            codes, categories = (_read_element(stored[part]) for part in ("codes", "categories"))
            if isinstance(categories, np.ndarray):  # text that says nothing of its encoding
                categories = _texts_or_numbers(categories)
            return pd.Categorical.from_codes(codes, categories, ordered=bool(attrs_of(stored, "ordered")["ordered"]))
        if kind == "string-array" and not is_group:
            return stored.asstr()[()]
        if kind == "array" and not is_group:
            return stored[()]
    from anndata.io import read_elem

    return read_elem(stored)


def _attribute(stored: Any, name: str) -> str | None:
    """Return an attribute as text, or None if there is none; h5py's own `get` takes a damaged one for missing."""
    return as_text(attrs_of(stored, name)[name]) if name in stored.attrs else None


def encode(values: Any, name: str, path: str, key: str = "obs") -> ObsColumn:
    """Return a NumPy or pandas array as a column; types as for `read_column`."""
    if values.ndim != 1:
        raise _no_column_type(values, name, path, key)
    if isinstance(values, pd.Categorical):
        names = np.asarray(values.categories, dtype=object)
        if values.categories.dtype == np.float32:  # as the numbers that are written: 0.1, not 0.10000000149011612
            names = np.array([float(str(number)) for number in values.categories.to_numpy()], dtype=object)
        return ObsColumn(values.codes.astype(np.int32), names, bool(values.ordered))
    if isinstance(values, pd.arrays.SparseArray):
        values = values.to_dense()
    is_extension = pd.api.types.is_extension_array_dtype(values)
    if is_extension and pd.api.types.is_bool_dtype(values.dtype):  # with missing values, of NumPy's or Arrow's kind
        codes = np.where(values.isna(), -1, values.to_numpy(dtype=bool, na_value=False)).astype(np.int32)
        return ObsColumn(codes, np.array([False, True], dtype=object))
    if is_extension and pd.api.types.is_numeric_dtype(values):
        own = values.dtype.numpy_dtype
        if own.kind in "iu":
            check_exact(values.dropna().to_numpy(dtype=own), f"{path}: {key} column {name!r}")
        dtype = own if own.kind == "f" else np.float64
        return ObsColumn(np.asarray(values.to_numpy(dtype=dtype, na_value=np.nan)))
    array = values if is_extension else np.asarray(values)
    if array.dtype.kind in "biuf" and array.dtype.itemsize <= 8:
        return ObsColumn(np.ascontiguousarray(array, dtype=array.dtype.newbyteorder("=")))
    if array.dtype.kind in "OSU" or pd.api.types.is_string_dtype(array):
        try:
            return _encode_strings(array)
        except UnicodeDecodeError as error:
            raise StoreError(
                f"{path}: {key} column {name!r} holds bytes that are no UTF-8 text ({first_line(error)}); write them "
                "as text, or leave the column out."
            ) from error
        except TypeError:  # lists, which no code can stand for
            pass
    raise _no_column_type(array, name, path, key)


def _no_column_type(values: Any, name: str, path: str, key: str) -> StoreError:
    """Return the error for a column of another type, or of an array for each cell or gene."""
    use = "cell can be delivered" if key == "obs" else "gene can be compared"
    return StoreError(
        f"{path}: {key} column {name!r} has dtype {values.dtype} and shape {values.shape}; only categorical, string, "
        f"numeric (of up to 8 bytes) and boolean columns of one value per {use}; leave it out, or "
        f"convert it (of dates, {key}[{name!r}].astype(str) is text)."
    )


def _encode_strings(array: Any) -> ObsColumn:
    is_text = pd.api.types.infer_dtype(array) == "string"  # missing values apart
    texts = array if is_text else pd.Series([v.decode() if isinstance(v, bytes) else v for v in array], dtype=object)
    codes, categories = factorize(texts, sort=True)
    return ObsColumn(codes.astype(np.int32), np.asarray(categories, dtype=object))
