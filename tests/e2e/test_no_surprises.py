"""Nothing is printed that nobody asked for: logging, progress bars, colours."""

from __future__ import annotations

import errno
import importlib
import io
import logging
import os
import pty
import subprocess
import sys
import types
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import gpuload
from gpuload.backends import native
from gpuload.cli import text

if TYPE_CHECKING:
    from collections.abc import Iterator

PROGRAM = """
import sys, gpuload
{before}
with gpuload.open_loader({path!r}, batch_size=8, obs=["cell_line"]) as loader:
    assert sum(len(batch) for batch in loader) == loader.n_obs
"""


@pytest.fixture
def logger() -> Iterator[logging.Logger]:
    """Return the package's logger, and leave it as it was."""
    found = logging.getLogger("gpuload")
    level, handlers = found.level, list(found.handlers)
    yield found
    found.setLevel(level)
    found.handlers[:] = handlers


@pytest.mark.parametrize(("level", "number"), [("debug", 10), ("INFO", 20), ("error", 40), (35, 35)])
def test_log_levels(logger: logging.Logger, level: Any, number: int) -> None:
    gpuload.set_log_level(level)
    assert logger.level == number


@pytest.mark.parametrize("level", ["loud", "", "setLevel", True, -1, None, 1.5])
def test_wrong_log_levels_are_refused(logger: logging.Logger, level: Any) -> None:
    before = logger.level
    with pytest.raises(gpuload.PlanError, match=r"^level=.*: expected one of 'debug', 'info'.*\.$"):
        gpuload.set_log_level(level)
    assert logger.level == before


def test_one_handler_is_added_if_there_is_none(logger: logging.Logger, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logger, "propagate", False)  # or it would see the handlers that pytest gave the root logger
    gpuload.set_log_level("info")
    gpuload.set_log_level("debug")
    assert len(logger.handlers) == 1


def test_no_handler_is_added_if_there_is_one(logger: logging.Logger, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logging.getLogger(), "handlers", [logging.StreamHandler(io.StringIO())])
    gpuload.set_log_level("info")
    assert not logger.handlers


@pytest.mark.parametrize(("before", "says"), [("", ""), ("gpuload.set_log_level('info')", "device='auto': chose")])
def test_an_epoch_prints_nothing_unless_asked(before: str, says: str, store_variant: object, plain: Any) -> None:
    code = PROGRAM.format(before=before, path=str(plain.path))
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120)
    assert done.stdout == ""
    assert (says in done.stderr) if says else done.stderr == ""


def test_anndata_is_not_imported_to_read_what_most_files_hold(plain: Any) -> None:
    """It takes longer than opening a file."""
    columns = ["cell_line", "depth", "n_big", "passed", "donor"]
    code = f"import sys, gpuload; gpuload.open_loader({str(plain.path)!r}, obs={columns}); print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120)
    assert "gpuload" in done.stdout.split()
    assert "anndata" not in done.stdout.split()


class _Terminal(io.StringIO):
    """A stream that records what is written, and may claim to be a terminal."""

    def __init__(self, *, is_terminal: bool) -> None:
        super().__init__()
        self._is_terminal = is_terminal

    def isatty(self) -> bool:
        return self._is_terminal


def test_the_first_compilation_is_announced_in_a_terminal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "cache_folder", lambda: str(tmp_path))
    monkeypatch.setattr(native.announcement, "is_due", True)

    def said(*, is_terminal: bool, is_quiet: bool) -> str:
        out = _Terminal(is_terminal=is_terminal)
        monkeypatch.setattr(sys, "stderr", out)
        text.say_of_compiling(is_quiet=is_quiet)
        return out.getvalue()

    assert said(is_terminal=True, is_quiet=False) == "compiling kernels, once on this machine\n"
    assert not native.announcement.is_due, "it would be said twice, and in spite of --quiet"
    assert not said(is_terminal=True, is_quiet=True)
    assert not said(is_terminal=False, is_quiet=False)
    (tmp_path / "kernel").touch()
    assert not said(is_terminal=True, is_quiet=False)


KERNEL = """
import logging, sys
import numba
logging.basicConfig(level=logging.INFO)
from gpuload.backends import native
numba.njit(lambda x: x)(1)  # of the program's own
native.__path__.append(sys.argv[1])
from gpuload.backends.native.kernel import add
assert add(1, 1) + add(1.0, 1.0) == 4
"""


def test_compiling_is_logged_once_and_not_for_cached_kernels(tmp_path: Path) -> None:
    kernel = "import numba\n@numba.njit(cache=True)\ndef add(a, b):\n    return a + b\n"
    (tmp_path / "kernel.py").write_text(kernel)
    command = [sys.executable, "-c", KERNEL, str(tmp_path)]
    said = [
        subprocess.run(command, capture_output=True, text=True, check=True, timeout=120).stderr.count(
            "INFO:gpuload:comp"
        )
        for _ in range(2)
    ]
    assert said == [1, 0]


