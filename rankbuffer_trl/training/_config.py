"""The settings of a RankBuffer run, on top of TRL's `GRPOConfig`. They are checked before anything is loaded."""

import logging
import math
import os
import typing
from collections.abc import Iterable
from dataclasses import dataclass, replace
from types import NoneType
from typing import Any, Literal

import torch
from transformers.integrations.integration_utils import INTEGRATION_TO_CALLBACK, get_available_reporting_integrations
from trl import GRPOConfig

from .._answers import check_format
from ..errors import SettingsError
from ..files import refuse_file
from ..judge import TOKENS_PER_MARK, Judge
from ..judge._endpoint import check_seconds, check_url
from ..judge.config import BudgetConfig, JudgeConfig, parse_object, read_judge
from ..rewards._method import RewardMethod, load_method
from ..rewards._rankbuffer import RankBuffer
from ..settings import check_at_least, documented, fields_of, kind_of, near
from ._reward_functions import load_functions

logger = logging.getLogger(__name__)

LOSSES = ("grpo", "bnpo", "dr_grpo", "dapo", "cispo", "sapo", "luspo", "vespo")
CHOICES: dict[str, tuple] = {  # of TRL, which checks them only while it trains, after the judge was paid
    "loss_type": LOSSES,
    "scale_rewards": ("group", "batch", "none", True, False),
    "importance_sampling_level": ("token", "sequence"),
    "vllm_mode": ("server", "colocate"),
    "multi_objective_aggregation": ("sum_then_normalize", "normalize_then_sum"),
    "vllm_importance_sampling_mode": ("token_truncate", "token_mask", "sequence_truncate", "sequence_mask"),
}
NUMBERS = {bool, int, float, NoneType}
OBJECTS = (  # of TRL, which takes a text that is no JSON object as it is, and fails with it after the judge was paid
    *("chat_template_kwargs", "generation_kwargs", "gradient_checkpointing_kwargs", "lr_scheduler_kwargs"),
    "model_init_kwargs",
)
# 11 groups gave back most of what a word costs, and a correction takes 2,000 reads.
MAX_REFERENCE_GROUPS = 200
ANSWERS = (  # the settings of a judge that its answers depend on
    *("judge_url", "judge_model", "judge_client", "judge_client_args", "judge_request"),
    *("judge_decoding", "judge_free_tokens", "judge_guard", "judge_samples"),
)
QUESTION_TOKENS = 2000  # of a judge's prompt, for the query, its rubrics, the template and the verdict
SHARES_OF_DDP_TIMEOUT = {"judge_step_timeout": 0.9, "rollout_timeout": 0.5}  # the default of each

RANKED = "rewards/rank_reward"  # the log's name of the reward of this package


def check_best_metric(named: str | None, alone: bool) -> None:
    """Refuse a `metric_for_best_model` that tells no checkpoint from another.

    Args:
        alone (`bool`):
            Whether no other reward function has a weight.
    """
    metric = (named or "").removeprefix("eval_")
    # The rewards of a group are its ranks, so their mean is the same in each evaluation. GRPO's loss measures no
    # quality either. Checkpoints, early stopping and the last push would follow the last digit.
    if metric == "loss" or metric.startswith(RANKED) or (alone and metric in ("reward", "reward_std")):
        raise SettingsError(
            f"metric_for_best_model={named} is the same for every policy but for rounding: leave it and"
            " load_best_model_at_end out, or name a metric of another reward function. Progress is measured by"
            " progress/beats_last_visit and by `rankbuffer-compare`"
        )


