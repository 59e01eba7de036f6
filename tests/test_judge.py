"""The judge: its one seam, the ledger, and the HTTP path over real sockets. Faults are in `test_faults.py`."""

import asyncio
import json
import random
import socket
from collections.abc import Callable, Iterator

import pytest
from aiohttp import web
from conftest import ScriptedClient, ask, ask_all, scripted_judge, unreachable
from helpers.http_server import served

from rankbuffer_trl.groups import Query, Rollout, Rubric
from rankbuffer_trl.judge import Call, Judge, JudgeError, RubricJudge, TransportError, Usage, openai_client
from rankbuffer_trl.judge import insertion_question as coarse
from rankbuffer_trl.judge import ranking_question as fine
from rankbuffer_trl.judge.openai_client import OpenAIClient
from rankbuffer_trl.judge.serve import make_app

GOOD = '{"position": 1}'


@pytest.fixture
def question(query):
    return coarse(query, ["bad", "good"], "The candidate.")


# The seam


def test_a_parsed_answer_is_the_verdict(question):
    client = ScriptedClient(lambda messages: "Sure:\n```json\n" + GOOD + "\n```")
    judge = Judge(client, method="my_method")
    verdict, call = ask(judge, question)
    assert verdict == 1
    assert call.seconds >= 0
    assert call == Call(
        "my_method", "insert", "tea", "scripted judge", "parsed", 1, (10, 4, 3), (10, 4, 3), call.seconds, ""
    )
    assert client.seen == [question.chat(guard=True)], "the guard is on unless it is switched off"


def test_a_malformed_answer_is_asked_again_with_its_fault(question):
    answers = ["no idea", '{"position": 3}', GOOD]
    judge = scripted_judge(lambda messages: answers[len(judge.client.seen) - 1])
    verdict, call = ask(judge, question)
    assert verdict == 1
    assert (call.outcome, call.attempts, call.error) == ("parsed", 3, "")
    assert call.usage == Usage(10, 4, 3)
    assert call.spent == Usage(30, 12, 9)
    first, second, third = judge.client.seen
    assert [message["role"] for message in third] == ["user", "assistant", "user"]
    assert [turns[0] for turns in (second, third)] == first * 2
    assert second[1]["content"] == "no idea"
    assert "exactly one flat JSON object" in second[2]["content"]
    assert third[1]["content"] == '{"position": 3}'
    assert "`position` must be an integer from 0 through 2, not 3" in third[2]["content"]


def test_each_repeat_has_its_own_seed(question):
    seeds = []

    class Client:
        name = "seeded"

        async def complete(self, messages, *, question, seed, tally):
            seeds.append(seed)
            return "no", Usage()

        async def close(self):
            pass

    ask(Judge(Client()), question)
    assert len(set(seeds)) == 3


@pytest.mark.parametrize("max_attempts", [1, 2, 3])
def test_malformed_answers_end_in_none_after_max_attempts(question, max_attempts):
    judge = scripted_judge(lambda messages: "no", max_attempts=max_attempts)
    verdict, call = ask(judge, question)
    assert verdict is None
    assert (call.outcome, call.attempts, call.usage) == ("malformed", max_attempts, Usage())
    assert call.spent == Usage(10 * max_attempts, 4 * max_attempts, 3 * max_attempts)
    assert "flat JSON object" in call.error
    assert len(judge.client.seen) == max_attempts


def test_an_unreachable_judge_gives_none_at_once(question):
    judge = scripted_judge(unreachable)
    verdict, call = ask(judge, question)
    assert verdict is None
    assert (call.outcome, call.attempts, call.usage, call.spent) == ("unreachable", 1, Usage(), Usage())
    assert call.error == "connection refused"
    assert len(judge.client.seen) == 1


def test_attempts_before_and_after_a_lost_connection_all_count(question):
    judge = scripted_judge(lambda messages: "no" if len(judge.client.seen) == 1 else unreachable(messages))
    verdict, call = ask(judge, question)
    assert verdict is None
    assert (call.outcome, call.attempts, call.usage, call.spent) == ("unreachable", 2, Usage(), Usage(10, 4, 3))


def test_position_zero_is_a_verdict(question):
    assert ask(scripted_judge(lambda messages: '{"position": 0}'), question)[0] == 0


class Crowd:
    """Answers in a seeded random order."""

    name = "crowd"

    def __init__(self, seed: int, answer: Callable[[str], str | Exception]):
        self.random = random.Random(seed)
        self.answer = answer

    async def complete(self, messages, *, question, seed, tally):
        tally.attempts += 1
        for _ in range(self.random.randrange(20)):
            await asyncio.sleep(0)
        prompt = messages[0]["content"]
        answer = self.answer(prompt)
        if isinstance(answer, Exception):
            raise answer
        return answer, Usage(len(prompt), 0, len(answer))

    async def close(self):
        pass


def hidden(call: Call) -> tuple:
    """All of a call but its time."""
    return (call.query_id, call.kind, call.outcome, call.attempts, call.usage, call.spent, call.error)


