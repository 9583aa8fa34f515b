"""Train a classifier of plates with TileDB-SOMA-ML: python with_tiledbsoma_ml.py cells.h5ad. Converts the file once."""

import sys
from pathlib import Path

import tiledbsoma
import tiledbsoma.io
import torch
from tiledbsoma_ml import ExperimentDataset, experiment_dataloader


def open_cells(path, batch_size=64):
    """Return a function that gives an epoch of (counts, plate)."""
    store = Path(path).with_suffix(".soma")
    if not store.exists():
        tiledbsoma.io.from_h5ad(str(store), path, measurement_name="RNA")
    cells = ExperimentDataset(
        tiledbsoma.Experiment.open(str(store)).axis_query("RNA"),
        layer_name="data",
        obs_column_names=["plate"],
        batch_size=batch_size,
        io_batch_size=batch_size * 256,
        shuffle=True,
        shuffle_chunk_size=16,
    )
    loader = experiment_dataloader(cells)

    def epoch():
        for X, obs in loader:
            yield torch.from_numpy(X), torch.tensor(obs["plate"].cat.codes.to_numpy(), dtype=torch.int64)

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
