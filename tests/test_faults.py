"""Fault by fault, what a judge server that misbehaves does to one question, over real sockets.

`PASSING` and `LASTING` are the table of HTTP faults. The key of the server reaches no ledger, message or traceback,
whatever the fault. Whole steps are in `test_step_faults.py`.
"""

import json
import math
import socket
import ssl
import time
import traceback
import tracemalloc
import zlib
from base64 import b64encode, urlsafe_b64encode
from collections.abc import Callable
from dataclasses import replace
from email.utils import formatdate
from urllib.parse import quote

import anyio
import pytest
from aiohttp import web
from conftest import ask, ask_all, by_number, group, numbers, scripted_judge
from helpers.servers import (
    CANDIDATE,
    EVENT_LIMIT,
    GOOD,
    KEY,
    PATIENT,
    SOON,
    SURROGATE,
    Noting,
    ask_first,
    body,
    close,
    completion,
    cut_off,
    drip,
    hang,
    hang_in_the_body,
    in_turn,
    once,
    refusing,
    reset,
    saying,
    served,
    slow,
    status,
    within,
)
from hypothesis import given
from hypothesis import strategies as st

from rankbuffer_tools.batch.server_check import check_server
from rankbuffer_tools.rubric_server import make_app
from rankbuffer_tools.train.ending import exit_code
from rankbuffer_trl.judge import Judge, JudgeError, TransportError, Usage, insertion_question, pointwise_question
from rankbuffer_trl.judge import _openai_client as openai_client
from rankbuffer_trl.judge._completion import ALL_THOUGHT, CUT_OFF, WITHHELD, read_completion
from rankbuffer_trl.judge._errors import masked
from rankbuffer_trl.judge._judge import ODD, warn_of_counts, warn_of_odd_count
from rankbuffer_trl.judge._ledger import MOST_TOKENS
from rankbuffer_trl.judge._openai_client import OpenAIClient
from rankbuffer_trl.judge._servers import Servers
from rankbuffer_trl.training._first import first_question

ANSWERED, NOTHING = Usage(20, 16, 5), Usage()


@pytest.fixture
def question(query):
    return insertion_question(query, ["bad", "good"], CANDIDATE)


def echoing(answer: Callable[[str], Callable]) -> Callable:
    """A server that repeats the headers of a request, and with them the key."""
    return lambda request, n: answer(str(dict(request.headers)))(request, n)


async def echo_prompt(request: web.Request, n: int) -> web.Response:
    asked = await request.json()
    return refusing(422, f"{request.headers['Authorization']} asked {asked['messages']}")(request, n)


def compressed(content: bytes, times: int = 1, encoding: str = "gzip") -> Callable:
    """A body that is `content` so many times, without ever having it in memory."""
    squeeze = zlib.compressobj(wbits=31)
    small = b"".join([squeeze.compress(content) for _ in range(times)] + [squeeze.flush()])
    return body(small, headers={"Content-Encoding": encoding})


def text_part(text: object) -> dict:
    return {"type": "text", "text": text}


def inside(**content: object) -> Callable:
    """An error inside an answer with status 200, as gateways send it."""
    return body(json.dumps(content).encode(), headers=SOON)


def choice(content: object, reason: object, **more: object) -> dict:
    return {"message": {"content": content}, "finish_reason": reason} | more


BUSY = {"message": "Rate limit exceeded", "code": 429}
BEHIND = {"code": 502, "message": "Provider returned error", "metadata": {"raw": "upstream closed"}}
THOUGHTS = {"type": "thinking", "thinking": [text_part("Hm.")]}
PASSING = {  # what the server does: (handler, transport retries allowed, requests sent)
    "fine": (saying(GOOD), 0, 1),
    **{f"{code} once": (once(status(code, "<html>")), 1, 2) for code in (408, 429, 500, 502, 503, 504)},
    "closed once": (once(close), 1, 2),
    "reset once": (once(reset), 1, 2),
    "cut off once": (once(cut_off), 1, 2),
    "500, then reset": (in_turn(status(500), reset, saying(GOOD)), 2, 3),
    "hanging once": (once(hang), 1, 2),
    "slow": (slow, 0, 1),
    "malformed once": (once(saying("Hm.")), 0, 2),
    "malformed once, half an emoji": (once(saying(SURROGATE)), 0, 2),
    "compressed": (compressed(completion(GOOD).body), 0, 1),
    "in two parts": (saying([text_part(GOOD[:5]), text_part(GOOD[5:])]), 0, 1),
    "with thoughts": (saying([THOUGHTS, text_part(GOOD)]), 0, 1),
    "429 inside once": (once(inside(error=BUSY)), 1, 2),
    "502 in a choice once": (once(inside(choices=[choice("", "error", error=BEHIND)])), 1, 2),
    **{f"{word} once": (once(inside(choices=[choice(GOOD, word)])), 1, 2) for word in ("abort", "network_error")},
    "errors in a list once": (once(inside(success=False, errors=[{"code": 7009, "message": "try again"}])), 1, 2),
    "a model that loads once": (once(inside(choices=[choice("", None, done_reason="load")])), 1, 2),
    "an error without a name once": (once(inside(code=429, message="slow down")), 1, 2),
    "no choices once": (once(inside(choices=None)), 1, 2),
    "a rate limit in words once": (once(inside(error={"code": "rate_limit_exceeded", "message": "slow"})), 1, 2),
    "an error beside null choices once": (once(inside(choices=None, base_resp={"status_msg": "rate limit"})), 1, 2),
}
# seconds that a request may go without a byte
HANGING = {"hanging once": 1.0, "hanging": 0.5, "hanging in the body": 0.5, "dripping": 0.2}

