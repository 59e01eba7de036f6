"""What the pairwise methods share: matches in a random order of presentation, and win rates.

A match gives 1 point to the winner and 0 to the loser, or half a point to each for a tie. A match whose judgment
failed is not counted: rates are over completed comparisons (paper, appendix "Baseline Implementation Details").
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from statistics import fmean

from ..groups import RolloutGroup
from ..judge import Judge, Question, pairwise_question
from .presentation import shuffle

Candidate = int | str
"""A rollout by its id, or a reference response by its name."""

Points = dict[Candidate, float]
"""Points of a match by candidate."""


@dataclass(frozen=True)
class Match:
    """Two candidates in the order in which the judge sees them."""

    shown: tuple[Candidate, Candidate]
    question: Question

    def points(self, verdict: str) -> Points:
        """What the judge's verdict gives to each."""
        first = {"A": 1.0, "tie": 0.5, "B": 0.0}[verdict]
        return {self.shown[0]: first, self.shown[1]: 1 - first}


def make_match(
    group: RolloutGroup,
    pair: tuple[Candidate, Candidate],
    texts: Mapping[Candidate, str],
    seed: int,
    purpose: object = "",
    tie: bool = True,
) -> Match:
    """A match of two candidates, named by what `texts` has for them. `purpose` tells matches of the same two apart."""
    first, second = shuffle(pair, seed, group, (purpose, *sorted(map(str, pair))))
    return Match((first, second), pairwise_question(group.query, texts[first], texts[second], tie))


def all_pairs(group: RolloutGroup, seed: int) -> list[Match]:
    """A match for every unordered pair of answered rollouts."""
    texts: dict[Candidate, str] = {rollout.id: rollout.text for rollout in group.answered}
    return [make_match(group, pair, texts, seed) for pair in combinations(texts, 2)]


async def play(matches: Sequence[Match], judge: Judge) -> list[Points | None]:
    """The points of each match, `None` where the judge gave no verdict. All are asked at once."""
    verdicts = await judge.ask_all(match.question for match in matches)
    return [
        None if verdict is None else match.points(verdict) for match, verdict in zip(matches, verdicts, strict=True)
    ]


def win_rates(group: RolloutGroup, played: Iterable[Points | None], by_default: int = 0) -> dict[int, float | None]:
    """Mean points of each answered rollout over its completed matches, in [0, 1]; `None` if none was completed.

    Args:
        group (`RolloutGroup`):
            The group.
        played (`Iterable[Points | None]`):
            Its matches.
        by_default (`int`, *optional*, defaults to `0`):
            Wins that each has besides, over rollouts without an answer. They alone make no rate: a rollout about which
            nobody was heard has none.
    """
    completed = [points for points in played if points is not None]
    rates: dict[int, float | None] = {}
    for rollout in group.answered:
        taken = [points[rollout.id] for points in completed if rollout.id in points]
        rates[rollout.id] = fmean(taken + [1.0] * by_default) if taken else None
    return rates
