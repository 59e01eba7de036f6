"""The judge: its one seam, the HTTP path over real sockets, and a server with every fault we could think of."""

import asyncio
import json
import random
import socket
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
from aiohttp import web
from conftest import scripted_judge, unreachable

from rankbuffer_trl.groups import Query, Rollout, Rubric
from rankbuffer_trl.judge import Call, Judge, JudgeError, RubricJudge, TransportError, Usage
from rankbuffer_trl.judge import insertion_question as coarse
from rankbuffer_trl.judge import ranking_question as fine
from rankbuffer_trl.judge.openai_client import OpenAIClient
from rankbuffer_trl.judge.serve import make_app

KEY = "sk-a-key-that-nobody-may-see"
GOOD = '{"position": 1}'


@pytest.fixture
def question(query):
    return coarse(query, ["bad", "good"], "The candidate.")


def ask(judge: Judge, question) -> tuple[object, Call]:
    """One question, its verdict and its one call."""

    async def run():
        try:
            return await judge.ask(question)
        finally:
            await judge.client.close()

    verdict = asyncio.run(run())
    (call,) = judge.drain()
    return verdict, call


# The seam


def test_a_parsed_answer_is_the_verdict(question):
    judge = scripted_judge(lambda messages: "Sure:\n```json\n" + GOOD + "\n```")
    verdict, call = ask(judge, question)
    assert verdict == 1
    assert call.seconds >= 0
    assert call == Call("rankbuffer", "insert", "tea", "parsed", 1, (10, 4, 3), (10, 4, 3), call.seconds, "")
    assert judge.client.seen == [[{"role": "user", "content": question.prompt}]]


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

        async def complete(self, messages, *, seed):
            seeds.append(seed)
            return "no", Usage(), 1

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
    assert (call.outcome, call.attempts, call.usage, call.spent) == ("unreachable", 2, Usage(), Usage())
    assert call.error == "connection refused"
    assert len(judge.client.seen) == 1


def test_attempts_before_and_after_a_lost_connection_all_count(question):
    judge = scripted_judge(lambda messages: "no" if len(judge.client.seen) == 1 else unreachable(messages))
    verdict, call = ask(judge, question)
    assert verdict is None
    assert (call.outcome, call.attempts, call.usage, call.spent) == ("unreachable", 3, Usage(), Usage(10, 4, 3))


def test_position_zero_is_a_verdict(question):
    assert ask(scripted_judge(lambda messages: '{"position": 0}'), question)[0] == 0


BAD_POSITIONS = [
    "",
    "I cannot judge this.",
    "{}",
    "{",
    "1",
    "[1]",
    '{"position": }',
    '{"position": 3}',
    '{"position": -1}',
    '{"position": 1.0}',
    '{"position": "1"}',
    '{"position": true}',
    '{"position": null}',
    '{"position": NaN}',
    '{"position": [1]}',
    '{"Position": 1}',
    '{"position": 1, "position": 2}',
    '{"position": 1} or {"position": 2}',
    '<think>{"position": 1}</think>',
    '{"position": ' + "9" * 5000 + "}",
    '{"position": ' + "[" * 20000 + "]" * 20000 + "}",
]


@pytest.mark.parametrize("answer", BAD_POSITIONS, ids=lambda answer: answer[:40])
def test_no_bad_position_becomes_a_verdict(question, answer):
    verdict, call = ask(scripted_judge(lambda messages: answer, max_attempts=2), question)
    assert verdict is None
    assert (call.outcome, call.attempts) == ("malformed", 2)
    assert call.error


BAD_ORDERS = [
    '{"order": [0, 1]}',
    '{"order": [0, 1, 1]}',
    '{"order": [0, 1, 2, 2]}',
    '{"order": [0, 1, 3]}',
    '{"order": []}',
    '{"order": "0, 1, 2"}',
    '{"order": ["0", "1", "2"]}',
    '{"order": [0, true, 2]}',
    '{"order": [0.0, 1.0, 2.0]}',
    '{"order": {"0": 1}}',
    '{"position": 1}',
]


