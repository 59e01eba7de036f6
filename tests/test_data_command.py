"""The command `rankbuffer-data`, pushing with a card, and the whole road from raw rows to a training run."""

import json
import re
import shlex
from pathlib import Path

import generate_rubrics
import prepare_nectar
import pytest
from conftest import QUICKSTART
from datasets import Dataset
from generate_responses import ResponsesConfig
from generate_rubrics import RubricsConfig
from helpers.http_server import served
from helpers.nectar_rows import RUBRICS, Model, raw_row, rubrics_text
from helpers.scripted import contents
from prepare_nectar import NectarConfig
from test_recipes import commands
from trl import TrlParser

from rankbuffer_lab.audit import command as audit_command
from rankbuffer_trl.buffer import select_k0
from rankbuffer_trl.data import command, publish, recipe
from rankbuffer_trl.data.check import CheckSettings, anchors, check_dataset
from rankbuffer_trl.data.output import write_provenance, write_rows
from rankbuffer_trl.data.queries import DataError, QueryTable, load_queries
from rankbuffer_trl.data.tokens import TokenCounter
from rankbuffer_trl.judge import insertion_question
from rankbuffer_trl.judge.reach import TURN_TOKENS
from rankbuffer_trl.training import command as train
from rankbuffer_trl.training.parser import RecipeParser


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")


def run_command(capsys, *words: object) -> str:
    command.main([str(word) for word in words])
    return capsys.readouterr().out


def refused(capsys, *words: object) -> tuple[str, str]:
    """Run a command that exits with status 1. Return what it printed, and its last line."""
    with pytest.raises(SystemExit) as exit:
        run_command(capsys, *words)
    assert isinstance(exit.value.code, str)  # printed to standard error, and the status is 1
    return capsys.readouterr().out, exit.value.code


# Check


def test_the_sample_that_ships_is_well_formed(capsys):
    out = run_command(capsys, "check", QUICKSTART / "howto.jsonl")
    assert "36 queries, every row well-formed" in out
    assert "responses per query: 7 (36)" in out and "rubrics per query: 4 (26), 5 (10)" in out
    assert "the same prompt as an earlier query: 0" in out and "NOT READY" not in out
    assert re.search(r"judge prompt at 2 K0 +36", out)


def test_lengths_are_those_of_the_real_prompts(howto, tiny_policy):
    tokens, settings = TokenCounter(tiny_policy), CheckSettings(max_completion_length=100)
    found = check_dataset(Dataset.from_list(howto), tokens, settings)
    table = QueryTable(Dataset.from_list(howto), 7)
    queries = [table[query_id] for query_id in table.ids]
    assert found.lengths["response"] == [tokens.text(text) for query in queries for text in query.responses]
    for name, K in (("judge prompt at K0", 4), ("judge prompt at 2 K0", 8)):
        shown = [
            tuple(select_k0(query.responses, 4)) if K == 4 else (*query.responses, query.responses[0])
            for query in queries
        ]
        asked = [
            insertion_question(query, texts, max(query.responses, key=len))
            for query, texts in zip(queries, shown, strict=True)
        ]
        assert found.lengths[name] == [tokens.text(question.prompt(True)) for question in asked]
    room = len('{"position": 8}') + 1 + 256
    assert found.context == max(found.lengths["judge prompt at 2 K0"]) + 2 * room + TURN_TOKENS
    assert found.later_context > 9 * 100 * 9 // 8 + 2 * room + TURN_TOKENS
    wordy = check_dataset(Dataset.from_list(howto), tokens, CheckSettings(max_completion_length=200, guard=False))
    bare = check_dataset(Dataset.from_list(howto), tokens, CheckSettings(max_completion_length=100, guard=False))
    assert wordy.later_context - bare.later_context == 9 * 100
    grouped = check_dataset(Dataset.from_list(howto), tokens, CheckSettings(max_completion_length=100, most_shown=20))
    assert grouped.later_context - found.later_context == 11 * 100 * 9 // 8 + 1  # 20 and 9, each rounded down
    chat = [{"role": "user", "content": queries[0].text}]
    rendered = f"<|im_start|>user\n{queries[0].text}<|im_end|>\n<|im_start|>assistant\n"
    assert found.lengths["prompt"][0] == tokens.chat(chat) == tokens.text(rendered)


def test_a_tokenizer_without_a_template_counts_the_texts(tmp_path, tiny_policy):
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(tiny_policy)
    tokenizer.chat_template = None
    tokenizer.save_pretrained(tmp_path)
    tokens = TokenCounter(str(tmp_path))
    assert tokens.chat([{"role": "user", "content": "boil water"}]) == tokens.text("boil water") > 0


