"""The training set: good files load, and every bad row or file is refused with its place, key and value."""

import errno
import json
import os
from datetime import datetime
from pathlib import Path
from unittest.mock import Mock

import pytest
from datasets import Dataset, DatasetDict, Image

from rankbuffer_tools.batch.output import write_rows
from rankbuffer_trl.data._queries import (
    CHECK_HINT,
    DataError,
    QueryTable,
    checked_rows,
    iterate,
    load_queries,
    normal_row,
)
from rankbuffer_trl.groups import Query, Rubric

pytestmark = pytest.mark.usefixtures("cache")

USER, SYSTEM = ({"role": role, "content": "How?"} for role in ("user", "system"))
RUBRIC = {"text": "Is clear.", "weight": 5}


def good_rows(n: int = 2) -> list[dict]:
    return [
        {
            "query_id": f"q{i}",
            "prompt": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": f"How {i}?"}],
            "rubrics": [{"text": "Is clear.", "weight": 5}, {"text": "Is short.", "weight": -1}],
            "responses": [f"worst {i}", "bad", "good", "best"],
        }
        for i in range(n)
    ]


def without(key: str, rows: list[dict]) -> list[dict]:
    return [{name: value for name, value in row.items() if name != key} for row in rows]


def write_json(path: Path, rows: list[dict]) -> None:
    path.write_text(json.dumps(rows), encoding="utf-8")


def test_write_rows_has_times_as_text_and_refuses_what_json_has_not(tmp_path):
    row = {"prompt": "Why?", "at": datetime(2026, 1, 2)}
    write_rows(tmp_path / "a.jsonl", [row])
    assert str(load_queries(str(tmp_path / "a.jsonl"))[0]["at"]) == "2026-01-02 00:00:00"
    with pytest.raises(DataError, match="a column has bytes, which JSON has not: name an output_file"):
        write_rows(tmp_path / "a.jsonl", [row, {"prompt": b"Why?"}])


@pytest.mark.parametrize(
    ("name", "write"), [("q.jsonl", write_rows), ("q.json", write_json), ("q [*]?.parquet", write_rows)]
)
def test_load_queries_gives_the_same_queries_from_every_kind_of_file(tmp_path, name, write):
    rows = good_rows()
    rows[1]["rubrics"][0]["must"] = False
    write(tmp_path / name, rows)
    table = QueryTable(load_queries(str(tmp_path / name)), anchors_needed=4)
    assert len(table) == 2 and "q1" in table and "q2" not in table and table.ids == ["q0", "q1"]
    assert table["q1"] == Query(
        "q1",
        [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "How 1?"}],
        (Rubric("Is clear.", 5), Rubric("Is short.", -1)),
        ("worst 1", "bad", "good", "best"),
    )


def test_query_table_refuses_what_is_not_one_split():
    rows = Dataset.from_list(good_rows())
    for other, message in (
        (rows.to_iterable_dataset(), "is a IterableDataset, .*: pass one split, .* without streaming"),
        (DatasetDict(train=rows, test=rows), r"is a DatasetDict of splits \('train', 'test'\): pass one split"),
        ({"train": rows}, r"is a dict of splits \('train'\): pass one split"),
        (good_rows(), "is a list, .*: pass one split"),
    ):
        with pytest.raises(DataError, match=message):
            QueryTable(other)


@pytest.mark.parametrize(
    ("column", "value", "said"),
    [
        *((name, ["a.png"], "text alone") for name in ("images", "Image", "videos", "audio")),
        ("tools", [{"name": "f"}], "pass tools to RankBufferTrainer"),
        ("chat_template_kwargs", {"enable_thinking": False}, "in the recipe"),
        ("screenshot", {"path": "a.png", "bytes": None}, "text alone"),
        ("rubric", [{"title": "Clear"}], "rubrics stand in the column 'rubrics'"),
        ("imagery", "a", None),
        ("Audiobook", "a", None),
    ],
)
def test_query_table_warns_of_a_column_that_matters_and_is_not_read(column, value, said, caplog):
    rows = Dataset.from_list([row | {column: value} for row in without("rubrics", good_rows())])
    QueryTable(rows.cast_column(column, Image()) if column == "screenshot" else rows)
    found = [each.getMessage() for each in caplog.records if f"columns ['{column}'] are" in each.getMessage()]
    assert len(found) == (said is not None) and all(each.count(said) for each in found)


