"""Comparisons: duels with known winners, epochs of a run by its stored answers, models on prompts, and kills."""

import json
import math
import multiprocessing
import os
import re
import shutil
import signal
import subprocess
import sys
from collections import Counter
from contextlib import closing
from math import exp
from pathlib import Path
from statistics import fmean, stdev
from types import SimpleNamespace

import pytest
from aiohttp import web
from conftest import numbers
from helpers.damage import damaged
from helpers.judges import NumberJudge
from helpers.nectar_rows import Model
from helpers.runs import commit, data_of
from helpers.servers import served
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoTokenizer

from rankbuffer_tools.batch.engines import TransformersEngine
from rankbuffer_tools.batch.sampling import Prompt, SamplingConfig
from rankbuffer_tools.batch.script import read_settings
from rankbuffer_tools.compare import duel
from rankbuffer_tools.compare.command import lines_of, main, seen_in_training
from rankbuffer_tools.compare.config import CompareConfig, CompareParser
from rankbuffer_tools.report.report import headlines_of
from rankbuffer_tools.report.runs import Run, open_runs
from rankbuffer_trl.checkpointing.manifest import FOLDER, FORMAT, RUN
from rankbuffer_trl.data import load_queries
from rankbuffer_trl.errors import SettingsError
from rankbuffer_trl.judge import JudgeError
from rankbuffer_trl.judge._probabilities import Reading
from rankbuffer_trl.monitoring.progress import Z, duel_of
from rankbuffer_trl.store import STORE_FILE, BufferStore, StoreError, history
from rankbuffer_trl.store._places import DUEL_FILE, LIVE_STORE, REPORT
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


def play(duels, answer):
    """Answer all questions of duels."""
    asked = duel.questions_of(duels, {f"q{i}": numbers(f"q{i}") for i in range(60)})
    return {name: question.read(answer(question.prompt())) for name, question in asked.items()}


def test_draw_compares_the_first_epoch_with_the_newest_of_half_its_queries(opened):
    for queries, epochs, last, expected in ((4, 3, 1, [0, 1]), (4, 3, 2, [0, 2]), (5, 3, 2, [0, 1]), (4, 2, 1, None)):
        store = opened(queries, epochs, 4, last)
        if expected:
            assert duel.draw(store, 4, None, seed=0)[0] == expected, (queries, last)
        else:
            with pytest.raises(SettingsError, match="the run has only epoch 0 so far"):
                duel.draw(store, 4, None, seed=0)


def test_draw_takes_the_epochs_that_are_named(opened):
    store = opened(4, 3, 4)
    epochs, drawn = duel.draw(store, 4, [1, 2], seed=0)
    assert (epochs, drawn.labels) == ([1, 2], ["epoch 1", "epoch 2"])
    assert {tuple(id.split("-")[0] for id in name.split()[1:]) for name in drawn.pairs} == {("1", "2")}
    with pytest.raises(SettingsError, match="the run has no epoch 7; it has 0, 1, 2"):
        duel.draw(store, 4, [0, 7], seed=0)


def test_score_finds_the_true_share_of_stored_answers(opened):
    store = opened(40, 3, 4)
    epochs, drawn = duel.draw(store, 30, None, seed=2)
    assert epochs == [0, 2] and len(drawn.pairs) == 30
    assert max(Counter(id for id, _, _ in drawn.pairs.values()).values()) == 1
    points = []
    for name, (id, one, other) in drawn.pairs.items():
        stored = {row.id: (row.step, row.text) for row in history.responses(store, id)}
        assert [stored[row] for row in name.split()[1:]] == [(0, one), (2, other)]
        points.append((quality(other) > quality(one)) + (quality(other) == quality(one)) / 2)
    found = duel.duel_score(drawn.pairs, play(drawn, truth))
    won = found["won"]
    assert (found["duels"], won.queries, won.probability) == (30, 30, pytest.approx(fmean(points)))
    assert won.probability > 0.5 and won.low < won.probability < won.high
    again, other = (duel.draw(store, 30, None, seed)[1].pairs for seed in (2, 3))
    assert [*again] == [*drawn.pairs] != [*other]


