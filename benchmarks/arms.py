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
        *_depth(batch_size, fetch_factor),
        *_ours(batch_size, fetch_factor),
    ]


def _group(group: str, *arms: tuple[str, str, dict[str, Any]]) -> list[Arm]:
    """Return the arms of a group, given as name, rival and settings."""
    return [Arm(name, group, rival, settings) for name, rival, settings in arms]


def _blocks(common: dict[str, Any], block_size: int | str, **more: Any) -> dict[str, Any]:
    """Return settings of block shuffling."""
    return {**common, "order": "blocks", "block_size": block_size, **more}


def _kept(settings: dict[str, Any]) -> dict[str, Any]:
    """Return settings of a later epoch, for which decoded chunks are kept in memory."""
    return {**settings, "n_epochs_before": 1, "memory_cache": "4GiB"}


def _dense(batch_size: int, fetch_factor: int) -> list[Arm]:
    """Shuffled, dense float32, minibatches as diverse as random ones."""
    common = {"batch_size": batch_size, "fetch_factor": fetch_factor, "output": "dense"}
    three = _blocks(common, "3 chunks", fetch_factor=fetch_factor * 21 // 16)
    scdataset = _blocks(common, SCDATASET_BLOCK)
    return _group(
        "dense",
        ("gpuload/dense/chunk", "gpuload_torch", _blocks(common, "chunk")),
        ("gpuload/dense/2-chunks", "gpuload_torch", _blocks(common, "2 chunks")),
        ("gpuload/dense/3-chunks", "gpuload_torch", three),
        ("gpuload/dense/chunk-later", "gpuload_torch", _blocks(common, "chunk", n_epochs_before=1)),
        ("gpuload/dense/3-chunks-later", "gpuload_torch", {**three, "n_epochs_before": 1}),
        ("gpuload-kept/dense/chunk", "gpuload_torch", _kept(_blocks(common, "chunk"))),
        ("gpuload/dense/16", "gpuload_torch", _blocks(common, SCDATASET_BLOCK)),
        ("scdataset/dense/16", "scdataset_backed", {**scdataset, "rows_by": "numbers"}),
        ("scdataset-mask/dense/16", "scdataset_backed", {**scdataset, "rows_by": "mask"}),
        ("scdataset-workers/dense/16", "scdataset_backed", {**scdataset, "rows_by": "mask", "n_workers": 2}),
        ("scdataset-anncollection/dense/16", "scdataset_anncollection", scdataset),
        ("annbatch/dense", "annbatch_store", _annbatch(common)),
        ("tiledbsoma-ml/dense", "tiledbsoma_ml", _tiledbsoma(common)),
        ("tiledbsoma-ml/dense-default", "tiledbsoma_ml", _tiledbsoma(common, TILEDBSOMA_DEFAULT)),
        ("gpuload-soma/dense/64", "gpuload_store", _as_tiledbsoma(common)),
        ("scipy-in-ram/dense", "scipy_ram", {**common, "fetch_factor": 1}),
    )


def _log1p(batch_size: int, fetch_factor: int) -> list[Arm]:
    """Shuffled, normalised and log1p, dense float32: the usual model input."""
    common = {"batch_size": batch_size, "fetch_factor": fetch_factor, "output": "dense", "log1p": True}
    return _group(
        "log1p",
        ("gpuload/log1p/chunk", "gpuload_torch", _blocks(common, "chunk")),
        ("gpuload/log1p/2-chunks", "gpuload_torch", _blocks(common, "2 chunks")),
        ("scdataset-mask/log1p/16", "scdataset_backed", _blocks(common, SCDATASET_BLOCK, rows_by="mask")),
        ("annbatch/log1p", "annbatch_store", _annbatch(common)),
        ("annbatch/log1p/512", "annbatch_store", _annbatch(common, ANNBATCH_DEFAULT)),
        ("scipy-in-ram/log1p", "scipy_ram", {**common, "fetch_factor": 1}),
    )


def _csr(batch_size: int, fetch_factor: int) -> list[Arm]:
    """Shuffled, CSR, minibatches as diverse as random ones."""
    common = {"batch_size": batch_size, "fetch_factor": fetch_factor, "output": "csr"}
    scdataset = _blocks(common, SCDATASET_BLOCK)
    return _group(
        "csr",
        ("gpuload/csr/chunk", "gpuload_torch", _blocks(common, "chunk")),
        ("gpuload/csr/2-chunks", "gpuload_torch", _blocks(common, "2 chunks")),
        ("gpuload/csr/3-chunks", "gpuload_torch", _blocks(common, "3 chunks", fetch_factor=fetch_factor * 21 // 16)),
        ("gpuload/csr/2-chunks-unverified", "gpuload_torch", _blocks(common, "2 chunks", verify="never")),
        ("gpuload/csr/chunk-later", "gpuload_torch", _blocks(common, "chunk", n_epochs_before=1)),
        ("gpuload-kept/csr/chunk", "gpuload_torch", _kept(_blocks(common, "chunk"))),
        ("gpuload/csr/16", "gpuload_torch", _blocks(common, SCDATASET_BLOCK)),
        ("scdataset/csr/16", "scdataset_backed", {**scdataset, "rows_by": "numbers"}),
        ("scdataset-mask/csr/16", "scdataset_backed", {**scdataset, "rows_by": "mask"}),
        ("annbatch/csr", "annbatch_store", _annbatch(common)),
        ("tiledbsoma-ml/csr", "tiledbsoma_ml", _tiledbsoma(common)),
        ("gpuload-soma/csr/64", "gpuload_store", _as_tiledbsoma(common)),
        ("scipy-in-ram/csr", "scipy_ram", {**common, "fetch_factor": 1}),
    )


def _collection(batch_size: int, fetch_factor: int, output: str) -> list[Arm]:
    """Shuffled: annbatch's collection, in blocks of 512, its default, and of 32; and what gpuload packs."""
    common = {"batch_size": batch_size, "fetch_factor": fetch_factor, "output": output}
    found = []
    for size in (ANNBATCH_DEFAULT, ANNBATCH_CHUNK):
        theirs = _annbatch(common, size)
        ours = {**common, "order": "pre-shuffled", "block_size": size, "fetch_factor": theirs["fetch_factor"]}
        found += _group(
            f"collection-{output}",
            (f"annbatch-collection/{output}/{size}", "annbatch_store", theirs),
            (f"gpuload-collection/{output}/{size}", "gpuload_store", {**ours, "store": "annbatch.zarr"}),
            (f"gpuload-packed/{output}/{size}", "gpuload_store", {**ours, "store": "packed.zarr"}),
        )
    return found


def _streaming(batch_size: int, fetch_factor: int) -> list[Arm]:
    """In file order, dense."""
    common = {"batch_size": batch_size, "fetch_factor": fetch_factor, "output": "dense", "order": "streaming"}
    return _group(
        "streaming",
        ("gpuload/dense/streaming", "gpuload_torch", common),
        ("scdataset/dense/streaming", "scdataset_backed", {**common, "rows_by": "numbers"}),
        ("scdataset-mask/dense/streaming", "scdataset_backed", {**common, "rows_by": "mask"}),
        ("tiledbsoma-ml/dense/streaming", "tiledbsoma_ml", common),
    )


def _random(batch_size: int, fetch_factor: int) -> list[Arm]:
    """True random order, dense."""
    common = _blocks({"batch_size": batch_size, "fetch_factor": fetch_factor, "output": "dense"}, 1)
    single = {"batch_size": batch_size, "fetch_factor": 1, "output": "dense", "order": "random"}
    return _group(
        "random",
        ("gpuload/dense/1", "gpuload_torch", common),
        ("gpuload-kept/dense/1", "gpuload_torch", _kept(common)),
        ("scdataset/dense/1", "scdataset_backed", {**common, "rows_by": "numbers"}),
        ("scdataset-mask/dense/1", "scdataset_backed", {**common, "rows_by": "mask"}),
        ("gpuload-indexed/dense/1", "gpuload_indexed", {**common, "fetch_factor": 1}),
        ("gpuload-indexed-kept/dense/1", "gpuload_indexed", _kept({**common, "fetch_factor": 1})),
        ("mapped-collection/dense/1", "mapped_collection", single),
        ("mapped-collection-workers/dense/1", "mapped_collection", {**single, "n_workers": 2}),
        ("annloader/dense/1", "anndata_annloader", single),
    )


def _scdl(batch_size: int, fetch_factor: int, output: str) -> list[Arm]:
    """True random order: BioNeMo-SCDL's folder, by itself and by gpuload."""
    common = {"batch_size": batch_size, "fetch_factor": fetch_factor, "output": output}
    return _group(
        f"scdl-{output}",
        (f"bionemo-scdl/{output}/1", "bionemo_scdl", {**common, "fetch_factor": 1, "order": "random"}),
        (f"gpuload-scdl/{output}/1", "gpuload_store", _blocks(common, 1, store="scdl")),
    )


def _census(batch_size: int) -> list[Arm]:
    """Shuffled, dense: an experiment laid out as the Census, whose cells are in bands of 2,048, by both.

    TileDB-SOMA-ML with its defaults; gpuload with its settings, and in blocks of a band.
    """
    common = {"batch_size": batch_size, "output": "dense", "fetch_factor": TILEDBSOMA_DEFAULT // batch_size}
    return _group(
        "census",
        ("tiledbsoma-ml-census/dense", "tiledbsoma_ml", _tiledbsoma(common, TILEDBSOMA_DEFAULT)),
        ("gpuload-census/dense/64", "gpuload_store", _blocks(common, TILEDBSOMA_CHUNK, store="census")),
        ("gpuload-census/dense/chunk", "gpuload_store", _blocks(common, "chunk", store="census")),
    )


def _pairs(batch_size: int, fetch_factor: int) -> list[Arm]:
    """Sets of cells of one perturbation, each with a matched control, dense: half of a minibatch are controls."""
    common = {"batch_size": 2 * batch_size, "set_size": batch_size, "output": "dense", "match": (LABEL, "cell_line")}
    theirs = {**common, "fetch_factor": 1}
    return _group(
        "pairs",
        ("gpuload/pairs/chunk", "gpuload_pairs", {**common, "fetch_factor": fetch_factor // 2, "block_size": "chunk"}),
        ("cell-load/pairs", "cell_load", {**theirs, "is_consecutive": False, "n_workers": 2}),
        ("cell-load/pairs-consecutive", "cell_load", {**theirs, "is_consecutive": True, "n_workers": 0}),
    )


def _depth(batch_size: int, fetch_factor: int) -> list[Arm]:
    """As `_pairs`, and each count is drawn: kept with probability 1/2."""
    return [
        Arm(arm.name.replace("pairs", "depth"), "depth", arm.rival, {**arm.settings, "downsample": 0.5})
        for arm in _pairs(batch_size, fetch_factor)
        if arm.name != "cell-load/pairs"
    ]


def _files(batch_size: int, fetch_factor: int) -> list[Arm]:
    """Shuffled, dense, the same cells in several files; scDataset reads these through an AnnCollection."""
    common = {"batch_size": batch_size, "fetch_factor": fetch_factor, "output": "dense", "n_files": N_FILES}
    return _group(
        "files",
        ("gpuload/files/chunk", "gpuload_torch", _blocks(common, "chunk")),
        ("gpuload/files/2-chunks", "gpuload_torch", _blocks(common, "2 chunks")),
        ("scdataset-anncollection/files/16", "scdataset_anncollection", _blocks(common, SCDATASET_BLOCK)),
    )


def _ours(batch_size: int, fetch_factor: int) -> list[Arm]:
    """What only gpuload is tested on: its other frontend, overlap with the consumer, memory over epochs."""
    chunk = _blocks({"batch_size": batch_size, "fetch_factor": fetch_factor, "output": "dense"}, "chunk")
    return [
        Arm("gpuload-dali/dense/chunk", "front", "gpuload_dali", chunk),
        Arm("gpuload-dali/dense/pipeline", "front", "gpuload_dali", {**chunk, "is_piped": True}),
        Arm("gpuload/overlap/chunk", "overlap", "gpuload_torch", chunk, kind="overlap"),
        Arm("gpuload/memory/chunk", "memory", "gpuload_torch", chunk, kind="memory"),
        Arm("gpuload/memory/1", "memory", "gpuload_torch", {**chunk, "block_size": 1}, kind="memory"),
    ]


def _tiledbsoma(common: dict[str, Any], n_cells: int | None = None) -> dict[str, Any]:
    """Return TileDB-SOMA-ML's settings for cells in memory; None: as many blocks as our arms of three chunks have."""
    chunk = math.gcd(TILEDBSOMA_CHUNK, common["batch_size"])  # it must divide the rows in memory
    fetch_factor = common["fetch_factor"] * 21 // 16 if n_cells is None else n_cells // common["batch_size"]
    return {**common, "order": "blocks", "fetch_factor": fetch_factor, "shuffle_chunk_size": chunk}


def _as_tiledbsoma(common: dict[str, Any]) -> dict[str, Any]:
    """Return the same of gpuload: blocks of as many cells, and as many of them in memory."""
    fetch_factor = _tiledbsoma(common)["fetch_factor"]
    return _blocks(common, TILEDBSOMA_CHUNK, fetch_factor=fetch_factor, store="soma")


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
