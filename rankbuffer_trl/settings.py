"""Check the values of settings against the annotations of their fields."""

import sys
import typing
from dataclasses import fields
from inspect import get_annotations
from types import NoneType, UnionType
from typing import Any, Literal

from .errors import SettingsError

WORDS = {bool: "true or false", int: "an integer", float: "a finite number", str: "a text", NoneType: "null"}


def resolved_annotations(cls: type[Any]) -> dict[str, Any]:
    """Return the annotation of each field. One that cannot be evaluated here stays a text, which [`fits`] ignores."""
    try:
        return typing.get_type_hints(cls)
    except (NameError, AttributeError, TypeError):
        return {field.name: field.type for field in fields(cls)}


def fits(value: Any, annotation: Any) -> bool:
    """Return whether `value` fits an annotation, without any conversion.

    Known are `bool`, `int`, `float`, `str`, `None`, `Literal`, lists and unions of them. Every value fits any other
    annotation, since the class itself must check that. An integer fits `float`, but a bool is no number.
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
                got = repr(value) if isinstance(value, int | float | None) else f"a {type(value).__name__}"
                raise SettingsError(f"{key} must be {expected(annotation)}, got {got}")
