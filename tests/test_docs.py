"""Check what the pages say: links, paths, commands, flags, quoted code, output, error texts, the picture of layers."""

import argparse
import ast
import importlib.util
import inspect
import re
import runpy
import shlex
import sys
from collections.abc import Iterator
from functools import cache
from importlib import import_module
from pathlib import Path

import pytest
from conftest import ROOT, scripted_judge
from helpers.http_server import served
from test_recipes import READMES, commands

FOLDERS = ("docs/**", "recipes/**", "benchmarks", "evaluation/**", ".")
PAGES = sorted({path.relative_to(ROOT) for folder in FOLDERS for path in ROOT.glob(f"{folder}/*.md")} | set(READMES))
SOURCES = [path for folder in ("rankbuffer_trl", "recipes", "evaluation") for path in (ROOT / folder).rglob("*.py")]
PACKAGE = ROOT / "rankbuffer_trl"


def text_of(page: Path) -> str:
    return (ROOT / page).read_text()


# Links


def anchors(page: Path) -> set[str]:
    """Return the names that GitHub gives to the headings of a page."""
    titles = re.findall(r"^#+ (.+)$", re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).strip().replace(" ", "-") for title in titles}


@pytest.mark.parametrize("page", PAGES, ids=str)
def test_the_links_of_a_page_resolve(page):
    for target in re.findall(r"\]\((?!\w+:)([^)\s]+)\)", text_of(page)):
        path, _, anchor = target.partition("#")
        found = (ROOT / page).parent / path if path else ROOT / page
        assert found.exists(), f"{page}: the link {target} leads nowhere"
        if anchor:
            assert anchor in anchors(found), f"{page}: {path or page} has no heading #{anchor}"


@pytest.mark.parametrize("page", PAGES, ids=str)
def test_the_paths_that_a_page_names_exist(page):
    folders = "rankbuffer_trl|recipes|docs|accelerate_configs|benchmarks|tests|evaluation|examples"
    for path in re.findall(rf"`((?:{folders})/[\w/.-]+)`", text_of(page)):
        assert (ROOT / path).exists(), f"{page}: {path} does not exist"


# Commands


def program(words: list[str]) -> tuple[str, list[str]] | None:
    """Return the Python script or module that a command runs, and its arguments. `None`: it runs something else."""
    words = [word for word in words if word != "\\"]
    while words and (re.match(r"^[A-Z_]+=", words[0]) or words[0] in ("nice", "nohup")):
        words = words[1:]
    for i, word in enumerate(words):
        if word in ("|", ">", "&&", ";", "2>&1"):
            words = words[:i]
            break
    if not words:
        return None
    if words[0].startswith("rankbuffer-"):
        return words[0], words[1:]
    python = Path(words[0]).name.startswith("python")
    if python and words[1:2] == ["-m"]:
        return words[2], words[3:]
    if python or words[:2] == ["accelerate", "launch"]:
        script = next((i for i, word in enumerate(words) if word.endswith(".py")), None)
        return (words[script], words[script + 1 :]) if script is not None else None
    return None


def test_a_command_is_understood():
    assert program(shlex.split("OMP_NUM_THREADS=1 nice python a/b.py --x 1 > log")) == ("a/b.py", ["--x", "1"])
    assert program(shlex.split("accelerate launch --config_file c.yaml r.py --y")) == ("r.py", ["--y"])
    assert program(shlex.split("python -m rankbuffer_trl.judge.serve --port 1")) == (
        "rankbuffer_trl.judge.serve",
        ["--port", "1"],
    )
    assert program(["rankbuffer-audit", "--seed", "1"]) == ("rankbuffer-audit", ["--seed", "1"])
    assert program(["make", "test"]) is None


def entry_points() -> dict[str, tuple[str, str]]:
    """Return module and function of the package's console scripts, by name."""
    found = re.findall(r'"(rankbuffer-[\w-]+) = ([\w.]+):(\w+)"', (ROOT / "setup.py").read_text())
    return {name: (module, function) for name, module, function in found}


