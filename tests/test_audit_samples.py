"""The command `rankbuffer-audit`: its design, a judge of known errors behind HTTP, wrong files.

The samples are those of a simulated policy, and for the embedded judge the references of the quickstart.
"""

import asyncio
import json
import math
import re
import runpy
import sys
from contextlib import nullcontext
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from conftest import QUICKSTART
from helpers.judges import Fake
from helpers.nectar_rows import Model
from helpers.servers import served

from experiments.simulated_judge import JudgeErrors, World, answer
from rankbuffer_tools.audit.card import CARD_RESULTS, card_of, check_card
from rankbuffer_tools.audit.command import AuditConfig, audit, check_same_judge, main
from rankbuffer_tools.audit.measures import MEASURES
from rankbuffer_tools.audit.results import SOFT, Audit, Result, verdict
from rankbuffer_tools.audit.samples import FURTHER, insertions, length_questions, questions, read_rollouts
from rankbuffer_tools.batch import script
from rankbuffer_tools.batch.output import write_rows
from rankbuffer_trl.data._queries import DataError, QueryTable, load_queries
from rankbuffer_trl.errors import SettingsError
from rankbuffer_trl.judge import Endpoint, Judge, Usage
from rankbuffer_trl.judge import _rubric_judge as rubric_judge

HOWTO = str(QUICKSTART / "howto.jsonl")
REFERENCE = ("--dataset_name", HOWTO, "--samples", HOWTO)
QUERIES = 25
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


