"""Several looks at the same candidates: orders of presentation that balance each other, and the mean of the answers.

This file is ours, not the paper's, which decides each pair of rollouts by one look. [`Listwise`] and the audit use it.
"""

import math
from collections import Counter
from collections.abc import Hashable, Iterable, Sequence
from fractions import Fraction
from itertools import combinations
from typing import TypeVar

from ...errors import SettingsError
from ...groups import RolloutGroup
from ...judge import Judge, Question, ranking_question
from ..presentation import shuffle

T = TypeVar("T", bound=Hashable)
CONVERGED = 1e-9  # change of a strength in one iteration, as a share, at which expected places are known to 6 digits


def balanced(ids: Iterable[int], looks: int, seed: int, group: RolloutGroup, after: int = 0) -> list[tuple[int, ...]]:
    """Return several orders of presentation that treat all candidates alike.

    Look 0 is a shuffle, look 1 its reverse, look 2 the shuffle with its halves exchanged, and look 3 the reverse of
    look 2. Looks 4 to 7 come from another shuffle in the same way, and so on.

    * Each pair (an order and its reverse) gives all candidates the same mean position in the prompt. A linear position
      bias therefore cancels: without other errors, a better candidate is above a worse one in at least one of the two.
    * Each four looks give an even number of candidates the same mean distance from the middle. A bias for or against
      the middle cancels, too. If the number is odd, these mean distances differ by half a position, which is the least
      that two orders and their reverses allow.

    Args:
        ids (`Iterable[int]`):
            Candidate identifiers.
        looks (`int`):
            The number of orders, even or 1. An odd number above 1 leaves one order without its reverse.
        seed (`int`):
            The run's global seed.
        group (`RolloutGroup`):
            The group whose query and step go into the shuffles.
        after (`int`, *optional*, defaults to `0`):
            The number of looks that came before, even. The orders continue from there.

    Returns:
        `list[tuple[int, ...]]`: the orders, each once. There are fewer than `looks` if `ids` has fewer orders: one
        candidate has one, and two have two.
    """
    orders = []
    ids = list(ids)
    for look in range(after, after + looks):
        order = shuffle(ids, seed, group, f"look {look // 4}")
        if look % 4 >= 2:
            order = order[len(order) // 2 :] + order[: len(order) // 2]
        orders.append(tuple(order[::-1] if look % 2 else order))
    return list(dict.fromkeys(orders))


def block_orders(group: RolloutGroup, looks: int, block: int, seed: int) -> list[tuple[int, ...]]:
    """Return the lists of a group that is larger than a prompt. Each look shows the answers once, in several lists.

    Each look cuts a shuffle of all ids into the fewest blocks of nearly equal size. The answers of a block are a list,
    if it has two or more. Their order follows [`balanced`]. No list depends on the rollouts of another one, so it can
    be asked while those are still generated.

    Args:
        group (`RolloutGroup`):
            The group.
        looks (`int`):
            The number of looks, even or 1.
        block (`int`):
            The most rollouts of a list. At least 2.
        seed (`int`):
            The run's global seed.
    """
    ids, answered = range(len(group.rollouts)), {rollout.id for rollout in group.answered}
    n = math.ceil(len(ids) / block)
    lists = []
    for look, order in enumerate(balanced(ids, looks, seed, group)):
        shuffled = shuffle(ids, seed, group, f"blocks {look}")
        lists += [tuple(i for i in order if i in answered.intersection(shuffled[j::n])) for j in range(n)]
    return [each for each in dict.fromkeys(lists) if len(each) > 1]


def check_looks(looks: int) -> None:
    """Refuse a number of looks that [`balanced`] cannot balance.

    Raises:
        [`SettingsError`]: if `looks` is neither 1 nor an even number above 0.
    """
    if looks != 1 and (looks < 2 or looks % 2):
        raise SettingsError(
            f"looks must be 1 or an even number, got {looks}: each order of presentation needs its reverse, so that a"
            " judge's preference for early or late positions cancels"
        )


def look_questions(group: RolloutGroup, orders: Iterable[Sequence[int]], kind: str) -> list[Question]:
    """Return one ranking question per order of presentation, labelled by slot.

    Args:
        group (`RolloutGroup`):
            The group whose rollouts are shown.
        orders (`Iterable[Sequence[int]]`):
            Ids of rollouts in the order in which the judge sees them.
        kind (`str`):
            The kind of question in the ledger.
    """
    return [ranking_question(group.query, [group.rollouts[i] for i in order], kind, by_slot=True) for order in orders]


async def ask_looks(
    group: RolloutGroup, orders: Sequence[Sequence[int]], judge: Judge, kind: str
) -> list[tuple[int, ...] | None]:
    """Ask [`look_questions`] at once. Return the ids from worst to best for each look, `None` if it failed."""
    verdicts = await judge.ask_all(look_questions(group, orders, kind))
    return [
        None if slots is None else tuple(shown[slot] for slot in slots)
        for shown, slots in zip(orders, verdicts, strict=True)
    ]


def mean_places(orders: Sequence[Sequence[T]]) -> dict[T, Fraction]:
    """Return the mean place of each candidate over several orders, from 0 (worst) to `n - 1`.

    The place of candidate `i` is the sum, over all other candidates `j`, of the share of orders that put `i` above
    `j`. Only orders with both of them count. If every order holds all candidates, this is the mean of their places.

    Args:
        orders (`Sequence[Sequence[T]]`):
            Candidates from worst to best. Every two candidates share at least one order.

    Returns:
        `dict[T, Fraction]`: exact numbers, so that equal places compare equal.

    Example:

    ```python
    from rankbuffer_trl.rewards.beyond.looks import mean_places

    mean_places([(0, 1, 2), (0, 2, 1)])  # {0: 0, 1: 3/2, 2: 3/2}
    mean_places([(0, 1, 2), (1, 0, 2), (0, 1)])  # {0: 1/3, 1: 2/3, 2: 2}
    ```
    """
    above, known = _above(orders)
    return {
        i: sum((Fraction(above[i, j], above[i, j] + above[j, i]) for j in known if j != i), Fraction()) for i in known
    }


def expected_places(orders: Sequence[Sequence[T]]) -> dict[T, float]:
    """Return the place that each candidate is expected to have among all, if no order holds them all.

    By Bradley and Terry's model, `i` is above `j` with the chance `s_i / (s_i + s_j)`. The strengths `s` are the
    likeliest ones, if each candidate also won and lost once against a made-up one of strength 1. So a candidate that
    won everything has a strength, and candidates that no chain of orders compares have one scale. The place of `i` is
    the sum of its chances against all others. But for the made-up candidate, this would be [`mean_places`] wherever
    all orders hold all candidates. The iteration is that of Newman 2023 (arXiv:2207.00076).

    Args:
        orders (`Sequence[Sequence[T]]`):
            Candidates from worst to best.

    Returns:
        `dict[T, float]`: numbers above 0 and below `n - 1`, rounded, so that equal places compare equal.

    Example:

    ```python
    from rankbuffer_trl.rewards.beyond.looks import expected_places

    expected_places([(0, 1), (2, 3), (0, 2), (1, 3)])  # {0: 0.6, 1: 1.5, 2: 1.5, 3: 2.4}
    ```
    """
    above, known = _above(orders)
    met = {i: [(j, above[i, j], above[j, i]) for j in known if above[i, j] or above[j, i]] for i in known}
    strength, moved = dict.fromkeys(known, 1.0), 1.0
    while moved > CONVERGED:
        moved = 0.0
        for i in known:
            old = strength[i]
            won = lost = 1 / (old + 1)
            for j, wins, losses in met[i]:
                won += wins * strength[j] / (old + strength[j])
                lost += losses / (old + strength[j])
            strength[i] = won / lost
            moved = max(moved, abs(strength[i] / old - 1))
    chances = {i: [strength[i] / (strength[i] + strength[j]) for j in known if j != i] for i in known}
    return {i: round(sum(each), 6) for i, each in chances.items()}


def _above(orders: Sequence[Sequence[T]]) -> tuple[Counter[tuple[T, T]], list[T]]:
    """Return how many orders put the first of a pair above the second, and all candidates."""
    above = Counter((better, worse) for order in orders for worse, better in combinations(order, 2))
    return above, list(dict.fromkeys(i for order in orders for i in order))


def disputed(orders: Sequence[Sequence[T]]) -> list[tuple[T, ...]]:
    """Return the blocks of candidates about whose order several orders disagree.

    The order by mean place is cut wherever every order puts all candidates below the cut under all those above it. The
    blocks are the pieces with two or more candidates. No dispute crosses a cut, so each block can be ranked alone.

    Args:
        orders (`Sequence[Sequence[T]]`):
            Orders of the same candidates from worst to best.

    Returns:
        `list[tuple[T, ...]]`: the blocks from worst to best, each in the order of the first of `orders`.

    Example:

    ```python
    from rankbuffer_trl.rewards.beyond.looks import disputed

    disputed([(0, 1, 2, 3, 4), (1, 0, 2, 4, 3)])  # [(0, 1), (3, 4)]
    ```
    """
    blocks, start = [], 0
    for end in range(1, len(orders[0]) + 1):
        if len({frozenset(order[:end]) for order in orders}) == 1:  # all orders have the same candidates below the cut
            blocks.append(tuple(orders[0][start:end]))
            start = end
    return [block for block in blocks if len(block) > 1]
