"""The numbers of a run: all SQL that reads a store for reports, cards and tables. Functions return named rows."""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Protocol, TypeVar

from ..decoding import decode, parse_json, shown
from ..judge._ledger import FAILURES, Totals
from ..settings import fields_of
from ._database import StoreError

T = TypeVar("T")

# Fields of `Totals` that are counted. Every other field is the sum of the column of the same name.
COUNTS = {"calls": "outcome = 'parsed'", "failures": f"outcome IN {FAILURES}"}


class Readable(Protocol):
    """A store that these functions read, such as a [`BufferStore`]."""

    path: Path

    def rows(self, sql: str, parameters: Sequence = ()) -> Iterable[tuple]:
        """Return the rows of a query."""


@dataclass(frozen=True)
class AnchorRow:
    """One anchor of a buffer without its text."""

    id: str
    source: str
    epoch: int
    h: int  # epochs in a row without a rollout next to it

    def __post_init__(self):
        initial_number(self.id)


@dataclass(frozen=True)
class BufferRow:
    """The buffer of a query after one of its visits, anchors from worst to best."""

    query_id: str
    step: int
    epoch: int
    anchors: list[AnchorRow]

    def __post_init__(self):
        if len(self.anchors) < 2:
            raise ValueError("a buffer has two anchors or more")  # else it has no interval


@dataclass(frozen=True)
class GroupRow:
    """One scored group."""

    query_id: str
    step: int
    epoch: int
    k: int  # anchors that the group was placed among; 0 without a buffer
    positions: dict[str, int]  # insertion position by rollout id, of the rollouts that were placed
    order: list[list[int]]  # rollout ids from worst to best, in tiers of equal rank
    rewards: list[float | None]  # by rollout; `None` where the judge gave no verdict
    added: list[tuple[str, str]]  # id and source of each anchor
    pruned: list[tuple[str, str]]  # the same

    def __post_init__(self):
        ids = range(len(self.rewards))
        named = {*self.positions} | {str(id) for tier in self.order for id in tier}
        if not ids or not named <= {*map(str, ids)}:
            raise ValueError("positions and order must name rollouts, which the rewards count")
        if any(not 0 <= position <= self.k for position in self.positions.values()):
            raise ValueError(f"each of positions must be from 0 to k={self.k}")
        # Several of 1e308 would add up to infinity in a report.
        if any(abs(reward) > 1e100 for reward in self.rewards if reward):
            raise ValueError("rewards must be numbers that can be added up")


@dataclass(frozen=True)
class ResponseRow:
    """One response of a query: a rollout that has an answer, or an initial anchor."""

    id: str
    step: int
    text: str

    def __post_init__(self):
        initial_number(self.id)

    @property
    def initial(self) -> bool:
        """Whether the data set gave this response, so that it is no rollout."""
        return self.id.startswith("initial-")


@dataclass(frozen=True)
class ReadRow:
    """One rollout that the reference judge has scored too."""

    query_id: str
    step: int
    rollout: int
    difference: float  # the judge's reward less the reference judge's
    features: dict[str, float]


def run_id(store: Readable) -> str:
    """Return the random id of the run that the rows belong to; empty if there is none."""
    return next((id for (id,) in store.rows("SELECT id FROM run")), "")


def query_ids(store: Readable) -> list[str]:
    """Return the ids of all visited queries in the order of their first visits."""
    return [id for (id,) in store.rows("SELECT query_id FROM groups GROUP BY query_id ORDER BY min(step), query_id")]


def epochs(store: Readable) -> list[int]:
    """Return the epochs in which a group was scored, in order."""
    return [epoch for (epoch,) in store.rows("SELECT DISTINCT epoch FROM groups ORDER BY epoch")]


def steps(store: Readable) -> list[int]:
    """Return the steps in which a group was scored, in order."""
    return [step for (step,) in store.rows("SELECT DISTINCT step FROM groups ORDER BY step")]


def visited_after(store: Readable, step: int) -> list[tuple[int, int, str]]:
    """Return step, epoch and query id of each group that was scored after a step, by step."""
    return list(store.rows("SELECT step, epoch, query_id FROM groups WHERE step > ? ORDER BY step", (step,)))


def groups(store: Readable, **equal: Any) -> list[GroupRow]:
    """Return all scored groups by step and query id; `equal` names the value that a column must have."""
    columns = "query_id, step, epoch, k, positions, tiers, rewards, added, pruned"
    return _decoded(store, GroupRow, columns, "groups", "step, query_id", equal)


def buffers(store: Readable, **equal: Any) -> list[BufferRow]:
    """Return all versions of all buffers by step; `equal` names the value that a column must have."""
    table = "buffers JOIN groups USING (query_id, step)"
    return _decoded(store, BufferRow, "query_id, step, epoch, anchors", table, "step", equal)


def responses(store: Readable, query_id: str, **equal: Any) -> list[ResponseRow]:
    """Return the responses of a query as they were stored; `equal` names the value that a column must have."""
    return _decoded(store, ResponseRow, "id, step, text", "responses", "rowid", {"query_id": query_id, **equal})


