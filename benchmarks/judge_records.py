"""Estimate the errors of real judges from public records of their verdicts.

    python benchmarks/judge_records.py --records DIR

DIR holds clones of three public repositories ([`SOURCES`]). For a clone that is missing or is at another commit, the
script says which command gets it. Nothing is downloaded, and no record is a part of this project.
`judge_records_fit.py` has the model. The intervals are at 95 %, from a bootstrap over prompts.

The script prints the tables of `docs/results/real_judges.md`, and then the estimates as one JSON line. These are also
in `judge_records.json`.
"""

import argparse
import csv
import hashlib
import json
import re
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from judge_records_fit import (
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
from judge_records_tables import tables

from rankbuffer_trl.errors import RankBufferError

csv.field_size_limit(2**31 - 1)


class RecordsError(RankBufferError, ValueError):
    """A clone of public records is missing or is at another commit. The message says how to get it."""


@dataclass(frozen=True)
class Source:
    """A public repository with judgments.

    Args:
        repository (`str`):
            Owner and name on GitHub. The clone lies in a folder of this name below the user's folder.
        commit (`str`):
            The pinned commit.
        licence (`str`):
            The licence that the repository states.
        groups (`Mapping[str, tuple[list[str], str]]`):
            Patterns of paths by group of files, and the sha256 of all files of the group ([`digest`]).
    """

    repository: str
    commit: str
    licence: str
    groups: Mapping[str, tuple[list[str], str]]

    def files(self, records: Path, group: str) -> list[Path]:
        """Return the files of a group.

        Raises:
            [`RecordsError`]: if files are missing or differ from those of the pinned commit.
        """
        patterns, expected = self.groups[group]
        folder = records / self.repository.partition("/")[2]
        found = sorted(path for pattern in patterns for path in folder.glob(pattern))
        if digest(folder, found) != expected:
            what = "has other files than the pinned commit" if found else "is missing"
            raise RecordsError(
                f"the group {group!r} of {folder} {what}; get it with: git clone https://github.com/{self.repository}"
                f" {folder} ; git -C {folder} checkout {self.commit}"
            )
        return found


def digest(folder: Path, files: Sequence[Path]) -> str:
    """Return the sha256 of the names and contents of files."""
    whole = hashlib.sha256()
    for path in files:
        whole.update(
            f"{path.relative_to(folder).as_posix()}\0{hashlib.sha256(path.read_bytes()).hexdigest()}\n".encode()
        )
    return whole.hexdigest()


LLMBAR = Source(
    "princeton-nlp/LLMBar",
    "900616bff90b6c6c8e1681f7d079250637c55992",
    "MIT",
    {
        "pairs": (
            [
                f"Dataset/{data}/evaluators/{judge}/{prompt}/result.json"
                for data in ("Processed/*", "LLMBar/Natural", "LLMBar/Adversarial/*")
                for judge in ("GPT-4", "ChatGPT*", "PaLM2", "LLaMA2")
                for prompt in ("Vanilla_NoRules", "Metrics_Reference", "Vanilla")
            ],
            "9ad3524dd92cb3ebf2e3eafc5efda0c7efca8b63a88ed2a91fa5f684c813d442",
        ),
        "ratings": (
            [
                f"Dataset/LLMBar/{data}/evaluators/*/{prompt}/result.json"
                for data in ("Natural", "Adversarial/*")
                for prompt in ("Rating", "Rating_NoRules")
            ],
            "d6bfb711cdc6bc797bb5faf15144d635b3804919dca36752a979f3297c86a12a",
        ),
    },
)
REPEATS = Source(
    "Slimshilin/Position-Bias-Analyzer",
    "9f8b7e8e83862cf1ffd9dd2c33f589262efc66ee",
    "MIT",
    {
        "MTBench": (
            ["judgment_data/data_MTBench_repetition/*/record_*.tsv"],
            "79c046ef658cbc9e38e7fa098215b7dc26b4a6837e1090f540d21672d9798b54",
        ),
        "DevBench": (
            ["judgment_data/data_DevBench_repetition/*/record_*.tsv"],
            "9ee9d71ca9216cf91a4509835039247fc58e85cad36548f28fcffd92217ebfb9",
        ),
    },
)
JUDGE = "gpt-4o-2024-05-13"
TWICE = ("Qwen1.5-72B-Chat", "Qwen1.5-72B-Chat-greedy")  # two rollouts of one policy, of which one is greedy
WILDBENCH = Source(
    "allenai/WildBench",
    "d6b8dcaf377d173d031980f97c16e1a82618c03d",
    "Apache-2.0",
    {
        "scores": (
            [
                f"eval_results/v2.0522/score.v2/eval={JUDGE}/{model}.json"
                for model in (
                    *(*TWICE, "Phi-3-mini-128k-instruct", "gemma-2b-it", "gemma-7b-it", "gpt-3.5-turbo-0125"),
                    *("reka-core-20240501", "reka-edge", "reka-flash-20240226"),
                )
            ],
            "5d88d60dacbe98209c52f8ba5c150c2f32e136ac84752c49f84fb74ab5dffcdf",
        ),
    },
)
SOURCES = (LLMBAR, REPEATS, WILDBENCH)


def llmbar(records: Path, source: Source = LLMBAR) -> Iterator[Verdicts]:
    """Yield the verdicts in LLMBar, those of ratings included. Its four adversarial sets count as one."""
    grouped: dict[tuple[str, str, str], list[dict]] = {}
    for path in (path for group in source.groups for path in source.files(records, group)):
        judge, prompt = path.parts[-3:-1]
        data = "Adversarial" if "Adversarial" in path.parts else path.parts[-5]
        pairs = json.loads(path.read_text(encoding="utf-8"))
        grouped.setdefault((judge, data, prompt), []).extend(pairs)
    for name, pairs in sorted(grouped.items()):
        # A template of several steps stores the answer of each step, and the verdict last.
        last = [pair["results"][-1] for pair in pairs]
        wins = [by_rating(found) if "score_1" in found else by_winner(found) for found in last]
        yield Verdicts(
            *name,
            asked=np.array([pair["input"] for pair in pairs]),
            looks=np.array(wins)[:, :, None] * np.array([[[1.0], [-1.0]]]),  # from responses to places
            labels=np.array([WINS[str(pair["label"])] for pair in pairs]),
            longer=np.sign([len(pair["output_1"]) - len(pair["output_2"]) for pair in pairs]),
        )


WINS = {"1": 1.0, "2": -1.0}


def by_winner(found: dict) -> list[float]:
    """Return for both orders 1 if the first stored response won, -1 if the second one did, or NaN."""
    return [WINS.get(str(found[f"swap = {swap}"].get("winner")), np.nan) for swap in (False, True)]


def by_rating(found: dict) -> list[float]:
    """Return the same for two ratings, which have no order, and 0 for a tie."""
    try:
        first, second = (float(found[f"score_{place}"][0]) for place in (1, 2))
    except ValueError:
        return [np.nan, np.nan]
    return [float(np.sign(first - second))] * 2


CHOICES = {"MTBench": re.compile(r"\[\[([ABC])\]\]"), "DevBench": re.compile(r"Choice: ([AB])")}
PLACES = {"A": 1.0, "B": -1.0, "C": 0.0}


def choice(answer: str, data: str) -> float:
    """Return the last verdict of an answer: 1 for the first response shown, -1 for the second, 0 for a tie, or NaN."""
    found = CHOICES[data].findall(answer)
    return PLACES[found[-1]] if found else np.nan


def repeats(records: Path, data: str, source: Source = REPEATS) -> Iterator[Verdicts]:
    """Yield the verdicts in Position-Bias-Analyzer, which asked each question several times."""
    answers: dict[str, dict[str, dict[tuple[str, str], float]]] = {}  # by judge, repetition, and (question, first)
    for path in source.files(records, data):
        repetition = path.parent.name.partition("-")[0]
        with path.open(encoding="utf-8", newline="") as lines:
            table = csv.reader(lines, delimiter="\t")
            *_, judge = next(table)
            for index, *_, answer in table:
                answers.setdefault(judge, {}).setdefault(index, {})[repetition] = choice(answer, data)
    for judge, found in sorted(answers.items()):
        turns = sorted({turn for answer in found.values() for turn in answer})
        pairs = sorted(index for index in found if index.split(";")[1] < index.split(";")[2])
        looks = [
            [[found.get(order, {}).get(turn, np.nan) for turn in turns] for order in (index, swapped(index))]
            for index in pairs
        ]
        yield Verdicts(judge, data, "repeated", np.array([index.split(";")[0] for index in pairs]), np.array(looks))


def swapped(index: str) -> str:
    """Return the index of the same pair in the other order."""
    question, first, second = index.split(";")
    return f"{question};{second};{first}"


def rollouts(records: Path, source: Source = WILDBENCH, samples: int = SAMPLES) -> dict[str, object]:
    """Estimate from WildBench how ratings of two rollouts of one policy differ, beside those of several policies.

    Returns:
        `dict[str, object]`: names, and estimates with intervals. `tied` and `near` are the shares of prompts at which
        the two rollouts have equal ratings, and ratings that differ by at most one point. `tied_models` is the share
        of equal ratings over pairs of policies. `spread` is the standard deviation of the ratings of one policy over
        that of several policies, without the part of the rounding.
    """
    scores = {path.stem: ratings(path) for path in source.files(records, "scores")}
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


def ratings(path: Path) -> dict[str, float]:
    """Return the ratings in a file of WildBench by prompt, without those that are no number."""
    found = json.loads(path.read_text(encoding="utf-8"))
    numbers = {row["session_id"]: str(row.get("score", "")) for row in found}
    return {prompt: float(score) for prompt, score in numbers.items() if re.fullmatch(r"\d+(\.\d+)?", score)}


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


def measured(records: Path, sources: Sequence[Source] = SOURCES, samples: int = SAMPLES) -> dict:
    """Read the records, and return all estimates with intervals.

    Args:
        records (`Path`):
            The folder with the clones.
        sources (`Sequence[Source]`, *optional*):
            The three repositories, in the order of `SOURCES`.
        samples (`int`, *optional*, defaults to `1000`):
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
        found = rounded(measured(arguments.records, samples=arguments.samples))
    except (RankBufferError, OSError) as error:
        raise SystemExit(str(error)) from None
    print(tables(found))
    print(json.dumps(found))


if __name__ == "__main__":
    main()
