"""Uses of probabilities that were tried and are not in the package: insertions shown twice, and the best of a group.

    python -m experiments.judge_cost.trials --seed 0     # and with the seeds 1, 2 and 3: 15 seconds of one core each

The judge is `RECORDED`. An insertion has the error that gives the share of right comparisons of the record in
`experiments/real_judge`: 0.75 by the paper's prompt, 0.82 with the best anchor first, 0.88 by the mean of both. A look
at a whole group has the error by which it would agree with soft ratings as it does in `looks.jsonl.gz`.
"""

import argparse
import json
import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from statistics import fmean
from typing import Any, Literal

from experiments.judge_cost.replay import ROWS, Replay, Row, run_all
from experiments.real_judge.looks import RECORD, question
from experiments.real_judge.looks_report import agreements, read_kept, read_lines, read_looks
from experiments.simulated_judge import RECORDED, Doubts, World
from rankbuffer_trl.buffer import AnchorBuffer
from rankbuffer_trl.groups import RolloutGroup
from rankbuffer_trl.judge import Judge, Question, Reading
from rankbuffer_trl.rewards.beyond.looks import balanced
from rankbuffer_trl.rewards.beyond.pairs_soft import spread_out
from rankbuffer_trl.rewards.beyond.rankbuffer_soft import RankBufferSoft
from rankbuffer_trl.rewards.method import GroupScore, RewardMethod, score_by_reward

INSERTED = {"worst anchor first": 0.75, "best anchor first": 0.82, "both, the mean": 0.88}


@dataclass(frozen=True)
class BestSoft(RewardMethod):
    """A method whose reward says how likely the judge takes a rollout for the best of its group.

    Args:
        looks (`int`, *optional*, defaults to `2`):
            The number of orders in which the group is shown, see [`balanced`].
        worst (`bool`, *optional*, defaults to `False`):
            Ask about each order for the worst response, too.
        reward (`Literal["strength", "chance"]`, *optional*, defaults to `"strength"`):
            `strength`: the mean log odds of being the best, less those of being the worst. `chance`: the mean
            probability of being the best. It tells the best from the others, and less the others from each other.
        seed (`int`, *optional*, defaults to `0`):
            The seed of the order of presentation.
    """

    looks: int = 2
    worst: bool = False
    reward: Literal["strength", "chance"] = "strength"
    seed: int = 0
    name = "listwise"

    async def score(self, group: RolloutGroup, buffer: AnchorBuffer | None, judge: Judge) -> GroupScore:
        """See [`RewardMethod`]. A group with a failed judgment, or with one answer, has no reward."""
        answered = {rollout.id: rollout.text for rollout in group.answered}
        orders = balanced(list(answered), self.looks, self.seed, group) if len(answered) > 1 else []
        asked = [(order, kind) for order in orders for kind in ("best", "worst")[: 1 + self.worst]]
        readings: list[Any] = await judge.ask_all(
            question(group.query, [answered[i] for i in order], kind) for order, kind in asked
        )
        if not readings or None in readings:
            return score_by_reward(group, dict.fromkeys(answered))
        found: dict[int, list[float]] = {i: [] for i in answered}
        for (order, kind), reading in zip(asked, readings, strict=True):
            for slot, i in enumerate(order):
                found[i].append(self._worth(reading, slot, 1 if kind == "best" else -1))
        means = {i: fmean(each) for i, each in found.items()}
        return score_by_reward(group, spread_out(means) if self.reward == "strength" else means)

    def _worth(self, reading: Reading, slot: int, sign: int) -> float:
        if self.reward == "chance":
            return sign * (2 * reading.chances[slot] - 1)
        return sign * fmean(reading.log_odds(slot, other) for other in reading.chances)


@dataclass(frozen=True)
class Twice:
    """A judge that answers each question by the mean of two looks. Its word is that of the first look."""

    judge: Judge

    async def ask_all(self, questions: Iterable[Question]) -> list[Any]:
        """Ask all questions twice."""
        first = list(questions)
        again = [replace(question, template="Look again.\n\n" + question.template) for question in first]
        readings = await self.judge.ask_all(first + again)
        return [
            one._replace(chances={p: (chance + other.chances[p]) / 2 for p, chance in one.chances.items()})
            for one, other in zip(readings[: len(first)], readings[len(first) :], strict=True)
        ]


