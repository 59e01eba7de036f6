"""Where a run keeps its stores, and how to open one of them for reading.

A run's folder has the live store and the checkpoints. A checkpoint has the folder `rankbuffer`
with a copy of the store and the manifest, which names run and step. A repository on the Hub has this folder too.
"""

import os
import re
import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any, Required, TypedDict

from ..decoding import read_json, shown
from .buffer_store import STORE, BufferStore
from .database import VERSION, StoreError, open_to_read

FOLDER = "rankbuffer"
RUN = "run.json"  # the manifest
LIVE_STORE = Path("_rankbuffer") / "live.sqlite"  # the Hub upload skips names that begin with an underscore
STATE = "trainer_state.json"
REPORT = "_report"  # the folder of pages and results about a run, which the upload skips too
DUEL = "duel.json"


def checkpoint_step(path: Path) -> int | None:
    """Return the step in the name of a checkpoint's folder, `None` for any other name."""
    found = re.fullmatch(r"checkpoint-(\d{1,18})", path.name, re.ASCII)
    return int(found[1]) if found else None


def checkpoints(output_dir: str | os.PathLike) -> list[tuple[int, Path]]:
    """Return step and folder of all checkpoints in `output_dir`, newest first."""
    found = ((checkpoint_step(path), path) for path in Path(output_dir).glob("checkpoint-*") if path.is_dir())
    return sorted(((step, path) for step, path in found if step is not None), reverse=True)


def read_store(path: str | os.PathLike) -> BufferStore:
    """Open buffers, history and ledger for reading. Nothing is changed, and a run that trains is not held up.

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
    places = (path, path / LIVE_STORE, path / FOLDER / STORE)
    return BufferStore(next((place for place in places if place.is_file()), places[-1]), read_only=True)


def copy_live(live: Path, target: Path) -> BufferStore:
    """Copy a live store. A run that wants to write waits only while the copy is made.

    Raises:
        [`StoreError`]: if it cannot be read.
    """
    try:
        with closing(open_to_read(live)) as reader, closing(sqlite3.connect(target)) as copy:
            reader.backup(copy, pages=4096)  # in parts, between which the run can write
    except sqlite3.Error as error:
        raise StoreError(f"cannot read the buffer store {live}: {error}") from error
    return BufferStore(target, read_only=True, copy_of=live)


class Config(TypedDict, total=False):
    """The settings of a run that others read from its manifest; a manifest holds all of them."""

    seed: int
    rubric_dropout: float
    save_only_model: bool
    judge_prompt_price: float | None
    judge_cached_price: float | None
    judge_completion_price: float | None


class Manifest(TypedDict, total=False):
    """What the program reads of `run.json`. The keys that are not required are for people alone."""

    format: Required[int]
    step: Required[int]
    processes: Required[int]
    config: Required[Config]
    files: Required[dict[str, list[int | str]]]
    store_sha256: Required[str]
    policy: str | None
    data: str | None
    method: str
    method_args: dict[str, Any]
    judge: str
    judge_guard: bool


class LogEntry(TypedDict):
    """What the trainer logged at one step."""

    step: int


class State(TypedDict, total=False):
    """What a report reads of `trainer_state.json`."""

    global_step: int
    log_history: list[LogEntry]


def read_manifest(checkpoint: Path) -> Manifest:
    """Return the contents of a checkpoint's `run.json`, whose fields have the right types.

    Raises:
        `ValueError`: if the file is missing, damaged, or of another version of this program.
    """
    path = checkpoint / FOLDER / RUN
    found = read_json(path, dict[str, Any])
    if found.get("format") != VERSION:
        writer = shown(found.get("rankbuffer_trl"))
        raise ValueError(f"{RUN} was written by another version of this program ({writer}), in another format")
    run = read_json(path, Manifest)
    if not 0 <= run["step"] < 10**18:  # as many digits as the name of a checkpoint may have
        raise ValueError(f"{RUN} is damaged: 'step' is below 0 or above all steps")
    return run


def read_state(folder: Path) -> State:
    """Return what `trainer_state.json` says. The log of a run that went wrong may hold NaN.

    Raises:
        `ValueError`: if the file is missing or damaged.
    """
    return read_json(folder / STATE, State, finite=False)


def report_folder(path: Path) -> Path:
    """Return the folder for what is found out about a run: `_report` in its folder, or beside its store file."""
    return (path.parent if path.is_file() else path) / REPORT
