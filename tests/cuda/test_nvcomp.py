"""The binding to nvCOMP against its headers, the real library without a GPU, and a library that records its arguments.

The recording library is compiled from C that includes nvCOMP's own headers, so the compiler refuses a function whose
parameters are not the header's; each call then shows which value arrived as which parameter.
"""

from __future__ import annotations

import ctypes
import re
import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING
from unittest import mock

import pytest

import gpuload
from gpuload.backends.cuda import nvcomp
from gpuload.backends.cuda.nvcomp import C_NAMES, Nvcomp, Options, Properties

if TYPE_CHECKING:
    from collections.abc import Callable

ALGORITHMS = ("deflate", "gzip", "zstd", "lz4", "snappy")

DECODE = ("in_ptrs", "in_nbytes", "out_capacity", "out_nbytes", "out_ptrs", "status", "temp_ptr", "temp_nbytes", "n")
"""Parameters of `Nvcomp.decode` between the algorithm and the stream."""

GPU_PRESENT = Path("/dev/nvidiactl").exists()


class Alignments(ctypes.Structure):
    """``nvcompAlignmentRequirements_t``: in bytes, of a compressed chunk, of its output, of the temporary memory."""

    _fields_ = (("input", ctypes.c_size_t), ("output", ctypes.c_size_t), ("temp", ctypes.c_size_t))


def opened(path: Path) -> Nvcomp:
    """Return the binding over a file, as if that were of the installed package."""
    with mock.patch.object(nvcomp, "_installed", return_value=[str(path)]):
        return Nvcomp()


@pytest.fixture(scope="module")
def library() -> Nvcomp:
    """Return the installed library, or skip the test."""
    try:
        return Nvcomp()
    except gpuload.MissingDependencyError as error:
        pytest.skip(str(error))


@pytest.fixture(scope="module")
def headers() -> Path:
    """Return the folder of nvCOMP's headers, or skip the test."""
    try:
        found = find_spec("nvidia.libnvcomp")
    except ImportError:
        found = None
    for folder in (found and found.submodule_search_locations) or []:
        place = Path(folder, "include")
        if (place / "nvcomp.h").is_file():
            return place
    pytest.skip("nvCOMP's headers are not installed")


@pytest.fixture(scope="module")
def compiler() -> str:
    found = shutil.which("gcc") or shutil.which("cc")
    if found is None:
        pytest.skip("there is no C compiler")
    return found


def static_asserts() -> str:
    """Return C that checks sizes, offsets and numbers of this binding against the headers."""
    structs = {f"nvcompBatched{name}DecompressOpts_t": Options for name in C_NAMES.values()}
    structs |= {"nvcompProperties_t": Properties, "nvcompAlignmentRequirements_t": Alignments}
    checks = []
    for name, struct in structs.items():
        checks.append(f"sizeof({name}) == {ctypes.sizeof(struct)}")
        for field, *_ in struct._fields_:
            if field != "rest":
                place = getattr(struct, field)
                checks.append(f"offsetof({name}, {field}) == {place.offset}")
                checks.append(f"sizeof((({name}*)0)->{field}) == {place.size}")
    checks += [f"{name} == {code}" for code, name in nvcomp.STATUSES.items()]
    checks += [f"NVCOMP_DECOMPRESS_BACKEND_{name.upper()} == {code}" for name, code in nvcomp.BACKENDS.items()]
    checks.append(f"sizeof(nvcompStatus_t) == {ctypes.sizeof(ctypes.c_int)}")
    return "\n".join(f'_Static_assert({check}, "{check}");' for check in checks)


PRELUDE = """
#include <stddef.h>
#include <stdint.h>
#include <string.h>
typedef struct CUstream_st *cudaStream_t;
#include "nvcomp.h"
#include "nvcomp/deflate.h"
#include "nvcomp/gzip.h"
#include "nvcomp/lz4.h"
#include "nvcomp/snappy.h"
#include "nvcomp/zstd.h"
"""

