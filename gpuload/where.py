"""Cell selection by a short expression over columns of obs: ``"cell_type == 'T cell' and pct_mito < 0.1"``.

The expression is parsed as Python and its tree walked: only comparisons, and/or/not, in, parentheses, literals, column
names and isna/notna are allowed, so nothing in it is ever executed. X is not read. Genes are selected by the same over
columns of var.

Missing values compare as in pandas: equal to nothing, unequal to everything, neither less nor greater. So do ordered
categories: by their order.
"""

from __future__ import annotations

import ast
import math
import operator
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from gpuload.errors import PlanError, listing, nearest, shown
from gpuload.types import kind_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from numpy.typing import NDArray

    from gpuload.types import Column

MAX_LENGTH = 100_000
"""Maximum number of characters of an expression; for a longer list of values, use `Subset` with a mask."""

SLICE = 1 << 20
"""Number of cells compared at a time, to keep temporaries small."""

_COMPARE: dict[type[ast.cmpop], tuple[str, Callable[[Any, Any], Any]]] = {
    ast.Eq: ("==", operator.eq),
    ast.NotEq: ("!=", operator.ne),
    ast.Lt: ("<", operator.lt),
    ast.LtE: ("<=", operator.le),
    ast.Gt: (">", operator.gt),
    ast.GtE: (">=", operator.ge),
}
_MIRRORED: dict[Any, Any] = {ast.Lt: ast.Gt, ast.Gt: ast.Lt, ast.LtE: ast.GtE, ast.GtE: ast.LtE}
_MASK = {"where": "sampler=Subset(mask)", "genes": "a mask over all genes", "keep": "a shorter one"}
_NAMES = {"where": "", "genes": "; names of genes go in a list", "keep": ""}
"""What else may be given in place of an expression, by the setting."""

_WORDS = re.compile(r"""'(?:\\.|[^'\\])*'|"(?:\\.|[^"\\])*"|`([^`]*)`|(#[^\n]*)""")
"""Quoted text, names in backticks, and comments, each up to the end of its line."""

_SCALAR = re.compile(r"np\.(?:str_|bool_?|u?int\d+|float\d+|u?longlong|longdouble)")
"""Types in the repr of NumPy's scalars; a function, such as np.log, is not evaluated."""

_MISWRITTEN = (
    (r"(?<![=!<>:])=(?![=<>])", "use == to compare, as in \"cell_type == 'T cell'\""),
    (r"@", 'write the values of a variable into the text, as in f"plate in {list(plates)}"'),
    (r"=[<>]", "use <= or >="),
    (r"<>", "use !="),
    (r"&&|\|\||!(?!=)", "use and, or, not"),
    (r"\b(?:AND|OR|NOT|IN)\b", "write and, or, not, in in lower case"),
    (r"`", "close the backticks"),
    (r"['\"]", "close the quotes"),
    ("", "put text in quotes and names with spaces in backticks, as in \"`cell type` == 'T cell'\""),
)
"""Pattern outside quotes and backticks -> what may be meant, in an expression that cannot be read."""


@dataclass(frozen=True, slots=True)
class Where:
    """A parsed expression.

    Attributes
    ----------
    names
        Maps placeholders to the names given in backticks.
    setting
        The argument that it was given as: ``"where"`` or ``"keep"`` over obs, or ``"genes"`` over var.
    """

    text: str
    columns: tuple[str, ...]
    tree: ast.expr
    names: Mapping[str, str]
    setting: str

    def name_of(self, node: ast.Name) -> str:
        """Return the column that a name stands for."""
        return self.names.get(node.id, node.id)

    def explain(self, column: str) -> str:
        """Return what may be meant by a column that does not exist, as part of a sentence; "" if there is no guess."""
        for value, op, other in _of_two_names(self.tree):
            if self.name_of(value) != column:
                continue
            against = _shown(other, self)
            if column.lower() in ("true", "false"):
                return f"in {self.setting}=, write {column.capitalize()}"
            if column.lower() in ("nan", "none", "null", "na"):
                return f"in {self.setting}=, use isna({against}) or notna({against})"
            return f"in {self.setting}=, text goes in quotes: {against} {_COMPARE[type(op)][0]} {column!r}"
        return ""

    def mask(self, obs: Mapping[str, Column]) -> NDArray[np.bool_]:
        """Return a mask of the cells for which the expression is true.

        Returns
        -------
        (n_obs,) bool

        Raises
        ------
        PlanError
            A value is compared with a column that cannot hold it, no cell has a named category, or no cells are left.
        """
        mask = self.holds(obs)
        if not mask.any():
            raise PlanError(f"{self.setting}={self.text!r}: it holds for none of the {mask.size} cells; relax it.")
        return mask

    def holds(self, table: Mapping[str, Column]) -> NDArray[np.bool_]:
        """Return for which rows of a table, of cells or genes, the expression is true; it may be none."""
        test = _Compiler(self, table).test(self.tree)
        n_rows = next(iter(table.values())).values.size
        mask = np.empty(n_rows, dtype=bool)
        for start in range(0, n_rows, SLICE):
            rows = slice(start, start + SLICE)
            mask[rows] = test(rows)
        return mask


