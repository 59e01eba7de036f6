"""The slow oracle of mean places: every two candidates are compared in every order that holds both."""

import json
import re
from collections.abc import Callable, Sequence
from fractions import Fraction

from rankbuffer_trl.groups import RolloutGroup
from rankbuffer_trl.testing import unguarded


def mean(values) -> Fraction:
    values = list(values)
    return Fraction(sum(values)) / len(values)


def slow_places(orders: Sequence[Sequence]) -> dict[object, Fraction]:
    """Return the mean place of each candidate, pair by pair."""
    everyone = {i for order in orders for i in order}

    def share(i, j) -> Fraction:
        return mean(order.index(i) > order.index(j) for order in orders if i in order and j in order)

    return {i: sum((share(i, j) for j in everyone - {i}), Fraction()) for i in everyone}


def slow_rewards(group: RolloutGroup, places: dict[str, Fraction], highest: int) -> tuple[float | None, ...]:
    """Return the rewards of texts whose places go from 0 to `highest`, above the rollouts without an answer."""
    e = len(group.empty)

    def reward(text: str) -> float | None:
        if not text:
            return -1.0
        if text not in places:
            return None
        return float(-1 + 2 * (e + places[text]) / (e + highest)) if e + highest else 0.0

    return tuple(reward(rollout.text) for rollout in group.rollouts)


def shown_in(prompt: str) -> list[str]:
    """Return the texts of a prompt's candidates in the order shown. Their labels are places."""
    shown = re.findall(r"^\[R(\d+)\]\n(.+)$", unguarded(prompt), re.MULTILINE)
    assert [int(label) for label, _ in shown] == list(range(len(shown)))
    return [text for _, text in shown]


def judge_by(value: Callable[[str, float], float]) -> Callable[[str], str]:
    """Return a judge that sorts what it is shown by `value(text, place)`, place 0 for the first and 1 for the last."""

    def answer(prompt: str) -> str:
        texts = shown_in(prompt)
        values = [value(text, slot / max(len(texts) - 1, 1)) for slot, text in enumerate(texts)]
        return json.dumps({"order": sorted(range(len(texts)), key=values.__getitem__)})

    return answer
