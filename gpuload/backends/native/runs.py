"""Kernels for rewriting stored cells: move runs of elements, check values, digest rows, and compare names.

The digest of a row does not depend on how its numbers are stored, nor the sum of digests on the order of the rows, so
two stores hold the same rows if their sums agree (with an error probability of 2**-64).

References
----------
.. [1] Steele, Lea, Flood, "Fast splittable pseudorandom number generators", OOPSLA 2014, doi:10.1145/2660193.2660195
   (64-bit mixing function).
"""

from __future__ import annotations

from typing import Any

import numpy as np

from gpuload.backends.native.words import native

_ONE = np.uint64(0x9E3779B97F4A7C15)
_TWO = np.uint64(0xBF58476D1CE4E5B9)
_THREE = np.uint64(0x94D049BB133111EB)
_HALF = np.uint64(32)


@native
def copy_runs(start: Any, length: Any, dest: Any, src: Any, out: Any) -> None:
    """Copy each run k, length[k] elements from start[k] on, to dest[k] on, converted to the dtype of `out`."""
    for k in range(start.size):
        a, b, n = start[k], dest[k], length[k]
        for j in range(n):
            out[np.uint64(b + j)] = src[np.uint64(a + j)]


@native
def judge_values(values: Any) -> Any:
    """Return the largest magnitude (0 if there are none), whether all are counts, and whether all are exact as float32.

    Counts are whole numbers of at least 0, but not negative zero.
    """
    largest = values.dtype.type(0)
    are_counts, are_single = True, True
    for k in range(values.size):
        value = values[k]
        largest = max(largest, abs(value))
        are_counts &= (np.floor(value) == value) & (not np.signbit(value))
        are_single &= (np.float64(np.float32(value)) == np.float64(value)) | np.isnan(value)
    return np.float64(largest), are_counts, are_single


@native
def have_common(utf8: Any, starts: Any, file_start: Any, table: Any) -> bool:
    """Return whether a name occurs in more than one file.

    Parameters
    ----------
    utf8 : (nbytes,) uint8
        All names.
    starts : (n + 1,) int64
        The first byte of each name, and the end.
    file_start : (n_files + 1,) int64
        The first name of each file, and the end.
    table : (m,) uint32 or int64
        Zeros, more than there are names. Becomes a hash table with open addressing that holds, for each distinct name,
        the number of its first occurrence, counted from 1.
    """
    file = 0
    for row in range(starts.size - 1):
        while row >= file_start[file + 1]:
            file += 1
        first, n = starts[row], starts[row + 1] - starts[row]
        x = np.uint64(n)
        for k in range(n):
            x = (x ^ np.uint64(utf8[first + k])) * _THREE
        x = (x ^ (x >> _HALF)) * _TWO
        at = np.int64((x ^ (x >> _HALF)) % np.uint64(table.size))
        is_new = True
        while is_new and table[at] != 0:
            other = np.int64(table[at]) - 1
            is_new = starts[other + 1] - starts[other] != n
            for k in range(0 if is_new else n):
                if utf8[starts[other] + k] != utf8[first + k]:
                    is_new = True
                    break
            if not is_new and other < file_start[file]:
                return True
            at = (at + 1) % table.size
        if is_new:
            table[at] = row + 1
    return False


@native
def digest_rows(ids: Any, indptr: Any, indices: Any, bits: Any) -> int:
    """Return the sum, modulo 2**64, of the digests of rows.

    Parameters
    ----------
    ids : (n,) int64
        Row identifiers, which distinguish rows of equal content.
    indptr : (n + 1,) int64
        Row offsets.
    indices : (nnz,) unsigned or int32
        Column numbers; empty if the rows are dense, with widths given by `indptr`.
    bits : (nnz,) uint32 or uint64
        The bits of the values.
    """
    total = np.uint64(0)
    is_dense = indices.size == 0
    for r in range(ids.size):
        first, last = indptr[r], indptr[r + 1]
        row = np.uint64(0)
        for k in range(first, last):
            column = np.uint64(k - first) if is_dense else np.uint64(indices[np.uint64(k)])
            x = (np.uint64(bits[np.uint64(k)]) + (column + np.uint64(1)) * _ONE) * _TWO
            row += (x ^ (x >> _HALF)) * _THREE
        x = (row ^ (np.uint64(ids[r]) + np.uint64(1)) * _ONE) * _TWO
        x = (x ^ (x >> _HALF)) * _THREE
        total += x ^ (x >> _HALF)
    return total


