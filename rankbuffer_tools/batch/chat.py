"""A chat in the caller's own words, which goes to a judge like any other question.

Rubric generation, sampled responses and the benchmarks have their own prompts, decoding and readers. Retries,
limits and the ledger are those of every judgment.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rankbuffer_trl.judge import Reply, VerdictError


@dataclass(frozen=True)
class Chat:
    """One chat to be answered."""

    kind: str  # in the ledger
    query_id: str  # chats of one query go to the same one of several servers
    messages: Sequence[dict[str, str]]  # the whole chat, with `role` and `content`
    read: Callable[..., Any]  # (text, cut_off) to JSON; after a `VerdictError` it is asked again
    # Such as `temperature`, `max_tokens`, `seed`; None leaves a field out.
    request: Mapping[str, Any] = field(default_factory=dict)
    afresh: bool = False  # repeat with the next seed, not a turn that names the fault
    read_logprobs: Callable[[Any], Any] | None = None  # in place of `read`; None if the server returned none
    partial: bool = False  # read the part that came of an answer that the server withheld

    def chat(self, guard: bool = False) -> list[dict[str, str]]:
        """Return the messages."""
        return list(self.messages)  # `guard` changes nothing: the caller decides on quotes

    def fields(self, decoding: str, free_tokens: int) -> dict[str, Any]:
        """Return the fields of the request."""
        return dict(self.request)  # the decoding of verdicts is not for these

    def read_reply(self, reply: Reply) -> Any:
        """Return the value of a reply, or raise [`VerdictError`]."""
        if reply.final and not self.partial:
            raise VerdictError("the answer is not whole")
        return self.read_logprobs(reply.logprobs) if self.read_logprobs else self.read(reply.text, reply.cut_off)
