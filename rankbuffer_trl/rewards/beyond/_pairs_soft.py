"""Soft pairs: all pairs, in one or both orders of presentation, compared by the judge's log odds.

This method is ours. The log odds of a match are log p(first is better) - log p(second is better). A judge that prefers
a place adds about the same number to the log odds of every match. So a judge that always says `A` can still order a
group, once this number is taken out:

* Both orders of a pair: their mean has no place in it. The mean log odds of a rollout over its pairs are its strength
  in the Bradley-Terry model by least squares.
* One order: each rollout is shown first in half of its matches, and least squares fit the place beside the strengths.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import combinations, permutations
from statistics import fmean
from typing import Any, Literal

import numpy as np

from ...buffer import AnchorBuffer
from ...groups import RolloutGroup
from ...judge import Judge, pairwise_question
from .._matches import Match, PlaysMatches, reward_ranks, spread_out
from .._method import GroupScore, score_by_reward
from .._presentation import shuffle

Odds = Mapping[tuple[int, int], float]
"""Log odds of the rollout shown first, by (shown first, shown second)."""


@dataclass(frozen=True)
class PairsSoft(PlaysMatches):
    """A method whose reward is the rank `s` (1 is best) by mean log odds: `2 (n - s) / (n - 1) - 1`, or 0 for `n = 1`.

    `n` is the number of ranked rollouts. The method asks two questions per pair of answered rollouts, one in each
    order of presentation: 56 for 8. The judge's server must return `top_logprobs`. A rollout without an answer has the
    reward -1. A pair counts only if both of its judgments succeed. A rollout without such a pair is unscored.

    Args:
        orders (`Literal[1, 2]`, *optional*, defaults to `2`):
            The number of orders in which a pair is shown. With 1, the method asks half as many questions: 28 for 8.
            The preference for a place is fitted in each group. If failed judgments leave that open, no answer of the
            group has a reward. A group of two, or with a rollout that has no answer, is shown in both orders.
        reward (`Literal["rank", "strength"]`, *optional*, defaults to `"rank"`):
            With `strength`, the reward is linear in the mean log odds: the best rollout has 1 and the worst one -1.
    """

    orders: Literal[1, 2] = 2
    reward: Literal["rank", "strength"] = "rank"
    name = "pairs_soft"

    async def score(self, group: RolloutGroup, buffer: AnchorBuffer | None, judge: Judge) -> GroupScore:
        matches = self.matches(group)
        readings = await judge.ask_all(match.question for match in matches)
        odds: Any = {m.shown: r.log_odds("A", "B") for m, r in zip(matches, readings, strict=True) if r is not None}
        strength_of = fit_place(odds) if self._once(group) else mean_leads(odds)
        strengths = {rollout.id: strength_of.get(rollout.id) for rollout in group.answered}
        rewards = reward_ranks(group, strengths) if self.reward == "rank" else spread_out(strengths)
        return score_by_reward(group, rewards)

    def matches(self, group: RolloutGroup) -> list[Match]:
        answered = {rollout.id: rollout.text for rollout in group.answered}
        once = self._once(group)
        pairs = seats(shuffle(answered, 0, group)) if once else permutations(answered, 2)
        return [
            Match((a, b), replace(pairwise_question(group.query, answered[a], answered[b], tie=False), soft=True))
            for a, b in pairs
        ]

    def calls(self, group: RolloutGroup, first: bool) -> tuple[int, int]:
        n = self.number(len(group.answered)) * (1 if self._once(group) else 2)
        return n, n

    def _once(self, group: RolloutGroup) -> bool:
        # Each rollout must sit first in half of its pairs, else the place takes part of a strength. So who sits first
        # depends on all who play, and that is known in time for early questions only if everybody plays.
        return self.orders == 1 and 2 < len(group.answered) == len(group.rollouts)


def seats(ids: list[int]) -> list[tuple[int, int]]:
    """Return each pair once, in its order of presentation. Each candidate is first in half of its pairs, or nearly."""
    pairs = combinations(enumerate(ids), 2)
    # Sorted by the first: a server whose cache holds the last prompt alone, as llama.cpp's, reads it once for all.
    return sorted((a, b) if 2 * (j - i) <= len(ids) else (b, a) for (i, a), (j, b) in pairs)


def mean_leads(odds: Odds) -> dict[int, float]:
    """Return the mean log odds of each candidate over the pairs that have both orders."""
    leads: dict[int, list[float]] = {}
    for (i, j), lead in odds.items():
        if (j, i) in odds:
            leads.setdefault(i, []).append((lead - odds[j, i]) / 2)  # the difference of both orders has no place in it
    return {i: fmean(values) for i, values in leads.items()}


def fit_place(odds: Odds) -> dict[int, float]:
    """Return strengths `s` by least squares on `odds[i, j] = s[i] - s[j] + place`; none if matches leave some open."""
    ids = sorted({i for pair in odds for i in pair})
    design = np.array([[(k == i) - (k == j) for k in ids] + [1] for i, j in odds], float).reshape(-1, len(ids) + 1)
    strengths, _, rank, _ = np.linalg.lstsq(design, np.array(list(odds.values())))
    # Only differences of strengths are known, so there is one unknown less than columns.
    return dict(zip(ids, strengths[:-1].tolist(), strict=True)) if 1 < rank == len(ids) else {}


METHOD = PairsSoft
