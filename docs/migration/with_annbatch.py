"""Train a classifier of plates with annbatch, on a converted store: python with_annbatch.py cells.h5ad."""

import sys
from pathlib import Path

import annbatch
import torch
import zarr


def open_cells(path, batch_size=64):
    """Return a function that gives an epoch of (counts, plate)."""
    zarr.config.set({"codec_pipeline.path": "zarrs.ZarrsCodecPipeline"})  # the faster decoder (zarrs)
    store = Path(path).with_suffix(".annbatch.zarr")
    if not store.exists():  # converted and shuffled once
        empty = annbatch.DatasetCollection(zarr.open(store, mode="w"))
        empty.add_adatas([path])
    loader = annbatch.Loader(
        batch_size=batch_size,
        chunk_size=512,
        preload_nchunks=32,
        shuffle=True,
        preload_to_gpu=False,
        to="torch",
    )
    collection = annbatch.DatasetCollection(zarr.open(store, mode="r"))
    loader.use_collection(collection)

    def epoch():
        for batch in loader:
            codes = batch["obs"]["plate"].cat.codes.to_numpy()
            yield batch["X"].to_dense(), torch.tensor(codes).long()

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
