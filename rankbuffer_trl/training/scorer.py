"""Score whole groups on the process that owns judge and store: load buffers, ask, commit, or fail with one error."""

import asyncio
import threading
import time
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from ..buffer import AnchorBuffer
from ..checkpointing.distributed import StepLeft
from ..errors import SettingsError
from ..groups import Query, Rollout, RolloutGroup
from ..judge import Call, Judge, JudgeError, Question
from ..judge.errors import first_leaf
from ..judge.judge import explain
from ..judge.ledger import READER
from ..rewards.method import GroupScore, RewardMethod
from ..rewards.prefetch import first_questions
from ..store import BufferStore, history
from ..store.history import ReadRow
from ..store.places import LIVE_STORE
from .config import RankBufferConfig
from .repair import Repair
from .step import RESUME, OpenStep


class StepScore(NamedTuple):
    """The outcome of one generation step.

    Args:
        scores (`list[GroupScore]`):
            One per group, in the order given.
        calls (`list[Call]`):
            Every judgment that was asked for.
        seconds (`float`):
            Wall time that the trainer waited, for the buffers, the judge and the commit.
        hidden (`float`, *optional*, defaults to `0.0`):
            Share of `calls`, in 0..1, that had ended before the trainer asked for the scores.
    """

    scores: list[GroupScore]
    calls: list[Call]
    seconds: float
    hidden: float = 0.0


def stand_in(query: Query, G: int, texts: Sequence[str] = ()) -> RolloutGroup:
    """Make a group to ask about before there are rollouts, of texts from worst to best, or else of made-up ones."""
    made_up = (*(rubric.text for rubric in query.rubrics), "I do not know.", "Let me explain step by step.")
    texts = (texts or query.responses or made_up)[::-1]
    return RolloutGroup(query, tuple(Rollout(i, texts[i % len(texts)]) for i in range(G)), step=0, epoch=0)


def some(method: RewardMethod, asked: list[Question]) -> list[Question]:
    """Return the questions that a method asks at first.

    Raises:
        [`SettingsError`]: if there are none.
    """
    if not asked:
        raise SettingsError(
            f"the reward method {method.name!r} asks the judge nothing: name a reward without a judge in"
            " reward_functions"
        )
    return asked


def with_epoch(group: RolloutGroup, buffer: AnchorBuffer | None) -> RolloutGroup:
    """Return `group` with its epoch."""
    if group.epoch is not None:
        return group
    # A stock trainer does not name the epoch. Then the query's visits count.
    return replace(group, epoch=buffer.visits if buffer else 0)


def check_epoch(group: RolloutGroup, visits: int) -> None:
    """Refuse a query with more visits than epochs."""
    if visits > group.known_epoch:  # a query is visited at most once per epoch
        raise RuntimeError(
            f"query {group.query.id!r} was already visited {visits} times before its visit of epoch {group.epoch}: the"
            " data order of this run does not match its buffers (was it resumed with other data, another seed or"
            " another number of processes?)"
        )


def phase(update: bool) -> str:
    """Return the name of a phase in the ledger."""
    return "train" if update else "eval"


