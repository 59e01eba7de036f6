"""Judging a run again: the replay bit for bit, its numbers by slow counting, duels with known winners, kills."""

import asyncio
import json
import math
import multiprocessing
import os
import re
import signal
import sys
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from statistics import fmean, stdev
from typing import ClassVar

import pytest
from conftest import group, numbers, scripted_judge
from helpers.http_server import served
from helpers.reports import answer, record
from helpers.scripted import run as train
from helpers.truth import quality, truth, unguarded
from hypothesis import given
from hypothesis import strategies as st

from rankbuffer_lab.rejudge.command import RejudgeConfig, main
from rankbuffer_lab.rejudge.duel import draw, questions_of, read_answers, share_of, visit_of
from rankbuffer_lab.rejudge.replay import compare_group, measure, price_of, read_visits, replay
from rankbuffer_lab.report.report import headlines_of
from rankbuffer_lab.report.runs import Run, open_runs
from rankbuffer_trl.buffer import initial_buffer
from rankbuffer_trl.data.queries import QueryTable, load_queries
from rankbuffer_trl.errors import SettingsError
from rankbuffer_trl.judge import Judge, JudgeError, Totals, TransportError, Usage
from rankbuffer_trl.judge.serve import make_app
from rankbuffer_trl.rewards.method import GroupScore, load_method
from rankbuffer_trl.store import BufferStore
from rankbuffer_trl.store import numbers as ledger
from rankbuffer_trl.store.gains import Z, duel_of, visits
from rankbuffer_trl.store.places import DUEL, LIVE_STORE, REPORT
from rankbuffer_trl.training.scorer import GroupScorer

METHODS = [
    ("rankbuffer", {"prune_after": 2}),
    ("rankbuffer", {"static": True, "fine": False}),
    ("rankbuffer", {"bootstrap": True}),
    ("rankbuffer", {"anchor_content": False}),
    ("rankbuffer_looks", {"seed": 3}),
    ("rankbuffer_batch", {"seed": 3}),
    ("llm_buffer", {}),
    ("llm_buffer", {"look_ahead": True}),
    ("tournament", {"seed": 5}),
    ("pointwise", {}),
]


def data_of(path: Path, queries: int = 4) -> Path:
    """Write the queries of `reports.record` as a training set."""
    rows = []
    for i in range(queries):
        query = numbers(f"q{i}")
        rubrics = [{"text": rubric.text, "weight": rubric.weight} for rubric in query.rubrics]
        rows.append({"query_id": query.id, "prompt": query.prompt, "rubrics": rubrics, "responses": query.responses})
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def table_of(path: Path, queries: int = 4) -> QueryTable:
    return QueryTable(load_queries(str(data_of(path, queries))), 4)


def again(visits, method, judge, log=None, max_failures=1.0):
    return asyncio.run(replay(visits, method, judge, log, 10**6, max_failures))


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """Four queries in four epochs, in the folder of a run; some rollouts have no answer, some never get a verdict."""
    return record(tmp_path_factory.mktemp("run") / LIVE_STORE)


# The replay


@pytest.mark.parametrize(("name", "arguments"), METHODS, ids=lambda value: str(value))
def test_the_same_judge_gives_the_recorded_rewards_bit_for_bit(tmp_path, name, arguments):
    method = load_method(name, arguments, 0)
    recorded = record(tmp_path / "store.sqlite", method=method)
    store = BufferStore(recorded.path, read_only=True)
    visits = read_visits(store, table_of(tmp_path / "data.jsonl"), 99, None, 0)
    judge = scripted_judge(answer)
    scores, calls = again(visits, method, judge)
    assert sum(map(len, visits.values())) == len(recorded.visits)
    expected = {(visit.query.id, visit.step): score for visit, score in recorded.visits}
    for query_id, each in visits.items():
        for visit, score in zip(each, scores[query_id], strict=True):
            assert score == expected[query_id, visit.row.step]
            assert list(score.rewards) == visit.row.rewards
        assert next((s.after for s in reversed(scores[query_id]) if s.after), None) == store.load(query_id)
    totals = Totals.of(calls)
    assert totals == store.totals() and len(judge.client.seen) == totals.attempts, (
        "what was asked twice is asked twice"
    )
    low, high = price_of(visits, method, True, Totals())[0]
    assert name == "rankbuffer_batch" or low <= len(calls) <= high  # its repeats after a failure are not counted
    found = measure(visits, scores, 0)
    assert (found["signs_turned"]["value"], found["same_rewards"]["value"]) == (0, 1)
    assert found["cosine"]["value"] == pytest.approx(1)
    store.close()


