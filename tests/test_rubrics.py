"""Rubric generation: the paper's prompts, what an answer may be, and the recipe on a loopback model."""

import hashlib
import json
import re
from pathlib import Path

import generate_rubrics
import pytest
from aiohttp import web
from datasets import Dataset
from helpers.nectar_rows import RUBRICS, Model, asked_queries, raw_row, rubrics_text
from helpers.servers import CHAT, served
from hypothesis import given
from hypothesis import strategies as st

from rankbuffer_tools.batch.output import beside, check_output, write_rows
from rankbuffer_tools.data.nectar import to_row
from rankbuffer_tools.data.rubrics import SYSTEM, USER, read_rubrics, rubric_chat
from rankbuffer_trl.data._queries import GENERIC_RUBRICS, DataError, QueryTable, generic_row, load_queries
from rankbuffer_trl.errors import SettingsError
from rankbuffer_trl.judge import JudgeError, VerdictError

pytestmark = pytest.mark.usefixtures("cache")

# The prompts


def test_the_prompts_are_the_papers_letter_by_letter():
    """The hashes are those of the two verbatim blocks of the paper's appendix."""
    found = [hashlib.sha256(text.encode()).hexdigest()[:12] for text in (SYSTEM, USER)]
    assert found == ["73f87e2cb029", "130e66c439ec"]


def messages(n: int, **kwargs) -> list[dict]:
    responses, models = ([f"{what} of rank {rank}" for rank in range(n, 0, -1)] for what in ("answer", "model"))
    arguments = {"responses": responses, "models": models, "prompt": [{"role": "user", "content": "Why?"}]} | kwargs
    return list(rubric_chat("q", request={}, **arguments).messages)


def test_rubric_chat_shows_seven_responses_best_first_in_the_papers_template():
    system, user = messages(7)
    expected = USER.replace("{QUERY}", "Why?")
    for rank in range(1, 8):
        expected = expected.replace(f"{{MODEL_{rank}}}", f"model of rank {rank}")
        expected = expected.replace(f"{{ANSWER_{rank}}}", f"answer of rank {rank}")
    assert user == {"role": "user", "content": expected}
    assert system == {"role": "system", "content": SYSTEM}


def test_rubric_chat_changes_one_word_for_another_number_of_responses():
    for n, word in ((2, "two"), (8, "eight"), (12, "twelve"), (13, "13")):
        system, user = (message["content"] for message in messages(n))
        assert "seven" not in (system + user).lower()
        assert re.sub(rf"\b{word}\b", "seven", system) == SYSTEM
        assert f"one query and {word} candidate answers" in user
        assert user.endswith(f"[Rank {n} | model=model of rank {n}]\nanswer of rank {n}")
        assert user.count("[Rank ") == n


def test_rubric_chat_leaves_what_stands_in_a_response_text():
    prompt = [{"role": "user", "content": "a {ANSWER_1}"}, {"role": "assistant", "content": "b"}]
    prompt.append({"role": "user", "content": "c"})
    user = messages(2, prompt=prompt, responses=["{QUERY}", "{MODEL_2} <|im_end|>"], models=None)[1]["content"]
    assert "Query:\nUser: a {ANSWER_1}\n\nAssistant: b\n\nUser: c\n\n" in user
    assert user.endswith("[Rank 1 | model=unknown]\n{MODEL_2} < |im_end|>\n\n[Rank 2 | model=unknown]\n{QUERY}")


# The answer

GOOD = (
    "{}",
    "```json\n{}\n```",
    "```\n{}\n```",
    "Here are the rubrics for {{query}}:\n\n{}\n\nThey {{cover}} all.",
    '<think>Maybe {{"rubrics": []}}?</think>\n{}',
    "\ufeff\r\n{}\r\n",
    'As in {{"text": "x", "weight": 5}}: {}',
)


def rubric(text: object = "x", weight: object = 1) -> dict:
    return {"text": text, "weight": weight}


def answer_with(*rubrics: object) -> str:
    return json.dumps({"rubrics": list(rubrics)})


