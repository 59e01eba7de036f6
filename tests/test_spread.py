"""The same rollouts give the same visits, rewards, buffers and ledger on 1, 2 and 4 processes, plain and under ZeRO-3.

`tests/helpers/spread.py` runs all cases. The tests compare each case with the run of its family that has one process.
"""

import json
from collections import Counter

import pytest
from conftest import ROOT, run_program
from helpers.scripted import contents
from helpers.spread import CASES, Case
from safetensors.torch import load_file

from rankbuffer_trl.store.places import FOLDER, RUN

pytestmark = pytest.mark.slow
QUERIES, EVALUATED, EPOCHS, STEPS = 10, 5, 2, {"aligned": 4, "straddling": 6, "several": 24}
WEIGHTS = 1e-4  # sums of float32 in another order, through AdamW; docs/results.md has what was measured


@pytest.fixture(scope="module")
def ran(tmp_path_factory, tiny_policy, howto):
    """The folder with all runs, and the exit codes of their processes."""
    folder = tmp_path_factory.mktemp("spread")
    data = folder / "ten.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in howto[:QUERIES]))
    arguments = (folder, "--policy", tiny_policy, "--data", data)
    return folder, json.loads(
        run_program(ROOT / "tests" / "helpers" / "spread.py", *arguments, timeout=500).splitlines()[-1]
    )


def reference(case: Case) -> Case:
    """The first of a case's family has one process and no accumulation."""
    return next(first for first in CASES if first.family == case.family)


def outcome(folder, case: Case) -> dict:
    """What must be the same however a run is spread: visits, rewards, buffers, history, ledger of training."""
    table = contents(folder / case.name)
    seen = dict(json.loads(line) for line in (folder / case.name / "rewards.json").read_text().splitlines())
    return table | {"calls": [row for row in table["calls"] if row[1] == "train"], "rewards": seen}


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_the_spread_changes_nothing(ran, case):
    folder, codes = ran
    log = (folder / f"{case.name}.log").read_text()[-3000:]
    assert codes[case.name][-case.processes :] == [0] * case.processes, log
    mine, expected = outcome(folder, case), outcome(folder, reference(case))
    for part in expected:
        assert mine[part] == expected[part], part
    assert largest_difference(folder, case, same_batches(case)) <= WEIGHTS


def same_batches(case: Case) -> Case:
    """The first case whose optimizer steps take the same rollouts.

    Where several steps share a generation, each process shuffles its own rollouts, so the split decides what a step
    takes, and only the same split gives the same weights.
    """
    several = case.family == "several"
    return next(c for c in CASES if c.family == case.family and (not several or c.processes == case.processes))


def largest_difference(folder, case: Case, other: Case) -> float:
    mine, expected = (load_file(folder / each.name / "end" / "model.safetensors") for each in (case, other))
    return max((mine[name] - expected[name]).abs().max().item() for name in expected)


@pytest.mark.parametrize("family", STEPS)
def test_each_query_is_visited_at_most_once_an_epoch_and_no_batch_is_broken(ran, family):
    folder, _ = ran
    one = next(case for case in CASES if case.family == family)
    groups = contents(folder / one.name)["groups"]
    visits = Counter((query_id, epoch) for query_id, _, epoch, *_ in groups)
    assert set(visits.values()) == {1}
    a_generation = {"aligned": 4, "straddling": 3, "several": 3}[family]
    per_epoch = QUERIES // a_generation * a_generation  # the rest of an epoch fills no batch
    assert Counter(epoch for _, epoch in visits) == dict.fromkeys(range(EPOCHS), per_epoch)
    told = json.loads((folder / one.name / "end" / FOLDER / RUN).read_text())
    assert told["step"] == STEPS[family]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_evaluation_asks_about_every_query_and_where_batches_are_padded_about_the_first_again(ran, case):
    folder, _ = ran
    mine, expected = (judged(folder / name) for name in (case.name, reference(case).name))
    padded = -EVALUATED % case.processes  # whole groups, since a process evaluates one group at a time
    again = {query_id for step, query_id in mine if mine[step, query_id] != expected[step, query_id]}
    assert len(again) == padded and len({query_id for _, query_id in mine}) == EVALUATED
    assert mine == {(step, id): n * (1 + (id in again)) for (step, id), n in expected.items()}


def judged(folder) -> Counter:
    """Judgments of evaluation by step and query."""
    return Counter((row[0], row[4]) for row in contents(folder)["calls"] if row[1] == "eval")


def test_a_sigterm_to_one_process_stops_all_at_the_same_step(ran):
    folder, codes = ran
    (case,) = (case for case in CASES if case.signal == "SIGTERM")
    assert codes[case.name] == [0, 0] * 2
    assert (folder / f"{case.name}.stopped").read_text() == "checkpoint-2"


def test_a_killed_process_takes_the_others_with_it_and_the_run_goes_on(ran):
    folder, codes = ran
    (case,) = (case for case in CASES if case.signal == "SIGKILL")
    assert codes[case.name][0] == -9 and codes[case.name][1] != 0
    assert (folder / f"{case.name}.stopped").read_text() == "checkpoint-2"
    steps = [json.loads(line)[0] for line in (folder / case.name / "rewards.json").read_text().splitlines()]
    assert steps == [0, 1, 2, 2, 3, 4, 5], "a step that was judged was lost with the policy, and done again"