@dataclass(frozen=True)
class Once:
    """A method that makes a buffer at the first visit, and leaves it alone afterwards."""

    name = "once"

    async def score(self, group, buffer, judge):
        assert (buffer is None) == (group.epoch == 0)
        after = initial_buffer(group.query.responses, 4) if buffer is None else None
        return GroupScore((0.0,) * len(group.rollouts), after=after)

    def first_questions(self, group):
        return []


def test_a_visit_without_a_next_buffer_leaves_the_old_one(run, tmp_path):
    store = BufferStore(run.path, read_only=True)
    visits = read_visits(store, table_of(tmp_path / "data.jsonl"), 4, None, 0)
    assert sum(map(len, again(visits, Once(), scripted_judge(answer))[0].values())) == len(run.visits)
    store.close()


def test_a_prefix_of_the_epochs_and_a_sample_of_the_queries(run, tmp_path):
    store, queries = BufferStore(run.path, read_only=True), table_of(tmp_path / "data.jsonl")
    visits = read_visits(store, queries, 2, 3, seed=1)
    assert len(visits) == 2 and visits.keys() == read_visits(store, queries, 2, None, seed=1).keys()
    assert {tuple(read_visits(store, queries, 2, 1, seed)) for seed in range(20)} > {tuple(visits)}
    for query_id, each in visits.items():
        mine = [visit for visit, _ in run.visits if visit.query.id == query_id and visit.epoch < 3]
        assert [visit.group for visit in each] == mine
    sums = ledger.totals_by_visit(store)
    for (query_id, step), totals in sums.items():
        assert totals == Totals.of(call for at, call in run.calls if (call.query_id, at) == (query_id, step))
    assert sum(t.calls for t in sums.values()) == store.totals().calls
    store.close()


class Backwards:
    """A judge for whom a lower number is the better response."""

    name = "backwards"

    async def complete(self, messages, *, question, seed, tally):
        tally.attempts += 1
        flipped = re.sub(
            r"^\d+$", lambda m: str(1000 - int(m[0])), unguarded(messages[0]["content"]), flags=re.MULTILINE
        )
        return truth(flipped), Usage(10, 0, 3)

    async def close(self):
        pass


def committed(path: Path, queries: int, epochs: int, gain: int, rollouts: int = 4) -> BufferStore:
    """Score groups of different numbers, none of them that of an anchor, with the judge that knows the truth."""
    random = Random(5)
    scorer = GroupScorer(
        load_method("rankbuffer", {}, 0), scripted_judge(lambda m: truth(m[0]["content"])), BufferStore(path)
    )
    for epoch in range(epochs):
        groups = []
        for i in range(queries):
            values = random.sample([n for n in range(2, 55) if n % 10], rollouts)
            groups.append(group(numbers(f"q{i}"), " ".join(str(v + gain * epoch) for v in values), epoch, epoch))
        scorer.score(groups, epoch)
    scorer.close()
    return BufferStore(path, read_only=True)


def test_a_judge_with_the_opposite_taste_turns_every_sign(tmp_path):
    store = committed(tmp_path / "store.sqlite", 5, 2, gain=0)
    method = load_method("rankbuffer", {}, 0)
    visits = read_visits(store, table_of(tmp_path / "data.jsonl", 5), 5, None, 0)
    found = measure(visits, again(visits, method, Judge(Backwards()))[0], 0)
    assert found["signs_turned"] == {"value": 1, "low": 1, "high": 1, "queries": 5}
    assert found["tau"]["value"] == -1 and found["cosine"]["value"] == pytest.approx(-1)
    assert found["same_rewards"]["value"] == 0 == found["ties_replayed"]["value"]
    store.close()


REWARDS = st.lists(st.tuples(st.booleans(), *[st.sampled_from([None, -1.0, -0.5, 1 / 3, 0.7, 1.0])] * 2), max_size=8)


