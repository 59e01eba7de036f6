"""What judges of several benchmarks answer: one JSON object."""

import json
from collections.abc import Sequence
from typing import Any

from rankbuffer_trl.judge.verdicts import VerdictError


def read_object(text: str, keys: Sequence[str]) -> dict[str, Any]:
    """The JSON object that is all of `text`, thinking before it aside.

    Args:
        text (`str`):
            A judge's answer.
        keys (`Sequence[str]`):
            What the object must have.

    Raises:
        [`VerdictError`]: if there is none, if it lacks a key, or if it holds half a character, which no file could.
    """
    try:
        verdict = json.loads(text.rpartition("</think>")[2])
        json.dumps(verdict, ensure_ascii=False).encode()
    except (ValueError, RecursionError) as error:
        raise VerdictError(f"the answer is not valid JSON: {error}") from None
    if not isinstance(verdict, dict) or not all(key in verdict for key in keys):
        raise VerdictError(f"the answer must be one JSON object with {' and '.join(f'`{key}`' for key in keys)}")
    return verdict
