"""Labels of people: which of two samples that the audit showed as a pair is the better one."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rankbuffer_trl.data.queries import DataError
from rankbuffer_trl.decoding import shorten
from rankbuffer_trl.groups import RolloutGroup

from .fit import LABELS, Label
from .samples import rows_in


def rows_to_label(groups: Sequence[RolloutGroup], pairs: Mapping[str, Sequence[tuple[int, int]]]) -> Iterator[dict]:
    """Yield the pairs that the audit asked about, with their texts, for people who label them."""
    for group in groups:
        for pair in pairs[group.query.id]:
            texts = [group.rollouts[i].text for i in pair]
            yield {"query_id": group.query.id, "query": group.query.text, "numbers": pair, "responses": texts}


def read_labels(path: str, pairs: Mapping[str, Sequence[tuple[int, int]]]) -> list[Label]:
    """Read which of two samples is the better one.

    Args:
        path (`str`):
            A file of rows `{"query_id": text, "better": number, "worse": number}`.
        pairs (`Mapping[str, Sequence[tuple[int, int]]]`):
            The pairs that the audit asks about, by query id. Other pairs tell nothing about the judge.

    Raises:
        [`DataError`]: for the first row that cannot be used, or if there are fewer than 100 rows.
    """
    labels: dict[tuple[str, frozenset[int]], Label] = {}
    for place, row in rows_in("labels", path):
        cells: list[Any] = [row.get(key) for key in ("query_id", "better", "worse")]
        query_id, better, worse = cells
        typed = [type(cell) for cell in cells] == [str, int, int]
        if not typed or {better, worse} not in [{*pair} for pair in pairs.get(query_id, ())]:
            raise DataError(
                f"{place}: query_id, better and worse must name a pair that the audit asks about, which pairs.jsonl"
                f" lists, got {shorten(cells)}"
            )
        if (about := (query_id, frozenset((better, worse)))) in labels:
            raise DataError(f"{place}: an earlier row has a label of the same pair")
        labels[about] = (query_id, better, worse)
    if len(labels) < LABELS:
        raise DataError(
            f"labels={path} has {len(labels)} rows, and fewer than {LABELS} say nothing: label more pairs, or leave"
            " labels out"
        )
    return list(labels.values())
