"""Several passes at the same rollouts: balanced orders, mean ranks, disputed blocks, and the method that uses them."""

import json
import math
import random
from fractions import Fraction
from itertools import combinations, pairwise

import choix
import numpy as np
import pytest
from helpers.places import judge_by, mean, shown_in, slow_places, slow_rewards
from helpers.quality import EIGHT
from hypothesis import example, given
from hypothesis import strategies as st
from test_prefetch import early

from rankbuffer_trl.errors import SettingsError
from rankbuffer_trl.judge import TransportError
from rankbuffer_trl.ranking import rank_rewards, rank_tiers, rewards_from_ranks
from rankbuffer_trl.rewards.beyond._listwise import Listwise
from rankbuffer_trl.rewards.beyond._passes import (
    balanced,
    block_orders,
    disputed,
    expected_ranks,
    mean_ranks,
    pass_questions,
)
from rankbuffer_trl.testing import make, play, quality, truth

SEEDS = st.integers(0, 99)
SIZES = st.integers(1, 12)


# Balanced orders


@given(SIZES, st.integers(1, 4), SEEDS)
def test_balanced_gives_all_the_same_mean_slot_after_an_even_number_of_passes(n, pairs, seed):
    group = make([5])
    orders = balanced(range(n), 2 * pairs, seed, group)
    assert all(sorted(order) == list(range(n)) for order in orders)
    assert {mean(order.index(i) for order in orders) for i in range(n)} == {Fraction(n - 1, 2)}
    apart = [order for pair in range(pairs) for order in balanced(range(n), 2, seed, group, after=2 * pair)]
    assert orders == list(dict.fromkeys(apart)), "later passes go on where earlier ones ended, without repeats"


@given(SIZES, st.sampled_from([4, 8]), SEEDS)
def test_balanced_gives_all_the_same_mean_distance_from_the_middle_after_four_passes(n, passes, seed):
    orders = [order for start in range(0, passes, 4) for order in balanced(range(n), 4, seed, make([5]), after=start)]
    distances = {mean(abs(order.index(i) - Fraction(n - 1, 2)) for order in orders) for i in range(n)}
    if n % 2 == 0 or n == 1:
        assert len(distances) == 1
    else:  # no two pairs of slots can balance an odd number
        assert max(distances) - min(distances) <= Fraction(1, 2)


def test_orders_follow_seed_query_and_step():
    first = balanced(range(8), 8, 0, make(EIGHT))
    assert len(set(first)) == len(first) == 8
    assert first == balanced(range(8), 8, 0, make(EIGHT))
    assert first != balanced(range(8), 8, 1, make(EIGHT)) != balanced(range(8), 8, 1, make(EIGHT, step=1))
    assert first[:4] == balanced(range(8), 4, 0, make(EIGHT)) != first[4:]


# Mean ranks, rewards, disputed blocks

ORDERS = st.integers(1, 6).flatmap(lambda n: st.lists(st.permutations(range(n)), min_size=1, max_size=4))
BLOCKS = ORDERS.flatmap(lambda orders: st.lists(st.permutations(orders[0][:3]), max_size=3).map(lambda b: orders + b))


@given(ORDERS | BLOCKS)
def test_mean_places_equal_the_oracle(orders):
    ranks = mean_ranks(orders)
    assert ranks == slow_places(orders)
    assert sum(ranks.values()) == math.comb(len(ranks), 2)
    levels = sorted(set(ranks.values()))
    assert rank_tiers(ranks) == tuple(tuple(i for i in ranks if ranks[i] == level) for level in levels)


@given(ORDERS)
def test_mean_places_over_whole_orders_are_the_means_of_the_places(orders):
    assert mean_ranks(orders) == {i: mean(order.index(i) for order in orders) for i in orders[0]}


