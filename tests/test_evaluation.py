"""All four benchmarks end to end on small assets of the official schema, with a judge and a model on loopback.

Bad input is a clear error before money is spent, or a counted drop.
"""

import gzip
import json
import math
import os
import re
import shutil
import signal
import subprocess
import sys
import traceback
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml
from aiohttp import web
from conftest import ROOT
from helpers.evaluation_assets import (
    ROWS,
    Loopback,
    goodness,
    read_rows,
    text_of,
    texts_of,
    values_of,
    write_outputs,
    write_rows,
)
from helpers.servers import served

from evaluation.assets import AssetError, Assets
from evaluation.benchmark import OutputError
from evaluation.config import EvaluationConfig
from evaluation.generate import label_path
from evaluation.registry import BENCHMARKS
from evaluation.run import evaluate, load_benchmarks, main
from rankbuffer_trl.errors import SettingsError
from rankbuffer_trl.judge import JudgeError

NOWHERE = "http://127.0.0.1:9"


@pytest.fixture(scope="module")
def done(assets, tiny_policy, tmp_path_factory):
    """An evaluation on all benchmarks, with the requests that it took."""
    server, out = Loopback(), tmp_path_factory.mktemp("done")
    with served(server.app) as url:
        config = EvaluationConfig(**values_of(url, tiny_policy, out), **assets, wildbench_reward=True)
        report = evaluate(config)
        asked = server.asked.total()
        assert evaluate(config).as_dict() == report.as_dict()
        assert server.asked.total() == asked, "a second run asks nothing"
    benchmarks = load_benchmarks(config, config.assets())
    return SimpleNamespace(server=server, config=config, report=report, out=out, benchmarks=benchmarks)


