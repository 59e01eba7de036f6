"""The audit of samples of a policy: its design, a judge of known errors behind HTTP, budgets, labels, wrong files."""

import asyncio
import json
import re
import sys
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from conftest import ROOT
from helpers.http_server import served
from helpers.nectar_rows import Model

from experiments.simulated_judge import JudgeErrors, World, answer
from rankbuffer_tools.audit.command import AuditConfig, audit, main, method_costs
from rankbuffer_tools.audit.labels import read_labels
from rankbuffer_tools.audit.results import ESTIMATES, verdict
from rankbuffer_tools.audit.samples import (
    FURTHER,
    insertions,
    length_questions,
    pairs_of,
    questions,
    read_rollouts,
)
from rankbuffer_tools.jobs.output import write_rows
from rankbuffer_tools.jobs.reach import estimate_tokens
from rankbuffer_trl.data.queries import DataError, QueryTable, load_queries
from rankbuffer_trl.judge import Call, Judge, Usage

QUERIES = 25  # four pairs each: as many as labels are needed
WORLD = World(empty=0, tokens=(12, 12, 12, 12), spread=0.3, seed=2)
ERRORS = JudgeErrors(noise=0.09, crowd=1.5, bias=0.12)  # a group's spread is 0.25, so the bias is about a half of it
ASKED = QUERIES * 22 + 6 * 12


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    """A data set, samples of a policy, and the quality of each response by its first word."""
    folder = tmp_path_factory.mktemp("world")
    groups, quality = [], {}
    for number in range(QUERIES):
        visits, qualities = WORLD.visits(number, QUERIES)
        groups.append(visits[0])
        quality |= qualities
    rows = [{"query_id": g.query.id, "prompt": g.query.prompt} for g in groups]
    rubrics = [[asdict(rubric) for rubric in g.query.rubrics] for g in groups]
    write_rows(folder / "set.jsonl", (row | {"rubrics": each} for row, each in zip(rows, rubrics, strict=True)))
    texts = ({"query_id": g.query.id, "responses": [one.text for one in g.rollouts]} for g in groups)
    write_rows(folder / "samples.jsonl", texts)
    return SimpleNamespace(folder=folder, groups=groups, quality=quality)


@pytest.fixture(scope="module")
def table(world):
    return QueryTable(load_queries(str(world.folder / "set.jsonl")))


def arguments(world, out: Path, *more) -> list[str]:
    files = ["--dataset_name", world.folder / "set.jsonl", "--samples", world.folder / "samples.jsonl"]
    return ["rankbuffer-audit", *map(str, [*files, "--output_dir", out, "--judge_guard", "false", *more])]


@pytest.fixture(scope="module")
def judged(world, tmp_path_factory):
    """An audit over HTTP whose judge answers the lists of one query in prose at first."""

    def reply(messages, how_often):
        prompt = messages[0]["content"]
        if len(messages) == 1 and "[R7]" in prompt and "\nq3 " in prompt:
            return "let me see"
        return answer(prompt, world.quality, ERRORS)

    model, out = Model(reply), tmp_path_factory.mktemp("audit")
    with served(model.app()) as url, pytest.MonkeyPatch.context() as patch:
        server = ("--judge_url", f"{url}/v1", "--judge_model", "writer")
        patch.setattr(sys, "argv", arguments(world, out, *server))
        main()
        yield SimpleNamespace(model=model, out=out, server=server, asked=len(model.bodies), found=found(out))


def found(out: Path) -> dict:
    return json.loads((out / "audit.json").read_text())


@pytest.fixture
def audited(judged, world, capsys, monkeypatch):
    """Run the command again with more words and without its figure. Return what it printed, and its result."""

    def run(*words) -> tuple[str, dict]:
        monkeypatch.setattr("rankbuffer_tools.audit.command.audit_figure", lambda *_: None)
        monkeypatch.setattr(sys, "argv", arguments(world, judged.out, *judged.server, *words))
        main()
        return capsys.readouterr().out, found(judged.out)

    return run


# The design


