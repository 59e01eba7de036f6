"""Tables as rows of cells: those of a page, and those that a program prints. Tests compare them."""

import re
from collections.abc import Iterable
from pathlib import Path

from rich.table import Table

Rows = list[tuple[str, ...]]


def tables_of(page: Path) -> list[Rows]:
    """Return the tables of a page, each with its head as the first row."""
    blocks = re.findall(r"(?:^\|.*\n)+", page.read_text(), re.MULTILINE)
    parsed = (
        [tuple(map(str.strip, line.strip()[1:-1].split("|"))) for line in block.splitlines()] for block in blocks
    )
    return [[head, *rows] for head, _, *rows in parsed]


def rows_by_head(tables: Iterable[Table]) -> dict[tuple[str, ...], set[tuple[str, ...]]]:
    """Return all rows that tables print, by their head, as a page spells them."""
    found: dict[tuple[str, ...], set[tuple[str, ...]]] = {}
    for table in tables:
        head = tuple(str(column.header) for column in table.columns)
        spelled = (
            [re.sub(r"(\d)%", r"\1 %", re.sub(r"\[/?(bold)?\]", "**", str(cell))) for cell in column.cells]
            for column in table.columns
        )
        found.setdefault(head, set()).update(zip(*spelled, strict=True))
    return found
