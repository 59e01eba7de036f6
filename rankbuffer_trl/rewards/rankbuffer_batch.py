"""RankBuffer in one prompt: the judge sees the ordered anchors and all rollouts of a group at once, several times.

This method is ours and not the paper's. It keeps the paper's buffer: its anchors, positions, intervals and updates. It
replaces the insertions and the fine rankings by looks at the whole group, which are averaged.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from statistics import mean

from ..buffer import AnchorBuffer, initial_buffer
from ..errors import SettingsError
from ..groups import RolloutGroup
from ..judge import Judge, Question, batch_question
from ..judge.reach import CHARACTERS_PER_TOKEN, context_for
from ..judge.verdicts import max_tokens
from ..ranking import Ranking
from .looks import balanced, check_looks, mean_places, place_rewards, place_tiers
from .method import GroupScore
from .rankbuffer import RankBuffer

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

    **Long groups.** With `most_tokens`, a group whose prompt would be too long is split into blocks before anything is
    asked. All blocks show the same anchors. Let a rollout be the `r`-th of the `m` rollouts of its block in interval
    `p`. Its coordinate is `p + r / (m + 1)`, and the paper's anchor `k` has the coordinate `k`. The coordinates merge
    the blocks of a look into one ladder, on which equal coordinates are a draw. A look and its reverse have the same
    blocks, and the next two looks have other blocks. With two blocks, every two rollouts share a block in at least one
    of three such pairs of looks. A rollout that does not fit even with no other rollout has a prompt of its own. If
    the server refuses this prompt, only that rollout is unscored.

    The method also has the arguments of [`RankBuffer`]. Of these, `fine` and `anchor_content` are ablations of
    coarse-to-fine ranking, so they cannot be `False`.

    Args:
        looks (`int`, *optional*, defaults to `2`):
            The number of times that the group is shown, each in another order of presentation: 1 or an even number. An
            order that comes again is asked and counted once: two rollouts have two orders, and three have six.
        seed (`int`, *optional*, defaults to `0`):
            The seed of the orders of presentation. A recipe sets it to the run's seed.
        ladder (`bool`, *optional*, defaults to `False`):
            `True` takes the mean place among anchors and rollouts as the reward, mapped to [-1, 1]. Rollouts between
            the same two anchors then have nearly equal rewards. So the reward says how far apart the rollouts of a
            group are, and groups get different weights in a run with `scale_rewards: none`. A group that bootstraps
            its buffer has the paper's rewards.
        most_tokens (`int`, *optional*):
            The context of the judge in tokens, such as vLLM's `--max-model-len`. A group is split if its quoted prompt
            and two answers need more tokens; three characters count as a token. `None` splits no group.

    Raises:
        [`SettingsError`]: if an argument is out of range, or if `fine` or `anchor_content` is `False`.
    """

    looks: int = 2
    seed: int = 0
    ladder: bool = False
    most_tokens: int | None = None
    name = "rankbuffer_batch"

    def __post_init__(self):
        super().__post_init__()
        check_looks(self.looks)
        for key in ("fine", "anchor_content"):
            if not getattr(self, key):
                raise SettingsError(f"{key} cannot be false for rankbuffer_batch: use the method rankbuffer")
        if self.most_tokens is not None and self.most_tokens < 1:
            raise SettingsError(f"most_tokens must be at least 1, or null for no limit, got {self.most_tokens}")

    async def score(self, group: RolloutGroup, buffer: AnchorBuffer | None, judge: Judge) -> GroupScore:
        """See [`RankBuffer.score`]. The judge gets one question per look, or one per block of each look."""
        if buffer is None and self.bootstrap:
            return await self._bootstrap(group, judge)
        buffer = buffer or initial_buffer(group.query.responses, self.k0)
        K, G, empty = len(buffer), len(group.rollouts), [rollout.id for rollout in group.empty]
        placed = await self._place(group, [anchor.text for anchor in buffer.anchors], judge)

        anchors = {G + k: Fraction(k + 1) for k in range(K)}  # on a ladder, G + k stands for anchors[k]
        ladders = [order for look in placed for order in both_ways(look | anchors)]
        everyone = mean_places(ladders)
        rising = sorted((q, i) for i, q in everyone.items() if i < G)
        positions = {i: sum(everyone[k] < q for k in anchors) for q, i in rising}
        sigma = tuple(tuple(group.rollouts[i] for _, i in rising if positions[i] == p) for p in range(K + 1))
        places = everyone if self.ladder else mean_places([[i for i in order if i < G] for order in ladders])
        return GroupScore(
            rewards=place_rewards(places, G + K, empty)[:G],  # without those of the anchors, if they have a place
            order=place_tiers({i: q for i, q in places.items() if i < G}),
            positions=positions,
            fine_ranked=any(len(rollouts) >= 2 for rollouts in sigma),
            before=buffer,
            after=self._updated(buffer, Ranking(positions, sigma), group),
        )

    def calls(self, group: RolloutGroup, first: bool) -> tuple[int, int]:
        """See [`RewardMethod`]. [`asked_again`] counts what is asked once more after a failure."""
        if first:
            n = len(self.first_questions(group))
            return n, n
        ids = [rollout.id for rollout in group.answered]
        looks = len(distinct(self._looks(group, ids, 1)))
        if self.most_tokens is None:
            return looks, looks
        return min(looks, len(ids)), max(looks, self.looks * len(ids))  # a rollout alone is asked about once

    def asked_again(self, group: RolloutGroup) -> int:
        """See [`RewardMethod`]. These are two blocks in each look; of a split group, at most one for each rollout."""
        n = len(group.answered)
        return 0 if n < 2 else self.looks * (2 if self.most_tokens is None else n)

    def first_questions(self, group: RolloutGroup) -> list[Question]:
        """See [`RewardMethod`]. These are the looks, or the ranking that bootstraps the buffer."""
        if self.bootstrap:
            return super().first_questions(group)
        anchors = [anchor.text for anchor in initial_buffer(group.query.responses, self.k0).anchors]
        return [self._question(group, anchors, block) for block in distinct(self._split(group, anchors))]

    def early_questions(self, group: RolloutGroup, buffer: AnchorBuffer | None) -> list[Question]:
        """Return no question, since each needs the whole group."""
        return []

    def most_shown(self, G: int) -> int:
        """See [`RewardMethod`]. These are the anchors of a grown buffer, and the group."""
        return 2 * self.k0 + G

    async def _place(self, group: RolloutGroup, anchors: Sequence[str], judge: Judge) -> list[dict[int, Fraction]]:
        """Return the coordinates of the placed rollouts by id, for each look of which at least one block was answered.

        A rollout whose block failed in one of these looks has the mean of its other coordinates there.
        """
        looks = self._split(group, anchors)
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

    def _split(self, group: RolloutGroup, anchors: Sequence[str]) -> list[Look]:
        """Return the looks at a group in as few blocks as possible, so that the context holds every prompt."""
        ids = [rollout.id for rollout in group.answered]
        alone = {i for i in ids if not self._fits(group, anchors, (i,))}
        rest = [i for i in ids if i not in alone]
        enough = (
            b
            for b in range(1, len(rest))
            if all(self._fits(group, anchors, block) for block in distinct(self._looks(group, rest, b)))
        )
        looks = self._looks(group, rest, next(enough, len(rest)))
        return [look + [(i,) for i in sorted(alone)] for look in looks]

    def _fits(self, group: RolloutGroup, anchors: Sequence[str], block: Block) -> bool:
        """Tell whether the context holds the prompt of a block and its answers, by the length of the texts."""
        if self.most_tokens is None:
            return True
        question = self._question(group, anchors, block)
        prompt = math.ceil(len(question.prompt(guard=True)) / CHARACTERS_PER_TOKEN)
        return context_for(prompt, max_tokens(question.verdict, "regex", 0)) <= self.most_tokens


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
