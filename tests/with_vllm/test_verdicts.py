"""Do the forms that we impose hold on a real decoder? And what does a judge without any sense answer without them?"""

import asyncio
import re
from collections import Counter
from dataclasses import replace

import pytest
from conftest import Texts
from vllm_server import ask

from rankbuffer_tools.train.preflight import MASKED
from rankbuffer_trl.judge import (
    Question,
    VerdictError,
    insertion_question,
    pairwise_question,
    pointwise_question,
    ranking_question,
)
from rankbuffer_trl.judge._ledger import Tally
from rankbuffer_trl.judge._verdicts import GRAMMAR_LIMIT

ANCHORS = range(2, 13)
CANDIDATES = (2, 3, 4, 5, 6, 7, 8, 10)
TIMES = 3
GREEDY = {}
SAMPLED = {"temperature": 1, "seed": None}  # sampling with a seed ends vLLM 0.31's CPU engine


def coarse(texts: Texts) -> list[Question]:
    """Insertions among 2 to 12 anchors."""
    return [insertion_question(texts.query(), texts.texts(K), texts.text(15)) for K in ANCHORS for _ in range(TIMES)]


def fine(texts: Texts) -> list[Question]:
    """Orders of 2 to 10 candidates."""
    return [ranking_question(texts.query(), texts.rollouts(n)) for n in CANDIDATES for _ in range(TIMES)]


@pytest.mark.parametrize("request_fields", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("make", [coarse, fine])
def test_regex_gives_a_whole_valid_verdict_at_once(server, judge, texts, make, request_fields):
    before, questions = server.counters(), make(texts)
    judge = judge(max_attempts=1, decoding="regex", request=request_fields)
    verdicts, calls = ask(judge, questions)
    assert [call.error for call in calls if call.outcome != "parsed"] == []
    assert None not in verdicts
    assert server.since(before, len(questions)).cut_off == 0


def test_ids_that_do_not_count_from_zero_come_back(judge, texts):
    rollouts = [rollout for rollout in texts.rollouts(12) if rollout.id in (2, 5, 10, 11)]
    (verdict,), _ = ask(judge(max_attempts=1, decoding="regex"), [ranking_question(texts.query(), rollouts)])
    assert sorted(verdict) == [2, 5, 10, 11]


def test_above_the_grammar_limit_the_number_of_ids_is_right(server, client, texts):
    # Ids of one length: the token limit holds the longest permutation, which some other answer could exceed.
    question = ranking_question(texts.query(), texts.rollouts(10 + GRAMMAR_LIMIT + 1)[10:])
    before = server.counters()

    async def answers():
        regex = client(decoding="regex", request=SAMPLED)
        messages = [{"role": "user", "content": question.prompt()}]
        try:
            return [await regex.complete(messages, question=question, seed=seed, tally=Tally()) for seed in range(8)]
        finally:
            await regex.close()

    for text, *_ in asyncio.run(answers()):
        assert re.fullmatch(question.verdict.constraint["regex"], text)
        try:
            question.verdict.parse(text)
        except VerdictError as error:
            assert "exactly once" in str(error)
    assert server.since(before, 8).cut_off == 0


@pytest.mark.parametrize("decoding", ["regex", "json_schema", "none"])
@pytest.mark.parametrize("make", [coarse, fine])
def test_an_answer_is_a_verdict_or_malformed(judge, texts, note, make, decoding):
    questions = make(texts)
    verdicts, calls = ask(judge(max_attempts=1, decoding=decoding), questions)
    valid = sum(verdict is not None for verdict in verdicts)
    note(f"{decoding}, {make.__name__}: {valid} of {len(questions)} first answers valid")
    assert Counter(call.outcome for call in calls) == Counter(parsed=valid, malformed=len(questions) - valid)
    assert all(call.error for call in calls if call.failed)


@pytest.mark.parametrize("make", [coarse, fine])
def test_a_judge_without_sense_gives_no_verdict_where_none_is_imposed(random_judge, judge, texts, make):
    verdicts, calls = ask(judge(max_attempts=2, decoding="none"), make(texts))
    assert set(verdicts) == {None}
    assert {call.outcome for call in calls} == {"malformed"}
    assert all(call.attempts >= 2 for call in calls)  # more where a connection was lost


def test_a_schema_imposes_positions_if_its_white_space_is_bounded(random_judge, judge, texts):
    verdicts, _ = ask(judge(max_attempts=1, decoding="json_schema"), coarse(texts))
    assert None not in verdicts


@pytest.mark.parametrize("decoding", ["regex", "json_schema"])
def test_probabilities_come_with_every_verdict(judge, texts, decoding):
    """The server of these tests reports them after its grammar, so nothing is on an invalid answer."""
    pairs = [pairwise_question(texts.query(), texts.text(1), texts.text(2), tie=n % 2 > 0) for n in range(4)]
    ratings = [pointwise_question(texts.query(), texts.text(n), most=9 + n % 2) for n in range(4)]
    hard = [*pairs, *ratings, *coarse(texts)[::TIMES]]
    readings, calls = ask(judge(max_attempts=1, decoding=decoding), [replace(each, soft=True) for each in hard])
    assert [call.error for call in calls if call.outcome != "parsed"] == []
    for reading in readings:
        assert sum(reading.chances.values()) == pytest.approx(1)
        assert reading.outside < MASKED and reading.chances[reading.value] > 0, reading
        if reading.shared < MASKED:
            assert reading.value == max(reading.chances, key=reading.chances.get), "greedy"


def test_sampled_answers_stand_for_probabilities(judge, texts):
    question = replace(pairwise_question(texts.query(), texts.text(1), texts.text(2), tie=False), soft=True)
    calls = []
    for samples in (1, 5):
        (reading,), (call,) = ask(judge(max_attempts=1, decoding="regex", samples=samples), [question])
        calls.append(call)
        assert call.outcome == "parsed" and reading.outside < MASKED, call.error
    counts = [6 * chance - 0.5 for chance in reading.chances.values()]
    assert sum(counts) == pytest.approx(5) and counts == pytest.approx([round(count) for count in counts])
    once, often = (call.usage for call in calls)
    assert often.prompt == once.prompt and often.completion > 2 * once.completion
