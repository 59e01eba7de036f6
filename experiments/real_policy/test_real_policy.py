"""The run under a simulated judge: the room that the start leaves, the order of runs, a kill, and the kept numbers."""

import json
import os
import signal
import sys
from statistics import fmean, stdev

import pytest
import torch

from experiments import two_judges
from experiments.real_policy import real_judge, report, run
from rankbuffer_trl.data import load_queries
from rankbuffer_trl.judge import meets
from rankbuffer_trl.stems import content_stems, stem_all


@pytest.mark.parametrize("of", run.DATA)
def test_rubrics_leave_room_and_ask_for_words_that_the_prompt_lacks(of):
    queries, start = load_queries(str(run.DATA[of])), run.read(run.START)[of]
    for place, most in enumerate((65, 65, 65, 80)):  # sentences stand above the others, and weigh an eighth
        met = [
            [100 * meets(text, row["rubrics"][place]["text"]) for text in start[row["query_id"]]] for row in queries
        ]
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


def test_queue_has_the_rows_of_the_claims_first_and_the_sharp_judge_before_the_blunt_one():
    found = list(run.queue(range(3)))
    assert len(found) == len(set(found)) == 48
    assert found[:6] == [*((row, "sharp", 0) for row in run.CLAIMED), ("paper/grpo", "sharp", 1)]
    assert found[15] == ("paper/grpo", "blunt", 0) and found[30] == ("paper/gdpo", "sharp", 0)


def test_a_run_that_was_ended_continues_and_keeps_all_answers(tiny_policy, tmp_path, monkeypatch):
    monkeypatch.setattr(run, "RECORDS", tmp_path / "records")
    monkeypatch.setattr(run, "LENGTH", 4)
    monkeypatch.setattr(run, "SAME", run.SAME | {"max_completion_length": 4, "save_steps": 1})
    made = run.Run("paper/rankbuffer_static", "blunt", 0, tiny_policy, str(tmp_path), steps=2)
    with monkeypatch.context() as patched:
        patched.setattr(run.KeptApart, "on_step_end", lambda *args, **kwargs: os.kill(os.getpid(), signal.SIGTERM))
        with pytest.raises(run.InterruptedRun):
            made()
    steps, measure = [], run.KeptApart.on_step_end

    def on_step_end(self, args, state, control, **kwargs):
        steps.append(state.global_step)
        before = torch.get_rng_state()
        measure(self, args, state, control, **kwargs)
        assert torch.equal(before, torch.get_rng_state()), "measuring takes random numbers of the run"

    monkeypatch.setattr(run.KeptApart, "on_step_end", on_step_end)
    assert made() == "blunt-rankbuffer_static-0"
    assert steps == [2], "the first step was not made again"
    record = run.read(tmp_path / "records" / f"{made.name}.json.gz")
    assert [visit["step"] for visit in record["visits"]] == [0, 0, 1, 1] and not (tmp_path / made.name).exists()
    assert all(len(visit["answers"]) == len(visit["rewards"]) == run.G for visit in record["visits"])
    assert [step for step, calls, tokens in record["spent"] if calls and tokens] == [0, 1]
    assert [*record["kept_apart"]] == ["2"] and {len(each) for each in record["kept_apart"]["2"].values()} == {8}


