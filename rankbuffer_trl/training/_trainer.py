"""GRPO with RankBuffer rewards: a thin subclass of TRL's trainer.

[`ResumableTrainer`] adds whole checkpoints and exact resumes. This page adds the rewards: groups that are scored whole
for any number of processes (by the reward function), a judge that works while rollouts are generated, and unscored
rollouts. TRL does the rest: generation, loss, logging and pushes to the Hub.
"""

import logging
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from accelerate.logging import get_logger
from accelerate.utils import gather_object
from datasets import Dataset
from transformers import PreTrainedModel

from .._answers import Answer, AnswerExtractor, format_reward
from ..checkpointing._distributed import on_main_process
from ..checkpointing._trainer import ResumableTrainer
from ..data._prompts import check_prompts, unstopped_turn
from ..data._queries import QueryTable
from ..errors import NotFiniteError, SettingsError
from ..judge import Judge
from ..monitoring._buffer_table import write_table
from ..monitoring._model_card import PAPER, CardFacts, write_model_card
from ..monitoring._no_gradient import GradientMonitor, Pull
from ..monitoring._non_fatal import non_fatal
from ..monitoring._step_log import StepLog
from ..store import BufferStore
from ._config import RankBufferConfig
from ._plan import RunPlan
from ._reward_functions import not_finite, numbered, with_inf_for_nan
from ._rollouts import check_prompt_lengths, limit_requests, send_copies, separate_rollouts, spare_proxy
from ._state import StoreState

logger, once = logging.getLogger(__name__), get_logger(__name__)

NO_POLICY = "model_name_or_path is not set: name the policy to train"
THOUGHTS = (
    "the policy may think before it answers, and with format_check=none the judge reads the thoughts, even if"
    " max_completion_length cuts them off: set format_check to think, or chat_template_kwargs to"
    ' {"enable_thinking": false}'
)
RUNS_ON = (
    "the policy's chat template ends an answer with {!r}, and its generation does not stop there: rollouts run on to"
    " max_completion_length, and the judge reads what follows the answer. Add the id {} to eos_token_id in the"
    " policy's generation_config.json, or take an instruction-tuned policy"
)
ROUNDS_AWAY = (
    "the policy's weights are bfloat16, and no copy in float32 is trained, as ZeRO and FSDP have one: steps of"
    " learning_rate={} round away. In 200 steps, 2 % of such weights move at 1e-6, 15 % at 1e-5, 55 % at 5e-5: set"
    " dtype to float32, or train with LoRA or ZeRO"
)
VANISH = (
    "vllm_importance_sampling_mode={} multiplies the ratios of all tokens of a rollout, which top_p, top_k and"
    " min_p make smaller, so that long rollouts hardly count: set it to token_truncate, or"
    " vllm_importance_sampling_correction to false"
)
RANK, FORMAT = 0, 1  # columns of the rank reward and the format reward


