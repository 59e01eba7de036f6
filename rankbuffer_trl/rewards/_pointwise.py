"""Pointwise scores: the reward of GRPO, Dr. GRPO, DAPO and GPG in the paper. These differ in their objectives.

Source: paper, appendix "Baseline Implementation Details", paragraph "Pointwise reward methods". The paper leaves
open the prompt (`judge/prompts/pointwise.txt` is ours) and whether scores are integers (here they are).
"""

from dataclasses import dataclass
from typing import Any

from ..buffer import AnchorBuffer
from ..groups import RolloutGroup
from ..judge import Judge, Question, pointwise_question
from ._method import GroupScore, RewardMethod, score_by_reward


@dataclass(frozen=True)
class Pointwise(RewardMethod):
    """A method that scores each rollout on its own, from 0 to 10: reward `2 s / 10 - 1`.

    It asks 1 question per answered rollout: 8 for a group of 8. A rollout without an answer has the reward -1, like
    one with the score 0. A failed judgment leaves its rollout unscored.
    """

    name = "pointwise"

    async def score(self, group: RolloutGroup, buffer: AnchorBuffer | None, judge: Judge) -> GroupScore:
        judged = zip(group.answered, await judge.ask_all(self.questions(group)), strict=True)
        rewards = {rollout.id: None if verdict is None else self.reward(verdict) for rollout, verdict in judged}
        return score_by_reward(group, rewards)

    def reward(self, verdict: Any) -> float:
        """Return the reward of a verdict."""
        return 2 * verdict / 10 - 1

    def most_shown(self, G: int) -> int:
        return 1

    def questions(self, group: RolloutGroup) -> list[Question]:
        return [pointwise_question(group.query, rollout.text) for rollout in group.answered]

    def calls(self, group: RolloutGroup, first: bool) -> tuple[int, int]:
        n = len(group.answered)
        return n, n


METHOD = Pointwise
