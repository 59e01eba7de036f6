"""Several real processes, started as a user starts them, and how they fail. See also `test_spread.py`."""

import os
import shutil
import signal
import subprocess
import sys

import pytest
from conftest import ROOT
from helpers.scripted import contents
from safetensors.torch import load_file

from rankbuffer_trl.store.places import LIVE_STORE

pytestmark = pytest.mark.slow
ENVIRONMENT = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}"}


def torchrun(processes: int, *arguments: object, timeout: int = 240) -> subprocess.CompletedProcess:
    """Run tests/helpers/scripted.py over gloo."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", processes]
    command += [ROOT / "tests" / "helpers" / "scripted.py", *arguments]
    return subprocess.run(
        [str(part) for part in command], env=ENVIRONMENT, capture_output=True, text=True, timeout=timeout, check=False
    )


def test_an_error_of_the_main_process_stops_every_process(tmp_path, tiny_policy, data_file):
    done = torchrun(2, tmp_path, "--policy", tiny_policy, "--data", data_file, "--per_device", 12, "--answers", 40)
    assert done.returncode != 0
    assert "failing judge at nowhere" in done.stderr and "it stopped answering" in done.stderr
    assert "MainProcessError: the main process failed with JudgeError" in done.stderr


def test_ctrl_c_while_the_judge_hangs_ends_the_run_and_loses_nothing(tmp_path, tiny_policy, data_file):
    arguments = ["--policy", tiny_policy, "--data", str(data_file), "--per_device", "24", "--answers", "80", "--hang"]
    command = [sys.executable, str(ROOT / "tests" / "helpers" / "scripted.py"), str(tmp_path), *arguments]
    with subprocess.Popen(command, env=ENVIRONMENT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as run:
        assert any("the judge hangs" in line for line in run.stdout)
        run.send_signal(signal.SIGINT)
        _, errors = run.communicate(timeout=30)
    assert run.returncode != 0 and "KeyboardInterrupt" in errors
    assert {row[1] for row in contents(tmp_path / LIVE_STORE)["groups"]} == {0, 1}


def zero3(policy, output_dir, *arguments) -> None:
    """The README's command for two processes of ZeRO-3 on the CPU."""
    command = [
        *(sys.executable, "-m", "accelerate.commands.launch", "--config_file", "accelerate_configs/zero3_cpu2.yaml"),
        *("--main_process_port", "0"),  # a free one
        *("recipes/train_rankbuffer.py", "--config", "recipes/quickstart/quickstart.yaml"),
        *("--model_name_or_path", policy, "--output_dir", str(output_dir), *arguments),
    ]
    done = subprocess.run(command, cwd=ROOT, env=ENVIRONMENT, capture_output=True, text=True, timeout=300, check=False)
    # Its exit code is not looked at: gloo's threads sometimes abort the interpreter after all work is done.
    assert (output_dir / "model.safetensors").is_file(), done.stderr[-3000:]


def test_the_quickstart_runs_under_zero3_and_resumes_exactly(tmp_path, tiny_policy):
    short = ["--max_steps", "3", "--save_steps", "1", "--max_completion_length", "16"]  # one step an epoch
    zero3(tiny_policy, tmp_path / "whole", *short)
    checkpoint = tmp_path / "whole" / "checkpoint-1"
    assert {row[1] for row in contents(checkpoint)["groups"]} == {0}
    assert len(contents(tmp_path / "whole" / LIVE_STORE)["groups"]) == 3 * 24

    shutil.copytree(checkpoint, tmp_path / "resumed" / "checkpoint-1")
    zero3(tiny_policy, tmp_path / "resumed", *short, "--resume_from_checkpoint", "true")
    assert contents(tmp_path / "resumed" / LIVE_STORE) == contents(tmp_path / "whole" / LIVE_STORE)
    weights, resumed = (load_file(tmp_path / run / "model.safetensors") for run in ("whole", "resumed"))
    assert all((weights[name] == resumed[name]).all() for name in weights)
