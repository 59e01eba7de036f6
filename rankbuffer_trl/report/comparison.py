"""Charts that hold several runs against each other, or one run against itself: quality, efficiency, advantages."""

from collections.abc import Mapping, Sequence
from statistics import fmean

from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator, PercentFormatter

from .chart import Chart, column, legend, panels, plain, thousands
from .collect import Row

COLOURS = ("#3d7ea6", "#c77b3b", "#2e8b57", "#b5485d", "#8265a7", "#c9a227", "#4aa3a2", "#7d8794")
LEVELS = 0.1  # width of an advantage bin
COSTS = (("tokens", "judge tokens"), ("calls", "judge calls"))


def colour_of(number: int) -> str:
    """The colour of a run; it is the same in all charts and on the page."""
    return COLOURS[number % len(COLOURS)]


def joined(tables: Mapping[str, Sequence[Row]]) -> list[Row]:
    """Tables of several runs as one."""
    return [{"run": run} | row for run, table in tables.items() for row in table]


def curve_chart(name: str, title: str, caption: str, label: str, tables: Mapping[str, Sequence[Row]]) -> Chart:
    """Values by step, a dot per step, with the mean over the last twentieth of the run's steps as a line."""
    figure, (axes,) = panels()
    for number, (run, table) in enumerate(tables.items()):
        steps, values = column(table, "step"), column(table, "quality")
        window = smoothing(len(values))
        means = [fmean(values[max(i - window + 1, 0) : i + 1]) for i in range(len(values))]
        axes.plot(steps, values, ".", color=colour_of(number), alpha=0.35, markersize=4)
        axes.plot(steps, means, color=colour_of(number), linewidth=1.8, label=plain(run))
    axes.set(xlabel="training step", ylabel=label)
    if len(tables) > 1:
        legend(axes, columns=3)
    return Chart(name, title, caption, figure, joined(tables))


def smoothing(steps: int) -> int:
    """How many steps a mean spans."""
    return max(1, steps // 20)


def efficiency_chart(tables: Mapping[str, Sequence[Row]], label: str) -> Chart:
    """Score against judge tokens and calls: each run's way, its end marked (figures "Average score versus ...")."""
    figure, axes = panels(1, 2, sharey=True)
    for each, (key, unit) in zip(axes, COSTS, strict=True):
        for number, (run, table) in enumerate(tables.items()):
            costs, scores = column(table, key), column(table, "quality")
            each.plot(costs, scores, color=colour_of(number), alpha=0.6)
            each.plot(costs[-1:], scores[-1:], "o", color=colour_of(number), label=plain(run))
        _axis(each, unit)
    axes[0].set_ylabel(label)
    legend(axes[0], columns=3)
    caption = "Up and to the left is better. A line is a run from its first step to its last."
    return Chart("efficiency", "Score against judging cost", caption, figure, joined(tables))


def score_chart(scores: Mapping[str, float], totals: Mapping[str, tuple[int, int]]) -> Chart:
    """Final scores from elsewhere, such as benchmarks, against (tokens, calls)."""
    figure, axes = panels(1, 2, sharey=True)
    table: list[Row] = [
        {"run": run, "tokens": totals[run][0], "calls": totals[run][1], "score": scores[run]} for run in scores
    ]
    for each, (key, unit) in zip(axes, COSTS, strict=True):
        for row in table:
            number = list(totals).index(row["run"])
            each.plot([row[key]], [row["score"]], "o", color=colour_of(number), label=plain(row["run"]))
        _axis(each, unit)
    axes[0].set_ylabel("score given")
    legend(axes[0], columns=3)
    return Chart("scores", "Given scores against judging cost", "Up and to the left is better.", figure, table)


def _axis(axes: Axes, unit: str) -> None:
    axes.set(xlabel=unit, xlim=(0, None))
    axes.xaxis.set_major_locator(MaxNLocator(4))
    axes.xaxis.set_major_formatter(thousands)


def advantage_table(advantages: Mapping[str, Sequence[Sequence[float | None]]]) -> list[Row]:
    """By run and bin: the share of the advantages of one step that lie in it."""
    table = []
    for run, groups in advantages.items():
        values = [value for group in groups for value in group if value is not None]
        levels = [round(value / LEVELS) for value in values]
        for level in sorted(set(levels)):
            share = levels.count(level) / len(levels)
            table.append({"run": run, "advantage": round(level * LEVELS, 1), "share": share})
    return table


def advantage_chart(advantages: Mapping[str, Sequence[Sequence[float | None]]], step: int) -> Chart:
    """Normalised advantages at one step (figure "Advantages at step 191")."""
    figure, axes = panels(len(advantages), height=0.8 + 1.0 * len(advantages), sharex=True, sharey=True)
    table = advantage_table(advantages)
    for number, (each, run) in enumerate(zip(axes, advantages, strict=True)):
        bins = [row for row in table if row["run"] == run]
        each.bar(column(bins, "advantage"), column(bins, "share"), width=0.9 * LEVELS, color=colour_of(number))
        each.set_title(f"{plain(run)}: {distinct(advantages[run]):.1f} levels in a group", fontsize=9, loc="left")
        each.yaxis.set_major_formatter(PercentFormatter(1))
    axes[-1].set_xlabel("normalised advantage")
    figure.supylabel("share of rollouts", fontsize=9)
    caption = f"Of the method's reward, without the format reward, in bins of {LEVELS:g}."
    return Chart("advantages", f"Advantages at step {step}", caption, figure, table)


def distinct(groups: Sequence[Sequence[float | None]]) -> float:
    """Mean number of different advantages in a group."""
    return fmean(len({value for value in group if value is not None}) for group in groups)