@pytest.mark.parametrize("answer", BAD_ORDERS)
def test_no_bad_order_becomes_a_verdict(query, answer):
    question = fine(query, [Rollout(i, f"text {i}") for i in range(3)])
    verdict, call = ask(scripted_judge(lambda messages: answer, max_attempts=1), question)
    assert verdict is None
    assert (call.kind, call.outcome) == ("rank", "malformed")


class Crowd:
    """Answers in a seeded random order and remembers how many questions were in flight."""

    name = "crowd"

    def __init__(self, seed: int, answer: Callable[[str], str | Exception] = lambda prompt: GOOD):
        self.random = random.Random(seed)
        self.answer = answer
        self.now = self.most = 0

    async def complete(self, messages, *, seed):
        self.now += 1
        self.most = max(self.most, self.now)
        for _ in range(self.random.randrange(20)):
            await asyncio.sleep(0)
        self.now -= 1
        prompt = messages[0]["content"]
        answer = self.answer(prompt)
        if isinstance(answer, Exception):
            raise answer
        return answer, Usage(len(prompt), 0, len(answer)), 1

    async def close(self):
        pass


def ask_all(judge: Judge, questions) -> list:
    async def run():
        try:
            return await asyncio.gather(*map(judge.ask, questions))
        finally:
            await judge.client.close()

    return asyncio.run(run())


@pytest.mark.parametrize("concurrency", [1, 3, 8])
def test_never_more_questions_in_flight_than_allowed(query, concurrency):
    crowd = Crowd(0)
    assert ask_all(Judge(crowd, concurrency=concurrency), [coarse(query, ["a", "b"], str(i)) for i in range(40)])
    assert crowd.most == concurrency


def test_a_failed_question_frees_its_slot(question):
    judge = scripted_judge(unreachable, concurrency=1)
    assert ask_all(judge, [question] * 5) == [None] * 5


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
        return TransportError("cause " + prompt.partition("\ncandidate ")[2][0])

    ledgers = []
    for seed in range(5):
        judge = Judge(Crowd(seed, answer))
        ask_all(judge, questions)
        ledgers.append([call.error for call in judge.drain()])
    assert sorted(ledgers[0]) == [f"cause {i}" for i in range(6)]
    assert ledgers[1:] == ledgers[:1] * 4


def test_preflight_of_a_good_judge_leaves_no_call(question):
    judge = scripted_judge(lambda messages: GOOD)
    asyncio.run(judge.preflight(question))
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
        asyncio.run(judge.preflight(question))
    missing = [fragment for fragment in ["scripted judge", *fragments] if fragment not in str(error.value)]
    assert missing == []
    assert judge.drain() == []


def test_preflight_takes_no_earlier_call_out_of_the_ledger(question):
    judge = scripted_judge(lambda messages: GOOD)

    async def run():
        await judge.ask(question)
        await judge.preflight(question)

    asyncio.run(run())
    assert len(judge.drain()) == 1


def test_a_rubric_the_embedded_judge_cannot_read_is_no_crash(query):
    unreadable = Query("why", query.prompt, (Rubric("Explains why.", 3),), query.responses)
    verdict, call = ask(Judge(RubricJudge()), coarse(unreadable, ["a", "b"], "c"))
    assert verdict is None
    assert call.outcome != "parsed"
    assert "explains why" in call.error.lower()


# Over HTTP