def test_draw_spreads_more_duels_than_queries_and_anchors_take_part(opened):
    store = opened(4, 2, 4)
    drawn = duel.draw(store, 4 * 16, None, seed=0)[1].pairs
    assert Counter(id for id, _, _ in drawn.values()) == {f"q{i}": 16 for i in range(4)}
    assert len({*drawn}) == len({*drawn.values()}) == 64, "every pair once"
    kept = {(id, anchor.text) for id in store.query_ids() for anchor in store.load(id).anchors}
    assert kept & {(id, text) for id, *pair in drawn.values() for text in pair}
    assert len(duel.draw(store, 999, None, seed=0)[1].pairs) == 64
    counts = Counter(id for id, _, _ in duel.draw(store, 6, None, 0)[1].pairs.values())
    assert Counter(counts.values()) == {2: 2, 1: 2}


def test_score_counts_pairs_and_queries():
    said = {
        **{"x 0 forth": ("B", 2.0), "x 0 back": ("A", -4.0)},  # wins both: +3
        **{"x 1 forth": ("A", -1.0), "x 1 back": ("A", -2.0)},  # wins one: +0.5
        **{"y 0 forth": ("A", -3.0), "y 0 back": ("B", 1.0)},  # loses both: -2
        "y 1 forth": ("B", 5.0),  # half a pair
    }
    verdicts = {
        name: Reading(word, {"A": 1 / (1 + exp(odds)), "B": 1 / (1 + exp(-odds))}, 0.0, 0.0)
        for name, (word, odds) in said.items()
    }
    pairs = {name: (name[0], "", "") for name in ("x 0", "x 1", "y 0", "y 1")}
    with pytest.raises(JudgeError, match="no duel has a verdict"):
        duel.duel_score(pairs, {"y 1 forth": "B"})
    found = duel.duel_score(pairs, verdicts)
    assert (found["duels"], found["by_place"], found["first_shown_wins"]) == (3, 1, 4 / 7)
    words, odds = found["wins"]["verdicts"], found["wins"]["log odds"]
    assert (words.queries, words.probability) == (2, (0.75 + 0) / 2)
    assert (odds.queries, odds.probability) == (2, (1 + 0) / 2) and found["won"] == odds
    assert found["mean_log_odds"] == pytest.approx((1.75 - 2) / 2)
    by_words = duel.duel_score(pairs, {name: each.value for name, each in verdicts.items()})
    assert by_words["won"] == words and by_words["mean_log_odds"] is None


def test_lines_of_name_an_answer_that_a_judge_may_not_mind():
    before = {"ended": 1.0, "repeated_4_grams": 0.0, "commonest_word": 0.1, "answered": 1.0}
    found = {"wins": {}, "mean_log_odds": None, "first_shown_wins": 0.5, "by_place": 4, "duels": 9}
    for change, said in (
        ({"ended": 0.2}, "100% of a's and 20% of b's answers end"),
        ({"answered": 0.75}, "75% of b's answers pass"),
        ({"repeated_4_grams": 0.73}, "73% of b's 4-grams"),
        ({"commonest_word": 1.0}, "10% of a's and 100% of b's words are"),
        ({"ended": 0.81, "repeated_4_grams": 0.1}, None),
    ):
        lines = [
            line for line in lines_of(found | {"measures": {"a": before, "b": before | change}}) if "look" in line
        ]
        assert [said in line for line in lines] == [True] * bool(said), change
    last = [lines_of(found | {"measures": {"a": {}, "b": {}}, "by_place": by_place})[-1] for by_place in (4, 5)]
    assert last[0].endswith("wins 50% of all duels") and "5 of 9 duels went to" in last[1] and "other 4" in last[1]


