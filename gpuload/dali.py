"""DALI front: a `Loader` as an external source of a pipeline, or via DALI's dynamic mode.

The only module that imports nvidia.dali. It only passes arrays to DALI: no shuffling, sharding, prefetching or batching
here. DALI calls the source in the thread that runs the pipeline; it merely takes a ready minibatch from the loader.

A DALI pipeline copies its input, on a GPU on the stream on which minibatches are made: DALI waits for its own copies,
but not for memory passed without a copy (``no_copy``), and does not report when it has finished reading it. If there is
nothing to compute (`CellIterator` without a pipeline), CPU minibatches go through DALI's dynamic mode instead, whose
tensors share the loader's memory and keep it alive. That mode is experimental, so this behaviour is checked first, with
a copying pipeline as the fallback.
"""

from __future__ import annotations

import copy
import functools
import logging
import sys
import weakref
from collections import deque
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np

from gpuload.checks import check_loader, check_outputs
from gpuload.errors import MissingDependencyError, PlanError
from gpuload.threads import OneAtATime

try:
    from nvidia.dali import Pipeline, fn, pipeline_def, types
    from nvidia.dali.tensors import TensorCPU
except ImportError as error:
    raise MissingDependencyError("nvidia-dali-cuda130", "gpuload.dali", "dali") from error

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterable, Iterator

    from numpy.typing import NDArray

    from gpuload.loader import Loader
    from gpuload.types import Batch

_log = logging.getLogger("gpuload")

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


_starts: weakref.WeakKeyDictionary[Loader, dict[str, Any]] = weakref.WeakKeyDictionary()
"""Each loader's state before the first minibatch of the epoch that a source last began.

Keyed by loader, since a pipeline does not expose its sources, which may be made before it.
"""

_taken: weakref.WeakSet[Pipeline] = weakref.WeakSet()
"""The pipelines that a `CellIterator` runs."""


class _Source:
    """An iterable over tuples of arrays, one epoch per ``iter()``, as `fn.external_source` expects.

    If `is_whole`, each array has a leading axis of length 1: to DALI a minibatch is one sample.
    """

    def __init__(self, loader: Loader, stream: _Stream | None = None, *, is_whole: bool = False) -> None:
        self._loader = loader
        self._stream = stream
        self._is_whole = is_whole

    def __iter__(self) -> Iterator[tuple[Any, ...]]:
        return OneAtATime(self._epoch())

    def _epoch(self) -> Generator[tuple[Any, ...], None, None]:
        batches = iter(self._loader)
        _starts[self._loader] = self._loader.state_dict()  # no minibatch taken yet: the start of this epoch
        # Keep no other reference to a minibatch here, so that its memory is released after its last use.
        yield from map(self._outputs, iter(functools.partial(self._next, batches), None))

    def _next(self, batches: Iterator[Batch]) -> Batch | None:
        if self._stream is not None:
            self._stream.follow(self._loader)
        return next(batches, None)

    def _outputs(self, batch: Batch) -> tuple[Any, ...]:
        rows = batch.rows if self._loader.device == "cpu" else self._loader.to_device(batch.rows)
        outputs = *batch.matrices().values(), *batch.obs.values(), rows
        return tuple(array[None] for array in outputs) if self._is_whole else outputs


class _Stream:
    """The CUDA stream on which DALI receives minibatches: PyTorch's current stream if CUDA is in use there, else 0.

    Minibatches are made and copied by DALI on this one stream, so the loader's stream-ordered memory reuse is safe.
    """

    def __init__(self) -> None:
        self._number = 0

    def __cuda_stream__(self) -> tuple[int, int]:  # DALI calls this for each minibatch
        return 0, self._number

    def follow(self, loader: Loader) -> None:
        """Make the loader produce its next minibatch on the stream that is current now."""
        torch = sys.modules.get("torch")
        is_used = torch is not None and torch.cuda.is_initialized()
        self._number = torch.cuda.current_stream(loader.device).cuda_stream if torch is not None and is_used else 0
        loader.use_stream(self._number)


def output_names(loader: Loader) -> list[str]:
    """Return the names of the outputs of `cells`, in order.

    ``"X"`` and the other matrices, as in `Loader.tables`; the obs columns; ``"rows"``.
    """
    return [*loader.tables, *loader.obs_dtypes, "rows"]