def parse(text: Any, setting: str = "where") -> Where:
    """Parse an expression, without opening anything.

    Parameters
    ----------
    text
        The expression. Columns whose name is not a Python name go in backticks (```pct mito```); text is quoted.
    setting
        See `Where`.

    Raises
    ------
    PlanError
        It is not a valid expression.
    """
    if setting == "genes" and not text.strip():
        raise PlanError(
            f"genes={text!r}: expected a condition on columns of var, such as 'highly_variable', or names of genes in "
            "a list."
        )
    if not isinstance(text, str) or not text.strip():
        is_list = setting == "where" and not isinstance(text, str) and hasattr(text, "__getitem__")
        rows = "; pass a mask or row numbers as sampler=gpuload.Subset(mask)" if is_list else ""
        raise PlanError(
            f"{setting}={shown(text)}: expected an expression over columns of obs, for example "
            f"{setting}=\"cell_type == 'T cell' and pct_mito < 0.1\"{rows}."
        )
    if len(text) > MAX_LENGTH:
        raise PlanError(f"{setting}: {len(text)} characters; at most {MAX_LENGTH} are read. Pass {_MASK[setting]}.")
    names: dict[str, str] = {}
    mark = "_column_"
    while mark in text:
        mark += "_"

    def put(match: re.Match[str]) -> str:
        if match[2] is not None:
            return " "
        if match[1] is None:
            return match[0]
        word = f"{mark}{len(names)}_"
        names[word] = match[1]
        return f" {word} "  # a word of its own, whatever stands beside it

    try:
        line = re.sub(r"[\r\n]", " ", _WORDS.sub(put, text)).strip()
        tree = ast.parse(line, mode="eval").body
        _restore_names(tree, line)
        where = Where(text, (), tree, names, setting)
        columns = tuple(dict.fromkeys(_check(tree, where)))
    except (SyntaxError, ValueError, MemoryError) as error:
        if isinstance(error, PlanError):
            raise
        reason = getattr(error, "msg", None) or type(error).__name__
        raise PlanError(
            f"{setting}={text!r:.200}: it cannot be read as an expression ({_named(reason, names)}); {_meant(text)}"
            f"{_NAMES[setting]}."
        ) from error
    except RecursionError as error:
        raise PlanError(f"{setting}={text!r:.200}: it is nested too deeply; pass {_MASK[setting]}.") from error
    return Where(text, columns, tree, names, setting)


def _restore_names(tree: ast.expr, line: str) -> None:
    """Give names the letters that they are written with: Python's parser replaces some, such as the micro sign."""
    if line.isascii():
        return
    written = line.encode()
    for node in ast.walk(tree):
        if isinstance(node, ast.Name):
            node.id = written[node.col_offset : node.end_col_offset].decode()


def _meant(text: str) -> str:
    """Return how to write what an expression that cannot be read may mean, as part of a sentence."""
    rest = _WORDS.sub("_", text)
    return next(cure for pattern, cure in _MISWRITTEN if re.search(pattern, rest))


def _steps(node: ast.Compare) -> Iterator[tuple[ast.expr, ast.cmpop, ast.expr]]:
    """Yield the comparisons of a chain, such as ``0 < depth < 9``, one by one."""
    yield from zip([node.left, *node.comparators], node.ops, node.comparators, strict=False)


