"""Check the values of settings against the annotations of their fields, and load what a recipe names by its path."""

import inspect
import json
import logging
import math
import re
import sys
import typing
from collections.abc import Callable, Container, Iterable, Mapping
from dataclasses import MISSING, fields
from difflib import get_close_matches
from functools import cache
from importlib import import_module
from inspect import get_annotations
from types import MappingProxyType, NoneType, UnionType
from typing import Any, Literal, NamedTuple, TypeVar

from .errors import SettingsError

logger = logging.getLogger(__name__)

Class = TypeVar("Class", bound=type)
# The names of today by older ones, which recipes and checkpoints hold. They are read for ever.
RENAMED = {
    **{"again": "rerank_disputed", "looks": "passes"},  # of listwise
    **{"reader": "reference_judge", "reader_first": "reference_groups"},  # of a training
}
# Arguments that methods had in older versions, with their last defaults.
REMOVED_ARGUMENTS: dict[str, Any] = {"blocks_of_four": False, "ladder": False, "most_tokens": None}
ENTRY = re.compile(r"^    (\w+) \((`.*)\):\n((?: {8}.*\n)+)", re.MULTILINE)


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


@cache
def fields_of(cls: Any) -> dict[str, tuple[Any, bool]]:
    """Return the annotation of each argument of a class, and whether a value is needed."""
    try:
        hints = typing.get_type_hints(cls)
    except (NameError, AttributeError, TypeError):
        # A text that cannot be evaluated here stays one, and any value fits.
        hints = {field.name: field.type for field in fields(cls)}
    if typing.is_typeddict(cls):
        return {name: (hint, name in cls.__required_keys__) for name, hint in hints.items()}
    arguments = inspect.signature(cls).parameters.values()
    return {argument.name: (hints[argument.name], argument.default is argument.empty) for argument in arguments}


def is_finite(value: Any) -> bool:
    """Return whether a value is a number, but not a bool, and neither NaN nor larger than any float."""
    return isinstance(value, int | float) and type(value) is not bool and abs(value) <= sys.float_info.max


class Kind(NamedTuple):
    """What fits an annotation: a function that says whether a value does, and the same in words."""

    fits: Callable[[Any], bool]
    words: str


KIND_OF_TYPE = {
    bool: Kind(lambda value: isinstance(value, bool), "true or false"),
    int: Kind(lambda value: isinstance(value, int) and type(value) is not bool, "an integer"),
    float: Kind(is_finite, "a finite number"),
    str: Kind(lambda value: isinstance(value, str), "a text"),
    NoneType: Kind(lambda value: value is None, "null"),
}


@cache
def kind_of(annotation: Any) -> Kind:
    """Return what fits an annotation, without any conversion.

    The known annotations are `bool`, `int`, `float`, `str`, `None`, `Literal`, lists and unions of them.
    """
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if origin in (typing.Union, UnionType):
        first, rest = kind_of(arguments[0]), kind_of(typing.Union[arguments[1:]])  # noqa: UP007  # of any number
        return Kind(lambda value: first.fits(value) or rest.fits(value), f"{first.words} or {rest.words}")
    if origin is Literal:
        choices = [(type(choice), choice) for choice in arguments]  # since `True == 1`
        return Kind(lambda value: (type(value), value) in choices, f"one of {', '.join(map(repr, arguments))}")
    if origin is list:
        each, words = kind_of(*arguments)
        return Kind(
            lambda value: isinstance(value, list | tuple) and all(map(each, value)), f"a list, each item {words}"
        )
    # Any value fits another one: the class itself must check it.
    return KIND_OF_TYPE.get(annotation, Kind(lambda value: True, ""))


def parse_setting(key: str, value: Any, kind: type, words: str) -> Any:
    """Return a setting, or `None`, that a YAML file gives as lists and mappings, and the command line as JSON.

    Raises:
        [`SettingsError`]: if it is a text that is not JSON, or not of the type `kind`, which is called `words`.
    """
    try:
        value = json.loads(value) if isinstance(value, str) else value
    except ValueError as error:
        raise SettingsError(f"{key} is not JSON ({error}): {value!r}") from None
    if not isinstance(value, kind | None):
        raise SettingsError(f"{key} must be {words}, got {value!r}")
    return value


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


