"""Judges without a server: a client whose answers a test decides, the embedded judge, and servers in memory."""

import asyncio
import json
import math
import os
import random
import signal
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, NamedTuple

from rankbuffer_trl.judge import RubricJudge, TransportError, Usage
from rankbuffer_trl.judge._ledger import Reply, Tally
from rankbuffer_trl.testing import RESPONSE_LINES, ScriptedClient, quality, truth, unguarded

GOOD = '{"position": 1}'


def by_number(messages: list[dict]) -> str:
    """Answer as the judge of texts that are numbers: a higher number is a better response."""
    return truth(messages[0]["content"])


def unreachable(messages: list[dict]) -> Exception:
    return TransportError("connection refused")


class Asked(NamedTuple):
    """What a client is asked."""

    messages: list[dict]
    question: Any
    seed: int
    tally: Tally

    @property
    def prompt(self) -> str:
        return unguarded(self.messages[0]["content"])


class Hooks:
    """A chat client with what a test does before each answer, and with its reply."""

    async def before(self, asked: Asked) -> object:
        """Wait, count, raise or note."""

    async def after(self, asked: Asked, reply: Reply) -> tuple:
        """Return the reply, or another one."""
        return reply

    async def complete(self, messages, *, question, seed, tally):
        asked = Asked(list(messages), question, seed, tally)
        await self.before(asked)
        return await self.after(
            asked, await super().complete(asked.messages, question=question, seed=seed, tally=tally)
        )


class Fake(Hooks, ScriptedClient):
    """A client that answers as a test decides: `answer(messages)` gives a text or an exception. Hooks are optional."""

    def __init__(self, answer: Callable[[list[dict]], Any] = by_number, **hooks: Any):
        super().__init__(answer)
        vars(self).update(hooks)


class Embedded(Hooks, RubricJudge):
    """The embedded judge with hooks."""

    def __init__(self, **hooks: Any):
        vars(self).update(hooks)


class SilentJudge(Embedded):
    """The embedded judge, which never answers again once it is silent and `left` more questions are answered."""

    def __init__(self, left: int = 0, number: int = signal.SIGTERM):
        self.silent, self.left, self.number = False, left, number

    async def before(self, asked: Asked) -> None:
        if self.silent and (left := self.left) <= 0:
            self.left -= 1
            if left == 0:
                os.kill(os.getpid(), self.number)
            await asyncio.Event().wait()
        self.left -= self.silent


@dataclass
class Mute:
    """No judge: it cannot be closed."""

    name = "mute"

    async def complete(self, messages, **kwargs):
        raise NotImplementedError


@dataclass
class NumberJudge:
    """The judge that knows the truth, named in settings. It writes down what it answers, and may kill the process."""

    kill_at: int = field(default=10**9, compare=False)
    record: str = field(default="", compare=False)
    fail: bool = field(default=False, compare=False)
    version: str = "numbers-1"
    name = "number judge"
    model = "numbers"
    asked: ClassVar[list[str]] = []
    one_by_one: asyncio.Lock = field(default_factory=asyncio.Lock)

    async def complete(self, messages, *, question, seed, tally):
        async with self.one_by_one:
            for _ in range(5):  # so that the answer before is on disk
                await asyncio.sleep(0)
            return self.answer(messages, tally)

    def answer(self, messages, tally):
        tally.server, tally.attempts = self.name, tally.attempts + 1
        self.asked.append(messages[0]["content"])
        if self.fail:
            raise TransportError("it is gone")
        if len(self.asked) > self.kill_at:
            os.kill(os.getpid(), signal.SIGKILL)
        if self.record:
            with open(self.record, "a") as file:
                file.write(json.dumps(messages[0]["content"]) + "\n")
        return truth(messages[0]["content"]), Usage(10, 4, 3)

    async def close(self):
        pass


def shuffled(seed: int, most: int = 30) -> Callable:
    """Return a hook that lets answers come in a seeded random order."""
    luck = random.Random(seed)

    async def wait(asked: Asked) -> None:
        for _ in range(luck.randrange(most)):
            await asyncio.sleep(0)

    return wait


