"""The command `rankbuffer-audit`, on the references of the quickstart.

Samples of a policy are in `test_audit_samples.py`.
"""

import json
import math
import re
import runpy
import sys
from pathlib import Path

import pytest
from conftest import QUICKSTART

from rankbuffer_tools.audit.card import card_of
from rankbuffer_tools.audit.command import AuditConfig, main
from rankbuffer_tools.audit.measures import MEASURES
from rankbuffer_tools.audit.results import SOFT, Audit, Result
from rankbuffer_trl.judge import rubric_judge

HOWTO = str(QUICKSTART / "howto.jsonl")


@pytest.fixture
def command(monkeypatch, capsys):
    """Run `rankbuffer-audit` with arguments: what it printed, or its error."""

    def run(*arguments):
        monkeypatch.setattr(sys, "argv", ["rankbuffer-audit", *map(str, arguments)])
        main()
        return capsys.readouterr()

    return run


REFERENCE = ("--dataset_name", HOWTO, "--samples", HOWTO)


def test_main_writes_numbers_and_a_figure_and_prints_a_verdict(command, tmp_path):
    out = tmp_path / "deep" / "audit"
    printed = command(*REFERENCE, "--queries", 6, "--output_dir", out, "--seed", 3)
    assert printed.err == ""
    assert printed.out.startswith("[price] 6 queries: 180 questions, about ")
    assert "embedded rubric judge" in printed.out
    assert "Clearly better than chance on 5 of 5." in printed.out
    assert "The samples are references of the data set." in " ".join(printed.out.split())
    assert re.search(r"put back +1\.00 +1\.00 to 1\.00 +0\.14 +yes", printed.out)
    assert (out / "audit.png").read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    found = json.loads((out / "audit.json").read_text())
    assert found["config"]["seed"] == 3
    assert (found["queries"], found["clearly_better"], found["of"]) == (6, 5, 5)
    assert (found["references"], found["model"], found["advice"]) == (True, None, None)
    assert list(found["measures"]) == [measure.name for measure in MEASURES]
    assert found["measures"]["lists_tau"]["value"] == found["measures"]["soft_labels"]["value"] == 1
    assert len(found["measures"]["put_back"]["values"]) == 6
    calls = {kind: cost["form"]["questions"] for kind, cost in found["cost"].items()}
    assert calls == {"insert": 42, "look": 24, "pair": 6 * 12, "score": 42}
    assert all(cost["form"]["first_answers"] == calls[kind] for kind, cost in found["cost"].items())
    assert len(found["put_back"]) == 6 * 7
    assert [len(look["lists"]) for look in found["looks"]] == [4] * 6


def test_main_announces_the_tokens_that_the_judge_then_counts(command, tmp_path, monkeypatch):
    """With 4 characters a token, as in English, the announced price is 4/3 of the counted one: no question is more."""
    monkeypatch.setattr(rubric_judge, "count_tokens", lambda text: math.ceil(len(text) / 4))
    printed = command(*REFERENCE, "--queries", 4, "--output_dir", tmp_path).out
    announced, most = re.search(r"about ([\d,]+) prompt and ([\d,]+) completion", printed).groups()
    assert "a token counts as 3 characters here; in English it has about 4, which costs a quarter less" in printed
    asked, answered = re.search(r"asked: 120 requests, ([\d,]+) prompt.* ([\d,]+) completion", printed).groups()
    announced, most, asked, answered = (int(text.replace(",", "")) for text in (announced, most, asked, answered))
    assert announced * 3 / 4 == pytest.approx(asked, rel=0.01)
    assert answered <= most <= 1.5 * answered


