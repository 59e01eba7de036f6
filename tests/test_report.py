"""The report: its numbers against slow counting over what was scored, a run that is being written, hostile text."""

import base64
import csv
import hashlib
import io
import json
import re
import shutil
import sqlite3
import tempfile
import zlib
from collections import Counter
from collections.abc import Iterable
from fractions import Fraction
from html.parser import HTMLParser
from itertools import chain
from pathlib import Path
from statistics import fmean, stdev

import conftest
import pytest
from conftest import QUICKSTART, ROOT
from huggingface_hub import ModelCard
from hypothesis import given, settings
from hypothesis import strategies as st
from reports import HOSTILE, anchor_rows, record, record_hostile
from transformers import TrainerState

from rankbuffer_trl.buffer import SOURCES
from rankbuffer_trl.data.queries import DataError, QueryTable, load_queries
from rankbuffer_trl.judge import Call, Totals, Usage
from rankbuffer_trl.report import tables
from rankbuffer_trl.report.browser import query_pages, visits_of
from rankbuffer_trl.report.card import CardFacts, write_card
from rankbuffer_trl.report.chart import Chart, panels, plain, thousands
from rankbuffer_trl.report.charts import advantage_chart, judge_charts, run_charts, score_chart
from rankbuffer_trl.report.command import main
from rankbuffer_trl.report.gains import visits as visits_by_query
from rankbuffer_trl.report.gains import weigh
from rankbuffer_trl.report.page import format_number, pack
from rankbuffer_trl.report.report import advantage_lanes, example_of, facts_of, headlines_of, write_report
from rankbuffer_trl.report.runs import DUEL, REPORT, Run, open_runs, run_names, trainer_log
from rankbuffer_trl.rewards.pointwise import Pointwise
from rankbuffer_trl.rewards.rankbuffer import RankBuffer
from rankbuffer_trl.store import BufferStore, StoreError, numbers
from rankbuffer_trl.store.places import FOLDER, LIVE_STORE, RUN


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """Four queries in four epochs, by the rules of the paper but for pruning after 2."""
    return record(tmp_path_factory.mktemp("run") / LIVE_STORE)


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


# Numbers, against what was scored


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


CALLS = st.lists(
    st.builds(
        Call,
        method=st.sampled_from(["rankbuffer", "pointwise"]),
        kind=st.sampled_from(["insert", "fine"]),
        query_id=st.sampled_from(["q0", "q1"]),
        server=st.just("judge"),
        outcome=st.sampled_from(["parsed", "malformed", "unreachable", "cancelled"]),
        attempts=st.integers(0, 5),
        usage=st.builds(Usage, *[st.integers(0, 99)] * 3),
        spent=st.builds(Usage, *[st.integers(0, 999)] * 3),
        seconds=st.integers(0, 9).map(float),
    ),
    max_size=12,
)


@given(steps=st.lists(CALLS, min_size=1, max_size=4), evaluation=CALLS)
@settings(max_examples=30, deadline=None)
def test_the_ledgers_sums_in_sql_are_those_over_its_calls(steps, evaluation):
    with tempfile.TemporaryDirectory() as folder:
        check_sums(BufferStore(Path(folder, "store.sqlite")), steps, evaluation)


def check_sums(store, steps, evaluation):
    for step, calls in enumerate(steps):
        store.commit(step, [], calls)
    store.commit(len(steps), [], evaluation, phase="eval")
    every = list(chain.from_iterable(steps))
    assert numbers.totals(store) == Totals.of(every)
    assert numbers.totals(store, "eval") == Totals.of(evaluation)
    assert numbers.totals_by(store, "step") == {i: Totals.of(calls) for i, calls in enumerate(steps) if calls}
    for column in ("kind", "outcome", "method"):
        values = sorted({getattr(call, column) for call in every})
        by_value = {value: [call for call in every if getattr(call, column) == value] for value in values}
        assert numbers.totals_by(store, column) == {value: Totals.of(calls) for value, calls in by_value.items()}
    assert numbers.totals_by(store, "epoch") == {}, "no group of these calls was committed"
    for row in tables.judge_table(store):
        calls = [call for call in steps[row["step"]] if call.outcome != "cancelled"]
        assert row["attempts"] == sum(call.attempts for call in calls)
        assert row["calls"] + row["failures"] == len(calls)
    store.close()


