"""A store in a checkpoint: a chain of immutable files, each with the rows that were new at one save.

Rows are only ever appended, so a save writes what came since the last one and hard-links the rest: its price depends
on the steps in between, not on the size of the store. Every checkpoint has all files of the chain under its own roof
and can be copied, pushed or deleted alone. Where a file system has no hard links the files are copied.

The live store notes the chain in its table `segments`: how far each table is sealed, and the ledger's totals up to
there, so that nothing is counted anew.
"""

import hashlib
import json
import os
import shutil
import sqlite3
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ..files import replacing, sync
from ..judge import Totals
from ..judge.ledger import FAILURES

TABLES = ("responses", "buffers", "groups", "calls")
MANIFEST = "store.json"
COLUMNS = "number, name, bytes, sha256, ends, totals"


@dataclass(frozen=True)
class Segment:
    """One file of the chain.

    Args:
        number (`int`):
            Its place, from 0.
        name (`str`):
            File name; it holds the beginning of the digest, so that equal names are equal files.
        bytes (`int`):
            Size of the file.
        sha256 (`str`):
            Digest of the file.
        ends (`dict[str, int]`):
            The last rowid of each table in this segment or an earlier one.
        totals (`dict[str, dict]`):
            The ledger's sums by phase, up to and with this segment.
    """

    number: int
    name: str
    bytes: int
    sha256: str
    ends: dict[str, int]
    totals: dict[str, dict]


def chain(db: sqlite3.Connection) -> list[Segment]:
    """The segments that the store has sealed, in order."""
    rows = db.execute(f"SELECT {COLUMNS} FROM segments ORDER BY number")
    return [
        Segment(number, name, size, sha256, json.loads(ends), json.loads(sums))
        for number, name, size, sha256, ends, sums in rows
    ]


def row_ends(db: sqlite3.Connection) -> dict[str, int]:
    """The last rowid of each table, 0 for an empty one."""
    return {table: db.execute(f"SELECT max(rowid) FROM {table}").fetchone()[0] or 0 for table in TABLES}


def sum_calls(db: sqlite3.Connection, phase: str, after: int = 0) -> Totals:
    """Sums over the calls of a phase with a rowid above `after`."""
    sums = db.execute(
        f"SELECT sum(outcome = 'parsed'), sum(outcome IN {FAILURES}), sum(attempts), sum(malformed),"
        " sum(prompt_tokens), sum(cached_tokens), sum(completion_tokens),"
        " sum(spent_prompt_tokens), sum(spent_cached_tokens), sum(spent_completion_tokens), sum(seconds)"
        " FROM calls WHERE rowid > ? AND phase = ?",
        (after, phase),
    ).fetchone()
    return Totals(*(value or 0 for value in sums))


def totals(db: sqlite3.Connection, sealed: Sequence[Segment], phase: str) -> Totals:
    """The ledger's sums of a phase: those of the sealed rows as noted, and what came since."""
    if not sealed:
        return sum_calls(db, phase)
    noted = sealed[-1].totals.get(phase, {})
    return Totals(**noted) + sum_calls(db, phase, after=sealed[-1].ends["calls"])


def seal(db: sqlite3.Connection, home: Path) -> list[Segment]:
    """Write the rows that are in no segment yet to a new one in `home`; returns the whole chain."""
    sealed = chain(db)
    if not all(is_whole(home, segment) for segment in sealed):
        sealed = []  # somebody tidied up
    ends = row_ends(db)
    begins = sealed[-1].ends if sealed else dict.fromkeys(TABLES, 0)
    if ends == begins:
        return sealed
    home.mkdir(parents=True, exist_ok=True)
    temporary = (home / "new.tmp").absolute()
    temporary.unlink(missing_ok=True)
    try:
        copy_rows(db, begins, temporary)
        sha256 = digest(temporary)
        number = len(sealed)
        name = f"{number:05d}-{sha256[:16]}.sqlite"
        temporary.chmod(0o444)  # several checkpoints share it
        os.replace(temporary, home / name)
    finally:
        temporary.unlink(missing_ok=True)
    sync(home)
    sums = {phase: totals(db, sealed, phase).as_dict() for phase in ("train", "eval")}
    new = Segment(number, name, (home / name).stat().st_size, sha256, ends, sums)
    with db:
        db.execute("DELETE FROM segments WHERE number >= ?", (number,))
        note(db, new)
    return [*sealed, new]


def copy_rows(db: sqlite3.Connection, begins: dict[str, int], path: Path) -> None:
    """Copy all rows behind `begins` to a new file, durably."""
    db.execute("ATTACH ? AS segment", (str(path),))
    try:
        # Nobody reads the file before it is complete, and it is synced as a whole.
        db.execute("PRAGMA segment.journal_mode = OFF")
        db.execute("PRAGMA segment.synchronous = OFF")
        for table in TABLES:
            db.execute(
                f"CREATE TABLE segment.{table} AS SELECT * FROM main.{table}"
                f" WHERE rowid > {begins[table]} ORDER BY rowid"
            )
    finally:
        db.execute("DETACH segment")
    sync(path)


