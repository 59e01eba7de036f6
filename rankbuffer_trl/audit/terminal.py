"""Print an audit as tables in a terminal."""

import sys

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from .results import Audit, verdict


def print_audit(audit: Audit) -> None:
    """Print tables and verdict to standard output; 119 characters wide if that is a file."""
    console = Console(highlight=False, width=None if sys.stdout.isatty() else 119)
    pairs = f"all pairs of {audit.pairwise_queries} of them"
    console.print(
        f"{audit.judge} on {audit.dataset}: {audit.queries} queries, {pairs}\n", markup=False, soft_wrap=True
    )
    console.print(measure_table(audit))
    console.print("Clear: the whole interval lies on the better side of chance. Chance: not reading the responses.\n")
    console.print(cost_table(audit))
    console.print(form_lines(audit) + "\n")
    console.print(verdict(audit), style="bold", soft_wrap=True)


def measure_table(audit: Audit) -> Table:
    """Make the table of measures and their chance levels. Measures that the verdict counts say yes or no."""
    table = Table(
        title="Can this judge be trusted?",
        title_justify="left",
        box=SIMPLE_HEAD,
        pad_edge=False,
        collapse_padding=True,
    )
    table.add_column("measure", no_wrap=True)
    for column in ("value", "95 % interval", "chance"):
        table.add_column(column, justify="right", no_wrap=True)
    table.add_column("clear", justify="center")
    table.add_column("what it says")
    for result in audit.results:
        if result.main:
            table.add_section()
        mark, style = (
            ("yes" if result.clear else "no", "" if result.clear else "bold red") if result.main else ("", "")
        )
        if result.main and not result.values:
            mark, style = "-", "dim"
        span = "-" if result.low is None else f"{result.low:.2f} to {result.high:.2f}"
        table.add_row(
            result.label if result.main else f"  {result.label}",
            number(result.value),
            span,
            number(result.chance),
            f"[{style}]{mark}[/]" if style else mark,
            result.meaning,
        )
    return table


def cost_table(audit: Audit) -> Table:
    """Make the table of what a call of each kind costs."""
    title = "Cost of a call: means, all attempts; times without queueing"
    table = Table(title=title, title_justify="left", box=SIMPLE_HEAD, pad_edge=False, collapse_padding=True)
    table.add_column("kind")
    for column in ("calls", "prompt tokens", "cached", "completion", "median ms", "p95 ms"):
        table.add_column(column, justify="right")
    for cost in audit.costs:
        tokens = (f"{n:,.0f}" for n in (cost.prompt_tokens, cost.cached_tokens, cost.completion_tokens))
        times = (f"{1000 * s:,.1f}" for s in (cost.median_seconds, cost.p95_seconds))
        table.add_row(cost.kind, f"{cost.calls:,}", *tokens, *times)
    return table


def form_lines(audit: Audit) -> str:
    """Say how many answers had a fault, and how long everything took."""
    form = audit.form
    return (
        f"First answers malformed: {share(form.first_malformed, form.first_answers)}."
        f" Questions without a verdict: {share(form.without_verdict, form.questions)},"
        f" of which {form.unreachable:,} unreachable; training stops above {100 * audit.max_failures:g} %.\n"
        f"{form.questions:,} calls in {audit.seconds:.1f} s: {form.questions / audit.seconds:,.0f} per second."
    )


def number(value: float | None) -> str:
    """Write a number with two decimals, or a dash for `None`."""
    return "-" if value is None else f"{value:.2f}"


def share(part: int, whole: int) -> str:
    """Write a share, such as `3 of 40 (7.5 %)`."""
    return f"{part:,} of {whole:,}" + (f" ({100 * part / whole:.1f} %)" if whole else "")
