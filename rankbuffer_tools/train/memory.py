"""The memory of a training GPU, by arithmetic from the policy's configuration. No weights are loaded."""

import torch
from transformers import AutoConfig, AutoModelForCausalLM
from trl import ModelConfig

from rankbuffer_trl.training import RankBufferConfig

STATES = 2 + 2 + 12  # bytes a parameter: weights and gradients in bf16; master weights and Adam's moments in float32
# TRL keeps no logits. The output layer's weights are gathered, and their gradient is summed in float32.
HEAD = 2 + 4 + 2  # bytes a weight of the output layer


def memory_line(args: RankBufferConfig, model: ModelConfig) -> str:
    """Say how much memory (1 GB is 1e9 bytes) training takes on one GPU, by the formulas of docs/scaling.md."""
    name, revision = model.model_name_or_path, model.model_revision
    try:
        # A dry run needs no network.
        config = AutoConfig.from_pretrained(name, revision=revision, local_files_only=True)
        with torch.device("meta"):  # shapes without memory
            policy = AutoModelForCausalLM.from_config(config)
    except (OSError, ValueError):
        return (
            "memory of a GPU: not computed, because the policy's config is not on this machine:"
            f" hf download {name} config.json"
        )
    parameters, text, rows = policy.num_parameters(), config.get_text_config(), args.per_device_train_batch_size
    size = 4 if model.dtype == "float32" else 2  # bytes a weight, and a value of the residual stream
    states = size if model.use_peft else STATES  # LoRA's own are below a hundredth of the policy
    if args.beta and not model.use_peft:
        states += size  # the reference policy
    length = (args.max_prompt_length or 0) + args.max_completion_length
    parts = {
        # Several processes share them, as ZeRO-3 does.
        "weights, gradients and optimizer": states * parameters / args.world_size,
        "checkpointed activations": size * text.num_hidden_layers * rows * length * text.hidden_size,
    }
    if not model.use_peft:  # LoRA leaves the output layer as it is
        parts["the output layer's gradient"] = HEAD * text.vocab_size * text.hidden_size
    listed = " + ".join(f"{gigabytes(size)} of {name}" for name, size in parts.items())
    notes = "" if args.gradient_checkpointing else "; without gradient_checkpointing, activations take many times this"
    if args.use_vllm and args.vllm_mode == "colocate":
        notes += f"; vLLM takes {args.vllm_gpu_memory_utilization:g} of the GPU besides"
    return f"memory of a training GPU: about {gigabytes(sum(parts.values()))} = {listed}{notes}"


def gigabytes(size: float) -> str:
    """Write a number of bytes with two digits or more."""
    return f"{size / 1e9:.0f} GB" if size >= 1e10 else f"{size / 1e9:.2g} GB"
