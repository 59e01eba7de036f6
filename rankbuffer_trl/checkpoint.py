"""Which files make a checkpoint whole, where the stores are, and how to read them.

A checkpoint of the trainer holds the folder `rankbuffer`: the store's segments (`store/segments.py`) and `run.json`,
which says what run it belongs to (`identity.py`).
"""

import json
import os
import struct
import zipfile
from collections.abc import Mapping
from itertools import count
from pathlib import Path
from typing import Any

from accelerate.logging import get_logger

from .identity import differences
from .store import BufferStore, StoreError, segments

logger = get_logger(__name__)

FOLDER = "rankbuffer"
RUN = "run.json"
LIVE_STORE = Path("_rankbuffer") / "live.sqlite"  # the Hub upload skips names that begin with an underscore
STATE = "trainer_state.json"
TORN, OLD = "_torn", "_old"  # not uploaded either


def why_torn(checkpoint: Path) -> str | None:
    """What a checkpoint lacks; `None` if it is whole.

    The trainer's state is written last, but a folder that was copied in part or hit by a power cut can have it all the
    same, so every file that has a known form is checked for its end.
    """
    try:
        read_json(checkpoint / STATE)
        processes = read_json(checkpoint / FOLDER / RUN)["processes"]
        segments.read(checkpoint / FOLDER)
    except ValueError as error:
        return str(error)
    for name in ["rng_state.pth"] if processes == 1 else [f"rng_state_{rank}.pth" for rank in range(processes)]:
        if not (checkpoint / name).is_file():
            return f"{name} is missing"
    for name, pattern in {"weights": "*.safetensors", "optimizer.pt": "optimizer*"}.items():
        if not any(any(checkpoint.glob(found)) for found in (pattern, "global_step*")):  # DeepSpeed has its own folder
            return f"{name} is missing"
    for index in checkpoint.glob("*.index.json"):
        for name in sorted(set(read_json(index)["weight_map"].values())):
            if not (checkpoint / name).is_file():
                return f"{name} is missing"
    for path in sorted(checkpoint.rglob("*")):
        if path.suffix in (".pt", ".pth", ".bin") and not zipfile.is_zipfile(path):
            return f"{path.name} is cut short"
        if path.suffix == ".safetensors" and not ends_as_told(path):
            return f"{path.name} is cut short"
    return None


def read_json(path: Path) -> dict:
    """The contents of a JSON file.

    Raises:
        `ValueError`: if it is missing or cut short.
    """
    try:
        return json.loads(path.read_text())
    except OSError:
        raise ValueError(f"{path.name} is missing") from None
    except ValueError:
        raise ValueError(f"{path.name} is cut short") from None


def ends_as_told(path: Path) -> bool:
    """Whether a safetensors file is as long as its header says."""
    try:
        with open(path, "rb") as file:
            (length,) = struct.unpack("<Q", file.read(8))
            header = json.loads(file.read(length))
    except (struct.error, ValueError, MemoryError, OverflowError):
        return False
    ends = [tensor["data_offsets"][1] for name, tensor in header.items() if name != "__metadata__"]
    return path.stat().st_size == 8 + length + max(ends, default=0)


def checkpoints(output_dir: str | os.PathLike) -> list[tuple[int, Path]]:
    """Step and folder of all checkpoints in `output_dir`, newest first."""
    paths = {path: path.name.removeprefix("checkpoint-") for path in Path(output_dir).glob("checkpoint-*")}
    return sorted(((int(step), path) for path, step in paths.items() if step.isdigit()), reverse=True)


def newest_checkpoint(output_dir: str | os.PathLike) -> Path:
    """The whole checkpoint with the highest step in `output_dir`. Torn ones above it are skipped with a line.

    Raises:
        [`StoreError`]: if there is none.
    """
    for _, path in checkpoints(output_dir):
        torn = why_torn(path)
        if torn is None:
            return path
        logger.warning(f"skipping {path}, which is not a whole checkpoint (the run was stopped while writing): {torn}")
    raise StoreError(f"no whole checkpoint in {output_dir} to resume from")


