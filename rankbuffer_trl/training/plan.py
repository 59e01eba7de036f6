"""The plan of a run: what follows from settings and data. Dry run, preflight, trainer and model card read it."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean

from datasets import Dataset

from ..data.queries import QueryTable
from ..judge import Question, Totals
from ..judge.ledger import duration, short
from ..judge.reach import estimate_tokens
from ..rewards.functions import load_functions
from ..rewards.listen import first_questions
from ..rewards.method import RewardMethod
from ..rewards.must import count_calls
from .batches import Batches
from .config import RankBufferConfig
from .scorer import stand_in


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

    def first_questions(self) -> Iterator[Question]:
        """Yield the questions of the first visits, with reference responses in the place of rollouts."""
        for query_id in self.queries.ids:
            yield from first_questions(self.method, stand_in(self.queries[query_id], self.args.num_generations))

    def judgments(self) -> tuple[int, int, int]:
        """Return the number of groups after step `done`, and how many judgments they take at least and at most.

        What a method may ask about a group is averaged over the queries.
        """
        G, per_generation = self.args.num_generations, self.args.queries_per_generation
        before = self.batches.generations_until(min(self.done, self.batches.steps)) * per_generation
        groups = self.batches.generations * per_generation - before
        firsts = min(groups, max(len(self.queries) - before, 0))
        stand_ins = [stand_in(self.queries[query_id], G) for query_id in self.queries.ids]

        def judged(end: int) -> int:
            first, later = (
                fmean(count_calls(self.method, group, first)[end] for group in stand_ins) for first in (True, False)
            )
            return round(firsts * first + (groups - firsts) * later)

        return groups, judged(0), judged(1)

    def cost(self, sample: Totals, seconds: float | None = None) -> list[str]:
        """Multiply the cost of a sample of judgments by those of the run.

        Args:
            sample (`Totals`):
                What the sample cost.
            seconds (`float`, *optional*):
                Wall time of the sample, if it was asked.

        Returns:
            `list[str]`: lines for people.
        """
        groups, *calls = self.judgments()
        asked = max(sample.calls + sample.failures, 1)
        price = self.args.endpoint().price(sample)
        which = f"the rest of the run, from step {self.done}" if self.done else "the run"
        parts = [
            f"{which}: {groups:,} groups of {self.args.num_generations} rollouts",
            f"{between([f'{n:,}' for n in calls])} judgments",
            f"{between([short(n * sample.spent_tokens / asked) for n in calls])} tokens",
        ]
        if price is not None:
            parts.append(f"{between([f'{n * price / asked:,.2f}' for n in calls])} at the prices given")
        if seconds is not None:
            parts.append(f"{between([duration(n * seconds / asked) for n in calls])} of judging at this rate")
        lines = [", ".join(parts)]
        if not self.method.responses_needed:
            lines.append("the queries have no reference responses to ask about, so expect other tokens and times")
        return lines

    def estimated_cost(self) -> list[str]:
        """Estimate what the judge costs by the characters of the data, without a judge."""
        asked = list(self.first_questions())
        prompt, completion = map(round, estimate_tokens(asked, self.args.judge_guard))
        sample = Totals(calls=len(asked), spent_prompt_tokens=prompt, spent_completion_tokens=completion)
        return [*self.cost(sample), "tokens are estimated by characters; --preflight_only asks the judge"]


def between(ends: Sequence[str]) -> str:
    """Write `low to high`, or one of them if they are equal."""
    return " to ".join(dict.fromkeys(ends))
