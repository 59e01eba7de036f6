"""`GroupRanker`: a group of any program has the rewards of a training step, whatever arrives at once or again."""

import asyncio
import os
import random
import re
from types import SimpleNamespace
from unittest.mock import AsyncMock

import numpy as np
import pytest
from conftest import ROOT, by_number, group, numbers, run_program, scripted_judge
from helpers.contents import contents
from helpers.judges import Fake
from helpers.programs import blocks

from rankbuffer_trl import GroupRanker, rank_texts
from rankbuffer_trl.data._queries import GENERIC_RUBRICS, DataError, prompt_id
from rankbuffer_trl.errors import SettingsError
from rankbuffer_trl.judge import Judge, JudgeError, RubricJudge
from rankbuffer_trl.judge._errors import TransportError
from rankbuffer_trl.rewards._method import load_method
from rankbuffer_trl.rewards._rankbuffer import RankBuffer
from rankbuffer_trl.store import StoreError


def run(ranker: GroupRanker, *visits: tuple):
    """Rank visits at once, each a query, texts in one line with `-` for an empty one, and perhaps a step."""

    async def play():
        async with ranker:
            ranks = (ranker.rank(query, line.replace("-", "").split(" "), *step) for query, line, *step in visits)
            scores = await asyncio.gather(*ranks, return_exceptions=True)
            return scores, contents(ranker.store), ranker.store.spent

    return asyncio.run(play())


def test_rank_warns_once_of_thoughts_that_the_judge_reads(caplog):
    visits = ("How?", "<think>a</think>b c <think>d"), ("Why?", "<think>a <think>d")
    run(GroupRanker("listwise", RubricJudge()), *visits)
    run(GroupRanker("listwise", RubricJudge(), format_check="(?P<answer>.*)"), *visits)
    assert caplog.text.count("begin with a tag") == 1


@pytest.mark.parametrize("name", ["rankbuffer", "listwise"])
def test_rank_at_once_gives_and_leaves_what_training_steps_do(scorer, name):
    luck, method = random.Random(0), load_method(name, {}, 42)
    line = lambda: " ".join(str(n) if n else "-" for n in luck.choices(range(60), k=5))  # noqa: E731
    visits = [(luck.choice("abc"), line()) for _ in range(24)]
    oracle, known, epochs = scorer(scripted_judge(by_number), method), [], dict.fromkeys("abc", -1)
    for id, line in visits:
        epochs[id] += 1
        known += oracle.score([group(numbers(id), line, epochs[id], epochs[id])], epochs[id]).scores
    found = run(GroupRanker(name, scripted_judge(by_number)), *((numbers(id), line) for id, line in visits))
    assert found == (known, contents(oracle.store), oracle.store.spent)


def test_rank_knows_a_visit_that_is_recorded_also_in_a_store_that_is_opened_again(tmp_path):
    def ranker(judge=None) -> GroupRanker:
        return GroupRanker(RankBuffer(), judge or scripted_judge(by_number), tmp_path / "live.sqlite")

    query, line = numbers(), "5 - 50 15"
    (first, again, second), left, _ = run(ranker(), (query, line, 3), (query, line, 3), (query, "6 7 8 9"))
    assert again.rewards == first.rewards and again.order == first.order and again.positions == first.positions
    assert [row[:2] for row in left["groups"]] == [("n", 3), ("n", 4)]
    silent = scripted_judge(lambda messages: pytest.fail("the judge is asked again"))
    known, after, _ = run(ranker(silent), (query, "5 - 50 15", 3), (query, "6 7 8 9", 4))
    assert [score.rewards for score in known] == [first.rewards, second.rewards] and after == left
    others = (("5 - 50 16", 3), ("5 - 50 15 -", 3), ("5 - 50", 3), ("1 2", 2), ("5 - 50 15", 4))
    refused, after, _ = run(ranker(silent), *((query, *other) for other in others))
    for (_, step), error in zip(others, refused, strict=True):
        assert isinstance(error, StoreError) and f"other texts of step {step} are refused" in str(error)
    assert after == left


@pytest.mark.parametrize(
    ("texts", "step", "said"),
    [(["5", None], 0, "text 1 must be a string"), ({"a": "5"}, 0, "must be a list"), (["5"], 1.5, "a whole number")],
)
def test_rank_refuses_what_is_no_text_and_no_step_before_it_asks(texts, step, said):
    async def play():
        async with GroupRanker("rankbuffer", scripted_judge(lambda _: pytest.fail("the judge is asked"))) as ranker:
            await ranker.rank(numbers(), texts, step)

    with pytest.raises(DataError, match=said):
        asyncio.run(play())


def test_rank_takes_a_step_of_numpy():
    _, left, _ = run(GroupRanker("rankbuffer", scripted_judge(by_number)), (numbers(), "5 15", np.int64(5)))
    assert [row[:2] for row in left["groups"]] == [("n", 5)]


def test_rank_in_another_loop_or_process_is_refused(monkeypatch):
    local = GroupRanker("listwise", RubricJudge())
    assert [
        asyncio.run(local.rank("How?", ["a", "b"])).rewards for _ in range(2)
    ]  # no connection, so any loop will do
    server = GroupRanker("listwise", {"judge_url": "http://127.0.0.1:9/v1", "judge_model": "m"})
    for ranker, place in (server, "event loop"), (local, "process"):
        if ranker is server:
            closed = asyncio.new_event_loop()
            closed.close()
            ranker._place = closed, os.getpid()
        else:
            monkeypatch.setattr(os, "getpid", lambda: -1)
        with pytest.raises(SettingsError, match=f"another {place}.*other_trainers"):
            asyncio.run(ranker.rank("How?", ["a", "b"]))


