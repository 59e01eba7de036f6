"""Bad input of an evaluation: a clear error before money is spent, or a counted drop."""

import json
import os
import shutil
from pathlib import Path

import pytest
import yaml
from helpers.evaluation_assets import ROWS, Loopback, write_outputs
from helpers.servers import served

from evaluation.assets import AssetError
from evaluation.benchmark import OutputError
from evaluation.config import EvaluationConfig
from evaluation.engines import EngineError
from evaluation.generate import label_path
from evaluation.run import evaluate
from rankbuffer_trl.errors import SettingsError
from rankbuffer_trl.judge import JudgeError

NOWHERE = "http://127.0.0.1:9"


def test_evaluate_refuses_what_is_wrong_before_it_asks_anything(settings, tiny_policy, tmp_path):
    server = Loopback()
    with served(server.app) as url:
        config = settings(url)
        two = dict(models=[f"mine={tiny_policy}", f"other={tmp_path}"], engine_url=None, engine="transformers")
        for changes, error, fault in (
            (dict(judge_url=[f"{NOWHERE}/v1"]), JudgeError, "cannot be reached"),
            (dict(judge_model="jugde"), JudgeError, "does not serve judge_model='jugde'; it serves 'judge'"),
            (dict(judge_url=None, judge_model=None), JudgeError, "judge_url is not set"),
            (two, EngineError, "no tokenizer for"),
        ):
            with pytest.raises(error, match=fault):
                evaluate(settings(url, benchmarks=["writingbench"], limit=1, **changes))
        evaluate(settings(url, benchmarks=["writingbench"], limit=1))  # a typo takes neither folder nor label
        asked = server.asked.total()
        write_outputs(settings(url, output_dir=config.output_dir + "2"), "alpaca_eval", **{"3": "<think>hm</think> x"})
        with pytest.raises(OutputError, match="hold <think> blocks"):
            evaluate(settings(url, output_dir=config.output_dir + "2", benchmarks=["alpaca_eval"]))
    assert server.asked.total() == asked == 1 + 5 and not list(tmp_path.rglob("other/responses.jsonl"))


def test_evaluate_refuses_too_small_a_context_before_anything_is_judged(settings):
    server = Loopback(context=40)
    small = pytest.raises(JudgeError, match=r"a context of 40 tokens is too small.*--max-model-len")
    with served(server.app) as url, small:
        evaluate(settings(url, benchmarks=["arena_hard"], max_new_tokens=1))
    assert server.asked["judge"] == 0


def test_evaluate_drops_and_counts_failures_and_unknown_verdicts_of_arena_hard(settings):
    said = {"Question 1 ": "I cannot say", "Question 2 ": "[[A>>>B]]", "Question 3 ": 400}

    def answer(body, text):
        prompt = body["messages"][-1]["content"]
        return next((said[key] for key in said if key in prompt), text) if body["model"] == "judge" else text

    server = Loopback(answer)
    with served(server.app) as url:
        config = settings(url, benchmarks=["arena_hard"])
        report = evaluate(config)
    counts = report.results["mine"]["arena_hard"].scores.counts
    assert counts == {
        "questions": ROWS,
        "judgments that failed": 2,
        "judgments without a verdict": 2,
        "judgments with an unknown label": 2,
        "questions dropped": 3,
    }
    causes = json.loads((config.folder("mine", "arena_hard") / "failures.json").read_text())
    assert causes.keys() == {"q3/0", "q3/1"} and "HTTP 400" in causes["q3/0"]
    assert server.asked["judge"] == 2 * ROWS, "null is an answer, as officially"