def parse(name: str, arguments: list[str]) -> list[str]:
    """Run a program until its own parser has read the arguments, and return those that the parser does not know.

    Raises:
        `SystemExit`: if the parser refuses the arguments.
    """

    class Parsed(BaseException):
        pass

    def stop(parser, *args, **kwargs):
        _, unknown = original(parser, *args, **kwargs)
        raise Parsed(unknown)

    original = argparse.ArgumentParser.parse_known_args
    argv, path = sys.argv, list(sys.path)
    argparse.ArgumentParser.parse_known_args, sys.argv = stop, [name, *arguments]
    try:
        if name.endswith(".py"):
            sys.path.insert(0, str((ROOT / name).parent))
            runpy.run_path(str(ROOT / name), run_name="__main__")
        elif name in entry_points():
            module, function = entry_points()[name]
            getattr(import_module(module), function)()
        else:
            runpy.run_module(name, run_name="__main__")
    except Parsed as parsed:
        return parsed.args[0]
    finally:
        argparse.ArgumentParser.parse_known_args, sys.argv, sys.path[:] = original, argv, path
    raise AssertionError(f"{name} takes no arguments, but is given {arguments}")


PROGRAMS = sorted(
    {
        (str(page), *parsed[:1], *parsed[1])
        for page in PAGES
        for command in commands(page)
        if (parsed := program(shlex.split(command, comments=True)))
    }
)


@pytest.mark.parametrize("case", PROGRAMS, ids=lambda case: " ".join(case)[:90])
def test_the_commands_of_a_page_are_understood_by_the_programs(case, monkeypatch):
    page, name, *arguments = case
    if name.endswith(".py"):
        assert (ROOT / name).is_file(), f"{page}: {name} does not exist"
    elif name.startswith("rankbuffer-"):
        assert name in entry_points(), f"{page}: setup.py has no command {name}"
    elif name.partition(".")[0] not in ("rankbuffer_trl", "evaluation"):
        return  # a program of another project
    else:
        assert importlib.util.find_spec(name), f"{page}: there is no module {name}"
    if arguments:
        monkeypatch.chdir(ROOT)
        unknown = parse(name, arguments)
        if name == "recipes/quickstart/run.py":  # passes unknown arguments on to the recipe
            unknown = parse("recipes/train_rankbuffer.py", unknown)
        assert unknown == [], f"{page}: {name} does not know these"


def test_a_wrong_flag_and_a_wrong_value_are_found(monkeypatch):
    monkeypatch.chdir(ROOT)
    assert parse("recipes/quickstart/run.py", ["--seed", "1", "--sed", "2"]) == ["--sed", "2"]
    with pytest.raises(SystemExit):
        parse("recipes/quickstart/run.py", ["--seed", "one"])


def test_the_make_targets_of_the_pages_exist():
    targets = {words[1] for page in PAGES for c in commands(page) if (words := shlex.split(c, True))[:1] == ["make"]}
    makefile = (ROOT / "Makefile").read_text()
    assert targets and [target for target in targets if f"\n{target}:" not in makefile] == []


# The method, line by line


def listed_lines() -> Iterator[tuple[str, str, str, str]]:
    """Yield file, name, line of the paper and code of each row of the tables in docs/method.md."""
    sections = re.split(r"^### `([\w/.]+)`: `([\w.]+)`$", text_of(Path("docs/method.md")), flags=re.MULTILINE)[1:]
    for path, name, body in zip(sections[::3], sections[1::3], sections[2::3], strict=True):
        for line, _, code in re.findall(r"^\| ([\d, to]*) ?\| (.*?) \| `(.*)` \|$", body, re.MULTILINE):
            yield path, name, line.strip(), code


def source_of(path: str, name: str) -> str:
    found = import_module(path.removesuffix(".py").replace("/", "."))
    for part in name.split("."):
        found = inspect.getattr_static(found, part)
    return inspect.getsource(found.fget if isinstance(found, property) else getattr(found, "__func__", found))


