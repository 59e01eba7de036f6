"""Matches in a random order of presentation and win rates, which the pairwise methods share.

A match gives 1 point to the winner and 0 to the loser. After a tie it gives half a point to each. A match whose
judgment failed is not counted: win rates are over completed comparisons (paper, appendix "Baseline Implementation
Details").
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from statistics import fmean
from typing import Any

from ..groups import RolloutGroup
from ..judge import Judge, Question, pairwise_question
from ..ranking import rewards_from_ranks
from ._method import RewardMethod
from ._presentation import shuffle

Candidate = int | str
"""The id of a rollout, or the name of a reference response."""

Points = dict[Candidate, float]
"""The points of a match by candidate."""


@dataclass(frozen=True)
class Match:
    """A match of two candidates, in the order in which the judge sees them, with its question."""

    shown: tuple[Candidate, Candidate]
    question: Question

    def points(self, verdict: str) -> Points:
        """Return the points that the judge's verdict gives to each candidate."""
        first = {"A": 1.0, "tie": 0.5, "B": 0.0}[verdict]
        return {self.shown[0]: first, self.shown[1]: 1 - first}


class PlaysMatches(RewardMethod):
    """A base of the methods whose questions are all matches, asked at once."""

    def matches(self, group: RolloutGroup) -> list[Match]:
        """Return all matches of a group."""
        raise NotImplementedError

    def most_shown(self, G: int) -> int:
        return 2

    def calls(self, group: RolloutGroup, first: bool) -> tuple[int, int]:
        n = self.number(len(group.answered))  # by a formula, since a plan asks it of every query
        return n, n

    def number(self, n: int) -> int:
        """Return how many matches `n` answered rollouts play. Here each meets each other one once."""
        return n * (n - 1) // 2


def make_match(
    group: RolloutGroup,
    pair: tuple[Candidate, Candidate],
    texts: Mapping[Candidate, str],
    seed: int,
    purpose: object = "",
    tie: bool = True,
) -> Match:
    """Return a match of two candidates in a random order of presentation.

    Args:
        texts (`Mapping[Candidate, str]`):
            The response of each candidate.
        purpose (*optional*):
            A name for the match, so that a later match of the same two can have another order.
        tie (`bool`, *optional*, defaults to `True`):
            Whether the judge may answer `tie`.
    """
    # Sorted: the order does not depend on who is named first.
    first, second = shuffle(pair, seed, group, (purpose, *sorted(map(str, pair))))
    return Match((first, second), pairwise_question(group.query, texts[first], texts[second], tie))


def all_pairs(group: RolloutGroup, seed: int) -> list[Match]:
    """Return a match for every unordered pair of answered rollouts."""
    texts: dict[Candidate, str] = {rollout.id: rollout.text for rollout in group.answered}
    return [make_match(group, pair, texts, seed) for pair in combinations(texts, 2)]


async def play_matches(matches: Sequence[Match], judge: Judge) -> list[Points | None]:
    """Ask about all matches at once and return the points of each; `None` if its judgment failed."""
    verdicts = await judge.ask_all(match.question for match in matches)
    return [
        None if verdict is None else match.points(verdict) for match, verdict in zip(matches, verdicts, strict=True)
    ]


def win_rates(group: RolloutGroup, played: Iterable[Points | None], by_default: int = 0) -> dict[int, float | None]:
    """Return the mean points of each answered rollout over its completed matches, in [0, 1]; `None` if it has none.

    Args:
        by_default (`int`, *optional*, defaults to `0`):
            The wins that each rollout also has over rollouts without an answer.
    """
    completed = [points for points in played if points is not None]
    rates: dict[int, float | None] = {}
    for rollout in group.answered:
        taken = [points[rollout.id] for points in completed if rollout.id in points]
        # Wins by default alone are no judgment.
        rates[rollout.id] = fmean(taken + [1.0] * by_default) if taken else None
    return rates


def reward_ranks(group: RolloutGroup, rates: Mapping[int, float | None]) -> dict[int, float | None]:
    """Return the reward `2 (n - s) / (n - 1) - 1` of the rank `s` (1 is best) among `n` rates."""
    if len(group.answered) == 1:
        return {group.answered[0].id: 0.0}
    ranked = {i: rate for i, rate in rates.items() if rate is not None}  # without a rate there is no reward
    # Equal rates share the first rank that they occupy.
    places = {i: sum(other <= rate for other in ranked.values()) - 1 for i, rate in ranked.items()}
    rewards = rewards_from_ranks(places, len(group.rollouts))
    return {i: rewards[i] for i in rates}


def spread_out(strengths: Mapping[Any, float | None]) -> dict[Any, float | None]:
    """Return rewards that are linear in strengths, from -1 for the worst to 1 for the best; 0 if all are equal."""
    measured = [strength for strength in strengths.values() if strength is not None]
    low, high = min(measured, default=0.0), max(measured, default=0.0)
    if low == high:
        alone = len(strengths) == 1  # there was nothing to ask
        return {i: 0.0 if alone or strength is not None else None for i, strength in strengths.items()}
    return {i: s if s is None else 2 * (s - low) / (high - low) - 1 for i, s in strengths.items()}
