"""The rows of docs/results/weak_judge.md: a real policy that learned under a real judge, one row per method.

    python -m experiments.weak_judge.report --runs runs/weak_judge            # reads the folders of the runs
    python -m experiments.weak_judge.report                                    # reads weak_judge.json.gz again

A run is a folder of `rankbuffer-train`. Its comparisons, of `rankbuffer-compare`, are in `compared/NAME-SET`
beside it, where SET is `trained` or `kept_apart`. What is kept has every answer with its reward, and what the
comparison wrote. Shares of duels are counted again from their verdicts. The first seven rows have none: their shares
are those that `compare` printed. The script prints tables and, at the end, one JSON line; `--figure` draws.
"""

import argparse
import gzip
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from rich.console import Console
from rich.table import Table

from rankbuffer_tools.compare.duel import duel_score
from rankbuffer_tools.report.runs import open_runs
from rankbuffer_trl.judge import Reading
from rankbuffer_trl.store import history

HERE = Path(__file__).parent
KEPT = HERE / "weak_judge.json.gz"
LOGGED = {  # by step
    "tokens": "completions/mean_length",
    "cut": "completions/clipped_ratio",
    "reward": "rewards/rank_reward/mean",
    "reward_spread": "rewards/rank_reward/std",
    "tied": "rank/ties",
    "unscored": "rank/unscored",
    "entropy": "entropy",
    "calls": "judge/calls",
    "attempts": "judge/attempts",
    "prompt_tokens": "judge/prompt_tokens",
    "cached_tokens": "judge/cached_tokens",
    "completion_tokens": "judge/completion_tokens",
    "judge_seconds": "judge/seconds",
    "hidden": "judge/hidden",
    "sampling_seconds": "rollouts/seconds",
    "seconds": "step_time",
}
SETS = {"trained": "training prompts", "kept_apart": "prompts kept apart"}
JUDGES = {"with_rubrics": "the judge", "without_rubrics": "without rubrics"}
DUELS = (("trained", "with_rubrics"), ("kept_apart", "with_rubrics"), ("kept_apart", "without_rubrics"))
WINDOW = 5  # steps in a moving mean

Row = dict[str, Any]


def read_run(folder: Path) -> Row:
    """Return what a run logged by step, and its comparisons by set and judge."""
    state = max(folder.glob("checkpoint-*/trainer_state.json"), key=lambda path: int(path.parent.name.split("-")[1]))
    logs = [log for log in json.loads(state.read_text())["log_history"] if "step_time" in log]
    steps = {name: [round(log[key], 4) for log in logs] for name, key in LOGGED.items() if key in logs[0]}
    compared = {}
    for name in SETS:
        files = {judge: folder.parent / "compared" / f"{folder.name}-{name}" / f"{judge}.json" for judge in JUDGES}
        found = {judge: json.loads(path.read_text()) for judge, path in files.items() if path.is_file()}
        compared[name] = {judge: {**each, "models": None} for judge, each in found.items()}
    return {"steps": steps, "compared": compared, "visits": read_visits(folder)}


def counted(found: Row) -> Row:
    """Return a comparison with the shares that its verdicts give; as it is if they were not kept."""
    if "verdicts" not in found:
        return found
    said = {name: Reading.of(each) if isinstance(each, dict) else each for name, each in found["verdicts"].items()}
    again = duel_score(found["answers"], said)
    return found | {**again, "pairs": again["duels"], "wins": {n: asdict(each) for n, each in again["wins"].items()}}


def read_visits(folder: Path) -> list[Row]:
    """Return the visits of a run in the order of its steps, each with its answers and their rewards."""
    with open_runs([folder]) as (run,):
        texts = {
            (id, response.id): response.text
            for id in history.query_ids(run.store)
            for response in history.responses(run.store, id)
        }
        return [
            {
                "query_id": group.query_id,
                "epoch": group.epoch,
                "step": group.step,
                "rewards": [reward and round(reward, 4) for reward in group.rewards],
                "answers": [texts.get((group.query_id, f"{group.step}-{i}"), "") for i in range(len(group.rewards))],
            }
            for group in history.groups(run.store)
        ]


