"""The buffer store: what was committed is there, whole, after any failure; what was not is not there at all."""

import json
import signal
import sqlite3
import subprocess
import sys
import tempfile
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
from helpers import contents as stored
from helpers.visits import KILLED, call, visit, visit_all
from hypothesis import given, settings
from hypothesis import strategies as st

from rankbuffer_trl.buffer import Anchor, AnchorBuffer, initial_buffer
from rankbuffer_trl.groups import Query, Rollout, RolloutGroup, Rubric
from rankbuffer_trl.judge import Totals
from rankbuffer_trl.rewards.method import GroupScore
from rankbuffer_trl.store import BufferStore, StoreError, numbers

TABLES = stored.TABLES
contents = partial(stored.contents, seconds=True)


# Round trips

TEXTS = st.text(min_size=1, max_size=20) | st.sampled_from(
    ["'; DROP TABLE buffers; --", '"', "\n\r\n", "\x00", "🫖 ü", "[A0]"]
)
MARKS = st.none() | st.integers(0, 9)


@settings(max_examples=15)
@given(
    id=TEXTS,
    initial=st.lists(TEXTS, min_size=2, max_size=6),
    answers=st.lists(TEXTS, max_size=5),
    marks=st.tuples(MARKS, MARKS, MARKS, st.integers(0, 99)),
    order=st.randoms(use_true_random=False),
)
def test_a_buffer_comes_back_as_it_went_in(id, initial, answers, marks, order):
    query = Query(id, [{"role": "user", "content": "How?"}], (Rubric("Is good.", 1),), tuple(initial))
    rollouts = tuple(Rollout(i, text) for i, text in enumerate(answers))
    before = initial_buffer(initial, len(initial))
    sources = ["left", "right", "refine", "bootstrap"]
    added = [
        Anchor(f"7-{r.id}", r.text, order.choice(sources), order.randrange(4), order.randrange(3)) for r in rollouts
    ]
    anchors = [*before.anchors, *added]
    order.shuffle(anchors)
    after = AnchorBuffer(tuple(anchors), *marks)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "live.sqlite"
        store = BufferStore(path)
        assert store.load(id) is None
        store.commit(7, [(RolloutGroup(query, rollouts, 7, 0), GroupScore((), before=before, after=after))])
        assert store.load(id) == after
        store.close()
        store = BufferStore(path)
        assert store.load(id) == after
        assert store.load(id + "x") is None
        store.close()


def test_the_newest_version_is_the_buffer_and_the_old_ones_stay(store):
    versions = []
    for step in range(12):  # a text comparison would take step 9 for the newest
        group, score = visit("q", step, store.load("q"))
        store.commit(step, [(group, score)])
        versions.append(score.after)
        assert store.load("q") == score.after
    rows = list(store.rows("SELECT step, visits, anchors FROM buffers ORDER BY step"))
    assert [row[:2] for row in rows] == [(step, step + 1) for step in range(12)]
    kept = [[[a.id, a.source, a.epoch, a.h] for a in buffer.anchors] for buffer in versions]
    assert [json.loads(row[2]) for row in rows] == kept


def test_queries_do_not_mix(store):
    visit_all(store, "ab", range(3))
    for id in "ab":
        texts = [anchor.text for anchor in store.load(id).anchors if anchor.source == "right"]
        assert texts == [f"{id} {step} excellent" for step in range(3)][-len(texts) :]


def test_queries_are_listed_by_their_first_visits(store):
    visit_all(store, "b", range(1))
    visit_all(store, "abc", range(1, 3))
    assert numbers.query_ids(store) == ["b", "a", "c"]


def test_history_rows_tell_what_happened(store):
    visit_all(store, "q", range(2))
    first, second = store.rows("SELECT * FROM groups ORDER BY step")
    query_id, step, epoch, k, *texts = second
    assert (query_id, step, epoch, k) == ("q", 1, 1, 4)
    positions, tiers, rewards, added, pruned = map(json.loads, texts)
    assert positions == {"0": 1, "1": 4}
    assert tiers == [[0], [1]]
    assert rewards == [0.0, 1.0, -1.0]
    assert added == [["1-1", "right"]]
    assert pruned == [["initial-2", "initial"]]
    assert first[:4] == ("q", 0, 0, 4)
    assert json.loads(first[-1]) == [["initial-1", "initial"]]
    responses = sorted(store.rows("SELECT id, step, text FROM responses WHERE id NOT LIKE 'initial%'"))
    assert responses == [(f"{s}-{i}", s, f"q {s} {w}") for s in (0, 1) for i, w in ((0, "middling"), (1, "excellent"))]


