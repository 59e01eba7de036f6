"""Nectar: its prompts, which rows are taken and why others are not, the file that comes out."""

import itertools
import json
import random
from pathlib import Path

import prepare_nectar
import pytest
from datasets import Dataset, load_dataset
from helpers.nectar_rows import raw_row
from hypothesis import example, given
from hypothesis import strategies as st

from rankbuffer_tools.batch.output import write_rows
from rankbuffer_tools.data.nectar import Unusable, parse_prompt, place_of, sample_rows, to_row
from rankbuffer_trl.data._queries import DataError, load_queries
from rankbuffer_trl.errors import SettingsError

pytestmark = pytest.mark.usefixtures("cache")

# The prompt

LONG = "a\n" * 500_000 + "b"  # a megabyte, which a careless regular expression would read for hours
UNUSABLE = {
    "": "no turn of a Human",
    "How do I make tea?": "no turn of a Human",
    "Hello.\n\nHuman: Hi\n\nAssistant: ": "text before its first turn",
    "\n\nHuman: a\n\nAssistant: b": "ends in an assistant turn",
    "\n\nAssistant: a\n\nHuman: b\n\nAssistant: ": "do not alternate",
    "\n\nHuman: a\n\nHuman: b\n\nAssistant: ": "do not alternate",
    "\n\nHuman: \n\nAssistant: ": "empty turn",
    "\n\nHuman: a\n\nAssistant: \n\nHuman: b\n\nAssistant: ": "empty turn",
}


def test_parse_prompt_says_why_a_text_is_no_prompt():
    for text, reason in UNUSABLE.items():
        with pytest.raises(Unusable, match=reason):
            parse_prompt(text)
    for text in ('[{"role": "user", "content": "hi"}]', "[INST] What is tea? [/INST]"):  # which the next step refuses
        with pytest.raises(Unusable, match="the prompt must be the"):
            to_row({"prompt": f"\n\nHuman: {text}\n\nAssistant: ", "answers": []})
    assert parse_prompt(f"\n\nHuman: {LONG}\n\nAssistant: ")[0]["content"] == LONG


PIECES = ["\n\nHuman:", "\n\nAssistant:", "Human:", "Assistant:", " ", "\n", "\n\n", "\r\n", "\ufeff", "a", "é", "ß:"]
calm = st.lists(st.sampled_from([piece for piece in PIECES if len(piece) < 5 or piece[0] != "\n"]), max_size=5)


def odd(turns: list) -> list:
    """Drop the last turn if their number is even."""
    return turns[: len(turns) - (len(turns) + 1) % 2]


def speak(turns: list[list[str]]) -> str:
    return "".join(PIECES[i % 2] + " " * (i % 3) + "".join(words) + "a" for i, words in enumerate(turns)) + PIECES[1]


prompts = st.one_of(
    st.lists(st.sampled_from(PIECES), max_size=16).map("".join),  # mostly refused
    st.lists(calm, min_size=1, max_size=5).map(lambda turns: speak(odd(turns))),
)


@given(prompts)
@example("\ufeff\n\nHuman: a\n\nAssistant: ")
def test_parse_prompt_agrees_with_a_slow_reader(text):
    """Line by line: a line that begins with a marker after an empty line, or first of all, begins a turn."""
    lines = text.removeprefix("\ufeff").replace("\r\n", "\n").split("\n")
    turns, before = [], ""
    for i, line in enumerate(lines):
        name = next((name for name in ("Human", "Assistant") if line.lstrip().startswith(f"{name}:")), None)
        first = not turns and not before.strip()
        after_empty = i >= 2 and lines[i - 1] == ""
        if name and (first or (after_empty and line.startswith(f"{name}:"))):
            turns.append([name, line.lstrip()[len(name) + 1 :]])
        elif turns:
            turns[-1][1] += "\n" + line
        else:
            before += line
    turns = [(name, content.strip()) for name, content in turns]
    if turns and turns[-1] == ("Assistant", ""):
        turns.pop()
    alternate = [name for name, _ in turns] == [("Human", "Assistant")[i % 2] for i in range(len(turns))]
    good = alternate and len(turns) % 2 == 1 and all(content for _, content in turns) and not before.strip()
    try:
        messages = parse_prompt(text)
    except Unusable:
        assert not good
    else:
        assert good
        assert [message["content"] for message in messages] == [content for _, content in turns]
        assert [message["role"] for message in messages] == [("user", "assistant")[i % 2] for i in range(len(turns))]


