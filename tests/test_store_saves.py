"""Saves, restores and rewinds of the store: each gives back what was there, and a bad save is refused at no cost."""

import errno
import os
import shutil
import sqlite3
import struct
import tempfile
from contextlib import nullcontext
from pathlib import Path
from unittest.mock import Mock

import pytest
from helpers.contents import TABLES
from helpers.contents import everything as contents
from helpers.visits import call, visit_all
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from rankbuffer_trl.files import replacing, sync
from rankbuffer_trl.store import BufferStore, StoreError
from rankbuffer_trl.store._buffer_store import STORE_FILE

EMPTY = {table: [] for table in TABLES}


class Store(RuleBasedStateMachine):
    """Against the obvious oracle: what stood in the store before each step, and at each save."""

    def __init__(self):
        super().__init__()
        self.temporary = tempfile.TemporaryDirectory()
        self.folder = Path(self.temporary.name)
        self.open()
        self.run, self.runs = 0, 1  # which run the rows belong to, and how many there were
        self.before = [EMPTY]  # the contents before each step, up to the next one
        self.saves: dict[Path, tuple[int, list[dict]]] = {}
        self.aside: list[dict] = []

    def open(self):
        self.store = BufferStore(self.folder / "live.sqlite")
        self.store.rows("PRAGMA synchronous = OFF")

    def start_anew(self, run: int):
        """Another run takes the place of this one. Its rows, if it has any, are kept under another name."""
        if (found := contents(self.store)) != EMPTY:
            self.aside.append(found)
        self.run, self.before = run, [EMPTY]

    @rule(ids=st.sampled_from(["a", "ab", "abc"]))
    def visit(self, ids):
        step = len(self.before) - 1
        visit_all(self.store, ids, range(step, step + 1))
        self.before.append(contents(self.store))

    @rule()
    def evaluate(self):
        self.store.commit(len(self.before) - 1, [], [call("held out")], phase="eval")
        self.before[-1] = contents(self.store)

    @rule(step=st.integers(0, 4), failed=st.booleans())
    def rewind(self, step, failed):
        if failed:  # what the scorer writes before it gives up
            step = len(self.before) - 1
            self.store.commit(step, [], [call(outcome="unreachable")] * 3)
        if step == 0 and contents(self.store) != EMPTY:
            self.start_anew(self.runs)
            self.runs += 1
        self.store.rewind(step)
        del self.before[step + 1 :]

    @rule(number=st.integers(0, 2))
    def save(self, number):
        target = self.folder / f"checkpoint-{number}"
        self.store.save(target)
        assert [path.name for path in target.iterdir()] == [STORE_FILE]
        self.saves[target] = self.run, list(self.before)

    @precondition(lambda self: self.saves)
    @rule(data=st.data())
    def restore(self, data):
        path = data.draw(st.sampled_from(sorted(self.saves)))
        run, before = self.saves[path]
        if run != self.run:
            self.start_anew(run)
        self.store.restore(path)
        self.before = list(before)

    @precondition(lambda self: self.saves)
    @rule(data=st.data())
    def restore_elsewhere(self, data):
        """On a machine that has nothing else."""
        path = data.draw(st.sampled_from(sorted(self.saves)))
        with tempfile.TemporaryDirectory() as elsewhere:
            away = BufferStore(Path(elsewhere, "live.sqlite"))
            away.restore(shutil.copytree(path, Path(elsewhere, "copy")))
            assert contents(away) == self.saves[path][1][-1]
            away.close()

    @rule()
    def reopen(self):
        self.store.close()
        self.open()

    @invariant()
    def holds_what_it_should(self):
        assert contents(self.store) == self.before[-1]

    def teardown(self):
        self.store.close()
        names = sorted(self.folder.glob("live-*.sqlite"), key=lambda path: int(path.stem.partition("-")[2]))
        assert [contents(path) for path in names] == self.aside
        self.temporary.cleanup()


