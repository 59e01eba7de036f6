"""The SQLite file of a buffer store: its tables, how it is opened, copied and locked."""

import os
import shutil
import socket
import sqlite3
import tempfile
from contextlib import closing
from functools import cache
from pathlib import Path

from .. import files
from ..errors import RankBufferError

VERSION = 4
TABLES = ("run", "responses", "buffers", "groups", "calls")
# SQLite keeps the text of a CREATE statement in the file, and `check` compares it: a change needs a new VERSION.
# One transaction, so that a new file waits for the disk once and not for every table.
SCHEMA = f"""
BEGIN;
-- the run that the rows belong to: a random id
CREATE TABLE IF NOT EXISTS run (id TEXT NOT NULL) STRICT;
-- every answered rollout, and the initial anchors of visited queries
CREATE TABLE IF NOT EXISTS responses (
    query_id TEXT NOT NULL, id TEXT NOT NULL, step INTEGER NOT NULL, text TEXT NOT NULL) STRICT;
CREATE UNIQUE INDEX IF NOT EXISTS response_key ON responses (query_id, id);
-- one version per visit; anchors is JSON [[id, source, epoch, h], ...]
CREATE TABLE IF NOT EXISTS buffers (
    query_id TEXT NOT NULL, step INTEGER NOT NULL, anchors TEXT NOT NULL,
    left_epoch INTEGER, right_epoch INTEGER, observed_epoch INTEGER, visits INTEGER NOT NULL,
    PRIMARY KEY (query_id, step)) STRICT;
-- one row per scored group; JSON in the last five
CREATE TABLE IF NOT EXISTS groups (
    query_id TEXT NOT NULL, step INTEGER NOT NULL, epoch INTEGER NOT NULL, k INTEGER NOT NULL,
    positions TEXT NOT NULL, tiers TEXT NOT NULL, rewards TEXT NOT NULL, added TEXT NOT NULL, pruned TEXT NOT NULL,
    PRIMARY KEY (query_id, step)) STRICT;
CREATE INDEX IF NOT EXISTS group_step ON groups (step);
-- the judge ledger
CREATE TABLE IF NOT EXISTS calls (
    step INTEGER NOT NULL, phase TEXT NOT NULL, method TEXT NOT NULL, kind TEXT NOT NULL, query_id TEXT NOT NULL,
    server TEXT NOT NULL, outcome TEXT NOT NULL, attempts INTEGER NOT NULL, malformed INTEGER NOT NULL,
    prompt_tokens INTEGER NOT NULL, cached_tokens INTEGER NOT NULL, completion_tokens INTEGER NOT NULL,
    spent_prompt_tokens INTEGER NOT NULL, spent_cached_tokens INTEGER NOT NULL,
    spent_completion_tokens INTEGER NOT NULL, seconds REAL NOT NULL, error TEXT NOT NULL) STRICT;
CREATE INDEX IF NOT EXISTS call_step ON calls (step);
PRAGMA user_version = {VERSION};
COMMIT;
"""
# Made by the first step in which a reference judge has scored. So the stores of runs without one are as they always
# were. Rollouts that the reference judge has scored too: the judge's reward less the reference judge's; features is
# JSON.
READS = """CREATE TABLE reads (
    query_id TEXT NOT NULL, step INTEGER NOT NULL, rollout INTEGER NOT NULL, difference REAL NOT NULL,
    features TEXT NOT NULL, PRIMARY KEY (query_id, step, rollout)) STRICT"""
JOURNAL_OF_SEVERAL = bytes.fromhex("d9d505f920a163d7")  # how a journal ends that names another file
READ_WAIT, WRITE_WAIT = 60.0, 10.0  # seconds that SQLite waits for a lock before it reports that the file is locked

claims: dict[Path, tuple[int, int]] = {}  # of this process, by store: the descriptor of its lock, and how many use it


class StoreError(RankBufferError, RuntimeError):
    """The buffer store cannot be opened, read or written."""


