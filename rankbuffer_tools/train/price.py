"""The price of a run before it starts: questions, tokens, money, and the step at which a budget would end it."""

import math
from bisect import bisect_left
from collections.abc import Sequence
from functools import cached_property, partial
from itertools import pairwise, product
from operator import mul
from statistics import fmean

from rankbuffer_trl.groups import RolloutGroup
from rankbuffer_trl.judge import TOKENS_PER_MARK, Question, Totals
from rankbuffer_trl.rewards import RERANK, first_questions
from rankbuffer_trl.training import RunPlan, require_questions, spent_before, stand_in

from ..batch.script import duration, short
from ..batch.server_check import CHARACTERS_PER_TOKEN, estimate_tokens
from ..data.responses import score_questions
from .rehearsal import rehearse

MAX_REHEARSED_QUERIES = 8  # all first questions tell how much longer the other queries are
GROWN = 1.2  # times as dear as the first visit the last one must be for a line about it
REHEARSED = 12  # the most visits of a query that are rehearsed
LEARNED = 36  # steps of the shortest run of ours that learned (experiments/)
MADE = 7  # responses to a prompt that the data step makes


class RunPrice:
    """What the judge of a run will be asked, and what that costs."""

    def __init__(self, plan: RunPlan):
        self.plan = plan

    @cached_property
    def written(self) -> tuple[str, ...]:
        """The responses of the first query that has some; none if the data set has none."""
        return next(filter(None, map(self.plan.queries.written, self.plan.queries.ids)), ())

    @cached_property
    def stand_ins(self) -> list[RolloutGroup]:
        """A group for each query, with responses of the data set in the place of rollouts."""
        texts, groups = self.written, []  # made-up texts if the data set has none at all
        for query_id in self.plan.queries.ids:
            texts = self.plan.queries.written(query_id) or texts  # else those of another query
            groups.append(stand_in(self.plan.queries[query_id], self.plan.args.num_generations, texts))
        return groups

    @cached_property
    def first_questions(self) -> list[Question]:
        """The questions of the first visits of all queries, in their order."""
        method = self.plan.method
        return require_questions(  # refuses a method that asks the judge nothing
            method, [question for group in self.stand_ins for question in first_questions(method, group)]
        )

    def judgments(self) -> tuple[int, int, int]:
        """Return the number of groups after step `done`, and how many judgments they take at least and at most."""
        per_generation = self.plan.args.queries_per_generation
        before = self.plan.batches.generations_until(min(self.plan.done, self.plan.batches.steps)) * per_generation
        groups = self.plan.batches.generations * per_generation - before
        # First visits have no buffer yet, and ask other questions.
        firsts = min(groups, max(len(self.plan.queries) - before, 0))

        def judged(end: int) -> int:
            # A mean over the queries.
            first, later = (
                fmean(self.plan.method.calls(group, first)[end] for group in self.stand_ins) for first in (True, False)
            )
            return round(firsts * first + (groups - firsts) * later)

        return groups, judged(0), judged(1)

    @cached_property
    def rehearsed(self) -> list[list[Question]]:
        """What some queries ask in each epoch, or in the first `REHEARSED` ones."""
        epochs = math.ceil(self.plan.batches.generations / self.plan.batches.generations_per_epoch)
        return rehearse(self.plan.method, self.sampled, min(epochs, REHEARSED))

    @property
    def sampled(self) -> list[RolloutGroup]:
        """The groups whose visits are rehearsed."""
        return self.stand_ins[:: math.ceil(len(self.plan.queries) / MAX_REHEARSED_QUERIES)]

    def most_shown(self) -> int:
        """Return the most responses in one prompt: of the rehearsed visits, or by the method if that is more."""
        counts = [sum(map(len, question.responses.values())) for visit in self.rehearsed for question in visit]
        return max(self.plan.method.most_shown(self.plan.args.num_generations), *counts)

    @cached_property
    def visits(self) -> dict[bool, list[tuple[float, ...]]]:
        """What each visit of a query asks, until they ask alike: tokens of prompts and answers, responses shown."""
        guard, groups = self.plan.args.judge_guard, self.sampled
        first = estimate_tokens([q for group in groups for q in first_questions(self.plan.method, group)], guard)[0]
        mean_first = estimate_tokens(self.first_questions, guard)[0] / len(self.plan.queries)
        visits: dict[bool, list[tuple[float, ...]]] = {False: [], True: []}
        # Doubts: the judge contradicts itself wherever it can.
        for doubts, questions in product(visits, self.rehearsed):
            # The embedded judge does so where texts are equal.
            asked = [question for question in questions if doubts or question.kind != RERANK]
            prompt, completion = estimate_tokens(asked, guard)
            texts = [text for question in asked for pairs in question.responses.values() for _, text in pairs]
            # Made-up responses do not count.
            made_up = 0 if self.written else sum(map(len, texts)) / CHARACTERS_PER_TOKEN
            visits[doubts].append(
                ((prompt - made_up) / first * mean_first, completion / len(groups), len(texts) / len(groups))
            )
        return visits

    def groups(self, step: int, reference_judge: bool = False) -> list[int]:
        """Return how many groups are scored from step `done` to `step`, by visit; later visits count with the last."""
        args, size = self.plan.args, self.plan.args.queries_per_generation
        first, last = (size * self.plan.batches.generations_until(each) for each in (min(self.plan.done, step), step))
        starts = [number * self.plan.batches.generations_per_epoch * size for number in range(len(self.visits[True]))]
        most = args.reference_groups if reference_judge else last  # it scores the first groups alone
        bounds = [min(max(each, first), last, most) for each in (*starts, last)]
        return [end - start for start, end in pairwise(bounds)]

    def cost(self, basis: Sequence[Question], usage: Totals | None = None, seconds: float | None = None) -> list[str]:
        """Return what the rest of the run costs, in lines for people.

        Args:
            basis (`Sequence[Question]`):
                The questions of a sample (which took `seconds`), or the first questions of all queries.
            usage (`Totals`, *optional*):
                What the sample cost. Without it, or without tokens in it, tokens are estimated by characters.
        """
        args, steps = self.plan.args, self.plan.batches.steps
        prompt, completion = estimate_tokens(basis, args.judge_guard)
        sampled = estimate_tokens(basis, args.judge_guard, args.judge_samples)[1]
        by_characters = Totals(spent_prompt_tokens=round(prompt), spent_completion_tokens=round(sampled))
        sample = usage if usage and usage.spent_tokens else by_characters
        # In place of what is made up, a rollout may have so many tokens. The guard marks its lines.
        longest = 0 if self.written else args.max_completion_length * (1 + args.judge_guard / TOKENS_PER_MARK)
        ends = [(0.0, False), (longest, True)]

        def part(step: int, end: tuple[float, bool], reference_judge: bool) -> Totals:
            tokens_per_response, doubts = end
            columns = zip(*self.visits[doubts], strict=True)
            prompts, completions, shown = (
                sum(map(mul, self.groups(step, reference_judge), column)) for column in columns
            )
            # Corrects the estimate by what the sample really took.
            tokens = prompts * sample.spent_prompt_tokens / prompt + shown * tokens_per_response
            cached = tokens * sample.spent_cached_tokens / max(sample.spent_prompt_tokens, 1)
            answers = completions * sample.spent_completion_tokens / completion
            counts = ("prompt", tokens), ("cached", cached), ("completion", answers)
            return Totals(**{f"spent_{name}_tokens": round(number) for name, number in counts})

        def total(step: int, end: tuple[float, bool]) -> Totals:
            judge = part(step, end, reference_judge=False)
            return judge + part(step, end, reference_judge=True) if args.reference_judge is not None else judge

        groups, *calls = self.judgments()
        totals = [total(steps, end) for end in ends]
        scope = f"the rest of the run, from step {self.plan.done}" if self.plan.done else "the run"
        parts = [
            f"{scope}: {groups:,} groups of {args.num_generations} rollouts",
            f"{between([f'{n:,}' for n in calls])} judgments",
            f"about {between([short(each.spent_tokens) for each in totals])} tokens",
        ]
        if prices := [money(p) for each in totals if (p := args.endpoint.price(each)) is not None]:
            parts.append(f"about {between(prices)} at the prices given")
        if seconds is not None:
            times = [duration(seconds * each.spent_tokens / sample.spent_tokens) for each in totals]
            parts.append(f"about {between(times)} of judging at this rate")
        lines = [", ".join(parts)]
        (at_first, *_), (at_last, *_) = self.visits[False][0], self.visits[False][-1]
        if self.written and at_last > GROWN * at_first:
            visit = len(self.visits[False])
            lines.append(
                f"visit {visit} of a query takes {at_last / at_first:.1f} times the prompt tokens of its first visit"
            )
        if args.reference_judge is not None:
            tokens = between([short(part(steps, end, reference_judge=True).spent_tokens) for end in ends])
            lines.append(
                f"the reference judge takes about {tokens} of these tokens, for {sum(self.groups(steps, True)):,}"
                " groups"
            )
        if not self.written:
            lines.append(
                "the data set has no responses, so this is from the prompts alone to rollouts that use all of"
                f" max_completion_length={args.max_completion_length:,}"
            )
        if args.has_budget:
            spent = spent_before(args.output_dir, self.plan.checkpoint)  # a budget counts earlier runs in this folder
            over = lambda step, end: bool(args.over_budget(spent + total(step, end)))  # noqa: E731
            # Cost only grows with the step.
            at = [bisect_left(range(steps), True, self.plan.done, key=partial(over, end=end)) for end in ends[::-1]]
            last = f"ends at about step {between([str(step) for step in at])} of {steps}"
            lines.append(f"the budget {last if at[0] < steps else 'lasts to the end of the run'}")
        return lines

    def estimated_cost(self) -> list[str]:
        """Estimate what the judge costs by the characters of the data, without a judge."""
        return [
            *self.cost(self.first_questions),
            "tokens are estimated by characters; --preflight_only asks the judge",
            *self.advice(),
        ]

    def few_steps(self) -> list[str]:
        """Say if this plan has too few steps to show anything."""
        steps = self.plan.batches.steps
        epochs = math.ceil(LEARNED / self.plan.batches.steps_per_epoch)
        more = f"num_train_epochs to {epochs}, or bring more prompts"
        if self.plan.args.max_steps > 0:  # it goes before num_train_epochs, and before the number of prompts
            more = f"max_steps to {LEARNED}"
        line = f"{steps} steps are few: our runs that learned took {LEARNED} or more, so set {more}"
        return [line] if steps < LEARNED else []

    def advice(self) -> list[str]:
        """Say what this plan leaves open: too few steps to show anything, no price, no responses."""
        args, lines = self.plan.args, self.few_steps()
        if args.endpoint.urls and args.endpoint.prompt_price is None:
            lines.append("for the money, add judge_prompt_price and judge_completion_price, of a million tokens")
        if not self.written:
            queries = [self.plan.queries[id] for id in self.plan.queries.ids]
            questions = [question for query in queries for question in score_questions(query, [""] * MADE).values()]
            low = estimate_tokens(questions, args.judge_guard)[0]
            high = low + 2 * MADE * len(queries) * args.max_completion_length  # scored, and shown for the rubrics
            lines.append(
                f"{MADE} responses to each prompt would narrow that range: `data` of the launch scripts makes them,"
                f" with their order and rubrics, for about {short(low)} to {short(high)} tokens of the judge"
            )
        return lines


def money(price: float) -> str:
    """Write a price with two digits at least."""
    return f"{price:,.2f}" if price >= 1 else f"{price:.2g}"


def between(ends: Sequence[str]) -> str:
    """Write `low to high`, or one of them if they are equal."""
    return " to ".join(dict.fromkeys(ends))
