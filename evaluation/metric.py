"""Means and their uncertainty. Pure functions over rows; every number of the evaluation is a weighted mean of rows."""

from collections.abc import Mapping
from functools import lru_cache
from typing import NamedTuple

import numpy as np

RESAMPLES = 2_000
LEVEL = 0.95


class Row(NamedTuple):
    """What one prompt adds to a metric. The metric is `sum(value * weight) / sum(weight)` over prompts."""

    value: float
    weight: float = 1.0


Rows = Mapping[str, Row]
"""Rows of one metric by prompt id. A prompt without a judgment has none."""


class Interval(NamedTuple):
    """An estimate with a 95 % interval, of `n` prompts."""

    value: float
    low: float
    high: float
    n: int


def mean(rows: Rows) -> float:
    """The weighted mean; NaN without rows."""
    total = sum(row.weight for row in rows.values())
    return sum(row.value * row.weight for row in rows.values()) / total if total else float("nan")


def interval(rows: Rows, seed: int = 0) -> Interval:
    """The mean with a percentile bootstrap over prompts, so that prompts, not judgments, are what is sampled.

    Args:
        rows (`Rows`):
            One metric.
        seed (`int`, *optional*, defaults to `0`):
            Of the resamples.
    """
    value = mean(rows)
    if len(rows) < 2:
        return Interval(value, float("nan"), float("nan"), len(rows))
    values, weights = (np.array(column) for column in zip(*rows.values(), strict=True))
    counts = resample(len(rows), seed)
    return Interval(value, *percentiles(counts @ (values * weights) / (counts @ weights)), len(rows))


def paired_difference(first: Rows, second: Rows, seed: int = 0) -> Interval:
    """How much higher `second` is than `first`, over the prompts that both have; the same resamples serve both.

    Args:
        first (`Rows`):
            The metric of one model.
        second (`Rows`):
            The same metric of another.
        seed (`int`, *optional*, defaults to `0`):
            Of the resamples.
    """
    shared = sorted(first.keys() & second.keys())
    a, b = ({key: rows[key] for key in shared} for rows in (first, second))
    value = mean(b) - mean(a)
    if len(shared) < 2:
        return Interval(value, float("nan"), float("nan"), len(shared))
    counts = resample(len(shared), seed)
    means = []
    for rows in (a, b):
        values, weights = (np.array(column) for column in zip(*rows.values(), strict=True))
        means.append(counts @ (values * weights) / (counts @ weights))
    return Interval(value, *percentiles(means[1] - means[0]), len(shared))


@lru_cache(maxsize=2)
def resample(n: int, seed: int) -> np.ndarray:
    """How often each of `n` prompts occurs in each resample: an array of `RESAMPLES` x `n`."""
    return np.random.default_rng(seed).multinomial(n, np.full(n, 1 / n), size=RESAMPLES)


def percentiles(values: np.ndarray) -> tuple[float, float]:
    """The ends of the central 95 %. A resample without any weight does not count."""
    low, high = np.nanquantile(values, [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    return float(low), float(high)
