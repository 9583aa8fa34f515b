"""All that is to be done on a GPU machine which is at hand for a short while only: install, test, measure.

    python3 docker/gpu_session.py wheels results                     everything, in half an hour at most
    python3 docker/gpu_session.py wheels results --only bench        a part of it, after the rest

Steps come in the order of what they tell, so that the first minutes tell whether it works and how fast it is. The file
that is measured is made beside the first ones, by processors that they leave idle.
Each has a time limit; one that fails, hangs or has no time left costs no other one but those that need what it makes,
and tests that are out of time say which have failed. What a step prints goes into ``session.log`` as it is printed,
what became of it into ``steps.jsonl`` when it ends, and each measurement into ``gpu.jsonl`` when it is made: whenever
the machine is taken away, what is done by then is in the folder of results. Needs no package but those of Python.

The wheels come from docker/offline_wheels.sh; what they are installed into, build/gpu, is found again by later calls.
"""
# ruff: noqa: INP001 - it lies beside the scripts that it runs

from __future__ import annotations

import argparse
import contextlib
import json
import os
import resource
import shutil
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import IO

ROOT = Path(__file__).resolve().parent.parent
SITE = ROOT / "build" / "gpu"


@dataclass(frozen=True)
class Step:
    """A command, and the most seconds that it may take.

    Attributes
    ----------
    is_needed
        Whether the steps after it make no sense without it.
    is_beside
        Whether the steps after it begin while it is under way, up to the first that comes `after` it.
    after
        The name of such a step.
    """

    name: str
    command: tuple[str, ...]
    limit_s: float
    is_needed: bool = False
    is_beside: bool = False
    after: str = ""


def steps(wheels: Path, results: Path) -> list[Step]:
    """Return what is done, in order."""
    python, docker = sys.executable, ROOT / "docker"
    pytest = (python, "-m", "pytest", "-q", "-m", "gpu", "-p", "no:cacheprovider", "-p", "no:benchmark")
    first = ("-n", "0", "-x", TESTS, "-k", "csr-gzip4 or local_rank")
    bench = (python, "-m", "benchmarks.run_gpu", "--out", str(results / "gpu.jsonl"))
    modality = ("demo-data/gpu_modality", "--make", "66175", "--only", "ours, GPU", "ours, GPU, exact", "--rounds", "2")
    modality = (*modality, "--out", str(results / "modality.jsonl"))
    install = ("bash", str(docker / "install_offline.sh"), "--target", str(SITE), str(wheels))
    found = [
        Step("install", install, 120, is_needed=True),
        Step("gpu", (python, "-c", HAS_GPU), 60, is_needed=True),
        Step("file", (python, "-c", MAKE_FILE), 240, is_beside=True),
        Step("doctor", (python, "-m", "gpuload", "doctor"), 100),
        Step("first", (*pytest, *HANGS, *first), 100),
        Step("tests", (*pytest, *HANGS, "-n", "4", f"--junitxml={results / 'tests.xml'}", TESTS), 240),
        Step(
            "speed",
            (*bench, "--rounds", "1", "--timeout", "60", "--only", *SPEED, "--budget", "160"),
            180,
            after="file",
        ),
        Step("programs", (*pytest, *HANGS, "-n", "0", *PROGRAMS), 150),
        Step("bench", (*bench, "--rounds", "2", "--timeout", "150", "--budget", "480"), 540, after="file"),
        Step("modality", (python, "-m", "benchmarks.run_modality", *modality), 500),
        Step(
            "cold", (*bench, "--rounds", "1", "--cache", "cold", "--only", *COLD, "--budget", "90"), 120, after="file"
        ),
    ]
    if checker := shutil.which("compute-sanitizer"):
        watched = (checker, "--error-exitcode", "9", "--report-api-errors", "no", *pytest, *first)
        found.append(Step("memcheck", watched, 240))
        found.append(Step("racecheck", (checker, "--tool", "racecheck", *NOT_OURS, *watched[1:]), 240))
    return found


HAS_GPU = """import sys
from gpuload.backends import first_gpu
from gpuload.backends.cuda.device import n_gpus
sys.exit(0 if n_gpus() else f"no GPU can be used here: {first_gpu()[1]}")
"""

MAKE_FILE = "from benchmarks import run_gpu; run_gpu.main(['--rounds', '0'])"

HANGS = ("-o", "faulthandler_timeout=60", "--timeout=100", "--timeout-method=thread")
"""How long a test may take before it tells where it hangs, and before its process is ended and the next test begins."""

GRACE_S = 15
"""Seconds that a step which is out of time has to end by itself."""

NOT_OURS = ("--kernel-name-exclude", "kns=nvcomp")
"""nvCOMP's kernels, by a part of their names: hazards in those say nothing of ours, and checking them takes long."""

TESTS, PROGRAMS = "tests/cuda/test_gpu.py", ("tests/cuda/test_gpu_programs.py", "tests/e2e/test_pipelines.py")
"""Files of the tests that need a GPU; the last one needs DALI too."""

