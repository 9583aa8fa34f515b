"""Flip bytes of a file, read it with gpuload and with h5py, and compare the two. A program that is run on its own.

``python -m tests.mutants`` reads tasks, one per line: a JSON list of BASE, FIRST, N, FOLDER and perhaps only-h5py. It
prints one JSON line per mutant, after a line that says in which stage it is, so that the caller knows where a crash or
a hang occurred, and a line when a task is over. A mutant is a pure function of (base, number).
"""

from __future__ import annotations

import faulthandler
import json
import resource
import subprocess
import sys
import tempfile
import threading
import warnings
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import h5py
import numpy as np

from tests.variants import CODECS, CONTAINERS
from tests.writers import cells_frame, counts, genes_frame, write_csr, write_dense, write_root

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from numpy.typing import NDArray

N_OBS, N_VARS = 60, 24
OBS = ["cell_line", "depth"]
HUNG_S = 60
"""Seconds after which a mutant counts as hung. Most take about 10 ms; one with millions of genes, by its footer, 20."""

MAX_MEMORY = 8 << 30
"""Bytes of address space: a size read from a damaged file must not exhaust the machine's memory."""

REGIONS = ("data", "indices", "indptr", "obs", "metadata", "superblock")

BASES: dict[str, dict[str, Any]] = {
    **{name: CODECS[name] for name in ("contiguous", "gzip4", "lzf", "zstd", "lz4", "fletcher32")},
    "gzip-shuffle-fletcher32": {"compression": "gzip", "shuffle": True, "fletcher32": True},
    "blosc-lz4": CONTAINERS["blosc-lz4-shuffle"],
    "blosc-zlib": CONTAINERS["blosc-zlib-noshuffle"],
    "bitshuffle-lz4": CONTAINERS["bitshuffle-lz4"],
    "bitshuffle-zstd": CONTAINERS["bitshuffle-zstd"],
    "latest": {"compression": "gzip"},
    "dense-tiles": {"compression": "gzip", "chunks": (16, 10)},
    "dense-contiguous": {},
}


def write_base(name: str, path: Path) -> None:
    """Write the file that is to be damaged."""
    X, options = counts(N_OBS, N_VARS), BASES[name]
    libver = ("latest", "latest") if name == "latest" else None
    with h5py.File(path, "w", libver=libver) as file:
        write_root(file, cells_frame(N_OBS)[OBS], genes_frame(N_VARS))
        if name.startswith("dense"):
            write_dense(file, "X", X.toarray(), **options)
        else:
            data, indices = ({**options, "chunks": (n,)} if options else {} for n in (90, 50))
            write_csr(file, "X", X, data=data, indices=indices)


def byte_regions(path: Path) -> dict[str, NDArray[np.int64]]:
    """Return the byte offsets of each region; metadata is everything outside the datasets' storage."""
    size = path.stat().st_size
    owner = np.full(size, "metadata", dtype=object)
    owner[:96] = "superblock"
    with h5py.File(path) as file:

        def visit(key: str, node: Any) -> None:
            label = "obs" if key.startswith("obs") else "data" if key == "X" else key.rpartition("/")[2]
            if isinstance(node, h5py.Dataset) and label in REGIONS:
                for start, nbytes in storage(node):
                    owner[start : start + nbytes] = label

        file.visititems(visit)
    return {name: np.flatnonzero(owner == name) for name in REGIONS if np.any(owner == name)}


def storage(node: h5py.Dataset) -> list[tuple[int, int]]:
    """Return the byte ranges of a dataset's values."""
    if node.chunks is None:
        offset = node.id.get_offset()
        return [] if offset is None else [(offset, node.id.get_storage_size())]
    infos: list[Any] = []
    node.id.chunk_iter(infos.append)
    return [(info.byte_offset, info.size) for info in infos]


def mutant(base: bytes, regions: dict[str, NDArray[np.int64]], number: int, series: int = 0) -> tuple[str, bytes]:
    """Return the region and the bytes of one damaged copy: 1 to 4 bytes near each other, or anywhere in the region."""
    rng = np.random.default_rng((series, number))
    region = list(regions)[number % len(regions)]
    places, n = regions[region], int(rng.integers(1, 5))
    at = (
        rng.integers(0, places.size, n)
        if rng.random() < 0.5
        else (rng.integers(0, places.size) + np.arange(n)) % places.size
    )
    damaged = np.frombuffer(base, dtype=np.uint8).copy()
    damaged[places[at]] ^= rng.integers(1, 256, n).astype(np.uint8)
    return region, damaged.tobytes()


