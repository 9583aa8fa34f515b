"""lamindb's MappedCollection over the .h5ad file itself: one cell after another, each a dense row, by a DataLoader.

A cell comes without its number, so a subclass adds that. Labels come as numbers in the order of the sorted names, which
need not be the file's, so each minibatch's are translated by a table. There is no sparse output. PyTorch is kept to one
thread, as it is in a DataLoader's workers: more only wait for one another where other programs run too.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import h5py
import torch
from lamindb.core import MappedCollection

from benchmarks.job import LABEL, Job

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

PACKAGES = ("lamindb", "torch", "numpy", "h5py")


def start(job: Job) -> MappedLoading:
    """Open a loader with the settings of an arm."""
    torch.set_num_threads(1)
    settings = job.arm.settings
    if settings["output"] != "dense":
        raise ValueError(f"{settings['output']!r}: MappedCollection makes dense rows only.")
    # An open file cannot be shared by processes; torch_worker_init_fn opens it once in each, which is its advice.
    cells = NumberedCollection([job.path], obs_keys=[LABEL], parallel=settings.get("n_workers", 0) > 0)
    with h5py.File(job.path) as file:
        categories = file["obs"][LABEL]["categories"].asstr()[:]
    codes = {name: code for code, name in enumerate(categories)}
    code_of = torch.tensor([codes[name] for name in cells.encoders[LABEL]])
    return MappedLoading(cells, code_of, settings, job.seed)


class NumberedCollection(MappedCollection):
    """lamindb's collection, each cell with its number."""

    def __getitem__(self, idx: int) -> dict[str, Any]:
        return {**super().__getitem__(idx), "rows": idx}


class MappedLoading:
    """MappedCollection behind a PyTorch DataLoader."""

    io_mode = "h5py"

    def __init__(
        self, cells: NumberedCollection, code_of: torch.Tensor, settings: Mapping[str, Any], seed: int
    ) -> None:
        self._cells, self._code_of = cells, code_of
        n_workers = settings.get("n_workers", 0)
        self._batches = torch.utils.data.DataLoader(
            cells,
            batch_size=settings["batch_size"],
            shuffle=settings["order"] == "random",
            generator=torch.Generator().manual_seed(seed),
            num_workers=n_workers,
            worker_init_fn=cells.torch_worker_init_fn if n_workers else None,
            persistent_workers=n_workers > 0,
        )

    def epoch(self) -> Iterator[Mapping[str, Any]]:
        """Iterate over the minibatches of the next epoch."""
        for batch in self._batches:
            yield {"X": batch["X"], "label": self._code_of[batch[LABEL]], "rows": batch["rows"]}

    def close(self) -> None:
        """Close the file."""
        self._cells.close()
