"""Advice under a budget: the model of each method agrees with the method, and the audit may overrule a fixed rule."""

import json
import math
from dataclasses import replace

import numpy as np
import pytest
import yaml
from conftest import ROOT

from experiments.judge_cost.replay import ROWS, Replay, Row
from experiments.simulated_judge import JudgeErrors, World
from rankbuffer_tools.audit.advice import (
    ALARM,
    LISTS,
    POINTWISE,
    RATINGS_SOFT,
    SURE,
    MethodCosts,
    advise,
    disattenuated,
)
from rankbuffer_tools.audit.expected import METHODS, G, Judged, draw, expected_tau, slot, tau, tied
from rankbuffer_tools.audit.fit import LABELS, Fit, Label
from rankbuffer_tools.audit.measures import tau_b
from rankbuffer_tools.audit.model import JudgeModel, QueryLooks
from rankbuffer_trl.errors import SettingsError
from rankbuffer_trl.groups import Query, RolloutGroup
from rankbuffer_trl.rewards.beyond.looks import balanced
from rankbuffer_trl.rewards.method import load_method

JUDGE = JudgeModel(
    list_noise=0.5, list_bias=0.4, list_middle=0.2, pair_noise=0.4, pair_bias=0.3, kappa=0.99,
    spread=0.3, bias_spread=0.2,
)  # fmt: skip
COSTS = MethodCosts(groups=1000, in_list=(3600, 30), in_pair=(1200, 10), tokens_per_second=2000, prices=(1.0, 5.0))
LIST, PAIR = 3.63e6, 1.21e6  # tokens of one such question per group of the run
LOOKS = [QueryLooks("q", [(tuple(range(G)), tuple(range(G)))], [])]


def fit(model: JudgeModel, **width: float) -> Fit:
    """Return a fit whose draws differ from the model by normal factors of this width."""
    rng = np.random.default_rng(0)
    changes = [{key: getattr(model, key) * math.exp(rng.normal(0, w)) for key, w in width.items()} for _ in range(10)]
    return Fit(model, [replace(model, **change) for change in changes])


# The model of each method


def row_of(recipe: str) -> Row:
    """Return the method and the arguments of a recipe."""
    settings = yaml.safe_load((ROOT / "recipes" / f"{recipe}.yaml").read_text())
    return Row(settings["method"], settings.get("method_args", {}))


def test_each_method_has_a_recipe():
    for recipe in (*METHODS, POINTWISE, RATINGS_SOFT):
        assert load_method(row_of(recipe).method, row_of(recipe).arguments, 0), recipe


@pytest.mark.parametrize(
    "errors",
    [JudgeErrors(0.08, crowd=1.5, bias=0.2), JudgeErrors(0.15, crowd=2, bias=-0.3, shape="edges")],
    ids=["linear", "edges"],
)
def test_methods_are_modelled_as_they_are(errors, monkeypatch):
    """The real methods are the oracle. They ask the simulated judge about 100 groups."""
    world = World(empty=0, tokens=(10, 5, 10, 10))
    unit, bias = world.within, errors.bias / world.within
    linear, edges = (bias, 0) if errors.shape == "linear" else (0, bias)
    model = JudgeModel(errors.deviation(8) / unit, linear, edges, errors.deviation(2) / unit, linear, 1, 0, 0)
    judged = Judged(model, draw(1000))
    for recipe, method in METHODS.items():
        monkeypatch.setitem(ROWS, recipe, row_of(recipe))
        outcome = Replay(recipe, world, 25, errors)()
        rewards = method(judged)
        chance = np.std(outcome.tau) / math.sqrt(outcome.groups)
        assert judged.tau(rewards) == pytest.approx(outcome.mean_tau, abs=0.015 + 2 * chance), recipe
        assert rewards.prompts == pytest.approx(outcome.totals.calls / outcome.groups, rel=0.07), recipe
        room = 0.2 if recipe == "paper/rrc_scr" else 0.06  # the simulated judge calls some pairs a tie
        assert tied(rewards.places) == pytest.approx(outcome.tied / outcome.answered, abs=room), recipe


def test_expected_tau_multiplies_the_gains_of_all_places_of_a_query():
    sample = draw(50)
    for recipe, method in METHODS.items():
        doubled = Judged(replace(JUDGE, bias_spread=0.5), replace(sample, direction=np.full((50, 1), 2.0)))
        assert doubled.tau(method(doubled)) == expected_tau(JUDGE.at(2), recipe, sample), recipe


def test_expected_tau_changes_by_bias_and_noise_only_where_a_method_sees_them():
    for recipe, method in METHODS.items():
        before = expected_tau(JUDGE, recipe)
        pairs = method(Judged(JUDGE, draw())).pairs
        assert (expected_tau(replace(JUDGE, list_bias=3.0), recipe) == before) == pairs
        if pairs:
            assert expected_tau(replace(JUDGE, pair_bias=3.0), recipe) < before
            assert expected_tau(replace(JUDGE, list_noise=3.0), recipe) == before