def test_anchors_are_those_of_a_first_buffer_and_repeat_where_they_are_few():
    assert anchors("abcdefg", 4) == ["a", "c", "e", "g"]
    assert anchors("abc", 8) == list("abcabcab")


def test_what_is_odd_is_listed(howto, tmp_path, capsys):
    rows = [dict(row) for row in howto[:6]]
    rows[1]["prompt"] = rows[0]["prompt"]
    rows[2]["responses"] = ["same", "same"]
    rows[3]["responses"] = []
    rows[4]["rubrics"] = []
    write_rows(tmp_path / "odd.jsonl", rows)
    words = ["check", tmp_path / "odd.jsonl", "--max_prompt_length", 8, "--sample", 2, "--no_guard"]
    out, last = refused(capsys, *words)
    assert last == f"rankbuffer-data: {tmp_path / 'odd.jsonl'} is not ready, for the reasons above"
    assert f"the same prompt as an earlier query: 1 ({rows[1]['query_id']})" in out
    assert f"the same response twice: 1 ({rows[2]['query_id']})" in out
    assert re.search(r"prompts above 8 tokens: \d", out)
    assert "NOT READY: 1 queries have no rubrics; recipes/generate_rubrics.py makes them" in out
    assert "NOT READY: 2 queries have fewer than 4 responses; recipes/generate_responses.py makes them" in out
    assert "prompts have more than" not in out, "an estimate of tokens does not stop a run"
    assert re.search(r"prompt +6 ", out) and re.search(r"judge prompt at K0 +1 ", out)


def test_a_set_without_rubrics_and_responses_can_be_checked(tmp_path, capsys):
    write_rows(tmp_path / "bare.jsonl", [{"query_id": "a", "prompt": [{"role": "user", "content": "Why?"}]}])
    out, _ = refused(capsys, "check", tmp_path / "bare.jsonl")
    assert "NOT READY: 1 queries have no rubrics" in out and "judge prompt" not in out
    assert "judge context needed if every rollout has 4,096 tokens" in out


def test_a_set_is_ready_once_a_run_can_start_with_it(howto, tmp_path, capsys, tiny_policy):
    for row in (rows := json.loads(json.dumps(howto[:4]))):
        del row["responses"]
    write_rows(tmp_path / "mine.jsonl", rows)
    out, _ = refused(capsys, "check", tmp_path / "mine.jsonl")
    assert "NOT READY: 4 queries have fewer than 4 responses" in out
    for enough in (("--no_responses",), ("--method", "listwise")):
        assert "NOT READY" not in run_command(capsys, "check", tmp_path / "mine.jsonl", *enough)
    words = ["check", tmp_path / "mine.jsonl", "--no_responses", "--tokenizer", tiny_policy, "--max_prompt_length", 8]
    out, _ = refused(capsys, *words)
    assert "NOT READY: 4 prompts have more than 8 tokens" in out


def test_the_first_twenty_faults_are_listed_with_lines_and_true_values(tmp_path, capsys):
    good = {"query_id": "q", "prompt": "Why?", "rubrics": [{"text": "Is clear.", "weight": 1}], "responses": ["a"]}
    half = good | {"query_id": "half", "rubrics": [{"text": "Is clear.", "weight": 2.5}]}
    text = good | {"query_id": "text", "rubrics": [{"text": "Is clear.", "weight": "5"}], "responses": "abc"}
    bare = {"prompt": "Who?"}
    lines = [
        json.dumps(good).encode(),
        json.dumps(good).encode(),
        b"",
        json.dumps(half).encode(),
        json.dumps(text).encode(),
        '{"prompt": "Où?"}'.encode("latin-1"),
        b'{"prompt": "Why?"',
        b"7",
        b'{"prompt": "a\\u0000b"}',
        *[json.dumps(bare).encode()] * 20,
    ]
    (tmp_path / "mine.jsonl").write_bytes(b"\r\n".join(lines))
    out, last = refused(capsys, "check", tmp_path / "mine.jsonl")
    assert last == (
        f"rankbuffer-data: {tmp_path / 'mine.jsonl'} is not ready. Faults: 27. The first 20 are listed above."
    )
    found = out.splitlines()
    assert [re.sub(r" \(query_id 'prompt-.{16}'\)", "", line) for line in found[:8]] == [
        "line 2: the query_id 'q' is that of line 1, too",
        "line 4 (query_id 'half'): rubrics[0].weight must be an integer from 1 to 5, got 2.5",
        "line 5 (query_id 'text'): rubrics[0].weight must be an integer from 1 to 5, got '5'",
        "line 5 (query_id 'text'): responses must be a list of text from worst to best, got 'abc'",
        "line 6: is not UTF-8 (byte 14 is 0xf9): save the file as UTF-8",
        "line 7: is not JSON (Expecting ',' delimiter at column 18)",
        "line 8: must be a JSON object, got 7",
        r"line 9: prompt[0].content must be text without NUL characters, got 'a\x00b'",
    ]
    assert len(found) == 20
    (id,) = set(re.findall(r"\(query_id '(.*)'\)", "\n".join(found[8:])))
    assert (
        found[8]
        == f"line 11 (query_id '{id}'): the prompt is the same as in line 10, and a row without query_id needs its own"
    )


