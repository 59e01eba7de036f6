"""Listwise: rank the group several times, in balanced orders of presentation. The reward is the mean rank.

This method is ours and not the paper's, which has no listwise baseline. With `passes: 1` it asks for one ranking of
the group. RULER (OpenPipe's ART) also shows all responses in one prompt, but takes a score for each.

Several passes at the same list average the judge's errors. Permutation self-consistency (Tang et al. 2023,
arXiv:2310.07712) does this and takes the central order. Here the mean ranks themselves are the rewards, because an
advantage needs distances. Vardasbi et al. 2025 (arXiv:2507.17788) repeat a judgment until the answers agree. Here only
the blocks of the list on which the passes disagree are repeated, once.

A group that is larger than a prompt is ranked in lists of a `block` of it, which a model of paired comparisons merges.
"""

from dataclasses import dataclass

from ...buffer import AnchorBuffer
from ...errors import SettingsError
from ...groups import RolloutGroup
from ...judge import Judge
from ...settings import check_at_least
from .._method import GroupScore, RewardMethod, score_by_rank
from ._passes import (
    PASS,
    RERANK,
    ask_passes,
    balanced,
    block_orders,
    check_passes,
    disputed,
    expected_ranks,
    mean_ranks,
)


@dataclass(frozen=True)
class Listwise(RewardMethod):
    """A method whose reward is the mean rank in several listwise rankings of the group, mapped to [-1, 1].

    The reward of a rollout with the mean rank `q`, from 0 for the worst, is `-1 + 2 (e + q) / (n + e - 1)`. `n` is
    the number of answered rollouts and `e` the number of rollouts without an answer, which are below all others and
    have -1. A single answered rollout has the reward 1 if there are empty ones, and 0 if it is alone.

    The method asks `passes` questions at once. With `rerank_disputed` it then asks two more about each block of
    rollouts on whose order the passes disagree: at most `passes + 2 (n // 2)` in all. A pass that failed is left out.
    If all passes of the group failed, no rollout is scored. If only one pass is left, it shows no disagreement, so
    nothing is asked again.

    With `block`, no prompt shows more than so many rollouts. Each pass of a larger group is a partition into lists
    ([`block_orders`]), and the reward comes from the ranks that are expected by all lists ([`expected_ranks`]). A
    list that failed is left out. A rollout all of whose lists failed is not scored. One whose lists would show no
    other answer is never asked about, and counts as average.

    Args:
        passes (`int`, *optional*, defaults to `2`):
            The number of rankings of the whole group, each in another order of presentation: 1 or an even number. Two
            passes cancel a position bias that is linear in the position. Four passes also cancel a bias for or against
            the middle.
        rerank_disputed (`bool`, *optional*, defaults to `True`):
            Whether blocks on which the passes disagree are ranked two more times. No effect with `passes: 1`.
        seed (`int`, *optional*, defaults to `0`):
            The seed of the order of presentation. A recipe sets it to the run's seed.
        block (`int`, *optional*):
            The most rollouts of one list, at least 2; by default the whole group. It needs two passes or more, without
            `rerank_disputed`.

    Raises:
        [`SettingsError`]: if `passes` is neither 1 nor even, or `block` does not fit the other arguments.
    """

    passes: int = 2
    rerank_disputed: bool = True
    seed: int = 0
    block: int | None = None
    name = "listwise"
    shows_whole_groups = True

    def __post_init__(self):
        check_passes(self.passes)
        check_at_least(self, block=2)
        if self.block is not None and (self.rerank_disputed or self.passes < 2):
            raise SettingsError(
                f"block: {self.block} needs an even number of passes, which connect its lists, and rerank_disputed:"
                f" false; got passes: {self.passes}, rerank_disputed: {self.rerank_disputed}"
            )

    async def score(self, group: RolloutGroup, buffer: AnchorBuffer | None, judge: Judge) -> GroupScore:
        orders = self._orders(group)
        # One that failed is left out.
        passes = [order for order in await ask_passes(group, orders, judge, kind=PASS) if order is not None]
        listed = {i for order in orders for i in order}
        # A rollout that is alone in its list is asked nothing.
        passes += [(rollout.id,) for rollout in group.answered if rollout.id not in listed]
        if self.rerank_disputed and passes:
            # A block that is the whole group may have been shown in these orders already. This happens with two.
            blocks = disputed(passes)
            again = [order for block in blocks for order in balanced(block, 2, self.seed, group, after=self.passes)]
            reranked = [order for order in again if order not in orders]
            passes += [order for order in await ask_passes(group, reranked, judge, kind=RERANK) if order is not None]
        return score_by_rank(group, expected_ranks(passes) if self._splits(group) else mean_ranks(passes))

    def _orders(self, group: RolloutGroup) -> list[tuple[int, ...]]:
        """Return the orders in which the group is shown, whole or in blocks."""
        if self._splits(group):
            return block_orders(group, self.passes, self.most_shown(len(group.rollouts)), self.seed)
        ids = [rollout.id for rollout in group.answered]
        return balanced(ids, self.passes, self.seed, group) if len(ids) >= 2 else []

    def _splits(self, group: RolloutGroup) -> bool:
        """Return whether a group is larger than a list may be."""
        return self.most_shown(len(group.rollouts)) < len(group.rollouts)

    def most_shown(self, G: int) -> int:
        return min(G, self.block or G)

    def calls(self, group: RolloutGroup, first: bool) -> tuple[int, int]:
        n = len(group.answered)
        passes = len(self._orders(group))
        # The least is without any disagreement, the most with one about every two.
        return passes, passes + (2 * (n // 2) if self.rerank_disputed and passes >= 2 and n > 2 else 0)


METHOD = Listwise
