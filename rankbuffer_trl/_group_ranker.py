"""Rank rewards for any other program, in its own process: a group of texts goes in, one reward per text comes out.

A training scores many groups in one step and one transaction. Here each group is a step of its own. Groups of several
queries are judged at once. Two groups of one query wait for each other, so each is ranked against the buffer that the
one before it left.
"""

import asyncio
import operator
import os
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from weakref import WeakValueDictionary

from ._answers import AnswerExtractor
from ._step import RESUME, Scoring, Step
from .data._queries import DataError, generic_row, normal_row, row_faults
from .errors import SettingsError
from .groups import Query, Rollout, RolloutGroup
from .judge import ChatClient, Judge, JudgeError
from .judge._openai_client import OpenAIClient
from .judge._servers import Servers
from .judge.config import JudgeConfig, read_judge
from .monitoring._judged_thoughts import ThoughtMonitor
from .rewards._method import GroupScore, RewardMethod, load_method
from .store import BufferStore, StoreError, history

AnyQuery = Query | Mapping[str, Any] | str | list[dict]
AnyJudge = Judge | ChatClient | JudgeConfig | Mapping[str, Any]
AGAIN = "Nothing of this group was kept: rank it again once the judge answers."


class GroupRanker:
    """Ranks groups of texts with a reward method, a judge and a store, as a training does.

    A text without a reward has `None`: its judgment failed. If too many judgments of a group fail, the group has one
    error and leaves no record but its calls. The coroutines belong to one event loop.

    Example:

    ```python
    import asyncio

    from rankbuffer_trl import GroupRanker
    from rankbuffer_trl.judge import RubricJudge

    query = {"prompt": "How long does tea steep?", "rubrics": [{"text": "Says minutes: three, four.", "weight": 5}]}


    async def main():
        async with GroupRanker("rankbuffer", RubricJudge(), method_args={"bootstrap": True}) as ranker:
            return await ranker.rank(query, ["No idea.", "Three or four minutes.", "Four minutes."])


    asyncio.run(main()).rewards  # (-1.0, 1.0, 0.0)
    ```

    Args:
        method (`str` or `RewardMethod`):
            The name of a reward method as in a recipe, such as `"listwise"`, or the method.
        judge (`Judge`, `ChatClient`, [`JudgeConfig`] or `Mapping`):
            The judge, or a client, or settings such as `{"judge_url": ..., "judge_model": ...}`. Their
            `judge_max_failures` is the share of each group.
        store (`str` or `Path`, *optional*):
            The SQLite file for buffers, history and ledger. Default: a temporary one, which ends with `close`.
        method_args, seed (*optional*):
            The arguments of a method that is named, and its seed, if it has one.
        format_check (`str`, *optional*, defaults to `"none"`):
            The format that a text must have, as in a recipe: `"think"` shows the judge what follows the thinking. A
            text without an answer has the reward -1.
        max_failures (`float`, *optional*, defaults to `0.25`):
            Share of failed judgments of a group, in 0..1, above which the group fails.
        step_timeout (`float`, *optional*):
            Seconds for judging one group. Default: no limit.

    Attributes:
        store (`BufferStore`):
            While no group is ranked, its `save`, `restore` and `rewind` make it follow the checkpoints of a trainer.

    Raises:
        [`SettingsError`]: if there is no such method, argument or setting.
        [`StoreError`]: if the store cannot be written, or is in use.
    """

    def __init__(
        self,
        method: str | RewardMethod,
        judge: AnyJudge,
        store: str | Path | None = None,
        method_args: Mapping[str, Any] | None = None,
        seed: int = 42,
        format_check: str = "none",
        max_failures: float = 0.25,
        step_timeout: float | None = None,
    ):
        if isinstance(method, str):
            method = load_method(method, method_args or {}, seed)
        elif method_args:
            raise SettingsError("method_args is for a method that is named: give the arguments to the method itself")
        config = read_judge("judge", judge) if isinstance(judge, Mapping) else judge
        self._owns_judge = isinstance(config, JudgeConfig)  # the connections of another judge are its owner's
        if isinstance(config, JudgeConfig):
            max_failures, config = config.judge_max_failures, config.judge()
        if not isinstance(config, Judge) and not hasattr(config, "complete"):
            raise SettingsError(f"a {type(judge).__name__} is no judge: pass a Judge, a client, or a judge's settings")
        judge = config if isinstance(config, Judge) else Judge(config)
        self.answers = AnswerExtractor(format_check)
        self._thoughts = ThoughtMonitor(format_check)
        self._folder = TemporaryDirectory(prefix="rankbuffer-")  # of a store that ends with `close`
        self.store = BufferStore(store or Path(self._folder.name) / "live.sqlite")
        self.scoring = Scoring(method, judge, self.store, max_failures, step_timeout)
        # One thread has the store: a commit may wait for a reader of the file, and the event loop must not.
        self._thread = ThreadPoolExecutor(1, "store")
        self._place: tuple[asyncio.AbstractEventLoop, int] | None = None  # loop and process of the first rank
        self._locks: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()  # by query

    async def rank(self, query: AnyQuery, texts: Sequence[str], step: int | None = None) -> GroupScore:
        """Rank one group, record it with its calls, and return its score.

        A query and a step name one visit. A visit that is recorded is not judged again. Its score then has the
        rewards, the order and the positions that are recorded, and no buffers.

        Args:
            query (`Query`, `Mapping`, `str` or `list`):
                The query, or a row of a data set (`docs/data.md`), or a prompt. Without `query_id`, the prompt names
                the query. Without rubrics, the judge goes by five generic ones.
            step (`int`, *optional*):
                The trainer's step, which grows with each visit of a query. Default: one more than at the query's last
                visit, from 0.

        Raises:
            [`DataError`]: if the query cannot be ranked, or if there are no texts.
            [`StoreError`]: if other texts are recorded for this step, or if the query has a later visit.
            [`JudgeError`]: if the judge fails too often, or takes too long.
        """
        self._check_place()
        asked = self._query(query)
        if isinstance(texts, (str, Mapping)) or not texts:
            raise DataError(f"query {asked.id!r}: the texts to rank must be a list with at least one text")
        for i, text in enumerate(texts):
            if not isinstance(text, str):
                raise DataError(f"query {asked.id!r}: text {i} must be a string, got {text!r:.60}")
        try:
            step = step if step is None else operator.index(step)  # the store knows no number of numpy
        except TypeError:
            raise DataError(f"query {asked.id!r}: step must be a whole number, got {step!r:.60}") from None
        if step is not None and step < 0:
            raise DataError(f"query {asked.id!r}: step must be at least 0, got {step}")
        answers = self.answers.read([asked.prompt] * len(texts), texts, None)
        self._thoughts.check_answers([answer.text for answer in answers])
        rollouts = tuple(Rollout(i, answer.text) for i, answer in enumerate(answers))
        # Two groups at once would overwrite each other's buffer.
        async with self._locks.setdefault(asked.id, asyncio.Lock()):
            visits = await self._in_store(lambda: history.groups(self.store, query_id=asked.id))
            last = visits[-1].step if visits else -1
            group = RolloutGroup(asked, rollouts, last + 1 if step is None else step, epoch=len(visits))
            if group.step <= last:  # a program that asks again must not pay twice
                return await self._in_store(lambda: self._recorded(group, visits))
            return await self._judged(group)

    async def close(self) -> None:
        """Close the store, and the connections of a judge that was made from settings."""
        if self._owns_judge:
            await self.scoring.judge.client.close()
        await self._in_store(self.store.close)
        self._thread.shutdown()
        self._folder.cleanup()

    async def __aenter__(self) -> "GroupRanker":
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.close()

    def _check_place(self) -> None:
        """Refuse a process that has no thread of the store, and a loop in which no connection to the judge lives."""
        loop, pid = asyncio.get_running_loop(), os.getpid()
        first_loop, first_pid = self._place = self._place or (loop, pid)
        server = isinstance(self.scoring.judge.client, (OpenAIClient, Servers))
        if pid != first_pid or (server and loop is not first_loop and first_loop.is_closed()):
            raise SettingsError(
                f"this GroupRanker began in another {'event loop' if pid == first_pid else 'process'}: make one loop"
                " for all calls in the process that ranks, as docs/other_trainers.md does"
            )

    def _query(self, given: AnyQuery) -> Query:
        if isinstance(given, Query):
            return given
        row = normal_row(dict(given) if isinstance(given, Mapping) else {"prompt": given})
        row |= {} if row.get("rubrics") else generic_row("a query to rank")
        for fault in row_faults(row, "the query", {}, self.scoring.method.responses_needed):
            raise DataError(fault)
        return Query.from_row(row)

    def _recorded(self, group: RolloutGroup, visits: Sequence[history.GroupRow]) -> GroupScore:
        id, step = group.query.id, group.step
        stored = {row.id: row.text for row in history.responses(self.store, id)}  # those with an answer
        texts = [stored.get(f"{step}-{rollout.id}", "") for rollout in group.rollouts]
        for visit in visits:
            if visit.step == step and texts == [r.text for r in group.rollouts] and len(visit.rewards) == len(texts):
                positions = {int(i): position for i, position in visit.positions.items()}
                return GroupScore(tuple(visit.rewards), tuple(map(tuple, visit.order)), positions)
        raise StoreError(
            f"query {id!r} has a group of step {visits[-1].step}, so other texts of step {step} are refused: number"
            f" its visits upwards, and call store.rewind({step}) before a trainer goes on from that step"
        )

    async def _judged(self, group: RolloutGroup) -> GroupScore:
        step, scores = await self._in_store(lambda: Step(self.scoring, [group], group.step)), []
        try:
            await step.start()
            scores = await step.finish([group])
            return scores[0]
        except JudgeError as error:
            raise JudgeError(str(error).replace(RESUME, AGAIN)) from None  # there is no checkpoint to resume from
        finally:  # no question is in flight now, also after a cancellation; those that were answered were paid for
            await self._in_store(lambda: step.commit(scores))

    async def _in_store(self, work: Callable[[], Any]) -> Any:
        return await asyncio.get_running_loop().run_in_executor(self._thread, work)


async def rank_texts(
    prompt: AnyQuery, texts: Sequence[str], judge: AnyJudge, method: str | RewardMethod = "listwise"
) -> GroupScore:
    """Rank texts once, without a buffer that stays. By default the judge ranks the whole list, in several orders.

    The arguments are those of [`GroupRanker`] and [`GroupRanker.rank`], and so are the errors.

    Example:

    ```python
    import asyncio

    from rankbuffer_trl import rank_texts
    from rankbuffer_trl.judge import RubricJudge

    query = {"prompt": "How long does tea steep?", "rubrics": [{"text": "Says minutes: three, four.", "weight": 5}]}
    texts = ["No idea.", "Three or four minutes.", "Four minutes."]
    asyncio.run(rank_texts(query, texts, RubricJudge())).rewards  # (-1.0, 1.0, 0.0)
    ```
    """
    async with GroupRanker(method, judge) as ranker:
        return await ranker.rank(prompt, texts)
