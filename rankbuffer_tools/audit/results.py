"""The results of an audit: numbers, and a verdict in words."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean

from .rankings import QueryVerdicts

REFERENCES_NOTE = (
    "The samples are references of the data set. References usually differ more in quality than rollouts, so this"
    " audit says nothing about rollouts: sample the policy."
)
SOFT, SOFT_GAIN = "soft_pairs_ratings", "soft_gain"
"""The measures that say whether a judge's probabilities tell responses apart, and better than greedy verdicts do."""
PREFERENCE, PLACE_SPREAD = "soft_opinion", "soft_place_spread"
"""The measures that say whether soft pairs need both orders of presentation."""
MIN_QUERIES = 6  # for an interval: values of fewer are often all equal, and would look exact
RECIPE_OF_RESULT = {"lists_tau": "beyond/listwise_two", SOFT: "beyond/ratings_soft", "pairs_flip": "paper/rrc_scr"}
"""The recipe that rests on a measure. The first clear measure decides, for the reasons in `docs/audit.md`."""


@dataclass(frozen=True)
class Result:
    """One measure over all queries of an audit."""

    name: str
    label: str  # its name for people; `name` is its key in `audit.json`
    meaning: str  # of the value, in a few words
    better: int  # 1 if higher is better, -1 if lower is, 0 if neither
    main: bool  # whether the verdict counts it; the others use the same answers
    values: dict[str, float]  # by query id; without queries whose verdicts allow none
    low: float | None  # the 95 % interval of the mean; None for too few queries
    high: float | None
    chance: float | None  # of a judge that does not read; None if there is none

    @property
    def value(self) -> float | None:
        """The mean over queries."""
        return fmean(self.values.values()) if self.values else None

    @property
    def soft(self) -> bool:
        """Whether it is about probabilities: `SOFT`, or a measure that explains it."""
        return self.name.startswith("soft_")

    @property
    def too_few(self) -> bool:
        """Whether there are values, but of too few queries for an interval."""
        return bool(self.values) and self.low is None

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
        about = {"value": self.value, "clear": self.clear, "queries": len(self.values), "too_few": self.too_few}
        return about | numbers


@dataclass(frozen=True)
class Form:
    """The counts of answers of one kind that were a valid verdict, and of those that were not."""

    questions: int
    without_verdict: int  # after all attempts
    unreachable: int  # of these: the last request got no answer
    first_answers: int  # whose first request was answered, transport retries included
    first_malformed: int  # of these: not a valid verdict


@dataclass(frozen=True)
class Cost:
    """The cost of the questions of one kind: means per call over all attempts, and seconds without queueing."""

    kind: str
    form: Form
    prompt_tokens: float
    cached_tokens: float
    completion_tokens: float
    median_seconds: float
    p95_seconds: float


@dataclass(frozen=True)
class Audit:
    """All results of an audit."""

    judge: str
    dataset: str
    samples: str  # their path
    references: bool  # whether the samples are the data set's own references
    rankings: Sequence[QueryVerdicts]
    results: list[Result]  # in the order of the table
    costs: list[Cost]
    moves: list[tuple[int, int, int]]  # put back: number of samples, place in the lists, place given
    max_failures: float  # the share above which training would stop
    soft_noise: float | None = None  # of one soft rating, in units of reward

    @property
    def counted(self) -> list[Result]:
        """The main measures that have an interval."""
        return [result for result in self.measured.values() if result.main]

    @property
    def measured(self) -> dict[str, Result]:
        """The measures that have an interval, by name."""
        return {result.name: result for result in self.results if result.low is not None}

    @property
    def train_with(self) -> str | None:
        """The recipe to train with; `None` if none rests on a clear measure, or if the samples are references."""
        clear = (
            recipe for name, recipe in RECIPE_OF_RESULT.items() if name in self.measured and self.measured[name].clear
        )
        # References differ more than rollouts, so they say too little.
        return None if self.references else next(clear, None)

    def as_dict(self) -> dict:
        """Return all numbers, for `audit.json`."""
        return {
            "judge": self.judge,
            "dataset": self.dataset,
            "samples": self.samples,
            "references": self.references,
            "queries": len(self.rankings),
            "verdict": verdict(self),
            "clearly_better": sum(result.clear for result in self.counted),
            "of": len(self.counted),
            "measures": {result.name: result.as_dict() for result in self.results},
            "soft_noise": self.soft_noise,
            "train_with": self.train_with,
            "cost": {cost.kind: asdict(cost) for cost in self.costs},
            "put_back": [dict(zip(("samples", "place", "given"), move, strict=True)) for move in self.moves],
            "rankings": [ranking.as_dict() for ranking in self.rankings],
        }


def verdict(audit: Audit) -> str:
    """Say the result in words. A measure counts if its whole interval is on the better side of chance."""
    counted = audit.counted
    if not counted and any(result.too_few for result in audit.results):
        return f"Too few queries to tell anything: an interval takes {MIN_QUERIES} with verdicts."
    if not counted:
        return "Nothing could be measured: the judge gave no verdicts to measure."
    soft = audit.measured.get(SOFT)
    unclear = [result.label for result in counted if not result.clear]
    blind = len(unclear) == len(counted)
    text = f"Clearly better than chance on {len(counted) - len(unclear)} of {len(counted)}."
    if blind and soft and soft.clear:
        text = f"{text} This judge's greedy verdicts are no better than chance: do not train with them."
        text = f"{text} Its token probabilities are."
    elif blind:
        text = f"{text} This judge is no better than chance: do not train with it."
    elif unclear:
        text = f"{text} Not on: {', '.join(unclear)}. Find out why before you train with this judge."
    else:
        measured_on = f"the {sum(each.n for each in audit.rankings):,} responses in {Path(audit.samples).name}"
        text = f"{text} This judge is reliable on {measured_on}: it tells them apart. Texts that your policy did not"
        text = f"{text} write may be easier. An audit does not show that it is right."
    if soft:
        text = f"{text} {note_on_probabilities(audit.measured, blind)}"
    if audit.references:
        return f"{text} {REFERENCES_NOTE}"
    if audit.train_with:
        return f"{text} The recipe for it: {audit.train_with}.yaml."
    return text if blind else f"{text} No recipe rests on what is clear: do not train with it."


def note_on_probabilities(measured: Mapping[str, Result], blind: bool) -> str:
    """Say how well both kinds of verdicts agree with themselves and, unless greedy ones are `blind`, with lists."""
    soft, greedy = measured[SOFT], measured["soft_words"]  # of the same answers
    shares = f"{soft.value:.0%} of pairs, and by greedy verdicts on {greedy.value:.0%}"
    text = f"By token probabilities, pairs and ratings agree on {shares}."
    if not soft.clear:
        return f"{text} These probabilities are no better than chance."
    if (gain := measured.get(SOFT_GAIN)) and not blind:
        better = f"better with the lists, by {gain.value:.2f} in tau" if gain.clear else "no better with the lists"
        text += f" At the same price, ratings by token probabilities agree {better}."
    if (preference := measured.get(PREFERENCE)) and (spread := measured.get(PLACE_SPREAD)):
        # With the mean place taken out, its deviation is the error of one order.
        steady = (spread.value or 0.0) < (preference.value or 0.0)
        text += f" For soft pairs, {'one order of presentation will do' if steady else 'both orders are needed'}."
    return text
