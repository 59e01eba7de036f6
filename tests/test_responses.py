"""Responses for queries of one's own: sampled, ranked once, resumed; failures listed."""

import json
import math
import re
from dataclasses import replace
from functools import partial

import generate_responses
import pytest
from aiohttp import web
from helpers.nectar_rows import Model
from helpers.servers import served

from rankbuffer_tools.batch.output import write_rows
from rankbuffer_tools.data.responses import order_question, orders_as_shown, read_response, sample_chats
from rankbuffer_trl.data._queries import GENERIC_RUBRICS, DataError, load_queries, prompt_id
from rankbuffer_trl.errors import SettingsError
from rankbuffer_trl.groups import Query
from rankbuffer_trl.judge import JudgeError, VerdictError
from rankbuffer_trl.judge._questions import weighted_rubrics

pytestmark = pytest.mark.usefixtures("cache")


def own_queries(tmp_path, n: int, **more) -> str:
    rows = [{"query_id": f"q{i}", "prompt": [{"role": "user", "content": f"Question {i}?"}]} | more for i in range(n)]
    write_rows(tmp_path / "mine.jsonl", rows)
    return str(tmp_path / "mine.jsonl")


def numbered(messages, how_often) -> str:
    """The sampler: another number each time it is asked the same, as text."""
    return f"<think>hm</think>\n answer {how_often * 3 % 7}"


def by_number(messages, how_often) -> str:
    """The judge: a higher number is better."""
    blocks = re.findall(r"^\[R(\d+)\]\n> answer (\d+)$", messages[0]["content"], re.MULTILINE)
    return json.dumps({"order": [int(i) for i, value in sorted(blocks, key=lambda block: int(block[1]))]})


def as_shown(messages, how_often) -> str:
    """The judge: it repeats the numbers of the responses."""
    return json.dumps({"order": list(range(messages[0]["content"].count("[R")))})


def generate(source: str, tmp_path, sampler: Model, judge: Model, **kwargs) -> int:
    with served(sampler.app()) as sampler_url, served(judge.app()) as judge_url:
        config = generate_responses.ResponsesConfig(
            **{"dataset_name": source, "output_file": str(tmp_path / "out.jsonl")}
            | {"sampler_url": f"{sampler_url}/v1", "sampler_model": "writer"}
            | {"judge_url": f"{judge_url}/v1", "judge_model": "writer", "judge_max_retries": 0, "order_by": "list"}
            | kwargs
        )
        return generate_responses.main(config)


def made(tmp_path) -> tuple[list[dict], dict]:
    """Return the rows that were written, and the step that made them."""
    (step,) = json.loads((tmp_path / "out.jsonl.provenance.json").read_text())["steps"]
    return list(load_queries(str(tmp_path / "out.jsonl"))), step


def test_generate_responses_puts_them_from_worst_to_best(tmp_path, capsys):
    sampler, judge = Model(numbered), Model(by_number)
    for more, said in (({}, "the judge gets 3 to 21 questions"), ({"audit_queries": 9}, "gets no question")):
        assert generate(own_queries(tmp_path, 3), tmp_path, sampler, judge, dry_run=True, **more) == 0
        assert "at most 21 responses to 3 queries" in (line := capsys.readouterr().out) and said in line
    assert not sampler.bodies and not judge.bodies and not (tmp_path / "out.jsonl").exists()
    assert generate(own_queries(tmp_path, 3), tmp_path, sampler, judge, sampler_request={"top_k": 20}) == 0
    rows, step = made(tmp_path)
    assert [row["responses"] for row in rows] == [[f"answer {i}" for i in range(7)]] * 3
    assert rows[0]["models"] == ["writer"] * 7
    assert len(sampler.bodies) == 21 and len(judge.bodies) == 3
    body = sampler.bodies[0]
    assert (body["temperature"], body["top_p"], body["top_k"], body["max_tokens"]) == (0.6, 0.95, 20, 4096)
    assert sorted(b["seed"] for b in sampler.bodies) == sorted([42 + 1000 * i for i in range(7)] * 3)
    assert weighted_rubrics(GENERIC_RUBRICS) in judge.bodies[0]["messages"][0]["content"]
    assert step["model"] == step["ranked_by"] == "writer" and step["cost"]["calls"] == 21
    assert (step["step"], step["dataset_name"], step["queries_without"]) == ("responses", "mine.jsonl", 3)
    assert (step["temperature"], step["top_k"], step["seed"]) == (0.6, 20, 42)
    assert step["ranking_cost"]["calls"] == 3 and step["queries_failed"] == 0
    printed = capsys.readouterr().out
    assert "21 of 21 responses: 21 requests" in printed and "in the order shown" not in printed
    assert "order of 3 queries' responses by list: 3 requests" in printed and " are from" not in printed

    assert all((tmp_path / f"out.jsonl.{what}.jsonl").is_file() for what in ("samples", "orders"))
    again = Model(numbered)
    assert generate(own_queries(tmp_path, 4), tmp_path, again, judge, sampler_request={"top_k": 20}) == 0
    assert len(again.bodies) == 7 and len(judge.bodies) == 4, "only the new query is asked about"
    assert f"21 are from {tmp_path}/out.jsonl.samples.jsonl. If" in capsys.readouterr().out


