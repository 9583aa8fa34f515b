"""Flip bytes of a Parquet file of cells, read it with gpuload and with pyarrow, and compare the two.

A program that is run on its own, as `mutants` is. A mutant is a pure function of (base, number).
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import numpy as np

from tests.mutants import N_OBS, N_VARS, in_turn, run
from tests.other_forms import encoded, write_parquet
from tests.writers import counts

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from numpy.typing import NDArray

MAX_MEMORY = 12 << 30
"""Bytes of address space: a size read from a damaged file must not exhaust the machine's memory."""

SMALL = {"data_page_size": 128, "row_group_size": 20}

ENCODED = encoded("DELTA_BINARY_PACKED", "BYTE_STREAM_SPLIT")

BASES: dict[str, dict[str, Any]] = {
    "snappy": SMALL,
    "leader": {**SMALL, "first": 3, "leader": -2.0},
    "checksums": {**SMALL, "write_page_checksum": True, "first": 3, "leader": -2.0},
    "version-2": {**SMALL, "data_page_version": "2.0"},
    "plain": {**SMALL, "use_dictionary": False, "compression": "none"},
    "none": {**SMALL, "compression": "none", "first": 3, "leader": -2.0},
    "zstd": {**SMALL, "compression": "zstd"},
    "gzip": {**SMALL, "compression": "gzip"},
    "lz4": {**SMALL, "compression": "lz4", "data_page_version": "2.0"},
    "encoded": {**SMALL, **ENCODED, "compression": "none", "first": 3, "leader": -2.0},
    "encoded-8": {**SMALL, **ENCODED, "compression": "none", "dtypes": ("int32", "int64")},
}


def write_base(name: str, path: Path) -> None:
    """Write the file that is to be damaged."""
    X = counts(N_OBS, N_VARS)
    write_parquet(path, X, {"drug": [f"drug {i % 3}" for i in range(N_OBS)]}, **BASES[name])


def byte_regions(path: Path) -> dict[str, NDArray[np.int64]]:
    """Return the byte offsets of each region."""
    import pyarrow.parquet as pq

    metadata = pq.ParquetFile(path).metadata
    owner = np.full(path.stat().st_size, "footer", dtype=object)
    for group in range(metadata.num_row_groups):
        for column in range(metadata.num_columns):
            chunk = metadata.row_group(group).column(column)
            start = min(chunk.data_page_offset, chunk.dictionary_page_offset or chunk.data_page_offset)
            name = chunk.path_in_schema.partition(".")[0]
            owner[start : start + chunk.total_compressed_size] = name
            owner[start : start + 24] = f"{name} header"
    return {str(name): np.flatnonzero(owner == name) for name in sorted(set(owner.tolist()))}


def by_gpuload(path: Path) -> dict[str, Any]:
    """Read all of a file."""
    import gpuload

    with gpuload.open_loader(path, batch_size=8, fetch_factor=2, block_size=3, obs=["drug"], num_threads=1) as loader:
        rows: list[Any] = [None] * loader.n_obs
        drugs: list[Any] = [None] * loader.n_obs
        for batch in loader:
            for row, X, code in zip(batch.rows, batch.X, batch.obs["drug"], strict=True):
                rows[row] = {int(i): float(X[i]) for i in np.flatnonzero(X)}
                drugs[row] = None if code < 0 else str(loader.categories["drug"][code])
        return {"X": rows, "drug": drugs}


def by_pyarrow(path: Path) -> dict[str, Any]:
    """Read the same through pyarrow; anything that breaks a rule is an exception.

    The first pair of each row is a leader, and left out, if those of the first row group are gene 1 and the same value
    below 0.
    """
    import pyarrow.parquet as pq

    table = pq.read_table(path, use_threads=False)
    pairs: list[list[tuple[int, float]]] = []
    for genes, values in zip(table["genes"].to_pylist(), table["expressions"].to_pylist(), strict=True):
        pairs.append(list(zip(genes, values, strict=True)))
    first = {row[0] for row in pairs[: SMALL["row_group_size"]] if row}
    has_leader = len(first) == 1 and all(gene == 1 and value < 0 for gene, value in first)
    rows = []
    for pairs_of_row in pairs:
        if has_leader and pairs_of_row and not (pairs_of_row[0][0] == 1 and np.signbit(pairs_of_row[0][1])):
            raise ValueError("a row without a leader")
        row: dict[int, float] = {}
        for i, value in pairs_of_row[has_leader:]:
            row[i] = float(np.float32(row.get(i, 0.0)) + np.float32(value))
        rows.append({i: value for i, value in row.items() if value != 0})
    return {"X": rows, "drug": table["drug"].to_pylist()}


def is_same(one: Any, other: Any) -> bool:
    """Compare two readings, NaN equal to NaN."""
    return json.dumps(one, sort_keys=True) == json.dumps(other, sort_keys=True)


def judge(path: Path, say: Any, original: dict[str, Any]) -> tuple[str, str]:
    """Return how gpuload handles a damaged file, in the words of `mutants.judge`, and its message if there is one."""
    from gpuload import GpuloadError

    say("gpuload")
    try:
        ours = by_gpuload(path)
    except GpuloadError as error:
        return "refused", f"{type(error).__name__}: {error}"
    except BaseException as error:
        return "foreign", f"{type(error).__name__}: {error}"
    say("pyarrow")
    if is_same(ours, original):
        return "right", ""
    try:
        theirs = by_pyarrow(path)
    except Exception as error:
        return "unlike", f"{type(error).__name__}: {error}"
    return ("equal", "") if is_same(ours, theirs) else ("wrong", "")


def findings(name: str, first: int, n: int, folder: Path) -> Iterator[dict[str, Any]]:
    """Judge n mutants of a base, the first of number `first`."""
    path = folder / f"{name}-{first}.parquet"
    write_base(name, path)
    original = by_pyarrow(path)
    assert is_same(by_gpuload(path), original), "the undamaged file is read wrongly"
    for number, region, say in in_turn(path, byte_regions(path), range(first, first + n), series=1):
        outcome, message = judge(path, say, original)
        yield {"number": number, "region": region, "outcome": outcome, "message": message}


if __name__ == "__main__":
    run(findings, MAX_MEMORY)
