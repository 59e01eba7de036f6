"""Arena-Hard's verdicts and scores: how a judgment is read, and what a file of them says."""

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from .benchmark import OutputError, Scores, shortened
from .files import read_jsonl
from .metric import Row

STRONG = 3
"""Battles that `>>` counts for."""

OFFICIAL_RESAMPLES = 100

SCORES = {
    "A>>B": [1.0] * STRONG,
    "A>B": [1.0],
    "A=B": [0.5],
    "A<B": [0.0],
    "A<<B": [0.0] * STRONG,
    "B>>A": [0.0] * STRONG,
    "B>A": [0.0],
    "B=A": [0.5],
    "B<A": [1.0],
    "B<<A": [1.0] * STRONG,
}
"""What a verdict says of assistant A, one number in 0..1 per battle."""


def read_verdict(text: str, patterns: Sequence[str]) -> str | None:
    """The label of a judgment as the official code reads it: the last match of the first pattern that matches.

    Args:
        text (`str`):
            The judge's answer.
        patterns (`Sequence[str]`):
            Regular expressions with one group, tried on the text in upper case.

    Returns:
        `str` or `None`: the label, which need not be one of `SCORES`.
    """
    for pattern in patterns:
        if labels := [label for label in re.findall(pattern, text.upper()) if label]:
            return labels[-1].strip("\n")
    return None


def battles(games: Sequence[Mapping | None]) -> list[float] | None:
    """Scores of the model in the battles of its two games, or `None` if either game has no known verdict.

    In the first game the baseline is assistant A, in the second the model is.
    """
    if len(games) != 2:
        return None
    baseline_first, model_first = (SCORES.get(game["score"]) if game else None for game in games)
    if baseline_first is None or model_first is None:
        return None
    return model_first + [1 - score for score in baseline_first]


def official_bootstrap(scores: Sequence[float], seed: int = 0) -> tuple[float, float, float]:
    """Mean and 5 % and 95 % quantiles of 100 resampled means of battles, in 0..1. The official code has no seed."""
    drawn = np.random.default_rng(seed).choice(scores, size=(OFFICIAL_RESAMPLES, len(scores)))
    means = drawn.mean(axis=1)
    return float(means.mean()), float(np.quantile(means, 0.05)), float(np.quantile(means, 0.95))


def score_judgments(path: Path, categories: Mapping[str, str]) -> Scores:
    """Score an official judgment file.

    Args:
        path (`Path`):
            The file.
        categories (`Mapping[str, str]`):
            The category of every question by its uid.

    Raises:
        [`OutputError`]: if a question is missing, unknown or there twice.
    """
    rows = list(read_jsonl(path))
    uids = [str(row.get("uid")) for row in rows]
    for keys, fault in (
        ([uid for uid in categories if uid not in set(uids)], "are not judged"),
        ([uid for uid, count in Counter(uids).items() if count > 1], "are judged several times"),
        ([uid for uid in uids if uid not in categories], "are no questions of this run"),
    ):
        if keys:
            raise OutputError(
                f"{path}: {len(keys)} of {len(categories)} rows {fault}: {shortened(keys)}. Delete the file"
            )
    games = [game for row in rows for game in row["games"]]
    labels = [game["score"] for game in games if game]
    per_category: dict[str, dict[str, Row]] = {category: {} for category in dict.fromkeys(categories.values())}
    pooled: dict[str, list[float]] = {category: [] for category in per_category}
    for row in rows:
        if (scores := battles(row["games"])) is not None:
            category = categories[row["uid"]]
            per_category[category][row["uid"]] = Row(100 * sum(scores) / len(scores), len(scores))
            pooled[category] += scores
    official = {}
    for category, scores in pooled.items():
        if scores:
            mean, low, high = (100 * share for share in official_bootstrap(scores))
            official[f"{category}, official bootstrap"] = f"{mean:.1f} (-{mean - low:.1f} / +{high - mean:.1f})"
    return Scores(
        headline=next(iter(per_category)),
        rows=per_category,
        counts={
            "questions": len(rows),
            "judgments that failed": sum(game is None for game in games),
            "judgments without a verdict": sum(label is None for label in labels),
            "judgments with an unknown label": sum(label is not None and label not in SCORES for label in labels),
            "questions dropped": len(rows) - sum(map(len, per_category.values())),
        },
        official=official,
        notes=(
            "A strong verdict counts as three battles; the intervals resample questions, the official ones battles.",
        ),
    )