def test_slot_and_gain_are_those_of_balanced_orders():
    """`slot` says where a rollout stands in each order, and `gain` what it gets there."""
    group = RolloutGroup(Query("q", [], (), ()), (), 0, 0)
    for n in (2, 3, 8):
        first, *others = balanced(range(n), 4, 0, group) if n > 2 else [(0, 1), (1, 0)]
        for look, order in enumerate(others, 1):
            assert [slot(look, first.index(i), n) for i in order] == list(range(n))
        judged = Judged(JUDGE, draw(4))
        gains = judged.gain(np.arange(n), np.array(n))
        for factor, group_gains in zip(judged.factor[:, 0], gains, strict=True):
            assert group_gains == pytest.approx([JUDGE.at(factor).gain(place, n) for place in range(n)])


def test_tau_and_tied_are_those_of_the_audit():
    rng = np.random.default_rng(0)
    places, opinion = rng.integers(0, 5, (50, G)) / 3, rng.standard_normal((50, G))
    places[0] = 1
    rounded = opinion.round()  # with ties on both sides
    rounded[0] = 0
    for truth in (opinion, rounded):
        expected = [tau_b(*row) for row in zip(places.tolist(), truth.tolist(), strict=True)]
        assert tau(places, truth).tolist() == pytest.approx(expected)
    assert tied(np.array([[0, 1, 2, 3, 4, 5, 5, 5]])) == 3 / 8


# The advice


def test_advise_has_the_most_lists_that_fit_unless_a_method_is_surely_better():
    crowded = replace(JUDGE, list_noise=2.0, pair_noise=0.2, pair_bias=0.0)
    rules = {1.5 * LIST: LISTS[0], 29 * PAIR: LISTS[1]}
    for budget, rule in rules.items():
        found = advise(fit(crowded, list_noise=0.1), LOOKS, COSTS, budget)
        assert found.rule == rule
        assert all(row.fits == (row.tokens <= budget) for row in found.rows)
    assert found.advised == "paper/rrc_scr"
    assert [row.tau for row in found.rows] == sorted((row.tau for row in found.rows), reverse=True)
    assert json.loads(json.dumps(found.as_dict(), allow_nan=False))["advised"] == "paper/rrc_scr"

    flat = replace(JUDGE, list_noise=0.3, pair_noise=1.5)
    assert advise(fit(flat, list_noise=0.1), LOOKS, COSTS, 13 * PAIR).advised == "beyond/listwise"


def test_advise_keeps_the_rule_if_the_audit_is_not_sure():
    crowded = replace(JUDGE, list_noise=1.1, list_bias=0.0, pair_noise=0.5, pair_bias=0.0)
    sure, unsure = fit(crowded, list_noise=0.01), fit(crowded, list_noise=2.0)
    assert advise(sure, LOOKS, COSTS, 29 * PAIR).advised == "paper/rrc_scr"
    found = advise(unsure, LOOKS, COSTS, 29 * PAIR)
    assert found.rows[0].recipe == "paper/rrc_scr"
    assert found.advised == found.rule == LISTS[1]
    assert f"{SURE:.0%} would be enough" in found.sentences[-1]


def test_advise_has_an_interval_that_covers_the_estimate_and_widens_with_the_draws():
    narrow, wide = (advise(fit(JUDGE, list_noise=w), LOOKS, COSTS, math.inf).rows for w in (0.05, 0.5))
    for row in narrow:
        wider = next(other for other in wide if other.recipe == row.recipe)
        assert row.low - 1e-9 <= row.tau <= row.high + 1e-9
        assert row.pairs or wider.high - wider.low > 2 * (row.high - row.low)


def test_advise_counts_prices_of_a_budget_in_price():
    list_price = (3600 * 1.0 + 30 * 5.0) * 1000 / 1e6
    found = advise(fit(JUDGE, list_noise=0.1), LOOKS, COSTS, 2.1 * list_price, in_price=True)
    row = next(row for row in found.rows if row.recipe == LISTS[0])
    assert row.price == pytest.approx(list_price)
    assert row.tokens == pytest.approx(LIST)
    assert row.hours == pytest.approx(LIST / 2000 / 3600)
    assert found.rule == LISTS[1]
    pair = next(row for row in found.rows if row.recipe == "paper/rrc_scr")
    assert pair.tokens == pytest.approx(28 * PAIR)
    with pytest.raises(SettingsError, match="judge_prompt_price"):
        advise(fit(JUDGE), LOOKS, replace(COSTS, prices=None), 10, in_price=True)