def test_scores_under_probabilities_order_responses_and_a_list_does_where_there_are_none(tmp_path, capsys):
    def scored(messages, how_often, step=1):
        """A judge whose greedy score is 5 for all, with more probability on 9 for a higher number."""
        number = int(re.findall(r"^> answer (\d+)$", messages[0]["content"], re.MULTILINE)[-1]) // step
        listed = {"5": 0.9 - number / 10, "9": 0.1 + number / 10}
        top = [{"token": token, "logprob": math.log(chance)} for token, chance in listed.items()]
        tokens = [{"token": token, "logprob": 0.0, "top_logprobs": []} for token in ('{"score": ', "5", "}")]
        tokens[1] |= {"logprob": top[0]["logprob"], "top_logprobs": top}
        choice = {"message": {"content": '{"score": 5}'}, "finish_reason": "stop", "logprobs": {"content": tokens}}
        return web.json_response({"choices": [choice], "usage": {"prompt_tokens": 9, "completion_tokens": 3}})

    source, judge = own_queries(tmp_path, 2), Model(scored)
    assert generate(source, tmp_path, Model(numbered), judge, order_by=None) == 0
    rows, step = made(tmp_path)
    assert [row["responses"] for row in rows] == [[f"answer {i}" for i in range(7)]] * 2
    assert step["ranking"] == "scores" and len(judge.bodies) == 14, "one question a response, the trial among them"
    blind = Model(by_number)
    for log in tmp_path.glob("out.jsonl.orders.jsonl"):
        log.unlink()
    assert generate(source, tmp_path, Model(numbered), blind, order_by=None) == 0
    step = made(tmp_path)[1]
    assert (step["ranking"], step["ranking_cost"]["attempts"]) == ("list", 8), "six for the trials"
    assert "one list orders the responses to a query, because the judge gives no probab" in capsys.readouterr().out
    with pytest.raises(JudgeError, match="order_by: scores needs token probabilities: malformed"):
        generate(source, tmp_path, Model(numbered), blind, order_by="scores")

    def flagged(messages, how_often):
        refused = "Question 0?" in messages[0]["content"]
        return web.json_response({"error": {"code": "content_filter"}}, status=400) if refused else scored(messages, 1)

    out = {"order_by": None, "output_file": str(tmp_path / "flagged.jsonl")}
    assert generate(source, tmp_path, Model(numbered), Model(flagged), **out) == 3
    assert "by scores: " in capsys.readouterr().out, "a query that the provider refuses says nothing of the others"
    for step, failed, said in ((4, 0, "18 pairs of responses have equal scores"), (9, 1, "order of 0 queries'")):
        coarse, out = Model(partial(scored, step=step)), str(tmp_path / f"{step}.jsonl")
        assert generate(source, tmp_path, Model(numbered), coarse, order_by="scores", output_file=out) == failed
        assert said in capsys.readouterr().out
    assert (tmp_path / "9.jsonl.failed.jsonl").read_text().count("the same score: take another judge") == 2


