"""Judging that starts before all rollouts are known gives what judging after generation gives."""

import asyncio
from collections import Counter
from dataclasses import replace

import pytest
from conftest import ScriptedClient, by_number, group, numbers, scripted_judge, unreachable
from helpers.contents import contents
from helpers.quality import CASES, QUALITIES, QUERY, faulty, make
from helpers.truth import truth
from hypothesis import given, settings
from hypothesis import strategies as st
from test_methods import METHODS

from rankbuffer_trl.groups import RolloutGroup
from rankbuffer_trl.judge import Judge, JudgeError, TransportError
from rankbuffer_trl.rewards.rankbuffer import RankBuffer
from rankbuffer_trl.training.scorer import GroupScorer, StepScore

every_method = pytest.mark.parametrize("method", METHODS, ids=str)
QUERIES = [replace(QUERY, id=name) for name in "abc"]


def announce(scorer: GroupScorer, groups: list[RolloutGroup], step: int, update: bool = True) -> None:
    scorer.begin([group.query for group in groups], len(groups[0].rollouts), step, groups[0].epoch, update)


def rows(groups: list[RolloutGroup]) -> list[tuple[int, str]]:
    """The rollouts of equally large groups as rows of a generation."""
    return list(enumerate(rollout.text for group in groups for rollout in group.rollouts))


def score(scorer: GroupScorer, groups: list[RolloutGroup], arrivals: list[tuple[int, str]], pauses) -> StepScore:
    """Score a step whose rollouts arrive in the order given, with or without time for the judge between them."""
    step = groups[0].step
    announce(scorer, groups, step)
    for row, text in arrivals:
        scorer.arrived(row, text)
        for _ in range(pauses.randrange(4)):
            scorer.run(asyncio.sleep(0))
    return scorer.score(groups, step)


@every_method
def test_arrived_in_any_order_and_any_part_gives_the_same(method, scorer):
    late, early = (scorer(scripted_judge(by_number), method, max_failures=1.0) for _ in range(2))

    @settings(max_examples=8)
    @given(
        qualities=st.lists(QUALITIES.filter(lambda q: len(q) >= 2), min_size=2, max_size=2),
        case=CASES,
        order=st.randoms(use_true_random=False),
        share=st.sampled_from([0.3, 0.8, 1.0, 1.0]),
    )
    def check(qualities, case, order, share):
        for made in (late, early):
            made.store.rewind(0)
            made.judge.client.answer = lambda messages: faulty(case)(messages[0]["content"])
        for step, each in enumerate(qualities):
            texts = [each, each[::-1], each[1:] + each[:1]]
            groups = [replace(make(line, q, step), epoch=step) for line, q in zip(texts, QUERIES, strict=True)]
            expected = late.score(groups, step)
            arrivals = order.sample(rows(groups), k=int(share * 3 * len(each)))
            found = score(early, groups, arrivals, order)
            assert found.scores == expected.scores
            assert Counter(map(spent, found.calls)) == Counter(map(spent, expected.calls))
            assert 0 <= found.hidden <= 1
        assert contents(early.store) == contents(late.store)

    check()


def spent(call):
    return replace(call, seconds=0.0)


@pytest.mark.parametrize("method", [method for method in METHODS if hasattr(method, "early_questions")], ids=str)
@settings(max_examples=20)
@given(qualities=st.lists(QUALITIES, min_size=2, max_size=2))
def test_early_questions_are_asked_by_the_method_itself(method, qualities):
    buffer = None
    for step, each in enumerate(qualities):
        whole = replace(make(each, step=step), epoch=step)
        early = [
            question.prompt()
            for rollout in whole.rollouts
            for question in method.early_questions(replace(whole, rollouts=(rollout,)), buffer)
        ]
        judge = scripted_judge(lambda messages: truth(messages[0]["content"]))
        buffer = asyncio.run(method.score(whole, buffer, judge)).after
        asked = Counter(messages[0]["content"] for messages in judge.client.seen)
        assert Counter(early) <= asked