def test_costs_by_epoch_are_those_of_its_steps(run, store):
    epochs = {group.step: group.epoch for group, _ in run.visits}
    for epoch, sums in numbers.totals_by(store, "epoch").items():
        assert sums == Totals.of(call for step, call in run.calls if epochs[step] == epoch)


@pytest.mark.parametrize(
    "read",
    [
        numbers.query_ids,
        numbers.epochs,
        numbers.groups,
        numbers.buffers,
        numbers.answers_by_step,
        numbers.totals,
        lambda store: numbers.responses(store, "q0"),
        lambda store: numbers.totals_by(store, "step"),
    ],
)
def test_a_reader_of_numbers_leaves_no_lock_behind(run, read):
    reader = BufferStore(run.path, read_only=True)
    found = read(reader)
    assert next(iter(found)) is not None if isinstance(found, Iterable) else found.calls
    writer = sqlite3.connect(run.path, timeout=0, isolation_level=None)
    writer.execute("BEGIN EXCLUSIVE")  # would raise "database is locked"
    writer.close()
    reader.close()


def test_all_sql_of_the_package_is_in_the_folder_of_the_store():
    package = ROOT / "rankbuffer_trl"
    outside = [path for path in package.rglob("*.py") if path.parent != package / "store"]
    assert len(outside) > 50
    assert not [path for path in outside if re.search(r"\b(SELECT|INSERT|DELETE FROM|PRAGMA)\b", path.read_text())]


def test_seconds_are_wall_time_where_the_log_has_it_all(run, store):
    steps = [step for step, _ in by_step(run)]
    log = [{"step": step + 1, "judge/seconds": 2.0} for step in steps]
    charts = {chart.name: chart for chart in judge_charts(tables.judge_table(store, log))}
    assert charts["judge_seconds"].caption == f"{2 * len(steps)} seconds in all. Time spent waiting for the judge."
    charts = {chart.name: chart for chart in judge_charts(tables.judge_table(store, log[1:]))}
    assert "judge_seconds" not in charts  # the scripted judge takes no time
    assert charts["judge_calls"].caption.startswith(f"{sum(call.outcome == 'parsed' for _, call in run.calls)} calls")


def test_anchors_by_source_at_the_end_of_each_epoch(run, store):
    for row in tables.growth_table(store):
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


# What the browser shows


def test_the_browser_has_each_visit_as_it_was(run, store):
    for query_id in {group.query.id for group, _ in run.visits}:
        expected = [(group, score) for group, score in run.visits if group.query.id == query_id]
        for visit, (group, score) in zip(visits_of(store, query_id), expected, strict=True):
            assert (visit["step"], visit["epoch"]) == (group.step, group.epoch)
            assert visit["before"] == anchor_rows(score.before)
            assert visit["after"] == anchor_rows(score.after)
            assert visit["positions"] == {str(id): p for id, p in score.positions.items()}
            assert visit["order"] == [list(tier) for tier in score.order]
            assert visit["rewards"] == list(score.rewards)


@pytest.mark.parametrize("method", [RankBuffer(bootstrap=True), Pointwise()])
def test_a_first_visit_without_a_buffer_has_none_before_it(tmp_path, method):
    found = record(tmp_path / "run.sqlite", epochs=2, method=method)
    store = BufferStore(found.path)
    for group, score in found.visits:
        visit = next(visit for visit in visits_of(store, group.query.id) if visit["step"] == group.step)
        assert visit["before"] == anchor_rows(score.before) and visit["after"] == anchor_rows(score.after)
        assert (not visit["before"]) == (isinstance(method, Pointwise) or group.epoch == 0)
    names = [chart.name for chart in run_charts(store, [])]
    assert ("buffer_growth" in names) == isinstance(method, RankBuffer)
    store.close()


def test_texts_are_cut_where_asked_and_measured_whole(run, store):
    pages = {
        index["id"]: page for index, page in query_pages(store, Table(), lambda query_id, text: len(text), limit=1)
    }
    texts = pages["q0"]["texts"]
    assert texts["initial-0"] == "1 […]" and pages["q0"]["quality"]["initial-0"] == 2
    assert pages["q0"]["visits"] == visits_of(store, "q0")
    assert pages["q0"]["prompt"] == "?" and pages["q0"]["rubrics"] == [{"text": "Is high.", "weight": 1}]


