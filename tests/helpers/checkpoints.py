"""Which checkpoints of a folder are whole, as a run sees them."""

from pathlib import Path

from rankbuffer_trl.checkpointing._checkpoint import Checkpoints
from rankbuffer_trl.store._places import SAVED


def checkpoints_of(folder: Path) -> Checkpoints:
    return Checkpoints(folder, SAVED)


def why_torn(checkpoint: Path) -> str | None:
    return checkpoints_of(checkpoint.parent).fault(checkpoint)


def newest_checkpoint(folder: Path) -> Path:
    return checkpoints_of(folder).newest()
