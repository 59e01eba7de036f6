"""The batch arithmetic of a run: rollouts, queries, generations and steps, and the settings that cannot work.

One optimizer step takes `processes x per_device_train_batch_size x gradient_accumulation_steps` rollouts. One
generation samples `processes x per_device_train_batch_size x steps_per_generation` rollouts, in whole groups of
`num_generations`. It is used for `steps_per_generation x num_iterations` micro steps.
"""

import math
from dataclasses import dataclass
from functools import cached_property
from itertools import count

from ..data._queries import DataError
from ._config import RankBufferConfig

WITHOUT_WARMUP = ("constant", "reduce_lr_on_plateau", "greedy")  # of transformers' schedules


class BatchError(DataError):
    """Settings, processes and data that do not fit together."""


@dataclass(frozen=True)
class Batches:
    """The batches and steps of a run.

    Args:
        args (`RankBufferConfig`):
            The settings, with the number of processes as `world_size`.
        queries, eval_queries (`int`):
            Number of queries to train on, and to evaluate on if the run does.

    Raises:
        [`BatchError`]: if something does not fit. The message says what would fit.

    Example:
        >>> Batches(RankBufferConfig("out", dry_run=True), queries=1000).steps_per_epoch
        1000
    """

    args: RankBufferConfig
    queries: int
    eval_queries: int | None = None

    def __post_init__(self):
        if self.queries < self.args.queries_per_generation:
            raise BatchError(
                f"the data set has {self.queries} queries, fewer than the {self.args.queries_per_generation} of one"
                f" generation batch ({self.args.generation_batch_size} rollouts / num_generations"
                f" {self.args.num_generations}): lower per_device_train_batch_size or gradient_accumulation_steps"
            )
        if self.eval_queries == 0:
            raise BatchError("the data set has no query to evaluate on: set eval_strategy to no")
        # A resume begins with a generation.
        if self.args.save_strategy != "no" and not self.ends_generation(self.steps):
            whole = next(step for step in count(self.steps) if self.ends_generation(step))
            raise BatchError(
                f"the run ends at step {self.steps}, inside a generation of {self.args.steps_in_generation:g} steps,"
                f" where no checkpoint can be resumed exactly: set max_steps to {whole}, or save_strategy to no"
            )

    @cached_property
    def generations_per_epoch(self) -> int:
        """The number of whole generations in an epoch."""
        return self.queries // self.args.queries_per_generation  # TRL leaves out queries that fill no generation

    @cached_property
    def micro_steps_per_generation(self) -> int:
        return self.args.micro_steps_per_generation  # once: each step asks for it

    @cached_property
    def steps_per_epoch(self) -> int:
        """The number of optimizer steps in an epoch."""
        micro_steps = self.generations_per_epoch * self.micro_steps_per_generation
        # The last step of an epoch may take fewer rollouts.
        return max(math.ceil(micro_steps / self.args.gradient_accumulation_steps), 1)

    @property
    def steps(self) -> int:
        if self.args.max_steps > 0:
            return self.args.max_steps
        return math.ceil(self.args.num_train_epochs * self.steps_per_epoch)

    @property
    def generations(self) -> int:
        return self.generations_until(self.steps)

    def generations_until(self, step: int) -> int:
        """Return the number of generations of the first `step` optimizer steps."""
        epochs, steps = divmod(step, self.steps_per_epoch)
        micro_steps = steps * self.args.gradient_accumulation_steps
        return epochs * self.generations_per_epoch + math.ceil(micro_steps / self.micro_steps_per_generation)

    def ends_generation(self, step: int) -> bool:
        """Return whether a generation ends after so many optimizer steps, so that a checkpoint there is exact."""
        # An epoch begins with a new generation, however much the last step of the epoch before has accumulated.
        micro_steps = step % self.steps_per_epoch * self.args.gradient_accumulation_steps
        return micro_steps % self.micro_steps_per_generation == 0

    def splits(self) -> list[str]:
        """Return each `processes x per device x accumulation` that gives as many rollouts in one optimizer step."""
        args = self.args
        total = args.world_size * args.per_device_train_batch_size * args.gradient_accumulation_steps
        per_device = args.per_device_train_batch_size
        return [
            f"{N} x {per_device} x {total // (N * per_device)}" for N in range(1, 17) if total % (N * per_device) == 0
        ]

    def other_batch(self) -> list[str]:
        """Say in a line that a step has another number of queries than the recipe was written for, if so."""
        args, named = self.args, self.args.recipe_queries_per_step
        at_once = args.world_size * args.per_device_train_batch_size
        queries = at_once * args.gradient_accumulation_steps / args.num_generations
        if named is None or queries == named:
            return []
        fits, rest = divmod(named * args.num_generations, at_once)
        mend = (
            "change processes or per_device_train_batch_size" if rest else f"set gradient_accumulation_steps to {fits}"
        )
        warning = f"not the recipe's batch: a step has {queries:g} queries, and the recipe is for {named}: {mend}"
        return [f"{warning}.{hint}" if (hint := args.other_processes) else warning]

    def long_warmup(self) -> list[str]:
        """Say in a line that the run ends before the learning rate has its value, if so."""
        args, warmup = self.args, self.args.get_warmup_steps(self.steps)
        if warmup < self.steps or args.lr_scheduler_type in WITHOUT_WARMUP:
            return []
        last = f"{args.learning_rate * (self.steps - 1) / warmup:.1e} in place of {args.learning_rate:g}"
        what = f"the run of {self.steps:,} steps ends within its warmup of {warmup:,}, at a learning rate of {last}"
        return [f"{what}: lower warmup_steps"]

    def lines(self) -> list[str]:
        """Describe the run in lines of text, for the dry run."""
        args, N = self.args, self.args.world_size
        step = N * args.per_device_train_batch_size * args.gradient_accumulation_steps
        left_out = self.queries - self.generations_per_epoch * args.queries_per_generation
        longest = (args.max_prompt_length or 0) + args.max_completion_length
        steps = f"save_steps {args.save_steps:g}, and the last step"
        saves = {"no": "none", "epoch": "after each epoch", "best": "at the best evaluations"}
        lines = [
            f"processes: {N}" + (", planned for" if args.num_processes else ""),
            f"one generation: {N} processes x {args.per_device_train_batch_size} per device x"
            f" {args.steps_per_generation} micro steps = {args.generation_batch_size} rollouts ="
            f" {args.queries_per_generation} queries x {args.num_generations}",
            f"one optimizer step: {N} x {args.per_device_train_batch_size} x {args.gradient_accumulation_steps} ="
            f" {step} rollouts; a generation is used for {args.steps_in_generation:g} of them",
            f"the same {step} rollouts by processes x per device x accumulation: {', '.join(self.splits())}",
            *self.other_batch(),
            *self.long_warmup(),
            f"data: {self.queries:,} queries, {self.steps_per_epoch} step{'s' * (self.steps_per_epoch != 1)} an epoch"
            + (
                f"; each epoch leaves out {left_out} queries{', the same ones' * (not args.shuffle_dataset)}"
                if left_out
                else ""
            ),
            f"the run: {self.steps} steps, {self.steps / self.steps_per_epoch:g} epochs,"
            f" {self.generations * args.generation_batch_size:,} rollouts",
            f"checkpoints: {saves.get(args.save_strategy.value, steps)}",
            f"method: {args.method} {args.method_args or ''}".rstrip(),
            f"judge: {args.judge_client or args.judge_model or 'the embedded rubric judge'}"
            + (f" at {', '.join(args.judge_url)}" if args.judge_url else ""),
            f"rollouts: {rollout_source(args)}, up to {args.max_completion_length:,} tokens; the context must hold"
            + (f" {longest:,} with the prompt" if args.max_prompt_length else " these and the longest prompt"),
        ]
        if self.eval_queries is not None:
            group = args.num_generations_eval or args.num_generations
            batch = args.per_device_eval_batch_size * N // group
            lines.append(f"evaluation: {self.eval_queries:,} queries, {batch} at a time, {group} rollouts each")
        return lines


def rollout_source(args: RankBufferConfig) -> str:
    """Describe where rollouts are generated."""
    if not args.use_vllm:
        return "the training processes themselves, without vLLM"
    if args.vllm_mode == "colocate":
        return "vLLM on the training GPUs"
    return f"vLLM at {args.rollout_url}"
