"""Before a run: is every judge server there, does its context hold the prompts, and what will the run cost?

The preflight reaches every server, checks model and context length, and asks one real question. Then it asks as many
real questions at once as training does, and estimates the cost of the run from them. Its calls enter no ledger. It
prints their cost.
"""

import asyncio
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from statistics import fmean

from ..data.queries import QueryTable
from ..errors import SettingsError
from ..groups import Query
from ..judge import Call, Judge, JudgeError, Question, Totals
from ..judge.errors import printable
from ..judge.judge import explain
from ..judge.openai_client import OpenAIClient
from ..judge.reach import check_server, context_for, longest_need, servers_of
from ..rewards.method import RewardMethod
from .batches import Batches
from .config import RankBufferConfig
from .scorer import stand_in


@dataclass(frozen=True)
class Estimate:
    """The cost of judging the whole run, in pairs of (at least, at most).

    Args:
        groups (`int`):
            Groups to judge: visits of a query.
        calls (`tuple[int, int]`):
            Judgments.
        tokens (`tuple[float, float]`):
            Prompt and completion tokens of all attempts, at the sample's mean.
        seconds (`tuple[float, float]`):
            Wall time of judging, at the sample's rate.
    """

    groups: int
    calls: tuple[int, int]
    tokens: tuple[float, float]
    seconds: tuple[float, float]