def test_an_unscored_rollout_is_null_in_the_history(store):
    group, score = visit("q", 0)
    store.commit(0, [(group, replace(score, rewards=(None, 1.0, -1.0)))])
    assert list(store.rows("SELECT rewards FROM groups")) == [("[null, 1.0, -1.0]",)]


def test_a_group_without_a_buffer_is_recorded_all_the_same(store):
    group, _ = visit("q", 0)
    store.commit(0, [(group, GroupScore((None, None, None)))])
    assert store.load("q") is None
    assert store.has_group("q", 0)
    assert store.last_step() == 0
    with pytest.raises(StoreError):
        store.commit(0, [(group, GroupScore((0.0, 1.0, -1.0)))])
    assert list(store.rows("SELECT rewards FROM groups")) == [("[null, null, null]",)]


def test_has_group_and_last_step(store):
    assert store.last_step() is None
    assert not store.has_group("q", 0)
    visit_all(store, "q", range(3, 5))
    assert [store.has_group("q", step) for step in (2, 3, 4, 5)] == [False, True, True, False]
    assert not store.has_group("r", 3)
    assert store.last_step() == 4


def test_totals_are_the_sums_of_the_calls_of_a_phase(store):
    assert store.totals() == Totals()
    calls = [call(), call(outcome="malformed", attempts=3), call(attempts=2), call(outcome="unreachable", attempts=5)]
    store.commit(0, [], calls[:3])
    store.commit(1, [], calls[3:])
    store.commit(1, [], [call()], phase="eval")
    assert store.totals() == Totals(2, 2, 11, 3, 200, 120, 14, 800, 240, 56, 2.0) == Totals.of(calls)
    assert store.totals("eval") == Totals(1, 0, 1, 0, 100, 60, 7, 200, 60, 14, 0.5)


def test_a_cancelled_call_has_a_cost_but_is_neither_an_answer_nor_a_failure(store):
    calls = [call(), call(outcome="cancelled", attempts=2)]
    store.commit(0, [], calls)
    assert store.totals() == Totals(1, 0, 3, 0, 100, 60, 7, 400, 120, 28, 1.0) == Totals.of(calls)


def test_a_call_comes_back_as_it_went_in(store):
    store.commit(3, [], [call("q", "malformed", 2)], phase="eval")
    row = (
        3,
        "eval",
        "rankbuffer",
        "insert",
        "q",
        "http://judge/v1",
        "malformed",
        2,
        2,
        0,
        0,
        0,
        200,
        60,
        14,
        0.5,
        "why",
    )
    assert list(store.rows("SELECT * FROM calls")) == [row]


# One transaction


def test_a_failing_commit_leaves_nothing(store):
    visit_all(store, "ab", range(1))
    before = contents(store)
    again = [visit("c", 0), visit("a", 0), visit("d", 0)]  # a was scored in step 0 already
    with pytest.raises(StoreError, match=r"cannot write the buffer store .*live\.sqlite"):
        store.commit(0, again, [call("c")])
    assert contents(store) == before
    assert store.load("c") is None
    store.commit(1, [visit("c", 1)], [call("c")])
    assert store.load("c") is not None


def test_a_failing_ledger_takes_the_groups_with_it(store):
    broken = replace(call(), outcome=None)
    with pytest.raises(StoreError):
        store.commit(0, [visit("a", 0)], [call(), broken])
    assert contents(store) == {table: [] for table in TABLES}


def test_an_error_while_the_calls_are_read_takes_the_groups_with_it(store):
    def calls():
        yield call()
        raise KeyError("no call")

    with pytest.raises(KeyError):
        store.commit(0, [visit("a", 0)], calls())
    assert contents(store) == {table: [] for table in TABLES}


@pytest.mark.parametrize(
    ("death", "code"), [("os.kill(os.getpid(), signal.SIGKILL)", -signal.SIGKILL), ("os._exit(7)", 7)]
)
def test_a_process_killed_in_a_commit_loses_that_commit_alone(tmp_path, store, death, code):
    path = tmp_path / "killed.sqlite"
    program = KILLED.format(tests=str(Path(__file__).parent), path=str(path), death=death)
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120)
    assert done.returncode == code, done.stderr
    journal = path.with_name(path.name + "-journal")
    assert journal.stat().st_size > 0, "the transaction did not reach the disk, so this test shows nothing"
    visit_all(store, "ab", range(2))
    survivor = BufferStore(path)
    assert contents(survivor) == contents(store)
    assert list(survivor.rows("PRAGMA integrity_check")) == [("ok",)]
    assert survivor.load("a") == store.load("a")
    visit_all(survivor, "ab", range(2, 3))
    assert survivor.last_step() == 2
    survivor.close()


