"""Rubric generation: the paper's prompts, what an answer may be, and the recipe on a loopback model, killed too."""

import asyncio
import hashlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import generate_rubrics
import pytest
from aiohttp import web
from conftest import ROOT
from helpers.http_server import served
from helpers.nectar_rows import RUBRICS, Model, asked_queries, raw_row, rubrics_text
from hypothesis import given
from hypothesis import strategies as st

from rankbuffer_trl.data.nectar import to_row
from rankbuffer_trl.data.output import beside, write_rows
from rankbuffer_trl.data.queries import DataError, QueryTable, load_queries
from rankbuffer_trl.data.rubrics import GENERIC, SYSTEM, USER, read_rubrics, rubric_chat
from rankbuffer_trl.errors import SettingsError
from rankbuffer_trl.judge import JudgeError, VerdictError


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")


# The prompts


def test_the_prompts_are_the_papers_letter_by_letter():
    """The hashes are those of the two verbatim blocks of the paper's appendix."""
    assert [hashlib.sha256(text.encode()).hexdigest()[:12] for text in (SYSTEM, USER)] == [
        "73f87e2cb029",
        "130e66c439ec",
    ]


def messages(n: int, **kwargs) -> list[dict]:
    responses = [f"answer of rank {rank}" for rank in range(n, 0, -1)]
    models = [f"model of rank {rank}" for rank in range(n, 0, -1)]
    arguments = {"responses": responses, "models": models, "prompt": [{"role": "user", "content": "Why?"}]} | kwargs
    return list(rubric_chat("q", request={}, **arguments).messages)


def test_seven_responses_stand_best_first_in_the_papers_template():
    system, user = messages(7)
    expected = USER.replace("{QUERY}", "Why?")
    for rank in range(1, 8):
        expected = expected.replace(f"{{MODEL_{rank}}}", f"model of rank {rank}")
        expected = expected.replace(f"{{ANSWER_{rank}}}", f"answer of rank {rank}")
    assert user == {"role": "user", "content": expected}
    assert system == {"role": "system", "content": SYSTEM}


@pytest.mark.parametrize(("n", "word"), [(2, "two"), (8, "eight"), (12, "twelve"), (13, "13")])
def test_other_numbers_of_responses_change_one_word(n, word):
    system, user = (message["content"] for message in messages(n))
    assert "seven" not in (system + user).lower()
    assert re.sub(rf"\b{word}\b", "seven", system) == SYSTEM
    assert f"one query and {word} candidate answers" in user
    assert user.endswith(f"[Rank {n} | model=model of rank {n}]\nanswer of rank {n}")
    assert user.count("[Rank ") == n


def test_what_stands_in_a_response_stays_text():
    prompt = [{"role": "user", "content": "a {ANSWER_1}"}, {"role": "assistant", "content": "b"}]
    prompt.append({"role": "user", "content": "c"})
    user = messages(2, prompt=prompt, responses=["{QUERY}", "{MODEL_2} <|im_end|>"], models=None)[1]["content"]
    assert "Query:\nUser: a {ANSWER_1}\n\nAssistant: b\n\nUser: c\n\n" in user
    assert user.endswith("[Rank 1 | model=unknown]\n{MODEL_2} < |im_end|>\n\n[Rank 2 | model=unknown]\n{QUERY}")


# The answer

GOOD = {
    "plain": "{}",
    "fenced": "```json\n{}\n```",
    "fenced without a language": "```\n{}\n```",
    "prose around": "Here are the rubrics for {{query}}:\n\n{}\n\nThey {{cover}} all.",
    "after thinking": '<think>Maybe {{"rubrics": []}}?</think>\n{}',
    "CRLF and a byte order mark": "\ufeff\r\n{}\r\n",
    "an example before": 'As in {{"text": "x", "weight": 5}}: {}',
}


@pytest.mark.parametrize("case", GOOD)
def test_text_around_the_object_is_passed_over(case):
    text = json.dumps({"rubrics": RUBRICS, "note": "x"}, indent=2)
    assert read_rubrics(GOOD[case].format(text)) == RUBRICS


def test_white_space_inside_a_rubric_becomes_single_spaces():
    rubrics = [{"text": "Is\r\n\r\n clear.\t", "weight": 1, "why": "x"}, *RUBRICS[1:]]
    assert read_rubrics(json.dumps({"rubrics": rubrics}))[0] == {"text": "Is clear.", "weight": 1}