@contextmanager
def served(app: web.Application) -> Iterator[str]:
    """Serve `app` on a free loopback port from a thread of its own; gives the address."""
    loop, ready, address = asyncio.new_event_loop(), threading.Event(), []
    runner = web.AppRunner(app, shutdown_timeout=1, handler_cancellation=True)

    async def start():
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        address.extend(runner.addresses)
        ready.set()

    def serve():
        loop.run_until_complete(start())
        loop.run_forever()

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    assert ready.wait(20)
    try:
        yield f"http://127.0.0.1:{address[0][1]}"
    finally:
        asyncio.run_coroutine_threadsafe(runner.cleanup(), loop).result(20)
        loop.call_soon_threadsafe(loop.stop)
        thread.join(20)
        loop.close()


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
    embedded = Judge(RubricJudge(), concurrency=concurrency)
    remote = Judge(OpenAIClient(rubric_server, RubricJudge.model), concurrency=concurrency)
    verdicts = ask_all(embedded, questions)
    assert None not in verdicts
    assert ask_all(remote, questions) == verdicts
    calls = embedded.drain()
    assert [hidden(call) for call in remote.drain()] == [hidden(call) for call in calls]
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
            asyncio.run(judge.preflight(question))
    assert f"a-model at {url}" in str(error.value)
    assert "Connect" in str(error.value)
    assert judge.drain() == []


# A server that does everything wrong


def completion(content: object, usage: object = "default") -> web.Response:
    if usage == "default":
        usage = {"prompt_tokens": 20, "completion_tokens": 5, "prompt_tokens_details": {"cached_tokens": 16}}
    message = {"role": "assistant", "content": content}
    choice = {"index": 0, "finish_reason": "stop", "message": message}
    body = {"id": "x", "object": "chat.completion", "created": 1, "model": "m", "choices": [choice], "usage": usage}
    return web.json_response(body)


def saying(content: object) -> Callable:
    return lambda request, n: completion(content)


def status(code: int, body: str = "", **headers: str) -> Callable:
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    return lambda request, n: web.Response(status=code, text=body, headers=named)


def first(fault: Callable, then: Callable | None = None) -> Callable:
    """The fault at the first request, then an answer."""
    return lambda request, n: fault(request, n) if n == 1 else (then or saying(GOOD))(request, n)


def close(request: web.Request, n: int) -> web.Response:
    request.transport.close()
    return web.Response()


async def break_off(request: web.Request, n: int) -> web.StreamResponse:
    response = web.StreamResponse(headers={"Content-Length": "1000", "Content-Type": "application/json"})
    await response.prepare(request)
    await response.write(b'{"choices": [')
    request.transport.close()
    return response


async def hang(request: web.Request, n: int) -> web.Response:
    await asyncio.Event().wait()


def echo_key(code: int) -> Callable:
    return lambda request, n: web.Response(status=code, text="I got " + str(dict(request.headers)))


def echo_key_as_json(request: web.Request, n: int) -> web.Response:
    message = f"Incorrect API key provided: {request.headers['Authorization']}"
    return web.json_response({"error": {"message": message, "code": "invalid_api_key"}}, status=401)


async def echo_prompt_and_key(request: web.Request, n: int) -> web.Response:
    asked = await request.json()
    message = f"{request.headers['Authorization']} asked {asked['messages']}"
    return web.json_response({"error": {"message": message}}, status=422)


def body(content: bytes, kind: str = "application/json") -> Callable:
    return lambda request, n: web.Response(body=content, content_type=kind)


