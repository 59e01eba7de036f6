"""Many questions at once, requests that nobody waits for any more, and servers that refuse or die."""

import asyncio
import re
from concurrent.futures import ThreadPoolExecutor
from urllib.parse import urlsplit

import pytest
from vllm_server import CONTEXT, ask, until

from rankbuffer_trl.groups import RolloutGroup
from rankbuffer_trl.judge import Judge, JudgeError, insertion_question
from rankbuffer_trl.judge._openai_client import OpenAIClient
from rankbuffer_trl.rewards._rankbuffer import RankBuffer
from rankbuffer_trl.store import BufferStore
from rankbuffer_trl.training._first import first_question
from rankbuffer_trl.training._scorer import GroupScorer


@pytest.fixture
def endless(server) -> dict:
    """Settings for answers that fill the context, which takes many times as long as a test waits."""
    free_tokens = min(server.context, CONTEXT) - 2000
    return {"decoding": "none", "free_tokens": free_tokens, "request": {"ignore_eos": True}, "timeout": 3600.0}


def questions(texts, count: int) -> list:
    return [insertion_question(texts.query(), texts.texts(4), texts.text(15)) for _ in range(count)]


def group(texts) -> RolloutGroup:
    return RolloutGroup(texts.query(), texts.rollouts(8), step=0, epoch=0)


@pytest.fixture
def scorer(judge, tmp_path):
    """Makes scorers behind a judge with these settings, and closes them."""
    made = []

    def make(step_timeout: float | None = None, **settings) -> GroupScorer:
        store = BufferStore(tmp_path / "buffers.sqlite")
        made.append(GroupScorer(RankBuffer(), judge(**settings), store, step_timeout=step_timeout))
        return made[-1]

    yield make
    for each in made:
        each.close()


@pytest.mark.parametrize("concurrency", [8, 64])
def test_64_questions_at_once_answer_within_the_limit(server, judge, texts, concurrency):
    before = server.counters()
    asked, seen = questions(texts, 64), []

    async def run():
        one = judge(decoding="regex", concurrency=concurrency)
        try:
            answers = asyncio.create_task(one.ask_all(asked))
            while not answers.done():
                seen.append(await asyncio.to_thread(lambda: server.in_flight))
            return await answers
        finally:
            await one.client.close()

    verdicts = asyncio.run(run())
    assert None not in verdicts
    server.since(before, 64)
    assert 0 < max(seen) <= concurrency


def test_cancelled_questions_do_not_run_to_their_end(server, judge, texts, endless):
    before = server.counters()
    one = judge(**endless)

    async def run():
        asked = asyncio.create_task(one.ask_all(questions(texts, 16)))
        await asyncio.to_thread(until, lambda: server.in_flight == 16, "16 requests in flight")
        asked.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asked
        await asyncio.to_thread(server.since, before, 0)
        await one.client.close()

    asyncio.run(run())
    assert [call.outcome for call in one.drain()] == ["cancelled"] * 16


def test_a_step_that_takes_too_long_leaves_nothing_running(server, scorer, texts, endless):
    before = server.counters()
    scorer = scorer(step_timeout=2.0, **endless)
    with pytest.raises(JudgeError, match="did not finish a step within judge_step_timeout=2 s: 0 judgments") as error:
        scorer.score([group(texts)], step=0)
    assert f"{server.model} at {server.url}" in str(error.value)
    server.since(before, requests=0)
    assert {row[0] for row in scorer.store.rows("SELECT outcome FROM calls")} == {"cancelled"}
    assert scorer.store.last_step() is None


def test_the_scorer_scores_again_after_a_step_that_took_too_long(scorer, texts, endless):
    late = group(texts)
    with pytest.raises(JudgeError):
        scorer(step_timeout=1.0, **endless).score([late], step=0)
    scorer = scorer(decoding="regex")
    (score,) = scorer.score([late], step=0).scores
    assert None not in score.rewards
    assert scorer.store.load(late.query.id) == score.after


def test_another_model_name_is_refused_once(server, texts):
    client = OpenAIClient(server.url, "nobody")
    (verdict,), (call,) = ask(Judge(client), questions(texts, 1))
    assert verdict is None
    assert (call.outcome, call.attempts, call.server) == ("unreachable", 1, urlsplit(server.url).netloc)
    assert "HTTP 404" in call.error
    assert "nobody" in call.error


def test_a_prompt_longer_than_the_context_is_refused_once(server, judge, texts):
    quarters = [texts.text(server.context // 4) for _ in range(4)]  # one text alone would be cut by the guard
    too_long = insertion_question(texts.query(), quarters, texts.text(8))
    (verdict,), (call,) = ask(judge(decoding="regex"), [too_long])
    assert verdict is None
    assert (call.outcome, call.attempts) == ("unreachable", 1)
    assert re.search(rf"HTTP 400: .*context length.* {server.context} tokens", call.error)


def test_a_server_that_dies_ends_the_step_with_its_cause(doomed_server, scorer, texts, endless):
    scorer = scorer(max_retries=1, **endless)
    with ThreadPoolExecutor() as pool:
        step = pool.submit(scorer.score, [group(texts)], 0)
        until(lambda: doomed_server.in_flight == 8, "8 requests in flight")
        doomed_server.crash()
        with pytest.raises(JudgeError) as died:
            step.result()
    assert "unreachable), more than judge_max_failures" in str(died.value)
    assert f"judge at {doomed_server.url}" in str(died.value)
    with pytest.raises(JudgeError, match=r"nothing was started. Outcome: unreachable.*[Cc]onnect.*Is the server up"):
        first_question(scorer, texts.query())
