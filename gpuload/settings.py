"""Settings files: what `gpuload tune` writes and ``open_loader(settings=...)`` takes.

A settings file is JSON: ``"settings"`` holds keyword arguments of `gpuload.open_loader`, and ``"measured"`` records,
for human readers, what they were measured on. The caller's arguments always override the file, even if they equal the
default. Unknown names are rejected: a misspelled setting must not be silently ignored.
"""

from __future__ import annotations

import functools
import inspect
import json
import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

from gpuload.errors import PlanError, nearest, shown, unopened
from gpuload.sampling import block_size_of
from gpuload.source import saving

if TYPE_CHECKING:
    from collections.abc import Callable

P = ParamSpec("P")
R = TypeVar("R")

NOT_SAVED = ("paths", "settings", "sampler", "obs_table", "transform", "rank", "world_size", "cache", "storage_options")
"""Arguments that a settings file cannot hold: JSON cannot represent them, or they are specific to a process."""

_PARTS = {"settings", "measured"}

_NO_WORKERS = "there are no worker processes, so leave it out"
_INSTEAD = {
    "num_workers": "threads read, so leave it out, or use num_threads",
    "prefetch_factor": "use prefetch, which counts fetches of fetch_factor minibatches",
    "persistent_workers": _NO_WORKERS,
    "worker_init_fn": _NO_WORKERS,
    "multiprocessing_context": _NO_WORKERS,
    "pin_memory": "with device='cuda' minibatches are made on the GPU, so leave it out",
    "collate_fn": "change its minibatches in gpuload.Mapped(loader, function)",
    "batch_sampler": "use sampler",
    "generator": "use seed",
}
"""What to do instead of passing an argument of PyTorch's DataLoader."""

_OF_OTHERS = {
    "adata": "paths",
    "downsample": "transform",
    "filename": "paths",
    "files": "paths",
    "label": "obs",
    "label_key": "obs",
    "labels": "obs",
    "layers_keys": "layer",
    "log1p": "transform",
    "normalise": "transform",
    "normalize": "transform",
    "obs_filter": "where",
    "obs_keys": "obs",
    "target_sum": "transform",
}
"""Names that other loaders have for our arguments, and that are not spelled like them."""


def takes_settings(function: Callable[P, R]) -> Callable[P, R]:
    """Wrap a function so that its argument `settings` supplies keyword arguments that are not given.

    The function itself sees only its own arguments; `settings` is passed on as given.
    """

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        return function(*args, **fill_in(function, kwargs))

    return call


def fill_in(function: Callable[..., Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """Return keyword arguments, completed from `settings` if that is among them; raises as `read_settings`.

    Raises PlanError for an argument of PyTorch's DataLoader that the function lacks, and Python's own TypeError for one
    whose name is misspelt, with the name that was probably meant.
    """
    own = tuple(inspect.signature(function).parameters)
    for name, value in given.items():
        if name in own:
            continue
        if name in _INSTEAD:
            raise PlanError(
                f"{name}={shown(value)}: {function.__name__} has no such argument of PyTorch's DataLoader; "
                f"{_INSTEAD[name]}."
            )
        meant = _OF_OTHERS.get(name)
        if near := meant if meant in own else nearest(name, own):
            said = f"{function.__name__}() got an unexpected keyword argument {name!r}"
            raise TypeError(f"{said}; did you mean {near!r}?")
    saved = read_settings(given.get("settings"), known_settings(function))
    sampler = given.get("sampler")
    if sampler is not None:  # a given sampler counts as giving the order, and perhaps the block size
        saved.pop("shuffle", None)
    if block_size_of(sampler) is not None:
        saved.pop("block_size", None)
    return {**saved, **given}


def known_settings(function: Callable[..., Any]) -> tuple[str, ...]:
    """Return the arguments of a function that a settings file can hold."""
    return tuple(name for name in inspect.signature(function).parameters if name not in NOT_SAVED)


def read_settings(
    settings: str | os.PathLike[str] | Mapping[str, Any] | None, known: tuple[str, ...]
) -> dict[str, Any]:
    """Return keyword arguments from a settings file or an equivalent mapping; none if `settings` is None.

    Parameters
    ----------
    settings
        A path; or the contents of a settings file; or the keyword arguments alone.

    Raises
    ------
    ReadError
        The file cannot be read.
    PlanError
        It is not a settings file, or names an unknown setting.
    """
    if settings is None:
        return {}
    if isinstance(settings, Mapping):
        where, content = "settings", dict(settings)
    elif isinstance(settings, (str, os.PathLike)):
        where, content = os.fspath(settings), _load(settings)
    else:
        raise PlanError(f"settings={shown(settings)}: expected the path of a settings file, a dict or None.")
    if "settings" in content:
        if odd := sorted(set(content) - _PARTS):
            raise PlanError(f"{where}: next to 'settings' there is {odd[0]!r}; expected 'measured' or nothing.")
        content = content["settings"]
    if not isinstance(content, Mapping):
        raise PlanError(f"{where}: 'settings' is {content!r}; expected names with values.")
    for name in content:
        if name not in known:
            raise PlanError(
                f"{where}: {name!r} is not a setting that a file can hold; known settings are {', '.join(known)}."
            )
    return dict(content)


def write_settings(path: str | os.PathLike[str], settings: Mapping[str, Any], measured: Mapping[str, Any]) -> None:
    """Write a settings file, replacing an existing one; raise ReadError if it cannot be written."""
    text = json.dumps({"settings": dict(settings), "measured": dict(measured)}, indent=2)
    with saving(path) as file:
        file.write(f"{text}\n".encode())


def _load(path: str | os.PathLike[str]) -> dict[str, Any]:
    try:
        with open(path, encoding="utf-8") as file:
            content = json.load(file)
    except OSError as error:
        raise unopened(os.fspath(path), error) from error
    except ValueError as error:  # not UTF-8, or not JSON
        raise PlanError(
            f"{os.fspath(path)}: it is not a settings file: {error}. Write one with gpuload tune."
        ) from error
    if not isinstance(content, dict):
        raise PlanError(f"{os.fspath(path)}: it holds a {type(content).__name__}; expected names with values.")
    return content
