"""The judge: its one seam, the ledger, and the HTTP path over real sockets. Faults are in `test_faults.py`."""

import asyncio
import json
from collections.abc import Iterator
from dataclasses import dataclass, replace
from urllib.parse import urlsplit

import pytest
from aiohttp import web
from conftest import ScriptedClient, ask, ask_all, scripted_judge, unreachable
from helpers.judges import Fake, shuffled
from helpers.servers import GOOD, completion, served

from rankbuffer_tools.rubric_server import make_app
from rankbuffer_trl.groups import Query, Rollout, Rubric
from rankbuffer_trl.judge import Call, Judge, JudgeError, RubricJudge, TransportError, Usage
from rankbuffer_trl.judge import _openai_client as openai_client
from rankbuffer_trl.judge import insertion_question as coarse
from rankbuffer_trl.judge import ranking_question as fine
from rankbuffer_trl.judge._judge import arguments_of
from rankbuffer_trl.judge._openai_client import OpenAIClient


@pytest.fixture
def question(query):
    return coarse(query, ["bad", "good"], "The candidate.")


# The seam


def test_ask_returns_the_verdict_and_records_the_call(question):
    judge = Judge(ScriptedClient(lambda messages: "Sure:\n```json\n" + GOOD + "\n```"), method="my_method")
    verdict, call = ask(judge, question)
    assert verdict == 1
    assert call.seconds >= 0
    assert call == Call(
        "my_method", "insert", "tea", "scripted judge", "parsed", 1, (10, 4, 3), (10, 4, 3), call.seconds, ""
    )
    assert judge.client.seen == [question.chat(guard=True)], "the guard is on unless it is switched off"
    assert ask(scripted_judge(lambda messages: '{"position": 0}'), question)[0] == 0


def test_ask_puts_a_malformed_answer_again_with_its_fault_and_another_seed(question):
    answers, seeds = ["no idea", '{"position": 3}', GOOD], []

    async def note(asked):
        seeds.append(asked.seed)

    judge = Judge(Fake(lambda messages: answers[len(seeds) - 1], before=note), guard=False)
    verdict, call = ask(judge, question)
    assert verdict == 1
    assert (call.outcome, call.attempts, call.error) == ("parsed", 3, "")
    assert (call.usage, call.spent) == (Usage(10, 4, 3), Usage(30, 12, 9))
    first, second, third = judge.client.seen
    assert [message["role"] for message in third] == ["user", "assistant", "user"]
    assert [turns[0] for turns in (second, third)] == first * 2
    assert second[1]["content"] == "no idea"
    assert "exactly one flat JSON object" in second[2]["content"]
    assert third[1]["content"] == '{"position": 3}'
    assert "`position` must be an integer from 0 through 2, not 3" in third[2]["content"]
    assert len(set(seeds)) == 3


def test_ask_returns_none_after_max_attempts_malformed_answers(question):
    for most in (1, 2, 3):
        judge = scripted_judge(lambda messages: "no", max_attempts=most)
        verdict, call = ask(judge, question)
        assert verdict is None
        assert (call.outcome, call.attempts, call.usage) == ("malformed", most, Usage())
        assert call.spent == Usage(10 * most, 4 * most, 3 * most)
        assert "flat JSON object" in call.error
        assert len(judge.client.seen) == most


@pytest.mark.parametrize(("answered", "spent"), [(0, Usage()), (1, Usage(10, 4, 3))])
def test_ask_returns_none_when_the_judge_is_unreachable_and_counts_what_was_answered(question, answered, spent):
    judge = scripted_judge(lambda messages: "no" if len(judge.client.seen) <= answered else unreachable(messages))
    verdict, call = ask(judge, question)
    assert verdict is None
    assert (call.outcome, call.attempts, call.usage, call.spent) == ("unreachable", answered + 1, Usage(), spent)
    assert call.error == "connection refused"


def hidden(call: Call) -> tuple:
    """All of a call but its time."""
    return (call.query_id, call.kind, call.outcome, call.attempts, call.usage, call.spent, call.error)