# A row


def test_to_row_orders_responses_from_worst_to_best(howto):
    row = to_row(raw_row(3, howto))
    assert row["responses"] == [f"{text} (3)" for text in howto[3]["responses"]]
    assert row["models"] == [f"model-{rank}" for rank in (7, 6, 5, 4, 3, 2, 1)]
    assert row["prompt"] == [{"role": "user", "content": howto[3]["prompt"][0]["content"] + " This is question 3."}]
    assert row["query_id"] == to_row(raw_row(3, howto))["query_id"] != to_row(raw_row(4, howto))["query_id"]
    nameless = raw_row(3, howto)
    for answer in nameless["answers"]:
        answer |= {"model": None, "answer": f" {answer['answer']}\r\nb "}
    nameless["answers"][3]["model"] = " \n"
    assert to_row(nameless)["models"] == ["unknown"] * 7
    assert to_row(nameless)["responses"] == [f"{text}\nb" for text in row["responses"]]


def change(place: int, **answer):
    return lambda row: row["answers"][place].update(answer)


def ranks(new):
    return lambda row: [answer.update(rank=new(answer["rank"])) for answer in row["answers"]]


RANKS, UNCLEAN = "the ranks are not 1 to 7, each once", "is empty or is not clean text"
DROPS = {
    "ties": (ranks(lambda rank: min(rank, 6)), RANKS),
    "gaps": (ranks(lambda rank: rank + (rank > 3)), RANKS),
    "from 0": (ranks(lambda rank: rank - 1), RANKS),
    **{f"rank {rank}": (change(2, rank=rank), RANKS) for rank in (2.5, None, float("nan"))},
    "six responses": (lambda row: row["answers"].pop(), "not 7 responses"),
    **{f"{text!a}": (change(4, answer=text), f"a response {UNCLEAN}") for text in (" \n", None, "a\0b", "a\ud800b")},
    "a surrogate": (lambda row: row.update(prompt="\n\nHuman: \udc00\n\nAssistant: "), f"the prompt {UNCLEAN}"),
    "the same response": (
        lambda row: row["answers"][0].update(answer=" " + row["answers"][1]["answer"] + "\r\n"),
        "two responses are the same",
    ),
    "no prompt": (lambda row: row.update(prompt=None), "prompt or answers are missing"),
    "no answers": (lambda row: row.update(answers=None), "prompt or answers are missing"),
    "assistant turn": (lambda row: row.update(prompt=row["prompt"] + "Sure."), "the prompt ends in an assistant turn"),
}


def test_sample_leaves_a_row_out_and_counts_why(howto):
    for case, (spoil, reason) in DROPS.items():
        row = raw_row(0, howto)
        spoil(row)
        found = sample_rows([row, raw_row(1, howto)], None, 42)
        assert found.rows == [to_row(raw_row(1, howto))] and found.dropped == {reason: 1}, case


DRIFT = {
    "no column 'prompt'; the columns are ['answers', 'turns'": lambda row: row.pop("prompt"),
    "no column 'answers'": lambda row: row.update(responses=row.pop("answers")),
    "prompt is ['a']": lambda row: row.update(prompt=["a"]),
    "answers is 'a'": lambda row: row.update(answers="a"),
    "answers[0] is 'a'": lambda row: row.update(answers=["a"] * 7),
    "answers[0].rank is '1'": change(0, rank="1"),
    "answers[0].rank is True": change(0, rank=True),
    f"answers[6].answer is {'7' * 70}.": change(6, answer=int("7" * 70)),
    "answers[2].model is 7": change(2, model=7),
    "answers[2] has no 'model'; it has ['answer', 'rank']": lambda row: row["answers"][2].pop("model"),
}


