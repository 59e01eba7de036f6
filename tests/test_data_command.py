"""The command `rankbuffer-data`, the card of a set, and the whole road from raw rows to a training run."""

import json
import re
import shutil

import generate_rubrics
import prepare_nectar
import pytest
from conftest import QUICKSTART
from datasets import Dataset
from helpers.nectar_rows import Model, raw_row, rubrics_text
from helpers.scripted import contents
from helpers.servers import served

from rankbuffer_tools.batch.output import beside, write_provenance, write_rows
from rankbuffer_tools.batch.server_check import TURN_TOKENS
from rankbuffer_tools.data import command
from rankbuffer_tools.data.check import CheckSettings, check_dataset
from rankbuffer_tools.data.lint import SAME, THERE, TWO, odd_rubrics
from rankbuffer_tools.data.tokens import TokenCounter
from rankbuffer_tools.train import command as train
from rankbuffer_tools.train.parser import RecipeParser
from rankbuffer_trl.data._queries import DataError, QueryTable, generic_row, load_queries
from rankbuffer_trl.errors import SettingsError
from rankbuffer_trl.groups import Rubric
from rankbuffer_trl.judge import insertion_question

pytestmark = pytest.mark.usefixtures("cache")


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


def odd(rows: list[dict]) -> list[dict]:
    """Nine rows, of which each is odd or lacks something, but the first one."""
    for i, around in ((1, ""), (6, " "), (7, "\n"), (8, "")):
        rows[i]["prompt"] = [{"role": "user", "content": rows[0]["prompt"][0]["content"] + around}]
    rows[2]["responses"] = ["same", "same"]
    rows[3]["responses"] = []
    rows[4]["rubrics"] = []
    rows[5]["rubrics"] = [{"text": "Mentions salt.", "weight": 1}, {"text": "Mentions the salt.", "weight": 2}]
    return rows[:9]


def unanswered(rows: list[dict]) -> list[dict]:
    return [{key: value for key, value in row.items() if key != "responses"} for row in rows[:4]]


COUNTED = (
    "36 queries", r"messages per prompt: 1 \(36\)\n", r"responses per query: 7 \(36\)\n",
    "prompts above 4,096 tokens: 0\n", r"rubrics per query: 4 \(26\), 5 \(10\)",
    "the same prompt as an earlier query: 0\n", r"response +252 +3 +22 +45 +52 ",
    r"if every response has 4,096 tokens: about", r"of a +counted +least +median +95 % +most *\n",
    r"weights: 1 \(\d+\), .*; mean \d\.\d\d\n",
)  # fmt: skip
ODD = (
    r"the same prompt as an earlier query: 4 \({1}, {6}, {7}, ...\)\n", r"the same response twice: 1 \({2}\)\n",
    r"a rubric asks only whether something is there: 1 \({5}\)\n", r"prompt +9 ", r"response +14 ",
    r"a rubric is nearly that of another one: 1 \({5}\)\n", r"prompts above 8 tokens: \d",
    "NOT READY: 1 queries .*generate_rubrics.py", "NOT READY: 2 queries .*fewer than 4 .*generate_responses.py",
)  # fmt: skip
FEW, BARE = "NOT READY: 4 queries have fewer than 4 responses", [{"query_id": "a", "prompt": "Why?"}]
GENERIC = (r"a rubric asks two things at once: 0", r"rubrics per query: 5 \(1\)")
GENERIC += ("if every response has 4,096 tokens", "NOT READY: 1 queries have fewer")
LONG, AGREE = ("--no_responses", "--max_prompt_length", 8), ("--method", "rrc_agr")
CHECKS = {  # the rows, words of the command, what is printed, and the number of reasons why a run cannot start
    "the sample that ships": (list, (), COUNTED, 0),
    "odd": (odd, ("--max_prompt_length", 8, "--sample", 2, "--no_guard"), ODD, 2),  # estimates do not stop a run
    "no responses": (unanswered, (), (FEW,), 1),
    "just enough responses": (lambda rows: [row | {"responses": ["a", "b", "c", "d"]} for row in rows[:4]], (), (), 0),
    "few for the method": (lambda rows: [rows[0] | {"responses": ["a", "b", "c", "d"]}], AGREE, ("fewer than 7 ",), 1),
    "no responses needed": (unanswered, ("--no_responses",), (), 0),
    "no responses for the method": (unanswered, ("--method", "listwise"), (), 0),
    "long, by an estimate": (unanswered, LONG, (r"prompts above 8 tokens: \d",), 0),
    "long, by a tokenizer": (unanswered, (*LONG, "--tokenizer"), ("NOT READY: 4 prompts have more than 8 tokens",), 1),
    "neither rubrics nor responses": (lambda rows: BARE, (), GENERIC, 1),  # a run takes generic rubrics
    "generic rubrics": (lambda rows: [BARE[0] | generic_row("")], ("--no_responses",), GENERIC[:2], 0),
}


