"""Terminal input and output of the commands: facts, sizes, progress bars, shared options. The only user of tqdm."""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from gpuload.diversity.model import MIN_ENTROPY
from gpuload.errors import PlanError, ReadError
from gpuload.logs import is_watched
from gpuload.plan import chunks_per_block
from gpuload.program import fraction, whole_number
from gpuload.source import check_regular

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from typing import Self

PICTURES = ("png", "svg", "pdf")
"""Image formats."""

UNITS = ("B", "kB", "MB", "GB", "TB")


def print_json(value: Any) -> None:
    """Print a result as JSON; values that JSON lacks (NaN, infinity) become null."""
    print(json.dumps(plain(value), indent=2))


def plain(value: Any) -> Any:
    """Return nested values converted to JSON types."""
    if isinstance(value, dict):
        return {str(k): plain(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(v) for v in value]
    if isinstance(value, np.ndarray):
        return plain(value.tolist())
    if isinstance(value, np.generic):
        return plain(value.item())
    if isinstance(value, float) and not np.isfinite(value):
        return None
    return value


def facts(pairs: Iterable[tuple[str, str]]) -> str:
    """Return names and values in two columns."""
    listed = list(pairs)
    width = max(len(name) for name, _ in listed)
    return "\n".join(f"  {name.ljust(width)}  {value}".rstrip() for name, value in listed)


def size(nbytes: float) -> str:
    """Format a number of bytes: ``"1.6 MB"``."""
    power = 0
    while nbytes >= 999.5 and power < len(UNITS) - 1:
        nbytes /= 1000
        power += 1
    return f"{nbytes:.0f} {UNITS[power]}" if power == 0 or nbytes >= 99.5 else f"{nbytes:.1f} {UNITS[power]}"


def number(value: float) -> str:
    """Format a count or rate: ``"18,800"``, ``"24.1"``."""
    return f"{value:,.0f}" if abs(value) >= 100 or float(value).is_integer() else f"{value:,.3g}"


def share(part: float) -> str:
    """Format a fraction as a percentage."""
    return f"{100 * part:.0f} %" if part >= 0.0995 else f"{100 * part:.1f} %"


def bits(value: float) -> str:
    """Format an entropy."""
    return f"{value:.3f}" if np.isfinite(value) else "-"


def count(n: int, noun: str, plural: str | None = None) -> str:
    """Format a number with its noun: ``"3 files"``."""
    return f"{n:,} {noun}" if n == 1 else f"{n:,} {plural or noun + 's'}"


class Progress:
    """A progress bar on stderr, in a terminal or notebook; silent in a pipe or a file, or if `is_quiet`."""

    def __init__(self, total: float, label: str, *, is_quiet: bool, unit: str = "cell") -> None:
        from tqdm import tqdm

        self._bar = tqdm(
            total=total,
            desc=label,
            unit=unit,
            unit_scale=unit != "s",
            disable=is_quiet or not is_watched(),
            leave=False,
            bar_format="{desc}: {percentage:3.0f} % |{bar}| {elapsed} (left {remaining}){postfix}",
        )

    def reach(self, n: float) -> None:
        """Set the count."""
        self._bar.update(min(n, self._bar.total) - self._bar.n)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._bar.close()


def say(message: str, *, is_quiet: bool) -> None:
    """Report progress on stderr, unless quiet."""
    if not is_quiet:
        print(message, file=sys.stderr, flush=True)


def check_outputs(sources: Sequence[str], *paths: str | None) -> None:
    """Check, before the work, that output files can be written and are not data; None is a file not requested.

    Raises
    ------
    ReadError
        The folder of one does not exist, or it is no regular file, or this user may not write there.
    PlanError
        One is a file to read, or an existing file that has the name of one.
    """
    from gpuload.formats.recognise import ENDINGS

    for path in paths:
        if path is None:
            continue
        if not (folder := Path(path).parent).is_dir():
            raise ReadError(f"{path}: there is no folder {folder}; create it first, or choose another place.")
        if os.path.isdir(path):
            raise ReadError(f"{path}: this is a folder; name a file to write.")
        check_regular(path)
        beside = os.path.dirname(os.path.realpath(path))  # a file there replaces it
        if not os.access(beside, os.W_OK):
            raise ReadError(f"{path}: cannot be written: this user may not write there. Choose another place.")
        is_data = path.endswith(ENDINGS) or os.path.realpath(path) in map(os.path.realpath, sources)
        if is_data and os.path.exists(path):
            raise PlanError(f"{path}: this file holds data and would be lost; name another file to write.")


def print_saved(*paths: str | Path | None) -> None:
    """Report which files were written; None is a file that was not requested."""
    written = [str(path) for path in paths if path is not None]
    if written:
        print(f"\nsaved: {', '.join(written)}")


def say_of_compiling(*, is_quiet: bool) -> None:
    """Report on stderr, if somebody sees it, that kernels are about to be compiled, unless they are cached."""
    from gpuload.backends import native

    native.announcement.is_due = False
    if is_watched() and not os.listdir(native.cache_folder()):
        say("compiling kernels, once on this machine", is_quiet=is_quiet)


def add_output_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options that every command has."""
    group = parser.add_argument_group("output")
    group.add_argument("--json", action="store_true", help="print the result as JSON")
    group.add_argument("--quiet", action="store_true", help="show no progress on stderr")


def add_path_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the files to read, and the options for their matrix and label."""
    parser.add_argument(
        "paths",
        type=path,
        nargs="+",
        metavar="PATH",
        help="an .h5ad file or other supported input; several are read as one table",
    )
    parser.add_argument("--layer", default="X", help="matrix to read: X, raw.X or a layer's name (default: X)")
    parser.add_argument("--label", metavar="COL", help="obs column to assess minibatch mixing by, such as plate")


def add_min_entropy_argument(parser: argparse.ArgumentParser | argparse._ArgumentGroup) -> None:
    """Add the option for the least entropy of the label; see `min_entropy`."""
    parser.add_argument(
        "--min-entropy",
        type=fraction,
        metavar="X",
        help="minimum label entropy of minibatches, relative to true random order; requires --label (default: "
        f"{MIN_ENTROPY:g})",
    )


def min_entropy(args: argparse.Namespace) -> float:
    """Return what the option says, or the default; refuse it without a label."""
    if args.min_entropy is None:
        return MIN_ENTROPY
    if not args.label:
        raise PlanError(f"--min-entropy {args.min_entropy:g} is of a label: give --label too.")
    return float(args.min_entropy)


def picture(text: str) -> str:
    """Parse the path of a picture, whose suffix must be a supported image format."""
    if form_of(text) not in PICTURES:
        raise argparse.ArgumentTypeError(f"{text!r}: expected a name that ends in .{', .'.join(PICTURES)}")
    return text


def form_of(picture: str) -> str:
    """Return the image format that the name of a picture says."""
    return Path(picture).suffix[1:].lower()


def path(text: str) -> str:
    """Parse an argument that must name a file."""
    if not text:
        raise argparse.ArgumentTypeError("'' is not a file name; give a path")
    return text


def block_size(text: str) -> int | str:
    """Parse a block size: a whole number of at least 1, "chunk" or "N chunks"."""
    if chunks_per_block(text) is not None:
        return text
    try:
        return whole_number(text)
    except argparse.ArgumentTypeError as error:
        raise argparse.ArgumentTypeError(f"{error}, 'chunk' or 'N chunks'") from None
