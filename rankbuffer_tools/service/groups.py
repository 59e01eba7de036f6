"""Score groups that arrive by themselves, several at once, for trainers that have no step of whole batches.

A step of `RankBufferTrainer` is one transaction over many queries. Here each group is one. Three rules keep the
buffers what they are in training:

- Two groups of one query wait for each other, so each is ranked against the buffer that the one before it left.
- The epoch of a group is the number of its query's earlier visits.
- A group is recorded with its rewards, its next buffer and its calls, or not at all. The calls of a group that failed
  are recorded alone, because they were paid for.
"""

import asyncio
import hashlib
import json
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TypeVar
from weakref import WeakValueDictionary

from rankbuffer_trl.errors import RankBufferError
from rankbuffer_trl.files import sync
from rankbuffer_trl.groups import Query, Rollout, RolloutGroup
from rankbuffer_trl.judge import Call, Judge
from rankbuffer_trl.rewards.method import GroupScore, RewardMethod
from rankbuffer_trl.store import BufferStore, StoreError, history
from rankbuffer_trl.training.scorer import phase
from rankbuffer_trl.training.step import OpenStep

T = TypeVar("T")


class ConflictError(RankBufferError, ValueError):
    """A group that contradicts what is recorded, or what an earlier group said of its query."""


@dataclass(frozen=True)
class Scored:
    """The outcome of one group.

    Args:
        step (`int`):
            The number under which the group is recorded.
        rewards (`tuple[float | None, ...]`):
            One reward per text; `None` where the judgment failed.
        order (`tuple[tuple[int, ...], ...]`):
            The numbers of the texts with an answer from worst to best, in tiers of equal rank.
    """

    step: int
    rewards: tuple[float | None, ...]
    order: tuple[tuple[int, ...], ...]


def digest_of(query: Query) -> str:
    """Return a digest of a query. Empty values do not count, so a field that a later version adds changes none."""
    filled = asdict(query, dict_factory=lambda pairs: {name: value for name, value in pairs if value})
    return hashlib.sha256(json.dumps(filled, sort_keys=True).encode()).hexdigest()


