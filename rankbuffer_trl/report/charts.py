"""The charts of one run, each from one table of `collect.py`."""

from collections.abc import Sequence
from itertools import accumulate

from matplotlib.ticker import PercentFormatter

from ..buffer import SOURCES
from ..ranking import INSERTION_BINS
from ..store import BufferStore
from .chart import INK, Chart, column, legend, panels, thousands
from .collect import (
    Row,
    composition_table,
    growth_table,
    insertion_table,
    judge_table,
    log_table,
    maintenance_table,
    occupancy_table,
    reward_table,
)
from .figures import COLOURS, LABELS

BLUE, GREEN, RED, GOLD, GREY = (COLOURS[name] for name in ("refine", "right", "left", "bootstrap", "initial"))
# From below all anchors to above them: one hue for each end, greys and blues between.
INSERTION_COLOURS = ("#b5485d", "#d3d8de", "#a9bccb", "#7ba3c0", "#3d7ea6", "#2e8b57")
PANELS = 6  # epochs that the composition shows


def reward_chart(table: Sequence[Row]) -> Chart:
    """Mean and spread of the rewards, and what has none."""
    figure, (top, bottom) = panels(2, sharex=True)
    steps = column(table, "step")
    top.plot(steps, column(table, "mean"), color=INK, label="mean of all")
    top.plot(steps, column(table, "spread"), color=BLUE, label="std in a group")
    top.set(ylabel="reward")
    for name, colour, label in (
        ("tied", GOLD, "tied with another one"),
        ("unscored", RED, "without a reward"),
        ("empty", GREY, "without an answer"),
    ):
        bottom.plot(steps, column(table, name), color=colour, label=label, clip_on=False)
    bottom.set(xlabel="training step", ylabel="share of rollouts", ylim=(0, None))
    bottom.yaxis.set_major_formatter(PercentFormatter(1))
    legend(top, bottom, columns=3)
    caption = (
        "For rank rewards the mean says nothing, since it is about the same in every group; for scores it is the"
        " reward curve. What can change for both is how far the rewards of a group lie apart, and how many rollouts"
        " share a reward or have none."
    )
    return Chart("reward", "Reward: mean, spread, ties, gaps", caption, figure, table)


def cost_chart(
    name: str, title: str, caption: str, unit: str, table: Sequence[Row], parts: Sequence[tuple[str, str]]
) -> Chart:
    """A cost by step, stacked from its parts (column, label), and what it adds up to."""
    figure, (top, bottom) = panels(2, sharex=True)
    steps, low = column(table, "step"), [0.0] * len(table)
    for (key, label), colour in zip(parts, (BLUE, "#a9c6da", GOLD), strict=False):
        high = [a + b for a, b in zip(low, column(table, key), strict=True)]
        top.fill_between(steps, low, high, step="mid", color=colour, linewidth=0, label=label)
        low = high
    bottom.plot(steps, list(accumulate(low)), color=INK)
    top.set(ylabel=f"{unit} per step", ylim=(0, None))
    bottom.set(xlabel="training step", ylabel=f"{unit} so far", ylim=(0, None))
    for axes in (top, bottom):
        axes.yaxis.set_major_formatter(thousands)
    if len(parts) > 1:
        legend(top)
    return Chart(name, title, f"{sum(low):,.0f} {unit} in all. {caption}", figure, table)


def judge_charts(table: Sequence[Row]) -> list[Chart]:
    """Calls, tokens and seconds: wall time where the log has it of all steps, else what the requests add up to."""
    tokens = [row | {"new_tokens": row["prompt_tokens"] - row["cached_tokens"]} for row in table]
    parts = [("new_tokens", "prompt"), ("cached_tokens", "prompt, cached"), ("completion_tokens", "completion")]
    paper = "Only parsed answers count, as in the paper."
    charts = [
        cost_chart("judge_calls", "Judge: calls", paper, "calls", table, [("calls", "calls")]),
        cost_chart("judge_tokens", "Judge: tokens", paper, "tokens", tokens, parts),
    ]
    title, caption, key = "Judge: seconds", "Wall time of judging.", "seconds"
    if any(row[key] is None for row in table):
        title, key = "Judge: seconds of requests", "request_seconds"
        caption = "Many are in flight at once; wall time is in the CSV file, as far as the trainer's log reaches."
    if any(row[key] for row in table):
        charts.append(cost_chart("judge_seconds", title, caption, "seconds", table, [(key, "seconds")]))
    return charts


