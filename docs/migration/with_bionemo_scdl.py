"""Train a classifier of plates with BioNeMo-SCDL: python with_bionemo_scdl.py cells.h5ad. Converts the file once."""

import sys
from pathlib import Path

import anndata
import torch
from bionemo.scdl.io.single_cell_memmap_dataset import SingleCellMemMapDataset
from bionemo.scdl.util.torch_dataloader_utils import collate_sparse_matrix_batch
from torch.utils.data import BatchSampler, RandomSampler


def open_cells(path, batch_size=64):
    """Return a function that gives an epoch of (counts, plate)."""
    store = Path(path).with_suffix(".scdl")
    if store.exists():
        cells = SingleCellMemMapDataset(str(store))
    else:
        cells = SingleCellMemMapDataset(str(store), path, use_X_not_raw=True)
        cells.save()
    (n_vars,) = cells.number_of_variables()
    plate = torch.tensor(anndata.read_h5ad(path, backed="r").obs["plate"].cat.codes.to_numpy(), dtype=torch.int64)
    batches = BatchSampler(RandomSampler(cells), batch_size, drop_last=False)

    def epoch():
        for rows in batches:
            X = collate_sparse_matrix_batch([cells[row] for row in rows]).to_dense()
            yield torch.nn.functional.pad(X, (0, n_vars - X.shape[1])), plate[rows]

    return epoch


def train(epoch, n_epochs=2):
    """Train a linear classifier; return the loss of every minibatch."""
    model, losses = torch.nn.LazyLinear(32), []
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    for _ in range(n_epochs):
        for X, plate in epoch():
            loss = torch.nn.functional.cross_entropy(model(X.log1p()), plate)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
    return losses


if __name__ == "__main__":
    losses = train(open_cells(sys.argv[1]))
    print(f"loss {losses[0]:.3f} -> {losses[-1]:.3f}")
