"""All four benchmarks end to end on small assets of the official schema, with a judge and a model on loopback."""

import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import traceback
from pathlib import Path

import pandas
import pytest
import yaml
from aiohttp import web
from evaluation_assets import Loopback, build, goodness, jsonl, logprobs, text_of
from http_server import served
from trl import TrlParser

from evaluation.alpaca_eval.scores import is_switched
from evaluation.asking import ask_judge
from evaluation.assets import AssetError, Assets
from evaluation.benchmark import BenchmarkScores, OutputError, Prompt, check_outputs
from evaluation.config import EvaluationConfig
from evaluation.engines import EngineError
from evaluation.files import read_json, write_json
from evaluation.metric import Row, mean
from evaluation.official import Check
from evaluation.results import paper_results
from evaluation.rooms import ROOMS, Room
from evaluation.run import evaluate, load_benchmarks, main
from evaluation.validate import run_checks
from rankbuffer_trl.errors import RankBufferError
from rankbuffer_trl.judge import Chat, JudgeError

ROOT = Path(__file__).parent.parent
ROWS = 12


@pytest.fixture(scope="module")
def assets(tmp_path_factory):
    folder = tmp_path_factory.mktemp("assets")
    return dict(assets_dir=str(folder), assets_manifest=str(build(folder, ROWS)))


@pytest.fixture
def values(assets, tmp_path, tiny_policy):
    """Settings of a run whose model and judge are behind `url`, as a dict."""

    def make(url: str, **changes) -> dict:
        run = dict(
            models=[f"mine={tiny_policy}"],
            output_dir=str(tmp_path / "out"),
            engine_url=f"{url}/v1",
            engine_model="model",
            judge_url=[f"{url}/v1"],
            judge_model="judge",
            judge_max_retries=0,
            judge_prompt_price=1.0,
            judge_completion_price=2.0,
        )
        return run | assets | changes

    return make


@pytest.fixture
def settings(values):
    return lambda url, **changes: EvaluationConfig(**values(url, **changes))


def folder(config: EvaluationConfig, benchmark: str, label: str = "mine") -> Path:
    return config.folder(label, benchmark)


def outputs_of(config: EvaluationConfig, name: str) -> dict[str, str]:
    """The text after the thinking that the loopback model gives to each prompt."""
    prompts = {
        "alpaca_eval": {f"{i}": f"Do {i}" for i in range(ROWS)},
        "arena_hard": {f"q{i}": f"Question {i} {{braces}}" for i in range(ROWS)},
        "wildbench": {f"s{i}": f"More {i}" for i in range(ROWS)},
        "writingbench": {f"{i + 1}": f"Write {i}" for i in range(ROWS)},
    }[name]
    return {id: text_of(prompt) for id, prompt in prompts.items()}


