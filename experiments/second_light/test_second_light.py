"""The second light: the room that the start leaves, the order of the runs, a run that continues, and the kept numbers."""

import os
import signal
from statistics import fmean, stdev

import pytest

from experiments.second_light import run
from rankbuffer_trl.data.queries import load_queries
from rankbuffer_trl.judge.rubric_judge import content_stems, meets, stem_all


@pytest.mark.parametrize("of", run.DATA)
def test_rubrics_leave_room_and_ask_for_words_that_the_prompt_lacks(of):
    queries, start = load_queries(str(run.DATA[of])), run.read(run.START)[of]
    for place, most in enumerate((65, 65, 65, 80)):  # sentences stand above the others, and weigh an eighth
        met = [[100 * meets(text, row["rubrics"][place]["text"]) for text in start[row["query_id"]]] for row in queries]
        assert 25 <= round(fmean(map(fmean, met)), 1) <= most
        assert fmean(stdev(values) ** 2 for values in met) ** 0.5 >= (10 if place == 2 else 20)
    mean, deviation = run.scale(start, queries)
    assert 0.25 < mean < 0.65 and deviation > 0.12
    for row in queries:
        asked = set(stem_all(row["prompt"][-1]["content"]))
        named = [rubric["text"].partition(":")[2] for rubric in row["rubrics"][:2]] + [row["unpaid"].partition(":")[2]]
        stems = [set(content_stems(each.replace(" or ", " "))) for each in named]
        assert not asked & set.union(*stems), row["query_id"]
        assert sum(map(len, stems)) == len(set.union(*stems)), "no word is both paid for and not"
        assert sum(rubric["weight"] for rubric in row["rubrics"][:2]) == 6 and len(row["rubrics"]) == 4


def test_queue_has_seeds_outermost_and_the_rows_of_the_claims_first():
    found = list(run.queue(range(3)))
    assert len(found) == len(set(found)) == 48
    assert found[:11] == [
        *((row, "sharp", 0) for row in run.CLAIMED),
        *((row, "blunt", 0) for row in run.CLAIMED),
        ("paper/gdpo", "sharp", 0),
    ]


def test_a_run_that_was_ended_continues_and_keeps_all_answers(tiny_policy, tmp_path, monkeypatch):
    monkeypatch.setattr(run, "RECORDS", tmp_path / "records")
    monkeypatch.setattr(run, "LENGTH", 4)
    monkeypatch.setattr(run, "SAME", run.SAME | {"max_completion_length": 4, "save_steps": 1})
    made = run.Run("paper/rankbuffer_static", "blunt", 0, tiny_policy, str(tmp_path), steps=2)
    with monkeypatch.context() as patched:
        patched.setattr(run.KeptApart, "on_step_end", lambda *args, **kwargs: os.kill(os.getpid(), signal.SIGTERM))
        with pytest.raises(run.InterruptedRun):
            made()
    assert (tmp_path / made.name / "checkpoint-1").is_dir()
    assert made() == "blunt-rankbuffer_static-0"
    record = run.read(tmp_path / "records" / f"{made.name}.json.gz")
    assert [visit["step"] for visit in record["visits"]] == [0, 0, 1, 1] and not (tmp_path / made.name).exists()
    assert all(len(visit["answers"]) == len(visit["rewards"]) == run.G for visit in record["visits"])
    assert [step for step, calls, tokens in record["spent"] if calls and tokens] == [0, 1]
    assert [*record["kept_apart"]] == ["2"] and {len(each) for each in record["kept_apart"]["2"].values()} == {8}
