"""How the buffers of a run grow, by epoch."""

from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

from ..buffer import SOURCES
from ..store import history
from ..store._buffer_store import BufferStore
from ..store.history import AnchorRow


def epoch_ends(store: BufferStore) -> Iterator[tuple[int, Mapping[str, list[AnchorRow]]]]:
    """Yield each epoch that changed a buffer, and the anchors of all buffers at its end by query."""
    newest: dict[str, list[AnchorRow]] = {}
    for epoch in history.epochs(store):
        if versions := history.buffers(store, epoch=epoch):
            newest.update((version.query_id, version.anchors) for version in versions)
            yield epoch, newest  # the same dictionary each time: copy it to keep it


def buffer_size_table(store: BufferStore) -> list[dict[str, Any]]:
    """Return, by epoch, anchors per query at its end in all and by source (figure "Dynamic buffer evolution", a)."""
    table = []
    for epoch, buffers in epoch_ends(store):
        counts = Counter(anchor.source for anchors in buffers.values() for anchor in anchors)
        n = len(buffers)
        by_source = {source: counts[source] / n for source in SOURCES}
        table.append({"epoch": epoch, "queries": n, "anchors": counts.total() / n, **by_source})
    return table
