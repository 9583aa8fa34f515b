"""Validation of numbers, sizes, names and choices given by users, the same throughout the package."""

from __future__ import annotations

import re
import sys
from typing import TYPE_CHECKING, Any, TypeGuard

import numpy as np

from gpuload.errors import PlanError, first_line, shown

if TYPE_CHECKING:
    from collections.abc import Callable, Collection

    from numpy.typing import NDArray

    from gpuload.loader import Loader

_UNITS = {"": 1} | {f"{c}{i}": base**k for k, c in enumerate("KMGT", 1) for i, base in (("", 1000), ("i", 1024))}
_UNITS["k"] = 1000


def is_whole(value: object, least: int) -> TypeGuard[int]:
    """Return whether a value is a Python or NumPy integer, not a boolean, of at least `least`."""
    return isinstance(value, (int, np.integer)) and not isinstance(value, bool) and bool(value >= least)


def check_whole(name: str, value: object, least: int, also: str = "", *, most: int | None = None) -> int:
    """Return a whole number from `least` to `most`; else raise PlanError, naming `also` as further valid values."""
    if not is_whole(value, least) or (most is not None and value > most):
        bound = f"of at least {least}" if most is None else f"from {least} to {most}"
        raise PlanError(f"{name}={shown(value)}: expected a whole number {bound}{also}.")
    return int(value)


def check_int64(name: str, value: object, least: int) -> int:
    """Return a whole number of at least `least` that fits a database's signed 64 bits; otherwise raise PlanError."""
    whole = check_whole(name, value, least)
    if whole >= 1 << 63:
        raise PlanError(f"{name}={shown(value)}: expected a whole number below 2**63.")
    return whole


def check_seed(seed: object) -> int:
    """Return a seed; raise PlanError if it is invalid."""
    if not is_whole(seed, 0) or seed >= 1 << 64:
        raise PlanError(f"seed={shown(seed)}: expected a whole number from 0 to 2**64 - 1.")
    return int(seed)


def is_number(value: object) -> TypeGuard[float]:
    """Return whether a value is a Python or NumPy real number; booleans are not."""
    return isinstance(value, (int, float, np.integer, np.floating)) and not isinstance(value, bool)


def check_seconds(name: str, value: Any, *, may_be_0: bool = True) -> float:
    """Return a number of seconds; raise PlanError if it is not a number, is NaN, or is too small."""
    if not is_number(value) or not (value > 0 or (may_be_0 and value == 0)):
        bound = "of at least 0" if may_be_0 else "above 0"
        raise PlanError(f"{name}={shown(value)}: expected a number of seconds {bound}.")
    return float(value)


def check_share(name: str, value: Any) -> float:
    """Return a share from 0 to 1; raise PlanError for anything else."""
    if not is_number(value) or not 0 <= value <= 1:
        raise PlanError(f"{name}={shown(value)}: expected a share from 0 to 1.")
    return float(value)


def check_choice(name: str, value: object, choices: Collection[str]) -> None:
    """Raise PlanError if a value is not among the choices."""
    if not (isinstance(value, str) and value in choices):  # an array may be neither
        raise PlanError(f"{name}={shown(value)}: expected one of {', '.join(map(repr, choices))}.")


def check_loader(front: str, given: object) -> None:
    """Raise PlanError if a front was given something other than a loader, such as a path."""
    if not hasattr(given, "obs_dtypes"):
        raise PlanError(
            f"{front}: expected a loader, and found {shown(given)}; open one with gpuload.open_loader(paths) and pass "
            "that."
        )


def check_outputs(loader: Loader, what: str) -> None:
    """Raise PlanError if a column of obs has the name of a matrix, or of the rows; `what` a front calls an output."""
    taken = [name for name in loader.obs_dtypes if name in ("rows", *loader.tables)]
    if taken:
        raise PlanError(f"obs column {taken[0]!r} has the name of another {what}; rename it in the file.")


def check_names(
    name: str, given: Any, *, least: int = 0, what: str = "a name", sampler: str = "", also: str = "", twice: str = ""
) -> tuple[str, ...]:
    """Return one or several names as a tuple; raise PlanError for anything else, too few, or duplicates.

    Parameters
    ----------
    given
        The value given: one string, or several in an order that is the same in every process, so not a set. None is
        none, if there may be none.
    also, twice
        What else may be passed, and what instead of a name twice, as the end of a sentence.
    """
    if given is None and not least:
        return ()
    said = f"{sampler}({name}={shown(given)})" if sampler else f"{name}={shown(given)}"
    check_order(said, given, f"{what}, or a list of names{also}")
    are_several = hasattr(given, "__iter__") and hasattr(given, "__len__")
    names = (given,) if isinstance(given, str) else tuple(given) if are_several else None
    if names is None or not all(isinstance(n, str) and n for n in names):
        raise PlanError(f"{said}: expected {what}, or a list of names{also}.")
    if len(names) < least:
        raise PlanError(f"{said}: expected at least one name.")
    if len(set(names)) < len(names):
        repeated = next(n for place, n in enumerate(names) if n in names[:place])
        raise PlanError(f"{said}: {str(repeated)!r} is given twice; pass every name once{also}{twice}.")
    return names


