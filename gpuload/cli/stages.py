"""The stages of reading, as ``gpuload bench`` measures them: their seconds and rates beside what one thread can do."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from gpuload.cli import text

if TYPE_CHECKING:
    from collections.abc import Sequence

    from gpuload.cli.ceilings import Ceilings

MEASURED = (
    *("read_nbytes", "decoded_nbytes", "n_rows", "n_chunks", "n_chunks_partial", "n_chunks_cached"),
    *("plan_s", "read_s", "decode_s", "take_s", "wait_s"),
)
"""Statistics of a loader that are needed of each round."""

HEADER = ("stage", "threads busy", "bytes/s a thread", "ceiling", "of ceiling")

_NAN = float("nan")


@dataclass(frozen=True, slots=True)
class Round:
    """One repeat, or several together: wall time in seconds, and what the loader did meanwhile."""

    seconds: float
    stats: dict[str, float]

    @property
    def cells_per_s(self) -> float:
        """Cells returned per second."""
        return self.stats["n_rows"] / self.seconds


def together(rounds: Sequence[Round]) -> Round:
    """Return several rounds as one."""
    return Round(sum(r.seconds for r in rounds), {key: sum(r.stats[key] for r in rounds) for key in MEASURED})


def stages(whole: Round, ceilings: Ceilings, row_nbytes: float, threads: int, *, is_on_gpu: bool) -> dict[str, Any]:
    """Return seconds, rate, ceiling and fraction of each stage, and the rate with all stages at their ceilings.

    Parameters
    ----------
    row_nbytes
        Bytes of a row of a dense minibatch; NaN if minibatches are not dense.
    is_on_gpu
        Host seconds then give no rate of decoding and gathering: the host only launches them.
    """
    total = whole.stats
    known = _NAN if is_on_gpu else 1.0
    n_decoded = total["n_chunks"] - total["n_chunks_cached"]
    work = {
        "read": (total["read_s"], total["read_nbytes"], ceilings.read),
        "decode": (total["decode_s"], known * total["decoded_nbytes"], ceilings.decode),
        "take_rows": (total["take_s"], known * total["n_rows"] * row_nbytes, ceilings.fill),
    }
    ideal_s = sum(nbytes / rate for _, nbytes, rate in work.values() if nbytes / rate >= 0) / threads
    bound = total["n_rows"] / ideal_s if ideal_s else _NAN
    return {
        "plan": _stage(whole.seconds, total["plan_s"]),
        **{name: _stage(whole.seconds, *each) for name, each in work.items()},
        "wait": _stage(whole.seconds, total["wait_s"]),
        "threads": threads,
        "decoded_nbytes_per_cell": total["decoded_nbytes"] / max(1.0, total["n_rows"]),
        "chunks_kept": total["n_chunks_cached"] / total["n_chunks"] if total["n_chunks"] else 0.0,
        "chunks_inflated_in_part": total["n_chunks_partial"] / n_decoded if n_decoded else 0.0,
        "at_ceilings_cells_per_s": bound,
        "fraction_of_ceilings": whole.cells_per_s / bound,
    }


def _stage(wall_s: float, stage_s: float, nbytes: float = _NAN, ceiling: float = _NAN) -> dict[str, float]:
    rate = nbytes / stage_s if stage_s and nbytes else _NAN  # kept chunks are copied, and none is decoded
    return {
        "thread_share": stage_s / wall_s,
        "bytes_per_s": rate,
        "ceiling_bytes_per_s": ceiling,
        "fraction": rate / ceiling,
    }


def rows(found: dict[str, Any]) -> list[tuple[str, ...]]:
    """Return the stages as rows of a table under `HEADER`."""
    return [
        (
            name,
            f"{found[name]['thread_share']:.2f}",
            *(
                text.size(v) if np.isfinite(v := found[name][key]) else "-"
                for key in ("bytes_per_s", "ceiling_bytes_per_s")
            ),
            text.share(found[name]["fraction"]) if np.isfinite(found[name]["fraction"]) else "-",
        )
        for name in ("plan", "read", "decode", "take_rows", "wait")
    ]
