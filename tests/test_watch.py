"""The watching reader: an exact test on pairs, draws from a real store, a live run, and what it costs."""

from itertools import product
from math import prod
from random import Random
from statistics import median

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rankbuffer_lab.rejudge.evidence import e_values

# The test


@given(st.lists(st.integers(1, 9), min_size=5, max_size=5), st.sampled_from([0.0, 0.1, 0.4]))
def test_e_values_are_fair_bets_whatever_two_judges_say(weights, tolerance):
    """Whatever the probabilities of a difference, if their mean is the tolerance, the expected e-value is 1."""
    chances = dict(zip((-1.0, -0.5, 0.0, 0.5, 1.0), weights, strict=True))
    over = sum(weight * (difference - tolerance) for difference, weight in chances.items())
    corner = -1.0 if over > 0 else 1.0  # its weight brings the mean to the tolerance
    chances[corner] += abs(over) / abs(corner - tolerance)
    total, mean = sum(chances.values()), 0.0
    for said in product(chances, repeat=3):
        values = e_values(said, tolerance)
        assert min(values) > 0 and len(values) == 3
        mean += prod(chances[difference] / total for difference in said) * values[-1]
    assert mean == pytest.approx(1)


def test_e_values_lose_half_at_most_and_never_bet_on_a_better_reader():
    for tolerance in (0.0, 0.1, 0.9):
        values = e_values([1.0] * 50 + [-1.0], tolerance)
        assert values[-1] == pytest.approx(values[-2] / 2), "the largest bet"
    assert set(e_values([-1.0, 0.0, 0.1] * 9, 0.1)) == {1.0}
    assert max(e_values([1.0] * 5000, 0.0)) == 1e100, "a number that JSON holds"


def shares(random: Random, chance: float) -> float:
    """The share of a judge that decides each order by itself, one time in three."""
    return random.choice((0.0, 1.0, 0.5)) if random.random() < 1 / 3 else float(random.random() < chance)


def alarms(runs: int, differences) -> list[int]:
    """After how many pairs simulated runs raise the alarm of 5 %; those without one are left out."""
    found = []
    for seed in range(runs):
        values = e_values(differences(Random(seed)), 0.1)
        found += [next(place for place, value in enumerate(values) if value >= 20)] if max(values) >= 20 else []
    return found


def test_e_values_raise_few_false_alarms_and_find_a_late_divergence():
    def odd(random):  # queries about which the judges always disagree, in sum as much as is tolerated
        return (random.choice([1.0] * 11 + [-1.0] * 9) for _ in range(300))

    def blunt(random):  # mean shares of 0.55 and 0.45
        return (shares(random, 0.575) - shares(random, 0.425) for _ in range(300))

    def late(random):  # the reader sees more at first; after 200 pairs the policy pleases its judge alone
        before = (shares(random, 0.6) - shares(random, 0.7) for _ in range(200))
        return [*before, *(shares(random, 0.95) - shares(random, 0.5) for _ in range(200))]

    for null in (odd, blunt):
        assert 0 < len(alarms(400, null)) < 0.05 * 400, null.__name__
    found = alarms(50, late)
    assert len(found) > 40 and min(found) > 200 and median(found) < 330