_default_names = output_names
"""The same function where an argument has its name."""


def cells(loader: Loader) -> list[Any]:
    """Return the outputs of an external source over a loader, for use inside a ``@pipeline_def`` function.

    Parameters
    ----------
    loader
        Made by `gpuload.open_loader` with dense output. The pipeline's ``batch_size`` must be at least the loader's.

    Returns
    -------
    list of DataNode
        ``X`` (each sample is a row of n_vars values) and the other matrices, one scalar per cell for each obs column,
        and the row number, in the order of `output_names`.

    Raises
    ------
    PlanError
        `loader` is not a loader, or its output is CSR, for which DALI has no type.

    Notes
    -----
    At the end of an epoch the pipeline raises StopIteration; ``pipeline.reset()`` starts the next. The last minibatch
    may be short; DALI passes it on as it is.

    DALI copies each minibatch once, into its own memory: on a GPU, on the stream on which it was made (PyTorch's
    current stream in the thread that runs the pipeline, or the default one). On the CPU, a pipeline with
    ``exec_dynamic=False`` copies it twice more on its way to PyTorch. The loader prefetches by itself, so
    ``prefetch_queue_depth=1`` is enough; each further step holds one more minibatch in memory.
    """
    return _outputs_of(loader, is_whole=False)


def _outputs_of(loader: Loader, *, is_whole: bool) -> list[Any]:
    """Return the outputs of an external source of which each sample is a cell, or one a whole minibatch."""
    dtypes = _output_dtypes(loader)
    stream = _Stream() if loader.device != "cpu" else None
    on_gpu: dict[str, Any] = {"device": "gpu", "cuda_stream": stream} if stream else {}
    n_axes = [len(table.row_shape) for table in loader.tables.values()] + [0] * (len(dtypes) - len(loader.tables))
    return list(
        fn.external_source(
            source=_Source(loader, stream, is_whole=is_whole),
            num_outputs=len(dtypes),
            cycle="raise",
            batch=True,
            **on_gpu,
            dtype=[_DALI_TYPES[dtype.name] for dtype in dtypes],
            ndim=[n + is_whole for n in n_axes],
        )
    )


def _output_dtypes(loader: Loader) -> list[np.dtype[Any]]:
    """Return the dtypes of the outputs in `output_names`; raise PlanError if DALI does not support one."""
    check_loader("gpuload.dali", loader)
    if loader.output != "dense":
        raise PlanError(
            "output='csr': DALI has no sparse type; open the loader with output='dense', or use "
            "gpuload.torch.CellDataset."
        )
    check_outputs(loader, "output")
    if loader.dtype == "bfloat16":
        raise PlanError("dtype='bfloat16': DALI does not support this type here; use another, or the PyTorch front.")
    matrices = [np.dtype(table.form.dtype) for table in loader.tables.values()]
    return [*matrices, *loader.obs_dtypes.values(), np.dtype(np.int64)]


def cell_pipeline(loader: Loader) -> Pipeline:
    """Return a pipeline on the loader's device that returns the outputs of `cells` unchanged."""
    return _pipeline(loader, is_whole=False)


def _pipeline(loader: Loader, *, is_whole: bool) -> Pipeline:
    """Return a pipeline that computes nothing; if `is_whole`, a minibatch is one sample to it."""
    device_id = None if loader.device == "cpu" else int(loader.device.rpartition(":")[2])
    n_samples = 1 if is_whole else loader.batch_size

    @pipeline_def(batch_size=n_samples, device_id=device_id, num_threads=1, prefetch_queue_depth=1)  # type: ignore[untyped-decorator]
    def pipeline() -> tuple[Any, ...]:
        return tuple(_outputs_of(loader, is_whole=is_whole))

    return pipeline()


