"""What a visit costs the buffer store, with few queries and with many.

    python benchmarks/buffer_store.py

For each size it fills a store with buffers of 8 anchors of 2 kB and a data set with as many responses. Then groups of
random queries are loaded, updated and committed, one transaction a group, the two sizes in turn. Prints a table for
people and one JSON line last: `ratio` is the median commit time of the largest size over that of the smallest,
`memory_mb` the private memory that data set index and store of the largest size hold in this process (the data set's
text is a file mapped into memory and not counted).
"""

import argparse
import json
import random
import statistics
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from datasets import Dataset, Features, Value, disable_progress_bars
from rich.console import Console
from rich.progress import track
from rich.table import Table

from rankbuffer_trl.buffer import initial_buffer
from rankbuffer_trl.data.queries import QueryTable
from rankbuffer_trl.groups import Query, Rollout, RolloutGroup, Rubric
from rankbuffer_trl.ranking import rank_rewards
from rankbuffer_trl.score import GroupScore
from rankbuffer_trl.store import BufferStore

ANCHORS, ANCHOR_BYTES, G = 8, 2000, 8
FEATURES = Features(
    {
        "query_id": Value("string"),
        "prompt": [{"role": Value("string"), "content": Value("string")}],
        "rubrics": [{"text": Value("string"), "weight": Value("int64")}],
        "responses": [Value("string")],
    }
)


def text(*key: object) -> str:
    """A response of 2 kB that no other equals."""
    return f"{key} ".ljust(ANCHOR_BYTES, "lorem ipsum "[len(str(key)) % 12])


def data_rows(queries: int) -> Iterator[dict]:
    """Rows of a data set in the form of docs/data.md."""
    for number in range(queries):
        yield {
            "query_id": f"q{number}",
            "prompt": [{"role": "user", "content": f"How do I do thing {number}?"}],
            "rubrics": [{"text": "Is helpful.", "weight": 5}],
            "responses": [text(number, i) for i in range(ANCHORS)],
        }


def group_of(query: Query, step: int, texts: int = G) -> RolloutGroup:
    """The rollouts of one visit, 2 kB each."""
    return RolloutGroup(query, tuple(Rollout(i, text(query.id, step, i)) for i in range(texts)), step, epoch=step)


def fill(store: BufferStore, queries: int) -> None:
    """Give every query its first buffer, a thousand to a transaction."""
    for start in track(range(0, queries, 1000), description=f"filling {queries:,} queries", transient=True):
        scored = []
        for number in range(start, min(start + 1000, queries)):
            query = Query(f"q{number}", [{"role": "user", "content": "?"}], (Rubric("Is helpful.", 5),))
            buffer = initial_buffer([text(number, i) for i in range(ANCHORS)], ANCHORS)
            scored.append((group_of(query, 0, texts=0), GroupScore((), before=buffer, after=buffer.visited())))
        store.commit(0, scored)


def visit(store: BufferStore, table: QueryTable, query_id: str, step: int) -> tuple[float, float]:
    """One visit: seconds to load the query and its buffer, and to commit the next one."""
    started = time.perf_counter()
    query, buffer = table[query_id], store.load(query_id)
    loaded = time.perf_counter()
    group = group_of(query, step)
    sigma = [() for _ in range(len(buffer) + 1)]
    sigma[1] = group.rollouts[:4]
    sigma[-1] = group.rollouts[4:]
    order = tuple((rollout.id,) for rollout in group.rollouts)
    after = buffer.update(sigma, step, step).visited()
    score = GroupScore(rank_rewards(order, G), order, dict.fromkeys(range(G), 1), True, buffer, after)
    ready = time.perf_counter()
    store.commit(step, [(group, score)])
    return loaded - started, time.perf_counter() - ready


def private_memory_mb() -> float:
    """Anonymous resident memory of this process (Linux)."""
    status = Path("/proc/self/status").read_text()
    return int(status.partition("RssAnon:")[2].split()[0]) / 1024


def main() -> None:
    """Fill, visit in turn, report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--queries", type=int, nargs="+", default=[1_000, 100_000])
    parser.add_argument("--visits", type=int, default=400, help="measured visits per size")
    parser.add_argument("--folder", type=Path, help="where to put the files (default: a temporary folder)")
    arguments = parser.parse_args()
    disable_progress_bars()

    with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
        opened, memory = {}, {}
        for queries in arguments.queries:
            Dataset.from_generator(
                data_rows, features=FEATURES, gen_kwargs={"queries": queries}, cache_dir=folder
            ).save_to_disk(f"{folder}/data-{queries}")
            filled = BufferStore(f"{folder}/store-{queries}.sqlite")
            fill(filled, queries)
            filled.close()
        for queries in arguments.queries:
            before = private_memory_mb()
            table = QueryTable(Dataset.load_from_disk(f"{folder}/data-{queries}"), anchors_needed=ANCHORS)
            opened[queries] = (BufferStore(f"{folder}/store-{queries}.sqlite"), table)
            memory[queries] = private_memory_mb() - before
        times = {queries: [] for queries in arguments.queries}
        before = private_memory_mb()
        chosen = random.Random(0)
        for number in track(range(arguments.visits), description="visiting", transient=True):
            for queries, (store, table) in opened.items():
                times[queries].append(visit(store, table, f"q{chosen.randrange(queries)}", number + 1))
        memory[arguments.queries[-1]] += private_memory_mb() - before

        report = Table(
            "queries", "load, ms", "commit, ms", "store on disk, MB", "private memory, MB", title="One visit"
        )
        commit = {}
        for queries in arguments.queries:
            loads, commits = ([1000 * value for value in column] for column in zip(*times[queries], strict=True))
            commit[queries] = statistics.median(commits)
            size = Path(f"{folder}/store-{queries}.sqlite").stat().st_size / 2**20
            cells = (statistics.median(loads), commit[queries], size, memory[queries])
            report.add_row(f"{queries:,}", *(f"{cell:.2f}" for cell in cells))
        Console().print(report)
        few, many = arguments.queries[0], arguments.queries[-1]
        print(
            json.dumps(
                {
                    "benchmark": "buffer_store",
                    "ratio": round(commit[many] / commit[few], 4),
                    "commit_ms": {str(queries): round(value, 3) for queries, value in commit.items()},
                    "memory_mb": round(memory[many], 1),
                    "queries": arguments.queries,
                }
            )
        )


if __name__ == "__main__":
    main()
