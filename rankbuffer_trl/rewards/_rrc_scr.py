"""RRC-SCR: rollouts are compared with each other, and the reward is the win rate.

Source: paper, appendix "Baseline Implementation Details": "RRC-SCR compares every unordered pair in the group". The
paper leaves open the map from win rate to reward (here `2 * rate - 1`), ties (half a win to each) and the prompt
(`judge/prompts/pairwise.txt` is ours). It also leaves open empty rollouts: here they lose without a question and have
the reward -1.
"""

from dataclasses import dataclass

from ..buffer import AnchorBuffer
from ..groups import RolloutGroup
from ..judge import Judge
from ._matches import Match, PlaysMatches, all_pairs, play_matches, win_rates
from ._method import GroupScore, score_by_reward


@dataclass(frozen=True)
class RRCSCR(PlaysMatches):
    """A method that compares a group with itself: `2 * (win rate over completed comparisons) - 1`.

    It asks one question per pair of answered rollouts: 28 for 8. A single answered rollout has the reward 1 if there
    are empty ones, and 0 if it is alone. A rollout whose comparisons all failed is unscored.

    Args:
        seed (`int`, *optional*, defaults to `0`):
            The seed of the order of presentation. A recipe sets it to the run's seed.
    """

    seed: int = 0
    name = "rrc_scr"

    async def score(self, group: RolloutGroup, buffer: AnchorBuffer | None, judge: Judge) -> GroupScore:
        if len(group.answered) == 1:
            # It has beaten the empty ones.
            return score_by_reward(group, {group.answered[0].id: 1.0 if group.empty else 0.0})
        rates = win_rates(group, await play_matches(self.matches(group), judge), by_default=len(group.empty))
        return score_by_reward(group, {i: None if rate is None else 2 * rate - 1 for i, rate in rates.items()})

    def matches(self, group: RolloutGroup) -> list[Match]:
        return all_pairs(group, self.seed)


METHOD = RRCSCR