def test_evaluate_gives_each_number_from_the_texts_alone(done):
    metrics = {name: result.scores.metrics() for name, result in done.report.results["mine"].items()}
    assert list(metrics) == ["alpaca_eval", "arena_hard", "wildbench", "writingbench"]
    texts = {name: texts_of(benchmark) for name, benchmark in done.benchmarks.items()}
    gaps = (goodness(text_of(f"base {i}")) - goodness(text) for i, text in texts["alpaca_eval"].items())
    expected = {("alpaca_eval", "win rate"): 100 * sum(1 / (1 + math.exp(gap)) for gap in gaps) / ROWS}
    battles = []
    for uid, text in list(texts["arena_hard"].items())[: 2 * ROWS // 3]:
        ahead = goodness(text) - goodness(text_of(f"o3-mini-2025-01-31 {uid}"))
        battles += [0.5 if ahead == 0 else float(ahead > 0)] * (2 * (3 if abs(ahead) > 2 else 1))
    expected["arena_hard", "hard_prompt"] = 100 * sum(battles) / len(battles)
    ratings = [min(10, 1 + goodness(text)) for text in texts["wildbench"].values()]
    expected["wildbench", "WB-Score"] = sum((r - 5) * 20 for r in ratings) / ROWS
    ratings = [min(10, 1 + goodness(text)) for text in texts["writingbench"].values()]
    expected["writingbench", "Overall"] = 10 * sum(ratings) / ROWS
    for (name, metric), value in expected.items():
        assert metrics[name][metric].value == pytest.approx(value, abs=1e-6), name
    assert metrics["alpaca_eval"]["length-controlled win rate"].n == ROWS


def test_evaluate_asks_model_and_judge_once_and_writes_files_and_tables(done):
    sampled = [body for body in done.server.bodies if body["model"] == "model"]
    assert {(b["temperature"], b["top_p"], b["top_k"], b["max_tokens"]) for b in sampled} == {(0.6, 0.95, 20, 4096)}
    assert len({body["seed"] for body in sampled if "More" in body["messages"][-1]["content"]}) == ROWS
    assert not any("<think>" in str(body) for body in done.server.bodies if body["model"] == "judge")
    results = done.report.results["mine"]
    costs = {name: result.cost.calls for name, result in results.items()}
    assert costs == {"alpaca_eval": ROWS, "arena_hard": 2 * ROWS, "wildbench": 4 * ROWS, "writingbench": 5 * ROWS}
    rehearsal = 2 + 2 * 2 * 2 + 2 * 4 + 2 * 5  # two prompts of each, of two categories in Arena-Hard
    asked = {"model": 4 * ROWS, "judge": rehearsal + sum(costs.values())}
    assert done.server.asked == asked, "AlpacaEval's first ones are kept"
    assert {name: r.cost.prompt_tokens for name, r in results.items()} == {name: 10 * n for name, n in costs.items()}
    assert results["writingbench"].price == pytest.approx(5 * ROWS * (10 * 1.0 + 2 * 2.0) / 1e6)

    found = json.loads((done.out / "results.json").read_text())
    metrics = found["models"]["mine"]["arena_hard"]["metrics"]
    assert metrics["hard_prompt"]["value"] == results["arena_hard"].scores.metrics()["hard_prompt"].value
    assert found["assets"]["arena_hard"].keys() >= {"questions", "judge_settings", "o3-mini-2025-01-31"}
    assert not found["meaningless"]
    assert json.loads((done.out / "settings.json").read_text())["judge_model"] == "judge", "the folder is its own now"
    text = (done.out / "results.md").read_text()
    average = sum(each.headline.value for each in results.values()) / 4
    assert found["averages"] == {"mine": pytest.approx(average)}
    assert found["policies"]["mine"].items() >= {"run": None, "step": None}.items()
    assert re.search(rf"\| mine +\| .*\| {average:.2f} \|\n", text) and "mean nothing" not in text
    assert re.search(r"\| paper: RankBuffer +\| 82.80 .*\| 57.27 \|\n", text)
    assert "assets.yaml` names replace official ones" in text and "no row is comparable with a leaderboard" in text
    assert "paper" not in replace(done.report, limit=3).markdown()
    other = replace(done.report, results={"mine": {"poems": results["writingbench"]}}, titles={"poems": "Poems"})
    assert "Poems: Overall" in other.markdown()
    assert re.search(r"\| mine +\| .*\| - +\|\n\n## All", other.markdown()), "the paper has no such benchmark"
    pair = {"poems": results["writingbench"], "arena_hard": results["arena_hard"]}
    other = replace(done.report, results={"mine": pair}, titles=dict(zip(pair, ("Poems", "AH"), strict=True)))
    assert re.search(r"\| paper: RankBuffer +\| - +\| 30.20 +\| - +\|\n", other.markdown()), "nor a mean of this pair"
    facts = json.loads((done.out / "mine" / "wildbench" / "generation.json").read_text())
    assert list(facts.values()) == [ROWS, 0, 0, 0, None]


IDS = {"alpaca_eval": "instruction", "arena_hard": "uid", "wildbench": "session_id", "writingbench": "index"}
ROW = r"no messages\[-1\]|is no text|is no output|must have `instruction`"
OUTPUTS = {  # rows of a file of outputs, from those that are right and the name of their id
    "2 of 12 rows have no output": lambda rows, id: rows[:-2],
    "1 of 12 rows have several outputs": lambda rows, id: rows + rows[:1],
    "are no prompts of this benchmark": lambda rows, id: [rows[0] | {id: "new"}, *rows],
    ROW: lambda rows, id: [{"rows": 3}, *rows[1:]],
    f"{ROW}|holds a NoneType": lambda rows, id: [*rows[:3], None, *rows[4:]],
    f"{ROW}|is no id of a prompt|1 of 12 rows have no": lambda rows, id: [rows[0] | {id: [1]}, *rows[1:]],
}
TEXTS = {
    "hold <think> blocks": "<think>hm</think> good",
    "hold ChatML markers": "good<|im_end|>\n<|im_start|>user",
    "is no text but NoneType": None,
}


@pytest.mark.parametrize("name", BENCHMARKS)
def test_read_outputs_gives_them_back_and_refuses_what_cannot_be_judged(done, name, tmp_path):
    benchmark = done.benchmarks[name]
    texts = texts_of(benchmark)

    def written(**changes):
        benchmark.write_outputs(tmp_path, "mine", texts | changes)
        (path,) = tmp_path.rglob("*.json*")
        return path

    def refused(fault):
        with pytest.raises(OutputError, match=fault):
            benchmark.read_outputs(tmp_path, "mine")

    path = written()
    rows = read_rows(path)
    assert benchmark.read_outputs(tmp_path, "mine") == texts
    for fault, change in OUTPUTS.items():
        write_rows(path, change(rows, IDS[name]))
        refused(fault)
    for fault, text in TEXTS.items():
        written(**{[*texts][3]: text})
        refused(fault)
    path.write_text(written().read_text()[:-30])
    refused(rf"{path.name}.*Is it half a file\? .* write all outputs")
    path.write_bytes(written().read_bytes() + b'"\xe9"')
    refused(rf"{path.name}.*'utf-8' codec can't decode")
    path.write_bytes(gzip.compress(written().read_bytes())[:-9])
    refused(rf"{path.name} cannot be read \(.*write all outputs")


@pytest.mark.parametrize("name", BENCHMARKS)
def test_read_outputs_takes_the_forms_that_other_programs_write(done, name, tmp_path):
    benchmark = done.benchmarks[name]
    benchmark.write_outputs(tmp_path, "mine", texts := texts_of(benchmark))
    (path,) = tmp_path.rglob("*.json*")
    text = path.read_text().replace('"index": 1,', '"index": 1.0,') + "\n \n"
    crlf = gzip.compress(text.replace("\n", "\r\n").encode())
    for content in (text.encode("utf-8-sig"), text.encode("utf-16"), crlf):
        path.write_bytes(content)
        assert benchmark.read_outputs(tmp_path, "mine") == texts


def swapped(old: str, new: str):
    return lambda rows: [*rows[:-1], json.loads(json.dumps(rows[-1]).replace(old, new))]


def without_first(rows):
    return rows[1:]


RESULTS = {  # the file of results, and what makes it wrong by what is said of it
    "alpaca_eval": ("annotations.json", {"must hold the benchmark's 12 instr.* it has 11": without_first}),
    "arena_hard": (
        "model_judgment/judge/mine.jsonl",
        {
            "1 of 12 rows are not judged: q0": without_first,
            "are judged several times: q0": lambda rows: [*rows, rows[0]],
            "are no questions of this run: other": lambda rows: [*rows, rows[0] | {"uid": "other"}],
        },
    ),
    "wildbench": (
        "score.v2/mine.json",
        {
            "1 of 12 rows have no verdict: s0": without_first,
            "1 of 12 rows are judged several times: s3": lambda rows: [*rows, rows[3]],
            "1 of 12 rows should not be there: other": lambda rows: [*rows, rows[0] | {"session_id": "other"}],
            "a row that no judge could have given": swapped('"score": "', '"score": "1'),
        },
    ),
    "writingbench": (
        "score_dir/mine.jsonl",
        {
            "1 of 12 rows have no verdict: 1": without_first,
            "1 of 12 rows are judged several times: 1": lambda rows: [*rows, rows[0]],
            "index 12 lacks the score of a criterion": swapped("c4", "c5"),
            "index 12 has no score from 1 to 10 for 'c0'": swapped('"score": ', '"score": 1'),
        },
    ),
}


@pytest.mark.parametrize("name", BENCHMARKS)
def test_scores_refuses_results_that_are_not_whole(done, name, tmp_path):
    file, cases = RESULTS[name]
    shutil.copytree(done.config.folder("mine", name), tmp_path, dirs_exist_ok=True)
    path = tmp_path / file
    rows = read_rows(path)

    def refused(fault):
        with pytest.raises(OutputError, match=fault):
            done.benchmarks[name].scores(tmp_path, "mine")

    for fault, change in cases.items():
        write_rows(path, change(rows))
        refused(fault)
    path.write_text(path.read_text()[:-9])
    refused("half a file")
    path.unlink()
    if name != "alpaca_eval":
        refused("is missing: judge the outputs first|must hold judgments of 'mine' by one judge, not 0")
    if name in ("wildbench", "writingbench"):
        (tmp_path / "failures.json").unlink()
        refused(r"failures\.json is missing: judge the outputs first")


def test_evaluate_compares_checkpoints_over_shared_prompts(settings, tiny_policy):
    names = ["arena_hard", "writingbench"]
    with served(Loopback().app) as url:
        config = settings(url, benchmarks=names)
        evaluate(config)
        for name, benchmark in load_benchmarks(config, config.assets()).items():
            texts = benchmark.read_outputs(config.folder("mine", name), "mine")
            more = " good" * (9 if name == "arena_hard" else 1)
            benchmark.write_outputs(config.folder("better", name), "better", {id: t + more for id, t in texts.items()})
        both = settings(url, benchmarks=names, models=[f"mine={tiny_policy}", "better=nowhere"], engine_url=None)
        report = evaluate(both)
    found = {(each.benchmark, each.metric): each.difference for each in report.comparisons()}
    written = found["writingbench", "Overall"]
    assert written[:3] == pytest.approx([10, 10, 10])
    arena = {label: result["arena_hard"].scores.metrics()["hard_prompt"] for label, result in report.results.items()}
    assert found["arena_hard", "hard_prompt"].value == pytest.approx(arena["better"].value - arena["mine"].value)
    assert "better - mine" in report.markdown()
    fewer = report.results | {"better": {"arena_hard": report.results["better"]["arena_hard"]}}
    assert {each.benchmark for each in replace(report, results=fewer).comparisons()} == {"arena_hard"}


def test_evaluate_with_a_limit_says_that_numbers_mean_nothing(settings):
    with served(Loopback().app) as url:
        report = evaluate(settings(url, limit=3))
        with pytest.raises(ValueError, match=r"results of other settings \(limit: 3 there, None here\)"):
            evaluate(settings(url))
    assert "mean nothing" in report.markdown() and report.as_dict()["meaningless"]
    scores = {name: result.scores for name, result in report.results["mine"].items()}
    assert list(scores["alpaca_eval"].rows) == [scores["alpaca_eval"].headline] == ["win rate"]
    assert "No length-controlled win rate" in scores["alpaca_eval"].notes[0]
    arena = scores["arena_hard"].rows
    assert {category: len(rows) for category, rows in arena.items()} == {"hard_prompt": 3, "creative_writing": 3}
    assert list(scores["wildbench"].rows["WB-Score"]) == ["s0", "s1", "s2"]
    assert list(scores["writingbench"].rows["Overall"]) == ["1", "2", "3"]


@pytest.mark.slow
def test_main_goes_on_where_it_was_killed(values, tmp_path):
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
    rehearsal = 2 * 2 * 2 + 2 + 2 * 5
    needed = rehearsal + 3 * ROWS + (2 + 1 + 5) * ROWS
    assert killed and needed <= server.asked.total() <= needed + 2, "what was in flight is asked again, nothing else"
    assert sum(result.cost.calls for result in report.results["mine"].values()) == 8 * ROWS


def test_main_knows_the_papers_recipe_and_no_unknown_key(monkeypatch, tmp_path, capsys):
    recipe = yaml.safe_load((ROOT / "evaluation" / "paper.yaml").read_text())
    EvaluationConfig(**recipe)
    path = tmp_path / "x.yaml"
    path.write_text(yaml.safe_dump(recipe | {"jugde_model": "x"}))
    monkeypatch.setattr(sys, "argv", ["run", "--config", str(path)])
    with pytest.raises(SystemExit, match="jugde_model"):
        main()


def test_rooms_are_named_like_their_folders():
    for name, benchmark in BENCHMARKS.items():
        assert benchmark.name == name and benchmark.__module__ == f"evaluation.{name}.benchmark"
        assert Assets(".").manifest[name].keys()


HOUSE = """
from evaluation.writingbench.benchmark import WritingBench

House = type("House", (WritingBench,), {"name": "house", "title": "House style"})
Twin, Copy, Up = (type("Other", (House,), {"name": name}) for name in ("house", "wildbench", "../up"))
Half, ready = type("Half", (), {"name": "half", "title": "Half", "prompts": len}), House.__new__(House)
"""


def test_benchmarks_of_ones_own_load_by_their_paths(values, assets, monkeypatch, tmp_path):
    (tmp_path / "my_house.py").write_text(HOUSE)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "my_house", raising=False)
    for names, fault in (
        (["my_hose.House"], "no 'my_hose.House' .*No module named 'my_hose'.*name some of alpaca_eval, .*dotted path"),
        (["my_house.Half"], "my_house.Half must be a class with write_outputs, read_outputs, judge, scores$"),
        (["my_house.ready"], "my_house.ready must be a class with name, title, prompts"),
        (["my_house.Copy"], "the name of my_house.Copy is 'wildbench'.*of the paper"),
        (["my_house.Up"], r"is '\.\./up'. It names a folder"),
        (["my_house.House", "my_house.Twin"], "two classes of one name.*'house', 'house'"),
    ):
        with pytest.raises(SettingsError, match=f"^benchmarks.*{fault}"):
            EvaluationConfig(**values("http://127.0.0.1:9", benchmarks=names))
            pytest.fail(str(names))
    assert EvaluationConfig(models=["m"]).benchmarks == [*BENCHMARKS], "the default stays"
    lists = yaml.safe_load(Path(assets["assets_manifest"]).read_text())
    lists["house"] = Assets(".").manifest["writingbench"] | lists["writingbench"]
    (tmp_path / "assets.yaml").write_text(yaml.safe_dump(lists))
    server = Loopback()
    with served(server.app) as url:
        changes = dict(benchmarks=["my_house.House"] * 2, assets_manifest=str(tmp_path / "assets.yaml"))
        report = evaluate(EvaluationConfig(**values(url, **changes)))
    found = json.loads((tmp_path / "out" / "results.json").read_text())
    assert found["models"]["mine"].keys() == found["assets"].keys() == {"house"} and len(found["assets"]["house"]) == 2
    assert server.asked == {"model": ROWS, "judge": 5 * (ROWS + 2)} and "paper:" not in report.markdown()
    assert "House style: Overall" in report.markdown() and "replace official ones" not in report.markdown()


