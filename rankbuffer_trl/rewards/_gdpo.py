"""GDPO: each rubric is judged on its own, and the scores are normalised per rubric before they are added.

Source: paper, appendix "Baseline Implementation Details": "GDPO separately evaluates each rubric and normalizes the
rubric-specific rewards before aggregation". GDPO normalises within the group, adds the weighted results, and
normalises over the batch. Rubric counts differ by query, so the first two are done here. TRL does the last, since the
recipe sets `scale_rewards: batch`: advantage = (reward - group mean) / (batch std + 1e-4). The paper leaves open the
prompt (here the pointwise one with a single rubric) and what a failed judgment does.

GDPO would also normalise the format reward in its group; here it is added as it is. With 2 % of invalid rollouts,
simulated advantages have the cosine 0.998 with GDPO's. TRL's `multi_objective_aggregation: normalize_then_sum` has
0.990, because it normalises the sum over rubrics once more.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import fmean, stdev

from ..buffer import AnchorBuffer
from ..groups import RolloutGroup
from ..judge import Judge, Question, pointwise_question
from ._method import GroupScore, RewardMethod, score_by_reward

EPSILON = 1e-4  # the one that TRL adds to a standard deviation


@dataclass(frozen=True)
class GDPO(RewardMethod):
    """A method whose reward is the weighted mean of a rollout's normalised scores, one per rubric.

    It asks 1 question per answered rollout and rubric. Rollouts without an answer take part in the normalisation with
    the score 0 and have the reward -1. A rollout with a failed judgment is unscored and takes no part.

    All rewards of a group are divided by `(G - 1) / sqrt(G)`, the largest possible normalised score, so that they lie
    in [-1, 1]. This factor is the same for all groups of one size, so the normalisation over the batch removes it from
    the rubrics again. The recipe divides `format_weight` by it too, or else the format reward would weigh 2.47 times
    as much.
    """

    name = "gdpo"

    async def score(self, group: RolloutGroup, buffer: AnchorBuffer | None, judge: Judge) -> GroupScore:
        rubrics, G = group.query.rubrics, len(group.rollouts)
        verdicts = iter(await judge.ask_all(self._questions(group)))
        scores = {rollout.id: [next(verdicts) for _ in rubrics] for rollout in group.answered}
        complete = {i: [s for s in row if s is not None] for i, row in scores.items() if None not in row}
        ids = list(complete)
        # Normalise each rubric within the group. Rollouts without an answer take part as zeros.
        columns = [
            normalise([complete[i][k] for i in ids] + [0] * len(group.empty))[: len(ids)] for k in range(len(rubrics))
        ]
        largest = (G - 1) / math.sqrt(G) or 1.0  # the z-score of one above `G - 1` equal ones; 0 for one rollout
        weights = [abs(rubric.weight) for rubric in rubrics]  # a fault lowers its own score already
        rewards: dict[int, float | None] = dict.fromkeys(scores)
        for place, i in enumerate(ids):
            z = sum(weight * column[place] for weight, column in zip(weights, columns, strict=True)) / sum(weights)
            rewards[i] = z / largest
        return score_by_reward(group, rewards)

    def most_shown(self, G: int) -> int:
        return 1

    def _questions(self, group: RolloutGroup) -> list[Question]:
        alone = [replace(group.query, rubrics=(rubric,)) for rubric in group.query.rubrics]
        return [pointwise_question(query, rollout.text, "rubric") for rollout in group.answered for query in alone]

    def calls(self, group: RolloutGroup, first: bool) -> tuple[int, int]:
        n = len(group.answered) * len(group.query.rubrics)
        return n, n


def normalise(values: Sequence[float]) -> list[float]:
    """Return z-scores as TRL computes them: with the sample standard deviation, plus epsilon."""
    if len(values) < 2:
        return [0.0] * len(values)  # one value has no deviation
    mean, std = fmean(values), stdev(values)
    return [(value - mean) / (std + EPSILON) for value in values]


METHOD = GDPO
