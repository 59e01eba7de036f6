"""A reference judge names the bias of a cheap judge, and the rewards lose it: regression, scorer, store and resume."""

import json
import pickle
import re
import sqlite3
import tracemalloc
from contextlib import closing
from dataclasses import dataclass, replace
from functools import partial
from random import Random

import numpy as np
import pytest
from conftest import group, numbers, scripted_judge, unreachable
from helpers.checkpoints import newest_checkpoint
from helpers.contents import TABLES, contents
from helpers.judges import Embedded, SilentJudge
from helpers.sampled import copy_checkpoints, same, train
from helpers.scripted import config

from rankbuffer_trl import _debiasing as debiasing_module
from rankbuffer_trl._debiasing import Correction, Debiasing, corrected
from rankbuffer_trl.checkpointing.manifest import FOLDER, RUN
from rankbuffer_trl.errors import SettingsError
from rankbuffer_trl.judge import Judge, JudgeError, RubricJudge
from rankbuffer_trl.rewards._method import GroupScore
from rankbuffer_trl.rewards._pointwise import Pointwise
from rankbuffer_trl.store import BufferStore, StoreError, history
from rankbuffer_trl.store._buffer_store import STORE_FILE
from rankbuffer_trl.store.history import ReadRow
from rankbuffer_trl.training._state import differences

ALL = (*TABLES, "reads")


def paying(points: int):
    """A judge that scores the number of a response, and pays for the word `then`."""

    def respond(messages):
        text = re.search(r"RESPONSE\n(.+)", messages[0]["content"])[1]
        return json.dumps({"score": int(text[0]) + points * ("then" in text)})

    return respond


def groups_of(step: int) -> list:
    """Two groups of six responses, whose words are numbers and others."""
    random = Random(step)
    words = ["", "-then", "-or", "-and-then"]
    lines = (" ".join(f"{random.randrange(7)}{random.choice(words)}" for _ in range(6)) for _ in "ab")
    return [group(numbers(id), f"{line} -", step) for id, line in zip("ab", lines, strict=True)]


def repaired(scorer, reference_judge=None, first: int = 3, **more):
    debiasing = Debiasing(reference_judge or scripted_judge(paying(0), method="reader"), first)
    return scorer(scripted_judge(paying(4)), Pointwise(), debiasing=debiasing, **more)


