"""Blocks of four: a group is ranked in blocks of at most four rollouts, several times. The reward is the mean place.

It was a part of the package. A recipe names it with `method: experiments.judge_cost.blocks.BlocksOfFour`. It is for
judges that err more in long lists. A classical block design, the affine geometry AG(3,2), decides which rollouts share
a block.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import combinations

from rankbuffer_trl.buffer import AnchorBuffer
from rankbuffer_trl.errors import SettingsError
from rankbuffer_trl.groups import RolloutGroup
from rankbuffer_trl.judge import Judge
from rankbuffer_trl.rewards.beyond.looks import ask_looks, balanced
from rankbuffer_trl.rewards.method import GroupScore, RewardMethod, score_by_place
from rankbuffer_trl.rewards.presentation import shuffle

CLASSES = (
    ((0, 2, 4, 6), (1, 3, 5, 7)),
    ((4, 7, 0, 3), (5, 6, 1, 2)),
    ((2, 0, 7, 5), (3, 1, 6, 4)),
    ((6, 5, 3, 0), (7, 4, 2, 1)),
)
"""Four ways to cut eight candidates into two blocks of four, each block in its order of presentation.

They are four of the seven parallel classes of the affine geometry AG(3,2). Each candidate stands once at each of the
four positions of a block. Every two candidates share two blocks, in opposite orders and at the same distance. Only 0
and 1, 2 and 3, 4 and 5, and 6 and 7 never share a block. Without the last ones of 0..7, the blocks of a class differ
in size by at most one.
"""


@dataclass(frozen=True)
class BlocksOfFour(RewardMethod):
    """A method whose reward is the mean place in several cuts of the group into blocks, mapped to [-1, 1].

    Eight rollouts and four looks make eight questions. Two rollouts that never share a block are compared through
    rollouts that share a block with each of them. A block that failed is left out. If the others do not connect all
    rollouts, no rollout is scored.

    Args:
        looks (`int`, *optional*, defaults to `4`):
            The number of times that the group is cut, a multiple of 4: in groups of 8, four looks balance positions
            and partners. A block that comes again in the same order is asked once, which happens to small blocks.
        seed (`int`, *optional*, defaults to `0`):
            The seed of the order of presentation. A recipe sets it to the run's seed.

    Raises:
        [`SettingsError`]: if `looks` is no multiple of 4.
    """

    looks: int = 4
    seed: int = 0
    name = "listwise"

    def __post_init__(self):
        if self.looks < 4 or self.looks % 4:
            raise SettingsError(
                f"looks must be a multiple of 4, got {self.looks}: only four looks together show each rollout at each"
                " position of a block"
            )

    async def score(self, group: RolloutGroup, buffer: AnchorBuffer | None, judge: Judge) -> GroupScore:
        """See [`RewardMethod`]."""
        ids = [rollout.id for rollout in group.answered]
        shown = cut_into_fours(ids, self.looks, self.seed, group) if len(ids) > 1 else []
        looks = [order for order in await ask_looks(group, shown, judge, kind="look") if order is not None]
        if len(ids) == 1:
            looks = [tuple(ids)]  # there is nothing to ask
        return score_by_place(group, places_in_blocks(looks) if connected(looks, ids) else {})


def cut_into_fours(ids: Iterable[int], looks: int, seed: int, group: RolloutGroup) -> list[tuple[int, ...]]:
    """Return orders of presentation in which no more than four candidates stand together.

    Each look cuts the candidates into blocks of nearly equal size.

    * Up to 4 candidates: one block, in the orders of [`balanced`].
    * 5 to 8: the blocks of `CLASSES`. Looks 0 to 3 share a shuffle, looks 4 to 7 have another one, and so on. With 8
      candidates, each four looks show each of them once at each position. So they cancel a position bias of any shape
      in the mean over blocks, and a linear one between every two candidates that share a block.
    * Above 8: each look has its own shuffle. Positions and partners are balanced on average only.

    Args:
        ids (`Iterable[int]`):
            Candidate identifiers.
        looks (`int`):
            The number of times that the candidates are cut, a multiple of 4.
        seed (`int`):
            The run's global seed.
        group (`RolloutGroup`):
            The group whose query and step go into the shuffles.

    Returns:
        `list[tuple[int, ...]]`: the blocks of all looks, look by look, each order of a block once. So a candidate is
        shown less often than `looks` if a small block comes again.
    """
    ids = list(ids)
    n = len(ids)
    if n <= 4:
        return balanced(ids, looks, seed, group)
    orders = []
    for look in range(looks):
        if n <= 8:
            order = shuffle(ids, seed, group, f"look {look // 4}")
            orders += [tuple(order[slot] for slot in block if slot < n) for block in CLASSES[look % 4]]
        else:
            order = shuffle(ids, seed, group, f"look {look}")
            number = -(-n // 4)
            orders += [tuple(order[k::number]) for k in range(number)]
    return list(dict.fromkeys(orders))


def connected(orders: Sequence[Sequence[int]], ids: Sequence[int]) -> bool:
    """Tell whether the orders compare every two candidates, directly or through others."""
    reached = set(ids[:1])
    while more := [order for order in orders if not reached.isdisjoint(order) and not reached.issuperset(order)]:
        reached.update(*more)
    return reached.issuperset(ids)


def places_in_blocks(orders: Sequence[Sequence[int]]) -> dict[int, Fraction]:
    """Return the mean place of each candidate, as `mean_places` does, if some candidates never share a block.

    Their shares against the candidates that both met are added up: the one with the larger sum counts as above, and
    equal sums count as half.

    Args:
        orders (`Sequence[Sequence[int]]`):
            Candidates from worst to best. They should be [`connected`]: between two parts that never met, nothing is
            known, and each counts as half above the other.
    """
    above = [(better, worse) for order in orders for worse, better in combinations(order, 2)]
    met = {pair for i, j in above for pair in ((i, j), (j, i))}
    share = {(i, j): Fraction(above.count((i, j)), above.count((i, j)) + above.count((j, i))) for i, j in met}
    known = list(dict.fromkeys(i for order in orders for i in order))

    def beats(i: int, j: int) -> Fraction:
        if (i, j) in share:
            return share[i, j]
        lead = sum(share[i, k] - share[j, k] for k in known if (i, k) in share and (j, k) in share)
        return Fraction(1 + (lead > 0) - (lead < 0), 2)

    return {i: sum((beats(i, j) for j in known if j != i), Fraction()) for i in known}
