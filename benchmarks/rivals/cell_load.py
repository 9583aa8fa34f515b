"""Arc Institute's cell-load: sets of cells of one perturbation ("cell sentences"), each with a matched control cell.

It reads X itself, all genes (no `embed_key`, output space "all"), as in its README. Control cells are not sets of their
own (`should_yield_control_cells`), and incomplete sets are dropped: a cell occurs once, as with gpuload. The row
numbers are the cells' names, which it returns with its `barcode` option.

With `use_consecutive_loading`, which its README advises for all genes, sets are runs of neighbouring cells, each read
with one call, and so are their controls; the file must have the cells of a set together, which it has within a plate.
Without it, cells are read one by one. Sets and their order are the same in every epoch; with it, the pairs are too.

It hands over perturbed cells and controls as two tensors. They are not put together for the clock (see `Halves`), which
its users would not do either.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from cell_load.data_modules import PerturbationDataModule

from benchmarks.job import LABEL
from benchmarks.measure import label_codes
from benchmarks.rivals.perturbed import CONTROL, PERT, perturbed_path, prepare, stored

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    import torch
    from numpy.typing import NDArray

    from benchmarks.job import Job

__all__ = ["PACKAGES", "prepare", "start", "stored"]

PACKAGES = ("cell-load", "lightning", "torch", "numpy", "h5py")

TOML = '[datasets]\nscreen = "{}"\n\n[training]\nscreen = "train"\n'


def start(job: Job) -> CellLoadLoading:
    """Open a loader with the settings of an arm."""
    settings = job.arm.settings
    np.random.seed(job.seed)  # noqa: NPY002 - its sampler draws from NumPy's global generator
    config = job.work_dir / f"{job.path.stem}-cell-load.toml"
    config.write_text(TOML.format(perturbed_path(job)))
    module = PerturbationDataModule(
        str(config),
        batch_size=settings["batch_size"] // (2 * settings["set_size"]),
        num_workers=settings["n_workers"],
        random_seed=job.seed,
        pert_col=PERT,
        batch_col=LABEL,
        cell_type_key="cell_line",
        control_pert=CONTROL,
        embed_key=None,
        output_space="all",
        is_log1p=False,
        basal_mapping_strategy="batch" if LABEL in settings["match"] else "random",
        should_yield_control_cells=False,
        cell_sentence_len=settings["set_size"],
        drop_last=True,
        downsample=settings.get("downsample"),
        use_consecutive_loading=settings["is_consecutive"],
        barcode=True,
    )
    module.setup()
    return CellLoadLoading(module, label_codes(perturbed_path(job)))


@dataclass(frozen=True, slots=True)
class Halves:
    """The perturbed cells of a minibatch and their controls, stacked when they are compared with the file."""

    perturbed: torch.Tensor
    controls: torch.Tensor

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> NDArray[np.float32]:
        """Return all cells as one array."""
        return np.concatenate([self.perturbed.numpy(), self.controls.numpy()])


class CellLoadLoading:
    """The data module's own DataLoader for training."""

    io_mode = "h5py"

    def __init__(self, module: PerturbationDataModule, codes: NDArray[np.int64]) -> None:
        self._module = module
        self._codes = codes
        self._batches = module.train_dataloader()

    def epoch(self) -> Iterator[Mapping[str, Any]]:
        """Iterate over the minibatches of the next epoch."""
        for batch in self._batches:
            rows = np.array(batch["pert_cell_barcode"] + batch["ctrl_cell_barcode"]).astype(np.int64)
            yield {
                "X": Halves(batch["pert_cell_emb"], batch["ctrl_cell_emb"]),
                "label": self._codes[rows],
                "rows": rows,
            }

    def close(self) -> None:
        """Close the file."""
        for subset in self._module.train_datasets:
            subset.dataset.h5_file.close()
