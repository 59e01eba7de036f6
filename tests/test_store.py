"""The buffer store: what was committed is there, whole, after any failure; what was not is not there at all."""

import json
import sqlite3
from dataclasses import replace
from itertools import count

import pytest
from helpers.contents import everything as contents
from helpers.visits import call, visit, visit_all
from hypothesis import given
from hypothesis import strategies as st

from rankbuffer_trl.buffer import Anchor, AnchorBuffer, initial_buffer
from rankbuffer_trl.groups import Query, Rollout, RolloutGroup, Rubric
from rankbuffer_trl.judge import Totals
from rankbuffer_trl.rewards._method import GroupScore
from rankbuffer_trl.store import BufferStore, StoreError, history

# What comes back

ODD = ["'; DROP TABLE buffers; --", '"', "\n\r\n", "\x00", "🫖 ü", "[A0]"]
TEXTS = st.text(min_size=1, max_size=20) | st.sampled_from(ODD)
MARKS = st.none() | st.integers(0, 9)
NUMBERS = count()


@pytest.fixture(scope="module")
def shared(tmp_path_factory):
    """A store for all examples of a property."""
    store = BufferStore(tmp_path_factory.mktemp("shared") / "live.sqlite")
    store.rows("PRAGMA synchronous = OFF")
    yield store
    store.close()


@given(
    id=TEXTS,
    initial=st.lists(TEXTS, min_size=2, max_size=6),
    answers=st.lists(TEXTS, max_size=5),
    marks=st.tuples(MARKS, MARKS, MARKS, st.integers(0, 99)),
    order=st.randoms(use_true_random=False),
)
def test_load_gives_a_buffer_as_it_was_committed(shared, id, initial, answers, marks, order):
    id = f"{id}{next(NUMBERS)}"
    query = Query(id, [{"role": "user", "content": "How?"}], (Rubric("Is good.", 1),), tuple(initial))
    rollouts = tuple(Rollout(i, text) for i, text in enumerate(answers))
    before = initial_buffer(initial, len(initial))
    sources = ["left", "right", "refine", "bootstrap"]
    anchors = [*before.anchors]
    anchors += (Anchor(f"7-{r.id}", r.text, order.choice(sources), order.randrange(4), 1 + r.id) for r in rollouts)
    order.shuffle(anchors)
    after = AnchorBuffer(tuple(anchors), *marks)
    assert shared.load(id) is None
    shared.commit(7, [(RolloutGroup(query, rollouts, 7, 0), GroupScore((), before=before, after=after))])
    reading = BufferStore(shared.path, read_only=True)
    assert shared.load(id) == reading.load(id) == after
    reading.close()


def test_load_gives_the_newest_version_of_its_query_and_the_old_ones_stay(store):
    versions = []
    for step in range(12):  # a text comparison would take step 9 for the newest
        scored = [visit(id, step, store.load(id)) for id in "qr"]
        store.commit(step, scored)
        versions.append(scored[0][1].after)
        assert [store.load(id) for id in "qr"] == [score.after for _, score in scored]
    rows = list(store.rows("SELECT step, visits, anchors FROM buffers WHERE query_id = 'q' ORDER BY step"))
    assert [row[:2] for row in rows] == [(step, step + 1) for step in range(12)]
    kept = [[[a.id, a.source, a.epoch, a.h] for a in buffer.anchors] for buffer in versions]
    assert [json.loads(row[2]) for row in rows] == kept


def test_commit_records_what_happened(store):
    visit_all(store, "q", range(1))
    group, score = visit("q", 1, store.load("q"))
    store.commit(1, [(group, replace(score, rewards=(None, 1.0, -1.0)))])
    first, second = store.rows("SELECT * FROM groups ORDER BY step")
    assert second[:4] == ("q", 1, 1, 4)
    changed = [[["1-1", "right"]], [["initial-2", "initial"]]]
    assert list(map(json.loads, second[4:])) == [{"0": 1, "1": 4}, [[0], [1]], [None, 1.0, -1.0], *changed]
    assert first[:4] == ("q", 0, 0, 4)
    assert json.loads(first[-1]) == [["initial-1", "initial"]]
    responses = sorted(store.rows("SELECT id, step, text FROM responses WHERE id NOT LIKE 'initial%'"))
    assert responses == [(f"{s}-{i}", s, f"q {s} {w}") for s in (0, 1) for i, w in ((0, "middling"), (1, "excellent"))]