class GroupScorer:
    """The one scorer of a run, on its main process. It brings a reward method, a judge and a store together.

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
            Seconds for judging one step, above which the run stops. They count from its last rollout, while something
            is left to judge. `None` is no limit.
        may_leave (`Callable[[int], bool]`, *optional*):
            Tells whether a training step with this number may be left before its end, after `leave_step`. Default: no
            step.
        repair ([`Repair`], *optional*):
            The reader that repairs the rewards.
    """

    def __init__(
        self,
        method: RewardMethod,
        judge: Judge,
        store: BufferStore,
        max_failures: float = 0.25,
        step_timeout: float | None = None,
        may_leave: Callable[[int], bool] = lambda step: False,
        repair: Repair | None = None,
    ):
        self.method = method
        self.judge = judge
        self.store = store
        self.max_failures = max_failures
        self.step_timeout = step_timeout
        self.may_leave = may_leave
        self.repair = repair
        self._told = asyncio.Event()  # whether to leave the step
        self._begun: OpenStep | None = None
        self._seconds = 0.0  # that `begin` took
        self._loop = asyncio.new_event_loop()
        # The loop has its own thread. One connection pool then lives through the run, also in a notebook, which
        # has a running loop already, and Ctrl-C is not blocked.
        threading.Thread(target=self._loop.run_forever, name="judge", daemon=True).start()

    def begin(self, groups: Sequence[RolloutGroup], step: int, update: bool = True) -> None:
        """Announce the rollouts of a generation step, before they are generated.

        Their texts come one by one through `arrived`. The judge is asked at once what no longer depends on the
        other rollouts, and about a group when it is whole. `score` then waits for what is left. What it returns and
        records is the same with and without `begin`.

        Args:
            groups (`Sequence[RolloutGroup]`):
                The groups, whose rollouts have any text that is not empty ([`PENDING`]) until they arrive.
            step (`int`):
                The trainer's global step.
            update (`bool`, *optional*, defaults to `True`):
                Whether `score` will record the step, as in training.
        """
        self.discard()
        started = time.perf_counter()
        self._begun = self._open(groups, step, update)
        self._seconds = time.perf_counter() - started

    def arrived(self, row: int, text: str) -> None:
        """Hand over the answer of a rollout as soon as it is generated. Any thread may call this.

        Args:
            row (`int`):
                The number of the rollout in the generation, group by group: `G * group + rollout.id`.
            text (`str`):
                The answer alone. It is empty if there is none.
        """
        if begun := self._begun:
            self._loop.call_soon_threadsafe(begun.arrivals.put_nowait, (row, text))

    def score(self, groups: Sequence[RolloutGroup], step: int, update: bool = True) -> StepScore:
        """Score all groups of one generation step, concurrently. With `update=False` only the ledger is written.

        Raises:
            [`JudgeError`]: if the share of failed judgments is above `max_failures`, as soon as that is certain, or if
            the step takes longer than `step_timeout`. Requests in flight are cancelled. The calls of the step are
            recorded then, but none of its groups.
            [`StepLeft`]: if `leave_step` was called, and the step may be left. What holds for an error holds here.
        """
        started = time.perf_counter()
        if self._begun is None or not self._begun.fits(groups, step, phase(update)):
            self.discard()
            self._begun, self._seconds = self._open(groups, step, update), 0.0
        opened = self._begun
        groups = [with_epoch(group, buffer) for group, buffer in zip(groups, opened.buffers, strict=True)]
        try:
            scores = self.run_in_step(opened.finish(groups))
            reads = self.run_in_step(self._read(opened, groups, scores)) if self.repair and update else []
        except BaseException:
            self.discard()
            raise
        self._begun = None
        if self.repair:
            scores = self.repair.correct(self.store, groups, scores)
        calls = opened.judge.drain()
        done = self._recorded(groups, step)
        records = []
        for group, score in zip(groups, scores, strict=True) if update else ():
            # A query's buffer changes once in a step. A second group of a query has rewards, and leaves no record.
            if group.query.id not in done:
                done.add(group.query.id)
                records.append((group, score))
        self.store.commit(step, records, calls, opened.phase, reads)
        hidden = opened.hidden / len(calls) if calls else 0.0
        return StepScore(scores, calls, self._seconds + time.perf_counter() - started, hidden)

    async def _read(
        self, opened: OpenStep, groups: Sequence[RolloutGroup], scores: Sequence[GroupScore]
    ) -> list[ReadRow]:
        """Let the reader score its groups of a step. Its calls join those of the judge.

        Raises:
            [`JudgeError`]: if the reader fails too often, or takes too long.
        """
        assert self.repair is not None
        known, asked = self._recorded(groups, opened.number), []
        reader = self.repair.reader
        for i in self.repair.chosen(history.count_groups(self.store), len(groups)):
            if groups[i].query.id not in known:
                known.add(groups[i].query.id)
                asked.append(self.repair.read(self.method, groups[i], opened.buffers[i], scores[i]))
        try:
            async with asyncio.timeout_at(opened.ends), asyncio.TaskGroup() as tasks:
                reading = [tasks.create_task(each) for each in asked]
        except TimeoutError:
            raise JudgeError(
                f"the reader ({reader.client.name}) did not finish a step within"
                f" judge_step_timeout={self.step_timeout:g} s. {RESUME}"
            ) from None
        except BaseExceptionGroup as errors:
            raise first_leaf(errors) from errors
        finally:
            calls = reader.drain()
            opened.judge.calls.extend(calls)
        failed = [call for call in calls if call.failed]
        if failed and len(failed) / len(calls) > self.max_failures:
            raise JudgeError(
                f"the reader ({reader.client.name}) failed {len(failed)} of {len(calls)} judgments in one step."
                f" {explain(failed[-1])} {RESUME}",
                passing=failed[-1].passing,
            )
        return [row for task in reading for row in task.result()]

    def discard(self) -> None:
        """Give up a step that was begun and not scored: cancel its requests and record its calls."""
        if self._begun is not None:
            left, self._begun = self._begun, None
            self.run(left.cancel())
            self.store.commit(left.number, [], left.judge.drain(), left.phase)

    def leave_step(self, leave: bool = True) -> None:
        """Let training steps end with [`StepLeft`] instead of waiting, from now on. A signal handler may call this.

        Args:
            leave (`bool`, *optional*, defaults to `True`):
                `False` lets them wait again, for the next run.
        """
        if leave:
            self._loop.call_soon_threadsafe(self._told.set)  # the loop alone wakes what waits
        else:
            self._told.clear()

    def run_in_step(self, coroutine: Coroutine) -> Any:
        """Run a coroutine of the step that was begun, as `run` does. `leave_step` cancels it if the step may be left.

        Raises:
            [`StepLeft`]: if it was cancelled.
        """
        begun = self._begun
        leavable = begun is not None and begun.phase == phase(True) and self.may_leave(begun.number)
        return self.run(self._unless_told(coroutine) if leavable else coroutine)

    async def _unless_told(self, coroutine: Coroutine) -> Any:
        work, told = asyncio.ensure_future(coroutine), asyncio.ensure_future(self._told.wait())
        try:
            await asyncio.wait((work, told), return_when=asyncio.FIRST_COMPLETED)
            if not work.done():
                raise StepLeft
            return work.result()
        finally:
            work.cancel()
            told.cancel()
            await asyncio.gather(work, told, return_exceptions=True)

    def _open(self, groups: Sequence[RolloutGroup], step: int, update: bool) -> OpenStep:
        if update and self._told.is_set() and self.may_leave(step):
            raise StepLeft
        buffers = [self.store.load(group.query.id) for group in groups]
        groups = [with_epoch(group, buffer) for group, buffer in zip(groups, buffers, strict=True)]
        if update:
            done = self._recorded(groups, step)
            for group, buffer in zip(groups, buffers, strict=True):
                if buffer is not None and group.query.id not in done:
                    check_epoch(group, buffer.visits)
        limits = (self.max_failures, self.step_timeout)
        opened = OpenStep(self.method, self.judge, groups, buffers, step, phase(update), *limits, self.store.spend)
        self.run(opened.start())
        return opened

    def _recorded(self, groups: Sequence[RolloutGroup], step: int) -> set[str]:
        """Return the queries whose visit of this step is recorded already."""
        return {group.query.id for group in groups if self.store.has_group(group.query.id, step)}

    def first_question(self, query: Query) -> None:
        """Ask judge and reader one real question about `query`. No call enters the ledger. The tokens were spent.

        Raises:
            [`SettingsError`]: if the method asks nothing.
            [`JudgeError`]: if there is no valid answer in time.
        """
        groups = (stand_in(query, G) for G in (2, 3, 4, 8, 16, 64))  # a method may ask nothing about a small group
        question = some(self.method, next(filter(None, map(partial(first_questions, self.method), groups)), []))[0]
        for each in self._judges:
            judge = Judge(each.client, each.max_attempts, each.guard, on_spent=self.store.spend)
            self.run(judge.first_question(question, self.step_timeout))

    @property
    def _judges(self) -> list[Judge]:
        return [self.judge, *([self.repair.reader] if self.repair else [])]

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
        self.discard()
        for each in self._judges:
            self.run(each.client.close())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self.store.close()


def open_scorer(
    args: RankBufferConfig,
    judge: Judge | None = None,
    method: RewardMethod | None = None,
    may_leave: Callable[[int], bool] = lambda step: False,
    reader: Judge | None = None,
) -> GroupScorer:
    """Open the scorer of a run: its reward method, its judges and the store in its folder.

    `may_leave` is that of [`GroupScorer`]. `reader` is the second judge. Default: the one of `args`.

    Raises:
        [`SettingsError`]: if the judge that was given asks in another way than the settings say.
    """
    if judge is not None and judge.guard != args.judge_guard:
        raise SettingsError(
            f"the judge was made with guard={judge.guard}, but judge_guard is {args.judge_guard}: make it with"
            " Judge(client, guard=args.judge_guard)"
        )
    store, repair = BufferStore(Path(args.output_dir) / LIVE_STORE), None
    if second := reader or args.reader_judge():
        ledger = Judge(second.client, second.max_attempts, second.guard, READER, on_spent=store.spend)
        repair = Repair(ledger, args.reader_first)
    limits = (args.judge_max_failures, args.judge_step_timeout)
    return GroupScorer(method or args.reward_method(), judge or args.judge(), store, *limits, may_leave, repair)