@pytest.mark.parametrize("name", CHECKS)
def test_check_prints_what_it_counts_and_why_a_run_cannot_start(name, howto, tmp_path, capsys, tiny_policy):
    make, words, said, reasons = CHECKS[name]
    path = tmp_path / "mine.jsonl"
    write_rows(path, make([dict(row) for row in howto]))
    words = ("check", path, *words, *([tiny_policy] if "--tokenizer" in words else ()))
    out, last = refused(capsys, *words) if reasons else (run_command(capsys, *words), None)
    ids = [row["query_id"] for row in howto]
    for each in said:
        assert re.search(re.sub(r"\{(\d)\}", lambda found: ids[int(found[1])], each), out), each
    assert out.count("NOT READY") == reasons and (reasons == 0 or f"{path} is not ready" in last)


def test_check_dataset_measures_the_real_prompts(howto, tiny_policy):
    def check(**settings):
        settings = {"max_completion_length": 100} | settings
        return check_dataset(Dataset.from_list(howto), tokens, CheckSettings(**settings))

    tokens = TokenCounter(tiny_policy)
    table = QueryTable(Dataset.from_list(howto), 7)
    queries = [table[query_id] for query_id in table.ids]
    found = check()
    assert found.lengths["response"] == [tokens.text(text) for query in queries for text in query.responses]
    counted = {n: len(check(sample=n).lengths["response"]) / 7 for n in (1, 12, 24, 35, 99)}
    assert counted == {n: min(n, len(howto)) for n in counted}
    room = len('{"position": 8}') + 1 + 256
    frames = [tokens.text(insertion_question(query, [""] * 8, "").prompt(True)) for query in queries]
    assert found.context - 9 * 100 * 9 // 8 - 2 * room - TURN_TOKENS in frames
    grouped = check(most_shown=20)
    assert grouped.context - found.context == 11 * 100 * 9 // 8 + 1  # 20 and 9, each rounded down
    assert check(guard=False, most_shown=10).context - check(guard=False).context == 100
    longest = max(found.lengths["response"])
    assert check(max_completion_length=longest - 1).context == check(max_completion_length=longest).context
    assert check(max_completion_length=longest + 8).context == check(max_completion_length=longest).context + 81
    chat = [{"role": "user", "content": queries[0].text}]
    rendered = f"<|im_start|>user\n{queries[0].text}<|im_end|>\n<|im_start|>assistant\n"
    assert found.lengths["prompt"][0] == tokens.chat(chat) == tokens.text(rendered)


def test_odd_rubrics_finds_presence_two_things_and_repeats():
    for texts, expected in (
        (("Says how long: three minutes and a half.",), []),
        (("  The response includes a recipe.",), [THERE]),
        (("Says which name to take.", "Mentioned facts are right."), []),
        (("Is clear And short.",), [TWO]),
        (("Is brief; stays calm.",), [TWO]),
        (("Gives a standard.", "Is between 16 and 28 words long."), []),
        (("Explains how to boil rice.", "Explains boiling of the rice in water."), [SAME]),
        (("Explains how to boil rice.", "Explains how to boil water in a kettle."), []),
        (("Names a salt and a pan.", "Names a pan and a salt."), [THERE, TWO, SAME]),
    ):
        assert list(odd_rubrics([Rubric(text, 1) for text in texts])) == expected, texts
    assert list(odd_rubrics([Rubric("Names a brand.", -2)])) == [], "a fault is there or not"


def test_check_settings_refuse_what_cannot_be_counted():
    lengths = ("max_prompt_length", 1), ("max_completion_length", 1), ("free_tokens", 0)
    for key, least in (("k0", 2), ("sample", 1), ("most_shown", 1), *lengths):
        assert getattr(CheckSettings(**{key: least}), key) == least
        with pytest.raises(SettingsError, match=f"{key} must be at least {least}, got {least - 1}"):
            CheckSettings(**{key: least - 1})


