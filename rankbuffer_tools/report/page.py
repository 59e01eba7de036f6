"""The page: one HTML file that needs no network, made of a template, one style sheet and two scripts.

Text of a policy or a data set enters the page as deflated JSON in base64, so it cannot end the block that holds it.
The script shows it as text. The content policy allows this one script and no request.
"""

import base64
import hashlib
import html
import json
import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib.resources import files
from string import Template

from .browser import VISITS
from .chart import POINTS, Chart, clean
from .charts import SOURCE_COLOURS, SOURCE_LABELS, run_colour
from .tables import TableRow

FILES = files(__package__)
# The judgments by kind: the key of each column in a row, and the heading above its values.
KINDS = {"calls": "calls", "failures": "failed", "attempts": "requests", "tokens": "tokens"}
KINDS |= {"tokens_per_call": "tokens / call", "seconds_per_attempt": "seconds / request"}
OPENING = ("quality", "queries", "reach", "gains", "log", "probes")  # the charts that stand at the top of a run
# The script fills this figure, since it shows text of a policy.
EXAMPLE = (
    '<figure class="example" hidden><h3>Before and after: <bdi></bdi></h3><p class="text soft"></p>'
    '<h4></h4><p class="text"></p><h4></h4><p class="text"></p>'
    "<figcaption>$caption Of its first and its last visit you see the response in the middle of the"
    " group.</figcaption></figure>"
)


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
    style, script = read("page.css"), read("page.js") + read("browser.js")
    data = [data_block("advantages-data", [pack(advantages)])]
    data += [data_block(f"run-data-{i}", [pack(section.index), *section.pages]) for i, section in enumerate(sections)]
    names = [section.name for section in sections]
    overview = runs_html(sections) if len(names) > 1 else ""
    compared = overview + comparison_html(comparison, step, advantages, len(names))
    runs = "\n".join(run_html(number, section) for number, section in enumerate(sections))
    return Template(read("page.html")).substitute(
        title=escape(names[0] if len(names) == 1 else f"{len(names)} runs"),
        made=escape(made),
        style=style,
        style_hash=content_hash(style),  # the content policy allows what has these hashes, and no more
        script=script,
        script_hash=content_hash(script),
        one_run=" hidden" if len(names) == 1 else "",
        options="".join(f'<option value="{i}">{escape(name)}</option>' for i, name in enumerate(names)),
        # What the reader came for stands first: the run, or the comparison of several.
        sections=f"{runs}\n{compared}" if len(names) == 1 else f"{compared}\n{runs}",
        data="\n".join(data),
    )


def read(name: str) -> str:
    """Return a file of the page."""
    return (FILES / name).read_text(encoding="utf-8")


def content_hash(text: str) -> str:
    """Return the hash by which a content policy names an inline script or style."""
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode("utf-8")).digest()).decode("ascii")


def escape(text: str) -> str:
    """Return a text of one line as HTML, without the characters that HTML cannot hold, see [`clean`]."""
    return html.escape(clean(text))


def data_block(id: str, lines: Iterable[str]) -> str:
    """Return an element that holds packed data, one value a line."""
    # A type that no browser runs.
    return f'<script type="application/octet-stream" id="{id}">\n' + "\n".join(lines) + "\n</script>"


def runs_html(sections: Sequence[RunSection]) -> str:
    """Return the table of runs. Each has the colour that it has in all charts."""
    head = "".join(f'<th scope="col">{name}</th>' for name in ("run", *sections[0].summary))
    rows = "".join(
        f'<tr><th scope="row"><i class="dot" style="background:{run_colour(number)}"></i><bdi>{escape(one.name)}</bdi>'
        "</th>" + "".join(f"<td>{escape(value)}</td>" for value in one.summary.values()) + "</tr>"
        for number, one in enumerate(sections)
    )
    return (
        f'<section><h2>The runs</h2><div class="scroll"><table class="runs"><thead><tr>{head}</tr></thead>'
        f"<tbody>{rows}</tbody></table></div></section>"
    )


