"""The results of the toy policy: tables of methods and differences, the paper's claims one by one, and two figures."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from math import sqrt
from pathlib import Path
from statistics import fmean, stdev

from matplotlib.figure import Figure
from mpmath import betainc  # torch requires it
from rich.table import Column, Table

POINTWISE = ("grpo", "gdpo", "dr_grpo", "dapo", "gpg")
RANKING = ("tournament_grpo", "rrc_agr", "rrc_scr", "pairwise_rank", "arenarl")
BUFFERS = (
    "rankbuffer",
    "rankbuffer_static",
    "rankbuffer_bootstrap",
    "rankbuffer_bootstrap_static",
    "llm_buffer",
    "llm_buffer_look_ahead",
)
OURS = ("listwise_one", "listwise_two", "listwise")
RELATIVES = ("ruler",)  # of another tool
SOFT = ("ratings_soft", "pairs_soft", "rankbuffer_soft")  # they read probabilities
LARGE = ("listwise_blocks",)  # ours, for groups of more than 8
BEYOND = (*OURS, *LARGE, *RELATIVES, *SOFT)
CLAIMED = (  # a row for each comparison; the strongest ranking: RRC-SCR in the paper, Tournament-GRPO or RRC-SCR here
    "grpo",
    "gdpo",
    "tournament_grpo",
    "rrc_scr",
    "rankbuffer",
    "rankbuffer_static",
    "rankbuffer_bootstrap",
    "rankbuffer_bootstrap_static",
    "llm_buffer",
    "coarse_only",
    "order_only",
    "order_only_bootstrap",
    "rankbuffer_k0_2",
    "rankbuffer_k0_7",
)
BESIDE = ("grpo", "rrc_scr", "rankbuffer")  # the rows of the paper that ours are compared with
FAMILY_COLOURS = {"pointwise": "#c9822b", "ranking": "#3d7ea6", "buffer": "#2e8b57", "ablation": "#9aa5b1"}
MARKERS = "osD^vP"
NEAR = 0.95  # a method is near the strongest one from this share of its gain; the paper's RankBuffer has 0.98
HALF = 0.5  # share of the strongest method's tokens
LEVEL = 0.05  # a difference holds if its adjusted p-value is below
MANY = 1000  # seeds
# Student's t, two-sided 95 %, by degrees of freedom. The last value serves for more degrees too: intervals get wider.
T = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131)


@dataclass(frozen=True)
class Result:
    """A finished run.

    Args:
        method (`str`), seed (`int`):
            The method and the seed of the run.
        quality (`float`):
            Mean true quality of responses of the trained policy, 0 to 100.
        calls, tokens, failures (`int`):
            The judge's parsed calls, their prompt and completion tokens, and its calls without a verdict.
        anchors (`float`, *optional*):
            Mean buffer size at the end, if the method has buffers.
        curve (`list[float]`):
            Mean true quality of the rollouts of each step.
        believed (`list[float]`):
            The same as a judge with a weakness sees it, without noise.
        repeats (`list[float]`):
            Share of the rollouts of each epoch with the same words as another one of their group.
        cosines (`list[float]`):
            Mean cosine between a group's rewards and its true qualities, by epoch.
        better (`list[float]`):
            Share of the rollouts of each epoch that are truly better than the best reference of their query.
        saturated (`list[float]`):
            Share of the rollouts of each epoch that the judge placed above all anchors of their buffer.
        tokens_by_step (`list[int]`):
            The judge's prompt and completion tokens of each step.
        seconds, cpu_seconds (`float`):
            Wall time and CPU time of the whole run.
    """

    method: str
    seed: int
    quality: float
    calls: int
    tokens: int
    failures: int
    anchors: float | None
    curve: list[float]
    repeats: list[float]
    cosines: list[float]
    seconds: float
    cpu_seconds: float
    better: list[float] = field(default_factory=list)
    saturated: list[float] = field(default_factory=list)
    believed: list[float] = field(default_factory=list)
    tokens_by_step: list[int] = field(default_factory=list)


@dataclass(frozen=True)
class Interval:
    """A mean over seeds with its 95 % interval by Student's t; one seed gives no interval."""

    mean: float
    half: float | None

    @classmethod
    def of(cls, values: Sequence[float]) -> "Interval":
        """Return the interval of one value per seed."""
        n = len(values)
        t = T[min(n - 2, len(T) - 1)] if n > 1 else 0.0
        return cls(fmean(values), t * stdev(values) / sqrt(n) if n > 1 else None)

    def __str__(self) -> str:
        return f"{self.mean:.2f}" + ("" if self.half is None else f" ± {self.half:.2f}")


