"""Packing: turn sources of any format into one pre-shuffled store that anndata opens, and this loader reads fastest.

    sources ──first pass──▶ parts ──second pass──▶ shards ──read back──▶ the target, by one rename
             (read, split)         (assemble, encode)      (digest of the rows)

Requirements this package answers
---------------------------------
- The target appears complete and verified, or not at all; work that a killed run has synced to disk is not repeated.
- Memory does not grow with the sources, except for row offsets, the order, and one column of obs at a time.
- All matrices of the same cells share one order.
- Nothing is lost: every value is examined before its dtype is chosen, and read back after it was written.
"""

from __future__ import annotations

import json
import os
from contextlib import ExitStack
from hashlib import blake2b
from typing import TYPE_CHECKING, Any

import numpy as np

from gpuload.alignment import check_join
from gpuload.checks import (
    check_bool,
    check_choice,
    check_names,
    check_obs_names,
    check_seed,
    check_whole,
    parse_nbytes,
)
from gpuload.errors import PlanError, ReadError, StoreError, shown
from gpuload.threads import import_whole
from gpuload.where import parse as parse_where

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from numpy.typing import NDArray

    from gpuload.formats import Join
    from gpuload.packing.work import Packed
    from gpuload.where import Where

CODECS = ("lz4", "zstd", "none")

MIN_MEMORY = 1 << 20
"""Bytes: any less holds no task worth its overhead."""

_MAX_MEMORY = 1 << 62
"""Bytes: any more means no limit too, but is beyond int64."""

_TABLE_NBYTES = 64
"""Bytes per cell allowed for obs and the order, in the same estimate."""


