"""What the pages say resolves or runs: links, paths, commands, settings, code, output."""

import asyncio
import importlib.util
import json
import re
import runpy
import shlex
import shutil
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml
from aiohttp import web
from conftest import QUICKSTART, ROOT, scripted_judge
from helpers.programs import PAGES, blocks, commands, entry_points, parse, program, start, text_of
from helpers.servers import served

from rankbuffer_tools.data.check import CheckSettings, needed_context
from rankbuffer_tools.rubric_server import make_app
from rankbuffer_trl.groups import Query
from rankbuffer_trl.judge import VerdictError
from rankbuffer_trl.judge._rubric_judge import judge as by_rubrics
from rankbuffer_trl.rewards._method import load_method, method_names
from rankbuffer_trl.rewards._prefetch import first_questions
from rankbuffer_trl.testing import make, truth

WIDTH = 156  # characters of a line outside tables and code
FOLDERS = (
    "rankbuffer_trl|rankbuffer_tools|recipes|docs|accelerate_configs|benchmarks|checks|experiments|tests|evaluation"
    "|examples"
)

# Links, paths, commands


def anchors(page: Path) -> set[str]:
    """Return the names that GitHub gives to the headings of a page."""
    titles = re.findall(r"^#+ (.+)$", re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).strip().replace(" ", "-") for title in titles}


def lost_links(page: Path) -> list[str]:
    """Return the links and the paths of a page that lead nowhere."""
    lost = [path for path in re.findall(rf"`((?:{FOLDERS})/[\w/.-]+)`", text_of(page)) if not (ROOT / path).exists()]
    for target in re.findall(r"\]\((?!\w+:)([^)\s]+)\)", text_of(page)):
        path, _, anchor = target.partition("#")
        found = (ROOT / page).parent / path if path else ROOT / page
        if not found.exists() or (anchor and anchor not in anchors(found)):
            lost.append(target)
    return lost


def fault_of(command: str) -> str:
    """Return what is wrong with a command of a page, or nothing. Variables of the shell get values that can work."""
    values = {"URL": "http://127.0.0.1:8001/v1"}
    command = re.sub(r"\$\{?(\w+)\}?", lambda name: values.get(name[1].rpartition("_")[2], name[1].lower()), command)
    words = shlex.split(command, comments=True)
    for word in words:
        ours = re.fullmatch(r"[\w/.-]+\.(py|yaml|jsonl|md|sh)", word)
        made = word.startswith(("runs/", "data/"))  # by an earlier command
        if ours and not made and not any((ROOT / folder / word).is_file() for folder in ("", "recipes")):
            return f"there is no file {word}"
    if words[:1] == ["make"] and f"\n{words[1]}:" not in text_of("Makefile"):
        return f"there is no target {words[1]}"
    name, arguments = program(words) or ("", [])
    ours = name.endswith(".py") or name.startswith("rankbuffer-") or re.match(rf"({FOLDERS})\.", name)
    if not ours:
        return ""
    if name.startswith("rankbuffer-") and name not in entry_points():
        return "there is no such console script"
    if not name.endswith(".py") and "." in name and not importlib.util.find_spec(name):
        return "there is no such module"
    try:
        unknown = parse(name, arguments) if arguments else []
    except SystemExit as refusal:
        return f"it ends with {refusal.code}"
    return f"it does not know {unknown}" if unknown else ""


def test_no_line_of_prose_is_wider_than_a_reader_likes():
    for page in PAGES:
        code = re.split(r"^\s*```.*$", text_of(page), flags=re.MULTILINE)
        wide = [line for part in code[::2] for line in part.splitlines() if len(line) > WIDTH and line[0] != "|"]
        assert not wide, f"{page}: break {wide}"


@pytest.mark.parametrize("page", PAGES, ids=str)
def test_links_paths_and_commands_of_a_page_resolve(page, monkeypatch, capsys):
    monkeypatch.chdir(ROOT)
    assert lost_links(page) == []
    faults = {command: fault_of(command) for command in commands(page)}
    assert {command: fault for command, fault in faults.items() if fault} == {}


