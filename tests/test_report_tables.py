"""The tables of a report, against slow counting over what was scored."""

from collections import Counter
from fractions import Fraction
from statistics import fmean, stdev

import pytest
from helpers.runs import store_of_run as store_of_run

from rankbuffer_tools.report import tables
from rankbuffer_tools.report.charts import judge_charts
from rankbuffer_tools.report.report import advantage_data
from rankbuffer_trl.buffer import SOURCES
from rankbuffer_trl.judge import Call, Usage
from rankbuffer_trl.monitoring import _probes as probes
from rankbuffer_trl.monitoring._buffer_sizes import buffer_size_table
from rankbuffer_trl.store import BufferStore


def test_the_runs_under_test_have_everything_to_count(run):
    scores = [score for _, score in run.visits]
    assert any(reward is None for score in scores for reward in score.rewards)
    assert any(group.empty for group, _ in run.visits)
    sources = {anchor.source for buffer in run.last_buffers(3).values() for anchor in buffer.anchors}
    assert {"initial", "refine", "right"} <= sources
    assert any(set(score.before.anchors) - set(score.after.anchors) for score in scores)


def test_reward_table_is_by_step(run, store):
    for row, (step, visits) in zip(tables.step_tables(store).rewards, run.steps.items(), strict=True):
        rewards = [list(score.rewards) for _, score in visits]
        flat = [reward for group in rewards for reward in group]
        known = [[r for r in group if r is not None] for group in rewards]
        assert row == {
            "step": step,
            "epoch": visits[0][0].epoch,
            "groups": len(visits),
            "rollouts": len(flat),
            "mean": pytest.approx(fmean(r for group in known for r in group)),
            "spread": pytest.approx(fmean(stdev(group) for group in known if len(group) > 1)),
            "levels": fmean(len(set(group)) for group in known),
            "tied": pytest.approx(sum(group.count(r) > 1 for group in known for r in group) / len(flat)),
            "unscored": flat.count(None) / len(flat),
            "empty": sum(len(group.empty) for group, _ in visits) / len(flat),
        }


def test_judge_table_and_kind_table_add_up_the_calls(run, store):
    table = tables.judge_table(store, [{"step": 3, "judge/seconds": 7.5}, {"step": 4, "loss": 1.0}])
    for row in table:
        calls = [call for step, call in run.calls if step == row["step"]]
        parsed = sum(call.outcome == "parsed" for call in calls)
        expected = {"calls": parsed, "failures": len(calls) - parsed, "attempts": sum(call.attempts for call in calls)}
        expected |= {"prompt_tokens": 10 * parsed, "cached_tokens": 4 * parsed, "completion_tokens": 3 * parsed}
        assert row | expected | {"seconds": 7.5 if row["step"] == 2 else None} == row
    parsed = Counter(call.kind for _, call in run.calls if call.outcome == "parsed")
    assert sum(row["calls"] for row in table) == parsed.total()
    found = {row["kind"]: (row["calls"], row["tokens"]) for row in tables.kind_table(store)}
    assert found == {call.kind: (parsed[call.kind], 13 * parsed[call.kind]) for _, call in run.calls}


def test_kind_table_leaves_cancelled_calls_out_of_the_seconds_of_a_request(tmp_path):
    made, none = BufferStore(tmp_path / "store.sqlite"), Usage()
    ended = {"parsed": 2.0, "cancelled": 100.0}
    made.commit(0, [], [Call("", "fine", "q", "", how, 1, none, none, seconds) for how, seconds in ended.items()])
    (row,) = tables.kind_table(made)
    made.close()
    assert (row["attempts"], row["seconds_per_attempt"]) == (1, 2.0)


