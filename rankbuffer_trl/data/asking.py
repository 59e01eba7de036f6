"""Ask an endpoint about many queries: checked first, shown as it goes, on disk at once, added up at the end."""

import asyncio
import hashlib
import json
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from ..judge import Asked, Judge, Totals, resumable
from ..judge.config import JudgeConfig, read_object
from ..judge.reach import check_server, servers_of
from ..judge.resumable import Answers


def ask_resumably(config: JudgeConfig, asked: Mapping[str, Asked], log: Path, title: str) -> Answers:
    """[`resumable.ask_resumably`] of the endpoint that `config` names.

    Raises:
        [`JudgeError`]: if there is something to ask and a server cannot be reached or does not serve the model.
        `OSError`: if the log cannot be written, or another process has it.
    """
    return resumable.ask_resumably(config.judge(), asked, log, title, partial(digest, config=config), check_servers)


def check_endpoint(config: JudgeConfig) -> None:
    """Check that every server is there and serves the model, before anything is paid for.

    Raises:
        [`JudgeError`]: naming the server and what is wrong.
    """

    async def check() -> None:
        judge = config.judge()
        try:
            await check_servers(judge)
        finally:
            await judge.client.close()

    asyncio.run(check())


async def check_servers(judge: Judge, asked: Sequence[Asked] = ()) -> None:
    """Is every server there, and does it serve the model?

    Raises:
        [`JudgeError`]: naming the server and what is wrong.
    """
    for server in servers_of(judge):
        await check_server(server)


def digest(question: Asked, config: JudgeConfig) -> str:
    """Of words, model and decoding: an answer to other words, or of another model or decoding, is another answer."""
    asked = [
        config.judge_model,
        config.judge_request,
        question.chat(config.judge_guard),
        question.fields(config.judge_decoding, config.judge_free_tokens),
    ]
    return hashlib.sha256(json.dumps(asked, sort_keys=True).encode()).hexdigest()[:16]


def set_fields(config: JudgeConfig) -> dict[str, Any]:
    """What the user sets in every request."""
    return read_object("judge_request", config.judge_request) or {}


def cost_line(config: JudgeConfig, totals: Totals) -> str:
    """What was spent on all attempts, in tokens, and in money where prices are set."""
    line = (
        f"{totals.attempts:,} requests, {totals.spent_prompt_tokens:,} prompt tokens"
        f" ({totals.spent_cached_tokens:,} cached), {totals.spent_completion_tokens:,} completion tokens"
    )
    price = config.price(totals)
    return line if price is None else f"{line}; {price:,.4f} at the prices given"
