"""The file of a buffer store: one process writes, any number read, and what is no store is refused by name."""

import errno
import os
import re
import shutil
import socket
import sqlite3
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
from helpers.contents import everything as contents
from helpers.forks import fork, wait
from helpers.visits import call, killed_in_a_commit, visit, visit_all

from rankbuffer_trl.checkpointing.manifest import FOLDER
from rankbuffer_trl.files import lock_descriptor
from rankbuffer_trl.judge import Totals
from rankbuffer_trl.store import BufferStore, StoreError
from rankbuffer_trl.store._buffer_store import STORE_FILE
from rankbuffer_trl.store._places import LIVE_STORE, read_store

# Several processes

HOLDER = """
import sys
from rankbuffer_trl.store import BufferStore
store = BufferStore(sys.argv[1])
print("mine", flush=True)
sys.stdin.read()
"""


def test_lock_lets_one_process_write_until_it_ends(tmp_path):
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
    BufferStore(path).close()  # what a killed process had is free


@pytest.mark.parametrize("system", ["linux", "darwin"])
def test_lock_descriptor_refuses_a_second_holder_on_each_system(tmp_path, monkeypatch, system):
    monkeypatch.setattr("rankbuffer_trl.files.sys", SimpleNamespace(platform=system))
    if system == "darwin":  # where a lock in the layout of Linux is no valid argument
        monkeypatch.setattr("rankbuffer_trl.files.fcntl.fcntl", Mock(side_effect=OSError(errno.EINVAL, "layout")))
    with (tmp_path / "lock").open("w") as first, (tmp_path / "lock").open("w") as second:
        lock_descriptor(first.fileno())
        with pytest.raises((BlockingIOError, PermissionError)):
            lock_descriptor(second.fileno())


def another_gets(path: Path) -> bool:
    words = [sys.executable, "-c", HOLDER, str(path)]
    done = subprocess.run(words, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)
    assert not done.returncode or f"is in use by process {os.getpid()} on" in done.stderr
    return not done.returncode


def test_unlock_keeps_the_claim_of_another_store_of_the_process(tmp_path):
    """As in a notebook, where a cell that opens a store was run twice, and a callback copies the folder."""
    path = tmp_path / "run" / "live.sqlite"
    first, second = (BufferStore(path) for _ in range(2))
    shutil.copytree(path.parent, tmp_path / "copy")  # opens and closes the file of the lock
    second.close()
    second.close()
    assert not another_gets(path)
    first.close()
    assert another_gets(path)


@pytest.mark.parametrize("write", ["commit", "rewind", "restore"])
def test_check_claim_stops_a_run_whose_lock_file_is_another_one_now(tmp_path, write):
    path, first = tmp_path / "live.sqlite", BufferStore(tmp_path / "live.sqlite")
    visit_all(first, "ab", range(2))
    first.save(tmp_path)
    writes = {"commit": lambda: visit_all(first, "ab", range(2, 3)), "restore": lambda: first.restore(tmp_path)}
    path.with_suffix(".lock").unlink()
    before, inode = contents(path), path.stat().st_ino
    for _ in range(2):
        with pytest.raises(StoreError, match=r"live\.lock was replaced or deleted .*: stop both, then resume"):
            writes.get(write, lambda: first.rewind(0))()
        assert contents(path) == before and path.stat().st_ino == inode
        shutil.copy(__file__, path.with_suffix(".lock"))
    assert another_gets(path)
    first.close()


def test_lock_is_that_of_the_parent_after_a_fork(tmp_path):
    """A child that trains is refused, and one that outlives its parent's claim does not keep it."""
    path, (read, write) = tmp_path / "live.sqlite", os.pipe()
    store = BufferStore(path)

    def work():
        os.close(write)
        with pytest.raises(StoreError, match=f"is in use by process {os.getppid()} on"):
            BufferStore(path)
        store.close()  # as at the end of any process
        os.read(read, 1)

    child = fork(work, tmp_path / "log")
    assert not another_gets(path)
    store.close()
    assert another_gets(path)
    os.close(write)
    assert wait([child]) == [0], (tmp_path / "log").read_text()


