"""How a run of `rankbuffer-train` ends: its exit code, and what a command that waits for the end is told."""

import os
import shlex
import shutil
import subprocess
from pathlib import Path

from accelerate import PartialState

from rankbuffer_trl.errors import RankBufferError, SettingsError
from rankbuffer_trl.exact.manifest import checkpoints
from rankbuffer_trl.informs.informing import informing
from rankbuffer_trl.judge import JudgeError
from rankbuffer_trl.training.budget import spent_before
from rankbuffer_trl.training.config import RankBufferConfig
from rankbuffer_trl.training.rollouts import RolloutError

FAILED, SERVER_FAILED = 1, 75  # 75 is EX_TEMPFAIL of sysexits.h
STATUS_FILE = "RANKBUFFER_STATUS_FILE"
HOOK_SECONDS = 30.0


def exit_code(error: RankBufferError) -> int:
    """Return the exit code of an error: 75 for a judge or a rollout server that failed, else 1."""
    return SERVER_FAILED if isinstance(error, JudgeError | RolloutError) else FAILED


@informing(STATUS_FILE)
def tell_launcher(error: RankBufferError, output_dir: str, step: int) -> None:
    """Write the exit code, and how to go on, into the file that the environment variable names.

    `accelerate launch` exits with 1 for every error, so a launch script reads this file. Only the error of a server is
    written. The arguments of a resume follow if this run has a checkpoint. Before its first `step`, the checkpoints of
    an earlier run can still be in the folder.
    """
    if (file := os.environ.get(STATUS_FILE)) and exit_code(error) == SERVER_FAILED:
        resume = " --resume_from_checkpoint true" if step and checkpoints(output_dir) else ""
        Path(file).write_text(f"{SERVER_FAILED}{resume}\n")


def stop_words(command: str) -> list[str]:
    """Split `on_stop_command` into a program and its arguments.

    Raises:
        [`SettingsError`]: if there is no such program. The rest of the command is not shown.
    """
    try:
        words = shlex.split(command)
    except ValueError as error:
        raise SettingsError(f"on_stop_command cannot be read ({error}): close its quotes") from None
    if not words or not shutil.which(words[0]):
        raise SettingsError(f"on_stop_command: there is no program {words[:1]}: name one, with its path")
    return words


@informing("on_stop_command")
def tell_command(args: RankBufferConfig, reason: str, step: int) -> None:
    """Run `on_stop_command` on the main process, for 30 seconds at most. There is no shell.

    `reason` is `finished`, `SIGTERM`, `budget` or the class of the error that ended the run.
    Its environment has `RANKBUFFER_REASON`, `RANKBUFFER_STEP`, `RANKBUFFER_OUTPUT_DIR`, `RANKBUFFER_JUDGE_TOKENS`, and
    `RANKBUFFER_JUDGE_PRICE`, which is empty without prices. No text of a prompt, a model or an error is passed.
    """
    if not args.on_stop_command or not PartialState().is_main_process:
        return
    spent = spent_before(args.output_dir, None)
    if reason == "SIGTERM" and args.over_budget(spent):  # both end the run in the same way
        reason = "budget"
    price = args.endpoint.price(spent)
    told = {"REASON": reason, "STEP": step, "OUTPUT_DIR": args.output_dir, "JUDGE_TOKENS": spent.spent_tokens}
    told["JUDGE_PRICE"] = "" if price is None else f"{price:.6f}"
    environment = os.environ | {f"RANKBUFFER_{key}": str(value) for key, value in told.items()}
    words = stop_words(args.on_stop_command)
    try:
        ended = subprocess.run(words, env=environment, stdin=subprocess.DEVNULL, timeout=HOOK_SECONDS)
    except subprocess.TimeoutExpired:  # whose text has the arguments
        raise RuntimeError(f"it took longer than {HOOK_SECONDS:g} s") from None
    if ended.returncode:
        raise RuntimeError(f"it ended with exit code {ended.returncode}")
