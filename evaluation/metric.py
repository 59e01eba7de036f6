"""Means with their uncertainty: pure functions over rows. Every metric is a weighted mean of rows."""

from collections.abc import Mapping
from functools import lru_cache
from typing import NamedTuple

import numpy as np

RESAMPLES = 2_000
CONFIDENCE = 0.95


class Row(NamedTuple):
    """The contribution of one prompt to a metric, which is `sum(value * weight) / sum(weight)` over prompts."""

    value: float
    weight: float = 1.0


Rows = Mapping[str, Row]
"""The rows of one metric by prompt id. A prompt without a judgment has no row."""


class Interval(NamedTuple):
    """An estimate over `n` prompts with its 95 % interval."""

    value: float
    low: float
    high: float
    n: int


def weighted_mean(rows: Rows) -> float:
    """Return the weighted mean of rows, NaN if there are none."""
    total = sum(row.weight for row in rows.values())
    return sum(row.value * row.weight for row in rows.values()) / total if total else float("nan")


def bootstrap_interval(rows: Rows, seed: int = 0) -> Interval:
    """Return the mean with a percentile bootstrap."""
    value = weighted_mean(rows)
    if len(rows) < 2:  # one prompt says nothing about the spread
        return Interval(value, float("nan"), float("nan"), len(rows))
    values, weights = (np.array(column) for column in zip(*rows.values(), strict=True))
    counts = resample(len(rows), seed)  # prompts, not judgments: those of one prompt are not independent
    return Interval(value, *percentiles(counts @ (values * weights) / (counts @ weights)), len(rows))


def paired_difference(first: Rows, second: Rows, seed: int = 0) -> Interval:
    """Return how much higher `second` is than `first` over the prompts of both."""
    shared = sorted(first.keys() & second.keys())  # sorted: the resamples draw places, and each must name one prompt
    a, b = ({key: rows[key] for key in shared} for rows in (first, second))
    value = weighted_mean(b) - weighted_mean(a)
    if len(shared) < 2:
        return Interval(value, float("nan"), float("nan"), len(shared))
    counts = resample(len(shared), seed)  # the same for both, since the difference is paired
    means = []
    for rows in (a, b):
        values, weights = (np.array(column) for column in zip(*rows.values(), strict=True))
        means.append(counts @ (values * weights) / (counts @ weights))
    return Interval(value, *percentiles(means[1] - means[0]), len(shared))


@lru_cache(maxsize=2)  # metrics over as many prompts share the draw
def resample(n: int, seed: int) -> np.ndarray:
    """Draw how often each of `n` prompts occurs in each resample: an array of `RESAMPLES` x `n`."""
    return np.random.default_rng(seed).multinomial(n, np.full(n, 1 / n), size=RESAMPLES)


def percentiles(values: np.ndarray) -> tuple[float, float]:
    """Return the ends of the central 95 %."""
    low, high = np.nanquantile(
        values, [(1 - CONFIDENCE) / 2, (1 + CONFIDENCE) / 2]
    )  # NaN is a resample whose weights sum to 0
    return float(low), float(high)