def slow_group(rows):
    """Each measure of a group, by loops over rollouts and pairs."""
    advantages = []
    for side in (1, 2):
        known = [row[side] for row in rows if row[side] is not None]
        spread = stdev(known) + 1e-4 if len(known) > 1 else 1
        middle = fmean(known) if known else 0
        flat = len(set(known)) < 2
        advantages.append([None if r[side] is None else 0 if flat else (r[side] - middle) / spread for r in rows])
    both = [i for i, row in enumerate(rows) if None not in row[1:]]
    x, y = ([side[i] for i in both] for side in advantages)
    found = {
        "signs_turned": [
            float((a > 1e-9 and b < -1e-9) or (a < -1e-9 and b > 1e-9)) for a, b in zip(x, y, strict=True)
        ]
    }
    lengths = [math.sqrt(sum(a * a for a in side)) for side in (x, y)]
    found["cosine"] = []
    if max(lengths) > 0:
        found["cosine"] = [
            sum(a * b for a, b in zip(x, y, strict=True)) / (lengths[0] * lengths[1]) if min(lengths) else 0
        ]
    ranked = [rows[i][1:] for i in both if rows[i][0]]
    agree = disagree = one = other = 0
    for i, (a, b) in enumerate(ranked):
        for c, d in ranked[:i]:
            agree += (a - c) * (b - d) > 0
            disagree += (a - c) * (b - d) < 0
            one, other = one + (a != c), other + (b != d)
    found["tau"] = []
    if len(ranked) > 1:
        found["tau"] = [(agree - disagree) / math.sqrt(one * other) if one and other else 0]
    found["same_rewards"] = [float(rows[i][1] == rows[i][2]) for i in both]
    for side, name in ((1, "recorded"), (2, "replayed")):
        values = [row[side] for row in rows if row[0] and row[side] is not None]
        found[f"ties_{name}"] = [float(values.count(value) > 1) for value in values]
        found[f"unscored_{name}"] = [float(row[side] is None) for row in rows]
    return found


@given(REWARDS)
def test_the_measures_of_a_group_are_those_of_slow_counting(rows):
    visit = group(numbers(), " ".join("7" if answered else "-" for answered, *_ in rows), 0, 0)
    found = compare_group(visit, [row[1] for row in rows], [row[2] for row in rows])
    expected = slow_group(rows)
    assert found.keys() == expected.keys()
    for name in found:
        assert sorted(found[name]) == pytest.approx(sorted(expected[name]), abs=1e-8), name  # advantages are rounded


# Duels


def play(drawn, answer):
    """Answer all questions of a draw."""
    asked = questions_of(drawn, {f"q{i}": numbers(f"q{i}") for i in range(60)})
    return {name: question.read(answer(question.prompt())) for name, question in asked.items()}


def test_the_share_of_duels_is_the_truth_and_the_control_is_a_half(tmp_path):
    store = committed(tmp_path / "store.sqlite", 40, 3, gain=4)
    drawn = draw(store, 30, 50, seed=2)
    assert drawn.epochs == (0, 2) and len(drawn.duels) == 30 and len(drawn.control) == 50
    assert max(Counter(id for id, _, _ in drawn.duels.values()).values()) == 1
    points = []
    for id, one, other in drawn.duels.values():
        assert (one.step, other.step) == (0, 2)
        assert {r.text for r in (one, other)} <= {r.text for r in ledger.responses(store, id)}
        points.append((quality(other.text) > quality(one.text)) + (quality(other.text) == quality(one.text)) / 2)
    n, won, control = read_answers(drawn, play(drawn, truth))
    assert (n, won.queries, won.probability) == (30, 30, pytest.approx(fmean(points)))
    assert won.probability > 0.5 and won.low < won.probability < won.high
    assert control.probability == 0.5 and control.queries >= 10, "the same judge places them as it did"
    assert tuple(draw(store, 30, 50, 2).duels) == tuple(drawn.duels) != tuple(draw(store, 30, 50, 3).duels)
    store.close()


def test_the_control_counts_placements_as_the_page_does(tmp_path):
    store = committed(tmp_path / "store.sqlite", 12, 2, gain=4)
    drawn, found = draw(store, 1, 99, seed=0), visits(store)
    placed: dict[str, list] = {}
    for each in drawn.control.values():
        placed.setdefault(each.row.query_id, []).append((each, each.recorded))
    assert len(placed) == 12
    for query_id, each in placed.items():
        assert visit_of(each, [position for _, position in each]) == found[query_id][0]
    store.close()


def test_a_judge_that_moves_repeated_placements_up_is_seen_in_the_control(tmp_path):
    store = committed(tmp_path / "store.sqlite", 40, 2, gain=4)
    drawn = draw(store, 1, 100, seed=0)
    verdicts = play(drawn, truth)
    raised = {name: min(v + 1, 4) if name.endswith("again") else v for name, v in verdicts.items()}
    assert read_answers(drawn, raised)[2].low > 0.55
    store.close()


