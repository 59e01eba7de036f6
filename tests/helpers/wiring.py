"""What a program does with its settings: its requests, the arguments of doors inside it, its output and its files."""

import inspect
import json
from argparse import ArgumentParser
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import fields, is_dataclass
from functools import wraps
from pathlib import Path
from pkgutil import resolve_name
from typing import Any, NamedTuple

import pytest
from aiohttp import web

from helpers.servers import served
from rankbuffer_trl.judge import RubricJudge
from rankbuffer_trl.judge._probabilities import without_doubt
from rankbuffer_trl.judge.config import ServersConfig

ECHOES = {"config", "settings"}  # of the files that a program writes: what it was told proves nothing


class To(NamedTuple):
    """The value of a setting, and its other end where that is not an argument of a door with the same name.

    The end is a part of what is seen, arguments of doors, or a function of [`Ends`]. With `None`, this start does not
    look at it. With `True`, the start would fail without it.
    """

    value: Any
    end: "str | bool | dict[str, Any] | Callable[[Ends], bool] | None" = None


def base(**values: Any) -> dict[str, To]:
    """Return rows of settings that a start needs, and that another one looks at."""
    return {name: To(value) for name, value in values.items()}


def needed(**values: Any) -> dict[str, To]:
    """Return rows of settings without which a start would fail."""
    return {name: To(value, True) for name, value in values.items()}


def sent(**values: Any) -> dict[str, To]:
    """Return rows of settings that are fields of a request."""
    return {name: To(value, f'"{name}": {plain(value)}') for name, value in values.items()}


def value_of(row: Any) -> Any:
    return row.value if isinstance(row, To) else row


def plain(value: Any) -> str:
    """Write a value as JSON, and what JSON cannot hold as its class. A path is a text."""
    return json.dumps(value, default=lambda other: str(other) if isinstance(other, Path) else type(other).__name__)


def settings_of(owner: Any) -> dict[str, Any]:
    """Return the default of each setting of a dataclass, a parser or a function."""
    if isinstance(owner, Mapping):
        return dict(owner)
    if isinstance(owner, ArgumentParser):
        return {each.dest: each.default for each in owner._actions if each.dest != "help"}
    if is_dataclass(owner):
        return {each.name: each.default for each in fields(owner)}
    return {each.name: each.default for each in inspect.signature(owner).parameters.values()}


class Ends:
    """All that is seen of the settings of a program. A model answers at `url`."""

    def __init__(self, patch: pytest.MonkeyPatch):
        self.patch, self.url = patch, ""
        self.given: dict[str, set[str]] = defaultdict(set)  # to doors, by argument, also those left to their default
        self.lines: list[str] = []

    def door(self, path: str, instead: Callable | None = None, when: Callable = lambda given: True) -> None:
        """Note the arguments of a function where it is looked up, and call it, or something instead of it.

        The settings of a judge as a whole would prove that they arrive, and not that each is used: no part of them
        counts.

        Args:
            path (`str`):
                The dotted path of the function, or of a class.
            instead (`Callable`, *optional*):
                What is called in its place.
            when (`Callable`, *optional*):
                Which arguments, as a dict, are noted. Default: all.
        """
        place, _, name = path.rpartition(".")
        owner = resolve_name(place)
        function = getattr(owner, name)
        signature = inspect.signature(function)

        @wraps(function)
        def noting(*args, **kwargs):
            bound = signature.bind(*args, **kwargs)
            bound.apply_defaults()
            for each, value in bound.arguments.items() if when(bound.arguments) else ():
                self.given[each].add(plain(value))
                for part in fields(value) if is_dataclass(value) and not isinstance(value, ServersConfig) else ():
                    self.given[f"{each}.{part.name}"].add(plain(getattr(value, part.name)))
            return (instead or function)(*args, **kwargs)

        self.patch.setattr(owner, name, noting)

    def doors(self, module: str, names: str) -> None:
        """Open doors of a module, by their names in one text."""
        for name in names.split():
            self.door(f"{module}.{name}")

    def arrived(self, name: str) -> set[str]:
        """Return what doors got for a setting, as an argument or as a part of one."""
        short = name.removeprefix("judge_")
        if name != short and (found := self.given.get(f"endpoint.{short}")):
            return found
        parts = [each for each in self.given if each.endswith(f".{short}")]
        return self.given.get(short) or set().union(*(self.given[each] for each in parts))

    def among(self, argument: str, part: str) -> bool:
        """Return whether an argument that is written as JSON has a part."""
        return any(part in value for value in self.given[argument])

    @property
    def asked(self) -> str:
        """The requests."""
        return "\n".join(line for line in self.lines if line.startswith("POST "))

    def answer(self, body: dict) -> str:
        """Answer as the embedded judge does."""
        return RubricJudge().answer(body["messages"])[0]

    async def _complete(self, request: web.Request) -> web.Response:
        body, head = await request.json(), {name.title(): value for name, value in request.headers.items()}
        self.lines.append(f"POST {json.dumps(head)} {json.dumps(body)}")
        text = self.answer(body)
        logprobs = without_doubt(text) if body.get("logprobs") else None
        choice = {"finish_reason": "stop", "message": {"role": "assistant", "content": text}, "logprobs": logprobs}
        usage = {"prompt_tokens": 20, "completion_tokens": 5}
        return web.json_response({"choices": [choice] * body.get("n", 1), "usage": usage})

    @contextmanager
    def serving(self) -> Iterator[None]:
        app = web.Application(client_max_size=2**24)
        app.router.add_post("/v1/chat/completions", self._complete)
        with served(app) as address:
            self.url = f"{address}/v1"
            yield

    def add_files(self, folder: Path) -> None:
        """Note the files of a folder with their texts, but for the settings that they repeat."""
        for path in sorted(folder.rglob("*")):
            self.lines.append(f"file {path.relative_to(folder)}")
            if path.suffix == ".json" and isinstance(found := json.loads(path.read_text()), dict):
                self.lines.append(json.dumps({key: value for key, value in found.items() if key not in ECHOES}))
            elif path.suffix in (".jsonl", ".md", ".txt"):
                self.lines.append(path.read_text())

    def unseen(self, rows: Mapping[str, Any]) -> Iterator[str]:
        """Yield a line for each setting that did not arrive."""
        text = "\n".join(self.lines)
        for name, row in rows.items():
            value, end = row if isinstance(row, To) else (row, {name: row})
            if isinstance(end, dict):
                for argument, expected in end.items():
                    if (found := self.arrived(argument)) != {plain(expected)}:
                        yield f"{name}: {argument} should be {plain(expected)}, not {found}"
            elif isinstance(end, str) and end not in text:
                yield f"{name}={value!r}: there is no {end!r}"
            elif callable(end) and not end(self):
                yield f"{name}={value!r} is not seen"
