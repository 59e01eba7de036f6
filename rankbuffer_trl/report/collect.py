"""Numbers out of a run's store, as tables: one dictionary per row, all with the same keys, ready for a CSV file.

Quality by step, and buffers and costs by epoch, are in `history.py`.
"""

import json
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from itertools import chain, groupby
from statistics import fmean, stdev
from typing import Any

from ..buffer import SOURCES
from ..ranking import INSERTION_BINS, insertion_bin
from ..store import BufferStore
from .history import buffers_by_epoch, epoch_ends, quality_by_step

Row = dict[str, Any]  # numbers, names, and None where there is no value
BINS = 10
POLICY = re.compile(r"(eval_)?rewards/(?!rank_reward/).+/mean|completions/mean_length|entropy")
EPSILON = 1e-4  # TRL's, in the denominator of the advantage


def reward_table(store: BufferStore) -> list[Row]:
    """By step: how far the rewards of a group lie apart, and what has no reward, no answer or no place of its own.

    `mean` is that of all rewards; `spread` is the standard deviation within a group (ddof 1), averaged over the groups
    that have two rewards;
    `unscored`, `empty` and `tied` are shares of the rollouts; `levels` is the mean number of different rewards in a
    group.
    """
    answered = Counter(
        dict(store.rows("SELECT step, count(*) FROM responses WHERE id NOT LIKE 'initial-%' GROUP BY step"))
    )
    table = []
    for step, epoch, groups in _groups(store, "rewards"):
        rewards = [json.loads(text) for (text,) in groups]
        known = [[reward for reward in group if reward is not None] for group in rewards]
        n = sum(map(len, rewards))
        counts = [Counter(group) for group in known]
        tied = sum(count for group in counts for count in group.values() if count > 1)
        spreads = [stdev(group) for group in known if len(group) > 1]
        table.append(
            {
                "step": step,
                "epoch": epoch,
                "groups": len(rewards),
                "rollouts": n,
                "mean": fmean(chain.from_iterable(known)) if any(known) else None,
                "spread": fmean(spreads) if spreads else None,
                "levels": fmean(map(len, counts)),
                "tied": tied / n,
                "unscored": sum(reward is None for group in rewards for reward in group) / n,
                "empty": (n - answered[step]) / n,
            }
        )
    return table


def _groups(store: BufferStore, columns: str) -> Iterator[tuple[int, int, list[tuple]]]:
    """(step, epoch, those columns of its groups) for each step."""
    rows = store.rows(f"SELECT step, epoch, {columns} FROM groups ORDER BY step, query_id")
    for (step, epoch), group in groupby(rows, key=lambda row: row[:2]):
        yield step, epoch, [row[2:] for row in group]


def judge_table(store: BufferStore, log: Sequence[dict] = ()) -> list[Row]:
    """By step: what judging cost in training.

    `calls` and the three kinds of tokens are those of parsed calls, as the paper counts, `cached_tokens` a part of
    `prompt_tokens`; `spent_tokens` are those of all attempts. `request_seconds` adds up requests, of which many are in
    flight at once; `seconds` is the wall time of judging, from the trainer's log (an average where it logs every few
    steps), and missing where the log does not reach.
    """
    wall = {entry["step"]: entry["judge/seconds"] for entry in log if "judge/seconds" in entry}
    rows = store.rows(
        "SELECT step, sum(outcome = 'parsed'), sum(outcome IN ('malformed', 'unreachable')),"
        " sum(attempts * (outcome != 'cancelled')),"
        " sum(prompt_tokens), sum(cached_tokens), sum(completion_tokens),"
        " sum(spent_prompt_tokens + spent_completion_tokens), sum(seconds)"
        " FROM calls WHERE phase = 'train' GROUP BY step ORDER BY step"
    )
    names = (
        *("step", "calls", "failures", "attempts", "prompt_tokens", "cached_tokens", "completion_tokens"),
        *("spent_tokens", "request_seconds"),
    )
    # The trainer logs a step's metrics after it, under the next number.
    return [dict(zip(names, row, strict=True)) | {"seconds": wall.get(row[0] + 1)} for row in rows]


def kind_table(store: BufferStore) -> list[Row]:
    """By kind of judgment: calls, failures, tokens, and means per parsed call."""
    rows = store.rows(
        "SELECT kind, sum(outcome = 'parsed'), sum(outcome IN ('malformed', 'unreachable')),"
        " sum(attempts * (outcome != 'cancelled')),"
        " sum(prompt_tokens + completion_tokens), sum(seconds)"
        " FROM calls WHERE phase = 'train' GROUP BY kind ORDER BY 2 DESC"
    )
    return [
        {
            "kind": kind,
            "calls": calls,
            "failures": failures,
            "attempts": attempts,
            "tokens": tokens,
            "tokens_per_call": tokens / calls if calls else None,
            "seconds_per_attempt": seconds / attempts if attempts else None,
        }
        for kind, calls, failures, attempts, tokens, seconds in rows
    ]


def growth_table(store: BufferStore) -> list[Row]:
    """By epoch: anchors per query at its end, in all and by source (figure "Dynamic buffer evolution", a)."""
    return [
        {"epoch": entry.epoch, "queries": entry.queries, "anchors": entry.size, **entry.sources}
        for entry in buffers_by_epoch(store)
    ]