# Rewind


@pytest.mark.parametrize("step", [1, 2, 3])
def test_rewind_stands_where_the_run_stood_before_that_step(tmp_path, store, step):
    visit_all(store, "ab", range(4))
    store.rewind(step)
    other = BufferStore(tmp_path / "other.sqlite")
    visit_all(other, "ab", range(step))
    assert contents(store) == contents(other)
    assert store.load("a") == other.load("a")
    assert sorted(path.name for path in tmp_path.glob("live*.sqlite")) == ["live.sqlite"]
    visit_all(store, "ab", range(step, 4))
    visit_all(other, "ab", range(step, 4))
    assert contents(store) == contents(other)
    other.close()


def test_rewind_to_a_step_not_taken_yet_changes_nothing(tmp_path, store):
    store.rewind(0)
    visit_all(store, "ab", range(2))
    before = contents(store)
    store.rewind(2)
    assert contents(store) == before
    assert [path.name for path in tmp_path.glob("*.sqlite")] == ["live.sqlite"]


def test_rewind_keeps_the_evaluation_before_that_step(store):
    visit_all(store, "a", range(3))
    for step in (1, 2):
        store.commit(step, [], [call("held out")], phase="eval")
    store.rewind(1)
    assert store.totals("eval").calls == 1
    assert store.totals("train").calls == 1


def test_rewind_drops_the_calls_of_a_step_that_failed(store):
    visit_all(store, "a", range(2))
    store.commit(2, [], [call(outcome="unreachable")] * 3)  # what the scorer writes before it gives up
    store.rewind(2)
    assert store.totals() == Totals.of([call()] * 2)


def test_rewind_drops_the_calls_of_a_first_step_that_failed(store):
    store.commit(0, [], [call(outcome="unreachable")] * 3)
    store.rewind(0)
    assert store.totals() == Totals()


def test_a_new_run_sets_the_old_one_aside(tmp_path, store):
    visit_all(store, "ab", range(2))
    old = contents(store)
    store.rewind(0)
    assert contents(store) == {table: [] for table in TABLES}
    visit_all(store, "c", range(1))
    new = contents(store)
    store.rewind(0)
    for number, expected in ((1, old), (2, new)):
        aside = BufferStore(tmp_path / f"live-{number}.sqlite")
        assert contents(aside) == expected
        aside.close()


# Damage

ANCHORS = {  # what stands in the place of an anchor
    "no anchor": "7",
    "too short": '["initial-0", "initial", 0]',
    "no number": '["initial-0", "initial", "0", 0]',
    "no source": '["initial-0", {}, 0, 0]',
    "no text": '["9-9", "right", 0, 0]',
    "no JSON": "[",
    "deep": "[" * 100_000,
}


@pytest.mark.parametrize("case", ANCHORS)
def test_a_damaged_buffer_is_named(store, case):
    visit_all(store, "a", range(1))
    ((anchors,),) = store.rows("SELECT anchors FROM buffers")
    first = json.dumps(json.loads(anchors)[0])
    store.rows("UPDATE buffers SET anchors = ?", (anchors.replace(first, '["initial-0", "initial", 0, 0]'),))
    assert len(store.load("a")) == 4
    store.rows("UPDATE buffers SET anchors = ?", (anchors.replace(first, ANCHORS[case]),))
    with pytest.raises(StoreError, match=r"live\.sqlite: the buffer of query 'a' is damaged"):
        store.load("a")


def test_a_store_that_broke_under_way_is_a_store_error(tmp_path, store):
    visit_all(store, "a", range(1))
    db = sqlite3.connect(tmp_path / "live.sqlite")
    db.executescript("DROP TABLE buffers; DROP TABLE groups;")
    db.close()
    for use in (lambda: store.commit(1, [visit("a", 1)]), lambda: store.load("a"), lambda: store.has_group("a", 0)):
        with pytest.raises(StoreError, match=r"live\.sqlite"):
            use()