def test_sample_refuses_another_schema_and_says_what_it_found(howto):
    for found, spoil in DRIFT.items():
        row = raw_row(1, howto)
        spoil(row)
        with pytest.raises(DataError) as error:
            sample_rows([raw_row(0, howto), row], 1000, 42)
        assert str(error.value).startswith("row 1 does not have Nectar's schema") and found in str(error.value)


# Which rows


@given(
    st.lists(st.tuples(st.integers(0, 8), st.sampled_from("ok ok ok tie long".split())), max_size=25),
    st.one_of(st.none(), st.integers(1, 9)),
    st.integers(0, 3),
)
def test_sample_takes_the_first_usable_rows_of_a_random_order(howto_rows, made, n, seed):
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
    found = sample_rows(raws, n, seed, fault)
    assert found.rows == taken
    assert sorted(reason for reason, count in found.dropped.items() for _ in range(count)) == sorted(reasons)
    assert found.read == len(raws) and found.looked_at == len(taken) + len(reasons)


@pytest.fixture(scope="module")
def howto_rows(howto):
    return [raw_row(i, howto) for i in range(9)]


def test_sample_depends_on_the_seed_and_not_on_the_order_of_the_rows(howto):
    raws = [raw_row(i, howto) for i in range(60)]
    for raw in raws[::3]:
        raw["answers"][0]["rank"] = 8.0
    straight = sample_rows(raws, 20, 42)
    order = sorted(range(60), key=lambda i: place_of(raws[i]["prompt"], 42))
    assert straight.dropped == {RANKS: order.index([i for i in order if i % 3][19]) - 19}
    random.Random(0).shuffle(raws)
    assert sample_rows(raws, 20, 42) == straight
    assert sample_rows(raws, 20, 43).rows != straight.rows


# The recipe


def write(path: Path, raws: list[dict]) -> str:
    write_rows(path, raws)
    return str(path)


def prepare(tmp_path, source: str, name: str = "out.jsonl", **kwargs) -> tuple[list[dict], dict]:
    config = prepare_nectar.NectarConfig(dataset_name=source, output_file=str(tmp_path / name), **kwargs)
    assert prepare_nectar.main(config) == 0
    report = json.loads((tmp_path / f"{name}.provenance.json").read_text())
    return list(load_queries(str(tmp_path / name))), report["steps"][0]


def test_prepare_nectar_takes_the_same_queries_from_any_file_streamed_or_not(tmp_path, howto, capsys):
    raws = [raw_row(i, howto) for i in range(40)]
    raws[5]["answers"][0]["rank"] = raws[5]["answers"][1]["rank"]
    raws[7]["prompt"] += "Sure."
    jsonl, parquet = write(tmp_path / "raw.jsonl", raws), write(tmp_path / "raw.parquet", raws)
    (tmp_path / "folder").mkdir()
    write(tmp_path / "folder" / "train.jsonl", raws)
    first, report = prepare(tmp_path, jsonl, queries=0)
    assert len(first) == 38 and report["left_out"] == {RANKS: 1, "the prompt ends in an assistant turn": 1}
    printed = capsys.readouterr()
    assert "40 rows read, 40 looked at, 38 taken" in printed.out and f"left out: 1 because {RANKS}, 1" in printed.out
    first, report = prepare(tmp_path, jsonl, queries=10)
    assert "note:" not in printed.err + capsys.readouterr().err and report["step"] == "nectar"
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
    unusable = write(tmp_path / "plain.jsonl", [raws[0] | {"prompt": "plain"}])
    with pytest.raises(DataError, match=r"none of the 1 rows .* can be used.*no turn of a Human"):
        prepare(tmp_path, unusable)