@given(ORDERS, st.integers(0, 3), st.integers(0, 3))
def test_place_rewards_are_the_formula(orders, e, missing):
    ranks, n = mean_ranks(orders), len(orders[0])
    empty = list(range(n, n + e))
    rewards = rewards_from_ranks(ranks, n + e + missing, empty)
    assert rewards[n:] == (-1.0,) * e + (None,) * missing
    for i, q in ranks.items():
        assert rewards[i] == (float(-1 + 2 * (e + q) / (n + e - 1)) if n + e > 1 else 0)
    papers = rank_rewards([(i,) for i in orders[0]], n + e, empty)
    assert rewards_from_ranks(mean_ranks(orders[:1]), n + e, empty) == pytest.approx(papers), "of one order"


@given(ORDERS)
def test_disputed_blocks_are_the_finest_cut_without_a_dispute_across_it(orders):
    def agreed(lower, upper):
        return all(order.index(i) < order.index(j) for order in orders for i in lower for j in upper)

    ranks = mean_ranks(orders)
    ordered = sorted(ranks, key=ranks.get)
    cuts = [0, *(k for k in range(1, len(ordered) + 1) if agreed(ordered[:k], ordered[k:]))]
    expected = [set(ordered[a:b]) for a, b in pairwise(cuts) if b - a > 1]
    blocks = disputed(orders)
    assert [set(block) for block in blocks] == expected
    assert all(block == tuple(i for i in orders[0] if i in block) for block in blocks)


# Listwise

WHOLE = st.builds(Listwise, st.sampled_from([1, 2, 4]), st.booleans(), SEEDS)
GROUPS = st.lists(st.none() | st.integers(0, 10), min_size=1, max_size=14)
FAILING, NOISE = st.sampled_from([0, 0.3, 0.9]), st.sampled_from([0, 2, 20])


@given(WHOLE, GROUPS, FAILING, NOISE)
@example(Listwise(seed=5), [5] * 8, 0.3, 20)
@example(Listwise(seed=10), [5] * 8, 0.3, 20)
@example(Listwise(), [7, None], 0, 0)
def test_listwise_rewards_are_those_of_the_oracle(method, qualities, failing, noise):
    group = make(qualities)
    chance = random.Random(method.seed)
    heard: list[list[str] | None] = []

    def answer(prompt: str):
        if chance.random() < failing:
            heard.append(None)
            return TransportError("connection refused")
        given = judge_by(lambda text, place: quality(text) + noise * chance.random())(prompt)
        heard.append([shown_in(prompt)[slot] for slot in json.loads(given)["order"]])
        return given

    played = play(method, group, answer)
    texts, orders = [rollout.text for rollout in group.answered], [order for order in heard if order is not None]
    if len(texts) == 1:
        orders = [texts]
    ranks = slow_places(orders) if orders else {}
    assert played.rewards == slow_rewards(group, ranks, len(texts) - 1)
    assert len(set(played.prompts)) == len(played.prompts), "no prompt comes twice"
    check_questions(method, group, played, heard)


def check_questions(method: Listwise, group, played, heard) -> None:
    least, most = method.calls(group, first=True)
    assert least <= len(played.calls) <= most
    n, shown = len(group.answered), [shown_in(prompt) for prompt in played.prompts]
    first = balanced([rollout.id for rollout in group.answered], method.passes, method.seed, group) if n >= 2 else []
    assert shown[: len(first)] == [[group.rollouts[i].text for i in order] for order in first]
    assert [call.kind for call in played.calls] == ["look"] * len(first) + ["again"] * (len(shown) - len(first))
    passes = [order for order in heard[: len(first)] if order is not None]
    blocks = [set(block) for block in disputed(passes)] if passes and method.rerank_disputed else []
    later = shown[len(first) :]
    assert all(set(texts) in blocks for texts in later)
    if n > 2 and method.passes == 2:  # another shuffle, after four passes, can repeat one of them
        assert len(later) == 2 * len(blocks), "each dispute is asked about again"


def test_listwise_asks_about_two_rollouts_in_both_orders_and_no_more():
    for passes in (2, 4):
        assert Listwise(passes).calls(make([5, 5]), first=True) == (2, 2)
        assert len(play(Listwise(passes), make([5, 5])).calls) == 2


