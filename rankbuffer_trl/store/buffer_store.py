"""Where buffers live: one SQLite file, one transaction per training step, every row marked with its step.

A buffer is never overwritten: each visit adds a version, and an anchor refers to a response that is stored once. The
newest version of a query is its buffer; all versions together with the table `groups` are the run's history. A journal
file is used, not WAL, because runs write to network file systems. How a store gets into checkpoints and out of them is
`segments.py`. What was left out: more than one writer. The main process owns the file.
"""

import json
import sqlite3
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import count
from pathlib import Path

from ..buffer import Anchor, AnchorBuffer
from ..groups import RolloutGroup
from ..judge import Call, Totals
from ..rewards.method import GroupScore
from . import database, segments
from .database import StoreError

SEGMENTS = ".segments"  # the folder beside the live store that has what checkpoints share


class BufferStore:
    """The persistent buffers and history of a run.

    Args:
        path (`str` or `Path`, *optional*):
            The SQLite file; it and its folder are made if missing. Without one, a temporary file that goes when the
            store is closed.
        read_only (`bool`, *optional*, defaults to `False`):
            Open an existing file for reports, also one that a killed run left in the middle of a commit.

    Raises:
        [`StoreError`]: if the file cannot be opened or was not written by this version.
    """

    def __init__(self, path: str | Path | None = None, read_only: bool = False):
        self.path = Path(path) if path else None
        with self._errors("open"):
            self._db = database.open_to_read(self._live) if read_only else database.open_to_write(self.path)

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
            anchors, markers = json.loads(row[0]), row[1:]
            marks = ",".join("?" * len(anchors))
            texts = dict(
                self._db.execute(
                    f"SELECT id, text FROM responses WHERE query_id = ? AND id IN ({marks})",
                    (query_id, *(anchor[0] for anchor in anchors)),
                )
            )
            return AnchorBuffer(tuple(Anchor(id, texts[id], *rest) for id, *rest in anchors), *markers)

    def query_ids(self, after: str = "", limit: int = -1) -> list[str]:
        """Ids of queries that have a buffer, sorted: those behind `after`, at most `limit` of them."""
        with self._errors("read"):
            found = self._db.execute(
                "SELECT DISTINCT query_id FROM buffers WHERE query_id > ? ORDER BY query_id LIMIT ?", (after, limit)
            )
            return [id for (id,) in found]

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
                    c.malformed,
                    *c.usage,
                    *c.spent,
                    c.seconds,
                    c.error,
                )
                for c in calls
            ]
            self._db.executemany(f"INSERT INTO calls VALUES ({','.join('?' * 17)})", rows)

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
        return segments.totals(self._db, segments.chain(self._db), phase)

    def rows(self, sql: str, parameters: Sequence = ()) -> Iterator[tuple]:
        """Rows of a read-only query, for reports."""
        return self._db.execute(sql, parameters)

    def rewind(self, step: int) -> None:
        """Stand where the store stood before the trainer took `step`: drop what was written in that step or later.

        A run that starts from step 0 over another run's store first sets a copy of it aside, as `<name>-1.sqlite` and
        so on.
        """
        with self._errors("rewind"):
            if step == 0:
                self._set_aside()
            with self._db:
                visited = "SELECT query_id FROM groups WHERE step >= ?"  # by index; the others have none on the step
                for table in ("responses", "buffers"):
                    self._db.execute(f"DELETE FROM {table} WHERE query_id IN ({visited}) AND step >= ?", (step, step))
                self._db.execute("DELETE FROM groups WHERE step >= ?", (step,))
                # An evaluation at this step took place before the checkpoint of this step was written.
                self._db.execute("DELETE FROM calls WHERE step > ? OR (step = ? AND phase = 'train')", (step, step))
                segments.unseal(self._db)

    def _set_aside(self) -> None:
        """Start over with an empty store. One that holds something is kept under another name."""
        if not any(segments.row_ends(self._db).values()):
            return
        path = self._live
        names = (path.with_stem(f"{path.stem}-{n}") for n in count(1))
        self._db.close()
        path.rename(next(name for name in names if not name.exists()))
        self._db = database.open_to_write(path)
        segments.prune(path.with_suffix(SEGMENTS), [])

    @property
    def _live(self) -> Path:
        if self.path is None:
            raise StoreError("a temporary store is for reading; give it a path to save it")
        return self.path

    def save(self, folder: str | Path) -> None:
        """Put the whole store into `folder`, durably, in a time that depends on what is new since the last save."""
        with self._errors("save", f" to {folder}"):
            home = self._live.with_suffix(SEGMENTS)
            segments.write(segments.seal(self._db, home), home, Path(folder))

    def restore(self, folder: str | Path) -> None:
        """Become what was saved to `folder`. A store of another run that was here before is set aside."""
        with self._errors("restore", f" from {folder}"):
            try:
                sealed = segments.read(Path(folder))
                if not segments.common_length(segments.chain(self._db), sealed):
                    segments.check(Path(folder), sealed)
                    self._set_aside()
                home = self.path.with_suffix(SEGMENTS) if self.path else None
                segments.load(self._db, Path(folder), sealed, home)
            except ValueError as error:
                raise StoreError(f"{error}: the checkpoint holds no buffers that could be resumed from") from None

    def close(self) -> None:
        """Close the file."""
        self._db.close()

    @contextmanager
    def _errors(self, doing: str, where: str = "") -> Iterator[None]:
        try:
            yield
        except (sqlite3.Error, OSError) as error:
            raise StoreError(f"cannot {doing} the buffer store {self.path or ''}{where}: {error}") from error