def test_early_questions_are_asked_by_methods_that_ask_about_each_rollout_alone():
    """Those that ask about each rollout alone. A buffer that is bootstrapped begins with the whole group."""
    alone = {"Pointwise", "GDPO", "RRCAGR", "RankBuffer", "RankBufferLooks", "LLMBuffer"}
    for method in METHODS:
        asks = bool(getattr(method, "early_questions", lambda *_: [])(make([5]), None))
        assert asks == (type(method).__name__ in alone and not getattr(method, "bootstrap", False)), method


# What happens before the last rollout, and what does not


class Gate(ScriptedClient):
    """A judge that answers when it is let, and tells the test what it was asked."""

    def __init__(self):
        super().__init__(by_number)
        self.open = asyncio.Event()

    async def complete(self, messages, **kwargs):
        answer = await super().complete(messages, **kwargs)
        await self.open.wait()
        return answer

    async def let(self) -> None:
        self.open.set()

    @property
    def asked(self) -> list[str]:
        return [messages[0]["content"] for messages in self.seen]


def settle(scorer: GroupScorer) -> None:
    """Let the loop of the judge do what it can do."""
    for _ in range(20):
        scorer.run(asyncio.sleep(0))


def test_an_insertion_is_asked_when_its_rollout_arrives(scorer):
    gate = Gate()
    made = scorer(Judge(gate, guard=False))
    groups = [group(numbers(id), "50 51 5", 0) for id in "ab"]
    announce(made, groups, 0)
    for count, (row, text) in enumerate([(4, "51"), (0, "50"), (3, "50")], start=1):
        made.arrived(row, text)
        settle(made)
        assert len(gate.asked) == count and f"\n\nCANDIDATE\n{text}\n" in gate.asked[-1]
    made.run(gate.let())
    settle(made)
    assert len(gate.asked) == 3, "a group that is not whole is not ranked"
    outcome = made.score(groups, 0)
    assert len(gate.asked) == len(outcome.calls) == 2 * (3 + 1)
    assert outcome.hidden == 3 / 8


def test_a_whole_group_is_ranked_before_the_last_rollout_of_the_step(scorer):
    gate = Gate()
    gate.open.set()
    made = scorer(Judge(gate, guard=False))
    groups = [group(numbers(id), "50 51 5", 0) for id in "ab"]
    announce(made, groups, 0)
    for row, text in rows(groups)[:3]:
        made.arrived(row, text)
    settle(made)
    assert len(gate.asked) == 4 and "\n\nCANDIDATES\n" in gate.asked[-1]
    assert made.score(groups, 0).hidden == 4 / 8


def test_a_method_without_early_questions_is_asked_group_by_group(scorer):
    class Silent(RankBuffer):
        def early_questions(self, group, buffer):
            return []

    gate = Gate()
    gate.open.set()
    made = scorer(Judge(gate, guard=False), Silent())
    groups = [group(numbers(id), "50 5", 0) for id in "ab"]
    announce(made, groups, 0)
    made.arrived(0, "50")
    made.arrived(3, "5")
    settle(made)
    assert gate.asked == []
    made.arrived(2, "50")
    settle(made)
    assert len(gate.asked) == 2
    assert [score.rewards for score in made.score(groups, 0).scores] == [(1.0, -1.0)] * 2


def test_each_early_question_answers_one_question(scorer):
    """The judge answers the same question in another way each time, and a rollout that comes twice counts once."""
    found = []
    for early in (False, True):

        def answer(messages, places=iter([4, 0, 2])):  # noqa: B008  (made anew in each turn of the loop)
            ranking = "CANDIDATES" in messages[0]["content"]
            return by_number(messages) if ranking else f'{{"position": {next(places)}}}'

        made = scorer(scripted_judge(answer))
        groups = [group(numbers(), "50 50 50", 0)]
        if early:
            announce(made, groups, 0)
            for row, text in [(0, "50"), (0, "50"), (0, "7"), (1, "50")]:
                made.arrived(row, text)
            settle(made)
        outcome = made.score(groups, 0)
        found.append((outcome.scores, Counter(call.kind for call in outcome.calls)))
    assert found[0][0][0].positions == {0: 4, 1: 0, 2: 2} and found[0][1] == Counter(insert=3)
    assert found[1] == found[0]


