"""Draw `docs/images/one_step.png`, a picture of the method: one group and one buffer, as in `examples/one_group.py`.

python docs/make_picture.py
"""

from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.patches import FancyBboxPatch

IMAGE = Path(__file__).parent / "images" / "one_step.png"
ANCHOR, ROLLOUT, NEW, TEXT = "#4a6785", "#d98c2b", "#2e8b57", "#222222"
INTERVALS = (("R0",), ("R7",), ("R1", "R2", "R5"), ("R6",), ("R4",))  # one interval below each anchor, one above all
RANKED = ("R2", "R5", "R1")
ORDER = ("R0", "R7", *RANKED, "R6", "R4")
CENTRES = (0.6, 2.3, 4.85, 7.4, 9.1)  # of the intervals
LADDER = (1.45, 3.15, 6.55, 8.25)  # the places of the anchors


def box(axes: Axes, x: float, y: float, label: str, colour: str) -> None:
    shape = FancyBboxPatch((x - 0.27, y - 0.2), 0.54, 0.4, boxstyle="round,pad=0.03", color=colour, linewidth=0)
    axes.add_patch(shape)
    axes.text(x, y, label, color="white", ha="center", va="center", fontsize=10, fontweight="bold")


def row(axes: Axes, y: float, title: str, note: str) -> None:
    axes.text(-3.9, y + 0.13, title, color=TEXT, va="center", fontsize=10.5, fontweight="bold")
    axes.text(-3.9, y - 0.22, note, color="#666666", va="center", fontsize=8.5)


def draw() -> None:
    figure, axes = plt.subplots(figsize=(9.6, 4.1), dpi=120)
    axes.set(xlim=(-4, 10), ylim=(-0.75, 5.1))
    axes.axis("off")

    row(axes, 4.55, "Buffer of the query", "anchors, worst to best")
    axes.plot([0, 9.7], [4.55, 4.55], color="#c8ced4", linewidth=2, zorder=0)
    for k, x in enumerate(LADDER):
        box(axes, x, 4.55, f"A{k}", ANCHOR)
        axes.plot([x, x], [2.05, 4.3], color="#c8ced4", linewidth=1, linestyle=":", zorder=0)

    row(axes, 3.5, "1. Insert", "one judgment per answer:")
    axes.text(-3.9, 3.03, "where among the anchors?", color="#666666", va="center", fontsize=8.5)
    row(axes, 2.4, "2. Rank inside an interval", "one judgment per crowded interval")
    for centre, names in zip(CENTRES, INTERVALS, strict=True):
        for i, name in enumerate(names):
            box(axes, centre + 0.8 * (i - (len(names) - 1) / 2), 3.4, name, ROLLOUT)
    for i, name in enumerate(RANKED):
        box(axes, CENTRES[2] + 0.8 * (i - 1), 2.4, name, ROLLOUT)
        if i:
            axes.text(CENTRES[2] + 0.8 * (i - 1.5), 2.4, "<", color=TEXT, ha="center", va="center", fontsize=11)
    axes.annotate("", (CENTRES[2], 2.72), (CENTRES[2], 3.1), arrowprops={"arrowstyle": "->", "color": "#888888"})

    row(axes, 1.4, "3. Rewards", "from the order; R3 gave no answer")
    for q, name in enumerate(("R3", *ORDER)):
        x = 0.6 + q * 8.5 / len(ORDER)
        box(axes, x, 1.45, name, "#b8b8b8" if name == "R3" else ROLLOUT)
        axes.text(x, 1.02, f"{-1 + 2 * q / len(ORDER):+.2f}", color=TEXT, ha="center", va="center", fontsize=8.5)

    row(axes, 0, "Buffer for the next epoch", "new: below, above, and the middle")
    axes.text(-3.9, -0.5, "of an interval with three answers", color="#666666", va="center", fontsize=8.5)
    axes.plot([0, 9.7], [0, 0], color="#c8ced4", linewidth=2, zorder=0)
    for x, label in zip((CENTRES[0], CENTRES[2], CENTRES[4]), ("R0", "R5", "R4"), strict=True):
        box(axes, x, 0, label, NEW)
    for k, x in enumerate(LADDER):
        box(axes, x, 0, f"A{k}", ANCHOR)

    figure.savefig(IMAGE, bbox_inches="tight", facecolor="white", pad_inches=0.08)


if __name__ == "__main__":
    draw()