def test_the_ledgers_order_does_not_tell_who_answered_first():
    queries = [Query(id, [{"role": "user", "content": id}], (Rubric("Is good.", 1),)) for id in ("b", "a", "c")]
    questions = [coarse(query, ["x", "y"], "word " * i) for i in range(6) for query in queries]
    questions += [fine(query, [Rollout(0, "x"), Rollout(1, "y")]) for query in queries]

    def answer(prompt):
        if "CANDIDATES" in prompt:
            return '{"order": [1, 0]}'
        words = prompt.count("word")
        return TransportError("gone") if words == 2 else json.dumps({"position": words % 3})

    ledgers = []
    for seed in range(5):
        judge = Judge(Crowd(seed, answer))
        ask_all(judge, questions)
        ledgers.append([hidden(call) for call in judge.drain()])
        assert judge.drain() == []
    assert len(ledgers[0]) == len(questions)
    assert ledgers[1:] == ledgers[:1] * 4


def test_the_ledgers_order_of_failures_does_not_tell_who_failed_first(query):
    questions = [coarse(query, ["x", "y"], f"candidate {i}") for i in range(6)]

    def answer(prompt):
        return TransportError("cause " + prompt.partition("> candidate ")[2][0])

    ledgers = []
    for seed in range(5):
        judge = Judge(Crowd(seed, answer))
        ask_all(judge, questions)
        ledgers.append([call.error for call in judge.drain()])
    assert sorted(ledgers[0]) == [f"cause {i}" for i in range(6)]
    assert ledgers[1:] == ledgers[:1] * 4


def test_on_call_is_told_of_every_call(query):
    told = []
    judge = scripted_judge(
        lambda messages: GOOD if "good one" in messages[0]["content"] else "no", on_call=told.append
    )
    assert ask_all(judge, [coarse(query, ["x", "y"], text) for text in ("a good one", "another one")]) == [1, None]
    assert [(call.outcome, call.failed) for call in told] == [("parsed", False), ("malformed", True)]
    assert told == judge.calls


class Waiting:
    """Answers the first question; the others wait for ever: one of them sent, the last for its turn."""

    name = "waiting"

    async def complete(self, messages, *, question, seed, tally):
        place = int(messages[0]["content"].partition("> candidate ")[2][0])
        if place == 2:
            await asyncio.Event().wait()
        tally.attempts += 1
        if place == 1:
            await asyncio.Event().wait()
        await asyncio.sleep(0)  # so that all are put
        return GOOD, Usage(10, 4, 3)

    async def close(self):
        pass


def test_what_on_call_raises_ends_all_questions_and_what_was_sent_is_recorded(query):
    def stop(call):
        raise JudgeError("enough")

    judge = Judge(Waiting(), on_call=stop)
    with pytest.raises(ExceptionGroup) as error:
        ask_all(judge, [coarse(query, ["x", "y"], f"candidate {i}") for i in range(3)])
    assert [str(each) for each in error.value.exceptions] == ["enough"]
    assert [(call.outcome, call.attempts) for call in judge.calls] == [("parsed", 1), ("cancelled", 1)]
    assert not any(call.failed for call in judge.calls)


def test_preflight_of_a_good_judge_leaves_no_call(question):
    judge = scripted_judge(lambda messages: GOOD)
    asyncio.run(judge.first_question(question))
    assert len(judge.client.seen) == 1
    assert judge.drain() == []


@pytest.mark.parametrize(
    ("answer", "fragments"),
    [
        (unreachable, ["unreachable", "connection refused", "judge_url", "judge_model"]),
        (lambda messages: "Hello!", ["malformed", "flat JSON object", "asked 3 times", "instruction-tuned"]),
    ],
)
def test_preflight_names_endpoint_and_cause(question, answer, fragments):
    judge = scripted_judge(answer)
    with pytest.raises(JudgeError) as error:
        asyncio.run(judge.first_question(question))
    missing = [fragment for fragment in ["scripted judge", *fragments] if fragment not in str(error.value)]
    assert missing == []
    assert judge.drain() == []


def test_preflight_takes_no_earlier_call_out_of_the_ledger(question):
    judge = scripted_judge(lambda messages: GOOD)

    async def run():
        await judge.ask(question)
        await judge.first_question(question)

    asyncio.run(run())
    assert len(judge.drain()) == 1


def test_an_asker_has_a_ledger_a_method_and_a_watcher_of_its_own(question):
    told = []
    judge = scripted_judge(lambda messages: "no", max_attempts=2, guard=True, on_call=told.append)
    asker = judge.asker("my_method", told.append)
    assert ask(asker, question) == (None, told[0])
    assert (told[0].method, told[0].attempts, len(told)) == ("my_method", 2, 1)
    assert judge.client.seen[0] == question.chat(guard=True)
    assert judge.drain() == asker.drain() == []


def test_a_rubric_the_embedded_judge_cannot_read_is_no_crash(query):
    unreadable = Query("why", query.prompt, (Rubric("Explains why.", 3),), query.responses)
    verdict, call = ask(Judge(RubricJudge()), coarse(unreadable, ["a", "b"], "c"))
    assert verdict is None
    assert call.outcome != "parsed"
    assert "explains why" in call.error.lower()


