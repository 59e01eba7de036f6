"""Fault by fault, what a judge that misbehaves does to one question and to a whole step. Real sockets, a real store.

`PASSING` and `LASTING` are the table of HTTP faults; the steps come after it.
"""

import asyncio
import signal
import socket
import struct
import threading
import time
import traceback
import tracemalloc
import zlib
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from email.utils import formatdate

import pytest
from aiohttp import web
from conftest import ask, ask_all, by_number, group, numbers, scripted_judge, unreachable
from contents import contents
from http_server import served
from hypothesis import given, settings
from hypothesis import strategies as st

from rankbuffer_trl.groups import Rollout
from rankbuffer_trl.judge import Judge, JudgeError, TransportError, Usage, openai_client
from rankbuffer_trl.judge import insertion_question as coarse
from rankbuffer_trl.judge import ranking_question as fine
from rankbuffer_trl.judge.judge import warn_of_counts
from rankbuffer_trl.judge.ledger import MOST_TOKENS
from rankbuffer_trl.judge.openai_client import OpenAIClient, masked
from rankbuffer_trl.judge.reach import check_server
from rankbuffer_trl.rewards.rankbuffer import RankBuffer
from rankbuffer_trl.store import BufferStore
from rankbuffer_trl.training.scorer import GroupScorer

KEY = "sk-a-key-that-nobody-may-see"
CANDIDATE = "a candidate that nobody else may see"
GOOD = '{"position": 1}'
ANSWERED, NOTHING = Usage(20, 16, 5), Usage()
PATIENT = 20.0  # seconds; a slow machine needs less
EVENT_LIMIT = 30.0  # seconds for what should happen at once


@pytest.fixture
def question(query):
    return coarse(query, ["bad", "good"], CANDIDATE)


# What a server can do wrong. A handler gets the request and its number, from 1.


def completion(content: object, usage: object = "default") -> web.Response:
    if usage == "default":
        usage = {"prompt_tokens": 20, "completion_tokens": 5, "prompt_tokens_details": {"cached_tokens": 16}}
    message = {"role": "assistant", "content": content}
    choice = {"index": 0, "finish_reason": "stop", "message": message}
    body = {"id": "x", "object": "chat.completion", "created": 1, "model": "m", "choices": [choice], "usage": usage}
    return web.json_response(body)


def saying(content: object) -> Callable:
    return lambda request, n: completion(content)


SOON = {"Retry-After-Ms": "1"}  # a backoff of half a second per row would be long


def status(code: int, text: str = "", headers: dict[str, str] = SOON) -> Callable:
    return lambda request, n: web.Response(status=code, text=text, headers=headers)


def refusing(code: int, message: str) -> Callable:
    """An error in the form of OpenAI and vLLM."""
    error = {"error": {"message": message, "code": code}}
    return lambda request, n: web.json_response(error, status=code, headers=SOON)


def body(content: bytes, kind: str = "application/json", headers: dict[str, str] | None = None) -> Callable:
    return lambda request, n: web.Response(body=content, content_type=kind, headers=headers)


def in_turn(*handlers: Callable) -> Callable:
    """One handler after the other; the last one stays."""
    return lambda request, n: handlers[min(n, len(handlers)) - 1](request, n)


def once(fault: Callable) -> Callable:
    return in_turn(fault, saying(GOOD))


def close(request: web.Request, n: int) -> web.Response:
    request.transport.close()
    return web.Response()


def reset(request: web.Request, n: int) -> web.Response:
    """A TCP reset, as from a process that was killed."""
    linger = struct.pack("ii", 1, 0)
    request.transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
    request.transport.abort()
    return web.Response()


async def cut_off(request: web.Request, n: int) -> web.StreamResponse:
    response = web.StreamResponse(headers={"Content-Length": "1000", "Content-Type": "application/json"})
    await response.prepare(request)
    await response.write(b'{"choices": [')
    request.transport.close()
    return response


async def slow(request: web.Request, n: int) -> web.StreamResponse:
    """Headers at once, then the body in pieces."""
    answer = completion(GOOD).body
    response = web.StreamResponse(headers={"Content-Length": str(len(answer)), "Content-Type": "application/json"})
    await response.prepare(request)
    for start in range(0, len(answer), 100):
        await asyncio.sleep(0.05)
        await response.write(answer[start : start + 100])
    return response


async def hang(request: web.Request, n: int) -> web.Response:
    await asyncio.sleep(EVENT_LIMIT)
    return completion(GOOD)  # so that a client without a timeout would fail its test


async def hang_in_the_body(request: web.Request, n: int) -> web.StreamResponse:
    response = web.StreamResponse(headers={"Content-Type": "application/json"})
    await response.prepare(request)
    await response.write(b" ")
    await asyncio.sleep(EVENT_LIMIT)
    await response.write(completion(GOOD).body)
    return response


class Fault:
    """Plays one handler and remembers the requests."""

    def __init__(self):
        self.handler: Callable = saying(GOOD)
        self.seen: list[dict] = []
        self.times: list[float] = []
        self.url = ""

    async def __call__(self, request: web.Request) -> web.StreamResponse:
        self.times.append(time.time())
        self.seen.append(await request.json() if request.can_read_body else {})
        response = self.handler(request, len(self.seen))
        return await response if asyncio.iscoroutine(response) else response

    def client(self, handler: Callable, retries: int, timeout: float = PATIENT, **kwargs) -> "Noting":
        self.handler, self.seen, self.times = handler, [], []
        return Noting(self.url, "m", api_key_env="FAULT_KEY", timeout=timeout, max_retries=retries, **kwargs)

    def judge(self, *args, **kwargs) -> Judge:
        return Judge(self.client(*args, **kwargs), max_attempts=2, guard=False)


class Noting(OpenAIClient):
    """Keeps the last fault, of which a judge tells the text alone."""

    fault: TransportError | None = None

    async def complete(self, messages, **kwargs):
        try:
            return await super().complete(messages, **kwargs)
        except TransportError as fault:
            self.fault = fault
            raise