@pytest.mark.parametrize(("is_terminal", "level"), [(True, "WARNING"), (False, "INFO")])
def test_compiling_is_shown_where_somebody_waits(
    is_terminal: bool, level: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    import numba

    def add(a: int, b: int) -> int:
        return a + b

    add.__module__ = "gpuload.backends.native.kernel"
    monkeypatch.setattr(native.announcement, "is_due", True)
    monkeypatch.setattr(sys, "stderr", _Terminal(is_terminal=is_terminal))
    with caplog.at_level(logging.INFO):
        assert numba.njit(add)(1, 2) == 3
    said = "compiling kernels, which are kept for later: the first minibatch can take 10 to 30 seconds longer"
    assert [(record.levelname, record.getMessage()) for record in caplog.records] == [(level, said)]


def test_kernel_cache_falls_back_when_the_disk_is_full(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(native.config, "CACHE_DIR", str(tmp_path))
    folder = Path(native.cache_folder())
    assert folder.parent == tmp_path
    for name, content in (("rows.nbi", b""), ("rows.1.nbc", b""), ("chunks.nbi", b"index")):
        (folder / name).write_bytes(content)
    assert native.cache_folder() == str(folder)
    assert [path.name for path in folder.iterdir()] == ["chunks.nbi"]  # empty files are left by a crash, and would fail

    class Full(io.BytesIO):
        def write(self, _: Any) -> int:
            raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(native.tempfile, "TemporaryFile", lambda dir: Full())  # noqa: A006
    assert native.PASSING in native.cache_folder()
    assert "cannot be written (No space left on device)" in caplog.text


def test_another_process_may_remove_an_empty_kernel_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = tmp_path / "rows.nbi"
    kernel.touch()
    listed = list(os.scandir(tmp_path))
    kernel.unlink()
    monkeypatch.setattr(native.os, "scandir", lambda _: listed)
    native._remove_empty(str(tmp_path))


def test_every_kernel_is_kept_in_one_folder() -> None:
    """Also those created later: elsewhere they would outlive a change to code that they inline."""
    importlib.import_module("gpuload.backends.tiledb")
    copies = native.pieces._copier(np.dtype("u1"), np.dtype("f4"))._compiled
    modules = [module for name, module in sys.modules.items() if name.startswith(native.__name__)]
    found = {value for module in modules for value in vars(module).values() if isinstance(value, native.parts.Native)}
    assert len(found) > 100
    folders = {function.__qualname__: function.kernel._cache.cache_path for function in found}
    folders["copy"] = copies._cache.cache_path
    folder = native.cache_folder()
    assert not {name: path for name, path in folders.items() if not Path(path).is_relative_to(folder)}


def test_lack_of_a_kernel_cache_folder_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(**_: Any) -> None:
        raise FileNotFoundError(errno.ENOENT, "No usable temporary directory found")

    monkeypatch.setattr(native.tempfile, "TemporaryDirectory", refuse)
    with pytest.raises(
        gpuload.PlanError, match=r"no place to keep the compiled kernels .*set NUMBA_CACHE_DIR, or TMPDIR"
    ):
        native._passing_folder.__wrapped__()


@pytest.mark.parametrize(
    ("is_terminal", "is_notebook", "is_quiet", "is_shown"),
    [
        (True, False, False, True),
        (True, False, True, False),
        (False, False, False, False),
        (False, True, False, True),
        (False, True, True, False),
    ],
)
def test_progress_bars_are_for_terminals_and_notebooks(
    is_terminal: bool, is_notebook: bool, is_quiet: bool, is_shown: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = _Terminal(is_terminal=is_terminal)
    monkeypatch.setattr(sys, "stderr", out)
    shell = types.SimpleNamespace(kernel=object()) if is_notebook else None
    monkeypatch.setitem(sys.modules, "IPython", types.SimpleNamespace(get_ipython=lambda: shell))
    with text.Progress(10, "counting", is_quiet=is_quiet) as progress:
        progress.reach(5)
    assert bool(out.getvalue()) == is_shown
    assert ("counting" in out.getvalue()) == is_shown


@pytest.mark.slow
def test_no_colours_even_in_a_terminal(store_variant: object, plain: Any) -> None:
    ours, theirs = pty.openpty()
    command = [sys.executable, "-m", "gpuload", "inspect", str(plain.path)]
    environment = {**os.environ, "NO_COLOR": "1", "TERM": "xterm-256color"}
    process = subprocess.Popen(command, stdout=theirs, stderr=theirs, env=environment)
    os.close(theirs)
    said = b""
    while True:
        try:
            piece = os.read(ours, 65536)
        except OSError:  # raised by Linux when the other side was closed
            break
        if not piece:
            break
        said += piece
    os.close(ours)
    assert process.wait(timeout=60) == 0
    assert b"cells" in said
    assert b"\x1b[" not in said


def test_written_files_are_reported(capsys: pytest.CaptureFixture[str]) -> None:
    text.print_saved(None, None)
    assert not capsys.readouterr().out
    text.print_saved("plot.png", None, "report.html")
    assert capsys.readouterr().out == "\nsaved: plot.png, report.html\n"


def test_an_interrupt_in_a_callback_is_not_lost() -> None:
    program = (
        "import signal, time, weakref\n"
        "from gpuload.cli import _no_interrupt_lost\n"
        "class Thing: pass\n"
        "with _no_interrupt_lost():\n"
        "    thing = Thing()\n"
        "    seen = weakref.ref(thing, lambda _: signal.raise_signal(signal.SIGINT))\n"
        "    del thing\n"
        "    time.sleep(20)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode != 0
    assert done.stderr.rstrip().endswith("KeyboardInterrupt")
    assert "Exception ignored" not in done.stderr
