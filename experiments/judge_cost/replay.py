"""The replay of a reward method in the simulated world, under the simulated judge, and what is counted in it.

Each query is visited once in each epoch. The method's `score` is called for each group, and buffers stay in memory.
Methods, prompts, parser and ledger are those of the package. The prompts have no guard, as in the paper. No policy is
trained, so all methods see the same rollouts. `replays.json.gz` has the counts of each replay of the page.
"""

import asyncio
import gzip
import json
import math
import re
from bisect import bisect
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cache
from multiprocessing import Pool
from pathlib import Path
from random import Random
from statistics import fmean
from typing import Any, TypeVar

from experiments.simulated_judge import Doubts, JudgeErrors, World, first_word, reply
from rankbuffer_tools.audit.measures import tau_b
from rankbuffer_tools.batch.recipes import find_recipe, read_recipe
from rankbuffer_tools.paper import paper_recipes
from rankbuffer_trl.groups import RolloutGroup
from rankbuffer_trl.judge import Judge, Question, Reply, Totals, Usage, read_chances
from rankbuffer_trl.rewards import GroupScore, load_method

RECORD = Path(__file__).parent / "replays.json.gz"
Key = TypeVar("Key")


@dataclass(frozen=True)
class Row:
    """A method with its arguments, and the answers that stand for probabilities (`judge_samples`)."""

    method: str
    arguments: dict = field(default_factory=dict)
    samples: int = 1


SAME = ("Dr. GRPO", "DAPO", "GPG")  # they ask what GRPO asks
PAPER = {
    label: Row(recipe["method"], recipe.get("method_args", {}))
    for label, recipe in paper_recipes().items()
    if label not in SAME
}
OURS = {
    "List": Row("listwise", {"passes": 1, "rerank_disputed": False}),
    "List, 2 passes": Row("listwise", {"passes": 2, "rerank_disputed": False}),
    "List, 2 + 2": Row("listwise", {"passes": 2, "rerank_disputed": True}),
    "List, 4 passes": Row("listwise", {"passes": 4, "rerank_disputed": False}),
}
BLOCKS = {  # of groups that are larger than a prompt
    f"Lists of {block}, {n} times": Row("listwise", {"passes": n, "rerank_disputed": False, "block": block})
    for block, n in ((8, 2), (8, 4), (4, 4))
}
RELATIVES = {"RULER": Row("ruler")}
SOFT = {
    "Soft ratings": Row("ratings_soft"),
    "Soft pairs, rank": Row("pairs_soft"),
    "Soft pairs, strength": Row("pairs_soft", {"reward": "strength"}),
    "Soft pairs once, rank": Row("pairs_soft", {"orders": 1}),
    "Soft pairs once, strength": Row("pairs_soft", {"orders": 1, "reward": "strength"}),
    "RankBuffer, soft": Row("rankbuffer_soft"),
    "Sampled ratings": Row("ratings_soft", samples=5),
    "Sampled pairs, strength": Row("pairs_soft", {"reward": "strength"}, samples=5),
    "Sampled pairs once, strength": Row("pairs_soft", {"orders": 1, "reward": "strength"}, samples=5),
}
ROWS = PAPER | OURS | BLOCKS | RELATIVES | SOFT | {"RankBuffer, 8 anchors": Row("rankbuffer", {"max_anchors": 8})}


def row_of(label: str) -> Row:
    """Return a row of the tables, or that of a recipe of one's own by its path.

    Raises:
        [`SettingsError`]: if there is neither.
    """
    if label in ROWS:
        return ROWS[label]
    recipe = read_recipe(find_recipe(label))
    return Row(recipe["method"], recipe.get("method_args", {}), recipe.get("judge_samples", 1))


class SimulatedJudge:
    """A chat client that answers from the text of a prompt, and counts tokens, shared prefixes and rounds.

    Args:
        errors (`JudgeErrors` or `Doubts`):
            The errors of the judge's judgments.
        count (`bool`):
            Whether to count tokens. Counting takes most of the time.
        samples (`int`, *optional*, defaults to `1`):
            Answers to give in place of log probabilities, if it is above 1.
    """

    name = "simulated judge"

    def __init__(self, errors: JudgeErrors | Doubts, count: bool, samples: int = 1):
        self.errors, self.count, self.samples = errors, count, samples
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
        text, logprobs = reply(prompt, self.quality, self.errors)
        usage = self.usage(prompt, text) if self.count else Usage()
        if question.soft and self.samples > 1:
            texts = self.sampled(question, text, logprobs)
            usage = usage._replace(completion=self.samples * usage.completion)
            return Reply(texts[0], usage, samples=tuple(Reply(each, Usage()) for each in texts))
        return Reply(text, usage, logprobs=logprobs)

    def sampled(self, question: Question, text: str, logprobs: Any) -> tuple[str, ...]:
        """Draw answers with the probabilities of the judge."""
        ((key, _),) = question.verdict.properties.items()
        chances = read_chances(question.verdict, question.read(text), logprobs).chances
        drawn = Random(question.prompt()).choices([*chances], [*chances.values()], k=self.samples)
        return tuple(json.dumps({key: value}) for value in drawn)

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


