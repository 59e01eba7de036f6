"""A number that a page quotes stands in the table that it is quoted from."""

import re
from functools import cache

import pytest
from conftest import ROOT

REPLAY, TOY, TWO = (f"experiments/{name}/README.md" for name in ("judge_cost", "toy_policy", "real_policy"))
WEAK, RESULTS, RECIPES = "docs/results/weak_judge.md", "docs/results.md", "recipes/README.md"
PRICES = "questions a group", "thousand tokens a group", "agreement", "thousand tokens to 85 points"
COSTS = "calls", "Mtokens", "0.03", "0.09", "0.3"
NAMES = {
    "GRPO (pointwise)": "GRPO",
    "RankBuffer, static": "RankBuffer*",
    "RankBuffer, bootstrap": "RankBuffer-Bootstrap",
}
NAMES |= {name: name for name in "GDPO Tournament-GRPO RRC-AGR RRC-SCR ArenaRL RankBuffer Coarse-only".split()}
WORLDS = "careful", "biased", "blunt"
LOOKS = {"RRC-SCR": "RRC-SCR", "RankBuffer": "RankBuffer", "two passes (ours)": "List, 2 passes"}
WON = (
    *("`ratings_soft`", "`ratings_soft`, another seed", "`pairs_soft`, one order", "`pointwise`"),
    *("`rankbuffer`, bootstrap", "`rankbuffer_soft`, references", "`rankbuffer_soft`, bootstrap"),
)


@cache
def tables(page: str) -> list[list[list[str]]]:
    """Return the tables of a page as rows of cells, the head first."""
    blocks = re.findall(r"(?:^\|.*\n)+", (ROOT / page).read_text().replace("**", ""), re.MULTILINE)
    return [[[cell.strip() for cell in line[1:-1].split("|")] for line in block.splitlines()] for block in blocks]


def cell(page: str, column: str, *row: str) -> list[float]:
    """Return the numbers of the first cell under a column in a row that begins with these cells."""
    found = (
        re.findall(r"-?\d[\d,]*\.?\d*", each[head.index(column)])
        for head, _, *rows in tables(page)
        for each in rows
        if column in head and each[: len(row)] == [*row]
    )
    return [float(number.replace(",", "")) for number in next(filter(None, found))]


def stands(quoted: str, source: float) -> bool:
    """Return whether a number is its source rounded to as many decimals, or to hundreds of thousands of tokens."""
    number = float(quoted.replace(",", ""))
    step = 10.0 ** -len(quoted.partition(".")[2]) if number < 1000 or number % 100 else 100
    return abs(number - source) <= step / 2 + 1e-9 or abs(number - 1000 * source) <= step / 2


def fault(text: str, sentence: str, *sources: float) -> str:
    """Say what is wrong with a sentence that has a number for each `{}`, and any cell for `…`; empty if nothing is."""
    pattern = (
        re.sub(r"\\ ", r"\\s+", re.escape(sentence)).replace(r"\{\}", r"(-?\d[\d.,]*\d|\d)").replace("…", "[^|]*")
    )
    if not (found := re.search(pattern, text.replace("**", ""))):
        return f"there is no sentence like {sentence!r}"
    wrong = ((one, of) for one, of in zip(found.groups(), sources, strict=True) if not stands(one, of))
    return "; ".join(f"{one} for {of:g}" for one, of in wrong)


def quotes():
    """Yield each page with a sentence and the sources of its numbers."""
    paper, ours = ("rankbuffer", "rankbuffer_bootstrap", "rrc_scr"), ("listwise_two", "listwise_one", "ruler")
    for recipe in (*(f"paper/{name}" for name in paper), *(f"beyond/{name}" for name in ours)):
        yield (
            "README.md",
            f"`{recipe}` | {{}} | {{}} | {{}} | {{}} |",
            *(cell(RECIPES, c, f"`{recipe}`")[0] for c in PRICES),
        )
    for name, row in NAMES.items():
        sentence = f"| {name} | {{}} | … | {{}} | … | … | {{}} | {{}} | {{}} |"
        yield RESULTS, sentence, *(cell(REPLAY, column, row)[0] for column in COSTS)
    for name, row in LOOKS.items():
        worlds = [[cell(REPLAY, row, f"{world}, crowd {n}")[0] for world in WORLDS] for n in ("1", "1.4", "2")]
        yield RESULTS, f"| {name} | … |" + " {} to {} |" * 3, *(end(of) for of in worlds for end in (min, max))
    sentence = (
        "[wins {} % of its duels](results/weak_judge.md) with its start, and {} % with another seed; by the"
        " log odds of pairs, each in one order, {} %, for five times the judge tokens. By greedy scores it"
        " wins {} %, by RankBuffer's {} %. RankBuffer read by its probabilities wins {} % if references give"
        " the first anchors their order, and {} % if a greedy list does."
    )
    yield RESULTS, sentence, *(cell(WEAK, "log odds, kept apart", row)[0] for row in WON)
    taus = (cell(TOY, "error 0.3, different words", row)[0] for row in ("listwise_two", "rrc_scr", "rankbuffer"))
    yield RESULTS, "tau is {} for two passes, {} for RRC-SCR and {} for RankBuffer", *taus
    ends = cell(TWO, "last epoch of seeds 0, 1, ...", "sharp", "GRPO")
    yield RESULTS, "GRPO ends at {} to {};", min(ends), max(ends)
    for row, sentence in (
        ("listwise", "ends {} points above RankBuffer at {} of"),
        ("listwise_two", "passes end {} points above it at {} of"),
    ):
        yield RESULTS, sentence, *(cell(TOY, column, row, "rankbuffer")[0] for column in ("error 0.3", "token ratio"))


@pytest.mark.parametrize(("page", "sentence", "sources"), [(page, text, of) for page, text, *of in quotes()])
def test_a_quoted_number_stands_in_its_source(page, sentence, sources):
    assert not fault((ROOT / page).read_text(), sentence, *sources)


def test_a_number_that_its_source_does_not_have_is_found():
    assert not fault("It takes\n**0.78** of 24,200.", "takes {} of {}.", 0.784, 24.17)
    assert fault("takes 0.77 of 24,000.", "takes {} of {}.", 0.784, 24.17) == "0.77 for 0.784; 24,000 for 24.17"
    assert "no sentence" in fault("takes 1", "takes {} of {}.", 1, 2)
