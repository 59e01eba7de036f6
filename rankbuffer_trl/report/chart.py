"""A chart of a report: drawn once, from the very table that its CSV file holds, as PNG and as SVG."""

import csv
import io
import re
from collections.abc import Sequence
from dataclasses import dataclass

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from .collect import Row

INK, LINE = "#2b3036", "#dfe3e8"  # in the page they follow its theme
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
    "font.size": 9,
    "legend.frameon": False,
    "svg.fonttype": "none",
}


@dataclass(frozen=True)
class Chart:
    """A picture with the numbers behind it.

    Args:
        name (`str`):
            Of its files.
        title (`str`):
            What it shows.
        caption (`str`):
            How to read it.
        figure (`Figure`):
            The picture.
        table (`list[dict]`):
            The numbers.
    """

    name: str
    title: str
    caption: str
    figure: Figure
    table: Sequence[Row]

    def png(self) -> bytes:
        """For documents, on white."""
        file = io.BytesIO()
        with matplotlib.rc_context(STYLE):
            self.figure.savefig(file, format="png", dpi=150)
        return file.getvalue()

    def svg(self, salt: str = "") -> str:
        """For the page: no background, ink and lines in the colours of its theme. `salt` makes its ids its own."""
        file = io.StringIO()
        with matplotlib.rc_context(STYLE | {"svg.hashsalt": f"{self.name} {salt}"}):
            self.figure.savefig(file, format="svg", transparent=True, metadata={"Date": None})
        svg = file.getvalue()[file.getvalue().index("<svg") :]
        svg = re.sub(r"<metadata>.*?</metadata>|<style[^>]*>.*?</style>", "", svg, flags=re.DOTALL)
        svg = re.sub(r' (width|height)="[\d.]+pt"', "", svg, count=2).replace('<g id="', '<g data-part="')
        return svg.replace(INK, "currentColor").replace(LINE, "var(--line)")

    def csv(self) -> str:
        """The table, numbers in full."""
        file = io.StringIO()
        writer = csv.DictWriter(file, list(self.table[0]) if self.table else [], lineterminator="\n")
        writer.writeheader()
        writer.writerows(self.table)
        return file.getvalue()


def column(table: Sequence[Row], name: str) -> list[float]:
    """One column; `nan` where there is no value, which leaves a gap in a line."""
    return [float("nan") if row[name] is None else row[name] for row in table]


def plain(text: str) -> str:
    """`text` as it stands: matplotlib would set what is between dollars as a formula, and leave out names with `_`."""
    return ("\u200b" + text if text.startswith("_") else text).replace("$", r"\$")


def thousands(value: float, _: float = 0) -> str:
    """A tick of a cost: 1.5k, 20M."""
    for size, letter in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= size:
            return f"{value / size:g}{letter}"
    return f"{value:g}"


def panels(rows: int = 1, columns: int = 1, height: float = 3.6, **kwargs) -> tuple[Figure, list[Axes]]:
    """A figure and its axes."""
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(5.4, height), layout="constrained")
        axes = list(figure.subplots(rows, columns, squeeze=False, **kwargs).flat)
    for each in axes:
        each.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=7))
    return figure, axes


def legend(*axes: Axes, columns: int = 4) -> None:
    """Of all `axes`, under the picture, where it hides nothing; what has the same label stands once."""
    named = [each.get_legend_handles_labels() for each in axes]
    unique = {label: handle for handles, labels in named for handle, label in zip(handles, labels, strict=True)}
    if unique:
        with matplotlib.rc_context(STYLE):
            axes[0].figure.legend(unique.values(), unique, loc="outside lower center", ncols=columns, fontsize=8)
