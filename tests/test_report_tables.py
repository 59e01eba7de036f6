"""The tables of a report, against slow counting over what was scored."""

from collections import Counter
from fractions import Fraction
from statistics import fmean, stdev

import pytest

from rankbuffer_lab.report import tables
from rankbuffer_lab.report.charts import judge_charts
from rankbuffer_lab.report.report import advantage_lanes
from rankbuffer_trl.buffer import SOURCES
from rankbuffer_trl.store import BufferStore
from rankbuffer_trl.store.growth import growth_table


@pytest.fixture(scope="module")
def store(run):
    store = BufferStore(run.path)
    yield store
    store.close()


def by_step(run):
    """(step, its groups and scores)."""
    for step in sorted({group.step for group, _ in run.visits}):
        yield step, [(group, score) for group, score in run.visits if group.step == step]


def last_buffers(run, epoch):
    """The newest buffer of each query at the end of an epoch."""
    return {group.query.id: score.after for group, score in run.visits if group.epoch <= epoch and score.after}


def test_the_runs_under_test_have_everything_to_count(run):
    scores = [score for _, score in run.visits]
    assert any(reward is None for score in scores for reward in score.rewards)
    assert any(group.empty for group, _ in run.visits)
    sources = {anchor.source for buffer in last_buffers(run, 3).values() for anchor in buffer.anchors}
    assert {"initial", "refine", "right"} <= sources
    assert any(set(score.before.anchors) - set(score.after.anchors) for score in scores)


def test_rewards_by_step(run, store):
    table = tables.reward_table(store)
    for row, (step, visits) in zip(table, by_step(run), strict=True):
        rewards = [list(score.rewards) for _, score in visits]
        flat = [reward for group in rewards for reward in group]
        known = [[r for r in group if r is not None] for group in rewards]
        tied = sum(group.count(r) > 1 for group in known for r in group)
        assert row["step"] == step and row["rollouts"] == len(flat) and row["groups"] == len(visits)
        assert row["unscored"] == flat.count(None) / len(flat)
        assert row["empty"] == sum(len(group.empty) for group, _ in visits) / len(flat)
        assert row["tied"] == pytest.approx(tied / len(flat))
        assert row["mean"] == pytest.approx(fmean(r for group in known for r in group))
        assert row["levels"] == fmean(len(set(group)) for group in known)
        assert row["spread"] == pytest.approx(fmean(stdev(group) for group in known if len(group) > 1))


def test_judge_costs_by_step_and_kind(run, store):
    table = tables.judge_table(store, [{"step": 3, "judge/seconds": 7.5}, {"step": 4, "loss": 1.0}])
    for row in table:
        calls = [call for step, call in run.calls if step == row["step"]]
        parsed = [call for call in calls if call.outcome == "parsed"]
        assert row["calls"] == len(parsed)
        assert row["failures"] == len(calls) - len(parsed)
        assert row["attempts"] == sum(call.attempts for call in calls)
        assert row["prompt_tokens"] == 10 * len(parsed)
        assert row["cached_tokens"] == 4 * len(parsed)
        assert row["completion_tokens"] == 3 * len(parsed)
        assert row["seconds"] == (7.5 if row["step"] == 2 else None)
    assert sum(row["calls"] for row in table) == sum(call.outcome == "parsed" for _, call in run.calls)
    kinds = {row["kind"]: row for row in tables.kind_table(store)}
    for kind in {call.kind for _, call in run.calls}:
        of_kind = [call for _, call in run.calls if call.kind == kind and call.outcome == "parsed"]
        assert kinds[kind]["calls"] == len(of_kind) and kinds[kind]["tokens"] == 13 * len(of_kind)


def test_seconds_are_wall_time_where_the_log_has_it_all(run, store):
    steps = [step for step, _ in by_step(run)]
    log = [{"step": step + 1, "judge/seconds": 2.0} for step in steps]
    charts = {chart.name: chart for chart in judge_charts(tables.judge_table(store, log))}
    assert charts["judge_seconds"].caption == f"{2 * len(steps)} seconds in all. Time spent waiting for the judge."
    charts = {chart.name: chart for chart in judge_charts(tables.judge_table(store, log[1:]))}
    assert "judge_seconds" not in charts  # the scripted judge takes no time
    assert charts["judge_calls"].caption.startswith(f"{sum(call.outcome == 'parsed' for _, call in run.calls)} calls")


def test_anchors_by_source_at_the_end_of_each_epoch(run, store):
    for row in growth_table(store):
        buffers = last_buffers(run, row["epoch"]).values()
        assert row["anchors"] == fmean(map(len, buffers))
        for source in SOURCES:
            counts = [sum(anchor.source == source for anchor in buffer.anchors) for buffer in buffers]
            assert row[source] == fmean(counts)


def test_sources_along_the_quality_scale(run, store):
    table = tables.composition_table(store)
    assert [(row["epoch"], row["from"], row["to"]) for row in table] == [
        (epoch, low, low + 10) for epoch in range(4) for low in range(0, 100, 10)
    ]
    for row in table:
        counts = Counter()
        for buffer in last_buffers(run, row["epoch"]).values():
            for rank, anchor in enumerate(buffer.anchors):
                place = Fraction(100 * rank, len(buffer) - 1)
                if row["from"] <= place < row["to"] or place == row["to"] == 100:
                    counts[anchor.source] += 1
        assert {source: row[source] for source in SOURCES} == {source: counts[source] for source in SOURCES}
        assert row["anchors"] == counts.total()


