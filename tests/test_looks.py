"""Several looks at the same rollouts: balanced orders, mean places, disputed blocks, and the methods that use them."""

import json
import math
import random
import re
from dataclasses import replace
from fractions import Fraction
from itertools import combinations, pairwise, permutations, product
from statistics import fmean

import pytest
from helpers.quality import EIGHT, QUALITIES, make, play
from helpers.truth import quality, truth, unguarded
from hypothesis import example, given, settings
from hypothesis import strategies as st

from rankbuffer_trl.errors import SettingsError
from rankbuffer_trl.groups import Rollout
from rankbuffer_trl.judge import TransportError
from rankbuffer_trl.ranking import rank_rewards
from rankbuffer_trl.rewards.listwise import Listwise
from rankbuffer_trl.rewards.looks import (
    CLASSES,
    balanced,
    connected,
    cut_into_fours,
    disputed,
    mean_places,
    place_rewards,
    place_tiers,
)
from rankbuffer_trl.rewards.rankbuffer import RankBuffer
from rankbuffer_trl.rewards.rankbuffer_looks import RankBufferLooks

SEEDS = st.integers(0, 99)
SIZES = st.integers(1, 12)


def mean(values) -> Fraction:
    values = list(values)
    return Fraction(sum(values)) / len(values)


# Balanced orders


@given(SIZES, st.sampled_from([2, 4, 6, 8]), SEEDS)
def test_after_an_even_number_of_looks_all_have_the_same_mean_slot(n, looks, seed):
    orders = balanced(range(n), looks, seed, make([5]))
    assert all(sorted(order) == list(range(n)) for order in orders)
    assert {mean(order.index(i) for order in orders) for i in range(n)} == {Fraction(n - 1, 2)}


@given(SIZES, st.sampled_from([4, 8]), SEEDS)
def test_after_four_looks_all_have_the_same_mean_distance_from_the_middle(n, looks, seed):
    orders = [order for start in range(0, looks, 4) for order in balanced(range(n), 4, seed, make([5]), after=start)]
    distances = {mean(abs(order.index(i) - Fraction(n - 1, 2)) for order in orders) for i in range(n)}
    if n % 2 == 0 or n == 1:
        assert len(distances) == 1
    else:  # no two pairs of slots can balance an odd number
        assert max(distances) - min(distances) <= Fraction(1, 2)


def test_after_two_looks_the_middle_is_not_balanced_yet():
    orders = balanced(range(8), 2, 0, make([5]))
    assert len({mean(abs(order.index(i) - Fraction(7, 2)) for order in orders) for i in range(8)}) == 4


@given(SIZES, st.integers(1, 4), SEEDS)
def test_later_looks_go_on_where_earlier_ones_ended(n, pairs, seed):
    group = make([5])
    together = balanced(range(n), 2 * pairs, seed, group)
    apart = [order for pair in range(pairs) for order in balanced(range(n), 2, seed, group, after=2 * pair)]
    assert together == list(dict.fromkeys(apart))
    assert len(together) <= min(2 * pairs, math.factorial(n))


def test_orders_follow_seed_query_and_step_and_are_distinct():
    first = balanced(range(8), 8, 0, make(EIGHT))
    assert len(set(first)) == 8
    assert first == balanced(range(8), 8, 0, make(EIGHT))
    assert first != balanced(range(8), 8, 1, make(EIGHT)) != balanced(range(8), 8, 1, make(EIGHT, step=1))
    assert len(balanced([3, 5], 6, 0, make(EIGHT))) == 2
    assert balanced([3], 2, 0, make(EIGHT)) == [(3,)]


# Blocks of four

NEVER_MET = {(0, 1), (2, 3), (4, 5), (6, 7)}


def test_the_classes_balance_places_and_partners():
    blocks = [block for blocks in CLASSES for block in blocks]
    for i in range(8):
        assert sorted(block.index(i) for block in blocks if i in block) == [0, 1, 2, 3], "each place once"
    for i, j in combinations(range(8), 2):
        gaps = sorted(block.index(i) - block.index(j) for block in blocks if i in block and j in block)
        assert len(gaps) == (0 if (i, j) in NEVER_MET else 2) and sum(gaps) == 0, "a linear bias cancels"


