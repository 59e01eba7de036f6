"""Soft pairs: all pairs in both orders of presentation, ranked by the judge's mean log odds.

This method is ours. The log odds of a match are log p(first is better) - log p(second is better). A judge that prefers
a place adds the same number to the log odds of every match, and the mean over both orders of a pair cancels it. So a
judge that always says `A` can still order a group.

With all pairs judged, the mean log odds of a rollout over its pairs are its strength in the Bradley-Terry model by
least squares. The reward is the rank, so how far apart two strengths are does not matter.
"""

from dataclasses import dataclass, replace
from itertools import permutations
from statistics import fmean

from ...buffer import AnchorBuffer
from ...groups import RolloutGroup
from ...judge import Judge, pairwise_question
from ..matches import Match, PlaysMatches, reward_ranks
from ..method import GroupScore, score_by_reward


@dataclass(frozen=True)
class PairsSoft(PlaysMatches):
    """A method whose reward is the rank `s` (1 is best) by mean log odds: `2 (n - s) / (n - 1) - 1`, or 0 for `n = 1`.

    `n` is the number of ranked rollouts. The method asks two questions per pair of answered rollouts, one in each
    order of presentation: 56 for 8. The judge's server must return `top_logprobs`. A rollout without an answer has the
    reward -1. A pair counts only if both of its judgments succeed. A rollout without such a pair is unscored.
    """

    name = "pairs_soft"

    async def score(self, group: RolloutGroup, buffer: AnchorBuffer | None, judge: Judge) -> GroupScore:
        """See [`RewardMethod`]."""
        matches = self.matches(group)
        readings = await judge.ask_all(match.question for match in matches)
        odds = {m.shown: r.log_odds("A", "B") for m, r in zip(matches, readings, strict=True) if r is not None}
        strengths: dict[int, float | None] = {}
        for rollout in group.answered:
            i = rollout.id
            leads = [(lead - odds[j, i]) / 2 for (first, j), lead in odds.items() if first == i and (j, i) in odds]
            strengths[i] = fmean(leads) if leads else None
        return score_by_reward(group, reward_ranks(group, strengths))

    def matches(self, group: RolloutGroup) -> list[Match]:
        """Return two matches for every pair of answered rollouts, one in each order."""
        return [
            Match((a.id, b.id), replace(pairwise_question(group.query, a.text, b.text, tie=False), soft=True))
            for a, b in permutations(group.answered, 2)
        ]

    def number(self, n: int) -> int:
        """See [`PlaysMatches`]."""
        return n * (n - 1)


METHOD = PairsSoft
