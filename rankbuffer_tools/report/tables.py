"""The tables of a report: one dictionary per row, all rows with the same keys, ready for a chart and a CSV file."""

import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import chain
from statistics import fmean, stdev
from typing import Any, NamedTuple

from rankbuffer_trl.buffer import SOURCES
from rankbuffer_trl.groups import Rubric
from rankbuffer_trl.judge import KIND_NAMES, Totals
from rankbuffer_trl.monitoring import PROBE_NAMES, epoch_ends, probe, summary
from rankbuffer_trl.ranking import INSERTION_BINS, insertion_bin
from rankbuffer_trl.store import BufferStore, history
from rankbuffer_trl.store.history import GroupRow

TableRow = dict[str, Any]  # numbers, names, and None where there is no value
BINS = 10
PROBED = 100  # steps whose answers a report probes
BIN_WIDTH = 0.1  # width of an advantage bin
POLICY = re.compile(r"(eval_)?rewards/(?!rank_reward/).+/mean|completions/mean_length|entropy")
EPSILON = 1e-4  # TRL adds the same number to the denominator of the advantage


class StepTables(NamedTuple):
    """The tables that all groups of a run feed: by step, and the last one by epoch."""

    rewards: list[TableRow]
    insertions: list[TableRow]
    occupancy: list[TableRow]
    maintenance: list[TableRow]


def step_tables(store: BufferStore) -> StepTables:
    """Make four tables in one pass over the groups.

    * `rewards`, see [`reward_row`].
    * `insertions`: the number of placed rollouts, and the share of each insertion bin; `None` without any.
    * `occupancy`: how the rollouts of a group share the intervals of its buffer, see [`occupancy_row`].
    * `maintenance`: by epoch, the anchors that were added and pruned, in all and by source.
    """
    # One pass: reading the groups takes most of a long page's time.
    tables, answered = StepTables([], [], [], []), history.answers_by_step(store)
    changes: dict[int, tuple[Counter, Counter]] = defaultdict(lambda: (Counter(), Counter()))
    for step in history.steps(store):
        groups = history.groups(store, step=step)  # no other step is in memory
        head = {"step": step, "epoch": groups[0].epoch}
        tables.rewards.append(head | reward_row([group.rewards for group in groups], answered.get(step, 0)))
        bins = Counter(insertion_bin(p, group.k) for group in groups for p in group.positions.values())
        placed = bins.total()
        shares = {name: bins[name] / placed if placed else None for name in INSERTION_BINS}
        tables.insertions.append(head | {"placed": placed, **shares})
        tables.occupancy.append(head | occupancy_row(groups))
        added, pruned = changes[groups[0].epoch]
        for group in groups:
            added.update(source for _, source in group.added)
            pruned.update(source for _, source in group.pruned)
    for epoch, (added, pruned) in sorted(changes.items()):
        sources = {f"added_{source}": added[source] for source in SOURCES}
        sources |= {f"pruned_{source}": pruned[source] for source in SOURCES}
        tables.maintenance.append({"epoch": epoch, "added": added.total(), "pruned": pruned.total(), **sources})
    return tables


def reward_row(rewards: Sequence[Sequence[float | None]], answered: int) -> TableRow:
    """Return how far the rewards of a group lie apart, and which rollouts have none."""
    scored = [without_none(group) for group in rewards]
    n = sum(map(len, rewards))
    counts = [Counter(group) for group in scored]
    tied = sum(count for group in counts for count in group.values() if count > 1)
    spreads = [stdev(group) for group in scored if len(group) > 1]
    return {
        "groups": len(rewards),
        "rollouts": n,
        "mean": fmean(chain.from_iterable(scored)) if any(scored) else None,
        "spread": fmean(spreads) if spreads else None,  # within a group (ddof 1); one reward has none
        "levels": fmean(map(len, counts)),  # different rewards in a group
        "tied": tied / n,  # a share of the rollouts, as are the two below
        "unscored": (n - sum(map(len, scored))) / n,
        "empty": (n - answered) / n,  # without an answer
    }


