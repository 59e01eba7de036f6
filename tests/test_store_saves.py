"""Saves of the buffer store: each gives back what the store held, and a bad one is refused and costs nothing."""

import os
import shutil
import sqlite3
import struct
import tempfile
from functools import partial
from pathlib import Path

import pytest
from helpers import contents as stored
from helpers.visits import call, visit_all
from hypothesis import given, settings
from hypothesis import strategies as st

from rankbuffer_trl.judge import Totals
from rankbuffer_trl.store import BufferStore, StoreError
from rankbuffer_trl.store.buffer_store import STORE

contents = partial(stored.contents, seconds=True)


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