# What was announced and is not what is scored


@pytest.mark.parametrize("change", [1, 2])
def test_a_text_that_differs_is_asked_anew(scorer, change):
    late = scorer(scripted_judge(by_number))
    groups = [group(numbers(id), "50 51 5", 0, 0) for id in "ab"]
    expected = late.score(groups, 0)
    made = scorer(scripted_judge(by_number))
    announce(made, groups, 0)
    for row, text in rows(groups)[: change + 2]:
        made.arrived(row, "33" if row == change else text)
    settle(made)
    found = made.score(groups, 0)
    assert found.scores == expected.scores
    assert contents(made.store, ("responses", "buffers", "groups")) == contents(
        late.store, ("responses", "buffers", "groups")
    )
    asked = [messages[0]["content"] for messages in made.judge.client.seen]
    assert sum("\n\nCANDIDATE\n33\n" in prompt for prompt in asked) == 1
    assert len(found.calls) == len(asked), "what was asked in vain is in the ledger, too"


@pytest.mark.parametrize("other", ["query", "step", "phase", "epoch", "size", "groups"])
def test_another_step_than_the_announced_one_is_asked_anew(scorer, other):
    made = scorer(scripted_judge(by_number))
    announced = [group(numbers(id), "50 51 5", 3, 0) for id in "ab"]
    announce(made, announced, 3)
    made.arrived(0, "50")
    settle(made)
    step = 4 if other == "step" else 3
    second = group(numbers("c" if other == "query" else "b"), "50 5" if other == "size" else "50 51 5", step, 0)
    groups = [replace(announced[0], step=step), second]
    if other == "epoch":
        groups = [replace(each, epoch=1) for each in groups]
    groups = groups[: 1 if other == "groups" else 2]
    found = made.score(groups, step, update=other != "phase")
    alone = scorer(scripted_judge(by_number)).score(groups, step, update=other != "phase")
    assert found.scores == alone.scores
    assert Counter(map(spent, found.calls)) == Counter(map(spent, alone.calls))
    outcomes = Counter(made.store.rows("SELECT step, phase, outcome FROM calls"))
    phase = "eval" if other == "phase" else "train"
    assert outcomes == Counter({(3, "train", "parsed"): 1}) + Counter({(step, phase, "parsed"): len(alone.calls)})


def test_a_step_that_is_given_up_is_in_the_ledger_and_nowhere_else(scorer):
    gate = Gate()
    gate.open.set()
    made = scorer(Judge(gate, guard=False))
    groups = [group(numbers(), "50 51 5", 0, 0)]
    announce(made, groups, 0)
    made.arrived(0, "50")
    settle(made)
    announce(made, groups, 0)
    settle(made)
    assert made.store.totals().calls == 1
    made.discard()
    made.discard()
    assert made.store.totals().calls == 1
    assert not any(contents(made.store, ("responses", "buffers", "groups")).values())
    made.arrived(1, "51")
    assert made.score(groups, 0).scores[0].rewards == (0.0, 1.0, -1.0)


# Failures and limits


def test_a_judge_that_fails_early_ends_the_step_when_it_is_scored(scorer):
    made = scorer(scripted_judge(unreachable))
    groups = [group(numbers(id), "50 51 5", 4) for id in "ab"]
    announce(made, groups, 4)
    for row, text in rows(groups)[:5]:
        made.arrived(row, text)
    settle(made)
    # 6 insertions and at most 2 fine rankings: the third failure is one too many
    with pytest.raises(JudgeError, match=r"failed 3 of 3 judgments .*judge_max_failures=0.25"):
        made.score(groups, 4)
    assert not any(contents(made.store, ("responses", "buffers", "groups")).values())
    assert made.store.totals().failures >= 3
    made.judge.client.answer = by_number
    assert made.score(groups, 4).scores[0].rewards == (0.0, 1.0, -1.0)


