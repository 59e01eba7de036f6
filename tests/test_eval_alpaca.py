"""AlpacaEval 2 over a real server: its questions, preferences and metrics are those of the official library."""

import json

import pandas
import pytest
from aiohttp import web
from helpers.evaluation_assets import ROWS, Loopback, folder, logprobs, rows_of, text_of, write_outputs
from helpers.http_server import served

from evaluation.alpaca_eval.scores import is_switched
from evaluation.metric import mean
from evaluation.run import evaluate, load_benchmarks
from rankbuffer_trl.judge import JudgeError


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


def test_a_judge_without_logprobs_is_refused_after_four_questions(settings):
    server = Loopback()
    server.with_logprobs = False
    with served(server.app) as url, pytest.raises(JudgeError, match="returns no logprobs"):
        evaluate(settings(url, benchmarks=["alpaca_eval"]))
    assert server.asked["judge"] == 4


def test_a_thinking_judge_is_refused_after_four_questions(settings, monkeypatch):
    thought = {"token": "<think>", "bytes": None, "logprob": -0.1}
    monkeypatch.setattr(
        "helpers.evaluation_assets.logprobs", lambda messages: {"content": [thought | {"top_logprobs": [thought]}]}
    )
    server = Loopback()
    with served(server.app) as url, pytest.raises(JudgeError, match=r"it said '<think>'.*enable_thinking"):
        evaluate(settings(url, benchmarks=["alpaca_eval"]))
    assert server.asked["judge"] == 4


def test_unreadable_tokens_are_counted_and_shown(settings, monkeypatch):
    from helpers import evaluation_assets

    real = evaluation_assets.logprobs
    nothing = {"token": "x", "bytes": None, "logprob": -0.1}

    def some(messages):
        broken = 'Do 1"' in messages[-1]["content"] or 'Do 7"' in messages[-1]["content"]  # 1 is a first question
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
    assert "Without a preference: 1, 7." in report.markdown()


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
