"""Judging that starts before all rollouts are known gives what judging after generation gives."""

import asyncio
from collections import Counter
from dataclasses import replace

import pytest
from conftest import by_number, group, numbers, scripted_judge, unreachable
from helpers.contents import contents
from helpers.judges import Fake
from helpers.quality import CASES, QUALITIES
from hypothesis import given, settings
from hypothesis import strategies as st
from test_methods import METHODS
from test_prefetch import early as early_of

from rankbuffer_trl._step import PENDING
from rankbuffer_trl.groups import Rollout, RolloutGroup
from rankbuffer_trl.judge import Judge, JudgeError, TransportError
from rankbuffer_trl.rewards._rankbuffer import RankBuffer
from rankbuffer_trl.testing import QUERY, faulty, make, truth
from rankbuffer_trl.training._scorer import GroupScorer, StepScore

QUERIES = [replace(QUERY, id=name) for name in "abc"]


def group_of(id: str = "n", line: str = "50 51 5", step: int = 0, epoch: int | None = None) -> RolloutGroup:
    return group(numbers(id), line, step, epoch)


def settle(scorer: GroupScorer, turns: int = 20) -> None:
    """Let the loop of the judge do what it can do."""
    for _ in range(turns):
        scorer.run(asyncio.sleep(0))


def begin(scorer: GroupScorer, groups: list[RolloutGroup], *arrivals: tuple[int, str], turns=lambda: 20) -> None:
    """Announce the step of some groups and hand over rollouts, with time for the judge after each."""
    unknown = [replace(each, rollouts=tuple(Rollout(one.id, PENDING) for one in each.rollouts)) for each in groups]
    scorer.begin(unknown, groups[0].step)
    for row, text in arrivals:
        scorer.arrived(row, text)
        settle(scorer, turns())


def rows(groups: list[RolloutGroup]) -> list[tuple[int, str]]:
    """The rollouts of equally large groups as rows of a generation."""
    return list(enumerate(rollout.text for group in groups for rollout in group.rollouts))


def spent(outcome: StepScore) -> Counter:
    """The calls of a step, in any order and without their seconds."""
    return Counter(replace(call, seconds=0.0) for call in outcome.calls)


@pytest.mark.parametrize("method", METHODS, ids=str)
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
            begin(early, groups, *arrivals, turns=lambda: order.randrange(4))
            found = early.score(groups, step)
            assert found.scores == expected.scores and spent(found) == spent(expected)
            assert 0 <= found.hidden <= 1
        assert contents(early.store) == contents(late.store)

    check()


@pytest.mark.parametrize("method", METHODS, ids=str)
@settings(max_examples=20)
@given(qualities=st.lists(QUALITIES, min_size=2, max_size=2))
def test_early_questions_are_asked_by_the_method_itself(method, qualities):
    """Methods that ask about each rollout alone have some. A buffer that is bootstrapped begins with a whole group."""
    alone = {"Pointwise", "RatingsSoft", "GDPO", "RRCAGR", "RankBuffer", "LLMBuffer", "RankBufferSoft"}
    expected = type(method).__name__ in alone and not getattr(method, "bootstrap", False)
    assert bool(early_of(method, make([5, 6]), {0})) == expected
    buffer = None
    for step, each in enumerate(qualities):
        whole = replace(make(each, step=step), epoch=step)
        asked = [early_of(method, whole, {rollout.id}, buffer) for rollout in whole.rollouts]
        early = [question.prompt() for questions in asked for question in questions]
        judge = scripted_judge(lambda messages: truth(messages[0]["content"]))
        buffer = asyncio.run(method.score(whole, buffer, judge)).after
        assert Counter(early) <= Counter(messages[0]["content"] for messages in judge.client.seen)


# What happens before the last rollout, and what does not


def test_rollouts_that_come_together_are_asked_about_once_and_not_in_a_whole_group(scorer, monkeypatch):
    heard = []

    async def early(method, group, here, buffer):
        heard.append((group.query.id, here))
        return []

    monkeypatch.setattr("rankbuffer_trl._step.early_questions", early)
    made, groups = scorer(scripted_judge(by_number), RankBuffer()), [group_of("n"), group_of("m")]
    begin(made, groups)

    async def arrive():
        for row, text in rows(groups)[:5]:
            made.arrived(row, text)

    made.run(arrive())
    settle(made)
    assert heard == [("m", {0, 1})]


