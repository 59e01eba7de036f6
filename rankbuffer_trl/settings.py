"""Check the values of settings against the annotations of their fields, and load what a recipe names by its path."""

import inspect
import json
import re
import sys
import typing
from collections.abc import Mapping
from dataclasses import MISSING, fields
from importlib import import_module
from inspect import get_annotations
from types import MappingProxyType, NoneType, UnionType
from typing import Any, Literal, TypeVar

from .errors import SettingsError

Class = TypeVar("Class", bound=type)
ENTRY = re.compile(r"^    (\w+) \((`.*)\):\n((?: {8}.*\n)+)", re.MULTILINE)
WORDS = {bool: "true or false", int: "an integer", float: "a finite number", str: "a text", NoneType: "null"}


def described(cls: type[Any]) -> dict[str, tuple[str, str]]:
    """Return the type and the text of each field that the docstring of a class describes."""
    entries = ENTRY.findall(inspect.cleandoc(cls.__doc__ or "") + "\n")
    return {name: (kind, " ".join(text.split())) for name, kind, text in entries}


def documented(cls: Class) -> Class:
    """Give each field of a dataclass its help for the command line: the first sentence of its text in the docstring.

    Raises:
        `ValueError`: if the docstring says nothing of a field that the class declares.
    """
    texts = described(cls)
    for each in fields(cls):
        if each.name in get_annotations(cls):
            if each.name not in texts:
                raise ValueError(f"the docstring of {cls.__name__} says nothing of {each.name}")
            sentence = re.split(r"(?<=\.) ", texts[each.name][1])[0]
            each.metadata = MappingProxyType({"help": sentence.replace("%", "%%")})
    return cls


def resolved_annotations(cls: type[Any]) -> dict[str, Any]:
    """Return the annotation of each field. One that cannot be evaluated here stays a text, which [`fits`] ignores."""
    try:
        return typing.get_type_hints(cls)
    except (NameError, AttributeError, TypeError):
        return {field.name: field.type for field in fields(cls)}


def fits(value: Any, annotation: Any) -> bool:
    """Return whether `value` fits an annotation, without any conversion.

    The known annotations are `bool`, `int`, `float`, `str`, `None`, `Literal`, lists and unions of them. Every value
    fits any other annotation, since the class itself must check that. An integer fits `float`, but a bool is no
    number.
    """
    origin = typing.get_origin(annotation)
    if origin in (typing.Union, UnionType):
        return any(fits(value, choice) for choice in typing.get_args(annotation))
    if origin is Literal:  # by type too, since `True == 1`
        return any(type(value) is type(choice) and value == choice for choice in typing.get_args(annotation))
    if origin is list:
        (each,) = typing.get_args(annotation)
        return isinstance(value, (list, tuple)) and all(fits(item, each) for item in value)
    if annotation is float:  # the comparison is false for nan, and exact for integers that no float can hold
        return isinstance(value, (int, float)) and type(value) is not bool and abs(value) <= sys.float_info.max
    if annotation is int:
        return isinstance(value, int) and type(value) is not bool
    return annotation not in (bool, str, NoneType) or isinstance(value, annotation)


def expected(annotation: Any) -> str:
    """Return in words what fits an annotation that [`fits`] knows."""
    origin = typing.get_origin(annotation)
    if origin in (typing.Union, UnionType):
        return " or ".join(expected(choice) for choice in typing.get_args(annotation))
    if origin is Literal:
        return f"one of {', '.join(map(repr, typing.get_args(annotation)))}"
    if origin is list:
        return f"a list, each item {expected(typing.get_args(annotation)[0])}"
    return WORDS[annotation]


def parse_json(key: str, value: Any) -> Any:
    """Return a setting that a YAML file gives as lists and mappings, and the command line as JSON.

    Raises:
        [`SettingsError`]: if it is a text that is not JSON.
    """
    try:
        return json.loads(value) if isinstance(value, str) else value
    except ValueError as error:
        raise SettingsError(f"{key} is not JSON ({error}): {value!r}") from None


def load_path(path: str) -> Any:
    """Import what a dotted path names, such as `my_package.my_file.MyClass`.

    Raises:
        `LookupError`: saying why there is nothing of that name.
    """
    module, _, name = path.rpartition(".")
    if not module or not all(part.isidentifier() for part in path.split(".")):
        raise LookupError("it is not a dotted path")
    try:
        home = import_module(module)
    except ImportError as error:  # any other error is a bug in that file and keeps its traceback
        raise LookupError(str(error)) from error
    if not hasattr(home, name):
        raise LookupError(f"{module} has nothing of that name")
    return getattr(home, name)


def check_arguments(
    cls: type[Any], name: str, arguments: Mapping[str, Any], key: str, defaults: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the arguments for a dataclass that a recipe names.

    Args:
        cls (`type`):
            The dataclass. Its fields are the arguments that it has.
        name (`str`):
            Its name in the recipe, for messages.
        arguments (`Mapping[str, Any]`):
            The arguments in the recipe. Each value is checked against the annotation of its field.
        key (`str`):
            The setting that holds the arguments, for messages.
        defaults (`Mapping[str, Any]`):
            Values for fields that the recipe does not set. Those without a field are left out.

    Raises:
        [`SettingsError`]: for an argument that does not exist, one that is missing, or a value that does not fit.
    """
    known = {field.name: field for field in fields(cls) if field.init}
    values = {name: value for name, value in defaults.items() if name in known} | dict(arguments)
    for each in arguments:
        if each not in known:
            raise SettingsError(f"{key}: {name} has no argument {each!r}; it has {', '.join(known) or 'none'}")
    for each, field in known.items():
        if each not in values and field.default is MISSING and field.default_factory is MISSING:
            raise SettingsError(f"{key}: {name} needs a value for {each!r}")
    annotations = resolved_annotations(cls)
    for each, value in values.items():
        if not fits(value, annotations[each]):
            raise SettingsError(f"{key}: {name} needs {expected(annotations[each])} for {each!r}, got {value!r}")
    return values


def check_own_fields(config: Any, base: type[Any]) -> None:
    """Check the fields that `base` and the classes below it add to a configuration.

    The parser of TRL takes a value of a YAML file as it is, unless it is a text. A value that is no number is not
    shown in the error: it may hold a key.

    Raises:
        [`SettingsError`]: naming the first field whose value does not fit.
    """
    annotations = resolved_annotations(type(config))
    for cls in type(config).__mro__:
        for key in get_annotations(cls) if issubclass(cls, base) else ():
            value, annotation = getattr(config, key), annotations[key]
            if not fits(value, annotation):
                choice = typing.get_origin(annotation) is Literal and isinstance(value, str)
                shown = choice or isinstance(value, int | float | None)
                got = repr(value) if shown else f"a {type(value).__name__}"
                raise SettingsError(f"{key} must be {expected(annotation)}, got {got}")
