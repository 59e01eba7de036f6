"""A number of ours beside the official one."""

import math
from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Check:
    """A number of this project that may differ from the official one by `tolerance` at most."""

    name: str
    ours: float
    official: float
    tolerance: float = 0.0

    @property
    def agrees(self) -> bool:
        """Whether the difference is within the tolerance. NaN agrees with nothing."""
        return abs(self.ours - self.official) <= self.tolerance


def worst(name: str, pairs: Mapping[str, tuple[float, float]], tolerance: float = 0.0) -> Check:
    """Return the comparison with the largest difference of our and the official number, among pairs by name."""

    def distance(key: str) -> float:
        gap = abs(pairs[key][0] - pairs[key][1])
        return math.inf if math.isnan(gap) else gap

    apart = max(pairs, key=distance)
    return Check(f"{name}, the furthest of {len(pairs)}: {apart}", *pairs[apart], tolerance)
