"""The watching reader: an exact test on pairs, draws from a real store, a live run, and what it costs."""

import json
import os
import re
import shutil
import sqlite3
import sys
import time
from collections import Counter
from contextlib import closing, contextmanager
from dataclasses import replace
from itertools import product
from math import log, prod
from pathlib import Path
from random import Random
from statistics import median
from typing import ClassVar
from unittest.mock import Mock

import pytest
from helpers.damage import damaged
from hypothesis import given
from hypothesis import strategies as st
from test_rejudge import NUMBERS, NumberJudge, commit, data_of, found_in, table_of

from rankbuffer_tools.rejudge.command import main
from rankbuffer_tools.rejudge.watch import Side, next_pairs
from rankbuffer_tools.report.charts import run_charts
from rankbuffer_tools.report.evidence import WATCH, Watch, WatchedPair, e_values, read_watch
from rankbuffer_tools.report.report import headlines_of
from rankbuffer_tools.report.runs import open_runs
from rankbuffer_trl import files
from rankbuffer_trl.judge import Reply, TransportError, Usage
from rankbuffer_trl.judge.config import JudgeConfig
from rankbuffer_trl.judge.probabilities import without_doubt
from rankbuffer_trl.store import StoreError, history
from rankbuffer_trl.store.places import LIVE_STORE, REPORT, read_store
from rankbuffer_trl.testing import quality

QUERIES, EPOCHS, SHARE = 8, 3, 0.02


# The test


@given(st.lists(st.integers(1, 9), min_size=5, max_size=5), st.sampled_from([0.0, 0.1, 0.4]))
def test_e_values_are_fair_bets_whatever_two_judges_say(weights, tolerance):
    """Whatever the probabilities of a difference, if their mean is the tolerance, the expected e-value is 1."""
    chances = dict(zip((-1.0, -0.5, 0.0, 0.5, 1.0), weights, strict=True))
    over = sum(weight * (difference - tolerance) for difference, weight in chances.items())
    corner = -1.0 if over > 0 else 1.0  # its weight brings the mean to the tolerance
    chances[corner] += abs(over) / abs(corner - tolerance)
    total, mean = sum(chances.values()), 0.0
    for said in product(chances, repeat=3):
        values = e_values(said, tolerance)
        assert min(values) > 0 and len(values) == 3
        mean += prod(chances[difference] / total for difference in said) * values[-1]
    assert mean == pytest.approx(1)


def test_e_values_lose_half_at_most_and_never_bet_on_a_better_reader():
    for tolerance in (0.0, 0.1, 0.9):
        values = e_values([1.0] * 50 + [-1.0], tolerance)
        assert values[-1] == pytest.approx(values[-2] / 2), "the largest bet"
    assert set(e_values([-1.0, 0.0, 0.1] * 9, 0.1)) == {1.0}
    assert max(e_values([1.0] * 5000, 0.0)) == 1e100, "a number that JSON holds"


def test_alarm_is_raised_as_soon_as_the_evidence_reaches_what_it_needs():
    pairs = [WatchedPair("q", "old", "new", step, 1, 9, judge=1.0, reader=0.0) for step in range(5)]
    watch = Watch("", "", "", False, False, 0, 0.0, 1 / 2.25, pairs)
    assert [row["e_value"] for row in watch.rows()][:4] == [1.0, 1.5, 2.25, 3.375]
    assert watch.alarm == 2, "at that value, not above it"


def shares(random: Random, chance: float) -> float:
    """The share of a judge that decides each order by itself, one time in three."""
    return random.choice((0.0, 1.0, 0.5)) if random.random() < 1 / 3 else float(random.random() < chance)


def alarms(runs: int, differences) -> list[int]:
    """After how many pairs simulated runs raise the alarm of 5 %; those without one are left out."""
    found = []
    for seed in range(runs):
        values = e_values(differences(Random(seed)), 0.1)
        found += [next(place for place, value in enumerate(values) if value >= 20)] if max(values) >= 20 else []
    return found