@given(st.integers(2, 20), st.sampled_from([4, 8]), SEEDS)
def test_each_look_cuts_a_group_into_near_equal_blocks_of_at_most_four(n, looks, seed):
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


def test_blocks_follow_seed_query_and_step():
    first = cut_into_fours(range(8), 8, 0, make(EIGHT))
    assert first == cut_into_fours(range(8), 8, 0, make(EIGHT))
    assert first != cut_into_fours(range(8), 8, 1, make(EIGHT)) != cut_into_fours(range(8), 8, 1, make(EIGHT, step=1))
    assert first[:8] == cut_into_fours(range(8), 4, 0, make(EIGHT)) != first[8:]


# Mean places, rewards, disputed blocks

ORDERS = st.integers(1, 6).flatmap(lambda n: st.lists(st.permutations(range(n)), min_size=1, max_size=4))


@given(ORDERS)
def test_the_mean_place_over_whole_orders_is_the_mean_of_the_places(orders):
    places = mean_places(orders)
    assert places == {i: mean(order.index(i) for order in orders) for i in orders[0]}


@given(ORDERS, st.data())
def test_a_mean_place_counts_only_orders_that_hold_both(orders, data):
    ids = st.lists(st.sampled_from(range(len(orders[0]))), unique=True)
    orders = orders + data.draw(st.lists(ids, max_size=3))
    expected = {}
    for i in orders[0]:
        shares = [
            mean(order.index(i) > order.index(j) for order in orders if i in order and j in order)
            for j in orders[0]
            if j != i
        ]
        expected[i] = sum(shares, Fraction())
    assert mean_places(orders) == expected


def slow_places(orders) -> dict[object, Fraction]:
    """The mean places of candidates of which not all meet, pair by pair."""
    everyone = {i for order in orders for i in order}

    def share(i, j) -> Fraction | None:
        both = [order for order in orders if i in order and j in order]
        return mean(order.index(i) > order.index(j) for order in both) if both else None

    def place(i) -> Fraction:
        total = Fraction()
        for j in everyone - {i}:
            if share(i, j) is not None:
                total += share(i, j)
            else:
                common = [k for k in everyone - {i, j} if share(i, k) is not None and share(j, k) is not None]
                own, other = (sum((share(x, k) for k in common), Fraction()) for x in (i, j))
                total += Fraction(1, 2) if own == other else own > other
        return total

    return {i: place(i) for i in everyone}


SOME = st.lists(st.lists(st.integers(0, 6), min_size=1, max_size=4, unique=True), min_size=1, max_size=8)


@given(SOME)
@example([[0, 1], [1, 2]])
@example([[0, 1], [2, 3]])
def test_two_who_never_met_are_compared_by_the_partners_that_both_met(orders):
    places = mean_places(orders)
    assert places == slow_places(orders)
    assert sum(places.values()) == math.comb(len(places), 2)


@given(SOME)
def test_orders_are_connected_if_any_two_candidates_are_linked_by_a_chain_of_orders(orders):
    ids = sorted({i for order in orders for i in order})
    linked = {(i, j) for order in orders for i, j in product(order, repeat=2)}
    for k, i, j in product(ids, repeat=3):  # Warshall's algorithm
        linked |= {(i, j)} if {(i, k), (k, j)} <= linked else set()
    assert connected(orders, ids) == (len(linked) == len(ids) ** 2)
    assert not connected(orders, [*ids, 9]) and connected([], [])


@given(ORDERS, st.integers(0, 3), st.integers(0, 3))
def test_rewards_from_mean_places_are_the_formula(orders, e, missing):
    places, n = mean_places(orders), len(orders[0])
    empty = list(range(n, n + e))
    rewards = place_rewards(places, n + e + missing, empty)
    assert len(rewards) == n + e + missing
    assert rewards[n:] == (-1.0,) * e + (None,) * missing
    for i, q in places.items():
        assert rewards[i] == (float(-1 + 2 * (e + q) / (n + e - 1)) if n + e > 1 else 0)
    assert place_tiers(places) == tuple(
        tuple(i for i in places if places[i] == level) for level in sorted(set(places.values()))
    )