def comparison_html(charts: Sequence[Chart], step: int, advantages: dict, runs: int) -> str:
    """Return the charts over all runs, and advantages at a step that the reader chooses, if they ever move."""
    note = f" Steps before the last {POINTS} are left out." if advantages["left_out"] else ""
    axis_end, hidden = advantages["axis_end"], " hidden" if advantages["constant"] else ""
    title = "The runs side by side" if runs > 1 else "What the policy gets"
    slider = (
        f'<figure{hidden}><h3>Advantages at a step</h3><div class="step"><label for="advantage-step">Step</label>'
        f'<input id="advantage-step" type="range" min="0" max="0" value="0" data-step="{step}">'
        '<output id="advantage-number" for="advantage-step"></output></div><div id="advantage-runs"></div>'
        f'<div class="axis"><span>&minus;{axis_end:g}</span><span>0</span><span>+{axis_end:g}</span></div>'
        "<figcaption>Rewards normalised within their group, without the format reward. A bar is the share of the"
        f" rollouts that have this advantage. Few levels give the policy little information.{note}"
        "</figcaption></figure>"
    )
    figures = "\n".join(figure_html(chart, "all") for chart in charts)
    return f'<section><h2>{title}</h2><div class="charts">{figures}\n{slider}</div></section>'


def run_html(number: int, section: RunSection) -> str:
    """Return the section of one run: numbers, progress, a pair of responses, facts, charts, judgments by kind."""
    tiles = "".join(f"<div><dt>{escape(k)}</dt><dd>{escape(v)}</dd></div>" for k, v in section.headlines.items())
    first = [chart for chart in section.charts if chart.name in OPENING]
    opening = "\n".join(figure_html(chart, str(number)) for chart in first)
    figure = Template(EXAMPLE)  # empty: the script fills it
    examples = "".join(figure.substitute(caption=escape(each["caption"])) for each in section.index["examples"])
    charts = "\n".join(figure_html(chart, str(number)) for chart in section.charts if chart not in first)
    return (
        f'<section class="run" data-run="{number}"{" hidden" if number else ""}>'
        f'<h2><bdi>{escape(section.name)}</bdi></h2><dl class="tiles">{tiles}</dl>'
        f'<p class="to-browser"><a href="#browser">Open the buffer browser</a> to see {section.index["shown"]}.</p>'
        f'<div class="charts">{opening}{examples}{facts_html(section.facts)}</div>'
        f'<h3 class="more">All charts</h3><div class="charts">{charts}</div>{kinds_html(section.kinds)}</section>'
    )


def facts_html(facts: Mapping[str, str]) -> str:
    """Return the description of a run as a table."""
    rows = "".join(f'<tr><th scope="row">{escape(k)}</th><td>{escape(v)}</td></tr>' for k, v in facts.items())
    return f'<figure class="facts"><h3>The run</h3><table><tbody>{rows}</tbody></table></figure>'


def figure_html(chart: Chart, salt: str) -> str:
    """Return a chart with its title, caption and numbers."""
    svg = chart.svg(salt).replace("<svg ", f'<svg role="img" aria-label="{escape(chart.title)}" ', 1)
    file, rows = f"{escape(chart.name)}.csv", len(chart.table)
    if rows > POINTS:
        note = (
            f"A curve of more than {POINTS} points shows means. All {rows:,} rows are in {file} in the folder charts."
        )
    else:
        numbers = base64.b64encode(chart.csv().encode("utf-8", "replace")).decode("ascii")
        note = f'<a download="{file}" href="data:text/csv;base64,{numbers}">CSV</a>'
    caption = f"{escape(chart.caption)} {note}"
    return f"<figure><h3>{escape(chart.title)}</h3>{svg}<figcaption>{caption}</figcaption></figure>"


def kinds_html(kinds: Sequence[TableRow]) -> str:
    """Return the judgments by kind as a table."""
    if not kinds:
        return ""
    rows = "".join(
        f'<tr><th scope="row">{escape(row["kind"])}</th>'
        + "".join(f"<td>{format_number(row[name])}</td>" for name in KINDS)
        + "</tr>"
        for row in kinds
    )
    head = "".join(f'<th scope="col">{name}</th>' for name in ("judgment", *KINDS.values()))
    return f'<div class="scroll"><table><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table></div>'


def format_number(value: float | None) -> str:
    """Format a number for people."""
    if value is None:
        return "-"
    return f"{value:,}" if isinstance(value, int) else f"{value:,.0f}" if value >= 100 else f"{value:,.3g}"