def smooth(values: Sequence[float]) -> list[float]:
    """Return the mean of up to `WINDOW` values that end at each place."""
    return [fmean(values[max(0, i + 1 - WINDOW) : i + 1]) for i in range(len(values))]


def part(values: Sequence[float], which: slice) -> str:
    """Return the mean of a part of a run."""
    return f"{fmean(values[which]):.2f}"


def training_table(rows: Mapping[str, Row]) -> Table:
    """Make the table of what the runs logged: first ten steps, last ten steps."""
    table = Table("row", "steps", "tokens", "cut", "reward", "spread", "tied", "entropy", "judge tokens", "s a step")
    first, last = slice(0, 10), slice(-10, None)
    for name, row in rows.items():
        steps = row["steps"]
        each = [f"{part(steps[key], first)} {part(steps[key], last)}" for key in ("tokens", "cut", "reward")]
        each += [f"{part(steps[key], first)} {part(steps[key], last)}" for key in ("reward_spread", "tied", "entropy")]
        tokens = sum(steps["prompt_tokens"]) + sum(steps["completion_tokens"])
        table.add_row(name, str(len(steps["tokens"])), *each, f"{tokens:,.0f}", f"{fmean(steps['seconds']):.0f}")
    return table


def visit_table(rows: Mapping[str, Row]) -> Table:
    """Make the table of visits. Each compares the same prompts with their first visit.

    The mean of ranks is the same at every visit, so the reward of a method that ranks says nothing here.
    """
    table = Table(
        "row", "visit", "prompts", "reward at the first visit", "now", "risen", "deviation in a group", "words"
    )
    for name, row in rows.items():
        first = {visit["query_id"]: visit for visit in row["visits"] if visit["epoch"] == 0}
        for epoch in sorted({visit["epoch"] for visit in row["visits"]}):
            visits = [visit for visit in row["visits"] if visit["epoch"] == epoch]
            then, now = (
                [fmean(v["rewards"]) for v in each] for each in ([first[v["query_id"]] for v in visits], visits)
            )
            risen = sum(a < b for a, b in zip(then, now, strict=True))
            words = fmean(len(answer.split()) for visit in visits for answer in visit["answers"])
            spread = fmean(stdev(visit["rewards"]) for visit in visits)
            numbers = [f"{fmean(then):.3f}", f"{fmean(now):.3f}", str(risen), f"{spread:.3f}", f"{words:.1f}"]
            table.add_row(name, str(epoch + 1), str(len(visits)), *numbers)
    return table


def share(found: Mapping[str, Any]) -> str:
    """Return a share of wins with its interval."""
    return f"{found['probability']:.2f} ({found['low']:.2f} to {found['high']:.2f})"


def duel_table(rows: Mapping[str, Row]) -> Table:
    """Make the table of duels with the policy before training."""
    table = Table("row", "prompts", "judge", "pairs", "by verdict", "by log odds", "mean log odds", "first shown wins")
    for name, row in rows.items():
        for of_set, found in row["compared"].items():
            for judge, each in found.items():
                wins = [share(each["wins"][key]) if key in each["wins"] else "" for key in ("verdicts", "log odds")]
                odds = "" if each["mean_log_odds"] is None else f"{each['mean_log_odds']:+.3f}"
                table.add_row(
                    name,
                    SETS[of_set],
                    JUDGES[judge],
                    str(each["pairs"]),
                    *wins,
                    odds,
                    f"{each['first_shown_wins']:.0%}",
                )
    return table


def plain_table(rows: Mapping[str, Row]) -> Table:
    """Make the table of what needs no judge, on the prompts kept apart."""
    table = Table("row", "tokens", "ended", "repeated 4-grams")
    for name, row in rows.items():
        if found := next(iter(row["compared"]["kept_apart"].values()), None):
            for label, measures in found["measures"].items():
                numbers = [f"{measures[key]:.3f}" for key in ("tokens", "ended", "repeated_4_grams")]
                table.add_row(f"{name}, {label}", *numbers)
    return table


