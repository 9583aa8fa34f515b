"""gpuload: single-cell data from disk to shuffled minibatches, on one fast engine.

    loader = gpuload.open_loader("atlas.h5ad", batch_size=64, obs=["cell_type"])
    for batch in loader:
        batch.X, batch.obs["cell_type"], batch.rows

Importing this package imports NumPy but no optional or slow dependency.
"""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from gpuload import errors, opening
from gpuload.alignment import check_join
from gpuload.checks import check_bool, check_choice, check_names, check_obs_names
from gpuload.distributed import rank_and_world_size
from gpuload.errors import (
    BusyError,
    CorruptDataError,
    DeviceError,
    GpuloadError,
    MissingDependencyError,
    PlanError,
    ReadError,
    StoreError,
)
from gpuload.loader import Loader
from gpuload.logs import set_log_level
from gpuload.mapped import Mapped
from gpuload.names import obs_names
from gpuload.packing import pack
from gpuload.perturbation import Knockdown, knockdown
from gpuload.plan import DEFAULT_BLOCK_SIZE, Plan, check_sizes
from gpuload.sampling import (
    BlockShuffle,
    ClassBalanced,
    Custom,
    Grouped,
    Mixture,
    PairedControl,
    PairedNeighbor,
    Sequential,
    Subset,
    Weighted,
    as_sampler,
    split_pairs,
)
from gpuload.settings import takes_settings
from gpuload.source import closed_on_error
from gpuload.splitting import Split, split, subsample
from gpuload.tables import check_layers, check_missing_genes, check_modalities, check_transform, make_tables
from gpuload.threads import import_whole
from gpuload.types import Batch, Transform, resident_dtype
from gpuload.where import parse as parse_where

if TYPE_CHECKING:
    import os
    from collections.abc import Callable, Mapping, Sequence

    import numpy as np
    import pandas as pd
    from numpy.typing import NDArray

    from gpuload.cache import SampleStore
    from gpuload.sampling import Sampler
    from gpuload.types import Source

__version__ = "0.1.0"

__all__ = [
    "Batch",
    "BlockShuffle",
    "BusyError",
    "ClassBalanced",
    "CorruptDataError",
    "Custom",
    "DeviceError",
    "GpuloadError",
    "Grouped",
    "Knockdown",
    "Loader",
    "Mapped",
    "MissingDependencyError",
    "Mixture",
    "PairedControl",
    "PairedNeighbor",
    "PlanError",
    "ReadError",
    "Sequential",
    "Split",
    "StoreError",
    "Subset",
    "Transform",
    "Weighted",
    "__version__",
    "errors",
    "knockdown",
    "obs_names",
    "open_loader",
    "pack",
    "set_log_level",
    "split",
    "split_pairs",
    "subsample",
]

_MODULES = (
    "cache",
    "dali",
    "diversity",
    "estimators",
    "lightning",
    "prometheus",
    "remote",
    "samples",
    "torch",
)
"""Those of the package's modules that are public, once they are imported."""


def __dir__() -> list[str]:
    """Return the public names, for who completes ``gpuload.`` by a key."""
    return [*__all__, *(name for name in _MODULES if name in globals())]


