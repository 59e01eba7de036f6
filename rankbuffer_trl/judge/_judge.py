"""Ask a judge: a question goes in, a parsed verdict comes out, and the ledger records every attempt."""

import asyncio
import json
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import fields, is_dataclass
from functools import cache, cached_property
from typing import Any, Protocol

from ..groups import storable
from ._completion import ALL_THOUGHT, CUT_OFF, FREE_FORM, TOO_LONG, WITHHELD
from ._errors import JudgeError, TransportError, printable
from ._ledger import ANSWER_KEPT, Call, Reply, Tally, Usage
from ._probabilities import ProbabilityError
from ._quoting import defuse
from ._thoughts import in_thought
from ._verdicts import VerdictError

logger = logging.getLogger(__name__)

REPEAT = "That is not a valid answer: {error}. Answer the same question again with the JSON object alone."
TOO_FEW_SAMPLES = "fewer answers than judge_samples"
REPEATED = 500  # characters of the answer, and of its fault, in that turn
NAMED = "Is the server up, and do judge_url and judge_model name it?"
REFUSED = "The server is up and refuses the request. judge_request and judge_decoding add fields to it."
FILTERED = "That is the server's filter or the model's refusal: take another judge, or leave the query out."
SHORTEN = "serve the judge with one, lower max_completion_length, or take a method that shows fewer responses at once"
HINTS = {  # what to do about an HTTP status
    402: "The account of the judge has no credit left: top it up, and resume.",
    404: NAMED,
    429: "The server takes no more for now: lower judge_concurrency, or see what the account may ask.",
}
MAX_TOKEN_CHARACTERS = 10
MAX_TEMPLATE_TOKENS = 1000  # that a chat template adds
ODD: set[str] = set()  # the servers of this process whose counts of tokens were named
FIRST_QUESTION_SECONDS = 600.0  # for the first question of all; a server may have to load or compile something


class Askable(Protocol):
    """A question that a judge can answer: a [`Question`] of a reward method, or a [`Chat`]."""

    @property
    def kind(self) -> str:
        """The name of this kind of question in the ledger."""

    @property
    def query_id(self) -> str:
        """The id of the query or row that the question is about."""

    @property
    def afresh(self) -> bool:
        """Whether the same question is sent again after a malformed answer, without a turn that names the fault."""

    def chat(self, guard: bool) -> list[dict[str, str]]:
        """Return the messages."""

    def fields(self, decoding: str, free_tokens: int) -> dict[str, Any]:
        """Return the fields of the request."""

    def read_reply(self, reply: Reply) -> Any:
        """Return the value of a reply, or raise [`VerdictError`]."""


class LazyMessages(Sequence[dict[str, str]]):
    """The messages of a question, written when they are first read.

    A client reads them when the question has its turn, because a step of large groups has thousands of questions that
    wait for one, and each prompt holds all its responses.
    """

    def __init__(self, question: Askable, guard: bool):
        self.question, self.guard = question, guard

    @cached_property
    def _written(self) -> list[dict[str, str]]:
        return self.question.chat(self.guard)

    def __getitem__(self, index: Any) -> Any:
        return self._written[index]

    def __len__(self) -> int:
        return len(self._written)


class ChatClient(Protocol):
    """The client that answers for a judge: [`RubricJudge`], or one or several servers as [`Servers`]."""

    name: str
    """The endpoint and the model, for messages."""

    async def complete(
        self, messages: Sequence[dict[str, str]], *, question: Askable, seed: int, tally: Tally
    ) -> Reply:
        """Answer a chat about `question` deterministically, or raise [`TransportError`].

        `messages` are written when they are first read, so a client reads them in the question's turn.
        Requests, seconds and the server are added to `tally` as they happen.
        """

    async def close(self) -> None:
        """Release connections."""


def arguments_of(client: ChatClient) -> dict[str, Any]:
    """Return what a client was made with, if it is a dataclass. A logged answer counts for the same arguments only."""
    if not is_dataclass(client):
        return {}
    # Which argument changes the answers is not known, so all count, except fields with `compare=False`.
    arguments = {field.name: getattr(client, field.name) for field in fields(client) if field.init and field.compare}
    # A value that JSON cannot hold, such as a lock, counts by its class.
    return json.loads(json.dumps(arguments, skipkeys=True, default=lambda value: type(value).__name__))