@pytest.fixture(scope="module")
def server() -> Iterator[Fault]:
    fault = Fault()
    app = web.Application()
    app.router.add_post("/v1/chat/completions", fault)
    app.router.add_get("/v1/models", fault)
    app.router.add_post("/tokenize", fault)
    with served(app) as address:
        fault.url = address + "/v1"
        yield fault


@pytest.fixture
def fault(server, monkeypatch) -> Fault:
    monkeypatch.setenv("FAULT_KEY", KEY)
    return server


# One question

PASSING = {  # what the server does: (handler, transport retries allowed, requests sent)
    "fine": (saying(GOOD), 0, 1),
    "408 once": (once(status(408)), 1, 2),
    "429 once": (once(status(429)), 1, 2),
    "500 once": (once(status(500)), 1, 2),
    "502 once": (once(status(502, "<html>Bad Gateway</html>")), 1, 2),
    "503 once": (once(status(503)), 1, 2),
    "504 once": (once(status(504)), 1, 2),
    "closed once": (once(close), 1, 2),
    "reset once": (once(reset), 1, 2),
    "cut off once": (once(cut_off), 1, 2),
    "500, then reset": (in_turn(status(500), reset, saying(GOOD)), 2, 3),
    "hanging once": (once(hang), 1, 2),
    "slow": (slow, 0, 1),
    "malformed once": (once(saying("Hm.")), 0, 2),
}
HANGING = {"hanging once": 1.0, "hanging": 0.5, "hanging in the body": 0.5}  # seconds that a request may take

NO_CHAT = "not a chat completion"
LASTING = {  # what the server does: (handler, retries, requests sent, kind of fault or "malformed", part of the error)
    "closed without answer": (close, 1, 2, "down", "disconnected"),
    "reset": (reset, 0, 1, "down", "reset"),
    "cut off": (cut_off, 0, 1, "down", "ContentLengthError"),
    "hanging": (hang, 1, 2, "down", "Timeout"),
    "hanging in the body": (hang_in_the_body, 0, 1, "down", "Timeout"),
    "always 502": (status(502), 1, 2, "down", "HTTP 502"),
    "always 503": (refusing(503, "no upstream"), 1, 2, "down", "no upstream"),
    "always 504": (status(504), 1, 2, "down", "HTTP 504"),
    "always 500": (status(500, "on fire"), 1, 2, "busy", "HTTP 500"),
    "always 429": (refusing(429, "slow down"), 1, 2, "busy", "slow down"),
    "429, come back in an hour": (status(429, headers={"Retry-After": "3600"}), 1, 1, "busy", "HTTP 429"),
    "500, not to be retried": (status(500, headers={"X-Should-Retry": "false"}), 1, 1, "busy", "HTTP 500"),
    "500, then 404": (in_turn(status(500), status(404)), 1, 2, "refused", "HTTP 404"),
    "400, too long a prompt": (refusing(400, "maximum context length is 64 tokens"), 2, 1, "refused", "is 64 tokens"),
    "401": (refusing(401, "no key"), 2, 1, "refused", "HTTP 401"),
    "403": (status(403), 2, 1, "refused", "HTTP 403"),
    "404, another model": (refusing(404, "The model `m` does not exist."), 2, 1, "refused", "`m` does not exist"),
    "HTML page": (body(b"<html>Welcome to nginx</html>", "text/html"), 2, 1, "refused", NO_CHAT),
    "no body": (body(b""), 2, 1, "refused", NO_CHAT),
    "half a JSON": (body(b'{"choices": ['), 2, 1, "refused", NO_CHAT),
    "no UTF-8": (body(b"\xff\xfe{}"), 2, 1, "refused", NO_CHAT),
    "not the encoding it says": (body(b"{}", headers={"Content-Encoding": "gzip"}), 0, 1, "down", "decompress"),
    "a JSON list": (body(b"[1]"), 2, 1, "refused", NO_CHAT),
    "a JSON null": (body(b"null"), 2, 1, "refused", NO_CHAT),
    "a JSON too deep": (body(b"[" * 200_000), 2, 1, "refused", NO_CHAT),
    "no choices": (body(b'{"id": "x"}'), 2, 1, "refused", NO_CHAT),
    "empty choices": (body(b'{"choices": []}'), 2, 1, "refused", NO_CHAT),
    "choice without message": (body(b'{"choices": [{"index": 0}]}'), 2, 1, "refused", NO_CHAT),
    "error with status 200": (body(b'{"error": {"message": "no"}}'), 2, 1, "refused", NO_CHAT),
    "null content": (saying(None), 0, 2, "malformed", "flat JSON object"),
    "empty content": (saying(""), 0, 2, "malformed", "flat JSON object"),
    "verdict cut off": (saying('{"posit'), 0, 2, "malformed", "flat JSON object"),
    "garbage": (saying("\x00\u2603 lorem {{ipsum"), 0, 2, "malformed", "JSON"),
    "position out of range": (saying('{"position": 3}'), 0, 2, "malformed", "from 0 through 2, not 3"),
}


@pytest.mark.parametrize("case", PASSING)
def test_a_passing_fault_costs_attempts_alone(fault, question, case):
    handler, retries, requests = PASSING[case]
    verdict, call = ask(fault.judge(handler, retries, HANGING.get(case, PATIENT)), question)
    assert verdict == 1
    assert (call.outcome, call.server, call.usage, call.error) == ("parsed", fault.url, ANSWERED, "")
    assert (call.attempts, len(fault.seen)) == (requests, requests)
    assert call.spent == (ANSWERED + ANSWERED if case == "malformed once" else ANSWERED)


@pytest.mark.parametrize("case", LASTING)
def test_a_lasting_fault_is_never_a_score(fault, question, case):
    handler, retries, requests, kind, part = LASTING[case]
    judge = fault.judge(handler, retries, HANGING.get(case, PATIENT))
    verdict, call = ask(judge, question)
    assert verdict is None
    assert (call.server, call.usage) == (fault.url, NOTHING)
    assert part in call.error
    assert CANDIDATE not in call.error
    assert len(call.error) < 400
    assert (call.attempts, len(fault.seen)) == (requests, requests)
    if kind == "malformed":
        assert (call.outcome, call.spent) == ("malformed", ANSWERED + ANSWERED)
    else:
        assert (call.outcome, call.spent) == ("unreachable", NOTHING)
        assert judge.client.fault.kind == kind