def set_torn_aside(output_dir: str | os.PathLike) -> None:
    """Move torn checkpoints to `_torn`, so that `save_total_limit` does not keep one in the place of a whole one."""
    for _, path in checkpoints(output_dir):
        if why_torn(path) is not None:
            set_aside(path, TORN)


def set_old_aside(output_dir: str | os.PathLike, step: int) -> None:
    """Move checkpoints above `step`, where a run starts, to `_old`: they are not its own, and look like its newest."""
    old = [path for number, path in checkpoints(output_dir) if number > step]
    for path in old:
        set_aside(path, OLD)
    if old:
        names = ", ".join(path.name for path in old)
        logger.warning(f"{output_dir}: moved to {OLD}/, since this run starts at step {step}: {names}")


def set_aside(checkpoint: Path, folder: str) -> None:
    """Move a checkpoint into a folder beside it, under a name that is free."""
    names = (checkpoint.parent / folder / f"{checkpoint.name}.{number}" for number in count())
    (checkpoint.parent / folder).mkdir(exist_ok=True)
    checkpoint.rename(next(name for name in names if not name.exists()))


def check_not_uploaded(checkpoint: Path, output_dir: str | os.PathLike) -> None:
    """Refuse a checkpoint that lies where each push of `output_dir` would put it over the newest one on the Hub.

    Raises:
        [`StoreError`]: naming where to put it.
    """
    home = Path(output_dir).resolve()
    if not checkpoint.resolve().is_relative_to(home):
        return
    first = next(iter(checkpoint.resolve().relative_to(home).parts), "")
    if not first.startswith("_") and not first.removeprefix("checkpoint-").isdigit():
        raise StoreError(
            f"{checkpoint} lies in output_dir, so every push would upload it again, over a newer one on the Hub: move"
            f" it into {Path(output_dir) / '_from_hub'} (names that begin with an underscore stay here)"
        )


def check_resumable(checkpoint: Path, identity: Mapping[str, Any], with_changes: bool) -> None:
    """Refuse a checkpoint that is not whole, or whose buffers belong to another run, unless changes are allowed.

    Raises:
        [`StoreError`]: naming what is missing, or all that differs.
    """
    torn = why_torn(checkpoint)
    if torn:
        raise StoreError(f"{checkpoint} is not a whole checkpoint: {torn}")
    saved = read_json(checkpoint / FOLDER / RUN)
    changed = differences(saved, identity)
    message = f"{checkpoint} belongs to another run:\n  " + "\n  ".join(changed)
    if changed and not with_changes:
        raise StoreError(f"{message}\nSet resume_with_changes to go on from it all the same")
    if changed:
        logger.warning(message)
    if saved["processes"] != identity["processes"]:
        logger.warning(
            f"{checkpoint} was saved by {saved['processes']} processes, now there are {identity['processes']}: queries"
            " are visited in the same order, but sampled rollouts will differ"
        )


def check_step(checkpoint: Path, store: BufferStore) -> int:
    """The step of a checkpoint, which is refused if policy and restored buffers are of different steps.

    Raises:
        [`StoreError`]: naming both steps.
    """
    step, last = read_json(checkpoint / STATE)["global_step"], store.last_step()
    if last is not None and last >= step:
        raise StoreError(f"{checkpoint} does not belong together: the policy is at step {step}, its buffers at {last}")
    return step


def write_store(store: BufferStore, checkpoint: Path, run: Mapping[str, Any]) -> None:
    """Put the store and `run.json` into a checkpoint, or into the run's folder, before the trainer writes the rest.

    Raises:
        [`StoreError`]: if they cannot be written.
    """
    try:
        store.save(checkpoint / FOLDER)
        segments.write_json(checkpoint / FOLDER / RUN, run, indent=1)
    except OSError as error:
        raise StoreError(f"cannot write {checkpoint}: {error}") from error


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