def test_main_reads_settings_from_a_yaml_and_the_command_line_wins(command, tmp_path):
    (tmp_path / "audit.yaml").write_text(
        f"dataset_name: {HOWTO}\nsamples: {HOWTO}\nqueries: 9\noutput_dir: {tmp_path}\njudge_guard: false\n"
    )
    more = ("--judge_request", '{"top_p": 1}', "--probabilities", "false")
    command("--config", tmp_path / "audit.yaml", "--queries", 2, *more)
    found = json.loads((tmp_path / "audit.json").read_text())
    config, measures = found["config"], found["measures"]
    assert measures["soft_pairs_ratings"]["value"] is None and measures["pairs_flip"]["value"] == 0
    assert (config["queries"], config["judge_guard"], config["judge_request"]) == (2, False, {"top_p": 1})


def test_load_draws_queries_by_the_seed_each_at_most_once():
    def drawn(**kwargs):
        groups, _, _ = AuditConfig(dataset_name=HOWTO, samples=HOWTO, **kwargs).load()
        return [group.query.id for group in groups]

    assert drawn(seed=1) == drawn(seed=1) != drawn(seed=2)
    assert len(set(drawn(queries=20))) == 20
    assert sorted(drawn()) == sorted(json.loads(line)["query_id"] for line in Path(HOWTO).read_text().splitlines())


def test_main_as_a_module_prints_its_error_alone(howto, tmp_path, monkeypatch, capsys, cache):
    (tmp_path / "bare.jsonl").write_text(json.dumps({"query_id": "q", "prompt": howto[0]["prompt"]}) + "\n")
    words = ["rankbuffer-audit", "--dataset_name", HOWTO, "--samples", str(tmp_path / "bare.jsonl")]
    monkeypatch.setattr(sys, "argv", words)
    with pytest.raises(SystemExit) as stop:
        runpy.run_module("rankbuffer_tools.audit", run_name="__main__")
    assert re.fullmatch(r"rankbuffer-audit: samples=.*, line 1: responses must be a list .*", stop.value.code)
    assert capsys.readouterr() == ("", ""), "no bar for reading the file either"


# The card of a judge


def test_card_compares_a_judge_on_the_public_set_and_names_no_address(command, tmp_path, capsys):
    printed = command("--card", "embedded", "--queries", 6, "--output_dir", tmp_path).out
    file = tmp_path / "embedded.json"
    card, found = json.loads(file.read_text()), json.loads((tmp_path / "audit.json").read_text())
    assert str(file) in printed and "/" not in re.sub(r"(beyond|paper)/\w+", "", file.read_text())
    assert (card["judge"], card["queries"], card["decoding"], card["guard"]) == ("embedded", 6, "none", True)
    assert card["questions"] == 6 * 22 + 6 * 12 == sum(cost["form"]["questions"] for cost in found["cost"].values())
    for name, numbers in card["measures"].items():
        assert numbers == pytest.approx([found["measures"][name][key] for key in ("value", "low", "high")], abs=6e-4)
    assert card["verdict"] == found["verdict"] and card["soft_noise"] == pytest.approx(found["soft_noise"], abs=6e-4)
    assert card["train_with"] == (found["advice"] or {}).get("advised"), "it reads, so the advice is about words"
    assert card["tokens"].keys() == found["cost"].keys()
    for arguments, why in (
        (("--card", "../mine"), "card must be the name of the judge"),
        (("--card", ".mine"), "card must be the name of the judge"),
        (("--card", "mine", *REFERENCE), "leave out dataset_name and samples"),
    ):
        with pytest.raises(SystemExit, match=why):
            command(*arguments)


def test_card_names_the_recipe_that_reads_probabilities_if_words_tell_nothing():
    def card(low: float) -> dict:
        measures = [Result(name, "", "", 1, True, {"q": 0.8}, low, 0.9, chance=0.5) for name in (SOFT, "soft_words")]
        found = Audit("", "", "", references=False, looks=[], results=measures, costs=[], moves=[], max_failures=0.25)
        return card_of(found, "mine", "none", True)

    assert [card(low)["train_with"] for low in (0.6, 0.4)] == ["beyond/ratings_soft", None]
    assert card(0.6)["measures"][SOFT] == [0.8, 0.6, 0.9]