@pytest.mark.parametrize("n", [3, 4, 5])
def test_three_to_five_rubrics_are_read(n):
    rubrics = [{"text": f"rubric {i}", "weight": i} for i in range(1, n + 1)]
    assert read_rubrics(json.dumps({"rubrics": rubrics})) == rubrics


def answer_with(*rubrics: object) -> str:
    return json.dumps({"rubrics": list(rubrics)})


BAD = {
    "nothing": ("", "one whole JSON object .* it holds 0"),
    "prose": ("I would look for clarity.", "it holds 0"),
    "truncated": (answer_with(*RUBRICS)[:-20], "it holds 0"),
    "cut in thinking": ("<think>The best answer", "inside its thinking"),
    "two objects": (answer_with(*RUBRICS) * 2, "it holds 2"),
    "another key": (json.dumps({"criteria": RUBRICS}), "it holds 0"),
    "one level deeper": (json.dumps({"result": {"rubrics": RUBRICS}}), "it holds 0"),
    "a bare list": (json.dumps(RUBRICS), "it holds 0"),
    "an object of rubrics": (json.dumps({"rubrics": {"a": 1}}), "list of 3 to 5 rubrics, not dict"),
    "two rubrics": (answer_with(*RUBRICS[:2]), "3 to 5 rubrics, not 2"),
    "six rubrics": (answer_with(*RUBRICS, *RUBRICS), "3 to 5 rubrics, not 6"),
    "a text for a rubric": (answer_with("Is clear.", *RUBRICS[1:]), "rubric 1 must be an object"),
    "no weight": (answer_with(*RUBRICS[1:], {"text": "x"}), "rubric 3 must be an object"),
    "weight 9": (answer_with(*RUBRICS[:2], {"text": "x", "weight": 9}), "weight of rubric 3 .* not 9"),
    "weight 0": (answer_with(*RUBRICS[:2], {"text": "x", "weight": 0}), "weight of rubric 3 .* not 0"),
    'weight "5"': (answer_with(*RUBRICS[:2], {"text": "x", "weight": "5"}), 'weight of rubric 3 .* not "5"'),
    "weight 4.5": (answer_with(*RUBRICS[:2], {"text": "x", "weight": 4.5}), "weight of rubric 3 .* not 4.5"),
    "weight true": (answer_with(*RUBRICS[:2], {"text": "x", "weight": True}), "weight of rubric 3 .* not true"),
    "empty text": (answer_with(*RUBRICS[:2], {"text": " \n", "weight": 1}), "text of rubric 3 must be non-empty"),
    "text is a number": (answer_with(*RUBRICS[:2], {"text": 7, "weight": 1}), "text of rubric 3 must be non-empty"),
    "NUL": (answer_with(*RUBRICS[:2], {"text": "a\0", "weight": 1}), "without NUL"),
    "lone surrogate": (answer_with(*RUBRICS[:2], {"text": "\ud83d", "weight": 1}), "without lone surrogates"),
    "twice the same": (answer_with(*RUBRICS[:2], {"text": "is WRITTEN in complete sentences. ", "weight": 1}), "same"),
    "a megabyte": (answer_with(*RUBRICS) + " " * 1_000_000, "1,000,.* characters; 100,000 are allowed"),
    "deeply nested": ('{"rubrics": ' + "[" * 50_000, "it holds 0"),
    "many beginnings": ('{"a":' * 20_000, "it holds 0"),
}


@pytest.mark.parametrize("case", BAD)
def test_everything_else_is_a_fault_that_is_named(case):
    answer, fault = BAD[case]
    with pytest.raises(VerdictError, match=fault):
        read_rubrics(answer)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=6) | st.dictionaries(st.sampled_from(["rubrics", "text", "weight"]), inner),
    max_leaves=8,
)


@given(json_values, st.text(max_size=5), st.text(max_size=5))
def test_any_answer_is_read_or_refused(value, before, after):
    try:
        rubrics = read_rubrics(before + json.dumps(value) + after)
    except VerdictError:
        return
    assert 3 <= len(rubrics) <= 5


# The recipe


def queries(tmp_path, howto, n: int, name: str = "in.jsonl") -> str:
    path = tmp_path / name
    write_rows(path, [to_row(raw_row(i, howto)) for i in range(n)])
    return str(path)


def settings(source: str, tmp_path, url: str | None, **kwargs) -> generate_rubrics.RubricsConfig:
    endpoint = {"judge_url": f"{url}/v1", "judge_model": "writer"} if url else {}
    arguments = {"judge_max_retries": 0, "output_file": str(tmp_path / "out.jsonl")} | endpoint | kwargs
    return generate_rubrics.RubricsConfig(dataset_name=source, **arguments)