RECORDER = """
struct record { const char* function; unsigned char options[64]; size_t values[11]; int n; };
struct record last;
int answer = 0;
#define NOTE(o) (last.function = __func__, memcpy(last.options, &o, 64), last.n = 0)
#define KEEP(x) (last.values[last.n++] = (size_t)(x))

nvcompStatus_t nvcompGetProperties(nvcompProperties_t *p) {
  p->version = VERSION; p->cudart_version = 13020; return nvcompSuccess;
}
#if VERSION >= 6000
#define TEMP_SIZE(A) nvcompStatus_t nvcompBatched##A##DecompressGetTempSize( \\
    size_t n, size_t max, nvcompBatched##A##DecompressOpts_t o, size_t *temp, size_t total, cudaStream_t stream) { \\
  NOTE(o); KEEP(n); KEEP(max); KEEP(total); KEEP(stream); *temp = 12345678901; return answer; }
#else
#define TEMP_SIZE(A) nvcompStatus_t nvcompBatched##A##DecompressGetTempSizeAsync( \\
    size_t n, size_t max, nvcompBatched##A##DecompressOpts_t o, size_t *temp, size_t total) { \\
  NOTE(o); KEEP(n); KEEP(max); KEEP(total); *temp = 12345678901; return answer; }
#endif
#define ALGORITHM(A) TEMP_SIZE(A) \\
nvcompStatus_t nvcompBatched##A##DecompressAsync( \\
    const void *const *in_ptrs, const size_t *in_nbytes, const size_t *out_capacity, size_t *out_nbytes, size_t n, \\
    void *const temp_ptr, size_t temp_nbytes, void *const *out_ptrs, nvcompBatched##A##DecompressOpts_t o, \\
    nvcompStatus_t *status, cudaStream_t stream) { \\
  NOTE(o); KEEP(in_ptrs); KEEP(in_nbytes); KEEP(out_capacity); KEEP(out_nbytes); KEEP(out_ptrs); KEEP(status); \\
  KEEP(temp_ptr); KEEP(temp_nbytes); KEEP(n); KEEP(stream); return answer; } \\
const nvcompBatched##A##DecompressOpts_t *default_options_##A(void) { return &nvcompBatched##A##DecompressDefaultOpts; }
ALGORITHM(Deflate) ALGORITHM(Gzip) ALGORITHM(Zstd) ALGORITHM(LZ4) ALGORITHM(Snappy)
"""


class Record(ctypes.Structure):
    """The last call of the recording library."""

    _fields_ = (
        ("function", ctypes.c_char_p),
        ("options", ctypes.c_ubyte * 64),
        ("values", ctypes.c_size_t * 11),
        ("n", ctypes.c_int),
    )


class Recorder:
    """The binding over a recording library of some version, and its last call."""

    def __init__(self, path: Path) -> None:
        self.nvcomp = opened(path)
        self._raw = ctypes.CDLL(str(path))
        self._last = Record.in_dll(self._raw, "last")
        self.answer(0)

    def answer(self, status: int) -> None:
        """Set what every later call returns."""
        ctypes.c_int.in_dll(self._raw, "answer").value = status

    def call(self) -> tuple[str, list[int], bytes]:
        """Return function, values and options of the last call."""
        last = self._last
        return last.function.decode(), list(last.values[: last.n]), bytes(last.options)

    def default_options(self, c_name: str) -> bytes:
        function = getattr(self._raw, f"default_options_{c_name}")
        function.restype = ctypes.POINTER(ctypes.c_char * 64)
        return bytes(function().contents)


@pytest.fixture(scope="module")
def compiled(headers: Path, compiler: str, tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], Path]:
    """Return a function that compiles the recording library of some version."""
    folder = tmp_path_factory.mktemp("nvcomp")

    def compile_version(version: int) -> Path:
        path = folder / f"libnvcomp-{version}.so"
        if not path.exists():
            code = folder / f"{version}.c"
            code.write_text(f"#define VERSION {version}\n{PRELUDE}\n{static_asserts()}\n{RECORDER}")
            command = [compiler, "-std=c11", "-shared", "-fPIC", f"-I{headers}", str(code)]
            done = subprocess.run([*command, "-o", str(path)], capture_output=True, text=True, timeout=60, check=False)
            assert done.returncode == 0, done.stderr
        return path

    return compile_version


# --- against the headers


def test_structs_numbers_and_functions_match_the_headers(compiled: Callable[[int], Path]) -> None:
    recorder = Recorder(compiled(5300))
    for c_name in C_NAMES.values():
        assert recorder.default_options(c_name) == bytes(Options())