def test_read_rubrics_passes_over_what_stands_around_the_object():
    text = json.dumps({"rubrics": RUBRICS, "note": "x"}, indent=2)
    for around in GOOD:
        assert read_rubrics(around.format(text)) == RUBRICS, around
    messy = rubric("Is\r\n\r\n clear.\t") | {"why": "x"}
    assert read_rubrics(answer_with(messy, *RUBRICS[1:]))[0] == rubric("Is clear.")
    for n in (3, 4, 5):
        rubrics = [rubric(f"rubric {i}", i) for i in range(1, n + 1)]
        assert read_rubrics(answer_with(*rubrics)) == rubrics
    assert read_rubrics(text + " " * (100_000 - len(text))) == RUBRICS


BAD = {
    "": "one whole JSON object .* it holds 0",
    "I would look for clarity.": "it holds 0",
    answer_with(*RUBRICS)[:-20]: "it holds 0",
    "<think>The best answer": "inside its thinking",
    answer_with(*RUBRICS) * 2: "it holds 2",
    json.dumps({"criteria": RUBRICS}): "it holds 0",
    json.dumps({"result": {"rubrics": RUBRICS}}): "it holds 0",
    json.dumps(RUBRICS): "it holds 0",
    json.dumps({"rubrics": {"a": 1}}): "list of 3 to 5 rubrics, not dict",
    answer_with(*RUBRICS[:2]): "3 to 5 rubrics, not 2",
    answer_with(*RUBRICS, *RUBRICS): "3 to 5 rubrics, not 6",
    answer_with("Is clear.", *RUBRICS[1:]): "rubric 1 must be an object",
    answer_with(*RUBRICS[1:], {"text": "x"}): "rubric 3 must be an object",
    **{
        answer_with(*RUBRICS[:2], rubric(weight=weight)): rf"weight of rubric 3 .* not {json.dumps(weight)}"
        for weight in (9, 6, 0, "5", 4.5, True, None)
    },
    answer_with(*RUBRICS[:2], rubric(" \n")): "text of rubric 3 must be non-empty",
    answer_with(*RUBRICS[:2], rubric(7)): "text of rubric 3 must be non-empty",
    answer_with(*RUBRICS[:2], rubric("a\0")): "without NUL",
    answer_with(*RUBRICS[:2], rubric("\ud83d")): "without lone surrogates",
    answer_with(*RUBRICS[:2], rubric("is WRITTEN in complete sentences. ")): "two rubrics are the same",
    answer_with(*RUBRICS) + "x" * 100_000: "100,... characters; 100,000 are allowed",
    '{"rubrics": ' + "[" * 50_000: "it holds 0",
    '{"a":' * 20_000: "it holds 0",
}


def test_read_rubrics_names_the_fault_of_everything_else():
    for answer, fault in BAD.items():
        with pytest.raises(VerdictError, match=fault):
            read_rubrics(answer)


def test_read_rubrics_takes_no_draft_of_an_answer_that_was_cut_off():
    text = answer_with(*RUBRICS)
    draft = f"Let me draft: {text} Hmm, rubric two is too vague, so I should"
    assert read_rubrics(draft) == RUBRICS, "a whole answer may say something first"
    with pytest.raises(VerdictError, match="cut off before its verdict"):
        read_rubrics(draft, cut_off=True)
    for whole in (text + " as", f"```json\n{text}", f"{draft}</think>So {text} as"):
        assert read_rubrics(whole, cut_off=True) == RUBRICS
    tags = answer_with(rubric("Shows <thinking> and </thinking>."), *RUBRICS[1:])
    assert read_rubrics(tags)[0]["text"] == "Shows <thinking> and </thinking>."


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=6) | st.dictionaries(st.sampled_from(["rubrics", "text", "weight"]), inner),
    max_leaves=8,
)


@given(json_values, st.text(max_size=5), st.text(max_size=5))
def test_read_rubrics_reads_or_refuses_any_answer(value, before, after):
    try:
        rubrics = read_rubrics(before + json.dumps(value) + after)
    except VerdictError:
        return
    assert 3 <= len(rubrics) <= 5


# The recipe


def rows_of_nectar(howto, n: int) -> list[dict]:
    return [to_row(raw_row(i, howto)) for i in range(n)]