@given(st.permutations(range(5)), st.integers(0, 2))
def test_rewards_of_one_order_are_the_papers(order, e):
    empty = list(range(5, 5 + e))
    papers = rank_rewards([(i,) for i in order], 5 + e, empty)
    assert place_rewards(mean_places([order]), 5 + e, empty) == pytest.approx(papers)


@given(ORDERS)
def test_disputed_blocks_are_the_finest_cut_without_a_dispute_across_it(orders):
    def agreed(lower, upper):
        return all(order.index(i) < order.index(j) for order in orders for i in lower for j in upper)

    places = mean_places(orders)
    ordered = sorted(places, key=places.get)
    cuts = [0, *(k for k in range(1, len(ordered) + 1) if agreed(ordered[:k], ordered[k:]))]
    expected = [set(ordered[a:b]) for a, b in pairwise(cuts) if b - a > 1]
    blocks = disputed(orders)
    assert [set(block) for block in blocks] == expected
    assert all(block == tuple(i for i in orders[0] if i in block) for block in blocks)


# The method


def shown_in(prompt: str) -> list[str]:
    """The texts of a ranking prompt in the order in which they are shown. Labels are places."""
    shown = re.findall(r"^\[R(\d+)\]\n(.+)$", unguarded(prompt), re.MULTILINE)
    assert [int(label) for label, _ in shown] == list(range(len(shown)))
    return [text for _, text in shown]


def judge_by(value):
    """A judge that sorts what it is shown by `value(text, place)`, place 0 for the first shown and 1 for the last."""

    def answer(prompt: str) -> str:
        texts = shown_in(prompt)
        values = [value(text, slot / max(len(texts) - 1, 1)) for slot, text in enumerate(texts)]
        return json.dumps({"order": sorted(range(len(texts)), key=values.__getitem__)})

    return answer


DISTINCT = st.lists(st.integers(0, 10), min_size=1, max_size=9, unique=True)


@given(DISTINCT, st.floats(-200, 200), SEEDS)
def test_no_linear_place_bias_turns_a_pair_in_both_of_two_looks(qualities, bias, seed):
    orders = []
    for shown in balanced(range(len(qualities)), 2, seed, make(qualities)):
        values = {i: qualities[i] - bias * slot for slot, i in enumerate(shown)}
        orders.append(sorted(shown, key=values.get))
    for worse, better in permutations(range(len(qualities)), 2):
        if qualities[worse] < qualities[better]:
            places = mean_places([[i for i in order if i in (worse, better)] for order in orders])
            assert places[worse] <= places[better]


@settings(max_examples=60)
@given(st.permutations(range(8)), st.floats(-1.99, 1.99), st.sampled_from([2, 4]), st.booleans(), SEEDS)
def test_a_linear_place_bias_below_two_distances_turns_no_order(qualities, bias, looks, again, seed):
    """It can tie neighbours. A stronger bias can turn mean places, although it turns no pair in both looks."""
    biased = judge_by(lambda text, place: quality(text) - bias * place)
    rewards = play(Listwise(looks, again, seed), make(qualities), biased).rewards
    for worse, better in permutations(range(8), 2):
        if qualities[worse] < qualities[better]:
            assert rewards[worse] <= rewards[better]


@pytest.mark.parametrize("bias", [-1.9, 1.9])
def test_two_looks_repair_the_pairs_that_a_place_bias_turns_in_one(bias):
    biased = judge_by(lambda text, place: quality(text) - bias * place)
    pairs = [(a, b) for a, b in permutations(range(8), 2) if EIGHT[a] < EIGHT[b]]
    turned = dict.fromkeys((1, 2), 0)
    for looks, seed in product(turned, range(20)):
        rewards = play(Listwise(looks, again=False, seed=seed), make(EIGHT), biased).rewards
        turned[looks] += sum(rewards[worse] > rewards[better] for worse, better in pairs)
    assert turned[1] > 10 and turned[2] == 0


