"""The training set: good files load, and every bad row is refused with its place, key and value."""

import copy
import json

import pytest
from datasets import Dataset

from rankbuffer_trl.data.queries import DataError, QueryTable, iterate, load_queries
from rankbuffer_trl.groups import Query, Rubric

USER = {"role": "user", "content": "How?"}
RUBRIC = {"text": "Is clear.", "weight": 5}


def good_rows(n: int = 2) -> list[dict]:
    return [
        {
            "query_id": f"q{i}",
            "prompt": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": f"How {i}?"}],
            "rubrics": [{"text": "Is clear.", "weight": 5}, {"text": "Is short.", "weight": 1}],
            "responses": [f"worst {i}", "bad", "good", "best"],
        }
        for i in range(n)
    ]


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")


def write(path, content: list[dict]):
    if path.suffix == ".jsonl":
        path.write_text("".join(json.dumps(row) + "\n" for row in content), encoding="utf-8")
    elif path.suffix == ".json":
        path.write_text(json.dumps(content), encoding="utf-8")
    else:
        Dataset.from_list(content).to_parquet(str(path))
    return path


@pytest.mark.parametrize("name", ["q.jsonl", "q.json", "q.parquet"])
def test_every_kind_of_file_gives_the_same_queries(tmp_path, name):
    table = QueryTable(load_queries(str(write(tmp_path / name, good_rows()))), anchors_needed=4)
    assert len(table) == 2
    assert "q1" in table
    assert "q2" not in table
    assert table.ids == ["q0", "q1"]
    assert table["q1"] == Query(
        "q1",
        [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "How 1?"}],
        (Rubric("Is clear.", 5), Rubric("Is short.", 1)),
        ("worst 1", "bad", "good", "best"),
    )


def test_the_quickstart_data_can_be_trained_on(howto):
    table = QueryTable(Dataset.from_list(howto), anchors_needed=4)
    assert [table[row["query_id"]].responses for row in howto] == [tuple(row["responses"]) for row in howto]


def set_key(key, value):
    def change(row):
        row[key] = value

    return change


BAD_ROWS = {
    "empty id": (set_key("query_id", ""), ["row 2", "query_id must be non-empty text, got ''"]),
    "blank id": (set_key("query_id", "  "), ["row 2", "query_id must be non-empty text"]),
    "duplicate id": (set_key("query_id", "q0"), ["row 2: the query_id 'q0' is that of row 1, too"]),
    "empty prompt": (
        set_key("prompt", []),
        ["row 2 (query_id 'q1')", "prompt must be a text or a list of messages", "got []"],
    ),
    "no prompt": (set_key("prompt", None), ["row 2", "prompt must be a text or a list of messages", "got None"]),
    "ends in assistant": (
        set_key("prompt", [USER, {"role": "assistant", "content": "So."}]),
        ["row 2", "prompt must end with a user message, got 'assistant'"],
    ),
    "ends in system": (
        set_key("prompt", [{"role": "system", "content": "So."}]),
        ["must end with a user", "'system'"],
    ),
    "null content": (
        set_key("prompt", [{"role": "user", "content": None}]),
        ["row 2", "prompt[0].content must be non-empty text, got None"],
    ),
    "empty content": (
        set_key("prompt", [USER, {"role": "user", "content": " "}]),
        ["row 2", "prompt[1].content must be non-empty text, got ' '"],
    ),
    "null role": (set_key("prompt", [{"role": None, "content": "Be brief."}, USER]), ["row 2", "prompt[0]", "role"]),
    "rubrics empty": (set_key("rubrics", []), ["row 2", "rubrics must be a non-empty list, got []"]),
    "no rubrics": (set_key("rubrics", None), ["row 2", "rubrics must be a non-empty list, got None"]),
    "rubric with empty text": (
        set_key("rubrics", [RUBRIC, {"text": "", "weight": 5}]),
        ["row 2", "rubrics[1].text must be non-empty text, got ''"],
    ),
    "rubric with null text": (
        set_key("rubrics", [{"text": None, "weight": 5}]),
        ["rubrics[0].text must be", "got None"],
    ),
    "weight 0": (
        set_key("rubrics", [{"text": "Is clear.", "weight": 0}]),
        ["row 2", "rubrics[0].weight must be an integer from 1 to 5, got 0"],
    ),
    "weight 6": (set_key("rubrics", [RUBRIC, {"text": "x", "weight": 6}]), ["rubrics[1].weight", "1 to 5, got 6"]),
    "weight null": (set_key("rubrics", [{"text": "x", "weight": None}]), ["rubrics[0].weight", "got None"]),
    "too few responses": (
        set_key("responses", ["worst", "bad", "best"]),
        ["row 2", "responses must hold at least 4 responses", "got 3"],
    ),
    "no responses": (set_key("responses", None), ["row 2", "responses must be a list of text", "got None"]),
    "empty response": (
        set_key("responses", ["worst", "bad", "good", " \n"]),
        ["row 2", "responses[3] must be non-empty text"],
    ),
    "null response": (set_key("responses", ["worst", None, "good", "best"]), ["responses[1] must be", "got None"]),
}


