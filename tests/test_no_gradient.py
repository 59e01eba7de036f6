"""Generations without a gradient are named with their cause, once."""

import pytest
from conftest import group, numbers, scripted_judge
from helpers.scripted import ScriptedTrainer

from rankbuffer_trl.monitoring._no_gradient import (
    CAUSES,
    TIED_GENERATIONS,
    GradientMonitor,
    Pull,
    TieMonitor,
    no_gradient,
)
from rankbuffer_trl.rewards._method import GroupScore


@pytest.mark.parametrize(
    ("advantages", "tokens", "unscored", "cause"),
    [
        ("1 -1 0 0", "1 2 3 4", 0, None),
        ("1 -1 0 0", "1 1 2 3", 0, "equal"),
        ("1 -1 -1 1", "1 1 1 2", 0, None),
        ("0 0 6e-4 -6e-4", "1 1 2 2", 0, "equal"),
        ("0 0 6e-4 -6e-4", "1 2 3 4", 0, "tied"),
        ("0 0 0 0", "1 2 3 4", 1, "unscored"),
        ("1 -1 0 0", "- - - -", 0, "masked"),
        ("1 -1 0 0", "- - 1 2", 0, "masked"),
        ("0 0 0 0", "- - 1 2", 0, "tied"),
        ("1 -1 0 0", "- 1 1 2", 0, None),
    ],
)
def test_no_gradient_names_the_cause(advantages, tokens, unscored, cause):
    given = zip(advantages.split(), tokens.split(), strict=True)
    pulls = [Pull(float(advantage), None if each == "-" else int(each)) for advantage, each in given]
    assert no_gradient(pulls, 2, unscored) == cause


def test_gradient_monitor_warns_in_the_third_generation_in_a_row_and_once_per_cause():
    tied, equal, good = ([Pull(a, 1), Pull(-a, other)] for a, other in ((0, 2), (0, 1), (1, 2)))
    seen = GradientMonitor(2, beta=0.1)
    said = [seen.check(each, 0) for each in (tied, tied, good, tied, tied, tied, tied, equal, equal)]
    assert [bool(each) for each in said] == [False] * 5 + [True, False, True, False]
    assert CAUSES["tied"] in said[5] and CAUSES["equal"] in said[7] and "beta" in said[7]
    cut = GradientMonitor(2, beta=0.1)
    assert "beta" not in [cut.check([Pull(1, None)] * 2, 0) for _ in range(3)][-1]


def test_tie_monitor_warns_once_of_a_third_generation_in_a_row_in_which_nearly_all_answers_tie():
    texts = " ".join(map(str, range(32)))
    most, all_, few = (tuple([0.0] * n + [1.0] * (32 - n)) for n in (31, 32, 16))
    seen = TieMonitor()
    said = [
        seen.check([group(numbers(), texts, 0)], [GroupScore(rewards)])
        for rewards in (most, most, few, most, most, all_, most, most, most, most, most, most)
    ]
    assert [bool(each) for each in said] == [False] * 8 + [True] + [False] * 3 and said[8].startswith("94% of")
    assert not any(TieMonitor().check([group(numbers(), "1 " * 32, 0)], [GroupScore(most)]) for _ in range(3))


class Cut(ScriptedTrainer):
    """A policy whose completions are all cut off."""

    def _generate_single_turn(self, *args, **kwargs):
        ids, logprobs = super()._generate_single_turn(*args, **kwargs)
        return [[*each[:-1], 5] for each in ids], logprobs


class Full(ScriptedTrainer):
    """A policy whose completions all differ, and all are answers."""

    def script(self, step, prompt, place):
        return f"Answer {place} of {step}."


class Collapsed(ScriptedTrainer):
    """A policy with one completion for each prompt."""

    def script(self, step, prompt, place):
        return super().script(1, prompt, 1)


@pytest.mark.parametrize(
    ("cause", "cls", "settings"),
    [
        ("masked", Cut, {"mask_truncated_completions": True}),
        ("equal", Collapsed, {"judge_during_generation": False}),
        ("tied", Full, {"judge": scripted_judge(lambda _: '{"position": 2}', guard=True), "judge_max_failures": 1.0}),
        ("unscored", Full, {"judge": scripted_judge(lambda _: "no", guard=True), "judge_max_failures": 1.0}),
        (None, ScriptedTrainer, {}),
    ],
)
def test_trainer_warns_of_a_run_that_cannot_learn(training, caplog, monkeypatch, cause, cls, settings):
    monkeypatch.setattr("rankbuffer_trl.training._state.first_question", lambda *_: None)
    monkeypatch.setattr("rankbuffer_trl.monitoring._no_gradient.MANY_TIES", -1)
    settings = {"format_weight": 0.0, **settings}
    trainer = training(cls=cls, max_steps=TIED_GENERATIONS + 1, **settings)
    trainer.train()
    warnings = [text for text in caplog.messages if "has a gradient" in text]
    assert len(warnings) == bool(cause) and all(CAUSES[cause] in text for text in warnings)
    assert cause or "pairs of different answers have equal rewards" in caplog.text
