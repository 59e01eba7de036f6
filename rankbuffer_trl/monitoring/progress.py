"""Progress by the judge's preference: two visits are compared by ranks among shared anchors. Ours, not the paper's.

Rank rewards have the same mean in every group, so they cannot show whether the policy improves. Anchors stay in a
buffer for several visits. So rollouts of two visits were placed among the same anchors, and can be compared.

For each query and each anchor that stood in the buffer before both visits, count the rollouts above and below the
anchor at both visits. These tables of two rows and two columns have one common odds ratio, which the estimator of
Mantel and Haenszel finds. Its variance is clustered by query. An anchor that the earlier group added is left out,
because a rollout that became an anchor was often judged too high.

The odds ratio is shown as the probability that the judge prefers a response of the later visit to one of the earlier
visit: 50 % is no change. This holds for one step from a visit to the next. The odds ratios of several steps must not
be multiplied: where the gain differs by query, the product is far too high.
"""

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby, pairwise
from operator import itemgetter
from pathlib import Path
from sys import intern
from typing import TypeVar

from ..decoding import read_json_as
from ..store import history
from ..store._buffer_store import BufferStore
from ..store._database import StoreError
from ..store._places import COMPARE_FILE, DUEL_FILE, report_folder
from ..store.history import Readable

T = TypeVar("T")
LEAST_QUERIES = 10  # on each side, whose rollouts are not all above or all below the shared anchors
WINDOW = 100  # queries of a window of steps, at least; a smaller data set has one window an epoch
FLOOR = 0.015  # half of the narrowest interval: the model has an error of about 0.01, however many queries there are
Z = 1.96  # 95 %


@dataclass(frozen=True, slots=True)  # a report holds all visits of a run
class Visit:
    """One visit of a query: where its rollouts were placed among the anchors of the buffer before the visit."""

    query_id: str
    step: int
    epoch: int
    above: Mapping[str, int]  # rollouts above an anchor, by the anchor's id, from the worst anchor to the best
    placed: int  # rollouts


@dataclass(frozen=True)
class Comparison:
    """How often the judge prefers a response of the later visits to a response of the earlier ones.

    Args:
        queries (`int`):
            Number of queries that were compared.
        probability (`float`, *optional*):
            In 0..1; 0.5 is no change. `None` if the placements do not tell.
        low, high (`float`, *optional*):
            Ends of the 95 % interval.
        reason (`str`, *optional*):
            Why there is no probability.
    """

    queries: int
    probability: float | None = None
    low: float | None = None
    high: float | None = None
    reason: str = ""

    def __str__(self) -> str:
        if self.probability is None or self.low is None or self.high is None:
            return f"not shown: {self.reason}"
        return f"{percent(self.probability)} ({percent(self.low)} to {percent(self.high)})"


def percent(share: float) -> str:
    """Write a share as whole percents. Values at the ends become `< 1 %` and `> 99 %`."""
    if share < 0.01 or share > 0.99:
        return "< 1 %" if share < 0.5 else "> 99 %"
    return f"{100 * share:.0f} %"


def compare_visits(pairs: Iterable[tuple[Visit, Visit]]) -> Comparison:
    """Compare the later visit of each pair with the earlier one, over the anchors that both share. One pair per query.

    Example:

    ```python
    from rankbuffer_trl.monitoring.progress import Visit, compare_visits

    before = [Visit(f"q{i}", 0, 0, {"a": 3 + i % 2, "b": 1}, placed=8) for i in range(40)]
    after = [Visit(f"q{i}", 1, 1, {"a": 5 + i % 2, "b": 3}, placed=8) for i in range(40)]
    print(compare_visits(zip(before, after)))  # 69 % (68 % to 71 %)
    ```
    """
    gains, losses = [], []
    for earlier, later in pairs:
        gain, loss = weigh(earlier, later)
        if gain or loss:  # else no shared anchor has rollouts on both sides
            gains.append(gain)
            losses.append(loss)
    n = len(gains)
    if min(sum(map(bool, gains)), sum(map(bool, losses))) < LEAST_QUERIES:
        what = "queries have rollouts on both sides of a shared anchor, so the anchors do not reach the policy"
        return Comparison(n, reason=f"fewer than {LEAST_QUERIES} {what}")
    gained, lost = math.fsum(gains), math.fsum(losses)
    log_odds = math.log(gained / lost)
    # Clustered by query: the anchors of one are not independent.
    variance = math.fsum((gain / gained - loss / lost) ** 2 for gain, loss in zip(gains, losses, strict=True))
    error = Z * math.sqrt(variance * n / (n - 1))  # n / (n - 1), as for any variance from a sample
    p = preference(log_odds)
    low, high = preference(log_odds - error), preference(log_odds + error)
    return Comparison(n, p, max(min(low, p - FLOOR), 0.0), min(max(high, p + FLOOR), 1.0))