class SingleGroups:
    """Judge and store for groups that arrive by themselves. Its coroutines belong to one event loop.

    Args:
        method (`RewardMethod`):
            The reward method.
        judge (`Judge`):
            The judge that the method asks.
        store (`Path`):
            The SQLite file for buffers, history and ledger. Another process that writes to it is refused.
        max_failures (`float`, *optional*, defaults to `0.25`):
            Share of failed judgments of a group, in 0..1, above which the group fails.
        timeout (`float`, *optional*):
            Seconds for judging one group. `None` is no limit.

    Raises:
        [`StoreError`]: if the store cannot be written, or is in use.
    """

    def __init__(
        self,
        method: RewardMethod,
        judge: Judge,
        store: Path,
        max_failures: float = 0.25,
        timeout: float | None = None,
    ):
        self.method = method
        self.judge = judge
        self.limits = (max_failures, timeout)
        # One thread has the store, since SQLite has one transaction at a time. A commit that waits for a reader of the
        # file holds up all that needs the store, but not the event loop.
        self._thread = ThreadPoolExecutor(1, "store")
        self.store = self._thread.submit(BufferStore, store).result()
        self.run = self._thread.submit(history.run_id, self.store).result()
        self._visits: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()  # by query
        self._notes = store.with_suffix(".queries")
        self._noted: dict[str, str] = self._thread.submit(self._read_notes).result()
        self._open: set[int] = set()  # the steps of groups that are not recorded yet

    async def score(
        self, query: Query, texts: Sequence[str], step: int | None = None, training: bool = True
    ) -> Scored:
        """Score one group, and record it if it is for training.

        A group that is recorded already is not judged again: its recorded outcome is returned. That is the group of
        this query and step, or without a step the query's last group if it has the same texts.

        The step seeds the order in which the judge sees texts. So rewards can depend on the order in which groups
        without a step arrive. They do not depend on evaluations, restarts or groups that failed before.

        Args:
            query (`Query`):
                The query.
            texts (`Sequence[str]`):
                The answers; an empty text is a rollout without an answer.
            step (`int`, *optional*):
                The trainer's step. Default: one more than the highest step of the store and of groups that are open.
            training (`bool`, *optional*, defaults to `True`):
                With `False`, only the calls are recorded, and no buffer changes.

        Raises:
            [`ConflictError`]: if other texts are recorded under this step, the query has a later visit, or an earlier
                group that is recorded had another query under this id.
            [`JudgeError`]: if the judge fails too often, or takes too long. No group is recorded then.
        """
        lock, digest = self._visits.setdefault(query.id, asyncio.Lock()), digest_of(query)
        async with lock if training else nullcontext():
            if self._noted.get(query.id, digest) != digest:
                raise ConflictError(
                    f"the query {query.id!r} had another prompt, other rubrics or other responses before, and its"
                    " buffer is for those: give each query an id of its own, or name a new folder"
                )
            if training and (known := await self._in_store(lambda: self._recorded(query.id, texts, step))):
                return known
            if step is None:
                newest = await self._in_store(self.store.last_step)
                step = 1 + max(self._open | {-1 if newest is None else newest})
            if not training:
                return await self._judged(query, texts, step, training)
            self._open.add(step)
            try:
                return await self._judged(query, texts, step, training)
            finally:
                self._open.discard(step)

    async def rewind(self, step: int) -> None:
        """Drop what was recorded in `step` or later, for a trainer that goes on from there. No group may be open."""

        def work() -> None:
            try:
                self.store.rewind(step)
            finally:
                self.run = history.run_id(self.store)
                self._noted = self._read_notes()

        await self._in_store(work)

    async def run_id(self) -> str:
        """Return the random id of the run that is recorded, once a rewind that was asked for has ended.

        A new store, and a rewind to step 0, make a new one. `run` is the same without a wait.
        """
        return await self._in_store(lambda: self.run)

    async def close(self) -> None:
        """Close the judge's connections and the store."""
        await self.judge.client.close()
        await self._in_store(self.store.close)
        self._thread.shutdown()

    def _recorded(self, query_id: str, texts: Sequence[str], step: int | None) -> Scored | None:
        visits = history.groups(self.store, query_id=query_id)
        for visit in visits if step is not None else visits[-1:]:
            if step in (visit.step, None) and self._texts(visit) == list(texts):
                return Scored(visit.step, tuple(visit.rewards), tuple(map(tuple, visit.order)))
        if step is not None and visits and visits[-1].step >= step:
            raise ConflictError(
                f"query {query_id!r} has a group of step {visits[-1].step}, so other texts of step {step} are refused:"
                " a trainer that goes on from an earlier step rewinds the store first, and a new run has a new folder"
            )
        return None

    def _texts(self, visit: history.GroupRow) -> list[str]:
        """Return the texts of a recorded group. Those without an answer are not stored."""
        stored = {row.id: row.text for row in history.responses(self.store, visit.query_id)}
        return [stored.get(f"{visit.step}-{i}", "") for i in range(len(visit.rewards))]

    async def _judged(self, query: Query, texts: Sequence[str], step: int, training: bool) -> Scored:
        buffer, epoch = await self._in_store(lambda: (self.store.load(query.id), self.store.visits(query.id)))
        group = RolloutGroup(query, tuple(map(Rollout, range(len(texts)), texts)), step, epoch)
        opened = OpenStep(
            self.method, self.judge, [group], [buffer], step, phase(training), *self.limits, self.store.spend
        )
        records = []
        try:
            await opened.start()
            (score,) = await opened.finish([group])
            records = [(group, score)] if training else []
        finally:  # `finish` ends only when no question is in flight, also if it is cancelled
            calls = opened.judge.drain()
            await self._in_store(lambda: self._record(step, records, calls, opened.phase))
        return Scored(step, score.rewards, score.order)

    def _record(
        self, step: int, records: list[tuple[RolloutGroup, GroupScore]], calls: list[Call], phase: str
    ) -> None:
        """Commit a group. The digest of its query is on the disk first, so no kill leaves a group without it."""
        digests = {group.query.id: digest_of(group.query) for group, _ in records}
        for query_id, digest in digests.items():
            if self._noted.get(query_id) == digest:
                continue
            try:
                with self._notes.open("a", encoding="utf-8") as file:
                    file.write(f"\n{json.dumps([query_id, digest])}")  # ends a line that was cut short
                sync(self._notes)
            except OSError as error:
                raise StoreError(f"cannot write {self._notes}: {error}") from error
        self.store.commit(step, records, calls, phase)
        self._noted |= digests

    def _read_notes(self) -> dict[str, str]:
        """Return the digests of the queries that have a recorded group, as this process and others noted them."""
        visited = {*history.query_ids(self.store)}
        content = self._notes.read_text(encoding="utf-8", errors="replace") if self._notes.is_file() else ""
        found = {}
        for line in content.splitlines():
            with suppress(ValueError, TypeError):
                id, found[id] = json.loads(line)
        return {id: digest for id, digest in found.items() if id in visited}

    async def _in_store(self, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._thread, work)