@dataclass(frozen=True)
class Comparison:
    """A difference that has been measured with every seed.

    Args:
        values (`list[float]`):
            The difference of each seed.
        p (`float`):
            Two-sided p-value of Student's t, adjusted by Holm's method for all differences of the table.
        settle (`int`, *optional*):
            Number of seeds that would settle an open difference, or `None` from 1,000 on. Mean and deviation are taken
            as measured, and the smallest level of Holm's method must be met.
    """

    values: list[float]
    p: float
    settle: int | None

    @property
    def verdict(self) -> str:
        """Whether the difference is above 0."""
        if len(self.values) < 2:
            return "open: one seed"
        if self.p >= LEVEL:
            return "open"
        return "holds" if fmean(self.values) > 0 else "does not hold"

    @property
    def seeds(self) -> str:
        """The number of seeds that would settle the difference; empty if it is settled."""
        if self.verdict != "open":
            return ""
        return f"{self.settle or f'{MANY:,} or more'}"


@dataclass(frozen=True)
class Outcome:
    """A claim of the paper with its comparisons, whose differences are above 0 if the claim is true."""

    claim: str
    comparisons: dict[str, Comparison]

    @property
    def verdict(self) -> str:
        """The verdict `holds` if each comparison holds, `does not hold` if one does not, else `open`."""
        verdicts = {comparison.verdict for comparison in self.comparisons.values()}
        if "does not hold" in verdicts:
            return "does not hold"
        return "holds" if verdicts == {"holds"} else "open"


@dataclass(frozen=True)
class Difference:
    """The difference of true quality between a method of ours and one of the paper, in points.

    Args:
        ours (`str`), other (`str`):
            The two methods.
        tokens (`float`):
            Judge tokens of ours as a share of the other's.
        found (`Comparison`):
            The difference, seed by seed.
    """

    ours: str
    other: str
    tokens: float
    found: Comparison


def student_p(mean: float, deviation: float, n: int) -> float:
    """Return the two-sided p-value of a mean of `n` values with a standard deviation, by Student's t."""
    if n < 2:
        return 1.0
    if not deviation:
        return float(not mean)
    t, freedom = mean / deviation * sqrt(n), n - 1
    return float(betainc(freedom / 2, 0.5, 0, freedom / (freedom + t * t), regularized=True))


def holm(p_values: Sequence[float]) -> list[float]:
    """Return the p-values adjusted by Holm's method, in the given order."""
    adjusted, highest = [0.0] * len(p_values), 0.0
    for rank, i in enumerate(sorted(range(len(p_values)), key=p_values.__getitem__)):
        highest = max(highest, min(1.0, (len(p_values) - rank) * p_values[i]))
        adjusted[i] = highest
    return adjusted


def compare(differences: Sequence[list[float]]) -> list[Comparison]:
    """Compare all differences of a table with 0, each by its values of every seed."""
    moments = [(fmean(values), stdev(values) if len(values) > 1 else 0.0) for values in differences]
    p_values = holm([student_p(*moment, len(each)) for moment, each in zip(moments, differences, strict=True)])

    def settle(mean: float, deviation: float) -> int | None:
        """Return the number of seeds from which the p-value is below the smallest level."""
        enough = (n for n in range(2, MANY) if student_p(mean, deviation, n) < LEVEL / len(differences))
        return next(enough, None)

    return [Comparison(each, p, settle(*m)) for each, p, m in zip(differences, p_values, moments, strict=True)]


def compare_ours(results: Sequence[Result]) -> list[Difference]:
    """Compare each method of ours with each of the paper's rows beside it."""
    runs = by_method(results)
    pairs = [(ours, other) for ours in BEYOND for other in BESIDE if ours in runs and other in runs]
    found = compare([differences(runs[ours], runs[other]) for ours, other in pairs])
    return [
        Difference(ours, other, mean_of(runs[ours], "tokens") / mean_of(runs[other], "tokens"), each)
        for (ours, other), each in zip(pairs, found, strict=True)
    ]


def differences_table(differences: Sequence[Difference]) -> Table:
    """Return the table of differences between our methods and the paper's."""
    right = ("difference", "p (Holm)", "token ratio", "seeds to settle")
    headers = ("ours", "less", *right[:2], "above it?", *right[2:])
    table = Table(*(Column(name, justify="right" if name in right else "left") for name in headers))
    table.title = f"Points of true quality, seed by seed; p-values are adjusted for {len(differences)} differences"
    for each in differences:
        found = each.found
        measured = str(Interval.of(found.values)), f"{found.p:.3f}", found.verdict
        last = each.other == BESIDE[-1]
        table.add_row(each.ours, each.other, *measured, f"{each.tokens:.2f}", found.seeds, end_section=last)
    return table


