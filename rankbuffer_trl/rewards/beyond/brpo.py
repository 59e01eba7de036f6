"""BRPO: one rollout of the group is the reference of the others, and the reward says whether a rollout beats it.

Source: Writing-Zero (Jia et al. 2025, arXiv:2506.00103): "a bootstrapped response as temporary reference from within
group rollouts". It is in no table of the RankBuffer paper. The rewards 1, 0 and -1, ties, and the prompt
(`judge/prompts/pairwise.txt`) are ours.

In the miniature, two lists train a better policy with fewer tokens. BRPO is for a judge that reads no lists: of the
methods that ask for pairs, it takes the fewest tokens to 85 points, 0.30 of RRC-SCR's (`experiments/race`).
"""

from dataclasses import dataclass

from ...buffer import AnchorBuffer
from ...groups import RolloutGroup
from ...judge import Judge
from ..matches import Candidate, Match, PlaysMatches, make_match, play_matches, win_rates
from ..method import GroupScore, score_by_reward
from ..presentation import shuffle


@dataclass(frozen=True)
class BRPO(PlaysMatches):
    """A method that compares each rollout with one random rollout of its group: 1 if it wins, 0 for a tie, else -1.

    It asks one question per answered rollout but the reference: 7 for 8. The reference has the reward 0. A rollout
    without an answer has -1. A rollout whose comparison failed is unscored, and so is the reference if all failed.

    Args:
        seed (`int`, *optional*, defaults to `0`):
            The seed of the reference and of the order of presentation. A recipe sets it to the run's seed.
    """

    seed: int = 0
    name = "brpo"

    async def score(self, group: RolloutGroup, buffer: AnchorBuffer | None, judge: Judge) -> GroupScore:
        """See [`RewardMethod`]."""
        rates = win_rates(group, await play_matches(self.matches(group), judge))
        rewards = {i: None if rate is None else 2 * rate - 1 for i, rate in rates.items()}
        for reference in self._reference(group):
            compared = [reward for reward in rewards.values() if reward is not None]
            rewards[reference] = 0.0 if compared or len(rewards) == 1 else None
        return score_by_reward(group, rewards)

    def _reference(self, group: RolloutGroup) -> list[int]:
        """Return the id of the reference; nothing if no rollout has an answer."""
        return shuffle([rollout.id for rollout in group.answered], self.seed, group, "reference")[:1]

    def matches(self, group: RolloutGroup) -> list[Match]:
        """Return a match of each other answered rollout with the reference."""
        texts: dict[Candidate, str] = {rollout.id: rollout.text for rollout in group.answered}
        pairs = [(i, reference) for reference in self._reference(group) for i in texts if i != reference]
        return [make_match(group, pair, texts, self.seed) for pair in pairs]

    def number(self, n: int) -> int:
        """See [`PlaysMatches`]."""
        return max(n - 1, 0)


METHOD = BRPO
