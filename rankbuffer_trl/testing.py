"""Tests of a reward method: a judge that knows the truth, groups of known quality, and `check_method`.

A response here is a number, or `number.name` such as `7.r2`. The judge reads the number as the quality of it. A test
tells responses apart by the name.
"""

import asyncio
import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from random import Random
from typing import Any

from .buffer import AnchorBuffer
from .groups import Query, Rollout, RolloutGroup, Rubric
from .judge import Call, Judge, Question, Reply, TransportError, Usage
from .judge._judge import ODD
from .judge._probabilities import without_doubt
from .rewards._method import GroupScore, RewardMethod
from .rewards._prefetch import early_questions, first_questions, without

RUBRICS: dict[str, Callable[[int], int]] = {
    "Is high.": lambda q: min(q, 10),
    "Is low.": lambda q: max(10 - q, 0),
    "Is even.": lambda q: 10 - q % 2,
}
"""The rubrics of `QUERY`, each with the score from 0 to 10 that the truthful judge gives to a quality."""
RESPONSE_LINES = re.compile(r"^\d+(?:\.\w+)?$", re.MULTILINE)  # the responses in a prompt
QUERY = Query(
    "q",
    [{"role": "user", "content": "?"}],
    tuple(Rubric(text, weight) for text, weight in zip(RUBRICS, (4, 2, 1), strict=True)),
    tuple(f"{quality}.ref" for quality in (1, 2, 4, 5, 7, 8, 10)),
)
"""A query with three rubrics and seven reference responses."""


def quality(text: str) -> int:
    """Return the quality of a response."""
    return int(text.partition(".")[0])


def make(qualities: Sequence[int | None], query: Query = QUERY, step: int = 0) -> RolloutGroup:
    """Return a group with these qualities. `None` is a rollout without an answer."""
    rollouts = (Rollout(i, "" if q is None else f"{q}.r{i}") for i, q in enumerate(qualities))
    return RolloutGroup(query, tuple(rollouts), step, epoch=0)


def unguarded(prompt: str) -> str:
    """Return a prompt without the marks that the guard puts before each line of a response."""
    return re.sub("^> ", "", prompt, flags=re.MULTILINE)


def first_rubric(prompt: str) -> str:
    """Return the text of the first rubric in a prompt."""
    match = re.search(r"^1\.\[weight=-?\d\] (.*)$", prompt, re.MULTILINE)
    return match[1] if match else ""


def truth(prompt: str) -> str:
    """Return the right answer to any question of this package, without the marks of the guard or with them."""
    body, _, instruction = unguarded(prompt).rpartition("\n\nReturn ")
    kind = re.findall(r'"(\w+)":', instruction)[0]
    blocks = {name: quality(text) for name, text in re.findall(r"^\[(\w+)\]\n(\d+(?:\.\w+)?)$", body, re.MULTILINE)}
    if kind == "position":
        candidate = quality(RESPONSE_LINES.findall(body)[-1])
        return json.dumps({kind: sum(anchor < candidate for anchor in blocks.values())})
    if kind == "order":
        return json.dumps({kind: [int(name[1:]) for name in sorted(blocks, key=blocks.__getitem__)]})
    if kind == "score":
        most = int(re.findall(r"through (\d+)", instruction)[0])
        return json.dumps({kind: min(most, RUBRICS[first_rubric(prompt)](quality(RESPONSE_LINES.findall(body)[-1])))})
    if kind == "scores":
        return json.dumps({kind: [min(number, 10) for number in blocks.values()]})
    if kind == "winner":
        level = "tie" if '"tie"' in instruction else "A"  # without a tie, the first of two equal ones is better
        first, second = (blocks.get(name, -1) for name in "AB")  # an empty response is worse than any other
        return json.dumps({kind: "AB"[first < second] if first != second else level})
    return json.dumps({"keep_anchor_ids": ["A0", "A1", "A2", "A3"], "add_rollout_ids": []})