TestStore = Store.TestCase
TestStore.settings = settings(max_examples=settings().max_examples // 5, stateful_step_count=15)


def test_save_and_restore_work_whatever_the_folders_name(tmp_path):
    for name in ("with space", "teapot-é-🫖", "exp#3", "exp?3", "100%", "lr%41", "a&mode=rw", "q'\""):
        store = BufferStore(tmp_path / name / "live.sqlite")
        visit_all(store, "ab", range(2))
        expected = contents(store)
        store.save(tmp_path / name / "saved")
        visit_all(store, "abc", range(2, 3))
        store.restore(tmp_path / name / "saved")
        assert contents(store) == expected, name
        assert [path.name for path in (tmp_path / name).glob("*.sqlite")] == ["live.sqlite"]
        store.close()


def test_rewind_that_cannot_set_the_store_aside_leaves_it_open(store, monkeypatch):
    visit_all(store, "a", range(1))
    before = contents(store)
    with monkeypatch.context() as patch, pytest.raises(StoreError, match="cannot rewind"):
        patch.setattr(Path, "rename", Mock(side_effect=PermissionError(13, "Permission denied")))
        store.rewind(0)
    assert contents(store) == before
    store.rewind(0)
    assert contents(store) == EMPTY


@pytest.mark.parametrize("accident", ["the draft cannot be made", "os.replace", "os.fsync"])
def test_save_that_fails_leaves_the_older_one_and_can_be_repeated(tmp_path, store, monkeypatch, accident):
    older, newer = tmp_path / "older", tmp_path / "newer"
    visit_all(store, "a", range(1))
    store.save(older)
    old = contents(store)
    visit_all(store, "a", range(1, 2))
    before, draft = contents(store), newer / f"{STORE_FILE}.0.tmp"
    with monkeypatch.context() as patch:
        if accident.startswith("os."):
            patch.setattr(accident, Mock(side_effect=OSError(28, "No space left on device")))
        else:
            patch.setattr("secrets.token_hex", lambda size: "0")
            draft.mkdir(parents=True)
        with pytest.raises(StoreError, match=r"cannot save the buffer store .* to .*newer"):
            store.save(newer)
    assert contents(store) == before
    with pytest.raises(StoreError, match=r"store\.sqlite is missing"):
        store.restore(newer)
    store.save(newer)
    for path, rows in ((older, old), (newer, before)):
        store.restore(path)
        assert contents(store) == rows


# Files that are no store of this version


def execute(*statements: str):
    def change(file: Path) -> None:
        with sqlite3.connect(file) as db:
            for statement in statements:
                db.execute(statement)
        db.close()

    return change


ENDLESS = "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n) SELECT 'q', i, 'x', 1, 1, 1, 1 FROM n"
TRIGGER = "CREATE TRIGGER t AFTER INSERT ON groups BEGIN DELETE FROM calls; END"
VIRTUAL = "CREATE VIRTUAL TABLE calls USING fts5"
COMPUTES = "ALTER TABLE calls ADD COLUMN x ANY AS (hex(error))"
UNTYPED = "UPDATE sqlite_master SET sql = replace(sql, ' STRICT', '')"
STRANGE = "is not a buffer store: missing or not as this program makes it: .*"
BAD_SAVES = {
    "no folder": (lambda file: shutil.rmtree(file.parent), r"store\.sqlite is missing"),
    "no file": (Path.unlink, r"store\.sqlite is missing"),
    "a text": (
        lambda file: file.write_text("Dear diary, " * 100),
        "not a database. The file is damaged: move it away",
    ),
    "another version": (execute("PRAGMA user_version = 3"), "format version 3; this program reads version 4"),
    "half a file": (lambda file: os.truncate(file, 8192), "malformed"),
    "a view": (execute("DROP TABLE buffers", f"CREATE VIEW buffers AS {ENDLESS}"), f"{STRANGE}view 'buffers'"),
    "a trigger": (execute(TRIGGER), f"{STRANGE}trigger 't'"),
    "a virtual table": (execute("DROP TABLE calls", f"{VIRTUAL}(step, phase)"), f"{STRANGE}table 'calls'"),
    "a column that computes": (execute(COMPUTES), f"{STRANGE}table 'calls'"),
    "no table": (execute("DROP TABLE groups"), f"{STRANGE}table 'groups'"),
    "text for a number": (execute("PRAGMA writable_schema = ON", UNTYPED), STRANGE),
}


@pytest.mark.parametrize("case", BAD_SAVES)
def test_restore_refuses_a_bad_save_at_no_cost(tmp_path, store, case):
    other = BufferStore(tmp_path / "other.sqlite")
    visit_all(other, "b", range(2))
    other.save(tmp_path / "saved")
    other.close()
    bad = tmp_path / "saved" / STORE_FILE
    spoil, message = BAD_SAVES[case]
    spoil(bad)
    visit_all(store, "a", range(2))
    before, files = contents(store), {path.name for path in tmp_path.iterdir()}
    with pytest.raises(StoreError, match=message):
        store.restore(tmp_path / "saved")
    assert contents(store) == before
    assert {path.name for path in tmp_path.iterdir()} == files
    visit_all(store, "a", range(2, 3))
    with pytest.raises(StoreError, match=message):
        BufferStore(bad, read_only=True).rows("SELECT * FROM calls")
    if bad.is_file():
        spoiled = bad.read_bytes()
        with pytest.raises(StoreError, match=message):
            BufferStore(bad)
        assert bad.read_bytes() == spoiled, "it is left alone"


def fan(page: int, size: int) -> bytes:
    """An inner page of a table whose hundred children are all the same page."""
    cells = [size - 5 * (i + 1) for i in range(100)]
    content = bytearray(size)
    content[:12] = struct.pack(">BHHHBI", 5, 0, len(cells), cells[-1], 0, page)
    for i, place in enumerate(cells):
        content[12 + 2 * i : 14 + 2 * i] = place.to_bytes(2, "big")
        content[place : place + 5] = page.to_bytes(4, "big") + b"\x01"
    return bytes(content)


def test_restore_fills_no_disk_from_a_small_file(tmp_path, store):
    """SQLite reads a forged table from two pages that stand for 10,000, and finds no fault with it."""
    visit_all(store, "a", range(2))
    store.save(tmp_path / "saved")
    saved, before = tmp_path / "saved" / STORE_FILE, contents(store)
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


def test_restore_refuses_a_value_of_another_type(tmp_path, store):
    """Its definition is as it should be, but a row was written when it was not."""
    visit_all(store, "a", range(2))
    store.save(tmp_path / "saved")
    saved, before = tmp_path / "saved" / STORE_FILE, contents(store)
    with sqlite3.connect(saved) as db:
        ((right,),) = db.execute("SELECT sql FROM sqlite_master WHERE name = 'calls'")
    db.close()
    back = f"UPDATE sqlite_master SET sql = '{right}' WHERE name = 'calls'"
    execute("PRAGMA writable_schema = ON", f"{UNTYPED} WHERE name = 'calls'")(saved)
    execute("UPDATE calls SET step = 'many'", "PRAGMA writable_schema = ON", back)(saved)
    with pytest.raises(StoreError, match=r"cannot restore .*TEXT value in INTEGER column calls\.step"):
        store.restore(tmp_path / "saved")
    assert contents(store) == before


def test_replacing_by_two_writers_at_once_leaves_the_whole_file_of_the_last(tmp_path):
    path = tmp_path / "summary.json"
    with replacing(path) as slow:
        slow.write_text("of the slow one")
        with replacing(path) as quick:
            quick.write_text("of the quick one")
        assert path.read_text() == "of the quick one"
    assert path.read_text() == "of the slow one" and list(tmp_path.iterdir()) == [path]
    fresh, abandoned = (tmp_path / f"summary.json.{name}.tmp" for name in ("fresh", "abandoned"))
    for draft in (fresh, abandoned):
        draft.write_text("{")
    os.utime(abandoned, (0, 0))
    with replacing(path) as draft:
        draft.write_text("{}")
    assert sorted(tmp_path.iterdir()) == sorted([path, fresh]), "a draft that nobody writes any more is deleted"


def test_sync_takes_a_folder_for_which_a_file_system_has_no_fsync(tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    for code, folder_fails in ((errno.EINVAL, False), (errno.ENOTSUP, False), (errno.ENOSPC, True)):
        monkeypatch.setattr(os, "fsync", Mock(side_effect=OSError(code, "no")))
        for path, fails in ((tmp_path, folder_fails), (tmp_path / "file", True)):
            with pytest.raises(OSError, match="no") if fails else nullcontext():
                sync(path)