NO_CHAT = "not a chat completion"
HERE = "/v1/chat/completions?"
LASTING = {  # what the server does: (handler, retries, requests sent, kind of fault or "malformed", part of the error)
    "closed without answer": (close, 1, 2, "down", "disconnected"),
    "reset": (reset, 0, 1, "down", "reset"),
    "cut off": (cut_off, 0, 1, "down", "ContentLengthError"),
    "hanging": (hang, 1, 2, "down", "Timeout"),
    "hanging in the body": (hang_in_the_body, 0, 1, "down", "Timeout"),
    "dripping": (drip, 1, 2, "down", "no whole answer within 1 s"),
    "always 502": (status(502), 1, 2, "down", "HTTP 502"),
    "always 503": (refusing(503, "no upstream"), 1, 2, "down", "HTTP 503: no upstream"),
    "always 504": (status(504), 1, 2, "down", "HTTP 504"),
    **{f"always {code}": (status(code), 1, 2, "down", f"HTTP {code}") for code in (520, 521, 529, 530)},
    **{f"always {code}": (status(code, "early"), 1, 2, "busy", f"HTTP {code}") for code in (425, 499)},
    "always 500": (status(500, "on fire"), 1, 2, "busy", "HTTP 500"),
    "always 429": (refusing(429, "slow down"), 1, 2, "busy", "slow down"),
    "429, come back in an hour": (status(429, headers={"Retry-After": "3600"}), 1, 1, "busy", "HTTP 429"),
    "500, not to be retried": (status(500, headers={"X-Should-Retry": "false"}), 1, 1, "busy", "HTTP 500"),
    "500, then 404": (in_turn(status(500), status(404)), 1, 2, "refused", "HTTP 404"),
    "400, too long a prompt": (refusing(400, "maximum context length is 64 tokens"), 2, 1, "refused", "is 64 tokens"),
    "401": (refusing(401, "no"), 2, 1, "refused", "no (the environment variable FAULT_KEY should hold the key; see"),
    "403": (refusing(403, "no"), 2, 1, "refused", "no (the environment variable FAULT_KEY should hold the key; see"),
    "404, another model": (refusing(404, "The model `m` does not exist."), 2, 1, "refused", "`m` does not exist"),
    **{
        f"{code}, a redirect": (status(code, headers={"Location": HERE + KEY}), 2, 1, "refused", f"{HERE}[key], which")
        for code in (301, 302, 303, 307, 308)
    },
    "control characters": (refusing(400, "\x1b[2J\nBuy \x00now\u202e"), 0, 1, "refused", r"0: \x1b[2J\nBuy \x00now"),
    "half an emoji in an error": (refusing(400, SURROGATE), 0, 1, "refused", r"HTTP 400: I would say \ud83d"),
    "HTML page": (body(b"<html>Welcome to nginx</html>", "text/html"), 2, 1, "refused", "web page: does judge_url"),
    "an error that is a text": (body(b'{"error": "bad seed"}', code=422), 2, 1, "refused", "HTTP 422: bad seed"),
    "a list of details": (body(b'{"detail": [{"msg": "no seed"}]}', code=422), 2, 1, "refused", "HTTP 422: no seed"),
    "no body": (body(b" ", headers=SOON), 1, 2, "busy", "it ends too early"),
    "half a JSON": (body(b'{"choices": [', headers=SOON), 1, 2, "busy", "it ends too early"),
    "half a string": (body(b'{"choices": [{"mess', headers=SOON), 1, 2, "busy", "it ends too early"),
    "no UTF-8": (body(b"\xff\xfe{}"), 2, 1, "refused", NO_CHAT),
    "not the encoding it says": (body(b"{}", headers={"Content-Encoding": "gzip"}), 0, 1, "down", "decompress"),
    **{
        f"encoding {name}": (compressed(b" ", 1, name), 2, 1, "refused", f"content encoding '{name}'")
        for name in ("br", "zstd", "gzip, gzip", "unheard-of")
    },
    "a JSON list": (body(b"[1]"), 2, 1, "refused", NO_CHAT),
    "a JSON null": (body(b"null"), 2, 1, "refused", NO_CHAT),
    "a JSON too deep": (body(b"[" * 200_000), 2, 1, "refused", NO_CHAT),
    "no choices": (body(b'{"id": "x"}'), 2, 1, "refused", NO_CHAT),
    "empty choices": (inside(choices=[]), 1, 2, "busy", "no choices"),
    "choice without message": (body(b'{"choices": [{"index": 0}]}'), 2, 1, "refused", NO_CHAT),
    "error with status 200": (inside(error={"message": "no"}), 2, 1, "refused", "HTTP 400: inside an answer"),
    "429 inside": (inside(error=BUSY), 1, 2, "busy", "HTTP 429: inside an answer with HTTP 200: Rate limit exceeded"),
    "502 inside": (inside(choices=[choice("", None, error=BEHIND)]), 1, 2, "down", "error: upstream closed"),
    "a list of an error": (body(b'[{"error": {"code": 503, "message": "later"}}]'), 0, 1, "down", "HTTP 503: inside"),
    "a key refused inside": (inside(error={"type": "authentication_error"}), 2, 1, "refused", "see judge_api_key_env"),
    "a stream with a comment": (body(b": wait\n\ndata: {}\n"), 2, 1, "refused", "it streams its answer"),
    "a stream": (body(b'data: {"choices": []}\n\ndata: [DONE]\n'), 2, 1, "refused", "it streams its answer"),
    "null message": (inside(choices=[{"message": None}]), 2, 1, "refused", NO_CHAT),
    "a number": (saying(7), 0, 1, "refused", NO_CHAT),
    "an object": (saying({"position": 1}), 0, 1, "refused", NO_CHAT),
    "a part that is none": (saying([7]), 0, 1, "refused", NO_CHAT),
    "a part without text": (saying([{"type": "text"}]), 0, 1, "refused", NO_CHAT),
    "a part without type": (saying([{"text": GOOD}]), 0, 1, "refused", NO_CHAT),
    "a part with a number": (saying([text_part(7)]), 0, 1, "refused", NO_CHAT),
    "headers echoed, 400": (echoing(lambda text: refusing(400, text)), 0, 1, "refused", "[key]"),
    "headers echoed, 403": (echoing(lambda text: refusing(403, text)), 0, 1, "refused", "[key]"),
    "headers echoed, 503": (echoing(lambda text: refusing(503, text)), 0, 1, "down", "[key]"),
    "headers echoed as a page": (echoing(lambda text: status(400, text)), 0, 1, "refused", "HTTP 400"),
    "a part of the key echoed": (refusing(401, f"Bad key: {KEY[5:13]}, see"), 0, 1, "refused", "Bad key: [key], see"),
    "the key in capitals": (refusing(401, f"Bad key: {KEY.upper()}, see"), 0, 1, "refused", "Bad key: [key], see"),
    "the key as an encoding": (body(b"", headers={"Content-Encoding": KEY}), 0, 1, "refused", "encoding '[key]'"),
    "key and prompt echoed": (echo_prompt, 0, 1, "refused", "HTTP 422: Bearer [key] asked [{'role': 'user', 'content"),
    "null content": (saying(None), 0, 2, "malformed", "flat JSON object"),
    "empty content": (saying(""), 0, 2, "malformed", "flat JSON object"),
    "verdict cut off": (saying('{"posit'), 0, 2, "malformed", "flat JSON object"),
    "garbage": (saying("\x00\u2603 lorem {{ipsum"), 0, 2, "malformed", "JSON"),
    "position out of range": (saying('{"position": 3}'), 0, 2, "malformed", "from 0 through 2, not 3"),
    "key in prose": (echoing(saying), 0, 2, "malformed", "JSON"),
    "key as a verdict": (saying(f'{{"position": "{KEY}"}}'), 0, 2, "malformed", 'not "[key]"'),
    "key as a key": (saying(f'{{"{KEY}": 2}}'), 0, 2, "malformed", "exactly once"),
}


