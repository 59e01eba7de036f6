"""The results of an evaluation: all numbers as JSON, and tables in Markdown."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from rankbuffer_tools.paper import PAPER_BENCHMARKS, average, paper_rows
from rankbuffer_trl.judge import Totals

from .benchmark import BenchmarkScores
from .metric import Interval


class ModelResult(NamedTuple):
    """The scores of one model on one benchmark, with the cost of judging and its price."""

    scores: BenchmarkScores
    cost: Totals
    price: float | None

    @property
    def headline(self) -> Interval:
        """The benchmark's main metric."""
        return self.scores.metrics()[self.scores.headline]


@dataclass(frozen=True)
class ModelComparison:
    """The difference `second` - `first` of a metric, over the prompts for which both have a judgment."""

    benchmark: str
    metric: str
    first: str
    second: str
    difference: Interval


@dataclass(frozen=True)
class EvaluationReport:
    """All results of one evaluation."""

    results: Mapping[str, Mapping[str, ModelResult]]  # by model, then by benchmark
    titles: Mapping[str, str]  # by the name of a benchmark
    judge: str  # its name
    limit: int | None = None  # if it is set, the numbers mean nothing
    paper: Sequence[str] = ()  # rows to show, see `rankbuffer_tools/paper.yaml`
    compare_with: str | None = None  # a model; the first by default
    manifest: str | None = None  # a list of files that replace official ones

    def comparisons(self) -> list[ModelComparison]:
        """Compare every metric of every other model with that of `compare_with`."""
        first = self.compare_with or next(iter(self.results))
        return [
            ModelComparison(benchmark, metric, first, second, theirs.minus(result.scores, metric))
            for second in self.results
            if second != first
            for benchmark, result in self.results[first].items()
            if benchmark in self.results[second]
            for theirs in [self.results[second][benchmark].scores]
            for metric in result.scores.rows
            if metric in theirs.rows
        ]

    def averages(self) -> dict[str, float | None]:
        """Return the paper's `Avg.` by model: the mean of the four headlines, `None` if one is missing."""
        return {
            label: average({name: result.headline.value for name, result in results.items()})
            for label, results in self.results.items()
        }

    def as_dict(self) -> dict[str, Any]:
        """Return all numbers, with `None` for NaN."""
        return without_nan(  # JSON has no NaN
            {
                "judge": self.judge,
                "limit": self.limit,
                "meaningless": self.limit is not None,
                "models": {
                    label: {name: result_as_dict(result) for name, result in by_benchmark.items()}
                    for label, by_benchmark in self.results.items()
                },
                "averages": self.averages(),
                "paper": {row: paper_rows()[row] for row in self.paper},
                "comparisons": [
                    {**vars(each), "difference": each.difference._asdict()} for each in self.comparisons()
                ],
            }
        )

    def markdown(self) -> str:
        """Return the tables."""
        parts = ["# Evaluation", f"Judge: {self.judge}. Intervals: 95 %, bootstrap over prompts."]
        if self.limit is not None:
            parts.append(f"**Smoke run with limit {self.limit}: these numbers mean nothing.**")
        if self.manifest:
            parts.append(f"**Files that `{self.manifest}` names replace official ones.**")
        parts.append(self._headlines())
        if self._paper_rows():
            parts.append(
                "The paper's rows are of its own policies, by its own judge; no row is comparable with a leaderboard."
            )
        parts += ["## All metrics", self._metrics()]
        if comparisons := self.comparisons():
            parts += [
                "## Side by side",
                "Paired over the prompts that both models have. An interval that leaves out 0 shows a difference.",
                table(
                    ("benchmark", "metric", "difference of", "", "prompts"),
                    [
                        (
                            self.titles[comparison.benchmark],
                            comparison.metric,
                            f"{comparison.second} - {comparison.first}",
                            format_interval(comparison.difference, sign=True),
                            str(comparison.difference.n),
                        )
                        for comparison in comparisons
                    ],
                ),
            ]
        parts += ["## Rows and drops", self._counts(), "## Judging", self._costs()]
        # Models of one benchmark share their notes.
        if notes := list(dict.fromkeys(note for _, _, result in self._flat() for note in result.scores.notes)):
            parts += ["## Notes", "\n".join(f"- {note}" for note in notes)]
        return "\n\n".join(parts) + "\n"

    def _flat(self) -> list[tuple[str, str, ModelResult]]:
        return [(label, name, result) for label, results in self.results.items() for name, result in results.items()]

    def _headlines(self) -> str:
        rows = []
        for label, mean in self.averages().items():
            cells = (format_interval(result.headline) for result in self.results[label].values())
            rows.append((label, *cells, "-" if mean is None else f"{mean:.2f}"))
        # The paper's mean is one of all four.
        whole = "average" if {*PAPER_BENCHMARKS} <= self.titles.keys() else None
        for row in self._paper_rows():
            numbers = paper_rows()[row]
            cells = (f"{numbers[name]:.2f}" if name in numbers else "-" for name in (*self.titles, whole))
            rows.append((f"paper: {row}", *cells))
        heads = next(iter(self.results.values())).items()
        return table(("model", *(f"{self.titles[name]}: {one.scores.headline}" for name, one in heads), "Avg."), rows)

    def _paper_rows(self) -> Sequence[str]:
        """Return the rows to show, none beside numbers that the paper has not or that mean nothing."""
        if self.limit is not None or self.titles.keys().isdisjoint(PAPER_BENCHMARKS):
            return ()
        return self.paper

    def _metrics(self) -> str:
        rows = []
        for label, name, result in self._flat():
            rows += [
                (self.titles[name], label, metric, format_interval(interval), str(interval.n))
                for metric, interval in result.scores.metrics().items()
            ]
            rows += [
                (self.titles[name], label, f"{metric} (official code)", format_score(value), "")
                for metric, value in result.scores.official.items()
            ]
        return table(("benchmark", "model", "metric", "", "prompts"), rows)

    def _counts(self) -> str:
        rows = [
            (self.titles[name], label, what, f"{count:,}")
            for label, name, result in self._flat()
            for what, count in result.scores.counts.items()
        ]
        return table(("benchmark", "model", "what", "count"), rows)

    def _costs(self) -> str:
        rows = [
            (
                self.titles[name],
                label,
                f"{cost.calls:,}",
                f"{cost.attempts:,}",
                f"{cost.spent_prompt_tokens:,}",
                f"{cost.spent_completion_tokens:,}",
                "-" if price is None else f"{price:,.2f}",
            )
            for label, name, (_, cost, price) in self._flat()
        ]
        heads = ("benchmark", "model", "answers", "requests", "prompt tokens", "completion tokens", "price")
        return table(heads, rows)