def test_every_status_of_the_header_is_known(headers: Path) -> None:
    text = (headers / "nvcomp" / "shared_types.h").read_text()
    found = {int(code): name for name, code in re.findall(r"(nvcomp(?:Success|Error)\w*) = (\d+)", text)}
    assert found == nvcomp.STATUSES


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("version", [5100, 5300, 6000])
def test_every_argument_arrives_where_it_belongs(compiled: Callable[[int], Path], version: int, algorithm: str) -> None:
    recorder = Recorder(compiled(version))
    library, prefix = recorder.nvcomp, f"nvcompBatched{C_NAMES[algorithm]}Decompress"
    # Blackwell's decompression engine accepts damaged lz4 as intact, so CUDA kernels decode it.
    options = bytes(Options(2 if algorithm == "lz4" else 0))
    assert library.version == f"{version // 1000}.{version // 100 % 10}.0"

    sizes, stream = [(1 << 40) + k for k in range(3)], (1 << 45) + 7
    assert library.temp_nbytes(algorithm, *sizes, stream=stream) == 12_345_678_901
    name = "GetTempSize" if version >= 6000 else "GetTempSizeAsync"
    assert recorder.call() == (prefix + name, [*sizes, stream] if version >= 6000 else sizes, options)

    values = {name: (k << 40) + k for k, name in enumerate(DECODE, 1)}
    library.decode(algorithm, **values, stream=stream)
    assert recorder.call() == (f"{prefix}Async", [*values.values(), stream], options)
    library.decode(algorithm, *reversed(values.values()), stream)
    assert recorder.call() == (f"{prefix}Async", [*reversed(values.values()), stream], options)


def test_nothing_is_enqueued_without_chunks(compiled: Callable[[int], Path]) -> None:
    recorder = Recorder(compiled(5300))
    recorder.nvcomp.temp_nbytes("zstd", 1, 1, 1)
    recorder.answer(1000)
    recorder.nvcomp.decode("lz4", *[0] * len(DECODE), 0)
    assert recorder.call()[0] == "nvcompBatchedZstdDecompressGetTempSizeAsync"


@pytest.mark.parametrize(
    ("status", "parts"),
    [
        (10, ["nvcompErrorInvalidValue (10)", "use device='cpu'"]),
        (11, ["nvcompErrorNotSupported (11)", "use device='cpu'"]),
        (18, ["nvcompErrorChunkSizeTooLarge (18)", "smaller chunks"]),
        (1000, ["nvcompErrorCudaError (1000)", "nvidia-smi", "CUDA 13 ", "use device='cpu'"]),
        (777, ["an unknown status (777)", "use device='cpu'"]),
    ],
)
def test_a_refusal_is_one_sentence(compiled: Callable[[int], Path], status: int, parts: list[str]) -> None:
    recorder = Recorder(compiled(5300))
    recorder.answer(status)
    calls: list[tuple[str, Callable[[], object]]] = [
        ("DecompressAsync", lambda: recorder.nvcomp.decode("gzip", *[16] * (len(DECODE) - 1), 3, 0)),
        ("DecompressGetTempSizeAsync", lambda: recorder.nvcomp.temp_nbytes("gzip", 3, 10, 30)),
    ]
    for name, call in calls:
        with pytest.raises(gpuload.DeviceError) as caught:
            call()
        text = str(caught.value)
        assert text.startswith(f"nvCOMP's nvcompBatchedGzip{name} refused ")
        assert text.endswith(".")
        assert "\n" not in text
        for part in ["3 chunks", *parts]:
            assert part in text


# --- libraries that are missing, broken or too old


@pytest.mark.parametrize("version", [3006, 4200, 7000])
def test_unsupported_version_is_refused(compiled: Callable[[int], Path], version: int) -> None:
    path = compiled(version)
    with pytest.raises(gpuload.DeviceError) as caught:
        opened(path)
    name = f"{version // 1000}.{version // 100 % 10}.{version % 100}"
    for part in (str(path), f"nvCOMP {name}", "versions 5 and 6", "pip install 'gpuload[cuda13]'"):
        assert part in str(caught.value)


def test_a_library_that_is_not_nvcomp_is_refused(compiler: str, tmp_path: Path) -> None:
    code, path = tmp_path / "other.c", tmp_path / "libother.so"
    code.write_text("int nothing(void) { return 0; }")
    subprocess.run([compiler, "-shared", "-fPIC", str(code), "-o", str(path)], check=True, timeout=60)
    with pytest.raises(gpuload.DeviceError, match="has no function nvcompGetProperties"):
        opened(path)


def test_file_that_is_not_a_library_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "libnvcomp.so.5"
    for content in (None, b"", b"not a library" * 100):
        if content is not None:
            path.write_bytes(content)
        with pytest.raises(gpuload.DeviceError, match="cannot be loaded") as caught:
            opened(path)
        assert str(path) in str(caught.value)
        assert "pip install" in str(caught.value)


