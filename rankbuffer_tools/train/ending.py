"""How a run of `rankbuffer-train` ends: its exit code, and what a launch script is told."""

import os
from pathlib import Path

from rankbuffer_trl.checkpointing.manifest import checkpoints
from rankbuffer_trl.errors import RankBufferError, ServerError
from rankbuffer_trl.training import non_fatal

FAILED, SERVER_FAILED = 1, 75  # 75 is EX_TEMPFAIL of sysexits.h
STATUS_FILE = "RANKBUFFER_STATUS_FILE"  # `accelerate launch` exits with 1 for every error


def exit_code(error: RankBufferError) -> int:
    """Return the exit code of an error: 75 if a fault of the judge or the rollout server may pass, else 1."""
    # The same prose, context or account would end each further attempt.
    return SERVER_FAILED if isinstance(error, ServerError) and error.passing else FAILED


@non_fatal(STATUS_FILE)
def tell_launcher(error: RankBufferError, output_dir: str, step: int) -> None:
    """Write the exit code of a server's error, and how to go on, into the file that `STATUS_FILE` names."""
    if (file := os.environ.get(STATUS_FILE)) and exit_code(error) == SERVER_FAILED:
        # Before step 1, checkpoints are those of an earlier run.
        resume = " --resume_from_checkpoint true" if step and checkpoints(output_dir) else ""
        Path(file).write_text(f"{SERVER_FAILED}{resume}\n")