def test_passes_are_two_by_default_and_cannot_be_what_no_order_balances():
    assert Listwise() == Listwise(2, True, 0)
    for passes in (0, -2, 3, 5):
        with pytest.raises(SettingsError, match=f"passes must be 1 or an even number, got {passes}: .* its reverse"):
            Listwise(passes=passes)


# Lists of a group that is larger than a prompt

LISTED = st.integers(2, 9).flatmap(
    lambda n: st.lists(st.lists(st.integers(0, n - 1), min_size=1, max_size=5, unique=True), min_size=1, max_size=6)
)


@given(LISTED)
def test_expected_places_are_those_of_choix(orders):
    ranks = expected_ranks(orders)
    ids = {i: k for k, i in enumerate(ranks)}
    wins = [(ids[b], ids[a]) for order in orders for k, a in enumerate(order) for b in order[k + 1 :]]
    made_up = [match for k in ids.values() for match in ((k, len(ids)), (len(ids), k))]
    strengths = choix.opt_pairwise(len(ids) + 1, wins + made_up, alpha=1e-12, method="BFGS", tol=1e-9)[:-1]
    chances = 1 / (1 + np.exp(strengths[None] - strengths[:, None]))
    assert list(ranks.values()) == pytest.approx(list(chances.sum(1) - 0.5), abs=1e-4)
    twice = expected_ranks([*orders, *(order[::-1] for order in orders)])
    assert set(twice.values()) == {(len(ids) - 1) / 2}, "what cancels is a tie"


@given(st.integers(3, 30), st.integers(2, 9), SEEDS, st.sets(st.integers(0, 29)))
def test_block_orders_balance_two_passes_and_are_planned_before_the_texts(n, block, seed, empty):
    whole, group = (make([None if i in gone else 5 for i in range(n)]) for gone in ((), empty))
    planned, found = (block_orders(each, 2, block, seed) for each in (whole, group))
    left = [tuple(i for i in order if i not in empty) for order in planned]
    assert found == [each for each in dict.fromkeys(left) if len(each) > 1]
    assert max(map(len, planned)) <= block
    if n // math.ceil(n / block) > 1:  # no block is of one rollout
        assert max(map(len, planned)) - min(map(len, planned)) <= 1
        assert all(sum(i in order for order in planned) == 2 for i in range(n))
    for i, j in combinations(range(n), 2):
        assert sum(order.index(i) < order.index(j) for order in planned if {i, j} <= set(order)) < 2, "opposed"


def test_listwise_in_blocks_asks_a_block_early_and_loses_one_list_with_it():
    group, method = make([9, 3, 7, 1, 8, 2, 6, 4]), Listwise(rerank_disputed=False, block=4)
    lists = block_orders(group, 2, 4, 0)

    def rewards(lost: set[int]) -> list[float | None]:
        asked = iter(range(4))
        return play(method, group, lambda prompt: TransportError("") if next(asked) in lost else truth(prompt)).rewards

    for shown in lists:
        assert early(method, group, shown[1:]) == []
        assert early(method, group, shown) == pass_questions(group, [shown], "look")
    for lost in (set(), {0}, {0, 1}, {2, 3}, {0, 2}):
        heard = {i for k, shown in enumerate(lists) for i in shown if k not in lost}
        found = rewards(lost)
        assert [reward is not None for reward in found] == [i in heard for i in range(8)]
        assert lost or found[0] == max(found), "the best wins in all of its lists"
    assert play(method, make([5, None, None, None, None])).rewards == (1, -1, -1, -1, -1), "nothing to ask"
    few = make([5, None, 7, 9])
    assert play(method, few).rewards == play(Listwise(rerank_disputed=False), few).rewards, "one list is enough"
    for wrong in (dict(block=4), dict(block=4, passes=1, rerank_disputed=False), dict(block=1, rerank_disputed=False)):
        with pytest.raises(SettingsError, match="block"):
            Listwise(**wrong)
