"""Write the table of results into `recipes/README.md`, and draw the picture of the front page, from what is stored.

    python docs/make_recipes.py

The sources are the tables of two pages of `experiments/` and two records. `tests/test_docs.py` fails if the page is
not what this program prints.
"""

import gzip
import json
import re
from pathlib import Path

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "recipes" / "README.md"
PICTURE = ROOT / "docs" / "images" / "cost_and_agreement.png"
LABELLED = {  # recipes in the picture: label, colour, and where the label stands from its point
    **{
        "grpo": ("a score an answer (GRPO)", "#6b6b6b", (8, -3)),
        "gdpo": ("a score a rubric (GDPO)", "#6b6b6b", (-146, -4)),
    },
    **{"rrc_scr": ("all pairs (RRC-SCR)", "#6b6b6b", (8, -3)), "arenarl": ("ArenaRL", "#6b6b6b", (8, -3))},
    **{"tournament_grpo": ("Tournament-GRPO", "#6b6b6b", (8, -3)), "rrc_agr": ("RRC-AGR", "#6b6b6b", (-44, 8))},
    **{
        "coarse_only": ("its insertions alone", "#d95f0e", (-44, 8)),
        "rankbuffer": ("RankBuffer", "#d95f0e", (-26, 8)),
    },
    **{"rankbuffer_bootstrap": ("its bootstrap", "#d95f0e", (-72, -3))},
    **{"listwise_one": ("one list", "#08589e", (-16, 8)), "listwise_two": ("two lists", "#08589e", (-18, 8))},
    **{"listwise": ("two lists, and two more\nwhere they disagree", "#08589e", (-60, 8))},
}
REPLAY, TOY_POLICY = (ROOT / "experiments" / name / "README.md" for name in ("judge_cost", "toy_policy"))
WEAK_JUDGE = ROOT / "experiments" / "weak_judge" / "weak_judge.json.gz"
RACE = ROOT / "experiments" / "race" / "tokens_to_85.json"
BEGIN, END = "<!-- python docs/make_recipes.py writes this table -->\n", "<!-- end -->\n"
LARGE_GROUPS = REPLAY.parent / "large_groups.json"
GROUPS = 4000  # of a run of the paper's size
IN_REPLAY = {
    **dict.fromkeys(("grpo", "dr_grpo", "dapo", "gpg"), "GRPO"),
    **{"gdpo": "GDPO", "tournament_grpo": "Tournament-GRPO", "rrc_agr": "RRC-AGR", "rrc_scr": "RRC-SCR"},
    **{"pairwise_rank": "Pairwise Rank", "arenarl": "ArenaRL", "coarse_only": "Coarse-only", "llm_buffer": "LLM"},
    **{"llm_buffer_look_ahead": "LLM + look-ahead", "order_only": "Order-only"},
    **{"order_only_bootstrap": "Order-only-Bootstrap", "rankbuffer": "RankBuffer", "rankbuffer_static": "RankBuffer*"},
    **{"rankbuffer_bootstrap": "RankBuffer-Bootstrap", "rankbuffer_bootstrap_static": "RankBuffer-Bootstrap*"},
    **{f"rankbuffer_k0_{k}": f"RankBuffer, K0={k}" for k in (2, 7)},
    **{f"rankbuffer_bootstrap_k0_{k}": f"RankBuffer-Bootstrap, K0={k}" for k in (2, 7)},
    **{"listwise_one": "List", "listwise_two": "List, 2 passes", "listwise": "List, 2 + 2"},
    "listwise_blocks": "Lists of 8, 2 times",
    **{"ruler": "RULER", "ratings_soft": "Soft ratings", "pairs_soft": "Soft pairs, rank"},
    **{"rankbuffer_soft": "RankBuffer, soft"},
}
RUN_FOR_REAL = {
    "pointwise": "paper/grpo",
    "rankbuffer": "paper/rankbuffer_bootstrap",
    **dict.fromkeys(("ratings_soft", "ratings_soft_seed_1", "ratings_soft_again"), "beyond/ratings_soft"),
    **dict.fromkeys(("rankbuffer_soft", "rankbuffer_soft_references"), "beyond/rankbuffer_soft"),
    "pairs_soft": "beyond/pairs_soft",
}
COLUMNS = (
    *("recipe", "questions a group", "thousand tokens a group", "agreement", "points (seeds)"),
    *("thousand tokens to 85 points", "run for real"),
)
HEAD = f"| {' | '.join(COLUMNS)} |\n|---|{'---:|' * 5}---|"


def rows_with(page: Path, *columns: str) -> dict[str, dict[str, str]]:
    """Return the rows of all tables that have these columns, by their first cell. The first row of a name counts."""
    found: dict[str, dict[str, str]] = {}
    for block in re.findall(r"(?:^\|.*\n)+", page.read_text(), re.MULTILINE):
        head, _, *rows = ([cell.strip() for cell in line.strip()[1:-1].split("|")] for line in block.splitlines())
        if set(columns) <= set(head):
            for row in rows:
                found.setdefault(row[0], dict(zip(reversed(head), reversed(row), strict=True)))
    return found


def number(text: str) -> float:
    """Return the number that a cell begins with."""
    return float(text.split()[0].replace(",", ""))