class Table(dict):
    """A data set that has every query."""

    def __contains__(self, query_id):
        return True

    def __getitem__(self, query_id):
        return conftest.numbers(query_id)


# Opening a run


def test_a_run_that_is_being_written_can_be_read_and_is_not_held_up(run, tmp_path):
    live = tmp_path / "run" / LIVE_STORE
    live.parent.mkdir(parents=True)
    shutil.copyfile(run.path, live)
    writer = sqlite3.connect(live, timeout=0.1, isolation_level=None)
    writer.execute("BEGIN IMMEDIATE")
    writer.execute("INSERT INTO responses VALUES ('new', '99-0', 99, 'half a step')")
    with open_runs([tmp_path / "run"]) as (opened,):
        writer.execute("COMMIT")  # would raise "database is locked" if the report held the file
        assert opened.store.last_step() == run.visits[-1][0].step
        assert not list(opened.store.rows("SELECT 1 FROM responses WHERE query_id = 'new'"))
    writer.close()
    with open_runs([tmp_path / "run"]) as (opened,):
        assert list(opened.store.rows("SELECT text FROM responses WHERE query_id = 'new'")) == [("half a step",)]


def test_a_run_that_was_killed_while_it_wrote_is_rolled_back_in_the_copy(run, tmp_path):
    (tmp_path / "at").mkdir()
    writing = tmp_path / "at" / "live.sqlite"
    shutil.copyfile(run.path, writing)
    writer = sqlite3.connect(writing, isolation_level=None)
    writer.executescript("PRAGMA journal_mode = TRUNCATE; PRAGMA cache_size = 2; PRAGMA cache_spill = 2;")
    writer.execute("BEGIN")
    for i in range(500):
        writer.execute("INSERT INTO responses VALUES ('half', ?, 99, ?)", (f"99-{i}", "x" * 2000))
    killed = tmp_path / "run" / LIVE_STORE.parent
    shutil.copytree(writing.parent, killed)
    writer.execute("ROLLBACK")
    writer.close()
    before = {path.name: path.read_bytes() for path in killed.iterdir()}
    assert before["live.sqlite-journal"] and before["live.sqlite"] != run.path.read_bytes()
    with open_runs([tmp_path / "run"]) as (opened,):
        assert not list(opened.store.rows("SELECT 1 FROM responses WHERE query_id = 'half'"))
        assert opened.store.last_step() == run.visits[-1][0].step
    assert {path.name: path.read_bytes() for path in killed.iterdir()} == before


def test_a_checkpoint_is_a_run_too_with_its_log(run, tmp_path):
    log = [{"step": 1, "judge/seconds": 2.0, "entropy": 1.0}]
    for step in (2, 10, 11):
        folder = tmp_path / f"checkpoint-{step}"
        folder.mkdir()
        store = BufferStore(run.path)
        store.save(folder / FOLDER)
        store.close()
        (folder / "trainer_state.json").write_text(json.dumps({"log_history": log * step}))
        if step < 11:  # the last one is just being written: it has no manifest yet
            (folder / FOLDER / RUN).write_text("{}")
    (tmp_path / "half").mkdir()
    (tmp_path / "half" / "trainer_state.json").write_text('{"log_hist')
    assert trainer_log(tmp_path / "half") == []
    store = BufferStore(run.path)
    store.save(tmp_path / "pulled" / FOLDER)
    store.close()
    with open_runs([tmp_path, tmp_path / "checkpoint-2", run.path, tmp_path / "pulled"]) as (whole, second, file, end):
        assert (len(whole.log), len(second.log), len(file.log), len(end.log)) == (10, 2, 0, 0)
        assert list(whole.store.rows("SELECT * FROM groups")) == list(end.store.rows("SELECT * FROM groups"))
        assert list(whole.store.rows("SELECT * FROM groups")) == list(file.store.rows("SELECT * FROM groups"))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda path: None, "does not exist"),
        (lambda path: path.mkdir(), "is not a run"),
        (lambda path: BufferStore(path / LIVE_STORE).close(), "no scored group yet"),
        (lambda path: path.write_text("hello"), "cannot"),
    ],
)
def test_what_is_no_run_is_named(tmp_path, make, message):
    make(tmp_path / "it")
    with pytest.raises(StoreError, match=message), open_runs([tmp_path / "it"]):
        pass