class RankBufferTrainer(ResumableTrainer):
    """
    The GRPO trainer whose reward of a rollout is its rank (RankBuffer).

    Args:
        model (`str` or `PreTrainedModel`):
            The policy, as for [`~trl.GRPOTrainer`].
        args ([`RankBufferConfig`]):
            The configuration.
        train_dataset (`Dataset` or `QueryTable`):
            The queries to train on, with the columns of `docs/data.md`: `query_id`, `prompt`, `rubrics` and, unless
            buffers are bootstrapped, `responses`. A table that is already checked is taken as it is.
        eval_dataset (`Dataset` or `QueryTable`, *optional*):
            The queries to evaluate on, in the same form. Evaluation reads buffers and writes none.
        reward_funcs (`Callable` or `list[Callable]`, *optional*):
            More reward functions, each with the weight 1; `reward_functions` of `args` names others, with weights. TRL
            passes them `query_id`, `split`, `epoch`, the further columns of the data set, and `extracted_answer`, an
            [`Answer`] per completion.
        judge ([`Judge`], *optional*):
            The judge. Default: the judge that `args` describes.
        dataset_name (`str`, *optional*):
            The name of the data in the model card: an id on the Hub, or a path, of which the card shows the last part.
        plan (`RunPlan`, *optional*):
            The plan of the run, if it is made already. Default: what follows from `args` and the data.
        reference_judge ([`Judge`], *optional*):
            A second judge, which debiases the rewards. Default: the one of `args`, if it describes one.
        kwargs:
            The other arguments of [`~trl.GRPOTrainer`]. With `tools` or `environment_factory`, see `judge_view`.

    Raises:
        [`DataError`], [`StoreError`], [`SettingsError`]: before training. The message names the fault.

    Example:
        >>> args = RankBufferConfig("runs/mine", judge_url="http://127.0.0.1:8001/v1", judge_model="my-judge")
        >>> trainer = RankBufferTrainer("Qwen/Qwen2.5-0.5B-Instruct", args, train_dataset=load_queries("mine.jsonl"))
        >>> trainer.train()
    """

    _tag_names = ["trl", "grpo", "rankbuffer"]
    reward_func_names: list[str]
    reward_funcs: list[Any]
    _name = "RankBuffer"
    _paper = PAPER

    def __init__(
        self,
        model: str | PreTrainedModel,
        args: RankBufferConfig,
        train_dataset: Dataset | QueryTable,
        eval_dataset: Dataset | QueryTable | None = None,
        reward_funcs: Callable | list[Callable] | None = None,
        judge: Judge | None = None,
        dataset_name: str | None = None,
        plan: RunPlan | None = None,
        reference_judge: Judge | None = None,
        **kwargs,
    ):
        if not model:
            raise SettingsError(NO_POLICY)
        args.check_view(tools=bool(kwargs.get("tools") or kwargs.get("environment_factory")))
        plan = plan or RunPlan.of(args, train_dataset, eval_dataset)
        queries, eval_queries = plan.queries, plan.eval_queries
        state = StoreState(plan, judge, reference_judge)
        self.rank_reward = state.reward
        extra = [reward_funcs] if callable(reward_funcs) or isinstance(reward_funcs, str) else reward_funcs or []
        functions = [format_reward, *plan.functions, *extra]
        if args.use_vllm and args.vllm_mode == "server":
            spare_proxy(args.rollout_url)
        # torch's first choice on Hopper GPUs can give NaN gradients in 16 bits, where a mask is passed and a batch is
        # padded to 64, 192, 320, … tokens: pytorch/pytorch#196678, torch 2.11 to 2.13. Its other kernels do not.
        torch.backends.cuda.enable_cudnn_sdp(False)
        super().__init__(
            model,
            reward_funcs=[self.rank_reward, *functions],
            args=args,
            train_dataset=queries.prompts,
            eval_dataset=None if eval_queries is None else eval_queries.prompts,
            run_state=state,
            checkpoints=plan.checkpoints,
            trust_checkpoint=args.trust_checkpoint,
            resume_with_changes=args.resume_with_changes,
            **kwargs,
        )
        self.reward_func_names = numbered(self.reward_func_names)  # TRL logs two of one name as one
        self._is_model = torch.tensor([isinstance(function, torch.nn.Module) for function in self.reward_funcs])
        pairs = zip(self._is_model, self.reward_funcs, strict=True)
        self.reward_funcs = [function if model else with_inf_for_nan(function) for model, function in pairs]
        weights = [args.format_weight, *plan.weights]
        self.reward_weights[FORMAT : FORMAT + len(weights)] = torch.tensor(weights)
        if self.accelerator.is_main_process and self._rounds_away():
            logger.warning(ROUNDS_AWAY.format(args.learning_rate))
        mode = args.use_vllm and args.vllm_importance_sampling_correction and args.vllm_importance_sampling_mode
        if mode and mode.startswith("sequence") and (args.top_p < 1 or args.top_k or args.min_p):
            once.warning(VANISH.format(mode))
        for line in plan.batches.long_warmup():
            once.warning(line)
        self.add_callback(StepLog(args.output_dir))
        self.dataset_name = dataset_name
        state.names = {"policy": self.model.config.name_or_path, "data": dataset_name}
        view = args.judge_view if self.tools else None
        self._answers = AnswerExtractor(
            args.format_check, self._tokenizer, args.chat_template_kwargs, view, args.judge_view_limit
        )
        self._last_answers: list[Answer] = []  # of the last generation
        self._gradient_monitor = GradientMonitor(args.num_generations, args.beta)
        self._any_prompt = queries[queries.ids[0]].prompt
        if self.use_vllm and self.vllm_mode == "server" and self.accelerator.is_main_process:
            limit_requests(self.vllm_generation.vllm_client, args.ddp_timeout)
            send_copies(self.vllm_generation.vllm_client)
        self._rollouts = separate_rollouts(self, self._arrived)
        # Of several environments, each row names its own; their tools are not counted.
        tools = [] if len(getattr(self, "_env_tools", ())) > 1 else self.tools
        template = (args.chat_template_kwargs or {}) | {"tools": tools or None}
        on_main_process(lambda: check_prompts(plan.rows, self._tokenizer, args.max_prompt_length, **template))
        if self.use_vllm and self.vllm_mode == "server" and self._tokenizer.chat_template:
            client, length = getattr(self.vllm_generation, "vllm_client", None), args.max_completion_length
            on_main_process(lambda: check_prompt_lengths(client, self._tokenizer, plan.rows, length, **template))
        if self.accelerator.is_main_process and self._answers.takes_thoughts(self._any_prompt):
            logger.warning(THOUGHTS)
        with non_fatal("whether the policy stops after an answer"):
            # Other ends of a generation are the user's own: they may be that token, or its text.
            own = any("stop" in key or key == "eos_token_id" for key in args.generation_kwargs or {})
            if not own and (turn := unstopped_turn(self._tokenizer, self._any_prompt, self.eos_token_ids, **template)):
                once.warning(RUNS_ON.format(*turn))

    @property
    def store(self) -> BufferStore:
        """The store of buffers, history and ledger. Only the main process has one."""
        return self.rank_reward.scorer.store

    def _rounds_away(self) -> bool:
        """Whether weights are trained in bfloat16 alone, at a learning rate that they are too coarse for."""
        if self.is_deepspeed_enabled or (self.is_fsdp_enabled and self.args.bf16) or self.args.learning_rate >= 1e-4:
            return False  # the copies in float32 are those of ZeRO and of mixed precision under FSDP
        # One matrix of LoRA begins at 0, where bfloat16 is fine.
        whole = (weight for name, weight in self.model.named_parameters() if "lora_" not in name)
        return any(weight.requires_grad and weight.dtype == torch.bfloat16 for weight in whole)

    def _arrived(self, row: int, completion_ids: list[int]) -> None:
        # A chat template begins the completions of all prompts with the same text.
        (answer,) = self._answers.read([self._any_prompt], [""], [completion_ids])
        self.rank_reward.scorer.arrived(row, answer.text)

    def _generate_and_score_completions(self, inputs: list[dict[str, Any]]) -> dict[str, Any]:
        """Generate and score as TRL does, with a judge that is asked while rollouts are still generated."""
        training = self.model.training
        if self.args.judge_during_generation:
            epoch = self.current_epoch() if training else None
            self.rank_reward.begin([row["query_id"] for row in inputs], training, self.state.global_step, epoch)
        try:
            output = super()._generate_and_score_completions(inputs)
        except BaseException:
            self.rank_reward.discard()  # else the judge would go on with a step that nobody scores
            raise
        if training:
            self._warn_without_gradient(output)
        return output

    @non_fatal("whether rollouts have a gradient")  # a fault here is one of all processes, so none waits for another
    def _warn_without_gradient(self, output: dict[str, Any]) -> None:
        mask = output["completion_mask"] * output.get("tool_mask", 1)
        written_tokens = [
            row[written].tolist() for row, written in zip(output["completion_ids"], mask.bool(), strict=True)
        ]
        tokens = [hash(tuple(row)) if row else None for row in written_tokens]
        # A collective: every process must call it.
        pulls = gather_object(list(map(Pull, output["advantages"].tolist(), tokens)))
        unscored, empty = (self._metrics["train"][f"rank/{share}"][-1] for share in ("unscored", "empty"))
        warning = self._gradient_monitor.check(pulls, unscored > 0 and unscored + empty > 1 - 1e-4)
        if warning and self.accelerator.is_main_process:
            logger.warning(warning)

    def _generate(self, prompts: list) -> tuple:
        """Generate as TRL does. The judge is asked here about all rollouts that did not come one by one."""
        started = time.perf_counter()
        generated = super()._generate(prompts)
        self._log_metric("rollouts/seconds", time.perf_counter() - started)
        _, completion_ids, masks, completions, *_ = generated
        # The masks say which tokens the policy wrote, and which are those of tools.
        self._last_answers = self._answers.read(prompts, completions, completion_ids, masks if self.tools else None)
        self._answers.forget()
        if self.args.judge_during_generation:
            # Before TRL computes the log-probabilities of the old policy and of the reference model.
            self.rank_reward.all_arrived([answer.text for answer in self._last_answers])
        return generated

    def _calculate_rewards(
        self, inputs: list[dict], prompts: list, completions: list, completion_ids_list: list[list[int]]
    ) -> torch.Tensor:
        """Compute TRL's rewards, of shape (rollouts of all processes, reward functions)."""
        training = self.model.training
        # TRL passes the columns of a row to every reward function.
        step = {"split": "train" if training else "eval", "epoch": self.current_epoch() if training else None}
        inputs = [
            {**row, **step, "extracted_answer": answer} for row, answer in zip(inputs, self._last_answers, strict=True)
        ]
        rewards = super()._calculate_rewards(inputs, prompts, completions, completion_ids_list)
        odd = rewards.isinf() | (rewards.isnan() & self._is_model.to(rewards.device))  # a model gives no `None`
        counts = odd & (self.reward_weights.to(rewards.device) != 0)  # others are logged alone
        for fault in (counts, odd):
            if fault.any():
                row, column = fault.nonzero()[0].tolist()
                message = not_finite(self.reward_func_names[column], row, rewards[row, column].item())
                if training and fault is counts:
                    raise NotFiniteError(message)
                once.warning_once(message)
        rewards[odd] = torch.nan
        # The whole row: TRL leaves it out of the baseline and gives it no advantage. With a NaN in the rank column
        # alone, TRL would take the rank reward for 0.
        rewards[torch.isnan(rewards[:, RANK])] = torch.nan
        if self.args.scale_by_signal and training:
            rewards = scale_by_signal(rewards, self.reward_weights, self.num_generations)
        return rewards

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Save the policy, and first the buffers, history and ledger; all go to the Hub together."""
        super().save_model(output_dir, _internal_call)
        if not _internal_call:
            folder = Path(output_dir or self.args.output_dir)
            on_main_process(lambda: write_table(self.store, folder))

    def _prepare_push(self) -> None:
        super()._prepare_push()
        write_table(self.store, Path(self.args.output_dir))
        if self.is_in_train:  # else `push_to_hub` asks for the card later
            self._write_card(self.dataset_name)

    def create_model_card(
        self, model_name: str | None = None, dataset_name: str | None = None, tags: list[str] | str | None = None
    ) -> None:
        """Write the model card into `output_dir`."""
        if self.is_world_process_zero() and not self.is_in_train:  # training has `_prepare_push`
            self._write_card(dataset_name or self.dataset_name, [tags] if isinstance(tags, str) else tags or [])

    @non_fatal("the model card")
    def _write_card(self, dataset_name: str | None, tags: list[str] | tuple[()] = ()) -> None:
        facts = CardFacts.of(self, dataset_name, tags)
        write_model_card(Path(self.args.output_dir), self.store, facts)

    def close(self) -> None:
        """Close the store and the connections to judge and rollout server."""
        if self._rollouts:
            self._rollouts.close()
            self._rollouts = None
        self.rank_reward.close()


def scale_by_signal(rewards: torch.Tensor, weights: torch.Tensor, G: int) -> torch.Tensor:
    """Divide rewards, of shape (groups * G, functions), by the share of groups whose total rewards differ (GPG).

    NaN in column 0 is unscored.
    """
    totals = (rewards * weights.to(rewards)).nansum(dim=1).view(-1, G)
    scored = ~torch.isnan(rewards[:, 0]).view(-1, G)
    highest = totals.masked_fill(~scored, -torch.inf).amax(dim=1)
    lowest = totals.masked_fill(~scored, torch.inf).amin(dim=1)
    share = (highest > lowest).float().mean()
    # Groups without a difference have no gradient; the others get their weight (GPG's alpha).
    return rewards / share if share > 0 else rewards