def costs() -> dict[str, tuple[float, float]]:
    """Return questions and thousand tokens a group of each row of the replay."""
    runs = rows_with(REPLAY, "calls", "Mtokens").items()
    found = {name: (number(row["calls"]) / GROUPS, number(row["Mtokens"]) * 1000 / GROUPS) for name, row in runs}
    for name, row in rows_with(REPLAY, "calls/group", "tokens/group").items():
        found.setdefault(name, (number(row["calls/group"]), number(row["tokens/group"]) / 1000))
    for name, row in rows_with(REPLAY, "reads", "ktokens/group").items():
        found.setdefault(name, (number(row["calls/group"]), number(row["ktokens/group"])))
    return {name: (row["calls"], row["ktokens"]) for name, row in of_sixteen().items()} | found


def of_sixteen() -> dict[str, dict[str, float]]:
    """Return the rows of groups of 16: questions, thousand tokens, and tau under each judge."""
    return json.loads(LARGE_GROUPS.read_text())["16"]


def agreements() -> dict[str, str]:
    """Return tau of each row of the replay: at noise 0.09, or under the judge with doubts, which has a dagger."""
    found = {name: row["0.09"] for name, row in rows_with(REPLAY, "noise", "0.03", "0.09").items()}
    found["Pairwise Rank"] = found["RRC-SCR"]  # the same questions
    found |= {
        name: f"{row['tau, noise 0.09, crowd 1']:.3f} ‡" for name, row in of_sixteen().items() if name not in found
    }
    doubts = rows_with(REPLAY, "reads", "tau")
    return {name: f"{row['tau']} †" for name, row in doubts.items() if row["reads"] == "probabilities"} | found


def points() -> dict[str, str]:
    """Return the quality that each row of the toy policy ends with, and its seeds, by recipe."""
    *_, text = TOY_POLICY.read_text().partition("## The rows of the paper")
    parts = text, text.partition("--doubts")[2]  # of the rows of the paper, and of those under the judge with doubts
    paper, doubts = (re.search(r"Means over (\d+) seeds", part)[1] for part in parts)
    found = {}
    for name, row in rows_with(TOY_POLICY, "true quality", "judge tokens").items():
        found[name] = f"{row['true quality']} ({paper})"
    for name, row in rows_with(TOY_POLICY, "quality, error 0.3", "quality, error 0.09", "calls").items():
        seeds = 3 if name == "ruler" else 8  # in the text above their tables
        found.setdefault(name, f"{row['quality, error 0.09']} ({seeds})")
    for name, row in rows_with(TOY_POLICY, "reads", "quality").items():
        if row["reads"] == "probabilities":
            found[name] = f"{row['quality']} † ({doubts})"
    return found


def table() -> str:
    """Build the table: a row for each recipe of `paper/` and `beyond/`."""
    cost, tau, point = costs(), agreements(), points()
    real = {RUN_FOR_REAL[name]: f"135M, {len(run['steps']['tokens'])} steps" for name, run in runs_for_real().items()}
    race, lines = json.loads(RACE.read_text()), HEAD.splitlines()
    for path in sorted(ROOT.glob("recipes/paper/*.yaml")) + sorted(ROOT.glob("recipes/beyond/*.yaml")):
        recipe, name = f"{path.parent.name}/{path.stem}", path.stem
        row = IN_REPLAY.get(name, "")
        questions, tokens = cost.get(row, (None, None))
        cells = [
            f"`{recipe}`",
            "" if questions is None else f"{questions:.1f}",
            "" if tokens is None else f"{tokens:.1f}",
        ]
        to_goal = race.get(recipe, 0)  # `null`: not within the steps of a run
        reached = "not reached" if to_goal is None else f"{to_goal / 1000:,.0f}" if to_goal else ""
        cells += [tau.get(row, ""), point.get(name, ""), reached, real.get(recipe, "")]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def draw(path: Path = PICTURE) -> None:
    """Draw agreement with the true order by judge tokens: RankBuffer, lists of the group, and the rest."""
    from matplotlib.figure import Figure

    cost, tau = costs(), agreements()
    picture = Figure(figsize=(8.4, 3.6), layout="constrained")
    axes = picture.subplots()
    for name, (label, colour, offset) in LABELLED.items():
        place = cost[IN_REPLAY[name]][1], float(tau[IN_REPLAY[name]])
        axes.plot(*place, "o", color=colour, markersize=7)
        axes.annotate(label, place, offset, textcoords="offset points", color=colour, fontsize=9)
    axes.set(xscale="log", xlim=(2.8, 110), ylim=(0.2, 0.98), xlabel="thousand judge tokens for a group of 8 answers")
    axes.set_ylabel("agreement with the true order (tau)")
    axes.set_xticks([3, 5, 10, 20, 50, 100], ["3", "5", "10", "20", "50", "100"], minor=False)
    axes.minorticks_off()
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(color="#eeeeee")
    picture.savefig(path, dpi=130)


def runs_for_real() -> dict[str, dict]:
    """Return the runs of a real policy under a real judge, by row."""
    with gzip.open(WEAK_JUDGE) as file:
        return json.load(file)


def page() -> str:
    """Build the page: as it is, with a new table."""
    before, rest = PAGE.read_text().split(BEGIN)
    return before + BEGIN + "\n" + table() + "\n" + END + rest.split(END)[1]


if __name__ == "__main__":
    PAGE.write_text(page())
    draw()