@pytest.mark.parametrize("case", BAD_ROWS)
def test_a_bad_row_is_refused_with_its_place(case):
    change, fragments = BAD_ROWS[case]
    data = good_rows()
    change(data[1])
    with pytest.raises(DataError) as error:
        QueryTable(Dataset.from_list(data), anchors_needed=4)
    assert [fragment for fragment in fragments if fragment not in str(error.value)] == []


BAD_TABLES = {  # faults of a column's type, which all rows of an Arrow table share
    "message without content": ("prompt", [{"role": "user"}], "prompt[0] must have role and content"),
    "message without role": ("prompt", [{"content": "How?"}], "prompt[0] must have role and content"),
    "prompt is a number": ("prompt", 3, "prompt must be a text or a list of messages"),
    "prompt of texts": ("prompt", ["How?"], "prompt[0] must have role and content, got 'How?'"),
    "content is a number": (
        "prompt",
        [{"role": "user", "content": 3}],
        "prompt[0].content must be non-empty text, got 3",
    ),
    "id is a number": ("query_id", 7, "query_id must be non-empty text, got 7"),
    "rubric without text": ("rubrics", [{"weight": 5}], "rubrics[0] must have text and weight"),
    "rubric without weight": ("rubrics", [{"text": "Is clear."}], "rubrics[0] must have text and weight"),
    "rubrics of texts": ("rubrics", ["Is clear."], "rubrics[0] must have text and weight, got 'Is clear.'"),
    "weight 2.5": (
        "rubrics",
        [{"text": "x", "weight": 2.5}],
        "rubrics[0].weight must be an integer from 1 to 5, got 2.5",
    ),
    "weight as text": (
        "rubrics",
        [{"text": "x", "weight": "5"}],
        "rubrics[0].weight must be an integer from 1 to 5, got '5'",
    ),
    "weight true": ("rubrics", [{"text": "x", "weight": True}], "rubrics[0].weight must be an integer from 1 to 5"),
    "responses is text": ("responses", "abcd", "responses must be a list of text from worst to best, got 'abcd'"),
    "responses of numbers": ("responses", [1, 2, 3, 4], "responses[0] must be non-empty text, got 1"),
}


@pytest.mark.parametrize("case", BAD_TABLES)
def test_a_column_of_another_type_is_refused(case):
    key, value, fragment = BAD_TABLES[case]
    row = good_rows(1)[0] | {key: value}
    with pytest.raises(DataError) as error:
        QueryTable(Dataset.from_list([row]), anchors_needed=4)
    assert str(error.value).startswith("row 1")
    assert fragment in str(error.value)


@pytest.mark.parametrize("column", ["prompt", "rubrics", "responses"])
def test_a_missing_column_is_named(column):
    dataset = Dataset.from_list(good_rows()).remove_columns(column)
    with pytest.raises(DataError, match=f"no column '{column}'") as error:
        QueryTable(dataset, anchors_needed=4)
    assert ("bootstrap" in str(error.value)) == (column == "responses")


def test_bootstrap_needs_no_responses():
    table = QueryTable(Dataset.from_list(good_rows()).remove_columns("responses"), anchors_needed=0)
    assert table["q0"].responses == ()


def test_bootstrap_does_not_look_at_responses():
    data = good_rows()
    data[1]["responses"] = []
    assert len(QueryTable(Dataset.from_list(data), anchors_needed=0)) == 2


def test_no_rows_are_refused():
    with pytest.raises(DataError, match="no rows"):
        QueryTable(Dataset.from_list(good_rows()).select([]), anchors_needed=4)


def test_other_columns_do_no_harm():
    data = [row | {"split": "train", "responses_meta": None} for row in good_rows()]
    assert len(QueryTable(Dataset.from_list(data), anchors_needed=4)) == 2


