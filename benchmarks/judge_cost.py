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


@dataclass(frozen=True)
class Row:
    """A method with its arguments, and the thousands of calls and millions of tokens that the paper reports."""

    method: str
    arguments: dict = field(default_factory=dict)
    calls: float | None = None
    tokens: float | None = None


BOOT = {"bootstrap": True}
ROWS = {
    "GRPO": Row("pointwise", {}, 31.374, 25.036),
    "GDPO": Row("gdpo", {}, 144.236, 86.938),
    "Tournament-GRPO": Row("tournament", {}, 84.0, 157.313),
    "RRC-AGR": Row("rrc_agr", {}, 218.914, 200.817),
    "RRC-SCR": Row("rrc_scr", {}, 104.028, 200.817),
    "Pairwise Rank": Row("pairwise_rank", {}, 103.035, 188.265),
    "ArenaRL": Row("arenarl", {}, 101.388, 154.936),
    "RankBuffer": Row("rankbuffer", {}, 36.861, 88.818),
    "RankBuffer*": Row("rankbuffer", {"static": True}, 36.227, 67.968),
    "Bootstrap": Row("rankbuffer", BOOT, 28.378, 76.455),
    "Bootstrap*": Row("rankbuffer", BOOT | {"static": True}, 28.108, 60.662),
    "LLM": Row("llm_buffer", {}, 41.592, 96.503),
    "LLM + look-ahead": Row("llm_buffer", {"look_ahead": True}, 42.101, 110.997),
    "RankBuffer, K0 = 2": Row("rankbuffer", {"k0": 2}, 36.4, 79.3),
    "RankBuffer, K0 = 7": Row("rankbuffer", {"k0": 7}, 36.8, 114.1),
    "Bootstrap, K0 = 2": Row("rankbuffer", BOOT | {"k0": 2}, 28.0, 66.5),
    "Bootstrap, K0 = 7": Row("rankbuffer", BOOT | {"k0": 7}, 28.7, 92.4),
    "Coarse-only": Row("rankbuffer", {"fine": False}, 31.0, 74.1),
    "Order-only": Row("rankbuffer", {"anchor_content": False}),
    "Bootstrap, order-only": Row("rankbuffer", BOOT | {"anchor_content": False}),
}


class SimulatedJudge:
    """A chat client that answers from the text of a prompt, and counts tokens, shared prefixes and rounds.

    Args:
        noise (`float`):
            Standard deviation of the error of one look.
        lasting (`float`):
            Share of the error's variance that belongs to the response, in 0..1.
        count (`bool`):
            Whether to count tokens. Counting takes most of the time.
    """

    name = "simulated judge"

    def __init__(self, noise: float, lasting: float, count: bool):
        self.noise, self.lasting, self.count = noise, lasting, count
        self.quality: dict[str, float] = {}
        self.rounds = self.in_flight = 0
        self.seen: list[list[str]] = []  # sorted, so that a neighbour has the longest shared prefix

    def open_group(self) -> None:
        """Forget the prompts of the group before: prefixes are shared within a group only."""
        self.seen = []

    async def complete(self, messages, *, question, seed, tally):
        tally.attempts += 1
        (prompt,) = (message["content"] for message in messages)
        self.rounds += self.in_flight == 0
        self.in_flight += 1
        await asyncio.sleep(0)
        self.in_flight -= 1
        text = answer(prompt, self.quality, self.noise, self.lasting)
        return text, self.usage(prompt, text) if self.count else Usage()

    def usage(self, prompt: str, text: str) -> Usage:
        """Count the tokens of a question, and those of the longest prefix shared with an earlier one of the group."""
        words = prompt.split()
        place = bisect(self.seen, words)
        shared = max((common_prefix(words, other) for other in self.seen[max(place - 1, 0) : place + 1]), default=0)
        self.seen.insert(place, words)
        return Usage(tokens(words), tokens(words[:shared]), tokens(text.split()))

    async def close(self):
        pass