class CellIterator:
    """Iterate over minibatches as PyTorch tensors via DALI, with the interface of ``DALIGenericIterator``.

    Each step returns a list with one dict of tensors on the loader's device, named as in `output_names`. An epoch ends
    with StopIteration, and `reset` (also called by a new ``iter()``) starts the next; a last, short minibatch is
    delivered. A tensor that you keep is never overwritten.

    Take the state from here, not from the loader: a pipeline prefetches minibatches. After an error, or an interrupt
    while it makes a minibatch, it can only be asked for its state, for a new iterator to resume from.

    Parameters
    ----------
    loader
        Made by `gpuload.open_loader` with dense output.
    pipeline
        A pipeline whose outputs are those of `cells(loader)`, augmented as you like, in the same order; DALI copies
        minibatches into it. None leaves them unchanged: on the CPU the tensors share the loader's memory, without a
        copy; on a GPU they share DALI's memory, into which each minibatch is copied once.
    output_names
        Distinct names of the outputs, if they differ from those of `output_names`.

    Raises
    ------
    PlanError
        `loader` is not a loader; its output is CSR; an obs column has a name that DALI cannot take; `pipeline` is not a
        pipeline, has a smaller ``batch_size`` than the loader, or belongs to another `CellIterator`; or `output_names`
        has the wrong length or duplicates.
    MissingDependencyError
        torch is not installed.

    Notes
    -----
    On the CPU and without a pipeline, DALI's dynamic mode makes the tensors (``nvidia.dali.experimental.dynamic``, DALI
    2.0 or newer). If that mode is missing, or does not share the memory and keep it alive, a plain pipeline copies each
    minibatch, and the logger ``"gpuload"`` says so once.

    On a GPU and with a pipeline, keep a tensor that you use in a later step too until PyTorch's stream has done that:
    wait for an event, or synchronize, before you drop it. For work given in the tensor's own step, this is not needed.
    """

    def __init__(self, loader: Loader, pipeline: Pipeline | None = None, output_names: list[str] | None = None) -> None:
        try:
            from nvidia.dali.plugin.pytorch import DALIGenericIterator
        except ImportError as error:
            raise MissingDependencyError("torch", "gpuload.dali.CellIterator", "dali") from error
        check_loader("CellIterator", loader)
        _complete_torch_types()
        dtypes = [] if pipeline is not None else _output_dtypes(loader)
        n_outputs = len(dtypes) if pipeline is None else _n_outputs(pipeline, loader)
        names = list(output_names or _default_names(loader))
        if len(set(names)) != len(names):
            raise PlanError(f"output_names={names!r}: a name occurs twice; give each output its own.")
        if len(names) != n_outputs:
            raise PlanError(f"output_names={names!r}: expected {n_outputs} names, one for each output.")
        as_tensor = _dynamic_mode(dict.fromkeys(dtypes)) if pipeline is None and loader.device == "cpu" else None
        self._loader = loader
        # The loader's state at the start of the epoch, and the minibatches received since; None between epochs. While
        # the first is made: the start of an earlier epoch, and -1. Another thread may ask for the state at any time.
        self._position: tuple[Any, int] | None = None
        self._is_cut_off = False  # in the middle of a minibatch, which may be lost
        self._iterator: Any
        self._is_whole = False
        if as_tensor is not None:
            self._iterator = _DynamicIterator(_Source(loader), names, as_tensor)
        else:
            # DALI takes microseconds for each sample: without a pipeline that works on cells, a minibatch is one.
            self._is_whole = pipeline is None
            pipeline = _pipeline(loader, is_whole=True) if pipeline is None else pipeline
            _taken.add(pipeline)
            self._iterator = _interruptible(DALIGenericIterator)(
                [pipeline],
                names,
                size=-1,
                auto_reset=False,
                prepare_first_batch=False,
            )
            if loader.device != "cpu":
                self._iterator = _Held(self._iterator, _depth(pipeline))
        self._has_ended = False

    def __repr__(self) -> str:
        return f"CellIterator({self._loader!r})"

    def __len__(self) -> int:
        """Return the number of minibatches in a full epoch, the same on every rank."""
        return len(self._loader)

    def __iter__(self) -> CellIterator:
        """Return the iterator itself, after a reset if the epoch has ended."""
        self.reset()
        return self

    def __next__(self) -> list[dict[str, Any]]:
        """Return the next minibatch: a list of one dict of tensors."""
        self._check_whole()
        self._is_cut_off = True  # until it is counted, whatever comes between
        try:
            with self._beginning():
                batch: list[dict[str, Any]] = next(self._iterator)
        except StopIteration:
            self._position, self._has_ended, self._is_cut_off = None, True, False
            raise
        if self._position is None:
            self._is_cut_off = False
            raise PlanError(
                "pipeline: its minibatches are not of this loader, or it was run before; define a new one with "
                "gpuload.dali.cells(loader)."
            )
        start, n_received = self._position
        self._position = start, n_received + 1
        self._is_cut_off = False
        if self._is_whole:
            return [{name: tensor[0] for name, tensor in outputs.items()} for outputs in batch]
        return batch

    def reset(self) -> None:
        """Start the next epoch after StopIteration; before that, do nothing."""
        self._check_whole()
        if not self._has_ended:
            return
        self._has_ended, self._is_cut_off = False, True
        with self._beginning():  # a pipeline prefetches on reset
            self._iterator.reset()
        self._is_cut_off = False

    @contextmanager
    def _beginning(self) -> Iterator[None]:
        """Record the start of an epoch if one begins in the with-block, and none has before."""
        if self._position is not None:
            yield
            return
        before = _starts.get(self._loader)
        self._position = before, -1
        try:
            yield
        finally:
            begun = _starts.get(self._loader)
            self._position = None if begun is before else (begun, 0)

    def _check_whole(self) -> None:
        """Raise PlanError after an error: pipelines end all further epochs at once, and a minibatch may be lost."""
        if self._is_cut_off:
            raise PlanError(
                "CellIterator: an error or interrupt came while a minibatch was made, and DALI cannot go on after it; "
                "load the state_dict() of this one into a new CellIterator, with a new pipeline if it had one."
            )

    def state_dict(self) -> dict[str, Any]:
        """Return the position up to which you have received minibatches, regardless of what the pipeline prefetched.

        States of a loader, this iterator and `gpuload.torch.CellDataset` are interchangeable. See `Loader.state_dict`.
        """
        position = self._position
        if position is None or position[1] < 0:
            state = self._loader.state_dict()
            begun: Any = _starts.get(self._loader)
            position = self._position  # again, as an epoch may begin meanwhile
            if position is None or (position[1] < 0 and begun is position[0]):
                return state
            position = position if position[1] >= 0 else (begun, 0)
        start, n_received = position
        return {**copy.deepcopy(start), "step": start["step"] + n_received}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Resume from a state, at the first minibatch not yet received when it was taken.

        Raises
        ------
        PlanError
            As `Loader.load_state_dict`; or minibatches of this epoch are already in the pipeline.
        """
        if self._position is not None:
            raise PlanError(
                "state: DALI cannot discard the minibatches that are already in the pipeline; load the state "
                "into a new CellIterator, before its first minibatch, or after the end of an epoch."
            )
        self._loader.load_state_dict(state)


def _n_outputs(pipeline: Any, loader: Loader) -> int:
    """Return the number of a pipeline's outputs; raise PlanError if it is not a pipeline for this loader."""
    if not isinstance(pipeline, Pipeline):
        raise PlanError(
            f"pipeline={pipeline!r}: expected a pipeline of DALI; call the function that @pipeline_def decorates."
        )
    if pipeline.max_batch_size < loader.batch_size:
        raise PlanError(
            f"pipeline: its batch_size={pipeline.max_batch_size} is less than the loader's, {loader.batch_size}; "
            "define it with batch_size=loader.batch_size."
        )
    if pipeline in _taken:
        raise PlanError(
            "pipeline: another CellIterator has it, and they would share its minibatches; define a new one."
        )
    return int(pipeline.num_outputs)


