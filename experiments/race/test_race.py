"""The race's numbers against the record, and against a slow count."""

import json

import pytest

from experiments.race.report import FOUND, GOALS, HERE, RECORD, merged, race, tokens_to

RUNS = json.loads(RECORD.read_text())


def test_tokens_are_those_until_all_queries_have_the_goal_in_the_mean():
    quality, tokens = [0.0] * 6 + [60.0] * 3 + [120.0] * 9, range(1, 19)
    assert tokens_to(10, quality, tokens) == sum(range(1, 8)), "one of six steps is at 60"
    assert tokens_to(60, quality, tokens) == sum(range(1, 13)) - 12, "three at 60 and two at 120"
    assert tokens_to(120, quality, tokens) == sum(range(1, 16)) and tokens_to(121, quality, tokens) is None


def test_the_stored_table_and_page_are_those_of_the_record():
    found = race(RUNS, GOALS[1])
    assert json.loads(FOUND.read_text()) == found and list(found)[-1] == "paper/grpo"
    page = (HERE / "README.md").read_text()
    for recipe, tokens in found.items():
        assert f"| `{recipe}` | 2 | " in page and (f" | {tokens:,} |" if tokens else "not in 36 steps |\n") in page
    ratios = [found["paper/rankbuffer"] / found[f"paper/{row}"] for row in ("tournament_grpo", "rrc_scr")]
    assert ratios == pytest.approx([0.88, 0.59], abs=0.006)
    never = {"a": {"0": {"quality": [90] * 6, "tokens": [1] * 6}, "1": {"quality": [80] * 6, "tokens": [1] * 6}}}
    assert race(never, 85) == {"a": None} and race(never, 80) == {"a": 6}, "each seed must reach it"


def test_merged_adds_runs_to_those_of_the_record():
    assert merged(RUNS, []) == RUNS and {len(run["quality"]) for seeds in RUNS.values() for run in seeds.values()} == {
        36
    }