def test_runs_are_named_by_what_tells_them_apart(tmp_path):
    paths = [tmp_path / name for name in ("a/train", "b/train", "c/other", "c/other")]
    assert run_names(paths) == ["a/train", "b/train", "other", "other (2)"]
    assert run_names(paths[:1]) == ["train"]


# The page and its files


class Tags(HTMLParser):
    """What a browser would see: tags with their attributes, and the text of scripts."""

    def __init__(self, page: str):
        super().__init__()
        self.tags, self.scripts, self.inside = [], [], False
        self.feed(page)

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        self.inside = tag == "script"
        if self.inside:
            self.scripts.append("")

    def handle_endtag(self, tag):
        self.inside = self.inside and tag != "script"

    def handle_data(self, data):
        if self.inside:
            self.scripts[-1] += data


@pytest.fixture(scope="module")
def hostile_page(tmp_path_factory):
    folder = tmp_path_factory.mktemp("hostile")
    path = folder / "</script><b>$x$ &amp; 'run'" / LIVE_STORE
    record_hostile(path)
    return write_report([path.parent.parent], folder / "out").read_text(encoding="utf-8")


def test_nothing_that_a_policy_wrote_stands_in_the_page_as_markup(hostile_page):
    seen = Tags(hostile_page)
    scripts = [attrs for tag, attrs in seen.tags if tag == "script"]
    assert scripts == [
        {"type": "application/octet-stream", "id": "advantages-data"},
        {"type": "application/octet-stream", "id": "run-data-0"},
        {},
    ]
    assert not [tag for tag, _ in seen.tags if tag in ("img", "b", "iframe", "object", "base", "form")]
    assert not [name for _, attrs in seen.tags for name in attrs if name.startswith("on")]
    assert "window.hacked" not in hostile_page and "\x00" not in hostile_page
    data = next(text for text in seen.scripts if text.count("\n") >= 3 and "{" not in text)
    index, page = (json.loads(zlib.decompress(base64.b64decode(line))) for line in data.split())
    assert index["queries"][0]["id"] == f"{HOSTILE[0]}&\"'"
    assert [page["texts"][f"0-{i}"] for i in range(len(HOSTILE))] == list(HOSTILE)


def test_the_page_asks_for_nothing_and_runs_its_own_script_alone(hostile_page):
    seen = Tags(hostile_page)
    policy = next(attrs["content"] for _, attrs in seen.tags if attrs.get("http-equiv") == "Content-Security-Policy")
    rules = dict(rule.split(" ", 1) for rule in policy.split("; "))
    digest = base64.b64encode(hashlib.sha256(seen.scripts[-1].encode()).digest()).decode()
    assert rules["default-src"] == "'none'" and rules["script-src"] == f"'sha256-{digest}'"
    links = [value for _, attrs in seen.tags for name, value in attrs.items() if name in ("src", "href", "xlink:href")]
    assert links and all(link.startswith(("data:", "#")) for link in links)
    assert "@import" not in hostile_page and not re.search(r"url\((?!#)", hostile_page)


def test_packed_data_is_ascii_whatever_it_holds():
    value = {"\ud800 lone": ["\x00", "</script>", None, 1.5, "🫖"]}
    packed = pack(value)
    assert re.fullmatch(r"[A-Za-z0-9+/=]+", packed)
    assert json.loads(zlib.decompress(base64.b64decode(packed))) == value


@pytest.mark.slow
def test_files_beside_the_page_hold_what_the_charts_show(run, tmp_path):
    page = write_report([run.path.parent.parent, run.path], tmp_path / "out", scores={"live.sqlite": 3.0})
    files = {str(path.relative_to(tmp_path / "out")) for path in (tmp_path / "out").rglob("*") if path.is_file()}
    assert {"index.html", "charts/advantages.png", "charts/scores.csv", "charts/run-1/reward.png"} <= files
    assert not [name for name in files if name.endswith(".tmp")]
    assert page.read_text().count('<section class="run" data-run="') == 2
    store = BufferStore(run.path)
    for name, table in (("reward", tables.reward_table(store)), ("composition", tables.composition_table(store))):
        with open(tmp_path / "out" / "charts" / "run-0" / f"{name}.csv", newline="") as file:
            rows = list(csv.DictReader(file))
        assert rows == [{key: "" if v is None else str(v) for key, v in row.items()} for row in table]
    store.close()


