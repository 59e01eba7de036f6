"""The two figures of a run, as PNG."""

from collections.abc import Sequence
from pathlib import Path
from typing import cast

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from ..buffer import SOURCES
from .history import EpochBuffers

COLOURS = {"initial": "#9aa5b1", "bootstrap": "#c9a227", "left": "#b5485d", "refine": "#3d7ea6", "right": "#2e8b57"}
LABELS = {
    "initial": "initial responses",
    "bootstrap": "bootstrap",
    "left": "left boundary",
    "refine": "local refinement",
    "right": "right boundary",
}


def quality_figure(path: Path, points: Sequence[tuple[int, float]], label: str, window: int = 1) -> None:
    """Mean quality of the rollouts by step, with the mean over `window` steps as a line."""
    axes = _axes(f"{label} of the rollouts", "training step", label)
    steps, values = zip(*points, strict=True)
    axes.plot(steps, values, ".", color=COLOURS["initial"], label="one step")
    means = [sum(values[i : i + window]) / window for i in range(len(values) - window + 1)]
    axes.plot(steps[window - 1 :], means, color=COLOURS["refine"], linewidth=2, label=f"mean of {window} steps")
    axes.legend(frameon=False, loc="lower right")
    _save(axes, path)


def growth_figure(path: Path, epochs: Sequence[EpochBuffers]) -> None:
    """Anchors per query at the end of each epoch, by source (figure "Dynamic buffer evolution", a)."""
    axes = _axes("Anchors by source", "end of epoch", "anchors per query")
    numbers = [entry.epoch for entry in epochs]
    below = [0.0] * len(epochs)
    for source in SOURCES:
        counts = [entry.sources[source] for entry in epochs]
        if any(counts):
            axes.bar(numbers, counts, bottom=below, color=COLOURS[source], label=LABELS[source], width=0.8)
            below = [low + count for low, count in zip(below, counts, strict=True)]
    axes.legend(frameon=False, loc="upper left")
    axes.set_ylim(0, 1.35 * max(below))
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    _save(axes, path)


def _axes(title: str, x: str, y: str) -> Axes:
    axes = Figure(figsize=(6.4, 4.0), layout="constrained").add_subplot()
    axes.set(title=title, xlabel=x, ylabel=y)
    axes.spines[["top", "right"]].set_visible(False)
    return axes


def _save(axes: Axes, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    cast(Figure, axes.figure).savefig(path, dpi=150)
