"""Estimate the errors of a judge from its verdicts on pairs that were shown in both orders.

The model has one latent number for each look at a pair: `z = s + e + b` if the pair is shown in one order, and
`z = -s + e + b` if the pair is shown in the other order. The first response shown wins if `z > t`, the second one wins
if `z < -t`, and the verdict is a tie otherwise. The parts have these meanings:

* `s` is the settled opinion: what the judge would say on average over presentations. It is truth plus lasting error.
* `e` is fresh noise: what changes with the presentation, drawn anew for each look.
* `b` is the position bias, and `t` is half the width of ties.

All parts are normal around 0, and the variance of `s + e` is 1. So the variances of truth, lasting error and fresh
noise are shares. A pair's labels decide which part of `s` is truth. Errors of the labels count as lasting error.

Each number is an array: the estimate itself comes first, then those of the bootstrap samples of prompts.
"""

from dataclasses import dataclass
from functools import partial

import numpy as np
from scipy.special import ndtr, ndtri

SAMPLES = 1000  # bootstrap samples
NODES, WEIGHTS = np.polynomial.legendre.leggauss(24)
LEAST = 0.002  # shares are kept this far from 0 and 1, where the quantiles of the normal distribution are infinite
Array = np.ndarray
Margins = tuple[Array, Array]  # the position bias of a look, and half the width of its ties


@dataclass(frozen=True)
class Verdicts:
    """The verdicts of one judge, asked in one way, on the pairs of one data set.

    Args:
        judge, data, prompt (`str`):
            Names of the judge, of the data set, and of the prompt template.
        asked (`np.ndarray`):
            The number of each pair's prompt, shape `(pairs,)`. Pairs of one prompt are resampled together.
        looks (`np.ndarray`):
            Shape `(pairs, 2, repeats)`: 1 if the first response shown won, -1 if the second one won, 0 for a tie, NaN
            for an answer that cannot be read. Index 0 of the second axis shows the pair as stored, index 1 swapped.
        labels (`np.ndarray`, *optional*):
            1 if the first stored response is better, -1 if the second one is. Shape `(pairs,)`.
        longer (`np.ndarray`, *optional*):
            1 if the first stored response is longer, -1 if the second one is, 0 for equal lengths. Shape `(pairs,)`.
    """

    judge: str
    data: str
    prompt: str
    asked: Array
    looks: Array
    labels: Array | None = None
    longer: Array | None = None


def both_below(h: Array, k: Array, r: Array) -> Array:
    """Return P(x < h, y < k) of two standard normal variables with correlation `r`, in -1..1."""
    angle = np.arcsin(r)[..., None] * (NODES + 1) / 2
    h, k = np.asarray(h)[..., None], np.asarray(k)[..., None]
    exponent = (h * h + k * k - 2 * h * k * np.sin(angle)) / (2 * np.cos(angle) ** 2)
    return (ndtr(h) * ndtr(k))[..., 0] + np.arcsin(r) / (4 * np.pi) * (np.exp(-exponent) @ WEIGHTS)


def two_looks(one: Margins, other: Margins, r: Array) -> tuple[Array, Array]:
    """Return the chances that two looks with correlation `r` name the same place, and that they name opposite places.

    In opposite orders, `r` is minus the share of settled opinion. In the same order, it is the share that repeats.
    Each look has its own position bias and half the width of its ties.
    """
    (high, low), (up, down) = ((bias - ties, -bias - ties) for bias, ties in (one, other))
    same = both_below(high, up, r) + both_below(low, down, r)
    return same, both_below(high, down, -r) + both_below(low, up, -r)


def product(one: Margins, other: Margins, r: Array) -> Array:
    """Return the mean product of two verdicts, each 1, 0 or -1 for a place, of looks with correlation `r`."""
    same, opposite = two_looks(one, other, r)
    return same - opposite


def consistency(bias: Array, ties: Array, settled: Array) -> Array:
    """Return the chance that two looks in opposite orders agree about the responses. Two ties agree."""
    same, opposite = two_looks((bias, ties), (bias, ties), -settled)
    one = ndtr(bias - ties) + ndtr(-bias - ties)
    return opposite + 1 - 2 * one + same + opposite


def accuracy(bias: Array, ties: Array, truth: Array) -> Array:
    """Return the chance of the right verdict, where ties count half and `truth` is a look's correlation with truth."""
    right = both_below(bias - ties, np.zeros_like(bias), truth) + both_below(-bias - ties, np.zeros_like(bias), truth)
    return right + (1 - ndtr(bias - ties) - ndtr(-bias - ties)) / 2


