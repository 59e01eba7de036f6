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

SAME_WARNING = 5.0  # seconds, in which the process group and the launcher can both send the first one


class StopEarly(TrainerCallback):
    """A callback that stops the run with a checkpoint after a SIGTERM to any process, or when a budget is used up.

    If the main process waits inside a step, the trainer need not finish it, see `on_signal` and `leave_step`. A later
    SIGTERM does what it did before training: as a rule it ends the process.

    Args:
        may_save (`Callable[[int], bool]`):
            Tells whether a checkpoint after this number of steps falls between two generations.
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
        self.received, self.stopping, self.stopped, self.saved = None, False, False, None
        if threading.current_thread() is threading.main_thread():  # elsewhere Python refuses a handler
            self._previous = signal.signal(signal.SIGTERM, self._receive)

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs) -> None:
        if not self.may_save(state.global_step):  # a run cannot resume exactly from inside a generation
            return
        cause = "SIGTERM" if self.received is not None else None
        # After the last step, the run ends by itself.
        if cause is None and state.is_world_process_zero and state.global_step < state.max_steps:
            cause = self.over_budget()
        flag = torch.tensor(int(cause is not None), device=PartialState().device)
        if not reduce(flag, reduction="sum").item():  # processes agree, so that all stop at the same step
            return
        logger.warning(f"{cause or 'SIGTERM'}: stopping after step {state.global_step} with a checkpoint")
        control.should_save = control.should_training_stop = self.stopping = True
        if args.save_strategy == SaveStrategy.BEST:  # the evaluation would decide whether to save
            control.should_evaluate = False

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs) -> None:
        self.stopped, self.saved = self.stopping, state.global_step

    def leave_step(self, control: TrainerControl) -> None:
        """Stop the run inside a step, with the checkpoint of the step before."""
        control.should_training_stop = self.stopping = self.stopped = True

    def on_epoch_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs) -> None:
        if self.stopped:
            control.should_save = control.should_evaluate = False  # the stop has saved, and an epoch may end with it

    def restore_handler(self) -> None:
        if self._previous is not None:
            signal.signal(signal.SIGTERM, self._previous)
        self._previous = None


class BeforePush(TrainerCallback):
    """A callback that runs `prepare` on the main process before an upload begins.

    The run's folder becomes the top of the repository. The trainer copies the policy there and nothing else, so
    `prepare` adds the rest.
    """

    def __init__(self, prepare: Callable[[], None]):
        self.prepare = prepare

    def on_push_begin(self, args: Any, state: TrainerState, control: Any, **kwargs) -> None:
        if state.is_world_process_zero:  # while training, one process calls this; `push_to_hub` calls it on all
            self.prepare()
