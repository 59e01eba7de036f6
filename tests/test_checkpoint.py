"""Checkpoints: which ones are whole, which belong to the run, which may be loaded, and which are deleted."""

import json
import os
import re
import shutil
import time
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
from helpers.checkpoints import checkpoints_of, newest_checkpoint, why_torn
from helpers.damage import damaged
from helpers.sampled import copy_checkpoints, interrupt_at, train
from helpers.scripted import config
from huggingface_hub._local_folder import get_local_download_paths

from rankbuffer_tools.report import tables
from rankbuffer_tools.report.report import facts_of
from rankbuffer_tools.report.runs import RunConfig, log_and_manifest, open_runs
from rankbuffer_tools.train import command
from rankbuffer_trl.checkpointing._checkpoint import (
    check_not_uploaded,
    check_trusted,
    delete_oldest,
    describe,
    fingerprint,
)
from rankbuffer_trl.checkpointing.manifest import FOLDER, RUN, STATE, CheckpointError, checkpoints, read_manifest
from rankbuffer_trl.errors import RankBufferError
from rankbuffer_trl.judge import RubricJudge
from rankbuffer_trl.settings import REMOVED_ARGUMENTS
from rankbuffer_trl.store._buffer_store import STORE_FILE
from rankbuffer_trl.store._places import read_store
from rankbuffer_trl.training._plan import RunPlan
from rankbuffer_trl.training._state import differences, identity

# Which checkpoints are whole


def halve(path):
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def flip(path, place):
    contents = bytearray(path.read_bytes())
    contents[place] ^= 1
    path.write_bytes(contents)


def put(*patterns):
    """Put files of checkpoint-8 in the place of others."""

    def apply(checkpoint):
        other = checkpoint.parent / "others" / "checkpoint-8"
        for path in {path for pattern in patterns for path in other.glob(pattern)}:
            copy = shutil.copytree if path.is_dir() else shutil.copy
            copy(path, checkpoint / path.relative_to(other), **({"dirs_exist_ok": True} if path.is_dir() else {}))

    return apply


FILES = [
    *("trainer_state.json", "model.safetensors", "optimizer.pt", "rng_state.pth", f"{FOLDER}/{RUN}"),
    *(f"{FOLDER}/{STORE_FILE}", "scheduler.pt", "training_args.bin", "config.json"),
]
ACCIDENTS = {
    f"{file} {accident.__name__}": (
        lambda path, file=file, accident=accident: accident(path / file),
        f"{re.escape(Path(file).name)} is (missing|cut short)",
    )
    for accident in (halve, Path.unlink)
    for file in FILES
}
STEPS = "run.json says {}, trainer_state.json says {}, its name says 4"
MIXTURES = {  # what of checkpoint-8 lies in checkpoint-4
    "buffers and manifest": (put(FOLDER), STEPS.format(8, 4)),
    "all but buffers and manifest": (put("[!r]*", "rng_state.pth"), STEPS.format(4, 8)),
    "everything": (put("*"), STEPS.format(8, 8)),
    "trainer state": (put("trainer_state.json"), "trainer_state.json says 8"),
} | {
    f"{file} of another step": (put(file), f"{file} is .*not the file that was saved at step 4")
    for file in (f"{FOLDER}/{STORE_FILE}", "model.safetensors", "optimizer.pt", "rng_state.pth")
}


def manifest(change):
    """Put another manifest in the place of a checkpoint's."""

    def apply(checkpoint):
        path = checkpoint / FOLDER / RUN
        path.write_text(json.dumps(change(json.loads(path.read_text()))))

    return apply


def telling(**values):
    """Change values of the manifest. `None` leaves a value out."""
    return manifest(lambda run: {name: value for name, value in (run | values).items() if value is not None})


def listing(change):
    """Change the files that the manifest lists."""
    return manifest(lambda run: run | {"files": change(run["files"])})


def fifo(file):
    """Put a FIFO in the place of a file: who opens it waits for ever."""

    def apply(checkpoint):
        (checkpoint / file).unlink()
        os.mkfifo(checkpoint / file)

    return apply


