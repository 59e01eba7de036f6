"""Coarse-to-fine ranking of one group: Algorithm 1 of the paper, lines 10 to 22, and the rank reward.

The names are the paper's: `K` anchors, insertion positions `p`, buckets `C[p]`, local orders `sigma[p]`. The judge is
asked through its one seam; `None` from it means that it gave no verdict, and what then happens is said where it
happens.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from .buffer import AnchorBuffer
from .groups import Query, Rollout
from .judge import Judge, insertion_question, ranking_question

INSERTION_BINS = ("below", "quarter1", "quarter2", "quarter3", "quarter4", "above")


@dataclass(frozen=True)
class Ranking:
    """Where the rollouts of a group stand.

    Args:
        positions (`dict[int, int]`):
            Insertion position in 0..K by rollout id. A rollout whose coarse judgment failed is missing: it is
            unscored.
        sigma (`tuple[tuple[Rollout, ...], ...]`):
            `K + 1` intervals, each with its rollouts from worst to best.
        tied (`frozenset[int]`):
            Intervals whose rollouts share their average rank, because nobody ranked them.
        failed (`frozenset[int]`):
            Those of `tied` whose fine ranking was asked for and failed.
    """

    positions: dict[int, int]
    sigma: tuple[tuple[Rollout, ...], ...]
    tied: frozenset[int] = frozenset()
    failed: frozenset[int] = frozenset()

    @property
    def order(self) -> tuple[tuple[int, ...], ...]:
        """The complete order, worst to best: intervals concatenated, one id per tier or all ids of a tied interval."""
        tiers: list[tuple[int, ...]] = []
        for p, rollouts in enumerate(self.sigma):
            ids = tuple(rollout.id for rollout in rollouts)
            tiers += [ids] if p in self.tied else [(i,) for i in ids]
        return tuple(tiers)


async def coarse_to_fine(
    query: Query,
    buffer: AnchorBuffer,
    rollouts: Sequence[Rollout],
    judge: Judge,
    fine: bool = True,
    anchor_content: bool = True,
) -> Ranking:
    """Rank `rollouts` against `buffer` (section "Buffer-Assisted Coarse-to-Fine Ranking").

    Args:
        query (`Query`):
            The query `x` with its rubrics `R_x`.
        buffer (`AnchorBuffer`):
            The `K` anchors `A_x`.
        rollouts (`Sequence[Rollout]`):
            The rollouts that have an answer.
        judge (`Judge`):
            The judge `J`.
        fine (`bool`, *optional*, defaults to `True`):
            `False` leaves rollouts of one interval tied (the coarse-only ablation). The paper does not say which of
            them the buffer update then takes; here they stand in the order in which they were sampled.
        anchor_content (`bool`, *optional*, defaults to `True`):
            `False` hides the anchors' text from the coarse judge (the order-only ablation).

    Returns:
        `Ranking`: positions and local orders. A failed coarse judgment leaves its rollout out; a failed fine ranking
        leaves its interval tied.
    """
    anchors = [anchor.text for anchor in buffer.anchors]
    K = len(anchors)
    verdicts = await judge.ask_all(
        insertion_question(query, anchors, rollout.text, anchor_content) for rollout in rollouts
    )
    positions = {rollout.id: p for rollout, p in zip(rollouts, verdicts, strict=True) if p is not None}
    C = [tuple(rollout for rollout in rollouts if positions.get(rollout.id) == p) for p in range(K + 1)]

    crowded = [p for p in range(K + 1) if len(C[p]) >= 2]
    if not fine:
        return Ranking(positions, tuple(C), tied=frozenset(crowded))
    orders = await judge.ask_all(ranking_question(query, C[p]) for p in crowded)
    ranked = {p: sort(C[p], order) for p, order in zip(crowded, orders, strict=True) if order is not None}
    failed = frozenset(crowded) - ranked.keys()
    return Ranking(positions, tuple(ranked.get(p, C[p]) for p in range(K + 1)), tied=failed, failed=failed)


def sort(rollouts: Sequence[Rollout], order: Sequence[int]) -> tuple[Rollout, ...]:
    """`rollouts` in the order of ids that the judge gave, worst to best."""
    by_id = {rollout.id: rollout for rollout in rollouts}
    return tuple(by_id[i] for i in order)


def rank_rewards(order: Sequence[Sequence[int]], G: int, empty: Sequence[int] = ()) -> tuple[float | None, ...]:
    """Rewards in [-1, 1] from a complete order: `r = -1 + 2 q / (n - 1)` (section "Rank-Based Reward").

    Args:
        order (`Sequence[Sequence[int]]`):
            Tiers of rollout ids from worst to best. Ids of one tier share their average position `q`.
        G (`int`):
            Size of the group.
        empty (`Sequence[int]`, *optional*):
            Ids of rollouts without an answer. They stand below all others and share the reward -1.

    Returns:
        `tuple[float | None, ...]`: one reward per rollout id 0..G-1; `None` for an id that is neither ordered nor
        empty. `n` is the number of ordered and empty rollouts. A single ordered one has the reward 0, since there is
        nothing to be better than.
    """
    n = len(empty) + sum(len(tier) for tier in order)
    rewards: list[float | None] = [None] * G
    for i in empty:
        rewards[i] = -1.0
    below = len(empty)
    for tier in order:
        q = below + (len(tier) - 1) / 2
        for i in tier:
            rewards[i] = -1.0 + 2.0 * q / (n - 1) if n > 1 else 0.0
        below += len(tier)
    return tuple(rewards)


def insertion_bin(position: int, K: int) -> str:
    """The histogram bin of an insertion position in 0..K."""
    if position == 0:
        return "below"
    if position == K:
        return "above"
    return f"quarter{1 + 4 * (position - 1) // (K - 1)}"
