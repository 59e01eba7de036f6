"""Before a run: is every judge server there, will its context hold the prompts, and what will the run cost?

Reaches every server, checks model and context length, asks one real question, then asks as many real questions as are
in flight at once in training, and multiplies. Its own calls enter no ledger; what they cost is said.
"""

import asyncio
import heapq
import math
import time
from dataclasses import dataclass
from itertools import islice
from statistics import fmean

from ..data.queries import QueryTable
from ..data.tokens import CHARACTERS_PER_TOKEN, context_for
from ..judge import Call, Judge, JudgeError, Totals
from ..judge.openai_client import OpenAIClient
from ..judge.reach import check_server, servers_of
from ..rewards.method import RewardMethod
from .batches import Batches
from .config import RankBufferConfig
from .scorer import stand_in

LONGEST = 5  # prompts that are counted exactly, since the longest text need not have the most tokens


@dataclass(frozen=True)
class Estimate:
    """What judging the whole run will take, as (at least, at most).

    Args:
        groups (`int`):
            Groups to judge: visits of a query.
        calls (`tuple[int, int]`):
            Judgments.
        tokens (`tuple[float, float]`):
            Prompt and completion tokens, at the sample's mean.
        seconds (`tuple[float, float]`):
            Wall time of judging, at the sample's rate.
    """

    groups: int
    calls: tuple[int, int]
    tokens: tuple[float, float]
    seconds: tuple[float, float]


async def preflight(args: RankBufferConfig, queries: QueryTable) -> list[str]:
    """Check the judge of a run and estimate what it costs.

    Args:
        args (`RankBufferConfig`):
            The run's settings.
        queries (`QueryTable`):
            Its queries.

    Returns:
        `list[str]`: lines for people.

    Raises:
        [`JudgeError`]: if a server cannot be reached, does not serve the model, cannot hold a prompt that is certain
        to come, or fails more questions than `judge_max_failures` allows.
    """
    method, judge = args.reward_method(), args.judge()
    lines = []
    try:
        servers = servers_of(judge)
        contexts = [await check_server(client) for client in servers]
        for client, context in zip(servers, contexts, strict=True):
            lines.append(f"judge: {client.name}" + (f", context {context:,} tokens" if context else ""))
        if servers:
            context = min(filter(None, contexts), default=None)
            lines += await check_context(servers[0], context, judge.guard, method, queries, args)
        first = stand_in(queries[queries.ids[0]], args.num_generations)
        await judge.preflight(method.first_questions(first)[0])
        sample, seconds = await ask_sample(judge, method, queries, args)
    finally:
        await judge.client.close()
    totals = Totals.of(sample)
    cached = totals.cached_tokens / max(totals.prompt_tokens, 1)
    lines.append(
        f"sample: {len(sample)} judgments in {seconds:.1f} s, {totals.prompt_tokens / max(totals.calls, 1):,.0f}"
        f" prompt tokens each ({cached:.0%} cached), {totals.failures} failed, {totals.attempts - len(sample)} asked"
        f" again; this check cost {totals.tokens:,} tokens"
    )
    if totals.failures and totals.failures / len(sample) > args.judge_max_failures:
        cause = next(call.error for call in sample if call.failed)
        raise JudgeError(
            f"the judge ({judge.client.name}) failed {totals.failures} of {len(sample)} questions of a sample, more"
            f" than judge_max_failures={args.judge_max_failures:g} allows. Last cause: {cause}"
        )
    run = estimate(args, method, queries, totals, seconds)
    lines.append(
        f"the run: {run.groups:,} groups of {args.num_generations} rollouts,"
        f" {between(*(f'{calls:,}' for calls in run.calls))} judgments,"
        f" {between(*(f'{tokens / 1e6:,.1f} M' for tokens in run.tokens))} tokens,"
        f" {between(*map(duration, run.seconds))} of judging at this rate"
    )
    if not method.responses_needed:
        lines.append("the queries have no reference responses to ask about, so expect other tokens and times")
    return lines