class Remote:
    """A server as `OpenAIClient` shows it: a fault has a kind, and all but a refusal is tried again if asked for.

    Its `state` is `up`, `down`, `busy`, `limited`, `refused` or `hanging`. `status` is that of a refusal.
    """

    role, retries, status = "judge", 2, 400

    def __init__(self, number: int):
        self.name = self.url = f"http://judge-{number}/v1"
        self.state, self.asked, self.looks, self.in_flight = "up", 0, 0, 0
        self.shown = False  # whether a probe may see that it is up
        self.dies = asyncio.Event()  # ends what hangs

    async def complete(self, messages, *, question, seed, tally, retry=True):
        requests = 1 + self.retries * (retry and self.state in ("down", "busy"))
        tally.server, tally.attempts = self.name, tally.attempts + requests
        self.asked += requests
        self.in_flight += 1
        await (self.dies.wait() if self.state == "hanging" else asyncio.sleep(0))
        if self.state == "up":
            return Reply(GOOD, Usage(1, 0, 1))
        if self.state == "limited":
            raise TransportError(f"{self.url} takes no more", "busy", 429, retry_after=0.01)
        kind, statuses = "down" if self.state == "hanging" else self.state, {"busy": 409, "refused": self.status}
        raise TransportError(f"{self.url} is {self.state}", kind, statuses.get(kind))

    async def find_penalties(self) -> None:
        pass

    def forget_penalties(self) -> None:
        pass

    async def gone(self) -> bool:
        return self.state != "up"

    async def alive(self) -> bool:
        self.looks += 1
        if self.state == "hanging":
            await self.dies.wait()
        return self.state == "up" and self.shown

    async def close(self) -> None:
        self.state = "closed"


@dataclass
class Window:
    """Lets `Remote` answer two requests, and none until 5 ms after it has refused one."""

    client: Remote
    left: int = 2
    opens: asyncio.TimerHandle | None = None

    async def complete(self, *args, **kwargs):
        if self.left:
            self.left -= 1
            return await Remote.complete(self.client, *args, **kwargs)
        self.opens = self.opens or asyncio.get_running_loop().call_later(0.005, self.open)
        raise TransportError("takes no more", "busy", 429, retry_after=0.01)

    def open(self) -> None:
        self.left, self.opens = 2, None


# What judges believe, in the form in which OpenAI's interface tells it.


def place(token: str, chances: Mapping[str, float]) -> dict:
    """One place of an answer: the token that was said, and the probabilities of the listed tokens."""
    listed = [{"token": each, "logprob": math.log(chance)} for each, chance in chances.items()]
    return {"token": token, "logprob": math.log(chances.get(token, 1.0)), "top_logprobs": listed}


def spelled(*places: str | tuple[str, Mapping[str, float]]) -> dict:
    """The log probabilities of an answer: tokens without a doubt, and (token, probabilities)."""
    return {"content": [place(p, {p: 1.0}) if isinstance(p, str) else place(*p) for p in places]}


def shares(weights: Mapping[str, float]) -> dict[str, float]:
    """Probabilities from log weights."""
    most = max(weights.values())
    powers = {name: math.exp(weight - most) for name, weight in weights.items()}
    return {name: power / sum(powers.values()) for name, power in powers.items()}


def opinion(prompt: str, bias: float, slope: float = 0.01) -> tuple[str, dict]:
    """Answer a pair, a rating or an insertion as a judge with an opinion does: a word, and its log probabilities.

    Args:
        prompt (`str`):
            The prompt.
        bias (`float`):
            What the judge's habit is worth in log odds: the response that stands first, or the highest number but one.
        slope (`float`):
            The log odds that a point of quality is worth, of one response over the other or of each score over the
            next lower one.
    """
    shown = [quality(text) for text in RESPONSE_LINES.findall(unguarded(prompt))]
    if '"winner"' in prompt:
        first, second = shown
        key, before, after, weights = "winner", '": "', '"}', {"A": bias + slope * (first - second), "B": 0.0}
    else:
        key, most = ("score", 9) if '"score"' in prompt else ("position", len(shown) - 1)
        before, after = '": ', "}"
        weights = {str(n): slope * n * shown[-1] + bias * (n == most - 1) for n in range(most + 1)}
    chances = shares(weights)
    word = max(chances, key=chances.get)
    return f'{{"{key}{before}{word}{after}', spelled('{"', key, before, (word, chances), after)
