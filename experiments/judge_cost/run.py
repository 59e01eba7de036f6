"""Measure what each method asks of a judge, and how well its rewards order a group: the paper's cost tables, replayed.

    python -m experiments.judge_cost.run
    python -m experiments.judge_cost.run --paper
    python -m experiments.judge_cost.run --worlds
    python -m experiments.judge_cost.run --doubts

Each query is visited once in each of 4 epochs with 8 rollouts; `--paper` takes 1,000 queries (`replay.py`).
World and judge are simulated (`simulated_judge.py`): the quality of each response is known, and so is the judge's
error. No policy is trained, so all methods see the same rollouts. Only the world was chosen so that RankBuffer's calls
and buffer sizes come out roughly as in the paper: where rollouts lie among the references, and how they drift. World
and acuity of the judge are the same for all methods. Some rows are methods of ours, which the paper does not have.

A token is a word or a punctuation mark. The lengths of texts follow from the paper's totals for GRPO and RankBuffer:
a pointwise prompt has about 800 tokens, a reference 240, a rollout 400.

Measured:

* calls and tokens: those of parsed answers, from the ledger.
* computed: tokens without the longest prefix that a prompt shares with an earlier one of its group.
* tau: Kendall's tau-b between reward and quality over the rollouts with an answer; 0 if all rewards are equal.
* cosine: the cosine of the advantages of these rollouts with those that the true qualities as rewards would give.
* tied: the share of answered rollouts that share their reward with another one of the group.
* flat: the share of groups in which all rewards are equal. GRPO learns nothing from such a group.
* rounds: the number of judgments that wait for one another. All calls in flight at the same time are one round.
* right place: the share of insertions into the interval in which the rollout's quality lies.
* blind: the same for the best answer that looks at nothing, a fixed number of places below the top.
* anchors: the number of anchors that a group was inserted among.
* in order: tau between the order of the anchors and their quality.

The script prints tables, and then one JSON line. `token_ratio` and `call_ratio` are RankBuffer's over RRC-SCR's.
`tau_ratio` is the same ratio at the acuity at which RRC-SCR's tau is nearest to 0.85. `goals` compares methods of ours
with the paper's: the least ratio of tau and the largest ratio of tokens over all acuities, and the method with the
largest tau where longer lists are harder to judge.

`--worlds` prints other tables instead: for judges whose errors lie in the ranges of public records (`WORLDS`).
`--doubts` compares methods that read the judge's word with those that read its probabilities, under a judge that is
fitted to a record (`RECORDED`).
"""

import argparse
import json
import time
from dataclasses import replace

from rich.console import Console
from rich.table import Table

from experiments.judge_cost.replay import OURS, PAPER, RELATIVES, Replay, run_all
from experiments.judge_cost.tables import (
    COMPARED,
    ByNoise,
    acuity_table,
    beyond_table,
    buffer_table,
    cosine_table,
    cost_table,
    errors_table,
    reward_table,
    share_table,
    tau_ratio,
    tied_table,
    token_ratio,
    weight_table,
    winner,
)
from experiments.simulated_judge import RECORDED, WORLDS, JudgeErrors, World

NOISES = (0.03, 0.06, 0.09, 0.15, 0.3)  # standard deviation of the error of one look
SETTINGS: dict[str, dict] = {
    "lasting 0.5": {"lasting": 0.5},
    "lasting 0.9": {"lasting": 0.9},
    "bias 0.1": {"bias": 0.1},
    "bias 0.25": {"bias": 0.25},
    "bias 0.25, edges": {"bias": 0.25, "shape": "edges"},
    "bias 0.25, drawn": {"bias": 0.25, "drawn": True},
    "crowd 1.4": {"crowd": 1.4},
    "crowd 2": {"crowd": 2.0},
}
WHOLE = ("bias 0.25", "crowd 1.4")  # settings of which all noises are replayed; of the others, three
LENGTHS, LENGTH_QUERIES = (200, 400, 800), 50
SPREAD, SPREAD_NOISES = 0.7, (0.09, 0.3)
CROWDS = (1.0, 1.4, 2.0)
PAIRS = ("GRPO", "Tournament-GRPO", "ArenaRL", "RRC-SCR")  # their prompts show one or two responses: no crowd
DOUBTED = (
    "GRPO",
    "Soft ratings",
    "Sampled ratings",
    "RRC-SCR",
    "Soft pairs",
    "Soft pairs, strength",
    "Sampled pairs, strength",
    "Soft pairs once, rank",
    "Soft pairs once, strength",
    "Sampled pairs once, strength",
    "Coarse-only",
    "RankBuffer",
    "RankBuffer, soft",
    *list(OURS)[:3],
)
WIDTH = 160


