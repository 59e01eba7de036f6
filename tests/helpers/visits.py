"""Visits made by hand, which fill a store, and a program that is killed while it commits some."""

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

from rankbuffer_trl.buffer import Anchor, AnchorBuffer, initial_buffer
from rankbuffer_trl.groups import Query, Rollout, RolloutGroup, Rubric
from rankbuffer_trl.judge import Call, Usage
from rankbuffer_trl.rewards._method import GroupScore
from rankbuffer_trl.store import BufferStore


def ask_for(id: str) -> Query:
    return Query(id, [{"role": "user", "content": "How?"}], (Rubric("Is good.", 1),), ("worst", "bad", "good", "best"))


def call(query_id: str = "q", outcome: str = "parsed", attempts: int = 1) -> Call:
    usage = Usage(100, 60, 7) if outcome == "parsed" else Usage()
    spent, malformed = Usage(200, 60, 14), attempts if outcome == "malformed" else 0
    return Call(
        "rankbuffer", "insert", query_id, "http://judge/v1", outcome, attempts, usage, spent, 0.5, "why", malformed
    )


def visit(id: str, step: int, before: AnchorBuffer | None = None) -> tuple[RolloutGroup, GroupScore]:
    """One visit by hand: rollout 1 beats all anchors and joins, rollout 2 is empty, anchor 1 goes."""
    rollouts = (Rollout(0, f"{id} {step} middling"), Rollout(1, f"{id} {step} excellent"), Rollout(2, ""))
    before = before or initial_buffer(ask_for(id).responses, 4)
    epoch = before.visits
    added = Anchor(f"{step}-1", rollouts[1].text, "right", epoch)
    kept = tuple(replace(anchor, h=anchor.h + 1) for anchor in before.anchors[:1] + before.anchors[2:])
    after = AnchorBuffer(kept + (added,), None, epoch, epoch, epoch + 1)
    group = RolloutGroup(ask_for(id), rollouts, step, epoch)
    K = len(before)
    return group, GroupScore((0.0, 1.0, -1.0), ((0,), (1,)), {0: 1, 1: K}, False, before, after)


def visit_all(store: BufferStore, ids: str, steps: range) -> None:
    for step in steps:
        store.commit(step, [visit(id, step, store.load(id)) for id in ids], [call(id) for id in ids])


KILLED = """
import os, signal, sys
sys.path.insert(0, {tests!r})
from pathlib import Path
from dataclasses import replace
from rankbuffer_trl.groups import Rollout
from rankbuffer_trl.store import BufferStore
from helpers.visits import visit, visit_all

store = BufferStore(Path({path!r}))
visit_all(store, "ab", range(2))
store.rows("PRAGMA cache_size = 5")  # so that pages reach the file before the transaction ends

def calls():
    os.kill(os.getpid(), signal.SIGKILL)
    yield

def long_visit(id):
    group, score = visit(id, 2)
    return replace(group, rollouts=group.rollouts + (Rollout(3, "long " * 20_000),)), score

store.commit(2, [long_visit(id) for id in "abcdefgh"], calls())
"""


def killed_in_a_commit(path: Path) -> None:
    program = KILLED.format(tests=str(Path(__file__).parents[1]), path=str(path))
    subprocess.run([sys.executable, "-c", program], capture_output=True, timeout=120, check=False)
    assert path.with_name(path.name + "-journal").stat().st_size > 0
