"""The page: one HTML file that needs no network, made of a template, one style sheet and two scripts.

Text of a policy or a data set enters the page as deflated JSON in base64, so it cannot end the block that holds it.
The script shows it as text. The content policy allows this one script and no request.
"""

import base64
import hashlib
import json
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.resources import files
from typing import Any

from jinja2 import Environment, StrictUndefined

from .browser import VISITS
from .chart import POINTS, Chart, clean
from .charts import SOURCE_COLOURS, SOURCE_LABELS, run_colour
from .tables import TableRow

FILES = files(__package__)
# The judgments by kind: the key of each column in a row, and the heading above its values.
KINDS = {"calls": "calls", "failures": "failed", "attempts": "requests", "tokens": "tokens"}
KINDS |= {"tokens_per_call": "tokens / call", "seconds_per_attempt": "seconds / request"}
OPENING = ("quality", "queries", "reach", "gains", "log", "probes")  # the charts that stand at the top of a run


@dataclass(frozen=True)
class RunSection:
    """The part of the page that shows one run."""

    name: str
    headlines: Mapping[str, str]  # label and value, at the top of the section
    summary: Mapping[str, str]  # its row in the table of runs, by heading
    facts: Mapping[str, str]  # the rows of the table that describes it
    charts: Sequence[Chart]
    kinds: Sequence[TableRow]  # its judgments by kind
    index: dict  # what the buffer browser loads first, see `browser_index`
    pages: Sequence[str]  # queries, packed one by one: the browser opens one at a time


def pack(value: object) -> str:
    """Return `value` as JSON, deflated, in base64."""
    text = json.dumps(value, separators=(",", ":"), allow_nan=False)  # ASCII, so that a lone surrogate does no harm
    return base64.b64encode(zlib.compress(text.encode("ascii"))).decode("ascii")


def browser_index(name: str, queries: Sequence[dict], of: int, measure: str | None, examples: list[dict]) -> dict:
    """Return what the buffer browser loads first: its list of queries, names and colours of sources, the examples.

    `of` is the number of queries of the run, from which those of the list are drawn.
    """
    cut = max(entry["visits"] for entry in queries) > VISITS
    visits = f"the first visit and the last {VISITS - 1} visits" if cut else "every visit"
    drawn = f"{len(queries):,} of {of:,} queries, which are drawn at random (--browser_mb shows more)"
    return {
        "name": name,
        "of": of,
        "shown": f"{visits} of {drawn if len(queries) < of else 'each query'}",
        "examples": examples,
        "queries": queries,
        "colours": SOURCE_COLOURS,
        "labels": SOURCE_LABELS,
        "measure": measure,
    }


def render(sections: Sequence[RunSection], comparison: Sequence[Chart], advantages: dict, step: int, made: str) -> str:
    """Return the page, which opens with the first run. `made` says when it was made, and from what.

    Args:
        advantages (`dict`):
            What the script draws as advantages at a step. `axis_end` is the end of the axis. `runs` is a list with the
            `name`, the `colour` and the `steps` of each run.
    """
    environment = Environment(autoescape=True, finalize=cleaned, trim_blocks=True, undefined=StrictUndefined)
    filters = {"base64": in_base64, "colour": run_colour, "content_hash": content_hash}
    environment.filters |= filters | {"number": format_number, "pack": pack}
    return environment.from_string(read("page.html")).render(
        title=sections[0].name if len(sections) == 1 else f"{len(sections)} runs",
        made=made,
        style=read("page.css"),
        script=read("page.js") + read("browser.js"),
        runs=sections,
        charts=comparison,
        advantages=advantages,
        step=step,
        opening=OPENING,
        kinds=KINDS,
        points=POINTS,
    )


def read(name: str) -> str:
    """Return a file of the page."""
    return (FILES / name).read_text(encoding="utf-8")


def cleaned(value: Any) -> Any:
    """Return a value without what HTML cannot hold, see [`clean`]. What the template marks as safe stays as it is."""
    return value if hasattr(value, "__html__") else clean(str(value))


def content_hash(text: str) -> str:
    """Return the hash by which a content policy, which allows no more, names an inline script or style."""
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode("utf-8")).digest()).decode("ascii")


def in_base64(text: str) -> str:
    """Return a text in base64, for an address that holds its data."""
    return base64.b64encode(text.encode("utf-8", "replace")).decode("ascii")


def format_number(value: float | None) -> str:
    """Format a number for people."""
    if value is None:
        return "-"
    return f"{value:,}" if isinstance(value, int) else f"{value:,.0f}" if value >= 100 else f"{value:,.3g}"