def test_rollouts_that_are_not_known_yet_count_as_answered(scorer):
    """Two failures of two are too many, unless six more judgments may succeed."""
    made = scorer(scripted_judge(unreachable), max_failures=0.25)
    groups = [group(numbers(), "50 51 - - - - - -", 0)]
    announce(made, groups, 0)
    made.arrived(0, "50")
    settle(made)
    made.arrived(2, "")
    made.judge.client.answer = by_number
    made.arrived(1, "51")
    with pytest.raises(JudgeError, match="failed 1 of 2 judgments"):
        made.score(groups, 0)


def test_a_failure_about_a_text_that_is_gone_is_not_one_of_none(scorer):
    asked, failed = asyncio.Event(), asyncio.Event()

    class Client(ScriptedClient):
        async def complete(self, messages, *, tally, **kwargs):
            tally.attempts += 1
            asked.set()
            await failed.wait()
            raise TransportError("gone")

    class Slow(RankBuffer):
        async def score(self, group, buffer, judge):
            failed.set()
            await asyncio.sleep(0.05)  # a method may wait for something else than the judge
            return await super().score(group, buffer, judge)

    made = scorer(Judge(Client(by_number)), Slow(), max_failures=1.0)
    groups = [group(numbers(), "- -", 0)]
    announce(made, groups, 0)
    made.arrived(0, "50")
    made.run(asked.wait())
    outcome = made.score(groups, 0)
    assert outcome.scores[0].rewards == (-1.0, -1.0)
    assert [call.outcome for call in outcome.calls] == ["unreachable"]


@pytest.mark.parametrize("answered", [109, 111])
def test_the_step_timeout_counts_from_the_last_rollout(scorer, answered):
    """The policy takes 100 s. A rollout that comes again does not start the clock again."""
    clock, gate = [0.0], Gate()
    made = scorer(Judge(gate, guard=False), step_timeout=10.0)

    async def take_over_the_clock():
        asyncio.get_running_loop().time = lambda: clock[0]

    def at(second: float, row: int, text: str) -> None:
        clock[0] = second
        made.arrived(row, text)
        settle(made)

    made.run(take_over_the_clock())
    groups = [group(numbers(), "50 5", 0)]
    announce(made, groups, 0)
    at(0, 0, "50")
    at(100, 1, "5")
    at(105, 1, "5")
    clock[0] = answered
    settle(made)
    made.run(gate.let())
    if answered < 110:
        assert made.score(groups, 0).scores[0].rewards == (1.0, -1.0)
    else:
        with pytest.raises(JudgeError, match=r"judge_step_timeout=10 s: 0 judgments were answered"):
            made.score(groups, 0)


def test_a_question_that_the_method_never_asks_does_not_hold_the_step_up(scorer):
    class Chatty(RankBuffer):
        def early_questions(self, group, buffer):
            return [replace(question, query_id="idle") for question in super().early_questions(group, buffer)]

    class Client(Gate):
        async def complete(self, messages, *, question, **kwargs):
            if question.query_id != "idle":
                self.open.set()
                return await super().complete(messages, question=question, **kwargs)
            kwargs["tally"].attempts += 1
            return await asyncio.Event().wait()

    made = scorer(Judge(Client(), guard=False), Chatty())
    groups = [group(numbers(), "50 51 5", 0)]
    announce(made, groups, 0)
    made.arrived(0, "50")
    settle(made)
    outcome = made.score(groups, 0)
    assert outcome.scores[0].rewards == (0.0, 1.0, -1.0)
    assert Counter(call.outcome for call in outcome.calls) == {"parsed": 4, "cancelled": 1}
