"""RankBuffer that ranks each interval with two or more rollouts several times, in balanced orders of presentation.

This method is ours and not the paper's. Insertions, buffer update and bootstrap are those of [`RankBuffer`]. The paper
orders the rollouts of one interval by a single list. Here their mean places over several lists order them.

In the miniature, it takes more tokens than RankBuffer and trains no better. It is for a judge that favours a place:
such a judge cost RankBuffer 4 points of 100, and this method none (`docs/results/who_is_fooled.md`).
"""

from dataclasses import dataclass, replace
from fractions import Fraction

from ...buffer import AnchorBuffer, initial_buffer
from ...groups import RolloutGroup
from ...judge import Judge
from ...ranking import Ranking, coarse_to_fine, sort
from ..method import GroupScore, score_by_place
from ..rankbuffer import RankBuffer
from .looks import ask_looks, balanced, check_looks, mean_places


@dataclass(frozen=True)
class RankBufferLooks(RankBuffer):
    """RankBuffer that ranks each interval with two or more rollouts `looks` times. It is ours, not the paper's.

    The orders of presentation are balanced, and prompts label rollouts by slot. The place of a rollout in its interval
    is its mean place over the looks. The reward comes from the number of rollouts in lower intervals plus this place.
    These sums are not replaced by ranks.

    The buffer update needs a strict order. It takes the order by mean place, and equal places as in the first look
    that was answered. A look that failed is left out. If all looks of an interval failed, its rollouts are tied, as in
    the paper's method.

    Args:
        looks (`int`, *optional*, defaults to `2`):
            The number of rankings of each such interval: 1 or an even number. Two rollouts have two orders, so they
            are ranked twice at most.
        seed (`int`, *optional*, defaults to `0`):
            The seed of the order of presentation. A recipe sets it to the run's seed.

    Raises:
        [`SettingsError`]: if an argument is out of range.
    """

    looks: int = 2
    seed: int = 0
    name = "rankbuffer_looks"

    def __post_init__(self):
        super().__post_init__()
        check_looks(self.looks)

    async def score(self, group: RolloutGroup, buffer: AnchorBuffer | None, judge: Judge) -> GroupScore:
        """See [`RewardMethod`]."""
        if not self.fine or (buffer is None and self.bootstrap):
            return await super().score(group, buffer, judge)  # no interval is ranked
        buffer = buffer or initial_buffer(group.query.responses, self.k0)
        coarse = await coarse_to_fine(
            group.query, buffer, group.answered, judge, fine=False, anchor_content=self.anchor_content
        )
        ranking, places = await self._rank_intervals(group, coarse, judge)
        return score_by_place(
            group,
            places,
            positions=ranking.positions,
            fine_ranked=bool(coarse.tied),
            before=buffer,
            after=self._updated(buffer, ranking, group),
        )

    async def _rank_intervals(
        self, group: RolloutGroup, coarse: Ranking, judge: Judge
    ) -> tuple[Ranking, dict[int, Fraction]]:
        """Return the ranking with all intervals in order, and the mean place of each rollout among all of them."""
        crowded = {p: [rollout.id for rollout in coarse.sigma[p]] for p in sorted(coarse.tied)}
        shown = [(p, order) for p, ids in crowded.items() for order in balanced(ids, self.looks, self.seed, group)]
        answers = await ask_looks(group, [order for _, order in shown], judge, kind="fine")
        heard: dict[int, list[tuple[int, ...]]] = {p: [] for p in crowded}
        for (p, _), order in zip(shown, answers, strict=True):
            if order is not None:
                heard[p].append(order)

        sigma, places = [], dict[int, Fraction]()
        for p, rollouts in enumerate(coarse.sigma):
            ids = tuple(rollout.id for rollout in rollouts)
            looks = heard.get(p) or [ids, ids[::-1]]  # if all looks failed, all of them have the same mean place
            within = mean_places(looks)
            below = len(places)
            places.update((i, below + within[i]) for i in ids)
            sigma.append(sort(rollouts, sorted(looks[0], key=within.__getitem__)))  # this sort is stable
        failed = frozenset(p for p, looks in heard.items() if not looks)
        return replace(coarse, sigma=tuple(sigma), tied=failed, failed=failed), places

    def calls(self, group: RolloutGroup, first: bool) -> tuple[int, int]:
        """See [`RewardMethod`]. The most is with intervals of two, or of three if there are more than two looks."""
        least, most = super().calls(group, first)
        if least == most or self.looks <= 2:
            return least, least + (most - least) * self.looks
        triples, left = divmod(len(group.answered), 3)
        return least, least + triples * self.looks + (2 if left == 2 else 0)


METHOD = RankBufferLooks
