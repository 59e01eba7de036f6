"""Stopped anywhere and resumed, a run ends as if it had not: buffers, history, ledger and weights, bit for bit."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from itertools import pairwise
from pathlib import Path

import pytest
from conftest import QUICKSTART
from datasets import Dataset, load_dataset
from safetensors.torch import load_file
from scripted import config, contents
from transformers import TrainerCallback

from rankbuffer_trl.store import BufferStore, StoreError
from rankbuffer_trl.store.buffer_store import STORE
from rankbuffer_trl.store.places import FOLDER, LIVE_STORE, RUN, STATE, checkpoints, read_store
from rankbuffer_trl.training.callbacks import StopEarly
from rankbuffer_trl.training.checkpoint import (
    check_resumable,
    delete_oldest,
    describe,
    fingerprint,
    newest_checkpoint,
    read_manifest,
    set_torn_aside,
    why_torn,
)
from rankbuffer_trl.training.sampler import EpochSampler
from rankbuffer_trl.training.trainer import RankBufferTrainer

EPOCHS, STEPS_PER_EPOCH = 3, 4  # 12 queries, 3 a step


def train(output_dir, policy, rows, resume=None, callback=None, eval_rows=None, **overrides):
    """Real sampling, a checkpoint at every step. Returns everything a rerun must reproduce."""
    settings = config(output_dir, num_train_epochs=EPOCHS, save_strategy="steps", save_steps=1, **overrides)
    trainer = RankBufferTrainer(policy, settings, rows, eval_rows, callbacks=[callback] if callback else None)
    try:
        trainer.train(resume_from_checkpoint=resume)
        trainer.save_model()
    finally:
        trainer.close()
    return contents(output_dir / LIVE_STORE), load_file(output_dir / "model.safetensors")


def same(run, other):
    """Whether two runs ended alike."""
    weights, others = run[1], other[1]
    return run[0] == other[0] and all((weights[name] == others[name]).all() for name in weights)


class InterruptAt(TrainerCallback):
    """Ctrl-C after the optimizer step with this number, once it is done but before it is saved."""

    def __init__(self, step):
        self.step = step

    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step == self.step:
            raise KeyboardInterrupt


@pytest.fixture(scope="module")
def whole(tmp_path_factory, tiny_policy, howto):
    """The run that nobody stopped."""
    output_dir = tmp_path_factory.mktemp("whole")
    return output_dir, train(output_dir, tiny_policy, Dataset.from_list(howto[:12]))


@pytest.mark.slow
@pytest.mark.parametrize("step", [1, 4, 6, 11], ids=lambda step: f"epoch{step // STEPS_PER_EPOCH}-step{step}")
def test_resumed_from_any_checkpoint_the_run_ends_alike(tmp_path, tiny_policy, rows, whole, step):
    output_dir, uninterrupted = whole
    shutil.copytree(output_dir / f"checkpoint-{step}", tmp_path / f"checkpoint-{step}")
    assert same(train(tmp_path, tiny_policy, rows, resume=str(tmp_path / f"checkpoint-{step}")), uninterrupted)


@pytest.mark.slow
@pytest.mark.parametrize("step", [2, 7])
def test_interrupted_and_resumed_the_run_ends_alike(tmp_path, tiny_policy, rows, whole, step):
    with pytest.raises(KeyboardInterrupt):
        train(tmp_path, tiny_policy, rows, callback=InterruptAt(step))
    store = BufferStore(tmp_path / LIVE_STORE)
    assert store.last_step() == step - 1, "what was judged before the interrupt is in the live store"
    store.close()
    assert same(train(tmp_path, tiny_policy, rows, resume=True), whole[1])


@pytest.mark.slow
def test_resume_takes_the_newest_whole_checkpoint_and_moves_torn_ones_away(tmp_path, tiny_policy, rows, whole, caplog):
    output_dir, uninterrupted = whole
    for step in (4, 5):
        shutil.copytree(output_dir / f"checkpoint-{step}", tmp_path / f"checkpoint-{step}")
    (tmp_path / "checkpoint-5" / "trainer_state.json").unlink()
    (tmp_path / "checkpoint-99").mkdir()
    with caplog.at_level("WARNING"):
        assert same(train(tmp_path, tiny_policy, rows, resume=True, save_total_limit=1), uninterrupted)
    assert (
        "skipping" in caplog.text and "checkpoint-5" in caplog.text and "trainer_state.json is missing" in caplog.text
    )
    assert {path.name for path in (tmp_path / "_torn").iterdir()} == {"checkpoint-5.0", "checkpoint-99.0"}
    (kept,) = tmp_path.glob("checkpoint-*")
    assert kept.name == "checkpoint-12" and why_torn(kept) is None
    assert contents(kept) == uninterrupted[0]


def halve(path):
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


FILES = {
    "state": "trainer_state.json",
    "weights": "model.safetensors",
    "optimizer": "optimizer.pt",
    "random": "rng_state.pth",
    "run": f"{FOLDER}/{RUN}",
    "store": f"{FOLDER}/{STORE}",
    "scheduler": "scheduler.pt",
    "arguments": "training_args.bin",
    "model's configuration": "config.json",
}


@pytest.mark.parametrize("accident", [halve, Path.unlink], ids=["cut", "gone"])
@pytest.mark.parametrize("file", FILES)
def test_a_torn_checkpoint_is_recognised(tmp_path, whole, file, accident):
    for step in (3, 4):
        shutil.copytree(whole[0] / f"checkpoint-{step}", tmp_path / f"checkpoint-{step}")
    torn = tmp_path / "checkpoint-4"
    assert newest_checkpoint(tmp_path) == torn
    path = torn / FILES[file]
    accident(path)
    assert re.search(f"{path.name} is", why_torn(torn))
    assert newest_checkpoint(tmp_path) == tmp_path / "checkpoint-3"


@pytest.mark.slow
def test_evaluation_in_between_changes_neither_buffers_nor_resume(tmp_path, tiny_policy, rows):
    evaluation = dict(
        eval_rows=rows.select(range(2)), eval_strategy="steps", eval_steps=2, per_device_eval_batch_size=8
    )
    run = train(tmp_path / "a", tiny_policy, rows, **evaluation)
    shutil.copytree(tmp_path / "a" / "checkpoint-6", tmp_path / "b" / "checkpoint-6")
    assert same(train(tmp_path / "b", tiny_policy, rows, resume=True, **evaluation), run)
    phases = {row[1] for row in run[0]["calls"]}
    assert phases == {"train", "eval"}


def test_a_checkpoint_without_its_buffers_is_refused(tmp_path, tiny_policy, rows, whole):
    shutil.copytree(whole[0] / "checkpoint-4", tmp_path / "checkpoint-4")
    shutil.rmtree(tmp_path / "checkpoint-4" / FOLDER)
    with pytest.raises(StoreError, match=r"checkpoint-4 is not a whole checkpoint: run\.json is missing"):
        train(tmp_path, tiny_policy, rows, resume=str(tmp_path / "checkpoint-4"))
    with pytest.raises(StoreError, match="no whole checkpoint"):
        train(tmp_path, tiny_policy, rows, resume=True)


MIXTURES = {  # what of checkpoint-8 lies in checkpoint-4
    "buffers and manifest": ([FOLDER], r"run\.json says 8, trainer_state\.json says 4, its name says 4"),
    "all but buffers and manifest": (["[!r]*", "rng_state.pth"], r"run\.json says 4, trainer_state\.json says 8"),
    "everything": (["*"], r"run\.json says 8, trainer_state\.json says 8, its name says 4"),
    "buffers": ([f"{FOLDER}/{STORE}"], r"rankbuffer/store\.sqlite is .*not the file that was saved at step 4"),
    "trainer state": (["trainer_state.json"], r"trainer_state\.json says 8"),
    "policy": (["model.safetensors"], r"model\.safetensors is .*not the file that was saved at step 4"),
    "optimizer": (["optimizer.pt"], r"optimizer\.pt is .*not the file that was saved at step 4"),
    "random state": (["rng_state.pth"], r"rng_state\.pth is .*not the file that was saved at step 4"),
}


@pytest.mark.parametrize("case", MIXTURES)
def test_a_checkpoint_of_two_steps_is_refused(tmp_path, whole, caplog, case):
    for step in (3, 4):
        shutil.copytree(whole[0] / f"checkpoint-{step}", tmp_path / f"checkpoint-{step}")
    mixed, other = tmp_path / "checkpoint-4", whole[0] / "checkpoint-8"
    patterns, message = MIXTURES[case]
    for path in {path for pattern in patterns for path in other.glob(pattern)}:
        copy = shutil.copytree if path.is_dir() else shutil.copy
        copy(path, mixed / path.relative_to(other), **({"dirs_exist_ok": True} if path.is_dir() else {}))
    assert re.search(message, why_torn(mixed))
    with pytest.raises(StoreError, match=f"checkpoint-4 is not a whole checkpoint: .*{message}"):
        check_resumable(mixed, {}, True)
    with caplog.at_level("WARNING"):
        assert newest_checkpoint(tmp_path) == tmp_path / "checkpoint-3"
    assert caplog.text.count("skipping") == 1


def manifest(change):
    """Change a checkpoint's manifest."""

    def apply(checkpoint):
        path = checkpoint / FOLDER / RUN
        path.write_text(json.dumps(change(json.loads(path.read_text()))))

    return apply


