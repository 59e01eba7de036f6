"""The measures of an audit. A measure of one query is a number, or `None` if its verdicts allow none."""

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import combinations
from statistics import fmean

import numpy as np

from .probes import Ordering, Pairs, QueryVerdicts
from .results import Result

RESAMPLES = 1000


def tau_b(x: Sequence[float], y: Sequence[float]) -> float:
    """Return Kendall's tau-b of two scores of the same things; 0 if one of the scores ties all of them."""
    pairs = list(combinations(range(len(x)), 2))
    up = [sign(x[j] - x[i]) for i, j in pairs]
    down = [sign(y[j] - y[i]) for i, j in pairs]
    untied = sum(map(abs, up)) * sum(map(abs, down))
    return sum(a * b for a, b in zip(up, down, strict=True)) / math.sqrt(untied) if untied else 0.0


def sign(x: float) -> int:
    """Return -1, 0 or 1."""
    return (x > 0) - (x < 0)


def ranks(order: Ordering) -> list[int]:
    """Return the place of each thing in `order`."""
    return [order.index(i) for i in range(len(order))]


def pair_win_rates(n: int, pairs: Pairs) -> list[float] | None:
    """Return the share of its comparisons that each of `n` things won; `None` if one has no comparison."""
    played = [[winner == i for pair, winner in pairs.items() if i in pair and winner is not None] for i in range(n)]
    return [fmean(wins) for wins in played] if all(played) else None


def interval(values: Sequence[float], seed: int, resamples: int = RESAMPLES) -> tuple[float, float] | None:
    """Return the 95 % bootstrap interval of the mean of `values`, one per query; `None` for fewer than two."""
    if len(values) < 2:
        return None
    rng = random.Random(seed)
    means = [fmean(rng.choices(values, k=len(values))) for _ in range(resamples)]
    low, high = np.quantile(means, [0.025, 0.975])
    return float(low), float(high)


def own_distance(given: int, place: int) -> int:
    """Return the distance of a position from the two next to the response itself, `place` and `place + 1`."""
    return max(place - given, given - place - 1, 0)


def displacement(given: int, place: int) -> int:
    """Return how far from its place a response is put back."""
    return abs(given - place)


Distance = Callable[[int, int], int]


def mean_distance(positions: Sequence[int | None], distance: Distance) -> float | None:
    """Return the mean distance over the responses that got a position."""
    distances = [distance(given, place) for place, given in enumerate(positions) if given is not None]
    return fmean(distances) if distances else None


def share_exact(positions: Sequence[int | None], distance: Distance) -> float | None:
    """Return the share of distance 0 among the responses that got a position."""
    return mean_distance(positions, lambda given, place: distance(given, place) == 0)


def best_constant(n: int, distance: Distance) -> float:
    """Return the least mean distance that a judge can reach with the same position for all `n` responses."""
    return min(fmean(distance(position, place) for place in range(n)) for position in range(n + 1))


def both(answers: QueryVerdicts, measure: Callable[[Ordering, Ordering], float]) -> float | None:
    """Apply `measure` to the two listwise orders; return `None` if one is missing."""
    first, second = answers.ranked
    return None if first is None or second is None else measure(first, second)


def ordering_tau(first: Ordering, second: Ordering) -> float:
    """Return Kendall's tau of two orders."""
    return tau_b(ranks(first), ranks(second))


def position_bias(answers: QueryVerdicts) -> float | None:
    """Return the ranks that a response gains per place that it is shown later.

    This is the least-squares slope of the change in rank on the change in place, from one presentation to the other.
    The quality of a response cancels out, because it is the same in both.
    """

    def slope(first: Ordering, second: Ordering) -> float:
        moved = [b - a for a, b in zip(*map(ranks, answers.shown), strict=True)]
        gained = [b - a for a, b in zip(ranks(first), ranks(second), strict=True)]
        return sum(a * b for a, b in zip(moved, gained, strict=True)) / sum(a * a for a in moved)

    return both(answers, slope)


