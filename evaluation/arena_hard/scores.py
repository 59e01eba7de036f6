"""Arena-Hard's arithmetic: read the label of a judgment, and score a file of judgments."""

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from ..benchmark import BenchmarkScores, OutputError, shortened
from ..files import read_jsonl
from ..metric import Row

STRONG = 3  # battles that a verdict with `>>` counts for, as in the official code

OFFICIAL_RESAMPLES = 100  # few, so the official number varies by 0.1 points

BATTLE_SCORES = {
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
"""The scores of assistant A for each label: one number in 0..1 per battle."""


def read_label(text: str, patterns: Sequence[str]) -> str | None:
    """Return the label of a judgment, which need not be one of `BATTLE_SCORES`. Each pattern has one group."""
    for pattern in patterns:
        # As officially: last match of the first pattern that matches.
        if labels := [label for label in re.findall(pattern, text.upper()) if label]:
            return labels[-1].strip("\n")
    return None


def battles(games: Sequence[Mapping | None]) -> list[float] | None:
    """Return the model's scores in the battles of its two games, `None` if either game has no known verdict."""
    if len(games) != 2:
        return None
    baseline_first, model_first = (BATTLE_SCORES.get(game["score"]) if game else None for game in games)
    if baseline_first is None or model_first is None:
        return None
    return model_first + [1 - score for score in baseline_first]  # of A, which is the baseline in the first game


def official_bootstrap(scores: Sequence[float], seed: int = 0) -> tuple[float, float, float]:
    """Return mean, 5 % and 95 % quantile of 100 resampled means of battles, in 0..1."""
    # The official code has no seed, so its numbers change.
    drawn = np.random.default_rng(seed).choice(scores, size=(OFFICIAL_RESAMPLES, len(scores)))
    means = drawn.mean(axis=1)
    return float(means.mean()), float(np.quantile(means, 0.05)), float(np.quantile(means, 0.95))


def score_judgments(path: Path, categories: Mapping[str, str]) -> BenchmarkScores:
    """Score an official judgment file.

    Raises:
        [`OutputError`]: if a question is missing, unknown or duplicated.
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
            # The weight: each battle counts once.
            per_category[category][row["uid"]] = Row(100 * sum(scores) / len(scores), len(scores))
            pooled[category] += scores
    official = {}
    for category, scores in pooled.items():
        if scores:  # all games of a category may have failed
            mean, low, high = (100 * share for share in official_bootstrap(scores))
            official[f"{category}, official bootstrap"] = f"{mean:.1f} (-{mean - low:.1f} / +{high - mean:.1f})"
    return BenchmarkScores(
        headline=next(iter(per_category)),
        rows=per_category,
        counts={
            "questions": len(rows),
            "judgments that failed": sum(game is None for game in games),
            "judgments without a verdict": sum(label is None for label in labels),
            "judgments with an unknown label": sum(label not in (None, *BATTLE_SCORES) for label in labels),
            "questions dropped": len(rows) - sum(map(len, per_category.values())),
        },
        official=official,
        notes=(
            "A strong verdict counts as three battles; the intervals resample questions, the official ones battles.",
        ),
    )
