"""The export of buffers as a data set."""

import sqlite3

import pytest
from datasets import load_dataset
from helpers.visits import visit_all

from rankbuffer_trl.store import BufferStore, StoreError
from rankbuffer_trl.store.export import export_buffers


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
