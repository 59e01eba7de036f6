"""GRPO with RankBuffer rewards: a thin subclass of TRL's trainer.

It adds four things: groups that are scored whole for any number of processes (by the reward function), a data order
that a resumed run keeps, unscored rollouts, and checkpoints that hold the buffers. TRL does the rest: generation,
loss, logging and pushes to the Hub.
"""

import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy
import torch
from accelerate.logging import get_logger
from accelerate.utils import gather, is_peft_model
from datasets import Dataset
from safetensors import SafetensorError
from transformers import PreTrainedModel
from transformers.trainer_utils import TrainOutput
from trl import GRPOTrainer

from ..data.queries import DataError, QueryTable
from ..errors import SettingsError
from ..files import room
from ..informs.card import CardFacts, public, write_card
from ..informs.export import FILE, export_buffers
from ..informs.informing import informing
from ..judge import Judge
from ..rewards.format import AnswerReader, format_reward
from ..store import StoreError
from ..store.buffer_store import STORE
from ..store.places import FOLDER, checkpoints
from .callbacks import BeforePush, StopEarly
from .checkpoint import (
    check_budget,
    check_not_uploaded,
    check_resumable,
    check_trusted,
    delete_oldest,
    describe,
    files_of,
    identity,
    newest_checkpoint,
    set_old_aside,
    set_torn_aside,
    withdraw_manifest,
    write_manifest,
)
from .config import RankBufferConfig
from .distributed import StepLeft, on_main_process
from .merged_base import keep_base_exact
from .plan import RunPlan
from .reward_function import GroupReward
from .rollouts import SeparateRollouts, known_to_us, limit_requests
from .sampler import EpochSampler
from .scorer import open_scorer

logger = get_logger(__name__)

NO_POLICY = "model_name_or_path is not set: name the policy to train"
UNWRITABLE = (OSError, SafetensorError, StoreError)
# What torch says when a file cannot be written. It has no error class for it, and most of its RuntimeErrors are bugs.
TORCH_CANNOT_WRITE = (
    "inline_container.cc",
    "PytorchStreamWriter",
    "iostream error",
    "write(): fd",
    "Parent directory",
)
RANK, FORMAT = 0, 1  # columns of the rank reward and the format reward


