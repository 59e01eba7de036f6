"""A number of ours beside the official one."""

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Check:
    """A number that must agree with an official one.

    Args:
        name (`str`):
            What the number is.
        ours (`float`):
            The number that this project computes.
        official (`float`):
            The official number.
        tolerance (`float`, *optional*, defaults to `0.0`):
            The largest difference that is accepted.
    """

    name: str
    ours: float
    official: float
    tolerance: float = 0.0

    @property
    def difference(self) -> float:
        """The difference `ours - official`."""
        return self.ours - self.official

    @property
    def agrees(self) -> bool:
        """Whether the difference is within the tolerance. NaN agrees with nothing."""
        return abs(self.difference) <= self.tolerance


def worst(name: str, pairs: Mapping[str, tuple[float, float]], tolerance: float = 0.0) -> Check:
    """Return the comparison with the largest difference.

    Args:
        name (`str`):
            What all the numbers are.
        pairs (`Mapping[str, tuple[float, float]]`):
            Our and the official number by name, at least one pair.
        tolerance (`float`, *optional*, defaults to `0.0`):
            See [`Check`].
    """
    apart = max(pairs, key=lambda key: distance(*pairs[key]))
    return Check(f"{name}, the furthest of {len(pairs)}: {apart}", *pairs[apart], tolerance)


def distance(ours: float, official: float) -> float:
    """Return the absolute difference of two numbers, infinity if one is NaN."""
    gap = abs(ours - official)
    return gap if gap == gap else float("inf")