def tokens(words: Iterable[str]) -> int:
    """Count the words and punctuation marks of a text that was split at white space."""
    return sum(map(tokens_of, words))


@cache
def tokens_of(word: str) -> int:
    return len(re.findall(r"\w+|[^\w\s]", word))


def common_prefix(a: Sequence[str], b: Sequence[str]) -> int:
    """Return the length of the longest common prefix."""
    low, high = 0, min(len(a), len(b))
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if a[low:middle] == b[low:middle] else (low, middle - 1)
    return low


@dataclass
class Outcome:
    """The counts of a replay. Lists have one item per group, insertion or anchor."""

    totals: Totals = field(default_factory=Totals)
    groups: int = 0
    rounds: int = 0
    answered: int = 0
    tied: int = 0
    flat: int = 0
    tau: list[float] = field(default_factory=list)
    right: list[bool] = field(default_factory=list)
    below_top: Counter = field(default_factory=Counter)
    anchors: list[int] = field(default_factory=list)
    ladder: list[float] = field(default_factory=list)
    sources: dict[int, Counter] = field(default_factory=lambda: defaultdict(Counter))

    def add(self, group: RolloutGroup, score: GroupScore, quality: dict[str, float]) -> None:
        latent = {rollout.id: quality[first_word(rollout.text)] for rollout in group.answered}
        rewards = [score.rewards[i] for i in latent]
        self.groups += 1
        self.answered += len(rewards)
        self.tied += sum(n for n in Counter(rewards).values() if n > 1)
        self.flat += len(set(rewards)) < 2
        self.tau.append(tau_b(rewards, list(latent.values())))
        if score.before:
            anchors = [quality[first_word(anchor.text)] for anchor in score.before.anchors]
            self.anchors.append(len(anchors))
            self.ladder.append(tau_b(range(len(anchors)), anchors))
            for i, position in score.positions.items():
                place = sum(anchor < latent[i] for anchor in anchors)
                self.right.append(position == place)
                self.below_top[len(anchors) - place] += 1
        if score.after:
            self.sources[group.epoch].update(anchor.source for anchor in score.after.anchors)


@dataclass(frozen=True)
class Replay:
    """The replay of one method in one world under one judge."""

    label: str
    world: World
    queries: int
    noise: float = NOISE
    lasting: float = 0.0
    count: bool = False

    def __call__(self) -> Outcome:
        return asyncio.run(self.run())

    async def run(self) -> Outcome:
        """Score all visits of all queries, query by query: queries do not depend on one another."""
        row = ROWS[self.label]
        method = load_method(row.method, row.arguments, self.world.seed)
        client = SimulatedJudge(self.noise, self.lasting, self.count)
        judge = Judge(client, guard=False)
        outcome, calls = Outcome(), []
        for number in range(self.queries):
            groups, client.quality = self.world.visits(number, self.queries)
            buffer = None
            for group in groups:
                client.open_group()
                score = await method.score(group, buffer, judge)
                buffer = score.after
                outcome.add(group, score, client.quality)
            calls += judge.drain()
        outcome.totals, outcome.rounds = Totals.of(calls), client.rounds
        return outcome


def cost_table(outcomes: dict[str, Outcome]) -> Table:
    """Show calls and tokens next to the paper's."""
    columns = [column for name in ("calls", "Mtokens", "tokens/call") for column in (name, "paper", "ratio")]
    table = Table(Column(no_wrap=True), *columns, "computed")
    table.title = "Cost; the paper's figures scaled to the groups replayed"
    for label, outcome in outcomes.items():
        row, totals, scale = ROWS[label], outcome.totals, outcome.groups / PAPER_GROUPS
        calls, tokens = scale * (row.calls or 0), scale * (row.tokens or 0)
        table.add_row(
            label,
            *beside(totals.calls, 1e3 * calls, ",.0f"),
            *beside(totals.tokens / 1e6, tokens, ".2f"),
            *beside(totals.tokens / totals.calls, 1e3 * tokens / (calls or 1), ".0f"),
            f"{(totals.tokens - totals.cached_tokens) / 1e6:.2f}",
        )
    return table


