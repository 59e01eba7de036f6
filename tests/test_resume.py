"""Killed, stopped, spread and resumed, a run ends as if it had not: buffers, history, ledger and weights, bit for bit.

`helpers/trainings.py` has the table of disturbances. One of its rows: `-m slow -k sampled-resumed-4`.
"""

import json
import re
import shutil
import subprocess
import sys
import tarfile
from collections import Counter
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from pickle import UnpicklingError

import pytest
import torch
from conftest import ROOT, run_program
from datasets import Dataset
from helpers.checkpoints import newest_checkpoint
from helpers.sampled import EPOCHS, AtStep, copy_checkpoints, interrupt_at, same, train
from helpers.scripted import config, contents
from helpers.trainings import ROWS, TRAININGS, Training, distance, evaluations, outcome, weights
from safetensors.torch import load_file
from trl.trainer.utils import RepeatSampler

from rankbuffer_trl.checkpointing._checkpoint import files_of
from rankbuffer_trl.checkpointing._sampler import EpochSampler
from rankbuffer_trl.checkpointing.manifest import FOLDER, RUN, CheckpointError
from rankbuffer_trl.data._queries import load_queries
from rankbuffer_trl.files import fingerprint
from rankbuffer_trl.judge import RubricJudge
from rankbuffer_trl.store import StoreError
from rankbuffer_trl.store._places import LIVE_STORE
from rankbuffer_trl.training._trainer import RankBufferTrainer

KEPT = sorted((Path(__file__).parent / "checkpoints").glob("*.tar.xz"))
slow = lambda test: pytest.mark.slow(pytest.mark.timeout(1800)(test))  # noqa: E731  (the first one waits for all rows)
FAMILIES = {"aligned": (4, 2, 4), "straddling": (3, 2, 6), "several": (3, 1, 12)}  # groups, epochs, steps


@pytest.fixture(scope="module")
def ran(request, tmp_path_factory, tiny_policy, data_file):
    """The folder with the rows that are asked for, and what each of their starts left. One program runs them all."""
    asked = [item for item in request.session.items if item.path == request.path and "ran" in item.fixturenames]
    rows = sorted({item.callspec.params["row"] for item in asked if hasattr(item, "callspec")})
    kills = 30 if any("kills" in item.name for item in asked) else 0
    folder, program = tmp_path_factory.mktemp("ran"), ROOT / "tests" / "helpers" / "trainings.py"
    words = ("--policy", tiny_policy, "--data", data_file, "--kills", kills, "--only", *rows)
    output = run_program(program, folder, *words, timeout=1500)
    print(output)
    return folder, json.loads(output.splitlines()[-1])


@slow
@pytest.mark.parametrize("row", ROWS)
def test_a_disturbed_training_ends_like_the_undisturbed_one(ran, row):
    folder, told = ran
    this = ROWS[row]
    if isinstance(told[row], str):
        pytest.skip(told[row])
    for number, (start, found) in enumerate(zip(this.starts, told[row], strict=True)):
        log = (folder / f"{row}.{number}.log").read_text()
        assert found | {"codes": [0] * len(found["codes"])} | start.leaves == found, log[-3000:]
        assert [said for said in start.says if not re.search(said, log)] == [], log[-3000:]
    mine, whole = folder / row, folder / this.training
    assert outcome(mine) == outcome(whole)
    assert distance(mine, folder / this.like if this.like else whole) <= this.within
    for checkpoint in mine.glob("checkpoint-*"):  # also what a signal left, and what a resumed training wrote then
        if (whole / checkpoint.name).is_dir():
            assert outcome(checkpoint) == outcome(whole / checkpoint.name)
    learned = [bool(weight.any()) for name, weight in weights(mine).items() if "lora_B" in name]
    assert any(learned) or not learned
    check_evaluations(mine, whole, TRAININGS[this.training], this.starts[-1].processes)