def test_measures_of_counts_words_repeats_and_answers():
    pairs = {"x 0": ("x", "a b c d a b c d", "a"), "x 1": ("x", "", "b c")}
    before, after = duel.measures_of(duel.Duels(("b", "a"), pairs, ({"tokens": 3.0}, {}))).values()
    shares = {"repeated_4_grams": 0.1, "commonest_word": 0.125, "answered": 0.5}
    assert before == pytest.approx({"tokens": 3.0, "words": 4, **shares})
    assert after == {"words": 1.5, "repeated_4_grams": 0, "commonest_word": 0.75, "answered": 1}


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
    """Run `rankbuffer-compare` with arguments: what it printed, and the one line with which it ends."""

    def run(*arguments):
        NumberJudge.asked.clear()
        monkeypatch.setattr(sys, "argv", ["rankbuffer-compare", *map(str, arguments)])
        with pytest.raises(SystemExit) as stop:
            main()
        assert stop.value.code in (0, 1) or "\n" not in stop.value.code
        return capsys.readouterr().out + (stop.value.code or "")

    return run


NUMBERS = ("--judge_client", f"{__name__}.NumberJudge")


@pytest.fixture
def words(gained, tmp_path):
    """What names a copy of the run with its data set."""
    shutil.copytree(gained, tmp_path / "run")
    return ("--run_dir", tmp_path / "run", "--dataset_name", data_of(tmp_path / "data.jsonl", 12))


def found_in(*parts) -> dict:
    return json.loads(Path(*parts).read_text())


@pytest.mark.parametrize(
    ("name", "change"),
    [
        *(("run_dir", {"run_dir": ""}), ("dataset_name", {"dataset_name": ""}), ("duels", {"duels": 0})),
        *(("show", {"show": -1}), ("models", {"models": ["a"]}), ("epochs", {"epochs": [1, 1]})),
        *(("epochs", {"epochs": [0, 1], "models": ["a", "b"]}), ("no_rubrics", {"no_rubrics": True})),
        *(("output", {"output": "."}), ("run_dir", {"output": __file__, "run_dir": __file__})),
        ("dataset_name", {"output": __file__, "dataset_name": __file__}),
    ],
)
def test_config_refuses_what_cannot_be_compared(name, change):
    CompareConfig(run_dir="run", dataset_name="data.jsonl", duels=1, show=0, epochs=[0, 3])
    with pytest.raises(SettingsError, match=name):
        CompareConfig(**{"run_dir": "run", "dataset_name": "data.jsonl"} | change)


def test_main_puts_duels_on_the_page_of_their_run(words, command, tmp_path):
    run = tmp_path / "run"
    printed = command(*words, "--duels", 10, *NUMBERS)
    found = found_in(run, REPORT, DUEL_FILE)
    assert found["duels"] == 10 and found["epochs"] == [0, 2] and found["judge"] == NUMBERS[1]
    share = f"{100 * found['won']['probability']:.0f} %"
    assert f"by the verdicts, epoch 2 wins {share}" in printed and printed.count("\n== ") == 5
    again = duel.duel_score(found["answers"], found["verdicts"])
    assert again["won"].probability == found["won"]["probability"], "the file has what the share is counted from"
    with open_runs([run]) as (opened,):
        label, value = next(iter(headlines_of(opened, None).items()))
        assert (
            label == f"of 10 duels on training prompts won by epoch 2 against epoch 0; judge: {NUMBERS[1]}"
            and value.startswith(share)
        )
        (run / REPORT / DUEL_FILE).write_text(json.dumps(found | {"run": "another"}))
        assert duel_of(run, opened.store) is None
        refused = set()
        for case, text in damaged(json.dumps(found)):
            (run / REPORT / DUEL_FILE).write_text(text)
            try:
                str(duel_of(run, opened.store))
            except StoreError as error:
                refused.add(case)
                message = r"\S+_report: duel\.json is .*: delete that file, or ask for the duels again"
                assert re.fullmatch(message, str(error)), f"{case}: {error}"
        assert {"cut at 1", "deep", "number", "('epochs', 0): 'x'", "('won', 'low'): nan", "('run',): None"} <= refused
        assert "duels" not in next(iter(headlines_of(Run("run", run, opened.store), None)))


