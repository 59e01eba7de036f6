"""The tables, the claims and the figure of a real policy under a simulated judge, from its kept records alone.

    python -m experiments.real_policy.report             # what README.md shows
    python -m experiments.real_policy.report --answers   # also the answers before and after
    python -m experiments.real_policy.report --figure experiments/real_policy/real_policy.png

Rows are compared over the seeds that both have finished under the same judge. The last line is JSON.
"""

import argparse
import json
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import product
from pathlib import Path
from statistics import fmean
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from rich.console import Console
from rich.table import Table

from experiments.real_policy.real_judge import SCORES
from experiments.real_policy.run import DATA, JUDGES, RECORDS, START, read, rubrics_of
from experiments.toy_policy.report import Comparison, Interval, compare
from rankbuffer_trl.data import load_queries
from rankbuffer_trl.judge import meets, rubric_score
from rankbuffer_trl.monitoring import tau_b
from rankbuffer_trl.stems import WORD

ROWS = {
    "grpo": "GRPO",
    "gdpo": "GDPO",
    "rrc_scr": "RRC-SCR",
    "tournament_grpo": "Tournament-GRPO",
    "rankbuffer": "RankBuffer",
    "rankbuffer_static": "RankBuffer static",
    "rankbuffer_bootstrap": "RankBuffer bootstrap",
    "listwise_two": "two lists",
}
NEAR = 0.8  # share of RRC-SCR's gain from which RankBuffer is near it
CLAIMS = {  # each difference is above 0 if its claim is true; the last one is asked in both directions
    "RankBuffer is above GRPO": ("rankbuffer", "grpo", 1.0),
    "RankBuffer is near RRC-SCR": ("rankbuffer", "rrc_scr", NEAR),
    "dynamic is above static": ("rankbuffer", "rankbuffer_static", 1.0),
    "two lists are above RankBuffer": ("listwise_two", "rankbuffer", 1.0),
}
Texts = Mapping[str, Sequence[str]]
Scores = Mapping[str, Mapping[str, float]]
"""The real judge's mean score of each prompt's answers, by run."""


class Measure:
    """The measures of answers to the prompts of the data."""

    def __init__(self):
        self.rows = {row["query_id"]: row for path in DATA.values() for row in load_queries(str(path))}
        self.true = cache(lambda id, text: rubric_score(text, rubrics_of(self.rows[id])))  # an answer is read twice

    def quality(self, answers: Texts) -> float:
        """Return the mean true quality, 0 to 100."""
        return fmean(100 * self.true(id, text) for id, texts in answers.items() for text in texts)

    def unpaid(self, answers: Texts) -> float:
        """Return the share of the things that nobody pays for, in percent."""
        return fmean(100 * meets(text, self.rows[id]["unpaid"]) for id, texts in answers.items() for text in texts)

    def agreement(self, visits: Iterable[Mapping[str, Any]]) -> float:
        """Return the mean over groups of Kendall's tau-b between the rewards and the true quality."""
        found = []
        for visit in visits:
            known = [i for i, reward in enumerate(visit["rewards"]) if reward is not None]
            truth = [self.true(visit["query_id"], visit["answers"][i]) for i in known]
            found.append(tau_b([visit["rewards"][i] for i in known], truth))
        return fmean(found)

    def words(self, answers: Texts) -> float:
        """Return the mean number of words."""
        return fmean(len(WORD.findall(text.lower())) for texts in answers.values() for text in texts)


