"""The tables of `run.py`, from the counts of its replays."""

from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import TypeVar

from rich.table import Column, Table

from experiments.judge_cost.replay import OURS, PAPER, RELATIVES, ROWS, SOFT, Counts
from rankbuffer_tools.paper import number, paper_rows
from rankbuffer_trl.buffer import SOURCES

COMPARED = ("RRC-SCR", "RankBuffer", *OURS)
PAPER_GROUPS = 4000
PAPER_SIZES = (5.44, 6.78, 7.27, 7.48)

T = TypeVar("T")
ByNoise = Mapping[tuple[str, float], Counts]
"""Counts by label and noise."""


def cost_table(outcomes: Mapping[str, Counts]) -> Table:
    """Show calls and tokens next to the paper's."""
    columns = [column for name in ("calls", "Mtokens", "tokens/call") for column in (name, "paper", "ratio")]
    table = Table(Column(no_wrap=True), *columns, "computed")
    table.title = "Cost; the paper's figures scaled to the groups replayed"
    for label in PAPER:
        outcome, printed = outcomes[label], paper_rows()[label]
        scale = outcome.groups / PAPER_GROUPS
        calls, tokens = (scale * (number(printed.get(name)) or 0) for name in ("calls", "tokens"))
        table.add_row(
            label,
            *beside(outcome.calls, calls, ",.0f"),
            *beside(outcome.tokens / 1e6, tokens / 1e6, ".2f"),
            *beside(outcome.tokens / outcome.calls, tokens / (calls or 1), ".0f"),
            f"{outcome.computed / 1e6:.2f}",
        )
    return table


def beside(ours: float, paper: float, form: str) -> list[str]:
    """Format a figure, the paper's figure and their ratio."""
    return [format(ours, form), *((format(paper, form), f"{ours / paper:.2f}") if paper else ("", ""))]


def beyond_table(outcomes: Mapping[str, Counts]) -> Table:
    """Show what methods cost and how well they rank: our own, next to RRC-SCR and RankBuffer."""
    columns = ("calls/group", "rounds", "tokens/group", "/ RRC-SCR", "computed", "/ RRC-SCR", "tau", "cosine")
    table = Table(Column(no_wrap=True), *columns, title="Cost and accuracy")
    scr = outcomes["RRC-SCR"]
    for label, outcome in outcomes.items():
        table.add_row(
            label,
            f"{outcome.calls / outcome.groups:.2f}",
            f"{outcome.rounds / outcome.groups:.2f}",
            f"{outcome.tokens / outcome.groups:,.0f}",
            f"{outcome.tokens / scr.tokens:.2f}",
            f"{outcome.computed / outcome.groups:,.0f}",
            f"{outcome.computed / scr.computed:.2f}",
            f"{outcome.tau:.3f}",
            f"{outcome.cosine:.3f}",
        )
    return table


def reward_table(outcomes: Mapping[str, Counts], judge: str) -> Table:
    """Show how well rewards and buffers are ordered."""
    columns = ("calls/group", "rounds", "tau", "tied", "flat", "right place", "blind", "anchors", "in order")
    table = Table(Column(no_wrap=True), *columns)
    table.title = f"Rewards and buffers, {judge}"
    for label, outcome in outcomes.items():
        buffers = [""] * 4
        if outcome.placed:
            right, best, anchors, ladder = outcome.placed
            buffers = [f"{right:.0%}", f"{best:.0%}", f"{anchors:.2f}", f"{ladder:.2f}"]
        table.add_row(
            label,
            f"{outcome.calls / outcome.groups:.2f}",
            f"{outcome.rounds / outcome.groups:.2f}",
            f"{outcome.tau:.3f}",
            f"{outcome.tied:.0%}",
            f"{outcome.flat:.0%}",
            *buffers,
        )
    return table


def buffer_table(outcome: Counts, queries: int) -> Table:
    """Show the anchors of RankBuffer by epoch and source."""
    sources = [source for source in SOURCES if any(source in counts for counts in outcome.sources)]
    table = Table("after epoch", "anchors", "paper", *sources, title="RankBuffer's mean buffer")
    for epoch, (counts, paper) in enumerate(zip(outcome.sources, PAPER_SIZES, strict=True)):
        sizes = [f"{counts.get(source, 0) / queries:.2f}" for source in sources]
        table.add_row(str(epoch), f"{sum(counts.values()) / queries:.2f}", f"{paper:.2f}", *sizes)
    return table


def acuity_table(outcomes: ByNoise) -> Table:
    """Show tau by method and noise, and RankBuffer's tau as a share of RRC-SCR's."""
    noises = noises_of(outcomes)
    table = Table("noise", *(f"{noise:g}" for noise in noises), title="Tau by acuity of the judge")
    for label in (*PAPER, *OURS, *RELATIVES):
        cells = (f"{outcomes[label, noise].tau:.3f}" for noise in noises)
        table.add_row(label, *cells, end_section=label in (list(PAPER)[-1], list(OURS)[-1], list(RELATIVES)[-1]))
    table.add_row("RankBuffer / RRC-SCR", *(f"{tau_ratio(outcomes, noise):.3f}" for noise in noises))
    return table