class Gate(Fake):
    """A judge that answers when it is let, and tells the test what it was asked."""

    def __init__(self, is_open: bool = False):
        super().__init__()
        self.open = asyncio.Event()
        if is_open:
            self.open.set()

    async def after(self, asked, reply):
        await self.open.wait()
        return reply

    async def let(self) -> None:
        self.open.set()

    @property
    def asked(self) -> list[str]:
        return [messages[0]["content"] for messages in self.seen]


def test_arrived_asks_an_insertion_at_once_and_ranks_a_group_when_it_is_whole(scorer):
    gate = Gate()
    made, groups = scorer(Judge(gate, guard=False)), [group_of(id) for id in "ab"]
    begin(made, groups)
    for count, (row, text) in enumerate([(4, "51"), (0, "50"), (3, "50")], start=1):
        made.arrived(row, text)
        settle(made)
        assert len(gate.asked) == count and f"\n\nCANDIDATE\n{text}\n" in gate.asked[-1]
    made.run(gate.let())
    settle(made)
    assert len(gate.asked) == 3, "a group that is not whole is not ranked"
    made.arrived(5, "5")
    settle(made)
    assert len(gate.asked) == 5 and "\n\nCANDIDATES\n" in gate.asked[-1], "the other group is not waited for"
    outcome = made.score(groups, 0)
    assert len(gate.asked) == len(outcome.calls) == 2 * (3 + 1)
    assert outcome.hidden == 5 / 8


def test_equal_questions_of_a_step_are_asked_once_and_share_the_answer(scorer):
    """The judge answers the same question in another way each time, and a rollout that comes twice counts once."""
    for lost in (False, True):
        found = []
        for arrivals in (None, [(0, "50"), (0, "50"), (0, "7"), (1, "50")]):

            def answer(messages, lost=lost, places=iter([4, 0, 2])):  # noqa: B008  (made anew in each turn)
                if "CANDIDATES" in messages[0]["content"]:
                    return by_number(messages)
                return unreachable(messages) if lost else f'{{"position": {next(places)}}}'

            made, groups = scorer(scripted_judge(answer), max_failures=1.0), [group_of(line="50 50 50")]
            if arrivals:
                begin(made, groups, *arrivals)
            outcome = made.score(groups, 0)
            found.append((outcome.scores, Counter(call.kind for call in outcome.calls)))
        score, kinds = found[0][0][0], found[0][1]
        if lost:
            assert score.rewards == (None, None, None) and kinds == Counter(insert=1)
        else:
            assert score.positions == {0: 4, 1: 4, 2: 4} and kinds == Counter(insert=1, fine=1)
        assert found[1] == found[0]


# What was announced and is not what is scored


def test_score_asks_anew_about_a_text_that_differs(scorer):
    groups, tables = [group_of(id, epoch=0) for id in "ab"], ("responses", "buffers", "groups")
    late = scorer(scripted_judge(by_number))
    expected = late.score(groups, 0)
    for change in (1, 2):  # a rollout of a group that is not whole, and the last one of a whole group
        made = scorer(scripted_judge(by_number))
        begin(made, groups, *((row, "33" if row == change else text) for row, text in rows(groups)[: change + 2]))
        found = made.score(groups, 0)
        assert found.scores == expected.scores
        assert contents(made.store, tables) == contents(late.store, tables)
        asked = [messages[0]["content"] for messages in made.judge.client.seen]
        assert sum("\n\nCANDIDATE\n33\n" in prompt for prompt in asked) == 1
        assert len(found.calls) == len(asked), "what was asked in vain is in the ledger, too"


def test_score_of_another_step_than_the_announced_one_asks_anew(scorer):
    a, b = (group_of(id, step=3, epoch=0) for id in "ab")
    for other, groups, phase in [
        ("query", [a, group_of("c", step=3, epoch=0)], "train"),
        ("size", [a, group_of("b", "50 5", 3, 0)], "train"),
        ("groups", [a], "train"),
        ("step", [replace(each, step=4) for each in (a, b)], "train"),
        ("epoch", [replace(each, epoch=1) for each in (a, b)], "train"),
        ("phase", [a, b], "eval"),
    ]:
        made, step = scorer(scripted_judge(by_number)), groups[0].step
        begin(made, [a, b], (0, "50"))
        both = made, scorer(scripted_judge(by_number))
        found, alone = (each.score(groups, step, update=phase == "train") for each in both)
        assert found.scores == alone.scores and spent(found) == spent(alone), other
        outcomes = Counter(made.store.rows("SELECT step, phase, outcome FROM calls"))
        assert outcomes == Counter([(3, "train", "parsed"), *[(step, phase, "parsed")] * len(alone.calls)]), other