@pytest.mark.parametrize(
    ("name", "text", "fault"),
    [
        ("a.json", '\ufeff [{"prompt": "Why?"},\n {"prompt": 3}]', "row 2 .*: prompt must be a text .*, got 3"),
        (
            "a.json",
            '[{"prompt": "Why?"},\n {"prompt": ]',
            r"a.json: is not JSON \(Expecting value at line 2, column 13\)",
        ),
        ("a.json", '{"prompt": "Why?"}\n{"prompt": [3]}', r"line 2 .*: prompt\[0\] must have role and content, got 3"),
        ("a.jsonl", "", None),
    ],
)
def test_every_form_of_json_is_read(tmp_path, capsys, name, text, fault):
    (tmp_path / name).write_text(text, encoding="utf-8")
    out, last = refused(capsys, "check", tmp_path / name)
    if fault:
        assert re.fullmatch(fault, out.strip()) and last.endswith("is not ready. Faults: 1.")
    else:
        assert "cannot be read: it has no rows" in last


def test_rows_of_a_parquet_file_are_counted_from_one(howto, tmp_path, capsys):
    rows = json.loads(json.dumps(howto[:3]))
    rows[2]["rubrics"][0]["weight"] = 9
    write_rows(tmp_path / "mine.parquet", rows)
    out, _ = refused(capsys, "check", tmp_path / "mine.parquet")
    assert (
        out.strip()
        == f"row 3 (query_id '{rows[2]['query_id']}'): rubrics[0].weight must be an integer from 1 to 5, got 9"
    )


@pytest.mark.parametrize(
    ("words", "shown"),
    [
        ([], 9),
        (["--k0", 2], 8),
        (["--num_generations", 16], 16),
        (["--method", "listwise"], 8),
        (["--method", "rrc_scr", "--k0", 7], 2),
        (["--method", "llm_buffer", "--num_generations", 6], 10),
    ],
    ids=str,
)
def test_the_context_follows_the_method(howto, tmp_path, capsys, words, shown):
    write_rows(tmp_path / "one.jsonl", howto[:1])
    out = run_command(capsys, "check", tmp_path / "one.jsonl", "--max_completion_length", 1000, *words)
    tokens, one = re.search(r"about ([\d,]+) tokens \(a prompt can show (\d+) responses\)", out).groups()
    assert int(one) == shown
    assert 0 <= int(tokens.replace(",", "")) - shown * 1125 - TURN_TOKENS < 1500  # the frame and two answers


@pytest.mark.parametrize(
    ("words", "fragment"),
    [
        (["nowhere.jsonl"], "nowhere.jsonl does not exist"),
        (["howto", "--k0", "1"], "k0 must be at least 2, got 1"),
        (["howto", "--tokenizer", "no/where"], "the tokenizer no/where cannot be loaded"),
        (["table.csv"], "table.csv is not supported, because rows need lists: write table.jsonl"),
    ],
)
def test_what_cannot_be_checked_ends_in_one_line(howto, tmp_path, words, fragment):
    write_rows(tmp_path / "howto.jsonl", howto)
    (tmp_path / "table.csv").touch()
    file = tmp_path / (words[0] if "." in words[0] else f"{words[0]}.jsonl")
    with pytest.raises(SystemExit, match=fragment) as exit:
        command.main(["check", str(file), *words[1:]])
    assert str(exit.value).startswith("rankbuffer-data: ") and "\n" not in str(exit.value)[:200]


def test_only_a_push_can_be_public(capsys):
    assert command.make_parser().parse_args(["push", "a.jsonl", "me/a", "--public"]).public
    assert not command.make_parser().parse_args(["push", "a.jsonl", "me/a"]).public
    with pytest.raises(SystemExit):
        command.make_parser().parse_args(["card", "a.jsonl", "me/a", "--public"])
    assert "unrecognized arguments: --public" in capsys.readouterr().err


def a_bug(*_):
    return list(zip([1], [], strict=True))


