"""The documentation says what the code does: errors and their messages, public names, programs, links."""

from __future__ import annotations

import ast
import functools
import importlib
import inspect
import re
import tomllib
from pathlib import Path

import pytest

import gpuload
from gpuload import errors

ROOT = Path(gpuload.__file__).parent.parent
DOCS = ROOT / "docs"
PACKAGE = Path(gpuload.__file__).parent


@functools.cache
def error_classes() -> dict[str, type[Exception]]:
    """Return every class of the tree of errors but those that the command line catches itself."""
    found: dict[str, type[Exception]] = {}
    for path in PACKAGE.rglob("*.py"):
        module = ".".join(("gpuload", *path.relative_to(PACKAGE).with_suffix("").parts)).removesuffix(".__init__")
        for name in re.findall(r"^class (\w+Error)\(", path.read_text(), re.MULTILINE):
            if not module.startswith("gpuload.cli."):
                found[name] = getattr(importlib.import_module(module), name)
    return {name: kind for name, kind in found.items() if issubclass(kind, errors.GpuloadError)}


def source_of(module: str) -> str:
    path = PACKAGE.joinpath(*module.split(".")[1:])
    return (path / "__init__.py" if path.is_dir() else path.with_suffix(".py")).read_text()


def tables() -> dict[str, list[list[str]]]:
    """Return the rows of each table of the page of errors, by heading."""
    found: dict[str, list[list[str]]] = {}
    heading = ""
    for line in (DOCS / "errors.md").read_text().splitlines():
        if line.startswith("#"):
            heading = line.lstrip("# ")
        elif line.startswith("|") and not line.startswith("| ---"):
            found.setdefault(heading, []).append([cell.strip() for cell in line.strip("|").split(" | ")])
    return {name: rows[1:] for name, rows in found.items()}


def template(node: ast.expr) -> str:
    """Return a message with every value that is put into it as an ellipsis."""
    if isinstance(node, ast.Constant):
        return str(node.value)
    if isinstance(node, ast.JoinedStr):
        return "".join(str(v.value) if isinstance(v, ast.Constant) else "…" for v in node.values)
    if isinstance(node, ast.BinOp):
        return template(node.left) + template(node.right)
    return "…"


@functools.cache
def messages() -> dict[str, set[str]]:
    """Return what each class of error is raised with, anywhere in the package."""
    constants: dict[str, str] = {}
    found: dict[str, set[str]] = {name: set() for name in error_classes()}
    for path in PACKAGE.rglob("*.py"):
        tree = ast.parse(path.read_text())
        for node in ast.walk(tree):
            if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
                constants[node.targets[0].id] = template(node.value)
        for node in ast.walk(tree):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in found and node.args:
                message = node.args[0]
                known = constants.get(message.id, "…") if isinstance(message, ast.Name) else template(message)
                found[node.func.id].add(known)
    found["MissingDependencyError"] = {str(errors.MissingDependencyError("…", "…", "…"))}
    return found


def documented_messages() -> list[tuple[str, str]]:
    return [(heading, row[0].strip("`")) for heading, rows in tables().items() if heading != "Errors" for row in rows]


def test_every_error_class_is_in_the_table_and_no_other() -> None:
    listed = {row[0].strip("`"): row[1].strip("`") for row in tables()["Errors"]}
    classes = error_classes()
    assert listed.keys() == classes.keys()
    for name, builtin in listed.items():
        assert issubclass(classes[name], getattr(__import__("builtins"), builtin)), name


def test_every_class_but_the_base_has_messages_listed() -> None:
    headed = {name for heading in tables() for name in heading.split(", ")} - {"Errors"}
    assert headed == error_classes().keys() - {"GpuloadError"}


@pytest.mark.parametrize(("heading", "message"), documented_messages())
def test_documented_messages_are_raised(heading: str, message: str) -> None:
    wanted = re.compile(".*".join(map(re.escape, message.split("…"))) + ".*", re.DOTALL)
    raised = {text for name in heading.split(", ") for text in messages()[name]}
    assert any(wanted.match(text) and fixed(text) for text in raised), f"no {heading} says so any more"


def fixed(text: str) -> bool:
    """Return whether a message says anything by itself."""
    return len(text.replace("…", "")) > 10


def test_every_public_name_is_in_the_reference() -> None:
    listed = re.findall(r"^   ([\w.]+)$", (DOCS / "reference" / "index.md").read_text(), re.MULTILINE)
    assert len(listed) == len(set(listed))
    assert set(gpuload.__all__) - {"errors", "__version__"} == {name for name in listed if "." not in name}
    for name in listed:
        module, _, attribute = f"gpuload.{name}".rpartition(".")
        assert re.search(rf"\b{attribute}\b", source_of(module)), name
        assert not attribute.startswith("_")


@pytest.mark.parametrize("page", sorted(DOCS.rglob("*.md")), ids=lambda path: path.relative_to(DOCS).as_posix())
def test_arguments_of_open_loader_in_the_pages_exist(page: Path) -> None:
    known = set(inspect.signature(gpuload.open_loader).parameters)
    for block in re.findall(
        r"^```(?:python|\{code-cell\} python)\n(.*?)^```", page.read_text(), re.DOTALL | re.MULTILINE
    ):
        code = re.sub(r"^:tags:.*$", "", block, flags=re.MULTILINE)
        for node in ast.walk(ast.parse(code)):
            if isinstance(node, ast.Call) and ast.unparse(node.func).endswith("open_loader"):
                assert {keyword.arg for keyword in node.keywords if keyword.arg} <= known, page.name


@pytest.mark.parametrize("page", sorted(DOCS.rglob("*.md")), ids=lambda path: path.relative_to(DOCS).as_posix())
def test_files_named_in_the_pages_exist(page: Path) -> None:
    for name in re.findall(r"`((?:docs|pipelines|benchmarks|tests|docker|gpuload)/[\w/.]+\.\w+)`", page.read_text()):
        assert (ROOT / name).exists(), f"{page.name} names {name}"


def test_extras_named_in_the_pages_exist() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    for page in [ROOT / "README.md", *DOCS.rglob("*.md")]:
        for names in re.findall(r"(?:'\.|gpuload)\[([a-z0-9,]+)\]", page.read_text()):
            assert set(names.split(",")) <= set(extras), f"{page.name} names {names}"
