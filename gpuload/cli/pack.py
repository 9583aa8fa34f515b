"""``gpuload pack``: turn files into one pre-shuffled store that anndata opens, and this loader reads fastest."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from gpuload import packing
from gpuload.cli import settings, text
from gpuload.program import whole_number

if TYPE_CHECKING:
    import argparse

EPILOG = """\
DST becomes a sharded zarr v3 store that anndata.read_zarr opens. By default its rows are in true random order, so that
a large block of neighbours is as mixed as random cells; obs records where each row came from, in source_file and
source_row. Everything is read back and compared before DST appears. After an interruption, even kill -9, the same
command resumes.

examples:
  gpuload pack plate1.h5ad plate2.h5ad atlas.zarr
  gpuload pack atlas.h5ad by_line.zarr --group-by cell_line --codec zstd
  gpuload pack atlas.h5ad both.zarr --layer X --layer spliced --obsm X_pca
  gpuload pack studies/ atlas.zarr --join inner
  gpuload pack plates/ passed.zarr --where "passed and pct_mito < 0.1"
  gpuload pack plates/ atlas.zarr --memory 16GiB --scheduler tcp://10.0.0.1:8786
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add this command's options."""
    parser.epilog = EPILOG
    parser.add_argument(
        "paths", type=text.path, nargs="+", metavar="SRC", help="input file or folder; several are packed as one table"
    )
    parser.add_argument("target", type=text.path, metavar="DST", help="store to create, a folder")
    parser.add_argument(
        "--layer", action="append", help="matrix to pack: X, raw.X or a layer's name; repeatable (default: X)"
    )
    parser.add_argument("--obsm", action="append", metavar="NAME", help="obsm matrix to pack as well; repeatable")
    settings.add_join_argument(parser)
    parser.add_argument("--obs", action="append", metavar="COL", help="obs column to keep; repeatable (default: all)")
    parser.add_argument(
        "--where", metavar="TEXT", help="pack only cells for which this condition on obs columns holds (default: all)"
    )
    order = parser.add_argument_group("order").add_mutually_exclusive_group()
    order.add_argument("--group-by", metavar="COL", help="group rows by this obs column, shuffled within each group")
    order.add_argument("--keep-order", action="store_true", help="keep the row order of the sources")
    parser.add_argument("--seed", type=int, default=0, help="random seed of the order (default: 0)")
    group = parser.add_argument_group("storage")
    group.add_argument(
        "--codec",
        choices=packing.CODECS,
        default="lz4",
        help="lz4 reads fastest, zstd is smallest (default: lz4)",
    )
    group.add_argument("--block-size", type=whole_number, default=64, metavar="N", help="cells per chunk (default: 64)")
    group.add_argument("--overwrite", action="store_true", help="replace an existing store once the new one is whole")
    group = parser.add_argument_group("resources")
    group.add_argument(
        "--memory", default="2GiB", metavar="SIZE", help="memory limit for buffers of cells (default: 2GiB)"
    )
    group.add_argument(
        "--num-threads",
        type=whole_number,
        metavar="N",
        help="decoding and encoding threads (default: one per core)",
    )
    group.add_argument("--scheduler", metavar="ADDRESS", help="Dask scheduler whose workers do the packing")
    text.add_output_arguments(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Run the command."""
    text.say_of_compiling(is_quiet=args.quiet)
    start = time.perf_counter()
    with text.Progress(1.0, "packing", is_quiet=args.quiet, unit="s") as progress:
        packed = packing.pack(
            args.paths,
            args.target,
            layer=args.layer or "X",
            obsm=args.obsm or (),
            join=settings.join_of(args),
            obs=args.obs,
            where=args.where,
            group_by=args.group_by,
            keep_order=args.keep_order,
            seed=args.seed,
            codec=args.codec,
            block_size=args.block_size,
            memory=args.memory,
            num_threads=args.num_threads,
            overwrite=args.overwrite,
            scheduler=args.scheduler,
            progress=progress.reach,
        )
    seconds = time.perf_counter() - start
    facts = {name: getattr(packed, name) for name in packed.__slots__}
    if args.json:
        text.print_json({**facts, "seconds": seconds})
        return 0
    per_cell = packed.nbytes / packed.n_obs
    types = packed.dtype if packed.index_dtype is None else f"{packed.dtype}, column numbers {packed.index_dtype}"
    others = [f"{name} {dtype}" for name, dtype in packed.dtypes.items() if name != "X"]
    pairs = [
        ("cells", f"{packed.n_obs:,} of {text.count(packed.n_vars, 'gene')}"),
        ("values", types),
        *([("besides", ", ".join(others))] if others else []),
        ("size", f"{text.size(packed.nbytes)}, {per_cell:,.0f} bytes a cell"),
        ("verified", f"rows read back, digest {packed.digest}"),
        ("time", f"{seconds:,.1f} s, {packed.n_obs / seconds:,.0f} cells/s"),
    ]
    print(f"{args.target}\n{text.facts(pairs)}")
    return 0
