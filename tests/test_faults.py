"""Fault by fault, what a judge server that misbehaves does to one question, over real sockets.

`PASSING` and `LASTING` are the table of HTTP faults. Whole steps are in `test_step_faults.py`.
"""

import asyncio
import socket
import time
import tracemalloc
import zlib
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from email.utils import formatdate

import pytest
from aiohttp import web
from conftest import ask, ask_all, by_number, group, numbers, scripted_judge
from helpers.faulty_server import (
    CANDIDATE,
    EVENT_LIMIT,
    GOOD,
    KEY,
    PATIENT,
    SURROGATE,
    Noting,
    ask_first,
    body,
    close,
    completion,
    cut_off,
    hang,
    hang_in_the_body,
    in_turn,
    once,
    refusing,
    reset,
    saying,
    slow,
    status,
    within,
)
from helpers.http_server import served

from rankbuffer_trl.groups import Rollout
from rankbuffer_trl.judge import Judge, JudgeError, TransportError, Usage, openai_client
from rankbuffer_trl.judge import insertion_question as coarse
from rankbuffer_trl.judge import ranking_question as fine
from rankbuffer_trl.judge.judge import warn_of_counts
from rankbuffer_trl.judge.ledger import MOST_TOKENS
from rankbuffer_trl.judge.openai_client import OpenAIClient
from rankbuffer_trl.judge.reach import check_server

ANSWERED, NOTHING = Usage(20, 16, 5), Usage()


@pytest.fixture
def question(query):
    return coarse(query, ["bad", "good"], CANDIDATE)


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


def test_half_an_emoji_in_an_answer_is_asked_again(fault, question):
    verdict, call = ask(fault.judge(once(saying(SURROGATE)), 0), question)
    assert (verdict, call.outcome, call.attempts, call.malformed) == (1, "parsed", 2, 1)
    assert fault.seen[1]["messages"][1]["content"] == "I would say ?"


def test_half_an_emoji_in_an_error_is_escaped(fault, question):
    _, call = ask(fault.judge(refusing(400, SURROGATE), 0), question)
    assert call.error == "HTTP 400: I would say \\ud83d"


def test_control_characters_of_an_error_are_escaped(fault, question):
    _, call = ask(fault.judge(refusing(400, "\x1b[2J\r\nBuy \x00now\u202e"), 0), question)
    assert call.error == "HTTP 400: \\x1b[2J\\r\\nBuy \\x00now\\u202e"


async def drip(request: web.Request, n: int) -> web.StreamResponse:
    """A blank now and then, for ever: no read takes long."""
    response = web.StreamResponse(headers={"Content-Type": "application/json"})
    await response.prepare(request)
    while True:
        await response.write(b" ")
        await asyncio.sleep(0.02)


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