def test_questions_show_every_sample_at_the_same_mean_slot_and_every_pair_in_both_orders(world):
    first_orders = set()
    for group in world.groups:
        asked = questions(group, seed=0)
        by_kind = {what: [key[1] for key in asked if key[0] == what] for what, _ in asked}
        lists, pairs, crossed = (by_kind[what] for what in ("list", "pair", "crossed"))
        assert [len(lists), len(pairs), len(crossed), len(by_kind["score"])] == [4, 8, 2, 8]
        for sample in range(8):
            slots = np.array([order.index(sample) for order in lists])
            assert slots.mean() == 3.5 and np.abs(slots - 3.5).mean() == 2
        assert lists[1] == lists[0][::-1] and lists[3] == lists[2][::-1]
        assert sorted(pairs[::2] + pairs[1::2]) == sorted(pair[::-1] for pair in pairs)
        assert sorted(sample for pair in pairs[::2] for sample in pair) == list(range(8))
        assert crossed == pairs[:2]
        first_orders.add(lists[0])
        neighbours = {frozenset(lists[0][i : i + 2]) for i in range(0, 8, 2)}
        assert neighbours != {frozenset(pair) for pair in pairs}, "pairs do not follow the slots of a list"
    assert len(first_orders) == QUERIES


def test_questions_have_no_prompt_twice_and_another_seed_shows_other_orders(world):
    prompts = [one.prompt() for group in world.groups for one in questions(group, 0).values()]
    assert len(set(prompts)) == len(prompts) == QUERIES * 22
    others = {one.prompt() for group in world.groups for one in questions(group, 1).values()}
    ratings = QUERIES * 8
    assert len(others & set(prompts)) < ratings + 0.2 * QUERIES * 10  # a pair may come again, a list hardly


def test_questions_cost_at_most_two_per_cent_of_the_papers_run():
    def tokens(question):  # a word or a punctuation mark, as in experiments/judge_cost
        return len(re.findall(r"\w+|[^\w\s]", question.prompt() + question.verdict.longest))

    groups = [World(empty=0).visits(number, 50)[0][0] for number in range(20)]
    each = sum(tokens(one) for group in groups for one in questions(group, 0).values()) / len(groups)
    further = [insertions(group, range(8)) | length_questions(group) for group in groups]
    inserted = sum(tokens(one) for asked in further for one in asked.values()) / len(groups)
    whole = 1000 * 4 * 24_170  # queries, epochs, RankBuffer's tokens per group
    assert 50 * each + FURTHER * inserted < 0.02 * whole


# A judge of known errors


def test_audit_finds_the_errors_of_a_judge_and_says_its_price_first(judged, audited):
    printed, again = audited()
    assert len(judged.model.bodies) == judged.asked, "a second run asks nothing"
    assert printed.startswith(f"[price] {QUERIES} queries: {ASKED} questions, about ")
    assert "answers.jsonl holds are not asked again" in printed.splitlines()[2]
    model, measures = again["model"], again["measures"]
    assert list(model) == list(ESTIMATES)
    for name, truth in {"list_bias": 0.48, "pair_bias": 0.48, "list_noise": 0.54}.items():
        assert 0 < model[name]["low"] < truth < model[name]["high"], name
    assert measures["pairs_first"]["low"] > 0.5 and measures["lists_bias"]["high"] < 0
    assert measures["pairs_label"]["low"] < 0.5 < measures["pairs_label"]["high"]
    assert all(one["says"].split()[0] in printed for one in model.values())
    assert "Truth is not measured" in printed and "accuracy of" not in printed
    asked = {kind: cost["form"] for kind, cost in again["cost"].items()}
    forms = {kind: (form["questions"], form["first_malformed"]) for kind, form in asked.items()}
    assert forms == {
        "insert": (48, 0),
        "look": (4 * QUERIES, 4),
        "pair": (10 * QUERIES + 24, 0),
        "score": (8 * QUERIES, 0),
    }
    assert judged.asked in (2 + ASKED + 4, 3 + ASKED + 4)  # two trials, a list of that query may be one, and repeats


class Killed(BaseException):
    pass


class Simulated:
    """The simulated judge as a chat client, which is killed after a number of answers."""

    name = "simulated judge"

    def __init__(self, quality, errors, answers=10**9):
        self.quality, self.errors, self.left = quality, errors, answers
        self.answered = 0

    async def complete(self, messages, *, question, seed, tally):
        self.left -= 1
        while self.left < 0:
            await asyncio.sleep(0)  # until the answers so far are read
            self.left -= 1
            if self.left < -3000:
                raise Killed
        self.answered += 1
        tally.attempts += 1
        return answer(messages[0]["content"], self.quality, self.errors), Usage(10, 0, 5)

    async def close(self):
        pass