# Rows

MESSAGES = 'must be a text or a list of messages such as [{"role": "user", "content": "..."}]'
TEXT = "must be non-empty text"
DUMPED = "must be the list of messages itself, not a text that spells it: parse it, as json.loads does"
RENDERED = "must be the user's words without a chat template, which is added later: take it off"
WRAPPED = (
    *("<|im_start|>user\nWhy?<|im_end|>\n", "<bos><start_of_turn>user\nWhy?<end_of_turn>\n", "<s>[INST] Why? [/INST]"),
    *("<|turn>user\nWhy?<turn|>", "<\uff5cbegin\u2581of\uff5c><\uff5cUser\uff5c>Why?<\uff5cAssistant\uff5c>"),
)
NUL = "must be text without NUL characters"
WEIGHT, WRONG_WEIGHTS = "must be an integer from 1 to 5, or from -5 to -1", (0, 6, -6, 2.5, "5", True, None)
MUST = "is no longer a rule of its own: remove it, the weight says how much counts"
FAULTY = [{"text": "x", "weight": -1}, {"text": "y", "weight": -5}]
PARTS, NO_MESSAGES = "must have text and weight", ("How?", {"role": "user"}, {"content": "How?"})
LONG = "x" * 100
BAD_VALUES = [  # column, value, the key that is named, what is wrong with it, what it is
    *(("query_id", each, "query_id", TEXT, each) for each in (" \n", 7)),
    *(("prompt", each, "prompt", MESSAGES, each) for each in ([], None)),
    ("prompt", [SYSTEM], "prompt", "must end with a user message", "system"),
    ("prompt", [USER, {"role": "assistant", "content": "So."}], "prompt", "must end with a user message", "assistant"),
    *(("prompt", [each], "prompt[0]", "must have role and content", each) for each in NO_MESSAGES),
    ("prompt", [{"role": None, "content": "How?"}, USER], "prompt[0].role", TEXT, None),
    ("prompt", [USER, {"role": "user", "content": " "}], "prompt[1].content", TEXT, " "),
    ("prompt", [{"role": "user", "content": 3}], "prompt[0].content", TEXT, 3),
    ("prompt", [{"role": "user", "content": "\0"}], "prompt[0].content", NUL, "\0"),
    *(("prompt", text, "prompt", DUMPED, text) for text in (json.dumps([SYSTEM, USER]), str([USER]) + "\n")),
    *(("prompt", text, "prompt", RENDERED, text) for text in WRAPPED),
    *(("rubrics", each, "rubrics", "must be a non-empty list", each) for each in ([], "Is clear.")),
    *(("rubrics", [each], "rubrics[0]", PARTS, each) for each in ("Is clear.", {"weight": 5}, {"text": "Is clear."})),
    ("rubrics", [RUBRIC, {"text": "", "weight": 5}], "rubrics[1].text", TEXT, ""),
    *(("rubrics", [{"text": "x", "weight": each}], "rubrics[0].weight", WEIGHT, each) for each in WRONG_WEIGHTS),
    ("rubrics", FAULTY, "rubrics", "must have a weight above 0: an answer that says nothing has no fault", FAULTY),
    ("rubrics", [RUBRIC, {**RUBRIC, "must": True}], "rubrics[1].must", MUST, True),
    *(("responses", each, "responses", "must be a list of text from worst to best", each) for each in (None, LONG)),
    ("responses", ["a", "b", "c"], "responses", "must hold at least 4 responses from worst to best", 3),
    ("responses", ["a", "b", "c", " \n"], "responses[3]", TEXT, " \n"),
    ("responses", [1, 2, 3, 4], "responses[0]", TEXT, 1),
    *(("responses", [each, "b", "c", "d"], "responses[0]", TEXT, each) for each in ("\u200b \u2060", "\ufeff\u3164")),
    ("models", ["a"], "models", "must name who wrote each of the 4 responses", ["a"]),
    ("models", ["a", None, "c", "d"], "models[1]", TEXT, None),
    ("models", "gpt-4", "models", "must be a list of text", "gpt-4"),
]


