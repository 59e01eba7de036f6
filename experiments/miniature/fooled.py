"""Which reward is hacked first? Runs under a judge with a known weakness, beside runs of the same seeds without it.

    for each in length phrase echo place; do for strength in 1 3; do
        python -m experiments.miniature.run --methods $ROWS --seeds 3 --policy runs/fooled/none/policy \
            --weakness $each --strength $strength --output_dir runs/fooled/$each-$strength
    done; done
    python -m experiments.miniature.fooled runs/fooled

ROWS and the runs without a weakness (`runs/fooled/none`) are in the README. Two numbers of a run, in points of rubric
score: `lost` is the true quality that the weakness costs, and `fooled` is what the judge believes the policy to have
gained from the first to the last epoch, less what it truly gained. The program prints a table of each, the epoch at
which the two lines part, the differences that were chosen before the runs, and one JSON line.
"""

import argparse
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean

from rich.console import Console
from rich.table import Column, Table

from experiments.miniature.report import Comparison, Interval, Result, by_method, compare
from experiments.miniature.run import read_results

STEPS = 6  # of an epoch
PARTED = 5.0  # points by which belief and truth have parted
CHOSEN = (  # more fooled, less fooled?
    ("grpo", "rankbuffer"),
    ("rrc_scr", "rankbuffer"),
    ("rankbuffer_static", "rankbuffer"),
    ("rankbuffer_bootstrap_static", "rankbuffer_bootstrap"),
    ("rankbuffer_bootstrap", "rankbuffer"),
    ("rankbuffer", "rankbuffer_looks"),
    ("rankbuffer", "listwise_two"),
)

Runs = Mapping[str, Sequence[Result]]  # by method, in the order of seeds


def epochs(values: Sequence[float]) -> list[float]:
    """Return the mean of each epoch. All queries are in each, so epochs can be compared."""
    return [fmean(values[start : start + STEPS]) for start in range(0, len(values), STEPS)]


def gaps(run: Result) -> list[float]:
    """Return by epoch what the judge believes to be gained since the first epoch, less what is truly gained."""
    believed, true = epochs(run.believed), epochs(run.curve)
    return [(b - believed[0]) - (t - true[0]) for b, t in zip(believed, true, strict=True)]


def parted(runs: Sequence[Result]) -> int | None:
    """Return the first epoch, from 1, whose mean gap over seeds is at least `PARTED`; `None` if there is none."""
    means = [fmean(each) for each in zip(*map(gaps, runs), strict=True)]
    return next((epoch for epoch, gap in enumerate(means, 1) if gap >= PARTED), None)


def lost(weak: Sequence[Result], plain: Sequence[Result]) -> list[float]:
    """Return what a weakness costs in true quality, seed by seed."""
    without = {run.seed: run.quality for run in plain}
    return [without[run.seed] - run.quality for run in weak if run.seed in without]


def table(title: str, found: Mapping[str, Runs], cell) -> Table:
    """Make a table of methods and weaknesses, whose cells `cell` fills from a weakness and its runs of one method."""
    made = Table("method", *(Column(name, justify="right") for name in found), title=title)
    for method in dict.fromkeys(method for runs in found.values() for method in runs):
        made.add_row(method, *(cell(name, runs[method]) if method in runs else "" for name, runs in found.items()))
    return made


def chosen_differences(found: Mapping[str, Runs]) -> dict[str, Comparison]:
    """Compare the final gaps of the chosen pairs of methods under each weakness, seed by seed."""
    values = {}
    for name, runs in found.items():
        for more, less in CHOSEN:
            if more in runs and less in runs:
                final = [{run.seed: gaps(run)[-1] for run in runs[method]} for method in (more, less)]
                seeds = sorted(final[0].keys() & final[1].keys())
                values[f"{name}: {more} - {less}"] = [final[0][seed] - final[1][seed] for seed in seeds]
    return dict(zip(values, compare(list(values.values())), strict=True))


def main() -> None:
    """Print the tables of a folder of comparisons."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="folder with the comparisons none, length-1, and so on")
    arguments = parser.parse_args()
    read = {path.parent.name: by_method(read_results(path)) for path in arguments.folder.glob("*/results.jsonl")}
    plain = read.pop("none")
    found = dict(sorted(read.items()))
    console = Console(width=max(Console().width, 150), highlight=False)
    costs = table(
        "lost: points of true quality", found, lambda name, runs: str(Interval.of(lost(runs, plain[runs[0].method])))
    )
    belief = table(
        "fooled: points of belief without truth, in the last epoch",
        found,
        lambda name, runs: str(Interval.of([gaps(run)[-1] for run in runs])),
    )
    when = table(
        f"the first epoch with {PARTED:g} points of belief without truth",
        found,
        lambda name, runs: str(parted(runs) or "-"),
    )
    differences = chosen_differences(found)
    last = Table("weakness: methods", "difference of `fooled`", "p (Holm)", "above 0?", "seeds to settle")
    for name, each in differences.items():
        last.add_row(name, str(Interval.of(each.values)), f"{each.p:.3f}", each.verdict, each.seeds)
    console.print(costs, belief, when, last)
    verdicts = {name: each.verdict for name, each in differences.items()}
    print(json.dumps({"benchmark": "fooled", "conditions": list(found), "differences": verdicts}))


if __name__ == "__main__":
    main()
