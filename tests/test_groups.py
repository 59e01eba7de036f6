"""Which rubrics a visit leaves out."""

from dataclasses import replace
from statistics import fmean

from conftest import numbers
from hypothesis import given
from hypothesis import strategies as st

from rankbuffer_trl.groups import Rubric, drop_rubrics

FIVE = replace(numbers(), rubrics=tuple(Rubric(f"Is {i}.", 1 + i) for i in range(5)))


@given(st.floats(0, 1, exclude_max=True), st.integers(0, 9), st.integers(0, 9))
def test_drop_rubrics_keeps_an_order_at_least_one_and_the_rest_of_the_query(share, seed, epoch):
    found = drop_rubrics(FIVE, share, seed, epoch)
    assert found == drop_rubrics(FIVE, share, seed, epoch)
    assert len(found.rubrics) >= 1 and replace(found, rubrics=FIVE.rubrics) == FIVE
    assert list(found.rubrics) == sorted(found.rubrics, key=FIVE.rubrics.index)
    more = drop_rubrics(FIVE, share / 2, seed, epoch)
    assert set(found.rubrics) <= set(more.rubrics)


def test_drop_rubrics_keeps_a_rubric_that_is_no_fault():
    rubrics = tuple(Rubric(f"Is {i}.", weight) for i, weight in enumerate((-1, 2, -3, 4, -5)))
    drawn = [drop_rubrics(replace(FIVE, rubrics=rubrics), 0.9, 0, epoch).rubrics for epoch in range(50)]
    assert all(any(rubric.weight > 0 for rubric in kept) for kept in drawn)
    assert any(rubric.weight < 0 for kept in drawn for rubric in kept)
    for rescued in (Rubric("Is 4.", 1), Rubric("Is 4.", 1, must=True)):  # each one always stays
        query = replace(FIVE, rubrics=(Rubric("Is 0.", -1), rescued))
        stays = [len(drop_rubrics(query, 0.5, 0, epoch).rubrics) > 1 for epoch in range(2000)]
        assert abs(fmean(stays) - 0.5) < 0.04, "a fault falls by its own luck alone"
    must = (*FIVE.rubrics[:4], Rubric("Is 4.", 1, must=True))
    drawn = [drop_rubrics(replace(FIVE, rubrics=must), 0.9, 0, epoch).rubrics for epoch in range(20)]
    assert all(kept[-1].must for kept in drawn) and min(map(len, drawn)) <= 2


def test_drop_rubrics_leaves_out_the_share_by_seed_query_and_epoch():
    assert drop_rubrics(FIVE, 0.0, 0, 0) == FIVE
    drawn = [drop_rubrics(FIVE, 0.4, 0, epoch).rubrics for epoch in range(400)]
    assert all(abs(fmean(rubric in kept for kept in drawn) - 0.6) < 0.08 for rubric in FIVE.rubrics)
    for query, seed in ((FIVE, 1), (replace(FIVE, id="m"), 0)):
        others = [drop_rubrics(query, 0.4, seed, epoch).rubrics for epoch in range(400)]
        assert sum(a != b for a, b in zip(drawn, others, strict=True)) > 300
    assert {len(drop_rubrics(FIVE, 0.999, 0, epoch).rubrics) for epoch in range(20)} == {1}
