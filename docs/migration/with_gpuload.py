"""Train a classifier of plates on an .h5ad file with gpuload: python with_gpuload.py cells.h5ad."""

import sys

import torch

import gpuload
from gpuload.torch import CellDataset


def open_cells(path, batch_size=64):
    """Return a function that gives an epoch of (counts, plate)."""
    loader = gpuload.open_loader(
        path,
        batch_size=batch_size,
        block_size=16,
        fetch_factor=256,
        obs=["plate"],
        device="cpu",
    )

    def epoch():
        for batch in CellDataset(loader):
            yield batch["X"], batch["plate"]

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
