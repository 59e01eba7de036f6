"""The measures of an audit. A measure of one query is a number, or `None` if its verdicts allow none."""

import math
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from statistics import fmean, median, stdev

import numpy as np
from scipy.special import ndtri, stdtrit

from rankbuffer_trl.monitoring import sign, tau_b
from rankbuffer_trl.rewards import RATING_MAX

from .rankings import Order, Pair, QueryVerdicts
from .results import MIN_QUERIES, PLACE_SPREAD, PREFERENCE, SOFT, SOFT_GAIN, Result
from .samples import LISTS

RESAMPLES = 1000
FEW = 20  # queries, below which an interval is widened: resamples of few values spread too little


def ranks(order: Order) -> list[int]:
    """Return the place of each thing in `order`."""
    return [order.index(i) for i in range(len(order))]


def interval(values: Sequence[float], seed: int, resamples: int = RESAMPLES) -> tuple[float, float] | None:
    """Return the 95 % bootstrap interval of the mean of `values`, one per query; `None` for too few."""
    if (n := len(values)) < MIN_QUERIES:
        return None
    rng = random.Random(seed)
    means = [fmean(rng.choices(values, k=n)) for _ in range(resamples)]
    # As by Student's t: covers normal values in 92 to 96 %.
    wider = math.sqrt(n / (n - 1)) * stdtrit(n - 1, 0.975) / ndtri(0.975) if n < FEW else 1.0
    centre = fmean(values)
    low, high = (centre + wider * (end - centre) for end in np.quantile(means, [0.025, 0.975]))
    return float(low), float(high)


def displacements(answers: QueryVerdicts) -> list[int]:
    """Return how far from its place each sample is put back, for the samples that have a verdict."""
    return [abs(inserted - place) for place, inserted in answers.put_back if inserted is not None]


def best_constant(n: int) -> float:
    """Return the least mean displacement that a judge can reach with the same position for all `n` samples."""
    return min(fmean(abs(position - place) for place in range(n)) for position in range(n))


def ordering_tau(first: Order, second: Order) -> float:
    """Return Kendall's tau of two orders."""
    return tau_b(ranks(first), ranks(second))


def lists_tau(answers: QueryVerdicts) -> float | None:
    """Return the mean tau of every two of the four lists, `None` if one is missing.

    A judge that ranks by position alone gets less than 0, whether it prefers early positions, the ends or the middle.
    """
    orders = answers.orders
    if len(orders) < LISTS:  # a judge that prefers the ends ranks a list as its reverse
        return None
    return mean_or_none([ordering_tau(one, other) for one, other in combinations(orders, 2)])


def slope(shown: Order, one: Order, other: Order) -> float:
    """Return the ranks that a sample gains per place that it is shown later, from one list to its reverse."""
    # What the judge thinks of a sample cancels: both have it.
    moved = [b - a for a, b in zip(ranks(shown), ranks(shown[::-1]), strict=True)]
    gained = [b - a for a, b in zip(ranks(one), ranks(other), strict=True)]
    # Least squares through 0.
    return sum(a * b for a, b in zip(moved, gained, strict=True)) / sum(a * a for a in moved)


def mean_or_none(values: Sequence[float]) -> float | None:
    """Return the mean, `None` if there are no values."""
    return fmean(values) if values else None


def in_both_orders(pairs: Mapping[Pair, int | None]) -> list[tuple[Pair, int, int]]:
    """Return each pair with its verdict and the verdict on its reverse, if both are there."""
    # One presentation alone says nothing about place.
    both = [(pair, one, pairs.get(pair[::-1])) for pair, one in pairs.items() if pair[0] < pair[1]]
    return [(pair, one, other) for pair, one, other in both if one is not None and other is not None]


def pairs_with(scores: Sequence[float] | None, answers: QueryVerdicts) -> float | None:
    """Return the share of verdicts on pairs that the scores of all samples agree with. Equal scores count one half."""
    if not scores:
        return None
    verdicts = [(sum(pair) - won, won) for pair, *both in in_both_orders(answers.pairs) for won in both]
    return mean_or_none([(1 + sign(scores[won] - scores[lost])) / 2 for lost, won in verdicts])


def pairs_with_lists(answers: QueryVerdicts) -> float | None:
    """Return the share of verdicts on pairs that the lists agree with. Equal mean places count one half."""
    return pairs_with(answers.places, answers)