def pack(
    paths: Any,
    target: str | os.PathLike[str],
    *,
    layer: str | Sequence[str] = "X",
    obsm: str | Sequence[str] | None = (),
    join: str | Sequence[str] | None = None,
    obs: str | Sequence[str] | None = None,
    where: str | None = None,
    group_by: str | None = None,
    keep_order: bool = False,
    seed: int = 0,
    codec: str = "lz4",
    block_size: int = 64,
    memory: int | str = "2GiB",
    num_threads: int | None = None,
    overwrite: bool = False,
    scheduler: str | None = None,
    progress: Callable[[float], None] | None = None,
) -> Packed:
    """Write files as one AnnData zarr store that is fastest to read: shuffled, in small dtypes and aligned shards.

    The target is sharded zarr version 3, which ``anndata.read_zarr`` (0.12 or later) opens like any other. Its rows are
    in a true random order, so blocks of neighbours are as mixed as random cells, whatever their size. Values are stored
    without loss in the smallest of uint8, uint16, uint32, float32 and float64 that holds all of them (before
    arithmetic on counts in AnnData: ``adata.X.astype("float32")``); column numbers in uint16 for up to 65,536 genes.
    obs keeps all columns, plus ``source_file`` and ``source_row`` with the origin of each row; if files have cell
    names in common, the file's number is appended to all names. var is that of the first file; for joined genes it has
    the columns common to all files, and a gene's values are those of the first file that has it. A warning names the
    columns of var on which the files do not agree.

    Everything is read back and compared with the sources before the target appears, by one rename. Work in progress is
    kept beside it, in ``<target>.packing``; after any interruption the same call resumes there.

    Parameters
    ----------
    paths
        One file or folder, or several; any format that `open_loader` opens from disk, and AnnData and MuData with CSC
        matrices, which are transposed first.
    target
        The folder to create.
    layer
        The matrix of the sources that becomes X: ``"X"``, ``"raw.X"`` or the name of a layer. Several are all packed,
        each under its name: X stays X, wherever it is listed; if it is not listed, the first becomes X.
    obsm
        Names of matrices in obsm to pack too.
    join
        What to do if files have different genes, or in a different order: None refuses them; ``"inner"``, ``"outer"``
        and a list of names pack the genes that `open_loader` would return. With ``"outer"``, columns of obs that only
        some files have are missing values in the others.
    obs
        Columns of obs to keep, one or several; None keeps all.
    where
        Pack only the cells for which a condition on columns of obs holds, ``"passed and pct_mito < 0.1"``, as if there
        were no others; it is written as for `open_loader`. The columns need not be in `obs`. The target equals that of
        files from which AnnData has removed the other cells, and categories that none has any more; except that
        ``source_row`` is the row in the file as it is, and ordered categories stay ordered though files are left with
        different ones. Of matrices by rows, only what holds these cells is read.
    group_by
        A column of obs: rows are grouped by its labels and shuffled within each group; rows without a label come last.
    keep_order
        Keep the rows in the order of the sources.
    seed
        Seed of the order, at least 0.
    codec
        How chunks are encoded: ``"lz4"``, the fastest to read; ``"zstd"``, the smallest, for slow disks and networks;
        ``"none"``. The CUDA backend decodes all three on the device.
    block_size
        Cells per chunk (on average, for sparse matrices); more if a page of memory holds more. Read it in blocks of at
        least as many.
    memory
        Bytes, or text such as ``"2GiB"``: limit on memory for cells. On top come row offsets and the order (more with
        several matrices), the largest column of obs, or all that `where` names, and the names of all cells as UTF-8: 40
        to 100 bytes per cell with names of 20 characters, some of which are mapped files.
    num_threads
        Threads for decoding and encoding; None takes one per core available to this process.
    overwrite
        Replace an existing target, once the new one is complete.
    scheduler
        Address of a Dask scheduler whose workers, which see the same files under the same paths, run the passes.
        `memory` and `num_threads` then apply to each task.
    progress
        Called now and then with the fraction of work done, from 0 to 1.

    Returns
    -------
    Packed
        Describes the target.

    Raises
    ------
    PlanError
        A setting is invalid.
    StoreError, ReadError, CorruptDataError
        A source is invalid, or was changed meanwhile; the target exists already; the disk is too full; or what was
        written does not read back.
    MissingDependencyError
        `scheduler` is given and Dask is not installed.
    """
    layers, obsm, join = check_names("layer", layer, least=1), check_names("obsm", obsm), check_join(join)
    obs = None if obs is None else check_obs_names("obs", obs)
    condition = None if where is None else parse_where(where)
    check_bool("overwrite", overwrite)
    seed, block_size = check_seed(seed), check_whole("block_size", block_size, 1)
    memory_nbytes = _check_settings(group_by, keep_order, codec, memory, num_threads)
    import_whole("gpuload.packing.work")
    from gpuload.packing import job as jobs
    from gpuload.packing import workplace
    from gpuload.packing.cluster import connect
    from gpuload.packing.matrices import Wanted, open_matrices
    from gpuload.packing.tables import chosen_columns
    from gpuload.packing.work import Work

    target = workplace.target_path(target)
    folder, files = f"{target}.packing", _source_files(paths)
    with workplace.translated(target):
        workplace.remove_remains(folder)
    workplace.check_target(target, files, overwrite=overwrite)
    settings: dict[str, Any] = {"layer": layers, "obsm": obsm, "join": join, "obs": None if obs is None else list(obs)}
    settings |= {"where": where, "group_by": group_by, "seed": seed, "keep_order": keep_order, "codec": codec}
    settings |= {"block_size": block_size, "memory": memory_nbytes}
    told = progress or (lambda _: None)
    with ExitStack() as stack:
        stack.enter_context(workplace.translated(target))
        stamps = [_stamp(path) for path in files]
        plan = json.dumps({"version": 4, "sources": stamps, **settings}).encode()  # raised when chunks are encoded anew
        columns, chosen = chosen_columns(files, obs, join), _chosen(files, layers[0], condition, join)
        labels = _labels(files, layers[0], group_by, join, chosen)
        client = None if scheduler is None else stack.enter_context(connect(scheduler))
        own = stack.enter_context(workplace.at_work(folder, target, plan))
        workplace.check_target(target, files, overwrite=overwrite)  # it may have been put back
        wanted = Wanted(files, layers, obsm, join, codec, block_size, memory_nbytes, num_threads, chosen)
        with workplace.discarded_if_refused(folder), ExitStack() as opened:
            matrices, lengths = open_matrices(wanted, own, opened)
            n_obs = matrices[0].job.n_obs
            workplace.check_disk(folder, sum(m.nbytes() for m in matrices) + 2 * n_obs * _TABLE_NBYTES)
            if not jobs.has_order(own):
                jobs.write_order(own, jobs.draw_order(n_obs, seed, labels, is_kept=keep_order), chosen)
            for matrix in matrices:
                origin = matrix.job.origin
                workplace.begin_matrix(origin.own)
                if not jobs.has_offsets(origin):
                    jobs.write_offsets(origin, lengths[0])
                del lengths[0]  # 8 bytes for each cell, which nothing needs from here on
            packed = Work(matrices, files, columns, memory_nbytes, client, num_threads, told).carry_out(target)
        for file, stamp in zip(files, stamps, strict=True):
            if _stamp(file) != stamp:  # it may have been replaced: matrices and tables would be of two files
                raise ReadError(
                    f"{file}: it was changed while it was packed; pack again when nothing is writing to it."
                )
        workplace.publish(folder, own, target, files, overwrite=overwrite)
    told(1.0)
    return packed


