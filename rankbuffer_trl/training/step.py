"""One generation step on the judge's event loop: ask about rollouts as they arrive, and score complete groups.

What is asked early never decides a reward. A group is scored once all its rollouts are known, from all of them. An
early question only has its answer ready when the method asks it.
"""

import asyncio
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from ..buffer import AnchorBuffer
from ..groups import Rollout, RolloutGroup
from ..judge import Call, Judge, JudgeError, Question, Usage
from ..judge.errors import first_leaf
from ..judge.judge import Askable, explain
from ..rewards.method import GroupScore, RewardMethod
from ..rewards.prefetch import early_questions, without

RESUME = "Nothing of this step was kept; resume from the last checkpoint once the judge answers."
PENDING = "(not known yet)"  # the text of a rollout that has not arrived; a method's `calls` counts it as an answer


class Shared:
    """A question of a step with its answer to come, for all who ask it."""

    def __init__(self, question: Askable, answer: "asyncio.Task[tuple[Any | None, Call]]"):
        self.question = question
        self.answer = answer
        answer.add_done_callback(lambda answer: answer.cancelled() or answer.exception())  # all may have left
        self.waiting = 0  # how many wait for the answer


class EarlyJudge(Judge):
    """The judge of one step. It is asked an equal question once, early or not, and all who ask it share the answer."""

    def __init__(
        self,
        judge: Judge,
        method: str,
        on_call: Callable[[Call], None],
        on_spent: Callable[[Usage], None] | None = None,
    ):
        super().__init__(judge.client, judge.max_attempts, judge.guard, method or judge.method, on_call, on_spent)
        self._asked: defaultdict[tuple[str, str, str], list[Shared]] = defaultdict(list)

    def _shared(self, question: Askable) -> list[Shared]:
        """Return what was asked that may be equal: also with the same responses."""
        return self._asked[question.kind, question.query_id, repr(getattr(question, "responses", None))]

    def ask_early(self, question: Askable, tasks: asyncio.TaskGroup) -> None:
        """Put `question` now, in `tasks`, unless it was put, and keep its answer for all equal questions to come."""
        asked = self._shared(question)
        if all(each.question != question for each in asked):
            asked.append(Shared(question, tasks.create_task(super().ask_with_cost(question))))

    async def ask_with_cost(self, question: Askable) -> tuple[Any | None, Call]:
        """Answer as [`Judge.ask_with_cost`] does, with the answer of an equal question if there is one."""
        asked = self._shared(question)
        shared = next((each for each in asked if each.question == question), None)
        if shared is None:
            shared = Shared(question, asyncio.ensure_future(super().ask_with_cost(question)))
            asked.append(shared)
        shared.waiting += 1
        try:
            await asyncio.wait([shared.answer])  # the end of one who waits does not end the question of the others
        finally:
            shared.waiting -= 1
            if not shared.waiting and not shared.answer.done():
                asked.remove(shared)
                shared.answer.cancel()
                await asyncio.wait([shared.answer])  # until it stands in the ledger
        return shared.answer.result()

    def drop_early(self) -> None:
        """Cancel the early questions that nothing has asked for."""
        for asked in self._asked.values():
            for shared in asked:
                shared.answer.cancel()
        self._asked.clear()


