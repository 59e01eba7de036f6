"""GRPO with RankBuffer rewards: a thin subclass of TRL's trainer.

It adds whole groups whatever the split over processes (the reward function gathers them), an exact data order across
resume, the unscored rows, and checkpoints that hold the buffers. What was left out, because TRL has it: generation,
loss, logging, Hub.
"""

from collections.abc import Callable
from pathlib import Path

import torch
from accelerate.logging import get_logger
from accelerate.utils import is_peft_model
from datasets import Dataset
from safetensors import SafetensorError
from transformers import PreTrainedModel
from transformers.trainer_utils import TrainOutput
from trl import GRPOTrainer

from ..data.queries import DataError, QueryTable
from ..judge import Judge
from ..report.card import CardFacts, write_card
from ..rewards.format import AnswerReader, FormatReward
from ..store import StoreError
from ..store.export import FILE, export_buffers
from ..store.places import FOLDER, LIVE_STORE, STATE
from .batches import Batches
from .callbacks import BeforePush, StopOnSigterm
from .checkpoint import (
    check_not_uploaded,
    check_resumable,
    check_step,
    describe,
    identity,
    newest_checkpoint,
    set_old_aside,
    set_torn_aside,
    write_store,
)
from .config import RankBufferConfig
from .distributed import on_main_process
from .reward_function import RankBufferReward
from .sampler import EpochSampler

logger = get_logger(__name__)

RANK = 0  # column of the rank reward


