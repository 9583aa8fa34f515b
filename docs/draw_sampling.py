"""Draw docs/sampling.png: how blocks, fetches, ranks and minibatches relate, from a real plan of 240 cells.

python docs/draw_sampling.py
"""

from __future__ import annotations

from pathlib import Path

import matplotlib as mpl
import numpy as np

mpl.use("Agg")

from matplotlib import pyplot as plt
from matplotlib.patches import Rectangle

from gpuload.plan import Plan
from gpuload.sampling import Shuffled
from gpuload.types import expand_ranges

N_CELLS, N_PLATES, BLOCK, BATCH, FACTOR, N_RANKS = 240, 6, 10, 10, 4, 2
COLOURS = ("#4c72b0", "#dd8452", "#55a868", "#c44e52", "#8172b3", "#937860")


def main() -> None:
    """Draw the four strips."""
    plates = np.arange(N_CELLS) * N_PLATES // N_CELLS
    strategy = Shuffled((N_CELLS,), BLOCK)
    plans = [Plan(strategy, BATCH, FACTOR, seed=3, rank=rank, world_size=N_RANKS) for rank in range(N_RANKS)]
    order = expand_ranges(strategy.order((3, 0, 1)).ranges(0, N_CELLS))
    figure, axes = plt.subplots(figsize=(11, 4.6), layout="constrained")
    strip(axes, 3, np.arange(N_CELLS), plates, BLOCK)
    strip(axes, 2, order, plates, BLOCK)
    handed = np.empty(N_CELLS, dtype=np.int64)
    size = BATCH * FACTOR
    for rank, plan in enumerate(plans):
        for number, fetch in enumerate(plan.fetches()):
            start = (number * N_RANKS + rank) * size
            handed[start : start + size] = fetch.rows()[fetch.positions]
            axes.add_patch(Rectangle((start, 1.72), size, 0.16, color="#222222" if rank == 0 else "#aaaaaa", lw=0))
            axes.text(start + size / 2, 1.8, f"fetch {number} of rank {rank}", ha="center", va="center", fontsize=8,
                      color="white" if rank == 0 else "black")  # fmt: skip
    strip(axes, 0.9, handed, plates, BATCH)
    for y, title in (
        (3.62, f"The file: {N_CELLS} cells, sorted by plate (colours), in blocks of block_size = {BLOCK}"),
        (2.62, "The epoch: the blocks in an order that (seed, epoch) decides"),
        (1.52, f"Each fetch (batch_size x fetch_factor = {size} cells) is mixed, and cut into minibatches of {BATCH}"),
    ):
        axes.text(0, y, title, fontsize=10)
    axes.set(xlim=(0, N_CELLS), ylim=(0.85, 3.85))
    axes.axis("off")
    figure.savefig(Path(__file__).parent / "sampling.png", dpi=130)


def strip(axes: plt.Axes, y: float, rows: np.ndarray, plates: np.ndarray, every: int) -> None:
    """Draw cells as a strip of their plates' colours, with a gap after every `every` cells."""
    for place, row in enumerate(rows):
        axes.add_patch(Rectangle((place, y), 1.02, 0.5, color=COLOURS[plates[row]], lw=0))
    for edge in range(0, len(rows) + 1, every):
        axes.plot([edge, edge], [y, y + 0.5], color="white", linewidth=1.4)


if __name__ == "__main__":
    main()