def without(key):
    return manifest(lambda run: {name: value for name, value in run.items() if name != key})


EDITS = {
    "a list": (manifest(lambda run: [run]), r"run\.json is damaged: it is not a JSON object"),
    "null": (manifest(lambda run: None), r"run\.json is damaged"),
    "deep": (lambda path: (path / FOLDER / RUN).write_text("[" * 100_000), r"run\.json is .*not JSON"),
    "bytes": (lambda path: (path / FOLDER / RUN).write_bytes(b"\xff\xfe{"), r"run\.json is .*not JSON"),
    "an older version's": (
        without("format"),
        r"run\.json was written by another version of this program \('0\.1\.0'\)",
    ),
    "no step": (without("step"), "'step' is not a JSON int"),
    "no processes": (without("processes"), "'processes' is not a JSON int"),
    "processes in words": (manifest(lambda run: run | {"processes": "1"}), "'processes' is not a JSON int"),
    "truth for a number": (manifest(lambda run: run | {"step": True}), "'step' is not a JSON int"),
    "no settings": (without("config"), "'config' is not a JSON dict"),
    "a list of files": (manifest(lambda run: run | {"files": list(run["files"])}), "'files' is not a JSON dict"),
    "odd marks": (manifest(lambda run: run | {"files": dict.fromkeys(run["files"])}), "is cut short or not the file"),
    "a file elsewhere": (
        manifest(lambda run: run | {"files": {**run["files"], "../whole": [0, ""]}}),
        r"\.\./whole is missing",
    ),
    "no files": (manifest(lambda run: run | {"files": {}}), r"run\.json is not the manifest of a checkpoint"),
    "policy alone": (manifest(lambda run: run | {"config": {"save_only_model": True}}), "it has no optimizer"),
    "a state that is a list": (lambda path: (path / STATE).write_text("[1]"), r"trainer_state\.json is damaged"),
    "a state without a step": (lambda path: (path / STATE).write_text("{}"), r"trainer_state\.json says None"),
    "a flipped byte": (lambda path: flip(path / "model.safetensors", 9), r"model\.safetensors is cut short or not"),
}


