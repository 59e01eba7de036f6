"""The model of judging during generation: cases computed by hand, slow oracles, and what holds for any workload."""

import json
import sys
from collections import Counter
from dataclasses import dataclass, replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.overlap_model import ORDERS, Batch, Draw, Span, Workload, draws_of, simulate
from experiments.overlap_model import run


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


# By hand


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


def test_simulate_asks_each_question_of_a_step():
    """The truncated rollout of the first group is not judged, but its group waits for it."""
    workload = known((1, 0), (9, 0), (2, 0), (2, 1), (3, 1), (4, 0), G=3, cap=9, slots=2)
    line = simulate(workload, 0, latency=3.0, order="rollouts")
    assert sorted(line.questions) == [
        Span("fine", 0, 9.0, 9.0, 12.0),
        Span("fine", 1, 10.0, 10.0, 13.0),
        Span("insert", 0, 1.0, 1.0, 4.0),
        Span("insert", 2, 2.0, 2.0, 5.0),
        Span("insert", 3, 2.0, 4.0, 7.0),
        Span("insert", 4, 3.0, 5.0, 8.0),
        Span("insert", 5, 4.0, 7.0, 10.0),
    ]


# Oracles

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


STEPS = st.integers(0, 10**6)
SMALL = Workload(queries=4)


@given(STEPS, st.floats(0.01, 20))
def test_simulate_with_a_slot_for_every_question_leaves_only_latencies(step, latency):
    workload = replace(SMALL, slots=10**4)
    draws = [[workload.draw(step, query, place) for place in range(workload.G)] for query in range(workload.queries)]
    for order in ORDERS:
        line = simulate(workload, step, latency, order)
        ends = [line.generated[i : i + workload.G] for i in range(0, len(line.generated), workload.G)]
        last = line.generation
        for group, times in zip(draws, ends, strict=True):
            if order != "rollouts":
                times = [line.generation if order == "serial" else max(times)] * workload.G
            answered = [draw.tokens < workload.cap for draw in group]
            verdicts = [time + latency for time, judged in zip(times, answered, strict=True) if judged]
            places = Counter(draw.position for draw, judged in zip(group, answered, strict=True) if judged)
            crowded = any(count >= 2 for count in places.values())
            last = max(last, max([*times, *verdicts]) + latency * crowded)
        assert line.generation + line.visible == pytest.approx(last)


@given(STEPS, st.sampled_from(ORDERS))
def test_simulate_a_judge_that_takes_no_time_leaves_generation_alone(step, order):
    assert simulate(SMALL, step, 0.0, order).visible == 0.0


@given(STEPS, st.floats(0.01, 20), st.integers(1, 40))
def test_simulate_asks_the_same_questions_in_every_order_and_keeps_the_slots(step, latency, slots):
    workload = replace(SMALL, slots=slots)
    lines = [simulate(workload, step, latency, order) for order in ORDERS]
    assert len({tuple(sorted((span.kind, span.place) for span in line.questions)) for line in lines}) == 1
    for line in lines:
        assert all(span.asked <= span.begun for span in line.questions)
        for span in line.questions:
            assert sum(other.begun <= span.begun < other.answered for other in line.questions) <= slots


@settings(max_examples=20)
@given(st.floats(0.05, 5))
def test_at_ratio_the_serial_judge_takes_the_wanted_time(ratio):
    row = run.at_ratio(SMALL, ratio, range(3))
    assert row.visible["serial"] / row.generation == pytest.approx(ratio)
    assert row.step("serial") == pytest.approx(1 + ratio)


def test_workloads_are_what_their_titles_say():
    for title, workload in run.WORKLOADS.items():
        draws = [draw for step in range(60) for draw in draws_of(workload, step)]
        share = sum(draw.tokens == workload.cap for draw in draws) / len(draws)
        assert f"{share:.0%}".replace("%", " %") in title


def test_at_ratio_gives_the_figures_of_the_readme_again():
    row = run.at_ratio(run.THINKING, 0.5, range(run.STEPS))
    assert (round(row.share("rollouts"), 2), round(row.step("rollouts"), 2)) == (0.10, 1.05)


def test_main_prints_all_tables_and_draws_the_figure(tmp_path, monkeypatch, capsys):
    figure = tmp_path / "overlap.png"
    monkeypatch.setattr(sys, "argv", ["run.py", "--steps", "1", "--figure", str(figure)])
    run.main()
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert all(list(found[title]) == [f"{ratio:g}" for ratio in run.RATIOS] for title in run.WORKLOADS)
    assert figure.read_bytes().startswith(b"\x89PNG")
