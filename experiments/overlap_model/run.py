"""How much of the judge's time hides behind generation, for several workloads and speeds of the judge?

    python -m experiments.overlap_model.run
    python -m experiments.overlap_model.run --figure overlap.png   # also the timeline of one step

The model is that of `benchmarks/overlap.py`. Rollouts are thinking traces with a cap of 4,096 tokens.
`judge / generation` is the time of the judge in the serial order as a share of generation. The time of a question is
chosen so that it has the given value. The script prints tables, and then one JSON line.
"""

import argparse
import json
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from statistics import fmean

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from rich.console import Console
from rich.table import Column, Table

from benchmarks.overlap_model import ORDERS, Row, Workload, latency_for, predict, simulate

RATIOS = (0.1, 0.25, 0.5, 1.0, 2.0)  # judge / generation
STEPS = 60
THINKING = Workload()
WORKLOADS = {"2 % truncated": THINKING, "11 % truncated": Workload(median=1500)}
OTHERS = {
    "27 % truncated": Workload(median=2500),
    "none truncated: median 400, sigma 0.4": Workload(median=400, sigma=0.4),
    "2 % truncated, 64 sequences at a time": Workload(capacity=64),
    "2 % truncated, a judge with 4 slots": Workload(slots=4),
    "2 % truncated, a judge with 64 slots": Workload(slots=64),
}


def table_of(title: str, first: str, rows: dict[str, Row]) -> Table:
    """Return a table of rows by name. `first` is the header of the names."""
    columns = (first, "visible: groups", "visible: rollouts", "step: serial", "step: groups", "step: rollouts")
    table = Table(*(Column(column, justify="right" if i else "left") for i, column in enumerate(columns)), title=title)
    for name, row in rows.items():
        shares = [row.share(order) for order in ORDERS[1:]]
        table.add_row(name, *(f"{value:.2f}" for value in (*shares, *map(row.step, ORDERS))))
    return table


def at_ratio(workload: Workload, ratio: float, steps: range) -> Row:
    """Simulate a workload whose serial judge takes `ratio` times as long as generation."""
    return predict(workload, latency_for(workload, ratio, steps), steps)


def tables(steps: range) -> tuple[list[Table], dict]:
    """Return the tables of the model and its figures for the JSON line."""
    found, result = [], {}
    for title, workload in WORKLOADS.items():
        rows = {f"{ratio:g}": at_ratio(workload, ratio, steps) for ratio in RATIOS}
        heading = f"{title}: generation takes {rows['1'].generation:.1f} s"
        found.append(table_of(heading, "judge / generation", rows))
        result[title] = {
            ratio: {"visible": round(row.share("rollouts"), 3), "step": round(row.step("rollouts"), 3)}
            for ratio, row in rows.items()
        }
    for ratio in (0.5, 1.0):
        rows = {title: at_ratio(workload, ratio, steps) for title, workload in OTHERS.items()}
        found.append(table_of(f"judge / generation {ratio:g}", "workload", rows))
    return found, result


def draw_figure(workload: Workload, ratio: float, path: Path) -> None:
    """Draw the timelines of one step, serial and overlapped, into a file."""
    latency = latency_for(workload, ratio, [0])
    figure = Figure(figsize=(9.6, 7.2), dpi=120, layout="constrained")
    panels = figure.subplots(2, 1, sharex=True)
    for axes, order, title in zip(panels, ("serial", "rollouts"), ("Serial", "Overlapped"), strict=True):
        line = simulate(workload, 0, latency, order)
        height = heights(workload, line.generated)
        bars(axes, [(height[row], 0, end) for row, end in enumerate(line.generated)], "#c8ced4", "rollout")
        inserts = [span for span in line.questions if span.kind == "insert"]
        waits = [(height[span.place], span.asked, span.begun) for span in inserts]
        bars(axes, waits, "#f3d9b8", "insertion waits for the judge")
        bars(axes, [(height[span.place], span.begun, span.answered) for span in inserts], "#d98c2b", "insertion")
        seen: Counter[int] = Counter()
        fines = []
        for span in line.questions:
            if span.kind == "fine":  # the intervals of a group one above the other
                seen[span.place] += 1
                middle = fmean(height[span.place * workload.G + i] for i in range(workload.G))
                fines.append((middle + 3.5 * (seen[span.place] - 1.5), span.begun, span.answered))
        bars(axes, fines, "#2e8b57", "fine ranking", width=2.5)
        for moment in (line.generation, line.generation + line.visible):
            axes.axvline(moment, color="#4a6785", linewidth=1, linestyle=":")
        text = f"{title}: {line.generation:.1f} s of generation, then {line.visible:.1f} s of visible judge"
        axes.set_title(text, fontsize=10, loc="left")
        axes.set(ylabel=f"{workload.queries} groups of {workload.G} rollouts", yticks=[])
        axes.spines[["top", "right", "left"]].set_visible(False)
    panels[1].set_xlabel("seconds")
    panels[1].legend(loc="lower right", frameon=False, fontsize=9)
    figure.savefig(path, facecolor="white")


def bars(axes: Axes, lines: Iterable[tuple[float, float, float]], colour: str, label: str, width: float = 1.4) -> None:
    """Draw lines, each given by its height, begin and end."""
    y, begins, ends = zip(*lines, strict=True)
    axes.hlines(y, begins, ends, color=colour, linewidth=width, label=label)


def heights(workload: Workload, generated: list[float]) -> dict[int, float]:
    """Return the height of each rollout in the figure: groups by their last rollout, rollouts by their end."""
    G = workload.G
    groups = [range(first, first + G) for first in range(0, len(generated), G)]
    groups.sort(key=lambda group: max(generated[row] for row in group), reverse=True)
    return {
        row: (G + 3) * i + j
        for i, group in enumerate(groups)
        for j, row in enumerate(sorted(group, key=lambda row: generated[row], reverse=True))
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=STEPS, help="number of steps to simulate")
    parser.add_argument("--figure", type=Path, help="draw the timeline of one step into this file")
    arguments = parser.parse_args()
    found, result = tables(range(arguments.steps))
    for table in found:
        Console(width=130).print(table)
    if arguments.figure:
        draw_figure(THINKING, 0.5, arguments.figure)
    print(json.dumps({"benchmark": "overlap_model", "steps": arguments.steps} | result))


if __name__ == "__main__":
    main()