def listwise_tau(answers: QueryVerdicts, scores: Sequence[float] | None) -> float | None:
    """Return the mean tau-b of the two listwise orders with `scores`."""
    if scores is None:
        return None
    return both(answers, lambda *orders: fmean(tau_b(ranks(order), scores) for order in orders))


def pairwise_tau(answers: QueryVerdicts) -> float | None:
    """Return the tau-b of the win-rate order with the data set's."""
    rates = pair_win_rates(answers.n, answers.pairs)
    return None if rates is None else tau_b(rates, range(answers.n))


def flips(answers: QueryVerdicts) -> float | None:
    """Return the share of pairs whose winner depends on which is shown first."""
    verdicts = [(answers.pairs.get((i, j)), answers.pairs.get((j, i))) for i, j in combinations(range(answers.n), 2)]
    flipped = [one != other for one, other in verdicts if one is not None and other is not None]
    return fmean(flipped) if flipped else None


@dataclass(frozen=True)
class Measure:
    """A measure: its value `of` one query's verdicts, and its chance level for `n` responses."""

    name: str
    label: str
    meaning: str
    of: Callable[[QueryVerdicts], float | None]
    chance: Callable[[int], float] = lambda n: 0.0
    better: int = 1
    main: bool = False

    def result(self, answers: Sequence[QueryVerdicts], seed: int) -> Result:
        """Measure all queries whose verdicts allow it."""
        measured = [(one, value) for one in answers if (value := self.of(one)) is not None]
        low, high = interval([value for _, value in measured], seed) or (None, None)
        return Result(
            name=self.name,
            label=self.label,
            meaning=self.meaning,
            better=self.better,
            main=self.main,
            values={one.query_id: value for one, value in measured},
            low=low,
            high=high,
            chance=fmean(self.chance(one.n) for one, _ in measured) if measured else None,
        )


MEASURES = (
    Measure(
        "self_insertion",
        "self-insertion",
        "share of responses placed next to themselves",
        lambda a: share_exact(a.inserted, own_distance),
        lambda n: 2 / n,
        main=True,
    ),
    Measure(
        "self_insertion_distance",
        "distance",
        "places off, on average",
        lambda a: mean_distance(a.inserted, own_distance),
        lambda n: best_constant(n, own_distance),
        better=-1,
    ),
    Measure(
        "put_back",
        "put back",
        "share of responses that return to their place",
        lambda a: share_exact(a.put_back, displacement),
        lambda n: 1 / n,
        main=True,
    ),
    Measure(
        "put_back_distance",
        "distance",
        "places off, on average",
        lambda a: mean_distance(a.put_back, displacement),
        lambda n: best_constant(n, displacement),
        better=-1,
    ),
    Measure(
        "reshown_tau",
        "shown twice",
        "tau of two rankings, responses shown in two orders",
        lambda a: both(a, ordering_tau),
        main=True,
    ),
    Measure(
        "reshown_identical",
        "identical",
        "share of queries ranked the same both times",
        lambda a: both(a, lambda first, second: float(first == second)),
        lambda n: 1 / math.factorial(n),
    ),
    Measure(
        "position_bias",
        "position bias",
        "ranks gained per place shown later; 0 is none",
        position_bias,
        better=0,
    ),
    Measure(
        "data_tau",
        "data set's order",
        "tau of its rankings with the data set's",
        lambda a: listwise_tau(a, range(a.n)),
        main=True,
    ),
    Measure(
        "pairwise_tau",
        "order of pairs",
        "tau-b of its rankings with its verdicts on all pairs",
        lambda a: listwise_tau(a, pair_win_rates(a.n, a.pairs)),
        main=True,
    ),
    Measure(
        "pairwise_data_tau",
        "pairs and data",
        "tau-b of its verdicts on all pairs with the data",
        pairwise_tau,
    ),
    Measure(
        "pairwise_flips",
        "pairs that flip",
        "share of pairs whose winner depends on who is first",
        flips,
        lambda n: 0.5,
        better=-1,
        main=True,
    ),
)
