"""The results of an audit: numbers, and a verdict in words."""

from dataclasses import asdict, dataclass
from statistics import fmean


@dataclass(frozen=True)
class Result:
    """One measure over all queries of an audit.

    Args:
        name (`str`):
            Its key in `audit.json`.
        label (`str`):
            Its name for people.
        meaning (`str`):
            The meaning of the value, in a few words.
        better (`int`):
            1 if higher is better, -1 if lower is, 0 if neither.
        main (`bool`):
            Whether the verdict counts the measure. The other measures use the same answers.
        values (`dict[str, float]`):
            The value by query id. A query whose verdicts do not allow a value is missing.
        low (`float`, *optional*):
            Lower end of the 95 % interval of the mean; `None` for fewer than two queries.
        high (`float`, *optional*):
            Upper end of that interval.
        chance (`float`, *optional*):
            The value of a judge that does not read the responses; `None` without values.
    """

    name: str
    label: str
    meaning: str
    better: int
    main: bool
    values: dict[str, float]
    low: float | None
    high: float | None
    chance: float | None

    @property
    def value(self) -> float | None:
        """The mean over queries."""
        return fmean(self.values.values()) if self.values else None

    @property
    def clear(self) -> bool:
        """Whether the value is clearly better than chance: the whole interval lies on the better side."""
        if self.low is None or self.high is None or self.chance is None:
            return False
        worst = self.low if self.better > 0 else self.high
        return self.better * (worst - self.chance) > 1e-9  # a mean of sevenths is not exactly a seventh

    def as_dict(self) -> dict:
        """Return the fields by name, for `audit.json`."""
        numbers = asdict(self)
        return {"value": self.value, "clear": self.clear, "queries": len(self.values), **numbers}


@dataclass(frozen=True)
class Form:
    """The counts of answers that were a valid verdict, and of those that were not.

    Args:
        questions (`int`):
            Questions that were asked.
        without_verdict (`int`):
            Questions without a verdict after all attempts.
        unreachable (`int`):
            Questions among these whose last request got no answer.
        first_answers (`int`):
            Questions whose first request was answered, transport retries included.
        first_malformed (`int`):
            Questions among these whose first answer was not a valid verdict.
    """

    questions: int
    without_verdict: int
    unreachable: int
    first_answers: int
    first_malformed: int


@dataclass(frozen=True)
class Cost:
    """The cost of the questions of one kind: means per call over all attempts, and seconds without queueing."""

    kind: str
    calls: int
    prompt_tokens: float
    cached_tokens: float
    completion_tokens: float
    median_seconds: float
    p95_seconds: float


@dataclass(frozen=True)
class Audit:
    """All results of an audit.

    Args:
        judge (`str`):
            Name of the judge.
        dataset (`str`):
            Name or path of the data set.
        queries (`int`):
            Number of queries.
        pairwise_queries (`int`):
            Number of these queries whose pairs were all asked.
        results (`list[Result]`):
            The measures, in the order of the table.
        form (`Form`):
            Counts of valid and invalid answers.
        costs (`list[Cost]`):
            Costs by kind of question.
        seconds (`float`):
            Wall time of all questions.
        moves (`list[tuple[int, int, int]]`):
            For each response that was taken out and put back: number of responses, true place, place given.
        max_failures (`float`):
            Share of failed judgments above which training would stop.
    """

    judge: str
    dataset: str
    queries: int
    pairwise_queries: int
    results: list[Result]
    form: Form
    costs: list[Cost]
    seconds: float
    moves: list[tuple[int, int, int]]
    max_failures: float

    @property
    def counted(self) -> list[Result]:
        """The main measures that have values."""
        return [result for result in self.results if result.main and result.values]

    def as_dict(self) -> dict:
        """Return all numbers, for `audit.json`."""
        return {
            "judge": self.judge,
            "dataset": self.dataset,
            "queries": self.queries,
            "pairwise_queries": self.pairwise_queries,
            "verdict": verdict(self),
            "clearly_better": sum(result.clear for result in self.counted),
            "of": len(self.counted),
            "measures": {result.name: result.as_dict() for result in self.results},
            "form": asdict(self.form),
            "cost": {cost.kind: asdict(cost) for cost in self.costs},
            "seconds": self.seconds,
            "calls_per_second": self.form.questions / self.seconds,
            "put_back": [dict(zip(("responses", "place", "given"), move, strict=True)) for move in self.moves],
        }


def verdict(audit: Audit) -> str:
    """Say the result in words. A measure counts if its whole interval is on the better side of chance."""
    counted = audit.counted
    if not counted:
        return "Nothing could be measured: the judge gave no verdicts to measure."
    if all(result.low is None for result in counted):
        return "One query is too few to tell anything: an interval takes two or more."
    unclear = [result.label for result in counted if not result.clear]
    said = f"Clearly better than chance on {len(counted) - len(unclear)} of {len(counted)}."
    if not unclear:
        return f"{said} This judge reads the responses of this data set and tells them apart."
    if len(unclear) == len(counted):
        return f"{said} This judge cannot be told from guessing: do not train with it."
    return f"{said} Not on: {', '.join(unclear)}. Find out why before you train with this judge."
