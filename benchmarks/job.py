"""The specification of one measurement: a rival, its settings, a file, and how long to measure.

A job crosses a process boundary as JSON, and may be run by another Python than the runner's, so this module uses the
standard library only.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

LABEL = "plate"
"""The obs column that every rival returns with the values, and whose diversity in minibatches is measured."""

TARGET_SUM = 1e4
"""Target sum of a cell's values if an arm normalises (`log1p` in its settings).

With `downsample` in its settings, an arm keeps each count with that probability.
"""


@dataclass(frozen=True, slots=True)
class Arm:
    """One loader with one set of settings.

    Attributes
    ----------
    name
        Its name in the results, ``rival/output/order``.
    group
        Arms of one group do the same work and are compared with one another.
    rival
        Module in `benchmarks.rivals`.
    settings
        Passed to the rival's `open`; `batch_size`, `output` ("dense" or "csr") and `fetch_factor` occur in all.
    kind
        ``"throughput"``, ``"overlap"`` (a consumer that sleeps as long as the loader needs) or ``"memory"`` (peak per
        epoch).
    """

    name: str
    group: str
    rival: str
    settings: dict[str, Any]
    kind: str = "throughput"


@dataclass(frozen=True, slots=True)
class Job:
    """One measurement of one arm.

    Attributes
    ----------
    arm
        The arm to measure.
    path
        The .h5ad file.
    work_dir
        Where a rival keeps a one-time conversion of the file.
    seconds
        Minimum time to measure, in whole fetches.
    cache
        ``"warm"``: the file is read once beforehand; ``"cold"``: its pages are evicted beforehand.
    n_epochs
        Epochs of a ``"memory"`` measurement.
    seed
        Seed of the rival's order; each round has its own.
    """

    arm: Arm
    path: Path
    work_dir: Path
    seconds: float = 6.0
    cache: str = "warm"
    n_epochs: int = 3
    seed: int = 0

    def to_json(self) -> str:
        """Return the job as one line of JSON."""
        return json.dumps(asdict(self), default=str)

    @classmethod
    def from_json(cls, text: str) -> Job:
        """Return the job that `to_json` wrote."""
        fields = json.loads(text)
        paths = {name: Path(fields[name]) for name in ("path", "work_dir")}
        return cls(**{**fields, **paths, "arm": Arm(**fields["arm"])})