def test_discard_leaves_a_step_in_the_ledger_and_nowhere_else(scorer):
    made, groups = scorer(Judge(Gate(is_open=True), guard=False)), [group_of(epoch=0)]
    begin(made, groups, (0, "50"))
    begin(made, groups)
    assert made.store.totals().calls == 1
    made.discard()
    made.discard()
    assert made.store.totals().calls == 1
    assert not any(contents(made.store, ("responses", "buffers", "groups")).values())
    made.arrived(1, "51")
    assert made.score(groups, 0).scores[0].rewards == (0.0, 1.0, -1.0)


# Failures and limits


def test_score_ends_a_step_whose_judge_failed_early(scorer):
    made, groups = scorer(scripted_judge(unreachable)), [group_of(id, step=4) for id in "ab"]
    begin(made, groups, *rows(groups)[:5])
    # 6 insertions and at most 2 fine rankings: the third failure is one too many
    with pytest.raises(JudgeError, match=r"failed 3 of 3 judgments .*judge_max_failures=0.25"):
        made.score(groups, 4)
    assert not any(contents(made.store, ("responses", "buffers", "groups")).values())
    assert made.store.totals().failures >= 3
    made.judge.client.answer = by_number
    assert made.score(groups, 4).scores[0].rewards == (0.0, 1.0, -1.0)


def test_score_counts_a_failure_about_a_text_that_is_gone(scorer):
    asked, failed = asyncio.Event(), asyncio.Event()

    async def fail(question):
        question.tally.attempts += 1
        asked.set()
        await failed.wait()
        raise TransportError("gone")

    class Slow(RankBuffer):
        async def score(self, group, buffer, judge):
            if not group.answered:
                failed.set()
                await asyncio.sleep(0.05)  # a method may wait for something else than the judge
            return await super().score(group, buffer, judge)

    made = scorer(Judge(Fake(before=fail)), Slow(), max_failures=1.0)
    groups = [group_of(line="- -")]
    begin(made, groups, (0, "50"))
    made.run(asked.wait())
    outcome = made.score(groups, 0)
    assert outcome.scores[0].rewards == (-1.0, -1.0)
    assert [call.outcome for call in outcome.calls] == ["unreachable"]


@pytest.mark.parametrize("answered", [109, 111])
def test_score_counts_its_timeout_from_the_last_rollout(scorer, answered):
    """The policy takes 100 s, and the trainer longer after it. A rollout that comes again starts no clock."""
    clock, gate = [0.0], Gate()
    made, groups = scorer(Judge(gate, guard=False), step_timeout=10.0), [group_of(line="50 5")]

    async def take_over_the_clock():
        asyncio.get_running_loop().time = lambda: clock[0]

    made.run(take_over_the_clock())
    begin(made, groups)
    for clock[0], row, text in [(0, 0, "50"), (100, 1, "5"), (105, 1, "5")]:
        made.arrived(row, text)
        settle(made)
    clock[0] = answered
    settle(made)
    made.run(gate.let())
    settle(made)
    clock[0] = 999
    if answered < 110:
        assert made.score(groups, 0).scores[0].rewards == (1.0, -1.0)
    else:
        with pytest.raises(JudgeError, match=r"judge_step_timeout=10 s: 0 judgments were answered"):
            made.score(groups, 0)


def test_score_does_not_wait_for_a_question_that_the_method_never_asks(scorer):
    class Chatty(RankBuffer):
        async def score(self, group, buffer, judge):
            if PENDING in {rollout.text for rollout in group.answered} or len(group.answered) == 1:
                group = replace(group, query=replace(group.query, id="idle"))
            return await super().score(group, buffer, judge)

    async def wait_if_idle(asked):
        if asked.question.query_id == "idle":
            asked.tally.attempts += 1
            await asyncio.Event().wait()

    made = scorer(Judge(Fake(before=wait_if_idle), guard=False), Chatty())
    groups = [group_of()]
    begin(made, groups, (0, "50"))
    outcome = made.score(groups, 0)
    assert outcome.scores[0].rewards == (0.0, 1.0, -1.0)
    assert Counter(call.outcome for call in outcome.calls) == {"parsed": 4, "cancelled": 1}
