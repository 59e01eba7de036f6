"""Opens a run to be looked at, also while it is trained: a private copy of its store, and the trainer's log."""

import json
import shutil
import sqlite3
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from ..checkpoint import LIVE_STORE, SNAPSHOT, is_complete
from ..store import BufferStore, StoreError

PATIENCE = 60  # seconds to wait for a writer that commits


@dataclass(frozen=True)
class Run:
    """What is known of one run.

    Args:
        name (`str`):
            What the report calls it: the shortest end of its path that no other run of the report has.
        path (`Path`):
            Its output folder, a checkpoint of it, or a store file.
        store (`BufferStore`):
            A copy of its store; reading it takes nothing from the run.
        log (`list[dict]`, *optional*):
            The trainer's log up to its newest checkpoint, one entry per logging step; empty without a checkpoint.
    """

    name: str
    path: Path
    store: BufferStore
    log: list[dict] = field(default_factory=list)


@contextmanager
def open_runs(paths: Sequence[str | Path]) -> Iterator[list[Run]]:
    """Open runs in the order given; their copies are deleted afterwards.

    Args:
        paths (`Sequence[str | Path]`):
            For each run its output folder, a checkpoint (saved here or pulled from the Hub), or a `.sqlite` file.

    Raises:
        [`StoreError`]: if one of them holds no store, or none with a scored group yet.
    """
    folders = [Path(path) for path in paths]
    runs: list[Run] = []
    with tempfile.TemporaryDirectory(prefix="rankbuffer-report-") as scratch:
        try:
            for number, (name, path) in enumerate(zip(run_names(folders), folders, strict=True)):
                store = copy_of(find_store(path), Path(scratch) / f"{number}.sqlite")
                runs.append(Run(name, path, store, trainer_log(path)))
                if store.last_step() is None:
                    raise StoreError(f"{path} has no scored group yet: come back after the run's first step")
            yield runs
        finally:
            for run in runs:
                run.store.close()


def run_names(paths: Sequence[Path]) -> list[str]:
    """The shortest ends of the paths that differ; what is given twice is numbered."""
    whole = [path.absolute().parts for path in paths]
    names = []
    for i, parts in enumerate(whole):
        others = [other for j, other in enumerate(whole) if j != i and other != parts]
        lengths = range(1, len(parts) + 1)
        length = next((n for n in lengths if all(other[-n:] != parts[-n:] for other in others)), len(parts))
        same = whole[:i].count(parts)
        names.append("/".join(parts[-length:]) + (f" ({same + 1})" if same else ""))
    return names


def find_store(path: Path) -> Path:
    """The store of a run: the live one of an output folder, else a checkpoint's.

    Raises:
        [`StoreError`]: if there is none.
    """
    if path.is_file():
        return path
    for candidate in (path / LIVE_STORE, path / SNAPSHOT):
        if candidate.is_file():
            return candidate
    if checkpoint := newest_whole(path):
        return checkpoint / SNAPSHOT
    what = "is not a run: it holds neither" if path.is_dir() else "does not exist, so there is neither"
    raise StoreError(
        f"{path} {what} {LIVE_STORE} nor {SNAPSHOT}. Name the output_dir of a RankBuffer run, one of its checkpoints,"
        " or a store file"
    )


def copy_of(source: Path, target: Path) -> BufferStore:
    """A copy of a store as it stood after one of its steps. The run can write on as soon as the copy is made."""
    if source.parent.name != LIVE_STORE.parent.name:
        store = BufferStore(target)
        store.restore(source)
        return store
    try:
        _copy_live(source, target)
    except sqlite3.Error as error:
        raise StoreError(f"cannot read the buffer store {source}: {error}") from error
    return BufferStore(target)


def _copy_live(source: Path, target: Path) -> None:
    reader = sqlite3.connect(f"{source.absolute().as_uri()}?mode=ro", uri=True, timeout=PATIENCE)
    copy = sqlite3.connect(target)
    try:
        reader.backup(copy)
    except sqlite3.OperationalError as error:
        if error.sqlite_errorcode not in (sqlite3.SQLITE_READONLY_ROLLBACK, sqlite3.SQLITE_READONLY_RECOVERY):
            raise
        # The run was killed while it wrote, and nobody has opened its store since. Roll back in the copy, not there.
        copy.close()
        for suffix in ("", "-journal"):
            shutil.copyfile(f"{source}{suffix}", f"{target}{suffix}")
    finally:
        copy.close()
        reader.close()


def newest_whole(path: Path) -> Path | None:
    """The newest whole checkpoint of an output folder. One that is just being written is nothing to warn of here."""
    whole = [checkpoint for checkpoint in path.glob("checkpoint-*[0-9]") if is_complete(checkpoint)]
    return max(whole, key=lambda checkpoint: int(checkpoint.name.rpartition("-")[2]), default=None)


def trainer_log(path: Path) -> list[dict]:
    """`log_history` of a checkpoint, or of the newest whole one in an output folder; empty if there is none."""
    state = path / "trainer_state.json"
    if not state.is_file() and (checkpoint := newest_whole(path)):
        state = checkpoint / "trainer_state.json"
    try:
        return json.loads(state.read_text(encoding="utf-8"))["log_history"] if state.is_file() else []
    except ValueError:  # it is just being written
        return []
