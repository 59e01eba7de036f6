"""RankBuffer's reward for one group: the frame of Algorithm 1 around ranking and buffer update.

Other parts compute the format reward (`_answers.py`) and the advantage (TRL), and keep the buffers (`store/`).
"""

import logging
from dataclasses import dataclass, replace

from ..buffer import AnchorBuffer, bootstrap_buffer, initial_buffer
from ..groups import RolloutGroup
from ..judge import TOO_LONG, Judge, ranking_question
from ..ranking import Ranking, coarse_to_fine, sort
from ..settings import check_at_least
from ._method import GroupScore, RewardMethod, score_by_order, score_by_ranking

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class RankBuffer(RewardMethod):
    """The paper's reward method: rank rewards from an ordered, persistent buffer of anchors.

    Args:
        k0 (`int`, *optional*, defaults to `4`):
            `K0`, the initial number of anchors. At least 2.
        prune_after (`int`, *optional*, defaults to `3`):
            `H`: an internal anchor is pruned after this many inactive epochs in a row. At least 1.
        refine_at (`int`, *optional*, defaults to `3`):
            An internal interval with at least this many rollouts adds its lower median as an anchor. At least 1.
        bootstrap (`bool`, *optional*, defaults to `False`):
            Build a query's buffer from its first ranked group instead of from the data set's responses.
        static (`bool`, *optional*, defaults to `False`):
            Freeze all buffers at the end of epoch 0 (the starred variants).
        fine (`bool`, *optional*, defaults to `True`):
            `False` leaves rollouts of one interval tied (the coarse-only ablation).
        anchor_content (`bool`, *optional*, defaults to `True`):
            `False` hides the anchors' text from the judge (the order-only ablation).
        max_anchors (`int`, *optional*):
            Ours: a buffer that has grown larger is thinned to so many anchors, with both ends. At least `k0`.

    Raises:
        [`SettingsError`]: if an argument is out of range.

    Example:

    ```python
    import asyncio

    from rankbuffer_trl import Judge, RankBuffer
    from rankbuffer_trl.groups import Query, Rollout, RolloutGroup, Rubric
    from rankbuffer_trl.judge import RubricJudge

    query = Query(
        id="tea",
        prompt=[{"role": "user", "content": "How do I make tea?"}],
        rubrics=(Rubric("Names what is needed: water, tea, cup.", weight=5),),
        responses=("no idea", "use water", "put tea in water", "put tea and water in a cup"),
    )
    rollouts = (Rollout(0, "take tea"), Rollout(1, ""), Rollout(2, "water, tea, cup"))
    group = RolloutGroup(query, rollouts, step=0, epoch=0)
    score = asyncio.run(RankBuffer().score(group, None, Judge(RubricJudge())))
    score.rewards  # (0.0, -1.0, 1.0)
    score.after  # the buffer for the next visit of this query
    ```
    """

    k0: int = 4
    prune_after: int = 3
    refine_at: int = 3
    bootstrap: bool = False
    static: bool = False
    fine: bool = True
    anchor_content: bool = True
    max_anchors: int | None = None
    name = "rankbuffer"

    def __post_init__(self):
        check_at_least(self, k0=2, prune_after=1, refine_at=1, max_anchors=self.k0)

    @property
    def responses_needed(self) -> int:
        """The number of reference responses that every query must have: `K0`, or 0 if buffers are bootstrapped."""
        return 0 if self.bootstrap else self.k0

    def with_room_for(self, anchors: int) -> "RankBuffer":
        """Return the method for a judge whose context holds so many anchors; `max_anchors` and `k0` come first."""
        if self.max_anchors or not self.anchor_content:
            return self
        return replace(self, max_anchors=max(anchors, self.k0))

    async def score(self, group: RolloutGroup, buffer: AnchorBuffer | None, judge: Judge) -> GroupScore:
        """Return the rewards and the next buffer of one group (Algorithm 1).

        Args:
            group (`RolloutGroup`):
                `G` rollouts of one query. Those without an answer are never judged and share the reward -1.
            buffer (`AnchorBuffer`, *optional*):
                The query's buffer, `None` on its first visit.
        """
        if buffer is None and not self.bootstrap:
            buffer = initial_buffer(group.query.responses, self.k0)
        if buffer is None:
            return await self._bootstrap(group, judge)
        ranking = await coarse_to_fine(
            group.query, buffer, group.answered, judge, fine=self.fine, anchor_content=self.anchor_content
        )
        after = self._updated(buffer, ranking, group, judge)
        return score_by_ranking(group, ranking, buffer, after)

    def calls(self, group: RolloutGroup, first: bool) -> tuple[int, int]:
        n = len(group.answered)
        if self.bootstrap and first:
            return int(n >= 2), int(n >= 2)  # one ranking of the whole group
        return n, n + n // 2 * self.fine  # an interval is ranked if it holds two answers or more

    def most_shown(self, G: int) -> int:
        # A buffer is taken to double its first number of anchors.
        insertion = (self.max_anchors or 2 * self.k0) * self.anchor_content + 1
        return max(insertion, G if self.fine or self.bootstrap else 1)

    async def _bootstrap(self, group: RolloutGroup, judge: Judge) -> GroupScore:
        """Score the first group of a query without reference responses: one ranking gives both rewards and anchors."""
        # With nothing to rank, or without a verdict, the query still has no buffer, and its next visit tries again.
        if len(group.answered) < 2:
            return score_by_order(group, [(rollout.id,) for rollout in group.answered])
        verdict = await judge.ask(ranking_question(group.query, group.answered, kind="bootstrap"))
        if verdict is None:
            return score_by_order(group, ())
        sigma = sort(group.answered, verdict)
        buffer = bootstrap_buffer(sigma, self.k0, group.known_epoch, group.step).visited()
        return score_by_order(group, [(rollout.id,) for rollout in sigma], fine_ranked=True, after=buffer)

    def _updated(self, buffer: AnchorBuffer, ranking: Ranking, group: RolloutGroup, judge: Judge) -> AnchorBuffer:
        """Return the buffer for the next visit."""
        frozen = self.static and group.known_epoch >= 1
        if ranking.positions and not frozen:  # a visit that placed nothing says nothing of the anchors' activity
            buffer = buffer.update(
                ranking.sigma,
                group.known_epoch,
                group.step,
                H=self.prune_after,
                refine_at=self.refine_at,
                unordered=ranking.failed,
            )
        limit = self.max_anchors or len(buffer)
        errors = [call.error for call in judge.calls if (call.query_id, call.kind) == (group.query.id, "insert")]
        if not ranking.positions and errors and all(map(TOO_LONG.search, errors)):
            # Else each later visit would fail too, and the query would be lost.
            limit = max(len(buffer) // 2, 2)
            logger.warning(
                "the %d anchors of query %r do not fit into the judge's context, so its group has no rewards and its"
                " next one meets %d of them: set max_anchors or static: true in method_args, or a larger context",
                *(len(buffer), group.query.id, limit),
            )
        return buffer.thinned(limit).visited()


METHOD = RankBuffer
