"""Bad input of an evaluation: a clear error before money is spent, or a counted drop."""

import json
import os
import shutil
from pathlib import Path

import pytest
import yaml
from helpers.evaluation_assets import ROWS, Loopback, folder, rows_of, write_outputs
from helpers.http_server import served

from evaluation.assets import AssetError
from evaluation.benchmark import OutputError
from evaluation.config import EvaluationConfig
from evaluation.engines import EngineError
from evaluation.generate import label_path
from evaluation.run import evaluate
from rankbuffer_trl.errors import RankBufferError, SettingsError
from rankbuffer_trl.judge import JudgeError


@pytest.mark.parametrize("name", ["alpaca_eval", "arena_hard"])
def test_too_small_a_context_is_refused_before_anything_is_judged(settings, name):
    server = Loopback(context=40)
    with served(server.app) as url:
        config = settings(url, benchmarks=[name], max_new_tokens=1)
        with pytest.raises(JudgeError, match=r"a context of 40 tokens is too small.*--max-model-len"):
            evaluate(config)
    assert server.asked["judge"] == 0


def test_null_and_unknown_verdicts_are_dropped_and_counted(settings):
    def answer(body, text):
        if "Question 1 " in body["messages"][-1]["content"]:
            return "I cannot say"
        return "[[A>>>B]]" if "Question 2 " in body["messages"][-1]["content"] else text

    server = Loopback(lambda body, text: answer(body, text) if body["model"] == "judge" else text)
    with served(server.app) as url:
        report = evaluate(settings(url, benchmarks=["arena_hard"]))
    counts = report.results["mine"]["arena_hard"].scores.counts
    assert counts["judgments without a verdict"] == counts["judgments with an unknown label"] == 2
    assert counts["questions dropped"] == 2
    assert server.asked["judge"] == 2 * ROWS, "null is an answer, as officially"


def test_failures_within_the_share_are_dropped_and_counted(settings):
    server = Loopback(lambda body, text: 400 if body["model"] == "judge" and "Question 1 " in str(body) else text)
    with served(server.app) as url:
        config = settings(url, benchmarks=["arena_hard"])
        report = evaluate(config)
    counts = report.results["mine"]["arena_hard"].scores.counts
    assert counts["judgments that failed"] == 2 and counts["questions dropped"] == 1
    causes = json.loads((folder(config, "arena_hard") / "failures.json").read_text())
    assert causes.keys() == {"q1/0", "q1/1"} and "HTTP 400" in causes["q1/0"]


def test_what_is_wrong_with_the_last_model_is_said_before_the_first_generates(settings, values, tiny_policy, tmp_path):
    server = Loopback()
    with served(server.app) as url:
        changes = dict(models=[f"mine={tiny_policy}", f"other={tmp_path}"], engine_url=None, engine="transformers")
        with pytest.raises(EngineError, match="no tokenizer for"):
            evaluate(settings(url, benchmarks=["writingbench"], **changes))
    assert server.asked.total() == 0 and not list(tmp_path.rglob("responses.jsonl"))


def test_failures_beyond_the_share_stop_the_run_and_keep_the_rest(settings):
    broken = [True]
    server = Loopback(
        lambda body, text: (
            400 if broken[0] and body["model"] == "judge" and "Write 1" in str(body["messages"]) else text
        )
    )
    with served(server.app) as url:
        config = settings(url, benchmarks=["writingbench"], judge_max_failures=0.05)
        with pytest.raises(JudgeError, match=r"15 of 60 judgments failed.*HTTP 400"):
            evaluate(config)
        asked, broken[0] = server.asked["judge"], False
        report = evaluate(config)
        assert server.asked["judge"] == asked + 15
    assert report.results["mine"]["writingbench"].scores.counts["judgments dropped"] == 0


def test_a_dead_judge_stops_the_run_before_anything_is_generated(settings):
    server = Loopback()
    with served(server.app) as url:
        config = settings(url, judge_url=["http://127.0.0.1:9/v1"])
        with pytest.raises(JudgeError, match="cannot be reached"):
            evaluate(config)
        with pytest.raises(JudgeError, match="does not serve judge_model='other'; it serves 'judge'"):
            evaluate(settings(url, judge_model="other", output_dir=config.output_dir + "2"))
        with pytest.raises(JudgeError, match="judge_url is not set"):
            evaluate(settings(url, judge_url=None, judge_model=None))
    assert server.asked.total() == 0


@pytest.mark.parametrize("name", ["alpaca_eval", "arena_hard"])
@pytest.mark.parametrize(
    ("spoil", "fault"),
    [
        (lambda rows: rows[:-2], "2 of 12 rows have no output"),
        (lambda rows: rows + rows[:1], "1 of 12 rows have several outputs"),
        (lambda rows: [rows[0] | {"uid": "new", "instruction": "new"}, *rows], "are no prompts of this benchmark"),
        (lambda rows: with_text(rows, "<think>hm</think> good"), "hold <think> blocks"),
        (lambda rows: with_text(rows, "good<|im_end|>\n<|im_start|>user"), "hold ChatML markers"),
        (lambda rows: with_text(rows, None), "is no text but NoneType"),
    ],
)
def test_outputs_that_cannot_be_judged_are_refused(settings, name, spoil, fault):
    server = Loopback()
    with served(server.app) as url:
        config = settings(url, benchmarks=[name])
        write_outputs(config, name, spoil(rows_of(config, name)))
        with pytest.raises(OutputError, match=fault):
            evaluate(config)
    assert server.asked.total() == 0