def test_main_refuses_a_folder_that_is_no_run(words, command, tmp_path):
    said = command("--run_dir", tmp_path, *words[2:], "--models", "a=b", "c=d", *NUMBERS)
    assert "is not a run, for it holds neither" in said and not NumberJudge.asked


def test_main_announces_the_tokens_of_all_sampled_answers(words, command):
    soft = ("--probabilities", "true", "--dry_run", "true")
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
    said = r": (\d+) questions, about ([\d,]+) prompt and [\d,]+ completion tokens, ([\d,.]+) at"
    number, prompt, price = re.search(said, printed).groups()
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


SAVED = dict(judge_model="/models/writer", judge_guard=False, judge_decoding="json_schema", judge_client=None)
SAVED |= dict(temperature=0.7, top_p=0.8, top_k=5, max_completion_length=6, use_vllm=False, format_check="none")


def save_manifest(folder: Path, method: str = "ratings_soft", **changes) -> None:
    """Write what a training says of itself beside its policy."""
    manifest = {"format": FORMAT, "step": 3, "processes": 1, "config": SAVED | changes, "files": {}}
    (folder / FOLDER).mkdir(parents=True, exist_ok=True)
    (folder / FOLDER / RUN).write_text(json.dumps(manifest | {"method": method, "store_sha256": ""}))


@pytest.fixture
def settings_of(monkeypatch, tmp_path):
    """Return the settings that a comparison of a run has with more words."""

    def read(*words, **changes) -> CompareConfig:
        save_manifest(tmp_path, **changes)
        words = ("--run_dir", tmp_path, "--dataset_name", "a.jsonl", *words)
        monkeypatch.setattr(sys, "argv", ["rankbuffer-compare", *map(str, words)])
        return read_settings(CompareConfig, CompareParser)

    return read


AT = ("--judge_url", "http://127.0.0.1:1/v1")


def test_settings_of_a_run_are_the_defaults_and_another_judge_takes_only_the_sampling(settings_of, tmp_path):
    found = settings_of(*AT, "--judge_model", "/elsewhere/writer", "--top_k", 3)
    assert (found.judge_guard, found.judge_decoding, found.probabilities) == (False, "json_schema", True)
    assert (found.temperature, found.top_p, found.top_k, found.max_new_tokens) == (0.7, 0.8, 3, 6)
    assert (found.engine, settings_of(*AT, use_vllm=True).engine) == ("transformers", "vllm")
    assert not settings_of(*AT, method="pointwise").probabilities
    (tmp_path / "file.yaml").write_text("judge_guard: true\n")
    assert settings_of(*AT, "--config", tmp_path / "file.yaml").judge_guard, "a file wins over the run"
    other = settings_of(*AT, "--judge_model", "another")
    assert (other.judge_guard, other.judge_decoding, other.probabilities, other.top_k) == (True, "none", None, 5)
    with pytest.raises(SettingsError, match="judge_url is not set"):
        settings_of()


