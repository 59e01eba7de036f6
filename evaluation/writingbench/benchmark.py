"""WritingBench: each output is scored by each criterion of its query, one judgment per criterion.

Queries, criteria and prompts are read from a checkout of the official repository. Scores are written in its format, so
its `calculate_scores.py` can aggregate them too, also by sub-domain and requirement.
"""

import runpy
import zlib
from collections.abc import Mapping
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

from rankbuffer_tools.batch.chat import Chat
from rankbuffer_trl.judge import Totals
from rankbuffer_trl.judge.config import FailureLimit

from ..asking import ask_judge
from ..assets import AssetError, Assets
from ..benchmark import BenchmarkScores, Prompt, check_outputs, count_around
from ..files import BROUGHT, file_name, read_failed_judgments, read_jsonl, write_failed_judgments, write_jsonl
from .scores import JUDGE_SEED, read_scores, read_verdict, score_writingbench

# Officially without `top_k`, for which vLLM would take the judge's own value.
# For a server that refuses the field, set `judge_request: {top_k: null}`.
REQUEST = {"temperature": 1.0, "top_p": 0.95, "top_k": -1, "max_tokens": 2048}


class WritingQuery(NamedTuple):
    """A row of the benchmark: what to write, its domain, and the criteria by name."""

    text: str
    domain: str
    criteria: dict[str, dict[str, Any]]


class WritingBench:
    """See [`Benchmark`]."""

    name = "writingbench"
    title = "WritingBench"

    def __init__(self, assets: Assets, limit: int | None = None):
        assets.check(self.name, ("questions", "prompt"))
        self.queries = dict(islice(read_queries(assets.path(self.name, "questions")).items(), limit))
        official = runpy.run_path(str(assets.path(self.name, "prompt")))
        self.system, self.template = official["evaluate_system"], official["evaluate_prompt"]

    def prompts(self) -> list[Prompt]:
        """See [`Benchmark`]."""
        return [Prompt(index, [{"role": "user", "content": query.text}]) for index, query in self.queries.items()]

    def write_outputs(self, folder: Path, model: str, responses: Mapping[str, str]) -> None:
        """See [`Benchmark`]."""
        rows = ({"index": int(index), "response": responses[index]} for index in self.queries)
        write_jsonl(outputs_path(folder, model), rows)

    def read_outputs(self, folder: Path, model: str) -> dict[str, str]:
        """See [`Benchmark`]."""
        path = outputs_path(folder, model)
        outputs = ((index_of(row), row.get("response")) for row in read_jsonl(path, BROUGHT))
        return check_outputs(list(self.queries), outputs, path)

    def chats(self, outputs: Mapping[str, str]) -> dict[str, Chat]:
        """Return the chats by `index/criterion`."""
        chats = {}
        for index, query in self.queries.items():
            for name, criterion in query.criteria.items():
                prompt = self.template.format(query=query.text, response=outputs[index], criteria=criterion)
                messages = [{"role": "system", "content": self.system}, {"role": "user", "content": prompt}]
                key = f"{index}/{name}"
                # Fixed, so that a judge repeats its answers.
                request = REQUEST | {"seed": zlib.crc32(f"{JUDGE_SEED}/{key}".encode())}
                # Afresh: a repeat has the next seed.
                chats[key] = Chat("writingbench", index, messages, read_verdict, request, afresh=True)
        return chats

    def judge(self, folder: Path, model: str, settings: FailureLimit) -> Totals:
        """See [`Benchmark`]."""
        chats = self.chats(self.read_outputs(folder, model))
        answers = ask_judge(settings, chats, folder / "judge.jsonl", f"{self.title}: {model}")
        self.write_scores(folder, model, answers.values, answers.failures)
        return answers.totals

    def write_scores(
        self, folder: Path, model: str, verdicts: Mapping[str, dict[str, Any]], failures: Mapping[str, str]
    ) -> None:
        """Write the official result file. `verdicts` and `failures` have the keys of [`WritingBench.chats`]."""
        write_failed_judgments(folder, failures)
        dropped = dropped_queries(failures)
        rows = (
            {
                "index": int(index),
                "scores": {name: [verdicts[f"{index}/{name}"]] for name in query.criteria},
            }
            for index, query in self.queries.items()
            if index not in dropped
        )
        write_jsonl(scores_path(folder, model), rows)

    def scores(self, folder: Path, model: str) -> BenchmarkScores:
        """See [`Benchmark`]."""
        failures = read_failed_judgments(folder)
        criteria = {index: list(query.criteria) for index, query in self.queries.items()}
        scores = read_scores(scores_path(folder, model), criteria, dropped_queries(failures))
        domains = {index: query.domain for index, query in self.queries.items()}
        rows = read_jsonl(scores_path(folder, model))
        verdicts = (verdict for row in rows for listed in row["scores"].values() for verdict in listed)
        return count_around(score_writingbench(scores, domains, len(failures)), verdicts)


def read_queries(path: Path) -> dict[str, WritingQuery]:
    """Return the benchmark's rows by index, in official order. An [`AssetError`] names a malformed row."""
    queries: dict[str, WritingQuery] = {}
    for number, row in enumerate(read_jsonl(path), start=1):
        try:
            index = str(int(row["index"]))
            if index in queries:
                raise ValueError(f"the index {index} occurs twice")
            # Of one name the first counts, as officially.
            criteria = {criterion["name"]: criterion for criterion in reversed(row["checklist"])}
            names = dict.fromkeys(criterion["name"] for criterion in row["checklist"])
            if not names:
                raise ValueError("it has no criteria")
            queries[index] = WritingQuery(row["query"], row["domain1"], {name: criteria[name] for name in names})
        except (LookupError, TypeError, ValueError) as error:
            fault = f"{type(error).__name__}: {error}"
            raise AssetError(f"{path}, line {number}, is no query of WritingBench ({fault})") from None
    return queries


def dropped_queries(failures: Mapping[str, str]) -> set[str]:
    """Return the queries that lack a score."""
    return {key.partition("/")[0] for key in failures}


def index_of(row: Mapping[str, Any]) -> str:
    """Return the index of a row."""
    index = row.get("index")
    # Tables of other programs write 1.0 for 1.
    return str(int(index)) if isinstance(index, float) and index.is_integer() else str(index)


def outputs_path(folder: Path, model: str) -> Path:
    """Return the path of outputs in the official format."""
    return folder / "responses" / f"{file_name(model)}.jsonl"


def scores_path(folder: Path, model: str) -> Path:
    """Return the path of scores in the official format."""
    # Of its own: `calculate_scores.py` wants no other file there.
    return folder / "score_dir" / f"{file_name(model)}.jsonl"
