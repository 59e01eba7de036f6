"""Nectar: its prompts, which rows are taken and why others are not, the file that comes out."""

import itertools
import json
import random
import re
from pathlib import Path

import prepare_nectar
import pytest
from datasets import Dataset, load_dataset
from helpers.nectar_rows import raw_row
from hypothesis import given
from hypothesis import strategies as st

from rankbuffer_trl.data.nectar import Unusable, parse_prompt, place_of, render_prompt, sample, to_row
from rankbuffer_trl.data.queries import DataError, QueryTable, iterate, load_queries


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")


# The prompt

CASES = {
    "one turn": ("\n\nHuman: Hi\n\nAssistant: ", ["Hi"]),
    "three turns": ("\n\nHuman: a\n\nAssistant: b\n\nHuman: c\n\nAssistant: ", ["a", "b", "c"]),
    "without spaces": ("Human:a\n\nAssistant:", ["a"]),
    "without the last marker": ("\n\nHuman: a", ["a"]),
    "words inline": (
        "\n\nHuman: Say Human: or Assistant: twice.\nHuman: no\n\nAssistant: ",
        ["Say Human: or Assistant: twice.\nHuman: no"],
    ),
    "paragraphs": ("\n\nHuman: a\n\nb\n\n Human: c\n\nAssistant: ", ["a\n\nb\n\n Human: c"]),
    "a word like it": ("\n\nHuman: a\n\nHumanoid: b\n\nAssistant: ", ["a\n\nHumanoid: b"]),
    "CRLF": ("\r\n\r\nHuman: a\r\nb\r\n\r\nAssistant: ", ["a\nb"]),
    "byte order mark": ("\ufeff\n\nHuman: a\n\nAssistant: ", ["a"]),
    "a megabyte": ("\n\nHuman: " + "a\n" * 500_000 + "b\n\nAssistant: ", ["a\n" * 500_000 + "b"]),
}


@pytest.mark.parametrize("case", CASES)
def test_a_prompt_is_read(case):
    text, contents = CASES[case]
    messages = parse_prompt(text)
    assert [message["content"] for message in messages] == contents
    assert [message["role"] for message in messages] == [("user", "assistant")[i % 2] for i in range(len(contents))]


BAD_PROMPTS = {
    "nothing": ("", "no turn of a Human"),
    "plain text": ("How do I make tea?", "no turn of a Human"),
    "text before": ("Hello.\n\nHuman: Hi\n\nAssistant: ", "text before its first turn"),
    "ends in an assistant turn": ("\n\nHuman: a\n\nAssistant: b", "ends in an assistant turn"),
    "begins with the assistant": ("\n\nAssistant: a\n\nHuman: b\n\nAssistant: ", "do not alternate"),
    "twice the human": ("\n\nHuman: a\n\nHuman: b\n\nAssistant: ", "do not alternate"),
    "an empty human": ("\n\nHuman: \n\nAssistant: ", "empty turn"),
    "an empty assistant": ("\n\nHuman: a\n\nAssistant: \n\nHuman: b\n\nAssistant: ", "empty turn"),
}


@pytest.mark.parametrize("case", BAD_PROMPTS)
def test_a_prompt_that_is_none_is_left_out(case):
    text, reason = BAD_PROMPTS[case]
    with pytest.raises(Unusable, match=reason):
        parse_prompt(text)


def conversation(contents: list[str]) -> list[dict]:
    return [{"role": ("user", "assistant")[i % 2], "content": content} for i, content in enumerate(contents)]


PIECES = ["\n\nHuman:", "\n\nAssistant:", "Human:", "Assistant:", " ", "\n", "\n\n", "\r\n", "\ufeff", "a", "é", "ß:"]
turn = st.lists(st.sampled_from(PIECES), min_size=1, max_size=8).map("".join)
calm = st.lists(st.sampled_from([piece for piece in PIECES if len(piece) < 5 or piece[0] != "\n"]), max_size=5)


def speak(turns: list[list[str]]) -> str:
    return "".join(PIECES[i % 2] + " " * (i % 3) + "".join(words) + "a" for i, words in enumerate(turns)) + PIECES[1]


prompts = st.one_of(
    st.lists(st.sampled_from(PIECES), max_size=16).map("".join),  # mostly refused
    st.lists(calm, min_size=1, max_size=5).map(lambda turns: speak(turns[: len(turns) - (len(turns) + 1) % 2])),
)