def attempt(world, out, client, monkeypatch, **settings):
    """Audit with a chat client of a test."""
    monkeypatch.setattr(AuditConfig, "judge", lambda self: Judge(client, guard=False))
    files = dict(dataset_name=str(world.folder / "set.jsonl"), samples=str(world.folder / "samples.jsonl"))
    return audit(AuditConfig(**files, output_dir=str(out), **settings))


def test_audit_continues_where_it_was_killed(world, tmp_path, monkeypatch):
    first, second = Simulated(world.quality, ERRORS, answers=301), Simulated(world.quality, ERRORS)
    with pytest.raises(Killed):
        attempt(world, tmp_path, first, monkeypatch)
    assert (tmp_path / "answers.jsonl").read_text().count("\n") == 300  # the first was a trial; the second is soft
    found = attempt(world, tmp_path, second, monkeypatch)
    assert second.answered == ASKED - 299
    assert sum(cost.form.questions for cost in found.costs) == ASKED
    assert verdict(found).startswith("Clearly better than chance on 5 of 5.")


def test_audit_tells_a_blind_judge_and_models_no_opinion_of_it(world, tmp_path, monkeypatch):
    nothing = dict.fromkeys(world.quality, 0)
    for errors in (
        JudgeErrors(noise=100),
        JudgeErrors(noise=0, bias=1000),
        JudgeErrors(noise=0, bias=1000, shape="edges"),
        JudgeErrors(noise=0, labels=1000),
    ):
        blind = attempt(world, tmp_path / str(errors), Simulated(nothing, errors), monkeypatch, queries=12)
        assert "cannot be told from guessing" in verdict(blind), errors
        assert blind.estimates is blind.advice is None, errors


# Budgets and labels, on the answers of the audit above


def test_audit_decides_by_a_budget_which_methods_fit(judged, audited):
    rows = {row["recipe"]: row for row in judged.found["advice"]["rows"]}
    assert all(row["fits"] for row in rows.values())
    assert all((ROOT / "recipes" / f"{recipe}.yaml").is_file() for recipe in rows)
    tokens = rows["beyond/listwise_two"]["tokens"]
    printed, result = audited("--budget", tokens)
    bound = result["advice"]
    fit = {recipe for recipe, row in rows.items() if row["tokens"] <= tokens}
    assert {row["recipe"] for row in bound["rows"] if row["fits"]} == fit
    assert bound["rule"] == "beyond/listwise_two"
    assert all(recipe in printed for recipe in rows) and bound["sentences"][0] in printed
    prices = ("--judge_prompt_price", 1, "--judge_completion_price", 2)
    printed, result = audited("--epochs", 8, "--price_budget", 1e-6, *prices)
    priced = result["advice"]
    assert priced["advised"] is None and not any(row["fits"] for row in priced["rows"])
    doubled = {recipe: pytest.approx(2 * row["tokens"]) for recipe, row in rows.items()}
    assert {row["recipe"]: row["tokens"] for row in priced["rows"]} == doubled
    assert "at the prices given" in printed
    assert len(judged.model.bodies) == judged.asked, "no budget asks anything"


def labelled(judged, world) -> list[dict]:
    """Label every pair that the audit asked about by quality."""
    rows = []
    for row in map(json.loads, (judged.out / "pairs.jsonl").read_text().splitlines()):
        qualities = [world.quality[text.split(" ")[0]] for text in row["responses"]]
        better = qualities.index(max(qualities))
        pair = row["numbers"]
        rows.append({"query_id": row["query_id"], "better": pair[better], "worse": pair[1 - better]})
    return rows


def test_audit_bounds_the_lasting_error_by_labels(judged, audited, world, tmp_path):
    write_rows(tmp_path / "labels.jsonl", labelled(judged, world))
    printed, result = audited("--labels", tmp_path / "labels.jsonl")
    bound = result["model"]["lasting"]
    assert bound["low"] < 0.1 and bound["value"] < 0.3  # the judge has none; better and worse exchanged give 1
    assert "lasting error, at most" in printed
    assert len(judged.model.bodies) == judged.asked