def test_a_command_that_nobody_understands_is_found(monkeypatch, capsys):
    monkeypatch.chdir(ROOT)
    train = "rankbuffer-train --config paper/dapo.yaml --output_dir runs/mine"
    for command, fault in (
        ("OMP_NUM_THREADS=1 nice python recipes/quickstart/run.py --seed 1 --max_steps 2 > log", ""),
        ("python recipes/quickstart/run.py --sed 2", "it ends with rankbuffer-train: there is no key 'sed'"),
        ("accelerate launch --config_file accelerate_configs/none.yaml a.py", "there is no file accelerate_configs/"),
        ("python -m rankbuffer_tools.rubric_server --port one", "it ends with 2"),
        (f"{train} --judge_wait 1", ""),
        (f"{train} --judge_wait -1", "it ends with rankbuffer-train: judge_wait must"),
        ("python -m evaluation.nothing --seed 1", "there is no such module"),
        ("rankbuffer-none --seed 1", "there is no such console script"),
        ("make nothing", "there is no target nothing"),
        ("git status", ""),
    ):
        found = fault_of(command)
        assert found.startswith(fault) and bool(found) == bool(fault), f"{command}: {found}"


def test_the_site_has_the_pages_of_the_index_in_its_order():
    nav = yaml.safe_load(text_of("mkdocs.yml"))["nav"]
    named = [page for part in nav[2:] for pages in part.values() for page in pages]
    listed = re.findall(r"\]\((?!\w+:)([\w./]+\.md)\)", text_of("docs/index.md"))
    listed = [path.removeprefix("../") if path.startswith("../") else f"docs/{path}" for path in listed]
    assert [page for page in named if page != "CHANGELOG.md"] == listed


# Tables that a program knows


def made_by(name: str):
    """Load a program of docs/ that writes a page."""
    spec = importlib.util.spec_from_file_location(name, ROOT / "docs" / f"{name}.py")
    maker = importlib.util.module_from_spec(spec)
    sys.modules[name] = maker  # where dataclasses look
    spec.loader.exec_module(maker)
    return maker


def test_the_table_of_judges_is_made_from_their_cards():
    maker = made_by("make_judges")
    assert maker.PAGE.read_text() == maker.page(), "run: python docs/make_judges.py"
    cards = {path.stem: json.loads(path.read_text()) for path in maker.CARDS.glob("*.json")}
    assert all(card["judge"] == name and maker.row_of(card) in maker.page() for name, card in cards.items())
    card = cards["qwen2.5-coder-1.5b-instruct-q4_k_m"]
    assert "words cannot be told from guessing" in card["verdict"] and card["train_with"] == "beyond/ratings_soft"
    assert " | 0.43 ± 0.07 | `beyond/ratings_soft` |" in maker.row_of(card)
    assert maker.row_of(card | {"measures": {}, "train_with": None}).endswith("|  |  | nothing |\n")


def test_the_table_of_recipes_is_what_the_experiments_stored(tmp_path, monkeypatch):
    maker = made_by("make_recipes")
    assert maker.PAGE.read_text() == maker.page(), "run: python docs/make_recipes.py"
    rows = [line.split(" | ") for line in maker.table().splitlines()[2:]]
    assert not [row[0] for row in rows if not (row[1] and row[2])], "a recipe without its price"
    cells = {row[0]: row[1:5] for row in rows}
    assert cells["| `paper/rankbuffer`"] == ["9.4", "24.0", "0.784", "90.96 ± 1.25 (5)"], "as on the two pages"
    assert cells["| `beyond/ruler`"][3].endswith("(3)") and "†" in cells["| `beyond/pairs_soft`"][2]
    race = tmp_path / "race.json"
    race.write_text('{"paper/rankbuffer": 123456, "paper/grpo": null}')
    monkeypatch.setattr(maker, "RACE", race)
    reached = {line.split(" | ")[0]: line.split(" | ")[5] for line in maker.table().splitlines()[2:]}
    some = [reached[f"| `paper/{row}`"] for row in ("rankbuffer", "grpo", "gdpo")]
    assert some == ["123", "not reached", ""]