def result_as_dict(result: ModelResult) -> dict[str, Any]:
    """Return one result for JSON."""
    scores = result.scores
    return {
        "headline": scores.headline,
        "metrics": {name: interval._asdict() for name, interval in scores.metrics().items()},
        "official": dict(scores.official),
        "counts": dict(scores.counts),
        "notes": list(scores.notes),
        "rows": {metric: {id: list(row) for id, row in rows.items()} for metric, rows in scores.rows.items()},
        "judging": result.cost.as_dict() | {"price": result.price},
    }


def table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a Markdown table."""
    cells = [[cell.replace("|", "\\|") for cell in row] for row in (heads, *rows)]  # a bar would end the cell
    # Aligned, so that it reads well as plain text too.
    widths = [max(3, *map(len, column)) for column in zip(*cells, strict=True)]
    lines = ["| " + " | ".join(map(str.ljust, row, widths)) + " |" for row in cells]
    return "\n".join([lines[0], "|" + "|".join("-" * (width + 2) for width in widths) + "|", *lines[1:]])


def format_interval(interval: Interval, sign: bool = False) -> str:
    """Return an estimate with its interval, such as `30.20 [28.10, 32.40]`, or a dash if there is none."""
    if math.isnan(interval.value):
        return "-"
    value, low, high = (f"{x:+.2f}" if sign else f"{x:.2f}" for x in interval[:3])
    return value if math.isnan(interval.low) else f"{value} [{low}, {high}]"


def format_score(value: float | str) -> str:
    """Return a float with at most four decimals, and a text unchanged."""
    return value if isinstance(value, str) else f"{value:.4f}".rstrip("0").rstrip(".")


def without_nan(value: Any) -> Any:
    """Return `value` with `None` in place of NaN."""
    if isinstance(value, Mapping):
        return {key: without_nan(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [without_nan(item) for item in value]
    return None if isinstance(value, float) and math.isnan(value) else value