class InsertedTwice(RankBufferSoft):
    """`rankbuffer_soft` that asks each insertion twice."""

    async def score(self, group: RolloutGroup, buffer: AnchorBuffer | None, judge: Judge) -> GroupScore:
        """See [`RankBufferSoft`]."""
        return await super().score(group, buffer, Twice(judge))


TRIED = {
    "RankBuffer, soft, inserted twice": Row(f"{__name__}.InsertedTwice"),
    "Best, 2 looks": Row(f"{__name__}.BestSoft"),
    "Best, 2 looks, its chance": Row(f"{__name__}.BestSoft", {"reward": "chance"}),
    "Best and worst, 2 looks": Row(f"{__name__}.BestSoft", {"worst": True}),
    "Best, 4 looks": Row(f"{__name__}.BestSoft", {"looks": 4}),
}
ROWS |= TRIED


def error_of(right: float, looks: int) -> float:
    """Return the error of one look at one response, if the mean of so many looks is right this often.

    Answers of known order differ by a normal number with the deviation `sqrt(2)`, see `experiments/fit_doubts.py`.
    """
    return math.sqrt(looks) / math.tan(math.pi * (right - 0.5))


def error_of_choice(with_ratings: float, pairs_and_ratings: float, questions: int) -> float:
    """Return the error of one question about a group, if the mean of so many agrees with soft ratings in this share.

    Two opinions with normal errors agree on a pair in `1/2 + asin(r) / pi`, where `r` is their correlation. How far
    the samples are apart follows from how often pairs, in both orders, and ratings agree.
    """
    rating, pair = RECORDED.rating.noise**2, RECORDED.pair.noise**2 / 2
    r, own = (math.sin(math.pi * (share - 0.5)) for share in (pairs_and_ratings, with_ratings))
    middle = r**2 * (rating + pair)
    apart = (middle + math.sqrt(middle**2 + 4 * (1 - r**2) * r**2 * rating * pair)) / (2 * (1 - r**2))
    return math.sqrt(questions * (apart**2 / (own**2 * (apart + rating)) - apart))


def judges() -> dict[str, tuple[str, Doubts]]:
    """Return what is replayed: a row and its judge, by name."""
    found = {"Soft ratings": ("Soft ratings", RECORDED)}
    for name, right in INSERTED.items():
        looks = 2 if name.startswith("both") else 1
        judge = replace(RECORDED, insertion=replace(RECORDED.insertion, noise=error_of(right, looks)))
        found[f"insertion, {name}"] = ("RankBuffer, soft, inserted twice" if looks == 2 else "RankBuffer, soft", judge)
    share = agreements(read_looks(read_lines(RECORD)), read_kept())
    for label in list(TRIED)[1:]:
        read, questions = ("best less worst", 4) if "worst" in label else ("best", 2)
        error = error_of_choice(share[read], share["pairs"], questions)
        found[label] = (label, replace(RECORDED, choice=replace(RECORDED.choice, noise=error)))
    return found


def main() -> None:
    """Replay, and print one JSON line for each method."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--queries", type=int, default=40)
    parser.add_argument("--seed", type=int, default=0, help="seed of the world and of the methods")
    parser.add_argument("--processes", type=int, default=2, help="replays at the same time")
    arguments = parser.parse_args()
    world = World(seed=arguments.seed)
    replays = {name: Replay(label, world, arguments.queries, judge, True) for name, (label, judge) in judges().items()}
    for name, outcome in run_all(replays, arguments.processes).items():
        line = {
            "ktokens": outcome.tokens / outcome.groups / 1000,
            "computed": outcome.computed / outcome.groups / 1000,
            "tau": outcome.mean_tau,
            "cosine": outcome.mean_cosine,
            "tau/ktoken": outcome.mean_tau / outcome.tokens * outcome.groups * 1000,
        }
        print(json.dumps({"method": name} | {key: float(f"{value:.3g}") for key, value in line.items()}))


if __name__ == "__main__":
    main()
