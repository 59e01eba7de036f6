"""Judging a run again: the replay bit for bit, its numbers by slow counting, duels with known winners, kills."""

import asyncio
import json
import math
import multiprocessing
import re
import shutil
import signal
import sys
from collections import Counter
from dataclasses import asdict, dataclass, replace
from itertools import combinations
from pathlib import Path
from statistics import fmean, stdev

import pytest
from conftest import group, numbers, scripted_judge
from helpers.damage import damaged
from helpers.judges import NumberJudge
from helpers.runs import answer, commit, data_of, record, table_of
from helpers.scripted import run as train
from helpers.servers import served
from hypothesis import given
from hypothesis import strategies as st

from rankbuffer_tools.rejudge import duel
from rankbuffer_tools.rejudge.command import main
from rankbuffer_tools.rejudge.config import RejudgeConfig
from rankbuffer_tools.rejudge.replay import compare_group, measure, price_of, read_visits, replay
from rankbuffer_tools.report.report import headlines_of
from rankbuffer_tools.report.runs import Run, open_runs
from rankbuffer_tools.rubric_server import make_app
from rankbuffer_trl.buffer import initial_buffer
from rankbuffer_trl.errors import SettingsError
from rankbuffer_trl.informs.card import duel_line
from rankbuffer_trl.informs.gains import Z, duel_of, visits_by_query
from rankbuffer_trl.judge import JudgeError, Totals
from rankbuffer_trl.rewards.method import GroupScore, load_method
from rankbuffer_trl.store import BufferStore, StoreError, history
from rankbuffer_trl.store.places import DUEL, LIVE_STORE, REPORT
from rankbuffer_trl.testing import quality, truth

METHODS = [
    ("rankbuffer", {"prune_after": 2}),
    ("rankbuffer", {"static": True, "fine": False}),
    ("rankbuffer", {"bootstrap": True}),
    ("rankbuffer", {"anchor_content": False}),
    ("llm_buffer", {}),
    ("llm_buffer", {"look_ahead": True}),
    ("tournament", {"seed": 5}),
    ("pointwise", {}),
]


def again(visits, method, judge, log=None, max_failures=1.0):
    return asyncio.run(replay(visits, method, judge, log, 10**6, max_failures))


# The replay


@pytest.mark.parametrize(("name", "arguments"), METHODS, ids=lambda value: str(value))
def test_replay_with_the_same_judge_gives_the_recorded_rewards_bit_for_bit(tmp_path, opened, name, arguments):
    method = load_method(name, arguments, 0)
    recorded = record(tmp_path / "store.sqlite", method=method)
    store = opened(path=recorded.path)
    visits = read_visits(store, table_of(tmp_path / "data.jsonl"), 99, None, 0)
    judge = scripted_judge(answer)
    scores, calls = again(visits, method, judge)
    assert sum(map(len, visits.values())) == len(recorded.visits)
    expected = {(visit.query.id, visit.step): score for visit, score in recorded.visits}
    for query_id, each in visits.items():
        assert scores[query_id] == [expected[query_id, visit.row.step] for visit in each]
        assert [list(score.rewards) for score in scores[query_id]] == [visit.row.rewards for visit in each]
        assert next((s.after for s in reversed(scores[query_id]) if s.after), None) == store.load(query_id)
    assert Totals.of(calls) == store.totals()
    assert len(judge.client.seen) == store.totals().attempts, "what was asked twice is asked twice"
    low, high = price_of(visits, method, True, Totals())[0]
    assert low <= len(calls) <= high
    found = measure(visits, scores, 0)
    assert found["signs_turned"] == {"value": 0, "low": None, "high": None, "queries": 4}, "too few for an interval"
    assert found["same_rewards"]["value"] == 1 and found["cosine"]["value"] == pytest.approx(1)
    turned = {id: [replace(s, rewards=[r and -r for r in s.rewards]) for s in each] for id, each in scores.items()}
    found = measure(visits, turned, 0)
    assert found["cosine"]["value"] == pytest.approx(-1) and found["signs_turned"]["value"] > 0.5
    assert found["tau"]["value"] < 0 and found["same_rewards"]["value"] < 0.5


@dataclass(frozen=True)
class Once:
    """A method that makes a buffer at the first visit, and leaves it alone afterwards."""

    name = "once"

    async def score(self, group, buffer, judge):
        assert (buffer is None) == (group.epoch == 0)
        after = initial_buffer(group.query.responses, 4) if buffer is None else None
        return GroupScore((0.0,) * len(group.rollouts), after=after)


