"""All charts: those of one run, and those that compare runs. Each is drawn from one table of `tables.py`."""

from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate
from statistics import stdev

import matplotlib
from matplotlib.axes import Axes
from matplotlib.colors import LinearSegmentedColormap
from matplotlib.ticker import MaxNLocator, PercentFormatter

from rankbuffer_trl.buffer import SOURCES
from rankbuffer_trl.groups import Rubric
from rankbuffer_trl.ranking import INSERTION_BINS
from rankbuffer_trl.store import history

from . import tables
from .chart import (
    BLUE,
    GOLD,
    GREEN,
    GREY,
    INK,
    ORANGE,
    PURPLE,
    RED,
    SLATE,
    STYLE,
    TEAL,
    Chart,
    column,
    legend,
    panels,
    plain,
    thousands,
    window,
)
from .progress import gain_table, reach_table, rise_table
from .runs import Run
from .tables import BIN_WIDTH, TableRow, advantage_bins, distinct, joined, trailing_means

SOURCE_COLOURS = {
    "initial": GREY,
    "bootstrap": GOLD,
    "left": RED,
    "refine": BLUE,
    "right": GREEN,
    "selected": PURPLE,
    "candidate": ORANGE,
}
SOURCE_LABELS = {
    "initial": "initial responses",
    "bootstrap": "bootstrap",
    "left": "left boundary",
    "refine": "local refinement",
    "right": "right boundary",
    "selected": "selected by the manager",
    "candidate": "candidate",
}
RUN_COLOURS = (BLUE, ORANGE, GREEN, RED, PURPLE, GOLD, TEAL, SLATE)
# From below all anchors to above them: one hue for each end, greys and blues between.
INSERTION_COLOURS = (RED, "#d3d8de", "#a9bccb", "#7ba3c0", BLUE, GREEN)
FLAT = 0.05  # a mean reward that varies by less (standard deviation over steps) is no curve to look at
PROBE_LABELS = {
    "words": "words",
    "markup": "share with headings or lists",
    "repeated": "repeated 4-grams",
    "commonest_word": "share of the commonest word",
    "rubric_words": "words of the rubrics",
}
PLACES = 50  # visits that the map of queries shows
PANELS = 6  # epochs that the composition shows
COSTS = (("tokens", "judge tokens"), ("calls", "judge calls"))


def reward_chart(table: Sequence[TableRow], flat: bool = False) -> Chart:
    """Draw mean and spread of the rewards unless they are flat, and the shares of tied, unscored or empty rollouts."""
    figure, (*upper, bottom) = panels(1 if flat else 2, sharex=True)
    steps = column(table, "step")
    for top in upper:
        top.plot(steps, column(table, "mean"), color=INK, label="mean of all")
        top.plot(steps, column(table, "spread"), color=BLUE, label="std in a group")
        top.set(ylabel="reward")
    for name, colour, label in (
        ("tied", GOLD, "tied with another rollout"),
        ("unscored", RED, "without a reward"),
        ("empty", GREY, "without an answer"),
    ):
        # Else the axis hides half of a line at 0.
        bottom.plot(steps, column(table, name), color=colour, label=label, clip_on=False)
    bottom.set(xlabel="training step", ylabel="share of rollouts", ylim=(0, None))
    bottom.yaxis.set_major_formatter(PercentFormatter(1))
    legend(*upper, bottom, columns=3)
    caption = (
        "The mean of these rewards is the same at every step, as that of ranks is, so it is not drawn."
        if flat
        else "The mean of scores is the reward curve. The rewards of a group can move apart."
    )
    caption += " Rollouts can share a reward or have none."
    return Chart(
        "reward", "Reward: ties, gaps" if flat else "Reward: mean, spread, ties, gaps", caption, figure, table
    )


