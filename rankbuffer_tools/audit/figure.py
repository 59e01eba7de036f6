"""Draw an audit as a figure."""

import io
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.colors import LinearSegmentedColormap
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from matplotlib.ticker import MaxNLocator

from rankbuffer_trl.files import write_whole

from ..report.chart import BLUE, GREEN, GREY, RED
from .results import SOFT, Audit, Result

GOOD, UNCLEAR, CHANCE = GREEN, RED, GREY
SHADES = LinearSegmentedColormap.from_list("shades", ["#ffffff", BLUE])
CELL_LIMIT = 10  # samples, up to which the heat map shows its numbers


def audit_figure(path: Path, audit: Audit) -> None:
    """Draw where samples land that are put back, and the main measures against chance."""
    figure = Figure(figsize=(11.0, 4.4), layout="constrained")
    left, right = figure.subplots(1, 2)
    _put_back_panel(left, audit.moves)
    _measure_panel(right, [each for each in audit.results if each.values and (each.main or each.name == SOFT)])
    figure.suptitle(f"{audit.judge} on {Path(audit.samples).name}, {len(audit.rankings)} queries", fontsize=10)
    file = io.BytesIO()  # whole before the file is replaced
    figure.savefig(file, format="png", dpi=150)
    write_whole(path, file.getvalue())


def _put_back_panel(axes: Axes, moves: Sequence[tuple[int, int, int]]) -> None:
    """Draw the share of positions by place in the lists, for the most frequent number of samples."""
    sizes = Counter(n for n, _, _ in moves)
    # Queries of another number would blur the diagonal.
    n = max(sizes, key=lambda size: (sizes[size], size), default=2)
    counts = Counter((place, given) for size, place, given in moves if size == n)
    totals = [sum(counts[place, given] for given in range(n)) for place in range(n)]
    shares = [[counts[place, given] / (totals[place] or 1) for given in range(n)] for place in range(n)]
    axes.imshow(shares, cmap=SHADES, vmin=0, vmax=1, origin="lower")
    for place in range(n):
        axes.add_patch(Rectangle((place - 0.5, place - 0.5), 1, 1, fill=False, edgecolor=CHANCE, linewidth=0.8))
    for place in range(n) if n <= CELL_LIMIT else ():
        for given in range(n):
            if value := shares[place][given]:
                # Dark cells need light text.
                colour = "white" if value > 0.6 else "#333333"
                axes.text(given, place, f"{value:.2f}", ha="center", va="center", fontsize=8, color=colour)
    axes.set(title="Put back: where samples land", xlabel="place given (0 is worst)", ylabel="place in the lists")
    if len(sizes) > 1:
        axes.set_title(f"Put back: where samples land (n = {n})")
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_locator(MaxNLocator(integer=True))
    axes.spines[:].set_color("#cccccc")
    axes.tick_params(length=0)


def _measure_panel(axes: Axes, results: Sequence[Result]) -> None:
    """Draw one row per measure."""
    low = 0.0
    for row, result in enumerate(reversed(results)):
        # The complement, so that right is always better.
        flip = (lambda x: x) if result.better > 0 else (lambda x: 1 - x)
        ends = [flip(x) for x in (result.low, result.high) if x is not None]
        colour = CHANCE if result.too_few else GOOD if result.clear else UNCLEAR
        value, chance = flip(result.value), flip(result.chance)
        axes.plot([chance, chance], [row - 0.3, row + 0.3], color=CHANCE, linewidth=2.5, solid_capstyle="butt")
        axes.plot(ends, [row] * len(ends), color=colour, linewidth=3, alpha=0.45, solid_capstyle="butt")
        axes.plot(value, row, "o", color=colour, markersize=7)
        axes.annotate(f"{value:.2f}", (1.02, row), xycoords=axes.get_yaxis_transform(), va="center", color=colour)
        low = min([low, value, chance, *ends])
    labels = [result.label if result.better > 0 else f"1 - {result.label}" for result in reversed(results)]
    few = ["\ntoo few queries" * result.too_few for result in reversed(results)]
    axes.set_yticks(range(len(results)), map(str.__add__, labels, few))
    axes.set(title="Main measures and chance", xlim=(low - 0.08, 1.08), ylim=(-0.6, len(results) - 0.4))
    axes.set_xlabel("share or tau; right is better")
    for colour, marker, label in ((GOOD, "o", "clear"), (UNCLEAR, "o", "not clear"), (CHANCE, "|", "chance")):
        axes.plot([], [], marker, color=colour, label=label, markersize=9 if marker == "|" else 7, markeredgewidth=2)
    axes.figure.legend(loc="outside lower right", ncols=3, frameon=False, fontsize=9)
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.tick_params(axis="y", length=0)
    axes.grid(axis="x", color="#eeeeee")
    axes.set_axisbelow(True)