def lock_store(path: Path) -> None:
    """Claim a store for this process, until `unlock` or the end of the process, also by a kill.

    Raises:
        [`StoreError`]: if another process has the store, naming its host and process id.
    """
    # A process may claim a store twice, as after a cell of a notebook was run twice. Its claims share one lock.
    if path.resolve() not in claims:
        claims[path.resolve()] = open_lock(path), 0
    descriptor, users = claims[path.resolve()]
    claims[path.resolve()] = descriptor, users + 1


def check_claim(path: Path) -> None:
    """Refuse to write to a store whose lock file is another one now."""
    # Whoever restores a backup replaces the lock file, and another run can then lock the new one.
    descriptor, _ = claims.get(path.resolve(), (-1, 0))
    place = path.with_suffix(".lock")
    if not (descriptor >= 0 and place.exists() and os.path.samestat(os.fstat(descriptor), place.stat())):
        raise StoreError(
            f"{place} was replaced or deleted while this run used it, as a restored backup does, so another run may"
            " write to the store too: stop both, then resume from a checkpoint"
        )


def open_lock(path: Path) -> int:
    """Open and lock the file beside a store, and write into it who has the store."""
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(path.with_suffix(".lock"), os.O_RDWR | os.O_CREAT, 0o644)
    try:
        files.lock_descriptor(descriptor)  # before a byte is written, since the file may name another holder
        os.ftruncate(descriptor, 0)
        os.write(descriptor, f"process {os.getpid()} on {socket.gethostname()}".encode())
    except OSError as error:
        holder = os.read(descriptor, 200).decode(errors="replace") or "another process"  # it writes after it locks
        os.close(descriptor)
        if not isinstance(error, BlockingIOError | PermissionError):  # the two by which systems say "locked"
            raise
        raise StoreError(
            f"{path} is in use by {holder}: wait until that run has ended, end it, or choose another output_dir"
        ) from None
    return descriptor


def unlock(path: Path) -> None:
    """Give a claim back. The store is free when the process has no other claim to it."""
    descriptor, users = claims.pop(path.resolve(), (-1, 0))
    if users > 1:
        claims[path.resolve()] = descriptor, users - 1
    elif users:
        os.close(descriptor)


def drop_claims() -> None:
    # After a fork they are the parent's. A child with open files would keep them after the parent's end.
    for descriptor, _ in claims.values():
        os.close(descriptor)
    claims.clear()


os.register_at_fork(after_in_child=drop_claims)


def open_to_write(path: Path) -> sqlite3.Connection:
    """Open a store for writing, and create the tables of a new one."""
    db = connect(path, "rwc", WRITE_WAIT)
    try:
        new = not version(db)
        if not new:
            check_tables(db, path)
        db.executescript("PRAGMA journal_mode = TRUNCATE; PRAGMA synchronous = FULL;" + (SCHEMA if new else ""))
        with db:
            # So that a restore can tell the store of another run.
            db.execute("INSERT INTO run SELECT hex(randomblob(16)) WHERE NOT EXISTS (SELECT 1 FROM run)")
    except BaseException:
        db.close()
        raise
    return db


def open_to_read(path: Path) -> sqlite3.Connection:
    """Open a store for reading, also one that a killed run left in the middle of a commit."""
    if not path.is_file():
        raise StoreError(f"{path} is missing: there is no buffer store here")
    db = connect(path, "ro", READ_WAIT)
    try:
        try:
            version(db)
        except sqlite3.OperationalError:
            journal = path.with_name(path.name + "-journal")
            if not journal.is_file():
                raise
            db.close()
            # The commit is rolled back in a temporary copy, so the folder need not be writable.
            db = sqlite3.connect("", check_same_thread=False)
            with tempfile.TemporaryDirectory(prefix="rankbuffer-") as folder:
                for file in (path, journal):
                    shutil.copyfile(file, Path(folder, file.name))
                with closing(connect(Path(folder, path.name), "rw", READ_WAIT)) as copy:
                    copy.backup(db)
        check_tables(db, path)  # before any of them is read, since the file may come from elsewhere
    except BaseException:
        db.close()
        raise
    return db