def check_key(text: str) -> None:
    assert not any(KEY[i : i + 8] in text.lower() for i in range(len(KEY) - 7))


@pytest.mark.parametrize("case", PASSING)
def test_client_survives_a_passing_fault_at_the_price_of_attempts(fault, question, case):
    handler, retries, requests = PASSING[case]
    verdict, call = ask(fault.judge(handler, retries, HANGING.get(case, PATIENT)), question)
    assert verdict == 1
    assert (call.outcome, call.server, call.usage, call.error) == ("parsed", fault.netloc, ANSWERED, "")
    assert (call.attempts, len(fault.seen)) == (requests, requests)
    assert call.spent == (ANSWERED + ANSWERED if case.startswith("malformed") else ANSWERED)


@pytest.mark.parametrize("case", LASTING)
def test_client_makes_no_score_of_a_lasting_fault_and_shows_no_key(fault, question, case):
    handler, retries, requests, kind, part = LASTING[case]
    judge = fault.judge(handler, retries, HANGING.get(case, PATIENT))
    verdict, call = ask(judge, question)
    assert verdict is None
    assert (call.server, call.usage) == (fault.netloc, NOTHING)
    assert part in call.error
    assert CANDIDATE not in call.error
    assert len(call.error) < 400 and call.error.isprintable()
    assert (call.attempts, len(fault.seen)) == (requests, requests)
    if kind == "malformed":
        assert (call.outcome, call.spent) == ("malformed", ANSWERED + ANSWERED)
        check_key(call.answer)
    else:
        assert (call.outcome, call.spent) == ("unreachable", NOTHING)
        assert judge.client.fault.kind == kind
        check_key("".join(traceback.format_exception(judge.client.fault)))
    check_key(repr(call))


def test_client_retries_a_refused_connection(question):
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))  # bound but not listening: refused, and nobody else gets the port
        url = f"http://127.0.0.1:{unused.getsockname()[1]}/v1"
        verdict, call = ask(Judge(client := Noting(url, "m", max_retries=1)), question)
        with pytest.raises(JudgeError, match=rf"m at {url}.*Connect.* Is the server up"):
            ask_first(Judge(Noting(url, "m", max_retries=0)), question)
    assert verdict is None
    assert (call.outcome, call.attempts, call.usage, call.spent) == ("unreachable", 2, NOTHING, NOTHING)
    assert "Connect" in call.error
    assert client.fault.kind == "down"