def weigh(earlier: Visit, later: Visit) -> tuple[float, float]:
    """Return the sums of Mantel and Haenszel for one query.

    The first counts pairs in which the later rollout is above a shared anchor and the earlier one below, the second
    the opposite.
    """
    gain = loss = 0.0
    total = max(later.placed + earlier.placed, 1)  # no rollout was placed where all judgments failed
    # One that the earlier group added is not in both. It was often judged too high.
    for anchor in earlier.above.keys() & later.above.keys():
        up, up_before = later.above[anchor], earlier.above[anchor]
        down, down_before = later.placed - up, earlier.placed - up_before
        gain += up * down_before / total
        loss += down * up_before / total
    return gain, loss


def preference(log_odds: float) -> float:
    """Return the probability that a response beats another one, where their qualities are logistic.

    Args:
        log_odds (`float`):
            The logarithm of the odds ratio of the two placements. 0 gives 0.5.
    """
    if abs(log_odds) < 1e-3:  # where the formula loses its digits
        return 0.5 + log_odds / 6
    if log_odds < 0:
        return 1 - preference(-log_odds)
    v = math.exp(-log_odds)  # w = 1 / v does not overflow this way
    return (1 - v - v * log_odds) / (1 - v) ** 2


def visits_by_query(store: Readable) -> dict[str, list[Visit]]:
    """Return the visits whose placements can be compared, of each query in their order."""
    # A judge that saw the order of the anchors but not their texts has compared nothing.
    return {} if history.has_calls(store, "order_only") else placements(store)


def placements(store: Readable, query_id: str | None = None) -> dict[str, list[Visit]]:
    """Return all visits of each query in their order, each with the anchors that its group was placed among.

    Args:
        query_id (`str`, *optional*):
            The query to read alone.
    """
    by_query: dict[str, list[Visit]] = {}
    # One by one: the rows of a long run fill the memory.
    for id in history.query_ids(store) if query_id is None else [query_id]:
        anchors = history.initial_anchors(store, query_id=id).get(id, [])
        versions = {version.step: version.anchors for version in history.buffers(store, query_id=id)}
        visits = by_query[id] = []
        for group in history.groups(store, query_id=id):
            # An LLM manager that looks ahead places a group among anchors that no version of the buffer holds.
            among = anchors if len(anchors) == group.k else []
            positions = group.positions.values()
            # Each id stands in many visits.
            above = {intern(anchor): sum(position > k for position in positions) for k, anchor in enumerate(among)}
            visits.append(Visit(id, group.step, group.epoch, above, len(positions)))
            if (version := versions.get(group.step)) is not None:
                anchors = [anchor.id for anchor in version]
    return by_query


def since_last_visit(visits: Mapping[str, Sequence[Visit]]) -> dict[int, Comparison]:
    """Compare the visits of each epoch with the previous visits of the same queries, by epoch of the later visit."""
    pairs = defaultdict(list)
    for of_query in visits.values():
        for earlier, later in pairwise(of_query):  # one step alone: odds ratios of several must not be multiplied
            pairs[later.epoch].append((earlier, later))
    return {epoch: compare_visits(pairs[epoch]) for epoch in sorted(pairs)}


