"""Whole groups through the scorer: judge, method and store together, and what a failing judge may not do."""

import asyncio
import json
import random
import re
from dataclasses import replace
from types import SimpleNamespace

import pytest
from conftest import by_number, group, numbers, scripted_judge, unreachable
from helpers.contents import contents
from helpers.judges import Fake, shuffled

from rankbuffer_trl.buffer import Anchor, AnchorBuffer
from rankbuffer_trl.judge import Call, Judge, JudgeError, TransportError, Usage
from rankbuffer_trl.monitoring._metrics import placement_columns, step_metrics
from rankbuffer_trl.rewards._method import GroupScore
from rankbuffer_trl.rewards._rankbuffer import RankBuffer

TABLES = ("responses", "buffers", "groups", "calls")
BARE = replace(numbers(), responses=())


def failing_for(*texts: str):
    """The number judge, which cannot place these candidates."""

    def respond(messages):
        faulty = any(f"\n\nCANDIDATE\n{text}\n" in messages[0]["content"] for text in texts)
        return TransportError(f"cause {messages[0]['content'][-90:]}") if faulty else by_number(messages)

    return respond


def no_ranking(messages):
    """The number judge, which ranks nothing."""
    return "I cannot." if "\n\nCANDIDATES\n" in messages[0]["content"] else by_number(messages)


def texts(buffer: AnchorBuffer) -> list[str]:
    return [anchor.text for anchor in buffer.anchors]


def test_score_ranks_and_rewards_a_group_and_grows_its_buffer(scorer):
    made = scorer(scripted_judge(by_number))
    outcome = made.score([group(numbers(), "25 5 22 45 - 28", step=7)], step=7)
    (score,), after = outcome.scores, made.store.load("n")
    assert score.positions == {0: 2, 1: 0, 2: 2, 3: 4, 5: 2}
    assert score.order == ((1,), (2,), (0,), (5,), (3,)) and score.fine_ranked
    assert score.rewards == pytest.approx((0.2, -0.6, -0.2, 1.0, -1.0, 0.6))
    assert after == score.after and after.visits == 1
    assert texts(after) == ["5", "10", "20", "25", "30", "40", "45"]
    assert [anchor.source for anchor in after.anchors] == "left initial initial refine initial initial right".split()
    assert [anchor.id for anchor in after.anchors if anchor.source != "initial"] == ["7-1", "7-0", "7-3"]
    assert sorted(call.kind for call in outcome.calls) == ["fine"] + ["insert"] * 5


def test_score_of_a_bootstrapped_query_waits_for_two_answers_and_counts_them_as_its_first_visit(scorer):
    made = scorer(scripted_judge(by_number), RankBuffer(bootstrap=True))
    lines = ["5 -", "9 3 6", "4 7"]
    waiting, first, second = (made.score([group(BARE, line, step)], step).scores[0] for step, line in enumerate(lines))
    assert (waiting.rewards, waiting.after) == ((1.0, -1.0), None)
    assert first.rewards == (1.0, -1.0, 0.0) and texts(first.after) == ["3", "6", "9"]
    assert {anchor.epoch for anchor in first.after.anchors} == {0}
    assert second.before == first.after and second.positions == {0: 1, 1: 2}
    assert (second.after.observed_epoch, second.after.visits) == (1, 2)
    kinds = made.store.rows("SELECT kind FROM calls ORDER BY rowid")
    assert [kind for (kind,) in kinds] == ["bootstrap", "insert", "insert"]
    assert [epoch for (epoch,) in made.store.rows("SELECT epoch FROM groups ORDER BY step")] == [0, 0, 1]


def test_score_counts_the_visits_of_each_query_if_no_epoch_is_given(scorer):
    made = scorer(scripted_judge(by_number), RankBuffer(prune_after=9))
    for visit in range(3):
        step = 4 * visit
        groups = [group(numbers(id), f"{50 + visit} {5 - visit}", step) for id in ("nm" if visit else "n")]
        after = made.score(groups, step).scores[0].after
        assert len(after) == 4 + 2 * (visit + 1)
        found = (after.left_epoch, after.right_epoch, after.observed_epoch, after.anchors[0].epoch)
        assert found == (visit,) * 4
    made.score([group(numbers(), "60 4", 9, epoch=3), group(numbers("m"), "60 4", 9)], 9)
    visits = list(made.store.rows("SELECT query_id, step, epoch FROM groups ORDER BY query_id, step"))
    assert visits == [("m", 4, 0), ("m", 8, 1), ("m", 9, 2), ("n", 0, 0), ("n", 4, 1), ("n", 8, 2), ("n", 9, 3)]


