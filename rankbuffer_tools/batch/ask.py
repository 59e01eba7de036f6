"""Ask many questions: check the servers, show the progress, keep each answer on disk, and add up the cost.

`ask_many` is the one way to do this for rubrics, sampled responses, evaluations and audits.
"""

import asyncio
import hashlib
import json
import logging
import sys
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from io import FileIO
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rankbuffer_trl.decoding import decode, parse_json
from rankbuffer_trl.errors import RankBufferError, SettingsError
from rankbuffer_trl.files import lock_descriptor
from rankbuffer_trl.judge import Askable, Call, Judge, JudgeError, Reading, Totals, explain, first_leaf

from .server_check import check_servers, servers_of

if TYPE_CHECKING:
    from rich.progress import Progress

logger = logging.getLogger(__name__)

PILOT = 4  # questions, of different kinds, that are asked before the others: can the judge be read at all?


class AnswerLogError(RankBufferError, ValueError):
    """A log of answers that cannot be read. The message names file and line."""


@dataclass(frozen=True)
class LoggedAnswer:
    """One line of an [`AnswerLog`]."""

    key: str
    value: Any
    call: Call
    digest: str | None = None


def digest(row: Mapping[str, Any]) -> str:
    """Return the digest of an answer in a log."""
    fields = [row[name] for name in ("key", "value", "call")]
    return hashlib.sha256(json.dumps(fields, sort_keys=True).encode()).hexdigest()[:16]


class AnswerLog(AbstractContextManager["AnswerLog"]):
    """A file of answers by key, one JSON line each: `key`, `value`, `call` with the cost, and `digest`.

    Lines are only ever added. Without a path, answers stay in memory.

    Raises:
        [`AnswerLogError`]: if a line other than the last is not an answer.
        `OSError`: if the file cannot be opened, or another process uses it.

    Example:

    ```python
    with AnswerLog("answers.jsonl") as log:
        if "q1" not in log:
            log.add("q1", *await judge.ask_with_cost(question))
        print(log["q1"], Totals.of(log.calls).tokens)
    ```
    """

    def __init__(self, path: str | Path | None):
        self._answers: dict[str, LoggedAnswer] = {}
        self.calls: list[Call] = []
        self._file: FileIO | None = None
        if path is not None:
            path = Path(path)
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = FileIO(path, "a")  # unbuffered: a line survives the process
            try:
                lock_descriptor(self._file.fileno())
                self._file.truncate(self._read(path))
            except (BlockingIOError, PermissionError):
                self.close()
                raise BlockingIOError(f"{path} is in use by another process: is this job running already?") from None
            except BaseException:
                self.close()
                raise

    def _read(self, path: Path) -> int:
        """Read all answers and return where the last whole line ends."""
        end = 0
        with path.open("rb") as lines:
            for number, line in enumerate(lines, start=1):
                if not line.endswith(b"\n"):  # a kill left it incomplete
                    logger.warning("%s: its last line is incomplete and is dropped; its question is asked again", path)
                    break
                try:
                    row = parse_json(line)
                    answer = decode(row, LoggedAnswer)
                    if "digest" in row and answer.digest != digest(row):  # logs of earlier versions have none
                        raise ValueError("its digest shows that it was changed")
                    if isinstance(answer.value, dict) and answer.value.keys() == set(Reading._fields):
                        # Else a resumed job reads texts for numbers.
                        answer = replace(answer, value=Reading.of(answer.value))
                except (ValueError, TypeError) as error:  # to skip it would lose an answer that was paid for
                    raise AnswerLogError(
                        f"{path}, line {number}, is not an answer ({error}): delete it to ask its question again"
                    ) from None
                self._keep(answer)
                end += len(line)
        return end

    def _keep(self, answer: LoggedAnswer) -> None:
        self._answers[answer.key] = answer
        self.calls.append(answer.call)

    def __contains__(self, key: str) -> bool:
        return key in self._answers

    def __getitem__(self, key: str) -> Any:
        return self._answers[key].value

    def call(self, key: str) -> Call:
        """Return what the answer of a key cost."""
        return self._answers[key].call

    def add(self, key: str, value: Any, call: Call) -> None:
        """Write one answer.

        Raises:
            `OSError`: if the disk is full. The file then holds whole lines only.
        """
        if self._file is not None:
            stored = value.as_dict() if isinstance(value, Reading) else value
            # As it will be read back, for the same digest.
            row = json.loads(json.dumps({"key": key, "value": stored, "call": call.as_dict()}))
            line = json.dumps(row | {"digest": digest(row)}).encode() + b"\n"
            start = self._file.seek(0, 2)
            try:
                written = self._file.write(line)
                if written < len(line):  # a disk that fills up takes a part; writing the rest raises the cause
                    self._file.write(line[written:])
            except OSError:
                self._file.truncate(start)  # whole lines only
                raise
        self._keep(LoggedAnswer(key, value, call))

    def close(self) -> None:
        """Close the file and release its lock."""
        if self._file is not None:
            self._file.close()

    def __exit__(self, *error: object) -> None:
        self.close()