def by_gpuload(path: Path) -> dict[str, Any]:
    """Read all of a file in two shuffled epochs, so that chunks are first decoded whole and later in part."""
    import gpuload

    with gpuload.open_loader(path, batch_size=8, fetch_factor=2, block_size=3, obs=OBS, num_threads=1) as loader:
        X = np.empty((loader.n_obs, loader.n_vars), np.float32)
        again = np.empty_like(X)
        obs: dict[str, Any] = {name: np.empty(loader.n_obs, dtype) for name, dtype in loader.obs_dtypes.items()}
        for values in (X, again):
            for batch in loader:
                values[batch.rows] = batch.X
                for name in OBS:
                    obs[name][batch.rows] = batch.obs[name]
        assert X.tobytes() == again.tobytes(), "two epochs differ"
        for name, categories in loader.categories.items():
            obs[name] = [None if code < 0 else str(categories[code]) for code in obs[name]]
        return {"X": X, "var": [str(name) for name in loader.var_names], **obs}


def by_h5py(path: Path) -> dict[str, Any]:
    """Read the same through h5py and anndata; a part that they cannot read, or that breaks a rule, is an exception."""
    from anndata.io import read_elem

    out: dict[str, Any] = {}
    with h5py.File(path) as file:
        with suppress(Exception):
            dict(file.attrs)  # anndata asks first what the file holds
        readers: dict[str, Callable[[], Any]] = {
            "X": lambda: _matrix(file["X"]),
            "var": lambda: [str(name) for name in read_elem(file["var"][file["var"].attrs["_index"]])],
            **{name: partial(_column, file, name) for name in OBS},
        }
        for name, read in readers.items():
            try:
                out[name] = read()
            except Exception as error:
                out[name] = error
    for name, axis in (("var", 1), *((name, 0) for name in OBS)):
        X, values = out["X"], out[name]
        if not isinstance(X, Exception) and not isinstance(values, Exception) and len(values) != X.shape[axis]:
            out[name] = ValueError("lengths differ")
    return out


def _matrix(node: Any) -> NDArray[np.float32]:
    return node[()].astype(np.float32) if isinstance(node, h5py.Dataset) else _dense(node)


def _column(file: h5py.File, name: str) -> Any:
    from anndata.io import read_elem

    values = read_elem(file[f"obs/{name}"])
    return [None if v != v else str(v) for v in values] if hasattr(values, "categories") else np.asarray(values)


def _dense(group: h5py.Group) -> NDArray[np.float32]:
    data, indices, indptr = (group[name][()] for name in ("data", "indices", "indptr"))
    n_rows, n_vars = (int(n) for n in group.attrs["shape"])
    indptr = indptr.astype(np.int64)
    if (
        indptr.shape != (n_rows + 1,)
        or indptr[0]
        or np.any(np.diff(indptr) < 0)
        or not indptr[-1] == data.size == indices.size
    ):
        raise ValueError("indptr is wrong")
    if indices.size and not (int(indices.min()) >= 0 and int(indices.max()) < n_vars):
        raise ValueError("a column number is wrong")
    X = np.zeros((n_rows, n_vars), np.float32)
    np.add.at(X, (np.repeat(np.arange(n_rows), np.diff(indptr)), indices), data.astype(np.float32))
    return X


def is_same(one: Any, other: Any) -> bool:
    """Compare one part of two readings, NaN equal to NaN."""
    if isinstance(other, Exception):
        return False
    if isinstance(one, list):
        return one == list(other)
    return np.array_equal(one, other, equal_nan=one.dtype.kind == "f")


