"""Sizes that users give: a number of bytes, or text with a unit."""

from __future__ import annotations

import re

import numpy as np

from gpuload.errors import PlanError

_UNITS = {"": 1} | {f"{c}{i}": base**k for k, c in enumerate("KMGT", 1) for i, base in (("", 1000), ("i", 1024))}
_UNITS["k"] = 1000


def parse_nbytes(name: str, value: object, *, least: int = 1) -> int:
    """Return the bytes that are meant by a number of them, or by text such as ``"20GiB"``, ``"1.5 TB"`` or ``"64M"``.

    Parameters
    ----------
    name
        Of the argument, for the error.
    value
        As given.
    least
        Fewer are an error.

    Raises
    ------
    PlanError
        It is neither, or too small.
    """
    nbytes = -1
    if isinstance(value, (int, np.integer)):
        nbytes = -1 if isinstance(value, bool) else int(value)
    elif isinstance(value, (float, np.floating)):
        nbytes = int(value) if value.is_integer() else -1
    elif isinstance(value, str) and (found := re.fullmatch(r"(\d+(?:\.\d+)?) ?([KMGT]i?|k)?B?", value.strip())):
        nbytes = int(float(found[1]) * _UNITS[found[2] or ""])
    if nbytes < least:
        above = " above 0" if least == 1 else f" of at least {least}" if least else ""
        raise PlanError(f"{name}={value!r}: expected a number of bytes{above}, or text such as '20GiB'.")
    return nbytes
