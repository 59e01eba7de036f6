"""Numbers out of a run's store: buffers and costs by epoch, quality by step."""

import json
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from itertools import groupby

from ..buffer import SOURCES
from ..store import BufferStore


@dataclass(frozen=True)
class EpochBuffers:
    """The buffers at the end of one epoch.

    Args:
        epoch (`int`):
            The epoch, from 0.
        queries (`int`):
            Queries that have a buffer.
        size (`float`):
            Mean number of anchors per query.
        sources (`dict[str, float]`):
            Mean number of anchors per query by source.
    """

    epoch: int
    queries: int
    size: float
    sources: dict[str, float]


def buffers_by_epoch(store: BufferStore) -> list[EpochBuffers]:
    """Size and sources of all live anchors at the end of each epoch (figure "Dynamic buffer evolution", a)."""
    visits = store.rows(
        "SELECT groups.epoch, query_id, anchors FROM buffers JOIN groups USING (query_id, step)"
        " ORDER BY groups.epoch, step"
    )
    newest: dict[str, Counter] = {}
    result = []
    for epoch, rows in groupby(visits, key=lambda row: row[0]):
        newest.update(
            (query_id, Counter(source for _, source, *_ in json.loads(anchors))) for _, query_id, anchors in rows
        )
        total, n = sum(newest.values(), Counter()), len(newest)
        result.append(EpochBuffers(epoch, n, total.total() / n, {source: total[source] / n for source in SOURCES}))
    return result


def costs_by_epoch(store: BufferStore) -> dict[int, tuple[int, int]]:
    """(parsed judge calls, their prompt and completion tokens) by epoch."""
    rows = store.rows(
        "SELECT epoch, sum(outcome = 'parsed'), sum(prompt_tokens + completion_tokens)"
        " FROM calls JOIN groups USING (query_id, step) WHERE phase = 'train' GROUP BY epoch ORDER BY epoch"
    )
    return {epoch: (calls, tokens) for epoch, calls, tokens in rows}


def quality_by_step(store: BufferStore, quality: Callable[[str, str], float]) -> list[tuple[int, float]]:
    """(step, mean quality of its rollouts), where `quality(query_id, text)` is any measure."""
    steps: dict[int, list[float]] = {}
    for step, query_id, text in store.rows(
        "SELECT step, query_id, text FROM responses WHERE id NOT LIKE 'initial-%' ORDER BY step, rowid"
    ):
        steps.setdefault(step, []).append(quality(query_id, text))
    return [(step, sum(values) / len(values)) for step, values in steps.items()]