ANSWERED, NOTHING = Usage(20, 16, 5), Usage()
PASSING = {  # what the server does: (handler, transport retries allowed, requests sent)
    "fine": (saying(GOOD), 0, 1),
    "500 once": (first(status(500)), 2, 2),
    "429 once": (first(status(429, Retry_After="0")), 1, 2),
    "closed once": (first(close), 1, 2),
    "malformed once": (first(saying("Hm.")), 0, 2),
}
FAILING = {  # what the server does: (handler, retries, requests sent, outcome, part of the error)
    "always 500": (status(500, "on fire"), 1, 2, "unreachable", "HTTP 500"),
    "always 503": (status(503), 0, 1, "unreachable", "HTTP 503"),
    "401": (status(401, '{"error": {"message": "no key"}}'), 2, 1, "unreachable", "HTTP 401"),
    "404": (status(404), 2, 1, "unreachable", "HTTP 404"),
    "500 then 404": (first(status(500), status(404)), 1, 2, "unreachable", "HTTP 404"),
    "500, not to be retried": (status(500, x_should_retry="false"), 1, 1, "unreachable", "HTTP 500"),
    "closed without answer": (close, 0, 1, "unreachable", "disconnected"),
    "broken off": (break_off, 0, 1, "unreachable", "ConnectionError"),
    "hanging": (hang, 0, 1, "unreachable", "Timeout"),
    "HTML page": (body(b"<html>Welcome to nginx</html>", "text/html"), 2, 1, "unreachable", "not a chat completion"),
    "no body": (body(b""), 2, 1, "unreachable", "not a chat completion"),
    "half a JSON": (body(b'{"choices": ['), 2, 1, "unreachable", "not a chat completion"),
    "no UTF-8": (body(b"\xff\xfe{}"), 2, 1, "unreachable", "not a chat completion"),
    "a JSON list": (body(b"[1]"), 2, 1, "unreachable", "not a chat completion"),
    "a JSON null": (body(b"null"), 2, 1, "unreachable", "not a chat completion"),
    "no choices": (body(b'{"id": "x"}'), 2, 1, "unreachable", "not a chat completion"),
    "empty choices": (body(b'{"choices": []}'), 2, 1, "unreachable", "not a chat completion"),
    "choice without message": (body(b'{"choices": [{"index": 0}]}'), 2, 1, "unreachable", "not a chat completion"),
    "error with status 200": (body(b'{"error": {"message": "no"}}'), 2, 1, "unreachable", "not a chat completion"),
    "null content": (saying(None), 0, 2, "malformed", "flat JSON object"),
    "empty content": (saying(""), 0, 2, "malformed", "flat JSON object"),
    "garbage": (saying("\x00\u2603 lorem {{ipsum"), 0, 2, "malformed", "JSON"),
    "position out of range": (saying('{"position": 3}'), 0, 2, "malformed", "from 0 through 2, not 3"),
}


class Fault:
    """Plays one handler and counts the requests."""

    def __init__(self):
        self.handler: Callable = saying(GOOD)
        self.requests = 0
        self.seen: list[dict] = []
        self.url = ""

    async def __call__(self, request: web.Request) -> web.StreamResponse:
        self.requests += 1
        if request.can_read_body:
            self.seen.append(await request.json())
        response = self.handler(request, self.requests)
        return await response if asyncio.iscoroutine(response) else response

    def judge(self, handler: Callable, max_retries: int, timeout: float = 20.0) -> Judge:
        self.handler, self.requests, self.seen = handler, 0, []
        client = OpenAIClient(self.url, "m", api_key_env="FAULT_KEY", timeout=timeout, max_retries=max_retries)
        return Judge(client, max_attempts=2)


@pytest.fixture(scope="module")
def server() -> Iterator[Fault]:
    fault = Fault()
    app = web.Application()
    app.router.add_post("/v1/chat/completions", fault)
    with served(app) as address:
        fault.url = address + "/v1"
        yield fault


@pytest.fixture
def fault(server, monkeypatch) -> Fault:
    monkeypatch.setenv("FAULT_KEY", KEY)
    return server


@pytest.mark.parametrize("case", PASSING)
def test_a_passing_fault_costs_attempts_alone(fault, question, case):
    handler, retries, requests = PASSING[case]
    verdict, call = ask(fault.judge(handler, retries), question)
    assert verdict == 1
    assert (call.outcome, call.usage, call.error) == ("parsed", ANSWERED, "")
    assert (call.attempts, fault.requests) == (requests, requests)
    assert call.spent == (ANSWERED + ANSWERED if case == "malformed once" else ANSWERED)


@pytest.mark.parametrize("case", FAILING)
def test_a_lasting_fault_is_never_a_score(fault, question, case):
    handler, retries, requests, outcome, part = FAILING[case]
    verdict, call = ask(fault.judge(handler, retries, timeout=0.3 if case == "hanging" else 20.0), question)
    assert verdict is None
    assert (call.outcome, call.usage) == (outcome, NOTHING)
    assert part in call.error
    assert len(call.error) < 500
    assert call.spent == (ANSWERED + ANSWERED if outcome == "malformed" else NOTHING)
    assert (call.attempts, fault.requests) == (requests, requests)


