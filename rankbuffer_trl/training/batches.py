"""The arithmetic of a run: how rollouts, queries and steps follow from the settings, and what cannot work.

One optimizer step takes `processes x per_device_train_batch_size x gradient_accumulation_steps` rollouts. One
generation makes `processes x per_device_train_batch_size x steps_per_generation`, whole groups of `num_generations`,
and is used for `steps_per_generation x num_iterations` micro steps.
"""

import math
from dataclasses import dataclass

from ..data.queries import DataError
from .config import RankBufferConfig


class BatchError(DataError):
    """Settings, processes and data that do not fit together."""


@dataclass(frozen=True)
class Batches:
    """What a run will do.

    Args:
        args (`RankBufferConfig`):
            Its settings, with the number of its processes as `world_size`.
        queries (`int`):
            Queries to train on.
        eval_queries (`int`, *optional*):
            Queries to evaluate on, if it evaluates.

    Raises:
        [`BatchError`]: naming what does not fit, and what would.
    """

    args: RankBufferConfig
    queries: int
    eval_queries: int | None = None

    def __post_init__(self):
        if self.queries < self.queries_per_generation:
            raise BatchError(
                f"the data set has {self.queries} queries, fewer than the {self.queries_per_generation} of one"
                f" generation batch ({self.rollouts} rollouts / num_generations {self.args.num_generations}): lower"
                " per_device_train_batch_size or gradient_accumulation_steps"
            )
        if self.eval_queries == 0:
            raise BatchError("the data set has no query to evaluate on: set eval_strategy to no")

    @property
    def rollouts(self) -> int:
        """Of one generation, over all processes."""
        return self.args.generation_batch_size

    @property
    def queries_per_generation(self) -> int:
        """Whole groups of one generation."""
        return self.rollouts // self.args.num_generations

    @property
    def steps_in_generation(self) -> float:
        """Optimizer steps that one generation is used for; below 1 if one step takes several generations."""
        micro_steps = self.args.steps_per_generation * self.args.num_iterations
        return micro_steps / self.args.gradient_accumulation_steps

    @property
    def generations_per_epoch(self) -> int:
        """Whole ones; queries that fill none are left out of the epoch."""
        return self.queries // self.queries_per_generation

    @property
    def steps_per_epoch(self) -> int:
        """Optimizer steps in one pass over the data."""
        micro_steps = self.generations_per_epoch * self.args.steps_per_generation * self.args.num_iterations
        return max(math.ceil(micro_steps / self.args.gradient_accumulation_steps), 1)

    @property
    def steps(self) -> int:
        """Optimizer steps of the run."""
        if self.args.max_steps > 0:
            return self.args.max_steps
        return math.ceil(self.args.num_train_epochs * self.steps_per_epoch)

    @property
    def straddles(self) -> bool:
        """Whether the rollouts of some group lie on two processes."""
        mine = self.args.per_device_train_batch_size * self.args.steps_per_generation
        return self.args.world_size > 1 and mine % self.args.num_generations != 0

    @property
    def saved_steps(self) -> list[int]:
        """The steps after which a checkpoint is written, as far as they are known before."""
        kind, every = self.args.save_strategy, self.args.save_steps
        if kind in ("no", "best"):
            return []
        if kind == "epoch":
            every = self.steps_per_epoch
        elif every < 1:  # a share of the run
            every = math.ceil(self.steps * every)
        steps = list(range(int(every), self.steps + 1, int(every)))
        return steps if steps and steps[-1] == self.steps else [*steps, self.steps]

    def splits(self, most: int = 16) -> list[str]:
        """`processes x per device x accumulation` of the same rollouts in one optimizer step."""
        args = self.args
        total = args.world_size * args.per_device_train_batch_size * args.gradient_accumulation_steps
        per_device = args.per_device_train_batch_size
        return [
            f"{N} x {per_device} x {total // (N * per_device)}"
            for N in range(1, most + 1)
            if total % (N * per_device) == 0
        ]

    def lines(self) -> list[str]:
        """The layout for people."""
        args, N = self.args, self.args.world_size
        step = N * args.per_device_train_batch_size * args.gradient_accumulation_steps
        left_out = self.queries - self.generations_per_epoch * self.queries_per_generation
        longest = (args.max_prompt_length or 0) + args.max_completion_length
        saved = self.saved_steps
        lines = [
            f"processes: {N}" + (", not launched: as told" if args.num_processes else ""),
            f"one generation: {N} processes x {args.per_device_train_batch_size} per device x"
            f" {args.steps_per_generation} micro steps = {self.rollouts} rollouts = {self.queries_per_generation}"
            f" queries x {args.num_generations}",
            f"one optimizer step: {N} x {args.per_device_train_batch_size} x {args.gradient_accumulation_steps} ="
            f" {step} rollouts; a generation is used for {self.steps_in_generation:g} of them",
            f"the same {step} rollouts by processes x per device x accumulation: {', '.join(self.splits())}",
            "groups: some lie on two processes, which changes nothing: the main one gathers and judges them whole"
            if self.straddles
            else "groups: each lies on one process",
            f"data: {self.queries:,} queries, {self.steps_per_epoch} steps an epoch"
            + (f"; {left_out} queries, others each time, are left out of an epoch" if left_out else ""),
            f"the run: {self.steps} steps, {self.steps / self.steps_per_epoch:g} epochs,"
            f" {math.ceil(self.steps / self.steps_in_generation) * self.rollouts:,} rollouts",
            f"checkpoints: {len(saved)}, after steps {shortened(saved)}"
            if saved
            else f"checkpoints: {'at the best evaluations' if args.save_strategy == 'best' else 'none'}",
            f"method: {args.method} {args.method_args or ''}".rstrip(),
            f"judge: {args.judge_model or 'the embedded rubric judge'}"
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
    """Who samples."""
    if not args.use_vllm:
        return "the training processes themselves, without vLLM"
    if args.vllm_mode == "colocate":
        return "vLLM on the training GPUs"
    return f"vLLM at {args.vllm_server_base_url or f'http://{args.vllm_server_host}:{args.vllm_server_port}'}"


def shortened(steps: list[int]) -> str:
    """`10, 20, ..., 200`."""
    return ", ".join(map(str, steps)) if len(steps) < 6 else f"{steps[0]}, {steps[1]}, ..., {steps[-1]}"
