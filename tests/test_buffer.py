"""Algorithm 2 against a slow oracle, its invariants, the rules of the paper by hand, and the paper's first subsets."""

from copy import deepcopy
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rankbuffer_trl.buffer import Anchor, AnchorBuffer, bootstrap_buffer, initial_buffer, select_k0
from rankbuffer_trl.groups import Rollout

HALF = Fraction(1, 2)


# The oracle: the paper's pseudocode on dictionaries that count from one. A state is a dictionary of plain values.


def as_state(buffer):
    anchors = [(a.id, a.text, a.source, a.epoch, a.h) for a in buffer.anchors]
    epochs = {name: getattr(buffer, f"{name}_epoch") for name in ("left", "right", "observed")}
    return {"anchors": anchors, "visits": buffer.visits} | epochs


def slow_update(state, sigma, e, step, H, refine_at, unordered):
    K = len(state["anchors"])
    a = {k: state["anchors"][k - 1] for k in range(1, K + 1)}
    rows = {p: [(f"{step}-{r.id}", r.text) for r in sigma[p]] for p in range(0, K + 1)}
    h = {k: a[k][4] for k in a}
    P = set()
    new_state = dict(state)

    if state["observed"] is None or state["observed"] != e:
        for k in h:
            if k == 1 or k == K:
                continue
            h[k] = 0 if len(rows[k - 1]) + len(rows[k]) > 0 else h[k] + 1
            if h[k] >= H:
                P.add(k)
        new_state["observed"] = e

    M = {Fraction(k): (*a[k][:4], h[k]) for k in a if k not in P}
    if rows[0] and state["left"] != e and 0 not in unordered:
        M[HALF] = (*rows[0][0], "left", e, 0)
        new_state["left"] = e
    if rows[K] and state["right"] != e and K not in unordered:
        M[K + HALF] = (*rows[K][len(rows[K]) - 1], "right", e, 0)
        new_state["right"] = e
    for p in rows:
        size = len(rows[p])
        if p not in (0, K) and size >= refine_at and p not in unordered:
            one_based = dict(enumerate(rows[p], start=1))
            j = size // 2 if size % 2 == 0 else size // 2 + 1
            M[p + HALF] = (*one_based[j], "refine", e, 0)
    new_state["anchors"] = [M[coordinate] for coordinate in sorted(M)]
    return new_state


EPOCHS = st.integers(0, 4)
MARKERS = st.none() | EPOCHS


@st.composite
def buffers(draw):
    hs = draw(st.lists(st.integers(0, 4), min_size=2, max_size=8))
    anchors = tuple(Anchor(f"initial-{i}", f"anchor {i}", "initial", draw(EPOCHS), h) for i, h in enumerate(hs))
    return AnchorBuffer(anchors, draw(MARKERS), draw(MARKERS), draw(MARKERS), draw(st.integers(0, 9)))


@st.composite
def intervals(draw, K):
    """`K + 1` intervals with up to 16 rollouts in few of them, so that many are empty and some are full."""
    used = draw(st.lists(st.integers(0, K), min_size=1, max_size=4))
    places = draw(st.lists(st.sampled_from(used), max_size=16))
    ids = draw(st.permutations(range(len(places))))
    sigma = [[] for _ in range(K + 1)]
    for i, p in zip(ids, places, strict=True):
        sigma[p].append(Rollout(i, f"rollout {i}"))
    return sigma


@given(buffers(), EPOCHS, st.integers(0, 999), st.integers(1, 4), st.integers(1, 5), st.data())
def test_update_equals_the_oracle_and_keeps_its_invariants(buffer, epoch, step, H, refine_at, data):
    K = len(buffer)
    sigma, unordered = data.draw(intervals(K)), data.draw(st.frozensets(st.integers(0, K), max_size=3))
    kept = deepcopy((buffer, sigma))
    updated = buffer.update(sigma, epoch, step, H, refine_at, unordered)
    assert (buffer, sigma) == kept, "the old buffer and the intervals stay as they were"
    assert as_state(updated) == slow_update(as_state(buffer), sigma, epoch, step, H, refine_at, unordered)

    old_ids, ids = ([anchor.id for anchor in each.anchors] for each in (buffer, updated))
    assert [i for i in ids if i in old_ids] == [i for i in old_ids if i in ids], "old anchors keep their order"
    assert {old_ids[0], old_ids[-1]} <= set(ids), "the ends are never pruned"
    assert len(set(ids)) == len(ids)


