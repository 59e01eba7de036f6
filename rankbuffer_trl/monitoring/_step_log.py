"""The log of a run as a file: one JSON line for each line of the trainer's log, for programs that watch runs."""

import json
import math
import os
import time
from pathlib import Path
from typing import Any

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from ..files import write_whole
from ._non_fatal import non_fatal

METRICS_FILE = Path("_rankbuffer") / "metrics.jsonl"  # the Hub upload skips names that begin with an underscore
SUMMARY = "train_runtime"  # the end of each attempt is logged too, and is the number of no step


class StepLog(TrainerCallback):
    """A callback that appends what is logged to `_rankbuffer/metrics.jsonl`: `step`, `time` and the numbers."""

    def __init__(self, output_dir: str):
        self.path = Path(output_dir) / METRICS_FILE

    @non_fatal(METRICS_FILE.name)
    def on_train_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs) -> None:
        if state.is_world_process_zero and self.path.is_file():
            lines = self.path.read_text(errors="replace").splitlines()
            done = state.global_step or -1  # an evaluation before the first step has the step 0
            # Neither lines of steps that the run does again, nor one that a kill cut off.
            write_whole(self.path, "".join(f"{line}\n" for line in lines if 0 <= step_of(line) <= done))

    @non_fatal(METRICS_FILE.name)
    def on_log(self, args: Any, state: TrainerState, control: Any, logs: dict | None = None, **kwargs) -> None:
        if not state.is_world_process_zero or not logs or SUMMARY in logs:
            return
        # JSON has no NaN and no infinity.
        numbers = {key: None if type(it) is float and not math.isfinite(it) else it for key, it in logs.items()}
        line = {"step": state.global_step, "time": round(time.time(), 3), **numbers}  # seconds since 1970
        content = json.dumps(line, default=str).encode() + b"\n"
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with open(self.path, "ab", buffering=0) as file:
            if (written := file.write(content)) < len(content):  # the disk is full: no part of the line stays
                os.ftruncate(file.fileno(), file.tell() - written)
                raise OSError(f"no room for a line in {self.path}")


def step_of(line: str) -> int:
    try:
        return int(json.loads(line)["step"])
    except (ValueError, TypeError, LookupError, OverflowError, RecursionError):  # the fourth is of 1e400
        return -1  # not a whole line of this log