@given(st.lists(turn, min_size=1, max_size=5))
def test_what_is_rendered_is_read_back(contents):
    """Any conversation of an odd number of turns that holds no marker after an empty line is rendered and read back,
    and what it renders to is the text that was read."""
    contents = contents[: len(contents) - (len(contents) + 1) % 2]
    contents = [re.sub(r"\n\n(?=Human:|Assistant:)", " ", c.replace("\r\n", "").strip()) for c in contents]
    if not contents or not all(contents):
        return
    messages = conversation(contents)
    text = render_prompt(messages)
    assert parse_prompt(text) == messages
    assert render_prompt(parse_prompt(text)) == text


@given(prompts)
def test_parse_then_render_gives_the_text_back(text):
    """Any text that is read: rendering gives it back but for white space around turns, and a fixed point exactly."""
    try:
        messages = parse_prompt(text)
    except Unusable:
        return

    def bare(text: str) -> str:
        text = text.removeprefix("\ufeff").replace("\r\n", "\n")
        text = re.sub(r"\s*(\A\s*|\n\n)(Human|Assistant):\s*", r"\n\n\2: ", text)
        return text.rstrip().removesuffix("\n\nAssistant:").rstrip()

    rendered = render_prompt(messages)
    assert bare(rendered) == bare(text)
    assert render_prompt(parse_prompt(rendered)) == rendered


@given(prompts)
def test_the_reader_agrees_with_a_slow_one(text):
    """Line by line: a line that begins with a marker after an empty line, or first of all, begins a turn."""
    lines = text.removeprefix("\ufeff").replace("\r\n", "\n").split("\n")
    turns, before = [], ""
    for i, line in enumerate(lines):
        name = next((name for name in ("Human", "Assistant") if line.lstrip().startswith(f"{name}:")), None)
        first = not turns and not before.strip()
        exact = line.startswith(f"{name}:")
        after_empty = i >= 2 and lines[i - 1] == ""
        if name and ((after_empty and exact) or first):
            turns.append([name, line.lstrip()[len(name) + 1 :]])
        elif turns:
            turns[-1][1] += "\n" + line
        else:
            before += line
    turns = [(name, content.strip()) for name, content in turns]
    if turns and turns[-1] == ("Assistant", ""):
        turns.pop()
    good = (
        bool(turns)
        and not before.strip()
        and [name for name, _ in turns] == [("Human", "Assistant")[i % 2] for i in range(len(turns))]
        and len(turns) % 2 == 1
        and all(content for _, content in turns)
    )
    try:
        messages = parse_prompt(text)
    except Unusable:
        assert not good
    else:
        assert good
        assert [message["content"] for message in messages] == [content for _, content in turns]


# A row


def test_a_row_has_its_responses_from_worst_to_best(howto):
    row = to_row(raw_row(3, howto))
    assert row["responses"] == [f"{text} (3)" for text in howto[3]["responses"]]
    assert row["models"] == [f"model-{rank}" for rank in (7, 6, 5, 4, 3, 2, 1)]
    assert row["prompt"] == [{"role": "user", "content": howto[3]["prompt"][0]["content"] + " This is question 3."}]
    assert row["query_id"] == to_row(raw_row(3, howto))["query_id"] != to_row(raw_row(4, howto))["query_id"]


def change(row: dict, place: int, **answer) -> None:
    row["answers"][place] |= answer


DROPS = {
    "ties": (lambda row: change(row, 0, rank=row["answers"][1]["rank"]), "ranks are not 1 to 7"),
    "gaps": (
        lambda row: [change(row, i, rank=a["rank"] + (a["rank"] > 3)) for i, a in enumerate(row["answers"])],
        "ranks",
    ),
    "from 0": (lambda row: [change(row, i, rank=a["rank"] - 1) for i, a in enumerate(row["answers"])], "ranks"),
    "half a rank": (lambda row: change(row, 2, rank=2.5), "ranks"),
    "no rank": (lambda row: change(row, 2, rank=None), "ranks"),
    "not a number": (lambda row: change(row, 2, rank=float("nan")), "ranks"),
    "six responses": (lambda row: row["answers"].pop(), "not 7 responses"),
    "empty response": (lambda row: change(row, 4, answer=" \n"), "a response is empty"),
    "null response": (lambda row: change(row, 4, answer=None), "a response is empty"),
    "NUL in a response": (lambda row: change(row, 4, answer="a\0b"), "not clean text"),
    "surrogate in a response": (lambda row: change(row, 4, answer="a\ud800b"), "not clean text"),
    "surrogate in the prompt": (lambda row: row.update(prompt="\n\nHuman: \udc00\n\nAssistant: "), "not clean text"),
    "the same response": (
        lambda row: change(row, 0, answer=" " + row["answers"][1]["answer"] + "\r\n"),
        "two responses are the same",
    ),
    "no prompt": (lambda row: row.update(prompt=None), "missing"),
    "no answers": (lambda row: row.update(answers=None), "missing"),
    "empty prompt": (lambda row: row.update(prompt=" "), "empty"),
    "assistant turn": (lambda row: row.update(prompt=row["prompt"] + "Sure."), "ends in an assistant turn"),
}


