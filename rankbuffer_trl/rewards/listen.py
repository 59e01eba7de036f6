"""What a method asks, told by its `score`, which runs with a judge that never answers or with one that says anything.

Whatever is derived here is no part of a reward. `score` must therefore do nothing before its first question that it
would not do twice, and must not wait for anything but the judge.
"""

import asyncio
import json
from collections.abc import Coroutine, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from random import Random
from typing import Any, NamedTuple, NoReturn, Protocol, TypeVar

from ..buffer import AnchorBuffer
from ..errors import SettingsError
from ..groups import Query, Rollout, RolloutGroup, Rubric
from ..judge import Judge, Question, Reply, Usage, Verdict, VerdictError
from ..judge.judge import Askable
from ..judge.probabilities import without_doubt

T = TypeVar("T")

QUIET = 3  # turns of the event loop without a new question, after which all first questions are known
PLAYS = 8  # groups with random answers that show what a group can cost
TRIES = 200  # random answers to one question, of which the verdict's check has to take one


class Scores(Protocol):
    """The part of a reward method that tells the rest."""

    async def score(self, group: RolloutGroup, buffer: AnchorBuffer | None, judge: Judge) -> Any:
        """See [`RewardMethod`]."""


class SilentJudge(Judge):
    """A judge that hears questions and never answers."""

    def __init__(self) -> None:
        self.heard: list[Any] = []

    async def ask_with_cost(self, question: Askable) -> NoReturn:
        """Hear a question."""
        await self.ask_all([question])

    async def ask_all(self, questions: Iterable[Askable]) -> NoReturn:
        """Hear questions."""
        self.heard += questions
        await asyncio.Event().wait()
        raise AssertionError("nobody sets this event")


async def hear(method: Scores, group: RolloutGroup, buffer: AnchorBuffer | None = None) -> list[Question]:
    """Return the questions that `score` asks before it has an answer. They are the same for all answers of a judge."""
    judge = SilentJudge()
    scoring = asyncio.ensure_future(method.score(group, buffer, judge))
    quiet = 0
    while quiet < QUIET and not scoring.done():
        known = len(judge.heard)
        await asyncio.sleep(0)
        quiet = 0 if len(judge.heard) > known else quiet + 1
    scoring.cancel()
    await asyncio.wait([scoring])
    if not scoring.cancelled():
        scoring.result()
    return judge.heard


async def early_questions(
    method: Scores, group: RolloutGroup, arrived: Iterable[int], buffer: AnchorBuffer | None
) -> list[Question]:
    """Return the questions that `score` asks at once if all other rollouts have an answer, and also if none has one.

    A method that fails about such a group asks nothing early. If it also fails about the real group, that is heard.

    Args:
        method ([`Scores`]):
            The method.
        group (`RolloutGroup`):
            The group. The texts of its other rollouts are not empty, and no text that arrived.
        arrived (`Iterable[int]`):
            The ids of the rollouts to ask about.
        buffer (`AnchorBuffer`, *optional*):
            The query's buffer.
    """
    here = set(arrived)
    alone = tuple(each if each.id in here else Rollout(each.id, "") for each in group.rollouts)
    try:
        known = await hear(method, replace(group, rollouts=alone), buffer)
        certain = await hear(method, group, buffer) if known else []
    except Exception:
        return []
    return without(known, without(known, certain))


def without(questions: Iterable[Question], others: Iterable[Question]) -> list[Question]:
    """Return `questions` without those of `others`. A question that comes twice has to be left out twice."""
    left, rest = list(others), []
    for question in questions:
        if question in left:
            left.remove(question)
        else:
            rest.append(question)
    return rest


def first_questions(method: Scores, group: RolloutGroup) -> list[Question]:
    """Return the questions that the first visit of a query asks at once."""
    return run_apart(hear(method, group))


