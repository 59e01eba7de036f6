"""Our arithmetic gives the official numbers, on official data and against the official scripts."""

import json
import random
import re

import pytest
from helpers.evaluation_assets import Loopback
from helpers.servers import served

from evaluation.arena_hard.style_control import NOTHING, style_control
from evaluation.assets import AssetError
from evaluation.files import read_jsonl, write_jsonl
from evaluation.official import ScriptError
from evaluation.run import evaluate

from .against_alpaca_eval import alpaca_eval_checks
from .against_arena_hard import arena_hard_checks
from .against_wildbench import wildbench_checks
from .against_writingbench import writingbench_checks

FEWEST = {alpaca_eval_checks: 23, arena_hard_checks: 5, wildbench_checks: 8, writingbench_checks: 4}


@pytest.mark.parametrize("checks", FEWEST, ids=lambda checks: checks.__name__)
def test_numbers_agree_with_the_official_ones(official, checks):
    found, missing = [], ""
    try:
        for check in checks(official):
            found.append(check)
            print(f"{check.name}: ours {check.ours:.10g}, official {check.official:.10g}")
    except ScriptError:
        raise
    except AssetError as error:
        missing = str(error)
    assert [check for check in found if not check.agrees] == []
    if len(found) < FEWEST[checks]:
        pytest.skip(f"{len(found)} numbers agree; NOT RUN: {missing}")


WORDS = """
class Words:
    def encode(self, text, **options):
        return text.split()
def encoding_for_model(name):
    return Words()
"""


def test_the_official_style_control_runs_on_our_files(official, tmp_path):
    rng = random.Random(0)
    questions = [
        row for row in read_jsonl(official.path("arena_hard", "questions")) if row["category"] == "hard_prompt"
    ]
    answers = [
        {"uid": q["uid"], "model": "mine", "messages": [{"content": {"answer": "# 1\n" * rng.randint(0, 3) + "a b"}}]}
        for q in questions
    ]
    games = [
        {
            "uid": q["uid"],
            "games": [{"score": rng.choice(("A>B", "B>A", None))}, {"score": rng.choice(("A>B", "B>>A"))}],
            **{"category": "hard_prompt", "judge": "j", "model": "mine", "baseline": "o3-mini-2025-01-31"},
        }
        for q in questions
    ]
    write_jsonl(tmp_path / "model_answer" / "mine.jsonl", answers)
    write_jsonl(tmp_path / "model_judgment" / "j" / "mine.jsonl", games)
    printed = style_control(official, tmp_path, "mine", stubs=NOTHING | {"tiktoken": WORDS})
    assert re.search(r"mine +\d+\.\d +\(", printed) and "Feature Coefs" in printed


def test_official_judgments_replayed_give_the_official_preferences(official, settings, monkeypatch):
    path = "alpaca_eval/results/alpaca-7b/weighted_alpaca_eval_gpt4_turbo/annotations.json"
    rows = json.loads((official.folder / path).read_text())[:40]
    spoken = {row["instruction"].strip(): (row.get("raw_completion") or {}).get("logprobs") for row in rows}

    def replay(messages):
        return spoken[
            re.search(r'"instruction": """(.*?)""",\n}', messages[-1]["content"], re.DOTALL).group(1).strip()
        ]

    monkeypatch.setattr("helpers.evaluation_assets.logprobs", replay)
    with served(Loopback().app) as url:
        config = settings(
            url, benchmarks=["alpaca_eval"], limit=40, assets_dir=str(official.folder), assets_manifest=None
        )
        place = config.folder("mine", "alpaca_eval")
        place.mkdir(parents=True)
        outputs = [{"instruction": row["instruction"], "output": row["output_2"]} for row in rows]
        (place / "model_outputs.json").write_text(json.dumps(outputs))
        evaluate(config)
    found = json.loads((place / "annotations.json").read_text())
    assert [row["preference"] for row in found] == pytest.approx([row["preference"] for row in rows], abs=1e-8)
