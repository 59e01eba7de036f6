"""LoRA by peft: trained, saved, pushed, pulled and resumed, in one process and under ZeRO-3 with two."""

import os
import shutil
import signal
import subprocess
import sys

import pytest
import transformers.trainer
from conftest import ROOT
from helpers.fake_hub import FolderHub
from helpers.sampled import InterruptAt, same
from helpers.scripted import config, contents
from huggingface_hub import ModelCard
from peft import LoraConfig, PeftModel
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from rankbuffer_trl.store.places import FOLDER, LIVE_STORE, RUN
from rankbuffer_trl.training.trainer import RankBufferTrainer

pytestmark = pytest.mark.slow
REPO = "somebody/lora"
ADAPTER = "adapter_model.safetensors"


def test_an_adapter_goes_to_the_hub_and_goes_on_from_there(tmp_path, tiny_policy, rows, monkeypatch):
    hub = FolderHub(tmp_path / "hub")
    monkeypatch.setattr(transformers.trainer, "hf_api", lambda: hub)

    def train(folder, resume=None, callbacks=None, **settings):
        args = config(tmp_path / folder, max_steps=6, save_strategy="steps", save_steps=5, **settings)
        lora = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
        trainer = RankBufferTrainer(tiny_policy, args, rows, callbacks=callbacks, peft_config=lora)
        try:
            trainer.train(resume_from_checkpoint=resume)
            trainer.save_model()
        finally:
            trainer.close()
        return contents(tmp_path / folder / LIVE_STORE), load_file(tmp_path / folder / ADAPTER)

    whole = train("whole")
    pushes = dict(push_to_hub=True, hub_model_id=REPO, hub_strategy="checkpoint")
    with pytest.raises(KeyboardInterrupt):
        train("here", callbacks=[InterruptAt(6)], **pushes)
    files = hub.files(REPO)
    assert files >= {
        ADAPTER,
        f"{FOLDER}/{RUN}",
        "README.md",
        f"last-checkpoint/{ADAPTER}",
        f"last-checkpoint/{FOLDER}/{RUN}",
    }
    assert "model.safetensors" not in files, "the adapter alone is saved"
    assert ModelCard.load(hub.root / REPO / "README.md").data.library_name == "peft"

    hub.snapshot_download(REPO, tmp_path / "there", "last-checkpoint/*")
    resumed = train("there", resume=str(tmp_path / "there" / "last-checkpoint"))
    assert same(resumed, whole)
    assert any(weight.abs().max() > 0 for name, weight in resumed[1].items() if "lora_B" in name), "it learned nothing"

    policy = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(tiny_policy), hub.root / REPO)
    assert {name.replace(".default", "") for name in policy.state_dict() if "lora" in name} == set(resumed[1])


def zero3(policy: str, output_dir, *arguments: str) -> None:
    """The recipe with LoRA, in two processes of ZeRO-3 on the CPU."""
    command = [
        *(sys.executable, "-m", "accelerate.commands.launch", "--config_file", "accelerate_configs/zero3_cpu2.yaml"),
        *("--main_process_port", "0"),  # a free one
        *("recipes/train_rankbuffer.py", "--config", "recipes/quickstart/quickstart.yaml"),
        *("--model_name_or_path", policy, "--output_dir", str(output_dir), "--max_completion_length", "16"),
        *("--max_steps", "2", "--save_steps", "1", "--per_device_train_batch_size", "12", "--gradient_checkpointing"),
        *("--use_peft", "--lora_r", "4", "--lora_target_modules", "q_proj", "v_proj", *arguments),
    ]
    output_dir.mkdir(parents=True, exist_ok=True)
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    with (output_dir / "log").open("w") as log:
        run = subprocess.Popen(
            command, cwd=ROOT, env=environment, stdout=log, stderr=subprocess.STDOUT, start_new_session=True
        )
    try:
        run.wait(timeout=240)
    finally:
        if run.poll() is None:
            os.killpg(run.pid, signal.SIGKILL)
            run.wait()
    # The exit code is not looked at: gloo's threads sometimes abort the interpreter after all work is done.
    assert (output_dir / ADAPTER).is_file(), (output_dir / "log").read_text()[-3000:]


def test_an_adapter_under_zero3_resumes_exactly(tmp_path, tiny_policy):
    zero3(tiny_policy, tmp_path / "whole")
    shutil.copytree(tmp_path / "whole" / "checkpoint-1", tmp_path / "resumed" / "checkpoint-1")
    zero3(tiny_policy, tmp_path / "resumed", "--resume_from_checkpoint", "true")
    runs = [
        (contents(tmp_path / run / LIVE_STORE), load_file(tmp_path / run / ADAPTER)) for run in ("whole", "resumed")
    ]
    assert len(runs[0][0]["groups"]) == 2 * 3
    assert same(*runs)
    before = load_file(tmp_path / "whole" / "checkpoint-1" / ADAPTER)
    assert any((before[name] != runs[0][1][name]).any() for name in before), "the second step changed nothing"
