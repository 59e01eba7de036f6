"""The plain measures of answers: each against a slow reader, any text, and what they say of a group's rewards."""

import re
import threading

import pytest
from conftest import group, numbers
from hypothesis import given
from hypothesis import strategies as st

from rankbuffer_trl.groups import Rubric
from rankbuffer_trl.monitoring._probes import probe, probe_groups, probe_metrics, summary
from rankbuffer_trl.rewards._method import GroupScore

RUBRICS = (Rubric("Says what is needed: a pan, boiling water.", 5), Rubric("Names brands.", -2))


def test_probe_reads_length_markup_and_words_of_the_rubrics():
    for text, words, markup, share in (
        ("", 0, 0, 0),
        ("Boil the water in pans.", 5, 0, 1),
        ("# Water\nBrands: none", 3, 1, 1 / 3),
        ("Start:\n\t- a pan", 3, 1, 1 / 3),
        ("1) rinse\n2) boil", 4, 1, 1 / 3),
        ("\n10. rinse", 2, 1, 0),
        ("-5 degrees, 3.5 cups, #tag, a - b", 8, 0, 0),
        ("水を沸かす", 1, 0, 0),
    ):
        found = probe(text, RUBRICS)
        assert (found["words"], found["markup"]) == (words, markup), text
        assert found["rubric_words"] == pytest.approx(share), text
    assert "rubric_words" not in probe("x", ()) and "rubric_words" not in probe("x", [Rubric("水を沸かす", 1)])


def slow_repeats(text: str) -> float:
    grams = []
    words = re.findall(r"\w+", text.lower())
    while len(words) >= 4:
        grams.append(words[:4])
        words = words[1:]
    return sum(gram in grams[:i] for i, gram in enumerate(grams)) / len(grams) if grams else 0.0


@given(st.lists(st.sampled_from("a b C c".split())).map(" ".join))
def test_probe_counts_the_4_grams_that_came_before(text):
    assert probe(text)["repeated"] == pytest.approx(slow_repeats(text))


@given(st.text(st.characters(exclude_categories=())))
def test_probe_of_any_text_is_a_number_of_its_range(text):
    found = probe(text, (Rubric(text, 1),))
    assert found["words"] >= 0 and all(0 <= found[name] <= 1 for name in found if name != "words")


def test_summary_follows_the_rewards_of_each_group_and_leaves_out_what_is_tied():
    def one(*pairs):
        return [({"words": float(words), "markup": 1.0}, reward) for words, reward in pairs]

    found = summary([one((1, -1.0), (2, 0.0), (9, 1.0), (5, None)), one((3, 1.0), (4, -1.0)), [], one((6, 0.5))])
    assert found == {"words": 30 / 7, "words_with_reward": (1 - 1) / 2, "markup": 1.0}
    assert summary([one((1, 0.5), (2, 0.5))]) == {"words": 1.5, "markup": 1.0}, "rewards that tie say nothing"
    assert summary([]) == summary([[]]) == {}


def test_probe_metrics_are_of_the_answered_rollouts_of_a_step():
    groups = [group(numbers(), line, 0) for line in ("- 7 8", "1 2 3")]
    scores = [GroupScore((-1.0, None, 1.0)), GroupScore((-1.0, 0.0, 1.0))]
    expected = {"probe/words": 1.0, "probe/markup": 0.0, "probe/repeated": 0.0, "probe/rubric_words": 0.0}
    expected["probe/commonest_word"] = 1.0
    assert probe_metrics(probe_groups(groups), scores) == expected
    assert probe_metrics([], []) == {}


def test_probes_are_made_while_the_judge_is_waited_for(training, monkeypatch):
    """A fault of theirs loses the probes alone. They know no reward yet."""
    seen = []

    def probing(groups):
        seen.append((threading.current_thread() is threading.main_thread(), len(groups)))
        raise RuntimeError("odd text")

    monkeypatch.setattr("rankbuffer_trl.training._reward_function.probe_groups", probing)
    trainer = training(max_steps=1)
    trainer.train()
    assert seen == [(False, 3)] and "rewards/rank_reward/mean" in trainer.state.log_history[0]
