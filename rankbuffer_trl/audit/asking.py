"""What an audit asks: every response about its known place, in the ways in which training asks."""

import asyncio
import random
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice, permutations

from rich.console import Console
from rich.progress import Progress

from ..groups import Query, Rollout
from ..judge import (
    Asked,
    ChatClient,
    Judge,
    Question,
    Reply,
    Tally,
    VerdictError,
    insertion_question,
    ranking_question,
)

Ordering = tuple[int, ...]
Pairs = Mapping[tuple[int, int], int | None]


@dataclass(frozen=True)
class Answers:
    """The verdicts about one query. Its `n` responses go by their place in the data set, 0 for the worst.

    Args:
        query_id (`str`):
            The query.
        n (`int`):
            How many responses it has.
        inserted (`Sequence[int | None]`):
            Position in 0..n of each response among all, itself included; `None` where there is no verdict.
        put_back (`Sequence[int | None]`):
            Position in 0..n-1 of each response among the others.
        shown (`tuple[Ordering, Ordering]`):
            Two orders in which all responses were shown for ranking.
        ranked (`Sequence[Ordering | None]`):
            The verdict on each, worst to best.
        pairs (`Pairs`, *optional*):
            The better one by (shown first, shown second); empty if pairs were not asked.
    """

    query_id: str
    n: int
    inserted: Sequence[int | None]
    put_back: Sequence[int | None]
    shown: tuple[Ordering, Ordering]
    ranked: Sequence[Ordering | None]
    pairs: Pairs = field(default_factory=dict)


def orders_shown(n: int, rng: random.Random) -> tuple[Ordering, Ordering]:
    """A random order, and the one that has the best where the first has the worst, and so on.

    The order that a judge gives by place alone then agrees with the data set's as much in the one as it disagrees in
    the other, whatever was drawn.
    """
    first = tuple(rng.sample(range(n), n))
    return first, tuple(n - 1 - i for i in first)


def questions(query: Query, shown: Sequence[Ordering], pairwise: bool) -> Iterator[Question]:
    """All that is asked about one query. Candidates are numbered as they stand, so that no number tells a thing."""

    def rank(order: Sequence[int], kind: str) -> Question:
        return ranking_question(query, [Rollout(place, texts[i]) for place, i in enumerate(order)], kind)

    texts = query.responses
    yield from (insertion_question(query, texts, text) for text in texts)
    yield from (insertion_question(query, texts[:i] + texts[i + 1 :], text) for i, text in enumerate(texts))
    yield from (rank(order, "fine") for order in shown)
    yield from (rank(pair, "pair") for pair in permutations(range(len(texts)), 2) if pairwise)


async def ask(judge: Judge, query: Query, pairwise: bool, seed: int) -> Answers:
    """Put all questions about one query."""
    n = len(query.responses)
    shown = orders_shown(n, random.Random(f"{seed} {query.id}"))
    verdicts = iter(await judge.ask_all(questions(query, shown, pairwise)))
    inserted, put_back, ranked, two = (list(islice(verdicts, count)) for count in (n, n, 2, None))
    pairs = list(permutations(range(n), 2)) if pairwise else []
    return Answers(
        query_id=query.id,
        n=n,
        inserted=inserted,
        put_back=put_back,
        shown=shown,
        ranked=[ids and tuple(order[i] for i in ids) for order, ids in zip(shown, ranked, strict=True)],
        pairs={pair: ids and pair[ids[-1]] for pair, ids in zip(pairs, two, strict=True)},
    )


class FirstAnswers:
    """Passes questions on to a chat client and counts the first answers that are not the verdict asked for.

    The ledger cannot tell: its attempts hold transport retries too.
    """

    def __init__(self, client: ChatClient):
        self.client = client
        self.name = client.name
        self.total = self.malformed = 0

    async def complete(self, messages: list[dict[str, str]], *, question: Asked, seed: int, tally: Tally) -> Reply:
        """See [`ChatClient`]."""
        reply = Reply(*await self.client.complete(messages, question=question, seed=seed, tally=tally))
        if seed == 0:
            self.total += 1
            try:
                question.read(reply.text)
            except VerdictError:
                self.malformed += 1
        return reply

    async def close(self) -> None:
        """See [`ChatClient`]."""
        await self.client.close()


async def ask_everything(judge: Judge, queries: Sequence[Query], pairwise: int, seed: int) -> list[Answers]:
    """Put all questions about all queries, with a progress bar where someone watches. Pairs of the first `pairwise`.

    Raises:
        [`JudgeError`]: if the very first question fails.
    """
    try:
        await judge.first_question(insertion_question(queries[0], queries[0].responses, queries[0].responses[0]))
        judge.client = FirstAnswers(judge.client)
        sizes = [len(query.responses) for query in queries]
        total = sum(2 * n + 2 for n in sizes) + sum(n * (n - 1) for n in sizes[:pairwise])
        with Progress(console=Console(stderr=True), disable=not sys.stderr.isatty(), transient=True) as progress:
            bar = progress.add_task("asking the judge", total=total)
            judge.on_call = lambda call: progress.advance(bar)
            async with asyncio.TaskGroup() as tasks:
                asked = [
                    tasks.create_task(ask(judge, query, place < pairwise, seed)) for place, query in enumerate(queries)
                ]
        return [task.result() for task in asked]
    finally:
        await judge.client.close()
