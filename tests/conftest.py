"""Fixtures for all tests: files in every on-disk form, and a check that nothing is left behind."""

from __future__ import annotations

import contextlib
import fcntl
import gc
import importlib.util
import io
import os
import pickle
import signal
import threading
import time
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import HealthCheck, settings
from numba.core.ccallback import CFunc
from numba.core.compiler_lock import global_compiler_lock
from numba.core.dispatcher import Dispatcher

from tests import variants
from tests.variants import VARIANTS, Stored

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    StoreVariant = Callable[[str], Stored]


if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # in a background job; programs under test inherit it
    signal.signal(signal.SIGINT, signal.default_int_handler)


# Seconds per test. Not in pyproject.toml: pytest-timeout takes a string there up to 2.4, and a number from 2.5 on.
os.environ.setdefault("PYTEST_TIMEOUT", "600")


# The same examples in every run, however busy the machine is; a test may ask for more.
settings.register_profile("tests", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("tests")


gc.disable()  # until all tests are collected: what is imported and collected stays


def pytest_collection_finish() -> None:
    """Let the garbage collector never search what was imported and collected: it is millions of objects."""
    gc.enable()
    gc.freeze()


def pytest_configure(config: pytest.Config) -> None:
    """Hide GPUs, from programs under test too, unless the tests that need one are requested: ``-m gpu``."""
    if "gpu" not in config.option.markexpr.replace("not gpu", ""):
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    if hasattr(config, "workerinput"):
        _compile_each_kernel_once()


def _compile_each_kernel_once() -> None:
    """Let a worker wait for a kernel that another one compiles, and load it, rather than compile it too."""

    def taking_turns(load_or_compile: Callable[..., Any]) -> Callable[..., Any]:
        def in_turn(kernel: Any, *signature: Any) -> Any:
            cache = getattr(kernel._cache, "_impl", None)  # what is not kept has none
            with global_compiler_lock, contextlib.ExitStack() as turn:
                if cache is not None:
                    path = os.path.join(kernel._cache.cache_path, f"{cache.filename_base}.lock")
                    fcntl.flock(turn.enter_context(open(path, "w")), fcntl.LOCK_EX)
                return load_or_compile(kernel, *signature)

        return in_turn

    for kind in (Dispatcher, CFunc):
        kind.compile = taking_turns(kind.compile)


@pytest.fixture(scope="session")
def store_variant(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> StoreVariant:
    """Return a function that returns a variant and what must be read from it, by name; written once for all workers."""
    folder = tmp_path_factory.mktemp("stored")
    by_name = {variant.name: variant for variant in VARIANTS}
    known: dict[str, Stored] = {}
    of_all_workers = tmp_path_factory.getbasetemp().parent if hasattr(request.config, "workerinput") else folder

    def get(name: str) -> Stored:
        if name not in known:
            described = of_all_workers / f"stored-{name}.pickle"
            if not described.exists():
                made = folder / f"{name}.pickle"
                made.write_bytes(pickle.dumps(variants.store(by_name[name], folder)))
                with contextlib.suppress(FileExistsError):  # if another worker was faster, its file is used
                    os.link(made, described)
            known[name] = variants.read_only(pickle.loads(described.read_bytes()))
        return known[name]

    return get


@pytest.fixture(params=[variant.name for variant in VARIANTS])
def stored(request: pytest.FixtureRequest, store_variant: StoreVariant) -> Stored:
    """Return a read-only file in one on-disk form; the test runs once per form."""
    return store_variant(request.param)


@pytest.fixture
def plain(store_variant: StoreVariant) -> Stored:
    """Return a gzip CSR file as anndata writes it."""
    return store_variant("anndata-csr-gzip")


@pytest.fixture(scope="session")
def warmed_up(store_variant: StoreVariant) -> None:
    """Read one file once, so that what libraries start once per process is not taken for a leak."""
    import gpuload

    with gpuload.open_loader(store_variant("csr-zstd").path, obs=["cell_line"]) as loader:
        list(loader)
    if importlib.util.find_spec("pyarrow"):
        import pyarrow as pa
        import pyarrow.parquet as pq

        pa.set_cpu_count(1)  # its pools start more threads at any time, up to this number
        pa.set_io_thread_count(1)
        file = io.BytesIO()
        pq.write_table(pa.table({"a": [1], "b": [2]}), file)
        pq.read_table(file)


@pytest.fixture
def in_process(capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[Any, str, str]]:
    """Return a function that calls a program's `main` in this process and gives exit code, stdout and stderr."""

    def call(main: Callable[[list[str]], int], *arguments: object) -> tuple[Any, str, str]:
        capsys.readouterr()
        try:
            code: Any = main([str(a) for a in arguments])
        except SystemExit as ended:
            code = ended.code
        return code, *capsys.readouterr()

    return call


@pytest.fixture
def sketched(monkeypatch: pytest.MonkeyPatch) -> None:
    """Put figures together without rendering them, which takes longer than all else of a small run."""
    from matplotlib.figure import Figure

    monkeypatch.setattr(Figure, "savefig", lambda figure, path, **options: path.touch())


@pytest.fixture
def no_leaks(warmed_up: None) -> Iterator[None]:
    """Fail if threads or descriptors outlive the test."""
    gc.collect()
    gc.freeze()  # existing objects need not be searched again: imports alone are a million
    threads, descriptors = _threads(), _descriptors()
    yield
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline and (_threads() > threads or _descriptors() > descriptors):
        gc.collect()
        time.sleep(0.01)
    assert _descriptors() <= descriptors, f"descriptors left open: {descriptors} -> {_descriptors()}"
    assert _threads() <= threads, f"threads left running: {threads} -> {_threads()}: {threading.enumerate()}"


@pytest.fixture
def allow_threads(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Return a function that lets so many more threads be started, as a limit on processes does."""
    start, left = threading.Thread.start, [0]

    def start_if_allowed(thread: threading.Thread) -> None:
        if not left[0]:
            raise RuntimeError("can't start new thread")
        left[0] -= 1
        start(thread)

    def allow(n: int) -> None:
        left[0] = n
        monkeypatch.setattr(threading.Thread, "start", start_if_allowed)

    return allow


def _threads() -> int:
    """Return the threads of this process, native ones included; pyarrow's allocator starts its own at any time."""
    names = []
    for task in os.listdir("/proc/self/task"):
        with contextlib.suppress(OSError), open(f"/proc/self/task/{task}/comm") as comm:  # it may have ended since
            names.append(comm.read())
    return sum(not name.startswith("jemalloc") for name in names)


def _descriptors() -> int:
    return len(os.listdir("/proc/self/fd")) - 1  # except the one that lists them


@pytest.fixture
def copy_of(plain: Stored, tmp_path: Path) -> Callable[[str], Path]:
    """Return a function that makes a writable copy of the plain file under a name."""

    def make(name: str = "copy.h5ad") -> Path:
        path = tmp_path / name
        path.write_bytes(plain.path.read_bytes())
        return path

    return make