def failure_chart(table: Sequence[Row]) -> Chart:
    """Judgments that failed, and attempts that were repeats."""
    figure, (axes,) = panels()
    steps = column(table, "step")
    repeats = [row["attempts"] - row["calls"] - row["failures"] for row in table]
    axes.bar(steps, column(table, "failures"), width=1.0, color=RED, label="judgments that failed for good")
    axes.plot(steps, repeats, color=GOLD, label="requests that were repeated")
    axes.set(xlabel="training step", ylabel="per step", ylim=(0, max(1, *repeats, *column(table, "failures"))))
    legend(axes)
    failed, calls = sum(column(table, "failures")), sum(column(table, "calls"))
    caption = f"{failed:,.0f} of {failed + calls:,.0f} judgments failed, {sum(repeats):,.0f} requests were repeated."
    return Chart("failures", "Judge: failures", caption, figure, table)


def growth_chart(table: Sequence[Row]) -> Chart:
    """Anchors by source (figure "Dynamic buffer evolution", a)."""
    figure, (axes,) = panels()
    epochs, low = column(table, "epoch"), [0.0] * len(table)
    for source in present(table):
        values = column(table, source)
        axes.bar(epochs, values, bottom=low, color=COLOURS[source], label=LABELS[source], width=0.8)
        low = [a + b for a, b in zip(low, values, strict=True)]
    axes.set(xlabel="end of epoch", ylabel="anchors per query")
    legend(axes)
    caption = f"{table[0]['anchors']:.2f} anchors per query after epoch 0, {table[-1]['anchors']:.2f} now."
    return Chart("buffer_growth", "Buffers: anchors by source", caption, figure, table)


def present(table: Sequence[Row]) -> list[str]:
    """The sources that occur."""
    return [source for source in SOURCES if any(row[source] for row in table)]


