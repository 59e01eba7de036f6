"""The model of `benchmarks/overlap.py`: a step computed by hand, and a server that counts every token."""

from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.overlap_model import Batch, Draw, Workload, simulate, simulate_lists


@dataclass(frozen=True)
class Known(Workload):
    """A workload whose rollouts are given."""

    draws: tuple[Draw, ...] = ()

    def draw(self, step: int, query: int, place: int) -> Draw:
        return self.draws[query * self.G + place]


def known(*draws: tuple[int, int], G: int, **settings) -> Known:
    """Rollouts given by length and position. By default the server makes one token per second."""
    values = {"cap": 100, "step_seconds": 1.0, "sequence_seconds": 0.0} | settings
    return Known(queries=len(draws) // G, G=G, draws=tuple(Draw(*each) for each in draws), **values)


@pytest.mark.parametrize(
    ("order", "last"),
    [
        # The slot has the four insertions from 6 to 14, then both fine rankings.
        ("serial", 18.0),
        # The first group's insertions come at 3, the second group's at 6, the fine rankings at 7 and 11.
        ("groups", 15.0),
        # The insertions come at 1, 2, 3 and 6, the fine rankings at 7 and 9. The slot is never idle after 1.
        ("rollouts", 13.0),
    ],
)
def test_simulate_two_groups_of_two_and_one_slot(order, last):
    workload = known((1, 0), (3, 0), (2, 0), (6, 0), G=2, slots=1)
    line = simulate(workload, 0, latency=2.0, order=order)
    assert line.generated == [1.0, 3.0, 2.0, 6.0]
    assert (line.generation, line.visible) == (6.0, last - 6.0)


@pytest.mark.parametrize(
    ("block", "early", "visible"),
    [
        (2, False, 8.0),  # four lists of two, of two seconds each, one after the other from 6 on
        (2, True, 5.0),  # those of the first group from 3 to 7, of the second one from 7 to 11
        (1, True, 3.0),  # the lists of the longest rollout wait from 6 to 7 for those that came before
    ],
)
def test_lists_are_asked_when_their_own_rollouts_are_generated(block, early, visible):
    workload = known((1, 0), (3, 0), (2, 0), (6, 0), G=2, slots=1)
    assert simulate_lists(workload, 0, 1.0, block, early).visible == visible


LENGTHS = st.lists(st.integers(1, 30), min_size=1, max_size=12)


def token_by_token(lengths: list[int], workload: Workload) -> dict[int, float]:
    """When each sequence ends, in a server that makes one token of each running sequence in each step."""
    waiting, running, now, ends = list(enumerate(lengths)), {}, 0.0, {}
    while waiting or running:
        while waiting and len(running) < workload.capacity:
            sequence, tokens = waiting.pop(0)
            running[sequence] = tokens
        now += workload.step_seconds + workload.sequence_seconds * len(running)
        running = {sequence: tokens - 1 for sequence, tokens in running.items()}
        ends |= {sequence: now for sequence, tokens in running.items() if not tokens}
        running = {sequence: tokens for sequence, tokens in running.items() if tokens}
    return ends


@given(LENGTHS, st.integers(1, 12), st.lists(st.floats(0, 5), max_size=20))
def test_batch_ends_like_a_server_that_counts_every_token(lengths, capacity, looks):
    workload = known((1, 0), G=1, capacity=capacity, step_seconds=0.25, sequence_seconds=0.125)
    batch, ends = Batch(workload), {}
    for sequence, tokens in enumerate(lengths):
        batch.submit(sequence, tokens)
    for seconds in (*looks, 1e6):  # looking in between changes nothing
        ends |= batch.advance(batch.now + seconds)
    assert ends == pytest.approx(token_by_token(lengths, workload))
