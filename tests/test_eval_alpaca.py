"""AlpacaEval 2 over a real server: its questions, preferences and metrics are those of the official library."""

import json
from dataclasses import replace

import pandas
import pytest
from aiohttp import web
from helpers import evaluation_assets
from helpers.evaluation_assets import ROWS, Loopback, logprobs, text_of, write_outputs
from helpers.servers import served

from evaluation.alpaca_eval.scores import is_switched
from evaluation.metric import weighted_mean
from evaluation.run import evaluate, load_benchmarks
from rankbuffer_trl.judge import JudgeError


def scores_of(config):
    return evaluate(config).results["mine"]["alpaca_eval"].scores


def first_token(token: str) -> dict:
    """Return log probabilities in which one token alone is likely."""
    found = {"token": token, "bytes": None, "logprob": -0.1}
    return {"content": [found | {"top_logprobs": [found]}]}


def test_scores_are_those_of_the_official_library(settings):
    from alpaca_eval import metrics as official

    with served(Loopback().app) as url:
        config = settings(url, benchmarks=["alpaca_eval"])
        scores = scores_of(config)
    rows = pandas.read_json(config.folder("mine", "alpaca_eval") / "annotations.json")
    assert list(rows["instruction"]) == [f"Do {i}" for i in range(ROWS)]
    assert weighted_mean(scores.rows["win rate"]) == pytest.approx(official.get_winrate(rows)["win_rate"])
    length_controlled = scores.official["length_controlled_winrate"]
    assert weighted_mean(scores.rows["length-controlled win rate"]) == pytest.approx(length_controlled)


def test_judge_stops_before_anything_is_sampled_if_no_token_can_be_read(settings, monkeypatch):
    server = Loopback()
    monkeypatch.setattr(evaluation_assets, "logprobs", lambda messages: first_token("<think>"))
    with served(server.app) as url:
        config = settings(url, benchmarks=["alpaca_eval"])
        with pytest.raises(JudgeError, match=r"it said '<think>'.*enable_thinking"):
            evaluate(config)
        assert server.asked == {"judge": 2}
        server.with_logprobs = False
        with pytest.raises(JudgeError, match="returns no logprobs"):  # the first judge has not taken the folder
            evaluate(replace(config, judge_request={"top_k": 1}))
    assert server.asked == {"judge": 4}


def test_judge_counts_and_shows_unreadable_tokens(settings, monkeypatch):
    def some(messages):
        broken = any(f'Do {i}"' in messages[-1]["content"] for i in (1, 7))  # 1 is a first question
        return first_token("x") if broken else logprobs(messages)

    monkeypatch.setattr(evaluation_assets, "logprobs", some)
    server = Loopback()
    with served(server.app) as url:
        config = settings(url, benchmarks=["alpaca_eval"])
        report = evaluate(config)
        (config.folder("mine", "alpaca_eval") / "annotations.json").unlink()
        asked = server.asked.total()
        cost = report.results["mine"]["alpaca_eval"].cost
        assert cost.attempts == server.asked["judge"] - 3 == ROWS + 1, "the first question was paid for, too"
        scores = scores_of(config)
        assert server.asked.total() == asked, "the log has all of them"
    assert scores.counts["NaN preferences"] == 2 and len(scores.rows["win rate"]) == ROWS - 2
    assert "Without a preference: 1, 7." in report.markdown()


def test_judge_asks_rows_again_that_a_rate_limit_left_out(settings):
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
        config = settings(url, benchmarks=["alpaca_eval"], judge_max_failures=0.1, judge_wait=0)
        with pytest.raises(JudgeError, match=r"mine: 2 of 12 judgments failed.*Failed: 7, 9.*Rate limit"):
            evaluate(config)
        refused.pop()
        scores = scores_of(config)
        assert scores.counts["NaN preferences"] == 1 and "Without a preference: 7." in scores.notes
        refused.clear()
        asked = server.asked["judge"]
        scores = scores_of(config)
        assert server.asked["judge"] == asked + 1, "that one alone"
    assert scores.counts["NaN preferences"] == 0 and len(scores.rows["win rate"]) == ROWS


def test_judge_counts_equal_outputs_half_and_keeps_the_one_token(settings):
    server = Loopback()
    with served(server.app) as url:
        request = {"max_tokens": 2048, "logprobs": None, "top_logprobs": 1, "top_k": 5}
        config = settings(url, benchmarks=["alpaca_eval"], limit=6, judge_request=request)
        write_outputs(config, "alpaca_eval", **{i: text_of(f"base {i}") for i in "25"})
        scores = scores_of(config)
        (benchmark,) = load_benchmarks(config, config.assets()).values()
    assert scores.counts["equal outputs"] == 2 and server.asked == {"judge": 4}
    assert scores.rows["win rate"]["2"].value == scores.rows["win rate"]["5"].value == 50
    for body in server.bodies:
        fields = {name: value for name, value in body.items() if name not in ("model", "messages")}
        assert fields == {"max_tokens": 1, "logprobs": True, "top_logprobs": 5, "temperature": 1, "top_k": 5}
        assert [message["role"] for message in body["messages"]] == ["system", "user"]

    path = config.folder("mine", "alpaca_eval") / "annotations.json"
    rows = [row | {"preference": 2} for row in json.loads(path.read_text())]
    path.write_text(json.dumps([rows[0] | {"preference": None}, *rows[1:]]))
    scores = benchmark.scores(path.parent, "mine")
    assert scores.counts["instructions"] == 6 and scores.counts["NaN preferences"] == 1
    assert weighted_mean(scores.rows["win rate"]) == 100, "whole numbers and none are read"


def test_chats_are_prompts_order_and_readings_of_the_official_library(settings):
    """The official annotator asks and reads with the same texts and answers."""
    import alpaca_eval

    config = settings("http://127.0.0.1:9", benchmarks=["alpaca_eval"])
    write_outputs(config, "alpaca_eval")
    (benchmark,) = load_benchmarks(config, config.assets()).values()
    outputs = benchmark.read_outputs(config.folder("mine", "alpaca_eval"), "mine")
    chats = benchmark.chats(outputs)
    answers = {tuple(m["content"] for m in chat.messages): logprobs(chat.messages) for chat in chats.values()}
    asked = []

    def completions(prompts, **arguments):
        said = [tuple(m["content"] for m in alpaca_eval.utils.prompt_to_chatml(prompt)) for prompt in prompts]
        asked.extend(said)
        zeros = [0.0] * len(prompts)
        found = [{"logprobs": answers[contents]} for contents in said]
        return {"completions_all": found, "price_per_example": zeros, "time_per_example": zeros}

    annotator = alpaca_eval.annotators.PairwiseAnnotator(
        annotators_config="weighted_alpaca_eval_gpt4_turbo", caching_path=None
    )
    (single,) = annotator.annotators.values()
    single.fn_completions = completions
    pairs = list(zip(outputs, benchmark.reference, strict=True))
    mine = [row | {"output": outputs[id], "generator": "mine"} for id, row in pairs]
    rows = annotator.annotate_head2head(outputs_1=benchmark.reference, outputs_2=mine)
    assert len(asked) == len(chats) == ROWS
    official = {row["instruction"]: row["preference"] for row in rows}
    ours = {row["instruction"]: chats[id].read_logprobs(logprobs(chats[id].messages)) for id, row in pairs}
    assert ours == pytest.approx(official, abs=1e-12)
    assert len({is_switched(instruction) for instruction in official}) == 2