@takes_settings
def open_loader(
    paths: Any,
    *,
    batch_size: int = 64,
    block_size: int | str | None = None,
    fetch_factor: int = 256,
    shuffle: bool = True,
    sampler: Sampler | Callable[[int, int, int], Any] | None = None,
    seed: int = 0,
    drop_last: bool = False,
    rank: int | None = None,
    world_size: int | None = None,
    uneven: str = "pad",
    obs: str | Sequence[str] | None = (),
    obs_table: pd.DataFrame | None = None,
    categories: Mapping[str, Sequence[Any]] | None = None,
    layer: str | Sequence[str] = "X",
    obsm: str | Sequence[str] | None = (),
    modality: str | Sequence[str] | None = (),
    genes: str | Sequence[str] | NDArray[np.bool_] | None = None,
    join: str | Sequence[str] | None = None,
    missing_genes: str = "error",
    where: str | None = None,
    transform: Transform | Mapping[str, Transform | None] | None = None,
    output: str = "dense",
    dtype: Any = "float32",
    device: Any = "auto",
    prefetch: int = 2,
    num_threads: int | None = None,
    verify: str = "once",
    memory_cache: int | str | None = None,
    device_memory: int | str | None = None,
    device_cache: int | str | None = None,
    host_decode: float = 0.0,
    io: str = "auto",
    cache: SampleStore | None = None,
    storage_options: Mapping[str, Any] | None = None,
    settings: str | os.PathLike[str] | Mapping[str, Any] | None = None,
) -> Loader:
    """Open single-cell data, on disk, remote or in memory, as a loader of shuffled minibatches.

    Parameters
    ----------
    paths
        One .h5ad file or several, whose rows are numbered consecutively in the order given; those of a file given twice
        count twice, and a warning is logged. A folder stands for its files, sorted by name. Other formats are
        recognised by content: zarr stores, 10x .h5 files (genes by name or id), MuData (``"cells.h5mu/rna"`` or
        `modality` selects one of several modalities), BioNeMo-SCDL folders, SOMA experiments of tiledbsoma (`modality`
        selects a measurement), dense .npy and zarr arrays of two or more dimensions, CSR matrices saved by
        scipy.sparse.save_npz (preferably with ``compressed=False``), and Parquet files with one cell per row: a list of
        gene indices (``genes`` or ``indices``) and a list of values (``expressions``, ``data`` or ``values``). A
        pattern (``"train-*.parquet"``) stands for the files that match it. Large files open faster from the second time
        on: chunk addresses and row offsets are kept in a hidden file beside them, or in the user's cache folder; the
        environment variable GPULOAD_INDEX names another folder, or is ``off`` to disable this.
        In place of a file: an AnnData, a SciPy CSR matrix or a NumPy array, read in place (a dense array not in C order
        is copied once), so do not modify it while the loader is open. A plain matrix has no obs, and its genes are
        named ``"0"``, ``"1"``, ... X and raw.X of a backed AnnData, and an X that is a matrix of an open .h5ad file or
        zarr folder, are read from there; names and obs are those in memory. A mapping names modalities of the same
        cells: ``{"rna": adata, "prot": "prot.h5ad"}``. A URL or UPath (``s3://``, ``gs://``, ``az://``, ``hf://``,
        ``http(s)://``) of an HDF5 or Parquet file, a zarr store or a SOMA experiment is read over the network with many
        concurrent byte-range requests, which a web server must support. A URL may also be a folder of files, a pattern
        or a SOMA experiment where objects can be listed, which a web server does not allow; of its addresses, what
        follows a ``?`` is sent along.
    batch_size
        Cells per minibatch.
    block_size
        Consecutive cells read together, the unit of shuffling on disk. 1 is true random sampling; ``"chunk"`` aligns
        blocks with the file's chunks, which is faster; ``"2 chunks"`` and so on join adjacent chunks, which is faster
        still until every chunk's checksum has been verified, but mixes less. None: the block size of the sampler if it
        is a ``BlockShuffle(block_size)``, else 16.
    fetch_factor
        Minibatches per fetch: ``batch_size * fetch_factor`` cells are loaded together and shuffled in memory.
    shuffle
        If False, return the cells in file order.
    sampler
        Which cells an epoch contains, and in which order: for example ``gpuload.ClassBalanced("cell_type")``,
        ``Weighted``, ``Subset``, ``PairedControl``, ``Grouped`` or ``Mixture``, or your own function (see
        `gpuload.Custom`). None takes every cell once, in shuffled blocks (``BlockShuffle(block_size)``) or, with
        ``shuffle=False``, in order (``Sequential()``). Samplers also read in blocks of `block_size` cells; for them
        ``"chunk"`` means the average number of cells per chunk. Columns that a sampler uses need not be in `obs`.
    seed
        Random seed, at least 0. The order depends only on the seed, the epoch, the sizes above and the ranks. Use the
        same seed on all ranks.
    drop_last
        Whether each rank drops the last minibatch of an epoch if it is incomplete; refused if none is left, unless the
        sampler deals the rows itself, whose epochs may differ. In shuffled blocks all cells are dropped about equally
        often; in file order always the last ones.
    rank, world_size
        Rank of this training process, and the number of processes. Every rank gets its own shard of the epoch, with the
        same number of minibatches of the same sizes; shards are redrawn each epoch. None: taken from torch.distributed
        if initialised, else from torchrun's environment, else 0 of 1.
    uneven
        What to do when the cells do not divide evenly among the ranks: ``"pad"`` repeats, or ``"drop"`` leaves out,
        fewer than `world_size` cells per epoch.
    obs
        One or several obs columns to return with each minibatch; None: no columns. Numbers and booleans are returned as
        they are; strings and categoricals as int64 codes into `Loader.categories`, -1 for missing values. So are
        pandas' nullable booleans; its nullable integers are float64, NaN where missing.
    obs_table
        Further columns, which `obs`, `where` and samplers name like those of the files; a column in both is taken from
        the table. Rows are matched by the index: names of cells, in any order, or integers, which are row numbers over
        all files. Cells that it lacks have missing values (-1, or NaN for numbers: whole ones become float64), and rows
        for other cells are ignored.
    categories
        Fixed categories per column: ``{"cell_type": ["B cell", "T cell"]}``, or ``train.categories`` to use the codes
        of the loader `train`. Otherwise codes are derived from the opened files, so the same code may mean something
        else in other files. Cells in none of the categories get code -1; a warning is logged if all that have a value
        do, else, at level INFO, how many have another. Columns not named here keep their own categories; samplers and
        `where` use the columns as stored.
    layer
        ``"X"``, ``"raw.X"``, or the name of a layer. Of several, the first becomes ``batch.X`` and the others
        ``batch.layers[name]``, with the same `genes` (raw.X has its own genes), `output` and `dtype`.
    obsm
        Keys of obsm, or None, returned as dense ``batch.obsm[name]``, float32 unless `dtype` is float64. Cells may have
        arrays of any shape there, such as images: (n, 3, 64, 64). ``layer="obsm/<name>"`` returns such a matrix alone,
        as ``batch.X``.
    modality
        Modalities of .h5mu files, or members of a mapping (by default, or if None, all of them). Of several, `layer`,
        `obsm`, `obs` and `genes` refer to the first, and ``batch.modalities[name]`` holds the X of each of the others
        with all of its genes and the same `output` and `dtype`. All must have the same cell names in the same order.
    genes
        Gene names in a list, returned in the order given; or a boolean mask over all genes, in file order; or a
        condition on columns of var, written like `where`, also in file order: ``"highly_variable"``,
        ``"feature_type == 'protein_coding'"``. None takes all. A condition applies to the var of the first layer; the
        others return the same genes. Of several files, each needs these columns, and for no gene may the condition
        hold in one and not in another. Of Parquet, SCDL, .npy and .npz, no columns of var are read.
    join
        How to combine files whose genes, or gene orders, differ. None raises an error; ``"inner"`` takes the genes
        common to all files, in the order of the first; ``"outer"`` those of any file, in order of first appearance,
        filling absent genes with 0 and obs columns absent from some files, or data sets of a collection, with missing
        values (-1, or NaN for numbers, which become float64); a list of names takes those genes. Genes are matched by
        name; the files are not modified. `genes` selects from the joined genes. Each modality is joined on its own
        names; a list applies to the first.
    missing_genes
        What to do about names in a list, `genes` or `join`, that are genes of no file: ``"error"``, or ``"zero"``,
        which delivers them as 0, for example to a model that was trained on other files. At least one must be a gene; a
        warning names some of the others. With ``join="inner"``, genes that only some files have are refused.
    where
        Filter on obs columns: ``"cell_type == 'T cell' and pct_mito < 0.1"``. Supports ==, !=, <, <=, >, >=, in, and,
        or, not, isna(column) and notna(column); quote a column whose name is not a Python identifier in backticks.
        Columns of numbers compare with each other: ``n_spliced > n_unspliced``. Ordered categories compare by their
        order: ``stage >= 'II'``. Missing values equal nothing, so ``not flag`` holds for cells whose flag is missing:
        add ``and notna(flag)`` to leave them out. For many values use ``column in ['a', 'b']``, which looks at each
        cell once; a chain of ``or`` looks once per value. The columns need not be in `obs`, and the filter does not
        read X. Equivalent to ``sampler=Subset(mask, sampler)``: with any sampler, the other cells are never read, rows
        keep their numbers over all cells, and a sampler's labels and weights cover all cells.
    transform
        Arithmetic fused into the gather, for example ``gpuload.Transform(target_sum=1e4, log1p=True)``, which are the
        defaults: ``Transform(log1p=True)`` scales too, unless ``target_sum=None`` is given. Applies to X and to the
        other layers, counts among them; other modalities and obsm are left unchanged. A mapping sets it per layer or
        other modality, and leaves those that it does not name unchanged: ``{"X": gpuload.Transform()}``. A warning is
        logged if X was log-transformed already, as far as an AnnData says so by ``uns["log1p"]``, as scanpy writes it;
        in zarr at an address, only where objects can be listed.
    output
        ``"dense"`` for (n, n_vars) arrays, or ``"csr"`` for CSR matrices.
    dtype
        ``"float32"`` or ``"float64"``; or, for dense output, ``"float16"`` or ``"bfloat16"``. float64 holds what any
        type stores, but for integers above 2**53, and takes twice the memory of float32, which rounds values stored as
        float64, and integers above 2**24. NumPy and CuPy have no bfloat16, so its minibatches are uint16 arrays of the
        bit patterns, which the PyTorch front returns as torch.bfloat16.
    device
        ``"cpu"``; ``"cuda:0"``; ``"cuda"``, this process's GPU under torchrun, else the first; or ``"auto"``, a usable
        GPU if there is one, else the CPU, on which the GPU settings below have no effect; the choice is logged. A
        torch.device stands for its name.
    prefetch
        Fetches to load ahead of the consumer.
    num_threads
        Native threads that read and decode, and as many again that assemble minibatches; None: one of each per core
        available to this process; under torchrun and in a container, its share of them. On a GPU, threads that read
        (None: KvikIO's setting, or 8, and 4 when reading through page-locked memory), and as many that decode
        `host_decode`, and what the GPU has no decoder for (None: one per core, as above).
    verify
        When to verify the file's checksums: ``"once"`` per stored chunk after the file is opened, before any of its
        data is returned (later reads inflate only as much of the chunk as they need); ``"always"``, on every read;
        ``"never"``, which inflates only as much as needed from the start.
    memory_cache
        Host memory in which decoded chunks are kept, in bytes or as ``"20GiB"``; those that fit are read and decoded
        only in the first epoch. Whole numbers below 65,536, as gene numbers and counts are, take 1 or 2 bytes each:
        about a fifth more than a gzip file of counts. Other values take 4, or 8 if `dtype` is float64 and float32 would
        round them. Integers that `dtype` rounds, and what is stored uncompressed, are not kept. Each process has its
        own. With a GPU, it is page-locked, has what finds no room in `device_cache`, in the same form, and kernels read
        it in place. None: no cache.
    device_memory
        Maximum device memory to use, in bytes or as ``"20GiB"``; None: limited only by the GPU.
    device_cache
        Part of it used to cache chunks; those that fit are read from disk only in the first epoch. Gene numbers and
        counts below 65,536 are kept decoded, in 3 to 4 bytes per stored value, other chunks in their on-disk form; with
        ``verify="always"`` all are. None: no cache.
    host_decode
        Share of the compressed chunks, from 0 to 1, that CPU cores decode in place of the GPU (`num_threads`), once
        `device_cache` and `memory_cache` are full: for a GPU that training keeps busy beside idle cores. The
        minibatches are the same.
    io
        How bytes reach the GPU: ``"kvikio"`` (GPUDirect Storage if available), ``"pinned"`` (through page-locked host
        memory), or ``"auto"``, which alternates for the first reads, then uses the faster and logs the choice.
        ``"kvikio"`` also reads S3 and HTTP objects with KvikIO's own client if it can reach them.
    cache
        For URLs: a local store of what has been read, so that later epochs read from local disk; a
        `gpuload.cache.SampleStore` over a `gpuload.cache.BlockRemote`, whose credentials are then used.
    storage_options
        For URLs: credentials and other client options that should not come from the environment: ``{"anonymous":
        True}`` for public buckets, ``{"profile": "lab"}``, ``{"endpoint": "http://..."}``; see
        `gpuload.remote.ObjectRemote`, and for ``hf://`` `gpuload.remote.HubRemote`.
    settings
        A settings file written by ``gpuload tune``, or its contents: supplies every argument above that is not given.
        Arguments given take precedence, even if they equal the default.

    Returns
    -------
    Loader
        Iterate over it once per epoch.

    Raises
    ------
    PlanError
        A setting is invalid; detected before any file is opened where possible.
    StoreError, ReadError, CorruptDataError
        A file is not as expected; see `gpuload.errors`.
    DeviceError
        The device cannot be used.
    """
    del settings  # read by the decorator
    check_sizes(batch_size, DEFAULT_BLOCK_SIZE if block_size is None else block_size, fetch_factor, prefetch, seed)
    batch_size, fetch_factor, prefetch, seed = int(batch_size), int(fetch_factor), int(prefetch), int(seed)
    check_choice("uneven", uneven, ("drop", "pad"))
    rank, world_size = rank_and_world_size(rank, world_size)
    sampler = None if sampler is None else as_sampler(sampler)
    check_bool("drop_last", drop_last)
    opening.check_sampler(sampler, shuffle)
    block_size = opening.block_size_for(sampler, block_size)
    check_choice("output", output, ("dense", "csr"))
    dtype = opening.check_dtype(dtype, output)
    layers, obsm = check_layers(layer), check_names("obsm", obsm)
    modalities = check_modalities(modality, paths)
    transform = check_transform(transform, layers, modalities)
    join = check_join(join, fills=check_missing_genes(missing_genes, genes, join))
    wanted = None if where is None else parse_where(where)
    wanted_genes = parse_where(genes, "genes") if isinstance(genes, str) else None
    obs = check_obs_names("obs", obs)
    meant = opening.check_categories(categories, obs)
    import_whole("gpuload.formats", "gpuload.backends.cpu")
    from gpuload.backends import open_backend
    from gpuload.formats import open_matrices, read_obs_names
    from gpuload.formats.addresses import at_addresses

    paths = at_addresses(paths, cache, storage_options)
    opening.warn_of_repeats(paths)
    sources: list[Source] = []

    def cell_names() -> NDArray[np.object_]:
        return read_obs_names(paths, modalities[0] if modalities else None, layers[0], sources)

    backend = open_backend(
        device,
        num_threads=num_threads,
        verify=verify,
        values=resident_dtype(dtype),
        memory_cache=memory_cache,
        device_memory=device_memory,
        device_cache=device_cache,
        host_decode=host_decode,
        io=io,
        n_matrices=len(layers) + len(obsm) + len(modalities[1:]),
    )
    columns_of_where = () if wanted is None else wanted.columns
    columns = tuple(dict.fromkeys([*obs, *(() if sampler is None else sampler.columns), *columns_of_where]))
    with closed_on_error(backend), ExitStack() as on_error:
        try:
            stores = open_matrices(
                paths,
                layers=layers,
                obsm=obsm,
                modalities=modalities,
                obs=columns,
                obs_table=None if obs_table is None else (obs_table, cell_names),
                join=join,
                var=() if wanted_genes is None else wanted_genes.columns,
            )
        except StoreError as error:
            opening.explain_missing_column(error, sampler, (*obs, *columns_of_where), obs_table, wanted)
            raise
        on_error.enter_context(closed_on_error(*stores.values()))
        sources += (source for opened in stores.values() for source in opened.sources)
        store = stores["X"]
        opening.check_memory(list(stores.values()), resident_dtype(dtype), backend, batch_size, fetch_factor, prefetch)
        if wanted is not None:
            sampler = Subset(wanted.mask(store.obs), sampler)
        strategy = opening.bind(sampler, shuffle, block_size, batch_size, fetch_factor, store, cell_names)
        genes = genes if wanted_genes is None else opening.genes_where(wanted_genes, stores)
        stores["X"] = replace(
            store, obs={name: opening.coded(store, name, meant.get(name), strategy) for name in obs}, var=()
        )
        tables = make_tables(
            stores,
            layers[0],
            genes=genes,
            transform=transform,
            output=output,
            dtype=dtype,
            fills=missing_genes == "zero",
        )
        opening.check_batches(list(tables.values()), batch_size, backend)
        plan = Plan(
            strategy,
            batch_size,
            fetch_factor,
            seed,
            drop_last=drop_last,
            rank=rank,
            world_size=world_size,
            uneven=uneven,
        )
        opening.check_epoch(plan)
        return Loader(tables, backend, plan, prefetch, cell_names)