def flip(path, place):
    contents = bytearray(path.read_bytes())
    contents[place] ^= 1
    path.write_bytes(contents)


@pytest.mark.parametrize("case", EDITS)
def test_an_edited_checkpoint_is_skipped_with_a_line(tmp_path, whole, case):
    for step in (3, 4):
        shutil.copytree(whole[0] / f"checkpoint-{step}", tmp_path / f"checkpoint-{step}")
    change, message = EDITS[case]
    change(tmp_path / "checkpoint-4")
    assert re.search(message, why_torn(tmp_path / "checkpoint-4"))
    assert newest_checkpoint(tmp_path) == tmp_path / "checkpoint-3"
    set_torn_aside(tmp_path)
    assert [path.name for path in (tmp_path / "_torn").iterdir()] == ["checkpoint-4.0"]


def test_a_folder_with_an_odd_name_is_no_checkpoint(tmp_path, whole):
    shutil.copytree(whole[0] / "checkpoint-3", tmp_path / "checkpoint-3")
    for name in ("checkpoint-²", "checkpoint-", "checkpoint--1", "checkpoint-4 (copy)", "checkpoint-" + "9" * 200):
        (tmp_path / name).mkdir()
    (tmp_path / "checkpoint-5").write_text("a file")
    assert checkpoints(tmp_path) == [(3, tmp_path / "checkpoint-3")]
    assert newest_checkpoint(tmp_path) == tmp_path / "checkpoint-3"


