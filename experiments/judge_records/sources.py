"""Read public records of the verdicts of real judges, from clones of their repositories."""

import csv
import hashlib
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from experiments.judge_records.fit import Verdicts
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


def llmbar(records: Path, source: Source) -> Iterator[Verdicts]:
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


def repeats(records: Path, data: str, source: Source) -> Iterator[Verdicts]:
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


def wildbench(records: Path, source: Source) -> dict[str, dict[str, float]]:
    """Return the ratings in WildBench by model and prompt."""
    return {path.stem: ratings(path) for path in source.files(records, "scores")}


def ratings(path: Path) -> dict[str, float]:
    """Return the ratings in a file of WildBench by prompt, without those that are no number."""
    found = json.loads(path.read_text(encoding="utf-8"))
    numbers = {row["session_id"]: str(row.get("score", "")) for row in found}
    return {prompt: float(score) for prompt, score in numbers.items() if re.fullmatch(r"\d+(\.\d+)?", score)}
