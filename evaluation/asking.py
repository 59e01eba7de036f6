"""Put a benchmark's chats to the judge, and stop if too many of them fail."""

import asyncio
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from rankbuffer_tools.batch.ask import PILOT, AnswerLog, Answers, ask_many, failures_text
from rankbuffer_tools.batch.chat import Chat
from rankbuffer_trl.judge import JudgeError
from rankbuffer_trl.judge.config import FailureLimit

FAILED_CALLS = "failed_calls.jsonl"
"""Beside the log of answers: what the judgments cost that failed, those of earlier runs included."""


def ask_judge(settings: FailureLimit, chats: Mapping[str, Chat], log: Path, title: str) -> Answers:
    """Ask the judge all chats of a benchmark that are not answered yet. `title` is the title of the progress bar.

    Args:
        chats (`Mapping[str, Chat]`):
            What to ask, by key. An answer is reused only for the same messages, request and judge.
        log (`Path`):
            File of the answers. The costs of the judgments that failed lie beside it.

    Raises:
        [`JudgeError`]: if the judge is not there or its context is too small, before anything is asked; or if too many
            chats fail. The answers stay in the log.
    """
    limit = settings.judge_max_failures
    answers = asyncio.run(ask_many(settings.judge(), chats, log, title, need_judge(settings), limit))
    paid = log.with_name(FAILED_CALLS)
    if answers.failures or paid.exists():  # failures of earlier runs were paid too
        with AnswerLog(paid) as failed:
            for name in answers.failures.keys() & answers.asked.keys():  # those that a stop left out cost nothing
                failed.add(name, None, answers.asked[name])
        # Failed calls of this run stand in `failed` already.
        answers = replace(answers, calls=[*(call for call in answers.calls if not call.failed), *failed.calls])
    if len(answers.failures) > limit * len(chats):
        causes = {name: cause for name, cause in answers.failures.items() if name in answers.asked}
        left = len(answers.failures) - len(causes)
        raise JudgeError(
            f"{title}: {len(causes)} of {len(chats)} judgments failed, more than judge_max_failures={limit:g} allows"
            f"{f', so {left} were not asked' if left else ''}. {failures_text(causes)}. The others are kept in {log};"
            " run the same command again to ask only what is missing"
        )
    return answers


def try_judge(settings: FailureLimit, chats: Mapping[str, Chat], log: Path, title: str) -> None:
    """Ask the first chats of a benchmark whose official reader takes any answer, by a reader that is stricter.

    Raises:
        [`JudgeError`]: if none of them can be read.
    """
    first = dict(list(chats.items())[:PILOT])
    # 1.0: the message below says more than that of `ask_judge`.
    once = replace(settings, judge_max_attempts=1, judge_max_failures=1.0)
    failures = ask_judge(once, first, log, f"{title}: first questions").failures
    if first and len(failures) == len(first):
        raise JudgeError(
            f"{title}: none of the first {len(first)} judgments could be read, so nothing else was asked."
            f" {failures_text(failures)}"
        )


def need_verdicts(settings: FailureLimit, verdicts: Mapping[str, Any], asked: int, log: Path, title: str) -> None:
    """Stop if too many of the `asked` judgments failed or hold no verdict, which is `None` in `verdicts`.

    Raises:
        [`JudgeError`]: naming their number. The official files are written before, with what there is.
    """
    missing, limit = asked - sum(verdict is not None for verdict in verdicts.values()), settings.judge_max_failures
    if missing > limit * asked:
        raise JudgeError(
            f"{title}: {missing} of {asked} judgments have no verdict that the official code can read, more than"
            f" judge_max_failures={limit:g} allows, so a score would rest on the others alone. Read the answers in"
            f" {log} and take another judge, or raise judge_max_failures"
        )


def need_judge(settings: FailureLimit) -> str:
    """Return the name of the judge's model, or raise [`JudgeError`] if no server is named."""
    if not settings.judge_url or not settings.judge_model:
        raise JudgeError(
            "judge_url is not set. The benchmarks need a language model as judge: name an OpenAI-compatible server and"
            " its judge_model. evaluation/README.md has the commands for the paper's"
        )
    return settings.judge_model
