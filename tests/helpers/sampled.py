"""A training run with sampled rollouts and a checkpoint at every step."""

from safetensors.torch import load_file
from transformers import TrainerCallback

from helpers.scripted import config, contents
from rankbuffer_trl.store.places import LIVE_STORE
from rankbuffer_trl.training.trainer import RankBufferTrainer

EPOCHS = 3


def train(output_dir, policy, rows, resume=None, callback=None, eval_rows=None, **overrides):
    """Real sampling, a checkpoint at every step. Returns everything a rerun must reproduce."""
    settings = config(output_dir, num_train_epochs=EPOCHS, save_strategy="steps", save_steps=1, **overrides)
    trainer = RankBufferTrainer(policy, settings, rows, eval_rows, callbacks=[callback] if callback else None)
    try:
        trainer.train(resume_from_checkpoint=resume)
        trainer.save_model()
    finally:
        trainer.close()
    return contents(output_dir / LIVE_STORE), load_file(output_dir / "model.safetensors")


def same(run, other):
    """Whether two runs ended alike."""
    weights, others = run[1], other[1]
    return run[0] == other[0] and all((weights[name] == others[name]).all() for name in weights)


class InterruptAt(TrainerCallback):
    """Ctrl-C after the optimizer step with this number, once it is done but before it is saved."""

    def __init__(self, step):
        self.step = step

    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step == self.step:
            raise KeyboardInterrupt