class ScriptedClient:
    """A chat client whose answers a test decides: `answer(messages)` gives a text, or an exception to raise.

    The messages that `answer` gets are without the marks of the guard.
    """

    name = "scripted judge"

    def __init__(self, answer: Callable[[list[dict]], Any]):
        self.answer = answer
        self.seen: list[list[dict]] = []
        self.questions: list[Any] = []
        ODD.add(self.name)  # nothing is said of its counts, which are made up

    async def complete(self, messages: Sequence[dict], *, question: Any, seed: int, tally: Any) -> Reply:
        """Answer as the test decides."""
        self.seen.append(list(messages))
        self.questions.append(question)
        tally.server, tally.attempts = self.name, tally.attempts + 1
        await asyncio.sleep(0)
        answer = self.answer([{**m, "content": unguarded(m["content"])} for m in messages])
        if isinstance(answer, Exception):
            raise answer
        # A text alone is one without a doubt.
        text, logprobs = answer if isinstance(answer, tuple) else (answer, without_doubt(answer))
        return Reply(text, Usage(10, 4, 3), False, logprobs)

    async def close(self) -> None:
        """There is nothing to close."""


def scripted_judge(answer: Callable[[list[dict]], Any], **kwargs: Any) -> Judge:
    """Return a judge that answers as a test decides."""
    # The paper's prompts, in which no response is quoted.
    return Judge(ScriptedClient(answer), **({"guard": False} | kwargs))


def truthful_judge() -> Judge:
    """Return a judge that answers every question of this package truthfully."""
    return scripted_judge(lambda messages: truth(messages[0]["content"]))


@dataclass(frozen=True)
class Played:
    """A group that was scored, with what the judge was asked."""

    group: RolloutGroup
    score: GroupScore
    calls: list[Call]
    prompts: list[str]  # in the order in which they were sent, repeats too, without the marks of the guard
    questions: list[Question]  # of each prompt

    @property
    def rewards(self) -> tuple[float | None, ...]:
        """The rewards."""
        return self.score.rewards


def play(
    method: RewardMethod, group: RolloutGroup, answer: Callable[[str], Any] = truth, buffer: AnchorBuffer | None = None
) -> Played:
    """Score a group with a judge that answers each prompt as `answer` does; an exception ends the question."""
    client = ScriptedClient(lambda messages: answer(messages[0]["content"]))
    judge = Judge(client, guard=False)
    score = asyncio.run(method.score(group, buffer, judge))
    prompts = [unguarded(messages[0]["content"]) for messages in client.seen]
    return Played(group, score, judge.calls, prompts, client.questions)


def fails(case: tuple[int, float], *about: str) -> bool:
    """Tell whether a judgment about some texts fails in a case: a seed, and the share of judgments that fail."""
    seed, share = case
    return Random(f"{seed} {about}").random() < share


def faulty(case: tuple[int, float], answer: Callable[[str], Any] = truth) -> Callable[[str], Any]:
    """Return the answers of a judge that fails on some questions of a case, see [`fails`]."""

    def respond(prompt: str) -> Any:
        shown = RESPONSE_LINES.findall(prompt)
        about = sorted(shown) if '{"winner"' in prompt else shown  # a pair fails in both orders, a duel in one
        return TransportError("connection refused") if fails(case, first_rubric(prompt), *about) else answer(prompt)

    return respond


def check_played(played: Played) -> None:
    """Check what holds for every score beside its range: empty rollouts last, and the order that of the rewards."""
    group, rewards, order = played.group, played.rewards, played.score.order
    assert len(rewards) == len(group.rollouts), f"{len(rewards)} rewards for {len(group.rollouts)} rollouts"
    assert all(rewards[each.id] == -1 for each in group.empty), f"an empty rollout has a reward above -1: {rewards}"
    levels = [rewards[i] or 0.0 for tier in order for i in tier]
    assert levels == sorted(levels), f"the order {order} is not that of the rewards {rewards}"
    assert all(len({rewards[i] for i in tier}) == 1 for tier in order), f"a tier of {order} has several rewards"
    scored = [each.id for each in group.answered if rewards[each.id] is not None]
    assert sorted(i for tier in order for i in tier) == scored, f"the order {order} is not of the scored {scored}"


