"""The verdicts of an audit about one query."""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class QueryRankings:
    """What the audit read about one query. Its responses have the numbers `0..n-1`.

    Args:
        lists (`Sequence`):
            One `(shown, order)` per list: in the order of the prompt, then from worst to best (`None` if it failed).
        pairs (`Sequence`):
            One `((first, second), better)` per pair, in the order of the prompt; `better` is `None` if it failed.
        scores (`Sequence[float | None]`, *optional*, defaults to `()`):
            One rating per response, `None` if it failed.
        means (`Sequence[float]`, *optional*, defaults to `()`):
            The mean rating of each response under the judge's probabilities. Empty if one is not known.

    Example:

    ```python
    from rankbuffer_tools.audit.rankings import QueryRankings

    QueryRankings("q1", lists=[((0, 1, 2), (2, 0, 1)), ((2, 1, 0), None)], pairs=[((0, 1), 1), ((1, 0), 1)])
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
        # From the numbers themselves: a kind of question may be missing.
        return max([*shown, len(self.scores) - 1], default=-1) + 1

    @property
    def orders(self) -> list[tuple[int, ...]]:
        """The valid orders, each from worst to best."""
        return [order for _, order in self.lists if order is not None]

    @property
    def ratings(self) -> list[float]:
        """The ratings of all responses; empty if one of them failed."""
        ratings = [score for score in self.scores if score is not None]
        return ratings if len(ratings) == len(self.scores) else []  # ties and tau need all of them
