"""Score whole groups on the process that owns judge and store: load buffers, ask, commit, or fail with one error."""

import asyncio
import threading
import time
from collections import Counter
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ..buffer import AnchorBuffer
from ..groups import Query, Rollout, RolloutGroup
from ..judge import Call, Judge, JudgeError
from ..judge.errors import first_leaf
from ..judge.judge import explain
from ..rewards.method import GroupScore, RewardMethod
from ..store import BufferStore

RESUME = "Nothing of this step was kept; resume from the last checkpoint once the judge answers."


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


def stand_in(query: Query, G: int) -> RolloutGroup:
    """Make a group to ask about before there are rollouts, of reference responses (best first) or made-up texts."""
    texts = query.responses[::-1] or ("Let me explain step by step.", "I do not know.")
    return RolloutGroup(query, tuple(Rollout(i, texts[i % len(texts)]) for i in range(G)), step=0, epoch=0)


def with_epoch(group: RolloutGroup, buffer: AnchorBuffer | None) -> RolloutGroup:
    """Return `group` with its epoch. A stock trainer does not name the epoch; then the query's visits count."""
    if group.epoch is not None:
        return group
    return replace(group, epoch=buffer.visits if buffer else 0)


class GroupScorer:
    """Bring a reward method, a judge and a store together.

    Args:
        method (`RewardMethod`):
            The method that turns a group and its buffer into rewards and the next buffer.
        judge (`Judge`):
            The judge that the method asks.
        store (`BufferStore`):
            The store of buffers, history and ledger.
        max_failures (`float`, *optional*, defaults to `0.25`):
            Share of a step's judgments, in 0..1, above which failures stop the run.
        step_timeout (`float`, *optional*):
            Seconds for judging one step, above which the run stops. `None` is no limit.
    """

    def __init__(
        self,
        method: RewardMethod,
        judge: Judge,
        store: BufferStore,
        max_failures: float = 0.25,
        step_timeout: float | None = None,
    ):
        self.method = method
        self.judge = judge
        self.store = store
        self.max_failures = max_failures
        self.step_timeout = step_timeout
        self._loop = asyncio.new_event_loop()
        # The loop has its own thread. One connection pool then lives through the run, also in a notebook, which
        # has a running loop already, and Ctrl-C is not blocked.
        threading.Thread(target=self._loop.run_forever, name="judge", daemon=True).start()

    def score(self, groups: Sequence[RolloutGroup], step: int, update: bool = True) -> StepScore:
        """Score all groups of one generation step, concurrently.

        A query's buffer changes at most once per step: a group of a query that was already scored in this step is
        ranked, but not recorded. With `update=False` (evaluation) only the ledger is written.

        Raises:
            [`JudgeError`]: if the share of failed judgments is above `max_failures`, as soon as that is certain, or if
            the step takes longer than `step_timeout`. Requests in flight are cancelled. The calls of the step are
            recorded then, but none of its groups.
        """
        started = time.perf_counter()
        buffers = [self.store.load(group.query.id) for group in groups]
        groups = [with_epoch(group, buffer) for group, buffer in zip(groups, buffers, strict=True)]
        done = {group.query.id for group in groups if self.store.has_group(group.query.id, step)}
        if update:
            self._check_epochs(groups, buffers, done)
        phase = "train" if update else "eval"
        judge = self._asker(groups, buffers)
        try:
            scores = self.run(self._score_all(judge, groups, buffers))
        except JudgeError:
            self.store.commit(step, [], judge.drain(), phase)
            raise
        calls = judge.drain()
        records = []
        for group, score in zip(groups, scores, strict=True) if update else ():
            if group.query.id not in done:
                done.add(group.query.id)
                records.append((group, score))
        self.store.commit(step, records, calls, phase)
        return StepScore(scores, calls, time.perf_counter() - started)

    @staticmethod
    def _check_epochs(groups: Sequence[RolloutGroup], buffers: Sequence[AnchorBuffer | None], done: set[str]) -> None:
        """Refuse a query with more visits than epochs, since a query is visited at most once per epoch."""
        for group, buffer in zip(groups, buffers, strict=True):
            if buffer is None or group.query.id in done:
                continue
            if buffer.visits > group.known_epoch:
                raise RuntimeError(
                    f"query {group.query.id!r} was already visited {buffer.visits} times before its visit of epoch"
                    f" {group.epoch}: the data order of this run does not match its buffers (was it resumed with other"
                    " data, another seed or another number of processes?)"
                )

    def _asker(self, groups: Sequence[RolloutGroup], buffers: Sequence[AnchorBuffer | None]) -> Judge:
        """Return the judge of one step, which has its own ledger and stops when too many judgments failed."""
        most = sum(
            self.method.calls(group, first=buffer is None)[1] for group, buffer in zip(groups, buffers, strict=True)
        )

        def watch(call: Call) -> None:
            """Stop as soon as the failures are too many even if all questions still to come succeed."""
            if call.failed:
                self._check_failures(judge.calls, of=most)

        judge = self.judge.asker(self.method.name, watch)
        return judge

    async def _score_all(
        self, judge: Judge, groups: Sequence[RolloutGroup], buffers: Sequence[AnchorBuffer | None]
    ) -> list[GroupScore]:
        """Score each group on its own: the fine ranking of a group waits for the insertions of this group alone."""
        try:
            async with asyncio.timeout(self.step_timeout), asyncio.TaskGroup() as tasks:
                running = [
                    tasks.create_task(self.method.score(group, buffer, judge))
                    for group, buffer in zip(groups, buffers, strict=True)
                ]
        except TimeoutError:
            outcomes = Counter(call.outcome for call in judge.calls)
            failed = sum(call.failed for call in judge.calls)
            raise JudgeError(
                f"the judge ({judge.client.name}) did not finish a step within"
                f" judge_step_timeout={self.step_timeout:g} s: {outcomes['parsed']} judgments were answered, {failed}"
                f" failed. {RESUME}"
            ) from None
        except BaseExceptionGroup as errors:
            raise first_leaf(errors) from errors
        self._check_failures(judge.calls, of=len(judge.calls))
        return [task.result() for task in running]

    def _check_failures(self, calls: Sequence[Call], of: int) -> None:
        failed = [call for call in calls if call.failed]
        if not failed or len(failed) / of <= self.max_failures:
            return
        outcomes = Counter(call.outcome for call in failed)
        counts = ", ".join(f"{count} {outcome}" for outcome, count in sorted(outcomes.items()))
        raise JudgeError(
            f"the judge ({self.judge.client.name}) failed {len(failed)} of {len(calls)} judgments in one step"
            f" ({counts}), more than judge_max_failures={self.max_failures:g} allows. {explain(failed[-1])} {RESUME}"
        )

    def first_question(self, query: Query) -> None:
        """Ask the judge one real question about `query`. The call does not enter the ledger.

        Raises:
            [`JudgeError`]: if there is no valid answer in time.
        """
        question = self.method.first_questions(stand_in(query, G=2))[0]
        self.run(self.judge.first_question(question, self.step_timeout))

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