def test_a_bug_keeps_its_traceback_in_every_command(monkeypatch):
    monkeypatch.setattr(command, "run_command", a_bug)
    with pytest.raises(ValueError, match="zip"):
        command.main(["check", "a.jsonl"])
    monkeypatch.setattr("sys.argv", ["prepare_nectar.py", "--output_file", "a.jsonl"])
    with pytest.raises(ValueError, match="zip"):
        recipe.run(NectarConfig, a_bug)
    monkeypatch.setattr("sys.argv", ["rankbuffer-audit", "--dataset_name", "a.jsonl", "--samples", "b.jsonl"])
    monkeypatch.setattr("rankbuffer_lab.audit.command.audit", a_bug)
    with pytest.raises(ValueError, match="zip"):
        audit_command.main()


@pytest.mark.parametrize(
    ("main", "known"),
    [(lambda: recipe.run(NectarConfig, a_bug), ""), (audit_command.main, "samples: b.jsonl\n")],
    ids=["recipe", "audit"],
)
def test_a_key_that_does_not_exist_ends_in_one_line(tmp_path, monkeypatch, main, known):
    (tmp_path / "my.yaml").write_text(f"dataset_name: a.jsonl\n{known}querys: 3\n")
    monkeypatch.setattr("sys.argv", ["command", "--config", str(tmp_path / "my.yaml")])
    with pytest.raises(SystemExit, match="querys"):
        main()


RECIPES = {
    "prepare_nectar": NectarConfig,
    "generate_rubrics": RubricsConfig,
    "generate_responses": ResponsesConfig,
}


def test_the_commands_of_the_documentation_are_understood():
    seen = set()
    for line in commands("docs/data.md"):
        words = shlex.split(line)
        if words[0] == "rankbuffer-data":
            seen.add(command.make_parser().parse_args(words[1:]).command)
        elif recipe := RECIPES.get(Path(words[1]).stem):
            TrlParser((recipe,)).parse_args_and_config(words[2:])
            seen.add(Path(words[1]).stem)
    assert seen == {"check", "card", "push", "prepare_nectar", "generate_rubrics", "generate_responses"}


# Push


class FakeHub:
    """The one seam to the Hub: what is made and committed, on the disk."""

    def __init__(self, folder):
        self.folder, self.made = folder, []

    def create_repo(self, repo_id, *, repo_type, private, exist_ok):
        assert repo_type == "dataset" and exist_ok
        self.made.append((repo_id, private))

    def create_commit(self, repo_id, *, repo_type, operations, commit_message):
        assert repo_type == "dataset"
        self.folder.mkdir()
        for operation in operations:
            with operation.as_file() as content:
                (self.folder / operation.path_in_repo).write_bytes(content.read())

        class Commit:
            commit_url = f"https://hub/{repo_id}/commit/1"

        return Commit


STEPS = [
    {
        "step": "nectar",
        "dataset_name": "berkeley-nest/Nectar",
        "seed": 42,
        "queries_taken": 1000,
    },
    {
        "step": "rubrics",
        "dataset_name": "a.jsonl",
        "model": "deepseek-v4-flash",
        "temperature": 0.2,
        "cost": {"calls": 9},
    },
]


@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_a_set_is_pushed_with_its_card_and_can_be_loaded_from_there(tmp_path, howto, monkeypatch, capsys, kind):
    path = tmp_path / f"mine.{kind}"
    write_rows(path, [row | {"models": ["gpt-4"] * 7} for row in howto])
    write_provenance(path, STEPS)
    fake = FakeHub(tmp_path / "hub")
    monkeypatch.setattr(publish, "HfApi", lambda: fake)
    out = run_command(capsys, "push", path, "me/howto-36")
    assert out.strip() == "pushed: https://hub/me/howto-36/commit/1" and fake.made == [("me/howto-36", True)]
    assert list(load_queries(str(tmp_path / "hub"))) == list(load_queries(str(path)))
    assert json.loads((tmp_path / "hub" / "provenance.json").read_text())["steps"] == STEPS
    card = (tmp_path / "hub" / "README.md").read_text()
    for said in (
        f"path: train.{kind}",
        "# howto-36",
        "36 queries, 154 rubrics, 252 responses. Responses by model: gpt-4 252.",
        "seed `42`",
        'model `"deepseek-v4-flash"`',
        "temperature `0.2`",
        "Apache-2.0",
        "Check that card",
        "Text by `deepseek-v4-flash` (rubrics)",
        "You are an expert evaluator for assistant responses.",
        "[Rank 7 | model={MODEL_7}]",
    ):
        assert said in card, said
    assert not re.search(r"\{(NAME|FILE|COUNTS|STEPS|SOURCES|RUBRICS|SYSTEM|USER)\}", card)
    assert run_command(capsys, "card", path, "me/howto-36") == card