@native
def digest_elements(first: int, indptr: Any, indices: Any, bits: Any, is_by_columns: bool) -> int:
    """Return the sum, modulo 2**64, of the digests of elements, each of its row, column and value.

    Parameters
    ----------
    first
        Row of the matrix at which `indptr` begins; its column if the elements are stored by columns.
    indptr, indices, bits
        As in `digest_rows`, with row numbers in place of column numbers if the elements are stored by columns.
    is_by_columns
        Whether the elements are stored by columns (CSC).
    """
    total = np.uint64(0)
    for r in range(indptr.size - 1):
        own = np.uint64(first + r)
        for k in range(indptr[r], indptr[r + 1]):
            other = np.uint64(indices[np.uint64(k)])
            row, column = (other, own) if is_by_columns else (own, other)
            x = (np.uint64(bits[np.uint64(k)]) + (column + np.uint64(1)) * _ONE) * _TWO
            x = ((x ^ (x >> _HALF)) + row + np.uint64(1)) * _THREE
            total += x ^ (x >> _HALF)
    return total


@native
def count_rows(rows: Any, counts: Any) -> None:
    """Add the number of occurrences of each row to `counts`."""
    for k in range(rows.size):
        counts[np.uint64(rows[np.uint64(k)])] += 1


@native
def count_buckets(rows: Any, offsets: Any, size: int, counts: Any) -> None:
    """Add to `counts` the elements of each bucket of `size` elements; a row counts in every bucket it overlaps."""
    for k in range(rows.size):
        row = np.int64(rows[np.uint64(k)])
        for bucket in range(offsets[row] // size, (offsets[row + 1] - 1) // size + 1):
            counts[bucket] += 1


@native
def sort_by_bucket(
    first: int,
    indptr: Any,
    rows: Any,
    values: Any,
    offsets: Any,
    size: int,
    cursor: Any,
    out_rows: Any,
    out_columns: Any,
    out_values: Any,
) -> None:
    """Group elements stored by columns, starting at column `first`, by bucket, writing from each bucket's cursor on."""
    for c in range(indptr.size - 1):
        for k in range(indptr[c], indptr[c + 1]):
            row = np.int64(rows[np.uint64(k)])
            for bucket in range(offsets[row] // size, (offsets[row + 1] - 1) // size + 1):
                at = np.uint64(cursor[bucket])
                cursor[bucket] += 1
                out_rows[at] = row
                out_columns[at] = first + c
                out_values[at] = values[np.uint64(k)]


@native
def place_elements(
    rows: Any, columns: Any, values: Any, first: int, cursor: Any, out_columns: Any, out_values: Any
) -> None:
    """Append elements to their rows, at the cursor of each row from `first` on; those out of range are dropped."""
    for k in range(rows.size):
        row = np.int64(rows[k]) - first
        at = cursor[row]
        cursor[row] += 1
        if 0 <= at < out_values.size:
            out_columns[np.uint64(at)] = columns[k]
            out_values[np.uint64(at)] = values[k]


@native
def count_mapped(indptr: Any, indices: Any, maps: Any, map_start: Any, counts: Any) -> None:
    """Set `counts` to the number of elements of each row that have a place in its map, which begins at `map_start`."""
    for r in range(counts.size):
        first, n = map_start[r], 0
        for k in range(indptr[r], indptr[r + 1]):
            n += maps[np.uint64(first + np.int64(indices[np.uint64(k)]))] >= 0
        counts[r] = n


@native
def map_rows(
    indptr: Any,
    indices: Any,
    values: Any,
    maps: Any,
    map_start: Any,
    out_indptr: Any,
    out_indices: Any,
    out_values: Any,
) -> None:
    """Map the column numbers of each row through the row's map, and sort each row by column.

    Elements without a place are dropped; `out_indptr` counts those that have one.
    """
    for r in range(indptr.size - 1):
        first, start = map_start[r], out_indptr[r]
        at, is_sorted = start, True
        for k in range(indptr[r], indptr[r + 1]):
            column = maps[np.uint64(first + np.int64(indices[np.uint64(k)]))]
            if column >= 0:
                out_indices[np.uint64(at)] = column
                out_values[np.uint64(at)] = values[np.uint64(k)]
                is_sorted &= at == start or out_indices[np.uint64(at - 1)] <= out_indices[np.uint64(at)]
                at += 1
        if not is_sorted:
            order = np.argsort(out_indices[start:at])
            out_indices[start:at] = out_indices[start:at][order]
            out_values[start:at] = out_values[start:at][order]


@native
def map_dense(indptr: Any, values: Any, maps: Any, map_start: Any, out: Any) -> None:
    """Copy the columns of dense rows, concatenated in `values`, to their places in zeroed rows."""
    for r in range(indptr.size - 1):
        first = indptr[r]
        for k in range(first, indptr[r + 1]):
            column = maps[np.uint64(map_start[r] + k - first)]
            if column >= 0:
                out[np.uint64(r), np.uint64(column)] = values[np.uint64(k)]