@pytest.mark.parametrize("case", DROPS)
def test_a_row_that_cannot_be_used_is_left_out_with_its_reason(howto, case):
    spoil, reason = DROPS[case]
    row = raw_row(0, howto)
    spoil(row)
    found = sample([row, raw_row(1, howto)], None, 42)
    assert [each["query_id"] for each in found.rows] == [to_row(raw_row(1, howto))["query_id"]]
    [(given, count)] = found.dropped.items()
    assert reason in given and count == 1


DRIFT = {
    "no prompt": (lambda row: row.pop("prompt"), ["row 1", "no column 'prompt'", "'good_natured'"]),
    "renamed answers": (lambda row: row.update(responses=row.pop("answers")), ["no column 'answers'", "'responses'"]),
    "prompt is a list": (lambda row: row.update(prompt=["a"]), ["prompt is", "(list)"]),
    "answers is text": (lambda row: row.update(answers="a"), ["answers is 'a' (str)"]),
    "answers of text": (lambda row: row.update(answers=["a"] * 7), ["answers[0] is 'a' (str)"]),
    "rank is text": (lambda row: change(row, 0, rank="1"), ["answers[0].rank is '1' (str)"]),
    "rank is true": (lambda row: change(row, 0, rank=True), ["answers[0].rank is 'True' (bool)"]),
    "answer is a number": (lambda row: change(row, 6, answer=7), ["answers[6].answer is '7' (int)"]),
    "model is missing": (lambda row: row["answers"][2].pop("model"), ["answers[2] has no 'model'", "'rank'"]),
}


@pytest.mark.parametrize("case", DRIFT)
def test_another_schema_is_an_error_that_names_what_was_found(howto, case):
    spoil, fragments = DRIFT[case]
    row = raw_row(1, howto)
    spoil(row)
    with pytest.raises(DataError) as error:
        sample([raw_row(0, howto), row], 1000, 42)
    assert [each for each in fragments if each not in str(error.value)] == []


# Which rows


@given(
    st.lists(st.tuples(st.integers(0, 8), st.sampled_from("ok ok ok tie long".split())), max_size=25),
    st.one_of(st.none(), st.integers(1, 9)),
    st.integers(0, 3),
)
def test_the_first_usable_rows_of_a_random_order_are_taken(howto_rows, made, n, seed):
    """Against a slow oracle: sort everything, go down the list until there are enough."""
    raws = []
    for number, kind in made:
        raw = json.loads(json.dumps(howto_rows[number]))
        if kind == "tie":
            raw["answers"][0]["rank"] = raw["answers"][1]["rank"]
        if kind == "long":
            raw["answers"][0]["answer"] = "long"
        raws.append(raw)

    def fault(row):
        return "too long" if "long" in row["responses"] else None

    taken, reasons, ids = [], [], set()
    order = sorted(range(len(raws)), key=lambda i: (place_of(raws[i]["prompt"], seed), i))
    for prompt, group in itertools.groupby(order, key=lambda i: raws[i]["prompt"]):
        if n is not None and len(taken) == n:
            break
        for i in group:
            try:
                if prompt in ids:
                    raise Unusable("the same prompt as an earlier row")
                row = to_row(raws[i])
                if fault(row):
                    raise Unusable("too long")
            except Unusable as reason:
                reasons.append(str(reason))
                continue
            ids.add(prompt)
            taken.append(row)
    found = sample(raws, n, seed, fault)
    assert found.rows == taken
    assert sorted(reason for reason, count in found.dropped.items() for _ in range(count)) == sorted(reasons)
    assert found.read == len(raws) and found.looked_at == len(taken) + len(reasons)


@pytest.fixture(scope="module")
def howto_rows(howto):
    return [raw_row(i, howto) for i in range(9)]