def _complete_torch_types() -> None:
    """Add unsigned integers, which PyTorch has had since 2.3, to DALI's table of PyTorch dtypes."""
    from nvidia.dali.plugin.pytorch import to_torch_type

    for name in ("uint16", "uint32", "uint64"):
        to_torch_type.setdefault(_DALI_TYPES[name], getattr(sys.modules["torch"], name))


@functools.cache
def _interruptible(generic_iterator: type[Any]) -> type[Any]:
    """Return ``DALIGenericIterator``, but so that PyTorch takes its tensors without dropping a Ctrl-C."""

    class Interruptible(generic_iterator):  # type: ignore[misc]
        def _get_outputs(self) -> list[Any]:
            outputs: list[Any] = super()._get_outputs()
            pairs = zip(self._pipes, outputs, strict=True)
            return [tuple(map(_Output, each)) if pipe.exec_dynamic else each for pipe, each in pairs]

    return Interruptible


class _Output:
    """An output of a pipeline, of which ``DALIGenericIterator`` takes the tensor."""

    def __init__(self, output: Any) -> None:
        self._output = output

    def as_tensor(self) -> Any:
        tensor = self._output.as_tensor()
        if not isinstance(tensor, TensorCPU):
            return tensor
        on_host = _HostTensor(tensor)
        on_host.shape, on_host.dtype = tensor.shape, tensor.dtype
        return on_host


