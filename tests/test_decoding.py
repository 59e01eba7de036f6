"""JSON is read as the type that an annotation names, or the error names the field."""

import os
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, Required, TypedDict

import pytest
from helpers.damage import MISSING, changed

from rankbuffer_trl.decoding import LARGEST, decode, parse_json, read_json_as


class Pair(NamedTuple):
    left: int
    right: float = 0.5


@dataclass(frozen=True)
class Item:
    name: str
    pair: Pair
    tiers: list[list[int]]
    ends: tuple[int, str] = (0, "")
    shares: dict[str, float | None] | None = None
    kind: Literal["a", "b"] = "a"

    def __post_init__(self):
        if self.name == "odd":
            raise ValueError("its name is odd")


class Open(TypedDict, total=False):
    step: Required[int]
    items: list[Item]
    extra: Any


ITEM = {"name": "x", "pair": [1, 2], "tiers": [[0], [1, 2]], "ends": [3, "y"], "kind": "b"}
VALUE = {
    "step": 7,
    "items": [ITEM, {"name": "z", "pair": {"left": LARGEST}, "tiers": []}],
    "extra": [1, {}],
    "more": [None],
}


def test_decode_reads_what_the_annotations_say():
    found = decode(VALUE, Open)
    items = [Item("x", Pair(1, 2), [[0], [1, 2]], (3, "y"), kind="b"), Item("z", Pair(LARGEST), [])]
    assert found == VALUE | {"items": items}, "a TypedDict keeps what it does not name"
    assert [type(item.pair) for item in found["items"]] == [Pair, Pair]
    assert decode(["x", [1, 2], []] + [[3, "y"], None, "a"], Item) == Item("x", Pair(1, 2), [], (3, "y"))
    assert decode(ITEM | {"new": 1}, Item) == items[0], "a later version may add a field"
    assert decode({"a": [1.5, 2]}, dict[str, list[float]]) == {"a": [1.5, 2]}


FAULTS = [
    (("step",), MISSING, "it has no 'step'"),
    (("step",), "7", "step must be an integer, got '7'"),
    (("step",), True, "step must be an integer, got True"),
    (("step",), LARGEST + 1, "step must be a number of 64 bits, got 9223372036854775808"),
    (("step",), -(10**30), "step must be a number of 64 bits, got -1000000000000000000000000000000"),
    (("items",), {}, "items must be a list, got an object"),
    (("items", 1), None, "items[1] must be an object, got None"),
    (("items", 1), ["z"], "items[1] must be a list of 6 items, got a list of 1 items"),
    (("items", 1, "pair"), MISSING, "items[1] has no 'pair'"),
    (("items", 1, "pair", "right"), 10**400, "items[1].pair.right must be a finite number, got 1000"),
    (("items", 0, "pair", 1), float("nan"), "items[0].pair.right must be a finite number, got nan"),
    (("items", 0, "name"), "odd", "items[0]: its name is odd"),
    (("items", 0, "name"), "x" * 99, None),
    (("items", 0, "name"), 3, "items[0].name must be a text, got 3"),
    (("items", 0, "kind"), "x" * 99, f"items[0].kind must be one of 'a', 'b', got '{'x' * 79}..."),
    (("items", 0, "tiers", 1, 0), 0.0, "items[0].tiers[1][0] must be an integer, got 0.0"),
    (("items", 0, "ends"), [1, "y", 2], "items[0].ends must be a list of 2 items, got a list of 3 items"),
    (("items", 0, "ends", 1), [1], "items[0].ends[1] must be a text, got a list of 1 items"),
    (("items", 0, "shares"), {"a\nb": 1}, None),
    (("extra",), object(), None),
]


def test_decode_names_the_field_of_a_fault():
    for place, bad, message in FAULTS:
        value = changed(VALUE, place, bad)
        if message is None:
            decode(value, Open)
            continue
        with pytest.raises(ValueError) as error:
            pytest.fail(f"{place}: {decode(value, Open)}")
        assert str(error.value).startswith(message) and len(str(error.value)) < 150, f"{error.value} but not {message}"
    with pytest.raises(ValueError, match=r"^\['a\\nb'\]\[0\] must be an integer, got 'x'$"):
        decode({"a\nb": ["x"]}, dict[str, list[int]])
    with pytest.raises(ValueError, match=r"^it must be a list, got 'x'$"):
        decode("x", list[int])
    with pytest.raises(ValueError, match=r"^its name is odd$"):
        decode(ITEM | {"name": "odd"}, Item)
    with pytest.raises(ValueError, match=r"^it must be an object, got a list of 3 items$"):
        decode([7, [], 0], Open)


def test_parse_json_refuses_what_is_no_json_in_one_line():
    assert parse_json('{"a": [1, 2.5, -1e3]}') == {"a": [1, 2.5, -1000.0]}
    assert parse_json(b'"\xed\xa0\x80"') == "\ud800"
    assert str(parse_json("[NaN, 1e999, -Infinity]", finite=False)) == "[nan, inf, -inf]", "a log may have them"
    for text in ("", "{", "[" * 100_000, "9" * 5000, "NaN", "[-Infinity]", '{"a": 1e999}', b"\xff\xfe", "{'a': 1}"):
        with pytest.raises(ValueError, match=r"^rows is cut short or not JSON ") as error:
            pytest.fail(f"{text[:20]}: {parse_json(text, at='rows')}")
        assert "\n" not in str(error.value) and len(str(error.value)) < 200


def test_read_json_names_the_file(tmp_path):
    path = tmp_path / "one.json"
    for content, message in (
        (None, r"^one\.json is missing$"),
        (b"{", r"^one\.json is cut short or not JSON "),
        (b'{"a": "1"}', r"^one\.json is damaged: \['a'\] must be an integer, got '1'$"),
    ):
        if content is not None:
            path.write_bytes(content)
        with pytest.raises(ValueError, match=message):
            read_json_as(path, dict[str, int])
    path.write_text('{"a": 1}')
    assert read_json_as(path, dict[str, int]) == {"a": 1}
    path.unlink()
    os.mkfifo(path)
    with pytest.raises(ValueError, match="missing"):
        read_json_as(path, dict[str, int])