def test_replay_of_a_visit_without_a_next_buffer_leaves_the_old_one(run, opened, tmp_path):
    store = opened(path=run.path)
    visits = read_visits(store, table_of(tmp_path / "data.jsonl"), 4, None, 0)
    assert sum(map(len, again(visits, Once(), scripted_judge(answer))[0].values())) == len(run.visits)


def test_read_visits_takes_a_prefix_of_the_epochs_and_a_sample_of_the_queries(run, opened, tmp_path):
    store, queries = opened(path=run.path), table_of(tmp_path / "data.jsonl")
    visits = read_visits(store, queries, 2, 3, seed=1)
    assert len(visits) == 2 and visits.keys() == read_visits(store, queries, 2, None, seed=1).keys()
    assert {tuple(read_visits(store, queries, 2, 1, seed)) for seed in range(20)} > {tuple(visits)}
    for query_id, each in visits.items():
        mine = [visit for visit, _ in run.visits if visit.query.id == query_id and visit.epoch < 3]
        assert [visit.group for visit in each] == mine
    sums = history.totals_by_visit(store)
    for (query_id, step), totals in sums.items():
        assert totals == Totals.of(call for at, call in run.calls if (call.query_id, at) == (query_id, step))
    assert sum(t.calls for t in sums.values()) == store.totals().calls


@pytest.fixture
def opened(tmp_path):
    """Open a store, after scoring a run into it if it is new. All are closed at the end."""
    stores = []

    def make(*sizes: int, path: Path | None = None) -> BufferStore:
        if path is None:
            commit(path := tmp_path / f"{len(stores)}.sqlite", *sizes)
        stores.append(BufferStore(path, read_only=True))
        return stores[-1]

    yield make
    for store in stores:
        store.close()


@pytest.fixture(scope="module")
def gained(tmp_path_factory):
    """The folder of a run of twelve queries in three epochs, whose rollouts get better."""
    folder = tmp_path_factory.mktemp("gained")
    commit(folder / LIVE_STORE, 12, 3, gain=4)
    return folder


REWARDS = st.lists(st.tuples(st.booleans(), *[st.sampled_from([None, -1.0, -0.5, 1 / 3, 0.7, 1.0])] * 2), max_size=8)


def slow_group(rows):
    """Each measure of a group, by loops over rollouts and pairs."""
    advantages, found = [], {}
    for side, name in ((1, "recorded"), (2, "replayed")):
        known = [row[side] for row in rows if row[side] is not None]
        spread = stdev(known) + 1e-4 if len(set(known)) > 1 else math.inf
        advantages.append([None if row[side] is None else (row[side] - fmean(known)) / spread for row in rows])
        values = [row[side] for row in rows if row[0] and row[side] is not None]
        found[f"ties_{name}"] = [float(values.count(value) > 1) for value in values]
        found[f"unscored_{name}"] = [float(row[side] is None) for row in rows]
    both = [i for i, row in enumerate(rows) if None not in row[1:]]
    found["same_rewards"] = [float(rows[i][1] == rows[i][2]) for i in both]
    x, y = ([side[i] for i in both] for side in advantages)
    products = [a * b for a, b in zip(x, y, strict=True)]
    found["signs_turned"] = [float(product < -1e-9) for product in products]
    lengths = [math.hypot(*side) for side in (x, y)]
    found["cosine"] = [sum(products) / math.prod(lengths) if min(lengths) else 0] if max(lengths) else []
    ranked = [rows[i][1:] for i in both if rows[i][0]]
    signs = [((a > c) - (a < c), (b > d) - (b < d)) for (a, b), (c, d) in combinations(ranked, 2)]
    roots = math.hypot(*[s for s, _ in signs]) * math.hypot(*[t for _, t in signs])
    found["tau"] = [sum(s * t for s, t in signs) / roots if roots else 0] if signs else []
    return found


@given(REWARDS)
def test_compare_group_measures_what_slow_counting_does(rows):
    visit = group(numbers(), " ".join("7" if answered else "-" for answered, *_ in rows), 0, 0)
    found = compare_group(visit, [row[1] for row in rows], [row[2] for row in rows])
    expected = slow_group(rows)
    assert found.keys() == expected.keys()
    for name in found:
        assert sorted(found[name]) == pytest.approx(sorted(expected[name]), abs=1e-8), name  # advantages are rounded