def test_main_samples_shows_asks_in_both_orders_and_continues(tiny_policy, data_file, tmp_path, command):
    judge, run = Model(lambda messages, how_often: '{"winner": "A"}'), tmp_path / "run"
    save_manifest(run, method="pointwise", judge_model="writer", judge_decoding="none")
    words = ("--run_dir", run, "--dataset_name", data_file, "--duels", 6, "--show", 1)
    words += ("--models", f"before={tiny_policy}", f"after={tiny_policy}")
    with served(judge.app()) as url:
        words += ("--judge_url", f"{url}/v1")
        assert "[price] 6 duels between answers of at most 6 tokens" in command(*words, "--dry_run", "true")
        assert not judge.bodies and not (run / REPORT).exists()
        for _ in range(2):
            printed = command(*words)
            assert printed.count("\n== ") == 1 and "by the verdicts, after wins 50 %" in printed
            assert "log odds" not in printed and "6 of 6 duels went to" in printed
        assert len(judge.bodies) == 4 + 12, "first questions before sampling, then each question once"
        found = found_in(run, REPORT, "compare.json")
        assert found["duels"] == 6 and found["measures"]["before"] == found["measures"]["after"]
        assert found["measures"]["after"]["tokens"] <= 6 and found["mean_log_odds"] is None
        assert (found["dataset"], found["run"]) == (str(data_file), "")
        others = "--models", f"before={tiny_policy}", f"other={tiny_policy}"
        assert "holds the comparison of before=" in command(*words, *others)
        (run / REPORT / "compare.json").write_text(json.dumps(found | {"dataset": "b.jsonl"}))
        refused = command(*words, "--dry_run", "true")
        assert refused.index("[price] 6 duels") < refused.index("on b.jsonl: name another file with --output")
        for odd in ([1], None, {}, found | {"dataset": os.path.relpath(data_file)}):
            (run / REPORT / "compare.json").write_text(json.dumps(odd))
            assert "name another file" not in command(*words, "--dry_run", "true")
        command(*words, "--no_rubrics", "true")
        prompts = [body["messages"][0]["content"] for body in judge.bodies]
    assert all("RUBRICS" in prompt and "weighted" in prompt for prompt in prompts[:16])
    assert len(prompts) == 32 and "rubrics" not in "".join(prompts[16:]).lower().replace("a rubric", "")
    assert (run / REPORT / "compare_without_rubrics.json").exists()
    assert len((run / REPORT / "samples.jsonl").read_text().splitlines()) == 6, "of one policy under two names"


def test_main_refuses_answers_that_stay_inside_the_thought_of_the_template(tiny_policy, data_file, tmp_path, command):
    policy, tokenizer = shutil.copytree(tiny_policy, tmp_path / "m"), AutoTokenizer.from_pretrained(tiny_policy)
    tokenizer.chat_template += "<think>"
    tokenizer.save_pretrained(policy)
    words = ("--dataset_name", data_file, "--models", f"a={policy}", f"b={policy}", "--engine", "transformers")
    said = command(*words, "--duels", 2, "--max_new_tokens", 4, "--output", tmp_path / "o.json")
    assert "answers of a: the chat template opens a thinking block, and no response closes it" in said


def test_main_asks_the_judge_before_it_loads_a_policy_that_is_there(data_file, tmp_path, command):
    (bare := tmp_path / "bare").mkdir()
    (bare / "config.json").write_text("{}")
    refused = load_queries(str(data_file))[0]["prompt"][-1]["content"]
    policy = Model(lambda *_: web.json_response({}, status=404))
    with served(policy.app()) as there:
        for unread, name, told in (
            *(("", bare, "more than judge_max_failures"), (refused, bare, "no tokenizer for")),
            (refused, f"{tmp_path}/none", f"there is no folder {tmp_path}/none"),
            (refused, f"{there}/v1", "does not serve models=b=http"),
        ):
            judge = Model(lambda messages, n, no=unread: "No." if no in messages[0]["content"] else '{"winner": "A"}')
            words = ("--dataset_name", data_file, "--models", f"a={bare}", f"b={name}", "--output", tmp_path / "o")
            with served(judge.app()) as url:
                said = command(*words, "--judge_url", f"{url}/v1", "--judge_model", "writer")
            assert told in said and (4 <= len(judge.bodies) <= 12 if name == bare else not judge.bodies)
    assert not (tmp_path / "o").exists()


def test_main_asks_a_policy_that_is_served_under_its_label(data_file, tmp_path, command):
    policy = Model(lambda messages, how_often: "<think>hm</think>Boil it.")
    with served(policy.app()) as url:
        words = ("--models", f"writer={url}/v1", f"other={url}/v1", "--format_check", "think", "--duels", 2)
        for kept in (False, True):
            said = command("--dataset_name", data_file, "--output", tmp_path / "o.json", *words)
            assert "by the" in said and ("2 are from" in said) is kept
    assert {body["model"] for body in policy.bodies} == {"writer", "other"}
    assert {tuple(pair[1:]) for pair in found_in(tmp_path, "o.json")["answers"].values()} == {("Boil it.",) * 2}


