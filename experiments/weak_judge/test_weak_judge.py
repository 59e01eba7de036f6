"""The kept numbers of the real runs: the tables that docs/results/weak_judge.md shows."""

import gzip
import json
import re
import sys

from experiments.pages import tables_of
from experiments.weak_judge import references, report
from rankbuffer_trl.data import load_queries
from rankbuffer_trl.judge import Reading

PAGE = report.HERE.parents[1] / "docs" / "results" / "weak_judge.md"


def test_main_shows_what_was_kept(tmp_path, monkeypatch, capsys):
    kept = tmp_path / "kept.json.gz"
    kept.write_bytes(report.KEPT.read_bytes())
    monkeypatch.setattr(sys, "argv", ["report", "--kept", str(kept), "--figure", str(tmp_path / "a.png")])
    report.main()
    *printed, line = capsys.readouterr().out.splitlines()
    cells = [[cell.strip() for cell in row.split("│")[1:-1]] for row in printed if row.startswith("│")]
    assert ["ratings_soft", "2", "40", "0.424", "0.591", "39", "0.094", "37.1"] in cells
    assert ["ratings_soft", "prompts kept apart", "the judge", "40"] in [row[:4] for row in cells]
    assert json.loads(line)["wins"]["ratings_soft"]["without_rubrics"]["log odds"]["probability"] == 0.9
    rows = ["ratings_soft", "ratings_soft_seed_1", "pairs_soft", "rankbuffer_soft_references", "rankbuffer_soft"]
    assert json.loads(line)["rows"] == [*rows, "pointwise", "rankbuffer", "ratings_soft_again"]
    assert (tmp_path / "a.png").read_bytes()[:4] == b"\x89PNG"


def test_what_was_kept_is_whole():
    for name, row in json.loads(gzip.decompress(report.KEPT.read_bytes())).items():
        answers = [answer for visit in row["visits"] for answer in visit["answers"]]
        rewards = [reward for visit in row["visits"] for reward in visit["rewards"]]
        assert len(answers) == len(rewards) == 16 * len(row["steps"]["seconds"]) == 800, name
        assert all(-1 <= reward <= 1 for reward in rewards)


def test_the_page_has_the_shares_of_the_record():
    (table,) = (rows for head, *rows in tables_of(PAGE) if "log odds, kept apart" in head)
    kept = json.loads(gzip.decompress(report.KEPT.read_bytes())).values()
    for shown, row in zip(table, kept, strict=True):
        found = [report.counted(row["compared"][prompts][judge]) for prompts, judge in report.DUELS]
        duels, apart = [each["wins"]["log odds"] for each in found], found[1]
        for cell, won in zip(shown[1:5], [*duels, apart["wins"]["verdicts"]], strict=True):
            share = "{:.2f} ({:.2f} to {:.2f})".format(*(int(number) / 100 for number in re.findall(r"\d+", cell)))
            assert share == report.share(won)
        assert shown[5].replace(" ", "") == f"{apart['first_shown_wins']:.0%}"
    assert [len(each["verdicts"]) for each in found] == [80, 80, 80], "the last row is counted from its verdicts"


def test_main_counts_duels_again_from_kept_verdicts(tmp_path, monkeypatch, capsys):
    rows = json.loads(gzip.decompress(report.KEPT.read_bytes()))
    odds = {"A": Reading("A", {"A": 0.8, "B": 0.2}, 0.0, 0.0), "B": Reading("B", {"A": 0.1, "B": 0.9}, 0.0, 0.0)}
    said = {f"x 0 {order}": odds[word].as_dict() for order, word in (("forth", "B"), ("back", "A"))}
    found = rows["pointwise"]["compared"]["kept_apart"]["with_rubrics"]
    found |= {"verdicts": said, "answers": {"x 0": ["x", "", ""]}}
    kept = tmp_path / "kept.json.gz"
    kept.write_bytes(gzip.compress(json.dumps(rows).encode()))
    monkeypatch.setattr(sys, "argv", ["report", "--kept", str(kept)])
    report.main()
    wins = json.loads(capsys.readouterr().out.splitlines()[-1])["wins"]
    assert wins["pointwise"]["with_rubrics"]["log odds"]["probability"] == 1.0
    assert wins["pointwise"]["without_rubrics"]["log odds"]["probability"] == 0.475, "as it was kept"


def test_references_are_answers_from_the_worst_to_the_best_by_the_probabilities(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["references", str(tmp_path / "a" / "references.jsonl")])
    references.main()
    rows = load_queries(str(tmp_path / "a" / "references.jsonl"))
    visits = json.loads(gzip.decompress(report.KEPT.read_bytes()))["ratings_soft"]["visits"]
    first = {visit["query_id"]: visit for visit in visits if visit["epoch"] == 0}
    assert len(rows) == len(first) == 40
    for row in rows:
        visit = first[row["query_id"]]
        scores = [visit["rewards"][visit["answers"].index(text)] for text in row["responses"]]
        assert scores == sorted(scores) and (scores[0], scores[-1]) == (min(visit["rewards"]), max(visit["rewards"]))