@given(buffers(), st.lists(st.tuples(st.sampled_from([0, 0, 1, 2]), st.booleans()), max_size=10), st.data())
def test_update_over_epochs_equals_the_oracle_and_expands_once_per_epoch(buffer, visits, data):
    buffer = AnchorBuffer(buffer.anchors)
    H, refine_at = data.draw(st.integers(1, 3)), data.draw(st.integers(2, 4))
    state, epoch, expanded = as_state(buffer), 0, []
    for step, (advance, with_failures) in enumerate(visits):
        epoch += advance
        K = len(buffer)
        sigma = data.draw(intervals(K))
        unordered = data.draw(st.frozensets(st.integers(0, K), max_size=2)) if with_failures else ()
        before = {anchor.id for anchor in buffer.anchors}
        buffer = buffer.update(sigma, epoch, step, H, refine_at, unordered)
        state = slow_update(state, sigma, epoch, step, H, refine_at, unordered)
        assert as_state(buffer) == state
        expanded += [(a.source, epoch) for a in buffer.anchors if a.id not in before and a.source in ("left", "right")]
        assert len(set(expanded)) == len(expanded), "one left and one right addition per epoch"


# Rules of the paper, worked by hand with its H and its size of a crowded interval.


def make(names, hs=None, **marks):
    hs = hs or [0] * len(names)
    return AnchorBuffer(tuple(Anchor(n, n, "initial", 0, h) for n, h in zip(names, hs, strict=True)), **marks)


def group(K, places=None):
    """`group(2, {1: "abc"})`: of 2 anchors' 3 intervals, number 1 holds a, b, c; ids follow the alphabet."""
    sigma = [()] * (K + 1)
    for p, texts in (places or {}).items():
        sigma[p] = tuple(Rollout(ord(text) - ord("a"), text) for text in texts)
    return sigma


def texts(buffer):
    return " ".join(anchor.text for anchor in buffer.anchors)


def inactivity(buffer):
    return [anchor.h for anchor in buffer.anchors]


def test_update_adds_the_lower_median_of_three_or_more():
    for rollouts, median in (("abc", "b"), ("abcd", "b"), ("abcde", "c"), ("cab", "a")):
        updated = make("XY").update(group(2, {1: rollouts}), epoch=2, step=7)
        assert texts(updated) == f"X {median} Y", rollouts
        assert updated.anchors[1] == Anchor(f"7-{ord(median) - ord('a')}", median, "refine", 2, 0)
    assert texts(make("XY").update(group(2, {1: "ab"}), 0, 0)) == "X Y", "two are too few"
    assert texts(make("XY").update(group(2, {0: "cabde", 2: "edf"}), 0, 0)) == "c X Y f", "the ends are not refined"


def test_update_expands_an_end_once_per_epoch_and_again_in_the_next():
    buffer = make("XY").update(group(2, {0: "a", 2: "b"}), 0, 0)
    assert texts(buffer) == "a X Y b"
    buffer = buffer.update(group(4, {0: "c", 4: "d"}), 0, 1)
    assert texts(buffer) == "a X Y b"
    assert texts(buffer.update(group(4, {0: "e", 4: "f"}), 1, 2)) == "e a X Y b f"


def test_update_prunes_an_inner_anchor_in_its_third_inactive_epoch():
    buffer = make("XMY")
    for epoch, h in ((0, 1), (1, 2)):
        buffer = buffer.update(group(3), epoch, epoch)
        assert inactivity(buffer) == [0, h, 0]
    assert texts(buffer.update(group(3), 2, 2)) == "X Y"


def test_update_merges_pruning_and_additions_on_the_old_coordinates():
    updated = make("ABCDE", [0, 1, 2, 1, 0]).update(group(5, {0: "ab", 1: "cde", 4: "fgh", 5: "ij"}), 1, 0)
    assert texts(updated) == "a A d B D g E j"
    assert inactivity(updated) == [0] * 8