def test_the_stores_digest_is_checked(tmp_path, whole):
    """Of a large file the list of files has samples alone."""
    checkpoint = tmp_path / "checkpoint-4"
    shutil.copytree(whole[0] / "checkpoint-4", checkpoint)
    store = checkpoint / FOLDER / STORE
    flip(store, store.stat().st_size // 2)
    manifest(lambda run: run | {"files": run["files"] | {f"{FOLDER}/{STORE}": fingerprint(store)}})(checkpoint)
    assert why_torn(checkpoint) is None
    with pytest.raises(StoreError, match=r"store\.sqlite is damaged: its SHA-256 is not the one in run\.json"):
        check_resumable(checkpoint, {}, True)


@pytest.mark.parametrize("size", [0, 1, 100, 2**16, 2**20, 2**20 + 1, 2**22, 2**22 + 12345])
def test_a_fingerprint_tells_files_apart(tmp_path, size):
    """Any byte of a small file; of a large one those at its sixteenths and its end, and the size."""
    path = tmp_path / "file"
    contents = bytes(size)
    path.write_bytes(contents)
    mark = fingerprint(path)
    assert mark[0] == size and fingerprint(path) == mark
    places = {0, size // 3, size - 1} if size <= 2**20 else {0, size // 16, 5 * (size // 16) + 9, size - 1}
    for place in places if size else ():
        flip(path, place)
        assert fingerprint(path) != mark
        flip(path, place)
    path.write_bytes(contents + b"\0")
    assert fingerprint(path) != mark


def test_the_manifest_is_written_when_all_processes_have_written_the_rest(tmp_path, tiny_policy, rows, monkeypatch):
    """Another process writes its random state late, as far as this one can see, just before the barrier."""
    trainer = RankBufferTrainer(tiny_policy, config(tmp_path, max_steps=1, save_strategy="steps", save_steps=1), rows)
    checkpoint, seen = tmp_path / "checkpoint-1", []

    def wait():
        if (checkpoint / STATE).is_file():
            seen.append((checkpoint / FOLDER / RUN).is_file())
            (checkpoint / "rng_state_1.pth").write_bytes(b"late")

    monkeypatch.setattr(trainer.accelerator, "wait_for_everyone", wait)
    trainer.train()
    trainer.close()
    assert seen[0] is False
    listed = json.loads((checkpoint / FOLDER / RUN).read_text())["files"]
    assert listed.keys() >= {STATE, "rng_state.pth", "rng_state_1.pth", "scheduler.pt", f"{FOLDER}/{STORE}"}
    assert why_torn(checkpoint) is None


def test_a_checkpoint_that_is_written_over_is_void_first(tmp_path, tiny_policy, rows, whole, monkeypatch):
    shutil.copytree(whole[0] / "checkpoint-4", tmp_path / "checkpoint-4")
    trainer = RankBufferTrainer(tiny_policy, config(tmp_path), rows)

    def fail(*arguments):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("rankbuffer_trl.files.os.replace", fail)
    assert why_torn(tmp_path / "checkpoint-4") is None
    with pytest.raises(StoreError, match="No space left"):
        trainer.save_model(str(tmp_path / "checkpoint-4"), _internal_call=True)
    trainer.close()
    assert why_torn(tmp_path / "checkpoint-4") == "run.json is missing"


def test_a_failed_checkpoint_leaves_the_settings_as_they_were(tmp_path, tiny_policy, rows, monkeypatch):
    settings = config(tmp_path, max_steps=1, save_strategy="steps", save_steps=1, save_total_limit=2)
    trainer = RankBufferTrainer(tiny_policy, settings, rows)

    def fail(*arguments):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("rankbuffer_trl.files.os.replace", fail)
    with pytest.raises(StoreError, match="checkpoint-1 could not be written to"):
        trainer.train()
    trainer.close()
    assert trainer.args.save_total_limit == 2


def test_the_oldest_checkpoints_go_whatever_the_clock_says(tmp_path, tiny_policy, rows, whole):
    """It was set back by an hour since the first two were written."""
    ahead = time.time() + 3600
    for step in (3, 4):
        shutil.copytree(whole[0] / f"checkpoint-{step}", tmp_path / f"checkpoint-{step}")
        os.utime(tmp_path / f"checkpoint-{step}", (ahead + step, ahead + step))
    with pytest.raises(KeyboardInterrupt):
        train(tmp_path, tiny_policy, rows, resume=True, save_total_limit=2, callback=InterruptAt(7))
    assert [step for step, _ in checkpoints(tmp_path)] == [6, 5]
    run = json.loads((tmp_path / "checkpoint-6" / FOLDER / RUN).read_text())
    assert run["config"]["save_total_limit"] == 2


def test_no_copy_of_a_checkpoint_is_counted_or_deleted(tmp_path, tiny_policy, rows, whole):
    copies = ["checkpoint-1-copy", "checkpoint-999-copy", "checkpoint-of-checkpoint-2"]
    for name in ("checkpoint-3", *copies):
        shutil.copytree(whole[0] / "checkpoint-3", tmp_path / name)
    with pytest.raises(KeyboardInterrupt):
        train(tmp_path, tiny_policy, rows, resume=True, save_total_limit=2, callback=InterruptAt(7))
    assert sorted(path.name for path in tmp_path.glob("checkpoint-*")) == sorted(
        [*copies, "checkpoint-5", "checkpoint-6"]
    )


@pytest.mark.parametrize(
    ("limit", "best", "left"),
    [
        (None, 1, [4, 3, 2, 1]),
        (0, 1, [4, 3, 2, 1]),
        (-1, 1, [4, 3, 2, 1]),
        (1, None, [4]),
        (1, 2, [4, 2]),
        (2, 4, [4, 3]),
        (3, 1, [4, 3, 1]),
        (9, 1, [4, 3, 2, 1]),
    ],
)
def test_the_newest_and_the_best_are_left(tmp_path, limit, best, left):
    for step in range(1, 5):
        (tmp_path / f"checkpoint-{step}").mkdir()
    delete_oldest(tmp_path, limit, best and str(tmp_path / f"checkpoint-{best}"))
    assert [step for step, _ in checkpoints(tmp_path)] == left


def test_the_folder_of_a_run_is_no_checkpoint(tmp_path, whole):
    """It holds no optimizer, and its manifest lists the store alone; `save_state` puts a trainer state into it."""
    for name in (FOLDER, "model.safetensors"):
        (shutil.copytree if (whole[0] / name).is_dir() else shutil.copy)(whole[0] / name, tmp_path / name)
    shutil.copy(whole[0] / "checkpoint-12" / STATE, tmp_path / STATE)
    with pytest.raises(StoreError, match=r"run\.json is not the manifest of a checkpoint, since it does not list"):
        check_resumable(tmp_path, {}, True)


@pytest.mark.slow
def test_the_best_checkpoint_stays(tmp_path, tiny_policy, rows):
    settings = dict(eval_strategy="steps", eval_steps=1, save_strategy="steps", save_steps=1, save_total_limit=2)
    args = config(tmp_path, max_steps=4, metric_for_best_model="good", **settings, per_device_eval_batch_size=8)
    trainer = RankBufferTrainer(tiny_policy, args, rows, rows.select(range(1)))
    trainer.evaluate = trainer._evaluate = lambda *args, **kwargs: {"eval_good": -trainer.state.global_step}
    trainer.train()
    trainer.close()
    assert trainer.state.best_model_checkpoint == str(tmp_path / "checkpoint-1")
    assert [step for step, _ in checkpoints(tmp_path)] == [4, 1]


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


def test_a_damaged_live_store_is_named_with_what_helps(tmp_path, tiny_policy, rows, whole):
    shutil.copytree(whole[0] / "checkpoint-11", tmp_path / "checkpoint-11")
    live = tmp_path / LIVE_STORE
    live.parent.mkdir()
    live.write_bytes(b"SQLite format 3\0" + bytes(range(256)) * 40)
    with pytest.raises(StoreError, match=r"live\.sqlite: .*move it away, then resume from a checkpoint"):
        train(tmp_path, tiny_policy, rows, resume=True)
    live.rename(tmp_path / "away")
    assert same(train(tmp_path, tiny_policy, rows, resume=True), whole[1])


CHANGES = {
    "K0": (dict(method_args={"k0": 3}), "method_args .*'k0': 4.*'k0': 3"),
    "method": (dict(method="pointwise"), "method .*'rankbuffer' in the checkpoint, 'pointwise' now"),
    "judge model": (dict(judge_url="http://127.0.0.1:9/v1", judge_model="m"), "judge .*'RubricJudge'.*'m' now"),
    "seed": (dict(seed=4), "seed .*: 3 in the checkpoint, 4 now"),
    "batch": (dict(per_device_train_batch_size=48), "queries_per_generation .*: 3 in the checkpoint, 6 now"),
}


@pytest.mark.parametrize("case", CHANGES)
def test_a_checkpoint_of_another_run_is_refused(tmp_path, tiny_policy, rows, whole, case):
    overrides, message = CHANGES[case]
    with pytest.raises(StoreError, match=rf"belongs to another run:\n(.*\n)*.*{message}(.*\n)*.*resume_with_changes"):
        train(tmp_path, tiny_policy, rows, resume=str(whole[0] / "checkpoint-6"), **overrides)


@pytest.mark.slow
def test_other_data_is_refused_and_taken_when_told(tmp_path, tiny_policy, rows, whole):
    other = [{**row, "rubrics": row["rubrics"][:-1]} if number == 7 else row for number, row in enumerate(rows)]
    data = Dataset.from_list(other, features=rows.features)
    resume = str(whole[0] / "checkpoint-6")
    with pytest.raises(StoreError, match="data_sha256"):
        train(tmp_path, tiny_policy, data, resume=resume)
    table, _ = train(tmp_path, tiny_policy, data, resume=resume, resume_with_changes=True)
    assert len(table["groups"]) == EPOCHS * len(rows)


def test_another_number_of_processes_is_said_and_allowed(whole, caplog):
    checkpoint = whole[0] / "checkpoint-6"
    saved = read_manifest(checkpoint)
    with caplog.at_level("WARNING"):
        assert check_resumable(checkpoint, saved, False) == 6 and not caplog.text
        assert check_resumable(checkpoint, saved | {"processes": 2}, False) == 6
    assert "was saved by 1 processes, now there are 2" in caplog.text


def test_run_json_leaves_out_addresses_and_tokens(tmp_path):
    args = config(tmp_path, judge_url="http://10.1.2.3:9/v1", judge_model="m", hub_token="hf_a_token")
    told = describe({}, 0, {}, args)
    assert told["config"]["judge_model"] == "m" and not {"judge_url", "hub_token"} & told["config"].keys()
    assert not any(secret in json.dumps(told) for secret in ("10.1.2.3", "hf_a_token"))


def test_run_json_tells_what_a_checkpoint_is(whole):
    told = json.loads((whole[0] / "checkpoint-6" / FOLDER / RUN).read_text())
    assert (told["step"], told["method"], told["method_args"]["k0"], told["judge"]) == (
        6,
        "rankbuffer",
        4,
        "RubricJudge",
    )
    assert (told["queries"], told["seed"], told["config"]["learning_rate"]) == (12, 3, 1e-3)
    store = read_store(whole[0] / "checkpoint-6")
    assert told["totals"] == {phase: store.totals(phase).as_dict() for phase in ("train", "eval")}
    calls = store.rows("SELECT sum(outcome = 'parsed'), sum(prompt_tokens) FROM calls WHERE phase = 'train'")
    assert (told["totals"]["train"]["calls"], told["totals"]["train"]["prompt_tokens"]) == next(calls)
    store.close()


def test_the_end_of_a_run_has_its_buffers_as_a_table(whole):
    table = load_dataset("parquet", data_files=str(whole[0] / "buffers.parquet"), split="train")
    store = read_store(whole[0])
    assert len(set(table["query_id"])) == 12
    assert len(table) == sum(len(store.load(id)) for id in store.query_ids())
    store.close()


@pytest.mark.slow
def test_a_new_run_in_an_old_folder_keeps_the_old_buffers_aside(tmp_path, tiny_policy, rows, whole):
    live = tmp_path / LIVE_STORE
    live.parent.mkdir(parents=True)
    shutil.copy(whole[0] / LIVE_STORE, live)
    assert same(train(tmp_path, tiny_policy, rows), whole[1])
    assert contents(live.with_stem("live-1")) == whole[1][0]


@pytest.mark.parametrize(("resume", "old"), [(None, {3, 9}), (3, {9})])
def test_a_runs_newest_checkpoint_is_never_an_old_ones(tmp_path, tiny_policy, rows, whole, caplog, resume, old):
    for step in (3, 9):
        shutil.copytree(whole[0] / f"checkpoint-{step}", tmp_path / f"checkpoint-{step}")
    start = resume or 0
    with pytest.raises(KeyboardInterrupt), caplog.at_level("WARNING"):
        path = resume and str(tmp_path / f"checkpoint-{resume}")
        train(tmp_path, tiny_policy, rows, resume=path, callback=InterruptAt(start + 2))
    assert newest_checkpoint(tmp_path).name == f"checkpoint-{start + 1}"
    assert {path.name for path in (tmp_path / "_old").iterdir()} == {f"checkpoint-{step}.0" for step in old}
    assert caplog.text.count("moved to _old/") == 1


def test_an_evaluation_before_the_first_step_sees_no_old_buffers(tmp_path, tiny_policy, rows, whole):
    evaluation = dict(eval_rows=rows.select(range(2)), eval_strategy="steps", eval_steps=100, eval_on_start=True)
    live = tmp_path / "old" / LIVE_STORE
    live.parent.mkdir(parents=True)
    shutil.copy(whole[0] / LIVE_STORE, live)
    runs = []
    for name in ("old", "new"):
        with pytest.raises(KeyboardInterrupt):
            train(
                tmp_path / name,
                tiny_policy,
                rows,
                callback=InterruptAt(1),
                per_device_eval_batch_size=8,
                **evaluation,
            )
        runs.append(contents(tmp_path / name / LIVE_STORE))
    assert runs[0] == runs[1] and {row[1] for row in runs[0]["calls"]} == {"train", "eval"}


def test_resuming_with_data_in_another_order_is_noticed(tmp_path, tiny_policy, rows, whole):
    shutil.copytree(whole[0] / "checkpoint-6", tmp_path / "checkpoint-6")
    turned = rows.select(range(11, -1, -1))
    with pytest.raises(StoreError, match="data_sha256"):
        train(tmp_path, tiny_policy, turned, resume=True)
    with pytest.raises(RuntimeError, match=r"already visited .* data order"):
        train(tmp_path, tiny_policy, turned, resume=True, resume_with_changes=True)


class TerminateIn(TrainerCallback):
    """SIGTERM to this process at the beginning of a step."""

    def __init__(self, step):
        self.step = step

    def on_step_begin(self, args, state, control, **kwargs):
        if state.global_step == self.step:
            os.kill(os.getpid(), signal.SIGTERM)


@pytest.mark.slow
def test_sigterm_saves_a_checkpoint_at_the_end_of_the_generation(tmp_path, tiny_policy, rows):
    """Two optimizer steps use one generation; the signal comes in the first of them."""
    settings = config(tmp_path, num_train_epochs=2, num_iterations=2)
    before = signal.getsignal(signal.SIGTERM)
    trainer = RankBufferTrainer(tiny_policy, settings, rows, callbacks=[TerminateIn(4)])
    trainer.train()
    assert trainer.interrupted and trainer.state.global_step == 6
    trainer.close()
    assert signal.getsignal(signal.SIGTERM) == before
    with pytest.raises(KeyboardInterrupt):
        train(tmp_path / "other", tiny_policy, rows, callback=InterruptAt(1))
    assert signal.getsignal(signal.SIGTERM) == before
    assert newest_checkpoint(tmp_path) == tmp_path / "checkpoint-6"


class SaveAt(TrainerCallback):
    """A callback of the user's that saves a checkpoint after one step."""

    def __init__(self, step):
        self.step = step

    def on_step_end(self, args, state, control, **kwargs):
        control.should_save = state.global_step == self.step


@pytest.mark.parametrize("method", ["rankbuffer", "pointwise"])
def test_a_checkpoint_inside_a_generation_is_not_resumed(tmp_path, tiny_policy, rows, method):
    """Its queries would be scored twice, and a method without buffers would not notice it."""
    settings = config(tmp_path, max_steps=4, num_iterations=2, method=method)
    for resume in (None, True):
        trainer = RankBufferTrainer(tiny_policy, settings, rows, callbacks=[SaveAt(3)])
        if resume:
            with pytest.raises(StoreError, match="checkpoint-3 was saved inside a generation"):
                trainer.train(resume_from_checkpoint=resume)
        else:
            trainer.train()
        trainer.close()


def test_sigterm_saves_at_an_evaluation_that_finds_nothing_better(tmp_path, tiny_policy, rows):
    """With `save_strategy: best`, the evaluation of a step decides whether to save."""
    settings = dict(save_strategy="best", eval_strategy="steps", eval_steps=1, metric_for_best_model="constant")
    trainer = RankBufferTrainer(
        tiny_policy,
        config(tmp_path, **settings, per_device_eval_batch_size=8),
        rows,
        rows.select(range(1)),
        callbacks=[TerminateIn(2)],
    )
    trainer.evaluate = lambda *args, **kwargs: {"eval_constant": 1.0}
    trainer._evaluate = lambda *args, **kwargs: {"eval_constant": 1.0}
    trainer.train()
    trainer.close()
    assert trainer.interrupted and trainer.state.global_step == 3
    assert newest_checkpoint(tmp_path) == tmp_path / "checkpoint-3"


def test_a_sigterm_counts_twice_only_after_a_while(monkeypatch):
    """The process group's and the launcher's can be one warning."""
    now, ended = [100.0], []
    monkeypatch.setattr("rankbuffer_trl.training.callbacks.time.monotonic", lambda: now[0])
    before = signal.signal(signal.SIGTERM, lambda *_: ended.append(now[0]))
    try:
        callback = StopEarly(lambda step: True)
        callback.on_train_begin(None, None, None)
        for now[0] in (100.0, 101.0, 104.0, 106.0):
            signal.raise_signal(signal.SIGTERM)
        assert ended == [106.0]
        callback.leave()
    finally:
        signal.signal(signal.SIGTERM, before)


@pytest.mark.slow
def test_the_recipe_ends_in_peace_after_a_sigterm_and_goes_on(tmp_path, tiny_policy, data_file, monkeypatch):
    from rankbuffer_trl.training import command
    from rankbuffer_trl.training.parser import RecipeParser

    build = command.build_trainer

    def build_and_warn(*arguments):
        trainer = build(*arguments)
        trainer.add_callback(TerminateIn(1))
        return trainer

    arguments = [
        *("--config", str(QUICKSTART / "quickstart.yaml"), "--model_name_or_path", tiny_policy),
        *("--dataset_name", str(data_file), "--output_dir", str(tmp_path), "--max_steps", "3"),
        *("--per_device_train_batch_size", "24", "--max_completion_length", "16"),
        *("--resume_from_checkpoint", "false"),
    ]
    with monkeypatch.context() as patch:
        patch.setattr(command, "build_trainer", build_and_warn)
        command.run(*RecipeParser().parse_args_and_config(arguments))
    assert [path.name for path in tmp_path.glob("checkpoint-*")] == ["checkpoint-2"]
    assert not (tmp_path / "model.safetensors").exists()
    arguments += ["--resume_from_checkpoint", "true"]
    command.run(*RecipeParser().parse_args_and_config(arguments))
    assert (tmp_path / "model.safetensors").is_file() and len(contents(tmp_path)["groups"]) == 9


def test_the_sampler_gives_the_stock_order_and_any_epoch_on_its_own(rows):
    from trl.trainer.utils import RepeatSampler

    def stock():
        return RepeatSampler(rows, mini_repeat_count=2, batch_size=5, repeat_count=2, shuffle=True, seed=7)

    uninterrupted = stock()
    orders = [list(uninterrupted) for _ in range(4)]
    assert len({tuple(order) for order in orders}) == 4
    for epoch, order in enumerate(orders):
        assert list(EpochSampler(stock(), lambda epoch=epoch: epoch)) == order


def test_history_tells_what_each_group_did_to_its_buffer(whole):
    table = whole[1][0]
    versions = {
        (query_id, step): [a[0] for a in json.loads(anchors)] for query_id, step, anchors, *_ in table["buffers"]
    }
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