# Once per step, and never in evaluation


def test_score_changes_a_buffer_once_a_step(scorer):
    made, once = scorer(scripted_judge(by_number)), scorer(scripted_judge(by_number))
    once.score([group(numbers(), "50 5", 3, 0)], 3)
    twice = made.score([group(numbers(), "50 5", 3, 0), group(numbers(), "60 6", 3, 0)], 3)
    again = made.score([group(numbers(), "70 7", 3, 0)], 3)
    assert [score.rewards for score in (*twice.scores, *again.scores)] == [(1.0, -1.0)] * 3
    assert contents(made.store, TABLES[:3]) == contents(once.store, TABLES[:3])
    assert made.store.totals().calls == 6
    made.score([group(numbers(), "70 2", 4, 1)], 4)
    assert made.store.load("n").visits == 2


def test_score_in_an_evaluation_writes_the_ledger_alone(scorer):
    made = scorer(scripted_judge(by_number))
    made.score([group(numbers(), "50 5", 0, 0)], 0)
    before = contents(made.store, TABLES[:3])
    seen, new = made.score([group(numbers(), "45 55 -", 1, 0), group(numbers("new"), "1 2 3", 1)], 1, False).scores
    assert (seen.rewards, seen.positions) == ((0.0, 1.0, -1.0), {0: 5, 1: 6}), "against the buffer of training"
    assert new.rewards == (-1.0, 0.0, 1.0)
    made.judge.client.answer = unreachable
    with pytest.raises(JudgeError, match="failed 1 of 1"):
        made.score([group(numbers(), "50 5", 2)], 2, update=False)
    assert contents(made.store, TABLES[:3]) == before
    phases = "SELECT step, phase, count(*), sum(outcome != 'parsed') FROM calls GROUP BY step, phase ORDER BY step"
    # the second failure was on its way when the first ended the step
    assert list(made.store.rows(phases)) == [(0, "train", 2, 0), (1, "eval", 6, 0), (2, "eval", 2, 2)]


def test_score_refuses_a_visit_ahead_of_its_epoch(scorer):
    made = scorer(scripted_judge(by_number))
    made.score([group(numbers(), "50 5", 0, 0)], 0)
    before = contents(made.store)
    with pytest.raises(RuntimeError, match=r"query 'n' was already visited 1 times before its visit of epoch 0"):
        made.score([group(numbers("m"), "1 2", 1, 0), group(numbers(), "60 4", 1, 0)], 1)
    assert contents(made.store) == before
    made.score([group(numbers(), "60 4", 1, 1)], 1)
    made.score([group(numbers(), "70 3", 9, 5)], 9)  # behind is fine: a failed visit does not count


# Failures


def test_score_stops_at_too_many_failures_and_records_the_calls_alone(scorer):
    made = scorer(scripted_judge(unreachable))
    with pytest.raises(JudgeError) as error:
        made.score([group(numbers(id), "50 5", 4) for id in ("n", "m")], 4)
    # 4 insertions and at most 2 fine rankings: the second failure is one too many
    for part in ("scripted judge", "failed 2 of 2", "2 unreachable", "judge_max_failures=0.25", "connection refused"):
        assert part in str(error.value)
    found = contents(made.store)
    assert [found[table] for table in TABLES[:3]] == [[], [], []]
    assert [row[:2] for row in found["calls"]] == [(4, "train")] * 4


def test_score_allows_the_share_of_failures_itself(scorer):
    for share, stops in [(0.0, "failed 1 of 2"), (0.24, "failed 1 of 4"), (0.25, None), (1.0, None)]:
        made = scorer(scripted_judge(failing_for("5")), max_failures=share)
        groups = [group(numbers(), "50 5", 0), group(numbers("m"), "60 4", 0)]
        if stops:
            with pytest.raises(JudgeError, match=stops):
                made.score(groups, 0)
        else:
            assert [score.rewards for score in made.score(groups, 0).scores] == [(0.0, None), (1.0, -1.0)]
        assert (made.store.totals().failures, made.store.totals().calls) == (1, 3), share
    for failures, questions in [(1, 49), (29, 50)]:  # in floats 1 / 49 * 49 < 1 and 29 / 50 * 50 < 29
        faulty = [str(i) for i in range(failures)]
        made = scorer(scripted_judge(failing_for(*faulty)), RankBuffer(fine=False), max_failures=failures / questions)
        calls = made.score([group(numbers(), " ".join(map(str, range(questions))), 0)], 0).calls
        assert (len(calls), sum(call.failed for call in calls)) == (questions, failures)


