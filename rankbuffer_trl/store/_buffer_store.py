"""The buffers, history and ledger of a run: one SQLite file, one transaction per training step.

A buffer is never overwritten. Each visit of a query adds a version, and an anchor refers to a response that is stored
once. The newest version of a query is its buffer; all versions and the table `groups` are the run's history. Every row
names its step.

The main process alone writes, and `lock` keeps other runs out. The file has a rollback journal, because SQLite's other
mode (WAL) does not work on network file systems. Beside it is a record of what the judge has taken (`_spending.py`).
"""

import json
import logging
import sqlite3
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing, contextmanager
from itertools import count
from pathlib import Path
from typing import Any

from ..buffer import Anchor, AnchorBuffer
from ..decoding import decode, parse_json
from ..files import replacing, sync
from ..groups import RolloutGroup
from ..judge import Call, Totals, Usage
from ..rewards._method import GroupScore
from . import _database as database
from . import history
from ._database import StoreError
from ._spending import Spending
from .history import AnchorRow, ReadRow

logger = logging.getLogger(__name__)

STORE_FILE = "store.sqlite"  # a saved store, in the folder that `save` is given
COMMIT_WAIT = 600.0  # seconds; a copy or a notebook may read the file for minutes
DAMAGED = (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB)


class BufferStore:
    """The persistent buffers and history of a run.

    Example:

    ```python
    from rankbuffer_trl import BufferStore

    store = BufferStore("runs/mine/_rankbuffer/live.sqlite", read_only=True)
    for query_id in store.query_ids():
        print([anchor.text for anchor in store.load(query_id).anchors])
    ```

    Args:
        path (`str` or `Path`):
            The SQLite file. The file and its folder are made if missing.
        read_only (`bool`, *optional*, defaults to `False`):
            Open an existing file for reports. Any number of processes may read; one may write.
        copy_of (`Path`, *optional*):
            The file that messages name, if this one is a private copy of it.

    Raises:
        [`StoreError`]: if the file cannot be opened, is of another version, or another process writes to it.
    """

    def __init__(self, path: str | Path, read_only: bool = False, copy_of: Path | None = None):
        self.path = Path(path)
        with self._errors("open"):
            self._spending = Spending(self.path)
            self._locked = not read_only
            if self._locked:
                database.lock_store(self.path)  # first, because opening to write changes the file
            try:
                if read_only:
                    self._db = database.open_to_read(self.path)
                else:
                    self._open_to_write()
            except BaseException:
                self._unlock()
                raise
        self.path = copy_of or self.path  # after `Spending`, whose record stands beside the file itself

    def load(self, query_id: str) -> AnchorBuffer | None:
        """Return the newest buffer of a query, `None` if it has none yet.

        Raises:
            [`StoreError`]: if the file does not hold what this program writes.
        """
        sql = (
            "SELECT anchors, left_epoch, right_epoch, observed_epoch, visits FROM buffers"
            " WHERE query_id = ? ORDER BY step DESC LIMIT 1"
        )
        row = next(self.rows(sql, (query_id,)), None)
        if row is None:
            return None
        with history.damage(self.path, "buffers", {"query_id": query_id}):  # the file may have been edited by hand
            anchors = decode(parse_json(row[0], at="anchors"), list[AnchorRow], "anchors")
            marks = ",".join("?" * len(anchors))
            sql = f"SELECT id, text FROM responses WHERE query_id = ? AND id IN ({marks})"
            texts = dict(self.rows(sql, (query_id, *(anchor.id for anchor in anchors))))
            if missing := [anchor.id for anchor in anchors if anchor.id not in texts]:
                raise ValueError(f"the table responses has no text of anchor {missing[0]!r}")
            return AnchorBuffer(tuple(Anchor(a.id, texts[a.id], a.source, a.epoch, a.h) for a in anchors), *row[1:])

    def query_ids(self, after: str = "", limit: int = -1) -> list[str]:
        """Return the sorted ids of queries that have a buffer: those behind `after`, at most `limit` of them."""
        sql = "SELECT DISTINCT query_id FROM buffers WHERE query_id > ? ORDER BY query_id LIMIT ?"
        return [id for (id,) in self.rows(sql, (after, limit))]

    def has_group(self, query_id: str, step: int) -> bool:
        """Return whether this query was already scored in this step."""
        return any(self.rows("SELECT 1 FROM groups WHERE query_id = ? AND step = ?", (query_id, step)))

    def commit(
        self,
        step: int,
        scored: Sequence[tuple[RolloutGroup, GroupScore]],
        calls: Iterable[Call] = (),
        phase: str = "train",
        reads: Iterable[ReadRow] = (),
    ) -> None:
        """Write one step in one transaction: all its groups, their next buffers, reads and the calls, or nothing.

        Args:
            step (`int`):
                The trainer's global step.
            scored (`Sequence[tuple[RolloutGroup, GroupScore]]`):
                Each query at most once.
            phase (`str`, *optional*, defaults to `"train"`):
                `train` or `eval`.
            reads (`Iterable[ReadRow]`, *optional*):
                What the reference judge has scored in this step.

        Raises:
            [`StoreError`]: if the step cannot be written. Nothing of it was written then.
        """
        with self._errors("write"), self._transaction():
            for group, score in scored:
                self._write_group(group, score)
            reads = list(reads)
            if reads and not database.has_reads(self._db):  # runs without a reference judge have no such table
                self._db.execute(database.READS)
            for read in reads:
                values = (read.query_id, step, read.rollout, read.difference, json.dumps(read.features))
                self._db.execute("INSERT INTO reads VALUES (?, ?, ?, ?, ?)", values)
            for call in calls:
                row = call_row(step, phase, call)
                names, marks = ",".join(row), ",".join(f":{name}" for name in row)
                self._db.execute(f"INSERT INTO calls ({names}) VALUES ({marks})", row)
            # Before the commit, so that a power cut cannot take back tokens that the ledger has.
            self._spending.sync()

    def _write_group(self, group: RolloutGroup, score: GroupScore) -> None:
        key = (group.query.id, group.step)
        before = score.before.anchors if score.before else ()
        after = score.after.anchors if score.after else ()
        ids_before = {anchor.id for anchor in before}
        ids_after = {anchor.id for anchor in after}
        # Also those that this visit removes, because reports place its rollouts among them.
        initial = [(group.query.id, a.id, group.step, a.text) for a in (*before, *after) if a.source == "initial"]
        answered = [(group.query.id, f"{group.step}-{r.id}", group.step, r.text) for r in group.answered]
        # An earlier visit may have stored the anchors.
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
                json.dumps([(a.id, a.source) for a in after if a.id not in ids_before]),
                json.dumps([(a.id, a.source) for a in before if a.id not in ids_after]),
            ),
        )

    def last_step(self) -> int | None:
        """Return the newest step with a scored group, `None` if there is none."""
        return next(step for (step,) in self.rows("SELECT max(step) FROM groups"))

    def totals(self, phase: str = "train") -> Totals:
        """Add up the judge calls so far."""
        return history.totals(self, phase)

    def spend(self, tokens: Usage) -> None:
        """Record the tokens of one reply of the judge, in any thread. `restore` and `rewind` do not take them back."""
        with self._errors("write the spending beside"):
            self._spending.add(tokens)

    @property
    def spent(self) -> Totals:
        """All that the judge has taken in this folder: at least the ledger, and what was taken back or abandoned."""
        return self._spending.totals

    def _open_to_write(self) -> None:
        self._db = database.open_to_write(self.path)
        try:
            self._spending.begin(self)  # it reads the ledger, so the file is open by now
        except BaseException:
            self._db.close()
            raise

    def rows(self, sql: str, parameters: Sequence = ()) -> Iterator[tuple]:
        """Return the rows of a read-only query, for reports."""
        with self._errors("read"):
            # All at once: a query that is read halfway would keep the file locked for the run that writes it.
            return iter(self._db.execute(sql, parameters).fetchall())

    def rewind(self, step: int) -> None:
        """Drop what was written in `step` or later, so that the trainer can take that step again."""
        with self._errors("rewind"):
            database.check_claim(self.path)
            if step == 0:  # it may be another run's store
                self._set_aside()
            with self._transaction():
                visited = "SELECT query_id FROM groups WHERE step >= ?"  # by index; the others have none on the step
                for table in ("responses", "buffers"):
                    self._db.execute(f"DELETE FROM {table} WHERE query_id IN ({visited}) AND step >= ?", (step, step))
                for table in ("groups", *(["reads"] if database.has_reads(self._db) else [])):
                    self._db.execute(f"DELETE FROM {table} WHERE step >= ?", (step,))
                # An evaluation at this step took place before the checkpoint of this step was written.
                self._db.execute("DELETE FROM calls WHERE step > ? OR (step = ? AND phase = 'train')", (step, step))

    def _set_aside(self) -> None:
        """Start with an empty store. Keep one that holds rows."""
        if not any(self._db.execute(f"SELECT 1 FROM {table}").fetchone() for table in ("groups", "calls")):
            return
        names = (self.path.with_stem(f"{self.path.stem}-{n}") for n in count(1))
        path = next(name for name in names if not name.exists())
        self._db.close()
        try:
            self.path.rename(path)
            logger.warning("%s holds an earlier run; it is kept as %s, and this run begins anew", self.path, path.name)
        finally:  # a store that cannot be moved is still the run's
            self._open_to_write()

    def save(self, folder: str | Path) -> None:
        """Copy the whole store to `store.sqlite` in `folder`: the old or the complete new file is there."""
        with self._errors("save", f" to {folder}"):
            Path(folder).mkdir(parents=True, exist_ok=True)
            with replacing(Path(folder) / STORE_FILE) as draft, closing(sqlite3.connect(draft)) as copy:
                copy.execute("PRAGMA journal_mode = OFF")  # the draft has no reader, and is synced as a whole
                copy.execute("PRAGMA synchronous = OFF")
                self._db.backup(copy)
            sync(Path(folder))

    def restore(self, folder: str | Path) -> None:
        """Replace all rows by those in `folder`, which may come from elsewhere. Keep a store of another run aside.

        Raises:
            [`StoreError`]: if that is not a store of this version, or is damaged. Nothing was changed then.
        """
        with self._errors("restore", f" from {folder}"):
            database.check_claim(self.path)
            with closing(BufferStore(Path(folder) / STORE_FILE, read_only=True)) as saved:
                spending = Spending(self.path).begin(saved)  # this may fail, so it comes before any change
            with replacing(self.path) as draft:
                # Row by row and not as a file, because the file may come from elsewhere.
                if database.copy_rows(Path(folder) / STORE_FILE, draft) != history.run_id(self):
                    self._set_aside()
                self._db.close()
            self._db = database.open_to_write(self.path)
            self._spending.close()
            self._spending = spending

    def close(self) -> None:
        """Close the file and let other runs have it."""
        self._db.close()
        self._unlock()

    def _unlock(self) -> None:
        self._spending.close()
        if self._locked:
            database.unlock(self.path)
            self._locked = False

    @contextmanager
    def _transaction(self) -> Iterator[None]:
        deadline = time.monotonic() + COMMIT_WAIT
        while True:
            try:
                self._db.execute("BEGIN EXCLUSIVE")  # now, so that a reader cannot stop what follows
                break
            except sqlite3.OperationalError as error:
                # SQLite itself has waited `WRITE_WAIT` by now.
                if error.sqlite_errorcode != sqlite3.SQLITE_BUSY or time.monotonic() > deadline:
                    raise
                logger.warning(
                    f"{self.path} is locked by another process, such as a copy: waiting for up to {COMMIT_WAIT:.0f} s"
                )
        with self._db:
            database.check_claim(self.path)  # now, since a backup may have been restored during the wait
            yield

    @contextmanager
    def _errors(self, doing: str, where: str = "") -> Iterator[None]:
        try:
            yield
        except (sqlite3.Error, OSError) as error:
            advice = ""
            if getattr(error, "sqlite_errorcode", None) in DAMAGED:
                advice = ". The file is damaged: move it away, then resume from a checkpoint, which has its own store"
            raise StoreError(f"cannot {doing} the buffer store {self.path}{where}: {error}{advice}") from error


def call_row(step: int, phase: str, call: Call) -> dict[str, Any]:
    """Return a call's row of the table `calls`, by column."""
    row: dict[str, Any] = {"step": step, "phase": phase} | call.as_dict()
    for prefix, usage in (("", row.pop("usage")), ("spent_", row.pop("spent"))):
        row |= {f"{prefix}{name}_tokens": tokens for name, tokens in usage._asdict().items()}
    return row
