"""Ask what the advice hangs on, one dimension at a time: spread of a group, its size, age of the policy, place, a mix.

    python -m experiments.judge_cost.dimensions              # prints the tables of the page from the record
    python -m experiments.judge_cost.dimensions --replay     # makes the record again: twenty minutes of one core

World, judge and counts are those of `replay.py`. Each cell has 200 queries and three seeds of the world; what is not
named in a line has its usual value.
"""

import argparse
import json
from dataclasses import replace
from itertools import product
from pathlib import Path
from statistics import fmean
from typing import Any

from experiments.judge_cost.replay import Replay, run_all
from experiments.simulated_judge import JudgeErrors, World

RECORD = Path(__file__).with_suffix(".json")
LABELS = ("GRPO", "GDPO", "RRC-SCR", "RankBuffer", "List, 2 passes", "List, 2 + 2")
QUERIES, SEEDS = 200, 3
USUAL = "usual"  # spread 0.25, groups of 8, four epochs, noise 0.09
MIXED = JudgeErrors(noise=0.19, lasting=0.5, bias=0.1, labels=0.1, crowd=1.4)
DIMENSIONS: dict[str, tuple[World, JudgeErrors]] = {
    USUAL: (World(), JudgeErrors()),
    **{f"spread {within:g}": (World(within=within), JudgeErrors()) for within in (0.05, 0.1, 0.6, 1.2)},
    "spread 1.2, crowd 2": (World(within=1.2), JudgeErrors(crowd=2.0)),
    **{f"groups of {G}": (World(rollouts=G), JudgeErrors()) for G in (3, 4, 6)},
    "12 epochs": (World(epochs=12), JudgeErrors()),
    "12 epochs, a policy that stays": (World(epochs=12, drift=0.0), JudgeErrors()),
    "place bias 0.6": (World(), JudgeErrors(bias=0.6)),
    "a mix of errors": (World(), MIXED),
}
PRICES = (1.0, 0.5, 0.1, 0.0)  # of a cached token, against one that is computed


def replay(processes: int) -> dict[str, dict[str, dict[str, Any]]]:
    """Return tau by seed, and thousand tokens and computed ones a group, by dimension and method."""
    cases = {
        (name, label, seed): Replay(label, replace(world, seed=seed), QUERIES, errors, count=seed == 0)
        for (name, (world, errors)), label, seed in product(DIMENSIONS.items(), LABELS, range(SEEDS))
    }
    found: dict[str, dict[str, dict[str, Any]]] = {
        name: {label: {"tau": []} for label in LABELS} for name in DIMENSIONS
    }
    for (name, label, _), counts in run_all(cases, processes).items():
        row = found[name][label]
        row["tau"].append(round(counts.tau, 4))
        if counts.tokens:
            row["ktokens"], row["computed"] = (
                round(each / counts.groups / 1000, 2) for each in (counts.tokens, counts.computed)
            )
    return found


def tables(record: dict[str, dict[str, dict[str, Any]]]) -> str:
    """Return the tables of the page: tau and tokens by dimension, and tokens by the price of a cached one."""
    lines = "".join(
        f"| {name} | " + " | ".join(f"{fmean(row['tau']):.2f}; {row['ktokens']:.1f}" for row in rows.values()) + " |\n"
        for name, rows in record.items()
    )
    prices = "".join(
        f"| {label} | "
        + " | ".join(f"{row['computed'] + price * (row['ktokens'] - row['computed']):.1f}" for price in PRICES)
        + " |\n"
        for label, row in record[USUAL].items()
    )
    return (
        f"| dimension | {' | '.join(LABELS)} |\n|---|{'---:|' * len(LABELS)}\n{lines}\n"
        f"| price of a cached token | {' | '.join(map(str, PRICES))} |\n|---|{'---:|' * len(PRICES)}\n{prices}"
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--replay", action="store_true", help="make the record again")
    parser.add_argument("--processes", type=int, default=2, help="number of replays at the same time")
    arguments = parser.parse_args()
    if arguments.replay:
        RECORD.write_text(json.dumps(replay(arguments.processes), indent=1) + "\n")
    print(tables(json.loads(RECORD.read_text())))