def test_judge_charts_have_wall_time_where_the_log_has_it_all(run, store):
    log = [{"step": step + 1, "judge/seconds": 2.0, "rank/below_noise": 1.0} for step in run.steps]
    charts = {chart.name: chart for chart in judge_charts(tables.judge_table(store, log))}
    assert charts["judge_seconds"].caption == f"{2 * len(run.steps)} seconds in all. Time spent waiting for the judge."
    charts = {chart.name: chart for chart in judge_charts(tables.judge_table(store, log[1:]))}
    assert "judge_seconds" not in charts  # the scripted judge takes no time
    assert charts["judge_calls"].caption.startswith(f"{sum(call.outcome == 'parsed' for _, call in run.calls)} calls")


def test_buffer_size_table_is_the_mean_at_the_end_of_each_epoch(run, store):
    for row in buffer_size_table(store):
        buffers = run.last_buffers(row["epoch"]).values()
        assert row["anchors"] == fmean(map(len, buffers))
        for source in SOURCES:
            assert row[source] == fmean(sum(a.source == source for a in buffer.anchors) for buffer in buffers)


def test_composition_table_has_sources_along_the_quality_scale(run, store):
    expected = []
    for epoch in range(4):
        for low in range(0, 100, 10):
            counts = Counter()
            for buffer in run.last_buffers(epoch).values():
                for rank, anchor in enumerate(buffer.anchors):
                    place = Fraction(100 * rank, len(buffer) - 1)
                    counts[anchor.source] += low <= place < low + 10 or place == low + 10 == 100
            row = {"epoch": epoch, "from": low, "to": low + 10, "anchors": counts.total()}
            expected.append(row | {source: counts[source] for source in SOURCES})
    assert tables.composition_table(store) == expected


def test_insertion_table_and_occupancy_table_count_positions(run, store):
    insertions, occupied = tables.step_tables(store)[1:3]
    for place, intervals, visits in zip(insertions, occupied, run.steps.values(), strict=True):
        positions = [(p, len(score.before)) for _, score in visits for p in score.positions.values()]
        shares = [list(score.positions.values()) for _, score in visits]
        alone = sum(group.count(p) == 1 for group in shares for p in group)
        ends = {"below": sum(p == 0 for p, _ in positions), "above": sum(p == K for p, K in positions)}
        parts = {name: pytest.approx(count / len(positions)) for name, count in ends.items()}
        assert {name: place[name] for name in ("placed", *ends)} == {"placed": len(positions)} | parts
        assert sum(place[f"quarter{i}"] for i in range(1, 5)) + place["below"] + place["above"] == pytest.approx(1)
        assert intervals["intervals"] == fmean(len(score.before) + 1 for _, score in visits)
        assert intervals["occupied"] == fmean(len(set(group)) for group in shares)
        assert intervals["alone"] == alone / len(positions)


def test_maintenance_table_counts_anchors_added_and_pruned(run, store):
    for row in tables.step_tables(store).maintenance:
        visits = [score for group, score in run.visits if group.epoch == row["epoch"]]
        ids = [({a.id: a.source for a in s.before.anchors}, {a.id: a.source for a in s.after.anchors}) for s in visits]
        added = Counter(source for old, new in ids for id, source in new.items() if id not in old)
        pruned = Counter(source for old, new in ids for id, source in old.items() if id not in new)
        for name, counts in (("added", added), ("pruned", pruned)):
            assert row[name] == counts.total()
            assert all(row[f"{name}_{source}"] == counts[source] for source in SOURCES)


def test_advantages_are_group_normalised_over_the_scored(run, store):
    found = tables.advantages(store, run.steps)
    for step, visits in run.steps.items():
        for (_, score), values in zip(visits, found[step], strict=True):
            known = [reward for reward in score.rewards if reward is not None]
            scale = stdev(known) + 1e-4
            expected = [None if r is None else pytest.approx((r - fmean(known)) / scale) for r in score.rewards]
            assert values == expected
    assert tables.group_advantages([None, 0.5, None]) == [None, 0.0, None]
    assert tables.group_advantages([]) == []