def test_a_repeated_id_is_never_an_order(fault, query):
    question = fine(query, [Rollout(i, f"text {i}") for i in range(3)])
    verdict, call = ask(fault.judge(saying('{"order": [0, 1, 1]}'), 0), question)
    assert verdict is None
    assert (call.outcome, call.attempts) == ("malformed", 2)
    assert "exactly once, not [0, 1, 1]" in call.error
    assert "exactly once, not [0, 1, 1]" in fault.seen[1]["messages"][2]["content"]


@pytest.mark.parametrize("content", [7, ["text"], {"position": 1}, True], ids=str)
def test_content_that_is_no_text_is_no_verdict(fault, question, content):
    verdict, call = ask(fault.judge(saying(content), 0), question)
    assert verdict is None
    assert call.outcome in ("malformed", "unreachable")


@pytest.mark.parametrize(
    ("usage", "prompt"),
    [
        (None, 0),
        ({}, 0),
        ({"prompt_tokens": None, "completion_tokens": 5}, 0),
        ({"prompt_tokens": 20, "prompt_tokens_details": None}, 20),
    ],
    ids=str,
)
def test_missing_token_counts_are_zero(fault, question, usage, prompt):
    verdict, call = ask(fault.judge(lambda request, n: completion(GOOD, usage), 0), question)
    assert verdict == 1
    assert (call.outcome, call.usage.prompt, call.usage.cached) == ("parsed", prompt, 0)


@pytest.mark.parametrize("usage", [{"prompt_tokens": "20"}, {"prompt_tokens_details": 3}, "many", [1]], ids=str)
def test_broken_token_counts_do_not_end_the_run(fault, question, usage):
    _, call = ask(fault.judge(lambda request, n: completion(GOOD, usage), 0), question)
    assert all(type(count) is int for count in (*call.usage, *call.spent))


@pytest.mark.parametrize("handler", [echo_key(400), echo_key(403), echo_key_as_json, echo_prompt_and_key])
def test_the_api_key_never_reaches_the_ledger(fault, question, handler):
    verdict, call = ask(fault.judge(handler, 0), question)
    assert verdict is None
    assert call.outcome == "unreachable"
    assert call.error.startswith("HTTP 4")
    assert KEY not in call.error


def test_the_key_is_sent_and_decoding_is_deterministic(fault, question):
    keys = []

    def remember(request, n):
        keys.append(request.headers["Authorization"])
        return completion("Hm." if n == 1 else GOOD)

    ask(fault.judge(remember, 0), question)
    assert keys == [f"Bearer {KEY}"] * 2
    assert [request["temperature"] for request in fault.seen] == [0, 0]
    assert [request["max_tokens"] for request in fault.seen] == [256, 256]
    assert [len(request["messages"]) for request in fault.seen] == [1, 3]
    assert fault.seen[0]["messages"][0]["content"] == question.prompt
    assert len({request["seed"] for request in fault.seen}) == 2


def test_nothing_listening_is_unreachable(question):
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        judge = Judge(OpenAIClient(f"http://127.0.0.1:{unused.getsockname()[1]}/v1", "m", max_retries=0))
        verdict, call = ask(judge, question)
    assert verdict is None
    assert (call.outcome, call.attempts, call.usage, call.spent) == ("unreachable", 1, NOTHING, NOTHING)
    assert "Connect" in call.error


def test_one_fault_among_many_questions_fails_that_one_alone(fault, query):
    async def by_candidate(request, n):
        prompt = fault.seen[n - 1]["messages"][0]["content"]
        return web.Response(status=404) if "\ncandidate 3\n" in prompt else completion(GOOD)

    judge = fault.judge(by_candidate, 0)
    judge = Judge(judge.client, concurrency=1)
    assert ask_all(judge, [coarse(query, ["a", "b"], f"candidate {i}") for i in range(6)]) == [1, 1, 1, None, 1, 1]
    assert Counter(call.outcome for call in judge.drain()) == {"parsed": 5, "unreachable": 1}