def generate(source: str, tmp_path, model: Model, **kwargs) -> int:
    with served(model.app()) as url:
        return generate_rubrics.main(settings(source, tmp_path, url, **kwargs))


def test_every_query_gets_its_rubrics_and_the_rest_stays(tmp_path, howto, capsys):
    model = Model(rubrics_text)
    source = queries(tmp_path, howto, 12)
    assert generate(source, tmp_path, model, judge_prompt_price=0.5, judge_completion_price=2.0) == 0
    rows = list(load_queries(str(tmp_path / "out.jsonl")))
    assert rows == [to_row(raw_row(i, howto)) | {"rubrics": RUBRICS} for i in range(12)]
    assert len(QueryTable(load_queries(str(tmp_path / "out.jsonl")), 7)) == 12
    assert set(asked_queries(model).values()) == {1}
    body = model.bodies[0]
    assert body["temperature"] == 0.2 and body["max_tokens"] == 1024 and body["messages"][0]["content"] == SYSTEM
    out = capsys.readouterr().out
    assert "12 of 12 queries: 12 requests, 1,200 prompt tokens (0 cached), 120 completion tokens; 0.0008 at" in out
    [step] = json.loads((tmp_path / "out.jsonl.provenance.json").read_text())["steps"]
    assert step["model"] == "writer" and step["cost"]["spent_prompt_tokens"] == 1200 and step["queries_failed"] == 0
    assert not beside(tmp_path / "out.jsonl", "failed.jsonl").exists()


def test_parquet_goes_in_and_comes_out(tmp_path, howto):
    source = queries(tmp_path, howto, 3, "in.parquet")
    assert generate(source, tmp_path, Model(rubrics_text), output_file=str(tmp_path / "out.parquet")) == 0
    assert len(QueryTable(load_queries(str(tmp_path / "out.parquet")), 7)) == 3


def test_a_faulty_answer_is_asked_again_with_the_fault(tmp_path, howto):
    def answer(messages, how_often):
        if how_often == 1:
            return answer_with(*RUBRICS, *RUBRICS)
        assert "not 6" in messages[-1]["content"]
        return f"```json\n{rubrics_text()}\n```"

    model = Model(answer)
    assert generate(queries(tmp_path, howto, 4), tmp_path, model) == 0
    assert set(asked_queries(model).values()) == {2}


def test_failed_queries_are_listed_and_asked_alone_the_next_time(tmp_path, howto, capsys):
    def answer(messages, how_often):
        return "no" if "question 2." in messages[1]["content"] else rubrics_text()

    source, model = queries(tmp_path, howto, 5), Model(answer)
    assert generate(source, tmp_path, model) == 1
    failed = [json.loads(line) for line in (tmp_path / "out.jsonl.failed.jsonl").read_text().splitlines()]
    bad = to_row(raw_row(2, howto))["query_id"]
    assert [row["query_id"] for row in failed] == [bad]
    assert failed[0]["error"].startswith("malformed: the answer must hold one whole JSON object")
    assert len(list(load_queries(str(tmp_path / "out.jsonl")))) == 4
    shown = capsys.readouterr()
    assert "1 queries failed and are NOT in it" in shown.err and bad in shown.err
    assert "7 requests" in shown.out  # three of them in vain

    model = Model(rubrics_text)
    assert generate(source, tmp_path, model) == 0
    assert asked_queries(model) == {2: 1}
    assert [row["query_id"] for row in load_queries(str(tmp_path / "out.jsonl"))] == [
        to_row(raw_row(i, howto))["query_id"] for i in range(5)
    ]
    assert not (tmp_path / "out.jsonl.failed.jsonl").exists()


def test_where_all_fail_an_older_file_stays(tmp_path, howto):
    source = queries(tmp_path, howto, 2)
    (tmp_path / "out.jsonl").write_text("older")
    assert generate(source, tmp_path, Model(lambda *_: "no")) == 1
    assert (tmp_path / "out.jsonl").read_text() == "older"
    assert len((tmp_path / "out.jsonl.failed.jsonl").read_text().splitlines()) == 2


def test_other_words_or_another_decoding_are_asked_again(tmp_path, howto):
    source = queries(tmp_path, howto, 2)
    generate(source, tmp_path, Model(rubrics_text))
    for kwargs, times in (({}, 0), ({"temperature": 0.3}, 2), ({"judge_request": {"top_p": 0.5}}, 2)):
        model = Model(rubrics_text)
        assert generate(source, tmp_path, model, **kwargs) == 0
        assert asked_queries(model).total() == times
    [step] = json.loads((tmp_path / "out.jsonl.provenance.json").read_text())["steps"]
    assert (step["temperature"], step["top_p"]) == (0.2, 0.5)


