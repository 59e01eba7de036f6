"""Responses for queries of one's own: sampled, ranked once, resumed; failures listed."""

import json
import re

import generate_responses
import pytest
from helpers.http_server import served
from helpers.nectar_rows import Model

from rankbuffer_trl.data.output import write_rows
from rankbuffer_trl.data.queries import DataError, load_queries, prompt_id
from rankbuffer_trl.data.responses import order_question, read_response, sample_chats
from rankbuffer_trl.data.rubrics import GENERIC
from rankbuffer_trl.errors import SettingsError
from rankbuffer_trl.groups import Query
from rankbuffer_trl.judge import JudgeError, VerdictError
from rankbuffer_trl.judge.questions import weighted_rubrics


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")


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


def generate(source: str, tmp_path, sampler: Model, judge: Model, **kwargs) -> int:
    with served(sampler.app()) as sampler_url, served(judge.app()) as judge_url:
        config = generate_responses.ResponsesConfig(
            dataset_name=source,
            **{"output_file": str(tmp_path / "out.jsonl")}
            | {"sampler_url": f"{sampler_url}/v1", "sampler_model": "writer"}
            | {"judge_url": f"{judge_url}/v1", "judge_model": "writer", "judge_max_retries": 0}
            | kwargs,
        )
        return generate_responses.main(config)


def test_responses_are_sampled_and_stand_worst_to_best(tmp_path):
    sampler, judge = Model(numbered), Model(by_number)
    assert generate(own_queries(tmp_path, 3), tmp_path, sampler, judge, sampler_request={"top_k": 20}) == 0
    rows = list(load_queries(str(tmp_path / "out.jsonl")))
    assert [row["responses"] for row in rows] == [[f"answer {i}" for i in range(7)]] * 3
    assert rows[0]["models"] == ["writer"] * 7
    assert len(sampler.bodies) == 21 and len(judge.bodies) == 3
    body = sampler.bodies[0]
    assert (body["temperature"], body["top_p"], body["top_k"], body["max_tokens"]) == (0.6, 0.95, 20, 4096)
    assert sorted(b["seed"] for b in sampler.bodies) == sorted([42 + 1000 * i for i in range(7)] * 3)
    assert weighted_rubrics(GENERIC) in judge.bodies[0]["messages"][0]["content"]
    [step] = json.loads((tmp_path / "out.jsonl.provenance.json").read_text())["steps"]
    assert step["model"] == step["ranked_by"] == "writer" and step["cost"]["calls"] == 21
    assert (step["temperature"], step["top_k"], step["seed"]) == (0.6, 20, 42)

    again = Model(numbered)
    assert generate(own_queries(tmp_path, 4), tmp_path, again, judge, sampler_request={"top_k": 20}) == 0
    assert len(again.bodies) == 7 and len(judge.bodies) == 4, "only the new query is asked about"


def test_a_file_of_prompts_alone_is_enough(tmp_path):
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "Why?"}\n{"prompt": "How?"}\n')
    assert generate(str(tmp_path / "prompts.jsonl"), tmp_path, Model(numbered), Model(by_number)) == 0
    rows = list(load_queries(str(tmp_path / "out.jsonl")))
    assert [row["prompt"] for row in rows] == [[{"role": "user", "content": text}] for text in ("Why?", "How?")]
    assert [row["query_id"] for row in rows] == [prompt_id(row["prompt"]) for row in rows]
    assert all(len(row["responses"]) == 7 for row in rows)


def test_a_querys_own_rubrics_order_its_responses():
    mine = [{"text": "Mine.", "weight": 4}]
    row = {"query_id": "q", "prompt": [{"role": "user", "content": "Why?"}]}

    def question(**rubrics):
        return order_question(Query.from_row(row | rubrics), ["a", "b"])

    assert "1.[weight=4] Mine." in question(rubrics=mine).prompt()
    assert weighted_rubrics(GENERIC) in question().prompt()
    assert weighted_rubrics(GENERIC) in question(rubrics=None).prompt()
    assert question(rubrics=[]).kind == "bootstrap"


