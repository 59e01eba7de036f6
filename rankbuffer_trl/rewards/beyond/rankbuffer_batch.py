"""RankBuffer in one prompt: the judge sees the ordered anchors and all rollouts of a group at once, several times.

This method is ours and not the paper's. It keeps the paper's buffer: its anchors, positions, intervals and updates. It
replaces the insertions and the fine rankings by looks at the whole group, which are averaged.

In the miniature, two lists train as well with 0.54 of its tokens to 85 points. This method is for who wants buffers,
and what the report shows of them: it takes 0.42 of RankBuffer's tokens (`experiments/race`).
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from statistics import mean

from ...buffer import AnchorBuffer, initial_buffer
from ...errors import SettingsError
from ...groups import RolloutGroup
from ...judge import Judge, Question, batch_question
from ...ranking import Ranking
from ..method import GroupScore, score_by_place
from ..rankbuffer import RankBuffer
from .looks import balanced, check_looks, mean_places

Block = tuple[int, ...]
"""The ids of the rollouts of one prompt, in the order in which the judge sees them."""
Look = list[Block]
"""The blocks of one look. Together they hold the whole group; there is one block if the group was not split."""


@dataclass(frozen=True)
class RankBufferBatch(RankBuffer):
    """RankBuffer with one prompt for a whole group, which is asked `looks` times in balanced orders of presentation.

    A prompt shows the anchors from worst to best and then the rollouts, labelled by slot. The verdict orders the
    rollouts and places each of them among the anchors. So it merges rollouts and anchors into one order, the ladder.
    The places on the ladder are averaged over the looks. The anchors have the same order in every look, so their mean
    places have this order, too. The position of a rollout is the number of anchors whose mean place is below its own.
    The order within an interval is that of the mean places. The update of the buffer is the paper's. With `bootstrap`,
    so is the first visit.

    The reward is the mean place in the group, mapped to [-1, 1]. Mean places are not replaced by ranks, so rollouts
    whose order changes from look to look have nearly equal rewards.

    **Failures.** A look that failed is left out. A server that refuses a prompt because of its length refuses it in
    every look. So the judge is asked once more about rollouts that no look has placed, in blocks of about half the
    size: with more than four looks, six rollouts become four and two in some of them. A rollout that is still not
    placed is unscored. If no rollout is placed, the buffer only counts the visit.

    The method also has the arguments of [`RankBuffer`]. Of these, `fine` and `anchor_content` are ablations of
    coarse-to-fine ranking, so they cannot be `False`.

    Args:
        looks (`int`, *optional*, defaults to `2`):
            The number of times that the group is shown, each in another order of presentation: 1 or an even number. An
            order that comes again is asked and counted once: two rollouts have two orders, and three have six.
        seed (`int`, *optional*, defaults to `0`):
            The seed of the orders of presentation. A recipe sets it to the run's seed.

    Raises:
        [`SettingsError`]: if an argument is out of range, or if `fine` or `anchor_content` is `False`.
    """

    looks: int = 2
    seed: int = 0
    name = "rankbuffer_batch"

    def __post_init__(self):
        super().__post_init__()
        check_looks(self.looks)
        for key in ("fine", "anchor_content"):
            if not getattr(self, key):
                raise SettingsError(f"{key} cannot be false for rankbuffer_batch: use the method rankbuffer")

    async def score(self, group: RolloutGroup, buffer: AnchorBuffer | None, judge: Judge) -> GroupScore:
        """See [`RankBuffer.score`]. The judge gets one question per look."""
        if buffer is None and self.bootstrap:
            return await self._bootstrap(group, judge)
        buffer = buffer or initial_buffer(group.query.responses, self.k0)
        K, G = len(buffer), len(group.rollouts)
        placed = await self._place(group, [anchor.text for anchor in buffer.anchors], judge)

        anchors = {G + k: Fraction(k + 1) for k in range(K)}  # on a ladder, G + k stands for anchors[k]
        ladders = [order for look in placed for order in both_ways(look | anchors)]
        everyone = mean_places(ladders)
        rising = sorted((q, i) for i, q in everyone.items() if i < G)
        positions = {i: sum(everyone[k] < q for k in anchors) for q, i in rising}
        sigma = tuple(tuple(group.rollouts[i] for _, i in rising if positions[i] == p) for p in range(K + 1))
        return score_by_place(
            group,
            mean_places([[i for i in order if i < G] for order in ladders]),
            positions=positions,
            fine_ranked=any(len(rollouts) >= 2 for rollouts in sigma),
            before=buffer,
            after=self._updated(buffer, Ranking(positions, sigma), group),
        )

    def calls(self, group: RolloutGroup, first: bool) -> tuple[int, int]:
        """See [`RewardMethod`]. [`asked_again`] counts what is asked once more after a failure."""
        if first and self.bootstrap:
            return super().calls(group, first)
        looks = len(distinct(self._looks(group, [rollout.id for rollout in group.answered], 1)))
        return looks, looks

    def asked_again(self, group: RolloutGroup) -> int:
        """See [`RewardMethod`]. These are two blocks in each look."""
        return 0 if len(group.answered) < 2 else self.looks * 2

    def most_shown(self, G: int) -> int:
        """See [`RewardMethod`]. These are the anchors of a grown buffer, and the group."""
        return 2 * self.k0 + G

    async def _place(self, group: RolloutGroup, anchors: Sequence[str], judge: Judge) -> list[dict[int, Fraction]]:
        """Return the coordinates of the placed rollouts by id, for each look of which at least one block was answered.

        A rollout whose block failed in one of these looks has the mean of its other coordinates there.
        """
        looks = self._looks(group, [rollout.id for rollout in group.answered], 1)
        answers = await self._ask(group, anchors, looks, judge)
        failed = [block for block in distinct(looks) if len(block) > 1 and block not in answers]
        lost = sorted({i for block in failed for i in block} - {i for block in answers for i in block})
        if lost:
            smaller = self._looks(group, lost, math.ceil(2 * len(lost) / max(map(len, failed))))
            answers |= await self._ask(group, anchors, smaller, judge)
            looks = [look + more for look, more in zip(looks, smaller, strict=True)]
        looks = list({tuple(sorted(look)): look for look in looks}.values())  # a look that comes twice counts once
        placed = [{i: c for block in look for i, c in answers.get(block, {}).items()} for look in looks]
        placed = [look for look in placed if look]
        means = {i: mean(look[i] for look in placed if i in look) for each in placed for i in each}
        return [means | look for look in placed]

    async def _ask(
        self, group: RolloutGroup, anchors: Sequence[str], looks: Sequence[Look], judge: Judge
    ) -> dict[Block, dict[int, Fraction]]:
        """Ask about all blocks at once, and return the coordinates of the rollouts of each block that was answered."""
        blocks = distinct(looks)
        verdicts = await judge.ask_all(self._question(group, anchors, block) for block in blocks)
        found = zip(blocks, verdicts, strict=True)
        return {block: coordinates(block, *verdict) for block, verdict in found if verdict is not None}

    def _question(self, group: RolloutGroup, anchors: Sequence[str], block: Block) -> Question:
        return batch_question(group.query, anchors, [group.rollouts[i].text for i in block])

    def _looks(self, group: RolloutGroup, ids: Sequence[int], b: int) -> list[Look]:
        """Return the looks at rollouts in `b` blocks, in their orders of presentation."""
        looks = []
        for pair in range(math.ceil(self.looks / 2)):
            orders = [balanced(block, 2, self.seed, group, after=2 * pair) for block in partition(ids, b, pair)]
            looks += [[order[0] for order in orders], [order[-1] for order in orders]]
        return looks[: self.looks]


def distinct(looks: Iterable[Look]) -> list[Block]:
    """Return each block once: a block of one rollout is the same in all looks, so it is asked about once."""
    return list(dict.fromkeys(block for look in looks for block in look))


def partition(ids: Sequence[int], b: int, turn: int) -> list[list[int]]:
    """Return `ids` in at most `b` blocks of about the same size. Each `turn` brings other ids together.

    The ids are cut into `2 b` parts, and two parts make a block. The parts meet as in a round-robin tournament: every
    two of them share a block in one of `2 b - 1` turns.
    """
    n = len(ids)
    if b >= n:
        return [[i] for i in ids]
    first, *others = (list(ids[k * n // (2 * b) : (k + 1) * n // (2 * b)]) for k in range(2 * b))
    turn %= len(others)
    circle = [first, *others[turn:], *others[:turn]]
    return [block for k in range(b) if (block := circle[k] + circle[-1 - k])]


def coordinates(block: Block, order: Sequence[int], positions: Sequence[int]) -> dict[int, Fraction]:
    """Return the coordinate of each rollout of a block on the ladder, on which the anchors have 1, 2, ..., K."""
    return {
        block[slot]: p + Fraction(j - positions.index(p) + 1, positions.count(p) + 1)
        for j, (slot, p) in enumerate(zip(order, positions, strict=True))
    }


def both_ways(ladder: dict[int, Fraction]) -> tuple[list[int], list[int]]:
    """Return the order of a ladder twice. Equal coordinates have opposite orders in the two, so that they draw."""
    return sorted(ladder, key=lambda i: (ladder[i], i)), sorted(ladder, key=lambda i: (ladder[i], -i))


METHOD = RankBufferBatch