def test_more_duels_than_queries_are_spread_and_anchors_take_part(tmp_path):
    store = committed(tmp_path / "store.sqlite", 4, 2, gain=4)
    drawn = draw(store, 4 * 16, 8, seed=0)
    assert Counter(id for id, _, _ in drawn.duels.values()) == {f"q{i}": 16 for i in range(4)}
    assert len({(id, one.id, other.id) for id, one, other in drawn.duels.values()}) == 64, "every pair once"
    kept = {(id, anchor.id) for id in store.query_ids() for anchor in store.load(id).anchors}
    assert kept & {(id, r.id) for id, *pair in drawn.duels.values() for r in pair}
    assert len(draw(store, 999, 8, seed=0).duels) == 64
    assert Counter(Counter(id for id, _, _ in draw(store, 6, 8, 0).duels.values()).values()) == {2: 2, 1: 2}
    store.close()


def test_a_judge_that_prefers_the_first_shown_wins_half_and_open_duels_are_left_out(tmp_path):
    store = committed(tmp_path / "store.sqlite", 12, 2, gain=0)
    drawn = draw(store, 12, 0, seed=0)
    verdicts = {f"{name} {order}": "A" for name in drawn.duels for order in ("forth", "back")}
    n, won, control = read_answers(drawn, verdicts)
    assert (n, won.probability, won.queries) == (12, 0.5, 12) and won.low < 0.3 < 0.7 < won.high
    assert control.probability is None and not drawn.control
    del verdicts[f"{next(iter(drawn.duels))} back"]
    assert read_answers(drawn, verdicts)[0] == 11
    with pytest.raises(JudgeError, match="no duel has a verdict"):
        read_answers(drawn, {})
    store.close()


@given(st.lists(st.sampled_from([0.0, 0.25, 0.5, 1.0]), min_size=1, max_size=40))
def test_the_interval_of_a_share_is_wilsons(values):
    share = share_of(values)
    p = share.probability
    assert p == pytest.approx(fmean(values)) and share.queries == len(values)
    spread = stdev(values) / math.sqrt(len(values)) if len(values) > 1 else 0
    for end in (share.low, share.high):
        deviation = math.sqrt(end * (1 - end) * (spread**2 / (p * (1 - p)) if spread else 1 / len(values)))
        assert abs(p - end) == pytest.approx(Z * deviation, abs=1e-9)
    assert 0 <= share.low <= p <= share.high <= 1 and share.low < share.high


# The command


@dataclass
class NumberJudge:
    """The judge that knows the truth, named in settings. It writes down what it answers, and may kill the process."""

    kill_at: int = field(default=10**9, compare=False)
    record: str = field(default="", compare=False)
    fail: bool = field(default=False, compare=False)
    version: str = "numbers-1"
    name = "number judge"
    model = "numbers"
    asked: ClassVar[list[str]] = []
    one_by_one: asyncio.Lock = field(default_factory=asyncio.Lock)

    async def complete(self, messages, *, question, seed, tally):
        async with self.one_by_one:
            for _ in range(5):  # so that the answer before is on disk
                await asyncio.sleep(0)
            return self.answer(messages, tally)

    def answer(self, messages, tally):
        tally.server, tally.attempts = self.name, tally.attempts + 1
        self.asked.append(messages[0]["content"])
        if self.fail:
            raise TransportError("it is gone")
        if len(self.asked) > self.kill_at:
            os.kill(os.getpid(), signal.SIGKILL)
        if self.record:
            with open(self.record, "a") as file:
                file.write(json.dumps(messages[0]["content"]) + "\n")
        return truth(messages[0]["content"]), Usage(10, 4, 3)

    async def close(self):
        pass


@pytest.fixture
def command(monkeypatch, capsys):
    """Run `rankbuffer-rejudge` with arguments: what it printed, or the one line with which it ends."""

    def run(*arguments):
        NumberJudge.asked.clear()
        monkeypatch.setattr(sys, "argv", ["rankbuffer-rejudge", *map(str, arguments)])
        with pytest.raises(SystemExit) as stop:
            main()
        assert stop.value.code in (0, 1) or "\n" not in stop.value.code
        return capsys.readouterr().out if stop.value.code == 0 else stop.value.code

    return run


NUMBERS = ("--judge_client", f"{__name__}.NumberJudge")


