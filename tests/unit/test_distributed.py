"""Rank and world size: from arguments, torch.distributed or torchrun's environment, else of a single process."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import gpuload
from gpuload.distributed import rank_and_world_size


@pytest.fixture(autouse=True)
def bare(monkeypatch: pytest.MonkeyPatch) -> None:
    """No environment and no torch, whatever this machine has."""
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    monkeypatch.delitem(sys.modules, "torch.distributed", raising=False)


def torch_distributed(*, is_available: bool = True, is_initialized: bool = True) -> Any:
    return SimpleNamespace(
        is_available=lambda: is_available,
        is_initialized=lambda: is_initialized,
        get_rank=lambda: 2,
        get_world_size=lambda: 5,
    )


def test_a_single_process_is_rank_0_of_1() -> None:
    assert rank_and_world_size() == (0, 1)
    assert "torch.distributed" not in sys.modules


def test_explicit_arguments_come_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch.distributed", torch_distributed())
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "3")
    assert rank_and_world_size(6, 7) == (6, 7)
    found = rank_and_world_size(np.int64(0), np.int32(1))
    assert found == (0, 1)
    assert [type(n) for n in found] == [int, int]


def test_torch_distributed_comes_before_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "3")
    monkeypatch.setitem(sys.modules, "torch.distributed", torch_distributed())
    assert rank_and_world_size() == (2, 5)
    for missing in ("is_initialized", "is_available"):
        monkeypatch.setitem(sys.modules, "torch.distributed", torch_distributed(**{missing: False}))
        assert rank_and_world_size() == (1, 3)


@pytest.mark.parametrize(
    ("rank", "world_size"), [(2, 2), (-1, 2), (0, 0), (0, -1), (0.0, 1), (True, 2), (0, True), ("0", "1")]
)
def test_impossible_ranks_are_refused(rank: Any, world_size: Any) -> None:
    with pytest.raises(gpuload.PlanError, match=f"^rank={rank!r}, world_size={world_size!r}: .*0 <= rank < world_size"):
        rank_and_world_size(rank, world_size)


@pytest.mark.parametrize(("given", "missing"), [("rank", "world_size"), ("world_size", "rank")])
def test_one_without_the_other_is_refused(given: str, missing: str) -> None:
    with pytest.raises(gpuload.PlanError, match=f"^{given}=1 without {missing}; pass both"):
        rank_and_world_size(**{given: 1})


@pytest.mark.parametrize(
    ("environment", "message"),
    [
        ({"RANK": "1"}, "RANK='1' is set but WORLD_SIZE is not"),
        ({"WORLD_SIZE": "1"}, "WORLD_SIZE='1' is set but RANK is not; .* or, with Lightning, use .*CellDataModule"),
        ({"RANK": "2", "WORLD_SIZE": "2"}, "RANK=2, WORLD_SIZE=2: expected"),
        ({"RANK": "one", "WORLD_SIZE": "2"}, "RANK='one', WORLD_SIZE=2: expected"),
        ({"RANK": "-1", "WORLD_SIZE": "2"}, "RANK='-1', WORLD_SIZE=2: expected"),
        ({"RANK": "", "WORLD_SIZE": "2"}, "RANK='', WORLD_SIZE=2: expected"),
    ],
)
def test_an_impossible_environment_is_refused(
    environment: dict[str, str], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(gpuload.PlanError, match=f"^environment: {message}"):
        rank_and_world_size()


def test_invalid_settings_are_refused_before_opening_files() -> None:
    with pytest.raises(gpuload.PlanError, match="rank=3"):
        gpuload.open_loader("no such file.h5ad", rank=3, world_size=3)
    with pytest.raises(gpuload.PlanError, match=r"uneven='keep'.*'drop', 'pad'"):
        gpuload.open_loader("no such file.h5ad", uneven="keep")