def test_order_question_takes_a_querys_own_rubrics():
    row = {"query_id": "q", "prompt": [{"role": "user", "content": "Why?"}]}
    for rubrics, shown in (
        ([{"text": "Mine.", "weight": 4}], "1.[weight=4] Mine."),
        ([], weighted_rubrics(GENERIC_RUBRICS)),
        (None, weighted_rubrics(GENERIC_RUBRICS)),
    ):
        question = order_question(Query.from_row(row | {"rubrics": rubrics}), ["a", "b"])
        assert shown in question.prompt() and question.kind == "bootstrap"


def test_generate_responses_lists_failures_and_asks_them_again_alone(tmp_path, capsys):
    def sometimes(messages, how_often):
        return "the same" if messages[0]["content"] == "Question 1?" else numbered(messages, how_often)

    def confused(messages, how_often):
        return "no" if "Question 2?" in messages[0]["content"] else by_number(messages, how_often)

    source = own_queries(tmp_path, 4)
    assert generate(source, tmp_path, Model(sometimes), Model(confused)) == 3
    lines = (tmp_path / "out.jsonl.failed.jsonl").read_text().splitlines()
    failed = {row["query_id"]: row["error"] for row in map(json.loads, lines)}
    assert failed.keys() == {"q1", "q2"}
    assert failed["q1"].startswith("1 different responses of 7; the others are the same and are kept: set more")
    assert failed["q2"].startswith("no order of its responses: malformed")
    rows, step = made(tmp_path)
    assert [row["query_id"] for row in rows] == ["q0", "q3"] and step["queries_failed"] == 2
    said = capsys.readouterr().err
    assert "2 queries failed and are NOT in it" in said and "asks only what has no answer yet" in said

    sampler, judge = Model(sometimes), Model(by_number)
    assert generate(source, tmp_path, sampler, judge) == 3
    assert not sampler.bodies and len(judge.bodies) == 1
    assert [row["query_id"] for row in made(tmp_path)[0]] == ["q0", "q2", "q3"]


def test_generate_responses_asks_afresh_for_what_cannot_be_read(tmp_path):
    def at_first_cut(messages, how_often):
        assert len(messages) == 1
        return "<think>endless" if how_often <= 2 else numbered(messages, how_often)

    sampler = Model(at_first_cut)
    assert generate(own_queries(tmp_path, 1), tmp_path, sampler, Model(by_number)) == 0
    assert len(sampler.bodies) == 9 and len({body["seed"] for body in sampler.bodies}) == 9
    assert generate(own_queries(tmp_path, 1), tmp_path, Model(lambda *_: ""), Model(by_number), seed=1) == 1
    failure = json.loads((tmp_path / "out.jsonl.failed.jsonl").read_text())
    assert failure["error"].startswith("0 different responses of 7; malformed: the response must be non-empty")


def test_generate_responses_leaves_thoughts_out_that_were_cut_off_and_keeps_long_answers(tmp_path, capsys):
    """The template opens the thought, so that one that is cut off has no tag."""

    def thinking(closing: str):
        def answer(messages, how_often):
            cut = how_often % 7 in (2, 5)
            thought = f"hm{closing}" if how_often % 7 else ""  # one answers at once
            text = f"First, number {how_often}" if cut else f"{thought}answer {how_often}"
            choice = {"message": {"content": text}, "finish_reason": "length" if cut else "stop"}
            return web.json_response({"choices": [choice]})

        return Model(answer)

    for closing, kept, out in (("</think>", 5, "a"), (": ", 7, "b")):
        source, path = own_queries(tmp_path, 2), str(tmp_path / f"{out}.jsonl")
        assert generate(source, tmp_path, thinking(closing), Model(as_shown), output_file=path) == 0
        assert [len(row["responses"]) for row in load_queries(path)] == [kept] * 2
        said = capsys.readouterr().out
        assert f"4 were cut off at max_tokens, {2 * (7 - kept)} of them" in said
        assert "2 of 2 lists name the responses in the order shown" in said
    assert orders_as_shown([[0, 1, 2], [0, 1, 2, 3], (3, 2, 1, 0), [1, 0, 2, 3]]) == 2, "three may stand so by chance"
    path = str(tmp_path / "c.jsonl")
    assert generate(source, tmp_path, thinking("</think>"), Model(as_shown), output_file=path, least_responses=6) == 1
    failed = json.loads((tmp_path / "c.jsonl.failed.jsonl").read_text().splitlines()[0])
    assert "5 different responses of 7; cut off inside its thinking: raise max_tokens=4096" in failed["error"]