def test_checked_refuses_a_bad_value_with_its_place():
    for column, value, key, problem, found in BAD_VALUES:
        rows = [row | {column: value} for row in good_rows(1)]
        shown = repr(found) if found != LONG else f"'{LONG[:79]}..."
        id = rows[0]["query_id"]
        name = f" (query_id {id!r})" if isinstance(id, str) else ""
        with pytest.raises(DataError) as error:
            list(checked_rows(Dataset.from_list(rows), anchors_needed=4))
        assert str(error.value) == f"row 1{name}: {key} {problem}, got {shown}{CHECK_HINT}", (column, value)


def test_checked_takes_prompts_that_only_speak_of_messages_and_tokens():
    texts = ("Is it <|im_start|>user<|im_end|>?", '[{"role": "nurse", "content": "a"}]', "[INST]?", f"Read {[USER]}")
    texts += (
        "<|im_start|> and <|im_end|> show up. Why?",
        "[INST] and [/INST]: what are they?",
        f"[Fix] x = {[USER]}; #]",
    )
    texts += (
        json.dumps({"messages": [USER], "question": "why 400?"}),
        "[1, 2]",
        "{}",
        "[]",
        "<|image_1|> <|image_2|>?",
    )
    quoted = [{"role": "user", "content": json.dumps([USER])}, USER]
    for prompts in (texts, [quoted]):
        assert len(QueryTable(Dataset.from_list([{"prompt": prompt} for prompt in prompts]))) == len(prompts)


def test_checked_takes_columns_that_are_not_needed_as_they_are_or_missing():
    for change in ({"rubrics": None}, {"responses": None}, {"responses": []}, {"models": None}, {"split": 3}):
        rows = [row | change for row in good_rows()]
        assert list(checked_rows(Dataset.from_list(rows), rubrics_needed=False)) == rows
    for change, key in (({"rubrics": [{"text": "x", "weight": 9}]}, "weight"), ({"responses": [""]}, "responses")):
        with pytest.raises(DataError, match=key):
            list(checked_rows(Dataset.from_list([good_rows(1)[0] | change]), rubrics_needed=False))
    with pytest.raises(DataError, match="no rows"):
        list(checked_rows(Dataset.from_list(good_rows()).select([])))


def test_checked_refuses_two_rows_of_one_name():
    with pytest.raises(DataError, match="row 2: the query_id 'q0' is that of row 1, too"):
        list(checked_rows(Dataset.from_list(good_rows(1) * 2)))
    nameless = Dataset.from_list(without("query_id", good_rows(1)) * 2)
    with pytest.raises(DataError, match=r"row 2 .*: the prompt is the same as in row 1, and a row without query_id"):
        list(checked_rows(nameless))


def test_checked_numbers_the_rows_after_the_first_thousand():
    rows = good_rows(1001)
    assert list(iterate(Dataset.from_list(rows))) == rows
    rows[1000]["rubrics"][1]["weight"] = 9
    with pytest.raises(DataError, match=r"row 1001 \(query_id 'q1000'\): rubrics\[1\].weight"):
        QueryTable(Dataset.from_list(rows), anchors_needed=4)


class Torn:
    """A data set that cannot be read after its first batch."""

    def iter(self, batch_size):
        yield {"n": list(range(batch_size))}
        raise ValueError("torn")


def test_iterate_says_how_many_rows_it_could_read():
    with pytest.raises(DataError, match="after its first 100 rows or so: torn"):
        list(iterate(Torn()))


# The table


@pytest.mark.parametrize("column", ["prompt", "responses"])
def test_query_table_names_a_missing_column(column):
    with pytest.raises(DataError, match=f"no column '{column}'.*its columns are") as error:
        QueryTable(Dataset.from_list(without(column, good_rows())), anchors_needed=4)
    hint = {"responses": "generate_responses.py .*bootstrap"}.get(column, "")
    assert error.match(hint) and ("generate" in str(error.value)) == bool(hint)


def test_query_table_of_a_bootstrap_does_not_look_at_responses():
    rows = good_rows()
    rows[1]["responses"] = []
    for dataset in (Dataset.from_list(rows), Dataset.from_list(without("responses", rows))):
        table = QueryTable(dataset)
        assert len(table) == 2 and table["q0"].responses == ()
    with pytest.raises(DataError, match="no query 'nobody'"):
        table["nobody"]


def in_file(path: Path, rows: list[dict]) -> Dataset:
    write_rows(path, rows)
    return load_queries(str(path))