def preferences(odds: Mapping[Pair, float]) -> dict[Pair, tuple[float, float]]:
    """Return by how much the first one of each pair leads in log odds, and what being shown first adds to that."""
    both = [(pair, one, odds[pair[::-1]]) for pair, one in odds.items() if pair[0] < pair[1] and pair[::-1] in odds]
    # The lead changes sign with the order, the place does not.
    return {pair: ((one - other) / 2, (one + other) / 2) for pair, one, other in both}


def leads_with(scores: Sequence[float] | None, answers: QueryVerdicts) -> float | None:
    """Return the share of pairs whose lead in log odds the scores of all samples agree with; see [`pairs_with`]."""
    if not scores:
        return None
    leads = preferences(answers.odds)
    return mean_or_none([(1 + sign(lead) * sign(scores[a] - scores[b])) / 2 for (a, b), (lead, _) in leads.items()])


def leads_after_exchange(answers: QueryVerdicts) -> float | None:
    """Return the share of pairs with the same leader, in log odds, after the labels A and B are exchanged."""
    straight, crossed = preferences(answers.odds), preferences(answers.crossed_odds)
    return mean_or_none(
        [(1 + sign(straight[pair][0]) * sign(crossed[pair][0])) / 2 for pair in crossed if pair in straight]
    )


def label_share(answers: QueryVerdicts) -> float | None:
    """Return the share of verdicts for label A, on the pair whose samples stood at both places with both labels."""
    straight = in_both_orders({pair: answers.pairs.get(pair) for pair in answers.crossed})
    crossed = in_both_orders(answers.crossed)
    # A stands first in a straight presentation, and second in a crossed one.
    won = [one == pair[0] for pair, one, _ in straight] + [other == pair[1] for pair, _, other in straight]
    won += [one == pair[1] for pair, one, _ in crossed] + [other == pair[0] for pair, _, other in crossed]
    return fmean(won) if straight and crossed else None  # only all four presentations tell the label from the place


def ratings_with_lists(answers: QueryVerdicts) -> float | None:
    """Return the tau-b of the ratings with the mean places in the lists."""
    places, ratings = answers.places, answers.ratings
    return tau_b(ratings, places) if places and ratings else None


def means_with_lists(answers: QueryVerdicts) -> float | None:
    """Return the tau-b of the mean ratings with the mean places in the lists."""
    places, means = answers.places, answers.means
    return tau_b(means, places) if places and means else None


def gain_of_means(answers: QueryVerdicts) -> float | None:
    """Return how much better the mean ratings agree with the lists than the ratings of the same answers do."""
    soft, hard = means_with_lists(answers), ratings_with_lists(answers)
    return None if soft is None or hard is None else soft - hard


def tied_ratings(answers: QueryVerdicts) -> float | None:
    """Return the share of samples whose rating another sample has, too."""
    ratings = answers.ratings
    return mean_or_none([float(ratings.count(rating) > 1) for rating in ratings])


def rating_noise(answers: Sequence[QueryVerdicts]) -> float | None:
    """Return the noise of one soft rating in units of reward, `None` without probabilities."""
    pairs = [
        (query.means[i] - query.means[j], lead)
        for query in answers
        if query.means
        for (i, j), (lead, _) in preferences(query.odds).items()
    ]
    gaps, leads = (sum(pair[k] ** 2 for pair in pairs) for k in (0, 1))
    if not gaps or not leads:
        return None
    # Two equally reliable measurements: their correlation is the share without noise.
    shared = sum(gap * lead for gap, lead in pairs) / math.sqrt(gaps * leads)
    # Half: a gap has the noise of two; rewards span 2.
    return math.sqrt((1 - max(shared, 0.0)) / 2 * gaps / len(pairs)) * 2 / RATING_MAX


def coin(n: int) -> float:
    """Return the chance level of a choice between two."""
    return 0.5


@dataclass(frozen=True)
class Measure:
    """A measure: its value `of` one query's verdicts, and its chance level, if it has one, for `n` samples."""

    name: str
    label: str
    meaning: str
    of: Callable[[QueryVerdicts], float | None]
    chance: Callable[[int], float] | None = lambda n: 0.0
    better: int = 1
    main: bool = False

    def result(self, answers: Sequence[QueryVerdicts], seed: int) -> Result:
        """Measure all queries whose verdicts allow it."""
        measured = [(query, value) for query in answers if (value := self.of(query)) is not None]
        low, high = interval([value for _, value in measured], seed) or (None, None)
        # A widened interval may leave the range of a share.
        if low is not None and high is not None and self.meaning.startswith("share"):
            low, high = max(low, 0.0), min(high, 1.0)
        return Result(
            name=self.name,
            label=self.label,
            meaning=self.meaning,
            better=self.better,
            main=self.main,
            values={query.query_id: value for query, value in measured},
            low=low,
            high=high,
            chance=fmean(self.chance(query.n) for query, _ in measured) if measured and self.chance else None,
        )


