"""Every knob of a RankBuffer run, on top of TRL's `GRPOConfig`, checked before anything is loaded."""

import math
from dataclasses import dataclass, field

from trl import GRPOConfig

from ..judge.config import JudgeConfig, read_object
from ..rewards.format import check_format
from ..rewards.method import RewardMethod, load_method


@dataclass
class RankBufferConfig(JudgeConfig, GRPOConfig):
    r"""
    Configuration class for the [`RankBufferTrainer`].

    It adds the parameters below and those of [`JudgeConfig`] to those of TRL's [`~trl.GRPOConfig`], whose defaults it
    leaves alone. Defaults are the paper's, except that no format is required (`format_check`) and that responses are
    quoted in prompts (`judge_guard`).

    Parameters:
        > Parameters that control the reward

        method (`str`, *optional*, defaults to `"rankbuffer"`):
            The reward method: a file of `rankbuffer_trl/rewards`, or the dotted path of a class of yours.
        method_args (`dict`, *optional*):
            Its arguments, as JSON on the command line. They stand in the method's own file.
        scale_by_signal (`bool`, *optional*, defaults to `False`):
            Divide the rewards of a generation by the share of its groups whose rewards differ (GPG's rescaling).

        > Parameters that control prompts and answers

        format_check (`str`, *optional*, defaults to `"none"`):
            The format a completion must have: `"think"` (one closed `<think>` block, then an answer; the paper's),
            `"none"`, or a regular expression for the whole text, whose group `answer` is the answer. The judge sees
            the answer alone.
        format_weight (`float`, *optional*, defaults to `0.2`):
            Weight of the format reward (0 or 1) beside the rank reward in [-1, 1].
        max_prompt_length (`int`, *optional*):
            Longest rendered prompt in tokens; a longer one is refused at start. Default: not checked.

        > Parameters that control the start

        preflight_only (`bool`, *optional*, defaults to `False`):
            Check data and judge, print what the run will cost, and stop (`recipes/train_rankbuffer.py`).
        resume_with_changes (`bool`, *optional*, defaults to `False`):
            Go on from a checkpoint though data, method, judge model or another setting that buffers depend on is not
            what it was (`docs/robustness.md`).
        dry_run (`bool`, *optional*, defaults to `False`):
            Check settings and data, print the batch arithmetic, and stop: no GPU, no judge, no policy.
        num_processes (`int`, *optional*):
            How many processes a dry run is for. Default: as many as run.
    """

    method: str = field(
        default="rankbuffer",
        metadata={"help": "The reward method: a file of rankbuffer_trl/rewards, or the dotted path of a class."},
    )
    method_args: dict | str | None = field(
        default=None, metadata={"help": "JSON object of the method's arguments, which stand in its own file."}
    )
    scale_by_signal: bool = field(
        default=False,
        metadata={"help": "Divide a generation's rewards by the share of its groups whose rewards differ (GPG)."},
    )
    format_check: str = field(
        default="none",
        metadata={
            "help": "Required format: 'think', 'none', or a regular expression with an optional group 'answer'."
        },
    )
    format_weight: float = field(default=0.2, metadata={"help": "Weight of the format reward beside the rank reward."})
    max_prompt_length: int | None = field(
        default=None, metadata={"help": "Longest rendered prompt in tokens; a longer one is refused at start."}
    )
    preflight_only: bool = field(
        default=False, metadata={"help": "Check data and judge, print what the run will cost, and stop."}
    )
    resume_with_changes: bool = field(
        default=False,
        metadata={
            "help": "Resume though data, method or judge model is not what it was when the checkpoint was saved."
        },
    )
    dry_run: bool = field(
        default=False, metadata={"help": "Check settings and data, print the batch arithmetic, and stop."}
    )
    num_processes: int | None = field(
        default=None, metadata={"help": "How many processes a dry run is for. Default: as many as run."}
    )

    def __post_init__(self):
        self._check_processes()
        try:
            GRPOConfig.__post_init__(self)
        except ValueError as error:
            raise ValueError(f"{error}{self._what_fits(str(error))}") from None
        JudgeConfig.__post_init__(self)
        self._check_step_timeout()
        if self.format_weight < 0:
            raise ValueError(f"format_weight must be at least 0, got {self.format_weight}")
        if self.max_prompt_length is not None and self.max_prompt_length < 1:
            raise ValueError(f"max_prompt_length must be at least 1 token, got {self.max_prompt_length}")
        check_format(self.format_check)
        if self.reward_weights is not None:
            raise ValueError(
                "reward_weights is set by RankBufferTrainer (rank 1.0, format format_weight); set format_weight"
            )
        self.method_args = read_object("method_args", self.method_args)
        self.reward_method()
        self._check_save_steps()
        if self.save_total_limit == 1 and self.metric_for_best_model is not None:
            raise ValueError(
                "save_total_limit=1 with metric_for_best_model or load_best_model_at_end leaves only the best"
                " checkpoint when training ends, so that of a SIGTERM would be lost; set at least 2"
            )

    @property
    def world_size(self) -> int:
        """Processes that train; in a dry run those that it is for."""
        return self.num_processes or super().world_size

    def _check_processes(self) -> None:
        if self.num_processes is not None and not self.dry_run:
            raise ValueError(
                "num_processes is for dry_run; the processes of a run are those of `accelerate launch --num_processes`"
            )
        if self.num_processes is not None and self.num_processes < 1:
            raise ValueError(f"num_processes must be at least 1, got {self.num_processes}")
        if self.dry_run:  # the settings may be those of another machine
            self.use_cpu, self.bf16, self.fp16 = True, False, False

    def _what_fits(self, error: str) -> str:
        """For TRL's two errors of batches that hold no whole groups: what would."""
        N, G = self.world_size, self.num_generations
        if error.startswith("generation_batch_size") and "num_generations" in error:
            rollouts = N * self.per_device_train_batch_size
            return (
                f" With {N} processes x per_device_train_batch_size {self.per_device_train_batch_size},"
                f" gradient_accumulation_steps (or steps_per_generation) must be a multiple of"
                f" {G // math.gcd(rollouts, G)}, got {self.steps_per_generation}."
            )
        if error.startswith("The global eval batch size"):
            G = self.num_generations_eval or G
            return (
                f" With {N} processes, per_device_eval_batch_size must be a multiple of {G // math.gcd(N, G)}, got"
                f" {self.per_device_eval_batch_size}."
            )
        return ""

    def _check_step_timeout(self) -> None:
        """The other processes wait in a collective while the main one judges; when that gives up, the run is lost."""
        if self.judge_step_timeout is None:
            self.judge_step_timeout = 0.9 * self.ddp_timeout
        if self.judge_step_timeout >= self.ddp_timeout:
            raise ValueError(
                f"judge_step_timeout is {self.judge_step_timeout:g} s, but the other processes give up after"
                f" ddp_timeout={self.ddp_timeout} s: raise ddp_timeout or lower judge_step_timeout"
            )

    def _check_save_steps(self) -> None:
        """A resumed run generates anew at once, so a checkpoint inside a generation would score its queries twice."""
        if self.enable_jit_checkpoint:
            raise ValueError(
                "enable_jit_checkpoint can save inside a generation, and at another step on each process; leave it"
                " off: SIGTERM is handled without it"
            )
        generation = self.steps_per_generation * self.num_iterations  # micro steps that use one generation
        step = self.gradient_accumulation_steps  # micro steps in one optimizer step
        best = "eval_steps" if self.eval_strategy == "steps" else None
        key = {"steps": "save_steps", "best": best}.get(self.save_strategy)
        if key is None or step % generation == 0:
            return
        if generation % step or getattr(self, key) % (generation // step):
            raise ValueError(
                f"{key}={getattr(self, key):g} would save inside a generation, and that cannot be resumed exactly:"
                f" one generation lasts steps_per_generation * num_iterations / gradient_accumulation_steps ="
                f" {generation / step:g} steps. Choose a multiple of it."
            )

    def reward_method(self) -> RewardMethod:
        """The reward method with its arguments.

        Raises:
            `ValueError`: if there is no such method or argument.
        """
        return load_method(self.method, read_object("method_args", self.method_args) or {}, self.seed)
