"""Measure what each method asks of a judge, and how well its rewards order a group: the paper's cost tables, replayed.

    python -m experiments.judge_cost.run
    python -m experiments.judge_cost.run --paper
    python -m experiments.judge_cost.run --worlds
    python -m experiments.judge_cost.run --doubts
    python -m experiments.judge_cost.run --recipe my_methods/beats_best.yaml    # one of your own, beside three of ours
    python -m experiments.judge_cost.run --paper --acuity_queries 200 --kept    # the tables of the page, in seconds

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
with the paper's: the least ratio of tau and the largest ratio of tokens over all acuities.

`--worlds` prints other tables instead: for judges whose errors lie in the ranges of public records (`WORLDS`).
`--doubts` compares methods that read the judge's word with those that read its probabilities, under a judge that is
fitted to a record (`RECORDED`). `--kept` takes counts from `replays.json.gz`, and adds those that it lacks.
"""

import argparse
import json
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial

from rich.console import Console
from rich.table import Table

from experiments.judge_cost.replay import (
    OURS,
    PAPER,
    RECORD,
    RELATIVES,
    Counts,
    Key,
    Replay,
    read_record,
    run_all,
    write_record,
)
from experiments.judge_cost.tables import (
    COMPARED,
    ByNoise,
    acuity_table,
    beyond_table,
    buffer_table,
    cost_table,
    doubt_table,
    errors_table,
    reward_table,
    share_table,
    tau_ratio,
    tied_table,
    token_ratio,
    weight_table,
)
from experiments.simulated_judge import RECORDED, WORLDS, JudgeErrors, World

NOISES = (0.03, 0.06, 0.09, 0.15, 0.3)  # standard deviation of the error of one judgment
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
    "Soft pairs, rank",
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
BESIDE, ACUITIES = ("GRPO", "RRC-SCR", "RankBuffer", "List, 2 passes"), (0.03, JudgeErrors.noise, 0.3)
SEEDS = 4  # of the comparison of words and probabilities
WIDTH = 160

Replayed = Callable[[Mapping[Key, Replay]], dict[Key, Counts]]
"""Make replays, and return their counts under the same keys."""


def goals(sharp: ByNoise, settings: dict[str, ByNoise]) -> dict[str, dict]:
    """Return how our methods compare with RRC-SCR and RankBuffer at the worst of the acuities."""
    disputed, two = ("List, 2 + 2", "RRC-SCR"), ("List, 2 passes", "RankBuffer")
    return {
        " / ".join(disputed): {
            "tau": round(min(tau_ratio(sharp, noise, *disputed) for noise in NOISES), 4),
            "tokens": round(max(token_ratio(sharp, noise, *disputed) for noise in NOISES), 4),
        },
        " / ".join(two): {
            "tau": round(min(tau_ratio(sharp, noise, *two) for noise in NOISES), 4),
            "tau, bias 0.25": round(min(tau_ratio(settings["bias 0.25"], noise, *two) for noise in NOISES), 4),
            "tokens": round(max(token_ratio(sharp, noise, *two) for noise in NOISES), 4),
        },
    }


def compare_paper(world: World, queries: int, few: int, run: Replayed) -> tuple[list[Table], dict]:
    """Replay all methods of the paper, and ours beside them. Return the tables and the figures.

    Args:
        world (`World`):
            The world of all replays but those of other lengths or spreads.
        queries, few (`int`):
            Queries of the cost tables, and of all others.
        run (`Replayed`):
            What makes the replays.
    """

    def grid(labels: Iterable[str], noises: Iterable[float], of: World = world, count: bool = False, **errors) -> dict:
        made = ((label, noise) for noise in noises for label in labels)
        return run({each: Replay(each[0], of, few, JudgeErrors(noise=each[1], **errors), count) for each in made})

    counted = (*COMPARED, *RELATIVES)
    outcomes = run({label: Replay(label, world, queries, count=True) for label in PAPER})
    by_noise = grid(counted, NOISES, count=True) | grid([label for label in PAPER if label not in COMPARED], NOISES)
    lengths = {tokens: replace(world, tokens=(*world.tokens[:3], tokens)) for tokens in LENGTHS}
    long = ((label, tokens) for tokens in LENGTHS for label in COMPARED)
    by_length = run({each: Replay(each[0], lengths[each[1]], min(few, LENGTH_QUERIES), count=True) for each in long})
    by_spread = grid(("RRC-SCR", "RankBuffer", "List, 2 passes"), SPREAD_NOISES, replace(world, spread=SPREAD))
    by_setting = {
        name: grid(COMPARED, NOISES if name in WHOLE else NOISES[::2], **setting) for name, setting in SETTINGS.items()
    }
    tables = [
        cost_table(outcomes),
        reward_table(outcomes, f"noise {JudgeErrors.noise:g}"),
        buffer_table(outcomes["RankBuffer"], queries),
        beyond_table({label: by_noise[label, JudgeErrors.noise] for label in counted}),
        share_table(by_length, "tokens of a rollout"),
        acuity_table(by_noise),
        share_table(by_noise, "noise"),
        errors_table(by_setting),
        weight_table(by_spread),
    ]
    ours, theirs = outcomes["RankBuffer"], outcomes["RRC-SCR"]
    nearest = min(NOISES, key=lambda noise: abs(by_noise["RRC-SCR", noise].tau - 0.85))
    return tables, {
        "token_ratio": round(ours.tokens / theirs.tokens, 4),
        "call_ratio": round(ours.calls / theirs.calls, 4),
        "tau_ratio": round(tau_ratio(by_noise, nearest), 4),
        "computed_ratio": round(ours.computed / theirs.computed, 4),
        "scr_tau": round(by_noise["RRC-SCR", nearest].tau, 4),
        "noise": nearest,
        "goals": goals(by_noise, by_setting),
    }


