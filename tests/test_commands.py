"""What every command does with a server that is away, a typo, a wrong value, a bug and an interruption.

What a user can mend ends in one line that begins with the name of the command. A bug keeps its traceback.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from unittest.mock import Mock

import pytest
from conftest import QUICKSTART, ROOT
from helpers.programs import entry_points, parse, start

from rankbuffer_tools.batch.output import write_rows
from rankbuffer_tools.train.ending import SERVER_FAILED

pytestmark = pytest.mark.usefixtures("cache")

HOWTO = str(QUICKSTART / "howto.jsonl")
AWAY = " --judge_url http://127.0.0.1:9/v1 --judge_model judge --judge_max_retries 0"
GONE = "http://127.0.0.1:9/v1"


@dataclass
class Program:
    """Words that start a program, the function that a bug is put into, and the name in the line with which it ends.

    `kept` says whether an interruption leaves answers that the same command goes on from.
    """

    words: str
    part: str
    name: str = ""
    kept: bool = True


CHECK_OUTPUT = "rankbuffer_tools.batch.output.check_output"
AUDIT = f"--dataset_name {HOWTO} --samples {HOWTO} --output_dir {{tmp}}/out"
COMPARE = "--run_dir {run} --dataset_name {numbers}"
REPORT = "{run} --output {tmp}/out"
RUBRICS = "--dataset_name {ranked} --output_file {tmp}/out.jsonl"
QUERIES = "--dataset_name {bare} --output_file {tmp}/out.jsonl"
RESPONSES = f"{QUERIES} --sampler_url {GONE} --sampler_model m"
TRAIN = f"--config {QUICKSTART}/quickstart.yaml --dataset_name {HOWTO} --output_dir {{tmp}}/out"
EVALUATION = "--models mine=nobody/model --output_dir {tmp}/out --assets_dir {assets} --assets_manifest {manifest}"
TRAINING = Program(TRAIN + " --dry_run", "rankbuffer_tools.train.command.run", "rankbuffer-train")
PROGRAMS = {
    **dict.fromkeys(("rankbuffer-train", "recipes/train_rankbuffer.py"), TRAINING),
    "rankbuffer-audit": Program(AUDIT, "rankbuffer_tools.audit.command.audit"),
    "rankbuffer-compare": Program(COMPARE, "rankbuffer_tools.compare.command.compare"),
    "rankbuffer-data": Program(f"check {HOWTO}", "rankbuffer_tools.data.command.run_command", kept=False),
    "rankbuffer-report": Program(REPORT, "rankbuffer_tools.report.command.write_report", kept=False),
    "recipes/prepare_nectar.py": Program("--output_file {tmp}/out.jsonl", CHECK_OUTPUT),
    "recipes/generate_rubrics.py": Program(RUBRICS + AWAY, CHECK_OUTPUT),
    "recipes/generate_responses.py": Program(RESPONSES, CHECK_OUTPUT),
    "evaluation.run": Program(EVALUATION + AWAY, "evaluation.config.EvaluationConfig.assets", "evaluation"),
}
FAULTS = {  # by program: words, and a part of the line with which it ends
    "rankbuffer-train": {
        TRAIN + AWAY + " --preflight_only": GONE,
        TRAIN + " --dry_run --dataset_name missing.jsonl": "the data set missing.jsonl does not exist",
        TRAIN + " --dry_run --format_check thnik": "format_check must be 'think', 'none' or a regular expression with",
    },
    "rankbuffer-audit": {
        AUDIT + AWAY: f"judge at {GONE}",
        "": "dataset_name is not set",
        f"--dataset_name {HOWTO}": "samples is not set: name a file of eight responses of your policy per query",
        f"--dataset_name nowhere.jsonl --samples {HOWTO}": "nowhere.jsonl does not exist",
        AUDIT + " --queries 0": "queries must be at least 1",
        AUDIT + " --judge_model judge": "judge_url is not set",
    },
    "rankbuffer-compare": {
        COMPARE + AWAY: GONE,
        "": "run_dir is not set",
        "--run_dir nowhere": "dataset_name is not set",
        "--run_dir nowhere --dataset_name {numbers}": "nowhere does not exist",
        f"--run_dir {{run}} --dataset_name {HOWTO}": "no query 'q",
        COMPARE + " --duels 0": "duels must be at least 1, got 0",
    },
    "rankbuffer-data": {
        "check nowhere.jsonl": "nowhere.jsonl does not exist",
        "check {empty}": "cannot be read: it has no rows",
        "check table.csv": "table.csv is not supported, because rows need lists: write table.jsonl",
        f"check {HOWTO} --k0 1": "k0 must be at least 2, got 1",
        f"check {HOWTO} --sample 0": "sample must be at least 1, got 0",
        f"check {HOWTO} --num_generations 1": "num_generations must be at least 2, got 1",
        f"check {HOWTO} --tokenizer no/where": "there is no folder no/where here, and the Hub cannot be asked",
        f"check {HOWTO} --method best": "there is no reward method 'best'",
    },
    "rankbuffer-report": {
        "nowhere": "does not exist",
        "{run} --step 99": "step 99 is not in every run",
        "{run} --text_limit -1": "text_limit must be at least 0, got -1",
        "{run} --browser_mb nan": "browser_mb must be at least 0, got nan",
        "{run} --evaluation {list}": "Name the output_dir of an evaluation",
        "{run} --evaluation {other}": "other.json is not the results.json of an evaluation: it has no 'judge'",
        "{run} --dataset_name none.jsonl": "does not exist",
        "{run} --judge_prompt_price -1": "judge_prompt_price",
        "{run} --judge_cached_price -1": "judge_cached_price",
    },
    "recipes/prepare_nectar.py": {
        "--output_file {tmp}/out.jsonl": "berkeley-nest/Nectar cannot be read: Couldn't reach",
        "": "output_file must end in .jsonl or .parquet, got None",
        "--output_file x.csv": "output_file must end in .jsonl or .parquet, got 'x.csv'",
        "--output_file {empty}/x.jsonl": "x.jsonl cannot be made: ",
        "--queries -1": "queries must be at least 0, got -1",
        "--max_prompt_length 0": "max_prompt_length must be at least 1, got 0",
    },
    "recipes/generate_rubrics.py": {
        RUBRICS + AWAY: GONE,
        RUBRICS: "judge_url is not set: name the server of the model that writes rubrics, or",
        "--generic true": "dataset_name is not set",
        RUBRICS + AWAY + " --dataset_name nowhere.jsonl": "nowhere.jsonl does not exist",
    },
    "recipes/generate_responses.py": {
        RESPONSES + AWAY: f"the judge server {GONE} cannot be reached",
        RESPONSES + " --judge_max_retries 0": f"the sampler server {GONE} cannot be reached",
    },
    "evaluation.run": {EVALUATION + AWAY: GONE, EVALUATION: "judge_url is not set"},
}
FAULTS["recipes/train_rankbuffer.py"] = FAULTS["rankbuffer-train"]


MAIN = [
    path.relative_to(ROOT).as_posix()
    for folder in ("rankbuffer_tools", "recipes", "evaluation")
    for path in sorted((ROOT / folder).rglob("*.py"))
    if '\nif __name__ == "__main__"' in path.read_text()
]


@pytest.fixture(scope="module")
def places(tmp_path_factory, run, assets) -> dict[str, object]:
    """Files that the words of a command name."""
    folder = tmp_path_factory.mktemp("commands")
    query = {"prompt": "Which?", "rubrics": [{"text": "Is high.", "weight": 1}]}
    write_rows(folder / "numbers.jsonl", [query | {"query_id": f"q{i}", "responses": [*"1234"]} for i in range(4)])
    write_rows(folder / "ranked.jsonl", [{"prompt": "Why?", "responses": ["No.", "Yes."]}])
    write_rows(folder / "bare.jsonl", [{"prompt": "Why?"}, {"prompt": "How?"}])
    for name, content in (("other.json", {"other": 1}), ("list.json", [1])):
        (folder / name).write_text(json.dumps(content))
    (folder / "empty.jsonl").touch()
    files = {path.stem: path for path in folder.glob("*.json*")}
    return files | dict(run=run.path, assets=assets["assets_dir"], manifest=assets["assets_manifest"])


@pytest.fixture(params=PROGRAMS)
def program(request, places, tmp_path):
    """A program, and a function that starts it with words and returns how it ended."""
    name = request.param

    def end(words: str) -> int | str | None:
        with pytest.raises(SystemExit) as stop:
            start(name, words.format(**places, tmp=tmp_path).split())
        return stop.value.code

    return name, PROGRAMS[name], end


def test_every_console_script_is_in_the_table():
    assert set(entry_points()) == {name for name in PROGRAMS if name.startswith("rankbuffer-")}


def test_a_command_ends_in_one_line_that_says_what_is_wrong(program, tmp_path, capfd):
    name, known, end = program
    for words, part in FAULTS[name].items():
        line = end(words)
        if line == SERVER_FAILED:  # with a code of its own, which is not the line
            line = capfd.readouterr().err.splitlines()[-1]
        assert isinstance(line, str), f"{words} ended with {line}"
        assert line.startswith(f"{known.name or Path(name).stem}: ") and part in line, line
        assert "\n" not in line
    assert not [path for path in tmp_path.glob("out*") if path.is_dir() or path.read_bytes()], "nothing was begun"


def test_a_command_names_a_key_that_it_does_not_know(program, tmp_path, capsys):
    _, known, end = program
    (tmp_path / "typo.yaml").write_text("tipo: 3\n")
    (tmp_path / "broken.yaml").write_text("a: [\n")
    (tmp_path / "deep.yaml").write_text("a:\n " + 3000 * "- ")  # brackets would take YAML a second
    for typo, words in (
        ("--tipo 3", ("there is no key 'tipo'",)),
        ("--config {tmp}/typo.yaml", ("there is no key 'tipo'",)),
        ("--config {tmp}/broken.yaml", ("broken.yaml cannot be read", "cannot be read as YAML")),
        ("--config {tmp}/deep.yaml", ("deep.yaml cannot be read", "cannot be read as YAML")),
    ):
        code = end(f"{known.words} {typo}")
        said = capsys.readouterr().err if code == 2 else code
        assert any(word in said for word in (*words, "there is no key 'config'")), said


@pytest.mark.filterwarnings("ignore:.*found in sys.modules:RuntimeWarning")
@pytest.mark.parametrize("path", MAIN)
def test_no_program_takes_a_part_of_a_key_for_the_key(path):
    name = path if path.startswith("recipes") else path.removesuffix(".py").replace("/", ".")
    for words in ("check a", "card a b/c") if path.endswith("data/command.py") else ("",):
        try:
            unknown = parse(name, [*words.split(), "--hel"])
        except SystemExit as refusal:
            assert refusal.code, "it showed the help"  # as `--hel` would, if it were taken for `--help`
        else:
            assert unknown == ["--hel"]


def test_the_rubric_server_names_the_key_that_is_meant(capsys):
    with pytest.raises(SystemExit):
        start("rankbuffer_tools.rubric_server", ["--prot", "1"])
    assert "there is no key 'prot' (did you mean port?)" in capsys.readouterr().err


def test_a_command_shows_the_traceback_of_a_bug(program, monkeypatch):
    _, known, end = program
    monkeypatch.setattr(known.part, lambda *_, **__: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        end(known.words)


def test_a_command_says_that_it_was_interrupted_and_what_is_kept(program, monkeypatch):
    name, known, end = program
    monkeypatch.setattr(known.part, Mock(side_effect=KeyboardInterrupt))
    said = f"{known.name or Path(name).stem}: interrupted"
    assert end(known.words).startswith(f"{said}. The " if known.kept else said)


@pytest.mark.filterwarnings("ignore:.*found in sys.modules:RuntimeWarning")
@pytest.mark.parametrize("name", entry_points())
def test_python_m_runs_the_module_of_each_command(name, capsys):
    with pytest.raises(SystemExit) as exit:
        start(entry_points()[name][0], ["--help"])
    shown = capsys.readouterr().out
    assert not exit.value.code and "usage: " in shown
    if name in ("rankbuffer-audit", "rankbuffer-compare"):
        for part in shown.split("\noptions:"):  # the usage, and what each key is
            assert "--dataset_name" in part.partition("--judge_url")[0], "its own keys first"
