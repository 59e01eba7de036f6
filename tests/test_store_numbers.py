"""What the readers of a store count, against the calls and groups that went in."""

import re
import sqlite3
import tempfile
from collections.abc import Iterable
from itertools import chain
from pathlib import Path

import pytest
from conftest import ROOT
from hypothesis import given, settings
from hypothesis import strategies as st

from rankbuffer_lab.report import tables
from rankbuffer_trl.judge import Call, Totals, Usage
from rankbuffer_trl.store import BufferStore, numbers


@pytest.fixture(scope="module")
def store(run):
    store = BufferStore(run.path)
    yield store
    store.close()


CALLS = st.lists(
    st.builds(
        Call,
        method=st.sampled_from(["rankbuffer", "pointwise"]),
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
@settings(max_examples=30, deadline=None)
def test_the_ledgers_sums_in_sql_are_those_over_its_calls(steps, evaluation):
    with tempfile.TemporaryDirectory() as folder:
        check_sums(BufferStore(Path(folder, "store.sqlite")), steps, evaluation)


def check_sums(store, steps, evaluation):
    for step, calls in enumerate(steps):
        store.commit(step, [], calls)
    store.commit(len(steps), [], evaluation, phase="eval")
    every = list(chain.from_iterable(steps))
    assert numbers.totals(store) == Totals.of(every)
    assert numbers.totals(store, "eval") == Totals.of(evaluation)
    assert numbers.totals_by(store, "step") == {i: Totals.of(calls) for i, calls in enumerate(steps) if calls}
    for column in ("kind", "outcome", "method"):
        values = sorted({getattr(call, column) for call in every})
        by_value = {value: [call for call in every if getattr(call, column) == value] for value in values}
        assert numbers.totals_by(store, column) == {value: Totals.of(calls) for value, calls in by_value.items()}
    assert numbers.totals_by(store, "epoch") == {}, "no group of these calls was committed"
    for row in tables.judge_table(store):
        calls = [call for call in steps[row["step"]] if call.outcome != "cancelled"]
        assert row["attempts"] == sum(call.attempts for call in calls)
        assert row["calls"] + row["failures"] == len(calls)
    store.close()


def test_costs_by_epoch_are_those_of_its_steps(run, store):
    epochs = {group.step: group.epoch for group, _ in run.visits}
    for epoch, sums in numbers.totals_by(store, "epoch").items():
        assert sums == Totals.of(call for step, call in run.calls if epochs[step] == epoch)


@pytest.mark.parametrize(
    "read",
    [
        numbers.query_ids,
        numbers.epochs,
        numbers.groups,
        numbers.buffers,
        numbers.answers_by_step,
        numbers.totals,
        lambda store: numbers.responses(store, "q0"),
        lambda store: numbers.totals_by(store, "step"),
    ],
)
def test_a_reader_of_numbers_leaves_no_lock_behind(run, read):
    reader = BufferStore(run.path, read_only=True)
    found = read(reader)
    assert next(iter(found)) is not None if isinstance(found, Iterable) else found.calls
    writer = sqlite3.connect(run.path, timeout=0, isolation_level=None)
    writer.execute("BEGIN EXCLUSIVE")  # would raise "database is locked"
    writer.close()
    reader.close()


def test_all_sql_of_the_package_is_in_the_folder_of_the_store():
    package = ROOT / "rankbuffer_trl"
    outside = [path for path in package.rglob("*.py") if path.parent != package / "store"]
    assert len(outside) > 50
    assert not [path for path in outside if re.search(r"\b(SELECT|INSERT|DELETE FROM|PRAGMA)\b", path.read_text())]