def test_the_artifact_page_is_its_list_and_a_wrong_number_fails():
    maker = made_by("make_artifact")
    assert maker.PAGE.read_text() == maker.page(), "run: python docs/make_artifact.py --write"
    wrong = "50 before, 96.9 after", "[50.0, 96.9], expected [50, 99] ± 2"
    for output, part in (wrong, ("nothing", "nothing like")):
        assert part in maker.Claim("", "", 1, r"(\d+) before, ([\d.]+) after", (50, 99), 2).fault(output)


@pytest.mark.slow
def test_the_short_claims_of_the_artifact_hold(monkeypatch, capsys):
    maker, printed = made_by("make_artifact"), {}
    monkeypatch.setenv("COLUMNS", "240")
    first, *others = [claim for claim in maker.CLAIMS if claim.minutes < 0.5]
    assert maker.run(first) is None and len(others) == 7
    for claim in others:  # in this process, which has imported torch
        if claim.command not in printed:
            start(*program(claim.command.split()))
            printed[claim.command] = capsys.readouterr().out
        assert claim.fault(printed[claim.command]) is None
    assert "exit status 1" in maker.run(maker.Claim("", "python -c raise(SystemExit(1))", 1, ""))


def test_the_configuration_page_is_what_the_dataclasses_say():
    maker = made_by("make_configuration")
    assert maker.PAGE.read_text() == maker.page(), "run: python docs/make_configuration.py"


def test_the_contexts_of_the_judge_page_are_those_of_the_command_that_checks_a_set():
    def need(shown: int, length: int, guard: bool) -> int:
        settings, frame = CheckSettings(guard=guard, most_shown=shown), SimpleNamespace(text=lambda _: 600)
        return needed_context(Query("", [], ()), frame, settings, length)

    def wanted(shown: int) -> list[str]:
        needed = ([need(shown, length, guard) / 1000 for guard in (False, True)] for length in (1024, 2048, 4096))
        return [f"{plain:.1f}k ({guarded:.1f}k)" for plain, guarded in needed]

    text, named = text_of("docs/judge.md").partition("# Which context a method wants")[2], []
    for methods, shown, *cells in re.findall(r"^\| (`.*`) \| (\d+) \| (.*) \| (.*) \| (.*) \|$", text, re.MULTILINE):
        names = re.findall(r"`(\w+)`", methods)
        named += names
        assert {load_method(name, {}, 0).most_shown(8) for name in names} == {int(shown)}
        assert cells == wanted(int(shown))
    assert sorted(named) == sorted(method_names())
    grown = re.findall(r"^\| (?!`.*` \|)(.*) \| (\d+) \| (.*) \| (.*) \| (.*) \|$", text, re.MULTILINE)[:3]
    assert [int(shown) for _, shown, *_ in grown] == [11, 15, 20]
    assert [cells for _, _, *cells in grown] == [wanted(int(shown)) for _, shown, *_ in grown]


# Code that stands in a file, and code that runs


def test_each_line_of_code_that_method_and_beyond_quote_is_in_its_file():
    quoted, file = {}, None
    for line in (text_of("docs/method.md") + text_of("docs/beyond.md")).splitlines():
        if line.startswith("#") or line.endswith("` | the code |"):
            file = re.search(r"`(rankbuffer_trl/[\w/]+\.py)`", line)
        elif file and (cell := re.search(r" \| `([^`]+)` \|$", line)):
            quoted[line] = "".join(cell[1].replace("\\|", "|").split()) in "".join(text_of(file[1]).split())
    assert len(quoted) > 50 and [line for line, found in quoted.items() if not found] == []


def test_the_index_shows_what_one_group_prints(capsys):
    shown = re.search(r"python examples/one_group.py.*?```\n(.*?)```", text_of("docs/index.md"), re.DOTALL)
    runpy.run_path(str(ROOT / "examples" / "one_group.py"), run_name="__main__")
    assert shown[1] in capsys.readouterr().out


