"""Read JSON that a fault may have damaged, or that a stranger wrote, as the type that the program expects.

The annotations of a class say what its fields hold. So whoever reads a file needs no checks of its own, and each error
names the field.
"""

import json
from collections.abc import Callable, Iterable
from dataclasses import is_dataclass
from functools import cache
from itertools import repeat
from math import isfinite
from pathlib import Path
from typing import Any, TypeVar, get_args, get_origin, is_typeddict

from .settings import fields_of, kind_of

T = TypeVar("T")
Decoder = Callable[[Any], Any]
LARGEST = 2**63 - 1  # the largest integer, as in SQLite


def parse_json(text: str | bytes, finite: bool = True, at: str = "it") -> Any:
    """Return the value of a JSON text.

    Args:
        finite (`bool`, *optional*, defaults to `True`):
            Refuse NaN and numbers that no float can hold.
        at (`str`, *optional*):
            The field that holds the text, for messages.

    Raises:
        `ValueError`: if it is not JSON.
    """
    try:
        if isinstance(text, bytes):
            text = text.decode(json.detect_encoding(text), "surrogatepass")  # as json.loads does
        return FINITE.decode(text) if finite else json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{at} is cut short or not JSON ({error})") from None


def parse_finite(text: str) -> float:
    """Return a number, or raise `ValueError`."""
    if not isfinite(number := float(text)):
        raise ValueError(f"{text[:20]} is not a finite number")
    return number


FINITE = json.JSONDecoder(parse_constant=parse_finite, parse_float=parse_finite)  # once, since a store has many texts


def read_json_as(path: Path, kind: type[T], finite: bool = True) -> T:
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
    They may refuse a value with `ValueError`.

    Args:
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
    try:
        return decoder_of(kind)(value)
    except Misfit as misfit:
        place = (at + misfit.place).lstrip(".")
        raise ValueError(f"{place or 'it'}{misfit.words}".removeprefix("it: ")) from None


class Misfit(ValueError):
    """A value that does not fit its type."""

    def __init__(self, words: str):
        super().__init__(words)
        self.place, self.words = "", words  # each decoder around it puts the place that it knows in front


@cache  # a store has many values of few types
def decoder_of(kind: Any) -> Decoder:
    """Return a function that reads a value of JSON as the type `kind`, or raises [`Misfit`]."""
    origin, arguments = get_origin(kind), get_args(kind)
    if is_typeddict(kind) or is_dataclass(kind) or hasattr(kind, "_fields"):
        return fields_decoder(kind)
    if origin is list:
        item_decoder = decoder_of(arguments[0])
        return lambda value: decode_all(enumerate(expect(value, list)), repeat(item_decoder))
    if origin is tuple:
        decoders = [decoder_of(argument) for argument in arguments]
        return lambda value: tuple(decode_all(enumerate(expect(value, list, len(decoders))), decoders))
    if origin is dict:
        item_decoder = decoder_of(arguments[1])
        return lambda value: dict(
            zip(value, decode_all(expect(value, dict).items(), repeat(item_decoder)), strict=True)
        )
    return leaf_decoder(kind)


def decode_all(items: Iterable[tuple[int | str, Any]], decoders: Iterable[Decoder]) -> list:
    """Return the items of a list or an object, each by its decoder."""
    values = []
    for (key, item), decoder in zip(items, decoders, strict=False):  # one decoder repeats
        try:
            values.append(decoder(item))
        except Misfit as misfit:
            misfit.place = f"[{shown(key)}]{misfit.place}"
            raise
    return values


def fields_decoder(kind: Any) -> Decoder:
    """Return the decoder of a class with fields."""
    fields = {name: (decoder_of(hint), needed) for name, (hint, needed) in fields_of(kind).items()}
    keeps_all = is_typeddict(kind)

    def read(value: Any) -> Any:
        if isinstance(value, list) and not keeps_all:
            value = dict(zip(fields, expect(value, list, len(fields)), strict=True))
        expect(value, dict)
        values = {}
        for name, (decode_field, needed) in fields.items():
            if name in value:
                try:
                    values[name] = decode_field(value[name])
                except Misfit as misfit:
                    misfit.place = f".{name}{misfit.place}"
                    raise
            elif needed:
                raise Misfit(f" has no {name!r}")
        try:
            # A `TypedDict` keeps unknown keys, since a file says more than we read.
            return value | values if keeps_all else kind(**values)
        except ValueError as error:  # the class refuses what its fields are together
            raise Misfit(f": {error}") from None

    return read


def leaf_decoder(kind: Any) -> Decoder:
    """Return the decoder of a type without parts."""
    fits, words = kind_of(kind)

    def read(value: Any) -> Any:
        if type(value) is kind and (kind is str or (kind is int and -LARGEST <= value <= LARGEST)):
            return value  # most values
        if not fits(value):
            raise Misfit(f" must be {words}, got {shown(value)}")
        if type(value) is int and not -LARGEST <= value <= LARGEST:
            raise Misfit(f" must be a number of 64 bits, got {shown(value)}")
        return value

    return read


def expect(value: Any, kind: type[T], length: int | None = None) -> T:
    """Return a list or an object of JSON, or raise [`Misfit`]."""
    if not isinstance(value, kind) or length not in (None, len(value)):  # type: ignore[arg-type]
        what = "an object" if kind is dict else "a list" if length is None else f"a list of {length} items"
        raise Misfit(f" must be {what}, got {shown(value)}")
    return value


def shown(value: Any) -> str:
    """Write a value of JSON for a message, in one short line."""
    if isinstance(value, dict | list):
        return "an object" if isinstance(value, dict) else f"a list of {len(value)} items"
    return excerpt(value)


def excerpt(value: Any) -> str:
    """Write a value as Python does, cut after 80 characters."""
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:80]}..."
