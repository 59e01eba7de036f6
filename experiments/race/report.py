"""How many judge tokens does each reward take until the toy policy has 85 of 100?

    python -m experiments.race.report runs/race/results.jsonl      # add runs of the toy policy to the record
    python -m experiments.race.report                              # make the table from the record alone
    python -m experiments.race.report --judge blunt [RESULTS]      # the same for a judge with errors of 0.3

The quality of a step is the mean true quality of the rollouts of the last six steps, in which each query stands once.
The tokens are all that the judge has taken until the end of the first step with the goal. The program prints a table
and one JSON line. For the sharp judge it writes `tokens_to_85.json`, for the table of recipes. Runs
of a recipe of one's own change no record.
"""

import argparse
import json
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean

from experiments.toy_policy.report import BEYOND
from experiments.toy_policy.reward_hacking import STEPS
from experiments.toy_policy.run import ALL, read_results

HERE = Path(__file__).parent
RECIPES = HERE.parents[1] / "recipes"
FOUND = HERE / "tokens_to_85.json"
JUDGES = {"sharp": (HERE / "runs.json", (80, 85)), "blunt": (HERE / "blunt.json", (70, 75))}
RECORD, GOALS = JUDGES["sharp"]
Runs = dict[str, dict[str, dict[str, list]]]  # quality and tokens by step, by recipe and seed


def tokens_to(goal: float, quality: Sequence[float], tokens: Sequence[int]) -> int | None:
    """Return the tokens until the quality of a step reaches the goal; `None` if it does not.

    Args:
        goal (`float`):
            The quality, 0 to 100.
        quality, tokens (`Sequence`):
            The mean quality of the rollouts of each step, and what its judgments took.
    """
    for step in range(STEPS, len(quality) + 1):
        if fmean(quality[step - STEPS : step]) >= goal:
            return sum(tokens[:step])
    return None


def race(runs: Runs, goal: float) -> dict[str, int | None]:
    """Return the mean tokens over seeds by recipe, the fewest first; `None` if a seed does not reach the goal."""
    found: dict[str, int | None] = {}
    for recipe, seeds in runs.items():
        each = [tokens_to(goal, run["quality"], run["tokens"]) for run in seeds.values()]
        found[recipe] = None if None in each else round(fmean(each))  # type: ignore[arg-type]  # none is None
    return dict(sorted(found.items(), key=lambda pair: (pair[1] is None, pair[1] or 0, pair[0])))


def with_recipe(runs: Runs) -> Runs:
    """Return the runs whose recipe is still there. Commit e122f1a has the others."""
    return {recipe: seeds for recipe, seeds in runs.items() if (RECIPES / f"{recipe}.yaml").is_file() or own(recipe)}


def own(recipe: str) -> bool:
    """Return whether a recipe is of one's own. A table with one is printed, and changes no record."""
    return recipe.endswith((".yaml", ".yml"))


def merged(runs: Runs, files: Sequence[Path]) -> Runs:
    """Return the record with the runs of result files of the toy policy."""
    both: Mapping[str, dict] = defaultdict(dict, {recipe: dict(seeds) for recipe, seeds in runs.items()})
    for result in (each for file in files for each in read_results(file)):
        recipe = result.method  # the path of a recipe of one's own
        if result.method in (*BEYOND, *ALL):
            recipe = f"{'beyond' if result.method in BEYOND else 'paper'}/{result.method}"
        both[recipe][str(result.seed)] = {"quality": result.curve, "tokens": result.tokens_by_step}
    return dict(sorted(both.items()))


def main() -> None:
    """Add runs, print the table, and write what the table of recipes needs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", type=Path, nargs="*", help="result files of the toy policy, to add to the record")
    parser.add_argument("--judge", choices=JUDGES, default="sharp", help="the judge of the runs")
    given = parser.parse_args()
    record, goals = JUDGES[given.judge]
    runs: Runs = merged(json.loads(record.read_text()) if record.is_file() else {}, given.results)
    ours = not any(map(own, runs))
    if ours:
        lines = ",\n".join(f"{json.dumps(recipe)}: {json.dumps(seeds)}" for recipe, seeds in runs.items())
        record.write_text(f"{{\n{lines}\n}}\n")
    easier, harder = (race(with_recipe(runs), goal) for goal in goals)
    print(f"| recipe | seeds | tokens to {goals[0]} | tokens to {goals[1]} |\n|---|---:|---:|---:|")
    for recipe, tokens in harder.items():
        cells = [f"{each:,}" if each else "not in 36 steps" for each in (easier[recipe], tokens)]
        print(f"| `{recipe}` | {len(runs[recipe])} | {' | '.join(cells)} |")
    if ours and given.judge == "sharp":
        FOUND.write_text(json.dumps(harder, indent=1) + "\n")
    print(json.dumps({"benchmark": "race", "judge": given.judge, "goal": goals[1], "tokens": harder}))


if __name__ == "__main__":
    main()
