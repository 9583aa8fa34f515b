"""DALI front: a `Loader` as an external source of a pipeline. The home of nvidia.dali.

It only hands arrays to DALI: no shuffling, sharding, prefetching or batching here. DALI calls the source in the thread
that runs the pipeline, and all the source does is to take a ready minibatch from the loader.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from gpuload.errors import MissingDependencyError, PlanError

try:
    from nvidia.dali import fn, pipeline_def, types
except ImportError as error:
    raise MissingDependencyError("nvidia-dali-cuda130", "gpuload.dali", "dali") from error

if TYPE_CHECKING:
    from collections.abc import Iterator

    from nvidia.dali import Pipeline

    from gpuload.loader import Loader

_DALI_TYPES = {
    "float16": types.FLOAT16,
    "float32": types.FLOAT,
    "float64": types.FLOAT64,
    "bool": types.BOOL,
    "int8": types.INT8,
    "int16": types.INT16,
    "int32": types.INT32,
    "int64": types.INT64,
    "uint8": types.UINT8,
    "uint16": types.UINT16,
    "uint32": types.UINT32,
    "uint64": types.UINT64,
}


class _Source:
    """An iterable of tuples of arrays, one epoch per ``iter()``, as `fn.external_source` wants it."""

    def __init__(self, loader: Loader) -> None:
        self._loader = loader

    def __iter__(self) -> Iterator[tuple[Any, ...]]:
        for batch in self._loader:
            yield (batch.X, *batch.obs.values(), batch.rows)


def output_names(loader: Loader) -> list[str]:
    """Return the names of what `cells` gives, in order: ``"X"``, the obs columns, ``"rows"``."""
    return ["X", *loader.obs_dtypes, "rows"]


def cells(loader: Loader) -> list[Any]:
    """Return the outputs of an external source over a loader, for use inside a ``@pipeline_def`` function.

    Parameters
    ----------
    loader
        Made by `gpuload.open_loader` with dense output. The pipeline's ``batch_size`` must be at least the loader's.

    Returns
    -------
    list of DataNode
        ``X`` (a sample is a row of n_vars), one scalar per cell for each obs column, and the row number, in the order
        of `output_names`.

    Raises
    ------
    PlanError
        The loader's output is CSR, which DALI has no type for.

    Notes
    -----
    At the end of an epoch the pipeline raises StopIteration; ``pipeline.reset()`` starts the next. The last minibatch
    may be short, which DALI hands on as it is. The loader's buffers are copied by DALI's CPU pipeline.
    """
    if loader.output != "dense":
        raise PlanError(
            "output='csr': DALI has no sparse type; open the loader with output='dense', or use "
            "gpuload.torch.CellDataset."
        )
    taken = [name for name in loader.obs_dtypes if name in ("X", "rows")]
    if taken:
        raise PlanError(f"obs column {taken[0]!r} has the name of another output; rename it in the file.")
    unknown = [n for n, d in loader.obs_dtypes.items() if d.name not in _DALI_TYPES]
    if unknown:
        raise PlanError(
            f"obs column {unknown[0]!r} has dtype {loader.obs_dtypes[unknown[0]]}, which DALI has no type for; "
            "leave it out."
        )
    dtypes = [loader.dtype, *(d.name for d in loader.obs_dtypes.values()), "int64"]
    return list(
        fn.external_source(
            source=_Source(loader),
            num_outputs=len(dtypes),
            cycle="raise",
            batch=True,
            dtype=[_DALI_TYPES[name] for name in dtypes],
            ndim=[1] + [0] * (len(dtypes) - 1),
        )
    )


def cell_pipeline(loader: Loader) -> Pipeline:
    """Return a built CPU pipeline that hands on what `cells` gives, unchanged."""

    @pipeline_def(batch_size=loader.batch_size, device_id=None, num_threads=1, prefetch_queue_depth=1)  # type: ignore[untyped-decorator]
    def pipeline() -> tuple[Any, ...]:
        return tuple(cells(loader))

    return pipeline()


class CellIterator:
    """Minibatches through a DALI pipeline into PyTorch; iterates like ``DALIGenericIterator``.

    Each step gives a list with one dict of CPU tensors, named as in `output_names`. At the end of an epoch
    StopIteration is raised and `reset` (called by a new ``iter()`` too) starts the next; the last short minibatch is
    delivered.

    Parameters
    ----------
    loader
        Made by `gpuload.open_loader` with dense output.
    pipeline
        A pipeline whose outputs are those of `cells(loader)`, augmented as you like, in the same order; None makes a
        plain one.
    output_names
        Names of the pipeline's outputs where they are others than those of `cells`.

    Raises
    ------
    PlanError
        The loader's output is CSR.
    MissingDependencyError
        torch is not installed.
    """

    def __init__(self, loader: Loader, pipeline: Pipeline | None = None, output_names: list[str] | None = None) -> None:
        try:
            from nvidia.dali.plugin.pytorch import DALIGenericIterator
        except ImportError as error:
            raise MissingDependencyError("torch", "gpuload.dali.CellIterator", "dali") from error
        self._loader = loader
        self._iterator = DALIGenericIterator(
            [cell_pipeline(loader) if pipeline is None else pipeline],
            output_names or globals()["output_names"](loader),
            size=-1,
            auto_reset=False,
            prepare_first_batch=False,
        )
        self._has_ended = False

    def __len__(self) -> int:
        """Minibatches of an epoch."""
        return len(self._loader)

    def __iter__(self) -> CellIterator:
        """Return the iterator itself, reset where the epoch has ended."""
        if self._has_ended:
            self.reset()
        return self

    def __next__(self) -> list[dict[str, Any]]:
        """Return the next minibatch: a list of one dict of tensors."""
        try:
            return next(self._iterator)
        except StopIteration:
            self._has_ended = True
            raise

    def reset(self) -> None:
        """Start the next epoch, after StopIteration."""
        self._iterator.reset()
        self._has_ended = False
