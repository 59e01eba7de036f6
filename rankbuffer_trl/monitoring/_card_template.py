"""Fill in the template of a card for the Hub. Names in it come from settings, files and models, so all are escaped."""

import re
from pathlib import Path
from typing import Any

from huggingface_hub import CardData
from jinja2 import Environment


class Markdown(str):
    """A text that is Markdown already and is not escaped again."""


def fill_card(template: Path, data: CardData, **values: Any) -> str:
    """Return a card. Each value that is not [`Markdown`] is shown as the characters that it has, in one line.

    Args:
        template (`Path`):
            A Jinja template. It has the filters [`code`] and [`cell`].
        data (`CardData`):
            The head of the card.
        values:
            What the template names.
    """
    environment = Environment(finalize=escaped)  # every value, so that a template cannot forget one
    environment.filters |= {"code": code, "cell": cell, "public": public}
    text = template.read_text(encoding="utf-8")
    return environment.from_string(text).render(card_data=Markdown(data.to_yaml()), **values)


def escaped(value: Any) -> Markdown:
    """Escape what Markdown and HTML would read in a value."""
    if isinstance(value, Markdown):
        return value
    # An underscore inside a word is no markup, and names are full of them.
    return Markdown(re.sub(r"[\\`*\[\]<>&~]|(?<![^\W_])_|_(?![^\W_])", r"\\\g<0>", printable_line(value)))


def code(value: Any) -> Markdown:
    """Return a value as a span of code."""
    text = printable_line(value)
    # Longer than any row of backticks in the value, which would end the span.
    fence = "`" * (1 + max(map(len, re.findall("`+", text)), default=0))
    # Markdown takes one space off each end, and a backtick there would join the fence.
    padding = " " * (not text or text[0] in "` " or text[-1] in "` ")
    return Markdown(f"{fence}{padding}{text}{padding}{fence}")


def cell(text: str) -> Markdown:
    """Return Markdown for a cell of a table."""
    return Markdown(escaped(text).replace("|", "\\|"))  # a vertical bar would end the cell, even in code


def printable_line(value: Any) -> str:
    # A line break would begin a heading, or a key of the card's head.
    return " ".join("".join(character if character.isprintable() else " " for character in str(value)).split())


def on_hub(name: str | None) -> bool:
    """Return whether a name looks like an id on the Hub and is no local path."""
    return name is not None and re.fullmatch(r"[\w.-]+/[\w.-]+", name) is not None and not Path(name).exists()


def public(name: str) -> str:
    """Return a name as it may be published."""
    return name if on_hub(name) else Path(name).name  # a path names folders of this machine
