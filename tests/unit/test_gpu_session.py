"""The session on a GPU machine: whatever a step does, the results of the others are kept."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import sys
import threading
import time
import zipfile
from pathlib import Path
from typing import Any

import psutil
import pytest

ROOT = Path(__file__).parents[2]
GPU = "pytest.mark" + ".gpu"
PYTEST = (sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "xdist.plugin", "-p", "pytest_timeout")
NAMES = ["install", "gpu", "file", "doctor", "first", "tests", "speed", "programs", "bench", "modality", "cold"]
NAMES += ["memcheck", "racecheck"]


def program(name: str) -> Any:
    """Return a program of the folder docker, which is not a package, as a module."""
    spec = importlib.util.spec_from_file_location(name, ROOT / "docker" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture(autouse=True)
def _start_pytest_sooner(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let it load no plugins besides those that are named."""
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")


@pytest.fixture(scope="module")
def session() -> Any:
    return program("gpu_session")


def outcomes_by_step(folder: Path) -> dict[str, str]:
    lines = [json.loads(line) for line in (folder / "steps.jsonl").read_text().splitlines()]
    return {line["step"]: line["outcome"] for line in lines}


def wait_for(path: Path) -> None:
    end = time.monotonic() + 60
    while not path.exists() and time.monotonic() < end:
        time.sleep(0.05)


