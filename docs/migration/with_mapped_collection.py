"""Train a classifier of plates with lamindb's MappedCollection: python with_mapped_collection.py cells.h5ad."""

import sys

import torch
from lamindb.core import MappedCollection


def open_cells(path, batch_size=64):
    """Return a function that gives an epoch of (counts, plate)."""
    cells = MappedCollection([path], obs_keys=["plate"])
    loader = torch.utils.data.DataLoader(
        cells,
        batch_size=batch_size,
        shuffle=True,
        num_workers=2,
    )

    def epoch():
        for batch in loader:
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