def outgrown_table(results: Sequence[Result]) -> Table:
    """Return the table that says how far the policy has left references and anchors behind, and how rewards fare."""
    columns = {"better": "{:.0%}", "saturated": "{:.0%}", "cosines": "{:.2f}"}
    table = Table("method", *columns)
    table.title = (
        "By epoch: rollouts truly better than the best reference; rollouts placed above all anchors of their buffer;"
        " cosine of rewards and true qualities"
    )
    for method, runs in by_method(results).items():
        # A run that is older than a measure lacks it, and so does the mean: not strict.
        means = {
            what: [fmean(e) for e in zip(*(getattr(run, what) for run in runs), strict=False)] for what in columns
        }
        table.add_row(method, *(" ".join(map(form.format, means[what])) for what, form in columns.items()))
    return table


def groups_table(results: Sequence[Result]) -> Table:
    """Return the table of repeated rollouts and of the rewards' accuracy, in the first and in the last epoch."""
    headers = ("repeated, first epoch", "repeated, last epoch", "cosine, first epoch", "cosine, last epoch")
    table = Table("method", *(Column(header, justify="right") for header in headers))
    table.title = "Rollouts with the words of another one of their group; cosine of rewards and true qualities"
    for method, runs in by_method(results).items():
        repeats = (f"{fmean(run.repeats[epoch] for run in runs):.0%}" for epoch in (0, -1))
        cosines = (f"{fmean(run.cosines[epoch] for run in runs):.2f}" for epoch in (0, -1))
        table.add_row(method, *repeats, *cosines)
    return table


def family(method: str) -> str:
    """Return the kind of a method."""
    kinds = {"pointwise": POINTWISE, "ranking": RANKING, "buffer": BUFFERS, "ours": BEYOND}
    return next((kind for kind, methods in kinds.items() if method in methods), "ablation")


def whole_seeds(results: Iterable[Result], methods: Sequence[str]) -> list[Result]:
    """Return the results of the seeds that all `methods` have finished, in the order of the paper's tables."""
    by_seed: dict[int, dict[str, Result]] = {}
    for result in results:
        by_seed.setdefault(result.seed, {})[result.method] = result
    order = sorted(
        methods, key=lambda method: (*POINTWISE, *RANKING, *BUFFERS, *BEYOND, *sorted(methods)).index(method)
    )
    whole = (runs for _, runs in sorted(by_seed.items()) if set(methods) <= runs.keys())
    return [runs[method] for runs in whole for method in order]


def by_method(results: Iterable[Result]) -> dict[str, list[Result]]:
    """Group the results by method, seed by seed."""
    found: dict[str, list[Result]] = {}
    for result in results:
        found.setdefault(result.method, []).append(result)
    return found


def mean_of(runs: Sequence[Result], name: str) -> float:
    """Return the mean over runs of one field of their results."""
    return fmean(getattr(run, name) for run in runs)


def methods_table(results: Sequence[Result], start: float) -> Table:
    """Return the table of final true quality and cost of each method."""
    seeds = len({result.seed for result in results})
    table = Table(
        *(Column("method", no_wrap=True), "kind", "true quality", "judge calls", "judge tokens", "anchors", "CPU s"),
        title=f"Before training {start:.1f}; after it, means over {seeds} seeds with 95 % intervals",
    )
    for column in table.columns[2:]:
        column.justify = "right"
    for method, runs in by_method(results).items():
        anchors = [run.anchors for run in runs if run.anchors is not None]
        table.add_row(
            method,
            family(method),
            str(Interval.of([run.quality for run in runs])),
            f"{mean_of(runs, 'calls'):,.0f}",
            f"{mean_of(runs, 'tokens'):,.0f}",
            f"{fmean(anchors):.2f}" if anchors else "",
            f"{mean_of(runs, 'cpu_seconds'):.0f}",
        )
    return table


def judge_claims(results: Sequence[Result], start: float) -> list[Outcome]:
    """Judge the paper's claims, seed by seed, as far as both methods of a difference have results."""
    runs = by_method(results)

    def paired(claims: dict[str, list[tuple[str, str]]]) -> dict[str, dict[str, list[float]]]:
        """Return the differences of each claim that the first method of each pair has the higher quality."""
        return {
            claim: {f"{a} - {b}": differences(runs[a], runs[b]) for a, b in pairs if a in runs and b in runs}
            for claim, pairs in claims.items()
        }

    pointwise = {"above all pointwise methods": [("rankbuffer", method) for method in POINTWISE]}
    values = paired(pointwise) | near_the_strongest(runs, start) | paired(BUFFER_CLAIMS)
    found = iter(compare([each for claim in values.values() for each in claim.values()]))
    return [Outcome(claim, {what: next(found) for what in each}) for claim, each in values.items() if each]