@pytest.mark.parametrize(("path", "name", "line", "code"), listed_lines())
def test_a_line_of_the_method_stands_in_the_code(path, name, line, code):
    assert " ".join(code.split()) in " ".join(source_of(path, name).split())


def test_the_contexts_of_the_judge_page_are_what_the_package_estimates():
    from rankbuffer_trl.judge.reach import context_for
    from rankbuffer_trl.rewards.method import load_method, method_names

    def need(shown: int, length: int, guard: bool) -> int:
        return context_for(600, 40, shown * length, guard)

    text = text_of(Path("docs/judge.md")).partition("### Which context a method wants")[2]
    lengths, named = (1024, 2048, 4096), []
    for methods, shown, *cells in re.findall(r"^\| (`.*`) \| (\d+) \| (.*) \| (.*) \| (.*) \|$", text, re.MULTILINE):
        names = re.findall(r"`(\w+)`", methods)
        assert {load_method(name, {}, 0).most_shown(8) for name in names} == {int(shown)}
        plain, guarded = ([need(int(shown), length, guard) for length in lengths] for guard in (False, True))
        assert cells == [f"{p / 1000:.1f}k ({g / 1000:.1f}k)" for p, g in zip(plain, guarded, strict=True)]
        named += names
    assert sorted(named) == sorted(method_names())
    contexts = re.findall(r"^\| ([\d,]+) \| (.*) \| (.*) \| (.*) \|$", text, re.MULTILINE)
    assert len(contexts) == 4
    for context, *cells in contexts:
        for length, cell in zip(lengths, cells, strict=True):
            for guard, fit in zip((False, True), re.findall(r"\d+", cell), strict=True):
                room = int(context.replace(",", ""))
                assert need(int(fit), length, guard) <= room < need(int(fit) + 1, length, guard)


def test_the_method_page_covers_both_algorithms():
    rows = list(listed_lines())
    of_the_paper = {(path, name) for path, name, line, _ in rows if line}  # what is ours has no line in the paper
    assert len(of_the_paper) == 7 and sum(bool(line) for _, _, line, _ in rows) >= 30
    code = "\n".join(path.read_text() for path in PACKAGE.rglob("*.py"))
    last = text_of(Path("docs/method.md")).rpartition("## What the paper leaves open")[2]
    where = re.findall(r"^\| .* \| .* \| (.*) \|$", last, re.MULTILINE)[1:]
    for name in {part for cell in where for part in re.findall(r"\w+", cell)}:
        assert re.search(rf"\b(?:def|class) {name}\b", code), f"nothing in the package is called {name}"


# Error texts


@cache
def spoken() -> list[str]:
    """Return all texts in the code, with `…` for what is filled in. The role of a model is filled in as `judge`."""
    texts = []
    for path in SOURCES:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.JoinedStr):
                texts.append(re.sub(r"%[srd]", "…", "".join(map(text_of_part, node.values))))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                texts.append(re.sub(r"%[srd]", "…", node.value))
    return texts


def text_of_part(part: ast.expr) -> str:
    """Return the text of a part of an f-string."""
    if isinstance(part, ast.Constant):
        return part.value
    return "judge" if ast.unparse(part.value) == "client.role" else "…"


def said(text: str) -> bool:
    """Tell whether the program can say a text. `…` and quoted words stand for anything that is filled in."""
    pattern = "(?:.|\\n)*?".join(re.escape(part) for part in re.split(r"…|'\w+'", text))
    return any(re.search(pattern, spoken_text) for spoken_text in spoken())


SYMPTOMS = re.findall(r"^\| `([^`]+)` \|", text_of(Path("docs/troubleshooting.md")), re.MULTILINE)
METRIC = re.compile(r"^\w+/[\w*]+$")


def test_a_text_that_nobody_says_is_found():
    assert not said("the judge has gone fishing")
    assert said("the judge server … does not serve judge_model=")
    assert len(SYMPTOMS) > 25


