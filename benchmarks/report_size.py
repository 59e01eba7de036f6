"""Measure time and memory of `rankbuffer-report` on runs of different lengths.

    python benchmarks/report_size.py
    python benchmarks/report_size.py --steps 50 1600 --folder /big/disk

For each number of steps the script makes a run: 20 groups of 8 rollouts a step over 1,000 queries, whose buffers grow
and are pruned. Then it makes the page of the run in a process of its own. The script prints a table, and then one JSON
line. `memory_ratio` is the peak memory of the longest run over that of the shortest. `ms_a_group` is the CPU time that
each further group of the longest run takes.
"""

import argparse
import json
import random
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from buffer_store import STEP, G, group_of, text
from rich.console import Console
from rich.table import Table

from rankbuffer_trl.buffer import initial_buffer
from rankbuffer_trl.groups import Query, Rubric
from rankbuffer_trl.judge import Call, Usage
from rankbuffer_trl.ranking import rank_rewards
from rankbuffer_trl.rewards import GroupScore
from rankbuffer_trl.store import LIVE_STORE, BufferStore

ANCHORS, CALLS = 4, 9
COST = """import resource, subprocess, sys
subprocess.run(sys.argv[1:], check=True, stdout=subprocess.DEVNULL)
used = resource.getrusage(resource.RUSAGE_CHILDREN)
print(used.ru_utime + used.ru_stime, used.ru_maxrss)"""


def make_run(path: Path, steps: int, queries: int, length: int) -> None:
    """Write the store of a run that has taken so many steps."""
    draw, store = random.Random(0), BufferStore(path)
    for step in range(steps):
        scored, epoch = [], step * STEP // queries
        for number in range(step * STEP, (step + 1) * STEP):
            responses = tuple(text(length, number % queries, i) for i in range(ANCHORS))
            query = Query(
                f"q{number % queries}", [{"role": "user", "content": "?"}], (Rubric("Is good.", 5),), responses
            )
            buffer = store.load(query.id) or initial_buffer(responses, ANCHORS)
            group = replace(group_of(query, step, length), epoch=epoch)
            places = sorted(min(len(buffer), draw.randrange(len(buffer) + 1 + epoch)) for _ in range(G))
            sigma = [tuple(group.rollouts[i] for i in range(G) if places[i] == p) for p in range(len(buffer) + 1)]
            order = tuple((rollout.id,) for rollout in group.rollouts)
            after = buffer.update(sigma, epoch, step, H=2).visited().thinned(12)
            rewards = rank_rewards(order, G)
            scored.append((group, GroupScore(rewards, order, dict(enumerate(places)), True, buffer, after)))
        usage = Usage(1000, 400, 20)
        ledger = [
            Call("", "coarse", group.query.id, "", "parsed", 1, usage, usage, 0.5)
            for group, _ in scored
            for _ in range(CALLS)
        ]
        store.commit(step, scored, ledger)
    store.close()


def cost_of(words: Sequence[str]) -> tuple[float, float]:
    """Return CPU seconds and peak memory in MB of a process."""
    # A small process starts it: the peak memory of a process counts that of the one that started it.
    found = subprocess.run([sys.executable, "-c", COST, *words], check=True, capture_output=True, text=True).stdout
    seconds, kilobytes = map(float, found.split())
    return seconds, kilobytes / 1024


def main() -> None:
    """Make the runs and their pages, and report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, nargs="+", default=[50, 400, 1600])
    parser.add_argument("--queries", type=int, default=1000)
    parser.add_argument("--response_bytes", type=int, default=2000, help="length of a response")
    parser.add_argument("--folder", type=Path, help="where to keep the runs (default: a temporary folder)")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        costs = {}
        for steps in sorted(arguments.steps):
            run = (arguments.folder or Path(scratch)) / str(steps)
            if not (run / LIVE_STORE).is_file():
                make_run(run / LIVE_STORE, steps, arguments.queries, arguments.response_bytes)
            report = [sys.executable, "-m", "rankbuffer_tools.report.command", str(run), "--output", f"{scratch}/page"]
            costs[steps] = cost_of(report)
    table = Table("steps", "groups", "CPU, s", "peak memory, MB", title="rankbuffer-report")
    for steps, (seconds, memory) in costs.items():
        table.add_row(f"{steps:,}", f"{steps * STEP:,}", f"{seconds:.1f}", f"{memory:.0f}")
    Console().print(table)
    (few, (short, small)), *_, (many, (long, large)) = costs.items()
    further = max(many - few, 1) * STEP
    found = {"memory_ratio": round(large / small, 3), "ms_a_group": round(1000 * (long - short) / further, 3)}
    print(json.dumps({"benchmark": "report_size", **found, "steps": sorted(costs)}))


if __name__ == "__main__":
    main()
