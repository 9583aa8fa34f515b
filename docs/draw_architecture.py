"""Draw docs/architecture.png: the path of bytes from a file to a minibatch.

python docs/draw_architecture.py
"""

from __future__ import annotations

from pathlib import Path

import matplotlib as mpl

mpl.use("Agg")

from matplotlib import pyplot as plt
from matplotlib.patches import FancyBboxPatch

DATA, WORK, ORDER = "#dbe7f3", "#d9efe3", "#f6e7d2"

BOXES = (
    (0.0, 1.0, "files", "chunks as they are:\n.h5ad, zarr, memory", DATA),
    (2.6, 1.0, "read, decode", "native threads, no GIL;\nor KvikIO and nvCOMP", WORK),
    (5.2, 1.0, "resident fetch", "sparse rows of\nthe chosen blocks", DATA),
    (7.8, 1.0, "gather", "mix, normalise,\nmake dense: one pass", WORK),
    (10.4, 1.0, "minibatch", "PyTorch, DALI,\nNumPy, Lightning", DATA),
    (2.6, -0.75, "plan", "which cells, when:\n(seed, epoch, rank)", ORDER),
    (5.2, -0.75, "fetch", "row ranges, and where\neach row will go", ORDER),
)
"""Left edge, bottom, title, description, colour."""

ARROWS = (
    ((2.1, 1.5), (2.6, 1.5)),
    ((4.7, 1.5), (5.2, 1.5)),
    ((7.3, 1.5), (7.8, 1.5)),
    ((9.9, 1.5), (10.4, 1.5)),
    ((4.7, -0.25), (5.2, -0.25)),
    ((5.7, 0.25), (4.1, 1.0)),
    ((6.9, 0.25), (8.4, 1.0)),
)


def main() -> None:
    """Draw boxes for what there is and what is done, and arrows between them."""
    figure, axes = plt.subplots(figsize=(11, 3.0), layout="constrained")
    for x, y, title, text, colour in BOXES:
        shape = "round,pad=0,rounding_size=0.08"
        axes.add_patch(FancyBboxPatch((x, y), 2.1, 1.0, boxstyle=shape, fc=colour, ec="#555"))
        axes.text(x + 1.05, y + 0.76, title, ha="center", va="center", fontsize=10.5, fontweight="bold")
        axes.text(x + 1.05, y + 0.33, text, ha="center", va="center", fontsize=8.5)
    for start, end in ARROWS:
        axes.annotate("", end, start, arrowprops={"arrowstyle": "-|>", "color": "#555", "lw": 1.3})
    axes.text(8.0, -0.2, "two fetches load\nwhile you train", fontsize=9, style="italic", color="#555", va="center")
    axes.set(xlim=(-0.1, 12.6), ylim=(-0.85, 2.1))
    axes.axis("off")
    figure.savefig(Path(__file__).parent / "architecture.png", dpi=130)


if __name__ == "__main__":
    main()