NOT_LISTED = listing(lambda files: {name: mark for name, mark in files.items() if name != f"{FOLDER}/{STORE_FILE}"})
OUT_OF_RANGE = "'step' is below 0 or above all steps"
EDITS = {
    "a list": (manifest(lambda run: [run]), r"run\.json is damaged: it must be an object"),
    "null": (manifest(lambda run: None), r"run\.json is damaged"),
    "deep": (lambda path: (path / FOLDER / RUN).write_text("[" * 100_000), r"run\.json is .*not JSON"),
    "bytes": (lambda path: (path / FOLDER / RUN).write_bytes(b"\xff\xfe{"), r"run\.json is .*not JSON"),
    "an older version's": (telling(format=None), r"was written by another version of this program \('0\.1\.0'\)"),
    **{f"no {key}": (telling(**{key: None}), f"it has no '{key}'") for key in ("step", "processes", "config")},
    **{f"step {step}": (telling(step=step), OUT_OF_RANGE) for step in (-4, 10**18)},
    "processes in words": (telling(processes="1"), "processes must be an integer, got '1'"),
    "truth for a number": (telling(step=True), "step must be an integer, got True"),
    "a list of files": (listing(list), "files must be an object, got a list"),
    "odd marks": (listing(dict.fromkeys), r"files\[.*\] must be a list"),
    "a file elsewhere": (listing(lambda files: files | {"../whole": [0, ""]}), r"\.\./whole is missing"),
    "no files": (telling(files={}), r"run\.json is not the manifest of a checkpoint"),
    "a store that is not listed": (NOT_LISTED, f"does not list {FOLDER}/{STORE_FILE}"),
    **{f"a FIFO for {file}": (fifo(file), f"{file} is missing") for file in (f"{FOLDER}/{STORE_FILE}", STATE)},
    "a FIFO for the manifest": (fifo(f"{FOLDER}/{RUN}"), f"{RUN} is missing"),
    "policy alone": (telling(config={"save_only_model": True}), "it has no optimizer"),
    "a state that is a list": (lambda path: (path / STATE).write_text("[1]"), r"trainer_state\.json is damaged"),
    "a state without a step": (lambda path: (path / STATE).write_text("{}"), r"trainer_state\.json says None"),
    "a flipped byte": (lambda path: flip(path / "model.safetensors", 9), r"model\.safetensors is cut short or not"),
}


@pytest.mark.parametrize("faults", [ACCIDENTS, MIXTURES, EDITS], ids=["accidents", "mixtures", "edits"])
def test_why_torn_names_what_is_wrong_and_the_checkpoint_is_skipped(tmp_path, whole, caplog, faults):
    copy_checkpoints(whole, tmp_path / "others", 4, 8)
    copy_checkpoints(whole, tmp_path, 3)
    for number, (name, (change, message)) in enumerate(faults.items()):
        checkpoint = copy_checkpoints(whole, tmp_path, 4)
        assert why_torn(checkpoint) is None and newest_checkpoint(tmp_path) == checkpoint
        change(checkpoint)
        found = why_torn(checkpoint)
        assert found and re.search(message, found), f"{name}: {found}"
        with pytest.raises(CheckpointError, match=r"checkpoint-4 is not a whole checkpoint: ") as error:
            checkpoints_of(tmp_path).resumable(checkpoint, lambda saved: [], 1, True)
        assert found in str(error.value)
        caplog.clear()
        with caplog.at_level("WARNING"):
            assert newest_checkpoint(tmp_path) == tmp_path / "checkpoint-3", name
        assert caplog.text.count("skipping") == 1
        checkpoints_of(tmp_path).set_torn_aside()
        assert [step for step, _ in checkpoints(tmp_path)] == [3]
        assert (tmp_path / "_torn" / f"checkpoint-4.{number}").is_dir()
    shutil.rmtree(tmp_path / "checkpoint-3")
    with pytest.raises(CheckpointError, match=r"no whole checkpoint in .* to resume from"):
        newest_checkpoint(tmp_path)