def judge(path: Path, say: Any, original: dict[str, Any]) -> tuple[str, str]:
    """Return how gpuload handles a damaged file, and its message if there is one.

    ``"refused"``: with an error of its own. ``"equal"``: it reads what h5py reads. ``"right"``: it reads some part as
    it was before the damage, although h5py reads it differently or not at all (a key of a chunk's B-tree by which h5py
    searches, an attribute that gpuload does not need). Anything else is a fault: ``"foreign"`` (an error of another
    kind) and ``"wrong"``.
    """
    from gpuload import GpuloadError

    say("gpuload")
    try:
        ours = by_gpuload(path)
    except GpuloadError as error:
        return "refused", f"{type(error).__name__}: {error}"
    except BaseException as error:
        return "foreign", f"{type(error).__name__}: {error}"
    say("h5py")
    try:
        theirs = by_h5py(path)
    except Exception as error:
        theirs = dict.fromkeys(original, error)
    if all(is_same(ours[name], theirs[name]) for name in ours):
        return "equal", ""
    is_right = all(is_same(ours[name], theirs[name]) or is_same(ours[name], original[name]) for name in ours)
    return ("right" if is_right else "wrong"), str([value for value in theirs.values() if isinstance(value, Exception)])


def in_turn(
    path: Path, regions: dict[str, NDArray[np.int64]], numbers: range, series: int = 0
) -> Iterator[tuple[int, str, Callable[[str], None]]]:
    """Write the mutants of a file one after another in its place; yield number, region and a way to tell the stage.

    What is done with a mutant before the next one is requested must not take longer than `HUNG_S`.
    """
    base = path.read_bytes()
    for number in numbers:
        region, damaged = mutant(base, regions, number, series)
        path.unlink()
        path.write_bytes(damaged)

        def say(stage: str, number: int = number) -> None:
            print(json.dumps({"number": number, "stage": stage}), flush=True)

        faulthandler.dump_traceback_later(HUNG_S, exit=True)
        yield number, region, say
        faulthandler.cancel_dump_traceback_later()
    path.unlink()


def run(findings: Callable[..., Iterator[dict[str, Any]]], max_memory: int) -> None:
    """Print the findings of each task, one per line, within so many bytes of address space."""
    faulthandler.enable()
    resource.setrlimit(resource.RLIMIT_AS, (max_memory, max_memory))
    warnings.simplefilter("ignore")
    for line in sys.stdin:
        name, first, n, folder, *more = json.loads(line)
        for finding in findings(name, first, n, Path(folder), *more):
            print(json.dumps(finding), flush=True)
        print(json.dumps({"over": True}), flush=True)


class Program:
    """A program such as this one, kept running from task to task, and started again where it ended."""

    def __init__(self, module: str) -> None:
        self._module = module
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115 - closed by `close`
        self._process = self._start()

    def _start(self) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-m", self._module]
        pipes: Any = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": self._errors}
        return subprocess.Popen(command, cwd=Path(__file__).parents[1], **pipes)

    def do(self, *task: Any, time_limit_s: float) -> tuple[list[dict[str, Any]], str]:
        """Return the lines that the program prints of a task, and how it ended if it did not live to the end of it."""
        process, lines = self._process, []
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(json.dumps(task).encode() + b"\n")
        process.stdin.flush()
        timer = threading.Timer(time_limit_s, process.kill)
        timer.start()
        try:
            for line in process.stdout:
                if line.startswith(b'{"over"'):
                    return lines, ""
                if line.startswith(b"{"):  # filter plugins of HDF5 print on their own account
                    lines.append(json.loads(line))
        finally:
            timer.cancel()
        process.communicate()
        self._errors.seek(0)
        said = self._errors.read().decode()
        begin = max(said.rfind("Timeout ("), said.rfind("Fatal Python error"))  # then the innermost call
        ending = f"exit {process.returncode}: {said[begin:][:800] if begin >= 0 else said[-800:]}"
        self._errors.seek(0)
        self._errors.truncate()
        self._process = self._start()
        return lines, ending

    def close(self) -> None:
        """End the program."""
        self._process.communicate()
        self._errors.close()


def findings(name: str, first: int, n: int, folder: Path, *more: str) -> Iterator[dict[str, Any]]:
    """Judge n mutants of a base, the first of number `first`; or ("only-h5py") only read them through h5py."""
    path = folder / f"{name}-{first}.h5ad"
    write_base(name, path)
    original, whole = by_h5py(path), by_gpuload(path)
    assert all(is_same(whole[part], original[part]) for part in whole), "the undamaged file is read wrongly"
    for number, region, say in in_turn(path, byte_regions(path), range(first, first + n)):
        if more:
            say("only h5py")
            by_h5py(path)
            outcome, message = "read by h5py", ""
        else:
            outcome, message = judge(path, say, original)
        yield {"number": number, "region": region, "outcome": outcome, "message": message}


if __name__ == "__main__":
    run(findings, MAX_MEMORY)