def run_apart(coroutine: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine in a thread of its own, because the caller may itself be called by a running event loop."""
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(asyncio.run, coroutine).result()


class StandIn:
    """A chat client that gives any valid answer to any question. It shows what a method asks, and nothing else."""

    name = "stand-in"

    def __init__(self, seed: int):
        self.luck = Random(seed)
        self.most_shown = 0

    async def complete(self, messages: Any, *, question: Any, seed: int, tally: Any) -> Reply:
        """Answer a question at random."""
        tally.attempts += 1
        self.most_shown = max(self.most_shown, sum(map(len, question.responses.values())))
        text = json.dumps(any_answer(question.verdict, self.luck))
        return Reply(text, Usage(), False, without_doubt(text))

    async def close(self) -> None:
        """There is nothing to close."""


def any_answer(verdict: Verdict, luck: Random) -> dict[str, Any]:
    """Return a random answer that `verdict` takes, made from the JSON schema of its keys.

    Raises:
        [`SettingsError`]: if none is found.
    """
    for _ in range(TRIES):
        answer = {key: any_value(schema, luck) for key, schema in verdict.properties.items()}
        try:
            verdict.check(*answer.values())
        except VerdictError:
            continue
        return answer
    raise SettingsError(
        f"no valid answer to a question with the keys {', '.join(verdict.properties)} was found by trying: write the"
        " method's own `calls` and `most_shown`, or give each key an `enum` in the verdict's `properties`"
    )


def any_value(schema: dict[str, Any], luck: Random) -> Any:
    """Return a random value of a JSON schema: one of an `enum`, a number, or a list. A list has no item twice."""
    if "enum" in schema:
        return luck.choice(schema["enum"])
    if schema.get("type") == "array":
        items = schema["items"]
        n = luck.randint(schema.get("minItems", 0), schema.get("maxItems", 9))
        values = luck.sample(items["enum"], n) if n <= len(items.get("enum", ())) and luck.random() < 0.5 else None
        return values or sorted(any_value(items, luck) for _ in range(n))
    if schema.get("type") == "boolean":
        return luck.random() < 0.5
    return luck.randint(int(schema.get("minimum", 0)), int(schema.get("maximum", 10)))


class VisitCost(NamedTuple):
    """What one visit of a made-up query asked."""

    calls: int
    most_shown: int


_PLAYED: dict[tuple[Any, ...], tuple[list[VisitCost], list[VisitCost]]] = {}


def played(method: Any, G: int, n: int, rubrics: int = 1) -> tuple[list[VisitCost], list[VisitCost]]:
    """Return what the first and the later visits of made-up queries ask. Played once for the same arguments.

    Args:
        method ([`RewardMethod`]):
            The method.
        G (`int`):
            Size of the group.
        n (`int`):
            Number of its rollouts that have an answer.
        rubrics (`int`, *optional*, defaults to `1`):
            Number of rubrics of the query.
    """
    key = (repr(method), G, n, rubrics)
    if key not in _PLAYED:
        criteria = tuple(Rubric(f"Criterion {i}.", weight=1) for i in range(rubrics))
        references = tuple(f"Reference {i}." for i in range(method.responses_needed))
        query = Query("?", [{"role": "user", "content": "?"}], criteria, references)
        whole = RolloutGroup(query, tuple(Rollout(i, f"Response {i}.") for i in range(G)), step=0, epoch=0)
        some = replace(whole, rollouts=tuple(r if r.id < n else Rollout(r.id, "") for r in whole.rollouts))
        visits = run_apart(_play(method, whole, some))
        _PLAYED[key] = [first for first, _ in visits], [later for _, later in visits]
    return _PLAYED[key]


async def _play(method: Scores, whole: RolloutGroup, some: RolloutGroup) -> list[tuple[VisitCost, VisitCost]]:
    """Score `some` as the first visit of its query, and as the visit after that of `whole`."""

    async def visit(
        group: RolloutGroup, buffer: AnchorBuffer | None, seed: int
    ) -> tuple[VisitCost, AnchorBuffer | None]:
        client = StandIn(seed)
        judge = Judge(client)
        score = await method.score(group, buffer, judge)
        return VisitCost(len(judge.calls), client.most_shown), score.after

    visits = []
    for seed in range(PLAYS):
        # What a method shuffles by query and step differs from play to play.
        query = replace(whole.query, id=f"? {seed}")
        here, there = (replace(group, query=query, step=2 * seed) for group in (some, whole))
        first, _ = await visit(here, None, seed)
        _, buffer = await visit(there, None, seed)
        later, _ = await visit(replace(here, step=2 * seed + 1, epoch=1), buffer, seed)
        visits.append((first, later))
    return visits