def test_token_counter_without_a_template_counts_the_texts(tmp_path, tiny_policy, capsys):
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(tiny_policy)
    tokenizer.chat_template = None
    tokenizer.save_pretrained(tmp_path)
    tokens = TokenCounter(str(tmp_path))
    assert tokens.chat([{"role": "user", "content": "boil water"}]) == tokens.text("boil water") > 0
    tokenizer.chat_template = "{{ raise_exception('No system role') }}"
    tokenizer.save_pretrained(tmp_path)
    with pytest.raises(DataError, match="refuses a prompt of the roles system, user: No system role"):
        TokenCounter(str(tmp_path)).chat([{"role": role, "content": "boil"} for role in ("system", "user")])
    write_rows(tmp_path / "mine.jsonl", [{"prompt": "Why?"}])
    _, last = refused(capsys, "check", tmp_path / "mine.jsonl", "--tokenizer", tmp_path)
    assert re.match(r"rankbuffer-data: row 1 \(query_id 'prompt-\w{16}'\): the chat template refuses ", last)


def test_check_says_once_that_there_is_no_prompt_and_names_no_id_that_no_row_has(tmp_path, capsys):
    path = tmp_path / "mine.jsonl"
    write_rows(path, [{"question": "Why?", "rubric": []}] * 30)
    out, last = refused(capsys, "check", path)
    assert out == "" and "no column 'prompt'" in last and last.endswith("its columns are ['question', 'rubric']")
    write_rows(path, [{"prompt": "Why?"}, {"question": "Why?"}])
    out, last = refused(capsys, "check", path)
    assert out.startswith("line 2: prompt must be a text or") and "prompt-" not in out
    path.write_text("")
    assert "rankbuffer-data check" not in refused(capsys, "check", path)[1]


def test_check_lists_the_first_twenty_faults_with_lines_and_true_values(tmp_path, capsys):
    good = {"query_id": "q", "prompt": "Why?", "rubrics": [{"text": "Is clear.", "weight": 1}], "responses": ["a"]}
    half = good | {"query_id": "half", "rubrics": [{"text": "Is clear.", "weight": 2.5}]}
    text = good | {"query_id": "text", "rubrics": [{"text": "Is clear.", "weight": "5"}], "responses": "abc"}
    lines = [
        *(json.dumps(row).encode() for row in (good, good)),
        b"",
        *(json.dumps(row).encode() for row in (half, text)),
        '{"prompt": "Où?"}'.encode("latin-1"),
        b'{"prompt": "Why?"',
        b"7",
        b'{"prompt": "a\\u0000b"}',
        b'{"prompt": ' + b"[" * 2_000_000,
        b'{"prompt": ' + b"9" * 5_000 + b"}",
        b'\xef\xbb\xbf{"prompt": "When?"}',
        b"\xef\xbb\xbf",
        *[b'{"prompt": "Who?"}'] * 20,
    ]
    path = tmp_path / "mine.jsonl"
    path.write_bytes(b"\xef\xbb\xbf" + b"\r\n".join(lines))
    out, last = refused(capsys, "check", path)
    assert last == f"rankbuffer-data: {path} is not ready. Faults: 31. The first 20 are listed above."
    found = [re.sub(r" \(query_id 'prompt-.{16}'\)", "", line) for line in out.splitlines()]
    assert len(found) == 20 and found[:13] == [
        "line 2: the query_id 'q' is that of line 1, too",
        "line 4 (query_id 'half'): rubrics[0].weight must be an integer from 1 to 5, or from -5 to -1, got 2.5",
        "line 5 (query_id 'text'): rubrics[0].weight must be an integer from 1 to 5, or from -5 to -1, got '5'",
        "line 5 (query_id 'text'): responses must be a list of text from worst to best, got 'abc'",
        "line 6: is not UTF-8 (byte 14 is 0xf9): save the file as UTF-8",
        "line 7: is not JSON (Expecting ',' delimiter at column 18)",
        "line 8: must be a JSON object, got 7",
        r"line 9: prompt[0].content must be text without NUL characters, got 'a\x00b'",
        "line 10: is not JSON that can be read (it is nested too deeply)",
        "line 11: is not JSON that can be read (it has a number of too many digits)",
        "line 12: begins with a byte order mark, which may stand at the start of a file alone: remove it",
        "line 13: begins with a byte order mark, which may stand at the start of a file alone: remove it",
        "line 15: the prompt is the same as in line 14, and a row without query_id needs its own",
    ]


