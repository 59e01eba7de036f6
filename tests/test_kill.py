"""Runs that are killed, on a full disk or in a read-only folder lose nothing."""

import json
import os
import resource
import subprocess
from contextlib import contextmanager

import pytest
from conftest import ROOT, run_program
from helpers.scripted import config, contents
from transformers import TrainerCallback

from rankbuffer_trl.store import StoreError
from rankbuffer_trl.training.checkpoint import newest_checkpoint, why_torn
from rankbuffer_trl.training.trainer import RankBufferTrainer

pytestmark = pytest.mark.slow

STEPS = 6  # 12 queries, 3 a step; one and a half epochs


def test_thirty_kills_in_every_phase_change_nothing(tmp_path, tiny_policy, data_file):
    arguments = (tmp_path / "runs", "--policy", tiny_policy, "--data", data_file, "--kills", 30)
    told = json.loads(
        run_program(ROOT / "tests" / "helpers" / "kill_loop.py", *arguments, timeout=500).splitlines()[-1]
    )
    print(told)
    assert sum(told["kills"].values()) >= 30
    assert all(told["kills"][phase] for phase in ("generation", "judging", "commit", "checkpoint", "push"))
    assert told["runs"] >= 1


def train(output_dir, policy, rows, resume=None, callback=None, **overrides):
    settings = config(output_dir, max_steps=STEPS, save_strategy="steps", save_steps=1, **overrides)
    trainer = RankBufferTrainer(policy, settings, rows, callbacks=[callback] if callback else None)
    try:
        trainer.train(resume_from_checkpoint=resume)
    finally:
        trainer.close()
    return contents(output_dir)


class AtStep(TrainerCallback):
    """Calls a function at the end of a step, before its checkpoint."""

    def __init__(self, step, call):
        self.step, self.call = step, call

    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step == self.step:
            self.call()


@pytest.fixture(scope="module")
def whole(tmp_path_factory, tiny_policy, data_file):
    from rankbuffer_trl.data.queries import load_queries

    return train(tmp_path_factory.mktemp("whole"), tiny_policy, load_queries(str(data_file)))


@contextmanager
def small_disk(folder, megabytes=8):
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", f"size={megabytes}m", "tmpfs", str(folder)]
    if subprocess.run(command, capture_output=True, check=False).returncode:
        pytest.skip("a small disk needs the right to mount one")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


def fill(folder, left: int) -> None:
    """Leave so many bytes on the disk of `folder`."""
    free = os.statvfs(folder)
    (folder / "filler").write_bytes(bytes(free.f_bavail * free.f_frsize - left))


@pytest.mark.parametrize(
    ("left", "what", "last"),
    [
        (0, "checkpoint-3 could not be written .*: cannot save the buffer store", 2),
        (200_000, "checkpoint-3 could not be written .*: Error while serializing", 2),
        (735_000, "cannot write the buffer store", 3),
    ],
    ids=["buffers", "weights", "commit"],
)
def test_a_full_disk_ends_with_a_clear_error_and_the_last_checkpoint(
    tmp_path, tiny_policy, rows, whole, left, what, last
):
    with small_disk(tmp_path / "disk") as disk:
        with pytest.raises(StoreError, match=rf"{what}.*(No space left on device|disk is full)"):
            train(disk, tiny_policy, rows, callback=AtStep(3, lambda: fill(disk, left)))
        (disk / "filler").unlink()
        assert newest_checkpoint(disk).name == f"checkpoint-{last}"
        assert train(disk, tiny_policy, rows, resume=True) == whole


def test_a_file_that_cannot_grow_ends_with_a_clear_error_and_the_last_checkpoint(tmp_path, tiny_policy, rows, whole):
    """As with a quota: the optimizer's state does not fit, the rest does."""
    _, hard = resource.getrlimit(resource.RLIMIT_FSIZE)

    def limit():
        size = (tmp_path / "checkpoint-2" / "optimizer.pt").stat().st_size
        resource.setrlimit(resource.RLIMIT_FSIZE, (size - 1000, hard))

    try:
        with pytest.raises(StoreError, match="checkpoint-3 could not be written to"):
            train(tmp_path, tiny_policy, rows, callback=AtStep(3, limit))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))
    assert why_torn(tmp_path / "checkpoint-3") and newest_checkpoint(tmp_path).name == "checkpoint-2"
    assert train(tmp_path, tiny_policy, rows, resume=True) == whole


@contextmanager
def read_only(folder):
    """Root writes where it may not, but not to a disk that is mounted read-only."""
    if os.geteuid():
        modes = {path: path.stat().st_mode for path in [folder, *folder.rglob("*")]}
        for path, mode in modes.items():
            path.chmod(mode & 0o555)
        yield
        for path, mode in modes.items():
            path.chmod(mode)
    else:
        subprocess.run(["mount", "-o", "remount,ro", str(folder)], check=True)
        yield
        subprocess.run(["mount", "-o", "remount,rw", str(folder)], check=True)


def test_a_read_only_folder_is_a_clear_error(tmp_path, tiny_policy, rows):
    with small_disk(tmp_path / "disk") as disk, read_only(disk):
        with pytest.raises(StoreError, match=r"cannot open the buffer store .*(Read-only|Permission denied)"):
            train(disk / "run", tiny_policy, rows)
        assert list(disk.iterdir()) == []