def cost_chart(
    name: str, title: str, caption: str, unit: str, table: Sequence[TableRow], parts: Sequence[tuple[str, str]]
) -> Chart:
    """Draw a cost by step, stacked from its parts (column, label), and its sum so far."""
    figure, (top, bottom) = panels(2, sharex=True)
    costs = [sum(row[key] for key, _ in parts) for row in table]  # of all rows, since a curve may draw means
    stack_areas(top, table, dict(parts), (BLUE, "#a9c6da", GOLD))
    steps = column(table, "step")
    bottom.plot(steps, column([{"so far": cost} for cost in accumulate(costs)], "so far"), color=INK)
    top.set(ylabel=f"{unit} per step", ylim=(0, None))
    bottom.set(xlabel="training step", ylabel=f"{unit} so far", ylim=(0, None))
    for axes in (top, bottom):
        axes.yaxis.set_major_formatter(thousands)
    if len(parts) > 1:
        legend(top)
    return Chart(name, title, f"{sum(costs):,.0f} {unit} in all. {caption}", figure, table)


def stack_areas(axes: Axes, table: Sequence[TableRow], labels: Mapping[str, str], colours: Sequence[str]) -> None:
    """Draw columns, which have labels, as areas on one another by step."""
    values = [column(table, name) for name in labels]
    axes.stackplot(column(table, "step"), values, labels=labels.values(), colors=colours, step="mid", linewidth=0)


def stack_sources(axes: Axes, places: Sequence[float], values: Mapping[str, Sequence[float]], width: float) -> None:
    """Draw bars on one another, one for each source."""
    low = [0.0] * len(places)
    for source, heights in values.items():
        axes.bar(places, heights, width, low, color=SOURCE_COLOURS[source], label=SOURCE_LABELS[source])
        low = [a + b for a, b in zip(low, heights, strict=True)]


def judge_charts(table: Sequence[TableRow]) -> list[Chart]:
    """Draw calls, tokens and seconds."""
    tokens = [row | {"new_tokens": row["prompt_tokens"] - row["cached_tokens"]} for row in table]
    parts = [("new_tokens", "prompt"), ("cached_tokens", "prompt, cached"), ("completion_tokens", "completion")]
    paper = "Only parsed answers are counted, as in the paper."
    charts = [
        cost_chart("judge_calls", "Judge: calls", paper, "calls", table, [("calls", "calls")]),
        cost_chart("judge_tokens", "Judge: tokens", paper, "tokens", tokens, parts),
    ]
    title, caption, key = "Judge: seconds", "Time spent waiting for the judge.", "seconds"
    if any(row[key] is None for row in table):  # wall time needs a log of all steps
        title, key = "Judge: seconds of requests", "request_seconds"
        caption = (
            "Many requests run at the same time. The CSV file has the wall time of the steps in the trainer's log."
        )
    if any(row[key] for row in table):
        charts.append(cost_chart("judge_seconds", title, caption, "seconds", table, [(key, "seconds")]))
    return charts


def failure_chart(table: Sequence[TableRow]) -> Chart:
    """Draw the judgments that failed and the requests that were repeats."""
    figure, (axes,) = panels()
    # Each call or failure takes one request.
    table = [row | {"repeats": row["attempts"] - row["calls"] - row["failures"]} for row in table]
    steps, failures, repeats = (column(table, name) for name in ("step", "failures", "repeats"))
    axes.bar(steps, failures, width=window(table), color=RED, label="judgments that failed after all attempts")
    axes.plot(steps, repeats, color=GOLD, label="requests that were repeated")
    axes.set(xlabel="training step", ylabel="per step", ylim=(0, max(1, *repeats, *failures)))
    legend(axes)
    failed, calls, again = (sum(row[name] for row in table) for name in ("failures", "calls", "repeats"))
    caption = f"{failed:,.0f} of {failed + calls:,.0f} judgments failed, {again:,.0f} requests were repeated."
    return Chart("failures", "Judge: failures", caption, figure, table)


def growth_chart(table: Sequence[TableRow]) -> Chart:
    """Draw anchors by source (figure "Dynamic buffer evolution", a)."""
    figure, (axes,) = panels()
    epochs, width = column(table, "epoch"), 0.8 * window(table)
    stack_sources(axes, epochs, {source: column(table, source) for source in present(table)}, width)
    axes.set(xlabel="end of epoch", ylabel="anchors per query")
    legend(axes)
    caption = f"{table[0]['anchors']:.2f} anchors per query after epoch 0, {table[-1]['anchors']:.2f} now."
    return Chart("buffer_growth", "Buffers: anchors by source", caption, figure, table)


def present(table: Sequence[TableRow]) -> list[str]:
    """Return the sources that occur in a table."""
    return [source for source in SOURCES if any(row[source] for row in table)]


