"""The frame of the runners: their options, arms in turn, and measurements in processes of their own.

Standard library only, as rivals' own interpreters run it too: ``python -m benchmarks.frame MODULE FUNCTION ARGUMENTS``
calls a function of a module, and prints what it returns as JSON.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

T = TypeVar("T")

ROOT = Path(__file__).parents[1]


def parser(
    name: str,
    doc: str,
    *,
    rounds: int | None = None,
    results: str | None = None,
    also: str = "",
    arms: Iterable[str] = (),
) -> argparse.ArgumentParser:
    """Return the parser of a runner.

    Parameters
    ----------
    name, doc
        Of its module; the first line describes it.
    rounds
        The default of ``--rounds``; None: it has no rounds.
    results
        The file in ``benchmarks/results`` that is the default of ``--out``; None: by default nothing is recorded.
    also
        What the help of ``--out`` says besides.
    arms
        Those that ``--only`` chooses from; without them there is no such option.
    """
    made = argparse.ArgumentParser(prog=f"python -m benchmarks.{name}", description=doc.splitlines()[0])
    out = ROOT / "benchmarks" / "results" / results if results else None
    default = f" (default: benchmarks/results/{results})" if results else ""
    made.add_argument("--out", type=Path, default=out, help=f"append JSON lines to this file{also}{default}")
    if rounds is not None:
        option(made, "--rounds", rounds, "measurements of each arm")
    if names := list(arms):
        made.add_argument("--only", nargs="+", choices=names, default=names, help="measure only these (default: all)")
    return made


def option(made: argparse.ArgumentParser, name: str, default: Any, what: str, **more: Any) -> None:
    """Add an option of the type of its default, which its help gives."""
    made.add_argument(name, type=type(default), default=default, help=f"{what} (default: %(default)s)", **more)


def in_turns(arms: Sequence[T], rounds: int) -> Iterator[tuple[int, T]]:
    """Yield each arm once a round, with the number of the round; each round begins at another arm."""
    step = max(1, len(arms) // max(rounds, 1))
    for number in range(rounds):
        shift = number * step % max(len(arms), 1)
        for arm in (*arms[shift:], *arms[:shift]):
            yield number, arm


def apart(work: Callable[..., Any], *arguments: Any, python: str = sys.executable, **environment: str) -> Any:
    """Return what a function of a module returns in a process of its own; arguments and result cross as JSON.

    Raises
    ------
    subprocess.CalledProcessError
        It failed; what it said of it was printed.
    """
    module = sys.modules[work.__module__].__spec__
    assert module is not None  # a runner is started as a module, so this knows its name even if it is __main__
    crossing = json.dumps(arguments, default=str)
    return last_json([python, "-m", "benchmarks.frame", module.name, work.__name__, crossing], **environment)


def last_json(command: Sequence[str], **environment: str) -> Any:
    """Return the JSON in the last line that a program prints."""
    return json.loads(said(command, **environment).splitlines()[-1])


def said(command: Sequence[str], **environment: str) -> str:
    """Return what ``python ...`` prints, run where this checkout can be imported; its errors go to the terminal."""
    python, *arguments = command
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    return subprocess.run(
        [python, "-W", "ignore", *arguments],
        stdout=subprocess.PIPE,
        text=True,
        check=True,
        env={**os.environ, "PYTHONPATH": path, **environment},
    ).stdout


def is_installed(package: str, python: str = sys.executable) -> bool:
    """Return whether a package, or a module of one, can be imported by this interpreter, or by another."""
    if python != sys.executable:
        return bool(apart(is_installed, package, python=python))
    try:
        return importlib.util.find_spec(package) is not None
    except ModuleNotFoundError:  # its parent package is missing
        return False


def describe_file(path: Path) -> dict[str, Any]:
    """Return what results record about a .h5ad file: its name, never its location."""
    import h5py

    with h5py.File(path) as file:
        X = file["X"]
        return {
            "name": path.name,
            "nbytes": path.stat().st_size,
            "n_obs": int(X.attrs["shape"][0]),
            "n_vars": int(X.attrs["shape"][1]),
            "nnz": int(X["data"].size),
            "compression": X["data"].compression,
            "chunk_values": int(X["data"].chunks[0]) if X["data"].chunks else None,
        }


if __name__ == "__main__":
    module_name, function_name, crossed = sys.argv[1:]
    print(json.dumps(getattr(importlib.import_module(module_name), function_name)(*json.loads(crossed))))
