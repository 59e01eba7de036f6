"""Runs that are killed, lose one of two processes, have a full disk or a read-only folder lose nothing."""

import json
import os
import resource
import signal
import subprocess
from contextlib import contextmanager

import pytest
from conftest import ROOT, run_program
from helpers.checkpoints import newest_checkpoint, why_torn
from helpers.rollout_server import RolloutServer
from helpers.sampled import AtStep, train
from helpers.scripted import contents
from helpers.servers import served
from helpers.two_ranks import CASES, FAULT, HELD, ROLLOUTS

from rankbuffer_trl.errors import RankBufferError
from rankbuffer_trl.exact.manifest import CheckpointError
from rankbuffer_trl.store import StoreError
from rankbuffer_trl.store.places import LIVE_STORE

pytestmark = pytest.mark.slow


def test_thirty_kills_in_every_phase_change_nothing(tmp_path, tiny_policy, data_file):
    arguments = (tmp_path / "runs", "--policy", tiny_policy, "--data", data_file, "--kills", 30)
    program = ROOT / "tests" / "helpers" / "kill_loop.py"
    told = json.loads(run_program(program, *arguments, timeout=500).splitlines()[-1])
    print(told)
    assert sum(told["kills"].values()) >= 30
    assert all(told["kills"][phase] for phase in ("generation", "judging", "commit", "checkpoint", "push"))
    assert told["runs"] >= 1


def test_a_process_that_fails_ends_the_other_one_with_a_cause_and_the_run_goes_on(
    tmp_path, tiny_policy, rows, data_file
):
    """In each stage. Nobody kills the processes, and no resumed run takes half a checkpoint for a whole one."""
    texts = [text for row in rows for text in row["responses"]]
    silent = RolloutServer(tiny_policy, texts, hold=lambda number: (number - 1) % (2 * ROLLOUTS) >= HELD)
    with served(silent.app()) as url:
        arguments = (tmp_path / "runs", "--policy", tiny_policy, "--data", data_file, "--url", url)
        output = run_program(ROOT / "tests" / "helpers" / "two_ranks.py", *arguments, timeout=900)
    print(output)
    told = json.loads(output.splitlines()[-1])
    for case in CASES:
        found, log = told[case.name], (tmp_path / "runs" / f"{case.name}.log").read_text()
        signalled = isinstance(case.error, signal.Signals)
        assert found["codes"] == ([0, 0] if signalled else [1, 1]), f"{case.name}: {log[-3000:]}"
        cause = FAULT if case.stage else f"{HELD - ROLLOUTS} of {ROLLOUTS} rollouts came within rollout_timeout=3 s"
        assert ("[end] stopped after step 1 of 3, with " if signalled else cause) in log, case.name
        if case.rank == 0 and not signalled and case.name != "push":
            assert "the main process failed with " in log, f"{case.name}: the other process does not say why it ends"
        assert (found["step"], found["resumed"], found["end"]) == (case.saved, [0], 3), case.name


STEPS = 4  # 12 queries, 3 a step


def run(output_dir, policy, rows, resume=None, callback=None) -> dict:
    train(output_dir, policy, rows, resume, callback, max_steps=STEPS)
    return contents(output_dir / LIVE_STORE)


@pytest.fixture(scope="module")
def four_steps(tmp_path_factory, tiny_policy, data_file):
    from rankbuffer_trl.data.queries import load_queries

    return run(tmp_path_factory.mktemp("whole"), tiny_policy, load_queries(str(data_file)))


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
def test_a_full_disk_is_a_clear_error_and_the_last_checkpoint_is_whole(
    tmp_path, tiny_policy, rows, four_steps, left, what, last
):
    with small_disk(tmp_path / "disk") as disk:
        with pytest.raises(RankBufferError, match=rf"{what}.*(No space left on device|disk is full)"):
            run(disk, tiny_policy, rows, callback=AtStep(3, lambda control: fill(disk, left)))
        (disk / "filler").unlink()
        assert newest_checkpoint(disk).name == f"checkpoint-{last}"
        assert run(disk, tiny_policy, rows, resume=True) == four_steps


def test_a_file_that_cannot_grow_is_a_clear_error_and_the_last_checkpoint_is_whole(
    tmp_path, tiny_policy, rows, four_steps
):
    """As with a quota: the optimizer's state does not fit, the rest does."""
    _, hard = resource.getrlimit(resource.RLIMIT_FSIZE)

    def limit(control):
        size = (tmp_path / "checkpoint-2" / "optimizer.pt").stat().st_size
        resource.setrlimit(resource.RLIMIT_FSIZE, (size - 1000, hard))

    try:
        with pytest.raises(CheckpointError, match="checkpoint-3 could not be written to"):
            run(tmp_path, tiny_policy, rows, callback=AtStep(3, limit))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))
    assert why_torn(tmp_path / "checkpoint-3") and newest_checkpoint(tmp_path).name == "checkpoint-2"
    assert run(tmp_path, tiny_policy, rows, resume=True) == four_steps


@contextmanager
def read_only(folder):
    """Root writes where it may not, but not to a disk that is mounted read-only."""
    if os.geteuid():
        mode = folder.stat().st_mode
        folder.chmod(mode & 0o555)
        yield
        folder.chmod(mode)
    else:
        subprocess.run(["mount", "-o", "remount,ro", str(folder)], check=True)
        yield
        subprocess.run(["mount", "-o", "remount,rw", str(folder)], check=True)


def test_a_read_only_folder_is_a_clear_error(tmp_path, tiny_policy, rows):
    with small_disk(tmp_path / "disk") as disk, read_only(disk):
        with pytest.raises(StoreError, match=r"cannot open the buffer store .*(Read-only|Permission denied)"):
            run(disk / "run", tiny_policy, rows)
        assert list(disk.iterdir()) == []