def _of_two_names(tree: ast.expr) -> Iterator[tuple[ast.Name, ast.cmpop, ast.Name]]:
    """Yield the comparisons of one name with another, each in both directions."""
    for node in ast.walk(tree):
        for left, op, right in _steps(node) if isinstance(node, ast.Compare) else ():
            if isinstance(left, ast.Name) and isinstance(right, ast.Name):
                yield left, op, right
                yield right, op, left


def _check(node: ast.expr, where: Where) -> Iterator[str]:
    """Yield the columns under a boolean node; raise PlanError for unsupported syntax."""
    if isinstance(node, ast.BoolOp):
        for value in node.values:
            yield from _check(value, where)
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
        yield from _check(node.operand, where)
    elif isinstance(node, ast.Compare):
        yield from _check_comparison(node, where)
    elif isinstance(node, ast.Call) and _call_name(node) in ("isna", "notna"):
        if len(node.args) != 1 or node.keywords or not isinstance(node.args[0], ast.Name):
            raise _refusal(where, node, "takes the name of one column")
        yield where.name_of(node.args[0])
    elif isinstance(node, ast.Name):
        yield where.name_of(node)
    elif _is_of_bits(node):
        raise _refusal(where, node, "is not supported; use and, or, not")
    else:
        raise _refusal(where, node, "is not supported; supported are comparisons, and, or, not, in, isna() and notna()")


def _check_comparison(node: ast.Compare, where: Where) -> Iterator[str]:
    for left, op, right in _steps(node):
        names = [side for side in (left, right) if isinstance(side, ast.Name)]
        if isinstance(op, ast.In | ast.NotIn):
            if not isinstance(left, ast.Name) or not isinstance(right, ast.List | ast.Tuple | ast.Set):
                raise _refusal(where, node, "is not supported; use column in ['one', 'two']")
            values = right.elts
        elif type(op) not in _COMPARE:
            raise _refusal(where, node, "is not supported; use isna(column) or notna(column)")
        else:
            values = [side for side in (left, right) if not isinstance(side, ast.Name)]
        for value in values:
            _literal(value, where)
        if not names:
            raise _refusal(where, node, "compares no column")
        yield from map(where.name_of, names)


def _literal(node: ast.expr, where: Where) -> Any:
    """Return the value of a text, number or boolean literal."""
    sign, inner = 1, node
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub | ast.UAdd):
        sign, inner = -1 if isinstance(node.op, ast.USub) else 1, node.operand
    value = inner.value if isinstance(inner, ast.Constant) else None
    if isinstance(inner, ast.Call) and _SCALAR.fullmatch(ast.unparse(inner.func)) and len(inner.args) == 1:
        value = _literal(inner.args[0], where)
    if isinstance(value, bool | str) and inner is node:
        return value
    if isinstance(value, int | float) and not isinstance(value, bool):
        return sign * value
    if _is_of_bits(inner):
        raise _refusal(where, node, "is not supported; use and, or, not")
    if isinstance(inner, ast.Constant) and inner.value is None:
        raise _refusal(where, node, "is not supported; use isna(column)")
    if isinstance(node, ast.Name):
        raise _refusal(where, node, f"is not text; put it in quotes: {where.name_of(node)!r}")
    raise _refusal(where, node, "is not supported; compare with text in quotes, a number, True or False")


def _is_of_bits(node: ast.expr) -> bool:
    """Return whether a node is a bitwise operator, which pandas users write for and, or, not."""
    return isinstance(node, ast.BinOp | ast.UnaryOp) and isinstance(node.op, ast.BitAnd | ast.BitOr | ast.Invert)


def _call_name(node: ast.Call) -> str:
    return node.func.id if isinstance(node.func, ast.Name) else ""


def _refusal(where: Where, node: ast.expr, what: str) -> PlanError:
    setting = where.setting
    return PlanError(
        f"{setting}={where.text!r:.200}: {_shown(node, where)!r:.100} {what}{_NAMES[setting]}. See "
        f"open_loader({'genes' if setting == 'genes' else 'where'}=...)."
    )


