"""RankBuffer as a reward function, for `reward_funcs` of a stock `GRPOTrainer` and inside `RankBufferTrainer`.

Every process calls it with its slice of the rollouts. The slices are gathered into whole groups, the main process
scores them once, and every process gets its rewards or the error.
"""

from collections.abc import Callable, Sequence
from pathlib import Path

from accelerate import PartialState
from accelerate.logging import get_logger
from accelerate.utils import gather_object
from datasets import Dataset
from transformers import TrainerState

from ..data.queries import QueryTable
from ..groups import Rollout, RolloutGroup, storable
from ..judge import Judge
from ..rewards.format import AnswerReader
from ..rewards.method import RewardMethod
from ..rewards.rankbuffer import RankBuffer
from ..store import BufferStore
from .distributed import on_main_process
from .metrics import step_metrics
from .scorer import GroupScorer

logger = get_logger(__name__)


class RankBufferReward:
    """A reward function whose rewards are ranks in [-1, 1], and `None` for rollouts that no judge could place.

    In a stock `GRPOTrainer`, use it alone or know that TRL counts the `None` of one reward function as 0 when another
    one has a value; `RankBufferTrainer` has no such gap. A stock trainer does not say whether it evaluates, so give
    evaluation rows a column `split` with another value than `train`, else they update the buffers.

    Args:
        dataset (`Dataset`):
            The queries, with the columns of `docs/data.md`. The rows that the trainer trains on need `prompt` and
            `query_id` only.
        judge (`Judge`):
            Who is asked. Used on the main process alone.
        store (`str` or `Path`):
            The SQLite file for buffers, history and ledger.
        num_generations (`int`):
            `G`, the trainer's `num_generations`.
        method (`RewardMethod`, *optional*, defaults to `RankBuffer()`):
            The method with its arguments.
        reader (`AnswerReader`, *optional*):
            What counts as an answer.
        max_failures (`float`, *optional*, defaults to `0.25`):
            Share of failed judgments in a step above which the run stops.
        step_timeout (`float`, *optional*):
            Seconds for judging one step, above which the run stops.

    Raises:
        [`DataError`]: if the data set cannot be trained on.
        [`StoreError`]: if the store cannot be written.
    """

    __name__ = "rank_reward"

    def __init__(
        self,
        dataset: Dataset,
        judge: Judge,
        store: str | Path,
        num_generations: int,
        method: RewardMethod | None = None,
        reader: AnswerReader | None = None,
        max_failures: float = 0.25,
        step_timeout: float | None = None,
    ):
        self.method = method or RankBuffer()
        self.queries = QueryTable(dataset, anchors_needed=self.method.responses_needed)
        self.reader = reader or AnswerReader()
        self.num_generations = num_generations
        self.training = True
        self.epoch: Callable[[], int] | None = None
        self._started = False
        self._scorer: GroupScorer | None = None
        on_main_process(lambda: self._open(judge, store, max_failures, step_timeout))

    def _open(self, judge: Judge, store: str | Path, max_failures: float, step_timeout: float | None) -> None:
        self._scorer = GroupScorer(self.method, judge, BufferStore(store), max_failures, step_timeout)

    @property
    def scorer(self) -> GroupScorer:
        """Method, judge and store, which the main process alone has.

        Raises:
            `RuntimeError`: on another process, or after `close`.
        """
        if self._scorer is None:
            raise RuntimeError("only the main process has judge and store, and only until close()")
        return self._scorer

    def __call__(
        self,
        prompts: Sequence,
        completions: Sequence,
        query_id: Sequence[str],
        completion_ids: Sequence[list[int]] | None = None,
        trainer_state: TrainerState | None = None,
        log_metric: Callable[[str, float], None] | None = None,
        split: Sequence[str] = ("train",),
        **kwargs,
    ) -> list[float | None]:
        """One reward per completion of this process. A collective: every process must call it."""
        answers = self.reader.read(prompts, completions, completion_ids)
        rows = gather_object([(id, answer.text) for id, answer in zip(query_id, answers, strict=True)])
        step = trainer_state.global_step if trainer_state else 0
        training = self.training and split[0] == "train"
        rewards, metrics = on_main_process(lambda: self._score(rows, step, training))
        if log_metric:
            for name, value in metrics.items():
                log_metric(name, value)
        first = PartialState().process_index * len(completions)
        return rewards[first : first + len(completions)]

    def _score(self, rows: Sequence[tuple[str, str]], step: int, training: bool) -> tuple[list[float | None], dict]:
        """On the main process: all rows in rank order to all rewards in the same order, and the step's metrics."""
        if training and not self._started:
            self.scorer.store.rewind(step)
            self._started = True
        groups = self._groups(rows, step, self.epoch() if self.epoch and training else None)
        outcome = self.scorer.score(groups, step, update=training)
        if not any(group.answered for group in groups):
            logger.warning(
                f"step {step}: none of the {len(rows)} rollouts has an answer under"
                f" format_check={self.reader.check!r}. Is max_completion_length long enough, and does the policy write"
                " this format?"
            )
        rewards = [reward for score in outcome.scores for reward in score.rewards]
        return rewards, step_metrics(groups, outcome)

    def _groups(self, rows: Sequence[tuple[str, str]], step: int, epoch: int | None) -> list[RolloutGroup]:
        """Cut the rows into groups of `G`; TRL's sampler yields each query `G` times in a row."""
        G = self.num_generations
        if len(rows) % G:
            raise ValueError(f"{len(rows)} rollouts do not make whole groups of num_generations={G}")
        groups = []
        for start in range(0, len(rows), G):
            ids = {query_id for query_id, _ in rows[start : start + G]}
            if len(ids) != 1:
                raise ValueError(
                    f"rows {start} to {start + G - 1} should be one group but hold the queries {sorted(ids)}"
                )
            rollouts = tuple(Rollout(i, storable(text)) for i, (_, text) in enumerate(rows[start : start + G]))
            groups.append(RolloutGroup(self.queries[ids.pop()], rollouts, step, epoch))
        return groups

    def restart(self, saved: Path | None = None) -> None:
        """Get ready for a run: from a checkpoint's store, or from nothing.

        Main process only. Nothing is there at once, so that an evaluation before the first step sees no other run's
        buffers. Without this call, as in a stock trainer, the store goes back to the step that the first call names.
        """
        self._started = saved is None
        if saved is None:
            self.scorer.store.rewind(0)
        else:
            self.scorer.store.restore(saved)

    def close(self) -> None:
        """Close store and judge."""
        if self._scorer is not None:
            self._scorer.close()
            self._scorer = None
