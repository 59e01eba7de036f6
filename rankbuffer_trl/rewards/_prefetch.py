"""Find the questions that can be asked early by running `score` with a judge that never answers.

Nothing here is part of a reward. `score` must therefore do nothing before its first question that it would not do
twice, and must not wait for anything but the judge.
"""

import asyncio
from collections.abc import Coroutine, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any, NoReturn, Protocol, TypeVar

from ..buffer import AnchorBuffer
from ..groups import Rollout, RolloutGroup
from ..judge import Judge, Question
from ..judge._judge import Askable

T = TypeVar("T")

IDLE_TURNS = 3  # of the event loop without a new question, after which all first questions are known


class Scores(Protocol):
    """The part of a reward method that is enough to find its questions."""

    async def score(self, group: RolloutGroup, buffer: AnchorBuffer | None, judge: Judge) -> Any:
        """See [`RewardMethod`]."""


class SilentJudge(Judge):
    """A judge that records questions and never answers."""

    def __init__(self) -> None:
        self.questions: list[Any] = []

    async def ask_with_cost(self, question: Askable) -> NoReturn:
        await self.ask_all([question])

    async def ask_all(self, questions: Iterable[Askable]) -> NoReturn:
        self.questions += questions
        await asyncio.Event().wait()  # for ever: `score` is cancelled here
        raise AssertionError("nobody sets this event")


async def unanswered_questions(
    method: Scores, group: RolloutGroup, buffer: AnchorBuffer | None = None
) -> list[Question]:
    """Return the questions that `score` asks before it has an answer. They are the same for all answers of a judge."""
    judge = SilentJudge()
    scoring = asyncio.ensure_future(method.score(group, buffer, judge))
    idle = 0
    while idle < IDLE_TURNS and not scoring.done():
        before = len(judge.questions)
        await asyncio.sleep(0)
        idle = 0 if len(judge.questions) > before else idle + 1
    scoring.cancel()
    await asyncio.wait([scoring])
    if not scoring.cancelled():
        scoring.result()  # raises the error of a method that failed by itself
    return judge.questions


async def early_questions(
    method: Scores, group: RolloutGroup, arrived: Iterable[int], buffer: AnchorBuffer | None
) -> list[Question]:
    """Return the questions that `score` asks at once if all other rollouts have an answer, and also if none has one.

    Args:
        group (`RolloutGroup`):
            The group. The texts of its other rollouts are not empty, and no text that arrived.
        arrived (`Iterable[int]`):
            The ids of the rollouts to ask about.
    """
    arrived = set(arrived)
    others_empty = tuple(r if r.id in arrived else Rollout(r.id, "") for r in group.rollouts)
    try:
        if_empty = await unanswered_questions(method, replace(group, rollouts=others_empty), buffer)
        if_answered = await unanswered_questions(method, group, buffer) if if_empty else []
    except Exception:  # a method that fails about such a group; if it fails about the real one too, the run says so
        return []
    return without(if_empty, without(if_empty, if_answered))


def without(questions: Iterable[Question], removed: Iterable[Question]) -> list[Question]:
    """Return `questions` without those of `removed`."""
    excluded, rest = list(removed), []
    for question in questions:
        if question in excluded:
            excluded.remove(question)  # one of them: a question that comes twice has to be left out twice
        else:
            rest.append(question)
    return rest


def first_questions(method: Scores, group: RolloutGroup) -> list[Question]:
    """Return the questions that the first visit of a query asks at once."""
    return run_apart(unanswered_questions(method, group))


def run_apart(coroutine: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine in a thread of its own."""
    with ThreadPoolExecutor(1) as thread:  # the caller may itself be called by a running event loop
        return thread.submit(asyncio.run, coroutine).result()
