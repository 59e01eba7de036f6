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

from rankbuffer_trl.exact.manifest import FOLDER, RUN

pytestmark = pytest.mark.slow
QUERIES, EVALUATED = 10, 5
STEPS = {"aligned": 4, "straddling": 6, "several": 12}
GROUPS, EPOCHS = {"aligned": 4, "straddling": 3, "several": 3}, {"aligned": 2, "straddling": 2, "several": 1}
WEIGHTS = 1e-4  # sums of float32 in another order, through AdamW; docs/results.md has what was measured


@pytest.fixture(scope="module")
def ran(tmp_path_factory, tiny_policy, howto):
    """The folder with all runs, and what the program says of each."""
    folder = tmp_path_factory.mktemp("spread")
    data = folder / "ten.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in howto[:QUERIES]))
    program = ROOT / "tests" / "helpers" / "spread.py"
    output = run_program(program, folder, "--policy", tiny_policy, "--data", data, timeout=500)
    print(output)
    return folder, json.loads(output.splitlines()[-1])


def reference(case: Case) -> Case:
    """The first of a case's family has one process and no accumulation."""
    return next(first for first in CASES if first.family == case.family)


def outcome(folder, case: Case) -> dict:
    """What must be the same however a run is spread: visits, rewards, buffers, history, ledger of training."""
    table = contents(folder / case.name)
    seen = dict(json.loads(line) for line in (folder / case.name / "rewards.json").read_text().splitlines())
    return table | {"calls": [row for row in table["calls"] if row[1] == "train"], "rewards": seen}


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_a_spread_changes_nothing(ran, case):
    folder, told = ran
    codes = told[case.name].get("resumed", told[case.name]["codes"])
    assert codes == [0] * case.processes, (folder / f"{case.name}.log").read_text()[-3000:]
    mine, expected = outcome(folder, case), outcome(folder, reference(case))
    for part in expected:
        assert mine[part] == expected[part], part
    difference = largest_difference(folder, case, same_batches(case))
    assert difference == 0 if case.family == "lora" else difference <= WEIGHTS


def same_batches(case: Case) -> Case:
    """The first case whose optimizer steps take the same rollouts.

    Where several steps share a generation, each process shuffles its own rollouts, so the split decides what a step
    takes, and only the same split gives the same weights.
    """
    several = case.family == "several"
    return next(c for c in CASES if c.family == case.family and (not several or c.processes == case.processes))


def largest_difference(folder, case: Case, other: Case) -> float:
    name = "adapter_model.safetensors" if case.family == "lora" else "model.safetensors"
    mine, expected = (load_file(folder / each.name / "end" / name) for each in (case, other))
    if case.family == "lora":
        assert any(weight.abs().max() > 0 for name, weight in mine.items() if "lora_B" in name), "it learned nothing"
    return max((mine[name] - expected[name]).abs().max().item() for name in expected)


@pytest.mark.parametrize("family", STEPS)
def test_a_spread_run_visits_each_query_at_most_once_an_epoch_and_breaks_no_batch(ran, family):
    one = ran[0] / next(case for case in CASES if case.family == family).name
    visits = Counter((query_id, epoch) for query_id, _, epoch, *_ in contents(one)["groups"])
    assert set(visits.values()) == {1}
    per_epoch = QUERIES // GROUPS[family] * GROUPS[family]  # the rest of an epoch fills no batch
    assert Counter(epoch for _, epoch in visits) == dict.fromkeys(range(EPOCHS[family]), per_epoch)
    assert json.loads((one / "end" / FOLDER / RUN).read_text())["step"] == STEPS[family]


def test_a_spread_evaluation_asks_about_every_query_and_where_batches_are_padded_about_the_first_again(ran):
    for case in CASES:
        mine, expected = (judged(ran[0] / name) for name in (case.name, reference(case).name))
        padded = -EVALUATED % case.processes  # whole groups, since a process evaluates one group at a time
        if case.family == "lora":
            padded = 0  # its reference has as many processes
        again = {query_id for step, query_id in mine if mine[step, query_id] != expected[step, query_id]}
        assert len(again) == padded and len({query_id for _, query_id in mine}) == EVALUATED, case.name
        assert mine == {(step, id): n * (1 + (id in again)) for (step, id), n in expected.items()}, case.name


def judged(folder) -> Counter:
    """Judgments of evaluation by step and query."""
    return Counter((row[0], row[4]) for row in contents(folder)["calls"] if row[1] == "eval")


def test_a_signal_to_one_process_ends_all_and_the_run_goes_on(ran):
    folder, told = ran
    for case in (case for case in CASES if case.signal):
        codes, (checkpoints, steps) = told[case.name]["codes"], told[case.name]["left"]
        if case.signal == "SIGTERM":
            assert (codes, checkpoints, steps) == ([0, 0], ["checkpoint-1"], [0]), "all leave the second step"
            continue
        assert checkpoints == ["checkpoint-2"], case.name
        assert all(codes) and steps == [0, 1, 2], f"{case.name}: what was judged before the signal is in the store"
        log = (folder / f"{case.name}.log").read_text()
        assert codes[0] == -9 if case.signal == "SIGKILL" else "KeyboardInterrupt" in log
        rewards = [json.loads(line)[0] for line in (folder / case.name / "rewards.json").read_text().splitlines()]
        assert rewards == [0, 1, 2, 2, 3, 4, 5], "a step that was judged was lost with the policy, and done again"