async def preflight(args: RankBufferConfig, queries: QueryTable, done: int = 0) -> list[str]:
    """Check the judge of a run and estimate what it costs.

    Args:
        args (`RankBufferConfig`):
            The run's settings. With `preflight_only` the lines show a whole prompt and its answer.
        queries (`QueryTable`):
            The run's queries.
        done (`int`, *optional*, defaults to `0`):
            The step that the run resumes from. Only the steps after it are priced.

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
        question = method.first_questions(stand_in(queries[queries.ids[0]], args.num_generations))[0]
        first = await judge.first_question(question, args.judge_step_timeout)
        if args.preflight_only:
            lines += shown_whole(question.chat(judge.guard), first)
        sample, seconds = await ask_sample(judge, method, queries, args)
    finally:
        await judge.client.close()
    totals, cost = Totals.of(sample), Totals.of([first, *sample])
    cached = totals.cached_tokens / max(totals.prompt_tokens, 1)
    lines.append(
        f"sample: {len(sample)} judgments in {seconds:.1f} s, {totals.prompt_tokens / max(totals.calls, 1):,.0f}"
        f" prompt tokens each ({cached:.0%} cached), {totals.failures} failed, {totals.attempts - len(sample)} asked"
        f" again; this check cost {cost.spent_tokens:,} tokens"
    )
    if not totals.spent_tokens:
        lines.append("the judge server reports no token counts, so the cost of the run is not known")
        if args.judge_token_budget is not None or args.judge_price_budget is not None:
            raise SettingsError("the judge server reports no token counts, so a budget cannot end the run: unset it")
    if totals.failures and totals.failures / len(sample) > args.judge_max_failures:
        last = next(call for call in sample if call.failed)
        raise JudgeError(
            f"the judge ({judge.client.name}) failed {totals.failures} of {len(sample)} questions of a sample, more"
            f" than judge_max_failures={args.judge_max_failures:g} allows. {explain(last)}"
        )
    run = estimate(args, method, queries, totals, seconds, done)
    lines.append(
        f"{f'the rest of the run, from step {done}' if done else 'the run'}: {run.groups:,} groups"
        f" of {args.num_generations} rollouts,"
        f" {between(*(f'{calls:,}' for calls in run.calls))} judgments,"
        f" {between(*(f'{tokens / 1e6:,.1f} M' for tokens in run.tokens))} tokens,"
        f" {between(*map(duration, run.seconds))} of judging at this rate"
    )
    if not method.responses_needed:
        lines.append("the queries have no reference responses to ask about, so expect other tokens and times")
    return lines


def shown_whole(messages: Sequence[Mapping[str, str]], first: Call) -> list[str]:
    """Return the lines of a whole prompt and of its answer, for `--preflight_only` alone.

    A run does not print them, so that no data set gets into a log by accident.
    """
    prompt = [line for message in messages for line in message["content"].splitlines()]
    answer = first.answer.splitlines() or ["(empty)"]
    quoted = [f"  | {printable(line)}" for line in answer]
    return ["the first prompt:", *(f"  | {printable(line)}" for line in prompt), "its answer:", *quoted]


async def check_context(
    client: OpenAIClient,
    context: int | None,
    guard: bool,
    method: RewardMethod,
    queries: QueryTable,
    args: RankBufferConfig,
) -> list[str]:
    """Check that the judge's context holds every prompt that is certain to come, and estimate later prompts.

    The first visit of each query is certain, with candidates as long as its reference responses. A later prompt may
    show as many responses as the method says. Each is assumed to have `max_completion_length` tokens.

    Raises:
        [`JudgeError`]: if a certain prompt is too long, or a later one of a method that `shows_whole_groups`.
    """
    G, length = args.num_generations, args.max_completion_length
    asked = (q for id in queries.ids for q in method.first_questions(stand_in(queries[id], G)))
    need = await longest_need(client, asked, guard)
    assert need is not None, "every method asks something first"
    tokens, room = need.prompt, need.answer
    count = f"{'' if need.exact else 'about '}{tokens:,}"
    lines = [f"longest prompt of a first visit: {count} tokens (query {need.query_id!r})"]
    if need.exact and context and tokens + room > context:
        raise JudgeError(
            f"the judge's context of {context:,} tokens is too short: the first prompt of query {need.query_id!r} has"
            f" {tokens:,}, and a verdict may take {room}. Serve the judge with a longer --max-model-len, shorten the"
            " responses, or leave the query out"
        )
    frame = await longest_need(client, [without_responses(method, queries[need.query_id], G)], guard)
    assert frame is not None, "one question was passed"
    shown = method.most_shown(G)
    later = context_for(frame.prompt, room, shown * length, guard)
    if context and later > context:
        if getattr(method, "shows_whole_groups", False):
            raise JudgeError(
                f"the judge's context of {context:,} tokens is too short for method {method.name!r}: a prompt shows"
                f" all {G} rollouts of a group, and it and its answer may need about {later:,} tokens if rollouts use"
                f" all of max_completion_length={length}. A group that does not fit would have no rewards. Serve the"
                f" judge with --max-model-len {later} or more, or set a smaller max_completion_length or"
                " num_generations"
            )
        lines.append(
            f"a later prompt may show {shown} responses; it and its answer may need about {later:,} tokens if rollouts"
            f" use all of max_completion_length={length}; what does not fit into {context:,} fails and stays unscored"
        )
    return lines


def without_responses(method: RewardMethod, query: Query, G: int) -> Question:
    """Return the first question about a query with every response replaced by an empty text."""
    question = method.first_questions(stand_in(query, G))[0]
    empty = {name: [(heading, "") for heading, _ in pairs] for name, pairs in question.responses.items()}
    return replace(question, responses=empty)


async def ask_sample(
    judge: Judge, method: RewardMethod, queries: QueryTable, args: RankBufferConfig
) -> tuple[list[Call], float]:
    """Ask as many questions as can be in flight, about the first queries. Return the calls and their wall seconds.

    Raises:
        [`JudgeError`]: if they take longer than `judge_step_timeout`.
    """
    in_flight = args.judge_concurrency * max(len(servers_of(judge)), 1)
    real = (q for id in queries.ids for q in method.first_questions(stand_in(queries[id], args.num_generations)))
    started = time.perf_counter()
    try:
        async with asyncio.timeout(args.judge_step_timeout):
            await judge.ask_all(islice(real, in_flight))
    except TimeoutError:
        answered = sum(call.outcome == "parsed" for call in judge.drain())
        raise JudgeError(
            f"the judge ({judge.client.name}) did not finish a sample within judge_step_timeout="
            f"{args.judge_step_timeout:g} s: {answered} of {in_flight} questions were answered, so nothing was started"
        ) from None
    return judge.drain(), time.perf_counter() - started


def estimate(
    args: RankBufferConfig, method: RewardMethod, queries: QueryTable, sample: Totals, seconds: float, done: int
) -> Estimate:
    """Multiply a sample's cost by the judgments after step `done`, the mean over queries of what a method may ask."""
    G = args.num_generations
    batches = Batches(args, len(queries))
    before = batches.generations_until(min(done, batches.steps)) * args.queries_per_generation
    groups = batches.generations * args.queries_per_generation - before
    firsts = min(groups, max(len(queries) - before, 0))
    visits = ((firsts, True), (groups - firsts, False))
    stand_ins = [stand_in(queries[query_id], G) for query_id in queries.ids]
    low, high = (
        round(sum(count * fmean(method.calls(group, first)[end] for group in stand_ins) for count, first in visits))
        for end in (0, 1)
    )
    asked = max(sample.calls + sample.failures, 1)
    tokens, pace = sample.spent_tokens / asked, seconds / asked
    return Estimate(groups, (low, high), (low * tokens, high * tokens), (low * pace, high * pace))


def between(low: str, high: str) -> str:
    """Write `low to high`, or one of them if they are equal."""
    return low if low == high else f"{low} to {high}"


def duration(seconds: float) -> str:
    """Write seconds in the unit that people use for them."""
    if seconds < 100:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 6000 else f"{seconds / 3600:.1f} h"


def report(args: RankBufferConfig, queries: QueryTable, done: int = 0) -> None:
    """Run [`preflight`] and print its lines."""
    for line in asyncio.run(preflight(args, queries, done)):
        print(f"[preflight] {line}")