@pytest.mark.parametrize("symptom", [text for text in SYMPTOMS if not METRIC.match(text)])
def test_the_program_says_what_troubleshooting_quotes(symptom):
    assert said(symptom)


# Configuration


def test_the_configuration_page_is_what_the_dataclasses_say():
    spec = importlib.util.spec_from_file_location("make_configuration", ROOT / "docs" / "make_configuration.py")
    maker = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(maker)
    assert maker.PAGE.read_text() == maker.page(), "run: python docs/make_configuration.py"


# The picture


def layers() -> dict[str, int]:
    """Return the layer of each file and folder that docs/architecture.md draws."""
    _, _, section = text_of(Path("docs/architecture.md")).partition("\n## The layers\n")
    picture = re.search(r"```\n(.*?)```", section, re.DOTALL)[1]
    found = {}
    for layer, line in re.findall(r"^ (\d)  (.*)$", picture, re.MULTILINE):
        for name in re.findall(r"\b(\w+(?:/|\.py))", line):
            assert name not in found, f"{name} is drawn twice"
            found[name] = int(layer)
    return found


def top(parts: tuple[str, ...]) -> str:
    """Return the file or folder of the package that holds a module."""
    return f"{parts[0]}.py" if (PACKAGE / f"{parts[0]}.py").is_file() else f"{parts[0]}/"


def is_for_types(node: ast.AST) -> bool:
    """Tell whether only type checkers read a block."""
    return isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"


def imports() -> Iterator[tuple[str, str, Path]]:
    """Yield the importing and the imported file or folder of the package, and the file of the import."""
    for path in PACKAGE.rglob("*.py"):
        inside = path.relative_to(PACKAGE)
        if inside.parts == ("__init__.py",):
            continue
        tree = ast.parse(path.read_text())
        for_types = {node for block in ast.walk(tree) if is_for_types(block) for node in ast.walk(block)}
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and node.level and node not in for_types:
                package = inside.parent.parts[: len(inside.parent.parts) - node.level + 1]
                modules = [node.module.split(".")] if node.module else [[alias.name] for alias in node.names]
                for module in modules:
                    if module == ["__version__"]:
                        continue
                    yield top((inside.parts[0].removesuffix(".py"),)), top((*package, *module)), inside


def test_the_picture_of_the_architecture_is_true():
    drawn = layers()
    real = {path.name for path in PACKAGE.glob("*.py")} - {"__init__.py"}
    real |= {f"{path.parent.name}/" for path in PACKAGE.glob("*/__init__.py")}
    assert drawn.keys() == real, "docs/architecture.md does not draw what is there"
    for importing, imported, where in imports():
        if where.name in ("command.py", "__main__.py"):  # the command line of a folder may use everything
            continue
        assert drawn[importing] >= drawn[imported], f"{where} imports from {imported}, which is drawn above it"


# Code and output in pages


def test_the_readme_shows_what_one_group_prints(capsys):
    _, _, rest = text_of(Path("README.md")).partition("python examples/one_group.py\n```")
    shown = re.search(r"```\n(.*?)```", rest, re.DOTALL)
    runpy.run_path(str(ROOT / "examples" / "one_group.py"), run_name="__main__")
    assert shown[1] in capsys.readouterr().out


def beats_best(tmp_path, monkeypatch) -> str:
    """Write the method of docs/extending.md to a module that can be imported, and return its dotted path."""
    code = re.search(r"```python\n(.*?)```", text_of(Path("docs/extending.md")), re.DOTALL)[1]
    assert len(code.splitlines()) <= 42
    (tmp_path / "my_methods").mkdir()
    (tmp_path / "my_methods" / "beats_best.py").write_text(code)
    monkeypatch.syspath_prepend(tmp_path)
    return "my_methods.beats_best.BeatsBest"


