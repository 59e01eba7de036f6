"""Read settings and write data sets with their provenance, for all recipes that prepare data."""

import re
import sys
from argparse import SUPPRESS
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import TypeVar

import yaml
from trl import TrlParser

from rankbuffer_trl.errors import RankBufferError, SettingsError
from rankbuffer_trl.judge import Endpoint, Totals
from rankbuffer_trl.judge.config import JudgeConfig

from ..terminal import prepare_terminal
from .output import beside, write_failures, write_provenance, write_rows
from .recipes import find_recipe, no_such_key, read_recipe, take_option
from .server_check import CHARACTERS_PER_TOKEN

Config = TypeVar("Config")
ELSEWHERE = {each.name for each in fields(JudgeConfig)} | {"judge_step_timeout"}  # not every program has all of them


def run_script(
    config_class: type[Config], main: Callable[[Config], int], parser_class: type[TrlParser] = TrlParser
) -> None:
    """Read the settings, run `main`, and exit with the code that it returns."""
    program = Path(sys.argv[0])
    # `python -m` names the file of a command.
    name = f"rankbuffer-{program.parent.name}" if program.stem == "command" else program.stem
    prepare_terminal()
    try:
        code = main(read_settings(config_class, parser_class))
    except (RankBufferError, OSError) as error:  # what the user can mend is one line
        sys.exit(f"{name}: {error}")
    except KeyboardInterrupt:
        sys.exit(f"{name}: interrupted. The answers so far are kept; run the same command again to continue")
    sys.exit(code)


def read_settings(config_class: type[Config], parser_class: type[TrlParser] = TrlParser) -> Config:
    """Read settings from the command line, and from the YAML file that `--config` names.

    `--recipe` names the recipe of a training, whose keys `judge_*` are the defaults.

    Raises:
        [`SettingsError`]: for a key that does not exist or a value that cannot work.
    """
    parser = parser_class((config_class,), allow_abbrev=False)
    parser.add_argument("--config", metavar="FILE.yaml", default=SUPPRESS, help="read settings from this file, too")
    judge = {item.name for item in fields(config_class) if item.name.startswith("judge_")}  # type: ignore[arg-type]
    if judge:
        help_text = "take the settings of the judge from this recipe of a training, such as paper/rankbuffer.yaml"
        parser.add_argument("--recipe", metavar="RECIPE.yaml", default=SUPPRESS, help=help_text)
        if (name := take_option(sys.argv[1:], "recipe")[0]) is not None:
            recipe = read_recipe(find_recipe(name))  # so that this asks with the guard and decoding of the training
            parser.set_defaults_with_config(**{key: value for key, value in recipe.items() if key in judge})
    own = {"help", "config", "recipe", *config_class.__annotations__}  # before what is inherited, in the help
    for actions in (parser._actions, parser._optionals._group_actions):
        actions.sort(key=lambda action: action.dest not in own)
    try:
        if (words := parser.parse_known_args()[1]) and words[0].startswith("--"):
            raise ValueError(words)  # before values are checked: a key that is misspelled may seem not to be set
        (config, *_) = parser.parse_args_and_config()
    except (RecursionError, yaml.YAMLError) as error:
        raise SettingsError(f"the file of --config cannot be read as YAML: {' '.join(str(error).split())}") from error
    except ValueError as error:  # of TRL's parser, which lists what it does not know as `['--key', 'value']`
        if not (unknown := re.search(r"\['--(\w+)", str(error))):
            raise SettingsError(str(error)) from error
        if (key := unknown[1]) in ELSEWHERE:
            cause = f"{key} is a setting of other programs and has no effect here: leave it out"
            raise SettingsError(cause) from None
        raise SettingsError(no_such_key(key, [action.dest for action in parser._actions])) from None
    return config


def cost_line(endpoint: Endpoint, totals: Totals) -> str:
    """Say what all attempts cost, in tokens, and in money if prices are set."""
    line = (
        f"{totals.attempts:,} requests, {totals.spent_prompt_tokens:,} prompt tokens"
        f" ({totals.spent_cached_tokens:,} cached), {totals.spent_completion_tokens:,} completion tokens"
    )
    price = endpoint.price(totals)
    return line if price is None else f"{line}; {price:,.4f} at the prices given"


def announce(
    endpoint: Endpoint,
    what: str,
    questions: tuple[int, int],
    prompt: float,
    completion: float,
    log: Path,
    by_characters: bool = True,
) -> None:
    """Print what questions, at least and at most, will cost before they are asked."""
    low, high = (f"{n:,}" for n in questions)
    count = low if low == high else f"{low} to {high}"
    line = f"[price] {what}: {count} questions, about {prompt:,.0f} prompt and {completion:,.0f} completion tokens"
    totals = Totals(spent_prompt_tokens=round(prompt), spent_completion_tokens=round(completion))
    price = endpoint.price(totals)
    print(line if price is None else f"{line}, {price:,.2f} at the prices given")
    if by_characters:  # too many for most texts
        about = f"a token counts as {CHARACTERS_PER_TOKEN} characters here; in English it has about 4"
        print(f"[price] {about}, which costs a quarter less")
    if log.exists():
        print(f"[price] answers that {log} holds are not asked again")
    sys.stdout.flush()


PARTLY = 3  # an exit code: the file is written, and some queries, which no further attempt may mend, are not in it


def finish(path: Path, rows: list[dict], failures: dict[str, str], steps: list[dict]) -> int:
    """Write a data set, its failures and its provenance, and return the exit code: 1 if all failed, `PARTLY` if some.

    If all queries failed, an older file at `path` stays.
    """
    write_failures(path, failures)
    if rows:  # else an older file at `path` stays
        write_rows(path, rows)
        write_provenance(path, steps)
        print(f"{len(rows):,} queries in {path}, how they were made in {beside(path, 'provenance.json')}")
    if failures:
        query_id, cause = next(iter(failures.items()))
        print(
            f"{len(failures):,} queries failed and are NOT in it; they are listed in {beside(path, 'failed.jsonl')}."
            f" The first is {query_id!r}: {cause}. The same command asks only what has no answer"
            " yet; go on without them if their cause stays.",
            file=sys.stderr,
        )
    return (PARTLY if rows else 1) if failures else 0


def short(number: float) -> str:
    """Write a number of tokens for people: 1234567 as 1.2M."""
    for size, letter in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if number >= size:
            return f"{number / size:.1f}{letter}"
    return f"{number:.0f}"


def duration(seconds: float) -> str:
    """Write seconds in the unit that people use for them."""
    if seconds < 100:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 6000 else f"{seconds / 3600:.1f} h"