@documented
@dataclass
class RankBufferConfig(BudgetConfig, GRPOConfig):
    r"""
    Configuration class for the [`RankBufferTrainer`].

    It adds the parameters below and those of [`BudgetConfig`] to the parameters of TRL's [`~trl.GRPOConfig`]. The
    defaults of TRL stay as they are. Where the paper gives a value, the new defaults have it, with these exceptions:
    prompts have no limit (`max_prompt_length`), responses are quoted in prompts (`judge_guard`), and the judge is the
    embedded one. No format is required (`format_check`).

    Parameters:
        > Parameters that control the reward

        method (`str`, *optional*, defaults to `"rankbuffer"`):
            The reward method: `rankbuffer`, `listwise` or another name that `recipes/README.md` lists, or the dotted
            path of your own class.
        method_args (`dict`, *optional*):
            The arguments of the reward method, as JSON on the command line. The file of the method lists them.
        judge_context (`int`, *optional*):
            Tokens of the judge's context. A buffer of RankBuffer then keeps at most as many anchors as fit into it
            beside a rollout, if all of them are `max_completion_length` tokens long: `max_anchors`, which is ours,
            unless `method_args` has another one. Default: buffers grow as in the paper.
        scale_by_signal (`bool`, *optional*, defaults to `False`):
            Divide the rewards of a generation by the share of its groups whose rewards differ (GPG's rescaling). It
            needs `scale_rewards: none`: a deviation in the advantages would take the factor out again.
        reference_judge (`dict`, *optional*):
            Settings of a second, better judge (`judge_url`, `judge_model` and so on), as JSON on the command line. It
            scores some groups again. The bias of the judge that follows from the difference is named in the log and
            subtracted from the rewards of all later steps (`docs/report.md`). Default: none.
        reference_groups (`int`, *optional*, defaults to `11`):
            The number of groups at the beginning of the run that the reference judge scores, all of them; 200 at most.
        judge_during_generation (`bool`, *optional*, defaults to `True`):
            Ask the judge about a rollout while others are still being generated. With `vllm_mode: server`, each
            rollout is then a request of its own. In all other cases, judging starts when all rollouts are known,
            before TRL computes their log-probabilities. The rewards do not change.

        > Parameters that control what the run may cost

        judge_step_timeout (`float`, *optional*):
            Seconds for judging one step after its last rollout, above which the run stops with an error. The seconds
            of `judge_wait` are among them. Default: nine tenths of `ddp_timeout`, because the other processes give up
            after `ddp_timeout`.
        rollout_timeout (`float`, *optional*):
            Seconds for one generation, above which the run stops with an error. It holds where each rollout is a
            request of its own (`judge_during_generation`). Default: half of `ddp_timeout`.

        > Parameters that control prompts and answers

        format_check (`str`, *optional*, defaults to `"none"`):
            The format that a completion must have. `"think"` demands one closed `<think>` block and then an answer.
            The recipes of the paper's rows have it, as the paper names no format. `"none"` accepts any text.
            Everything else is a regular expression for the whole text, with a group named `answer`. The judge sees the
            answer alone.
        format_weight (`float`, *optional*, defaults to `0.2`):
            Weight of the format reward (0 or 1). The rank reward in [-1, 1] has the weight 1.
        judge_view (`str`, *optional*, defaults to `"answer"`):
            What the judge sees of a rollout in which the policy called tools. `"answer"` is the answer in its last
            turn, and a rollout that ends in a call has none. `"last_reply"` is the last text that the policy wrote in
            any turn. `"transcript"` is all of it: turns, calls, and the results of the tools, quoted. Buffers, store
            and report have the same text.
        judge_view_limit (`int`, *optional*, defaults to `1000`):
            Characters of each result of a tool that a transcript shows.
        reward_functions (`list`, *optional*):
            More reward functions of TRL, as JSON on the command line. Each item has `function` (the dotted path),
            `weight` (default 1.0) and, if the path names a function that makes the reward function, its `args`
            (`docs/extending.md`).
        max_prompt_length (`int`, *optional*):
            Largest number of tokens in a rendered prompt. A longer prompt is refused at start. Default: no check.

        > Parameters that control pushes to the Hub

        hub_private_repo (`bool`, *optional*, defaults to `True`):
            Make the repository private if a push creates it. `False` makes it public. TRL's default is that of the
            account. A repository that exists stays as it is.

        > Parameters that control the start

        preflight_only (`bool`, *optional*, defaults to `False`):
            Check settings, data and judge, print the plan and what the run will cost, and stop. It needs no GPU and no
            policy, and asks the judge real questions (`rankbuffer-train`).
        resume_with_changes (`bool`, *optional*, defaults to `False`):
            Resume from a checkpoint although the data, the method, the judge model or another setting that the buffers
            depend on has changed (`docs/checkpoints.md`).
        trust_checkpoint (`bool`, *optional*, defaults to `False`):
            Resume from a DeepSpeed or FSDP checkpoint that this `output_dir` did not write. Loading it executes code
            that the checkpoint contains (`docs/checkpoints.md`).
        dry_run (`bool`, *optional*, defaults to `False`):
            Check settings and data, print the plan with an estimate of the cost, and stop. It needs no GPU, no judge
            and no policy.
        dry_run_queries (`int`, *optional*):
            Number of queries that `dry_run` plans for where the file of the data set does not exist.
        recipe_queries_per_step (`int`, *optional*):
            Number of queries in an optimizer step for which a recipe was written. It changes no batch. If a step has
            another number, the plan of `dry_run` and `preflight_only` says so.
        num_processes (`int`, *optional*):
            Number of processes that `dry_run` or `preflight_only` computes for. Default: the number that a launcher
            has started; without a launcher, one, or the number of the recipe if its batch makes no groups on one.

    Example:

    ```python
    from rankbuffer_trl import RankBufferConfig

    args = RankBufferConfig(
        "runs/mine",
        judge_url="http://127.0.0.1:8001/v1",
        judge_model="my-judge",
        per_device_train_batch_size=8,
        gradient_accumulation_steps=4,
        dry_run=True,  # computes for another machine; leave this line and the next one out to train
        num_processes=2,
    )
    args.queries_per_generation  # 8
    ```
    """

    method: str = "rankbuffer"
    method_args: dict | str | None = None
    judge_context: int | None = None
    scale_by_signal: bool = False
    reference_judge: dict | str | None = None
    reference_groups: int = 11
    judge_during_generation: bool = True
    judge_step_timeout: float | None = None
    rollout_timeout: float | None = None
    format_check: str = "none"
    format_weight: float = 0.2
    judge_view: Literal["answer", "last_reply", "transcript"] = "answer"
    judge_view_limit: int = 1000
    reward_functions: list | str | None = None
    max_prompt_length: int | None = None
    hub_private_repo: bool = True
    preflight_only: bool = False
    resume_with_changes: bool = False
    trust_checkpoint: bool = False
    dry_run: bool = False
    dry_run_queries: int | None = None
    recipe_queries_per_step: int | None = None
    num_processes: int | None = None

    def __post_init__(self):
        super().__post_init__()  # of the judge, which checks the types of all settings but TRL's
        load_functions(self.reward_functions)  # raises for what cannot be loaded
        self._check_numbers()
        self._check_cast()
        self._check_processes()
        self._check_own()
        try:
            GRPOConfig.__post_init__(self)
        except ValueError as error:
            raise SettingsError(f"{error}{self._what_fits()}") from error
        for key in OBJECTS:
            setattr(self, key, parse_object(key, getattr(self, key)))
        if isinstance((self.model_init_kwargs or {}).get("token"), str):  # files hold settings
            raise SettingsError("model_init_kwargs has a token: run `hf auth login`, or export it in HF_TOKEN")
        if self.accelerator_config.split_batches:
            raise SettingsError(
                "accelerator_config: split_batches gives each process a part of per_device_train_batch_size, so that a"
                " step has fewer queries than its plan: leave it out"
            )
        if getattr(self, page := "trackio_static_space_id") in (None, "false", "False"):
            setattr(self, page, False)  # a page of the curves on the Hub; trackio makes no private one
        self._check_timeouts()
        self._check_saves()
        check_backends(self.report_to)

    def __getstate__(self) -> dict[str, Any]:
        """Leave what is private out of what `pickle` writes: each checkpoint has the settings in a pickle."""
        private: dict[str, Any] = {"hub_token": None, "judge_headers": None}
        if isinstance(self.reference_judge, dict):
            private["reference_judge"] = {
                key: value for key, value in self.reference_judge.items() if key != "judge_headers"
            }
        return self.__dict__ | private | {"endpoint": replace(self.endpoint, headers={})}

    @property
    def world_size(self) -> int:
        """The number of processes that train, or for which a dry run or a preflight computes."""
        return self.num_processes or super().world_size

    @property
    def rollout_url(self) -> str:
        """The address of the rollout server."""
        return self.vllm_server_base_url or f"http://{self.vllm_server_host}:{self.vllm_server_port}"

    @property
    def only_checks(self) -> bool:
        """Whether the run stops before it trains."""
        return self.dry_run or self.preflight_only

    @property
    def recipe_processes(self) -> int:
        """The number of processes that make the recipe's batch; 0 if the recipe names none, or no number does."""
        step = self.per_device_train_batch_size * self.gradient_accumulation_steps
        processes, rest = divmod((self.recipe_queries_per_step or 0) * self.num_generations, max(step, 1))
        return 0 if rest else processes

    @property
    def other_processes(self) -> str:
        """What to do if a run of the recipe's number of processes is meant; empty if it has as many, or names none."""
        if (processes := self.recipe_processes) in (0, self.world_size):
            return ""
        how = "add" if self.only_checks else "start it by `accelerate launch` with"
        return f" If the recipe's {processes} processes are meant, {how} --num_processes {processes}."

    @property
    def queries_per_generation(self) -> int:
        """The number of queries in one generation batch. Each has a whole group of `num_generations` rollouts."""
        return self.generation_batch_size // self.num_generations

    @property
    def micro_steps_per_generation(self) -> int:
        """The number of forward and backward passes that use one generation."""
        return self.steps_per_generation * self.num_iterations

    @property
    def steps_in_generation(self) -> float:
        """The number of optimizer steps that use one generation. Below 1 if one step takes several generations."""
        return self.micro_steps_per_generation / self.gradient_accumulation_steps

    def _check_numbers(self) -> None:
        # TRL's parser takes numbers from a recipe as they are.
        for name, (annotation, _) in fields_of(type(self)).items():  # type: ignore[arg-type]
            value, types = getattr(self, name), set(typing.get_args(annotation)) or {annotation}
            if isinstance(value, float) and math.isnan(value):
                raise SettingsError(f"{name} must be a number, got {value}")
            infinite = float in types and isinstance(value, float) and math.isinf(value)
            if types <= NUMBERS and not infinite and not (kind := kind_of(annotation)).fits(value):
                raise SettingsError(f"{name} must be {kind.words}, got {value!r}")

    def _check_own(self) -> None:
        """Check what needs no other library, so that a typo is named before what this machine lacks."""
        check_at_least(self, format_weight=0, judge_view_limit=0, reference_groups=1)
        check_at_least(
            self, judge_context=1, recipe_queries_per_step=1, dry_run_queries=1, max_prompt_length=1, num_processes=1
        )
        self._check_ranges()
        if self.reference_groups > MAX_REFERENCE_GROUPS:
            raise SettingsError(
                f"reference_groups must be at most {MAX_REFERENCE_GROUPS} groups, got {self.reference_groups}"
            )
        if self.vllm_server_base_url:
            check_url("vllm_server_base_url", self.vllm_server_base_url)
        check_url("vllm_server_host", f"http://{self.vllm_server_host}")
        check_format(self.format_check)
        for key in SHARES_OF_DDP_TIMEOUT:
            check_seconds(key, getattr(self, key))
        if self.reward_weights is not None:
            raise SettingsError("reward_weights is set by RankBufferTrainer, from format_weight: set format_weight")
        kept = self.scale_rewards in ("none", False) and self.multi_objective_aggregation == "sum_then_normalize"
        if self.scale_by_signal and not kept:
            raise SettingsError(
                "scale_by_signal has no effect unless scale_rewards is none and multi_objective_aggregation is"
                " sum_then_normalize: a deviation in the advantages takes the factor out again"
            )
        if self.remove_unused_columns:
            raise SettingsError("remove_unused_columns takes away query_id, which finds the rubrics: leave it out")
        self.method_args = parse_object("method_args", self.method_args)
        self.reference_judge = parse_object("reference_judge", self.reference_judge)
        self.reference_config()
        self.reward_method()
        for key, names in CHOICES.items():
            if (value := getattr(self, key)) not in names:
                choices = ", ".join(name for name in names if isinstance(name, str))
                what = "loss" if key == "loss_type" else key
                raise SettingsError(f"there is no {what} {value!r}: set {key} to one of {choices}")

    def _check_ranges(self) -> None:
        """Check the ranges of TRL's settings."""
        # Outside them the arithmetic of the batches or the generation fails.
        check_at_least(self, seed=0, max_completion_length=1, gradient_accumulation_steps=1)
        check_at_least(self, per_device_train_batch_size=1, per_device_eval_batch_size=1, generation_batch_size=1)
        check_at_least(self, num_generations=1, num_iterations=1, steps_per_generation=1)
        for key in ("num_train_epochs", "temperature", "top_p", "learning_rate"):
            if getattr(self, key) <= 0:
                raise SettingsError(f"{key} must be above 0, got {getattr(self, key)}")
        if self.max_steps < 1 and self.max_steps != -1:  # transformers would train for num_train_epochs
            raise SettingsError(f"max_steps must be at least 1, or -1 for num_train_epochs, got {self.max_steps}")
        if self.top_p > 1:
            raise SettingsError(f"top_p must be at most 1, got {self.top_p}")
        if self.save_strategy == "steps" and self.save_steps <= 0:
            raise SettingsError(f"save_steps must be above 0, got {self.save_steps}: save_strategy no saves nothing")
        if self.output_dir == "":
            raise SettingsError("output_dir is empty: name a folder")
        refuse_file("output_dir", self.output_dir)

    def _check_cast(self) -> None:
        half = self.fp16 or self.bf16 is not False  # TRL takes None for True
        for key in ("use_transformers_continuous_batching", "use_transformers_paged"):
            if half and getattr(self, key, False):
                raise SettingsError(
                    f"{key} with bf16 or fp16 makes TRL cast the policy to 16 bits: set bf16 to false, or use_vllm"
                )

    def _check_processes(self) -> None:
        if self.num_processes is not None and not self.only_checks:
            raise SettingsError(
                "num_processes is for dry_run and preflight_only; the processes of a run are those of its launcher"
            )
        alone = self.only_checks and self.num_processes is None and "WORLD_SIZE" not in os.environ
        rollouts = self.per_device_train_batch_size * self.gradient_accumulation_steps
        if alone and rollouts % max(self.num_generations, 1):
            self.num_processes = self.recipe_processes or None  # a laptop checks what eight GPUs will run
        if self.only_checks:  # the settings may be meant for another machine, with a GPU
            self.use_cpu, self.bf16, self.fp16 = True, False, False
        elif not torch.accelerator.is_available() and self.use_vllm and self.bf16 is not False and not self.use_cpu:
            cuda = torch.version.cuda
            built = f"for CUDA {cuda}, and CUDA 13 needs driver 580 or newer" if cuda else "without CUDA"
            raise SettingsError(
                "no GPU is visible, and use_vllm and bf16 mean one: see nvidia-smi. This PyTorch is built"
                f" {built}. On a CPU, set use_cpu true, bf16 false"
            )
        elif not torch.accelerator.is_available() and not self.use_vllm:  # vLLM says that a GPU is meant
            os.environ.setdefault("DS_ACCELERATOR", "cpu")  # accelerate imports DeepSpeed, which would warn of the CPU
            if not self.use_cpu:
                logger.warning("no GPU was found, so the policy trains on the CPU")
            self.use_cpu = True

    def _what_fits(self) -> str:
        """Return the batch sizes that would hold whole groups, if the present ones do not."""
        if not self.num_processes and not hasattr(self, "distributed_state"):
            return ""  # TRL refused another setting before it counted the processes
        N, G = self.world_size, self.num_generations
        if self.eval_strategy != "no":
            G_eval = self.num_generations_eval or G
            if N * self.per_device_eval_batch_size % G_eval:
                return (
                    f" With {N} processes, per_device_eval_batch_size must be a multiple of"
                    f" {G_eval // math.gcd(N, G_eval)}, got {self.per_device_eval_batch_size}.{self.other_processes}"
                )
        if self.generation_batch_size and self.generation_batch_size % G:
            rollouts = N * self.per_device_train_batch_size
            return (
                f" With {N} processes x per_device_train_batch_size {self.per_device_train_batch_size},"
                f" gradient_accumulation_steps (or steps_per_generation) must be a multiple of"
                f" {G // math.gcd(rollouts, G)}, got {self.steps_per_generation}.{self.other_processes}"
            )
        return ""

    def _check_timeouts(self) -> None:
        # The other processes wait in a collective while the main process judges, or waits for the rollout server. If
        # they give up, the run is lost.
        for key, share in SHARES_OF_DDP_TIMEOUT.items():
            if getattr(self, key) is None:
                setattr(self, key, share * self.ddp_timeout)
            if getattr(self, key) >= self.ddp_timeout:
                raise SettingsError(
                    f"{key} is {getattr(self, key):g} s, but the other processes give up after"
                    f" ddp_timeout={self.ddp_timeout} s: raise ddp_timeout or lower {key}"
                )

    def _check_saves(self) -> None:
        """Refuse settings that save inside a generation, delete the checkpoint of a SIGTERM, or resume inexactly."""
        if self.enable_jit_checkpoint:
            raise SettingsError(
                "enable_jit_checkpoint can save inside a generation, and at another step on each process; leave it"
                " off: SIGTERM is handled without it"
            )
        if self.push_to_hub and self.hub_always_push:  # an upload reads the folder when its turn comes
            raise SettingsError(
                "hub_always_push uploads what later steps have saved under the name of an earlier one: leave it out"
            )
        if self.ignore_data_skip:
            raise SettingsError("ignore_data_skip begins the epoch again after a resume: leave it out")
        check_best_metric(self.metric_for_best_model, alone=not any(load_functions(self.reward_functions)[1]))
        if self.save_total_limit == 1 and self.metric_for_best_model is not None:
            raise SettingsError(
                "save_total_limit=1 with metric_for_best_model or load_best_model_at_end leaves only the best"
                " checkpoint when training ends, so that of a SIGTERM would be lost; set at least 2"
            )
        # A resumed run starts with a generation, so it would score the queries of one that it was saved in again.
        # `Batches` checks the end of the run, which depends on the number of queries.
        best = "eval_steps" if self.eval_strategy == "steps" else None
        key = {"steps": "save_steps", "best": best}.get(self.save_strategy)
        generation, step = self.micro_steps_per_generation, self.gradient_accumulation_steps
        if key is None or step % generation == 0:
            return
        whole = generation % step == 0
        if not whole or getattr(self, key) % (generation // step):
            mend = "Choose a multiple of it." if whole else "Make it a whole number, or set save_strategy to epoch."
            raise SettingsError(
                f"{key}={getattr(self, key):g} would save inside a generation, and that cannot be resumed exactly:"
                f" one generation lasts steps_per_generation * num_iterations / gradient_accumulation_steps ="
                f" {self.steps_in_generation:g} steps. {mend}"
            )

    def check_view(self, tools: bool) -> None:
        """Refuse a transcript of a run without tools.

        Raises:
            [`SettingsError`]: saying what to do.
        """
        if self.judge_view == "transcript" and not tools:
            raise SettingsError(
                "judge_view='transcript' shows calls of tools, and this run has none: leave judge_view out, or pass"
                " tools or environment_factory to RankBufferTrainer"
            )

    def reference_config(self) -> JudgeConfig | None:
        """Return the settings of the reference judge, `None` if there is none.

        Raises:
            [`SettingsError`]: if `reference_judge` has a setting that a judge has not, or one that has no effect, or
            is the judge.
        """
        settings = parse_object("reference_judge", self.reference_judge)
        if settings is None:
            return None
        if unused := next((key for key in settings if key.endswith(("_price", "_max_failures"))), None):
            raise SettingsError(f"reference_judge has {unused}, but the judge's prices and limit hold: leave it out")
        config = read_judge("reference_judge", settings)
        if all(getattr(config, key) == getattr(self, key) for key in ANSWERS):
            raise SettingsError("reference_judge is the judge itself: name a better judge_model, or leave it out")
        return config

    def make_reference_judge(self) -> Judge | None:
        """Make the reference judge that these settings describe, `None` if there is none."""
        config = self.reference_config()
        return None if config is None else config.judge()

    def reward_method(self) -> RewardMethod:
        """Build the reward method with its arguments.

        Raises:
            [`SettingsError`]: if there is no such method or argument.
        """
        method = load_method(self.method, parse_object("method_args", self.method_args) or {}, self.seed)
        if self.judge_context is None or not isinstance(method, RankBuffer):
            return method
        # With the guard's marks, on or off: what they would take is left for the verdict.
        shown = (self.judge_context - QUESTION_TOKENS) / (self.max_completion_length * (1 + 1 / TOKENS_PER_MARK))
        return method.with_room_for(int(shown) - 1)  # the rollout that is inserted is shown, too


def check_backends(names: Iterable[str]) -> None:
    """Refuse a backend of `report_to` that does not exist or is not installed."""
    # The trainer would find it after the servers and the policy were loaded.
    installed = get_available_reporting_integrations()
    for name in names:
        if name not in INTEGRATION_TO_CALLBACK:
            alike, supported = near(name, INTEGRATION_TO_CALLBACK), ", ".join(sorted(INTEGRATION_TO_CALLBACK))
            raise SettingsError(f"report_to: there is no backend {name!r}{alike}; set none, or one of {supported}")
        if name not in installed and name in ("trackio", "wandb"):
            raise SettingsError(f"report_to: {name} is not installed: pip install 'rankbuffer-trl[{name}]'")
        if name not in (*installed, "flyte"):  # flyte is not in the list that transformers makes
            raise SettingsError(f"report_to: the library of {name} is not installed")