@pytest.fixture
def folder(tmp_path):
    """The folder of a run with a store, and its data set."""
    committed(tmp_path / "run" / LIVE_STORE, 12, 3, gain=4).close()
    return tmp_path / "run", data_of(tmp_path / "data.jsonl", 12)


@pytest.mark.slow
def test_a_real_run_is_replayed_by_the_embedded_judge(tmp_path, tiny_policy, rows, data_file, command):
    train(
        tmp_path / "run",
        tiny_policy,
        rows,
        save_strategy="steps",
        save_steps=8,
        method_args={"k0": 3, "prune_after": 1},
    )
    printed = command(
        "--run_dir", tmp_path / "run", "--dataset_name", data_file, "--sample", 99, "--judge_prompt_price", 2
    )
    found = json.loads((tmp_path / "run" / REPORT / "rejudge.json").read_text())
    assert (found["queries"], found["groups"], found["same_data"]) == (12, 24, True)
    assert found["replayed"]["method_args"] == found["recorded"]["method_args"]
    assert found["replayed"]["method_args"]["k0"] == 3, "from the checkpoint"
    sums = [found[side]["totals"] for side in ("recorded", "replayed")]
    assert [{**each, "seconds": 0} for each in sums[:1]] == [{**each, "seconds": 0} for each in sums[1:]]
    for name, value in (("signs_turned", 0), ("same_rewards", 1), ("cosine", 1), ("tau", 1)):
        assert found["measures"][name]["value"] == pytest.approx(value), name
    assert found["replayed"]["price"] == pytest.approx(2 * sums[1]["spent_prompt_tokens"] / 1e6)
    assert f"replayed judging                 {sums[1]['calls']:,} calls" in printed
    changed = command(
        "--run_dir", tmp_path / "run" / "checkpoint-8", "--dataset_name", data_file, "--method_args", '{"k0": 5}',
        "--judge_guard", "false", "--output", tmp_path / "other.json", "--epochs", 1,
    )  # fmt: skip
    other = json.loads((tmp_path / "other.json").read_text())
    with served(make_app()) as address:
        server = (
            "--judge_url",
            f"{address}/v1",
            "--judge_model",
            "rubric-judge",
            "--output",
            tmp_path / "served.json",
        )
        command("--run_dir", tmp_path / "run", "--dataset_name", data_file, "--sample", 3, *server)
    by_server = json.loads((tmp_path / "served.json").read_text())
    assert by_server["queries"] == 3 and by_server["measures"]["same_rewards"]["value"] == 1
    assert by_server["replayed"]["judge"] == "rubric-judge"
    assert other["groups"] == 12 and other["replayed"]["judge_guard"] is False and "k0': 5" in changed
    assert other["replayed"]["method_args"] | {"k0": 3} == found["recorded"]["method_args"]


def test_reward_method_imports_nothing_that_a_run_alone_names():
    own, words = "rankbuffer_trl.rewards.rankbuffer.RankBuffer", {"run_dir": "run", "dataset_name": "data.jsonl"}
    for recorded in ("this.s", own):
        with pytest.raises(SettingsError, match=f"^run names the reward method '{recorded}', .* --method {recorded} "):
            RejudgeConfig(**words).reward_method({"method": recorded})
    assert "this" not in sys.modules
    manifest = {"method": own, "method_args": {"k0": 3, "prune_after": 1}}
    name, method = RejudgeConfig(**words, method=own, method_args={"prune_after": 2}).reward_method(manifest)
    assert (name, method.k0, method.prune_after) == (own, 3, 2), "arguments of the run, for its own method"
    assert RejudgeConfig(**words, method="rankbuffer").reward_method(manifest)[1] == load_method("rankbuffer", {}, 0)


def test_duels_are_on_the_page_of_their_run(folder, command, tmp_path):
    run, data = folder
    printed = command(
        "--mode", "duel", "--run_dir", run, "--dataset_name", data, "--duels", 10, "--control", 24, *NUMBERS
    )
    found = json.loads((run / REPORT / DUEL).read_text())
    assert found["duels"] == 10 and found["epochs"] == [0, 2] and found["judge"] == NUMBERS[1]
    share = f"{100 * found['won']['probability']:.0f} %"
    assert f"epoch 2 beats epoch 0 in {share}" in printed and "(50 % is right): 50 % (48 % to 52 %)" in printed
    with open_runs([run]) as (opened,):
        label, value = next(iter(headlines_of(opened, None).items()))
        assert label == f"of 10 duels won by epoch 2 against epoch 0; judge: {NUMBERS[1]}" and value.startswith(share)
        (run / REPORT / DUEL).write_text(json.dumps(found | {"run": "another"}))
        assert duel_of(run, opened.store) == {}
        (run / REPORT / DUEL).write_text("{")
        assert duel_of(run, opened.store) == {}
        assert "duels" not in next(iter(headlines_of(Run("run", run, opened.store), None)))