@settings(max_examples=60)
@given(DISTINCT, SEEDS, st.sampled_from([2, 4]), st.booleans())
def test_a_judge_that_copies_the_given_order_gives_equal_rewards(qualities, seed, looks, again):
    played = play(Listwise(looks, again, seed), make(qualities), judge_by(lambda text, place: place))
    assert len(set(played.rewards)) == 1


def slow_rewards(prompts, answers, group) -> list[Fraction | None]:
    """The rewards of a group from all that was asked and answered, counted pair by pair."""
    rankings = []
    for prompt, answer in zip(prompts, answers, strict=True):
        if answer is not None:
            shown = shown_in(prompt)
            rankings.append([shown[slot] for slot in json.loads(answer)["order"]])
    n, e = len(group.answered), len(group.empty)
    rewards: list[Fraction | None] = []
    for rollout in group.rollouts:
        if not rollout.text:
            rewards.append(Fraction(-1))
        elif n == 1:
            rewards.append(Fraction(bool(e)))
        elif not rankings:
            rewards.append(None)
        else:
            q = Fraction()
            for other in group.answered:
                if other != rollout:
                    both = [r for r in rankings if rollout.text in r and other.text in r]
                    q += mean(r.index(rollout.text) > r.index(other.text) for r in both)
            rewards.append(-1 + 2 * (e + q) / (n + e - 1))
    return rewards


@settings(max_examples=200)
@given(
    QUALITIES,
    st.sampled_from([1, 2, 4]),
    st.booleans(),
    SEEDS,
    st.sampled_from([0, 0.3, 1]),
    st.sampled_from([0, 2, 20]),
)
@example([7], 2, True, 0, 0, 0)
@example([7, None], 2, True, 0, 0, 0)
@example([4, 4], 2, True, 0, 0, 0)
@example([5] * 8, 4, True, 0, 0, 0)
def test_the_rewards_are_those_of_the_oracle(qualities, looks, again, seed, failing, noise):
    chance = random.Random(seed)
    answers: list[str | None] = []

    def answer(prompt: str):
        if chance.random() < failing:
            answers.append(None)
            return TransportError("connection refused")
        answers.append(judge_by(lambda text, place: quality(text) + noise * chance.random())(prompt))
        return answers[-1]

    group, method = make(qualities), Listwise(looks, again, seed)
    played = play(method, group, answer)
    expected = slow_rewards(played.prompts, answers, group)
    assert played.rewards == tuple(None if r is None else float(r) for r in expected)
    least, most = method.calls(group, first=True)
    assert least <= len(played.calls) <= most
    n = len(group.answered)
    asked = len(balanced(range(n), looks, seed, group)) if n >= 2 else 0
    assert [call.kind for call in played.calls[:asked]] == ["look"] * asked
    later = [shown_in(prompt) for prompt in played.prompts[asked:]]
    assert {call.kind for call in played.calls[asked:]} <= {"again"}
    assert len(set(played.prompts)) == len(played.prompts), "no prompt comes twice"
    heard = [
        [shown_in(prompt)[slot] for slot in json.loads(answer)["order"]]
        for prompt, answer in zip(played.prompts[:asked], answers[:asked], strict=True)
        if answer is not None
    ]
    blocks = [set(block) for block in disputed(heard)] if heard and again else []
    assert all(set(shown) in blocks for shown in later)
    if n > 2 and looks == 2:  # another shuffle, after four looks, can repeat one of them
        assert len(later) == 2 * len(blocks), "each dispute is asked about again"


@settings(max_examples=50)
@given(QUALITIES, st.randoms(use_true_random=False), st.sampled_from([1, 2, 4]), SEEDS)
def test_renaming_the_rollouts_changes_only_their_names(qualities, chance, looks, seed):
    names = list(range(len(qualities)))
    chance.shuffle(names)
    distinct = [q if q is None else 20 * q + i for i, q in enumerate(qualities)]
    renamed = [distinct[i] for i in names]
    before, after = (play(Listwise(looks, True, seed), make(values)).rewards for values in (distinct, renamed))
    assert after == tuple(before[i] for i in names)


def test_the_same_group_has_the_same_prompts_and_rewards():
    first, second = play(Listwise(), make(EIGHT)), play(Listwise(), make(EIGHT))
    assert (first.prompts, first.score) == (second.prompts, second.score)
    assert first.prompts != play(Listwise(seed=1), make(EIGHT)).prompts