def current_names(values: Mapping[str, Any], known: Container[str]) -> dict[str, Any]:
    """Return values by the names of today, and say once which of the `known` names an older one stands for."""
    current = dict(values)
    for old in RENAMED.keys() & values.keys():
        if old not in known and (name := RENAMED[old]) in known:
            if name in current:
                raise SettingsError(f"{old} is an older name of {name}, and both are set: leave {old} out")
            current[name] = current.pop(old)
            say_renamed(old)
    return current


@cache
def say_renamed(old: str) -> None:
    """Say in one line that a name is an older one."""
    logger.warning("%s is called %s today; the older name is still read", old, RENAMED[old])


def near(name: str, known: Iterable[str], called: Mapping[str, str] = MappingProxyType({})) -> str:
    """Return which of the `known` names a wrong one may stand for, as a question; nothing if none is spelled alike.

    `called` has the names that are shown as others.
    """
    alike = [called.get(match, match) for match in get_close_matches(name, [*known])]
    return f" (did you mean {' or '.join(alike)}?)" if alike else ""


def check_arguments(
    cls: Any, name: str, arguments: Mapping[str, Any], key: str, defaults: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the arguments for a dataclass that a recipe names.

    Args:
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
    known = fields_of(cls)
    arguments = current_names(arguments, known)
    values = {name: value for name, value in defaults.items() if name in known} | arguments
    for argument in arguments:
        if argument not in known:
            has = ", ".join(known) or "none"
            raise SettingsError(f"{key}: {name} has no argument {argument!r}{near(argument, known)}; it has {has}")
    for argument, (annotation, needed) in known.items():
        if argument not in values and needed:
            raise SettingsError(f"{key}: {name} needs a value for {argument!r}")
        if argument in values and not (kind := kind_of(annotation)).fits(values[argument]):
            raise SettingsError(f"{key}: {name} needs {kind.words} for {argument!r}, got {values[argument]!r}")
    return values


def changed_arguments(cls: Any, arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of a dataclass, as JSON has them, that do not have their default."""
    arguments, defaults = current_names(arguments, fields_of(cls)), dict(REMOVED_ARGUMENTS)
    for each in fields(cls):
        default = each.default if each.default_factory is MISSING else each.default_factory()
        recorded = json.loads(json.dumps(default, default=str))  # as a manifest has them: a tuple is a list there
        # Fields with `compare=False` change no outcome.
        defaults[each.name] = recorded if each.compare else arguments.get(each.name)
    return {name: value for name, value in arguments.items() if name not in defaults or value != defaults[name]}


def check_at_least(owner: Any, prefix: str = "", /, **least: float) -> None:
    """Check that no attribute is below its smallest value or infinite. `None` has no value to check.

    Args:
        prefix (`str`, *optional*):
            How the names of the settings begin, for messages.
        least:
            The smallest value of each attribute.

    Raises:
        [`SettingsError`]: naming the setting.
    """
    for name, smallest in least.items():
        value = getattr(owner, name)
        if value is not None and not smallest <= value < math.inf:
            raise SettingsError(f"{prefix}{name} must be at least {smallest}, got {value}")


def check_own_fields(config: Any, base: type[Any]) -> None:
    """Check the fields that `base` and the classes below it add to a configuration.

    Raises:
        [`SettingsError`]: naming the first field whose value does not fit.
    """
    # The parser of TRL takes a value of a YAML file as it is, unless it is a text.
    annotations: dict[str, Any] = fields_of(type(config))  # type: ignore[arg-type]
    for cls in type(config).__mro__:
        for key in get_annotations(cls) if issubclass(cls, base) else ():
            value, (annotation, _) = getattr(config, key), annotations[key]
            if not (kind := kind_of(annotation)).fits(value):
                choice = typing.get_origin(annotation) is Literal and isinstance(value, str)
                shown = choice or isinstance(value, int | float | None)
                got = repr(value) if shown else f"a {type(value).__name__}"  # a text may hold a key
                raise SettingsError(f"{key} must be {kind.words}, got {got}")
