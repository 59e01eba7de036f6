"""The SQLite file of a buffer store: its tables, and how it is opened."""

import shutil
import sqlite3
import tempfile
from pathlib import Path

from ..errors import RankBufferError

VERSION = 4
SCHEMA = f"""
CREATE TABLE IF NOT EXISTS responses (          -- every answered rollout, and the initial anchors of visited queries
    query_id TEXT NOT NULL, id TEXT NOT NULL, step INTEGER NOT NULL, text TEXT NOT NULL);
CREATE UNIQUE INDEX IF NOT EXISTS response_key ON responses (query_id, id);
CREATE TABLE IF NOT EXISTS buffers (            -- one version per visit; anchors is JSON [[id, source, epoch, h], ...]
    query_id TEXT NOT NULL, step INTEGER NOT NULL, anchors TEXT NOT NULL,
    left_epoch INTEGER, right_epoch INTEGER, observed_epoch INTEGER, visits INTEGER NOT NULL,
    PRIMARY KEY (query_id, step));
CREATE TABLE IF NOT EXISTS groups (             -- one row per scored group; JSON in the last five
    query_id TEXT NOT NULL, step INTEGER NOT NULL, epoch INTEGER NOT NULL, k INTEGER NOT NULL,
    positions TEXT NOT NULL, tiers TEXT NOT NULL, rewards TEXT NOT NULL, added TEXT NOT NULL, pruned TEXT NOT NULL,
    PRIMARY KEY (query_id, step));
CREATE INDEX IF NOT EXISTS group_step ON groups (step);
CREATE TABLE IF NOT EXISTS calls (              -- the judge ledger
    step INTEGER NOT NULL, phase TEXT NOT NULL, method TEXT NOT NULL, kind TEXT NOT NULL, query_id TEXT NOT NULL,
    server TEXT NOT NULL, outcome TEXT NOT NULL, attempts INTEGER NOT NULL, malformed INTEGER NOT NULL,
    prompt_tokens INTEGER NOT NULL, cached_tokens INTEGER NOT NULL, completion_tokens INTEGER NOT NULL,
    spent_prompt_tokens INTEGER NOT NULL, spent_cached_tokens INTEGER NOT NULL,
    spent_completion_tokens INTEGER NOT NULL, seconds REAL NOT NULL, error TEXT NOT NULL);
CREATE INDEX IF NOT EXISTS call_step ON calls (step);
CREATE TABLE IF NOT EXISTS segments (           -- what of the tables above is in which file; segments.py
    number INTEGER PRIMARY KEY, name TEXT NOT NULL, bytes INTEGER NOT NULL, sha256 TEXT NOT NULL,
    ends TEXT NOT NULL, totals TEXT NOT NULL);
PRAGMA user_version = {VERSION};
"""


class StoreError(RankBufferError, RuntimeError):
    """The buffer store cannot be opened, read or written."""


def open_to_write(path: Path | None) -> sqlite3.Connection:
    """Open a store and make what is missing of it; without a path, in a temporary file.

    Raises:
        [`StoreError`]: if another version wrote it.
    """
    db = connect(path)
    check_version(db, path, allowed=(0, VERSION))
    db.executescript("PRAGMA journal_mode = TRUNCATE; PRAGMA synchronous = FULL;" + SCHEMA)
    return db


def open_to_read(path: Path) -> sqlite3.Connection:
    """Open a store without a change to it, also one that a killed run left in the middle of a commit.

    What a commit left behind is rolled back in a temporary copy, so that nothing need be writable here.

    Raises:
        [`StoreError`]: if there is none, or another version wrote it.
    """
    if not path.is_file():
        raise StoreError(f"there is no buffer store at {path}")
    db = connect(path, mode="ro")
    try:
        version(db)
    except sqlite3.OperationalError:
        journal = path.with_name(path.name + "-journal")
        if not journal.is_file():
            raise
        db.close()
        db = connect(None)
        with tempfile.TemporaryDirectory(prefix="rankbuffer-") as folder:
            for file in (path, journal):
                shutil.copyfile(file, Path(folder, file.name))
            copy = connect(Path(folder, path.name))
            copy.backup(db)
            copy.close()
    check_version(db, path, allowed=(VERSION,))
    return db


def connect(path: Path | None, mode: str = "rwc") -> sqlite3.Connection:
    """Open an SQLite file, a temporary one if there is no path."""
    if path is None:
        return sqlite3.connect("", uri=True, check_same_thread=False)
    if mode == "rwc":
        path.parent.mkdir(parents=True, exist_ok=True)
    uri = f"{path.absolute().as_uri()}?mode={mode}"
    return sqlite3.connect(uri, uri=True, timeout=60, check_same_thread=False)


def version(db: sqlite3.Connection) -> int:
    """The format version of an open store; 0 if the file is new."""
    return db.execute("PRAGMA user_version").fetchone()[0]


def check_version(db: sqlite3.Connection, path: Path | None, allowed: tuple[int, ...]) -> None:
    """Refuse a store of another format version.

    Raises:
        [`StoreError`]: naming both versions.
    """
    found = version(db)
    if found not in allowed:
        db.close()
        raise StoreError(f"{path} has the format version {found}; this program reads version {VERSION}")
