"""Cards with hostile names: read by a Markdown parser, they have the same elements as cards with plain names."""

import json
from html.parser import HTMLParser
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from markdown_it import MarkdownIt

from rankbuffer_tools.batch.output import beside, read_provenance
from rankbuffer_tools.data.publish import make_card
from rankbuffer_trl.data._queries import DataError
from rankbuffer_trl.monitoring._card_template import Markdown, cell, code, escaped

HOSTILE = (
    *("<img src=x onerror=alert(1)>", "x\n\n# H", "[a](http://b)", "![a](http://b)", "`` ` ``", "*a* __b__ _c_"),
    *("a|b", "`a|b`", "&lt;", "\\", "`", "x\u2028y\x00", "-->", "<!--", "a\n- b", "{{ 7*7 }}", "a_b_c", " x ", "\\|"),
    "~~a~~",
)


class Seen(HTMLParser):
    """The elements of a page and its words."""

    def __init__(self, markdown: str):
        super().__init__()
        self.tags: list[tuple] = []
        self.words = ""
        self.feed(MarkdownIt("commonmark").enable(["table", "strikethrough"]).render(markdown))

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, *attrs))

    def handle_comment(self, data):
        self.tags.append(("comment", data))

    def handle_data(self, data):
        self.words += data


def plain(text: str) -> str:
    return " ".join("".join(each if each.isprintable() else " " for each in text).split())


@given(st.text("a_|`*\\<>[]()!&;#~- \n", max_size=12) | st.sampled_from(HOSTILE))
def test_escaped_code_and_cell_show_the_characters_and_nothing_else(text):
    table = "| | |\n|---|---|\n| n | {} |\n"
    for shape, show, tags in (
        ("x {} y", escaped, {"p"}),
        ("x {} y", code, {"p", "code"}),
        (table, lambda value: cell(code(value)), {"table", "thead", "tbody", "tr", "th", "td", "code"}),
        (table, cell, {"table", "thead", "tbody", "tr", "th", "td"}),
    ):
        seen = Seen(shape.format(show(text)))
        assert {tag for tag, *_ in seen.tags} == tags, text
        assert plain(text) in plain(seen.words), text


def test_escaped_leaves_markdown_as_it_is():
    assert escaped(escaped("<a>")) == "\\<a\\>" and escaped(Markdown("*a*\n")) == "*a*\n"
    assert escaped("rubric-judge at a_b/c.d, 5 (x)") == "rubric-judge at a_b/c.d, 5 (x)"


def test_make_card_shows_hostile_names_as_text():
    def card(name: str) -> Seen:
        steps = [{"step": name, "dataset_name": name, "model": name, name: name}]
        steps += [{"step": "rubrics", "model": name, "generic": True}]
        return Seen(make_card("me/x", "train.jsonl", [{"models": [name]}], steps).partition("\n---\n")[2])

    for name in HOSTILE:
        seen = card(name)
        assert seen.tags == card("x").tags, name
        assert plain(seen.words).count(plain(name)) >= 6, name
    assert card("\\").tags


def test_read_provenance_refuses_what_is_no_list_of_steps_in_one_line(tmp_path: Path):
    record = beside(tmp_path / "a.jsonl", "provenance.json")
    words = r": a\.jsonl\.provenance\.json is .*; delete that record to continue without it$"
    for steps in (5, "x", {"step": "x"}, [5], [["step"]], [{}], [{"step": 5}], None):
        record.write_text(json.dumps({"steps": steps}))
        with pytest.raises(DataError, match=words):
            read_provenance(tmp_path / "a.jsonl")
    for text in ("[" * 100_000, "5", "{}", '{"steps": ' + "[" * 100_000):
        record.write_text(text)
        with pytest.raises(DataError, match=words):
            read_provenance(tmp_path / "a.jsonl")
    assert read_provenance(".") == []
    assert "Queries come from `an unknown source`" in make_card("me/x", "a.jsonl", [], [{"step": "own"}])
