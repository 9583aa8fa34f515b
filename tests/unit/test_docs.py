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
from docs import error_messages
from gpuload import errors

ROOT = Path(gpuload.__file__).parent.parent
DOCS = ROOT / "docs"
PACKAGE = Path(gpuload.__file__).parent


WITHIN_OTHERS = ("wanted … bytes, got …",)
"""Texts that only occur within another message."""


@functools.cache
def error_classes() -> dict[str, type[Exception]]:
    """Return every error class except those that the command line catches itself."""
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
    """Return the rows of each table of the errors page, by heading."""
    found: dict[str, list[list[str]]] = {}
    heading = ""
    for line in (DOCS / "errors.md").read_text().splitlines():
        if line.startswith("#"):
            heading = line.lstrip("# ")
        elif line.startswith("|") and not line.startswith("| ---"):
            found.setdefault(heading, []).append([cell.strip() for cell in line.strip("|").split(" | ")])
    return {name: rows[1:] for name, rows in found.items()}


@functools.cache
def messages() -> list[error_messages.Message]:
    """Return what is raised with a text, anywhere in the package."""
    return [message for message in error_messages.messages() if error_messages.fixed(message.text)]


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


def describes(documented: tuple[str, str], message: error_messages.Message) -> bool:
    """Return whether a row of the errors page describes a message."""
    heading, begin = documented
    return message.kind in heading.split(", ") and bool(
        re.match(".*".join(map(re.escape, begin.split("…"))), message.text, re.DOTALL)
    )


@pytest.mark.parametrize("documented", documented_messages())
def test_documented_messages_are_raised(documented: tuple[str, str]) -> None:
    assert any(describes(documented, message) for message in messages()), "nothing says so any more"


def test_every_message_or_the_errors_page_says_what_to_do() -> None:
    said = [m for m in messages() if not m.parts[1] and m.text not in WITHIN_OTHERS]
    silent = [m for m in said if not any(describes(documented, m) for documented in documented_messages())]
    assert not [f"{m.path.name}:{m.lines[0]}: {m.text}" for m in silent]


def test_every_raised_error_is_found_by_the_message_scan() -> None:
    made = {
        (path, node.lineno)
        for path in PACKAGE.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in error_messages.KINDS
    }
    assert made == {(message.path, message.lines[0]) for message in error_messages.messages()}


@pytest.mark.parametrize(
    ("text", "found", "cure"),
    [
        ("…=…: expected a name.", "…=…", "expected a name"),
        ("…: it has … genes; …", "…: it has … genes", "…"),
        ("a; b; give c.", "a; b", "give c"),
        ("…: no such file. Check the path.", "…: no such file", "Check the path"),
        ("…: two orders: drop one.", "…: two orders", "drop one"),
        ("…: it ends at …. Was it cut off?", "…: it ends at …", "Was it cut off?"),
        ("…: it is gone.", "…: it is gone.", ""),
    ],
)
def test_messages_are_split_into_fault_and_remedy(text: str, found: str, cure: str) -> None:
    assert error_messages.Message("ReadError", text, PACKAGE, (1, 1)).parts == (found, cure)


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


def test_links_have_text() -> None:
    """Sphinx fills an empty link with the title of the page, but readers of the source would see nothing."""
    pages = [page for page in DOCS.rglob("*.md") if page.parent.name != "generated"]
    assert not [page.name for page in pages if "[](" in page.read_text()]


def test_extras_named_in_the_pages_exist() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    for page in [ROOT / "README.md", *DOCS.rglob("*.md")]:
        for names in re.findall(r"(?:'\.|gpuload)\[([a-z0-9,]+)\]", page.read_text()):
            assert set(names.split(",")) <= set(extras), f"{page.name} names {names}"