def composition_table(store: BufferStore) -> list[Row]:
    """By epoch and tenth of the quality scale: live anchors by source (figure "Dynamic buffer evolution", b).

    Buffers differ in length, so ranks are normalised: the worst anchor of a buffer stands at 0, the best at 100. Bins
    hold their lower end, the last one both ends.
    """
    table = []
    for epoch, buffers in epoch_ends(store):
        counts: list[Counter[str]] = [Counter() for _ in range(BINS)]
        for anchors in buffers.values():
            for rank, (_, source, *_) in enumerate(anchors):
                counts[scale_bin(rank, len(anchors))][source] += 1
        table += [
            {
                "epoch": epoch,
                "from": 100 * number // BINS,
                "to": 100 * (number + 1) // BINS,
                "anchors": sources.total(),
                **{source: sources[source] for source in SOURCES},
            }
            for number, sources in enumerate(counts)
        ]
    return table


def scale_bin(rank: int, K: int) -> int:
    """The bin of the anchor of rank 0..K-1. In whole numbers, so that no rounding moves an anchor that lies on a
    border."""
    return min(BINS * rank // (K - 1), BINS - 1)


def insertion_table(store: BufferStore) -> list[Row]:
    """By step: rollouts that were placed, and the share of each insertion bin; `None` where none was."""
    table = []
    for step, epoch, groups in _groups(store, "k, positions"):
        bins = Counter(insertion_bin(p, k) for k, positions in groups for p in json.loads(positions).values())
        placed = bins.total()
        shares = {name: bins[name] / placed if placed else None for name in INSERTION_BINS}
        table.append({"step": step, "epoch": epoch, "placed": placed, **shares})
    return table


def occupancy_table(store: BufferStore) -> list[Row]:
    """By step: how the rollouts of a group share the intervals of its buffer.

    `intervals` is `K + 1`, `occupied` how many of them hold a rollout, `alone` the share of placed rollouts that are
    alone in theirs and need no fine ranking; means over the groups that were placed.
    """
    table = []
    for step, epoch, groups in _groups(store, "k, positions"):
        placed = [(k, Counter(json.loads(positions).values())) for k, positions in groups if positions != "{}"]
        rollouts = sum(counts.total() for _, counts in placed)
        table.append(
            {
                "step": step,
                "epoch": epoch,
                "intervals": fmean(k + 1 for k, _ in placed) if placed else None,
                "occupied": fmean(len(counts) for _, counts in placed) if placed else None,
                "alone": sum(n == 1 for _, counts in placed for n in counts.values()) / rollouts if placed else None,
            }
        )
    return table


def maintenance_table(store: BufferStore) -> list[Row]:
    """By epoch: anchors added and pruned, in all and by source."""
    changes: dict[int, tuple[Counter, Counter]] = defaultdict(lambda: (Counter(), Counter()))
    for _, epoch, groups in _groups(store, "added, pruned"):
        for row in groups:
            for counts, text in zip(changes[epoch], row, strict=True):
                counts.update(source for _, source in json.loads(text))
    return [
        {
            "epoch": epoch,
            "added": added.total(),
            "pruned": pruned.total(),
            **{f"added_{source}": added[source] for source in SOURCES},
            **{f"pruned_{source}": pruned[source] for source in SOURCES},
        }
        for epoch, (added, pruned) in sorted(changes.items())
    ]


def advantages(store: BufferStore) -> dict[int, list[list[float | None]]]:
    """By step: the advantages of each group, normalised as GRPO does it.

    Of the method's reward alone: the format reward is not in the store. `None` where a rollout has no reward.
    """
    return {
        step: [group_advantages(json.loads(text)) for (text,) in groups]
        for step, _, groups in _groups(store, "rewards")
    }


def group_advantages(rewards: Sequence[float | None]) -> list[float | None]:
    """`(r - mean) / (std + eps)` over the rollouts that have a reward (section "Rank-Based Reward and Advantage")."""
    known = [reward for reward in rewards if reward is not None]
    if len(known) < 2:
        return [None if reward is None else 0.0 for reward in rewards]
    mean, scale = fmean(known), stdev(known) + EPSILON
    return [None if reward is None else (reward - mean) / scale for reward in rewards]


def quality_table(store: BufferStore, quality: Callable[[str, str], float]) -> list[Row]:
    """By step: mean of any measure `quality(query_id, text)` over its rollouts."""
    return [{"step": step, "quality": value} for step, value in quality_by_step(store, quality)]


def efficiency_table(judge: Sequence[Row], quality: Sequence[Row], window: int) -> list[Row]:
    """By step: judge calls and tokens so far, and mean quality of the last `window` steps (figures on efficiency)."""
    calls = tokens = 0
    costs = {}
    for row in judge:
        calls += row["calls"]
        tokens += row["prompt_tokens"] + row["completion_tokens"]
        costs[row["step"]] = calls, tokens
    values = [row["quality"] for row in quality]
    table, so_far = [], (0, 0)
    for i, row in enumerate(quality):
        so_far = costs.get(row["step"], so_far)
        last = values[max(i - window + 1, 0) : i + 1]
        table.append({"step": row["step"], "calls": so_far[0], "tokens": so_far[1], "quality": fmean(last)})
    return table


def log_table(log: Sequence[dict]) -> list[Row]:
    """By logged step: what the trainer's log says of the policy. Empty if it says nothing."""
    names = sorted({name for entry in log for name in entry if POLICY.fullmatch(name)})
    rows = [{"step": entry["step"]} | {name: entry.get(name) for name in names} for entry in log]
    return [row for row in rows if any(row[name] is not None for name in names)]