def test_evaluate_refuses_other_assets_all_at_once(values, assets, tmp_path):
    manifest = yaml.safe_load(Path(assets["assets_manifest"]).read_text())
    manifest["arena_hard"]["questions"]["sha256"] = "0" * 64
    manifest["alpaca_eval"]["gamed"]["path"] = ["nowhere/df_gamed.csv"]
    path = tmp_path / "assets.yaml"
    path.write_text(yaml.safe_dump(manifest))
    with pytest.raises(AssetError) as caught:
        evaluate(EvaluationConfig(**values(NOWHERE, assets_manifest=str(path))))
    text = str(caught.value)
    assert "nowhere/df_gamed.csv. Get it with: hf download tatsu-lab/alpaca_eval" in text
    assert "question.jsonl is not the official file 'questions': its sha256 is" in text and "git clone" in text


def test_evaluation_config_refuses_what_cannot_be_meant(values):
    for changes, fault in (
        (dict(models=[]), "models is not set"),
        (dict(models=["a/x", "b/x"], engine_url=None), "has a label twice"),
        (dict(models=["a b=x"]), "may hold letters"),
        (dict(models=["..=x"]), "may hold letters"),
        (dict(benchmarks=["mt_bench"]), "benchmarks: there is no 'mt_bench'.*name some of"),
        (dict(limit=0), "limit must be at least 1"),
        (dict(engine="sglang"), "engine must be one of"),
        (dict(top_p=0.0), "top_p must be above 0"),
        (dict(models=["a", "b"]), "engine_url serves one model"),
        (dict(engine="transformers"), "engine_url names a vLLM server"),
        (dict(compare_with="other"), "compare_with must be the label"),
        (dict(chat_template_kwargs="{"), "chat_template_kwargs is not JSON"),
        (dict(paper_rows=["GRPO++"]), "paper_rows must be among Base"),
    ):
        with pytest.raises(ValueError, match=fault):
            evaluate(EvaluationConfig(**values(NOWHERE, **changes)))


def test_check_label_keeps_a_label_with_its_model(settings, tmp_path):
    with served(Loopback().app) as url:
        checkpoint = tmp_path / "checkpoint"
        shutil.copytree(settings(url).labelled_models()["mine"], checkpoint)
        config = settings(url, models=[f"mine={checkpoint}"], benchmarks=["writingbench"])
        evaluate(config)
        (weights,) = checkpoint.glob("*.safetensors")
        content, now = weights.read_bytes(), weights.stat().st_mtime_ns
        for change in (lambda: os.utime(weights, (1, 1)), lambda: weights.write_bytes(content[:-4] + b"\0\0\0\1")):
            change()
            if weights.read_bytes() != content:
                os.utime(weights, ns=(now, now))
            with pytest.raises(OutputError, match="the model 'mine' has other weights now"):
                evaluate(config)
        weights.write_bytes(content)
        os.utime(weights, ns=(now, now))
        (checkpoint / "optimizer.pt").write_bytes(b"no weights")
        evaluate(config)
        (checkpoint / "model.pt").write_bytes(b"weights")
        with pytest.raises(OutputError, match="the model 'mine' has other weights now"):
            evaluate(config)
        (checkpoint / "model.pt").unlink()
        record = label_path(config, "mine")
        known = record.read_text()
        for other in ("[]", "{}", '"mine"', '{"model": 3}'):
            record.write_text(other)
            with pytest.raises(OutputError, match=r"model\.json does not say which model .*delete it"):
                evaluate(config)
        record.write_text(known)
        with pytest.raises(OutputError, match="the model 'mine' is now 'other'"):
            evaluate(settings(url, models=["mine=other"], benchmarks=["writingbench"]))


def test_claim_folder_refuses_every_setting_that_changes_outputs_or_verdicts(settings):
    others = dict(limit=1, temperature=0.1, top_p=0.5, top_k=1, max_new_tokens=5, seed=1, wildbench_reward=True)
    others |= dict(chat_template_kwargs={"x": 1}, judge_model="other", judge_request={"temperature": 1.0})
    settings(NOWHERE).claim_folder()
    for key, value in others.items():
        with pytest.raises(SettingsError, match=rf"results of other settings \({key}: .*Choose another output_dir"):
            settings(NOWHERE, **{key: value}).claim_folder()
