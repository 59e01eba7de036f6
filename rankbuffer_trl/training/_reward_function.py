"""Rank rewards as reward functions, for `RankBufferTrainer` and for `reward_funcs` of a stock `GRPOTrainer`.

Every process calls the function with its slice of the rollouts. The slices are gathered into whole groups, and the
main process scores each group once. Then every process gets the rewards of its slice, or the error.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import wraps
from inspect import iscoroutinefunction, isfunction
from math import inf
from pathlib import Path
from typing import Any, NamedTuple
from weakref import finalize

from accelerate import PartialState
from accelerate.logging import get_logger
from accelerate.utils import gather_object
from datasets import Dataset
from transformers import TrainerState
from trl import GRPOConfig

from .._answers import Answer, AnswerExtractor, completion_text
from .._step import PENDING
from ..checkpointing._distributed import made_on_main_process, on_main_process
from ..data._queries import DataError, QueryTable, normal_row
from ..decoding import excerpt
from ..errors import NotFiniteError, SettingsError
from ..groups import Rollout, RolloutGroup
from ..judge import Judge
from ..monitoring._judged_thoughts import ThoughtMonitor
from ..monitoring._metrics import PLACEMENT, placement_columns, step_metrics
from ..monitoring._no_gradient import TieMonitor
from ..monitoring._non_fatal import non_fatal
from ..monitoring._probes import probe_groups, probe_metrics
from ..monitoring.progress import OpenWindow, newest_window
from ..rewards._method import RewardMethod
from ..rewards._rankbuffer import RankBuffer
from ..store import BufferStore
from ._config import RankBufferConfig, check_best_metric
from ._reward_functions import not_finite, with_inf_for_nan
from ._scorer import GroupScorer

logger = get_logger(__name__)

PATIENCE = 3  # generations without any answer, from the start of a run, after which the run stops


class GroupSettings(NamedTuple):
    """What [`GroupReward`] reads of a [`RankBufferConfig`], for a trainer that has none. See there."""

    num_generations: int
    format_check: str = "none"
    num_generations_eval: int | None = None


class GroupReward:
    """The rank reward on every process of a run. It gathers the rollouts, and the main process scores them.

    Args:
        scorer (`GroupScorer`, *optional*):
            `None` on other processes than the main one.
        args ([`RankBufferConfig`] or `GroupSettings`):
            The settings. `num_generations` is `G`, and `format_check` stands in messages alone.
        eval_queries (`QueryTable`, *optional*):
            The queries to evaluate on. Default: `queries`.
    """

    __name__ = "rank_reward"

    def __init__(
        self,
        queries: QueryTable,
        scorer: GroupScorer | None,
        args: RankBufferConfig | GroupSettings,
        eval_queries: QueryTable | None = None,
    ):
        self.queries = queries
        self.eval_queries = queries if eval_queries is None else eval_queries
        self.args = args
        self._started = False
        self._step = 0  # of the last generation
        self._unanswered: int | None = 0  # generations without any answer so far; None after the first answer
        self._scorer = scorer
        self._window = OpenWindow()
        self._thoughts, self._ties = ThoughtMonitor(args.format_check), TieMonitor()

    @property
    def scorer(self) -> GroupScorer:
        """The scorer, with method, judge and store. Only the main process has one.

        Raises:
            `RuntimeError`: on another process, or after `close`.
        """
        if self._scorer is None:
            raise RuntimeError("only the main process has judge and store, and only until close()")
        return self._scorer

    def __call__(
        self,
        completions: Sequence,
        query_id: Sequence[str],
        extracted_answer: Sequence[Answer],
        split: Sequence[str] = ("train",),
        epoch: Sequence[int | None] = (None,),
        completion_ids: Sequence[list[int]] | None = None,
        trainer_state: TrainerState | None = None,
        log_metric: Callable[[str, float], None] | None = None,
        log_extra: Callable[[str, list], None] | None = None,
        **kwargs,
    ) -> list[float | None]:
        """Return one reward per completion of this process. A collective: every process must call it."""
        rows = gather_object([(id, answer.text) for id, answer in zip(query_id, extracted_answer, strict=True)])
        step = trainer_state.global_step if trainer_state else 0

        def score() -> tuple[list[float | None], dict[str, float], dict[str, list]]:
            training = split[0] == "train"
            groups = self._groups(rows, training, step, epoch[0])
            if not any(group.answered for group in groups):
                self._no_answers(step, len(rows), training, completions, completion_ids)
            elif training:
                self._unanswered = None
            self._thoughts.check_answers([text for _, text in rows])
            # A training that evaluates first has begun, too. A trainer that only evaluates has no `max_steps`.
            self._start(training or bool(trainer_state and trainer_state.max_steps), step)
            with ThreadPoolExecutor(1) as beside:  # while this thread waits for the judge
                probes = beside.submit(probe_groups, groups)
                outcome = self.scorer.score(groups, step, update=training)
            rewards = [reward for score in outcome.scores for reward in score.rewards]
            metrics: dict[str, float] = {}
            columns = {name: [None] * len(rewards) for name in PLACEMENT}  # TRL needs whole columns
            with non_fatal("the metrics of a step"):
                metrics = step_metrics(groups, *outcome, update=training)
                if training and (warning := self._ties.check(groups, outcome.scores)):
                    logger.warning(warning)
            with non_fatal("the probes of a step"):
                metrics |= probe_metrics(probes.result(), outcome.scores)
            with non_fatal("progress/beats_last_visit"):
                window = newest_window(self.scorer.store, self._window) if training else None
                if window is not None and window.probability is not None:
                    metrics["progress/beats_last_visit"] = window.probability
            with non_fatal("where rollouts were placed, in the table of completions,"):
                columns = placement_columns(outcome.scores)
            return rewards, metrics, columns

        rewards, metrics, columns = on_main_process(score)
        start = PartialState().process_index * len(completions)
        own_rows = slice(start, start + len(completions))
        if log_metric:
            for name, value in metrics.items():
                log_metric(name, value)
        if log_extra:
            for name, values in columns.items():
                log_extra(name, values[own_rows])
        return rewards[own_rows]

    def begin(self, query_id: Sequence[str], training: bool, step: int, epoch: int | None) -> None:
        """Announce the rollouts of a generation before they are generated, so that judging starts with the first one.

        This is a collective: every process must call it.

        Args:
            query_id (`Sequence[str]`):
                The query of each rollout of this process.
            step (`int`):
                The trainer's global step.
            epoch (`int`, *optional*):
                The number of the pass over the data.
        """
        ids = gather_object(list(query_id))

        def begin() -> None:
            self._start(training, step)
            groups = self._groups([(id, PENDING) for id in ids], training, step, epoch)
            self.scorer.begin(groups, step, update=training)

        on_main_process(begin)

    def all_arrived(self, texts: Sequence[str]) -> None:
        """Hand over the answers of the rollouts of this process. A collective: every process must call it."""
        rows = gather_object(list(texts))
        if PartialState().is_main_process:
            for row, text in enumerate(rows):
                self.scorer.arrived(row, text)

    def leave_step(self) -> None:
        """Let the training step end as soon as it waits, see [`GroupScorer.leave_step`]."""
        if self._scorer is not None:
            self._scorer.leave_step()

    def discard(self) -> None:
        """Give up the rollouts that were announced and not rewarded."""
        if self._scorer is not None:
            self._scorer.discard()

    def _start(self, training: bool, step: int) -> None:
        # Before any buffer is loaded, the store is taken back to the step where the training begins.
        if training and not self._started:  # after a resume, or by a stock trainer
            self.scorer.store.rewind(step)
            self._started = True
        if training and step < self._step:  # the store has other groups of these steps, so it would record none
            raise SettingsError(
                f"the training is at step {step} after step {self._step}: a reward belongs to one run of one trainer."
                " Make another RankBufferReward with a store of its own"
            )
        self._step = step if training else self._step

    def _groups(
        self, rows: Sequence[tuple[str, str]], training: bool, step: int, epoch: int | None
    ) -> list[RolloutGroup]:
        queries, G = self.queries, self.args.num_generations
        if not training:
            queries, G = self.eval_queries, self.args.num_generations_eval or G
        if len(rows) % G:
            raise ValueError(f"{len(rows)} rollouts do not make whole groups of num_generations={G}")
        groups, counts = [], Counter(id for id, _ in rows)
        # If processes are more than queries to evaluate, accelerate begins with the first query again.
        order = list(counts)
        repeats = not training and all(id == order[i // G % len(order)] for i, (id, _) in enumerate(rows))
        for start in range(0, len(rows), G):  # TRL's sampler yields each query `G` times in a row
            ids, texts = zip(*rows[start : start + G], strict=True)
            rollouts_of = {id: counts[id] for id in set(ids)}
            if rollouts_of != {ids[0]: G} and not repeats:  # also halves of a larger group, each of which looks whole
                raise SettingsError(
                    f"num_generations={G} here, but the trainer made {max(rollouts_of.values())} rollouts of one"
                    f" prompt (rows {start} to {start + G - 1} of this generation): give both the same number"
                )
            rollouts = tuple(Rollout(rollout_id, text) for rollout_id, text in enumerate(texts))
            groups.append(RolloutGroup(queries[ids[0]], rollouts, step, epoch))
        return groups

    def _no_answers(
        self, step: int, count: int, training: bool, completions: Sequence, completion_ids: Sequence[list[int]] | None
    ) -> None:
        """Warn that a generation has no answer."""
        if training and self._unanswered is not None:
            self._unanswered += 1
        text = completion_text(completions[0])
        longest = max(map(len, completion_ids)) if completion_ids else None
        fault = (
            f"none of the {count} rollouts has an answer under format_check={self.args.format_check!r}. The first"
            f" completion has {len(text)} characters, begins with {text[:60]!r} and ends with {text[-60:]!r}."
            + (f" The longest has {longest} tokens." if longest else "")
            + " If completions are cut off, raise max_completion_length. Else the policy does not write this format:"
            " change format_check, or ask for the format in the prompt."
        )
        # Of the first generations alone: an answer ends the count.
        if self._unanswered is not None and self._unanswered >= PATIENCE:
            raise SettingsError(f"nothing to rank in the first {PATIENCE} generations, so the run stops: {fault}")
        logger.warning(f"step {step}: {fault}")

    def restart(self, rewound: bool) -> None:
        """Get ready for a run. `rewound` says that the store holds no step after its start. Main process only."""
        self._unanswered = 0
        self._started = rewound
        self._step = 0
        self.scorer.leave_step(False)

    def close(self) -> None:
        if self._scorer is not None:
            self._scorer.close()
            self._scorer = None


class RankBufferReward:
    """A reward function for a stock `GRPOTrainer`. Its rewards are ranks in [-1, 1], and `None` for unscored rollouts.

    Pass further reward functions through [`RankBufferReward.beside`]. A stock trainer does not say whether it
    evaluates: the prompts of `eval_dataset` are evaluation, whose rollouts update no buffer.

    Args:
        dataset (`Dataset`):
            The queries, with the columns of `docs/data.md`; methods without references need `prompt` alone. The rows
            that the trainer gets need `prompt` and, if the queries have ids, `query_id` only.
        judge (`Judge`):
            Used on the main process alone.
        store (`str` or `Path`):
            The SQLite file for buffers, history and ledger.
        num_generations, num_generations_eval (`int`, *optional*):
            Those of the trainer. The first is needed without `args`.
        method (`RewardMethod`, *optional*, defaults to `RankBuffer()`):
            The reward method with its arguments.
        answers (`AnswerExtractor`, *optional*):
            Reads the answers out of completions. Default: the whole completion is the answer.
        max_failures (`float`, *optional*, defaults to `0.25`):
            Share of failed judgments in a step, in 0..1, above which the run stops.
        step_timeout (`float`, *optional*):
            Seconds for judging one step, above which the run stops. Default: no limit.
        eval_dataset (`Dataset`, *optional*):
            The queries that the trainer evaluates on, with other prompts than `dataset`.
        args (`GRPOConfig`, *optional*):
            The settings of the trainer, in place of both numbers of generations.

    Raises:
        [`DataError`]: if a data set cannot be used, or if both hold the same prompt.
        [`SettingsError`]: if there is no number of generations, or not that of `args`, or if rounding would choose the
        trainer's best checkpoint.
        [`StoreError`]: if the store cannot be written.

    Example:
        >>> reward = RankBufferReward(dataset, Judge(RubricJudge()), "buffers.sqlite", args=args)
        >>> trainer = GRPOTrainer(model, reward_funcs=[reward], args=args, train_dataset=dataset)
    """

    __name__ = "rank_reward"

    def __init__(
        self,
        dataset: Dataset,
        judge: Judge,
        store: str | Path,
        num_generations: int | None = None,
        method: RewardMethod | None = None,
        answers: AnswerExtractor | None = None,
        max_failures: float = 0.25,
        step_timeout: float | None = None,
        num_generations_eval: int | None = None,
        eval_dataset: Dataset | None = None,
        args: GRPOConfig | None = None,
    ):
        method, generations = method or RankBuffer(), (num_generations, num_generations_eval)
        if args is not None:
            num_generations, num_generations_eval = args.num_generations, args.num_generations_eval
            check_best_metric(args.metric_for_best_model, alone=False)  # `beside` may add functions
        if num_generations is None or generations not in ((None, None), (num_generations, num_generations_eval)):
            raise SettingsError(
                f"RankBufferReward(num_generations={generations[0]}): pass args, the settings of the trainer"
            )
        queries = QueryTable(dataset, anchors_needed=method.responses_needed)
        eval_queries = QueryTable(eval_dataset, method.responses_needed) if eval_dataset is not None else None
        if shared := [id for id in queries.ids if eval_queries and id in eval_queries]:
            raise DataError(
                f"{len(shared)} prompts of eval_dataset are also in dataset, the first begins with"
                f" {excerpt(queries[shared[0]].text)}: keep them apart, or they count as evaluation"
            )
        self._queries, self._eval_queries = queries, eval_queries or ()
        self.answers = answers or AnswerExtractor()
        self._unscored: list[bool] = []  # of the rollouts of the last call
        self._evaluating = False  # in the last call
        self._reward = GroupReward(
            queries,
            made_on_main_process(lambda: GroupScorer(method, judge, BufferStore(store), max_failures, step_timeout)),
            GroupSettings(num_generations, self.answers.check, num_generations_eval),
            eval_queries,
        )
        finalize(self, self._reward.close)  # a program that ends in an error leaves no connection open

    def __call__(
        self,
        prompts: Sequence,
        completions: Sequence,
        query_id: Sequence[str | None] | None = None,
        completion_ids: Sequence[list[int]] | None = None,
        trainer_state: TrainerState | None = None,
        log_metric: Callable[[str, float], None] | None = None,
        log_extra: Callable[[str, list], None] | None = None,
        **kwargs,
    ) -> list[float | None]:
        """Return one reward per completion of this process. A collective: every process must call it.

        Raises:
            [`DataError`]: if a prompt is in no data set that this object knows.
        """
        rows = zip(prompts, query_id or [None] * len(prompts), strict=True)
        ids = [normal_row({"prompt": prompt, "query_id": name})["query_id"] for prompt, name in rows]
        for id, prompt in zip(ids, prompts, strict=True):
            if id not in self._queries and id not in self._eval_queries:
                last = prompt if isinstance(prompt, str) else prompt[-1]["content"]
                raise DataError(
                    f"RankBufferReward does not know the prompt that begins with {excerpt(last)}: pass the"
                    " trainer's train_dataset as dataset, and its eval_dataset as eval_dataset"
                )
        self._evaluating = any(id in self._eval_queries for id in ids)
        rewards = self._reward(
            completions,
            ids,
            self.answers.read(prompts, completions, completion_ids),
            ["eval" if id in self._eval_queries else "train" for id in ids],
            completion_ids=completion_ids,
            trainer_state=trainer_state,
            log_metric=log_metric,
            log_extra=log_extra,
        )
        self._unscored = [reward is None for reward in rewards]
        return rewards

    def beside(self, *functions: Callable) -> list[Callable]:
        """Return `reward_funcs` of a stock trainer: this object, then `functions`.

        Raises:
            [`SettingsError`]: if one of `functions` is not a function, or is asynchronous.
        """

        def masked(function: Callable) -> Callable:
            if not isfunction(function) or iscoroutinefunction(function):
                raise SettingsError(f"beside takes functions that are not async, got {function!r}: wrap it in one")

            @wraps(function)  # TRL logs a reward under the name of its function
            def reward(**columns: Any) -> list[float | None]:
                rewards = with_inf_for_nan(function)(**columns)
                if odd := [(row, value) for row, value in enumerate(rewards) if value in (inf, -inf)]:
                    message = not_finite(function.__name__, *odd[0])
                    if not self._evaluating:
                        raise NotFiniteError(message)
                    logger.warning_once(message)
                    rewards = [None if value in (inf, -inf) else value for value in rewards]
                values = zip(rewards, self._unscored, strict=True)  # TRL has just called this object
                # With `None` from all functions, TRL leaves a rollout out. Else TRL would count its rank as 0, that
                # of an average answer.
                return [None if unscored else value for value, unscored in values]

            return reward

        return [self, *map(masked, functions)]

    def close(self) -> None:
        """Close the store and the judge's connections."""
        self._reward.close()
