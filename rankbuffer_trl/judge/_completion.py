"""Read what a server sends for a chat: the answer, and what the server says about that answer.

Servers and gateways say the same few things in many words: the answer is whole, cut off, withheld, all thinking, or
there is an error in its place. Everything else here knows these five things alone.
"""

import json
import re
from typing import Any

from ._ledger import Reply, Usage

FINISHED = re.compile(
    r"(.*[_ ])?(stop|eos|end\w*|completed?|finished|done|tool_?calls?|tool_use|function_call)([_ ].*)?", re.I
)
LIMIT = re.compile("length|max|limit|context|truncat", re.I)
ABRUPT = re.compile("unexpected|premature|early|incomplete", re.I)
FILTER = re.compile("filter|safety|refus|sensitive|prohibit|block|recitation|spii|guardrail|toxic|moderation", re.I)
TOO_LONG = re.compile(r"context.{0,9}(length|size|window)|too long|exceeds the maximum", re.I)  # words of a 400
# Words of a 400 or 403 that withholds an answer. An account can be flagged, too.
FLAGGED = re.compile(r"content.?(filter|management policy)|(input|prompt|content) was flagged|moderation", re.I)
STATUSES = (  # what an error without a number is, by its own words
    (402, re.compile(r"insufficient.?(quota|balance|funds|credit)|billing|payment", re.I)),
    (401, re.compile(r"invalid.?api.?key|unauthori[sz]ed|authentication", re.I)),
    (429, re.compile(r"rate.?limit|too.?many.?requests|resource.?exhausted|throttl|\bqps\b", re.I)),
    (500, re.compile(r"^error$|abort|cancel|insufficient.?system|network|overload|unavailable|capacity", re.I)),
    (500, re.compile(r"internal|server.?error|upstream|gateway|time.?out|timed.?out|try.?again|^load$|loading", re.I)),
)
CODES = ("code", "status_code", "status", "type", "error_type")
WORDS = ("message", "msg", "status_msg", "detail")
REASONING_FIELDS = ("reasoning_content", "reasoning", "reasoning_details", "thinking", "thinking_blocks")

CUT_OFF = "the answer was cut off at its token limit"
ALL_THOUGHT = "the whole answer went into its thinking"
WITHHELD = "the server withheld its answer"
FREE_FORM = "this server does not impose the form"


def read_completion(body: Any, limit: Any = None) -> Reply:
    """Read a chat completion, with all of its choices.

    Args:
        limit (`int`, *optional*):
            The most tokens that each answer might have.

    Raises:
        `TypeError`, `LookupError`, `AttributeError`: if it is none.
    """
    choices, usage = body["choices"], read_usage(body.get("usage"))
    allowed = limit * len(choices) if type(limit) is int else float("inf")  # some servers do not say why they ended
    first, *further = [read_choice(choice, usage.possible.completion, allowed) for choice in choices]
    samples = (first, *further) if further else ()
    return first._replace(usage=usage, logprobs=choices[0].get("logprobs"), samples=samples)


def read_choice(choice: Any, tokens: int, allowed: float) -> Reply:
    """Read one choice, without its usage. Of all choices together, `tokens` came, and `allowed` were allowed."""
    reason, message = reason_of(choice), choice.get("message") or choice.get("delta")  # some name it as in a stream
    if message is None and not reason:
        raise LookupError("a choice without a message")
    message = message or {}
    content = message.get("content")
    parts = content if isinstance(content, list) else []
    text = None if isinstance(content, list) else content
    if parts:  # as some servers send it; the texts count
        text = "".join(part["text"] for part in parts if part["type"] in ("text", "output_text"))
    if not isinstance(text, str | None):
        raise TypeError(f"the content is a {type(text).__name__}")
    empty = not (text or "").strip()
    refusals = [message.get("refusal"), *(part.get("refusal") for part in parts)]
    refusal = next((text for text in refusals if isinstance(text, str) and text), "")
    final = bool(FILTER.search(reason) or (empty and refusal))
    # Some servers say "stop" at the limit. One that counts more tokens than were allowed does not keep to the limit.
    cut_off = not finished(reason) or tokens == allowed if reason else tokens >= allowed
    note = ""
    if final:
        note = f"{WITHHELD}: {refusal or reason}"
    elif empty and (parts or any(message.get(name) for name in REASONING_FIELDS)):
        note = ALL_THOUGHT
    elif cut_off and (not reason or finished(reason) or LIMIT.search(reason)):
        note = CUT_OFF
    elif reason and (cut_off or empty) and reason.lower() != "stop":
        note = f"the server says {reason!r}"
    return Reply(text or "", Usage(), cut_off, note=note, final=final)


