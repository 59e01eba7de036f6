"""Blocks of four: the design, the cuts, and the method against the rules of all methods."""

import math
from itertools import combinations, product

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from experiments.judge_cost.blocks import CLASSES, BlocksOfFour, connected, cut_into_fours, places_in_blocks
from rankbuffer_trl.errors import SettingsError
from rankbuffer_trl.rewards.beyond.looks import balanced, mean_places
from rankbuffer_trl.testing import check_method, make

SEEDS = st.integers(0, 99)
ORDERS = st.integers(1, 6).flatmap(lambda n: st.lists(st.permutations(range(n)), min_size=1, max_size=4))
SOME = st.lists(st.lists(st.integers(0, 6), min_size=1, max_size=4, unique=True), min_size=1, max_size=8)
NEVER_MET = {(0, 1), (2, 3), (4, 5), (6, 7)}


def test_classes_balance_places_and_partners():
    blocks = [block for blocks in CLASSES for block in blocks]
    for i in range(8):
        assert sorted(block.index(i) for block in blocks if i in block) == [0, 1, 2, 3], "each place once"
    for i, j in combinations(range(8), 2):
        gaps = sorted(block.index(i) - block.index(j) for block in blocks if i in block and j in block)
        assert len(gaps) == (0 if (i, j) in NEVER_MET else 2) and sum(gaps) == 0, "a linear bias cancels"


@given(st.integers(2, 20), st.sampled_from([4, 8]), SEEDS)
@example(8, 4, 0)
def test_cut_into_fours_makes_near_equal_blocks_of_at_most_four(n, looks, seed):
    ids = [3 * i for i in range(n)]
    orders = cut_into_fours(ids, looks, seed, make([5]))
    if n <= 4:
        assert orders == balanced(ids, looks, seed, make([5]))
        return
    sizes = {len(block) for block in orders}
    assert max(sizes) <= 4 and min(sizes) >= 2 and max(sizes) - min(sizes) <= 1
    assert connected(orders, ids) and len(set(orders)) == len(orders), "no prompt is asked twice"
    assert {i for block in orders for i in block} == set(ids) and len(orders) <= looks * math.ceil(n / 4)
    if n <= 8 and looks == 4:
        for look in range(4):
            assert sorted(orders[2 * look] + orders[2 * look + 1]) == ids
        met = {pair for block in orders for pair in combinations(block, 2)}
        assert len(met) == sum(math.comb(len(block), 2) for block in orders)
        assert met == {(j, i) for i, j in met}, "who meets again stands in the opposite order"
        assert n * (n - 1) // 2 - len(met) // 2 == n // 2, "at most one partner is never met"


@given(SOME)
def test_connected_means_that_any_two_are_linked_by_a_chain_of_orders(orders):
    ids = sorted({i for order in orders for i in order})
    linked = {(i, j) for order in orders for i, j in product(order, repeat=2)}
    for k, i, j in product(ids, repeat=3):  # Warshall's algorithm
        linked |= {(i, j)} if {(i, k), (k, j)} <= linked else set()
    assert connected(orders, ids) == (len(linked) == len(ids) ** 2)
    assert not connected(orders, [*ids, 9]) and connected([], [])


@given(ORDERS)
def test_places_in_blocks_are_mean_places_where_all_meet(orders):
    assert places_in_blocks(orders) == mean_places(orders)


def test_places_in_blocks_compares_two_that_never_met_by_those_that_both_met():
    assert places_in_blocks([(0, 1), (1, 2)]) == {0: 0, 1: 1, 2: 2}
    assert places_in_blocks([(0, 1), (2, 1)])[0] == places_in_blocks([(0, 1), (2, 1)])[2]


def test_blocks_of_four_keep_the_rules_of_a_method():
    check_method(BlocksOfFour(), groups=10)
    assert BlocksOfFour().most_shown(8) == 4 and BlocksOfFour().calls(make([5] * 8), first=True) == (8, 8)
    with pytest.raises(SettingsError, match="looks must be a multiple of 4, got 6"):
        BlocksOfFour(looks=6)