def test_a_rate_limit_is_waited_out(tmp_path, howto):
    def answer(messages, how_often):
        if how_often == 1:
            return web.json_response({"error": {"message": "slow down"}}, status=429, headers={"Retry-After": "0.01"})
        return rubrics_text()

    model = Model(answer)
    assert generate(queries(tmp_path, howto, 3), tmp_path, model, judge_max_retries=2) == 0
    assert set(asked_queries(model).values()) == {2}


def test_an_endpoint_that_is_not_there_is_said_before_anything_is_asked(tmp_path, howto):
    source, model = queries(tmp_path, howto, 2), Model(rubrics_text)
    refused = pytest.raises(JudgeError, match="does not serve judge_model='other'; it serves 'writer'")
    with served(model.app()) as url, refused:
        generate_rubrics.main(settings(source, tmp_path, url, judge_model="other"))
    with pytest.raises(JudgeError, match="cannot be reached"):
        generate_rubrics.main(settings(source, tmp_path, url))
    assert not model.bodies and not (tmp_path / "out.jsonl").exists()


def test_a_wrong_key_is_said_before_anything_is_asked(tmp_path, howto, monkeypatch):
    model, status = Model(rubrics_text), [401]
    app = model.app()

    @web.middleware
    async def unlisted(request, handler):
        if request.path == "/v1/models":
            return web.json_response({"error": {"message": "who are you?"}}, status=status[0])
        return await handler(request)

    app.middlewares.append(unlisted)
    source = queries(tmp_path, howto, 1)
    with served(app) as url:
        with pytest.raises(SettingsError, match="variable MY_KEY, which is not set"):
            generate_rubrics.main(settings(source, tmp_path, url, judge_api_key_env="MY_KEY"))
        monkeypatch.setenv("MY_KEY", "sesame")
        with pytest.raises(JudgeError, match=r"does not take the key.*who are you\?.*variable MY_KEY"):
            generate_rubrics.main(settings(source, tmp_path, url, judge_api_key_env="MY_KEY"))
        assert not model.bodies
        for status[0] in (403, 404):  # not every endpoint lists its models
            assert generate_rubrics.main(settings(source, tmp_path / str(status[0]), url)) == 0


@pytest.mark.parametrize("way", ["the same path", "a link", "a link to it"])
def test_the_source_is_not_overwritten(tmp_path, howto, way):
    source = Path(queries(tmp_path, howto, 1))
    before = source.read_bytes()
    out = tmp_path / "sub" / ".." / "in.jsonl" if way == "the same path" else tmp_path / "other.jsonl"
    (tmp_path / "sub").mkdir()
    if way == "a link":
        out.symlink_to(source)
    elif way == "a link to it":
        out, source = source, out
        source.symlink_to(out)
    for generic in (True, False):
        config = settings(str(source), tmp_path, "http://127.0.0.1:9", output_file=str(out), generic=generic)
        with pytest.raises(DataError, match="would be lost: name another one"):
            generate_rubrics.main(config)
    assert source.read_bytes() == before


def test_rows_that_have_rubrics_keep_them(tmp_path, howto):
    rows = [to_row(raw_row(i, howto)) for i in range(3)]
    rows[1]["rubrics"] = [{"text": "Mine.", "weight": 4}]
    write_rows(tmp_path / "in.jsonl", rows)
    model = Model(rubrics_text)
    assert generate(str(tmp_path / "in.jsonl"), tmp_path, model) == 0
    made = [row["rubrics"] for row in load_queries(str(tmp_path / "out.jsonl"))]
    assert made == [RUBRICS, [{"text": "Mine.", "weight": 4}], RUBRICS]
    assert sorted(asked_queries(model)) == [0, 2]


def test_generic_rubrics_ask_nobody_and_need_no_responses(tmp_path):
    write_rows(tmp_path / "in.jsonl", [{"query_id": "a", "prompt": [{"role": "user", "content": "Why?"}]}])
    assert generate_rubrics.main(settings(str(tmp_path / "in.jsonl"), tmp_path, None, generic=True)) == 0
    table = QueryTable(load_queries(str(tmp_path / "out.jsonl")))
    assert table["a"].rubrics == GENERIC
    assert 3 <= len(GENERIC) <= 5