# Over HTTP


@pytest.fixture(scope="module")
def rubric_server() -> Iterator[str]:
    with served(make_app()) as address:
        yield address + "/v1"


@pytest.mark.parametrize("concurrency", [1, 16])
def test_the_served_judge_answers_like_the_embedded_one(howto, rubric_server, concurrency):
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
    assert {call.server for call in answered} == {rubric_server}
    assert all(call.usage.prompt > 50 and call.usage.completion > 2 for call in calls)


def test_an_unknown_model_is_named(question, rubric_server):
    verdict, call = ask(Judge(OpenAIClient(rubric_server, "no-such-model", max_retries=2)), question)
    assert verdict is None
    assert (call.outcome, call.attempts) == ("unreachable", 1)
    assert call.error.startswith("HTTP 404")
    assert "no-such-model" in call.error


def test_a_question_the_served_judge_cannot_read_is_an_error(query, rubric_server):
    unreadable = Query("why", query.prompt, (Rubric("Explains why.", 3),), query.responses)
    verdict, call = ask(Judge(OpenAIClient(rubric_server, RubricJudge.model)), coarse(unreadable, ["a", "b"], "c"))
    assert verdict is None
    assert (call.outcome, call.attempts) == ("unreachable", 1)
    assert call.error.startswith("HTTP 400")


def test_preflight_names_the_address(question):
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))  # bound but not listening: refused, and nobody else gets the port
        url = f"http://127.0.0.1:{unused.getsockname()[1]}/v1"
        judge = Judge(OpenAIClient(url, "a-model", max_retries=0))
        with pytest.raises(JudgeError) as error:
            asyncio.run(judge.first_question(question))
    assert f"a-model at {url}" in str(error.value)
    assert "Connect" in str(error.value)
    assert judge.drain() == []


@pytest.mark.parametrize("concurrency", [1, 4, 8])
def test_never_more_requests_in_flight_than_allowed(query, concurrency):
    now, most, full = 0, 0, asyncio.Barrier(concurrency)

    async def chat(request):
        nonlocal now, most
        now += 1
        most = max(most, now)
        await full.wait()  # so that what is allowed is in flight at once, time and again
        await asyncio.sleep(0.01)  # ... and one more than that would be noticed
        now -= 1
        return web.json_response({"choices": [{"message": {"role": "assistant", "content": GOOD}}]})

    app = web.Application()
    app.router.add_post("/v1/chat/completions", chat)
    with served(app) as address:
        judge = Judge(OpenAIClient(address + "/v1", "m", concurrency=concurrency, timeout=10, max_retries=0))
        assert ask_all(judge, [coarse(query, ["a", "b"], str(i)) for i in range(16)]) == [1] * 16
    assert most == concurrency


def test_more_than_a_hundred_requests_can_be_in_flight(query):
    """The limit of aiohttp's connection pool is 100 unless told otherwise."""
    full = asyncio.Barrier(120)

    async def chat(request):
        await full.wait()
        return web.json_response({"choices": [{"message": {"role": "assistant", "content": GOOD}}]})

    app = web.Application()
    app.router.add_post("/v1/chat/completions", chat)
    with served(app) as address:
        judge = Judge(OpenAIClient(address + "/v1", "m", concurrency=120, timeout=20, max_retries=0))
        assert ask_all(judge, [coarse(query, ["a", "b"], str(i)) for i in range(120)]) == [1] * 120


@pytest.mark.parametrize(("limit", "connections"), [(0.0, 3), (60.0, 1)])
def test_a_connection_is_not_used_again_after_its_idle_limit(query, monkeypatch, limit, connections):
    """A server that drops idle connections would lose a request that is sent just then."""
    peers = []

    async def chat(request):
        peers.append(request.transport.get_extra_info("peername"))
        return web.json_response({"choices": [{"message": {"role": "assistant", "content": GOOD}}]})

    async def one_after_the_other(judge):
        answers = [await judge.ask(coarse(query, ["a", "b"], str(i))) for i in range(3)]
        await judge.client.close()
        return answers

    assert openai_client.IDLE_SECONDS < 5  # after which vLLM's server drops one
    monkeypatch.setattr(openai_client, "IDLE_SECONDS", limit)
    app = web.Application()
    app.router.add_post("/v1/chat/completions", chat)
    with served(app) as address:
        judge = Judge(OpenAIClient(address + "/v1", "m", timeout=10, max_retries=0))
        assert asyncio.run(one_after_the_other(judge)) == [1] * 3
    assert len(peers) == 3 and len(set(peers)) == connections


def test_a_failed_question_frees_its_slot(question):
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{unused.getsockname()[1]}/v1"
        judge = Judge(OpenAIClient(url, "m", max_retries=0, concurrency=1))
        assert ask_all(judge, [question] * 5) == [None] * 5
    assert [call.attempts for call in judge.drain()] == [1] * 5
