"""Measure what visits and checkpoints of the buffer store cost, with few queries and with many.

    python benchmarks/buffer_store.py
    python benchmarks/buffer_store.py --queries 1000 100000 1000000 --anchor_bytes 250 --folder /big/disk

For each size the script makes a data set with 8 responses for each query, and fills a store with as many buffers of 8
anchors. Then, the sizes in turn,

* groups of random queries are loaded, updated and committed, one transaction a group;
* steps of 20 random queries are committed and followed by a checkpoint of the store, with the digest that its manifest
  needs;
* the run is resumed from its last checkpoint, and all buffers are exported as a table.

The script prints tables, and then one JSON line. `ratio` is the median commit time of the largest size over that of
the smallest, and `checkpoint_ratio` is the same ratio for a checkpoint. `memory_mb` is the private memory that data
set index and store of the largest size hold in this process. The data set's text is a file mapped into memory and does
not count.
"""

import argparse
import json
import random
import statistics
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from datasets import Dataset, Features, Value, disable_progress_bars
from rich.console import Console
from rich.progress import track
from rich.table import Table

from rankbuffer_trl.buffer import initial_buffer
from rankbuffer_trl.data import QueryTable
from rankbuffer_trl.groups import Query, Rollout, RolloutGroup, Rubric
from rankbuffer_trl.ranking import rank_rewards
from rankbuffer_trl.rewards import GroupScore
from rankbuffer_trl.store import STORE_FILE, BufferStore
from rankbuffer_trl.training import export_buffers, hash_file

ANCHORS, G, STEP = 8, 8, 20
SLOW = ("checkpoint", "resume", "export", "data")
FEATURES = Features(
    {
        "query_id": Value("string"),
        "prompt": [{"role": Value("string"), "content": Value("string")}],
        "rubrics": [{"text": Value("string"), "weight": Value("int64")}],
        "responses": [Value("string")],
    }
)


def text(length: int, *key: object) -> str:
    """Return a response of this length that no other equals."""
    return f"{key} ".ljust(length, "lorem ipsum "[len(str(key)) % 12])


def data_rows(queries: int, length: int) -> Iterator[dict]:
    """Yield rows of a data set in the form of docs/data.md."""
    for number in range(queries):
        yield {
            "query_id": f"q{number}",
            "prompt": [{"role": "user", "content": f"How do I do thing {number}?"}],
            "rubrics": [{"text": "Is helpful.", "weight": 5}],
            "responses": [text(length, number, i) for i in range(ANCHORS)],
        }


def group_of(query: Query, step: int, length: int, rollouts: int = G) -> RolloutGroup:
    """Return the rollouts of one visit."""
    texts = (text(length, query.id, step, i) for i in range(rollouts))
    return RolloutGroup(query, tuple(Rollout(i, text) for i, text in enumerate(texts)), step, epoch=step)


def fill(store: BufferStore, queries: int, length: int) -> None:
    """Give every query its first buffer, a thousand queries to a transaction."""
    for start in track(range(0, queries, 1000), description=f"filling {queries:,} queries", transient=True):
        scored = []
        for number in range(start, min(start + 1000, queries)):
            query = Query(f"q{number}", [{"role": "user", "content": "?"}], (Rubric("Is helpful.", 5),))
            buffer = initial_buffer([text(length, number, i) for i in range(ANCHORS)], ANCHORS)
            scored.append(
                (group_of(query, 0, length, rollouts=0), GroupScore((), before=buffer, after=buffer.visited()))
            )
        store.commit(0, scored)


def visit(
    store: BufferStore, table: QueryTable, query_id: str, step: int, length: int
) -> tuple[RolloutGroup, GroupScore]:
    """Load a query and its buffer, and rank a group so that the buffer grows."""
    query, buffer = table[query_id], store.load(query_id)
    group = group_of(query, step, length)
    sigma = [() for _ in range(len(buffer) + 1)]
    sigma[1] = group.rollouts[:4]
    sigma[-1] = group.rollouts[4:]
    order = tuple((rollout.id,) for rollout in group.rollouts)
    after = buffer.update(sigma, step, step).visited()
    return group, GroupScore(rank_rewards(order, G), order, dict.fromkeys(range(G), 1), True, buffer, after)


class Stopwatch:
    """Milliseconds by what took them."""

    def __init__(self):
        self.times: dict[str, list[float]] = {}

    @contextmanager
    def __call__(self, what: str) -> Iterator[None]:
        started = time.perf_counter()
        yield
        self.times.setdefault(what, []).append(1000 * (time.perf_counter() - started))

    def median(self, what: str) -> float:
        """Return the median of all times of one thing."""
        return statistics.median(self.times[what])


def private_memory_mb() -> float:
    """Return the anonymous resident memory of this process (Linux)."""
    status = Path("/proc/self/status").read_text()
    return int(status.partition("RssAnon:")[2].split()[0]) / 1024