def copy_rows(source: Path, target: Path) -> str:
    """Copy a store into a new file, row by row; return the id of its run.

    Raises:
        `sqlite3.Error`: if a row is not what its table holds.
    """
    open_to_read(source).close()  # checks it
    with closing(connect(target, "rwc", WRITE_WAIT)) as db:
        db.executescript("PRAGMA journal_mode = OFF; PRAGMA synchronous = OFF;" + SCHEMA)  # synced as a whole later
        db.execute("ATTACH ? AS source", (uri(source, "ro"),))
        extra = ["reads"] if has_reads(db, "source") else []
        if extra:
            db.execute(READS)
        # In a forged file, one page may stand for any number of rows. The copy must not fill the disk with them.
        db.execute(f"PRAGMA main.max_page_count = {2 * pages(db, 'source') + 2 * pages(db, 'main')}")
        with db:
            for table in (*TABLES, *extra):
                # Names of this program, never those of the file. SQLite copies `SELECT *` between equal tables without
                # a look at the types.
                names = ",".join(column[1] for column in db.execute(f"PRAGMA main.table_info({table})"))
                db.execute(f"INSERT INTO main.{table} ({names}) SELECT {names} FROM source.{table} ORDER BY rowid")
        return next((id for (id,) in db.execute("SELECT id FROM main.run")), "")


def has_reads(db: sqlite3.Connection, schema: str = "main") -> bool:
    """Return whether an attached file has the table of a reference judge."""
    return bool(db.execute(f"SELECT 1 FROM {schema}.sqlite_master WHERE name = 'reads'").fetchone())


def pages(db: sqlite3.Connection, schema: str) -> int:
    return db.execute(f"PRAGMA {schema}.page_count").fetchone()[0]


def uri(path: Path, mode: str) -> str:
    """Return the address of an SQLite file, with any characters in its name."""
    return f"{path.absolute().as_uri()}?mode={mode}"


def connect(path: Path, mode: str, wait: float) -> sqlite3.Connection:
    """Open an SQLite file that is not trusted.

    Raises:
        [`StoreError`]: if its rollback journal names another file.
    """
    # SQLite would delete that file. Only transactions over several databases name one, and this program has none.
    journal = path.with_name(path.name + "-journal")
    if journal.is_file():
        with open(journal, "rb") as file:
            file.seek(max(journal.stat().st_size - len(JOURNAL_OF_SEVERAL), 0))
            if file.read() == JOURNAL_OF_SEVERAL:
                raise StoreError(f"{journal} was not written by this program: move {path} and the journal away")
    db = sqlite3.connect(uri(path, mode), uri=True, timeout=wait, check_same_thread=False)
    db.execute("PRAGMA trusted_schema = OFF")  # code in the table definitions of a foreign file must not run
    return db


def version(db: sqlite3.Connection) -> int:
    """Return the format version of an open store, 0 if the file is new."""
    return db.execute("PRAGMA user_version").fetchone()[0]


def check_tables(db: sqlite3.Connection, path: Path) -> None:
    """Refuse a file that has not exactly the tables of this version."""
    found = version(db)
    if found != VERSION:
        raise StoreError(
            f"{path} has the format version {found}; this program reads version {VERSION}: use the version of this"
            " program that wrote the file, or move the file away"
        )
    mine, theirs = expected_definitions(has_reads(db)), definitions(db)
    if odd := sorted(f"{kind} {name!r}" for kind, name, *_ in (theirs - mine or mine - theirs)):
        raise StoreError(
            f"{path} is not a buffer store: missing or not as this program makes it: {', '.join(odd[:5])}"
        )


def definitions(db: sqlite3.Connection) -> set[tuple]:
    """Return all tables, indexes, views and triggers of an open file, as they were defined."""
    return set(db.execute("SELECT type, name, tbl_name, sql FROM sqlite_master"))


@cache
def expected_definitions(reads: bool) -> set[tuple]:
    """Return the definitions that a store of this version has, with or without the table of a reference judge."""
    with closing(sqlite3.connect(":memory:")) as db:
        db.executescript(SCHEMA + READS * reads)
        return definitions(db)