def goals(sharp: ByNoise, settings: dict[str, ByNoise]) -> dict[str, dict]:
    """Return how our methods compare with RRC-SCR and RankBuffer at the worst of the acuities."""
    disputed, two = ("List, 2 + 2", "RRC-SCR"), ("List, 2 looks", "RankBuffer")
    return {
        " / ".join(disputed): {
            "tau": round(min(tau_ratio(sharp, noise, *disputed) for noise in NOISES), 3),
            "tokens": round(max(token_ratio(sharp, noise, *disputed) for noise in NOISES), 3),
        },
        " / ".join(two): {
            "tau": round(min(tau_ratio(sharp, noise, *two) for noise in NOISES), 3),
            "tau, bias 0.25": round(min(tau_ratio(settings["bias 0.25"], noise, *two) for noise in NOISES), 3),
            "tokens": round(max(token_ratio(sharp, noise, *two) for noise in NOISES), 3),
        },
        "best tau at crowd 1.4": {f"{noise:g}": winner(settings["crowd 1.4"], noise) for noise in NOISES},
    }


def compare_worlds(world: World, queries: int, processes: int) -> tuple[list[Table], dict]:
    """Replay the main methods under the judges of `WORLDS`. Return the tables and the figures."""

    def replay(label: str, errors: JudgeErrors, crowd: float, count: bool) -> Replay:
        return Replay(label, world, queries, replace(errors, crowd=1.0 if label in PAIRS else crowd), count)

    labels = (*PAIRS[:3], *COMPARED)
    settled = {
        (label, f"{name}, crowd {crowd:g}"): replay(label, errors.settled(world.within), crowd, label in COMPARED)
        for name, errors in WORLDS.items()
        for crowd in CROWDS
        for label in labels
    }
    true = {(label, name): replay(label, errors, 1.0, False) for name, errors in WORLDS.items() for label in labels}
    unique = dict.fromkeys([*settled.values(), *true.values()])
    outcomes = run_all({each: each for each in unique}, processes)

    def by_world(replays: dict[tuple[str, str], Replay]) -> dict[str, ByNoise]:
        found: dict[str, dict] = {name: {} for _, name in replays}
        for (label, name), each in replays.items():
            found[name][label, each.errors.noise] = outcomes[each]
        return found

    cells = {key: outcomes[each] for key, each in settled.items()}
    tables = [
        errors_table(by_world(settled), "Tau with the judge's settled opinion"),
        errors_table(by_world(true), "Tau with true quality, if as much of the error lasts as labels allow"),
        share_table(cells, "world"),
        tied_table(cells),
    ]
    return tables, {f"{label}, {name}": round(cell.mean_tau, 4) for (label, name), cell in cells.items()}


