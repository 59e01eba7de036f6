"""A judge that falls silent in a step, and a signal to the run while it waits for the judge."""

import asyncio
import os
import signal

from transformers import TrainerCallback

from rankbuffer_trl.judge import RubricJudge


class SilentJudge(RubricJudge):
    """The embedded judge, which never answers again once it is silent and `left` more questions are answered."""

    def __init__(self, left: int = 0, number: int = signal.SIGTERM):
        self.silent, self.left, self.number = False, left, number

    async def complete(self, *args, **kwargs):
        if self.silent and (left := self.left) <= 0:
            self.left -= 1
            if left == 0:
                os.kill(os.getpid(), self.number)
            await asyncio.Event().wait()
        self.left -= self.silent
        return await super().complete(*args, **kwargs)


class Silence(TrainerCallback):
    """A callback that makes a judge silent in a step, or at the next of its micro steps. It notes what is saved."""

    def __init__(self, judge: SilentJudge, step: int, substep: bool = False):
        self.judge, self.step, self.substep = judge, step, substep
        self.saved: list[int] = []

    def on_step_begin(self, args, state, control, **kwargs):
        self.judge.silent |= not self.substep and state.global_step == self.step

    def on_substep_end(self, args, state, control, **kwargs):
        self.judge.silent |= self.substep and state.global_step == self.step

    def on_save(self, args, state, control, **kwargs):
        self.saved.append(state.global_step)
