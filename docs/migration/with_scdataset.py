"""Train a classifier of plates on an .h5ad file with scDataset: python with_scdataset.py cells.h5ad."""

import sys

import anndata
import torch
from scdataset import BlockShuffling, scDataset


def open_cells(path, batch_size=64):
    """Return a function that gives an epoch of (counts, plate)."""
    adata = anndata.read_h5ad(path, backed="r")
    codes = adata.obs["plate"].cat.codes.to_numpy().astype("int64")
    cells = scDataset(
        adata,
        BlockShuffling(block_size=16),
        batch_size=batch_size,
        fetch_factor=256,
        fetch_callback=lambda adata, rows: (adata.X[rows], codes[rows]),
        batch_callback=lambda fetch, rows: (fetch[0][rows].toarray(), fetch[1][rows]),
        batch_transform=lambda batch: tuple(map(torch.from_numpy, batch)),
    )
    loader = torch.utils.data.DataLoader(cells, batch_size=None)

    def epoch():
        yield from loader

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
