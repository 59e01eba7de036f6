"""A chat in the caller's own words, which goes to a judge like any other question.

Rubric generation, sampled responses and the benchmarks have their own prompts, decoding and readers. Retries,
limits and the ledger are those of every judgment.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rankbuffer_trl.judge import Reply


@dataclass(frozen=True)
class Chat:
    """One chat to be answered.

    Args:
        kind (`str`):
            Its kind in the ledger.
        query_id (`str`):
            The query. Chats of the same query go to the same one of several servers.
        messages (`Sequence[dict[str, str]]`):
            The whole chat, with `role` and `content`.
        read (`Callable[[str, bool], Any]`):
            Turns the answer, and whether it was cut off, into a value that JSON can hold. If it raises
            [`VerdictError`], the chat is asked again.
        request (`Mapping[str, Any]`, *optional*, defaults to `{}`):
            Fields of the request, such as `temperature`, `max_tokens` or `seed`. `None` leaves a field out.
        afresh (`bool`, *optional*, defaults to `False`):
            Repeat with the same messages and the next seed, instead of a further turn that names the fault.
        read_logprobs (`Callable[[Any], Any]`, *optional*):
            Used in place of `read` for a chat whose request asks for `logprobs`. It gets them in the server's form,
            or `None` if the server returned none.
    """

    kind: str
    query_id: str
    messages: Sequence[dict[str, str]]
    read: Callable[..., Any]
    request: Mapping[str, Any] = field(default_factory=dict)
    afresh: bool = False
    read_logprobs: Callable[[Any], Any] | None = None

    def chat(self, guard: bool = False) -> list[dict[str, str]]:
        """Return the messages. `guard` changes nothing: the caller has decided how responses are quoted."""
        return list(self.messages)

    def fields(self, decoding: str, free_tokens: int) -> dict[str, Any]:
        """Return the fields of the request. The decoding of verdicts does not change them."""
        return dict(self.request)

    def read_reply(self, reply: Reply) -> Any:
        """Return the value of a reply, or raise [`VerdictError`]."""
        return self.read_logprobs(reply.logprobs) if self.read_logprobs else self.read(reply.text, reply.cut_off)
