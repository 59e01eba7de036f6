"""Responses for queries that have none: sampled from an endpoint, then put in order by one judgment.

The paper does not need this: Nectar has ranked responses, and its bootstrap ranks rollouts in training. Here a query's
responses are ranked with the bootstrap's question, so they come in the same order as the anchors of a bootstrap would.
Rubrics are usually written from these responses, so there are none yet, and the judge goes by the generic ones.
"""

from collections.abc import Sequence
from typing import Any

from ..groups import Messages, Query, Rollout, Rubric
from ..judge import Question, VerdictError, ranking_question
from ..judge.chat import Chat
from .queries import text_fault
from .rubrics import GENERIC

SEED_STEP = 1000
"""Between the seeds of two samples, so that asking one again does not repeat another."""


def sample_chats(query_id: str, prompt: Messages, n: int, request: dict[str, Any], seed: int) -> list[Chat]:
    """Ask for `n` responses to a query.

    Args:
        query_id (`str`):
            The query.
        prompt (`list[dict]`):
            Its messages, which are put as they stand.
        n (`int`):
            How many.
        request (`dict[str, Any]`):
            Decoding, such as temperature and `max_tokens`.
        seed (`int`):
            Of the first response; each has another.
    """
    return [
        Chat("sample", query_id, prompt, read_response, request | {"seed": seed + SEED_STEP * i}, afresh=True)
        for i in range(n)
    ]


def read_response(answer: str) -> str:
    """The answer without its thinking.

    Raises:
        [`VerdictError`]: if nothing is left, or it is not clean text.
    """
    text = answer.rpartition("</think>")[2].strip()
    if "<think>" in text:
        raise VerdictError("the response ends inside its thinking block")
    if fault := text_fault(text):
        raise VerdictError(f"the response {fault}")
    return text


def order_question(query_id: str, prompt: Messages, rubrics: Sequence[dict] | None, texts: Sequence[str]) -> Question:
    """Ask for the order of responses, worst to best: the paper's listwise question, as its bootstrap asks it.

    Args:
        query_id (`str`):
            The query.
        prompt (`list[dict]`):
            Its messages.
        rubrics (`Sequence[dict]`, *optional*):
            Its rubrics; the generic ones if it has none.
        texts (`Sequence[str]`):
            The responses. The verdict names them by their places.
    """
    weighted = tuple(Rubric(rubric["text"], rubric["weight"]) for rubric in rubrics or ()) or GENERIC
    rollouts = [Rollout(i, text) for i, text in enumerate(texts)]
    return ranking_question(Query(query_id, prompt, weighted), rollouts, kind="bootstrap")