def test_a_benchmark_that_takes_no_made_up_outputs_is_judged_without_a_rehearsal(settings, monkeypatch):
    def judge(self, folder, *arguments):
        if "_rehearsal" in folder.parts:
            raise OutputError("the outputs must be sonnets")
        return judges(self, folder, *arguments)

    judges = BENCHMARKS["writingbench"].judge
    monkeypatch.setattr(BENCHMARKS["writingbench"], "judge", judge)
    server = Loopback()
    with served(server.app) as url:
        evaluate(settings(url, benchmarks=["writingbench"]))
    assert server.asked == {"model": ROWS, "judge": 5 * ROWS}


def test_main_with_generate_only_needs_no_judge_and_leaves_the_rest(values, monkeypatch, tmp_path, capsys):
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
    printed = capsys.readouterr().out
    assert "| mine" in printed and f"{ROWS} responses, 0 empty, 0 cut off at max_new_tokens" in printed


def test_evaluate_gives_the_key_to_the_judge_and_to_no_file_and_shows_none_that_it_echoes(
    settings, monkeypatch, tmp_path, caplog
):
    monkeypatch.setenv("MY_KEY", "sk-very-secret")
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    server, keys, seen, refuses = Loopback(), set(), [], []

    @web.middleware
    async def note(request, handler):
        keys.add(key := request.headers["Authorization"])
        seen.extend(path.read_text(errors="replace") for path in tmp_path.rglob("*") if path.is_file())
        if refuses and request.method == "POST":
            return web.json_response({"error": {"message": f"bad {key}"}}, status=401)
        return await handler(request)

    server.app.middlewares.append(note)
    with served(server.app) as url:
        config = settings(url, benchmarks=["alpaca_eval"], limit=4, judge_api_key_env="MY_KEY")
        write_outputs(config, "alpaca_eval")
        evaluate(config)
        other = replace(config, output_dir=config.output_dir + "2")
        write_outputs(other, "alpaca_eval")
        refuses.append(True)
        with pytest.raises(SettingsError, match=r"bad Bearer \[key\]") as error:
            evaluate(other)
    assert keys == {"Bearer sk-very-secret"} and "OPENAI_API_KEY" not in os.environ
    seen += [path.read_text(errors="replace") for path in tmp_path.rglob("*") if path.is_file()]
    assert len(seen) > 4 and "sk-very-secret" not in "".join(seen)
    assert "sk-very-secret" not in "".join(traceback.format_exception(error.value)) + caplog.text