class Judge:
    """Ask questions of a chat client and keep the ledger.

    The client retries transport faults and limits the requests in flight. If a question fails after all attempts,
    [`Judge.ask`] returns `None`: a failure is never a score.

    Args:
        client (`ChatClient`):
            The client that answers.
        max_attempts (`int`, *optional*, defaults to `3`):
            How often one question is asked before it counts as malformed.
        guard (`bool`, *optional*, defaults to `True`):
            Quote responses in prompts, see [`Question.prompt`]. `False` gives the paper's prompts.
        method (`str`, *optional*):
            The reward method that asks, for the ledger.
        on_call (`Callable[[Call], None]`, *optional*):
            Called with every call that has ended. An exception from it ends the question.
        on_spent (`Callable[[Usage], None]`, *optional*):
            Called with the tokens of every reply as it arrives, also if the question fails later.

    Example:

    ```python
    import asyncio

    from rankbuffer_trl import Judge
    from rankbuffer_trl.groups import Query, Rubric
    from rankbuffer_trl.judge import RubricJudge, insertion_question

    judge = Judge(RubricJudge())
    rubrics = (Rubric("Says minutes: three, four.", weight=5),)
    query = Query("tea", [{"role": "user", "content": "How long does tea steep?"}], rubrics)
    anchors = ["I do not know.", "Three or four minutes."]
    position = asyncio.run(judge.ask(insertion_question(query, anchors, "Three minutes.")))
    (call,) = judge.drain()
    position, call.attempts  # (1, 1)
    ```
    """

    def __init__(
        self,
        client: ChatClient,
        max_attempts: int = 3,
        guard: bool = True,
        method: str = "",
        on_call: Callable[[Call], None] | None = None,
        on_spent: Callable[[Usage], None] | None = None,
    ):
        self.client = client
        self.client_arguments = arguments_of(client)  # a copy, because a client may change its fields while it answers
        self.max_attempts = max_attempts
        self.guard = guard
        self.method = method
        self.on_call = on_call
        self.on_spent = on_spent
        self.calls: list[Call] = []

    def for_method(
        self,
        method: str = "",
        on_call: Callable[[Call], None] | None = None,
        on_spent: Callable[[Usage], None] | None = None,
    ) -> "Judge":
        """Return a judge with the same client and settings, but with its own ledger, method and watchers."""
        on_spent = on_spent or self.on_spent
        return Judge(self.client, self.max_attempts, self.guard, method or self.method, on_call, on_spent)

    async def ask(self, question: Askable) -> Any | None:
        """Return the parsed verdict of `question`, or `None` if there is none. Either way a [`Call`] joins `calls`."""
        verdict, _ = await self.ask_with_cost(question)
        return verdict

    async def ask_with_cost(self, question: Askable) -> tuple[Any | None, Call]:
        """Return the verdict as [`Judge.ask`] does, and the entry in the ledger."""
        messages: Sequence[dict[str, str]] = LazyMessages(question, self.guard)
        opening = messages
        verdict, outcome, error = None, "malformed", ""
        usage, answer, tally = Usage(), "", Tally()
        transport_error: TransportError | None = None
        try:
            for repeat in range(self.max_attempts):
                reply = Reply(*await self.client.complete(messages, question=question, seed=repeat, tally=tally))
                # Every reply of a client passes here, and the store must hold it, also with lone surrogates or with
                # token counts that cannot be true. Errors become printable in `_record`.
                answer, tokens = storable(reply.text), reply.usage.possible
                if tokens != reply.usage:
                    warn_of_counts(tally.server)
                elif tally.server:
                    warn_of_odd_count(tally.server, tokens.prompt, max(len(reply.samples), 1), messages)
                tally.spent += tokens
                if self.on_spent:  # at once, since a kill must not give these tokens away
                    self.on_spent(tokens)
                try:
                    verdict = question.read_reply(reply._replace(text=answer))
                except VerdictError as fault:
                    tally.malformed += 1
                    note = reply.note or (CUT_OFF if reply.cut_off else "")
                    error = f"{fault}; {note}" if note else str(fault)
                    if isinstance(fault, ProbabilityError) or reply.final:  # the answer would be the same
                        break
                    if not question.afresh:  # with the fault named, a deterministic judge can answer differently
                        messages = [
                            *opening,
                            {"role": "assistant", "content": defuse(answer.strip()[:REPEATED]) or "(no answer)"},
                            {"role": "user", "content": REPEAT.format(error=defuse(str(fault)[:REPEATED]))},
                        ]
                else:
                    outcome, error, usage = "parsed", "", tokens
                    break
        except TransportError as fault:
            outcome, error, transport_error = "unreachable", str(fault), fault
        except asyncio.CancelledError:
            if tally.attempts:  # else it was still waiting for its turn, and nothing was sent
                self._record(question, "cancelled", usage, tally, error, answer)
            raise
        call = self._record(question, outcome, usage, tally, error, answer, transport_error)
        if self.on_call is not None:
            self.on_call(call)
        return verdict, call

    def _record(
        self,
        question: Askable,
        outcome: str,
        usage: Usage,
        tally: Tally,
        error: str,
        answer: str,
        transport_error: TransportError | None = None,
    ) -> Call:
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
            error=error and printable(error),
            malformed=tally.malformed,
            answer=answer[:ANSWER_KEPT],
            status=transport_error.status if transport_error else None,
            passing=transport_error is not None and transport_error.passing,
        )
        self.calls.append(call)
        return call

    async def ask_all(self, questions: Iterable[Askable]) -> list[Any | None]:
        """Put all questions at once, in this order, and return their verdicts."""
        async with asyncio.TaskGroup() as tasks:  # when one ends in an exception, the others are cancelled
            pending = [tasks.create_task(self.ask(question)) for question in questions]
        return [task.result() for task in pending]

    def drain(self) -> list[Call]:
        """Return and forget the calls so far."""
        calls, self.calls = self.calls, []
        return sorted(  # so that the order does not depend on which answer came first
            calls, key=lambda c: (c.query_id, c.kind, c.outcome, c.usage, c.spent, c.attempts, c.server, c.error)
        )

    async def first_question(self, question: Askable, timeout: float | None = None) -> tuple[Any, Call]:
        """Ask one real question before anything is started, and return its verdict and its call.

        Args:
            timeout (`float`, *optional*):
                Seconds in all, at most `FIRST_QUESTION_SECONDS`, which is the default.

        Raises:
            [`JudgeError`]: naming the endpoint, the cause and what to do.
        """
        seconds = min(timeout or FIRST_QUESTION_SECONDS, FIRST_QUESTION_SECONDS)
        try:
            async with asyncio.timeout(seconds):
                # In a ledger of its own: no step has it.
                verdict, call = await self.for_method().ask_with_cost(question)
        except TimeoutError:
            raise JudgeError(
                f"the judge ({self.client.name}) did not answer its first question within {seconds:g} s, so nothing"
                " was started. Does the server generate? Does a proxy keep the connection open without an answer?"
            ) from None
        if call.failed:
            raise JudgeError(
                f"the judge ({self.client.name}) failed its first question, about query {question.query_id!r}, so"
                f" nothing was started. {explain(call)}",
                passing=call.passing,
            )
        return verdict, call


