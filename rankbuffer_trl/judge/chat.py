"""A chat in somebody else's words, put through the same seam as the judge's questions.

Rubric generation, sampled responses and the benchmarks' judging have prompts, decoding and readers of their own; their
retries, limits and costs are those of any judgment.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Chat:
    """One chat to be answered.

    Args:
        kind (`str`):
            What the ledger calls it.
        query_id (`str`):
            What it is about; chats of the same id go to the same one of several servers.
        messages (`Sequence[dict[str, str]]`):
            The whole chat, with `role` and `content`.
        read (`Callable[[str], Any]`):
            Turns the answer into a value that JSON can hold. A [`VerdictError`] has it asked again.
        request (`Mapping[str, Any]`, *optional*, defaults to `{}`):
            Fields of the request, such as `temperature`, `max_tokens` or `seed`; `None` leaves a field out.
        afresh (`bool`, *optional*, defaults to `False`):
            Ask again with the same messages and the next seed, not in a turn that names the fault.
    """

    kind: str
    query_id: str
    messages: Sequence[dict[str, str]]
    read: Callable[[str], Any]
    request: Mapping[str, Any] = field(default_factory=dict)
    afresh: bool = False

    def chat(self, guard: bool = False) -> list[dict[str, str]]:
        """The messages. There is nothing to guard: who wrote them has decided what they quote."""
        return list(self.messages)

    def fields(self, decoding: str, free_tokens: int) -> dict[str, Any]:
        """The fields of the request, which no decoding of verdicts changes."""
        return dict(self.request)
