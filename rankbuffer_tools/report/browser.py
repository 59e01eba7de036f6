"""The data of the page's buffer browser: for each query its visits, the buffer before and after each, and texts."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict
from typing import Any

from rankbuffer_trl.data import QueryTable
from rankbuffer_trl.store import BufferStore, history
from rankbuffer_trl.store.history import AnchorRow

VISITS = 50  # visits of a query that the page keeps: the first and the last ones


def visits_of(store: BufferStore, query_id: str) -> list[dict[str, Any]]:
    """Return all visits of a query, the oldest first, by the names that the page reads.

    A visit is a scored group, see [`GroupRow`], with the anchors `before` it, empty if there was no buffer, and
    `after` it, from worst to best.
    """
    versions = {version.step: version.anchors for version in history.buffers(store, query_id=query_id)}
    # The store has no version of a buffer before its first visit: the data set's responses are its anchors then.
    initial = history.initial_anchors(store, query_id=query_id).get(query_id, [])
    visits: list[dict[str, Any]] = []
    buffer = [AnchorRow(id, "initial", 0, 0) for id in initial]
    for group in history.groups(store, query_id=query_id):
        before = buffer if group.k else []  # `k` is 0 where there was no buffer yet
        buffer = versions.get(group.step, before)
        visits.append(
            {
                "number": len(visits) + 1,
                "step": group.step,
                "epoch": group.epoch,
                "before": [asdict(anchor) for anchor in before],
                "after": [asdict(anchor) for anchor in buffer],
                "positions": group.positions,
                "order": group.order,
                "rewards": group.rewards,
            }
        )
    return visits


def query_pages(
    store: BufferStore,
    queries: QueryTable | None = None,
    quality: Callable[[str, str], float] | None = None,
    limit: int = 4000,
    ids: Iterable[str] | None = None,
) -> Iterator[tuple[dict, dict]]:
    """Yield index entry and page of each query, both ready for JSON, with at most `limit` characters of a response."""
    for id in history.query_ids(store) if ids is None else ids:
        query = queries[id] if queries is not None and id in queries else None
        visits, responses = visits_of(store, id), history.responses(store, id)
        index = {"id": id, "prompt": query.text[:200] if query else "", "visits": len(visits)}
        visits = visits[:1] + visits[1:][1 - VISITS :]
        index["anchors"] = len(visits[-1]["after"])
        spreads = [len(set(visit["positions"].values())) for visit in visits]
        index["spread"] = max(spreads)  # of all visits, the most intervals in which responses were placed
        index["widest"] = max(range(len(visits)), key=lambda number: (spreads[number], number))
        steps = {visit["step"] for visit in visits}
        anchors = {anchor["id"] for visit in visits for anchor in (*visit["before"], *visit["after"])}
        # Texts that no visit shows would only make the page larger.
        responses = [each for each in responses if each.initial or each.step in steps or each.id in anchors]
        page: dict[str, Any] = {
            "prompt": query.text if query else None,
            "rubrics": [asdict(rubric) for rubric in query.rubrics] if query else [],
            "texts": {r.id: r.text if len(r.text) <= limit else r.text[:limit] + " […]" for r in responses},
            "visits": visits,
        }
        if quality and query:
            page["quality"] = {r.id: round(quality(id, r.text), 1) for r in responses}
        yield index, page
