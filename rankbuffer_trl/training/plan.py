"""The plan of a run: what follows from settings and data. Dry run, preflight, trainer and model card read it."""

import math
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from operator import mul
from pathlib import Path
from statistics import fmean

from datasets import Dataset

from ..data.queries import QueryTable
from ..groups import RolloutGroup
from ..judge import Question, Totals
from ..judge.ledger import duration, short
from ..judge.reach import CHARACTERS_PER_TOKEN, QUOTED, estimate_tokens
from ..rewards.functions import load_functions
from ..rewards.listen import first_questions
from ..rewards.method import RewardMethod
from ..rewards.must import count_calls
from .batches import Batches
from .checkpoint import spent_before
from .config import RankBufferConfig
from .rehearsal import rehearse
from .scorer import stand_in

SAMPLED = 8
"""The most queries whose visits are rehearsed. All first questions tell how much longer the other queries are."""
REHEARSED = 12
"""The most visits of a query that are rehearsed."""


@dataclass(frozen=True)
class RunPlan:
    """What a run does, made once and before anything is paid for.

    Args:
        args (`RankBufferConfig`):
            The settings.
        method ([`RewardMethod`]):
            The reward method with its arguments.
        functions (`Sequence[Callable]`):
            The reward functions that `reward_functions` names.
        weights (`Sequence[float]`):
            Their weights.
        queries (`QueryTable`):
            The queries to train on.
        eval_queries (`QueryTable`, *optional*):
            The queries to evaluate on, if the run evaluates.
        batches (`Batches`):
            The batches and steps.
        checkpoint (`str`, *optional*):
            The checkpoint to resume from.
        done (`int`, *optional*, defaults to `0`):
            The step of this checkpoint.
        faults (`dict[Path, str | None]`, *optional*):
            What is known of checkpoints, so that no file is read twice. See [`why_torn`].
    """

    args: RankBufferConfig
    method: RewardMethod
    functions: Sequence[Callable]
    weights: Sequence[float]
    queries: QueryTable
    eval_queries: QueryTable | None
    batches: Batches
    checkpoint: str | None = None
    done: int = 0
    faults: dict[Path, str | None] = field(default_factory=dict)

    @classmethod
    def of(
        cls, args: RankBufferConfig, train_dataset: Dataset | QueryTable, eval_dataset: Dataset | QueryTable | None
    ) -> "RunPlan":
        """Plan a new run. A data set is checked, and a table that is already checked is taken as it is.

        Raises:
            [`DataError`]: if a row cannot be used, or if settings and data do not fit together.
        """
        method = args.reward_method()

        def table(dataset: Dataset | QueryTable) -> QueryTable:
            return dataset if isinstance(dataset, QueryTable) else QueryTable(dataset, method.responses_needed)

        queries = table(train_dataset)
        eval_queries = None if eval_dataset is None else table(eval_dataset)
        batches = Batches(args, len(queries), None if eval_queries is None else len(eval_queries))
        return cls(args, method, *load_functions(args.reward_functions), queries, eval_queries, batches)

    @cached_property
    def written(self) -> tuple[str, ...]:
        """The responses of the first query that has some; none if the data set has none."""
        return next(filter(None, map(self.queries.written, self.queries.ids)), ())

    def stand_ins(self, every: int = 1) -> Iterator[RolloutGroup]:
        """Yield a group for one of `every` queries, with responses of the data set in the place of rollouts.

        A query without responses borrows those of another one. If the data set has none at all, texts are made up.
        """
        texts = self.written
        for query_id in self.queries.ids[::every]:
            texts = self.queries.written(query_id) or texts
            yield stand_in(self.queries[query_id], self.args.num_generations, texts)

    def first_questions(self) -> Iterator[Question]:
        """Yield the questions of the first visits, with reference responses in the place of rollouts."""
        for group in self.stand_ins():
            yield from first_questions(self.method, group)

    def judgments(self) -> tuple[int, int, int]:
        """Return the number of groups after step `done`, and how many judgments they take at least and at most.

        What a method may ask about a group is averaged over the queries.
        """
        per_generation = self.args.queries_per_generation
        before = self.batches.generations_until(min(self.done, self.batches.steps)) * per_generation
        groups = self.batches.generations * per_generation - before
        firsts = min(groups, max(len(self.queries) - before, 0))
        stand_ins = list(self.stand_ins())

        def judged(end: int) -> int:
            first, later = (
                fmean(count_calls(self.method, group, first)[end] for group in stand_ins) for first in (True, False)
            )
            return round(firsts * first + (groups - firsts) * later)

        return groups, judged(0), judged(1)

    @cached_property
    def visits(self) -> list[tuple[float, ...]]:
        """What each visit of a query asks, until they ask alike: tokens of prompts and answers, and responses shown.

        Made-up responses do not count.
        """
        epochs = math.ceil(self.batches.generations / self.batches.generations_per_epoch)
        every, guard = math.ceil(len(self.queries) / SAMPLED), self.args.judge_guard
        groups = list(self.stand_ins(every))
        first = estimate_tokens([q for group in groups for q in first_questions(self.method, group)], guard)[0]
        whole = estimate_tokens(list(self.first_questions()), guard)[0] / len(self.queries)
        visits: list[tuple[float, ...]] = []
        for asked in rehearse(self.method, groups, min(epochs, REHEARSED)):
            prompt, completion = estimate_tokens(asked, guard)
            texts = [text for question in asked for pairs in question.responses.values() for _, text in pairs]
            made_up = 0 if self.written else sum(map(len, texts)) / CHARACTERS_PER_TOKEN
            visits.append(((prompt - made_up) / first * whole, completion / len(groups), len(texts) / len(groups)))
        return visits

    def questions(self, step: int) -> list[float]:
        """Return what `visits` has, for all questions from step `done` to `step`."""
        size = self.args.queries_per_generation
        first, last = (size * self.batches.generations_until(each) for each in (min(self.done, step), step))
        starts = [number * self.batches.generations_per_epoch * size for number in range(len(self.visits))]
        spans = zip(starts, [*starts[1:], math.inf], strict=True)
        groups = [max(min(last, end) - max(first, start), 0) for start, end in spans]
        return [sum(map(mul, groups, column)) for column in zip(*self.visits, strict=True)]

    def cost(self, asked: Sequence[Question], found: Totals | None = None, seconds: float | None = None) -> list[str]:
        """Return what the rest of the run costs, in lines for people.

        Args:
            asked (`Sequence[Question]`):
                The questions of a sample, or the first questions of all queries.
            found (`Totals`, *optional*):
                What the sample cost. Without it, or without tokens in it, tokens are estimated by characters.
            seconds (`float`, *optional*):
                Wall time of the sample, if it was asked.
        """
        args, steps = self.args, self.batches.steps
        prompt, completion = estimate_tokens(asked, args.judge_guard)
        by_characters = Totals(spent_prompt_tokens=round(prompt), spent_completion_tokens=round(completion))
        sample = found if found and found.spent_tokens else by_characters
        # In place of what is made up, a rollout may have so many tokens. The guard marks its lines.
        ends = [0] if self.written else [0, args.max_completion_length * (1 + args.judge_guard / QUOTED)]

        def total(step: int, more: float) -> Totals:
            prompts, completions, shown = self.questions(step)
            tokens = prompts * sample.spent_prompt_tokens / prompt + shown * more
            cached = tokens * sample.spent_cached_tokens / max(sample.spent_prompt_tokens, 1)
            answers = completions * sample.spent_completion_tokens / completion
            counts = ("prompt", tokens), ("cached", cached), ("completion", answers)
            return Totals(**{f"spent_{name}_tokens": round(number) for name, number in counts})

        groups, *calls = self.judgments()
        totals = [total(steps, more) for more in ends]
        which = f"the rest of the run, from step {self.done}" if self.done else "the run"
        parts = [
            f"{which}: {groups:,} groups of {args.num_generations} rollouts",
            f"{between([f'{n:,}' for n in calls])} judgments",
            f"about {between([short(each.spent_tokens) for each in totals])} tokens",
        ]
        if prices := [f"{price:,.2f}" for each in totals if (price := args.endpoint().price(each)) is not None]:
            parts.append(f"about {between(prices)} at the prices given")
        if seconds is not None:
            times = [duration(seconds * each.spent_tokens / sample.spent_tokens) for each in totals]
            parts.append(f"about {between(times)} of judging at this rate")
        lines = [", ".join(parts)]
        if not self.written:
            lines.append(
                "the data set has no responses, so this is from the prompts alone to rollouts that use all of"
                f" max_completion_length={args.max_completion_length:,}"
            )
        if args.has_budget:
            spent = spent_before(args.output_dir, self.checkpoint)
            over = lambda step, more: bool(args.over_budget(spent + total(step, more)))  # noqa: E731
            at = [bisect_left(range(steps), True, self.done, key=partial(over, more=more)) for more in ends[::-1]]
            last = f"ends at about step {between([str(step) for step in at])} of {steps}"
            lines.append(f"the budget {last if at[0] < steps else 'lasts to the end of the run'}")
        return lines

    def estimated_cost(self) -> list[str]:
        """Estimate what the judge costs by the characters of the data, without a judge."""
        asked = list(self.first_questions())
        return [*self.cost(asked), "tokens are estimated by characters; --preflight_only asks the judge"]


def between(ends: Sequence[str]) -> str:
    """Write `low to high`, or one of them if they are equal."""
    return " to ".join(dict.fromkeys(ends))
