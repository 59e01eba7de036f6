"""How the form of a verdict is imposed on a server."""

from typing import Any

from .verdicts import Verdict

DECODINGS = ("regex", "json_schema", "none")


def constrain(verdict: Verdict, decoding: str, free_tokens: int) -> dict[str, Any]:
    """Request fields that impose `verdict`, with a token limit that never cuts it off.

    A token is at least one byte of text, so the limit is the verdict's length in bytes and one for the end; where
    decoding leaves room beside the verdict, `free_tokens` come on top.
    """
    length = len(verdict.longest.encode()) + 1
    if decoding == "regex":
        return {"max_tokens": length, "structured_outputs": verdict.constraint}
    if decoding == "json_schema":
        schema = {"name": "verdict", "strict": True, "schema": verdict.schema}
        return {
            "max_tokens": length + free_tokens,
            "response_format": {"type": "json_schema", "json_schema": schema},
        }
    return {"max_tokens": length + free_tokens}
