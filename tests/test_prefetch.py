"""What a method asks first, early and at most is found by running its `score`."""

import asyncio
import json
from dataclasses import dataclass, replace
from hashlib import sha256
from random import Random

import pytest
from conftest import ROOT
from test_methods import METHODS

from rankbuffer_trl._step import PENDING
from rankbuffer_trl.errors import SettingsError
from rankbuffer_trl.groups import Rollout, RolloutGroup
from rankbuffer_trl.judge import Question, Verdict, VerdictError, pairwise_question
from rankbuffer_trl.rewards._llm_buffer import LLMBuffer
from rankbuffer_trl.rewards._method import RewardMethod, score_by_order, score_by_reward
from rankbuffer_trl.rewards._pairwise_rank import PairwiseRank
from rankbuffer_trl.rewards._prefetch import early_questions, first_questions, without
from rankbuffer_trl.rewards._rankbuffer import RankBuffer
from rankbuffer_trl.testing import make, play

FROZEN = json.loads((ROOT / "tests" / "golden" / "first_questions.json").read_text())


def early(method, group: RolloutGroup, arrived: set[int], buffer=None) -> list[Question]:
    """The early questions of a group of which only some rollouts are known."""
    known = tuple(each if each.id in arrived else Rollout(each.id, PENDING) for each in group.rollouts)
    return asyncio.run(early_questions(method, replace(group, rollouts=known), arrived, buffer))


def digest(prompts: list) -> str:
    return sha256(json.dumps(prompts).encode()).hexdigest()[:16]


@pytest.mark.parametrize("method", METHODS, ids=str)
def test_first_and_early_questions_are_those_that_methods_once_named_themselves(method):
    """The digests were made when each method had functions that returned its first and its early questions."""
    luck, first, alone = Random(0), [], []
    for _ in range(12):
        qualities = [luck.choice([None, 0, 3, 6, 6, 9, 10]) for _ in range(luck.randint(2, 9))]
        buffer = None
        for step in range(2):
            group = replace(make(qualities, step=step), epoch=step)
            if step == 0:
                first.append([question.prompt() for question in first_questions(method, group)])
            asked = [early(method, group, {rollout.id}, buffer) for rollout in group.rollouts]
            alone.append([[question.prompt() for question in each] for each in asked])
            buffer = play(method, group, buffer=buffer).score.after
    assert [digest(first), digest(alone)] == FROZEN[str(method)]


@pytest.mark.parametrize("method", METHODS, ids=str)
def test_early_questions_of_several_rollouts_are_asked_whatever_comes(method):
    """What is certain once some have arrived is asked about the whole group, and is not asked about less of it."""
    luck, buffer = Random(1), None
    for step in range(12):
        group = replace(make([luck.choice([None, 0, 3, 6, 9]) for _ in range(5)], step=step), epoch=step)
        arrived = set(luck.sample(range(5), 3))
        found = early(method, group, arrived, buffer)
        played = play(method, group, buffer=buffer)
        assert not without(found, played.questions)
        assert not without([q for i in arrived for q in early(method, group, {i}, buffer)], found)
        buffer = played.score.after


def test_early_questions_of_pairs_come_with_the_second_rollout():
    group = make([5, 1, None, 9])
    assert [len(early(PairwiseRank(), group, set(range(n)))) for n in (1, 2, 3, 4)] == [0, 1, 1, 3]


@pytest.mark.parametrize("method", METHODS, ids=str)
def test_calls_and_most_shown_have_defaults_within_those_of_a_method_that_knows_better(method):
    known = isinstance(method, RankBuffer | LLMBuffer)
    for qualities in ([5] * 8, [5, None, 3], [5, 5], [None] * 3, [4, None]):
        group = make(qualities)
        for first in (True, False):
            (least, most), (low, high) = method.calls(group, first), RewardMethod.calls(method, group, first)
            assert least <= low <= high <= most
            if least == most:
                assert low == high == most
    shown, most = RewardMethod.most_shown(method, 8), method.most_shown(8)
    assert shown == most or (known and shown <= most), "buffers of made-up groups grow less"


@dataclass(frozen=True)
class Shuffling(RewardMethod):
    """A method that asks once or twice, by what it shuffles with query and step."""

    name = "shuffling"

    async def score(self, group, buffer, judge):
        times = 1 + Random(f"{group.query.id} {group.step}").getrandbits(1)
        await judge.ask_all([pairwise_question(group.query, "a", "b")] * times)
        return score_by_reward(group, {0: 0.0, 1: 0.0})


def test_calls_by_playing_vary_the_query_and_the_step():
    assert Shuffling().calls(make([1, 2]), True) == Shuffling().calls(make([1, 2]), False) == (1, 2)


@dataclass(frozen=True)
class Unanswerable(RewardMethod):
    """A method with a question to which no answer is found by trying."""

    name = "unanswerable"

    async def score(self, group, buffer, judge):
        def check(word):
            raise AssertionError("never") if word == "yes" else VerdictError

        verdict = Verdict({"word": "yes"}, {"regex": "yes"}, {"word": {"type": "string"}}, check)
        await judge.ask(replace(pairwise_question(group.query, "a", "b"), verdict=verdict))
        return score_by_reward(group, {})


def test_a_question_that_cannot_be_answered_by_trying_is_named():
    with pytest.raises(SettingsError, match="no valid answer to a question with the keys word was found by trying"):
        Unanswerable().calls(make([5, 6]), first=True)


@dataclass(frozen=True)
class Gathers(RewardMethod):
    """A method that asks question by question in tasks of its own."""

    name = "gathers"

    async def score(self, group, buffer, judge):
        texts = [rollout.text for rollout in group.answered]
        pairs = [pairwise_question(group.query, text, "6") for text in texts]
        await asyncio.gather(*(judge.ask(question) for question in pairs))
        if len(texts) > 2:
            raise RuntimeError("a bug")
        return score_by_order(group, [])


def test_first_questions_are_found_from_tasks_and_inside_a_running_loop():
    async def inside():
        return first_questions(Gathers(), make([5, 6, 7]))

    assert len(asyncio.run(inside())) == 3
    assert len(early(Gathers(), make([5, 6, 7]), {0, 2})) == 2


def test_first_questions_show_a_bug_and_early_questions_leave_it_to_the_score():
    class Broken(RankBuffer):
        async def score(self, group, buffer, judge):
            raise RuntimeError("a bug")

    with pytest.raises(RuntimeError, match="a bug"):
        first_questions(Broken(), make([5, 6]))
    assert early(Broken(), make([5, 6]), {0}) == []
