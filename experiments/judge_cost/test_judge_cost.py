"""The replay: stored figures come out again, the judges of records fill their tables, cosines have an oracle."""

from dataclasses import replace
from random import Random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from experiments.judge_cost.replay import Agreement, Outcome, Replay
from experiments.judge_cost.run import CROWDS, DOUBTED, PAIRS, SETTINGS, compare_doubts, compare_worlds
from experiments.judge_cost.tables import COMPARED
from experiments.simulated_judge import WORLDS, JudgeErrors, World

QUERIES = 200  # those of the README


def judge(name: str, noise: float) -> JudgeErrors:
    """Return the judge of a line of a table: a setting with a noise, or a world with a crowd factor."""
    world, _, crowd = name.partition(", crowd ")
    if world in WORLDS:
        return replace(WORLDS[world].settled(World.within), crowd=float(crowd))
    return JudgeErrors(noise=noise, **SETTINGS.get(name, {}))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("label", "name", "noise", "tau"),
    [
        ("RankBuffer", "independent", 0.3, 0.456),
        ("List", "bias 0.25", 0.15, 0.597),
        ("List, 4 looks", "bias 0.25, edges", 0.3, 0.640),
        ("List, 2 + 2", "biased, crowd 1.4", 0.0, 0.752),
        ("RRC-SCR", "careful, crowd 1", 0.0, 0.869),
    ],
)
def test_replay_gives_the_figure_of_the_readme_again(label, name, noise, tau):
    assert round(Replay(label, World(), QUERIES, judge(name, noise))().mean_tau, 3) == tau


@pytest.mark.slow
def test_compare_worlds_fills_the_tables():
    tables, taus = compare_worlds(World(), 1, 1)
    cells = [f"{name}, crowd {crowd:g}" for name in WORLDS for crowd in CROWDS]
    labels = (*PAIRS[:3], *COMPARED)
    assert [table.row_count for table in tables] == [len(cells), len(WORLDS), len(COMPARED) - 1, len(labels)]
    assert list(taus) == [f"{label}, {cell}" for cell in cells for label in labels]
    for label in PAIRS:  # pairs and single responses know no crowd
        assert all(len({taus[f"{label}, {name}, crowd {crowd:g}"] for crowd in CROWDS}) == 1 for name in WORLDS)


def test_compare_doubts_has_a_row_for_words_and_one_for_probabilities():
    tables, taus = compare_doubts(World(), 3, 1)
    assert [list(table.columns[0].cells) for table in tables] == [list(DOUBTED)] * 2 == [list(taus)] * 2
    calls = dict(zip(DOUBTED, map(float, tables[0].columns[1].cells), strict=True))
    assert calls["RankBuffer, soft"] == calls["Coarse-only"] < calls["RankBuffer"]
    assert taus["Soft ratings"] > taus["GRPO"] and taus["Soft pairs"] > taus["RRC-SCR"]


rewards = st.lists(st.floats(-1, 1).map(lambda x: round(x, 3)), min_size=3, max_size=8)


@settings(max_examples=30)
@given(groups=st.lists(rewards, min_size=2, max_size=4), seed=st.integers(0, 99))
def test_outcome_has_the_cosines_of_the_advantages(groups, seed):
    groups = [*groups, [0.1] * 3]  # three times 0.1 is not 0.3
    random = Random(seed)
    qualities = [[random.gauss(0, 1) for _ in group] for group in groups]
    outcome = Outcome(agreements=[Agreement.of(*pair) for pair in zip(groups, qualities, strict=True)])
    for divided in (False, True):
        own, true = [], []
        for rewards, values in zip(groups, qualities, strict=True):
            advantage = np.array(rewards) - np.mean(rewards)
            size = np.std(rewards, ddof=1)
            own += list(advantage / size if divided and len(set(rewards)) > 1 else advantage)
            true += list(np.array(values) - np.mean(values))
        if np.linalg.norm(own) > 1e-9:
            cosine = np.dot(own, true) / np.linalg.norm(own) / np.linalg.norm(true)
            assert outcome.cosine_of_run(divided) == pytest.approx(cosine, abs=1e-6)
    for agreement, rewards, values in zip(outcome.agreements, groups, qualities, strict=True):
        expected = np.corrcoef(rewards, values)[0, 1] if len(set(rewards)) > 1 else 0.0
        assert agreement.cosine == pytest.approx(expected, abs=1e-6)