def test_a_hint_fits_the_status(fault, question):
    told = {
        404: "Is the server up",
        429: "lower judge_concurrency",
        422: "refuses the request",
        503: "Is the server up",
        (400, "This model's maximum context length is 4096 tokens"): "need a longer context",
        (400, "The response was filtered by our content management policy"): "server's filter",
        (403, "Your input was flagged"): "server's filter",
        (403, "Key limit exceeded (total limit)"): "has no credit left",
    }
    for code, hint in told.items():
        answer = status(code) if isinstance(code, int) else refusing(*code)
        outcome = "unreachable" if code in (429, 503) else "refused"
        with pytest.raises(JudgeError, match=rf"Outcome: {outcome}.*HTTP .* {hint}") as error:
            ask_first(fault.judge(answer, 0), question)
        assert "should hold the key" not in str(error.value) and "/v1?" not in str(error.value)
    for url, hinted in ((fault.url.removesuffix("/v1"), True), (fault.url + "/nowhere", False)):
        with pytest.raises(JudgeError, match="HTTP 404") as error:
            ask_first(Judge(Noting(url, "m")), question)
        assert ("(does judge_url end in /v1?)" in str(error.value)) == hinted, url


def test_client_names_another_model_that_answers_once(fault, question, caplog):
    named = ("gpt-4o-2024-08-06", "openai/gpt-4o", "gpt-4o:nitro", "GPT-4o-latest", "", None, 7)
    for model in (*named, "gpt-4o-mini", "gpt-4o-mini", "llama-3"):
        text = completion(GOOD).body.replace(b'"model": "m"', b'"model": ' + json.dumps(model).encode())
        client = fault.client(body(text), 0)
        client.model = "gpt-4o"
        assert ask_all(Judge(client), [question]) == [1]
    lines = [line for line in caplog.messages if "was asked for the model gpt-4o and answers as" in line]
    assert [line.split("answers as ")[1].split(":")[0] for line in lines] == ["gpt-4o-mini", "llama-3"]


def test_client_names_several_providers_behind_one_address_once(fault, question, caplog, monkeypatch):
    monkeypatch.setattr(openai_client, "PROVIDERS", {})
    for provider in (None, "Alpha", "Alpha", "Beta", "Gamma", "Alpha"):
        text = completion(GOOD).body.replace(
            b'"model"', b'"provider": ' + json.dumps(provider).encode() + b', "model"'
        )
        assert ask_all(Judge(fault.client(body(text), 0)), [question]) == [1]
    (line,) = [line for line in caplog.messages if "by several providers" in line]
    assert "such as Alpha and Beta, whose verdicts may differ" in line


def test_client_takes_no_key_and_no_account_from_the_environment(fault, question, monkeypatch):
    monkeypatch.setenv("OPENAI_CUSTOM_HEADERS", "Authorization: Bearer of-another-server\nX-Mine: of-another-server")
    monkeypatch.setenv("OPENAI_ORG_ID", "of-another-server")
    monkeypatch.setenv("OPENAI_PROJECT_ID", "of-another-server")
    sent: list[str] = []
    client = fault.client(lambda request, n: sent.append(str(request.headers)) or completion(GOOD), 0)
    assert ask_all(Judge(client), [question]) == [1]
    anyio.run(fault.client(lambda request, n: sent.append(str(request.headers)) or completion(GOOD), 0).alive)
    assert len(sent) >= 2 and "of-another-server" not in str(sent)
    own = OpenAIClient("https://api.openai.com/v1", "m")._client
    assert own.organization == own.project == "of-another-server"


def test_client_waits_as_long_as_a_server_says(fault, question, monkeypatch):
    sleep, slept = anyio.sleep, []

    async def note(seconds: float) -> None:
        slept.append(seconds)
        await sleep(0)

    monkeypatch.setattr(anyio, "sleep", note)
    soon = formatdate(time.time() + 50, usegmt=True)
    for code, header in ((429, "3"), (503, soon)):
        assert ask(fault.judge(once(status(code, headers={"Retry-After": header})), 1), question)[0] == 1
    late = fault.judge(status(429, headers={"Retry-After": formatdate(time.time() + 500, usegmt=True)}), 1)
    ask(late, question)
    assert 400 < late.client.fault.retry_after <= 500
    seconds, until_the_date = [each for each in slept if each > 0]
    assert seconds == 3
    assert 3 < until_the_date <= 50


# The request and its key


def test_client_sends_the_key_and_decodes_deterministically(fault, question):
    keys = []

    def remember(request, n):
        keys.append(request.headers["Authorization"])
        return completion("Hm." if n == 1 else GOOD)

    ask(fault.judge(remember, 0), question)
    assert keys == [f"Bearer {KEY}"] * 2
    assert [request["temperature"] for request in fault.seen] == [0, 0]
    assert [request["max_tokens"] for request in fault.seen] == [256 + len('{"position": 2}') + 1] * 2
    assert [len(request["messages"]) for request in fault.seen] == [1, 3]
    assert fault.seen[0]["messages"] == question.chat()
    assert len({request["seed"] for request in fault.seen}) == 2


