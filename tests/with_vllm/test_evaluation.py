"""The four benchmarks with a real server as model and as judge.

No request may have a temperature above 0 and a seed, which ends vLLM's CPU engine: no seed is sent here.
"""

import json
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1]))

from helpers.evaluation_assets import build

from evaluation.config import EvaluationConfig
from evaluation.metric import weighted_mean
from evaluation.run import evaluate
from rankbuffer_trl.judge import JudgeError

VERDICTS = {
    "alpaca_eval": {"structured_outputs": {"choice": ["m", "M"]}},
    "arena_hard": {"structured_outputs": {"regex": r"\[\[A(>|>>|=)B\]\]"}, "max_tokens": 32},
    "wildbench": {"structured_outputs": {"regex": r'\{"score": "[1-9]"\}'}, "response_format": None, "max_tokens": 32},
    "writingbench": {
        "structured_outputs": {"regex": r'\{"score": [1-9], "reason": "[a-z]{1,5}"\}'},
        "seed": None,
        "max_tokens": 32,
    },
}


@pytest.fixture
def settings(server, tiny_policy, tmp_path):
    def make(name: str, **changes) -> EvaluationConfig:
        values = dict(
            models=[f"mine={tiny_policy}"],
            benchmarks=[name],
            assets_dir=str(tmp_path / "assets"),
            assets_manifest=str(build(tmp_path / "assets")),
            output_dir=str(tmp_path / "out"),
            engine_url=server.url,
            engine_model=server.model,
            temperature=1.0,
            seed=None,
            max_new_tokens=16,
            limit=3,
            judge_url=[server.url],
            judge_model=server.model,
        )
        return EvaluationConfig(**(values | changes))

    return make


@pytest.mark.parametrize("name", VERDICTS)
def test_a_benchmark_runs_to_its_end(settings, random_judge, name):
    before = random_judge.counters()
    report = evaluate(settings(name, judge_request=VERDICTS[name]))
    result = report.results["mine"][name]
    added = random_judge.since(before)
    scores = result.scores
    assert 0 <= weighted_mean(scores.rows[scores.headline]) <= 100 or name == "wildbench"
    dropped = {what: count for what, count in scores.counts.items() if count and ("drop" in what or "NaN" in what)}
    assert dropped == {}
    out = Path(settings(name).output_dir)
    generated = json.loads((out / "mine" / name / "generation.json").read_text())
    rehearsed = len((out / "_rehearsal" / name / "judge.jsonl").read_text().splitlines())
    assert added.stopped + added.cut_off == rehearsed + generated["responses"] + result.cost.calls
    assert result.cost.prompt_tokens > 0


def test_a_judge_that_says_neither_m_nor_M_is_refused(settings, random_judge):
    with pytest.raises(JudgeError, match="first token should be m or M"):
        evaluate(settings("alpaca_eval", judge_request={"structured_outputs": {"choice": ["no"]}}))
