"""All four benchmarks end to end on small assets of the official schema, with a judge and a model on loopback."""

import json
import os
import re
import signal
import subprocess
import sys
import traceback
from pathlib import Path

import pytest
import yaml
from aiohttp import web
from helpers.evaluation_assets import (
    ROWS,
    Loopback,
    folder,
    goodness,
    jsonl,
    outputs_of,
    rows_of,
    text_of,
    write_outputs,
)
from helpers.http_server import served

from evaluation.asking import ask_judge
from evaluation.assets import Assets
from evaluation.benchmark import BenchmarkScores, Prompt, check_outputs
from evaluation.config import EvaluationConfig
from evaluation.files import read_json, write_json
from evaluation.metric import Row
from evaluation.rooms import ROOMS
from evaluation.run import evaluate, main
from rankbuffer_trl.judge import Chat, JudgeError

ROOT = Path(__file__).parent.parent


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
    headlines = [result.scores.metrics()[result.scores.headline].value for result in report.results["mine"].values()]
    assert found["averages"] == {"mine": pytest.approx(sum(headlines) / 4)}
    assert found["policies"] == {"mine": {"model": config.models[0].partition("=")[2], "run": None, "step": None}}
    text = (out / "results.md").read_text()
    assert re.search(r"\| paper: RankBuffer +\| 82.80 .*\| 57.27 \|\n", text) and "mean nothing" not in text
    assert re.search(rf"\| mine +\| .*\| {sum(headlines) / 4:.2f} \|\n", text)
    assert f"{ROWS} responses, 0 empty" in capsys.readouterr().out


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


def test_the_papers_recipe_parses_and_unknown_keys_do_not(monkeypatch, tmp_path, capsys):
    recipe = yaml.safe_load((ROOT / "evaluation" / "paper.yaml").read_text())
    EvaluationConfig(**recipe)
    path = tmp_path / "x.yaml"
    path.write_text(yaml.safe_dump(recipe | {"jugde_model": "x"}))
    monkeypatch.setattr(sys, "argv", ["run", "--config", str(path)])
    with pytest.raises(SystemExit, match="jugde_model"):
        main()


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
    monkeypatch.setitem(ROOMS, "poems", Poems)
    with served(Loopback().app) as url:
        report = evaluate(settings(url, benchmarks=["writingbench", "poems"]))
    found = report.results["mine"]["poems"].scores.metrics()["beauty"]
    worth = [min(10, 1 + goodness(text_of(f"Write {text}"))) for text in ("a sonnet", "a limerick")]
    assert (found.value, found.n) == (sum(worth) / 2, 2)
    assert "Poems: beauty" in report.markdown()
    assert re.search(r"\| paper: RankBuffer +\| 67.27 +\| - +\| 57.27 \|", report.markdown())
    assert re.search(r"\| mine .*\| - +\|\n", report.markdown()), "no average of two benchmarks"


def test_a_room_is_named_like_its_folder_and_holds_what_the_hall_needs():
    for name, room in ROOMS.items():
        assert room.name == name and room.__module__ == f"evaluation.{name}.benchmark"
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