# Bad input: an error before money is spent, or a counted drop


def test_evaluate_refuses_what_is_wrong_before_it_asks_anything(settings, tiny_policy, tmp_path):
    server = Loopback()
    with served(server.app) as url:
        config = settings(url)
        two = dict(models=[f"mine={tiny_policy}", f"other={tmp_path}"], engine_url=None, engine="transformers")
        for changes, error, fault in (
            (dict(judge_url=[f"{NOWHERE}/v1"]), JudgeError, "cannot be reached"),
            (dict(judge_url=None, judge_model=None), JudgeError, "judge_url is not set"),
            *(({key: __file__}, SettingsError, f"{key} .* is a file") for key in ("output_dir", "assets_dir")),
            (two, SettingsError, "holds no model: name one that has a config.json"),
        ):
            with pytest.raises(error, match=fault):
                evaluate(settings(url, benchmarks=["writingbench"], limit=1, **changes))
        evaluate(settings(url, benchmarks=["writingbench"], limit=1))  # a typo takes neither folder nor label
        asked = server.asked.total()
        write_outputs(settings(url, output_dir=config.output_dir + "2"), "alpaca_eval", **{"3": "<think>hm</think> x"})
        with pytest.raises(OutputError, match="hold <think> blocks"):
            evaluate(settings(url, output_dir=config.output_dir + "2", benchmarks=["alpaca_eval"]))
    assert server.asked.total() == asked == 1 + 3 * 5 and not list(tmp_path.rglob("other/responses.jsonl"))


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
        with pytest.raises(JudgeError, match=f"4 of {2 * ROWS} judgments have no verdict"):  # two failed
            evaluate(replace(config, judge_max_failures=3 / (2 * ROWS)))
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
    assert server.asked["judge"] - 10 == 2 * ROWS + 4, "null is an answer; two labels for the pilot, two failed twice"


