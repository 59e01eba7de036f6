import gzip
import json
import math
import re
from dataclasses import asdict
from pathlib import Path

import pytest

from experiments.fit_doubts import fit
from experiments.real_judge.answers import BETTER, answers_of
from experiments.real_judge.ask import ANCHORS, asked
from experiments.real_judge.passes import RECORD as PASSES
from experiments.real_judge.passes import Scores, pack, question
from experiments.real_judge.passes_report import (
    by_rubric,
    compare,
    costs,
    opinions,
    read_kept,
    read_lines,
    read_passes,
)
from experiments.real_judge.report import Verdict, Way, count, one_order, parameters, read, readings, without_place
from experiments.simulated_judge import RECORDED
from rankbuffer_tools.audit.command import AuditConfig, audit
from rankbuffer_tools.audit.results import verdict as verdict_of
from rankbuffer_trl.groups import Query
from rankbuffer_trl.judge import Reading, Reply, Usage, without_doubt

RECORD = Path(__file__).with_name("qwen2.5-coder-1.5b.jsonl.gz")
QUALITY = {"good": 6, "good_2": 5, "good_cut": 4, "weak": 3, "off_topic": 2, "good_shuffled": 1, "weak_shuffled": 0}


@pytest.fixture
def rows() -> list[dict]:
    rubrics = [{"text": "Says how long.", "weight": 5}]
    rows = [
        {"query_id": id, "prompt": [{"role": "user", "content": f"How? {id}"}], "rubrics": rubrics}
        for id in ("tea", "egg", "rice")
    ]
    good = [row | {"responses": [f"{row['query_id']} takes three long minutes", "three"]} for row in rows]
    return answers_of(good, [row | {"responses": ["it takes no time at all"]} for row in rows])


def verdict(name: str, place: float) -> Verdict:
    """Answer one question as a judge that knows the quality, in log odds beside a preference for the first place."""
    kind, *shown = name.split()
    chances: dict[str | int, float] = {}
    word: object
    if kind.startswith("pair"):
        lead = 0.1 * (QUALITY[shown[0]] - QUALITY[shown[1]]) + place
        chances = {"A": 1 / (1 + math.exp(-lead)), "B": 1 / (1 + math.exp(lead))}
        word = max(chances, key=chances.__getitem__)
    elif kind == "duel":
        word = [QUALITY[shown[0]] + round(place * 10), QUALITY[shown[1]]]
    elif kind.startswith("list"):
        word = sorted(range(len(shown)), key=lambda slot: QUALITY[shown[slot]])
    elif kind == "group":
        word = [QUALITY[each] for each in shown]
    elif kind.startswith("score"):
        better = QUALITY[shown[0]] / 20
        word, chances = 8, {8: 1 - better, 9: better}
    else:
        below = sum(QUALITY[anchor] < QUALITY[shown[0]] for anchor in ANCHORS)
        word = len(ANCHORS) - below if kind == "best_first" else below
        chances = {word: 1.0}
    return Verdict(Reading(word, chances, 0.0, 0.0), 100, 60)


def figures(rows: list[dict], place: float) -> dict[tuple[str, str], dict]:
    """Return the counts of this judge by what is asked and read."""
    names = [name.partition(" ") for name in asked(rows)]
    record = [{name: verdict(name, place) for id, _, name in names if id == row["query_id"]} for row in rows]
    return {(each.name, each.reads): count(record, each) for each in readings()}


def test_answers_of_damage(rows):
    answers = rows[0]["answers"]
    assert answers["good_cut"] == "tea takes"
    assert sorted(answers["good_shuffled"].split()) == sorted(answers["good"].split())
    assert answers["good_shuffled"] != answers["good"]
    assert {row["answers"]["off_topic"] for row in rows} == {row["answers"]["good"] for row in rows}
    assert all(row["answers"]["off_topic"] != row["answers"]["good"] for row in rows)


def test_readings_of_a_judge_without_errors_are_right(rows):
    for (name, reads), found in figures(rows, 0.0).items():
        tied = "rating" in name and reads == "word"
        assert found["share"] == (0.5 if tied else 1), (name, reads)
        assert found["comparisons"] == len(rows) * expected(name), name


def expected(name: str) -> int:
    """Return the number of comparisons of one query."""
    if name == "pair, one order":
        return 2 * len(BETTER)
    if "anchor" in name or "insertion" in name:
        return 3
    return 4 if "five" in name else len(BETTER)


