"""Pairwise Rank: all pairs are compared, and the reward is the rank by win rate.

Source: paper, appendix "Baseline Implementation Details", paragraph "Exhaustive pairwise ranking", which defines
ranks, ties and empty responses. The paper leaves open what a verdict of a tie counts (here half a win to each) and the
prompt (`judge/prompts/pairwise.txt` is ours).
"""

from dataclasses import dataclass

from ..buffer import AnchorBuffer
from ..groups import RolloutGroup
from ..judge import Judge
from ._matches import Match, PlaysMatches, all_pairs, play_matches, reward_ranks, win_rates
from ._method import GroupScore, score_by_reward


@dataclass(frozen=True)
class PairwiseRank(PlaysMatches):
    """A method whose reward is the rank `s` (1 is best) by win rate: `2 (n - s) / (n - 1) - 1`, or 0 for `n = 1`.

    `n` is the number of ranked rollouts. Equal win rates share the first rank they occupy (1, 1, 3). The method asks
    one question per pair of answered rollouts: 28 for 8. A rollout without an answer has the reward -1. A rollout
    whose comparisons all failed is unscored.

    Args:
        seed (`int`, *optional*, defaults to `0`):
            The seed of the order of presentation. A recipe sets it to the run's seed.
    """

    seed: int = 0
    name = "pairwise_rank"

    async def score(self, group: RolloutGroup, buffer: AnchorBuffer | None, judge: Judge) -> GroupScore:
        rates = win_rates(group, await play_matches(self.matches(group), judge), by_default=len(group.empty))
        return score_by_reward(group, reward_ranks(group, rates))

    def matches(self, group: RolloutGroup) -> list[Match]:
        return all_pairs(group, self.seed)


METHOD = PairwiseRank