@dataclass(frozen=True)
class Outcome:
    """The numbers of one run: quality by epoch and on the prompts kept apart, and judge tokens by epoch."""

    row: str
    judge: str
    seed: int
    epochs: list[float]
    kept_apart: list[float]
    unpaid: list[float]  # in the first and the last epoch, and on the prompts kept apart at the end
    agreement: float  # of the rewards with the true quality, see [`Measure.agreement`]
    words: float
    calls: int
    tokens: list[int]

    @classmethod
    def of(cls, record: Mapping[str, Any], measure: Measure) -> "Outcome":
        """Measure a record."""
        length = len({visit["query_id"] for visit in record["visits"]}) // 2  # steps of an epoch: two prompts each
        epochs: dict[int, dict[str, list[str]]] = defaultdict(dict)
        tokens: dict[int, int] = defaultdict(int)
        for visit in record["visits"]:
            epochs[visit["step"] // length][visit["query_id"]] = visit["answers"]
        for step, _, asked in record["spent"]:
            tokens[step // length] += asked
        last, kept = epochs[max(epochs)], [each for _, each in sorted(record["kept_apart"].items())]
        return cls(
            record["row"],
            record["judge"],
            record["seed"],
            [measure.quality(epochs[epoch]) for epoch in sorted(epochs)],
            [measure.quality(each) for each in kept],
            [measure.unpaid(each) for each in (epochs[0], last, kept[-1])],
            measure.agreement(record["visits"]),
            measure.words(last),
            sum(calls for _, calls, _ in record["spent"]),
            [sum(tokens[epoch] for epoch in range(until + 1)) for until in sorted(tokens)],
        )


def mean_of(runs: Iterable[Outcome], value) -> str:
    """Return a mean over seeds with its interval, to one decimal."""
    found = Interval.of([value(each) for each in runs])
    return f"{found.mean:.1f}" + ("" if found.half is None else f" ± {found.half:.1f}")


def by_epoch(found: Iterable[Outcome], name: str) -> list[float]:
    """Return the means over seeds of a field that is a list."""
    return [fmean(each) for each in zip(*(getattr(run, name) for run in found), strict=True)]


def risen(found: Iterable[Outcome], scores: Scores) -> str:
    """Return by how much the real judge scores the answers of each run above those of the start, over seeds."""
    names = [name for run in found if (name := f"{run.judge}-{run.row}-{run.seed}") in scores]
    rises = [fmean(scores[name][id] - score for id, score in scores["start"].items()) for name in names]
    return str(Interval.of(rises)) if rises else ""


def rows_table(runs: Mapping[tuple[str, str], list[Outcome]], start: Mapping[str, float], scores: Scores) -> Table:
    """Make the table of all rows."""
    table = Table("judge", "row", "seeds", "by epoch", "last epoch", "kept apart", "not paid for", "agreement")
    for title in ("real judge", "words", "calls", "Mtokens", "as GRPO's end"):
        table.add_column(title)
    table.title = f"True quality; before training {start['trained']:.1f}, and {start['kept_apart']:.1f} kept apart"
    for (judge, row), found in runs.items():
        epochs, unpaid = (" ".join(f"{each:.0f}" for each in by_epoch(found, name)) for name in ("epochs", "unpaid"))
        numbers = [mean_of(found, lambda run: run.epochs[-1]), mean_of(found, lambda run: run.kept_apart[-1]), unpaid]
        numbers += [
            f"{fmean(run.agreement for run in found):.2f}",
            risen(found, scores),
            f"{fmean(run.words for run in found):.0f}",
            f"{fmean(run.calls for run in found):,.0f}",
        ]
        numbers.append(f"{fmean(run.tokens[-1] for run in found) / 1e6:.2f}")
        table.add_row(judge, row, str(len(found)), epochs, *numbers, until_grpo(found, runs.get((judge, "grpo"), [])))
    return table


def until_grpo(found: Sequence[Outcome], grpo: Sequence[Outcome]) -> str:
    """Return the judge tokens, in thousands, after which an epoch has the quality of GRPO's last one."""
    goal = {run.seed: run.epochs[-1] for run in grpo}
    shared = [run for run in found if run.seed in goal]
    if not shared:
        return ""
    level = fmean(goal[run.seed] for run in shared)
    spent = zip(by_epoch(shared, "tokens"), by_epoch(shared, "epochs"), strict=True)
    return next((f"{tokens / 1e3:,.0f}k" for tokens, quality in spent if quality >= level), "not reached")


def claims(runs: Mapping[tuple[str, str], list[Outcome]], start: float) -> dict[tuple[str, str], Comparison]:
    """Judge all claims under all judges together, over the seeds that both rows of a claim have finished."""
    found = {}
    for judge in JUDGES:
        for claim, (row, other, share) in CLAIMS.items():
            ends = [{run.seed: run.epochs[-1] - start for run in runs.get((judge, each), [])} for each in (row, other)]
            if seeds := sorted(ends[0].keys() & ends[1].keys()):
                found[judge, claim] = [ends[0][seed] - share * ends[1][seed] for seed in seeds]
    return dict(zip(found, compare(list(found.values())), strict=True)) if found else {}


def claims_table(found: Mapping[tuple[str, str], Comparison]) -> Table:
    """Make the table of the claims."""
    table = Table("judge", "claim", "seeds", "difference", "p (Holm)", "exact p (alone)", "verdict", "seeds to settle")
    for (judge, claim), each in found.items():
        numbers = (
            str(len(each.values)),
            str(Interval.of(each.values)),
            f"{each.p:.3f}",
            f"{sign_changes(each.values):.4f}",
        )
        table.add_row(judge, claim, *numbers, each.verdict, each.seeds)
    return table


def sign_changes(values: Sequence[float]) -> float:
    """Return the exact two-sided p-value of a mean of 0, over all changes of the signs of `values`; not adjusted.

    It needs no normality, only differences that are symmetric if there is none. With n seeds it is at least 2 / 2**n.
    """
    means = [
        abs(fmean(sign * value for sign, value in zip(signs, values, strict=True)))
        for signs in product((1, -1), repeat=len(values))
    ]
    return fmean(mean >= abs(fmean(values)) - 1e-9 for mean in means)


def draw_epochs(axes: Axes, runs: Mapping[tuple[str, str], list[Outcome]], judge: str, start: float) -> None:
    """Draw true quality by epoch against judge tokens, for all rows: the mean, and each seed as a thin line."""
    for (of, row), found in runs.items():
        if of == judge:
            colour = f"C{[*ROWS].index(row)}"
            for each in found if len(found) > 1 else ():
                axes.plot(
                    [tokens / 1e3 for tokens in each.tokens], each.epochs, color=colour, linewidth=0.5, alpha=0.6
                )
            tokens = [each / 1e3 for each in by_epoch(found, "tokens")]
            axes.plot(tokens, by_epoch(found, "epochs"), color=colour, marker="o", markersize=4, label=ROWS[row])
    axes.axhline(start, color="#999999", linewidth=1)
    axes.set(xlabel="judge tokens so far, thousands", ylabel="true quality of an epoch's rollouts, 0 to 100")
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, fontsize=8)


def figure(runs: Mapping[tuple[str, str], list[Outcome]], start: float, path: Path) -> None:
    """Draw one panel per judge."""
    judges = [*dict.fromkeys(judge for judge, _ in runs)]
    picture = Figure(figsize=(5.2 * len(judges), 3.8), layout="constrained")
    for axes, judge in zip(picture.subplots(1, len(judges), squeeze=False, sharey=True)[0], judges, strict=True):
        draw_epochs(axes, runs, judge, start)
        axes.set_title(f"{judge} judge")
    picture.savefig(path, dpi=110)


def show_answers(records: Iterable[Mapping[str, Any]], start: Texts, console: Console) -> None:
    """Print the first answer to the first three prompts kept apart, before training and of each row with seed 0."""
    ends = {
        f"{each['judge']} {each['row']}": max(each["kept_apart"].items())[1] for each in records if not each["seed"]
    }
    for id in list(start)[:3]:
        console.print(
            f"\n== {id}", *(f"{name}: {each[id][0]}" for name, each in {"before": start, **ends}.items()), sep="\n"
        )


def outcomes(records: Path, measure: Measure) -> dict[tuple[str, str], list[Outcome]]:
    """Return the runs of a folder by judge and row, in the order of the tables."""
    found = [Outcome.of(read(path), measure) for path in records.glob("*.json.gz")]
    found.sort(key=lambda each: ([*JUDGES].index(each.judge), [*ROWS].index(each.row), each.seed))
    runs: dict[tuple[str, str], list[Outcome]] = {}
    for each in found:
        runs.setdefault((each.judge, each.row), []).append(each)
    return runs


def main() -> None:
    """Print what the records say."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--records", type=Path, default=RECORDS)
    parser.add_argument("--figure", type=Path, help="draw the figure into this file, such as real_policy.png")
    parser.add_argument("--answers", action="store_true", help="print answers before and after")
    given = parser.parse_args()
    console, measure, start = Console(width=170, highlight=False), Measure(), read(START)
    before = {of: measure.quality(answers) for of, answers in start.items()}
    runs = outcomes(given.records, measure)
    found = claims(runs, before["trained"])
    scores = read(SCORES) if SCORES.is_file() else {}
    console.print(rows_table(runs, before, scores), claims_table(found))
    if given.answers:
        show_answers(map(read, sorted(given.records.glob("*.json.gz"))), start["kept_apart"], console)
    if given.figure:
        figure(runs, before["trained"], given.figure)
    verdicts = {f"{claim} ({judge})": each.verdict for (judge, claim), each in found.items()}
    print(
        json.dumps(
            {"benchmark": "real_policy", "runs": sum(map(len, runs.values())), "start": before, "claims": verdicts}
        )
    )


if __name__ == "__main__":
    main()
