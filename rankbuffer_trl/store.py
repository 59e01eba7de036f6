"""Where buffers live: one SQLite file, one transaction per training step, every row marked with its step.

A buffer is never overwritten: each visit adds a version, and an anchor refers to a response that is stored once. The
newest version of a query is its buffer; all versions together with the table `groups` are the run's history. A journal
file is used, not WAL, because runs write to network file systems. What was left out: more than one writer. The main
process owns the file.
"""

import json
import os
import sqlite3
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from .buffer import Anchor, AnchorBuffer
from .groups import RolloutGroup
from .judge import Call, Totals
from .judge.ledger import FAILURES
from .score import GroupScore

VERSION = 2
SCHEMA = f"""
CREATE TABLE IF NOT EXISTS responses (          -- every answered rollout, and the initial anchors of visited queries
    query_id TEXT NOT NULL, id TEXT NOT NULL, step INTEGER NOT NULL, text TEXT NOT NULL);
CREATE UNIQUE INDEX IF NOT EXISTS response_key ON responses (query_id, id);
CREATE TABLE IF NOT EXISTS buffers (            -- one version per visit; anchors is JSON [[id, source, epoch, h], ...]
    query_id TEXT NOT NULL, step INTEGER NOT NULL, anchors TEXT NOT NULL,
    left_epoch INTEGER, right_epoch INTEGER, observed_epoch INTEGER, visits INTEGER NOT NULL,
    PRIMARY KEY (query_id, step)) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS groups (             -- one row per scored group; JSON in the last five
    query_id TEXT NOT NULL, step INTEGER NOT NULL, epoch INTEGER NOT NULL, k INTEGER NOT NULL,
    positions TEXT NOT NULL, tiers TEXT NOT NULL, rewards TEXT NOT NULL, added TEXT NOT NULL, pruned TEXT NOT NULL,
    PRIMARY KEY (query_id, step)) WITHOUT ROWID;
CREATE INDEX IF NOT EXISTS group_step ON groups (step);
CREATE TABLE IF NOT EXISTS calls (              -- the judge ledger
    step INTEGER NOT NULL, phase TEXT NOT NULL, method TEXT NOT NULL, kind TEXT NOT NULL, query_id TEXT NOT NULL,
    server TEXT NOT NULL, outcome TEXT NOT NULL, attempts INTEGER NOT NULL,
    prompt_tokens INTEGER NOT NULL, cached_tokens INTEGER NOT NULL, completion_tokens INTEGER NOT NULL,
    spent_prompt_tokens INTEGER NOT NULL, spent_cached_tokens INTEGER NOT NULL,
    spent_completion_tokens INTEGER NOT NULL, seconds REAL NOT NULL, error TEXT NOT NULL);
PRAGMA user_version = {VERSION};
"""


def version(db: sqlite3.Connection) -> int:
    """The format version of an open store; 0 if the file is new."""
    return db.execute("PRAGMA user_version").fetchone()[0]


class StoreError(RuntimeError):
    """The buffer store cannot be opened, read or written."""