def test_e_values_raise_few_false_alarms_and_find_a_late_divergence():
    def odd(random):  # queries about which the judges always disagree, in sum as much as is tolerated
        return (random.choice([1.0] * 11 + [-1.0] * 9) for _ in range(300))

    def blunt(random):  # mean shares of 0.55 and 0.45
        return (shares(random, 0.575) - shares(random, 0.425) for _ in range(300))

    def late(random):  # the reader sees more at first; after 200 pairs the policy pleases its judge alone
        before = (shares(random, 0.6) - shares(random, 0.7) for _ in range(200))
        return [*before, *(shares(random, 0.95) - shares(random, 0.5) for _ in range(200))]

    for null in (odd, blunt):
        assert 0 < len(alarms(400, null)) < 0.05 * 400, null.__name__
    found = alarms(50, late)
    assert len(found) > 40 and min(found) > 200 and median(found) < 330


# The draw


def change(path: Path, *statements: str) -> None:
    with closing(sqlite3.connect(path)) as db, db:
        for sql in statements:
            db.execute(sql)


@pytest.fixture(scope="module")
def grown(tmp_path_factory) -> Path:
    """The folder of a run whose rollouts get much better, with a ledger of long prompts. Each epoch is one step."""
    folder = tmp_path_factory.mktemp("grown")
    commit(folder / LIVE_STORE, QUERIES, EPOCHS, gain=30)
    change(folder / LIVE_STORE, "UPDATE calls SET spent_prompt_tokens = 12000")
    return folder


def read(store, sides, seed: int, share: float = SHARE, cost=lambda place: 1, most: int = 99):
    """The pairs of a watch that asks `most` at once, and their texts. A pair costs `cost` times what is expected."""
    begun, texts = Watch("", "", "", False, False, seed, 0.1, 0.05, []), []
    while True:
        pairs, drawn, cause = next_pairs(store, sides, begun, share)
        if not pairs:
            assert "allows no further pair" in cause
            return begun.pairs, texts
        assert len(pairs) <= 8 and (begun.pairs or len(pairs) == 1)
        texts += drawn[:most]
        for pair in pairs[:most]:
            begun.pairs.append(replace(pair, tokens=pair.tokens * cost(len(begun.pairs))))


def test_next_pairs_are_uniform_over_queries_and_responses_within_the_share(grown, tmp_path):
    table = table_of(tmp_path / "data.jsonl", QUERIES)
    sides = [Side("judge", JudgeConfig(), True, table), Side("reader", JudgeConfig(), False, table)]
    drawn: Counter[str] = Counter()
    with closing(read_store(grown)) as store:
        ledger = history.totals_by(store, "step")
        for seed in range(12):
            pairs, texts = read(store, sides, seed)
            assert len(pairs) > 15
            drawn.update(pair.query_id for pair in pairs)
            for place, (pair, (id, old, new)) in enumerate(zip(pairs, texts, strict=True)):
                assert (id, old.id, new.id) == (pair.query_id, pair.old, pair.new)
                drawn.update({f"old {old.id[-1]}", f"new {new.id[-1]}"})
                assert old.step == 0 and new.step == pair.step == pair.epoch > 0, "the newest visit at that time"
                allowed = SHARE * sum(ledger[step].spent_tokens for step in range(pair.step + 1))
                assert sum(each.tokens for each in pairs[: place + 1]) <= allowed
            assert {pair.step for pair in pairs} == {1, 2}
        judge, reader = (side.questions(texts) for side in sides)
        assert not judge.keys() & reader.keys() and len(judge) == len(reader) == 2 * len(set(texts))
        assert "Is high." in next(iter(judge.values())).prompt() and "Is high." not in str(list(reader.values()))
    for kind, count in (("q", QUERIES), ("old", 4), ("new", 4)):
        found = {name: number for name, number in drawn.items() if name.startswith(kind)}
        each = sum(found.values()) / count
        assert len(found) == count and all(each / 2 < number < 2 * each for number in found.values()), found