def reads(store: Readable, limit: int) -> list[ReadRow]:
    """Return the newest rollouts that the reference judge has scored, `limit` of them at most, newest step first."""
    if not count_reads(store)[0]:
        return []
    columns, order = "query_id, step, rollout, difference, features", f"step DESC, query_id, rollout LIMIT {limit:d}"
    return _decoded(store, ReadRow, columns, "reads", order, {})


def count_reads(store: Readable) -> tuple[int, int | None]:
    """Return how many rollouts a reference judge has scored, and the newest step of one."""
    # A run without a reference judge has no such table.
    if not list(store.rows("SELECT 1 FROM sqlite_master WHERE name = 'reads'")):
        return 0, None
    return next((count, step) for count, step in store.rows("SELECT count(*), max(step) FROM reads"))


def count_groups(store: Readable) -> int:
    """Return how many groups were scored."""
    return next(n for (n,) in store.rows("SELECT count(*) FROM groups"))


def initial_anchors(store: Readable, **equal: Any) -> dict[str, list[str]]:
    """Return the ids of the first anchors of each query from worst to best; `equal` names the value of a column."""
    by_query: dict[str, dict[int, str]] = {}
    for query_id, id in _select(store, "query_id, id", "responses", "query_id", equal):
        if id.startswith("initial-"):
            with damage(store.path, "responses", {"query_id": query_id}):
                # By number, since initial-10 sorts before initial-2 as a text.
                by_query.setdefault(query_id, {})[initial_number(id)] = id
    return {query_id: [ids[number] for number in sorted(ids)] for query_id, ids in by_query.items()}


def answers_by_step(store: Readable) -> dict[int, int]:
    """Return the number of rollouts that have an answer, by step."""
    return dict(store.rows("SELECT step, count(*) FROM responses WHERE id NOT LIKE 'initial-%' GROUP BY step"))


def totals(store: Readable, phase: str = "train") -> Totals:
    """Return the sums of the judge's ledger over a phase, `train` or `eval`."""
    return totals_by(store, "phase", phase).get(phase, Totals())


def totals_by(store: Readable, column: str, phase: str = "train", **equal: Any) -> dict[Any, Totals]:
    """Return the sums of the judge's ledger over a phase by the values of one column, in their order.

    Args:
        column (`str`):
            A column of the table `calls`, or `epoch`, which leaves out calls of groups that were not committed.
        phase (`str`, *optional*, defaults to `"train"`):
            `train` or `eval`.
        equal:
            Columns of `calls` and the value that each must have.
    """
    table = "calls JOIN groups USING (query_id, step)" if column == "epoch" else "calls"  # calls have a step alone
    columns = ", ".join([column, *(f"sum({COUNTS.get(field.name, field.name)})" for field in fields(Totals))])
    rows = _select(store, columns, table, column, {"phase": phase, **equal}, group=f"GROUP BY {column}")
    with damage(store.path, "calls", {}):
        return {value: decode(sums, Totals) for value, *sums in rows}


def has_calls(store: Readable, kind: str, since: int = 0) -> bool:
    """Return whether the judge's ledger has a call of this kind that training made, since a step."""
    where = "step >= ? AND phase = 'train' AND kind = ?"
    ((exists,),) = store.rows(f"SELECT EXISTS (SELECT 1 FROM calls WHERE {where})", (since, kind))
    return bool(exists)


def initial_number(id: str) -> int:
    """Return the number in the id of an initial anchor, and -1 for any other response."""
    if not id.startswith("initial-"):
        return -1
    if not re.fullmatch(r"initial-[0-9]{1,9}", id):  # `int` takes other digits and spaces, and refuses 5,000 digits
        raise ValueError(f"the id of an initial anchor must be initial-<number>, got {shown(id)}")
    return int(id.removeprefix("initial-"))


def _decoded(
    store: Readable, kind: Callable[..., T], columns: str, table: str, order: str, equal: dict[str, Any]
) -> list[T]:
    """Return rows as a class, whose fields are the columns in their order."""
    types = {name: annotation for name, (annotation, _) in fields_of(kind).items()}  # in the order of the columns
    decoded = []
    for values in _select(store, columns, table, order, equal):
        row = dict(zip(types, values, strict=True))
        with damage(store.path, table, equal | row):
            for name, value in row.items():
                if isinstance(value, str) and types[name] is not str:  # a field with parts is stored as JSON
                    row[name] = parse_json(value, at=name)
            decoded.append(decode(row, kind))
    return decoded


@contextmanager
def damage(store: Path, table: str, row: Mapping[str, Any]) -> Iterator[None]:
    """Turn the `ValueError` of a row into a [`StoreError`] that names the row."""
    try:
        yield
    except ValueError as error:
        # The other columns may hold whole responses.
        names = [name for name in ("query_id", "step", "id") if name in row]
        place = "".join(f", {name} {shown(row[name])}" for name in names)
        raise StoreError(
            f"{store}, table {table.split()[0]}{place}: {error}. The file was changed: use another checkpoint"
        ) from None


def _select(
    store: Readable, columns: str, table: str, order: str, equal: dict[str, Any], group: str = ""
) -> list[tuple]:
    where = " AND ".join(f"{name} = ?" for name in equal) or "1"
    sql = f"SELECT {columns} FROM {table} WHERE {where} {group} ORDER BY {order}"
    return list(store.rows(sql, tuple(equal.values())))