def test_a_missing_library_names_the_pip_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nvcomp, "LIBRARIES", ("libnvcomp-that-nobody-has.so.5",))
    with pytest.raises(gpuload.MissingDependencyError) as caught:
        Nvcomp()
    assert "pip install 'gpuload[cuda13]'" in str(caught.value)
    assert "nvidia-nvcomp-cu13" in str(caught.value)


def test_system_library_is_used_without_the_package(
    compiled: Callable[[int], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("nvidia", "nvidia.libnvcomp"):
        with monkeypatch.context() as patch:
            patch.delitem(sys.modules, "nvidia.libnvcomp", raising=False)
            patch.setitem(sys.modules, name, None)
            patch.setattr(nvcomp, "LIBRARIES", ("libnvcomp-that-nobody-has.so.5", str(compiled(6000))))
            assert Nvcomp().version == "6.0.0"


# --- the real library, on the host


def test_an_unknown_algorithm_is_refused(library: Nvcomp) -> None:
    calls: list[Callable[[], object]] = [
        lambda: library.temp_nbytes("bzip2", 1, 1, 1),
        lambda: library.decode("bzip2", *[0] * len(DECODE), 0),
    ]
    for call in calls:
        with pytest.raises(gpuload.PlanError, match="algorithm='bzip2': expected one of 'deflate', 'gzip'"):
            call()


def test_library_reports_its_version(library: Nvcomp) -> None:
    assert re.fullmatch(r"[56]\.\d\.\d+", library.version)
    assert re.fullmatch(r"\d+\.\d", library.cuda_version)
    assert Path(library.path).name.startswith("libnvcomp.so")


@pytest.mark.parametrize(
    ("algorithm", "alignment"),
    [("deflate", (4, 1, 1)), ("gzip", (1, 1, 1)), ("zstd", (1, 1, 8)), ("lz4", (1, 1, 1)), ("snappy", (1, 1, 1))],
)
def test_alignments_are_those_the_backend_relies_on(
    library: Nvcomp, algorithm: str, alignment: tuple[int, int, int]
) -> None:
    function = ctypes.CDLL(library.path)[f"nvcompBatched{C_NAMES[algorithm]}DecompressGetRequiredAlignments"]
    function.argtypes = (Options, ctypes.POINTER(Alignments))
    for options in (Options(number) for number in nvcomp.BACKENDS.values()):
        found = Alignments()
        assert function(options, ctypes.byref(found)) == 0
        assert (found.input, found.output, found.temp) == alignment
    assert all(16 % nbytes == 0 for nbytes in alignment)  # slots of 16 bytes fit them all


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_only_zstd_needs_temporary_memory(library: Nvcomp, algorithm: str) -> None:
    for n, nbytes in ((0, 0), (1, 1), (1, (1 << 31) - 1), (1_024, 400_000), (256, 4 << 20), (100_000, 2_000)):
        found = library.temp_nbytes(algorithm, n, nbytes, n * nbytes)
        if algorithm != "zstd":
            assert found == 0
        elif nbytes >= 400_000:
            assert 3.05 <= found / (n * nbytes) <= 3.11
        else:
            assert found >= 3 * n * nbytes


def test_oversized_chunk_is_refused_before_any_work(library: Nvcomp) -> None:
    for algorithm in ALGORITHMS:
        with pytest.raises(gpuload.DeviceError, match=r"nvcompErrorChunkSizeTooLarge \(18\).*smaller chunks"):
            library.temp_nbytes(algorithm, 1, 1 << 32, 1 << 32)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize(
    ("address", "n", "reason"),
    [
        (0, 1, "nvcompErrorInvalidValue (10)"),
        pytest.param(
            1 << 36,
            4,
            "nvcompErrorCudaError (1000)",
            marks=pytest.mark.skipif(GPU_PRESENT, reason="a GPU would follow the addresses"),
        ),
    ],
)
def test_invalid_call_raises_and_does_not_crash(
    library: Nvcomp, algorithm: str, address: int, n: int, reason: str
) -> None:
    code = (
        "from gpuload.backends.cuda.nvcomp import Nvcomp\n"
        "from gpuload import DeviceError\n"
        f"a = {address}\n"
        "try:\n"
        f"    Nvcomp().decode({algorithm!r}, a, a, a, a, a, a, a, 1 << 20, {n}, 0)\n"
        "except DeviceError as error:\n"
        f"    assert {reason!r} in str(error), error\n"
        "else:\n"
        "    raise SystemExit('no error')\n"
    )
    root = Path(gpuload.__file__).parents[1]
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
