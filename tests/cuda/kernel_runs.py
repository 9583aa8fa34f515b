"""Runs of the CUDA backend's kernels, as compiled for the host; and the names and parameters that it counts on."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st

from tests.cuda import shim

if TYPE_CHECKING:
    from numpy.typing import NDArray

BUILD = os.environ.get("GPULOAD_SHIM", "")
SANITIZERS = ("address", "thread")

SOME = settings(
    max_examples={"": 60, "address": 6, "thread": 4}[BUILD],
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)

MANY = settings(SOME, max_examples={"": 180, "address": 12, "thread": 5}[BUILD])

FEW = settings(SOME, max_examples={"": 25, "address": 4, "thread": 4}[BUILD])
"""For a test of one template that runs with each of many pairs of types."""

TILE = 8192
"""Columns that densify_csr makes at a time."""

FILLER = 0xA5
INT32_MAX = (1 << 31) - 1
RNG = np.random.default_rng


@dataclass(frozen=True)
class Grid:
    """How kernels are launched."""

    n_blocks: int = 7
    n_threads: int = 64


@st.composite
def grids(draw: st.DrawFn) -> Grid:
    if BUILD == "thread":
        return Grid(draw(st.integers(1, 9)), draw(st.sampled_from([32, 40])))
    return Grid(draw(st.sampled_from([1, 2, 3, 7, 60])), draw(st.sampled_from([32, 64, 100, 256, 1024])))


def seeds() -> st.SearchStrategy[int]:
    return st.integers(0, (1 << 32) - 1)


def run(name: str, grid: Grid, *args: Any) -> None:
    """Run a kernel, and once more with blocks and threads in reverse order on copies: the outputs must be equal.

    Copies are aligned to 16 bytes, whatever the outputs are.
    """
    is_wide = any(isinstance(arg, np.ndarray) and arg.dtype == np.float64 for arg in args)
    library = shim.compiled("float64" if is_wide else "float32")
    copies = [
        arg.copy() if parameter.startswith("w:") else arg
        for parameter, arg in zip(library.signatures[name], args, strict=True)
    ]
    library.launch(name, grid.n_blocks, grid.n_threads, args)
    if BUILD == "thread":
        return
    library.launch(name, grid.n_blocks, grid.n_threads, copies, is_reversed=True)
    for array, copy in zip(args, copies, strict=True):
        if copy is not array:
            assert array.tobytes() == copy.tobytes(), f"{name} depends on the order of threads"


def int64(*values: int) -> NDArray[np.int64]:
    return np.array(values, dtype=np.int64)


def placed(data: bytes | NDArray[np.uint8], skew: int = 0) -> NDArray[np.uint8]:
    """Return bytes in memory that ends where their last 16 aligned bytes end, `skew` bytes after its aligned start."""
    data = np.frombuffer(data, np.uint8)
    memory = np.full(-(-(skew + data.size) // 16) * 2, 0x5A5A5A5A5A5A5A5A, dtype=np.uint64).view(np.uint8)
    assert memory.ctypes.data % 16 == 0
    memory[skew : skew + data.size] = data
    memory.flags.writeable = False
    return memory


@dataclass(frozen=True)
class Ranges:
    """Byte ranges side by side in one memory, with gaps between them."""

    start: NDArray[np.int64]
    nbytes: NDArray[np.int64]
    total: int

    def slices(self) -> list[slice]:
        return [slice(int(s), int(s + n)) for s, n in zip(self.start, self.nbytes, strict=True)]


def ranges(rng: np.random.Generator, sizes: Any, *, step: int = 1, gap: int = 40) -> Ranges:
    """Return ranges of these sizes in any order, starting at multiples of `step`."""
    sizes = np.asarray(sizes, dtype=np.int64)
    start, at = np.zeros_like(sizes), 0
    for k in rng.permutation(sizes.size):
        at = -(-(at + int(rng.integers(0, gap))) // step) * step
        start[k] = at
        at += int(sizes[k])
    return Ranges(start, sizes, at)


def sizes_of(draw: st.DrawFn, largest: int = 3000) -> list[int]:
    return draw(st.lists(st.one_of(st.integers(0, 40), st.integers(0, largest)), max_size=8))


def noise(rng: np.random.Generator, n: int) -> NDArray[np.uint8]:
    """Return random bytes, or the same byte over and over, 0 and 255 too."""
    kind = rng.integers(0, 4)
    if kind == 3:
        return rng.integers(0, 256, n).astype(np.uint8)
    return np.full(n, (0, 255, rng.integers(0, 256))[kind], dtype=np.uint8)


ROWS = ["r:i4", "r:i8", "r:i4", "r:f4", "r:i8", "r:i4", "f8", "i4", "i8"]
DENSE = ["r:i4", "r:i8", "r:f4", "r:i8", "r:i4", "f8", "i4", "i8", "i8", "i8"]
COPY = ["r:u1", *["r:i8"] * 5, "r:i4", "r:i8", "i8", "i8", "f8", "i8"]
PLAIN_TYPES = ("i1", "u1", "i2", "u2", "i4", "u4", "i8", "u8", "f2", "f4", "f8")
STORED = {
    "bool": np.dtype(np.uint8),
    **{name: np.dtype(f"<{name}") for name in PLAIN_TYPES},
    **{f"be_{name}": np.dtype(f">{name}") for name in PLAIN_TYPES if name[1] != "1"},
}
NARROWED = ("u1", "u2", "u4", "u8", "i4", "i8", "f4", "f8")
OUT = {"f4": np.float32, "f8": np.float64, "i4": np.int32}
BITS = {"f4": np.float32, "f2": np.float16, "bf2": np.uint16, "f8": np.float64}

_ALL = {
    "gather_payloads": ["r:u1", "r:i8", "r:i8", "r:i8", "i8", "w:u1"],
    "check_adler32": ["r:u1", "r:i8", "r:i8", "r:u1", "r:i8", "i8", "w:i4"],
    "check_fletcher32": ["r:u1", "r:i8", "r:i8", "i8", "w:i4"],
    "check_crc": ["r:u1", "r:i8", "r:i8", "r:u1", "r:i8", "i8", "i4", "i8", "w:i4"],
    "unshuffle": ["r:u1", "w:u1", "r:i8", "r:i8", "i4", "i8"],
    "walk_blosc": [
        *("r:u1", "r:i8", "r:i8", "r:u1", "r:u1", "i8", "i8", "i8", "i8", "i4", "i8"),
        *("r:u1", "w:u1", "w:i8", "w:i4", "w:i4"),
    ],
    "walk_lz4": [
        *("r:u1", "r:i8", "r:i8", "r:u1", "r:u1", "i8", "i8", "i8", "i8"),
        *("r:u1", "w:u1", "w:i8", "w:i4", "w:i4"),
    ],
    "check_streams": ["r:i4", "r:i8", "r:i8", "i8", "i8", "w:i4"],
    "join_blocks": ["r:i8", "r:i4", "i8", "i8", "i8", "i4", "i8", "r:i8", "w:u1"],
    "check_sizes": ["r:u1", "r:i8", "i8", "i8", "w:i4"],
    "check_zlib": ["r:u1", "r:i8", "i8", "w:i4"],
    "check_gzip": ["r:u1", "r:i8", "r:i8", "i8", "i8", "w:i4"],
    "check_zstd": ["r:u1", "r:i8", "r:i8", "r:u1", "r:i8", "r:i8", "i8", "w:i4"],
    "decode_lzf": ["r:u1", "r:i8", "r:i8", "w:u1", "r:i8", "r:i8", "i8", "w:i4"],
    **{f"copy_pieces_{src}_{out}": [*COPY, f"w:{out}", "w:i4", "w:i4"] for src in STORED for out in ("f4", "i4")},
    **{f"measure_{src}": ["r:u1", "r:i8", "r:i8", "i8", "w:i4"] for src in NARROWED},
    **{
        f"narrow_{src}_{out}": ["r:u1", "r:i8", "r:i8", "r:i8", "r:i4", "i8", "w:u1"]
        for src in NARROWED
        for out in ("u1", "u2")
        if np.dtype(out).itemsize <= np.dtype(src).itemsize
    },
    "downsample_counts": ["r:i8", "r:i4", "w:f4", "r:i8", "i8", "f8", "i8", "i8", "w:i4"],
    **{f"densify_csr_{out}": [*ROWS, "i8", f"w:{out[-2:].replace('f2', 'u2')}", "w:i4"] for out in ("f4", "f2", "bf2")},
    **{f"gather_dense_{out}": [*DENSE, f"w:{out[-2:].replace('f2', 'u2')}", "w:i4"] for out in ("f4", "f2", "bf2")},
    "count_csr": ["r:i8", "r:i4", "r:i8", "r:i4", "i8", "w:i8"],
    "gather_csr": [*ROWS, "r:i8", "w:i4", "w:i4", "w:f4"],
    "mark_large": ["r:i8", "r:i4", "r:f4", "r:i8", "r:i4", "f8", "i4", "i8", "i8", "w:i8"],
    "count_dense": ["r:i8", "r:f4", "r:i8", "r:i4", "f8", "i4", "i8", "i8", "w:i8"],
    "compact_dense": ["r:f4", "i8", "i8", "r:i8", "w:i4", "w:i4", "w:f4"],
}

SIGNATURES = {
    "float32": _ALL,
    "float64": {
        re.sub("^(copy_pieces_.*|densify_csr|gather_dense)_f4$", r"\1_f8", name): [
            parameter.replace("f4", "f8") for parameter in parameters
        ]
        for name, parameters in _ALL.items()
        if name != "mark_large" and name[-3:] not in ("_f2", "bf2")
    },
}
"""By the dtype of the resident's values."""
