"""The matrix of comparisons, and each rival's settings with their reasons."""

from __future__ import annotations

import math
from typing import Any

from benchmarks.job import LABEL, Arm

SCDATASET_BLOCK = 16
"""Block size of scDataset's main result (its paper, 16 x 256): minibatches about as diverse as random ones."""

ANNBATCH_CHUNK = 32
"""Rows that annbatch reads together; its store is shuffled beforehand, so this costs no diversity."""

ANNBATCH_DEFAULT = 512
"""annbatch's default for rows read together; on its own store this costs no diversity either."""

TILEDBSOMA_CHUNK = 64
"""TileDB-SOMA-ML's default for rows shuffled together, which are a tile of its store here."""

TILEDBSOMA_DEFAULT = 66_688
"""Cells in memory: TileDB-SOMA-ML's default of 65,536, rounded up to thirds of the published file, lest the last fetch
of an epoch be short and soon over."""

N_FILES = 20
"""Number of files over which the multi-file arms spread the cells."""


def arms(batch_size: int = 64, fetch_factor: int = 256) -> list[Arm]:
    """Return every arm; those compared with one another are adjacent."""
    return [
        *_dense(batch_size, fetch_factor),
        *_log1p(batch_size, fetch_factor),
        *_csr(batch_size, fetch_factor),
        *_collection(batch_size, fetch_factor, "dense"),
        *_collection(batch_size, fetch_factor, "csr"),
        *_streaming(batch_size, fetch_factor),
        *_random(batch_size, fetch_factor),
        *_scdl(batch_size, fetch_factor, "dense"),
        *_scdl(batch_size, fetch_factor, "csr"),
        *_census(batch_size),
        *_files(batch_size, fetch_factor),
        *_pairs(batch_size, fetch_factor),
        *_ours(batch_size, fetch_factor),
    ]


