"""Tables of the errors of real judges, in Markdown."""

from collections.abc import Iterable, Sequence

PAIRS = "Vanilla_NoRules"  # LLMBar's template that only asks which output is better
TITLES = {
    "accuracy": "right",
    "consistent": "same after a swap",
    "first": "first place wins",
    "bias": "position bias b",
    "truth": "truth",
    "lasting": "lasting error, at most",
    "fresh": "fresh noise",
    "agreement": "opinion with truth",
    "repeated": "same for the same prompt",
    "sampling": "of it, from repeats",
    "tied": "tied",
    "right_longer": "right, where the longer is better",
    "right_shorter": "right, where the shorter is better",
    "prefers_longer": "prefers the longer",
    "error": "error of a look",
    "lasting_share": "lasting share, at most",
    "error_bias": "bias",
    "pair_noise": "fresh noise / spread of opinion",
    "pair_bias": "bias / spread of opinion",
}


def shown(value: Sequence[float] | None) -> str:
    """Return an estimate with its interval."""
    return "-" if value is None else "{:.2f} ({:.2f} to {:.2f})".format(*(x + 0.0 for x in value))


def table(title: str, head: Sequence[str], lines: Iterable[Sequence[object]]) -> str:
    """Return a table under its title. The first two columns are text."""
    rule = ["---", "---", *["---:"] * (len(head) - 2)]
    cells = [head, rule, *([str(cell) for cell in line] for line in lines)]
    return f"### {title}\n\n" + "\n".join(f"| {' | '.join(line)} |" for line in cells)


def of_judges(title: str, rows: Iterable[dict], names: Sequence[str]) -> str:
    """Return a table with a line for each judge and data set."""
    lines = [
        (row["judge"], f"{row['data']} ({row['pairs']}, {row['prompts']})", *(shown(row.get(n)) for n in names))
        for row in rows
    ]
    return table(title, ["judge", "set (pairs, prompts)", *(TITLES[name] for name in names)], lines)


def tables(found: dict) -> str:
    """Return all tables for the estimates of `run.py`."""
    pairs = [row for row in found["estimates"] if row["prompt"] == PAIRS]
    repeated = [row for row in found["estimates"] if row["prompt"] == "repeated"]
    plain = [row for row in pairs if row["data"] != "Adversarial" and row["truth"]]
    sets, other_sets = (list(dict.fromkeys(row["data"] for row in rows)) for rows in (pairs, repeated))
    of_settings = ["error", "lasting_share", "error_bias"]
    of_repeats = ["repeated", "consistent", "first", "tied", "fresh", "sampling"]
    parts = [
        of_judges("Pairs in both orders", pairs, ["accuracy", "consistent", "first", "bias"]),
        of_judges("Shares of the variance of a look", pairs, ["truth", "lasting", "fresh", "agreement"]),
        of_judges("The errors as settings of the simulated judge", plain, of_settings),
        of_judges("Each prompt asked three times, in both orders", repeated, of_repeats),
        of_judges("In units of the settled opinion", [*pairs, *repeated], ["pair_noise", "pair_bias"]),
        of_biases("Position bias b of one judge on several sets", found["bias_over_data"], sets),
        of_biases("The same on the two sets with repeats", found["bias_over_data"], other_sets),
        of_judges("Length crossed with truth", pairs, ["right_longer", "right_shorter", "prefers_longer"]),
    ]
    lines: list[tuple] = [
        (
            row["prompt"],
            f"{', '.join(row['from'])} to {', '.join(row['to'])}",
            row["cases"],
            f"{row['within']} ({row['within'] / row['cases']:.0%})",
            f"{row['error']:.3f}",
            f"{row['error_same_consistency']:.3f}",
        )
        for row in found["carried_over"]
    ]
    head = ["template", "from, to", "cases", "within the interval", "error", "error of the same consistency"]
    parts.append(table("Swap consistency of one set from another", head, lines))
    lines = []
    for row in found["ratings_from_pairs"]:
        cells = [row["judge"], f"{row['data']}, {row['prompt']}"]
        for name in ("tied", "accuracy"):
            case = row[name]
            cells += [shown(case["predicted"]), shown(case["seen"]) + ("" if case["within"] else " **outside**")]
        lines.append((*cells, shown(row["compared"])))
    head = ["judge", "set, template", "tied, predicted", "seen", "right, predicted", "seen", "right by comparison"]
    parts.append(table("Ratings from verdicts on pairs", head, lines))
    lines = [
        (row["judge"], f"{row['data']}, {' and '.join(row['prompts'])}", shown(row["kappa"])) for row in found["kappa"]
    ]
    parts.append(table("What two ways of asking settle on", ["judge", "set, templates", "correlation"], lines))
    rollouts = found["rollouts"]
    head = ["judge", "policy (prompts)", "equal", "one point apart or less", "equal, two policies", "spread"]
    policy = f"{rollouts['policy']} ({rollouts['prompts']})"
    lines = [(rollouts["judge"], policy, *(shown(rollouts[n]) for n in ("tied", "near", "tied_models", "spread")))]
    return "\n\n".join([*parts, table("Ratings of two rollouts of one policy", head, lines)])


def of_biases(title: str, rows: Iterable[dict], sets: Sequence[str]) -> str:
    """Return a table of the position biases over some data sets."""
    lines = [
        (row["judge"], row["prompt"], *(shown(row["bias"][name]) for name in sets), shown(row["spread"]))
        for row in rows
        if set(row["bias"]) == set(sets)
    ]
    return table(title, ["judge", "template", *sets, "spread over sets"], lines)
