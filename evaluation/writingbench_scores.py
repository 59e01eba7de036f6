"""WritingBench's answers and arithmetic, as the official `evaluate_benchmark.py` and `calculate_scores.py` have them.

A query has criteria, usually five, each scored from 1 to 10 on its own.
"""

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from rankbuffer_trl.judge.verdicts import VerdictError, shown

from .answers import read_object
from .benchmark import OutputError, Scores
from .dropped import check_rows
from .files import read_jsonl
from .metric import Row, Rows

SCORES = range(1, 11)
SCALE = 10
"""The public leaderboard's: a mean of 6.25 shows as 62.5."""

JUDGE_SEED = 0

CriterionScores = Mapping[str, Mapping[str, float]]
"""By query, the score of each criterion by name."""


def read_verdict(answer: str) -> dict[str, Any]:
    """A judge's answer with its `score` and `reason`.

    As officially, the letters and backticks of a code fence are stripped from both ends; here thinking and white space
    are, too. The official code falls back on `eval` where the answer is not JSON; this asks again.

    Raises:
        [`VerdictError`]: if it is no JSON object with an integer from 1 to 10 and a text.
    """
    verdict = read_object(answer.rpartition("</think>")[2].strip().strip("json|`"), ["score", "reason"])
    score, reason = verdict["score"], verdict["reason"]
    if not is_score(score):
        raise VerdictError(f"`score` must be an integer from 1 to 10, not {shown(score)}")
    if not isinstance(reason, str):
        raise VerdictError(f"`reason` must be a text, not {shown(reason)}")
    return verdict


def is_score(value: Any) -> bool:
    """Whether a value of JSON is a score: `7`, or `7.0`, but not `"7"`."""
    return isinstance(value, int | float) and not isinstance(value, bool) and value in SCORES


def read_scores(path: Path, criteria: Mapping[str, Sequence[str]], dropped: Collection[str] = ()) -> CriterionScores:
    """The scores of an official result file.

    Args:
        path (`Path`):
            The file.
        criteria (`Mapping[str, Sequence[str]]`):
            The names of each query's criteria.
        dropped (`Collection[str]`, *optional*):
            Queries that have no row.

    Raises:
        [`OutputError`]: if the file is missing, holds other rows, or a row lacks a score.
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
    """Rows of the mean over the criteria of all queries, in which each criterion counts once."""
    return {index: Row(SCALE * sum(each.values()) / len(each), len(each)) for index, each in scores.items()}


def of_domain(scores: CriterionScores, domain: str, domains: Mapping[str, str]) -> Rows:
    """Rows of the mean over a domain's queries of their mean over criteria."""
    return {index: Row(row.value) for index, row in overall(scores).items() if domains[index] == domain}


def score_writingbench(scores: CriterionScores, domains: Mapping[str, str], failed: int = 0) -> Scores:
    """All that scores say of a model.

    Args:
        scores (`CriterionScores`):
            Of all queries that have them.
        domains (`Mapping[str, str]`):
            The domain of every query.
        failed (`int`, *optional*, defaults to `0`):
            Judgments without an answer.
    """
    rows = {"Overall": overall(scores)}
    rows |= {domain: of_domain(scores, domain, domains) for domain in dict.fromkeys(domains.values())}
    spread = Counter(score for each in scores.values() for score in each.values())
    return Scores(
        headline="Overall",
        rows=rows,
        counts={
            "queries": len(domains),
            "queries dropped": len(domains) - len(scores),
            "judgments": sum(spread.values()),
            "judgments dropped": failed,
        },
        notes=(
            "Ten times the mean score. A query without an answer to each of its criteria is dropped whole.",
            f"The judge answers at temperature 1; the seeds of all criteria are made of {JUDGE_SEED} and their names.",
        ),
    )
