"""Judging a run again: duels with known winners, and kills."""

import json
import math
import multiprocessing
import re
import shutil
import signal
import sys
from collections import Counter
from pathlib import Path
from statistics import fmean, stdev

import pytest
from conftest import numbers
from helpers.damage import damaged
from helpers.judges import NumberJudge
from helpers.runs import commit, data_of
from hypothesis import given
from hypothesis import strategies as st

from rankbuffer_tools.compare import duel
from rankbuffer_tools.compare.command import main
from rankbuffer_tools.compare.config import RejudgeConfig
from rankbuffer_tools.report.report import headlines_of
from rankbuffer_tools.report.runs import Run, open_runs
from rankbuffer_trl.errors import SettingsError
from rankbuffer_trl.judge import JudgeError
from rankbuffer_trl.monitoring.model_card import duel_line
from rankbuffer_trl.monitoring.progress import Z, duel_of, visits_by_query
from rankbuffer_trl.store import BufferStore, StoreError, history
from rankbuffer_trl.store.places import DUEL, LIVE_STORE, REPORT
from rankbuffer_trl.testing import quality, truth


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


def test_settings_are_taken_up_to_their_limits():
    least = {"duels": 1, "control": 0}
    RejudgeConfig(run_dir="run", dataset_name="data.jsonl", **least)
    wrong = [{key: value - 1} for key, value in least.items()] + [{"run_dir": ""}, {"dataset_name": ""}]
    wrong += [{"output": "."}, *({"output": __file__, key: __file__} for key in ("run_dir", "dataset_name"))]
    for change in wrong:
        with pytest.raises(SettingsError, match=next(iter(change))):
            RejudgeConfig(**{"run_dir": "run", "dataset_name": "data.jsonl"} | change)


def test_main_puts_duels_on_the_page_of_their_run(words, command, tmp_path):
    run = tmp_path / "run"
    printed = command(*words, "--duels", 10, "--control", 24, *NUMBERS)
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
    soft = ("--control", 0, "--probabilities", "true", "--dry_run", "true")
    dry = [command(*words, *soft, "--judge_samples", n, *NUMBERS) for n in (1, 5)]
    once, often = (int(re.search(r"and ([\d,]+) completion", each)[1].replace(",", "")) for each in dry)
    assert often == pytest.approx(5 * once, abs=5)


def test_main_refuses_a_run_that_left_out_rubrics(words, command, monkeypatch):
    manifest = {"config": {"rubric_dropout": 0.6}}
    monkeypatch.setattr("rankbuffer_tools.report.runs.log_and_manifest", lambda path: ([], manifest))
    said = command(*words, *NUMBERS)
    assert "was trained with rubric_dropout, which drew the rubrics" in said and not NumberJudge.asked


def test_main_asks_nothing_on_a_dry_run_and_then_what_that_said_once_per_judge(words, command, tmp_path):
    words = (*words, *NUMBERS)
    printed = command(*words, "--judge_prompt_price", 1e6, "--dry_run", "true")
    number, prompt, price = re.search(
        r": (\d+) questions, about ([\d,]+) prompt and [\d,]+ completion tokens, ([\d,.]+) at", printed
    ).groups()
    assert float(price.replace(",", "")) == pytest.approx(float(prompt.replace(",", "")), abs=1)
    assert "a token counts as 3 characters" in printed, "the run has no counts of these questions"
    assert not NumberJudge.asked and not (tmp_path / "run" / REPORT).exists()
    assert command(*words, "--judge_prompt_price", 1e6).startswith(printed)
    first = len(NumberJudge.asked)
    assert first == int(number) > 20
    for arguments, asked in (('{"version": "numbers-2"}', first), ('{"version": "numbers-2"}', 0), ("{}", 0)):
        command(*words, "--judge_client_args", arguments)
        assert len(NumberJudge.asked) == asked, arguments


def test_main_gives_no_result_of_a_judge_that_fails(words, command, tmp_path):
    said = command(*words, *NUMBERS, "--judge_client_args", '{"fail": true}')
    assert "more than judge_max_failures=0.25 allows" in said and "run the same command again" in said
    assert not list((tmp_path / "run" / REPORT).glob("*.json"))
    assert len(NumberJudge.asked) == 4, "a pilot shows that nothing can be read"


def interrupted(arguments):
    sys.argv = ["rankbuffer-rejudge", *map(str, arguments)]
    main()


@pytest.mark.slow
def test_main_loses_no_paid_answer_to_a_kill(words, command, tmp_path):
    words, two = (*words, *NUMBERS, "--duels", 20, "--control", 10), ("--output", tmp_path / "two.json")

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
    assert found_in(tmp_path, "whole.json") == found_in(tmp_path, "two.json")
