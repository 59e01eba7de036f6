"""Progress as a report shows it: windows of steps, and shares above the initial anchors. Ours."""

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from statistics import fmean, stdev
from typing import Any

from rankbuffer_trl.monitoring.progress import LEAST_QUERIES, WINDOW, Comparison, Visit, Z, compare_visits, cut, weigh
from rankbuffer_trl.store import history


def gain_table(visits: Mapping[str, Sequence[Visit]]) -> list[dict[str, Any]]:
    """Return the comparisons of [`by_window`] as rows, for a chart."""
    return [{"step": step} | asdict(comparison) for step, comparison in by_window(visits).items()]


def rise_table(visits: Mapping[str, Sequence[Visit]]) -> list[dict[str, Any]]:
    """Return, by query, how often the judge prefers each later visit to the first: 0.5 is no change.

    It is the share of the pairs that [`weigh`] counts, and `None` where the visits share no anchor that tells.
    """
    most, rows = max(map(len, visits.values()), default=0), []
    for query_id, (first, *later) in visits.items():
        pairs = [weigh(first, visit) for visit in later]
        shares = [gain / (gain + loss) if gain + loss else None for gain, loss in pairs]
        shares += [None] * (most - 1 - len(shares))
        if any(share is not None for share in shares):  # not so for a query with one visit
            rows.append({"query": query_id} | {f"visit_{number}": share for number, share in enumerate(shares, 1)})
    # The query that ended lowest comes first.
    return sorted(rows, key=lambda row: [share for share in list(row.values())[1:] if share is not None][-1])


def reach_table(visits: Mapping[str, Sequence[Visit]]) -> list[dict[str, Any]]:
    """Return the shares of [`above_initial`] as rows, for a chart."""
    return [asdict(share) for share in above_initial(visits)]


def by_window(visits: Mapping[str, Sequence[Visit]], least: int = WINDOW) -> dict[int, Comparison]:
    """Compare as [`since_last_visit`] does, in windows of at least `least` queries, by the last step of each."""
    by_epoch: dict[int, list[tuple[int, tuple[Visit, Visit]]]] = defaultdict(list)
    for of_query in visits.values():
        for earlier, later in pairwise(of_query):
            by_epoch[later.epoch].append((later.step, (earlier, later)))
    compared: dict[int, Comparison] = {}
    for _, pairs in sorted(by_epoch.items()):  # a window ends with its epoch
        windows: list[tuple[int, list[tuple[Visit, Visit]]]] = cut(pairs, least)
        if len(windows) > 1 and len(windows[-1][1]) < least:  # the rest of an epoch joins the window before it
            (_, previous), (step, remainder) = windows[-2:]
            windows[-2:] = [(step, previous + remainder)]
        compared |= {step: compare_visits(window) for step, window in windows}
    return compared


@dataclass(frozen=True)
class Share:
    """The share of an epoch's rollouts that were placed above an initial anchor."""

    epoch: int
    anchor: str  # `initial-<i>`; a higher `i` is a better response of the data set
    queries: int  # the same in every epoch
    share: float  # in 0..1
    low: float  # a 95 % interval over queries
    high: float


def above_initial(visits: Mapping[str, Sequence[Visit]]) -> list[Share]:
    """Return the share of rollouts above each initial anchor, by epoch and over the same queries.

    A query counts for an anchor if each epoch has a visit of the query at which the anchor was in its buffer.
    """
    counts: dict[int, int] = defaultdict(int)
    for of_query in visits.values():
        for epoch in {visit.epoch for visit in of_query}:
            counts[epoch] += 1
    # Without the epoch in which a run stands.
    epochs = [epoch for epoch in sorted(counts) if 2 * counts[epoch] >= max(counts.values())]
    shares: dict[str, dict[int, list[float]]] = defaultdict(lambda: defaultdict(list))
    for of_query in visits.values():
        last = {visit.epoch: visit for visit in of_query if visit.placed}
        if not all(epoch in last for epoch in epochs):
            continue
        visited = [last[epoch] for epoch in epochs]
        # The ids of all other anchors are names within one run.
        for anchor in set.intersection(*({id for id in v.above if id.startswith("initial-")} for v in visited)):
            for visit in visited:
                shares[anchor][visit.epoch].append(visit.above[anchor] / visit.placed)
    return [
        Share(epoch, anchor, len(values), *_mean(values))
        for anchor, by_epoch in sorted(shares.items(), key=lambda item: history.initial_number(item[0]))
        for epoch, values in by_epoch.items()
        if len(values) >= LEAST_QUERIES
    ]


def above_middle(visits: Mapping[str, Sequence[Visit]]) -> list[Share]:
    """Return the share of rollouts above the initial anchor in the middle of their query, by epoch."""
    middle = {}  # by query, since numbers of responses differ
    for id, of_query in visits.items():
        first = [*of_query[0].above]  # a first buffer has no other anchors than initial ones
        middle[id] = first[len(first) // 2] if first else ""
    renamed = {
        # The buffer may have lost that anchor.
        id: [replace(v, above={"initial-0": v.above[middle[id]]} if middle[id] in v.above else {}) for v in of_query]
        for id, of_query in visits.items()
    }
    return above_initial(renamed)


def _mean(values: Sequence[float]) -> tuple[float, float, float]:
    """Return the mean of shares and its 95 % interval."""
    mean = fmean(values)
    error = Z * stdev(values) / math.sqrt(len(values))
    return mean, max(mean - error, 0.0), min(mean + error, 1.0)  # a share stays in 0..1