def test_generate_responses_writes_no_answer_that_was_withheld_or_in_unknown_tags(tmp_path):
    def answer(messages, how_often):
        withheld = how_often == 3
        text = "<answer>half an" if withheld else f"<answer>answer {how_often % 7}</answer>" * (how_often != 5)
        reason = "content_filter" if withheld else "stop"
        return web.json_response({"choices": [{"message": {"content": text or "No."}, "finish_reason": reason}]})

    source, sampler = own_queries(tmp_path, 1), Model(answer)
    with pytest.raises(SettingsError, match=r"5 of 6 begin with a tag .*set format_check"):
        generate(source, tmp_path, sampler, Model(by_number))
    for check, kept in (("<answer>(?P<answer>.*)</answer>", 5), ("none", 6)):
        out = str(tmp_path / f"{kept}.jsonl")
        again = {"output_file": out, "format_check": check, "least_responses": kept}
        (tmp_path / f"{kept}.jsonl.samples.jsonl").write_bytes((tmp_path / "out.jsonl.samples.jsonl").read_bytes())
        assert generate(source, tmp_path, Model(lambda *_: "No."), Model(as_shown), **again) == 0
        (row,) = load_queries(out)
        assert all(("<answer>" in text) == (check == "none") for text in row["responses"] if text != "No.")


def test_generate_responses_samples_for_an_audit_in_place_of_responses_and_without_order(tmp_path):
    sampler, judge = Model(numbered), Model(by_number)
    source = own_queries(tmp_path, 5, responses=["worse", "better"])
    assert generate(source, tmp_path, sampler, judge, audit_queries=3) == 0
    rows, step = made(tmp_path)
    assert len({row["query_id"] for row in rows}) == 3 and len(sampler.bodies) == 21 and not judge.bodies
    answers = [f"answer {i * 3 % 7}" for i in range(1, 8)]
    assert all(sorted(row["responses"]) == sorted(answers) for row in rows)
    assert any(row["responses"] != sorted(answers) for row in rows)
    assert rows[0]["models"] == ["writer"] * 7
    assert (step["step"], step["model"], step["queries_failed"]) == ("samples", "writer", 0)
    assert generate(source, tmp_path, again := Model(numbered), judge, audit_queries=3) == 0
    assert not again.bodies, "the same queries are drawn again, and their samples are kept"


def test_generate_responses_takes_prompts_alone_and_keeps_responses_that_are_there(tmp_path):
    rows = [{"prompt": "Why?", "responses": ["worse", "better"]}, {"prompt": "How?"}]
    for kind in ("jsonl", "parquet"):
        source, out, sampler = (tmp_path / f"some.{kind}", str(tmp_path / f"out.{kind}"), Model(numbered))
        write_rows(source, rows)
        assert generate(str(source), tmp_path, sampler, Model(by_number), output_file=out) == 0
        found = list(load_queries(out))
        assert [row["prompt"] for row in found] == [[{"role": "user", "content": text}] for text in ("Why?", "How?")]
        assert [row["query_id"] for row in found] == [prompt_id(row["prompt"]) for row in found]
        assert found[0]["responses"] == ["worse", "better"] and len(found[1]["responses"]) == 7
        assert [row.get("models") for row in found] == [None, ["writer"] * 7] and len(sampler.bodies) == 7, kind


