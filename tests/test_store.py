"""The buffer store: what was committed is there, whole, after any failure; what was not is not there at all."""

import json
import signal
import sqlite3
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rankbuffer_trl.buffer import Anchor, AnchorBuffer, initial_buffer
from rankbuffer_trl.groups import Query, Rollout, RolloutGroup, Rubric
from rankbuffer_trl.judge import Call, Totals, Usage
from rankbuffer_trl.score import GroupScore
from rankbuffer_trl.store import BufferStore, StoreError

TABLES = ("responses", "buffers", "groups", "calls")


@pytest.fixture
def store(tmp_path):
    store = BufferStore(tmp_path / "live.sqlite")
    yield store
    store.close()


def contents(store: BufferStore) -> dict[str, list[tuple]]:
    return {table: sorted(store.rows(f"SELECT * FROM {table}")) for table in TABLES}


def ask_for(id: str) -> Query:
    return Query(id, [{"role": "user", "content": "How?"}], (Rubric("Is good.", 1),), ("worst", "bad", "good", "best"))


def call(query_id: str = "q", outcome: str = "parsed", attempts: int = 1) -> Call:
    usage = Usage(100, 60, 7) if outcome == "parsed" else Usage()
    return Call(
        "rankbuffer", "insert", query_id, "http://judge/v1", outcome, attempts, usage, Usage(200, 60, 14), 0.5, "why"
    )


def visit(id: str, step: int, before: AnchorBuffer | None = None) -> tuple[RolloutGroup, GroupScore]:
    """One visit by hand: rollout 1 beats all anchors and joins, rollout 2 is empty, anchor 1 goes."""
    rollouts = (Rollout(0, f"{id} {step} middling"), Rollout(1, f"{id} {step} excellent"), Rollout(2, ""))
    before = before or initial_buffer(ask_for(id).responses, 4)
    epoch = before.visits
    added = Anchor(f"{step}-1", rollouts[1].text, "right", epoch)
    kept = tuple(replace(anchor, h=anchor.h + 1) for anchor in before.anchors[:1] + before.anchors[2:])
    after = AnchorBuffer(kept + (added,), None, epoch, epoch, epoch + 1)
    group = RolloutGroup(ask_for(id), rollouts, step, epoch)
    K = len(before)
    return group, GroupScore((0.0, 1.0, -1.0), ((0,), (1,)), {0: 1, 1: K}, False, before, after)


def visit_all(store: BufferStore, ids: str, steps: range) -> None:
    for step in steps:
        store.commit(step, [visit(id, step, store.load(id)) for id in ids], [call(id) for id in ids])


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
    assert store.totals() == Totals(2, 2, 11, 200, 120, 14, 800, 240, 56, 2.0) == Totals.of(calls)
    assert store.totals("eval") == Totals(1, 0, 1, 100, 60, 7, 200, 60, 14, 0.5)


def test_a_cancelled_call_has_a_cost_but_is_neither_an_answer_nor_a_failure(store):
    calls = [call(), call(outcome="cancelled", attempts=2)]
    store.commit(0, [], calls)
    assert store.totals() == Totals(1, 0, 3, 100, 60, 7, 400, 120, 28, 1.0) == Totals.of(calls)


def test_a_call_comes_back_as_it_went_in(store):
    store.commit(3, [], [call("q", "malformed", 2)], phase="eval")
    row = (3, "eval", "rankbuffer", "insert", "q", "http://judge/v1", "malformed", 2, 0, 0, 0, 200, 60, 14, 0.5, "why")
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


KILLED = """
import os, signal, sys
sys.path.insert(0, {tests!r})
from pathlib import Path
from dataclasses import replace
from rankbuffer_trl.groups import Rollout
from rankbuffer_trl.store import BufferStore
from test_store import visit, visit_all

store = BufferStore(Path({path!r}))
visit_all(store, "ab", range(2))
store.rows("PRAGMA cache_size = 5")  # so that pages reach the file before the transaction ends

def calls():
    {death}
    yield

def long_visit(id):
    group, score = visit(id, 2)
    return replace(group, rollouts=group.rollouts + (Rollout(3, "long " * 20_000),)), score

store.commit(2, [long_visit(id) for id in "abcdefgh"], calls())
"""


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


# Snapshots


@pytest.mark.parametrize(
    "name", ["plain", "with space", "teapot-é-🫖", "exp#3", "exp?3", "100%", "lr%41", "a&mode=rw", "q'\""]
)
def test_a_snapshot_restores_whatever_the_folders_name(tmp_path, store, name):
    visit_all(store, "ab", range(2))
    expected, buffer = contents(store), store.load("a")
    snapshot = tmp_path / name / "checkpoint-2" / "rankbuffer.sqlite"
    store.snapshot(snapshot)
    assert [path.name for path in snapshot.parent.iterdir()] == ["rankbuffer.sqlite"]
    visit_all(store, "abc", range(2, 4))
    other = BufferStore(tmp_path / name / "elsewhere.sqlite")
    for target in (store, other):
        target.restore(snapshot)
        assert contents(target) == expected
        assert target.load("a") == buffer
    other.close()
    visit_all(store, "ab", range(2, 3))
    assert store.last_step() == 2


