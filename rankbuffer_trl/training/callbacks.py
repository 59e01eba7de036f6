"""SIGTERM, a scheduler's warning: finish the step, write a checkpoint, end in peace.

The trainer library's own `enable_jit_checkpoint` is not used: there each process acts on its own flag, and at once, so
that processes can save at different steps or inside a generation.
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


class StopOnSigterm(TrainerCallback):
    """Stops the run with a checkpoint once any process has got a SIGTERM.

    Processes agree at the end of each optimizer step, so all stop at the same one. A SIGTERM more than 5 seconds after
    the first one does what it did before training: as a rule it ends the process. Earlier ones are the same warning,
    which can come from the process group and from the launcher.

    Args:
        may_save (`Callable[[int], bool]`):
            Whether a checkpoint after so many steps can be resumed exactly, that is, falls between two generations.
    """

    def __init__(self, may_save: Callable[[int], bool]):
        self.may_save = may_save
        self.received: float | None = None  # when, on the monotonic clock
        self.stopping = False
        self.stopped = False  # with a checkpoint
        self._previous: Any = None  # what `signal.signal` gave back

    def _receive(self, number: int, frame: object) -> None:
        now = time.monotonic()
        if self.received is None:
            self.received = now
        elif now - self.received > SAME_WARNING:
            signal.signal(number, self._previous)
            signal.raise_signal(number)

    def on_train_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs) -> None:
        """Listen, from the main thread, which alone may."""
        self.received, self.stopping, self.stopped = None, False, False
        if threading.current_thread() is threading.main_thread():
            self._previous = signal.signal(signal.SIGTERM, self._receive)

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs) -> None:
        """Agree; stop and save at the end of the generation."""
        flag = torch.tensor(int(self.received is not None), device=PartialState().device)
        if not self.may_save(state.global_step) or not reduce(flag, reduction="sum").item():
            return
        logger.warning(f"SIGTERM: stopping after step {state.global_step} with a checkpoint")
        control.should_save = control.should_training_stop = self.stopping = True
        if args.save_strategy == SaveStrategy.BEST:  # the evaluation would decide whether to save
            control.should_evaluate = False

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs) -> None:
        """The checkpoint is written."""
        self.stopped = self.stopping

    def on_epoch_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs) -> None:
        """Nothing more, though an epoch ends with the stop."""
        if self.stopped:
            control.should_save = control.should_evaluate = False

    def leave(self) -> None:
        """Leave the signal as it was, however training ended."""
        if self._previous is not None:
            signal.signal(signal.SIGTERM, self._previous)
        self._previous = None


class BeforePush(TrainerCallback):
    """Runs `prepare` on the main process before an upload begins.

    A checkpoint's own files are written by `save_model`. The run's folder, which becomes the repository's top, gets
    its share here: the trainer copies the policy there and nothing else.

    Args:
        prepare (`Callable[[], None]`):
            Writes the files.
    """

    def __init__(self, prepare: Callable[[], None]):
        self.prepare = prepare

    def on_push_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: object
    ) -> None:
        """Called on every process by `push_to_hub`, on the main one alone while training."""
        if state.is_world_process_zero:
            self.prepare()
