"""The package as others install it: ranges, lock, declared imports, recipes inside, and the files beside the code."""

import ast
import re
import runpy
import subprocess
import sys
import tomllib
import zipfile
from importlib.metadata import packages_distributions

import pytest
import yaml
from conftest import ROOT
from helpers.programs import PAGES, text_of
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from setuptools import find_packages

from rankbuffer_trl import __version__


@pytest.fixture(scope="module")
def package() -> dict:
    """What pyproject.toml says of the package."""
    return tomllib.loads(text_of("pyproject.toml"))["project"]


def names(requirements: list[str]) -> set[str]:
    return {canonicalize_name(Requirement(text).name) for text in requirements}


def lock() -> dict[str, Requirement]:
    lines = re.findall(r"^[a-z].*$", (ROOT / "requirements.txt").read_text(), re.MULTILINE)
    return {canonicalize_name(Requirement(line).name): Requirement(line) for line in lines}


def test_the_lock_is_exact_and_within_the_ranges(package):
    locked, ranges = lock(), package["dependencies"] + package["optional-dependencies"]["tools"]
    assert locked.keys() == names(ranges)
    for text in ranges:
        wanted = Requirement(text)
        exact = locked[canonicalize_name(wanted.name)]
        [(operator, version)] = [(one.operator, one.version) for one in exact.specifier]
        assert operator == "==" and wanted.specifier.contains(version), text
        assert wanted.extras == exact.extras
        assert all(one.operator in (">=", "<", "<=", "!=") for one in wanted.specifier), f"{text} is no range"
    named = re.findall(r"`(\S+==\S+)`", text_of("docs/train.md"))
    assert named and {*named} <= {*text_of("requirements.txt").splitlines()}


def test_the_extras_are_those_that_pages_and_messages_name(package):
    assert package["optional-dependencies"].keys() == {"trackio", "wandb", "vllm", "evaluation", "tools", "dev"}
    named = {name for page in PAGES for name in re.findall(r"(?:\.|rankbuffer-trl)\[(\w+)\]", text_of(page))}
    assert named and named <= package["optional-dependencies"].keys()


def test_the_makefile_installs_the_vllm_that_the_extra_names(package):
    text = package["optional-dependencies"]["vllm"][0]
    script = re.search(r"VLLM_VERSION := \$\(shell (sed .*)\)", (ROOT / "Makefile").read_text())[1]
    done = subprocess.run(script, shell=True, cwd=ROOT, capture_output=True, text=True, timeout=30, check=True)
    assert done.stdout.strip() and Requirement(text).specifier.contains(done.stdout.strip())


def test_the_sandbox_of_chat_templates_has_no_known_way_out(package):
    [jinja] = [Requirement(text) for text in package["dependencies"] if text.startswith("jinja2")]
    assert not jinja.specifier.contains("3.1.5")  # CVE-2025-27516


def test_no_package_is_forgotten():
    listed = tomllib.loads(text_of("pyproject.toml"))["tool"]["setuptools"]["packages"]
    assert {*listed} == {*find_packages(str(ROOT), include=["rankbuffer_*"]), "rankbuffer_tools.recipes"}