@contextmanager
def nobody_listening() -> Iterator[str]:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))  # bound but not listening: refused, and nobody else gets the port
        yield f"http://127.0.0.1:{unused.getsockname()[1]}/v1"


def test_a_refused_connection_is_retried_and_then_unreachable(question):
    with nobody_listening() as url:
        client = Noting(url, "m", max_retries=1)
        verdict, call = ask(Judge(client), question)
    assert verdict is None
    assert (call.outcome, call.attempts, call.usage, call.spent) == ("unreachable", 2, NOTHING, NOTHING)
    assert "Connect" in call.error
    assert client.fault.kind == "down"


def test_retry_after_seconds_is_waited_for(fault, question):
    verdict, call = ask(fault.judge(once(status(429, headers={"Retry-After": "1"})), 1), question)
    assert (verdict, call.attempts) == (1, 2)
    first, second = fault.times
    assert second - first >= 0.9  # without the header it would be half a second at most
    assert call.seconds >= 0.9


def test_retry_after_a_date_is_waited_for(fault, question):
    date = int(time.time()) + 2
    verdict, call = ask(
        fault.judge(once(status(503, headers={"Retry-After": formatdate(date, usegmt=True)})), 1), question
    )
    assert (verdict, call.attempts) == (1, 2)
    assert fault.times[1] >= date - 0.1


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


@pytest.mark.parametrize(
    "count", ["1e999", "-1e999", "NaN", "1" + "0" * 30, str(2**31), "-5", "true", "20.5", '"20"', "[1]", '{"a": 1}']
)
@pytest.mark.parametrize("name", ["prompt_tokens", "completion_tokens"])
def test_a_token_count_that_cannot_be_true_counts_as_zero(fault, question, caplog, name, count):
    warn_of_counts.cache_clear()
    usage = f'{{"prompt_tokens": 20, "completion_tokens": 5, "{name}": {count}}}'
    answer = body(completion(GOOD).body.replace(b'"usage": {', b'"usage": ' + usage.encode() + b', "theirs": {'))
    judge = fault.judge(answer, 0)
    assert ask_all(judge, [question] * 2) == [1, 1]
    expected = Usage(0, 0, 5) if name == "prompt_tokens" else Usage(20, 0, 0)
    assert [(call.usage, call.spent) for call in judge.drain()] == [(expected, expected)] * 2
    (line,) = [record.getMessage() for record in caplog.records if "token counts" in record.getMessage()]
    assert fault.url in line


def test_the_highest_token_count_is_taken_as_it_is(fault, question):
    _, call = ask(fault.judge(lambda request, n: completion(GOOD, {"prompt_tokens": MOST_TOKENS}), 0), question)
    assert call.usage == Usage(MOST_TOKENS, 0, 0)


PARTS = {
    "one text": [{"type": "text", "text": GOOD}],
    "two texts": [{"type": "text", "text": GOOD[:5]}, {"type": "text", "text": GOOD[5:]}],
    "thoughts and text": [
        {"type": "thinking", "thinking": [{"type": "text", "text": "Hm."}]},
        {"type": "text", "text": GOOD},
    ],
}


@pytest.mark.parametrize("case", PARTS)
def test_content_in_parts_is_read(fault, question, case):
    verdict, call = ask(fault.judge(saying(PARTS[case]), 0), question)
    assert (verdict, call.outcome, call.attempts) == (1, "parsed", 1)


@pytest.mark.parametrize(
    "content", [[7], [{"type": "text"}], [{"text": GOOD}], [{"type": "text", "text": 7}]], ids=str
)
def test_parts_that_hold_no_text_are_no_completion(fault, question, content):
    verdict, call = ask(fault.judge(saying(content), 0), question)
    assert (verdict, call.outcome) == (None, "unreachable")
    assert NO_CHAT in call.error


# What may not come in

SURROGATE = "I would say \ud83d"  # what is left of an emoji that was cut in two


def test_half_an_emoji_in_an_answer_is_asked_again(fault, question):
    verdict, call = ask(fault.judge(once(saying(SURROGATE)), 0), question)
    assert (verdict, call.outcome, call.attempts, call.malformed) == (1, "parsed", 2, 1)
    assert fault.seen[1]["messages"][1]["content"] == "I would say ?"


@pytest.mark.parametrize("answer", [SURROGATE, TransportError(SURROGATE)], ids=["answer", "error"])
def test_half_an_emoji_from_any_client_does_not_end_a_step(scorer, answer):
    made = scorer(
        scripted_judge(lambda messages: answer if "\n5\n" in messages[0]["content"] else by_number(messages))
    )
    outcome = made.score([group(numbers(), EIGHT, 0)], 0)
    assert sum(call.failed for call in outcome.calls) == 1
    assert [reward is None for reward in outcome.scores[0].rewards] == [False] * 4 + [True] + [False] * 3
    ((error,),) = made.store.rows("SELECT error FROM calls WHERE outcome != 'parsed'")
    assert error.isprintable()


def test_half_an_emoji_in_an_error_is_escaped(fault, question):
    _, call = ask(fault.judge(refusing(400, SURROGATE), 0), question)
    assert call.error == "HTTP 400: I would say \\ud83d"


def test_control_characters_of_an_error_are_escaped(fault, question):
    _, call = ask(fault.judge(refusing(400, "\x1b[2J\r\nBuy \x00now\u202e"), 0), question)
    assert call.error == "HTTP 400: \\x1b[2J\\r\\nBuy \\x00now\\u202e"


