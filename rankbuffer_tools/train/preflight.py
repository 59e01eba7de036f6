"""Before a run: is every judge server there, does its context hold the prompts, and what will the run cost?

The preflight reaches every server, checks model and context length, and asks one real question. Then it asks as many
other real questions at once as training does, eight at least, and estimates the cost of the run from them. Its calls
enter no ledger. It prints their cost. If the run starts after it, they count as spent.
"""

import asyncio
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

from rankbuffer_trl.errors import SettingsError
from rankbuffer_trl.groups import Query
from rankbuffer_trl.judge import (
    LONGEST_QUOTED,
    Askable,
    Call,
    Judge,
    JudgeError,
    Question,
    Reading,
    Totals,
    Usage,
    explain,
    printable,
)
from rankbuffer_trl.judge.config import OpenAIClient
from rankbuffer_trl.rewards import RewardMethod, first_questions
from rankbuffer_trl.store import LIVE_STORE, BufferStore
from rankbuffer_trl.training import RankBufferConfig, RunPlan, stand_in

from ..batch.server_check import CHARACTERS_PER_TOKEN, check_servers, context_for, longest_need, longest_of, servers_of
from .price import RunPrice

MIN_PILOT_QUESTIONS = 8  # fewer do not tell the cost of a run
STAND_INS = " (the data set has no responses, so its rubrics and made-up sentences stand for rollouts)"
SURE = 1 - 1e-6  # the probability of a verdict that has no doubt
MASKED = 1e-4  # on no valid answer: above it, a server reports probabilities before its grammar


async def preflight(plan: RunPlan, on_spent: Callable[[Usage], None] | None = None) -> list[str]:
    """Check the judge and the reference judge of a run, and return lines for people with what they cost.

    Args:
        on_spent (`Callable[[Usage], None]`, *optional*):
            Called with the tokens of every reply.

    Raises:
        [`JudgeError`]: if a server cannot be reached, does not serve the model, cannot hold a prompt that is certain
        to come, or fails more questions than `judge_max_failures` allows.
    """
    args, configured = plan.args, plan.args.judge()
    judge = Judge(configured.client, configured.max_attempts, configured.guard, on_spent=on_spent)
    judges = {"judge": judge} | (
        {"reference judge": reference_judge} if (reference_judge := args.make_reference_judge()) else {}
    )
    lines, price = [], RunPrice(plan)
    try:
        servers = servers_of(judge)
        # The embedded judge has no context to check.
        longest = longest_of(price.first_questions, judge.guard) if any(map(servers_of, judges.values())) else []
        contexts = {}
        for role, each in judges.items():
            contexts[role] = await check_servers(each, longest)
            for client, context in zip(servers_of(each), contexts[role], strict=True):
                lines.append(f"{role}: {client.name}" + (f", context {context:,} tokens" if context else ""))
        if servers:
            context = min(filter(None, contexts["judge"]), default=None)
            if context and (args.judge_context or 0) > context:
                raise JudgeError(
                    f"judge_context={args.judge_context} is more than the judge's context of {context:,} tokens, so"
                    f" buffers would outgrow it: set {context} (JUDGE_CONTEXT of the launch scripts), or serve a"
                    " larger one",
                    passing=False,
                )
            shown = await asyncio.to_thread(price.most_shown)  # it has an event loop of its own
            lines += await check_judge_context(servers[0], context, judge.guard, plan, longest, shown)
        question = price.first_questions[0]
        firsts, probability_lines = await ask_first(judge, question, args.judge_step_timeout)
        lines += probability_lines
        if args.preflight_only:
            # Not for a run: no data set gets into a log so.
            lines += shown_whole(question.chat(judge.guard), firsts[0], "" if price.written else STAND_INS)
        pilot, verdicts, sample, seconds = await ask_sample(judge, price)
    finally:
        for each in judges.values():
            await each.client.close()
    readings = [each for each in verdicts if isinstance(each, Reading)]
    # A cache of answers would make each verdict certain.
    if args.judge_samples > 1 and all_copies(readings, args):
        lines.append(
            f"warning: no question of a sample of {len(readings)} had two different answers of {args.judge_samples}."
            " A server that gives copies of one answer makes each verdict certain: look at its cache and temperature"
        )
    if (
        servers
        and price.written
        and len(readings) >= MIN_PILOT_QUESTIONS
        and all(max(r.chances.values()) > SURE for r in readings)
    ):
        lines.append(
            f"warning: the judge is sure of each of {len(readings)} verdicts, so its probabilities say no more than"
            " words. Some servers report them after the temperature, which is 0: take vLLM, or set judge_samples to 5"
        )
    if len(verdicts) >= MIN_PILOT_QUESTIONS and price.written and (same := same_verdict(verdicts)):
        lines.append(
            f"warning: each of the {len(verdicts)} questions of a sample has the same verdict, {same}. A judge"
            " that always answers so teaches nothing: look at a prompt and its answer by --preflight_only true"
        )
    totals, cost = Totals.of(sample), Totals.of([*firsts, *sample])
    cached = totals.cached_tokens / max(totals.prompt_tokens, 1)
    lines.append(
        f"sample: {len(sample)} judgments in {seconds:.1f} s, {totals.prompt_tokens / max(totals.calls, 1):,.0f}"
        f" prompt tokens each ({cached:.0%} cached), {totals.failures} failed, {totals.attempts - len(sample)} asked"
        f" again; this check cost {cost.spent_tokens:,} tokens"
    )
    if not totals.spent_tokens:
        lines.append("the judge server reports no token counts, so those below are estimated by characters")
        if args.has_budget:
            raise SettingsError("the judge server reports no token counts, so a budget cannot end the run: unset it")
    if totals.failures and totals.failures / len(sample) > args.judge_max_failures:
        failed_call = next(call for call in sample if call.failed)
        raise JudgeError(
            f"the judge ({judge.client.name}) failed {totals.failures} of {len(sample)} questions of a sample, more"
            f" than judge_max_failures={args.judge_max_failures:g} allows. {explain(failed_call)}",
            passing=failed_call.passing,
        )
    return [*lines, *await asyncio.to_thread(price.cost, pilot, totals, seconds), *price.few_steps()]  # so has this


