"""The estimate of a judge's errors: its likelihood, what it recovers, and what it says about missing verdicts."""

from collections.abc import Callable
from dataclasses import astuple, fields, replace
from functools import cache
from itertools import combinations

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from scipy.stats import multivariate_normal

from experiments.audit_trials.estimates import ask, opinions
from rankbuffer_tools.audit.fit import (
    CHANCES,
    NODES,
    SIDES,
    WIDTH,
    Evidence,
    Fit,
    _draws,
    both_below,
    fit_judge,
    label_agreement,
    lasting_bound,
)
from rankbuffer_tools.audit.model import JudgeModel, QueryLooks
from rankbuffer_trl.errors import RankBufferError

JUDGE = JudgeModel(0.5, 0.4, 0.3, 0.3, -0.3, kappa=0.8, spread=0.4, bias_spread=0.3)


def audit(model: JudgeModel, queries: int, seed: int = 0, n: int = 8, **kwargs) -> list[QueryLooks]:
    rng = np.random.default_rng(seed)
    return ask(model, opinions(model, queries, rng, n), rng, **{"pairs": n // 2, **kwargs})


def interval(fit: Fit, measure: Callable[[JudgeModel], float]) -> np.ndarray:
    return np.quantile([measure(draw) for draw in fit.draws], [0.025, 0.975])


# the likelihood


@settings(max_examples=60, deadline=None)
@given(st.floats(-4, 4), st.floats(-4, 4), st.floats(-0.99, 0.99))
@example(0.0, 0.0, 0.3)
@example(0.0, 1.0, 0.3)
@example(-1.0, 0.0, 0.3)
def test_both_below_is_what_scipy_integrates(h, k, correlation):
    expected = multivariate_normal.cdf([h, k], cov=[[1, correlation], [correlation, 1]])
    assert both_below(np.array(h), np.array(k), np.array(correlation)) == pytest.approx(expected, abs=1e-6)


def simulated(
    model: JudgeModel, looks: QueryLooks, width: np.ndarray, rng: np.random.Generator, factor: np.ndarray | float = 1.0
) -> dict:
    """Simulate the query many times. Return where the verdicts on each two responses are those of `looks`."""
    n, times = looks.n, len(width)
    in_lists = width[:, None] * rng.standard_normal((times, n))
    own = width[:, None] * rng.standard_normal((times, n))
    in_pairs = model.kappa * in_lists + np.sqrt(1 - model.kappa**2) * own
    same = {two: np.ones(times, dtype=bool) for two in combinations(range(n), 2)}
    asked = [(shown, order, in_lists) for shown, order in looks.lists]
    asked += [(two, tuple(sorted(two, key=lambda i: i == better)), in_pairs) for two, better in looks.pairs]
    for shown, order, opinion in asked:
        size = len(shown)
        noise = rng.standard_normal((times, size)) * model.noise(size)
        look = {i: opinion[:, i] + factor * model.gain(slot, size) + noise[:, slot] for slot, i in enumerate(shown)}
        for i, j in combinations(sorted(shown), 2):
            same[i, j] &= (look[i] > look[j]) == (order.index(i) > order.index(j))
    return same


SMALL = QueryLooks(
    "q",
    lists=[((0, 1, 2, 3), (0, 2, 3, 1)), ((3, 2, 1, 0), (2, 0, 1, 3)), ((1, 3, 0), (0, 3, 1))],
    pairs=[((0, 1), 1), ((1, 0), 0), ((3, 2), 2), ((2, 3), 2), ((0, 2), 0)],
)


def test_chances_of_verdicts_are_as_counted_in_a_simulation():
    evidence, rng = Evidence([SMALL]), np.random.default_rng(0)
    for side, node in ((0, 1), (1, 3), (1, 5)):
        width, factor = np.exp(JUDGE.spread * NODES[node]), 1 + JUDGE.bias_spread * SIDES[side]
        same = simulated(JUDGE, SMALL, np.full(200_000, width), rng, factor)
        expected = [same[two[1:]].mean() for two in evidence.twos]
        found = evidence.chances(JUDGE)[:-1, side * len(NODES) + node]
        assert found == pytest.approx(expected, abs=0.004)


def test_log_likelihood_of_a_query_is_as_counted_in_a_simulation():
    rng = np.random.default_rng(1)
    width, factor = np.exp(JUDGE.spread * rng.standard_normal(600_000)), 1 + 0.3 * rng.standard_normal(600_000)
    same = simulated(JUDGE, SMALL, width, rng, factor)
    together = [same[0, 1] & same[2, 3], same[0, 2] & same[1, 3], same[0, 3] & same[1, 2]]
    [found] = Evidence([SMALL]).log_likelihood(JUDGE)
    assert found == pytest.approx(sum(np.log(one.mean()) for one in together), abs=0.06)


def test_chances_are_numbers_for_the_widest_spread_that_is_drawn():
    assert np.isfinite(Evidence([SMALL]).chances(replace(JUDGE, spread=np.exp(np.log(0.3) + 8 * 0.5)))).all()


def test_chances_of_all_answers_about_a_pair_add_up():
    def chance(first: int | None, second: int | None) -> np.ndarray:
        return Evidence([QueryLooks("q", [], [((0, 1), first), ((1, 0), second)])]).chances(JUDGE)[0]

    for better in (0, 1):
        assert chance(better, 0) + chance(better, 1) == pytest.approx(chance(better, None))
        assert chance(0, better) + chance(1, better) == pytest.approx(chance(None, better))
    assert chance(0, None) + chance(1, None) == pytest.approx(np.ones(len(CHANCES)))
    assert chance(0, 0) == pytest.approx(chance(1, 1))  # the bias favours each response once


def test_log_likelihood_counts_each_two_responses_once():
    looks = audit(replace(JUDGE, spread=0.0), 2, n=6)
    evidence = Evidence(looks)
    equal = replace(JUDGE, spread=1e-9, bias_spread=0.0)  # if all queries are alike, the terms are products
    singly = np.log(evidence.chances(equal)[:-1] @ CHANCES)
    expected = np.bincount([q for q, _, _ in evidence.twos], singly)
    assert evidence.log_likelihood(equal) == pytest.approx(expected, rel=1e-6)


# what the estimate recovers


@pytest.fixture(scope="module")
def large() -> Fit:
    return fit_judge(audit(JUDGE, 160))


def test_fit_judge_finds_the_judge_of_a_large_audit_in_narrow_intervals(large):
    wide = {"pair_noise", "pair_bias", "spread"}  # bias_spread is known least: its interval alone must hold it
    for name in (field.name for field in fields(JudgeModel)):
        truth, (low, high) = getattr(JUDGE, name), interval(large, lambda model, name=name: getattr(model, name))
        if name != "bias_spread":
            assert getattr(large.model, name) == pytest.approx(truth, abs=0.14 if name in wide else 0.07), name
        assert low - 0.02 <= truth <= high + 0.02, name
        assert 0.02 < high - low < (0.8 if name == "bias_spread" else 0.4), name


@pytest.mark.slow
def test_fit_judge_tells_a_spread_over_queries_from_none():
    biased = replace(JUDGE, list_bias=1.2, pair_bias=1.0)
    for name, judge, seed in (("spread", JUDGE, 3), ("bias_spread", biased, 12)):
        fits = (fit_judge(audit(replace(judge, **{name: spread}), 70, seed=seed)) for spread in (0.0, 0.7))
        none, some = (getattr(fit.model, name) for fit in fits)
        assert none < 0.3 < 0.5 < some, name


@pytest.mark.slow
def test_fit_judge_tells_lists_and_pairs_that_see_different_things():
    own, same = (fit_judge(audit(replace(JUDGE, kappa=kappa), 50, seed=4)) for kappa in (0.6, 1.0))
    assert interval(own, lambda model: model.kappa)[1] < 0.9
    assert same.model.kappa > 0.93
    assert interval(same, lambda model: model.kappa)[1] == 1.0


def test_fit_judge_finds_that_noise_of_lists_of_other_lengths_follows_the_power_law():
    fit = fit_judge(audit(JUDGE, 150, seed=5, n=5))
    assert fit.model.noise(5) == pytest.approx(JUDGE.noise(5), abs=0.08)
    assert fit.model.list_bias == pytest.approx(JUDGE.list_bias, abs=0.12)


def test_fit_judge_needs_three_responses():
    fit = fit_judge(audit(JUDGE, 60, seed=6, n=3))
    assert fit.model.list_bias > 0.1 and fit.model.pair_bias < -0.1
    assert 0.3 < fit.model.list_noise / JUDGE.list_noise < 3


# what must not change it


@pytest.fixture(scope="module")
def looks() -> list[QueryLooks]:
    return audit(JUDGE, 15, missing=0.1)


@pytest.fixture(scope="module")
def fitted(looks) -> Fit:
    return fit_judge(looks)


def test_fit_judge_repeats_with_the_same_seed(looks, fitted):
    assert fit_judge(looks) == fitted
    other = fit_judge(looks, seed=1)
    assert other.model == fitted.model and other.draws != fitted.draws


def turned(looks: list[QueryLooks], of_list: Callable, of_pair: Callable) -> list[QueryLooks]:
    """Change every list with its order, and every pair with the better one."""
    return [
        QueryLooks(one.query_id, [of_list(*x) for x in one.lists], [of_pair(*x) for x in one.pairs]) for one in looks
    ]


def test_fit_judge_turns_with_what_was_shown_and_preferred(looks, fitted):
    was, rng, renamed = fitted.model, np.random.default_rng(0), []
    for one in looks:
        name = dict(enumerate(rng.permutation(8).tolist()))
        lists = [(tuple(map(name.get, shown)), order and tuple(map(name.get, order))) for shown, order in one.lists]
        pairs = [(tuple(map(name.get, shown)), name.get(better)) for shown, better in one.pairs]
        renamed.append(QueryLooks(one.query_id, lists, pairs))
    cases = {
        "other names": (renamed, {}),
        "another order": ([replace(one, lists=one.lists[::-1], pairs=one.pairs[::-1]) for one in looks[::-1]], {}),
        "shown in reverse": (
            turned(looks, lambda shown, order: (shown[::-1], order), lambda shown, better: (shown[::-1], better)),
            {"list_bias": -was.list_bias, "pair_bias": -was.pair_bias},
        ),
        "the worse preferred": (
            turned(
                looks,
                lambda shown, order: (shown, order and order[::-1]),
                lambda shown, better: (shown, None if better is None else sum(shown) - better),
            ),
            {"list_bias": -was.list_bias, "list_middle": -was.list_middle, "pair_bias": -was.pair_bias},
        ),
    }
    for case, (changed, gains) in cases.items():
        assert astuple(fit_judge(changed).model) == pytest.approx(astuple(replace(was, **gains)), abs=0.01), case


# missing verdicts


def test_fit_judge_counts_no_failed_verdict_and_no_repeated_question_about_a_pair(looks, fitted):
    assert any(order is None for one in looks for _, order in one.lists)
    assert any(better is None for one in looks for _, better in one.pairs)
    kept, again = [], []
    for one in looks:
        lists, pairs = ([x for x in asked if x[1] is not None] for asked in (one.lists, one.pairs))
        kept.append(replace(one, lists=lists, pairs=pairs))
        again.append(replace(one, pairs=[*one.pairs, *((shown, shown[0]) for shown, _ in pairs)]))
    assert fit_judge(kept) == fitted == fit_judge(again)


def test_fit_judge_knows_only_what_was_asked():
    lists, pairs = (fit_judge(audit(JUDGE, 50, **without)) for without in ({"pairs": 0}, {"lists": 0}))
    assert lists.model.list_noise == pytest.approx(JUDGE.list_noise, rel=0.25)
    assert lists.model.pair_bias == pytest.approx(0, abs=0.01) and lists.model.kappa == pytest.approx(1, abs=0.01)
    low, high = interval(lists, lambda model: model.pair_noise)
    assert high / low > 4 and lists.model.crowd == pytest.approx(1.4, rel=0.02)
    assert pairs.model.pair_bias == pytest.approx(JUDGE.pair_bias, abs=0.2)
    for fit, narrow in ((lists, {"list_bias": 0.5, "list_middle": 0.5}), (pairs, {"pair_bias": 0.8})):
        for name in ("list_bias", "list_middle", "pair_bias", "kappa"):
            low, high = interval(fit, lambda model, name=name: getattr(model, name))
            assert high - low < narrow[name] if name in narrow else high - low > (0.3 if name == "kappa" else 3), name


def test_fit_judge_refuses_to_fit_no_verdict_at_all():
    for nothing in ([], [QueryLooks("q", [((0, 1, 2), None)], [((0, 1), None)])]):
        with pytest.raises(RankBufferError, match="no valid verdict"):
            fit_judge(nothing)


def test_draws_of_a_kappa_at_its_limit_are_those_of_a_normal_that_ends_there():
    rng, Q = np.random.default_rng(10), 1000
    each = rng.standard_normal((Q, 8)) @ (np.eye(8) + 0.5)  # scores that make kappa depend on the others
    curvature = each.T @ each * Q / (Q - 8) + np.diag(WIDTH**-2.0)
    covariance = np.linalg.inv(curvature)
    deviation = np.sqrt(np.diag(covariance))
    peak = np.array([-1.0, 0.2, 0.1, 0.3, 0.4, 1 + deviation[5], -1.0, -1.5])  # what would be best without a limit
    best = peak - covariance[5] / covariance[5, 5] * deviation[5]
    draws = _draws(best, lambda theta: each, lambda theta: curvature @ (peak - theta), Q, rng)
    assert draws[:, 5].max() <= 1 + 1e-9
    assert np.mean(draws[:, 5] > 1 - 1e-9) == pytest.approx(0.84, abs=0.1)
    at_limit = draws[draws[:, 5] > 1 - 1e-9]
    assert (at_limit.mean(axis=0) - best) / deviation == pytest.approx(np.zeros(8), abs=0.3)
    assert draws.std(axis=0)[:5] / deviation[:5] == pytest.approx(np.ones(5), abs=0.3)


def test_fit_judge_knows_judges_without_errors_and_judges_that_read_nothing():
    for noise, low, high in ((0.001, 0, 0.05), (100.0, 3, np.inf)):
        fit = fit_judge(audit(replace(JUDGE, list_noise=noise, pair_noise=noise, list_bias=0.0, pair_bias=0.0), 15))
        assert np.isfinite([astuple(draw) for draw in fit.draws]).all(), noise
        assert low <= fit.model.list_noise <= high and low <= fit.model.pair_noise <= high, noise


def test_fit_judge_draws_no_spread_whose_exponential_overflows():
    two_queries = audit(replace(JUDGE, list_noise=0.001, pair_noise=0.001), 2, seed=29)
    assert max(draw.spread for draw in fit_judge(two_queries).draws) < 20, "186 without a limit"


# labels


@cache
def labelled(share: float, queries: int, noise: float = 0.0, pairs_share: float | None = None) -> tuple:
    """Audit a judge of which a share of the settled opinion's variance is lasting error. Label every asked pair."""
    model, rng = replace(JUDGE, kappa=1.0), np.random.default_rng(8)
    truth, error = opinions(replace(model, spread=0.0), queries, rng)[0], rng.standard_normal((2, queries, 8))
    shares = np.array([share, share if pairs_share is None else pairs_share])[:, None, None]
    settled = np.sqrt(1 - shares) * truth + np.sqrt(shares) * (error if pairs_share is not None else error[0])
    looks = ask(model, settled, rng)
    told = truth + noise * rng.standard_normal(truth.shape)
    labels = []
    for q, one in enumerate(looks):
        for worse, better in (sorted(pair, key=lambda i: told[q, i]) for pair, _ in one.pairs[::2]):
            labels.append((one.query_id, better, worse))
    return fit_judge(looks), looks, labels


@pytest.mark.slow
def test_lasting_bound_holds_the_share_of_the_lasting_error():
    for share in (0.15, 0.5):
        found = lasting_bound(*labelled(share, 60))
        assert found.low - 0.03 <= share <= found.high + 0.03
        assert found.value == pytest.approx(share, abs=0.15)
        assert 0.05 < found.high - found.low < 0.5, share
    assert lasting_bound(*labelled(0.15, 60, noise=1.0)).value > 0.4, "noise of labels counts as lasting error"
    fit, looks, labels = labelled(0.15, 60)
    contradicted = [(query, worse, better) for query, better, worse in labels]
    assert lasting_bound(fit, looks, contradicted).value == 1, "nothing but error"


@pytest.mark.slow
def test_label_agreement_says_which_kind_of_question_sees_the_truth():
    lists, pairs = label_agreement(*labelled(0.1, 70, pairs_share=0.8))
    for found, share in ((lists, 0.1), (pairs, 0.8)):
        assert found.value == pytest.approx(0.5 + np.arcsin(np.sqrt(1 - share)) / np.pi, abs=0.09)
        assert found.low < found.value < found.high
    assert lists.low > pairs.high


def test_lasting_bound_refuses_too_few_labels_and_labels_of_something_else():
    looks = audit(JUDGE, 15)
    labels = [(one.query_id, *pair) for one in looks for pair, _ in one.pairs[::2]]
    with pytest.raises(RankBufferError, match=r"60 labels .* at least 100, so label 40 more") as error:
        lasting_bound(Fit(JUDGE, []), looks, labels)
    assert "\n" not in str(error.value)
    for label in (("elsewhere", 0, 1), ("query 0", 0, 8)):
        with pytest.raises(RankBufferError, match="not audited"):
            lasting_bound(Fit(JUDGE, []), looks, [*labels, label])


# the model and the benchmark


def test_judge_model_has_noise_by_a_power_law_and_a_gain_for_each_slot():
    assert [JUDGE.noise(n) for n in (1, 2, 8)] == pytest.approx([0.3, 0.3, 0.5])
    assert JUDGE.noise(4) == pytest.approx(np.sqrt(0.3 * 0.5))
    assert JUDGE.crowd == pytest.approx(5 / 3)
    model = replace(JUDGE, list_bias=1.0, list_middle=2.0)
    assert [model.gain(slot, 3) for slot in range(3)] == pytest.approx([0.5, -2.0, -0.5])
    assert model.gain(0, 2) - model.gain(1, 2) == pytest.approx(model.pair_bias)


def test_query_looks_know_the_number_of_responses():
    assert SMALL.n == 4
    assert QueryLooks("q", [], [((5, 2), None)]).n == 6
    assert QueryLooks("q", [], [], scores=[1.0, None]).n == 2