def test_check_reads_every_form_of_json_and_counts_rows_from_one(howto, tmp_path, capsys):
    for text, fault in (
        ('\ufeff [{"prompt": "Why?"},\n {"prompt": 3}]', "row 2 .*: prompt must be a text .*, got 3"),
        ('[{"prompt": "Why?"},\n {"prompt": ]', r"a.json: is not JSON \(Expecting value at line 2, column 13\)"),
        ('{"prompt": "Why?"}\n{"prompt": [3]}', r"line 2 .*: prompt\[0\] must have role and content, got 3"),
    ):
        (tmp_path / "a.json").write_text(text, encoding="utf-8")
        out, last = refused(capsys, "check", tmp_path / "a.json")
        assert re.fullmatch(fault, out.strip()) and last.endswith("is not ready. Faults: 1.")
    (tmp_path / "a.json").write_text('{"question": "Why?"}\n{"question": "How?"}\n{"prompt": "How?"}')
    out, last = refused(capsys, "check", tmp_path / "a.json")
    assert out.count("got None") == 2 and last.endswith("Faults: 2."), "rows without a prompt are not alike"
    write_rows(tmp_path / "mine.parquet", [howto[0], howto[1] | {"rubrics": [{"text": "x", "weight": 9}]}])
    out, _ = refused(capsys, "check", tmp_path / "mine.parquet")
    said = "rubrics[0].weight must be an integer from 1 to 5, or from -5 to -1, got 9"
    assert out.strip() == f"row 2 (query_id '{howto[1]['query_id']}'): {said}"


def test_check_estimates_the_context_that_the_method_wants(howto, tmp_path, capsys):
    write_rows(tmp_path / "one.jsonl", howto[:1])
    for words, shown in (
        ([], 9),
        (["--k0", 2], 8),
        (["--num_generations", 16], 16),
        (["--method", "listwise"], 8),
        (["--method", "rrc_scr", "--k0", 7], 2),
        (["--method", "llm_buffer", "--num_generations", 6], 10),
    ):
        out = run_command(capsys, "check", tmp_path / "one.jsonl", "--max_completion_length", 1000, *words)
        tokens, most = re.search(r"about ([\d,]+) tokens \(a prompt can show (\d+) responses\)", out).groups()
        assert int(most) == shown
        assert 0 <= int(tokens.replace(",", "")) - shown * 1125 - TURN_TOKENS < 1500  # the frame and two answers


# The card


STEPS = [
    {"step": "nectar", "dataset_name": "berkeley-nest/Nectar", "seed": 42, "queries_taken": 1000},
    {"step": "rubrics", "dataset_name": "a.jsonl", "model": "deepseek-v4-flash", "temperature": 0.2, "cost": {"x": 9}},
]


OWN = ("# howto-36", "Queries come from `an unknown source`")
MADE = (
    "# howto-36", "36 queries, 154 rubrics, 252 responses. Responses by model: gpt-4 252.", "seed `42`", "Apache-2.0",
    'model `"deepseek-v4-flash"`', "temperature `0.2`", "Text by `deepseek-v4-flash` (rubrics)",
    "You are an expert evaluator for assistant responses.", "[Rank 7 | model={MODEL_7}]",
)  # fmt: skip
NONE_MADE = [STEPS[1] | {"queries_without": 0}]
GIVEN = [{"step": "rubrics", "dataset_name": "a.jsonl", "generic": True}]
CARDS = {  # the record, what the card says, and what it does not say
    "jsonl": (STEPS, ("path: train.jsonl", *MADE), ()),
    "parquet": (STEPS, ("path: train.parquet", *MADE), ()),
    "no record": (None, OWN, ()),
    "own queries": (STEPS[1:], ("Queries come from `a.jsonl`.",), ("Nectar",)),
    "no rubrics": (None, ("252 responses", "no rubrics,", "has no rubrics."), ("weighted", "`rubrics`", "- rubrics")),
    "a step that made nothing": (NONE_MADE, ("came with their rubrics",), ("Text by", *MADE[-2:])),
    "generic rubrics": (GIVEN, ("the same generic ones; no model",), ("Text by", "those of the paper")),
}