async def ask_first(judge: Judge, question: Question, timeout: float | None) -> tuple[list[Call], list[str]]:
    """Ask the first question of all. Return the calls, and a line for each server whose probabilities were read."""
    clients = servers_of(judge) if question.soft else []  # each server for itself, since its probabilities are read
    judges = [Judge(client, judge.max_attempts, judge.guard, on_spent=judge.on_spent) for client in clients] or [judge]
    answers = [await one_judge.first_question(question, timeout) for one_judge in judges]
    readings = [reading for reading, _ in answers] if clients else []
    lines = [probabilities(client, reading) for client, reading in zip(clients, readings, strict=True)]
    return [call for _, call in answers], lines


def probabilities(client: OpenAIClient, reading: Reading) -> str:
    """Say whether a server reports probabilities before its grammar."""
    if client.samples > 1:
        return f"probabilities: {client.name} gives {client.samples} answers to each question, whose shares are read"
    # A judge that is sure does not tell.
    before = " before its grammar" if client.decoding != "none" and reading.outside > MASKED else ""
    return f"probabilities: {client.name} reports them{before}, {reading.outside:.1%} on no valid answer"


def shown_whole(messages: Sequence[Mapping[str, str]], first: Call, about: str = "") -> list[str]:
    """Return the lines of a whole prompt and of its answer."""
    prompt = [line for message in messages for line in message["content"].splitlines()]
    answer = first.answer.splitlines() or ["(empty)"]
    quoted = [f"  | {printable(line)}" for line in answer]
    return [f"the first prompt{about}:", *(f"  | {printable(line)}" for line in prompt), "its answer:", *quoted]


