"""`check_method` passes every method of the package, and names the rule that a method breaks."""

import asyncio
import itertools
import json
import math
import re
from dataclasses import dataclass, replace
from random import Random

import pytest
from test_methods import METHODS

from rankbuffer_trl.judge import group_question, pairwise_question
from rankbuffer_trl.rewards._method import GroupScore, RewardMethod, score_by_reward
from rankbuffer_trl.rewards._pointwise import Pointwise
from rankbuffer_trl.rewards._tournament import Tournament
from rankbuffer_trl.testing import check_method, make, play, quality, truth, truthful_judge

COUNT = itertools.count()


@pytest.mark.parametrize("method", [each for each in METHODS if not getattr(each, "bootstrap", False)], ids=str)
def test_check_method_passes_the_methods_of_the_package(method):
    plays_empty = isinstance(method, Tournament)
    lucky = plays_empty or getattr(method, "block", None) is not None  # a better one may meet the best ones
    check_method(method, groups=5, ordered=not lucky, plays_empty=plays_empty)


@dataclass(frozen=True)
class Fixed(Pointwise):
    """A method with a reward of the parts below."""

    async def score(self, group, buffer, judge):
        verdicts = await judge.ask_all(self.questions(group))
        rewards = {r.id: None if v is None else self.reward(v) for r, v in zip(group.answered, verdicts, strict=True)}
        return score_by_reward(group, self.turned(rewards))

    def turned(self, rewards):
        return rewards


def fault(**members):
    return dataclass(frozen=True)(type("Faulty", (Fixed,), members))()


async def lifted(self, group, buffer, judge):
    score = await Fixed.score(self, group, buffer, judge)
    return replace(score, rewards=tuple(max(reward or 0.0, -0.5) for reward in score.rewards))


async def shows_all(self, group, buffer, judge):
    await judge.ask_all(pairwise_question(group.query, "5", rollout.text) for rollout in group.rollouts)
    return await Fixed.score(self, group, buffer, judge)


async def misordered(self, group, buffer, judge):
    score = await Fixed.score(self, group, buffer, judge)
    return replace(score, order=tuple((i,) for i in range(len(group.rollouts))))


async def late(self, group, buffer, judge):
    await asyncio.sleep(0.001)
    return await Fixed.score(self, group, buffer, judge)


FAULTS = {
    "a better rollout has a lower reward": dict(reward=lambda self, verdict: 1 - 2 * verdict / 10),
    "every judgment failed, and there are rewards": dict(turned=lambda self, rewards: dict.fromkeys(rewards, 0.0)),
    "no judgment failed, and a reward is missing": dict(turned=lambda self, rewards: dict.fromkeys(rewards)),
    "the same group and answers give another score": dict(reward=lambda self, verdict: 1 / (2 + next(COUNT))),
    "questions; `calls` says 0 to 0": dict(calls=lambda self, group, first: (0, 0)),
    "responses; `most_shown` says 0": dict(most_shown=lambda self, G: 0),
    "an empty rollout has a reward above -1": dict(score=lifted),
    "a rollout without an answer was shown": dict(score=shows_all),
    "the order ((0,), (1,)": dict(score=misordered),
    "`score` waits for something else before it asks": dict(score=late),
}


@pytest.mark.parametrize("rule", FAULTS)
def test_check_method_names_the_rule_that_is_broken(rule):
    with pytest.raises(AssertionError, match=re.escape(rule)) as caught:
        check_method(fault(**FAULTS[rule]))
    assert re.match(r"test_testing\.Faulty|Faulty\(\), group \d+ with the qualities \[", str(caught.value))


def test_check_method_takes_the_answers_to_questions_of_ones_own():
    def answer(prompt):
        return json.dumps({"scores": [min(quality(text), 10) for text in re.findall(r"^(\d+\.r\d)$", prompt, re.M)]})

    @dataclass(frozen=True)
    class Scored(RewardMethod):
        name = "scored"

        async def score(self, group, buffer, judge):
            texts = [rollout.text for rollout in group.answered]
            scores = await judge.ask(group_question(group.query, texts)) if texts else []
            given = zip(group.answered, scores or texts, strict=True)
            return score_by_reward(group, {r.id: scores and s / 100 for r, s in given})

    check_method(Scored(), answer)


def test_check_method_takes_a_reward_that_rounding_lifts_above_1():
    check_method(fault(reward=lambda self, verdict: (2 * verdict / 10 - 1) * (1 + 2**-52)))


@pytest.mark.parametrize("reward", [1.53, -1.1, math.nan, math.inf])
def test_a_score_refuses_a_reward_outside_its_range(reward):
    with pytest.raises(ValueError, match=r"gave rollout 1 the reward .*, which is not in \[-1, 1\]: return None"):
        GroupScore((1.0, reward, None, -1.0 - 1e-12))


def test_the_truthful_judge_answers_as_play_does():
    group = make([5, None, Random(0).randint(0, 9)])
    score = asyncio.run(Pointwise().score(group, None, truthful_judge()))
    assert score == play(Pointwise(), group, truth).score