def solved(moment, target: Array) -> Array:
    """Return the correlation in -1..1 at which an increasing `moment` has the value `target`."""
    low, high = np.full_like(target, -0.9999), np.full_like(target, 0.9999)
    for _ in range(30):
        middle = (low + high) / 2
        below = moment(middle) < target
        low, high = np.where(below, middle, low), np.where(below, high, middle)
    return (low + high) / 2


def resampled(asked: Array, seed: int, samples: int = SAMPLES) -> Array:
    """Return how often each pair counts, shape `(1 + samples, pairs)`: once each, then in samples of prompts."""
    names, prompt = np.unique(asked, return_inverse=True)
    drawn = np.random.default_rng(seed).multinomial(len(names), np.full(len(names), 1 / len(names)), size=samples)
    return np.vstack([np.ones(len(asked)), drawn[:, prompt]])


def mean(weights: Array, values: Array) -> Array:
    """Return the weighted means of `values` without NaN, one for each row of weights."""
    known = ~np.isnan(values)
    return weights @ np.where(known, values, 0.0) / np.maximum(weights @ known, 1e-9)


def bias_and_ties(first: Array, second: Array) -> Margins:
    """Return the position bias and half the width of ties from the shares of verdicts for each place."""
    first, second = (ndtri(np.clip(share, LEAST, 1 - LEAST)) for share in (first, second))
    return (first - second) / 2, -(first + second) / 2


def estimate(verdicts: Verdicts, seed: int = 0, samples: int = SAMPLES) -> dict[str, Array]:
    """Estimate the errors of a judge.

    Pairs with an unreadable answer in all repeats of one order are left out.

    Args:
        verdicts ([`Verdicts`]):
            The verdicts of a judge on a data set.
        seed (`int`, *optional*, defaults to `0`):
            Seed of the bootstrap. Records of the same pairs with the same seed draw the same samples.
        samples (`int`, *optional*, defaults to `1000`):
            Number of bootstrap samples.

    Returns:
        `dict[str, np.ndarray]`: arrays of length `1 + samples`:

        - `unreadable`: share of the looks without a verdict. The other numbers leave them out.
        - `tied`, `first`: shares of ties, and of verdicts for the first response shown (ties count half).
        - `consistent`: share of pairs with the same verdict in both orders.
        - `bias`, `ties`: `b` and `t` of the model.
        - `settled`, `fresh`: shares of variance of settled opinion and fresh noise. Their sum is 1.
        - `pair_noise`, `pair_bias`: standard deviation of the fresh noise of one response, and what the first place
          gains. The unit is the spread of the settled opinion over
          responses.
        - `repeated`, `sampling` with repeats only: share of answers that are the same for the same prompt, and the
          share of variance that a repeat of the same prompt changes.
        - `accuracy`, `truth`, `lasting`, `agreement` with labels only: share of right verdicts (ties half), shares of
          variance, and the correlation of settled opinion with truth.
        - `error`, `lasting_share`, `error_bias` with labels only: the errors as settings of the simulated judge
          (`noise`, `lasting` and `bias` of `JudgeErrors`). The unit is the spread of true quality over responses.
        - `right_longer`, `right_shorter`, `prefers_longer` with lengths only: accuracy where the better response is
          the longer or the shorter one, and the share of verdicts for the longer one if it were better in half of the
          pairs.
    """
    looks = verdicts.looks
    weights = resampled(verdicts.asked, seed, samples)
    readable = ~np.isnan(looks)
    found = {"unreadable": mean(weights, 1 - readable.mean(axis=(1, 2)))}
    used = readable.any(axis=2).all(axis=1)
    weights, looks, readable = weights[:, used], looks[used], readable[used]
    averaged = partial(mean, weights)

    won, lost, drew = (np.nanmean(np.where(readable, looks == value, np.nan), axis=2) for value in (1, -1, 0))
    first, second = averaged(won.mean(axis=1)), averaged(lost.mean(axis=1))
    bias, ties = bias_and_ties(first, second)
    agree = won[:, 0] * lost[:, 1] + lost[:, 0] * won[:, 1] + drew[:, 0] * drew[:, 1]
    products = partial(product, (bias, ties), (bias, ties))
    settled = -solved(products, averaged((won - lost).prod(axis=1)))
    found |= {"tied": averaged(drew.mean(axis=1)), "first": (1 + first - second) / 2, "consistent": averaged(agree)}
    found |= {"bias": bias, "ties": ties, "settled": settled, "fresh": 1 - settled}
    spread = np.sqrt(np.maximum(settled, 1e-3))
    found |= {"pair_noise": np.sqrt(1 - settled) / spread, "pair_bias": bias * np.sqrt(2) / spread}

    if looks.shape[2] > 1:
        count = readable.sum(axis=2)
        pairs = np.where(count > 1, count * (count - 1), np.nan)
        total = np.nansum(looks, axis=2)
        repeats = solved(products, averaged(np.nanmean((total**2 - np.nansum(looks**2, axis=2)) / pairs, axis=1)))
        kinds = sum(share * count * (share * count - 1) for share in (won, lost, drew))
        found |= {"repeated": averaged(np.nanmean(kinds / pairs, axis=1)), "sampling": 1 - repeats}

    if verdicts.labels is not None:
        labels = verdicts.labels[used]
        right = (1 + labels * (won - lost)[:, 0]) / 2, (1 - labels * (won - lost)[:, 1]) / 2
        rights = (right[0] + right[1]) / 2
        truth = solved(partial(accuracy, bias, ties), averaged(rights))
        found |= {"accuracy": averaged(rights), "truth": truth**2, "lasting": settled - truth**2}
        found["agreement"] = truth / spread
        known = np.maximum(truth**2, 0.01)
        found |= {"error": np.sqrt((1 - known) / known), "error_bias": bias * np.sqrt(2 / known)}
        found["lasting_share"] = (settled - truth**2) / np.maximum(1 - truth**2, 1e-3)
        if verdicts.longer is not None:
            longer = labels * verdicts.longer[used]
            long, short = (averaged(np.where(longer == side, rights, np.nan)) for side in (1, -1))
            found |= {"right_longer": long, "right_shorter": short, "prefers_longer": (1 + long - short) / 2}
    return found


