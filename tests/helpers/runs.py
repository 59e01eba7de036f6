"""Runs to report on: scored groups of numbers, kept beside the store they were committed to."""

import json
import random
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from conftest import by_number, group, numbers, scripted_judge, unreachable

from rankbuffer_trl.buffer import AnchorBuffer, initial_buffer
from rankbuffer_trl.groups import Query, Rollout, RolloutGroup
from rankbuffer_trl.judge import Call
from rankbuffer_trl.rewards.method import GroupScore, RewardMethod
from rankbuffer_trl.rewards.rankbuffer import RankBuffer
from rankbuffer_trl.store import BufferStore
from rankbuffer_trl.training.scorer import GroupScorer


@dataclass
class Recorded:
    """What was committed: groups with their scores in order, and calls by step."""

    path: Path
    visits: list[tuple[RolloutGroup, GroupScore]]
    calls: list[tuple[int, Call]]


def answer(messages: list[dict]) -> str | Exception:
    """By number, or by its last digit where a score is wanted; nobody ever places a 13."""
    if "\nCANDIDATE\n13\n" in messages[0]["content"]:
        return unreachable(messages)
    if response := re.search(r"\n\nRESPONSE\n\d*(\d)\n", messages[0]["content"]):
        return json.dumps({"score": int(response[1])})
    return by_number(messages)


def record(path: Path, epochs: int = 4, queries: int = 4, method: RewardMethod | None = None) -> Recorded:
    """A run of two queries a step, whose rollouts get better; some have no answer, some never get a verdict."""
    draw = random.Random(0)
    scorer = GroupScorer(
        method or RankBuffer(prune_after=2), scripted_judge(answer), BufferStore(path), max_failures=1
    )
    found = Recorded(path, [], [])
    asked = [numbers(f"q{i}") for i in range(queries)]
    try:
        step = 0
        for epoch in range(epochs):
            for first in range(0, queries, 2):
                groups = []
                for query in asked[first : first + 2]:
                    texts = (str(draw.randrange(5 + 8 * epoch, 40 + 8 * epoch)) for _ in range(8))
                    texts = ("-" if draw.random() < 0.05 else "13" if draw.random() < 0.05 else text for text in texts)
                    groups.append(group(query, " ".join(texts), step, epoch))
                outcome = scorer.score(groups, step)
                found.visits += zip(groups, outcome.scores, strict=True)
                found.calls += [(step, call) for call in outcome.calls]
                step += 1
    finally:
        scorer.close()
    return found


HOSTILE = (
    "</script><script>window.hacked = 1</script>",
    "<img src=x onerror='window.hacked = 1'>",
    "]]> --> <!-- <svg onload=window.hacked=1>",
    "a\x00b\x1b[31mc",
    "\u202egnitirw tfel ot thgir",
    "${window.hacked = 1} `${1}` $title \\u003c \\",
    "משהו בעברית",
    "[x](javascript:window.hacked=1) \u2028 {{ 7 * 7 }} \u2066",
)


def placed(
    query: Query, buffer: AnchorBuffer, texts: Sequence[str], positions: Sequence[int], step: int, epoch: int
) -> tuple[RolloutGroup, GroupScore]:
    """Score rollouts that are given from the worst to the best, each with its position among the anchors."""
    rollouts = tuple(Rollout(i, text) for i, text in enumerate(texts))
    sigma = [[r for r in rollouts if positions[r.id] == position] for position in range(len(buffer) + 1)]
    after = buffer.update(sigma, epoch, step).visited()
    rewards = tuple(-1 + 2 * i / (len(texts) - 1) for i in range(len(texts)))
    order = tuple((rollout.id,) for rollout in rollouts)
    score = GroupScore(rewards, order, dict(enumerate(positions)), True, buffer, after)
    return RolloutGroup(query, rollouts, step, epoch), score


def record_hostile(path: Path) -> list[str]:
    """One visit of a query whose id, anchors and rollouts try to break the page; returns the rollouts."""
    anchors = [f"{text} {number}" for number, text in enumerate(HOSTILE[:4])]
    query = Query(f"{HOSTILE[0]}&\"'", [{"role": "user", "content": HOSTILE[1]}], numbers().rubrics, tuple(anchors))
    positions = [0, *[4] * (len(HOSTILE) - 1)]
    store = BufferStore(path)
    store.commit(0, [placed(query, initial_buffer(query.responses, 4), HOSTILE, positions, step=0, epoch=0)])
    store.close()
    return list(HOSTILE)


def anchor_rows(buffer) -> list[dict]:
    """A buffer as the page has it."""
    names = ("id", "source", "epoch", "h")
    return [{name: getattr(anchor, name) for name in names} for anchor in buffer.anchors] if buffer else []
