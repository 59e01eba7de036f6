"""GRPO that can be killed at any moment and goes on exactly: TRL's trainer with whole checkpoints.

It knows nothing of rewards. What a run changes beside the policy is its [`RunState`], which is saved, taken up and
taken back together with the policy.
"""

import math
import random
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol

import numpy
import torch
from accelerate.logging import get_logger
from accelerate.utils import is_peft_model
from datasets import Dataset
from safetensors import SafetensorError
from transformers.trainer_utils import TrainOutput
from trl import GRPOTrainer

from ..errors import NotFiniteError, RankBufferError
from ..files import free_space
from . import manifest
from ._checkpoint import (
    Checkpoints,
    check_not_uploaded,
    check_trusted,
    delete_oldest,
    describe,
    files_of,
    policy_differences,
    write_manifest,
)
from ._distributed import StepLeft, leaves_step, on_main_process
from ._merged_base import keep_base_exact
from ._sampler import EpochSampler
from ._stop import BeforePush, StopEarly
from .manifest import FOLDER, RUN, CheckpointError, Manifest

logger = get_logger(__name__)

UNWRITABLE = (OSError, SafetensorError, RankBufferError)
# What torch says when a file cannot be written. It has no error class for it, and most of its RuntimeErrors are bugs.
TORCH_CANNOT_WRITE = (
    "inline_container.cc",
    "PytorchStreamWriter",
    "iostream error",
    "write(): fd",
    "Parent directory",
)
MOST_LEFT_OUT = 3  # steps in a row that DeepSpeed may leave out


class RunState(Protocol):
    """What a run changes beside the policy.

    The main process alone asks it, but for `steps_per_epoch`, `ends_generation` and `wake`.
    """

    file: str
    """The name of the file that `save` writes, below a checkpoint."""
    steps_per_epoch: int
    """The number of optimizer steps in an epoch."""

    def ends_generation(self, step: int) -> bool:
        """Return whether a generation ends after this step, so that a checkpoint there is exact."""

    def differences(self, saved: Mapping[str, Any]) -> list[str]:
        """Return a line for each thing that a manifest and this run do not have in common."""

    def facts(self) -> Mapping[str, Any]:
        """Return what the manifest tells of the run, for `differences` and for people."""

    def check_start(self, saved: Path | None, step: int) -> None:
        """Raise an error if the run must not start from this checkpoint, after its step."""

    def start(self, saved: Path | None) -> None:
        """Take up what a checkpoint's folder of the state holds, or begin anew."""

    def save(self, folder: Path) -> None:
        """Write the state into a folder."""

    def rewind(self, step: int) -> None:
        """Take back what was recorded after this step."""

    def over_budget(self) -> str | None:
        """Say why the run has to end after this step, `None` if it need not."""

    def wake(self) -> None:
        """End the wait of a step with [`StepLeft`]. A signal handler calls this."""