def test_a_table_with_strange_names_comes_back_from_its_file():
    table = [{"run": 'a,"b"\n$c$', "score": 1.25}, {"run": "", "score": None}]
    chart = Chart("x", "X", "", panels()[0], table)
    rows = list(csv.DictReader(io.StringIO(chart.csv(), newline="")))
    assert rows == [{"run": 'a,"b"\n$c$', "score": "1.25"}, {"run": "", "score": ""}]


def test_names_are_no_formulas_and_no_markup():
    name = "$\\frac{$ <b>&"
    chart = score_chart({name: 1.0}, {name: (10, 2)})
    assert "&lt;b&gt;&amp;" in chart.svg() and "<b>" not in chart.svg()
    assert advantage_chart({name: [[0.0, 1.0]]}, 3).png().startswith(b"\x89PNG")
    assert plain("a$b") == r"a\$b"
    assert "_old" in score_chart({"_old": 1.0, "new": 2.0}, {"_old": (1, 2), "new": (2, 3)}).svg()
    assert [thousands(value) for value in (0, 0.5, 1500, 2e6, 3e9)] == ["0", "0.5", "1.5k", "2M", "3G"]


def test_charts_follow_the_theme_and_have_ids_of_their_own(store):
    chart = next(chart for chart in run_charts(store, []) if chart.name == "insertions")
    first, second = chart.svg("0"), chart.svg("1")
    assert "currentColor" in first and "var(--line)" in first and "<style" not in first
    assert not set(re.findall(r' id="([^"]+)"', first)) & set(re.findall(r' id="([^"]+)"', second))
    assert first == chart.svg("0")


def test_a_data_set_of_other_queries_is_refused(run, tmp_path):
    queries = QueryTable(load_queries(str(QUICKSTART / "howto.jsonl")))
    with pytest.raises(DataError, match="no query 'q0'"):
        write_report([run.path], tmp_path, queries)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nowhere"], "does not exist"),
        (["{run}", "--step", "99"], "step 99 is not in every run"),
        (["{run}", "--scores", "{scores}"], "scores names a run 'other'"),
        (["{run}", "--scores", "{list}"], r"list.json must hold a JSON object such as {\"run\": 7.5}"),
        (["{run}", "--scores", "{missing}"], "No such file"),
        (["{run}", "--dataset_name", "none.jsonl"], "does not exist"),
        (["{run}", "--judge_prompt_price", "-1"], "judge_prompt_price"),
    ],
)
def test_the_command_says_what_is_wrong(run, tmp_path, monkeypatch, arguments, message):
    (tmp_path / "scores.json").write_text('{"other": 1}')
    (tmp_path / "list.json").write_text("[1]")
    names = {"run": run.path, "missing": tmp_path / "missing.json"}
    names |= {name: tmp_path / f"{name}.json" for name in ("scores", "list")}
    monkeypatch.setattr("sys.argv", ["rankbuffer-report", *(word.format(**names) for word in arguments)])
    with pytest.raises(SystemExit, match=message):
        main()


def test_a_bug_keeps_its_traceback(run, tmp_path, monkeypatch):
    def broken(*arguments):
        raise ValueError("zip() argument 2 is shorter than argument 1")

    monkeypatch.setattr("rankbuffer_trl.report.command.write_report", broken)
    monkeypatch.setattr("sys.argv", ["rankbuffer-report", str(run.path), "--output", str(tmp_path)])
    with pytest.raises(ValueError, match="shorter"):
        main()


