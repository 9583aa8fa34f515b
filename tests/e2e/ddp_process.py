"""Training processes, as torchrun starts them: ``ddp_process.py JOB`` with WORLD_SIZE in the environment.

Not a test: `tests/e2e/test_distributed.py` starts it and compares what the ranks write.
"""

from __future__ import annotations

import json
import os
import sys
import traceback
import warnings
from datetime import timedelta
from itertools import islice
from pathlib import Path
from typing import Any

import torch
import torch._dynamo  # which the first optimizer imports
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import gpuload
from gpuload.torch import CellDataset

warnings.simplefilter("ignore")


def main(job: dict[str, Any]) -> None:
    """Train for some epochs, or some steps of the last; write what was received; save and load if requested."""
    torch.set_num_threads(1)
    if job["load"] or job["save"]:
        import torch.distributed.checkpoint as dcp
    dist.init_process_group(
        "gloo",
        init_method=f"file://{job['meeting']}",
        rank=int(os.environ["RANK"]),
        world_size=int(os.environ["WORLD_SIZE"]),
        timeout=timedelta(seconds=120),
    )
    with gpuload.open_loader(job["paths"], num_threads=1, **job["settings"]) as loader:
        assert (loader.rank, loader.world_size) == (dist.get_rank(), dist.get_world_size())
        torch.manual_seed(0)
        model = DistributedDataParallel(torch.nn.Linear(loader.n_vars, 1))
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
        dataset = CellDataset(loader)
        if job["load"]:
            dcp.load({"model": model.module, "data": dataset}, checkpoint_id=job["load"])
        received = []
        while loader.state_dict()["epoch"] < job["n_epochs"]:
            epoch = loader.state_dict()["epoch"]
            n_steps = job["n_steps"] if epoch == job["n_epochs"] - 1 else None
            batches = iter(torch.utils.data.DataLoader(dataset, batch_size=None))
            for batch in islice(batches, n_steps):
                model(batch["X"]).square().mean().backward()  # waits for the other ranks, or hangs
                optimizer.step()
                optimizer.zero_grad()
                received.append((epoch, batch["rows"].tolist()))
            if n_steps is not None:
                break
        if job["save"]:
            dcp.save({"model": model.module, "data": dataset}, checkpoint_id=job["save"])
        weights = model.module.weight.detach().flatten().tolist()
        report = {"received": received, "weights": weights, "state": loader.state_dict(), "n_batches": len(loader)}
    Path(job["report"]).with_suffix(f".{dist.get_rank()}").write_text(json.dumps(report))
    dist.destroy_process_group()


def become_all(job: dict[str, Any]) -> int:
    """Train in a copy of this process for each rank, so that PyTorch is imported once; return how many have failed."""
    children = []
    for rank in range(int(os.environ["WORLD_SIZE"])):
        child = os.fork()
        if child:
            children.append(child)
            continue
        os.environ["RANK"] = str(rank)
        try:
            main(job)
        except BaseException:
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    return sum(os.waitpid(child, 0)[1] != 0 for child in children)


if __name__ == "__main__":
    sys.exit(become_all(json.loads(sys.argv[1])))