def test_score_gives_no_reward_without_a_placement_and_ties_what_is_not_ranked(scorer):
    third = 1 / 3
    for answer, line, rewards, anchors, attempts in [
        (failing_for("5", "99"), "99 15 5 35 -", [None, 0.0, None, 1.0, -1.0], "10 20 30 40", 4),
        (no_ranking, "25 28 29 5", [third, third, third, -1.0], "5 10 20 30 40", 6),
        (unreachable, "- -", [-1.0, -1.0], "10 20 30 40", 0),
    ]:
        made = scorer(scripted_judge(answer, max_attempts=2), max_failures=0.5)
        calls = made.score([group(numbers(), line, 0)], 0).calls
        ((recorded,),) = made.store.rows("SELECT rewards FROM groups")
        assert json.loads(recorded) == pytest.approx(rewards), line
        assert texts(made.store.load("n")) == anchors.split(), line
        assert sum(call.attempts for call in calls) == attempts, line
    assert made.store.load("n").visits == 1, "a group without answers was visited"


def test_score_counts_the_time_that_the_trainer_waited(scorer, monkeypatch):
    """Loading buffers takes 10 s, before and after generation, and recording 1 s. Generation takes 100 s."""
    clock = [0.0]

    def spending(seconds, method):
        def call(*args, **kwargs):
            clock[0] += seconds
            return method(*args, **kwargs)

        return call

    monkeypatch.setattr("rankbuffer_trl.training._scorer.time", SimpleNamespace(perf_counter=lambda: clock[0]))
    made = scorer(scripted_judge(by_number))
    monkeypatch.setattr(made.store, "load", spending(10, made.store.load))
    monkeypatch.setattr(made.store, "commit", spending(1, made.store.commit))
    made.begin([group(numbers(), "? ?", 0)], 0)
    clock[0] += 100
    assert made.score([group(numbers(), "50 5", 0)], 0).seconds == 11
    assert made.score([group(numbers(), "50 5", 1)], 1).seconds == 11, "that of a step before is not counted"


# Who asks and who waits


def test_score_puts_questions_group_by_group_in_the_order_of_their_rollouts(scorer):
    lines = ["50 51 5 52", "61 60 15 -", "70 3 71 2"]
    made = scorer(scripted_judge(by_number))
    made.score([group(numbers(id), line, 0) for id, line in zip("abc", lines, strict=True)], 0)
    put = [messages[0]["content"] for messages in made.judge.client.seen]
    candidates = [text for prompt in put for text in re.findall(r"\n\nCANDIDATE\n(\d+)\n", prompt)]
    assert candidates == " ".join(lines).replace(" -", "").split()
    ranked = [re.findall(r"^\[R\d+\]\n(\d+)$", prompt, re.MULTILINE) for prompt in put]
    assert [found for found in ranked if found] == [["50", "51", "52"], ["61", "60"], ["3", "2"], ["70", "71"]]


def test_score_of_a_group_does_not_wait_for_another(scorer):
    b_is_ranked, log = asyncio.Event(), []

    async def before(asked):
        if asked.question.query_id == "a" and "\n\nCANDIDATE\n50\n" in asked.prompt:
            await asyncio.wait_for(b_is_ranked.wait(), 20)

    async def after(asked, reply):
        log.append((asked.question.query_id, asked.question.kind))
        if log[-1] == ("b", "fine"):
            b_is_ranked.set()
        return reply

    made = scorer(Judge(Fake(before=before, after=after), guard=False))
    made.score([group(numbers(id), "50 51 5", 0) for id in "ab"], 0)
    assert log[-3:] == [("b", "fine"), ("a", "insert"), ("a", "fine")]


