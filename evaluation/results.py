"""What an evaluation found: all numbers as JSON, and the tables that people read."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from rankbuffer_trl.judge import Totals

from .benchmark import Scores
from .config import BENCHMARKS
from .metric import Interval, paired_difference

PAPER = Path(__file__).with_name("paper_results.yaml")


class Result(NamedTuple):
    """One model on one benchmark."""

    scores: Scores
    cost: Totals
    price: float | None


@dataclass(frozen=True)
class Comparison:
    """How much higher `second` is than `first`, over the prompts that have a judgment of both."""

    benchmark: str
    metric: str
    first: str
    second: str
    difference: Interval


@dataclass(frozen=True)
class Report:
    """Everything of one evaluation.

    Args:
        results (`Mapping[str, Mapping[str, Result]]`):
            By model, then by benchmark.
        titles (`Mapping[str, str]`):
            Of the benchmarks.
        judge (`str`):
            The judge's name.
        limit (`int`, *optional*):
            If set, the numbers mean nothing.
        paper (`Sequence[str]`, *optional*):
            Rows of the paper to show.
        compare_with (`str`, *optional*):
            The model against which the others are compared; by default the first.
    """

    results: Mapping[str, Mapping[str, Result]]
    titles: Mapping[str, str]
    judge: str
    limit: int | None = None
    paper: Sequence[str] = ()
    compare_with: str | None = None

    def comparisons(self) -> list[Comparison]:
        """Every metric of every other model against that of `compare_with`."""
        first = self.compare_with or next(iter(self.results))
        return [
            Comparison(benchmark, metric, first, second, paired_difference(rows, theirs))
            for second in self.results
            if second != first
            for benchmark, result in self.results[first].items()
            for metric, rows in result.scores.rows.items()
            if (theirs := self.results[second][benchmark].scores.rows.get(metric)) is not None
        ]

    def as_dict(self) -> dict[str, Any]:
        """All numbers, with `None` for those that do not exist."""
        return plain(
            {
                "judge": self.judge,
                "limit": self.limit,
                "meaningless": self.limit is not None,
                "models": {
                    label: {name: as_dict(result) for name, result in by_benchmark.items()}
                    for label, by_benchmark in self.results.items()
                },
                "paper": {row: dict(zip(BENCHMARKS, paper_results()[row], strict=True)) for row in self.paper},
                "comparisons": [
                    {**vars(each), "difference": each.difference._asdict()} for each in self.comparisons()
                ],
            }
        )

    def markdown(self) -> str:
        """The tables."""
        parts = ["# Evaluation", f"Judge: {self.judge}. Intervals: 95 %, bootstrap over prompts."]
        if self.limit is not None:
            parts.append(f"**Smoke run with limit {self.limit}: these numbers mean nothing.**")
        parts += [self._headlines(), "## All metrics", self._metrics()]
        if comparisons := self.comparisons():
            parts += [
                "## Side by side",
                "Paired over the prompts that both models have; an interval without 0 is a difference.",
                table(
                    ("benchmark", "metric", "difference of", "", "prompts"),
                    [
                        (
                            self.titles[each.benchmark],
                            each.metric,
                            f"{each.second} - {each.first}",
                            shown(each.difference, sign=True),
                            str(each.difference.n),
                        )
                        for each in comparisons
                    ],
                ),
            ]
        parts += ["## Rows and drops", self._counts(), "## Judging", self._costs()]
        if notes := list(dict.fromkeys(note for _, _, result in self._each() for note in result.scores.notes)):
            parts += ["## Notes", "\n".join(f"- {note}" for note in notes)]
        return "\n\n".join(parts) + "\n"

    def _each(self) -> list[tuple[str, str, Result]]:
        return [(label, name, result) for label, results in self.results.items() for name, result in results.items()]

    def _headlines(self) -> str:
        names = list(self.titles)
        rows = [
            (label, *(shown(result.scores.metrics()[result.scores.headline]) for result in results.values()))
            for label, results in self.results.items()
        ]
        for row in self.paper:
            numbers = dict(zip(BENCHMARKS, paper_results()[row], strict=True))
            rows.append((f"paper: {row}", *(f"{numbers[name]:.2f}" for name in names)))
        heads = list(next(iter(self.results.values())).items())
        return table(("model", *(f"{self.titles[name]}: {result.scores.headline}" for name, result in heads)), rows)

    def _metrics(self) -> str:
        rows = []
        for label, name, result in self._each():
            rows += [
                (self.titles[name], label, metric, shown(interval), str(interval.n))
                for metric, interval in result.scores.metrics().items()
            ]
            rows += [
                (self.titles[name], label, f"{metric} (official code)", number(value), "")
                for metric, value in result.scores.official.items()
            ]
        return table(("benchmark", "model", "metric", "", "prompts"), rows)

    def _counts(self) -> str:
        rows = [
            (self.titles[name], label, what, f"{count:,}")
            for label, name, result in self._each()
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
            for label, name, (_, cost, price) in self._each()
        ]
        heads = ("benchmark", "model", "answers", "requests", "prompt tokens", "completion tokens", "price")
        return table(heads, rows)


def as_dict(result: Result) -> dict[str, Any]:
    """One result for JSON."""
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


def paper_results() -> dict[str, list[float]]:
    """The paper's numbers by row."""
    return yaml.safe_load(PAPER.read_text(encoding="utf-8"))


def table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table whose columns are aligned, so that it can be read as it is."""
    cells = [[cell.replace("|", "\\|") for cell in row] for row in (heads, *rows)]
    widths = [max(3, *map(len, column)) for column in zip(*cells, strict=True)]
    lines = ["| " + " | ".join(map(str.ljust, row, widths)) + " |" for row in cells]
    return "\n".join([lines[0], "|" + "|".join("-" * (width + 2) for width in widths) + "|", *lines[1:]])


def shown(interval: Interval, sign: bool = False) -> str:
    """`30.20 [28.10, 32.40]`."""
    value, low, high = (f"{x:+.2f}" if sign else f"{x:.2f}" for x in interval[:3])
    return value if math.isnan(interval.low) else f"{value} [{low}, {high}]"


def number(value: float | str) -> str:
    """As it is, floats with at most four decimals."""
    return value if isinstance(value, str) else f"{value:.4f}".rstrip("0").rstrip(".")


def plain(value: Any) -> Any:
    """`value` with `None` for NaN, which JSON does not have."""
    if isinstance(value, Mapping):
        return {key: plain(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [plain(each) for each in value]
    return None if isinstance(value, float) and math.isnan(value) else value
