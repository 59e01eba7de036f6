"""What the readers of a store count and export, against the calls and groups that went in."""

import re
import shutil
import sqlite3
import tempfile
from collections.abc import Iterable
from itertools import chain
from pathlib import Path

import pytest
from conftest import numbers as numbers_query
from datasets import load_dataset
from helpers.damage import damaged
from helpers.runs import store_of_run as store_of_run
from helpers.visits import visit_all
from hypothesis import given, settings
from hypothesis import strategies as st

from rankbuffer_tools.report import tables
from rankbuffer_trl.buffer import initial_buffer
from rankbuffer_trl.groups import Rollout, RolloutGroup
from rankbuffer_trl.judge import Call, Totals, Usage
from rankbuffer_trl.monitoring import progress
from rankbuffer_trl.monitoring._buffer_table import export_buffers
from rankbuffer_trl.rewards._method import GroupScore
from rankbuffer_trl.store import BufferStore, StoreError, history

CALLS = st.lists(
    st.builds(
        Call,
        method=st.sampled_from(["rankbuffer", "pointwise", "reader"]),
        kind=st.sampled_from(["insert", "fine"]),
        query_id=st.sampled_from(["q0", "q1"]),
        server=st.just("judge"),
        outcome=st.sampled_from(["parsed", "malformed", "unreachable", "cancelled"]),
        attempts=st.integers(0, 5),
        usage=st.builds(Usage, *[st.integers(0, 99)] * 3),
        spent=st.builds(Usage, *[st.integers(0, 999)] * 3),
        seconds=st.integers(0, 9).map(float),
    ),
    max_size=12,
)