def test_an_unknown_query_is_named():
    with pytest.raises(DataError, match="no query 'nobody'"):
        QueryTable(Dataset.from_list(good_rows()))["nobody"]


def test_rows_after_the_first_thousand_are_checked_and_numbered():
    data = good_rows(1001)
    broken = copy.deepcopy(data)
    broken[1000]["rubrics"][1]["weight"] = 9
    with pytest.raises(DataError, match=r"row 1001 \(query_id 'q1000'\): rubrics\[1\].weight"):
        QueryTable(Dataset.from_list(broken), anchors_needed=4)
    dataset = Dataset.from_list(data)
    assert list(iterate(dataset)) == list(dataset)


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("broken.jsonl", '{"query_id": "q0", "prompt": [{"role": "us'),
        ("broken.json", '[{"query_id": "q0", "prompt": [{"role": "us'),
        ("empty.jsonl", ""),
        ("broken.parquet", "PAR1"),
    ],
)
def test_an_unreadable_file_is_named(tmp_path, name, content):
    path = tmp_path / name
    path.write_text(content)
    with pytest.raises(DataError) as error:
        QueryTable(load_queries(str(path)))
    assert name in str(error.value) or "no rows" in str(error.value)


def test_a_truncated_last_line_is_not_dropped_in_silence(tmp_path):
    path = write(tmp_path / "cut.jsonl", good_rows(3))
    path.write_text(path.read_text()[:-40])
    with pytest.raises(DataError, match=r"cut\.jsonl cannot be read"):
        load_queries(str(path))


@pytest.mark.parametrize(
    "write_rows",
    [lambda path, rows: write(path, rows), lambda path, rows: Dataset.from_list(rows)],
    ids=["file", "memory"],
)
def test_a_prompt_may_be_a_text_and_an_id_may_be_missing(tmp_path, write_rows):
    full = good_rows(3)
    for row in full:
        row["prompt"] = row["prompt"][1:]
    bare = [{key: value for key, value in row.items() if key != "query_id"} for row in full]
    texts = [row | {"prompt": row["prompt"][0]["content"]} for row in bare]
    some = [texts[0] | {"query_id": None}, texts[1] | {"query_id": "mine"}, texts[2]]
    tables = {}
    for name, rows in {"full": full, "bare": bare, "texts": texts, "some": some}.items():
        made = write_rows(tmp_path / f"{name}.jsonl", rows)
        tables[name] = QueryTable(made if isinstance(made, Dataset) else load_queries(str(made)), anchors_needed=4)
    ids = tables["bare"].ids
    assert ids[0] == "prompt-4aa4421349d3f717", "an id never changes: buffers belong to it"
    assert tables["texts"].ids == ids and tables["some"].ids == [ids[0], "mine", ids[2]]
    assert tables["texts"].sha256 == tables["bare"].sha256
    assert [tables["texts"][id].prompt for id in ids] == [row["prompt"] for row in full]
    assert list(tables["texts"].prompts) == [
        {"prompt": row["prompt"], "query_id": id} for row, id in zip(full, ids, strict=True)
    ]
    assert len(set(ids)) == 3 and tables["full"].ids == ["q0", "q1", "q2"]


def test_texts_and_messages_may_stand_in_one_file(tmp_path):
    rows = good_rows(2)
    rows[0]["prompt"] = "How 0?"
    table = QueryTable(load_queries(str(write(tmp_path / "mixed.jsonl", rows))), anchors_needed=4)
    assert [table[id].prompt for id in table.ids] == [[{"role": "user", "content": "How 0?"}], rows[1]["prompt"]]


def test_the_same_prompt_without_an_id_is_refused():
    rows = [{key: value for key, value in good_rows(1)[0].items() if key != "query_id"}] * 2
    with pytest.raises(DataError, match=r"row 2 .*: the prompt is the same as in row 1, and a row without query_id"):
        QueryTable(Dataset.from_list(rows))


@pytest.mark.parametrize("name", ["mine.csv", "mine.txt", "queries"])
def test_a_file_of_another_kind_is_called_so(tmp_path, name):
    (tmp_path / name).write_text("prompt\nHow?\n")
    with pytest.raises(DataError, match=rf"{name} is not supported, .* one JSON object per line"):
        load_queries(str(tmp_path / name))


@pytest.mark.parametrize("suffix", ["jsonl", "json", "parquet"])
def test_a_missing_file_is_named(tmp_path, suffix):
    with pytest.raises(DataError, match=rf"nowhere\.{suffix} does not exist"):
        load_queries(str(tmp_path / f"nowhere.{suffix}"))
