"""What programs that use gpuload have in common: the parsing of options, files of names, tables, exit codes.

For the command line, and for the example programs.
"""

from __future__ import annotations

import argparse
import math
import os
import sys
from functools import partial
from typing import TYPE_CHECKING

from gpuload.errors import GpuloadError, PlanError, ReadError, unopened
from gpuload.where import parse as parse_where

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

DONE, FAILED, WRONG_USE, INTERRUPTED = 0, 1, 2, 130
"""Exit codes of a program: its work is done; a problem with the data or the machine; wrong use; Ctrl-C."""


def code_of(error: BaseException) -> int:
    """Return the exit code of a program that an error stopped."""
    if isinstance(error, KeyboardInterrupt):
        return INTERRUPTED
    return WRONG_USE if isinstance(error, PlanError) else FAILED


def exit_code(
    program: str,
    work: Callable[[], object],
    *,
    interrupted: str = "interrupted",
    sentence_of: Callable[[Exception], str | None] = lambda _: None,
) -> int:
    """Do a program's work and return its exit code; what stops it is reported on stderr.

    ``sentence_of`` gives the sentence for another library's error, or None to raise it.
    """
    try:
        work()
    except KeyboardInterrupt as error:
        code, said = code_of(error), interrupted
    except Exception as error:
        found = str(error) if isinstance(error, (GpuloadError, OSError)) else sentence_of(error)
        if found is None:
            raise
        code, said = code_of(error), found
    else:
        return DONE
    print(f"{program}: {said}", file=sys.stderr)
    return code


def check_one_process(cure: str) -> None:
    """Raise PlanError if a launcher, such as torchrun, started several processes of a single-process program."""
    n_processes = os.environ.get("WORLD_SIZE", "1")
    if n_processes != "1":
        raise PlanError(f"WORLD_SIZE={n_processes}: this program is for one process; {cure}.")


def read_names(path: str) -> list[str]:
    """Return the nonempty lines of a text file; raise ReadError if it cannot be read."""
    try:
        with open(path, encoding="utf-8") as file:
            return [line.strip() for line in file if line.strip()]
    except OSError as error:
        raise unopened(path, error) from error
    except UnicodeDecodeError as error:
        raise ReadError(f"{path}: not a text file in UTF-8; expected one gene name per line.") from error


GENES = "the genes named in a text file, one per line, or for which a condition on var holds, such as highly_variable"
"""What `read_genes` takes, for ``--help``."""


def read_genes(given: str) -> list[str] | str:
    """Return genes as `gpuload.open_loader` takes them: the names in a text file of that name, or else a condition.

    Raises
    ------
    ReadError
        The file cannot be read, or it is neither a file nor a condition.
    """
    try:
        return read_names(given)
    except ReadError as error:
        if os.path.exists(given):
            raise
        try:
            return parse_where(given, "genes").text
        except PlanError:
            raise ReadError(
                f"--genes {given}: expected a text file of genes, or a condition on columns of var; {error}"
            ) from error


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return rows under a header in columns; the first is left-aligned, the others right-aligned."""
    lines = [list(header), *map(list, rows)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    lines.insert(1, ["-" * width for width in widths])

    def aligned(first: str, *others: str) -> str:
        right = (text.rjust(width) for text, width in zip(others, widths[1:], strict=True))
        return "  ".join(["", first.ljust(widths[0]), *right]).rstrip()

    return "\n".join(aligned(*line) for line in lines)


def whole_number(text: str, least: int = 1) -> int:
    """Parse an option that must be a whole number of at least `least`."""
    if not text.isdecimal() or int(text) < least:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least {least}")
    return int(text)


def _number(text: str, is_valid: Callable[[float], bool], what: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not is_valid(value):
        raise argparse.ArgumentTypeError(f"{text!r} is not {what}")
    return value


whole_number_or_0 = partial(whole_number, least=0)
positive = partial(_number, is_valid=lambda value: 0 < value < math.inf, what="a number above 0")
positive_or_0 = partial(_number, is_valid=lambda value: 0 <= value < math.inf, what="a number of at least 0")
fraction = partial(_number, is_valid=lambda value: 0 <= value <= 1, what="a number from 0 to 1")
"""Parsers of options, as argparse takes them."""