def test_client_sends_no_other_key_of_the_environment_and_names_the_variable(fault, question, monkeypatch):
    """The official client reads `OPENAI_ADMIN_KEY` by itself."""
    monkeypatch.setenv("OPENAI_ADMIN_KEY", "sk-of-an-administrator")
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    keys = []

    def remember(request, n):
        keys.append(request.headers["Authorization"])
        return refusing(403, "no")(request, n)

    async def look(client):
        _, call = await Judge(client).ask_with_cost(question)
        await client.alive()
        await client.count_tokens("How long?")
        return call

    fault.client(remember, 0)
    client = OpenAIClient(fault.url, "m", max_retries=0)
    call = within(PATIENT, client, lambda: look(client))
    assert "the environment variable OPENAI_API_KEY is not set and should hold the key" in call.error
    assert keys == ["Bearer none"] * 3


def test_client_leaves_a_key_of_a_few_characters_in_a_verdict(fault, question, monkeypatch):
    monkeypatch.setenv("FAULT_KEY", "2")
    assert ask(fault.judge(saying('{"position": 2}'), 0), question)[0] == 2


@given(st.text("abcd", min_size=1, max_size=20), st.text("abcdABCD .\u0130YQ", max_size=200))
def test_masked_leaves_out_the_key_alone(key, text):
    length = min(8, len(key))
    pieces = {key[i : i + length] for i in range(len(key) - length + 1)}
    starts = [start for start in range(len(text)) if text[start : start + length].lower() in pieces]
    covered = {start + i for start in starts for i in range(length)}
    shown = "".join(each for i, each in enumerate(text) if i not in covered)
    assert masked(text, key).replace("[key]", "") == shown


@given(st.text("aB1-_/+=?>~", min_size=8, max_size=60), st.text("KL: ", max_size=9), st.text("KL: ", max_size=9))
def test_masked_leaves_out_a_key_that_a_server_has_encoded(key, before, after):
    for encode in (b64encode, urlsafe_b64encode):
        said = encode(f"{before}{key}{after}".encode()).decode()
        start, end = math.ceil(len(before) * 4 / 3), (len(before) + len(key)) * 4 // 3  # what the key alone decides
        assert len(masked(said, key).replace("[key]", "")) <= len(said) - (end - start), said
    for said in (quote(key), quote(key, safe=""), "".join(f"%{ord(each):02X}" for each in key)):
        assert masked(f"{before}{said}{after}", key) == f"{before}[key]{after}"


# What the environment and the server decide