def queries(tmp_path, howto, n: int, name: str = "in.jsonl") -> str:
    write_rows(tmp_path / name, rows_of_nectar(howto, n))
    return str(tmp_path / name)


def settings(source: str, tmp_path, url: str | None, **kwargs) -> generate_rubrics.RubricsConfig:
    endpoint = {"judge_url": f"{url}/v1", "judge_model": "writer"} if url else {}
    arguments = {"judge_max_retries": 0, "output_file": str(tmp_path / "out.jsonl")} | endpoint | kwargs
    return generate_rubrics.RubricsConfig(dataset_name=source, **arguments)


def generate(source: str, tmp_path, model: Model, **kwargs) -> int:
    with served(model.app()) as url:
        return generate_rubrics.main(settings(source, tmp_path, url, **kwargs))


def last_step(tmp_path) -> dict:
    return json.loads((tmp_path / "out.jsonl.provenance.json").read_text())["steps"][-1]


def test_generate_rubrics_adds_them_and_leaves_the_rest(tmp_path, howto, capsys):
    model = Model(rubrics_text)
    source = queries(tmp_path, howto, 12)
    assert generate(source, tmp_path, model, judge_prompt_price=0.5, judge_completion_price=2.0) == 0
    rows = list(load_queries(str(tmp_path / "out.jsonl")))
    assert rows == [row | {"rubrics": RUBRICS} for row in rows_of_nectar(howto, 12)]
    assert len(QueryTable(load_queries(str(tmp_path / "out.jsonl")), 7)) == 12
    assert set(asked_queries(model).values()) == {1}
    assert "[Rank 1 | model=model-1]" in model.bodies[0]["messages"][1]["content"]
    assert beside(tmp_path / "out.jsonl", "answers.jsonl").is_file()
    body = model.bodies[0]
    assert body["temperature"] == 0.2 and body["max_tokens"] == 1024 and body["messages"][0]["content"] == SYSTEM
    out = capsys.readouterr().out
    assert "12 of 12 queries: 12 requests, 1,200 prompt tokens (0 cached), 120 completion tokens; 0.0008 at" in out
    step = last_step(tmp_path)
    assert step["model"] == "writer" and step["cost"]["spent_prompt_tokens"] == 1200 and step["queries_failed"] == 0
    assert (step["step"], step["dataset_name"], step["queries_without"]) == ("rubrics", "in.jsonl", 12)
    assert not beside(tmp_path / "out.jsonl", "failed.jsonl").exists()


def test_generate_rubrics_reads_and_writes_parquet_and_keeps_rubrics_that_are_there(tmp_path, howto):
    rows = rows_of_nectar(howto, 3)
    rows[1]["rubrics"] = [{"text": "Mine.", "weight": 4}]
    for kind in ("jsonl", "parquet"):
        write_rows(tmp_path / f"in.{kind}", rows)
        model, out = Model(rubrics_text), str(tmp_path / f"out.{kind}")
        assert generate(str(tmp_path / f"in.{kind}"), tmp_path, model, output_file=out) == 0
        assert [row["rubrics"] for row in load_queries(out)] == [RUBRICS, [{"text": "Mine.", "weight": 4}], RUBRICS]
        assert sorted(asked_queries(model)) == [0, 2]


def test_generate_rubrics_lists_failed_queries_and_asks_them_alone_the_next_time(tmp_path, howto, capsys):
    def answer(messages, how_often):
        return "no" if "question 2." in messages[1]["content"] else rubrics_text()

    source, ids = queries(tmp_path, howto, 5), [row["query_id"] for row in rows_of_nectar(howto, 5)]
    (tmp_path / "out.jsonl").write_text("older")
    assert generate(source, tmp_path, Model(lambda *_: "no"), temperature=1) == 1
    assert (tmp_path / "out.jsonl").read_text() == "older", "where all fail, an older file stays"
    assert generate(source, tmp_path, Model(answer)) == 3
    failed = [json.loads(line) for line in (tmp_path / "out.jsonl.failed.jsonl").read_text().splitlines()]
    assert [row["query_id"] for row in failed] == [ids[2]]
    assert failed[0]["error"].startswith("malformed: the answer must hold one whole JSON object")
    assert [row["query_id"] for row in load_queries(str(tmp_path / "out.jsonl"))] == ids[:2] + ids[3:]
    assert last_step(tmp_path)["queries_failed"] == 1
    shown = capsys.readouterr()
    assert ids[2] in shown.err and all(f"{n} queries failed and are NOT in it" in shown.err for n in (1, 5))
    assert "7 requests" in shown.out  # three of them in vain

    model = Model(rubrics_text)
    assert generate(source, tmp_path, model) == 0
    assert asked_queries(model) == {2: 1}
    assert [row["query_id"] for row in load_queries(str(tmp_path / "out.jsonl"))] == ids
    assert not (tmp_path / "out.jsonl.failed.jsonl").exists()