def test_advise_refuses_a_budget_of_nothing_and_says_what_would_fit():
    for budget in (0, -1, math.nan):
        with pytest.raises(SettingsError, match="budget must be above 0"):
            advise(fit(JUDGE), LOOKS, COSTS, budget)
    found = advise(fit(JUDGE, list_noise=0.1), LOOKS, COSTS, 1000)
    assert found.rule is found.advised is None
    assert found.sentences == [
        "Nothing fits the budget. The cheapest method is beyond/listwise_one, with 3,630,000 tokens, 3.75 in price."
    ]


def looks_and_labels(n: int, lists_right: float, pairs_right: float) -> tuple[list[QueryLooks], list[Label]]:
    """Return `n` queries with one labelled pair each, and verdicts that agree with the labels this often."""
    looks, labels = [], []
    for q in range(n):
        order = tuple(range(G)) if q < lists_right * n else tuple(range(G))[::-1]
        won = 7 if q < pairs_right * n else 0
        looks.append(QueryLooks(f"q{q}", [(tuple(range(G)), order)], [((0, 7), won), ((7, 0), won)]))
        labels.append((f"q{q}", 7, 0))
    return looks, labels


def test_advise_refuses_to_choose_between_lists_and_pairs_if_they_settle_on_different_opinions():
    apart = fit(replace(JUDGE, kappa=ALARM - 0.05), list_noise=0.1)
    found = advise(apart, LOOKS, COSTS, 29 * PAIR)
    assert found.alarm and found.advised is None and found.rule == LISTS[1]
    assert "and paper/rrc_scr, the best with pairs." in found.sentences[-2]
    assert found.sentences[-1] == f"{LABELS} labels or more would decide."
    assert advise(apart, LOOKS, COSTS, 9 * PAIR).advised, "only lists fit, so there is nothing to choose between"
    assert not advise(fit(replace(JUDGE, kappa=ALARM + 0.01)), LOOKS, COSTS, 29 * PAIR).alarm


def test_advise_lets_labels_decide_if_there_are_enough_and_only_on_an_alarm():
    apart = fit(replace(JUDGE, kappa=ALARM - 0.05), list_noise=0.1)
    for lists, pairs, recipe in ((0.6, 0.9, "paper/rrc_scr"), (0.9, 0.6, "beyond/listwise")):
        looks, labels = looks_and_labels(LABELS, lists, pairs)
        found = advise(apart, looks, COSTS, 29 * PAIR, labels)
        assert found.advised.startswith(recipe)
        assert "The labels agree with" in found.sentences[-1]
        assert f"{LABELS - 1} labels are about" in advise(apart, looks, COSTS, 29 * PAIR, labels[1:]).sentences[-1]
    known = fit(JUDGE, list_noise=0.1)
    assert advise(known, looks, COSTS, 29 * PAIR, labels) == advise(known, looks, COSTS, 29 * PAIR)


def test_advise_takes_pointwise_and_soft_ratings_from_the_ratings():
    rng = np.random.default_rng(0)
    sharp = replace(JUDGE, list_noise=0.01, list_bias=0.0, list_middle=0.0)
    looks = []
    for q in range(300):
        opinion = rng.standard_normal(G)
        order = tuple(np.argsort(opinion).tolist())
        rated = opinion + 0.5 * rng.standard_normal(G)
        means = [] if q else opinion.tolist()[::-1]
        looks.append(QueryLooks(f"q{q}", [(tuple(range(G)), order)], [], rated.tolist(), means))
    looks.append(replace(looks[0], scores=[None, *looks[0].scores[1:]], means=[]))
    recipes = {row.recipe for row in advise(fit(sharp, list_noise=0.1), looks, COSTS, math.inf).rows}
    assert POINTWISE in recipes and RATINGS_SOFT not in recipes, "one query is too few"
    looks = [replace(one, means=[*map(math.tanh, one.ratings)]) for one in looks]
    rows = {row.recipe: row for row in advise(fit(sharp, list_noise=0.1), looks, COSTS, math.inf).rows}
    found = rows[POINTWISE]
    assert found.tau == pytest.approx(2 / math.pi * math.asin(1 / math.hypot(1, 0.5)), abs=0.03)
    assert found.low < found.tau < found.high
    assert replace(rows[RATINGS_SOFT], recipe=POINTWISE) == found, "the same order, at the same price"
    sampled = advise(fit(sharp, list_noise=0.1), looks, replace(COSTS, samples=5), math.inf).rows
    dearer = {row.recipe: row.price - rows[row.recipe].price for row in sampled if row != rows[row.recipe]}
    assert dearer == {RATINGS_SOFT: pytest.approx(4 * 5 * COSTS.run(8, 8)[1] / 1e6)}
    assert found.tokens == pytest.approx(1000 * 8 * (3630 - 6 * 403.33 - 403.33), rel=0.01)
    assert disattenuated(np.array(0.5), np.array(1.0)) == pytest.approx(0.5)
    assert disattenuated(np.array(0.5), np.array(0.8)) > 0.5
