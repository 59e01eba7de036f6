"""Fit a judge with [`Doubts`] to a record of a real judge's probabilities (`real_judge`).

    python -m experiments.fit_doubts experiments/real_judge/record.jsonl.gz

A record knows which of two answers is better, and not by how much. So one thing is assumed: they differ as two random
references do, by a normal number with the deviation `sqrt(2)`. The rollouts of a group are four times closer.

By how much the probabilities favour the better answer is half the difference of the log odds in both orders of a pair,
the difference of two mean scores, or that of two tilts. The tilt of an insertion is the mean log odds of a position
over the next lower one.

* If differences and errors are normal, the better one is favoured in a share `1/2 + atan(quality / error) / pi`. This
  gives the error of looks. By Laplace's rule, one more comparison counts as right and one more as wrong.
* The root mean square says what a unit of quality is worth.
* Half the sum of a pair's log odds is the place bias. How it varies over pairs is the fresh error, and the rest of the
  error lasts. The other kinds have no second look, so they get the same lasting share.
* Centre and width of the scores give the recorded means of mean and deviation. The mean answer has the quality 0.
* In lists, a better answer that stands first is above the other one more often than one that stands last. The normal
  quantiles of both shares give error and place bias.
"""

import argparse
import gzip
import json
import math
from collections.abc import Sequence
from itertools import product
from pathlib import Path
from statistics import NormalDist, fmean, pstdev

from experiments.simulated_judge import Doubts, JudgeErrors

WORSE = ("good_cut", "good_shuffled", "off_topic", "weak")  # than `good`
PAIRS = (*(("good", each) for each in WORSE), ("weak", "weak_shuffled"))
APART = math.sqrt(2)
STEP = APART * math.sqrt(2 / math.pi)  # by which a worse answer is worse on average
Verdicts = dict[str, list]


def fit(record: Sequence[Verdicts]) -> Doubts:
    """Return the judge with doubts that answers as in a record, which has the verdicts of each query by name."""
    odds, sums = [], []
    for verdicts, (one, other) in product(record, PAIRS):
        if {f"pair {one} {other}", f"pair {other} {one}"} <= verdicts.keys():
            lead, turned = (log_odds(verdicts[f"pair {a} {b}"]) for a, b in ((one, other), (other, one)))
            odds.append((lead - turned) / 2)
            sums.append((lead + turned) / 2)
    error, per_quality = error_and_worth(odds)
    fresh = min(pstdev(sums) / per_quality, error)
    own = math.sqrt((error**2 - fresh**2) / 2)
    noise, lasting = math.hypot(own, fresh), own**2 / (own**2 + fresh**2)
    pair = JudgeErrors(noise, lasting, bias=fmean(sums) / per_quality)

    means = [
        mean(verdicts[f"score9 {a}"]) - mean(verdicts[f"score9 {b}"]) for verdicts, (a, b) in product(record, PAIRS)
    ]
    score_error, points = error_and_worth(means)
    rated = [verdict for verdicts in record for name, verdict in verdicts.items() if name.startswith("score9 ")]
    middle, width = centre_and_width(fmean(map(mean, rated)), fmean(map(deviation, rated)))
    points /= (moments(middle + 0.1, width)[0] - moments(middle - 0.1, width)[0]) / 0.2

    inserted = [verdicts for verdicts in record if "insert good" in verdicts]
    tilts = [tilt(v["insert good"]) - tilt(v[f"insert {each}"]) for v, each in product(inserted, WORSE[:-1])]
    place_error, step = error_and_worth(tilts)
    habit = fmean(tilt(verdict) for v in inserted for name, verdict in v.items() if name.startswith("insert "))
    habit -= step * STEP / 4  # by which the mean candidate is above the mean anchor: weak_shuffled, weak and good_2
    return Doubts(
        pair=pair,
        insertion=JudgeErrors(place_error / math.sqrt(2), lasting),
        rating=JudgeErrors(score_error / math.sqrt(2), lasting),
        lists=list_errors(record, lasting),
        odds=per_quality,
        step=step,
        habit=habit,
        points=points,
        centre=middle,
        width=width,
    )


def error_and_worth(favours: Sequence[float]) -> tuple[float, float]:
    """Return the deviation of the error of a difference, in quality, and what a unit of quality is worth."""
    right = max((sum(favour > 0 for favour in favours) + 1) / (len(favours) + 2), 0.51)
    error = APART / math.tan(math.pi * (right - 0.5))
    return error, math.sqrt(fmean(favour**2 for favour in favours)) / math.hypot(APART, error)


def list_errors(record: Sequence[Verdicts], lasting: float) -> JudgeErrors:
    """Return the errors of looks in lists."""
    right: dict[bool, list[bool]] = {True: [], False: []}
    gaps = []
    for name, verdict in (item for verdicts in record for item in verdicts.items()):
        kind, *shown = name.split()
        if kind in ("list", "list_reversed"):
            order = [shown[i] for i in verdict]
            for each in WORSE:
                gap = shown.index(each) - shown.index("good")
                gaps.append(abs(gap) / (len(shown) - 1))
                right[gap > 0].append(order.index("good") > order.index(each))
    first, last = (NormalDist().inv_cdf((sum(right[key]) + 1) / (len(right[key]) + 2)) for key in (True, False))
    error = STEP / max((first + last) / 2, 0.1)
    return JudgeErrors(error / math.sqrt(2), lasting, bias=error * (first - last) / 2 / fmean(gaps))


def log_odds(chances: dict[str, float]) -> float:
    """Return the log odds of the first of a pair."""
    return math.log(chances["A"] / chances["B"])


def mean(chances: dict[str, float]) -> float:
    """Return the mean score."""
    return sum(int(score) * chance for score, chance in chances.items())


def deviation(chances: dict[str, float]) -> float:
    """Return the standard deviation of the score."""
    return math.sqrt(sum((int(score) - mean(chances)) ** 2 * chance for score, chance in chances.items()))


def tilt(chances: dict[str, float]) -> float:
    """Return the mean log odds of a position over the next lower one."""
    K = len(chances) - 1
    return math.log(max(chances[str(K)], 1e-6) / max(chances["0"], 1e-6)) / K


def moments(centre: float, width: float) -> tuple[float, float]:
    """Return mean and deviation of a discretised normal distribution over 0 to 9."""
    weights = {str(score): math.exp(-(((score - centre) / width) ** 2) / 2) for score in range(10)}
    chances = {score: weight / sum(weights.values()) for score, weight in weights.items()}
    return mean(chances), deviation(chances)


def centre_and_width(average: float, spread: float) -> tuple[float, float]:
    """Return the centre and the width of the distribution whose mean and deviation are nearest."""
    grid = product((i / 20 for i in range(300)), (i / 20 for i in range(4, 100)))
    return min(grid, key=lambda at: math.dist(moments(*at), (average, spread)))


def read(path: Path) -> list[Verdicts]:
    """Return the verdicts of each query by name: probabilities, or the value where there are none."""
    rows = map(json.loads, gzip.decompress(path.read_bytes()).splitlines())
    found = [{name: value for name, (value, _) in row["verdicts"].items()} for row in rows]
    soft = ("pair ", "score9 ", "insert ")
    return [{name: v[1] if name.startswith(soft) else v for name, v in verdicts.items()} for verdicts in found]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("record", type=Path)
    print(fit(read(parser.parse_args().record)))