def test_update_observes_inactivity_once_per_epoch_at_the_first_visit():
    buffer = make("XMY", [0, 1, 0]).update(group(3), 3, 0)
    assert inactivity(buffer) == [0, 2, 0]
    assert inactivity(buffer.update(group(3), 3, 1)) == [0, 2, 0], "not counted twice"
    assert inactivity(buffer.update(group(3, {1: "a"}), 3, 1)) == [0, 2, 0], "not reset either"
    assert texts(buffer.update(group(3), 4, 1)) == "X Y"


def test_update_can_prune_an_end_that_was_overtaken():
    buffer = make("XY").update(group(2, {0: "a"}), 0, 0)
    for epoch in (1, 2, 3):
        assert texts(buffer) == "a X Y"
        buffer = buffer.update(group(3), epoch, epoch)
    assert texts(buffer) == "a Y"


def test_update_adds_nothing_from_an_unordered_interval_but_counts_it_as_activity():
    buffer = make("XMY", [0, 2, 0])
    full = group(3, {0: "ab", 1: "cde", 3: "fg"})
    updated = buffer.update(full, 1, 0, unordered={0, 1, 3})
    assert texts(updated) == "X M Y"
    assert inactivity(updated) == [0, 0, 0]
    assert texts(updated.update(full, 1, 1)) == "a X d M Y g", "the ends may still expand in this epoch"


def test_update_wants_one_interval_more_than_anchors():
    for count in (2, 4):
        with pytest.raises(ValueError, match="2 anchors make 3 intervals"):
            make("XY").update([()] * count, 0, 0)


def test_buffer_needs_two_anchors_and_starts_without_marks():
    for count in (0, 1):
        with pytest.raises(ValueError, match=f"at least 2 anchors, got {count}"):
            make("XY"[:count])
    anchors = [("X", "X", "initial", 0, 0), ("Y", "Y", "initial", 0, 0)]
    unmarked = dict.fromkeys(("left", "right", "observed"))
    assert as_state(make("XY")) == {"anchors": anchors, "visits": 0} | unmarked


def test_visited_counts_visits_alone():
    buffer = make("XY", left_epoch=1, right_epoch=2, observed_epoch=3, visits=4)
    assert as_state(buffer.visited()) == as_state(buffer) | {"visits": 5}


# The initial anchors.


def test_select_k0_gives_the_papers_subsets():
    for k0, nectar, bootstrap in ((2, "71", "18"), (4, "7531", "1368"), (7, "7654321", "1235678")):
        assert select_k0("7654321", k0) == list(nectar)
        assert select_k0("12345678", k0) == list(bootstrap)


@given(st.integers(0, 40), st.integers(2, 12))
def test_select_k0_keeps_both_ends_and_spreads_evenly(n, k0):
    chosen = select_k0(range(n), k0)
    if n <= k0:
        assert chosen == list(range(n))
        return
    assert len(chosen) == k0 and sorted(set(chosen)) == chosen
    assert (chosen[0], chosen[-1]) == (0, n - 1)
    assert all(abs(at - Fraction(i * (n - 1), k0 - 1)) <= HALF for i, at in enumerate(chosen))


def test_select_k0_refuses_fewer_than_two():
    for k0 in (1, 0, -3):
        with pytest.raises(ValueError, match="k0 must be at least 2"):
            select_k0(range(8), k0)


def test_initial_buffer_names_anchors_by_their_place_in_the_data():
    buffer = initial_buffer([f"text {i}" for i in range(7)], 4)
    assert buffer == AnchorBuffer(tuple(Anchor(f"initial-{i}", f"text {i}", "initial", 0, 0) for i in (0, 2, 4, 6)))
    with pytest.raises(ValueError, match="at least 2 anchors"):
        initial_buffer(["alone"], 4)


def test_bootstrap_buffer_takes_rollouts_in_their_ranked_order():
    sigma = [Rollout(i, f"text {i}") for i in (3, 7, 0, 5, 1, 6, 2, 4)]
    buffer = bootstrap_buffer(sigma, 4, epoch=1, step=9)
    assert buffer == AnchorBuffer(tuple(Anchor(f"9-{i}", f"text {i}", "bootstrap", 1, 0) for i in (3, 0, 6, 4)))
