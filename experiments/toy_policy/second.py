"""What a second judge can be for, beside debiasing the rewards: to judge all again, or to judge alone.

* `debias`: a better reference judge scores the first 5 % of the groups again, and `debiasing.py` corrects the
  rewards.
* `alone`: this reference judge scores one of 20 groups, and the others have no reward.
* `again`: the judge, with its weakness and with other errors, scores every group twice. The rewards are the means.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from random import Random

from rankbuffer_trl.buffer import AnchorBuffer
from rankbuffer_trl.groups import RolloutGroup
from rankbuffer_trl.judge import Judge
from rankbuffer_trl.rewards import GroupScore, RewardMethod, SilentJudge

SECOND = ("", "debias", "alone", "again")
EVERY = 20  # groups of which the reference judge scores one


@dataclass(frozen=True)
class Second(RewardMethod):
    """A method with a second judge, whose calls join those of the first one."""

    inner: RewardMethod
    second: Judge

    @property
    def name(self) -> str:
        """The name of the method in the ledger."""
        return self.inner.name

    @property
    def responses_needed(self) -> int:
        """As many as the method needs."""
        return self.inner.responses_needed

    def most_shown(self, G: int) -> int:
        """See [`RewardMethod`]."""
        return self.inner.most_shown(G)

    async def ask(self, group: RolloutGroup, buffer: AnchorBuffer | None, judge: Judge) -> GroupScore:
        """Return the score of the second judge."""
        score = await self.inner.score(group, buffer, self.second)
        judge.calls.extend(self.second.drain())
        return score


class Twice(Second):
    """A method whose rewards are the means of two judgments. The buffer is that of the first one."""

    async def score(self, group: RolloutGroup, buffer: AnchorBuffer | None, judge: Judge) -> GroupScore:
        """See [`RewardMethod`]."""
        score = await self.inner.score(group, buffer, judge)
        again = await self.ask(group, buffer, judge)
        pairs = zip(score.rewards, again.rewards, strict=True)
        return replace(score, rewards=tuple(None if None in pair else sum(pair) / 2 for pair in pairs))

    def calls(self, group: RolloutGroup, first: bool) -> tuple[int, int]:
        """See [`RewardMethod`]."""
        least, most = self.inner.calls(group, first)
        return 2 * least, 2 * most


@dataclass(frozen=True)
class Alone(Second):
    """A method that scores one of 20 groups, by the second judge, and leaves the others without a reward."""

    ids: Sequence[str] = ()

    def chosen(self, group: RolloutGroup) -> bool:
        """Tell whether a group is scored. The queries of an epoch are counted in an order of their own."""
        order = sorted(self.ids, key=lambda id: Random(f"{group.epoch} {id}").random())
        return (group.known_epoch * len(order) + order.index(group.query.id)) % EVERY == 0

    async def score(self, group: RolloutGroup, buffer: AnchorBuffer | None, judge: Judge) -> GroupScore:
        """See [`RewardMethod`]."""
        if isinstance(judge, SilentJudge):  # what a run looks at before it starts
            return await self.inner.score(group, buffer, judge)
        if not self.chosen(group):
            return GroupScore((None,) * len(group.rollouts))
        return await self.ask(group, buffer, judge)

    def calls(self, group: RolloutGroup, first: bool) -> tuple[int, int]:
        """See [`RewardMethod`]."""
        return 0, self.inner.calls(group, first)[1]