class Size:
    """Data set, store and stopwatch of one number of queries."""

    def __init__(self, queries: int, length: int, folder: Path):
        self.queries, self.length, self.folder = queries, length, folder / str(queries)
        self.watch, self.random, self.step = Stopwatch(), random.Random(0), 0
        self.checkpoint = self.folder / "checkpoint"
        rows = {"queries": queries, "length": length}
        dataset = Dataset.from_generator(data_rows, features=FEATURES, gen_kwargs=rows, cache_dir=str(self.folder))
        filled = BufferStore(self.folder / "live.sqlite")
        fill(filled, queries, length)
        filled.close()
        before = private_memory_mb()
        with self.watch("data"):
            self.table = QueryTable(dataset, anchors_needed=ANCHORS)
        with self.watch("open"):
            self.store = BufferStore(self.folder / "live.sqlite")
        self.memory = private_memory_mb() - before

    def visit(self) -> None:
        """Visit a random query, in its own transaction."""
        self.step += 1
        query_id = f"q{self.random.randrange(self.queries)}"
        with self.watch("load"):
            self.store.load(query_id)
            self.table[query_id]
        scored = visit(self.store, self.table, query_id, self.step, self.length)
        with self.watch("commit"):
            self.store.commit(self.step, [scored])

    def save(self) -> None:
        """Take a step of 20 queries and save a checkpoint."""
        self.step += 1
        ids = self.random.sample(range(self.queries), min(STEP, self.queries))
        self.store.commit(self.step, [visit(self.store, self.table, f"q{id}", self.step, self.length) for id in ids])
        with self.watch("checkpoint"):
            self.store.save(self.checkpoint)
            hash_file(self.checkpoint / STORE_FILE)

    def resume(self) -> None:
        """Go back to the checkpoint, and export."""
        self.store.commit(self.step + 1, [visit(self.store, self.table, "q0", self.step + 1, self.length)])
        with self.watch("resume"):
            hash_file(self.checkpoint / STORE_FILE)
            self.store.restore(self.checkpoint)
        with self.watch("export"):
            export_buffers(self.store, self.folder / "buffers.parquet")

    @property
    def checkpoint_megabytes(self) -> float:
        """The size of the store in a checkpoint."""
        return (self.checkpoint / STORE_FILE).stat().st_size / 2**20

    @property
    def megabytes(self) -> float:
        """The live store's size."""
        return self.store.path.stat().st_size / 2**20


def main() -> None:
    """Fill, visit in turn, report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--queries", type=int, nargs="+", default=[1_000, 100_000])
    parser.add_argument("--visits", type=int, default=400, help="measured visits per size")
    parser.add_argument("--saves", type=int, default=20, help="measured checkpoints per size")
    parser.add_argument("--anchor_bytes", type=int, default=2000, help="length of a response")
    parser.add_argument("--folder", type=Path, help="where to put the files (default: a temporary folder)")
    arguments = parser.parse_args()
    disable_progress_bars()

    with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
        sizes = [Size(queries, arguments.anchor_bytes, Path(folder)) for queries in arguments.queries]
        before = private_memory_mb()
        for _ in track(range(arguments.visits), description="visiting", transient=True):
            for size in sizes:
                size.visit()
        for _ in track(range(arguments.saves), description="saving", transient=True):
            for size in sizes:
                size.save()
        sizes[-1].memory += private_memory_mb() - before
        for size in sizes:
            size.resume()
            size.store.close()

        visits = Table("queries", "load, ms", "commit, ms", "store, MB", "private memory, MB", title="One visit")
        saves = Table(
            "queries", "checkpoint, MB", "checkpoint, s", "resume, s", "export, s", "check data, s",
            title="A checkpoint after 20 visits; resuming from it",
        )  # fmt: skip
        for size in sizes:
            ms = size.watch.median
            cells = (ms("load"), ms("commit"), size.megabytes, size.memory)
            visits.add_row(f"{size.queries:,}", *(f"{cell:.2f}" for cell in cells))
            cells = (size.checkpoint_megabytes, *(ms(what) / 1000 for what in SLOW))
            saves.add_row(f"{size.queries:,}", *(f"{cell:.3f}" for cell in cells))
        Console().print(visits, saves)
        few, many = sizes[0].watch.median, sizes[-1].watch.median
        print(
            json.dumps(
                {
                    "benchmark": "buffer_store",
                    "ratio": round(many("commit") / few("commit"), 4),
                    "checkpoint_ratio": round(many("checkpoint") / few("checkpoint"), 4),
                    "commit_ms": {str(size.queries): round(size.watch.median("commit"), 3) for size in sizes},
                    "checkpoint_ms": {str(size.queries): round(size.watch.median("checkpoint"), 3) for size in sizes},
                    "memory_mb": round(sizes[-1].memory, 1),
                    "queries": arguments.queries,
                }
            )
        )


if __name__ == "__main__":
    main()
