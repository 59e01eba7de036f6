"""RULER: one prompt shows the whole group, and each rollout gets a score in comparison with the others.

Source: RULER of OpenPipe's ART. It is in no table of the RankBuffer paper. ART's scores are from 0 to 1; here they are
integers from 0 to 100. The prompt is ours (`judge/prompts/group.txt`), and so is the random order of presentation.
"""

from dataclasses import dataclass

from ...buffer import AnchorBuffer
from ...groups import RolloutGroup
from ...judge import Judge, group_question
from .._method import GroupScore, RewardMethod, score_by_reward
from .._presentation import shuffle


@dataclass(frozen=True)
class Ruler(RewardMethod):
    """A method whose reward is a score `s` from 0 to 100 that compares all rollouts: `2 s / 100 - 1`.

    It asks one question per group. A single answered rollout is alone in its prompt. A rollout without an answer has
    the reward -1. If the judgment fails, no rollout of the group is scored.

    Args:
        seed (`int`, *optional*, defaults to `0`):
            The seed of the order of presentation. A recipe sets it to the run's seed.
    """

    seed: int = 0
    name = "ruler"
    shows_whole_groups = True

    async def score(self, group: RolloutGroup, buffer: AnchorBuffer | None, judge: Judge) -> GroupScore:
        shown = shuffle([rollout.id for rollout in group.answered], self.seed, group, "group")
        texts = [group.rollouts[i].text for i in shown]
        scores = await judge.ask(group_question(group.query, texts)) if texts else None
        return score_by_reward(group, {i: scores and 2 * scores[place] / 100 - 1 for place, i in enumerate(shown)})

    def most_shown(self, G: int) -> int:
        return G

    def calls(self, group: RolloutGroup, first: bool) -> tuple[int, int]:
        count = int(bool(group.answered))
        return count, count


METHOD = Ruler
