"""Print an audit as tables in a terminal."""

import sys

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from rankbuffer_trl.judge import KIND_NAMES

from .results import SOFT, Audit, verdict


def print_audit(audit: Audit) -> None:
    """Print tables and verdict to standard output."""
    # 119 columns fit the tables; a file has no width.
    console = Console(highlight=False, width=None if sys.stdout.isatty() else 119)
    heading = f"{audit.judge} on {audit.samples}: {len(audit.rankings)} queries\n"
    console.print(heading, markup=False, soft_wrap=True)  # a name may hold brackets, which rich reads as markup
    console.print(measure_table(audit))
    console.print("Clear: the whole interval lies on the better side of chance. Chance: not reading the responses.\n")
    console.print(cost_table(audit))
    console.print(f"Training stops above {100 * audit.max_failures:g} % of questions without a verdict.\n")
    console.print(verdict(audit), style="bold", soft_wrap=True)


def measure_table(audit: Audit) -> Table:
    """Make the table of measures and their chance levels. Measures that the verdict counts say yes or no."""
    table = titled("Does this judge read the responses?")
    table.add_column("measure", no_wrap=True)
    for column in ("value", "95 % interval", "chance"):
        table.add_column(column, justify="right", no_wrap=True)
    table.add_column("clear", justify="center")
    table.add_column("what it says")
    for result in audit.results:
        if result.soft and not result.values:  # the judge gave no probabilities
            continue
        if first := result.main or result.name == SOFT:  # rows below explain it, from the same answers
            table.add_section()
        mark, style = ("yes" if result.clear else "no", "" if result.clear else "bold red") if first else ("", "")
        if first and result.low is None:
            mark, style = "-", "dim"
        span = "-" if result.low is None else f"{result.low:.2f} to {result.high:.2f}"
        table.add_row(
            result.label if first else f"  {result.label}",
            decimals(result.value),
            "too few queries" if result.too_few else span,
            decimals(result.chance),
            f"[{style}]{mark}[/]" if style else mark,
            result.meaning,
        )
    return table


def cost_table(audit: Audit) -> Table:
    """Make the table of what a call of each kind costs, and how many answers had a fault."""
    table = titled("Cost of a call: means, all attempts; times without queueing")
    table.add_column("kind")
    for column in ("calls", "first malformed", "no verdict", "prompt tokens", "cached", "completion", "median ms"):
        table.add_column(column, justify="right")
    for cost in audit.costs:
        form = cost.form
        tokens = (f"{n:,.0f}" for n in (cost.prompt_tokens, cost.cached_tokens, cost.completion_tokens))
        malformed = share(form.first_malformed, form.first_answers)
        unreachable = f", {form.unreachable:,} unreachable" if form.unreachable else ""
        missing = f"{form.without_verdict:,}{unreachable}"
        kind = KIND_NAMES.get(cost.kind, cost.kind)
        table.add_row(kind, f"{form.questions:,}", malformed, missing, *tokens, f"{1000 * cost.median_seconds:,.1f}")
    return table


def titled(title: str) -> Table:
    """Make an empty table with a title."""
    return Table(title=title, title_justify="left", box=SIMPLE_HEAD, pad_edge=False, collapse_padding=True)


def decimals(value: float | None) -> str:
    """Write a number with two decimals, or a dash for `None`."""
    return "-" if value is None else f"{value:.2f}"


def share(part: int, whole: int) -> str:
    """Write a count with its share, such as `3 (7.5 %)`."""
    return f"{part:,}" + (f" ({100 * part / whole:.1f} %)" if whole else "")