async def check_context(
    client: OpenAIClient,
    context: int | None,
    guard: bool,
    method: RewardMethod,
    queries: QueryTable,
    args: RankBufferConfig,
) -> list[str]:
    """Does the judge's context hold what is certain to be asked, and what may be asked later?

    Certain is the first visit of each query with candidates as long as its reference responses. Later anchors and
    candidates are rollouts of up to `max_completion_length` tokens; that many of them may stand in one prompt as there
    are anchors in a buffer twice its first size, or rollouts in a group.

    Raises:
        [`JudgeError`]: if a certain prompt is too long.
    """
    asked = (q for id in queries.ids for q in method.first_questions(stand_in(queries[id], args.num_generations)))
    longest = heapq.nlargest(LONGEST, asked, key=lambda question: len(question.prompt(guard)))
    counted = [await client.count_tokens(question.prompt(guard)) for question in longest]
    counts = [count for count in counted if count is not None]
    exact = len(counts) == len(longest)
    if not exact:
        counts = [math.ceil(len(question.prompt(guard)) / CHARACTERS_PER_TOKEN) for question in longest]
    tokens, query_id = max(zip(counts, (question.query_id for question in longest), strict=True))
    room = client.room(longest[0].verdict)
    lines = [f"longest prompt of a first visit: {'' if exact else 'about '}{tokens:,} tokens (query {query_id!r})"]
    if exact and context and tokens + room > context:
        raise JudgeError(
            f"the judge's context of {context:,} tokens is too short: the first prompt of query {query_id!r} has"
            f" {tokens:,}, and a verdict may take {room}. Serve the judge with a longer --max-model-len, shorten the"
            " responses, or leave the query out"
        )
    shown = max(2 * method.responses_needed + 1, args.num_generations) * args.max_completion_length
    later = context_for(tokens, room, shown, guard)
    if context and later > context:
        lines.append(
            f"a later prompt and its answer may need about {later:,} tokens if rollouts use all of"
            f" max_completion_length={args.max_completion_length}; what does not fit into {context:,} fails and"
            " stays unscored"
        )
    return lines


async def ask_sample(
    judge: Judge, method: RewardMethod, queries: QueryTable, args: RankBufferConfig
) -> tuple[list[Call], float]:
    """As many questions as can be in flight, of the first queries: their calls and the wall seconds they took."""
    in_flight = args.judge_concurrency * max(len(servers_of(judge)), 1)
    real = (q for id in queries.ids for q in method.first_questions(stand_in(queries[id], args.num_generations)))
    started = time.perf_counter()
    await judge.ask_all(islice(real, in_flight))
    return judge.drain(), time.perf_counter() - started


def estimate(
    args: RankBufferConfig, method: RewardMethod, queries: QueryTable, sample: Totals, seconds: float
) -> Estimate:
    """Multiply a sample's cost by the judgments of the run: the mean over queries of what the method may ask."""
    G = args.num_generations
    groups = Batches(args, len(queries)).generations * args.queries_per_generation
    firsts = min(groups, len(queries))
    visits = ((firsts, True), (groups - firsts, False))
    stand_ins = [stand_in(queries[query_id], G) for query_id in queries.ids]
    low, high = (
        round(sum(count * fmean(method.calls(group, first)[end] for group in stand_ins) for count, first in visits))
        for end in (0, 1)
    )
    asked = max(sample.calls + sample.failures, 1)
    tokens, pace = sample.tokens / asked, seconds / asked
    return Estimate(groups, (low, high), (low * tokens, high * tokens), (low * pace, high * pace))


def between(low: str, high: str) -> str:
    """`low to high`, or one where they are the same."""
    return low if low == high else f"{low} to {high}"


def duration(seconds: float) -> str:
    """Seconds as people say them."""
    if seconds < 100:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 6000 else f"{seconds / 3600:.1f} h"


def report(args: RankBufferConfig, queries: QueryTable) -> None:
    """Run [`preflight`] and print its lines."""
    for line in asyncio.run(preflight(args, queries)):
        print(f"[preflight] {line}")