def test_a_damaged_manifest_or_log_ends_in_one_line_of_each_reader(tmp_path, whole):
    """Or it is read on, where the damage is a value that could have been there."""
    checkpoint = copy_checkpoints(whole, tmp_path, 4)
    keys = {*RunConfig.__annotations__, "k0", "step"}

    def report() -> None:
        log, manifest = log_and_manifest(checkpoint)
        tables.log_table(log), json.dumps([log, manifest], allow_nan=False)

    for name in (f"{FOLDER}/{RUN}", STATE):
        text = (checkpoint / name).read_text()
        said = {}
        for case, changed in damaged(text, lambda place: len(place) == 1 or place[-1] in keys):
            (checkpoint / name).write_text(changed)
            torn = why_torn(checkpoint)
            try:
                report()
            except RankBufferError as error:
                said[case] = str(error)
            except Exception as error:
                raise AssertionError(f"{name} {case}: {error!r}") from error
            assert "\n" not in f"{said.get(case)}{torn}", f"{name} {case}"
            assert name.startswith(FOLDER) or torn, "the manifest lists the file"
        assert all(f"{Path(name).name} " in line or "method" in line for line in said.values()), said
        assert {"cut at 1", "deep", "digits", "number", "list"} <= said.keys() and len(said) > 30
        (checkpoint / name).write_text(text)
    with open_runs([checkpoint]) as (run,):
        assert facts_of(run, 12)["method"].startswith("rankbuffer (k0 4, ") and len(run.log) == 4


def test_checkpoints_leaves_out_folders_with_odd_names(tmp_path, whole):
    copy_checkpoints(whole, tmp_path, 3)
    for name in ("checkpoint-²", "checkpoint-", "checkpoint--1", "checkpoint-4 (copy)", "checkpoint-" + "9" * 200):
        (tmp_path / name).mkdir()
    (tmp_path / "checkpoint-5").write_text("a file")
    assert checkpoints(tmp_path) == [(3, tmp_path / "checkpoint-3")]
    assert newest_checkpoint(tmp_path) == tmp_path / "checkpoint-3"