class Counting:
    """The number judge, which reports the same usage for every answer."""

    name = "counting judge"

    def __init__(self, usage: Usage):
        self.usage = usage

    async def complete(self, messages, *, question, seed, tally):
        tally.server, tally.attempts = self.name, tally.attempts + 1
        return by_number(messages), self.usage

    async def close(self):
        pass


@pytest.mark.parametrize("count", [5 * 10**18, 10**30, float("inf"), -1, True, None, MOST_TOKENS], ids=str)
def test_no_token_count_makes_the_ledger_overflow(scorer, tmp_path, count):
    made = scorer(Judge(Counting(Usage(count, count, count))))
    for step in range(3):
        made.score([group(numbers(), EIGHT, step)], step)
    totals = made.store.totals()
    expected = totals.calls * MOST_TOKENS if count == MOST_TOKENS else 0
    assert totals.calls > 24
    assert (totals.prompt_tokens, totals.spent_completion_tokens) == (expected, expected)
    made.store.save(tmp_path / "saved")


async def drip(request: web.Request, n: int) -> web.StreamResponse:
    """A blank now and then, for ever: no read takes long."""
    response = web.StreamResponse(headers={"Content-Type": "application/json"})
    await response.prepare(request)
    while True:
        await response.write(b" ")
        await asyncio.sleep(0.02)


def within(seconds: float, client: OpenAIClient, what: Callable) -> object:
    """What `what` gives, if it needs no longer; the client is closed then."""

    async def run():
        try:
            async with asyncio.timeout(seconds):
                return await what()
        finally:
            await client.close()

    return asyncio.run(run())


def test_every_look_at_a_server_that_drips_has_an_end(fault):
    client = fault.client(drip, 2, timeout=0.1)
    with pytest.raises(TransportError, match=r"no list of models within 0\.1 s") as error:
        within(PATIENT, client, client.models)
    assert error.value.kind == "down"
    client = fault.client(drip, 2, timeout=0.1)
    with pytest.raises(JudgeError, match="cannot be reached, so nothing was started"):
        within(PATIENT, client, lambda: check_server(client))
    client = fault.client(drip, 2, timeout=0.1)
    assert within(PATIENT, client, client.alive) is False
    client = fault.client(drip, 2, timeout=0.1)
    assert within(PATIENT, client, lambda: client.count_tokens("How long?")) is None
    assert fault.seen[-1]["messages"] == [{"role": "user", "content": "How long?"}]


def test_a_probe_ends_long_before_a_request_would(fault, monkeypatch):
    monkeypatch.setattr(openai_client, "PROBE_SECONDS", 0.2)
    client = fault.client(drip, 2, timeout=EVENT_LIMIT)
    assert within(PATIENT, client, client.alive) is False


def test_a_list_of_models_and_a_count_of_tokens_end_long_before_a_response_would(fault, monkeypatch):
    monkeypatch.setattr(openai_client, "LOOK_SECONDS", 0.2)
    client = fault.client(drip, 2, timeout=3600)
    with pytest.raises(TransportError, match=r"no list of models within 0\.2 s"):
        within(PATIENT, client, client.models)
    client = fault.client(drip, 2, timeout=3600)
    assert within(PATIENT, client, lambda: client.count_tokens("How long?")) is None


def test_a_question_to_a_server_that_drips_is_retried_and_then_unreachable(fault, question):
    judge = fault.judge(drip, 1, timeout=0.1)
    (verdict,) = within(PATIENT, judge.client, lambda: judge.ask_all([question]))
    (call,) = judge.drain()
    assert (verdict, call.outcome, call.attempts) == (None, "unreachable", 2)
    assert "no whole answer within 0.5 s" in call.error
    assert judge.client.fault.kind == "down"


def test_the_first_question_to_a_server_that_drips_has_an_end(fault, question, scorer):
    judge = fault.judge(drip, 0)
    with pytest.raises(JudgeError, match=r"did not answer its first question within 0\.3 s, so nothing was started"):
        within(PATIENT, judge.client, lambda: judge.first_question(question, timeout=0.3))
    made = scorer(fault.judge(drip, 0), step_timeout=0.3)
    with pytest.raises(JudgeError, match=r"first question within 0\.3 s"):
        made.first_question(numbers())


def compressed(content: bytes, times: int, encoding: str = "gzip") -> Callable:
    """A body that is `content` so many times, without ever having it in memory."""
    squeeze = zlib.compressobj(wbits=31)
    small = b"".join([squeeze.compress(content) for _ in range(times)] + [squeeze.flush()])
    return body(small, headers={"Content-Encoding": encoding})


def test_a_bomb_does_not_take_the_memory_that_it_asks_for(fault, question):
    judge = fault.judge(compressed(b" " * 2**20, 256), 2)
    tracemalloc.start()
    try:
        _, call = ask(judge, question)
        _, most = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert (call.outcome, call.attempts) == ("unreachable", 1)
    assert "more than 16 MB" in call.error
    assert most < 100 * 2**20


@pytest.mark.parametrize("encoding", ["br", "zstd", "gzip, gzip", "unheard-of"])
def test_an_answer_in_another_encoding_is_not_read(fault, question, encoding):
    _, call = ask(fault.judge(compressed(b" ", 1, encoding), 2), question)
    assert (call.outcome, call.attempts) == ("unreachable", 1)
    assert f"content encoding '{encoding}'" in call.error


def test_a_compressed_answer_is_an_answer(fault, question):
    verdict, _ = ask(fault.judge(compressed(completion(GOOD).body, 1), 0), question)
    assert verdict == 1


@pytest.mark.parametrize("code", [200, 400])
def test_an_answer_may_have_so_many_bytes_and_not_one_more(fault, question, monkeypatch, code):
    answer = completion(GOOD).body if code == 200 else b'{"error": {"message": "too deep"}}'
    for limit, part in ((len(answer), "" if code == 200 else "too deep"), (len(answer) - 1, "more than 0 MB")):
        monkeypatch.setattr(openai_client, "MOST_BYTES", limit)
        handler = lambda request, n: web.Response(body=answer, status=code, content_type="application/json")  # noqa: E731
        _, call = ask(fault.judge(handler, 0), question)
        assert part in call.error and bool(part) == call.failed


