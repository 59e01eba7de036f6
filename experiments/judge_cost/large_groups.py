"""Ask which method orders groups of 8 to 64 rollouts: lists of a block, whole lists or buffers, and how these grow.

    python -m experiments.judge_cost.large_groups                  # prints the tables and draws the figure
    python -m experiments.judge_cost.large_groups --replay         # makes the record again: 15 minutes

World, judge and counts are those of `replay.py`, with other sizes of groups. Every size has the same number of
rollouts. Tokens are counted at noise 0.09 and crowd 1, since no reply changes them much.
"""

import argparse
import json
from itertools import product
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from experiments.judge_cost.replay import BLOCKS, Replay, run_all
from experiments.simulated_judge import JudgeErrors, World

RECORD = Path(__file__).with_suffix(".json")
SIZES, CROWDS = (8, 16, 32, 64), (1.0, 1.4, 2.0)
JUDGES = {"noise 0.03": (0.03, 0.0), "noise 0.09": (0.09, 0.0), "noise 0.3": (0.3, 0.0), "lasting 0.5": (0.09, 0.5)}
ROLLOUTS = 1600  # in each epoch, of all queries
LABELS = ("GRPO", "GDPO", "RankBuffer", "RankBuffer*", "List, 2 passes", *BLOCKS)
GROWING = ("RankBuffer", "RankBuffer, 8 anchors", "RankBuffer*", "List, 2 passes")
EPOCHS, QUERIES, SHOWN_VISITS = 20, 40, (1, 4, 10, 20)
COUNTED = ("calls", "ktokens", "computed")


def replay(processes: int) -> dict[str, dict[str, dict[str, Any]]]:
    """Return calls, thousand tokens and tau of each method by the size of groups, and those of a policy that stays."""
    cases = {
        (G, label, name, crowd): Replay(
            label,
            World(rollouts=G),
            ROLLOUTS // G,
            JudgeErrors(noise=JUDGES[name][0], lasting=JUDGES[name][1], crowd=crowd),
            count=(name, crowd) == ("noise 0.09", 1.0),
        )
        for G, label, name, crowd in product(SIZES, LABELS, JUDGES, CROWDS)
    }
    found: dict[str, dict] = {str(G): {label: {} for label in LABELS} for G in SIZES}
    for (G, label, name, crowd), counts in run_all(cases, processes).items():
        row = found[str(G)][label]
        row[f"tau, {name}, crowd {crowd:g}"] = round(counts.tau, 3)
        if counts.tokens:
            numbers = (counts.calls, counts.tokens / 1000, counts.computed / 1000)
            row |= {key: round(each / counts.groups, 1) for key, each in zip(COUNTED, numbers, strict=True)}
    return found


def replay_growth(processes: int) -> dict[str, dict[str, Any]]:
    """Return what 20 visits of a policy that does not improve cost, and the anchors after each."""
    cases = {
        label: Replay(label, World(drift=0, epochs=EPOCHS), QUERIES, JudgeErrors(crowd=1.4), count=True)
        for label in GROWING
    }
    return {
        label: {
            "ktokens": round(counts.tokens / counts.groups / 1000, 1),
            "tau": round(counts.tau, 3),
            "anchors": [round(sum(each.values()) / QUERIES, 1) for each in counts.sources],
        }
        for label, counts in run_all(cases, processes).items()
    }


def tables(record: dict[str, dict[str, dict[str, Any]]]) -> str:
    """Return the tables of the page: cost and tau by size, method, judge and crowd; and the growth of buffers."""
    by_size = "".join(
        f"| {G} | {label} | {' | '.join(f'{row[key]:.1f}' for key in COUNTED)} | "
        + " | ".join(" ".join(f"{row[f'tau, {name}, crowd {crowd:g}']:.2f}" for crowd in CROWDS) for name in JUDGES)
        + " |\n"
        for G, rows in record.items()
        if G != "growth"
        for label, row in rows.items()
    )
    growth = "".join(
        f"| {label} | "
        + " | ".join(f"{row['anchors'][n - 1]:.1f}" if row["anchors"] else "" for n in SHOWN_VISITS)
        + f" | {row['ktokens']:.1f} | {row['tau']:.3f} |\n"
        for label, row in record["growth"].items()
    )
    return (
        f"| G | method | calls | thousand tokens | computed | {' | '.join(JUDGES)} |\n|---:|---|{'---:|' * 7}\n"
        f"{by_size}\n| method | anchors after visit {' | '.join(map(str, SHOWN_VISITS))} | thousand tokens | tau |\n"
        f"|---|{'---:|' * 6}\n{growth}"
    )


def figure(record: dict[str, dict[str, dict[str, Any]]]) -> Figure:
    """Draw tau at noise 0.09 against tokens: a panel for each size, and a line for each method over the crowds."""
    drawn = Figure((12, 3.8), layout="constrained")
    for panel, G in zip(drawn.subplots(1, len(SIZES), sharey=True), map(str, SIZES), strict=True):
        for label, row in record[G].items():
            taus = [row[f"tau, noise 0.09, crowd {crowd:g}"] for crowd in CROWDS]
            panel.plot([row["ktokens"]] * len(taus), taus, "o-", label=label, markersize=4)
        panel.set(title=f"groups of {G}", xlim=(0, None), xlabel="thousand judge tokens a group")
    drawn.axes[0].set_ylabel("Kendall's tau, crowd 1 (top) to 2")
    drawn.legend(*drawn.axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=4)
    return drawn


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--replay", action="store_true", help="make the record again")
    parser.add_argument("--processes", type=int, default=2, help="number of replays at the same time")
    arguments = parser.parse_args()
    if arguments.replay:
        made = replay(arguments.processes) | {"growth": replay_growth(arguments.processes)}
        RECORD.write_text(json.dumps(made, indent=1) + "\n")
    record = json.loads(RECORD.read_text())
    figure(record).savefig(RECORD.with_suffix(".png"), dpi=120)
    print(tables(record))