@pytest.mark.parametrize(
    ("owner", "role", "neutral"),
    [("vllm", "judge", True), ("sglang", "judge", True), ("vllm", "sampler", False), ("library", "judge", False)],
)
def test_client_asks_vllm_without_the_penalties_of_the_model(owner, role, neutral, fault, question, monkeypatch):
    def handle(request, n):
        if request.path == "/v1/models":
            return web.json_response({"object": "list", "data": [{"id": "m", "owned_by": owner}]})
        return completion(GOOD)

    settings = {"request": {"min_p": None}, "role": role}
    monkeypatch.setattr(openai_client, "VLLM", {})
    assert ask_all(Judge(Servers([fault.client(handle, 0, **settings)])), [question] * 3) == [1] * 3
    assert len(fault.seen) == 3 + (role == "judge"), "one look at the models, before the first question"
    penalties = {"repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0}
    expected = penalties | {"top_k": -1, "top_p": 1.0} if neutral else {}
    assert fault.seen[-1].items() & openai_client.NEUTRAL.items() == expected.items()


def test_a_list_of_models_that_fails_or_hangs_holds_no_question(fault, question, monkeypatch):
    monkeypatch.setattr(openai_client, "PENALTY_SECONDS", 0.1)
    for answer in (status(500), status(429), hang):
        monkeypatch.setattr(openai_client, "VLLM", {})
        judge = Judge(Servers([fault.client(by_path(answer, saying(GOOD)), 2)]))
        assert ask_all(judge, [question] * 3) == [1] * 3
        assert len(fault.seen) == fault.asked + 1, "one look, without retries"


def by_path(models: Callable, chat: Callable) -> Callable:
    return lambda request, n: (models if request.path == "/v1/models" else chat)(request, n)


@pytest.mark.parametrize(
    ("answer", "gone"),
    [(status(404), True), (status(503), True), (body(b"<html>"), True), (saying("p"), False)]
    + [(status(code), False) for code in (400, 402, 403, 429)] + [(hang, False)],
)  # fmt: skip
def test_a_refused_token_or_a_late_one_shows_that_a_server_is_there(answer, gone, fault, monkeypatch):
    monkeypatch.setattr(openai_client, "PROBE_SECONDS", 0.1)
    client = fault.client(answer, 0)
    assert within(PATIENT, client, client.gone) is gone


def test_client_uses_no_proxy_of_the_environment_on_this_machine_and_names_it_elsewhere(fault, question, monkeypatch):
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:9")
    monkeypatch.setenv("ALL_PROXY", "http://127.0.0.1:9")
    assert ask_all(fault.judge(saying(GOOD), 0), [question]) == [1]
    client = OpenAIClient("http://judge.invalid/v1", "m", max_retries=0)
    with pytest.raises(TransportError, match=r"the environment names a proxy: HTTP_PROXY.* NO_PROXY"):
        within(PATIENT, client, client.models)


def test_client_names_what_trusts_a_certificate(fault):
    cause = ssl.SSLCertVerificationError("[SSL: CERTIFICATE_VERIFY_FAILED] self-signed certificate")
    error = openai_client.APIConnectionError(request=openai_client.Request("GET", "https://judge/v1"))
    error.__cause__ = cause
    assert "in SSL_CERT_FILE" in str(OpenAIClient("https://judge/v1", "m")._fault(error))


@pytest.mark.parametrize(
    ("tokens", "odd"), [(0, True), (9, True), (20, False), (100, False), (1100, False), (1101, True), (5505, True)]
)
def test_judge_names_a_count_of_tokens_that_is_hardly_true_once(tokens, odd, fault, question, caplog):
    asked = replace(question, template="x" * 100, texts={"{NONE}": ""}, responses={})
    judge = fault.judge(saying(GOOD, {"prompt_tokens": tokens, "completion_tokens": 5}), 0)
    ODD.clear()
    assert ask_all(judge, [asked] * 2) == [1, 1]
    assert caplog.text.count(f"counts {tokens:,} tokens for a prompt of 100 characters") == odd
    assert ("it may have cut the prompt" in caplog.text) == (tokens == 9)
    caplog.clear()
    ODD.clear()
    warn_of_odd_count("there", tokens, 5, [{"content": "x" * 100}])
    assert bool(ODD) == (tokens < 10 or tokens > 5 * 1100), "a server may count the prompt for each of five samples"


# Token counts


@pytest.mark.parametrize("name", ["prompt_tokens", "completion_tokens"])
def test_client_counts_zero_for_a_token_count_that_cannot_be_true(fault, question, caplog, name):
    other = "completion_tokens" if name == "prompt_tokens" else "prompt_tokens"
    for count in ("1e999", "-1e999", "NaN", "1" + "0" * 30, str(2**31), *'-5|true|20.5|"20"|[1]|{"a": 1}'.split("|")):
        warn_of_counts.cache_clear()
        caplog.clear()
        usage = f'"usage": {{"{other}": 7, "{name}": {count}}}, "theirs": '
        judge = fault.judge(body(completion(GOOD).body.replace(b'"usage": ', usage.encode())), 0)
        assert ask_all(judge, [question] * 2) == [1, 1]
        expected = Usage(0, 0, 7) if name == "prompt_tokens" else Usage(7, 0, 0)
        assert [(call.usage, call.spent) for call in judge.drain()] == [(expected, expected)] * 2, count
        (line,) = [record.getMessage() for record in caplog.records if "token counts" in record.getMessage()]
        assert fault.netloc in line, count


def test_client_reads_token_counts_where_there_are_any(fault, question):
    for usage, prompt in (
        (None, 0),
        ({}, 0),
        ({"prompt_tokens": None, "completion_tokens": 5}, 0),
        ({"prompt_tokens": 20, "prompt_tokens_details": None}, 20),
        ({"prompt_tokens": MOST_TOKENS}, MOST_TOKENS),
    ):
        verdict, call = ask(fault.judge(saying(GOOD, usage), 0), question)
        assert (verdict, call.outcome, call.usage.prompt, call.usage.cached) == (1, "parsed", prompt, 0), usage
    assert ask(fault.judge(saying(GOOD, {"input_tokens": 20, "output_tokens": 5}), 0), question)[1].usage == (20, 0, 5)
    thought = {"prompt_tokens": 300.0, "completion_tokens": 5, "total_tokens": 1305}
    for total, expected in ((1305, 1005), (305, 5), (0, 5), (10**30, 5), (-1, 5), ("1305", 5)):
        usage = thought | {"total_tokens": total}
        assert ask(fault.judge(saying(GOOD, usage), 0), question)[1].usage == (300, 0, expected), total
    apart = {"prompt_tokens": 20, "completion_tokens": 5, "total_tokens": 5025}
    apart["prompt_tokens_details"] = {"cached_tokens": 5000}
    assert ask(fault.judge(saying(GOOD, apart), 0), question)[1].usage == (5020, 5000, 5), "cached tokens apart"
    for usage in ({"prompt_tokens_details": 3}, {"prompt_tokens_details": ["x"]}, "many", [1]):
        verdict, call = ask(fault.judge(saying(GOOD, usage), 0), question)
        assert verdict == 1 and all(type(count) is int for count in (*call.usage, *call.spent)), usage


# Looks at a server


def test_looks_at_a_server_that_drips_have_an_end(fault, monkeypatch):
    for seconds, limits in ((0.1, {}), (EVENT_LIMIT, {"PROBE_SECONDS": 0.1, "LOOK_SECONDS": 0.1})):
        for name, value in limits.items():
            monkeypatch.setattr(openai_client, name, value)

        def look(at: Callable, seconds=seconds) -> object:
            client = fault.client(drip, 2, timeout=seconds)
            return within(PATIENT, client, lambda: at(client))

        with pytest.raises(TransportError, match=r"no list of models within 0\.1 s") as error:
            look(lambda client: client.models())
        assert error.value.kind == "down"
        with pytest.raises(JudgeError, match="cannot be reached, so nothing was started"):
            look(check_server)
        assert look(lambda client: client.alive()) is False
        assert look(lambda client: client.count_tokens("How long?")) is None
        assert fault.seen[-1]["messages"] == [{"role": "user", "content": "How long?"}]


SAID = (  # a choice, whether it is cut off, what is said of it, whether that is final
    (choice(GOOD, "STOP"), False, "", False),
    (choice(GOOD, {"type": "stop", "matched": 7}), False, "", False),
    (choice(GOOD, "end_turn"), False, "", False),
    *((choice("x", word), True, CUT_OFF, False) for word in ("length", "MAX_TOKENS", "model_length", "token_limit")),
    (choice("x", None, done_reason="length"), True, CUT_OFF, False),
    *((choice("x", word), True, CUT_OFF, False) for word in ("stop_length", "end_of_context", "finished_by_limit")),
    (choice("x", "stop", native_finish_reason="MAX_TOKENS"), True, CUT_OFF, False),
    (choice("x", "stop", native_finish_reason="SAFETY"), True, f"{WITHHELD}: SAFETY", True),
    (choice(GOOD, "stop", native_finish_reason="completed"), False, "", False),
    (choice("x", "unexpected_end"), True, "the server says 'unexpected_end'", False),
    (choice("x", "repetition"), True, "the server says 'repetition'", False),
    (choice(None, "tool_calls"), False, "the server says 'tool_calls'", False),
    (choice(None, "content_filter"), True, f"{WITHHELD}: content_filter", True),
    ({"message": None, "finish_reason": "SAFETY"}, True, f"{WITHHELD}: SAFETY", True),
    ({"message": {"content": "", "refusal": "I cannot."}}, False, f"{WITHHELD}: I cannot.", True),
    (choice([{"type": "refusal", "refusal": "No."}], "stop"), False, f"{WITHHELD}: No.", True),
    ({"message": {"content": None, "reasoning_content": "Hm."}}, False, ALL_THOUGHT, False),
    ({"message": {"content": "", "reasoning": "Hm."}, "finish_reason": "length"}, True, ALL_THOUGHT, False),
    (choice([THOUGHTS], "stop"), False, ALL_THOUGHT, False),
    ({"delta": {"content": GOOD}}, False, "", False),
)


def test_read_completion_keeps_what_a_server_says_of_its_answer():
    for given_choice, *expected in SAID:
        reply = read_completion({"choices": [given_choice]})
        assert [reply.cut_off, reply.note, reply.final] == expected, given_choice
    full, usage = {"message": {"content": "x"}}, {"completion_tokens": 8}
    for limit, cut in ((7, False), (8, True), (9, False)):
        reply = read_completion({"choices": [choice("x", "stop")], "usage": usage}, limit)
        assert (reply.cut_off, reply.note) == (cut, CUT_OFF * cut)
    for limit, cut in ((8, True), (9, False), (None, False)):
        assert read_completion({"choices": [full], "usage": usage}, limit).cut_off is cut
    both = read_completion({"choices": [full, full], "usage": usage}, 4).samples
    assert [each.cut_off for each in both] == [True, True]
    with pytest.raises(TypeError):  # whether or not a key is masked in it
        read_completion({"choices": [{"message": {"content": 7}}]})


def test_no_sample_shows_the_key(fault, query):
    handler = inside(choices=[choice(f'{{"score": "{KEY}"}}', "stop")] * 2)
    asked = replace(pointwise_question(query, CANDIDATE), soft=True)
    _, call = ask(fault.judge(handler, 0, samples=2), asked)
    assert '"[key]"' in call.error
    check_key(repr(call))


def test_a_withheld_answer_is_not_asked_for_again(fault, question):
    handler = inside(choices=[{"message": {"content": "", "refusal": f"Not with {KEY}."}}])
    verdict, call = ask(fault.judge(handler, 0), question)
    assert (verdict, call.attempts, call.malformed, fault.asked) == (None, 1, 1, 1)
    assert "withheld its answer: Not with [key]." in call.error


def test_alive_is_a_server_that_generates(fault):
    """Servers exist that refuse `max_tokens`; what `judge_request` says of it holds for a look, too."""
    pong, page = saying("pong"), body(b"<html>back soon</html>", "text/html")
    error = body(b'{"error": {"message": "starting"}}')
    for handler in (page, error, body(b"{}"), status(503), refusing(404, "no such model"), pong):
        request = {"max_tokens": None, "max_completion_tokens": 50}
        client = fault.client(handler, 2, request=request)
        assert within(PATIENT, client, client.alive) is (handler is pong)
        assert [(asked.get("max_tokens"), asked["max_completion_tokens"]) for asked in fault.seen] == [(None, 50)]
        assert [each["role"] for each in fault.seen[0]["messages"]] == ["user"]
    with served(make_app()) as url:
        client = OpenAIClient(f"{url}/v1", "rubric-judge")
        assert within(PATIENT, client, client.alive) is True


def listing(*rows: object) -> Callable:
    return lambda request, n: web.json_response({"object": "list", "data": rows})


def test_models_reads_the_list_that_is_one(fault):
    def models(handler: Callable) -> dict:
        client = fault.client(handler, 0)
        return within(PATIENT, client, client.models)

    assert models(listing({"id": "m", "max_model_len": 64}, {"id": KEY})) == {"m": 64, "[key]": None}
    for length in ("12k", -1, 0, True, 1.5, None):
        assert models(listing({"id": "m", "max_model_len": length})) == {"m": None}, length
    for content in (b"[" * 100_000, b'{"data": 7}', b'{"data": [7]}', b"null"):
        with pytest.raises(TransportError, match="not a list of models"):
            models(body(content))
    with pytest.raises(TransportError, match=r"\[key\]") as error:
        models(echoing(lambda text: refusing(503, text)))
    check_key("".join(traceback.format_exception(error.value)))


# The size of an answer


def test_client_does_not_take_the_memory_that_a_bomb_asks_for(fault, question):
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


def test_client_reads_so_many_bytes_and_not_one_more(fault, question, monkeypatch):
    for code, answer, part in ((200, completion(GOOD).body, ""), (400, b'{"error": {"message": "too deep"}}', "deep")):
        for limit, expected in ((len(answer), part), (len(answer) - 1, "more than 0 MB")):
            monkeypatch.setattr(openai_client, "MOST_BYTES", limit)
            _, call = ask(fault.judge(body(answer, code=code), 0), question)
            assert expected in call.error and bool(expected) == call.failed


# The first question


def test_first_question_has_an_end_at_a_server_that_drips(fault, question, scorer):
    judge = fault.judge(drip, 0)
    with pytest.raises(JudgeError, match=r"did not answer its first question within 0\.3 s, so nothing was started"):
        within(PATIENT, judge.client, lambda: judge.first_question(question, timeout=0.3))
    made = scorer(fault.judge(drip, 0), step_timeout=0.3)
    with pytest.raises(JudgeError, match=r"first question within 0\.3 s"):
        first_question(made, numbers())


def finished(content: object, reason: str, **more: object) -> Callable:
    answer = {"choices": [choice(content, reason) | more]}
    return lambda request, n: web.json_response(answer)


def test_first_question_shows_the_answer_without_the_key_and_names_the_right_knob(fault, question):
    for handler, part, knob in (
        (finished("Let me think", "length"), "'Let me think'", True),
        (finished(None, "length"), "begins: ''", True),
        (finished('It looks like {"position": 1}, so', "length"), "cut off before its verdict", True),
        (finished("", "stop"), "begins: ''", False),
        (finished("", "stop", message={"content": "", "reasoning": "Hm."}), "went into its thinking", True),
        (finished("[THINK]Let me", "stop"), "[THINK]", True),
        (finished("<think>Let me", "stop"), "<think>", True),
        (finished("Hello!\x1b[2J", "stop"), "Hello!", False),
        (echoing(saying), "[key]", False),
        (saying("a" * 300 + "b"), f"begins: '{'a' * 300}'.", False),
    ):
        with pytest.raises(JudgeError) as error:
            ask_first(fault.judge(handler, 0), question)
        text = str(error.value)
        assert "The last answer begins: " in text and part in text and text.isprintable()
        assert ("judge_free_tokens" in text and "enable_thinking" in text) == knob
        assert ("instruction-tuned" in text) != knob
        check_key("".join(traceback.format_exception(error.value)))
    for handler, hint in ((finished(None, "SAFETY"), "another judge"), (saying("Hm."), "Set judge_decoding")):
        with pytest.raises(JudgeError, match=hint) as error:
            ask_first(fault.judge(handler, 0, decoding="json_schema"), question)
        assert "judge_free_tokens" not in str(error.value)


def test_an_account_without_credit_is_named_and_no_prose_or_refusal_is_asked_again_by_a_launcher(fault, question):
    credit = {"error": {"message": "You exceeded your current quota", "code": "insufficient_quota"}}
    for handler, part, code in (
        (lambda request, n: web.json_response(credit, status=429), "has no credit left: top it up", 1),
        (status(402), "has no credit left: top it up", 1),
        (saying("Hello!"), "instruction-tuned", 1),
        (status(429, "slow down"), "takes no more for now", 75),
        (status(503), "Is the server up", 75),
    ):
        with pytest.raises(JudgeError, match=part) as error:
            ask_first(fault.judge(handler, 0), question)
        assert exit_code(error.value) == code


def test_an_account_without_credit_is_asked_once_and_no_limit_is_taken_for_one(fault, question):
    said = {"message": "You exceeded your current quota, check your plan and billing", "type": "insufficient_quota"}
    limit = said | {"type": "RESOURCE_EXHAUSTED", "code": 429}  # as Gemini says it of a limit a minute
    for told, code, attempts, found in (
        ({"error": said}, 429, 1, 402),
        ([{"error": said}], 400, 1, 402),  # in a list, as Gemini sends an error
        ({"error": {"message": "Access denied", "code": "Arrearage"}}, 400, 1, 402),
        ({"error": limit}, 429, 2, 429),
        ({"error": {"message": "no", "code": ["insufficient_quota"]}}, 400, 1, 400),
    ):
        judge = fault.judge(lambda request, n: web.json_response(told, status=code, headers=SOON), 1)  # noqa: B023
        _, call = ask(judge, question)
        assert (call.attempts, call.status, call.passing) == (attempts, found, found == 429)


# Several answers


def test_judge_counts_malformed_answers_apart_from_retries(fault, question, scorer):
    judge = fault.judge(in_turn(status(500), saying("Hm."), status(500), saying(GOOD)), 1)
    verdict, call = ask(judge, question)
    assert (verdict, call.attempts, call.malformed) == (1, 4, 1)
    made = scorer(scripted_judge(lambda messages: "Hm." if len(messages) == 1 else by_number(messages)))
    made.score([group(numbers(), "15 25", 0)], 0)
    assert list(made.store.rows("SELECT DISTINCT attempts, malformed FROM calls")) == [(2, 1)]
    assert made.store.totals().malformed == made.store.totals().calls == 2