def test_the_sample_does_not_depend_on_the_order_of_the_rows(howto):
    raws = [raw_row(i, howto) for i in range(60)]
    straight = sample(raws, 20, 42)
    random.Random(0).shuffle(raws)
    assert sample(raws, 20, 42) == straight
    assert sample(raws, 20, 43).rows != straight.rows
    assert len({row["query_id"] for row in straight.rows}) == 20


# The recipe


def write(path, raws: list[dict]):
    if path.suffix == ".parquet":
        Dataset.from_list(raws).to_parquet(str(path))
    else:
        path.write_text("".join(json.dumps(raw) + "\n" for raw in raws))
    return str(path)


def prepare(tmp_path, source: str, name: str = "out.jsonl", **kwargs) -> tuple[list[dict], dict]:
    config = prepare_nectar.NectarConfig(dataset_name=source, output_file=str(tmp_path / name), **kwargs)
    assert prepare_nectar.main(config) == 0
    report = json.loads((tmp_path / f"{name}.provenance.json").read_text())
    return list(load_queries(str(tmp_path / name))), report["steps"][0]


def test_streamed_or_not_from_any_file_the_same_queries_are_taken(tmp_path, howto, capsys):
    raws = [raw_row(i, howto) for i in range(40)]
    raws[5]["answers"][0]["rank"] = raws[5]["answers"][1]["rank"]
    raws[7]["prompt"] += "Sure."
    jsonl, parquet = write(tmp_path / "raw.jsonl", raws), write(tmp_path / "raw.parquet", raws)
    (tmp_path / "folder").mkdir()
    write(tmp_path / "folder" / "train.jsonl", raws)
    first, report = prepare(tmp_path, jsonl, queries=0)
    assert len(first) == 38 and report["left_out"] == {
        "the ranks are not 1 to 7, each once": 1,
        "the prompt ends in an assistant turn": 1,
    }
    assert "40 rows read, 40 looked at, 38 taken" in capsys.readouterr().out
    first, report = prepare(tmp_path, jsonl, queries=10)
    for source, name, streaming in (
        (jsonl, "b.jsonl", True),
        (parquet, "c.parquet", False),
        (parquet, "d.jsonl", True),
        (str(tmp_path / "folder"), "e.jsonl", False),
    ):
        rows, other = prepare(tmp_path, source, name, queries=10, streaming=streaming)
        assert rows == first and other["left_out"] == report["left_out"]
    assert report["rows_read"] == 40 and report["queries_taken"] == 10 and report["seed"] == 42
    assert load_dataset("parquet", data_files=str(tmp_path / "c.parquet"), split="train").to_list() == first


def test_prompts_above_the_limit_are_counted_in_the_policys_template(tmp_path, howto, tiny_policy):
    raws = [raw_row(i, howto) for i in range(6)]
    raws[2]["prompt"] = "\n\nHuman: " + "How do I make tea? " * 40 + "question 2\n\nAssistant: "
    source = write(tmp_path / "raw.jsonl", raws)
    rows, report = prepare(tmp_path, source, tokenizer=tiny_policy, max_prompt_length=150)
    assert len(rows) == 5 and report["left_out"] == {"the prompt has more than 150 tokens": 1}
    assert report["tokens"] == report["tokenizer"] == Path(tiny_policy).name
    rows, report = prepare(tmp_path, source, max_prompt_length=150)
    assert len(rows) == 5 and "estimated" in report["tokens"]
    assert len(prepare(tmp_path, source)[0]) == 6
    with pytest.raises(ValueError, match=r"tokenizer .*nowhere cannot be loaded"):
        prepare(tmp_path, source, tokenizer=str(tmp_path / "nowhere"))


def test_nectar_on_the_hub_goes_through_the_same_code(tmp_path, howto, monkeypatch):
    """The Hub cannot be reached in tests; what `datasets` is asked for is what it would be asked for."""
    asked = []

    def load(path, **kwargs):
        asked.append((path, kwargs))
        return Dataset.from_list([raw_row(i, howto) for i in range(3)])

    monkeypatch.setattr("rankbuffer_trl.data.queries.load_dataset", load)
    config = prepare_nectar.NectarConfig(output_file=str(tmp_path / "out.jsonl"))
    assert prepare_nectar.main(config) == 0
    assert asked == [("berkeley-nest/Nectar", {"name": None, "split": "train", "streaming": False})]
    assert len((tmp_path / "out.jsonl").read_text().splitlines()) == 3


