"""The page of the replay: its figures come out again, and they say what the page and the README say."""

import re
import sys
from dataclasses import replace

import pytest
from conftest import ROOT

sys.path.insert(0, str(ROOT / "benchmarks"))
from judge_cost import CROWDS, NOISES, PAIRS, SETTINGS, WHOLE, compare_worlds
from judge_cost_tables import COMPARED
from judge_replay import OURS, Replay
from simulated_judge import WORLDS, JudgeErrors, World

PAGE = (ROOT / "docs" / "results" / "judge_cost.md").read_text()
QUERIES = int(re.search(r"--acuity_queries (\d+)", PAGE)[1])
WORLD_QUERIES = int(re.search(r"--worlds --acuity_queries (\d+)", PAGE)[1])


def tables(text: str) -> list[tuple[list[str], list[list[str]]]]:
    """Return the header and the rows of each table of a page."""
    blocks = [block.splitlines() for block in re.findall(r"(?:^\|.*\n)+", text, re.MULTILINE)]
    cells = ([[cell.strip() for cell in line.strip("|").split("|")] for line in block] for block in blocks)
    return [(header, rows) for header, _, *rows in cells]


def acuity(label: str) -> list[float]:
    """Return the tau of a method by noise."""
    header, rows = next(found for found in tables(PAGE) if found[0][0] == "noise" and found[1][0][0] == "GRPO")
    assert header[1:] == [f"{noise:g}" for noise in NOISES]
    [row] = [row for row in rows if row[0] == label]
    return [float(cell) for cell in row[1:]]


def under_errors(worlds: bool = False) -> list[dict[str, str]]:
    """Return the lines of all tables of other errors, or of all tables of the worlds, by column."""
    lines = [dict(zip(header, row, strict=True)) for header, rows in tables(PAGE) for row in rows]
    return [line for line in lines if list(line)[:2] == ["errors", "noise"] and ("GRPO" in line) == worlds]


def settled_taus() -> dict[tuple[str, float], dict[str, float]]:
    """Return tau with the settled opinion by world and crowd, and then by method."""
    lines = under_errors(worlds=True)[: len(WORLDS) * len(CROWDS)]
    taus = {line["errors"]: {label: float(tau.strip("*")) for label, tau in list(line.items())[2:]} for line in lines}
    return {(name, crowd): taus.pop(f"{name}, crowd {crowd:g}") for name in WORLDS for crowd in CROWDS}


def shares() -> dict[str, str]:
    """Return the tokens of each method as a share of RRC-SCR's."""
    header, rows = next(found for found in tables(PAGE) if "/ RRC-SCR" in found[0])
    return {row[0]: row[header.index("/ RRC-SCR")] for row in rows}


def test_our_methods_reach_their_goals_on_the_page():
    two, disputed = acuity("List, 2 looks"), acuity("List, 2 + 2")
    assert all(ours >= theirs for ours, theirs in zip(disputed, acuity("RRC-SCR"), strict=True))
    assert all(ours >= theirs for ours, theirs in zip(two, acuity("RankBuffer"), strict=True))
    biased = [line for line in under_errors() if line["errors"] == "bias 0.25"]
    assert len(biased) == len(NOISES)
    assert all(float(line["List, 2 looks"].strip("*")) >= float(line["RankBuffer"].strip("*")) for line in biased)
    tokens = {label: float(share) for label, share in shares().items()}
    assert tokens["List, 2 looks"] <= 0.5 * tokens["RankBuffer"]
    [(low, high)] = re.findall(r"\| its tokens / RRC-SCR's \| ([\d.]+) to ([\d.]+) \| 0.45 \| met \|", PAGE)
    assert float(low) <= tokens["List, 2 + 2"] <= float(high) <= 0.45


def test_the_largest_tau_of_a_line_is_bold():
    lines = under_errors()
    assert all(tuple(line) == ("errors", "noise", *COMPARED) for line in lines)
    for line in lines + under_errors(worlds=True):
        errors, noise, *taus = line.values()
        best = max(float(cell.strip("*")) for cell in taus)
        assert {cell for cell in taus if cell.startswith("**")} == {f"**{best:.3f}**"}, (errors, noise)
    shown = [(line["errors"], float(line["noise"])) for line in lines]
    assert shown == [(name, noise) for name in SETTINGS for noise in (NOISES if name in WHOLE else NOISES[::2])]


def test_the_worlds_of_the_page_are_those_of_the_simulated_judge():
    settled = [
        (f"{name}, crowd {crowd:g}", f"{errors.settled(World.within).noise:.3g}")
        for name, errors in WORLDS.items()
        for crowd in CROWDS
    ]
    true = [(name, f"{errors.noise:.3g}") for name, errors in WORLDS.items()]
    lines = under_errors(worlds=True)
    assert [(line["errors"], line["noise"]) for line in lines] == settled + true
    for line in lines:  # pairs and single responses know no crowd
        first = next(other for other in lines if other["errors"] == line["errors"].partition(",")[0] + ", crowd 1")
        if "crowd" in line["errors"]:
            assert [line[label].strip("*") for label in PAIRS] == [first[label].strip("*") for label in PAIRS]