# Duels


def play(drawn, answer):
    """Answer all questions of a draw."""
    asked = duel.questions_of(drawn, {f"q{i}": numbers(f"q{i}") for i in range(60)})
    return {name: question.read(answer(question.prompt())) for name, question in asked.items()}


def test_draw_compares_the_first_epoch_with_the_newest_of_half_its_queries(opened):
    for queries, epochs, last, expected in ((4, 3, 1, (0, 1)), (4, 3, 2, (0, 2)), (5, 3, 2, (0, 1)), (4, 2, 1, None)):
        store = opened(queries, epochs, 4, last)
        if expected:
            assert duel.draw(store, 4, 0, seed=0).epochs == expected, (queries, last)
        else:
            with pytest.raises(SettingsError, match="the run has only epoch 0 so far"):
                duel.draw(store, 4, 0, seed=0)


def test_read_answers_finds_the_true_share_of_duels_and_a_half_in_the_control(opened):
    store = opened(40, 3, 4)
    drawn = duel.draw(store, 30, 50, seed=2)
    assert drawn.epochs == (0, 2) and len(drawn.duels) == 30 and len(drawn.control) == 50
    assert max(Counter(id for id, _, _ in drawn.duels.values()).values()) == 1
    points = []
    for id, one, other in drawn.duels.values():
        assert (one.step, other.step) == (0, 2)
        assert {r.text for r in (one, other)} <= {r.text for r in history.responses(store, id)}
        points.append((quality(other.text) > quality(one.text)) + (quality(other.text) == quality(one.text)) / 2)
    n, won, control = duel.read_answers(drawn, play(drawn, truth))
    assert (n, won.queries, won.probability) == (30, 30, pytest.approx(fmean(points)))
    assert won.probability > 0.5 and won.low < won.probability < won.high
    assert control.probability == 0.5 and control.queries >= 10, "the same judge places them as it did"
    assert tuple(duel.draw(store, 30, 50, 2).duels) == tuple(drawn.duels) != tuple(duel.draw(store, 30, 50, 3).duels)
    few = duel.draw(store, 30, 18, seed=2)
    assert "a higher --control" in str(duel.read_answers(few, play(few, truth))[2])
    drawn = duel.draw(store, 1, 100, seed=0)
    raised = {name: min(v + 1, 4) if name.endswith("again") else v for name, v in play(drawn, truth).items()}
    assert duel.read_answers(drawn, raised)[2].low > 0.55, "a judge that moves repeated placements up is seen"


def test_visit_of_counts_placements_as_the_page_does(gained, opened):
    store = opened(path=gained / LIVE_STORE)
    drawn, found = duel.draw(store, 1, 99, seed=0), visits_by_query(store)
    placed: dict[str, list] = {}
    for each in drawn.control.values():
        placed.setdefault(each.row.query_id, []).append((each, each.recorded))
    assert len(placed) == 12
    for query_id, each in placed.items():
        assert duel.visit_of(each, [position for _, position in each]) == found[query_id][0]


def test_draw_spreads_more_duels_than_queries_and_anchors_take_part(opened):
    store = opened(4, 2, 4)
    drawn = duel.draw(store, 4 * 16, 8, seed=0)
    assert Counter(id for id, _, _ in drawn.duels.values()) == {f"q{i}": 16 for i in range(4)}
    assert len({(id, one.id, other.id) for id, one, other in drawn.duels.values()}) == 64, "every pair once"
    kept = {(id, anchor.id) for id in store.query_ids() for anchor in store.load(id).anchors}
    assert kept & {(id, r.id) for id, *pair in drawn.duels.values() for r in pair}
    assert len(duel.draw(store, 999, 8, seed=0).duels) == 64
    assert Counter(Counter(id for id, _, _ in duel.draw(store, 6, 8, 0).duels.values()).values()) == {2: 2, 1: 2}