def check_questions(played: Played, method: RewardMethod, plays_empty: bool = False) -> None:
    """Check that only answers are shown, and that `calls`, `most_shown` and the first questions hold.

    `plays_empty` allows questions about rollouts without an answer.
    """
    group, first = played.group, played.score.before is None
    asked = [text for question in played.questions for pairs in question.responses.values() for _, text in pairs]
    assert plays_empty or "" not in asked, "a rollout without an answer was shown"
    least, most = method.calls(group, first)
    assert least <= len(played.calls) <= most, f"{len(played.calls)} questions; `calls` says {least} to {most}"
    shown = max((sum(map(len, question.responses.values())) for question in played.questions), default=0)
    most_shown = method.most_shown(len(group.rollouts))
    assert shown <= most_shown, f"a prompt shows {shown} responses; `most_shown` says {most_shown}"


def check_method(
    method: RewardMethod,
    answer: Callable[[str], Any] = truth,
    groups: int = 40,
    ordered: bool = True,
    plays_empty: bool = False,
) -> None:
    """Check that a method keeps the rules of [`RewardMethod`], on random groups with a truthful and a failing judge.

    Args:
        answer (`Callable[[str], str]`, *optional*, defaults to `truth`):
            Returns the judge's answer to a prompt. `truth` knows the questions of this package.
        groups (`int`, *optional*, defaults to `40`):
            Number of groups.
        ordered (`bool`, *optional*, defaults to `True`):
            Whether a better rollout never has a lower reward, if the judge is right.
        plays_empty (`bool`, *optional*, defaults to `False`):
            Whether the method asks about rollouts without an answer.

    Raises:
        `AssertionError`: it says which rule is broken, and in which group.

    Example:

    ```python
    from rankbuffer_trl import RankBuffer
    from rankbuffer_trl.testing import check_method

    check_method(RankBuffer())
    ```
    """
    luck = Random(0)
    query = replace(QUERY, rubrics=QUERY.rubrics[:1])
    for number in range(groups):
        qualities = [luck.choice([None, *range(11)]) for _ in range(luck.randint(1, 9))]
        group = make(qualities, query, step=number)
        try:
            check_group(method, group, answer, ordered, plays_empty)
            for share in (0.3, 0.8, 1.0):
                played = play(method, group, faulty((number, share), answer))
                check_played(played)
                if share == 1 and played.calls:
                    unscored = all(played.rewards[each.id] is None for each in group.answered)
                    assert unscored, f"every judgment failed, and there are rewards: {played.rewards}"
        except AssertionError as error:
            raise AssertionError(f"{method}, group {number} with the qualities {qualities}: {error}") from error


def check_group(
    method: RewardMethod, group: RolloutGroup, answer: Callable[[str], Any], ordered: bool, plays_empty: bool
) -> None:
    """Check two visits of a group with a judge that never fails. The arguments are those of [`check_method`]."""
    buffer = None
    for epoch in range(2):
        group = replace(group, epoch=epoch)
        played = play(method, group, answer, buffer)
        check_played(played)
        check_questions(played, method, plays_empty)
        assert None not in played.rewards, f"no judgment failed, and a reward is missing: {played.rewards}"
        again = play(method, group, answer, buffer)
        assert again.score == played.score, "the same group and answers give another score: draw from `seed` and group"
        for rollout in group.answered:
            partial = tuple(each if each is rollout else Rollout(each.id, "0.pending") for each in group.rollouts)
            early = asyncio.run(early_questions(method, replace(group, rollouts=partial), {rollout.id}, buffer))
            assert not without(early, played.questions), f"a question about rollout {rollout.id} alone is not asked"
        if buffer is None:
            first = first_questions(method, group)
            assert played.questions[: len(first)] == first, "the first questions depend on the answers"
            assert first or not played.calls, "`score` waits for something else before it asks"
        rewards = [(quality(each.text), played.rewards[each.id] or 0.0) for each in group.answered]
        for q, reward in rewards if ordered else ():
            lower = [other for p, other in rewards if p > q and other < reward]
            assert not lower, f"a better rollout has a lower reward (pass ordered=False if luck decides): {rewards}"
        buffer = played.score.after