def redirect(code: int, location: str) -> Callable:
    return lambda request, n: web.Response(status=code, headers={"Location": location})


@pytest.mark.parametrize("code", [301, 302, 303, 307, 308])
def test_no_redirect_is_followed(fault, question, code):
    seen = []

    async def elsewhere(request):
        seen.append(request)
        return completion(GOOD)

    app = web.Application()
    app.router.add_route("*", "/{any:.*}", elsewhere)
    with served(app) as other:
        for location in (f"{other}/v1/chat/completions", f"/v1/chat/completions?{KEY}"):
            _, call = ask(fault.judge(redirect(code, location), 2), question)
            assert (call.outcome, call.attempts) == ("unreachable", 1)
            assert call.error.startswith(f"HTTP {code}: a redirect to {location.replace(KEY, '[key]')}, which is not")
    assert (seen, len(fault.seen)) == ([], 1)


def test_a_list_of_models_that_is_none_is_named(fault):
    for deep in (b"[" * 100_000, b'{"data": 7}', b'{"data": [7]}', b"null"):
        client = fault.client(body(deep), 0)
        with pytest.raises(TransportError, match="not a list of models"):
            within(PATIENT, client, client.models)


@pytest.mark.parametrize("length", ["12k", -1, 0, True, 1.5, None])
def test_a_context_length_that_is_none_is_left_out(fault, length):
    listed = {"object": "list", "data": [{"id": "m", "max_model_len": length}]}
    client = fault.client(lambda request, n: web.json_response(listed), 0)
    assert within(PATIENT, client, client.models) == {"m": None}


# What was answered


@pytest.mark.parametrize("code", [401, 403])
def test_a_key_that_is_not_taken_is_named_by_its_variable(fault, question, monkeypatch, code):
    _, call = ask(fault.judge(refusing(code, "no"), 0), question)
    assert call.error.startswith(f"HTTP {code}: no (the environment variable FAULT_KEY should hold the key")
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    client = fault.client(refusing(code, "no"), 0)
    _, call = ask(Judge(OpenAIClient(client.url, "m", max_retries=0)), question)
    assert "the environment variable OPENAI_API_KEY is not set and should hold the key" in call.error


def finished(content: object, reason: str) -> Callable:
    choice = {"message": {"content": content}, "finish_reason": reason}
    return lambda request, n: web.json_response({"choices": [choice]})


@pytest.mark.parametrize(
    ("handler", "knob"),
    [
        (finished("Let me think", "length"), True),
        (finished(None, "length"), True),
        (finished("", "stop"), True),
        (finished("<think>Let me", "stop"), True),
        (finished("Hello!\x1b[2J", "stop"), False),
    ],
    ids=["cut off", "thoughts alone", "empty", "open thoughts", "another answer"],
)
def test_the_first_question_shows_the_answer_and_names_the_right_knob(fault, question, handler, knob):
    with pytest.raises(JudgeError) as error:
        ask_first(fault.judge(handler, 0), question)
    text = str(error.value)
    assert "The last answer begins: " in text and text.isprintable()
    assert ("judge_free_tokens" in text and "enable_thinking" in text) == knob
    assert ("instruction-tuned" in text) != knob


def test_of_a_long_answer_the_first_300_characters_are_shown(fault, question):
    with pytest.raises(JudgeError) as error:
        ask_first(fault.judge(saying("a" * 300 + "b"), 0), question)
    assert f"begins: '{'a' * 300}'." in str(error.value)


def test_malformed_answers_are_counted_apart_from_retries(fault, question, scorer):
    judge = fault.judge(in_turn(status(500), saying("Hm."), status(500), saying(GOOD)), 1)
    verdict, call = ask(judge, question)
    assert (verdict, call.attempts, call.malformed) == (1, 4, 1)
    made = scorer(scripted_judge(lambda messages: "Hm." if len(messages) == 1 else by_number(messages)))
    made.score([group(numbers(), "15 25", 0)], 0)
    assert list(made.store.rows("SELECT DISTINCT attempts, malformed FROM calls")) == [(2, 1)]
    assert made.store.totals().malformed == made.store.totals().calls == 2


def test_one_fault_among_many_questions_fails_that_one_alone(fault, query):
    async def by_candidate(request, n):
        prompt = (await request.json())["messages"][0]["content"]
        return web.Response(status=404) if "\ncandidate 3\n" in prompt else completion(GOOD)

    judge = fault.judge(by_candidate, 0)
    assert ask_all(judge, [coarse(query, ["a", "b"], f"candidate {i}") for i in range(6)]) == [1, 1, 1, None, 1, 1]
    assert Counter(call.outcome for call in judge.drain()) == {"parsed": 5, "unreachable": 1}


# What may not leak


def test_the_key_is_sent_and_decoding_is_deterministic(fault, question):
    keys = []

    def remember(request, n):
        keys.append(request.headers["Authorization"])
        return completion("Hm." if n == 1 else GOOD)

    ask(fault.judge(remember, 0), question)
    assert keys == [f"Bearer {KEY}"] * 2
    assert [request["temperature"] for request in fault.seen] == [0, 0]
    assert [request["max_tokens"] for request in fault.seen] == [256 + len('{"position": 2}') + 1] * 2
    assert [len(request["messages"]) for request in fault.seen] == [1, 3]
    assert fault.seen[0]["messages"][0]["content"] == question.prompt()
    assert len({request["seed"] for request in fault.seen}) == 2


def echo_headers(code: int) -> Callable:
    return lambda request, n: refusing(code, f"I got {dict(request.headers)}")(request, n)


def echo_key(request: web.Request, n: int) -> web.Response:
    return refusing(401, f"Incorrect API key provided: {request.headers['Authorization']}")(request, n)


def echo_plainly(request: web.Request, n: int) -> web.Response:
    return web.Response(status=400, text=f"I got {dict(request.headers)}")


