"""The verdicts of an audit about one query."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rankbuffer_trl.rewards import mean_ranks

Order = tuple[int, ...]
Pair = tuple[int, int]


@dataclass(frozen=True)
class QueryVerdicts:
    """The verdicts about the samples of one query, which have the numbers `0..n-1`.

    Args:
        lists (`Sequence`):
            One `(shown, order)` per list: in the order of the prompt, then from worst to best (`None` if it failed).
            Each order that is shown stands before its reverse.
        pairs (`Mapping[tuple[int, int], int | None]`):
            The better sample by (shown first, shown second); `None` if there is no verdict.
        scores (`Sequence[float | None]`, *optional*, defaults to `()`):
            One rating per sample, `None` if it failed.
        means (`Sequence[float]`, *optional*, defaults to `()`):
            The mean rating of each sample under the judge's probabilities. Empty if one is not known.
        crossed (`Mapping[tuple[int, int], int | None]`, *optional*):
            The better sample by (shown first as B, shown second as A); `None` if there is no verdict.
        put_back (`Sequence[tuple[int, int | None]]`, *optional*):
            The place of a sample among all, and the place where the judge inserted it among the others.
        odds, crossed_odds (`Mapping[tuple[int, int], float]`, *optional*):
            The log odds that the first one of (shown first, shown second) is better, for the pairs of `pairs` and of
            `crossed` with probabilities.
        padded, cut (`float`, *optional*):
            How often the first sample loses against itself with idle sentences, and against its first half: 0, 0.5, 1.

    Example:

    ```python
    from rankbuffer_tools.audit.rankings import QueryVerdicts

    QueryVerdicts("q1", lists=[((0, 1, 2), (2, 0, 1)), ((2, 1, 0), None)], pairs={(0, 1): 1, (1, 0): 1})
    ```
    """

    query_id: str
    lists: Sequence[tuple[Order, Order | None]]
    pairs: Mapping[Pair, int | None]
    scores: Sequence[float | None] = ()
    means: Sequence[float] = ()
    crossed: Mapping[Pair, int | None] = field(default_factory=dict)
    put_back: Sequence[tuple[int, int | None]] = ()
    odds: Mapping[Pair, float] = field(default_factory=dict)
    crossed_odds: Mapping[Pair, float] = field(default_factory=dict)
    padded: float | None = None
    cut: float | None = None

    @property
    def n(self) -> int:
        """The number of samples."""
        shown = [i for order, _ in self.lists for i in order] + [i for pair in self.pairs for i in pair]
        # From the numbers themselves: a kind of question may be missing.
        return max([*shown, len(self.scores) - 1], default=-1) + 1

    @property
    def orders(self) -> list[Order]:
        """The valid orders, each from worst to best."""
        return [order for _, order in self.lists if order is not None]

    @property
    def reversed_lists(self) -> list[tuple[Order, Order, Order]]:
        """The order shown, the verdict on it and the verdict on its reverse, where both verdicts are there."""
        pairs = zip(self.lists[::2], self.lists[1::2], strict=True)
        return [(shown, one, other) for (shown, one), (_, other) in pairs if one is not None and other is not None]

    @property
    def places(self) -> list[float] | None:
        """The mean place of each sample over the lists, from 0 for the worst; `None` without `reversed_lists`."""
        places = mean_ranks([order for _, one, other in self.reversed_lists for order in (one, other)])
        return [float(places[i]) for i in range(self.n)] if places else None

    @property
    def ratings(self) -> list[float]:
        """The ratings of all samples; empty if one of them failed."""
        ratings = [score for score in self.scores if score is not None]
        return ratings if len(ratings) == len(self.scores) else []  # ties and tau need all of them

    def as_dict(self) -> dict[str, Any]:
        """Return lists, pairs and ratings, for `audit.json`."""
        fields = {name: getattr(self, name) for name in ("query_id", "lists", "scores", "means")}
        return fields | {"pairs": [*self.pairs.items()]}