def note(db: sqlite3.Connection, segment: Segment) -> None:
    """Put a segment into the store's chain."""
    s = segment
    values = (s.number, s.name, s.bytes, s.sha256, json.dumps(s.ends), json.dumps(s.totals))
    db.execute(f"INSERT INTO segments ({COLUMNS}) VALUES (?, ?, ?, ?, ?, ?)", values)


def write(sealed: Sequence[Segment], home: Path, folder: Path) -> None:
    """Put the chain into `folder`, the manifest last; files of another chain go."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / MANIFEST).unlink(missing_ok=True)
    names = {segment.name for segment in sealed}
    for stale in folder.glob("*.sqlite*"):
        if stale.name not in names:
            stale.unlink()
    for segment in sealed:
        if not is_whole(folder, segment):
            link(home / segment.name, folder / segment.name)
    write_json(folder / MANIFEST, [vars(segment) for segment in sealed])


def read(folder: Path) -> list[Segment]:
    """The chain that a checkpoint's folder holds.

    Raises:
        `ValueError`: if there is none, or one of its files is missing or cut short.
    """
    try:
        sealed = [Segment(**fields) for fields in json.loads((folder / MANIFEST).read_text())]
    except FileNotFoundError:
        raise ValueError(f"{folder / MANIFEST} is missing") from None
    except (ValueError, TypeError) as error:
        raise ValueError(f"{folder / MANIFEST} cannot be read ({error})") from None
    for segment in sealed:
        if not is_whole(folder, segment):
            raise ValueError(f"{folder / segment.name} is missing or cut short")
    return sealed


def load(db: sqlite3.Connection, folder: Path, sealed: Sequence[Segment], home: Path | None) -> None:
    """Make the store one that has the rows of `sealed` and no others. Rows that it has already stay where they are.

    Raises:
        `ValueError`: if a file is damaged. Nothing was changed then.
    """
    common = common_length(chain(db), sealed)
    check(folder, sealed[common:])
    cut(db, sealed[:common])
    for segment in sealed[common:]:
        db.execute("ATTACH ? AS segment", ((folder / segment.name).absolute().as_uri() + "?mode=ro&immutable=1",))
        try:
            with db:
                for table in TABLES:
                    db.execute(f"INSERT INTO main.{table} SELECT * FROM segment.{table} ORDER BY rowid")
                note(db, segment)
        finally:
            db.execute("DETACH segment")
    if home is not None:
        home.mkdir(parents=True, exist_ok=True)
        for segment in sealed:
            if not is_whole(home, segment):
                link(folder / segment.name, home / segment.name)
        prune(home, sealed)


def check(folder: Path, sealed: Sequence[Segment]) -> None:
    """Compare files with their digests.

    Raises:
        `ValueError`: for the first that is damaged.
    """
    for segment in sealed:
        if digest(folder / segment.name) != segment.sha256:
            raise ValueError(f"{folder / segment.name} is damaged: its SHA-256 is not {segment.sha256}")


def common_length(mine: Sequence[Segment], theirs: Sequence[Segment]) -> int:
    """With how many equal segments two chains begin."""
    pairs = enumerate(zip(mine, theirs, strict=False))
    return next((i for i, (a, b) in pairs if a.sha256 != b.sha256), min(len(mine), len(theirs)))


def cut(db: sqlite3.Connection, sealed: Sequence[Segment]) -> None:
    """Drop all rows that are not in `sealed`, which the store's chain begins with."""
    ends = sealed[-1].ends if sealed else dict.fromkeys(TABLES, 0)
    with db:
        for table in TABLES:
            db.execute(f"DELETE FROM {table} WHERE rowid > ?", (ends[table],))
        db.execute("DELETE FROM segments WHERE number >= ?", (len(sealed),))


def unseal(db: sqlite3.Connection) -> None:
    """Forget segments with rows that the store no longer has; what is left of their rows is sealed anew."""
    ends = row_ends(db)
    for segment in chain(db):
        if any(segment.ends[table] > ends[table] for table in TABLES):
            db.execute("DELETE FROM segments WHERE number >= ?", (segment.number,))
            return


def prune(home: Path, sealed: Sequence[Segment]) -> None:
    """Delete the files in `home` that the chain does not need. Checkpoints that do have them under their own roof."""
    names = {segment.name for segment in sealed}
    for path in home.glob("*.sqlite"):
        if path.name not in names:
            path.unlink()


def is_whole(folder: Path, segment: Segment) -> bool:
    """Whether the file is there in its full size."""
    path = folder / segment.name
    return path.is_file() and path.stat().st_size == segment.bytes


def link(source: Path, target: Path) -> None:
    """Give a file a second name, or, where that cannot be done, a copy."""
    target.unlink(missing_ok=True)
    try:
        os.link(source, target)
    except OSError:  # another file system, or one without hard links
        with replacing(target) as draft:
            shutil.copyfile(source, draft)


def write_json(path: Path, value: object, indent: int | None = None) -> None:
    """Write JSON durably: either the old or the complete new file is there."""
    with replacing(path) as draft:
        draft.write_text(json.dumps(value, indent=indent) + "\n")


def digest(path: Path) -> str:
    """SHA-256 of a file, in hexadecimal digits."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