def test_a_look_that_failed_is_left_out_and_nothing_is_disputed_then():
    calls = []

    def answer(prompt):
        calls.append(prompt)
        return TransportError("refused") if len(calls) == 1 else truth(prompt)

    played = play(Listwise(), make([5, 5, 1, 9]), answer)
    assert [call.outcome for call in played.calls] == ["unreachable", "parsed"]
    assert sorted(played.rewards) == pytest.approx([-1, -1 / 3, 1 / 3, 1])


def test_equal_texts_have_equal_rewards():
    same = make([5, 1, 9, 5])
    group = type(same)(same.query, tuple(type(r)(r.id, r.text.partition(".")[0]) for r in same.rollouts), 0, 0)
    rewards = play(Listwise(), group).rewards
    assert rewards == pytest.approx((0, -1, 1, 0))


def test_two_rollouts_are_asked_about_in_both_orders_and_no_more():
    for looks in (2, 4):
        assert Listwise(looks).calls(make([5, 5]), first=True) == (2, 2)
        assert len(play(Listwise(looks), make([5, 5])).calls) == 2


def test_only_the_disputed_block_is_asked_about_again():
    played = play(Listwise(), make([5, 0, 5, 9, 9, 3]))
    assert [call.kind for call in played.calls] == ["look"] * 2 + ["again"] * 4
    blocks = [sorted(shown_in(prompt)) for prompt in played.prompts[2:]]
    assert sorted(blocks) == [["5.r0", "5.r2"]] * 2 + [["9.r3", "9.r4"]] * 2


@pytest.mark.parametrize("method", [Listwise, RankBufferLooks])
@pytest.mark.parametrize("looks", [0, -2, 3, 5])
def test_an_odd_number_of_looks_is_refused(method, looks):
    with pytest.raises(SettingsError, match=f"looks must be 1 or an even number, got {looks}: .* its reverse"):
        method(looks=looks)


def test_more_looks_are_closer_to_the_truth():
    """Noise as large as the distances: the mean over groups of the share of pairs in the true order rises."""
    chance = random.Random(0)
    shares = {}
    for looks in (1, 2, 4):
        right = []
        for step in range(40):
            noisy = judge_by(lambda text, place: quality(text) + chance.gauss(0, 4))
            rewards = play(Listwise(looks, again=False), make(EIGHT, step=step), noisy).rewards
            right += [rewards[a] < rewards[b] for a, b in permutations(range(8), 2) if EIGHT[a] < EIGHT[b]]
        shares[looks] = fmean(right)
    assert shares[1] + 0.03 < shares[2] < shares[4] - 0.02


# The method in blocks of four


def fours(looks: int = 4, seed: int = 0) -> Listwise:
    return Listwise(looks, seed=seed, blocks_of_four=True)


@settings(max_examples=200)
@given(
    st.lists(st.none() | st.integers(0, 10), min_size=1, max_size=14),
    st.sampled_from([4, 8]),
    SEEDS,
    st.sampled_from([0, 0.3, 0.9]),
    st.sampled_from([0, 20]),
)
@example([7, None], 4, 0, 0, 0)
@example([5] * 8, 4, 0, 0, 0)
def test_the_rewards_in_blocks_are_those_of_the_oracle(qualities, looks, seed, failing, noise):
    chance = random.Random(seed)
    heard: list[list[str]] = []

    def answer(prompt: str):
        if chance.random() < failing:
            return TransportError("connection refused")
        given = judge_by(lambda text, place: quality(text) + noise * chance.random())(prompt)
        heard.append([shown_in(prompt)[slot] for slot in json.loads(given)["order"]])
        return given

    group, method = make(qualities), fours(looks, seed)
    played = play(method, group, answer)
    texts, e = [rollout.text for rollout in group.answered], len(group.empty)
    assert method.calls(group, first=True) == (len(played.calls),) * 2
    assert {call.kind for call in played.calls} <= {"look"} and len(set(played.prompts)) == len(played.prompts)
    assert all(2 <= len(shown_in(prompt)) <= method.most_shown(len(qualities)) for prompt in played.prompts)
    if len(texts) == 1:
        heard = [texts]
    places = slow_places(heard) if connected(heard, texts) else {}
    highest = max(len(texts) + e - 1, 1)
    rewards = {text: float(-1 + 2 * (e + q) / highest) if len(texts) + e > 1 else 0 for text, q in places.items()}
    expected = [rewards.get(rollout.text) if rollout.text else -1 for rollout in group.rollouts]
    assert list(played.rewards) == expected