def composition_chart(table: Sequence[Row]) -> Chart:
    """Sources along the quality scale, at the end of some epochs (figure "Dynamic buffer evolution", b)."""
    epochs = sorted({row["epoch"] for row in table})
    last = len(epochs) - 1
    shown = sorted({epochs[round(i * last / (PANELS - 1))] for i in range(PANELS)})
    columns = min(len(shown), 3)
    rows = -(-len(shown) // columns)
    figure, axes = panels(rows, columns, sharex=True, sharey=True)
    for each, epoch in zip(axes, shown, strict=False):
        bins = [row for row in table if row["epoch"] == epoch]
        low = [0.0] * len(bins)
        for source in present(table):
            shares = [row[source] / row["anchors"] if row["anchors"] else 0.0 for row in bins]
            middles = [(row["from"] + row["to"]) / 2 for row in bins]
            each.bar(middles, shares, bottom=low, width=9.4, color=COLOURS[source], label=LABELS[source])
            low = [a + b for a, b in zip(low, shares, strict=True)]
        each.set_title(f"epoch {epoch}", fontsize=9)
        each.set(xlim=(0, 100), ylim=(0, 1), xticks=[0, 50, 100])
        each.yaxis.set_major_formatter(PercentFormatter(1))
    for spare in axes[len(shown) :]:
        spare.set_visible(False)
    axes[len(shown) - 1 - (columns - 1) // 2].set_xlabel("normalised anchor rank: 0 worst, 100 best")
    legend(axes[0])
    caption = "Of the anchors in each tenth of the scale, the share from each source at the end of an epoch."
    if len(shown) < len(epochs):
        caption += f" {len(shown)} of {len(epochs)} epochs; the CSV file has them all."
    return Chart("composition", "Buffers: sources along the quality scale", caption, figure, table)


def insertion_chart(table: Sequence[Row]) -> Chart:
    """Where rollouts are placed among the anchors."""
    figure, (axes,) = panels()
    placed = [row for row in table if row["placed"]]
    low = [0.0] * len(placed)
    for name, colour in zip(INSERTION_BINS, INSERTION_COLOURS, strict=True):
        high = [a + b for a, b in zip(low, column(placed, name), strict=True)]
        label = {"below": "below all", "above": "above all"}.get(name, name.replace("quarter", "quarter "))
        axes.fill_between(column(placed, "step"), low, high, step="mid", color=colour, linewidth=0, label=label)
        low = high
    axes.set(xlabel="training step", ylabel="share of rollouts", ylim=(0, 1))
    axes.yaxis.set_major_formatter(PercentFormatter(1))
    legend(axes, columns=3)
    caption = "Below or above all anchors of the buffer, or in one of the quarters of its inner intervals."
    return Chart("insertions", "Buffers: where rollouts are placed", caption, figure, table)


def occupancy_chart(table: Sequence[Row]) -> Chart:
    """How many intervals there are, and how many hold a rollout."""
    figure, (top, bottom) = panels(2, sharex=True)
    steps = column(table, "step")
    top.plot(steps, column(table, "intervals"), color=GREY, label="intervals of a buffer")
    top.plot(steps, column(table, "occupied"), color=BLUE, label="of them, with a rollout of the group")
    top.set(ylabel="per group", ylim=(0, None))
    bottom.plot(steps, column(table, "alone"), color=GREEN)
    bottom.set(xlabel="training step", ylabel="alone in its interval", ylim=(0, None))
    bottom.yaxis.set_major_formatter(PercentFormatter(1))
    legend(top)
    caption = "Only rollouts that share an interval are ranked among themselves."
    return Chart("occupancy", "Buffers: occupied intervals", caption, figure, table)


def maintenance_chart(table: Sequence[Row]) -> Chart:
    """Anchors added and pruned by epoch, by source."""
    figure, (axes,) = panels()
    epochs = column(table, "epoch")
    for sign, kind in ((1, "added"), (-1, "pruned")):
        low = [0.0] * len(table)
        for source in SOURCES:
            values = [sign * row[f"{kind}_{source}"] for row in table]
            if any(values):
                axes.bar(epochs, values, bottom=low, color=COLOURS[source], width=0.8, label=LABELS[source])
                low = [a + b for a, b in zip(low, values, strict=True)]
    axes.axhline(0, color=INK, linewidth=0.8)
    axes.set(xlabel="epoch", ylabel="pruned | added")
    axes.yaxis.set_major_formatter(lambda value, _: f"{abs(value):,.0f}")
    legend(axes)
    added, pruned = sum(column(table, "added")), sum(column(table, "pruned"))
    caption = f"{added:,.0f} anchors were added over all queries and {pruned:,.0f} pruned."
    return Chart("maintenance", "Buffers: anchors added and pruned", caption, figure, table)


def log_chart(table: Sequence[Row]) -> Chart:
    """What the trainer logged of the policy, up to the newest checkpoint."""
    names = [name for name in table[0] if name != "step"]
    figure, axes = panels(len(names), height=1.1 * len(names) + 0.4, sharex=True)
    for each, name in zip(axes, names, strict=True):
        each.plot(column(table, "step"), column(table, name), color=BLUE)
        each.set_title(name, fontsize=9, loc="left")
    axes[-1].set_xlabel("training step")
    return Chart("log", "Policy: the trainer's log", "Up to the newest checkpoint.", figure, table)


def run_charts(store: BufferStore, log: Sequence[dict]) -> list[Chart]:
    """All that a run has data for: a method without a buffer has no charts of it."""
    charts = [reward_chart(reward_table(store))]
    if growth := growth_table(store):
        compositions, changes = composition_table(store), maintenance_table(store)
        charts += [growth_chart(growth), composition_chart(compositions), maintenance_chart(changes)]
    insertions = insertion_table(store)
    if any(row["placed"] for row in insertions):
        charts += [insertion_chart(insertions), occupancy_chart(occupancy_table(store))]
    if judge := judge_table(store, log):
        charts += judge_charts(judge)
        if any(row["attempts"] > row["calls"] for row in judge):
            charts.append(failure_chart(judge))
    if measures := log_table(log):
        charts.append(log_chart(measures))
    return charts