REFUSED = {
    "no responses": ({"responses": None}, DataError, "no responses to tell apart.*generate_responses"),
    "one response": ({"responses": ["a"], "models": None}, DataError, "no responses to tell apart"),
    "models of others": ({"models": ["a"]}, DataError, "models must name who wrote each of the 7 responses"),
    "models are no text": ({"models": [None, 3] * 3 + [None]}, DataError, r"models\[0\] must be non-empty text"),
    "models are no list": ({"models": "gpt-4"}, DataError, "models must be a list of text, got 'gpt-4'"),
    "response is a number": ({"responses": [1, 2, 3]}, DataError, r"row 1 .*responses\[0\] must be non-empty text"),
    "NUL": ({"responses": ["a\0", "b"]}, DataError, r"responses\[0\] must be text without NUL"),
    "no id": ({"query_id": ""}, DataError, "row 1 .*: query_id"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_rows_that_cannot_be_asked_about_are_refused_before_anything_is_asked(tmp_path, howto, case):
    change, error, fragment = REFUSED[case]
    write_rows(tmp_path / "in.jsonl", [to_row(raw_row(0, howto)) | change])
    with pytest.raises(error, match=fragment):
        generate_rubrics.main(settings(str(tmp_path / "in.jsonl"), tmp_path, "http://127.0.0.1:9"))


def test_duplicate_ids_are_refused(tmp_path, howto):
    write_rows(tmp_path / "in.jsonl", [to_row(raw_row(0, howto))] * 2)
    with pytest.raises(DataError, match=r"row 2: the query_id .* is that of row 1, too"):
        generate_rubrics.main(settings(str(tmp_path / "in.jsonl"), tmp_path, "http://127.0.0.1:9"))


def test_wrong_settings_are_named(tmp_path):
    with pytest.raises(ValueError, match=r"judge_url is not set.*--generic true"):
        settings("x.jsonl", tmp_path, None)
    with pytest.raises(ValueError, match="dataset_name is not set"):
        settings("", tmp_path, "http://127.0.0.1:9")
    with pytest.raises(DataError, match=r"nowhere\.jsonl does not exist"):
        generate_rubrics.main(settings(str(tmp_path / "nowhere.jsonl"), tmp_path, "http://127.0.0.1:9"))


def command(source: str, out, url: str) -> list[str]:
    words = ["recipes/generate_rubrics.py", "--dataset_name", source, "--output_file", str(out)]
    return [sys.executable, *words, "--judge_url", f"{url}/v1", "--judge_model", "writer", "--judge_concurrency", "4"]


@pytest.mark.slow
def test_killed_and_started_again_it_asks_nothing_twice(tmp_path, howto):
    """A real process, killed by SIGKILL after 20 answers with 4 requests in flight that are never answered."""
    source, out = queries(tmp_path, howto, 40), tmp_path / "out.jsonl"
    log = beside(out, "answers.jsonl")
    model = Model(rubrics_text)
    app = model.app()

    @web.middleware
    async def stuck_after_20(request, handler):
        if request.method == "POST" and len(model.bodies) >= 20:
            model.bodies.append(await request.json())
            await asyncio.Event().wait()
        return await handler(request)

    app.middlewares.append(stuck_after_20)
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    with served(app) as url:
        job = subprocess.Popen(
            command(source, out, url), cwd=ROOT, env=environment, start_new_session=True, stderr=subprocess.PIPE
        )
        try:
            deadline = time.monotonic() + 120
            while len(model.bodies) < 24 or log.read_bytes().count(b"\n") < 20:
                assert job.poll() is None, job.stderr.read().decode()[-2000:]
                assert time.monotonic() < deadline
                time.sleep(0.02)
        finally:
            os.killpg(job.pid, signal.SIGKILL)
            job.wait(20)
            job.stderr.close()
    assert not out.exists()
    answered = asked_queries(model)
    assert answered.total() == 20
    log.write_bytes(log.read_bytes() + b'{"key": "torn')  # as a kill in the middle of a line leaves it

    again = Model(rubrics_text)
    assert generate(source, tmp_path, again) == 0
    assert asked_queries(again).keys() == set(range(40)) - answered.keys()
    assert set(asked_queries(again).values()) == {1}
    rows = list(load_queries(str(out)))
    assert rows == [to_row(raw_row(i, howto)) | {"rubrics": RUBRICS} for i in range(40)]
    [step] = json.loads((tmp_path / "out.jsonl.provenance.json").read_text())["steps"]
    assert step["cost"]["calls"] == 40, "what the killed run paid for counts too"

    done = Model(rubrics_text)
    assert generate(source, tmp_path, done) == 0 and not done.bodies
