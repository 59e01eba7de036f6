"""Make responses for queries that have none: sample them from a server, then order them by one judgment.

The paper does not need this: Nectar has ranked responses, and the paper's bootstrap ranks rollouts in training. Here
the bootstrap's question ranks a query's responses, so their order is that of the anchors of a bootstrap. Rubrics are
usually written from these responses. A query without rubrics is therefore judged by the generic ones.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from rankbuffer_trl.data.queries import GENERIC, text_fault
from rankbuffer_trl.groups import Messages, Query, Rollout
from rankbuffer_trl.judge import Question, VerdictError, ranking_question

from ..jobs.chat import Chat

SEED_STEP = 1000
"""Distance between the seeds of two samples. A repeat adds 1 to the seed and must not reach the next sample's."""


def sample_chats(query_id: str, prompt: Messages, n: int, request: dict[str, Any], seed: int) -> list[Chat]:
    """Ask for `n` responses to a query.

    Args:
        query_id (`str`):
            The query.
        prompt (`list[dict]`):
            The messages of the query, which are sent unchanged.
        n (`int`):
            The number of responses.
        request (`dict[str, Any]`):
            Decoding, such as `temperature` and `max_tokens`.
        seed (`int`):
            Seed of the first response. Each response has its own.
    """
    return [
        Chat("sample", query_id, prompt, read_response, request | {"seed": seed + SEED_STEP * i}, afresh=True)
        for i in range(n)
    ]


def read_response(answer: str) -> str:
    """Return the answer without its thinking.

    Raises:
        [`VerdictError`]: if nothing is left, or the rest is not clean text.
    """
    text = answer.rpartition("</think>")[2].strip()
    if "<think>" in text:
        raise VerdictError("the response ends inside its thinking block")
    if fault := text_fault(text):
        raise VerdictError(f"the response {fault}")
    return text


def order_question(query: Query, texts: Sequence[str]) -> Question:
    """Ask for the order of responses, worst to best: the paper's listwise question, as its bootstrap asks it.

    Args:
        query (`Query`):
            The query. Without rubrics of its own, it is judged by the generic ones.
        texts (`Sequence[str]`):
            The responses. The verdict names them by their indices.
    """
    rollouts = [Rollout(i, text) for i, text in enumerate(texts)]
    return ranking_question(replace(query, rubrics=query.rubrics or GENERIC), rollouts, kind="bootstrap")