class _HostTensor:
    """A tensor of DALI's in host memory for ``torch.from_dlpack``, whose device is numbers.

    PyTorch compares DALI's type of device with its own. For that pybind11 looks for an attribute, which Python's enum
    searches in Python code, and then clears any error: that of an interrupt, too.
    """

    shape: Any
    dtype: Any

    def __init__(self, tensor: Any) -> None:
        self.__dlpack__ = tensor.__dlpack__

    def __dlpack_device__(self) -> tuple[int, int]:
        return 1, 0  # kDLCPU


class _Held:
    """Iterates over a pipeline on a GPU, and keeps the last minibatches alive.

    DALI reuses the memory of a dropped tensor at once, on its own stream, even if PyTorch's has yet to read it. What an
    iteration of the pipeline writes that begins after the step was given to PyTorch's stream waits for that, as its
    input is copied there. An iteration that has begun before has its memory once its minibatch is delivered, at most
    `depth` minibatches later; until then, the tensors are kept here.
    """

    def __init__(self, iterator: Any, depth: int) -> None:
        self._iterator = iterator
        self._held: deque[list[Any]] = deque(maxlen=depth)

    def __next__(self) -> list[dict[str, Any]]:
        batch: list[dict[str, Any]] = next(self._iterator)
        self._held.append([list(outputs.values()) for outputs in batch])
        return batch

    def reset(self) -> None:
        """Start the next epoch; of the last one, no iteration is under way."""
        self._held.clear()
        self._iterator.reset()


def _depth(pipeline: Pipeline) -> int:
    """Return how many iterations of a pipeline are under way at a time."""
    depth = pipeline.prefetch_queue_depth
    return int(max(depth.values()) if isinstance(depth, dict) else depth)


class _DynamicIterator:
    """The part of ``DALIGenericIterator`` that `CellIterator` uses, without a pipeline."""

    def __init__(self, source: _Source, names: list[str], as_tensor: Callable[[NDArray[Any]], Any]) -> None:
        self._source = source
        self._names = names
        self._as_tensor = as_tensor
        self._epoch: Iterator[tuple[Any, ...]] | None = None

    def __next__(self) -> list[dict[str, Any]]:
        if self._epoch is None:
            self._epoch = iter(self._source)
        return [dict(zip(self._names, map(self._as_tensor, next(self._epoch)), strict=True))]

    def reset(self) -> None:
        """Start the next epoch at the next minibatch."""
        self._epoch = None


def _dynamic_mode(dtypes: Iterable[np.dtype[Any]]) -> Callable[[NDArray[Any]], Any] | None:
    """Return a function that converts an array to a torch tensor by DALI's dynamic mode; None if it is unreliable."""
    try:
        import nvidia.dali.experimental.dynamic as ndd

        torch = sys.modules["torch"]

        def as_tensor(array: NDArray[Any]) -> Any:
            # not as_batch, which runs an operator to make a batch
            return torch.from_dlpack(_HostTensor(ndd.as_tensor(array)))

        copied = [dtype.name for dtype in dtypes if not _is_shared_and_kept(as_tensor, dtype)]
    except (ImportError, AttributeError, TypeError, ValueError, RuntimeError) as error:
        _warn_once(f"{type(error).__name__}: {error}")
        return None
    if copied:
        _warn_once(f"it does not share and keep the memory of {copied[0]} arrays")
        return None
    return as_tensor


def _is_shared_and_kept(as_tensor: Callable[[NDArray[Any]], Any], dtype: np.dtype[Any]) -> bool:
    """Return whether the tensor of an array shares its memory and keeps it alive."""
    owner = np.zeros((2, 3), dtype=dtype)
    place = owner.ctypes.data
    is_alive = weakref.ref(owner)
    tensor = as_tensor(owner[:])
    del owner
    return is_alive() is not None and tensor.data_ptr() == place and tensor.numpy().dtype == dtype


@functools.cache
def _warn_once(reason: str) -> None:
    _log.warning("DALI's dynamic mode cannot be used (%s): a DALI pipeline copies every minibatch instead", reason)
