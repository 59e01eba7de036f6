"""The tables of the toy policy's page, each made again from the record of its runs."""

import json
from dataclasses import fields
from pathlib import Path
from statistics import fmean

from experiments.pages import tables_of
from experiments.toy_policy.report import (
    Interval,
    Result,
    by_method,
    compare,
    compare_ours,
    differences,
    judge_claims,
    mean_of,
)
from experiments.toy_policy.reward_hacking import chosen_differences, gaps, lost, parted

PAGE = Path(__file__).with_name("README.md")
HACKING = PAGE.parents[2] / "docs/results/reward_hacking.md"
START = 49.65320439  # the quality before training
KNOWN = {each.name for each in fields(Result)}


def record(name: str) -> list[dict]:
    """Return the lines of a record."""
    return [json.loads(line) for line in PAGE.with_name(f"{name}.jsonl").read_text().splitlines()]


def stored(run: dict) -> Result:
    """Read a line of a record, which has no numbers by step, and may say how the run differed from others."""
    return Result(**{"curve": [], "anchors": None, **{key: run[key] for key in run if key in KNOWN}})


def short(values: list[float]) -> str:
    """Write the mean and the interval of values with one decimal."""
    span = Interval.of(values)
    return f"{span.mean:.1f} ± {span.half:.1f}"


def table(*heads: str, page: Path = PAGE) -> list:
    """Return the head and the rows of the one table of a page whose head has these cells."""
    (found,) = (each for each in tables_of(page) if {*heads} <= {*each[0]})
    return found


def test_the_page_has_the_groups_of_the_record():
    sampled, different = record("groups")
    _, *rows = table("error 0.09, repeats")
    assert [method for method, *_ in rows] == [*sampled["methods"]]
    for method, *cells in rows:
        found = zip(sampled["methods"][method][::2], different["methods"][method][1::2], strict=True)
        assert cells == [f"{tau:.2f} / {cosine:.2f}" for pair in found for tau, cosine in pair]
    assert f"{sampled['repeated']:.0%} of the rollouts".replace("%", " %") in PAGE.read_text()


def test_the_page_has_the_untrained_runs_of_the_record():
    biased, plain = (line["rows"] for line in record("untrained"))
    _, *rows = table("the reference judge alone")
    for (method, *cells), weak, none in zip(rows, biased, plain, strict=True):
        found = [weak["judge"]], weak["repaired"], [weak["reader"]], [none["judge"]], none["repaired"]
        assert method == weak["method"] == none["method"]
        assert cells == [", ".join(f"{cosine:.2f}" for cosine in each) for each in found]


def test_the_page_has_the_rows_of_the_paper_as_their_record_does():
    runs = record("paper_rows")
    _, *rows = table("anchors", "calls, equal questions once")
    assert {row[0] for row in rows} == {run["method"] for run in runs} and len(runs) == 115
    for method, said, _, _, *cells in rows:
        found = [run for run in runs if run["method"] == method]
        calls, tokens = (fmean(run[name] for run in found) for name in ("calls", "tokens"))
        anchors = [run["anchors"] for run in found if "anchors" in run]
        assert said == str(Interval.of([run["quality"] for run in found])) and len(found) == 5
        assert cells == [f"{calls:,.0f}", f"{tokens:,.0f}", f"{fmean(anchors):.2f}" if anchors else ""]


def test_the_page_has_our_rows_as_their_record_does():
    runs = record("beyond_rows")
    sets = [[stored(run) for run in runs if run["noise"] == noise] for noise in (0.3, 0.09)]
    blunt, sharp = map(by_method, sets)
    assert all(len(of) == 8 for rows in (blunt, sharp) for of in rows.values())
    _, *rows = table("quality, error 0.3", "calls, equal questions once")
    assert {row[0] for row in rows} == {*blunt} == {*sharp}
    for method, *qualities, _, _, calls, tokens in rows:
        assert qualities == [str(Interval.of([run.quality for run in of[method]])) for of in (blunt, sharp)]
        assert [calls, tokens] == [f"{mean_of(sharp[method], name):,.0f}" for name in ("calls", "tokens")]
    head, *rows = table("ours", "less")
    assert head[:2] == ("ours", "less")
    found = [{(each.ours, each.other): each for each in compare_ours(of)} for of in sets]
    assert {tuple(row[:2]) for row in rows} == {pair for pair in found[0] if pair[1] != "grpo"}
    for ours, other, *cells in rows:
        pair = [of[ours, other] for of in found]
        said = [(str(Interval.of(each.found.values)), each.found.verdict, f"{each.tokens:.2f}") for each in pair]
        assert cells == [*said[0], *said[1]]
    assert {of[pair].found.verdict for of in found for pair in of if pair[1] == "grpo"} == {"holds"}


