"""Coarse-to-fine ranking of one group: Algorithm 1 of the paper, lines 10 to 22, and the rank reward.

The names are the paper's: `K` anchors, insertion positions `p`, buckets `C[p]`, local orders `sigma[p]`. The judge
returns `None` for a question that it failed to answer. Each function says what it does then.
"""

from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import TypeVar

from .buffer import AnchorBuffer
from .groups import Query, Rollout
from .judge import Judge, insertion_question, ranking_question

T = TypeVar("T", bound=Hashable)

INSERTION_BINS = ("below", "quarter1", "quarter2", "quarter3", "quarter4", "above")
"""Names of the bins of [`insertion_bin`], from worst to best."""


@dataclass(frozen=True)
class Ranking:
    """The positions of a group's rollouts among the anchors, and their order inside each interval."""

    positions: dict[int, int]  # in 0..K by rollout id; without those whose coarse judgment failed
    sigma: tuple[tuple[Rollout, ...], ...]  # `K + 1` intervals, each from worst to best
    tied: frozenset[int] = frozenset()  # intervals whose rollouts share their average rank
    failed: frozenset[int] = frozenset()  # those whose fine ranking failed; others of `tied` were never to be ranked

    @property
    def order(self) -> tuple[tuple[int, ...], ...]:
        """The complete order, worst to best: one tier of ids per rollout, or one per tied interval."""
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

    The judge gets one question per rollout and one per interval that holds two or more rollouts.

    Args:
        rollouts (`Sequence[Rollout]`):
            The rollouts that have an answer.
        fine (`bool`, *optional*, defaults to `True`):
            `False` leaves rollouts of one interval tied (the coarse-only ablation).
        anchor_content (`bool`, *optional*, defaults to `True`):
            `False` hides the anchors' text from the coarse judge (the order-only ablation).

    Returns:
        `Ranking`: after a failed coarse judgment, without the rollout; after a failed fine ranking, with a tied
        interval.
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
        # In the order of sampling: the paper does not say in which the buffer update takes them.
        return Ranking(positions, tuple(C), tied=frozenset(crowded))
    orders = await judge.ask_all(ranking_question(query, C[p]) for p in crowded)
    ranked = {p: sort(C[p], order) for p, order in zip(crowded, orders, strict=True) if order is not None}
    failed = frozenset(crowded) - ranked.keys()
    return Ranking(positions, tuple(ranked.get(p, C[p]) for p in range(K + 1)), tied=failed, failed=failed)


def sort(rollouts: Sequence[Rollout], order: Sequence[int]) -> tuple[Rollout, ...]:
    """Return `rollouts` in the order of ids that the judge gave, worst to best."""
    by_id = {rollout.id: rollout for rollout in rollouts}
    return tuple(by_id[i] for i in order)


def rank_rewards(order: Sequence[Sequence[int]], G: int, empty: Sequence[int] = ()) -> tuple[float | None, ...]:
    """Return rewards in [-1, 1] from a complete order: `r = -1 + 2 q / (n - 1)` (section "Rank-Based Reward").

    Args:
        order (`Sequence[Sequence[int]]`):
            Tiers of rollout ids from worst to best. Ids of one tier share their average position `q`.
        G (`int`):
            Size of the group.
        empty (`Sequence[int]`, *optional*):
            Ids of rollouts without an answer. They are below all others and share the reward -1.

    Returns:
        `tuple[float | None, ...]`: by rollout id 0..G-1. An id that is neither ordered nor empty has `None`.

    Example:

    ```python
    from rankbuffer_trl.ranking import rank_rewards

    rank_rewards([(2,), (0,), (1,)], G=4, empty=[3])  # (1/3, 1.0, -1/3, -1.0)
    ```
    """
    return rewards_from_ranks(tier_ranks(order), G, empty)


def tier_ranks(order: Iterable[Sequence[int]]) -> dict[int, float]:
    """Return the rank of each rollout in an order of tiers, from 0 (worst). A tier shares its mean rank."""
    ranks: dict[int, float] = {}
    for tier in order:
        ranks |= dict.fromkeys(tier, len(ranks) + (len(tier) - 1) / 2)
    return ranks


def rewards_from_ranks(
    ranks: Mapping[int, Fraction | float], G: int, empty: Sequence[int] = ()
) -> tuple[float | None, ...]:
    """Return rewards in [-1, 1] from ranks: `r = -1 + 2 (e + q) / (n + e - 1)`.

    Args:
        ranks (`Mapping[int, Fraction | float]`):
            The rank `q` of each of the `n` ranked rollouts, from 0 (worst) to `n - 1`, or its mean over passes.
        empty (`Sequence[int]`, *optional*):
            Ids of the `e` rollouts without an answer. They are below all others and share the reward -1.

    Returns:
        `tuple[float | None, ...]`: by rollout id 0..G-1. An id that is neither ranked nor empty has `None`.

    Example:

    ```python
    from rankbuffer_trl.ranking import rewards_from_ranks
    from rankbuffer_trl.rewards.beyond._passes import mean_ranks

    rewards_from_ranks(mean_ranks([(0, 1, 2), (0, 2, 1)]), G=4, empty=[3])  # (-1/3, 2/3, 2/3, -1.0)
    ```
    """
    highest = len(ranks) + len(empty) - 1
    rewards: dict[int, float] = dict.fromkeys(empty, -1.0)
    for i, q in ranks.items():
        # A mean rank is not rounded: an order that changes from pass to pass gives nearly equal rewards.
        rewards[i] = float(-1 + 2 * (len(empty) + q) / highest) if highest else 0.0
    return tuple(rewards.get(i) for i in range(G))


def rank_tiers(ranks: Mapping[T, Fraction | float]) -> tuple[tuple[T, ...], ...]:
    """Return the candidates as tiers from worst to best. Those of one tier have the same rank."""
    levels = sorted(set(ranks.values()))
    return tuple(tuple(i for i in ranks if ranks[i] == level) for level in levels)


def insertion_bin(position: int, K: int) -> str:
    """Return the histogram bin of an insertion position in 0..K: `below`, `above`, or the quarter of the buffer."""
    if position == 0:
        return "below"
    if position == K:
        return "above"
    # Buffers have different sizes, and a bin means the same for every `K`.
    return f"quarter{1 + 4 * (position - 1) // (K - 1)}"
