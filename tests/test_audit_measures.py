"""The measures of the audit, by hand."""

import math
from collections import Counter
from dataclasses import replace
from random import Random
from statistics import fmean

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rankbuffer_tools.audit.measures import (
    MEASURES,
    best_constant,
    gain_of_means,
    interval,
    label_share,
    lists_tau,
    ordering_tau,
    slope,
    tau_b,
    tied_ratings,
)
from rankbuffer_tools.audit.rankings import QueryVerdicts


def slow_tau_b(x, y):
    """From the textbook: (P - Q) / sqrt((n0 - n1) (n0 - n2))."""
    n = len(x)
    two = [(i, j) for i in range(n) for j in range(n)]
    concordant = sum(x[i] < x[j] and y[i] < y[j] for i, j in two)
    discordant = sum(x[i] < x[j] and y[i] > y[j] for i, j in two)
    ties = [sum(math.comb(count, 2) for count in Counter(scores).values()) for scores in (x, y)]
    bottom = math.prod(math.comb(n, 2) - tied for tied in ties)
    return (concordant - discordant) / math.sqrt(bottom) if bottom else 0.0


@given(st.lists(st.tuples(st.integers(0, 4), st.integers(0, 4)), max_size=12))
def test_tau_b_is_the_textbooks(pairs):
    x, y = [a for a, _ in pairs], [b for _, b in pairs]
    assert tau_b(x, y) == pytest.approx(slow_tau_b(x, y), abs=1e-12)
    assert tau_b(x, y) == pytest.approx(tau_b(y, x))
    assert tau_b(x, [-b for b in y]) == pytest.approx(-tau_b(x, y))


def test_query_looks_know_the_number_of_responses():
    assert QueryVerdicts("q", [((0, 2, 1, 3), None)], {}).n == 4
    assert QueryVerdicts("q", [], {(5, 2): None}).n == 6
    assert QueryVerdicts("q", [], {}, scores=[1.0, None]).n == 2


def test_ordering_tau_compares_places_not_names():
    # 2 0 1 and 0 2 1, worst to best: the pair (0, 2) is turned, the two others are not
    assert ordering_tau((2, 0, 1), (0, 2, 1)) == pytest.approx(1 / 3)


def test_lists_tau_is_the_mean_over_every_two_of_four():
    shown = (0, 1, 2)
    orders = [(0, 1, 2), (0, 2, 1), (2, 1, 0), (0, 1, 2)]
    rankings = QueryVerdicts("q", [(shown, order) for order in orders], {})
    taus = [1 / 3, -1, 1, -1 / 3, 1 / 3, -1]
    assert lists_tau(rankings) == pytest.approx(fmean(taus))
    assert lists_tau(QueryVerdicts("q", [*rankings.lists[:3], (shown, None)], {})) is None


def test_slope_is_that_of_ranks_on_places():
    # Shown last instead of first, response 0 gains a rank; shown first instead of last, response 2 keeps its own.
    assert slope((0, 1, 2), (0, 1, 2), (1, 0, 2)) == pytest.approx((2 * 1 + 0 * -1 + -2 * 0) / 8)


def test_label_share_counts_each_sample_once_at_each_place_with_each_label():
    def share(straight, reverse, crossed, crossed_reverse):
        pairs = {(3, 1): straight, (1, 3): reverse}
        return label_share(QueryVerdicts("q", [], pairs, crossed={(3, 1): crossed, (1, 3): crossed_reverse}))

    assert share(3, 3, 3, 3) == 1 / 2  # the better sample
    assert share(3, 1, 3, 1) == 1 / 2  # the first one
    assert share(3, 1, 1, 3) == 1  # R0
    assert share(1, 3, 3, 1) == 0  # R1
    assert share(3, 3, 1, 3) == 3 / 4
    assert share(3, 3, 1, None) is None


def test_tied_ratings_are_samples_whose_rating_another_one_has():
    assert tied_ratings(QueryVerdicts("q", [], {}, [3, 5, 3, 7])) == 1 / 2
    assert tied_ratings(QueryVerdicts("q", [], {}, [3, 5, None, 7])) is None


def test_gain_of_means_is_negative_if_the_words_agree_better():
    lists, up = [((0, 1, 2), (0, 1, 2)), ((2, 1, 0), (0, 1, 2))], [1, 2, 3]
    assert gain_of_means(QueryVerdicts("q", lists, {}, up, up[::-1])) == pytest.approx(-1 - 1)


def test_best_constant_is_the_position_in_the_middle():
    for n, distance in ((2, 1 / 2), (3, 2 / 3), (4, 4 / 4), (7, 12 / 7)):
        assert best_constant(n) == pytest.approx(distance), n


@given(st.lists(st.floats(-1, 1), min_size=20, max_size=25), st.integers(0, 5))
def test_interval_lies_within_many_values_and_repeats(numbers, seed):
    low, high = interval(numbers, seed, resamples=50)
    assert min(numbers) - 1e-9 <= low <= high <= max(numbers) + 1e-9
    assert interval(numbers, seed, resamples=50) == (low, high)


def test_interval_covers_the_truth_about_as_often_as_it_says_also_of_few_values():
    for n in (6, 10):
        covered = 0
        for seed in range(600):
            random = Random(seed)
            low, high = interval([random.gauss(0.2, 1) for _ in range(n)], seed, resamples=150)
            covered += low <= 0.2 <= high
        assert 0.9 < covered / 600 < 0.98, n
    assert [interval([0.5] * n, 0) for n in (0, 1, 3, 5, 6)] == [None] * 4 + [(0.5, 0.5)]


def test_interval_is_as_wide_as_theory_says():
    assert interval([0.0, 1.0] * 50, seed=0) == pytest.approx((0.5 - 1.96 * 0.05, 0.5 + 1.96 * 0.05), abs=0.02)


def test_the_interval_of_a_share_ends_at_0_and_1_and_that_of_a_tau_does_not():
    share = next(each for each in MEASURES if each.name == "cut")
    for losses, end in ((0, 0, 1, 1, 1, 1), "high"), ((0, 0, 0, 0, 1, 1), "low"):
        answers = [QueryVerdicts(f"{i}", [], {}, cut=each) for i, each in enumerate(losses)]
        assert getattr(share.result(answers, 0), end) == (end == "high")
        assert not 0 <= getattr(replace(share, meaning="tau").result(answers, 0), end) <= 1
