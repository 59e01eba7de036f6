"""A training run with sampled rollouts and a checkpoint at every step."""

import shutil
from collections.abc import Callable
from pathlib import Path

from safetensors.torch import load_file
from transformers import TrainerCallback, TrainerControl

from helpers.scripted import config, contents
from rankbuffer_trl.store._places import LIVE_STORE
from rankbuffer_trl.training._trainer import RankBufferTrainer

EPOCHS = 3


def train(
    output_dir,
    policy,
    rows,
    resume=None,
    callback=None,
    eval_rows=None,
    weights="model",
    peft=None,
    judge=None,
    **changes,
):
    """Train, save at every step and at the end. Return everything that a second run must reproduce."""
    settings = config(output_dir, **(dict(num_train_epochs=EPOCHS, save_strategy="steps", save_steps=1) | changes))
    callbacks = [callback] if callback else None
    trainer = RankBufferTrainer(policy, settings, rows, eval_rows, callbacks=callbacks, judge=judge, peft_config=peft)
    try:
        trainer.train(resume_from_checkpoint=resume)
        trainer.save_model()
    finally:
        trainer.close()
    return contents(output_dir / LIVE_STORE), load_file(output_dir / f"{weights}.safetensors")


def same(run, other) -> bool:
    """Whether two runs ended alike."""
    weights, others = run[1], other[1]
    return run[0] == other[0] and all((weights[name] == others[name]).all() for name in weights)


class AtStep(TrainerCallback):
    """A callback that calls a function with the trainer's control after a step, before its checkpoint."""

    def __init__(self, step: int, call: Callable[[TrainerControl], object]):
        self.step, self.call = step, call

    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step == self.step:
            self.call(control)


def interrupt_at(step: int) -> TrainerCallback:
    """Ctrl-C after the optimizer step with this number, once it is done but before it is saved."""

    def interrupt(control: TrainerControl) -> None:
        raise KeyboardInterrupt

    return AtStep(step, interrupt)


def copy_checkpoints(whole: tuple[Path, tuple], folder: Path, *steps: int) -> Path:
    """Copy checkpoints of a run into a folder, and return the last one."""
    for step in steps:
        shutil.copytree(whole[0] / f"checkpoint-{step}", folder / f"checkpoint-{step}")
    return folder / f"checkpoint-{steps[-1]}"