class RankBufferTrainer(GRPOTrainer):
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
        reward_funcs (`list[Callable]`, *optional*):
            More reward functions, each with the weight 1; `reward_functions` of `args` names others, with weights. TRL
            passes them `query_id`, `split`, `epoch`, the further columns of the data set, and `extracted_answer`, an
            [`~rewards.format.Answer`] per completion.
        judge ([`Judge`], *optional*):
            The judge. Default: the judge that `args` describes.
        dataset_name (`str`, *optional*):
            The name of the data in the model card: an id on the Hub, or a path, of which the card shows the last part.
        plan (`RunPlan`, *optional*):
            The plan of the run, if it is made already. Default: what follows from `args` and the data.
        kwargs:
            The other arguments of [`~trl.GRPOTrainer`]. With `tools` or `environment_factory`, see `judge_view`.

    Raises:
        [`DataError`], [`StoreError`], [`SettingsError`]: before training. The message names the fault.

    Example:
        >>> args = RankBufferConfig("runs/mine", judge_url="http://127.0.0.1:8001/v1", judge_model="my-judge")
        >>> trainer = RankBufferTrainer("Qwen/Qwen3-0.6B", args, train_dataset=load_queries("my_queries.jsonl"))
        >>> trainer.train()
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
        train_dataset: Dataset | QueryTable,
        eval_dataset: Dataset | QueryTable | None = None,
        reward_funcs: list[Callable] | None = None,
        judge: Judge | None = None,
        dataset_name: str | None = None,
        plan: RunPlan | None = None,
        **kwargs,
    ):
        if not model:
            raise SettingsError(NO_POLICY)
        args.check_view(tools=bool(kwargs.get("tools") or kwargs.get("environment_factory")))
        plan = plan or RunPlan.of(args, train_dataset, eval_dataset)
        queries, eval_queries = plan.queries, plan.eval_queries
        self._train_queries = queries
        if args.rank_only_ties and not (plan.functions or reward_funcs):
            raise SettingsError("rank_only_ties needs reward_functions, which say which groups are tied")
        self._batches = plan.batches
        self._faults = plan.faults
        self.rank_reward = GroupReward(
            queries,
            lambda: open_scorer(args, judge, plan.method, plan.batches.ends_generation),
            args.num_generations,
            args.format_check,
            eval_queries,
            args.num_generations_eval,
        )
        super().__init__(
            model,
            reward_funcs=[
                ranked_later if args.rank_only_ties else self.rank_reward,
                format_reward,
                *plan.functions,
                *(reward_funcs or []),
            ],
            args=args,
            train_dataset=queries.prompts,
            eval_dataset=None if eval_queries is None else eval_queries.prompts,
            **kwargs,
        )
        if self.use_vllm and is_peft_model(self.model):
            keep_base_exact(self.model)
        given = [args.format_weight, *plan.weights]
        self.reward_weights[FORMAT : FORMAT + len(given)] = torch.tensor(given)
        self.dataset_name = dataset_name
        view = args.judge_view if self.tools else None
        self._answers = AnswerReader(
            args.format_check, self._tokenizer, args.chat_template_kwargs, view, args.judge_view_limit
        )
        self._masks: list[list[int]] | None = None  # of the last generation: which tokens the policy wrote
        self._any_prompt = queries[queries.ids[0]].prompt
        if self.use_vllm and self.vllm_mode == "server" and self.accelerator.is_main_process:
            limit_requests(self.vllm_generation.vllm_client, args.ddp_timeout)
        self._rollouts = self._separate_rollouts()
        self._after_step: Callable[[], None] | None = None
        over_budget = lambda: args.over_budget(self.rank_reward.scorer.store.spent)  # noqa: E731
        self._stop = StopEarly(self._batches.ends_generation, over_budget, self.rank_reward.leave_step)
        self.add_callback(BeforePush(self._prepare_push))
        self.add_callback(self._stop)
        on_main_process(self._check_prompts)

    def _check_prompts(self) -> None:
        limit = self.args.max_prompt_length
        for row in self.train_dataset if limit else ():
            ids = self._tokenizer.apply_chat_template(
                row["prompt"], add_generation_prompt=True, return_dict=False, **(self.args.chat_template_kwargs or {})
            )
            if len(ids) > limit:
                raise DataError(
                    f"query {row['query_id']!r}: its prompt has {len(ids)} tokens, max_prompt_length is {limit}"
                )

    def current_epoch(self) -> int:
        """Return the epoch that the next step belongs to, an integer from 0. The trainer state's epoch is a float."""
        return self.state.global_step // self._batches.steps_per_epoch

    @property
    def interrupted(self) -> bool:
        """Whether a SIGTERM or a budget ended the last call of `train`. After its first step there is a checkpoint."""
        return self._stop.stopped

    def _get_train_sampler(self, dataset: Dataset | None = None) -> EpochSampler:
        """Build TRL's sampler with the data order of an uninterrupted run, also after a resume."""
        return EpochSampler(super()._get_train_sampler(dataset), self.current_epoch)

    def _separate_rollouts(self) -> SeparateRollouts | None:
        """Send one request per rollout from now on, if each can be judged when the server has generated it.

        With tools, environments or a rollout function, what the server generates is not the whole rollout.
        """
        if not (self.args.judge_during_generation and self.use_vllm and self.vllm_mode == "server"):
            return None
        if self.tools or self.rollout_func or self.environment_factories is not None:
            return None
        if not self.accelerator.is_main_process:  # it alone has a client
            return None
        if not known_to_us():
            logger.warning(
                "this version of TRL generates with other arguments than RankBuffer knows, so judging starts after"
                " generation"
            )
            return None
        # TRL has no hook per rollout: a rollout_func would take the user's place for one, and would have to tokenize,
        # gather and slice on every process. The client below all that is a public object, and it is replaced here,
        # while the trainer is being made, by one with the same methods. TRL's own class is left as it is.
        generation = self.vllm_generation
        generation.vllm_client = SeparateRollouts(
            generation.vllm_client,
            self.rank_reward.scorer.run_in_step,
            self._arrived,
            self.args.rollout_timeout,
            self.model.config.get_text_config().vocab_size,
        )
        return generation.vllm_client

    def _arrived(self, row: int, completion_ids: list[int]) -> None:
        # A chat template begins the completions of all prompts with the same text.
        (answer,) = self._answers.read([self._any_prompt], [""], [completion_ids])
        self.rank_reward.scorer.arrived(row, answer.text)

    def _generate_and_score_completions(self, inputs: list[dict[str, Any]]) -> dict[str, Any]:
        """Generate and score as TRL does, with a judge that is asked while rollouts are still generated."""
        if not self.args.judge_during_generation:
            return super()._generate_and_score_completions(inputs)
        training = self.model.training
        epoch = self.current_epoch() if training else None
        self.rank_reward.begin([row["query_id"] for row in inputs], training, self.state.global_step, epoch)
        try:
            return super()._generate_and_score_completions(inputs)
        except BaseException:
            self.rank_reward.discard()
            raise

    def _generate(self, prompts: list) -> tuple:
        """Generate as TRL does. The judge is asked here about all rollouts that did not come one by one.

        TRL computes the log-probabilities of the old policy and of the reference model next, before the rewards.
        """
        started = time.perf_counter()
        generated = super()._generate(prompts)
        self._log_metric("rollouts/seconds", time.perf_counter() - started)
        _, completion_ids, masks, completions, *_ = generated
        self._masks = masks if self.tools else None
        if self.args.judge_during_generation:
            answers = self._answers.read(prompts, completions, completion_ids, self._masks)
            self.rank_reward.all_arrived([answer.text for answer in answers])
        return generated

    def _calculate_rewards(
        self, inputs: list[dict], prompts: list, completions: list, completion_ids_list: list[list[int]]
    ) -> torch.Tensor:
        """Compute TRL's rewards, of shape (rollouts of all processes, reward functions).

        A rollout that no judge could place has NaN in its whole row. TRL then leaves it out of the baseline and gives
        it no advantage. With a NaN in the rank column alone, TRL would take the rank reward for 0.
        """
        training = self.model.training
        # TRL passes the columns of a row to every reward function.
        step = {"split": "train" if training else "eval", "epoch": self.current_epoch() if training else None}
        answers = self._answers.read(prompts, completions, completion_ids_list, self._masks)
        inputs = [{**row, **step, "extracted_answer": answer} for row, answer in zip(inputs, answers, strict=True)]
        rewards = super()._calculate_rewards(inputs, prompts, completions, completion_ids_list)
        if self.args.rank_only_ties:
            rewards[:, RANK] = self._rank_ties(rewards, inputs, completions, completion_ids_list)
        rewards[torch.isnan(rewards[:, RANK])] = torch.nan
        if self.args.scale_by_signal and training:
            rewards = scale_by_signal(rewards, self.reward_weights, self.num_generations)
        return rewards

    def _rank_ties(
        self, rewards: torch.Tensor, inputs: list[dict], completions: list, completion_ids_list: list[list[int]]
    ) -> torch.Tensor:
        """Return the rank rewards of all processes: those of the groups that the reward functions leave tied, else 0.

        `rewards` has the shape (rollouts of all processes, reward functions).
        """
        G = self.num_generations if self.model.training else self.num_generations_eval
        totals = (rewards * self.reward_weights.to(rewards))[:, FORMAT + 1 :].nansum(dim=1).view(-1, G)
        tied = totals.amax(dim=1) == totals.amin(dim=1)
        self._log_metric("rank/tied_groups", tied.float().mean().item())
        start = self.accelerator.process_index * len(inputs)
        ranked = tied.repeat_interleave(G)[start : start + len(inputs)].tolist()
        ranks = self.rank_reward(
            completions,
            **{key: [row[key] for row in inputs] for key in ("query_id", "extracted_answer", "split", "epoch")},
            ranked=ranked,
            completion_ids=completion_ids_list,
            trainer_state=self.state,
            log_metric=self._log_metric,
            log_extra=self._log_completion_extra,
        )
        mine = torch.tensor([torch.nan if rank is None else rank for rank in ranks], device=rewards.device)
        return gather(mine)

    def train(self, resume_from_checkpoint: str | bool | None = None, **kwargs) -> TrainOutput:
        """Train, as [`~transformers.Trainer.train`] does, after the judge has answered one real question.

        A SIGTERM or a used-up budget ends the run with a checkpoint, and `interrupted` is true then. A budget lets the
        current step end. A SIGTERM ends a step that waits for rollouts or judgments at once.

        Args:
            resume_from_checkpoint (`str` or `bool`, *optional*):
                A checkpoint folder, or `True` for the newest whole one in `output_dir`. Policy and buffers come from
                it.

        Raises:
            [`JudgeError`]: if the judge does not answer.
            [`SettingsError`]: if a budget of the judge is used up already.
            [`StoreError`]: if the checkpoint is not whole, or belongs to a run with other data, method or judge.
        """
        checkpoint = on_main_process(lambda: self._prepare_run(resume_from_checkpoint))
        self._after_step = None
        try:
            return super().train(resume_from_checkpoint=checkpoint, **kwargs)
        finally:
            self._stop.leave()

    def _run_epoch(self, **kwargs) -> None:
        """Train for an epoch as transformers does, unless the run has no step left.

        If the run is told to stop while a step waits, nothing of that step is kept. The checkpoint is that of the last
        whole step, and a resumed run repeats the step.
        """
        if self.state.global_step >= self.state.max_steps:  # transformers would ask after one more step
            self.control.should_training_stop = True
            return
        try:
            super()._run_epoch(**kwargs)
        except StepLeft:
            step = self.state.global_step
            logger.warning(f"SIGTERM: stopping after step {step}, and leaving the next one, which was not finished")
            if self._after_step and self._stop.saved != step:
                self._after_step()
                on_main_process(lambda: self.rank_reward.scorer.store.rewind(step))
                self._save_checkpoint(self.model, None)
                self.callback_handler.on_save(self.args, self.state, self.control)
            self._stop.leave_step(self.control)

    def _maybe_log_save_evaluate(self, *args, **kwargs) -> None:
        """Log, save and evaluate after a step as transformers does. Remember what the next step will change first."""
        super()._maybe_log_save_evaluate(*args, **kwargs)
        tokens, restore = self.state.num_input_tokens_seen, random_states()

        def go_back() -> None:
            restore()
            self.state.num_input_tokens_seen = tokens

        self._after_step = go_back

    def _prepare_run(self, resume: str | bool | None) -> str | None:
        checkpoint, step = None, 0
        faults, self._faults = self._faults, {}  # for this call; checkpoints may change until the next one
        if self.args.save_only_model and self.args.save_strategy != "no":
            logger.warning(
                "save_only_model is set: its checkpoints lack the optimizer, so this run cannot be resumed, not even"
                " after a SIGTERM"
            )
        if resume:
            checkpoint = newest_checkpoint(self.args.output_dir, faults) if resume is True else Path(resume)
            check_trusted(checkpoint, self.args.output_dir, self.args.trust_checkpoint)
            if self.args.push_to_hub:
                check_not_uploaded(checkpoint, self.args.output_dir)
            step = check_resumable(checkpoint, self._identity(), self.args.resume_with_changes, faults)
            if not self._batches.ends_generation(step):
                raise StoreError(
                    f"{checkpoint} was saved inside a generation, whose queries would be scored a second time: resume"
                    " from another checkpoint"
                )
            if step < self._batches.steps:
                check_budget(self.args, self.args.output_dir, checkpoint)
            set_torn_aside(self.args.output_dir, faults)
            self.rank_reward.restart(checkpoint / FOLDER)
        else:
            check_budget(self.args, self.args.output_dir, None)
        self.rank_reward.scorer.first_question(self._train_queries[self._train_queries.ids[0]])
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
        in_checkpoint = _internal_call and folder != Path(self.args.output_dir)  # `push_to_hub` passes the latter
        on_main_process(lambda: self._save_store(folder, manifest=not in_checkpoint, table=not _internal_call))
        super().save_model(output_dir, _internal_call)

    def _save_store(self, folder: Path, manifest: bool, table: bool) -> None:
        try:
            withdraw_manifest(folder)
            store = self.rank_reward.scorer.store
            store.save(folder / FOLDER)
            if manifest:
                self._write_manifest(folder, {f"{FOLDER}/{STORE}": folder / FOLDER / STORE})
            if table:
                self._export(folder / FILE)
        except OSError as error:
            raise StoreError(f"cannot write {folder}: {error}") from error

    @informing(FILE)
    def _export(self, path: Path) -> None:
        path.unlink(missing_ok=True)  # else the table of an earlier step would pass for this one
        export_buffers(self.rank_reward.scorer.store, path)

    def _write_manifest(self, folder: Path, files: dict[str, Path]) -> None:
        store = self.rank_reward.scorer.store
        totals = {phase: store.totals(phase) for phase in ("train", "eval")}
        names = {"policy": self.model.config.name_or_path, "data": self.dataset_name}
        names = {key: public(name) if name else None for key, name in names.items()}
        write_manifest(folder, describe(names | self._identity(), self.state.global_step, totals, self.args), files)

    def _save_checkpoint(self, model: torch.nn.Module, trial: object) -> None:
        """Save a checkpoint as TRL does, then complete it, push it, and delete those that are too many.

        TRL pushes and deletes before the manifest could be written, and deletes by the clock: after the clock was set
        back, each new checkpoint would be the oldest. So both are put off and done here, in the order of the steps.

        Raises:
            [`StoreError`]: if it cannot be written, saying which checkpoint to resume from.
        """
        run, limit = self._get_output_dir(trial=trial), self.args.save_total_limit
        checkpoint = Path(run, f"checkpoint-{self.state.global_step}")
        try:
            self.args.save_total_limit = None  # keeps TRL from deleting
            super()._save_checkpoint(model, trial)
            self.args.save_total_limit = limit
            self.accelerator.wait_for_everyone()  # until all processes have written their files
            on_main_process(lambda: self._write_manifest(checkpoint, files_of(checkpoint)))
        except (*UNWRITABLE, RuntimeError) as error:
            if not isinstance(error, UNWRITABLE) and not any(text in str(error) for text in TORCH_CANNOT_WRITE):
                raise
            older = any(step != self.state.global_step for step, _ in checkpoints(run))
            advice = (
                "set resume_from_checkpoint to true, since the checkpoints before it are as they were"
                if older
                else "start the run as before, since no checkpoint was written before it"
            )
            raise StoreError(
                f"checkpoint-{self.state.global_step} could not be written to {self.args.output_dir}: {error}. The"
                f" disk of that folder has {room(run)} left: make room, raise the quota, or remove the cause. Then"
                f" {advice}"
            ) from error
        finally:
            self.args.save_total_limit = limit
        if self.args.push_to_hub:
            super()._push_from_checkpoint(str(checkpoint))
        if self.args.should_save:
            delete_oldest(run, limit, self.state.best_model_checkpoint)

    def _push_from_checkpoint(self, checkpoint_folder: str) -> None:
        """Do nothing: `_save_checkpoint` pushes, once the checkpoint is whole."""

    def create_model_card(
        self, model_name: str | None = None, dataset_name: str | None = None, tags: list[str] | str | None = None
    ) -> None:
        """Write the model card into `output_dir`, as [`write_card`] does. `_prepare_push` does it during training."""
        if self.is_world_process_zero() and not self.is_in_train:
            self._write_card(dataset_name or self.dataset_name, [tags] if isinstance(tags, str) else tags or [])

    def _prepare_push(self) -> None:
        self._save_store(Path(self.args.output_dir), manifest=True, table=True)
        if self.is_in_train:  # else `push_to_hub` asks for the card later
            self._write_card(self.dataset_name)

    @informing("the model card")
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
        """Close the store and the connections to judge and rollout server."""
        if self._rollouts:
            self._rollouts.close()
            self._rollouts = None
        self.rank_reward.close()


def ranked_later(completions: list, **kwargs) -> list[float]:
    """Take the place of the rank reward until the other rewards say which groups are tied."""
    return [0.0] * len(completions)


ranked_later.__name__ = "rank_reward"  # the name in the log


def random_states() -> Callable[[], None]:
    """Return a function that takes the random numbers of this process back to where they are now.

    A checkpoint has the same ones.
    """
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


def scale_by_signal(rewards: torch.Tensor, weights: torch.Tensor, G: int) -> torch.Tensor:
    """Divide rewards, of shape (groups * G, functions), by the share of groups whose total rewards differ (GPG).

    Groups without a difference have no gradient, and the division gives their weight to the others (GPG's alpha). If
    no group has a difference, or all have one, nothing changes.
    """
    totals = (rewards * weights.to(rewards)).nansum(dim=1).view(-1, G)
    scored = ~torch.isnan(rewards[:, RANK]).view(-1, G)
    highest = totals.masked_fill(~scored, -torch.inf).amax(dim=1)
    lowest = totals.masked_fill(~scored, torch.inf).amin(dim=1)
    share = (highest > lowest).float().mean()
    return rewards / share if share > 0 else rewards