@pytest.mark.parametrize("mode", [("--mode", "duel"), ("--method", "rankbuffer")], ids=["duel", "replay"])
def test_a_dry_run_prints_the_price_and_asks_nothing(folder, command, mode, tmp_path):
    run, data = folder
    words = ("--run_dir", run, "--dataset_name", data, "--judge_prompt_price", 1e6, *NUMBERS, *mode)
    printed = command(*words, "--dry_run", "true")
    low, high, prompt, price = re.search(
        r": (\d+)(?: to (\d+))? questions, about ([\d,]+) prompt and [\d,]+ completion tokens, ([\d,.]+) at", printed
    ).groups()
    assert float(price.replace(",", "")) == pytest.approx(float(prompt.replace(",", "")), abs=1)
    assert not NumberJudge.asked and not (run / REPORT).exists()
    assert command(*words).startswith(printed) and int(low) <= len(NumberJudge.asked) <= int(high or low)


def interrupted(arguments):
    sys.argv = ["rankbuffer-rejudge", *map(str, arguments)]
    main()


@pytest.mark.slow
@pytest.mark.parametrize(
    "mode",
    [("--mode", "duel", "--duels", 20, "--control", 10), ("--method", "rankbuffer", "--sample", 4)],
    ids=["duel", "replay"],
)
def test_a_kill_loses_no_paid_answer(folder, command, mode, tmp_path):
    run, data = folder
    words = ["--run_dir", run, "--dataset_name", data, "--judge_client", f"{__name__}.NumberJudge", *mode]

    def client(**arguments):
        return ["--judge_client_args", json.dumps({"record": str(tmp_path / "asked"), **arguments})]

    command(*words, "--output", tmp_path / "whole.json")
    expected = list(NumberJudge.asked)
    NumberJudge.asked.clear()
    killed = multiprocessing.get_context("fork").Process(
        target=interrupted, args=([*words, *client(kill_at=31), "--output", tmp_path / "two.json"],)
    )
    killed.start()
    killed.join(120)
    assert killed.exitcode == -signal.SIGKILL and not (tmp_path / "two.json").exists()
    assert len((tmp_path / "asked").read_text().splitlines()) == 31
    for left in (len(expected) - 31, 0):
        command(*words, *client(), "--output", tmp_path / "two.json")
        assert len(NumberJudge.asked) == left
    asked = [json.loads(line) for line in (tmp_path / "asked").read_text().splitlines()]
    assert Counter(asked) == Counter(expected), "each question once"
    one, two = (json.loads((tmp_path / name).read_text()) for name in ("whole.json", "two.json"))
    for found in (one, two):
        found.get("replayed", {"totals": {}})["totals"].pop("seconds", None)
    assert one == two


@pytest.mark.parametrize("mode", [("--mode", "duel"), ("--method", "rankbuffer")], ids=["duel", "replay"])
def test_the_answers_of_a_client_with_other_arguments_do_not_count(folder, command, mode):
    run, data = folder

    def asked(*arguments) -> int:
        command("--run_dir", run, "--dataset_name", data, *NUMBERS, *mode, *arguments)
        return len(NumberJudge.asked)

    other = ("--judge_client_args", '{"version": "numbers-2"}')
    first = asked()
    assert first > 20 and [asked(*other), asked(*other), asked()] == [first, 0, 0]


@pytest.mark.parametrize("mode", [("--mode", "duel"), ("--method", "rankbuffer")], ids=["duel", "replay"])
def test_a_judge_that_fails_gives_no_result(folder, command, mode):
    run, data = folder
    words = ["--run_dir", run, "--dataset_name", data, *NUMBERS, "--judge_client_args", '{"fail": true}', *mode]
    said = command(*words)
    assert "more than judge_max_failures=0.25 allows" in said and "run the same command again" in said
    assert not list((run / REPORT).glob("*.json"))
    assert "--method" not in mode or len(NumberJudge.asked) < 12 * 3 * 4, "it stops as soon as that is certain"