def test_all_benchmarks_end_to_end(settings, capsys):
    server = Loopback()
    with served(server.app) as url:
        config = settings(url, wildbench_reward=True)
        report = evaluate(config)
        asked = server.asked.total()
        again = evaluate(config)
        assert server.asked.total() == asked, "a second run asks nothing"
    assert again.as_dict() == report.as_dict()
    metrics = {name: result.scores.metrics() for name, result in report.results["mine"].items()}
    assert list(metrics) == ["alpaca_eval", "arena_hard", "wildbench", "writingbench"]

    # Each number from the texts alone.
    mine = outputs_of(config, "alpaca_eval")
    shares = [1 / (1 + 2.718281828459045 ** (goodness(text_of(f"base {i}")) - goodness(t))) for i, t in mine.items()]
    assert metrics["alpaca_eval"]["win rate"].value == pytest.approx(100 * sum(shares) / ROWS, abs=1e-6)
    assert metrics["alpaca_eval"]["length-controlled win rate"].n == ROWS
    battles = []
    for uid, text in list(outputs_of(config, "arena_hard").items())[: 2 * ROWS // 3]:
        ahead = goodness(text) - goodness(text_of(f"o3-mini-2025-01-31 {uid}"))
        battles += [0.5 if ahead == 0 else float(ahead > 0)] * (2 * (3 if abs(ahead) > 2 else 1))
    assert metrics["arena_hard"]["hard_prompt"].value == pytest.approx(100 * sum(battles) / len(battles))
    ratings = [min(10, 1 + goodness(text)) for text in outputs_of(config, "wildbench").values()]
    assert metrics["wildbench"]["WB-Score"].value == pytest.approx(sum((r - 5) * 20 for r in ratings) / ROWS)
    scores = [min(10, 1 + goodness(text)) for text in outputs_of(config, "writingbench").values()]
    assert metrics["writingbench"]["Overall"].value == pytest.approx(10 * sum(scores) / ROWS)

    # What the model and the judge were asked.
    assert server.asked["model"] == 4 * ROWS
    sampled = [body for body in server.bodies if body["model"] == "model"]
    assert {(b["temperature"], b["top_p"], b["top_k"], b["max_tokens"]) for b in sampled} == {(0.6, 0.95, 20, 4096)}
    assert len({body["seed"] for body in sampled if "More" in body["messages"][-1]["content"]}) == ROWS
    judged = [json.dumps(body) for body in server.bodies if body["model"] == "judge"]
    assert not any("<think>" in body for body in judged)
    costs = {name: result.cost.calls for name, result in report.results["mine"].items()}
    assert costs == {"alpaca_eval": ROWS, "arena_hard": 2 * ROWS, "wildbench": 4 * ROWS, "writingbench": 5 * ROWS}
    assert server.asked["judge"] == sum(costs.values()), "the first questions of AlpacaEval are kept"
    tokens = {name: result.cost.prompt_tokens for name, result in report.results["mine"].items()}
    assert tokens == {name: 10 * calls for name, calls in costs.items()}
    assert report.results["mine"]["writingbench"].price == pytest.approx(5 * ROWS * (10 * 1.0 + 2 * 2.0) / 1e6)

    # Files and tables.
    out = Path(config.output_dir)
    found = json.loads((out / "results.json").read_text())
    assert found["models"]["mine"]["arena_hard"]["metrics"]["hard_prompt"]["value"] == pytest.approx(
        metrics["arena_hard"]["hard_prompt"].value
    )
    assert found["assets"]["arena_hard"].keys() >= {"questions", "judge_settings", "o3-mini-2025-01-31"}
    assert not found["meaningless"]
    text = (out / "results.md").read_text()
    assert "| paper: RankBuffer | 82.80" in text and "mean nothing" not in text
    assert f"{ROWS} responses, 0 empty" in capsys.readouterr().out


def test_the_official_library_gives_the_same_metrics(settings, tmp_path):
    from alpaca_eval import metrics as official

    with served(Loopback().app) as url:
        config = settings(url, benchmarks=["alpaca_eval"])
        scores = evaluate(config).results["mine"]["alpaca_eval"].scores
    rows = pandas.read_json(folder(config, "alpaca_eval") / "annotations.json")
    assert list(rows["instruction"]) == [f"Do {i}" for i in range(ROWS)]
    assert mean(scores.rows["win rate"]) == pytest.approx(official.get_winrate(rows)["win_rate"])
    assert mean(scores.rows["length-controlled win rate"]) == pytest.approx(
        scores.official["length_controlled_winrate"]
    )


def test_checkpoints_are_compared_over_shared_prompts(settings, tmp_path, tiny_policy):
    server = Loopback()
    with served(server.app) as url:
        names = ["arena_hard", "writingbench"]
        config = settings(url, benchmarks=names)
        evaluate(config)
        for name, file in (("arena_hard", "model_answer/better.jsonl"), ("writingbench", "responses/better.jsonl")):
            path = folder(config, name, "better") / file
            path.parent.mkdir(parents=True)
            mine = folder(config, name) / file.replace("better", "mine")
            rows = [json.loads(line) for line in mine.read_text().splitlines()]
            for row in rows:
                if name == "arena_hard":
                    row["messages"][-1]["content"]["answer"] += " good" * 9
                else:
                    row["response"] += " good"
            path.write_text(jsonl(rows))
        both = settings(url, benchmarks=names, models=[f"mine={tiny_policy}", "better=nowhere"], engine_url=None)
        report = evaluate(both)
    found = {(each.benchmark, each.metric): each.difference for each in report.comparisons()}
    assert found.keys() >= {("arena_hard", "hard_prompt"), ("writingbench", "Overall")}
    written = found["writingbench", "Overall"]
    assert written.value == pytest.approx(10) and (written.low, written.high) == (pytest.approx(10), pytest.approx(10))
    arena = report.results["better"]["arena_hard"].scores.metrics()["hard_prompt"].value
    assert found["arena_hard", "hard_prompt"].value == pytest.approx(
        arena - report.results["mine"]["arena_hard"].scores.metrics()["hard_prompt"].value
    )
    assert "better - mine" in report.markdown()


def test_a_limit_says_that_numbers_mean_nothing(settings):
    with served(Loopback().app) as url:
        report = evaluate(settings(url, limit=3))
        with pytest.raises(ValueError, match=r"results of other settings \(limit: 3 there, None here\)"):
            evaluate(settings(url))
    assert "mean nothing" in report.markdown() and report.as_dict()["meaningless"]
    alpaca = report.results["mine"]["alpaca_eval"].scores
    assert alpaca.headline == "win rate" and list(alpaca.rows) == ["win rate"]
    assert "No length-controlled win rate" in alpaca.notes[0]
    arena = report.results["mine"]["arena_hard"].scores.rows
    assert {category: len(rows) for category, rows in arena.items()} == {"hard_prompt": 3, "creative_writing": 3}


@pytest.mark.slow
def test_a_killed_run_goes_on_where_it_was(values, tmp_path):
    killed = []

    def kill(body: dict, text: str) -> str:
        if server.asked.total() == 70 and not killed:
            killed.append(run.pid)
            os.killpg(run.pid, signal.SIGKILL)
        return text

    server = Loopback(kill)
    names = ["arena_hard", "wildbench", "writingbench"]
    with served(server.app) as url:
        changes = values(url, benchmarks=names, judge_concurrency=2, engine_concurrency=2)
        path = tmp_path / "run.yaml"
        path.write_text(yaml.safe_dump(changes))
        command = [sys.executable, "-m", "evaluation.run", "--config", str(path)]
        environment = os.environ | {"PYTHONPATH": str(ROOT)}
        run = subprocess.Popen(command, cwd=ROOT, env=environment, start_new_session=True, stdout=subprocess.DEVNULL)
        try:
            assert run.wait(120) == -signal.SIGKILL
        finally:
            if run.poll() is None:
                os.killpg(run.pid, signal.SIGKILL)
        report = evaluate(EvaluationConfig(**changes))
    needed = 3 * ROWS + (2 + 1 + 5) * ROWS
    assert killed and needed <= server.asked.total() <= needed + 2, "what was in flight is asked again, nothing else"
    assert sum(result.cost.calls for result in report.results["mine"].values()) == 8 * ROWS


# Bad input: a clear error before money is spent, or a counted drop


def test_a_judge_without_logprobs_is_refused_after_four_questions(settings):
    server = Loopback()
    server.with_logprobs = False
    with served(server.app) as url, pytest.raises(JudgeError, match="returns no logprobs"):
        evaluate(settings(url, benchmarks=["alpaca_eval"]))
    assert server.asked["judge"] == 4


def test_a_thinking_judge_is_refused_after_four_questions(settings, monkeypatch):
    thought = {"token": "<think>", "bytes": None, "logprob": -0.1}
    monkeypatch.setattr(
        "evaluation_assets.logprobs", lambda messages: {"content": [thought | {"top_logprobs": [thought]}]}
    )
    server = Loopback()
    with served(server.app) as url, pytest.raises(JudgeError, match=r"it said '<think>'.*enable_thinking"):
        evaluate(settings(url, benchmarks=["alpaca_eval"]))
    assert server.asked["judge"] == 4


def test_unreadable_tokens_are_counted_and_shown(settings, monkeypatch):
    import evaluation_assets

    real = evaluation_assets.logprobs
    nothing = {"token": "x", "bytes": None, "logprob": -0.1}

    def some(messages):
        broken = 'Do 7"' in messages[-1]["content"] or 'Do 9"' in messages[-1]["content"]
        return {"content": [nothing | {"top_logprobs": [nothing]}]} if broken else real(messages)

    monkeypatch.setattr(evaluation_assets, "logprobs", some)
    server = Loopback()
    with served(server.app) as url:
        config = settings(url, benchmarks=["alpaca_eval"])
        report = evaluate(config)
        (folder(config, "alpaca_eval") / "annotations.json").unlink()
        asked = server.asked.total()
        again = evaluate(config)
        assert server.asked.total() == asked, "the log has all of them"
    scores = again.results["mine"]["alpaca_eval"].scores
    assert scores.counts["NaN preferences"] == 2 and len(scores.rows["win rate"]) == ROWS - 2
    assert "Without a preference: 7, 9." in report.markdown()


def test_rows_that_a_rate_limit_left_out_are_asked_again(settings):
    refused = ['"Do 7"', '"Do 9"']
    server = Loopback()

    @web.middleware
    async def limited(request, handler):
        asked = await request.text()
        if any(json.dumps(text)[1:-1] in asked for text in refused):
            return web.json_response({"error": {"message": "Rate limit reached"}}, status=429)
        return await handler(request)

    server.app.middlewares.append(limited)
    with served(server.app) as url:
        config = settings(url, benchmarks=["alpaca_eval"], judge_max_failures=0.1)
        with pytest.raises(JudgeError, match=r"mine: 2 of 12 judgments failed.*Failed: 7, 9.*Rate limit"):
            evaluate(config)
        refused.pop()
        scores = evaluate(config).results["mine"]["alpaca_eval"].scores
        assert scores.counts["NaN preferences"] == 1 and "Without a preference: 7." in scores.notes
        refused.clear()
        asked = server.asked["judge"]
        scores = evaluate(config).results["mine"]["alpaca_eval"].scores
        assert server.asked["judge"] == asked + 1, "that one alone"
    assert scores.counts["NaN preferences"] == 0 and len(scores.rows["win rate"]) == ROWS


def test_annotations_of_whole_numbers_and_of_none_are_read(settings):
    with served(Loopback().app) as url:
        config = settings(url, benchmarks=["alpaca_eval"], limit=4)
        evaluate(config)
        (benchmark,) = load_benchmarks(config, config.assets()).values()
        path = folder(config, "alpaca_eval") / "annotations.json"
        rows = [row | {"preference": 2} for row in json.loads(path.read_text())]
        path.write_text(json.dumps([rows[0] | {"preference": None}, *rows[1:]]))
    scores = benchmark.scores(path.parent, "mine")
    assert scores.counts["instructions"] == 4 and scores.counts["NaN preferences"] == 1
    assert mean(scores.rows["win rate"]) == 100


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


def rows_of(config: EvaluationConfig, name: str) -> list[dict]:
    texts = outputs_of(config, name)
    if name == "alpaca_eval":
        return [{"instruction": f"Do {i}", "output": text, "generator": "mine"} for i, text in texts.items()]
    return [{"uid": uid, "messages": [{"content": {"answer": text}}]} for uid, text in texts.items()]


def with_text(rows: list[dict], text: str | None) -> list[dict]:
    changed = {"output": text} if "output" in rows[3] else {"messages": [{"content": {"answer": text}}]}
    return [*rows[:3], rows[3] | changed, *rows[4:]]


def write_outputs(config: EvaluationConfig, name: str, rows: list[dict]) -> Path:
    path = folder(config, name) / ("model_outputs.json" if name == "alpaca_eval" else "model_answer/mine.jsonl")
    path.parent.mkdir(parents=True)
    path.write_text(json.dumps(rows) if name == "alpaca_eval" else jsonl(rows))
    return path


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


def test_equal_outputs_count_half_and_are_not_asked_about(settings):
    server = Loopback()
    with served(server.app) as url:
        config = settings(url, benchmarks=["alpaca_eval"])
        write_outputs(config, "alpaca_eval", rows_of(config, "alpaca_eval"))
        path = folder(config, "alpaca_eval") / "model_outputs.json"
        rows = json.loads(path.read_text())
        rows[2]["output"], rows[5]["output"] = text_of("base 2"), text_of("base 5")
        path.write_text(json.dumps(rows))
        scores = evaluate(config).results["mine"]["alpaca_eval"].scores
    assert scores.counts["equal outputs"] == 2 and server.asked["judge"] == ROWS - 2
    assert scores.rows["win rate"]["2"].value == scores.rows["win rate"]["5"].value == 50


def test_the_judges_request_cannot_change_the_one_token(settings):
    server = Loopback()
    with served(server.app) as url:
        request = {"max_tokens": 2048, "logprobs": None, "top_logprobs": 1, "top_k": 5}
        evaluate(settings(url, benchmarks=["alpaca_eval"], judge_request=request))
    for body in (body for body in server.bodies if body["model"] == "judge"):
        fields = {name: value for name, value in body.items() if name not in ("model", "messages")}
        assert fields == {"max_tokens": 1, "logprobs": True, "top_logprobs": 5, "temperature": 1, "top_k": 5}
        assert [message["role"] for message in body["messages"]] == ["system", "user"]


def test_prompts_order_and_readings_are_those_of_the_official_library(settings, tmp_path):
    """The official annotator asks and reads with the same texts and answers."""
    import alpaca_eval

    with served(Loopback().app) as url:
        config = settings(url, benchmarks=["alpaca_eval"])
        write_outputs(config, "alpaca_eval", rows_of(config, "alpaca_eval"))
        (benchmark,) = load_benchmarks(config, config.assets()).values()
    outputs = benchmark.read_outputs(folder(config, "alpaca_eval"), "mine")
    chats = benchmark.chats(outputs)
    answers = {json.dumps(chat.messages): logprobs(chat.messages) for chat in chats.values()}
    asked = []

    def completions(prompts, **arguments):
        asked.extend(json.dumps(alpaca_eval.utils.prompt_to_chatml(prompt)) for prompt in prompts)
        by_content = {tuple(m["content"] for m in json.loads(key)): value for key, value in answers.items()}
        found = [by_content[tuple(m["content"] for m in json.loads(text))] for text in asked[-len(prompts) :]]
        zeros = [0.0] * len(prompts)
        return {
            "completions_all": [{"logprobs": each} for each in found],
            "price_per_example": zeros,
            "time_per_example": zeros,
        }

    annotator = alpaca_eval.annotators.PairwiseAnnotator(
        annotators_config="weighted_alpaca_eval_gpt4_turbo", caching_path=None
    )
    (single,) = annotator.annotators.values()
    single.fn_completions = completions
    mine = [
        row | {"output": outputs[id], "generator": "mine"}
        for id, row in zip(outputs, benchmark.reference, strict=True)
    ]
    rows = annotator.annotate_head2head(outputs_1=benchmark.reference, outputs_2=mine)
    assert len(asked) == len(chats) == ROWS
    official = {row["instruction"]: row["preference"] for row in rows}
    ours = {
        row["instruction"]: chats[id].read_logprobs(answers[json.dumps(chats[id].messages)])
        for id, row in zip(outputs, benchmark.reference, strict=True)
    }
    assert ours == pytest.approx(official, abs=1e-12)
    assert len({is_switched(instruction) for instruction in official}) == 2


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


def test_the_papers_recipe_parses_and_unknown_keys_do_not(monkeypatch, tmp_path, capsys):
    recipe = yaml.safe_load((ROOT / "evaluation" / "paper.yaml").read_text())
    EvaluationConfig(**recipe)
    path = tmp_path / "x.yaml"
    path.write_text(yaml.safe_dump(recipe | {"jugde_model": "x"}))
    monkeypatch.setattr(sys, "argv", ["run", "--config", str(path)])
    with pytest.raises(SystemExit, match="jugde_model"):
        main()


def test_official_judgments_replayed_give_the_official_preferences(settings, assets, tmp_path, monkeypatch):
    official = os.environ.get("EVAL_ASSETS_DIR")
    if not official:
        pytest.skip("NOT RUN: set EVAL_ASSETS_DIR to the folder of official files to replay AlpacaEval's judgments")
    path = "alpaca_eval/results/alpaca-7b/weighted_alpaca_eval_gpt4_turbo/annotations.json"
    rows = json.loads((Path(official) / path).read_text())[:40]
    spoken = {row["instruction"].strip(): (row.get("raw_completion") or {}).get("logprobs") for row in rows}

    def replay(messages):
        return spoken[
            re.search(r'"instruction": """(.*?)""",\n}', messages[-1]["content"], re.DOTALL).group(1).strip()
        ]

    monkeypatch.setattr("evaluation_assets.logprobs", replay)
    with served(Loopback().app) as url:
        config = settings(url, benchmarks=["alpaca_eval"], limit=40, assets_dir=official, assets_manifest=None)
        place = folder(config, "alpaca_eval")
        place.mkdir(parents=True)
        outputs = [{"instruction": row["instruction"], "output": row["output_2"]} for row in rows]
        (place / "model_outputs.json").write_text(json.dumps(outputs))
        evaluate(config)
    found = json.loads((place / "annotations.json").read_text())
    assert [row["preference"] for row in found] == pytest.approx([row["preference"] for row in rows], abs=1e-8)


class Poems:
    """A further benchmark: two prompts, one judgment each, no official files."""

    name = "poems"
    title = "Poems"

    def __init__(self, assets, limit=None):
        self.questions = ["a sonnet", "a limerick"][:limit]

    def prompts(self):
        return [Prompt(text, [{"role": "user", "content": f"Write {text}"}]) for text in self.questions]

    def write_outputs(self, folder, model, responses):
        write_json(folder / "outputs.json", dict(responses))

    def read_outputs(self, folder, model):
        path = folder / "outputs.json"
        return check_outputs(self.questions, read_json(path).items(), path)

    def judge(self, folder, model, settings):
        outputs = self.read_outputs(folder, model)
        chats = {
            id: Chat("poems", id, [{"role": "user", "content": f"<R>{text}</R> JSON"}], json.loads)
            for id, text in outputs.items()
        }
        answers = ask_judge(settings, chats, folder / "judge.jsonl", self.title)
        write_json(folder / "scores.json", {id: value["score"] for id, value in answers.values.items()})
        return answers.totals

    def scores(self, folder, model):
        rows = {id: Row(score) for id, score in read_json(folder / "scores.json").items()}
        return BenchmarkScores("beauty", {"beauty": rows}, {"poems": len(rows)})


def test_a_fifth_benchmark_needs_a_class_and_one_line(settings, monkeypatch):
    monkeypatch.setitem(ROOMS, "poems", Room(Poems, lambda assets: iter([Check("two poems", 2, 2)])))
    with served(Loopback().app) as url:
        report = evaluate(settings(url, benchmarks=["writingbench", "poems"]))
    found = report.results["mine"]["poems"].scores.metrics()["beauty"]
    worth = [min(10, 1 + goodness(text_of(f"Write {text}"))) for text in ("a sonnet", "a limerick")]
    assert (found.value, found.n) == (sum(worth) / 2, 2)
    assert "Poems: beauty" in report.markdown()
    assert re.search(r"\| paper: RankBuffer +\| 67.27 +\| - +\|", report.markdown())
    assert [check.agrees for check in run_checks(Assets("."), "poems")] == [True]


def test_a_room_is_named_like_its_folder_and_holds_what_the_hall_needs():
    for name, room in ROOMS.items():
        assert room.benchmark.name == name and room.benchmark.__module__ == f"evaluation.{name}.benchmark"
        assert room.checks.__module__ == f"evaluation.{name}.validation"
        assert Assets(".").manifest[name].keys()


def test_generate_only_needs_no_judge_and_the_next_run_generates_nothing(values, monkeypatch, tmp_path, capsys):
    server = Loopback()
    with served(server.app) as url:
        path = tmp_path / "run.yaml"
        config = values(url, benchmarks=["writingbench"], output_dir=str(tmp_path / "out"))
        path.write_text(yaml.safe_dump(config))
        command = ["run", "--config", str(path)]
        dead = ["--judge_url", "http://127.0.0.1:9/v1"]
        monkeypatch.setattr(sys, "argv", [*command, *dead, "--generate_only", "true"])
        main()
        assert server.asked == {"model": ROWS} and not list(tmp_path.rglob("results.*"))
        monkeypatch.setattr(sys, "argv", [*command, *dead])
        with pytest.raises(SystemExit, match="cannot be reached"):
            main()
        monkeypatch.setattr(sys, "argv", command)
        main()
    assert server.asked == {"model": ROWS, "judge": 5 * ROWS}
    assert "| mine" in capsys.readouterr().out


def test_a_bug_keeps_its_traceback(values, monkeypatch, tmp_path):
    path = tmp_path / "run.yaml"
    path.write_text(yaml.safe_dump(values("http://127.0.0.1:9")))
    monkeypatch.setattr(sys, "argv", ["run", "--config", str(path)])

    def broken(config):
        return list(zip([1], [], strict=True))

    monkeypatch.setattr("evaluation.run.need_judge", broken)
    with pytest.raises(ValueError, match=r"zip\(\) argument 2 is shorter"):
        main()


def test_a_label_stays_with_its_model(settings, tmp_path):
    with served(Loopback().app) as url:
        checkpoint = tmp_path / "checkpoint"
        shutil.copytree(settings(url).labelled_models()["mine"], checkpoint)
        config = settings(url, models=[f"mine={checkpoint}"], benchmarks=["writingbench"])
        evaluate(config)
        (weights,) = checkpoint.glob("*.safetensors")
        os.utime(weights, (1, 1))
        with pytest.raises(OutputError, match="the model 'mine' has other weights now"):
            evaluate(config)
        with pytest.raises(OutputError, match="the model 'mine' is now 'other'"):
            evaluate(settings(url, models=["mine=other"], benchmarks=["writingbench"]))


def test_the_commands_of_the_readme_parse():
    text = (ROOT / "evaluation" / "README.md").read_text()
    lines = "\n".join(re.findall(r"```bash\n(.*?)```", text, re.DOTALL)).replace("\\\n", " ").splitlines()
    ours = [shlex.split(line)[3:] for line in lines if re.match(r"python -m evaluation.run ", line)]
    assert len(ours) >= 3
    for arguments in ours:
        (config,) = TrlParser((EvaluationConfig,)).parse_args_and_config(arguments)
        assert config.judge_model == "Qwen/Qwen3-30B-A3B-Instruct-2507"
    for path in re.findall(r"`(evaluation/[\w/.]+)`", text):
        assert (ROOT / path).exists(), path


def test_the_papers_numbers():
    found = paper_results()
    assert list(found["RankBuffer"].values()) == [82.80, 30.20, 48.79, 67.27] and len(found) == 22
    assert all(row.keys() == ROOMS.keys() for row in found.values())


def test_the_key_reaches_the_judge_and_no_file(settings, monkeypatch, tmp_path):
    monkeypatch.setenv("MY_KEY", "sk-very-secret")
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    server, keys, seen = Loopback(), set(), []

    @web.middleware
    async def note(request, handler):
        keys.add(request.headers["Authorization"])
        seen.extend(path.read_text(errors="replace") for path in tmp_path.rglob("*") if path.is_file())
        return await handler(request)

    server.app.middlewares.append(note)
    with served(server.app) as url:
        config = settings(url, benchmarks=["alpaca_eval"], limit=4, judge_api_key_env="MY_KEY")
        write_outputs(config, "alpaca_eval", rows_of(config, "alpaca_eval")[:4])
        evaluate(config)
    assert keys == {"Bearer sk-very-secret"} and "OPENAI_API_KEY" not in os.environ
    assert seen and "sk-very-secret" not in "".join(seen)
    for path in tmp_path.rglob("*"):
        assert path.is_dir() or "sk-very-secret" not in path.read_text(errors="replace")


def test_a_key_that_the_judge_echoes_is_not_shown(settings, monkeypatch, caplog):
    monkeypatch.setenv("OPENAI_API_KEY", "sk-very-secret")
    server = Loopback()

    @web.middleware
    async def echo(request, handler):
        if request.method == "POST" and (await request.json()).get("logprobs"):
            return web.json_response({"error": {"message": f"bad {request.headers['Authorization']}"}}, status=401)
        return await handler(request)

    server.app.middlewares.append(echo)
    with served(server.app) as url, pytest.raises(JudgeError, match=r"bad Bearer \[key\]") as error:
        evaluate(settings(url, benchmarks=["alpaca_eval"], limit=4))
    assert "sk-very-secret" not in "".join(traceback.format_exception(error.value)) + caplog.text


def test_a_typo_takes_neither_folder_nor_label(settings, tmp_path):
    with served(Loopback().app) as url:
        with pytest.raises(JudgeError, match="does not serve judge_model='jugde'"):
            evaluate(settings(url, benchmarks=["writingbench"], judge_model="jugde", limit=1))
        with pytest.raises(EngineError, match="no tokenizer for"):
            evaluate(settings(url, benchmarks=["writingbench"], models=[f"mine={tmp_path}"], limit=1))
        evaluate(settings(url, benchmarks=["writingbench"], limit=1))
