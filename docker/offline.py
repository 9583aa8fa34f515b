"""What `offline_wheels.sh` and `install_offline.sh` have to work out; both run pip, and this file tells them with what.

A GPU machine without a network has torch, CuPy and the CUDA toolkit, and other packages in versions that programs there
rely upon. So the folder leaves out what is there, and the installation replaces nothing that will do. pip cannot do
that: it asks for the CUDA toolkit as packages even where the machine has it otherwise.
"""
# ruff: noqa: INP001 - it lies beside the scripts that run it

from __future__ import annotations

import argparse
import json
import platform
import re
import shutil
import sys
import tomllib
import zipfile
from email.parser import HeaderParser
from importlib.metadata import PackageNotFoundError, distributions, version
from pathlib import Path
from typing import TYPE_CHECKING

# pip is there where the scripts run; packaging by itself need not be.
from pip._vendor.packaging.requirements import Requirement
from pip._vendor.packaging.specifiers import SpecifierSet
from pip._vendor.packaging.utils import canonicalize_name

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

PYPROJECT = Path(__file__).resolve().parent.parent / "pyproject.toml"

TARGET = {
    "python_version": "3.12",
    "python_full_version": "3.12.0",
    "sys_platform": "linux",
    "platform_machine": platform.machine(),
}
"""The GPU machine. `--machine` names another kind than this one's."""

ASSUMED = re.compile(
    "torch|triton|cupy-cuda13x|cuda-(bindings|core|toolkit)"
    "|nvidia-(cublas|cuda-.*|cudnn-.*|cufft|cufile|curand|cusolver|cusparse.*|nccl-.*|nvjitlink|nvshmem-.*|nvtx)"
)
"""What a machine with torch and CuPy for CUDA 13 has, unless a list of its packages says otherwise."""

EXTRAS = ("cuda13",)
TESTS = ("hdf5plugin", "hypothesis", "psutil", "pytest", "pytest-timeout", "pytest-xdist")
"""Of what the test suite needs, what the tests for a GPU do."""

RIVALS = ("annbatch", "zarrs")

INFO = ".dist-info"
"""How the name of the folder ends that says that a package is there."""


def requirements(*, dali: bool, rivals: bool) -> list[Requirement]:
    """Return what pyproject.toml asks for, without DALI and without the loaders to compare with unless wanted."""
    project = tomllib.loads(PYPROJECT.read_text(encoding="utf-8"))["project"]
    extras = project["optional-dependencies"]
    names = (*EXTRAS, "dali") if dali else EXTRAS
    todo = [*project["dependencies"], *(line for name in names for line in extras[name])]
    todo += [line for line in extras["test"] if Requirement(line).name in TESTS]
    if rivals:
        todo += [*extras["bench"], *RIVALS]
    found: dict[str, Requirement] = {}
    while todo:
        requirement = Requirement(todo.pop())
        if requirement.marker and not requirement.marker.evaluate(TARGET):
            continue
        if requirement.name == project["name"]:
            todo += [line for name in requirement.extras for line in extras[name]]
        else:
            found[str(requirement)] = requirement
    return list(found.values())


def to_take(
    wanted: Sequence[Requirement],
    requires: Mapping[str, Sequence[str]],
    is_there: Callable[[str, SpecifierSet], bool],
) -> tuple[set[str], dict[str, SpecifierSet]]:
    """Return which packages of a set a machine needs, and what it needs beside them.

    Parameters
    ----------
    wanted
        What is needed first of all.
    requires
        The set: what each package requires, by name.
    is_there
        Whether the machine has a package within some bounds. What such a package requires in turn is not looked at.
    """
    taken: set[str] = set()
    while True:
        bounds = bounds_of(wanted, {name: requires[name] for name in taken})
        lacking = {n: bound for n, bound in bounds.items() if n not in taken and not is_there(n, bound)}
        more = lacking.keys() & requires.keys()
        if not more:
            return taken, lacking
        taken |= more


def bounds_of(wanted: Sequence[Requirement], requires: Mapping[str, Sequence[str]]) -> dict[str, SpecifierSet]:
    """Return the bounds that requirements, and those of the packages given, put on versions, by name."""
    bounds: dict[str, SpecifierSet] = {}
    todo, seen = list(wanted), set()
    while todo:
        requirement = todo.pop()
        name = canonicalize_name(requirement.name)
        bounds[name] = bounds.get(name, SpecifierSet()) & requirement.specifier
        for extra in ("", *requirement.extras):
            if (name, extra) not in seen:
                seen.add((name, extra))
                lines = map(Requirement, requires.get(name, ()))
                todo += [line for line in lines if not line.marker or line.marker.evaluate({**TARGET, "extra": extra})]
    return bounds


def print_requirements(arguments: argparse.Namespace) -> None:
    """Print what pip is to put together. Not torch: its build is the machine's own, and pins a toolkit of its own."""
    wanted = requirements(dali=arguments.with_dali, rivals=arguments.with_rivals)
    print(*(requirement for requirement in wanted if requirement.name != "torch"), sep="\n")