def compare_doubts(world: World, queries: int, processes: int) -> tuple[list[Table], dict]:
    """Replay methods that read words or probabilities under the judge `RECORDED`. Return tables and figures."""
    replays = {label: Replay(label, world, queries, RECORDED, count=True) for label in DOUBTED}
    found = run_all(replays, processes)
    tables = [beyond_table(found, DOUBTED), reward_table(found, "a judge with doubts")]
    return tables, {label: round(outcome.mean_tau, 4) for label, outcome in found.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--queries", type=int, default=100, help="number of queries for the cost tables")
    parser.add_argument("--acuity_queries", type=int, default=100, help="number of queries for the other tables")
    parser.add_argument("--paper", action="store_true", help="take 1,000 queries for the cost tables, as in the paper")
    parser.add_argument("--worlds", action="store_true", help="print the tables of the judges of `WORLDS` instead")
    parser.add_argument("--doubts", action="store_true", help="print the tables of words and probabilities instead")
    parser.add_argument("--rollout_tokens", type=int, default=400, help="mean length of a rollout in tokens")
    parser.add_argument("--seed", type=int, default=0, help="seed of the world and of the methods")
    parser.add_argument("--processes", type=int, default=2, help="number of methods to replay at the same time")
    arguments = parser.parse_args()
    started = time.perf_counter()
    queries, few = 1000 if arguments.paper else arguments.queries, arguments.acuity_queries

    def world(tokens: int = arguments.rollout_tokens, spread: float = 0.0) -> World:
        return World(tokens=(*World.tokens[:3], tokens), spread=spread, seed=arguments.seed)

    console = Console(width=max(Console().width, WIDTH))
    if arguments.worlds:
        tables, taus = compare_worlds(world(), few, arguments.processes)
        for table in tables:
            console.print(table)
        seconds = round(time.perf_counter() - started, 1)
        print(json.dumps({"benchmark": "judge_cost_worlds", "queries": few, "seconds": seconds, "tau": taus}))
        return

    if arguments.doubts:
        tables, taus = compare_doubts(world(), few, arguments.processes)
        console.print(*tables)
        print(json.dumps({"benchmark": "judge_cost_doubts", "queries": few, "seed": arguments.seed, "tau": taus}))
        return

    costly = {label: Replay(label, world(), queries, count=True) for label in PAPER}
    sharp = {
        (label, noise): Replay(label, world(), few, JudgeErrors(noise=noise), count=label in (*COMPARED, *RELATIVES))
        for noise in NOISES
        for label in (*PAPER, *OURS, *RELATIVES)
    }
    erring = {
        (name, label, noise): Replay(label, world(), few, JudgeErrors(noise=noise, **setting))
        for name, setting in SETTINGS.items()
        for noise in (NOISES if name in WHOLE else NOISES[::2])
        for label in COMPARED
    }
    long = {
        (label, tokens): Replay(label, world(tokens), min(few, LENGTH_QUERIES), count=True)
        for tokens in LENGTHS
        for label in COMPARED
    }
    spread = {
        (label, noise): Replay(label, world(spread=SPREAD), few, JudgeErrors(noise=noise))
        for label in ("RRC-SCR", "RankBuffer", "List, 2 looks")
        for noise in SPREAD_NOISES
    }
    outcomes, by_noise, by_length, by_spread = (
        run_all(replays, arguments.processes) for replays in (costly, sharp, long, spread)
    )
    by_setting: dict[str, dict] = {name: {} for name in SETTINGS}
    for (name, *key), outcome in run_all(erring, arguments.processes).items():
        by_setting[name][tuple(key)] = outcome

    for table in (
        cost_table(outcomes),
        reward_table(outcomes, f"noise {JudgeErrors.noise:g}"),
        buffer_table(outcomes["RankBuffer"], queries),
        beyond_table({label: by_noise[label, JudgeErrors.noise] for label in (*COMPARED, *RELATIVES)}),
        share_table(by_length, "tokens of a rollout"),
        acuity_table(by_noise),
        share_table(by_noise, "noise"),
        cosine_table(by_noise),
        errors_table(by_setting),
        weight_table(by_spread),
    ):
        console.print(table)
    ours, theirs = outcomes["RankBuffer"], outcomes["RRC-SCR"]
    nearest = min(NOISES, key=lambda noise: abs(by_noise["RRC-SCR", noise].mean_tau - 0.85))
    result = {
        "benchmark": "judge_cost",
        "token_ratio": round(ours.tokens / theirs.tokens, 4),
        "call_ratio": round(ours.totals.calls / theirs.totals.calls, 4),
        "tau_ratio": round(tau_ratio(by_noise, nearest), 4),
        "computed_ratio": round(ours.computed / theirs.computed, 4),
        "scr_tau": round(by_noise["RRC-SCR", nearest].mean_tau, 4),
        "noise": nearest,
        "goals": goals(by_noise, by_setting),
        "queries": queries,
        "seconds": round(time.perf_counter() - started, 1),
        "methods": {
            label: {"calls": out.totals.calls, "tokens": out.tokens, "tau": round(out.mean_tau, 4)}
            for label, out in outcomes.items()
        },
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
