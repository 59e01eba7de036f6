"""Ask a judge about responses whose places are known, with the questions that training asks."""

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import permutations

from ..groups import Query, Rollout
from ..judge import Call, Judge, Question, ask_many, insertion_question, ranking_question

Ordering = tuple[int, ...]
Pairs = Mapping[tuple[int, int], int | None]


@dataclass(frozen=True)
class QueryVerdicts:
    """The verdicts about one query. Its `n` responses are numbered by their place in the data set, 0 for the worst.

    Args:
        query_id (`str`):
            The query.
        n (`int`):
            Number of its responses.
        inserted (`Sequence[int | None]`):
            Position in 0..n of each response among all, itself included; `None` if there is no verdict.
        put_back (`Sequence[int | None]`):
            Position in 0..n-1 of each response among the others.
        shown (`tuple[Ordering, Ordering]`):
            Two orders in which all responses were shown for ranking.
        ranked (`Sequence[Ordering | None]`):
            The verdict on each of these two, worst to best.
        pairs (`Pairs`, *optional*):
            The better response by (shown first, shown second); empty if pairs were not asked.
    """

    query_id: str
    n: int
    inserted: Sequence[int | None]
    put_back: Sequence[int | None]
    shown: tuple[Ordering, Ordering]
    ranked: Sequence[Ordering | None]
    pairs: Pairs = field(default_factory=dict)


def orders_shown(n: int, rng: random.Random) -> tuple[Ordering, Ordering]:
    """Draw a random order, and mirror it: where the first has the worst, the second has the best, and so on.

    A judge may rank by place alone. Its order then agrees with the data set's in one of the two exactly as much as it
    disagrees in the other, for every random order.
    """
    first = tuple(rng.sample(range(n), n))
    return first, tuple(n - 1 - i for i in first)


def probes(query: Query, pairwise: bool, seed: int) -> dict[tuple, Question]:
    """Make all questions about one query, by a key that starts with `insert`, `put back`, `rank` or `pair`.

    Candidates are numbered in the order shown, so that no number tells their place in the data set.
    """

    def rank(order: Sequence[int], kind: str) -> Question:
        return ranking_question(query, [Rollout(place, texts[i]) for place, i in enumerate(order)], kind)

    texts = query.responses
    n = len(texts)
    shown = orders_shown(n, random.Random(f"{seed} {query.id}"))
    asked: dict[tuple, Question] = {("insert", i): insertion_question(query, texts, texts[i]) for i in range(n)}
    asked |= {("put back", i): insertion_question(query, texts[:i] + texts[i + 1 :], texts[i]) for i in range(n)}
    asked |= {("rank", order): rank(order, "fine") for order in shown}
    asked |= {("pair", pair): rank(pair, "pair") for pair in permutations(range(n), 2) if pairwise}
    return asked


def read_verdicts(query: Query, verdicts: Mapping[tuple, object]) -> QueryVerdicts:
    """Put the verdicts on [`probes`] of one query together."""

    def of(what: str) -> dict:
        return {key[1]: verdict for key, verdict in verdicts.items() if key[0] == what}

    ranked, pairs = of("rank"), of("pair")
    first, second = ranked
    return QueryVerdicts(
        query_id=query.id,
        n=len(query.responses),
        inserted=list(of("insert").values()),
        put_back=list(of("put back").values()),
        shown=(first, second),
        ranked=[ids and tuple(order[i] for i in ids) for order, ids in ranked.items()],
        pairs={pair: ids and pair[ids[-1]] for pair, ids in pairs.items()},
    )


async def ask_everything(
    judge: Judge, queries: Sequence[Query], pairwise: int, seed: int
) -> tuple[list[QueryVerdicts], Sequence[Call]]:
    """Ask all questions about all queries, and all pairs of the first `pairwise` queries, then close the judge.

    Returns:
        `tuple[list[QueryVerdicts], Sequence[Call]]`: the verdicts by query, and what the questions cost.

    Raises:
        [`JudgeError`]: if the very first question fails.
    """
    try:
        await judge.first_question(insertion_question(queries[0], queries[0].responses, queries[0].responses[0]))
    except BaseException:
        await judge.client.close()
        raise
    asked = {query.id: probes(query, place < pairwise, seed) for place, query in enumerate(queries)}
    named = {f"{id} {key}": question for id, one in asked.items() for key, question in one.items()}
    answers = await ask_many(judge, named, None, "asking the judge")
    verdicts = [
        read_verdicts(query, {key: answers.values.get(f"{query.id} {key}") for key in asked[query.id]})
        for query in queries
    ]
    return verdicts, answers.calls