@dataclass(frozen=True)
class Agreement:
    """How the rewards of a group agree with quality, for the rollouts with an answer.

    Rewards and qualities count as differences from their mean in the group, as in an advantage.

    Args:
        n (`int`):
            Number of rollouts.
        product, rewards, qualities (`float`):
            Sum of the products, of the squared rewards and of the squared qualities.
    """

    n: int
    product: float
    rewards: float
    qualities: float

    @classmethod
    def of(cls, rewards: Sequence[float], qualities: Sequence[float]) -> "Agreement":
        x, y = centred(rewards), centred(qualities)
        return cls(len(x), sumprod(x, y), sumprod(x, x), sumprod(y, y))

    @property
    def cosine(self) -> float:
        """The cosine of the advantages with the true ones; 0 if all rewards are equal."""
        size = self.rewards * self.qualities
        return self.product / math.sqrt(size) if size > 0 else 0.0


def centred(values: Sequence[float]) -> list[float]:
    """Return the differences from the mean. They are exactly 0 if all values are equal."""
    mean = fmean(values) if len(set(values)) > 1 else values[0]
    return [value - mean for value in values]


def sumprod(x: Iterable[float], y: Iterable[float]) -> float:
    """Return the sum of the products."""
    return sum(a * b for a, b in zip(x, y, strict=True))


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
    agreements: list[Agreement] = field(default_factory=list)
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
        if len(rewards) > 1:
            self.agreements.append(Agreement.of(rewards, list(latent.values())))
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

    def cosine_of_run(self, divided: bool) -> float:
        """Return the cosine of all advantages of the run, taken together, with the true differences in quality.

        Args:
            divided (`bool`):
                Whether the advantages of a group are divided by the standard deviation of its rewards, as in GRPO.
        """
        scales = [
            math.sqrt((each.n - 1) / each.rewards) if divided and each.rewards else 1.0 for each in self.agreements
        ]
        product = sum(scale * each.product for scale, each in zip(scales, self.agreements, strict=True))
        rewards = sum(scale**2 * each.rewards for scale, each in zip(scales, self.agreements, strict=True))
        return product / math.sqrt(rewards * sum(each.qualities for each in self.agreements))

    def counts(self) -> "Counts":
        """Return what the tables need."""
        right, totals = self.right, self.totals
        best = max(self.below_top.values()) / len(right) if right else 0.0
        return Counts(
            calls=totals.calls,
            tokens=totals.tokens,
            computed=totals.tokens - totals.cached_tokens,
            groups=self.groups,
            rounds=self.rounds,
            tau=fmean(self.tau),
            cosine=fmean(agreement.cosine for agreement in self.agreements),
            plain=self.cosine_of_run(False),
            divided=self.cosine_of_run(True),
            tied=self.tied / self.answered,
            flat=self.flat / self.groups,
            placed=[fmean(right), best, fmean(self.anchors), fmean(self.ladder)] if right else [],
            sources=[dict(counts) for _, counts in sorted(self.sources.items())],
        )


@dataclass(frozen=True)
class Counts:
    """The numbers of a replay, as the record keeps them.

    Args:
        calls, tokens, computed (`int`):
            Parsed calls, their tokens, and these without the tokens of shared prefixes.
        groups, rounds (`int`):
            Groups, and judgments that waited for one another.
        tau, cosine (`float`):
            Means over groups: Kendall's tau-b, and the cosine of the advantages with the true ones.
        plain, divided (`float`):
            [`Outcome.cosine_of_run`] of the rewards as they are, and divided by their deviation.
        tied, flat (`float`):
            Share of the answered rollouts that are tied, and of the groups with equal rewards.
        placed (`list[float]`):
            Of insertions: the share in the right place, that of the best blind answer, the anchors among which they
            were placed, and tau of these. Empty for a method without them.
        sources (`list[dict[str, int]]`):
            The anchors after each epoch, by source.
    """

    calls: int
    tokens: int
    computed: int
    groups: int
    rounds: int
    tau: float
    cosine: float
    plain: float
    divided: float
    tied: float
    flat: float
    placed: list[float]
    sources: list[dict[str, int]]


@dataclass(frozen=True)
class Replay:
    """The replay of one method in one world under one judge."""

    label: str
    world: World
    queries: int
    errors: JudgeErrors | Doubts = field(default_factory=JudgeErrors)
    count: bool = False

    def __call__(self) -> Outcome:
        return asyncio.run(self.run())

    async def run(self) -> Outcome:
        """Score all visits of all queries, query by query: queries do not depend on one another."""
        row = row_of(self.label)
        method = load_method(row.method, row.arguments, self.world.seed)
        client = SimulatedJudge(self.errors, self.count, row.samples)
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


def run_all(replays: Mapping[Key, Replay], processes: int, record: dict[str, dict] | None = None) -> dict[Key, Counts]:
    """Run replays in several processes, and return their counts under the same keys.

    Args:
        record (`dict[str, dict]`, *optional*):
            The counts of replays that were made before. These are not made again, and new ones are added.
    """
    record = {} if record is None else record
    missing = [each for each in dict.fromkeys(replays.values()) if repr(each) not in record]
    with Pool(processes) as pool:
        for each, outcome in zip(missing, pool.imap(Replay.__call__, missing), strict=True):
            record[repr(each)] = asdict(outcome.counts())
    return {key: Counts(**record[repr(each)]) for key, each in replays.items()}


def read_record() -> dict[str, dict]:
    """Return the counts of each replay of the page, by what was replayed."""
    return json.loads(gzip.decompress(RECORD.read_bytes())) if RECORD.is_file() else {}


def write_record(record: Mapping[str, dict]) -> None:
    """Write the counts of replays."""
    RECORD.write_bytes(gzip.compress(json.dumps(record, sort_keys=True).encode(), mtime=0))
