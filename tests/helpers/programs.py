"""The programs of this repository by name, and the commands that the pages give to them."""

import argparse
import json
import re
import runpy
import sys
import tomllib
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path

import pytest
from conftest import ROOT
from trl import TrlParser

WHERE = ("*.md", "docs/**/*.md", "recipes/**/*.md", "benchmarks/*.md", "experiments/**/*.md", "evaluation/**/*.md")
PAGES = sorted(path.relative_to(ROOT) for where in (*WHERE, "examples/*.ipynb") for path in ROOT.glob(where))


def text_of(page: Path | str) -> str:
    """Return the text of a page; of a notebook without what a run has printed."""
    text = (ROOT / page).read_text()
    if Path(page).suffix != ".ipynb":
        return text
    book = json.loads(text)
    return json.dumps(book | {"cells": [cell | {"outputs": []} for cell in book["cells"]]}, indent=1)


def blocks(page: Path | str, language: str) -> list[str]:
    """Return the blocks of code of a page in a language."""
    return re.findall(rf"```{language}\n(.*?)```", text_of(page), re.DOTALL)


def commands(page: Path | str) -> list[str]:
    """Return the lines of all bash blocks of a page, with continued lines joined."""
    lines = "\n".join(blocks(page, "bash")).replace("\\\n", " ").splitlines()
    return [line for line in lines if line.strip() and not line.startswith("#")]


def program(words: list[str]) -> tuple[str, list[str]] | None:
    """Return the Python script or module that a command runs, and its arguments. `None`: it runs something else."""
    words = [word for word in words if word != "\\"]
    while words and (re.match(r"^[A-Z_]+=", words[0]) or words[0] in ("nice", "nohup")):
        words = words[1:]
    end = next((i for i, word in enumerate(words) if word in ("|", ">", "&&", ";", "2>&1", "&")), len(words))
    words = words[:end]
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


def entry_points() -> dict[str, tuple[str, str]]:
    """Return module and function of the package's console scripts, by name."""
    scripts = tomllib.loads(text_of("pyproject.toml"))["project"]["scripts"]
    return {name: tuple(place.split(":")) for name, place in scripts.items()}


def start(name: str, arguments: list[str]) -> None:
    """Run a program in this process, with these arguments on its command line."""
    argv, path = sys.argv, list(sys.path)
    sys.argv = [name, *arguments]
    try:
        if name.endswith(".py"):
            sys.path.insert(0, str((ROOT / name).parent))
            runpy.run_path(str(ROOT / name), run_name="__main__")
        elif name in entry_points():
            module, function = entry_points()[name]
            getattr(import_module(module), function)()
        else:
            runpy.run_module(name, run_name="__main__")
    finally:
        sys.argv, sys.path[:] = argv, path


class Parsed(BaseException):
    """The end of a program whose own parser has read its arguments; it holds those that the parser does not know."""


@contextmanager
def ending_when_parsed() -> Iterator[None]:
    """End programs with [`Parsed`] when they know their arguments or, with settings in dataclasses, their settings."""
    known, made = argparse.ArgumentParser.parse_known_args, TrlParser.parse_args_into_dataclasses

    def end_known(parser, *args, **kwargs):
        found = known(parser, *args, **kwargs)
        if not isinstance(parser, TrlParser):
            raise Parsed(found[1])
        return found

    def end_made(parser, *args, **kwargs):
        made(parser, *args, **kwargs)
        raise Parsed([])

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(argparse.ArgumentParser, "parse_known_args", end_known)
        patch.setattr(TrlParser, "parse_args_into_dataclasses", end_made)
        yield


def parse(name: str, arguments: list[str]) -> list[str]:
    """Run a program until its own parser has read the arguments, and return those that the parser does not know.

    A training is parsed for one process without a GPU, whatever the machine is.

    Raises:
        `SystemExit`: if the program refuses the arguments.
    """
    if name in ("rankbuffer-train", "recipes/train_rankbuffer.py"):
        recipe = " ".join(arguments)
        arguments = [*arguments, "--use_cpu", "--bf16", "false", "--push_to_hub", "false"]
        if "paper/" in recipe or "beyond/" in recipe:  # 2 x 80 rollouts a step, as on the paper's 8 processes
            arguments += ["--gradient_accumulation_steps", "80"]
    with ending_when_parsed():
        try:
            start(name, arguments)
        except Parsed as parsed:
            unknown = parsed.args[0]
        else:
            unknown = arguments  # it reads none
    if name == "recipes/quickstart/run.py":  # passes unknown arguments on to the recipe
        return parse("recipes/train_rankbuffer.py", ["--config", "recipes/quickstart/quickstart.yaml", *unknown])
    return unknown
