"""The buffer store: what was committed is there, whole, after any failure; what was not is not there at all."""

import json
import os
import re
import shutil
import signal
import socket
import sqlite3
import struct
import subprocess
import sys
import tempfile
from dataclasses import replace
from functools import partial
from pathlib import Path

import contents as stored
import pytest
from datasets import load_dataset
from hypothesis import given, settings
from hypothesis import strategies as st

from rankbuffer_trl.buffer import Anchor, AnchorBuffer, initial_buffer
from rankbuffer_trl.groups import Query, Rollout, RolloutGroup, Rubric
from rankbuffer_trl.judge import Call, Totals, Usage
from rankbuffer_trl.rewards.method import GroupScore
from rankbuffer_trl.store import BufferStore, StoreError, numbers
from rankbuffer_trl.store.buffer_store import STORE
from rankbuffer_trl.store.export import export_buffers
from rankbuffer_trl.store.places import FOLDER, LIVE_STORE, read_store

TABLES = stored.TABLES
contents = partial(stored.contents, seconds=True)


@pytest.fixture
def store(tmp_path):
    store = BufferStore(tmp_path / "live.sqlite")
    yield store
    store.close()


def ask_for(id: str) -> Query:
    return Query(id, [{"role": "user", "content": "How?"}], (Rubric("Is good.", 1),), ("worst", "bad", "good", "best"))


