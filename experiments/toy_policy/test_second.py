"""What a second judge does to a method's rewards."""

import asyncio
import json

import pytest

from experiments.toy_policy.second import Alone, Twice
from rankbuffer_trl.groups import Query, Rollout, RolloutGroup
from rankbuffer_trl.judge import Judge
from rankbuffer_trl.rewards import GroupScore, Pointwise
from rankbuffer_trl.testing import scripted_judge


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
