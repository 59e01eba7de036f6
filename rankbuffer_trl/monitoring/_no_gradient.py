"""Say why a policy does not learn: several generations in a row in which no rollout has a gradient."""

import math
from collections import defaultdict
from collections.abc import Sequence
from itertools import combinations
from statistics import fmean
from typing import NamedTuple

from ..groups import RolloutGroup
from ..rewards._method import GroupScore

MANY_TIES = 0.9  # of the pairs of different answers of a group
TIED_GENERATIONS = 3  # generations in a row: all groups of one may tie by chance
ADVANTAGE_TOLERANCE = 5e-3  # the most that float32 leaves of an advantage of equal rewards, which TRL divides by 1e-4

CAUSES = {
    "masked": "all completions that count are cut off, and mask_truncated_completions leaves them out: raise"
    " max_completion_length",
    "unscored": "no rollout with an answer has a reward, since the judge fails: see judge/failures",
    "equal": "the completions of each group are equal, so the policy has collapsed: raise the temperature, or resume"
    " from an earlier checkpoint",
    "tied": "the rewards of each group are equal, so the judge tells no answer from another: read its answers in the"
    " store, and run rankbuffer-audit",
}
BETA = ". What is left is beta, which draws the policy back to its reference"


class Pull(NamedTuple):
    """What a rollout adds to the gradient."""

    advantage: float
    tokens: int | None  # a hash of the tokens that count; `None` if none counts


def no_gradient(pulls: Sequence[Pull], G: int, unscored: bool) -> str | None:
    """Return the cause why the rollouts of a generation, group by group, have no gradient. `None` if they have one.

    Args:
        pulls (`Sequence[Pull]`):
            One per rollout of all processes.
        unscored (`bool`):
            Whether no rollout with an answer has a reward.
    """
    sums: defaultdict[tuple[int, int], float] = defaultdict(float)
    for i, pull in enumerate(pulls):
        if pull.tokens is not None:  # advantages of equal completions add up, those of a whole equal group to 0
            sums[i // G, pull.tokens] += pull.advantage
    if any(abs(total) > ADVANTAGE_TOLERANCE for total in sums.values()):
        return None
    differ = [pull for pull in pulls if abs(pull.advantage) > ADVANTAGE_TOLERANCE]
    if not sums or (differ and all(pull.tokens is None for pull in differ)):
        return "masked"
    if unscored:
        return "unscored"
    return "equal" if differ or len(sums) == len({group for group, _ in sums}) else "tied"


class TieMonitor:
    """The generations in a row in which nearly all answers tie. Where all do, there is no gradient."""

    def __init__(self) -> None:
        self._generations: float = 0

    def check(self, groups: Sequence[RolloutGroup], scores: Sequence[GroupScore]) -> str | None:
        """Check the next generation. Return what to warn of, if anything, once."""
        answers = [
            {(r.text, score.rewards[r.id]) for r in g.answered} for g, score in zip(groups, scores, strict=True)
        ]
        tied = [one == other is not None for each in answers for (_, one), (_, other) in combinations(each, 2)]
        many = bool(tied) and MANY_TIES < (share := fmean(tied)) < 1
        self._generations = self._generations + 1 if many else min(self._generations, 0)
        if self._generations < TIED_GENERATIONS:
            return None
        self._generations = -math.inf
        return (
            f"{share:.0%} of the pairs of different answers have equal rewards, and nearly as many had before, so the"
            " policy learns little while the judge is paid: read the judge's answers in the store, and run"
            " rankbuffer-audit"
        )


class GradientMonitor:
    """The generations in a row without a gradient, and what was said about them."""

    def __init__(self, G: int, beta: float):
        self.G = G
        self.beta = beta  # the weight of the distance to the reference policy, a gradient of its own
        self._generations = 0
        self._warned: set[str] = set()  # each cause is said once

    def check(self, pulls: Sequence[Pull], unscored: bool) -> str | None:
        """Check the next generation. Return what to warn of, if anything."""
        cause = no_gradient(pulls, self.G, unscored)
        self._generations = self._generations + 1 if cause else 0
        if cause is None or self._generations < TIED_GENERATIONS or cause in self._warned:
            return None
        self._warned.add(cause)
        # Beta acts on the tokens that count, and there are none.
        beta = BETA if self.beta and cause != "masked" else ""
        return (
            f"no rollout of the last {self._generations} generations has a gradient, so the policy learns nothing"
            f" while the judge is paid: {CAUSES[cause]}{beta}"
        )