def interval(values: Array) -> list[float]:
    """Return the estimate and the two ends of its 95 % interval."""
    return [float(values[0]), *map(float, np.percentile(values[1:], (2.5, 97.5)))]


def same_opinion(one: Verdicts, other: Verdicts, seed: int = 0, samples: int = SAMPLES) -> Array:
    """Estimate the correlation of two looks at the same pairs, asked in two ways and in opposite orders.

    Divided by the root of both shares of settled opinion, it is the correlation of the two settled opinions.
    """
    known = ~(np.isnan(one.looks).any(axis=(1, 2)) | np.isnan(other.looks).any(axis=(1, 2)))
    weights = resampled(one.asked, seed, samples)[:, known]
    looks = [verdicts.looks[known].mean(axis=2) for verdicts in (one, other)]
    margins = [bias_and_ties(*(mean(weights, (v == place).mean(axis=1)) for place in (1, -1))) for v in looks]
    crossed = (looks[0] * looks[1][:, ::-1]).mean(axis=1)
    return -solved(partial(product, *margins), mean(weights, crossed))


GRID = np.linspace(-6, 6, 1201)
DENSITY = np.exp(-GRID * GRID / 2) / np.sqrt(2 * np.pi) * (GRID[1] - GRID[0])


def rated(points: Array, truth: Array) -> tuple[Array, Array]:
    """Predict ties and accuracy of ratings from the model of a pair's look.

    The judge rounds its look at each response to an integer. Two ratings are tied with the chance `1 - d`, where `d`
    is the difference of the looks in points, if it is below 1.

    Args:
        points (`np.ndarray`):
            Standard deviation of the difference of the looks, in points of the scale.
        truth (`np.ndarray`):
            Correlation of this difference with the truth.

    Returns:
        `tuple[np.ndarray, np.ndarray]`: the shares of tied pairs and of right ones, where a tie counts half.
    """
    tied = np.maximum(0, 1 - np.abs(points[:, None] * GRID))
    right = ndtr(truth[:, None] * np.abs(GRID) / np.sqrt(1 - np.minimum(truth[:, None] ** 2, 0.9999)))
    return tied @ DENSITY, (tied / 2 + right * (1 - tied)) @ DENSITY


def points_of(tied: Array) -> Array:
    """Return the standard deviation in points at which the share `tied` of pairs has equal ratings."""
    low, high = np.full_like(tied, np.log(0.05)), np.full_like(tied, np.log(50.0))
    for _ in range(25):
        middle = (low + high) / 2
        many = rated(np.exp(middle), np.zeros_like(tied))[0] > tied
        low, high = np.where(many, middle, low), np.where(many, high, middle)
    return np.exp((low + high) / 2)


def within(predicted: Array, seen: Array) -> bool:
    """Return whether a prediction lies within 1.96 standard errors of what was seen."""
    difference = predicted - seen
    return bool(abs(difference[0]) <= 1.96 * difference[1:].std())
