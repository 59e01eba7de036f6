"""Fit a judge with [`Doubts`] to a record of a real judge's probabilities (`real_judge`).

    python -m experiments.fit_doubts experiments/real_judge/qwen2.5-coder-1.5b.jsonl.gz

A record knows which of two answers is better, and not by how much. So one thing is assumed: they differ as two random
references do, by a normal number with the deviation `sqrt(2)`. The rollouts of a group are four times closer.

By how much the probabilities favour the better answer is half the difference of the log odds in both orders of a pair,
the difference of two mean scores, or that of two tilts. The tilt of an insertion is the mean log odds of a position
over the next lower one.

* If differences and errors are normal, the better one is favoured in a share `1/2 + atan(quality / error) / pi`. This
  gives the error of a judgment. By Laplace's rule, one more comparison counts as right and one more as wrong.
* The root mean square says what a unit of quality is worth.
* Half the sum of a pair's log odds is the position bias. How it varies over pairs is the fresh error, and the rest of
  the error lasts. The other kinds have no second judgment, so they get the same lasting share.
* Centre and width of the scores give the recorded means of mean and deviation. The mean answer has the quality 0.
* In lists, a better answer that stands first is above the other one more often than one that stands last. The normal
  quantiles of both shares give error and position bias.
"""

import argparse
import math
from collections.abc import Mapping, Sequence
from itertools import product
from pathlib import Path
from statistics import NormalDist, fmean, pstdev

from experiments.real_judge.ask import INSERTED
from experiments.real_judge.report import Verdicts, alone, opinions, read
from experiments.simulated_judge import Doubts, JudgeErrors
from rankbuffer_trl.judge import Reading

APART = math.sqrt(2)
STEP = APART * math.sqrt(2 / math.pi)  # by which a worse answer is worse on average


def fit(record: Sequence[Verdicts]) -> Doubts:
    """Return the judge with doubts that answers as in a record."""
    odds, places = zip(*opinions(record), strict=True)
    error, per_quality = error_and_worth(odds)
    fresh = min(pstdev(places) / per_quality, error)
    own = math.sqrt((error**2 - fresh**2) / 2)
    lasting = own**2 / (own**2 + fresh**2)

    leads = alone("score9", soft=True)
    rating_error, points = error_and_worth([lead for verdicts in record for lead in leads(verdicts).values()])
    rated = [v.reading for verdicts in record for name, v in verdicts.items() if name.startswith("score9 ")]
    spread = fmean(moments(reading.chances)[1] for reading in rated)
    centre, width = centre_and_width(fmean(reading.mean for reading in rated), spread)
    rise = moments(normal(centre + 0.1, width))[0] - moments(normal(centre - 0.1, width))[0]

    tilts = [{name: tilt(v[f"insert {name}"].reading) for name in INSERTED} for v in record if "insert good" in v]
    favours = [each["good"] - each[name] for each in tilts for name in INSERTED if name != "good"]
    place_error, step = error_and_worth(favours)
    ahead = STEP / 4  # of the mean candidate, compared with the mean anchor
    return Doubts(
        pair=JudgeErrors(math.hypot(own, fresh), lasting, bias=fmean(places) / per_quality),
        insertion=JudgeErrors(place_error / math.sqrt(2), lasting),
        rating=JudgeErrors(rating_error / math.sqrt(2), lasting),
        lists=list_errors(record, lasting),
        odds=per_quality,
        step=step,
        habit=fmean(number for each in tilts for number in each.values()) - step * ahead,
        points=points / (rise / 0.2),
        centre=centre,
        width=width,
    )


def error_and_worth(favours: Sequence[float]) -> tuple[float, float]:
    """Return the deviation of the error of a difference, in quality, and what a unit of quality is worth."""
    right = max((sum(favour > 0 for favour in favours) + 1) / (len(favours) + 2), 0.51)
    error = APART / math.tan(math.pi * (right - 0.5))
    return error, math.sqrt(fmean(favour**2 for favour in favours)) / math.hypot(APART, error)


def list_errors(record: Sequence[Verdicts], lasting: float) -> JudgeErrors:
    """Return the errors of judgments in lists."""
    right: dict[bool, list[bool]] = {True: [], False: []}
    gaps = []
    for name, verdict in (item for verdicts in record for item in verdicts.items()):
        kind, *shown = name.split()
        if kind in ("list", "list_reversed"):
            order = [shown[i] for i in verdict.reading.value]
            for each in set(shown) - {"good"}:
                gap = shown.index(each) - shown.index("good")
                gaps.append(abs(gap) / (len(shown) - 1))
                right[gap > 0].append(order.index("good") > order.index(each))
    first, last = (NormalDist().inv_cdf((sum(right[key]) + 1) / (len(right[key]) + 2)) for key in (True, False))
    error = STEP / max((first + last) / 2, 0.1)
    return JudgeErrors(error / math.sqrt(2), lasting, bias=error * (first - last) / 2 / fmean(gaps))


def tilt(reading: Reading) -> float:
    """Return the mean log odds of a position over the next lower one."""
    K = len(reading.chances) - 1
    return reading.log_odds(K, 0) / K


def normal(centre: float, width: float) -> dict[int, float]:
    """Return the probabilities of a discretised normal distribution over 0 to 9."""
    weights = {score: math.exp(-(((score - centre) / width) ** 2) / 2) for score in range(10)}
    return {score: weight / sum(weights.values()) for score, weight in weights.items()}


def moments(chances: Mapping[int, float]) -> tuple[float, float]:
    """Return mean and deviation of a score."""
    mean = sum(score * chance for score, chance in chances.items())
    return mean, math.sqrt(sum((score - mean) ** 2 * chance for score, chance in chances.items()))


def centre_and_width(mean: float, deviation: float) -> tuple[float, float]:
    """Return the centre and the width of the distribution whose mean and deviation are nearest."""
    grid = product((i / 20 for i in range(300)), (i / 20 for i in range(4, 100)))
    return min(grid, key=lambda at: math.dist(moments(normal(*at)), (mean, deviation)))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("record", type=Path)
    print(fit(read(parser.parse_args().record)))
