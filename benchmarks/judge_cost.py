"""Measure what each method asks of a judge, and how well its rewards order a group: the paper's cost tables, replayed.

    python benchmarks/judge_cost.py
    python benchmarks/judge_cost.py --paper

Each query is visited once in each of 4 epochs with 8 rollouts; `--paper` takes 1,000 queries. Methods, prompts, parser
and ledger are those of the package. The prompts have no guard, as in the paper. The method's `score` is called for
each group, and buffers stay in memory.

World and judge are simulated (`simulated_judge.py`): the quality of each response is known, and so is the judge's
error. No policy is trained, so all methods see the same rollouts. Only the world was chosen so that RankBuffer's calls
and buffer sizes come out roughly as in the paper: where rollouts lie among the references, and how they drift. World
and acuity of the judge are the same for all methods.

A token is a word or a punctuation mark. The lengths of texts follow from the paper's totals for GRPO and RankBuffer:
a pointwise prompt has about 800 tokens, a reference 240, a rollout 400.

Measured:

* calls and tokens: those of parsed answers, from the ledger.
* computed: millions of tokens, without the longest prefix that a prompt shares with an earlier one of its group.
* tau: Kendall's tau-b between reward and quality over the rollouts with an answer; 0 if all rewards are equal.
* tied: the share of answered rollouts that share their reward with another one of the group.
* flat: the share of groups in which all rewards are equal. GRPO learns nothing from such a group.
* rounds: the number of judgments that wait for one another. All calls in flight at the same time are one round.
* right place: the share of insertions into the interval in which the rollout's quality lies.
* blind: the same for the best answer that looks at nothing, a fixed number of places below the top.
* anchors: the number of anchors that a group was inserted among.
* in order: tau between the order of the anchors and their quality.

The script prints tables, and then one JSON line. `token_ratio` and `call_ratio` are RankBuffer's over RRC-SCR's.
`tau_ratio` is the same ratio at the acuity at which RRC-SCR's tau is nearest to 0.85.
"""

import argparse
import asyncio
import json
import re
import time
from bisect import bisect
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cache
from multiprocessing import Pool
from statistics import fmean

from rich.console import Console
from rich.table import Column, Table
from simulated_judge import World, answer, first_word

from rankbuffer_trl.audit.measures import tau_b
from rankbuffer_trl.buffer import SOURCES
from rankbuffer_trl.groups import RolloutGroup
from rankbuffer_trl.judge import Judge, Totals, Usage
from rankbuffer_trl.rewards.method import GroupScore, load_method

NOISES = (0.03, 0.06, 0.09, 0.15, 0.3)  # standard deviation of the error of one look
NOISE = 0.09  # of the tables that name no noise
LASTING = (0.0, 0.5, 0.9)
PAPER_GROUPS = 4000
WIDTH = 122
PAPER_SIZES = (5.44, 6.78, 7.27, 7.48)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--queries", type=int, default=100, help="number of queries for the cost tables")
    parser.add_argument("--acuity_queries", type=int, default=100, help="number of queries for the tables by acuity")
    parser.add_argument("--paper", action="store_true", help="take 1,000 queries for the cost tables, as in the paper")
    parser.add_argument("--rollout_tokens", type=int, default=400, help="mean length of a rollout in tokens")
    parser.add_argument("--seed", type=int, default=0, help="seed of the world and of the methods")
    parser.add_argument("--processes", type=int, default=2, help="number of methods to replay at the same time")
    arguments = parser.parse_args()
    started = time.perf_counter()
    queries = 1000 if arguments.paper else arguments.queries
    world = World(tokens=(*World.tokens[:3], arguments.rollout_tokens), seed=arguments.seed)

    costly = [Replay(label, world, queries, count=True) for label in ROWS]
    found = run_all(costly, arguments.processes)
    outcomes = {replay.label: outcome for replay, outcome in found.items()}
    few = arguments.acuity_queries
    short = [
        Replay(label, world, few, noise, lasting)
        for lasting in LASTING
        for noise in NOISES
        for label in (ROWS if lasting == 0 else ("RankBuffer", "RRC-SCR"))
    ]
    found = run_all(short, arguments.processes)
    lasting = {(replay.label, replay.noise, replay.lasting): fmean(out.tau) for replay, out in found.items()}
    taus = {(label, noise): tau for (label, noise, share), tau in lasting.items() if share == 0}

    console = Console(width=max(Console().width, WIDTH))
    for table in (
        cost_table(outcomes),
        reward_table(outcomes),
        buffer_table(outcomes["RankBuffer"], queries),
        acuity_table(taus),
        lasting_table(lasting),
    ):
        console.print(table)
    ours, theirs = outcomes["RankBuffer"].totals, outcomes["RRC-SCR"].totals
    nearest = min(NOISES, key=lambda noise: abs(taus["RRC-SCR", noise] - 0.85))
    result = {
        "benchmark": "judge_cost",
        "token_ratio": round(ours.tokens / theirs.tokens, 4),
        "call_ratio": round(ours.calls / theirs.calls, 4),
        "tau_ratio": round(ratio(taus, nearest), 4),
        "computed_ratio": round((ours.tokens - ours.cached_tokens) / (theirs.tokens - theirs.cached_tokens), 4),
        "scr_tau": round(taus["RRC-SCR", nearest], 4),
        "noise": nearest,
        "queries": queries,
        "seconds": round(time.perf_counter() - started, 1),
        "methods": {
            label: {"calls": out.totals.calls, "tokens": out.totals.tokens, "tau": round(fmean(out.tau), 4)}
            for label, out in outcomes.items()
        },
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
