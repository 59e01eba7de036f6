def cost_table(outcomes: dict[str, Outcome]) -> Table:
    """Show calls and tokens next to the paper's."""
    columns = [column for name in ("calls", "Mtokens", "tokens/call") for column in (name, "paper", "ratio")]
    table = Table(Column(no_wrap=True), *columns, "computed")
    table.title = "Cost; the paper's figures scaled to the groups replayed"
    for label, outcome in outcomes.items():
        row, totals, scale = ROWS[label], outcome.totals, outcome.groups / PAPER_GROUPS
        calls, tokens = scale * (row.calls or 0), scale * (row.tokens or 0)
        table.add_row(
            label,
            *beside(totals.calls, 1e3 * calls, ",.0f"),
            *beside(totals.tokens / 1e6, tokens, ".2f"),
            *beside(totals.tokens / totals.calls, 1e3 * tokens / (calls or 1), ".0f"),
            f"{(totals.tokens - totals.cached_tokens) / 1e6:.2f}",
        )
    return table


def beside(ours: float, paper: float, form: str) -> list[str]:
    """Format a figure, the paper's figure and their ratio."""
    return [format(ours, form), *((format(paper, form), f"{ours / paper:.2f}") if paper else ("", ""))]


def reward_table(outcomes: dict[str, Outcome]) -> Table:
    """Show how well rewards and buffers are ordered."""
    columns = ("calls/group", "rounds", "tau", "tied", "flat", "right place", "blind", "anchors", "in order")
    table = Table(Column(no_wrap=True), *columns)
    table.title = f"Rewards and buffers, noise {NOISE:g}"
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
            f"{fmean(outcome.tau):.3f}",
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


def acuity_table(taus: dict[tuple[str, float], float]) -> Table:
    """Show tau by method and noise, and RankBuffer's tau as a share of RRC-SCR's."""
    table = Table("noise", *(f"{noise:g}" for noise in NOISES), title="Tau by acuity of the judge")
    for label in ROWS:
        table.add_row(label, *(f"{taus[label, noise]:.3f}" for noise in NOISES), end_section=label == list(ROWS)[-1])
    table.add_row("RankBuffer / RRC-SCR", *(f"{ratio(taus, noise):.3f}" for noise in NOISES))
    return table


def lasting_table(taus: dict[tuple[str, float, float], float]) -> Table:
    """Show RankBuffer's tau as a share of RRC-SCR's for a judge whose errors repeat."""
    table = Table("lasting", *(f"{noise:g}" for noise in NOISES))
    table.title = "RankBuffer's tau as a share of RRC-SCR's, where errors repeat"
    for lasting in LASTING:
        at = {(label, noise): tau for (label, noise, share), tau in taus.items() if share == lasting}
        cells = (f"{ratio(at, noise):.3f} of {at['RRC-SCR', noise]:.3f}" for noise in NOISES)
        table.add_row(f"{lasting:g}", *cells)
    return table


def ratio(taus: dict[tuple[str, float], float], noise: float) -> float:
    """Return RankBuffer's tau as a share of RRC-SCR's."""
    return taus["RankBuffer", noise] / taus["RRC-SCR", noise]