def check_evaluations(mine: Path, whole: Path, training: Training, processes: int) -> None:
    """Each query is judged as often. Where batches are padded to whole groups, the first ones are judged again."""
    padded = -training.evaluated % (processes if processes != training.processes else 1) if processes else 0
    counts, expected = evaluations(mine), evaluations(whole)
    again = {query_id for step, query_id in counts if counts[step, query_id] != expected[step, query_id]}
    assert len(again) == padded and len({query_id for _, query_id in counts}) == training.evaluated
    assert counts == {(step, id): n * (1 + (id in again)) for (step, id), n in expected.items()}


@slow
@pytest.mark.parametrize("row", FAMILIES)
def test_a_spread_run_visits_each_query_at_most_once_an_epoch_and_breaks_no_batch(ran, row):
    (groups, epochs, steps), training, folder = FAMILIES[row], TRAININGS[row], ran[0] / row
    visits = Counter((query_id, epoch) for query_id, _, epoch, *_ in contents(folder)["groups"])
    assert set(visits.values()) == {1}
    per_epoch = training.queries // groups * groups  # the rest of an epoch fills no batch
    assert Counter(epoch for _, epoch in visits) == dict.fromkeys(range(epochs), per_epoch)
    assert json.loads((folder / FOLDER / RUN).read_text())["step"] == steps


@slow
def test_thirty_kills_in_every_phase_change_nothing(ran):
    """The program compares each training that came to its end with the one that was killed never."""
    told = ran[1]["kills"]
    assert sum(told["kills"].values()) >= 30 and told["runs"] >= 1
    assert all(told["kills"][phase] for phase in ("generation", "judging", "commit", "checkpoint", "push"))


def test_a_finished_run_that_is_resumed_takes_no_step(tmp_path, tiny_policy, rows, whole):
    """It ends inside an epoch, where the trainer of transformers looks at `max_steps` only after a step."""
    checkpoint = copy_checkpoints(whole, tmp_path, 6)
    ended = train(tmp_path, tiny_policy, rows, resume=str(checkpoint), max_steps=6)
    assert same(ended, (contents(checkpoint), load_file(checkpoint / "model.safetensors")))