def test_readings_of_a_judge_with_a_place(rows):
    found = figures(rows, 1.0)
    assert found["pair, one order", "word"]["share"] == 0.5
    assert found["pair, both orders", "word"]["tied"] == len(rows) * len(BETTER)
    assert found["pair, both orders", "probabilities"]["share"] == 1
    assert found["pair with each anchor, both orders", "probabilities"]["share"] == 1


def test_parameters_are_those_of_the_judge(rows):
    names = [name.partition(" ") for name in asked(rows)]
    record = [{name: verdict(name, 0.3) for id, _, name in names if id == row["query_id"]} for row in rows]
    found = parameters(record)
    opinions = [0.1 * (QUALITY[better] - QUALITY[worse]) for better, worse in BETTER]
    assert found["place"] == pytest.approx(0.3)
    assert found["opinion_of_a_pair"] == pytest.approx(sum(opinions) / len(opinions))
    assert found["rating_8"] == 1


def test_record_has_the_figures_of_the_page():
    record = read(RECORD)
    found = {(each.name, each.reads): count(record, each) for each in readings()}
    right = {reads: found["rating 0 to 9", reads]["right"] for reads in ("word", "probabilities")}
    assert right == {"word": 160, "probabilities": 276}
    assert found["pair, both orders", "probabilities"]["right"] == 274
    assert found["insertion, two passes", "probabilities"]["right"] == 53
    once = Way("pair, one order", "probabilities", one_order(True), lambda name: name.startswith("pair "))
    assert (count(record, once)["right"], count(without_place(record), once)["right"]) == (409, 511)
    assert sum(map(len, record)) == 2012


def test_recorded_judge_is_fitted_to_the_record():
    fitted, stored = asdict(fit(read(RECORD))), asdict(RECORDED)
    for kind in ("pair", "insertion", "rating", "lists"):
        fitted |= {f"{kind} {name}": value for name, value in fitted.pop(kind).items()}
        stored |= {f"{kind} {name}": value for name, value in stored.pop(kind).items()}
    for name, value in ((name, value) for name, value in stored.items() if type(value) is float):
        assert fitted[name] == pytest.approx(value, rel=0.05, abs=0.005), name


def test_the_audit_that_was_kept_asks_nobody_and_finds_an_opinion_in_probabilities_alone(tmp_path):
    folder = RECORD.parent
    (tmp_path / "answers.jsonl").write_bytes(gzip.decompress((folder / "audit_answers.jsonl.gz").read_bytes()))
    found = audit(
        AuditConfig(
            dataset_name="recipes/small/everyday.jsonl",
            samples=str(folder / "audit_samples.jsonl"),
            queries=30,
            judge_url="http://127.0.0.1:9/v1",  # nobody answers there
            judge_model="judge",
            judge_decoding="json_schema",
            output_dir=str(tmp_path),
        )
    )
    numbers = {name: round(result.value, 2) for name, result in found.measured.items()}
    expected = {"soft_pairs_ratings": 0.78, "soft_words": 0.51, "padded": 0.5, "cut": 0.0}
    assert {name: numbers[name] for name in expected} == expected
    verdict = verdict_of(found)
    assert "greedy verdicts are no better than chance: do not train with them. Its token probabilities are." in verdict
    assert not any(result.clear for result in found.counted)
    assert found.train_with == "beyond/ratings_soft", "as its card says"


def test_question_about_a_group_ends_with_what_is_asked(rows):
    asked = {kind: question(Query.from_row(rows[0]), ["one", "two", "three"], kind) for kind in ("best", "worst")}
    best, worst = asked["best"].prompt(), asked["worst"].prompt()
    assert best.endswith('{"best": <integer from 0 through 2>}') and worst.endswith(
        '{"worst": <integer from 0 through 2>}'
    )
    assert best.partition("Which")[0] == worst.partition("Which")[0], "a server computes the group once"
    assert asked["worst"].read('{"worst": 2}') == 2
    assert re.fullmatch(asked["worst"].verdict.constraint["regex"], '{"worst": 2}')


