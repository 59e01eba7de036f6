"""Check, before anything is paid for, that the servers of a judge are there and can read its prompts."""

import asyncio
import heapq
from collections.abc import Iterable
from typing import Any, NamedTuple

from .errors import JudgeError, TransportError
from .judge import Asked, Judge
from .openai_client import OpenAIClient
from .servers import Servers

LONGEST = 5
"""How many prompts are counted exactly. The longest text need not have the most tokens."""


class Need(NamedTuple):
    """The tokens that one question needs: those of its prompt, and those that its answer may have."""

    prompt: int
    answer: int
    kind: str
    query_id: str


def servers_of(judge: Judge) -> list[OpenAIClient]:
    """Return the servers behind a judge; the embedded judge has none."""
    if isinstance(judge.client, Servers):
        return judge.client.clients
    return [judge.client] if isinstance(judge.client, OpenAIClient) else []


def check_judge(judge: Judge) -> None:
    """Check the servers of a judge without questions, then close its connections. See [`check_servers`]."""

    async def check() -> None:
        try:
            await check_servers(judge)
        finally:
            await judge.client.close()

    asyncio.run(check())


async def check_servers(judge: Judge, questions: Iterable[Asked] = ()) -> None:
    """Check that every server is there, serves the model, and has a context for the longest questions.

    Only servers that report a context and can count tokens, such as vLLM's, are checked for length.

    Args:
        judge (`Judge`):
            The judge. The embedded one needs no check.
        questions (`Iterable[Asked]`, *optional*, defaults to `()`):
            The questions to come.

    Raises:
        [`JudgeError`]: naming the server and what is wrong.
    """
    questions = list(questions)
    for client in servers_of(judge):
        context = await check_server(client)
        need = await longest_need(client, questions, judge.guard) if context else None
        if context and need and need.prompt + need.answer > context:
            raise JudgeError(
                f"{client.name}: a context of {context:,} tokens is too small. The {need.kind!r} prompt of"
                f" {need.query_id!r} has {need.prompt:,} tokens, and its answer may take {need.answer:,}. Serve the"
                f" model with --max-model-len {need.prompt + need.answer} or more; nothing was asked"
            )


async def check_server(client: OpenAIClient) -> int | None:
    """Return the context length of a server that is there and serves the model, `None` if it does not report one.

    Raises:
        [`JudgeError`]: naming the server and what is wrong.
    """
    try:
        models = await client.models()
    except TransportError as error:
        if error.status == 401:
            raise JudgeError(
                f"the judge server {client.url} does not take the key, so nothing was started: {error}. Is the right"
                f" one in the environment variable {client.api_key_env}, which judge_api_key_env names?"
            ) from error
        if error.kind == "refused":  # not every endpoint lists its models; the questions to come will tell
            return None
        raise JudgeError(
            f"the judge server {client.url} cannot be reached, so nothing was started: {error}. Is it up, and does"
            " judge_url name it?"
        ) from error
    if client.model not in models:
        raise JudgeError(
            f"the judge server {client.url} does not serve judge_model={client.model!r}; it serves"
            f" {', '.join(map(repr, models))}"
        )
    return models[client.model]


async def longest_need(client: OpenAIClient, questions: Iterable[Asked], guard: bool) -> Need | None:
    """Count the longest prompts with the server's tokenizer and return the question that needs most tokens.

    Args:
        client (`OpenAIClient`):
            The server that counts.
        questions (`Iterable[Asked]`):
            The questions. The [`LONGEST`] longest by characters are counted.
        guard (`bool`):
            Whether responses are quoted in prompts (`judge_guard`).

    Returns:
        [`Need`], or `None` if there are no questions or the server cannot count tokens.
    """
    texts = (("\n".join(message["content"] for message in question.chat(guard)), question) for question in questions)
    needs = []
    for text, question in heapq.nlargest(LONGEST, texts, key=lambda pair: len(pair[0])):
        tokens = await client.count_tokens(text)
        if tokens is None:
            return None
        answer = fields_of(client, question).get("max_tokens") or 0
        needs.append(Need(tokens, answer, question.kind, question.query_id))
    return max(needs, key=lambda need: need.prompt + need.answer, default=None)


def fields_of(client: OpenAIClient, question: Asked) -> dict[str, Any]:
    """Return the fields that question and user set in a request; `None` stands for a field that is left out."""
    return question.fields(client.decoding, client.free_tokens) | client.request
