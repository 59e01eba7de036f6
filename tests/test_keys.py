"""The key of a judge reaches its server alone: no ledger, message or traceback shows it."""

import asyncio
import traceback
from collections.abc import Callable

import pytest
from aiohttp import web
from conftest import ask
from helpers.faulty_server import CANDIDATE, GOOD, KEY, PATIENT, ask_first, completion, refusing, within
from hypothesis import given
from hypothesis import strategies as st

from rankbuffer_trl.judge import Judge, JudgeError, TransportError, insertion_question
from rankbuffer_trl.judge.openai_client import OpenAIClient, masked


@pytest.fixture
def question(query):
    return insertion_question(query, ["bad", "good"], CANDIDATE)


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


def test_no_other_key_of_the_environment_is_sent(fault, question, monkeypatch):
    """The official client reads `OPENAI_ADMIN_KEY` by itself."""
    monkeypatch.setenv("OPENAI_ADMIN_KEY", "sk-of-an-administrator")
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    keys = []

    def remember(request, n):
        keys.append(request.headers["Authorization"])
        return completion(GOOD)

    async def look(client):
        await Judge(client).ask(question)
        await client.alive()
        await client.count_tokens("How long?")

    fault.client(remember, 0)
    client = OpenAIClient(fault.url, "m", max_retries=0)
    within(PATIENT, client, lambda: look(client))
    assert keys == ["Bearer none"] * 3


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
