"""Experimental: the rank reward for TRL's asynchronous trainer, `trl.experimental.async_grpo`.

That trainer sends its reward functions to a process of their own and awaits each of them once per whole group. So this
reward is settings that can be pickled. It opens judge and store there, at the first group.

What a resume guarantees: no group is recorded in part, and the buffers go on from the last recorded group. What it
does not: the store is not taken back to the trainer's checkpoint. Groups that were scored and not yet trained on are
sampled again and count as a further visit, so buffers and epochs can be ahead of the policy.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from datasets import Dataset
from trl.trainer import utils

from rankbuffer_trl.data.queries import QueryTable, normal_row
from rankbuffer_trl.errors import SettingsError
from rankbuffer_trl.judge.config import JudgeConfig
from rankbuffer_trl.rewards.format import AnswerReader
from rankbuffer_trl.rewards.method import RewardMethod
from rankbuffer_trl.rewards.rankbuffer import RankBuffer

from .groups import SingleGroups


class AsyncRankBufferReward:
    """Experimental: a reward function for `AsyncGRPOTrainer`. Its rewards are ranks in [-1, 1], `None` if unscored.

    Args:
        dataset (`Dataset`):
            The queries, with the columns of `docs/data.md`. The trainer's rows need `prompt` and, if the queries have
            ids, `query_id`.
        judge (`JudgeConfig`):
            The settings of the judge, with `judge_max_failures` for each group.
        store (`str` or `Path`):
            The SQLite file for buffers, history and ledger.
        method (`RewardMethod`, *optional*, defaults to `RankBuffer()`):
            The reward method with its arguments.
        answers (`AnswerReader`, *optional*):
            Reads the answers out of completions. Default: the whole completion is the answer.
        timeout (`float`, *optional*):
            Seconds for judging one group, above which the run stops. Default: no limit.
        resume (`bool`, *optional*, defaults to `False`):
            Go on with the buffers of a store that exists. Without it, such a store is refused.

    Raises:
        [`DataError`]: if the data set cannot be trained on.
        [`SettingsError`]: if the store exists and `resume` is not set, or if TRL is older than 1.16.

    Example:
        >>> reward = AsyncRankBufferReward(dataset, JudgeConfig(judge_url=url, judge_model=name), "buffers.sqlite")
        >>> trainer = AsyncGRPOTrainer(model, reward_funcs=reward, args=args, train_dataset=dataset)
    """

    __name__ = "rank_reward"

    def __init__(
        self,
        dataset: Dataset,
        judge: JudgeConfig,
        store: str | Path,
        method: RewardMethod | None = None,
        answers: AnswerReader | None = None,
        timeout: float | None = None,
        resume: bool = False,
    ):
        if not hasattr(utils, "is_async_callable"):  # an older one would not await this object
            raise SettingsError("AsyncRankBufferReward needs TRL 1.16 or newer: install it")
        if not resume and Path(store).exists():
            raise SettingsError(f"{store} exists: set resume=True to go on with its buffers, or name another file")
        self.method = method or RankBuffer()
        self.queries = QueryTable(dataset, anchors_needed=self.method.responses_needed)
        self.judge = judge
        self.path = Path(store).absolute()
        self.answers = answers or AnswerReader()
        self.timeout = timeout
        self._groups: SingleGroups | None = None

    def __getstate__(self) -> dict[str, Any]:
        """Leave out what is open: each process opens its own."""
        return self.__dict__ | {"_groups": None}

    async def __call__(
        self,
        prompts: Sequence,
        completions: Sequence,
        query_id: Sequence[str | None] | None = None,
        completion_ids: Sequence[list[int]] | None = None,
        **kwargs,
    ) -> list[float | None]:
        """Return one reward per completion of one whole group.

        Raises:
            `ValueError`: if the completions are of several queries.
            [`JudgeError`]: if the judge fails too often. The trainer then stops.
        """
        rows = zip(prompts, query_id or [None] * len(prompts), strict=True)
        ids = {normal_row({"prompt": prompt, "query_id": name})["query_id"] for prompt, name in rows}
        if len(ids) != 1:
            raise ValueError(f"the completions should be one group but are of the queries {sorted(ids)}")
        if self._groups is None:  # nothing is awaited here, so one group alone opens them
            self._groups = SingleGroups(
                self.method, self.judge.judge(), self.path, self.judge.judge_max_failures, self.timeout
            )
        answers = self.answers.read(prompts, completions, completion_ids)
        scored = await self._groups.score(self.queries[ids.pop()], [answer.text for answer in answers])
        return list(scored.rewards)

    async def close(self) -> None:
        """Close the store and the judge's connections. The end of the process does this, too."""
        if self._groups is not None:
            await self._groups.close()
            self._groups = None
