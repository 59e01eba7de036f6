"""RankBuffer with expected positions: the mean position under the judge's probabilities replaces fine ranking.

This method is ours. The paper's insertion gives one position, and the rollouts at one position are ranked by one more
question. The mean over the probabilities of all positions orders them without that question.
"""

from dataclasses import dataclass, field, replace

from ...buffer import AnchorBuffer, initial_buffer
from ...groups import RolloutGroup
from ...judge import Judge, insertion_question
from ...ranking import Ranking, rank_tiers
from .._method import GroupScore, score_by_ranking
from .._rankbuffer import RankBuffer


@dataclass(frozen=True)
class RankBufferSoft(RankBuffer):
    """RankBuffer that orders rollouts by their expected positions: the means under the judge's probabilities.

    It asks 1 question per answered rollout: 8 for a group of 8. The judge's server must return `top_logprobs`. The
    reward is the paper's, from the order of the means. Equal means are a tie, and the buffer update takes them in the
    order in which they were sampled. With `bootstrap`, the first visit is a list that is read by its words: bring
    references instead if the judge's lists say nothing. The method has the arguments of [`RankBuffer`] except `fine`.

    The interval of a rollout is the position that the judge said. A judge in doubt gives probability to all positions,
    so means are pulled to the middle. By rounded means, few rollouts would be outside all anchors, and buffers would
    hardly grow at their ends (experiments/judge_cost). A number of two tokens is read only where the judge said its
    first token. So with more than nine anchors, some of the probability of 1, and of 10 and more, may be lost.
    """

    fine: bool = field(default=False, init=False)
    name = "rankbuffer_soft"

    async def score(self, group: RolloutGroup, buffer: AnchorBuffer | None, judge: Judge) -> GroupScore:
        if buffer is None and self.bootstrap:
            return await self._bootstrap(group, judge)
        buffer = buffer or initial_buffer(group.query.responses, self.k0)
        anchors = [anchor.text for anchor in buffer.anchors]
        readings = await judge.ask_all(
            replace(insertion_question(group.query, anchors, rollout.text, self.anchor_content), soft=True)
            for rollout in group.answered
        )
        readable = {r.id: reading for r, reading in zip(group.answered, readings, strict=True) if reading is not None}
        # The order; the intervals are those that the judge said, see above.
        means = {i: reading.mean for i, reading in readable.items()}
        positions = {i: reading.value for i, reading in readable.items()}
        rising = sorted(means, key=means.__getitem__)
        intervals = range(len(buffer) + 1)
        sigma = tuple(tuple(group.rollouts[i] for i in rising if positions[i] == p) for p in intervals)
        ranking = Ranking(positions, sigma)
        after = self._updated(buffer, ranking, group, judge)
        return score_by_ranking(group, ranking, buffer, after, order=rank_tiers(means))


METHOD = RankBufferSoft