def test_read_answers_gives_half_to_the_first_shown_and_leaves_open_duels_out(opened):
    store = opened(12, 2, 0)
    drawn = duel.draw(store, 12, 0, seed=0)
    verdicts = {f"{name} {order}": "A" for name in drawn.duels for order in ("forth", "back")}
    n, won, control = duel.read_answers(drawn, verdicts)
    assert (n, won.probability, won.queries) == (12, 0.5, 12) and won.low < 0.3 < 0.7 < won.high
    assert control.probability is None and not drawn.control
    del verdicts[f"{next(iter(drawn.duels))} back"]
    assert duel.read_answers(drawn, verdicts)[0] == 11
    with pytest.raises(JudgeError, match="no duel has a verdict"):
        duel.read_answers(drawn, {})


@given(st.lists(st.sampled_from([0.0, 0.25, 0.5, 1.0]), min_size=1, max_size=40))
def test_share_of_has_wilsons_interval(values):
    share = duel.share_of(values)
    p = share.probability
    assert p == pytest.approx(fmean(values)) and share.queries == len(values)
    spread = stdev(values) / math.sqrt(len(values)) if len(values) > 1 else 0
    for end in (share.low, share.high):
        deviation = math.sqrt(end * (1 - end) * (spread**2 / (p * (1 - p)) if spread else 1 / len(values)))
        assert abs(p - end) == pytest.approx(Z * deviation, abs=1e-7)  # the root of a rounding error of 1 - end
    assert 0 <= share.low <= p <= share.high <= 1 and share.low < share.high


# The command


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
def words(gained, tmp_path):
    """What names a copy of the run with its data set."""
    shutil.copytree(gained, tmp_path / "run")
    return ("--run_dir", tmp_path / "run", "--dataset_name", data_of(tmp_path / "data.jsonl", 12))


def found_in(*parts) -> dict:
    return json.loads(Path(*parts).read_text())


@pytest.mark.slow
def test_main_replays_a_real_run_by_the_embedded_judge(tmp_path, tiny_policy, rows, data_file, command):
    run = tmp_path / "run"
    train(run, tiny_policy, rows, save_strategy="steps", save_steps=8, method_args={"k0": 3, "prune_after": 1})
    words = ("--run_dir", run, "--dataset_name", data_file)
    printed = command(*words, "--sample", 99, "--judge_prompt_price", 2)
    assert "a token counts as" not in printed, "the price is that of the run"
    found = found_in(run, REPORT, "rejudge.json")
    assert (found["queries"], found["groups"], found["same_data"]) == (12, 24, True)
    assert found["replayed"]["method_args"] == found["recorded"]["method_args"]
    assert found["replayed"]["method_args"]["k0"] == 3, "from the checkpoint"
    recorded, replayed = (found[side]["totals"] for side in ("recorded", "replayed"))
    assert recorded | {"seconds": 0} == replayed | {"seconds": 0}
    for name, value in (("signs_turned", 0), ("same_rewards", 1), ("cosine", 1), ("tau", 1)):
        assert found["measures"][name]["value"] == pytest.approx(value), name
    assert found["replayed"]["price"] == pytest.approx(2 * replayed["spent_prompt_tokens"] / 1e6)
    assert f"replayed judging                 {replayed['calls']:,} calls" in printed
    changed = command(
        "--run_dir", run / "checkpoint-8", "--dataset_name", data_file, "--method_args", '{"k0": 5}',
        "--judge_guard", "false", "--output", tmp_path / "other.json", "--epochs", 1,
    )  # fmt: skip
    other = found_in(tmp_path, "other.json")
    assert other["groups"] == 12 and other["replayed"]["judge_guard"] is False and "k0': 5" in changed
    assert other["replayed"]["method_args"] | {"k0": 3} == found["recorded"]["method_args"]
    with served(make_app()) as address:
        server = ("--judge_url", f"{address}/v1", "--judge_model", "rubric-judge")
        command(*words, "--sample", 3, *server, "--output", tmp_path / "served.json")
    by_server = found_in(tmp_path, "served.json")
    assert by_server["queries"] == 3 and by_server["measures"]["same_rewards"]["value"] == 1
    assert by_server["replayed"]["judge"] == "rubric-judge"