def occupancy_row(groups: Sequence[GroupRow]) -> TableRow:
    """Return means over the groups that were placed."""
    placed = [(group.k, Counter(group.positions.values())) for group in groups if group.positions]
    rollouts = sum(counts.total() for _, counts in placed)
    return {
        "intervals": fmean(k + 1 for k, _ in placed) if placed else None,  # also below all anchors and above them
        "occupied": fmean(len(counts) for _, counts in placed) if placed else None,
        # These need no fine ranking.
        "alone": sum(n == 1 for _, counts in placed for n in counts.values()) / rollouts if placed else None,
    }


def without_none(values: Iterable[float | None]) -> list[float]:
    return [value for value in values if value is not None]


def judge_table(store: BufferStore, log: Sequence[dict] = ()) -> list[TableRow]:
    """Return, by step, what judging cost in training.

    `seconds` is the time that the step waited for the judge, from the trainer's log; `None` where the log does not
    reach.
    """
    wall = {entry["step"]: entry["judge/seconds"] for entry in log if "judge/seconds" in entry}
    return [
        {
            "step": step,
            "calls": sums.calls,  # parsed calls, as in the paper; so are three kinds of tokens
            "failures": sums.failures,
            "attempts": sums.attempts - cancelled.attempts,
            "prompt_tokens": sums.prompt_tokens,
            "cached_tokens": sums.cached_tokens,  # a part of `prompt_tokens`
            "completion_tokens": sums.completion_tokens,
            "spent_tokens": sums.spent_tokens,  # of all attempts
            "request_seconds": sums.seconds,  # a sum, although many requests run at the same time
            # The trainer logs the metrics of a step after it, under the next number.
            "seconds": wall.get(step + 1),
        }
        for step, sums, cancelled in _ledger(store, "step")
    ]


def kind_table(store: BufferStore) -> list[TableRow]:
    """Return, by kind of judgment, calls, failures, tokens and means per parsed call."""
    kinds = sorted(_ledger(store, "kind"), key=lambda entry: -entry[1].calls)  # frequent kinds first
    return [
        {
            "kind": KIND_NAMES.get(kind, kind),
            "calls": sums.calls,
            "failures": sums.failures,
            "attempts": (requests := sums.attempts - cancelled.attempts),
            "tokens": sums.tokens,
            "tokens_per_call": sums.tokens / sums.calls if sums.calls else None,
            "seconds_per_attempt": (sums.seconds - cancelled.seconds) / requests if requests else None,
        }
        for kind, sums, cancelled in kinds
    ]


def _ledger(store: BufferStore, column: str) -> Iterator[tuple[Any, Totals, Totals]]:
    """Yield each value of a column of the ledger with its sums, and those of its cancelled calls alone."""
    # Neither succeeded nor failed: no repeat follows from them.
    cancelled = history.totals_by(store, column, outcome="cancelled")
    for value, sums in history.totals_by(store, column).items():
        yield value, sums, cancelled.get(value, Totals())