def test_drain_does_not_tell_who_answered_or_failed_first():
    queries = [Query(id, [{"role": "user", "content": id}], (Rubric("Is good.", 1),)) for id in ("b", "a", "c")]
    questions = [coarse(query, ["x", "y"], "word " * i) for i in range(6) for query in queries]
    questions += [fine(query, [Rollout(0, "x"), Rollout(1, "y")]) for query in queries]

    def answer(messages):
        if "CANDIDATES" in messages[0]["content"]:
            return '{"order": [1, 0]}'
        words = messages[0]["content"].count("word")
        return TransportError(f"cause {words}") if words > 2 else json.dumps({"position": words % 3})

    ledgers = []
    for seed in range(5):
        judge = Judge(Fake(answer, before=shuffled(seed)))
        ask_all(judge, questions)
        ledgers.append([hidden(call) for call in judge.drain()])
        assert judge.drain() == []
    assert len(ledgers[0]) == len(questions)
    assert ledgers[1:] == ledgers[:1] * 4
    assert {call[-1] for call in ledgers[0]} == {"", "cause 3", "cause 4", "cause 5"}


def test_on_call_is_told_of_every_call_of_its_asker(query):
    told = []
    judge = scripted_judge(lambda messages: GOOD if "good one" in messages[0]["content"] else "no", max_attempts=2)
    asker = judge.for_method("my_method", told.append)
    assert ask_all(asker, [coarse(query, ["x", "y"], text) for text in ("a good one", "another one")]) == [1, None]
    assert {(call.method, call.outcome, call.failed, call.attempts) for call in told} == {
        ("my_method", "parsed", False, 1),
        ("my_method", "malformed", True, 2),
    }
    assert told == asker.calls and judge.calls == []
    assert judge.client.seen[0] == coarse(query, ["x", "y"], "a good one").chat(guard=False)


def test_on_call_that_raises_ends_all_questions_and_what_was_sent_is_recorded(query):
    """One of those that wait was sent, and the other waits for its turn."""

    def stop(call):
        raise JudgeError("enough")

    async def wait(asked):
        place = int(asked.prompt.partition("\ncandidate ")[2][0])
        asked.tally.attempts += place == 1
        if place:
            await asyncio.Event().wait()

    judge = Judge(Fake(lambda messages: GOOD, before=wait), on_call=stop)
    with pytest.raises(ExceptionGroup) as error:
        ask_all(judge, [coarse(query, ["x", "y"], f"candidate {i}") for i in range(3)])
    assert [str(each) for each in error.value.exceptions] == ["enough"]
    assert [(call.outcome, call.attempts) for call in judge.calls] == [("parsed", 1), ("cancelled", 1)]
    assert not any(call.failed for call in judge.calls)


def test_first_question_leaves_the_ledger_as_it_is(question):
    judge = scripted_judge(lambda messages: GOOD)

    async def run():
        await judge.first_question(question)
        assert judge.calls == []
        await judge.ask(question)
        await judge.first_question(question)

    asyncio.run(run())
    assert len(judge.client.seen) == 3
    assert len(judge.drain()) == 1


@pytest.mark.parametrize(
    ("answer", "fragments"),
    [
        (unreachable, ["unreachable", "connection refused", "judge_url", "judge_model"]),
        (lambda messages: "Hello!", ["malformed", "flat JSON object", "asked 3 times", "instruction-tuned"]),
    ],
)
def test_first_question_names_endpoint_and_cause(question, answer, fragments):
    judge = scripted_judge(answer)
    with pytest.raises(JudgeError) as error:
        asyncio.run(judge.first_question(question))
    assert [fragment for fragment in ["scripted judge", *fragments] if fragment not in str(error.value)] == []
    assert judge.drain() == []


def test_first_question_asks_for_a_server_only_where_there_is_one(query):
    async def fail(asked):
        raise TransportError("a bug")

    for client in (RubricJudge(), Fake(before=fail)):  # the embedded judge has nothing to read
        with pytest.raises(JudgeError, match=r"Last cause: .* This judge asks no server: ") as error:
            asyncio.run(Judge(client).first_question(coarse(replace(query, rubrics=()), ["bad", "good"], "Hm.")))
        assert "Is the server up" not in str(error.value)


@dataclass
class Own:
    """A client with an argument."""

    table: dict


def test_arguments_of_a_client_leave_out_keys_that_json_cannot_hold():
    assert arguments_of(Own({("a", "b"): 1, "lock": object()})) == {"table": {"lock": "object"}}


