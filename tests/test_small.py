"""The recipe for a real policy and a real judge: its settings, its notebook, and the comparison before and after."""

import json
import re
import shutil
from math import exp

import pytest
import yaml
from conftest import ROOT, run_program
from helpers.nectar_rows import Model
from helpers.servers import served
from transformers import AutoTokenizer, GenerationConfig

from rankbuffer_tools.batch.engines import EngineError
from rankbuffer_tools.rubric_server import make_app
from rankbuffer_trl.errors import SettingsError
from rankbuffer_trl.judge import JudgeError
from rankbuffer_trl.judge.probabilities import Reading
from recipes.small import compare


def config(tiny_policy, data_file, tmp_path, **changes) -> compare.CompareConfig:
    values = dict(dataset_name=str(data_file), output_dir=str(tmp_path), limit=3, samples=2, show=1, max_new_tokens=6)
    values |= dict(models=[f"before={tiny_policy}", f"after={tiny_policy}"], engine="transformers", top_k=0)
    return compare.CompareConfig(**(values | changes))


@pytest.mark.parametrize("name", ["small", "embedded"])
def test_compare_samples_as_the_recipe_trains(name):
    trained, compared = (
        yaml.safe_load((ROOT / path).read_text()) for path in (f"recipes/small/{name}.yaml", f"evaluation/{name}.yaml")
    )
    same = {"temperature": "temperature", "top_p": "top_p", "max_new_tokens": "max_completion_length"}
    assert {name: compared[name] for name in same} == {name: trained[other] for name, other in same.items()}
    assert compared["top_k"] == trained.get("top_k", 0), "TRL takes 0 if a recipe names none"
    for key in ("judge_model", "judge_url", "judge_decoding", "judge_concurrency"):
        assert compared.get(key) == trained.get(key)
    assert bool(trained.get("judge_url")) == (name == "small"), "without an address, the embedded judge is asked"


def test_main_shows_asks_in_both_orders_and_continues(tiny_policy, data_file, tmp_path, capsys):
    judge = Model(lambda messages, how_often: '{"winner": "A"}')
    with served(judge.app()) as url:
        settings = config(tiny_policy, data_file, tmp_path, judge_url=f"{url}/v1", judge_model="writer")
        for _ in range(2):
            assert compare.main(settings) == 0
            shown = capsys.readouterr().out
            assert (
                shown.count("\n== ") == 1 and "by the verdicts, after wins 50 %" in shown and "log odds" not in shown
            )
            assert "judge: 13 requests" in shown, "the one for probabilities was paid for, too"
        # In each run, one question is asked for probabilities. The 12 duels are asked once.
        assert len(judge.bodies) == 2 + 12 and sum("logprobs" in body for body in judge.bodies) == 2
        bare = config(tiny_policy, data_file, tmp_path, judge_url=f"{url}/v1", judge_model="writer", no_rubrics=True)
        before = len(judge.bodies)
        assert compare.main(bare) == 0
        prompts = [body["messages"][0]["content"] for body in judge.bodies]
    assert all("RUBRICS" in prompt and "weighted" in prompt for prompt in prompts[:before])
    assert not any("rubrics" in prompt.lower().replace("a rubric", "") for prompt in prompts[before + 1 :])
    found = json.loads((tmp_path / "with_rubrics.json").read_text())
    assert found["pairs"] == 6 and found["first_shown_wins"] == 1 and found["mean_log_odds"] is None
    assert found["measures"]["before"] == found["measures"]["after"]
    assert compare.score(found["verdicts"])["pairs"] == 6 and set(found["verdicts"].values()) == {"A"}
    assert compare.measure(found["answers"]["after"], 6) == found["measures"]["after"], "answers and lengths are kept"
    assert compare.main(config(tiny_policy, data_file, tmp_path)) == 0
    assert "by the log odds, after wins 50 %" in capsys.readouterr().out, "the embedded judge gives probabilities"


def test_config_refuses_what_cannot_be_compared(tiny_policy, data_file, tmp_path):
    for wrong in ({"models": [tiny_policy]}, {"dataset_name": ""}, {"no_rubrics": True}, {"samples": 0}):
        with pytest.raises(SettingsError):
            config(tiny_policy, data_file, tmp_path, **wrong)


def test_main_keeps_no_label_for_a_model_that_is_not_there(data_file, tmp_path):
    with pytest.raises(EngineError, match="there is no folder"):
        compare.main(config(tmp_path / "none", data_file, tmp_path))
    assert not list(tmp_path.rglob("model.json")), "the right path may have the same label"


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
    with pytest.raises(JudgeError, match="no duel has a verdict"):
        compare.score({})
    found = compare.score(verdicts)
    assert found["pairs"] == 3 and found["first_shown_wins"] == 4 / 7
    words, odds = found["wins"]["verdicts"], found["wins"]["log odds"]
    assert (words.queries, words.probability) == (2, (0.75 + 0) / 2)
    assert (odds.queries, odds.probability) == (2, (1 + 0) / 2)
    assert found["mean_log_odds"] == pytest.approx((1.75 - 2) / 2)


def test_measure_counts_tokens_ends_and_repeated_words():
    samples = {"x": [("a b c d a b c d", 8), ("one, two: three four five", 5)], "y": [("", 1), ("short", 8)]}
    expected = {"tokens": 5.5, "ended": 0.5, "repeated_4_grams": 0.2 / 4}
    assert compare.measure(samples, limit=8) == pytest.approx(expected)


@pytest.mark.slow
def test_the_notebook_runs_from_its_first_cell_to_its_last(tiny_policy, tmp_path, monkeypatch):
    path, key = ROOT / "examples" / "small_model.ipynb", "sk-not-to-be-seen"
    cells = json.loads(path.read_text())["cells"]
    assert not any(cell.get("outputs") or cell.get("execution_count") for cell in cells), "what a run printed is kept"
    policy, out = shutil.copytree(tiny_policy, tmp_path / "policy"), tmp_path / "out"
    nul = AutoTokenizer.from_pretrained(policy).convert_tokens_to_ids("\u0100")  # an audit refuses it
    GenerationConfig(suppress_tokens=[nul]).save_pretrained(policy)
    values = dict(POLICY=policy, JUDGE_MODEL="rubric-judge", PROMPTS=2, STEPS=1, OUT=out, OPENAI_API_KEY=key)
    with served(make_app()) as url:
        for name, value in (values | {"JUDGE_URL": f"{url}/v1"}).items():
            monkeypatch.setenv(name, str(value))
        monkeypatch.chdir(ROOT)
        said = run_program(ROOT / "tests" / "helpers" / "notebook.py", path, timeout=500)
    assert len(re.findall("^== ", said, re.MULTILINE)) == 2 + 2, "prompts before training, and prompts kept apart"
    for line in ("its answer:", f"policy: {out}/run, after step 1", "by the log odds, after wins"):
        assert line in said
    assert key not in said
    for name in ("audit/audit.json", "run/model.safetensors", "compared/with_rubrics.json", "report/index.html"):
        assert (out / name).is_file(), name
