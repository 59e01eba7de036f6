"""Make responses for queries that have none: sample them from a server, then let the judge order them.

The paper does not need this: Nectar has ranked responses, and the paper's bootstrap ranks rollouts in training. Here
the mean scores under the judge's token probabilities order a query's responses, or else one list, the question of the
bootstrap. Under a judge whose greedy verdicts are no better than chance, the list is such a verdict and the scores are
not. Rubrics are usually written from these responses. A query without rubrics is therefore judged by the generic ones.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import combinations
from typing import Any

from rankbuffer_trl.data import GENERIC_RUBRICS, text_fault
from rankbuffer_trl.groups import Messages, Query, Rollout
from rankbuffer_trl.judge import Question, Reading, VerdictError, answer_of, pointwise_question, ranking_question
from rankbuffer_trl.rewards import RATING_MAX

from ..batch.chat import Chat

SEED_STEP = 1000  # a repeat adds 1 to the seed and must not reach the next sample's


def sample_chats(query_id: str, prompt: Messages, n: int, request: dict[str, Any], seed: int) -> list[Chat]:
    """Ask for `n` responses to a query, each with a seed of its own. The prompt is sent unchanged."""
    return [
        Chat("sample", query_id, prompt, read_sample, request | {"seed": seed + SEED_STEP * i}, afresh=True)
        for i in range(n)
    ]


def read_sample(answer: str, cut_off: bool = False) -> dict[str, Any]:
    """Return the response in an answer, see [`read_response`], with what tells whether it is a thought."""
    # A thought that the template opens has no tag when cut off.
    return {"text": read_response(answer), "thought": answer_of(answer)[1], "cut_off": cut_off}


def read_response(answer: str) -> str:
    """Return the answer without its thinking. Raise [`VerdictError`] if nothing clean is left."""
    text, thought = answer_of(answer)
    if "<think>" in text or (answer.strip() and not text and not thought):
        raise VerdictError("the response ends inside its thinking block")
    if fault := text_fault(text):
        raise VerdictError(f"the response {fault}")
    return text


def cut_thoughts(samples: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Return which samples of one model were cut off inside a thought that has no tag.

    These are the samples that were cut off and close no thought, if any other sample closes one.
    """
    thinks = any(sample["thought"] for sample in samples.values())
    # Else a response that was cut off is kept: training, too, judges a part.
    return [name for name, sample in samples.items() if thinks and sample["cut_off"] and not sample["thought"]]


def order_question(query: Query, texts: Sequence[str]) -> Question:
    """Ask for the order of responses by index, worst to best: the question of the paper's bootstrap."""
    rollouts = [Rollout(i, text) for i, text in enumerate(texts)]
    # Rubrics are usually written from these responses.
    return ranking_question(replace(query, rubrics=query.rubrics or GENERIC_RUBRICS), rollouts, kind="bootstrap")


def score_questions(query: Query, texts: Sequence[str]) -> dict[str, Question]:
    """Ask for the score of each response by name, with probabilities: the question of `ratings_soft`."""
    scored_query = replace(query, rubrics=query.rubrics or GENERIC_RUBRICS)
    return {
        f"{query.id}/score {i}": replace(pointwise_question(scored_query, text, most=RATING_MAX), soft=True)
        for i, text in enumerate(texts)
    }


def order_by_scores(
    texts: Mapping[str, Sequence[str]], readings: Mapping[str, Reading]
) -> tuple[dict[str, list[int]], int]:
    """Return the indices of each query's responses from the lowest mean score to the highest, and the equal pairs.

    Queries whose scores are all equal have an order, that of sampling, only if they are the smaller part.
    """
    means = {name: reading.mean for name, reading in readings.items()}
    names = {query_id: [f"{query_id}/score {i}" for i in range(len(of))] for query_id, of in texts.items()}
    # No order if a score is not known.
    scored = {query_id: [means[name] for name in of] for query_id, of in names.items() if means.keys() >= set(of)}
    tell = {query_id: of for query_id, of in scored.items() if len(set(of)) > 1}
    if 2 * len(tell) > len(scored):  # else the judge tells no responses apart
        tell = scored
    tied = sum(a == b for of in tell.values() for a, b in combinations(of, 2))
    return {query_id: sorted(range(len(of)), key=of.__getitem__) for query_id, of in tell.items()}, tied


def orders_as_shown(orders: Iterable[Sequence[int]]) -> int:
    """Count the lists that name them in the order shown, or the other way round."""
    # Shorter lists come so by chance.
    return sum(len(of) > 3 and [*of] in (sorted(of), sorted(of, reverse=True)) for of in orders)
