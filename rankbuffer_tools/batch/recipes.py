"""Recipes: YAML files of settings that build on a base.

A recipe is looked up beside the file that names it, then among the recipes of this package. So `paper/rankbuffer.yaml`
and `recipes/paper/rankbuffer.yaml` are found from any folder.
"""

import argparse
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from rankbuffer_trl.errors import SettingsError
from rankbuffer_trl.settings import RENAMED, current_names, near

from ..paper import RECIPE_FOLDER

DEFAULT_METHOD = "rankbuffer"  # of RankBufferConfig, which would load torch


def find_recipe(name: str, beside: Path = Path(), without: Sequence[Path] = ()) -> Path:
    """Return the path of a recipe that a path names, or a name of this package such as `paper/rankbuffer.yaml`.

    Raises:
        [`SettingsError`]: if there is none but those `without`. The message lists the recipes of this package.
    """
    for path in (beside / name, RECIPE_FOLDER / name, RECIPE_FOLDER.parent / name):
        if path.is_file() and path.resolve() not in without:
            return path
    names = sorted(path.relative_to(RECIPE_FOLDER).as_posix() for path in RECIPE_FOLDER.rglob("*.yaml"))
    stems = {Path(path_text).stem: path_text for path_text in names}  # of whatever folder
    kind = "other recipe" if without else "recipe"  # a recipe is not its own base
    raise SettingsError(
        f"there is no {kind} {name!r} in {beside.absolute()}{near(Path(name).stem, stems, stems)}; the recipes of this"
        f" package are {', '.join(names)}"
    )


class OnceLoader(yaml.SafeLoader):
    """YAML's safe loader, which also refuses a key that stands twice in a mapping."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[str] = set()  # YAML's own takes the last one without a word
        for key, _ in node.value:
            if str(key.value) in seen:  # a key such as {{NAME}} is no text
                raise yaml.MarkedYAMLError(None, None, f"{key.value} stands twice", key.start_mark)
            seen.add(str(key.value))
        return super().construct_mapping(node, deep)


def read_recipe(path: Path, above: Sequence[Path] = ()) -> dict[str, Any]:
    """Read a recipe and its base. The keys of the recipe win.

    Args:
        above (`Sequence[Path]`, *optional*):
            The files that lead to this one by their `base`.

    Raises:
        [`SettingsError`]: if a file cannot be read, is not a YAML mapping, or names a base that does not exist.
    """
    try:
        recipe = yaml.load(path.read_text(encoding="utf-8"), Loader=OnceLoader)
    except (OSError, ValueError, RecursionError, yaml.YAMLError) as error:
        raise SettingsError(f"the recipe {path} cannot be read: {' '.join(str(error).split())}") from error
    if not isinstance(recipe, dict) or not all(isinstance(key, str) for key in recipe):
        raise SettingsError(f"the recipe {path} must hold a YAML mapping of keys, which are words, to values")
    recipe = current_names(recipe, RENAMED.values())
    base = recipe.pop("base", None)
    if base is None:
        return recipe
    read = [*above, path.resolve()]  # a base that leads back here would never end
    return overlay(read_recipe(find_recipe(str(base), path.parent, without=read), read), recipe)


def overlay(below: Mapping[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    """Return the keys of both; those of `above` win."""
    # Another method does not have the arguments below.
    if above.get("method", below.get("method", DEFAULT_METHOD)) != below.get("method", DEFAULT_METHOD):
        below = {key: value for key, value in below.items() if key != "method_args"}
    return {**below, **above}


def take_option(arguments: Iterable[str], key: str) -> tuple[str | None, list[str]]:
    """Return the last value of an option on the command line, and the arguments without this option."""
    value, rest, remaining = None, [], iter(arguments)
    for word in remaining:
        name, equals, text = word.partition("=")
        if name.replace("-", "_") == f"__{key}":
            value = text if equals else next(remaining, "")
        else:
            rest.append(word)
    return value, rest


def no_such_key(key: str, known: Sequence[str]) -> str:
    """Say that there is no such setting, and which known ones are spelled alike."""
    older = RENAMED.get(key) in known
    return f"there is no key {key!r}{near(key, [key] if older else known, RENAMED if older else {})}"


class KeyParser(argparse.ArgumentParser):
    """A parser, also of the commands below it, that says which of its keys a misspelled one may stand for."""

    def parse_known_args(self, *args: Any, **kwargs: Any) -> Any:
        found, unknown = super().parse_known_args(*args, **kwargs)
        if unknown and unknown[0].startswith("--"):
            self.error(no_such_key(unknown[0].lstrip("-").partition("=")[0], [each.dest for each in self._actions]))
        return found, unknown