class BufferStore:
    """The persistent buffers and history of a run.

    Args:
        path (`str` or `Path`):
            The SQLite file; it and its folder are made if missing.

    Raises:
        [`StoreError`]: if the file cannot be opened or was not written by this version.
    """

    def __init__(self, path: str | Path):
        self.path = Path(path)
        with self._errors("open"):
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._db = sqlite3.connect(self.path, timeout=60, check_same_thread=False)
            if version(self._db) not in (0, VERSION):
                raise StoreError(
                    f"{self.path} has the format version {version(self._db)}; this program reads version {VERSION}"
                )
            self._db.executescript("PRAGMA journal_mode = TRUNCATE; PRAGMA synchronous = FULL;" + SCHEMA)

    def load(self, query_id: str) -> AnchorBuffer | None:
        """The newest buffer of a query, `None` if it has none yet."""
        with self._errors("read"):
            row = self._db.execute(
                "SELECT anchors, left_epoch, right_epoch, observed_epoch, visits FROM buffers"
                " WHERE query_id = ? ORDER BY step DESC LIMIT 1",
                (query_id,),
            ).fetchone()
            if row is None:
                return None
            anchors, *markers = json.loads(row[0]), *row[1:]
            marks = ",".join("?" * len(anchors))
            texts = dict(
                self._db.execute(
                    f"SELECT id, text FROM responses WHERE query_id = ? AND id IN ({marks})",
                    (query_id, *(anchor[0] for anchor in anchors)),
                )
            )
            return AnchorBuffer(tuple(Anchor(id, texts[id], *rest) for id, *rest in anchors), *markers)

    def has_group(self, query_id: str, step: int) -> bool:
        """Whether this query was already scored in this step."""
        with self._errors("read"):
            found = self._db.execute("SELECT 1 FROM groups WHERE query_id = ? AND step = ?", (query_id, step))
            return found.fetchone() is not None

    def commit(
        self,
        step: int,
        scored: Sequence[tuple[RolloutGroup, GroupScore]],
        calls: Iterable[Call] = (),
        phase: str = "train",
    ) -> None:
        """Write one step in one transaction: all its groups, their next buffers and the calls, or nothing.

        Args:
            step (`int`):
                The trainer's global step.
            scored (`Sequence[tuple[RolloutGroup, GroupScore]]`):
                Groups to record, each query at most once.
            calls (`Iterable[Call]`, *optional*):
                The judge calls of the step.
            phase (`str`, *optional*, defaults to `"train"`):
                `train` or `eval`.
        """
        with self._errors("write"), self._db:
            for group, score in scored:
                self._write_group(group, score)
            rows = [
                (
                    step,
                    phase,
                    c.method,
                    c.kind,
                    c.query_id,
                    c.server,
                    c.outcome,
                    c.attempts,
                    *c.usage,
                    *c.spent,
                    c.seconds,
                    c.error,
                )
                for c in calls
            ]
            self._db.executemany(f"INSERT INTO calls VALUES ({','.join('?' * 16)})", rows)

    def _write_group(self, group: RolloutGroup, score: GroupScore) -> None:
        key = (group.query.id, group.step)
        before = score.before.anchors if score.before else ()
        after = score.after.anchors if score.after else ()
        known = {anchor.id for anchor in before}
        kept = {anchor.id for anchor in after}
        initial = [(group.query.id, a.id, group.step, a.text) for a in (*before, *after) if a.source == "initial"]
        answered = [(group.query.id, f"{group.step}-{r.id}", group.step, r.text) for r in group.answered]
        self._db.executemany("INSERT OR IGNORE INTO responses VALUES (?, ?, ?, ?)", initial + answered)
        if score.after:
            anchors = json.dumps([(a.id, a.source, a.epoch, a.h) for a in after])
            b = score.after
            self._db.execute(
                "INSERT INTO buffers VALUES (?, ?, ?, ?, ?, ?, ?)",
                (*key, anchors, b.left_epoch, b.right_epoch, b.observed_epoch, b.visits),
            )
        self._db.execute(
            "INSERT INTO groups VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)",
            (
                *key,
                group.epoch,
                len(before),
                json.dumps(score.positions),
                json.dumps(score.order),
                json.dumps(score.rewards),
                json.dumps([(a.id, a.source) for a in after if a.id not in known]),
                json.dumps([(a.id, a.source) for a in before if a.id not in kept]),
            ),
        )

    def last_step(self) -> int | None:
        """The newest step with a scored group, `None` if there is none."""
        return self._db.execute("SELECT max(step) FROM groups").fetchone()[0]

    def totals(self, phase: str = "train") -> Totals:
        """Judge costs so far."""
        sums = self._db.execute(
            f"SELECT sum(outcome = 'parsed'), sum(outcome IN {FAILURES}), sum(attempts),"
            " sum(prompt_tokens), sum(cached_tokens), sum(completion_tokens),"
            " sum(spent_prompt_tokens), sum(spent_cached_tokens), sum(spent_completion_tokens), sum(seconds)"
            " FROM calls WHERE phase = ?",
            (phase,),
        ).fetchone()
        return Totals(*(value or 0 for value in sums))

    def rows(self, sql: str, parameters: Sequence = ()) -> Iterator[tuple]:
        """Rows of a read-only query, for reports."""
        return self._db.execute(sql, parameters)

    def rewind(self, step: int) -> None:
        """Stand where the store stood before the trainer took `step`: drop what was written in that step or later.

        A run that starts from step 0 over another run's store first sets a copy of it aside, as `<name>-1.sqlite` and
        so on.
        """
        if step == 0 and any(self._has_rows(table) for table in ("groups", "calls")):
            numbers = (n for n in range(1, 10_000) if not self._aside(n).exists())
            self.snapshot(self._aside(next(numbers)))
        with self._errors("rewind"), self._db:
            for table in ("responses", "buffers", "groups"):
                self._db.execute(f"DELETE FROM {table} WHERE step >= ?", (step,))
            # An evaluation at this step took place before the checkpoint of this step was written.
            self._db.execute("DELETE FROM calls WHERE step > ? OR (step = ? AND phase = 'train')", (step, step))

    def _has_rows(self, table: str) -> bool:
        return self._db.execute(f"SELECT 1 FROM {table} LIMIT 1").fetchone() is not None

    def _aside(self, number: int) -> Path:
        return self.path.with_stem(f"{self.path.stem}-{number}")

    def snapshot(self, path: str | Path) -> None:
        """Copy the whole store to `path` as it stands, durably: either the old or the complete new file is there."""
        path = Path(path)
        temporary = path.with_name(path.name + ".tmp")
        with self._errors(f"copy to {path}"):
            path.parent.mkdir(parents=True, exist_ok=True)
            temporary.unlink(missing_ok=True)
            copy = sqlite3.connect(temporary)
            try:
                self._db.backup(copy)
            finally:
                copy.close()
            with open(temporary, "rb") as file:
                os.fsync(file.fileno())
            os.replace(temporary, path)

    def restore(self, path: str | Path) -> None:
        """Become a copy of the snapshot at `path`; what was here before is dropped."""
        with self._errors(f"restore from {path}"):
            if not Path(path).is_file():
                raise StoreError(f"{path} is missing: the checkpoint holds no buffers, so it cannot be resumed from")
            source = sqlite3.connect(Path(path).absolute().as_uri() + "?mode=ro", uri=True)
            try:
                if version(source) != VERSION:
                    raise StoreError(f"{path} is not a buffer store of format version {VERSION}")
                source.backup(self._db)
            finally:
                source.close()

    def close(self) -> None:
        """Close the file."""
        self._db.close()

    @contextmanager
    def _errors(self, doing: str) -> Iterator[None]:
        try:
            yield
        except (sqlite3.Error, OSError) as error:
            raise StoreError(f"cannot {doing} the buffer store {self.path}: {error}") from error