def test_prepare_nectar_takes_the_rows_that_datasets_shuffles_to_the_front(tmp_path, howto):
    raws = [raw_row(i, howto) for i in range(40)]
    source = write(tmp_path / "raw.jsonl", raws)
    front = load_queries(source).shuffle(seed=42).select(range(12)).to_list()
    rows, report = prepare(tmp_path, source, queries=12, shuffle=True)
    assert rows == [to_row(raw) for raw in front] and (report["shuffle"], report["seed"]) == (True, 42)
    assert rows != prepare(tmp_path, source, queries=12)[0]
    spoilt = raws.index(front[3])
    raws[spoilt] = raws[spoilt] | {"prompt": front[1]["prompt"]}
    source = write(tmp_path / "again.jsonl", raws)
    rows, report = prepare(tmp_path, source, queries=11, shuffle=True)
    assert rows == [to_row(raw) for raw in front if raw is not front[3]], "the next row takes its place"
    assert report["left_out"] == {"the same prompt as an earlier row": 1}
    with pytest.raises(SettingsError, match="set streaming to false"):
        prepare(tmp_path, source, shuffle=True, streaming=True)


def test_prepare_nectar_refuses_settings_that_cannot_work():
    for wrong in ({"shuffle": True, "seed": -1}, {"queries": [1]}, {"queries": None}):
        with pytest.raises(SettingsError, match=f"{[*wrong][-1]} must be"):
            prepare_nectar.NectarConfig(**wrong)
    assert prepare_nectar.NectarConfig(seed=-1).seed == -1, "the hash takes any seed"


def test_prepare_nectar_counts_prompts_in_the_policys_template(tmp_path, howto, tiny_policy, capsys):
    raws = [raw_row(i, howto) for i in range(6)]
    raws[2]["prompt"] = "\n\nHuman: " + "How do I make tea? " * 40 + "question 2\n\nAssistant: "
    source = write(tmp_path / "raw.jsonl", raws)
    rows, report = prepare(tmp_path, source, tokenizer=tiny_policy, max_prompt_length=150)
    assert len(rows) == 5 and report["left_out"] == {"the prompt has more than 150 tokens": 1}
    assert report["tokens"] == report["tokenizer"] == Path(tiny_policy).name
    assert "note: 1,000 queries were asked for" in capsys.readouterr().err
    rows, report = prepare(tmp_path, source, max_prompt_length=150)
    assert len(rows) == 5 and "estimated" in report["tokens"]
    longest = -(-len(raws[2]["prompt"].removeprefix("\n\nHuman: ").removesuffix("\n\nAssistant: ")) // 3)
    for limit, taken in ((longest, 6), (longest - 1, 5)):
        assert len(prepare(tmp_path, source, max_prompt_length=limit)[0]) == taken
    with pytest.raises(SettingsError, match=r"there is no folder .*nowhere: models are folders"):
        prepare(tmp_path, source, tokenizer=str(tmp_path / "nowhere"))


def test_prepare_nectar_asks_the_hub_for_nectar(tmp_path, howto, monkeypatch):
    """The Hub cannot be reached in tests. What `datasets` is asked for is what it would be asked for."""
    asked = []

    def load(path, **kwargs):
        asked.append((path, kwargs))
        return Dataset.from_list([raw_row(i, howto) for i in range(3)])

    monkeypatch.setattr("rankbuffer_trl.data._queries.load_dataset", load)
    config = prepare_nectar.NectarConfig(output_file=str(tmp_path / "out.jsonl"))
    assert prepare_nectar.main(config) == 0
    assert asked == [("berkeley-nest/Nectar", {"name": None, "split": "train", "streaming": False})]
    assert len((tmp_path / "out.jsonl").read_text().splitlines()) == 3


def test_prepare_nectar_on_a_full_disk_leaves_the_old_file(tmp_path, howto, monkeypatch):
    source = write(tmp_path / "raw.jsonl", [raw_row(i, howto) for i in range(3)])
    first, _ = prepare(tmp_path, source, queries=2)

    def full(descriptor):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(OSError, match="No space left"):
        prepare(tmp_path, source, queries=3)
    assert list(load_queries(str(tmp_path / "out.jsonl"))) == first
    assert not list(tmp_path.glob("*.tmp"))