def test_the_method_that_extending_shows_ranks(tmp_path, monkeypatch):
    import asyncio

    from helpers.quality import make
    from helpers.truth import truth

    from rankbuffer_trl.rewards.method import load_method

    name = beats_best(tmp_path, monkeypatch)
    group = make([5, None, 11, 10])  # the best reference has 10

    def rewards(answer=truth, **arguments):
        judge = scripted_judge(lambda messages: answer(messages[0]["content"]), max_attempts=1)
        return asyncio.run(load_method(name, arguments, 0).score(group, None, judge)).rewards

    assert rewards() == (-1, -1, 1, 0)
    assert rewards(tie=0.5) == (-1, -1, 1, 0.5)
    assert rewards(lambda prompt: '{"winner": "A"}') == (0, -1, 0, 0), "the first shown always wins"
    assert rewards(lambda prompt: "no idea") == (None, -1, None, None)
    method = load_method(name, {}, 0)
    assert method.calls(group, first=True) == (6, 6) and len(method.first_questions(group)) == 6
    assert method.most_shown(8) == 2
    with pytest.raises(ValueError, match="has no argument 'loser'"):
        load_method(name, {"loser": 1}, 0)


def test_the_method_that_extending_shows_trains(tmp_path, monkeypatch, tiny_policy, rows):
    from rankbuffer_trl.training.config import RankBufferConfig
    from rankbuffer_trl.training.trainer import RankBufferTrainer

    recipe = dict(method=beats_best(tmp_path, monkeypatch), method_args={"tie": 0.5})
    small = dict(use_cpu=True, bf16=False, max_completion_length=4, max_steps=1, report_to="none")
    trainer = RankBufferTrainer(
        tiny_policy, RankBufferConfig(str(tmp_path / "run"), **recipe, **small), train_dataset=rows
    )
    trainer.train()
    assert {row[0] for row in trainer.rank_reward.scorer.store.rows("SELECT method FROM calls")} <= {"beats_best"}
    assert trainer.state.global_step == 1
    trainer.close()