def check_bool(name: str, value: object, of: str = "") -> None:
    """Raise PlanError for anything but True or False, such as "no"; `of` is the class whose argument it is."""
    if not isinstance(value, (bool, np.bool_)):
        said = f"{name}={shown(value)}"
        raise PlanError(f"{f'{of}({said})' if of else said}: expected True or False.")


def check_order(said: str, given: object, what: str) -> None:
    """Raise PlanError for a set, whose order differs between processes; `said` and `what` go into the message."""
    if isinstance(given, (set, frozenset)):
        raise PlanError(f"{said}: a set has no order; pass {what}.")


def check_index(
    name: str, given: Any, names: Callable[[], NDArray[np.object_]] | None, what: str, all_names: str
) -> None:
    """Raise PlanError for values, taken by position, that are partly masked or whose index has another order.

    Parameters
    ----------
    given
        The values given, of the right length: a NumPy masked array, or a pandas Series or DataFrame; anything else
        passes.
    names
        Returns the names, (n,) object, that an index other than 0, 1, 2, ... must equal; called only for such an index.
        None: they cannot be known, and any index of names passes.
    """
    check_unmasked(name, given)
    pandas = sys.modules.get("pandas")
    if pandas is None or not isinstance(given, (pandas.Series, pandas.DataFrame)):
        return
    if given.index.equals(pandas.RangeIndex(len(given))):
        return
    is_numbered = pandas.api.types.is_integer_dtype(given.index.dtype)
    if names is None and not is_numbered:
        return
    wanted = np.arange(len(given)) if is_numbered or names is None else names()
    found = np.asarray(given.index)
    differing = np.flatnonzero(found != wanted)
    if differing.size:
        at = int(differing[0])
        cure = ".sort_index()" if is_numbered else f".reindex({all_names})"
        raise PlanError(
            f"{name}: it was given a {type(given).__name__} of pandas whose value {at} is of {found.tolist()[at]!r}, "
            f"but {what} {at} is {wanted.tolist()[at]!r}; put it in order with {cure}, or, if only its index is "
            "wrong, pass its .to_numpy()."
        )


def check_unmasked(name: str, given: Any) -> None:
    """Raise PlanError for a NumPy masked array with masked values."""
    if isinstance(given, np.ma.MaskedArray) and np.any(np.ma.getmaskarray(given)):
        at = int(np.argmax(np.ma.getmaskarray(given).ravel()))
        raise PlanError(f"{name}: it was given a masked array, whose value {at} is hidden; pass its .filled(value).")


def check_booleans(name: str, given: NDArray[Any]) -> None:
    """Raise PlanError for an array of objects that is meant as a mask: booleans, and perhaps missing values."""
    if given.dtype != object or given.ndim != 1:
        return
    n_booleans, missing = 0, []
    for at, value in enumerate(given):
        if isinstance(value, (bool, np.bool_)):
            n_booleans += 1
        elif value is None or type(value).__name__ == "NAType" or (isinstance(value, float) and np.isnan(value)):
            missing.append(at)
        else:
            return
    if n_booleans and missing:
        raise PlanError(
            f"{name}: {len(missing)} of the mask's {given.size} values are missing, such as that at {missing[0]}; fill "
            "them, as mask.fillna(False).astype(bool) does in pandas."
        )
    if n_booleans:
        raise PlanError(f"{name}: the mask holds booleans as objects; pass mask.astype(bool).")


def as_array(name: str, given: Any) -> NDArray[Any]:
    """Return values given by the user as an array; raise PlanError if they cannot be one, or are partly masked."""
    check_unmasked(name, given)
    try:
        return np.asarray(given)
    except (RuntimeError, TypeError, ValueError) as error:  # lists of different lengths, an array on a GPU
        raise PlanError(
            f"{name}: it was given something that is no array ({first_line(error)}); pass a flat list, or an array in "
            "host memory."
        ) from error


def check_obs_names(name: str, given: Any, *, least: int = 0, sampler: str = "", also: str = "") -> tuple[str, ...]:
    """Return one or several names of obs columns as a tuple; raises as `check_names` does."""
    return check_names(name, given, least=least, what="the name of an obs column", sampler=sampler, also=also)


def parse_nbytes(name: str, value: object, *, least: int = 1) -> int:
    """Parse a number of bytes, at least `least`, given as a number or as text: ``"20GiB"``, ``"1.5 TB"`` or ``"64M"``.

    Raise PlanError if it is neither, or too small.
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
        raise PlanError(f"{name}={shown(value)}: expected a number of bytes{above}, or text such as '20GiB'.")
    return nbytes