def test_what_was_restored_is_there_after_reopening(tmp_path, store):
    visit_all(store, "ab", range(2))
    store.snapshot(tmp_path / "snapshot.sqlite")
    expected = contents(store)
    other = BufferStore(tmp_path / "other.sqlite")
    visit_all(other, "c", range(5))
    other.restore(tmp_path / "snapshot.sqlite")
    other.close()
    other = BufferStore(tmp_path / "other.sqlite")
    assert contents(other) == expected
    other.close()


def test_a_snapshot_replaces_the_older_one(tmp_path, store):
    path = tmp_path / "snapshot.sqlite"
    for steps in (range(1), range(1, 2)):
        visit_all(store, "a", steps)
        store.snapshot(path)
    expected = contents(store)
    visit_all(store, "a", range(2, 3))
    store.restore(path)
    assert contents(store) == expected


def no_backup_space(path, monkeypatch):
    path.with_name(path.name + ".tmp").mkdir()


def no_replacing(path, monkeypatch):
    def fail(*arguments):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.replace", fail)


def no_syncing(path, monkeypatch):
    def fail(*arguments):
        raise OSError(5, "Input/output error")

    monkeypatch.setattr("os.fsync", fail)


@pytest.mark.parametrize("accident", [no_backup_space, no_replacing, no_syncing])
def test_a_failed_snapshot_leaves_the_older_one(tmp_path, store, monkeypatch, accident):
    path = tmp_path / "snapshot.sqlite"
    visit_all(store, "a", range(1))
    store.snapshot(path)
    old = path.read_bytes()
    visit_all(store, "a", range(1, 2))
    before = contents(store)
    with monkeypatch.context() as patch:
        accident(path, patch)
        with pytest.raises(StoreError, match=r"cannot copy to .*snapshot\.sqlite"):
            store.snapshot(path)
    assert path.read_bytes() == old
    assert contents(store) == before


def test_a_snapshot_below_a_file_is_refused_by_name(tmp_path, store):
    (tmp_path / "file").write_text("not a folder")
    with pytest.raises(StoreError, match=r"cannot copy to .*file/snapshot\.sqlite"):
        store.snapshot(tmp_path / "file" / "snapshot.sqlite")


def test_a_leftover_of_a_killed_snapshot_is_no_obstacle(tmp_path, store):
    visit_all(store, "a", range(1))
    (tmp_path / "snapshot.sqlite.tmp").write_text("half a snapshot")
    store.snapshot(tmp_path / "snapshot.sqlite")
    expected = contents(store)
    visit_all(store, "a", range(1, 2))
    store.restore(tmp_path / "snapshot.sqlite")
    assert contents(store) == expected


def another_version(path: Path) -> None:
    BufferStore(path).close()
    with sqlite3.connect(path) as db:
        db.execute("PRAGMA user_version = 1")
    db.close()


BAD_SNAPSHOTS = {
    "missing": lambda path: None,
    "folder": lambda path: path.mkdir(),
    "garbage": lambda path: path.write_bytes(b"not a database" * 200),
    "empty": lambda path: path.write_bytes(b""),
    "another version": another_version,
}


@pytest.mark.parametrize("case", BAD_SNAPSHOTS)
def test_a_bad_snapshot_is_refused_and_costs_nothing(tmp_path, store, case):
    path = tmp_path / "snapshot.sqlite"
    BAD_SNAPSHOTS[case](path)
    visit_all(store, "a", range(2))
    before = contents(store)
    with pytest.raises(StoreError, match=r"snapshot\.sqlite"):
        store.restore(path)
    assert contents(store) == before


# Files that cannot be used


def test_another_format_version_is_refused(tmp_path):
    another_version(tmp_path / "store.sqlite")
    with pytest.raises(StoreError, match=r"store\.sqlite has the format version 1; this program reads version 2"):
        BufferStore(tmp_path / "store.sqlite")


def test_a_path_below_a_file_is_refused_by_name(tmp_path):
    (tmp_path / "file").write_text("not a folder")
    with pytest.raises(StoreError, match=r"cannot open the buffer store .*file/below/store\.sqlite"):
        BufferStore(tmp_path / "file" / "below" / "store.sqlite")


def test_a_folder_is_no_store(tmp_path):
    with pytest.raises(StoreError, match="cannot open the buffer store"):
        BufferStore(tmp_path)


def test_a_file_that_is_no_store_is_refused_and_left_alone(tmp_path):
    path = tmp_path / "notes.txt"
    path.write_text("Dear diary, " * 100)
    with pytest.raises(StoreError, match=r"cannot open the buffer store .*notes\.txt"):
        BufferStore(path)
    assert path.read_text() == "Dear diary, " * 100


def test_a_store_that_broke_under_way_is_a_store_error(tmp_path, store):
    visit_all(store, "a", range(1))
    db = sqlite3.connect(tmp_path / "live.sqlite")
    db.executescript("DROP TABLE buffers; DROP TABLE groups;")
    db.close()
    for use in (lambda: store.commit(1, [visit("a", 1)]), lambda: store.load("a"), lambda: store.has_group("a", 0)):
        with pytest.raises(StoreError, match=r"live\.sqlite"):
            use()