def own_file(folder: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """Write the file `my_methods/NAME` of docs/extending.md into a folder, so that it can be imported."""
    _, _, rest = text_of(Path("docs/extending.md")).partition(f"`my_methods/{name}`")
    (folder / "my_methods").mkdir(exist_ok=True)
    (folder / "my_methods" / name).write_text(re.search(r"```python\n(.*?)```", rest, re.DOTALL)[1])
    monkeypatch.delitem(sys.modules, "my_methods", raising=False)
    monkeypatch.syspath_prepend(folder)


def test_the_question_that_extending_shows_is_asked(tmp_path, monkeypatch):
    import asyncio
    import json

    from helpers.quality import make

    from rankbuffer_trl.judge import VerdictError
    from rankbuffer_trl.rewards.method import load_method

    own_file(tmp_path, monkeypatch, "best_worst.py")
    method, group, seen = load_method("my_methods.best_worst.BestWorst", {}, 0), make([5, None, 9, 2]), []

    def answer(messages):
        seen.append(messages[0]["content"])
        blocks = dict(re.findall(r"^\[R(\d)\]\n(\d+)", messages[0]["content"], re.MULTILINE))
        order = sorted(blocks, key=lambda id: int(blocks[id]))
        return json.dumps({"best": int(order[-1]), "worst": int(order[0])})

    score = asyncio.run(method.score(group, None, scripted_judge(answer)))
    assert score.rewards == (0, -1, 1, -1) and score.order == ((3,), (0,), (2,))
    assert group.query.text in seen[0] and seen[0].endswith('{"best": 0, "worst": 1}') and "{" not in seen[0][:-30]
    assert asyncio.run(method.score(group, None, scripted_judge(lambda _: "no"))).rewards == (None, -1, None, None)
    assert asyncio.run(method.score(make([5, None]), None, scripted_judge(answer))).rewards == (0, -1)
    (question,) = method.first_questions(group)
    assert method.calls(group, True) == (1, 1) and re.fullmatch(
        question.verdict.constraint["regex"], '{"best": 2, "worst": 0}'
    )
    for wrong in ('{"best": 0, "worst": 0}', '{"best": 1, "worst": 0}', '{"best": [0], "worst": 2}'):
        with pytest.raises(VerdictError, match="two different numbers"):
            question.read(wrong)


def test_the_judge_that_extending_shows_is_named_in_a_recipe(tmp_path, monkeypatch, tiny_policy, rows):
    import yaml
    from aiohttp import web
    from helpers.scripted import ScriptedTrainer, config

    from rankbuffer_trl.judge.rubric_judge import judge

    own_file(tmp_path, monkeypatch, "text_server.py")
    asked = []

    async def answer(request):
        asked.append((await request.json())["prompt"])
        return web.json_response({"text": judge(asked[-1])})

    (recipe,) = (
        settings
        for block in re.findall(r"```yaml\n(.*?)```", text_of(Path("docs/extending.md")), re.DOTALL)
        if "judge_client" in (settings := yaml.safe_load(block))
    )
    assert recipe.pop("base") == "base.yaml"
    app = web.Application()
    app.add_routes([web.post("/judge", answer)])
    with served(app) as address:
        recipe["judge_client_args"]["url"] = f"{address}/judge"
        trainer = ScriptedTrainer(tiny_policy, config(tmp_path / "run", max_steps=1, **recipe), rows)
        trainer.train()
    totals = trainer.rank_reward.scorer.store.totals()
    assert 0 < totals.calls <= len(asked) and totals.failures == 0 and "\n> " in asked[0]
    assert trainer._identity()["judge"].startswith("my_methods.text_server.TextServer {'url'")
    trainer.close()


def test_the_rewards_that_extending_shows_stand_beside_the_rank(tmp_path, monkeypatch, tiny_policy, rows):
    import yaml
    from helpers.scripted import ScriptedTrainer, config

    own_file(tmp_path, monkeypatch, "sources.py")
    blocks = re.findall(r"```yaml\n(.*?)```", text_of(Path("docs/extending.md")), re.DOTALL)
    (functions,) = (each["reward_functions"] for each in map(yaml.safe_load, blocks) if "reward_functions" in each)
    functions[0]["args"] = {"max_completion_len": 20, "soft_punish_cache": 10}
    trainer = ScriptedTrainer(tiny_policy, config(tmp_path / "run", max_steps=1, reward_functions=functions), rows)
    trainer.train()
    names = ["rank_reward", "format_reward", "soft_overlong_punishment_reward", "names_a_source"]
    assert trainer.reward_func_names == names
    assert trainer.reward_weights.tolist() == pytest.approx([1, 0.2, 0.5, 0.2])
    log = trainer.state.log_history[0]
    assert -1 <= log["rewards/soft_overlong_punishment_reward/mean"] < 0 and log["rewards/names_a_source/mean"] == 0
    trainer.close()


def test_the_example_trains_on_its_own_data(tmp_path, tiny_policy, monkeypatch):
    from rankbuffer_trl.judge.serve import make_app

    code = (ROOT / "examples" / "train_on_your_own.py").read_text()
    body = [line for line in code.rpartition('"""')[2].splitlines() if line and "import" not in line]
    assert len(body) <= 15, "about ten lines"
    with served(make_app()) as address:
        words = ["example", "--output_dir", str(tmp_path), "--model_name_or_path", tiny_policy, "--judge_url"]
        words += [address + "/v1", "--judge_model", "rubric-judge", "--use_cpu", "--bf16", "false", "--max_steps", "2"]
        monkeypatch.setattr(sys, "argv", [*words, "--max_completion_length", "8", "--report_to", "none"])
        done = runpy.run_path(str(ROOT / "examples" / "train_on_your_own.py"))
    assert done["trainer"].state.global_step == 2
    assert (tmp_path / "model.safetensors").is_file() and (tmp_path / "buffers.parquet").is_file()
