"""Many questions put to one endpoint: shown as they go, answers on the disk at once, added up at the end."""

import asyncio
import sys
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from .answer_log import AnswerLog, answer_all
from .judge import Asked, Judge
from .ledger import Call, Totals


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


def ask_resumably(
    judge: Judge,
    asked: Mapping[str, Asked],
    log: Path,
    title: str,
    digest: Callable[[Any], str],
    check: Callable[[Judge, Sequence[Any]], Awaitable[None]],
) -> Answers:
    """Put all questions whose answers are not in a log yet, and close the judge's connections.

    Args:
        judge (`Judge`):
            Whom to ask.
        asked (`Mapping[str, Asked]`):
            What to ask, by a name of its own.
        log (`Path`):
            File of the answers, see [`AnswerLog`].
        title (`str`):
            What the progress bar says.
        digest (`Callable[[Asked], str]`):
            Of all that an answer depends on, so that no answer is taken for another question's.
        check (`Callable[[Judge, Sequence[Asked]], Awaitable[None]]`):
            Looks at judge and questions before anything is paid for; called if there is something to ask.

    Raises:
        `OSError`: if the log cannot be written, or another process has it.
    """
    return asyncio.run(_ask(judge, asked, log, title, digest, check))


async def _ask(
    judge: Judge,
    asked: Mapping[str, Asked],
    path: Path,
    title: str,
    digest: Callable[[Any], str],
    check: Callable[[Judge, Sequence[Any]], Awaitable[None]],
) -> Answers:
    keys = {name: f"{name} {digest(question)}" for name, question in asked.items()}
    failed: list[Call] = []
    with AnswerLog(path) as log:
        todo = {keys[name]: question for name, question in asked.items() if keys[name] not in log}
        try:
            if todo:
                await check(judge, list(todo.values()))
            with progress() as shown:
                bar = shown.add_task(title, total=len(keys), completed=len(keys) - len(todo))

                def on_done(key: str, value: Any | None, call: Call) -> None:
                    shown.advance(bar)
                    if call.failed:
                        failed.append(call)

                causes = await answer_all(judge, todo.items(), log, on_done)
        finally:
            await judge.client.close()
        values = {name: log[key] for name, key in keys.items() if key in log}
        failures = {name: causes[key] for name, key in keys.items() if key in causes}
        return Answers(values, failures, log.totals() + Totals.of(failed))


def progress() -> Progress:
    """A bar with counts, where someone watches."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    return Progress(*columns, console=Console(stderr=True), disable=not sys.stderr.isatty(), transient=True)
