"""SIGTERM, a scheduler's warning: finish the step, write a checkpoint, end in peace.

The trainer library's own `enable_jit_checkpoint` is not used: there each process acts on its own flag, and at once, so
that processes can save at different steps or inside a generation.
"""

import signal
import threading
from collections.abc import Callable
from typing import Any

import torch
from accelerate import PartialState
from accelerate.logging import get_logger
from accelerate.utils import reduce
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

logger = get_logger(__name__)


class StopOnSigterm(TrainerCallback):
    """Stops the run with a checkpoint once any process has got a SIGTERM.

    Processes agree at the end of each optimizer step, so all stop at the same one. A second SIGTERM ends a process at
    once.

    Args:
        may_save (`Callable[[int], bool]`):
            Whether a checkpoint after so many steps can be resumed exactly, that is, falls between two generations.
    """

    def __init__(self, may_save: Callable[[int], bool]):
        self.may_save = may_save
        self.received = False
        self.stopped = False
        self._previous: Any = None  # what `signal.signal` gave back

    def _receive(self, number: int, frame: object) -> None:
        self.received = True
        signal.signal(number, self._previous)

    def on_train_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs) -> None:
        """Listen, from the main thread, which alone may."""
        self.received = self.stopped = False
        if threading.current_thread() is threading.main_thread():
            self._previous = signal.signal(signal.SIGTERM, self._receive)

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs) -> None:
        """Agree; stop and save at the end of the generation."""
        flag = torch.tensor(int(self.received), device=PartialState().device)
        if not self.may_save(state.global_step) or not reduce(flag, reduction="sum").item():
            return
        logger.warning(f"SIGTERM: stopping after step {state.global_step} with a checkpoint")
        control.should_save = control.should_training_stop = self.stopped = True

    def leave(self) -> None:
        """Leave the signal as it was, however training ended."""
        if self._previous is not None and not self.received:
            signal.signal(signal.SIGTERM, self._previous)
        self._previous = None