async def echo_key_and_prompt(request: web.Request, n: int) -> web.Response:
    asked = await request.json()
    return refusing(422, f"{request.headers['Authorization']} asked {asked['messages']}")(request, n)


ECHOING = {
    "headers, 400": echo_headers(400),
    "headers, 403": echo_headers(403),
    "headers, 503": echo_headers(503),
    "key": echo_key,
    "key and prompt": echo_key_and_prompt,
}


@pytest.mark.parametrize("case", ECHOING)
def test_the_key_reaches_neither_the_ledger_nor_a_message(fault, question, case):
    verdict, call = ask(fault.judge(ECHOING[case], 0), question)
    assert verdict is None
    assert call.outcome == "unreachable"
    assert call.error.startswith("HTTP ")
    assert "[key]" in call.error, "the server echoed no key, so this test shows nothing"
    assert KEY not in repr(call)
    judge = fault.judge(ECHOING[case], 0)
    with pytest.raises(JudgeError) as error:
        ask_first(judge, question)
    assert "[key]" in str(error.value)
    assert KEY not in "".join(traceback.format_exception(error.value))


@pytest.mark.parametrize("content", ["I got {}, and that is all.", '{{"position": "{}"}}', '{{"{}": 2}}', "{}"])
def test_a_key_in_an_answer_is_masked(fault, question, content):
    """The ledger quotes a malformed answer, and so does the error of the first question."""

    def echo(request: web.Request, n: int) -> web.Response:
        return completion(content.format(request.headers["Authorization"]))

    verdict, call = ask(fault.judge(echo, 0), question)
    assert verdict is None and call.malformed
    assert "[key]" in call.answer
    with pytest.raises(JudgeError) as error:
        ask_first(fault.judge(echo, 0), question)
    assert "[key]" in str(error.value)
    for text in (repr(call), str(error.value)):
        assert not any(KEY[i : i + 8] in text for i in range(len(KEY) - 7))


def test_a_key_in_a_list_of_models_is_masked(fault):
    def echo(request: web.Request, n: int) -> web.Response:
        return web.json_response({"object": "list", "data": [{"id": request.headers["Authorization"]}]})

    async def listed(client) -> dict:
        try:
            return await client.models()
        finally:
            await client.close()

    assert asyncio.run(listed(fault.client(echo, 0))) == {"Bearer [key]": None}


def test_a_key_of_a_few_characters_changes_no_verdict(fault, question, monkeypatch):
    monkeypatch.setenv("FAULT_KEY", "2")
    assert ask(fault.judge(lambda request, n: completion('{"position": 2}'), 0), question)[0] == 2


def test_an_error_page_is_not_quoted(fault, question):
    _, call = ask(fault.judge(echo_plainly, 0), question)
    assert call.error.startswith("HTTP 400")
    assert KEY not in call.error


def ask_first(judge: Judge, question) -> None:
    async def run():
        try:
            await judge.first_question(question)
        finally:
            await judge.client.close()

    asyncio.run(run())


@pytest.mark.parametrize("part", [KEY[:-2], KEY[2:], KEY[5:13], KEY.upper()[:3] + KEY[3:]])
def test_a_part_of_the_key_is_masked(fault, question, part):
    _, call = ask(fault.judge(refusing(401, f"Incorrect key: {part}, see the page"), 0), question)
    assert "[key], see the page" in call.error
    assert all(KEY[i : i + 8] not in call.error for i in range(len(KEY) - 7))


@given(st.text("abcd", min_size=1, max_size=20), st.text("abcd .", max_size=200))
def test_of_a_masked_text_only_the_key_is_missing(key, text):
    length = min(8, len(key))
    pieces = {key[i : i + length] for i in range(len(key) - length + 1)}
    shown = masked(text, key).replace("[key]", "")
    assert shown == "".join(each for i, each in enumerate(text) if not covered(text, i, pieces, length))


def covered(text: str, place: int, pieces: set[str], length: int) -> bool:
    """Whether a piece of the key covers a place of a text."""
    starts = range(max(place - length + 1, 0), place + 1)
    return any(text[start : start + length] in pieces for start in starts)


@pytest.mark.parametrize("case", ECHOING)
def test_the_key_is_in_no_traceback_of_a_fault(fault, question, case):
    client = fault.client(ECHOING[case], 0)
    ask(Judge(client), question)
    assert KEY not in "".join(traceback.format_exception(client.fault))


def test_the_key_is_in_no_traceback_of_a_list_of_models(fault):
    async def models(client):
        try:
            await client.models()
        finally:
            await client.close()

    for handler in (echo_headers(503), echo_key):
        with pytest.raises(TransportError) as error:
            asyncio.run(models(fault.client(handler, 0)))
        assert "[key]" in str(error.value)
        assert KEY not in "".join(traceback.format_exception(error.value))


def test_of_what_a_server_echoes_a_few_lines_are_kept(fault, question):
    _, call = ask(fault.judge(echo_key_and_prompt, 0), question)
    assert "You are a strict" in call.error, "the server echoed no prompt, so this test shows nothing"
    assert CANDIDATE in question.prompt()
    assert CANDIDATE not in call.error
    assert len(call.error) == len("HTTP 422: ") + 300


# A whole step


@contextmanager
def judged_by(handler: Callable) -> Iterator[str]:
    """A server that answers `handler(request, prompt)`; gives its address."""

    async def chat(request: web.Request) -> web.Response:
        prompt = (await request.json())["messages"][0]["content"]
        response = handler(request, prompt)
        return await response if asyncio.iscoroutine(response) else response

    app = web.Application()
    app.router.add_post("/v1/chat/completions", chat)
    with served(app) as address:
        yield address + "/v1"


def number(prompt: str) -> web.Response:
    return completion(by_number([{"content": prompt}]))


def ledger(scorer: GroupScorer) -> Counter:
    return Counter(outcome for (outcome,) in scorer.store.rows("SELECT outcome FROM calls"))


def nothing_else(scorer: GroupScorer) -> bool:
    return not any(contents(scorer.store, ("responses", "buffers", "groups")).values())