def test_read_labels_refuses_wrong_labels_in_one_line(judged, world, table, tmp_path):
    path = tmp_path / "labels.jsonl"
    groups = read_rollouts(str(world.folder / "samples.jsonl"), table)
    pairs = {query_id: pairs_of(group, seed=0) for query_id, group in groups.items()}
    rows = labelled(judged, world)
    assert len(rows) == 100
    write_rows(path, rows)
    assert read_labels(str(path), pairs)[0] == tuple(rows[0].values())
    mixed = {"query_id": "q1", "better": pairs["q1"][0][0], "worse": pairs["q1"][1][0]}  # not one pair
    turned = rows[0] | {"better": rows[0]["worse"], "worse": rows[0]["better"]}
    name = "query_id, better and worse must name a pair"
    bad = ({"better": 99}, {"better": rows[0]["worse"]}, {"query_id": "nobody"}, {"query_id": 3}, {"worse": None})
    wrong = [([*rows[1:], rows[0] | one], f"line 100: {name}") for one in bad]
    wrong += [([*rows, mixed], f"line 101: {name}")]
    wrong += [([*rows, turned], "line 101: an earlier row has a label of the same pair")]
    wrong += [(rows[1:], "has 99 rows, and fewer than 100 say nothing")]
    for written, said in wrong:
        write_rows(path, written)
        with pytest.raises(DataError, match=f"^labels=.*{said}.*$"):
            read_labels(str(path), pairs)


# Files of samples


def test_read_samples_keeps_their_order_each_text_once_and_eight_at_most(world, table, tmp_path):
    texts = [f"text {i}" for i in range(10)]
    write_rows(tmp_path / "s.jsonl", [{"query_id": "q4", "responses": [texts[0], *texts], "more": 1}])
    group = read_rollouts(str(tmp_path / "s.jsonl"), table)["q4"]
    assert [(one.id, one.text) for one in group.rollouts] == list(enumerate(texts[:8]))
    assert group.query == replace(world.groups[4].query, responses=())


def test_read_samples_finds_a_row_without_an_id_by_its_prompt(tmp_path):
    write_rows(tmp_path / "set.jsonl", [{"prompt": "Why?", "rubrics": [{"text": "Says why.", "weight": 1}]}])
    write_rows(tmp_path / "s.jsonl", [{"prompt": "Why?", "responses": ["a", "b", "c", "d"]}])
    (query_id,) = read_rollouts(str(tmp_path / "s.jsonl"), QueryTable(load_queries(str(tmp_path / "set.jsonl"))))
    assert query_id.startswith("prompt-")


def test_read_samples_refuses_wrong_ones_in_one_line(table, tmp_path):
    path, four = tmp_path / "s.jsonl", ["a", "b", "c", "d"]

    def row(query_id="q1", responses=four, **more):
        return {"query_id": query_id, "responses": responses, **more}

    for lines, said in (
        (["{"], "line 1: is not JSON"),
        (["[1]"], "must be a JSON object"),
        ([row(), {"query_id": "q2"}], "line 2: responses must be a list of text"),
        ([row(responses=[*four, " "])], "line 1: responses[4] must be non-empty text"),
        ([row(responses=["a", "a", "b", "c"])], "has 3 different responses, and the audit needs 4"),
        ([row("q99")], "query 'q99' is not in the data set, or has another prompt there"),
        ([row(prompt="Else?")], "or has another prompt there"),
        ([row()] * 2, "line 2: query 'q1' has samples in a row before"),
        ([], "has no rows"),
    ):
        path.write_text("".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines))
        with pytest.raises(DataError, match=re.escape(said)) as refused:
            read_rollouts(str(path), table)
        assert "\n" not in str(refused.value) and str(refused.value).startswith(f"samples={path}"), said
    with pytest.raises(DataError, match=r"samples=nowhere.jsonl is not a file"):
        read_rollouts("nowhere.jsonl", table)


def test_method_costs_estimate_the_tokens_that_a_server_does_not_count(world):
    config, none = AuditConfig(dataset_name="set.jsonl", samples="samples.jsonl"), Usage(0, 0, 0)
    asked = list(questions(world.groups[0], 0).values())
    calls = [Call("", one.kind, one.query_id, "judge", "parsed", 1, none, none, 1.0) for one in asked]
    costs = method_costs(config, 10, asked, calls)
    for tokens, kind in ((costs.in_list, "look"), (costs.in_pair, "pair")):
        alike = [one for one in asked if one.kind == kind]
        assert tokens == pytest.approx([sum_ / len(alike) for sum_ in estimate_tokens(alike, config.judge_guard)])
        assert min(tokens) > 0