@dataclass(frozen=True)
class Answers:
    """The outcome of [`ask_many`]."""

    values: dict[str, Any]  # what was read, by the question's name
    failures: dict[str, str]  # why there is no answer; the next run asks again
    calls: Sequence[Call]  # all in the log, also of earlier runs, and this run's failures
    asked: dict[str, Call]  # of these questions alone: the log may hold others
    kept: int = 0  # how many of `values` earlier runs had in the log
    cut_off: frozenset[str] = frozenset()  # of an engine: the responses of which the server says so

    def cut_at(self, limit: int) -> set[str]:
        """Return the names of the responses that were cut off at this many tokens."""
        # One of all tokens was cut off, whatever the server says. A server may count too few.
        return {name for name, call in self.asked.items() if name in self.cut_off or call.usage.completion >= limit}

    @property
    def totals(self) -> Totals:
        """The sums over `calls`."""
        return Totals.of(self.calls)


async def ask_many(
    judge: Judge,
    questions: Mapping[str, Askable],
    log: Path | None,
    title: str,
    model: str | None = None,
    max_failures: float = 1.0,
) -> Answers:
    """Ask all questions at once whose answers are not in a log yet, and close the judge's connections.

    If the log has no answer yet, a pilot of four goes first, and if none of the four can be read, nothing else is
    asked. Every answer is in the log as soon as it arrives, so a job that was killed continues where it was.

    Args:
        questions (`Mapping[str, Askable]`):
            What to ask, by unique name.
        log (`Path`, *optional*):
            File of the answers, see [`AnswerLog`]. With `None`, nothing is kept on disk.
        model (`str`, *optional*):
            Name of the model that answers. An answer of another model does not count. Default: the name under which
            the servers serve it.
        max_failures (`float`, *optional*, defaults to `1.0`):
            The share of the questions, in 0..1, that may fail before the rest is left.

    Raises:
        [`JudgeError`]: before anything is asked, if a server is missing, does not serve the model or has too short a
            context.
        [`SettingsError`]: if a server refuses the key.
        [`AnswerLogError`]: if the log is damaged.
        `OSError`: if the log cannot be written, or another process uses it.

    Example:

    ```python
    answers = asyncio.run(ask_many(config.judge(), {"q1": question}, Path("answers.jsonl"), "asking"))
    print(answers.values["q1"], answers.totals.tokens)
    ```
    """
    keys = {name: f"{name} {hash_question(judge, question, model)}" for name, question in questions.items()}
    failed: dict[str, Call] = {}
    try:
        with AnswerLog(log) as answers:
            todo = {name: question for name, question in questions.items() if keys[name] not in answers}
            if todo:
                await check_servers(judge, todo.values())  # a job that is done needs no server
            with progress() as display:
                tasks: list[asyncio.Task] = []
                bar = display.add_task(title, total=len(keys), completed=len(keys) - len(todo))

                async def ask(name: str, question: Askable) -> None:
                    value, call = await judge.ask_with_cost(question)
                    if call.status == 401:  # so will all others be refused
                        raise SettingsError(f"{judge.client.name} refuses the key, so no more was asked: {call.error}")
                    if call.status == 402:  # no credit is left
                        raise JudgeError(f"{judge.client.name}: no more was asked. {explain(call)}", passing=False)
                    if call.failed:
                        failed[name] = call
                        if len(failed) > max_failures * len(questions):
                            for task in tasks:
                                task.cancel()
                    else:
                        answers.add(keys[name], value, call)  # nothing is awaited between the answer and its line
                    display.advance(bar)

                # A log with answers shows that the judge can be read.
                pilot = pilot_of(todo) if len(todo) == len(questions) > PILOT else []
                for names in (pilot, [name for name in todo if name not in pilot]):
                    if pilot and len(failed) == len(pilot):
                        break
                    async with asyncio.TaskGroup() as group:
                        # The judge's client limits how many are in flight.
                        tasks = [group.create_task(ask(name, todo[name])) for name in names]
            return replace(result_of(answers, keys, failed, pilot), kept=len(questions) - len(todo))
    except BaseExceptionGroup as errors:
        raise first_leaf(errors) from errors  # one line for the user, not a group
    finally:
        judge.drain()  # the calls are in the result
        await judge.client.close()