def composition_chart(table: Sequence[TableRow]) -> Chart:
    """Draw the sources along the quality scale at the end of some epochs (figure "Dynamic buffer evolution", b)."""
    epochs = sorted({row["epoch"] for row in table})
    last = len(epochs) - 1
    # Evenly spread, with the first and the last.
    epochs_shown = sorted({epochs[round(i * last / (PANELS - 1))] for i in range(PANELS)})
    columns = min(len(epochs_shown), 3)
    rows = -(-len(epochs_shown) // columns)
    figure, axes = panels(rows, columns, sharex=True, sharey=True)
    for axis, epoch in zip(axes, epochs_shown, strict=False):
        bins = [row for row in table if row["epoch"] == epoch]
        middles = [(row["from"] + row["to"]) / 2 for row in bins]
        shares = {source: [row[source] / (row["anchors"] or 1) for row in bins] for source in present(table)}
        stack_sources(axis, middles, shares, 9.4)
        axis.set_title(f"epoch {epoch}", fontsize=9)
        axis.set(xlim=(0, 100), ylim=(0, 1), xticks=[0, 50, 100])
        axis.yaxis.set_major_formatter(PercentFormatter(1))
    for spare in axes[len(epochs_shown) :]:
        spare.set_visible(False)
    # A label of the whole figure would lie under the legend.
    axes[(rows - 1) * columns].set_xlabel("rank: 0 worst, 100 best", loc="left")
    legend(axes[0])
    caption = "Share of each source among the anchors in each tenth of the scale, at the end of an epoch."
    if len(epochs_shown) < len(epochs):
        caption += f" Shown are {len(epochs_shown)} of {len(epochs)} epochs. The CSV file has all of them."
    return Chart("composition", "Buffers: sources along the quality scale", caption, figure, table)


def insertion_chart(table: Sequence[TableRow]) -> Chart:
    """Draw where rollouts are placed among the anchors."""
    figure, (axes,) = panels()
    placed = [row for row in table if row["placed"]]  # a step without a placement has no shares
    labels = {"below": "below all", "above": "above all"}
    labels = {name: labels.get(name, name.replace("quarter", "quarter ")) for name in INSERTION_BINS}
    stack_areas(axes, placed, labels, INSERTION_COLOURS)
    axes.set(xlabel="training step", ylabel="share of rollouts", ylim=(0, 1))
    axes.yaxis.set_major_formatter(PercentFormatter(1))
    legend(axes, columns=3)
    caption = (
        "Share of rollouts below all anchors, above all anchors, or in each quarter of the intervals between anchors."
        " The anchors get better with the policy, so a larger lowest quarter need not mean worse answers."
    )
    return Chart("insertions", "Buffers: where rollouts are placed", caption, figure, table)


def occupancy_chart(table: Sequence[TableRow]) -> Chart:
    """Draw how many intervals there are, and how many of them hold a rollout."""
    figure, (top, bottom) = panels(2, sharex=True)
    steps = column(table, "step")
    top.plot(steps, column(table, "intervals"), color=GREY, label="intervals of a buffer")
    top.plot(steps, column(table, "occupied"), color=BLUE, label="intervals that hold a rollout")
    top.set(ylabel="per group", ylim=(0, None))
    bottom.plot(steps, column(table, "alone"), color=GREEN)
    bottom.set(xlabel="training step", ylabel="alone in its interval", ylim=(0, None))
    bottom.yaxis.set_major_formatter(PercentFormatter(1))
    legend(top)
    caption = "Only rollouts that share an interval are compared with each other."
    return Chart("occupancy", "Buffers: occupied intervals", caption, figure, table)


def maintenance_chart(table: Sequence[TableRow]) -> Chart:
    """Draw the anchors that were added and pruned in each epoch, by source."""
    figure, (axes,) = panels()
    epochs, width = column(table, "epoch"), 0.8 * window(table)
    for sign, kind in ((1, "added"), (-1, "pruned")):
        changes = {source: [sign * value for value in column(table, f"{kind}_{source}")] for source in SOURCES}
        stack_sources(axes, epochs, {source: values for source, values in changes.items() if any(values)}, width)
    axes.axhline(0, color=INK, linewidth=0.8)
    axes.set(xlabel="epoch", ylabel="pruned | added")
    axes.yaxis.set_major_formatter(lambda value, _: f"{abs(value):,.0f}")
    legend(axes)
    added, pruned = (sum(row[name] for row in table) for name in ("added", "pruned"))
    caption = f"{added:,.0f} anchors were added over all queries and {pruned:,.0f} pruned."
    return Chart("maintenance", "Buffers: anchors added and pruned", caption, figure, table)


def log_chart(table: Sequence[TableRow]) -> Chart:
    """Draw what the trainer logged of the policy up to the newest checkpoint."""
    names = [name for name in table[0] if name != "step"]
    figure, axes = panels(len(names), height=1.1 * len(names) + 0.4, sharex=True)
    for axis, name in zip(axes, names, strict=True):
        axis.plot(column(table, "step"), column(table, name), color=BLUE)
        axis.set_title(name, fontsize=9, loc="left")
    axes[-1].set_xlabel("training step")
    return Chart(
        "log",
        "Policy: the trainer's log",
        "Values from the trainer's log, up to the newest checkpoint.",
        figure,
        table,
    )


def run_colour(number: int) -> str:
    """Return the colour of a run, which is the same in all charts and on the page."""
    return RUN_COLOURS[number % len(RUN_COLOURS)]


def curve_chart(name: str, title: str, caption: str, label: str, runs: Mapping[str, Sequence[TableRow]]) -> Chart:
    """Draw the quality by step: a dot per step, and the mean over the last twentieth of the run's steps as a line."""
    figure, (axes,) = panels()
    for number, (run, table) in enumerate(runs.items()):
        steps, dots, colour = column(table, "step"), column(table, "quality"), run_colour(number)
        means = trailing_means(dots, smoothing(len(dots)))
        axes.plot(steps, dots, ".", color=colour, alpha=0.35, markersize=4)
        axes.plot(steps, means, color=colour, linewidth=1.8, label=plain(run))
    axes.set(xlabel="training step", ylabel=label)
    if len(runs) > 1:
        legend(axes, columns=3)
    return Chart(name, title, caption, figure, joined(runs))


def smoothing(steps: int) -> int:
    """Return the number of steps that a mean spans."""
    return max(1, steps // 20)


def efficiency_chart(runs: Mapping[str, Sequence[TableRow]], label: str) -> Chart:
    """Draw score against judge tokens and calls, one line per run (figures "Average score versus ...")."""
    figure, axes = panels(1, 2, sharey=True)
    for axis, (key, unit) in zip(axes, COSTS, strict=True):
        for number, (run, table) in enumerate(runs.items()):
            costs, scores = column(table, key), column(table, "quality")
            axis.plot(costs, scores, color=run_colour(number))
            axis.plot(costs[-1:], scores[-1:], "o", color=run_colour(number), label=plain(run))
        _cost_axis(axis, unit)
    axes[0].set_ylabel(label)
    legend(axes[0], columns=3)
    caption = "Up and to the left is better. Each line is one run, from its first step to its last."
    return Chart("efficiency", "Score against judging cost", caption, figure, joined(runs))


def score_chart(ours: Sequence[TableRow], theirs: Sequence[TableRow]) -> Chart:
    """Draw average scores against judging cost, ours and the paper's (figures "Average score versus ...")."""
    figure, axes = panels(1, 2, sharey=True)
    colours = {method: run_colour(i) for i, method in enumerate(dict.fromkeys(row["method"] for row in ours))}
    for axis, (key, unit) in zip(axes, COSTS, strict=True):
        for row in theirs:
            colour = colours.get(row["method"], GREY)
            axis.plot(row[key], row["average"], "o", color=colour, markerfacecolor="none", label="the paper's")
        for row in ours:
            axis.plot(row[key], row["average"], "o", color=colours[row["method"]], label=plain(row["method"]))
        _cost_axis(axis, unit)
    axes[0].set_ylabel("average of the four benchmarks")
    legend(axes[0], columns=3)
    caption = "Up and to the left is better. Open circles are the paper's, in the colour of the same method."
    return Chart("scores", "Average score against judging cost", caption, figure, [*ours, *theirs])


def _cost_axis(axes: Axes, unit: str) -> None:
    axes.set(xlabel=unit, xlim=(0, None))
    axes.xaxis.set_major_locator(MaxNLocator(4))
    axes.xaxis.set_major_formatter(thousands)


def advantage_chart(advantages: Mapping[str, Sequence[Sequence[float | None]]], step: int) -> Chart:
    """Draw the normalised advantages of each run at one step (figure "Advantages at step 191")."""
    figure, axes = panels(len(advantages), height=0.8 + 1.0 * len(advantages), sharex=True, sharey=True)
    runs = {run: advantage_bins(groups) for run, groups in advantages.items()}
    for number, (axis, run) in enumerate(zip(axes, advantages, strict=True)):
        bins = runs[run]
        axis.bar(column(bins, "advantage"), column(bins, "share"), width=0.9 * BIN_WIDTH, color=run_colour(number))
        axis.set_title(f"{plain(run)}: {distinct(advantages[run]):.1f} levels in a group", fontsize=9, loc="left")
        axis.yaxis.set_major_formatter(PercentFormatter(1))
    axes[-1].set_xlabel("normalised advantage")
    figure.supylabel("share of rollouts", fontsize=9, color=INK)
    caption = f"Advantages from the method's reward, without the format reward, in bins of {BIN_WIDTH:g}."
    return Chart("advantages", f"Advantages at step {step}", caption, figure, joined(runs))


def gain_chart(table: Sequence[TableRow]) -> Chart:
    """Draw how often the judge prefers new responses to those of the previous visit, with intervals."""
    figure, (axes,) = panels()
    rows = [row for row in table if row["probability"] is not None]
    steps, middle = column(rows, "step"), column(rows, "probability")
    below = [p - low for p, low in zip(middle, column(rows, "low"), strict=True)]
    over = [high - p for p, high in zip(middle, column(rows, "high"), strict=True)]
    axes.axhline(0.5, color=GREY, linewidth=1)
    axes.errorbar(steps, middle, yerr=[below, over], color=BLUE, marker="o", markersize=4, linewidth=1.2, capsize=2)
    axes.set(xlabel="training step", ylabel="preferred to the last visit's", ylim=(0, 1))
    axes.yaxis.set_major_formatter(PercentFormatter(1))
    caption = (
        "How often the judge prefers a response to one of the same query's previous visit. 50 % is no change. This is"
        " estimated from the places of both among shared anchors. The bars are 95 % intervals over queries."
    )
    if hidden := len(table) - len(rows):
        caption += f" {hidden} of {len(table)} windows are not shown: the anchors do not reach the policy there."
    return Chart("gains", "Progress: against the previous visit", caption, figure, table)


def rise_chart(table: Sequence[TableRow]) -> Chart:
    """Draw who rises and who does not: a row per query, a column per visit."""
    figure, (axes,) = panels()
    visits = [name for name in table[0] if name != "query"]
    size = -(-len(visits) // PLACES)  # visits that one column stands for
    columns = [column(table, name) for name in visits[size - 1 :: size]]  # the last visit of each column
    ends = (size - size / 2, size * len(columns) + size / 2, 0, len(table))
    colours = LinearSegmentedColormap.from_list("rise", (RED, "#e6e8eb", BLUE))
    drawn = list(zip(*columns, strict=True))
    image = axes.imshow(
        drawn, colours, aspect="auto", vmin=0, vmax=1, origin="lower", extent=ends, interpolation="none"
    )
    axes.grid(False)
    axes.set(xlabel="visit of a query, from 0", ylabel="queries, the lowest first")
    with matplotlib.rc_context(STYLE):  # a colour bar makes axes of its own
        figure.colorbar(image, format=PercentFormatter(1))
    caption = (
        "How often the judge prefers a later visit of a query to its first one: blue has risen, red has fallen. Both"
        " stand among the anchors that they share. An empty place has none that tells."
    )
    return Chart("queries", "Progress: each query against its first visit", caption, figure, table)


def reach_chart(table: Sequence[TableRow], best: int) -> Chart:
    """Draw the share of rollouts above each initial anchor, by epoch. The one of the number `best` is the best."""
    figure, (axes,) = panels()
    anchors = list(dict.fromkeys(row["anchor"] for row in table))
    for place, anchor in enumerate(anchors):
        rows = [row for row in table if row["anchor"] == anchor]
        colour, number = run_colour(place), history.initial_number(anchor)  # others may have left all buffers
        label = {0: "the worst", best: "the best"}.get(number, f"number {number + 1} from below")
        epochs = column(rows, "epoch")
        axes.plot(epochs, column(rows, "share"), color=colour, marker="o", markersize=4, label=label)
        axes.fill_between(epochs, column(rows, "low"), column(rows, "high"), color=colour, alpha=0.15, linewidth=0)
    axes.set(xlabel="epoch", ylabel="rollouts above", ylim=(0, 1))
    axes.yaxis.set_major_formatter(PercentFormatter(1))
    legend(axes)
    caption = (
        "Share of the rollouts that the judge placed above a response of the data set, over the same queries in every"
        " epoch. The bands are 95 % intervals."
    )
    return Chart("reach", "Progress: against the data set's responses", caption, figure, table)


def probe_chart(table: Sequence[TableRow]) -> Chart:
    """Draw what answers look like, and how far the rewards of a group follow it."""
    # A line that is zero at every step says nothing. There are always words.
    names = [name for name in PROBE_LABELS if name == "words" or any(row.get(name) for row in table)]
    figure, axes = panels(len(names), 2, height=1.1 * len(names) + 0.6, sharex=True)
    for name, left, right in zip(names, axes[::2], axes[1::2], strict=True):
        left.plot(column(table, "step"), column(table, name), color=BLUE)
        left.set_title(PROBE_LABELS[name], fontsize=9, loc="left")
        left.set(ylim=(0, None))
        right.axhline(0, color=GREY, linewidth=1)
        if f"{name}_with_reward" in table[0]:
            right.plot(column(table, "step"), column(table, f"{name}_with_reward"), ".", color=ORANGE, markersize=4)
        right.set(ylim=(-1.05, 1.05))  # the range of tau-b, with room for the dots
    axes[1].set_title("tau-b with the reward", fontsize=9, loc="left")
    axes[-2].set_xlabel("training step")
    caption = (
        "No judge is asked. On the right, 1 means that in every group, answers with more of it have higher rewards."
        " If a line rises on the left and lies high on the right, read some answers: the judge may have a bias. Read"
        " them, too, if repeats rise."
    )
    return Chart("probes", "Policy: what answers look like", caption, figure, table)


def run_charts(run: Run, rubrics: Callable[[str], Sequence[Rubric]] = lambda query_id: ()) -> list[Chart]:
    """Draw every chart that a run has data for. `rubrics` tells those of a query."""
    charts, store, log = [], run.store, run.log
    rows = gain_table(run.visits)
    if any(row["probability"] is not None for row in rows):
        charts.append(gain_chart(rows))
    if rises := rise_table(run.visits):
        charts.append(rise_chart(rises))
    reach_rows = reach_table(run.visits)
    if len({row["epoch"] for row in reach_rows}) > 1:  # one epoch shows no progress
        best = max(history.initial_number(ids[-1]) for ids in history.initial_anchors(store).values())
        charts.append(reach_chart(reach_rows, best))
    rewards = run.tables.rewards
    means = [row["mean"] for row in rewards if row["mean"] is not None]
    flat = len(means) < 2 or stdev(means) < FLAT
    if not flat:  # the mean of ranks is the same at every step
        charts.append(reward_chart(rewards))
    if growth := run.growth:  # a method without a buffer has none
        compositions, changes = tables.composition_table(store), run.tables.maintenance
        charts += [growth_chart(growth), composition_chart(compositions), maintenance_chart(changes)]
    insertions = run.tables.insertions
    if any(row["placed"] for row in insertions):
        charts += [insertion_chart(insertions), occupancy_chart(run.tables.occupancy)]
    if judge := tables.judge_table(store, log):
        charts += judge_charts(judge)
        if any(row["attempts"] > row["calls"] for row in judge):  # else nothing failed or was repeated
            charts.append(failure_chart(judge))
    if probes := tables.probe_table(store, rubrics, log):
        charts.append(probe_chart(probes))
    if measures := tables.log_table(log):
        charts.append(log_chart(measures))
    if flat and any(row[name] for row in rewards for name in ("tied", "unscored", "empty")):
        charts.append(reward_chart(rewards, flat))  # without the mean, which says nothing where it is that of ranks
    return charts