def test_commit_records_a_group_without_a_buffer(store):
    group, _ = visit("q", 0)
    store.commit(0, [(group, GroupScore((None, None, None)))])
    assert store.load("q") is None and store.has_group("q", 0) and store.last_step() == 0
    with pytest.raises(StoreError):
        store.commit(0, [(group, GroupScore((0.0, 1.0, -1.0)))])
    assert list(store.rows("SELECT k, rewards FROM groups")) == [(0, "[null, null, null]")]


def test_has_group_last_step_and_query_ids(store):
    assert store.last_step() is None
    visit_all(store, "b", range(3, 4))
    visit_all(store, "abc", range(4, 6))
    assert [store.has_group("b", step) for step in (2, 3, 5, 6)] == [False, True, True, False]
    assert not store.has_group("r", 3)
    assert store.last_step() == 5
    assert history.query_ids(store) == ["b", "a", "c"], "by their first visits"
    assert store.query_ids() == ["a", "b", "c"]
    assert store.query_ids(after="a", limit=1) == ["b"]


def test_commit_writes_all_columns_of_a_call_and_totals_sum_those_of_a_phase(store):
    """A cancelled call has a cost, but is neither an answer nor a failure."""
    assert store.totals() == Totals()
    calls = [call(), call(attempts=2), call(outcome="unreachable", attempts=5), call(outcome="cancelled", attempts=2)]
    store.commit(3, [], [call("q", "malformed", 2)], phase="eval")
    row = (3, "eval", "rankbuffer", "insert", "q", "http://judge/v1", "malformed", 2, 2, 0, 0, 0, 200, 60, 14, 0.5)
    assert list(store.rows("SELECT * FROM calls")) == [(*row, "why")]
    for step, each in enumerate(calls):
        store.commit(step, [], [each])
    assert store.totals() == Totals(2, 1, 10, 0, 200, 120, 14, 800, 240, 56, 2.0) == Totals.of(calls)


# One transaction


def test_commit_that_fails_leaves_nothing(store):
    visit_all(store, "ab", range(1))
    before = contents(store)

    def broken():
        yield call()
        raise KeyError("no call")

    again = [visit("c", 0), visit("a", 0), visit("d", 0)]  # a was scored in step 0 already
    with pytest.raises(StoreError, match=r"cannot write the buffer store .*live\.sqlite"):
        store.commit(0, again, [call("c")])
    with pytest.raises(StoreError):
        store.commit(1, [visit("a", 1)], [call(), replace(call(), outcome=None)])
    with pytest.raises(KeyError):
        store.commit(1, [visit("a", 1)], broken())
    assert contents(store) == before
    store.commit(1, [visit("c", 1)], [call("c")])
    assert store.load("c") is not None


# Damage


def test_load_names_a_damaged_buffer(store):
    visit_all(store, "a", range(1))
    ((anchors,),) = store.rows("SELECT anchors FROM buffers")
    first = json.dumps(json.loads(anchors)[0])
    fields = ('"initial", 0', '"initial", "0", 0', '"initial", 0, null', "{}, 0, 0")
    for anchor in (*(f'["initial-0", {each}]' for each in fields), "7", '["9-9", "right", 0, 0]', "[", "[" * 100_000):
        store.rows("UPDATE buffers SET anchors = ?", (anchors.replace(first, '["initial-0", "initial", 0, 0]'),))
        assert len(store.load("a")) == 4
        store.rows("UPDATE buffers SET anchors = ?", (anchors.replace(first, anchor),))
        with pytest.raises(StoreError, match=r"^\S+live\.sqlite, table buffers, query_id .a.: .*anchor.*: use"):
            pytest.fail(f"{anchor}: {store.load('a')}")


def test_store_that_broke_under_way_is_a_store_error(tmp_path, store):
    visit_all(store, "a", range(1))
    db = sqlite3.connect(tmp_path / "live.sqlite")
    db.executescript("DROP TABLE buffers; DROP TABLE groups;")
    db.close()
    for use in (lambda: store.commit(1, [visit("a", 1)]), lambda: store.load("a"), lambda: store.has_group("a", 0)):
        with pytest.raises(StoreError, match=r"live\.sqlite"):
            use()
