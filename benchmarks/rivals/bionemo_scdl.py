"""BioNeMo-SCDL over its own folder of memory maps: converted once, before anything is timed.

The folder is read as its documentation shows: one cell after another, by a DataLoader whose minibatches are made by
`collate_sparse_matrix_batch`. A cell comes without its number, so a wrapper adds that, and the labels are taken
from a tensor in the order of the rows, which its documentation advises for speed. It makes rows dense one by one
(`get_row_padded`); SciPy makes a minibatch dense many times faster, and also faster than `torch.Tensor.to_dense`.
PyTorch is kept to one thread, as it is in a DataLoader's workers: more gain nothing on so few values, and wait for one
another where other programs run too.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from bionemo.scdl.io.single_cell_memmap_dataset import SingleCellMemMapDataset
from bionemo.scdl.util.torch_dataloader_utils import collate_sparse_matrix_batch
from scipy.sparse import csr_matrix

from benchmarks import rivals
from benchmarks.measure import label_codes

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path

    from benchmarks.job import Job

PACKAGES = ("bionemo-scdl", "torch", "numpy", "scipy")


def prepare(job: Job) -> dict[str, Any]:
    """Convert a file with SCDL's defaults, once; return the seconds and bytes that it took."""
    store = store_path(job)
    return rivals.make_once(
        store, lambda: SingleCellMemMapDataset(str(store), str(job.path), use_X_not_raw=True).save()
    )


def stored(job: Job) -> list[Path]:
    """Return what is read."""
    return [store_path(job)]


def start(job: Job) -> ScdlLoading:
    """Open a loader with the settings of an arm."""
    torch.set_num_threads(1)
    cells = NumberedCells(SingleCellMemMapDataset(str(store_path(job))))
    return ScdlLoading(cells, torch.from_numpy(label_codes(job.path)), job.arm.settings, job.seed)


def store_path(job: Job) -> Path:
    return rivals.store_path(job, "scdl")


class NumberedCells(torch.utils.data.Dataset[tuple[torch.Tensor, int]]):
    """SCDL's cells, each with its number."""

    def __init__(self, cells: SingleCellMemMapDataset) -> None:
        self._cells = cells
        (self.n_vars,) = cells.number_of_variables()

    def __len__(self) -> int:
        return len(self._cells)

    def __getitem__(self, row: int) -> tuple[torch.Tensor, int]:
        return self._cells[row], row


class ScdlLoading:
    """SCDL behind a PyTorch DataLoader."""

    io_mode = "mmap"

    def __init__(self, cells: NumberedCells, label: torch.Tensor, settings: Mapping[str, Any], seed: int) -> None:
        self._n_vars, self._label = cells.n_vars, label
        self._finish = {"dense": self._dense, "csr": self._csr}[settings["output"]]
        n_workers = settings.get("n_workers", 0)
        self._batches = torch.utils.data.DataLoader(
            cells,
            batch_size=settings["batch_size"],
            shuffle=settings["order"] == "random",
            collate_fn=collate,
            generator=torch.Generator().manual_seed(seed),
            num_workers=n_workers,
            persistent_workers=n_workers > 0,
        )

    def epoch(self) -> Iterator[Mapping[str, Any]]:
        """Iterate over the minibatches of the next epoch.

        Dense ones are made here, as workers would hand them over as shared memory, which costs more than making them.
        """
        for cells, rows in self._batches:
            yield {"X": self._finish(cells), "label": self._label[rows], "rows": rows}

    def close(self) -> None:
        """Memory maps are closed with the last reference to them."""

    def _dense(self, X: torch.Tensor) -> torch.Tensor:
        parts = (X.values().numpy(), X.col_indices().numpy(), X.crow_indices().numpy())
        return torch.from_numpy(csr_matrix(parts, shape=(X.shape[0], self._n_vars)).toarray())

    def _csr(self, X: torch.Tensor) -> torch.Tensor:
        """Widen to all genes, without a copy: SCDL's is as wide as the last gene that occurs."""
        return torch.sparse_csr_tensor(
            X.crow_indices(), X.col_indices(), X.values(), size=(X.shape[0], self._n_vars), check_invariants=False
        )


def collate(cells: list[tuple[torch.Tensor, int]]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a minibatch as SCDL makes it, and the numbers of its rows."""
    values, rows = zip(*cells, strict=True)
    return collate_sparse_matrix_batch(values), torch.tensor(rows)
