"""Several passes over the same candidates: orders of presentation that balance each other, and the mean of the ranks.

This file is ours, not the paper's, which decides each pair of rollouts by one pass. [`Listwise`] and the audit use it.
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
from .._presentation import shuffle

T = TypeVar("T", bound=Hashable)
PASS, RERANK = "look", "again"  # kinds of questions; the ledgers of all versions have these words
CONVERGED = 1e-9  # change of a strength in one iteration, as a share, at which expected ranks are known to 6 digits


def balanced(ids: Iterable[int], passes: int, seed: int, group: RolloutGroup, after: int = 0) -> list[tuple[int, ...]]:
    """Return several orders of presentation that treat all candidates alike.

    * Each pair (an order and its reverse) gives all candidates the same mean position in the prompt. A linear position
    bias therefore cancels: without other errors, a better candidate is above a worse one in at least one of the two.
    * Each four passes give an even number of candidates the same mean distance from the middle. A bias for or against
    the middle cancels, too. If the number is odd, these mean distances differ by half a position, which is the least
    that two orders and their reverses allow.

    Args:
        passes (`int`):
            The number of orders, even or 1. An odd number above 1 leaves one order without its reverse.
        after (`int`, *optional*, defaults to `0`):
            The number of passes that came before, even. The orders continue from there.
    """
    orders = []
    ids = list(ids)
    # Pass 0 is a shuffle, 1 its reverse, 2 the shuffle with its halves exchanged, 3 the reverse of 2; then another
    # shuffle in the same way.
    for number in range(after, after + passes):
        order = shuffle(ids, seed, group, f"look {number // 4}")  # part of the hash: another word is another order
        if number % 4 >= 2:
            order = order[len(order) // 2 :] + order[: len(order) // 2]
        orders.append(tuple(order[::-1] if number % 2 else order))
    return list(dict.fromkeys(orders))  # one candidate has one order, and two have two


def block_orders(group: RolloutGroup, passes: int, block: int, seed: int) -> list[tuple[int, ...]]:
    """Return the lists of a group that is larger than a prompt. Each pass shows the answers once, in several lists.

    Args:
        passes (`int`):
            Even or 1.
        block (`int`):
            The most rollouts of a list. At least 2.
    """
    ids, answered = range(len(group.rollouts)), {rollout.id for rollout in group.answered}
    n = math.ceil(len(ids) / block)  # the fewest blocks, of nearly equal size
    lists = []
    for number, order in enumerate(balanced(ids, passes, seed, group)):
        # Of all ids: no list depends on rollouts of another, so it is asked while those are still generated.
        shuffled = shuffle(ids, seed, group, f"blocks {number}")
        lists += [tuple(i for i in order if i in answered.intersection(shuffled[j::n])) for j in range(n)]
    return [each for each in dict.fromkeys(lists) if len(each) > 1]


def check_passes(passes: int) -> None:
    """Refuse a number of passes that [`balanced`] cannot balance."""
    if passes != 1 and (passes < 2 or passes % 2):
        raise SettingsError(f"passes must be 1 or an even number, got {passes}: each order needs its reverse")


def pass_questions(group: RolloutGroup, orders: Iterable[Sequence[int]], kind: str) -> list[Question]:
    """Return one ranking question per order of presentation, labelled by slot.

    Args:
        orders (`Iterable[Sequence[int]]`):
            Ids of rollouts in the order in which the judge sees them.
        kind (`str`):
            The kind of question in the ledger.
    """
    return [ranking_question(group.query, [group.rollouts[i] for i in order], kind, by_slot=True) for order in orders]


async def ask_passes(
    group: RolloutGroup, orders: Sequence[Sequence[int]], judge: Judge, kind: str
) -> list[tuple[int, ...] | None]:
    """Ask [`pass_questions`] at once. Return the ids from worst to best for each pass, `None` if it failed."""
    verdicts = await judge.ask_all(pass_questions(group, orders, kind))
    return [
        None if slots is None else tuple(shown[slot] for slot in slots)
        for shown, slots in zip(orders, verdicts, strict=True)
    ]


def mean_ranks(orders: Sequence[Sequence[T]]) -> dict[T, Fraction]:
    """Return the mean rank of each candidate over several orders, from 0 (worst) to `n - 1`.

    The rank of candidate `i` is the sum, over all other candidates `j`, of the share of orders that put `i` above `j`.
    Only orders with both of them count.

    Args:
        orders (`Sequence[Sequence[T]]`):
            Candidates from worst to best. Every two candidates share at least one order.

    Example:

    ```python
    from rankbuffer_trl.rewards.beyond._passes import mean_ranks

    mean_ranks([(0, 1, 2), (0, 2, 1)])  # {0: 0, 1: 3/2, 2: 3/2}
    mean_ranks([(0, 1, 2), (1, 0, 2), (0, 1)])  # {0: 1/3, 1: 2/3, 2: 2}
    ```
    """
    above, known = _above(orders)
    # Exact numbers, so that equal ranks compare equal.
    return {
        i: sum((Fraction(above[i, j], above[i, j] + above[j, i]) for j in known if j != i), Fraction()) for i in known
    }


def expected_ranks(orders: Sequence[Sequence[T]]) -> dict[T, float]:
    """Return the rank that each candidate is expected to have among all, if no order holds them all.

    By Bradley and Terry's model, `i` is above `j` with the chance `s_i / (s_i + s_j)`. The strengths `s` are the
    likeliest ones. The rank of `i` is the sum of its chances against all others.

    Args:
        orders (`Sequence[Sequence[T]]`):
            Candidates from worst to best.

    Example:

    ```python
    from rankbuffer_trl.rewards.beyond._passes import expected_ranks

    expected_ranks([(0, 1), (2, 3), (0, 2), (1, 3)])  # {0: 0.6, 1: 1.5, 2: 1.5, 3: 2.4}
    ```
    """
    above, known = _above(orders)
    opponents = {i: [(j, above[i, j], above[j, i]) for j in known if above[i, j] or above[j, i]] for i in known}
    strength, moved = dict.fromkeys(known, 1.0), 1.0
    # The iteration is that of Newman 2023 (arXiv:2207.00076).
    while moved > CONVERGED:
        moved = 0.0
        for i in known:
            previous = strength[i]
            # As if it had also won and lost once against one of strength 1: so a candidate that won everything has a
            # strength, and candidates that no chain of orders compares have one scale.
            won = lost = 1 / (previous + 1)
            for j, wins, losses in opponents[i]:
                won += wins * strength[j] / (previous + strength[j])
                lost += losses / (previous + strength[j])
            strength[i] = won / lost
            moved = max(moved, abs(strength[i] / previous - 1))
    chances = {i: [strength[i] / (strength[i] + strength[j]) for j in known if j != i] for i in known}
    return {i: round(sum(each), 6) for i, each in chances.items()}  # rounded, so that equal ranks compare equal


def _above(orders: Sequence[Sequence[T]]) -> tuple[Counter[tuple[T, T]], list[T]]:
    """Return how many orders put the first of a pair above the second, and all candidates."""
    above = Counter((better, worse) for order in orders for worse, better in combinations(order, 2))
    return above, list(dict.fromkeys(i for order in orders for i in order))


def disputed(orders: Sequence[Sequence[T]]) -> list[tuple[T, ...]]:
    """Return the blocks of candidates about whose order several orders disagree.

    The order by mean rank is cut wherever every order puts all candidates below the cut under all those above it. The
    blocks are the pieces with two or more candidates, from worst to best.

    Args:
        orders (`Sequence[Sequence[T]]`):
            Orders of the same candidates from worst to best.

    Example:

    ```python
    from rankbuffer_trl.rewards.beyond._passes import disputed

    disputed([(0, 1, 2, 3, 4), (1, 0, 2, 4, 3)])  # [(0, 1), (3, 4)]
    ```
    """
    blocks, start = [], 0
    for end in range(1, len(orders[0]) + 1):
        if len({frozenset(order[:end]) for order in orders}) == 1:  # all orders have the same candidates below the cut
            blocks.append(tuple(orders[0][start:end]))  # no dispute crosses a cut, so each is ranked alone
            start = end
    return [block for block in blocks if len(block) > 1]