def test_a_card_needs_no_trainer(run, store, tmp_path):
    values = {
        "method": "rankbuffer", "hub_model_id": None, "hub_strategy": "every_save", "push_to_hub": False,
        "save_strategy": "no", "judge_model": "/models/judge", "judge_guard": True, "judge_decoding": "none",
        "num_generations": 8, "max_completion_length": 64, "temperature": 1.0, "top_p": 1.0, "top_k": 0,
        "format_check": "none", "format_weight": 0.2, "generation_batch_size": 16, "loss_type": "dapo",
        "scale_rewards": "group", "beta": 0.0, "learning_rate": 1e-6, "lr_scheduler_type": "constant",
    }  # fmt: skip
    paper = {"title": "A paper", "citation": "@misc{paper}"}
    state = TrainerState(global_step=8, max_steps=12, epoch=4.0, num_train_epochs=6)
    facts = CardFacts(values, state, RankBuffer(), 4, "/models/base", False, paper, ["trl"])
    won = {"queries": 9, "probability": 0.79, "low": 0.74, "high": 0.84, "reason": ""}
    duel = {"run": numbers.run_id(store), "judge": "/models/other", "epochs": [0, 3], "duels": 200, "won": won}
    (tmp_path / "run" / REPORT).mkdir(parents=True)
    (tmp_path / "run" / REPORT / DUEL).write_text(json.dumps(duel))
    write_card(tmp_path / "run", store, facts)
    card = ModelCard.load(tmp_path / "run" / "README.md")
    totals, last = Totals.of(call for _, call in run.calls), tables.growth_table(store)[-1]
    for part in (
        "step 8 of 12, epoch 4 of 6", "`rankbuffer` (k0: 4, ", "4 queries", "| judge | judge;", "2 queries a gen",
        f"| all | {totals.calls:,} | {totals.tokens:,} |", f"| 3 | {last['anchors']:.2f} |", "@misc{paper}",
        "Epoch 3 beats epoch 0 in 79 % (74 % to 84 %) of 200 duels", "The judge, other, saw",
    ):  # fmt: skip
        assert part in card.text, part
    assert "/models" not in card.text and card.data.tags == ["generated_from_trainer", "trl"]
    assert (tmp_path / "run" / "figures" / "buffers.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.slow
def test_the_command_writes_next_to_the_run_where_no_upload_looks(run, tmp_path, monkeypatch, capsys):
    shutil.copytree(run.path.parent.parent, tmp_path / "run")
    words = ["rankbuffer-report", str(tmp_path / "run"), "--judge_prompt_price", "1000"]
    monkeypatch.setattr("sys.argv", words)
    main()
    page = tmp_path / "run" / "_report" / "index.html"
    assert str(page) in capsys.readouterr().out
    prompt = sum(10 * call.attempts for _, call in run.calls if call.outcome == "parsed")
    tile = rf"<dt>cost of the judge; [\d.]+ judgments a response</dt><dd>{prompt / 1000:,.2f}</dd>"
    assert re.search(tile, page.read_text())


# The head of the page


def test_a_run_opens_with_progress_reach_and_cost(run, store):
    shown = Run("run", run.path, store)
    headlines = headlines_of(shown, None)
    assert len(headlines) == 3
    totals = Totals.of(call for _, call in run.calls)
    rollouts = sum(len(group.rollouts) for group, _ in run.visits)
    label = f"judge tokens; {totals.calls / rollouts:.1f} judgments a response"
    assert headlines[label] == format_number(totals.tokens)
    assert "cost of the judge" in list(headlines_of(shown, lambda totals: 7.5))[2]
    assert list(headlines_of(shown, lambda totals: 7.5).values())[2] == "7.50"
    # Four queries are too few to compare two visits.
    assert headlines["epoch 3's responses preferred to those of the visit before"].startswith("not shown: fewer than")


def test_the_table_of_a_run_names_what_the_checkpoint_knows(run, store):
    alone = facts_of(Run("run", run.path, store), 4)
    assert alone["method"] == "rankbuffer" and "policy" not in alone and alone["queries visited"] == "4"
    manifest = {"policy": "a/b", "judge": "j", "method": "rankbuffer", "method_args": {"k0": 4}}
    known = facts_of(Run("run", run.path, store, manifest=manifest | {"config": {"learning_rate": 1e-6}}), 4)
    assert (known["policy"], known["judge"], known["learning rate"]) == ("a/b", "j", "1e-06")
    assert known["method"] == "rankbuffer (k0 4)"


def test_the_example_is_in_the_middle_and_not_the_best(run, store):
    example = example_of(Run("run", run.path, store))
    visits = [(group, score) for group, score in run.visits if group.query.id == example["query"]]
    for (number, id), expected in zip(example["shown"], (0, len(visits) - 1), strict=True):
        order = [i for tier in visits[number][1].order for i in tier]
        assert number == expected and order.index(id) == len(order) // 2
    gains_of = {}
    for query_id, (first, *_, last) in visits_by_query(store).items():
        more, less = weigh(first, last)
        gains_of[query_id] = more - less
    others = sorted(gains_of.values())
    assert gains_of[example["query"]] == others[len(others) // 2]