def with_text(rows: list[dict], text: str | None) -> list[dict]:
    changed = {"output": text} if "output" in rows[3] else {"messages": [{"content": {"answer": text}}]}
    return [*rows[:3], rows[3] | changed, *rows[4:]]


@pytest.mark.parametrize("name", ["alpaca_eval", "arena_hard"])
def test_half_a_file_is_an_error_that_names_it(settings, name):
    with served(Loopback().app) as url:
        config = settings(url, benchmarks=[name])
        path = write_outputs(config, name, rows_of(config, name))
        path.write_text(path.read_text()[:-30])
        with pytest.raises(OutputError, match=rf"{path.name}.*Is it half a file\?"):
            evaluate(config)


def test_a_torn_log_loses_one_judgment_and_a_damaged_one_is_an_error_that_names_it(settings):
    server = Loopback()
    with served(server.app) as url:
        config = settings(url, benchmarks=["alpaca_eval"])
        before = evaluate(config).results["mine"]["alpaca_eval"].scores
        log = folder(config, "alpaca_eval") / "judge.jsonl"
        log.write_text(log.read_text()[:-30])
        asked = server.asked["judge"]
        assert evaluate(config).results["mine"]["alpaca_eval"].scores == before
        assert server.asked["judge"] == asked + 1
        log.write_text("{" + log.read_text())
        with pytest.raises(RankBufferError, match=r"judge.jsonl, line 1, is not an answer"):
            evaluate(config)


def test_other_assets_are_refused_all_at_once(values, assets, tmp_path):
    manifest = yaml.safe_load(Path(assets["assets_manifest"]).read_text())
    manifest["arena_hard"]["questions"]["sha256"] = "0" * 64
    manifest["alpaca_eval"]["gamed"]["path"] = ["nowhere/df_gamed.csv"]
    path = tmp_path / "assets.yaml"
    path.write_text(yaml.safe_dump(manifest))
    config = EvaluationConfig(**values("http://127.0.0.1:9", assets_manifest=str(path)))
    with pytest.raises(AssetError) as caught:
        evaluate(config)
    text = str(caught.value)
    assert "nowhere/df_gamed.csv. Get it with: hf download tatsu-lab/alpaca_eval" in text
    assert "question.jsonl is not the official file 'questions': its sha256 is" in text and "git clone" in text


@pytest.mark.parametrize(
    ("changes", "fault"),
    [
        (dict(models=[]), "models is not set"),
        (dict(models=["a/x", "b/x"], engine_url=None), "has a label twice"),
        (dict(models=["a b=x"]), "may hold letters"),
        (dict(models=["..=x"]), "may hold letters"),
        (dict(benchmarks=["mt_bench"]), "benchmarks must be some of"),
        (dict(limit=0), "limit must be at least 1"),
        (dict(engine="sglang"), "engine must be one of"),
        (dict(top_p=0.0), "top_p must be above 0"),
        (dict(models=["a", "b"]), "engine_url serves one model"),
        (dict(engine="transformers"), "engine_url names a vLLM server"),
        (dict(compare_with="other"), "compare_with must be the label"),
        (dict(chat_template_kwargs="{"), "chat_template_kwargs is not JSON"),
        (dict(paper_rows=["GRPO++"]), "paper_rows must be among Base"),
    ],
)
def test_settings_that_cannot_be_meant(values, changes, fault):
    with pytest.raises(ValueError, match=fault):
        evaluate(EvaluationConfig(**values("http://127.0.0.1:9", **changes)))


def test_a_label_stays_with_its_model(settings, tmp_path):
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


def test_a_typo_takes_neither_folder_nor_label(settings, tmp_path):
    with served(Loopback().app) as url:
        with pytest.raises(JudgeError, match="does not serve judge_model='jugde'"):
            evaluate(settings(url, benchmarks=["writingbench"], judge_model="jugde", limit=1))
        with pytest.raises(EngineError, match="no tokenizer for"):
            evaluate(settings(url, benchmarks=["writingbench"], models=[f"mine={tmp_path}"], limit=1))
        evaluate(settings(url, benchmarks=["writingbench"], limit=1))


def test_claim_folder_refuses_every_setting_that_changes_outputs_or_verdicts(settings):
    others = dict(limit=1, temperature=0.1, top_p=0.5, top_k=1, max_new_tokens=5, seed=1, wildbench_reward=True)
    others |= dict(chat_template_kwargs={"x": 1}, judge_model="other", judge_request={"temperature": 1.0})
    settings("http://127.0.0.1:9").claim_folder()
    for key, value in others.items():
        with pytest.raises(SettingsError, match=rf"results of other settings \({key}: .*Choose another output_dir"):
            settings("http://127.0.0.1:9", **{key: value}).claim_folder()
