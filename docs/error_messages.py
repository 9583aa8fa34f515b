"""Extract every error message of gpuload, and the remedy it suggests, from the source."""

from __future__ import annotations

import ast
import functools
import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import gpuload
from gpuload.errors import (
    BusyError,
    CorruptDataError,
    DeviceError,
    MissingDependencyError,
    PlanError,
    ReadError,
    StoreError,
)

if TYPE_CHECKING:
    from collections.abc import Iterable

PACKAGE = Path(gpuload.__file__).parent
CLASSES = (PlanError, StoreError, ReadError, BusyError, CorruptDataError, DeviceError, MissingDependencyError)
KINDS = [kind.__name__ for kind in CLASSES]
"""The error classes with messages, in the order of the page."""

GAP = "…"
"""Placeholder for values inserted when the message is raised."""

CURE = re.compile(r"; |[.?] (?=[A-Z…])|[:,] (?=expected |give |drop )|(?<=: )(?=expected )")
"""Where the last part of a message, the remedy, begins."""


@dataclass(frozen=True)
class Message:
    """An error message: its class, its text, and the first and last line of the code that raises it."""

    kind: str
    text: str
    path: Path
    lines: tuple[int, int]

    @property
    def parts(self) -> tuple[str, str]:
        """Return the finding and the remedy; the latter is empty if the message suggests none."""
        if self.kind == MissingDependencyError.__name__:
            found, _, cure = self.text.partition("; install it with: ")
            return found, f"`{cure}`"
        breaks = list(CURE.finditer(self.text))
        if not breaks:
            return self.text, self.text if self.text.endswith("?") else ""
        last = breaks[-1]
        return self.text[: last.start()].rstrip(" :"), self.text[last.end() :].rstrip(".")


def fixed(text: str) -> str:
    """Return the constant part of a message, or of a piece of one."""
    return text.replace(GAP, "").strip(" .,;:()=/")


@functools.cache
def messages() -> tuple[Message, ...]:
    """Return every message of `KINDS` in the package, in the order of its files."""
    trees = {path: ast.parse(path.read_text()) for path in sorted(PACKAGE.rglob("*.py"))}
    sentences = {name: texts for tree in trees.values() for name, texts in _sentences(tree).items()}
    found = []
    for path, tree in trees.items():
        known: dict[ast.AST, dict[str, str]] = {}
        for function, call in _calls(tree, tree):
            if isinstance(call.func, ast.Name) and call.func.id in KINDS and call.args:
                kind, lines = call.func.id, (call.lineno, call.end_lineno or call.lineno)
                if function not in known:
                    known[function] = {**_named(tree.body), **_named(ast.walk(function))}
                texts = _texts(call, known[function], sentences)
                found += [Message(kind, text, path, lines) for text in texts]
    return tuple(found)


def _texts(call: ast.Call, known: dict[str, str], sentences: dict[str, list[str]]) -> list[str]:
    """Return what an error may say: one text, or those of the function that words it."""
    if isinstance(call.func, ast.Name) and call.func.id == MissingDependencyError.__name__:
        return [str(MissingDependencyError(*(template(argument, known) for argument in call.args)))]
    message = call.args[0]
    if isinstance(message, ast.Call):
        name = message.func.attr if isinstance(message.func, ast.Attribute) else ast.unparse(message.func)
        return sentences.get(name, [GAP])
    return [template(message, known)]


def _sentences(tree: ast.Module) -> dict[str, list[str]]:
    """Return what the functions of a module return, of those that return a sentence."""
    found = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef):
            returned = [n.value for n in ast.walk(node) if isinstance(n, ast.Return)]
            if returned and all(isinstance(value, ast.JoinedStr) for value in returned):
                found[node.name] = [template(value, {}) for value in returned if value]
    return found


def _calls(node: ast.AST, function: ast.AST) -> list[tuple[ast.AST, ast.Call]]:
    """Return the calls below a node, each with the function that it stands in."""
    found = []
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Call):
            found.append((function, child))
        found += _calls(child, child if isinstance(child, ast.FunctionDef) else function)
    return found


def _named(nodes: Iterable[ast.AST]) -> dict[str, str]:
    """Return the text of what is assigned to a name among these nodes."""
    found = {}
    for node in nodes:
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            is_text = isinstance(node.value, ast.JoinedStr) or (
                isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
            )
            found[node.targets[0].id] = template(node.value, {}) if is_text else GAP
    return found


def template(node: ast.expr, known: dict[str, str]) -> str:
    """Return a message with every value that is put into it as an ellipsis."""
    if isinstance(node, ast.Constant):
        return str(node.value)
    if isinstance(node, ast.JoinedStr):
        return "".join(template(value, known) for value in node.values)
    if isinstance(node, ast.FormattedValue):
        return template(node.value, known) if isinstance(node.value, ast.Name) else GAP
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        return template(node.left, known) + template(node.right, known)
    return known.get(node.id, GAP) if isinstance(node, ast.Name) else GAP