@given(st.permutations(range(8)), st.integers(2, 8), SEEDS)
def test_without_errors_only_neighbours_who_never_met_can_tie(qualities, n, seed):
    group = make(qualities[:n])
    shown = cut_into_fours(range(n), 4, seed, group)
    rewards = play(fours(seed=seed), group).rewards
    rising = sorted(range(n), key=lambda i: qualities[i])
    for worse, better in pairwise(rising):
        met = any(worse in block and better in block for block in shown)
        assert rewards[worse] < rewards[better] if met else rewards[worse] == rewards[better]


@given(st.permutations(range(8)), st.floats(-200, 200), SEEDS)
def test_no_linear_place_bias_turns_a_pair_in_both_of_its_blocks(qualities, bias, seed):
    orders = []
    for shown in cut_into_fours(range(8), 4, seed, make(qualities)):
        values = {i: qualities[i] - bias * slot for slot, i in enumerate(shown)}
        orders.append(sorted(shown, key=values.get))
    for worse, better in permutations(range(8), 2):
        if qualities[worse] < qualities[better]:
            right = [order.index(worse) < order.index(better) for order in orders if {worse, better} <= set(order)]
            assert not right or any(right)


@given(st.lists(st.integers(0, 10), min_size=1, max_size=8), SEEDS)
def test_a_judge_that_copies_the_given_order_gives_equal_rewards_in_blocks(qualities, seed):
    assert len(set(play(fours(seed=seed), make(qualities), judge_by(lambda text, place: place)).rewards)) == 1


@settings(max_examples=50)
@given(QUALITIES, st.randoms(use_true_random=False), SEEDS)
def test_renaming_the_rollouts_in_blocks_moves_nobody_by_more_than_a_tie(qualities, chance, seed):
    """The blocks follow the ids, so that other neighbours may never meet. An order without ties stays as it is."""
    names = list(range(len(qualities)))
    chance.shuffle(names)
    distinct = [q if q is None else 20 * q + i for i, q in enumerate(qualities)]
    before, after = (play(fours(seed=seed), make(v)).rewards for v in (distinct, [distinct[i] for i in names]))
    step = 2 / max(len(qualities) - 1, 1)
    assert all(abs(after[k] - before[i]) <= step + 1e-9 for k, i in enumerate(names))


@pytest.mark.parametrize("qualities", [[], [None], [3], [3, 8], [3, None, 8, 5], [5, 0, 9, 2]])
@pytest.mark.parametrize("looks", [4, 8])
def test_up_to_four_rollouts_are_one_block(qualities, looks):
    whole, cut = (play(method, make(qualities)) for method in (Listwise(looks, again=False), fours(looks)))
    assert (whole.prompts, whole.score) == (cut.prompts, cut.score)


def test_nobody_is_scored_if_the_blocks_left_do_not_tell():
    asked = []

    def only(*left):
        asked.clear()

        def answer(prompt):
            asked.append(prompt)
            return truth(prompt) if len(asked) - 1 in left else TransportError("refused")

        return play(fours(), make([*EIGHT, None]), answer)

    one_class = only(0, 1)
    assert one_class.rewards == (None,) * 8 + (-1,) and one_class.score.order == ()
    assert only().rewards == one_class.rewards and len(asked) == 8
    assert None not in only(0, 1, 2).rewards


@pytest.mark.parametrize("looks", [1, 2, 6])
def test_looks_that_four_classes_do_not_balance_are_refused(looks):
    with pytest.raises(SettingsError, match=f"looks must be a multiple of 4, got {looks}: only four looks together"):
        fours(looks)


# Fine looks of RankBuffer