def test_a_hub_that_cannot_be_reached_is_one_clear_error(tmp_path):
    with pytest.raises(DataError, match=r"berkeley-nest/Nectar cannot be read: .*Hub"):
        prepare(tmp_path, "berkeley-nest/Nectar")


BAD_BYTES = {
    "truncated": (lambda line: line[: len(line) // 2], "cannot be read"),
    "raw NUL": (lambda line: line.replace(b"question", b"quest\0ion"), "cannot be read"),
    "lone surrogate": (lambda line: line.replace(b"question", b"\\ud800"), "surrogate"),
    "Latin-1": (lambda line: line.replace(b"question", b"caf\xe9"), "utf-8"),
}


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize("case", BAD_BYTES)
def test_a_damaged_file_is_one_clear_error(tmp_path, howto, case, streaming):
    spoil, fragment = BAD_BYTES[case]
    lines = [json.dumps(raw_row(i, howto)).encode() for i in range(3)]
    lines[1] = spoil(lines[1])
    (tmp_path / "raw.jsonl").write_bytes(b"\n".join(lines) + b"\n")
    with pytest.raises(DataError, match=fragment):
        prepare(tmp_path, str(tmp_path / "raw.jsonl"), streaming=streaming)
    assert not (tmp_path / "out.jsonl").exists()


def test_byte_order_marks_and_crlf_do_no_harm(tmp_path, howto):
    lines = [json.dumps(raw_row(i, howto)).encode() for i in range(3)]
    (tmp_path / "raw.jsonl").write_bytes(b"\xef\xbb\xbf" + b"\r\n".join(lines) + b"\r\n")
    assert len(prepare(tmp_path, str(tmp_path / "raw.jsonl"))[0]) == 3


def test_responses_of_a_megabyte_pass_through(tmp_path, howto):
    raw = raw_row(0, howto)
    for answer in raw["answers"]:
        answer["answer"] = answer["model"] + " wörds" * 150_000
    rows, _ = prepare(tmp_path, write(tmp_path / "raw.jsonl", [raw]))
    assert [len(response) for response in rows[0]["responses"]] == [7 + 900_000] * 7


def test_what_cannot_be_trained_on_at_all_is_said(tmp_path, howto):
    raw = raw_row(0, howto) | {"prompt": "plain"}
    with pytest.raises(DataError, match=r"none of the 1 rows .* can be used.*no turn of a Human"):
        prepare(tmp_path, write(tmp_path / "raw.jsonl", [raw]))


@pytest.mark.parametrize(
    ("kwargs", "fragment"),
    [
        ({"output_file": None}, "output_file must end in .jsonl or .parquet"),
        ({"output_file": "x.csv"}, "output_file must end in .jsonl or .parquet, got 'x.csv'"),
        ({"queries": -1}, "queries must be at least 0"),
        ({"max_prompt_length": 0}, "max_prompt_length must be at least 1"),
    ],
)
def test_wrong_settings_are_named(kwargs, fragment):
    with pytest.raises(ValueError, match=fragment):
        prepare_nectar.main(prepare_nectar.NectarConfig(**kwargs))


def test_the_file_is_whole_or_not_there(tmp_path, howto, monkeypatch):
    """A disk that fills up while the new file is written leaves the old one."""
    source = write(tmp_path / "raw.jsonl", [raw_row(i, howto) for i in range(3)])
    first, _ = prepare(tmp_path, source, queries=2)

    def full(descriptor):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(OSError, match="No space left"):
        prepare(tmp_path, source, queries=3)
    assert list(load_queries(str(tmp_path / "out.jsonl"))) == first
    assert not list(tmp_path.glob("*.tmp"))


def test_what_comes_out_wants_rubrics_and_nothing_else(tmp_path, howto):
    source = write(tmp_path / "raw.jsonl", [raw_row(i, howto) for i in range(3)])
    prepare(tmp_path, source)
    dataset = load_queries(str(tmp_path / "out.jsonl"))
    with pytest.raises(DataError, match=r"no column 'rubrics' .*generate_rubrics"):
        QueryTable(dataset, anchors_needed=7)
    rubrics = [[{"text": "Is clear.", "weight": 3}]] * 3
    assert len(QueryTable(dataset.add_column("rubrics", rubrics), anchors_needed=7)) == 3
    assert len(list(iterate(dataset))) == 3