def test_the_page_has_the_debiased_runs_as_their_record_does():
    beyond = record("beyond_rows")
    lines = [run | {"strength": 0, "second": ""} for run in beyond if run["noise"] == 0.09 and run["seed"] < 4]
    lines += record("debias_rows")
    runs: dict[tuple, list[Result]] = {}
    for line in sorted(lines, key=lambda line: line["seed"]):
        kind = tuple(line[name] for name in ("strength", "second"))
        runs.setdefault((line["method"], *kind), []).append(stored(line))
    _, *rows = table("given back")
    gains: dict[str, list[list[float]]] = {"3": [], "1": []}
    for method, worth, *cells in rows:
        kinds = (int(worth), ""), (int(worth), "debias"), (0, ""), (0, "debias")
        plain, debiased, none, both = (runs[method, *kind] for kind in kinds)
        lost, given = differences(none, plain), differences(debiased, plain)
        gains[worth].append(given)
        means = [f"{mean_of(each, 'quality'):.1f}" for each in (plain, debiased, none, both)]
        more = mean_of(debiased, "tokens") / mean_of(plain, "tokens") - 1
        assert cells == [*means, short(lost), short(given), f"{more:.1%}".replace("%", " %")] and len(given) == 4
    strong, weak = ([(each.verdict, f"{each.p:.3f}") for each in compare(gains[worth])] for worth in "31")
    assert strong == [("holds", "0.011"), ("holds", "0.020"), ("holds", "0.027")]
    assert weak == [("holds", "0.029"), ("open", "0.083"), ("holds", "0.029")]


def test_the_page_has_the_runs_under_doubts_as_their_record_does():
    runs = [*map(stored, record("doubts_rows"))]
    methods = by_method(runs)
    _, *rows = table("reads", "calls")
    assert [row[0] for row in rows] == [*methods] and all(len(of) == 3 for of in methods.values())
    for method, _, *cells in rows:
        of = methods[method]
        means = [f"{mean_of(of, name):,.0f}" for name in ("calls", "tokens")]
        cosine = fmean(run.cosines[-1] for run in of)
        assert cells == [str(Interval.of([run.quality for run in of])), *means, f"{cosine:.2f}"]
    found = {(each.ours, each.other): each for each in compare_ours(runs)}
    for ours, other, verdict in (
        ("ratings_soft", "grpo", "holds"),
        ("ratings_soft", "rrc_scr", "holds"),
        ("ratings_soft", "rankbuffer", "open"),
        ("rankbuffer_soft", "rankbuffer", "open"),
    ):
        each = found[ours, other]
        assert short(each.found.values) in PAGE.read_text() and each.found.verdict == verdict


def test_the_page_has_the_runs_with_weak_references_as_their_record_does():
    lines = record("weak_reference_rows")
    sets = [[stored(line) for line in lines if line["noise"] == noise] for noise in (0.09, 0.3)]
    methods = [*map(by_method, sets)]
    assert all(len(of) == 10 for each in methods for of in each.values())
    _, *rows = table("quality, error 0.09", "above all anchors, error 0.09")
    assert {row[0] for row in rows} == {*methods[0]} == {*methods[1]} and len(rows) == len(methods[0])
    for method, *cells in rows:
        made, above = [], []
        for each in methods:
            of = each[method]
            made += [str(Interval.of([run.quality for run in of])), f"{mean_of(of, 'tokens'):,.0f}"]
            shares = [fmean(epoch) for epoch in zip(*(run.saturated for run in of), strict=True)]
            above.append(" ".join(f"{share:.0%}" for share in shares))
        assert cells == made + above
    claims = [judge_claims(runs, START) for runs in sets]
    found = [[pair for each in of for pair in each.comparisons.items()] for of in claims]
    _, *rows = table("difference", "error 0.09")
    for (_, what, *cells), *pair in zip(rows, *found, strict=True):
        assert what == "; ".join(dict.fromkeys(name for name, _ in pair))
        assert cells == [text for _, each in pair for text in (str(Interval.of(each.values)), each.verdict)]
    for runs, seeds, claim, said in (
        (sets[0], (6, 7, 10), "coarse-only below", "0.067, 0.038 and 0.018"),
        (sets[1], (8, 10), "dynamic above static, anchors from outside", "0.034 and 0.008"),
    ):
        looks = [judge_claims([run for run in runs if run.seed < n], START) for n in seeds]
        *p, last = [
            f"{each.p:.3f}" for look in looks for of in look if of.claim == claim for each in of.comparisons.values()
        ]
        assert f"{', '.join(p)} and {last}" == said and f"p {said}" in PAGE.read_text()
    better = [[fmean(run.better[place] for run in runs) for place in (0, -1)] for runs in sets]
    assert [[f"{share:.0%}" for share in each] for each in better] == [["44%", "93%"], ["44%", "85%"]]


