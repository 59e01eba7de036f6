"""The drawing kit: colours, axes and the `Chart`, which is drawn once from a table and saved as PNG, SVG and CSV."""

import csv
import io
import re
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from .tables import TableRow

BLUE, GREEN, RED, GOLD, GREY = "#3d7ea6", "#2e8b57", "#b5485d", "#c9a227", "#9aa5b1"
PURPLE, ORANGE, TEAL, SLATE = "#8265a7", "#c77b3b", "#4aa3a2", "#7d8794"
POINTS = 400  # places of a line or of bars; a page with a point for each of 100,000 steps opens in no browser
CHART_INCHES = 4.6  # inches of a picture
INK, LINE = "#2b3036", "#dfe3e8"  # the page replaces these two by the colours of its theme
STYLE = {
    "text.color": INK,
    "axes.labelcolor": INK,
    "axes.edgecolor": INK,
    "xtick.color": INK,
    "ytick.color": INK,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.grid.axis": "y",
    "axes.axisbelow": True,
    "grid.color": LINE,
    "axes.titlesize": 10,
    "font.size": 10,
    "legend.frameon": False,
    "svg.fonttype": "none",
}


@dataclass(frozen=True)
class Chart:
    """A picture with the numbers behind it."""

    name: str  # of its files, without suffix
    title: str
    caption: str  # how to read it
    figure: Figure
    table: Sequence[TableRow]  # the numbers

    def png(self) -> bytes:
        """Return the picture on white, for documents."""
        file = io.BytesIO()
        with matplotlib.rc_context(STYLE):
            self.figure.savefig(file, format="png", dpi=150)
        return file.getvalue()

    def svg(self, salt: str = "") -> str:
        """Return the picture for the page: without background, ink and lines in the colours of the page's theme."""
        file = io.StringIO()
        # Ids differ by `salt`, so that one page holds all pictures.
        with matplotlib.rc_context(STYLE | {"svg.hashsalt": f"{self.name} {salt}"}):
            self.figure.savefig(file, format="svg", transparent=True, metadata={"Date": None})
        svg = file.getvalue()[file.getvalue().index("<svg") :]
        # Inline, its style would hold for the whole page.
        svg = re.sub(r"<metadata>.*?</metadata>|<style[^>]*>.*?</style>", "", svg, flags=re.DOTALL)
        # The page sets the size.
        svg = re.sub(r' (width|height)="[\d.]+pt"', "", svg, count=2).replace('<g id="', '<g data-part="')
        return svg.replace(INK, "currentColor").replace(LINE, "var(--line)")

    def csv(self) -> str:
        """Return the table, numbers with all their digits."""
        return csv_of(self.table)


def csv_of(rows: Sequence[TableRow]) -> str:
    """Return rows with equal keys as CSV."""
    file = io.StringIO()
    writer = csv.DictWriter(file, list(rows[0]) if rows else [], lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return file.getvalue()


def window(table: Sequence[TableRow]) -> int:
    """Return how many rows one point stands for, so that there are at most `POINTS`."""
    return max(1, -(-len(table) // POINTS))


def column(table: Sequence[TableRow], name: str) -> list[float]:
    """Return one column to draw: means of windows of rows if these are more than `POINTS`."""
    size, values = window(table), [row[name] for row in table]
    windows = ([value for value in values[i : i + size] if value is not None] for i in range(0, len(values), size))
    # NaN leaves a gap in a line.
    return [fmean(known) if len(known) > 1 else known[0] if known else float("nan") for known in windows]


def clean(text: str) -> str:
    """Replace what UTF-8, HTML or a font cannot hold."""
    text = text.encode("utf-8", "replace").decode("utf-8")  # lone surrogates
    return "".join(c if c.isprintable() else " " for c in text)  # control characters


def plain(text: str) -> str:
    """Escape `text` for matplotlib."""
    text = clean(text)
    # It hides labels that start with `_`, and reads `$...$` as a formula.
    return ("\u200b" + text if text.startswith("_") else text).replace("$", r"\$")


def thousands(value: float, _: float = 0) -> str:
    """Format a tick of a cost, such as 1.5k or 20M."""
    for size, letter in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= size:
            return f"{value / size:g}{letter}"
    return f"{value:g}"


def panels(rows: int = 1, columns: int = 1, height: float = 3.6, **kwargs) -> tuple[Figure, list[Axes]]:
    """Make a figure and its axes."""
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(CHART_INCHES, height), layout="constrained")
        axes = list(figure.subplots(rows, columns, squeeze=False, **kwargs).flat)
    for axis in axes:
        axis.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=6))
    return figure, axes


def legend(*axes: Axes, columns: int = 2) -> None:
    """Put one legend of all `axes` under the picture, with each label once, in as many of `columns` as fit."""
    named = [each.get_legend_handles_labels() for each in axes]
    unique = {label: handle for handles, labels in named for handle, label in zip(handles, labels, strict=True)}
    if unique:
        wide = 34 + 5.4 * max(map(len, unique))  # points: a handle with its gaps, and letters of size 9
        columns = max(1, min(columns, int(72 * CHART_INCHES // wide)))
        with matplotlib.rc_context(STYLE):
            axes[0].figure.legend(unique.values(), unique, loc="outside lower center", ncols=columns, fontsize=9)