def compare_worlds(world: World, queries: int, run: Replayed) -> tuple[list[Table], dict]:
    """Replay the main methods under the judges of `WORLDS`. Return the tables and the figures."""

    def grid(errors: JudgeErrors, crowd: float = 1.0, counted: Sequence[str] = ()) -> dict:
        of = {label: replace(errors, crowd=1.0 if label in PAIRS else crowd) for label in (*PAIRS[:3], *COMPARED)}
        return run({(label, e.noise): Replay(label, world, queries, e, label in counted) for label, e in of.items()})

    settled = {
        f"{name}, crowd {crowd:g}": grid(errors.settled(world.within), crowd, COMPARED)
        for name, errors in WORLDS.items()
        for crowd in CROWDS
    }
    true = {name: grid(errors) for name, errors in WORLDS.items()}
    cells = {(label, name): each for name, found in settled.items() for (label, _), each in found.items()}
    tables = [
        errors_table(settled, "Tau with the judge's mean preference"),
        errors_table(true, "Tau with true quality, if as much of the error lasts as labels allow"),
        share_table(cells, "world"),
        tied_table(cells),
    ]
    return tables, {"tau": {f"{label}, {name}": round(cell.tau, 4) for (label, name), cell in cells.items()}}


def compare_doubts(world: World, queries: int, run: Replayed) -> tuple[list[Table], dict]:
    """Replay methods that read words or probabilities under the judge `RECORDED`. Return tables and figures."""
    replays = {
        (label, seed): Replay(label, replace(world, seed=world.seed + seed), queries, RECORDED, count=True)
        for label in DOUBTED
        for seed in range(SEEDS)
    }
    found = run(replays)
    seeds = {label: [found[label, seed] for seed in range(SEEDS)] for label in DOUBTED}
    first = {label: found[label, 0] for label in DOUBTED}
    tables = [doubt_table(seeds), reward_table(first, "a judge with doubts, first seed")]
    return tables, {"tau": {label: [round(each.tau, 4) for each in of] for label, of in seeds.items()}}


def compare_recipes(world: World, queries: int, run: Replayed, recipes: Sequence[str]) -> tuple[list[Table], dict]:
    """Replay recipes of one's own beside three rows of the tables, at three acuities of the judge."""
    labels = (*BESIDE, *recipes)
    found = run(
        {(label, n): Replay(label, world, queries, JudgeErrors(noise=n), True) for label in labels for n in ACUITIES}
    )
    usual = {label: found[label, JudgeErrors.noise] for label in labels}
    tables = [beyond_table(usual), errors_table({"none else": found}, "Tau by the noise of the judge")]
    return tables, {label: {"tau": round(each.tau, 4), "tokens": each.tokens} for label, each in usual.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--queries", type=int, default=100, help="number of queries for the cost tables")
    parser.add_argument("--acuity_queries", type=int, default=100, help="number of queries for the other tables")
    parser.add_argument("--paper", action="store_true", help="take 1,000 queries for the cost tables, as in the paper")
    parser.add_argument("--worlds", action="store_true", help="print the tables of the judges of `WORLDS` instead")
    parser.add_argument("--doubts", action="store_true", help="print the tables of words and probabilities instead")
    own = "paths of recipes of your own, or names of ours, to compare with GRPO, RRC-SCR, RankBuffer and two lists"
    parser.add_argument("--recipe", nargs="+", metavar="PATH", default=[], help=own)
    parser.add_argument("--rollout_tokens", type=int, default=400, help="mean length of a rollout in tokens")
    parser.add_argument("--seed", type=int, default=0, help="seed of the world and of the methods")
    parser.add_argument("--processes", type=int, default=2, help="number of methods to replay at the same time")
    parser.add_argument("--kept", action="store_true", help=f"take the counts of {RECORD.name}, and add missing ones")
    arguments = parser.parse_args()
    started = time.perf_counter()
    queries, few = 1000 if arguments.paper else arguments.queries, arguments.acuity_queries
    world = World(tokens=(*World.tokens[:3], arguments.rollout_tokens), seed=arguments.seed)
    record = read_record() if arguments.kept else {}
    run: Replayed = partial(run_all, processes=arguments.processes, record=record)
    if arguments.recipe:
        name, (tables, found) = "judge_cost_recipes", compare_recipes(world, few, run, arguments.recipe)
    elif arguments.worlds:
        name, (tables, found) = "judge_cost_worlds", compare_worlds(world, few, run)
    elif arguments.doubts:
        name, (tables, found) = "judge_cost_doubts", compare_doubts(world, few, run)
    else:
        name, (tables, found) = "judge_cost", compare_paper(world, queries, few, run)
    if arguments.kept:
        write_record(record)
    Console(width=max(Console().width, WIDTH)).print(*tables)
    seconds = round(time.perf_counter() - started, 1)
    print(json.dumps({"benchmark": name, "queries": few, "seed": arguments.seed, "seconds": seconds} | found))


if __name__ == "__main__":
    main()
