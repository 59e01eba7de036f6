"""WritingBench's arithmetic, as in the official `evaluate_benchmark.py` and `calculate_scores.py`.

A query has criteria, usually five. Each criterion is scored separately, from 1 to 10.
"""

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from rankbuffer_trl.judge import VerdictError, shorten_json

from ..benchmark import BenchmarkScores, OutputError, read_json_answer
from ..files import check_rows, read_jsonl
from ..metric import Row, Rows

SCORE_RANGE = range(1, 11)
SCALE = 10  # of the public leaderboard, which shows a mean of 6.25 as 62.5

JUDGE_SEED = 0

CriterionScores = Mapping[str, Mapping[str, float]]
"""The score of each criterion, by query and then by the criterion's name."""


def read_verdict(answer: str, cut_off: bool = False) -> dict[str, Any]:
    """Return a judge's answer with its `score` and `reason`. Text around the object is skipped.

    Raises:
        [`VerdictError`]: if the answer is no JSON object with an integer from 1 to 10 and a text.
    """
    # As officially, but no fallback on `eval`: the judge is asked again.
    verdict = read_json_answer(answer.strip().strip("json|`"), ["score", "reason"], cut_off)
    score, reason = verdict["score"], verdict["reason"]
    if not is_score(score):
        raise VerdictError(f"`score` must be an integer from 1 to 10, not {shorten_json(score)}")
    if not isinstance(reason, str):
        raise VerdictError(f"`reason` must be a text, not {shorten_json(reason)}")
    return verdict


def is_score(value: Any) -> bool:
    """Return whether a JSON value is a score."""
    # 7.0 is one, true is not.
    return isinstance(value, int | float) and not isinstance(value, bool) and value in SCORE_RANGE


def read_scores(path: Path, criteria: Mapping[str, Sequence[str]], dropped: Collection[str] = ()) -> CriterionScores:
    """Return the scores of an official result file. Queries that are `dropped` must have no row.

    Raises:
        [`OutputError`]: if the file is missing, has other rows, or a row lacks a score.
    """
    try:
        rows = [(str(row.get("index")), row.get("scores", {})) for row in read_jsonl(path)]
    except FileNotFoundError:
        raise OutputError(f"{path} is missing: judge the outputs first") from None
    check_rows([index for index, _ in rows], criteria, dropped, path)
    scores = {}
    for index, judged in rows:
        try:
            scores[index] = {name: judged[name][0]["score"] for name in criteria[index]}
        except (LookupError, TypeError):
            raise OutputError(
                f"{path}: the row of index {index} lacks the score of a criterion. Judge again"
            ) from None
        if wrong := [name for name, score in scores[index].items() if not is_score(score)]:
            raise OutputError(f"{path}: index {index} has no score from 1 to 10 for {wrong[0]!r}. Judge again")
    return scores


def overall(scores: CriterionScores) -> Rows:
    """Return the rows of the mean over the criteria of all queries."""
    # The weight: each criterion counts once.
    return {index: Row(SCALE * sum(each.values()) / len(each), len(each)) for index, each in scores.items()}


def of_domain(scores: CriterionScores, domain: str, domains: Mapping[str, str]) -> Rows:
    """Return the rows of a domain's mean over queries."""
    # Without the weight: here each query counts once, as officially.
    return {index: Row(row.value) for index, row in overall(scores).items() if domains[index] == domain}


def score_writingbench(scores: CriterionScores, domains: Mapping[str, str], failed: int = 0) -> BenchmarkScores:
    """Return all metrics and counts of a model. `failed` judgments have no answer."""
    rows = {"Overall": overall(scores)}
    rows |= {domain: of_domain(scores, domain, domains) for domain in dict.fromkeys(domains.values())}
    spread = Counter(score for criteria in scores.values() for score in criteria.values())
    return BenchmarkScores(
        headline="Overall",
        rows=rows,
        counts={
            "queries": len(domains),
            "queries dropped": len(domains) - len(scores),
            "judgments": sum(spread.values()),
            "judgments dropped": failed,
        },
        notes=(
            "Ten times the mean score. A query that lacks the score of any criterion is dropped.",
            f"The judge answers at temperature 1. Each criterion's seed is derived from {JUDGE_SEED} and its name.",
        ),
    )
