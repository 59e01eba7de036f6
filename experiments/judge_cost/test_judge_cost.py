"""The replay: the page has the record's tables, replays give the record again, and cosines have an oracle."""

import json
from dataclasses import replace
from random import Random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from experiments.judge_cost import dimensions, large_groups
from experiments.judge_cost.replay import (
    RECORD,
    ROWS,
    Agreement,
    Counts,
    Outcome,
    Replay,
    read_record,
    row_of,
    run_all,
)
from experiments.judge_cost.run import SETTINGS, compare_doubts, compare_paper, compare_worlds
from experiments.pages import rows_by_head, tables_of
from experiments.simulated_judge import WORLDS, JudgeErrors, World
from rankbuffer_trl.errors import SettingsError

QUERIES = 200  # those of the page
PAGE, RECORDS = RECORD.parent / "README.md", read_record()


def judge(name: str, noise: float) -> JudgeErrors:
    """Return the judge of a line of a table: a setting with a noise, or a world with a crowd factor."""
    world, _, crowd = name.partition(", crowd ")
    if world in WORLDS:
        return replace(WORLDS[world].settled(World.within), crowd=float(crowd))
    return JudgeErrors(noise=noise, **SETTINGS.get(name, {}))


def kept(replays):
    """Return the counts of replays from the record alone."""
    return {key: Counts(**RECORDS[repr(each)]) for key, each in replays.items()}


def test_the_tables_of_the_page_are_those_of_the_record():
    (paper, found), (worlds, _), (doubts, _) = (
        compare_paper(World(), 1000, QUERIES, kept),
        compare_worlds(World(), QUERIES, kept),
        compare_doubts(World(), 40, kept),
    )
    made = rows_by_head([*paper, *worlds, *doubts])
    shown = [(head, rows) for head, *rows in tables_of(PAGE) if head in made]
    assert len(shown) == 8 and not [row for head, rows in shown for row in rows if row not in made[head]]
    page, (four, two) = PAGE.read_text(), found["goals"].values()
    ratios = [found[name] for name in ("call_ratio", "token_ratio", "computed_ratio", "tau_ratio")]
    goals = four["tau"], two["tau"], two["tau, bias 0.25"]
    for text in (*(f" {each:.3f} | " for each in ratios), *(f"| {each:.2f} to " for each in goals)):
        assert text in page
    assert f"to {four['tokens']:.2f} |" in page and f"| {two['tokens']:.2f} |" in page


def test_the_tables_of_larger_groups_are_those_of_their_record_which_a_replay_gives_again():
    record = json.loads(large_groups.RECORD.read_text())
    assert all(table in PAGE.read_text() for table in large_groups.tables(record).split("\n\n"))
    world, errors = World(rollouts=64), JudgeErrors(crowd=1.4)
    tau = Replay("Lists of 8, 2 times", world, large_groups.ROLLOUTS // 64, errors)().counts().tau
    assert round(tau, 3) == record["64"]["Lists of 8, 2 times"]["tau, noise 0.09, crowd 1.4"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("label", "name", "noise"),
    [
        ("RankBuffer", "independent", 0.3),
        ("List", "bias 0.25", 0.15),
        ("List, 4 passes", "bias 0.25, edges", 0.3),
        ("List, 2 + 2", "biased, crowd 1.4", 0.0),
        ("RRC-SCR", "careful, crowd 1", 0.0),
    ],
)
def test_replay_gives_the_record_again(label, name, noise):
    replays = [Replay(label, World(), QUERIES, judge(name, noise), count) for count in (False, True)]
    (replay,) = (each for each in replays if repr(each) in RECORDS)
    assert run_all({0: replay}, 1) == kept({0: replay})


def test_run_all_makes_what_a_record_lacks_and_nothing_else():
    few, record = {n: Replay("List", World(), n) for n in (1, 2)}, {}
    made = run_all({1: few[1]}, 1, record)
    record[repr(few[1])]["calls"] = 99
    both = run_all(few, 1, record)
    assert made[1].calls == 4 and (both[1].calls, both[2].calls) == (99, 8) and len(record) == 2


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


def test_a_recipe_of_ones_own_is_replayed_by_its_path(tmp_path):
    mine = tmp_path / "mine.yaml"
    mine.write_text("method: listwise\nmethod_args: {passes: 2, rerank_disputed: false}\njudge_samples: 3\n")
    assert row_of(str(mine)) == replace(ROWS["List, 2 passes"], samples=3)
    with pytest.raises(SettingsError, match="no recipe 'nowhere"):
        row_of("nowhere.yaml")


def test_the_page_has_the_tables_of_the_dimensions_and_a_replay_gives_a_cell_again():
    record = json.loads(dimensions.RECORD.read_text())
    assert all(table in PAGE.read_text() for table in dimensions.tables(record).split("\n\n"))
    assert [*record] == [*dimensions.DIMENSIONS] and {*record[dimensions.USUAL]} == {*dimensions.LABELS}
    world, errors = dimensions.DIMENSIONS["place bias 0.6"]
    counts = Replay("List, 2 passes", replace(world, seed=1), dimensions.QUERIES, errors)().counts()
    assert round(counts.tau, 4) == record["place bias 0.6"]["List, 2 passes"]["tau"][1]
