"""Soft ratings: pointwise scores by the mean under the judge's probabilities instead of its one number.

This method is ours. A judge that says 8 to most responses still finds 9 likelier for some than for others. The mean
over the probabilities of all scores shows this, at no further token. The scale ends at 9, so that a score is one
digit: where digits are separate tokens, nobody could tell how 1 and 10 share the token `1`.
"""

from dataclasses import dataclass, replace

from ...groups import RolloutGroup
from ...judge import Question, Reading, pointwise_question
from .._pointwise import Pointwise

RATING_MAX = 9


@dataclass(frozen=True)
class RatingsSoft(Pointwise):
    """A method that scores each rollout on its own, from 0 to 9: reward `2 m / 9 - 1` for the mean score `m`.

    The mean is over the probabilities that the judge gives to all scores. It asks 1 question per answered rollout: 8
    for a group of 8. The judge's server must return `top_logprobs`. A rollout without an answer has the reward -1. A
    failed judgment leaves its rollout unscored.
    """

    name = "ratings_soft"

    def reward(self, verdict: Reading) -> float:
        return 2 * verdict.mean / RATING_MAX - 1

    def questions(self, group: RolloutGroup) -> list[Question]:
        return [replace(pointwise_question(group.query, r.text, most=RATING_MAX), soft=True) for r in group.answered]


METHOD = RatingsSoft