@pytest.mark.parametrize("name", CARDS)
def test_card_says_how_a_set_was_made_and_the_set_can_be_loaded_beside_it(name, tmp_path, howto, capsys):
    steps, said, unsaid = CARDS[name]
    kind = "parquet" if name == "parquet" else "jsonl"
    path, hub = tmp_path / f"mine.{kind}", tmp_path / "hub"
    kept = [{key: row[key] for key in row if (name, key) != ("no rubrics", "rubrics")} for row in howto]
    write_rows(path, [row | {"models": ["gpt-4"] * 7} for row in kept])
    if steps:
        write_provenance(path, steps)
    card = run_command(capsys, "card", path, "me/howto-36")
    assert [part for part in said if part not in card] == [part for part in unsaid if part in card] == []
    assert not re.search(r"\{(NAME|FILE|COUNTS|STEPS|SOURCES|RUBRICS|SYSTEM|USER)\}|cost `|step `", card)
    hub.mkdir()
    shutil.copy(path, hub / f"train.{kind}")
    (hub / "README.md").write_text(card)
    if steps:
        shutil.copy(beside(path, "provenance.json"), hub / "provenance.json")
    assert list(load_queries(str(hub))) == list(load_queries(str(path)))


def test_card_refuses_what_is_not_finished(tmp_path, howto, capsys):
    path = tmp_path / "mine.jsonl"
    write_rows(path, howto)
    for text in ("{}", "[]", "{"):
        beside(path, "provenance.json").write_text(text)
        said = refused(capsys, "card", path, "me/x")[1]
        assert re.search(r": mine\.jsonl\.provenance\.json is .* delete that record", said)
    write_rows(path, [howto[0], howto[1] | {"rubrics": []}])
    assert "rubrics must be a non-empty list" in refused(capsys, "card", path, "me/x")[1]


# The road


@pytest.mark.slow
def test_from_two_hundred_raw_rows_to_a_training_run(tmp_path, howto, tiny_policy, capsys):
    """Nectar's rows, the paper's sampling, rubrics from a loopback model, the check, two steps of training."""
    raws = [raw_row(i, howto) for i in range(200)]
    for i in range(0, 200, 20):
        raws[i]["answers"][0]["rank"] = 8.0
    write_rows(tmp_path / "raw.jsonl", raws)
    raw, queries, ready = (str(tmp_path / f"{name}.jsonl") for name in ("raw", "queries", "ready"))
    taken = prepare_nectar.NectarConfig(dataset_name=raw, queries=100, tokenizer=tiny_policy, output_file=queries)
    assert prepare_nectar.main(taken) == 0
    model = Model(rubrics_text)
    with served(model.app()) as url:
        judge = {"judge_url": f"{url}/v1", "judge_model": "writer"}
        config = generate_rubrics.RubricsConfig(dataset_name=queries, output_file=ready, **judge)
        assert generate_rubrics.main(config) == 0
    assert len(model.bodies) == 100
    capsys.readouterr()
    out = run_command(capsys, "check", ready, "--tokenizer", tiny_policy)
    assert "100 queries, every row well-formed" in out and "weights: 1 (100), 2 (100), 5 (100)" in out
    record = beside(tmp_path / "ready.jsonl", "provenance.json").read_text()
    assert str(tmp_path) not in record, "records are pushed"
    assert [step["step"] for step in json.loads(record)["steps"]] == ["nectar", "rubrics"]

    arguments = [
        *("--config", str(QUICKSTART / "quickstart.yaml"), "--model_name_or_path", tiny_policy),
        *("--dataset_name", ready, "--output_dir", str(tmp_path / "run"), "--max_steps", "2"),
        *("--per_device_train_batch_size", "32", "--max_completion_length", "12"),
    ]
    train.run(*RecipeParser().parse_args_and_config(arguments))
    table = contents(tmp_path / "run" / "_rankbuffer" / "live.sqlite")
    assert len(table["groups"]) == 8
    assert {row[0] for row in table["groups"]} <= {row["query_id"] for row in load_queries(ready)}
    assert {row[6] for row in table["calls"]} == {"parsed"}