def _dense(batch_size: int, fetch_factor: int) -> list[Arm]:
    """Shuffled, dense float32, minibatches as diverse as random ones."""
    common = {"batch_size": batch_size, "fetch_factor": fetch_factor, "output": "dense"}
    scdataset = {**common, "order": "blocks", "block_size": SCDATASET_BLOCK}
    single = {**common, "fetch_factor": 1}
    later = {**common, "order": "blocks", "block_size": "chunk", "n_epochs_before": 1}
    three = {**common, "order": "blocks", "block_size": "3 chunks", "fetch_factor": fetch_factor * 21 // 16}
    return [
        Arm("gpuload/dense/chunk", "dense", "gpuload_torch", {**common, "order": "blocks", "block_size": "chunk"}),
        Arm(
            "gpuload/dense/2-chunks", "dense", "gpuload_torch", {**common, "order": "blocks", "block_size": "2 chunks"}
        ),
        Arm("gpuload/dense/3-chunks", "dense", "gpuload_torch", three),
        Arm("gpuload/dense/chunk-later", "dense", "gpuload_torch", later),
        Arm("gpuload/dense/3-chunks-later", "dense", "gpuload_torch", {**three, "n_epochs_before": 1}),
        Arm("gpuload/dense/16", "dense", "gpuload_torch", {**common, "order": "blocks", "block_size": SCDATASET_BLOCK}),
        Arm("scdataset/dense/16", "dense", "scdataset_backed", {**scdataset, "rows_by": "numbers"}),
        Arm("scdataset-mask/dense/16", "dense", "scdataset_backed", {**scdataset, "rows_by": "mask"}),
        Arm(
            "scdataset-workers/dense/16", "dense", "scdataset_backed", {**scdataset, "rows_by": "mask", "n_workers": 2}
        ),
        Arm("scdataset-anncollection/dense/16", "dense", "scdataset_anncollection", scdataset),
        Arm("annbatch/dense", "dense", "annbatch_store", _annbatch(common)),
        Arm("tiledbsoma-ml/dense", "dense", "tiledbsoma_ml", _tiledbsoma(common)),
        Arm("tiledbsoma-ml/dense-default", "dense", "tiledbsoma_ml", _tiledbsoma(common, TILEDBSOMA_DEFAULT)),
        Arm("gpuload-soma/dense/64", "dense", "gpuload_store", _as_tiledbsoma(common)),
        Arm("scipy-in-ram/dense", "dense", "scipy_ram", single),
    ]


def _log1p(batch_size: int, fetch_factor: int) -> list[Arm]:
    """Shuffled, normalised and log1p, dense float32: the usual model input."""
    common = {"batch_size": batch_size, "fetch_factor": fetch_factor, "output": "dense", "log1p": True}
    blocks = {**common, "order": "blocks"}
    return [
        Arm("gpuload/log1p/chunk", "log1p", "gpuload_torch", {**blocks, "block_size": "chunk"}),
        Arm("gpuload/log1p/2-chunks", "log1p", "gpuload_torch", {**blocks, "block_size": "2 chunks"}),
        Arm(
            "scdataset-mask/log1p/16",
            "log1p",
            "scdataset_backed",
            {**blocks, "block_size": SCDATASET_BLOCK, "rows_by": "mask"},
        ),
        Arm("annbatch/log1p", "log1p", "annbatch_store", _annbatch(common)),
        Arm("annbatch/log1p/512", "log1p", "annbatch_store", _annbatch(common, ANNBATCH_DEFAULT)),
        Arm("scipy-in-ram/log1p", "log1p", "scipy_ram", {**common, "fetch_factor": 1}),
    ]


def _csr(batch_size: int, fetch_factor: int) -> list[Arm]:
    """Shuffled, CSR, minibatches as diverse as random ones."""
    common = {"batch_size": batch_size, "fetch_factor": fetch_factor, "output": "csr"}
    later = {**common, "order": "blocks", "block_size": "chunk", "n_epochs_before": 1}
    unverified = {**common, "order": "blocks", "block_size": "2 chunks", "verify": "never"}
    three = {**common, "order": "blocks", "block_size": "3 chunks", "fetch_factor": fetch_factor * 21 // 16}
    scdataset = {**common, "order": "blocks", "block_size": SCDATASET_BLOCK}
    return [
        Arm("gpuload/csr/chunk", "csr", "gpuload_torch", {**common, "order": "blocks", "block_size": "chunk"}),
        Arm("gpuload/csr/2-chunks", "csr", "gpuload_torch", {**common, "order": "blocks", "block_size": "2 chunks"}),
        Arm("gpuload/csr/3-chunks", "csr", "gpuload_torch", three),
        Arm("gpuload/csr/2-chunks-unverified", "csr", "gpuload_torch", unverified),
        Arm("gpuload/csr/chunk-later", "csr", "gpuload_torch", later),
        Arm("gpuload/csr/16", "csr", "gpuload_torch", {**common, "order": "blocks", "block_size": SCDATASET_BLOCK}),
        Arm("scdataset/csr/16", "csr", "scdataset_backed", {**scdataset, "rows_by": "numbers"}),
        Arm("scdataset-mask/csr/16", "csr", "scdataset_backed", {**scdataset, "rows_by": "mask"}),
        Arm("annbatch/csr", "csr", "annbatch_store", _annbatch(common)),
        Arm("tiledbsoma-ml/csr", "csr", "tiledbsoma_ml", _tiledbsoma(common)),
        Arm("gpuload-soma/csr/64", "csr", "gpuload_store", _as_tiledbsoma(common)),
        Arm("scipy-in-ram/csr", "csr", "scipy_ram", {**common, "fetch_factor": 1}),
    ]


def _collection(batch_size: int, fetch_factor: int, output: str) -> list[Arm]:
    """Shuffled: annbatch's collection, in blocks of 512, its default, and of 32; and what gpuload packs."""
    common = {"batch_size": batch_size, "fetch_factor": fetch_factor, "output": output}
    group, found = f"collection-{output}", []
    for size in (ANNBATCH_DEFAULT, ANNBATCH_CHUNK):
        theirs = _annbatch(common, size)
        ours = {**common, "order": "pre-shuffled", "block_size": size, "fetch_factor": theirs["fetch_factor"]}
        found += [
            Arm(f"annbatch-collection/{output}/{size}", group, "annbatch_store", theirs),
            Arm(f"gpuload-collection/{output}/{size}", group, "gpuload_store", {**ours, "store": "annbatch.zarr"}),
            Arm(f"gpuload-packed/{output}/{size}", group, "gpuload_store", {**ours, "store": "packed.zarr"}),
        ]
    return found


def _streaming(batch_size: int, fetch_factor: int) -> list[Arm]:
    """In file order, dense."""
    common = {"batch_size": batch_size, "fetch_factor": fetch_factor, "output": "dense", "order": "streaming"}
    return [
        Arm("gpuload/dense/streaming", "streaming", "gpuload_torch", common),
        Arm("scdataset/dense/streaming", "streaming", "scdataset_backed", {**common, "rows_by": "numbers"}),
        Arm("scdataset-mask/dense/streaming", "streaming", "scdataset_backed", {**common, "rows_by": "mask"}),
        Arm("tiledbsoma-ml/dense/streaming", "streaming", "tiledbsoma_ml", common),
    ]


def _random(batch_size: int, fetch_factor: int) -> list[Arm]:
    """True random order, dense."""
    common = {
        "batch_size": batch_size,
        "fetch_factor": fetch_factor,
        "output": "dense",
        "order": "blocks",
        "block_size": 1,
    }
    single = {"batch_size": batch_size, "fetch_factor": 1, "output": "dense", "order": "random"}
    return [
        Arm("gpuload/dense/1", "random", "gpuload_torch", common),
        Arm("scdataset/dense/1", "random", "scdataset_backed", {**common, "rows_by": "numbers"}),
        Arm("scdataset-mask/dense/1", "random", "scdataset_backed", {**common, "rows_by": "mask"}),
        Arm("mapped-collection/dense/1", "random", "mapped_collection", single),
        Arm("mapped-collection-workers/dense/1", "random", "mapped_collection", {**single, "n_workers": 2}),
        Arm("annloader/dense/1", "random", "anndata_annloader", single),
    ]


def _scdl(batch_size: int, fetch_factor: int, output: str) -> list[Arm]:
    """True random order: BioNeMo-SCDL's folder, by itself and by gpuload."""
    common = {"batch_size": batch_size, "output": output}
    theirs = {**common, "fetch_factor": 1, "order": "random"}
    ours = {**common, "fetch_factor": fetch_factor, "order": "blocks", "block_size": 1, "store": "scdl"}
    return [
        Arm(f"bionemo-scdl/{output}/1", f"scdl-{output}", "bionemo_scdl", theirs),
        Arm(f"gpuload-scdl/{output}/1", f"scdl-{output}", "gpuload_store", ours),
    ]


def _census(batch_size: int) -> list[Arm]:
    """Shuffled, dense: an experiment laid out as the Census, whose cells are in bands of 2,048, by both.

    TileDB-SOMA-ML with its defaults; gpuload with its settings, and in blocks of a band.
    """
    common = {"batch_size": batch_size, "output": "dense", "fetch_factor": TILEDBSOMA_DEFAULT // batch_size}
    theirs = _tiledbsoma(common, TILEDBSOMA_DEFAULT)
    ours = {**common, "order": "blocks", "store": "census"}
    return [
        Arm("tiledbsoma-ml-census/dense", "census", "tiledbsoma_ml", theirs),
        Arm("gpuload-census/dense/64", "census", "gpuload_store", {**ours, "block_size": TILEDBSOMA_CHUNK}),
        Arm("gpuload-census/dense/chunk", "census", "gpuload_store", {**ours, "block_size": "chunk"}),
    ]


def _pairs(batch_size: int, fetch_factor: int) -> list[Arm]:
    """Sets of cells of one perturbation, each with a matched control, dense: half of a minibatch are controls."""
    common = {"batch_size": 2 * batch_size, "set_size": batch_size, "output": "dense", "match": (LABEL, "cell_line")}
    ours = {**common, "fetch_factor": fetch_factor // 2, "block_size": "chunk"}
    theirs = {**common, "fetch_factor": 1}
    return [
        Arm("gpuload/pairs/chunk", "pairs", "gpuload_pairs", ours),
        Arm("cell-load/pairs", "pairs", "cell_load", {**theirs, "is_consecutive": False, "n_workers": 2}),
        Arm("cell-load/pairs-consecutive", "pairs", "cell_load", {**theirs, "is_consecutive": True, "n_workers": 0}),
    ]


def _files(batch_size: int, fetch_factor: int) -> list[Arm]:
    """Shuffled, dense, the same cells in several files; scDataset reads these through an AnnCollection."""
    common = {"batch_size": batch_size, "fetch_factor": fetch_factor, "output": "dense", "order": "blocks"}
    common["n_files"] = N_FILES
    scdataset = {**common, "block_size": SCDATASET_BLOCK}
    return [
        Arm("gpuload/files/chunk", "files", "gpuload_torch", {**common, "block_size": "chunk"}),
        Arm("gpuload/files/2-chunks", "files", "gpuload_torch", {**common, "block_size": "2 chunks"}),
        Arm("scdataset-anncollection/files/16", "files", "scdataset_anncollection", scdataset),
    ]


def _ours(batch_size: int, fetch_factor: int) -> list[Arm]:
    """What only gpuload is tested on: its other frontend, overlap with the consumer, memory over epochs."""
    chunk = {
        "batch_size": batch_size,
        "fetch_factor": fetch_factor,
        "output": "dense",
        "order": "blocks",
        "block_size": "chunk",
    }
    single = {**chunk, "block_size": 1}
    return [
        Arm("gpuload-dali/dense/chunk", "front", "gpuload_dali", chunk),
        Arm("gpuload-dali/dense/pipeline", "front", "gpuload_dali", {**chunk, "is_piped": True}),
        Arm("gpuload/overlap/chunk", "overlap", "gpuload_torch", chunk, kind="overlap"),
        Arm("gpuload/memory/chunk", "memory", "gpuload_torch", chunk, kind="memory"),
        Arm("gpuload/memory/1", "memory", "gpuload_torch", single, kind="memory"),
    ]


def _tiledbsoma(common: dict[str, Any], n_cells: int | None = None) -> dict[str, Any]:
    """Return TileDB-SOMA-ML's settings for cells in memory; None: as many blocks as our arms of three chunks have."""
    chunk = math.gcd(TILEDBSOMA_CHUNK, common["batch_size"])  # it must divide the rows in memory
    fetch_factor = common["fetch_factor"] * 21 // 16 if n_cells is None else n_cells // common["batch_size"]
    return {**common, "order": "blocks", "fetch_factor": fetch_factor, "shuffle_chunk_size": chunk}


def _as_tiledbsoma(common: dict[str, Any]) -> dict[str, Any]:
    """Return the same of gpuload: blocks of as many cells, and as many of them in memory."""
    fetch_factor = _tiledbsoma(common)["fetch_factor"]
    blocks = {"order": "blocks", "fetch_factor": fetch_factor, "block_size": TILEDBSOMA_CHUNK}
    return {**common, **blocks, "store": "soma"}


def _annbatch(common: dict[str, Any], size: int = ANNBATCH_CHUNK) -> dict[str, Any]:
    """Return annbatch's settings for the same number of resident rows, at most 256 chunks of a size."""
    resident = common["batch_size"] * common["fetch_factor"]
    n_chunks = max(1, min(256, resident // size))
    chunk_size = min(size, resident)
    return {
        **common,
        "order": "pre-shuffled",
        "chunk_size": chunk_size,
        "preload_nchunks": n_chunks,
        "fetch_factor": max(1, n_chunks * chunk_size // common["batch_size"]),
    }