@given(steps=st.lists(CALLS, min_size=1, max_size=4), evaluation=CALLS)
@settings(max_examples=settings().max_examples // 5)
def test_totals_in_sql_are_the_sums_over_the_calls(steps, evaluation):
    with tempfile.TemporaryDirectory() as folder:
        check_sums(BufferStore(Path(folder, "store.sqlite")), steps, evaluation)


def check_sums(store, steps, evaluation):
    for step, calls in enumerate(steps):
        store.commit(step, [], calls)
    store.commit(len(steps), [], evaluation, phase="eval")
    every = list(chain.from_iterable(steps))
    assert history.totals(store) == Totals.of(every)
    assert history.totals(store, "eval") == Totals.of(evaluation)
    assert history.totals_by(store, "step") == {i: Totals.of(calls) for i, calls in enumerate(steps) if calls}
    for column in ("kind", "outcome", "method"):
        values = sorted({getattr(call, column) for call in every})
        by_value = {value: [call for call in every if getattr(call, column) == value] for value in values}
        assert history.totals_by(store, column) == {value: Totals.of(calls) for value, calls in by_value.items()}
    assert history.totals_by(store, "epoch") == {}, "no group of these calls was committed"
    for row in tables.judge_table(store):
        calls = [call for call in steps[row["step"]] if call.outcome != "cancelled"]
        assert row["attempts"] == sum(call.attempts for call in calls)
        assert row["calls"] + row["failures"] == len(calls)
    store.close()


def test_totals_by_epoch_are_those_of_its_steps(run, store):
    epochs = {group.step: group.epoch for group, _ in run.visits}
    for epoch, sums in history.totals_by(store, "epoch").items():
        assert sums == Totals.of(call for step, call in run.calls if epochs[step] == epoch)


def test_initial_anchors_are_in_the_order_of_their_numbers(tmp_path):
    query = numbers_query("q", " ".join(map(str, range(5, 65, 5))))
    store = BufferStore(tmp_path / "live.sqlite")
    before = initial_buffer(query.responses, 12)
    store.commit(0, [(RolloutGroup(query, (Rollout(0, "7"),), 0, 0), GroupScore((0.0,), before=before, after=before))])
    assert history.initial_anchors(store) == {"q": [f"initial-{i}" for i in range(12)]}
    assert history.initial_anchors(store, query_id="r") == {}
    store.close()


def test_readers_of_numbers_leave_no_lock_behind(run):
    plain = history.query_ids, history.epochs, history.groups, history.buffers, history.answers_by_step, history.totals
    for read in (*plain, lambda store: history.responses(store, "q0"), lambda store: history.totals_by(store, "step")):
        reader = BufferStore(run.path, read_only=True)
        found = read(reader)
        assert next(iter(found)) is not None if isinstance(found, Iterable) else found.calls
        writer = sqlite3.connect(run.path, timeout=0, isolation_level=None)
        writer.execute("BEGIN EXCLUSIVE")  # would raise "database is locked"
        writer.close()
        reader.close()


def test_export_buffers_writes_a_data_set(tmp_path, run, store, monkeypatch):
    monkeypatch.setattr("rankbuffer_trl.monitoring._buffer_table.QUERIES", 2)
    path = tmp_path / "out" / "buffers.parquet"
    buffers = {id: store.load(id) for id in store.query_ids()}
    assert len(buffers) > 2
    assert export_buffers(store, path) == sum(map(len, buffers.values()))
    assert [file.name for file in path.parent.iterdir()] == [path.name]
    rows = load_dataset("parquet", data_files=str(path), split="train")
    expected = [
        (id, rank, len(buffer), a.text, a.source, a.epoch, a.h, a.id, buffer.visits)
        for id, buffer in buffers.items()
        for rank, a in enumerate(buffer.anchors)
    ]
    assert [tuple(row.values()) for row in rows] == expected


def test_export_buffers_that_fails_leaves_the_older_one(tmp_path, store):
    path = tmp_path / "buffers.parquet"
    export_buffers(store, path)
    old = path.read_bytes()
    broken = BufferStore(tmp_path / "broken.sqlite")
    visit_all(broken, "a", range(1))
    broken.rows("DROP TABLE responses")
    with pytest.raises(StoreError):
        export_buffers(broken, path)
    broken.close()
    assert path.read_bytes() == old
    assert not list(path.parent.glob("*.tmp"))


def test_readers_name_the_row_that_is_damaged(tmp_path, run):
    """Or read on, where the damage is a value that could have been there."""
    shutil.copyfile(run.path, tmp_path / "copy.sqlite")
    store = BufferStore(tmp_path / "copy.sqlite")
    store.rows("PRAGMA synchronous = OFF")
    of_groups = (history.groups, progress.placements)
    columns = {("groups", name): of_groups for name in ("positions", "tiers", "rewards", "added", "pruned")}
    columns["buffers", "anchors"] = (lambda store, query_id: store.load(query_id), history.buffers)
    for (table, column), readers in columns.items():
        ((row, text),) = store.rows(f"SELECT max(rowid), {column} FROM {table} WHERE query_id = 'q0'")
        place = rf"copy\.sqlite, table {table}, query_id 'q0'(, step \d+)?: .*({column}|order|anchor)"
        refused = set()
        for case, changed in damaged(text):
            store.rows(f"UPDATE {table} SET {column} = ? WHERE rowid = ?", (changed, row))
            for reader in readers:
                try:
                    reader(store, query_id="q0")
                except StoreError as error:
                    refused.add(case)
                    assert re.search(place, str(error)) and "\n" not in str(error), f"{column} {case}: {error}"
        store.rows(f"UPDATE {table} SET {column} = ? WHERE rowid = ?", (text, row))
        assert {"cut at 1", "deep", "digits", "number"} <= refused and len(refused) > 12, (column, refused)
    store.rows("UPDATE responses SET id = 'initial-x' WHERE id = 'initial-0' AND query_id = 'q1'")
    for read in (history.initial_anchors, lambda store: history.responses(store, "q1")):
        with pytest.raises(StoreError, match=r"table responses, query_id 'q1'.*initial-<number>, got 'initial-x'"):
            read(store)
    store.rows("UPDATE calls SET seconds = 9e999")
    for read in (history.totals, lambda store: history.totals_by(store, "kind")):
        with pytest.raises(StoreError, match=r"table calls.*seconds must be a finite number, got inf"):
            read(store)
    store.close()


def test_initial_number_orders_the_anchors_of_the_data_set():
    assert [history.initial_number(id) for id in ("initial-0", "initial-10", "3-7", "x")] == [0, 10, -1, -1]
    for id in ("initial-", "initial-x", "initial--1", "initial-1 ", "initial-\u0663", "initial-" + "9" * 5000):
        with pytest.raises(ValueError, match="must be initial-<number>, got 'initial-"):
            history.initial_number(id)
