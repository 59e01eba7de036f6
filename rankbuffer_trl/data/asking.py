"""Ask an endpoint about many queries: checked first, shown as it goes, on disk at once, added up at the end."""

import asyncio
import hashlib
import json
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import Progress

from ..judge import Call, Judge, Totals
from ..judge.answer_log import AnswerLog, answer_all
from ..judge.config import JudgeConfig
from ..judge.judge import Asked
from ..judge.reach import check_server, servers_of


@dataclass(frozen=True)
class Answers:
    """What became of many questions.

    Args:
        values (`dict[str, Any]`):
            What was read from each answer, by the question's name.
        failures (`dict[str, str]`):
            Why there is no answer, by name. The next run asks these again.
        totals (`Totals`):
            What the answers in the log cost, those of earlier runs and the failures of this one included.
    """

    values: dict[str, Any]
    failures: dict[str, str]
    totals: Totals


def ask_resumably(config: JudgeConfig, asked: Mapping[str, Asked], log: Path, title: str) -> Answers:
    """Put all questions whose answers are not in a log yet.

    Args:
        config (`JudgeConfig`):
            Whom to ask, and how.
        asked (`Mapping[str, Asked]`):
            What to ask, by a name of its own.
        log (`Path`):
            File of the answers, see [`AnswerLog`].
        title (`str`):
            What the progress bar says.

    Raises:
        [`JudgeError`]: if there is something to ask and a server cannot be reached or does not serve the model.
        `OSError`: if the log cannot be written, or another process has it.
    """
    return asyncio.run(_ask(config, asked, log, title))


def check_endpoint(config: JudgeConfig) -> None:
    """Check that every server is there and serves the model, before anything is paid for.

    Raises:
        [`JudgeError`]: naming the server and what is wrong.
    """

    async def check() -> None:
        judge = config.judge()
        try:
            await _check(judge)
        finally:
            await judge.client.close()

    asyncio.run(check())


async def _check(judge: Judge) -> None:
    for server in servers_of(judge):
        await check_server(server)


async def _ask(config: JudgeConfig, asked: Mapping[str, Asked], path: Path, title: str) -> Answers:
    keys = {name: key_of(question, config) for name, question in asked.items()}
    judge, failed = config.judge(), []
    with AnswerLog(path) as log:
        try:
            todo = {keys[name]: question for name, question in asked.items() if keys[name] not in log}
            if todo:
                await _check(judge)
            with Progress(console=Console(stderr=True), disable=not sys.stderr.isatty(), transient=True) as progress:
                bar = progress.add_task(title, total=len(keys), completed=len(keys) - len(todo))

                def on_done(key: str, value: Any | None, call: Call) -> None:
                    progress.advance(bar)
                    if call.failed:
                        failed.append(call)

                causes = await answer_all(judge, todo.items(), log, on_done)
        finally:
            await judge.client.close()
        values = {name: log[key] for name, key in keys.items() if key in log}
        failures = {name: causes[key] for name, key in keys.items() if key in causes}
        return Answers(values, failures, log.totals() + Totals.of(failed))


def key_of(question: Asked, config: JudgeConfig) -> str:
    """What names an answer in a log: an answer to other words, or of another model or decoding, is another answer."""
    asked = [
        config.judge_model,
        config.judge_request,
        question.chat(config.judge_guard),
        question.fields(config.judge_decoding, config.judge_free_tokens),
    ]
    return f"{question.query_id} {hashlib.sha256(json.dumps(asked).encode()).hexdigest()[:16]}"


def cost_line(config: JudgeConfig, totals: Totals) -> str:
    """What was spent on all attempts, in tokens, and in money where prices are set."""
    line = (
        f"{totals.attempts:,} requests, {totals.spent_prompt_tokens:,} prompt tokens"
        f" ({totals.spent_cached_tokens:,} cached), {totals.spent_completion_tokens:,} completion tokens"
    )
    price = config.price(totals)
    return line if price is None else f"{line}; {price:,.4f} at the prices given"