@settings(max_examples=60)
@given(QUALITIES, st.sampled_from([1, 2, 4]), SEEDS, st.booleans(), st.booleans())
def test_without_errors_it_is_the_papers_method(qualities, looks, seed, fine, bootstrap):
    """A text with a higher number of the same quality is better, so that no two are equal."""
    group = make([q if q is None else 10 * q + i for i, q in enumerate(qualities)])
    group = replace(group, query=replace(group.query, responses=tuple(f"{10 * q + 9}.ref" for q in (1, 3, 5, 8))))
    papers = play(RankBuffer(fine=fine, bootstrap=bootstrap), group).score
    ours = play(RankBufferLooks(fine=fine, bootstrap=bootstrap, looks=looks, seed=seed), group).score
    assert ours.rewards == pytest.approx(papers.rewards)
    assert replace(ours, rewards=()) == replace(papers, rewards=())


@settings(max_examples=150)
@given(QUALITIES, st.sampled_from([1, 2, 4]), SEEDS, st.sampled_from([0, 0.3, 1]))
@example([6] * 9, 4, 0, 0)
def test_fine_looks_give_the_rewards_and_the_buffer_of_the_oracle(qualities, looks, seed, failing):
    chance = random.Random(seed)
    lists: list[tuple[list[str], list[str] | None]] = []  # what each fine question showed, and the order it got

    def answer(prompt: str):
        if '{"order": ' not in prompt:
            return TransportError("refused") if chance.random() < failing / 3 else truth(prompt)
        shown = shown_in(prompt)
        order = None if chance.random() < failing else chance.sample(range(len(shown)), len(shown))
        lists.append((shown, order and [shown[slot] for slot in order]))
        return TransportError("refused") if order is None else json.dumps({"order": order})

    group, method = make(qualities), RankBufferLooks(looks=looks, seed=seed, refine_at=2)
    played = play(method, group, answer)
    score = played.score
    least, most = method.calls(group, first=True)
    assert least <= len(played.calls) <= most

    texts = {rollout.id: rollout.text for rollout in group.rollouts}
    n, e, below = len(score.positions), len(group.empty), 0
    expected: list[float | None] = [None if rollout.text else -1.0 for rollout in group.rollouts]
    sigma: list[list[Rollout]] = []
    unordered = set()
    for p in range(len(score.before) + 1):
        ids = [i for i, position in score.positions.items() if position == p]
        asked = [(shown, order) for shown, order in lists if set(shown) == {texts[i] for i in ids}]
        assert len(asked) == (len(balanced(ids, looks, seed, group)) if len(ids) > 1 else 0)
        orders = [order for _, order in asked if order is not None]
        if len(ids) > 1 and not orders:
            unordered.add(p)
        within = {i: mean(o.index(texts[i]) for o in orders) if orders else Fraction(len(ids) - 1, 2) for i in ids}
        for i in ids:
            expected[i] = float(-1 + 2 * (e + below + within[i]) / (n + e - 1)) if n + e > 1 else 0.0
        first = orders[0] if orders else [texts[i] for i in ids]
        ids.sort(key=lambda i: (within[i], first.index(texts[i])))
        sigma.append([group.rollouts[i] for i in ids])
        below += len(ids)
    assert score.rewards == tuple(expected)
    assert score.fine_ranked == any(len(rollouts) > 1 for rollouts in sigma)
    after = score.before.update(sigma, 0, 0, refine_at=2, unordered=unordered) if n else score.before
    assert score.after == after.visited()
    levels = [sorted({expected[i] for i in tier}) for tier in score.order]
    assert levels == sorted(levels) and all(len(level) == 1 for level in levels)
    assert sorted(i for tier in score.order for i in tier) == sorted(score.positions)


def test_an_interval_is_tied_by_a_judge_that_copies_the_order_shown():
    copies = judge_by(lambda text, place: place)

    def answer(prompt):
        return copies(prompt) if '{"order": ' in prompt else truth(prompt)

    played = play(RankBufferLooks(), make([8, 9, 10, 0]), answer)
    assert played.rewards == pytest.approx([1 / 3] * 3 + [-1])
    assert played.score.order == ((3,), (0, 1, 2))
