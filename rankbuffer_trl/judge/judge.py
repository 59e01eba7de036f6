"""The one seam to a judge: a question goes in, a parsed verdict comes out, and every attempt is in the ledger."""

import asyncio
from collections.abc import Callable, Iterable
from typing import Any, Protocol

from .errors import JudgeError, TransportError
from .ledger import Call, Tally, Usage
from .verdicts import VerdictError

REPEAT = "That is not a valid answer: {error}. Answer the same question again with the JSON object alone."


def nobody(call: Call) -> None:
    """Wants to know of no call."""


class Asked(Protocol):
    """What can be put to a judge: a [`Question`] of a reward method, or a [`Chat`]."""

    @property
    def kind(self) -> str:
        """What the ledger calls it."""

    @property
    def query_id(self) -> str:
        """What it is about."""

    @property
    def afresh(self) -> bool:
        """Whether a malformed answer is asked for again as if for the first time."""

    def chat(self, guard: bool) -> list[dict[str, str]]:
        """The messages."""

    def fields(self, decoding: str, free_tokens: int) -> dict[str, Any]:
        """Fields of the request."""

    def read(self, answer: str) -> Any:
        """The value of an answer, or [`VerdictError`]."""


class ChatClient(Protocol):
    """What stands behind a judge: [`RubricJudge`], [`OpenAIClient`] or several of them as [`Servers`]."""

    name: str
    """For messages to people: the endpoint and the model."""

    async def complete(
        self, messages: list[dict[str, str]], *, question: Asked, seed: int, tally: Tally
    ) -> tuple[str, Usage]:
        """Answer a chat about `question` deterministically: text and tokens, or raise [`TransportError`].

        Requests, seconds and the server are added to `tally` as they happen.
        """

    async def close(self) -> None:
        """Release connections."""


class Judge:
    """Asks questions of a chat client and keeps the ledger.

    A malformed answer is asked for again in a follow-up turn that names the fault, so that a deterministic judge can
    answer differently. Transport faults are retried by the client, which also limits what is in flight. When nothing
    helps, [`Judge.ask`] returns `None`: a failure is never a score.

    Args:
        client (`ChatClient`):
            Who answers.
        max_attempts (`int`, *optional*, defaults to `3`):
            How often one question is put before it counts as malformed.
        guard (`bool`, *optional*, defaults to `False`):
            Quote responses in prompts, see [`Question.prompt`].
    """

    def __init__(self, client: ChatClient, max_attempts: int = 3, guard: bool = False):
        self.client = client
        self.max_attempts = max_attempts
        self.guard = guard
        self.method = ""
        """The reward method that asks; [`GroupScorer`] names it for the ledger."""
        self.calls: list[Call] = []
        self.on_call: Callable[[Call], None] = nobody

    async def ask(self, question: Asked) -> Any | None:
        """The parsed verdict of `question`, or `None` if there is none. Either way one [`Call`] joins `calls`."""
        verdict, _ = await self.put(question)
        return verdict

    async def put(self, question: Asked) -> tuple[Any | None, Call]:
        """As [`Judge.ask`], with the call. `on_call` is told of it; what it raises ends the question."""
        messages = question.chat(self.guard)
        opening = len(messages)
        verdict, outcome, error, usage, tally = None, "malformed", "", Usage(), Tally()
        try:
            for repeat in range(self.max_attempts):
                answer, tokens = await self.client.complete(messages, question=question, seed=repeat, tally=tally)
                tally.spent += tokens
                try:
                    verdict = question.read(answer)
                except VerdictError as fault:
                    tally.malformed += 1
                    error = str(fault)
                    if not question.afresh:
                        messages = messages[:opening] + [
                            {"role": "assistant", "content": answer.strip()[:500] or "(no answer)"},
                            {"role": "user", "content": REPEAT.format(error=error)},
                        ]
                else:
                    outcome, error, usage = "parsed", "", tokens
                    break
        except TransportError as fault:
            outcome, error = "unreachable", str(fault)
        except asyncio.CancelledError:
            if tally.attempts:  # else it was still waiting for its turn, and nothing was sent
                self._record(question, "cancelled", usage, tally, error)
            raise
        call = self._record(question, outcome, usage, tally, error)
        self.on_call(call)
        return verdict, call

    def _record(self, question: Asked, outcome: str, usage: Usage, tally: Tally, error: str) -> Call:
        call = Call(
            method=self.method,
            kind=question.kind,
            query_id=question.query_id,
            server=tally.server,
            outcome=outcome,
            attempts=tally.attempts,
            usage=usage,
            spent=tally.spent,
            seconds=tally.seconds,
            error=error,
            malformed=tally.malformed,
        )
        self.calls.append(call)
        return call

    async def ask_all(self, questions: Iterable[Asked]) -> list[Any | None]:
        """The verdicts of `questions`, which are put at once and in this order.

        When one of them ends in an exception, the others are cancelled.
        """
        async with asyncio.TaskGroup() as tasks:
            asked = [tasks.create_task(self.ask(question)) for question in questions]
        return [task.result() for task in asked]

    def drain(self) -> list[Call]:
        """Hand over the calls made since the last time, in an order that does not depend on who answered first."""
        calls, self.calls = self.calls, []
        return sorted(
            calls, key=lambda c: (c.query_id, c.kind, c.outcome, c.usage, c.spent, c.attempts, c.server, c.error)
        )

    async def preflight(self, question: Asked) -> None:
        """Ask one real question before any training. The call does not enter the ledger.

        Raises:
            [`JudgeError`]: naming the endpoint, the cause and what to do.
        """
        verdict = await self.ask(question)
        call = self.calls.pop()
        if verdict is None:
            advice = (
                "Is the server up, and do judge_url and judge_model name it?"
                if call.outcome == "unreachable"
                else f"It was asked {call.attempts} times. Is it an instruction-tuned chat model?"
            )
            raise JudgeError(
                f"the judge ({self.client.name}) failed its first question, so nothing was started. "
                f"Outcome: {call.outcome}. Last cause: {call.error}. {advice}"
            )
