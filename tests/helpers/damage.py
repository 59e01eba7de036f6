"""Damage to a value of JSON, for the readers of files from elsewhere."""

import copy
import json
from collections.abc import Callable, Iterator, Sequence
from typing import Any

MISSING = object()
BAD = (MISSING, 5.5, 1e300, "x", True, None, [], {"x": {}}, -(10**30), float("nan"))


def changed(value: Any, place: Sequence, bad: Any) -> Any:
    """Return a copy in which the item at a place, a path of keys and indices, is another one or missing."""
    value = copy.deepcopy(value)
    at = value
    for key in place[:-1]:
        at = at[key]
    if bad is MISSING:
        del at[place[-1]]
    else:
        at[place[-1]] = bad
    return value


def places(value: Any, place: tuple = ()) -> Iterator[tuple]:
    """Yield the places of all items of a value. Of a list, the first and the last item are enough."""
    keys = (
        list(value)
        if isinstance(value, dict)
        else sorted({0, len(value) - 1})
        if isinstance(value, list) and value
        else []
    )
    for key in keys:
        yield (*place, key)
        yield from places(value[key], (*place, key))


def damaged(text: str, wanted: Callable[[tuple], bool] = lambda place: True) -> Iterator[tuple[str, str]]:
    """Yield what was done to a JSON text, and the text: each item replaced by each of `BAD`, cuts, and depth.

    Args:
        text (`str`):
            The text.
        wanted (`Callable[[tuple], bool]`, *optional*):
            Which places are damaged. Default: all.
    """
    value = json.loads(text)
    for place in filter(wanted, places(value)):
        for bad in BAD:
            yield f"{place}: {bad!r}", json.dumps(changed(value, place, bad))
    for length in (0, 1, len(text) // 2, len(text) - 2):
        yield f"cut at {length}", text[:length]
    yield from (("deep", "[" * 100_000), ("digits", "9" * 5000), ("number", "7"), ("list", "[]"), ("object", "{}"))
