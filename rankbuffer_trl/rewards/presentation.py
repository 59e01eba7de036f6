"""The order in which a judge sees candidates: random, but the same in every rerun.

"Candidate presentation order is randomized with a deterministic hash of the global seed, query, training step, and
candidate identifiers" (paper, appendix "Baseline Implementation Details"). [`shuffle`] does this. Everything else in
this file is ours: several looks at the same candidates, in orders that balance each other.
"""

import hashlib
from collections.abc import Iterable, Sequence

from ..errors import SettingsError
from ..groups import RolloutGroup
from ..judge import Judge, Question, ranking_question


def shuffle(ids: Iterable[object], seed: int, group: RolloutGroup, purpose: object = "") -> list:
    """Return `ids` in the order of the hashes of (seed, query, step, purpose, id).

    Args:
        ids (`Iterable`):
            Candidate identifiers.
        seed (`int`):
            The run's global seed.
        group (`RolloutGroup`):
            The group whose query and step go into the hash.
        purpose (*optional*):
            A name for the shuffle. Two shuffles of the same candidates with different purposes differ.
    """
    common = f"{seed}/{group.query.id}/{group.step}/{purpose}"
    return sorted(ids, key=lambda i: hashlib.sha256(f"{common}/{i}".encode()).digest())


def balanced(ids: Iterable[int], looks: int, seed: int, group: RolloutGroup, after: int = 0) -> list[tuple[int, ...]]:
    """Return several orders of presentation that treat all candidates alike. This function is ours.

    Look 0 is a shuffle, look 1 its reverse, look 2 the shuffle turned by half, and look 3 the reverse of look 2. Looks
    4 to 7 come from another shuffle in the same way, and so on.

    * Each pair (an order and its reverse) gives all candidates the same mean slot. A place bias that is linear in the
      slot therefore cancels: without other errors, a better candidate is above a worse one in at least one of the two.
    * Each four looks give an even number of candidates the same mean distance from the middle. A bias for or against
      the middle cancels, too. If the number is odd, these mean distances differ by half a slot, which is the least
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


def check_looks(looks: int) -> None:
    """Refuse a number of looks that [`balanced`] cannot balance.

    Raises:
        [`SettingsError`]: if `looks` is neither 1 nor an even number above 0.
    """
    if looks != 1 and (looks < 2 or looks % 2):
        raise SettingsError(
            f"looks must be 1 or an even number, got {looks}: each order of presentation needs its reverse, so that a"
            " judge's preference for early or late places cancels"
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