def _shown(node: ast.expr, where: Where) -> str:
    return _named(ast.unparse(node), where.names)


def _named(text: str, names: Mapping[str, str]) -> str:
    """Return a text with the names given in backticks in place of the words that stand for them."""
    for word, name in names.items():
        text = text.replace(word, f"`{name}`")
    return text


class _Compiler:
    """Compiles a checked tree and columns into a test of a slice of cells."""

    def __init__(self, where: Where, obs: Mapping[str, Column]) -> None:
        self._where = where
        self._obs = obs

    def test(self, node: ast.expr) -> Callable[[slice], NDArray[np.bool_]]:
        if isinstance(node, ast.BoolOp):
            parts = [self.test(value) for value in node.values]
            join = np.logical_and if isinstance(node.op, ast.And) else np.logical_or
            return lambda rows: join.reduce([part(rows) for part in parts])
        if isinstance(node, ast.UnaryOp):
            inner = self.test(node.operand)
            return lambda rows: ~inner(rows)
        if isinstance(node, ast.Call):
            column = self._column(node.args[0])[1]
            is_wanted = _call_name(node) == "isna"
            return lambda rows: _is_missing(column, rows) == is_wanted
        if isinstance(node, ast.Compare):
            steps = [self._step(*step, node) for step in _steps(node)]
            return lambda rows: np.logical_and.reduce([step(rows) for step in steps])
        return self._truth(node)

    def _column(self, node: ast.expr) -> tuple[str, Column]:
        assert isinstance(node, ast.Name)  # noqa: S101 - narrows the type; checked when parsed
        name = self._where.name_of(node)
        return name, self._obs[name]

    def _truth(self, node: ast.expr) -> Callable[[slice], NDArray[np.bool_]]:
        name, column = self._column(node)
        if not _kind(column) == "booleans":
            raise PlanError(
                f"{self._where.setting}={self._where.text!r:.200}: column {name!r} holds {_kind(column)}, so it is "
                "neither true nor false; compare it with a value."
            )
        return self._lookup(column, operator.eq, True)

    def _step(
        self, left: ast.expr, op: ast.cmpop, right: ast.expr, node: ast.expr
    ) -> Callable[[slice], NDArray[np.bool_]]:
        if isinstance(op, ast.In | ast.NotIn):
            assert isinstance(right, ast.List | ast.Tuple | ast.Set)  # noqa: S101 - checked when parsed
            name, column = self._column(left)
            values = [_literal(value, self._where) for value in right.elts]
            self._check_values(name, column, values, "==")
            is_in = isinstance(op, ast.In)
            return self._lookup(column, lambda found, wanted: _is_in(found, wanted) == is_in, frozenset(values))
        if isinstance(left, ast.Name) and isinstance(right, ast.Name):
            return self._two_columns(left, op, right, node)
        if isinstance(right, ast.Name):
            left, op, right = right, _MIRRORED.get(type(op), type(op))(), left
        sign, compare = _COMPARE[type(op)]
        name, column = self._column(left)
        value = _literal(right, self._where)
        self._check_values(name, column, [value], sign)
        if isinstance(value, str) and sign not in ("==", "!="):
            return self._by_order(column, compare, value)
        return self._lookup(column, lambda found, wanted: compare(*_beside(found, wanted)), value)

    def _two_columns(
        self, left: ast.expr, op: ast.cmpop, right: ast.expr, node: ast.expr
    ) -> Callable[[slice], NDArray[np.bool_]]:
        (_, one), (_, two) = self._column(left), self._column(right)
        if one.categories is not None or two.categories is not None:
            raise _refusal(self._where, node, "compares two columns that are not both numbers")
        compare = _COMPARE[type(op)][1]
        return lambda rows: np.asarray(compare(one.values[rows], two.values[rows]))

    def _check_values(self, name: str, column: Column, values: list[Any], sign: str) -> None:
        """Raise PlanError for values that a column cannot hold, or that no cell has."""
        found = _kind(column)
        where = f"{self._where.setting}={self._where.text!r:.200}: column {name!r} holds {found}"
        known = [] if column.categories is None or found != "text" else [str(c) for c in column.categories]
        is_known = frozenset(known)  # both values and categories may number in the thousands
        for value in values:
            kind = "text" if isinstance(value, str) else "a boolean" if isinstance(value, bool) else "a number"
            fits = {"text": "text", "a boolean": "booleans", "a number": "numbers"}[kind] == found
            if not fits and not (found == "booleans" and value in (0, 1) and kind == "a number"):
                raise PlanError(f"{where}, and {value!r} is {kind}; compare it with what it holds.")
            if kind != "text" and sign not in ("==", "!=") and not _ascend(column):
                raise PlanError(f"{where}, in an order of their own that is not ascending; use ==, != or in.")
            if kind != "text":
                continue
            if sign not in ("==", "!=") and not column.is_ordered:
                also = "" if self._where.setting == "keep" else f", or pass {_MASK[self._where.setting]}"
                raise PlanError(
                    f"{where}, which has no order (only categories that are ordered have one, if the files agree on "
                    f"it); use ==, != or in{also}."
                )
            if column.categories is not None and value not in is_known:
                near = nearest(value, known)
                guess = f"did you mean {near!r}?" if near else f"it has {listing(known, 20, 'no categories')}."
                raise PlanError(f"{where}, but not {value!r}; {guess}")

    @staticmethod
    def _by_order(
        column: Column, compare: Callable[[Any, Any], Any], value: str
    ) -> Callable[[slice], NDArray[np.bool_]]:
        """Compare ordered categories with one of them, by their places."""
        assert column.categories is not None  # noqa: S101 - narrows the type; only categories hold text
        place = [str(category) for category in column.categories].index(value)
        lookup = np.append(compare(np.arange(column.categories.size), place), False)
        values = column.values
        return lambda rows: lookup[values[rows]]

    @staticmethod
    def _lookup(column: Column, compare: Callable[[Any, Any], Any], value: Any) -> Callable[[slice], NDArray[np.bool_]]:
        """Compare numbers directly, and each category once."""
        values = column.values
        if column.categories is None:
            return lambda rows: np.asarray(compare(values[rows], value), dtype=bool)
        is_text = _kind(column) == "text"
        table = [bool(compare(str(c) if is_text else c, value)) for c in column.categories]
        lookup = np.array([*table, bool(compare(float("nan"), value))])
        return lambda rows: lookup[values[rows]]


