"""Train a classifier of plates on an .h5ad file with anndata's AnnLoader: python with_annloader.py cells.h5ad."""

import sys

import anndata
import torch
from anndata.experimental import AnnLoader


def open_cells(path, batch_size=64):
    """Return a function that gives an epoch of (counts, plate)."""
    adata = anndata.read_h5ad(path, backed="r")
    codes = adata.obs["plate"].cat.codes.astype("int64")
    adata.obs = adata.obs[["plate"]].assign(code=codes)
    loader = AnnLoader(
        [adata],
        batch_size=batch_size,
        shuffle=True,
        convert={"obs": {"code": lambda codes: torch.tensor(codes.to_numpy())}},
    )

    def epoch():
        for batch in loader:
            yield batch.X, batch.obs["code"]

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
