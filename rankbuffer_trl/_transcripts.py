"""What the judge sees of a rollout in which the policy called tools (`judge_view`).

In a transcript, a line that begins with `[` or `>` is ours: a heading, or a line that a tool wrote. The policy can
write neither, so it cannot pass its own words off as the result of a tool, or as a call that was never made.
"""

import json
import re
from collections.abc import Iterator, Sequence
from typing import Any

from .errors import SettingsError
from .judge._quoting import quote, visible

# With fullwidth and other forms that NFKC makes brackets of, also after characters that show a blank.
LIKE_OURS = re.compile("^(?=[\\s\u2800\U0001d159]*[\\[>\ufe47\ufe65\uff1e\uff3b])")


def view_of(view: str, messages: Sequence[dict], replies: Sequence[str], limit: int) -> str:
    """Return what the judge sees of a rollout. It is empty if the rollout has no answer.

    Args:
        view (`str`):
            `answer`, `last_reply` or `transcript`, see [`RankBufferConfig`].
        messages (`Sequence[dict]`):
            The turns of the policy and the results of tools, as TRL has them.
        replies (`Sequence[str]`):
            What the policy says in each of its turns, without its calls.
        limit (`int`):
            Characters of each result that a transcript shows.
    """
    if view == "transcript":
        return "\n".join(transcript(messages, replies, limit))
    if view == "last_reply":
        return next((reply for reply in reversed(replies) if reply), "")
    # A rollout that ends in a call or a result has no answer.
    return replies[-1] if from_policy(messages[-1]) and not messages[-1].get("tool_calls") else ""


def from_policy(message: dict) -> bool:
    """Return whether the policy wrote a message, and not a tool."""
    role = message.get("role", "assistant")
    if role not in ("assistant", "tool"):  # the judge would take its words for the policy's
        raise SettingsError(f"a rollout has a message of the role {role!r}: give it the role 'tool', or leave it out")
    return role == "assistant"


def transcript(messages: Sequence[dict], replies: Sequence[str], limit: int) -> Iterator[str]:
    """Yield the lines of a rollout: its turns, its calls, and the results."""
    number = 0
    for message in messages:
        if not from_policy(message):
            result = content_text(message.get("content"))
            yield f"[result of {json_line(message.get('name'))}]"
            yield quote(result[:limit])  # cut before it is quoted, so that the limit is one of the tool's text
            if len(result) > limit:
                yield f"[{len(result) - limit:,} more characters are left out]"
            continue
        reply, number = replies[number], number + 1
        calls = message.get("tool_calls") or ()
        if reply or calls:
            yield f"[turn {number}]"
        # The policy must not write a heading or a quote of ours.
        yield from (LIKE_OURS.sub(r"\\", visible(line)) for line in reply.splitlines())
        for call in calls:
            function = call.get("function") or call
            yield f"[call of {json_line(function.get('name'))} with {json_line(function.get('arguments'))}]"


def content_text(content: Any) -> str:
    """Return the text of a message's content."""
    if not isinstance(content, list):  # some templates take a list of texts, of images, or of what a tool found
        return content or ""
    parts = [part if isinstance(part, dict) and part.keys() & {"text", "type"} else {"text": part} for part in content]
    return "\n".join(str(part.get("text", f"({part.get('type')})")) for part in parts)


def json_line(value: Any) -> str:
    """Return a value as JSON in one line."""
    written = json.dumps(value, ensure_ascii=False, default=str)
    return " ".join(map(visible, written.splitlines()))  # the policy writes names and arguments of calls
