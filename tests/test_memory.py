"""The warning for a policy that lies whole on each GPU: its arithmetic, when it is silent, and its faults."""

import json
from unittest.mock import Mock

import pytest
import torch
from helpers.scripted import config
from transformers import Qwen3Config
from trl import ModelConfig

from rankbuffer_trl.training import memory
from rankbuffer_trl.training.memory import warn_of_memory

QWEN = dict(hidden_size=4096, intermediate_size=12288, num_hidden_layers=36, num_attention_heads=32, vocab_size=151936)


@pytest.fixture
def warned(tmp_path, monkeypatch):
    """Return what is said to a launch: on GPUs of so many GB, with settings and a policy of Qwen3-8B's size."""
    Qwen3Config(
        **QWEN, num_key_value_heads=8, head_dim=128, tie_word_embeddings=False, dtype="bfloat16"
    ).save_pretrained(tmp_path)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    said = Mock()
    monkeypatch.setattr(memory, "logger", said)

    def launch(room=80.0, gpus=8, processes=1, policy=tmp_path, dtype="bfloat16", peft=False, **settings) -> str:
        said.reset_mock()
        device = Mock(total_memory=room * 1e9)
        monkeypatch.setattr(torch.cuda, "get_device_properties", {0: device}.__getitem__)
        args = config(tmp_path / "run")
        for key, value in {"use_cpu": False, "_n_gpu": gpus, "num_processes": processes, **settings}.items():
            setattr(args, key, value)
        warn_of_memory(args, ModelConfig(model_name_or_path=str(policy), dtype=dtype, use_peft=peft))
        return " ".join(call.args[0] for call in said.warning.call_args_list)

    return launch


def test_warn_of_memory_says_what_a_whole_policy_takes_and_what_to_launch(warned):
    share = "Launch with --config_file accelerate_configs/zero3_8gpu.yaml --num_processes 8, which takes 16 GB of each"
    for gpus, processes in ((8, 1), (1, 8)):  # one process that sees eight GPUs; eight processes
        line = warned(gpus=gpus, processes=processes, learning_rate=1e-6)
        assert line == (
            "each GPU gets the whole policy: weights, gradients and Adam of 8.2 billion parameters take 66 of its"
            f" 80 GB, before activations. 16-bit weights without a float32 copy also lose steps of 1e-06. {share}"
        )
    line = warned(dtype="float32", learning_rate=1e-6)
    assert "take 131 of its 80 GB" in line and "16-bit" not in line and share in line
    assert "take 66 of its 80 GB" in warned(dtype="auto"), "as the policy is saved"
    assert "--num_processes 2, which takes 66 GB of each" in warned(gpus=2)
    assert "single_gpu_lora.sh" in warned(gpus=1) and "--config_file" not in warned(gpus=1)
    assert warned(room=1000, learning_rate=9.9e-5) and not warned(room=1000, learning_rate=1e-4)
    assert warned(room=260, dtype="float32") and not warned(room=264, dtype="float32")


def test_warn_of_memory_is_silent_where_the_policy_is_shared_small_or_not_on_a_gpu(warned, monkeypatch):
    for settings in ({"deepspeed_plugin": Mock()}, {"fsdp": ["full_shard"]}, {"peft": True}, {"use_cpu": True}):
        assert warned(**settings) == "", settings
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    assert warned() == ""
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "false")
    assert warned()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert warned() == ""


def test_warn_of_memory_ends_no_run(warned, tmp_path, caplog):
    (tmp_path / "odd").mkdir()
    (tmp_path / "odd" / "config.json").write_text(json.dumps({"model_type": "of_tomorrow"}))
    assert warned(policy=tmp_path / "odd") == ""
    assert "the estimate of memory only informs and could not be made" in caplog.text