def test_generate_rubrics_asks_again_for_another_decoding(tmp_path, howto):
    source = queries(tmp_path, howto, 2)
    generate(source, tmp_path, Model(rubrics_text))
    for kwargs, times in (({}, 0), ({"temperature": 0.3}, 2), ({"judge_request": {"top_p": 0.5}}, 2)):
        model = Model(rubrics_text)
        assert generate(source, tmp_path, model, **kwargs) == 0
        assert asked_queries(model).total() == times
    assert (last_step(tmp_path)["temperature"], last_step(tmp_path)["top_p"]) == (0.2, 0.5)


def test_generate_rubrics_says_that_a_key_is_wrong_before_anything_is_asked(tmp_path, howto, monkeypatch):
    model, status = Model(rubrics_text), [401]

    async def unlisted(request):
        return web.json_response({"error": {"message": "who are you?"}}, status=status[0])

    source = queries(tmp_path, howto, 1)
    monkeypatch.setenv("MY_KEY", "sesame")
    with served(model.app() | {"/v1/models": unlisted}) as url:
        for name, error, said in (
            ("NO_KEY", SettingsError, "variable NO_KEY, which is not set"),
            ("MY_KEY", SettingsError, r"does not take the key.*who are you\?.*variable MY_KEY"),
        ):
            with pytest.raises(error, match=said):
                generate_rubrics.main(settings(source, tmp_path, url, judge_api_key_env=name))
        assert not model.bodies
        for status[0] in (403, 404):  # not every endpoint lists its models
            assert generate_rubrics.main(settings(source, tmp_path / str(status[0]), url)) == 0


@pytest.mark.parametrize(
    "status, kind, said",
    [(401, SettingsError, r"refuses the key, so no more was asked: HTTP 401: who"), (402, JudgeError, "top it up")],
)
def test_generate_rubrics_asks_no_more_once_the_key_or_the_account_is_refused(tmp_path, howto, status, kind, said):
    asked = []

    async def refuse(request):
        asked.append(request)
        return web.json_response({"error": {"message": "who are you?"}}, status=status)

    source = queries(tmp_path, howto, 9)
    app = Model(rubrics_text).app() | {CHAT: refuse}  # it lists its models to anyone
    with served(app) as url, pytest.raises(kind, match=said):
        generate_rubrics.main(settings(source, tmp_path, url, judge_concurrency=2))
    assert len(asked) <= 3


@pytest.mark.parametrize("wrong", [{"temperature": -1.0}, {"max_tokens": 0}])
def test_generate_rubrics_checks_the_sampling(tmp_path, wrong):
    with pytest.raises(SettingsError, match="must be at least"):
        settings("mine.jsonl", tmp_path, None, **wrong)


def test_generate_rubrics_keeps_whole_prompts_apart_in_any_order_of_the_rows(tmp_path):
    forms = ("Café{}?", " Cafe\u0301{}? ")  # the same prompt, by NFC and without white space
    rows = [{"query_id": f"{form} {i}", "prompt": form.format("!" * i)} for i in range(9) for form in forms]
    sets = []
    for order in (rows, rows[::-1]):
        write_rows(tmp_path / "in.jsonl", order)
        out = tmp_path / "out.jsonl"
        words = {"dataset_name": str(tmp_path / "in.jsonl"), "output_file": str(out), "generic": True}
        assert generate_rubrics.main(generate_rubrics.RubricsConfig(**words, keep_apart=3)) == 0
        apart = {row["query_id"] for row in load_queries(str(tmp_path / "out_kept_apart.jsonl"))}
        trained = {row["query_id"] for row in load_queries(str(out))}
        assert (len(apart), len(trained)) == (6, 12) and {id[-1] for id in apart}.isdisjoint(id[-1] for id in trained)
        sets.append(apart)
    assert sets[0] == sets[1]
    with pytest.raises(SettingsError, match="keep_apart=9 leaves none of 9 different prompts"):
        generate_rubrics.main(generate_rubrics.RubricsConfig(**words, keep_apart=9, dry_run=True))
    out.unlink()
    assert generate_rubrics.main(generate_rubrics.RubricsConfig(**words, dry_run=True)) == 0 and not out.exists()


