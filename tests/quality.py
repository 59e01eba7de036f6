"""A judge that knows the truth, for tests of reward methods, and one that fails now and then.

A text is `quality.name`, such as `7.r2`: the judge reads the quality, and a test tells responses apart by the name.
"""

import asyncio
import json
import random
import re
from types import SimpleNamespace

from conftest import scripted_judge
from hypothesis import strategies as st

from rankbuffer_trl.groups import Query, Rollout, RolloutGroup, Rubric
from rankbuffer_trl.judge import TransportError

RUBRICS = {"Is high.": lambda q: min(q, 10), "Is low.": lambda q: max(10 - q, 0), "Is even.": lambda q: 10 - q % 2}
QUERY = Query(
    "q",
    [{"role": "user", "content": "?"}],
    tuple(Rubric(text, weight) for text, weight in zip(RUBRICS, (4, 2, 1), strict=True)),
    tuple(f"{quality}.ref" for quality in (1, 2, 4, 5, 7, 8, 10)),
)
QUALITIES = st.lists(st.none() | st.integers(0, 10), min_size=1, max_size=9)  # `None` is a rollout without an answer
CASES = st.tuples(st.integers(0, 999), st.sampled_from([0, 0.2, 0.5, 0.9]))  # which judgments fail, and how many
SHOWN = re.compile(r"^\d+\.\w+$", re.MULTILINE)
RIGHT = (0, 0)
EIGHT = (5, 0, 9, 2, 10, 3, 8, 6)


def make(qualities, query: Query = QUERY, step: int = 0) -> RolloutGroup:
    rollouts = (Rollout(i, "" if q is None else f"{q}.r{i}") for i, q in enumerate(qualities))
    return RolloutGroup(query, tuple(rollouts), step, epoch=0)


def quality(text: str) -> int:
    return int(text.partition(".")[0])


def truth(prompt: str) -> str:
    """The right answer to any question. Where no tie is allowed, the first of equals is the better one."""
    body, _, instruction = prompt.rpartition("\n\nReturn ")
    kind = re.search(r'"(\w+)":', instruction)[1]
    blocks = {name: quality(text) for name, text in re.findall(r"^\[(\w+)\]\n(\d+\.\w+)$", body, re.MULTILINE)}
    if kind == "position":
        candidate = quality(SHOWN.findall(body)[-1])
        return json.dumps({kind: sum(anchor < candidate for anchor in blocks.values())})
    if kind == "order":
        return json.dumps({kind: [int(name[1:]) for name in sorted(blocks, key=blocks.get)]})
    if kind == "score":
        return json.dumps({kind: RUBRICS[first_rubric(prompt)](quality(SHOWN.findall(body)[-1]))})
    if kind == "scores":
        return json.dumps({kind: [blocks["A"], blocks["B"]]})
    if kind == "winner":
        level = "tie" if '"tie"' in instruction else "A"
        return json.dumps({kind: "AB"[blocks["A"] < blocks["B"]] if blocks["A"] != blocks["B"] else level})
    return json.dumps({"keep_anchor_ids": ["A0", "A1", "A2", "A3"], "add_rollout_ids": []})


def first_rubric(prompt: str) -> str:
    return re.search(r"^1\.\[weight=\d\] (.*)$", prompt, re.MULTILINE)[1]


def fails(case, *about: str) -> bool:
    """Whether a judgment fails in a case; `about` is what it is about."""
    seed, share = case
    return random.Random(f"{seed} {about}").random() < share


def faulty(case, answer=truth):
    """A judge that knows the truth and fails some questions: a pair in either order, a duel in one."""

    def respond(prompt: str):
        shown = SHOWN.findall(prompt)
        about = sorted(shown) if '{"winner"' in prompt else shown
        return TransportError("connection refused") if fails(case, first_rubric(prompt), *about) else answer(prompt)

    return respond


def play(method, group: RolloutGroup, answer=truth) -> SimpleNamespace:
    """A first visit: the score, and the prompts in the order in which they were sent."""
    judge = scripted_judge(lambda messages: answer(messages[0]["content"]))
    score = asyncio.run(method.score(group, None, judge))
    prompts = [messages[0]["content"] for messages in judge.client.seen]
    return SimpleNamespace(score=score, rewards=score.rewards, prompts=prompts, calls=judge.calls)