@dataclass
class OpenWindow:
    """The window that a run is in: what [`newest_window`] has read."""

    step: int = -1  # the newest that was read
    epoch: int = 0
    query_ids: list[str] = field(default_factory=list)
    visits: int = 0  # of this epoch so far
    visits_before: int = 0  # of the epoch before


def newest_window(store: Readable, window: OpenWindow, least: int = WINDOW) -> Comparison | None:
    """Return the comparison of the window that ends with the newest step, for the log of a run.

    Args:
        window (`OpenWindow`):
            What was read before, which this function brings up to date.
        least (`int`, *optional*, defaults to 100):
            Number of queries in a window, at least. If an epoch has fewer, a window is an epoch.

    Returns:
        `Comparison`, *optional*: `None` inside a window, and in the first epoch.
    """
    # Only what is new, since this runs at each step.
    for step, epoch, query_id in history.visited_after(store, window.step):
        if epoch != window.epoch:  # a window over two epochs could have two visits of a query
            window.query_ids, window.visits, window.visits_before = [], 0, window.visits
        elif step != window.step and len(window.query_ids) >= min(least, window.visits_before):
            window.query_ids = []
        window.step, window.epoch = step, epoch
        window.query_ids.append(query_id)
        window.visits += 1
    # A data set smaller than a window has it at the end of each epoch, which has as many visits as the one before.
    if (
        window.epoch == 0
        or len(window.query_ids) < min(least, window.visits_before)
        or history.has_calls(store, "order_only", window.step)
    ):
        return None
    newest = [placements(store, query_id)[query_id][-2:] for query_id in window.query_ids]
    pairs = [(visits[0], visits[1]) for visits in newest if len(visits) == 2]
    return compare_visits(pairs) if pairs else None


def cut(items: Iterable[tuple[int, T]], least: int) -> list[tuple[int, list[T]]]:
    """Cut (step, item) pairs into windows of whole steps with at least `least` items, each by its last step."""
    windows: list[tuple[int, list[T]]] = []
    for step, group in groupby(sorted(items, key=itemgetter(0)), key=itemgetter(0)):
        window = [item for _, item in group]
        if windows and len(windows[-1][1]) < least:  # so the last window may have fewer
            window = windows.pop()[1] + window
        windows.append((step, window))
    return windows


@dataclass(frozen=True)
class DuelResult:
    """The duels of a run between the first and the last of its `epochs`, see `rankbuffer-compare`."""

    run: str
    judge: str
    epochs: tuple[int, int]
    duels: int
    won: Comparison


@dataclass(frozen=True)
class PolicyResult:
    """The duels between two policies, by their labels, over prompts of a data set. See `rankbuffer-compare`."""

    judge: str
    models: dict[str, str]
    duels: int
    won: Comparison
    run: str = ""
    dataset: str = ""


Kept = TypeVar("Kept", DuelResult, PolicyResult)


def duel_of(path: Path, store: BufferStore) -> DuelResult | None:
    """Return the result of the duels of a run, `None` if there is none.

    Raises:
        [`StoreError`]: if the file of the result is damaged.
    """
    return read_result(path, DUEL_FILE, DuelResult, store)


def comparison_of(path: Path, store: BufferStore) -> PolicyResult | None:
    """Return the result of the comparison of two policies that names the run. For errors see [`duel_of`]."""
    return read_result(path, COMPARE_FILE, PolicyResult, store)


def read_result(path: Path, name: str, kind: type[Kept], store: BufferStore) -> Kept | None:
    """Return a result in the folder of a run's report."""
    file = report_folder(path) / name
    if not file.exists():
        return None
    try:
        result = read_json_as(file, kind)
    except ValueError as error:
        raise StoreError(f"{file.parent}: {error}: delete that file, or ask for the duels again") from None
    return result if result.run == history.run_id(store) else None  # a new run in the folder has had no duels
