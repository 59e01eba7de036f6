"""A report opens runs: finished, being written, killed, or a checkpoint; and it names what is no run."""

import json
import shutil
import sqlite3

import pytest

from rankbuffer_tools.report.runs import open_runs, run_names
from rankbuffer_trl.checkpointing.manifest import FOLDER, RUN
from rankbuffer_trl.store import BufferStore, StoreError
from rankbuffer_trl.store._database import VERSION
from rankbuffer_trl.store._places import LIVE_STORE

MANIFEST = {"format": VERSION, "processes": 1, "config": {}, "files": {}, "store_sha256": ""}


def test_open_runs_reads_a_run_that_is_being_written_and_holds_nothing_up(run, tmp_path):
    live = tmp_path / "run" / LIVE_STORE
    live.parent.mkdir(parents=True)
    shutil.copyfile(run.path, live)
    writer = sqlite3.connect(live, timeout=0.1, isolation_level=None)
    writer.execute("BEGIN IMMEDIATE")
    writer.execute("INSERT INTO responses VALUES ('new', '99-0', 99, 'half a step')")
    with open_runs([tmp_path / "run"]) as (opened,):
        writer.execute("COMMIT")  # would raise "database is locked" if the report held the file
        assert opened.store.last_step() == run.visits[-1][0].step
        assert not list(opened.store.rows("SELECT 1 FROM responses WHERE query_id = 'new'"))
    writer.close()
    with open_runs([tmp_path / "run"]) as (opened,):
        assert list(opened.store.rows("SELECT text FROM responses WHERE query_id = 'new'")) == [("half a step",)]


def test_open_runs_rolls_a_killed_run_back_in_the_copy(run, tmp_path):
    (tmp_path / "at").mkdir()
    writing = tmp_path / "at" / "live.sqlite"
    shutil.copyfile(run.path, writing)
    writer = sqlite3.connect(writing, isolation_level=None)
    writer.executescript("PRAGMA journal_mode = TRUNCATE; PRAGMA cache_size = 2; PRAGMA cache_spill = 2;")
    writer.execute("BEGIN")
    for i in range(500):
        writer.execute("INSERT INTO responses VALUES ('half', ?, 99, ?)", (f"99-{i}", "x" * 2000))
    killed = tmp_path / "run" / LIVE_STORE.parent
    shutil.copytree(writing.parent, killed)
    writer.execute("ROLLBACK")
    writer.close()
    before = {path.name: path.read_bytes() for path in killed.iterdir()}
    assert before["live.sqlite-journal"] and before["live.sqlite"] != run.path.read_bytes()
    with open_runs([tmp_path / "run"]) as (opened,):
        assert not list(opened.store.rows("SELECT 1 FROM responses WHERE query_id = 'half'"))
        assert opened.store.last_step() == run.visits[-1][0].step
    assert {path.name: path.read_bytes() for path in killed.iterdir()} == before


def test_open_runs_takes_a_checkpoint_with_its_log(run, tmp_path):
    log = [{"step": 1, "judge/seconds": 2.0, "rank/below_noise": 1.0}]  # the last is of an older version
    store = BufferStore(run.path)
    for step in (2, 10, 11):
        folder = tmp_path / f"checkpoint-{step}"
        store.save(folder / FOLDER)
        (folder / "trainer_state.json").write_text(json.dumps({"log_history": log * step}))
        if step < 11:  # the last one is just being written: it has no manifest yet
            (folder / FOLDER / RUN).write_text(json.dumps(MANIFEST | {"step": step}))
    store.save(tmp_path / "pulled" / FOLDER)
    store.close()
    with open_runs([tmp_path, tmp_path / "checkpoint-2", run.path, tmp_path / "pulled"]) as (whole, second, file, end):
        assert (len(whole.log), len(second.log), len(file.log), len(end.log)) == (10, 2, 0, 0)
        assert [opened.manifest.get("step") for opened in (whole, second, file, end)] == [10, 2, None, None]
        assert list(whole.store.rows("SELECT * FROM groups")) == list(end.store.rows("SELECT * FROM groups"))
        assert list(whole.store.rows("SELECT * FROM groups")) == list(file.store.rows("SELECT * FROM groups"))


def test_open_runs_names_what_is_no_run(tmp_path):
    (tmp_path / "folder").mkdir()
    BufferStore(tmp_path / "empty" / LIVE_STORE).close()
    (tmp_path / "file").write_text("hello")
    said = {"nothing": "does not exist", "folder": "is not a run", "empty": "no scored group yet", "file": "cannot"}
    for name, message in said.items():
        with pytest.raises(StoreError, match=message), open_runs([tmp_path / name]):
            pass


def test_run_names_are_what_tells_runs_apart(tmp_path):
    paths = [tmp_path / name for name in ("a/train", "b/train", "c/other", "c/other")]
    assert run_names(paths) == ["a/train", "b/train", "other", "other (2)"]
    assert run_names(paths[:1]) == ["a/train"]
