"""Where a run keeps its stores, and how to open them for reading."""

import os
from pathlib import Path

from .buffer_store import BufferStore

FOLDER = "rankbuffer"
RUN = "run.json"
LIVE_STORE = Path("_rankbuffer") / "live.sqlite"  # the Hub upload skips names that begin with an underscore
STATE = "trainer_state.json"


def checkpoints(output_dir: str | os.PathLike) -> list[tuple[int, Path]]:
    """Step and folder of all checkpoints in `output_dir`, newest first."""
    paths = {path: path.name.removeprefix("checkpoint-") for path in Path(output_dir).glob("checkpoint-*")}
    return sorted(((int(step), path) for path, step in paths.items() if step.isdigit()), reverse=True)


def read_store(path: str | os.PathLike) -> BufferStore:
    """Open buffers, history and ledger for reading.

    Args:
        path (`str` or `PathLike`):
            A run's folder, a checkpoint, a folder pulled from the Hub, or an SQLite file.

    Raises:
        [`StoreError`]: if there is no store.
    """
    path = Path(path)
    if path.is_file():
        return BufferStore(path, read_only=True)
    if (path / LIVE_STORE).is_file():
        return BufferStore(path / LIVE_STORE, read_only=True)
    store = BufferStore()
    store.restore(path / FOLDER)
    return store