def test_failures_are_listed_and_asked_again_alone(tmp_path, capsys):
    def sometimes(messages, how_often):
        return "the same" if messages[0]["content"] == "Question 1?" else numbered(messages, how_often)

    def confused(messages, how_often):
        return "no" if "Question 2?" in messages[0]["content"] else by_number(messages, how_often)

    sampler, judge = Model(sometimes), Model(confused)
    source = own_queries(tmp_path, 4)
    assert generate(source, tmp_path, sampler, judge) == 1
    failed = {
        row["query_id"]: row["error"]
        for row in map(json.loads, (tmp_path / "out.jsonl.failed.jsonl").read_text().splitlines())
    }
    assert failed.keys() == {"q1", "q2"}
    assert failed["q1"] == "1 different responses of 7; the others are the same"
    assert failed["q2"].startswith("no order of its responses: malformed")
    assert [row["query_id"] for row in load_queries(str(tmp_path / "out.jsonl"))] == ["q0", "q3"]
    assert "2 queries failed and are NOT in it" in capsys.readouterr().err

    sampler, judge = Model(sometimes), Model(by_number)
    assert generate(source, tmp_path, sampler, judge) == 1
    assert not sampler.bodies and len(judge.bodies) == 1
    assert [row["query_id"] for row in load_queries(str(tmp_path / "out.jsonl"))] == ["q0", "q2", "q3"]


def test_a_sample_that_cannot_be_read_is_asked_afresh(tmp_path):
    def at_first_cut(messages, how_often):
        assert len(messages) == 1
        return "<think>endless" if how_often <= 2 else numbered(messages, how_often)

    sampler = Model(at_first_cut)
    assert generate(own_queries(tmp_path, 1), tmp_path, sampler, Model(by_number)) == 0
    assert len(sampler.bodies) == 9 and len({body["seed"] for body in sampler.bodies}) == 9


def test_rows_that_have_responses_keep_them(tmp_path):
    sampler = Model(numbered)
    source = own_queries(tmp_path, 2, responses=["worse", "better"])
    assert generate(source, tmp_path, sampler, Model(by_number)) == 0
    assert not sampler.bodies
    assert [row["responses"] for row in load_queries(str(tmp_path / "out.jsonl"))] == [["worse", "better"]] * 2


def test_samples_for_an_audit_replace_responses_and_are_not_ordered(tmp_path):
    sampler, judge = Model(numbered), Model(by_number)
    source = own_queries(tmp_path, 5, responses=["worse", "better"])
    assert generate(source, tmp_path, sampler, judge, audit_queries=3) == 0
    rows = list(load_queries(str(tmp_path / "out.jsonl")))
    assert len({row["query_id"] for row in rows}) == 3 and len(sampler.bodies) == 21 and not judge.bodies
    answers = [f"answer {i * 3 % 7}" for i in range(1, 8)]
    assert all(sorted(row["responses"]) == sorted(answers) for row in rows)
    assert any(row["responses"] != sorted(answers) for row in rows)
    assert rows[0]["models"] == ["writer"] * 7
    [step] = json.loads((tmp_path / "out.jsonl.provenance.json").read_text())["steps"]
    assert step["step"] == "samples" and step["model"] == "writer"
    again = Model(numbered)
    assert generate(source, tmp_path, again, judge, audit_queries=3) == 0
    assert not again.bodies, "the same queries are drawn again, and their samples are kept"
    with pytest.raises(SettingsError, match="audit_queries must be at least 1, got 0"):
        generate(source, tmp_path, again, judge, audit_queries=0)


@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_rows_with_and_without_responses_keep_who_wrote_them(tmp_path, kind):
    rows = [{"query_id": f"q{i}", "prompt": [{"role": "user", "content": f"Question {i}?"}]} for i in range(2)]
    rows[0]["responses"] = ["worse", "better"]
    write_rows(tmp_path / f"some.{kind}", rows)
    out = str(tmp_path / f"out.{kind}")
    assert generate(str(tmp_path / f"some.{kind}"), tmp_path, Model(numbered), Model(by_number), output_file=out) == 0
    assert [row.get("models") for row in load_queries(out)] == [None, ["writer"] * 7]