@pytest.mark.parametrize("folder", ["rankbuffer_trl", "rankbuffer_tools", "examples", "evaluation"])
def test_every_library_that_is_imported_is_declared(package, folder):
    extra = {"rankbuffer_tools": "tools"}.get(folder, folder)
    declared = names(package["dependencies"] + package["optional-dependencies"].get(extra, []))
    distributions = packages_distributions()
    for path in (ROOT / folder).rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            modules = [node.module] if isinstance(node, ast.ImportFrom) and not node.level else []
            modules += [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            for module in {module.partition(".")[0] for module in modules} - set(sys.stdlib_module_names):
                if module in ("rankbuffer_trl", "rankbuffer_tools", "evaluation"):
                    continue
                owners = {canonicalize_name(name) for name in distributions.get(module, [module])}
                # A library that is an extra of its own name may be missing, so only a function may import it.
                extra = names(package["optional-dependencies"].get(module, [])) if node.col_offset else set()
                assert owners & (declared | extra), f"{path.relative_to(ROOT)} imports {module}"


@pytest.mark.slow
def test_each_command_runs_as_a_module_too(package, monkeypatch, capsys):
    for name, entry in package["scripts"].items():
        module = entry.partition(":")[0]
        monkeypatch.setattr(sys, "argv", [name, "--help"])
        with pytest.raises(SystemExit, match="0"):
            runpy.run_module(module, run_name="__main__")
        assert "usage: " in capsys.readouterr().out, module


@pytest.mark.slow  # it builds a wheel
def test_an_installed_package_finds_its_recipes_from_any_folder(tmp_path):
    source = tmp_path / "source"
    source.mkdir()
    for name in ("setup.py", "pyproject.toml", "README.md", "rankbuffer_trl", "rankbuffer_tools", "recipes"):
        subprocess.run(["cp", "-r", ROOT / name, source], timeout=60, check=True)
    build = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "-q", "-w", tmp_path, source]
    subprocess.run(build, timeout=300, check=True)
    [wheel] = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path / "installed")
    [entry] = (tmp_path / "installed").glob("*.dist-info/entry_points.txt")
    assert "rankbuffer-train = rankbuffer_tools.train.command:main" in entry.read_text()
    inside = tmp_path / "installed" / "rankbuffer_tools" / "recipes"
    assert (inside.parent / "paper.yaml").is_file()
    shipped = {path.relative_to(inside) for path in inside.rglob("*.yaml")}
    assert shipped == {path.relative_to(ROOT / "recipes") for path in (ROOT / "recipes").rglob("*.yaml")}
    program = "from rankbuffer_tools.train import parser; p = parser.find_recipe('{}')"
    program += "; print(p, parser.read_recipe(p)['beta'])"
    there = {"cwd": tmp_path, "env": {"PYTHONPATH": str(tmp_path / "installed"), "PATH": "/usr/bin:/bin"}}
    for name in ("paper/dapo.yaml", "recipes/paper/dapo.yaml"):
        words = [sys.executable, "-c", program.format(name)]
        done = subprocess.run(words, **there, capture_output=True, text=True, timeout=300, check=True)
        assert done.stdout.split() == [str(inside / "paper" / "dapo.yaml"), "0.0"]


# The files beside the code


def test_the_workflows_run_make_targets_and_all_of_what_every_change_must_pass():
    targets, runs = set(re.findall(r"^([\w-]+):", text_of("Makefile"), re.MULTILINE)), {}
    for path in (ROOT / ".github" / "workflows").glob("*.yml"):
        workflow = yaml.safe_load(path.read_text())
        assert workflow["permissions"] == {"contents": "read"} and workflow["concurrency"]["group"], path.name
        commands = []
        for job in workflow["jobs"].values():
            assert job["timeout-minutes"] <= 120
            assert "write" not in {**job.get("permissions", {}), "id-token": "", "pages": ""}.values()
            matrix = job.get("strategy", {}).get("matrix", {})
            commands += matrix.get("command", []) + [one["command"] for one in matrix.get("include", [])]
            commands += [step["run"] for step in job["steps"] if "run" in step]
        runs[path.stem] = {word for line in commands if "make " in line for word in line.partition("make ")[2].split()}
        assert runs[path.stem] <= targets, f"{path.name}: {runs[path.stem] - targets}"
    assert runs.keys() == {"pull-request", "main", "schedule", "release", "site"}
    assert {"lint", "test", "test-lowest"} == runs["pull-request"]
    assert set(re.findall(r"^make (.+)", text_of(".ci/run"), re.MULTILINE)) <= runs["main"]
    assert (ROOT / ".ci" / "run").stat().st_mode & 0o100