def test_scores_are_read_with_the_digits_of_each_place(rows):
    asked = question(Query.from_row(rows[0]), ["one", "two"], "scores")
    said = '{"scores": [7, 0]}'
    logprobs = without_doubt(said)
    logprobs["content"][12]["top_logprobs"].append({"token": "³", "logprob": -9.0})
    assert isinstance(asked, Scores)
    assert asked.read_reply(Reply(said, Usage(), logprobs=logprobs)) == [(7, 0), [{"7": 0.0}, {"0": 0.0}]]


def lines_of(seen: dict[str, float], place: list[float], kind: str, query: str) -> list[dict]:
    """Return two opposed passes of a judge that adds a preference for a slot to what it has seen."""
    lines = []
    for order in (list(seen), list(seen)[::-1]):
        weights = {str(slot): math.exp(seen[name] + place[slot]) for slot, name in enumerate(order)}
        chances = {slot: weight / sum(weights.values()) for slot, weight in weights.items()}
        key = " ".join([query, kind, *order, "digest"])
        lines.append({"key": key, "value": {"value": 0, "chances": chances}, "call": {"usage": [9, 4, 1]}})
    return lines


def test_opinions_lose_the_preference_for_a_slot_by_opposed_passes_or_by_the_mean_of_the_others():
    seen = {"one": {"a": 1.0, "b": 0.5, "c": 0.0}, "two": {"a": 0.0, "b": 0.0, "c": 0.0}}
    for place, chosen, out in (([2, 0, -2], slice(0, 2), False), ([2, 0, 5], slice(0, 1), True)):
        lines = [line for query, each in seen.items() for line in lines_of(each, place, "worst", query)]
        found = read_passes(lines)[3]
        assert found["one"][0].tokens == {"worst": [10, 6]}
        said = opinions(found, {"worst": -1}, chosen, out)["one"]
        assert said["c"] - said["b"] == pytest.approx(said["b"] - said["a"])
        assert said["c"] > said["b"]


def test_the_record_of_passes_has_the_figures_of_the_page():
    lines, kept = read_lines(PASSES), read_kept()
    rows = compare(read_passes(lines), kept)
    found = {(row["read"], row["passes"], row["slot means"]): [*row.values()][3:] for row in rows}
    two = [
        "0.88 (0.75 to 0.94), 96",
        "0.60 (0.48 to 0.71), 144",
        "0.44 (0.32 to 0.58), 36",
        "0.64 (0.58 to 0.69), 392",
    ]
    assert found["best", "two", ""][:4] == two
    assert found["best", "one", "out"][0] == "0.86 (0.75 to 0.93), 96"
    assert found["best less worst", "two", ""][3].startswith("0.65") and found["worst", "two", ""][0].startswith(
        "0.52"
    )
    assert found["soft ratings", "", ""][0] == "0.93 (0.78 to 0.98), 96"
    tokens = {(row["answers"], row["asked"]): (row["tokens"], row["computed"]) for row in costs(read_passes(lines))}
    assert tokens[8, "best"] == (658, 489)
    rated = {row["read"]: (row["right"], row["less the one rating"]) for row in by_rubric(lines, kept)}
    assert rated["words"][0] == 0.815 and rated["probabilities"] == (0.969, "-0.015 ± 0.030")


def test_no_label_of_one_token_is_beyond_the_list_of_a_server():
    numbers = [
        each
        for verdicts in read(RECORD)
        for name, v in verdicts.items()
        if not name.startswith("score10")
        for each in v.reading.chances.values()
    ]
    for path in (PASSES, RECORD.with_name("audit_answers.jsonl.gz")):
        for value in (line["value"] for line in read_lines(path)):
            if isinstance(value, dict):
                numbers += value["chances"].values()
            elif isinstance(value, list) and isinstance(value[1], list):
                assert all(len(place) == 10 for place in value[1])
                numbers += [1.0] * 10 * len(value[1])
    assert len(numbers) == 16_210 and min(numbers) > 0


def test_pack_keeps_what_the_report_reads(tmp_path):
    line = {
        "key": "q best 0 1 x",
        "value": {"value": 1, "chances": {"0": 1 / 3, "1": 2 / 3}},
        "call": {"usage": [1, 0, 1]},
    }
    (tmp_path / "log").write_text(json.dumps(line) + "\n")
    pack(tmp_path / "log", tmp_path / "record.gz")
    assert read_passes(read_lines(tmp_path / "record.gz"))[2].keys() == {"q"}