def _is_in(found: Any, wanted: frozenset[Any]) -> Any:
    """Return whether values, or one category, are among `wanted`, as judged by ``==``."""
    if not isinstance(found, np.ndarray):
        return found in wanted
    if found.dtype.kind in "iu":  # compared as whole numbers: beside a fraction, NumPy would round large ones
        low, high = np.iinfo(found.dtype).min, np.iinfo(found.dtype).max
        whole = [int(value) for value in wanted if low <= value <= high and value == int(value)]
        return np.isin(found, np.array(whole, dtype=found.dtype))
    each = (operator.eq(*_beside(found, value)) for value in wanted)
    return np.logical_or.reduce([np.zeros(found.size, dtype=bool), *each])


def _beside(found: Any, value: Any) -> tuple[Any, Any]:
    """Return values, or one category, and what to compare them with: of floats that cannot hold it, some alike."""
    if isinstance(found, np.ndarray) and found.dtype.kind == "f":
        most = float(np.finfo(found.dtype).max)
        if most < abs(value) != math.inf:  # NumPy would make infinity of it, or fail
            return np.where(np.isfinite(found), 0, found), 1 if value > 0 else -1
    return found, value


def _is_missing(column: Column, rows: slice) -> NDArray[np.bool_]:
    values = column.values[rows]
    if column.categories is not None:
        return np.asarray(values < 0)
    return np.isnan(values) if values.dtype.kind == "f" else np.zeros(values.size, dtype=bool)


def _ascend(column: Column) -> bool:
    """Return whether numbers or booleans are ordered by size, as all are but some ordered categories."""
    return not column.is_ordered or column.categories is None or list(column.categories) == sorted(column.categories)


def _kind(column: Column) -> str:
    """Return what a column holds, in one word."""
    if column.categories is None:
        return "booleans" if column.values.dtype.kind == "b" else "numbers"
    kind = kind_of(column.categories)
    return "text" if kind == "categories" else kind