@pytest.mark.parametrize("load", [in_file, lambda path, rows: Dataset.from_list(rows)], ids=["file", "memory"])
def test_query_table_takes_a_prompt_as_text_and_a_row_without_id(tmp_path, load):
    full = good_rows(3)
    for row in full:
        row["prompt"] = row["prompt"][1:]
    bare = without("query_id", full)
    texts = [row | {"prompt": row["prompt"][0]["content"]} for row in bare]
    some = [texts[0] | {"query_id": None}, texts[1] | {"query_id": "mine"}, texts[2]]
    tables = {
        name: QueryTable(load(tmp_path / f"{name}.jsonl", rows), anchors_needed=4)
        for name, rows in {"full": full, "bare": bare, "texts": texts, "some": some}.items()
    }
    ids = tables["bare"].ids
    assert ids[0] == "prompt-4aa4421349d3f717", "an id never changes: buffers belong to it"
    assert tables["texts"].ids == ids and tables["some"].ids == [ids[0], "mine", ids[2]]
    assert tables["texts"].sha256 == tables["bare"].sha256 != tables["full"].sha256
    assert [tables["texts"][id].prompt for id in ids] == [row["prompt"] for row in full]
    shown = [{"prompt": row["prompt"], "query_id": id} for row, id in zip(full, ids, strict=True)]
    assert list(tables["texts"].prompts) == shown
    assert len(set(ids)) == 3 and tables["full"].ids == ["q0", "q1", "q2"]


def test_query_table_passes_the_columns_on_that_it_does_not_read(tmp_path):
    further = [{"solution": f"{i}", "when": datetime(2026, 1, 1 + i), "more": {"n": [i]}} for i in range(4)]
    taken = {"models": ["a"] * 4, "images": ["x"], "prompts": "?", "completions": "!"}
    plain = [row | {"prompt": row["prompt"][1]["content"]} for row in good_rows(4)]
    for name, rows in (("messages", good_rows(4)), ("texts", plain)):
        dataset = Dataset.from_list([row | more | taken for row, more in zip(rows, further, strict=True)])
        dataset.to_parquet(tmp_path / f"{name}.parquet")
        for each in (dataset, load_queries(str(tmp_path / f"{name}.parquet")).select([2, 0, 3])):
            table = QueryTable(each, anchors_needed=4)
            expected = [further[int(id[1:])] | {"query_id": id, "prompt": table[id].prompt} for id in table.ids]
            assert list(table.prompts) == expected
        assert QueryTable(dataset).sha256 == QueryTable(Dataset.from_list(rows)).sha256, "a checkpoint still fits"


def test_query_table_takes_texts_and_messages_in_one_file(tmp_path):
    rows = good_rows()
    rows[0]["prompt"] = "How 0?"
    table = QueryTable(in_file(tmp_path / "mixed.jsonl", rows), anchors_needed=4)
    assert [table[id].prompt for id in table.ids] == [[{"role": "user", "content": "How 0?"}], rows[1]["prompt"]]


def test_normal_row_gives_an_id_by_role_and_content_alone():
    with_name = normal_row({"prompt": [{"role": "user", "content": "Why?", "name": "me"}]})
    assert with_name["query_id"] == normal_row({"prompt": "Why?"})["query_id"] != normal_row({"prompt": 3})["query_id"]


# Files

LINE = json.dumps(good_rows(1)[0]).encode()
REFUSED_FILES = {
    "nowhere.jsonl": (None, r"nowhere\.jsonl does not exist \(dataset_name is a file here, because it ends in .jsonl"),
    "mine.csv": (b"prompt\nHow?\n", r"mine\.csv is not supported, .* write mine.jsonl, one JSON object per line"),
    "nowhere.txt": (None, r"nowhere\.txt is not supported"),
    "nowhere.yml": (None, r"nowhere\.yml is not supported"),
    "queries": (b"prompt\nHow?\n", r"queries is not supported, .* write queries.jsonl"),
    "empty.jsonl": (b"", "no rows"),
    "cut.jsonl": (LINE + b"\n" + LINE[:-40], r"cut\.jsonl cannot be read.*rankbuffer-data check"),
    "cut.json": (b"[" + LINE[:40], r"cut\.json cannot be read"),
    "cut.parquet": (b"PAR1", r"cut\.parquet cannot be read"),
    "nul.jsonl": (LINE.replace(b"How", b"H\0w"), r"nul\.jsonl cannot be read"),
    "latin.jsonl": (LINE.replace(b"How", b"caf\xe9"), "utf-8"),
    "surrogate.jsonl": (LINE.replace(b"How", b"\\ud800"), "surrogate"),
    "nobody/nothing": (None, r"nobody/nothing cannot be read: .*Hub"),
}