def test_resumable_checks_the_digest_of_the_store(tmp_path, whole):
    """Of a large file the list of files has samples alone."""
    checkpoint = copy_checkpoints(whole, tmp_path, 4)
    store = checkpoint / FOLDER / STORE_FILE
    flip(store, store.stat().st_size // 2)
    listing(lambda files: files | {f"{FOLDER}/{STORE_FILE}": fingerprint(store)})(checkpoint)
    assert why_torn(checkpoint) is None
    with pytest.raises(CheckpointError, match=r"store\.sqlite is damaged: its SHA-256 is not the one in run\.json"):
        checkpoints_of(tmp_path).resumable(checkpoint, lambda saved: [], 1, True)


def test_fingerprint_tells_files_apart(tmp_path):
    """Any byte of a small file; of a large one those at its sixteenths and its end, and the size."""
    path = tmp_path / "file"
    for size in (0, 1, 100, 2**16, 2**20, 2**20 + 1, 2**22, 2**22 + 12345):
        path.write_bytes(bytes(size))
        mark = fingerprint(path)
        assert mark[0] == size and fingerprint(path) == mark
        places = {0, size // 3, size - 1} if size <= 2**20 else {0, size // 16, 5 * (size // 16) + 9, size - 1}
        for place in places if size else ():
            flip(path, place)
            assert fingerprint(path) != mark, (size, place)
            flip(path, place)
        path.write_bytes(bytes(size + 1))
        assert fingerprint(path) != mark


# Which are written and deleted


def test_write_manifest_waits_until_all_processes_have_written_the_rest(tmp_path, training, monkeypatch):
    """Another process writes its random state late, as far as this one can see, just before the barrier."""
    trainer = training(max_steps=1, save_strategy="steps", save_steps=1)
    checkpoint, seen = tmp_path / "checkpoint-1", []

    def wait():
        if (checkpoint / STATE).is_file():
            seen.append((checkpoint / FOLDER / RUN).is_file())
            (checkpoint / "rng_state_1.pth").write_bytes(b"late")

    monkeypatch.setattr(trainer.accelerator, "wait_for_everyone", wait)
    trainer.train()
    assert seen[0] is False
    listed = json.loads((checkpoint / FOLDER / RUN).read_text())["files"]
    assert listed.keys() >= {STATE, "rng_state.pth", "rng_state_1.pth", "scheduler.pt", f"{FOLDER}/{STORE_FILE}"}
    assert why_torn(checkpoint) is None


def test_save_checkpoint_that_fails_is_void_first_and_leaves_the_settings(tmp_path, training, whole, monkeypatch):
    old = copy_checkpoints(whole, tmp_path, 4)
    trainer = training(max_steps=1, save_strategy="steps", save_steps=1, save_total_limit=2)
    full = Mock(side_effect=OSError(28, "No space left on device"))
    monkeypatch.setattr("rankbuffer_trl.files.os.replace", full)
    assert why_torn(old) is None
    with pytest.raises(RankBufferError, match="No space left"):
        trainer.save_model(str(old), _internal_call=True)
    assert why_torn(old) == "run.json is missing"
    with pytest.raises(CheckpointError, match="checkpoint-1 could not be written to"):
        trainer.train()
    assert trainer.args.save_total_limit == 2


def test_delete_oldest_goes_by_steps_whatever_the_clock_says_and_keeps_copies(tmp_path, tiny_policy, rows, whole):
    """The clock was set back by an hour since the first two were written."""
    ahead = time.time() + 3600
    copies = ["checkpoint-1-copy", "checkpoint-999-copy", "checkpoint-of-checkpoint-2"]
    copy_checkpoints(whole, tmp_path, 3, 4)
    for step in (3, 4):
        os.utime(tmp_path / f"checkpoint-{step}", (ahead + step, ahead + step))
    for name in copies:
        shutil.copytree(whole[0] / "checkpoint-3", tmp_path / name)
    with pytest.raises(KeyboardInterrupt):
        train(tmp_path, tiny_policy, rows, resume=True, save_total_limit=2, callback=interrupt_at(7))
    left = sorted(path.name for path in tmp_path.glob("checkpoint-*"))
    assert left == sorted([*copies, "checkpoint-5", "checkpoint-6"])
    assert read_manifest(tmp_path / "checkpoint-6")["config"]["save_total_limit"] == 2


def test_delete_oldest_leaves_the_newest_and_the_best(tmp_path):
    cases = [
        *[(None, 1, [4, 3, 2, 1]), (0, 1, [4, 3, 2, 1]), (-1, 1, [4, 3, 2, 1]), (9, 1, [4, 3, 2, 1])],
        *[(1, None, [4]), (1, 2, [4, 2]), (2, 4, [4, 3]), (3, 1, [4, 3, 1])],
    ]
    for limit, best, left in cases:
        for step in range(1, 5):
            (tmp_path / f"checkpoint-{step}").mkdir(exist_ok=True)
        delete_oldest(tmp_path, limit, best and str(tmp_path / f"checkpoint-{best}"))
        assert [step for step, _ in checkpoints(tmp_path)] == left, (limit, best)


@pytest.mark.slow
def test_delete_oldest_is_told_the_best_checkpoint(tmp_path, training, rows):
    settings = dict(eval_strategy="steps", eval_steps=1, save_strategy="steps", save_steps=1, save_total_limit=2)
    settings |= dict(max_steps=4, metric_for_best_model="good", per_device_eval_batch_size=8)
    trainer = training(eval_dataset=rows.select([0]), **settings)
    trainer.evaluate = trainer._evaluate = lambda *args, **kwargs: {"eval_good": -trainer.state.global_step}
    trainer.train()
    assert trainer.state.best_model_checkpoint == str(tmp_path / "checkpoint-1")
    assert [step for step, _ in checkpoints(tmp_path)] == [4, 1]


def test_resumable_says_another_number_of_processes_and_allows_it(whole, caplog):
    checkpoint = whole[0] / "checkpoint-6"
    known = checkpoints_of(whole[0])
    with caplog.at_level("WARNING"):
        assert known.resumable(checkpoint, lambda saved: [], 1, False) == (checkpoint, 6) and not caplog.text
        assert known.resumable(checkpoint, lambda saved: [], 2, False) == (checkpoint, 6)
    assert "was saved by 1 processes, now there are 2" in caplog.text


@dataclass
class Own(RubricJudge):
    word: str
    heads: tuple = (1, 2)
    loud: bool = field(default=False, compare=False)


def test_differences_counts_an_argument_that_is_not_named_as_its_default(monkeypatch):
    """It is newer than the checkpoint, or this version lacks it, or it changes no answer."""
    monkeypatch.setitem(REMOVED_ARGUMENTS, "gone", 7)
    path = f"{__name__}.Own"

    def run(*, judge_args=None, dropout=None, **arguments) -> dict:
        """A newer run. Its `config` is published, without absolute paths, and says nothing beside `judge_args`."""
        judge = "RubricJudge" if judge_args is None else path
        told = {"method": "rankbuffer", "method_args": arguments, "judge": judge, "judge_args": judge_args}
        return told | ({"rubric_dropout": dropout} if dropout else {})  # as if this version had no such setting

    def older(**args) -> dict:
        return run() | {"judge": f"{path} {args}", "config": {"judge_client": path, "judge_client_args": args}}

    own, unlike = run(judge_args={"word": "a", "heads": [1, 2]}), ["judge", "judge_args"]
    for saved, now, named in (
        *((run(), run(k0=4), []), (run(), run(k0=5), ["method_args"]), (run(k0=5), run(), ["method_args"])),
        *((run(gone=7), run(), []), (run(gone=8), run(), ["method_args"]), (run(odd=0), run(), ["method_args"])),
        (run(dropout=0.5), run(), ["rubric_dropout"]),
        *((older(word="a"), own, []), (older(word="a", loud=True), own, [])),
        *((run(judge_args={"word": "/a/model"}) | older(word="model"), run(judge_args={"word": "/b/model"}), []),),
        *((older(word="b"), own, ["judge_args"]), (older(word="a", heads=[1]), own, ["judge_args"])),
        *((older(word="a"), run(), unlike), (run(), own, unlike)),
    ):
        assert [line.split(" (")[0] for line in differences(saved, now)] == named, (saved, now)


def test_samples_that_stand_for_probabilities_bind_a_checkpoint_of_another_number(tmp_path, rows):
    """One is the default, which a checkpoint from before this key has."""
    same = {n: identity(RunPlan.of(config(tmp_path, judge_samples=n), rows, None)) for n in (1, 5)}
    old = {key: value for key, value in same[1].items() if key != "judge_samples"}
    assert not differences(old, same[1])
    assert [line.split(" (")[0] for line in differences(same[1], same[5])] == ["judge_samples"]


def test_describe_leaves_out_addresses_tokens_and_folders(tmp_path):
    servers = {"judge_url": "http://10.1.2.3:9/v1", "vllm_server_base_url": "http://10.1.2.3:8"}
    args = config(tmp_path, **servers, vllm_server_host="10.1.2.3", judge_model="m", hub_token="hf_a_token")
    headers = {"X-Run": "hf_a_token"}
    args.reference_judge = {"judge_url": ["http://10.1.2.3:7/v1"], "judge_headers": headers, "judge_model": "n"}
    told = describe({}, 0, args)
    assert told["config"]["reference_judge"] == {"judge_model": "n"}, "nor inside a setting"
    assert told["config"]["judge_model"] == "m" and not {"judge_url", "hub_token"} & told["config"].keys()
    assert not any(secret in json.dumps(told) for secret in ("10.1.2.3", "hf_a_token", str(tmp_path.parent)))
    assert told["config"]["output_dir"] == tmp_path.name and told["config"]["format_check"] == "none"


def test_write_manifest_tells_what_a_checkpoint_is(whole):
    told = json.loads((whole[0] / "checkpoint-6" / FOLDER / RUN).read_text())
    expected = dict(step=6, method="rankbuffer", judge="RubricJudge", queries=12, seed=3)
    assert expected.items() <= told.items()
    assert (told["method_args"]["k0"], told["config"]["learning_rate"]) == (4, 1e-3)
    store = read_store(whole[0] / "checkpoint-6")
    assert told["totals"] == {phase: store.totals(phase).as_dict() for phase in ("train", "eval")}
    calls = store.rows("SELECT sum(outcome = 'parsed'), sum(prompt_tokens) FROM calls WHERE phase = 'train'")
    assert (told["totals"]["train"]["calls"], told["totals"]["train"]["prompt_tokens"]) == next(calls)
    store.close()


# Which may be loaded: a foreign DeepSpeed or FSDP checkpoint executes code when it is loaded


def make(path, deepspeed=True):
    """What counts in a checkpoint here: DeepSpeed's folder, or plain files."""
    (path / "global_step2" if deepspeed else path / "rankbuffer").mkdir(parents=True)
    (path / "optimizer.pt").touch()
    return path


def refused(checkpoint, output_dir, trusted=False) -> bool:
    try:
        check_trusted(checkpoint, output_dir, trusted)
    except CheckpointError as error:
        assert str(checkpoint) in str(error) and "set trust_checkpoint to true" in str(error)
        return True
    return False


def test_check_trusted_refuses_a_checkpoint_from_elsewhere(tmp_path, monkeypatch):
    run = tmp_path / "run"
    elsewhere = ["run/_from_hub/last-checkpoint", "run/_from_hub/checkpoint-2", "run/last-checkpoint"]
    elsewhere += ["run/checkpoint-2/checkpoint-2", "run/checkpoint-", "other/checkpoint-2", "run-2/checkpoint-2"]
    for place in ["run/checkpoint-2", *elsewhere]:
        checkpoint = make(tmp_path / place)
        assert refused(checkpoint, run) == (place in elsewhere), place
        assert not refused(checkpoint, run, trusted=True)
        assert not refused(make(tmp_path / "plain" / place, deepspeed=False), run)
    (run / "checkpoint-3").symlink_to(tmp_path / "other" / "checkpoint-2")
    assert refused(run / "checkpoint-3", run) and refused(run / ".." / "other" / "checkpoint-2", run)
    monkeypatch.chdir(run)
    for name in ("checkpoint-2", "../run/checkpoint-2"):
        assert not refused(run / name, run) and not refused(Path(name), run)
    for folder in (tmp_path / "fsdp" / "checkpoint-2", run / "checkpoint-4"):
        (make(folder, deepspeed=False) / "optimizer_0").mkdir()
        (folder / "optimizer_0" / ".metadata").touch()
        assert refused(folder, run) == (folder.parent != run), "an FSDP checkpoint is executed, too"


@pytest.mark.parametrize("depth", [0, 1, 3])
def test_check_trusted_notices_a_download_whichever_folder_it_was_told(tmp_path, depth):
    """`hf download --local-dir` got the checkpoint itself, the run's folder, or one above."""
    run = tmp_path / "runs" / "mine"
    checkpoint, other = make(run / "checkpoint-2"), make(run / "checkpoint-3")
    told = [checkpoint, *checkpoint.parents][depth]
    if depth:
        get_local_download_paths(told, "checkpoint-4/latest")
    assert not refused(checkpoint, run)
    get_local_download_paths(told, str((checkpoint / "global_step2" / "a.pt").relative_to(told)))
    assert refused(checkpoint, run)
    assert not refused(other, run)


def test_check_trusted_comes_before_anything_of_a_checkpoint_is_loaded(tmp_path, training, whole):
    foreign = make(tmp_path / "_from_hub" / "last-checkpoint")
    shutil.copytree(whole[0] / "checkpoint-1", foreign, dirs_exist_ok=True)
    trainer = training()
    with pytest.raises(CheckpointError, match=r"did not write.*trust_checkpoint"):
        trainer.train(resume_from_checkpoint=str(foreign))
    assert trainer.store.last_step() is None
    trusting = training("trusting", max_steps=2, num_train_epochs=3, trust_checkpoint=True)
    trusting.train(resume_from_checkpoint=str(foreign))
    assert trusting.state.global_step == 2


def test_the_command_refuses_a_checkpoint_from_elsewhere_before_the_preflight(tmp_path):
    foreign = make(tmp_path / "last-checkpoint")
    found = SimpleNamespace(find=lambda wanted: (Path(wanted), {"step": 2}))
    for changes, message in (
        ({}, "set trust_checkpoint to true"),
        ({"trust_checkpoint": True, "push_to_hub": True}, "every push would upload it again"),
    ):
        args = config(tmp_path, resume_from_checkpoint=str(foreign), **changes)
        with pytest.raises(CheckpointError, match=message):
            command.find_start(SimpleNamespace(args=args, checkpoints=found))


def test_check_not_uploaded_refuses_only_what_a_push_would_upload(tmp_path):
    for name in ("checkpoint-2", "checkpoint-2-copy", "_from_hub/last-checkpoint", "../other/last-checkpoint"):
        check_not_uploaded(tmp_path / name, tmp_path)
    for name in ("last-checkpoint", "checkpoint", "deep/checkpoint-2"):
        with pytest.raises(CheckpointError, match="every push would upload it again"):
            check_not_uploaded(tmp_path / name, tmp_path)
