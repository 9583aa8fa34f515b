"""gpuload: single-cell data from disk to shuffled minibatches, on one fast engine.

    loader = gpuload.open_loader("atlas.h5ad", batch_size=64, obs=["cell_type"])
    for batch in loader:
        batch.X, batch.obs["cell_type"], batch.rows

Importing this package imports NumPy and nothing else that is optional or slow.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from gpuload import errors
from gpuload.alignment import check_join
from gpuload.checks import check_choice, check_names, check_obs_names
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
from gpuload.opening import bind, block_size_for, check_categories, check_dtype, check_memory, check_sampler, coded
from gpuload.packing import pack
from gpuload.plan import Plan, check_sizes
from gpuload.sampling import (
    BlockShuffle,
    ClassBalanced,
    Custom,
    Grouped,
    Mixture,
    PairedControl,
    Sequential,
    Subset,
    Weighted,
    as_sampler,
    split_pairs,
)
from gpuload.settings import takes_settings
from gpuload.splitting import Split, split
from gpuload.tables import check_modalities, check_transform, make_tables
from gpuload.types import Batch, Transform
from gpuload.where import parse as parse_where

if TYPE_CHECKING:
    import os
    from collections.abc import Callable, Mapping, Sequence

    from numpy.typing import NDArray

    from gpuload.cache import SampleStore
    from gpuload.sampling import Sampler

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
    "Loader",
    "MissingDependencyError",
    "Mixture",
    "PairedControl",
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
    "open_loader",
    "pack",
    "set_log_level",
    "split",
    "split_pairs",
]


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
    obs: str | Sequence[str] = (),
    categories: Mapping[str, Sequence[Any]] | None = None,
    layer: str | Sequence[str] = "X",
    obsm: str | Sequence[str] = (),
    modality: str | Sequence[str] = (),
    genes: Sequence[str] | NDArray[np.bool_] | None = None,
    join: str | Sequence[str] | None = None,
    where: str | None = None,
    transform: Transform | Mapping[str, Transform | None] | None = None,
    output: str = "dense",
    dtype: Any = "float32",
    device: str = "auto",
    prefetch: int = 2,
    num_threads: int | None = None,
    verify: str = "once",
    device_memory: int | str | None = None,
    device_cache: int | str | None = None,
    io: str = "auto",
    cache: SampleStore | None = None,
    storage_options: Mapping[str, Any] | None = None,
    settings: str | os.PathLike[str] | Mapping[str, Any] | None = None,
) -> Loader:
    """Open .h5ad files, or cells in memory, as an endless supply of epochs of minibatches.

    Parameters
    ----------
    paths
        One .h5ad file, or several; rows are numbered through in the order given. A folder of files stands for them in
        the order of their names. Other forms are told by their contents: zarr stores, 10x .h5 files (genes by name or
        id), MuData (``"cells.h5mu/rna"`` or `modality` names the modality where there are several), folders of
        BioNeMo-SCDL, dense .npy, the CSR matrices of scipy.sparse.save_npz (best with ``compressed=False``), and
        Parquet files whose rows are cells, with a list of gene numbers (``genes`` or ``indices``) and one of values
        (``expressions``, ``data`` or ``values``). A pattern (``"train-*.parquet"``) stands for what fits it. Large
        files are opened faster from the second time on: chunk addresses and row offsets are kept in a hidden file
        beside them, or in the user's cache folder; the environment variable GPULOAD_INDEX names another folder or is
        ``off``. In place of a file: an AnnData, a SciPy CSR matrix or a 2-D NumPy array, which is read where it lies (a
        dense one that is not in C order from one copy), so do not write into it meanwhile. A plain matrix has no obs,
        and its genes are called ``"0"``, ``"1"``, ... Of a backed AnnData, X and raw.X are read from its file. A
        mapping names modalities of the same cells: ``{"rna": adata, "prot": "prot.h5ad"}``.
        An address (``s3://``, ``gs://``, ``az://``, ``http(s)://``) of an HDF5 or Parquet file, or of a folder of zarr,
        is read over the network, by ranges of bytes, many requests at a time; a web server must know ranges. A folder
        of files, or a pattern, may be an address where what is there can be listed, which a web server cannot.
    batch_size
        Cells per minibatch.
    block_size
        Consecutive cells read together, the unit of shuffling on disk; 1 is true random sampling; ``"chunk"`` snaps
        the edges to the file's own chunks, which is faster; ``"2 chunks"`` and so on join neighbours, which is faster
        still until every chunk's checksum was verified, and less mixed. None: that of the sampler, where it is a
        ``BlockShuffle(block_size)``; else 16.
    fetch_factor
        Minibatches per fetch: ``batch_size * fetch_factor`` cells are resident at one time and shuffled among each
        other.
    shuffle
        False hands the cells over as they lie in the files.
    sampler
        Which cells an epoch has, and in which order: a value such as ``gpuload.ClassBalanced("cell_type")``,
        ``Weighted``, ``Subset``, ``PairedControl``, ``Grouped`` or ``Mixture``; or a function of your own, see
        `gpuload.Custom`. None takes every cell once, in shuffled blocks (``BlockShuffle(block_size)``) or, with
        ``shuffle=False``, in order (``Sequential()``). Samplers read in blocks of `block_size` cells too; ``"chunk"``
        is there the number of cells that a chunk holds on average. Columns that a sampler names need not be in `obs`.
    seed
        At least 0. The order depends on (seed, epoch), on the sizes above and on the ranks, and on nothing else. Give
        all ranks the same.
    drop_last
        Leave out the last minibatch of an epoch where it is short; on each rank.
    rank, world_size
        Which of how many training processes this is. Each hands over its own part of every epoch: equally many
        minibatches of equal sizes on all ranks, other cells on each, dealt anew in each epoch. None: as
        torch.distributed says where it is initialised, else as torchrun's environment says, else 0 of 1.
    uneven
        What to do with the last cells where they cannot be dealt equally: ``"pad"`` hands over fewer than `world_size`
        cells twice in an epoch; ``"drop"`` leaves out fewer than `world_size`.
    obs
        Columns of obs, one or several, to hand over with each minibatch: numbers and booleans as they are; of text and
        categories codes, int64, which `Loader.categories` tells the meaning of, -1 where the value is missing.
    categories
        What codes are to stand for: ``{"cell_type": ["B cell", "T cell"]}``, or ``train.categories`` for another loader
        whose codes are to be those of the loader `train`; otherwise they follow from the files that are opened, and the
        same code means something else in other files. A cell of none of them has code -1. A column that is not named
        keeps its own; samplers and `where` take columns as the files have them.
    layer
        ``"X"``, ``"raw.X"``, or the name of a layer. Several: the first is ``batch.X``, and ``batch.layers[name]`` are
        the others, with the same choice of `genes` (raw.X has genes of its own), `output` and `dtype`.
    obsm
        Names of matrices of obsm, handed over as ``batch.obsm[name]``: dense float32.
    modality
        Which modality of .h5mu files, or which members of a mapping; all of a mapping where it is left out. Of several,
        `layer`, `obsm`, `obs` and `genes` are of the first, and ``batch.modalities[name]`` are the X of the others, all
        their genes, with the same `output` and `dtype`. Their cells must have the same names in the same order.
    genes
        Names, handed over in the order given, or a mask over all genes, in the order of the file; None takes all.
    join
        What to do where files have other genes, or have them in another order: None refuses them; ``"inner"`` hands
        over the genes that all files have, in the order of the first; ``"outer"`` those of any, in the order in which
        they first appear, 0 where a file lacks them, and columns of obs that only some files have are missing in the
        others (-1; NaN of numbers, which are float64 then); a list of names those. Genes are found by name, and the
        files stay as they are. `genes` chooses among those that are joined. Each modality is joined by its own names; a
        list is of the first.
    where
        Which cells are wanted, by columns of obs: ``"cell_type == 'T cell' and pct_mito < 0.1"``. Known are ==, !=, <,
        <=, >, >=, in, and, or, not, isna(column) and notna(column); columns whose name is no Python name stand in
        backticks. Missing values are equal to nothing. The columns need not be in `obs`, and X is not read. It is
        ``sampler=Subset(mask, sampler)``: whatever the sampler, the other cells are never read; rows keep their
        numbers over all cells, and labels and weights of a sampler are over all cells.
    transform
        Arithmetic fused into the gather, for example ``gpuload.Transform(target_sum=1e4, log1p=True)``: of X and the
        further layers; other modalities and obsm stay as they are. A mapping says it for each, by the name of a layer
        or further modality: ``{"X": gpuload.Transform(), "prot": None}``.
    output
        ``"dense"``: (n, n_vars) arrays; ``"csr"``: CSR matrices of float32.
    dtype
        ``"float32"`` or, for dense output, ``"float16"`` or ``"bfloat16"``. NumPy and CuPy have no bfloat16: its
        minibatches are uint16 arrays of the bits, which the PyTorch front hands over as torch.bfloat16.
    device
        ``"cpu"``; ``"cuda:0"``; ``"cuda"``, the GPU of this process under torchrun, else the first; or ``"auto"``, a
        GPU where one can be used, else the CPU, for which what is said below of a GPU means nothing; it is logged.
    prefetch
        Fetches loading ahead of the consumer.
    num_threads
        Native threads that read and decode, and as many that make minibatches of it; None takes one of each per core
        that this process may use. On a GPU, threads that only read; None takes what KvikIO is set to, or 8, and 4 where
        bytes go through page-locked memory.
    verify
        When the file's checksums are verified: ``"once"`` per stored chunk since the file was opened, before anything
        from that chunk is handed over (later only as much of it is inflated as is needed); ``"always"``, each time;
        ``"never"``, which stops inflating at the last byte needed from the start.
    device_memory
        Most device memory to take, in bytes or as ``"20GiB"``; None: no bound but the GPU's.
    device_cache
        Device memory, of that, for stored chunks as they are on disk: what fits is read from disk in the first epoch
        only. None: none.
    io
        Of a GPU, how bytes get there: ``"kvikio"`` (GPUDirect Storage where the machine has it), ``"pinned"`` (through
        page-locked host memory), or ``"auto"``: the first reads go either way in turn, the rest the faster one, which
        is logged. ``"kvikio"`` reads objects of S3 and web servers by KvikIO's own client too, where that can reach
        them.
    cache
        Of addresses: a store that keeps what is read, so that later epochs are read from the local disk; a
        `gpuload.cache.SampleStore` over a `gpuload.cache.BlockRemote`, whose credentials are then those that count.
    storage_options
        Of addresses: credentials and the like, where they are not to be taken from the environment:
        ``{"anonymous": True}`` for public buckets, ``{"profile": "lab"}``, ``{"endpoint": "http://..."}``; see
        `gpuload.remote.ObjectRemote`.
    settings
        A settings file, as ``gpuload tune`` writes it, or what it holds: stands for every argument above that is not
        given. What is given wins, also where it equals the default.

    Returns
    -------
    Loader
        Iterate over it once per epoch.

    Raises
    ------
    PlanError
        A setting that cannot be carried out; found before any file is opened where that is possible.
    StoreError, ReadError, CorruptDataError
        A file that is not what it should be; see `gpuload.errors`.
    DeviceError
        The device cannot be used.
    """
    del settings  # read by the decorator
    check_sizes(batch_size, 16 if block_size is None else block_size, fetch_factor, prefetch, seed)
    batch_size, fetch_factor, prefetch, seed = int(batch_size), int(fetch_factor), int(prefetch), int(seed)
    check_choice("uneven", uneven, ("drop", "pad"))
    rank, world_size = rank_and_world_size(rank, world_size)
    sampler = None if sampler is None else as_sampler(sampler)
    for name, value in (("shuffle", shuffle), ("drop_last", drop_last)):
        if not isinstance(value, (bool, np.bool_)):
            raise PlanError(f"{name}={value!r}: expected True or False.")
    check_sampler(sampler, shuffle)
    block_size = block_size_for(sampler, block_size)
    check_choice("output", output, ("dense", "csr"))
    dtype = check_dtype(dtype, output)
    layers, obsm = check_names("layer", layer, least=1), check_names("obsm", obsm)
    modalities = check_modalities(modality, paths)
    transform = check_transform(transform, layers, modalities[1:])
    join = check_join(join)
    wanted = None if where is None else parse_where(where)
    obs = check_obs_names("obs", obs)
    meant = check_categories(categories, obs)
    from gpuload.backends import open_backend
    from gpuload.formats import open_matrices
    from gpuload.formats.addresses import at_addresses

    paths = at_addresses(paths, cache, storage_options)
    backend = open_backend(
        device,
        num_threads=num_threads,
        verify=verify,
        device_memory=device_memory,
        device_cache=device_cache,
        io=io,
        n_matrices=len(layers) + len(obsm) + len(modalities[1:]),
    )
    try:
        columns_of_sampler = () if sampler is None else sampler.columns
        columns_of_where = () if wanted is None else wanted.columns
        columns = tuple(dict.fromkeys([*obs, *columns_of_sampler, *columns_of_where]))
        stores = open_matrices(paths, layers=layers, obsm=obsm, modalities=modalities, obs=columns, join=join)
    except BaseException:
        backend.close()
        raise
    try:
        store = stores["X"]
        check_memory(list(stores.values()), batch_size, fetch_factor, prefetch)
        if wanted is not None:
            sampler = Subset(wanted.mask(store.obs), sampler)
        strategy = bind(sampler, shuffle, block_size, batch_size, fetch_factor, store)
        stores["X"] = replace(store, obs={name: coded(store, name, meant.get(name)) for name in obs})
        tables = make_tables(stores, layers[0], genes=genes, transform=transform, output=output, dtype=dtype)
        plan = Plan(
            store.file_rows,
            batch_size,
            fetch_factor,
            strategy,
            seed,
            drop_last=drop_last,
            rank=rank,
            world_size=world_size,
            uneven=uneven,
        )
        return Loader(tables, backend, plan, prefetch)
    except BaseException:
        backend.close()
        for store in stores.values():
            store.close()
        raise
