"""Listwise: the group is ranked several times in balanced orders of presentation. The reward is the mean place.

This method is ours and not the paper's, which has no listwise baseline. With `looks: 1` it asks for one ranking of the
group. RULER (OpenPipe's ART) also shows all responses in one prompt, but takes a score for each.

Several looks at the same list average the judge's errors. Permutation self-consistency (Tang et al. 2023,
arXiv:2310.07712) does this and takes the central order. Here the mean places themselves are the rewards, because an
advantage needs distances. Vardasbi et al. 2025 (arXiv:2507.17788) repeat a judgment until the answers agree. Here only
the blocks of the list on which the looks disagree are repeated, once.

A group that is larger than a prompt is ranked in lists of a `block` of it, which a model of paired comparisons merges.
"""

from dataclasses import dataclass

from ...buffer import AnchorBuffer
from ...errors import SettingsError
from ...groups import RolloutGroup
from ...judge import Judge
from ...settings import check_at_least
from ..method import GroupScore, RewardMethod, score_by_place
from .looks import ask_looks, balanced, block_orders, check_looks, disputed, expected_places, mean_places


@dataclass(frozen=True)
class Listwise(RewardMethod):
    """A method whose reward is the mean place in several listwise rankings of the group, mapped to [-1, 1].

    The reward of a rollout with the mean place `q`, from 0 for the worst, is `-1 + 2 (e + q) / (n + e - 1)`. `n` is
    the number of answered rollouts and `e` the number of rollouts without an answer, which are below all others and
    have -1. A single answered rollout has the reward 1 if there are empty ones, and 0 if it is alone.

    The method asks `looks` questions at once. With `again` it then asks two more about each block of rollouts on whose
    order the looks disagree: at most `looks + 2 (n // 2)` in all. A look that failed is left out. If all looks of the
    group failed, no rollout is scored. If only one look is left, it shows no disagreement, so nothing is asked again.

    With `block`, no prompt shows more than so many rollouts. Each look of a larger group is a partition into lists
    ([`block_orders`]), and the reward comes from the places that are expected by all lists ([`expected_places`]). A
    list that failed is left out. A rollout all of whose lists failed is not scored. One whose lists would show no
    other answer is never asked about, and counts as average.

    Args:
        looks (`int`, *optional*, defaults to `2`):
            The number of rankings of the whole group, each in another order of presentation: 1 or an even number. Two
            looks cancel a position bias that is linear in the position. Four looks also cancel a bias for or against
            the middle.
        again (`bool`, *optional*, defaults to `True`):
            Whether blocks on which the looks disagree are ranked two more times. No effect with `looks: 1`.
        seed (`int`, *optional*, defaults to `0`):
            The seed of the order of presentation. A recipe sets it to the run's seed.
        block (`int`, *optional*):
            The most rollouts of one list, at least 2; by default the whole group. It needs two looks or more, without
            `again`.

    Raises:
        [`SettingsError`]: if `looks` is neither 1 nor even, or `block` does not fit the other arguments.
    """

    looks: int = 2
    again: bool = True
    seed: int = 0
    block: int | None = None
    name = "listwise"
    shows_whole_groups = True

    def __post_init__(self):
        check_looks(self.looks)
        check_at_least(self, block=2)
        if self.block is not None and (self.again or self.looks < 2):
            raise SettingsError(
                f"block: {self.block} needs an even number of looks, which connect its lists, and again: false, since"
                f" only whole groups are asked again; got looks: {self.looks}, again: {self.again}"
            )

    async def score(self, group: RolloutGroup, buffer: AnchorBuffer | None, judge: Judge) -> GroupScore:
        """See [`RewardMethod`]."""
        shown = self._orders(group)
        looks = [order for order in await ask_looks(group, shown, judge, kind="look") if order is not None]
        asked = {i for order in shown for i in order}
        looks += [(each.id,) for each in group.answered if each.id not in asked]  # alone, so there is nothing to ask
        if self.again and looks:
            # A block that is the whole group may have been shown in these orders already. This happens with two.
            turned = [order for block in disputed(looks) for order in self._turned(block, group) if order not in shown]
            looks += [order for order in await ask_looks(group, turned, judge, kind="again") if order is not None]
        return score_by_place(group, expected_places(looks) if self._splits(group) else mean_places(looks))

    def _orders(self, group: RolloutGroup) -> list[tuple[int, ...]]:
        """Return the orders in which the group is shown, whole or in blocks."""
        if self._splits(group):
            return block_orders(group, self.looks, self.most_shown(len(group.rollouts)), self.seed)
        ids = [rollout.id for rollout in group.answered]
        return balanced(ids, self.looks, self.seed, group) if len(ids) >= 2 else []

    def _splits(self, group: RolloutGroup) -> bool:
        """Return whether a group is larger than a list may be."""
        return self.most_shown(len(group.rollouts)) < len(group.rollouts)

    def _turned(self, block: tuple[int, ...], group: RolloutGroup) -> list[tuple[int, ...]]:
        """Return the next two balanced orders of a block."""
        return balanced(block, 2, self.seed, group, after=self.looks)

    def most_shown(self, G: int) -> int:
        """See [`RewardMethod`]."""
        return min(G, self.block or G)

    def calls(self, group: RolloutGroup, first: bool) -> tuple[int, int]:
        """See [`RewardMethod`]. The least is without any disagreement, the most with one about every two."""
        n = len(group.answered)
        looks = len(self._orders(group))
        return looks, looks + (2 * (n // 2) if self.again and looks >= 2 and n > 2 else 0)


METHOD = Listwise
