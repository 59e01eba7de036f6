"""Where a run keeps its stores, and how to open one of them for reading.

A run's folder has the live store and the checkpoints. A checkpoint has a copy of the store in its folder `rankbuffer`.
"""

import os
import sqlite3
from contextlib import closing
from pathlib import Path

from ..checkpointing.manifest import FOLDER
from ._buffer_store import STORE_FILE, BufferStore
from ._database import StoreError, open_to_read

SAVED = f"{FOLDER}/{STORE_FILE}"  # the store of a checkpoint, by its name in the manifest
LIVE_STORE = Path("_rankbuffer") / "live.sqlite"  # the Hub upload skips names that begin with an underscore
REPORT = "_report"  # the folder of pages and results about a run, which the upload skips too
DUEL_FILE = "duel.json"  # of two epochs of a run
COMPARE_FILE = "compare.json"  # of two policies


def read_store(path: str | os.PathLike) -> BufferStore:
    """Open buffers, history and ledger for reading. A run that trains is not held up.

    Example:

    ```python
    from rankbuffer_trl import read_store

    store = read_store("runs/mine/checkpoint-100")
    print(store.totals().calls, store.query_ids()[:3])
    ```

    Args:
        path (`str` or `PathLike`):
            A run's folder, a checkpoint, a folder pulled from the Hub, or an SQLite file.

    Raises:
        [`StoreError`]: if there is no store.
    """
    path = Path(path)
    # A run's folder may also have a saved store, which is older.
    places = (path, path / LIVE_STORE, path / FOLDER / STORE_FILE)
    return BufferStore(next((place for place in places if place.is_file()), places[-1]), read_only=True)


def copy_live(live: Path, target: Path) -> BufferStore:
    """Copy a live store, while the run goes on writing.

    Raises:
        [`StoreError`]: if it cannot be read.
    """
    try:
        with closing(open_to_read(live)) as reader, closing(sqlite3.connect(target)) as copy:
            reader.backup(copy, pages=4096)  # in parts, between which the run can write
    except sqlite3.Error as error:
        raise StoreError(f"cannot read the buffer store {live}: {error}") from error
    return BufferStore(target, read_only=True, copy_of=live)


def report_folder(path: Path) -> Path:
    """Return the folder for what is found out about a run: `_report` in its folder, or beside its store file."""
    return (path.parent if path.is_file() else path) / REPORT