class OpenStep:
    """The judging of one generation step, from the announcement of its queries to its scores.

    All methods but the constructor run on the judge's event loop.

    Args:
        method (`RewardMethod`):
            The method that scores. What it is certain to ask is asked when a rollout arrives.
        judge (`Judge`):
            The judge that the method asks.
        groups (`Sequence[RolloutGroup]`):
            The groups with their epochs. Rollouts that are not known yet have the text [`PENDING`].
        buffers (`Sequence[AnchorBuffer | None]`):
            The buffer of each group, as it was before the step.
        number (`int`):
            The trainer's global step, for the ledger.
        phase (`str`):
            `train` or `eval`, for the ledger.
        max_failures, timeout (`float`):
            As `max_failures` and `step_timeout` of [`GroupScorer`].
        on_spent (`Callable[[Usage], None]`, *optional*):
            As that of [`Judge`].
    """

    def __init__(
        self,
        method: RewardMethod,
        judge: Judge,
        groups: Sequence[RolloutGroup],
        buffers: Sequence[AnchorBuffer | None],
        number: int,
        phase: str,
        max_failures: float,
        timeout: float | None,
        on_spent: Callable[[Usage], None] | None = None,
    ):
        self.method = method
        self.judge = EarlyJudge(judge, method.name, self._watch, on_spent)
        self.groups = list(groups)
        self.buffers = buffers
        self.number = number
        self.phase = phase
        self.max_failures = max_failures
        self.timeout = timeout
        self.hidden = 0  # judgments that had ended when `finish` was called
        self.ends: float | None = None  # when its time is over, on the clock of the loop; a reader has what is left
        self._early: list[list[Question]] = [[] for _ in groups]  # questions of the method that were asked early
        self._new: set[int] = set()  # groups with rollouts that arrived and led to no question yet
        self._missing = [{rollout.id for rollout in group.rollouts} for group in groups]
        # Rows, which count through the groups, with their texts. `None` ends them.
        self.arrivals: asyncio.Queue[tuple[int, str] | None] = asyncio.Queue()
        self._final: Sequence[RolloutGroup] = ()
        self._other_texts = False  # whether rollouts arrived with other texts than they have in the end
        self._task: asyncio.Task[list[GroupScore]]

    def fits(self, groups: Sequence[RolloutGroup], number: int, phase: str) -> bool:
        """Return whether `groups` are the groups that were announced, whatever the texts of their rollouts."""
        found, announced = ([(each.query, len(each.rollouts)) for each in step] for step in (groups, self.groups))
        return (number, phase, found) == (self.number, self.phase, announced) and all(
            group.epoch in (None, mine.epoch) for group, mine in zip(groups, self.groups, strict=True)
        )

    async def start(self) -> None:
        """Begin to take rollouts. All other methods come after it."""
        self._task = asyncio.create_task(self._score_all())

    async def finish(self, groups: Sequence[RolloutGroup]) -> list[GroupScore]:
        """Return the scores of `groups`, which hold all rollouts.

        Raises:
            [`JudgeError`]: if the judge fails too often, or takes too long.
        """
        self.hidden = len(self.judge.calls)
        self._final = groups
        self.arrivals.put_nowait(None)
        return await self._task

    async def cancel(self) -> None:
        """Cancel what is in flight and wait until it has ended."""
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)

    async def _score_all(self) -> list[GroupScore]:
        """Score each group on its own."""
        # Its fine ranking waits for its insertions alone.
        scoring: dict[int, asyncio.Task[GroupScore]] = {}
        try:
            async with asyncio.timeout(None) as limit, asyncio.TaskGroup() as tasks:
                while arrival := await self.arrivals.get():
                    self._take(*arrival)
                    # The next one may make its group whole, and a whole group needs no early question.
                    if self.arrivals.empty():
                        await self._ask(tasks, scoring)
                    if not any(self._missing) and limit.when() is None:  # generation does not count
                        self._time(limit)
                        tasks.create_task(self._stop_clock(limit, scoring))
                self._time(limit)
                for i, group in enumerate(self._final):
                    self._other_texts |= any(
                        rollout not in group.rollouts
                        for rollout in self.groups[i].rollouts
                        if rollout.id not in self._missing[i]
                    )
                    if i in scoring and group.rollouts != self.groups[i].rollouts:
                        scoring.pop(i).cancel()  # what was asked about other texts decides nothing
                    self.groups[i] = group
                    if i not in scoring:
                        scoring[i] = self._start(i, tasks)
                scores = [await scoring[i] for i in range(len(self._final))]
                self.judge.drop_early()
        except TimeoutError:
            outcomes = Counter(call.outcome for call in self.judge.calls)
            failed = sum(call.failed for call in self.judge.calls)
            raise JudgeError(
                f"the judge ({self.judge.client.name}) did not finish a step within"
                f" judge_step_timeout={self.timeout:g} s: {outcomes['parsed']} judgments were answered, {failed}"
                f" failed. {RESUME}"
            ) from None
        except BaseExceptionGroup as errors:
            raise first_leaf(errors) from errors
        self._check_failures(of=len(self.judge.calls))
        return scores

    def _time(self, limit: asyncio.Timeout) -> None:
        """Start the clock, unless it runs."""
        if self.timeout is not None and limit.when() is None:
            self.ends = asyncio.get_running_loop().time() + self.timeout
            limit.reschedule(self.ends)

    @staticmethod
    async def _stop_clock(limit: asyncio.Timeout, scoring: Mapping[int, asyncio.Task[GroupScore]]) -> None:
        """Stop the clock when all groups are scored. The trainer may come much later, from its log-probabilities."""
        while left := [task for task in scoring.values() if not task.done()]:
            await asyncio.wait(left)
        if not limit.expired():
            limit.reschedule(None)

    def _take(self, row: int, text: str) -> None:
        """Put a rollout into its group."""
        i, place = divmod(row, len(self.groups[0].rollouts))
        if place in self._missing[i]:
            self._missing[i].remove(place)
            rollouts = list(self.groups[i].rollouts)
            rollouts[place] = Rollout(place, text)
            self.groups[i] = replace(self.groups[i], rollouts=tuple(rollouts))
            self._new.add(i)

    async def _ask(self, tasks: asyncio.TaskGroup, scoring: dict[int, asyncio.Task[GroupScore]]) -> None:
        """Score the groups that are whole by now. Ask what is certain to be asked about new rollouts of the others."""
        for i in self._new:
            group = self.groups[i]
            if not self._missing[i]:
                scoring[i] = self._start(i, tasks)
                continue
            here = {rollout.id for rollout in group.rollouts} - self._missing[i]
            early = without(await early_questions(self.method, group, here, self.buffers[i]), self._early[i])
            self._early[i] += early
            for question in early:
                self.judge.ask_early(question, tasks)
        self._new.clear()

    def _start(self, i: int, tasks: asyncio.TaskGroup) -> asyncio.Task[GroupScore]:
        return tasks.create_task(self.method.score(self.groups[i], self.buffers[i], self.judge))

    def _watch(self, call: Call) -> None:
        """Stop if the failures are too many even where all questions to come succeed."""
        # With other texts than those that arrived, it is not known how many questions are to come.
        if call.failed and not self._other_texts:
            pairs = zip(self.groups, self.buffers, strict=True)
            self._check_failures(of=sum(self.method.calls(group, buffer is None)[1] for group, buffer in pairs))

    def _check_failures(self, of: int) -> None:
        calls = self.judge.calls
        failed = [call for call in calls if call.failed]
        if not failed or len(failed) / of <= self.max_failures:
            return
        outcomes = Counter(call.outcome for call in failed)
        counts = ", ".join(f"{count} {outcome}" for outcome, count in sorted(outcomes.items()))
        raise JudgeError(
            f"the judge ({self.judge.client.name}) failed {len(failed)} of {len(calls)} judgments in one step"
            f" ({counts}), more than judge_max_failures={self.max_failures:g} allows. {explain(failed[-1])} {RESUME}",
            passing=failed[-1].passing,
        )
