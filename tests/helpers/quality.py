"""Groups of known quality for tests of reward methods, and a truthful judge that fails now and then."""

import asyncio
import random
from types import SimpleNamespace

from conftest import scripted_judge
from hypothesis import strategies as st

from helpers.truth import RUBRICS, SHOWN, first_rubric, truth, unguarded
from rankbuffer_trl.groups import Query, Rollout, RolloutGroup, Rubric
from rankbuffer_trl.judge import TransportError

QUERY = Query(
    "q",
    [{"role": "user", "content": "?"}],
    tuple(Rubric(text, weight) for text, weight in zip(RUBRICS, (4, 2, 1), strict=True)),
    tuple(f"{quality}.ref" for quality in (1, 2, 4, 5, 7, 8, 10)),
)
QUALITIES = st.lists(st.none() | st.integers(0, 10), min_size=1, max_size=9)  # `None`: a rollout without an answer
CASES = st.tuples(st.integers(0, 999), st.sampled_from([0, 0.2, 0.5, 0.9]))  # seed, share that fails
RIGHT = (0, 0)
EIGHT = (5, 0, 9, 2, 10, 3, 8, 6)


def make(qualities, query: Query = QUERY, step: int = 0) -> RolloutGroup:
    rollouts = (Rollout(i, "" if q is None else f"{q}.r{i}") for i, q in enumerate(qualities))
    return RolloutGroup(query, tuple(rollouts), step, epoch=0)


def fails(case, *about: str) -> bool:
    """Tell whether a judgment about some texts fails in a case."""
    seed, share = case
    return random.Random(f"{seed} {about}").random() < share


def faulty(case, answer=truth):
    """Return a truthful judge that fails on some questions of a case.

    A failing pairwise question fails in both orders of its pair. A failing duel fails in one order.
    """

    def respond(prompt: str):
        shown = SHOWN.findall(prompt)
        about = sorted(shown) if '{"winner"' in prompt else shown
        return TransportError("connection refused") if fails(case, first_rubric(prompt), *about) else answer(prompt)

    return respond


def play(method, group: RolloutGroup, answer=truth) -> SimpleNamespace:
    """Score a group at its first visit. Return the score, the calls, and the prompts in the order they were sent.

    The prompts are without the marks that the guard puts before the lines of responses.
    """
    judge = scripted_judge(lambda messages: answer(messages[0]["content"]))
    score = asyncio.run(method.score(group, None, judge))
    prompts = [unguarded(messages[0]["content"]) for messages in judge.client.seen]
    return SimpleNamespace(score=score, rewards=score.rewards, prompts=prompts, calls=judge.calls)
