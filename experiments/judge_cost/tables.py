"""The tables of `run.py`, from the outcomes of its replays."""

from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import TypeVar

from rich.table import Column, Table

from experiments.judge_cost.replay import OURS, PAPER, RELATIVES, Outcome
from rankbuffer_tools.paper import number, paper_rows
from rankbuffer_trl.buffer import SOURCES

COMPARED = ("RRC-SCR", "RankBuffer", *OURS)
PAPER_GROUPS = 4000
PAPER_SIZES = (5.44, 6.78, 7.27, 7.48)

T = TypeVar("T")
ByNoise = Mapping[tuple[str, float], Outcome]
"""Outcomes by label and noise."""


def cost_table(outcomes: Mapping[str, Outcome]) -> Table:
    """Show calls and tokens next to the paper's."""
    columns = [column for name in ("calls", "Mtokens", "tokens/call") for column in (name, "paper", "ratio")]
    table = Table(Column(no_wrap=True), *columns, "computed")
    table.title = "Cost; the paper's figures scaled to the groups replayed"
    for label in PAPER:
        outcome, printed = outcomes[label], paper_rows()[label]
        totals, scale = outcome.totals, outcome.groups / PAPER_GROUPS
        calls, tokens = (scale * (number(printed.get(name)) or 0) for name in ("calls", "tokens"))
        table.add_row(
            label,
            *beside(totals.calls, calls, ",.0f"),
            *beside(totals.tokens / 1e6, tokens / 1e6, ".2f"),
            *beside(totals.tokens / totals.calls, tokens / (calls or 1), ".0f"),
            f"{outcome.computed / 1e6:.2f}",
        )
    return table


def beside(ours: float, paper: float, form: str) -> list[str]:
    """Format a figure, the paper's figure and their ratio."""
    return [format(ours, form), *((format(paper, form), f"{ours / paper:.2f}") if paper else ("", ""))]


def beyond_table(outcomes: Mapping[str, Outcome], labels: Sequence[str] = COMPARED) -> Table:
    """Show what methods cost and how well they rank: our own, next to RRC-SCR and RankBuffer."""
    columns = ("calls/group", "rounds", "tokens/group", "/ RRC-SCR", "computed", "/ RRC-SCR", "tau", "cosine")
    table = Table(Column(no_wrap=True), *columns, title="Cost and accuracy")
    scr = outcomes["RRC-SCR"]
    for label in labels:
        outcome = outcomes[label]
        table.add_row(
            label,
            f"{outcome.totals.calls / outcome.groups:.2f}",
            f"{outcome.rounds / outcome.groups:.2f}",
            f"{outcome.tokens / outcome.groups:,.0f}",
            f"{outcome.tokens / scr.tokens:.2f}",
            f"{outcome.computed / outcome.groups:,.0f}",
            f"{outcome.computed / scr.computed:.2f}",
            f"{outcome.mean_tau:.3f}",
            f"{outcome.mean_cosine:.3f}",
        )
    return table


def reward_table(outcomes: Mapping[str, Outcome], judge: str) -> Table:
    """Show how well rewards and buffers are ordered."""
    columns = ("calls/group", "rounds", "tau", "tied", "flat", "right place", "blind", "anchors", "in order")
    table = Table(Column(no_wrap=True), *columns)
    table.title = f"Rewards and buffers, {judge}"
    for label, outcome in outcomes.items():
        buffers = [""] * 4
        if outcome.right:
            best = max(outcome.below_top.values()) / len(outcome.right)
            buffers[:2] = f"{fmean(outcome.right):.0%}", f"{best:.0%}"
            buffers[2:] = f"{fmean(outcome.anchors):.2f}", f"{fmean(outcome.ladder):.2f}"
        table.add_row(
            label,
            f"{outcome.totals.calls / outcome.groups:.2f}",
            f"{outcome.rounds / outcome.groups:.2f}",
            f"{outcome.mean_tau:.3f}",
            f"{outcome.tied / outcome.answered:.0%}",
            f"{outcome.flat / outcome.groups:.0%}",
            *buffers,
        )
    return table