@pytest.mark.parametrize("benchmark", ["arena_hard", "wildbench", "writingbench"])
def test_evaluate_ends_before_it_samples_if_nothing_of_a_judge_can_be_read(settings, benchmark):
    server = Loopback(lambda body, text: "I cannot say." if body["model"] == "judge" else text)
    with served(server.app) as url, pytest.raises(JudgeError, match=r"of 2 judg|not asked|nothing else was"):
        evaluate(settings(url, benchmarks=[benchmark]))
    assert 2 <= server.asked["judge"] == server.asked.total() <= 4 * 3, (
        "four questions, each asked three times at most"
    )


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


def test_assets_refuse_a_manifest_of_another_form_in_one_line(tmp_path):
    path = tmp_path / "assets.yaml"
    for text, fault in (
        ("arena_hard: 3", "must be"),
        ("house: {rows: {path: rows.json, sha256: null, source: wget}}", "path must be"),
    ):
        path.write_text(text)
        with pytest.raises(AssetError, match=rf"assets\.yaml is wrong: \['.*{fault}"):
            Assets(".", path)


def test_evaluation_config_refuses_what_cannot_be_meant(values):
    for changes, fault in (
        (dict(models=[]), "models is not set"),
        (dict(models=["a/x", "b/x"], engine_url=None), "has a label twice"),
        (dict(models=["a/my run"], engine_url=None), "write label=path"),
        *((dict(models=[model]), "may hold letters") for model in ("a b=x", "..=x")),
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
    settings(NOWHERE, generate_only=True, judge_url=None, judge_model=None).claim_folder()
    for judge in ("judge", "other"):  # outputs alone take the folder for no judge
        settings(NOWHERE, judge_model=judge).claim_folder()
    settings(NOWHERE).claim_folder(judged=True)
    settings(NOWHERE, generate_only=True, judge_model="other").claim_folder()
    with pytest.raises(SettingsError, match="_rehearsal is the folder of the judge's rehearsal"):
        settings(NOWHERE, models=["_rehearsal=m"])
    for key, value in others.items():
        with pytest.raises(SettingsError, match=rf"results of other settings \({key}: .*Choose another output_dir"):
            settings(NOWHERE, **{key: value}).claim_folder()