def test_generate_responses_finds_what_is_wrong_before_samples_are_paid_for(tmp_path):
    write_rows(tmp_path / "bytes.parquet", [{"prompt": "Why?", "extra": b"1"}])
    for changes, error, said in (
        ({"judge_url": ["http://127.0.0.1:9/v1"]}, JudgeError, r"127\.0\.0\.1:9/v1 cannot be reached"),
        ({"sampler_api_key_env": "NO_KEY"}, SettingsError, "^sampler_api_key_env names .*NO_KEY, which is not set"),
        ({"sampler_url": "http://127.0.0.1:9/v1"}, JudgeError, "^the sampler server .*d, .* does sampler_url name it"),
        ({"output_file": str(tmp_path / "mine.jsonl")}, DataError, "would be lost"),
        ({"dataset_name": str(tmp_path / "bytes.parquet")}, DataError, "has bytes.*name an output_file of .parquet"),
        ({"output_file": str(tmp_path / "out.parquet")}, DataError, "Parquet cannot .*name an output_file of .jsonl"),
    ):
        sampler, judge = Model(numbered), Model(by_number)
        with pytest.raises(error, match=said):
            generate(own_queries(tmp_path, 1, empty={}), tmp_path, sampler, judge, **changes)
        assert not sampler.bodies and not judge.bodies


def test_read_response_refuses_what_is_no_text():
    for answer in ("", " \n", "<think>a</think> ", "<think>a", "a\0b", "\ud800"):
        with pytest.raises(VerdictError, match="inside its thinking" if answer == "<think>a" else "must be"):
            read_response(answer)
    assert len(read_response("<think>x</think>" + "a b" * 350_000)) == 1_050_000


def test_sample_chats_gives_every_sample_and_every_repeat_a_seed_of_its_own():
    chats = sample_chats("q", [], 3, {}, 42)
    assert len({chat.request["seed"] + repeat for chat in chats for repeat in range(10)}) == 30
    assert all(chat.afresh for chat in chats)


def test_responses_config_refuses_what_cannot_work():
    good = {"dataset_name": "x.jsonl", "sampler_url": "http://127.0.0.1:9/v1", "sampler_model": "m"}
    for changes, said in (
        *(({key: None}, "sampler_url and sampler_model must be set") for key in ("sampler_url", "sampler_model")),
        ({"sampler_url": "localhost"}, "^sampler_url must start with http"),
        ({"sampler_url": "http://me:s3cret@host"}, "^sampler_url has .* variable that sampler_api_key_env names"),
        ({"sampler_api_key_env": "s3cret"}, "^sampler_api_key_env must be the name of an environment variable"),
        ({"sampler_request": "{"}, "^sampler_request is not JSON"),
        ({"responses": 3}, r"least_responses must be in 2..responses=3, got 4"),
        ({"least_responses": 1}, r"least_responses must be in 2..responses=7, got 1"),
        ({"dataset_name": None}, "dataset_name is not set"),
        ({"sampler_timeout": 0}, "sampler_timeout must be above 0 seconds, got 0"),
        ({"audit_queries": 0}, "audit_queries must be at least 1, got 0"),
        ({"temperature": -0.1}, "temperature must be at least 0, got -0.1"),
        ({"format_check": "think"}, "think is what is done without it"),
        ({"format_check": "x"}, "has no such group"),
        ({"max_tokens": 0}, "max_tokens must be at least 1, got 0"),
        *(({"top_p": p}, f"top_p must be above 0 and at most 1, got {p}") for p in (0, 1.1)),
    ):
        with pytest.raises(SettingsError, match=said):
            generate_responses.ResponsesConfig(**good | changes)
    config = generate_responses.ResponsesConfig(**good, responses=2, least_responses=2, audit_queries=1)
    assert config.sampler().timeout == 3600 and config.judge_timeout == 120
    billed = replace(config, judge_headers={"X-Run": "mine"}, judge_prompt_price=1.0, judge_cached_price=0.5)
    assert billed.sampler() == config.sampler(), "headers that bill the judge do not go to the sampler's server"
