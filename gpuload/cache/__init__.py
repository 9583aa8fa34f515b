"""A growing local store of remote samples: downloaded ahead of training, within a budget, safe against any crash.

    with gpuload.cache.SampleStore("/local/samples", "s3://bucket/train", budget="200GiB") as store:
        for epoch in range(100):
            with store.snapshot(seed=epoch, min_samples=1_000) as snapshot:
                for batch in snapshot.batches(64):
                    train(torch.from_numpy(batch.data))

The modules, each depending only on those before it: `order` (pure), `leases`, `database`, `catalogue` (rows), `files`
(disk), `fetch`, `fetchers`, `reading`, `reads` (totals), `copies`, `snapshot`, `room`, `store`, `blocks`.
"""

from __future__ import annotations

from gpuload.cache.blocks import BlockCache, BlockRemote
from gpuload.cache.reading import SampleBatch
from gpuload.cache.snapshot import Snapshot
from gpuload.cache.store import Coverage, SampleStore

__all__ = ["BlockCache", "BlockRemote", "Coverage", "SampleBatch", "SampleStore", "Snapshot"]
