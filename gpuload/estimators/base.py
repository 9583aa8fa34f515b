"""Base of the estimators: scikit-learn's interface, without scikit-learn."""

from __future__ import annotations

import inspect
import json
from typing import TYPE_CHECKING, Any

import numpy as np

from gpuload.errors import CorruptDataError, PlanError, first_line
from gpuload.estimators.arrays import open_engine
from gpuload.estimators.passes import Passes
from gpuload.loader import Loader
from gpuload.source import loading_npz, saving

if TYPE_CHECKING:
    import os
    from typing import Self

    from numpy.typing import NDArray

    from gpuload.estimators.arrays import Engine


class Estimator:
    """Base class: parameters as given to the constructor, learned state in attributes that end in an underscore.

    ``get_params`` and ``set_params`` follow scikit-learn, so that clones, pipelines and grid searches work.
    """

    _kind = "transformer"
    _learnt: tuple[str, ...] = ()
    """Attributes that a fitted estimator must have."""
    n_features_in_: int
    feature_names_in_: NDArray[np.str_]
    engine: str
    device: str | None
    random_state: int

    @classmethod
    def _names(cls) -> list[str]:
        return [p for p in inspect.signature(cls.__init__).parameters if p != "self"]

    def get_params(self, deep: bool = True) -> dict[str, Any]:
        """Return the parameters."""
        del deep
        return {name: getattr(self, name) for name in self._names()}

    def set_params(self, **params: Any) -> Self:
        """Set parameters.

        Raises
        ------
        ValueError
            There is no such parameter (scikit-learn's convention).
        """
        for name in params:  # check all first: a call that fails must change none
            if name not in self._names():
                raise ValueError(f"{name}: {type(self).__name__} has no such parameter; it has {self._names()}.")
        for name, value in params.items():
            setattr(self, name, value)
        return self

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(f'{k}={v!r}' for k, v in self.get_params().items())})"

    def __sklearn_tags__(self) -> Any:
        """Return scikit-learn's tags of the estimator; called only by scikit-learn, so it is installed."""
        from sklearn.utils import InputTags, Tags, TargetTags, TransformerTags
        from sklearn.utils._tags import RegressorTags

        is_regressor = self._kind == "regressor"
        return Tags(
            estimator_type="regressor" if is_regressor else None,
            target_tags=TargetTags(required=is_regressor, multi_output=is_regressor),
            transformer_tags=None if is_regressor else TransformerTags(preserves_dtype=["float32"]),
            regressor_tags=RegressorTags() if is_regressor else None,
            input_tags=InputTags(sparse=True),
        )

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write parameters and learned state to an .npz file (no pickles), atomically replacing an existing file.

        Raises
        ------
        PlanError
            The estimator is not fitted.
        ReadError
            The file cannot be written.
        """
        learnt = {k: v for k, v in vars(self).items() if k.endswith("_") and not k.startswith("_")}
        if not learnt:
            raise PlanError(f"{type(self).__name__} is not fitted; call fit first.")
        params = {k: v.item() if isinstance(v, np.generic) else v for k, v in self.get_params().items()}
        about = json.dumps({"estimator": type(self).__name__, "params": params})
        with saving(path) as file:
            np.savez(file, **{"about": np.array(about), **{k: np.asarray(v) for k, v in learnt.items()}})  # type: ignore[arg-type]

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Self:
        """Load an estimator written by `save`.

        Raises
        ------
        ReadError
            The file cannot be opened.
        CorruptDataError
            The file was not written by this class's `save`, is damaged, or was written by a newer version.
        """

        def not_saved(error: Exception) -> CorruptDataError:
            return CorruptDataError(
                f"{path}: not a saved {cls.__name__}, or a damaged one ({first_line(error)}); write it again with "
                "save()."
            )

        with loading_npz(path, not_saved) as stored:
            about = json.loads(str(stored["about"]))
            learnt = {name: values for name, values in stored.items() if name != "about"}
            kind, params = about["estimator"], dict(about["params"])
        if kind != cls.__name__:
            raise CorruptDataError(f"{path}: holds a {kind}, not a {cls.__name__}; load it with that.")
        if unknown := sorted(params.keys() - set(cls._names())):
            raise CorruptDataError(
                f"{path}: its {kind} has {unknown[0]!r}, which this gpuload does not know; update it."
            )
        if missing := [name for name in cls._learnt if name not in learnt]:
            raise CorruptDataError(f"{path}: it lacks {missing[0]} of a {kind}; write it again with save().")
        self = cls(**params)
        for name, value in learnt.items():
            setattr(self, name, value.item() if value.ndim == 0 else value)
        return self

    def _opened(self, X: Any) -> Engine:
        """Return the array library for `X`: on `device` if given, else where the loader's minibatches are."""
        if self.device is not None:
            return open_engine(self.engine, self.device)
        device = X.device if isinstance(X, Loader) and self.engine != "numpy" else "cpu"
        return open_engine(self.engine, "cuda" if (self.engine, device) == ("cupy", "cpu") else device, has_choice=True)

    def _random(self) -> np.random.Generator:
        """Return a new generator seeded with `random_state`."""
        try:
            return np.random.default_rng(self.random_state)
        except (TypeError, ValueError) as error:
            raise PlanError(
                f"random_state={self.random_state!r}: expected a whole number of at least 0 ({error})."
            ) from error

    def _checked(self, X: Any, engine: Engine, *, is_fitted: bool = False) -> Passes:
        """Return the passes over a matrix; if `is_fitted`, check it against the columns that were fitted."""
        if is_fitted and not hasattr(self, "n_features_in_"):
            raise not_fitted(type(self).__name__)
        passes = Passes(X, engine)
        if is_fitted and passes.n_columns != self.n_features_in_:
            raise PlanError(
                f"X has {passes.n_columns} features, but {type(self).__name__} is expecting {self.n_features_in_} "
                "features as input; give it that many."
            )
        if is_fitted and passes.names is not None:
            self._check_names(passes.names)
        if passes.n_rows < 1 or passes.n_columns < 1:
            what = "sample" if passes.n_rows < 1 else "feature"
            raise PlanError(
                f"X: found array with 0 {what}(s) (shape=({passes.n_rows}, {passes.n_columns})) while a minimum of 1 "
                "is required; give it some."
            )
        return passes

    def _check_names(self, names: NDArray[np.str_]) -> None:
        """Raise PlanError if the columns' names differ from those fitted."""
        fitted = getattr(self, "feature_names_in_", names)
        if differing := np.flatnonzero(names != fitted).tolist():
            at = differing[0]
            raise PlanError(
                f"X: feature {at} is {str(names[at])!r}, but {type(self).__name__} was fitted to {str(fitted[at])!r} "
                "there; give it the same features in the same order, as with open_loader(genes=...feature_names_in_), "
                "or, if only names differ, delete its feature_names_in_."
            )

    def _remember(self, passes: Passes) -> None:
        """Record the number and names of the columns."""
        self.n_features_in_ = passes.n_columns
        if passes.names is not None:
            self.feature_names_in_ = passes.names
        elif hasattr(self, "feature_names_in_"):
            del self.feature_names_in_


def not_fitted(name: str) -> Exception:
    """Return scikit-learn's own error if installed, since its tools look for it."""
    message = f"{name} is not fitted; call fit first."
    try:
        from sklearn.exceptions import NotFittedError
    except ImportError:
        return PlanError(message)
    return NotFittedError(message)  # type: ignore[no-any-return]
