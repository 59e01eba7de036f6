"""Answers on disk the moment they are there, so that a job that was killed asks nothing twice."""

import asyncio
import fcntl
import json
import logging
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from .errors import first_leaf
from .judge import Asked, Judge
from .ledger import Call, Totals, Usage

logger = logging.getLogger(__name__)


class AnswerLog:
    """A file of answers by key, one JSON line each: `key`, `value`, and what the answer cost.

    Lines are only ever added. A last line that a kill has torn is dropped; any other damage is an error, since an
    answer that was paid for would be lost.

    Args:
        path (`str` or `Path`):
            The file; it and its folder are made if missing.

    Raises:
        `ValueError`: if a line but the last is not an answer.
        `OSError`: if the file cannot be opened, or another process has it.
    """

    def __init__(self, path: str | Path):
        self.path = Path(path)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._file = self.path.open("ab", buffering=0)
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self._file.close()
            raise BlockingIOError(f"{self.path} is in use by another process: is this job running already?") from None
        self._values: dict[str, Any] = {}
        self._calls: list[Call] = []
        self._read()

    def _read(self) -> None:
        end = 0
        with self.path.open("rb") as lines:
            for number, line in enumerate(lines, start=1):
                if not line.endswith(b"\n"):
                    logger.warning("%s: its last line is torn and is dropped; it is asked again", self.path)
                    break
                try:
                    row = json.loads(line)
                    costs = {name: Usage(*row["call"][name]) for name in ("usage", "spent")}
                    self._keep(row["key"], row["value"], Call(**row["call"] | costs))
                except (ValueError, LookupError, TypeError) as error:
                    raise ValueError(
                        f"{self.path}, line {number}, is not an answer ({error}): mend or delete that line, and it is"
                        " asked again"
                    ) from None
                end += len(line)
        self._file.truncate(end)

    def _keep(self, key: str, value: Any, call: Call) -> None:
        self._values[key] = value
        self._calls.append(call)

    def __contains__(self, key: str) -> bool:
        return key in self._values

    def __getitem__(self, key: str) -> Any:
        return self._values[key]

    def __len__(self) -> int:
        return len(self._values)

    def add(self, key: str, value: Any, call: Call) -> None:
        """Write one answer; it is in the file when this returns, and survives the process.

        Raises:
            `OSError`: if the disk is full; nothing but whole lines count then.
        """
        line = json.dumps({"key": key, "value": value, "call": call.as_dict()}).encode() + b"\n"
        start = self.path.stat().st_size
        try:
            written = self._file.write(line)
            if written < len(line):  # a disk that fills up takes what it can; the rest says why
                self._file.write(line[written:])
        except OSError:
            self._file.truncate(start)
            raise
        self._keep(key, value, call)

    def totals(self) -> Totals:
        """What all answers in the file cost, those of earlier runs too."""
        return Totals.of(self._calls)

    def close(self) -> None:
        """Close the file and let others have it."""
        self._file.close()

    def __enter__(self) -> "AnswerLog":
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def nothing(key: str, value: Any, call: Call) -> None:
    """Has nothing to show."""


async def answer_all(
    judge: Judge,
    chats: Iterable[tuple[str, Asked]],
    log: AnswerLog,
    on_done: Callable[[str, Any | None, Call], None] = nothing,
) -> dict[str, str]:
    """Ask all chats that are not in the log, at once; the judge's client limits what is in flight.

    Args:
        judge (`Judge`):
            Who is asked. Its ledger is left empty.
        chats (`Iterable[tuple[str, Asked]]`):
            Keys, each once, and what to ask.
        log (`AnswerLog`):
            Gets every answer that could be read, the moment it is there.
        on_done (`Callable`, *optional*):
            Is told key, value (`None` if it failed) and call of each, for a progress bar.

    Returns:
        `dict[str, str]`: the cause by key of those that failed. They are not in the log, so the next run asks again.
    """
    failed: dict[str, str] = {}

    async def one(key: str, chat: Asked) -> None:
        value, call = await judge.put(chat)
        if call.failed:
            failed[key] = f"{call.outcome}: {call.error}"
        else:
            log.add(key, value, call)
        on_done(key, value, call)

    todo = {key: chat for key, chat in chats if key not in log}
    try:
        async with asyncio.TaskGroup() as tasks:
            for key, chat in todo.items():
                tasks.create_task(one(key, chat))
    except BaseExceptionGroup as errors:
        raise first_leaf(errors) from errors
    finally:
        judge.drain()
    return failed
