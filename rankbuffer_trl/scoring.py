"""Scores whole groups on the process that owns judge and store: load buffers, ask, commit, or fail with one error."""

import asyncio
import threading
import time
from collections import Counter
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass
from typing import Any

from .buffer import AnchorBuffer
from .groups import Query, RolloutGroup
from .judge import Call, Judge, JudgeError
from .rewards.rankbuffer import RankBuffer
from .score import GroupScore
from .store import BufferStore


@dataclass(frozen=True)
class StepScore:
    """The outcome of one generation step.

    Args:
        scores (`list[GroupScore]`):
            One per group, in the order given.
        calls (`list[Call]`):
            Every judgment that was asked for.
        seconds (`float`):
            Wall time from the first question to the commit.
    """

    scores: list[GroupScore]
    calls: list[Call]
    seconds: float


class GroupScorer:
    """Brings a reward method, a judge and a store together.

    Args:
        method (`RankBuffer`):
            Turns a group and its buffer into rewards and the next buffer.
        judge (`Judge`):
            Asked by the method.
        store (`BufferStore`):
            Keeps buffers, history and ledger.
        max_failures (`float`, *optional*, defaults to `0.25`):
            Share of a step's judgments, in 0..1, above which failures stop the run.
    """

    def __init__(self, method: RankBuffer, judge: Judge, store: BufferStore, max_failures: float = 0.25):
        self.method = method
        self.judge = judge
        self.store = store
        self.max_failures = max_failures
        self._loop = asyncio.new_event_loop()
        # A thread of its own, so that one connection pool lives through the run, in a notebook too, and Ctrl-C is not
        # blocked.
        threading.Thread(target=self._loop.run_forever, name="judge", daemon=True).start()

    def score(self, groups: Sequence[RolloutGroup], step: int, update: bool = True) -> StepScore:
        """Score all groups of one generation step, concurrently.

        A query's buffer changes at most once per step: a group of a query that was already scored in this step is
        ranked, but not recorded. With `update=False` (evaluation) nothing but the ledger is written.

        Raises:
            [`JudgeError`]: if the share of failed judgments is above `max_failures`. No group of the step is recorded
            then; the calls are.
        """
        started = time.perf_counter()
        buffers = [self.store.load(group.query.id) for group in groups]
        done = {group.query.id for group in groups if self.store.has_group(group.query.id, step)}
        if update:
            self._check_epochs(groups, buffers, done)
        scores = self.run(self._score_all(groups, buffers))
        calls = self.judge.drain()
        failure = self._failure(calls)
        records = []
        if update and not failure:
            for group, score in zip(groups, scores, strict=True):
                if group.query.id not in done:
                    done.add(group.query.id)
                    records.append((group, score))
        self.store.commit(step, records, calls, phase="train" if update else "eval")
        if failure:
            raise JudgeError(failure)
        return StepScore(scores, calls, time.perf_counter() - started)

    @staticmethod
    def _check_epochs(groups: Sequence[RolloutGroup], buffers: Sequence[AnchorBuffer | None], done: set[str]) -> None:
        """A query is visited at most once per epoch, so its visits never run ahead of the epochs."""
        for group, buffer in zip(groups, buffers, strict=True):
            ahead = buffer is not None and group.epoch is not None and buffer.visits > group.epoch
            if ahead and group.query.id not in done:
                raise RuntimeError(
                    f"query {group.query.id!r} was already visited {buffer.visits} times before its visit of epoch"
                    f" {group.epoch}: the data order of this run does not match its buffers (was it resumed with other"
                    " data, another seed or another number of processes?)"
                )

    async def _score_all(
        self, groups: Sequence[RolloutGroup], buffers: Sequence[AnchorBuffer | None]
    ) -> list[GroupScore]:
        async with asyncio.TaskGroup() as tasks:
            running = [
                tasks.create_task(self.method.score(group, buffer, self.judge))
                for group, buffer in zip(groups, buffers, strict=True)
            ]
        return [task.result() for task in running]

    def _failure(self, calls: Sequence[Call]) -> str | None:
        failed = [call for call in calls if call.outcome != "parsed"]
        if len(failed) <= self.max_failures * len(calls):
            return None
        outcomes = Counter(call.outcome for call in failed)
        counts = ", ".join(f"{count} {outcome}" for outcome, count in sorted(outcomes.items()))
        return (
            f"the judge ({self.judge.client.name}) failed {len(failed)} of {len(calls)} judgments in one step"
            f" ({counts}), more than judge_max_failures={self.max_failures:g} allows. Last cause: {failed[-1].error}."
            " Nothing of this step was kept; resume from the last checkpoint once the judge answers."
        )

    def preflight(self, query: Query) -> None:
        """Ask the judge one real question about `query`; it enters no ledger.

        Raises:
            [`JudgeError`]: if there is no valid answer.
        """
        self.run(self.judge.preflight(self.method.question(query)))

    def run(self, coroutine: Coroutine) -> Any:
        """Run a coroutine on the judge's event loop and wait for it. An interrupt cancels it."""
        future = asyncio.run_coroutine_threadsafe(coroutine, self._loop)
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise

    def close(self) -> None:
        """Close the judge's connections, the loop and the store."""
        self.run(self.judge.client.close())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self.store.close()
