"""Runs to report on and to judge again: scored groups of numbers, kept beside the store they were committed to."""

import json
import random
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from conftest import by_number, group, numbers, scripted_judge, unreachable

from rankbuffer_trl.buffer import AnchorBuffer, initial_buffer
from rankbuffer_trl.data._queries import QueryTable, load_queries
from rankbuffer_trl.groups import Query, Rollout, RolloutGroup
from rankbuffer_trl.judge import Call, Totals
from rankbuffer_trl.rewards._method import GroupScore, RewardMethod
from rankbuffer_trl.rewards._rankbuffer import RankBuffer
from rankbuffer_trl.store import BufferStore
from rankbuffer_trl.training._scorer import GroupScorer

Visit = tuple[RolloutGroup, GroupScore]


@pytest.fixture(name="store", scope="module")
def store_of_run(run):
    """The store of `run`. A test file imports it in the place of the empty one of `conftest.py`."""
    store = BufferStore(run.path)
    yield store
    store.close()


@dataclass
class Recorded:
    """What was committed: groups with their scores in order, and calls by step."""

    path: Path
    visits: list[Visit] = field(default_factory=list)
    calls: list[tuple[int, Call]] = field(default_factory=list)

    @property
    def totals(self) -> Totals:
        return Totals.of(call for _, call in self.calls)

    @property
    def steps(self) -> dict[int, list[Visit]]:
        """Groups and scores by step."""
        found: dict[int, list[Visit]] = {}
        for visit in self.visits:
            found.setdefault(visit[0].step, []).append(visit)
        return found

    def last_buffers(self, epoch: int) -> dict[str, AnchorBuffer]:
        """The newest buffer of each query at the end of an epoch."""
        return {group.query.id: score.after for group, score in self.visits if group.epoch <= epoch and score.after}


def answer(messages: list[dict]) -> str | Exception:
    """By number, or by its last digit where a score is wanted; nobody ever places a 13."""
    if "\nCANDIDATE\n13\n" in messages[0]["content"]:
        return unreachable(messages)
    if response := re.search(r"\n\nRESPONSE\n\d*(\d)\n", messages[0]["content"]):
        return json.dumps({"score": int(response[1])})
    return by_number(messages)


def uneven(epochs: int, queries: int) -> Iterator[list[RolloutGroup]]:
    """Yield steps of two queries, whose rollouts get better; some have no answer, some never get a verdict."""
    draw, step = random.Random(0), 0
    for epoch in range(epochs):
        for first in range(0, queries, 2):
            groups = []
            for i in range(first, min(first + 2, queries)):
                texts = (str(draw.randrange(5 + 8 * epoch, 40 + 8 * epoch)) for _ in range(8))
                texts = ("-" if draw.random() < 0.05 else "13" if draw.random() < 0.05 else text for text in texts)
                groups.append(group(numbers(f"q{i}"), " ".join(texts), step, epoch))
            yield groups
            step += 1


def distinct(queries: int, epochs: int, gain: int, last: int | None = None) -> Iterator[list[RolloutGroup]]:
    """Yield epochs of one step: different numbers, none of them that of an anchor.

    The last epoch may have fewer queries.
    """
    draw = random.Random(5)
    for epoch in range(epochs):
        groups = []
        for i in range(queries if last is None or epoch < epochs - 1 else last):
            values = draw.sample([n for n in range(2, 55) if n % 10], 4)
            groups.append(group(numbers(f"q{i}"), " ".join(str(v + gain * epoch) for v in values), epoch, epoch))
        yield groups


def score(path: Path, steps: Iterable[list[RolloutGroup]], method: RewardMethod, judge=answer) -> Recorded:
    """Score steps of groups into a new store."""
    scorer, found = GroupScorer(method, scripted_judge(judge), BufferStore(path), max_failures=1), Recorded(path)
    try:
        for groups in steps:
            outcome = scorer.score(groups, groups[0].step)
            found.visits += zip(groups, outcome.scores, strict=True)
            found.calls += [(groups[0].step, call) for call in outcome.calls]
    finally:
        scorer.close()
    return found


def record(path: Path, epochs: int = 4, queries: int = 4, method: RewardMethod | None = None) -> Recorded:
    return score(path, uneven(epochs, queries), method or RankBuffer(prune_after=2))


def commit(path: Path, queries: int, epochs: int, gain: int, last: int | None = None) -> Recorded:
    """Score groups of different numbers with the judge that knows the truth."""
    return score(path, distinct(queries, epochs, gain, last), RankBuffer(), by_number)


def data_of(path: Path, queries: int = 4) -> Path:
    """Write the queries of these runs as a training set."""
    rows = []
    for query in (numbers(f"q{i}") for i in range(queries)):
        rubrics = [{"text": rubric.text, "weight": rubric.weight} for rubric in query.rubrics]
        rows.append({"query_id": query.id, "prompt": query.prompt, "rubrics": rubrics, "responses": query.responses})
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def table_of(path: Path, queries: int = 4) -> QueryTable:
    return QueryTable(load_queries(str(data_of(path, queries))), 4)


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
