"""The one seam to a judge: a question goes in, a parsed verdict comes out, and every attempt is in the ledger."""

import asyncio
import time
from typing import Any, Protocol

from .errors import JudgeError, TransportError
from .ledger import Call, Usage
from .questions import Question, VerdictError

REPEAT = "That is not a valid answer: {error}. Answer the same question again with the JSON object alone."


class ChatClient(Protocol):
    """What stands behind a judge: [`OpenAIClient`] or [`RubricJudge`]."""

    name: str
    """For messages to people: the endpoint and the model."""

    async def complete(self, messages: list[dict[str, str]], *, seed: int) -> tuple[str, Usage, int]:
        """Answer a chat deterministically. Returns text, tokens and requests sent, or raises [`TransportError`]."""

    async def close(self) -> None:
        """Release connections."""


class Judge:
    """Asks questions of a chat client and keeps the ledger.

    A malformed answer is asked for again in a follow-up turn that names the fault, so that a deterministic judge can
    answer differently. Transport faults are retried by the client. When nothing helps, [`Judge.ask`] returns `None`: a
    failure is never a score.

    Args:
        client (`ChatClient`):
            Who answers.
        max_attempts (`int`, *optional*, defaults to `3`):
            How often one question is put before it counts as malformed.
        concurrency (`int`, *optional*, defaults to `64`):
            Questions in flight at once.
        method (`str`, *optional*, defaults to `"rankbuffer"`):
            Goes into the ledger.
    """

    def __init__(self, client: ChatClient, max_attempts: int = 3, concurrency: int = 64, method: str = "rankbuffer"):
        self.client = client
        self.max_attempts = max_attempts
        self.method = method
        self.calls: list[Call] = []
        self._slots = asyncio.Semaphore(concurrency)

    async def ask(self, question: Question) -> Any | None:
        """The parsed verdict of `question`, or `None` if there is none. Either way one [`Call`] joins `calls`."""
        messages = [{"role": "user", "content": question.prompt}]
        verdict, outcome, error = None, "malformed", ""
        attempts, usage, spent = 0, Usage(), Usage()
        async with self._slots:
            started = time.perf_counter()
            for repeat in range(self.max_attempts):
                try:
                    answer, tokens, sent = await self.client.complete(messages, seed=repeat)
                except TransportError as fault:
                    outcome, error, attempts = "unreachable", str(fault), attempts + fault.attempts
                    break
                attempts, spent = attempts + sent, spent + tokens
                try:
                    verdict = question.parse(answer)
                except VerdictError as fault:
                    error = str(fault)
                    messages = messages[:1] + [
                        {"role": "assistant", "content": answer.strip()[:500] or "(no answer)"},
                        {"role": "user", "content": REPEAT.format(error=error)},
                    ]
                else:
                    outcome, error, usage = "parsed", "", tokens
                    break
            seconds = time.perf_counter() - started
        self.calls.append(
            Call(self.method, question.kind, question.query_id, outcome, attempts, usage, spent, seconds, error)
        )
        return verdict

    def drain(self) -> list[Call]:
        """Hand over the calls made since the last time, in an order that does not depend on who answered first."""
        calls, self.calls = self.calls, []
        return sorted(calls, key=lambda c: (c.query_id, c.kind, c.outcome, c.usage, c.spent, c.attempts, c.error))

    async def preflight(self, question: Question) -> None:
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
