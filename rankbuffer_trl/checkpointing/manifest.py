"""The manifest of a checkpoint: which file it is, what it says, and how to find checkpoints.

A checkpoint has the folder `rankbuffer` with the state of the run beside the policy, and the manifest `run.json`. The
manifest names run and step, and lists all other files. A repository on the Hub has this folder too.
"""

import os
import re
from pathlib import Path
from typing import Any, TypedDict

from ..decoding import read_json_as, shown
from ..errors import RankBufferError

FORMAT = 4  # of `run.json`; another one is refused
FOLDER = "rankbuffer"
RUN = "run.json"  # the manifest
STATE = "trainer_state.json"


class CheckpointError(RankBufferError):
    """A checkpoint that cannot be written, or that a run cannot go on from."""


def checkpoint_step(path: Path) -> int | None:
    """Return the step in the name of a checkpoint's folder, `None` for any other name."""
    # Longer ones fit no step, and `re.ASCII` refuses other digits.
    match = re.fullmatch(r"checkpoint-(\d{1,18})", path.name, re.ASCII)
    return int(match[1]) if match else None


def checkpoints(output_dir: str | os.PathLike) -> list[tuple[int, Path]]:
    """Return step and folder of all checkpoints in `output_dir`, newest first."""
    numbered = ((checkpoint_step(path), path) for path in Path(output_dir).glob("checkpoint-*") if path.is_dir())
    return sorted(((step, path) for step, path in numbered if step is not None), reverse=True)


class Manifest(TypedDict):
    """What this package reads of `run.json`. A run tells more there, see [`RunState`]."""

    format: int
    step: int
    processes: int
    config: dict[str, Any]
    files: dict[str, list[int | str]]
    store_sha256: str


class LogEntry(TypedDict):
    """What the trainer logged at one step."""

    step: int


class State(TypedDict, total=False):
    """What a report reads of `trainer_state.json`."""

    global_step: int
    log_history: list[LogEntry]


def read_manifest(checkpoint: Path) -> Manifest:
    """Return the contents of a checkpoint's `run.json`.

    Raises:
        `ValueError`: if the file is missing, damaged, or of another version of this program.
    """
    path = checkpoint / FOLDER / RUN
    content = read_json_as(path, dict[str, Any])  # first the format, since another one may have other fields
    if content.get("format") != FORMAT:
        writer = shown(content.get("rankbuffer_trl"))
        raise ValueError(f"{RUN} was written by another version of this program ({writer}), in another format")
    run = read_json_as(path, Manifest)
    if not 0 <= run["step"] < 10**18:  # as many digits as the name of a checkpoint may have
        raise ValueError(f"{RUN} is damaged: 'step' is below 0 or above all steps")
    return run


def read_state(folder: Path) -> State:
    """Return what `trainer_state.json` says."""
    return read_json_as(folder / STATE, State, finite=False)  # the log of a run that went wrong may hold NaN