@pytest.fixture
def own(tmp_path, monkeypatch) -> Path:
    """The folder with the package `my_methods`: the files of examples/, and those that docs/extending.md shows."""
    shutil.copytree(ROOT / "examples" / "my_methods", tmp_path / "my_methods")
    files = r"`my_methods/(\w+\.py)`.*?```python\n(.*?)```"
    for name, code in re.findall(files, text_of("docs/extending.md"), re.DOTALL):
        (tmp_path / "my_methods" / name).write_text(code)
    monkeypatch.delitem(sys.modules, "my_methods", raising=False)
    monkeypatch.syspath_prepend(tmp_path)
    return tmp_path


def test_the_method_that_extending_shows_ranks(own):
    name = "my_methods.beats_best.BeatsBest"
    group = make([5, None, 11, 10])  # the best reference has 10

    def rewards(answer=truth, **arguments):
        judge = scripted_judge(lambda messages: answer(messages[0]["content"]), max_attempts=1)
        return asyncio.run(load_method(name, arguments, 0).score(group, None, judge)).rewards

    assert rewards() == (-1, -1, 1, 0)
    assert rewards(tie=0.5) == (-1, -1, 1, 0.5)
    assert rewards(lambda prompt: '{"winner": "A"}') == (0, -1, 0, 0), "the first shown always wins"
    assert rewards(lambda prompt: "no idea") == (None, -1, None, None)
    method = load_method(name, {}, 0)
    assert method.calls(group, first=True) == (6, 6) and len(first_questions(method, group)) == 6
    assert method.most_shown(8) == 2
    (checks,) = (code for code in blocks(ROOT / "docs" / "extending.md", "python") if "import check_method" in code)
    exec(checks, {})
    with pytest.raises(ValueError, match="has no argument 'loser'"):
        load_method(name, {"loser": 1}, 0)


def test_the_question_that_extending_shows_is_asked(own):
    method, group, seen = load_method("my_methods.best_worst.BestWorst", {}, 0), make([5, None, 9, 2]), []

    def answer(messages):
        seen.append(messages[0]["content"])
        texts = dict(re.findall(r"^\[R(\d)\]\n(\d+)", messages[0]["content"], re.MULTILINE))
        order = sorted(texts, key=lambda id: int(texts[id]))
        return json.dumps({"best": int(order[-1]), "worst": int(order[0])})

    score = asyncio.run(method.score(group, None, scripted_judge(answer)))
    assert score.rewards == (0, -1, 1, -1) and score.order == ((3,), (0,), (2,))
    assert group.query.text in seen[0] and seen[0].endswith('{"best": 0, "worst": 1}') and "{" not in seen[0][:-30]
    assert asyncio.run(method.score(group, None, scripted_judge(lambda _: "no"))).rewards == (None, -1, None, None)
    assert asyncio.run(method.score(make([5, None]), None, scripted_judge(answer))).rewards == (0, -1)
    (question,) = first_questions(method, group)
    assert method.calls(group, True) == (1, 1)
    assert re.fullmatch(question.verdict.constraint["regex"], '{"best": 2, "worst": 0}')
    for wrong in ('{"best": 0, "worst": 0}', '{"best": 1, "worst": 0}', '{"best": [0], "worst": 2}'):
        with pytest.raises(VerdictError, match="two different numbers"):
            question.read(wrong)