def test_a_failed_or_hung_step_does_not_stop_the_others(
    session: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(session, "GRACE_S", 3)
    deaf = "import signal, time; signal.signal(signal.SIGINT, signal.SIG_IGN)"
    hang = f"sleep 600 & echo $! > {tmp_path}/child; echo begun; wait"
    steps = [
        session.Step("fails", ("sh", "-c", "echo what it found; exit 3"), 30),
        session.Step("hangs", ("sh", "-c", hang), 3),
        session.Step(
            "says where", (sys.executable, "-c", f"import signal, time; {deaf}\nfor _ in range(9): time.sleep(60)"), 3
        ),
        session.Step("is not there", ("/no/such/program",), 30),
        session.Step("works", ("sh", "-c", "echo done by $GPULOAD_PYTHON in $PWD"), 30),
    ]
    start = time.monotonic()
    outcomes = session.run(steps, tmp_path, 60)
    assert time.monotonic() - start < 20
    assert {name: outcome for name, outcome, _ in outcomes} == outcomes_by_step(tmp_path)
    found = outcomes_by_step(tmp_path)
    assert found.pop("is not there").startswith("failed: ")
    assert (found.pop("hangs"), found.pop("says where")) == ("ended after 3 s", "ended after 3 s")
    assert found == {"fails": "failed: exit status 3", "works": "done"}
    log = (tmp_path / "session.log").read_text()
    for line in ("== fails", "what it found", "begun", "line 2 in <module>", f"done by {sys.executable} in {ROOT}"):
        assert line in log
    child = int((tmp_path / "child").read_text())
    assert not psutil.pid_exists(child) or psutil.Process(child).status() == psutil.STATUS_ZOMBIE


@pytest.mark.parametrize("n_processes", [0, 1])
def test_tests_that_are_out_of_time_say_what_failed(
    session: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, n_processes: int
) -> None:
    begun, limit_s = tmp_path / "begun", 8.5

    class Popen(subprocess.Popen[bytes]):
        def wait(self, timeout: float | None = None) -> int:
            if timeout != limit_s:
                return super().wait(timeout)
            while not begun.exists() and self.poll() is None:  # however slow the machine is
                time.sleep(0.05)
            raise subprocess.TimeoutExpired(self.args, timeout)

    (tmp_path / "test_some.py").write_text(
        "import pathlib, time\n"
        "def test_wrong(): assert 1 == 2, 'the GPU is wrong'\n"
        f"def test_long(): time.sleep(2); pathlib.Path({str(begun)!r}).touch(); time.sleep(600)\n"
    )
    command = (*PYTEST, "-n", str(n_processes), f"--junitxml={tmp_path}/tests.xml", str(tmp_path / "test_some.py"))
    command = (*command, "--rootdir", str(tmp_path), f"--basetemp={tmp_path}/apart")  # else all earlier ones are tidied
    monkeypatch.setattr(session.subprocess, "Popen", Popen)
    session.run([session.Step("tests", command, limit_s)], tmp_path, 600)
    assert outcomes_by_step(tmp_path) == {"tests": "ended after 8 s"}
    assert "AssertionError: the GPU is wrong" in (tmp_path / "session.log").read_text()
    assert "the GPU is wrong" in (tmp_path / "tests.xml").read_text()


def test_nothing_runs_after_a_required_step_failed(session: Any, tmp_path: Path) -> None:
    steps = [
        session.Step("install", ("false",), 30, is_needed=True),
        session.Step("gpu", ("touch", str(tmp_path / "begun")), 30, is_needed=True),
        session.Step("next", ("touch", str(tmp_path / "begun")), 30),
    ]
    session.run(steps, tmp_path, 60)
    told = "not begun: install failed"
    assert outcomes_by_step(tmp_path) == {"install": "failed: exit status 1", "gpu": told, "next": told}
    assert not (tmp_path / "begun").exists()


def test_a_step_beside_others_is_awaited_by_those_that_come_after_it(session: Any, tmp_path: Path) -> None:
    made, seen = tmp_path / "made", tmp_path / "seen"
    wait = f"until [ -e {seen} ]; do sleep 0.05; done"
    steps = [
        session.Step("file", ("sh", "-c", f"{wait}; sleep 0.5; touch {made}"), 30, is_beside=True),
        session.Step("tests", ("sh", "-c", f"[ ! -e {made} ] && touch {seen}"), 30),
        session.Step("speed", ("test", "-e", str(made)), 30, after="file"),
        session.Step("late", ("sleep", "600"), 1, is_beside=True),
    ]
    session.run(steps, tmp_path, 60)
    assert list(outcomes_by_step(tmp_path).items()) == [
        ("tests", "done"),
        ("file", "done"),
        ("speed", "done"),
        ("late", "ended after 1 s"),
    ]


@pytest.mark.parametrize("is_on_its_way", [False, True])
def test_an_interrupt_ends_a_step_beside_others(
    session: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_on_its_way: bool
) -> None:
    pid, popen, add, end = tmp_path / "pid", subprocess.Popen, session._Running.add, session._Running.end
    added, ended = threading.Event(), threading.Event()

    def interrupted(*args: Any, **options: Any) -> Any:
        if args[0] == ("interrupted",):
            wait_for(pid)
            assert is_on_its_way or added.wait(30)
            raise KeyboardInterrupt
        process = popen(*args, **options)
        assert not is_on_its_way or ended.wait(30)
        return process

    monkeypatch.setattr(session._Running, "add", lambda *given: (add(*given), added.set()))
    monkeypatch.setattr(session._Running, "end", lambda running: (end(running), ended.set()))
    monkeypatch.setattr(session.subprocess, "Popen", interrupted)
    beside = session.Step(
        "file", ("sh", "-c", f"echo $$ > {pid}.new; mv {pid}.new {pid}; sleep 600"), 600, is_beside=True
    )
    start = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        session.run([beside, session.Step("tests", ("interrupted",), 30)], tmp_path, 600)
    assert time.monotonic() - start < 20
    assert not psutil.pid_exists(int(pid.read_text()))


def test_the_file_that_is_measured_is_made_beside_the_tests(
    session: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from benchmarks import run_gpu

    def make(path: Path, n_obs: int) -> Path:
        made.append((path, n_obs))
        path.parent.mkdir(exist_ok=True)
        path.touch()
        return path

    steps = {step.name: step for step in session.steps(tmp_path / "wheels", tmp_path)}
    assert [name for name, step in steps.items() if step.is_beside] == ["file"]
    uses = {name for name, step in steps.items() if "benchmarks.run_gpu" in step.command}
    assert {name for name, step in steps.items() if step.after == "file"} == uses
    made: list[tuple[Path, int]] = []
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(run_gpu, "n_gpus", lambda: 1)
    monkeypatch.setattr(run_gpu.machine, "card", lambda: {"card": "abacus"})
    monkeypatch.setattr(run_gpu, "make_file", make)
    monkeypatch.setattr(run_gpu.frame, "describe_file", lambda path: {"name": path.name})
    monkeypatch.setattr(run_gpu, "_measured", lambda command, limit_s: {"cells_per_s": 2.0})
    exec(steps["file"].command[-1], {})
    run_gpu.main(list(steps["speed"].command[3:]))
    assert len(made) == 2
    assert made[0] == made[1]


def test_the_time_budget_is_kept(session: Any, tmp_path: Path) -> None:
    steps = [session.Step(name, ("sleep", "600"), 600) for name in ("first", "second")]
    start = time.monotonic()
    session.run(steps, tmp_path, 2)
    assert time.monotonic() - start < 20
    assert outcomes_by_step(tmp_path) == {"first": "ended after 2 s", "second": "not begun: no time left"}


def test_steps_run_existing_commands(
    session: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from benchmarks import run_gpu, run_modality

    monkeypatch.setattr(session.shutil, "which", lambda name: f"/bin/{name}")
    steps = {step.name: step.command for step in session.steps(tmp_path / "wheels", tmp_path)}
    assert list(steps) == NAMES
    assert steps["install"][0] == "bash"  # a copy of the checkout may have lost its permission to be run
    assert Path(steps["install"][1]).exists()
    assert {*session.COLD, *session.SPEED} <= set(run_gpu.ARMS)
    options = steps["racecheck"][1 : steps["racecheck"].index(sys.executable)]
    assert options[options.index("--kernel-name-exclude") + 1] == "kns=nvcomp"
    monkeypatch.setattr(run_gpu, "n_gpus", lambda: 0)
    compile(session.HAS_GPU, "HAS_GPU", "exec")
    for name in ("speed", "bench", "cold"):
        with pytest.raises(SystemExit):
            run_gpu.main(list(steps[name][3:]))
        assert "no GPU can be used here" in capsys.readouterr().err  # not that an option is unknown
    with pytest.raises(SystemExit):
        run_modality.main(list(steps["modality"][3:]))
    assert "argument --only: invalid choice: 'ours, GPU'" in capsys.readouterr().err


def test_a_hung_test_shows_where_and_does_not_stop_the_others(session: Any, tmp_path: Path) -> None:
    (tmp_path / "test_hang.py").write_text(
        "import ctypes\n"
        "def test_stuck():\n"
        "    lock, mutex = ctypes.CDLL(None).pthread_mutex_lock, ctypes.create_string_buffer(64)\n"
        "    lock(mutex), lock(mutex)  # returns for no signal, like a wait inside CUDA\n"
        "def test_next(): pass\n"
    )
    steps = {step.name: step.command for step in session.steps(tmp_path / "wheels", tmp_path)}
    for name in ("first", "tests", "programs"):
        assert set(session.HANGS) < set(steps[name])
    options = [option.replace("60", "1").replace("100", "3") for option in session.HANGS]
    files = ["--rootdir", str(tmp_path), f"--junitxml={tmp_path}/tests.xml", str(tmp_path / "test_hang.py")]
    done = subprocess.run([*PYTEST, "-n", "1", *options, *files], capture_output=True, text=True, check=False)
    assert "1 failed, 1 passed" in done.stdout, done.stdout + done.stderr
    assert re.search(r"line \d+ in test_stuck\n", done.stdout + done.stderr)
    assert "test_stuck" in (tmp_path / "tests.xml").read_text()


def test_a_failed_arm_is_not_run_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from benchmarks import run_gpu

    def measured(command: list[str], limit_s: float) -> dict[str, Any]:
        is_good = command[command.index("--arm") + 1] == "gpuload/csr" and limit_s <= 300
        return {"cells_per_s": 2.0} if is_good else {"error": "none is here"}

    monkeypatch.setattr(run_gpu, "n_gpus", lambda: 1)
    monkeypatch.setattr(run_gpu.machine, "card", lambda: {"card": "abacus"})
    monkeypatch.setattr(run_gpu, "_measured", measured)
    monkeypatch.setattr(run_gpu.frame, "describe_file", lambda path: {"name": path.name, "n_obs": 7})
    options = ["--file", str(tmp_path / "cells.h5ad"), "--out", str(tmp_path / "gpu.jsonl"), "--rounds", "2"]
    assert run_gpu.main([*options, "--only", "gpuload/csr", "annbatch/dense"]) == 0
    records = [json.loads(line) for line in (tmp_path / "gpu.jsonl").read_text().splitlines()]
    assert [(r["round"], r["arm"]) for r in records] == [(0, "gpuload/csr"), (0, "annbatch/dense"), (1, "gpuload/csr")]
    assert records[1]["error"] == "none is here"
    assert records[0]["gpu"]["card"] == "abacus"
    assert records[0]["file"] == {"name": "cells.h5ad", "n_obs": 7}
    assert run_gpu.main([*options, "--only", "annbatch/dense"]) == 1


@pytest.mark.parametrize(("columns", "obs"), [(["plate", "drug"], ["plate"]), (["drug"], [])])
def test_a_file_of_ones_own_needs_no_label(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, columns: list[str], obs: list[str]
) -> None:
    pytest.importorskip("torch")
    import h5py

    import gpuload
    from benchmarks import run_gpu

    path, opened = tmp_path / "cells.h5ad", []
    with h5py.File(path, "w") as file:
        for name in columns:
            file[f"obs/{name}"] = [0]

    def open_loader(source: Path, **settings: Any) -> None:
        opened.append((source.name, settings["obs"]))
        raise gpuload.DeviceError("there is no GPU.")

    monkeypatch.setattr(gpuload, "open_loader", open_loader)
    monkeypatch.setattr(gpuload, "pack", lambda source, store, codec: store.touch())
    for arm in ("gpuload/dense", "gpuload-packed/dense"):
        with pytest.raises(gpuload.DeviceError):
            run_gpu.ARMS[arm](run_gpu.Options(path, 8, 4, "warm"))
    assert opened == [("cells.h5ad", obs), ("cells-run_gpu-lz4.zarr", obs)]


def test_arms_ask_for_what_their_names_say(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from benchmarks import run_gpu

    asked: dict[str, Any] = {}

    def loader(options: Any, **settings: Any) -> dict[str, Any]:
        asked.update(settings)
        return {"cells_per_s": 1.0}

    def pack(source: Path, store: Path, codec: str) -> None:
        packed.append(codec)
        store.mkdir()
        (store / "chunk").write_bytes(bytes(7))

    packed: list[str] = []
    monkeypatch.setattr(run_gpu, "loader", loader)
    monkeypatch.setattr("gpuload.pack", pack)
    options = run_gpu.Options(tmp_path / "cells.h5ad", 8, 4, "warm")
    for name, arm in run_gpu.ARMS.items():
        kind, _, rest = name.partition("/")
        if kind.startswith("gpuload") and arm is not loader and name != "gpuload/dense":
            asked.clear()
            figures = arm(options)
            words = rest.split("/")
            is_cached, is_kept = "cached" in words, "kept" in words
            assert asked.get("epoch") == (1 if is_cached or is_kept else None)
            assert asked.get("device_cache") == ("16GiB" if is_cached else None)
            assert asked.get("memory_cache") == ("16GiB" if is_kept else None)
            assert asked.get("output") == ("csr" if "csr" in words else None)
            assert asked.get("host_decode") == {"host": 0.3, "host-half": 0.5}.get(words[-1])
            assert asked.get("step_s") == (run_gpu.STEP_S if "step" in words else None)
            verify = {"verified": "always", "unverified": "never"}
            assert asked.get("verify") == next((verify[word] for word in words if word in verify), None)
            assert asked.get("io") == "kvikio" or "kvikio" not in words
            assert asked.get("io") == "pinned" or not {"pinned", "verified", "unverified", "urgent"} & set(words)
            if kind != "gpuload":
                codec = kind.removeprefix("gpuload-packed").removeprefix("-") or "lz4"
                assert asked["store"].name == f"cells-run_gpu-{codec}.zarr"
                assert figures["store_nbytes"] == 7
                assert figures["pack_s"] >= 0
    assert sorted(packed) == ["lz4", "none", "zstd"]  # each once, for all arms that read it


def test_a_failed_hung_or_crashed_arm_shows_where(capfd: pytest.CaptureFixture[str]) -> None:
    from benchmarks import run_gpu

    program = """if True:
        import os, sys, time
        from benchmarks import run_gpu
        def broken(options): raise RuntimeError("no such kernel")
        def stuck(options): time.sleep(600)
        def crashed(options): os.abort()
        run_gpu.n_gpus, run_gpu.ARMS = lambda: 1, {arm.__name__: arm for arm in (broken, stuck, crashed)}
        run_gpu.main(sys.argv[1:])"""
    command = [sys.executable, "-c", program, "--file", "none", "--arm"]
    assert run_gpu._measured([*command, "broken"], 60) == {"error": "RuntimeError: no such kernel"}
    assert run_gpu._measured([*command, "stuck", "--timeout", "1"], 60) == {"error": "longer than 60 s"}
    assert run_gpu._measured([*command, "crashed"], 60) == {"error": "exit status -6"}
    said = capfd.readouterr().err
    assert all(f" in {name}\n" in said for name in ("broken", "stuck", "crashed"))


def test_all_tests_that_need_a_gpu_are_run(session: Any) -> None:
    folder = ROOT / "tests"
    marked = {path.relative_to(ROOT).as_posix() for path in folder.rglob("test_*.py") if GPU in path.read_text()}
    assert marked == {session.TESTS, *session.PROGRAMS}
    assert f"GPU_TESTS := {' '.join((session.TESTS, *session.PROGRAMS))}\n" in (ROOT / "Makefile").read_text()


@pytest.mark.parametrize("options", [pytest.param((), marks=pytest.mark.slow), ("-m", "gpu")])
def test_only_tests_that_need_a_gpu_see_one(tmp_path: Path, options: tuple[str, ...]) -> None:
    ask = [sys.executable, "-c", "import os; print(os.environ['CUDA_VISIBLE_DEVICES'], end='')"]
    body = f"(subprocess.run({ask}, capture_output=True, text=True).stdout, os.environ['CUDA_VISIBLE_DEVICES'])"
    (tmp_path / "test_seen.py").write_text(
        f"import os, subprocess\nimport pytest\n"
        f"def test_seen_here():\n    assert {body} == ('', '')\n"
        f"@{GPU}\ndef test_seen_there():\n    assert {body} == ('3', '3')\n"
    )
    files = [str(tmp_path / "test_seen.py"), "tests/unit/test_checks.py"]  # the other one for the conftest of tests
    command = [*PYTEST, *files, "-n", "1", "-k", "test_seen"]
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "3"}
    done = subprocess.run([*command, *options], cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert "1 passed" in done.stdout, done.stdout + done.stderr


@pytest.fixture
def offline() -> Any:
    return program("offline")


@pytest.mark.filterwarnings("ignore")  # of pip
def test_requirements_are_those_of_a_gpu_machine(offline: Any) -> None:
    plain, more = (offline.requirements(dali=dali, rivals=False) for dali in (False, True))
    dali = "nvidia-dali-cuda130"
    assert (dali in {r.name for r in plain}, dali in {r.name for r in more}) == (False, True)
    (pandas,) = (r for r in plain if r.name == "pandas")  # the line for Python 3.11 is not for that machine
    assert pandas.specifier.contains("3.1.1")


@pytest.fixture
def install(tmp_path: Path) -> Any:
    """Return a function that installs made wheels, ``{"name-version": {file: text}}``, into ``site``."""
    python = tmp_path / "python"  # it passes for the version that the wheels of others are for
    python.write_text(f'#!/bin/sh\n[ "$1" = -c ] && exit 0\nexec {sys.executable} "$@"\n')
    python.chmod(0o755)
    folders = iter("abc")

    def run(wheels: dict[str, dict[str, str]], *wanted: str) -> subprocess.CompletedProcess[str]:
        folder = tmp_path / next(folders)
        folder.mkdir()
        (folder / "requirements.txt").write_text("\n".join(wanted))
        for package, files in wheels.items():
            name, version = package.split("-")
            info = f"{package}.dist-info"
            files[f"{info}/METADATA"] = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
            files[f"{info}/WHEEL"] = "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
            files.setdefault(f"{info}/entry_points.txt", f"[console_scripts]\n{name} = {name}_of_ours:main\n")
            files[f"{info}/RECORD"] = "".join(f"{file},,\n" for file in (*files, f"{info}/RECORD"))
            with zipfile.ZipFile(folder / f"{package}-py3-none-any.whl", "w") as wheel:
                for file, text in files.items():
                    wheel.writestr(file, text)
        return subprocess.run(
            ["bash", str(ROOT / "docker" / "install_offline.sh"), "--target", str(tmp_path / "site"), str(folder)],
            env={**os.environ, "GPULOAD_PYTHON": str(python)},
            capture_output=True,
            text=True,
            check=False,
        )

    return run


def files_in(folder: Path) -> dict[str, str]:
    paths = [path for path in folder.rglob("*") if path.is_file() and path.suffix != ".pyc"]
    return {path.relative_to(folder).as_posix(): path.read_text() for path in paths}


@pytest.mark.slow
def test_later_wheels_are_added_to_what_a_folder_has(install: Any, tmp_path: Path) -> None:
    first, both = {"gplone-1": {"gpl/one/a.py": "1"}}, ("gplone", "gpltwo")
    assert install(first, *both[:1]).returncode == 0
    done = install({**first, "gpltwo-1": {"gpl/two/b.py": "2"}}, *both)
    assert done.returncode == 0, done.stderr
    assert "gplone" not in done.stdout  # it is there
    found = files_in(tmp_path / "site")
    assert {name: found.get(name) for name in ("gpl/one/a.py", "gpl/two/b.py")} == {
        "gpl/one/a.py": "1",
        "gpl/two/b.py": "2",
    }
    assert {"bin/gplone", "bin/gpltwo"} < set(found)
    assert install(first, *both).stdout == "nothing to install\n"


@pytest.mark.slow
def test_a_newer_wheel_replaces_the_whole_of_an_older_one(install: Any, tmp_path: Path) -> None:
    install(
        {"gplone-1": {"gpl/one/a.py": "1", "gpl/one/old.py": ""}, "gpltwo-1": {"gpl/b.py": "2"}}, "gplone", "gpltwo"
    )
    (tmp_path / "bin").mkdir()  # where its list of files says that its program is
    (tmp_path / "bin" / "gplone").touch()
    done = install({"gplone-2": {"gpl/one/a.py": "3"}}, "gplone>=2", "gpltwo")
    assert done.returncode == 0, done.stderr
    found = files_in(tmp_path / "site")
    assert {name: text for name, text in found.items() if name.startswith("gpl/")} == {
        "gpl/one/a.py": "3",
        "gpl/b.py": "2",
    }
    infos = {path.name for path in (tmp_path / "site").glob("*.dist-info")}
    assert infos == {"gplone-2.dist-info", "gpltwo-1.dist-info"}
    assert list((tmp_path / "bin").iterdir())


def test_an_installation_that_fails_changes_nothing(install: Any, tmp_path: Path) -> None:
    install({"gplone-1": {"gpl/one/a.py": "1"}}, "gplone")
    before, beside = files_in(tmp_path / "site"), {*tmp_path.iterdir()}
    spoilt = {"gpl/zwei/c.py": "3", "gplzwei-1.dist-info/entry_points.txt": "[console_scripts]\ngplzwei = nowhere\n"}
    done = install({"gpltwo-1": {"gpl/two/b.py": "2"}, "gplzwei-1": spoilt}, "gpltwo", "gplzwei")
    assert done.returncode != 0
    assert "gplzwei" in done.stderr
    assert files_in(tmp_path / "site") == before
    assert {*tmp_path.iterdir()} - beside == {tmp_path / "b"}


def test_single_steps_can_be_run(session: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    known = [session.Step(name, ("true",), 30) for name in "abc"]
    monkeypatch.setattr(session, "steps", lambda wheels, results: known)
    assert session.main([str(tmp_path), str(tmp_path / "out"), "--only", "c", "a"]) == 0
    assert list(outcomes_by_step(tmp_path / "out")) == ["a", "c"]
    with pytest.raises(SystemExit):
        session.main([str(tmp_path), str(tmp_path / "out"), "--only", "d"])


def test_constants_are_varied_while_they_are_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from benchmarks import run_gpu, run_gpu_parts
    from gpuload.backends.cuda import loading, open_cuda

    class Opened(Exception):  # noqa: N818 - no error
        """A reader is opened, with this many threads."""

    def reader(_: Any, *, num_threads: int) -> None:
        raise Opened(num_threads)

    def now() -> tuple[Any, ...]:
        given = dict.fromkeys(("memory_nbytes", "cache_nbytes", "host_cache_nbytes", "host_decode"), 0)
        with pytest.raises(Opened) as opened:
            open_cuda(0, io="pinned", num_threads=None, verify="once", values="float32", **given)
        return loading.PART_STREAMS, loading.N_LOADS, opened.value.args[0], run_gpu.PREFETCH

    monkeypatch.setattr("gpuload.backends.cuda.device.Device", lambda *_: None)
    monkeypatch.setattr("gpuload.backends.cuda.pinned.PinnedReader", reader)

    def loader(options: run_gpu.Options, **settings: Any) -> dict[str, Any]:
        seen.append(now())
        return {"cells_per_s": 2.0, "epochs_cells_per_s": [1.0, 2.0, 3.0], **settings}

    seen: list[tuple[Any, ...]] = []
    monkeypatch.setattr(run_gpu, "loader", loader)
    monkeypatch.setattr(run_gpu_parts, "n_gpus", lambda: 1)
    monkeypatch.setattr(run_gpu_parts.machine, "card", lambda: {"card": "abacus"})
    monkeypatch.setattr(run_gpu_parts.frame, "describe_file", lambda path: {"name": path.name})
    before, out = now(), tmp_path / "parts.jsonl"
    assert run_gpu_parts.main(["--file", "cells.h5ad", "--rounds", "1", "--out", str(out)]) == 0
    assert now() == before
    streams, loads, threads, prefetch = before
    expected = {before, (streams // 2, *before[1:]), (streams, loads, 2 * threads, prefetch)}
    assert set(seen) == expected | {(streams, loads + 1, threads, prefetch + 1)}
    records = [json.loads(line) for line in out.read_text().splitlines()]
    names = ("part_streams", "n_loads", "reader_threads", "prefetch")
    assert sorted(tuple(record[name] for name in names) for record in records) == sorted(seen)
    assert "half the chunks" in capsys.readouterr().out
