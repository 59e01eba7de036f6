"""What the page's buffer browser shows, query by query: every visit with the buffer before and after it, and texts."""

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from ..data.queries import QueryTable
from ..store import BufferStore


@dataclass(frozen=True)
class Visit:
    """One group of a query.

    Args:
        step (`int`):
            The trainer's step, from 0.
        epoch (`int`):
            The epoch, from 0.
        before (`list`):
            The anchors the group was placed among, `[id, source, epoch, h]` each, from worst to best; empty if there
            was no buffer.
        after (`list`):
            The anchors after it.
        positions (`dict[str, int]`):
            Insertion position by rollout id.
        order (`list[list[int]]`):
            Rollout ids from worst to best in tiers.
        rewards (`list[float | None]`):
            One per rollout, in rollout order.
    """

    step: int
    epoch: int
    before: list[list]
    after: list[list]
    positions: dict[str, int]
    order: list[list[int]]
    rewards: list[float | None]


def visits_of(store: BufferStore, query_id: str) -> list[Visit]:
    """All visits of a query, oldest first."""
    versions = {
        step: json.loads(anchors)
        for step, anchors in store.rows("SELECT step, anchors FROM buffers WHERE query_id = ?", (query_id,))
    }
    visits, buffer = [], _initial(store, query_id)
    for step, epoch, k, *columns in store.rows(
        "SELECT step, epoch, k, positions, tiers, rewards FROM groups WHERE query_id = ? ORDER BY step", (query_id,)
    ):
        before = buffer if k else []
        buffer = versions.get(step, before)
        visits.append(Visit(step, epoch, before, buffer, *map(json.loads, columns)))
    return visits


def _initial(store: BufferStore, query_id: str) -> list[list]:
    """The anchors that the data set gave, which no version holds as they were before the first visit."""
    ids = store.rows("SELECT id FROM responses WHERE query_id = ? AND id LIKE 'initial-%'", (query_id,))
    return [[id, "initial", 0, 0] for (id,) in sorted(ids, key=lambda row: int(row[0].removeprefix("initial-")))]


def texts_of(store: BufferStore, query_id: str) -> dict[str, str]:
    """Responses of a query by id."""
    return dict(store.rows("SELECT id, text FROM responses WHERE query_id = ?", (query_id,)))


def query_pages(
    store: BufferStore,
    queries: QueryTable | None = None,
    quality: Callable[[str, str], float] | None = None,
    limit: int = 4000,
) -> Iterator[tuple[dict, dict]]:
    """(index entry, page) of each query in the order of their first visits, both ready for JSON.

    Args:
        store (`BufferStore`):
            The run's.
        queries (`QueryTable`, *optional*):
            The data set, for prompts and rubrics.
        quality (`Callable[[str, str], float]`, *optional*):
            A measure to show beside each response.
        limit (`int`, *optional*, defaults to `4000`):
            Characters of a response that are kept.
    """
    ids = [id for (id,) in store.rows("SELECT query_id FROM groups GROUP BY query_id ORDER BY min(step), query_id")]
    for id in ids:
        query = queries[id] if queries is not None and id in queries else None
        visits, texts = visits_of(store, id), texts_of(store, id)
        index = {"id": id, "prompt": query.text[:200] if query else "", "visits": len(visits)}
        index["anchors"] = len(visits[-1].after)
        page: dict[str, Any] = {
            "prompt": query.text if query else None,
            "rubrics": [[rubric.weight, rubric.text] for rubric in query.rubrics] if query else [],
            "texts": {key: text if len(text) <= limit else text[:limit] + " […]" for key, text in texts.items()},
            "visits": [list(vars(visit).values()) for visit in visits],
        }
        if quality and query:
            page["quality"] = {key: round(quality(id, text), 1) for key, text in texts.items()}
        yield index, page