def test_probe_table_is_what_the_log_had_by_step(run, store, monkeypatch):
    rubrics = {group.query.id: group.query.rubrics for visits in run.steps.values() for group, _ in visits}
    assert list(tables.probe_table(store)[0]) == ["step", *probes.PROBE_NAMES[:4]], "one word each"
    for module in (tables, probes):
        monkeypatch.setattr(module, "probe", lambda text, of: {"words": float(text[-1]), "markup": float(len(of))})
    table = tables.probe_table(store, rubrics.__getitem__)
    assert len(table) == len(run.steps) and list(table[0]) == ["step", "words", "words_with_reward", "markup"]
    for row, (step, visits) in zip(table, run.steps.items(), strict=True):
        groups, scores = zip(*visits, strict=True)
        logged = probes.probe_metrics(probes.probe_groups(groups), scores)
        found = {f"probe/{name}": value for name, value in row.items() if name != "step" and value is not None}
        assert row["step"] == step and found == pytest.approx(logged)
    logged = [{"step": 3, "probe/words": 7.0}, {"step": 4, "loss": 1.0}]
    monkeypatch.setattr(tables, "PROBED", 2)
    found = [(row["step"], row["words"]) for row in tables.probe_table(store, rubrics.__getitem__, logged)]
    assert found == [(2, 7.0), *((row["step"], row["words"]) for row in (table[3], table[6]))], "a sample of the rest"


def test_efficiency_table_is_quality_and_what_it_cost_so_far(run, store):
    curve = tables.quality_table(store, lambda query_id, text: float(text))
    means = [fmean(float(r.text) for group, _ in visits for r in group.answered) for visits in run.steps.values()]
    assert [row["quality"] for row in curve] == pytest.approx(means)
    for i, row in enumerate(tables.efficiency_table(tables.judge_table(store), curve, window=3)):
        parsed = [call for step, call in run.calls if step <= row["step"] and call.outcome == "parsed"]
        assert (row["calls"], row["tokens"]) == (len(parsed), 13 * len(parsed))
        assert row["quality"] == pytest.approx(fmean(means[max(0, i - 2) : i + 1]))


def test_log_table_has_what_the_trainer_logged_of_the_policy():
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


GROUPS = [[-1.0, 0.04, None], [0.06, 1.0, 1.0]]


def test_advantage_bins_count_every_scored_rollout():
    table = tables.joined({"a": tables.advantage_bins(GROUPS), "b": tables.advantage_bins([[0.0, 0.0]])})
    rows = [("a", -1.0, 0.2), ("a", 0.0, 0.2), ("a", 0.1, 0.2), ("a", 1.0, 0.4), ("b", 0.0, 1.0)]
    assert table == [{"run": run, "advantage": advantage, "share": share} for run, advantage, share in rows]


def test_advantage_data_has_the_bins_of_the_chart():
    data = advantage_data({"a": {3: GROUPS}, "b": {3: [[0.0]], 4: [[3.24, None]]}})
    first, second = data["runs"]
    assert first["steps"] == {3: {"bins": tables.advantage_bins(GROUPS), "levels": 2.0, "rollouts": 5}}
    assert second["steps"][4] == {"bins": [{"advantage": 3.2, "share": 1.0}], "levels": 1.0, "rollouts": 1}
    assert (first["name"], data["axis_end"]) == ("a", 3.2), "the axis reaches the farthest bin of any run"
    assert advantage_data({"a": {0: [[None]]}})["axis_end"] == 2.5, "no rollout has a reward"
    assert advantage_data({"a": {0: GROUPS}})["axis_end"] == 2.5 and not data["left_out"]
    for steps, constant in (({0: GROUPS, 1: GROUPS}, True), ({0: GROUPS, 1: [[1.0]]}, False), ({0: GROUPS}, False)):
        assert advantage_data({"a": steps})["constant"] is constant
    assert advantage_data({"a": {0: GROUPS, 1: GROUPS}, "b": {0: GROUPS, 1: [[1.0]]}})["constant"] is False