def beside(ours: float, paper: float, form: str) -> list[str]:
    """Format a figure, the paper's figure and their ratio."""
    return [format(ours, form), *((format(paper, form), f"{ours / paper:.2f}") if paper else ("", ""))]


def reward_table(outcomes: dict[str, Outcome]) -> Table:
    """Show how well rewards and buffers are ordered."""
    columns = ("calls/group", "rounds", "tau", "tied", "flat", "right place", "blind", "anchors", "in order")
    table = Table(Column(no_wrap=True), *columns)
    table.title = f"Rewards and buffers, noise {NOISE:g}"
    for label, outcome in outcomes.items():
        buffers = [""] * 4
        if outcome.right:
            best = max(outcome.below_top.values()) / len(outcome.right)
            buffers[:2] = f"{fmean(outcome.right):.0%}", f"{best:.0%}"
            buffers[2:] = f"{fmean(outcome.anchors):.2f}", f"{fmean(outcome.ladder):.2f}"
        table.add_row(
            label,
            f"{outcome.totals.calls / outcome.groups:.2f}",
            f"{outcome.rounds / outcome.groups:.2f}",
            f"{fmean(outcome.tau):.3f}",
            f"{outcome.tied / outcome.answered:.0%}",
            f"{outcome.flat / outcome.groups:.0%}",
            *buffers,
        )
    return table


def buffer_table(outcome: Outcome, queries: int) -> Table:
    """Show the anchors of RankBuffer by epoch and source."""
    sources = [source for source in SOURCES if any(counts[source] for counts in outcome.sources.values())]
    table = Table("after epoch", "anchors", "paper", *sources, title="RankBuffer's mean buffer")
    for (epoch, counts), paper in zip(sorted(outcome.sources.items()), PAPER_SIZES, strict=True):
        sizes = [f"{counts[source] / queries:.2f}" for source in sources]
        table.add_row(str(epoch), f"{counts.total() / queries:.2f}", f"{paper:.2f}", *sizes)
    return table


def acuity_table(taus: dict[tuple[str, float], float]) -> Table:
    """Show tau by method and noise, and RankBuffer's tau as a share of RRC-SCR's."""
    table = Table("noise", *(f"{noise:g}" for noise in NOISES), title="Tau by acuity of the judge")
    for label in ROWS:
        table.add_row(label, *(f"{taus[label, noise]:.3f}" for noise in NOISES), end_section=label == list(ROWS)[-1])
    table.add_row("RankBuffer / RRC-SCR", *(f"{ratio(taus, noise):.3f}" for noise in NOISES))
    return table


def lasting_table(taus: dict[tuple[str, float, float], float]) -> Table:
    """Show RankBuffer's tau as a share of RRC-SCR's for a judge whose errors repeat."""
    table = Table("lasting", *(f"{noise:g}" for noise in NOISES))
    table.title = "RankBuffer's tau as a share of RRC-SCR's, where errors repeat"
    for lasting in LASTING:
        at = {(label, noise): tau for (label, noise, share), tau in taus.items() if share == lasting}
        cells = (f"{ratio(at, noise):.3f} of {at['RRC-SCR', noise]:.3f}" for noise in NOISES)
        table.add_row(f"{lasting:g}", *cells)
    return table


def ratio(taus: dict[tuple[str, float], float], noise: float) -> float:
    """Return RankBuffer's tau as a share of RRC-SCR's."""
    return taus["RankBuffer", noise] / taus["RRC-SCR", noise]


def run_all(replays: Iterable[Replay], processes: int) -> dict[Replay, Outcome]:
    """Run replays in several processes and return their outcomes in the given order."""
    replays = list(replays)
    with Pool(processes) as pool:
        return dict(zip(replays, pool.map(Replay.__call__, replays, chunksize=1), strict=True))


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