def test_a_source_is_not_overwritten(tmp_path):
    source = own_queries(tmp_path, 1)
    with pytest.raises(DataError, match="would be lost"):
        generate(source, tmp_path, Model(numbered), Model(by_number), output_file=source)


def test_the_sampler_has_a_time_of_its_own():
    url = "http://127.0.0.1:9/v1"
    config = generate_responses.ResponsesConfig(dataset_name="x.jsonl", sampler_url=url, sampler_model="m")
    assert config.sampler().timeout == 3600 and config.judge_timeout == 120


def test_both_endpoints_are_there_before_samples_are_paid_for(tmp_path):
    sampler = Model(numbered)
    with pytest.raises(JudgeError, match=r"127\.0\.0\.1:9/v1 cannot be reached"):
        generate(own_queries(tmp_path, 1), tmp_path, sampler, Model(by_number), judge_url=["http://127.0.0.1:9/v1"])
    assert not sampler.bodies
    with pytest.raises(SettingsError, match=r"^sampler_api_key_env names .*NO_KEY, which is not set"):
        generate(own_queries(tmp_path, 1), tmp_path, sampler, Model(by_number), sampler_api_key_env="NO_KEY")
    with pytest.raises(JudgeError, match=r"^the sampler server .*cannot be reached, .* does sampler_url name it"):
        generate(own_queries(tmp_path, 1), tmp_path, sampler, Model(by_number), sampler_url="http://127.0.0.1:9/v1")


@pytest.mark.parametrize("answer", ["", " \n", "<think>a</think> ", "<think>a", "a\0b", "\ud800"])
def test_what_is_no_response_is_refused(answer):
    with pytest.raises(VerdictError):
        read_response(answer)


def test_a_response_of_a_megabyte_is_read():
    assert len(read_response("<think>x</think>" + "a b" * 350_000)) == 1_050_000


def test_every_sample_and_every_repeat_has_a_seed_of_its_own():
    chats = sample_chats("q", [], 3, {}, 42)
    seeds = {chat.request["seed"] + repeat for chat in chats for repeat in range(10)}
    assert len(seeds) == 30 and all(chat.afresh for chat in chats)


@pytest.mark.parametrize(
    ("kwargs", "fragment"),
    [
        ({"sampler_url": None}, "sampler_url and sampler_model must be set"),
        ({"sampler_model": None}, "sampler_url and sampler_model must be set"),
        ({"sampler_url": "localhost"}, "^sampler_url must start with http"),
        ({"sampler_url": "http://me:s3cret@host"}, "^sampler_url has .* variable that sampler_api_key_env names"),
        ({"sampler_api_key_env": "s3cret"}, "^sampler_api_key_env must be the name of an environment variable"),
        ({"sampler_request": "{"}, "^sampler_request is not JSON"),
        ({"responses": 3}, r"least_responses must be in 2..responses=3, got 4"),
        ({"least_responses": 1}, r"least_responses must be in 2..responses=7, got 1"),
        ({"dataset_name": None}, "dataset_name is not set"),
        ({"sampler_timeout": 0}, "sampler_timeout must be above 0 seconds, got 0"),
    ],
)
def test_wrong_settings_are_named(kwargs, fragment):
    good = {"dataset_name": "x.jsonl", "sampler_url": "http://127.0.0.1:9/v1", "sampler_model": "m"}
    with pytest.raises(ValueError, match=fragment):
        generate_responses.ResponsesConfig(**good | kwargs)


def test_rows_that_are_no_queries_are_refused(tmp_path):
    source = own_queries(tmp_path, 2, prompt=[{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}])
    with pytest.raises(DataError, match=r"row 1 \(query_id 'q0'\): prompt must end with a user message"):
        generate(source, tmp_path, Model(numbered), Model(by_number))