@pytest.mark.parametrize("K", [2, 3, 4, 7, 11, 21, 30])
def test_the_ends_of_a_buffer_stand_in_the_outer_bins(K):
    bins = [tables.scale_bin(rank, K) for rank in range(K)]
    assert bins[0] == 0 and bins[-1] == 9 and bins == sorted(bins)
    assert K != 11 or bins == [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 9]


def test_insertions_and_occupied_intervals(run, store):
    insertions, occupied = tables.insertion_table(store), tables.occupancy_table(store)
    for place, intervals, (_, visits) in zip(insertions, occupied, by_step(run), strict=True):
        positions = [(p, len(score.before)) for _, score in visits for p in score.positions.values()]
        assert place["placed"] == len(positions)
        assert place["below"] == pytest.approx(sum(p == 0 for p, _ in positions) / len(positions))
        assert place["above"] == pytest.approx(sum(p == K for p, K in positions) / len(positions))
        assert sum(place[f"quarter{i}"] for i in range(1, 5)) + place["below"] + place["above"] == pytest.approx(1)
        shares = [list(score.positions.values()) for _, score in visits]
        assert intervals["intervals"] == fmean(len(score.before) + 1 for _, score in visits)
        assert intervals["occupied"] == fmean(len(set(group)) for group in shares)
        alone = sum(group.count(p) == 1 for group in shares for p in group)
        assert intervals["alone"] == alone / len(positions)


def test_anchors_added_and_pruned(run, store):
    for row in tables.maintenance_table(store):
        visits = [score for group, score in run.visits if group.epoch == row["epoch"]]
        ids = [({a.id: a.source for a in s.before.anchors}, {a.id: a.source for a in s.after.anchors}) for s in visits]
        added = Counter(source for old, new in ids for id, source in new.items() if id not in old)
        pruned = Counter(source for old, new in ids for id, source in old.items() if id not in new)
        assert (row["added"], row["pruned"]) == (added.total(), pruned.total())
        assert all(row[f"added_{source}"] == added[source] for source in SOURCES)
        assert all(row[f"pruned_{source}"] == pruned[source] for source in SOURCES)


def test_advantages_are_group_normalised_over_the_scored(run, store):
    found = tables.advantages(store)
    for step, visits in by_step(run):
        for (_, score), values in zip(visits, found[step], strict=True):
            known = [reward for reward in score.rewards if reward is not None]
            for reward, value in zip(score.rewards, values, strict=True):
                if reward is None:
                    assert value is None
                else:
                    assert value == pytest.approx((reward - fmean(known)) / (stdev(known) + 1e-4))
    assert tables.group_advantages([None, 0.5, None]) == [None, 0.0, None]
    assert tables.group_advantages([]) == []


def test_quality_and_what_it_cost_so_far(run, store):
    curve = tables.quality_table(store, lambda query_id, text: float(text))
    steps = list(by_step(run))
    for row, (_, visits) in zip(curve, steps, strict=True):
        assert row["quality"] == pytest.approx(fmean(float(r.text) for group, _ in visits for r in group.answered))
    judge = tables.judge_table(store)
    table = tables.efficiency_table(judge, curve, window=3)
    for i, row in enumerate(table):
        parsed = [call for step, call in run.calls if step <= row["step"] and call.outcome == "parsed"]
        assert (row["calls"], row["tokens"]) == (len(parsed), 13 * len(parsed))
        assert row["quality"] == pytest.approx(fmean(one["quality"] for one in curve[max(0, i - 2) : i + 1]))


def test_the_trainers_log_says_what_it_has():
    log = [
        {"step": 1, "rewards/rank_reward/mean": 0.0, "rewards/format_reward/mean": 1.0, "loss": 1.0},
        {"step": 2, "loss": 1.0},
        {"step": 3, "entropy": 0.5, "eval_rewards/mine/mean": 2.0},
    ]
    assert tables.log_table(log) == [
        {"step": 1, "rewards/format_reward/mean": 1.0, "entropy": None, "eval_rewards/mine/mean": None},
        {"step": 3, "rewards/format_reward/mean": None, "entropy": 0.5, "eval_rewards/mine/mean": 2.0},
    ]
    assert tables.log_table([{"step": 1, "loss": 2.0}]) == []


def test_advantage_bins_count_every_scored_rollout():
    table = tables.joined(
        {
            "a": tables.advantage_bins([[-1.0, 0.04, None], [0.06, 1.0, 1.0]]),
            "b": tables.advantage_bins([[0.0, 0.0]]),
        }
    )
    assert table == [
        {"run": "a", "advantage": -1.0, "share": 0.2},
        {"run": "a", "advantage": 0.0, "share": 0.2},
        {"run": "a", "advantage": 0.1, "share": 0.2},
        {"run": "a", "advantage": 1.0, "share": 0.4},
        {"run": "b", "advantage": 0.0, "share": 1.0},
    ]


def test_the_lanes_of_the_page_are_the_bins_of_the_chart():
    groups = [[-1.0, 0.04, None], [0.06, 1.0, 1.0]]
    data = advantage_lanes({"a": {3: groups}, "b": {3: [[0.0]], 4: [[3.24, None]]}})
    first, second = data["runs"]
    assert first["steps"] == {3: {"bins": tables.advantage_bins(groups), "levels": 2.0, "rollouts": 5}}
    assert second["steps"][4] == {"bins": [{"advantage": 3.2, "share": 1.0}], "levels": 1.0, "rollouts": 1}
    assert (first["name"], data["reach"]) == ("a", 3.2), "the axis reaches the farthest bin of any run"
    assert advantage_lanes({"a": {0: groups}})["reach"] == 2.5
