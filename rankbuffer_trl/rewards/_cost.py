"""Find out how many questions a visit costs by running `score` with a judge that answers at random."""

import json
from dataclasses import replace
from random import Random
from typing import Any, NamedTuple

from ..buffer import AnchorBuffer
from ..errors import SettingsError
from ..groups import Query, Rollout, RolloutGroup, Rubric
from ..judge import Judge, Reply, Usage, Verdict, VerdictError
from ..judge._probabilities import without_doubt
from ._prefetch import Scores, run_apart

SIMULATED_VISITS = 8  # with random answers, which show what a group can cost
MAX_TRIES = 200  # random answers to one question, of which the verdict's check has to take one


class RandomClient:
    """A chat client that gives a random valid answer to any question."""

    name = "random"

    def __init__(self, seed: int):
        self.random = Random(seed)
        self.most_shown = 0

    async def complete(self, messages: Any, *, question: Any, seed: int, tally: Any) -> Reply:
        tally.attempts += 1
        self.most_shown = max(self.most_shown, sum(map(len, question.responses.values())))
        text = json.dumps(random_answer(question.verdict, self.random))
        return Reply(text, Usage(), False, without_doubt(text))

    async def close(self) -> None:
        """There is nothing to close."""


def random_answer(verdict: Verdict, random: Random) -> dict[str, Any]:
    """Return a random answer that `verdict` takes, made from the JSON schema of its keys."""
    for _ in range(MAX_TRIES):
        answer = {key: random_value(schema, random) for key, schema in verdict.properties.items()}
        try:
            verdict.check(*answer.values())
        except VerdictError:  # a schema cannot say all, for example that an order has no id twice
            continue
        return answer
    raise SettingsError(
        f"no valid answer to a question with the keys {', '.join(verdict.properties)} was found by trying: write the"
        " method's own `calls` and `most_shown`, or give each key an `enum` in the verdict's `properties`"
    )


def random_value(schema: dict[str, Any], random: Random) -> Any:
    """Return a random value of a JSON schema: one of an `enum`, a number, or a list."""
    if "enum" in schema:
        return random.choice(schema["enum"])
    if schema.get("type") == "array":
        items = schema["items"]
        n = random.randint(schema.get("minItems", 0), schema.get("maxItems", 9))
        # An order must name each item once; a list of scores need not.
        values = random.sample(items["enum"], n) if n <= len(items.get("enum", ())) and random.random() < 0.5 else None
        return values or sorted(random_value(items, random) for _ in range(n))
    if schema.get("type") == "boolean":
        return random.random() < 0.5
    return random.randint(int(schema.get("minimum", 0)), int(schema.get("maximum", 10)))


class VisitCost(NamedTuple):
    """What one visit of a made-up query asked."""

    calls: int
    most_shown: int


_SIMULATED: dict[tuple[Any, ...], tuple[list[VisitCost], list[VisitCost]]] = {}


def simulated_costs(method: Any, G: int, n: int, rubrics: int = 1) -> tuple[list[VisitCost], list[VisitCost]]:
    """Return what the first and the later visits of made-up queries ask.

    Args:
        n (`int`):
            Number of the `G` rollouts that have an answer.
    """
    key = (repr(method), G, n, rubrics)  # simulated once: a plan asks the same of every query
    if key not in _SIMULATED:
        criteria = tuple(Rubric(f"Criterion {i}.", weight=1) for i in range(rubrics))
        references = tuple(f"Reference {i}." for i in range(method.responses_needed))
        query = Query("?", [{"role": "user", "content": "?"}], criteria, references)
        whole = RolloutGroup(query, tuple(Rollout(i, f"Response {i}.") for i in range(G)), step=0, epoch=0)
        some = replace(whole, rollouts=tuple(r if r.id < n else Rollout(r.id, "") for r in whole.rollouts))
        visits = run_apart(_simulate(method, whole, some))
        _SIMULATED[key] = [first for first, _ in visits], [later for _, later in visits]
    return _SIMULATED[key]


async def _simulate(method: Scores, whole: RolloutGroup, some: RolloutGroup) -> list[tuple[VisitCost, VisitCost]]:
    """Score `some` as the first visit of its query, and as the visit after that of `whole`."""

    async def visit(
        group: RolloutGroup, buffer: AnchorBuffer | None, seed: int
    ) -> tuple[VisitCost, AnchorBuffer | None]:
        client = RandomClient(seed)
        judge = Judge(client)
        score = await method.score(group, buffer, judge)
        return VisitCost(len(judge.calls), client.most_shown), score.after

    visits = []
    for seed in range(SIMULATED_VISITS):
        # What a method shuffles by query and step differs from one simulation to the next.
        query = replace(whole.query, id=f"? {seed}")
        here, there = (replace(group, query=query, step=2 * seed) for group in (some, whole))
        first, _ = await visit(here, None, seed)
        _, buffer = await visit(there, None, seed)  # of the whole group, so that a bootstrap makes a buffer
        later, _ = await visit(replace(here, step=2 * seed + 1, epoch=1), buffer, seed)
        visits.append((first, later))
    return visits