def reason_of(choice: dict) -> str:
    """Return why a choice ended, in the server's word; empty if it does not say."""
    reasons = [choice.get(name) for name in ("finish_reason", "native_finish_reason", "done_reason")]
    texts = [str(each.get("type", "") if isinstance(each, dict) else each) for each in reasons if each]  # SGLang's
    # A gateway that says "stop" may pass on, in another field, that the model's server cut off or withheld the answer.
    odd = [each for each in texts if LIMIT.search(each) or FILTER.search(each)]
    return next(iter(odd + texts), "")


def finished(reason: str) -> bool:
    """Say whether a reason stands for an answer that is whole."""
    return bool(FINISHED.fullmatch(reason)) and not LIMIT.search(reason) and not ABRUPT.search(reason)


def read_usage(usage: Any) -> Usage:
    """Read the token counts of an answer as they are."""
    usage = usage if isinstance(usage, dict) else {}  # an odd count is no reason to lose an answer that is paid for
    details = usage.get("prompt_tokens_details")
    cached = details.get("cached_tokens") if isinstance(details, dict) else 0
    prompt, completion, total = (
        whole(usage.get(f"{one}_tokens") or usage.get(f"{other}_tokens") or 0)
        for one, other in (("prompt", "input"), ("completion", "output"), ("total", "total"))
    )
    cached, counts = whole(cached or 0), Usage(prompt, total, completion)
    if counts == counts.possible and Usage(cached).possible == Usage(cached):
        prompt += cached if cached > prompt else 0  # some count them apart
        completion = max(completion, total - prompt)  # some gateways leave a thought out of the completion
    return Usage(prompt, cached, completion)


def whole(count: Any) -> Any:
    """Return a count of tokens as an integer, if it is a whole number in another type, else as it is."""
    return int(count) if isinstance(count, float) and count.is_integer() else count


def fault_in_content(content: bytes) -> tuple[int, str] | None:
    """Return what [`fault_in`] says of a body as it came."""
    try:
        return fault_in(json.loads(content))
    except json.JSONDecodeError as error:
        # A body that ends too early is a fault that may pass.
        half = error.msg.startswith("Unterminated") or error.pos >= len(error.doc.rstrip())
        return (500, "it ends too early") if half else None
    except (ValueError, RecursionError):
        return None


def fault_in(body: Any) -> tuple[int, str] | None:
    """Return the HTTP status that an error in place of an answer stands for, and the server's words.

    Gateways have begun to answer, with status 200, before the model's server fails.
    """
    body = first_of(body)
    if not isinstance(body, dict):
        return None
    choices = body.get("choices")
    for choice in choices if isinstance(choices, list) else ():
        if isinstance(choice, dict):
            reason = reason_of(choice)
            broken = not finished(reason) and not FILTER.search(reason) and status_of(reason) >= 429
            if error := choice.get("error") or (reason if broken else None):
                return status_of(error), words_of(error)
    error = body.get("error") or first_of(body.get("errors")) or (None if choices else body.get("base_resp"))
    if not error and not choices and words_of(body):
        error = body
    if error:
        return status_of(error), words_of(error)
    return (500, "it has no choices") if "choices" in body and choices in (None, []) else None


def status_of(error: Any) -> int:
    """Return the HTTP status that an error stands for by its number or its words."""
    codes = [str(error.get(name)) for name in CODES] if isinstance(error, dict) else []
    for code in codes:
        if re.fullmatch("[45][0-9]{2}", code):
            return int(code)
    texts = [*codes, words_of(error)]
    return next((status for status, words in STATUSES if any(map(words.search, texts))), 400)  # 400 is final


def words_of(error: Any) -> str:
    """Return a server's own words of an error, with those of the server behind a gateway."""
    error = first_of(error)
    if not isinstance(error, dict):
        return error if isinstance(error, str) else ""
    if inner := error.get("error") or error.get("errors"):
        return words_of(inner)
    behind = error.get("metadata")
    texts = [*(first_of(error.get(name)) for name in WORDS), behind.get("raw") if isinstance(behind, dict) else None]
    return ": ".join(filter(None, (text if isinstance(text, str) else words_of(text) for text in texts)))


def first_of(body: Any) -> Any:
    """Return the one item of a list, or else the body itself."""
    return body[0] if isinstance(body, list) and len(body) == 1 else body  # Gemini sends an error as a list