def test_rank_judges_queries_at_once():
    both = asyncio.Barrier(2)
    judge = Judge(Fake(before=lambda asked: asyncio.wait_for(both.wait(), 20)), guard=False)
    scores, *_ = run(GroupRanker(RankBuffer(), judge), (numbers("a"), "5"), (numbers("b"), "15"))
    assert [score.positions for score in scores] == [{0: 0}, {0: 1}]


def test_rank_counts_a_failure_never_as_a_score():
    def lost(messages):
        return TransportError("gone") if "\nlost" in messages[0]["content"] else by_number(messages)

    ranker = GroupRanker(RankBuffer(), scripted_judge(lost, max_attempts=1))
    a, b = numbers("a"), numbers("b")
    (some, many, later), left, _ = run(ranker, (a, "5 15 25 lost"), (b, "5 lost lost"), (b, "5 15 -"))
    assert some.rewards == (-1.0, 0.0, 1.0, None)
    assert isinstance(many, JudgeError) and "rank it again once the judge answers" in str(many)
    assert "checkpoint" not in str(many) and later.rewards == (0.0, 1.0, -1.0)
    assert [row[:2] for row in left["groups"]] == [("a", 0), ("b", 0)]
    assert sum("unreachable" in row for row in left["calls"]) == 2, "the same text twice is one question"


def test_rank_takes_a_prompt_a_row_and_settings():
    prompt = [{"role": "user", "content": "Which?"}]
    ranker = GroupRanker("listwise", {"judge_max_failures": 0.5}, format_check="think")
    assert ranker.scoring.max_failures == 0.5 and isinstance(ranker.scoring.judge.client, RubricJudge)
    ranker.scoring.judge.client.close = AsyncMock()
    scores, left, _ = run(ranker, *(("Which?" if i else prompt, "<think>a</think>b c") for i in range(2)))
    assert [row[:2] for row in left["groups"]] == [(prompt_id(prompt), 0), (prompt_id(prompt), 1)]
    assert {row[-1] for row in left["responses"]} == {"b"}, "the judge sees the answer alone"
    assert scores[0].rewards == (1.0, -1.0) and ranker.scoring.judge.client.close.await_count == 1
    judge = scripted_judge(by_number)
    judge.client.close = AsyncMock(side_effect=AssertionError("it is not the ranker's"))
    assert asyncio.run(rank_texts("Which?", ["7", "9", "8"], judge)).rewards == (-1.0, 1.0, 0.0)
    assert all(rubric.text in judge.client.seen[0][0]["content"] for rubric in GENERIC_RUBRICS)


def test_rank_refuses_in_one_line_what_it_cannot_rank():
    for arguments, words in (
        (("best", RubricJudge()), "there is no reward method 'best'"),
        (("listwise", "http://judge"), "a str is no judge"),
        (("listwise", {"url": 1}), "judge has no setting 'url'; it has"),
        (("listwise", {"judge_modle": 1}), "judge has no setting 'judge_modle' (did you mean judge_model or"),
        ((RankBuffer(), RubricJudge(), None, {"k0": 3}), "method_args is for a method that is named"),
    ):
        with pytest.raises(SettingsError, match=re.escape(words)):
            GroupRanker(*arguments)
    query, row = numbers(), {"prompt": "Which?", "responses": ["1"]}
    refused, left, _ = run(GroupRanker(RankBuffer(), RubricJudge()), (row, "5 6"), ("", "5 6"), (query, "5", -1))
    for error, words in zip(refused, ("must hold at least 4", "must be non-empty", "at least 0, got -1"), strict=True):
        assert isinstance(error, DataError) and words in str(error)
    assert not any(left.values())
    for texts in ("5 6", []):
        with pytest.raises(DataError, match="must be a list with at least one text"):
            asyncio.run(GroupRanker(RankBuffer(), RubricJudge()).rank(query, texts))


def test_the_functions_that_the_page_shows_rank_groups(tmp_path, monkeypatch, howto):
    monkeypatch.chdir(tmp_path)
    names: dict = {}
    for code in blocks("docs/other_trainers.md", "python"):
        exec(re.sub("judge = {.*}", "judge = {}", code), names)  # the embedded judge
    texts = [f"<think>a plan</think>{text}" for text in howto[0]["responses"][1::2]]
    samples = [SimpleNamespace(response=text, metadata={"row": howto[0]}, group_index=5) for text in texts]
    assert names["loop"].run_until_complete(names["rank_group"](None, samples)) == [-1.0, 0.0, 1.0]
    batch = [(texts[1], howto[0]), ("<think>", howto[1]), (texts[0], howto[0]), (texts[2], howto[1])]
    rewards = names["compute_score"](None, [text for text, _ in batch], None, [{"row": row} for _, row in batch])
    assert rewards == [1.0, -1.0, -1.0, 1.0]
    names["loop"].run_until_complete(names["ranker"].close())


@pytest.mark.slow
def test_the_program_with_a_loop_of_its_own_prints_rewards():
    lines = run_program(ROOT / "examples" / "own_loop.py", timeout=60).splitlines()
    assert len(lines) == 4
    assert all(re.fullmatch(r"visit \d of [\w-]+: ([+-]\d\.\d\d, ){3}-1\.00", line) for line in lines)