def test_own_queries_leave_the_licence_to_their_owner(tmp_path, howto, monkeypatch, capsys):
    write_rows(tmp_path / "mine.jsonl", howto)
    assert "Queries come from `an unknown source`" in run_command(capsys, "card", tmp_path / "mine.jsonl", "me/x")
    write_provenance(tmp_path / "mine.jsonl", [STEPS[1]])
    out = run_command(capsys, "card", tmp_path / "mine.jsonl", "me/x")
    assert "Queries come from `a.jsonl`. Whoever publishes" in out and "Nectar" not in out


def test_generic_rubrics_are_called_so(tmp_path, howto, capsys):
    write_rows(tmp_path / "mine.jsonl", howto)
    write_provenance(tmp_path / "mine.jsonl", [{"step": "rubrics", "dataset_name": "a.jsonl", "generic": True}])
    out = run_command(capsys, "card", tmp_path / "mine.jsonl", "me/x")
    assert "got the same generic ones; no model wrote these" in out
    assert "Text by" not in out and "those of the paper" not in out


def test_what_is_not_finished_is_not_pushed(tmp_path, howto):
    write_rows(tmp_path / "mine.jsonl", [{k: v for k, v in howto[0].items() if k != "rubrics"}])
    with pytest.raises(DataError, match="rubrics must be a non-empty list"):
        publish.push(str(tmp_path / "mine.jsonl"), "me/x", api=FakeHub(tmp_path / "hub"))


def test_a_refusal_of_the_hub_is_one_clear_error(tmp_path, howto):
    from httpx import Request, Response
    from huggingface_hub.errors import HfHubHTTPError

    class Refusing:
        def create_repo(self, *args, **kwargs):
            raise HfHubHTTPError("401 Unauthorized", response=Response(401, request=Request("POST", "https://hub")))

    write_rows(tmp_path / "mine.jsonl", howto)
    with pytest.raises(DataError, match=r"mine\.jsonl cannot be pushed to me/x: 401"):
        publish.push(str(tmp_path / "mine.jsonl"), "me/x", api=Refusing())


# The road


@pytest.mark.slow
def test_from_two_hundred_raw_rows_to_a_training_run(tmp_path, howto, tiny_policy, capsys):
    """Nectar's rows, the paper's sampling, rubrics from a loopback model, the check, two steps of training."""
    raws = [raw_row(i, howto) for i in range(200)]
    for i in range(0, 200, 20):
        raws[i]["answers"][0]["rank"] = 8.0
    (tmp_path / "raw.jsonl").write_text("".join(json.dumps(raw) + "\n" for raw in raws))
    queries, ready = str(tmp_path / "queries.jsonl"), str(tmp_path / "ready.jsonl")

    config = prepare_nectar.NectarConfig(
        dataset_name=str(tmp_path / "raw.jsonl"), queries=100, tokenizer=tiny_policy, output_file=queries
    )
    assert prepare_nectar.main(config) == 0
    model = Model(rubrics_text)
    with served(model.app()) as url:
        config = generate_rubrics.RubricsConfig(
            dataset_name=queries, output_file=ready, judge_url=f"{url}/v1", judge_model="writer"
        )
        assert generate_rubrics.main(config) == 0
    assert len(model.bodies) == 100
    capsys.readouterr()
    out = run_command(capsys, "check", ready, "--tokenizer", tiny_policy)
    assert str(tmp_path) not in (tmp_path / "ready.jsonl.provenance.json").read_text()
    assert "100 queries, every row well-formed" in out and "weights: 1 (100), 2 (100), 5 (100)" in out
    assert [step["step"] for step in json.loads((tmp_path / "ready.jsonl.provenance.json").read_text())["steps"]] == [
        "nectar",
        "rubrics",
    ]

    arguments = [
        *("--config", str(QUICKSTART / "quickstart.yaml"), "--model_name_or_path", tiny_policy),
        *("--dataset_name", ready, "--output_dir", str(tmp_path / "run"), "--max_steps", "2"),
        *("--per_device_train_batch_size", "32", "--max_completion_length", "12"),
    ]
    train.run(*RecipeParser().parse_args_and_config(arguments))
    table = contents(tmp_path / "run" / "_rankbuffer" / "live.sqlite")
    assert len(table["groups"]) == 8
    ids = {row["query_id"] for row in load_queries(ready)}
    assert {row[0] for row in table["groups"]} <= ids and len(RUBRICS) == 3
    assert {row[6] for row in table["calls"]} == {"parsed"}