def buffer_table(outcome: Outcome, queries: int) -> Table:
    """Show the anchors of RankBuffer by epoch and source."""
    sources = [source for source in SOURCES if any(counts[source] for counts in outcome.sources.values())]
    table = Table("after epoch", "anchors", "paper", *sources, title="RankBuffer's mean buffer")
    for (epoch, counts), paper in zip(sorted(outcome.sources.items()), PAPER_SIZES, strict=True):
        sizes = [f"{counts[source] / queries:.2f}" for source in sources]
        table.add_row(str(epoch), f"{counts.total() / queries:.2f}", f"{paper:.2f}", *sizes)
    return table


def acuity_table(outcomes: ByNoise) -> Table:
    """Show tau by method and noise, and RankBuffer's tau as a share of RRC-SCR's."""
    noises = noises_of(outcomes)
    table = Table("noise", *(f"{noise:g}" for noise in noises), title="Tau by acuity of the judge")
    for label in (*PAPER, *OURS, *RELATIVES):
        cells = (f"{outcomes[label, noise].mean_tau:.3f}" for noise in noises)
        table.add_row(label, *cells, end_section=label in (list(PAPER)[-1], list(OURS)[-1], list(RELATIVES)[-1]))
    table.add_row("RankBuffer / RRC-SCR", *(f"{tau_ratio(outcomes, noise):.3f}" for noise in noises))
    return table


def cosine_table(outcomes: ByNoise) -> Table:
    """Show the cosine of the advantages with the true ones by method and noise."""
    noises = noises_of(outcomes)
    table = Table("noise", *(f"{noise:g}" for noise in noises), title="Cosine of the advantages with the true ones")
    for label in ("GRPO", "GDPO", "Tournament-GRPO", "ArenaRL", *COMPARED):
        table.add_row(label, *(f"{outcomes[label, noise].mean_cosine:.3f}" for noise in noises))
    return table


def share_table(outcomes: Mapping[tuple[str, T], Outcome], by: str) -> Table:
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
            taus = {label: f"{outcomes[label, noise].mean_tau:.3f}" for label in labels}
            bold = (f"[bold]{tau}[/]" if tau == max(taus.values()) else tau for tau in taus.values())
            table.add_row(name, f"{noise:.3g}", *bold, end_section=noise == noises[-1])
    return table


def tied_table(outcomes: Mapping[tuple[str, str], Outcome]) -> Table:
    """Show the share of rollouts that share their reward with another one of the group, by method and world."""
    worlds = list(dict.fromkeys(world for _, world in outcomes))
    table = Table(Column("world", no_wrap=True), *worlds, title="Share of rollouts that are tied")
    for label in dict.fromkeys(label for label, _ in outcomes):
        cells = (outcomes[label, world] for world in worlds)
        table.add_row(label, *(f"{cell.tied / cell.answered:.0%}" for cell in cells))
    return table


def weight_table(outcomes: ByNoise) -> Table:
    """Show how well all advantages of a run, taken together, follow the true differences in quality."""
    noises = noises_of(outcomes)
    columns = [f"{kind}, {noise:g}" for kind in ("as they are", "divided") for noise in noises]
    table = Table(Column(no_wrap=True), *columns)
    table.title = "Cosine of all advantages of the run with the true ones, where groups differ in spread"
    for label in dict.fromkeys(label for label, _ in outcomes):
        cells = [
            f"{outcomes[label, noise].cosine_of_run(divided):.3f}" for divided in (False, True) for noise in noises
        ]
        table.add_row(label, *cells)
    return table


def noises_of(outcomes: ByNoise) -> Sequence[float]:
    """Return the noises from sharp to blunt."""
    return sorted({noise for _, noise in outcomes})


def tau_ratio(outcomes: ByNoise, noise: float, ours: str = "RankBuffer", theirs: str = "RRC-SCR") -> float:
    """Return the tau of one method as a share of another's."""
    return outcomes[ours, noise].mean_tau / outcomes[theirs, noise].mean_tau


def token_ratio(outcomes: ByNoise, noise: float, ours: str = "RankBuffer", theirs: str = "RRC-SCR") -> float:
    """Return the tokens of one method as a share of another's."""
    return outcomes[ours, noise].tokens / outcomes[theirs, noise].tokens


def winner(outcomes: ByNoise, noise: float) -> str:
    """Return the method with the largest tau."""
    return max(COMPARED, key=lambda label: outcomes[label, noise].mean_tau)
