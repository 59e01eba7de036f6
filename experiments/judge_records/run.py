"""Estimate the errors of real judges from public records of their verdicts.

    python -m experiments.judge_records.run --records DIR

DIR holds clones of three public repositories, which `sources.py` names and reads. For a clone that is
missing or is at another commit, the script says which command gets it. Nothing is downloaded, and no record is a part
of this project. `fit.py` has the model. The intervals are at 95 %, from a bootstrap over prompts.

The script prints the tables of README.md, and then the estimates as one JSON line. These are also
in `judge_records.json`.
"""

import argparse
import json
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from experiments.judge_records.fit import (
    SAMPLES,
    Array,
    Verdicts,
    consistency,
    estimate,
    interval,
    mean,
    points_of,
    rated,
    resampled,
    same_opinion,
    within,
)
from experiments.judge_records.sources import JUDGE, SOURCES, TWICE, Source, llmbar, repeats, wildbench
from experiments.judge_records.tables import tables
from rankbuffer_trl.errors import RankBufferError


def rollouts(records: Path, source: Source, samples: int) -> dict[str, object]:
    """Estimate from WildBench how ratings of two rollouts of one policy differ, beside those of several policies.

    Returns:
        `dict[str, object]`: names, and estimates with intervals. `tied` and `near` are the shares of prompts at which
        the two rollouts have equal ratings, and ratings that differ by at most one point. `tied_models` is the share
        of equal ratings over pairs of policies. `spread` is the standard deviation of the ratings of one policy over
        that of several policies, without the part of the rounding.
    """
    scores = wildbench(records, source)
    prompts = sorted(set.intersection(*map(set, scores.values())))
    table = {model: np.array([found[prompt] for prompt in prompts]) for model, found in scores.items()}
    weights = resampled(np.arange(len(prompts)), 0, samples)
    apart = np.abs(table.pop(TWICE[1]) - table[TWICE[0]])
    models = np.array(list(table.values()))
    pairs = np.triu_indices(len(models), 1)
    rounding = 1 / 12
    own, all_models = mean(weights, apart**2 / 2), mean(weights, models.var(axis=0, ddof=1))
    found = {
        "tied": mean(weights, (apart == 0) * 1.0),
        "near": mean(weights, (apart <= 1) * 1.0),
        "tied_models": mean(weights, (models[pairs[0]] == models[pairs[1]]).mean(axis=0)),
        "spread": np.sqrt(np.maximum(own - rounding, 0) / np.maximum(all_models - rounding, rounding)),
    }
    about = {"judge": JUDGE, "policy": TWICE[0], "prompts": len(prompts)}
    return about | {name: interval(values) for name, values in found.items()}


Key = tuple[str, str, str]  # judge, data set and prompt template
Estimates = Mapping[Key, Mapping[str, Array]]
FAR = 0.3  # with a share of firsts further from a half, the position bias leaves the other errors open


def carried_over(found: Estimates, prompt: str, sources: Sequence[str], targets: Sequence[str]) -> dict:
    """Predict the swap consistency on one data set from the fresh noise on another one.

    The position bias is that of the data set for which the consistency is predicted.
    """
    cases = []
    for judge, target, _ in [key for key in found if key[1] in targets and key[2] == prompt]:
        for source in sources:
            if source != target and (judge, source, prompt) in found:
                here, there = found[judge, target, prompt], found[judge, source, prompt]
                guess = consistency(here["bias"], here["ties"], there["settled"])
                seen = here["consistent"]
                cases.append((within(guess, seen), guess[0] - seen[0], there["consistent"][0] - seen[0]))
    inside, error, naive = np.array(cases, dtype=float).T
    return {
        "prompt": prompt,
        "from": list(sources),
        "to": list(targets),
        "cases": len(cases),
        "within": int(inside.sum()),
        "error": float(np.sqrt(np.mean(error**2))),
        "error_same_consistency": float(np.sqrt(np.mean(naive**2))),
    }


def ratings_from_pairs(found: Estimates, judge: str, prompt: str, rating: str) -> list[dict]:
    """Predict ties and accuracy of ratings from the verdicts on pairs.

    The number of points in the spread of a look comes from the ties on `Natural`. Fresh noise is taken to have the
    same size in points on both data sets.
    """
    natural = found[judge, "Natural", prompt]
    points = points_of(found[judge, "Natural", rating]["tied"])
    cases = []
    for data in ("Natural", "Adversarial"):
        pairs, seen = found[judge, data, prompt], found[judge, data, rating]
        wider = np.sqrt(np.maximum(natural["fresh"], 1e-3) / np.maximum(pairs["fresh"], 1e-3))
        tied, right = rated(points * wider, np.sign(pairs["agreement"]) * np.sqrt(pairs["truth"]))
        case: dict = {"judge": judge, "data": data, "prompt": rating, "compared": interval(pairs["accuracy"])}
        for name, guess in (("tied", tied), ("accuracy", right)):
            case[name] = {
                "predicted": interval(guess),
                "seen": interval(seen[name]),
                "within": within(guess, seen[name]),
            }
        cases.append(case)
    return cases