@pytest.mark.parametrize("name", REFUSED_FILES)
def test_load_queries_refuses_a_file_that_it_cannot_read(tmp_path, name):
    content, message = REFUSED_FILES[name]
    path = tmp_path / name
    if content is not None:
        path.write_bytes(content)
    for streaming in (False, True):  # then some faults are found while the rows are read, where the file has no name
        with pytest.raises(DataError, match=f"{message}|cannot be read after its first" if streaming else message):
            if not list(iterate(load_queries(str(path) if "/" not in name else name, streaming=streaming))):
                raise DataError("no rows")  # which are an error later


@pytest.mark.parametrize(("where", "hint"), [("q.jsonl", "lists all faults of a file"), ("cache", "set HF_HOME to")])
def test_load_queries_says_whether_the_file_or_the_cache_is_closed(tmp_path, monkeypatch, where, hint):
    (tmp_path / "q.jsonl").write_bytes(LINE)
    closed = PermissionError(errno.EACCES, "Permission denied", str(tmp_path / where))
    monkeypatch.setattr("rankbuffer_trl.data._queries.load_dataset", Mock(side_effect=closed))
    with pytest.raises(DataError, match=f"cannot be read: .*Permission denied.*; .*{hint}"):
        load_queries(str(tmp_path / "q.jsonl"))


def test_query_table_refuses_text_that_is_not_utf8(tmp_path):
    (tmp_path / "q.jsonl").write_bytes(b'{"prompt": "caf\xe9"}\n')
    with pytest.raises(DataError, match="cannot be read, because it is not UTF-8"):
        QueryTable(load_queries(str(tmp_path / "q.jsonl")))


def test_load_queries_reads_the_splits_of_a_folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("folder")  # datasets also looks for the names of splits in the names of folders
    for split, rows in (("train", good_rows(3)), ("test", good_rows(1))):
        write_rows(folder / f"{split}.jsonl", rows)
    assert [len(load_queries(str(folder), split=split)) for split in ("train", "test")] == [3, 1]
    with pytest.raises(DataError, match=r"train\.jsonl has no split 'test'; name a folder .* test.jsonl"):
        load_queries(str(folder / "train.jsonl"), split="test")
    write_rows(folder / "train_kept_apart.jsonl", good_rows(1))
    with pytest.raises(DataError, match=rf"kept apart, in train_kept_apart\.jsonl, .* name {folder}/train\.jsonl"):
        load_queries(str(folder))
    (folder / "train_kept_apart.jsonl").unlink()
    write_rows(folder / "train-2.jsonl", [{"prompt": "How?", "topic": "eggs"}])
    (folder / "test.jsonl.provenance.json").write_text("[]")
    for streaming in (False, True):
        named = rf" as a whole: name one file of it \({folder}/test.jsonl, {folder}/train" if not streaming else ""
        with pytest.raises(DataError, match=rf"^.*cannot be read{named}.*column names don't match.*$"):  # in one line
            list(iterate(load_queries(str(folder), streaming=streaming)))
    Dataset.from_list(good_rows(1)).save_to_disk(folder / "saved")
    with pytest.raises(DataError, match=r"saved cannot be read: .* use `load_from_disk` instead"):
        load_queries(str(folder / "saved"))


def test_load_queries_reads_a_file_again_that_was_replaced_by_one_of_the_same_time(tmp_path):
    path = tmp_path / "q.jsonl"
    for prompt in ("old", "new prompt"):
        path.write_text(json.dumps({"prompt": prompt}) + "\n")
        os.utime(path, (0, 0))
        assert load_queries(str(path))["prompt"] == [prompt]


def test_load_queries_passes_over_byte_order_marks_and_crlf(tmp_path):
    (tmp_path / "q.jsonl").write_bytes(b"\xef\xbb\xbf" + LINE + b"\r\n" + LINE + b"\r\n")
    assert list(load_queries(str(tmp_path / "q.jsonl"))) == good_rows(1) * 2