# Over HTTP


@pytest.fixture(scope="module")
def rubric_server() -> Iterator[str]:
    with served(make_app()) as address:
        yield address + "/v1"


@pytest.mark.parametrize("concurrency", [1, 16])
def test_served_judge_answers_like_the_embedded_one(howto, rubric_server, concurrency):
    questions = []
    for row in howto[:6]:
        query = Query(row["query_id"], row["prompt"], tuple(Rubric(**rubric) for rubric in row["rubrics"]))
        texts = row["responses"]
        questions += [coarse(query, texts[::2], text, content) for text in texts for content in (True, False)]
        questions.append(fine(query, [Rollout(i, text) for i, text in enumerate(reversed(texts))]))
    embedded = Judge(RubricJudge())
    remote = Judge(OpenAIClient(rubric_server, RubricJudge.model, concurrency=concurrency))
    verdicts = ask_all(embedded, questions)
    assert None not in verdicts
    assert ask_all(remote, questions) == verdicts
    calls = embedded.drain()
    answered = remote.drain()
    assert [hidden(call) for call in answered] == [hidden(call) for call in calls]
    assert {call.server for call in answered} == {urlsplit(rubric_server).netloc}
    assert all(call.usage.prompt > 50 and call.usage.completion > 2 for call in calls)


def test_served_judge_names_an_unknown_model_and_a_question_that_it_cannot_read(query, question, rubric_server):
    unreadable = coarse(Query("why", query.prompt, (Rubric("Explains why.", 3),)), ["a", "b"], "c")
    for model, asked, code, part in (
        ("no-such-model", question, 404, "no-such-model"),
        (RubricJudge.model, unreadable, 400, "Explains why"),
    ):
        verdict, call = ask(Judge(OpenAIClient(rubric_server, model, max_retries=2)), asked)
        assert verdict is None
        assert (call.outcome, call.attempts) == ("unreachable", 1)
        assert call.error.startswith(f"HTTP {code}") and part.lower() in call.error.lower()
    verdict, call = ask(Judge(RubricJudge()), unreadable)
    assert verdict is None
    assert call.outcome == "unreachable" and "explains why" in call.error.lower()


def test_client_has_as_many_requests_in_flight_as_allowed(fault, query, monkeypatch):
    """The limit of aiohttp's connection pool is 100 unless told otherwise. Faults give their slots back."""
    full, questions = asyncio.Barrier(120), [coarse(query, ["a", "b"], str(i)) for i in range(240)]

    async def answer(request: web.Request, n: int) -> web.Response:
        await full.wait()  # so that what is allowed is in flight at once, time and again
        return completion(GOOD)

    assert ask_all(fault.judge(answer, 0, concurrency=120), questions) == [1] * len(questions)
    sent, most = [], []

    async def post(*args, **kwargs):
        sent.append(args)
        most.append(len(sent))
        await asyncio.sleep(0)
        sent.pop()
        raise openai_client.APIConnectionError(request=openai_client.Request("POST", fault.url))

    for concurrency in (1, 4):
        judge = fault.judge(answer, 0, concurrency=concurrency)
        monkeypatch.setattr(judge.client._client, "post", post)
        assert ask_all(judge, questions[:12]) == [None] * 12 and max(most) == concurrency


@pytest.mark.parametrize(("limit", "connections"), [(0.0, 3), (60.0, 1)])
def test_client_uses_no_connection_again_after_its_idle_limit(fault, query, monkeypatch, limit, connections):
    """A server that drops idle connections would lose a request that is sent just then."""
    peers = []

    def answer(request: web.Request, n: int) -> web.Response:
        peers.append(request.transport.get_extra_info("peername"))
        return completion(GOOD)

    async def one_after_the_other(judge):
        answers = [await judge.ask(coarse(query, ["a", "b"], str(i))) for i in range(3)]
        await judge.client.close()
        return answers

    assert openai_client.IDLE_SECONDS < 5  # after which vLLM's server drops one
    monkeypatch.setattr(openai_client, "IDLE_SECONDS", limit)
    assert asyncio.run(one_after_the_other(fault.judge(answer, 0))) == [1] * 3
    assert len(peers) == 3 and len(set(peers)) == connections
