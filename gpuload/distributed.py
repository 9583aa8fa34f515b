"""Rank and world size of this training process.

Imports no package: torch.distributed is queried only if the program itself has initialised it.
"""

from __future__ import annotations

import os
import sys
from typing import Any

from gpuload.checks import is_whole
from gpuload.errors import PlanError


def rank_and_world_size(rank: int | None = None, world_size: int | None = None) -> tuple[int, int]:
    """Return this process's rank and the number of processes.

    Parameters
    ----------
    rank, world_size
        Both, or neither. If neither: those of torch.distributed's default group if it is initialised; else the
        environment variables ``RANK`` and ``WORLD_SIZE``, as set by torchrun; else 0 and 1.

    Raises
    ------
    PlanError
        Only one is given or set; or they are not whole numbers with ``0 <= rank < world_size``.
    """
    if (rank is None) != (world_size is None):
        given, missing = ("rank", "world_size") if world_size is None else ("world_size", "rank")
        raise PlanError(
            f"{given}={world_size if rank is None else rank!r} without {missing}; pass both, or neither to take them "
            "from torch.distributed or torchrun."
        )
    if rank is not None and world_size is not None:
        return _check(rank, world_size, "rank={!r}, world_size={!r}")
    group = _group()
    return _of_environment() if group is None else (int(group.get_rank()), int(group.get_world_size()))


def is_started_by_lightning() -> bool:
    """Return whether Lightning started this process but has not set its rank yet: it does once all processes meet."""
    return {"LOCAL_RANK", "WORLD_SIZE"} <= os.environ.keys() and "RANK" not in os.environ and _group() is None


def _group() -> Any:
    """Return torch.distributed if the program has initialised it, else None."""
    torch_distributed: Any = sys.modules.get("torch.distributed")
    is_initialised = torch_distributed and torch_distributed.is_available() and torch_distributed.is_initialized()
    return torch_distributed if is_initialised else None


def _of_environment() -> tuple[int, int]:
    found = {name: os.environ[name] for name in ("RANK", "WORLD_SIZE") if name in os.environ}
    if not found:
        return 0, 1
    if len(found) == 1:
        ((name, value),) = found.items()
        missing = "RANK" if name == "WORLD_SIZE" else "WORLD_SIZE"
        raise PlanError(
            f"environment: {name}={value!r} is set but {missing} is not; set both, as torchrun does, pass rank and "
            "world_size, or, with Lightning, use gpuload.lightning.CellDataModule."
        )
    numbers = {name: int(value) if value.strip().isdecimal() else value for name, value in found.items()}
    return _check(numbers["RANK"], numbers["WORLD_SIZE"], "environment: RANK={!r}, WORLD_SIZE={!r}")


def _check(rank: object, world_size: object, where: str) -> tuple[int, int]:
    if not (is_whole(rank, 0) and is_whole(world_size, rank + 1)):
        raise PlanError(f"{where.format(rank, world_size)}: expected whole numbers with 0 <= rank < world_size.")
    return int(rank), int(world_size)