def share_table(outcomes: Mapping[tuple[str, T], Counts], by: str) -> Table:
    """Show tokens as a share of RRC-SCR's by method and by what else differs; in brackets, computed tokens."""
    columns = list(dict.fromkeys(column for _, column in outcomes))
    table = Table(Column(by, no_wrap=True), *map(str, columns))
    table.title = f"Tokens / RRC-SCR's by {by}; in brackets, computed tokens"
    for label in COMPARED[1:]:
        pairs = [(outcomes[label, column], outcomes["RRC-SCR", column]) for column in columns]
        table.add_row(
            label, *(f"{own.tokens / scr.tokens:.2f} ({own.computed / scr.computed:.2f})" for own, scr in pairs)
        )
    return table


def errors_table(settings: Mapping[str, ByNoise], title: str = "Tau under other errors of the judge") -> Table:
    """Show tau by the errors of the judge: one line per setting and noise. The largest tau of a line is bold."""
    labels = list(dict.fromkeys(label for outcomes in settings.values() for label, _ in outcomes))
    table = Table("errors", "noise", *labels, title=title)
    for name, outcomes in settings.items():
        noises = noises_of(outcomes)
        for noise in noises:
            taus = {label: f"{outcomes[label, noise].tau:.3f}" for label in labels}
            bold = (f"[bold]{tau}[/]" if tau == max(taus.values()) else tau for tau in taus.values())
            table.add_row(name, f"{noise:.3g}", *bold, end_section=noise == noises[-1])
    return table


def tied_table(outcomes: Mapping[tuple[str, str], Counts]) -> Table:
    """Show the share of rollouts that share their reward with another one of the group, by method and world."""
    worlds = list(dict.fromkeys(world for _, world in outcomes))
    table = Table(Column("world", no_wrap=True), *worlds, title="Share of rollouts that are tied")
    for label in dict.fromkeys(label for label, _ in outcomes):
        cells = (outcomes[label, world] for world in worlds)
        table.add_row(label, *(f"{cell.tied:.0%}" for cell in cells))
    return table


def weight_table(outcomes: ByNoise) -> Table:
    """Show how well all advantages of a run, taken together, follow the true differences in quality."""
    noises = noises_of(outcomes)
    columns = [f"{kind}, {noise:g}" for kind in ("as they are", "divided") for noise in noises]
    table = Table(Column(no_wrap=True), *columns)
    table.title = "Cosine of all advantages of the run with the true ones, where groups differ in spread"
    for label in dict.fromkeys(label for label, _ in outcomes):
        cells = [getattr(outcomes[label, noise], kind) for kind in ("plain", "divided") for noise in noises]
        table.add_row(label, *(f"{cell:.3f}" for cell in cells))
    return table


def doubt_table(found: Mapping[str, Sequence[Counts]]) -> Table:
    """Show what words and probabilities are worth. Means over seeds."""
    columns = ("reads", "calls/group", "ktokens/group", "tau", "cosine", "tau / call", "tau / ktoken", "tied")
    table = Table(Column("method", no_wrap=True), *columns, title="Words and probabilities")
    for label, seeds in found.items():
        rows = [(s.calls / s.groups, s.tokens / s.groups / 1e3, s.tau, s.cosine, s.tied) for s in seeds]
        calls, ktokens, tau, cosine, tied = map(fmean, zip(*rows, strict=True))
        samples, reads = ROWS[label].samples, "probabilities" if label in SOFT else "word"
        cells = f"{calls:.2f}", f"{ktokens:.1f}", f"{tau:.3f}", f"{cosine:.3f}", f"{tau / calls:.3f}"
        reads = f"{samples} answers" if samples > 1 else reads
        table.add_row(label, reads, *cells, f"{tau / ktokens:.3f}", f"{tied:.0%}")
    return table


def noises_of(outcomes: ByNoise) -> Sequence[float]:
    """Return the noises from sharp to blunt."""
    return sorted({noise for _, noise in outcomes})


def tau_ratio(outcomes: ByNoise, noise: float, ours: str = "RankBuffer", theirs: str = "RRC-SCR") -> float:
    """Return the tau of one method as a share of another's."""
    return outcomes[ours, noise].tau / outcomes[theirs, noise].tau


def token_ratio(outcomes: ByNoise, noise: float, ours: str = "RankBuffer", theirs: str = "RRC-SCR") -> float:
    """Return the tokens of one method as a share of another's."""
    return outcomes[ours, noise].tokens / outcomes[theirs, noise].tokens
