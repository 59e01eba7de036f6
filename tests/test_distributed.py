"""The quickstart under ZeRO-3 with two processes, started as a user starts it. See also `test_resume.py`."""

import os
import pickle
import shutil
import subprocess
import sys
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
from conftest import ROOT
from helpers.scripted import contents
from safetensors.torch import load_file

from rankbuffer_trl.checkpointing._distributed import MainProcessError, StepLeft, on_main_process
from rankbuffer_trl.store._places import LIVE_STORE


def test_on_main_process_gives_every_process_the_result_or_the_error(monkeypatch):
    """What the main process sends is caught here, and handed to the function as another process calls it."""
    sent = []
    module = "rankbuffer_trl.checkpointing._distributed"

    def leave():
        raise StepLeft

    for work, error, others, text in (
        (lambda: 6 * 7, None, None, None),
        (lambda: {}["a fault"], KeyError, MainProcessError, "the main process failed with KeyError: 'a fault'"),
        (leave, StepLeft, StepLeft, ""),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(f"{module}.broadcast_object_list", lambda payload, from_process: sent.append(list(payload)))
            with pytest.raises(error) if error else nullcontext():
                assert on_main_process(work) == 42
            patch.setattr(f"{module}.PartialState", lambda: SimpleNamespace(is_main_process=False))
            patch.setattr(
                f"{module}.broadcast_object_list",
                lambda payload, from_process: payload.__setitem__(slice(None), pickle.loads(pickle.dumps(sent.pop()))),
            )
            with pytest.raises(others, match=text) if others else nullcontext():
                assert on_main_process(lambda: pytest.fail("the main process works alone")) == 42


def zero3(policy, output_dir, *arguments) -> None:
    """The README's command for two processes of ZeRO-3 on the CPU, with short steps."""
    command = [
        *(sys.executable, "-m", "accelerate.commands.launch", "--config_file", "accelerate_configs/zero3_cpu2.yaml"),
        *("--main_process_port", "0"),  # a free one
        *("recipes/train_rankbuffer.py", "--config", "recipes/quickstart/quickstart.yaml"),
        *("--model_name_or_path", policy, "--output_dir", str(output_dir), "--per_device_train_batch_size", "12"),
        *("--max_steps", "2", "--save_steps", "1", "--max_completion_length", "16", *arguments),
    ]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300, check=False)
    # Its exit code is not looked at: gloo's threads sometimes abort the interpreter after all work is done.
    assert (output_dir / "model.safetensors").is_file(), done.stderr[-3000:]


@pytest.mark.slow
def test_a_launched_quickstart_runs_under_zero3_and_resumes_exactly(tmp_path, tiny_policy):
    whole, resumed = tmp_path / "whole", tmp_path / "resumed"
    zero3(tiny_policy, whole)
    assert {row[1] for row in contents(whole / "checkpoint-1")["groups"]} == {0}
    assert len(contents(whole / LIVE_STORE)["groups"]) == 2 * 3
    shutil.copytree(whole / "checkpoint-1", resumed / "checkpoint-1")
    zero3(tiny_policy, resumed, "--resume_from_checkpoint", "true")
    assert contents(resumed / LIVE_STORE) == contents(whole / LIVE_STORE)
    folders = (whole, resumed, whole / "checkpoint-1")
    weights, others, before = (load_file(folder / "model.safetensors") for folder in folders)
    assert all((weights[name] == others[name]).all() for name in weights)
    assert any((weights[name] != before[name]).any() for name in weights), "the second step changed nothing"
