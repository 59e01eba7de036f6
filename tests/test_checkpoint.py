"""Checkpoints: which ones are whole, which belong to the run, and which are deleted."""

import json
import os
import re
import shutil
import time
from pathlib import Path

import pytest
from helpers.sampled import InterruptAt, train
from helpers.scripted import config

from rankbuffer_trl.store import StoreError
from rankbuffer_trl.store.buffer_store import STORE
from rankbuffer_trl.store.places import FOLDER, RUN, STATE, checkpoints, read_store
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
from rankbuffer_trl.training.trainer import RankBufferTrainer


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
