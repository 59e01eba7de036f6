"""What an audit reads about a judge, and the model of the judge that it estimates. This file is ours, not the paper's.

A judge's *settled opinion* of a response is what the judge would say on average over all presentations. The model
says how far one look differs from the settled opinion. Nothing here says how far the settled opinion is from truth:
the verdicts of a judge alone do not hold that.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

CROWD = 8  # the number of responses in the lists that `list_noise` is about


@dataclass(frozen=True)
class QueryLooks:
    """What the audit read about one query. Its responses have the numbers `0..n-1`.

    Args:
        query_id (`str`):
            The query.
        lists (`Sequence`):
            One `(shown, order)` per list. `shown` holds the responses in the order of the prompt. `order` holds the
            same responses from worst to best, or it is `None` if the judge gave no valid answer.
        pairs (`Sequence`):
            One `((first, second), better)` per pair, in the order of the prompt. `better` is one of the two, or `None`
            if the judge gave no valid answer.
        scores (`Sequence[float | None]`, *optional*, defaults to `()`):
            One rating per response; `None` for a rating that failed. Empty if the audit asked for none.
        means (`Sequence[float]`, *optional*, defaults to `()`):
            The mean rating of each response under the judge's probabilities. Empty if one is not known.

    Example:

    ```python
    from .model import QueryLooks

    QueryLooks("q1", lists=[((0, 1, 2), (2, 0, 1)), ((2, 1, 0), None)], pairs=[((0, 1), 1), ((1, 0), 1)])
    ```
    """

    query_id: str
    lists: Sequence[tuple[tuple[int, ...], tuple[int, ...] | None]]
    pairs: Sequence[tuple[tuple[int, int], int | None]]
    scores: Sequence[float | None] = ()
    means: Sequence[float] = ()

    @property
    def n(self) -> int:
        """The number of responses."""
        shown = [i for order, _ in self.lists for i in order] + [i for pair, _ in self.pairs for i in pair]
        return max([*shown, len(self.scores) - 1], default=-1) + 1

    @property
    def orders(self) -> list[tuple[int, ...]]:
        """The valid orders, each from worst to best."""
        return [order for _, order in self.lists if order is not None]

    @property
    def ratings(self) -> list[float]:
        """The ratings of all responses; empty if one of them failed."""
        ratings = [score for score in self.scores if score is not None]
        return ratings if len(ratings) == len(self.scores) else []


@dataclass(frozen=True)
class JudgeModel:
    """The errors of a judge's looks, relative to its settled opinion.

    The unit of all sizes is the standard deviation of the settled opinion within a typical group. All numbers but
    `kappa` have no upper limit. A look at a response is its settled opinion, plus the gain of its slot, plus fresh
    normal noise. The judge orders responses by their looks.

    Args:
        list_noise (`float`):
            Standard deviation of the noise of one look in a list of 8, above 0.
        list_bias (`float`):
            What the first slot of a list gains over the last one. The gain falls evenly from slot to slot, and it is
            the same for all lengths of a list. A negative number favours late slots.
        list_middle (`float`):
            What the first and the last slot of a list gain over the middle. A negative number favours the middle.
        pair_noise (`float`):
            Standard deviation of the noise of one look in a pair, above 0.
        pair_bias (`float`):
            What the first slot of a pair gains over the second.
        kappa (`float`):
            Correlation, within a group, of what lists settle on and of what pairs settle on; 1 if both are the same.
        spread (`float`):
            Standard deviation, over groups, of the logarithm of a group's spread of settled opinion; 0 where all
            groups have the same spread. The median group has the spread 1.
        bias_spread (`float`):
            Standard deviation, over queries, of a factor that multiplies the gains of all slots; 0 where all queries
            have the same gains. The mean of the factor is 1.
    """

    list_noise: float
    list_bias: float
    list_middle: float
    pair_noise: float
    pair_bias: float
    kappa: float
    spread: float
    bias_spread: float

    @property
    def crowd(self) -> float:
        """How many times as large the noise is in a list of 8 as in a pair."""
        return self.list_noise / self.pair_noise

    def noise(self, n: int) -> float:
        """Return the standard deviation of the noise of a look in a prompt with `n` responses.

        It is a power law of `n` between `pair_noise` at 2 and `list_noise` at 8. A single response counts as two.
        """
        return self.pair_noise * self.crowd ** math.log(max(n, 2) / 2, CROWD / 2)

    def gain(self, slot: int, n: int) -> float:
        """Return what slot `slot`, from 0, gains over the mean of the first and the last slot of a prompt of `n`."""
        share = slot / (n - 1)
        if n == 2:
            return self.pair_bias * (0.5 - share)
        return self.list_bias * (0.5 - share) + self.list_middle * (abs(2 * share - 1) - 1)

    def at(self, factor: float) -> "JudgeModel":
        """Return the model of a query whose place gains are multiplied by `factor`."""
        gains = {name: factor * getattr(self, name) for name in ("list_bias", "list_middle", "pair_bias")}
        return replace(self, **gains, bias_spread=0.0)
