"""Fetch freely available real cells, shipped inside packages as data for tests and examples.

    python pipelines/real_cells.py real-cells

- `blood.h5ad`: 700 blood cells, 765 genes, ten cell types; out of scanpy's wheel (BSD-3-Clause).
- `mouse.h5ad`: 10,000 mouse cells, 1,000 genes, counts; out of scanpy's source distribution (BSD-3-Clause).
- `pbmc_5k_protein_v3.h5ad`, `pbmc_10k_protein_v3.h5ad`: 200 blood cells each with genes (16,581 and 16,727) and surface
  proteins (29 and 14), counts; out of scvi-tools' source distribution (BSD-3-Clause).

pip fetches the archives from whatever index this machine is configured for; nothing is installed, and only archives
with the expected checksum are unpacked. Existing files are not fetched again.
"""

from __future__ import annotations

import argparse
import hashlib
import sys
import tarfile
import tempfile
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import gpuload
from gpuload.cli.real_data import DownloadError, download

if TYPE_CHECKING:
    from collections.abc import Callable


@dataclass(frozen=True)
class Shipped:
    """Cells inside an archive of a package.

    Attributes
    ----------
    package, is_source, sha256
        Name and version; which archive of it; the archive's checksum.
    members
        What to extract: the path in the archive, by the name of the file to make.
    convert
        Makes an .h5ad file (the second path) from the extracted data (the first); None if they are one already.
    """

    package: str
    is_source: bool
    sha256: str
    members: dict[str, str]
    convert: Callable[[Path, Path], None] | None = None


def h5ad_of_old_zarr(source: Path, target: Path) -> None:
    """Write a zarr store of AnnData 0.6, whose obs and var are structured arrays, as an .h5ad file with sparse X."""
    import anndata
    import pandas as pd
    import zarr
    from scipy.sparse import csr_matrix

    store = zarr.open_group(source, mode="r")
    genes = store["var"][:]
    obs = pd.DataFrame(index=store["obs"][:]["index"].astype(str))
    var = pd.DataFrame({"symbol": genes["index"].astype(str)}, index=genes["gene_ids"].astype(str))  # symbols repeat
    anndata.AnnData(csr_matrix(store["X"][:]), obs, var).write_h5ad(target, compression="gzip")


SETS = {
    "blood": Shipped(
        "scanpy==1.11.5",
        is_source=False,
        sha256="fcd383ddcf7acbf7c0ca232c25ad51b00aec9f8d2f7c8954b8c6ee0962257166",
        members={"blood.h5ad": "scanpy/datasets/10x_pbmc68k_reduced.h5ad"},
    ),
    "mouse": Shipped(
        "scanpy==1.11.5",
        is_source=True,
        sha256="b2ef5476dfb1144b7dd0fae90b0198699c7988e6b27f083904150642c7ba6b89",
        members={"mouse.h5ad": "scanpy-1.11.5/tests/_data/10x-10k-subset.zarr"},
        convert=h5ad_of_old_zarr,
    ),
    "cite": Shipped(
        "scvi-tools==1.4.2",
        is_source=True,
        sha256="c3d2e6e4cd7d41fccdaeead63c72a4d9a1681bb51f2ace107461217a182eb6e2",
        members={
            name: f"scvi_tools-1.4.2/tests/test_data/{name}"
            for name in ("pbmc_5k_protein_v3.h5ad", "pbmc_10k_protein_v3.h5ad")
        },
    ),
}


def fetch(name: str, folder: Path) -> list[Path]:
    """Return the files of one of the `SETS` in a folder, downloading missing ones.

    Raises
    ------
    DownloadError
        No index can be reached, or the download is not what is expected.
    """
    shipped = SETS[name]
    paths = [folder / member for member in shipped.members]
    if all(path.exists() for path in paths):
        return paths
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        empty = Path(scratch, "archive")
        empty.mkdir()
        try:
            archive = download(shipped.package, empty, is_source=shipped.is_source)
        except DownloadError as error:
            raise DownloadError(f"{error}; {', '.join(shipped.members)} cannot be fetched.") from error
        if hashlib.sha256(archive.read_bytes()).hexdigest() != shipped.sha256:
            raise DownloadError(
                f"{archive.name} is not the expected file; {', '.join(shipped.members)} cannot be fetched."
            )
        for path, member in zip(paths, shipped.members.values(), strict=True):
            found = take_out(archive, member, Path(scratch))
            if shipped.convert is not None:
                shipped.convert(found, Path(scratch, path.name))
                found = Path(scratch, path.name)
            found.replace(path)
    return paths


def take_out(archive: Path, member: str, folder: Path) -> Path:
    """Unpack a member of an archive, which may be a folder; return its path."""
    if archive.suffix == ".whl":
        with zipfile.ZipFile(archive) as wheel:
            return Path(wheel.extract(member, folder))
    with tarfile.open(archive) as source:
        inside = [each for each in source.getmembers() if each.name == member or each.name.startswith(f"{member}/")]
        source.extractall(folder, inside, filter="data")
    return folder / member


def main(arguments: list[str] | None = None) -> int:
    """Run the program; return the exit code."""
    parser = argparse.ArgumentParser(
        prog="real_cells.py",
        description="Fetch real cells from packages: 700 and 10,000 with genes, 400 with genes and surface proteins.",
        epilog="exit codes: 0 done, 1 something could not be fetched, 2 wrong use, 130 interrupted",
    )
    parser.add_argument("folder", type=Path, help="folder for the .h5ad files")
    parser.add_argument(
        "--only",
        nargs="+",
        choices=SETS,
        default=list(SETS),
        metavar="SET",
        help=f"sets to fetch: any of {', '.join(SETS)} (default: all)",
    )
    args = parser.parse_args(arguments)
    code = 0
    for name in args.only:
        try:
            for path in fetch(name, args.folder):
                with gpuload.open_loader(path) as cells:
                    print(f"{path}: {cells.n_obs:,} cells x {cells.n_vars:,} genes")
        except (gpuload.GpuloadError, OSError) as error:
            print(f"real_cells.py: {error}", file=sys.stderr)
            code = 1
        except KeyboardInterrupt:
            print(f"real_cells.py: interrupted; {name} was not fetched", file=sys.stderr)
            return 130
    return code


if __name__ == "__main__":
    sys.exit(main())
