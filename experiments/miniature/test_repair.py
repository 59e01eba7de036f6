"""The regression of the repair finds what was put in, and nothing where nothing was."""

from random import Random

import numpy as np
import pytest

from experiments.miniature.repair import Answer, Repair, centred, study


def answers(worth: float, steps: int = 20) -> list[Answer]:
    """Answers of 24 words drawn from 60, of which the judge pays for one."""
    random, found = Random(0), []
    for step in range(steps):
        for number in range(48):
            words = random.sample(range(60), 24)
            features = {f"the word {word}": 1.0 for word in words} | {"words": random.gauss(30, 5)}
            liked, true = worth * (7 in words), random.gauss(0, 0.25)
            seen = true + liked + random.gauss(0, 0.09), true + random.gauss(0, 0.18)
            found.append(Answer(step, f"q{number // 8}", features, liked, *seen))
    return found


def test_repair_names_the_word_and_predicts_what_it_adds():
    read = answers(0.75, steps=6)
    repair = Repair(read)
    assert repair.named == "7"
    left = np.array([each.liked for each in read]) - repair.predict(read)
    assert left.std() < 0.15, "of a deviation of 0.37"
    assert centred(read[:16], np.arange(16.0)) == pytest.approx([*np.arange(8) - 3.5] * 2)


def test_study_repairs_later_steps_by_earlier_reads_and_does_no_harm():
    found = study(answers(0.75), 0.3, "")
    assert found["explained"] > 0.6 and found["named"] is None, "no weakness has that name"
    none = study(answers(0.0), 0.3, "")
    assert none["explained"] is None and none["added"] < 0.25