def test_a_step_that_cannot_succeed_ends_before_all_is_asked(scorer):
    requests = []

    def refuse(request, prompt):
        requests.append(prompt)
        return refusing(404, "no such model")(request, 0)

    with judged_by(refuse) as url:
        made = scorer(Judge(OpenAIClient(url, "m", concurrency=4), guard=False))
        groups = [group(numbers(f"q{i}"), "1 2 3 4 5 6 7 8", 3) for i in range(8)]
        with pytest.raises(JudgeError) as error:
            made.score(groups, 3)
        # 64 insertions and at most 32 fine rankings: 24 failures are allowed
        parts = [f"m at {url}", "failed 25 of 25", "(25 unreachable)", "judge_max_failures=0.25", "no such model"]
        assert [part for part in parts if part not in str(error.value)] == []
        found = ledger(made)
        sent = sum(found.values())
        assert set(found) <= {"unreachable", "cancelled"}
        assert found["unreachable"] >= 25
        assert found["unreachable"] <= len(requests) <= sent < 64, "a question that was not sent left a call"
        assert list(made.store.rows("SELECT min(attempts), max(attempts) FROM calls")) == [(1, 1)]
        assert nothing_else(made)


def failing(insertions: frozenset[str], rankings: frozenset[str]) -> Callable:
    """The number judge, which fails these candidates, and the fine rankings that hold one of those."""

    def respond(messages):
        _, is_ranking, block = messages[0]["content"].partition("\n\nCANDIDATES\n")
        if is_ranking:
            return "Hm." if rankings & set(block.split()) else by_number(messages)
        candidate = messages[0]["content"].rpartition("\n\nCANDIDATE\n")[2].partition("\n")[0]
        return unreachable(messages) if candidate in insertions else by_number(messages)

    return respond


@pytest.fixture(scope="module")
def tester(tmp_path_factory) -> Iterator[GroupScorer]:
    """Evaluates alone, so that every step is the first."""
    store = BufferStore(tmp_path_factory.mktemp("tester") / "store.sqlite")
    store.rows("PRAGMA synchronous = OFF")  # hundreds of steps, and none has to outlast a power cut
    made = GroupScorer(RankBuffer(), scripted_judge(by_number, max_attempts=1), store)
    yield made
    made.close()


TEXTS = st.sampled_from("5 15 16 17 25 26 45 46 47 48 -".split())


@settings(max_examples=150)
@given(
    texts=st.lists(st.lists(TEXTS, min_size=1, max_size=8).map(" ".join), min_size=1, max_size=4),
    insertions=st.frozensets(TEXTS),
    rankings=st.frozensets(TEXTS),
    share=st.integers(0, 32).map(lambda n: n / 32),
    method=st.sampled_from([RankBuffer(), RankBuffer(fine=False), RankBuffer(bootstrap=True)]),
)
def test_an_early_end_is_never_a_wrong_end(tester, texts, insertions, rankings, share, method):
    tester.method = method
    tester.judge.client.answer = failing(insertions, rankings)
    groups = [group(numbers(f"q{i}"), line, 0) for i, line in enumerate(texts)]
    tester.max_failures = 1.0
    calls = tester.score(groups, 0, update=False).calls
    failed = sum(call.failed for call in calls)
    for allowed in (share, failed / max(len(calls), 1)):
        tester.max_failures = allowed
        try:
            tester.score(groups, 0, update=False)
        except JudgeError:
            stopped = True
        else:
            stopped = False
        assert stopped == (failed / max(len(calls), 1) > allowed)


class Hanging:
    """The number judge, which for a while says nothing about some candidates."""

    name = "hanging judge"

    def __init__(self, *candidates: str):
        self.candidates = candidates

    async def complete(self, messages, *, question, seed, tally):
        tally.server, tally.attempts = self.name, tally.attempts + 1
        if any(f"\n\nCANDIDATE\n{text}\n" in messages[0]["content"] for text in self.candidates):
            await asyncio.sleep(EVENT_LIMIT)  # so that a step without an end would fail its test
        return by_number(messages), Usage(10, 4, 3)

    async def close(self):
        pass


def test_a_step_that_lasts_too_long_ends_and_can_be_scored_again(scorer):
    client = Hanging("50")
    made = scorer(Judge(client, guard=False), step_timeout=1.0)
    groups = [group(numbers("n"), "50 5", 4, 0), group(numbers("m"), "60 61 4", 4, 0)]
    with pytest.raises(JudgeError) as error:
        made.score(groups, 4)
    parts = ["hanging judge", "judge_step_timeout=1 s", "5 judgments were answered", "0 failed"]
    assert [part for part in parts if part not in str(error.value)] == []
    calls = list(made.store.rows("SELECT step, phase, query_id, kind, outcome, attempts FROM calls ORDER BY rowid"))
    assert calls == [
        (4, "train", "m", "fine", "parsed", 1),
        *[(4, "train", "m", "insert", "parsed", 1)] * 3,
        (4, "train", "n", "insert", "cancelled", 1),
        (4, "train", "n", "insert", "parsed", 1),
    ]
    assert nothing_else(made)
    assert (made.store.totals().calls, made.store.totals().failures) == (5, 0)
    client.candidates = ()
    assert [score.rewards for score in made.score(groups, 4).scores] == [(1.0, -1.0), (0.0, 1.0, -1.0)]
    assert made.store.load("n").visits == made.store.load("m").visits == 1


def test_a_hanging_evaluation_ends_too(scorer):
    made = scorer(Judge(Hanging("50"), guard=False), step_timeout=0.5)
    with pytest.raises(JudgeError, match="judge_step_timeout"):
        made.score([group(numbers(), "50 5", 0)], 0, update=False)
    assert list(made.store.rows("SELECT phase, outcome FROM calls ORDER BY outcome")) == [
        ("eval", "cancelled"),
        ("eval", "parsed"),
    ]