class ResumableTrainer(GRPOTrainer):
    """The GRPO trainer whose checkpoints are whole, and whose resumed runs equal undisturbed ones.

    Args:
        args:
            The positional arguments of [`~trl.GRPOTrainer`].
        run_state ([`RunState`]):
            What the run changes beside the policy.
        checkpoints ([`Checkpoints`], *optional*):
            What is known of the checkpoints already.
        trust_checkpoint (`bool`, *optional*, defaults to `False`):
            Whether to resume from a DeepSpeed or FSDP checkpoint from elsewhere, see [`check_trusted`].
        resume_with_changes (`bool`, *optional*, defaults to `False`):
            Whether to resume from a checkpoint of another run.
    """

    def __init__(
        self,
        *args,
        run_state: RunState,
        checkpoints: Checkpoints | None = None,
        trust_checkpoint: bool = False,
        resume_with_changes: bool = False,
        **kwargs,
    ):
        self.run_state = run_state
        self.trust_checkpoint = trust_checkpoint
        self.resume_with_changes = resume_with_changes
        super().__init__(*args, **kwargs)
        if self.use_vllm and is_peft_model(self.model):  # here alone TRL merges the adapter, for each transfer
            keep_base_exact(self.model)
        self._checkpoints = checkpoints
        self._after_step: Callable[[], None] | None = None
        self._in_step = False
        self._left_out = 0  # steps in a row without a finite gradient
        self._stop = StopEarly(run_state.ends_generation, run_state.over_budget, run_state.wake)
        self.add_callback(BeforePush(self._prepare_push))
        self.add_callback(self._stop)

    def current_epoch(self) -> int:
        """Return the epoch that the next step belongs to, an integer from 0."""
        # Not `state.epoch`, which is a float.
        return self.state.global_step // self.run_state.steps_per_epoch

    @property
    def interrupted(self) -> bool:
        """Whether a SIGTERM or a budget ended the last call of `train`. After its first step there is a checkpoint."""
        return self._stop.stopped

    def _get_train_sampler(self, dataset: Dataset | None = None) -> EpochSampler:
        # Without it, a resumed run would begin with the data order of epoch 0.
        return EpochSampler(super()._get_train_sampler(dataset), self.current_epoch)

    def train(self, resume_from_checkpoint: str | bool | None = None, **kwargs) -> TrainOutput:
        """Train, as [`~transformers.Trainer.train`] does.

        A SIGTERM or a used-up budget ends the run with a checkpoint, and `interrupted` is true then. A budget lets the
        current step end. A SIGTERM ends a step that waits in `run_state` at once.

        Args:
            resume_from_checkpoint (`str` or `bool`, *optional*):
                A checkpoint folder, or `True` for the newest whole one in `output_dir`. Policy and state come from it.

        Raises:
            [`CheckpointError`]: if the checkpoint is not whole, or belongs to another run.
            [`RankBufferError`]: if the state cannot start.
        """
        # One process reads and moves files; all get its error.
        checkpoint = on_main_process(lambda: self._prepare_run(resume_from_checkpoint))
        self._after_step, self._in_step, self._left_out = None, False, 0
        try:
            return super().train(resume_from_checkpoint=checkpoint, **kwargs)
        finally:
            self._stop.restore_handler()

    def _prepare_run(self, resume: str | bool | None) -> str | None:
        checkpoint, step, args = None, 0, self.args
        checkpoints = self._checkpoints or Checkpoints(args.output_dir, self.run_state.file)
        self._checkpoints = None  # for this call; checkpoints may change until the next one
        if args.save_only_model and args.save_strategy != "no":
            logger.warning("save_only_model is set: its checkpoints lack the optimizer, so this run cannot be resumed")
        if resume:
            checkpoint = checkpoints.newest() if resume is True else Path(resume)
            check_trusted(checkpoint, args.output_dir, self.trust_checkpoint)
            if args.push_to_hub:
                check_not_uploaded(checkpoint, args.output_dir)
            checkpoint, step = checkpoints.resumable(
                checkpoint, self._differences(checkpoint), args.world_size, self.resume_with_changes
            )
            if not self.run_state.ends_generation(step):  # a resumed run begins with a generation
                raise CheckpointError(f"{checkpoint} was saved inside a generation: resume from another checkpoint")
        self.run_state.check_start(checkpoint, step)  # before anything is moved: a refused start changes no file
        if checkpoint:
            checkpoints.set_torn_aside()
        self.run_state.start(checkpoint / FOLDER if checkpoint else None)
        checkpoints.set_old_aside(step)
        return str(checkpoint) if checkpoint else None

    def _differences(self, checkpoint: Path) -> Callable[[Manifest], list[str]]:
        adapter = self.model.peft_config["default"].to_dict() if is_peft_model(self.model) else None
        return lambda saved: [
            *self.run_state.differences(saved),
            *policy_differences(checkpoint, saved, self.args, adapter),
        ]

    def _run_epoch(self, **kwargs) -> None:
        if self.state.global_step >= self.state.max_steps:  # transformers would ask after one more step
            self.control.should_training_stop = True
            return
        try:
            super()._run_epoch(**kwargs)
        except StepLeft:  # a SIGTERM came while the step waited, in all processes
            step = self.state.global_step
            logger.warning(f"SIGTERM: stopping after step {step}, and leaving the next one, which was not finished")
            self._save_without_step()
            self._stop.leave_step(self.control)
        except Exception as error:
            # Saving is a collective, and must be exact.
            alone = self._in_step and self.args.world_size == 1  # of several processes the others may not come to save
            if not (alone or leaves_step(error)) or not self.run_state.ends_generation(self.state.global_step):
                raise
            try:
                self._save_without_step()
            except Exception as second:  # the first error is the cause, and is the one to raise
                logger.warning(f"the steps before could not be saved either: {second}")
            raise

    def training_step(self, *args, **kwargs) -> Any:
        """Take a step up to its gradient, as TRL does. An error inside leaves the policy of the last whole step."""
        self._in_step = True
        loss = super().training_step(*args, **kwargs)
        self._in_step = False  # an error of the optimizer may leave half a step
        return loss

    def _get_grad_norm(self, *args, **kwargs) -> Any:
        """Return the norm of the gradient as transformers does. Leave the step if it would destroy the policy."""
        norm = super()._get_grad_norm(*args, **kwargs)
        # With a scaler, as of fp16, a gradient beyond its range is usual, and its step is left out.
        if norm is None or math.isfinite(norm) or self.accelerator.scaler is not None or self.args.fp16:
            self._left_out = 0
            return norm
        fault = f"the gradient of step {self.state.global_step + 1} has the norm {norm:g}"
        if self.is_deepspeed_enabled:  # which has left the step out already, or taken it
            self._left_out = self._left_out + 1 if self.accelerator.optimizer_step_was_skipped else 0
            if self._left_out < MOST_LEFT_OUT:
                return norm
            fault = f"{fault}, as those of the {MOST_LEFT_OUT - 1} steps before have"
        raise NotFiniteError(
            f"{fault}, so the step was not taken: set bf16 to false and dtype to float32, or start again with a lower"
            " learning_rate, because a resume keeps that of its checkpoint"
        )

    def _issue_warnings_after_load(self, load_result: Any) -> None:
        """Refuse a checkpoint without weights of the policy, of which transformers only warns."""
        # transformers 5.17 restores no experts of a mixture without ZeRO (huggingface/transformers#48805).
        missing = set(load_result.missing_keys)
        weights = self.model.state_dict() if missing else {}
        tied = {weight.data_ptr() for name, weight in weights.items() if name not in missing}
        if lost := [name for name in weights if name in missing and weights[name].data_ptr() not in tied]:
            raise CheckpointError(
                f"{len(lost)} weights of the policy were not restored, among them {lost[0]}: start again under ZeRO-3,"
                " or resume with a version of transformers that restores them"
            )
        super()._issue_warnings_after_load(load_result)

    def _save_without_step(self) -> None:
        """Save the end of the step before, if this run has made one and it is not saved, on all processes."""
        step = self.state.global_step
        if self._after_step and self._stop.saved != step:  # before the first step there is nothing to save
            # Nothing of the step that waited or failed is kept: a resumed run repeats it.
            self._after_step()
            on_main_process(lambda: self.run_state.rewind(step))
            self._save_checkpoint(self.model, None)
            self.callback_handler.on_save(self.args, self.state, self.control)
            logger.warning(f"saved {self.args.output_dir}/checkpoint-{step}, the last whole step")

    def _maybe_log_save_evaluate(self, *args, **kwargs) -> None:
        """Log, save and evaluate after a step. Then note how to take back the step after it."""
        try:
            super()._maybe_log_save_evaluate(*args, **kwargs)
        finally:  # also if the evaluation failed, which has taken back what it drew
            tokens, restore = self.state.num_input_tokens_seen, random_states()

            def go_back() -> None:
                restore()
                self.state.num_input_tokens_seen = tokens

            self._after_step = go_back

    def evaluate(self, *args, **kwargs) -> dict[str, float]:
        """Evaluate as transformers does, and take back the random numbers that were drawn."""
        # If it fails, the checkpoint of its step then equals that of an undisturbed run, which is written after it.
        restore = random_states()
        try:
            return super().evaluate(*args, **kwargs)
        finally:
            restore()

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Save the policy, and first the state of the run."""
        folder = Path(output_dir or self.args.output_dir)
        in_checkpoint = _internal_call and folder != Path(self.args.output_dir)  # `push_to_hub` passes the latter
        # First, because TRL may push the folder. In a checkpoint the manifest waits for the files of all processes.
        on_main_process(lambda: self._save_state(folder, manifest=not in_checkpoint))
        super().save_model(output_dir, _internal_call)

    def _save_state(self, folder: Path, manifest: bool) -> None:
        try:
            (folder / FOLDER / RUN).unlink(missing_ok=True)  # first: a kill from here on leaves no whole folder
            self.run_state.save(folder / FOLDER)
            if manifest:
                self._write_manifest(folder, {self.run_state.file: folder / self.run_state.file})
        except OSError as error:
            raise CheckpointError(f"cannot write {folder}: {error}") from error

    def _write_manifest(self, folder: Path, files: dict[str, Path]) -> None:
        facts = describe(self.run_state.facts(), self.state.global_step, self.args)
        write_manifest(folder, facts, self.run_state.file, files)

    def _prepare_push(self) -> None:
        self._save_state(Path(self.args.output_dir), manifest=True)

    def _save_checkpoint(self, model: torch.nn.Module, trial: object) -> None:
        """Save a checkpoint as TRL does, then complete it, push it, and delete those that are too many."""
        run, limit = self._get_output_dir(trial=trial), self.args.save_total_limit
        checkpoint = Path(run, f"checkpoint-{self.state.global_step}")
        try:
            # TRL pushes and deletes here, before there is a manifest, and deletes by the clock: after it was set back,
            # each new checkpoint would be the oldest. So both are put off, to the end of this function.
            self.args.save_total_limit = None
            super()._save_checkpoint(model, trial)
            self.args.save_total_limit = limit
            self.accelerator.wait_for_everyone()  # until all processes have written their files
            on_main_process(lambda: self._write_manifest(checkpoint, files_of(checkpoint)))
        except (*UNWRITABLE, RuntimeError) as error:
            # A bug keeps its traceback.
            if not isinstance(error, UNWRITABLE) and not any(text in str(error) for text in TORCH_CANNOT_WRITE):
                raise
            # Only then is there something to resume from.
            older = any(step != self.state.global_step for step, _ in manifest.checkpoints(run))
            advice = "start the run as before, since no checkpoint was written before it"
            advice = "set resume_from_checkpoint to true" if older else advice
            raise CheckpointError(
                f"checkpoint-{self.state.global_step} could not be written to {self.args.output_dir}: {error}. The"
                f" disk of that folder has {free_space(run)} left: make room, raise the quota, or remove the cause."
                f" Then {advice}"
            ) from error
        finally:
            self.args.save_total_limit = limit
        if self.args.push_to_hub:
            super()._push_from_checkpoint(str(checkpoint))
            # transformers uploads in a thread, and nobody reads what it raises.
            for job in getattr(getattr(self, "push_in_progress", None), "jobs", ()):
                job.add_done_callback(warn_of_push)
        if self.args.should_save:  # by step, and not by the clock as transformers does
            delete_oldest(run, limit, self.state.best_model_checkpoint)

    def _push_from_checkpoint(self, checkpoint_folder: str) -> None:
        """Do nothing: `_save_checkpoint` pushes, once the checkpoint is whole."""


def warn_of_push(job: Any) -> None:
    """Say that a checkpoint is not on the Hub, where a run on another machine would look for it."""
    if not job.cancelled() and (error := job.exception()):
        logger.warning(f"a checkpoint did not reach the Hub, and the run goes on: {str(error).splitlines()[0][:300]}")


def random_states() -> Callable[[], None]:
    """Return a function that takes the random numbers of this process back to where they are now."""
    # The same that transformers writes into a checkpoint.
    states: list[tuple[Callable[[Any], Any], Any]] = [
        (random.setstate, random.getstate()),
        (numpy.random.set_state, numpy.random.get_state()),
        (torch.set_rng_state, torch.get_rng_state()),
        (torch.cuda.set_rng_state_all, torch.cuda.get_rng_state_all()),
    ]

    def restore() -> None:
        for set_state, state in states:
            set_state(state)

    return restore
