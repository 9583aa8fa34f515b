"""Map gene numbers in Parquet files of cells to genes, with the table of genes beside them, if there is one.

References
----------
.. [1] Tahoe-100M, Hugging Face datasets tahoebio/Tahoe-100M: table gene_metadata (token_id, gene_symbol, ensembl_id).
"""

from __future__ import annotations

import logging
import os
from typing import TYPE_CHECKING

import numpy as np

from gpuload.errors import BusyError, ReadError, StoreError, listing
from gpuload.formats.addresses import as_address, child_of
from gpuload.formats.arrays import as_strings, check_n_vars, numbered
from gpuload.formats.parquet import opened
from gpuload.formats.recognise import GENES_FILE

if TYPE_CHECKING:
    from numpy.typing import NDArray

_TOKENS, _NAMES, _IDS = ("token_id", "gene_id"), ("gene_symbol", "gene_name", "symbol"), ("ensembl_id", "ensembl")

_log = logging.getLogger("gpuload")


def genes_of(path: str) -> tuple[int, NDArray[np.object_], NDArray[np.object_] | None] | None:
    """Return the number of the first gene, and the genes' names and ids, from the table of genes."""
    table = _table_of(path)
    if table is None:
        return None
    with opened(table) as content:
        columns = content.flat()
        token, name, other = (next((c for c in known if c in columns), None) for known in (_TOKENS, _NAMES, _IDS))
        given = {column: content.column(column) for column in (token, name, other) if column is not None}
    if token is None or (name is None and other is None):
        raise StoreError(
            f"{table}: it has {listing(columns)}; expected token_id, and gene_symbol or ensembl_id. Move it elsewhere "
            "to name genes by their numbers."
        )
    tokens = given[token]
    if tokens.dtype.kind not in "iu" or not tokens.size or tokens.min() < 0 or np.unique(tokens).size < tokens.size:
        raise StoreError(f"{table}: {token} should hold whole numbers, each only once; rewrite the table.")
    first, n_vars, place = int(tokens.min()), int(tokens.max()) - int(tokens.min()) + 1, tokens - tokens.min()
    check_n_vars(table, n_vars)
    names, ids = numbered(n_vars, first), None
    for column in (other, name):  # names if present, else ids, else numbers
        if column is not None:
            is_there = np.array([isinstance(value, str) and bool(value) for value in given[column]], dtype=bool)
            names[place[is_there]] = as_strings(given[column][is_there])
        ids = names.copy() if column == other and column is not None and name is not None else ids
    return first, names, ids


def have_same_table(path: str, other: str, tables: dict[str, str | None]) -> bool:
    """Return whether the numbers of genes in two files mean the same: one table of genes names both, or none does.

    `tables` keeps the table found for each folder, as looking for one at an address takes requests.
    """
    folder, others = _folder_of(path), _folder_of(other)
    if folder == others:
        return True
    for one, its in ((path, folder), (other, others)):
        if its not in tables:
            tables[its] = _table_of(one)
    return tables[folder] == tables[others]


def _table_of(path: str) -> str | None:
    """Return the table of genes of a file, if there is one: beside it, or in the folder above."""
    near = _folder_of(path)
    address = as_address(near)
    folders = [near, os.path.dirname(near)] if address is None else [near, address.parent()] if address.key else [near]
    places = (child_of(folder, sub + GENES_FILE) for folder in folders for sub in ("", "metadata/"))
    return next(filter(_is_there, places), None)


def _folder_of(path: str) -> str:
    address = as_address(path)
    return os.path.dirname(os.path.abspath(path)) if address is None else address.parent()


def _is_there(path: str) -> bool:
    address = as_address(path)
    if address is None:
        return os.path.isfile(path)
    try:
        is_there, denied = address.is_file, address.denied
    except BusyError:
        raise
    except ReadError as error:
        is_there, denied = False, error
    if denied is not None:  # without permission to list, a missing object gives the same error
        _log.warning("%s: treated as missing: %s", path, denied)
    return is_there
