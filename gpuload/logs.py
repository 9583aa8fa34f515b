"""The package's log level. The package prints nothing itself.

Warnings and errors reach stderr, as is Python's default; choices and their reasons (device, I/O path, saved indices)
are logged at level INFO, which is not shown unless asked for. So is a wait that is no fault, unless somebody watches.
"""

from __future__ import annotations

import logging
import sys

from gpuload.errors import PlanError

LEVELS = ("debug", "info", "warning", "error", "critical")


def set_log_level(level: str | int) -> None:
    """Set the lowest level at which gpuload logs messages; all go through the logger ``"gpuload"``.

    If neither it nor the root logger has a handler, it gets one that writes to stderr; an application that has set up
    logging keeps its own.

    Parameters
    ----------
    level
        ``"debug"``, ``"info"`` (which device and path were chosen), ``"warning"`` (Python's default), ``"error"`` or
        ``"critical"``; or a level of the logging module, at least 0.

    Raises
    ------
    PlanError
        `level` is none of these.
    """
    logger = logging.getLogger("gpuload")
    logger.setLevel(_number(level))
    if not logger.hasHandlers():
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("%(name)s %(levelname)s: %(message)s"))
        logger.addHandler(handler)


def is_watched() -> bool:
    """Return whether somebody sees stderr: at a terminal, or in a notebook, where it claims not to be a terminal."""
    ipython = sys.modules.get("IPython")
    return sys.stderr.isatty() or (ipython is not None and hasattr(ipython.get_ipython(), "kernel"))


def _number(level: object) -> int:
    if isinstance(level, str) and level.lower() in LEVELS:
        return int(getattr(logging, level.upper()))
    if isinstance(level, int) and not isinstance(level, bool) and level >= 0:
        return level
    raise PlanError(f"level={level!r}: expected one of {', '.join(map(repr, LEVELS))}.")
