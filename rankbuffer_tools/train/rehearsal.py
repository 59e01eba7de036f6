"""Play some visits before there is a run, to learn what the questions of each visit cost.

Buffers grow, so a later visit asks longer questions than the first one, and other kinds of questions. The embedded
judge answers here, which costs nothing.
"""

import asyncio
import random
from collections.abc import Sequence
from typing import Any

from rankbuffer_trl.buffer import AnchorBuffer
from rankbuffer_trl.groups import Rollout, RolloutGroup
from rankbuffer_trl.judge import Call, Judge, Question, RubricJudge
from rankbuffer_trl.rewards import RewardMethod


class RecordingJudge(Judge):
    """The embedded judge. It keeps the questions that it is asked."""

    def __init__(self, questions: list[Question]):
        super().__init__(RubricJudge(), max_attempts=1)
        self.asked = questions

    async def ask_with_cost(self, question: Any) -> tuple[Any | None, Call]:
        """See [`Judge.ask_with_cost`]."""
        self.asked.append(question)
        return await super().ask_with_cost(question)


def rehearse(method: RewardMethod, groups: Sequence[RolloutGroup], visits: int) -> list[list[Question]]:
    """Return the questions of each visit."""
    buffers: dict[str, AnchorBuffer | None] = {}

    async def play(epoch: int) -> list[Question]:
        questions: list[Question] = []
        for group in groups:
            id, texts = group.query.id, [rollout.text for rollout in group.rollouts]
            if epoch:
                # A seed of its own, so that the price repeats.
                texts = random.Random(f"{id} {epoch}").choices(texts, k=len(texts))
            visit = RolloutGroup(group.query, tuple(map(Rollout, range(len(texts)), texts)), epoch, epoch)
            score = await method.score(visit, buffers.get(id), RecordingJudge(questions))
            buffers[id] = score.after or buffers.get(id)  # a method without a buffer leaves none
        return questions

    return [asyncio.run(play(epoch)) for epoch in range(visits)]