@cache
def warn_of_counts(server: str) -> None:
    """Say once per server that its token counts cannot be true."""
    logger.warning("the judge server %s reports token counts that cannot be true; they count as 0", server)


def warn_of_odd_count(server: str, tokens: int, samples: int, messages: Sequence[Mapping[str, str]]) -> None:
    """Say once per server that a prompt can hardly have so many tokens, counted once or for each sample."""
    if server in ODD:
        return
    text = "".join(message["content"] for message in messages)
    # A token has at least one byte.
    least, most = len(text) / MAX_TOKEN_CHARACTERS, len(text.encode("utf-8", "replace")) + MAX_TEMPLATE_TOKENS
    if not least <= tokens <= most * samples:
        ODD.add(server)
        logger.warning(
            "the judge server %s counts %s tokens for a prompt of %s characters, hardly true: %s",
            *(server, f"{tokens:,}", f"{len(text):,}"),
            "it may have cut the prompt" if tokens and tokens < least else "budgets go by it",
        )


def explain(call: Call) -> str:
    """Say how a judgment failed, what was answered, and what to do."""
    cause = f"Outcome: {call.fault}. Last cause: {call.error}."
    if call.outcome == "unreachable":
        if not call.server:
            return f"{cause} This judge asks no server: change its code or its arguments, or name one with judge_url."
        if TOO_FEW_SAMPLES in call.error:
            return f"{cause} Name another server, or set judge_samples to 1."
        if WITHHELD in call.error:
            return f"{cause} {FILTERED}"
        if call.status == 400 and TOO_LONG.search(call.error):
            return f"{cause} Prompt and answer need a longer context: {SHORTEN}."
        status = call.status or 0
        return f"{cause} {HINTS.get(status, REFUSED if 400 <= status < 500 else NAMED)}"
    cause += f" It was asked {call.attempts} times. The last answer begins: {call.answer[:300]!r}."
    # The error itself says what to do.
    if "logprobs" in call.error:
        return cause
    if WITHHELD in call.error:
        return f"{cause} {FILTERED}"
    if FREE_FORM in call.error:
        return f"{cause} Set judge_decoding to a form that it imposes, or to none."
    if CUT_OFF in call.error or ALL_THOUGHT in call.error or in_thought(call.answer):
        return (
            f"{cause} If the judge thinks first, raise judge_free_tokens, or switch thinking off with"
            ' judge_request, such as {"chat_template_kwargs": {"enable_thinking": false}}.'
        )
    return f"{cause} Is it an instruction-tuned chat model?"