def test_what_changes_in_the_worlds_is_what_the_tables_say():
    taus = settled_taus()
    for (_, crowd), tau in taus.items():
        assert 0.03 < tau["List, 2 looks"] - tau["RankBuffer"] < 0.105 and tau["RRC-SCR"] > tau["RankBuffer"]
        assert tau["RankBuffer, fine 2 looks"] > tau["RankBuffer"]
        if crowd == 1:
            assert abs(tau["RankBuffer"] - tau["List"]) < 0.0135
            assert tau["List, 2 + 2"] > tau["RRC-SCR"] and tau["List, 4 looks"] > tau["Blocks of four"]
        if crowd == 2:
            lists = [tau[label] for label in ("List", "List, 2 looks", "List, 2 + 2", "List, 4 looks")]
            assert 0.014 < tau["Blocks of four"] - max(lists) < 0.051
            assert max(lists) < tau["RRC-SCR"] == max(tau.values())
    assert taus["biased", 1.4]["List, 2 + 2"] > taus["biased", 1.4]["RRC-SCR"]
    assert taus["blunt", 1.4]["RRC-SCR"] == max(taus["blunt", 1.4].values())


def test_the_readme_repeats_the_page():
    names = {
        "RRC-SCR": "RRC-SCR",
        "RankBuffer": "RankBuffer",
        "one listwise ranking": "List",
        "two looks": "List, 2 looks",
        "two looks, two more where they disagree": "List, 2 + 2",
        "blocks of four": "Blocks of four",
        "RankBuffer in one prompt, two looks": "Batch, 2 looks",
    }
    _, rows = next(one for one in tables(PAGE) if one[0][:2] == ["world", "careful, crowd 1"])  # token shares
    tokens = {row[0]: [float(cell.split()[0]) for cell in row[1:]] for row in rows} | {"RRC-SCR": [1]}
    taus = settled_taus()
    [(header, rows)] = [
        found for found in tables((ROOT / "README.md").read_text()) if found[0][0].startswith("simulated")
    ]
    assert header[2:] == [f"factor {crowd:g}" for crowd in CROWDS]
    assert [row[0].removesuffix(" (ours)") for row in rows] == list(names)
    for name, share, *ranges in rows:
        label = names[name.removesuffix(" (ours)")]
        assert name.endswith(" (ours)") == (label in OURS)
        assert share.removesuffix(" (paper: 0.44)") == span(tokens[label]), name
        assert ranges == [span([taus[world, crowd][label] for world in WORLDS], 2) for crowd in CROWDS], name


def span(values: list[float], digits: int | None = None) -> str:
    """Write the least and the largest of some numbers."""
    low, high = (f"{value:g}" if digits is None else f"{value:.{digits}f}" for value in (min(values), max(values)))
    return low if low == high else f"{low} to {high}"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("label", "errors", "noise"),
    [
        ("RankBuffer", "", 0.3),
        ("List, 2 + 2", "", 0.09),
        ("List", "bias 0.25", 0.15),
        ("List, 4 looks", "bias 0.25, edges", 0.3),
        ("Batch, 2 looks", "crowd 2", 0.09),
        ("Blocks of four", "crowd 1.4", 0.15),
        ("RankBuffer, fine 2 looks", "lasting 0.5", 0.03),
        ("List, 2 looks", "bias 0.25, drawn", 0.3),
    ],
)
def test_a_figure_of_the_page_comes_out_again(label, errors, noise):
    outcome = Replay(label, World(), QUERIES, JudgeErrors(noise=noise, **SETTINGS.get(errors, {})))()
    if errors:
        [line] = [line for line in under_errors() if (line["errors"], line["noise"]) == (errors, f"{noise:g}")]
        assert line[label].strip("*") == f"{outcome.mean_tau:.3f}"
    else:
        assert f"{acuity(label)[NOISES.index(noise)]:.3f}" == f"{outcome.mean_tau:.3f}"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("label", "name", "crowd"),
    [("Blocks of four", "blunt", 2.0), ("List, 2 + 2", "biased", 1.4), ("RRC-SCR", "careful", 1)],
)
def test_a_figure_of_a_world_comes_out_again(label, name, crowd):
    errors = replace(WORLDS[name].settled(World.within), crowd=crowd)
    outcome = Replay(label, World(), WORLD_QUERIES, errors)()
    assert settled_taus()[name, crowd][label] == round(outcome.mean_tau, 3)


@pytest.mark.slow
def test_the_command_makes_the_tables_of_the_worlds():
    tables, taus = compare_worlds(World(), 1, 1)
    cells = [f"{name}, crowd {crowd:g}" for name in WORLDS for crowd in CROWDS]
    labels = (*PAIRS[:3], *COMPARED)
    assert [[column.header for column in table.columns] for table in tables] == [
        ["errors", "noise", *labels],
        ["errors", "noise", *labels],
        ["world", *cells],
        ["world", *cells],
    ]
    assert [table.row_count for table in tables] == [len(cells), len(WORLDS), len(COMPARED) - 1, len(labels)]
    assert list(taus) == [f"{label}, {cell}" for cell in cells for label in labels]