BUFFER_CLAIMS = {  # the first of each pair has the higher quality
    "dynamic above static, anchors from outside": [("rankbuffer", "rankbuffer_static")],
    "static above dynamic, anchors from bootstrap": [("rankbuffer_bootstrap_static", "rankbuffer_bootstrap")],
    "coarse-only below": [("rankbuffer", "coarse_only")],
    "order-only below": [("rankbuffer", "order_only"), ("rankbuffer_bootstrap", "order_only_bootstrap")],
    "rules above an LLM that manages the buffer": [("rankbuffer", "llm_buffer")],
    "look-ahead does not help": [("llm_buffer", "llm_buffer_look_ahead")],
    "K0 = 4 best, anchors from outside": [("rankbuffer", "rankbuffer_k0_2"), ("rankbuffer", "rankbuffer_k0_7")],
}


def differences(a: Sequence[Result], b: Sequence[Result]) -> list[float]:
    """Return the differences of true quality, seed by seed."""
    return [x.quality - y.quality for x, y in zip(a, b, strict=True)]


def near_the_strongest(runs: dict[str, list[Result]], start: float) -> dict[str, dict[str, list[float]]]:
    """Compare RankBuffer with the best ranking method: most of its gain, less than half of its tokens."""
    ranking = [method for method in RANKING if method in runs]
    if not ranking or "rankbuffer" not in runs:
        return {}
    strongest = max(ranking, key=lambda method: fmean(run.quality for run in runs[method]))
    pairs = list(zip(runs["rankbuffer"], runs[strongest], strict=True))
    kept = [mine.quality - start - NEAR * (best.quality - start) for mine, best in pairs]
    saved = [HALF - mine.tokens / best.tokens for mine, best in pairs]
    return {
        "near the strongest ranking method": {f"gain - {NEAR:.0%} of {strongest}'s": kept},
        "at less than half its tokens": {f"{HALF:g} - token ratio to {strongest}": saved},
    }


def claims_table(outcomes: Sequence[Outcome]) -> Table:
    """Return the table of claims and their comparisons, where a difference above 0 supports the claim."""
    right = ("mean", "p (Holm)", "seeds to settle")
    headers = ("the paper says of RankBuffer", "difference", *right[:2], "verdict", right[2])
    table = Table(*(Column(name, justify="right" if name in right else "left") for name in headers))
    table.title = (
        "The paper's claims; means are points of true quality unless the difference says otherwise; p-values are"
        f" adjusted for {sum(len(outcome.comparisons) for outcome in outcomes)} differences"
    )
    for outcome in outcomes:
        for i, (what, each) in enumerate(outcome.comparisons.items()):
            last = i == len(outcome.comparisons) - 1
            claim = outcome.claim if i == 0 else ""
            measured = str(Interval.of(each.values)), f"{each.p:.3f}", each.verdict, each.seeds
            table.add_row(claim, what, *measured, end_section=last)
    return table


def efficiency_figures(results: Sequence[Result], start: float, folder: Path) -> list[Path]:
    """Draw quality against judge tokens and against calls, without ablations (figures "Average score versus ...")."""
    runs = {method: found for method, found in by_method(results).items() if family(method) != "ablation"}
    seeds = len({result.seed for result in results})
    paths = []
    for what in ("tokens", "calls"):
        axes = Figure(figsize=(7.6, 4.2), layout="constrained").add_subplot()
        for method, found in runs.items():
            kind = family(method)
            place = {"pointwise": POINTWISE, "ranking": RANKING, "buffer": BUFFERS}[kind].index(method)
            x, qualities = fmean(getattr(run, what) for run in found) / 1e3, [run.quality for run in found]
            axes.plot([x, x], [min(qualities), max(qualities)], color=FAMILY_COLOURS[kind], linewidth=1)
            axes.plot(
                x,
                fmean(qualities),
                marker=MARKERS[place],
                markersize=10 if method == "rankbuffer" else 6,
                color=FAMILY_COLOURS[kind],
                linestyle="none",
                label=method,
            )
        axes.set(xlabel=f"judge {what} of a run, thousands", ylabel="true quality after training, 0 to 100")
        axes.set_title(f"Means and ranges over {seeds} seeds; before training {start:.1f}", fontsize=10)
        axes.set_xlim(left=0)
        axes.spines[["top", "right"]].set_visible(False)
        axes.figure.legend(loc="outside right upper", frameon=False, fontsize=8)
        paths.append(folder / f"toy_policy_{what}.png")
        axes.figure.savefig(paths[-1], dpi=150)
    return paths