def test_reward_method_takes_arguments_of_its_own_run_and_imports_nothing_that_a_run_alone_names():
    own = "rankbuffer_trl.rewards.rankbuffer.RankBuffer"

    def found(recorded, arguments, **more):
        config = RejudgeConfig(run_dir="run", dataset_name="data.jsonl", **more)
        return config.reward_method({"method": recorded, "method_args": arguments})

    for recorded in ("this.s", own):
        with pytest.raises(SettingsError, match=f"^run names the reward method '{recorded}', .* --method {recorded} "):
            found(recorded, {})
    assert "this" not in sys.modules
    name, method = found(own, {"k0": 3, "prune_after": 1}, method=own, method_args={"prune_after": 2})
    assert (name, method.k0, method.prune_after) == (own, 3, 2)
    assert found(own, {"k0": 3}, method="rankbuffer")[1] == load_method("rankbuffer", {}, 0)
    method = load_method("rankbuffer_soft", {"prune_after": 3}, 0)
    assert found("rankbuffer_soft", asdict(method))[1] == method, "an argument that is gone, at its default"
    with pytest.raises(SettingsError, match="has no argument"):
        found("rankbuffer_soft", {**asdict(method), "fine": True})


def test_settings_are_taken_up_to_their_limits():
    least = {"sample": 1, "epochs": 1, "duels": 1, "control": 0}
    RejudgeConfig(run_dir="run", dataset_name="data.jsonl", **least)
    wrong = [{key: value - 1} for key, value in least.items()] + [{"run_dir": ""}, {"dataset_name": ""}]
    wrong += [{"output": "."}, *({"output": __file__, key: __file__} for key in ("run_dir", "dataset_name"))]
    for change in wrong:
        with pytest.raises(SettingsError, match=next(iter(change))):
            RejudgeConfig(**{"run_dir": "run", "dataset_name": "data.jsonl"} | change)


def test_main_puts_duels_on_the_page_of_their_run(words, command, tmp_path):
    run = tmp_path / "run"
    printed = command(*words, "--mode", "duel", "--duels", 10, "--control", 24, *NUMBERS)
    found = found_in(run, REPORT, DUEL)
    assert found["duels"] == 10 and found["epochs"] == [0, 2] and found["judge"] == NUMBERS[1]
    share = f"{100 * found['won']['probability']:.0f} %"
    assert f"epoch 2 beats epoch 0 in {share}" in printed and "(50 % is right): 50 % (48 % to 52 %)" in printed
    with open_runs([run]) as (opened,):
        label, value = next(iter(headlines_of(opened, None).items()))
        assert label == f"of 10 duels won by epoch 2 against epoch 0; judge: {NUMBERS[1]}" and value.startswith(share)
        (run / REPORT / DUEL).write_text(json.dumps(found | {"run": "another"}))
        assert duel_of(run, opened.store) is None
        refused = set()
        for case, text in damaged(json.dumps(found)):
            (run / REPORT / DUEL).write_text(text)
            try:
                duel_line(duel_of(run, opened.store))
            except StoreError as error:
                refused.add(case)
                message = r"\S+_report: duel\.json is .*: delete that file, or ask for the duels again"
                assert re.fullmatch(message, str(error)), f"{case}: {error}"
        assert {"cut at 1", "deep", "number", "('epochs', 0): 'x'", "('won', 'low'): nan", "('run',): None"} <= refused
        assert "duels" not in next(iter(headlines_of(Run("run", run, opened.store), None)))


def test_main_announces_the_tokens_of_all_sampled_answers(words, command):
    for mode in (("--mode", "duel", "--control", 0, "--probabilities", "true"), ("--method", "ratings_soft")):
        dry = [command(*words, *mode, "--dry_run", "true", "--judge_samples", n, *NUMBERS) for n in (1, 5)]
        once, often = (int(re.search(r"and ([\d,]+) completion", each)[1].replace(",", "")) for each in dry)
        assert often == pytest.approx(5 * once, abs=5), mode


def test_main_refuses_a_run_that_left_out_rubrics(words, command, monkeypatch):
    manifest = {"config": {"rubric_dropout": 0.6}}
    monkeypatch.setattr("rankbuffer_tools.report.runs.log_and_manifest", lambda path: ([], manifest))
    for mode in (("--mode", "duel"), ("--method", "rankbuffer")):
        said = command(*words, *mode, *NUMBERS)
        assert "was trained with rubric_dropout, which drew the rubrics" in said and not NumberJudge.asked


MODES = pytest.mark.parametrize("mode", [("--mode", "duel"), ("--method", "rankbuffer")], ids=["duel", "replay"])