def record(row: str, seed: int, answers: dict[str, str], tokens: int) -> dict:
    """Return the record of a run whose second epoch has these answers; the first one has those of the start."""
    start = run.read(run.START)
    first = {id: texts[0] for id, texts in start["trained"].items()}
    visits = [
        {"query_id": id, "step": 10 * epoch + i // 2, "rewards": [0.0], "answers": [texts[id]]}
        for epoch, texts in enumerate((first, answers))
        for i, id in enumerate(first)
    ]
    spent = [[step, 1, tokens + seed] for step in range(20)]
    kept = {"20": start["kept_apart"], "40": start["kept_apart"]}
    return {"row": row, "judge": "sharp", "seed": seed, "visits": visits, "spent": spent, "kept_apart": kept}


def test_report_tells_the_better_row_and_what_it_cost(tmp_path, monkeypatch, capsys):
    queries = load_queries(str(run.DATA["trained"]))
    best, worst = ({row["query_id"]: row["responses"][i] for row in queries} for i in (-1, 0))
    for seed in range(3):
        odd = best | ({"sky-blue": worst["sky-blue"]} if seed else {})  # else the seeds would not differ
        for row, answers, tokens in (("grpo", worst, 1000), ("rankbuffer", odd, 2000), ("rrc_scr", best, 3000)):
            run.write(tmp_path / f"{row}-{seed}.json.gz", record(row, seed, answers, tokens))
    monkeypatch.setattr(sys, "argv", ["report", "--records", str(tmp_path), "--figure", str(tmp_path / "a.png")])
    report.main()
    *printed, line = capsys.readouterr().out.splitlines()
    found = json.loads(line)
    assert found["claims"] == {
        "RankBuffer is above GRPO (sharp)": "holds",
        "RankBuffer is near RRC-SCR (sharp)": "holds",
    }
    cells = [[cell.strip() for cell in row.split("│")[1:-1]] for row in printed if row.startswith("│")]
    rows = {row[1]: row for row in cells}
    assert rows["grpo"][2] == "3" and rows["grpo"][-2:] == ["0.02", "10k"], "its own end is below its first epoch"
    assert rows["rankbuffer"][-2:] == ["0.04", "20k"] and rows["rrc_scr"][4] == "85.0 ± 0.0"
    assert (tmp_path / "a.png").read_bytes()[:4] == b"\x89PNG"


def test_sign_changes_counts_the_signs_that_give_as_large_a_mean():
    assert report.sign_changes([1.0] * 8) == 2 / 256 and report.sign_changes([3.0, -1.0]) == 1.0
    assert report.sign_changes([5.0, 4.0, -1.0]) == 4 / 8  # + + +, + + - and their opposites


def test_claims_compare_the_seeds_that_both_rows_have():
    end = {
        ("grpo", 0): 50.0,
        ("grpo", 1): 52.0,
        ("rankbuffer", 1): 60.0,
        ("rankbuffer", 2): 90.0,
        ("rrc_scr", 1): 70.0,
    }
    runs: dict = {}
    for (row, seed), quality in end.items():
        each = report.Outcome(row, "blunt", seed, [41.0, quality], [40.0], [1.0, 2.0, 3.0], 0.5, 20.0, 8, [5, 10])
        runs.setdefault(("blunt", row), []).append(each)
    found = report.claims(runs, 40.0)
    assert {claim: each.values for (_, claim), each in found.items()} == {
        "RankBuffer is above GRPO": [8.0],
        "RankBuffer is near RRC-SCR": [pytest.approx(20 - 0.8 * 30)],
    }


def test_the_real_judge_reads_the_first_answers_by_rubrics_that_ask_for_no_word():
    asked, (id, texts) = real_judge.questions(run.RECORDS), next(iter(run.read(run.START)["kept_apart"].items()))
    assert len(asked) == (1 + len(list(run.RECORDS.iterdir()))) * 20
    question = asked["start", id]
    assert question.soft and texts[0] in question.prompt(False)
    assert "Says what matters" not in question.prompt(False)
    made = [report.Outcome("grpo", "sharp", seed, [50.0], [40.0], [1.0], 0.5, 20.0, 8, [5]) for seed in range(3)]
    told = {"start": {"a": 3.0, "b": 1.0}, "sharp-grpo-0": {"a": 4.0, "b": 1.0}, "sharp-grpo-1": {"a": 6.0, "b": 1.0}}
    assert report.risen(made, told).startswith("1.00 ± ") and report.risen(made[2:], told) == ""


def test_what_was_kept_is_whole():
    for path in run.RECORDS.glob("*.json.gz"):
        found = run.read(path)
        assert path.name == f"{found['judge']}-{found['row']}-{found['seed']}.json.gz"
        assert [visit["step"] for visit in found["visits"]] == [step for step in range(40) for _ in range(2)]
        assert all(len(visit["answers"]) == len(visit["rewards"]) == run.G for visit in found["visits"])
        assert [step for step, *_ in found["spent"]] == list(range(40)) and [*found["kept_apart"]] == ["20", "40"]


def test_the_page_has_the_numbers_of_the_records():
    page, measure = (run.HERE / "README.md").read_text(), report.Measure()
    found = report.outcomes(run.RECORDS, measure)
    for (judge, row), runs in found.items():
        ends, epochs = [each.epochs[-1] for each in runs], report.by_epoch(runs, "epochs")
        cells = (
            " ".join(f"{end:.1f}" for end in ends),
            f"{fmean(ends):.1f}",
            " ".join(f"{each:.0f}" for each in epochs),
            f"{fmean(each.agreement for each in runs):.2f}",
        )
        assert f"| {report.ROWS[row]} | {' | '.join(cells)} |" in page
        assert f"| {report.until_grpo(runs, found[judge, 'grpo'])} |\n" in page
    before = measure.quality(run.read(run.START)["trained"])
    for (judge, claim), each in report.claims(found, before).items():
        assert f"{fmean(each.values):.1f} ± " in page
        claimed = f"**{judge.capitalize()}: {claim} by" in page
        assert (each.verdict == "holds") == claimed and each.verdict != "does not hold", (judge, claim)
    told = run.read(real_judge.SCORES)
    assert f"{fmean(told['start'].values()):.2f} of 9" in page
    for runs in found.values():
        assert report.risen(runs, told) in page


def test_the_figure_of_the_front_page_has_both_halves(tmp_path):
    two_judges.main(tmp_path / "a.png")
    assert (tmp_path / "a.png").read_bytes()[:4] == b"\x89PNG" and two_judges.PICTURE.is_file()