def test_the_page_has_the_soft_pairs_and_ruler_as_their_records_do():
    kinds: dict[str, list[Result]] = {}
    for line in record("pairs_rows"):
        kinds.setdefault(line["pairs"], []).append(stored(line))
    _, *rows = table("the same, first set")
    first = next(iter(kinds.values()))
    for runs, (_, _, quality, less, _, *cells) in zip(kinds.values(), rows, strict=True):
        assert quality == str(Interval.of([run.quality for run in runs])) and len(runs) == 4
        assert less == ("" if runs is first else str(Interval.of(differences(runs, first))))
        assert cells == [f"{mean_of(runs, name):,.0f}" for name in ("calls", "tokens")]
    tested = compare([differences(runs, first) for runs in list(kinds.values())[1:]])
    assert [(each.verdict, f"{each.p:.3f}") for each in tested] == [("open", "0.147"), ("open", "0.057")]
    lines = record("ruler_rows")
    blunt, sharp = ([stored(line) for line in lines if line["noise"] == noise] for noise in (0.3, 0.09))
    said = ["ruler", *(str(Interval.of([run.quality for run in runs])) for runs in (blunt, sharp))]
    assert [*said, *(f"{mean_of(sharp, name):,.0f}" for name in ("calls", "tokens"))] in [
        list(row) for each in tables_of(PAGE) for row in each
    ]


def test_the_page_has_the_table_of_the_record_of_large_groups():
    runs = record("large_groups")
    head, *rows = table("G", "method")
    assert head[:2] == ("G", "method") and head[-1] == "cosine, last" and len(rows) == 8
    for G, method, *cells in rows:
        found = [run for run in runs if (str(run["G"]), run["method"]) == (G, method)]
        means = (fmean(run[name] for run in found) for name in ("calls", "tokens"))
        cosines = (fmean(run["cosines"][place] for run in found) for place in (0, -1))
        said = [short([run["quality"] for run in found]), *(f"{each:,.0f}" for each in means)]
        assert cells == [*said, *(f"{each:.2f}" for each in cosines)] and len(found) == 3


def test_the_page_of_reward_hacking_has_the_runs_of_its_record():
    found: dict[str, dict[str, list[Result]]] = {}
    for line in record("hacking_rows"):
        found.setdefault(line["weakness"], {}).setdefault(line["method"], []).append(stored(line))
    assert {len(of) for runs in found.values() for of in runs.values()} == {4}
    _, *rows = table("quality without a weakness", page=HACKING)
    assert {row[0] for row in rows} == {*found["none"]} and len(rows) == len(found["none"])
    for method, *cells in rows:
        plain, weak, strong, place = (found[name][method] for name in ("none", "phrase-1", "phrase-3", "place-3"))
        measured = [lost(weak, plain), lost(strong, plain), [gaps(run)[-1] for run in strong], lost(place, plain)]
        assert cells == [*map(short, [[run.quality for run in plain], *measured])]
        assert all(parted(runs) == 2 for runs in (weak, strong))
    _, *rows = table("less hacked?", page=HACKING)
    compared = [chosen_differences(name, found) for name in ("phrase-1", "phrase-3", "place-3")]
    assert [row[0] for row in rows] == [*compared[0]]
    for pair, *cells in rows:
        tested = [each[pair] for each in compared]
        assert cells == [short(each.values) + " *" * (each.verdict != "open") for each in tested]
