"""Read JSON that a fault may have damaged, or that a stranger wrote, as the type that the program expects.

The annotations of a class say what its fields hold. So a reader has no checks of its own, and each error names the
field.
"""

import json
from dataclasses import is_dataclass
from functools import cache
from math import isfinite
from pathlib import Path
from typing import Any, TypeVar, get_args, get_origin, is_typeddict

from .settings import fields_of, kind_of

T = TypeVar("T")
MOST = 2**63 - 1  # the largest integer, as in SQLite
FIELDS = object()


def parse_json(text: str | bytes, finite: bool = True, at: str = "it") -> Any:
    """Return the value of a JSON text.

    Args:
        text (`str` or `bytes`):
            The text.
        finite (`bool`, *optional*, defaults to `True`):
            Refuse NaN and numbers that no float can hold. The log of a trainer may have them.
        at (`str`, *optional*):
            The field that holds the text, for messages.

    Raises:
        `ValueError`: if it is not JSON.
    """
    try:
        return json.loads(text, parse_constant=parse_finite, parse_float=parse_finite) if finite else json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{at} is cut short or not JSON ({error})") from None


def parse_finite(text: str) -> float:
    """Return a number, or raise `ValueError`."""
    if not isfinite(number := float(text)):
        raise ValueError(f"{text[:20]} is not a finite number")
    return number


def read_json(path: Path, kind: type[T], finite: bool = True) -> T:
    """Return the value of a JSON file as [`decode`] does.

    Raises:
        `ValueError`: naming the file without its folder, and the fault.
    """
    if not path.is_file():  # a FIFO would never end
        raise ValueError(f"{path.name} is missing")
    try:
        value = parse_json(path.read_bytes(), finite, path.name)
    except OSError as error:
        raise ValueError(f"{path.name} cannot be read: {error}") from None
    try:
        return decode(value, kind)
    except ValueError as error:
        raise ValueError(f"{path.name} is damaged: {error}") from None


def decode(value: Any, kind: Any, at: str = "") -> Any:
    """Return a value of JSON as the type `kind`, without any conversion of texts and numbers.

    Dataclasses and named tuples are read from an object by the names of their fields, or from a list by their order.
    They may refuse a value with `ValueError`. Unknown keys of an object are left out, but a `TypedDict` keeps them.

    Args:
        value (`Any`):
            What [`parse_json`] returned.
        kind (`type`):
            A dataclass, a named tuple, a `TypedDict`, a list, tuple or dictionary of them, or what
            [`~settings.kind_of`] knows.
        at (`str`, *optional*):
            The field that holds the value, for messages.

    Raises:
        `ValueError`: naming the field, what it must be, and what it is.

    Example:

    ```python
    from rankbuffer_trl.decoding import decode

    decode({"a": [1, 2]}, dict[str, list[int]])
    decode({"a": [1, "2"]}, dict[str, list[int]])  # ValueError: ['a'][1] must be an integer, got '2'
    ```
    """
    if type(value) is kind and (kind is str or (kind is int and -MOST <= value <= MOST)):
        return value  # most values, and a store has many
    origin, arguments = parts_of(kind)
    if origin is list:
        items = checked(value, list, at)
        return [decode(item, arguments[0], f"{at}[{i}]") for i, item in enumerate(items)]
    if origin is tuple:
        pairs = zip(checked(value, list, at, len(arguments)), arguments, strict=True)
        return tuple(decode(item, each, f"{at}[{i}]") for i, (item, each) in enumerate(pairs))
    if origin is dict:
        found = checked(value, dict, at)
        return {key: decode(item, arguments[1], f"{at}[{shown(key)}]") for key, item in found.items()}
    if origin is FIELDS:
        return decode_fields(value, kind, at)
    if not (leaf := kind_of(kind)).fits(value):
        raise ValueError(f"{at or 'it'} must be {leaf.words}, got {shown(value)}")
    if type(value) is int and not -MOST <= value <= MOST:
        raise ValueError(f"{at or 'it'} must be a number of 64 bits, got {shown(value)}")
    return value


def decode_fields(value: Any, kind: Any, at: str) -> Any:
    """Return a value of JSON as a class with fields, as [`decode`] does."""
    fields = fields_of(kind)
    if isinstance(value, list) and not is_typeddict(kind):
        value = dict(zip(fields, checked(value, list, at, len(fields)), strict=True))
    checked(value, dict, at)
    for name, (_, needed) in fields.items():
        if needed and name not in value:
            raise ValueError(f"{at or 'it'} has no {name!r}")
    found = {
        name: decode(value[name], each, f"{at}.{name}".lstrip("."))
        for name, (each, _) in fields.items()
        if name in value
    }
    try:
        return value | found if is_typeddict(kind) else kind(**found)
    except ValueError as error:  # the class refuses what its fields are together
        raise ValueError(f"{at}: {error}".removeprefix(": ")) from None


@cache
def parts_of(kind: Any) -> tuple[Any, tuple]:
    """Return the class of a generic type, or `FIELDS` for a class with fields, and the arguments of the type."""
    has_fields = is_typeddict(kind) or is_dataclass(kind) or hasattr(kind, "_fields")
    return FIELDS if has_fields else get_origin(kind), get_args(kind)


def checked(value: Any, kind: type[T], at: str, length: int | None = None) -> T:
    """Return a list or an object of JSON, or raise `ValueError`."""
    if not isinstance(value, kind) or length not in (None, len(value)):  # type: ignore[arg-type]
        what = "an object" if kind is dict else "a list" if length is None else f"a list of {length} items"
        raise ValueError(f"{at or 'it'} must be {what}, got {shown(value)}")
    return value


def shown(value: Any) -> str:
    """Write a value of JSON for a message, in one short line."""
    if isinstance(value, dict | list):
        return "an object" if isinstance(value, dict) else f"a list of {len(value)} items"
    return shorten(value)


def shorten(value: Any) -> str:
    """Write a value as Python does, cut after 80 characters."""
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:80]}..."