def test_main_shows_the_judge_no_thoughts_and_counts_what_the_server_cut_off(data_file, tmp_path, command):
    def thinks(messages, how_often):
        text, reason = [("<think>Hm, and", "length"), (f"<think>Hm.</think>Wait {how_often} s.", "stop")][
            how_often % 2
        ]
        choice = {"message": {"content": text}, "finish_reason": reason}
        return web.json_response({"choices": [choice], "usage": {"prompt_tokens": 9, "completion_tokens": 5}})

    policy, judge = Model(thinks), Model(lambda messages, how_often: '{"winner": "A"}')
    save_manifest(tmp_path, judge_model="writer", judge_decoding="none")
    words = ("--run_dir", tmp_path, "--dataset_name", data_file, "--duels", 24, "--probabilities", "false")
    with served(policy.app()) as url, served(judge.app()) as judge_url:
        words += ("--models", f"writer={url}/v1", f"other={url}/v1", "--judge_url", f"{judge_url}/v1")
        for check, seen in ((), False), (("--format_check", "none"), True):
            command(*words, *check, "--max_new_tokens", 6, "--output", tmp_path / "o.json")
            assert any("Hm" in body["messages"][0]["content"] for body in judge.bodies) == seen
            assert found_in(tmp_path, "o.json")["measures"]["other"]["ended"] == 0.5


def test_a_comparison_belongs_to_the_run_that_saved_the_policy(tmp_path):
    ids = {}
    for place in (tmp_path / LIVE_STORE, tmp_path / "checkpoint-2" / FOLDER / STORE_FILE):
        place.parent.mkdir(parents=True)
        commit(place, queries=2, epochs=1, gain=1)
        with closing(BufferStore(place, read_only=True)) as store:
            ids[place.parent.parent.name] = history.run_id(store)
    config, queries = SimpleNamespace(run_dir=tmp_path), SimpleNamespace(ids=[])
    assert len({*ids.values()}) == 2, "a later run has begun in the folder"
    for policy, run in (("checkpoint-2", ids["checkpoint-2"]), ("checkpoint-9", ids[tmp_path.name])):
        assert seen_in_training(config, queries, ["elsewhere", str(tmp_path / policy)]) == run
    assert seen_in_training(config, queries, ["elsewhere"]) == ""


def test_a_policy_that_was_trained_further_answers_anew(tiny_policy, tmp_path):
    path, prompt = shutil.copytree(tiny_policy, tmp_path / "m"), Prompt("p", [{"role": "user", "content": "Why?"}])
    weights, counts = path / "model.safetensors", []
    for change in (b"", b"", b"\1\2\3\4"):
        if change:
            weights.write_bytes(weights.read_bytes()[: -len(change)] + change)
        made = TransformersEngine(str(path), None, SamplingConfig(max_new_tokens=4))
        made.respond([prompt], tmp_path / "samples.jsonl", "")
        counts.append(len((tmp_path / "samples.jsonl").read_text().splitlines()))
    assert counts == [1, 1, 2], "its old answers do not count as its own"


@pytest.mark.slow
def test_a_comparison_of_stored_answers_loads_no_torch(words, tmp_path):
    code = f"import sys; sys.argv = {['rankbuffer-compare', *map(str, words)]!r}\n"
    code += "from rankbuffer_tools.compare.command import main\ntry: main()\nfinally: print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "False" and (tmp_path / "run" / REPORT / DUEL_FILE).exists()


def interrupted(arguments):
    sys.argv = ["rankbuffer-compare", *map(str, arguments)]
    main()


@pytest.mark.slow
def test_main_loses_no_paid_answer_to_a_kill(words, command, tmp_path):
    words, two = (*words, *NUMBERS, "--duels", 20), ("--output", tmp_path / "two.json")

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