@pytest.mark.parametrize("method", [RankBuffer(), RankBuffer(bootstrap=True), RankBuffer(fine=False)], ids=repr)
def test_score_does_not_depend_on_the_order_of_answers(scorer, method):
    generator = random.Random(1)
    steps = [
        [group(numbers(id), " ".join(str(generator.randrange(60)) for _ in range(8)), step, step) for id in "abc"]
        for step in range(3)
    ]
    found = []
    for seed in range(3):
        made = scorer(Judge(Fake(failing_for("7", "21"), before=shuffled(seed)), guard=False), method, max_failures=1)
        outcomes = [made.score(groups, step) for step, groups in enumerate(steps)]
        calls = [[replace(call, seconds=0.0) for call in outcome.calls] for outcome in outcomes]
        rows = list(made.store.rows("SELECT step, query_id, kind, outcome, error FROM calls"))
        found.append(([outcome.scores for outcome in outcomes], calls, rows, contents(made.store)))
    assert any(reward is not None for score in found[0][0][2] for reward in score.rewards)
    assert found[1:] == found[:1] * 2


# What a step says of itself


def anchors(sources: str) -> AnchorBuffer:
    return AnchorBuffer(tuple(Anchor(str(i), str(i), source, 0) for i, source in enumerate(sources.split())))


def test_step_metrics_of_a_step_made_by_hand():
    before, after = anchors("initial " * 5), anchors("left initial initial initial refine right")
    scores = [
        GroupScore((-1.0, 0.5, 0.5, None), ((1, 2),), {1: 0, 2: 5}, True, before, after),
        GroupScore((-1.0, 0.0, 1.0, 0.5), (), {0: 1, 1: 2, 2: 4, 3: 5}, False, before, anchors("bootstrap right")),
        GroupScore((None, None, -1.0, -1.0)),
    ]
    groups = [group(numbers(), line, 0) for line in ("- 1 2 3", "1 2 3 4", "1 2 - -")]
    calls = [
        Call("rankbuffer", "insert", "n", "http://a", "parsed", 2, Usage(100, 60, 7), Usage(150, 60, 9), 0.5),
        Call("rankbuffer", "fine", "n", "http://b", "malformed", 3, Usage(), Usage(300, 0, 30), 0.5, "no"),
    ]
    metrics = step_metrics(groups, scores, calls, 1.5, 0.5)
    empty = step_metrics([group(numbers(), "1 1", 0)], [GroupScore((0.0, 1.0))], [])
    assert "rollouts/distinct" not in step_metrics([group(numbers(), "- -", 0)], scores[2:], [])
    assert empty.pop("rollouts/distinct") == 0.5
    assert not any(empty.values()) and empty.keys() == {name for name in metrics if name[:2] in ("ra", "ju")}
    sources = dict(initial=1.5, bootstrap=0.5, left=0.5, right=1, refine=0.5, selected=0, candidate=0)
    places = dict(below=1, quarter1=1, quarter2=1, quarter3=0, quarter4=1, above=2)
    shares = dict(fine_ranked_groups=1 / 3, ties=(2 / 4 + 0 + 2 / 4) / 3, unscored=3 / 12, empty=3 / 12)
    judge = dict(calls=1, failures=1, attempts=5, prompt_tokens=100, cached_tokens=60, completion_tokens=7)
    judge |= dict(spent_tokens=489, seconds=1.5, hidden=0.5)
    expected = {"buffer/size": 4, **{f"buffer/{name}": value for name, value in sources.items()}}
    expected |= {f"insert/{name}": count / 6 for name, count in places.items()}
    expected["rollouts/distinct"] = 1
    expected |= {f"rank/{name}": share for name, share in shares.items()}
    expected |= {f"judge/{name}": value for name, value in judge.items()}
    assert metrics == pytest.approx(expected)
    assert step_metrics(groups, scores, calls, update=False)["buffer/size"] == 5


def test_placement_columns_name_position_and_tier():
    before = anchors("initial " * 3)
    placed = GroupScore((-1.0, 0.0, 0.0, 1.0, None), ((0,), (1, 2), (3,)), {0: 0, 1: 1, 2: 1, 3: 3}, before=before)
    assert placement_columns([placed, GroupScore((-1.0, 1.0), ((0,), (1,)))]) == {
        "position": [0, 1, 1, 3, None, None, None],
        "tier": [0, 1, 1, 2, None, 0, 1],
    }
