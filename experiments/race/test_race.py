"""The race's numbers against the record, and against a slow count."""

import json
from dataclasses import asdict
from statistics import fmean

import pytest

from experiments.pages import tables_of
from experiments.race.report import FOUND, GOALS, HERE, JUDGES, RECORD, main, merged, race, tokens_to, with_recipe
from experiments.toy_policy.report import Result

RUNS = json.loads(RECORD.read_text())


def test_tokens_are_those_until_all_queries_have_the_goal_in_the_mean():
    quality, tokens = [0.0] * 6 + [60.0] * 3 + [120.0] * 9, range(1, 19)
    assert tokens_to(10, quality, tokens) == sum(range(1, 8)), "one of six steps is at 60"
    assert tokens_to(60, quality, tokens) == sum(range(1, 13)) - 12, "three at 60 and two at 120"
    assert tokens_to(120, quality, tokens) == sum(range(1, 16)) and tokens_to(121, quality, tokens) is None


@pytest.mark.parametrize("judge", JUDGES)
def test_the_page_has_the_table_of_the_record(judge):
    record, goals = JUDGES[judge]
    runs, page = with_recipe(json.loads(record.read_text())), (HERE / "README.md").read_text()
    easier, harder = (race(runs, goal) for goal in goals)
    for recipe, seeds in runs.items():
        tokens = [f"{each:,}" if each else "not in 36 steps" for each in (easier[recipe], harder[recipe])]
        assert f"| `{recipe}` | {len(seeds)} | {tokens[0]} | {tokens[1]} |\n" in page
    ratios = [harder["paper/rankbuffer"] / harder[f"paper/{row}"] for row in ("tournament_grpo", "rrc_scr")]
    assert all(f"{each:.2f}" in page for each in ratios)


def test_the_stored_tokens_are_those_of_the_record():
    found = race(with_recipe(RUNS), GOALS[1])
    assert "beyond/brpo" in RUNS and "beyond/brpo" not in found, "the record keeps a row whose recipe has left"
    assert json.loads(FOUND.read_text()) == found and list(found)[-1] == "paper/grpo"
    never = {"a": {"0": {"quality": [90] * 6, "tokens": [1] * 6}, "1": {"quality": [80] * 6, "tokens": [1] * 6}}}
    assert race(never, 85) == {"a": None} and race(never, 80) == {"a": 6}, "each seed must reach it"


def test_merged_adds_runs_to_those_of_the_record():
    assert merged(RUNS, []) == RUNS and {len(run["quality"]) for seeds in RUNS.values() for run in seeds.values()} == {
        36
    }


def test_runs_of_a_recipe_of_ones_own_stand_in_the_table_and_change_no_record(tmp_path, monkeypatch, capsys):
    result = Result("mine.yaml", 0, 90.0, 1, 1, 0, None, [90.0] * 6, [], [], 1.0, 1.0, tokens_by_step=[1] * 6)
    (tmp_path / "results.jsonl").write_text(json.dumps(asdict(result)) + "\n")
    before = RECORD.read_bytes(), FOUND.read_bytes()
    monkeypatch.setattr("sys.argv", ["report.py", str(tmp_path / "results.jsonl")])
    main()
    assert "| `mine.yaml` | 1 | 6 | 6 |" in capsys.readouterr().out
    assert (RECORD.read_bytes(), FOUND.read_bytes()) == before


def test_the_tables_of_the_toy_policy_are_near_the_runs_of_the_record():
    page, near = HERE.parent / "toy_policy" / "README.md", {}
    for head, *rows in tables_of(page):
        if "judge tokens" in head or head[:5] == (
            "method",
            "quality, error 0.3",
            "quality, error 0.09",
            "calls",
            "tokens",
        ):
            place = head.index("true quality" if "true quality" in head else "quality, error 0.09")
            tokens = head.index("judge tokens" if "judge tokens" in head else "tokens")
            near |= {(row[0], row[place]): row[tokens] for row in rows}
    assert len(near) == 23 + 6 + 1, "all rows of three tables"
    for (method, quality), tokens in near.items():
        (found,) = (
            list(RUNS[f"{kind}/{method}"].values()) for kind in ("paper", "beyond") if f"{kind}/{method}" in RUNS
        )
        assert fmean(sum(run["tokens"]) for run in found) == pytest.approx(float(tokens.replace(",", "")), rel=0.01)
        last = fmean(fmean(run["quality"][-6:]) for run in found)
        assert abs(last - float(quality.split()[0])) < 3, f"{method}: the rollouts of the last epoch have {last}"
