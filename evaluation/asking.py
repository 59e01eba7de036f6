"""Many chats put to a server and answered into a log: judgments and responses alike. A killed job goes on in it."""

import hashlib
import heapq
import json
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from rankbuffer_trl.data.asking import set_fields
from rankbuffer_trl.judge import Chat, Judge, JudgeError
from rankbuffer_trl.judge.config import JudgeConfig
from rankbuffer_trl.judge.reach import check_server, servers_of
from rankbuffer_trl.judge.resumable import Answers, ask_resumably
from rankbuffer_trl.training.preflight import LONGEST

from .benchmark import shortened


def ask_judge(settings: JudgeConfig, chats: Mapping[str, Chat], log: Path, what: str) -> Answers:
    """Put a benchmark's chats to the judge, those that are not answered yet.

    Args:
        settings (`JudgeConfig`):
            The judge. Its `judge_max_failures` bounds the share of chats that may fail.
        chats (`Mapping[str, Chat]`):
            What to ask, by key. An answer counts only for the very same messages, request and judge.
        log (`Path`):
            Where the answers are kept.
        what (`str`):
            Title of the progress bar.

    Raises:
        [`JudgeError`]: if the judge is not there or its context is too small, before anything is asked; or if too many
        chats fail. What was answered stays in the log.
    """
    answers = ask(settings.judge(), chats, log, what, whom=need_judge(settings), fields=set_fields(settings))
    if len(answers.failures) > settings.judge_max_failures * len(chats):
        raise JudgeError(
            f"{what}: {len(answers.failures)} of {len(chats)} judgments failed, more than judge_max_failures="
            f"{settings.judge_max_failures:g} allows. {failures_text(answers.failures)}. The others are kept in {log};"
            " run the same command again to ask only what is missing"
        )
    return answers


def ask(
    judge: Judge,
    chats: Mapping[str, Chat],
    log: Path,
    what: str,
    whom: str,
    fields: Mapping[str, Any] | None = None,
) -> Answers:
    """Put the chats that are not in the log to the servers behind `judge`, which are closed then.

    Args:
        judge (`Judge`):
            Who answers.
        chats (`Mapping[str, Chat]`):
            What to ask, by key.
        log (`Path`):
            Where the answers are kept.
        what (`str`):
            Title of the progress bar.
        whom (`str`):
            The model. An answer of another one does not count.
        fields (`Mapping[str, Any]`, *optional*):
            What the client sets in every request.

    Raises:
        [`JudgeError`]: if a server is not there, or its context does not hold the longest chat and its answer.
    """
    fields = fields or {}
    check = partial(check_context, fields=fields)
    return ask_resumably(judge, chats, log, what, partial(digest, whom=whom, fields=fields), check)


async def check_context(judge: Judge, chats: Sequence[Chat], fields: Mapping[str, Any]) -> None:
    """Is every server there, and does its context hold the longest chats and their answers?

    Raises:
        [`JudgeError`]: naming the server and both lengths.
    """
    for client in servers_of(judge):
        context = await check_server(client)
        for chat in heapq.nlargest(LONGEST, chats, key=length):
            room = {**chat.request, **fields}.get("max_tokens") or 0
            text = "\n".join(message["content"] for message in chat.messages)
            tokens = await client.count_tokens(text)
            if tokens and context and tokens + room > context:
                raise JudgeError(
                    f"{client.name}: a context of {context:,} tokens is too small. The {chat.kind!r} prompt of"
                    f" {chat.query_id!r} has {tokens:,}, and its answer may take {room:,}. Serve the model with"
                    f" --max-model-len {tokens + room} or more; nothing was asked"
                )


def length(chat: Chat) -> int:
    """Characters of a chat."""
    return sum(len(message["content"]) for message in chat.messages)


def digest(chat: Chat, whom: str, fields: Mapping[str, Any]) -> str:
    """Of all that an answer depends on, so that no answer is taken for another question's."""
    asked = [whom, list(chat.messages), dict(chat.request) | dict(fields)]
    return hashlib.sha256(json.dumps(asked, sort_keys=True).encode()).hexdigest()[:16]


def need_judge(settings: JudgeConfig) -> str:
    """The judge's name; refuses to evaluate without one.

    Raises:
        [`JudgeError`]: if no server is named.
    """
    if not settings.judge_url or not settings.judge_model:
        raise JudgeError(
            "judge_url is not set. The benchmarks need a language model as judge: name an OpenAI-compatible server and"
            " its judge_model. evaluation/README.md has the commands for the paper's"
        )
    return settings.judge_model


def failures_text(failures: Mapping[str, str]) -> str:
    """Which failed, and the last cause."""
    return f"Failed: {shortened(list(failures))}. Last cause: {list(failures.values())[-1]}"
