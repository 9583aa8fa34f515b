"""Samples by ID: one file or object per sample, labels in a dictionary. For PyTorch's DataLoader, and for our own.

    training_set = SampleSet(partition["train"], labels, "data/")            # data/<ID>.pt
    torch.utils.data.DataLoader(training_set, batch_size=64, shuffle=True, num_workers=6)
    SampleLoader(training_set, batch_size=64, shuffle=True, num_workers=6)   # threads; the next batches are in flight

Files of one tensor (.pt, .npy, .safetensors) are not deserialised: if a file's description of its tensor is identical,
byte for byte, to one seen before, a thread copies its values to their place without the GIL. Any other file is read
with the format's own library.
"""

from __future__ import annotations

from gpuload.errors import MissingDependencyError

try:
    from gpuload.samples.loader import SampleLoader
    from gpuload.samples.sampleset import SampleSet
except ModuleNotFoundError as error:
    if error.name != "torch":
        raise
    raise MissingDependencyError("torch", "gpuload.samples", "torch") from error

__all__ = ["SampleLoader", "SampleSet"]
