"""Which files make a checkpoint whole, and where the live store is."""

import os
from pathlib import Path

from accelerate.logging import get_logger

from .store import StoreError

logger = get_logger(__name__)

SNAPSHOT = "rankbuffer.sqlite"
LIVE_STORE = Path("_rankbuffer") / "live.sqlite"  # the Hub upload skips names that begin with an underscore


def is_complete(checkpoint: Path) -> bool:
    """Whether a checkpoint holds the trainer's state, which is written last, and the buffers."""
    return (checkpoint / "trainer_state.json").is_file() and (checkpoint / SNAPSHOT).is_file()


def newest_checkpoint(output_dir: str | os.PathLike) -> Path:
    """The complete checkpoint with the highest step in `output_dir`.

    Raises:
        [`StoreError`]: if there is none.
    """
    numbered = [
        (int(path.name.removeprefix("checkpoint-")), path)
        for path in Path(output_dir).glob("checkpoint-*")
        if path.name.removeprefix("checkpoint-").isdigit()
    ]
    for _, path in sorted(numbered, reverse=True):
        if is_complete(path):
            return path
        logger.warning(f"skipping {path}: it is not a whole checkpoint (the run was stopped while it was written)")
    raise StoreError(f"no whole checkpoint in {output_dir} to resume from")
