"""RRC-AGR: rollouts are compared with fixed reference responses, and the reward is the win rate.

Source: paper, appendix "Baseline Implementation Details": "RRC-AGR compares each rollout against the seven fixed
Nectar responses for its query". The judge does not see their ranks. The paper leaves open the map from win rate to
reward (here `2 * rate - 1`), ties (half a win to each) and the prompt (`judge/prompts/pairwise.txt` is ours).

The paper's table gives RRC-AGR and RRC-SCR the same token total, 200,817,235, for 218,914 and 104,028 calls. That is
probably a misprint. Nothing here is tuned to it.
"""

from dataclasses import dataclass

from ..buffer import AnchorBuffer
from ..groups import RolloutGroup
from ..judge import Judge
from ..settings import check_at_least
from ._matches import Candidate, Match, PlaysMatches, make_match, play_matches, win_rates
from ._method import GroupScore, score_by_reward


@dataclass(frozen=True)
class RRCAGR(PlaysMatches):
    """A method that compares rollouts with references: `2 * (win rate over completed comparisons) - 1`.

    It asks 1 question per answered rollout and reference response: 56 for 8 rollouts and 7 references. A rollout
    without an answer has the reward -1, like one that beats no reference. A rollout whose comparisons all failed is
    unscored.

    Args:
        seed (`int`, *optional*, defaults to `0`):
            The seed of the order of presentation. A recipe sets it to the run's seed.
        references (`int`, *optional*, defaults to `7`):
            The number of reference responses of a query, at least 1. If a query has more, the worst ones are taken.

    Raises:
        [`SettingsError`]: if an argument is out of range.
    """

    seed: int = 0
    references: int = 7
    name = "rrc_agr"

    def __post_init__(self):
        check_at_least(self, references=1)

    @property
    def responses_needed(self) -> int:
        return self.references

    async def score(self, group: RolloutGroup, buffer: AnchorBuffer | None, judge: Judge) -> GroupScore:
        rates = win_rates(group, await play_matches(self.matches(group), judge))
        return score_by_reward(group, {i: None if rate is None else 2 * rate - 1 for i, rate in rates.items()})

    def matches(self, group: RolloutGroup) -> list[Match]:
        # Names, since ids of rollouts are numbers from 0 too.
        names = {f"reference {n}": text for n, text in enumerate(group.query.responses[: self.references])}
        texts: dict[Candidate, str] = {rollout.id: rollout.text for rollout in group.answered}
        texts.update(names)
        return [make_match(group, (r.id, name), texts, self.seed) for r in group.answered for name in names]

    def number(self, n: int) -> int:
        return n * self.references


METHOD = RRCAGR