def call(query_id: str = "q", outcome: str = "parsed", attempts: int = 1) -> Call:
    usage = Usage(100, 60, 7) if outcome == "parsed" else Usage()
    spent, malformed = Usage(200, 60, 14), attempts if outcome == "malformed" else 0
    return Call(
        "rankbuffer", "insert", query_id, "http://judge/v1", outcome, attempts, usage, spent, 0.5, "why", malformed
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


# Saves: the store in a checkpoint


def save(store: BufferStore, folder: Path) -> Path:
    store.save(folder)
    return folder


@pytest.mark.parametrize(
    "name", ["plain", "with space", "teapot-é-🫖", "exp#3", "exp?3", "100%", "lr%41", "a&mode=rw", "q'\""]
)
def test_a_save_restores_whatever_the_folders_name(tmp_path, name):
    store = BufferStore(tmp_path / name / "live.sqlite")
    visit_all(store, "ab", range(2))
    expected, buffer = contents(store), store.load("a")
    saved = save(store, tmp_path / name / "checkpoint-2")
    visit_all(store, "abc", range(2, 4))
    other = BufferStore(tmp_path / name / "elsewhere.sqlite")
    for target in (store, other):
        target.restore(saved)
        assert contents(target) == expected
        assert target.load("a") == buffer
    assert {path.name for path in saved.parent.glob("*.sqlite")} == {"live.sqlite", "elsewhere.sqlite"}
    other.close()
    visit_all(store, "ab", range(2, 3))
    assert store.last_step() == 2
    store.close()


STEPS = st.lists(
    st.tuples(
        st.sampled_from(["visit", "visit", "visit", "save", "restore", "delete", "reopen", "away"]), st.integers(0, 9)
    ),
    max_size=25,
)


@settings(max_examples=15)
@given(STEPS)
def test_any_save_gives_back_what_was_there_whatever_happened_since(moves):
    """Against the obvious oracle: a dictionary of everything that stood in the store at each save."""
    with tempfile.TemporaryDirectory() as folder:
        folder = Path(folder)
        store = BufferStore(folder / "live.sqlite")
        store.rows("PRAGMA synchronous = OFF")
        saves, step = {}, 0
        for number, (move, choice) in enumerate(moves):
            chosen = sorted(saves)[choice % len(saves)] if saves else None
            if move == "visit":
                visit_all(store, "abc"[: choice % 3 + 1], range(step, step + 1))
                step += 1
            elif move == "save":
                target = folder / f"checkpoint-{number:02d}"
                saves[save(store, target)] = (contents(store), store.totals(), step)
            elif move == "reopen":
                store.close()
                store = BufferStore(folder / "live.sqlite")
            elif chosen and move == "restore":
                store.restore(chosen)
                assert (contents(store), store.totals()) == saves[chosen][:2]
                step = saves[chosen][2]
            elif chosen and move == "delete":
                shutil.rmtree(chosen)
                del saves[chosen]
            elif chosen and move == "away":  # copied to a machine that has nothing else
                away = BufferStore(folder / f"away-{number}.sqlite")
                away.restore(shutil.copytree(chosen, folder / f"away-{number}"))
                assert (contents(away), away.totals()) == saves[chosen][:2]
                away.close()
        for path, (expected, totals, _) in saves.items():
            store.restore(path)
            assert (contents(store), store.totals()) == (expected, totals)
        assert store.totals() == Totals.of([call()] * sum(1 for _ in store.rows("SELECT 1 FROM calls")))
        store.close()


def test_a_save_over_an_older_one_leaves_nothing_of_it(tmp_path, store):
    visit_all(store, "a", range(3))
    save(store, tmp_path / "saved")
    store.rewind(0)
    visit_all(store, "b", range(2))
    saved = save(store, tmp_path / "saved")
    assert [path.name for path in saved.iterdir()] == [STORE]
    expected = contents(store)
    store.restore(saved)
    assert contents(store) == expected


def test_a_save_after_a_rewind_has_what_the_store_has(tmp_path, store):
    for step in range(3):
        visit_all(store, "ab", range(step, step + 1))
        save(store, tmp_path / f"checkpoint-{step}")
    store.rewind(1)
    visit_all(store, "b", range(1, 2))
    expected = contents(store)
    saved = save(store, tmp_path / "again")
    other = BufferStore(tmp_path / "other.sqlite")
    other.restore(saved)
    assert contents(other) == expected and other.totals() == store.totals() == Totals.of([call()] * 3)
    other.close()


def test_restoring_over_another_run_sets_it_aside(tmp_path, store):
    visit_all(store, "ab", range(2))
    saved = save(store, tmp_path / "saved")
    expected = contents(store)
    other = BufferStore(tmp_path / "other.sqlite")
    visit_all(other, "c", range(5))
    lost = contents(other)
    other.restore(saved)
    assert contents(other) == expected
    other.close()
    aside = BufferStore(tmp_path / "other-1.sqlite")
    assert contents(aside) == lost
    aside.close()


def no_space_for_the_draft(path, monkeypatch):
    path.with_name("newer").joinpath(STORE + ".tmp").mkdir(parents=True)


def no_replacing(path, monkeypatch):
    def fail(*arguments):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.replace", fail)


def no_syncing(path, monkeypatch):
    def fail(*arguments):
        raise OSError(5, "Input/output error")

    monkeypatch.setattr("os.fsync", fail)


@pytest.mark.parametrize("accident", [no_space_for_the_draft, no_replacing, no_syncing])
def test_a_failed_save_leaves_the_older_one_and_can_be_repeated(tmp_path, store, monkeypatch, accident):
    visit_all(store, "a", range(1))
    older = save(store, tmp_path / "older")
    old = contents(store)
    visit_all(store, "a", range(1, 2))
    before = contents(store)
    with monkeypatch.context() as patch:
        accident(older, patch)
        with pytest.raises(StoreError, match=r"cannot save the buffer store .* to .*newer"):
            store.save(tmp_path / "newer")
    assert contents(store) == before
    if accident is no_space_for_the_draft:
        (tmp_path / "newer" / f"{STORE}.tmp").rmdir()
    with pytest.raises(StoreError, match=r"store\.sqlite is missing"):
        store.restore(tmp_path / "newer")
    store.save(tmp_path / "newer")
    store.restore(older)
    assert contents(store) == old
    store.restore(tmp_path / "newer")
    assert contents(store) == before


def test_a_save_below_a_file_is_refused_by_name(tmp_path, store):
    (tmp_path / "file").write_text("not a folder")
    with pytest.raises(StoreError, match=r"cannot save the buffer store .* to .*file/saved"):
        store.save(tmp_path / "file" / "saved")


def damage(path: Path) -> None:
    contents = bytearray(path.read_bytes())
    contents[len(contents) // 2] ^= 1
    path.unlink()
    path.write_bytes(contents)


def as_another_version(file: Path) -> None:
    with sqlite3.connect(file) as db:
        db.execute("PRAGMA user_version = 3")
    db.close()


def execute(*statements: str):
    def change(file: Path) -> None:
        with sqlite3.connect(file) as db:
            for statement in statements:
                db.execute(statement)
        db.close()

    return change


ENDLESS = "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n) SELECT 'q', i, 'x', 1, 1, 1, 1 FROM n"
STRANGE = "is not a buffer store: missing or not as this program makes it: .*"
BAD_SAVES = {
    "no folder": (lambda file: shutil.rmtree(file.parent), r"store\.sqlite is missing"),
    "no file": (Path.unlink, r"store\.sqlite is missing"),
    "a text": (lambda file: file.write_text("Dear diary, " * 100), "not a database"),
    "another version": (as_another_version, "format version 3; this program reads version 4"),
    "half a file": (lambda file: os.truncate(file, 8192), "malformed"),
    "a view": (execute("DROP TABLE buffers", f"CREATE VIEW buffers AS {ENDLESS}"), f"{STRANGE}view 'buffers'"),
    "a trigger": (
        execute("CREATE TRIGGER t AFTER INSERT ON groups BEGIN DELETE FROM calls; END"),
        f"{STRANGE}trigger 't'",
    ),
    "a virtual table": (
        execute("DROP TABLE calls", "CREATE VIRTUAL TABLE calls USING fts5(step, phase)"),
        f"{STRANGE}table 'calls'",
    ),
    "a column that computes": (
        execute("ALTER TABLE calls ADD COLUMN x ANY AS (hex(error))"),
        f"{STRANGE}table 'calls'",
    ),
    "no table": (execute("DROP TABLE groups"), f"{STRANGE}table 'groups'"),
    "text for a number": (
        execute(
            "PRAGMA writable_schema = ON",
            "UPDATE sqlite_master SET sql = replace(sql, ' STRICT', '')",
        ),
        STRANGE,
    ),
}


@pytest.mark.parametrize("case", BAD_SAVES)
def test_a_bad_save_is_refused_and_costs_nothing(tmp_path, store, case):
    other = BufferStore(tmp_path / "other.sqlite")
    visit_all(other, "b", range(2))
    saved = save(other, tmp_path / "saved")
    other.close()
    spoil, message = BAD_SAVES[case]
    spoil(saved / STORE)
    visit_all(store, "a", range(2))
    before, files = contents(store), {path.name for path in tmp_path.iterdir()}
    with pytest.raises(StoreError, match=message):
        store.restore(saved)
    assert contents(store) == before
    assert {path.name for path in tmp_path.iterdir()} == files
    with pytest.raises(StoreError, match=message):
        BufferStore(saved / STORE, read_only=True).rows("SELECT * FROM calls")
    visit_all(store, "a", range(2, 3))


def fan(page: int, size: int) -> bytes:
    """An inner page of a table whose hundred children are all the same page."""
    cells = [size - 5 * (i + 1) for i in range(100)]
    content = bytearray(size)
    content[:12] = struct.pack(">BHHHBI", 5, 0, len(cells), cells[-1], 0, page)
    for i, place in enumerate(cells):
        content[12 + 2 * i : 14 + 2 * i] = place.to_bytes(2, "big")
        content[place : place + 5] = page.to_bytes(4, "big") + b"\x01"
    return bytes(content)


def test_a_small_file_cannot_fill_the_disk(tmp_path, store):
    """SQLite reads a forged table from two pages that stand for 10,000, and finds no fault with it."""
    visit_all(store, "a", range(2))
    saved, before = save(store, tmp_path / "saved") / STORE, contents(store)
    with sqlite3.connect(saved) as db:
        ((root,),) = db.execute("SELECT rootpage FROM sqlite_master WHERE name = 'calls'")
        ((size,),) = db.execute("PRAGMA page_size")
    db.close()
    file = bytearray(saved.read_bytes())
    start = (root - 1) * size
    file += file[start : start + size]
    file += fan(len(file) // size, size)
    file[start : start + size] = fan(len(file) // size, size)
    file[28:32] = (len(file) // size).to_bytes(4, "big")
    saved.write_bytes(file)
    with pytest.raises(StoreError, match="cannot restore the buffer store"):
        store.restore(saved.parent)
    assert contents(store) == before


def test_a_value_of_another_type_is_refused(tmp_path, store):
    """Its definition is as it should be, but a row was written when it was not."""
    visit_all(store, "a", range(2))
    saved = save(store, tmp_path / "saved")
    before = contents(store)
    with sqlite3.connect(saved / STORE) as db:
        db.execute("PRAGMA writable_schema = ON")
        ((right,),) = db.execute("SELECT sql FROM sqlite_master WHERE name = 'calls'")
        db.execute("UPDATE sqlite_master SET sql = replace(sql, ' STRICT', '') WHERE name = 'calls'")
    db.close()
    with sqlite3.connect(saved / STORE) as db:
        db.execute("UPDATE calls SET attempts = 'many'")
        db.execute("PRAGMA writable_schema = ON")
        db.execute("UPDATE sqlite_master SET sql = ? WHERE name = 'calls'", (right,))
    db.close()
    with pytest.raises(StoreError, match=r"cannot restore .*TEXT value in INTEGER column calls\.attempts"):
        store.restore(saved)
    assert contents(store) == before


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


# Several processes


HOLDER = """
import sys
from rankbuffer_trl.store import BufferStore
store = BufferStore(sys.argv[1])
print("mine", flush=True)
sys.stdin.read()
"""


def test_a_store_has_one_writer_until_that_ends(tmp_path):
    path = tmp_path / LIVE_STORE
    path.parent.mkdir()
    path.with_suffix(".lock").write_text(f"process 1234567 on {'a-host-with-a-long-name' * 9}")  # of an earlier run
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    try:
        assert holder.stdout.readline() == "mine\n"
        message = rf"live\.sqlite is in use by process {holder.pid} on {re.escape(socket.gethostname())}: .*output_dir"
        with pytest.raises(StoreError, match=message):
            BufferStore(path)
        BufferStore(path, read_only=True).close()
    finally:
        holder.kill()
        holder.communicate()
    store = BufferStore(path)  # what a killed process had is free
    visit_all(store, "a", range(1))
    store.close()
    done = subprocess.run([sys.executable, "-c", HOLDER, str(path)], stdin=subprocess.DEVNULL, check=False)
    assert done.returncode == 0, "and so is what was closed"


def test_a_second_store_of_a_process_does_not_give_its_claim_away(tmp_path):
    """As in a notebook, where a cell that opens a store was run twice."""
    program = f"from rankbuffer_trl import BufferStore; BufferStore({str(tmp_path / 'live.sqlite')!r})"

    def another_gets_it() -> bool:
        done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
        assert not done.returncode or f"is in use by process {os.getpid()} on" in done.stderr
        return not done.returncode

    first, second = (BufferStore(tmp_path / "live.sqlite") for _ in range(2))
    second.close()
    assert not another_gets_it()
    first.close()
    assert another_gets_it()


def test_rows_that_are_not_read_hold_nobody_up(tmp_path, store, monkeypatch):
    monkeypatch.setattr("rankbuffer_trl.store.buffer_store.COMMIT_WAIT", 0)
    store.rows("PRAGMA busy_timeout = 1")
    visit_all(store, "ab", range(2))
    reading = BufferStore(store.path, read_only=True)
    rows = reading.rows("SELECT * FROM responses")
    next(rows)
    visit_all(store, "ab", range(2, 3))
    reading.close()


def test_a_commit_waits_for_a_reader_and_says_so(store, monkeypatch, caplog):
    visit_all(store, "ab", range(2))
    store.rows("PRAGMA busy_timeout = 1")
    reader = sqlite3.connect(store.path)
    rows = reader.execute("SELECT * FROM responses")
    next(rows)
    warnings = []

    def warn(message):
        warnings.append(message)
        if len(warnings) == 3:
            rows.close()

    monkeypatch.setattr("rankbuffer_trl.store.buffer_store.logger.warning", warn)
    visit_all(store, "ab", range(2, 3))
    assert len(warnings) == 3 and "live.sqlite is locked by another process" in warnings[0]
    assert store.last_step() == 2 and store.totals() == Totals.of([call()] * 6)
    reader.close()


def test_a_commit_does_not_wait_for_ever(tmp_path, store, monkeypatch):
    visit_all(store, "ab", range(2))
    store.rows("PRAGMA busy_timeout = 1")
    monkeypatch.setattr("rankbuffer_trl.store.buffer_store.COMMIT_WAIT", 0)
    reader = sqlite3.connect(store.path)
    rows = reader.execute("SELECT * FROM responses")
    next(rows)
    before = contents(store)
    with pytest.raises(StoreError, match=r"cannot write the buffer store .*locked"):
        store.commit(2, [visit("a", 2)])
    rows.close()
    reader.close()
    assert contents(store) == before
    visit_all(store, "ab", range(2, 3))


# Reading for reports


def killed_in_a_commit(path: Path) -> None:
    death = "os.kill(os.getpid(), signal.SIGKILL)"
    program = KILLED.format(tests=str(Path(__file__).parent), path=str(path), death=death)
    subprocess.run([sys.executable, "-c", program], capture_output=True, timeout=120, check=False)
    assert path.with_name(path.name + "-journal").stat().st_size > 0


def test_a_store_killed_in_a_commit_can_be_read_without_a_change_to_it(tmp_path, store):
    path = tmp_path / "run" / "killed.sqlite"
    path.parent.mkdir()
    killed_in_a_commit(path)
    before = {file.name: file.read_bytes() for file in path.parent.iterdir()}
    visit_all(store, "ab", range(2))
    reading = BufferStore(path, read_only=True)
    assert contents(reading) == contents(store)
    assert reading.load("a") == store.load("a")
    reading.close()
    assert {file.name: file.read_bytes() for file in path.parent.iterdir()} == before


def naming(path: Path) -> bytes:
    """What SQLite puts at the end of a journal of several databases: the name of a file that it then deletes."""
    name = str(path).encode()
    checksum = sum(name).to_bytes(4, "big")
    return bytes([0, 4, 0, 1]) + name + len(name).to_bytes(4, "big") + checksum + bytes.fromhex("d9d505f920a163d7")


@pytest.mark.parametrize(
    "use",
    [
        lambda path, store: BufferStore(path, read_only=True),
        lambda path, store: BufferStore(path),
        lambda path, store: store.restore(path.parent),
    ],
    ids=["read", "write", "restore"],
)
def test_a_journal_from_elsewhere_deletes_no_file(tmp_path, store, use):
    path, victim = tmp_path / "run" / STORE, tmp_path / "victim"
    path.parent.mkdir()
    killed_in_a_commit(path)
    victim.write_text("precious")
    journal = path.with_name(path.name + "-journal")
    with journal.open("ab") as file:
        file.write(naming(victim))
    with pytest.raises(StoreError, match=r"store\.sqlite-journal was not written by this program: move"):
        use(path, store)
    assert victim.read_text() == "precious"
    with sqlite3.connect(path) as db:  # as any other program would
        db.execute("SELECT count(*) FROM calls")
    db.close()
    assert not victim.exists(), "the journal is one that deletes"


def test_reading_takes_no_part_in_writing(tmp_path, store):
    visit_all(store, "ab", range(2))
    reading = BufferStore(tmp_path / "live.sqlite", read_only=True)
    with pytest.raises(StoreError, match="readonly"):
        reading.commit(2, [visit("a", 2)])
    visit_all(store, "ab", range(2, 3))
    assert contents(reading) == contents(store)
    reading.close()
    with pytest.raises(StoreError, match=r"nothing\.sqlite is missing: there is no buffer store here"):
        BufferStore(tmp_path / "nothing.sqlite", read_only=True)


def test_read_store_takes_a_run_a_checkpoint_or_a_file(tmp_path):
    live = BufferStore(tmp_path / LIVE_STORE)
    visit_all(live, "ab", range(2))
    live.save(tmp_path / "checkpoint-2" / FOLDER)
    older = contents(live)
    visit_all(live, "ab", range(2, 3))
    expected = {tmp_path: contents(live), tmp_path / LIVE_STORE: contents(live), tmp_path / "checkpoint-2": older}
    for path, rows in expected.items():
        reading = read_store(path)
        assert contents(reading) == rows
        assert reading.query_ids() == ["a", "b"]
        reading.close()
    live.close()
    with pytest.raises(StoreError, match=r"elsewhere/rankbuffer/store\.sqlite is missing"):
        read_store(tmp_path / "elsewhere")


def test_buffers_are_exported_as_a_data_set(tmp_path, store, monkeypatch):
    visit_all(store, "abc", range(3))
    monkeypatch.setattr("rankbuffer_trl.store.export.QUERIES", 2)
    assert export_buffers(store, tmp_path / "out" / "buffers.parquet") == 12
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["buffers.parquet"]
    rows = load_dataset("parquet", data_files=str(tmp_path / "out" / "buffers.parquet"), split="train")
    for id in "abc":
        buffer = store.load(id)
        mine = [row for row in rows if row["query_id"] == id]
        assert [(row["rank"], row["text"], row["source"], row["epoch"], row["inactive"]) for row in mine] == [
            (rank, a.text, a.source, a.epoch, a.h) for rank, a in enumerate(buffer.anchors)
        ]
        assert {(row["size"], row["visits"]) for row in mine} == {(len(buffer), 3)}


def test_an_export_that_fails_leaves_the_older_one(tmp_path, store):
    visit_all(store, "a", range(1))
    path = tmp_path / "buffers.parquet"
    export_buffers(store, path)
    old = path.read_bytes()
    broken = BufferStore(tmp_path / "broken.sqlite")
    visit_all(broken, "a", range(1))
    with sqlite3.connect(tmp_path / "broken.sqlite") as db:
        db.execute("DROP TABLE responses")
    with pytest.raises(StoreError):
        export_buffers(broken, path)
    broken.close()
    assert path.read_bytes() == old
    assert not (tmp_path / "buffers.parquet.tmp").exists()


def another_version(path: Path) -> None:
    BufferStore(path).close()
    with sqlite3.connect(path) as db:
        db.execute("PRAGMA user_version = 1")
    db.close()


# Files that cannot be used


def test_another_format_version_is_refused(tmp_path):
    another_version(tmp_path / "store.sqlite")
    with pytest.raises(StoreError, match=r"store\.sqlite has the format version 1; this program reads version 4"):
        BufferStore(tmp_path / "store.sqlite")
    with pytest.raises(StoreError, match=r"store\.sqlite has the format version 1"):
        BufferStore(tmp_path / "store.sqlite", read_only=True)


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