def run_main(*words) -> dict:
    """Run `rankbuffer-audit` and return what it wrote into its folder, which is the second word."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["rankbuffer-audit", *map(str, words)])
        with pytest.raises(SystemExit) as end:
            main()
    if end.value.code:
        raise end.value
    return json.loads((Path(words[1]) / "audit.json").read_text())


@pytest.fixture(scope="module")
def judged(world, tmp_path_factory):
    """An audit over HTTP whose judge answers the lists of one query in prose at first."""

    def reply(messages, how_often):
        prompt = messages[0]["content"]
        if len(messages) == 1 and "[R7]" in prompt and "\nq3 " in prompt:
            return "let me see"
        return answer(prompt, world.quality, ERRORS)

    model, out = Model(reply), tmp_path_factory.mktemp("audit")
    words = ["--output_dir", out, "--dataset_name", world.folder / "set.jsonl"]
    words += ["--samples", world.folder / "samples.jsonl", "--judge_guard", "false"]
    with served(model.app()) as url:
        words += ["--judge_url", f"{url}/v1", "--judge_model", "writer"]
        found = run_main(*words)
        yield SimpleNamespace(model=model, out=out, words=words, asked=len(model.bodies), found=found)


@pytest.fixture
def audited(judged, capsys, monkeypatch):
    """Run the command again with more words and without its figure. Return what it printed, and its result."""

    def run(*more) -> tuple[str, dict]:
        monkeypatch.setattr("rankbuffer_tools.audit.command.audit_figure", lambda *_: None)
        found = run_main(*judged.words, *more)
        assert len(judged.model.bodies) == judged.asked, "the answers are there"
        return capsys.readouterr().out, found

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


def test_a_price_names_kept_answers_only_where_there_are_some(tmp_path, capsys):
    for kept in (False, True):
        script.announce(Endpoint(), "work", (1, 1), 1.0, 1.0, tmp_path / "answers.jsonl")
        assert ("not asked again" in capsys.readouterr().out) is kept
        (tmp_path / "answers.jsonl").touch()


def test_audit_finds_the_errors_of_a_judge_and_says_its_price_first(judged, audited):
    printed, again = audited()
    assert printed.startswith(f"[price] {QUERIES} queries: {ASKED} questions, about ")
    assert "answers.jsonl holds are not asked again" in printed.splitlines()[2]
    measures = again["measures"]
    assert measures["pairs_first"]["low"] > 0.5 and measures["lists_bias"]["high"] < 0
    assert measures["pairs_label"]["low"] < 0.5 < measures["pairs_label"]["high"]
    assert again["train_with"] == "beyond/listwise_two" and "recipe for it: beyond/listwise_two.yaml." in printed
    asked = {kind: cost["form"] for kind, cost in again["cost"].items()}
    expected = {"insert": 48, "look": 4 * QUERIES, "pair": 10 * QUERIES + 24, "score": 8 * QUERIES}
    assert {kind: form["questions"] for kind, form in asked.items()} == expected
    assert {kind: form["first_malformed"] for kind, form in asked.items()} == dict.fromkeys(expected, 0) | {"look": 4}
    assert judged.asked == 1 + ASKED + 4, "one question without probabilities, and four lists again"


class Killed(BaseException):
    pass


class Simulated(Fake):
    """The simulated judge as a chat client, which is killed after a number of answers."""

    name = "simulated judge"

    def __init__(self, quality, errors, answers=10**9):
        super().__init__(lambda messages: "")
        self.quality, self.errors, self.left = quality, errors, answers
        self.answered = 0

    async def before(self, asked):
        self.left -= 1
        while self.left < 0:
            await asyncio.sleep(0)  # until the answers so far are read
            self.left -= 1
            if self.left < -3000:
                raise Killed
        self.answered += 1

    async def after(self, asked, reply):
        return answer(asked.messages[0]["content"], self.quality, self.errors), Usage(10, 0, 5)


def attempt(world, out, client, monkeypatch, **settings):
    """Audit with a chat client of a test."""
    monkeypatch.setattr(AuditConfig, "judge", lambda self: Judge(client, guard=False))
    files = dict(dataset_name=str(world.folder / "set.jsonl"), samples=str(world.folder / "samples.jsonl"))
    return audit(AuditConfig(**files, output_dir=str(out), **settings))


def test_audit_continues_where_it_was_killed(world, tmp_path, monkeypatch):
    first, second = Simulated(world.quality, ERRORS, answers=301), Simulated(world.quality, ERRORS)
    with pytest.raises(Killed):
        attempt(world, tmp_path, first, monkeypatch)
    assert (tmp_path / "answers.jsonl").read_text().count("\n") == 301  # the first was a trial, and counts
    found = attempt(world, tmp_path, second, monkeypatch)
    assert second.answered == ASKED - 300  # the second is asked for probabilities, and then again
    assert sum(cost.form.questions for cost in found.costs) == ASKED
    assert verdict(found).startswith("Clearly better than chance on 5 of 5.")


def test_audit_tells_a_blind_judge_and_names_no_recipe(world, tmp_path, monkeypatch):
    nothing = dict.fromkeys(world.quality, 0)
    certain = (dict(bias=1000), dict(bias=1000, shape="edges"), dict(labels=1000))
    for errors in (JudgeErrors(noise=100), *(JudgeErrors(noise=0, **each) for each in certain)):
        blind = attempt(world, tmp_path / str(errors), Simulated(nothing, errors), monkeypatch, queries=12)
        assert "no better than chance: do not" in verdict(blind), errors
        assert blind.train_with is None, errors


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


# The embedded judge, on references


def test_main_writes_numbers_and_a_figure_and_prints_a_verdict(tmp_path, capsys):
    out = tmp_path / "deep" / "audit"
    found, printed = run_main("--output_dir", out, *REFERENCE, "--queries", 6, "--seed", 3), capsys.readouterr()
    assert printed.err == "" and printed.out.startswith("no judge is named, so this audits the embedded rubric judge")
    assert "\n[price] 6 queries: 180 questions, about " in printed.out
    assert found["verdict"] in " ".join(printed.out.split()) and "references" in found["verdict"]
    assert re.search(r"put back +1\.00 +1\.00 to 1\.00 +0\.14 +yes", printed.out)
    assert (out / "audit.png").read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    parts = ("queries", "clearly_better", "of", "references", "train_with")
    assert [found[part] for part in parts] == [6, 5, 5, True, None]
    assert found["config"]["seed"] == 3
    assert list(found["measures"]) == [measure.name for measure in MEASURES]
    assert found["measures"]["lists_tau"]["value"] == found["measures"]["soft_labels"]["value"] == 1
    assert len(found["measures"]["put_back"]["values"]) == 6 and len(found["put_back"]) == 6 * 7
    forms = {kind: cost["form"] for kind, cost in found["cost"].items()}
    calls = {"insert": 42, "look": 24, "pair": 6 * 12, "score": 42}
    assert calls == {kind: form["questions"] for kind, form in forms.items()}
    assert calls == {kind: form["first_answers"] for kind, form in forms.items()}
    assert [len(look["lists"]) for look in found["rankings"]] == [4] * 6
    for text, lost in (
        ('{"judge": "j at b"}', False),
        ("no JSON", False),
        ("[]", False),
        ('{"judge": "k at a"}', True),
        ('{"judge": "embedded rubric judge"}', False),
    ):
        (out / "audit.json").write_text(text)
        with pytest.raises(SettingsError, match="holds the audit of k at a: ") if lost else nullcontext():
            check_same_judge(out / "audit.json", "j at a")


def test_main_announces_the_tokens_that_the_judge_then_counts(tmp_path, monkeypatch, capsys):
    """With 4 characters a token, as in English, the announced price is 4/3 of the counted one: no question is more."""
    monkeypatch.setattr(rubric_judge, "count_tokens", lambda text: math.ceil(len(text) / 4))
    run_main("--output_dir", tmp_path, *REFERENCE, "--queries", 4)
    number = r"([\d,]+) prompt.*? ([\d,]+) completion"
    found = re.findall(rf"(?:about|asked in all: 120 requests,) {number}", capsys.readouterr().out)
    (announced, most), (asked, answered) = ([int(each.replace(",", "")) for each in pair] for pair in found)
    assert announced * 3 / 4 == pytest.approx(asked, rel=0.01)
    assert answered <= most <= 1.5 * answered


def test_main_reads_settings_from_a_yaml_and_the_command_line_wins(tmp_path):
    settings = f"dataset_name: {HOWTO}\nsamples: {HOWTO}\nqueries: 9\njudge_guard: false\n"
    (tmp_path / "audit.yaml").write_text(settings)
    words = ("--config", tmp_path / "audit.yaml", "--queries", 2, "--judge_request", '{"top_p": 1}')
    found = run_main("--output_dir", tmp_path, *words, "--probabilities", "false")
    config, measures = found["config"], found["measures"]
    assert measures["soft_pairs_ratings"]["value"] is None and measures["pairs_flip"]["value"] == 0
    assert (config["queries"], config["judge_guard"], config["judge_request"]) == (2, False, {"top_p": 1})


def test_load_draws_queries_by_the_seed_each_at_most_once(tmp_path):
    def drawn(**kwargs):
        groups, _ = AuditConfig(dataset_name=HOWTO, samples=HOWTO, **kwargs).load()
        return [group.query.id for group in groups]

    assert drawn(seed=1) == drawn(seed=1) != drawn(seed=2)
    with pytest.raises(SettingsError, match=r"output_dir .* is a file or lies below one"):
        drawn(output_dir=__file__)
    assert len(set(drawn(queries=20))) == 20
    rows = [json.loads(line) | {"responses": [{"text": "a"}]} for line in Path(HOWTO).read_text().splitlines()]
    write_rows(tmp_path / "set.jsonl", rows)
    assert not AuditConfig(dataset_name=str(tmp_path / "set.jsonl"), samples=HOWTO).load()[1], "no method reads them"
    assert sorted(drawn()) == sorted(json.loads(line)["query_id"] for line in Path(HOWTO).read_text().splitlines())


def test_main_as_a_module_prints_its_error_alone(howto, tmp_path, monkeypatch, capsys, cache):
    (tmp_path / "bare.jsonl").write_text(json.dumps({"query_id": "q", "prompt": howto[0]["prompt"]}) + "\n")
    words = ["rankbuffer-audit", "--dataset_name", HOWTO, "--samples", str(tmp_path / "bare.jsonl")]
    monkeypatch.setattr(sys, "argv", words)
    with pytest.raises(SystemExit) as stop:
        runpy.run_module("rankbuffer_tools.audit.command", run_name="__main__")
    assert re.fullmatch(r"rankbuffer-audit: samples=.*, line 1: responses must be a list .*", stop.value.code)
    assert capsys.readouterr() == ("", ""), "no bar for reading the file either"


# The card of a judge


def test_card_compares_a_judge_on_the_public_set_and_names_no_address(tmp_path, capsys, monkeypatch):
    found = run_main("--output_dir", tmp_path, "--card", "embedded", "--queries", 6)
    file = tmp_path / "embedded.json"
    card = json.loads(file.read_text())
    assert str(file) in capsys.readouterr().out and "/" not in re.sub(r"(beyond|paper)/\w+", "", file.read_text())
    assert (card["judge"], card["queries"], card["decoding"], card["guard"]) == ("embedded", 6, "none", True)
    assert card["questions"] == 6 * 22 + 6 * 12 == sum(cost["form"]["questions"] for cost in found["cost"].values())
    for name, numbers in card["measures"].items():
        assert numbers == pytest.approx([found["measures"][name][key] for key in ("value", "low", "high")], abs=6e-4)
    assert card["measures"].keys() == {*CARD_RESULTS}
    assert card["verdict"] == found["verdict"] and card["soft_noise"] == pytest.approx(found["soft_noise"], abs=6e-4)
    assert card["train_with"] == "beyond/listwise_two", "it reads"
    assert card["tokens"].keys() == found["cost"].keys()
    name, own = "card must be the name of the judge", "leave out dataset_name and samples"
    for words, why in ((["../mine"], name), ([".mine"], name), (["mine", *REFERENCE], own)):
        with pytest.raises(SystemExit, match=why):
            run_main("--output_dir", tmp_path, "--card", *words)
    monkeypatch.setattr("rankbuffer_tools.audit.card.ROOT", tmp_path)
    with pytest.raises(SettingsError, match="a clone of the repository"):
        check_card("mine")


def test_card_names_the_recipe_that_reads_probabilities_if_words_tell_nothing():
    def card(low: float) -> dict:
        measures = [Result(name, "", "", 1, True, {"q": 0.8}, low, 0.9, chance=0.5) for name in (SOFT, "soft_words")]
        measures.append(Result("put_back", "", "", 1, True, {}, None, None, chance=None))
        nothing = dict(references=False, rankings=[], costs=[], moves=[], max_failures=0.25)
        return card_of(Audit("", "", "", results=measures, **nothing), "mine", "none", True)

    assert [card(low)["train_with"] for low in (0.6, 0.4)] == ["beyond/ratings_soft", None]
    assert card(0.6)["measures"][SOFT] == [0.8, 0.6, 0.9] and card(0.6)["measures"]["put_back"] == [None] * 3