def composition_table(store: BufferStore) -> list[TableRow]:
    """Return, by epoch and tenth of the quality scale, anchors by source (figure "Dynamic buffer evolution", b)."""
    table = []
    for epoch, buffers in epoch_ends(store):
        counts: list[Counter[str]] = [Counter() for _ in range(BINS)]
        for anchors in buffers.values():
            for rank, anchor in enumerate(anchors):
                # On a scale 0..100, since buffers differ in length. Integers keep a border exact.
                number = min(BINS * rank // (len(anchors) - 1), BINS - 1)  # the best joins the last
                counts[number][anchor.source] += 1
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


def advantages(store: BufferStore, steps: Iterable[int]) -> dict[int, list[list[float | None]]]:
    """Return, by step, the advantages of each group of these steps, normalised as GRPO does it."""
    # Without the format reward, which the store does not have.
    return {
        step: [group_advantages(group.rewards) for group in history.groups(store, step=step)] for step in sorted(steps)
    }


def group_advantages(rewards: Sequence[float | None]) -> list[float | None]:
    """Return `(r - mean) / (std + eps)` over the rollouts that have a reward (see "Rank-Based Reward")."""
    scored = without_none(rewards)
    if len(scored) < 2:  # a group of one has no deviation
        return [None if reward is None else 0.0 for reward in rewards]
    mean, scale = fmean(scored), stdev(scored) + EPSILON
    return [None if reward is None else (reward - mean) / scale for reward in rewards]


def advantage_bins(groups: Sequence[Sequence[float | None]]) -> list[TableRow]:
    """Return the bins of width `BIN_WIDTH` that hold advantages, and the share of the rollouts that each holds."""
    levels = Counter(round(value / BIN_WIDTH) for group in groups for value in without_none(group))
    n = levels.total()
    return [{"advantage": round(level * BIN_WIDTH, 1), "share": count / n} for level, count in sorted(levels.items())]


def distinct(groups: Sequence[Sequence[float | None]]) -> float:
    """Return the mean number of different advantages in a group."""
    return fmean(len(set(without_none(group))) for group in groups)


def quality_table(store: BufferStore, quality: Callable[[str, str], float]) -> list[TableRow]:
    """Return, by step, the mean of a measure `quality(query_id, text)` over the rollouts that have an answer."""
    steps: dict[int, list[float]] = defaultdict(list)
    for query_id in history.query_ids(store):
        for response in history.responses(store, query_id):
            if not response.initial:
                steps[response.step].append(quality(query_id, response.text))
    return [{"step": step, "quality": fmean(values)} for step, values in sorted(steps.items())]


def probe_table(
    store: BufferStore, rubrics: Callable[[str], Sequence[Rubric]] = lambda query_id: (), log: Sequence[dict] = ()
) -> list[TableRow]:
    """Return, by step, the probes of the answers and how far rewards follow them, see [`summary`].

    Of the steps that the log does not reach, at most `PROBED` are probed again. `rubrics` tells those of a query.
    """
    names = [each for name in PROBE_NAMES for each in (name, f"{name}_with_reward")]
    # The trainer logs the metrics of a step after it, under the next number.
    by_step = {
        entry["step"] - 1: {name: entry[f"probe/{name}"] for name in names if f"probe/{name}" in entry}
        for entry in log
        if f"probe/{PROBE_NAMES[0]}" in entry
    }
    rest = [step for step in history.steps(store) if step > max(by_step, default=-1)]
    for step in rest[:: max(1, -(-len(rest) // PROBED))]:  # evenly spread, since probes take most of a report's time
        probed = []
        for group in history.groups(store, step=step):
            answers, weighted = history.responses(store, group.query_id, step=step), rubrics(group.query_id)
            rewards = {f"{step}-{i}": reward for i, reward in enumerate(group.rewards)}
            probed.append([(probe(each.text, weighted), rewards.get(each.id)) for each in answers if not each.initial])
        if row := summary(probed):  # a step may have no answer
            by_step[step] = row
    names = [name for name in names if any(name in row for row in by_step.values())]
    return [{"step": step} | {name: row.get(name) for name in names} for step, row in sorted(by_step.items())]


def efficiency_table(judge: Sequence[TableRow], quality: Sequence[TableRow], window: int) -> list[TableRow]:
    """Return, by step, judge calls and tokens so far, and the mean quality of the last `window` steps."""
    calls = tokens = 0
    costs = {}
    for row in judge:
        calls += row["calls"]
        tokens += row["prompt_tokens"] + row["completion_tokens"]
        costs[row["step"]] = calls, tokens
    means = trailing_means([row["quality"] for row in quality], window)
    table, so_far = [], (0, 0)
    for row, mean in zip(quality, means, strict=True):
        so_far = costs.get(row["step"], so_far)  # a step without a judgment costs nothing
        table.append({"step": row["step"], "calls": so_far[0], "tokens": so_far[1], "quality": mean})
    return table


def trailing_means(values: Sequence[float], window: int) -> list[float]:
    """Return, for each value, the mean of itself and up to `window - 1` values before it."""
    return [fmean(values[max(i - window + 1, 0) : i + 1]) for i in range(len(values))]


def log_table(log: Sequence[dict]) -> list[TableRow]:
    """Return, by logged step, the values of the policy in the trainer's log; empty if there are none."""
    names = sorted({name for entry in log for name in entry if POLICY.fullmatch(name)})
    rows = [{"step": entry["step"]} | {name: entry.get(name) for name in names} for entry in log]
    return [row for row in rows if any(row[name] is not None for name in names)]


def joined(tables: Mapping[str, Sequence[TableRow]]) -> list[TableRow]:
    """Return the tables of several runs as one table with a column `run`."""
    return [{"run": run} | row for run, table in tables.items() for row in table]