def test_a_second_run_in_the_same_folder_is_refused(tmp_path, tiny_policy, rows):
    program = (
        "import sys; from rankbuffer_trl import BufferStore; s = BufferStore(sys.argv[1]); print(); sys.stdin.read()"
    )
    first = subprocess.Popen(
        [sys.executable, "-c", program, tmp_path / LIVE_STORE], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    try:
        first.stdout.readline()
        with pytest.raises(StoreError, match=rf"in use by process {first.pid} on .*choose another output_dir"):
            RankBufferTrainer(tiny_policy, config(tmp_path), rows)
    finally:
        first.kill()
        first.communicate()
    RankBufferTrainer(tiny_policy, config(tmp_path), rows).close()


CHANGES = {
    "K0": (dict(method_args={"k0": 3}), "method_args .*'k0': 4.*'k0': 3"),
    "method": (dict(method="pointwise"), "method .*'rankbuffer' in the checkpoint, 'pointwise' now"),
    "judge model": (dict(judge_url="http://127.0.0.1:9/v1", judge_model="m"), "judge .*'RubricJudge'.*'m' now"),
    "seed": (dict(seed=4), "seed .*: 3 in the checkpoint, 4 now"),
    "batch": (dict(per_device_train_batch_size=48), "queries_per_generation .*: 3 in the checkpoint, 6 now"),
}


@dataclass
class Own(RubricJudge):
    word: str = ""
    loud: bool = field(default=False, compare=False)
    heads: tuple[int, ...] = (1, 2)  # the kept checkpoint is older than this argument


@pytest.mark.parametrize("kept", KEPT, ids=lambda path: path.name)
def test_a_checkpoint_of_each_version_is_resumed_for_ever(tmp_path, kept):
    """Each was saved by that version, with the settings below, `loud` set, and the first two rows of `howto.jsonl`.

    Its policy is the quickstart's with `VOCABULARY = 259`, `hidden_size=8`, `head_dim=4` and one layer.
    """
    with tarfile.open(kept) as archive:
        archive.extractall(tmp_path, filter="data")
    checkpoint, rows = tmp_path / "checkpoint-2", load_queries(str(tmp_path / "data.jsonl"))
    settings = dict(num_generations=4, per_device_train_batch_size=8, max_steps=3, save_steps=2)
    settings |= dict(judge_client=f"{__name__}.Own", judge_client_args={"word": "x"})
    before, start = contents(checkpoint), load_file(checkpoint / "model.safetensors")
    after, weights = train(tmp_path, str(checkpoint), rows, resume=str(checkpoint), **settings)
    assert set(before["buffers"]) < set(after["buffers"]) and [row[1] for row in after["groups"]] == [0, 1, 2] * 2
    assert any((weights[name] != start[name]).any() for name in start), "it learned"


@pytest.mark.parametrize("case", CHANGES)
def test_a_checkpoint_of_another_run_is_refused(tmp_path, tiny_policy, rows, whole, case):
    overrides, message = CHANGES[case]
    said = rf"belongs to another run:\n(.*\n)*.*{message}(.*\n)*.*resume_with_changes"
    with pytest.raises(CheckpointError, match=said):
        train(tmp_path, tiny_policy, rows, resume=str(whole[0] / "checkpoint-6"), **overrides)


@pytest.mark.slow
def test_other_data_is_refused_and_taken_when_told(tmp_path, tiny_policy, rows, whole):
    other = [{**row, "rubrics": row["rubrics"][:-1]} if number == 7 else row for number, row in enumerate(rows)]
    data = Dataset.from_list(other, features=rows.features)
    resume = str(copy_checkpoints(whole, tmp_path, 6))
    with pytest.raises(CheckpointError, match="data_sha256"):
        train(tmp_path, tiny_policy, data, resume=resume)
    turned = rows.select(range(11, -1, -1))
    with pytest.raises(RuntimeError, match=r"already visited .* data order"):
        train(tmp_path, tiny_policy, turned, resume=resume, resume_with_changes=True)
    table, _ = train(tmp_path, tiny_policy, data, resume=resume, resume_with_changes=True)
    assert len(table["groups"]) == EPOCHS * len(rows)


@pytest.mark.slow
def test_a_new_run_in_an_old_folder_keeps_the_old_buffers_aside(tmp_path, tiny_policy, rows, whole):
    live = tmp_path / LIVE_STORE
    live.parent.mkdir(parents=True)
    shutil.copy(whole[0] / LIVE_STORE, live)
    table, _ = train(tmp_path, tiny_policy, rows, max_steps=2)
    assert {row[1] for row in table["groups"]} == {0, 1}
    assert contents(live.with_stem("live-1")) == whole[1][0]


@pytest.mark.parametrize(("resume", "old"), [(None, {3, 9}), (3, {9})])
def test_a_runs_newest_checkpoint_is_never_an_old_ones(tmp_path, tiny_policy, rows, whole, caplog, resume, old):
    copy_checkpoints(whole, tmp_path, 3, 9)
    start = resume or 0
    with pytest.raises(KeyboardInterrupt), caplog.at_level("WARNING"):
        path = resume and str(tmp_path / f"checkpoint-{resume}")
        train(tmp_path, tiny_policy, rows, resume=path, callback=interrupt_at(start + 2))
    assert newest_checkpoint(tmp_path).name == f"checkpoint-{start + 1}"
    assert {path.name for path in (tmp_path / "_old").iterdir()} == {f"checkpoint-{step}.0" for step in old}
    assert caplog.text.count("moved to _old/") == 1


def test_an_evaluation_before_the_first_step_sees_no_old_buffers(tmp_path, tiny_policy, rows, whole):
    evaluation = dict(eval_rows=rows.select(range(2)), eval_strategy="steps", eval_steps=100, eval_on_start=True)
    live = tmp_path / "old" / LIVE_STORE
    live.parent.mkdir(parents=True)
    shutil.copy(whole[0] / LIVE_STORE, live)
    runs = []
    for folder in (tmp_path / "old", tmp_path / "new"):
        with pytest.raises(KeyboardInterrupt):
            train(folder, tiny_policy, rows, callback=interrupt_at(1), per_device_eval_batch_size=8, **evaluation)
        runs.append(contents(folder / LIVE_STORE))
    assert runs[0] == runs[1] and {row[1] for row in runs[0]["calls"]} == {"train", "eval"}


@pytest.mark.parametrize("method", ["rankbuffer", "pointwise"])
def test_a_checkpoint_inside_a_generation_is_not_resumed(tmp_path, tiny_policy, rows, method):
    """Its queries would be scored twice, and a method without buffers would not notice it."""
    settings = dict(max_steps=4, num_iterations=2, method=method, save_strategy="no")
    save = AtStep(3, lambda control: setattr(control, "should_save", True))
    train(tmp_path, tiny_policy, rows, callback=save, **settings)
    with pytest.raises(CheckpointError, match="checkpoint-3 was saved inside a generation"):
        train(tmp_path, tiny_policy, rows, resume=True, **settings)


def test_epoch_sampler_gives_the_stock_order_and_any_epoch_on_its_own(rows):
    def stock(**changes):
        settings = dict(mini_repeat_count=2, batch_size=5, repeat_count=2, shuffle=True, seed=7)
        return RepeatSampler(rows, **(settings | changes))

    uninterrupted = stock()
    orders = [list(uninterrupted) for _ in range(4)]
    assert len({tuple(order) for order in orders}) == 4
    for epoch, order in enumerate(orders):
        assert list(EpochSampler(stock(), lambda epoch=epoch: epoch)) == order
    assert list(EpochSampler(stock(shuffle=False), lambda: 3)) == list(stock(shuffle=False))


def test_history_tells_what_each_group_did_to_its_buffer(whole):
    table = whole[1][0]
    rows = table["buffers"]
    versions = {(query_id, step): [a[0] for a in json.loads(anchors)] for query_id, step, anchors, *_ in rows}
    steps = {}
    for query_id, step, *_ in table["groups"]:
        steps.setdefault(query_id, []).append(step)
    history = {(row[0], row[1]): row for row in table["groups"]}
    for query_id, visited in steps.items():
        for earlier, later in pairwise(visited):
            _, _, _, k, _, _, _, added, pruned = history[query_id, later]
            before, after = versions[query_id, earlier], versions[query_id, later]
            assert k == len(before)
            assert {id for id, _ in json.loads(added)} == set(after) - set(before)
            assert {id for id, _ in json.loads(pruned)} == set(before) - set(after)


class Bomb:
    """An object whose pickle makes a file when it is loaded without care."""

    def __init__(self, marker: Path):
        self.marker = marker

    def __reduce__(self):
        return Path.touch, (self.marker,)


@pytest.mark.slow
def test_resume_executes_no_pickle_of_a_plain_checkpoint(tmp_path, tiny_policy, rows, whole):
    """Its author can list any file in the manifest, also one that this run would not write."""
    plain = ["optimizer.pt", "scheduler.pt", "rng_state.pth", "training_args.bin"]
    for name in (*plain, "pytorch_model.bin", "pytorch_model_fsdp.bin", "optimizer.bin", "adapter_model.bin"):
        checkpoint = copy_checkpoints(whole, tmp_path / name, 4)
        assert (checkpoint / name).is_file() == (name in plain)
        torch.save(Bomb(tmp_path / "ran"), checkpoint / name)
        if name == "pytorch_model.bin":  # else the other file is loaded
            (checkpoint / "model.safetensors").unlink()
        manifest = checkpoint / FOLDER / RUN
        run = json.loads(manifest.read_text())
        files = {listed: fingerprint(path) for listed, path in files_of(checkpoint).items()}
        manifest.write_text(json.dumps(run | {"files": files}))
        try:
            train(tmp_path / name, tiny_policy, rows, str(checkpoint), max_steps=5)
            refused = False
        except (UnpicklingError, ValueError) as error:
            refused = "Weights only load failed" in str(error) or "FSDP" in str(error)
        read = (*plain[:3], "pytorch_model.bin", "pytorch_model_fsdp.bin")
        assert refused == (name in read) and not (tmp_path / "ran").exists(), name
    torch.load(tmp_path / "training_args.bin" / "checkpoint-4" / "training_args.bin", weights_only=False)
    assert (tmp_path / "ran").exists(), "the object does what it should"