async def check_judge_context(
    client: OpenAIClient, context: int | None, guard: bool, plan: RunPlan, longest: Sequence[Askable], shown: int
) -> list[str]:
    """Say how long the questions of first visits are, and estimate later prompts, which may show `shown` responses.

    Raises:
        [`JudgeError`]: if a later prompt of a method that `shows_whole_groups` is too long and shows a whole group.
    """
    method, G, length = plan.method, plan.args.num_generations, plan.args.max_completion_length
    need = await longest_need(client, longest, guard)
    assert need is not None, "every method asks something first"
    count = f"{'' if need.exact else 'about '}{need.prompt:,}"
    lines = [f"longest prompt of a first visit: {count} tokens (query {need.query_id!r})"]
    frame = await longest_need(client, [without_responses(method, plan.queries[need.query_id], G)], guard)
    assert frame is not None, "one question was passed"
    # Each of them as long as `max_completion_length` allows.
    later = context_for(frame.prompt, need.answer, shown * length, guard)
    if context and later > context:
        # All its prompts are as long, so a whole group is lost.
        if getattr(method, "shows_whole_groups", False) and shown >= G:
            raise JudgeError(
                f"the judge's context of {context:,} tokens is too short for method {method.name!r}: a prompt shows"
                f" all {G} rollouts of a group, and it and its answer may need about {later:,} tokens if rollouts use"
                f" all of max_completion_length={length}. A group that does not fit would have no rewards. Serve the"
                f" judge with --max-model-len {later} (llama.cpp: --ctx-size) or more, or set a smaller"
                " max_completion_length or num_generations",
                passing=False,
            )
        lines.append(
            f"a later prompt may show {shown} responses; it and its answer may need about {later:,} tokens if rollouts"
            f" use all of max_completion_length={length}; what does not fit into {context:,} fails and stays unscored"
        )
    if length * CHARACTERS_PER_TOKEN > LONGEST_QUOTED:
        lines.append(
            f"a prompt shows {LONGEST_QUOTED:,} characters of a response at most; with max_completion_length={length}"
            " a rollout may have more, and the rest is cut"
        )
    return lines


def without_responses(method: RewardMethod, query: Query, G: int) -> Question:
    """Return the first question about a query with every response replaced by an empty text."""
    question = first_questions(method, stand_in(query, G))[0]
    empty = {name: [(heading, "") for heading, _ in pairs] for name, pairs in question.responses.items()}
    return replace(question, responses=empty)


def all_copies(readings: Sequence[Reading], args: RankBufferConfig) -> bool:
    """Return whether each reading is of equal answers."""
    counts = [round(args.judge_samples * (1 - reading.outside)) for reading in readings]
    pairs = zip(readings, counts, strict=True)
    # `read_samples` spreads one answer in all evenly.
    return bool(readings) and all(max(reading.chances.values()) * (count + 1) > count for reading, count in pairs)


def same_verdict(verdicts: Sequence[Any | None]) -> str | None:
    """Return the verdict of all questions if they have one in common, with equal probabilities if these are read."""
    first = verdicts[0]
    value = first.value if isinstance(first, Reading) else first
    # A list that is shown in the order of the data set has one right order for all.
    if value is None or isinstance(value, list | tuple) or any(verdict != first for verdict in verdicts):
        return None
    return repr(value)


async def ask_sample(judge: Judge, price: RunPrice) -> tuple[list[Question], list[Any | None], list[Call], float]:
    """Ask a sample of questions. Return them, their verdicts, calls and wall seconds.

    Raises:
        [`JudgeError`]: if they take longer than `judge_step_timeout`.
    """
    args = price.plan.args
    in_flight = args.judge_concurrency * max(len(servers_of(judge)), 1)
    # As many as can be in flight, as in training.
    pilot = list(islice(distinct_questions(price), max(in_flight, MIN_PILOT_QUESTIONS)))
    started = time.perf_counter()
    try:
        async with asyncio.timeout(args.judge_step_timeout):
            verdicts = await judge.ask_all(pilot)
    except TimeoutError:
        answered = sum(call.outcome == "parsed" for call in judge.drain())
        raise JudgeError(
            f"the judge ({judge.client.name}) did not finish a sample within judge_step_timeout="
            f"{args.judge_step_timeout:g} s: {answered} of {len(pilot)} questions were answered, so nothing was"
            " started"
        ) from None
    return pilot, verdicts, judge.drain(), time.perf_counter() - started


def distinct_questions(price: RunPrice) -> Iterator[Question]:
    """Yield the first questions of a run, each prompt once."""
    first = price.first_questions[0]
    seen = {first.prompt()}
    for question in price.first_questions:
        prompt = question.prompt()
        if prompt not in seen:
            seen.add(prompt)
            yield question
    yield first  # last: it was asked before, and a cache would answer too fast


def report(plan: RunPlan) -> None:
    """Run [`preflight`] and print its lines."""
    if plan.args.only_checks:
        lines = asyncio.run(preflight(plan))
    else:
        with closing(BufferStore(Path(plan.args.output_dir) / LIVE_STORE)) as store:
            lines = asyncio.run(preflight(plan, store.spend))  # the run starts, so its budget counts these tokens
    for line in lines:
        print(f"[preflight] {line}")