def test_generate_rubrics_does_not_overwrite_its_source(tmp_path, howto):
    source, linked, sub = Path(queries(tmp_path, howto, 1)), tmp_path / "linked.jsonl", tmp_path / "sub"
    sub.mkdir()
    linked.symlink_to(source)
    before = source.read_bytes()
    for read, written in ((source, source), (source, sub / ".." / "in.jsonl"), (source, linked), (linked, source)):
        for generic in (True, False):
            config = settings(str(read), tmp_path, "http://127.0.0.1:9", output_file=str(written), generic=generic)
            with pytest.raises(DataError, match="would be lost: name another one"):
                generate_rubrics.main(config)
    assert source.read_bytes() == before
    (sub / "out.jsonl").mkdir()
    for read, written, said in (
        (tmp_path, tmp_path / "in.jsonl", "whose files are read"),
        (source, sub / "out.jsonl", "is a folder: name a file"),
    ):
        with pytest.raises(DataError, match=said):
            check_output(str(written), str(read))


def test_generate_rubrics_gives_generic_ones_without_a_server_or_responses(tmp_path):
    write_rows(tmp_path / "in.jsonl", [{"query_id": "a", "prompt": [{"role": "user", "content": "Why?"}]}])
    assert generate_rubrics.main(settings(str(tmp_path / "in.jsonl"), tmp_path, None, generic=True)) == 0
    assert QueryTable(load_queries(str(tmp_path / "out.jsonl")))["a"].rubrics == GENERIC_RUBRICS
    assert [rubric.weight for rubric in GENERIC_RUBRICS] == [5, 5, 3, 2, 1] and last_step(tmp_path)["generic"] is True


@pytest.mark.parametrize("rank", ["0", "3"])
def test_query_table_gives_prompts_alone_the_generic_rubrics_and_warns_once(caplog, monkeypatch, rank):
    generic_row.cache_clear()
    monkeypatch.setenv("RANK", rank)
    prompts = Dataset.from_list([{"prompt": "Why?"}, {"prompt": "How?"}])
    table, again = QueryTable(prompts), QueryTable(prompts)
    assert table[table.ids[1]].rubrics == GENERIC_RUBRICS
    assert caplog.text.count("the columns ['prompt'] has no rubrics") == (rank == "0")
    written = [{"text": each.text, "weight": each.weight} for each in GENERIC_RUBRICS]
    assert again.sha256 == QueryTable(prompts.add_column("rubrics", [written] * 2)).sha256
    with pytest.raises(DataError, match="rubrics must be a non-empty list"):
        QueryTable(prompts.add_column("rubrics", [written, None]))


def test_generate_rubrics_refuses_rows_before_anything_is_asked(tmp_path, howto):
    for change, fragment in (
        ({"responses": None}, "no responses to tell apart.*generate_responses"),
        ({"responses": ["a"], "models": None}, "no responses to tell apart"),
        ({"models": ["a"]}, "row 1 .*: models must name who wrote each of the 7 responses"),
    ):
        write_rows(tmp_path / "in.jsonl", [to_row(raw_row(0, howto)) | change])
        with pytest.raises(DataError, match=fragment):
            generate_rubrics.main(settings(str(tmp_path / "in.jsonl"), tmp_path, "http://127.0.0.1:9"))
    write_rows(tmp_path / "in.jsonl", [to_row(raw_row(0, howto)) | {"responses": ["a", "b"], "models": None}])
    assert generate(str(tmp_path / "in.jsonl"), tmp_path, Model(rubrics_text)) == 0
