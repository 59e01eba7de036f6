"""Rubrics that must hold: by every method, who breaks one stands below all who keep it, and becomes no anchor."""

import asyncio
import json
from dataclasses import replace

import pytest
from conftest import scripted_judge
from helpers.quality import EIGHT
from test_methods import METHODS

from rankbuffer_trl.groups import Rubric
from rankbuffer_trl.judge import TransportError
from rankbuffer_trl.rewards.gdpo import GDPO
from rankbuffer_trl.rewards.must import count_calls, most_calls, must_questions, score_group
from rankbuffer_trl.rewards.pointwise import Pointwise
from rankbuffer_trl.rewards.rankbuffer import RankBuffer
from rankbuffer_trl.rewards.tournament import Tournament
from rankbuffer_trl.testing import QUERY, SHOWN, make, quality, truth, unguarded

MUSTS = (Rubric("Is even.", 3, must=True), Rubric("Is low.", 1, must=True))
RULED = replace(QUERY, rubrics=(*QUERY.rubrics, *MUSTS))
MIXED = (5, 0, 9, None, 2, 10, 3, 8, 7)  # odd numbers break the first, numbers above 8 the second


def judged(prompt: str):
    """The truth; of 2, nobody ever learns whether it is even, and of 9, whether it is low."""
    if "through 1>" not in prompt:
        return truth(prompt)
    number = quality(SHOWN.findall(unguarded(prompt))[-1])
    even = "[weight=3] Is even." in prompt
    if number == (2 if even else 9):
        return TransportError("connection refused")
    return json.dumps({"score": int(number % 2 == 0 if even else number <= 8)})


def played(method, group, buffer=None, judged=judged):
    judge = scripted_judge(lambda messages: judged(messages[0]["content"]))
    return asyncio.run(score_group(method, group, buffer, judge)), judge


@pytest.mark.parametrize("method", METHODS, ids=str)
def test_score_group_puts_who_breaks_a_rubric_below_all_who_keep_it(method):
    group = make(MIXED, RULED)
    score, judge = played(method, group)
    rewards = score.rewards
    bad, good, unknown = (0, 2, 5, 6, 8), (1, 7), 4
    assert rewards[unknown] is None
    assert min(rewards[i] for i in bad) >= -1 and max(rewards[i] for i in bad) <= -0.5
    assert min(rewards[i] for i in good) >= 0 and max(rewards[i] for i in good) <= 1
    assert rewards[3] == -1 or isinstance(method, Tournament), "which asks about a rollout without an answer, too"
    if not isinstance(method, GDPO):  # to which the lower numbers are better by these two rubrics
        assert rewards[7] > rewards[1] and rewards[5] > rewards[6], "each side keeps the method's order"
    order = [i for tier in score.order for i in tier]
    assert sorted(order) == sorted((*bad, *good)) and set(order[: len(bad)]) == set(bad)
    levels = [rewards[i] for i in order]
    assert levels == sorted(levels)
    assert unknown not in score.positions
    names = {anchor.text for anchor in score.after.anchors} if score.after else set()
    assert not names & {group.rollouts[i].text for i in (*bad, unknown)}
    assert len(judge.calls) <= most_calls(method, group, True)
    assert sum(call.kind == "must" for call in judge.calls) == 2 * 8 == len(must_questions(group))


@pytest.mark.parametrize("method", METHODS, ids=str)
@pytest.mark.parametrize("above", [(0, 8), (2, 2)], ids=["kept", "unknown"])
def test_score_group_has_no_reward_below_rollouts_of_which_none_was_scored(method, above):
    def silent(prompt: str):
        about = {"0.r0", "8.r1"} & set(SHOWN.findall(unguarded(prompt)))
        return TransportError("connection refused") if about and "through 1>" not in prompt else judged(prompt)

    group = make((*above, None, 5, 7), RULED)
    score, judge = played(method, group, judged=silent)
    assert score.rewards == (None, None, -1, None, None) and score.order == ()
    for one in group.answered if hasattr(method, "early_questions") else ():
        early = method.early_questions(replace(group, rollouts=(one,)), None)
        assert all(question.chat(judge.guard) in judge.client.seen for question in early)


def test_score_group_leaves_a_score_as_it_is_where_all_rubrics_are_kept():
    for qualities in ((4, 0, None, 8, 6), (None, None)):
        expected, _ = played(RankBuffer(), make(qualities))
        score, judge = played(RankBuffer(), make(qualities, RULED))
        assert score == expected
        assert count_calls(RankBuffer(), make(qualities, RULED), True)[0] <= len(judge.calls)
    assert count_calls(Pointwise(), make(EIGHT), True) == (8, 8), "without such a rubric"
    assert count_calls(Pointwise(), make(EIGHT, RULED), True) == (8 + 16, 2 * 8 + 16)


def test_score_group_where_all_break_a_rubric_still_tells_them_apart():
    score, _ = played(RankBuffer(), make((5, 9, 3, 7), RULED))
    assert list(score.rewards) == [-1 + 0.5 * place / 3 for place in (1, 3, 0, 2)]
    assert [anchor.source for anchor in score.after.anchors] == ["initial"] * 4
