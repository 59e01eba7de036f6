"""What an audit found: numbers, and a verdict in words."""

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
            What the value says, in a few words.
        better (`int`):
            1 if higher is better, -1 if lower is, 0 if neither.
        main (`bool`):
            Whether the verdict counts it. The others show the same answers from another side.
        values (`dict[str, float]`):
            Its value by query id. A query whose answers do not allow one is missing.
        low (`float`, *optional*):
            Lower end of the 95 % interval of the mean; `None` for fewer than two queries.
        high (`float`, *optional*):
            Its upper end.
        chance (`float`, *optional*):
            What a judge gets that does not read the responses; `None` without values.
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
        """Clearly better than chance: the whole interval lies on the better side of it."""
        if self.low is None or self.high is None or self.chance is None:
            return False
        worst = self.low if self.better > 0 else self.high
        return self.better * (worst - self.chance) > 1e-9  # a mean of sevenths is not exactly a seventh

    def as_dict(self) -> dict:
        """For `audit.json`."""
        numbers = asdict(self)
        return {"value": self.value, "clear": self.clear, "queries": len(self.values), **numbers}


@dataclass(frozen=True)
class Form:
    """How far the answers had the form asked for.

    Args:
        questions (`int`):
            Questions asked.
        without_verdict (`int`):
            Those that ended without a verdict, after all attempts.
        unreachable (`int`):
            Those of them that got no answer at all.
        first_answers (`int`):
            Questions whose first request was answered, however often transport had to retry it.
        first_malformed (`int`):
            Those of them whose answer was not the verdict asked for.
    """

    questions: int
    without_verdict: int
    unreachable: int
    first_answers: int
    first_malformed: int


@dataclass(frozen=True)
class Cost:
    """What the questions of one kind cost: means per call, all attempts included, and seconds without queueing."""

    kind: str
    calls: int
    prompt_tokens: float
    cached_tokens: float
    completion_tokens: float
    median_seconds: float
    p95_seconds: float


@dataclass(frozen=True)
class Audit:
    """Everything that an audit found.

    Args:
        judge (`str`):
            Who was asked.
        dataset (`str`):
            About which data.
        queries (`int`):
            Queries asked about.
        pairwise_queries (`int`):
            Those of them of which all pairs were asked.
        results (`list[Result]`):
            The measures, in the order of the table.
        form (`Form`):
            How far the answers had the form asked for.
        costs (`list[Cost]`):
            By kind of question.
        seconds (`float`):
            Wall time of all questions.
        moves (`list[tuple[int, int, int]]`):
            Of each response that was taken out and put back: responses of its query, its place, the place given.
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
        """The main measures that could be taken."""
        return [result for result in self.results if result.main and result.values]

    def as_dict(self) -> dict:
        """All numbers, for `audit.json`."""
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
    """The audit in words, by one rule: a measure counts if its whole interval is on the better side of chance."""
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