def bias_over_data(found: Estimates, judge: str, prompt: str) -> dict:
    """Return how much a judge's position bias differs between data sets, without the errors of the estimates."""
    biases = {data: found[judge, data, prompt]["bias"] for who, data, how in found if (who, how) == (judge, prompt)}
    values = np.array(list(biases.values()))
    error = values[:, 1:].var(axis=1).mean()
    # A bootstrap sample has the error of the estimate and its own, so it is taken off twice.
    parts = np.where(np.arange(values.shape[1]) == 0, 1, 2)
    spread = np.sqrt(np.maximum(values.var(axis=0, ddof=1) - parts * error, 0))
    return {
        "judge": judge,
        "prompt": prompt,
        "bias": {data: interval(bias) for data, bias in biases.items()},
        "spread": interval(spread),
    }


def opinions(
    verdicts: Mapping[tuple[str, str, str], Verdicts], found: Estimates, pairs: Sequence[tuple]
) -> list[dict]:
    """Estimate the correlation of what a judge settles on in two ways of asking.

    Ratings were not asked twice. Their own noise is not known, so their correlation is a lower bound.
    """
    cases = []
    for judge, data, one, other in pairs:
        keys = (judge, data, one), (judge, data, other)
        looks = same_opinion(
            *(verdicts[key] for key in keys), seed=seed_of(data), samples=len(found[keys[0]]["settled"]) - 1
        )
        settled = [np.ones_like(looks) if key[2].startswith("Rating") else found[key]["settled"] for key in keys]
        kappa = looks / np.sqrt(np.maximum(settled[0] * settled[1], 1e-3))
        cases.append({"judge": judge, "data": data, "prompts": [one, other], "kappa": interval(kappa)})
    return cases


def seed_of(data: str) -> int:
    """Return the seed of the bootstrap for a data set, so that judges share their samples."""
    return zlib.crc32(data.encode())


NOISES = (
    *("settled", "fresh", "pair_noise", "pair_bias", "sampling"),
    *("truth", "lasting", "agreement", "error", "lasting_share", "error_bias"),
)


def measured(records: Path, sources: Sequence[Source], samples: int) -> dict:
    """Read the records, and return all estimates with intervals.

    Args:
        records (`Path`):
            The folder with the clones.
        sources (`Sequence[Source]`):
            The three repositories, in the order of `SOURCES`.
        samples (`int`):
            Number of bootstrap samples.

    Raises:
        [`RecordsError`]: if files are missing or differ from those of the pinned commits.
    """
    for source in sources:
        for group in source.groups:
            source.files(records, group)
    pairs, again, scores = sources
    both = (item for data in again.groups for item in repeats(records, data, again))
    verdicts = {(item.judge, item.data, item.prompt): item for item in (*llmbar(records, pairs), *both)}
    found = {key: estimate(item, seed_of(item.data), samples) for key, item in verdicts.items()}
    estimates = []
    for key, item in verdicts.items():
        known = abs(found[key]["first"][0] - 0.5) <= FAR and not item.prompt.startswith("Rating")
        numbers = {name: interval(x) if known or name not in NOISES else None for name, x in found[key].items()}
        sizes = {"pairs": len(item.asked), "prompts": len(set(item.asked))}
        estimates.append(dict(zip(("judge", "data", "prompt"), key, strict=True)) | sizes | numbers)
    large, pairwise = ("MT-Bench", "LLMEval^2", "Natural"), ("Vanilla_NoRules", "Metrics_Reference")
    several = sorted({(who, how) for who, data, how in found if how in pairwise and data == "MT-Bench"})
    rated_by = [(who, how) for who, data, how in found if how.startswith("Rating_NoRules") and data == "Natural"]
    return {
        "sources": [
            {"repository": source.repository, "commit": source.commit, "licence": source.licence} for source in sources
        ],
        "estimates": estimates,
        "bias_over_data": [bias_over_data(found, who, how) for who, how in several]
        + [bias_over_data(found, who, "repeated") for who, data, how in found if data == "DevBench"],
        "carried_over": [
            case
            for how in pairwise
            for case in (
                carried_over(found, how, large, large),
                carried_over(found, how, large, ["FairEval"]),
                carried_over(found, how, ["FairEval"], large),
                carried_over(found, how, large, ["Adversarial"]),
            )
        ]
        + [carried_over(found, "repeated", tuple(again.groups), tuple(again.groups))],
        "ratings_from_pairs": [
            case
            for who, _ in rated_by
            for how in ("Vanilla", "Vanilla_NoRules")
            for case in ratings_from_pairs(found, who, how, how.replace("Vanilla", "Rating"))
        ],
        "kappa": opinions(
            verdicts,
            found,
            [(who, data, *pairwise) for who, _ in several[::2] for data in (*large, "Adversarial")]
            + [
                (who, data, how, how.replace("Vanilla", "Rating"))
                for who, _ in rated_by
                for data in ("Natural", "Adversarial")
                for how in ("Vanilla", "Vanilla_NoRules")
            ],
        ),
        "rollouts": rollouts(records, scores, samples),
    }


def rounded(value: object) -> object:
    """Return a value with all its numbers rounded to 3 digits."""
    if isinstance(value, float):
        return round(value, 3) + 0.0
    if isinstance(value, dict):
        return {name: rounded(item) for name, item in value.items()}
    return [rounded(item) for item in value] if isinstance(value, list) else value


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--records", type=Path, required=True, metavar="DIR", help="folder with the clones")
    parser.add_argument("--samples", type=int, default=SAMPLES, help="bootstrap samples (default: %(default)s)")
    arguments = parser.parse_args()
    try:
        found = rounded(measured(arguments.records, SOURCES, arguments.samples))
    except (RankBufferError, OSError) as error:
        raise SystemExit(str(error)) from None
    print(tables(found))
    print(json.dumps(found))


if __name__ == "__main__":
    main()