@pytest.fixture
def read_halfway(store):
    """A store with two steps, and the rows of a reader that holds it up."""
    visit_all(store, "ab", range(2))
    store.rows("PRAGMA busy_timeout = 1")
    reader = sqlite3.connect(store.path)
    rows = reader.execute("SELECT * FROM responses")
    next(rows)
    yield rows
    rows.close()
    reader.close()


def test_commit_waits_for_a_reader_and_says_so(store, read_halfway, monkeypatch):
    warnings = []

    def warn(message):
        warnings.append(message)
        if len(warnings) == 3:
            read_halfway.close()

    monkeypatch.setattr("rankbuffer_trl.store._buffer_store.logger.warning", warn)
    visit_all(store, "ab", range(2, 3))
    assert len(warnings) == 3 and "live.sqlite is locked by another process" in warnings[0]
    assert store.last_step() == 2 and store.totals() == Totals.of([call()] * 6)


def test_commit_does_not_wait_for_ever(store, read_halfway, monkeypatch):
    monkeypatch.setattr("rankbuffer_trl.store._buffer_store.COMMIT_WAIT", 0)
    before = contents(store)
    with pytest.raises(StoreError, match=r"cannot write the buffer store .*locked"):
        store.commit(2, [visit("a", 2)])
    read_halfway.close()
    assert contents(store) == before
    visit_all(store, "ab", range(2, 3))


# Reading for reports


def test_open_after_a_kill_in_a_commit_loses_this_commit_alone_and_to_read_it_changes_nothing(tmp_path, store):
    path = tmp_path / "run" / "killed.sqlite"
    path.parent.mkdir()
    killed_in_a_commit(path)
    before = {file.name: file.read_bytes() for file in path.parent.iterdir()}
    visit_all(store, "ab", range(2))
    for read_only in (True, False):
        assert {file.name: file.read_bytes() for file in path.parent.iterdir()} == before
        survivor = BufferStore(path, read_only=read_only)
        assert contents(survivor) == contents(store)
        assert survivor.load("a") == store.load("a")
        if not read_only:
            assert list(survivor.rows("PRAGMA integrity_check")) == [("ok",)]
            visit_all(survivor, "ab", range(2, 3))
        survivor.close()


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
def test_connect_refuses_a_journal_that_would_delete_a_file(tmp_path, store, use):
    path, victim = tmp_path / "run" / STORE_FILE, tmp_path / "victim"
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
    if sqlite3.sqlite_version_info < (3, 50):  # a newer one knows better
        assert not victim.exists(), "the journal is one that deletes"


def test_open_to_read_takes_no_part_in_writing_and_rows_that_are_not_read_hold_nobody_up(tmp_path, store, monkeypatch):
    monkeypatch.setattr("rankbuffer_trl.store._buffer_store.COMMIT_WAIT", 0)
    store.rows("PRAGMA busy_timeout = 1")
    visit_all(store, "ab", range(2))
    reading = BufferStore(tmp_path / "live.sqlite", read_only=True)
    with pytest.raises(StoreError, match="readonly"):
        reading.commit(2, [visit("a", 2)])
    next(reading.rows("SELECT * FROM responses"))
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


def test_path_that_can_hold_no_store_is_refused_by_name(tmp_path, store):
    (tmp_path / "file").write_text("not a folder")
    below = tmp_path / "file" / "below"
    with pytest.raises(StoreError, match=r"cannot open the buffer store .*file/below/store\.sqlite"):
        BufferStore(below / "store.sqlite")
    with pytest.raises(StoreError, match=r"cannot save the buffer store .* to .*file/below"):
        store.save(below)
    with pytest.raises(StoreError, match="cannot open the buffer store"):
        BufferStore(tmp_path)
