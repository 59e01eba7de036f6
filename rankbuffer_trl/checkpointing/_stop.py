"""Callbacks of the trainer: stop early with a checkpoint, and write files before a push.

`enable_jit_checkpoint` of the trainer library is not used. With it each process acts on its own flag, and at once, so
processes can save at different steps or inside a generation.
"""

import signal
import threading
import time
from collections.abc import Callable
from typing import Any

import torch
from accelerate import PartialState
from accelerate.logging import get_logger
from accelerate.utils import reduce
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer_utils import SaveStrategy

logger = get_logger(__name__)

SAME_WARNING = 5.0  # seconds


class StopEarly(TrainerCallback):
    """A callback that stops the run with a checkpoint after a SIGTERM to any process, or when a budget is used up.

    Processes agree at the end of each optimizer step, so all of them stop at the same step. If the main process waits
    inside a step, the trainer need not finish it, see `on_signal` and `leave_step`. A SIGTERM within 5 seconds of the
    first is the same warning, which the process group and the launcher can both send. A later SIGTERM does what it did
    before training: as a rule it ends the process.

    Args:
        may_save (`Callable[[int], bool]`):
            Tells whether a checkpoint after this number of steps falls between two generations, so that a run can
            resume from it exactly.
        over_budget (`Callable[[], str | None]`, *optional*):
            Says which budget is used up, `None` if none is. It is called on the main process alone.
        on_signal (`Callable[[], None]`, *optional*):
            Called by the signal handler at the first SIGTERM.
    """

    def __init__(
        self,
        may_save: Callable[[int], bool],
        over_budget: Callable[[], str | None] = lambda: None,
        on_signal: Callable[[], None] = lambda: None,
    ):
        self.may_save = may_save
        self.over_budget = over_budget
        self.on_signal = on_signal
        self.received: float | None = None  # when, on the monotonic clock
        self.stopping = False
        self.stopped = False  # and the checkpoint is written
        self.saved: int | None = None  # the last step of this run with a checkpoint
        self._previous: Any = None  # the handler before training

    def _receive(self, number: int, frame: object) -> None:
        now = time.monotonic()
        if self.received is None:
            self.received = now
            self.on_signal()
        elif now - self.received > SAME_WARNING:
            signal.signal(number, self._previous)
            signal.raise_signal(number)

    def on_train_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs) -> None:
        """Listen for the signal. Python allows this in the main thread alone."""
        self.received, self.stopping, self.stopped, self.saved = None, False, False, None
        if threading.current_thread() is threading.main_thread():
            self._previous = signal.signal(signal.SIGTERM, self._receive)

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs) -> None:
        """Agree with the other processes. Stop and save at the end of the generation."""
        if not self.may_save(state.global_step):
            return
        cause = "SIGTERM" if self.received is not None else None
        if cause is None and state.is_world_process_zero and state.global_step < state.max_steps:
            cause = self.over_budget()
        flag = torch.tensor(int(cause is not None), device=PartialState().device)
        if not reduce(flag, reduction="sum").item():
            return
        logger.warning(f"{cause or 'SIGTERM'}: stopping after step {state.global_step} with a checkpoint")
        control.should_save = control.should_training_stop = self.stopping = True
        if args.save_strategy == SaveStrategy.BEST:  # the evaluation would decide whether to save
            control.should_evaluate = False

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs) -> None:
        """Note that the checkpoint is written."""
        self.stopped, self.saved = self.stopping, state.global_step

    def leave_step(self, control: TrainerControl) -> None:
        """Stop the run inside a step, with the checkpoint of the step before."""
        control.should_training_stop = self.stopping = self.stopped = True

    def on_epoch_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs) -> None:
        """Save and evaluate nothing more, although an epoch ends with the stop."""
        if self.stopped:
            control.should_save = control.should_evaluate = False

    def restore_handler(self) -> None:
        """Restore the earlier handler of the signal, however training ended."""
        if self._previous is not None:
            signal.signal(signal.SIGTERM, self._previous)
        self._previous = None


class BeforePush(TrainerCallback):
    """A callback that runs `prepare` on the main process before an upload begins.

    The run's folder becomes the top of the repository. The trainer copies the policy there and nothing else, so
    `prepare` adds the rest.

    Args:
        prepare (`Callable[[], None]`):
            Writes the files.
    """

    def __init__(self, prepare: Callable[[], None]):
        self.prepare = prepare

    def on_push_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: object
    ) -> None:
        """Run `prepare`. While training, the trainer calls this on the main process alone; `push_to_hub` on all."""
        if state.is_world_process_zero:
            self.prepare()