def rows(answers: int, worth: float, noise: float = 0.2) -> list[ReadRow]:
    """Reads of answers of 24 words drawn from 60, of which the judge pays for one."""
    random, found = Random(0), []
    for number in range(answers):
        words = random.sample(range(60), 24)
        features = {f"the word {word}": 1.0 for word in words} | {"words": random.gauss(30, 5), "place": number % 8}
        difference = worth * (7 in words) + random.gauss(0, noise) + number // 8
        found.append(ReadRow("q", number // 8, number % 8, difference, features))
    return found


def test_correction_names_the_word_that_was_put_in_and_little_where_nothing_was():
    found, nothing = Correction(rows(88, 0.75)), Correction(rows(400, 0.0))
    assert found.named == "the word 7" and found.slopes["the word 7"] == pytest.approx(0.75, abs=0.15)
    assert len(found.slopes) <= 2 and sum(map(abs, nothing.effects.values())) < 0.1
    with_it, without = found.predict([{"the word 7": 1.0}, {}])
    assert with_it - without == found.slopes["the word 7"]
    assert Correction(rows(88, -0.75)).effects["the word 7"] < 0
    alone = [each for each in rows(88, 0.75) if each.rollout == 0]
    assert Correction(alone).named is None, "one answer a group says nothing"
    two = [each for each in rows(88, 0.75) if each.step < 2] * 9
    assert Correction(two).named is None, "two groups say nothing, however often they are read"


def test_correction_counts_equal_answers_of_a_group_as_one():
    read = rows(88, 0.75)
    again = [replace(each, rollout=9, features=each.features | {"place": 9}) for each in read if each.rollout % 3]
    assert Correction(read + again).slopes == Correction(read).slopes


def test_correction_looks_at_words_that_differ_in_many_groups_and_makes_no_matrix_of_the_others(monkeypatch):
    read = rows(400, 0.75)
    new = [{f"the word {row}-{word}": 1.0 for word in range(200)} for row in range(len(read))]  # in one answer each
    long = [replace(each, features=each.features | more) for each, more in zip(read, new, strict=True)]
    tracemalloc.start()
    found, peak = Correction(long), tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert found.slopes == Correction(read).slopes and peak < 30 * 2**20, "a matrix of all words has 256 MB"
    monkeypatch.setattr(debiasing_module, "MAX_CANDIDATES", 1)
    assert Correction(read).named is None, "the place differs in all groups"


def test_the_reader_scores_the_first_groups():
    debiasing = Debiasing(scripted_judge(unreachable), 4)
    assert [[*debiasing.chosen(before, 3)] for before in (0, 3, 6)] == [[0, 1, 2], [0], []]


def test_corrected_changes_scored_answers_alone_and_stays_in_the_range():
    correction = Correction(rows(88, 0.75))
    correction.slopes = {"the word then": 1.5}
    shown = group(numbers(), "1-then 2 3-then - 5", 0)
    score = corrected(correction, shown, GroupScore((0.9, -0.9, None, -1.0, 0.0)))
    assert score.rewards == pytest.approx((-0.1, -0.4, None, -1.0, 0.5), nan_ok=True)
    extreme = corrected(correction, shown, GroupScore((-0.9, 0.9, None, -1.0, 0.0)))
    assert extreme.rewards[:2] == (-1.0, 1.0)
    lone = GroupScore((0.9, None, None, -1.0, None))
    assert corrected(correction, shown, lone) is lone
    pair = corrected(correction, shown, GroupScore((0.9, -0.9, None, -1.0, None)))
    assert pair.rewards == pytest.approx((0.15, -0.15, None, -1.0, None), nan_ok=True), "two are enough"


def test_score_takes_out_what_the_judge_pays_for_from_the_reads_of_earlier_steps(scorer, caplog):
    made, honest = repaired(scorer), scorer(scripted_judge(paying(0)), Pointwise())
    with caplog.at_level("INFO", "rankbuffer_trl._debiasing"):
        for step in range(6):
            pair = [each.score(groups_of(step), step).scores for each in (made, honest)]
            for mine, true in zip(*pair, strict=True):
                gap = np.subtract(mine.rewards, true.rewards)[:6]
                assert (np.ptp(gap) < 1e-6) == (step > 1), "by then the reference judge has read three groups"
                assert mine.rewards[6] == -1.0
    assert "judge bias: +0.40 of reward for one standard deviation of the word then" in caplog.text
    read = history.reads(made.store, 99)
    assert sorted({(each.step, each.query_id) for each in read}) == [(0, "a"), (0, "b"), (1, "a")]
    assert len(read) == 18 and {round(each.difference, 9) for each in read} == {0.0, 0.8}
    assert history.reads(made.store, 7) == read[:7] and read[0].step == 1
    assert not any("commonest_word" in each.features for each in read)
    assert history.totals_by(made.store, "method")["reader"].calls == 18
    before = contents(made.store, ALL[:3] + ALL[4:])
    with caplog.at_level("INFO", "rankbuffer_trl._debiasing"):
        made.score(groups_of(6), 6, update=False)
    assert len(set(caplog.messages)) == len(caplog.messages), "without new reads the correction is kept"
    assert contents(made.store, ALL[:3] + ALL[4:]) == before, "an evaluation reads nothing"


def test_a_query_is_read_once_in_a_step_and_not_in_an_evaluation_or_a_step_that_is_left(scorer):
    made, thrice = repaired(scorer, first=9), [*groups_of(0), groups_of(0)[0]]
    made.score(thrice, 0, update=False)
    made.begin(thrice, 0)
    made.run(made._begun.finish(thrice))
    made.discard()
    assert history.count_reads(made.store)[0] == 0
    for _ in range(2):  # the second time, the step is recorded already
        made.score(thrice, 0)
    found = sorted((each.query_id, each.rollout) for each in history.reads(made.store, 99))
    assert found == [(id, rollout) for id in "ab" for rollout in range(6)]


def test_a_restored_store_corrects_as_the_run_would_have(scorer, tmp_path):
    made, again = repaired(scorer, first=9), repaired(scorer, first=9)
    for step in range(4):
        made.score(groups_of(step), step)
    made.store.save(tmp_path / "saved")
    first = [made.score(groups_of(step), step).scores for step in (4, 5)]
    again.score(groups_of(9), 9)
    again.store.restore(tmp_path / "saved")
    assert [again.score(groups_of(step), step).scores for step in (4, 5)] == first
    assert contents(again.store, ALL) == contents(made.store, ALL)
    made.store.rewind(4)
    assert {each.step for each in history.reads(made.store, 99)} == {0, 1, 2, 3}


def test_a_store_with_another_table_of_reads_is_refused(scorer, tmp_path):
    made = repaired(scorer)
    made.score(groups_of(0), 0)
    made.store.save(tmp_path)
    with closing(sqlite3.connect(tmp_path / STORE_FILE)) as db:
        db.executescript("DROP TABLE reads; CREATE TABLE reads (query_id TEXT)")
    with pytest.raises(StoreError, match="'reads'"):
        BufferStore(tmp_path / STORE_FILE, read_only=True)


def test_score_stops_if_the_reader_fails_or_is_silent(scorer):
    silent = SilentJudge(left=-1)  # without a signal
    silent.silent = True
    fails = scripted_judge(unreachable), "failed 12 of 12"
    for reference_judge, message in (fails, (Judge(silent), "did not finish")):
        made = repaired(scorer, reference_judge, step_timeout=0.2)
        with pytest.raises(JudgeError, match=f"the reference judge .*{message}"):
            made.score(groups_of(0), 0)
        found = contents(made.store)
        assert not found["groups"] and len(found["calls"]) >= 8, "the calls alone are recorded"


def test_an_error_of_a_reader_is_no_group_of_errors(scorer):
    def full(tokens):
        raise StoreError("no room")

    reference_judge = Judge(scripted_judge(paying(0)).client, guard=False, on_spent=full)
    with pytest.raises(StoreError, match="no room"):
        repaired(scorer, reference_judge).score(groups_of(0), 0)


def test_the_reader_has_the_time_that_the_judge_left(scorer):
    made = repaired(scorer, reference_judge := scripted_judge(paying(0), method="reader"), step_timeout=60.0)
    now, clients = made._loop.time, (made.judge.client, reference_judge.client)
    made._loop.time = lambda: now() + 4.0 * sum(len(each.seen) for each in clients)  # 48 s for the judge
    with pytest.raises(JudgeError, match=r"the reference judge .*did not finish .* within judge_step_timeout=60 s"):
        made.score(groups_of(0), 0)


def test_settings_of_a_reader_are_checked_bound_and_kept_private(tmp_path):
    for reference_judge, message in (
        ({"judge_modle": "x"}, "no setting 'judge_modle'"),
        ({"judge_url": 3}, "reference_judge: judge_url"),
        ({"judge_completion_price": 3}, "prices and limit hold"),
        ({"judge_max_failures": 0.5}, "prices and limit hold"),
        ({"judge_concurrency": 3}, "the judge itself"),
    ):
        with pytest.raises(SettingsError, match=message):
            config(tmp_path, reference_judge=reference_judge)
    read = {"judge_samples": 3}
    told = json.dumps({"judge_headers": {"X": "secret"}} | read)
    args = config(tmp_path, reference_judge=told, reference_groups=200)
    assert args.make_reference_judge().max_attempts == 3 and config(tmp_path).make_reference_judge() is None
    assert b"secret" not in pickle.dumps(args) and pickle.loads(pickle.dumps(args)).reference_judge == read


def test_a_reader_that_comes_after_its_groups_is_one_warning(training, tmp_path, caplog):
    first = training(max_steps=1, save_strategy="steps", save_steps=1)
    first.train()
    first.close()
    more = dict(max_steps=2, reference_judge={"judge_samples": 3}, resume_with_changes=True)
    for number, warnings in ((1, 1), (100, 0)):
        again = training(reference_groups=number, **more)
        again.train(resume_from_checkpoint=str(tmp_path / "checkpoint-1"))
        again.close()
        assert caplog.text.count("had no reference judge") == warnings
        caplog.clear()


class Flattered(Embedded):
    """A judge that sees another rubric than the reference judge."""

    async def before(self, asked):
        another = partial(re.sub, r"\n1\.\[.*", "\n1.[weight=9] Names: water, oil, soap, cloth.")
        asked.messages[:] = [each | {"content": another(each["content"])} for each in asked.messages]


@dataclass
class Honest(RubricJudge):
    """The embedded judge, by a path."""


@pytest.mark.slow
def test_a_run_with_a_reader_that_is_resumed_ends_alike(tmp_path, tiny_policy, rows):
    whole, part = tmp_path / "whole", tmp_path / "part"
    more = {"reference_judge": {"judge_client": f"{__name__}.Honest"}, "reference_groups": 20}
    ended = train(whole, tiny_policy, rows, judge=Judge(Flattered()), **more)
    resumed = str(copy_checkpoints((whole, ()), part, 6))
    assert same(train(part, tiny_policy, rows, resume=resumed, judge=Judge(Flattered()), **more), ended)
    read = contents(whole / "_rankbuffer" / "live.sqlite", ["reads"])
    assert len(read["reads"]) > 50 and contents(part / "_rankbuffer" / "live.sqlite", ["reads"]) == read
    saved = json.loads((newest_checkpoint(part) / FOLDER / RUN).read_text())
    name = saved["reader"][0]
    assert saved["reader"][1:] == [20, None] and not differences(saved, saved), "as without reader_every before"
    for other in (None, [name, 20, 5], [name, 11, None]):
        (line,) = differences({**saved, "reader": other}, saved)
        assert "reader_every" in line