def test_the_workflows_pin_each_action_by_its_commit():
    for path in (ROOT / ".github").rglob("*.yml"):
        for used in re.findall(r"\buses: *(.*)", path.read_text()):
            assert re.fullmatch(r"[\w/-]+@[0-9a-f]{40} # v\d+\.\d+\.\d+", used), f"{path.name}: {used}"


@pytest.mark.parametrize(("workflow", "job"), [("release", "build"), ("site", "site")])
def test_what_a_tag_publishes_is_made_from_a_commit_of_main_alone(workflow, job, tmp_path):
    steps = yaml.safe_load(text_of(f".github/workflows/{workflow}.yml"))["jobs"][job]["steps"]
    checks = [step["run"] for step in steps if "main" in step.get("name", "")]
    assert steps[0]["with"] == {"fetch-depth": 0}, "else the checkout has no origin/main"
    git = "git -c user.name=a -c user.email=a@b commit --quiet --allow-empty --message=c"
    make = f"git init --quiet --initial-branch=other . && {git} && git update-ref refs/remotes/origin/main HEAD"
    for commits, status in ((make, 0), (git, 1)):
        subprocess.run(commits, shell=True, cwd=tmp_path, timeout=30, check=True)
        assert [subprocess.run(each, shell=True, cwd=tmp_path, timeout=30).returncode for each in checks] == [status]


def test_lowest_and_newest_come_from_the_ranges(package):
    ranges = re.search(r"RANGES := (sed .*)", text_of("Makefile"))[1]
    lowest = re.search(r"\$\(RANGES\) \| (sed .*) >", text_of("Makefile"))[1].replace("$$", "$")
    for command, wanted in (
        (ranges, package["dependencies"]),
        (f"{ranges} | {lowest}", [re.sub(r">=([^,]+).*", r"==\1", text) for text in package["dependencies"]]),
    ):
        done = subprocess.run(command, shell=True, cwd=ROOT, capture_output=True, text=True, timeout=30, check=True)
        assert done.stdout.splitlines() == wanted


def test_the_image_and_the_cloud_file_name_what_is_there(package):
    image, cloud = text_of("Dockerfile"), text_of("recipes/launch/sky.yml")
    named = re.findall(r"\b(?:recipes|docs)/[\w/]+\.\w+", image + cloud)
    named += [word for line in re.findall(r"^COPY (.+)", image, re.MULTILINE) for word in line.split()[:-1]]
    assert [path for path in named if not (ROOT / path).exists()] == []
    extras = {extra for named in re.findall(r"'\.\[([\w,]+)\]'", image + cloud) for extra in named.split(",")}
    assert extras and extras <= set(package["optional-dependencies"])
    assert re.search(r"apt-get install .*\bcurl procps\b", image), "the launch scripts need ps"
    recipe = yaml.safe_load(text_of("recipes/base.yaml"))
    for key in ("dataset_name", "output_dir"):
        folder = recipe[key].partition("/")[0]
        assert f'"$PWD/{folder}:/rankbuffer/{folder}"' in image, "the image has neither data nor runs"
    task = yaml.safe_load(cloud)
    assert all(task["envs"].values()), "SkyPilot asks for variables that are empty"
    subprocess.run(["bash", "-n"], input=task["setup"] + task["run"], text=True, timeout=30, check=True)


def test_citation_and_changelog_are_of_this_version_and_of_the_paper():
    from rankbuffer_trl.training._trainer import RankBufferTrainer

    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert citation["version"] == __version__
    paper = citation["preferred-citation"]
    assert paper["title"] == RankBufferTrainer._paper["title"] == citation["title"].partition(" on TRL")[0]
    authors = " and ".join(f"{one['given-names']} {one['family-names']}" for one in paper["authors"])
    assert f"author = {{{authors}}}" in RankBufferTrainer._paper["citation"]
    assert re.findall(r"^## (\d\S+)", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)[0] == __version__