class Withheld:
    """A server that holds all requests back until all of them are there, and notes whose connection is dropped."""

    def __init__(self, requests: int, then: Callable[[], None] = lambda: None, failing: str = ""):
        self.requests, self.then, self.failing = requests, then, failing
        self.arrived = self.dropped = 0
        self.all_here, self.all_gone = asyncio.Event(), threading.Event()

    async def __call__(self, request: web.Request, prompt: str) -> web.Response:
        self.arrived += 1
        if self.arrived == self.requests:
            self.all_here.set()
            self.then()
        if self.failing and f"\n\nCANDIDATE\n{self.failing}\n" in prompt:
            await self.all_here.wait()
            return web.Response(status=404)
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            self.dropped += 1
            if self.dropped == self.requests - bool(self.failing):
                self.all_gone.set()
            raise


EIGHT = "1 2 3 4 5 6 7 8"


def test_a_step_that_ends_early_drops_what_is_in_flight(scorer):
    withheld = Withheld(8, failing="5")
    with judged_by(withheld) as url:
        made = scorer(Judge(OpenAIClient(url, "m", max_retries=3), guard=False), max_failures=0.0)
        with pytest.raises(JudgeError, match=r"failed 1 of 1 judgments"):
            made.score([group(numbers(), EIGHT, 0)], 0)
        assert withheld.all_gone.wait(EVENT_LIMIT), f"{withheld.dropped} of 7 were dropped"
        assert ledger(made) == {"unreachable": 1, "cancelled": 7}
        assert withheld.arrived == 8


def test_a_step_that_lasts_too_long_drops_what_is_in_flight(scorer):
    withheld = Withheld(8)
    with judged_by(withheld) as url:
        made = scorer(Judge(OpenAIClient(url, "m", max_retries=3), guard=False), step_timeout=2.0)
        with pytest.raises(JudgeError, match="judge_step_timeout=2 s: 0 judgments were answered, 0 failed"):
            made.score([group(numbers(), EIGHT, 0)], 0)
        assert withheld.all_gone.wait(EVENT_LIMIT), f"{withheld.dropped} of 8 were dropped"
        assert ledger(made) == {"cancelled": 8}


def test_an_interrupt_drops_what_is_in_flight(scorer):
    main = threading.main_thread().ident
    withheld = Withheld(8, then=lambda: signal.pthread_kill(main, signal.SIGINT))
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a process in the background ignores SIGINT
    try:
        with judged_by(withheld) as url:
            made = scorer(Judge(OpenAIClient(url, "m", max_retries=3), guard=False))
            with pytest.raises(KeyboardInterrupt):
                made.score([group(numbers(), EIGHT, 0)], 0)
            assert withheld.all_gone.wait(EVENT_LIMIT), f"{withheld.dropped} of 8 were dropped"
            assert nothing_else(made)
    finally:
        signal.signal(signal.SIGINT, before)


def test_a_dropped_step_frees_all_slots(scorer):
    answering = False

    async def later(request, prompt):
        return number(prompt) if answering else await hang(request, 0)

    with judged_by(later) as url:
        made = scorer(Judge(OpenAIClient(url, "m", max_retries=0, concurrency=2), guard=False), step_timeout=0.5)
        with pytest.raises(JudgeError, match="judge_step_timeout"):
            made.score([group(numbers(), EIGHT, 0, 0)], 0)
        assert ledger(made) == {"cancelled": 2}, "what waited for its turn was not sent, so it leaves no call"
        answering, made.step_timeout = True, PATIENT
        outcome = made.score([group(numbers(), EIGHT, 0, 0)], 0)
        assert outcome.scores[0].rewards == tuple(-1 + 2 * i / 7 for i in range(8))
        assert Counter(call.outcome for call in outcome.calls) == {"parsed": 9}


def test_a_server_that_only_keeps_the_line_open_is_ended_with_the_step(scorer):
    async def keep_open(request, prompt):
        response = web.StreamResponse(headers={"Content-Type": "application/json"})
        await response.prepare(request)
        while True:  # as some proxies do while a model thinks
            await response.write(b" ")
            await asyncio.sleep(0.05)

    with judged_by(keep_open) as url:
        made = scorer(Judge(OpenAIClient(url, "m", timeout=PATIENT), guard=False), step_timeout=0.5)
        with pytest.raises(JudgeError, match="judge_step_timeout"):
            made.score([group(numbers(), "50 5", 0)], 0)
        assert ledger(made) == {"cancelled": 2}


def test_a_server_that_dies_within_a_step_stops_the_run_and_is_named(scorer):
    requests = []

    def die(request, prompt):
        requests.append(prompt)
        return number(prompt) if len(requests) <= 4 else close(request, 0)

    with judged_by(die) as url:
        made = scorer(Judge(OpenAIClient(url, "m", max_retries=0, concurrency=1), guard=False))
        with pytest.raises(JudgeError, match=f"m at {url}.*4 of 8 judgments.*4 unreachable.*disconnected"):
            made.score([group(numbers(), EIGHT, 0)], 0)
        assert {outcome: n for outcome, n in ledger(made).items() if outcome != "cancelled"} == {
            "parsed": 4,
            "unreachable": 4,
        }
        assert nothing_else(made)


def test_an_error_of_the_program_is_not_taken_for_the_judges(scorer):
    made = scorer(scripted_judge(lambda messages: KeyError("a bug")))
    with pytest.raises(KeyError, match="a bug"):
        made.score([group(numbers(), EIGHT, 0), group(numbers("m"), EIGHT, 0)], 0)
    assert nothing_else(made)


def test_the_calls_of_a_step_that_crashed_do_not_count_in_the_next(scorer):
    def crash(messages):
        return KeyError("a bug") if "\n8\n" in messages[0]["content"] else by_number(messages)

    made = scorer(scripted_judge(crash))
    with pytest.raises(KeyError):
        made.score([group(numbers(), EIGHT, 0)], 0)
    made.judge.client.answer = by_number
    assert len(made.score([group(numbers(), "50 5", 1)], 1).calls) == 2
    assert list(made.store.rows("SELECT count(*) FROM calls WHERE step = 1")) == [(2,)]
