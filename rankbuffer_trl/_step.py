"""One generation step: load the buffers, ask about rollouts as they arrive, score complete groups, and commit.

What is asked early never decides a reward. A group is scored once all its rollouts are known, from all of them. An
early question only has its answer ready when the method asks it.
"""

import asyncio
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any

from ._debiasing import Debiasing
from .groups import Rollout, RolloutGroup
from .judge import Call, Judge, JudgeError, Question
from .judge._errors import first_leaf
from .judge._judge import Askable, explain
from .rewards._method import GroupScore, RewardMethod
from .rewards._prefetch import early_questions, without
from .store import BufferStore, history
from .store.history import ReadRow

RESUME = "Nothing of this step was kept; resume from the last checkpoint once the judge answers."
PENDING = "(not known yet)"  # the text of a rollout that has not arrived; a method's `calls` counts it as an answer


@dataclass(eq=False)
class Shared:
    """A question of a step with its answer to come, for all who ask it."""

    key: tuple[str, str, str]  # of questions that may be equal
    question: Askable
    answer: "asyncio.Future[tuple[Any | None, Call]]"
    waiting: int = 0  # how many wait for the answer


class EarlyJudge(Judge):
    """The judge of one step. It is asked an equal question once, early or not, and all who ask it share the answer."""

    def __init__(self, judge: Judge, method: str, on_call: Callable[[Call], None], on_spent: Callable[[Any], None]):
        super().__init__(judge.client, judge.max_attempts, judge.guard, method or judge.method, on_call, on_spent)
        self.shared: defaultdict[tuple[str, str, str], list[Shared]] = defaultdict(list)

    def put(self, question: Askable, start: Callable[..., asyncio.Future] = asyncio.ensure_future) -> Shared:
        """Put `question` now, unless it was put, and keep its answer for all equal questions to come."""
        # A few questions to compare in place of all.
        key = question.kind, question.query_id, repr(getattr(question, "responses", None))
        for earlier in self.shared[key]:
            if earlier.question == question:
                return earlier
        shared = Shared(key, question, start(super().ask_with_cost(question)))
        shared.answer.add_done_callback(lambda answer: answer.cancelled() or answer.exception())  # all may have left
        self.shared[key].append(shared)
        return shared

    async def ask_with_cost(self, question: Askable) -> tuple[Any | None, Call]:
        shared = self.put(question)
        shared.waiting += 1
        try:
            await asyncio.wait([shared.answer])  # the end of one who waits does not end the question of the others
        finally:
            shared.waiting -= 1
            if not shared.waiting and not shared.answer.done():
                self.shared[shared.key].remove(shared)
                shared.answer.cancel()
                await asyncio.wait([shared.answer])  # until it stands in the ledger
        return shared.answer.result()


@dataclass(eq=False, repr=False)
class Scoring:
    """What a step is scored with.

    Args:
        max_failures (`float`, *optional*, defaults to `0.25`):
            Share of a step's judgments, in 0..1, above which failures stop the run.
        step_timeout (`float`, *optional*):
            Seconds for judging one step, above which the run stops. They count from its last rollout, while something
            is left to judge. `None` is no limit.
        debiasing ([`Debiasing`], *optional*):
            The reference judge that debiases the rewards.
    """

    method: RewardMethod
    judge: Judge
    store: BufferStore
    max_failures: float = 0.25
    step_timeout: float | None = None
    debiasing: Debiasing | None = None