MEASURES = (
    Measure(
        "lists_tau", "lists, shown twice", "tau of two rankings, samples shown in two orders", lists_tau, main=True
    ),
    Measure(
        "lists_identical",
        "identical",
        "share of reversed lists ranked the same both times",
        lambda a: mean_or_none([float(one == other) for _, one, other in a.reversed_lists]),
        lambda n: 1 / math.factorial(n),
    ),
    Measure(
        "lists_bias",
        "position bias",
        "ranks gained per place shown later; 0 is none",
        lambda a: mean_or_none([slope(*lists) for lists in a.reversed_lists]),
        better=0,
    ),
    Measure(
        "pairs_flip",
        "pairs that flip",
        "share of pairs whose winner depends on who is first",
        lambda a: mean_or_none([float(one != other) for _, one, other in in_both_orders(a.pairs)]),
        coin,
        better=-1,
        main=True,
    ),
    Measure(
        "pairs_first",
        "position bias",
        "share won by the sample shown first; 0.50 is no bias",
        lambda a: mean_or_none([((w == p[0]) + (v == p[1])) / 2 for p, w, v in in_both_orders(a.pairs)]),
        coin,
        better=0,
    ),
    Measure("pairs_label", "label", "share won by label A, place apart; 0.50 is no bias", label_share, coin, better=0),
    Measure(
        "pairs_lists",
        "pairs and lists",
        "share of verdicts on pairs that the lists agree with",
        pairs_with_lists,
        coin,
        main=True,
    ),
    Measure(
        "put_back",
        "put back",
        "share of samples inserted where the lists have them",
        lambda a: mean_or_none([float(distance == 0) for distance in displacements(a)]),
        lambda n: 1 / n,
        main=True,
    ),
    Measure(
        "put_back_distance",
        "distance",
        "places off, on average",
        lambda a: mean_or_none(displacements(a)),
        best_constant,
        better=-1,
    ),
    Measure(
        "ratings_lists",
        "ratings and lists",
        "tau-b of the ratings with the ranks in the lists",
        ratings_with_lists,
        main=True,
    ),
    Measure("ratings_tied", "ties", "share of samples whose rating another one has", tied_ratings, None, better=0),
    Measure(
        "padded",
        "padded",
        "share of samples that lose against themselves with idle sentences",
        lambda a: a.padded,
        coin,
        better=0,
    ),
    Measure("cut", "cut", "share of samples that lose against their own first half", lambda a: a.cut, coin, better=0),
    Measure(
        SOFT,
        "by probabilities",
        "share of pairs on which log odds and mean ratings agree",
        lambda a: leads_with(a.means, a),
        coin,
    ),
    Measure(
        "soft_words",
        "greedy verdicts",
        "share of verdicts on pairs that the ratings agree with",
        # Of the answers that have probabilities, so that both rows compare.
        lambda a: pairs_with(a.ratings, a) if a.means else None,
        coin,
    ),
    Measure(
        "soft_labels", "labels", "share of pairs with the same leader if A and B change", leads_after_exchange, coin
    ),
    Measure(
        "soft_pairs_lists",
        "pairs and lists",
        "share of pairs on which log odds and the lists agree",
        lambda a: leads_with(a.places, a),
        coin,
    ),
    Measure(
        "soft_ratings_lists",
        "ratings and lists",
        "tau-b of the mean ratings with the ranks in the lists",
        means_with_lists,
    ),
    Measure(SOFT_GAIN, "gain", "that tau-b, minus that of the greedy verdicts", gain_of_means),
    Measure(
        PREFERENCE,
        "preference",
        "log odds by which the better one of a pair leads, median",
        lambda a: median(sizes) if (sizes := [abs(lead) for lead, _ in preferences(a.odds).values()]) else None,
        None,
        better=0,
    ),
    Measure(
        "soft_place",
        "position bias",
        "log odds that being shown first adds; 0 is no bias",
        lambda a: mean_or_none([place for _, place in preferences(a.odds).values()]),
        better=0,
    ),
    Measure(
        PLACE_SPREAD,
        "its deviation",
        "how much that differs between the pairs of a query",
        lambda a: stdev(places) if len(places := [place for _, place in preferences(a.odds).values()]) > 1 else None,
        None,
        better=0,
    ),
)