def test_the_settings_that_extending_shows_train(own, training):
    """One run with a method, a judge and reward functions of one's own, as the recipes on the page name them."""
    asked, recipe = [], {}
    for block in blocks("docs/extending.md", "yaml"):
        recipe |= yaml.safe_load(block)
    assert recipe.pop("base") == "base.yaml"
    recipe["reward_functions"][0]["args"] = {"max_completion_len": 20, "soft_punish_cache": 10}

    async def answer(request):
        asked.append((await request.json())["prompt"])
        return web.json_response({"text": by_rubrics(asked[-1])})

    app = web.Application()
    app.add_routes([web.post("/judge", answer)])
    with served(app) as address:
        recipe["judge_client_args"]["url"] = f"{address}/judge"
        trainer = training(max_steps=1, **recipe)
        trainer.train()
    store = trainer.store
    assert 0 < store.totals().calls <= len(asked) and store.totals().failures == 0 and "\n> " in asked[0]
    assert {row[0] for row in store.rows("SELECT method FROM calls")} == {"beats_best"}
    identity = trainer.run_state.facts()
    assert identity["judge"] == recipe["judge_client"] == "my_methods.text_server.TextServer"
    assert identity["judge_args"] == recipe["judge_client_args"]
    names = ["rank_reward", "format_reward", "soft_overlong_punishment_reward", "names_a_source"]
    assert trainer.reward_func_names == names
    assert trainer.reward_weights.tolist() == pytest.approx([1, 0.2, 0.5, 0.2])
    log = trainer.state.log_history[0]
    assert -1 <= log["rewards/soft_overlong_punishment_reward/mean"] < 0 and log["rewards/names_a_source/mean"] == 0


def test_the_programs_that_other_pages_show_run(tmp_path, tiny_policy, store, monkeypatch):
    small = "use_cpu=True, bf16=False, max_steps=1, max_completion_length=16, report_to='none', "
    shown = [code for page in PAGES if page.name != "extending.md" for code in blocks(page, "python")]
    assert shown
    prompts = tmp_path / "my_prompts.jsonl"  # prompts and nothing else
    prompts.write_text("".join(json.dumps({"prompt": f"How do I boil {i} eggs?"}) + "\n" for i in range(8)))
    with served(make_app()) as address:
        for i, code in enumerate(shown):
            store.save(tmp_path / str(i) / "runs" / "mine" / "checkpoint-100" / "rankbuffer")
            monkeypatch.chdir(tmp_path / str(i))
            for word, real in {
                " judge_url=": f" {small}judge_url=",
                "GRPOConfig(output_dir": f"GRPOConfig({small}output_dir",
                "http://127.0.0.1:8001/v1": f"{address}/v1",
                "my-judge": "rubric-judge",
                "Qwen/Qwen2.5-0.5B-Instruct": tiny_policy,
                "data/mine.jsonl": str(QUICKSTART / "howto.jsonl"),
                "data/my_prompts.jsonl": str(prompts),
            }.items():
                code = code.replace(word, real)
            names: dict = {}
            exec(code, names)
            if "trainer" in names:
                assert names["trainer"].state.global_step == 1
                if hasattr(names["trainer"], "close"):  # a stock trainer has nothing to close
                    names["trainer"].close()


def test_the_example_trains_on_its_own_data(tmp_path, tiny_policy, monkeypatch):
    with served(make_app()) as address:
        words = ["example", "--output_dir", str(tmp_path), "--model_name_or_path", tiny_policy, "--judge_url"]
        words += [address + "/v1", "--judge_model", "rubric-judge", "--use_cpu", "--bf16", "false", "--max_steps", "2"]
        monkeypatch.setattr(sys, "argv", [*words, "--max_completion_length", "8", "--report_to", "none"])
        done = runpy.run_path(str(ROOT / "examples" / "train_on_your_own.py"))
    assert done["trainer"].state.global_step == 2
    assert (tmp_path / "model.safetensors").is_file() and (tmp_path / "buffers.parquet").is_file()


def test_every_vllm_server_of_a_page_or_script_leaves_out_what_the_model_sets():
    """Its `generation_config.json` may have a penalty, which changes verdicts."""
    lines = [line for page in PAGES for line in commands(page) if "vllm serve " in line]
    scripts = "".join(path.read_text() for path in (ROOT / "recipes" / "launch").glob("*.sh"))
    lines += re.findall(r'vllm serve "\$.*(?:\n +--.*)*', scripts)
    assert len(lines) > 6
    for line in lines:
        assert "--generation-config vllm" in line, line