def draw_curves(axes: Axes, rows: Mapping[str, Row], key: str, title: str) -> None:
    """Draw one logged number of all rows by step."""
    for name, row in rows.items():
        values = smooth(row["steps"][key])
        axes.plot(range(1, len(values) + 1), values, label=name)
    axes.set_title(title, fontsize=10, loc="left")
    axes.set_xlabel("step")


def draw_duels(axes: Axes, rows: Mapping[str, Row], shown: Sequence[tuple[str, str]] = DUELS) -> None:
    """Draw how often the trained policy wins by log odds, with 95 % intervals, by prompts and judge."""
    for place, row in enumerate(rows.values()):
        for colour, (of_set, judge) in enumerate(shown):
            offset = 0.2 * ((len(shown) - 1) / 2 - colour)
            found = row["compared"][of_set].get(judge, {}).get("wins", {}).get("log odds")
            if found:
                label = f"{SETS[of_set]}, {JUDGES[judge]}" if place == 0 else None
                width = [[found["probability"] - found["low"]], [found["high"] - found["probability"]]]
                axes.errorbar(
                    found["probability"],
                    place + offset,
                    xerr=width,
                    fmt="o",
                    color=f"C{colour + 4}",
                    label=label,
                    capsize=3,
                )
    axes.axvline(0.5, color="#999999", linewidth=1)
    axes.set_yticks(range(len(rows)), list(rows))
    axes.set_xlim(0, 1)
    axes.invert_yaxis()  # the first row on top
    axes.set_title("share of duels that the trained policy wins, by log odds", fontsize=10, loc="left")
    if len(shown) > 1:
        axes.legend(fontsize=7, loc="upper left")


def figure(rows: Mapping[str, Row], path: Path) -> None:
    """Draw two curves of the training, and the duels."""
    picture = Figure(figsize=(12, 4.2), layout="constrained")
    left, middle, right = picture.subplots(1, 3, width_ratios=[1, 1, 1.5])
    draw_curves(left, rows, "tokens", "tokens of a rollout")
    draw_curves(middle, rows, "reward_spread", "deviation of the judge's rewards")
    middle.set_ylim(0, 1.2)  # room above the ranks, which have always 0.68
    middle.legend(fontsize=7, loc="upper right")
    draw_duels(right, rows)
    picture.savefig(path, dpi=110)


def main() -> None:
    """Read the runs or what was kept of them, and show the rows."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=Path, help="folder of runs to add; default: the numbers that were kept")
    parser.add_argument("--rows", nargs="+", help="names of the runs to add; default: all in the folder")
    parser.add_argument("--kept", type=Path, default=KEPT, help="file of the numbers")
    parser.add_argument("--figure", type=Path, help="draw the figure into this file, such as weak_judge.png")
    arguments = parser.parse_args()
    rows = json.loads(gzip.decompress(arguments.kept.read_bytes())) if arguments.kept.is_file() else {}
    if arguments.runs:
        names = arguments.rows or sorted(path.parent.name for path in arguments.runs.glob("*/checkpoint-*"))
        rows |= {name: read_run(arguments.runs / name) for name in dict.fromkeys(names)}
        arguments.kept.write_bytes(gzip.compress(json.dumps(rows).encode(), mtime=0))
    for by_judge in (by_judge for row in rows.values() for by_judge in row["compared"].values()):
        by_judge.update({judge: counted(each) for judge, each in by_judge.items()})
    console = Console(width=170, highlight=False)
    console.print(training_table(rows), visit_table(rows), duel_table(rows), plain_table(rows))
    if arguments.figure:
        figure(rows, arguments.figure)
    found = {name: each for name, row in rows.items() if (each := row["compared"].get("kept_apart"))}
    wins = {name: {r: each["wins"] for r, each in by_judge.items()} for name, by_judge in found.items()}
    print(json.dumps({"benchmark": "weak_judge", "rows": list(rows), "wins": wins}))


if __name__ == "__main__":
    main()