def test_next_pairs_stay_within_the_share_if_answers_cost_more_than_expected_in_rounds_of_any_size(grown, tmp_path):
    table = table_of(tmp_path / "data.jsonl", QUERIES)
    sides = [Side(name, JudgeConfig(), True, table) for name in ("judge", "reader")]
    with closing(read_store(grown)) as store:
        whole = store.totals().spent_tokens
        for seed, factor in product(range(2), (1, 20)):
            pairs, _ = read(store, sides, seed, 0.1, lambda place, factor=factor: factor)
            spent = sum(pair.tokens for pair in pairs)
            assert 0.1 * whole - 3 * max(pair.tokens for pair in pairs) < spent < 0.1 * whole, (seed, factor)
        for dearer in (1, 4):  # each pair costs more than the one before it
            late, one, three = (read(store, sides, 0, 0.1, lambda n, d=dearer: 1 + n // d, most) for most in (8, 1, 3))
            assert {pair.step for pair in late[0]} == {1, 2} and late == one == three, dearer


# The command


class Contrary(NumberJudge):
    """A reader that prefers the worse response."""

    asked: ClassVar[list[str]] = []

    def answer(self, messages, tally):
        text, usage = super().answer(messages, tally)
        return text.translate({ord("A"): "B", ord("B"): "A"}), usage


class Placed(NumberJudge):
    """A judge that always names the first one shown. Its probabilities know better."""

    name = "placed"

    def answer(self, messages, tally):
        better, usage = super().answer(messages, tally)
        said = re.sub('"[AB]"', '"A"', better)
        logprobs = without_doubt(said)
        place = logprobs["content"][said.index('"A"') + 1]
        chances = {"A": 0.8, "B": 0.2} if '"A"' in better else {"A": 0.6, "B": 0.4}
        place["top_logprobs"] = [{"token": each, "logprob": log(chance)} for each, chance in chances.items()]
        return Reply(said, usage, logprobs=logprobs)


class Thinking(NumberJudge):
    """A judge whose answers cost much more than their characters let expect."""

    def answer(self, messages, tally):
        return super().answer(messages, tally)[0], Usage(1500, 0, 2500)


class Stumbling(Contrary):
    """A reader whose first answer alone fails."""

    def answer(self, messages, tally):
        if not self.asked:
            self.asked.append("")
            raise TransportError("it is late")
        return super().answer(messages, tally)


CONTRARY_PATH = f"{__name__}.Contrary"
CONTRARY = ("--reader", json.dumps({"judge_client": CONTRARY_PATH}))


@pytest.fixture
def command(grown, tmp_path, monkeypatch, capsys):
    """Watch a copy of the run: what the command printed, and the line with which it ended if that failed."""
    shutil.copytree(grown, tmp_path / "run")
    words = ("--run_dir", tmp_path / "run", "--dataset_name", data_of(tmp_path / "data.jsonl", QUERIES))
    monkeypatch.setattr(time, "sleep", lambda seconds: pytest.fail("it waits for a run that has ended"))

    def run(*arguments):
        NumberJudge.asked.clear()
        Contrary.asked.clear()
        monkeypatch.setattr(sys, "argv", ["rejudge", *map(str, words), "--mode", "watch", *map(str, arguments)])
        with pytest.raises(SystemExit) as stop:
            main()
        return capsys.readouterr().out + (stop.value.code or "")

    return run


def test_main_watches_a_run_that_has_ended_and_raises_the_alarm_on_the_page(command, tmp_path):
    file = tmp_path / "run" / REPORT / WATCH
    dry = command(*NUMBERS, *CONTRARY, "--dry_run", "true")
    assert not NumberJudge.asked and not file.exists() and dry.count(" questions, about ") == 2
    printed = command(*NUMBERS, *CONTRARY)
    assert printed.startswith(dry) and "no process trains the run now" in printed
    found = read_watch(file)
    assert (found.judge, found.reader, found.reader_rubrics) == (NUMBERS[1], f"{__name__}.Contrary", True)
    with open_runs([tmp_path / "run"]) as (run,):
        texts = {
            (id, r.id): r.text for id in {p.query_id for p in found.pairs} for r in history.responses(run.store, id)
        }
        for pair in found.pairs:
            old, new = (quality(texts[pair.query_id, id]) for id in (pair.old, pair.new))
            share = (1 + (new > old) - (new < old)) / 2
            assert (pair.judge, pair.reader) == (share, 1 - share)
        value = found_in(file)["e_value"]
        shown = f"e-value {value:.3g} of 20, ALARM since step {found.alarm}: the reader sees less progress"
        assert value > 20 and shown in headlines_of(run, None).values()
        chart = run_charts(run.store, run.log, run.watch)[0]
    assert [row["epoch"] for row in chart.table] == [1, 2] and chart.table[-1]["e_value"] == value
    assert all(row["judge"] > 0.6 and row["judge"] + row["reader"] == pytest.approx(1) for row in chart.table)
    assert f"; {shown}\n" in printed and shown in chart.caption
    command(*NUMBERS, *CONTRARY)
    assert not NumberJudge.asked and read_watch(file) == found, "there is nothing left to ask"
    line = command(*NUMBERS, *CONTRARY, "--seed", 1, "--tolerance", 0)
    assert "watch.json was begun with another seed, tolerance: " in line
    newer = '{"version": "numbers-2"}'
    assert "was begun with another judge_digest: " in command(*NUMBERS, *CONTRARY, "--judge_client_args", newer)
    plain = json.dumps({"judge_client": CONTRARY_PATH, "judge_guard": False})
    assert "was begun with another reader_digest: " in command(*NUMBERS, "--reader", plain)
    older = {name: value for name, value in found_in(file).items() if "digest" not in name}
    file.write_text(json.dumps(older))
    command(*NUMBERS, *CONTRARY)
    assert not NumberJudge.asked, "a file without digests is as good"
    said = command(*NUMBERS, "--output", tmp_path / "same.json")
    assert "sees the same rubrics, so the two cannot part" in said and "ALARM" not in said
    same = found_in(tmp_path / "same.json")
    assert same["e_value"] == 1 and {pair["judge"] - pair["reader"] for pair in same["pairs"]} == {0}


def test_digest_of_a_side_tells_how_many_answers_stand_for_probabilities():
    server = {"judge_url": "http://127.0.0.1:1/v1", "judge_model": "judge"}
    judges = [JudgeConfig(**server, judge_samples=n) for n in (1, 2, 5)]
    words, soft = ([Side("judge", each, True, None, p).digest for each in judges] for p in (False, True))
    assert len({*words}) == 1 and len({*soft}) == 3 and soft[0] == words[0]


def test_main_reads_probabilities_where_the_words_name_a_place(command, tmp_path):
    placed, soft = ("--judge_client", f"{__name__}.Placed"), ("--probabilities", "true")
    file = tmp_path / "run" / REPORT / WATCH
    command(*placed)
    assert {pair["judge"] for pair in found_in(file)["pairs"]} == {0.5}
    assert "was begun with another probabilities: " in command(*placed, *soft)
    file.unlink()
    command(*NUMBERS, *CONTRARY)
    known = [(pair.old, pair.new, pair.judge) for pair in read_watch(file).pairs]
    file.unlink()
    command(*placed, *soft)
    assert [(pair.old, pair.new, pair.judge) for pair in read_watch(file).pairs] == known
    file.unlink()
    assert "returns no logprobs, which this question needs" in command(*NUMBERS, *soft) and not file.exists()
    command(*placed, *soft, "--mode", "duel", "--control", 0)
    assert found_in(file.with_name("duel.json"))["won"]["probability"] > 0.6


def test_main_counts_the_tokens_that_a_judge_spends_and_not_those_expected(command, tmp_path, grown):
    command(*NUMBERS, "--reader", json.dumps({"judge_client": f"{__name__}.Thinking"}), "--reader_share", 0.1)
    pairs = read_watch(tmp_path / "run" / REPORT / WATCH).pairs
    with closing(read_store(grown)) as store:
        allowed = 0.1 * store.totals().spent_tokens
    assert {pair.tokens for pair in pairs} == {2 * 13 + 2 * 4000} and len(pairs) > 1
    assert sum(pair.tokens for pair in pairs) < allowed


def test_read_watch_refuses_what_the_command_did_not_write(command, tmp_path):
    command(*NUMBERS, *CONTRARY)
    file, refused = tmp_path / "run" / REPORT / WATCH, set()
    for case, text in damaged(file.read_text()):
        file.write_text(text)
        try:
            assert (read := read_watch(file)).verdict and isinstance(read.by_epoch(), list)
        except StoreError as error:
            refused.add(case)
            assert "watch.json is" in str(error) and "\n" not in str(error)
    assert {"('tolerance',): 5.5", "('pairs', 0, 'judge'): 5.5", "('run',): None", "cut at 1"} <= refused
    assert "to begin the watch again" in command(*NUMBERS, *CONTRARY), "the last one was an empty object"


def test_main_waits_beside_a_live_run_and_goes_on_after_a_stop(command, grown, tmp_path, monkeypatch):
    live, file = tmp_path / "run" / LIVE_STORE, tmp_path / "run" / REPORT / WATCH
    late = command(*NUMBERS, *CONTRARY, "--output", tmp_path / "late.json")
    descriptor = os.open(live.with_suffix(".lock"), os.O_RDWR | os.O_CREAT)
    files.lock_descriptor(descriptor)

    def show(steps: int) -> None:
        shutil.copy(grown / LIVE_STORE, live)
        change(
            live, *(f"DELETE FROM {name} WHERE step >= {steps}" for name in "groups calls buffers responses".split())
        )

    turns = [lambda: None, lambda: show(2), Mock(side_effect=KeyboardInterrupt)]
    monkeypatch.setattr(time, "sleep", lambda seconds: turns.pop(0)())
    show(1)
    printed = command(*NUMBERS, *CONTRARY)
    assert printed.count("no query of the run has two visits with answers") == 1
    assert "interrupted. The answers so far are kept; run the same command again" in printed
    assert {pair.step for pair in read_watch(file).pairs} == {1} and not turns

    @contextmanager
    def open_before_the_end(paths):
        """The run writes its last step and ends after the first look."""
        with open_runs(paths) as runs:
            yield runs
        if len(looks := [*looked, paths]) == 2:  # the first one is for the price
            show(3)
            os.close(descriptor)
        looked[:] = looks

    looked: list = []
    turns = [lambda: None]
    with monkeypatch.context() as patched:
        patched.setattr("rankbuffer_tools.rejudge.watch.open_runs", open_before_the_end)
        printed = command(*NUMBERS, *CONTRARY)
    assert not turns and "no process trains the run now" in printed and "ALARM" in late
    assert read_watch(file) == read_watch(tmp_path / "late.json"), "as a reader that comes late"
    show(1)
    assert "no query of the run has two visits with answers" in command(*NUMBERS, "--output", tmp_path / "x")
    show(3)
    change(live, "DELETE FROM responses WHERE step > 0")
    assert "no query of the run has two visits with answers" in command(*NUMBERS, "--output", tmp_path / "x")
    show(3)
    change(live, "UPDATE calls SET spent_prompt_tokens = 0, spent_completion_tokens = 0")
    assert "reader_share=0.02 of the tokens" in command(*NUMBERS, "--output", tmp_path / "x")
    change(live, "UPDATE run SET id = 'other'")
    assert "was begun with another run: " in command(*NUMBERS, *CONTRARY)
    with open_runs([tmp_path / "run"]) as (run,):
        assert run.watch is None


def test_main_ends_with_a_line_if_a_judge_of_a_watch_fails_or_cannot_be(command, tmp_path, monkeypatch):
    failing = json.dumps({"judge_client": f"{__name__}.Contrary", "judge_client_args": {"fail": True}})
    line = command(*NUMBERS, "--reader", failing)
    assert "more than judge_max_failures=0.25 allows" in line and not (tmp_path / "run" / REPORT / WATCH).exists()
    asked = {*NumberJudge.asked}
    command(*NUMBERS, *CONTRARY)
    assert asked and not asked & {*NumberJudge.asked}, "the answers of the judge that did not fail are kept"
    for reader, part in (
        ('{"judge_modle": "x"}', "reader has no setting 'judge_modle'; it has judge_url, judge_model,"),
        ('{"judge_model": "x"}', "reader: judge_model is 'x' but judge_url is not set"),
        ("7", "reader must be a JSON object, got 7"),
    ):
        assert part in command(*NUMBERS, "--reader", reader)
    monkeypatch.setattr("rankbuffer_tools.report.runs.log_and_manifest", lambda path: ([], {"judge": "another"}))
    dry = ("--dry_run", "true", "--output", tmp_path / "dry.json")
    assert "was trained by 'another', and not by 'RubricJudge'" in command(*dry)
    said = command(*NUMBERS, "--reader_rubrics", "false", *dry)
    assert "sees no rubrics of the query" in said and "was trained by" not in said
    assert "the embedded judge reads nothing else" in command("--reader_rubrics", "false")
    for name, value in (("reader_share", 0), ("tolerance", 1), ("tolerance", -1), ("false_alarm_rate", 1)):
        assert f"rejudge: {name} " in command(*NUMBERS, f"--{name}", value)
    command(
        *NUMBERS, "--reader", json.dumps({"judge_client": f"{__name__}.Stumbling"}), "--output", tmp_path / "x.json"
    )
    readers = [pair.reader for pair in read_watch(tmp_path / "x.json").pairs]
    assert readers[0] is None and readers.count(None) == 1, "one failure of two questions is no reason to stop"
    lenient = json.dumps(json.loads(failing) | {"judge_max_failures": 1})
    said = command(*NUMBERS, "--reader", lenient, "--output", tmp_path / "none.json")
    assert "no pair has all of its verdicts" in said and found_in(tmp_path / "none.json")["e_value"] == 1
