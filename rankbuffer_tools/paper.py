"""The paper's tables: the numbers that it prints, and the recipe of each row."""

import math
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import yaml

PACKAGE = Path(__file__).parent
# An installed package holds the recipes. In a checkout they are the folder beside the package.
RECIPE_FOLDER = next(
    (folder for folder in (PACKAGE / "recipes", PACKAGE.parent / "recipes") if folder.is_dir()), PACKAGE
)
PAPER_BENCHMARKS = ("alpaca_eval", "arena_hard", "wildbench", "writingbench")


@cache
def paper() -> dict[str, Any]:
    """Return the contents of `paper.yaml`."""
    return yaml.safe_load((PACKAGE / "paper.yaml").read_text(encoding="utf-8"))


def paper_rows() -> dict[str, dict[str, float | str]]:
    """Return what the paper prints, by row and column. A cost that it rounds is a text, such as `79.3M`."""
    columns = paper()["columns"]
    return {
        row: {name: value for name, value in zip(columns, values, strict=True) if value is not None}
        for row, (_, *values) in paper()["rows"].items()
    }


@cache
def paper_recipes() -> dict[str, dict[str, Any]]:
    """Return the settings of the recipe of each row that is trained."""
    base, folder = yaml.safe_load((RECIPE_FOLDER / "base.yaml").read_text(encoding="utf-8")), RECIPE_FOLDER / "paper"
    # Rows that nobody trains, such as Base, have no recipe.
    names = {row: name for row, (name, *_) in paper()["rows"].items() if name}
    return {
        row: base | yaml.safe_load((folder / f"{name}.yaml").read_text(encoding="utf-8"))
        for row, name in names.items()
    }


def number(printed: float | str | None) -> float | None:
    """Return the value of a number that the paper prints, such as 79.3 million for `79.3M`."""
    return float(printed.translate({ord("M"): "e6", ord("K"): "e3"})) if isinstance(printed, str) else printed


def average(scores: Mapping[str, float | None]) -> float | None:
    """Return the mean of the four scores, the paper's `Avg.`, or `None` if one of them is missing or NaN."""
    values = [value for name in PAPER_BENCHMARKS if (value := scores.get(name)) is not None and not math.isnan(value)]
    # A mean of fewer would not be the paper's.
    return sum(values) / len(PAPER_BENCHMARKS) if len(values) == len(PAPER_BENCHMARKS) else None