def _check_settings(
    group_by: str | None,
    keep_order: bool,
    codec: str,
    memory: int | str,
    num_threads: int | None,
) -> int:
    """Refuse settings that cannot be carried out; return the memory in bytes."""
    check_choice("codec", codec, CODECS)
    check_bool("keep_order", keep_order)
    if group_by is not None and not isinstance(group_by, str):
        raise PlanError(f"group_by={shown(group_by)}: expected the name of an obs column, or None.")
    if keep_order and group_by is not None:
        raise PlanError(f"group_by={group_by!r} with keep_order=True: two orders; drop one.")
    check_whole("num_threads", num_threads or 1, 1)
    nbytes = parse_nbytes("memory", memory)
    if nbytes < MIN_MEMORY:
        raise PlanError(f"memory={memory!r}: expected at least {MIN_MEMORY >> 20}MiB.")
    return min(nbytes, _MAX_MEMORY)


def _source_files(paths: Any) -> list[str]:
    """Return the files that paths stand for."""
    from gpuload.formats.recognise import expand

    each = [paths] if isinstance(paths, (str, os.PathLike)) or not hasattr(paths, "__iter__") else list(paths)
    if not each or not all(isinstance(path, (str, os.PathLike)) and os.fspath(path) for path in each):
        raise PlanError(f"paths={shown(paths)}: expected the path of a file or folder, or several.")
    for path in each:
        if "://" in os.fspath(path):
            raise PlanError(f"paths: {path} is an address, and packing reads files on disk; copy it first.")
    files = [file for path in each for file in expand(os.fspath(path))]
    seen: set[str] = set()
    for file in files:
        at = os.path.realpath(file)  # it may have several names
        if at in seen:
            raise PlanError(f"paths: {file} is given twice; pass every file once.")
        seen.add(at)
    return files


def _stamp(path: str) -> list[Any]:
    """Return an identifier that changes when a source does: its path, and the names, sizes and times of its files."""
    from gpuload.formats.recognise import file_of

    at = file_of(path)
    files = sorted(_files_below(at)) or [at]
    digest = blake2b(digest_size=16)
    for file in files:  # each of them: one that is put back from a copy may be older than others
        status = os.stat(file)
        digest.update(os.fsencode(f"{file.removeprefix(at)}\0{status.st_size}\0{status.st_mtime_ns}\0"))
    return [os.path.abspath(path), len(files), digest.hexdigest()]


def _files_below(folder: str) -> Iterator[str]:
    """Yield the files below a folder; links to folders are followed, and each folder is gone through once."""
    seen = {os.path.realpath(folder)}
    for at, folders, names in os.walk(folder, followlinks=True):
        yield from (os.path.join(at, name) for name in names)
        there = {name: os.path.realpath(os.path.join(at, name)) for name in sorted(folders)}
        folders[:] = [name for name, really in there.items() if really not in seen]
        seen.update(there.values())


def _chosen(files: Sequence[str], layer: str, where: Where | None, join: Join) -> NDArray[np.int64] | None:
    """Return the rows for which a condition holds, ascending: (n_obs,); None if there is none."""
    if where is None:
        return None
    from gpuload.opening import explain_missing_column
    from gpuload.packing.choice import is_made, rows_where
    from gpuload.packing.tables import check_columns

    try:
        check_columns(files, [name for name in where.columns if not is_made(files, name)], join)
    except StoreError as error:
        explain_missing_column(error, None, (), None, where)
        raise
    return rows_where(files, layer, where)


def _labels(
    files: Sequence[str], layer: str, group_by: str | None, join: Join, chosen: NDArray[np.int64] | None
) -> NDArray[np.int64] | None:
    """Return the labels of the rows that are packed as numbers, -1 if missing: (n_obs,)."""
    if group_by is None:
        return None
    from gpuload.packing.tables import check_columns, joined_column
    from gpuload.sampling.classes import factorize

    check_columns(files, [group_by], join)
    labels, _ = factorize(joined_column(files, group_by, layer, chosen))
    return np.asarray(labels, dtype=np.int64)