def choose(arguments: argparse.Namespace) -> None:
    """Print what to download of a set that pip put together; leave in the folder what the machine needs at all."""
    wanted = requirements(dali=arguments.with_dali, rivals=arguments.with_rivals)
    lines = "".join(f"{requirement}\n" for requirement in wanted)
    Path(arguments.folder, "requirements.txt").write_text(lines, encoding="utf-8")
    report = json.loads(Path(arguments.report).read_text(encoding="utf-8"))
    metadata = {str(canonicalize_name(item["metadata"]["name"])): item["metadata"] for item in report["install"]}
    present = versions_in(arguments.present) if arguments.present else None

    def is_there(name: str, bound: SpecifierSet) -> bool:
        return bool(ASSUMED.fullmatch(name)) if present is None else is_good(present.get(name), bound)

    requires = {name: package.get("requires_dist", ()) for name, package in metadata.items()}
    taken, lacking = to_take(wanted, requires, is_there)
    print(*(f"{name}=={metadata[name]['version']}" for name in sorted(taken)), sep="\n")
    print("left out, for it is there:", *sorted(metadata.keys() - taken), file=sys.stderr)
    if lacking:
        print("left out, and must come from elsewhere:", *(f"{n}{b}" for n, b in lacking.items()), file=sys.stderr)


def versions_in(path: str) -> dict[str, str]:
    """Return the packages of a list as ``pip list --format=freeze`` prints it."""
    lines = Path(path).read_text(encoding="utf-8").splitlines()
    pairs = [line.split("==", 1) for line in lines if re.fullmatch(r"[\w.-]+==\S+", line)]
    if not pairs:
        sys.exit(f"{path}: no line is name==version; make it on the GPU machine by: pip list --format=freeze")
    return {canonicalize_name(name): found for name, found in pairs}


def is_good(found: str | None, bound: SpecifierSet) -> bool:
    """Return whether a package is there in a version that will do."""
    return found is not None and bound.contains(found, prereleases=True)


def print_missing(arguments: argparse.Namespace) -> None:
    """Print the wheels of the folder that this machine needs, a path a line; say what it needs beside them."""
    folder = Path(arguments.folder)
    wheels = {str(canonicalize_name(path.name.split("-")[0])): path for path in folder.glob("*.whl")}
    wanted = [Requirement(line) for line in (folder / "requirements.txt").read_text(encoding="utf-8").splitlines()]
    requires = {name: requires_of(path) for name, path in wheels.items()}
    taken, lacking = to_take(wanted, requires, lambda name, bound: is_good(installed(name), bound))
    for name in sorted(taken):
        if (found := installed(name)) is not None:
            print(f"replaced, because it will not do: {name} {found}", file=sys.stderr)
        print(wheels[name])
    for name, bound in sorted(lacking.items()):
        print(f"neither here nor in the folder: {name}{bound} (here: {installed(name) or 'none'})", file=sys.stderr)


def requires_of(wheel: Path) -> list[str]:
    """Return what a wheel says that it requires."""
    with zipfile.ZipFile(wheel) as archive:
        (path,) = (name for name in archive.namelist() if re.fullmatch(r"[^/]+\.dist-info/METADATA", name))
        return HeaderParser().parsestr(archive.read(path).decode()).get_all("Requires-Dist", [])


def installed(name: str) -> str | None:
    """Return the version of a package that is installed."""
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def merge(arguments: argparse.Namespace) -> None:
    """Move what pip installed into a folder into another one, in place of other versions of the same packages."""
    fresh, target = Path(arguments.fresh), Path(arguments.target)
    names = {canonicalize_name(package.name) for package in distributions(path=[str(fresh)])}
    for package in distributions(path=[str(target)]):
        if canonicalize_name(package.name) in names:
            files = [file for file in package.files or () if ".." not in file.parts]  # pip moves programs elsewhere
            for file in files:
                (target / file).unlink(missing_ok=True)
            for name in {file.parts[0] for file in files if file.parts[0].endswith(INFO)}:
                shutil.rmtree(target / name)  # even an empty one would say that it is there
    # What says that a package is there comes last: where this is interrupted, the next call does it again.
    moved = [path.relative_to(fresh) for path in fresh.rglob("*") if not path.is_dir()]
    for file in sorted(moved, key=lambda file: file.parts[0].endswith(INFO)):
        (target / file).parent.mkdir(parents=True, exist_ok=True)
        (fresh / file).replace(target / file)


def main() -> None:
    """Run one of the four parts."""
    parser = argparse.ArgumentParser(description="A part of offline_wheels.sh and install_offline.sh; run those.")
    parts = parser.add_subparsers(required=True)
    for name, run, places in (
        ("requirements", print_requirements, ()),
        ("choose", choose, ("report", "folder")),
        ("missing", print_missing, ("folder",)),
        ("merge", merge, ("fresh", "target")),
    ):
        part = parts.add_parser(name)
        part.set_defaults(run=run)
        for place in places:
            part.add_argument(place)
        part.add_argument("--machine", default=TARGET["platform_machine"])
        part.add_argument("--present")
        part.add_argument("--with-dali", action="store_true")
        part.add_argument("--with-rivals", action="store_true")
    arguments = parser.parse_args()
    TARGET["platform_machine"] = arguments.machine
    arguments.run(arguments)


if __name__ == "__main__":
    main()