SPEED = (
    "ceiling/h2d",
    "ceiling/fill",
    "ceiling/nvcomp-deflate",
    "gpuload/dense/pinned",
    "gpuload/dense/cached",
    "gpuload/dense/kept",
    "gpuload/step/pinned",
    "gpuload/step/cached",
    "gpuload/step/host",
    "gpuload/step/host-half",
    "gpuload-packed/dense",
)
"""What is measured before all else, once."""

COLD = ("gpuload/dense/kvikio", "gpuload/dense/pinned")


def run(todo: list[Step], results: Path, budget_s: float) -> list[tuple[str, str, float]]:
    """Carry steps out; return of each its name, what became of it, and its seconds."""
    environment = {**os.environ, "PYTHONPATH": f"{SITE}{os.pathsep}{ROOT}", "PYTHONUNBUFFERED": "1"}
    environment |= {"GPULOAD_PYTHON": sys.executable, "PYTHONFAULTHANDLER": "1"}
    outcomes: list[tuple[str, str, float]] = []
    end, lacking, beside = time.monotonic() + budget_s, "", dict[str, Future[None]]()
    telling, running = threading.Lock(), _Running()

    def carry_out(step: Step) -> None:
        nonlocal lacking
        limit, start = min(step.limit_s, end - time.monotonic()), time.monotonic()
        print(f"== {step.name}", file=log, flush=True)
        if lacking or limit < 1:
            outcome = f"not begun: {lacking or 'no time left'}"
        else:
            outcome = _outcome(step, limit, log, environment, running)
        if step.is_needed and outcome != "done":
            lacking = lacking or f"{step.name} failed"
        seconds = time.monotonic() - start
        with telling:
            outcomes.append((step.name, outcome, seconds))
            print(json.dumps({"step": step.name, "outcome": outcome, "seconds": seconds}), file=told, flush=True)
            print(f"{step.name:10s} {outcome} ({seconds:.0f} s)", flush=True)

    with (
        (results / "session.log").open("a") as log,
        (results / "steps.jsonl").open("a") as told,
        ThreadPoolExecutor() as others,
    ):
        try:
            for step in todo:
                if step.after in beside:
                    beside[step.after].result()
                if step.is_beside:
                    beside[step.name] = others.submit(carry_out, step)
                else:
                    carry_out(step)
        except BaseException:  # an interrupt: those beside would be waited for
            running.end()
            raise
    return outcomes


def _outcome(step: Step, limit_s: float, log: IO[str], environment: dict[str, str], running: _Running) -> str:
    """Run a step with all processes that it starts, and end them with it; it is one of `running` meanwhile."""
    try:
        process = subprocess.Popen(  # noqa: S603 - of our own making
            step.command,
            cwd=ROOT,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    except OSError as error:
        return f"failed: {error}"
    running.add(process.pid)
    try:
        code = process.wait(limit_s)
    except subprocess.TimeoutExpired:
        for sign in (signal.SIGINT, signal.SIGABRT):  # tests say what has failed; what does not end says where it is
            with contextlib.suppress(ProcessLookupError, subprocess.TimeoutExpired):
                os.killpg(process.pid, sign)
                process.wait(GRACE_S)
                break
        return f"ended after {limit_s:.0f} s"
    else:
        return "done" if code == 0 else f"failed: exit status {code}"
    finally:
        _kill(process.pid)
        process.wait()
        running.remove(process.pid)


class _Running:
    """The processes of the steps under way, each the leader of a session."""

    def __init__(self) -> None:
        self._leaders = set[int]()
        self._is_over = False

    def add(self, leader: int) -> None:
        """Note a process; after `end`, end it: it may have been on its way."""
        self._leaders.add(leader)
        if self._is_over:
            _kill(leader)

    def remove(self, leader: int) -> None:
        """Forget a process that has ended."""
        self._leaders.discard(leader)

    def end(self) -> None:
        """End all of them, and whatever is added later."""
        self._is_over = True
        for leader in tuple(self._leaders):
            _kill(leader)


def _kill(leader: int) -> None:
    """End a process that began a session, and all those in it."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(leader, signal.SIGKILL)


def main(arguments: list[str] | None = None) -> int:
    """Run the steps that are asked for; return 0 where all are done."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("wheels", type=Path, help="the folder that docker/offline_wheels.sh made")
    parser.add_argument("results", type=Path, help="the folder that results are added to")
    parser.add_argument("--only", nargs="+", metavar="STEP", help="names of the steps to take")
    parser.add_argument("--budget", type=float, default=1700, help="seconds for all (default: %(default)s)")
    chosen = parser.parse_args(arguments)
    results = chosen.results.resolve()
    known = steps(chosen.wheels.resolve(), results)
    names = [step.name for step in known]
    unknown = [name for name in chosen.only or () if name not in names]
    if unknown:
        parser.error(f"no step {unknown[0]!r}; there are {', '.join(names)}")
    results.mkdir(parents=True, exist_ok=True)
    resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))  # dumps would be huge
    todo = [step for step in known if chosen.only is None or step.name in chosen.only]
    return int(any(outcome != "done" for _, outcome, _ in run(todo, results, chosen.budget)))


if __name__ == "__main__":
    sys.exit(main())