def result_of(answers: AnswerLog, keys: Mapping[str, str], failed: dict[str, Call], pilot: Sequence[str]) -> Answers:
    """Return the answers by name, and why the other questions have none."""
    causes = {name: f"{failed[name].fault}: {failed[name].error}" for name in keys if name in failed}
    unasked = [name for name, key in keys.items() if key not in answers and name not in failed]
    if unasked:
        what = f"none of the first {len(failed)}" if [*pilot] == [*failed] else f"{len(failed)} of the others not"
        causes |= dict.fromkeys(
            unasked, f"not asked, because {what} could be read; the last one: {[*causes.values()][-1]}"
        )
    return Answers(
        values={name: answers[key] for name, key in keys.items() if key in answers},
        failures=causes,
        calls=[*answers.calls, *failed.values()],
        asked={name: answers.call(key) for name, key in keys.items() if key in answers} | failed,
    )


def pilot_of(questions: Mapping[str, Askable]) -> list[str]:
    """Return the names of a few questions, of as many kinds as there are: a judge may read some kinds alone."""
    kinds: dict[str, str] = {}
    for name, question in questions.items():
        kinds.setdefault(question.kind, name)
    names = [*kinds.values()]
    return [*names, *(name for name in questions if name not in names)][:PILOT]


def hash_question(judge: Judge, question: Askable, model: str | None = None) -> str:
    """Hash the request that a judge makes of a question, see [`hash_request`].

    A client that is no server has no fields of a request. Its arguments count instead, see [`arguments_of`], and
    whether it is asked for probabilities.
    """
    client = next(iter(servers_of(judge)), None)
    model = model or str(client.model if client else judge.client.name)
    soft = {"logprobs": True} if getattr(question, "soft", False) else {}
    # No server, no request: the arguments of the client count.
    fields = client.fields_of(question) if client else {**judge.client_arguments, **soft}
    return hash_request(model, question.chat(judge.guard), fields)


def hash_request(model: str, messages: Sequence[Mapping[str, str]], fields: Mapping[str, Any]) -> str:
    """Hash what an answer depends on. A logged answer is reused only if all three are unchanged.

    Args:
        fields (`Mapping[str, Any]`):
            All other fields of the request, such as the decoding.
    """
    text = json.dumps([model, list(messages), dict(fields)], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def progress() -> "Progress":
    """Make a progress bar with counts and a rate. It is shown only if standard error is a terminal."""
    from rich.console import Console  # here, so that a judge alone starts at once
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, ProgressColumn, Task, TextColumn
    from rich.progress import TimeRemainingColumn as Remaining

    class Rate(ProgressColumn):
        def render(self, task: Task) -> str:
            speed = task.finished_speed or task.speed
            return f"{60 * speed:.3g} a minute" if speed else ""

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), Rate(), Remaining())
    is_terminal = sys.stderr.isatty()
    # A slow judge answers once in some minutes.
    return Progress(
        *columns, console=Console(stderr=True), disable=not is_terminal, transient=True, speed_estimate_period=600
    )


def shortened(keys: Sequence[str], most: int = 5) -> str:
    """Return the first ids of many for a message."""
    return ", ".join(map(str, keys[:most])) + (", ..." if len(keys) > most else "")


def failures_text(failures: Mapping[str, str]) -> str:
    """Name the chats that failed, and the last cause."""
    return f"Failed: {shortened(list(failures))}. Last cause: {list(failures.values())[-1]}"