@MODES
def test_main_asks_nothing_on_a_dry_run_and_then_what_that_said_once_per_judge(words, command, mode, tmp_path):
    words = (*words, *NUMBERS, *mode)
    printed = command(*words, "--judge_prompt_price", 1e6, "--dry_run", "true")
    low, high, prompt, price = re.search(
        r": (\d+)(?: to (\d+))? questions, about ([\d,]+) prompt and [\d,]+ completion tokens, ([\d,.]+) at", printed
    ).groups()
    assert float(price.replace(",", "")) == pytest.approx(float(prompt.replace(",", "")), abs=1)
    assert "a token counts as 3 characters" in printed, "the run has no counts of these questions"
    assert not NumberJudge.asked and not (tmp_path / "run" / REPORT).exists()
    assert command(*words, "--judge_prompt_price", 1e6).startswith(printed)
    first = len(NumberJudge.asked)
    assert first > 20 and int(low) <= first <= int(high or low)
    for arguments, asked in (('{"version": "numbers-2"}', first), ('{"version": "numbers-2"}', 0), ("{}", 0)):
        command(*words, "--judge_client_args", arguments)
        assert len(NumberJudge.asked) == asked, arguments


@MODES
def test_main_gives_no_result_of_a_judge_that_fails(words, command, mode, tmp_path):
    said = command(*words, *NUMBERS, "--judge_client_args", '{"fail": true}', *mode)
    assert "more than judge_max_failures=0.25 allows" in said and "run the same command again" in said
    assert not list((tmp_path / "run" / REPORT).glob("*.json"))
    assert "--method" not in mode or len(NumberJudge.asked) < 12 * 3 * 4, "it stops as soon as that is certain"


def interrupted(arguments):
    sys.argv = ["rankbuffer-rejudge", *map(str, arguments)]
    main()


@pytest.mark.slow
@MODES
def test_main_loses_no_paid_answer_to_a_kill(words, command, mode, tmp_path):
    sizes = ("--sample", 4) if "--method" in mode else ("--duels", 20, "--control", 10)
    words, two = (*words, *NUMBERS, *mode, *sizes), ("--output", tmp_path / "two.json")

    def client(**arguments):
        return ("--judge_client_args", json.dumps({"record": str(tmp_path / "asked"), **arguments}))

    command(*words, "--output", tmp_path / "whole.json")
    expected = list(NumberJudge.asked)
    NumberJudge.asked.clear()
    killed = multiprocessing.get_context("fork").Process(
        target=interrupted, args=((*words, *client(kill_at=31), *two),)
    )
    killed.start()
    killed.join(120)
    assert killed.exitcode == -signal.SIGKILL and not (tmp_path / "two.json").exists()
    assert len((tmp_path / "asked").read_text().splitlines()) == 31
    for left in (len(expected) - 31, 0):
        command(*words, *client(), *two)
        assert len(NumberJudge.asked) == left
    asked = [json.loads(line) for line in (tmp_path / "asked").read_text().splitlines()]
    assert Counter(asked) == Counter(expected), "each question once"
    results = [found_in(tmp_path, name) for name in ("whole.json", "two.json")]
    for found in results:
        found.get("replayed", {"totals": {}})["totals"].pop("seconds", None)
    assert results[0] == results[1]


def test_replay_gives_no_result_of_which_more_judgments_failed_than_allowed(run, tmp_path):
    store = BufferStore(run.path, read_only=True)
    visits = read_visits(store, table_of(tmp_path / "data.jsonl"), 4, None, 0)
    method = load_method("rankbuffer", {"prune_after": 2}, 0)
    calls = again(visits, method, scripted_judge(answer))[1]
    failed = sum(call.failed for call in calls)
    again(visits, method, scripted_judge(answer), max_failures=(failed + 0.5) / len(calls))
    with pytest.raises(JudgeError, match=rf"failed {failed} of {len(calls)} judgments"):  # of those that were asked
        again(visits, method, scripted_judge(answer), max_failures=(failed - 0.5) / len(calls))
    store.close()


def test_main_estimates_another_method_by_its_own_questions(words, command, tmp_path):
    said = command(*words, *NUMBERS, "--method", "pointwise", "--dry_run", "true")
    with open_runs([tmp_path / "run"]) as (opened,):
        visits = read_visits(opened.store, table_of(tmp_path / "same.jsonl", 12), 50, None, 0)
    _, prompt, completion = price_of(visits, load_method("pointwise", {}, 0), True, Totals())
    assert f"about {prompt:,.0f} prompt and {completion:,.0f} completion tokens" in said
