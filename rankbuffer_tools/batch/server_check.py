"""Check, before money is spent, that the servers of a judge can be reached and can hold its prompts."""

import asyncio
import heapq
import logging
import math
from collections.abc import Collection, Iterable
from difflib import get_close_matches
from typing import TYPE_CHECKING, NamedTuple

from rankbuffer_trl.errors import SettingsError
from rankbuffer_trl.judge import TOKENS_PER_MARK, Askable, Judge, JudgeError, Question, TransportError

if TYPE_CHECKING:
    from rankbuffer_trl.judge.config import OpenAIClient

logger = logging.getLogger(__name__)

COUNTED_QUESTIONS = 5  # prompts that are counted exactly: the longest text need not have the most tokens
CHARACTERS_PER_TOKEN = 3  # few for English, so that an estimate is too high rather than too low
TURN_TOKENS = 256  # the judge's chat template, and the turn that names the fault of an answer


class Need(NamedTuple):
    """The tokens that one question needs."""

    prompt: int
    exact: bool  # counted by the server, not estimated
    answer: int  # that the answer may have
    kind: str
    query_id: str


def servers_of(judge: Judge) -> "list[OpenAIClient]":
    """Return the servers behind a judge; the embedded judge has none."""
    # here, because the library of that client is slow to load
    from rankbuffer_trl.judge.config import OpenAIClient, Servers

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


async def check_servers(judge: Judge, questions: Iterable[Askable] = ()) -> list[int | None]:
    """Check that every server is there, serves the model, and has a context for the longest questions.

    Return the context length of each server, `None` if it does not report one.

    Raises:
        [`JudgeError`]: naming the server and what is wrong.
    """
    longest, contexts = longest_of(questions, judge.guard), []
    for client in servers_of(judge):
        context = await check_server(client)
        contexts.append(context)
        need = await longest_need(client, longest, judge.guard) if context else None
        # Such as vLLM and llama.cpp; an estimate refuses nothing.
        if context and need and need.exact and need.prompt + need.answer > context:
            raise JudgeError(
                f"{client.name}: a context of {context:,} tokens is too small. The {need.kind!r} prompt of"
                f" {need.query_id!r} has {need.prompt:,} tokens, and its answer may take {need.answer:,}. Serve it"
                f" with --max-model-len {need.prompt + need.answer} (llama.cpp: --ctx-size) or more; nothing was"
                " asked",
                passing=False,
            )
    return contexts


async def check_server(client: "OpenAIClient") -> int | None:
    """Return the context length of a server that is there and serves the model, `None` if it does not report one.

    A model that is not in the server's list is one warning, unless the server says that it has no such model.

    Raises:
        [`JudgeError`]: naming a server that cannot be reached.
        [`SettingsError`]: naming the server, and the model or the key that it does not take: no retry helps.
    """
    role, model = client.role, client.model or ""
    variable = client.endpoint.api_key_env
    try:
        models = await client.models()
    except TransportError as error:
        if error.status == 401:
            raise SettingsError(
                f"the {client.role} server {client.url} does not take the key, so nothing was started: {error}. Is the"
                f" right one in the environment variable {variable}, which {client.role}_api_key_env names?"
            ) from error
        if error.kind != "down":  # not every endpoint lists its models
            logger.warning(f"the {role} server {client.url} lists no models ({error}); the first question will tell")
            return None
        raise JudgeError(
            f"the {client.role} server {client.url} cannot be reached, so nothing was started: {error}. Is it up, and"
            f" does {client.role}_url name it?"
        ) from error
    if model not in models:  # routers, aliases and deployments serve what they do not list
        named = f"models={model}={client.url}" if role == "policy" else f"{role}_model={model!r}"
        near = ", ".join(repr(name[:80]) for name in get_close_matches(model, models, n=3, cutoff=0))
        listed = (
            f"which is not in its list of {len(models):,} ({f'the nearest are {near}' if near else 'it is empty'})"
        )
        if await client.unknown():  # the server itself says that it has no such model
            raise SettingsError(f"the {role} server {client.url} does not serve {named}, {listed}")
        logger.warning(f"the {role} server {client.url} takes {named}, {listed}")
    return models.get(model)


def longest_of(questions: Iterable[Askable], guard: bool) -> list[Askable]:
    """Return the [`COUNTED_QUESTIONS`] questions whose prompts have most characters."""
    return heapq.nlargest(COUNTED_QUESTIONS, questions, key=lambda question: len(text_of(question, guard)))


def text_of(question: Askable, guard: bool) -> str:
    """Return the text of all messages of a prompt."""
    return "\n".join(message["content"] for message in question.chat(guard))


async def longest_need(client: "OpenAIClient", questions: Iterable[Askable], guard: bool) -> Need | None:
    """Count prompts with the server's tokenizer and return what the question with most tokens needs, if any."""
    needs = []
    for question in questions:
        text = text_of(question, guard)
        tokens = await client.count_tokens(text)
        prompt = math.ceil(len(text) / CHARACTERS_PER_TOKEN) if tokens is None else tokens
        answer = client.fields_of(question).get("max_tokens") or 0
        needs.append(Need(prompt, tokens is not None, answer, question.kind, question.query_id))
    return max(needs, key=lambda need: need.prompt + need.answer, default=None)


def context_for(prompt: int, verdict: int, responses: int = 0, guard: bool = True) -> int:
    """Estimate how many tokens of context a judge prompt needs.

    Args:
        responses (`int`, *optional*, defaults to `0`):
            Tokens of responses that are not in the prompt yet.
    """
    # Twice: a faulty answer stands in the repeat's prompt.
    return prompt + responses + (responses // TOKENS_PER_MARK if guard else 0) + 2 * verdict + TURN_TOKENS


def estimate_tokens(questions: Collection[Question], guard: bool, samples: int = 1) -> tuple[float, float]:
    """Estimate the prompt and completion tokens of questions by their characters."""
    prompt = sum(len(message["content"]) for question in questions for message in question.chat(guard))
    # Soft questions have `samples` answers.
    answers = sum(len(question.verdict.longest) * (samples if question.soft else 1) for question in questions)
    return prompt / CHARACTERS_PER_TOKEN, answers / CHARACTERS_PER_TOKEN
