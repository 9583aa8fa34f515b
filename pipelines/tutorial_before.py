"""Train on samples by ID with PyTorch alone: partition, labels, a file per ID, a Dataset, a DataLoader with workers.

    python pipelines/tutorial_before.py DATA     (DATA/partition.json, DATA/labels.json, DATA/<ID>.pt)

`tutorial_after.py` is the same on gpuload.

References
----------
.. [1] Afshine Amidi, Shervine Amidi, "A detailed example of how to generate your data in parallel with PyTorch".
"""

import json
import sys
import time

import torch


class Dataset(torch.utils.data.Dataset):
    """A sample per ID."""

    def __init__(self, list_IDs, labels, folder):
        self.list_IDs, self.labels, self.folder = list_IDs, labels, folder

    def __len__(self):
        return len(self.list_IDs)

    def __getitem__(self, index):
        ID = self.list_IDs[index]
        return torch.load(f"{self.folder}/{ID}.pt", weights_only=True), self.labels[ID]


def main(folder, max_epochs=3):
    """Train and validate; return the validation accuracy and the samples per second after the first epoch."""
    torch.manual_seed(0)
    device = torch.device("cuda:0" if torch.cuda.is_available() else "cpu")
    params = {"batch_size": 64, "shuffle": True, "num_workers": 6}
    with open(f"{folder}/partition.json") as partition_file, open(f"{folder}/labels.json") as labels_file:
        partition, labels = json.load(partition_file), json.load(labels_file)

    training_set = Dataset(partition["train"], labels, folder)
    training_generator = torch.utils.data.DataLoader(training_set, **params)
    validation_set = Dataset(partition["validation"], labels, folder)
    validation_generator = torch.utils.data.DataLoader(validation_set, **params)

    model = torch.nn.Linear(64, 2).to(device)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    seconds = 0.0
    for epoch in range(max_epochs):
        start = time.perf_counter()
        for local_batch, local_labels in training_generator:
            X, y = local_batch.to(device), local_labels.to(device)
            loss = torch.nn.functional.cross_entropy(model(X.flatten(1)[:, :64]), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        seconds += time.perf_counter() - start if epoch else 0.0

        n_right = 0
        with torch.set_grad_enabled(False):
            for local_batch, local_labels in validation_generator:
                X, y = local_batch.to(device), local_labels.to(device)
                n_right += int((model(X.flatten(1)[:, :64]).argmax(1) == y).sum())
    return n_right / len(validation_set), (max_epochs - 1) * len(training_set) / seconds


if __name__ == "__main__":
    if len(sys.argv) != 2 or sys.argv[1].startswith("-"):
        sys.exit(print(__doc__) if sys.argv[1:] in (["-h"], ["--help"]) else __doc__)
    accuracy, speed = main(sys.argv[1])
    print(f"validation accuracy {accuracy:.1%}, {speed:,.0f} samples/s")