class RankBufferTrainer(GRPOTrainer):
    """
    Trainer for GRPO whose reward of a rollout is its rank (RankBuffer).

    Args:
        model (`str` or `PreTrainedModel`):
            The policy, as for [`~trl.GRPOTrainer`].
        args ([`RankBufferConfig`]):
            The configuration.
        train_dataset (`Dataset`):
            Queries with the columns of `docs/data.md`: `query_id`, `prompt`, `rubrics` and, unless buffers are
            bootstrapped, `responses`.
        eval_dataset (`Dataset`, *optional*):
            Queries of the same form. Evaluation reads buffers and writes none.
        reward_funcs (`list[Callable]`, *optional*):
            Further reward functions, each with weight 1, beside the rank reward and the format reward.
        judge ([`Judge`], *optional*):
            Who is asked, if not the judge that `args` names.
        dataset_name (`str`, *optional*):
            What the model card calls the data: an id on the Hub, or a path, of which it shows the last part.
        kwargs:
            Everything else that [`~trl.GRPOTrainer`] takes.

    Raises:
        [`DataError`], [`StoreError`], `ValueError`: before training, naming what is wrong.
    """

    _tag_names = ["trl", "grpo", "rankbuffer"]
    _name = "RankBuffer"
    _paper = {
        "title": "RankBuffer: Efficient Ranking-Based Rewards for Open-Ended Generation",
        "citation": (
            "@inproceedings{yang2027rankbuffer,\n"
            "    title  = {{RankBuffer: Efficient Ranking-Based Rewards for Open-Ended Generation}},\n"
            "    author = {Zixuan Yang and Yiqun Chen and Qi Liu and Wei Yang and Erhan Zhang and Liyi Chen"
            " and Qimeng Wang and Yan Gao and Jiaxin Mao},\n"
            "    year   = 2027,\n"
            "    note   = {Under review at ICLR 2027},\n"
            "}"
        ),
    }

    def __init__(
        self,
        model: str | PreTrainedModel,
        args: RankBufferConfig,
        train_dataset: Dataset,
        eval_dataset: Dataset | None = None,
        reward_funcs: list[Callable] | None = None,
        judge: Judge | None = None,
        dataset_name: str | None = None,
        **kwargs,
    ):
        reader = AnswerReader(args.format_check, chat_template_kwargs=args.chat_template_kwargs)
        self.rank_reward = RankBufferReward(
            train_dataset,
            judge=judge or args.judge(),
            store=Path(args.output_dir) / LIVE_STORE,
            num_generations=args.num_generations,
            method=args.reward_method(),
            reader=reader,
            max_failures=args.judge_max_failures,
            step_timeout=args.judge_step_timeout,
        )
        self._train_queries = self.rank_reward.queries
        self._eval_queries = None
        if eval_dataset is not None:
            self._eval_queries = QueryTable(eval_dataset, self.rank_reward.method.responses_needed)
            eval_dataset = eval_dataset.select_columns(["prompt", "query_id"])
        extra = reward_funcs or []
        args.reward_weights = [1.0, args.format_weight] + [1.0] * len(extra)
        super().__init__(
            model,
            reward_funcs=[self.rank_reward, FormatReward(reader), *extra],
            args=args,
            train_dataset=train_dataset.select_columns(["prompt", "query_id"]),
            eval_dataset=eval_dataset,
            **kwargs,
        )
        self.dataset_name = dataset_name
        self.add_callback(BeforePush(self._prepare_push))
        reader.tokenizer = self._tokenizer
        self.rank_reward.epoch = self.current_epoch
        self._sigterm = StopOnSigterm(self._ends_generation)
        self.add_callback(self._sigterm)
        on_main_process(self._check_prompts)

    @property
    def steps_per_epoch(self) -> int:
        """Optimizer steps in one pass over the data, which leaves out queries that fill no whole generation batch."""
        return Batches(self.args, len(self.train_dataset)).steps_per_epoch

    def current_epoch(self) -> int:
        """The pass over the data that the next step belongs to, from 0; unlike the trainer state's, an integer."""
        return self.state.global_step // self.steps_per_epoch

    @property
    def interrupted(self) -> bool:
        """Whether a SIGTERM ended the last call of `train`; its checkpoint is written."""
        return self._sigterm.stopped

    def _ends_generation(self, step: int) -> bool:
        micro_steps = step % self.steps_per_epoch * self.args.gradient_accumulation_steps
        return micro_steps % (self.args.steps_per_generation * self.num_iterations) == 0

    def _check_prompts(self) -> None:
        Batches(self.args, len(self.train_dataset))  # raises where there are too few queries
        limit = self.args.max_prompt_length
        for row in self.train_dataset if limit else ():
            ids = self._tokenizer.apply_chat_template(
                row["prompt"], add_generation_prompt=True, return_dict=False, **(self.args.chat_template_kwargs or {})
            )
            if len(ids) > limit:
                raise DataError(
                    f"query {row['query_id']!r}: its prompt has {len(ids)} tokens, max_prompt_length is {limit}"
                )

    def _get_train_sampler(self, dataset: Dataset | None = None) -> EpochSampler:
        """TRL's sampler, in the order that an uninterrupted run has, whenever it is resumed."""
        return EpochSampler(super()._get_train_sampler(dataset), self.current_epoch)

    def _calculate_rewards(
        self, inputs: list[dict], prompts: list, completions: list, completion_ids_list: list[list[int]]
    ) -> torch.Tensor:
        """TRL's rewards, shape (rollouts of all processes, reward functions).

        A rollout that no judge could place has NaN in its whole row: TRL then leaves it out of the baseline and gives
        it no advantage, where a NaN beside a format reward would count as a rank reward of 0.
        """
        self.rank_reward.training = self.model.training
        self.rank_reward.num_generations = self.num_generations if self.model.training else self.num_generations_eval
        self.rank_reward.queries = (
            self._train_queries if self.model.training else self._eval_queries or self._train_queries
        )
        rewards = super()._calculate_rewards(inputs, prompts, completions, completion_ids_list)
        rewards[torch.isnan(rewards[:, RANK])] = torch.nan
        if self.args.scale_by_signal and self.model.training:
            rewards = scale_by_signal(rewards, self.reward_weights, self.num_generations)
        return rewards

    def train(self, resume_from_checkpoint: str | bool | None = None, **kwargs) -> TrainOutput:
        """Train, as [`~transformers.Trainer.train`] does, after the judge has answered one real question.

        Args:
            resume_from_checkpoint (`str` or `bool`, *optional*):
                A checkpoint folder, or `True` for the newest whole one in `output_dir`. Policy and buffers come from
                it.

        A SIGTERM ends the run after the current step with a checkpoint; `interrupted` is true then.

        Raises:
            [`JudgeError`]: if the judge does not answer.
            [`StoreError`]: if the checkpoint is not whole, or belongs to a run with other data, method or judge.
        """
        checkpoint = on_main_process(lambda: self._prepare_run(resume_from_checkpoint))
        try:
            return super().train(resume_from_checkpoint=checkpoint, **kwargs)
        finally:
            self._sigterm.leave()

    def _prepare_run(self, resume: str | bool | None) -> str | None:
        checkpoint, step = None, 0
        if self.args.save_only_model and self.args.save_strategy != "no":
            logger.warning(
                "save_only_model is set: its checkpoints lack the optimizer, so this run cannot be resumed, not even"
                " after a SIGTERM"
            )
        if resume:
            checkpoint = newest_checkpoint(self.args.output_dir) if resume is True else Path(resume)
            if self.args.push_to_hub:
                check_not_uploaded(checkpoint, self.args.output_dir)
            check_resumable(checkpoint, self._identity(), self.args.resume_with_changes)
            set_torn_aside(self.args.output_dir)
            self.rank_reward.restart(checkpoint / FOLDER)
            step = check_step(checkpoint, self.rank_reward.scorer.store)
        self.rank_reward.scorer.preflight(self._train_queries[self._train_queries.ids[0]])
        if not checkpoint:
            self.rank_reward.restart()
        set_old_aside(self.args.output_dir, step)
        return str(checkpoint) if checkpoint else None

    def _identity(self) -> dict:
        scorer = self.rank_reward.scorer
        return identity(self.args, scorer.method, scorer.judge, self._train_queries)

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Save the policy, and first the buffers, history and ledger; all go to the Hub together.

        Outside a checkpoint, at the end of a run, the buffers are also written as a table, `buffers.parquet`.
        """
        folder = Path(output_dir or self.args.output_dir)
        on_main_process(lambda: self._save_store(folder, table=not _internal_call))
        super().save_model(output_dir, _internal_call)

    def _save_store(self, folder: Path, table: bool) -> None:
        if not table and folder != Path(self.args.output_dir):  # the latter when a run is pushed at its end
            (folder / STATE).unlink(missing_ok=True)  # written last: an older checkpoint of this name is void now
        store = self.rank_reward.scorer.store
        totals = {phase: store.totals(phase) for phase in ("train", "eval")}
        write_store(store, folder, describe(self._identity(), self.state.global_step, totals, self.args))
        if table:
            export_buffers(store, folder / FILE)

    def _save_checkpoint(self, model: torch.nn.Module, trial: object) -> None:
        """TRL's, whose failures say where the run can go on from."""
        try:
            super()._save_checkpoint(model, trial)
        except (OSError, RuntimeError, SafetensorError) as error:
            raise StoreError(
                f"checkpoint-{self.state.global_step} could not be written to {self.args.output_dir}: {error}. The"
                " checkpoints before it are as they were: once the cause is gone, set resume_from_checkpoint to true"
            ) from error

    def _save_rng_state(self, output_dir: str) -> None:
        """TRL's. Next the main process pushes and rotates, and by then all processes must have written theirs."""
        super()._save_rng_state(output_dir)
        self.accelerator.wait_for_everyone()

    def create_model_card(
        self, model_name: str | None = None, dataset_name: str | None = None, tags: list[str] | str | None = None
    ) -> None:
        """Write the model card into `output_dir`, as [`write_card`] does. `_prepare_push` does it during training."""
        if self.is_world_process_zero() and not self.is_in_train:
            self._write_card(dataset_name or self.dataset_name, [tags] if isinstance(tags, str) else tags or [])

    def _prepare_push(self) -> None:
        self._save_store(Path(self.args.output_dir), table=True)
        if self.is_in_train:  # else `push_to_hub` asks for the card later
            self._write_card(self.dataset_name)

    def _write_card(self, dataset_name: str | None, tags: list[str] | tuple[()] = ()) -> None:
        scorer = self.rank_reward.scorer
        facts = CardFacts(
            settings=self.args.to_dict(),
            state=self.state,
            method=scorer.method,
            queries=len(self._train_queries),
            base_model=self.model.config.name_or_path,
            peft=is_peft_model(self.model),
            paper=self._paper,
            tags=[*self._tag_names, *tags],
            repo_id=self.hub_model_id,
            dataset_name=dataset_name,
        )
        write_card(Path(self.args.output_dir), scorer.store, facts)

    def close(self) -> None:
        """Close the store and the judge's connections."""
        self.rank_reward.close()


def scale_by_signal(rewards: torch.Tensor, weights: torch.Tensor, G: int) -> torch.Tensor:
    """GPG's rescaling: rewards, shape (groups * G, functions), over the share of groups whose total rewards differ.

    Groups without a difference have no gradient, and this gives the others their weight (GPG's alpha). All zero, or
    all different, changes nothing.
    """
    totals = (rewards * weights.to(rewards)).nansum(dim=1).view(-1, G)
    scored = ~torch.isnan(rewards[:, RANK]).view(-1, G)
    highest = totals.masked_fill(~scored, -torch.inf).amax(dim=1)
    lowest = totals.masked_fill(~scored, torch.inf).amin(dim=1)
    share = (highest > lowest).float().mean()
    return rewards / share if share > 0 else rewards
