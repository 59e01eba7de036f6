"""What the offline repair finds in made-up reads, and what a second judge does to a method's rewards."""

import asyncio
import json
from random import Random

import numpy as np
import pytest

from experiments.toy_policy.repair import Answer, centred, study
from experiments.toy_policy.second import Alone, Twice
from rankbuffer_trl.groups import Query, Rollout, RolloutGroup
from rankbuffer_trl.judge import Judge
from rankbuffer_trl.rewards.method import GroupScore
from rankbuffer_trl.rewards.pointwise import Pointwise
from rankbuffer_trl.testing import scripted_judge


def answers(worth: float, steps: int = 20) -> list[Answer]:
    """Answers of 24 words drawn from 60, of which the judge pays for one."""
    random, found = Random(0), []
    for step in range(steps):
        for number in range(48):
            words = random.sample(range(60), 24)
            features = {f"the word {word}": 1.0 for word in words} | {"words": random.gauss(30, 5)}
            liked, true = worth * (7 in words), random.gauss(0, 0.25)
            seen = true + liked + random.gauss(0, 0.09), true + random.gauss(0, 0.18)
            found.append(Answer(step, f"q{number // 8}", features, liked, *seen))
    return found


def test_centred_takes_the_mean_of_each_group():
    assert centred(answers(0.75)[:16], np.arange(16.0)) == pytest.approx([*np.arange(8) - 3.5] * 2)


def test_study_repairs_later_steps_by_earlier_reads_and_does_no_harm():
    found = study(answers(0.75), 0.3, "")
    assert found["explained"] > 0.6 and found["named"] is None, "no weakness has that name"
    none = study(answers(0.0), 0.3, "")
    assert none["explained"] is None and none["added"] < 0.25


def scored(points: int) -> Judge:
    return scripted_judge(lambda messages: json.dumps({"score": points}))


def score(method, judge: Judge, query: str = "q0") -> GroupScore:
    group = RolloutGroup(
        Query(query, [{"role": "user", "content": "?"}], ()), (Rollout(0, "a"), Rollout(1, "b")), 0, 0
    )
    return asyncio.run(method.score(group, None, judge))


def test_a_second_judge_halves_the_weight_of_the_first_or_scores_one_of_20_groups_alone():
    first, second = scored(2), scored(8)
    assert score(Twice(Pointwise(), second), first).rewards == pytest.approx((0.0, 0.0))
    assert len(first.calls) == 4 and not second.calls, "one ledger"
    ids = tuple(f"q{i}" for i in range(40))
    alone = Alone(Pointwise(), second, ids)
    found = [score(alone, first, id).rewards for id in ids]
    assert [each for each in found if each != (None, None)] == [pytest.approx((0.6, 0.6))] * 2
    assert len(found) == 40 and len(first.calls) == 8