class Step:
    """One generation step, from the announcement of its queries to its record.

    The coroutines run on the judge's event loop. The constructor and `commit` use the store.

    Args:
        groups (`Sequence[RolloutGroup]`):
            The groups. Rollouts that are not known yet have the text [`PENDING`].
        number (`int`):
            The trainer's global step.
        update (`bool`, *optional*, defaults to `True`):
            Whether the step is recorded, as in training. Of an evaluation only the calls are.

    Raises:
        `RuntimeError`: if a query has more visits than epochs.
    """

    def __init__(self, scoring: Scoring, groups: Sequence[RolloutGroup], number: int, update: bool = True):
        self.scoring = scoring
        self.number = number
        self.update = update
        self.buffers = [scoring.store.load(group.query.id) for group in groups]  # as they were before the step
        # If the trainer does not name the epoch, the query's visits count.
        visited = [0 if buffer is None else buffer.visits for buffer in self.buffers]
        self.groups = [
            replace(group, epoch=times) if group.epoch is None else group
            for group, times in zip(groups, visited, strict=True)
        ]
        # A query's buffer changes once in a step. A second group of a query has rewards, and leaves no record.
        ids = [group.query.id for group in groups]
        self._new = [ids.index(id) for id in dict.fromkeys(ids) if update and not scoring.store.has_group(id, number)]
        for i in self._new:
            group = self.groups[i]
            if visited[i] > group.known_epoch:  # a query is visited at most once per epoch
                raise RuntimeError(
                    f"query {group.query.id!r} was already visited {visited[i]} times before its visit of epoch"
                    f" {group.epoch}: the data order of this run does not match its buffers (other data or seed?)"
                )
        self.judge = EarlyJudge(scoring.judge, scoring.method.name, self._watch, scoring.store.spend)
        self.hidden = 0  # judgments that had ended when `finish` was called
        # Rows, which count through the groups, with their texts. `None` ends them.
        self.arrivals: asyncio.Queue[tuple[int, str] | None] = asyncio.Queue()
        # When its time is over, on the clock of the loop. A reference judge has what is left.
        self._deadline: float | None = None
        self._early: list[list[Question]] = [[] for _ in groups]  # questions of the method that were asked early
        self._touched: set[int] = set()  # groups with rollouts that arrived and led to no question yet
        self._missing = [{rollout.id for rollout in group.rollouts} for group in groups]
        self._final: Sequence[RolloutGroup] = ()
        self._other_texts = False  # whether rollouts arrived with other texts than they have in the end
        self._reads: list[ReadRow] = []
        self._task: asyncio.Task[list[GroupScore]]

    def fits(self, groups: Sequence[RolloutGroup], number: int, update: bool) -> bool:
        """Return whether `groups` are the groups that were announced, whatever the texts of their rollouts."""
        received, announced = (
            [(group.query, len(group.rollouts)) for group in step] for step in (groups, self.groups)
        )
        return (number, update, received) == (self.number, self.update, announced) and all(
            group.epoch in (None, mine.epoch) for group, mine in zip(groups, self.groups, strict=True)
        )

    async def start(self) -> None:
        """Begin to take rollouts. All other coroutines come after it."""
        self._task = asyncio.create_task(self._score_all())

    async def finish(self, groups: Sequence[RolloutGroup]) -> list[GroupScore]:
        """Return the scores of `groups`, which hold all rollouts, as the judge gives them.

        Raises:
            [`JudgeError`]: if the judge or the reference judge fails too often, or takes too long.
        """
        self.hidden = len(self.judge.calls)
        self._final = [replace(group, epoch=mine.epoch) for group, mine in zip(groups, self.groups, strict=True)]
        self.arrivals.put_nowait(None)
        scores = await self._task
        if self.scoring.debiasing:
            self._reads = await self._read(self.scoring.debiasing, scores)
        return scores

    async def cancel(self) -> None:
        """Cancel what is in flight and wait until it has ended."""
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)

    def commit(self, scores: Sequence[GroupScore] = ()) -> tuple[Sequence[GroupScore], list[Call]]:
        """Record the step in one transaction. Return its scores as they were repaired, and its calls.

        Args:
            scores (`Sequence[GroupScore]`, *optional*):
                What `finish` returned.
        """
        scoring, records = self.scoring, []
        if scores:
            if scoring.debiasing:
                scores = scoring.debiasing.correct(scoring.store, self._final, scores)
            records = [(self._final[i], scores[i]) for i in self._new]
        calls = self.judge.drain()  # also without scores: they were paid for
        phase = "train" if self.update else "eval"
        scoring.store.commit(self.number, records, calls, phase, self._reads if scores else ())
        return scores, calls

    async def _score_all(self) -> list[GroupScore]:
        # Each group on its own: its fine ranking waits for its insertions alone.
        scoring: dict[int, asyncio.Task[GroupScore]] = {}
        limit = asyncio.timeout(None)
        async with self._within(limit, self.judge, "judge") as tasks:
            while arrival := await self.arrivals.get():
                self._take(*arrival)
                # The next one may make its group whole, and a whole group needs no early question.
                if self.arrivals.empty():
                    await self._ask(tasks, scoring)
                if not any(self._missing) and limit.when() is None:  # generation does not count
                    self._start_clock(limit)
                    tasks.create_task(self._stop_clock(limit, scoring))
            self._start_clock(limit)
            for i, group in enumerate(self._final):
                self._other_texts |= any(
                    rollout not in group.rollouts
                    for rollout in self.groups[i].rollouts
                    if rollout.id not in self._missing[i]
                )
                if i in scoring and group.rollouts != self.groups[i].rollouts:
                    scoring.pop(i).cancel()  # what was asked about other texts decides nothing
                self.groups[i] = group
                self._missing[i].clear()
            self._touched = set(range(len(self._final))) - scoring.keys()
            await self._ask(tasks, scoring)
            scores = [await scoring[i] for i in range(len(self._final))]
            for shared in chain(*self.judge.shared.values()):
                shared.answer.cancel()  # early questions that nothing has asked for
            self.judge.shared.clear()  # else all prompts stay in memory until garbage is collected
        self._check_failures(self.judge, "judge", of=len(self.judge.calls))
        return scores

    async def _read(self, debiasing: Debiasing, scores: Sequence[GroupScore]) -> list[ReadRow]:
        """Let the reference judge score its groups."""
        method, reference_judge = self.scoring.method, debiasing.reference_judge
        try:
            async with self._within(asyncio.timeout_at(self._deadline), reference_judge, "reference judge") as tasks:
                reading = [
                    tasks.create_task(debiasing.read(method, self._final[i], self.buffers[i], scores[i]))
                    for i in debiasing.chosen(history.count_groups(self.scoring.store), len(scores))
                    if i in self._new
                ]
            self._check_failures(reference_judge, "reference judge", of=len(reference_judge.calls))
        finally:
            self.judge.calls += reference_judge.drain()  # of one step, so they are recorded together
        return [row for task in reading for row in task.result()]

    @asynccontextmanager
    async def _within(self, limit: asyncio.Timeout, judge: Judge, name: str) -> AsyncIterator[asyncio.TaskGroup]:
        """Give tasks that have to end within a limit."""
        try:
            async with limit, asyncio.TaskGroup() as tasks:
                yield tasks
        except TimeoutError:
            outcomes = Counter(call.outcome for call in judge.calls)
            failed = sum(call.failed for call in judge.calls)
            raise JudgeError(
                f"the {name} ({judge.client.name}) did not finish a step within"
                f" judge_step_timeout={self.scoring.step_timeout:g} s: {outcomes['parsed']} judgments were answered,"
                f" {failed} failed. {RESUME}"
            ) from None
        except BaseExceptionGroup as errors:
            raise first_leaf(errors) from errors  # a user's error is no group of errors

    def _start_clock(self, limit: asyncio.Timeout) -> None:
        if self.scoring.step_timeout is not None and limit.when() is None:  # unless the clock runs
            self._deadline = asyncio.get_running_loop().time() + self.scoring.step_timeout
            limit.reschedule(self._deadline)

    @staticmethod
    async def _stop_clock(limit: asyncio.Timeout, scoring: Mapping[int, asyncio.Task[GroupScore]]) -> None:
        # When all groups are scored: the trainer may come much later, from its log-probabilities.
        while running := [task for task in scoring.values() if not task.done()]:
            await asyncio.wait(running)
        if not limit.expired():
            limit.reschedule(None)

    def _take(self, row: int, text: str) -> None:
        i, rollout_id = divmod(row, len(self.groups[0].rollouts))
        if rollout_id in self._missing[i]:
            self._missing[i].remove(rollout_id)
            rollouts = list(self.groups[i].rollouts)
            rollouts[rollout_id] = Rollout(rollout_id, text)
            self.groups[i] = replace(self.groups[i], rollouts=tuple(rollouts))
            self._touched.add(i)

    async def _ask(self, tasks: asyncio.TaskGroup, scoring: dict[int, asyncio.Task[GroupScore]]) -> None:
        # Score the groups that are whole by now. Ask what is certain to be asked about new rollouts of the others.
        method = self.scoring.method
        for i in sorted(self._touched):
            group = self.groups[i]
            if not self._missing[i]:
                scoring[i] = tasks.create_task(method.score(group, self.buffers[i], self.judge))
                continue
            arrived = {rollout.id for rollout in group.rollouts} - self._missing[i]
            questions = await early_questions(method, group, arrived, self.buffers[i])
            early = without(questions, self._early[i])
            self._early[i] += early
            for question in early:
                self.judge.put(question, tasks.create_task)
        self._touched.clear()

    def _watch(self, call: Call) -> None:
        """Stop if the failures are too many even where all questions to come succeed."""
        # With other texts than those that arrived, it is not known how many questions are to come.
        if call.failed and not self._other_texts:
            calls, pairs = self.scoring.method.calls, zip(self.groups, self.buffers, strict=True)
            most = sum(calls(group, buffer is None)[1] for group, buffer in pairs)
            self._check_failures(self.judge, "judge", of=most)

    def _check_failures(self, judge: Judge, name: str, of: int) -> None:
        failed, allowed = [call for call in judge.calls if call.failed], self.scoring.max_failures
        if not failed or len(failed) / of <= allowed:
            return
        outcomes = Counter(call.outcome for call in failed)
        counts = ", ".join(f"{count} {outcome}" for outcome, count in sorted(outcomes.items()))
        raise JudgeError(
            f"the {name} ({judge.client.name}) failed {len(failed)} of {len(judge.calls)} judgments in one step"
            f" ({counts}), more than judge_max_failures={allowed:g} allows. {explain(failed[-1])} {RESUME}",
            passing=failed[-1].passing,
        )
