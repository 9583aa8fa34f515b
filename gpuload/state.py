"""Contents of a loader's state, and the check that a state belongs to a loader.

A state is a dict of plain ints, strings, lists and dicts, so that JSON, torch.save and any checkpoint format keep it:

``"epoch"``, ``"step"``
    The epoch, and the minibatches of it that each rank's consumer received since the last change of `world_size`.
``"world_size"``, ``"history"``
    The number of ranks; and earlier ones, as pairs ``[world_size, steps]``, oldest first.
``"fingerprint"``
    Everything else that determines the order, and the matrices delivered besides X. Not included, so free to differ:
    `rank` and `world_size`, `prefetch`, threads, device, genes, `join`, transform, output, folders.

So the state of any one rank is valid for all ranks at that step.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from gpuload.checks import is_whole
from gpuload.errors import PlanError

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Mapping

    from gpuload.plan import Plan

VERSION = 1
"""Version of the state format; raised when the same state would mean a different order."""

_PLACE = ("epoch", "step", "world_size", "history")


def fingerprint(plan: Plan, files: list[dict[str, Any]], further: list[str]) -> dict[str, Any]:
    """Return what a state and a loader must have in common; `further` are the matrices besides X, in order."""
    return {
        "version": VERSION,
        "files": files,
        "batch_size": plan.batch_size,
        "fetch_factor": plan.fetch_factor,
        "seed": plan.seed,
        "drop_last": bool(plan.drop_last),
        "uneven": plan.uneven,
        "sampler": plan.strategy.describe(),
        **({"begins": "anywhere"} if plan.begins_anywhere else {}),  # omitted if the order is that of older states
        **({"further matrices": further} if further else {}),  # omitted if there are none, as in older states
    }


def make_state(plan: Plan, step: int, made_with: dict[str, Any]) -> dict[str, Any]:
    """Return the state after `step` minibatches of a plan; the caller owns it."""
    return {
        "epoch": plan.epoch,
        "step": step,
        "world_size": plan.world_size,
        "history": [list(pair) for pair in plan.history],
        "fingerprint": _copied(made_with),
    }


def check_state(state: Any, wanted: dict[str, Any]) -> tuple[int, int, int, tuple[tuple[int, int], ...]]:
    """Check a state, perhaps from JSON, by a loader's fingerprint; return its epoch, step, world_size and history.

    Raises
    ------
    PlanError
        It is not a state; or its data or settings differ, in which case each difference is named.
    """
    check_fingerprint(state, wanted, _PLACE)
    epoch, step, world_size, history = (state[name] for name in _PLACE)
    if not has_position(state):
        raise PlanError(
            f"state: epoch={epoch!r}, step={step!r}, world_size={world_size!r}, history={history!r} is not a position "
            "in an epoch; take it from a loader's state_dict()."
        )
    return int(epoch), int(step), int(world_size), tuple((int(n_ranks), int(steps)) for n_ranks, steps in history)


def has_position(state: Any) -> bool:
    """Return whether a state has the numbers that it should, of the right kind."""
    if not isinstance(state, dict):
        return False
    epoch, step, world_size, history = (state.get(name) for name in _PLACE)
    is_list = isinstance(history, (list, tuple)) and all(
        isinstance(pair, (list, tuple)) and len(pair) == 2 and is_whole(pair[0], 1) and is_whole(pair[1], 0)
        for pair in history
    )
    return is_whole(epoch, 0) and is_whole(step, 0) and is_whole(world_size, 1) and is_list


def check_fingerprint(state: Any, wanted: dict[str, Any], place: Collection[str]) -> None:
    """Check that a state, which has the entries `place` too, is complete and belongs to a loader with this fingerprint.

    Raise PlanError as `check_state` does.
    """
    if not isinstance(state, dict) or not set(place) <= state.keys() or not isinstance(state.get("fingerprint"), dict):
        found = f"a dict with {sorted(map(str, state))}" if isinstance(state, dict) else type(state).__name__
        raise PlanError(f"state: expected what a loader's state_dict() returns, got {found}.")
    differing = list(_differences(state["fingerprint"], wanted))
    if differing:
        raise PlanError(
            f"state: it is of other data or settings than this loader: {'; '.join(differing)}. Open the loader like "
            "the one that the state was taken from."
        )


def _copied(value: Any) -> Any:
    """Return a deep copy of plain values."""
    if isinstance(value, dict):
        return {name: _copied(part) for name, part in value.items()}
    return [_copied(part) for part in value] if isinstance(value, (list, tuple)) else value


def _differences(found: Mapping[str, Any], wanted: Mapping[str, Any]) -> Iterator[str]:
    """Yield a description of each difference."""
    if found.get("version") != wanted["version"]:
        yield f"version {found.get('version')!r} of states, here {wanted['version']!r}"
        return  # in another version, the other fields may have another meaning
    for name in dict.fromkeys((*wanted, *found)):
        if name == "files":
            yield from _file_differences(found.get("files"), wanted.get("files", []))
        elif _copied(found.get(name)) != _copied(wanted.get(name)):
            yield from _value_differences(name, found.get(name), wanted.get(name))


def _file_differences(found: Any, wanted: list[dict[str, Any]]) -> Iterator[str]:
    if not isinstance(found, (list, tuple)) or len(found) != len(wanted):
        n_found = len(found) if isinstance(found, (list, tuple)) else 0
        yield f"{n_found} files in the state, {len(wanted)} here"
        return
    for number, (theirs, ours) in enumerate(zip(found, wanted, strict=True)):
        if theirs != ours:
            yield f"file {number} is {_named(theirs)} in the state, {_named(ours)} here"


def _named(file: Any) -> str:
    if not isinstance(file, dict):
        return repr(file)
    return ", ".join(f"{value!r}" if name == "name" else f"{name}={value!r}" for name, value in file.items())


def _value_differences(name: str, found: Any, wanted: Any) -> Iterator[str]:
    """Yield how a setting differs; for samplers of the same name, how each of their settings differs."""
    if isinstance(found, dict) and isinstance(wanted, dict) and found.get("name") == wanted.get("name"):
        for part in dict.fromkeys((*wanted, *found)):
            if _copied(found.get(part)) != _copied(wanted.get(part)):
                yield from _value_differences(f"{name} {part}", found.get(part), wanted.get(part))
    else:
        found, wanted = (v["name"] if isinstance(v, dict) and "name" in v else v for v in (found, wanted))
        yield f"{name}={found!r} in the state, {wanted!r} here"
